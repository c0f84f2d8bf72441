# SPDX-License-Identifier: Apache-2.0
"""Records and segments of a WAL: a scan finds whole records and nothing else."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import google_crc32c
import msgpack
import numpy as np
import pytest
from golden import make_golden
from made_up_wals import (
    BASE,
    RAW,
    ROWS,
    MadeUpLog,
    StoredRecord,
    bounds_of,
    change,
    contents_after,
    fill_of,
    follow,
    history_of,
    plan_to,
    read_newest,
    records_in,
    rows_of,
    save_id,
    scan_of,
    to,
    weights_of,
)

import deltackpt
from deltackpt.errors import Damaged, DamagedWal, FormatTooNew
from deltackpt.format import naming, row_blocks, wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import PLAIN, BlockedValue, Segment
from deltackpt.format.wal_format import ITEM_BYTES, ITEMS, Continues, RecordHead, packed_values
from deltackpt.layers import footer
from deltackpt.layers.footer import PAGE_BYTES
from deltackpt.reading import wal_records
from deltackpt.reading.wal_locations import NAME, DurableRecord
from deltackpt.save import dense_save
from deltackpt.storage import shard_writer
from deltackpt.storage.shard_writer import SegmentSink
from deltackpt.storage.store import FileStore
from deltackpt.testing import Disk
from deltackpt.wal.segment_files import FilledRecord

#: Memory limit for reading a few kilobytes.
MOST_BYTES = 256 << 20
RECORDS = (1, 2, 3)
GOLDEN = Path(make_golden.__file__).parent / "log-v1"


def numbers_of(scan: Any) -> list[int]:
    return [record.save_id.attempt for record in scan.records]


def found_in(log: MadeUpLog) -> list[int]:
    """Returns the numbers of the records found in a WAL."""
    return numbers_of(scan_of(log))


def assert_right(at: Path, numbers: Iterable[int] = RECORDS) -> int:
    """Checks the newest readable point bit for bit; returns its number, 0 for none.

    If a record of its replay plan is damaged, takes the point before, as restores do.
    """
    skipped: list[SaveId] = []
    while (plan := plan_to(at, skipped)) is not None:
        point = plan.point.save_id
        try:
            read = follow(plan)
        except DamagedWal as error:
            assert isinstance(error.record, SaveId) and error.record <= point
            skipped.append(error.record)
            continue
        held = [number for number in numbers if number <= point.attempt]
        np.testing.assert_array_equal(read.table, contents_after(held))
        assert read.rows.tolist() == sorted({*np.concatenate([rows_of(n) for n in held]).tolist()})
        assert read.dense == {"w": weights_of(point.attempt)}
        assert read.items == {"at": point.attempt}
        return point.attempt
    return 0


@pytest.fixture
def empty(tmp_path) -> MadeUpLog:
    """A WAL without records."""
    return MadeUpLog(tmp_path / "log").begin()


@pytest.fixture
def log(empty) -> MadeUpLog:
    """Three records in one file."""
    return empty.append(*RECORDS)


@pytest.fixture
def three_files(empty) -> MadeUpLog:
    """Three records in a file each."""
    return empty.append(1).roll().append(2).roll().append(3)


@pytest.mark.parametrize("numbers", [[1], [2, 3], [1, 2, 3, 4, 5, 6]])
def test_a_head_may_be_large(numbers, empty):
    values = tuple(
        BlockedValue(key=f"{n:0200}", dtype="uint8", count=8, group=PLAIN, at=8 * n)
        for n in range(3000)
    )

    def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
        found = [np.zeros(8 * len(values), np.uint8)]
        plain = dense_save.write_plain(sink_of, found, zstd=False)
        packed = packed_values(values)
        head = RecordHead(part=0, part_start=0, full=True, unix_ns=0, values=packed)
        return FilledRecord(head, [plain])

    for number in numbers:
        empty.writer.write(save_id(number), BASE, fill)
    assert found_in(empty) == numbers
    *_, record = records = scan_of(empty).records
    assert record.dense.values == values
    assert len({id(one.dense.values) for one in records}) == 1, "equal values are decoded once"


def lengths_of(nbytes: int, ends: Iterable[int]) -> list[int]:
    """Lengths to truncate a file to: close together around the ends of pages and records."""
    near = {at + by for at in (*ends, *range(0, nbytes, 4096)) for by in (-65, -1, 0, 1)}
    return sorted({*range(0, nbytes, 509), *(one for one in near if 0 <= one <= nbytes)})


def test_a_wal_truncated_anywhere_holds_the_whole_records_before(log):
    path = log.files[0]
    data = path.read_bytes()
    ends = [end for _, end in bounds_of(data)]
    for length in reversed(lengths_of(len(data), ends)):
        os.truncate(path, length)
        whole = [number for number, end in zip(RECORDS, ends, strict=True) if end <= length]
        found = scan_of(log)
        assert numbers_of(found) == whole
        assert [one.is_torn for one in found.breaks] == [True] * (length not in (0, *ends)), length
        assert found.holes() == []
        if length in (*ends, *(end - 1 for end in ends)):
            assert assert_right(log.at) == len(whole)


def test_a_follower_has_each_record_once_it_is_whole(tmp_path):
    source = MadeUpLog(tmp_path / "written").append(1, 2).roll().append(3).roll().append(4, 5)
    target = MadeUpLog(tmp_path / "log").begin()
    target.folder.mkdir(parents=True)
    follower = scan_of(target)
    drawn, whole = random.Random(3), 0
    for path in source.files:
        data = path.read_bytes()
        ends = [end for _, end in bounds_of(data)]
        with open(target.folder / path.name, "wb", 0) as file:
            while file.tell() < len(data):
                file.write(data[file.tell() :][: drawn.randint(1, 900)])
                follower.advance()
                ended = sum(end <= file.tell() for end in ends)
                assert numbers_of(follower) == [*range(1, whole + ended + 1)]
                plan = plan_to(target.at)
                assert (0 if plan is None else plan.point.save_id.attempt) == len(follower.records)
        whole += len(ends)
        assert follower.breaks == []
    assert numbers_of(follower) == [1, 2, 3, 4, 5]
    assert assert_right(target.at, (1, 2, 3, 4, 5)) == 5


def place_in(record: StoredRecord, at: int) -> str:
    """The row group of a byte of a record; "" in its header and footer."""
    for array in record.layer.manifest.arrays:
        for chunk in record.layer.chunks_of(array):
            if chunk.start <= at - record.layer.start < chunk.stop:
                return array.row_group
    return ""


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("offset", range(4))
def test_no_flipped_bit_goes_unnoticed(number, offset, empty):
    log = empty.append(1, 2)
    path = log.files[0]
    data, record = path.read_bytes(), records_in(log.folder)[number]
    places = set()
    with open(path, "r+b", 0) as file:
        start, end = bounds_of(data)[number]
        for at in range(start + offset, end, 4):
            place = place_in(record, at)
            if not place and at % 16 > 3 and any(data[at - 8 : at + 8]) == 0:
                continue  # Zeros of a header or footer are all alike.
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
            found = scan_of(log)
            # Arrays are checked only when they are needed.
            assert numbers_of(found) == ([1, 2] if place else [[], [1]][number]), at
            if not place:
                # A later record shows that it was whole; for the last record, that is unknown.
                assert len(found.breaks) == 1 and (number == 1 or found.holes())
            # Dense leaves and items are needed only of the last record.
            needed = number == 1 or not place or place == "g0.0"
            if place not in places or at % 64 < 4:
                assert assert_right(log.at, (1, 2)) == (number if needed else 2), (at, place)
            places.add(place)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert places == {"", "g0.0", "dense.plain", "items"}
    assert assert_right(log.at, (1, 2)) == 2


@pytest.mark.parametrize("first", range(2))
def test_pages_lost_in_a_power_cut_cost_no_earlier_record(first, log):
    path = log.files[0]
    data, (start, end) = bytearray(path.read_bytes()), bounds_of(path.read_bytes())[2]
    for page in range(start + first * 4096, end, 2 * 4096):
        data[page : page + 4096] = bytes(4096)
    path.write_bytes(data)
    assert assert_right(log.at) == 2
    # A layer with a footer is read; it is skipped once its rows are found missing.
    assert scan_of(log).holes() == []


def split(log: MadeUpLog) -> list[bytes]:
    """The records of the first file."""
    data = log.files[0].read_bytes()
    return [data[start:end] for start, end in bounds_of(data)]


@pytest.mark.parametrize(
    "order", [[0, 2], [1, 0, 2], [0, 1, 1, 2], [0, 0, 1, 2], [0, 2, 1], [2, 1, 0]]
)
def test_missing_repeated_or_reordered_records_end_the_wal(order, log):
    records = split(log)
    log.files[0].write_bytes(b"".join(records[number] for number in order))
    whole = next((at for at, one in enumerate(order) if one != at), len(order))
    assert found_in(log) == [1, 2, 3][:whole]
    assert_right(log.at)


@pytest.mark.parametrize("numbers", [[0], [1], [2], [0, 1, 2]])
def test_records_of_another_wal_end_the_wal(numbers, log, tmp_path):
    theirs = split(MadeUpLog(tmp_path / "other", run="b1").begin().append(*RECORDS))
    records = [theirs[at] if at in numbers else one for at, one in enumerate(split(log))]
    log.files[0].write_bytes(b"".join(records))
    assert assert_right(log.at) == numbers[0]


@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize(
    "other", [{"epoch": 1}, {"process": 1}], ids=["another epoch", "another process"]
)
def test_a_file_from_elsewhere_is_refused_however_often_it_is_scanned(other, again, empty):
    elsewhere = MadeUpLog(empty.at, **other).begin().append(*RECORDS).files[0]
    empty.begin().folder.mkdir(parents=True)
    shutil.copyfile(elsewhere, empty.folder / elsewhere.name)
    found = scan_of(empty)
    for _ in range(again + 1):
        found.advance()
        assert found.records == [] and len(found.breaks) == 1


@pytest.mark.parametrize("name", [naming.segment_name(1, 1), naming.segment_name(0, 2)])
def test_a_file_of_another_name_is_refused(name, log):
    log.files[0].rename(log.folder / name)
    assert found_in(log) == []


@pytest.mark.parametrize(
    "name", ["progress", "0-1.seg", "00000-1.seg", f"{naming.segment_name(0, 9)}.tmp", "x.seg"]
)
def test_other_files_are_left_alone(name, log):
    (log.folder / name).write_bytes(b"else")
    found = scan_of(log)
    assert numbers_of(found) == [1, 2, 3] and found.breaks == []


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Lengths of the reads of files."""
    found, read_into = list[int](), FileStore.read_into

    def counted(self, key, start, buffers):
        found.append(sum(buffer.nbytes for buffer in buffers))
        read_into(self, key, start, buffers)

    monkeypatch.setattr(FileStore, "read_into", counted)
    return found


