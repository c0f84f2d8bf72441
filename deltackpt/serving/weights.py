# SPDX-License-Identifier: Apache-2.0
"""Reads the followed leaves of a step or recovery point, in full or incrementally.

Published memory is never written: a value that changes is copied first, the others are shared
between versions.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from deltackpt.errors import Damaged, DamagedWal, OptionError
from deltackpt.format import dense_blocks, globs, names
from deltackpt.format.dense_blocks import BLOCK, BlockedValue, Key
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.manifest import DenseLeaf, Layout, path_name
from deltackpt.inspect.dense import DenseItem
from deltackpt.reading import logged_dense, saves, stored_dense
from deltackpt.reading.logged_dense import DenseKept
from deltackpt.reading.orbax_values import ARRAY_METADATAS
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import DenseValues, shape_of
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
from deltackpt.serving import leaves as serving_leaves
from deltackpt.serving.buffers import Buffer, Buffers
from deltackpt.serving.leaves import LeafArray, name_of
from deltackpt.serving.version import Held
from deltackpt.standby.publish import committed_secs
from deltackpt.storage.ocdbt import ZARRAY

_logger = logging.getLogger(__name__)

#: Kinds of leaves that are arrays; see ``inspect.DenseLeaf``.
_ARRAYS = ("array", "key", "scalar")
#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20


class Weights:
    """Reads successive versions; used by one thread."""

    def __init__(self, patterns: Sequence[str]):
        """Initializes the reader; reads nothing.

        Args:
          patterns: globs over the paths of the leaves.
        """
        self._patterns = patterns
        self._buffers = Buffers()
        self._logged = DenseKept()
        #: Patterns that were already reported to match nothing.
        self._told: set[str] = set()

    def of_step(self, chain: Sequence[StoredSave], held: Held | None) -> Held:
        """Reads all leaves of a step.

        Args:
          chain: the saves that restoring it reads.
          held: the previous version; equal values are shared with it.

        Raises:
          Damaged: something is missing or altered.
          StepGone: a step was removed while it was read.
        """
        save, meter, made = chain[-1], _Bytes(), dict[Key, Buffer]()
        wanted = self._chosen(save.layout)

        def room(value: BlockedValue) -> np.ndarray:
            key = value.file, value.key
            made[key] = self._buffers.new(shape_of(value), dtype_of(value.dtype))
            return made[key].data

        found = stored_dense.of_step(chain, _asks_for(wanted), room=room, on_bytes=meter.add)
        return self._held(save, wanted, found, made, held, meter)

    def after(self, held: Held, further: Sequence[StoredSave]) -> Held | None:
        """Applies deltas to a version.

        Args:
          held: the version.
          further: the saves after it, oldest first.

        Returns:
          The new version; None if the deltas cannot be applied.

        Raises:
          Damaged: something is missing or altered.
        """
        if not held.goes_on or not all(save.needs_older_dense for save in further):
            return None
        values, meter = dict(held.values), _Bytes()

        def writable(key: Key) -> np.ndarray:
            before = values[key].data
            values[key] = self._buffers.new(before.shape, before.dtype)
            np.copyto(values[key].data, before)
            return values[key].data

        kinds = _kinds(held.leaves.values(), held.values)
        kinds |= {key: ("uint8", held.values[key].data.size) for key in held.about}
        shards = [[*stored_dense.shards(save, meter.add)] for save in further]
        for save, each in zip(further, shards, strict=True):
            # Include leaves that were added, or that became arrays.
            wanted = kinds.keys() | _descriptions(self._chosen(save.layout))
            records = [value for shard in each for value in shard.record.values]
            wanted |= {_key(one) for one in records if one.file and _is_about(one.key)}
            found = {_key(one): _kind(one) for one in records if _key(one) in wanted}
            if found != kinds:
                return None
        save = further[-1]
        before = {key: buffer.data for key, buffer in values.items()}
        stored_dense.apply(shards[::-1], before, save.name, writable)
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

    def of_point(self, save: StoredSave, plan: ReplayPlan, held: Held | None) -> Held:
        """Reads all leaves of a recovery point.

        Args:
          save: the step below it.
          plan: the WAL records from the step to the recovery point.
          held: as for ``of_step``.

        Raises:
          DamagedWal: leaves are missing or altered.
        """
        meter, wanted = _Bytes(), self._chosen(save.layout)
        asked = _asks_for(wanted)
        found = logged_dense.dense_of(plan, self._logged, asked, on_bytes=meter.add)
        try:
            return self._held(save, wanted, found, {}, held, meter, plan.point)
        except Damaged as error:
            raise DamagedWal.of(error, plan.point.save_id) from error

    def _chosen(self, layout: Layout) -> tuple[DenseLeaf, ...]:
        found = serving_leaves.chosen(layout, self._patterns)
        names = [path_name(leaf.path) for leaf in found]
        for pattern in self._patterns:
            if not any(globs.matches(pattern, name) for name in names):
                if pattern not in self._told:
                    _logger.warning("leaves: %r does not match any dense leaf yet", pattern)
                self._told.add(pattern)
        return found

    def _held(
        self,
        save: StoredSave,
        wanted: Sequence[DenseLeaf],
        found: DenseValues,
        made: Mapping[Key, Buffer],
        before: Held | None,
        meter: _Bytes,
        point: RecoveryPoint | None = None,
    ) -> Held:
        """Makes a version from values; those that are not in a buffer yet are copied into one."""
        values: dict[Key, Buffer] = {}
        arrays: dict[DenseLeaf, LeafArray] = {}
        goes_on = point is None

        def hold(key: Key, dtype: np.dtype) -> None:
            data = (found.files if key[0] else found.values).get(key[1])
            if data is None:
                raise Damaged(save.name, f"a value of {key[1]}", "none")
            buffer = made.get(key)
            if buffer is None or not _is_of(data, buffer):
                buffer = self._filled(np.frombuffer(data, np.uint8), dtype, plain=key[0])
            values[key] = _shared(buffer, key, before)

        for leaf in wanted:
            name = name_of(leaf)
            array = serving_leaves.described(name, found.values.get(f"{name}/{ZARRAY}"), save.name)
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
                    expected = f"{array.chunk_count} elements of {key[1]}"
                    raise Damaged(save.name, expected, f"{values[key].data.nbytes} bytes")
            arrays[leaf] = array
        if not arrays:
            names = globs.listed(path_name(leaf.path) for leaf in wanted)
            raise OptionError(
                f"{save.name}, leaves: expected arrays with elements, found only other leaves that "
                f"match\n{names}\nchoose other leaves"
            )
        about = tuple((True, file) for file in found.files if _is_about(file))
        for key in about:
            hold(key, np.dtype(np.uint8))
        self._buffers.trim(values.values())
        saves.check_stands(save)
        return Held(
            save=save.info,
            layout=save.layout,
            point=point,
            values=values,
            leaves=arrays,
            about=about,
            goes_on=goes_on,
            unix_secs=committed_secs(save) if point is None else point.unix_secs,
            bytes_read=meter.count,
        )

    def _filled(self, data: np.ndarray, dtype: np.dtype, *, plain: bool = False) -> Buffer:
        """Copies the bytes of a value into a buffer to which deltas can be applied."""
        plain = plain or dense_blocks.is_plain(len(data), dtype.name)
        if plain or len(data) % dtype.itemsize:
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
        """Reads an array in another format of Orbax's; None if it has no elements."""
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
    """Counts the bytes that threads read."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.count += nbytes


def _asks_for(leaves: Iterable[DenseLeaf]) -> Callable[[str], bool]:
    """Returns a predicate: whether a key of Orbax's database belongs to one of the leaves."""
    taken = {name_of(leaf) for leaf in leaves}
    return lambda key: key.rpartition("/")[0] in taken


