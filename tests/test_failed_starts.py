# SPDX-License-Identifier: Apache-2.0
"""A manager that fails to start takes nothing from the running one and leaves nothing behind."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import leaver
import machine
import model
import pytest
from test_collect_command import ended_pid
from test_tiers import Node, eventually, node, s3, same, staged

import deltackpt
from deltackpt import errors, manager, options
from deltackpt.ledger import lease
from deltackpt.ledger.directory import Root
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.save import exits
from deltackpt.session.lifetime import Lifetime
from deltackpt.testing import failing_saves
from deltackpt.tiers import replicator
from deltackpt.tiers.replication import ReplicationClient
from deltackpt.tiers.staging import StagingDir

__all__ = ["node", "s3"]

PACKAGE = str(Path(deltackpt.__file__).parent)
ANYTHING: Any = object()
#: Required arguments of option classes.
NEEDED: dict[str, dict[str, Any]] = {
    "Extents": {"directory": "x", "nbytes": 1 << 30},
    "Erasure": {"k": 2, "m": 1},
    "KafkaWal": {"topic": "run-17", "config": {}},
}
KINDS = [
    one
    for one in vars(options).values()
    if isinstance(one, type)
    and one.__module__ == options.__name__
    and dataclasses.is_dataclass(one)
]


class Broken(Exception):
    """An error that no code expects."""


def opened(root: Path, **more: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(root, handlers=leaver.HANDLERS, **more)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_of_another_type_is_refused_by_name(kind):
    needed = NEEDED.get(kind.__name__, {})
    for field in dataclasses.fields(kind):
        for value in (ANYTHING, float("nan")):
            with pytest.raises(errors.OptionError, match=f"{field.name}|codec"):
                kind(**{**needed, field.name: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": lambda: deltackpt.ManagerOptions(preservation_policy=ANYTHING)},
        {"options": lambda: deltackpt.ManagerOptions(save_decision_policy=ANYTHING)},
        {"options": lambda: deltackpt.ManagerOptions(background=deltackpt.Background(cpus=[9999]))},
        {
            "options": lambda: deltackpt.ManagerOptions(
                tiers=deltackpt.Tiers(staging_dir="/tmp/never-made")
            )
        },
        {"event_handlers": lambda: (ANYTHING,)},
    ],
    ids=["retention", "decision", "cpus", "tiers", "event_handlers"],
)
def test_invalid_options_do_not_fence_the_running_trainer(tmp_path, arguments):
    state, marks = leaver.states(0)[0]
    with opened(tmp_path) as live:
        model.commit(live, 1, state, touched=marks)
        with pytest.raises(errors.OptionError):
            opened(tmp_path, **{name: make() for name, make in arguments.items()})
        model.commit(live, 2, state, touched=marks)
        assert live.all_steps() == [1, 2]


class Directory:
    """A run in a directory, with the calls of a ``Node``."""

    def __init__(self, root: Path):
        self._root, (self._state, self._marks) = root, leaver.states(0)[0]

    def manager(self, **_: Any) -> deltackpt.CheckpointManager:
        return opened(self._root)

    def save(self, manager: deltackpt.CheckpointManager, step: int) -> deltackpt.Saved:
        return manager.save(step, self._state, touched=self._marks, force_base=True)

    def restore(self, manager: deltackpt.CheckpointManager) -> deltackpt.Restored:
        found = manager.restore_latest(self._state)
        assert found is not None
        model.assert_same(found.state, self._state)
        return found

    def root(self) -> list[int]:
        return sorted(int(path.name) for path in self._root.iterdir() if path.name.isdecimal())


#: A place of saves: a directory, or a bucket to which trainers of one or several stages upload.
PLACES = pytest.mark.parametrize("place", ["directory", "same stage", "another stage"])


@pytest.fixture
def trainers(request, tmp_path, place) -> Callable[[], Any]:
    """Returns trainers of one place, each with its own stage if the place says so."""
    root = tmp_path / "root"
    if place == "directory":
        return lambda: Directory(root)
    first = request.getfixturevalue("node")()
    numbers = itertools.count()

    def trainer() -> Node:
        stage = tmp_path / f"stage{next(numbers)}" if place == "another stage" else first.stage.path
        return Node(first.url, first.endpoint, stage)

    return trainer


def commit(one: Node | Directory, manager: deltackpt.CheckpointManager, step: int) -> None:
    """Saves a step, and waits until it is committed."""
    one.save(manager, step)
    manager.wait_until_finished()


def in_thread(call: Callable[[], Any], name: str | None = None) -> concurrent.futures.Future[Any]:
    """Starts a call in a thread."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def functions_called(call: Callable[[], Any]) -> list[types.CodeType]:
    """The package's functions that a call enters on this thread, in order, each once."""
    found: dict[types.CodeType, None] = {}

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def call_failing(
    call: Callable[[], Any], code: types.CodeType, error: type[BaseException] = Broken
) -> None:
    """Calls ``call`` with a function that raises when it is first entered."""

    def fail(frame: types.FrameType, event: str, _: object) -> None:
        if frame.f_code is code:
            sys.settrace(None)
            raise error(code.co_qualname)

    before = sys.gettrace()
    sys.settrace(fail)
    try:
        call()
    finally:
        sys.settrace(before)


