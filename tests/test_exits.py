# SPDX-License-Identifier: Apache-2.0
"""Programs that exit without ``close()``: no step is lost, nothing hangs, no failure is silent."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import leaver
import model
import pytest

import deltackpt
from deltackpt.errors import DeltackptError, FencedError, SaveFailed, StorageError
from deltackpt.integrations.loop import LoopCheckpoints
from deltackpt.save import exits
from deltackpt.testing import Pause, paused_saves

#: How a program ends, and its exit code.
ENDINGS = {"end": 0, "raise": 1, "exit": 3}
#: Timeout of a program, far above the time of a save.
LIMIT_SECS = 120


def leave(root: Path, **task: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program that ends with its save of step 2 in flight."""
    how = task.pop("how", [leaver.__file__])
    return subprocess.run(
        [sys.executable, *how, json.dumps({"root": str(root), **task})],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        cwd=Path(leaver.__file__).parent,
        env={**os.environ, "XLA_FLAGS": ""},
    )


def assert_restores(root: Path, step: int) -> None:
    """Checks that the newest step is ``step``, bit for bit."""
    state = leaver.states(step)[step][0]
    with deltackpt.CheckpointManager(root, handlers=leaver.HANDLERS) as manager:
        found = manager.restore_latest(state)
    assert found.step == step and not found.skipped
    model.assert_same(found.state, state)


def child_code(found: subprocess.CompletedProcess[str]) -> int:
    """The exit code of a program's child, which it has printed."""
    told = [json.loads(line) for line in found.stdout.splitlines()]
    return next(line["child"] for line in told if "child" in line)


PROGRAM = "import runpy; runpy.run_module('leaver', run_name='__main__')"
#: Programs that end with a save in flight, beside their exit codes.
PROGRAMS: list[tuple[int, dict[str, Any]]] = [
    *(
        (code, {"ending": ending, "kind": kind, "stage": "all"})
        for ending, code in ENDINGS.items()
        for kind in ("base", "delta")
    ),
    *((code, {"ending": ending, "stage": None}) for ending, code in ENDINGS.items()),
    (0, {"ending": "end", "stage": "write"}),
    (3, {"ending": "exit", "kind": "base", "stage": "write"}),
    (1, {"ending": "raise", "stage": "commit"}),
    *(
        (0, {"ending": "no threads", "kind": kind, "stage": stage})
        for kind in ("base", "delta")
        for stage in ("all", "write", "commit")
    ),
    (0, {"stage": "all", "how": ["-m", "leaver"]}),
    (0, {"stage": "all", "how": ["-c", PROGRAM]}),
    # Nothing refers to the manager; threads that Python stops at exit; and threads that go on after
    # the main thread, of which one only appends.
    *((0, {"stage": "all", "where": where}) for where in ("dropped", "daemon", "worker")),
    *((0, {"where": where}) for where in ("thread", "thread of another's", "logging thread")),
]


@pytest.mark.parametrize(("code", "task"), PROGRAMS, ids=lambda value: str(value).strip("{}"))
def test_a_program_that_ends_without_close_loses_no_step(tmp_path, code, task):
    found = leave(tmp_path, **task)
    assert found.returncode == code, found.stderr
    assert "Event loop is closed" not in found.stderr
    assert ("ValueError: the training diverged" in found.stderr) == (task.get("ending") == "raise")
    assert_restores(tmp_path, 2)
    # Retention has removed step 1 unless step 2 is a delta.
    assert (tmp_path / "1").exists() == (task.get("kind") != "base")


@pytest.mark.parametrize(
    ("ending", "where"), [*((ending, "main") for ending in ENDINGS), ("end", "dropped")]
)
def test_a_save_that_fails_at_exit_is_reported_and_the_exit_code_is_120(tmp_path, ending, where):
    found = leave(tmp_path, ending=ending, stage="write", fault="fail", where=where)
    assert found.returncode == exits.EXIT_CODE
    assert "the save of step 2 failed: OSError: the disk is on fire" in found.stderr
    assert found.stderr.count("the disk is on fire") == 1
    assert "deltackpt.errors.SaveFailed" in found.stderr
    assert ("ValueError: the training diverged" in found.stderr) == (ending == "raise")
    assert_restores(tmp_path, 1)


