# SPDX-License-Identifier: Apache-2.0
"""The hot standby without Ray: it holds the newest intact step, or reports why not."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
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
from hypothesis import example, given
from job import Job

import deltackpt
from deltackpt import errors
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.policies import CodecChoice, Consecutive, Intermittent, OneShot
from deltackpt.reading import chains, reader, stored_saves
from deltackpt.reading.stored_saves import StoredShard
from deltackpt.standby import cached_files, loaded_state, shared_memory, tailer
from deltackpt.standby import follower as follower_module
from deltackpt.standby.follower import Follower
from deltackpt.standby.loaded_state import Region
from deltackpt.standby.shared_memory import Gate, MemoryAddress, MemoryReader
from deltackpt.state import tables as state_tables
from deltackpt.storage.digests import read_digests, without_blocks
from deltackpt.testing import Disk, DiskCall, failing_saves
from deltackpt.testing.training_run import TrainingRun

P = jax.sharding.PartitionSpec
#: Guards against hangs only.
HANG_SECS = 60.0
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
        first = region.rows[0] - table.offset
        yield table.name, region.field, first, view.array(region.offset, shape, region.dtype)


def table_of(layout: Layout, region: Region):
    [found] = [
        table
        for table in layout.tables
        if table.group == region.group
        and table.offset <= region.rows[0] < table.offset + table.rows
    ]
    return found


def assert_rows(one: Follower, expected: Tables) -> set[tuple[str, str, int, int]]:
    """Asserts that its rows have the expected bytes; returns tables, fields and rows held."""
    found = set()
    for table, field, first, rows in held_regions(one):
        last = first + len(rows)
        assert rows.tobytes() == expected[table][field][first:last].tobytes(), (table, field, first)
        found.add((table, field, first, last))
    return found


def assert_holds(one: Follower, step: int, expected: Tables) -> None:
    """Asserts that exactly its rows are held, with the bytes of a step."""
    assert one.loaded is not None and one.loaded.save.save_id.step == step
    spans = {
        (table, field, *(len(rows) * (one._shard + side) // one._shards for side in (0, 1)))
        for table, fields in expected.items()
        for field, rows in fields.items()
    }
    assert assert_rows(one, expected) == {span for span in spans if span[2] < span[3]}
    pin, holding = one.pin(one.loaded.save.save_id, 0)
    assert holding is one.loaded
    one.unpin(pin)


class Trainer(TrainingRun):
    """A run with one open manager; training and saving are separate."""

    def __init__(self, root: Path, codec="raw", policy=None, slots: bool = True, **options):
        if policy is not None:
            options["policy"] = policy
        options = manager_options(durability="process", **options)
        slots = model.SLOTS if slots else {}
        tables = deltackpt.Tables(select=model.SELECT, slots=slots, codec=codec)
        super().__init__(root, options=options, tables=tables)
        self.seed = 0
        self.open()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        self.manager.close()

    def next(self, rows: int = 20, **options) -> int:
        """Trains and saves."""
        self.train(rows)
        return self.save(**options)

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
        ids = {f"tables/{name}": jnp.asarray(rows) for name, rows in ids.items()}
        self.touched = deltackpt.touched.mark(self.touched, ids)

    def spoil(self) -> None:
        """Sets rows that no lossy codec can encode."""
        self.seed += 1
        rows = np.random.default_rng(self.seed).integers(0, model.ROWS["users"], 3)
        self.change({"users": rows}, {"users": np.array([[np.inf], [np.nan], [3e38]])})

    def save(self, **options) -> int:
        self.step += 1
        model.commit(self.manager, self.step, self.state, touched=self.touched, **options)
        self.states[self.step] = self.state
        return self.step

    def fail(self) -> None:
        """Attempts a save whose storage fails partway."""
        with failing_saves(self.root), contextlib.suppress(errors.SaveFailed):
            self.save()

    def roll_back(self, step: int) -> None:
        """Resumes from an older step; the next save replaces the later ones."""
        found = self.manager.restore(step, self.states[step])
        self.state, self.touched, self.step = found.state, found.touched, step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.next()

    def grow(self) -> None:
        """Adds rows to a table, which changes the layout."""
        self.state = grown(self.state, self.step)
        self.touched = model.new_touched(self.state)

    def assert_held(self, one: Follower, step: int) -> None:
        """Asserts that a follower holds a step, bit for bit."""
        assert_holds(one, step, in_state(self.states[step]))

    def assert_applied(self, one: Follower) -> None:
        """Asserts that a follower applies the last step."""
        assert advanced(one)
        self.assert_held(one, self.step)


def grown(state: dict, value: float, table: str = "items") -> dict:
    """A state with 37 more rows of a table and its slot."""
    found = {}
    for kind in ("tables", "slots"):
        leaf = np.asarray(state[kind][table])
        more = np.full((37, *leaf.shape[1:]), value, leaf.dtype)
        found[kind] = {**state[kind], table: jnp.asarray(np.concatenate([leaf, more]))}
    assert len(found["slots"][table]) == len(state["slots"][table]) + 37
    return {**state, **found}


@pytest.fixture
def trainer(tmp_path) -> Iterator[Trainer]:
    """A trainer that has saved step 1."""
    with Trainer(tmp_path / "root") as found:
        found.save()
        yield found


@pytest.fixture
def one(trainer) -> Follower:
    """A follower that holds step 1 of the trainer."""
    return holding(trainer)


def holding(trainer: TrainingRun) -> Follower:
    found = opened(trainer.root)
    assert found.advance()
    return found


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
LOSSY = [CodecChoice(delta=name, base=name) for name in ("adaptive4", "int8", "bf16", "greedy2")]
ACTIONS = ["train", "save", "save", "save", "nothing", "base", "fail", "back", "grow", "spoil"]


@test_meshes.slow_examples(8)
@given(
    actions=st.lists(st.sampled_from([*ACTIONS, "poll"]), min_size=6, max_size=12),
    codec=st.sampled_from(["raw", "raw", "lossless", *LOSSY]),
    policy=st.sampled_from([Consecutive(max_chain=4), OneShot(), Intermittent()]),
    retention=st.sampled_from([None, None, 1]),
    slots=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(["save", "base", "save", "poll"], LOSSY[0], Consecutive(), None, True, 1)
def test_after_each_poll_the_held_bytes_are_those_of_the_newest_step(
    tmp_path_factory, actions, codec, policy, retention, slots, seed
):
    root = tmp_path_factory.mktemp("root")
    draw = np.random.default_rng(seed)
    late = draw.choice(len(SHARDS), 2, replace=False)
    with Trainer(root, codec, policy, slots, max_to_keep=retention) as trainer:
        do = {
            "train": lambda: trainer.train(int(draw.choice([0, 5, 400]))),
            "spoil": trainer.spoil,
            "save": trainer.next,
            "nothing": trainer.save,
            "base": lambda: trainer.save(force_base=True),
            "fail": trainer.fail,
            "back": lambda: trainer.roll_back(int(draw.choice(trainer.manager.all_steps()))),
            "grow": trainer.grow,
            "poll": lambda: None,
        }
        trainer.save()
        followers = [opened(root, *shard) for shard in SHARDS]
        for action in [*actions, "poll"]:
            do[action]()
            # Some followers poll rarely and find several steps at once.
            for number, one in enumerate(followers):
                if action == "poll" or number not in late:
                    advanced(one)
                    step = max(trainer.manager.all_steps())
                    assert_holds(one, step, in_storage(root, step))
                    if codec in ("raw", "lossless") and slots:
                        trainer.assert_held(one, step)
                    assert one.health == "follows"
                    assert not advanced(one)


def test_a_new_base_of_the_same_rows_is_compared_and_not_reloaded(trainer, one):
    place, before = one.address, one.loaded.sequence
    trainer.next(force_base=True)
    in_place = []

    def note(_: DiskCall) -> None:
        # The old step stays available while the base is read.
        in_place.append(one.loaded is not None and one.loaded.save.save_id.step == 1)

    with Disk(trainer.root) as disk:
        disk.on("read", note, "^2/.*/c[.]")
        assert one.advance()
    assert in_place and all(in_place)
    trainer.assert_held(one, 2)
    assert one.address == place and one.loaded.sequence == before + 2


@pytest.mark.parametrize("shape", [(5,), (5, 1)], ids=str)
def test_a_new_base_of_a_table_with_one_column_is_applied(tmp_path, shape):
    def move(state, marks, step):
        state = jax.tree.map(lambda leaf: leaf.at[step].set(step), state)
        return state, deltackpt.touched.mark(marks, {"table": jnp.array([step])})

    state = {"table": jnp.zeros(shape), "slot": jnp.zeros(5)}
    run = TrainingRun(
        tmp_path / "root",
        state=state,
        tables=deltackpt.Tables(select="table", slots={"table": {"sum": "slot"}}),
        touched=deltackpt.touched.init({"table": state["table"]}),
        move=move,
    )
    with run.open():
        run.save()
        one = holding(run)
        run.save(force_base=True)
    assert one.advance()
    table, slot = np.asarray(run.state["table"]), np.asarray(run.state["slot"])
    assert_rows(one, {"table": {"values": table, "slot.sum": slot}})


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.base)
def test_rows_that_a_lossy_codec_cannot_encode_survive_a_new_base(tmp_path, codec):
    with Trainer(tmp_path, codec) as trainer:
        for _ in range(4):
            trainer.spoil()
        trainer.save()
        one = holding(trainer)
        assert_holds(one, 1, in_storage(tmp_path, 1))
        trainer.next(force_base=True)
        one.advance()
        assert_holds(one, 2, in_storage(tmp_path, 2))


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_several_saves_are_applied_as_one(tmp_path, policy):
    """Readers see neither an older state nor an intermediate one."""
    with Trainer(tmp_path, policy=policy) as trainer:
        trainer.save()
        trainer.next()
        one = holding(trainer)
        for _ in range(3):
            trainer.next()
        before = one.loaded.sequence
        one.advance()
        assert one.loaded.sequence == before + 2
        trainer.assert_held(one, 5)
        assert [save.save_id.step for save in one.loaded.chain] == [
            save.info.save_id.step for save in chains.read_chain(tmp_path / "5")
        ]


def test_an_in_memory_rollback_leaves_nothing_of_the_abandoned_steps(tmp_path):
    with Trainer(tmp_path, policy=OneShot()) as trainer:
        trainer.save()
        one = holding(trainer)
        kept = trainer.state, trainer.touched
        trainer.next()
        advanced(one)
        # As after a loss spike: training resumes from the kept state; its clock soon catches up.
        trainer.state, trainer.touched = kept
        trainer.train()
        trainer.next()
        advanced(one)
    trainer.assert_held(one, trainer.step)


def limit_staging(monkeypatch: pytest.MonkeyPatch, least: int = 1, share: float = 1e-6) -> None:
    monkeypatch.setattr(follower_module, "_LEAST_STAGING_BYTES", least)
    monkeypatch.setattr(follower_module, "_STAGING_SHARE", share)


@pytest.mark.parametrize("kind", ["delta", "base"])
def test_a_save_larger_than_the_staging_memory_is_applied_in_pieces(trainer, monkeypatch, kind):
    limit_staging(monkeypatch)
    one = holding(trainer)
    for _ in range(3):
        trainer.next(400, force_base=kind == "base")
        trainer.assert_applied(one)


@pytest.mark.parametrize(
    "spec", [P("x"), P(None, "y"), P("x", "y"), P()], ids=["rows", "columns", "both", "whole"]
)
def test_steps_of_many_shards_and_columns_are_held_whole(tmp_path, spec):
    specs = [dict.fromkeys(test_meshes.ROWS, piece) for piece in (spec, P(*spec[:1]))]
    state, job = test_meshes.initial(), Job(8)
    followers = [opened(tmp_path, *shard) for shard in SHARDS]
    with job.running():
        run = test_meshes.Run(job, test_meshes.Topology((4, 2), 0, *specs), tmp_path)
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
            trainer.next(400)
    read: dict[int, int] = {}
    real = StoredShard.read_into

    def counted(shard, segment, entry, start, stop, out):
        read[count] = read.get(count, 0) + out.nbytes
        return real(shard, segment, entry, start, stop, out)

    with mock.patch.object(StoredShard, "read_into", counted):
        for count in (1, 4):
            one = opened(tmp_path, 1 if count > 1 else 0, count)
            trainer.assert_applied(one)
    assert read[4] < read[1] / 2


def test_a_first_step_is_waited_for(tmp_path):
    one = opened(tmp_path)
    assert not one.advance() and one.loaded is None and one.newest_step() is None
    assert one.health == "waiting for a first step"
    with pytest.raises(errors.ServiceUnavailable, match="waiting for a first step"):
        one.pin(SaveId("run", 1, 0), 0)
    with Trainer(tmp_path) as trainer:
        trainer.save()
        trainer.assert_applied(one)


# Faults of the directory.


@pytest.fixture(scope="module", params=[Consecutive(), OneShot()], ids=["consecutive", "one-shot"])
def written(request, tmp_path_factory) -> Trainer:
    return write(tmp_path_factory.mktemp("written") / "root", request.param)


def write(root: Path, policy=None) -> Trainer:
    """A base, two deltas, and a base after them."""
    with Trainer(root, policy=policy) as trainer:
        for step in range(1, 5):
            trainer.save(force_base=step == 4)
            trainer.train()
    return trainer


def polled_before(tmp_path: Path, late: int) -> tuple[Trainer, Follower]:
    """Steps 1 to 3, and a follower that polled before one of them arrived."""
    trainer = write(tmp_path / "root")
    shutil.rmtree(trainer.root / "4")
    trainer.step = 3
    (trainer.root / str(late)).rename(tmp_path / "late")
    one = holding(trainer)
    (tmp_path / "late").rename(trainer.root / str(late))
    return trainer, one


def all_held(one: Follower) -> dict:
    return {key[:3]: key[3].tobytes() for key in held_regions(one)}


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_delta_changes_nothing_and_the_next_step_is_applied(written, tmp_path, how):
    root = tmp_path / "root"
    shutil.copytree(written.root, root)
    (root / "4").rename(tmp_path / "4")
    files = sorted(path for path in (root / "3" / "embeddings").rglob("*") if path.is_file())
    refused = 0
    for number, path in enumerate(files):
        (root / "3").rename(tmp_path / "3")
        one = opened(root, *SHARDS[number % 4])
        one.advance()
        before, place, loaded = all_held(one), one.address, one.loaded
        (tmp_path / "3").rename(root / "3")
        data = path.read_bytes()
        damage(path, how)
        if one.advance():
            # Files without data of these rows may be missing.
            written.assert_held(one, 3)
        else:
            refused += 1
            # It is not read again.
            with Disk(root) as disk:
                disk.fail("read", "^3/", times=None)
                assert not one.advance()
            assert not disk.failures
            assert one.health.startswith("follows; ") and path.name in one.health, one.health
            assert one.address == place and one.loaded is loaded
            assert all_held(one) == before
            written.assert_held(one, 2)
        (tmp_path / "4").rename(root / "4")
        assert one.advance() and one.health == "follows"
        written.assert_held(one, 4)
        (root / "4").rename(tmp_path / "4")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert refused > 1


@pytest.mark.parametrize("relaid", [False, True])
def test_a_damaged_base_changes_nothing(trainer, one, relaid):
    place = one.address
    if relaid:
        trainer.grow()
    trainer.next(force_base=True)
    chunk = next(path for path in (trainer.root / "2").rglob("c.0*") if path.is_file())
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert not one.advance()
    trainer.assert_held(one, 1)
    assert one.address == place and one.health.startswith("follows; ")
    open_files = len(machine.open_files(trainer.root))
    trainer.save(force_base=True)
    trainer.assert_applied(one)
    # The trainer's garbage collection may briefly hold a descriptor.
    wait_until(lambda: len(machine.open_files(trainer.root)) <= open_files)


def test_a_repaired_step_is_applied(tmp_path, monkeypatch):
    """For example, one that was copied into the directory before its parent."""
    monkeypatch.setattr(tailer, "_REFUSED_SECS", 0.0)
    trainer, one = polled_before(tmp_path, 2)
    trainer.assert_held(one, 1)
    assert "parent 2" in one.health
    trainer.assert_applied(one)


def test_if_no_step_is_intact_it_reports_that_and_keeps_its_state(trainer):
    trainer.manager.close()
    manifest = trainer.root / "1" / "embeddings" / "manifest.0.msgpack"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1])
    one = opened(trainer.root)
    for _ in range(2):
        with pytest.raises(errors.RestoreError, match="manifest.0"):
            one.advance()
        assert one.loaded is None
    manifest.write_bytes(data)
    two = holding(trainer)
    shutil.rmtree(trainer.root / "1")
    assert not two.advance()
    trainer.assert_held(two, 1)


def test_a_directory_that_vanishes_and_returns_is_followed_again(trainer, one, tmp_path):
    trainer.manager.close()
    root, aside = trainer.root, tmp_path / "aside"
    root.rename(aside)
    for _ in range(2):
        with pytest.raises(errors.StorageError, match="expected to list it"):
            one.advance()
        with pytest.raises(errors.StorageError):
            one.newest_step()
        trainer.assert_held(one, 1)
    aside.rename(root)
    assert not one.advance()
    trainer.assert_held(one, 1)
    # The directory returns with another run that has the same step.
    shutil.rmtree(root)
    with Trainer(root) as other:
        other.next(400)
        assert one.advance()
        other.assert_held(one, 1)


def test_a_temporarily_unreadable_file_is_read_later(tmp_path):
    trainer, one = polled_before(tmp_path, 3)
    with Disk(trainer.root) as disk, pytest.raises(errors.StorageError):
        disk.fail("read", "^3/embeddings/[^/]+$", times=None)
        one.advance()
    trainer.assert_held(one, 2)
    trainer.assert_applied(one)


# Memory.


BESIDE = follower_module._LEAST_STAGING_BYTES


def bytes_of_rows(state: dict) -> int:
    return sum(piece.nbytes for held in in_state(state).values() for piece in held.values())


def test_too_little_memory_is_reported_before_any_is_allocated(trainer):
    one = opened(trainer.root, memory_bytes=1000)
    for _ in range(2):
        with pytest.raises(
            errors.TooLittleMemory, match=r"found 1,000; start the service with more"
        ):
            one.advance()
    assert one.loaded is None and one.nbytes == 0 and one.address is None
    # A shard of it fits.
    piece = opened(trainer.root, 0, 7, memory_bytes=BESIDE + 10_000)
    assert piece.advance()
    assert piece.nbytes <= 10_000
    with pytest.raises(errors.TooLittleMemory):
        opened(trainer.root, memory_bytes=BESIDE + 10_000).advance()


def test_grown_tables_replace_the_old_ones_if_both_do_not_fit(trainer):
    one = opened(trainer.root, memory_bytes=BESIDE + bytes_of_rows(trainer.state) * 3 // 2)
    assert one.advance()
    trainer.grow()
    trainer.save()
    trainer.assert_applied(one)
    # If it does not fit at all, the held state is unchanged.
    for _ in range(60):
        trainer.grow()
    trainer.save()
    with pytest.raises(errors.TooLittleMemory):
        one.advance()
    trainer.assert_held(one, 2)


OWNER = """
import sys, time, numpy as np
from deltackpt.standby.shared_memory import SharedMemory
one = SharedMemory(4096)
one.start_write(); one.array(0, (4096,), np.dtype('u1'))[:] = 7; one.end_write()
found = one.address
print(found.machine, found.pid, found.descriptor, found.token, sep='|', flush=True)
sys.stdin.readline(); one.start_write(); print('in', flush=True)
time.sleep(600)
"""


@pytest.mark.processes
def test_a_reader_in_another_process_keeps_the_memory_when_its_owner_is_killed(tmp_path):
    """Pinned bytes can still be copied, and an interrupted write is detected."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        machine, pid, descriptor, token = owner.stdout.readline().strip().split("|")
        address = MemoryAddress(machine, int(pid), int(descriptor), token)
        view = MemoryReader(address)
        assert view.sequence == 2
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "in\n"
        assert view.sequence == 3
        owner.send_signal(signal.SIGKILL)
        owner.wait(HANG_SECS)
        assert (view.array(0, (4096,), np.dtype("u1")) == 7).all()
        with pytest.raises(OSError):
            MemoryReader(address)


