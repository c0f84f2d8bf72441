# SPDX-License-Identifier: Apache-2.0
"""Replication of checkpoints to other storage: extents, peers' memory, and buckets."""

from deltackpt.options import Copies, Erasure, Extents

__all__ = ["Copies", "Erasure", "Extents"]
