# SPDX-License-Identifier: Apache-2.0
"""Steps removed during a read: every reader raises StepGone, at every access.

Each operation runs repeatedly, and its n-th access finds the steps removed, as by retention, or
replaced, as by a rollback and new saves. Damage is still reported as Damaged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import model
import numpy as np
import pytest
import tensorstore as ts

import deltackpt
from deltackpt import inspect, interchange
from deltackpt.errors import Damaged, StepGone, StepNotFound
from deltackpt.maintenance import compact, estimate
from deltackpt.maintenance import verify as audit
from deltackpt.reading import chains
from deltackpt.reading import reader as reading_reader
from deltackpt.session import restoring
from deltackpt.standby.follower import Follower
from deltackpt.tiers import copy

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
#: The steps of the older chain and of the newest one.
OLDER, NEWER = (0, 1, 2), (3, 4)
_ACCESSES = ("open", "os.listdir", "os.scandir")


class Accesses:
    """Counts accesses to the files of a chain, and calls a function at one of them."""

    def __init__(self, folders: Sequence[Path], at: int, then: Callable[[], None]):
        self._folders = [str(folder) for folder in folders]
        self._at = at
        self._then = then
        # The callback may access files, too.
        self._lock = threading.RLock()
        self.count = 0

    def saw(self, name: object) -> None:
        """Counts an access; called before it."""
        if not isinstance(name, (str, os.PathLike)):
            return
        path = os.fspath(name)
        if any(path == folder or path.startswith(f"{folder}/") for folder in self._folders):
            with self._lock:
                self.count += 1
                if self.count == self._at:
                    self._then()

    @property
    def came(self) -> bool:
        """Whether the chosen access was reached."""
        return self.count >= self._at


_watching: list[Accesses] = []


def _hook(
    event: str, args: tuple[Any, ...], accesses: Any = _ACCESSES, watching: Any = _watching
) -> None:
    """Uses no globals: the hook outlives them when the interpreter exits."""
    if event in accesses and args:
        for watcher in tuple(watching):
            watcher.saw(args[0])


sys.addaudithook(_hook)  # An audit hook cannot be removed.


@contextlib.contextmanager
def watched(accesses: Accesses) -> Iterator[None]:
    """Counts files that Python opens, lists and stats, and arrays that TensorStore opens."""
    real_stat, real_open = os.stat, ts.open

    def stat(path, *args, **kwargs):
        accesses.saw(path)
        return real_stat(path, *args, **kwargs)

    def open_array(spec, *args, **kwargs):
        inner = spec
        while isinstance(inner, dict) and inner.get("driver") != "file":
            inner = inner.get("kvstore") or inner.get("base")
        accesses.saw(inner["path"] if isinstance(inner, dict) else None)
        return real_open(spec, *args, **kwargs)

    _watching.append(accesses)
    try:
        with mock.patch.object(os, "stat", stat), mock.patch.object(ts, "open", open_array):
            yield
    finally:
        _watching.remove(accesses)


def write(root: Path, seed: int = 0) -> dict[int, Any]:
    """Writes two chains: steps 0 to 2, and 3 to 4."""
    state = model.initial(seed)
    touched = model.new_touched(state)
    states = {}
    options = deltackpt.ManagerOptions(writes=deltackpt.WriteOptions(durability="process"))
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for step in range(5):
            if step:
                state, touched = model.train(state, touched, 10 * seed + step)
            manager.save(step, state, touched=touched, force_base=step == 3)
            manager.wait_until_finished()
            states[step] = state
    return states


class Runs(NamedTuple):
    """A directory, another one with other saves of the same steps, and the states of both."""

    root: Path
    other: Path
    states: dict[int, Any]
    others: dict[int, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    root, other = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("other")
    return Runs(root, other, write(root), write(other, seed=1))


def users(found: Any) -> bytes:
    return np.asarray(found).tobytes()


# Readers of a step. Each returns the bytes of one of its tables, or None.


def restored(root: Path) -> bytes | None:
    found = reading_reader.restore_tables(chains.read_chain(root / "2"))
    return users(found.fields["tables/users"]["values"])


@contextlib.contextmanager
def reading(root: Path) -> Iterator[deltackpt.CheckpointManager]:
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        yield manager


def inspected(root: Path) -> bytes | None:
    step = inspect.open(root)[2]
    for leaf in step.dense.values():
        assert leaf.value is None or np.asarray(leaf.value).shape == leaf.shape
    return users(step["tables/users"])


def described(root: Path) -> None:
    opened = inspect.open(root)
    opened.save_of(2)
    opened.touched(2)
    opened.diff(1, 2)


def history(root: Path) -> bytes | None:
    found = inspect.open(root).history("tables/users", [1, 2], steps=[2])
    return None if found.values.size else b"nothing was read"


def planned(root: Path) -> None:
    estimate.restore_plan(root, 2)


def verified(root: Path) -> None:
    assert audit.verify_root(root, steps=[2]).intact


def compacted(root: Path) -> None:
    try:
        compact.compact(root, step=2, workers=1)
    finally:
        shutil.rmtree(root / "compacted", ignore_errors=True)


def copied(root: Path) -> None:
    target = root.with_name(f"{root.name}-copy")
    try:
        copy.copy(root, target, steps=[2])
    finally:
        shutil.rmtree(target, ignore_errors=True)


def exported(root: Path) -> None:
    target = root.with_name(f"{root.name}-export")
    try:
        interchange.export_safetensors(root, 2, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


OPERATIONS: dict[str, Callable[[Path], bytes | None]] = {
    "read_chain": restored,
    "inspect": inspected,
    "describe": described,
    "history": history,
    "plan": planned,
    "verify": verified,
    "compact": compacted,
    "copy": copied,
    "export": exported,
}


@contextlib.contextmanager
def going(runs: Runs, chain: Sequence[int], at: int, how: str) -> Iterator[Accesses]:
    """Removes or replaces a chain at its n-th access, newest step first; restores it on exit."""
    root, other = runs.root, runs.other
    aside = root.with_name(f"{root.name}-aside")
    aside.mkdir()

    def go() -> None:
        for step in reversed(chain):
            (root / str(step)).rename(aside / str(step))
        for step in chain if how == "replaced" else ():
            (other / str(step)).rename(root / str(step))

    accesses = Accesses([root / str(step) for step in chain], at, go)
    try:
        with watched(accesses), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield accesses
    finally:
        for step in chain if accesses.came else ():
            if how == "replaced":
                (root / str(step)).rename(other / str(step))
            (aside / str(step)).rename(root / str(step))
        aside.rmdir()


HOW = pytest.mark.parametrize("how", ["removed", "replaced"])


def check(runs: Runs, how: str, call: Callable[[Path], bytes | None], stride: int = 1) -> None:
    """Asserts that, at every access, a reader of step 2 gets an error or reads one whole save."""
    whole = [users(states[2]["tables"]["users"]) for states in (runs.states, runs.others)]
    whole = whole if how == "replaced" else whole[:1]
    at, told = 1, 0
    while True:
        with going(runs, OLDER, at, how) as accesses:
            try:
                found = call(runs.root)
            except (StepGone, StepNotFound) as error:
                told += isinstance(error, StepGone)
            except Exception as error:
                raise AssertionError(f"at access {at}: {type(error).__name__}: {error}") from error
            else:
                assert found is None or found in whole, at
        if not accesses.came:
            break
        at += stride
    assert told > 0


@HOW
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_step_removed_at_any_access_is_gone_and_not_damaged(operation, how, runs):
    check(runs, how, OPERATIONS[operation], stride=3)


@HOW
@pytest.mark.parametrize("chosen", [None, {"tables/users": None}])
def test_a_step_removed_at_any_access_of_a_restore_is_gone(chosen, how, runs):
    def restore(manager: deltackpt.CheckpointManager) -> bytes:
        if chosen is None:
            found = manager.restore(2, model.initial()).state
            # Tables and dense leaves are of one save: each step of both runs has its own key.
            states = [states[2] for states in (runs.states, runs.others)]
            assert any(same(found, state) for state in states)
            return users(found["tables"]["users"])
        return users(manager.read(2, chosen).tables["tables/users"]["values"])

    with reading(runs.root) as manager:
        check(runs, how, lambda root: restore(manager))


@HOW
def test_if_the_newest_step_is_removed_at_any_access_another_is_restored(how, runs):
    newest = [runs.states[4], (runs.others if how == "replaced" else runs.states)[4]]
    if how == "removed":
        newest.append(runs.states[2])
    at = 1
    while True:
        with reading(runs.root) as manager, going(runs, NEWER, at, how) as accesses:
            result = manager.restore_latest(model.initial())
            assert result is not None and result.skipped == (), at
            assert any(same(result.state, state) for state in newest), at
        if not accesses.came:
            break
        at += 5


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal bit for bit."""
    try:
        model.assert_same(found, expected)
    except AssertionError:
        return False
    return True


