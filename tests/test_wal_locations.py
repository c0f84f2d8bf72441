# SPDX-License-Identifier: Apache-2.0
"""Locations of the WAL: a separate directory, or a remote directory with a journal."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_wal import WalRun, options

from deltackpt.errors import Damaged, FencedError, OutOfSpace
from deltackpt.format import naming, wal_format
from deltackpt.format.naming import PieceRange
from deltackpt.ledger import entries
from deltackpt.ledger.entries import WalRef
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.uploaded_wal import UploadedWal, UploadedWals, contiguous
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.storage.store import FileStore, store_path
from deltackpt.wal import LocalWal
from deltackpt.wal.epoch import write_head


def run_in(root: Path, logs: Path | None = None) -> WalRun:
    """A run with its WAL in a directory of its own."""
    backend = LocalWal(directory=None if logs is None else str(logs))
    return WalRun(root, options=options(backend=backend))


def test_runs_with_one_wal_directory_stay_separate(tmp_path):
    first, second = (run_in(tmp_path / name, tmp_path / "logs") for name in "ab")
    with first.open(), second.open():
        second.train(5)
        for run in (first, second):
            run.save()
        for run in (first, second) * 3:
            run.append()
    assert (first.restarted().step, second.restarted().step) == (4, 9)
    assert not [*(tmp_path / "a" / naming.LOG).rglob("*.seg")]


def test_a_directory_of_the_same_name_on_another_machine_is_not_the_wal(tmp_path):
    run = run_in(tmp_path / "root", tmp_path / "logs")
    run.begin(1)
    [head] = (tmp_path / "logs").glob("*/0.msgpack")
    found = wal_format.epoch_header_from(head.read_bytes(), name="head")
    head.write_bytes(wal_format.epoch_header_bytes(dataclasses.replace(found, run="another")))
    (head.with_suffix("") / naming.HEAD_COPY).write_bytes(head.read_bytes())
    with run.open() as manager, pytest.warns(UserWarning, match="no header of it"):
        found = manager.restore_latest(run.state)
    assert found.step == 0 and [step for step, _ in found.skipped] == [1]


def test_an_epoch_header_that_was_refused_is_written_by_the_next_call(tmp_path, monkeypatch):
    run = run_in(tmp_path / "root", tmp_path / "logs")
    put, refused = FileStore.put, []

    def full(self: FileStore, key: str, data: Any, *, absent: bool = False) -> None:
        if not refused and absent and key.endswith(naming.epoch_name(0)):
            refused.append(key)
            raise OutOfSpace(f"{key}: expected room, found none; free space")
        put(self, key, data, absent=absent)

    monkeypatch.setattr(FileStore, "put", full)
    with run.open():
        with pytest.raises(OutOfSpace):
            run.save_initial()
        run.save_initial()
        run.append()
    assert run.restarted().step == 1


# ---- WALs in a journal


def ref(journal: Journal, epoch: int, run: str = "a") -> WalRef:
    prefix = entries.log_prefix(epoch, journal.claimed.lease.epoch)
    return WalRef(epoch=epoch, run=run, prefix=prefix, crc32c=0)


def test_epochs_count_only_under_the_current_claim_and_in_order(tmp_path):
    first, second = Journal(store_path(tmp_path)), Journal(store_path(tmp_path))
    first.claim()
    assert first.add_wal(ref(first, 0))
    assert first.add_wal(ref(first, 3))
    for epoch in (2, 3):
        assert not first.add_wal(ref(first, epoch, "b"))
    second.claim()
    with pytest.raises(FencedError):
        first.add_wal(ref(first, 4))
    assert second.add_wal(ref(second, 4))
    second.retire(lambda state: [one.prefix for one in state.entry.logs[:-1]])
    assert [one.epoch for one in second.state().entry.logs] == [4]


def test_wal_files_that_no_entry_names_are_swept_once_their_claim_is_over(tmp_path):
    journal = Journal(store_path(tmp_path))
    journal.claim()
    kept, cut = ref(journal, 0), ref(journal, 1)
    assert journal.add_wal(kept)
    for one in (kept, cut):
        at = journal.root / one.prefix / "0" / "x.seg" / naming.piece_name(PieceRange(0, 3, 1))
        at.store.put(at.key, b"abc")
    assert journal.sweep() == 0
    later = Journal(store_path(tmp_path))
    later.claim()
    assert later.sweep() == 1
    assert later.root.store.keys(f"{later.root.key}/log") == [
        f"{later.root.key}/{kept.prefix}/0/x.seg/{naming.piece_name(PieceRange(0, 3, 1))}"
    ]


def test_an_entry_without_wal_epochs_belongs_to_a_run_without_a_wal(tmp_path):
    journal = Journal(store_path(tmp_path))
    journal.claim()
    entry = journal.known.entry
    data = entries.to_bytes(entry)
    assert entries.entry_from(data, name="entry", number=1).logs == ()
    assert UploadedWals(journal.root, lambda: journal.known).numbers() == []


@pytest.mark.parametrize(
    "prefix", ["log/1.1.abcdef12", "log/0.1.abcdef12/..", "saves/0.1.abcdef12"]
)
def test_a_wal_prefix_of_another_location_is_damage(tmp_path, prefix):
    journal = Journal(store_path(tmp_path))
    journal.claim()
    logs = (WalRef(epoch=0, run="a", prefix=prefix, crc32c=0),)
    data = entries.to_bytes(dataclasses.replace(journal.known.entry, logs=logs))
    with pytest.raises(Damaged, match="a prefix of WAL epoch 0"):
        entries.entry_from(data, name="entry", number=None)


def test_overlapping_pieces_are_read_once_and_end_before_a_hole(tmp_path):
    data = bytes(range(100))
    ranges = [(0, 10), (0, 30), (20, 40), (40, 50), (60, 100)]
    for start, end in ranges:
        at = store_path(tmp_path) / "0" / "x.seg" / naming.piece_name(PieceRange(start, end, 7))
        at.store.put(at.key, data[start:end])
    log = UploadedWal(store_path(tmp_path))
    assert log.keys("") == ["0/x.seg"]
    assert log.folders("") == ["0"]
    assert log.get("0/x.seg") == data[:50]
    buffers = [bytearray(7), bytearray(21)]
    log.read_into("0/x.seg", 15, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == data[15:43]
    log.read_into("0/x.seg", -2, [memoryview(buffers[0])[:2]])
    assert buffers[0][:2] == data[48:50]
    with pytest.raises(Damaged):
        log.read_into("0/x.seg", 45, [memoryview(buffers[0])])


def test_threads_that_list_different_processes_find_all_segments(tmp_path):
    for process in range(4):
        at = store_path(tmp_path) / f"{process}/x.seg" / naming.piece_name(PieceRange(0, 1, 7))
        at.store.put(at.key, b"a")
    log = UploadedWal(store_path(tmp_path))
    # With many known segments, the threads replace them at the same time.
    log._known = {f"9/{number}.seg": () for number in range(100_000)}
    keys = [f"{process}/x.seg" for process in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [*pool.map(log.length, keys)] == [1] * 4
    assert {*keys} <= log._known.keys()


def test_pieces_without_the_start_of_their_segment_are_ignored():
    assert contiguous([PieceRange(5, 9, 1)]) == ()
    assert naming.piece_range(naming.piece_name(PieceRange(5, 9, 1))) == PieceRange(5, 9, 1)
    assert naming.piece_range("5-9.1") is None


def test_a_header_gets_a_new_number_although_the_one_before_is_not_uploaded_yet(tmp_path):
    run = run_in(tmp_path / "a")
    with run.open() as manager:
        run.save_initial()
        uploaded = WalReader(WalFolder(store_path(tmp_path / "none")))
        heads = [write_head(manager._run, uploaded, None, None) for _ in range(2)]
    assert [head.epoch for head in heads] == [1, 2]
