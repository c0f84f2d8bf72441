# SPDX-License-Identifier: Apache-2.0
"""Small hand-made WALs of one table, and the expected contents of their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import made_up_layers
import msgpack
import numpy as np

from deltackpt.format import naming, row_blocks, wal_format
from deltackpt.format.manifest import DenseEntry, Layout, SaveId, TableEntry
from deltackpt.format.row_blocks import (
    PLAIN,
    SEGMENTS,
    BlockedValue,
    Encoding,
    FieldSpec,
    GroupEntry,
    Segment,
)
from deltackpt.format.wal_format import (
    ITEM_BYTES,
    ITEMS,
    Continues,
    EpochHeader,
    RecordHead,
    RecordItem,
    packed_values,
)
from deltackpt.layers import footer
from deltackpt.layers.footer import (
    CHUNK,
    PAGE_BYTES,
    REMOVED,
    TRAILER_BYTES,
    EpochRef,
    LayerManifest,
)
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.layers.targets import empty_buffers
from deltackpt.reading import dense_state, reader, wal_rows
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalIndex, WalReader, newest_plan
from deltackpt.reading.wal_locations import WalFolder, WalLocations
from deltackpt.reading.wal_records import ProcessWal, segment_of
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.resources.runtime import Runtime
from deltackpt.save import dense_save
from deltackpt.storage import shard_writer
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.storage.store import store_path
from deltackpt.wal.segment_files import Fill, FilledRecord, SegmentWriter

ROWS, WIDTH = 16, 2
TABLE = "tables/t"
LAYOUT = Layout(
    (
        GroupEntry(
            name="g0",
            rows=ROWS,
            fields=(FieldSpec(name="values", trailing=(WIDTH,), dtype="float32"),),
        ),
    ),
    (
        TableEntry(
            name=TABLE,
            group="g0",
            offset=0,
            rows=ROWS,
            leaves={"values": (("dict", "tables"), ("dict", "t"))},
        ),
    ),
    (DenseEntry(path=(("dict", "w"),), key=("w",)),),
    (),
)
BASE = SaveId("ba5e", 0, 0)


def save_id(number: int, run: str = "a0") -> SaveId:
    """The save id of a record, whose step is its number."""
    return SaveId(run, number, number)


def rows_of(number: int) -> np.ndarray:
    """Row indices of a record; some rows are in several records."""
    return np.unique(np.array([number % ROWS, 3 * number % ROWS, 7]))


def values_of(number: int, run: str = "a0") -> np.ndarray:
    """The values of a record's rows."""
    start = 1000 * number + int(run, 16)
    return np.arange(start, start + len(rows_of(number)) * WIDTH, dtype=np.float32).reshape(
        -1, WIDTH
    )


def weights_of(number: int, run: str = "a0") -> bytes:
    """The dense leaf at a record."""
    return np.full(3, number + int(run, 16), np.float32).tobytes()


#: How values are stored.
RAW = Encoding(
    field="values",
    codec="raw",
    reason="",
    nbytes=0,
    rows=(),
    squared_error=(),
    squared_norm=(),
)


def fill_of(number: int, run: str = "a0", item: bytes | None = None) -> Fill:
    """Returns a function that writes a full record; ``item`` replaces its JSON item."""

    def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
        rows, weights = rows_of(number), np.frombuffer(weights_of(number, run), np.uint8)
        place = sink_of("g0.0")
        gaps, values = place.write_rows(rows), values_of(number, run)
        entry = row_blocks.array_entry("values", values.shape, values.dtype)
        shard_writer.write_array(place, entry, [values])
        segment = Segment(
            name="g0.0",
            group="g0",
            columns=(0, WIDTH),
            count=len(rows),
            ranges=None,
            fields=("values",),
            arrays=(gaps, entry),
            encodings=(RAW,),
        )
        value = BlockedValue(key="w", dtype="uint8", count=len(weights), group=PLAIN, at=0)
        plain = dense_save.write_plain(sink_of, [weights], zstd=False)
        data = np.frombuffer(str(number).encode() if item is None else item, np.uint8)
        shard_writer.write_array(
            sink_of(ITEMS), row_blocks.array_entry(ITEM_BYTES, data.shape, data.dtype), [data]
        )
        head = RecordHead(
            part=0,
            part_start=0,
            full=True,
            unix_ns=number,
            values=packed_values([value]),
            items=(RecordItem(name="at", kind="json", nbytes=len(data)),),
        )
        return FilledRecord(head, (segment, plain))

    return fill


#: The writers of the running test: each has a file open.
_WRITERS: list[SegmentWriter] = []


def close_all() -> None:
    """Closes the WAL files that a test has made."""
    while _WRITERS:
        _WRITERS.pop().close()


