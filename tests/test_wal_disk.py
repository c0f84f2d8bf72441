# SPDX-License-Identifier: Apache-2.0
"""A WAL on disks that fail, fill up, stall or lose power."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import model
import numpy as np
import pytest
from made_up_layers import layers_in
from test_events import Kept
from test_root import mounted_tmpfs
from test_wal import WalRun, quiet

import deltackpt
from deltackpt import RecoveryPoint, events, inspect
from deltackpt.errors import AppendFailed, FencedError, StorageError, WaitTimeout
from deltackpt.layers.read import StoredBytes
from deltackpt.ledger import lease
from deltackpt.reading.wal_locations import newest_durable
from deltackpt.storage.store import store_path
from deltackpt.testing import Disk, DiskCall
from deltackpt.wal import record_batch
from deltackpt.wal.segment_files import SegmentWriter

#: Calls that write a segment, fsync its data, and fsync its name.
CALLS = ("write", "fdatasync", "fsync")
#: Paths of these calls.
LOG = r"^log(/[^/]+){0,2}$|[.]seg$"


def assert_nothing_is_tried_again(disk: Disk) -> None:
    """Checks that no segment was written or fsynced after such a call failed."""
    refused: set[str] = set()
    for call in disk.calls:
        if call.name in CALLS and call.path.endswith(".seg"):
            assert call.path not in refused, call
            if call.errno is not None:
                refused.add(call.path)


@pytest.fixture
def run(tmp_path) -> WalRun:
    return WalRun(tmp_path, options=options())


def options(durability: Any = "power", **log: Any) -> deltackpt.ManagerOptions:
    return deltackpt.ManagerOptions(
        writes=deltackpt.WriteOptions(durability=durability), wal=deltackpt.WalOptions(**log)
    )


def writer_of(manager: deltackpt.CheckpointManager) -> Any:
    recorder = manager._recorder
    assert recorder._writer is not None
    return recorder._writer


def assert_no_seq_twice(root: Path) -> None:
    """Checks that no part uses a sequence number for two complete records."""
    for folder in (root / "log").glob("*/*"):
        found: list[tuple[int, int]] = []
        for path in sorted(folder.glob("*.seg")):
            part = int(path.name.partition("-")[0])
            layers = layers_in(StoredBytes(store_path(path)), path.read_bytes())
            found += ((part, layer.manifest.sequence) for layer in layers)
        assert len({*found}) == len(found)


def records_in_wal(root: Path) -> list[int]:
    """Steps of the recovery points of the first WAL epoch, which cover all its records."""
    epoch = inspect.open(root).wal.epochs[-1]
    assert epoch.records == (len(epoch.recovery_points),)
    return [point.step for point in reversed(epoch.recovery_points)]


def test_rows_queued_behind_a_failure_are_in_the_next_record(tmp_path, run, disk):
    with run.open() as manager:
        run.save_initial()
        held = disk.pause("fdatasync", LOG, errno=errno.EIO, times=1)
        run.append()
        assert held.reached.wait(60)
        for _ in range(3):
            run.append()
        held.release()
        with pytest.raises(AppendFailed):
            manager.wait_appended()
        run.append()
        manager.wait_appended()
    assert records_in_wal(tmp_path)[-1] == 5
    assert_nothing_is_tried_again(disk)
    assert_no_seq_twice(tmp_path)
    with run.open():
        assert run.resume().step == 5


@pytest.mark.parametrize("kind", CALLS[:2])
@pytest.mark.parametrize("dense", ["whole", "delta"])
def test_repeated_failures_end_in_a_saved_step(kind, dense, tmp_path, run, disk):
    with run.started(options(dense=dense), appends=2) as manager:
        disk.fail(kind, LOG, times=None)
        with quiet():
            for _ in range(4):
                last = run.append()
                with contextlib.suppress(AppendFailed):
                    manager.wait_appended()
                if last.saved is not None:
                    break
        assert last.kind is None and "failed again" in last.reason
        manager.wait_until_finished()
        disk.clear()
        # Records continue, from the step or from the durable ones.
        run.append_durably(2)
    assert_nothing_is_tried_again(disk)
    assert_no_seq_twice(tmp_path)
    result = run.restarted()
    assert result.step == max(run.states) and result.point is not None


def test_a_failure_raises_an_error_if_requested(tmp_path, run, disk):
    with run.started(options(on_failure="raise")) as manager:
        disk.fail("fdatasync", LOG)
        run.append()
        writer_of(manager).wait(60)
        message = "step 1: .*Input/output error.*no touched row is lost"
        with pytest.raises(AppendFailed, match=message):
            run.append()
        # The error is raised once; the next call also appends these rows.
        run.append_durably(1)
    assert records_in_wal(tmp_path) == [3]
    assert run.restarted().step == 3


def test_by_default_a_failure_is_a_warning_and_training_continues(run, disk):
    with run.started() as manager:
        disk.fail("write", LOG, errno=errno.ENOSPC, after=0)
        run.append()
        writer_of(manager).wait(60)
        with pytest.warns(UserWarning, match="append of step 1: .*file system full"):
            assert run.append().kind == "full"
        assert isinstance(manager.wait_appended(), RecoveryPoint)


def test_records_that_fail_at_program_exit_are_reported(run, disk):
    manager = run.open(options())
    run.save_initial()
    disk.fail("fdatasync", LOG, errno=errno.ENOSPC, times=None)
    run.append()
    with pytest.raises(AppendFailed, match="step 1"):
        manager._lifetime.end("leave")
    manager._lifetime.state = "closed"  # Suppresses the warning of a manager that was not closed.
    disk.clear()
    manager._recorder.close()


@pytest.mark.processes
def test_a_full_file_system_loses_no_row(tmp_path, run):
    with mounted_tmpfs(tmp_path / "small", "256k") as small:
        given = options(backend=deltackpt.wal.LocalWal(directory=str(small / "log")))
        run.root = tmp_path / "root"
        with run.started(given, appends=1) as manager:
            filler = small / "filler"
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(1 << 20))
            with quiet(), pytest.raises(AppendFailed, match="file system full; free space"):
                for _ in range(500):
                    run.append_durably(1)
            filler.unlink()
            with quiet():
                run.append()
            point = manager.wait_appended()
            assert isinstance(point, RecoveryPoint) and point.step == run.step
        assert run.restarted(given).step == point.step


@contextlib.contextmanager
def stalled(run: WalRun, disk: Disk, given: Any, **append: Any) -> Iterator[tuple[Any, Any]]:
    """A manager whose first record is being fsynced, and the gate that holds the fsync."""
    gate = disk.pause("fdatasync", LOG)
    with run.started(given) as manager:
        run.append(**append)
        assert gate.reached.wait(60)
        yield manager, gate


def test_a_full_buffer_is_waited_for_until_the_deadline_only(tmp_path, run, disk):
    with stalled(run, disk, options(buffer_bytes=1, deadline_secs=0.05)) as (manager, gate):
        with pytest.raises(WaitTimeout, match="No touched row is lost"):
            run.append()
        with pytest.raises(WaitTimeout):
            manager.wait_appended()
        gate.release()
        manager.wait_appended(60)
        run.append()
        manager.wait_appended(60)
    assert records_in_wal(tmp_path) == [1, 3]
    assert run.restarted().step == 3


@pytest.mark.parametrize("passed_by_ids", [False, True])
@pytest.mark.parametrize("next_by_ids", [False, True])
def test_if_the_buffer_is_full_the_next_record_has_the_rows_of_skipped_calls(
    passed_by_ids, next_by_ids, tmp_path, run, disk
):
    gate = disk.pause("fdatasync", LOG)

    def append(by_ids: bool) -> deltackpt.Appended:
        before = run.state
        run.train()
        ids = model.moved(before, run.state) if by_ids else None
        return manager.append(run.step, run.state, touched=run.touched, ids=ids)

    with run.started(options(buffer_bytes=1, when_full="coalesce")) as manager:
        append(next_by_ids)
        assert gate.reached.wait(60)
        for _ in range(3):
            passed = append(passed_by_ids)
            assert passed.kind is None and "the next call also appends these rows" in passed.reason
        gate.release()
        manager.wait_appended()
        assert append(next_by_ids).kind == "full"
        manager.wait_appended()
        # The save compares the given IDs with the stamps.
        assert run.save().kind == "delta"
        manager.delete(run.step)
    assert records_in_wal(tmp_path) == [1, 5]
    assert run.restarted().step == 5


@pytest.mark.parametrize("dense", ["whole", "delta"])
def test_dense_leaves_count_toward_the_buffer_limit(run, disk, dense):
    most = 2_000_000
    run.state = {**run.state, "large": np.zeros(150_000)}
    given = options(buffer_bytes=most, when_full="coalesce", dense=dense)
    with stalled(run, disk, given, full=False) as (manager, gate):
        assert [run.append().kind for _ in range(3)] == ["full", None, None]
        assert 0 < manager._recorder._runtime.memory.reserved_bytes <= most
        gate.release()
        manager.wait_appended()
        assert run.append().kind == "full"


def test_a_writer_that_misses_the_deadline_is_reported_and_ends_later(run, disk):
    with quiet(), stalled(run, disk, options(deadline_secs=0.05)) as (manager, gate):
        for _ in range(2):
            run.append()
        recorder, thread = manager._recorder, writer_of(manager)._thread
        with pytest.warns(UserWarning, match="given up; check the disk"):
            recorder.close()
        with pytest.raises(AppendFailed, match="steps 1 to 3"):
            recorder.wait(60)
        gate.release()
        thread.join(60)
        assert not thread.is_alive()


def test_a_writer_without_pending_records_may_end_late(run, monkeypatch):
    may_end, ended = threading.Event(), threading.Event()
    close = SegmentWriter.close

    def late(self: SegmentWriter) -> None:
        assert may_end.wait(60)
        close(self)
        ended.set()

    monkeypatch.setattr(SegmentWriter, "close", late)
    with run.started(options(deadline_secs=0.05)) as manager:
        run.append()
        manager.wait_appended(60)
    may_end.set()
    assert ended.wait(60)


def test_waiting_records_share_one_fsync(tmp_path, disk):
    kept = Kept()
    run = WalRun(tmp_path, options=options(), event_handlers=(kept,))
    with stalled(run, disk, None) as (manager, gate):
        for _ in range(10):
            run.append()
        gate.release()
        manager.wait_appended()
    assert len(disk.paths("fdatasync")) == 2
    appends = [one for one in kept.received if isinstance(one, events.AppendEvent)]
    assert [one.batches_in_sync for one in appends] == [1] + 10 * [10]
    # Progress is noted once per fsync; the first note creates the file.
    written = [path for path in disk.paths("write") if not path.endswith((".seg", ".tmp"))]
    assert sum("/log/" in path for path in written) == 1
    assert newest_durable(store_path(tmp_path / "log/0/0")).step == 11


def test_without_power_durability_no_segment_is_fsynced(tmp_path, run, disk):
    with run.started(options(durability="process")):
        for _ in range(3):
            run.append_durably(1)
    assert not disk.paths("fdatasync")
    assert not [path for path in disk.paths("fsync") if ".seg" in path]
    assert records_in_wal(tmp_path) == [1, 2, 3]


class Power:
    """The durable WAL: contents of files and directories as of their last fsync."""

    def __init__(self, root: Path, disk: Disk):
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()
        disk.on(("fsync", "fdatasync"), self._force)

    def _force(self, call: DiskCall) -> None:
        path, number = call.path, os.stat(call.path).st_ino
        with self._lock:
            if os.path.isdir(path):
                self._folders[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self._files[number] = Path(path).read_bytes()

    def cut(self, target: Path, torn: random.Random | None = None) -> None:
        """Creates the checkpoint directory that is left: all steps, and the durable WAL.

        With ``torn``, files also have further written bytes, up to a random position.
        """
        shutil.copytree(self._root, target, ignore=shutil.ignore_patterns("log"))
        with self._lock:
            names = self._folders.get(os.stat(self._root).st_ino, {})
            if "log" in names:
                self._leave(self._root / "log", target / "log", torn)

    def _leave(self, folder: Path, target: Path, torn: random.Random | None) -> None:
        target.mkdir()
        for name, number in self._folders.get(os.stat(folder).st_ino, {}).items():
            if (folder / name).is_dir():
                self._leave(folder / name, target / name, torn)
                continue
            data = self._files.get(number, b"")
            if torn is not None and (folder / name).exists():
                written = (folder / name).read_bytes()
                data = written[: torn.randint(len(data), max(len(data), len(written)))]
            (target / name).write_bytes(data)


@pytest.mark.parametrize("torn", [False, True], ids=["forced alone", "and some that was not"])
def test_records_that_were_waited_for_survive_a_power_cut(torn, tmp_path, run, disk):
    root = run.root = tmp_path / "root"
    root.mkdir()
    power, drawn, promised = Power(root, disk), random.Random(7) if torn else None, {}
    with run.started() as manager:
        newest = 0
        for number in range(8):
            run.append()
            if number == 4:
                run.save()
            if number % 3 != 2:
                durable = manager.wait_appended()
                newest = durable if isinstance(durable, int) else durable.step
            promised[tmp_path / f"image{number}"] = newest
            power.cut(tmp_path / f"image{number}", drawn)
    for image, step in promised.items():
        run.root = image
        assert run.restarted().step >= step


def take_lease(root: Path) -> None:
    """Takes the lease for a trainer that never starts."""
    own = max(root.glob("lease.*.msgpack"))
    epoch = int(own.name.split(".")[1])
    (root / f"lease.{epoch + 1}.msgpack").write_bytes(own.read_bytes())


@contextlib.contextmanager
def fenced(run: WalRun, options: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens a manager whose lease the block takes over, and closes it afterwards."""
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    manager = run.open(options)
    run.save_initial()
    run.append_durably(1)
    try:
        yield manager
    finally:
        with contextlib.suppress(FencedError):
            manager.close()


