# SPDX-License-Identifier: Apache-2.0
"""The files beside the tables of a state, held in memory: dense leaves, further items, digests.

Those of a step are the bytes that storage has, checked against its digests when they are read, so
that whoever gets them checks and decodes them as it would those of storage. What a point of the log
has beside its tables is held as files, too. Each state's lie in memory of their own, which is never
written again: a reader may keep a mapping for as long as it wants.
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
#: Of the places of files, whose bytes may be looked at as numbers.
_ALIGNMENT = 64


class Room(NamedTuple):
    """How long a file is, and how many bytes it takes."""

    nbytes: int
    taken: int


class Dense(Protocol):
    """Dense leaves that are no files of a step: see ``standby.dense``."""

    @property
    def values(self) -> Mapping[str, BlockedValue]:
        """The values of the item, by the names of the files that they are held as."""
        ...

    @property
    def rooms(self) -> Mapping[str, Room]:
        """How long these files are."""
        ...

    def fill(self, held: HeldFiles) -> None:
        """Reads and checks them; their memory may be written."""
        ...


@dataclasses.dataclass(frozen=True)
class HeldFile:
    """A file in memory.

    Attributes:
      name: its posix path below the step.
      offset: where it begins, in bytes.
      nbytes: how long it is.
    """

    name: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class HeldFiles:
    """The files of one step, or point, in memory.

    Attributes:
      memory: that holds them.
      index: where in it, by the order in which they lie.
      values: which of them are values of the dense item that blocks make up, by their names.
    """

    memory: SharedMemory
    index: tuple[HeldFile, ...]
    values: Mapping[str, BlockedValue] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self.memory.nbytes

    def array(self, file: HeldFile) -> np.ndarray:
        """The bytes of a file."""
        return self.memory.array(file.offset, (file.nbytes,), _BYTES)

    def close(self) -> None:
        """Gives the memory back; see ``SharedMemory.close``."""
        self.memory.close()


def read(save: StoredSave, most_bytes: int, dense: Dense | None = None) -> HeldFiles | None:
    """Reads and checks the files of a step that its own digests cover.

    Args:
      save: the step.
      most_bytes: longest that all of them may be.
      dense: its dense leaves, where they are blocks and no files of the step.

    Returns:
      The files; None where the step has no such digests, or they are longer.

    Raises:
      Damaged: one is missing or altered.
      StepGone: another step has taken the place of this one.
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
    """Holds files that were read.

    Args:
      contents: the bytes of each by its name.
      most_bytes: longest that all of them may be.

    Returns:
      The files; None where they are longer.
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
    """Memory for files of some lengths; None where they are longer than they may be.

    Args:
      lengths: of files by their names.
      most_bytes: longest that all of them may be.
      rooms: further ones that take more room than they are long.
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
