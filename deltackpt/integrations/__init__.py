# SPDX-License-Identifier: Apache-2.0
"""Thin layers that connect the manager to common training loops."""
