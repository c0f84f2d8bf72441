# SPDX-License-Identifier: Apache-2.0
"""Frames, segments and marks: what is whole is found, and what is not is never taken for it."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import google_crc32c
import hypothesis.strategies as st
import ml_dtypes
import msgpack
import numpy as np
import pytest
from golden import make_golden
from hypothesis import HealthCheck, example, given, settings
from made_up_logs import (
    BASE,
    ROWS,
    MadeUpLog,
    batch_of,
    bounds_of,
    contents_after,
    follow,
    history_of,
    read_newest,
    records_in,
    reframed,
    rows_of,
    save_id,
    scan_of,
    way_to,
    weights_of,
)

import deltackpt
from deltackpt.errors import Damaged, DamagedWal, FormatTooNew
from deltackpt.format import frames, names, stretches
from deltackpt.format.frames import (
    After,
    BeginHead,
    DenseHead,
    DenseValue,
    Head,
    ItemsHead,
    LoggedItem,
    MarkHead,
    Place,
    RowsHead,
)
from deltackpt.format.manifest import SaveId
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.format.soundness import STORED_DTYPES
from deltackpt.format.stretches import Continues
from deltackpt.wal.frame import Frame

#: What nothing of some kilobytes may take.
MOST_BYTES = 256 << 20
MARKS = (1, 2, 3)
GOLDEN = Path(make_golden.__file__).parent


def numbers_of(scan: Any) -> list[int]:
    return [mark.save_id.attempt for mark in scan.marks]


def found_in(log: MadeUpLog) -> list[int]:
    """The marks that are found in a log as it stands."""
    return numbers_of(scan_of(log))


def assert_right(at: Path, numbers: Iterable[int] = MARKS) -> int:
    """What can be read of the newest point is right, to the bit; which point it was, 0 for none.

    Where a mark on the way to it is damaged, the point before is taken, as restores do.
    """
    skipped: list[SaveId] = []
    while (way := way_to(at, skipped)) is not None:
        point = way.point.save_id
        try:
            read = follow(way)
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
def log(tmp_path) -> MadeUpLog:
    """Three marks in one file."""
    return MadeUpLog(tmp_path / "log").begin().mark(*MARKS)


# What is written is read.

counts = st.integers(0, (1 << 63) - 1)
words = st.text("abcxyz0189._-", min_size=1, max_size=8).filter(lambda text: text.strip("."))
ids = st.builds(SaveId, words, counts, counts)
arrays_of_any_kind = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        random.Random(seed).randbytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(sorted(STORED_DTYPES - {"bool"})),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.integers(0, 99),
)


def bytes_of(piece: bytes | np.ndarray) -> bytes:
    return piece if isinstance(piece, bytes) else piece.tobytes()


def in_pieces(array: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return np.split(array, sorted(min(cut, len(array)) for cut in cuts))


@st.composite
def rows_frames(draw) -> tuple[Head, list[list[np.ndarray]]]:
    held = draw(st.dictionaries(words, arrays_of_any_kind, max_size=4))
    ranges = draw(st.none() | st.lists(counts, max_size=6).map(sorted))
    spans = None if ranges is None else tuple(zip(ranges[::2], ranges[1::2], strict=False))
    segment = Segment(
        name=draw(words),
        group=draw(words),
        columns=(draw(counts), draw(counts)),
        count=draw(counts),
        ranges=spans,
        fields=tuple(held),
        arrays=tuple(
            ArrayEntry(name=name, shape=array.shape, dtype=array.dtype.name, chunk_rows=1)
            for name, array in held.items()
        ),
    )
    cuts = draw(st.lists(st.integers(0, 5), max_size=2))
    return RowsHead(segment=segment), [in_pieces(array, cuts) for array in held.values()]


@st.composite
def dense_frames(draw) -> tuple[Head, list[list[bytes]]]:
    bodies = draw(st.lists(st.binary(max_size=20), max_size=4))
    against = draw(st.none() | st.integers(0, 6))
    values = [
        DenseValue(
            key=draw(st.text(max_size=9)),
            file=False,
            nbytes=len(body),
            decoded_bytes=len(body) if against is None else draw(st.integers(0, 1 << 40)),
            itemsize=draw(st.integers(1, 16)),
            against=against,
        )
        for body in bodies
    ]
    return DenseHead(values=tuple(values)), [[body] for body in bodies]


@st.composite
def items_frames(draw) -> tuple[Head, list[list[bytes]]]:
    held = draw(st.dictionaries(st.text(max_size=9), st.binary(max_size=20), max_size=4))
    kinds = st.sampled_from(["bytes", "json"])
    items = [
        LoggedItem(name=name, kind=draw(kinds), nbytes=len(body)) for name, body in held.items()
    ]
    return ItemsHead(items=tuple(items)), [[body] for body in held.values()]


begin_frames = st.builds(
    BeginHead,
    stretch=counts,
    crc32c=st.integers(0, (1 << 32) - 1),
    after=st.none() | st.builds(After, part=counts, seq=counts),
).map(lambda head: (head, []))
mark_frames = st.builds(
    MarkHead,
    save_id=st.just(SaveId("a", 9, 2)),
    parent=st.builds(SaveId, words, st.integers(0, 9), counts),
    full=st.booleans(),
    frames=counts,
    unix_ns=counts,
).map(lambda head: (head, []))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    frame=st.one_of(begin_frames, rows_frames(), dense_frames(), items_frames(), mark_frames),
    part=st.integers(0, (1 << 16) - 1),
    process=st.integers(0, (1 << 32) - 1),
    seq=st.integers(7, (1 << 64) - 1),
    crc32c=st.integers(0, (1 << 32) - 1),
)
@example(frame=(DenseHead(values=()), []), part=0, process=0, seq=7, crc32c=0)
def test_every_frame_is_read_as_it_was_written(frame, part, process, seq, crc32c):
    head, body = frame
    place = Place(part, process, seq, 9)
    encoded = frames.encode(place, head, body, crc32c)
    data = b"".join(encoded.buffers)
    assert len(data) == encoded.nbytes

    prefix = frames.prefix_of(data[: frames.PREFIX_BYTES], "it")
    assert prefix.place == place and prefix.nbytes == len(data)
    start = frames.PREFIX_BYTES + prefix.head_bytes
    seed = 0 if isinstance(head, BeginHead) else crc32c
    if not isinstance(head, BeginHead):
        assert frames.head_of(prefix, data[frames.PREFIX_BYTES : start], seed, "it") == head
    held = memoryview(data)[start : start + prefix.body_bytes]
    behind = frames.body_crc32c(data[-frames.CRC_BYTES :])
    frames.check_body(held, prefix.crc32c, behind, "it")
    assert behind == encoded.crc32c

    plain = [b"".join(map(bytes_of, pieces)) for pieces in body]
    if isinstance(head, RowsHead):
        pieces = frames.pieces_of([entry.nbytes for entry in head.arrays], held, "it")
        assert [*map(bytes, pieces)] == plain
    elif isinstance(head, (DenseHead, ItemsHead)):
        values = head.values if isinstance(head, DenseHead) else head.items
        pieces = frames.pieces_of([value.nbytes for value in values], held, "it")
        assert [*map(bytes, pieces)] == plain


@given(begin_frames, st.integers(0, (1 << 32) - 1))
def test_a_segment_begins_from_nothing(frame, crc32c):
    head, _ = frame
    data = b"".join(frames.encode(Place(1, 2, 3, 0), head, [], 0).buffers)
    prefix = frames.prefix_of(data, "it")
    end = frames.PREFIX_BYTES + prefix.head_bytes
    assert frames.head_of(prefix, data[frames.PREFIX_BYTES : end], crc32c, "it") == head


def test_bits_of_numbers_that_no_buffer_describes_are_written_as_they_are():
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(3, 2)
    value = DenseValue(key="w", file=False, nbytes=12, decoded_bytes=12, itemsize=2)
    encoded = frames.encode(Place(0, 0, 1, 0), DenseHead(values=(value,)), [[array]], 0)
    assert array.tobytes() in b"".join(encoded.buffers)


@pytest.mark.parametrize("numbers", [[1], [2, 3], [1, 2, 3, 4, 5, 6]])
def test_a_head_may_be_large(numbers, tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    values = [
        DenseValue(key=f"{n:0200}", file=False, nbytes=8, decoded_bytes=8) for n in range(3000)
    ]
    for number in numbers:
        large = Frame(DenseHead(values=tuple(values)), [[bytes(8)]] * 3000)
        mark = MarkHead(save_id=save_id(number), parent=BASE, full=True, frames=1, unix_ns=0)
        log.writer.write([large, Frame(mark, [])], number)
    assert found_in(log) == numbers
    frame, _ = records_in(log.folder)[-1]
    assert frame.head.values == tuple(values) and len(frame.body) == 24_000


def test_marks_give_rows_dense_leaves_and_items(log):
    assert assert_right(log.at) == 3


# Logs that end anywhere.


def test_cut_at_each_byte_a_log_holds_the_whole_marks_before_it(log):
    path = log.files[0]
    data = path.read_bytes()
    bounds = [end for _, end in bounds_of(path.read_bytes())]
    ends = bounds[4::4]
    for length in range(len(data), -1, -1):
        os.truncate(path, length)
        whole = [number for number, end in zip(MARKS, ends, strict=True) if end <= length]
        found = scan_of(log)
        assert numbers_of(found) == whole
        assert (not found.damage) == (length in (0, *bounds)), length
        if length in (*ends, *(end - 1 for end in ends)):
            assert assert_right(log.at) == len(whole)


def test_a_reader_that_follows_has_each_mark_once_it_is_whole(tmp_path):
    source = MadeUpLog(tmp_path / "written").begin().mark(1, 2).roll().mark(3).roll().mark(4, 5)
    target = MadeUpLog(tmp_path / "log").begin()
    target.folder.mkdir(parents=True)
    follower = scan_of(target)
    drawn, whole = random.Random(3), 0
    for path in source.files:
        data = path.read_bytes()
        ends = [end for _, end in bounds_of(data)][4::4]
        with open(target.folder / path.name, "wb", 0) as file:
            while file.tell() < len(data):
                file.write(data[file.tell() :][: drawn.randint(1, 90)])
                follower.advance()
                ended = sum(end <= file.tell() for end in ends)
                assert numbers_of(follower) == [*range(1, whole + ended + 1)]
                way = way_to(target.at)
                assert (0 if way is None else way.point.save_id.attempt) == len(follower.marks)
        whole += len(ends)
        assert follower.damage == []
    assert numbers_of(follower) == [1, 2, 3, 4, 5]
    assert assert_right(target.at, (1, 2, 3, 4, 5)) == 5


# Bytes that are altered.


@pytest.mark.parametrize("number", range(9))
def test_no_flipped_bit_goes_unnoticed(number, tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1, 2)
    path = log.files[0]
    data = path.read_bytes()
    start, end = bounds_of(data)[number]
    body_bytes = frames.prefix_of(data[start : start + frames.PREFIX_BYTES], "it").body_bytes
    whole = max(0, (number - 1) // 4)
    with open(path, "r+b", 0) as file:
        for at in range(start, end):
            in_body = 0 < end - frames.CRC_BYTES - at <= body_bytes
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                # Bodies are looked at when they are needed.
                assert len(found_in(log)) == (2 if in_body else whole), (at, bit)
                if in_body or bit == at % 8:
                    # Nobody needs dense leaves and items of a mark above which there is another.
                    expected = 2 if in_body and number in (2, 3) else whole
                    assert assert_right(log.at, (1, 2)) == expected, (at, bit)
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert assert_right(log.at, (1, 2)) == 2


@pytest.mark.parametrize("seed", range(40))
def test_zeros_in_the_place_of_what_was_written_are_noticed(seed, log):
    path, drawn = log.files[0], random.Random(seed)
    data = bytearray(path.read_bytes())
    start = drawn.randrange(len(data))
    end = start + drawn.choice([1, 8, 100, 512, len(data)])
    written = bytes(data)
    data[start:end] = bytes(len(data[start:end]))
    path.write_bytes(data)
    changed = next((at for at in range(len(data)) if data[at] != written[at]), len(data))
    whole = sum(end <= changed for _, end in bounds_of(written)[4::4])
    assert assert_right(log.at) >= whole
    if changed < len(data):
        assert assert_right(log.at) < 3


def moved(path: Path, order: Iterable[int]) -> None:
    """Writes frames of a file in another order."""
    data = path.read_bytes()
    path.write_bytes(b"".join(data[slice(*bounds_of(data)[number])] for number in order))


@pytest.mark.parametrize("how", ["taken out", "twice", "exchanged with the next"])
@pytest.mark.parametrize("number", range(13))
def test_frames_that_are_not_as_they_were_written_end_the_log(number, how, log):
    order = [*range(13)]
    if how == "taken out":
        del order[number]
    elif how == "twice":
        order.insert(number, number)
    else:
        order[number : number + 2] = order[number : number + 2][::-1]
    moved(log.files[0], order)
    first = next((at for at, one in enumerate(order) if one != at), len(order))
    assert found_in(log) == [1, 2, 3][: max(0, (first - 1) // 4)]
    assert_right(log.at)


@pytest.mark.parametrize("number", range(13))
def test_a_frame_of_another_log_ends_the_log(number, log, tmp_path):
    other = MadeUpLog(tmp_path / "other", stretch=0, run="b1").begin().mark(*MARKS)
    theirs, data = other.files[0].read_bytes(), log.files[0].read_bytes()
    found = b"".join(
        theirs[slice(*bounds_of(theirs)[at])] if at == number else data[slice(*bounds_of(data)[at])]
        for at in range(13)
    )
    log.files[0].write_bytes(found)
    # What begins a file is the same in both.
    assert assert_right(log.at) <= (3 if number == 0 else max(0, (number - 1) // 4))


def test_what_another_run_wrote_is_not_taken_for_ours(log, tmp_path):
    other = MadeUpLog(tmp_path / "other", run="b1").begin().mark(*MARKS)
    shutil.copyfile(other.files[0], log.files[0])
    assert assert_right(log.at) == 0


# Files in the wrong place.


@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize(
    "other",
    [{"stretch": 1}, {"process": 1}],
    ids=["another stretch", "another process"],
)
def test_a_file_from_elsewhere_is_refused_however_often_it_is_looked_at(other, again, tmp_path):
    elsewhere = MadeUpLog(tmp_path / "log", **other).begin().mark(*MARKS)
    log = MadeUpLog(tmp_path / "log").begin()
    log.folder.mkdir(parents=True)
    shutil.copyfile(elsewhere.files[0], log.folder / elsewhere.files[0].name)
    found = scan_of(log)
    for _ in range(again + 1):
        found.advance()
        assert found.marks == [] and len(found.damage) == 1


@pytest.mark.parametrize("name", [names.segment_name(1, 1), names.segment_name(0, 2)])
def test_a_file_of_another_name_is_refused(name, log):
    log.files[0].rename(log.folder / name)
    assert found_in(log) == []


@pytest.mark.parametrize(
    "name", ["progress", "0-1.seg", "00000-1.seg", f"{names.segment_name(0, 9)}.tmp", "x.seg"]
)
def test_other_files_are_left_alone(name, log):
    (log.folder / name).write_bytes(b"else")
    found = scan_of(log)
    assert numbers_of(found) == [1, 2, 3] and found.damage == []


def test_a_process_without_a_log_has_no_marks(tmp_path):
    MadeUpLog(tmp_path / "log").begin(count=2).mark(*MARKS)
    assert assert_right(tmp_path / "log") == 0


# Several files and parts.


def test_a_file_goes_on_where_the_one_before_ended(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1).roll().mark(2).roll().mark(3)
    assert len(log.files) == 3
    assert assert_right(log.at) == 3


@pytest.mark.parametrize("torn", [1, 40, 72, 73, 200, 700])
def test_a_torn_file_does_not_harm_those_after_it(torn, tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1).roll().mark(2).roll().mark(3)
    os.truncate(log.files[1], min(torn, log.files[1].stat().st_size - 1))
    found = scan_of(log)
    assert numbers_of(found) == [1, 3]
    # Nothing leads from the last mark down to the step.
    assert assert_right(log.at) == 1


def test_a_file_that_is_missing_between_others_is_a_gap(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1).roll().mark(2).roll().mark(3)
    log.files[1].unlink()
    assert found_in(log) == [1, 3]
    assert assert_right(log.at) == 1


def test_what_was_trimmed_is_not_needed_above_a_later_step(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    log.mark(1).roll().mark(2, 3).roll().mark(4)
    step = SaveId("a0", 2, 0)
    expected = contents_after([3, 4])
    log.files[0].unlink()
    history = history_of(log.at)
    assert history.way(history.points()[0], BASE) is None
    way = history.way(history.points()[0], step)
    assert way is not None
    np.testing.assert_array_equal(follow(way).table, expected)


def test_files_that_are_trimmed_beside_a_reader_are_forgotten(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1).roll().mark(2)
    found = scan_of(log)
    assert numbers_of(found) == [1, 2]
    log.files[0].unlink()
    found.advance()
    assert numbers_of(found) == [2] and found.damage == []


def fail_after(log: MadeUpLog, number: int, *lost: int) -> None:
    """Writes a mark that counts, and others that a further part says do not."""
    log.mark(number)
    durable = log.writer.position
    log.mark(*lost)
    log.writer.begin_part(durable)


def test_a_further_part_goes_on_from_what_it_says_and_nothing_counts_beyond(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    fail_after(log, 1, 2, 3)
    log.mark(4, parent=save_id(1))
    assert len(log.files) == 2
    assert found_in(log) == [1, 4]
    assert assert_right(log.at, (1, 4)) == 4


def test_parts_that_fail_one_after_the_other_leave_what_was_durable(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    fail_after(log, 1, 2)
    log.mark(3, parent=save_id(1))
    # Not even the last part's first mark could be forced.
    durable = log.writer.position._replace(seq=5, crc32c=_crc_at(log.files[0], 5))
    log.writer.begin_part(durable)
    log.mark(4, parent=save_id(1))
    fail_after(log, 5, 6)
    log.mark(7, parent=save_id(5))
    assert found_in(log) == [1, 4, 5, 7]
    assert assert_right(log.at, (1, 4, 5, 7)) == 7


def _crc_at(path: Path, seq: int) -> int:
    data = path.read_bytes()
    end = bounds_of(data)[seq][1]
    return frames.body_crc32c(data[end - frames.CRC_BYTES : end])


def test_until_a_further_part_has_begun_what_is_whole_counts(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    fail_after(log, 1, 2, 3)
    log.mark(4, parent=save_id(1))
    last = log.files[-1]
    data = last.read_bytes()
    begun = bounds_of(data)[0][1]
    for length in range(len(data), -1, -1):
        os.truncate(last, length)
        whole = [1, 4] if length == len(data) else [1] if length >= begun else [1, 2, 3]
        assert found_in(log) == whole, length
    assert assert_right(log.at) == 3


# Stretches.


def test_of_an_earlier_stretch_counts_what_the_next_one_goes_on_from(tmp_path):
    at = tmp_path / "log"
    earlier = MadeUpLog(at).begin().mark(1, 2, 3)
    goes_on = Continues(stretch=0, save_id=save_id(2))
    later = MadeUpLog(at, stretch=1, run="b1").begin(continues=goes_on)
    # Whoever wrote it does not know yet.
    earlier.mark(4)
    points = [point.save_id for point in history_of(at).points()]
    assert points == [save_id(2), save_id(1)]
    later.mark(3, parent=save_id(2))
    read = read_newest(at)
    assert read is not None and read.point.save_id == save_id(3, "b1")
    expected = contents_after([3], "b1", contents_after([1, 2]))
    np.testing.assert_array_equal(read.table, expected)


def test_a_stretch_that_goes_on_from_no_point_kills_all_earlier_ones(tmp_path):
    at = tmp_path / "log"
    MadeUpLog(at).begin().mark(1, 2, 3)
    MadeUpLog(at, stretch=1, run="b1").begin()
    assert history_of(at).points() == []


def test_without_the_newest_head_nobody_knows_what_counts(tmp_path):
    at = tmp_path / "log"
    MadeUpLog(at).begin().mark(1, 2, 3)
    (at / names.stretch_name(1)).write_bytes(b"torn")
    with pytest.raises(Damaged, match=r"1\.msgpack"):
        history_of(at)


def test_a_head_under_another_number_is_damage(tmp_path):
    at = tmp_path / "log"
    MadeUpLog(at).begin().mark(1)
    shutil.copyfile(at / names.stretch_name(0), at / names.stretch_name(4))
    with pytest.raises(Damaged, match="WAL epoch 4"):
        history_of(at)


# What somebody made by hand, checksums right.


def change(path: Path, number: int, replace: Callable[[Any], Any], body: bytes | None) -> None:
    """Replaces what a frame says, and all checksums from there on."""
    data, crc = path.read_bytes(), 0
    made = []
    for at, (start, end) in enumerate(bounds_of(data)):
        frame = data[start:end]
        prefix = frames.prefix_of(frame, "it")
        head: Any = frame[frames.PREFIX_BYTES : frames.PREFIX_BYTES + prefix.head_bytes]
        if at == number:
            fields = msgpack.unpackb(head)
            replaced = replace(fields)
            head = fields if replaced is None else replaced
        begins = prefix.kind == frames.Kind.BEGIN
        frame = reframed(frame, head, 0 if begins else crc, body=body if at == number else None)
        made.append(frame)
        crc = 0 if begins else frames.body_crc32c(frame[-frames.CRC_BYTES :])
    path.write_bytes(b"".join(made))


def to(*path: Any, value: Any) -> Callable[[Any], None]:
    """What sets the value at a path of a head."""

    def replace(head: Any) -> None:
        for key in path[:-1]:
            head = head[key]
        head[path[-1]] = value

    return replace


def keep(head: Any) -> None:
    """Replaces nothing."""


#: Frames: rows and the mark of the second mark, dense leaves and items of the last.
ROWS_FRAME, MARK, DENSE, ITEMS = 5, 8, 10, 11
HUGE = 1 << 62
COUNT = len(rows_of(2))
#: Which frame, how its head is replaced, and its body where that is, too.
CASES: dict[str, tuple[int, Callable[[Any], Any], bytes | None]] = {
    "no map": (ROWS_FRAME, lambda head: [], None),
    "nothing": (ROWS_FRAME, lambda head: {}, None),
    "no msgpack": (ROWS_FRAME, lambda head: b"\xc1", None),
    "no bytes": (ROWS_FRAME, lambda head: b"", None),
    "more than a map": (ROWS_FRAME, lambda head: msgpack.packb(head) + b"\0", None),
    "numbers as keys": (ROWS_FRAME, lambda head: {1: 2}, None),
    "an array longer than it is": (ROWS_FRAME, lambda head: b"\xdd\xff\xff\xff\xff", None),
    "a map longer than it is": (ROWS_FRAME, lambda head: b"\xdf\xff\xff\xff\xff", None),
    "deep": (ROWS_FRAME, lambda head: b"\x91" * 100_000 + b"\0", None),
    "another group": (ROWS_FRAME, to("segment", "group", value="g9"), None),
    "a group that is no text": (ROWS_FRAME, to("segment", "group", value=7), None),
    "segment above": (ROWS_FRAME, to("segment", "name", value="../.."), None),
    "segment elsewhere": (ROWS_FRAME, to("segment", "name", value="/etc"), None),
    "array above": (ROWS_FRAME, to("segment", "arrays", 0, "name", value=".."), None),
    "array twice": (ROWS_FRAME, to("segment", "arrays", 0, "name", value="values"), None),
    "no arrays": (ROWS_FRAME, to("segment", "arrays", value=[]), b""),
    "another field": (ROWS_FRAME, to("segment", "fields", value=["slot.x"]), None),
    "columns back": (ROWS_FRAME, to("segment", "columns", value=[2, 1]), None),
    "columns beyond": (ROWS_FRAME, to("segment", "columns", value=[0, 3]), None),
    "huge count": (ROWS_FRAME, to("segment", "count", value=HUGE), None),
    "negative count": (ROWS_FRAME, to("segment", "count", value=-1), None),
    "more rows": (ROWS_FRAME, to("segment", "count", value=COUNT + 1), None),
    "true for a number": (ROWS_FRAME, to("segment", "count", value=True), None),
    "ranges beyond": (ROWS_FRAME, to("segment", "ranges", value=[[0, HUGE]]), None),
    "ranges back": (ROWS_FRAME, to("segment", "ranges", value=[[5, 2]]), None),
    "ranges that overlap": (ROWS_FRAME, to("segment", "ranges", value=[[0, 2], [1, 2]]), None),
    "huge shape": (ROWS_FRAME, to("segment", "arrays", 1, "shape", value=[HUGE, HUGE]), None),
    "shape that overflows": (
        ROWS_FRAME,
        to("segment", "arrays", 1, "shape", value=[1 << 32, 1 << 32]),
        None,
    ),
    "negative shape": (ROWS_FRAME, to("segment", "arrays", 1, "shape", value=[-1, 2]), None),
    "no shape": (ROWS_FRAME, to("segment", "arrays", 1, "shape", value=[]), None),
    "object": (ROWS_FRAME, to("segment", "arrays", 1, "dtype", value="object"), None),
    "another dtype": (ROWS_FRAME, to("segment", "arrays", 1, "dtype", value="int32"), None),
    "another codec": (
        ROWS_FRAME,
        to(
            "segment",
            "encodings",
            value=[
                {
                    "field": "values",
                    "codec": "int8",
                    "reason": "",
                    "nbytes": 1,
                    "rows": [COUNT],
                    "squared_error": [0.0],
                    "squared_norm": [0.0],
                }
            ],
        ),
        None,
    ),
    "no body": (ROWS_FRAME, keep, b""),
    "short body": (ROWS_FRAME, keep, bytes(8)),
    "long body": (ROWS_FRAME, keep, bytes(4096)),
    "rows twice": (
        ROWS_FRAME,
        keep,
        np.array([3, 0, 1, 0], np.uint32)[:COUNT].tobytes().ljust(16, b"\0") + bytes(8 * COUNT),
    ),
    "rows beyond": (
        ROWS_FRAME,
        keep,
        np.full(COUNT, ROWS, np.uint32).tobytes().ljust(16, b"\0") + bytes(8 * COUNT),
    ),
    "dense that is no list": (DENSE, to("values", value={}), None),
    "more of a value": (DENSE, to("values", 0, "nbytes", value=HUGE), None),
    "a value that grows": (DENSE, to("values", 0, "decoded_bytes", value=HUGE), None),
    "no itemsize": (DENSE, to("values", 0, "itemsize", value=0), None),
    "against itself": (DENSE, to("values", 0, "against", value=10), None),
    "against what is later": (DENSE, to("values", 0, "against", value=60), None),
    "against rows": (DENSE, to("values", 0, "against", value=9), None),
    "no difference": (DENSE, to("values", 0, "against", value=2), None),
    "file above": (
        DENSE,
        lambda head: head["values"][0].update(file=True, key="../../x"),
        None,
    ),
    "file elsewhere": (DENSE, lambda head: head["values"][0].update(file=True, key="/x"), None),
    "file without a name": (DENSE, lambda head: head["values"][0].update(file=True, key=""), None),
    "dense without a body": (DENSE, keep, b""),
    "an item of another kind": (ITEMS, to("items", 0, "kind", value="pickle"), None),
    "more of an item": (ITEMS, to("items", 0, "nbytes", value=HUGE), None),
    "an item that is no JSON": (ITEMS, keep, b"{".ljust(8, b"\0")),
    "an item that is no text": (ITEMS, keep, b"\xff".ljust(8, b"\0")),
    "mark of another step": (MARK, to("save_id", "step", value=3), None),
    "mark of a huge step": (MARK, to("save_id", "step", value=(1 << 64) - 1), None),
    "mark of another run": (MARK, to("save_id", "run", value="c2"), None),
    "run above": (MARK, to("save_id", "run", value="../.."), None),
    "parent's run above": (MARK, to("parent", "run", value="a/b"), None),
    "parent above": (MARK, to("parent", "step", value=3), None),
    "its own parent": (MARK, to("parent", value={"run": "a0", "step": 2, "attempt": 2}), None),
    "no parent": (MARK, to("parent", value=None), None),
    "fewer frames": (MARK, to("frames", value=2), None),
    "huge frames": (MARK, to("frames", value=HUGE), None),
    "full that is a number": (MARK, to("full", value=1), None),
    "mark with a body": (MARK, keep, bytes(8)),
    "begin with a body": (0, keep, bytes(8)),
    "begin of another stretch": (0, to("stretch", value=1), None),
    "after that is no map": (0, to("after", value=[1, 2]), None),
    "negative after": (0, to("after", value={"part": 0, "seq": -1}), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_made_by_hand_is_refused_by_its_mark(case, log):
    number, replace, body = CASES[case]
    change(log.files[0], number, replace, body)
    tracemalloc.start()
    try:
        # Nothing before it is harmed.
        assert assert_right(log.at) == max(0, (number - 1) // 4)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("position", [-1, 1 << 40])
def test_rows_beside_codes_stand_at_rows_of_the_frame(position, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(GOLDEN / "log-v1", root)
    [record] = [one for one in records_in(root / "log/0/0") if one[-1].place.step == 12]
    [frame] = [one for one in record if "values.raw_at" in str(one.head)]
    body, start = bytearray(frame.body), 0
    for entry in frame.head.segment.arrays:
        if entry.name == "values.raw_at":
            body[start : start + 8] = np.int64(position).tobytes()
        start += entry.nbytes + -entry.nbytes % 8
    change(frame.path, frame.number, keep, bytes(body))
    with pytest.raises(DamagedWal, match="ascending positions"):
        restore_golden(root, 12)


def restore_golden(root: Path, step: int) -> None:
    options = deltackpt.ManagerOptions(access="read")
    logged = make_golden.LOGGED[1]
    with deltackpt.CheckpointManager(root, handlers=logged.handlers, options=options) as manager:
        manager.restore(step, logged.state_at(step, int(step > make_golden.GOES_ON_FROM)))


def test_a_deep_item_is_damage(tmp_path):
    log = MadeUpLog(tmp_path / "log").begin().mark(1)
    deep = b"[" * 100_000
    change(log.files[0], 3, to("items", 0, "nbytes", value=len(deep)), deep)
    assert assert_right(log.at) == 0


def test_a_difference_that_says_it_is_huge_takes_no_memory(tmp_path):
    root = tmp_path / "root"
    shutil.copytree(GOLDEN / "log-v1", root)
    # A frame of zstd may claim any length: here 1 TiB, by an empty block.
    claimed = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\0\0"
    step, frame, at = next(
        (record[-1].place.step, frame, at)
        for record in records_in(root / "log/0/0") + records_in(root / "log/1/0")
        for frame in record
        if isinstance(frame.head, DenseHead)
        for at, value in enumerate(frame.head.values)
        if value.against is not None
    )
    sizes = [value.nbytes for value in frame.head.values]
    pieces = [*map(bytes, frames.pieces_of(sizes, memoryview(frame.body), "it"))]
    pieces[at] = claimed
    body = b"".join(piece + bytes(-len(piece) % 8) for piece in pieces)
    change(frame.path, frame.number, to("values", at, "nbytes", value=len(claimed)), body)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedWal):
            restore_golden(root, step)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [0, 1])
def test_frames_of_no_rows_do_no_harm(count, tmp_path):
    log = MadeUpLog(tmp_path / "log").begin()
    empty = Frame(RowsHead(segment=_without_rows()), [[np.zeros((0, 2), np.float32)]])
    batch = batch_of(1, BASE)
    mark = MarkHead(save_id=save_id(1), parent=BASE, full=True, frames=3 + count, unix_ns=0)
    log.writer.write([*[empty] * count, *batch[:3], Frame(mark, [])], 1)
    assert assert_right(log.at) == 1


def _without_rows() -> Segment:
    held = ArrayEntry(name="values", shape=(0, 2), dtype="float32", chunk_rows=1)
    return Segment(
        name="g0.1", group="g0", columns=(0, 2), count=0, ranges=(), fields=("values",),
        arrays=(held,),
    )  # fmt: skip


@pytest.mark.parametrize("version", [frames.VERSION + 1, 255])
def test_frames_of_a_later_version_are_refused_and_not_taken_for_damage(version, log):
    path = log.files[0]
    data = bytearray(path.read_bytes())
    start, end = bounds_of(bytes(data))[5]
    before = _crc_at(path, 4)
    data[start + 4] = version
    with pytest.raises(FormatTooNew, match=f"found {version}"):
        frame = bytes(data[start:end])
        prefix = frames.prefix_of(frame, "it")
        head = frame[frames.PREFIX_BYTES : frames.PREFIX_BYTES + prefix.head_bytes]
        frame = reframed(frame, head, before)
        path.write_bytes(bytes(data[:start]) + frame + bytes(data[end:]))
        history_of(log.at)


POINT = {"run": "a", "step": 1, "attempt": 1}
HEAD_CASES: dict[str, dict[str, Any]] = {
    "huge process count": {"process_count": 1 << 60},
    "negative process count": {"process_count": -1},
    "continues itself": {"continues": {"stretch": 0, "save_id": POINT}},
    "run above": {"run": "../.."},
    "no run": {"run": ""},
    "tables of no group": {"groups": []},
    "base that is no save id": {"base": 7},
    "base that is missing": {
        "base": None,
        "continues": {"stretch": 0, "save_id": POINT},
    },
}


@pytest.mark.parametrize("case", HEAD_CASES)
def test_a_head_that_was_made_by_hand_is_damage(case, log):
    path = log.at / names.stretch_name(0)
    record = msgpack.unpackb(path.read_bytes())
    body = msgpack.packb({**msgpack.unpackb(record["body"]), **HEAD_CASES[case]})
    path.write_bytes(msgpack.packb({**record, "body": body, "crc32c": google_crc32c.value(body)}))
    with pytest.raises(Damaged):
        history_of(log.at)


def test_a_head_of_an_unknown_feature_is_refused(log):
    head = stretches.from_bytes((log.at / names.stretch_name(0)).read_bytes(), name="it")
    newer = dataclasses.replace(head, features=("something-else",))
    (log.at / names.stretch_name(0)).write_bytes(stretches.to_bytes(newer))
    with pytest.raises(FormatTooNew, match="something-else"):
        history_of(log.at)
