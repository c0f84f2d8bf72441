# SPDX-License-Identifier: Apache-2.0
"""Plans a merge: which rows of which segments are still needed, and in which order.

The planner reads row indices from the newest layer backwards, and skips rows that a newer layer
contains. Each row is therefore decoded and written once. Ranges, such as those of a base, are
merged first, oldest layer first; they are read straight into the buffers, while the planner reads
row indices. Groups whose segments overlap in a part of their fields or columns are merged oldest
first, too.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.format import row_blocks
from deltackpt.format.row_blocks import GroupEntry, Segment, Span, StoredRows
from deltackpt.layers import row_indices
from deltackpt.layers.row_indices import Layer, RowIndices, set_flags
from deltackpt.layers.targets import Targets
from deltackpt.resources.runtime import Runtime

#: Group, columns and fields: segments that share them replace each other's rows as a whole.
_Kind = tuple[str, Span, tuple[str, ...]]


class LayerSegment(NamedTuple):
    """A segment of a layer."""

    layer: Layer
    segment: Segment

    @property
    def kind(self) -> _Kind:
        """What it has in common with segments that may replace its rows."""
        return self.segment.group, self.segment.columns, self.segment.fields

    @property
    def group(self) -> GroupEntry:
        """The group of its rows."""
        return self.layer.groups[self.segment.group]


class SegmentRows(NamedTuple):
    """Rows of a segment to merge.

    ``needed``, (rows,) bool, has the wanted ones that no newer save has; None if all are needed.
    """

    source: LayerSegment
    held: StoredRows
    needed: np.ndarray | None = None


class MergePlan:
    """Plans one merge; ``stages`` runs once."""

    def __init__(
        self,
        layers: Sequence[Sequence[Layer]],
        targets: Targets,
        indices: RowIndices = row_indices.stored_rows,
        runtime: Runtime | None = None,
    ):
        """Begins to read long row indices; see ``layers.merge.plan``."""
        self._targets, self._indices = targets, indices
        self._has_cycles = any(target.cycle is not None for target in targets.all)
        self._saves = [
            [LayerSegment(layer, segment) for layer in of_save for segment in layer.segments]
            for of_save in layers
        ]
        every = [one for of_save in self._saves for one in of_save]
        # Ranges of the first save are merged before everything else.
        later = (
            one
            for number, of_save in enumerate(self._saves)
            for one in of_save
            if number or one.segment.ranges is None
        )
        self._overlapping = _overlapping(later)
        #: By layer and segment: equal segments of several layers may be one object.
        self._coming = {
            (id(one.layer), id(one.segment)): runtime.submit(indices, *one, targets)
            for one in reversed(every)
            if runtime is not None
            and one.segment.ranges is None
            and one.segment.count >= row_indices.MANY_ROWS
        }
        #: Kind to the rows of the largest of its groups: tables grow.
        self._group_rows: dict[_Kind, int] = {}
        for one in every:
            rows = max(one.group.rows, self._group_rows.get(one.kind, 0))
            self._group_rows[one.kind] = rows

    def stages(self) -> Iterator[Iterator[SegmentRows]]:
        """Yields stages; the segments of a stage may be merged in any order."""
        ranges = self._ranges()
        for of_save, own in zip(self._saves, ranges, strict=True):
            overlapping = [one for one in of_save if self._is_gapped(one, overlapping=True)]
            if own or overlapping:
                yield itertools.chain(own, filter(None, map(self._all_rows, overlapping)))
        yield self._newest_first(ranges)

    def _ranges(self) -> list[list[SegmentRows]]:
        """Ranges of rows of each save, without those that newer ranges replace as a whole."""
        newer: dict[_Kind, tuple[Span, ...]] = {}
        found = []
        for of_save in reversed(self._saves):
            kept = []
            for one in of_save:
                held = None if one.segment.ranges is None else self._rows(one)
                if held is not None:
                    covered = newer.get(one.kind, ())
                    newer[one.kind] = row_blocks.joined([*covered, *_spans(held)])
                    if newer[one.kind] != covered:
                        kept.append(SegmentRows(one, held))
            found.append(kept)
        return found[::-1]

    def _all_rows(self, one: LayerSegment) -> SegmentRows | None:
        held = self._rows(one)
        return None if held is None else SegmentRows(one, held)

    def _newest_first(self, ranges: Sequence[Sequence[SegmentRows]]) -> Iterator[SegmentRows]:
        """Yields the segments of each save with the rows that newer saves do not have."""
        #: Kind to the number of its gapped segments in saves older than the current one.
        older = collections.Counter(
            one.kind for of_save in self._saves for one in of_save if self._is_gapped(one)
        )
        newer: dict[_Kind, np.ndarray] = {}

        def flags_of(kind: _Kind) -> np.ndarray:
            if kind not in newer:
                newer[kind] = np.zeros(self._group_rows[kind], bool)
            return newer[kind]

        for of_save, own in zip(reversed(self._saves), reversed(ranges), strict=True):
            for one, held, _ in own:
                if older[one.kind]:
                    for section in self._targets.sections(one.segment, held.rows):
                        set_flags(flags_of(one.kind), held.rows[section])
            for one in filter(self._is_gapped, of_save):
                older[one.kind] -= 1
                if (held := self._rows(one)) is None:
                    continue
                needed = None
                if one.kind in newer or older[one.kind]:
                    flags, needed = flags_of(one.kind), np.zeros(len(held.rows), bool)
                    for section in self._targets.sections(one.segment, held.rows):
                        rows = held.rows[section]
                        needed[section] = ~flags[rows]
                        flags[rows] = True
                yield SegmentRows(one, held, self._without_others(one, held, needed))

    def _without_others(
        self, one: LayerSegment, held: StoredRows, needed: np.ndarray | None
    ) -> np.ndarray | None:
        """Clears the needed rows that no target contains, if all targets are cyclic."""
        if not self._has_cycles:
            return needed
        group, columns, rows = one.segment.group, one.segment.columns, row_blocks.reach(held.rows)
        over = [
            target
            for field in one.segment.fields
            for target in self._targets.over(group, field, rows, columns)
        ]
        cycles = {target.cycle for target in over if target.cycle is not None}
        if not cycles or any(target.cycle is None for target in over):
            return needed
        every, found = np.asarray(held.rows), np.zeros(len(held.rows), bool)
        for cycle in cycles:
            section = row_blocks.row_slice(every, *cycle.rows)
            found[section] |= cycle.contains(every[section])
        return found if needed is None else needed & found

    def _is_gapped(self, one: LayerSegment, *, overlapping: bool = False) -> bool:
        """Returns whether a segment has row indices, and its group overlaps or does not."""
        is_overlapping = one.segment.group in self._overlapping
        return one.segment.ranges is None and is_overlapping == overlapping

    def _rows(self, one: LayerSegment) -> StoredRows | None:
        coming = self._coming.pop((id(one.layer), id(one.segment)), None)
        return self._indices(*one, self._targets) if coming is None else coming.result()


def _spans(held: StoredRows) -> tuple[Span, ...]:
    assert not isinstance(held.rows, np.ndarray)
    return row_blocks.spans_of(held.rows)


def _overlapping(segments: Iterable[LayerSegment]) -> set[str]:
    """Groups in which segments share cells without having the same fields and columns."""
    by_group: dict[str, dict[_Kind, LayerSegment]] = {}
    for one in segments:
        by_group.setdefault(one.segment.group, {})[one.kind] = one
    return {
        name
        for name, kinds in by_group.items()
        if any(_share_cells(*pair) for pair in itertools.combinations(kinds.values(), 2))
    }


def _share_cells(one: LayerSegment, other: LayerSegment) -> bool:
    shared = {*one.segment.fields} & {*other.segment.fields}
    split = [one.group.columns(spec) for spec in one.group.fields if spec.name in shared]
    apart = row_blocks.common(one.segment.columns, other.segment.columns)
    return bool(split) and (apart[0] < apart[1] or None in split)
