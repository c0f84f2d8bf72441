# SPDX-License-Identifier: Apache-2.0
"""Captures a batch from the training state: which rows, and their copies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from deltackpt.errors import OptionError, TrackingError, UnsupportedLeaf
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.records import IdentityCache
from deltackpt.format.row_blocks import VALUES, RowSet
from deltackpt.policies import CodecChoice
from deltackpt.resources.runtime import Reservation, Runtime
from deltackpt.save import dense_layout, pending_save
from deltackpt.save.branch import Clocks
from deltackpt.save.capture import SegmentSource, StagedRows
from deltackpt.save.dense_save import DenseKeeper, DenseLeaves
from deltackpt.save.selection import Sources, TouchedRows, including, virtual_rows
from deltackpt.session.run import Run
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, match_marks
from deltackpt.wal.record_batch import Batch, RecordedItem

#: Flags for all rows of a table are set and looked through where there are at most so many for each
#: number: with more it is faster to sort the numbers.
_MOST_FLAGS = 64
#: Table name to row numbers, int64 ascending.
Rows = Mapping[str, np.ndarray]


def rows_of(ids: Mapping[str, object], layout: Layout, clocks: Clocks) -> Rows:
    """Returns the rows that ``append(ids=...)`` names, checked and sorted, by full table name."""
    if clocks.windows:
        raise OptionError(
            "ids: expected none with optax.MultiSteps, which moves all gathered rows at the end of "
            "a window; omit them: the stamps record which rows moved"
        )
    names = _meant.get(lambda: _tables_meant(ids, layout), layout, rest=tuple(ids))
    found: dict[str, np.ndarray] = {}
    for (given, indices), (name, count) in zip(ids.items(), names, strict=True):
        rows = np.asarray(indices)
        if rows.dtype.kind not in "iu" and rows.size:
            raise OptionError(
                f"ids[{given!r}]: expected integers, found dtype {rows.dtype}; pass row indices"
            )
        flat = rows.astype(np.int64, copy=False).reshape(-1)
        # Without its sign a negative one is beyond all tables.
        if flat.size and int(flat.view(np.uint64).max()) >= count:
            raise OptionError(
                f"ids[{given!r}]: expected rows from 0 to {count - 1}, found {rows.min()} to "
                f"{rows.max()}; pass the indices that the training step looked up"
            )
        rows = _ascending(flat, count)
        found[name] = rows if name not in found else np.union1d(found[name], rows)
    return found


#: Names and rows of the tables that the keys of ``ids`` mean.
_meant: IdentityCache[tuple[tuple[str, int], ...]] = IdentityCache()


def _tables_meant(given: Iterable[str], layout: Layout) -> tuple[tuple[str, int], ...]:
    tables = {table.name: table.rows for table in layout.tables}
    found = []
    for one in given:
        name = naming.meant(one, tables, OptionError)
        if name not in tables:
            raise OptionError(
                f"ids[{one!r}]: expected one of {sorted(tables)}, found no such table"
            )
        found.append((name, tables[name]))
    return tuple(found)


def _ascending(indices: np.ndarray, rows: int) -> np.ndarray:
    """Returns sorted unique row indices."""
    if rows > _MOST_FLAGS * len(indices):
        return row_blocks.distinct(indices)
    # For 16,384 ids of 80,000 rows, 5 times as fast as sorting and 15 times as np.unique.
    held = np.zeros(rows, bool)
    held[indices] = True
    return held.nonzero()[0]


def segments_of(
    split: Split,
    marks: Sequence[Marks],
    rows: Rows | None,  # Those that the caller names; None if the stamps determine them.
    pending: Rows,
    *,
    since: Mapping[str, int],  # TouchState path to the clock after which rows are touched.
    always: bool,  # Whether to include fields that are ``always`` written.
    runtime: Runtime,
) -> tuple[Sources, TouchedRows | None, list[SegmentSource]]:
    """Returns what this process reads, the named and pending rows, and the rows of a record."""
    layout = split.layout
    sources = Sources(layout, split.fields, match_marks(marks, layout) if marks else {}, runtime)
    if rows is not None:
        named, nothing = virtual_rows(rows, layout), np.empty(0, np.int64)

        def touched(group: str, held: RowSet) -> np.ndarray:
            return held.intersect(named.get(group, nothing))

        given = including(touched, pending, layout)
        return sources, given, [*sources.segments(whole=False, touched=given, always=always)]
    if not marks:
        raise TrackingError(
            "append: expected a TouchState or ids, found neither; pass append() the TouchState "
            "that the training step returned, or the rows that it looked up"
        )
    sources.stamps.scan(since)
    found = including(sources.stamps.touched, pending, layout)
    return sources, None, [*sources.segments(whole=False, touched=found, always=always)]


def capture(
    save_id: SaveId,
    parent: SaveId | None,
    run: Run,
    split: Split,
    segments: Sequence[SegmentSource],
    *,
    full: bool,  # Whether to include dense leaves.
    items: Sequence[RecordedItem],
    runtime: Runtime,
    references: DenseKeeper | None,  # Of the dense leaves; None if they are stored in full.
    reservation: Reservation,
    started: float,  # When ``append()`` was called, of ``time.perf_counter()``.
) -> Batch:
    """Copies rows and dense leaves, consistent with each other."""
    choices = split.codecs
    if run.options.wal is not None and run.options.wal.codec is not None:
        chosen = CodecChoice.from_option(run.options.wal.codec)
        choices = {
            group: {name: chosen if name == VALUES else one for name, one in fields.items()}
            for group, fields in choices.items()
        }
    plans = pending_save.planned(choices, "delta", run.lineage.restores)
    rows = StagedRows(segments, plans, runtime)
    leaves: DenseLeaves | None = None
    try:
        if full and split.layout.dense:
            leaves = _dense(split, run.coordinator.index, runtime, references)
        rows.wait()
    except BaseException:
        rows.release()
        if leaves is not None:
            leaves.release()
        raise
    return Batch(
        save_id=save_id,
        parent=parent,
        full=full,
        rows=rows,
        layout=split.layout,
        choices=choices,
        plans=plans,
        dense=leaves,
        items=items,
        reservation=reservation,
        unix_ns=time.time_ns(),
        started=started,
    )


def _dense(
    split: Split, process: int, runtime: Runtime, references: DenseKeeper | None
) -> DenseLeaves:
    leaves = dense_layout.storable(split.dense)
    try:
        if references is not None:
            return references.capture(leaves, split.layout.dense, process)
        return DenseLeaves.capture(leaves, process, runtime)
    except UnsupportedLeaf as error:
        raise OptionError(
            f"append: expected dense leaves that a WAL record can contain, found that {error}; "
            'append only soft records, with WalOptions(dense="soft"), and save() steps'
        ) from error
