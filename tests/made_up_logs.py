# SPDX-License-Identifier: Apache-2.0
"""Small logs that no training wrote: frames of one table, and what their marks should give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import msgpack
import numpy as np

from deltackpt.format import frames, gaps, names, stretches
from deltackpt.format.frames import (
    BeginHead,
    DenseHead,
    DenseValue,
    ItemsHead,
    LoggedItem,
    MarkHead,
    RowsHead,
)
from deltackpt.format.manifest import DenseLeaf, Layout, SaveId, TableEntry
from deltackpt.format.segments import ArrayEntry, FieldSpec, GroupEntry, Segment
from deltackpt.format.stretches import Continues, StretchHead
from deltackpt.layers.targets import empty_buffers
from deltackpt.reading import logged_dense, replay
from deltackpt.reading.log_files import ProcessLog
from deltackpt.reading.log_places import LogFolder, LogLayers
from deltackpt.reading.stretches import History, Logs, RecoveryPoint, Way, newest_way
from deltackpt.storage.store import spot
from deltackpt.wal.frame import Frame
from deltackpt.wal.segments import SegmentWriter

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
    (DenseLeaf(path=(("dict", "w"),), key=("w",)),),
    (),
)
BASE = SaveId("ba5e", 0, 0)


def save_id(number: int, run: str = "a0") -> SaveId:
    """Of the mark of a call, which is at the step of the same number."""
    return SaveId(run, number, number)


def rows_of(number: int) -> np.ndarray:
    """Which rows the mark of a call holds: some are in several marks."""
    return np.unique(np.array([number % ROWS, 3 * number % ROWS, 7]))


def values_of(number: int, run: str = "a0") -> np.ndarray:
    """What a mark says that its rows are."""
    start = 1000 * number + int(run, 16)
    return np.arange(start, start + len(rows_of(number)) * WIDTH, dtype=np.float32).reshape(
        -1, WIDTH
    )


def weights_of(number: int, run: str = "a0") -> bytes:
    """The dense leaf at a mark."""
    return np.full(3, number + int(run, 16), np.float32).tobytes()


def segment_of(count: int) -> Segment:
    """Some rows of the table, as a frame has them."""
    return Segment(
        name="g0.0",
        group="g0",
        columns=(0, WIDTH),
        count=count,
        ranges=None,
        fields=("values",),
        arrays=(
            ArrayEntry(name=names.GAPS, shape=(count,), dtype="uint32", chunk_rows=count),
            ArrayEntry(name="values", shape=(count, WIDTH), dtype="float32", chunk_rows=count),
        ),
    )


def batch_of(number: int, parent: SaveId, run: str = "a0") -> list[Frame]:
    """The frames of a full mark."""
    rows, weights = rows_of(number), weights_of(number, run)
    value = DenseValue(key="w", file=False, nbytes=len(weights), decoded_bytes=len(weights))
    item = LoggedItem(name="at", kind="json", nbytes=len(str(number)))
    return [
        Frame(
            RowsHead(segment=segment_of(len(rows))),
            [[gaps.encode_gaps(rows)], [values_of(number, run)]],
        ),
        Frame(DenseHead(values=(value,)), [[weights]]),
        Frame(ItemsHead(items=(item,)), [[str(number).encode()]]),
        Frame(
            MarkHead(
                save_id=save_id(number, run), parent=parent, full=True, frames=3, unix_ns=number
            ),
            [],
        ),
    ]


#: The writers of the running test: each has a file open.
_WRITERS: list[SegmentWriter] = []


def close_all() -> None:
    """Closes the files of the logs that a test has made."""
    while _WRITERS:
        _WRITERS.pop().close()


@dataclasses.dataclass
class MadeUpLog:
    """The log of one process, and how it is read.

    Attributes:
      at: the folder of the heads.
      stretch: number of the stretch.
      run: id of its run.
      process: which one it is of.
    """

    at: Path
    stretch: int = 0
    run: str = "a0"
    process: int = 0

    def __post_init__(self) -> None:
        self.writer = SegmentWriter(
            self.at.parent, self.folder, stretch=self.stretch, process=self.process, fsync=False
        )
        _WRITERS.append(self.writer)

    @property
    def folder(self) -> Path:
        """Where its segments are."""
        return self.at / str(self.stretch) / str(self.process)

    @property
    def files(self) -> list[Path]:
        """Its segments, in order."""
        return sorted(self.folder.glob("*.seg"))

    def begin(self, *, count: int = 1, continues: Continues | None = None) -> MadeUpLog:
        """Writes the head of the stretch."""
        head = StretchHead(
            stretch=self.stretch,
            run=self.run,
            process_count=count,
            base=BASE,
            continues=continues,
            groups=LAYOUT.groups,
            tables=LAYOUT.tables,
            dense=LAYOUT.dense,
        )
        self.at.mkdir(parents=True, exist_ok=True)
        (self.at / names.stretch_name(self.stretch)).write_bytes(stretches.to_bytes(head))
        return self

    def mark(self, *numbers: int, parent: SaveId | None = None) -> MadeUpLog:
        """Writes marks, each since the one before."""
        for number in numbers:
            above = save_id(number - 1, self.run) if number > 1 else BASE
            self.writer.write(batch_of(number, parent or above, self.run), number)
            parent = None
        return self

    def roll(self) -> MadeUpLog:
        """The next mark begins a file."""
        self.writer.roll()
        return self


def contents_after(
    numbers: Sequence[int], run: str = "a0", before: np.ndarray | None = None
) -> np.ndarray:
    """What the table holds once some marks were applied, in their order."""
    table = np.zeros((ROWS, WIDTH), np.float32) if before is None else before.copy()
    for number in numbers:
        table[rows_of(number)] = values_of(number, run)
    return table


@dataclasses.dataclass(frozen=True, eq=False)
class Read:
    """What replaying the way to a point gave."""

    point: RecoveryPoint
    table: np.ndarray
    rows: np.ndarray
    dense: Mapping[str, bytes]
    items: Mapping[str, object]


def history_of(*at: Path) -> History:
    """The WAL that a reader finds in a directory, or in several, nearest first."""
    folders = [LogFolder(spot(one)) for one in at]
    return Logs(folders[0] if len(folders) == 1 else LogLayers(folders)).read()


def scan_of(log: MadeUpLog) -> ProcessLog:
    """The records of a log as it stands; ``advance`` scans what is written later."""
    found = ProcessLog(spot(log.folder), log.stretch, log.process)
    found.advance()
    return found


def way_to(at: Path, skipped: Sequence[SaveId] = ()) -> Way | None:
    """The way to the newest point above the base, without some records; None without one."""
    return newest_way(history_of(at), {BASE.step: BASE}, skipped)


def follow(way: Way) -> Read:
    """Replays a way."""
    buffers, targets = empty_buffers(LAYOUT)
    [table] = buffers[TABLE]["values"].values()
    table[:] = 0
    replayed = replay.replay(way, targets, LAYOUT)
    dense = {key: bytes(data) for key, data in logged_dense.dense_of(way).values.items()}
    return Read(way.point, table, replayed.rows[TABLE], dense, replay.items_of(way)[0])


def read_newest(at: Path) -> Read | None:
    """The newest point of a root as it stands; None where there is none."""
    way = way_to(at)
    return None if way is None else follow(way)


def bounds_of(data: bytes) -> list[tuple[int, int]]:
    """Where each frame of an intact file begins and ends."""
    found, start = [], 0
    while start < len(data):
        nbytes = frames.prefix_of(data[start : start + frames.PREFIX_BYTES], "a frame").nbytes
        found.append((start, start + nbytes))
        start += nbytes
    return found


class StoredFrame(NamedTuple):
    """A frame as a segment holds it.

    Attributes:
      path: the segment.
      number: index of the frame in the segment.
      start: where the body begins in the segment.
      place, head, body: of the frame.
    """

    path: Path
    number: int
    start: int
    place: frames.Place
    head: Any
    body: bytes


def frames_in(path: Path) -> Iterator[StoredFrame]:
    """Parses the frames of a segment, up to the first that is incomplete."""
    data, start, crc, number = path.read_bytes(), 0, 0, 0
    while start + frames.PREFIX_BYTES <= len(data):
        prefix = frames.prefix_of(data[start : start + frames.PREFIX_BYTES], path.name)
        first, end = start + frames.PREFIX_BYTES, start + prefix.nbytes
        if end > len(data):
            return
        body = first + prefix.head_bytes
        head = frames.head_of(prefix, data[first:body], crc, path.name)
        crc = frames.body_crc32c(data[end - frames.CRC_BYTES : end])
        crc = head.crc32c if isinstance(head, BeginHead) else crc
        held = data[body : end - frames.CRC_BYTES]
        yield StoredFrame(path, number, body, prefix.place, head, held)
        start, number = end, number + 1


def records_in(folder: Path) -> list[list[StoredFrame]]:
    """The frames of each valid WAL record of a process, oldest first; a record's mark is last."""
    found: list[list[StoredFrame]] = []
    for path in sorted(folder.glob("*.seg")):
        record: list[StoredFrame] = []
        for frame in frames_in(path):
            if not isinstance(frame.head, BeginHead):
                record.append(frame)
            elif (after := frame.head.after) is not None:
                found = [one for one in found if one[-1].place.seq <= after.seq]
            if isinstance(frame.head, MarkHead):
                found.append(record)
                record = []
    return found


def reframed(data: bytes, head: object, crc32c: int, *, body: bytes | None = None) -> bytes:
    """A frame with another head, or body, whose checksums are right.

    Args:
      data: the frame.
      head: what msgpack makes the head of.
      crc32c: what it goes on from.
      body: by default as it was.
    """
    prefix = frames.prefix_of(data, "a frame")
    start = frames.PREFIX_BYTES + prefix.head_bytes
    body = data[start : start + prefix.body_bytes] if body is None else body
    packed = head if isinstance(head, bytes) else msgpack.packb(head)
    assert isinstance(packed, bytes)
    fixed = prefix.covered[:-12] + len(packed).to_bytes(4, "little")
    fixed += len(body).to_bytes(8, "little")
    crc = google_crc32c.extend(google_crc32c.extend(crc32c, fixed), packed)
    last = google_crc32c.extend(crc, body)
    return b"".join((fixed, crc.to_bytes(4, "little"), packed, body, last.to_bytes(4, "little")))
