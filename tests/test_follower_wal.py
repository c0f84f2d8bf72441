# SPDX-License-Identifier: Apache-2.0
"""A follower of a directory with a WAL holds what a restore would return, or reports why not.

The state machine is that of the WAL (``test_wal_invariants``), with followers that poll in between.
After any sequence of appends, saves, failures, torn writes, kills and restores, they hold the bits
of exactly the step and point that they name, and in the end the newest ones.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax
import model
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule
from made_up_wals import records_in
from test_follower import held_regions, in_state
from test_wal_invariants import COLLECTOR, LogMachine

import deltackpt
from deltackpt import touched
from deltackpt.errors import (
    DamagedWal,
    RestoreError,
    ServiceUnavailable,
    StepNotFound,
    StorageError,
)
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.layers.targets import Targets, empty_buffers, targets_of
from deltackpt.reading import chains, dense_state, point_files, reader, stored_saves, wal_rows
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalReader, newest_plan
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby import candidates
from deltackpt.standby import follower as follower_module
from deltackpt.standby import wal as followed
from deltackpt.standby.follower import Follower
from deltackpt.storage.store import store_path
from deltackpt.testing import Disk, DiskCall


def logs_of(root: Path) -> WalReader:
    return WalReader(store_path(root / "log"))


def replay(plan: ReplayPlan, targets: Targets, layout: Layout) -> dict[str, np.ndarray]:
    """Replays records onto the buffers of a step; returns the rows of each table in them."""
    seen, records = SeenRows(layout), wal_rows.layers_of(plan, layout)
    reader.fill((), targets, records=records, seen=seen, over_parent=True)
    return seen.by_table()


def from_storage(root: Path, save_id: SaveId, point: RecoveryPoint | None) -> RestoredTables:
    """Restores a step, and a point above it if one is given, from storage."""
    found = reader.restore_tables(chains.read_chain(root / str(save_id.step)))
    assert found.chain[-1].save_id == save_id
    if point is not None:
        plan = logs_of(root).read().plan(point, save_id)
        assert plan is not None
        replay(plan, targets_of(found.buffers, found.layout), found.layout)
    return found


def assert_holds_storage(one: Follower, root: Path) -> None:
    """Asserts that its rows are those of the step and point that it names."""
    holding = one.loaded
    assert holding is not None
    expected = from_storage(root, holding.save.save_id, holding.point).fields
    for table, field, first, rows in held_regions(one):
        same = expected[table][field][first : first + len(rows)]
        assert rows.tobytes() == same.tobytes(), (table, field, holding.point)
    if holding.point is None or holding.files is None or holding.files_of != holding.point:
        return
    plan = logs_of(root).read().plan(holding.point, holding.save.save_id)
    assert plan is not None
    files = {file.name: holding.files.array(file) for file in holding.files.index}
    found = point_files.state_of(files, holding.layout)
    assert found.items == plan.items()
    dense = dense_state.at_point(plan)
    assert {**found.dense.values} == dense.values and {**found.dense.files} == dense.files
    targets = targets_of({}, holding.layout)
    rows = replay(plan, targets, holding.layout)
    assert {name: held.tolist() for name, held in found.rows.items()} == {
        name: held.tolist() for name, held in rows.items()
    }


def assert_newest(one: Follower, root: Path, *, soft: bool) -> None:
    """Asserts that it holds the newest step or point that a restore would choose."""
    steps = {}
    for path in root.iterdir():
        if path.name.isdecimal():
            steps[int(path.name)] = stored_saves.read_info(path, "embeddings").save_id
    plan = newest_plan(logs_of(root).read(), steps, soft=soft)
    assert one.loaded is not None
    held = one.loaded.save.save_id, one.loaded.point
    assert held == ((steps[max(steps)], None) if plan is None else (plan.step, plan.point))


class FollowedMachine(LogMachine):
    """Drives a trainer like ``LogMachine``; followers read its directory."""

    def __init__(self):
        super().__init__()
        self.followers = {}
        self.patches = contextlib.ExitStack()

    @initialize(pieces=st.booleans())
    def follow(self, pieces):
        if pieces:
            for name, value in (("_LEAST_STAGING_BYTES", 100), ("_STAGING_SHARE", 0.0)):
                self.patches.enter_context(mock.patch.object(follower_module, name, value))
        # Retry torn records at once.
        for module in (followed, candidates):
            self.patches.enter_context(mock.patch.object(module, "_REFUSED_SECS", 0.0))

    def teardown(self):
        super().teardown()
        self.patches.close()

    def open(self, root):
        if self.manager is not None:
            # Keep the directory at one path, so that followers see the new trainer.
            root = root.rename(self.folder / "0")
        super().open(root)

    def opened(self, shard, soft):
        key = shard, soft
        if key not in self.followers:
            with contextlib.suppress(StorageError):
                self.followers[key] = Follower(
                    self.root, item="embeddings", shard=shard[0], shards=shard[1], soft=soft
                )
        return self.followers.get(key)

    @rule(shard=st.sampled_from([(0, 1), (1, 2), (5, 7)]), soft=st.booleans())
    def poll(self, shard, soft):
        one = self.opened(shard, soft)
        if one is not None:
            self.advance(one)

    @rule(soft=st.booleans())
    def poll_when_all_is_written(self, soft):
        self.quietly(self.manager.wait_until_finished)
        self.quietly(self.manager.wait_appended)
        for shard in ((0, 1), (1, 2), (5, 7)):
            one = self.opened(shard, soft)
            if one is not None and self.advance(one) and one.health == "follows":
                assert_newest(one, self.root, soft=soft)

    def advance(self, one) -> bool:
        """Advances while the trainer saves nothing; returns whether it holds something."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.quietly(self.manager.wait_until_finished)
            with contextlib.suppress(RestoreError):
                one.advance()
        if one.loaded is None:
            return False
        # Trimmed records cannot be read again, and no step that it has seen contains them. Neither
        # can a deleted step, which it keeps until there is another one.
        with contextlib.suppress(FileNotFoundError, StepNotFound):
            if one.loaded.point is None or one.loaded.point in logs_of(self.root).read().points():
                try:
                    assert_holds_storage(one, self.root)
                except DamagedWal:  # Its file was damaged after the record was applied.
                    self.assert_holds_given(one)
        return True

    def assert_holds_given(self, one):
        """Asserts that it holds rows given at its point, raw or as a codec decodes them."""
        states = self.given.get(one.loaded.point.step) or self.left[one.loaded.point.step]
        for table, field, first, rows in held_regions(one):
            allowed = np.zeros(len(rows), bool)
            for state in states:
                given = in_state(state)[table][field]
                forms = [given]
                if field == "values":
                    coded = self.codecs - {"raw", "lossless"}
                    forms += [model.decoded(codec, given) for codec in coded]
                for form in forms:
                    same = form[first : first + len(rows)] == rows
                    allowed |= same.reshape(len(rows), -1).all(axis=1)
            assert allowed.all(), (table, field, one.loaded.point)


