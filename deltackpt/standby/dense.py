# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a delta that stores them in its shards, held as files next to the step's files.

The changed blocks of the next delta are applied to a copy of the held leaves, so unchanged data is
not read again. After any other save, such as a base, the leaves are read from storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format.dense_blocks import BlockedValue
from deltackpt.format.dtypes import dtype_of
from deltackpt.reading import chains, point_files, stored_dense
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import shape_of
from deltackpt.standby.files import HeldFiles, Room


class BlockedDense:
    """Dense leaves of a step, as blocks being loaded into memory."""

    def __init__(
        self, save: StoredSave, further: Sequence[StoredSave] = (), held: HeldFiles | None = None
    ):
        """Reads only the records.

        Args:
          save: the step; its dense leaves are blocks.
          further: the saves from the held state to the step, oldest first.
          held: files of the parent of the first of them, other than tables.

        Raises:
          Damaged: a record is missing or altered.
        """
        self._save = save
        self._values = _values(save)
        self._before = held if held is not None and self._goes_on(held, further) else None
        self._further = further

    @property
    def rooms(self) -> Mapping[str, Room]:
        """See ``files.Dense``."""
        return {
            name: Room(one.nbytes, math.prod(shape_of(one)) * dtype_of(one.dtype).itemsize)
            for name, one in self._values.items()
        }

    @property
    def values(self) -> Mapping[str, BlockedValue]:
        """See ``files.Dense``."""
        return self._values

    def fill(self, held: HeldFiles) -> None:
        """See ``files.Dense``.

        Raises:
          Damaged: a file is missing or altered.
          StepGone: a step was removed concurrently.
        """
        places = {file.name: file.offset for file in held.index}
        data = {name: _data(held, places[name], value) for name, value in self._values.items()}
        if self._before is None:
            self._read(data)
            return
        before = {file.name: file.offset for file in self._before.index}
        for name, value in self._values.items():
            np.copyto(data[name], _data(self._before, before[name], value))
        by_key = {(one.file, one.key): data[name] for name, one in self._values.items()}
        saves = [[*stored_dense.shards(save)] for save in reversed(self._further)]
        stored_dense.apply(saves, by_key, self._save.name)

    def _read(self, data: Mapping[str, np.ndarray]) -> None:
        """Reads all of them, from the base on if they are changes."""
        chain = [self._save]
        if self._save.needs_older_dense:
            chain = chains.read_chain(self._save.step_dir, self._save.item)

        def room(value: BlockedValue) -> np.ndarray:
            return data[_name(value)]

        found = stored_dense.of_step(chain, room=room)
        for file, values in ((False, found.values), (True, found.files)):
            for key, value in values.items():
                name = f"{point_files.STEP}{point_files.name_of(key, file=file)}"
                out = data[name].reshape(-1).view(np.uint8)[: value.nbytes]
                now = np.frombuffer(value, np.uint8)
                # A base that was compacted concurrently has its own copies.
                if len(now) and now.ctypes.data != out.ctypes.data:
                    np.copyto(out, now)

    def _goes_on(self, held: HeldFiles, further: Sequence[StoredSave]) -> bool:
        """Whether only the new saves need to be read, because their values are the same ones."""
        same = _kinds(held.values) == _kinds(self._values)
        return same and bool(further) and all(map(self._is_alike, further))

    def _is_alike(self, save: StoredSave) -> bool:
        return save.needs_older_dense and _kinds(_values(save)) == _kinds(self._values)


def _values(save: StoredSave) -> dict[str, BlockedValue]:
    """The values that all processes have of a step, by file name."""
    found: dict[str, BlockedValue] = {}
    for shard in stored_dense.shards(save):
        for value in shard.record.values:
            name = _name(value)
            if name in found:
                raise Damaged(shard.name, f"{value.key} of one process", "a duplicate")
            found[name] = value
    return found


def _name(value: BlockedValue) -> str:
    return f"{point_files.STEP}{point_files.name_of(value.key, file=value.file)}"


def _kinds(values: Mapping[str, BlockedValue]) -> dict[str, tuple[str, str, int]]:
    return {name: (one.group, one.dtype, one.count) for name, one in values.items()}


def _data(held: HeldFiles, offset: int, value: BlockedValue) -> np.ndarray:
    """A value as ``stored_dense.apply`` expects it."""
    shape = shape_of(value)
    return held.memory.array(offset, shape, dtype_of(value.dtype))
