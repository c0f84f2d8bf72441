# SPDX-License-Identifier: Apache-2.0
"""The hot standby without Ray: it holds the newest intact step, or reports why not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import machine
import model
import numpy as np
import pytest
import test_meshes
from damages import HOWS, damage
from flat_options import manager_options
from hypothesis import HealthCheck, Phase, example, given, settings
from job import Job

import deltackpt
from deltackpt.errors import (
    RestoreError,
    SaveFailed,
    ServiceUnavailable,
    StorageError,
    TooLittleMemory,
)
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.reading import chains, reader
from deltackpt.reading.stored_saves import StoredPart
from deltackpt.standby import candidates, loaded_state, shared_memory
from deltackpt.standby import follower as follower_module
from deltackpt.standby.follower import Follower
from deltackpt.standby.loaded_state import Region
from deltackpt.standby.shared_memory import Gate, MemoryReader, SharedMemory
from deltackpt.state import tables as state_tables
from deltackpt.testing import Disk, DiskCall, failing_saves

P = jax.sharding.PartitionSpec
#: Guards against hangs only.
HANG_SECS = 60.0
SELECT = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)
#: (shard, shards): one, a few, more than the rows of the smallest table.
SHARDS = [(0, 1), (0, 2), (1, 2), (2, 3), (0, 7), (5, 7)]

Tables = dict[str, dict[str, np.ndarray]]


pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


def opened(root: Path, shard: int = 0, count: int = 1, **options) -> Follower:
    return Follower(root, item="embeddings", shard=shard, shards=count, **options)


def advanced(one: Follower) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return one.advance()


def in_storage(root: Path, step: int) -> Tables:
    """Restores from storage; other tests compare that with the model."""
    return reader.restore_tables(chains.read_chain(root / str(step))).fields


def in_state(state: dict) -> Tables:
    return {
        f"tables/{name}": {
            "values": np.asarray(leaf),
            "slot.accumulator": np.asarray(state["slots"][name]),
        }
        for name, leaf in state["tables"].items()
    }


def held_regions(one: Follower) -> Iterator[tuple[str, str, int, np.ndarray]]:
    """Yields table, field, first row and rows, copied like a process on the same machine does."""
    holding, place = one.loaded, one.address
    assert holding is not None and place is not None
    view = MemoryReader(place)
    assert view.sequence == holding.sequence and holding.sequence % 2 == 0
    for region in loaded_state.regions(holding.layout, one._shard, one._shards):
        table = table_of(holding.layout, region)
        shape = (region.rows[1] - region.rows[0], *region.trailing)
        rows = view.array(region.offset, shape, region.dtype)
        yield table.name, region.field, region.rows[0] - table.offset, rows


def table_of(layout: Layout, region: Region):
    [found] = [
        table
        for table in layout.tables
        if table.group == region.group
        and table.offset <= region.rows[0] < table.offset + table.rows
    ]
    return found


def assert_holds(one: Follower, step: int, expected: Tables) -> None:
    """Asserts that exactly its rows are held, with the bytes of a step."""
    assert one.loaded is not None and one.loaded.save.save_id.step == step
    found = set()
    for table, field, first, rows in held_regions(one):
        same = expected[table][field][first : first + len(rows)]
        assert rows.tobytes() == same.tobytes(), (table, field, first)
        found.add((table, field, first, first + len(rows)))
    wanted = {
        (table, field, len(rows) * one._shard // one._shards, last)
        for table, fields in expected.items()
        for field, rows in fields.items()
        if (last := len(rows) * (one._shard + 1) // one._shards)
        > len(rows) * one._shard // one._shards
    }
    assert found == wanted
    pin, holding = one.pin(one.loaded.save.save_id, 0)
    assert holding is one.loaded
    one.unpin(pin)


class Trainer:
    """A manager and its saved states."""

    def __init__(self, root: Path, codec="raw", policy=None, slots: bool = True, **options):
        self.root = root
        how = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS if slots else {}, codec=codec)
        if policy is not None:
            options["policy"] = policy
        options = manager_options(durability="process", **options)
        self.manager = deltackpt.CheckpointManager(
            root, handlers={"embeddings": how}, options=options
        )
        self.state = model.initial()
        self.marks = model.new_touched(self.state)
        self.step = 0
        self.seed = 0
        self.states: dict[int, dict] = {}

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        self.manager.close()

    def train(self, rows: int = 20) -> None:
        """Changes rows and slots of some tables, and dense leaves."""
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        ids = {
            name: rng.integers(0, len(table), rows)
            for name, table in self.state["tables"].items()
            if rng.integers(4) and rows
        }
        self.change(ids, {name: rng.normal(size=(rows, model.WIDTH[name])) for name in ids})

    def change(self, ids: dict[str, np.ndarray], values: dict[str, np.ndarray]) -> None:
        # numpy, so that nothing is compiled per number of rows.
        tables, slots = dict(self.state["tables"]), dict(self.state["slots"])
        for name, rows in ids.items():
            table, slot = np.array(tables[name]), np.array(slots[name])
            table[rows] = values[name]
            slot[rows] += 1
            tables[name], slots[name] = jnp.asarray(table), jnp.asarray(slot)
        kernel = jnp.asarray(np.asarray(self.state["dense"]["kernel"]) + 1)
        dense = {**self.state["dense"], "kernel": kernel}
        self.state = {**self.state, "tables": tables, "slots": slots, "dense": dense}
        marks = {f"tables/{name}": jnp.asarray(rows) for name, rows in ids.items()}
        self.marks = deltackpt.touched.mark(self.marks, marks)

    def spoil(self) -> None:
        """Sets rows that no lossy codec can encode."""
        self.seed += 1
        rows = np.random.default_rng(self.seed).integers(0, model.ROWS["users"], 3)
        values = np.array([[np.inf], [np.nan], [3e38]])
        self.change({"users": rows}, {"users": values})

    def save(self, **options) -> int:
        self.step += 1
        self.manager.save(self.step, self.state, touched=self.marks, **options)
        self.manager.wait_until_finished()
        self.states[self.step] = self.state
        return self.step

    def fail(self) -> None:
        """Attempts a save whose storage fails partway."""
        self.step += 1
        with failing_saves(self.root):
            try:
                self.manager.save(self.step, self.state, touched=self.marks)
                self.manager.wait_until_finished()
                self.states[self.step] = self.state
            except SaveFailed:
                pass

    def roll_back(self, step: int) -> None:
        """Resumes from an older step; the next save replaces the later ones."""
        found = self.manager.restore(step, self.states[step])
        self.state, self.marks = found.state, found.touched
        self.step = step
        self.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.save()

    def grow(self) -> None:
        """Adds rows to a table, which changes the layout."""
        count = len(self.state["slots"]["items"]) + 37
        grown = {}
        for kind in ("tables", "slots"):
            leaf = self.state[kind]["items"]
            more = jnp.full((37, *leaf.shape[1:]), self.step, leaf.dtype)
            grown[kind] = {**self.state[kind], "items": jnp.concatenate([leaf, more])}
            assert len(grown[kind]["items"]) == count
        self.state = {**self.state, **grown}
        self.marks = model.new_touched(self.state)

    @property
    def newest(self) -> int:
        return max(self.manager.all_steps())


# The rows of a replica.


@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=4), count=st.integers(1, 12))
def test_replicas_together_hold_each_row_once(rows, count):
    state = {"tables": {str(i): np.zeros((n, 3), np.float32) for i, n in enumerate(rows)}}
    layout = state_tables.split(state, deltackpt.Tables(select="tables/*")).layout
    seen: dict[str, list[int]] = {}
    for shard in range(count):
        held = loaded_state.regions(layout, shard, count)
        ends = [region.offset + region.nbytes for region in held]
        assert all(end <= after.offset for end, after in zip(ends, held[1:]))
        assert all(region.offset % 64 == 0 for region in held)
        assert loaded_state.nbytes(held) == max(ends, default=0)
        for region in held:
            seen.setdefault(f"{region.group}.{region.field}", []).extend(range(*region.rows))
    assert sum(map(len, seen.values())) == sum(rows)
    assert all(len(found) == len(set(found)) for found in seen.values())


# Contents.


#: The same codec for deltas and bases.
LOSSY = [
    deltackpt.policies.CodecChoice(delta=name, base=name)
    for name in ("adaptive4", "int8", "bf16", "greedy2")
]
ACTIONS = st.sampled_from(
    ["train", "save", "save", "save", "nothing", "base", "fail", "back", "grow", "spoil", "poll"]
)


@settings(
    max_examples=8,
    deadline=None,
    # An example takes seconds; shrinking one would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    actions=st.lists(ACTIONS, min_size=6, max_size=12),
    codec=st.sampled_from(["raw", "raw", "lossless", *LOSSY]),
    policy=st.sampled_from(
        [
            deltackpt.policies.Consecutive(max_chain=4),
            deltackpt.policies.OneShot(),
            deltackpt.policies.Intermittent(),
        ]
    ),
    retention=st.sampled_from([None, None, 1]),
    slots=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(
    ["save", "base", "save", "poll"], LOSSY[0], deltackpt.policies.Consecutive(), None, True, 1
)
def test_after_each_poll_the_held_bytes_are_those_of_the_newest_step(
    tmp_path_factory, actions, codec, policy, retention, slots, seed
):
    root = tmp_path_factory.mktemp("root")
    draw = np.random.default_rng(seed)
    late = draw.choice(len(SHARDS), 2, replace=False)
    with Trainer(root, codec, policy, slots, max_to_keep=retention) as trainer:
        trainer.save()
        followers = [opened(root, *SHARDS[number]) for number in range(len(SHARDS))]
        for action in [*actions, "poll"]:
            if action == "train":
                trainer.train(rows=int(draw.choice([0, 5, 400])))
            elif action == "spoil":
                trainer.spoil()
            elif action == "save":
                trainer.train()
                trainer.save()
            elif action == "nothing":
                trainer.save()
            elif action == "base":
                trainer.save(force_base=True)
            elif action == "fail":
                trainer.fail()
            elif action == "back":
                trainer.roll_back(int(draw.choice(trainer.manager.all_steps())))
            elif action == "grow":
                trainer.grow()
            # Some followers poll rarely and find several steps at once.
            for number, one in enumerate(followers):
                if action == "poll" or number not in late:
                    advanced(one)
                    step = trainer.newest
                    expected = in_storage(root, step)
                    assert_holds(one, step, expected)
                    if codec in ("raw", "lossless") and slots:
                        assert_holds(one, step, in_state(trainer.states[step]))
                    assert one.health == "follows"
                    assert not advanced(one)


def test_a_new_base_of_the_same_rows_is_compared_and_not_reloaded(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        assert one.advance() and one.loaded is not None
        place, before = one.address, one.loaded.sequence
        trainer.train()
        trainer.save(force_base=True)
        in_place = []

        def note(_: DiskCall) -> None:
            # The old step stays available while the base is read.
            in_place.append(one.loaded is not None and one.loaded.save.save_id.step == 1)

        with Disk(tmp_path) as disk:
            disk.on("read", note, "^2/.*/c/")
            assert one.advance()
        assert in_place and all(in_place)
        assert_holds(one, 2, in_state(trainer.state))
        assert one.address == place and one.loaded.sequence == before + 2


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.base)
def test_rows_that_a_lossy_codec_cannot_encode_survive_a_new_base(tmp_path, codec):
    with Trainer(tmp_path, codec) as trainer:
        for _ in range(4):
            trainer.spoil()
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        assert_holds(one, 1, in_storage(tmp_path, 1))
        trainer.train()
        trainer.save(force_base=True)
        one.advance()
        assert_holds(one, 2, in_storage(tmp_path, 2))


@pytest.mark.parametrize("policy", [deltackpt.policies.OneShot(), deltackpt.policies.Consecutive()])
def test_several_saves_are_applied_as_one(tmp_path, policy):
    """Readers see neither an older state nor an intermediate one."""
    with Trainer(tmp_path, policy=policy) as trainer:
        trainer.save()
        trainer.train()
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        for _ in range(3):
            trainer.train()
            trainer.save()
        before = one.loaded.sequence
        one.advance()
        assert one.loaded.sequence == before + 2
        assert_holds(one, 5, in_state(trainer.state))
        assert [save.save_id.step for save in one.loaded.chain] == [
            save.info.save_id.step for save in chains.read_chain(tmp_path / "5")
        ]


def test_an_in_memory_rollback_leaves_nothing_of_the_abandoned_steps(tmp_path):
    with Trainer(tmp_path, policy=deltackpt.policies.OneShot()) as trainer:
        trainer.save()
        one = opened(tmp_path)
        advanced(one)
        kept = trainer.state, trainer.marks
        trainer.train()
        trainer.save()
        advanced(one)
        # As after a loss spike: training resumes from the kept state; its clock soon catches up.
        trainer.state, trainer.marks = kept
        trainer.train()
        trainer.train()
        trainer.save()
        advanced(one)
    assert_holds(one, trainer.step, in_state(trainer.state))


@pytest.mark.parametrize("kind", ["delta", "base"])
def test_a_save_larger_than_the_staging_memory_is_applied_in_pieces(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(follower_module, "_LEAST_STAGING_BYTES", 1)
    monkeypatch.setattr(follower_module, "_STAGING_SHARE", 1e-6)
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        for _ in range(3):
            trainer.train(400)
            trainer.save(force_base=kind == "base")
            one.advance()
            assert_holds(one, trainer.step, in_state(trainer.state))


@pytest.mark.parametrize(
    "spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=["rows", "columns", "both", "whole"]
)
def test_steps_of_many_parts_and_columns_are_held_whole(tmp_path, spec):
    job = Job(8)
    narrow = P(*spec[:1])
    topology = test_meshes.Topology(
        (4, 2), 0, dict.fromkeys(test_meshes.ROWS, spec), dict.fromkeys(test_meshes.ROWS, narrow)
    )
    state = test_meshes.initial()
    followers = [opened(tmp_path, *shard) for shard in SHARDS]
    with job.running():
        run = test_meshes.Run(job, topology, tmp_path)
        for step in range(4):
            if step:
                state, ids = test_meshes.trained(state, step)
                run.mark(ids)
            found = run.save(step, state)
            assert not any(isinstance(one, Exception) for one in found), found
            expected = state_tables.split(state, test_meshes.TABLES).fields
            for one in followers:
                one.advance()
                assert_holds(one, step, expected)


def test_a_replica_reads_only_its_own_rows(tmp_path):
    with Trainer(tmp_path, staging_bytes=1 << 24) as trainer:
        # Chunks of a few rows each, as in large tables.
        with mock.patch.object(row_blocks, "CHUNK_BYTES", 256):
            trainer.save()
            trainer.train(400)
            trainer.save()
    read: dict[int, int] = {}
    real = StoredPart.read_into

    def counted(part, segment, entry, start, stop, out):
        read[count] = read.get(count, 0) + out.nbytes
        return real(part, segment, entry, start, stop, out)

    expected = in_state(trainer.state)
    with mock.patch.object(StoredPart, "read_into", counted):
        for count in (1, 4):
            one = opened(tmp_path, 1 if count > 1 else 0, count)
            one.advance()
            assert_holds(one, 2, expected)
    assert read[4] < read[1] / 2


def test_a_first_step_is_waited_for(tmp_path):
    one = opened(tmp_path)
    assert not one.advance() and one.loaded is None and one.newest_step() is None
    assert one.health == "waiting for a first step"
    with pytest.raises(ServiceUnavailable, match="waiting for a first step"):
        one.pin(SaveId("run", 1, 0), 0)
    with Trainer(tmp_path) as trainer:
        trainer.save()
        assert one.advance()
        assert_holds(one, 1, in_state(trainer.state))


# Faults of the directory.


@pytest.fixture(scope="module", params=["consecutive", "one-shot"])
def written(request, tmp_path_factory) -> tuple[Path, dict[int, dict]]:
    """A base, a delta, a delta to damage, and a base after it."""
    policy = {
        "consecutive": deltackpt.policies.Consecutive(),
        "one-shot": deltackpt.policies.OneShot(),
    }
    return write(tmp_path_factory.mktemp("written") / "root", policy[request.param])


def write(root: Path, policy=None) -> tuple[Path, dict[int, dict]]:
    with Trainer(root, policy=policy) as trainer:
        for step in range(1, 5):
            trainer.save(force_base=step == 4)
            trainer.train()
    return root, trainer.states


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_delta_changes_nothing_and_the_next_step_is_applied(written, tmp_path, how):
    (whole, states), root = written, tmp_path / "root"
    shutil.copytree(whole, root)
    os.rename(root / "4", tmp_path / "4")
    files = sorted(path for path in (root / "3" / "embeddings").rglob("*") if path.is_file())
    refused = 0
    for number, path in enumerate(files):
        os.rename(root / "3", tmp_path / "3")
        one = opened(root, *SHARDS[number % 4])
        one.advance()
        before = {key[:3]: key[3].tobytes() for key in held_regions(one)}
        place, holding = one.address, one.loaded
        os.rename(tmp_path / "3", root / "3")
        data = path.read_bytes()
        damage(path, how)
        if one.advance():
            # Files without data of these rows may be missing.
            assert_holds(one, 3, in_state(states[3]))
        else:
            refused += 1
            # It is not read again.
            with Disk(root) as disk:
                disk.fail("read", "^3/", times=None)
                assert not one.advance()
            assert not disk.failures
            assert one.health.startswith("follows; ") and path.name in one.health, one.health
            assert one.address == place and one.loaded is holding
            assert {key[:3]: key[3].tobytes() for key in held_regions(one)} == before
            assert_holds(one, 2, in_state(states[2]))
        os.rename(tmp_path / "4", root / "4")
        assert one.advance() and one.health == "follows"
        assert_holds(one, 4, in_state(states[4]))
        os.rename(root / "4", tmp_path / "4")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert refused > 1


@pytest.mark.parametrize("relaid", [False, True])
def test_a_damaged_base_changes_nothing(tmp_path, relaid):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        place = one.address
        if relaid:
            trainer.grow()
        trainer.train()
        trainer.save(force_base=True)
        chunk = next(path for path in (tmp_path / "2").rglob("c/0*") if path.is_file())
        data = chunk.read_bytes()
        chunk.write_bytes(bytes(len(data)))
        assert not one.advance()
        assert_holds(one, 1, in_state(trainer.states[1]))
        assert one.address == place and one.health.startswith("follows; ")
        open_files = len(machine.open_files(tmp_path))
        trainer.save(force_base=True)
        assert one.advance()
        assert_holds(one, 3, in_state(trainer.state))
        # The trainer's garbage collection may briefly hold a descriptor.
        wait_until(lambda: len(machine.open_files(tmp_path)) <= open_files)


def test_a_repaired_step_is_applied(tmp_path, monkeypatch):
    """For example, one that was copied into the directory before its parent."""
    monkeypatch.setattr(candidates, "_REFUSED_SECS", 0.0)
    root, states = write(tmp_path / "root")
    shutil.rmtree(root / "4")
    os.rename(root / "2", tmp_path / "2")
    one = opened(root)
    assert one.advance()
    assert_holds(one, 1, in_state(states[1]))
    assert "parent 2" in one.health
    os.rename(tmp_path / "2", root / "2")
    assert one.advance()
    assert_holds(one, 3, in_state(states[3]))


def test_if_no_step_is_intact_it_reports_that_and_keeps_its_state(tmp_path):
    with Trainer(tmp_path / "root") as trainer:
        trainer.save()
    root = tmp_path / "root"
    manifest = root / "1" / "embeddings" / "manifest.0.msgpack"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1])
    one = opened(root)
    for _ in range(2):
        with pytest.raises(RestoreError, match="manifest.0"):
            one.advance()
        assert one.loaded is None
    manifest.write_bytes(data)
    two = opened(root)
    assert two.advance()
    shutil.rmtree(root / "1")
    assert not two.advance()
    assert_holds_still(two, trainer.states[1])


def assert_holds_still(one: Follower, state: dict) -> None:
    assert_holds(one, one.loaded.save.save_id.step, in_state(state))


def test_a_directory_that_vanishes_and_returns_is_followed_again(tmp_path):
    root, aside = tmp_path / "root", tmp_path / "aside"
    with Trainer(root) as trainer:
        trainer.save()
    one = opened(root)
    one.advance()
    os.rename(root, aside)
    for _ in range(2):
        with pytest.raises(StorageError, match="expected to list it"):
            one.advance()
        with pytest.raises(StorageError):
            one.newest_step()
        assert_holds_still(one, trainer.states[1])
    os.rename(aside, root)
    assert not one.advance()
    assert_holds_still(one, trainer.states[1])
    # The directory returns with another run that has the same step.
    shutil.rmtree(root)
    with Trainer(root) as trainer:
        trainer.train(400)
        trainer.save()
        assert one.advance()
        assert_holds_still(one, trainer.state)


def test_a_temporarily_unreadable_file_is_read_later(tmp_path):
    root, states = write(tmp_path / "root")
    shutil.rmtree(root / "4")
    os.rename(root / "3", tmp_path / "3")
    one = opened(root)
    one.advance()
    os.rename(tmp_path / "3", root / "3")
    with Disk(root) as disk, pytest.raises(StorageError):
        disk.fail("read", "^3/embeddings/[^/]+$", times=None)
        one.advance()
    assert_holds_still(one, states[2])
    assert one.advance()
    assert_holds_still(one, states[3])


def test_a_step_that_vanishes_while_it_is_read_changes_nothing(tmp_path):
    root, states = write(tmp_path / "root")
    shutil.rmtree(root / "4")
    os.rename(root / "3", tmp_path / "3")
    one = opened(root)
    one.advance()
    os.rename(tmp_path / "3", root / "3")
    with Disk(root) as disk:
        disk.on("read", lambda _: shutil.rmtree(root / "3"), "^3/.*/layer", times=1)
        assert not one.advance()
    assert_holds_still(one, states[2])
    assert not one.advance() and one.health == "follows"


# Memory.


def test_too_little_memory_is_reported_before_any_is_allocated(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path, memory_bytes=1000)
        for _ in range(2):
            with pytest.raises(TooLittleMemory, match=r"found 1,000; start the service with more"):
                one.advance()
        assert one.loaded is None and one.nbytes == 0 and one.address is None
        # A shard of it fits.
        beside = follower_module._LEAST_STAGING_BYTES
        part = opened(tmp_path, 0, 7, memory_bytes=beside + 10_000)
        assert part.advance()
        assert part.nbytes <= 10_000
        with pytest.raises(TooLittleMemory):
            opened(tmp_path, memory_bytes=beside + 10_000).advance()


def test_grown_tables_replace_the_old_ones_if_both_do_not_fit(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        size = sum(
            part.nbytes for held in in_state(trainer.state).values() for part in held.values()
        )
        beside = follower_module._LEAST_STAGING_BYTES
        one = opened(tmp_path, memory_bytes=beside + size + size // 2)
        assert one.advance()
        trainer.grow()
        trainer.save()
        assert one.advance()
        assert_holds_still(one, trainer.state)
        # If it does not fit at all, the held state is unchanged.
        for _ in range(60):
            trainer.grow()
        trainer.save()
        with pytest.raises(TooLittleMemory):
            one.advance()
        assert_holds(one, 2, in_state(trainer.states[2]))


def test_memory_of_another_owner_is_rejected():
    one = SharedMemory(100)
    MemoryReader(one.address)
    one_place = one.address
    one.close()
    with pytest.raises(OSError):
        MemoryReader(one_place)
    other = SharedMemory(100)
    if other.address.descriptor == one_place.descriptor:
        with pytest.raises(OSError, match="other memory"):
            MemoryReader(one_place)
    other.close()
    with pytest.raises(OSError, match="another machine"):
        MemoryReader(shared_memory.MemoryAddress("elsewhere", os.getpid(), 3, "00"))


@pytest.mark.processes
def test_a_reader_in_another_process_keeps_the_memory_when_its_owner_is_killed(tmp_path):
    """Pinned bytes can still be copied, and an interrupted write is detected."""
    code = (
        "import sys, time, numpy as np\n"
        "from deltackpt.standby.shared_memory import SharedMemory\n"
        "one = SharedMemory(4096)\n"
        "one.begin_write(); one.array(0, (4096,), np.dtype('u1'))[:] = 7; one.end_write()\n"
        "print(one.address.machine, one.address.pid, one.address.descriptor, one.address.token,"
        " sep='|', flush=True)\n"
        "sys.stdin.readline(); one.begin_write(); print('in', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        machine, pid, descriptor, token = owner.stdout.readline().strip().split("|")
        view = MemoryReader(shared_memory.MemoryAddress(machine, int(pid), int(descriptor), token))
        assert view.sequence == 2
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "in\n"
        assert view.sequence == 3
        owner.send_signal(signal.SIGKILL)
        owner.wait(HANG_SECS)
        assert (view.array(0, (4096,), np.dtype("u1")) == 7).all()
        with pytest.raises(OSError):
            MemoryReader(shared_memory.MemoryAddress(machine, int(pid), int(descriptor), token))


# Concurrent readers.


@pytest.mark.parametrize("pinned", [True, False])
def test_concurrent_readers_see_only_whole_steps(tmp_path, pinned):
    """With a pin each copy is one step; without a pin the sequence number reveals a change."""
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        states = {1: flat(in_state(trainer.state), one)}
        stop, found = threading.Event(), {"pinned": 0, "whole": 0, "changed": 0}
        failures: list[BaseException] = []

        def copy() -> None:
            last = one.loaded
            try:
                while not stop.is_set():
                    # Nothing is held during a change; a reader may have asked just before it.
                    holding = one.loaded or (None if pinned else last)
                    if holding is None:
                        continue
                    last = holding
                    try:
                        pin, holding = one.pin(holding.save.save_id, 1) if pinned else (0, holding)
                    except ServiceUnavailable:
                        continue
                    view = MemoryReader(one.address)
                    before = view.sequence
                    assert not pinned or before == holding.sequence
                    copied = bytes(view.array(0, (one.nbytes,), np.dtype("u1")))
                    after = view.sequence
                    whole = before == after == holding.sequence
                    if pinned:
                        assert whole
                        one.unpin(pin)
                        found["pinned"] += 1
                    else:
                        found["whole" if whole else "changed"] += 1
                    if whole:
                        assert copied == states[holding.save.save_id.step]
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=copy) for _ in range(2 if pinned else 1)]
        for thread in readers:
            thread.start()
        real = follower_module._merge

        def slowly(staged, targets):
            # A reader without a pin must copy during the change.
            count = found["changed"]
            for block in staged:
                real([block], targets)
            wait_until(lambda: pinned or found["changed"] > count or failures)

        try:
            with mock.patch.object(follower_module, "_merge", slowly):
                for number in range(10):
                    trainer.train(200)
                    state = flat(in_state(trainer.state), one)
                    states[trainer.step + 1] = state
                    trainer.save(force_base=number % 5 == 4)
                    one.advance()
                    count = found["pinned"]
                    wait_until(
                        lambda count=count: found["pinned"] > count or not pinned or failures
                    )
        finally:
            stop.set()
            for thread in readers:
                thread.join(HANG_SECS)
        assert not failures, failures
        assert found["pinned" if pinned else "changed"] >= 10


def flat(expected: Tables, one: Follower) -> bytes:
    """Returns the expected memory of a replica."""
    layout = one.loaded.layout
    held = loaded_state.regions(layout, 0, 1)
    out = np.zeros(loaded_state.nbytes(held), np.uint8)
    for region in held:
        table = table_of(layout, region)
        rows = expected[table.name][region.field]
        out[region.offset :][: region.nbytes] = rows.reshape(-1).view(np.uint8)
    return out.tobytes()


def wait_until(true) -> None:
    end = time.monotonic() + HANG_SECS
    while not true():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.001)


def test_a_reader_that_dies_with_a_pin_blocks_the_writer_for_a_limited_time(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        with mock.patch.object(shared_memory, "PIN_SECS", 0.2):
            pin, _ = one.pin(one.loaded.save.save_id, 0)
            trainer.train()
            trainer.save()
            assert one.advance()
        assert_holds_still(one, trainer.state)
        assert not one.renew(pin)
        with pytest.raises(ServiceUnavailable, match="expected a pinned state"):
            one.read(pin, "any", "values", 0, 1)
        one.unpin(pin)


def test_the_writer_waits_for_a_pin_while_readers_see_one_state(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        first = one.loaded
        pin, _ = one.pin(first.save.save_id, 0)
        trainer.train()
        trainer.save()
        writer = threading.Thread(target=one.advance)
        writer.start()
        wait_until(lambda: one._gate._waiting_since is not None)
        assert one.loaded is first
        # Other readers may pin while the writer waits briefly, but not after a long wait.
        other, _ = one.pin(first.save.save_id, 0)
        one.unpin(other)
        with mock.patch.object(shared_memory, "_PATIENCE_SECS", 0.0):
            with pytest.raises(ServiceUnavailable):
                one.pin(first.save.save_id, 0)
            assert one.renew(pin)
            one.unpin(pin)
        writer.join(HANG_SECS)
        assert_holds_still(one, trainer.state)


def test_a_pin_of_one_gate_is_invalid_for_another():
    """A restarted replica does not know earlier pins."""
    one, other = Gate(), Gate()
    pins = {one.pin(0) for _ in range(20)}
    others = {other.pin(0) for _ in range(20)}
    assert not pins & others
    assert not any(other.renew(pin) for pin in pins)
    for pin in pins:
        other.unpin(pin)
    assert all(other.renew(pin) for pin in others)


def test_rows_are_read_only_from_a_pinned_state(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path, 1, 2)
        one.advance()
        pin, holding = one.pin(one.loaded.save.save_id, 0)
        for region in loaded_state.regions(holding.layout, 1, 2):
            table = table_of(holding.layout, region)
            expected = in_state(trainer.state)[table.name][region.field]
            first, last = region.rows
            rows = one.read(pin, region.group, region.field, first, last)
            assert rows.tobytes() == expected[first - table.offset : last - table.offset].tobytes()
            for outside in ((first - 1, last), (first, last + 1)):
                with pytest.raises(ServiceUnavailable):
                    one.read(pin, region.group, region.field, *outside)
            with pytest.raises(ServiceUnavailable):
                one.read(pin + 1, region.group, region.field, first, last)
        with pytest.raises(ServiceUnavailable, match="expected it to hold"):
            one.pin(SaveId(holding.save.save_id.run, 2, 0), 0)


# Readers that keep mappings, and files other than tables.


def kept(one: Follower) -> tuple[MemoryReader, np.ndarray]:
    """Maps the memory of a follower, and returns the mapping and its bytes."""
    pin, holding = one.pin(one.loaded.save.save_id, 0)
    view = MemoryReader(one.address)
    assert view.sequence == holding.sequence
    one.unpin(pin)
    return view, view.array(0, (one.nbytes,), np.dtype("u1"))


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("force_base", [False, True])
def test_a_kept_mapping_is_unchanged_and_the_next_state_is_built_in_a_copy(
    tmp_path, monkeypatch, force_base, in_pieces
):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        first, place = flat(in_state(trainer.state), one), one.address
        view, rows = kept(one)
        if in_pieces:
            monkeypatch.setattr(follower_module, "_LEAST_STAGING_BYTES", 100)
            monkeypatch.setattr(follower_module, "_STAGING_SHARE", 0.0)
        trainer.train(200)
        trainer.save(force_base=force_base)
        assert one.advance()
        assert one.address != place and view.sequence % 2 == 0
        assert bytes(rows) == first
        assert_holds(one, 2, in_state(trainer.state))
        # The reader's writes are private. No reader maps the copy, so it is updated in place.
        rows[:] = 0
        place = one.address
        trainer.train(200)
        trainer.save(force_base=force_base)
        assert one.advance()
        assert one.address == place
        assert_holds(one, 3, in_state(trainer.state))


def test_without_its_reader_the_memory_is_updated_in_place(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        place, found = one.address, kept(one)
        del found
        trainer.train()
        trainer.save()
        assert one.advance() and one.address == place
        assert_holds(one, 2, in_state(trainer.state))


def test_without_memory_for_a_copy_the_state_stays_until_its_reader_is_gone(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        first, (view, rows) = trainer.state, kept(one)
        trainer.train()
        trainer.save()
        with mock.patch.object(follower_module, "available_bytes", return_value=1 << 20):
            with pytest.raises(TooLittleMemory):
                one.advance()
            assert_holds(one, 1, in_state(first))
            assert view.sequence == one.loaded.sequence
            del view, rows
            assert one.advance()
        assert_holds(one, 2, in_state(trainer.state))


def test_files_other_than_tables_are_held_as_stored(tmp_path):
    with Trainer(tmp_path) as trainer:
        for step in (1, 2):
            trainer.train()
            trainer.save(force_base=True)
            if step == 1:
                one = opened(tmp_path)
            one.advance()
            files = one.loaded.files
            found = {file.name: files.array(file).tobytes() for file in files.index}
            root = tmp_path / str(step)
            dense = [path for path in (root / "dense").rglob("*") if path.is_file()]
            assert dense
            for path in (*dense, root / "digests.step.msgpack"):
                assert found[path.relative_to(root).as_posix()] == path.read_bytes()
        pin, holding = one.pin(one.loaded.save.save_id, 0)
        name = next(name for name in found if name.startswith("dense/d/"))
        assert one.read_file(pin, name, 3, 9).tobytes() == found[name][3:9]
        with pytest.raises(ServiceUnavailable, match="the file dense/none, found none"):
            one.read_file(pin, "dense/none", 0, 1)
        one.unpin(pin)
        with pytest.raises(ServiceUnavailable):
            one.read_file(pin, name, 3, 9)


def test_files_that_do_not_fit_are_left_to_storage(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        size = sum(
            part.nbytes for held in in_state(trainer.state).values() for part in held.values()
        )
        beside = follower_module._LEAST_STAGING_BYTES
        one = opened(tmp_path, memory_bytes=beside + size + 1000)
        assert one.advance()
        assert_holds(one, 1, in_state(trainer.state))
        assert one.loaded.files is None
