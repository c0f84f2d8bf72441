# SPDX-License-Identifier: Apache-2.0
"""Inspect checkpoint directories, without jax, Orbax or an accelerator.

``open`` lists a directory. Everything else is lazy: a step reads the manifests of its chain, and
indexing reads only the blocks that contain the requested rows. Every block is verified.

Examples:
  >>> import deltackpt.inspect
  >>> ck = deltackpt.inspect.open("/data/run-17")  # doctest: +SKIP
  >>> ck.at(1200)["tables/users"][[3, 5, 8]]  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes

if TYPE_CHECKING:
    from deltackpt.inspect.changes import Diff, TableDiff
    from deltackpt.inspect.checkpoints import Checkpoints, open
    from deltackpt.inspect.dense_items import DenseItem, DenseLeaf, SavedLeaf
    from deltackpt.inspect.descriptions import ForkPoint, Save, Wal, WalEpoch
    from deltackpt.inspect.history import History
    from deltackpt.inspect.lazy import LazyArray, Statistics
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

_MODULES = {
    ".changes": ("Diff", "TableDiff"),
    ".checkpoints": ("Checkpoints", "open"),
    ".dense_items": ("DenseItem", "DenseLeaf", "SavedLeaf"),
    ".descriptions": ("ForkPoint", "Save", "Wal", "WalEpoch"),
    ".history": ("History",),
    ".lazy": ("LazyArray", "Statistics"),
    ".step": ("Step", "Table"),
}
# Imported lazily: listing a directory needs few of them.
__getattr__ = attributes(
    __name__, {name: module for module, names in _MODULES.items() for name in names}
)