# Concurrent readers.


@pytest.mark.parametrize("pinned", [True, False])
def test_concurrent_readers_see_only_whole_steps(trainer, one, pinned):
    """With a pin each copy is one step; without a pin the sequence number reveals a change."""
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
                except errors.ServiceUnavailable:
                    continue
                view = MemoryReader(one.address)
                before = view.sequence
                assert not pinned or before == holding.sequence
                copied = bytes(view.array(0, (one.nbytes,), np.dtype("u1")))
                whole = before == view.sequence == holding.sequence
                if pinned:
                    assert whole
                    one.unpin(pin)
                found["pinned" if pinned else "whole" if whole else "changed"] += 1
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
                states[trainer.step + 1] = flat(in_state(trainer.state), one)
                trainer.save(force_base=number % 5 == 4)
                one.advance()
                count = found["pinned"]
                wait_until(lambda count=count: found["pinned"] > count or not pinned or failures)
    finally:
        stop.set()
        for thread in readers:
            thread.join(HANG_SECS)
    assert not failures, failures
    assert found["pinned" if pinned else "changed"] >= 10


def flat(expected: Tables, one: Follower) -> bytes:
    """Returns the expected memory of a replica."""
    held = loaded_state.regions(one.loaded.layout, 0, 1)
    out = np.zeros(loaded_state.nbytes(held), np.uint8)
    for region in held:
        rows = expected[table_of(one.loaded.layout, region).name][region.field]
        out[region.offset :][: region.nbytes] = rows.reshape(-1).view(np.uint8)
    return out.tobytes()


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_SECS
    while not true():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.001)


