# SPDX-License-Identifier: Apache-2.0
"""Which rows of which arrays this process reads for a save: all, or the touched ones.

The division of the rows depends on the layout, the shardings of the stamps and the process; each
save adds the arrays. Fields with the same local rows and columns share a segment, so the row
indices of a segment are stored once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import coordination, kernels
from deltackpt.cached import cached_property
from deltackpt.errors import TableSelectionError, TrackingError
from deltackpt.format import manifest, naming, row_blocks
from deltackpt.format.manifest import Cover, Layout, TableEntry
from deltackpt.format.records import IdentityCache
from deltackpt.format.row_blocks import CyclicRows, FieldSpec, GroupEntry, RowSet, Span, width
from deltackpt.resources.runtime import Runtime
from deltackpt.save import capture
from deltackpt.save.capture import FieldSource, SegmentSource
from deltackpt.state import placement
from deltackpt.state.stacks import MemberRows
from deltackpt.state.tables import Split

#: Columns of the fields that are as wide as the table, and the virtual rows.
Where = tuple[Span, RowSet]
#: Table name to the place of each TouchState that has stamps of it, to these, (rows,).
StampsByTable = Mapping[str, Mapping[str, Any]]
#: Table name to field name to array, (rows, *trailing).
Leaves = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class FieldPlan:
    """One field of one group as this process holds it."""

    name: str
    source: FieldSource  # without its arrays
    places: tuple[tuple[str, int], ...]  # table and shard of each array of the source
    rows: RowSet  # virtual rows that this process writes

    def source_of(self, leaves: Leaves) -> FieldSource:
        """Returns the source that a save reads, with the arrays of its state."""
        data = [
            placement.shard_data(leaves[table][self.name], shard) for table, shard in self.places
        ]
        return dataclasses.replace(self.source, data=data)


class Division:
    """The rows that this process reads from states of one layout; ``of`` caches divisions."""

    def __init__(self, layout: Layout, leaves: Leaves, stamps: StampsByTable):
        """Raises TableSelectionError if a leaf is sharded along an axis that saves do not split."""
        self.layout = layout
        self.members = {
            group.name: tuple(manifest.tables_of_group(group, layout.tables))
            for group in layout.groups
        }
        self._check_shardings(leaves)
        #: For each group, its stamps as fields, each named after the path of its TouchState.
        self.stamps = {
            group: tuple(_stamp_plans(members, stamps)) for group, members in self.members.items()
        }
        turns = {table.name: turn for turn, table in enumerate(layout.tables)}
        known = {table: next(iter(held.values()), None) for table, held in stamps.items()}
        self.fields: dict[str, dict[Where, dict[str, FieldPlan]]] = {}
        for group in layout.groups:
            plans = [
                plan
                for spec in group.fields
                for plan in _field_plans(spec, self.members[group.name], leaves, known, turns)
            ]
            self.fields[group.name] = _by_rows(group, plans)
        self.local_rows = {
            group: row_blocks.joined(span for _, held in by_rows for span in held.reach)
            for group, by_rows in self.fields.items()
        }
        #: For each group and TouchState, the local rows of the tables that have stamps in it.
        self.stamped = {
            (group, plan.name): _common(
                self.local_rows[group],
                row_blocks.joined(
                    (table.offset, table.offset + table.rows)
                    for table in members
                    if plan.name in stamps[table.name]
                ),
            )
            for group, members in self.members.items()
            for plan in self.stamps[group]
        }

    def _check_shardings(self, leaves: Leaves) -> None:
        faults = []
        for group in self.layout.groups:
            for spec, table in itertools.product(group.fields, self.members[group.name]):
                leaf = leaves[table.name][spec.name]
                array = leaf.array if isinstance(leaf, MemberRows) else leaf
                if placement.is_split_beyond(array, group.axes(spec)):
                    path = manifest.path_name(table.leaves[spec.name])
                    faults.append(f"{path}: {array.sharding} of shape {array.shape}")
        if faults:
            raise TableSelectionError(
                "save: expected tables and slots sharded by rows, and by columns only if as wide "
                f"as their tables, found\n{naming.listed(faults)}\nshard these by rows"
            )

    @cached_property
    def owned_cells(self) -> dict[str, int]:
        """Returns group to the number of cells that it writes in a base, if there are any."""
        found = {
            group: sum(
                len(held) * math.prod(plan.source.trailing[:1])
                for (_, held), plans in by_rows.items()
                for plan in plans.values()
            )
            for group, by_rows in self.fields.items()
        }
        return {group: cells for group, cells in found.items() if cells}

    def cover(self, group: GroupEntry) -> Cover:
        """Returns the cover of the rows that it writes in a base, in one group."""
        wheres = list(self.fields[group.name])
        rows = row_blocks.rows_of(itertools.chain.from_iterable(held.reach for _, held in wheres))
        return manifest.cover(group, self.layout.tables, rows, [columns for columns, _ in wheres])


def _common(spans: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    rows = row_blocks.rows_of(spans)
    pieces = row_blocks.row_slices(rows, others)
    return tuple(span for piece in pieces for span in row_blocks.spans_of(rows[piece]))


def divide(layout: Layout, leaves: Leaves, stamps: StampsByTable) -> Division:
    """Returns the cached division of a state; ``stamps`` may be empty for a base."""
    return _divisions.get(lambda: Division(layout, leaves, stamps), layout, rest=_kinds(stamps))


_divisions: IdentityCache[Division] = IdentityCache()


def _stamp_shards(stamps: Any) -> list[tuple[Span, int]]:
    """Returns the distinct shards of stamps on this process, each by its rows, ascending."""
    if not isinstance(stamps, jax.Array):
        return [((0, stamps.shape[0]), placement.ITSELF)]
    found = {box.rows: shard for box, shard in placement.shard_boxes(stamps).items()}
    return sorted(found.items())


def _stamp_plans(members: Iterable[TableEntry], stamps: StampsByTable) -> Iterator[FieldPlan]:
    """Yields the stamps of a group's tables, as one field for each TouchState with some."""
    found: dict[str, list[tuple[Span, str, int]]] = {}
    for table in members:
        for place, array in stamps.get(table.name, {}).items():
            for (first, last), shard in _stamp_shards(array):
                span = table.offset + first, table.offset + last
                found.setdefault(place, []).append((span, table.name, shard))
    for place, shards in found.items():
        bounds = np.array([span for span, _, _ in shards], np.int64)
        source = FieldSource(
            columns=(0, 1),
            trailing=(),
            dtype=np.dtype(np.int32),
            on_host=all(capture.on_host(stamps[table][place]) for _, table, _ in shards),
            bounds=bounds,
            firsts=bounds[:, 0].copy(),
            data=[],
        )
        places = tuple((table, shard) for _, table, shard in shards)
        yield FieldPlan(place, source, places, RowSet(()))