@HOW
def test_a_follower_switches_steps_if_its_step_is_removed_at_any_access(how, runs):
    """A follower raises no error: it continues with the newest step that exists."""
    at = 1
    while True:
        follower = Follower(runs.root, item="embeddings")
        with going(runs, NEWER, at, how) as accesses:
            follower.advance()
            assert "expected it to stay" in follower.health or follower.health == "follows", at
            assert follower.loaded is not None, at
            # Nothing is removed from here on.
            follower.advance()
            assert follower.loaded.save.save_id.step == follower.newest_step(), at
        if not accesses.came:
            break
        at += 3


# Damage in a step that exists is reported as Damaged.


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"verify"}))
@pytest.mark.parametrize("step", [1, 2])
def test_damage_in_a_step_that_exists_is_damage(step, operation, runs, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(runs.root, root)
    (layer,) = (root / str(step) / "embeddings").glob("layer.0")
    layer.write_bytes(b"other bytes")
    with pytest.raises(Damaged):
        OPERATIONS[operation](root)


def test_restore_latest_reports_no_damage_however_often_the_newest_step_is_removed(
    runs, monkeypatch
):
    monkeypatch.setattr(restoring, "_LISTINGS", 0)
    at = 1
    while True:
        with reading(runs.root) as manager, going(runs, NEWER, at, "removed") as accesses:
            result = manager.restore_latest(model.initial())
            assert result is not None and result.skipped == (), at
        if not accesses.came:
            break
        at += 25
    assert at > 50
