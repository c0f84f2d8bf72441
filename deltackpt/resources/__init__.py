# SPDX-License-Identifier: Apache-2.0
"""Reusable memory, and limits on bytes in flight."""
