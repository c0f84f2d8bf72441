# SPDX-License-Identifier: Apache-2.0
"""Reads the followed leaves of a step or recovery point, in full or from the version before.

Published memory is never written: values that do not change are shared between versions.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from deltackpt.errors import Damaged, DamagedWal, OptionError, RestoreError
from deltackpt.format import naming
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.manifest import DenseEntry, Layout, path_name
from deltackpt.format.row_blocks import BLOCK, BlockedValue
from deltackpt.inspect.dense_items import DenseItem
from deltackpt.reading import chains, dense_state, stored_dense, stored_saves
from deltackpt.reading.dense_state import KnownStates, Wanted
from deltackpt.reading.stored_dense import DenseValues, shape_of
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.resources import host_memory
from deltackpt.serving import served_dense
from deltackpt.serving.served_dense import LeafArray, LoadedLeaves, name_of
from deltackpt.standby.loaded_state import StateHolder, committed_secs
from deltackpt.storage.ocdbt import ZARRAY
from deltackpt.storage.store import StorePath

_logger = logging.getLogger(__name__)

#: Sizes are multiples of the largest block, so a value has the same one with its padding.
_UNIT_BYTES = BLOCK * 8


class Buffers:
    """A pool of memory for values, which are written once.

    A reader may keep an array, or let jax alias it, while newer versions arrive. Memory returns to
    the pool when its last reference is dropped, without locks or waiting.
    """

    def __init__(self) -> None:
        #: Appended to in whichever thread drops the last reference: a deque needs no lock.
        self._spare: dict[int, collections.deque[np.ndarray]] = {}

    def room(self, value: BlockedValue) -> np.ndarray:
        """Returns uninitialized memory for a value; see ``stored_dense.Room``."""
        shape, dtype = shape_of(value), dtype_of(value.dtype)
        size = _size(value.nbytes)
        spare = self._spare.setdefault(size, collections.deque())
        try:
            data = spare.popleft()
        except IndexError:
            data = host_memory.empty_buffer((size,), np.dtype(np.uint8))
        owner = _Owner(data)
        weakref.finalize(owner, spare.append, data).atexit = False
        used = np.asarray(owner)[: math.prod(shape) * dtype.itemsize]
        return used.view(dtype).reshape(shape)

    def trim(self, used: Iterable[int]) -> None:
        """Frees spare memory that the next version, with values of these sizes, cannot use."""
        wanted = collections.Counter(map(_size, used))
        for size, spare in [*self._spare.items()]:
            for _ in range(len(spare) - wanted[size]):
                spare.popleft()
            if size not in wanted:
                del self._spare[size]


class _Owner:
    """Keeps memory out of the pool while an array refers to it."""

    def __init__(self, data: np.ndarray):
        self.__array_interface__: dict[str, object] = data.__array_interface__


def _size(nbytes: int) -> int:
    return -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES


#: Kinds of leaves that are arrays; see ``inspect.DenseLeaf``.
_ARRAYS = ("array", "key", "scalar")
#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20


class LeafReplica(StateHolder[LoadedLeaves]):
    """The dense leaves of the next version; see ``standby.wal.StateReplica``. Used by one thread.

    The last step is kept even if a recovery point is newer: the next step's deltas apply to it.
    """

    def __init__(self, item: str, patterns: Sequence[str]):
        self._step: LoadedLeaves | None = None
        self._item, self._patterns = item, patterns
        self._buffers = Buffers()
        self._known: KnownStates = {}
        self._numbers = itertools.count()
        #: Patterns that were already reported to match nothing.
        self._reported: set[str] = set()

    def load_state(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """See ``StateReplica``."""
        newest = stored_saves.read_save(step_dir, self._item)
        save_id = newest.info.save_id
        if plan is not None and plan.step != save_id:
            raise stored_saves.gone(step_dir)
        if self.loaded is not None and self.loaded.is_at(
            save_id, None if plan is None else plan.point
        ):
            return False
        if plan is not None:
            self.loaded = self._at_point(newest, plan)
        elif self._step is not None and self._step.is_at(save_id, None):
            self.loaded = self._step
        else:
            self.loaded = self._step = self._after(newest) or self._whole(newest)
        return True

    def _after(self, newest: StoredSave) -> LoadedLeaves | None:
        """Reads a step by applying deltas to the one before; None if that is not possible."""
        before = self._step
        if before is None or not before.accepts_deltas:
            return None
        further = chains.since(newest, before.save.save_id, before.layout)
        if not further:
            return None
        leaves, read = self._chosen(newest.layout), list[int]()
        try:
            found = dense_state.after(
                before.dense,
                further,
                _wanted(leaves),
                room=self._buffers.room,
                on_bytes=read.append,
            )
            return found and self._version(newest, leaves, found, before, read, compare=False)
        except DamagedWal:
            raise
        except RestoreError as error:
            chains.raise_if_removed(further, error)
            base = chains.read_chain(newest.step_dir, self._item)[0]
            if base.info.save_id.step <= before.save.save_id.step:
                raise
            # A newer compacted base replaces the damaged saves.
            return None

    def _whole(self, newest: StoredSave) -> LoadedLeaves:
        chain = chains.read_chain(newest.step_dir, self._item)
        leaves, read = self._chosen(chain[-1].layout), list[int]()
        found = stored_dense.open_values(
            chain, _wanted(leaves), room=self._buffers.room, on_bytes=read.append
        )
        return self._version(chain[-1], leaves, found, self.loaded, read)

    def _at_point(self, save: StoredSave, plan: ReplayPlan) -> LoadedLeaves:
        leaves, read = self._chosen(save.layout), list[int]()
        found = dense_state.at_point(
            plan, self._known, _wanted(leaves), room=self._buffers.room, on_bytes=read.append
        )
        try:
            return self._version(save, leaves, found, self.loaded, read, plan)
        except Damaged as error:
            raise DamagedWal.from_damage(error, plan.point.save_id) from error

    def _chosen(self, layout: Layout) -> tuple[DenseEntry, ...]:
        found = served_dense.chosen(layout, self._patterns)
        names = [path_name(leaf.path) for leaf in found]
        for pattern in self._patterns:
            if not any(naming.matches(pattern, name) for name in names):
                if pattern not in self._reported:
                    _logger.warning("leaves: %r does not match any dense leaf yet", pattern)
                self._reported.add(pattern)
        return found

    def _version(
        self,
        save: StoredSave,
        leaves: Sequence[DenseEntry],
        found: DenseValues,
        before: LoadedLeaves | None,
        read: list[int],  # Bytes, by the threads that read.
        plan: ReplayPlan | None = None,
        *,
        compare: bool = True,
    ) -> LoadedLeaves:
        """Makes a version from values, which share memory with equal ones before if compared."""
        values, numbers, accepts_deltas = dict(found.values), dict[str, int](), True
        arrays: dict[DenseEntry, LeafArray] = {}
        for leaf in leaves:
            name = name_of(leaf)
            array = served_dense.described(name, values.get(f"{name}/{ZARRAY}"), save.name)
            if array is None and plan is None:
                array = self._by_orbax(save, leaf, values, read)
                accepts_deltas = accepts_deltas and array is None
            if array is None:
                continue
            arrays[leaf] = array
            for key in array.keys:
                if key not in values or values[key].nbytes < array.chunk_bytes:
                    shown = "none" if key not in values else f"{values[key].nbytes} bytes"
                    raise Damaged(save.name, f"{array.chunk_bytes} bytes of {key}", shown)
        if not arrays:
            names = naming.listed(path_name(leaf.path) for leaf in leaves)
            raise OptionError(
                f"{save.name}, leaves: expected arrays with elements, found only other leaves that "
                f"match\n{names}\nchoose other leaves"
            )
        for key, data in values.items():
            other = None if before is None else before.dense.values.get(key)
            if before is not None and other is not None and _same(data, other, compare=compare):
                values[key], numbers[key] = other, before.numbers[key]
            else:
                numbers[key] = next(self._numbers)
        self._buffers.trim(data.nbytes for data in values.values())
        stored_saves.check_exists(save)
        return LoadedLeaves(
            save=save.info,
            layout=save.layout,
            point=None if plan is None else plan.point,
            dense=found._replace(values=values),
            numbers=numbers,
            leaves=arrays,
            accepts_deltas=accepts_deltas,
            unix_secs=committed_secs(save) if plan is None else plan.point.unix_secs,
            bytes_read=sum(read),
        )

    def _by_orbax(
        self, save: StoredSave, leaf: DenseEntry, values: dict[str, memoryview], read: list[int]
    ) -> LeafArray | None:
        """Reads an array in another format of Orbax's; None if it has no elements."""
        item_dir = save.step_dir / naming.DENSE_ITEM
        if not item_dir.is_dir():
            return None
        identity = save.step_dir.dir_identity()
        item = DenseItem(
            item_dir,
            (leaf,),
            digests=save.head.files if "step" in save.head.digests else None,
            exists=lambda: identity is None or identity.same(save.step_dir.dir_identity()),
        )
        stored = item.get(path_name(leaf.path))
        if stored is None or stored.kind not in _ARRAYS or 0 in stored.shape:
            return None
        found = np.asarray(stored, order="C")
        read.append(found.nbytes)
        array = LeafArray(name_of(leaf), found.shape, found.dtype, found.shape)
        [key] = array.keys
        values[key] = found.reshape(-1).view(np.uint8).data
        return array


def _wanted(leaves: Sequence[DenseEntry]) -> Wanted:
    """Returns whether a key of Orbax's database belongs to one of the leaves."""
    chosen = {name_of(leaf) for leaf in leaves}
    return lambda key: key.rpartition("/")[0] in chosen


def _same(data: memoryview, other: memoryview, *, compare: bool) -> bool:
    """Returns whether two values are the same memory or, if they are compared, equal."""
    if data is other or not compare or data.nbytes != other.nbytes:
        return data is other
    one, two = np.frombuffer(data, np.uint8), np.frombuffer(other, np.uint8)
    pieces = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return all(np.array_equal(one[piece], two[piece]) for piece in pieces)
