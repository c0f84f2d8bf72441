# SPDX-License-Identifier: Apache-2.0
"""Atomicity of a step: kills, I/O errors and fsyncs at each moment of a save."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import model
import numpy as np
import pytest
from job import MemoryService, coordinators, step_writers

import deltackpt
from deltackpt.errors import DeltackptError, OutOfSpace, SaveFailed, StorageError
from deltackpt.format import naming
from deltackpt.resources.runtime import Runtime
from deltackpt.save import commit
from deltackpt.save.commit import StepTransaction, StepWriters
from deltackpt.storage import posix
from deltackpt.storage.batch import FileBatch
from deltackpt.testing import STEP_FILES, Disk, DiskCall

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
LIMIT_SECS = 60


def opened(root: Path, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=deltackpt.ManagerOptions(**options)
    )


def states(count: int) -> list[tuple[Any, Any]]:
    """Returns the state and its TouchState at steps 0 to ``count``."""
    state = model.initial()
    found = [(state, model.new_touched(state))]
    for step in range(1, count + 1):
        found.append(model.train(*found[-1], step))
    return found


def save(saver: deltackpt.CheckpointManager, step: int, known: Any, **options: Any) -> str | None:
    """Saves a state with its marks and waits for the save; returns its kind."""
    state, marks = known
    kind = saver.save(step, state, touched=marks, **options).kind
    saver.wait_until_finished()
    return kind


def assert_newest(saver: deltackpt.CheckpointManager, state: Any) -> None:
    model.assert_same(saver.restore_latest(state).state, state)


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.startswith(("lease", ".lease"))}


def assert_only(root: Path, committed: list[int]) -> None:
    """Asserts that the directory holds these steps and nothing else of a save."""
    found = names_in(root)
    assert found == {str(step) for step in committed}, found


# A kill at each moment, simulated by a copy of the directory.


#: Calls of a save of step 2 in order, and whether it is committed then.
MOMENTS = {
    "before anything": ("mkdir", r"^2[.][^/]*$", False),
    "before the tables": ({"mkdir", "open"}, "embeddings/", False),
    "amid the tables": ("write", "embeddings/(.*/c[.]|layer)", False),
    "after the tables": ("open", "embeddings/(digests|manifest)", False),
    "before the dense leaves": ({"mkdir", "open"}, "/dense$|embeddings/layer", False),
    "amid the dense leaves": ("write", "/dense/|embeddings/layer", False),
    "before the digests": ("open", "/digests[.]step|embeddings/manifest", False),
    "before the force": ("fsync", r"^2[.]", False),
    "after the force": ("rename", "^2$", False),
    "between the rename and the parent's fsync": ("fsync", "^$", True),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["base", "delta"])
def test_a_kill_at_any_moment_leaves_every_committed_step_intact(tmp_path, kind, moment):
    call, path, committed = MOMENTS[moment]
    root, image, known = tmp_path / "root", tmp_path / "image", states(3)
    with opened(root) as saver:
        for step in (0, 1):
            save(saver, step, known[step])
        with Disk(root) as disk:
            disk.copy(image, call, path)
            save(saver, 2, known[2], force_base=kind == "base")
    standing = [0, 1, 2] if committed else [0, 1]
    left = names_in(image) - {str(step) for step in standing}
    assert all(name.startswith("2.orbax-checkpoint-tmp") for name in left)
    # A reader beside a trainer ignores the save in flight.
    with opened(image, access="read") as reader:
        assert reader.all_steps() == standing
        for step in standing:
            model.assert_same(reader.restore(step, known[step][0]).state, known[step][0])
    with opened(image) as saver:
        assert_only(image, standing)
        found = saver.restore_latest(known[0][0])
        assert found.step == standing[-1] and not found.skipped
        model.assert_same(found.state, known[found.step][0])
        after_it = model.train(found.state, found.touched, 7)
        assert save(saver, found.step + 1, after_it) == "delta"
        assert_newest(saver, after_it[0])


# I/O errors.


def descriptors_of(step: Path) -> list[str]:
    """Returns the open files of a step in this process, removed files included."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # Another thread's, or the listing's.
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{step}.")]


