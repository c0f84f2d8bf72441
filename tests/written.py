# SPDX-License-Identifier: Apache-2.0
"""Writes arrays and dense leaves as the package does, for tests of readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from job import step_writers

from deltackpt import coordination
from deltackpt.coordination import Coordinator
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.resources.runtime import Runtime
from deltackpt.save.dense_save import DenseLeaves
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import ChunkSums, Digest
from deltackpt.storage.zarr_writer import ZarrWriter


def write_array(
    directory: Path, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, fsync: bool = False
) -> dict[str, ChunkSums]:
    """Writes an array; returns the checksums of its chunks by relative path."""
    found = write_digested(directory, entry, pieces, fsync=fsync)
    return {name: ChunkSums(one.tail, one.blocks) for name, one in found.items() if one.blocks}


def write_digested(
    directory: Path, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, fsync: bool = False
) -> dict[str, Digest]:
    """Writes an array; returns the digests of its files by relative path."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    batch = FileBatch(directory.parent, fsync=fsync)
    array = ZarrWriter(directory, entry, batch)
    for piece in pieces:
        array.write(piece)
    array.finish()
    batch.force()
    return batch.below(directory, relative_to=directory)


def write_dense(
    item_dir: Path, tree: Any, *, meet: Callable[[], None] = lambda: None
) -> dict[str, Digest]:
    """Writes a tree as dense leaves; returns the digests of this process's files.

    Args:
      item_dir: existing directory.
      tree: nested containers of leaves.
      meet: returns when all processes have written.
    """
    batch = FileBatch(item_dir, fsync=True)
    others = step_writers(Coordinator(str(item_dir.parent), 60.0), item_dir.parent)
    leaves = DenseLeaves.capture(tree, coordination.process_index(), Runtime())
    leaves.write(item_dir, batch, others)
    meet()
    if others.process == 0:
        leaves.complete(item_dir, batch, others)
    batch.force()
    return batch.digests
