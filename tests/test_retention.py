# SPDX-License-Identifier: Apache-2.0
"""If retention is interrupted at any moment, the remaining steps restore."""

from __future__ import annotations

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
from deltackpt.testing import Disk, DiskCall

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


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

    def check(_: DiskCall) -> None:
        # A kill just before this call would leave the current files.
        try:
            listed.append(check_listed_steps_restore(tmp_path, expected))
        except BaseException as error:
            problems.append(error)

    with Disk(tmp_path) as disk:
        manager = deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options())
        for step in range(6):
            if step:
                state, touched = model.train(state, touched, step)
            if step == 4:
                disk.on({"mkdir", "rename", "remove", "rmdir"}, check)
            expected[step] = users(state)
            model.commit(manager, step, state, touched=touched)
        manager.close()
    assert not problems, problems[0]
    # Base 0 and its deltas were removed one by one after the next base was committed.
    assert [0, 1, 2, 3, 4] in listed and [0, 1, 4] in listed and [4] in listed
    assert sorted(Root.open(tmp_path, read_only=True).steps()) == [4, 5]


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