def test_many_small_records_are_read_at_once(empty, reads):
    log = empty.append(*range(1, 401))
    assert found_in(log) == [*range(1, 401)]
    nbytes = log.files[0].stat().st_size
    assert len(reads) < 12 and nbytes <= sum(reads) < 1.1 * nbytes


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of scans, which stands at ``secs``."""
    found = SimpleNamespace(secs=0.0)
    monkeypatch.setattr(wal_records, "time", SimpleNamespace(monotonic=lambda: found.secs))
    return found


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("kept", [0, 100])
def test_a_record_behind_a_hole_is_found(kept, number, log, monkeypatch):
    """Also on a file system that does not report holes."""
    path = log.files[0]
    data = path.read_bytes()
    _, (second, _), (third, _) = bounds_of(data)
    with path.open("r+b") as file:
        file.truncate(second + kept)
        file.seek(third + (1 << 24))
        file.write(data[third:])
    if number is not None:
        refused = mock.Mock(side_effect=OSError(number, "injected"))
        monkeypatch.setattr(os, "lseek", refused)
    found = scan_of(log)
    assert [(one.is_torn, one.step) for one in found.breaks] == [(False, 3)]
    assert [one.step for one in found.holes()] == [3]


def test_a_segment_that_cannot_be_opened_is_damage(log, monkeypatch):
    real = os.open

    def refuse(path: Any, *arguments: Any, **how: Any) -> int:
        if str(path).endswith(".seg"):
            raise PermissionError(errno.EACCES, "injected")
        return real(path, *arguments, **how)

    monkeypatch.setattr(os, "open", refuse)
    assert [one.is_torn for one in scan_of(log).breaks] == [False]


def test_a_follower_does_not_read_a_record_while_it_is_written(empty, reads, clock):
    log = empty.append(1)
    follower = scan_of(log)

    def write_more() -> None:
        with log.files[0].open("ab") as file:
            file.write(bytes(1 << 20))  # The header is written last.

    for _ in range(7):
        write_more()
        follower.advance()
        assert [one.is_torn for one in follower.breaks] == [True] and follower.holes() == []
    assert sum(reads) < 1 << 20
    clock.secs = 1.0
    for _ in range(5):
        write_more()
        follower.advance()
        assert [one.is_torn for one in follower.breaks] == [True]
    assert 7 << 20 < sum(reads) < 9 << 20


def test_a_follower_reports_damage_while_its_writer_appends(empty, clock):
    """The progress is lost, which would show at once that a record is missing."""
    log = empty.append(1)
    begun, follower, found = log.files[0].stat().st_size, scan_of(log), []
    log.append(2)
    with log.files[0].open("r+b") as file:
        file.seek(begun)
        file.write(b"?" * PAGE_BYTES)
    for number in range(3, 12):
        log.append(number)
        follower.advance()
        found.append([one.step for one in follower.holes()])
        clock.secs += 0.25
    assert found == [[], [], [], [], [7], [7], [7], [7], [11]]


@pytest.mark.parametrize("durable", [0, 3])
def test_a_follower_looks_for_damage_once_nothing_is_written(durable, log, clock):
    data = log.files[0].read_bytes()
    _, start = bounds_of(data)[0]
    log.files[0].write_bytes(data[:start])
    follower = scan_of(log)
    log.files[0].write_bytes(data[:start] + bytes(4096) + data[start + 4096 :])
    (log.folder / NAME).write_bytes(DurableRecord(durable, durable).to_bytes())
    follower.advance()
    assert [one.is_torn for one in follower.breaks] == [durable == 0]
    clock.secs = 1.0
    assert [one.is_torn for one in follower.breaks] == [False]
    assert [one.step for one in follower.holes()] == [3]


def test_the_logs_of_many_processes_are_read_side_by_side(tmp_path):
    ends = [3, 5, 4, *range(6, 19)]
    for process, end in enumerate(ends):
        log = MadeUpLog(tmp_path / "log", process=process, count=len(ends))
        if process == 0:
            log.begin()
        log.append(*range(1, end + 1))
    [view] = history_of(tmp_path / "log").views
    assert {p: len(one.log.records) for p, one in view.processes.items()} == dict(enumerate(ends))
    assert [point.save_id for point in view.points()] == [save_id(3), save_id(2), save_id(1)]


def test_a_process_without_a_wal_has_no_records(tmp_path):
    MadeUpLog(tmp_path / "log", count=2).begin().append(*RECORDS)
    assert assert_right(tmp_path / "log") == 0


@pytest.mark.parametrize("length", [None, 1, 40, 4095, 4096, 4097, 9000])
def test_a_torn_or_missing_file_does_not_harm_those_after_it(length, three_files):
    middle = three_files.files[1]
    if length is None:
        middle.unlink()
    else:
        os.truncate(middle, min(length, middle.stat().st_size - 1))
    assert found_in(three_files) == [1, 3]
    # No replay plan leads from the step to the last record.
    assert assert_right(three_files.at) == 1


def test_trimmed_records_are_not_needed_above_a_later_step(empty):
    empty.append(1).roll().append(2, 3).roll().append(4).files[0].unlink()
    history = history_of(empty.at)
    assert history.plan(history.points()[0], BASE) is None
    plan = history.plan(history.points()[0], SaveId("a0", 2, 0))
    np.testing.assert_array_equal(follow(plan).table, contents_after([3, 4]))


def test_files_trimmed_while_a_reader_is_open_are_forgotten(three_files):
    found = scan_of(three_files)
    assert numbers_of(found) == [1, 2, 3]
    three_files.files[0].unlink()
    found.advance()
    assert numbers_of(found) == [2, 3] and found.breaks == []


def fail_after(log: MadeUpLog, number: int, *lost: int) -> None:
    """Writes a valid record, and others that a further part declares invalid."""
    log.append(number)
    durable = log.writer.position
    log.append(*lost)
    log.writer.start_part(durable)


def test_a_further_part_continues_from_its_start_and_voids_later_records(empty):
    fail_after(empty, 1, 2, 3)
    empty.append(4, parent=save_id(1))
    assert len(empty.files) == 2
    assert found_in(empty) == [1, 4]
    assert assert_right(empty.at, (1, 4)) == 4


def test_parts_that_fail_one_after_another_keep_the_durable_records(empty):
    fail_after(empty, 1, 2)
    empty.append(3, parent=save_id(1))
    # Not even the last part's first record could be fsynced.
    digest = records_in(empty.folder)[0].layer.digest
    empty.writer.start_part(empty.writer.position._replace(seq=1, digest=digest))
    empty.append(4, parent=save_id(1))
    fail_after(empty, 5, 6)
    empty.append(7, parent=save_id(5))
    assert found_in(empty) == [1, 4, 5, 7]
    assert assert_right(empty.at, (1, 4, 5, 7)) == 7


@pytest.mark.parametrize("how", ["removed", "empty"])
def test_an_abandoned_record_never_replaces_a_missing_one(how, empty):
    """It has the same number as the first record of the lost part."""
    log = empty.append(1)
    log.writer.start_part(log.writer.position._replace(seq=0, digest=0))
    fail_after(log, 2, 3)
    log.append(4, parent=save_id(2))
    assert found_in(log) == [2, 4] and scan_of(log).holes() == []
    middle = log.files[1]
    middle.unlink() if how == "removed" else middle.write_bytes(b"")
    assert found_in(log) == [1, 4]
    [hole] = scan_of(log).holes()
    assert (hole.step, hole.may_be_trimmed) == (2, False)
    assert "one that was given up" in str(hole.problem)
    [loss] = history_of(log.at).losses(0)
    assert loss.step == 2


@pytest.mark.parametrize("behind", [0, 1])
def test_a_header_that_the_writer_completed_since_is_not_damage(log, behind):
    """The scan looks for records after the page, and finds those written since."""
    data = log.files[0].read_bytes()
    data = data[: bounds_of(data)[1 + behind][1]]
    start, _ = bounds_of(data)[1]
    log.files[0].write_bytes(data[:start] + bytes(4096) + data[start + 4096 :])
    found = scan_of(log)
    assert numbers_of(found) == [1]
    log.files[0].write_bytes(data)
    assert [one.is_torn for one in found.breaks] == [True] and found.holes() == []
    found.advance()
    assert numbers_of(found) == [1, 2, 3][: 2 + behind]


def test_a_segment_that_is_trimmed_while_it_is_scanned_is_not_damage(empty):
    log = empty.append(1).roll().append(2)
    with Disk(log.at) as disk:
        disk.on("read", lambda _: log.files[0].unlink(), "[.]seg$", times=1)
        found = scan_of(log)
    assert numbers_of(found) == [2]
    [hole] = found.holes()
    assert hole.may_be_trimmed


def test_nothing_is_written_after_a_failed_record_is_abandoned(empty, monkeypatch):
    """By then, the descriptor may belong to another file."""
    log = empty.append(1)
    written, rows = [], np.zeros((1 << 15, 2), np.float32)

    def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
        entry = row_blocks.array_entry("values", rows.shape, rows.dtype)
        shard_writer.write_array(sink_of("g0.0"), entry, np.split(rows, 64))
        file = log.writer._file.file
        close, write = file.close, file.write
        monkeypatch.setattr(file, "close", lambda: (close(), written.append("closed")))
        monkeypatch.setattr(file, "write", lambda *given: (write(*given), written.append("w")))
        return FilledRecord(None, [])  # type: ignore[arg-type]

    with pytest.raises(TypeError):
        log.writer.write(save_id(2), save_id(1), fill)
    log.writer.start_part(log.writer.position)
    assert written[-1:] == ["closed"] and written.count("closed") == 1
    log.append(2, parent=save_id(1))
    assert found_in(log) == [1, 2]
    assert written[-1:] == ["closed"]


def test_whole_records_are_valid_until_a_further_part_starts(empty):
    fail_after(empty, 1, 2, 3)
    empty.append(4, parent=save_id(1))
    last = empty.files[-1]
    nbytes = last.stat().st_size
    for length in reversed(lengths_of(nbytes, [])):
        os.truncate(last, length)
        assert found_in(empty) == ([1, 4] if length == nbytes else [1, 2, 3]), length
    assert assert_right(empty.at) == 3


def test_an_earlier_epoch_is_valid_up_to_where_the_next_one_continues(log):
    continues = Continues(epoch=0, save_id=save_id(2))
    later = MadeUpLog(log.at, epoch=1, run="b1", continues=continues).begin()
    # Its writer has not noticed yet.
    log.append(4)
    assert [point.save_id for point in history_of(log.at).points()] == [save_id(2), save_id(1)]
    later.append(3, parent=save_id(2))
    read = read_newest(log.at)
    assert read.point.save_id == save_id(3, "b1")
    expected = contents_after([3], "b1", contents_after([1, 2]))
    np.testing.assert_array_equal(read.table, expected)


def test_an_epoch_that_continues_from_no_point_voids_all_earlier_ones(log):
    MadeUpLog(log.at, epoch=1, run="b1").begin()
    assert history_of(log.at).points() == []


def test_without_the_newest_header_the_valid_points_are_unknown(log):
    (log.at / naming.epoch_name(1)).write_bytes(b"torn")
    with pytest.raises(Damaged, match=r"1\.msgpack"):
        history_of(log.at)


def test_a_header_under_another_number_is_damage(log):
    shutil.copyfile(log.at / naming.epoch_name(0), log.at / naming.epoch_name(4))
    with pytest.raises(Damaged, match="WAL epoch 4"):
        history_of(log.at)


HUGE = 1 << 62
COUNT = len(rows_of(2))
ROWS_OF, GROUP, ARRAY = ("g0.0", naming.GAPS), ("row_groups", 0), ("arrays", 1)


def with_values(changed: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Returns a function that changes the values of the dense item in a head."""

    def replace(head: Any) -> None:
        held = msgpack.unpackb(head["values"])
        found = changed(held["values"])
        head["values"] = msgpack.packb({"values": held["values"] if found is None else found})

    return replace


