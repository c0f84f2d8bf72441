# SPDX-License-Identifier: Apache-2.0
"""Background errors are raised or reported at the next call; closed managers refuse all calls."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import leaver
import model
import numpy as np
import pytest
from test_exits import opened

import deltackpt
from deltackpt import errors, events, serving
from deltackpt.format.records import IdentityCache
from deltackpt.ledger.directory import Root
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.save import dense_layout, exits
from deltackpt.serving import live as live_module
from deltackpt.storage import buckets
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import FileStore, StorePath
from deltackpt.testing import paused_saves
from deltackpt.tiers import copy, copy_locations
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.staging import StagingDir

LIMIT_SECS = 60
STATE, MARKS = leaver.states(0)[0]
PACKAGE = os.path.dirname(deltackpt.__file__)
#: A call of each public name of a manager; a test fails if one is missing.
CALLS: dict[str, Callable[[deltackpt.CheckpointManager], Any]] = {
    "all_steps": lambda manager: manager.all_steps(),
    "best_step": lambda manager: manager.best_step("loss"),
    "check_for_errors": lambda manager: manager.check_for_errors(),
    "check_lease": lambda manager: manager.check_lease(),
    "custom_metadata": lambda manager: manager.custom_metadata(1),
    "delete": lambda manager: manager.delete(1),
    "resume_step": lambda manager: manager.resume_step,
    "is_saving_in_progress": lambda manager: manager.is_saving_in_progress(),
    "item_metadata": lambda manager: manager.item_metadata(1),
    "latest_step": lambda manager: manager.latest_step(),
    "append": lambda manager: manager.append(2, STATE, touched=MARKS),
    "metrics": lambda manager: manager.metrics(1),
    "next_save": lambda manager: manager.next_save(STATE, touched=MARKS),
    "recovery_points": lambda manager: manager.recovery_points(),
    "reached_preemption": lambda manager: manager.reached_preemption(2),
    "read": lambda manager: manager.read(1, {}),
    "read_state": lambda manager: manager.read_state(1, STATE),
    "restore": lambda manager: manager.restore(1, STATE),
    "restore_latest": lambda manager: manager.restore_latest(STATE),
    "save": lambda manager: manager.save(2, STATE, touched=MARKS),
    "save_if_due": lambda manager: manager.save_if_due(2, STATE, touched=MARKS),
    "should_save": lambda manager: manager.should_save(2),
    "verify_tracking": lambda manager: manager.verify_tracking(STATE, touched=MARKS),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "wait_appended": lambda manager: manager.wait_appended(),
    "with": lambda manager: manager.__enter__(),
}
#: Names that a closed manager still answers.
ALWAYS = {"close", "directory", "options"}


def opened_to_read(root: Path) -> deltackpt.CheckpointManager:
    options = deltackpt.ManagerOptions(access="read")
    return deltackpt.CheckpointManager(root, handlers=leaver.HANDLERS, options=options)


def saved(root: Path) -> deltackpt.CheckpointManager:
    """A manager that has committed step 1."""
    manager = opened(root)
    model.commit(manager, 1, STATE, touched=MARKS)
    return manager


def answers_of(
    manager: deltackpt.CheckpointManager, kind: type[errors.DeltackptError]
) -> list[str]:
    """Calls that do not raise an error of this kind."""
    found = []
    for name, call in CALLS.items():
        try:
            call(manager)
        except kind:
            continue
        except BaseException as error:
            found.append(f"{name}: {error!r}")
        else:
            found.append(name)
    return found


def test_every_public_name_of_a_manager_is_tested():
    public = {name for name in dir(deltackpt.CheckpointManager) if not name.startswith("_")}
    assert public - ALWAYS == CALLS.keys() - {"with"}


def test_a_closed_manager_refuses_every_call(tmp_path):
    manager = saved(tmp_path)
    manager.close()
    assert answers_of(manager, errors.ClosedError) == []
    manager.close()


def test_a_manager_fenced_by_another_one_refuses_every_call(tmp_path):
    manager = saved(tmp_path)
    with opened(tmp_path):
        assert answers_of(manager, errors.FencedError) == []
        manager.close()


@pytest.mark.parametrize("call", ["save", "append"])
def test_without_a_further_thread_a_call_fails_and_the_next_one_has_its_rows(tmp_path, call):
    """As in a container whose limit of threads is reached."""
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    refused = RuntimeError("can't start new thread")
    states = dict(enumerate(leaver.states(3)))
    with deltackpt.CheckpointManager(
        tmp_path, handlers=leaver.HANDLERS, options=options
    ) as manager:

        def give(step: int) -> None:
            state, marks = states[step]
            getattr(manager, call)(step, state, touched=marks)

        if call == "append":
            model.commit(manager, 0, states[0][0], touched=states[0][1])
        with (
            mock.patch.object(threading.Thread, "start", side_effect=refused),
            pytest.raises(errors.StorageError, match="to start .*thread.*, found can't start"),
        ):
            give(1)
        for step in (2, 3):
            give(step)
        manager.wait_until_finished()
        manager.wait_appended(LIMIT_SECS)
        model.assert_same(manager.restore(3, states[3][0]).state, states[3][0])
        # The call that failed is not executed later.
        assert manager.all_steps() == ([2, 3] if call == "save" else [0])
        assert [point.step for point in manager.recovery_points()] == (
            [] if call == "save" else [3, 2]
        )


def test_an_interrupted_start_of_the_thread_that_appends_leaves_one_thread(tmp_path):
    """Two would write to the same segment."""
    start, name = threading.Thread.start, "deltackpt-wal"
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    states = leaver.states(3)

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == name:
            raise KeyboardInterrupt

    with deltackpt.CheckpointManager(
        tmp_path, handlers=leaver.HANDLERS, options=options
    ) as manager:
        model.commit(manager, 0, states[0][0], touched=states[0][1])
        with (
            mock.patch.object(threading.Thread, "start", interrupted_start),
            pytest.raises(KeyboardInterrupt),
        ):
            manager.append(1, states[1][0], touched=states[1][1])
        for step in (2, 3):
            manager.append(step, states[step][0], touched=states[step][1])
        manager.wait_appended(LIMIT_SECS)
        assert [thread.name for thread in threading.enumerate()].count(name) == 1
        model.assert_same(manager.restore(3, states[3][0]).state, states[3][0])


def interrupted(
    call: Callable[[], object], after: int = 0, *, at: str = "call", name: str = ""
) -> bool:
    """Calls a function, and interrupts it at an event in the package, after ``after`` others.

    ``at`` is the kind of event, as in ``sys.setprofile``; if ``name`` is given, only events in that
    function count.
    """
    left = iter(range(after))

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<genexpr>":
            return  # Perhaps unfinished and being closed: Python would drop the interrupt.
        if event == at and code.co_filename.startswith(PACKAGE) and name in ("", code.co_qualname):
            if next(left, None) is None:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("context", range(6))
def test_a_manager_closes_after_an_interrupt_at_the_end_of_a_call(tmp_path, context):
    """The traceback keeps the call's generators unfinished."""
    left = iter(range(context))

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_end = (code.co_filename, code.co_name) == (contextlib.__file__, "__exit__")
        if event == "call" and is_end and next(left, None) is None:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        deltackpt.CheckpointManager(tmp_path, handlers=leaver.HANDLERS) as manager,
    ):
        manager.save(0, STATE)
        sys.setprofile(profile)
        try:
            manager.save_if_due(1, STATE)
        finally:
            sys.setprofile(None)


