# SPDX-License-Identifier: Apache-2.0
"""Disks that refuse, fill up, keep a trainer waiting or lose their power, under a log."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import model
import numpy as np
import pytest
from test_log import Training, manager_of, restored
from test_root import mounted_tmpfs

import deltackpt
from deltackpt import events
from deltackpt.errors import FencedError, LogFailed, OutOfSpace, StorageError, WaitTimeout
from deltackpt.format import frames
from deltackpt.log import taking
from deltackpt.reading.log_files import read_log
from deltackpt.reading.stretches import LogPoint, Logs
from deltackpt.storage.store import spot

__all__ = ["training"]

#: Calls that write a segment, force its data, and force its name.
CALLS = ("writev", "fdatasync", "fsync")


class Call(NamedTuple):
    """One that came to the disk."""

    kind: str
    path: str
    error: int | None


class Disk:
    """What the calls of a log come to; one of them is refused, held up or cut short on demand."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path):
        self.calls: list[Call] = []
        #: Called before each with its kind and path; gives the number of the error that it ends in.
        self.verdict: Callable[[str, str], int | None] = lambda kind, path: None
        #: How many bytes are taken at once; all by default.
        self.most_bytes: int | None = None
        self._root = root
        self._real = {kind: getattr(os, kind) for kind in CALLS}
        self._lock = threading.Lock()
        for kind in CALLS:
            patch.setattr(os, kind, lambda *given, kind=kind: self._do(kind, *given))

    def _do(self, kind: str, descriptor: int, *rest: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        of_log = path.endswith(".seg") or "/log" in path.removeprefix(str(self._root))
        if not of_log:
            return self._real[kind](descriptor, *rest)
        with self._lock:
            error = self.verdict(kind, path)
            self.calls.append(Call(kind, path, error))
        if error is not None:
            if kind == "writev" and self.most_bytes is not None:
                self._write(descriptor, *rest)
            raise OSError(error, os.strerror(error), path)
        return self._write(descriptor, *rest) if rest else self._real[kind](descriptor)

    def _write(self, descriptor: int, buffers: list[memoryview]) -> int:
        if self.most_bytes is None:
            return self._real["writev"](descriptor, buffers)
        return os.write(descriptor, buffers[0][: self.most_bytes])

    def refuse(self, kind: str, number: int, error: int, *, forever: bool = False) -> None:
        """Refuses the call of a kind that comes after so many others; or all from there on."""
        left = [number]

        def verdict(found: str, path: str) -> int | None:
            if found != kind:
                return None
            left[0] -= 1
            return error if left[0] == -1 or (forever and left[0] < 0) else None

        self.verdict = verdict

    def count(self, kind: str) -> int:
        """How many calls of a kind there were."""
        return sum(call.kind == kind for call in self.calls)

    def assert_nothing_is_tried_again(self) -> None:
        """No file was written to, or forced, after that was refused."""
        refused: set[str] = set()
        for call in self.calls:
            assert call.path not in refused, call
            if call.error is not None and call.path.endswith(".seg"):
                refused.add(call.path)


@pytest.fixture
def disk(monkeypatch, tmp_path) -> Disk:
    return Disk(monkeypatch, tmp_path)


@pytest.fixture
def training() -> Training:
    return Training()


def options(durability: Any = "power", **log: Any) -> deltackpt.ManagerOptions:
    return deltackpt.ManagerOptions(
        writes=deltackpt.WriteOptions(durability=durability), log=deltackpt.LogOptions(**log)
    )


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What was warned of meanwhile, which need not be anything."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
    found += [str(one.message) for one in caught]


def settle(manager: deltackpt.CheckpointManager) -> None:
    """Returns when all marks are durable, or have failed, without asking which."""
    recorder = manager._recorder
    assert recorder is not None and recorder._writer is not None
    recorder._writer.wait(60)


def assert_no_seq_twice(root: Path) -> None:
    """Within a part no number stands for two frames; whole ones are looked at."""
    for folder in (root / "log").glob("*/*"):
        found: list[tuple[int, int]] = []
        for path in sorted(folder.glob("*.seg")):
            data, start = path.read_bytes(), 0
            while start + frames.PREFIX_BYTES <= len(data):
                prefix = frames.prefix_of(data[start : start + frames.PREFIX_BYTES], "it")
                if prefix.kind != frames.Kind.BEGIN:
                    found.append((prefix.place.part, prefix.place.seq))
                start += prefix.nbytes
        assert len({*found}) == len(found)


def marks_in(root: Path, stretch: int = 0) -> list[int]:
    """Steps of the marks of process 0."""
    log = read_log(spot(root / "log" / str(stretch) / "0"), stretch, 0)
    return [mark.save_id.step for mark in log.marks]


#: Which call is refused, how, and how many bytes were taken at once until then.
REFUSALS = [
    pytest.param(kind, number, error, short, id=f"{kind}-{number}-{errno.errorcode[error]}-{short}")
    for kind, numbers in (("writev", range(4)), ("fdatasync", range(3)), ("fsync", range(3)))
    for number in numbers
    for error in (errno.ENOSPC, errno.EIO)
    for short in ((None, 1, 100) if kind == "writev" else (None,))
]


@pytest.mark.parametrize(("kind", "number", "error", "short"), REFUSALS)
def test_rows_of_a_mark_that_was_refused_are_in_the_next(
    kind, number, error, short, tmp_path, training, disk
):
    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
        disk.calls.clear()
        disk.most_bytes = short
        disk.refuse(kind, number, error)
        failed = []
        for _ in range(4):
            step = training.go()
            with told():
                manager.log(step, training.state, touched=training.touched)
            try:
                assert isinstance(manager.wait_logged(), LogPoint)
            except LogFailed as problem:
                expected = OutOfSpace if error == errno.ENOSPC else StorageError
                assert isinstance(problem.__cause__, expected) and f"step {step}" in str(problem)
                failed.append(step)
            disk.most_bytes = None
    refused = [call for call in disk.calls if call.error is not None]
    assert len(refused) == len(failed) == 1
    disk.assert_nothing_is_tried_again()
    assert_no_seq_twice(tmp_path)
    assert marks_in(tmp_path) == [step for step in (1, 2, 3, 4) if step not in failed]
    with manager_of(tmp_path, options()) as manager:
        result = restored(manager, training)
        assert result.step == 4 and result.skipped == ()


@pytest.mark.parametrize("kind", CALLS[:2])
@pytest.mark.parametrize("dense", ["whole", "delta"])
def test_what_fails_again_and_again_ends_in_a_step(kind, dense, tmp_path, training, disk):
    with manager_of(tmp_path, options(dense=dense)) as manager:
        training.begin(manager)
        for _ in range(2):
            training.log(manager)
        manager.wait_logged()
        disk.refuse(kind, 0, errno.EIO, forever=True)
        found = []
        with told():
            for _ in range(4):
                found.append(training.log(manager))
                with contextlib.suppress(LogFailed):
                    manager.wait_logged()
                if found[-1].saved is not None:
                    break
        assert found[-1].kind is None and "failed again" in found[-1].reason
        manager.wait()
        disk.verdict = lambda kind, path: None
        # Marks go on, from the step or from what was durable.
        for _ in range(2):
            training.log(manager)
        manager.wait_logged()
    disk.assert_nothing_is_tried_again()
    assert_no_seq_twice(tmp_path)
    with manager_of(tmp_path, options()) as manager:
        result = restored(manager, training)
        assert result.step == max(training.states) and result.point is not None


def test_a_trainer_that_asks_for_it_is_told_by_an_error(tmp_path, training, disk):
    with manager_of(tmp_path, options(on_failure="raise")) as manager:
        training.begin(manager)
        disk.refuse("fdatasync", 0, errno.EIO)
        training.log(manager)
        settle(manager)
        with pytest.raises(LogFailed, match="step 1: .*Input/output error.*no touched row is lost"):
            training.log(manager)
        # It was told once; the next call takes these rows, too.
        training.log(manager)
        manager.wait_logged()
    assert marks_in(tmp_path) == [3]
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 3


def test_by_default_a_failure_is_a_warning_and_training_goes_on(tmp_path, training, disk):
    seen = []
    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
        disk.refuse("writev", 1, errno.ENOSPC)
        training.log(manager)
        settle(manager)
        with pytest.warns(UserWarning, match="log of step 1: .*file system full"):
            seen.append(training.log(manager))
        assert isinstance(manager.wait_logged(), LogPoint)
    assert seen[0].kind == "full"


def test_what_waited_behind_a_failure_is_in_the_next_mark(tmp_path, training, disk):
    held, waits = threading.Event(), threading.Event()

    def verdict(kind: str, path: str) -> int | None:
        if kind != "fdatasync":
            return None
        waits.set()
        held.wait(60)
        return errno.EIO

    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
        disk.verdict = verdict
        training.log(manager)
        assert waits.wait(60)
        for _ in range(3):
            training.log(manager)
        disk.verdict = lambda kind, path: None
        held.set()
        with pytest.raises(LogFailed):
            manager.wait_logged()
        # Only what was given up is owed.
        training.log(manager)
        manager.wait_logged()
    assert marks_in(tmp_path)[-1] == 5
    disk.assert_nothing_is_tried_again()
    assert_no_seq_twice(tmp_path)
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 5


def test_a_save_and_a_failure_at_once_lose_nothing(tmp_path, training, disk):
    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
        training.log(manager)
        manager.wait_logged()
        # The file that the save ends cannot be forced with what was written last.
        disk.refuse("fdatasync", 0, errno.EIO)
        with told():
            for _ in range(3):
                training.log(manager)
                manager.save(training.step, training.state, touched=training.touched)
                training.log(manager)
            with contextlib.suppress(LogFailed):
                manager.wait_logged()
            training.log(manager)
        manager.wait_logged()
        manager.wait()
    disk.assert_nothing_is_tried_again()
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 8
        for step in (3, 5):
            found = manager.restore(step - 1, training.state)
            model.assert_same(found.state, training.states[step - 1])


# A disk that is full.


@pytest.mark.processes
def test_a_full_file_system_loses_no_row(tmp_path, training):
    with mounted_tmpfs(tmp_path / "small", "256k") as small:
        given = options(backend=deltackpt.LocalLog(directory=str(small / "log")))
        with manager_of(tmp_path / "root", given) as manager:
            training.begin(manager)
            training.log(manager)
            manager.wait_logged()
            filler = small / "filler"
            with contextlib.suppress(OSError):
                filler.write_bytes(bytes(1 << 20))
            with told(), pytest.raises(LogFailed, match="file system full; free space"):
                for _ in range(500):
                    training.log(manager)
                    manager.wait_logged()
            filler.unlink()
            with told():
                training.log(manager)
            point = manager.wait_logged()
            assert isinstance(point, LogPoint) and point.step == training.step
        with manager_of(tmp_path / "root", given) as manager:
            assert restored(manager, training).step == point.step


# A disk that is slow.


class Gate:
    """Holds up every ``fdatasync`` until it is opened."""

    def __init__(self, disk: Disk):
        self.reached, self._open = threading.Event(), threading.Event()
        disk.verdict = self._wait

    def _wait(self, kind: str, path: str) -> None:
        if kind == "fdatasync":
            self.reached.set()
            assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


def test_a_full_buffer_is_waited_for_no_longer_than_the_deadline(tmp_path, training, disk):
    gate = Gate(disk)
    with manager_of(tmp_path, options(buffer_bytes=1, deadline_secs=0.05)) as manager:
        training.begin(manager)
        training.log(manager)
        assert gate.reached.wait(60)
        with pytest.raises(WaitTimeout, match="No touched row is lost"):
            training.log(manager)
        with pytest.raises(WaitTimeout):
            manager.wait_logged()
        gate.open()
        manager.wait_logged(60)
        training.log(manager)
        manager.wait_logged(60)
    assert marks_in(tmp_path) == [1, 3]
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 3


@pytest.mark.parametrize("by_ids", [False, True], ids=["stamps", "ids"])
def test_where_the_buffer_is_full_the_next_mark_has_the_rows_of_those_passed_over(
    by_ids, tmp_path, training, disk
):
    gate = Gate(disk)

    def log() -> deltackpt.Logged:
        before = training.state["tables"]
        training.go()
        after = training.state["tables"]
        moved = {
            name: np.flatnonzero((np.asarray(before[name]) != np.asarray(after[name])).any(1))
            for name in after
        }
        ids = moved if by_ids else None
        return manager.log(training.step, training.state, touched=training.touched, ids=ids)

    with manager_of(tmp_path, options(buffer_bytes=1, when_full="coalesce")) as manager:
        training.begin(manager)
        log()
        assert gate.reached.wait(60)
        for _ in range(3):
            passed = log()
            assert passed.kind is None and "the next call takes these rows too" in passed.reason
        gate.open()
        manager.wait_logged()
        assert log().kind == "full"
        manager.wait_logged()
    assert marks_in(tmp_path) == [1, 5]
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 5


class Seen:
    """A sink of events."""

    def __init__(self) -> None:
        self.together: list[int] = []

    def receive(self, event: events.Event) -> None:
        if isinstance(event, events.LogEvent):
            self.together.append(event.batches_in_sync)


def test_marks_that_wait_are_forced_together(tmp_path, training, disk):
    gate, seen = Gate(disk), Seen()
    tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)
    with deltackpt.CheckpointManager(
        tmp_path, handlers={"embeddings": tables}, options=options(), sinks=(seen,)
    ) as manager:
        training.begin(manager)
        training.log(manager)
        assert gate.reached.wait(60)
        for _ in range(10):
            training.log(manager)
        gate.open()
        manager.wait_logged()
    assert disk.count("fdatasync") == 2
    assert seen.together == [1] + 10 * [10]


