# SPDX-License-Identifier: Apache-2.0
"""Files of a state other than its tables, held in memory: dense leaves, items, digests.

A step's files are the bytes in storage, checked against its digests when they are read. Readers
check and decode them like files from storage. The other contents of a recovery point are held as
files too. Each state has its own memory, which is never written again, so a reader may keep a
mapping indefinitely.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.format.dense_blocks import BlockedValue
from deltackpt.reading import saves
from deltackpt.reading.saves import StoredSave
from deltackpt.standby.memory import SharedMemory
from deltackpt.storage import digests

_BYTES = np.dtype(np.uint8)
#: Alignment of files, so that their bytes can be viewed as arrays.
_ALIGNMENT = 64


class Room(NamedTuple):
    """The length of a file, and the bytes it occupies."""

    nbytes: int
    taken: int


class Dense(Protocol):
    """Dense leaves that are not stored as files of a step; see ``standby.dense``."""

    @property
    def values(self) -> Mapping[str, BlockedValue]:
        """Values of the item, by file name."""
        ...

    @property
    def rooms(self) -> Mapping[str, Room]:
        """Returns the length of each file."""
        ...

    def fill(self, held: HeldFiles) -> None:
        """Reads and verifies the files into writable memory."""
        ...


@dataclasses.dataclass(frozen=True)
class HeldFile:
    """A file in memory.

    Attributes:
      name: its POSIX path below the step.
      offset: its offset in bytes.
      nbytes: its length in bytes.
    """

    name: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class HeldFiles:
    """The files of one step or recovery point, in memory.

    Attributes:
      memory: the memory that holds them.
      index: their positions, in memory order.
      values: the files that are values of the dense item in blocks, by name.
    """

    memory: SharedMemory
    index: tuple[HeldFile, ...]
    values: Mapping[str, BlockedValue] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return self.memory.nbytes

    def array(self, file: HeldFile) -> np.ndarray:
        """Returns the bytes of a file."""
        return self.memory.array(file.offset, (file.nbytes,), _BYTES)

    def close(self) -> None:
        """Releases the memory; see ``SharedMemory.close``."""
        self.memory.close()


def read(save: StoredSave, most_bytes: int, dense: Dense | None = None) -> HeldFiles | None:
    """Reads and verifies the files of a step that its own digests cover.

    Args:
      save: the step.
      most_bytes: maximum total size.
      dense: its dense leaves, if they are blocks instead of files.

    Returns:
      The files; None if the step has no such digests, or the files exceed the maximum.

    Raises:
      Damaged: one is missing or altered.
      StepGone: another step has replaced this one.
    """
    if "step" not in save.head.digests:
        return None
    step_dir, shown = save.step_dir, save.step_dir.name
    heads: dict[str, bytes] = {}

    def read_head(name: str) -> bytes:
        heads[name] = (step_dir / name).read(f"{shown}/{name}")
        return heads[name]

    wanted = digests.of_step(read_head, shown)
    lengths = {name: len(data) for name, data in heads.items()}
    lengths |= {name: digest.length for name, digest in wanted.items()}
    held = _room(lengths, most_bytes, {} if dense is None else dense.rooms)
    if held is None:
        return None
    if dense is not None:
        held = dataclasses.replace(held, values=dense.values)
    try:
        held.memory.begin_write()
        if dense is not None:
            dense.fill(held)
        for file in held.index:
            if file.name not in lengths:
                continue
            out, at, name = held.array(file), step_dir / file.name, f"{shown}/{file.name}"
            with at.missing_is_damage(name):
                at.store.read_into(at.key, 0, [out.data], whole=True)
            if file.name in wanted:
                digests.check_bytes(out.data, wanted[file.name], name)
        saves.check_stands(save)
        held.memory.end_write()
    except BaseException:
        held.close()
        raise
    return held


def hold(contents: Mapping[str, bytes | memoryview], most_bytes: int) -> HeldFiles | None:
    """Stores files that were read.

    Args:
      contents: bytes of each file, by name.
      most_bytes: maximum total size.

    Returns:
      The files; None if they exceed the maximum.
    """
    views = {name: memoryview(data) for name, data in contents.items()}
    held = _room({name: view.nbytes for name, view in views.items()}, most_bytes)
    if held is None:
        return None
    held.memory.begin_write()
    for file in held.index:
        held.array(file)[:] = np.frombuffer(views[file.name], np.uint8)
    held.memory.end_write()
    return held


def _room(
    lengths: Mapping[str, int], most_bytes: int, rooms: Mapping[str, Room] = {}
) -> HeldFiles | None:
    """Memory for files of given lengths; None if they exceed the maximum.

    Args:
      lengths: length of each file, by name.
      most_bytes: maximum total size.
      rooms: reserved size of each file that occupies more than its length.
    """
    wanted = {**{name: Room(nbytes, nbytes) for name, nbytes in lengths.items()}, **rooms}
    taken = (-(-one.taken // _ALIGNMENT) * _ALIGNMENT for one in wanted.values())
    ends = list(itertools.accumulate(taken, initial=0))
    if ends[-1] > most_bytes:
        return None
    index = tuple(
        HeldFile(name, start, one.nbytes) for (name, one), start in zip(wanted.items(), ends)
    )
    return HeldFiles(SharedMemory(ends[-1]), index)