TestFollowed = FollowedMachine.TestCase
TestFollowed.pytestmark = [COLLECTOR]
TestFollowed.settings = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)


# Fixed sequences.


class Trainer:
    """A manager with a WAL, and the states that were given to it."""

    def __init__(self, root: Path, codec="raw", policy=None, durability="process", **log):
        self.root = root
        how = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=codec)
        self.manager = deltackpt.CheckpointManager(
            root,
            handlers={"embeddings": how},
            options=deltackpt.ManagerOptions(
                deltas=deltackpt.DeltaOptions(policy=policy or deltackpt.policies.Consecutive()),
                writes=deltackpt.WriteOptions(durability=durability),
                wal=deltackpt.WalOptions(**log),
            ),
        )
        self.state = model.initial()
        self.touched = model.new_touched(self.state)
        self.step = 0
        self.states: dict[int, dict] = {}

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        self.manager.close()

    def train(self) -> dict[str, np.ndarray]:
        self.step += 1
        self.state, ids = model.move(self.state, 1000 * len(self.states) + self.step)
        self.touched = touched.mark(self.touched, ids)
        self.states[self.step] = self.state
        return {name: np.unique(rows) for name, rows in ids.items()}

    def log(self, **options) -> None:
        self.train()
        self.mark(**options)

    def mark(self, **options) -> None:
        self.manager.append(
            self.step, self.state, touched=self.touched, items={"at": self.step}, **options
        )
        self.manager.wait_appended()

    def save(self) -> None:
        self.train()
        self.manager.save(self.step, self.state, touched=self.touched)
        self.manager.wait_until_finished()

    def go_on_from(self, step: int, **options) -> None:
        found = self.manager.restore(step, self.state, **options)
        self.state, self.touched, self.step = found.state, found.touched, found.step

    @property
    def segment(self) -> Path:
        return max(
            self.root.glob("log/*/0/*.seg"), key=lambda path: (int(path.parts[-3]), path.name)
        )