# What a power cut leaves.


def test_without_durability_nothing_is_forced(tmp_path, training, disk):
    with manager_of(tmp_path, options(durability="process")) as manager:
        training.begin(manager)
        for _ in range(3):
            training.log(manager)
            manager.wait_logged()
    assert disk.count("fdatasync") == 0
    assert not [call for call in disk.calls if call.kind == "fsync" and ".seg" in call.path]
    assert marks_in(tmp_path) == [1, 2, 3]


class Power:
    """What is on disk of the log: contents of files and of folders as they were last forced."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch):
        self._root = root
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()
        for kind in ("fsync", "fdatasync"):
            real = getattr(os, kind)
            patch.setattr(os, kind, lambda descriptor, real=real: self._force(real, descriptor))

    def _force(self, real: Callable[[int], None], descriptor: int) -> None:
        path, number = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_ino
        with self._lock:
            if os.path.isdir(path):
                self._folders[number] = {
                    entry.name: entry.inode() for entry in os.scandir(os.path.realpath(path))
                }
            else:
                with open(path, "rb") as file:
                    self._files[number] = file.read()
        real(descriptor)

    def cut(self, target: Path, torn: random.Random | None = None) -> None:
        """Makes what is left of the root: steps as they are, of the log what was forced.

        With ``torn`` further bytes of files that were written are there, too, up to any place.
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
def test_what_was_waited_for_survives_a_power_cut(torn, tmp_path, training, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    power, drawn = Power(root, monkeypatch), random.Random(7)
    images: list[tuple[Path, int]] = []

    def cut(promised: int) -> None:
        images.append((tmp_path / f"image{len(images)}", promised))
        power.cut(images[-1][0], drawn if torn else None)

    with manager_of(root, options()) as manager:
        training.begin(manager)
        for number in range(8):
            training.log(manager)
            if number == 4:
                training.save(manager)
            if number % 3 != 2:
                promised = manager.wait_logged()
                cut(promised if isinstance(promised, int) else promised.step)
            else:
                cut(images[-1][1])
    monkeypatch.undo()
    for image, promised in images:
        with manager_of(image, options()) as manager:
            assert restored(manager, training).step >= promised


# A trainer that was replaced.


def test_marks_of_a_trainer_that_was_replaced_are_dead(tmp_path, training):
    with contextlib.ExitStack() as held:
        first = held.enter_context(manager_of(tmp_path, options()))
        training.begin(first)
        for _ in range(3):
            training.log(first)
        first.wait_logged()
        other = Training()
        lease = max(tmp_path.glob("lease.*.msgpack"))
        epoch = int(lease.name.split(".")[1])
        (tmp_path / f"lease.{epoch + 1}.msgpack").write_bytes(lease.read_bytes())
        other.states = dict(training.states)
        # What is on its way is written, and not acknowledged.
        with pytest.raises(FencedError):
            training.log(first)
            first.wait_logged()
        with pytest.raises(FencedError):
            training.log(first)
        held.pop_all()
    with pytest.raises(FencedError):
        first.close()
    with manager_of(tmp_path, options()) as second:
        found = second.restore_latest(other.state)
        assert found is not None and found.point is not None
        other.states[4] = training.states[4]
        other.goes_on_from(found)
        # It goes on from what it found, and nothing behind that counts from now on.
        other.log(second)
        second.wait_logged()
        history = Logs(spot(tmp_path / "log")).read()
        assert [point.stretch for point in history.points()][0] == 1
        assert history.eras[1].last == found.point.save_id


def test_a_save_and_a_mark_of_one_step_lead_to_no_circle(tmp_path, training):
    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
    with manager_of(tmp_path, options()) as manager:
        restored(manager, training)
        training.save(manager)
        manager.log(training.step, training.state, touched=training.touched)
        training.log(manager)
        manager.wait_logged()
    # The mark's rows are those since the step, which is lost.
    shutil.rmtree(tmp_path / "1")
    with manager_of(tmp_path, options()) as manager:
        result = restored(manager, training)
        assert result.step == 0 and result.point is None


def test_a_failure_while_a_mark_is_taken_gives_that_up_as_well(
    tmp_path, training, disk, monkeypatch
):
    """Its rows are since the mark that fails, so that it lacks those of that one."""
    taken, take = threading.Event(), taking.take
    failed: list[bool] = []

    def verdict(kind: str, path: str) -> int | None:
        if kind != "fdatasync":
            return None
        taken.wait(60)
        return errno.EIO

    with manager_of(tmp_path, options()) as manager:
        training.begin(manager)
        disk.verdict = verdict
        training.log(manager)
        recorder = manager._recorder
        assert recorder is not None

        def take_late(*given: Any, **more: Any) -> Any:
            taken.set()
            while recorder._writer is not None and recorder._writer.failure is None:
                threading.Event().wait(0.001)
            disk.verdict = lambda kind, path: None
            failed.append(True)
            return take(*given, **more)

        monkeypatch.setattr(taking, "take", take_late)
        training.log(manager)
        monkeypatch.setattr(taking, "take", take)
        assert failed
        with pytest.raises(LogFailed, match="steps 1 to 2"):
            manager.wait_logged()
        training.log(manager)
        manager.wait_logged()
    assert marks_in(tmp_path) == [3]
    with manager_of(tmp_path, options()) as manager:
        assert restored(manager, training).step == 3
