# SPDX-License-Identifier: Apache-2.0
"""The followed dense leaves, read in full or from those of the version before.

Published memory is never written: values that do not change are shared between versions.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, DamagedWal, OptionError, RestoreError
from deltackpt.format import naming
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.manifest import (
    DenseEntry,
    KeyPath,
    Layout,
    SaveId,
    nested_at,
    path_name,
)
from deltackpt.format.naming import PyTree
from deltackpt.format.row_blocks import BLOCK, BlockedValue
from deltackpt.inspect.dense_items import DenseItem
from deltackpt.reading import chains, dense_state, stored_dense, stored_saves, zarr_arrays
from deltackpt.reading.dense_state import KnownStates, Wanted
from deltackpt.reading.orbax_values import ARRAY_METADATAS, item_values, key_impls
from deltackpt.reading.stored_dense import DenseValues, shape_of
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.zarr_arrays import ZarrArray
from deltackpt.resources import host_memory
from deltackpt.standby.loaded_state import HeldState, StateHolder, committed_secs
from deltackpt.storage.ocdbt import ZARRAY
from deltackpt.storage.store import StorePath

_logger = logging.getLogger(__name__)
#: Sizes are multiples of the largest block, so a value has the same one with its padding.
_UNIT_BYTES = BLOCK * 8
#: Kinds of leaves that are arrays; see ``inspect.DenseLeaf``.
_ARRAYS = ("array", "key", "scalar")
#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20


def chosen(layout: Layout, patterns: Sequence[str]) -> tuple[DenseEntry, ...]:
    """Returns the dense leaves that a glob matches; raises ``OptionError`` if there are none."""
    found = tuple(
        leaf
        for leaf in layout.dense
        if any(naming.matches(one, path_name(leaf.path)) for one in patterns)
    )
    if not found:
        slots = (path_name(path) for table in layout.tables for path in table.leaves.values())
        tables = [name for name in slots if any(naming.matches(one, name) for one in patterns)]
        what = f"only tables and slots\n{naming.listed(tables)}" if tables else "none"
        raise OptionError(
            f"leaves: expected {list(patterns)} to match dense leaves, found {what}\n"
            "the dense leaves are\n"
            f"{naming.listed(path_name(leaf.path) for leaf in layout.dense)}\n"
            "tables and slots are not followed; read them with inspect.open(directory).at(step)"
        )
    counts = collections.Counter(path_name(leaf.path) for leaf in found)
    if clashes := [name for name, count in counts.items() if count > 1]:
        raise OptionError(
            f"leaves: expected a unique path for each leaf, found several with\n"
            f"{naming.listed(clashes)}\n"
            "a key that contains '/' looks like two keys; rename it, or choose other leaves"
        )
    return found


def name_of(leaf: DenseEntry) -> str:
    """Returns the name of a leaf in Orbax's database."""
    return ".".join(leaf.key)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServedLeaves(HeldState, Mapping[str, np.ndarray]):
    """The followed dense leaves at one step or recovery point, by '/'-joined path.

    Arrays are read-only and never change. A leaf that is sharded in storage is assembled on first
    access; others are not copied.

    Attributes:
      point: the recovery point; None for a step.
      unix_secs: time of the step's commit, or of the recovery point, in seconds since 1970.
      bytes_read: bytes of stored arrays, before any compression, and of Orbax's files that were
        read for these leaves.
    """

    # Values, their Zarr metadata, and Orbax's files; never written.
    stored: DenseValues
    # Value to a number, equal in two versions only if the value is.
    numbers: Mapping[str, int]
    entries: Mapping[DenseEntry, ZarrArray]
    accepts_deltas: bool  # Whether a delta of the step can be applied.
    bytes_read: int
    _arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        """The training step."""
        return self.save_id.step

    @property
    def save_id(self) -> SaveId:
        """Id of the save, or of the recovery point's WAL record."""
        return self.save.save_id if self.point is None else self.point.save_id

    @cached_property
    def _leaves(self) -> dict[str, ZarrArray]:
        return {path_name(leaf.path): found for leaf, found in self.entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self._leaves.values())

    def __getitem__(self, path: str) -> np.ndarray:
        if path not in self._leaves:
            raise KeyError(f"expected one of {sorted(self._leaves)}, found {path!r}")
        with self._lock:
            if path not in self._arrays:
                leaf = self._leaves[path]
                found = leaf.read(self.stored.values, leaf.whole)
                found.flags.writeable = False
                self._arrays[path] = found
            return self._arrays[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<ServedLeaves of step {self.step}: {len(self)} leaves>"

    def tree(self) -> PyTree:
        """Returns the leaves in nested dicts and lists, with the structure of the state."""
        return nested_at((path, self[path_name(path)]) for path in self.paths)

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """Typed key paths of the leaves in the state."""
        return tuple(leaf.path for leaf in self.entries)

    @cached_property
    def prng_impls(self) -> Mapping[str, str]:
        """Implementation of each typed PRNG key among the leaves, such as ``threefry2x32``.

        The array of such a leaf is its key data; get the keys from
        ``jax.random.wrap_key_data(dense[path], impl=dense.prng_impls[path])``.
        """
        impls: dict[str, str] = {}
        for name, data in self.stored.files.items():
            if not name.startswith(f"{ARRAY_METADATAS}/process_"):
                continue
            try:
                impls |= key_impls(json.loads(bytes(data)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                shown = f"step {self.save.save_id.step}, {name}"
                raise Damaged(shown, "a file of Orbax's about arrays", str(error)) from error
        return {path: impls[leaf.name] for path, leaf in self._leaves.items() if leaf.name in impls}

    def content(self, path: str) -> tuple[int, ...]:
        """Returns an id of a leaf's contents: equal in two versions only if the leaf is equal."""
        leaf, numbers = self._leaves[path], self.numbers
        return tuple(
            numbers[key]
            for key in (f"{leaf.name}/{ZARRAY}", *sorted(leaf.keys([leaf.whole])))
            if key in numbers
        )


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


class LeafReplica(StateHolder[ServedLeaves]):
    """The dense leaves of the next version, for one thread; see ``standby.tailer.StateReplica``.

    The last step is kept even if a recovery point is newer: the next step's deltas apply to it.
    """

    def __init__(self, item: str, patterns: Sequence[str]):
        self._step: ServedLeaves | None = None
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
        else:
            if self._step is None or not self._step.is_at(save_id, None):
                self._step = self._after(newest) or self._whole(newest)
            # Not the step itself, which is kept longer: leaves that readers assemble are freed.
            self.loaded = dataclasses.replace(self._step, _arrays={}, _lock=threading.Lock())
        return True

    def _after(self, newest: StoredSave) -> ServedLeaves | None:
        """Reads a step by applying deltas to the one before; None if that is not possible."""
        before = self._step
        if before is None or not before.accepts_deltas:
            return None
        further = chains.since(newest, before.save.save_id, before.layout)
        if not further:
            return None
        leaves = self._chosen(newest.layout)
        try:
            found = dense_state.after(
                before.stored, further, _wanted(leaves), room=self._buffers.room
            )
            return found and self._version(newest, leaves, found, before, compare=False)
        except DamagedWal:
            raise
        except RestoreError as error:
            chains.raise_if_removed(further, error)
            base = chains.read_chain(newest.step_dir, self._item)[0]
            if base.info.save_id.step <= before.save.save_id.step:
                raise
            # A newer compacted base replaces the damaged saves.
            return None

    def _whole(self, newest: StoredSave) -> ServedLeaves:
        chain = chains.read_chain(newest.step_dir, self._item)
        leaves = self._chosen(chain[-1].layout)
        found = stored_dense.open_values(chain, _wanted(leaves), room=self._buffers.room)
        return self._version(chain[-1], leaves, found, self.loaded)

    def _at_point(self, save: StoredSave, plan: ReplayPlan) -> ServedLeaves:
        leaves = self._chosen(save.layout)
        found = dense_state.at_point(plan, self._known, _wanted(leaves), room=self._buffers.room)
        try:
            return self._version(save, leaves, found, self.loaded, plan)
        except Damaged as error:
            raise DamagedWal.from_damage(error, plan.point.save_id) from error

    def _chosen(self, layout: Layout) -> tuple[DenseEntry, ...]:
        found = chosen(layout, self._patterns)
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
        before: ServedLeaves | None,
        plan: ReplayPlan | None = None,
        *,
        compare: bool = True,
    ) -> ServedLeaves:
        """Makes a version from values, which share memory with equal ones before if compared."""
        values, numbers, accepts_deltas = dict(found.values), dict[str, int](), True
        bytes_read = found.bytes_read
        arrays: dict[DenseEntry, ZarrArray] = {}
        for leaf in leaves:
            name = name_of(leaf)
            array = zarr_arrays.described(name, values.get(f"{name}/{ZARRAY}"), save.name)
            if array is None and plan is None:
                array = self._by_orbax(save, leaf, values)
                if array is not None:
                    accepts_deltas, bytes_read = False, bytes_read + array.chunk_bytes
            if array is None:
                continue
            arrays[leaf] = array
            for key in array.keys([array.whole]):
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
            other = None if before is None else before.stored.values.get(key)
            if before is not None and other is not None and _same(data, other, compare=compare):
                values[key], numbers[key] = other, before.numbers[key]
            else:
                numbers[key] = next(self._numbers)
        self._buffers.trim(data.nbytes for data in values.values())
        stored_saves.check_exists(save)
        return ServedLeaves(
            save=save.info,
            layout=save.layout,
            point=None if plan is None else plan.point,
            stored=found._replace(values=values),
            numbers=numbers,
            entries=arrays,
            accepts_deltas=accepts_deltas,
            unix_secs=committed_secs(save) if plan is None else plan.point.unix_secs,
            bytes_read=bytes_read,
        )

    def _by_orbax(
        self, save: StoredSave, leaf: DenseEntry, values: dict[str, memoryview]
    ) -> ZarrArray | None:
        """Reads an array in another format of Orbax's; None if it has no elements."""
        item_dir = save.step_dir / naming.DENSE_ITEM
        if not item_dir.is_dir():
            return None
        identity = save.step_dir.dir_identity()
        values_of = item_values(item_dir, save.head.files if "step" in save.head.digests else None)
        item = DenseItem(
            item_dir,
            lambda: values_of,
            (leaf,),
            exists=lambda: identity is None or identity.same(save.step_dir.dir_identity()),
        )
        stored = item.get(path_name(leaf.path))
        if stored is None or stored.kind not in _ARRAYS or 0 in stored.shape:
            return None
        found = np.asarray(stored, order="C")
        array = ZarrArray(name_of(leaf), found.shape, found.shape, found.dtype)
        [key] = array.keys([array.whole])
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