@dataclasses.dataclass
class MadeUpLog:
    """The WAL of one process.

    Attributes:
      at: the directory of the epoch headers.
      epoch: number of the WAL epoch.
      run: id of its run.
      process: number of the process.
      count: number of processes.
      continues: the recovery point that the run resumes from.
    """

    at: Path
    epoch: int = 0
    run: str = "a0"
    process: int = 0
    count: int = 1
    continues: Continues | None = None

    def __post_init__(self) -> None:
        self.head = EpochHeader(
            epoch=self.epoch,
            run=self.run,
            process_count=self.count,
            base=BASE,
            continues=self.continues,
            groups=LAYOUT.groups,
            tables=LAYOUT.tables,
            dense=LAYOUT.dense,
        )
        self.writer = SegmentWriter(
            self.at.parent,
            self.folder,
            Runtime(),
            epoch=EpochRef.from_header(self.head),
            process=self.process,
            process_count=self.count,
            fsync=False,
        )
        _WRITERS.append(self.writer)

    @property
    def folder(self) -> Path:
        """The directory of its segments."""
        return self.at / str(self.epoch) / str(self.process)

    @property
    def files(self) -> list[Path]:
        """Its segments, in order."""
        return sorted(self.folder.glob("*.seg"))

    def begin(self) -> MadeUpLog:
        """Writes the epoch header."""
        self.at.mkdir(parents=True, exist_ok=True)
        (self.at / naming.epoch_name(self.epoch)).write_bytes(
            wal_format.epoch_header_bytes(self.head)
        )
        return self

    def append(self, *numbers: int, parent: SaveId | None = None) -> MadeUpLog:
        """Writes records, each relative to the one before."""
        for number in numbers:
            above = save_id(number - 1, self.run) if number > 1 else BASE
            own = save_id(number, self.run)
            self.writer.write(own, parent or above, fill_of(number, self.run))
            parent = None
        return self

    def roll(self) -> MadeUpLog:
        """Makes the next record start a segment."""
        self.writer.roll()
        return self


def contents_after(
    numbers: Sequence[int], run: str = "a0", before: np.ndarray | None = None
) -> np.ndarray:
    """The table after some records are applied in order."""
    table = np.zeros((ROWS, WIDTH), np.float32) if before is None else before.copy()
    for number in numbers:
        table[rows_of(number)] = values_of(number, run)
    return table


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """The result of replaying up to a recovery point."""

    point: RecoveryPoint
    table: np.ndarray
    rows: np.ndarray
    dense: Mapping[str, bytes]
    items: Mapping[str, object]


def history_of(*at: Path) -> WalIndex:
    """The WAL in a directory, or in several, nearest first."""
    folders = [WalFolder(store_path(one)) for one in at]
    return WalReader(folders[0] if len(folders) == 1 else WalLocations(folders)).read()


def scan_of(log: MadeUpLog) -> ProcessWal:
    """The records of a WAL so far; ``advance`` scans later ones."""
    found = ProcessWal(store_path(log.folder), log.run, EpochRef.from_header(log.head), log.process)
    found.advance()
    return found


def plan_to(at: Path, skipped: Sequence[SaveId] = ()) -> ReplayPlan | None:
    """The replay plan to the newest point above the base, without some records, or None."""
    return newest_plan(history_of(at), {BASE.step: BASE}, skipped)


def follow(plan: ReplayPlan) -> Read:
    """Executes a replay plan."""
    buffers, targets = empty_buffers(LAYOUT)
    [table] = buffers[TABLE]["values"].values()
    table[:] = 0
    seen, records = SeenRows(LAYOUT), wal_rows.layers_of(plan, LAYOUT)
    reader.fill((), targets, records=records, seen=seen, over_parent=True)
    dense = {key: bytes(data) for key, data in dense_state.at_point(plan).values.items()}
    return Read(plan.point, table, seen.by_table()[TABLE], dense, plan.items()[0])


def read_newest(at: Path) -> Read | None:
    """Replays up to the newest point, if there is one."""
    plan = plan_to(at)
    return None if plan is None else follow(plan)


def bounds_of(data: bytes) -> list[tuple[int, int]]:
    """Start and end of each record of an intact segment."""
    found, start = [], 0
    while start < len(data):
        header = footer.header_of(data[start : start + PAGE_BYTES], "a record")
        assert header is not None
        found.append((start, start + header.nbytes))
        start += header.nbytes
    return found


