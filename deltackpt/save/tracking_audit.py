# SPDX-License-Identifier: Apache-2.0
"""The tracking audit: checks that unmarked rows of a sample equal those of the parent.

Each save keeps the bits and stamps of a few rows: some that it touched, some that earlier saves
touched, and random ones. The next save compares them: a row that was not touched since must have
the same bits and the same stamp. A TouchState that was re-created or reverted eventually passes the
parent's clock, but lacks the parent's stamps. If a state was reverted, or the optimizer moves rows
without ids, the bits differ. The sample is bounded in rows, bytes and tables, so its cost hardly
depends on the state; ``TrackingVerifier`` checks all rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from deltackpt.errors import TrackingError
from deltackpt.format import manifest, row_blocks
from deltackpt.format.manifest import Layout
from deltackpt.format.row_blocks import GroupEntry, RowSet, Span
from deltackpt.resources.runtime import Runtime
from deltackpt.save.branch import Clocks
from deltackpt.save.capture import FieldSource
from deltackpt.save.lineage import Intent
from deltackpt.save.selection import Sources, Where
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, TouchState, match_marks, matched
from deltackpt.tracking.fingerprints import check_marked, fingerprints, on_devices

#: Bounds of one save's sample.
ROWS = 1536
_BYTES = 1 << 20
_LEAST_ROWS = 64
#: Maximum number of tables of a group to sample, so that hundreds cost no more.
_TABLES = 16
#: Maximum number of rows of a table that an error lists.
_LISTED = 10
_rng = np.random.default_rng()


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """A few rows of one group as they were at a save."""

    rows: np.ndarray  # virtual row indices, int64 ascending, (n,)
    stamps: Mapping[str, np.ndarray]  # TouchState path to the stamps, int32 (n,); -1 without stamps
    bits: Mapping[str, np.ndarray]  # field name to the bits, uint8 (n, row_bytes)


#: Group, and which columns and rows of it this process holds, to the sample of these.
Samples = Mapping[tuple[str, Where], Sample]


def text(faults: Sequence[str], where: str) -> str:
    """Returns the text of the error; ``where`` are the old rows, such as ``in the parent``."""
    return (
        f"rows differ from those {where}, and no TouchState marks them as touched:\n"
        + "\n".join(faults)
        + "\nmark every id that the update moves and pass the TouchState that went through "
        "the same steps as the state, or use touched.track() or "
        'DeltaOptions(tracking="fingerprints")'
    )


def audit(sources: Sources, intent: Intent) -> tuple[list[str], Samples]:
    """Compares the rows that the parent sampled, if the save is a delta, and samples again.

    Returns a line for each table with unmarked rows that changed, and the sample for later saves.
    """
    faults: dict[str, list[np.ndarray]] = {}
    samples: dict[tuple[str, Where], Sample] = {}
    for plan in _plans(sources):
        known = _parent_sample(intent.sample or {}, plan)
        kept = touched = None
        if known is not None:
            kept, wrong = _compare_sample(sources, plan, known, intent)
            for table, rows in by_table(sources.layout, plan.group, wrong):
                faults.setdefault(table, []).append(rows)
        if intent.since or intent.recent:
            touched = sources.stamps.touched(plan.group.name, plan.where[1])
        samples[plan.key] = _sampled(sources, plan, kept, touched)
    return [listed(table, rows) for table, rows in sorted(faults.items())], samples


def sample_restored(split: Split, fresh: TouchState, runtime: Runtime) -> Samples:
    """Samples a state that was just restored, in which no row was touched."""
    keys = matched(fresh, split.layout)
    stamps = {table: {"": fresh.stamps[key]} for table, key in keys.items()}
    sources = Sources(split, stamps, runtime)
    return {plan.key: _sampled(sources, plan, None, None) for plan in _plans(sources)}


class TrackingVerifier:
    """The full proof, from one call to the next; not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[str, jax.Array] = {}
        self._clocks = Clocks()

    def verify(self, split: Split, marks: Sequence[Marks], clocks: Clocks) -> bool:
        """Checks that rows that changed since the last call are marked; False if there was none.

        After a TrackingError, the next call compares with the same state as this one.
        """
        if not marks:
            raise TrackingError(
                "verify_tracking: expected a TouchState in the state or passed as touched=, found "
                "none; create one with touched.init(tables)"
            )
        stamps = match_marks(marks, split.layout)
        now = fingerprints(on_devices(split.fields, split.layout), split.layout)
        seen = {reading.place: self._clocks.seen(reading) for reading in clocks.readings}
        since = {place: then.clock for place, then in seen.items() if then is not None}
        shapes = {name: rows.shape for name, rows in now.items()}
        comparable = len(since) == len(seen) and shapes == {
            name: rows.shape for name, rows in self._before.items()
        }
        if comparable:
            check_marked(self._before, now, stamps, since)
        self._before, self._clocks = jax.block_until_ready(now), clocks
        return comparable


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SamplePlan:
    """Rows of one group that can be sampled: those that this process holds of the same fields."""

    group: GroupEntry
    where: Where
    fields: Mapping[str, FieldSource]
    most: int = 0  # maximum number of rows to sample

    @property
    def local_rows(self) -> RowSet:
        return self.where[1]

    @property
    def key(self) -> tuple[str, Where]:
        return self.group.name, self.where

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())


