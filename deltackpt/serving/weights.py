# SPDX-License-Identifier: Apache-2.0
"""Reads the followed leaves of a step, or of a point: whole, or what is new since the one before.

Nothing that is shown to a reader is written: a value that changes is copied first, the others are
shared between versions.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from deltackpt.errors import Damaged, DamagedLog
from deltackpt.format import dense_blocks, names
from deltackpt.format.dense_blocks import BLOCK, BlockedValue, Key
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.frames import Kind
from deltackpt.format.manifest import DenseLeaf, path_name
from deltackpt.inspect.dense import DenseItem
from deltackpt.reading import dense_values, logged_dense, saves
from deltackpt.reading.dense_values import shape_of
from deltackpt.reading.logged_dense import DenseKept
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint, Way
from deltackpt.serving import leaves as serving_leaves
from deltackpt.serving.buffers import Buffer, Buffers
from deltackpt.serving.leaves import LeafArray, name_of
from deltackpt.serving.version import Held
from deltackpt.standby.publish import committed_secs
from deltackpt.storage.ocdbt import ZARRAY

#: Kinds of leaves that are arrays; see ``inspect.DenseLeaf``.
_ARRAYS = ("array", "key", "scalar")
#: Frames of dense leaves.
_DENSE = (Kind.DENSE, Kind.BLOCKS)
#: So many bytes are compared at a time.
_COMPARED_BYTES = 1 << 20


class Weights:
    """Reads one version after the other; used by one thread."""

    def __init__(self, patterns: Sequence[str]):
        """Reads nothing yet.

        Args:
          patterns: globs over the paths of the leaves.
        """
        self._patterns = patterns
        self._buffers = Buffers()
        self._logged = DenseKept()

    def of_step(self, chain: Sequence[StoredSave], held: Held | None) -> Held:
        """Reads all leaves of a step.

        Args:
          chain: the saves that restoring it reads.
          held: the version before; what is the same is shared with it.

        Raises:
          Damaged: something is missing or altered.
          StepGone: a step was removed meanwhile.
        """
        save, meter, made = chain[-1], _Bytes(), dict[Key, Buffer]()
        wanted = self._chosen(save.layout.dense)
        taken = {name_of(leaf) for leaf in wanted}

        def room(value: BlockedValue) -> np.ndarray:
            key = value.file, value.key
            made[key] = self._buffers.new(shape_of(value), dtype_of(value.dtype))
            return made[key].data

        found = dense_values.of_step(
            chain, lambda key: key.rpartition("/")[0] in taken, room=room, on_bytes=meter.add
        )
        return self._held(save, wanted, found.values, made, held, meter)

    def after(self, held: Held, further: Sequence[StoredSave]) -> Held | None:
        """Applies deltas to a version; None where they cannot be.

        Args:
          held: the version.
          further: the saves after it, oldest first.

        Raises:
          Damaged: something is missing or altered.
        """
        if not held.goes_on or any(save.head.dense_blocks is None for save in further):
            return None
        values, meter, fresh = dict(held.values), _Bytes(), dict[Key, Buffer]()

        def writable(key: Key) -> np.ndarray:
            if key not in fresh:
                before = values[key].data
                fresh[key] = values[key] = self._buffers.new(before.shape, before.dtype)
                np.copyto(fresh[key].data, before)
            return fresh[key].data

        kinds = _kinds(held.leaves.values(), held.values)
        sources = [[*dense_values.sources(save, meter.add)] for save in further]
        for save, each in zip(further, sources, strict=True):
            # Leaves that came, or became arrays, are to be shown as well.
            wanted = kinds.keys() | _descriptions(self._chosen(save.layout.dense))
            records = [value for source in each for value in source.record.values]
            found = {_key(one): _kind(one) for one in records if _key(one) in wanted}
            if found != kinds:
                return None
        for each in sources:
            for source in each:
                own = {_key(one) for one in source.record.values} & values.keys()
                dense_values.apply(source, {key: values[key].data for key in own}, writable)
        save = further[-1]
        arrays = {leaf: self._described(name_of(leaf), values, save.name) for leaf in held.leaves}
        if any(found is None for found in arrays.values()):
            return None
        self._buffers.trim(values.values())
        saves.check_stands(save)
        return dataclasses.replace(
            held,
            save=save.info,
            layout=save.layout,
            values=values,
            leaves={leaf: found for leaf, found in arrays.items() if found is not None},
            unix_secs=committed_secs(save),
            bytes_read=meter.count,
        )

    def of_point(self, save: StoredSave, way: Way, held: Held | None) -> Held:
        """Reads all leaves of a point of the log.

        Args:
          save: the step below it.
          way: from the step to the point.
          held: as for ``of_step``.

        Raises:
          DamagedLog: they are missing or altered.
        """
        meter = _Bytes()
        found = logged_dense.dense_of(way, self._logged)
        for mark in way.last_marks.values():
            meter.add(sum(one.body_bytes for one in mark.frames if one.kind in _DENSE))
        wanted = self._chosen(save.layout.dense)
        try:
            return self._held(save, wanted, found.values, {}, held, meter, way.point)
        except Damaged as error:
            raise DamagedLog.of(error, way.point.save_id) from error

    def _chosen(self, dense: Sequence[DenseLeaf]) -> tuple[DenseLeaf, ...]:
        return serving_leaves.chosen(dense, self._patterns)

    def _held(
        self,
        save: StoredSave,
        wanted: Sequence[DenseLeaf],
        found: Mapping[str, memoryview],
        made: Mapping[Key, Buffer],
        before: Held | None,
        meter: _Bytes,
        point: LogPoint | None = None,
    ) -> Held:
        """Values that were read, as a version; those in no buffer so far get one."""
        values: dict[Key, Buffer] = {}
        arrays: dict[DenseLeaf, LeafArray] = {}
        goes_on = point is None

        def hold(key: Key, dtype: np.dtype) -> None:
            data = found.get(key[1])
            if data is None:
                raise Damaged(save.name, f"a value of {key[1]}", "none")
            buffer = made.get(key)
            if buffer is None or not _is_of(data, buffer):
                buffer = self._filled(np.frombuffer(data, np.uint8), dtype)
            values[key] = _shared(buffer, key, before)

        for leaf in wanted:
            name = name_of(leaf)
            array = serving_leaves.described(name, found.get(f"{name}/{ZARRAY}"), save.name)
            if array is None:
                if point is None:
                    array = self._by_orbax(save, leaf, values, before, meter)
                if array is not None:
                    arrays[leaf], goes_on = array, False
                continue
            hold((False, f"{name}/{ZARRAY}"), np.dtype(np.uint8))
            for key in array.keys:
                hold(key, array.dtype)
                if values[key].data.nbytes < array.chunk_count * array.dtype.itemsize:
                    expected = f"{array.chunk_count} numbers of {key[1]}"
                    raise Damaged(save.name, expected, f"{values[key].data.nbytes} bytes")
            arrays[leaf] = array
        self._buffers.trim(values.values())
        saves.check_stands(save)
        return Held(
            save=save.info,
            layout=save.layout,
            point=point,
            values=values,
            leaves=arrays,
            goes_on=goes_on,
            unix_secs=committed_secs(save) if point is None else point.unix_secs,
            bytes_read=meter.count,
        )

    def _filled(self, data: np.ndarray, dtype: np.dtype) -> Buffer:
        """A buffer with the bytes of a value, as deltas go on from it."""
        plain = dense_blocks.is_plain(len(data), dtype.name) or len(data) % dtype.itemsize
        if plain:
            shape, dtype = (len(data),), np.dtype(np.uint8)
        else:
            shape = dense_blocks.blocks_of(len(data) // dtype.itemsize), BLOCK
        buffer = self._buffers.new(shape, dtype)
        flat = buffer.data.reshape(-1).view(np.uint8)
        flat[: len(data)], flat[len(data) :] = data, 0
        return buffer

    def _by_orbax(
        self,
        save: StoredSave,
        leaf: DenseLeaf,
        values: dict[Key, Buffer],
        before: Held | None,
        meter: _Bytes,
    ) -> LeafArray | None:
        """An array that Orbax's handler wrote in a way of its own; None where it has no numbers."""
        item_dir = save.step_dir / names.DENSE_ITEM
        if not item_dir.is_dir():
            return None
        stamp = save.step_dir.stamp()
        item = DenseItem(
            item_dir,
            (leaf,),
            digests="step" in save.head.digests,
            stands=lambda: stamp is None or stamp.same(save.step_dir.stamp()),
        )
        stored = item.get(path_name(leaf.path))
        if stored is None or stored.kind not in _ARRAYS or 0 in stored.shape:
            return None
        found = np.asarray(stored, order="C")
        meter.add(found.nbytes)
        array = LeafArray(name_of(leaf), found.shape, found.dtype, found.shape)
        [key] = array.keys
        buffer = self._filled(found.reshape(-1).view(np.uint8), found.dtype)
        values[key] = _shared(buffer, key, before)
        return array

    def _described(self, name: str, values: Mapping[Key, Buffer], shown: str) -> LeafArray | None:
        return serving_leaves.described(name, values[False, f"{name}/{ZARRAY}"].array().data, shown)


