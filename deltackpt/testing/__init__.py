# SPDX-License-Identifier: Apache-2.0
"""A test kit for training programs, stores, replication tiers and codecs.

``TrainingRun`` trains a small state and keeps an exact copy of every step. ``Disk`` fails, pauses,
shortens or records what this process does to a directory. ``MemoryStore`` is the reference store.
``JournalModel`` runs trainers, compactors and readers of one journal in random orders.
``node_process`` runs a node store. ``stored_chunks`` locates the arrays of a step. Only
``deltackpt.testing.store_suite`` needs pytest and hypothesis.
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
from deltackpt.testing.journal_model import JournalModel
from deltackpt.testing.memory_store import MemoryStore
from deltackpt.testing.node_process import NodeProcess, node_process
from deltackpt.testing.stored_chunks import StoredChunk, stored_chunks
from deltackpt.testing.training_run import TrainingRun

__all__ = [
    "STEP_FILES",
    "Disk",
    "DiskCall",
    "Pause",
    "JournalModel",
    "MemoryStore",
    "NodeProcess",
    "StoredChunk",
    "TrainingRun",
    "failing_saves",
    "paused_saves",
    "node_process",
    "stored_chunks",
]
