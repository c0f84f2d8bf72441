# SPDX-License-Identifier: Apache-2.0
"""Inspect checkpoint directories, without jax, Orbax or an accelerator.

``open`` lists a directory. Everything else is lazy: a step reads the manifests of its chain, and
indexing reads only the blocks that contain the requested rows. Every block is verified.

Examples:
  >>> import deltackpt.inspect
  >>> ck = deltackpt.inspect.open("/data/run-17")  # doctest: +SKIP
  >>> ck.at(1200)["tables/users"][[3, 5, 8]]  # doctest: +SKIP
"""

from deltackpt.inspect.changes import Diff, TableDiff
from deltackpt.inspect.checkpoints import Checkpoints, open
from deltackpt.inspect.dense import DenseItem, DenseLeaf
from deltackpt.inspect.dense_of_blocks import SavedLeaf
from deltackpt.inspect.history import History
from deltackpt.inspect.lazy import LazyArray
from deltackpt.inspect.logs import ForkPoint, Wal, WalEpoch
from deltackpt.inspect.save import Save
from deltackpt.inspect.statistics import Statistics
from deltackpt.inspect.step import Step, Table

__all__ = [
    "Checkpoints",
    "DenseItem",
    "DenseLeaf",
    "Diff",
    "ForkPoint",
    "History",
    "LazyArray",
    "Save",
    "SavedLeaf",
    "Statistics",
    "Step",
    "Table",
    "TableDiff",
    "Wal",
    "WalEpoch",
    "open",
]