@contextlib.contextmanager
def closes_refused(number: int, root: Path) -> Iterator[None]:
    """Makes each ``os.close`` of a file of step 2 fail after closing it, as the kernel does."""
    real = os.close

    def failing(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor)
        if path.startswith(f"{root}/2.") and not os.path.isdir(path):
            raise OSError(number, os.strerror(number))

    with mock.patch.object(os, "close", failing):
        yield


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "mkdir", "write", "truncate", "fsync", "close", "rename"])
def test_an_io_error_is_typed_and_the_next_save_has_the_rows(tmp_path, call, number):
    root, known = tmp_path / "root", states(3)
    with opened(root) as saver:
        for step in (0, 1):
            save(saver, step, known[step])
        lent = len(saver._run.runtime.memory._lent)
        with contextlib.ExitStack() as stack:
            if call == "close":
                stack.enter_context(closes_refused(number, root))
            else:
                disk = stack.enter_context(Disk(root))
                disk.fail(call, r"^2([.]|$)", errno=number, times=None)
            with pytest.raises(SaveFailed, match="no touched row is lost") as raised:
                # Only a base truncates files.
                save(saver, 2, known[2], force_base=call == "truncate")
        cause = raised.value.__cause__
        assert type(cause) is (StorageError if number == errno.EIO else OutOfSpace), cause
        assert saver.all_steps() == [0, 1]
        assert_only(root, [0, 1])
        assert not descriptors_of(root / "2")
        assert len(saver._run.runtime.memory._lent) == lent
        assert save(saver, 3, known[3]) == "delta"
        assert_only(root, [0, 1, 3])
        assert_newest(saver, known[3][0])


def test_a_step_whose_last_fsync_failed_exists_and_training_continues_from_it(tmp_path):
    known = states(3)
    with opened(tmp_path) as saver:
        save(saver, 1, known[1])
        with Disk(tmp_path) as disk:
            disk.fail("fsync", "^$")
            with pytest.raises(SaveFailed) as raised:
                save(saver, 2, known[2])
        assert type(raised.value.__cause__) is StorageError
        save(saver, 3, known[3])
        for step in (2, 3):
            model.assert_same(saver.restore(step, known[0][0]).state, known[step][0])


def test_host_rows_are_released_even_if_nothing_can_be_written(tmp_path):
    """The training thread waits for that if arrays are numpy arrays."""
    state, marks = states(0)[0]
    state["tables"]["users"] = np.array(state["tables"]["users"])
    with opened(tmp_path) as saver:
        with Disk(tmp_path) as disk:
            disk.fail("mkdir", errno=errno.ENOSPC)
            saver.save(0, state, touched=marks)
            with pytest.raises(SaveFailed, match="no touched row is lost"):
                saver.wait_until_finished()
        save(saver, 1, (state, marks))


def test_items_side_by_side_are_written_outside_the_settings_of_the_program(tmp_path):
    found, both = list[str](), threading.Barrier(2)

    class Observed:
        def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
            both.wait(LIMIT_SECS)
            found.append(jax.config.jax_numpy_rank_promotion)

        def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
            pass

    [coordinator] = coordinators(MemoryService(), 1, LIMIT_SECS)
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "raise")
    try:
        commit.write(
            StepTransaction(
                final=tmp_path / "5",
                items={"one": Observed(), "another": Observed()},
                tables="one",
                writers=step_writers(coordinator, commit.temporary_dir(tmp_path / "5", "run-1")),
                own_files=dict,
                check=lambda: None,
            )
        )
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)
    assert found == ["allow", "allow"]


# Several processes.


