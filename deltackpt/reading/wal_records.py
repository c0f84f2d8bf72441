# SPDX-License-Identifier: Apache-2.0
"""The WAL of one process: scans segments for records, without reading their rows.

A segment is layers appended to a file, each of them a record that names the digest of the previous
one. The scan verifies headers and footers; everything else is verified when it is read. A torn
layer ends a segment: its writer was killed, or is still writing it. Records in a later segment
still count. After a failed write, a new *part* begins, which names the last valid record of the
parts before.

Records are numbered without gaps, so any other loss or change is detected: see ``holes``. Records
missing at the end are detected because the writer stores its newest durable one beside the
segments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, DamagedWal, FormatMismatch
from deltackpt.format import naming, records, row_blocks, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.naming import SegmentId
from deltackpt.format.records import check_segment
from deltackpt.format.row_blocks import DenseBlocks, Encoding, Segment
from deltackpt.format.wal_format import ITEM_BYTES, ITEMS, RecordHead
from deltackpt.layers import footer
from deltackpt.layers.footer import PAGE_BYTES, REMOVED, EpochRef, Header, LayerArray, RowGroup
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.reading.shard_arrays import LayerArrays
from deltackpt.reading.wal_locations import DurableRecord, newest_durable
from deltackpt.resources import host_memory
from deltackpt.storage import arrays
from deltackpt.storage.store import DirIdentity, FileStore, Missing, StorePath

#: Read at once during a scan: headers and footers are small, and rows are passed over.
_WINDOW_BYTES = 64 << 10
#: A scan of small records reads up to this much at once.
_MAX_WINDOW_BYTES = 1 << 20
#: Read at once to find layers behind a damaged one.
_SEARCHED_BYTES = 8 << 20
#: How often a follower looks for damage in the growing end of a segment: otherwise, each poll would
#: read all of a record of 50 MB that is being written.
_SEARCH_SECS = 1.0
#: A power cut may leave this in place of a file's last pages; a layer never ends like this.
_ZEROS = bytes(16)


@dataclasses.dataclass(frozen=True, eq=False)
class WalRecord:
    """What one process wrote in one ``append()`` call.

    ``parent`` is the record or step since which its rows were touched. ``place`` is its part and
    number, and ``segment`` the file. Its chunks are read from ``layer``.
    """

    save_id: SaveId
    parent: SaveId
    place: SegmentId
    segment: StorePath
    head: RecordHead
    layer: LayerReader

    @property
    def name(self) -> str:
        """Returns its name in errors."""
        return _shown(self.segment, self.place.seq)

    @property
    def full(self) -> bool:
        """Returns whether it has the dense leaves."""
        return self.head.full

    @property
    def unix_secs(self) -> float:
        """Returns when it was captured, in seconds since 1970."""
        return self.head.unix_ns / 1e9

    @property
    def nbytes(self) -> int:
        """Returns its bytes."""
        return self.layer.nbytes

    @property
    def end(self) -> int:
        """Returns the offset of its end in its segment."""
        return self.layer.start + self.layer.nbytes

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The rows; raises Damaged if a row group is invalid."""
        return self._segments(lambda group: group.kind == "rows")

    @cached_property
    def dense(self) -> DenseBlocks | None:
        """The dense leaves; None if the record has none. Raises Damaged if they are invalid."""
        if self.head.values is None:
            return None
        segments = self._segments(lambda group: group.name.startswith(row_blocks.SEGMENTS))
        with records.as_damage(self.name), records.within("dense"):
            found = DenseBlocks(
                values=wal_format.unpacked_values(self.head.values),
                segments=segments,
                complete=self.head.against is None,
            )
            row_blocks.check(found)
        return found

    @cached_property
    def arrays(self) -> LayerArrays:
        """Returns the arrays of its layer."""
        return LayerArrays(self.layer.at, name=self.name, nbytes=self.nbytes)

    @property
    def dense_bytes(self) -> int:
        """Returns the stored bytes of its dense leaves."""
        return sum(
            self.layer.bytes_of(array)
            for array in self.layer.manifest.arrays
            if array.row_group.startswith(row_blocks.SEGMENTS)
        )

    def items(self) -> dict[str, object]:
        """Returns its additional items by name; raises DamagedWal."""
        nbytes = self.head.item_bytes
        arrays = [one for one in self.layer.manifest.arrays if one.row_group == ITEMS]
        kinds = [(one.name, one.shape, one.dtype) for one in arrays]
        found, start = {}, 0
        with damage_of(self):
            if nbytes and kinds != [(ITEM_BYTES, (nbytes,), "uint8")]:
                shown = f"{self.name}: row group {ITEMS!r}"
                raise Damaged(shown, f"{nbytes} bytes", f"{kinds}")
            out = host_memory.empty_buffer((nbytes,), np.dtype(np.uint8))
            if nbytes:
                self.layer.read_into(arrays[0], 0, nbytes, out)
            for item in self.head.items:
                data = bytes(out[start : start + item.nbytes])
                start += item.nbytes
                try:
                    found[item.name] = data if item.kind == "bytes" else json.loads(data)
                except (ValueError, RecursionError) as error:
                    raise Damaged(self.name, "a JSON item", str(error)) from error
        return found

    def _segments(self, wanted: Callable[[RowGroup], bool]) -> tuple[Segment, ...]:
        found = []
        for group in filter(wanted, self.layer.manifest.row_groups):
            if group.name != REMOVED:
                with records.as_damage(self.name), records.within(f"row group {group.name}"):
                    found.append(segment_of(group, self.layer.arrays(group).values()))
        return tuple(found)