def _kinds(stamps: StampsByTable) -> tuple[object, ...]:
    kinds = [
        kind
        for table, held in stamps.items()
        for place, array in held.items()
        for kind in (table, place, getattr(array, "sharding", None))
    ]
    return coordination.process_index(), coordination.process_count(), *kinds


def _field_plans(
    spec: FieldSpec,
    members: Sequence[TableEntry],
    leaves: Leaves,
    stamps: Mapping[str, object],
    turns: Mapping[str, int],
) -> list[FieldPlan]:
    """Returns what this process writes of one field: a plan for each column range that it has."""
    #: Virtual rows of each shard, the virtual row of its first one, its table, and its number.
    by_columns: dict[Span, list[tuple[int, int, int, str, int]]] = {}
    cycles: list[CyclicRows] = []
    for table in members:
        leaf = leaves[table.name][spec.name]
        if isinstance(leaf, MemberRows):
            start, stop = table.offset, table.offset + table.rows
            cycle = CyclicRows((start, stop), leaf.stack.shards, leaf.owned_phases())
            if cycle.count:
                shard = start, stop, start, table.name, placement.ITSELF
                by_columns.setdefault((0, width(spec.trailing)), []).append(shard)
            if 0 < cycle.count < table.rows:
                cycles.append(cycle)
            continue
        boxes = placement.owned_boxes(leaf, stamps.get(table.name), turn=turns[table.name])
        for owned in boxes:
            start, stop = table.offset + owned.box.rows[0], table.offset + owned.box.rows[1]
            shard = start, stop, start - owned.skip, table.name, owned.shard
            by_columns.setdefault(owned.box.columns, []).append(shard)
    found = []
    for columns, shards in sorted(by_columns.items()):
        _, _, _, table, number = shards[0]
        data = placement.shard_data(leaves[table][spec.name], number)
        shards = sorted(shards)
        bounds = np.array([shard[:3] for shard in shards], np.int64)
        source = FieldSource(
            columns=columns,
            trailing=tuple(data.shape[1:]),
            dtype=np.dtype(data.dtype),
            on_host=all(capture.on_host(leaves[table][spec.name]) for *_, table, _ in shards),
            bounds=bounds[:, :2],
            firsts=bounds[:, 2],
            data=[],
        )
        partial = cycles if columns == (0, width(spec.trailing)) else []
        whole = {shard[:2] for shard in shards} - {cycle.rows for cycle in partial}
        rows = RowSet(row_blocks.joined(whole), tuple(partial))
        places = tuple((table, number) for *_, table, number in shards)
        found.append(FieldPlan(spec.name, source, places, rows))
    return found


