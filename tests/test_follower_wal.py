# SPDX-License-Identifier: Apache-2.0
"""A follower of a directory with a WAL holds what a restore would return, or reports why not.

The state machine is that of the WAL (``test_wal_invariants``), with followers that poll in between.
After any sequence of appends, saves, failures, torn writes, kills and restores, they hold the bits
of exactly the step and point that they name, and in the end the newest ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from test_follower import assert_rows, held_regions, in_state
from test_wal_invariants import COLLECTOR, LogMachine

import deltackpt
from deltackpt import errors
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.layers.targets import Targets, empty_buffers, targets_of
from deltackpt.policies import CodecChoice, Consecutive, OneShot
from deltackpt.reading import chains, dense_state, reader, stored_saves, wal_rows
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalReader, newest_plan
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.standby import follower as follower_module
from deltackpt.standby import loaded_state
from deltackpt.standby import tailer as followed
from deltackpt.standby.follower import Follower
from deltackpt.storage.store import store_path
from deltackpt.testing import Disk, DiskCall, states
from deltackpt.testing.training_run import TrainingRun


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
    assert_rows(one, from_storage(root, holding.save.save_id, holding.point).fields)
    if holding.point is None or holding.files is None or holding.files_of != holding.point:
        return
    plan = logs_of(root).read().plan(holding.point, holding.save.save_id)
    assert plan is not None
    files = {file.name: holding.files.array(file) for file in holding.files.index}
    found = dense_state.state_of(files, holding.layout)
    assert found.items == plan.items()
    dense = dense_state.at_point(plan)
    assert {**found.dense.values} == dense.values and {**found.dense.files} == dense.files
    rows = replay(plan, targets_of({}, holding.layout), holding.layout)
    np.testing.assert_equal(found.rows, rows)


def newest(root: Path, *, soft: bool) -> tuple[SaveId, RecoveryPoint | None]:
    """The newest step or point that a restore would choose."""
    steps = {
        int(path.name): stored_saves.read_info(path, "embeddings").save_id
        for path in root.iterdir()
        if path.name.isdecimal()
    }
    plan = newest_plan(logs_of(root).read(), steps, soft=soft)
    return (steps[max(steps)], None) if plan is None else (plan.step, plan.point)


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
        self.patches.enter_context(mock.patch.object(followed, "_REFUSED_SECS", 0.0))

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
            with contextlib.suppress(errors.StorageError):
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
            if one is not None and self.advance(one) and self.is_healthy(one):
                assert self.held(one) == newest(self.root, soft=soft)

    def show(self):
        for one in self.followers.values():
            self.advance(one)

    def is_healthy(self, one):
        return one.health == "follows"

    def held(self, one):
        return one.loaded.save.save_id, one.loaded.point

    def advance(self, one) -> bool:
        """Advances while the trainer saves nothing; returns whether it holds something."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.quietly(self.manager.wait_until_finished)
            with contextlib.suppress(errors.RestoreError):
                one.advance()
        if one.loaded is None:
            return False
        # Trimmed records cannot be read again, and no step that it has seen contains them. Neither
        # can a deleted step, which it keeps until there is another one.
        with contextlib.suppress(FileNotFoundError, errors.StepNotFound):
            if one.loaded.point is None or one.loaded.point in logs_of(self.root).read().points():
                try:
                    assert_holds_storage(one, self.root)
                except errors.DamagedWal:  # Its file was damaged after the record was applied.
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
    max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=[*HealthCheck]
)


# Fixed sequences.