def segment_of(group: RowGroup, stored: Iterable[LayerArray]) -> Segment:
    """Returns the segment that was written as a row group, without statistics of its encodings.

    Raises InvalidRecord if the row group is not a valid segment.
    """
    encodings = tuple(
        Encoding(
            field=field,
            codec=codec,
            reason="",
            nbytes=0,
            rows=(),
            squared_error=(),
            squared_norm=(),
        )
        for field, codec in group.codecs.items()
    )
    # Not the layer's chunks, which are shorter: readers take so many rows at a time.
    entries = tuple(
        row_blocks.array_entry(
            array.name,
            array.shape,
            np.dtype(array.dtype),
            zstd=array.compression == "zstd",
            byte_planes=array.compression == "planes",
        )
        for array in stored
    )
    segment = Segment(
        name=group.name,
        group=group.group,
        columns=group.columns or (0, 0),
        count=group.count,
        ranges=group.ranges,
        fields=tuple(group.codecs),
        arrays=entries,
        encodings=encodings,
    )
    check_segment(segment)
    return segment


class damage_of:
    """Converts ``Damaged`` inside the context into a ``DamagedWal`` that names the record."""

    def __init__(self, record: WalRecord):
        self._record = record

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Damaged) and not isinstance(error, DamagedWal):
            raise DamagedWal.from_damage(error, self._record.save_id) from error


class Break(NamedTuple):
    """A position at which the valid records of a segment end although the file continues.

    ``at`` is the segment's part, and the number expected of the next record. ``counts`` is whether
    a record there would count, because no later part continues from an earlier one. ``is_torn`` is
    whether a writer that was killed, or is still writing, can have caused it. ``step`` is the
    newest one of the records after it; None if unknown.
    """

    at: SegmentId
    counts: bool
    is_torn: bool
    step: int | None
    problem: Damaged


class Hole(NamedTuple):
    """Records of a process that were durable and are no longer intact.

    ``step`` is their newest one; if unknown, a lower bound. ``before`` is the first intact record
    after them; None if the WAL ends there. ``may_be_trimmed`` is whether they and all earlier
    records are completely missing.
    """

    step: int
    before: WalRecord | None
    may_be_trimmed: bool
    problem: Damaged