def test_a_reader_that_dies_with_a_pin_blocks_the_writer_for_a_limited_time(trainer, one):
    with mock.patch.object(shared_memory, "PIN_SECS", 0.2):
        pin, _ = one.pin(one.loaded.save.save_id, 0)
        trainer.next()
        assert one.advance()
    trainer.assert_held(one, 2)
    assert not one.renew(pin)
    with pytest.raises(errors.ServiceUnavailable, match="expected a pinned state"):
        one.read(pin, 0, 1, files=False)
    one.unpin(pin)


def test_the_writer_waits_for_a_pin_while_readers_see_one_state(trainer, one):
    first = one.loaded
    pin, _ = one.pin(first.save.save_id, 0)
    trainer.next()
    writer = threading.Thread(target=one.advance)
    writer.start()
    wait_until(lambda: one._gate._waiting_since is not None)
    assert one.loaded is first
    # Other readers may pin while the writer waits briefly, but not after a long wait.
    other, _ = one.pin(first.save.save_id, 0)
    one.unpin(other)
    with mock.patch.object(shared_memory, "_PATIENCE_SECS", 0.0):
        with pytest.raises(errors.ServiceUnavailable):
            one.pin(first.save.save_id, 0)
        assert one.renew(pin)
        one.unpin(pin)
    writer.join(HANG_SECS)
    trainer.assert_held(one, 2)


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


