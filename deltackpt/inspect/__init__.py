# SPDX-License-Identifier: Apache-2.0
"""Look inside checkpoint directories; neither jax, nor Orbax, nor an accelerator is needed.

``open`` lists a directory. What is asked for afterwards reads what it needs and no more: the
manifests of a step's chain, and of their arrays the blocks that hold the rows asked for, each
verified.

Example:
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
from deltackpt.inspect.logs import Log, Stretch
from deltackpt.inspect.save import Save
from deltackpt.inspect.statistics import Statistics
from deltackpt.inspect.step import Step, Table

__all__ = [
    "Checkpoints",
    "DenseItem",
    "DenseLeaf",
    "Diff",
    "History",
    "LazyArray",
    "Log",
    "Save",
    "SavedLeaf",
    "Statistics",
    "Step",
    "Stretch",
    "Table",
    "TableDiff",
    "open",
]