def held(root: Path) -> collections.Counter[str]:
    """Names in a directory, open files of this process, and its threads."""
    found = collections.Counter(os.listdir(root))
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The listing's own.
            found[os.readlink(f"/proc/self/fd/{one}")] += 1
    return found + collections.Counter(thread.name for thread in threading.enumerate())


def test_a_manager_whose_start_fails_at_any_point_takes_and_leaves_nothing(tmp_path):
    state, marks = leaver.states(0)[0]
    with opened(tmp_path / "other") as old:
        old.wait_until_finished()
        stages = functions_called(lambda: opened(tmp_path / "other").close())
    # Nothing after this can fail: the new manager has started.
    names = [code.co_qualname for code in stages]
    stages = stages[: names.index("Root.confirm")]
    assert len(stages) > 50 and "Root.open" in names and "DirectoryLease._claim" in names
    root, step = tmp_path / "root", 0
    live = opened(root)
    for code in stages:
        before = held(root)
        with pytest.raises(Broken):
            call_failing(lambda: opened(root), code)
        # The trash collection of the live manager may have a descriptor for a moment.
        deadline = time.monotonic() + 60
        while (left := held(root) - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left, code.co_qualname
        step += 1
        model.commit(live, step, state, touched=marks, force_base=step == 1)
        assert live.latest_step() == step, code.co_qualname
    live.close()
    with opened(root) as last:
        found = last.restore_latest(state)
        assert found is not None and found.step == step


def started(call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Starts a call in a thread; returns once it waits for a starting trainer, or has ended."""
    future = in_thread(call)
    concurrent.futures.wait([future], timeout=2)
    return future


def failing_after(during: Callable[[], Any], patch: pytest.MonkeyPatch) -> list[Any]:
    """Makes managers fail after they claimed the directory and ``during`` was called."""
    found: list[Any] = []

    def fail(*_: Any) -> None:
        found.append(started(during))
        raise Broken

    patch.setattr(manager, "Saver", fail)
    return found


@PLACES
def test_a_save_committed_while_another_manager_fails_to_start_is_not_fenced(trainers, monkeypatch):
    first = trainers()
    with first.manager(wait_for="remote") as live:
        commit(first, live, 0)
        with monkeypatch.context() as patch:
            saved = failing_after(lambda: commit(first, live, 1), patch)
            with pytest.raises(Broken):
                trainers().manager()
        saved[0].result(60)
        commit(first, live, 2)
        assert first.root() == [0, 1, 2]


def test_a_lease_holder_waits_until_a_newer_trainer_has_started_or_failed(tmp_path):
    live = Root.open(tmp_path)
    for _ in range(2):  # An earlier failure does not shorten the wait.
        second = Root.open(tmp_path, confirmed=False)
        checked = started(live.check_lease)
        assert not checked.done()
        second.abandon()
        checked.result(60)
    second = Root.open(tmp_path, confirmed=False)
    checked = started(live.check_lease)
    assert not checked.done()
    second.confirm()
    with pytest.raises(errors.FencedError, match="epoch 2"):
        checked.result(60)
    second.check_lease()
    live.close()
    second.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_trainers_that_fail_concurrently_return_the_lease_at_once(tmp_path, order):
    live = Root.open(tmp_path)
    others = [Root.open(tmp_path, confirmed=False) for _ in range(2)]
    checked = started(live.check_lease)
    for number in order:
        assert started(others[number].abandon).result(lease.GRACE_SECS / 2) is None
    checked.result(60)
    assert [*lease.epochs(tmp_path)] == [1]
    live.close()


def test_a_trainer_killed_while_it_started_fences_at_once(tmp_path, monkeypatch):
    live, pid = Root.open(tmp_path), ended_pid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        Root.open(tmp_path, confirmed=False)
    with pytest.raises(errors.FencedError, match="epoch 2"):
        started(live.check_lease).result(lease.GRACE_SECS / 2)
    live.close()


def test_a_start_that_takes_too_long_fences(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    live = Root.open(tmp_path)
    Root.open(tmp_path, confirmed=False)
    for _ in range(2):
        with pytest.raises(errors.FencedError, match="epoch 2"):
            live.check_lease()
    live.close()


@pytest.mark.parametrize("is_same", [True, False], ids=["same stage", "another stage"])
def test_a_manager_of_a_bucket_that_fails_late_takes_nothing(node, tmp_path, is_same):
    """A failure after the claim returns the claim and the staging directory's orders and lease."""
    first = node()
    with first.manager(wait_for="remote") as live:
        other = first if is_same else Node(first.url, first.endpoint, tmp_path / "other")
        spare = Node(f"{first.url}-spare", first.endpoint, tmp_path / "spare")
        # Starts like the other one, to record which functions its start calls.
        twin = spare if is_same else Node(spare.url, spare.endpoint, tmp_path / "twin")
        with contextlib.suppress(errors.FencedError), spare.manager():
            stages = functions_called(lambda: twin.manager().close())
        names = [code.co_qualname for code in stages]
        late = stages[names.index("Journal.claim") : names.index("ReplicationClient.confirm")]
        late = [code for code in late if "withdraw" not in code.co_qualname]
        chosen = [*late[:: len(late) // 6], late[-1]]
        assert len(late) > 30 and any("recover" in code.co_qualname for code in late)
        for step, code in enumerate(chosen):
            with pytest.raises(Broken):
                call_failing(other.manager, code)
            commit(first, live, step)
            assert first.root() == [*range(step + 1)], code.co_qualname
        assert not [*tmp_path.rglob("*.tmp")]
    with other.manager() as manager:
        assert other.restore(manager).step == len(chosen) - 1
        assert same(other.held(), first.held())


@PLACES
def test_a_start_that_is_interrupted_at_its_end_returns_the_claim_or_keeps_it(
    trainers, place, tmp_path
):
    """The former trainer continues or is fenced; it does not wait for one that never starts."""
    one = trainers()
    if place == "directory":
        spare = Directory(tmp_path / "spare")
        first, end = "Root.confirm", "CheckpointManager.close"
    else:
        spare = Node(f"{one.url}-spare", one.endpoint, tmp_path / "spare")
        first, end = "ReplicationClient.confirm", "close_others"
    with contextlib.suppress(errors.FencedError), spare.manager():
        stages = functions_called(lambda: spare.manager().close())
    names = [code.co_qualname for code in stages]
    last = stages[names.index(first) : names.index(end) + (end == "close_others")]
    assert len(last) > (5 if place == "directory" else 10)
    if place != "directory":
        some = [one for one in last if one.co_name == "order"]
        last = [*last[:: len(last) // 5], *some, last[-1]]
    step = -1
    for code in last:
        live = one.manager()
        step += 1
        commit(one, live, step)
        other, made = trainers(), list[deltackpt.CheckpointManager]()
        with contextlib.suppress(KeyboardInterrupt):
            call_failing(
                lambda other=other, made=made: made.append(other.manager()), code, KeyboardInterrupt
            )
        for each in made:  # Only a start in the same staging directory does that.
            each.close()
        with contextlib.suppress(errors.FencedError):
            started(lambda live=live, step=step: one.save(live, step + 1)).result(40)
            started(live.wait_until_finished).result(40)
        with contextlib.suppress(errors.FencedError):
            live.close()
        with one.manager() as following:
            found = one.restore(following).step
        assert found in (step, step + 1) and one.root() == [*range(found + 1)], code.co_qualname
        step = found
    assert place == "directory" or not [*one.stage.aside("").iterdir()]


def test_nothing_closes_a_start_again_that_was_interrupted_last(tmp_path, monkeypatch):
    create, made = Lifetime.__init__, []

    def interrupt(held: Lifetime, *arguments: Any) -> None:
        create(held, *arguments)
        made.append(held)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lifetime, "__init__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path)
    monkeypatch.setattr(made[0]._run, "close", lambda: pytest.fail("it is closed already"))
    opened(tmp_path).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made[0].__del__()


def test_a_start_that_the_bucket_does_not_confirm_is_recorded_by_the_uploader(
    node, tmp_path, monkeypatch
):
    """Otherwise the former trainer would wait for it until its grace period ends."""
    one = node()
    live = one.manager()
    commit(one, live, 0)
    other = Node(one.url, one.endpoint, tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(
            Journal, "start", lambda _: (_ for _ in ()).throw(errors.StorageError("silent"))
        )
        with pytest.warns(UserWarning, match="the uploader will change: silent"):
            second = other.manager()
    saved = started(lambda: (one.save(live, 1), live.wait_until_finished()))
    with pytest.raises(errors.FencedError):
        saved.result(lease.GRACE_SECS / 2)
    claim = JournalView(staged(second).journal.root).state().claim
    assert claim is not None and not claim.lease.pending and not claim.began
    with contextlib.suppress(errors.FencedError):
        live.close()
    second.close()


def test_the_first_manager_of_a_stage_outlives_one_that_cannot_use_its_extents(node, tmp_path):
    one = node()
    given = deltackpt.tiers.Extents(
        directory=str(tmp_path / "x"), nbytes=40 << 16, extent_bytes=1 << 16
    )
    with one.manager(extents=given, wait_for="remote") as live:
        with pytest.raises(errors.OptionError, match="set nbytes="):
            one.manager(extents=dataclasses.replace(given, nbytes=80 << 16))
        commit(one, live, 0)
        second = one.manager(extents=given)
        with pytest.raises(errors.FencedError, match="another manager of this process"):
            live.latest_step()
        second.close()


def test_a_full_disk_removes_no_save_in_flight_before_the_trainer_has_started(
    tmp_path, monkeypatch
):
    """Leftovers are removed to make room for the lease; one may be the former trainer's save."""
    flight = tmp_path / "3.orbax-checkpoint-tmp-run-1"
    live = Root.open(tmp_path)
    flight.mkdir()
    sign = lease.DirectoryLease.sign

    def full(own: lease.DirectoryLease) -> None:
        if flight.exists():
            raise errors.OutOfSpace("full")
        sign(own)

    monkeypatch.setattr(lease.DirectoryLease, "sign", full)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "Saver", lambda *_: (_ for _ in ()).throw(Broken()))
        with pytest.raises(Broken):
            opened(tmp_path)
    assert flight.is_dir()
    live.check_lease()
    with opened(tmp_path) as second:
        assert not flight.exists()
        lent = second._run.local.newest_lease()
        assert lent is not None and lent.pid == os.getpid()


class Starts:
    """Starts managers in threads; a test decides when each start ends."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._saver = manager.Saver
        self._events: dict[str, tuple[threading.Event, threading.Event]] = {}
        self._fails: set[str] = set()
        self._found: dict[str, concurrent.futures.Future[deltackpt.CheckpointManager]] = {}
        patch.setattr(manager, "Saver", self._gated)

    def _gated(self, *arguments: Any) -> Any:
        name = threading.current_thread().name
        if name in self._events:
            came, may_go = self._events[name]
            came.set()
            assert may_go.wait(60)
            if name in self._fails:
                raise Broken(name)
        return self._saver(*arguments)

    def begin(self, name: str, start: Callable[[], deltackpt.CheckpointManager]) -> None:
        """Starts a manager that claims everything and then waits."""
        self._events[name] = threading.Event(), threading.Event()
        future = self._found[name] = in_thread(start, name)
        assert self._events[name][0].wait(60), future.exception(0)

    def end(self, name: str, *, fails: bool) -> deltackpt.CheckpointManager | None:
        """Lets a start fail or succeed."""
        if fails:
            self._fails.add(name)
        self._events[name][1].set()
        if not fails:
            return self._found[name].result(60)
        with pytest.raises(Broken):
            self._found[name].result(60)
        self._fails.remove(name)
        return None


@pytest.mark.parametrize("is_same", [True, False], ids=["same stage", "other stages"])
def test_starts_that_fail_in_any_order_leave_the_running_trainer_its_orders(
    node, tmp_path, monkeypatch, is_same
):
    first = node()
    live = first.manager(wait_for="staging")
    first.save(live, 0)
    starts, step = Starts(monkeypatch), 0
    for order in ("A", "AB", "BA", "ABC", "CBA", "BCA", "BAC"):
        for name in sorted(order):
            stage = first.stage.path if is_same else tmp_path / f"{order}-{name}"
            starts.begin(name, Node(first.url, first.endpoint, stage).manager)
        for name in order:
            starts.end(name, fails=True)
        step += 1
        commit(first, live, step)
        expected = [*range(step + 1)]
        eventually(lambda expected=expected: first.root() == expected, f"{order}: {step}")
    live.close()
    with first.manager() as following:
        assert first.restore(following).step == step
    assert not [*first.stage.aside("").iterdir()]


def begin_two(
    one: Node, monkeypatch: pytest.MonkeyPatch, *, wait_for: str
) -> tuple[deltackpt.CheckpointManager, Starts]:
    """Saves step 0 and begins two starts; the caller must keep the trainer referenced."""
    live = one.manager(wait_for=wait_for)
    commit(one, live, 0)
    starts = Starts(monkeypatch)
    for name in "AB":
        starts.begin(name, one.manager)
    return live, starts


@pytest.fixture
def two_starts(node, monkeypatch) -> Iterator[tuple[Node, Starts]]:
    """A run with step 0 and a live trainer, and two starts that have claimed everything."""
    one = node()
    _live, starts = begin_two(one, monkeypatch, wait_for="staging")
    yield one, starts


@pytest.mark.parametrize("order", ["AB", "BA"], ids=["the first starts", "the last starts"])
def test_a_start_during_one_that_fails_takes_over_with_its_own_orders(two_starts, order):
    one, starts = two_starts
    starts.end(order[1], fails=True)
    newer = starts.end(order[0], fails=False)
    assert newer is not None
    with newer:
        one.restore(newer)
        commit(one, newer, 1)
        assert one.root() == [0, 1]


def test_a_start_that_a_newer_one_overtakes_is_fenced_and_keeps_the_newer_orders(two_starts):
    one, starts = two_starts
    newer = starts.end("B", fails=False)
    assert newer is not None
    with newer:
        one.restore(newer)
        commit(one, newer, 1)
        with pytest.raises(errors.FencedError):
            starts.end("A", fails=False)
        commit(one, newer, 2)
        assert one.root() == [0, 1, 2]
    with one.manager() as following:
        assert one.restore(following).step == 2


@contextlib.contextmanager
def profiled(note: Callable[[types.CodeType], None]) -> Iterator[None]:
    """Calls ``note`` for each of the package's functions that this or the closing thread enters."""
    this = threading.current_thread()

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            thread = threading.current_thread()
            if thread is this or thread.name.startswith("deltackpt-close"):
                note(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def close_by(who: str, old: deltackpt.CheckpointManager, root: Path) -> None:
    """Closes a manager, or starts another one that closes it."""
    if who == "its owner":
        old.close()
    else:
        opened(root).close()


@pytest.fixture
def sigterms() -> Iterator[list[int]]:
    """The SIGTERM signals that reach the handler of the program."""
    found: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt even if a shell started the suite in the background."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("who", ["its owner", "a new start"])
def test_a_manager_whose_close_is_interrupted_is_usable_or_closed(tmp_path, sigterms, ctrl_c, who):
    """If it is closed, its threads have ended and its files are closed; the next start works."""
    state, marks = leaver.states(0)[0]
    stages: dict[types.CodeType, None] = {}
    old = opened(tmp_path / "other")
    model.commit(old, 1, state, touched=marks)
    with profiled(stages.setdefault):
        close_by(who, old, tmp_path / "other")
    names = [code.co_qualname for code in stages]
    first, last = names.index("Lifetime._close"), names.index("Root.close")
    # The functions of the close itself, and a few after it.
    chosen = [*stages][first : last + 8]
    interrupted = []
    for number, code in enumerate(chosen):
        root = tmp_path / str(number)
        root.mkdir()
        before = held(root)
        old = opened(root)
        model.commit(old, 1, state, touched=marks)
        assert not old.reached_preemption(1)
        interrupts = [code]

        def interrupt(entered: types.CodeType, interrupts: list[types.CodeType] = interrupts):
            if [entered] == interrupts:
                interrupts.clear()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        try:
            with profiled(interrupt):
                close_by(who, old, root)
                # Some functions run only once: for a cache, or at a garbage collection.
                if not interrupts:
                    eventually(lambda: False, "the interrupt")
        except KeyboardInterrupt:
            interrupted.append(code.co_qualname)
        is_closed = False
        try:
            old.all_steps()
        except (errors.ClosedError, errors.FencedError):
            is_closed = True
        signal.raise_signal(signal.SIGTERM)
        assert old._lifetime.termination.announced(2) == (not is_closed), code.co_qualname
        assert len(sigterms) == number + 1
        with opened(root) as following:
            assert following.all_steps() == [1], code.co_qualname
            following.save(2, state, force_base=True)
        if not is_closed:
            with contextlib.suppress(errors.FencedError):
                old.close()

        def leaks(root: Path = root, before: collections.Counter[str] = before):
            return [one for one in held(root) - before if one not in os.listdir(root)]

        eventually(lambda leaks=leaks: not leaks(), f"{code.co_qualname}: {leaks()}")
    assert len(interrupted) > 10, interrupted


def test_a_second_interrupt_ends_the_wait_for_a_call_that_cannot_be_interrupted():
    came, may_end, interrupted = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        came.set()
        may_end.wait(10)
        may_end.set()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def send() -> None:
        for awaited in (came, interrupted):
            assert awaited.wait(10)
            time.sleep(0.5)  # Until the main thread waits again.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    former = signal.signal(signal.SIGINT, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            exits.uninterrupted(call)
        assert not may_end.is_set()
    finally:
        signal.signal(signal.SIGINT, former)
        may_end.set()
        sender.join()


def test_the_owner_of_a_manager_whose_close_is_interrupted_gets_its_failure_once(
    tmp_path, monkeypatch
):
    state, marks = leaver.states(0)[0]
    old = opened(tmp_path)
    with failing_saves(tmp_path):
        old.save(1, state, touched=marks)
        with pytest.raises(errors.SaveFailed):
            old._lifetime.end("settle")

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exits, "uninterrupted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            old._lifetime.end("close")
    with pytest.raises(errors.SaveFailed):
        old.wait_until_finished()
    old.close()
    old.close()


def test_a_start_that_loses_its_staged_saves_releases_everything(node, tmp_path, monkeypatch):
    one, finish = node(), ReplicationClient._finish_start
    extents = deltackpt.tiers.Extents(
        directory=str(tmp_path / "x"), nbytes=40 << 16, extent_bytes=1 << 16
    )

    def lose(held: ReplicationClient) -> None:
        monkeypatch.setattr(ReplicationClient, "_finish_start", finish)
        shutil.rmtree(one.stage.steps)
        raise KeyboardInterrupt

    live = one.manager()
    monkeypatch.setattr(ReplicationClient, "_finish_start", lose)
    with pytest.raises(KeyboardInterrupt):
        one.manager(extents=extents)
    assert not machine.open_files(tmp_path / "x")
    with pytest.raises(errors.StorageError, match="moved or removed"):
        live.check_lease()
    with contextlib.suppress(errors.StorageError):
        live.close()
    with one.manager(extents=extents) as following:
        commit(one, following, 0)
    assert one.root() == [0]


@contextlib.contextmanager
def paused(start: Callable[[], Any], where: str) -> Iterator[concurrent.futures.Future[Any]]:
    """A start in another thread that pauses as it enters a function, until the context ends."""
    came, may_go = threading.Event(), threading.Event()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_qualname == where and code.co_filename.startswith(PACKAGE):
            sys.setprofile(None)
            came.set()
            assert may_go.wait(60)

    def call() -> Any:
        sys.setprofile(note)
        try:
            return start()
        finally:
            sys.setprofile(None)

    future = in_thread(call)
    assert came.wait(60), future
    try:
        yield future
    finally:
        may_go.set()


def require_fenced(start: concurrent.futures.Future[Any], save: Callable[[Any], Any]) -> None:
    """Checks that a start, or the first save of its manager, is fenced."""
    with pytest.raises(errors.FencedError):
        manager = start.result(60)
        try:
            save(manager)
            manager.wait_until_finished()
        finally:
            with contextlib.suppress(errors.FencedError):
                manager.close()


@pytest.mark.parametrize(
    ("place", "where"),
    [
        *(
            ("directory", where)
            for where in (
                *("Saver.__init__", "Root.confirm", "DirectoryLease.start", "close_others"),
                "Watch.__init__",
            )
        ),
        *(
            ("same stage", where)
            for where in (
                *("Journal.claim", "_Startup.run", "LocalReplicas.recover", "Saver.__init__"),
                *("ReplicationClient.confirm", "StagingDir.order", "Journal.start"),
                *("ReplicationClient._finish_start", "close_others", "Watch.__init__"),
            )
        ),
    ],
)
def test_a_start_that_pauses_anywhere_leaves_the_saves_to_the_one_that_overtook_it(trainers, where):
    """In particular if both claim the staging directory and the bucket in opposite orders."""
    one, older = trainers(), trainers()
    with one.manager() as first:
        commit(one, first, 0)
    with contextlib.ExitStack() as stack:
        with paused(older.manager, where) as start:
            newer = stack.enter_context(one.manager())
            one.restore(newer)
            commit(one, newer, 1)
        concurrent.futures.wait([start], 60)
        commit(one, newer, 2)
        require_fenced(start, lambda manager: older.save(manager, 9))
        commit(one, newer, 3)
    assert one.root() == [0, 1, 2, 3]


@pytest.mark.parametrize("stalled", ["at its first save", "as it starts"])
def test_orders_that_a_stalled_trainer_writes_late_do_not_replace_those_of_a_newer_one(
    node, monkeypatch, stalled
):
    """It may pause between its check of the lease and the write, for longer than a start takes."""
    one, write, late = node(), StagingDir.order, list[Any]()

    def stall() -> None:
        monkeypatch.setattr(StagingDir, "order", lambda _, orders: late.append(orders))

    with contextlib.suppress(errors.FencedError), contextlib.ExitStack() as stack:
        if stalled == "as it starts":
            stall()
        live = stack.enter_context(one.manager(wait_for="staging"))
        stall()
        commit(one, live, 0)
        monkeypatch.setattr(StagingDir, "order", write)
        with one.manager() as newer:
            one.restore(newer)
            commit(one, newer, 1)
            for orders in late:
                one.stage.order(orders)
            found = one.stage.orders()
            assert late and found is not None and found.holder not in {old.holder for old in late}
            commit(one, newer, 2)
            assert one.root() == [0, 1, 2]
        with pytest.raises(errors.FencedError):
            one.save(live, 3)
    with one.manager() as following:
        assert one.restore(following).step == 2
    assert len([*one.stage.path.glob("orders.*")]) == 1


def test_overlapping_starts_of_one_process_do_not_wait_for_each_other(node, monkeypatch):
    """Even if the former manager waits for the bucket, which accepts no save during a start."""
    one = node()
    monkeypatch.setattr(lease.Grace, "wait", lambda *_: pytest.fail("a start waits"))
    _live, starts = begin_two(one, monkeypatch, wait_for="remote")
    with pytest.raises(errors.FencedError):
        starts.end("A", fails=False)
    newer = starts.end("B", fails=False)
    assert newer is not None
    with newer:
        assert one.restore(newer).step == 0
        commit(one, newer, 1)
    assert one.root() == [0, 1]


def test_overlapping_starts_in_a_directory_do_not_wait_for_each_other(tmp_path, monkeypatch):
    state, marks = leaver.states(0)[0]
    monkeypatch.setattr(lease.Grace, "wait", lambda *_: pytest.fail("a start waits"))
    live = opened(tmp_path)
    model.commit(live, 1, state, touched=marks)
    starts = Starts(monkeypatch)
    for name in "AB":
        starts.begin(name, lambda: opened(tmp_path))
    older, newer = (starts.end(name, fails=False) for name in "AB")
    assert older is not None and newer is not None
    with newer:
        model.commit(newer, 2, state, touched=marks, force_base=True)
        for fenced in (live, older):
            with pytest.raises(errors.FencedError):
                fenced.save(3, state, touched=marks)
        assert newer.all_steps() == [1, 2]


def test_a_start_records_that_it_started_without_waiting_for_a_newer_one(node, monkeypatch):
    one = node()
    first = one.manager()
    claims = [Journal(staged(first).journal.root) for _ in range(2)]
    for claim in claims:
        claim.claim(pending=True)
    with monkeypatch.context() as patch:
        patch.setattr(lease.Grace, "wait", lambda *_: pytest.fail("it waits"))
        claims[0].start()
    claims[1].withdraw()
    newest = claims[0].check().claim
    assert newest is not None and newest == claims[0].claimed and not newest.lease.pending
    claims[1].claim(pending=True)
    claims[1].start()
    with pytest.raises(errors.FencedError):
        claims[0].start()
    with contextlib.suppress(errors.FencedError):
        first.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from test_tiers import Node
from deltackpt import manager

manager.Saver = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Node(sys.argv[1], sys.argv[2], Path(sys.argv[3])).manager()
"""


@pytest.mark.parametrize("others", ["", "B", "BC"])
def test_a_trainer_killed_while_it_starts_leaves_the_staged_saves_to_the_next_one(
    node, monkeypatch, others
):
    """The former trainer is fenced, and the next one uploads what it staged."""
    one = node()
    with monkeypatch.context() as patch:
        patch.setattr(replicator.ReplicatorProcess, "start", lambda _: None)  # Nothing is uploaded.
        live = one.manager(wait_for="staging")
        for step in range(3):
            one.save(live, step)
        live.wait_until_finished()
        starts = Starts(patch)
        for name in others[:1]:
            starts.begin(name, one.manager)
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, one.url, one.endpoint, str(one.stage.path)],
            cwd=Path(__file__).parent,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        for name in others[1:]:
            starts.begin(name, one.manager)
        for name in others:
            starts.end(name, fails=True)
        with pytest.raises(errors.FencedError):
            started(lambda: one.save(live, 3)).result(60)
            live.wait_until_finished()
        with contextlib.suppress(errors.FencedError):
            live.close()
    with one.manager() as following:
        assert one.restore(following).step == 2
        commit(one, following, 3)
    assert one.root() == [0, 1, 2, 3]
    assert not [*one.stage.aside("").iterdir()]
