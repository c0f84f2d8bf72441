# SPDX-License-Identifier: Apache-2.0
"""Merges dense leaves that a chain stores as blocks into Orbax's item.

The values are those that a restore of the step returns, decoded. The item has the layout of a
base's: one database if everything fits into the memory limit; otherwise one per piece, merged like
those of several processes.

OCDBT file names are random. To allow concurrent attempts at the same part, the item and the digests
of its files appear together, by one rename; a later attempt uses what exists.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.format import names
from deltackpt.format.dense_blocks import BlockedValue
from deltackpt.reading import stored_dense
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.resources import memory
from deltackpt.storage import digests, files, ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest, Digests
from deltackpt.storage.ocdbt import ZARRAY, Value
from deltackpt.storage.posix import DurableDir, fsync_path
from deltackpt.upkeep.dense_chain import check_keys
from deltackpt.upkeep.plan import Plan

#: Memory per byte of a piece: decoded, in TensorStore's in-memory files, and the stored data of the
#: chain that is read to verify it.
_COPIES = 4
#: Memory of all readers for stored and decoded data.
_READ_BYTES = 8 << 20

_FOLDED, _DIGESTS = "dense.folded", "digests.msgpack"


def fold(plan: Plan, chain: Sequence[StoredSave], memory_bytes: int) -> dict[str, Digest]:
    """Writes the item of the dense leaves, and fsyncs it.

    Idempotent, like ``fold.fold``.

    Args:
      plan: the plan.
      chain: chain of the step.
      memory_bytes: memory limit in bytes.

    Returns:
      Digests of the item's files by relative path in the base's directory; empty if the step does
      not have dense leaves as blocks.

    Raises:
      StepGone: the step was removed.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory limit is too low.
      OutOfSpace, StorageError: the storage failed.
    """
    if not plan.dense_bytes:
        return {}
    folded = plan.workspace / _FOLDED
    if not folded.is_dir():
        attempt = plan.workspace / f"dense.{uuid.uuid4().hex}"
        try:
            DurableDir(plan.directory, fsync=False).make(attempt / names.DENSE_ITEM)
            _write(attempt, chain, memory_bytes)
            _rename(attempt, folded)
        finally:
            DurableDir(plan.directory).remove(attempt)
    found = digests.read_digests(folded / _DIGESTS)
    return {name: found.digest(name) for name in found.files}


def move(plan: Plan) -> None:
    """Moves the item into the base, unless another attempt has done so."""
    with files.typed_errors(plan.item_dir, "be written"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(plan.workspace / _FOLDED / names.DENSE_ITEM, plan.item_dir / names.DENSE_ITEM)
        fsync_path(plan.item_dir)


def least_memory_bytes(chain: Sequence[StoredSave]) -> int:
    """Returns the minimum memory in bytes for merging the dense leaves of a chain."""
    values = stored_dense.listed(chain[-1])
    if not values:
        return 0
    return _READ_BYTES + _COPIES * max(value.nbytes for value in values)


def _write(attempt: Path, chain: Sequence[StoredSave], memory_bytes: int) -> None:
    least = least_memory_bytes(chain)
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to merge the dense leaves, found "
            f"{memory_bytes:,}; raise it, or use fewer workers"
        )
    item = attempt / names.DENSE_ITEM
    batch = FileBatch(attempt, fsync=True)
    pieces = [*_pieces(stored_dense.listed(chain[-1]), (memory_bytes - _READ_BYTES) // _COPIES)]
    keys: set[str] = set()
    described: dict[str, memoryview] = {}
    for number, wanted in enumerate(pieces):
        found = stored_dense.of_step(chain, wanted.__contains__)
        keys |= found.values.keys()
        described |= {
            key: memoryview(bytes(value))
            for key, value in found.values.items()
            if key.endswith(f"/{ZARRAY}")
        }
        alone = len(pieces) == 1
        database = item if alone else ocdbt.process_directory(item, number)
        ocdbt.write(database, _values(found), batch, nodes_apart=not alone)
        if not number:
            _write_files(item, found, batch)
        del found
        memory.trim_memory()
    # Before the merge, which checks the same: here, the error names the chain.
    check_keys(chain[-1].name, keys, described)
    batch.force()
    if len(pieces) > 1:
        texts = {key: bytes(text) for key, text in described.items()}
        ocdbt.merge(item, range(len(pieces)), texts)
        batch.adopt(item)
    known = batch.below(item, relative_to=attempt)
    path = attempt / _DIGESTS
    batch.write(path, digests.digests_bytes(Digests.of(known)))
    batch.force()


def _pieces(values: Sequence[BlockedValue], most_bytes: int) -> Iterator[set[str]]:
    """Sets of database keys with at most so many bytes; one empty set without keys."""
    piece, nbytes = set[str](), 0
    for value in values:
        if value.file:
            continue
        if piece and nbytes + value.nbytes > most_bytes:
            yield piece
            piece, nbytes = set[str](), 0
        piece.add(value.key)
        nbytes += value.nbytes
    yield piece


def _values(found: DenseValues) -> list[Value]:
    """Values for TensorStore; large ones are not copied."""
    return [Value(key, np.frombuffer(data, np.uint8)) for key, data in sorted(found.values.items())]


def _write_files(item: Path, found: DenseValues, batch: FileBatch) -> None:
    for name, data in found.files.items():
        path = item / name
        batch.make(path.parent)
        batch.write(path, bytes(data))


def _rename(attempt: Path, folded: Path) -> None:
    """Publishes an attempt, unless another one has published the same bits."""
    with files.typed_errors(folded, "be written"):
        try:
            os.rename(attempt, folded)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        fsync_path(folded.parent)
