# SPDX-License-Identifier: Apache-2.0
"""The rows and leaves of the training state that one ``append()`` copies, and its record.

A lossy row is always encoded from its live value, so errors do not add up over records. Dense
leaves are relative to the decoded previous full record in the same file, so each record corrects
the errors of the one before. If a batch fails, the next record is whole, in a new part.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from deltackpt.errors import OptionError, TrackingError, UnsupportedLeaf
from deltackpt.events import AppendEvent
from deltackpt.format import manifest, row_blocks
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.row_blocks import VALUES, RowSet
from deltackpt.format.wal_format import ITEM_BYTES, ITEMS, RecordHead, RecordItem, packed_values
from deltackpt.policies import CodecChoice
from deltackpt.resources.runtime import Reservation, Runtime
from deltackpt.save import dense_layout, pending_save
from deltackpt.save.capture import BusyClock, SegmentSource, StagedRows
from deltackpt.save.dense_save import DenseKeeper, DenseLeaves, WrittenDense
from deltackpt.save.selection import Sources, TouchedRows, including, virtual_rows
from deltackpt.save.shard import Plans, write_segments
from deltackpt.session.run import Run
from deltackpt.state import paths
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks, match_marks
from deltackpt.storage import shard_writer
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.wal.named_rows import Rows
from deltackpt.wal.segment_files import FilledRecord

#: Consecutive full records that are relative to the previous one; the next one is whole.
_AGAINST = 15


class DenseRecords:
    """Writes the dense leaves of one epoch, whole without a keeper; used by one thread."""

    def __init__(self, keeper: DenseKeeper | None):
        self._keeper = keeper
        self._reference: SaveId | None = None
        self._count = 0

    def restart(self) -> None:
        """Makes the next full record whole, for a new file or after a batch was abandoned."""
        if self._keeper is not None and self._reference is not None:
            self._keeper.failed(self._reference)
        self._reference, self._count = None, 0

    def write(
        self,
        dense: DenseLeaves,
        save_id: SaveId,
        sink_of: Callable[[str], SegmentSink],
    ) -> tuple[WrittenDense, int | None]:
        """Writes the dense leaves of a record; also returns its ``RecordHead.against``."""
        if self._keeper is None:
            return dense.write_layer(sink_of, save_id, None), None
        if self._count > _AGAINST:
            self.restart()
        self._count += 1
        against, self._reference = self._reference, save_id
        written = dense.write_layer(sink_of, save_id, against)
        return written, None if against is None else against.attempt

    def written(self, save_id: SaveId) -> None:
        """Releases the copies of earlier records: a record was written."""
        if self._keeper is not None and self._reference == save_id:
            self._keeper.committed(save_id, save_id)


@dataclasses.dataclass(eq=False, kw_only=True)
class Batch:
    """The data that one process appends in one call."""

    save_id: SaveId
    parent: SaveId | None  # The save that it is relative to; None: the previous record.
    full: bool
    rows: StagedRows  # Copied, or being copied.
    layout: Layout
    plans: Plans  # The first codecs to try.
    dense: DenseLeaves | None  # Of a full record.
    items: Sequence[RecordedItem]
    reservation: Reservation  # Held until it is durable.
    unix_ns: int  # When it was captured.
    started: float  # The same time, of ``time.perf_counter()``.
    blocked_secs: float = 0.0  # How long ``append()`` blocked.
    event: AppendEvent | None = None  # None until it is written.
    begins_file: bool = False  # Whether it is the first of a new segment.
    queued: bool = False  # Whether the writer has it, and releases its memory.

    def release(self) -> None:
        """Releases its memory. Idempotent."""
        self.rows.release()
        if self.dense is not None:
            self.dense.release()

    @property
    def row_count(self) -> int:
        """Returns the number of rows; rows with several column ranges count once per range."""
        return sum(len(one.rows) for one in self.rows.segments if VALUES in one.fields)

    @property
    def row_indices(self) -> dict[str, np.ndarray]:
        """Returns table to int64 ascending rows, without those of fields ``always`` written."""
        found: dict[str, np.ndarray] = {}
        for segment in self.rows.segments:
            if not isinstance(segment.rows, np.ndarray):
                continue
            for table in manifest.tables_of_group(
                self.layout.group_by_name[segment.group], self.layout.tables
            ):
                piece = row_blocks.row_slice(segment.rows, table.offset, table.offset + table.rows)
                rows = segment.rows[piece] - table.offset
                if len(rows):
                    held = found.get(table.name)
                    found[table.name] = rows if held is None else np.union1d(held, rows)
        return found


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
    sources = Sources(split, match_marks(marks, layout) if marks else {}, runtime)
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


class RecordedItem(NamedTuple):
    """An additional item of a WAL record."""

    name: str
    kind: Literal["bytes", "json"]
    data: bytes


def items_of(given: Mapping[str, object] | None) -> tuple[RecordedItem, ...]:
    """Returns additional items as stored: bytes unchanged, other values as JSON.

    A name must be a valid string: a reader would treat its record, and all later ones, as damaged.
    """
    for name in given or {}:
        if not isinstance(name, str) or paths.printable(name) != name:
            raise OptionError(
                f"items: expected valid strings as names, found {name!r} ({type(name).__name__}); "
                "rename it"
            )
    found = []
    for name, value in sorted((given or {}).items()):
        if isinstance(value, bytes):
            found.append(RecordedItem(name, "bytes", value))
            continue
        try:
            found.append(RecordedItem(name, "json", json.dumps(value).encode()))
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"items[{name!r}]: expected bytes or a JSON value, found "
                f"{type(value).__name__}: {error}; pass what a data iterator's get_state() returns"
            ) from error
    return tuple(found)


def as_json(given: Mapping[str, object] | None) -> dict[str, object]:
    """Returns additional items for a step that is saved instead of a record: bytes as base64."""
    return {
        name: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in (given or {}).items()
    }


def write_record(
    batch: Batch,
    dense: DenseRecords,
    sink_of: Callable[[str], SegmentSink],
    runtime: Runtime,
) -> tuple[FilledRecord, int]:
    """Writes a batch, whose rows are in host memory; returns the record and its dense bytes."""
    # Most records are written before another thread would begin.
    segments = write_segments(
        batch.rows, sink_of, batch.layout, batch.plans, runtime, BusyClock(), threads=1
    )
    leaves, against = None, None
    if batch.dense is not None:
        leaves, against = dense.write(batch.dense, batch.save_id, sink_of)
        segments += leaves.record.segments
    if data := b"".join(item.data for item in batch.items):
        entry = row_blocks.array_entry(ITEM_BYTES, (len(data),), np.dtype(np.uint8))
        shard_writer.write_array(sink_of(ITEMS), entry, [np.frombuffer(data, np.uint8)])
    head = RecordHead(
        part=0,
        part_start=0,
        full=batch.full,
        unix_ns=batch.unix_ns,
        values=None if leaves is None else packed_values(leaves.record.values),
        against=against,
        items=tuple(
            RecordItem(name=one.name, kind=one.kind, nbytes=len(one.data)) for one in batch.items
        ),
    )
    return FilledRecord(head, segments), 0 if leaves is None else leaves.nbytes
