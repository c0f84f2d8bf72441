# SPDX-License-Identifier: Apache-2.0
"""Layers: files that hold the rows, blocks and items of one save or WAL record."""