#: Changes to the head of the second record.
HEADS: dict[str, Callable[[Any], Any]] = {
    "no map": lambda head: b"\x90",
    "nothing": lambda head: {},
    "no msgpack": lambda head: b"\xc1",
    "no bytes": lambda head: b"",
    "more than a map": lambda head: msgpack.packb(head) + b"\0",
    "numbers as keys": lambda head: {1: 2},
    "an array longer than it is": lambda head: b"\xdd\xff\xff\xff\xff",
    "a map longer than it is": lambda head: b"\xdf\xff\xff\xff\xff",
    "deep": lambda head: b"\x91" * 100_000 + b"\0",
    "values that are no bytes": to("values", value=[]),
    "an item of another kind": to("items", 0, "kind", value="pickle"),
    "a negative item": to("items", 0, "nbytes", value=-1),
    "full that is a number": to("full", value=1),
    "another part": to("part", value=1),
    "a part that starts later": to("part_start", value=3),
    "a negative time": to("unix_ns", value=-1),
}
#: Changes to the manifest of its layer; ``test_layers_damage`` has more.
MANIFESTS: dict[str, Callable[[Any], Any]] = {
    "record of another run": to("save_id", "run", value="c2"),
    "record of a huge step": to("save_id", "step", value=(1 << 64) - 1),
    "parent's run above": to("parent", "run", value="a/b"),
    "parent above": to("parent", "step", value=3),
    "no parent": to("parent", value=None),
    "another process": to("process", value=1),
    "another epoch": to("epoch", "number", value=1),
    "another header": to("epoch", "crc32c", value=1),
    "no epoch": to("epoch", value=None),
    "another number": to("sequence", value=7),
    "another group": to(*GROUP, "group", value="g9"),
    "a group that is no text": to(*GROUP, "group", value=7),
    "group above": to(*GROUP, "name", value="../.."),
    "group elsewhere": to(*GROUP, "name", value="/etc"),
    "no arrays": to("arrays", value=[]),
    "another field": to(*GROUP, "codecs", value={"slot.x": "raw"}),
    "no fields": to(*GROUP, "codecs", value={}),
    "another codec": to(*GROUP, "codecs", value={"values": "int8"}),
    "columns beyond": to(*GROUP, "columns", value=[0, 3]),
    "negative count": to(*GROUP, "count", value=-1),
    "more rows": to(*GROUP, "count", value=COUNT + 1),
    "true for a number": to(*GROUP, "count", value=True),
    "another dtype": to(*ARRAY, "dtype", value="int32"),
    "compressed": to(*ARRAY, "compression", value="planes"),
}
#: Changes to the head of the last record, whose dense leaves and items are needed.
LAST: dict[str, Callable[[Any], Any]] = {
    "values that are no list": with_values(lambda values: {}),
    "values that are no values": with_values(lambda values: [[], 7]),
    "a number for a key": with_values(to(0, 0, value=7)),
    "true for a count": with_values(to(0, 2, value=True)),
    "more of a value": with_values(to(0, 2, value=HUGE)),
    "a value beyond": with_values(to(0, 4, value=1)),
    "a value twice": with_values(lambda values: values * 2),
    "another dtype": with_values(to(0, 1, value="object")),
    "another group": with_values(to(0, 3, value="float32")),
    "file above": with_values(lambda values: [["../../x", *values[0][1:5], True]]),
    "file elsewhere": with_values(lambda values: [["/x", *values[0][1:5], True]]),
    "file without a name": with_values(lambda values: [["", *values[0][1:5], True]]),
    "against itself": to("against", value=3),
    "against what is later": to("against", value=60),
    "more of an item": to("items", 0, "nbytes", value=2),
    "a huge item": to("items", 0, "nbytes", value=HUGE),
}


