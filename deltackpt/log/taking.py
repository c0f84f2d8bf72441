# SPDX-License-Identifier: Apache-2.0
"""Takes a batch from the training state: which rows, and their copies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deltackpt.errors import OptionError, TrackingError, UnsupportedLeaf
from deltackpt.format import blocks, globs
from deltackpt.format.blocks import VALUES, Span
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.handlers import dense
from deltackpt.log.batch import Batch, Item, cut
from deltackpt.log.dense_frames import Dense
from deltackpt.policy import BitWidthPolicy, CodecChoice
from deltackpt.resources.staging import Staging
from deltackpt.save import snapshot
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_blocks import DenseKeeper
from deltackpt.save.extract import SegmentSource
from deltackpt.save.selection import Sources, TouchedRows, including, virtual_rows, within
from deltackpt.save.taken import CopiedRows
from deltackpt.state.marks import match_marks
from deltackpt.state.remembered import ByLayout
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks

#: So many stamps are looked at, and so many bytes copied, before another thread would begin.
_LOOKED_AT_HERE, _COPIED_HERE_BYTES = 4 << 20, 8 << 20
#: Flags for all rows of a table are set and looked through where there are at most so many for each
#: number: with more it is faster to sort the numbers.
_MOST_FLAGS = 64
#: Table name to row numbers, int64 ascending.
Rows = Mapping[str, np.ndarray]


def rows_of(ids: Mapping[str, Any], split: Split) -> Rows:
    """The rows that a caller says were touched.

    Args:
      ids: tables, by their paths or the ends of exactly one path each, to numbers of rows, in any
        order and shape.
      split: the state.

    Raises:
      OptionError: there is no such table, the numbers are no integers, or are not all of the table;
        or there are accumulators of gradients, whose rows move later.
    """
    if split.windows:
        raise OptionError(
            "ids: expected none with optax.MultiSteps, which moves all rows that it has gathered "
            "at the end of a window; leave them out: the stamps say which rows moved"
        )
    names = _meant.get(split.layout, tuple(ids), lambda: _tables_meant(ids, split.layout))
    found: dict[str, np.ndarray] = {}
    for (given, numbers), (name, count) in zip(ids.items(), names, strict=True):
        rows = np.asarray(numbers)
        if rows.dtype.kind not in "iu" and rows.size:
            raise OptionError(
                f"ids[{given!r}]: expected integers, found dtype {rows.dtype}; give numbers of rows"
            )
        flat = rows.astype(np.int64, copy=False).reshape(-1)
        # Without its sign a negative one is beyond all tables.
        if flat.size and int(flat.view(np.uint64).max()) >= count:
            raise OptionError(
                f"ids[{given!r}]: expected rows from 0 to {count - 1}, found {rows.min()} to "
                f"{rows.max()}; give those that the table was looked up with"
            )
        rows = _ascending(flat, count)
        found[name] = rows if name not in found else np.union1d(found[name], rows)
    return found


#: Names and rows of the tables that the keys of ``ids`` mean.
_meant: ByLayout[tuple[tuple[str, int], ...]] = ByLayout()


def _tables_meant(given: Iterable[str], layout: Layout) -> tuple[tuple[str, int], ...]:
    tables = {table.name: table.rows for table in layout.tables}
    found = []
    for one in given:
        name = globs.meant(one, tables, OptionError)
        if name not in tables:
            raise OptionError(
                f"ids[{one!r}]: expected one of {sorted(tables)}, found no such table"
            )
        found.append((name, tables[name]))
    return tuple(found)


def _ascending(numbers: np.ndarray, rows: int) -> np.ndarray:
    """Each of some numbers of rows once, in order."""
    if rows > _MOST_FLAGS * len(numbers):
        return blocks.distinct(numbers)
    # Of 16,384 ids of 80,000 rows five times as fast as sorting them, and 15 times as np.unique.
    held = np.zeros(rows, bool)
    held[numbers] = True
    return held.nonzero()[0]


def segments_of(
    split: Split,
    marks: Sequence[Marks],
    *,
    since: Mapping[str, int],
    rows: Rows | None,
    owed: Rows,
    always: bool,
    staging: Staging,
) -> list[SegmentSource]:
    """The rows that a mark holds, as this process has them.

    Args:
      split: the state.
      marks: its TouchStates, and a given one.
      since: place of each TouchState to the clock after which its rows are touched.
      rows: the touched ones where the caller knows them.
      owed: further ones.
      always: whether fields that are ``always`` written are in it.
      staging: whose threads look at the stamps.

    Raises:
      TrackingError: a TouchState does not fit the tables.
    """
    stamps = match_marks(marks, split.layout) if marks else {}
    sources = Sources(split.layout, split.fields, stamps, staging)
    if rows is None and not marks:
        raise TrackingError(
            "log: expected a TouchState, or ids, found neither; give log() the TouchState that the "
            "training step returned, or the rows that it looked up"
        )
    total = sum(group.rows for group in split.layout.groups)
    with staging.here(total <= _LOOKED_AT_HERE):
        if rows is None:
            sources.stamps.look(since)
        find = sources.stamps.touched if rows is None else _given(rows, split.layout)
        touched = including(find, owed, split.layout)
        return cut(sources.segments(whole=False, touched=touched, always=always))


def _given(rows: Rows, layout: Layout) -> TouchedRows:
    """What gives the rows that a caller says were touched."""
    given, nothing = virtual_rows(rows, layout), np.empty(0, np.int64)

    def find(group: str, spans: tuple[Span, ...]) -> np.ndarray:
        return within(given.get(group, nothing), spans)

    return find


def take(
    save_id: SaveId,
    split: Split,
    segments: Sequence[SegmentSource],
    *,
    full: bool,
    items: Sequence[Item],
    codec: str | BitWidthPolicy | CodecChoice | None,
    restores: int,
    process: int,
    staging: Staging,
    references: DenseKeeper | None,
    started: float,
) -> Batch:
    """Copies rows and dense leaves: all are of one moment when it returns.

    Args:
      save_id: of the mark.
      split: the state.
      segments: of ``segments_of``.
      full: whether dense leaves are in it.
      items: further items.
      codec: of the tables' rows; None for those of deltas.
      restores: how often training has been restored.
      process: index of this process.
      staging: whose memory holds the copies.
      references: what dense leaves are kept against; None where they are kept whole.
      started: when ``log()`` was called, of ``time.perf_counter()``.

    Raises:
      OptionError: a dense leaf is none that a mark can hold.
    """
    choices = _choices(split, codec)
    plans = snapshot.planned(choices, "delta", restores)
    nbytes = sum(one.nbytes for one in segments)
    with staging.here(nbytes <= _COPIED_HERE_BYTES):
        rows = CopiedRows(segments, lambda one: snapshot.codecs_of(plans[one.group]), staging)
    leaves: Dense | None = None
    try:
        if full and split.layout.dense:
            leaves = _dense(split, process, staging, references)
        rows.wait()
    except BaseException:
        rows.release()
        if leaves is not None:
            leaves.release()
        raise
    return Batch(
        save_id=save_id,
        full=full,
        rows=rows,
        layout=split.layout,
        choices=choices,
        plans=plans,
        dense=leaves,
        items=items,
        nbytes=nbytes + (0 if leaves is None else leaves.nbytes),
        unix_ns=time.time_ns(),
        started=started,
    )


def _choices(
    split: Split, codec: str | BitWidthPolicy | CodecChoice | None
) -> Mapping[str, Mapping[str, CodecChoice]]:
    if codec is None:
        return split.codecs
    chosen = CodecChoice.of(codec)
    return {
        group: {field: chosen if field == VALUES else choice for field, choice in fields.items()}
        for group, fields in split.codecs.items()
    }


def _dense(split: Split, process: int, staging: Staging, references: DenseKeeper | None) -> Dense:
    leaves = dense.storable(split.dense)
    try:
        if references is not None:
            return references.take(leaves, split.layout.dense, process)
        return DenseLeaves.take(leaves, process, staging)
    except UnsupportedLeaf as error:
        raise OptionError(
            f"log: expected dense leaves that a full mark can hold, found that {error}; take soft "
            'marks alone, with LogOptions(dense="soft"), and save() steps'
        ) from error
