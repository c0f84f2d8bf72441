# SPDX-License-Identifier: Apache-2.0
"""A test kit for training programs, stores, replication tiers and codecs.

``TrainingRun`` trains a small state and keeps an exact copy of every step. ``Disk`` fails, pauses,
shortens or records what this process does to a directory. ``MemoryStore`` is the reference store.
``node_process`` runs a node store. Only ``deltackpt.testing.store_suite`` needs pytest and
hypothesis.
"""

from __future__ import annotations

from deltackpt.testing.faulty_disk import (
    STEP_FILES,
    Disk,
    DiskCall,
    Pause,
    failing_saves,
    paused_saves,
)
from deltackpt.testing.memory_store import MemoryStore
from deltackpt.testing.node_process import NodeProcess, node_process
from deltackpt.testing.training_run import TrainingRun

__all__ = [
    "STEP_FILES",
    "Disk",
    "DiskCall",
    "Pause",
    "MemoryStore",
    "NodeProcess",
    "TrainingRun",
    "failing_saves",
    "paused_saves",
    "node_process",
]
