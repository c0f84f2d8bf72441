# SPDX-License-Identifier: Apache-2.0
"""Guarantees of ``append()`` for a training loop of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import model
import numpy as np
import pytest
from damages import flip
from test_follower import grown, wait_until

import deltackpt
from deltackpt import RecoveryPoint, touched
from deltackpt.errors import OptionError, SaveFailed, StorageError, TrackingError, WaitTimeout
from deltackpt.layers import merge
from deltackpt.maintenance.gc import collect
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading import reader, stored_saves
from deltackpt.testing import STEP_FILES, Disk, TrainingRun, failing_saves, paused_saves, states
from deltackpt.wal.recorder import Recorder

POLICIES = {
    "consecutive": deltackpt.policies.Consecutive(),
    "one-shot": deltackpt.policies.OneShot(max_chain=20),
    "intermittent": deltackpt.policies.Intermittent(max_chain=20),
}


def options(policy=POLICIES["consecutive"], **log):
    return deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(policy=policy),
        writes=deltackpt.WriteOptions(durability="process"),
        wal=deltackpt.WalOptions(**log),
    )


class WalRun(TrainingRun):
    """A run whose appends and restarts are one call each."""

    def append_durably(self, count: int) -> Any:
        """Trains and appends steps; returns the newest durable point."""
        for _ in range(count):
            self.append()
        return self.manager.wait_appended()

    @contextlib.contextmanager
    def started(self, options: Any = None, appends: int = 0) -> Iterator[Any]:
        """Opens a manager, saves step 0, and appends steps that become durable."""
        with self.open(options) as manager:
            self.save_initial()
            if appends:
                self.append_durably(appends)
            yield manager

    def begin(self, count: int) -> None:
        """Saves step 0 and appends steps in a manager of its own."""
        with self.started(appends=count):
            pass

    def restarted(self, options: Any = None) -> deltackpt.Restored:
        """Returns what a new manager restores, once checked bit for bit."""
        with self.open(options):
            return self.resume()

    def points(self) -> list[int]:
        return [point.step for point in self.manager.recovery_points()]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def run(tmp_path):
    return WalRun(tmp_path, options=options())


def assert_found_again(run):
    """Checks that a new manager restores the newest state."""
    expected = run.step
    with run.open():
        assert run.resume().step == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_restore_holds_a_bounded_number_of_row_indices(run, policy, monkeypatch):
    """A chain and the records above it are then merged in several parts, oldest first."""
    chosen = options(POLICIES[policy])
    with run.started(chosen):
        for _ in range(6):
            run.save()
        run.append_durably(12)
    counts, real = [], merge.plan

    def counted(layers, targets, *args, **options):
        segments = [one for layer in layers for shard in layer for one in shard.segments]
        counts.append((len(layers), sum(one.count for one in segments if one.ranges is None)))
        return real(layers, targets, *args, **options)

    monkeypatch.setattr(merge, "plan", counted)
    assert run.restarted(chosen).point is not None
    [(layers, count)] = counts
    counts.clear()
    monkeypatch.setattr(reader, "_ROW_INDICES_BYTES", 0)
    monkeypatch.setattr(reader, "_ROW_INDEX_BYTES", 1 << 40)
    assert run.restarted(chosen).point is not None
    # The base is merged with the first layer above it.
    first, *others = (number for number, _ in counts)
    assert first <= 2
    assert {*others} == {1} and first + len(others) == layers
    assert sum(found for _, found in counts) == count


def test_a_delta_after_a_point_has_only_touched_rows_beside_slots_that_are_always_written(tmp_path):
    tables = dataclasses.replace(states.tables(), always="accumulator")
    run = WalRun(tmp_path, options=options(), tables=tables)
    run.begin(2)
    with run.open():
        assert run.resume().point is not None
        assert run.save().kind == "delta"
    [shard] = stored_saves.read_save(tmp_path / "3").shards()
    counts = {one.fields: one.count for one in shard.segments}
    assert all("slot.accumulator" in fields or count < 150 for fields, count in counts.items())
    assert any("values" in fields for fields in counts)


def at_a_point_with_two_steps_above(run):
    """Resumes from point 2, on step 0, and saves twice."""
    assert run.resume().point is not None and run.step == 2
    run.save()
    # The WAL is notified of this save by the next wait, not by a restore.
    run.save(wait=False)


def test_records_of_a_point_that_training_has_returned_to_are_not_trimmed(run):
    run.begin(2)
    with run.open() as manager:
        at_a_point_with_two_steps_above(run)
        run.continue_from(manager.restore(2, run.state))
        # Commits of the abandoned run do not decide which records this one needs.
        manager.wait_appended()
        with quiet():
            assert run.append().kind == "full"
        assert run.append_durably(1).step == run.step
    assert_found_again(run)


def grow(run):
    run.state = grown(run.state, 5, "users")
    table = {"tables/users": run.state["tables"]["users"]}
    run.touched = touched.grow(run.touched, table)


def copy_in_use(root: Path, to: Path) -> None:
    """Copies the directory of an open manager, without files that it renames meanwhile."""
    shutil.copytree(root, to, ignore=shutil.ignore_patterns(".*.tmp"))


@pytest.mark.parametrize("grows", [True, False], ids=["table", "leaf"])
@pytest.mark.parametrize("resumed", [True, False])
def test_points_count_until_a_step_with_other_tables_or_leaves_is_committed(
    tmp_path, grows, resumed
):
    run = WalRun(tmp_path / "root", options=options())
    with run.started(appends=3):
        pass
    with run.open():
        run.resume()
        if not resumed:
            run.append_durably(2)
        durable = run.step
        run.append()
        run.manager.wait_appended()
        if grows:
            grow(run)
        else:
            run.state = {**run.state, "more": jnp.zeros(4)}
        with paused_saves(run.root):
            assert run.append().saved is not None
            assert run.append().kind == "full"
            copy_in_use(run.root, tmp_path / "killed")
        run.append_durably(1)
    run.restarted()
    assert run.step == durable + 4
    run.root = tmp_path / "killed"
    with run.open(deltackpt.ManagerOptions(access="read")) as manager:
        assert run.points() == [*range(durable + 1, 0, -1)]
        run.check(manager.restore_latest(run.states[durable + 1]))


def assert_lost(steps, *roots):
    """Checks that recovery points without the step that they replay onto are damage."""
    for root in roots:
        report = verify_root(root)
        assert any("some are missing" in one.found for one in report.problems), report.problems
        assert [one.point.step for one in report.points if not one.restorable] == steps


def test_a_save_that_was_not_committed_is_no_damage_to_the_records_above(tmp_path):
    """While it is in flight, once it has failed, and after a restart, until the next epoch."""
    run = WalRun(tmp_path / "root", options=options())
    run.begin(1)
    with run.open() as manager, quiet():
        run.resume()
        with paused_saves(run.root, errno.EIO):
            run.save(wait=False)
            run.append()
            # The same epoch, which began with this save.
            assert verify_root(run.root).intact
            copy_in_use(run.root, tmp_path / "killed")
        with pytest.raises(SaveFailed):
            manager.wait_until_finished()
        assert verify_root(run.root).intact
        # The next save continues the epoch, and is lost with its points if it is deleted.
        run.save()
        newest = run.append_durably(1).step
        assert verify_root(run.root).intact
        shutil.copytree(run.root, tmp_path / "deleted")
    shutil.rmtree(tmp_path / "deleted" / str(newest - 1))
    assert_lost([newest - 2, newest], tmp_path / "deleted")
    run.root = tmp_path / "killed"
    with run.open():
        assert verify_root(run.root).intact
        assert run.resume().point is not None
        assert verify_root(run.root).intact


def test_points_below_a_step_with_other_tables_are_trimmed_like_other_records(tmp_path):
    """Restores need them until the step is committed, and after that if it is damaged."""
    run, copies = WalRun(tmp_path / "root", options=options()), [tmp_path / "1", tmp_path / "2"]

    def is_noted(root):
        noted = verify_root(root).notes
        return any(f"the save of step {durable + 1}" in note for note in noted)

    with run.started() as manager:
        run.save()
        durable = run.append_durably(2).step
        grow(run)
        with paused_saves(run.root):
            assert run.append().saved is not None
            assert run.append().kind == "full"
            wait_until(lambda: is_noted(run.root))  # The record is written in the background.
            copy_in_use(run.root, copies[0])
        manager.wait_until_finished()
        manager.wait_appended()
        manager.wait_until_finished()
        shutil.copytree(run.root, copies[1])
        shutil.copytree(run.root, tmp_path / "damaged")
        shutil.rmtree(copies[1] / str(durable + 1))
        flip(tmp_path / f"damaged/{durable + 1}/embeddings/manifest.0.msgpack", 40)
        run.save()
        run.save()
        manager.wait_appended()
    assert [one.name for one in (run.root / "log").iterdir() if one.is_dir()] == ["1"]
    assert not verify_root(run.root).problems
    assert_lost([durable + 2], copies[1], tmp_path / "damaged")
    killed = verify_root(copies[0])
    assert killed.intact and [one.point.step for one in killed.points] == [durable - 1, durable]
    assert is_noted(copies[0])
    for run.root in copies:
        collect(run.root, offline=True)
        with run.open(deltackpt.ManagerOptions(access="read")) as manager:
            assert run.points() == [durable, durable - 1]
            run.check(manager.restore_latest(run.states[durable]))


@pytest.mark.parametrize(
    ("call", "after"),
    [("mkdir", 0), *[("write", n) for n in (0, 1)], *[("fsync", n) for n in range(4)]],
)
def test_points_count_if_the_next_epoch_could_not_be_opened_at_first(tmp_path, call, after):
    run = WalRun(tmp_path / "root", options=options())
    with run.started() as manager:
        durable = run.append_durably(2).step
        grow(run)
        with paused_saves(run.root):
            assert run.append().saved is not None
            with Disk(run.root) as disk, pytest.raises(StorageError):
                disk.fail(call, "^log", errno=errno.ENOSPC, after=after, times=1)
                run.append()
            assert run.append().kind == "full"
            copy_in_use(run.root, tmp_path / "killed")
        manager.wait_until_finished()
        run.append_durably(1)
    newest = run.step
    assert run.restarted().step == newest
    run.root = tmp_path / "killed"
    with run.open(deltackpt.ManagerOptions(access="read")) as manager:
        assert run.points() == [durable, durable - 1]
        run.check(manager.restore_latest(run.states[durable]))


def test_a_step_is_saved_if_the_records_of_a_point_were_trimmed(tmp_path, run):
    run.begin(2)
    with run.open() as manager:
        at_a_point_with_two_steps_above(run)
        restored = manager.restore(2, run.state)
        # Training continues with its own state, and records below two steps are trimmed.
        for _ in range(3):
            run.save()
        run.append()
        manager.restore(run.step - 1, run.state)
        assert not list(tmp_path.glob("log/0/*/*.seg"))
        run.state, run.touched = restored.state, restored.touched
        with quiet():
            assert run.append().saved.kind == "delta"
        assert run.append_durably(1).step == run.step
    assert_found_again(run)


def test_an_epoch_does_not_count_if_the_next_run_continued_from_it_and_trimmed_it(run):
    with run.started(appends=2) as manager:
        former, head = manager._recorder, manager._recorder._epoch.head
        assert former._counts(head)
    with run.open() as manager:
        at_a_point_with_two_steps_above(run)
        run.save()
        assert run.points() == []  # Waits until trimming has ended.
        reader = manager._recorder._reader
        [newest] = reader.numbers()
        assert reader.head(newest).continues.epoch == head.epoch < newest
        # Otherwise the former run would invalidate the points of this one.
        assert not former._counts(head)
        assert manager._recorder._counts(reader.head(newest))


def test_a_run_without_a_wal_resumes_from_a_point(run):
    run.begin(5)
    with run.open(deltackpt.ManagerOptions()) as manager:
        assert run.resume().step == 5
        with pytest.raises(OptionError, match="above 5"):
            manager.save(4, run.state, touched=run.touched)
        run.save()
        run.save()
    result = run.restarted()
    assert (result.step, result.point) == (7, None)


def test_many_lossy_records_err_no_more_than_one(run):
    chosen = options(codec="int8")
    with run.started(chosen) as manager:
        ids = {f"tables/{name}": jnp.arange(5) for name in model.ROWS}
        for step in range(1, 121):
            run.touched = touched.mark(run.touched, ids)
            manager.append(step, run.state, touched=run.touched, full=step == 120)
    with run.open(chosen) as manager:
        result = manager.restore_latest(run.state)
    assert result.step == 120
    for name, table in run.state["tables"].items():
        rows, found = np.asarray(table), np.asarray(result.state["tables"][name])
        np.testing.assert_array_equal(found[:5], model.decoded("int8", rows[:5]))
        np.testing.assert_array_equal(found[5:], rows[5:])


def test_the_next_save_detects_ids_that_left_out_a_touched_row(run):
    with run.started() as manager:
        run.state, ids = model.move(run.state, 1)
        run.touched = touched.mark(run.touched, ids)
        given = {name: np.asarray(rows) for name, rows in ids.items()}
        left_out = int(given["tables/users"][0])
        given["tables/users"] = given["tables/users"][given["tables/users"] != left_out]
        manager.append(1, run.state, touched=run.touched, ids=given)
        manager.wait_appended()
        assert run.points() == [1]
        with pytest.raises(TrackingError, match=f"tables/users, the first of them {left_out}"):
            manager.save(2, run.state, touched=run.touched)
        # Its recovery point would be wrong.
        assert run.points() == []
        model.commit(manager, 2, run.state, touched=run.touched)
        model.assert_same(manager.restore(2, run.state).state, run.state)


def test_unmarked_rows_found_by_verify_tracking_invalidate_the_points_of_the_run(run):
    with run.started() as manager:
        manager.verify_tracking(run.state, touched=run.touched)
        run.append_durably(1)
        assert run.points() == [1]
        run.state, _ = model.move(run.state, 2)
        with pytest.raises(TrackingError):
            manager.verify_tracking(run.state, touched=run.touched)
        assert run.points() == []
        assert manager.wait_appended() == 0
        # A base, from which the records continue.
        assert run.save().kind == "base"
        run.append_durably(1)
    assert_found_again(run)


def test_a_first_step_that_fails_in_the_background_is_saved_again_by_append(run):
    with run.open() as manager:
        with Disk(run.root) as disk:
            disk.fail("write", STEP_FILES, errno=errno.ENOSPC)
            assert run.append().saved is not None
            assert manager._saver.in_flight.future.exception(60) is not None
        with pytest.raises(SaveFailed):
            run.append()
        manager.wait_until_finished()
        assert manager.all_steps() == [run.step]
        run.append_durably(1)
        assert run.points()[0] == run.step
    assert_found_again(run)


def test_wait_appended_waits_for_the_first_step_below_the_records(run):
    with run.open() as manager:
        with Disk(run.root) as disk, disk.pause("write", STEP_FILES) as held:
            run.save(wait=False)
            run.append()
            with pytest.raises(WaitTimeout):
                manager.wait_appended(0.2)
            held.release()
            assert manager.wait_appended().step == run.step
        assert run.points()[0] == run.step


def test_wait_appended_raises_if_the_first_step_fails_and_the_next_append_saves_one(run):
    with run.open() as manager:
        with Disk(run.root) as disk:
            # After the append, which would otherwise save the step itself.
            with disk.pause("write", STEP_FILES, errno=errno.ENOSPC):
                run.save(wait=False)
                run.append()
            with pytest.raises(SaveFailed):
                manager.wait_appended()
        assert run.append().saved is not None
        assert run.append_durably(1).step == run.step


def test_append_saves_the_step_if_there_is_nothing_to_continue_from(run):
    with run.open() as manager:
        logged = run.append(items={"position": b"\x00\x01", "epoch": 3})
        assert logged.kind is None and "saved the step instead" in logged.reason
        assert logged.saved.kind == "base"
        manager.wait_until_finished()
        result = manager.restore(1, run.state, items={"epoch": None, "position": None})
        assert result.items == {"epoch": 3, "position": {"base64": "AAE="}}


def test_append_saves_a_step_if_the_wal_has_outgrown_the_tables_and_save_does_not_again(run):
    with run.started(options(max_wal_ratio=1e-9)) as manager:
        assert run.append().kind == "full"
        manager.wait_appended()
        logged = run.append()
        assert logged.saved is not None and "max_wal_ratio" in logged.reason
        saved = manager.save(run.step, run.state, touched=run.touched)
        assert (saved.step, saved.kind) == (2, logged.saved.kind) and "by append()" in saved.reason
        with pytest.warns(UserWarning, match="without the metrics"):
            manager.save(run.step, run.state, metrics={"loss": 1.0})
        assert run.append().kind == "full"
        run.save()
        assert manager.all_steps() == [0, 2, 4]


@pytest.mark.parametrize("how", ["append", "save", "save_if_due"])
def test_a_preemption_does_not_save_a_step_again_that_was_just_saved(run, how):
    with (
        run.open() as manager,
        mock.patch.object(manager, "reached_preemption", return_value=True),
    ):
        made = getattr(manager, how)(1, run.state, touched=run.touched)
        with mock.patch.object(manager._saver, "_start", side_effect=AssertionError):
            assert manager.save_if_due(1, run.state) == getattr(made, "saved", made)
        assert manager.all_steps() == [1]
        manager.restore(1, run.state)
        assert manager.save_if_due(1, run.state).kind is None
        assert manager.save_if_due(2, run.state).kind is not None


@pytest.mark.parametrize("how", ["save", "save_if_due"])
def test_a_step_whose_save_by_append_failed_is_saved_again(tmp_path, run, how):
    with (
        run.open() as manager,
        mock.patch.object(manager, "reached_preemption", return_value=True),
    ):
        with failing_saves(tmp_path):
            assert manager.append(1, run.state, touched=run.touched).saved is not None
            with pytest.raises(SaveFailed):
                manager.wait_until_finished()
        assert getattr(manager, how)(1, run.state, touched=run.touched).kind == "base"
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_a_preemption_saves_a_step_again_whose_save_failed_since(tmp_path, run):
    with (
        run.open() as manager,
        mock.patch.object(manager, "reached_preemption", return_value=True),
    ):
        with paused_saves(tmp_path, errno.EIO) as held:
            manager.save(1, run.state, touched=run.touched)
            held.release()
            wait_until(lambda: not manager.is_saving_in_progress())
        with pytest.raises(SaveFailed, match="step 1 is being saved") as failure:
            manager.save_if_due(1, run.state, touched=run.touched)
        assert failure.value.saved is not None
        assert manager.all_steps() == [1]


def test_records_below_the_last_two_steps_are_removed(tmp_path, run):
    with run.started() as manager:
        for _ in range(6):
            run.append_durably(3)
            run.save()
            manager.wait_appended()
        run.save()
        assert len(list((tmp_path / "log/0/0").glob("*.seg"))) <= 4
        assert min(run.points(), default=5) > 4


@pytest.mark.parametrize("why", ["ids", "distrust"])
def test_a_step_saved_instead_of_a_record_is_not_mistaken_for_the_restored_one(
    run, why, monkeypatch
):
    run.begin(0)
    with run.open() as manager:
        run.resume()
        monkeypatch.setattr(Recorder, "append", lambda *_, **__: "a test says so")
        told = manager.append(run.step, run.state, touched=run.touched)
        assert "it was restored" in told.saved.reason
        ids = {"users": np.array([1])} if why == "ids" else None
        if why == "distrust":
            manager._run.lineage.distrust("a test says so")
        with pytest.raises(OptionError, match="expected a step above"):
            manager.append(run.step, run.state, touched=run.touched, ids=ids)


def test_bad_arguments_are_named(run):
    with run.open(deltackpt.ManagerOptions()):
        with pytest.raises(OptionError, match=r"ManagerOptions\(wal=WalOptions"):
            run.append()
    with run.started() as manager:
        run.append()
        for bad, found in (
            ({"ids": {"nothing": [1]}}, "no such table"),
            ({"ids": {"tables/users": [0.5]}}, "integers"),
            ({"ids": {"tables/users": [700]}}, "rows from 0 to 699"),
            ({"ids": {"tables/users": [-1]}}, "rows from 0 to 699"),
            ({"items": {"a": object()}}, "JSON"),
            ({"items": {1: 2, "a": 3}}, r"valid strings as names, found 1 \(int\)"),
            ({"items": {"\ud800": 2}}, "valid strings as names"),
        ):
            with pytest.raises(OptionError, match=found):
                manager.append(run.step + 1, run.state, touched=run.touched, **bad)
        with pytest.raises(OptionError, match=f"above {run.step}"):
            manager.append(run.step, run.state, touched=run.touched)
        with pytest.raises(OptionError, match="WalOptions.buffer_bytes"):
            deltackpt.WalOptions(buffer_bytes=0)
        assert isinstance(manager.wait_appended(), RecoveryPoint)
        # Refused calls count, but cost nothing.
        run.append()
    run.restarted()