def opened(root: Path, **options) -> Follower:
    return Follower(root, item="embeddings", **options)


def assert_at(one: Follower, trainer: Trainer, step: int, above: int | None) -> None:
    """Asserts that it holds a step: as a point above another step, or the step itself."""
    holding = one.loaded
    assert holding is not None
    found = None if holding.point is None else holding.point.step
    assert (holding.save.save_id.step, found) == ((step, None) if above is None else (above, step))
    assert_rows(one, trainer.states[step])
    assert_holds_storage(one, trainer.root)


def assert_rows(one: Follower, state: dict) -> None:
    """Asserts that its rows are those of a state."""
    expected = in_state(state)
    for table, field, first, rows in held_regions(one):
        same = expected[table][field][first : first + len(rows)]
        assert rows.tobytes() == same.tobytes(), (table, field)


def flipped(trainer: Trainer, where: str) -> bytes:
    """The newest segment with a bit flipped in the header or the rows of its newest record."""
    record = records_in(trainer.segment.parent)[-1]
    at = record.layer.start + 24
    if where == "rows":
        [(at, _)] = record.chunks_of(record.rows[0].name, "values")
    data = bytearray(trainer.segment.read_bytes())
    data[at] ^= 1
    return bytes(data)


def test_records_are_applied_as_they_are_written(tmp_path):
    with Trainer(tmp_path, dense_every=3) as trainer:
        trainer.save()
        one, full = opened(tmp_path), opened(tmp_path, soft=False)
        for _ in range(7):
            trainer.log()
            assert one.advance()
            assert_at(one, trainer, trainer.step, above=1)
            assert one.health == "follows" and one.loaded.lag_secs < 60
            is_full = full.advance() and full.loaded.point is not None
            assert is_full == (trainer.step in (4, 7))
            assert not one.advance() and not full.advance()
        assert one.loaded.files_of == full.loaded.point
        assert_at(full, trainer, full.loaded.point.step, above=1)
        # The next step supersedes all of them.
        trainer.save()
        for each in (one, full):
            assert each.advance()
            assert_at(each, trainer, trainer.step, above=None)