class Written:
    """An item with files in a directory per process, and one file of process 0."""

    def __init__(self, started: threading.Event | None = None):
        self._started = started

    def write(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        if self._started is not None:
            assert self._started.wait(LIMIT_SECS)
        own = item_dir / f"of.{writers.process}"
        batch.make(own)
        batch.write(own / "small", b"a few bytes")
        batch.write_chunk(own / "chunk", np.arange(100_000))

    def complete(self, item_dir: Path, batch: FileBatch, writers: StepWriters) -> None:
        batch.write(item_dir / "merged", b"of all")


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_is_reported_before_it_is_fsynced_even_if_a_process_is_late(tmp_path, late):
    """A power cut leaves only fsynced data, so the test tracks every fsync."""
    final = tmp_path / "5"
    temporary = commit.temporary_dir(final, "run-1")
    others_wrote, lock = threading.Event(), threading.Lock()
    forced: dict[str, set[str]] = {}
    at_word, at_commit = [], []
    real_fsync, real_rename = os.fsync, os.rename
    real_wait, real_report = StepWriters.wait, StepWriters.report

    def contents(path: str) -> set[str]:
        return set(os.listdir(path)) if os.path.isdir(path) else set()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        names = contents(path)
        real_fsync(descriptor)
        with lock:
            forced[path] = names

    def unforced() -> set[str]:
        """Returns files and directories of the step that are not completely fsynced."""
        with lock:
            return {
                path
                for top, folders, inside in os.walk(temporary)
                for path in [top, *(os.path.join(top, name) for name in inside)]
                if path not in forced or contents(path) - forced[path]
            }

    def rename(source: str, target: str, **folders: int) -> None:
        folder = os.readlink(f"/proc/self/fd/{folders['dst_dir_fd']}")
        assert (target, folder) == ("5", str(tmp_path))
        at_commit.append(unforced())
        real_rename(source, target, **folders)

    def report(self: StepWriters, phase: str, records: dict[str, bytes | None]) -> None:
        if phase == "written":
            own = f"{temporary}/item/of.1", f"{temporary}/digests.step.1.msgpack"
            at_word.append({path for path in unforced() if path.startswith(own)})
        real_report(self, phase, records)

    def wait(self: StepWriters, phase: str) -> set[str]:
        others_wrote.set()
        return real_wait(self, phase)

    runtime = Runtime()
    connected = coordinators(MemoryService(), 2, LIMIT_SECS)

    def run(process: int) -> Any:
        step = StepTransaction(
            final=final,
            items={"item": Written(others_wrote if process == late else None)},
            tables="item",
            writers=step_writers(connected[process], temporary, runtime=runtime),
            own_files=lambda: {naming.STEP_METADATA: b"{}"},
            check=lambda: None,
        )
        return commit.write(step)

    with (
        mock.patch.object(os, "fsync", fsync),
        mock.patch.object(os, "rename", rename),
        mock.patch.object(StepWriters, "report", report),
        mock.patch.object(StepWriters, "wait", wait),
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        for done in [pool.submit(run, process) for process in range(2)]:
            done.result(LIMIT_SECS)
    runtime.close()
    assert at_word == [set()] and at_commit == [set()]
    assert forced[str(tmp_path)] >= {"5"}
    assert not temporary.exists() and (final / "item" / "of.1" / "chunk").exists()


def test_a_save_ahead_of_process_0_is_not_removed_as_a_failed_one(tmp_path):
    """Another process may write the next step before process 0 has finished the previous one."""
    known = states(3)
    with opened(tmp_path) as saver:
        with Disk(tmp_path) as disk:
            disk.fail("write", STEP_FILES)
            saver.save(1, known[1][0], touched=known[1][1])
            with pytest.raises(SaveFailed):
                saver.wait_until_finished()
        temporary = Path(disk.paths("mkdir")[0]).name
        ahead = tmp_path / re.sub(r"^1(.*)-1$", r"3\1-3", temporary)
        assert ahead.name != temporary
        saver.save(2, known[2][0], touched=known[2][1])
        ahead.mkdir()
        saver.wait_until_finished()
        assert ahead.is_dir()


def test_files_that_another_process_removes_need_no_fsync(tmp_path):
    """An Orbax handler on process 0 writes concurrently and renames its files."""
    (tmp_path / "item" / "inner").mkdir(parents=True)
    for name in ("item/there", "item/inner/there"):
        (tmp_path / name).write_text("x")
    real = os.walk

    def walk(*arguments: Any, **options: Any) -> Any:
        for folder, folders, inside in real(*arguments, **options):
            yield folder, folders, ["gone", *inside]
        yield str(tmp_path / "item" / "gone too"), [], []

    def fsync(descriptor: int) -> None:
        forced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    forced: list[str] = []
    with mock.patch.object(os, "walk", walk), mock.patch.object(os, "fsync", fsync):
        posix.fsync_tree(tmp_path / "item", while_others_write=True)
        with pytest.raises(StorageError, match="force to disk"):
            posix.fsync_tree(tmp_path / "item")
    below = {str(Path(path).relative_to(tmp_path)) for path in forced}
    assert below == {"item", "item/there", "item/inner", "item/inner/there"}


# Memory.


def test_a_write_into_a_numpy_leaf_during_a_base_is_detected(tmp_path):
    state, marks = states(0)[0]
    # In its own group, so that it is written in place, without a copy.
    leaf = state["tables"]["tiny"] = np.array(state["tables"]["tiny"])

    def train(_: DiskCall) -> None:
        leaf[3] += 1

    with opened(tmp_path) as saver:
        with Disk(tmp_path) as disk:
            # The last call for a chunk before its checksum is compared.
            disk.on("truncate", train, "values/")
            saver.save(0, state, touched=marks)
            with pytest.raises(SaveFailed, match="changed while they were written"):
                saver.wait_until_finished()
        assert saver.all_steps() == []
        assert save(saver, 1, (state, marks)) == "base"
        assert_newest(saver, state)


_FORKING = """
import os, sys, threading, warnings
import leaver, model, deltackpt
warnings.simplefilter("ignore")  # Of threads and forks: the child does nothing.
over = threading.Event()
def fork():
    while not over.is_set():
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
known = leaver.states(6)
thread = threading.Thread(target=fork)
thread.start()
try:
    with deltackpt.CheckpointManager(sys.argv[1], handlers=leaver.HANDLERS) as saver:
        for step, (state, marks) in enumerate(known):
            saver.save(step, state, touched=marks, force_base=step % 3 == 0)
            saver.wait_until_finished()
finally:
    over.set()
    thread.join()
"""


@pytest.mark.processes
def test_saves_of_a_process_that_forks_constantly_are_intact(tmp_path):
    """As input pipelines do. A direct write during a fork loses data of private memory."""
    subprocess.run(
        [sys.executable, "-c", _FORKING, str(tmp_path)],
        check=True,
        timeout=280,
        cwd=Path(__file__).parent,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    known = states(6)
    with opened(tmp_path, access="read") as reader:
        for step in reader.all_steps():
            model.assert_same(reader.restore(step, known[step][0]).state, known[step][0])
        assert reader.all_steps() == list(range(7))


def test_a_save_still_commits_after_close_times_out(tmp_path):
    state, marks = states(0)[0]
    saver = opened(tmp_path, timeouts=deltackpt.Timeouts(close_secs=0.05))
    with Disk(tmp_path) as disk, disk.pause("write", STEP_FILES):
        saver.save(0, state, touched=marks)
        with pytest.raises(DeltackptError, match="still running"):
            saver.close()
    while not (tmp_path / "0").exists():
        time.sleep(0.01)
    with opened(tmp_path, access="read") as reader:
        model.assert_same(reader.restore(0, state).state, state)