def test_rows_are_read_only_from_a_pinned_state(trainer):
    one = opened(trainer.root, 1, 2)
    one.advance()
    pin, holding = one.pin(one.loaded.save.save_id, 0)
    for region in loaded_state.regions(holding.layout, 1, 2):
        table = table_of(holding.layout, region)
        expected = in_state(trainer.state)[table.name][region.field]
        first, last = region.rows
        rows = one.read(pin, region.offset, region.offset + region.nbytes, files=False)
        assert rows.tobytes() == expected[first - table.offset : last - table.offset].tobytes()
    for wrong in ((pin, -1, 1), (pin, 0, one.nbytes + 1), (pin + 1, 0, 1)):
        with pytest.raises(errors.ServiceUnavailable):
            one.read(*wrong, files=False)
    with pytest.raises(errors.ServiceUnavailable, match="expected it to hold"):
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
    trainer, one, monkeypatch, force_base, in_pieces
):
    first, place = flat(in_state(trainer.state), one), one.address
    view, rows = kept(one)
    if in_pieces:
        limit_staging(monkeypatch, 100, 0.0)
    trainer.next(200, force_base=force_base)
    assert one.advance()
    assert one.address != place and view.sequence % 2 == 0
    assert bytes(rows) == first
    trainer.assert_held(one, 2)
    # The reader's writes are private. No reader maps the copy, so it is updated in place.
    rows[:] = 0
    place = one.address
    trainer.next(200, force_base=force_base)
    assert one.advance()
    assert one.address == place
    trainer.assert_held(one, 3)


