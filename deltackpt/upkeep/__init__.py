# SPDX-License-Identifier: Apache-2.0
"""Compacting, collecting, verifying and diagnosing a root."""