@pytest.mark.parametrize("on_failure", ["save", "raise"])
@pytest.mark.parametrize("kind", ["write", "fdatasync"])
def test_the_next_append_after_a_takeover_raises_fenced_error_whatever_failed(
    tmp_path, run, disk, monkeypatch, kind, on_failure
):
    with fenced(run, options(on_failure=on_failure), monkeypatch) as manager:
        take_lease(tmp_path)
        disk.fail(kind, LOG)
        run.append()
        writer_of(manager).wait(60)
        with pytest.raises(FencedError):
            run.append()


def test_an_append_that_finds_no_room_after_a_takeover_raises_fenced_error(
    tmp_path, run, disk, monkeypatch
):
    with fenced(run, options(buffer_bytes=1, deadline_secs=0.1), monkeypatch):
        with disk.pause("fdatasync", LOG):
            run.append()
            take_lease(tmp_path)
            with pytest.raises(FencedError):
                run.append()


def test_records_of_a_replaced_trainer_are_ignored(tmp_path, run, monkeypatch):
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    with contextlib.ExitStack() as held:
        first = held.enter_context(run.open())
        run.save_initial()
        run.append_durably(3)
        take_lease(tmp_path)
        # Records in flight are written, but not acknowledged.
        with pytest.raises(FencedError):
            run.append_durably(1)
        with pytest.raises(FencedError):
            run.append()
        held.pop_all()
    with pytest.raises(FencedError):
        first.close()
    with run.open():
        found = run.resume()
        assert found.point is not None
        # It continues from the restored point; later records are ignored from now on.
        run.append_durably(1)
        newest, _ = inspect.open(tmp_path).wal.epochs
        assert newest.newest.epoch == 1
        assert newest.forked_from == (0, found.point.save_id)