class StoredRecord(NamedTuple):
    """A record in a segment.

    Attributes:
      path: the segment.
      number: index of the record in the segment.
      layer: its layer.
      head: its header.
    """

    path: Path
    number: int
    layer: LayerReader
    head: RecordHead

    @property
    def seq(self) -> int:
        """Sequence number of the record in the WAL."""
        return self.layer.manifest.sequence

    @property
    def rows(self) -> list[Segment]:
        """The segments of rows."""
        return [one for one in self._segments() if not one.name.startswith(SEGMENTS)]

    @property
    def dense(self) -> list[Segment]:
        """The segments of dense leaves."""
        return [one for one in self._segments() if one.name.startswith(SEGMENTS)]

    def _segments(self) -> list[Segment]:
        groups = (one for one in self.layer.manifest.row_groups if one.name not in (ITEMS, REMOVED))
        return [segment_of(one, self.layer.arrays(one).values()) for one in groups]

    def chunks_of(self, row_group: str, array: str) -> list[tuple[int, int]]:
        """Start and end of each chunk of an array in the segment."""
        start, arrays = self.layer.start, self.layer.manifest.arrays
        own = next(one for one in arrays if (one.row_group, one.name) == (row_group, array))
        return [(start + one.offset, start + one.stop) for one in self.layer.chunks_of(own)]


def records_in(folder: Path) -> list[StoredRecord]:
    """The valid records of a process, oldest first."""
    found: list[StoredRecord] = []
    for path in sorted(folder.glob("*.seg")):
        source = StoredBytes(store_path(path))
        for number, (start, end) in enumerate(bounds_of(path.read_bytes())):
            layer = LayerReader(source, end - start, start=start)
            head = wal_format.record_head_from(layer.manifest.schema, name=path.name)
            start = head.part_start
            found = [one for one in found if one.head.part == head.part or one.seq < start]
            found.append(StoredRecord(path, number, layer, head))
    return found


def change(
    path: Path,
    number: int,
    head: Callable[[Any], Any] | None = None,
    *,
    manifest: Callable[[dict[str, Any]], Any] | None = None,
    chunks: Mapping[tuple[str, str], bytes] | None = None,
) -> None:
    """Changes a record of a segment and recomputes all checksums from there on.

    Args:
      path: the segment.
      number: index of the record.
      head: changes the record's header, or returns another one.
      manifest: changes the manifest of the layer.
      chunks: row group and array to new bytes of its only chunk, of the same length.
    """
    data, made, digest = path.read_bytes(), [], None
    for at, (start, end) in enumerate(bounds_of(data)):
        layer = bytearray(data[start:end])
        fields = made_up_layers.fields_of(bytes(layer))
        length = footer.trailer_of(layer[-TRAILER_BYTES:], len(layer), "it").footer
        if at == number:
            if head is not None:
                held = msgpack.unpackb(fields["schema"])
                replaced = head(held)
                held = held if replaced is None else replaced
                fields["schema"] = held if isinstance(held, bytes) else msgpack.packb(held)
            for (group, name), found in (chunks or {}).items():
                _replace_chunk(layer, fields, group, name, found)
            if manifest is not None:
                manifest(fields)
        if digest is not None:
            fields["predecessor"] = digest
        packed = msgpack.packb(fields)
        assert packed is not None
        changed = made_up_layers.footed(bytes(layer[:length]), packed)
        old = footer.header_of(data[start : start + PAGE_BYTES], "it")
        assert old is not None
        page = old._replace(nbytes=len(changed), predecessor=fields["predecessor"]).page()
        made.append(page + changed[PAGE_BYTES:])
        digest = int.from_bytes(changed[-4:], "little")
    path.write_bytes(b"".join(made))


def _replace_chunk(
    layer: bytearray, fields: dict[str, Any], group: str, name: str, data: bytes
) -> None:
    [array] = [one for one in fields["arrays"] if (one["row_group"], one["name"]) == (group, name)]
    [(offset, nbytes, _)] = np.frombuffer(array["chunks"], CHUNK).tolist()
    assert len(data) == nbytes
    layer[offset : offset + nbytes] = data
    before = [
        one_offset + one_nbytes
        for one in fields["arrays"]
        for one_offset, one_nbytes, _ in np.frombuffer(one["chunks"], CHUNK).tolist()
        if one_offset < offset
    ]
    padding = np.frombuffer(bytes(layer[max(before, default=PAGE_BYTES) : offset]), np.uint8)
    identity = fields["save_id"]
    found = LayerManifest(
        save_id=SaveId(identity["run"], identity["step"], identity["attempt"]),
        process=fields["process"],
        sequence=fields["sequence"],
    )
    crc = footer.chunk_crc32c(found.seed, offset, padding, np.frombuffer(data, np.uint8))
    array["chunks"] = np.array([(offset, nbytes, crc)], CHUNK).tobytes()


def to(*path: Any, value: Any) -> Callable[[Any], None]:
    """Returns a function that sets the value at a path of a header or manifest."""

    def replace(head: Any) -> None:
        for key in path[:-1]:
            head = head[key]
        head[path[-1]] = value

    return replace
