# SPDX-License-Identifier: Apache-2.0
"""If retention is interrupted at any moment, the remaining steps restore."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import model
import numpy as np
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt.errors import FencedError
from deltackpt.format import naming
from deltackpt.ledger.directory import Root
from deltackpt.reading import chains, reader

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
#: Audit events that change or remove names.
_CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
_watchers: list[Callable[[str, tuple[object, ...]], None]] = []


def _hook(event: str, args: tuple[object, ...], changes: tuple[str, ...] = _CHANGES) -> None:
    # At exit the module's names are None before the last audit events.
    for watcher in tuple(_watchers or ()) if event in changes else ():
        watcher(event, args)


sys.addaudithook(_hook)  # For the life of the process: it cannot be removed.


@contextlib.contextmanager
def watching(watcher: Callable[[str, tuple[object, ...]], None]) -> Iterator[None]:
    """Calls it before each change of a name."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def options(**more) -> deltackpt.ManagerOptions:
    return manager_options(
        max_to_keep=1,
        policy=deltackpt.policies.Consecutive(max_chain=3),
        durability="process",
        **more,
    )


def users(state: dict) -> bytes:
    return np.asarray(state["tables"]["users"]).tobytes()


def check_listed_steps_restore(root: Path, expected: dict[int, bytes]) -> list[int]:
    """Asserts that every listed step restores what was saved; returns the steps."""
    steps = sorted(Root.open(root, read_only=True).steps())
    for step in steps:
        found = reader.restore_tables(chains.read_chain(root / str(step)))
        assert np.asarray(found.fields["tables/users"]["values"]).tobytes() == expected[step], step
    return steps


def test_at_every_call_of_a_retention_every_listed_step_restores(tmp_path):
    state, touched = model.start()
    expected: dict[int, bytes] = {}
    listed: list[list[int]] = []
    problems: list[BaseException] = []

    def check(event: str, args: tuple[object, ...]) -> None:
        # A kill just before this call would leave the current files.
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            try:
                listed.append(check_listed_steps_restore(tmp_path, expected))
            except BaseException as error:
                problems.append(error)

    with contextlib.ExitStack() as stack:
        manager = deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options())
        for step in range(6):
            if step:
                state, touched = model.train(state, touched, step)
            if step == 4:
                stack.enter_context(watching(check))
            expected[step] = users(state)
            model.commit(manager, step, state, touched=touched)
        manager.close()
    assert not problems, problems[0]
    # Base 0 and its deltas were removed one by one after the next base was committed.
    assert [0, 1, 2, 3, 4] in listed and [0, 1, 4] in listed and [4] in listed
    assert sorted(Root.open(tmp_path, read_only=True).steps()) == [4, 5]


_KILLED = """
import os, signal, sys
import test_retention as own, model, deltackpt
from deltackpt.format import naming
root, at = sys.argv[1], int(sys.argv[2])
moved = 0
def kill(event, args):
    global moved
    if event == "os.rename" and str(args[1]).startswith(naming.REMOVED):
        moved += 1
        if moved == at:
            os.kill(os.getpid(), signal.SIGKILL)
own._watchers.append(kill)
state, touched = model.start()
manager = deltackpt.CheckpointManager(root, handlers=own.HANDLERS, options=own.options())
for step in range(6):
    if step:
        state, touched = model.train(state, touched, step)
    model.commit(manager, step, state, touched=touched)
"""


@pytest.mark.processes
@pytest.mark.parametrize("at", [2, 4])
def test_a_kill_during_retention_leaves_only_steps_that_restore(at, tmp_path):
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(at)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    state, touched = model.start()
    expected = {0: users(state)}
    for step in range(1, 5):
        state, touched = model.train(state, touched, step)
        expected[step] = users(state)
    steps = check_listed_steps_restore(tmp_path, expected)
    assert steps == [*range(5 - at), 4]
    # The next trainer resumes and finishes the deletion.
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options()) as manager:
        result = manager.restore_latest(state)
        assert result is not None and result.step == 4
        model.commit(manager, 5, result.state, touched=result.touched)
        assert manager.all_steps() == [4, 5]


def test_a_fenced_trainer_does_not_delete_the_steps_of_its_successor(tmp_path):
    """Its save was committed, but it lost the directory before retention."""
    state, touched = model.start()
    real, taken = Root.remove_steps, []

    def remove_later(root: Root, steps) -> None:
        if len(steps) > 1:
            taken.append(Root.open(tmp_path))
        real(root, steps)

    with mock.patch.object(Root, "remove_steps", remove_later):
        older = deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options())
        for step in range(5):
            model.commit(older, step, state, touched=touched)
        with pytest.raises(FencedError):
            older.save(5, state, touched=touched)
        with pytest.raises(FencedError):
            older.delete(4)
        older.close()
    assert taken and sorted(taken[0].steps()) == list(range(5))
    assert not list(tmp_path.glob(f"{naming.REMOVED}*"))
