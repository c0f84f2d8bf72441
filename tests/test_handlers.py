# SPDX-License-Identifier: Apache-2.0
"""The handlers alone under stock Orbax, v0 and v1, and the few private names that they need."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
from pathlib import Path
from unittest import mock

import jax
import model
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import deltackpt
from deltackpt.errors import StorageError, TemplateMismatch
from deltackpt.handlers import orbax_private
from deltackpt.handlers import v1 as handlers_v1
from deltackpt.reading.reader import RestoredTables
from deltackpt.restore.placing import AbstractEmbeddings
from deltackpt.session import retention
from deltackpt.testing import Disk, failing_saves

TABLES = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)


@pytest.fixture(scope="module")
def state() -> dict:
    return model.initial()


@pytest.fixture(scope="module")
def pieces(state) -> deltackpt.state.tables.Split:
    return deltackpt.handlers.split(state, TABLES)


def save_v0(root: Path, pieces, step: int = 0, touched=None) -> None:
    embeddings = deltackpt.handlers.Embeddings(split=pieces, touched=touched)
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(embeddings=deltackpt.handlers.DeltaSave(embeddings))
        manager.save(step, args=args)


def save_v1(root: Path, pieces, step: int = 0) -> None:
    with registered(), v1.training.Checkpointer(root) as checkpointer:
        embeddings = deltackpt.handlers.Embeddings(split=pieces)
        checkpointer.save_checkpointables(step, {"embeddings": embeddings})


def load_v0(root: Path, step: int, abstract=None) -> RestoredTables:
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.Composite(embeddings=deltackpt.handlers.DeltaRestore(abstract))
        return manager.restore(step, args=args)["embeddings"]


def load_v1(root: Path, step: int, abstract: AbstractEmbeddings | None) -> RestoredTables:
    with registered(), v1.training.Checkpointer(root) as checkpointer:
        wanted = {"embeddings": abstract or AbstractEmbeddings()}
        return checkpointer.load_checkpointables(step, wanted)["embeddings"]


def registered() -> v1.Context:
    context = v1.Context()
    context.checkpointables.registry = v1.handlers.local_registry()
    context.checkpointables.registry.add(deltackpt.handlers.DeltaCheckpointableHandler)
    return context


def assert_holds(found: RestoredTables, state: dict) -> None:
    for name, table in state["tables"].items():
        values = found.fields[f"tables/{name}"]["values"]
        assert np.asarray(values).tobytes() == np.asarray(table).tobytes()


@pytest.mark.parametrize("load", [load_v0, load_v1])
@pytest.mark.parametrize("save", [save_v0, save_v1])
def test_each_api_reads_what_the_other_wrote(tmp_path, state, pieces, save, load):
    save(tmp_path, pieces)
    assert_holds(load(tmp_path, 0, None), state)


@pytest.mark.parametrize("load", [load_v0, load_v1])
def test_each_api_reads_deltas_of_our_manager(tmp_path, state, load):
    marks, now = model.new_touched(state), state
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": TABLES}) as manager:
        for step in (1, 2):
            manager.save(step, now, touched=marks)
            last = now
            now, marks = model.train(now, marks, step)
    found = load(tmp_path, 2, None)
    assert [save.save_id.step for save in found.chain] == [1, 2]
    assert_holds(found, last)


@pytest.mark.parametrize("load", [load_v0, load_v1])
def test_chosen_fields_are_placed_as_requested(tmp_path, state, pieces, load):
    save_v0(tmp_path, pieces)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    table = state["tables"]["items"]
    leaf = jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=sharding)
    asked = AbstractEmbeddings(tables={"tables/items": {"values": leaf}})
    found = load(tmp_path, 0, asked)
    assert set(found.fields) == {"tables/items"} and set(found.fields["tables/items"]) == {"values"}
    placed = found.fields["tables/items"]["values"]
    assert placed.sharding == sharding
    assert np.array_equal(placed, table)
    wrong = jax.ShapeDtypeStruct((4, 4), table.dtype)
    # v1 wraps our error in its own.
    with pytest.raises((TemplateMismatch, KeyError)) as caught:
        load(tmp_path, 0, AbstractEmbeddings(tables={"tables/items": {"values": wrong}}))
    ours = caught.value if load is load_v0 else caught.value.__cause__
    assert isinstance(ours, TemplateMismatch)
    assert "tables/items, values: expected" in str(ours)


def test_under_a_stock_manager_every_save_is_a_base_whatever_was_touched(tmp_path, state, pieces):
    marks = model.new_touched(state)
    for step in (1, 2, 3):
        save_v0(tmp_path, pieces, step, marks)
    for step in (1, 2, 3):
        [info] = load_v0(tmp_path, step).chain
        assert info.kind == "base"


@pytest.mark.parametrize("load", [load_v0, load_v1])
@pytest.mark.parametrize("save", [save_v0, save_v1])
def test_bases_under_stock_managers_are_stored_by_the_codec_for_bases(tmp_path, state, save, load):
    choice = deltackpt.policies.CodecChoice(delta="adaptive2", base="int8")
    chosen = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=choice)
    save(tmp_path, deltackpt.handlers.split(state, chosen))
    found = load(tmp_path, 0, None)
    for name, table in state["tables"].items():
        expected = model.decoded("int8", np.asarray(table))
        assert found.fields[f"tables/{name}"]["values"].tobytes() == expected.tobytes()


def test_metadata_lists_tables_and_slots(tmp_path, state, pieces):
    save_v0(tmp_path, pieces)
    with ocp.CheckpointManager(
        tmp_path, item_handlers={"embeddings": deltackpt.handlers.DeltaHandler()}
    ) as manager:
        told = manager.item_metadata(0)["embeddings"]
    leaf = told.tables["tables/users"]["values"]
    assert (leaf.shape, leaf.dtype) == ((700, 8), np.float32)
    assert set(told.tables) == {f"tables/{name}" for name in state["tables"]}


def test_a_failure_in_the_background_surfaces_and_commits_nothing(tmp_path, pieces):
    embeddings = deltackpt.handlers.Embeddings(split=pieces)
    manager = ocp.CheckpointManager(tmp_path)
    with failing_saves(tmp_path):
        manager.save(
            1, args=ocp.args.Composite(embeddings=deltackpt.handlers.DeltaSave(embeddings))
        )
        with pytest.raises(StorageError, match="Input/output error"):
            manager.wait_until_finished()
    assert not (tmp_path / "1").exists()
    manager.close()


# Orbax's private names.


def test_private_names_are_imported_in_one_place_only():
    package = Path(deltackpt.__file__).parent
    private = re.compile(r"(?:import|from) orbax\S*\._src|from orbax\.checkpoint import _")
    users = [path.name for path in package.rglob("*.py") if private.search(path.read_text())]
    assert users == ["orbax_private.py"]


def test_private_names_are_those_of_the_pinned_version():
    assert importlib.metadata.version("orbax-checkpoint").startswith("0.12.")
    future = inspect.signature(orbax_private.CommitFutureAwaitingContractedSignals.__init__)
    assert list(future.parameters)[:2] == ["self", "coro"] and "name" in future.parameters


@pytest.mark.parametrize(
    ("name", "step"), [("7", 7), ("007", 7), ("checkpoint_12", 12), ("best", 0), ("2024_3", 3)]
)
@pytest.mark.parametrize("suffix", ["", ".orbax-checkpoint-tmp", ".orbax-checkpoint-tmp-123"])
def test_the_final_path_of_a_step_is_derived_from_a_temporary_one(name, step, suffix):
    place = handlers_v1.final_step_dir(
        Path(f"/root/{name}{suffix}/embeddings.orbax-checkpoint-tmp")
    )
    assert place == Path(f"/root/{name}")
    assert handlers_v1.step_number(place) == step


# The commit.


@pytest.mark.parametrize("durability", ["power", "process"])
def test_everything_is_on_disk_before_the_step_is_visible(tmp_path, state, durability):
    """Checks the order of the system calls; the power-cut tests show that it suffices."""
    root = tmp_path / "root"
    options = deltackpt.ManagerOptions(writes=deltackpt.WriteOptions(durability=durability))
    with (
        Disk(root) as disk,
        deltackpt.CheckpointManager(
            root, handlers={"embeddings": TABLES}, options=options
        ) as manager,
    ):
        disk.calls.clear()
        manager.save(3, state)
    visible = disk.calls.index(("rename", str(root / "3"), None))
    forced = {Path(call.path) for call in disk.calls[:visible] if call.name == "fsync"}
    forced_late = {call.path for call in disk.calls[visible:] if call.name == "fsync"}
    if durability == "process":
        assert not forced and str(root) not in forced_late
        return
    assert str(root) in forced_late
    [temporary] = {path for path in forced if path.parent == root}
    for path in [root / "3", *(root / "3").rglob("*")]:
        assert temporary / path.relative_to(root / "3") in forced, path


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_max_to_keep_keeps_as_many_steps_as_the_policy_of_orbax(count):
    context = ocp.checkpoint_managers.PreservationContext()
    infos = [mock.Mock(step=step) for step in range(count)]
    policy = retention.policy_of(deltackpt.ManagerOptions(max_to_keep=2))
    assert policy is not None
    theirs = ocp.checkpoint_managers.LatestN(2).should_preserve(infos, context=context)
    assert policy.should_preserve(infos, context=context) == theirs


def test_without_a_policy_or_with_one_without_a_limit_all_steps_are_kept():
    unlimited = ocp.checkpoint_managers.LatestN(None)
    for options in ({}, {"preservation_policy": unlimited}):
        assert retention.policy_of(deltackpt.ManagerOptions(**options)) is None


def test_a_step_names_the_handlers_that_read_it(tmp_path, state):
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": TABLES}) as manager:
        manager.save(5, state, metrics={"loss": 1.0})
    found = json.loads((tmp_path / "5" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    expected = {
        "embeddings": deltackpt.handlers.DeltaHandler(),
        "dense": ocp.PyTreeCheckpointHandler(),
        "metrics": ocp.JsonCheckpointHandler(),
    }
    assert found == {item: handler.typestr() for item, handler in expected.items()}