#: The second record, except for what is needed only of the last one.
HAND_MADE: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"head: {name}": (1, {"head": made}) for name, made in HEADS.items()},
    **{f"manifest: {name}": (1, {"manifest": made}) for name, made in MANIFESTS.items()},
    **{f"last head: {name}": (2, {"head": made}) for name, made in LAST.items()},
    "item: no JSON": (2, {"chunks": {(ITEMS, ITEM_BYTES): b"{"}}),
    "item: no text": (2, {"chunks": {(ITEMS, ITEM_BYTES): b"\xff"}}),
    "rows: twice": (1, {"chunks": {ROWS_OF: bytes([3, 0, 1][:COUNT])}}),
    "rows: beyond": (1, {"chunks": {ROWS_OF: bytes([ROWS, 1, 1][:COUNT])}}),
}


@pytest.mark.parametrize("case", HAND_MADE)
def test_a_hand_made_record_with_valid_checksums_is_refused(case, log):
    number, changes = HAND_MADE[case]
    change(log.files[0], number, **changes)
    tracemalloc.start()
    try:
        # The records before it are intact.
        assert assert_right(log.at) == number
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("position", [-1, 1 << 40])
def test_raw_rows_beside_codes_have_positions_within_the_record(position, tmp_path):
    root, step = tmp_path / "root", 12
    shutil.copytree(GOLDEN, root)
    record, segment = next(
        (one, segment)
        for one in records_in(root / "log/0/0")
        for segment in one.rows
        if one.layer.manifest.save_id.step == step
        and any(entry.name == "values.raw_at" for entry in segment.arrays)
    )
    place = segment.name, "values.raw_at"
    [(start, end)] = record.chunks_of(*place)
    body = np.int64(position).tobytes() + record.path.read_bytes()[start + 8 : end]
    change(record.path, record.number, chunks={place: body})
    options, handlers = deltackpt.ManagerOptions(access="read"), make_golden.LOGGED_HANDLERS
    with (
        deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager,
        pytest.raises(DamagedWal, match="ascending positions"),
    ):
        manager.restore(step, make_golden.logged_state_at(step, 0))