def test_without_its_reader_the_memory_is_updated_in_place(trainer, one):
    place, found = one.address, kept(one)
    del found
    trainer.next()
    assert one.advance() and one.address == place
    trainer.assert_held(one, 2)


def test_without_memory_for_a_copy_the_state_stays_until_its_reader_is_gone(trainer, one):
    view, rows = kept(one)
    trainer.next()
    with mock.patch.object(follower_module, "available_bytes", return_value=1 << 20):
        with pytest.raises(errors.TooLittleMemory):
            one.advance()
        trainer.assert_held(one, 1)
        assert view.sequence == one.loaded.sequence
        del view, rows
        assert one.advance()
    trainer.assert_held(one, 2)


def test_files_other_than_tables_are_held_as_stored(tmp_path):
    with Trainer(tmp_path) as trainer:
        one = opened(tmp_path)
        for step in (1, 2):
            trainer.next(force_base=True)
            one.advance()
            files = one.loaded.files
            found = {file.name: files.array(file).tobytes() for file in files.index}
            root = tmp_path / str(step)
            dense = [path for path in (root / "dense").rglob("*") if path.is_file()]
            assert dense
            for path in (*dense, root / "digests.step.msgpack"):
                assert found[path.relative_to(root).as_posix()] == path.read_bytes()
    pin, _ = one.pin(one.loaded.save.save_id, 0)
    file = next(file for file in files.index if file.name.startswith("dense/d/"))
    start, stop = file.offset + 3, file.offset + 9
    assert one.read(pin, start, stop, files=True).tobytes() == found[file.name][3:9]
    with pytest.raises(errors.ServiceUnavailable, match="of its files, found none"):
        one.read(pin, start, files.memory.nbytes + 1, files=True)
    one.unpin(pin)
    with pytest.raises(errors.ServiceUnavailable):
        one.read(pin, start, stop, files=True)


@pytest.mark.parametrize("length", [0, 1, 1 << 20])
def test_a_manifest_with_a_digest_of_its_own_digests_is_damaged(tmp_path, length):
    with Trainer(tmp_path) as trainer:
        trainer.next(force_base=True)
    save = stored_saves.read_save(tmp_path / "1")
    name = "digests.step.msgpack"
    files = without_blocks(read_digests(tmp_path / "1" / name))
    head = dataclasses.replace(save.head, files={**files, name: (length, 0, 0)})
    with pytest.raises(errors.Damaged, match=f"1/{name}: expected {length} bytes"):
        cached_files.read(dataclasses.replace(save, head=head), 1 << 30)


def test_files_that_do_not_fit_are_left_to_storage(trainer):
    one = opened(trainer.root, memory_bytes=BESIDE + bytes_of_rows(trainer.state) + 1000)
    trainer.assert_applied(one)
    assert one.loaded.files is None
