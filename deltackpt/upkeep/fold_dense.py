# SPDX-License-Identifier: Apache-2.0
"""Folds dense leaves that a chain holds as blocks into Orbax's item again.

The values are what a restore of the step gives, decoded, and the item is laid out as that of a
base: in one database where all of it fits into the memory, else in one for each piece that does,
merged as those of several processes are.

OCDBT names its files at random. So that a part may be folded twice at a time, the item and the
digests of its files appear together, by one rename: whoever comes second takes what is there.
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
from deltackpt.reading import dense_values
from deltackpt.reading.dense_values import DenseValues
from deltackpt.reading.saves import StoredSave
from deltackpt.storage import digests, files, ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest, Digests
from deltackpt.storage.ocdbt import ZARRAY, Value
from deltackpt.upkeep.dense_chain import check_keys
from deltackpt.upkeep.plan import Plan

#: Of the bytes of a piece: decoded, and in the files that TensorStore makes of them in memory.
_COPIES = 2
#: What is read at a time, as stored and decoded, by all readers.
_READ_BYTES = 8 << 20

_FOLDED, _DIGESTS = "dense.folded", "digests.msgpack"


def fold(plan: Plan, chain: Sequence[StoredSave], memory_bytes: int) -> dict[str, Digest]:
    """Writes the item of the dense leaves; what it wrote is on disk when it returns.

    Idempotent, as ``fold.fold``.

    Args:
      plan: of ``plan.plan``.
      chain: of the step.
      memory_bytes: most memory that it takes.

    Returns:
      Digests of the item's files by their paths below the base's directory; none where the step
      has no dense leaves as blocks.

    Raises:
      StepGone: the step was removed.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory does not suffice.
      OutOfSpace, StorageError: the store refused.
    """
    if not plan.dense_bytes:
        return {}
    folded = plan.workspace / _FOLDED
    if not folded.is_dir():
        attempt = plan.workspace / f"dense.{uuid.uuid4().hex}"
        try:
            _write(attempt, chain, memory_bytes)
            _rename(attempt, folded)
        finally:
            files.remove_tree(attempt)
    found = digests.read_digests(folded / _DIGESTS)
    return {name: found.digest(name) for name in found.files}


def move(plan: Plan) -> None:
    """Moves the item to where the base is put together; nothing where another attempt has."""
    with files.typed_errors(plan.item_dir, "be written"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(plan.workspace / _FOLDED / names.DENSE_ITEM, plan.item_dir / names.DENSE_ITEM)
        files.fsync_path(plan.item_dir)


def least_memory_bytes(chain: Sequence[StoredSave]) -> int:
    """The least memory in which the dense leaves of a chain can be folded."""
    values = dense_values.listed(chain[-1])
    if not values:
        return 0
    return _READ_BYTES + _COPIES * max(value.nbytes for value in values)


def _write(attempt: Path, chain: Sequence[StoredSave], memory_bytes: int) -> None:
    least = least_memory_bytes(chain)
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to fold the dense leaves, found "
            f"{memory_bytes:,}; give it more, or use fewer workers"
        )
    item = attempt / names.DENSE_ITEM
    with files.typed_errors(item, "make a directory"):
        item.mkdir(parents=True)
    batch = FileBatch(attempt, fsync=True)
    pieces = [*_pieces(dense_values.listed(chain[-1]), (memory_bytes - _READ_BYTES) // _COPIES)]
    keys: set[str] = set()
    described: dict[str, memoryview] = {}
    for number, wanted in enumerate(pieces):
        found = dense_values.of_step(chain, wanted.__contains__)
        keys |= found.values.keys()
        described |= {
            key: value for key, value in found.values.items() if key.endswith(f"/{ZARRAY}")
        }
        alone = len(pieces) == 1
        database = item if alone else ocdbt.process_directory(item, number)
        ocdbt.write(database, _values(found), batch, nodes_apart=not alone)
        if not number:
            _write_files(item, found, batch)
    # Before the merge, which checks the same: what is wrong is of the chain, not of the files here.
    check_keys(chain[-1].name, keys, described)
    batch.force()
    if len(pieces) > 1:
        arrays = [key.removesuffix(f"/{ZARRAY}") for key in described]
        ocdbt.merge(item, range(len(pieces)), arrays)
        batch.adopt(item)
    known = batch.below(item, relative_to=attempt)
    path = attempt / _DIGESTS
    batch.write(path, digests.digests_bytes(Digests.of(known)))
    batch.force()


def _pieces(values: Sequence[BlockedValue], most_bytes: int) -> Iterator[set[str]]:
    """Keys of the database, of as many bytes at a time; of an item without any, none once."""
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
    """What TensorStore is given: large values as they are in memory."""
    return [Value(key, np.frombuffer(data, np.uint8)) for key, data in sorted(found.values.items())]


def _write_files(item: Path, found: DenseValues, batch: FileBatch) -> None:
    for name, data in found.files.items():
        path = item / name
        batch.make(path.parent)
        batch.write(path, bytes(data))


def _rename(attempt: Path, folded: Path) -> None:
    """Makes an attempt the item; another one may have come first, whose bits are the same."""
    with files.typed_errors(folded, "be written"):
        try:
            os.rename(attempt, folded)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        files.fsync_path(folded.parent)