class Trainer(TrainingRun):
    """A run with a WAL, which waits for each save and record."""

    def __init__(
        self, root: Path, codec="raw", policy=None, durability="process", always=(), **log
    ):
        options = deltackpt.ManagerOptions(
            deltas=deltackpt.DeltaOptions(policy=policy or Consecutive()),
            writes=deltackpt.WriteOptions(durability=durability),
            wal=deltackpt.WalOptions(**log),
        )
        tables = dataclasses.replace(states.tables(codec), always=always)
        super().__init__(root, options=options, tables=tables, move=self._moved)
        self.open()

    def _moved(self, state, touched, step):
        """Differs from the state that training abandoned at this step."""
        return states.train(state, touched, 1000 * len(self.states) + step)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_) -> None:
        self.manager.close()

    def log(self, records: int = 1) -> None:
        for _ in range(records):
            self.train()
            self.mark()

    def mark(self, **options) -> None:
        items = {"at": self.step}
        self.manager.append(self.step, self.state, touched=self.touched, items=items, **options)
        self.manager.wait_appended()

    def resume_from(self, step: int) -> None:
        self.continue_from(self.manager.restore(step, self.state))

    @property
    def segment(self) -> Path:
        return max(
            self.root.glob("log/*/0/*.seg"), key=lambda path: (int(path.parts[-3]), path.name)
        )

    def assert_at(self, one: Follower, step: int, above: int | None) -> None:
        """Asserts that a follower holds a step: as a point above another one, or the step."""
        loaded = one.loaded
        assert loaded is not None
        found = None if loaded.point is None else loaded.point.step
        expected = (step, None) if above is None else (above, step)
        assert (loaded.save.save_id.step, found) == expected
        assert_rows(one, in_state(self.states[step]))
        assert_holds_storage(one, self.root)

    def assert_applied(self, one: Follower, above: int | None) -> None:
        """Asserts that a follower applies the newest step or point."""
        assert one.advance()
        self.assert_at(one, self.step, above)


def saved(root: Path, records: int = 0, **options) -> Trainer:
    """A trainer that has saved step 1, and appended records above it."""
    trainer = Trainer(root, **options)
    trainer.save()
    trainer.log(records)
    return trainer


def opened(root: Path, **options) -> Follower:
    return Follower(root, item="embeddings", **options)


def holding(trainer: Trainer, **options) -> Follower:
    """A follower that holds the newest step or point of a trainer."""
    one = opened(trainer.root, **options)
    trainer.assert_applied(one, None if trainer.step == 1 else 1)
    return one


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
    with saved(tmp_path, dense_every=3) as trainer:
        one, full = opened(tmp_path), opened(tmp_path, soft=False)
        for _ in range(7):
            trainer.log()
            trainer.assert_applied(one, above=1)
            assert one.health == "follows" and one.loaded.lag_secs < 60
            is_full = full.advance() and full.loaded.point is not None
            assert is_full == (trainer.step in (4, 7))
            assert not one.advance() and not full.advance()
        assert one.loaded.files_of == full.loaded.point
        trainer.assert_at(full, full.loaded.point.step, above=1)
        # The next step supersedes all of them.
        trainer.save()
        for each in (one, full):
            trainer.assert_applied(each, above=None)


def test_a_step_committed_below_the_held_point_does_not_move_the_follower_back(tmp_path):
    with saved(tmp_path) as trainer:
        one = opened(tmp_path)
        trainer.log()
        trainer.train()
        trainer.manager.save(3, trainer.state, touched=trainer.touched)
        trainer.log()
        one.advance()
        trainer.manager.wait_until_finished()
        seen = []
        real = follower_module.LoadedState

        def loaded(**fields):
            seen.append(real(**fields))
            return seen[-1]

        with mock.patch.object(follower_module, "LoadedState", loaded):
            one.advance()
        assert all(found.point is not None and found.point.step == 4 for found in seen)
        trainer.assert_at(one, 4, above=3)


@pytest.mark.parametrize("to", [3, 1], ids=["point", "step"])
def test_records_that_training_abandoned_are_dropped(tmp_path, to):
    with saved(tmp_path, 4) as trainer:
        pass
    one = holding(trainer)
    with Trainer(tmp_path) as last:
        last.states, last.state = trainer.states, trainer.state
        last.resume_from(to)
        for _ in range(2):
            last.log()
            last.assert_applied(one, above=1)


def test_a_record_that_becomes_void_after_it_was_applied_is_undone(tmp_path):
    """The record was written and read, but could not be fsynced, so it does not count."""
    with saved(tmp_path, 1, durability="power") as trainer:
        one = holding(trainer)
        applied = []

        def refuse(_: DiskCall) -> None:
            one.advance()
            applied.append(one.loaded.point.step)
            raise OSError(5, "injected")

        with Disk(tmp_path) as disk, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disk.on("fdatasync", refuse, times=1)
            with contextlib.suppress(errors.AppendFailed):
                trainer.log()
            assert applied == [3]
            trainer.log()
        one.advance()
        trainer.assert_at(one, 4, above=1)


@pytest.mark.parametrize("where", ["header", "rows"])
def test_a_damaged_record_is_not_applied_and_is_reported_until_a_newer_step(tmp_path, where):
    with saved(tmp_path, 1) as trainer:
        one = holding(trainer)
        trainer.log()
        trainer.segment.write_bytes(flipped(trainer, where))
        trainer.log()
        for _ in range(2):
            assert not one.advance() and ".seg, record" in one.health
            trainer.assert_at(one, 2, above=1)
        trainer.save()
        trainer.assert_applied(one, above=None)
        assert one.health == "follows"
        trainer.log()
        trainer.assert_applied(one, above=5)
        assert one.health == "follows"


