# SPDX-License-Identifier: Apache-2.0
"""Reads the followed leaves of a step or recovery point, in full or from the version before.

Published memory is never written: values that do not change are shared between versions.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

import numpy as np

from deltackpt.errors import Damaged, DamagedWal, OptionError, RestoreError
from deltackpt.format import globs, names
from deltackpt.format.manifest import DenseLeaf, Layout, path_name
from deltackpt.inspect.dense import DenseItem
from deltackpt.reading import chains, dense_state, removal, saves, stored_dense
from deltackpt.reading.dense_state import KnownStates, Wanted
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.serving import leaves as serving_leaves
from deltackpt.serving.buffers import Buffers
from deltackpt.serving.dense import HeldLeaves
from deltackpt.serving.leaves import LeafArray, name_of
from deltackpt.standby.publish import committed_secs
from deltackpt.storage.ocdbt import ZARRAY
from deltackpt.storage.store import StorePath

_logger = logging.getLogger(__name__)

#: Kinds of leaves that are arrays; see ``inspect.DenseLeaf``.
_ARRAYS = ("array", "key", "scalar")
#: Bytes per comparison.
_COMPARED_BYTES = 1 << 20


class LeafHolder:
    """The dense leaves of the next version; see ``candidates.Holder``. Used by one thread.

    The last step is kept even if a recovery point is newer: the next step's deltas apply to it.
    """

    def __init__(self, item: str, patterns: Sequence[str]):
        """Reads nothing yet.

        Args:
          item: name of deltackpt's item in the steps.
          patterns: globs over the paths of the leaves.
        """
        self.held: HeldLeaves | None = None
        self._step: HeldLeaves | None = None
        self._item, self._patterns = item, patterns
        self._buffers = Buffers()
        self._known: KnownStates = {}
        self._numbers = itertools.count()
        #: Patterns that were already reported to match nothing.
        self._told: set[str] = set()

    def is_at(self, plan: ReplayPlan | None) -> bool:
        """See ``Holder``."""
        held = self.held
        if held is None or plan is None:
            return held is not None and held.point is None
        return held.is_at(plan.step, plan.point)

    def take(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """See ``Holder``."""
        newest = saves.read_save(step_dir, self._item)
        save_id = newest.info.save_id
        if plan is not None and plan.step != save_id:
            raise removal.gone(step_dir)
        if self.held is not None and self.held.is_at(save_id, None if plan is None else plan.point):
            return False
        if plan is not None:
            self.held = self._at_point(newest, plan)
        elif self._step is not None and self._step.is_at(save_id, None):
            self.held = self._step
        else:
            self.held = self._step = self._after(newest) or self._whole(newest)
        return True

    def _after(self, newest: StoredSave) -> HeldLeaves | None:
        """Reads a step by applying deltas to the one before; None if that is not possible."""
        before = self._step
        if before is None or not before.goes_on:
            return None
        further = chains.since(newest, before.save.save_id, before.layout)
        if not further:
            return None
        leaves, meter = self._chosen(newest.layout), _Bytes()
        try:
            found = dense_state.after(
                before.dense,
                further,
                _wanted(leaves),
                room=self._buffers.room,
                on_bytes=meter.add,
            )
            return found and self._version(newest, leaves, found, before, meter, compare=False)
        except DamagedWal:
            raise
        except RestoreError as error:
            chains.raise_if_removed(further, error)
            base = chains.read_chain(newest.step_dir, self._item)[0]
            if base.info.save_id.step <= before.save.save_id.step:
                raise
            # A newer compacted base replaces the damaged saves.
            return None

    def _whole(self, newest: StoredSave) -> HeldLeaves:
        chain = chains.read_chain(newest.step_dir, self._item)
        leaves, meter = self._chosen(chain[-1].layout), _Bytes()
        found = stored_dense.of_step(
            chain, _wanted(leaves), room=self._buffers.room, on_bytes=meter.add
        )
        return self._version(chain[-1], leaves, found, self.held, meter)

    def _at_point(self, save: StoredSave, plan: ReplayPlan) -> HeldLeaves:
        leaves, meter = self._chosen(save.layout), _Bytes()
        found = dense_state.at_point(
            plan, self._known, _wanted(leaves), room=self._buffers.room, on_bytes=meter.add
        )
        try:
            return self._version(save, leaves, found, self.held, meter, plan)
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

    def _version(
        self,
        save: StoredSave,
        leaves: Sequence[DenseLeaf],
        found: DenseValues,
        before: HeldLeaves | None,
        meter: _Bytes,
        plan: ReplayPlan | None = None,
        *,
        compare: bool = True,
    ) -> HeldLeaves:
        """Makes a version from values, which share memory with equal ones before if compared."""
        values, numbers, goes_on = dict(found.values), dict[str, int](), True
        arrays: dict[DenseLeaf, LeafArray] = {}
        for leaf in leaves:
            name = name_of(leaf)
            array = serving_leaves.described(name, values.get(f"{name}/{ZARRAY}"), save.name)
            if array is None and plan is None:
                array = self._by_orbax(save, leaf, values, meter)
                goes_on = goes_on and array is None
            if array is None:
                continue
            arrays[leaf] = array
            for key in array.keys:
                if key not in values or values[key].nbytes < array.chunk_bytes:
                    shown = "none" if key not in values else f"{values[key].nbytes} bytes"
                    raise Damaged(save.name, f"{array.chunk_bytes} bytes of {key}", shown)
        if not arrays:
            names = globs.listed(path_name(leaf.path) for leaf in leaves)
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
        saves.check_stands(save)
        return HeldLeaves(
            save=save.info,
            layout=save.layout,
            point=None if plan is None else plan.point,
            dense=found._replace(values=values),
            numbers=numbers,
            leaves=arrays,
            goes_on=goes_on,
            unix_secs=committed_secs(save) if plan is None else plan.point.unix_secs,
            bytes_read=meter.count,
        )

    def _by_orbax(
        self, save: StoredSave, leaf: DenseLeaf, values: dict[str, memoryview], meter: _Bytes
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
        values[key] = found.reshape(-1).view(np.uint8).data
        return array


class _Bytes:
    """Counts the bytes that threads read."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.count += nbytes


def _wanted(leaves: Sequence[DenseLeaf]) -> Wanted:
    """Returns whether a key of Orbax's database belongs to one of the leaves."""
    chosen = {name_of(leaf) for leaf in leaves}
    return lambda key: key.rpartition("/")[0] in chosen


def _same(data: memoryview, other: memoryview, *, compare: bool) -> bool:
    """Returns whether two values are the same memory or, if they are compared, equal."""
    if data is other or not compare or data.nbytes != other.nbytes:
        return data is other
    one, two = np.frombuffer(data, np.uint8), np.frombuffer(other, np.uint8)
    parts = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(one), _COMPARED_BYTES))
    return all(np.array_equal(one[part], two[part]) for part in parts)
