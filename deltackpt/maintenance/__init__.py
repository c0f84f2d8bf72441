# SPDX-License-Identifier: Apache-2.0
"""Maintenance of checkpoint directories: compaction, garbage collection, verification, doctor."""
