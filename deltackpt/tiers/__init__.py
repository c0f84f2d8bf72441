# SPDX-License-Identifier: Apache-2.0
"""Whole saves in other places than the root."""
