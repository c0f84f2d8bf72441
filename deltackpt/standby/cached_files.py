# SPDX-License-Identifier: Apache-2.0
"""Files of a state other than its tables, held in memory: dense leaves, items, digests.

They are the bytes in storage, checked when they are read; the contents of a recovery point are held
as files too. Memory is never written again, so a reader may keep a mapping indefinitely.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt.format import naming
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import BlockedValue, Key
from deltackpt.reading import chains, dense_state, stored_dense, stored_saves
from deltackpt.reading.stored_dense import DenseValues, shape_of
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.standby.shared_memory import SharedMemory
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest

_BYTES = np.dtype(np.uint8)
#: Alignment of files, so that their bytes can be viewed as arrays.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """A file in memory."""

    name: str  # POSIX path below the step.
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class CachedFiles:
    """The files of one step or recovery point, in memory."""

    memory: SharedMemory
    index: tuple[CachedFile, ...]  # In memory order.
    dtypes: Mapping[Key, str] = dataclasses.field(default_factory=dict)  # Of dense blocks.

    @property
    def dense(self) -> DenseValues:
        """The dense leaves that the step stores as blocks."""
        files = {file.name: self.array(file) for file in self.index}
        return dense_state.dense_of(files, dense_state.STEP)._replace(dtypes=self.dtypes)

    def array(self, file: CachedFile) -> np.ndarray:
        """Returns the bytes of a file."""
        return self.memory.array(file.offset, (file.nbytes,), _BYTES)


def read(
    save: StoredSave,
    most_bytes: int,
    before: CachedFiles | None = None,  # Of an earlier step: its dense leaves are not read again.
    newer: Sequence[StoredSave] = (),  # From that step to this one, oldest first.
) -> CachedFiles | None:
    """Reads and verifies the dense leaves of a step, and the files that its own digests cover.

    Returns None if the step has no such digests, or the files exceed ``most_bytes``.
    """
    if "step" not in save.head.digests:
        return None
    step_dir, shown = save.step_dir, save.step_dir.name
    heads: dict[str, bytes] = {}

    def read_head(name: str) -> bytes:
        if name == naming.STEP_DIGESTS and save.head.files:
            known = {path: Digest(*of) for path, of in save.head.files.items()}
            heads[name] = digests.digests_bytes(known)
        else:
            heads[name] = (step_dir / name).read(f"{shown}/{name}")
        return heads[name]

    # Digests in a manifest become a file, since readers of the memory may lack that manifest.
    wanted = digests.parse_step_digests(read_head, {}, shown)
    lengths = {name: len(data) for name, data in heads.items()}
    lengths |= {name: found.length for name, found in wanted.items() if name not in heads}
    values = {_name(value): value for value in stored_dense.listed(save)}
    held = _room(lengths, most_bytes, values)
    if held is None:
        return None
    try:
        held.memory.start_write()
        if values:
            _fill_dense(held, save, before, newer)
        for file in held.index:
            if file.name not in lengths:
                continue
            out, at, name = held.array(file), step_dir / file.name, f"{shown}/{file.name}"
            if file.name in heads:
                out[:] = np.frombuffer(heads[file.name], np.uint8)
            else:
                with at.missing_is_damage(name):
                    at.store.read_into(at.key, 0, [out.data], whole=True)
            if file.name in wanted:
                digests.check_bytes(out.data, wanted[file.name], name)
        stored_saves.check_exists(save)
        held.memory.end_write()
    except BaseException:
        held.memory.close()
        raise
    return held


def store(contents: Mapping[str, bytes | memoryview], most_bytes: int) -> CachedFiles | None:
    """Copies file contents to new memory; returns None if they exceed ``most_bytes``."""
    views = {name: memoryview(data) for name, data in contents.items()}
    held = _room({name: view.nbytes for name, view in views.items()}, most_bytes)
    if held is None:
        return None
    held.memory.start_write()
    for file in held.index:
        held.array(file)[:] = np.frombuffer(views[file.name], np.uint8)
    held.memory.end_write()
    return held


def _fill_dense(
    held: CachedFiles, save: StoredSave, before: CachedFiles | None, newer: Sequence[StoredSave]
) -> None:
    """Reads the dense leaves of a step into the memory of its files."""
    offsets = {file.name: file.offset for file in held.index}

    def room(value: BlockedValue) -> np.ndarray:
        return held.memory.array(offsets[_name(value)], shape_of(value), dtype_of(value.dtype))

    found = None
    if before is not None and before.dtypes and newer:
        found = dense_state.after(before.dense, newer, room=room)
    if found is None:
        older = save.needs_older_dense
        chain = chains.read_chain(save.step_dir, save.item) if older else [save]
        found = stored_dense.open_values(chain, room=room)
    for key, data in held.dense.items():
        out, own = np.frombuffer(data, np.uint8), np.frombuffer(found.get(key) or b"", np.uint8)
        # Values that did not change, and those of a new base, are in other memory.
        if own.ctypes.data != out.ctypes.data:
            np.copyto(out, own)


def _name(value: BlockedValue) -> str:
    return f"{dense_state.STEP}{dense_state.name_of(value.key, file=value.file)}"


def _room(
    lengths: Mapping[str, int], most_bytes: int, values: Mapping[str, BlockedValue] = {}
) -> CachedFiles | None:
    """Memory for files of given lengths, and for dense leaves; None if they exceed the maximum."""
    sizes = dict(lengths)
    lengths = {**lengths, **{name: value.nbytes for name, value in values.items()}}
    for name, value in values.items():
        sizes[name] = math.prod(shape_of(value)) * dtype_of(value.dtype).itemsize
    aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
    ends = list(itertools.accumulate(aligned, initial=0))
    if ends[-1] > most_bytes:
        return None
    index = tuple(CachedFile(name, at, size) for (name, size), at in zip(lengths.items(), ends))
    dtypes = {(value.file, value.key): value.dtype for value in values.values()}
    return CachedFiles(SharedMemory(ends[-1]), index, dtypes)