def test_atexit_functions_run_after_a_save_has_failed(tmp_path):
    program = (
        "import atexit, runpy, sys; atexit.register(print, 'registered first', flush=True); "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    found = leave(tmp_path, stage="write", fault="fail", how=["-c", program, leaver.__file__])
    assert found.returncode == exits.EXIT_CODE
    assert found.stdout.endswith("registered first\n")


@pytest.mark.parametrize("ending", ["end", "raise"])
def test_a_save_that_hangs_delays_the_exit_no_longer_than_close_secs(tmp_path, ending):
    found = leave(tmp_path, ending=ending, stage="write", fault="hang", close_secs=3)
    assert found.returncode == exits.EXIT_CODE
    assert "expected it to end within 3 s" in found.stderr
    assert_restores(tmp_path, 1)


def test_a_save_that_cannot_create_its_directory_does_not_delay_the_exit(tmp_path):
    found = leave(tmp_path, stage="all", fault="fail")
    assert found.returncode == exits.EXIT_CODE
    assert "the save of step 2 failed: OSError: the disk is on fire" in found.stderr
    assert_restores(tmp_path, 1)


def test_ctrl_c_abandons_a_save_that_the_exit_waits_for(tmp_path):
    task = {"root": str(tmp_path), "stage": "write", "fault": "hang", "close_secs": LIMIT_SECS}
    with subprocess.Popen(
        [sys.executable, leaver.__file__, json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        assert json.loads(program.stdout.readline()) == {"note": "leaving"}
        while program.poll() is None:
            # The first may come while the program's own code still runs.
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(0.5)
        assert program.returncode == exits.EXIT_CODE
        assert "interrupted; the save in flight is lost" in program.stderr.read()
    assert_restores(tmp_path, 1)


def test_ctrl_c_before_the_exit_waits_for_the_save_loses_nothing(tmp_path):
    """It interrupts Python's shutdown before the manager's exit hook runs."""
    found = leave(tmp_path, ending="interrupted", stage="all")
    assert found.returncode == 0, found.stderr
    assert "KeyboardInterrupt" in found.stderr
    assert_restores(tmp_path, 2)


def test_a_manager_that_is_opened_after_exit_is_refused(tmp_path):
    found = leave(tmp_path, where="late thread")
    assert "deltackpt.errors.ClosedError" in found.stderr
    assert "let the main thread join the one that trains" in found.stderr


def test_a_forked_child_leaves_the_save_of_its_parent_alone(tmp_path):
    found = leave(tmp_path, stage="all", where="forked")
    assert (found.returncode, child_code(found)) == (0, 7), found.stderr
    assert_restores(tmp_path, 2)


@pytest.mark.parametrize("ending", ["end", "raise"])
def test_a_child_of_multiprocessing_loses_no_step(tmp_path, ending):
    found = leave(tmp_path, stage="all", where="child", ending=ending)
    assert child_code(found) == ENDINGS[ending], found.stderr
    assert_restores(tmp_path, 2)


def test_a_save_that_fails_while_a_child_exits_is_reported(tmp_path):
    found = leave(tmp_path, stage="write", fault="fail", where="child")
    assert child_code(found) == exits.EXIT_CODE
    assert "the save of step 2 failed: OSError: the disk is on fire" in found.stderr
    assert '"worked"' in found.stdout


@pytest.mark.parametrize(("action", "shown"), [("error", 2), ("ignore", 0)])
def test_warnings_are_not_errors_while_the_exit_waits_for_a_save(tmp_path, caplog, action, shown):
    ended = []

    class Warns:
        def end(self, ending: exits.Ending) -> None:
            for name in ("first", "second"):
                warnings.warn(f"the {name} file could not be removed", stacklevel=1)
            ended.append(ending)

    manager = Warns()
    patched = mock.patch.object(exits, "_watched", [])
    with warnings.catch_warnings(record=True) as found, patched:
        warnings.simplefilter(action)
        exits.Watch(manager.end, tmp_path)
        exits._end_all()
    assert (ended, len(found), caplog.records) == (["leave"], shown, [])
    assert not isinstance(sys.stdout, exits._LastFlush)


# Another manager on the directory, in the same process.


def opened(root: Path, **timeouts: float) -> deltackpt.CheckpointManager:
    options = deltackpt.ManagerOptions(timeouts=deltackpt.Timeouts(**timeouts))
    return deltackpt.CheckpointManager(root, handlers=leaver.HANDLERS, options=options)


@contextlib.contextmanager
def set_by_another(held: Pause) -> Iterator[None]:
    """Releases the saves as soon as another manager takes over the directory."""
    real = exits.take_over

    def take_over(directory: Any) -> Any:
        held.release()
        return real(directory)

    with mock.patch.object(exits, "take_over", take_over):
        yield


def named(root: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another path of a directory."""
    link = root.with_name("link")
    if how == "link":
        link.symlink_to(root)
    elif how == "link above":
        link.symlink_to(root.parent)
    monkeypatch.chdir(root.parent)
    return {
        "same": root,
        "relative": Path(root.name),
        "dots": root / ".." / root.name,
        "link": link,
        "link above": link / root.name,
    }[how]


@pytest.mark.parametrize("how", ["same", "relative", "dots", "link", "link above"])
def test_another_manager_on_the_directory_ends_the_saves_of_the_first(tmp_path, monkeypatch, how):
    """For example, a notebook cell that runs twice without closing the manager."""
    root, (state, marks) = tmp_path / "root", leaver.states(0)[0]
    first = opened(root)
    with paused_saves(root) as held, set_by_another(held):
        first.save(1, state, touched=marks)
        second = opened(named(root, how, monkeypatch))
    with second:
        found = second.restore_latest(state)
        assert found.step == 1
        for call in (
            lambda: first.save(2, state),
            first.wait_until_finished,
            lambda: first.restore(1),
        ):
            with pytest.raises(FencedError, match="another manager of this process was opened"):
                call()
        first.close()
        assert second.save(2, found.state, touched=found.touched).kind == "delta"
    assert_same_steps(root, [1, 2])


def assert_same_steps(root: Path, steps: list[int]) -> None:
    with deltackpt.CheckpointManager(
        root, handlers=leaver.HANDLERS, options=deltackpt.ManagerOptions(access="read")
    ) as reader:
        assert reader.all_steps() == steps


def test_a_failed_save_of_the_first_manager_is_reported_to_both(tmp_path):
    state, marks = leaver.states(0)[0]
    first = opened(tmp_path)
    model.commit(first, 1, state, touched=marks)
    with paused_saves(tmp_path, errno.EIO) as held, set_by_another(held):
        first.save(2, state, touched=marks)
        with pytest.warns(UserWarning, match="the save of step 2 failed: .*Input/output error"):
            second = opened(tmp_path)
    with second:
        assert second.restore_latest(state).step == 1
    with pytest.raises(SaveFailed, match="step 2"):
        first.close()
    first.close()


@pytest.mark.parametrize("cause", [None, OSError("a sensor")])
@pytest.mark.parametrize("how", ["manager", "loop"])
def test_a_failure_of_close_does_not_hide_the_error_of_the_with_block(tmp_path, how, cause):
    tables = leaver.HANDLERS["embeddings"]
    loop = functools.partial(LoopCheckpoints, tables=tables, every_steps=1)
    with (
        pytest.raises(StorageError, match="moved or removed") as failure,
        (opened if how == "manager" else loop)(tmp_path / "run"),
    ):
        shutil.rmtree(tmp_path / "run")
        raise ValueError("the loss is NaN") from cause
    shown = "".join(traceback.format_exception(failure.value))
    assert "ValueError: the loss is NaN" in shown and (cause is None or "a sensor" in shown)


def test_a_save_that_hangs_does_not_block_another_manager_of_the_directory(tmp_path):
    state, marks = leaver.states(0)[0]
    first = opened(tmp_path, close_secs=1.0)
    with paused_saves(tmp_path) as held:
        first.save(1, state, touched=marks)
        late = first._saver.in_flight.future
        with pytest.warns(UserWarning, match="expected it to end within 1.0 s"):
            second = opened(tmp_path)
        held.release()
        assert isinstance(late.exception(LIMIT_SECS), DeltackptError)
    with second:
        assert second.restore_latest(state) is None
        second.save(1, state, touched=marks)
    first.close()
    assert_same_steps(tmp_path, [1])


def test_readers_and_managers_of_other_directories_stay_open(tmp_path):
    state, marks = leaver.states(0)[0]
    reader_options = deltackpt.ManagerOptions(access="read")
    with opened(tmp_path / "a") as first:
        model.commit(first, 1, state, touched=marks)
        with (
            deltackpt.CheckpointManager(
                tmp_path / "a", handlers=leaver.HANDLERS, options=reader_options
            ) as reader,
            opened(tmp_path / "b") as other,
        ):
            other.save(1, state, touched=marks)
            model.commit(first, 2, state, touched=marks)
            other.wait_until_finished()
            with opened(tmp_path / "a"):
                pass
            assert reader.all_steps() == [1, 2]
            assert other.all_steps() == [1]


def test_a_manager_that_is_not_closed_warns_when_it_is_collected(tmp_path):
    manager = opened(tmp_path)
    gone = weakref.ref(manager)
    with pytest.warns(ResourceWarning, match="was not closed: use it in a with statement"):
        del manager
        gc.collect()
    assert gone() is None