def test_a_deeply_nested_item_is_damage(log):
    """Decoding it would overflow the stack."""
    log.writer.write(save_id(4), save_id(3), fill_of(4, item=b"[" * 100_000))
    assert assert_right(log.at) == 3


@pytest.mark.parametrize("count", [0, 1])
def test_empty_segments_do_no_harm(count, empty):
    written = fill_of(1)

    def fill(sink_of: Callable[[str], SegmentSink]) -> FilledRecord:
        found = written(sink_of)
        entry = row_blocks.array_entry("values", (0, 2), np.dtype(np.float32))
        shard_writer.write_array(sink_of("g0.1"), entry, [])
        segment = Segment(
            name="g0.1", group="g0", columns=(0, 2), count=0, ranges=(), fields=("values",),
            arrays=(entry,), encodings=(RAW,),
        )  # fmt: skip
        return found._replace(segments=(*[segment] * count, *found.segments))

    empty.writer.write(save_id(1), BASE, fill if count else written)
    assert assert_right(empty.at) == 1


@pytest.mark.parametrize("version", [footer.VERSION + 1, 255])
def test_records_of_a_later_version_are_refused_and_not_taken_for_damage(version, log):
    first, second, third = split(log)
    page = second[:8] + version.to_bytes(4, "little") + second[12 : PAGE_BYTES - 4]
    crc = google_crc32c.value(page).to_bytes(4, "little")
    log.files[0].write_bytes(first + page + crc + second[PAGE_BYTES:] + third)
    with pytest.raises(FormatTooNew, match=f"found {version}"):
        history_of(log.at)