def test_a_save_and_a_record_of_one_step_do_not_form_a_cycle(tmp_path, run):
    run.begin(0)
    with run.open() as manager:
        run.resume()
        run.save()
        manager.append(run.step, run.state, touched=run.touched)
        run.append_durably(1)
    # The record has the rows since the step, which is lost.
    shutil.rmtree(tmp_path / "1")
    result = run.restarted()
    assert result.step == 0 and result.point is None


def test_a_failure_during_a_capture_discards_the_captured_record_too(
    tmp_path, run, disk, monkeypatch
):
    """Its rows start after the failed record, so it lacks the rows of that one."""
    capture, failed = record_batch.capture, threading.Event()
    with run.started() as manager:
        held = disk.pause("fdatasync", LOG, errno=errno.EIO, times=1)
        run.append()
        recorder = manager._recorder

        def capture_late(*given: Any, **more: Any) -> Any:
            held.release()
            while recorder._writer is not None and recorder._writer.failure is None:
                time.sleep(0.001)
            failed.set()
            return capture(*given, **more)

        monkeypatch.setattr(record_batch, "capture", capture_late)
        run.append()
        monkeypatch.setattr(record_batch, "capture", capture)
        assert failed.is_set()
        with pytest.raises(AppendFailed, match="steps 1 to 2"):
            manager.wait_appended()
        run.append_durably(1)
    assert records_in_wal(tmp_path) == [3]
    assert run.restarted().step == 3


def test_an_error_that_ends_the_thread_is_raised_by_the_next_calls(tmp_path, run, monkeypatch):
    """The error while a failure is handled; nothing would write the later records."""

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    def later(*_: object) -> None:
        time.sleep(0.2)  # Whoever waits for the record must not return before.
        broken()

    died = functools.partial(pytest.raises, StorageError, match="ended with RuntimeError: broken")
    manager = run.open()
    with quiet():
        run.save_initial()
        run.append_durably(1)
        monkeypatch.setattr(SegmentWriter, "sync", broken)
        monkeypatch.setattr(SegmentWriter, "start_part", later)
        with pytest.raises(AppendFailed, match="step 2: broken") as failed:
            run.append_durably(1)
        assert isinstance(failed.value.__cause__, RuntimeError)
        for call in (manager.wait_appended, run.append):
            with died() as found:
                call()
            assert isinstance(found.value.__cause__, RuntimeError)
        step = run.train()
        manager.save(step, run.state, touched=run.touched)
        for call in (manager.wait_until_finished, manager.close):
            with died():
                call()
    assert run.restarted().step == step