@pytest.mark.parametrize("call", ["save", "append"])
def test_training_continues_after_a_call_that_was_interrupted_anywhere(tmp_path, call):
    """No row is lost, and all memory for copies is available again."""
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    state, marks = STATE, MARKS
    with deltackpt.CheckpointManager(
        tmp_path, handlers=leaver.HANDLERS, options=options
    ) as manager:
        model.commit(manager, 0, state, touched=marks)
        recorder = manager._recorder
        assert recorder is not None
        give = getattr(manager, call)
        for number in range(1, 1000):
            state, marks = model.train(state, marks, number)
            first = functools.partial(give, 2 * number, state, touched=marks)
            if not interrupted(first, after=number * 29):
                break
            state, marks = model.train(state, marks, number + 1)
            give(2 * number + 1, state, touched=marks)
            manager.wait_until_finished()
            manager.wait_appended()
            with opened_to_read(tmp_path) as reader:
                found = reader.restore_latest(state)
            assert found is not None and found.step == 2 * number + 1
            model.assert_same(found.state, state)
            for memory in (manager._run.runtime.memory, recorder._runtime.memory):
                assert memory.fits(memory.limit_bytes) and not memory.reserved_bytes, number
        assert number > 8


@pytest.mark.parametrize(
    "name, at",
    [
        ("Reservation.acquire", "return"),
        ("WalWriter.submit", "return"),
        ("WalWriter.submit", "c_return"),  # When it returns from a built-in function.
    ],
)
def test_an_append_interrupted_as_a_function_returns_keeps_no_memory(tmp_path, name, at):
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    with deltackpt.CheckpointManager(
        tmp_path, handlers=leaver.HANDLERS, options=options
    ) as manager:
        model.commit(manager, 0, STATE, touched=MARKS)
        recorder = manager._recorder
        assert recorder is not None
        for after in itertools.count():
            append = functools.partial(manager.append, after + 1, STATE, touched=MARKS)
            if not interrupted(append, after, at=at, name=name):
                break
            manager.wait_appended()
            assert not recorder._runtime.memory.reserved_bytes
        assert after


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_manager_refuses_every_call_even_if_another_thread_is_in_it(tmp_path):
    manager = saved(tmp_path)
    before = sorted(os.listdir(tmp_path))
    read, write = os.pipe()
    with manager._lifetime.lock:
        # The thread that holds the lock does not exist in the child.
        forking = threading.Thread(target=lambda: pids.append(_fork(manager, write)))
        pids: list[int] = []
        forking.start()
        forking.join()
    os.close(write)
    with open(read) as told:
        assert told.read() == "[]"
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert sorted(os.listdir(tmp_path)) == before
    manager.save(2, STATE, touched=MARKS)
    manager.close()