def _plans(sources: Sources) -> list[_SamplePlan]:
    """Returns what to sample; ``always`` fields are not, since every save writes them whole."""
    found = []
    for group, where, fields in sources.by_rows():
        always = {spec.name for spec in group.fields if spec.always}
        compared = {name: field for name, field in fields.items() if name not in always}
        if compared and len(where[1]):
            found.append(_SamplePlan(group=group, where=where, fields=compared))
    total = sum(len(plan.local_rows) for plan in found)
    widest = max((plan.row_bytes for plan in found), default=0)
    most = min(ROWS, max(_LEAST_ROWS, _BYTES // max(1, widest)))
    return [
        dataclasses.replace(plan, most=max(8, most * len(plan.local_rows) // total))
        for plan in found
    ]


def _parent_sample(samples: Samples, plan: _SamplePlan) -> Sample | None:
    """Returns the parent's sample of the rows of a plan; None without one."""
    same = samples.get(plan.key)
    if same is not None and same.bits.keys() == plan.fields.keys():
        return same
    columns, _ = plan.where
    for (group, (sampled_columns, _)), sample in samples.items():
        if (group, sampled_columns) != (plan.group.name, columns):
            continue
        if sample.bits.keys() != plan.fields.keys():
            continue
        # If a table has grown, each process holds other rows.
        held = np.isin(sample.rows, plan.local_rows.intersect(sample.rows))
        if held.any():
            return Sample(
                sample.rows[held],
                {place: stamps[held] for place, stamps in sample.stamps.items()},
                {field: bits[held] for field, bits in sample.bits.items()},
            )
    return None


def _compare_sample(
    sources: Sources, plan: _SamplePlan, known: Sample, intent: Intent
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a sample that were not touched since, and those of them that changed."""
    stamps = sources.stamps.at(plan.group, known.rows)
    untouched, wrong = np.ones(len(known.rows), bool), np.zeros(len(known.rows), bool)
    for place, now in stamps.items():
        untouched &= now <= intent.since[place]
        seen = intent.seen.get(place)
        before = None if seen is None else known.stamps.get(seen.place)
        if before is not None:
            # A table may have got stamps in a TouchState that had none of it.
            wrong |= (now != before) & (now >= 0) & (before >= 0)
    for name, field in plan.fields.items():
        wrong |= differ(field.bits(known.rows), known.bits[name])
    return known.rows[untouched], known.rows[untouched & wrong]


def differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns which rows of two (n, row_bytes) uint8 arrays differ; compares 8-byte words."""
    size = math.gcd(8, one.shape[1])
    return (one.view(f"u{size}") != other.view(f"u{size}")).any(axis=1)


def _sampled(
    sources: Sources, plan: _SamplePlan, known: np.ndarray | None, touched: np.ndarray | None
) -> Sample:
    """A sample for the next save: touched rows, rows that were sampled before, and random ones."""
    if len(plan.local_rows) <= plan.most:
        rows = np.asarray(plan.local_rows.rows())
    else:
        spans = _few(plan)
        pieces = _drawn([range(*span) for span in spans], plan.most // 4)
        if known is not None:
            pieces.append(_consecutive(known, plan.most // 4))
        if touched is not None:
            in_spans = [touched[row_blocks.row_slice(touched, *span)] for span in spans]
            pieces += _drawn(in_spans, plan.most // 2)
        rows = plan.local_rows.intersect(row_blocks.distinct(np.concatenate(pieces)))
    rows = rows.astype(np.int64, copy=False)
    bits = {name: field.bits(rows) for name, field in plan.fields.items()}
    return Sample(rows, sources.stamps.at(plan.group, rows), bits)


def _few(plan: _SamplePlan) -> list[Span]:
    """Returns the spans to sample: a few shards of a few tables, different ones each time."""
    bounds = next(iter(plan.fields.values())).bounds
    if len(bounds) > _TABLES:
        bounds = bounds[np.sort(_rng.choice(len(bounds), _TABLES, replace=False))]
    return [(start, stop) for start, stop in bounds.tolist()]


def _drawn(sections: Sequence[range | np.ndarray], most: int) -> list[np.ndarray]:
    """Returns about ``most`` random values of sections, by their lengths; reads no others."""
    total, found = sum(map(len, sections)), []
    for section in filter(len, sections):
        at = np.arange(min(len(section), most))
        if total > most:
            count = -(-most * len(section) // total)
            at = row_blocks.distinct(_rng.integers(len(section), size=count))
        found.append(at + section.start if isinstance(section, range) else section[at])
    return found


def _consecutive(rows: np.ndarray, most: int) -> np.ndarray:
    """Returns at most ``most`` rows from a random one on, so that they are of few tables."""
    if len(rows) <= most:
        return rows
    return np.roll(rows, _rng.integers(len(rows)))[:most]


def by_table(
    layout: Layout, group: GroupEntry, rows: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Returns table name to row indices, for virtual row indices."""
    for table in manifest.tables_of_group(group, layout.tables) if len(rows) else ():
        piece = rows[row_blocks.row_slice(rows, table.offset, table.offset + table.rows)]
        if len(piece):
            yield table.name, piece - table.offset


def listed(table: str, pieces: Sequence[np.ndarray]) -> str:
    """Returns a line with a table and some of its rows."""
    rows = np.unique(np.concatenate(pieces))
    shown = ", ".join(map(str, rows[:_LISTED].tolist()))
    more = f", ... ({len(rows)} sampled rows)" if len(rows) > _LISTED else ""
    return f"  table {table}: rows {shown}{more}"