@pytest.mark.parametrize("copied", [False, True])
def test_a_record_damaged_after_it_was_applied_stays_held(tmp_path, copied):
    """Memory has what was written; a restore from storage reports the damage."""
    with saved(tmp_path, 2) as trainer:
        one = holding(trainer)
        segment, data = trainer.segment, flipped(trainer, "rows")
        if copied:
            segment.unlink()
        segment.write_bytes(data)
        assert not one.advance() and one.health == "follows"
        assert one.loaded.point.step == 3
        assert_rows(one, in_state(trainer.states[3]))
        with pytest.raises(errors.DamagedWal, match="seg, record"):
            assert_holds_storage(one, tmp_path)
        trainer.save()
        trainer.assert_applied(one, above=None)
        assert one.health == "follows"


def test_a_copy_that_replaces_the_directory_is_read_from_scratch(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    with saved(root, 2) as trainer:
        pass
    one = holding(trainer)
    shutil.copytree(root, copy)
    (copy / trainer.segment.relative_to(root)).write_bytes(flipped(trainer, "header"))
    root.rename(tmp_path / "old")
    copy.rename(root)
    assert one.advance() and ".seg, record" in one.health
    trainer.assert_at(one, 2, above=1)


def test_with_an_unreadable_epoch_header_the_follower_holds_the_step(tmp_path):
    with saved(tmp_path, 1) as trainer:
        pass
    one = holding(trainer)
    [head] = tmp_path.glob("log/*.msgpack")
    [copy] = tmp_path.glob("log/*/head.msgpack")
    copy.unlink()
    whole = head.read_bytes()
    head.write_bytes(whole[:-1])
    assert one.advance()
    assert one.loaded.point is None and "0.msgpack" in one.health
    head.write_bytes(whole)
    trainer.assert_applied(one, above=1)
    assert one.health == "follows"


def test_while_the_wal_cannot_be_read_the_follower_keeps_its_point(tmp_path, monkeypatch):
    def refuse() -> None:
        raise errors.StorageError("no broker answers")

    with saved(tmp_path, 1) as trainer:
        one = holding(trainer)
        trainer.log()
        with monkeypatch.context() as patch:
            patch.setattr(one._tailer._reader, "read", refuse)
            assert not one.advance() and one.health == "follows; no broker answers"
            trainer.assert_at(one, 2, above=1)
        trainer.assert_applied(one, above=1)
        assert one.health == "follows"
        monkeypatch.setattr(one._tailer._reader, "read", refuse)
        # Another epoch, which may not continue from the point.
        trainer.resume_from(1)
        trainer.log()
        assert one.advance()
        trainer.assert_at(one, 1, above=None)


@pytest.mark.parametrize("always", [(), "accumulator"])
def test_rows_in_a_lossy_record_but_not_in_the_next_step_come_from_the_step(tmp_path, always):
    """The caller names untouched rows: the record encodes them, but no delta has them."""
    codec = CodecChoice(delta="int8", base="raw")
    with saved(tmp_path, codec=codec, always=always) as trainer:
        one = holding(trainer)
        trainer.train()
        ids = model.moved(trainer.states[1], trainer.state)
        more = {f"tables/{name}": np.union1d(rows, np.arange(5)) for name, rows in ids.items()}
        trainer.mark(ids=more)
        assert one.advance() and one.loaded.point is not None
        assert_holds_storage(one, tmp_path)
        trainer.save()
        assert one.advance() and one.loaded.point is None
        assert_holds_storage(one, tmp_path)


@pytest.mark.parametrize("logged", [False, True])
def test_a_return_to_an_earlier_state_leaves_nothing_of_the_records_since(tmp_path, logged):
    """As after a loss spike: the rows of these records are in no later delta or record."""
    with saved(tmp_path) as trainer:
        kept = trainer.state, trainer.touched
        trainer.log(3)
        one = holding(trainer)
        trainer.state, trainer.touched = kept
        if logged:
            trainer.log()
            options = deltackpt.ManagerOptions(access="read", multiprocess=False)
            handlers = {"embeddings": states.tables("raw")}
            with deltackpt.CheckpointManager(
                tmp_path, handlers=handlers, options=options
            ) as reader:
                found = reader.restore_latest(trainer.state, service=Source(one))
            assert found.step == trainer.step
            model.assert_same(found.state, trainer.state)
        else:
            trainer.save()
        trainer.assert_applied(one, above=None)
        # Later records continue from that step.
        trainer.log(2)
        trainer.assert_applied(one, above=5)


# Restores from a follower.


class Source:
    """A follower of all rows as a ``RowSource``."""

    def __init__(self, follower: Follower):
        self.follower = follower

    @contextlib.contextmanager
    def tables(self, save, wanted, *, timeout_secs, point=None):
        pin, holding = self.follower.pin(save.info.save_id, timeout_secs, point)
        buffers, targets = empty_buffers(save.layout, wanted)
        for region in loaded_state.regions(save.layout, 0, 1):
            stop = region.offset + region.nbytes
            data = self.follower.read(pin, region.offset, stop, files=False)
            rows = data.view(region.dtype).reshape(-1, *region.trailing)
            for target in targets.over(
                region.group, region.field, region.rows, region.columns or (0, 1)
            ):
                first, last = row_blocks.common(region.rows, target.rows)
                part = rows[first - region.rows[0] : last - region.rows[0]]
                target.buffer[first - target.rows[0] : last - target.rows[0]] = part
        whole = point is not None and holding.point == point
        files, held = None, holding.files
        if held is not None and (point is None or whole):
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
@pytest.mark.parametrize("policy", [Consecutive(), OneShot()])
def test_a_held_point_is_restored_without_replay(tmp_path, policy, dense):
    with saved(tmp_path, 3, policy=policy, dense=dense) as trainer:
        pass
    source = Source(holding(trainer))
    with Trainer(tmp_path, policy=policy) as last:
        last.states = trainer.states
        found = last.manager.restore_latest(trainer.state, service=source)
        assert found.service_error is None
        assert (found.step, found.source, found.items) == (4, ("service",), {"at": 4})
        # The rows of the records are in the deltas that follow.
        last.continue_from(found)
        last.save()
        last.save()
        last.check(last.manager.restore(6, found.state, service=None))


@pytest.mark.parametrize("marks", [0, 1])
def test_a_point_is_replayed_onto_the_held_state_below_it(tmp_path, marks):
    with saved(tmp_path, marks) as trainer:
        source = Source(holding(trainer))
        trainer.log()
    with Trainer(tmp_path) as last:
        found = last.manager.restore_latest(trainer.state, service=source)
        assert found.service_error is None and found.source == ("service", "wal")
        assert found.items == {"at": trainer.step}
        model.assert_same(found.state, trainer.state)


def test_a_step_below_the_held_point_comes_from_storage(tmp_path):
    with saved(tmp_path, 1) as trainer:
        one = holding(trainer)
        save_id, point = one.loaded.save.save_id, one.loaded.point
        with pytest.raises(
            errors.ServiceUnavailable, match="found recovery point 2 of WAL epoch 0 above"
        ):
            one.pin(save_id, 0)
        dead = point._replace(save_id=SaveId(save_id.run, 2, point.save_id.attempt - 1))
        with pytest.raises(errors.ServiceUnavailable):
            one.pin(save_id, 0, dead)
        found = trainer.manager.restore(1, trainer.state, service=Source(one))
        assert isinstance(found.service_error, errors.ServiceUnavailable)
        assert found.source == ("directory",)
        trainer.check(found)


@pytest.mark.parametrize("shard", [(0, 1), (1, 2), (5, 7)])
@pytest.mark.parametrize("codec", ["raw", "adaptive4"])
def test_records_of_some_columns_and_of_all_are_applied_in_order(tmp_path, codec, shard):
    devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("y",))
    columns = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(None, "y"))
    whole = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())
    with saved(tmp_path, codec=CodecChoice(delta=codec, base="raw")) as trainer:
        one = opened(tmp_path, shard=shard[0], shards=shard[1])
        for number, sharding in enumerate((columns, columns, whole, columns, whole, columns)):
            trainer.train()
            tables = trainer.state["tables"]
            tables = {
                name: jax.device_put(np.asarray(rows), sharding) for name, rows in tables.items()
            }
            trainer.state = {**trainer.state, "tables": tables}
            trainer.mark()
            if number != 3:
                assert one.advance()
                assert one.loaded.point.step == trainer.step
                assert_holds_storage(one, tmp_path)