class _Bytes:
    """Counts what threads read."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.count += nbytes


#: Dtype and count of a value.
_Kind = tuple[str, int]


def _key(value: BlockedValue) -> Key:
    return value.file, value.key


def _descriptions(leaves: Iterable[DenseLeaf]) -> set[Key]:
    return {(False, f"{name_of(leaf)}/{ZARRAY}") for leaf in leaves}


def _kind(value: BlockedValue) -> _Kind:
    return value.dtype, value.count


def _kinds(arrays: Iterable[LeafArray], values: Mapping[Key, Buffer]) -> dict[Key, _Kind]:
    """What the values of a delta are if it goes on from some."""
    found: dict[Key, _Kind] = {}
    for array in arrays:
        for key in (*array.keys, (False, f"{array.name}/{ZARRAY}")):
            data = values[key].data
            plain = data.ndim == 1
            found[key] = ("uint8", data.size) if plain else (data.dtype.name, array.chunk_count)
    return found


def _is_of(data: memoryview, buffer: Buffer) -> bool:
    """Whether the bytes of a value lie in a buffer."""
    if not data.nbytes:
        return True
    return np.frombuffer(data, np.uint8).ctypes.data == buffer.data.ctypes.data


def _shared(buffer: Buffer, key: Key, before: Held | None) -> Buffer:
    """The buffer of the version before where it holds the same bits."""
    other = None if before is None else before.values.get(key)
    if other is None or other.data.dtype != buffer.data.dtype:
        return buffer
    one, two = buffer.array(), other.array()
    if len(one) != len(two):
        return buffer
    parts = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return other if all(np.array_equal(one[part], two[part]) for part in parts) else buffer