def _by_rows(group: GroupEntry, plans: Sequence[FieldPlan]) -> dict[Where, dict[str, FieldPlan]]:
    """Returns the fields of a group, by the columns and rows that this process writes."""
    specs = {spec.name: spec for spec in group.fields}
    found: dict[Where, dict[str, FieldPlan]] = {}
    narrow = []
    for plan in plans:
        spec = specs[plan.name]
        rows = plan.rows
        if group.columns(spec) is not None:
            found.setdefault((plan.source.columns, rows), {})[plan.name] = plan
        else:
            narrow.append((rows, plan))
    for rows, plan in narrow:
        # It has no columns, so it can join any segment of the same rows.
        where = next((where for where in found if where[1] == rows), ((0, group.width), rows))
        found.setdefault(where, {})[plan.name] = plan
    return found


#: More stamps are scanned by another thread.
_INLINE_STAMPS = 1 << 20


class Stamps:
    """The stamps of this process's rows, by group; threads find the touched rows."""

    def __init__(self, division: Division, stamps: StampsByTable, runtime: Runtime):
        self._division = division
        self._layout = division.layout
        self._stamps = stamps
        self._sources = {
            group: {plan.name: plan.source_of(stamps) for plan in plans}
            for group, plans in division.stamps.items()
        }
        self._runtime = runtime
        #: Group to the scans of each TouchState.
        self._scans: dict[str, list[list[Callable[[], np.ndarray]]]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._spans = division.local_rows

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Returns the paths of the TouchStates."""
        return tuple({place: None for held in self._stamps.values() for place in held})

    def scan(self, since: Mapping[str, int]) -> None:
        """Starts to find the rows touched after a clock, given by TouchState path."""
        self._rows = {}
        for group, sources in self._sources.items():
            self._scans[group] = [
                [
                    scan
                    for span in self._division.stamped[group, place]
                    for scan in self._scans_of(source, since[place], *span)
                ]
                for place, source in sources.items()
            ]

    def _scans_of(
        self, source: FieldSource, since_clock: int, start: int, stop: int
    ) -> Iterator[Callable[[], np.ndarray]]:
        """Returns functions for the touched rows of a span; threads find those of many rows."""
        find, count = functools.partial(touched_rows, source, since_clock), stop - start
        if count <= _INLINE_STAMPS:
            yield functools.partial(find, start, stop)
            return
        if source.on_host:
            pieces = min(self._runtime.threads, -(-count // _INLINE_STAMPS))
            cuts = [start + count * number // pieces for number in range(pieces + 1)]
            spans = [*itertools.pairwise(cuts)]
        else:
            spans = _common([(start, stop)], source.bounds.tolist()) or [(start, stop)]
        for span in spans:
            yield self._runtime.submit(find, *span).result

    def touched(self, group: str, held: RowSet) -> np.ndarray:
        """Returns the rows among ``held`` that any TouchState marks: virtual, int64, ascending."""
        if group not in self._rows:
            found = [
                np.concatenate([scan() for scan in scans] or [np.empty(0, np.int64)])
                for scans in self._scans[group]
            ]
            self._rows[group] = found[0] if len(found) == 1 else row_blocks.union_of(found)
        rows = self._rows[group]
        if held == RowSet(self._spans[group]):
            return rows
        return held.intersect(rows)

    def at(self, group: GroupEntry, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns TouchState path to the int32 stamps of a few virtual rows; -1 if unknown here."""
        return self.dispatch_at(group, rows)()

    def dispatch_at(
        self, group: GroupEntry, rows: np.ndarray
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Starts to read ``at``; returns a function that waits for the result."""
        # The returned function must not refer to the state, which later steps donate.
        landing, places = [], self.places
        for place, source in self._sources[group.name].items():
            positions = source.held_positions(rows)
            landing.append((place, positions, source.dispatch_bits(rows[positions])))

        def landed() -> dict[str, np.ndarray]:
            found = {place: np.full(len(rows), -1, np.int32) for place in places}
            for place, positions, bits in landing:
                found[place][positions] = bits().view(np.int32)[:, 0]
            return found

        return landed

    def shared(self, since: Mapping[str, int]) -> dict[str, int]:
        """Returns a CRC32C of the touched rows for each stamp shard that other processes hold too.

        Each process updates replicated stamps on its own. If they differed, the processes would
        write their rows by different stamps.
        """
        found = {}
        for table in self._layout.tables:
            for place, stamps in self._stamps.get(table.name, {}).items():
                for span in sorted(placement.shared_rows(stamps)):
                    found[f"{table.name}[{span[0]}:{span[1]}]@{place}"] = self._runtime.submit(
                        _crc32c_of_touched,
                        self._sources[table.group][place],
                        since[place],
                        table.offset,
                        span,
                    )
        return {key: crc.result() for key, crc in found.items()}


@placement.neutral()  # On each thread.
def touched_rows(source: FieldSource, since_clock: int, start: int, stop: int) -> np.ndarray:
    """Returns those of the virtual rows [start, stop) stamped after a clock, int64 ascending.

    Raises TrackingError if ``source``, the stamps of one TouchState, does not have all these rows.
    """
    bounds = source.bounds
    first = int(np.searchsorted(bounds[:, 1], start, "right"))
    last = int(np.searchsorted(bounds[:, 0], stop))
    held = np.clip(bounds[first:last], start, stop)
    if (held[:, 1] - held[:, 0]).sum() != stop - start:
        raise TrackingError(
            f"stamps of rows {start} to {stop} of a group: expected all on this process, found "
            f"those of {bounds[first:last].tolist()}; pass the stamps the sharding of their "
            "table's rows: touched.init(tables)"
        )
    shards, spans = source.data[first:last], (held - bounds[first:last, :1]).tolist()
    if source.on_host:
        # Only the first and the last shard may be cut; the kernels read the buffers of others.
        for end in {0, len(shards) - 1} if shards else ():
            if spans[end] != [0, len(shards[end])]:
                shards[end] = np.asarray(shards[end])[slice(*spans[end])]
        return kernels.scan(shards, since_clock, start)
    found = [np.empty(0, np.int64)]
    for data, span, virtual in zip(shards, spans, bounds[first:last, 0]):
        found.append(_touched_in(data, since_clock, *span) + virtual)
    return np.concatenate(found)


def _touched_in(stamps: Any, since_clock: int, start: int, stop: int) -> np.ndarray:
    """Returns those of the rows [start, stop) of a shard that were stamped after the clock."""
    if capture.on_host(stamps):  # Stamps of other tables are on devices.
        return kernels.scan([np.asarray(stamps)[start:stop]], since_clock, start)
    with placement.on_device_of(stamps):
        count = int(_count_touched(stamps, since_clock))
        rows = np.asarray(_touched(stamps, since_clock, size=capture.bucket(count)))[:count]
    return rows[(rows >= start) & (rows < stop)].astype(np.int64)


def _crc32c_of_touched(source: FieldSource, since_clock: int, offset: int, span: Span) -> int:
    """A checksum of the rows of a span of a table that were touched, and of when."""
    rows = touched_rows(source, since_clock, offset + span[0], offset + span[1])
    when = source.bits(rows).view(np.int32)[:, 0]
    crc = google_crc32c.value((rows - offset).astype("<i8").tobytes())
    return google_crc32c.extend(crc, (when - np.int32(since_clock)).astype("<i4").tobytes())


@jax.jit
def _count_touched(stamps: jax.Array, since_clock: int) -> jax.Array:
    return jnp.sum(stamps > since_clock, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def _touched(stamps: jax.Array, since_clock: int, *, size: int) -> jax.Array:
    return jnp.nonzero(stamps > since_clock, size=size)[0].astype(jnp.int32)


#: Returns the touched rows among some rows of a group: virtual, int64, ascending.
TouchedRows = Callable[[str, RowSet], np.ndarray]


class Sources:
    """The parts of the training state that this process reads for one save."""

    def __init__(self, split: Split, stamps: StampsByTable, runtime: Runtime):
        """Determines which rows of which fields to read; ``stamps`` may be empty for a base."""
        self.layout = split.layout
        self.division = divide(split.layout, split.fields, stamps)
        self._found = {
            group: {
                where: {name: plan.source_of(split.fields) for name, plan in plans.items()}
                for where, plans in by_rows.items()
            }
            for group, by_rows in self.division.fields.items()
        }
        self.stamps = Stamps(self.division, stamps, runtime)

    def by_rows(self) -> Iterator[tuple[GroupEntry, Where, Mapping[str, FieldSource]]]:
        """Yields the fields of each group by the columns and the rows that this process has."""
        for group in self.layout.groups:
            for where, fields in self._found[group.name].items():
                yield group, where, fields

    def fields_of(self, group: str, where: Where) -> Mapping[str, FieldSource]:
        """Returns the fields of a group that this process has for given columns and rows."""
        return self._found.get(group, {}).get(where, {})

    def segments(
        self, *, whole: bool, touched: TouchedRows | None = None, always: bool = True
    ) -> list[SegmentSource]:
        """Returns the segments that this process reads for a base, a delta or a WAL record.

        It reads all rows if ``whole``, otherwise the ``touched`` ones (by default those of
        ``Stamps.scan``) and, if ``always``, all rows of ``always`` fields.
        """
        segments, touched = [], touched or self.stamps.touched
        for group, (columns, held), fields in self.by_rows():
            unmarked = {spec.name for spec in group.fields if spec.always}
            complete, changed = dict(fields), {}
            if not whole:
                complete = {name: fields[name] for name in fields if always and name in unmarked}
                changed = {name: fields[name] for name in fields if name not in unmarked}
            for chosen, is_whole in ((complete, True), (changed, False)):
                if not chosen:
                    continue
                taken = held.rows() if is_whole else touched(group.name, held)
                if len(taken):
                    key = None if whole or group.key is None else group.key.name
                    segments.append(SegmentSource(group.name, columns, taken, chosen, key))
        return segments


def including(touched: TouchedRows, rows: Mapping[str, np.ndarray], layout: Layout) -> TouchedRows:
    """Returns a function for the union of the touched rows and others, int64 ascending."""
    further = virtual_rows(rows, layout)
    if not further:
        return touched

    def joined(group: str, held: RowSet) -> np.ndarray:
        found = touched(group, held)
        more = held.intersect(further[group]) if group in further else found[:0]
        return np.union1d(found, more) if len(more) else found

    return joined


def virtual_rows(rows: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Returns group to the virtual rows of some rows of its tables; all int64 ascending."""
    found: dict[str, list[np.ndarray]] = {}
    for table in sorted(layout.tables, key=lambda table: table.offset):
        held = rows.get(table.name)
        if held is not None and len(held):
            found.setdefault(table.group, []).append(held + np.int64(table.offset))
    return {group: np.concatenate(pieces) for group, pieces in found.items()}