def test_a_step_committed_below_the_held_point_does_not_move_the_follower_back(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        trainer.log()
        trainer.train()
        trainer.manager.save(3, trainer.state, touched=trainer.touched)
        trainer.log()
        one.advance()
        trainer.manager.wait_until_finished()
        seen = []
        real = follower_module.LoadedState

        def holding(**fields):
            seen.append(real(**fields))
            return seen[-1]

        with mock.patch.object(follower_module, "LoadedState", holding):
            one.advance()
        assert all(found.point is not None and found.point.step == 4 for found in seen)
        assert_at(one, trainer, 4, above=3)


@pytest.mark.parametrize("to", [3, 1], ids=["point", "step"])
def test_records_that_training_abandoned_are_dropped(tmp_path, to):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        for _ in range(4):
            trainer.log()
    one = opened(tmp_path)
    one.advance()
    assert_at(one, trainer, 5, above=1)
    with Trainer(tmp_path) as last:
        last.states, last.state = trainer.states, trainer.state
        last.go_on_from(to)
        for _ in range(2):
            last.log()
            assert one.advance()
            assert_at(one, last, last.step, above=1)


def test_a_record_that_becomes_void_after_it_was_applied_is_undone(tmp_path):
    """The record was written and read, but could not be fsynced, so it does not count."""
    with Trainer(tmp_path, durability="power") as trainer:
        trainer.save()
        trainer.log()
        one = opened(tmp_path)
        one.advance()
        applied = []

        def refuse(_: DiskCall) -> None:
            one.advance()
            applied.append(one.loaded.point.step)
            raise OSError(5, "injected")

        trainer.train()
        with Disk(tmp_path) as disk, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disk.on("fdatasync", refuse, times=1)
            trainer.manager.append(3, trainer.state, touched=trainer.touched)
            with contextlib.suppress(deltackpt.errors.AppendFailed):
                trainer.manager.wait_appended()
            assert applied == [3]
            trainer.log()
        one.advance()
        assert_at(one, trainer, 4, above=1)


@pytest.mark.parametrize("where", ["header", "rows"])
def test_a_damaged_record_is_not_applied_and_is_reported_until_a_newer_step(tmp_path, where):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        trainer.log()
        one = opened(tmp_path)
        one.advance()
        trainer.log()
        trainer.segment.write_bytes(flipped(trainer, where))
        trainer.log()
        assert not one.advance()
        assert_at(one, trainer, 2, above=1)
        assert ".seg, record" in one.health
        assert not one.advance() and ".seg, record" in one.health
        trainer.save()
        assert one.advance() and one.health == "follows"
        assert_at(one, trainer, 5, above=None)
        trainer.log()
        assert one.advance() and one.health == "follows"
        assert_at(one, trainer, 6, above=5)


@pytest.mark.parametrize("copied", [False, True])
def test_a_record_damaged_after_it_was_applied_stays_held(tmp_path, copied):
    """Memory has what was written; a restore from storage reports the damage."""
    with Trainer(tmp_path / "root") as trainer:
        trainer.save()
        trainer.log()
        trainer.log()
        one = opened(tmp_path / "root")
        one.advance()
        segment, data = trainer.segment, flipped(trainer, "rows")
        if copied:
            segment.unlink()
        segment.write_bytes(data)
        assert not one.advance() and one.health == "follows"
        assert one.loaded.point.step == 3
        assert_rows(one, trainer.states[3])
        with pytest.raises(DamagedWal, match="seg, record"):
            assert_holds_storage(one, tmp_path / "root")
        trainer.save()
        assert one.advance() and one.health == "follows"
        assert_at(one, trainer, 4, above=None)


def test_a_copy_that_replaces_the_directory_is_read_from_scratch(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    with Trainer(root) as trainer:
        trainer.save()
        trainer.log()
        trainer.log()
    one = opened(root)
    one.advance()
    assert_at(one, trainer, 3, above=1)
    shutil.copytree(root, copy)
    (copy / trainer.segment.relative_to(root)).write_bytes(flipped(trainer, "header"))
    root.rename(tmp_path / "old")
    copy.rename(root)
    assert one.advance() and ".seg, record" in one.health
    assert_at(one, trainer, 2, above=1)


def test_with_an_unreadable_epoch_header_the_follower_holds_the_step(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        trainer.log()
    one = opened(tmp_path)
    one.advance()
    [head] = tmp_path.glob("log/*.msgpack")
    [copy] = tmp_path.glob("log/*/head.msgpack")
    copy.unlink()
    whole = head.read_bytes()
    head.write_bytes(whole[:-1])
    assert one.advance()
    assert one.loaded.point is None and "0.msgpack" in one.health
    head.write_bytes(whole)
    assert one.advance() and one.health == "follows"
    assert_at(one, trainer, 2, above=1)


def test_rows_in_a_lossy_record_but_not_in_the_next_step_come_from_the_step(tmp_path):
    """The caller names untouched rows: the record encodes them, but no delta has them."""
    with Trainer(
        tmp_path, codec=deltackpt.policies.CodecChoice(delta="int8", base="raw")
    ) as trainer:
        trainer.save()
        one = opened(tmp_path)
        one.advance()
        ids = trainer.train()
        more = {name: np.union1d(rows, np.arange(5)) for name, rows in ids.items()}
        trainer.mark(ids=more)
        assert one.advance() and one.loaded.point is not None
        assert_holds_storage(one, tmp_path)
        trainer.save()
        assert one.advance() and one.loaded.point is None
        assert_holds_storage(one, tmp_path)


# Restores from a follower.


class Source:
    """A follower of all rows as a ``RowSource``."""

    def __init__(self, follower: Follower):
        self.follower = follower

    @contextlib.contextmanager
    def tables(self, save, wanted, *, timeout_secs, point=None):
        pin, holding = self.follower.pin(save.info.save_id, timeout_secs, point)
        buffers, targets = empty_buffers(save.layout, wanted)
        for target in targets.all:
            for table in save.layout.tables:
                start = max(table.offset, target.rows[0])
                stop = min(table.offset + table.rows, target.rows[1])
                if table.group == target.group and start < stop:
                    rows = self.follower.read(pin, target.group, target.field, start, stop)
                    target.buffer[start - target.rows[0] : stop - target.rows[0]] = rows
        whole = point is not None and holding.point == point
        files = None
        if holding.files is not None and (point is None or whole):
            held = holding.files
            files = {file.name: held.array(file).copy() for file in held.index}
        yield RestoredTables(
            buffers=buffers,
            layout=save.layout,
            chain=holding.chain,
            bytes_read=0,
            seconds=0.0,
            source="service",
            files=files,
            point=whole,
        )
        self.follower.unpin(pin)


@pytest.mark.parametrize("dense", ["whole", "delta"])
@pytest.mark.parametrize("policy", [deltackpt.policies.Consecutive(), deltackpt.policies.OneShot()])
def test_a_held_point_is_restored_without_replay(tmp_path, policy, dense):
    with Trainer(tmp_path, policy=policy, dense=dense) as trainer:
        trainer.save()
        for _ in range(3):
            trainer.log()
    one = opened(tmp_path)
    one.advance()
    with Trainer(tmp_path, policy=policy) as last:
        found = last.manager.restore_latest(trainer.state, service=Source(one))
        assert found.service_error is None
        assert (found.step, found.source, found.items) == (4, ("service",), {"at": 4})
        model.assert_same(found.state, trainer.states[4])
        # The rows of the records are in the deltas that follow.
        last.state, last.touched, last.step = found.state, found.touched, found.step
        last.save()
        last.save()
        model.assert_same(last.manager.restore(6, found.state, service=None).state, last.states[6])


@pytest.mark.parametrize("marks", [0, 1])
def test_a_point_is_replayed_onto_the_held_state_below_it(tmp_path, marks):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        for _ in range(marks):
            trainer.log()
        one.advance()
        trainer.log()
    with Trainer(tmp_path) as last:
        found = last.manager.restore_latest(trainer.state, service=Source(one))
        assert found.service_error is None and found.source == ("service", "wal")
        assert found.items == {"at": trainer.step}
        model.assert_same(found.state, trainer.state)


def test_a_step_below_the_held_point_comes_from_storage(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        trainer.log()
        one = opened(tmp_path)
        one.advance()
        save_id = one.loaded.save.save_id
        with pytest.raises(ServiceUnavailable, match="found recovery point 2 of WAL epoch 0 above"):
            one.pin(save_id, 0)
        point = one.loaded.point
        dead = point._replace(save_id=SaveId(save_id.run, 2, point.save_id.attempt - 1))
        with pytest.raises(ServiceUnavailable):
            one.pin(save_id, 0, dead)
        found = trainer.manager.restore(1, trainer.state, service=Source(one))
        assert isinstance(found.service_error, ServiceUnavailable)
        assert found.source == ("directory",)
        model.assert_same(found.state, trainer.states[1])


@pytest.mark.parametrize("shard", [(0, 1), (1, 2), (5, 7)])
@pytest.mark.parametrize("codec", ["raw", "adaptive4"])
def test_records_of_some_columns_and_of_all_are_applied_in_order(tmp_path, codec, shard):
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("y",))
    columns = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, "y"))
    whole = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
    with Trainer(
        tmp_path, codec=deltackpt.policies.CodecChoice(delta=codec, base="raw")
    ) as trainer:
        trainer.save()
        one = opened(tmp_path, shard=shard[0], shards=shard[1])
        for number, sharding in enumerate((columns, columns, whole, columns, whole, columns)):
            trainer.train()
            tables = {
                name: jax.device_put(np.asarray(table), sharding)
                for name, table in trainer.state["tables"].items()
            }
            trainer.state = {**trainer.state, "tables": tables}
            trainer.mark()
            if number != 3:
                assert one.advance()
                assert one.loaded.point.step == trainer.step
                assert_holds_storage(one, tmp_path)