@dataclasses.dataclass(eq=False)
class _Scan:
    """How far a segment was scanned: record ``seq``, which begins ``at``, is the next.

    ``problem`` is why ``records`` end; None at the end of the file. ``rest`` is what follows there,
    up to the file's length ``searched``; set on request. ``seen`` is the end of the last scan, and
    the file's length then. ``due`` is when a follower may search, on the monotonic clock.
    """

    seq: int
    at: int = 0
    records: list[WalRecord] = dataclasses.field(default_factory=list)
    problem: Damaged | None = None
    rest: _Rest | None = None
    searched: int = -1
    seen: tuple[int, int] = -1, 0
    due: float = -math.inf


class ProcessWal:
    """The records of one process, oldest first; ``advance`` reads newly written records."""

    def __init__(self, store_path: StorePath, run: str, epoch: EpochRef, process: int):
        """Reads nothing yet; ``store_path`` is the directory of its segments."""
        self.store_path = store_path
        self._run, self._epoch, self._process = run, epoch, process
        self._scans: dict[SegmentId, _Scan] = {}
        self._identity: DirIdentity | None = None
        #: The newest durable record according to its writer: number of the call, and step.
        self._durable = DurableRecord(0, 0)
        self._is_followed = False

    @property
    def durable(self) -> DurableRecord:
        """Returns the newest durable record as of the last scan."""
        return self._durable

    @property
    def records(self) -> list[WalRecord]:
        """Returns all valid intact records, oldest first."""
        last = self._last_that_count()
        found = [
            record
            for _, scan in sorted(self._scans.items())
            for record in scan.records
            if record.place.seq <= last.get(record.place.part, record.place.seq)
        ]
        return sorted(found, key=lambda record: record.save_id.attempt)

    @property
    def breaks(self) -> list[Break]:
        """Returns the positions at which segments break off."""
        last, found = self._last_that_count(), []
        for place, scan in sorted(self._scans.items()):
            if scan.problem is None:
                continue
            if scan.searched != scan.seen[1] and self._is_search_due(scan):
                scan.rest, scan.searched = self._rest(place, scan), scan.seen[1]
                scan.due = time.monotonic() + _SEARCH_SECS
            rest = scan.rest or _Rest(True, None)
            found.append(
                Break(
                    at=SegmentId(place.part, scan.seq),
                    counts=scan.seq <= last.get(place.part, scan.seq),
                    is_torn=rest.is_torn and self._may_end_in(place),
                    step=rest.step,
                    problem=scan.problem,
                )
            )
        return found

    def holes(self) -> list[Hole]:
        """Returns missing or altered records, oldest first; a torn end is not a hole."""
        breaks = [one for one in self.breaks if one.counts]
        found, end, newest, digest = [], SegmentId(0, 0), None, 0
        for newest in self.records:
            within = [one.problem for one in breaks if end < one.at <= newest.place]
            problems, trimmed = within, False
            if newest.place.seq != end.seq + 1:
                trimmed = end.seq == 0 and not problems
                problems.append(self._gap(end.seq + 1, newest.place.seq - 1))
            elif newest.layer.manifest.predecessor != digest:
                # A record that an earlier part gave up has the number of the missing one.
                expected = f"the record {end.seq} that it continues"
                problems.append(Damaged(newest.name, expected, "one that was given up"))
            if problems:
                found.append(Hole(newest.parent.step, newest, trimmed, problems[0]))
            end, digest = newest.place, newest.layer.digest
        at_end = self._hole_at_end(newest, [one for one in breaks if end < one.at])
        return [*found, *at_end]

    def _hole_at_end(self, newest: WalRecord | None, breaks: Sequence[Break]) -> Iterator[Hole]:
        """Yields missing or altered records after the newest one."""
        number, seq, step = 0, 0, -1
        if newest is not None:
            number, seq, step = newest.save_id.attempt, newest.place.seq, newest.save_id.step
        last = self._last_that_count()
        gaps = [at.seq for at in self._scans if seq + 1 < at.seq <= last.get(at.part, at.seq)]
        problems = [one.problem for one in breaks if not one.is_torn]
        if self._durable.number > number:
            expected = f"the WAL record of step {self._durable.step}, which was durable"
            have = "no record" if newest is None else f"none above step {step}"
            missing = Damaged(self._name(seq + 1), expected, have)
            trimmed = newest is None and not problems
            yield Hole(self._durable.step, None, trimmed, [*problems, missing][0])
        elif problems:
            steps = [one.step for one in breaks if one.step is not None]
            yield Hole(max(steps, default=step + 1), None, False, problems[0])
        elif gaps and newest is not None:
            yield Hole(step + 1, None, False, self._gap(seq + 1, min(gaps) - 1))

    def _gap(self, first: int, last: int) -> Damaged:
        return Damaged(self._name(first), f"the records {first} to {last} in or after it", "none")

    def _name(self, seq: int) -> str:
        """Returns the name in errors of the segment with a record, or of the previous one."""
        before = [place for place in sorted(self._scans) if place.seq <= seq]
        return self._segment(before[-1]).shown(4) if before else self.store_path.shown()

    def _segment(self, place: SegmentId) -> StorePath:
        return self.store_path / naming.segment_name(*place)

    def _is_search_due(self, scan: _Scan) -> bool:
        """Returns whether to look for damage now; soon, its writer may have completed a record."""
        ends = (one.records[-1].save_id.attempt for one in self._scans.values() if one.records)
        return time.monotonic() >= scan.due or self._durable.number > max(ends, default=0)

    def _may_end_in(self, place: SegmentId) -> bool:
        """Returns whether the WAL may end within a segment: parts without a record may follow."""
        later = (one for one in self._scans.items() if one[0] > place)
        return all(one.part > place.part and not scan.records for one, scan in later)

    @property
    def segments(self) -> dict[str, tuple[WalRecord, ...]]:
        """Returns the records of each segment by its name, oldest first."""
        scans = sorted(self._scans.items())
        return {naming.segment_name(*place): (*scan.records,) for place, scan in scans}

    def advance(self) -> None:
        """Scans the records written since the last call.

        Raises FormatTooNew, and StorageError if the directory cannot be read.
        """
        if isinstance(self.store_path.store, FileStore):
            identity = self.store_path.dir_identity()
            if self._identity is not None and not self._identity.same(identity):
                # A copy with other bytes may have replaced the directory. In other stores, asking
                # would cost another listing.
                self._scans.clear()
            self._identity = identity
        # Before the segments: what is durable by now is in them.
        self._durable = newest_durable(self.store_path)
        places = sorted(
            place
            for name in self.store_path.names()
            if (place := naming.parse_segment_name(name)) is not None
        )
        for gone in self._scans.keys() - {*places}:  # It was trimmed.
            del self._scans[gone]
        for place in places:
            self._scan_segment(place, self._scans.setdefault(place, _Scan(place.seq)))
        self._is_followed = True

    def _last_that_count(self) -> dict[int, int]:
        """Returns part to the last record that counts, for parts that others follow."""
        found: dict[int, int] = {}
        for place, scan in self._scans.items():
            if scan.records:
                last = scan.records[0].head.part_start - 1
                for part in range(place.part):
                    found[part] = min(last, found.get(part, last))
        return found

    def _scan_segment(self, place: SegmentId, scan: _Scan) -> None:
        segment = self._segment(place)
        scan.problem = None
        try:
            window = _Window(segment)
            while scan.at < window.length:
                record = self._record_at(window, place, scan)
                scan.records.append(record)
                scan.seq, scan.at = scan.seq + 1, record.end
        except Damaged as error:
            if not segment.is_file():
                return  # It was trimmed concurrently.
            scan.problem = error
            if scan.seen[0] != scan.at:
                scan.rest, scan.searched = None, -1
                scan.due = time.monotonic() + _SEARCH_SECS if self._is_followed else -math.inf
            scan.seen = scan.at, window.length
        except Missing:
            scan.problem = None  # It was trimmed concurrently.

    def _record_at(self, window: _Window, place: SegmentId, scan: _Scan) -> WalRecord:
        """Returns the next record of a segment, which must continue the previous one."""
        segment, at = window.segment, scan.at
        name = _shown(segment, scan.seq)
        header = _header_at(window, at, name)
        if header is None:
            raise _NoHeader(f"{name}: header", "the header of a layer", "other bytes")
        if header.sequence != scan.seq:
            raise Damaged(f"{name}: header", f"record {scan.seq}", f"record {header.sequence}")
        if scan.records and header.predecessor != scan.records[-1].layer.digest:
            raise Damaged(f"{name}: header", f"a record after {scan.seq - 1}", "another one")
        if header.nbytes > window.length - at:
            raise _TornLayer(name, f"{at + header.nbytes} bytes", f"{window.length} bytes")
        layer = LayerReader(window, header.nbytes, start=at, name=name)
        manifest = layer.manifest
        if Header.from_manifest(manifest, layer.nbytes) != header:
            raise Damaged(f"{name}: header", "the header of its footer", "another one")
        expected = self._run, self._process, self._epoch
        found = manifest.save_id.run, manifest.process, manifest.epoch
        if found != expected:
            raise Damaged(name, f"a record of {_owner(*expected)}", f"one of {_owner(*found)}")
        head = wal_format.record_head_from(manifest.schema, name=name)
        if scan.records and head.values == (before := scan.records[-1].head.values):
            head = dataclasses.replace(head, values=before)  # It may be long.
        layer.manifest = dataclasses.replace(manifest, schema=b"")
        if head.part != place.part or head.part_start > scan.seq:
            raise Damaged(name, f"a record of part {place.part}", f"one of part {head.part}")
        parent, step = manifest.parent, manifest.save_id.step
        # Guarantees that following records to their parents ends.
        if parent is None or parent.step > step:
            raise Damaged(name, f"a parent with a step up to {step}", f"{parent}")
        return WalRecord(
            save_id=manifest.save_id,
            parent=parent,
            place=SegmentId(place.part, scan.seq),
            segment=segment,
            head=head,
            layer=layer.at(StoredBytes(segment)),
        )

    def _rest(self, place: SegmentId, scan: _Scan) -> _Rest:
        """Classifies the bytes after the last whole record of a segment."""
        if isinstance(scan.problem, _TornLayer):
            return _Rest(True, None)
        segment = self._segment(place)
        try:
            window = _Window(segment)
            steps = [*self._steps_behind(window, scan)]
            window = _Window(segment)  # What follows sees the same bytes.
            if isinstance(scan.problem, _Torn | _NoHeader) and _has_header(window, scan.at):
                return _Rest(True, None)  # Its writer has completed it since.
            if steps:
                return _Rest(False, max(steps))
            if isinstance(scan.problem, _Torn):
                return _Rest(True, None)
            first = window.bytes_at(scan.at, PAGE_BYTES)
            # A layer of several writes has its header last.
            is_torn = not any(first) or window.bytes_at(window.length - len(_ZEROS)) == _ZEROS
        except Missing:
            return _Rest(True, None)  # It was trimmed.
        except Damaged:
            # It was trimmed, or a piece is shorter than its name implies.
            return _Rest(not segment.is_file(), None)
        return _Rest(is_torn, None)

    def _steps_behind(self, window: _Window, scan: _Scan) -> Iterator[int]:
        """Yields steps of the layers after the page at which a scan ended."""
        start = window.skip_hole(scan.at + PAGE_BYTES)
        while (nbytes := (window.length - start) // PAGE_BYTES * PAGE_BYTES) > 0:
            nbytes = min(nbytes, _SEARCHED_BYTES)
            data = np.empty(nbytes, np.uint8)
            window.read_into(start, [data.data])
            for page in footer.pages_with_headers(data):
                with contextlib.suppress(Damaged, FormatMismatch):
                    header = _header_at(window, start + page, window.name)
                    if header is not None and header.sequence > scan.seq:
                        layer = LayerReader(window, header.nbytes, start=start + page)
                        if layer.manifest.epoch == self._epoch:
                            yield layer.manifest.save_id.step
            start = window.skip_hole(start + nbytes)


def _shown(segment: StorePath, seq: int) -> str:
    return f"{segment.shown(4)}, record {seq}"


def _owner(run: str, process: int, epoch: EpochRef | None) -> str:
    return f"run {run[:8]}, process {process}, {epoch}"


class _Torn(Damaged):
    """A file ends within a layer."""


class _TornLayer(_Torn):
    """A file ends within a layer whose header is whole."""


class _NoHeader(Damaged):
    """A page is not a header: it was altered, or the layer's writer has not written it yet."""


class _Rest(NamedTuple):
    """The bytes at the end of a segment that are not a record.

    ``is_torn`` is whether it is the beginning of a layer, as a killed writer leaves it. ``step`` is
    the newest one of the layers in it; None if there is none.
    """

    is_torn: bool
    step: int | None


class _Window:
    """A segment with a read-ahead buffer; see ``layers.read.ByteSource``."""

    def __init__(self, segment: StorePath):
        self.segment = segment
        self.length = segment.store.length(segment.key)
        self.run_bytes = _WINDOW_BYTES
        self._start, self._data = 0, np.empty(0, np.uint8)
        self._ahead_bytes = 0

    @property
    def name(self) -> str:
        return self.segment.shown(4)

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        at = start - self._start
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if not 0 <= at <= at + nbytes <= len(self._data):
            # Small records are read many at once; of long ones, only headers and footers.
            is_next = 0 <= at <= len(self._data)
            more = 2 * self._ahead_bytes if is_next else 0
            self._ahead_bytes = min(max(more, _WINDOW_BYTES), _MAX_WINDOW_BYTES)
            count = min(max(nbytes, self._ahead_bytes), max(nbytes, self.length - start))
            try:
                data = self._read(start, count)
            except Damaged:
                if count == nbytes:
                    raise
                data = self._read(start, nbytes)  # The damage may be behind these bytes.
                self._ahead_bytes = 0
            self._start, self._data, at = start, data, 0
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = self._data[at : at + buffer.nbytes]
            at += buffer.nbytes

    def skip_hole(self, start: int) -> int:
        """Returns the next page with data, if the file has a hole at a page."""
        at = self.segment
        if start >= self.length or not isinstance(at.store, FileStore):
            return start
        with arrays.unreadable_is_damage(self.name, "a segment"):
            return at.store.next_data(at.key, start) // PAGE_BYTES * PAGE_BYTES

    def bytes_at(self, start: int, nbytes: int | None = None) -> bytes:
        """Returns some bytes; by default to the end."""
        data = np.empty(self.length - start if nbytes is None else nbytes, np.uint8)
        self.read_into(start, [data.data])
        return data.tobytes()

    def _read(self, start: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        with arrays.unreadable_is_damage(self.name, "a segment"):
            self.segment.store.read_into(self.segment.key, start, [data.data])
        return data


def _has_header(window: _Window, at: int) -> bool:
    with contextlib.suppress(Damaged):
        return _header_at(window, at, window.name) is not None
    return False


def _header_at(window: _Window, at: int, name: str) -> Header | None:
    """Returns the header at an offset; None if there is none."""
    if at + PAGE_BYTES > window.length:
        raise _Torn(name, f"{at + PAGE_BYTES} bytes", f"{window.length} bytes")
    return footer.header_of(window.bytes_at(at, PAGE_BYTES), name)
