# SPDX-License-Identifier: Apache-2.0
"""Detects which rows changed: stamps, bit comparison and fingerprints."""