def _fork(manager: deltackpt.CheckpointManager, write: int) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(LIMIT_SECS)  # In case it hangs.
            CALLS["close"] = lambda manager: manager.close()
            os.write(write, str(answers_of(manager, errors.ClosedError)).encode())
            os._exit(0)
        os._exit(1)
    return pid


# A fenced trainer.


def test_an_in_flight_save_whose_directory_the_next_trainer_removes_is_fenced(tmp_path):
    manager = saved(tmp_path)
    with paused_saves(tmp_path) as held:
        manager.save(2, STATE, touched=MARKS, force_base=True)
        Root.open(tmp_path)  # Another process.
        held.release()
        with pytest.raises(errors.FencedError, match="expected to hold its lease"):
            manager.wait_until_finished()
    manager.close()


# Threads.


def test_an_error_of_the_push_thread_is_reported_and_retried(tmp_path):
    stage = StagingDir(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    pusher, again = Pusher(stage), threading.Event()
    outcomes = iter([ZeroDivisionError("unexpected")])

    def step() -> bool:
        for error in outcomes:
            raise error
        again.set()
        return False

    with mock.patch.object(pusher, "step", step):
        thread = pusher.start(Trainer())
        assert again.wait(LIMIT_SECS) and thread.is_alive()
        pusher.end()
        thread.join(LIMIT_SECS)
    told = stage.progress("", "peers")
    assert told.problem == "ZeroDivisionError: unexpected"
    assert told.code == errors.DeltackptError.code


def test_a_failed_save_is_raised_after_its_warning_was_an_error(tmp_path):
    with saved(tmp_path) as manager:
        with paused_saves(tmp_path, errno.EIO) as held:
            manager.save(2, STATE, touched=MARKS)
            held.release()
            with pytest.raises(UserWarning, match="the save of step 2 failed"):
                manager.restore_latest(STATE)
        with pytest.raises(errors.SaveFailed, match="step 2") as raised:
            manager.save(3, STATE, touched=MARKS)
        assert raised.value.saved is not None


def test_a_start_whose_warning_is_an_error_releases_the_directory(tmp_path):
    watched = [*exits._watched]
    full = errors.StorageError("the disk is on fire")
    with mock.patch.object(Root, "remove_leftovers", side_effect=full):
        with pytest.raises(UserWarning, match="leftovers .* were not removed: the disk is on fire"):
            opened(tmp_path)
    assert exits._watched == watched
    with saved(tmp_path) as manager:
        assert manager.all_steps() == [1]


def test_an_error_has_the_warnings_before_it_as_notes(tmp_path):
    with saved(tmp_path) as manager:
        with paused_saves(tmp_path, errno.EIO) as held:
            manager.save(2, STATE, touched=MARKS)
            held.release()
            with pytest.raises(errors.StepNotFound) as raised:
                manager.restore(7, STATE)
        with pytest.raises(errors.SaveFailed):
            manager.wait_until_finished()
    assert "UserWarning: the save of step 2 failed" in raised.value.__notes__[0]


class Failing:
    """An event handler that fails, which is a warning."""

    def receive(self, event: events.Event) -> None:
        raise ValueError(f"no place for a {type(event).__name__}")


def test_a_failed_save_is_raised_although_its_warning_is_an_error(tmp_path):
    with saved(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager._run.event_handlers = (Failing(),)
        with paused_saves(tmp_path, errno.EIO) as held:
            manager.save(2, STATE, touched=MARKS, force_base=True)
            held.release()
            flight = manager._saver.in_flight
            assert flight is not None and flight.future.exception(LIMIT_SECS) is not None
        with pytest.raises(errors.SaveFailed, match="step 2") as raised:
            manager.check_for_errors()
    assert "RuntimeWarning" in raised.value.__notes__[0]


def test_reports_are_returned_by_the_call_after_a_warning_that_is_an_error(tmp_path):
    with saved(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.wait_until_finished()
        manager.save(2, STATE, touched=MARKS, force_base=True)
        manager._run.event_handlers = (Failing(),)
        with pytest.raises(RuntimeWarning, match="no place for a SaveEvent"):
            manager.wait_until_finished()
        assert len(manager.wait_until_finished()) == 1
        assert manager.wait_until_finished() == []


def test_a_warning_that_is_an_error_does_not_interrupt_close(tmp_path):
    manager, finished = saved(tmp_path), []
    close = manager._run.runtime.close

    def warn(*, wait: bool) -> None:
        events.warn("the executor is late")
        close(wait=wait)
        finished.append(True)

    with mock.patch.object(manager._run.runtime, "close", warn), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="the executor is late"):
            manager.close()
    assert finished
    opened(tmp_path).close()


def test_close_raises_a_failed_save_although_a_part_on_another_thread_warns(tmp_path):
    manager = saved(tmp_path)
    with paused_saves(tmp_path, errno.EIO) as held:
        manager.save(2, STATE, touched=MARKS)
        held.release()
        warn = mock.Mock(side_effect=lambda **_: events.warn("the executor is late"))
        with mock.patch.object(manager._run.runtime, "close", warn), warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(errors.SaveFailed, match="step 2") as raised:
                manager.close()
    assert "UserWarning: the executor is late" in raised.value.__notes__
    opened(tmp_path).close()


def test_a_manager_used_in_the_call_of_another_issues_its_own_warnings(tmp_path):
    received = []

    class Copying:
        """An event handler that uses another manager."""

        def receive(self, event: events.Event) -> None:
            with pytest.warns(RuntimeWarning, match="no place for a SaveEvent"):
                model.commit(other, 1, STATE, touched=MARKS)
            received.append(event)

    with contextlib.ExitStack() as managers:
        other, one = (
            managers.enter_context(
                deltackpt.CheckpointManager(
                    tmp_path / type(handler).__name__,
                    handlers=leaver.HANDLERS,
                    event_handlers=(handler,),
                )
            )
            for handler in (Failing(), Copying())
        )
        model.commit(one, 1, STATE, touched=MARKS)
    assert len(received) == 1


def test_a_start_reports_a_warning_that_is_an_error_of_the_manager_before(tmp_path):
    manager = saved(tmp_path)
    warn = mock.Mock(side_effect=lambda **_: events.warn("the executor is late"))
    with mock.patch.object(manager._run.runtime, "close", warn):
        with pytest.raises(UserWarning, match="another manager .*: the executor is late"):
            opened(tmp_path)
    with pytest.raises(errors.FencedError):
        manager.save(2, STATE, touched=MARKS)
    opened(tmp_path).close()


def test_an_error_of_a_garbage_collection_is_reported_once_and_retried(tmp_path):
    with saved(tmp_path) as manager:
        outcomes, real = iter([ZeroDivisionError("unexpected")]), Root._collect

        def collect(root: Root, *arguments: Any) -> None:
            for error in outcomes:
                raise error
            real(root, *arguments)

        with mock.patch.object(Root, "_collect", collect), warnings.catch_warnings():
            warnings.simplefilter("error")
            model.commit(manager, 2, STATE, touched=MARKS, force_base=True)
            root: Any = manager._run.root
            root._collected.exception(LIMIT_SECS)
            manager.save(3, STATE, touched=MARKS, force_base=True)
            with pytest.warns(UserWarning, match="could not be removed: ZeroDivisionError"):
                manager.wait_until_finished()
            model.commit(manager, 4, STATE, touched=MARKS, force_base=True)


def test_an_error_of_the_follow_thread_is_reported_as_its_problem(tmp_path):
    saved(tmp_path).close()
    error, again = ZeroDivisionError("unexpected"), threading.Event()

    def give(*_: Any) -> None:
        again.set()
        raise error

    with mock.patch.object(live_module.Tailer, "load_newest", give):
        with serving.follow(tmp_path, poll_secs=0.01) as live:
            assert again.wait(LIMIT_SECS)
            while live.problem is None:
                assert live._thread is not None and live._thread.is_alive()
    assert "ZeroDivisionError" in str(live.problem)
    assert isinstance(live.problem.__cause__, ZeroDivisionError)


def test_an_error_in_one_request_does_not_stop_a_node_server(caplog):
    def ask(server: NodeServer) -> bytes:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), LIMIT_SECS) as client:
            client.sendall(b"GET /a HTTP/1.1\r\nHost: a-node\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                return client.recv(1 << 10)
        return b""

    blobs = MemoryBlobs(1 << 20)
    server = NodeServer(blobs, bind="127.0.0.1", tokens=Tokens("a-token-of-some-length"))
    with contextlib.closing(blobs), contextlib.closing(server):
        with mock.patch.object(server, "_request", side_effect=ZeroDivisionError("nobody's")):
            assert ask(server) == b""
        assert ask(server).startswith(b"HTTP/1.1 401")
    assert "ZeroDivisionError" in caplog.text


# Bytes and names.


def test_a_copy_to_a_directory_buffers_at_most_a_piece_of_a_file(tmp_path, monkeypatch):
    saved(tmp_path / "root").close()
    asked: list[int] = []
    real = FileStore.read_into

    def read_into(store: FileStore, key: str, start: int, buffers: Any, **how: Any) -> None:
        asked.append(sum(buffer.nbytes for buffer in buffers))
        real(store, key, start, buffers, **how)

    monkeypatch.setattr(copy_locations, "SEGMENT_BYTES", 1000)
    with mock.patch.object(FileStore, "read_into", read_into):
        copy.copy(tmp_path / "root", tmp_path / "copy")
    longest = max(one.stat().st_size for one in (tmp_path / "root" / "1").rglob("*"))
    assert longest > 4000 and asked.count(1000) > longest // 1000
    with opened(tmp_path / "copy") as manager:
        leaver.model.assert_same(manager.restore(1, STATE).state, STATE)


def test_a_small_object_of_a_bucket_is_read_once():
    store = KvStore({"driver": "memory"}, "memory://")
    store.put("a/b", b"some bytes")
    reads: list[dict[str, Any]] = []
    real = KvStore._read
    with mock.patch.object(
        KvStore, "_read", lambda self, key, **how: (reads.append(how), real(self, key, **how))[1]
    ):
        assert StorePath(store, "a/b").read() == b"some bytes"
        assert reads == [{}]
        assert StorePath(store, "a/b").is_file() and not StorePath(store, "a").is_file()
    assert all(reads[1:])  # All later reads are of ranges.


def test_no_code_changes_the_environment_of_its_process():
    change = re.compile(
        r"os\.(putenv|unsetenv)\(|del os\.environ|os\.environ\[[^]]*\] *=[^=]"
        r"|os\.environ\.(setdefault|update|pop|popitem|clear)\("
    )
    files = Path(deltackpt.__file__).parent.rglob("*.py")
    assert not [path.name for path in files if change.search(path.read_text())]


def test_an_endpoint_of_google_must_be_in_the_environment(monkeypatch):
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    expected = "TENSORSTORE_GCS_HTTP_URL=http://a:1 in the environment.*found none; set it"
    with pytest.raises(errors.OptionError, match=expected):
        buckets.locate("gs://bucket/run", endpoint="http://a:1")
    assert "TENSORSTORE_GCS_HTTP_URL" not in os.environ
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://a:1")
    assert buckets.locate("gs://bucket/run", endpoint="http://a:1").url == "gs://bucket/run"


def test_layouts_of_dense_leaves_are_cached_for_concurrent_threads():
    """Plans more structures than are cached, while another thread evicts one."""

    class Crossing(dict[Any, Any]):
        """Lets another thread plan while one looks for the oldest."""

        def __iter__(self) -> Iterator[Any]:
            found = super().__iter__()
            thread = threading.Thread(
                target=dense_layout.plan, args=({"other": np.zeros(3)},), kwargs={"process": 0}
            )
            thread.start()
            thread.join(0.1)
            return found

    cache = IdentityCache(4)
    cache._known = Crossing()
    with mock.patch.object(dense_layout, "_outlines", cache):
        for number in range(8):
            dense_layout.plan({f"leaf{number}": np.zeros(2, np.float32)}, process=0)