POINT = {"run": "a", "step": 1, "attempt": 1}
HEAD_CASES: dict[str, dict[str, Any]] = {
    "huge process count": {"process_count": 1 << 60},
    "negative process count": {"process_count": -1},
    "continues itself": {"continues": {"epoch": 0, "save_id": POINT}},
    "run above": {"run": "../.."},
    "no run": {"run": ""},
    "tables of no group": {"groups": []},
    "base that is no save id": {"base": 7},
    "base that is missing": {"base": None, "continues": {"epoch": 0, "save_id": POINT}},
}


def change_header(log: MadeUpLog, **fields: Any) -> Path:
    """Changes fields of the epoch header and recomputes its checksum."""
    path = log.at / naming.epoch_name(0)
    record = msgpack.unpackb(path.read_bytes())
    body = msgpack.packb({**msgpack.unpackb(record["body"]), **fields})
    path.write_bytes(msgpack.packb({**record, "body": body, "crc32c": google_crc32c.value(body)}))
    return path


@pytest.mark.parametrize("case", HEAD_CASES)
def test_a_hand_made_header_is_damage(case, log):
    change_header(log, **HEAD_CASES[case])
    with pytest.raises(Damaged):
        history_of(log.at)


def test_a_header_with_an_unknown_feature_is_refused(log):
    head = wal_format.epoch_header_from((log.at / naming.epoch_name(0)).read_bytes(), name="it")
    newer = dataclasses.replace(head, features=("something-else",))
    (log.at / naming.epoch_name(0)).write_bytes(wal_format.epoch_header_bytes(newer))
    with pytest.raises(FormatTooNew, match="something-else"):
        history_of(log.at)


def test_a_header_with_fields_of_a_later_version_is_read(log):
    """Its records refer to all bytes of the header, including fields unknown to this version."""
    path = change_header(log, later=[1])
    assert found_in(log) == [1, 2, 3] and assert_right(log.at) == 0
    epoch = google_crc32c.value(path.read_bytes())
    for number in range(3):
        change(log.files[0], number, manifest=to("epoch", "crc32c", value=epoch))
    assert assert_right(log.at) == 3
