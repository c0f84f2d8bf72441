# SPDX-License-Identifier: Apache-2.0
"""Inspection reports which steps the retention policy keeps and which only a chain needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import command
import model
import orbax.checkpoint as ocp
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import inspect
from deltackpt.errors import StorageError
from deltackpt.format import naming
from deltackpt.ledger import directory
from deltackpt.storage.store import store_path

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


def save_steps(root: Path, steps: range, **options: Any) -> None:
    """Saves one chain: a base, then deltas; each with a loss that falls until step 3."""
    given = {
        "durability": "process",
        "policy": deltackpt.policies.Consecutive(max_chain=50),
        **options,
    }
    state, touched = model.start()
    with deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=manager_options(**given)
    ) as manager:
        for step in steps:
            state, touched = model.train(state, touched, step)
            model.commit(manager, step, state, touched=touched, metrics={"loss": abs(step - 3.0)})


def test_steps_that_the_policy_keeps_are_distinguished_from_those_of_a_chain(tmp_path):
    save_steps(tmp_path, range(5), max_to_keep=2)
    found = inspect.open(tmp_path).stays_for
    assert found == {0: "chain", 1: "chain", 2: "chain", 3: "policy", 4: "policy"}
    assert directory.read_kept(store_path(tmp_path)) == directory.Kept(
        policy="LatestN", newest=4, steps=(3, 4)
    )


def test_a_policy_with_a_function_is_reported_too(tmp_path):
    best = ocp.checkpoint_managers.BestN(get_metric_fn=lambda m: m["loss"], reverse=True, n=1)
    save_steps(tmp_path, range(6), preservation_policy=best)
    found = inspect.open(tmp_path).stays_for
    # The next save builds on step 5.
    assert found[3] == "policy"
    assert {step for step, reason in found.items() if reason == "chain"} == {0, 1, 2, 4, 5}


def test_a_step_that_a_compacted_base_replaces_is_no_longer_needed(tmp_path):
    save_steps(tmp_path, range(5), max_to_keep=1)
    assert command.run("compact", tmp_path, 3).returncode == 0
    assert inspect.open(tmp_path).stays_for == {**dict.fromkeys(range(4), "nothing"), 4: "policy"}


def test_ls_prints_the_reasons(tmp_path):
    save_steps(tmp_path, range(3), max_to_keep=1)
    told = json.loads(command.run("ls", tmp_path, "--json").stdout)
    assert [one["kept_because"] for one in told] == ["chain", "chain", "policy"]
    table = command.run("ls", tmp_path, "--last", 1).stdout
    assert "kept because" in table and "policy" in table and "chain " not in table


def test_without_a_policy_nothing_is_reported(tmp_path):
    save_steps(tmp_path, range(2), max_to_keep=1)
    save_steps(tmp_path, range(2, 4))
    assert not (tmp_path / naming.KEPT).exists()
    assert inspect.open(tmp_path).stays_for == {}
    told = command.run("ls", tmp_path)
    assert told.returncode == 0 and "kept because" not in told.stdout


@pytest.mark.parametrize("data", [b"", b"half of it"])
def test_an_unreadable_note_is_ignored(tmp_path, data):
    save_steps(tmp_path, range(2), max_to_keep=1)
    (tmp_path / naming.KEPT).write_bytes(data)
    assert inspect.open(tmp_path).stays_for == {}
    assert command.run("ls", tmp_path).returncode == 0


def test_steps_newer_than_the_note_and_unreadable_chains_are_not_reported(tmp_path):
    save_steps(tmp_path, range(4), max_to_keep=1)
    directory.write_kept(tmp_path, directory.Kept(policy="LatestN", newest=2, steps=(2,)))
    assert inspect.open(tmp_path).stays_for == {0: "chain", 1: "chain", 2: "policy"}
    (tmp_path / "1" / "embeddings" / naming.manifest_name(0)).write_bytes(b"")
    assert inspect.open(tmp_path).stays_for == {2: "policy"}


def test_retention_precedes_its_note_and_a_lost_note_fails_no_save(tmp_path):
    def refuse(*_: Any) -> None:
        raise StorageError("the disk is full")

    options = {"max_to_keep": 1, "policy": deltackpt.policies.Consecutive(max_chain=1)}
    with (
        mock.patch.object(directory, "write_kept", refuse),
        pytest.warns(UserWarning, match="disk is full"),
    ):
        save_steps(tmp_path, range(4), **options)
    assert inspect.open(tmp_path).steps == [2, 3]