#: Dtype and count of a value.
_Kind = tuple[str, int]


def _key(value: BlockedValue) -> Key:
    return value.file, value.key


def _descriptions(leaves: Iterable[DenseLeaf]) -> set[Key]:
    return {(False, f"{name_of(leaf)}/{ZARRAY}") for leaf in leaves}


def _is_about(file: str) -> bool:
    """Whether a file of the item names the PRNG implementations of typed keys."""
    return file.startswith(f"{ARRAY_METADATAS}/process_")


def _kind(value: BlockedValue) -> _Kind:
    return value.dtype, value.count


def _kinds(arrays: Iterable[LeafArray], values: Mapping[Key, Buffer]) -> dict[Key, _Kind]:
    """The kinds that the values of a delta must have to be applied."""
    found: dict[Key, _Kind] = {}
    for array in arrays:
        for key in (*array.keys, (False, f"{array.name}/{ZARRAY}")):
            data = values[key].data
            plain = data.ndim == 1
            found[key] = ("uint8", data.size) if plain else (data.dtype.name, array.chunk_count)
    return found


def _is_of(data: memoryview, buffer: Buffer) -> bool:
    """Whether a value is a view of a buffer."""
    if not data.nbytes:
        return True
    return np.frombuffer(data, np.uint8).ctypes.data == buffer.data.ctypes.data


def _shared(buffer: Buffer, key: Key, before: Held | None) -> Buffer:
    """The previous version's buffer if it is bit-identical, else this one."""
    other = None if before is None else before.values.get(key)
    if other is None or other.data.dtype != buffer.data.dtype:
        return buffer
    one, two = buffer.array(), other.array()
    if len(one) != len(two):
        return buffer
    parts = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return other if all(np.array_equal(one[part], two[part]) for part in parts) else buffer
