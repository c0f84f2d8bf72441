# SPDX-License-Identifier: Apache-2.0
"""What ``log()`` promises to a training loop of one process."""

from __future__ import annotations

import contextlib
import threading
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest

import deltackpt
from deltackpt import touched
from deltackpt.errors import FencedError, OptionError, SaveFailed, TrackingError, WaitTimeout
from deltackpt.reading.stretches import LogPoint
from deltackpt.storage import writer

POLICIES = {
    "consecutive": deltackpt.Consecutive(),
    "one-shot": deltackpt.OneShot(max_chain=20),
    "intermittent": deltackpt.Intermittent(max_chain=20),
    "rolling": deltackpt.Rolling(window=5),
}


def options(policy=POLICIES["consecutive"], **log):
    return deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(policy=policy),
        writes=deltackpt.WriteOptions(durability="process"),
        log=deltackpt.LogOptions(**log),
    )


def manager_of(root, given=None, codec="raw"):
    tables = deltackpt.Tables(select=model.SELECT, slots=model.SLOTS, codec=codec)
    return deltackpt.CheckpointManager(
        root, handlers={"embeddings": tables}, options=given or options()
    )


class Training:
    """A run whose state at each step is kept."""

    def __init__(self):
        self.state = model.initial()
        self.touched = model.new_touched(self.state)
        self.step = 0
        self.states = {0: self.state}

    def go(self):
        self.step += 1
        self.state, self.touched = model.train(self.state, self.touched, self.step)
        self.states[self.step] = self.state
        return self.step

    def log(self, manager, **more):
        return manager.log(self.go(), self.state, touched=self.touched, **more)

    def save(self, manager):
        saved = manager.save(self.go(), self.state, touched=self.touched)
        manager.wait()
        return saved

    def goes_on_from(self, result):
        model.assert_same(result.state, self.states[result.step])
        self.state, self.touched, self.step = result.state, result.touched, result.step

    def begin(self, manager):
        manager.save(0, self.state, touched=self.touched)
        manager.wait()


@pytest.fixture
def training():
    return Training()


def restored(manager, training):
    result = manager.restore_latest(training.state)
    assert result is not None
    training.goes_on_from(result)
    return result


def assert_found_again(root, training):
    """A manager that is opened anew restores the newest state."""
    expected = training.step
    with manager_of(root) as manager:
        assert restored(manager, training).step == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_replayed_rows_are_in_every_delta_that_is_taken_against_the_step_below(
    tmp_path, training, policy
):
    chosen = options(POLICIES[policy])
    with manager_of(tmp_path, chosen) as manager:
        training.begin(manager)
        for _ in range(4):
            training.log(manager)
        manager.wait_logged()
    with manager_of(tmp_path, chosen) as manager:
        assert restored(manager, training).point is not None
        for _ in range(4):
            saved = training.save(manager)
            assert saved.kind == "delta"
            found = manager.restore(training.step, training.state)
            model.assert_same(found.state, training.states[training.step])
            # It was only looked at.
            training.log(manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_save_that_fails_after_a_point_loses_no_replayed_row(tmp_path, training, policy):
    chosen = options(POLICIES[policy])
    with manager_of(tmp_path, chosen) as manager:
        training.begin(manager)
        for _ in range(3):
            training.log(manager)
    with manager_of(tmp_path, chosen) as manager:
        restored(manager, training)
        with mock.patch.object(writer, "write_array", side_effect=OSError(28, "injected")):
            manager.save(training.go(), training.state, touched=training.touched)
            with pytest.raises(deltackpt.errors.SaveFailed):
                manager.wait()
        training.save(manager)
    with manager_of(tmp_path, chosen) as manager:
        result = restored(manager, training)
        assert (result.step, result.point) == (5, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_crash_before_the_first_save_loses_no_replayed_row(tmp_path, training, policy):
    chosen = options(POLICIES[policy])
    with manager_of(tmp_path, chosen) as manager:
        training.begin(manager)
        for _ in range(3):
            training.log(manager)
    for _ in range(3):
        with manager_of(tmp_path, chosen) as manager:
            assert restored(manager, training).chain == (0,)
            training.log(manager)
            training.log(manager)
    with manager_of(tmp_path, chosen) as manager:
        assert restored(manager, training).step == 9
        for _ in range(3):
            training.save(manager)
            found = manager.restore(training.step, training.state)
            training.goes_on_from(found)


def test_a_point_is_restored_on_another_sharding_of_tables_and_dense_leaves(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(3):
            training.log(manager)
    devices = np.array(jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    template = {
        **training.state,
        "tables": {
            name: jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=rows)
            for name, table in training.state["tables"].items()
        },
    }
    with manager_of(tmp_path) as manager:
        result = manager.restore_latest(template)
        assert result is not None and result.state["tables"]["users"].sharding == rows
        model.assert_same(result.state, training.state)
        plain = manager.restore_latest()
        assert plain is not None and plain.step == 3
        np.testing.assert_array_equal(
            plain.state["tables"]["users"], training.state["tables"]["users"]
        )


def at_a_point_with_two_steps_above(manager, training):
    """Training goes on from point 2, on step 0, and has saved twice since."""
    assert restored(manager, training).point is not None and training.step == 2
    training.save(manager)
    # The log learns of it once this one is waited for: a restore does not tell it.
    manager.save(training.go(), training.state, touched=training.touched)


def logged_to_point_2(root, training):
    with manager_of(root) as manager:
        training.begin(manager)
        training.log(manager)
        training.log(manager)


def test_marks_of_a_point_that_training_has_gone_back_to_are_not_trimmed(tmp_path, training):
    logged_to_point_2(tmp_path, training)
    with manager_of(tmp_path) as manager:
        at_a_point_with_two_steps_above(manager, training)
        training.goes_on_from(manager.restore(2, training.state))
        # What the run that was left has committed says nothing of what this one needs.
        manager.wait_logged()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert training.log(manager).kind == "full"
        training.log(manager)
        assert manager.wait_logged().step == training.step
    assert_found_again(tmp_path, training)


def test_where_the_marks_that_led_to_a_point_are_trimmed_a_step_is_saved(tmp_path, training):
    logged_to_point_2(tmp_path, training)
    with manager_of(tmp_path) as manager:
        at_a_point_with_two_steps_above(manager, training)
        looked_at = manager.restore(2, training.state)
        # It goes on with what it had, and marks below two steps are trimmed.
        for _ in range(3):
            training.save(manager)
        training.log(manager)
        manager.restore(training.step - 1, training.state)
        assert not list(tmp_path.glob("log/0/*/*.seg"))
        training.state, training.touched = looked_at.state, looked_at.touched
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logged = training.log(manager)
        assert logged.saved is not None and logged.saved.kind == "delta"
        training.log(manager)
        assert manager.wait_logged().step == training.step
    assert_found_again(tmp_path, training)


def test_points_above_a_step_that_training_goes_on_from_are_dead(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        training.save(manager)
        for _ in range(4):
            training.log(manager)
    left = dict(training.states)
    with manager_of(tmp_path) as manager:
        result = manager.restore_latest(training.state, log=None)
        assert result is not None and (result.step, result.point) == (1, None)
        # Looking kills nothing.
        assert [point.step for point in manager.points()] == [5, 4, 3, 2]
        training.goes_on_from(result)
        training.log(manager)
        manager.wait_logged()
        assert [point.step for point in manager.points()] == [2]
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).step == 2
    assert left[5] is not training.state


def test_a_restored_point_is_where_later_points_of_the_earlier_run_end(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(5):
            training.log(manager)
    with manager_of(tmp_path) as manager:
        result = manager.restore(3, training.state)
        assert result.point is not None and result.point.step == 3
        training.goes_on_from(result)
        training.log(manager)
        manager.wait_logged()
        assert [point.step for point in manager.points()] == [4, 3, 2, 1]
        by_point = manager.restore(manager.points()[-1], training.state)
        model.assert_same(by_point.state, training.states[1])


def test_steps_above_a_point_that_training_goes_on_from_are_moved_aside(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        training.log(manager)
        training.log(manager)
        training.save(manager)
    with manager_of(tmp_path) as manager:
        training.goes_on_from(manager.restore(1, training.state))
        assert manager.goes_on_from == 1
        with pytest.warns(UserWarning, match="later steps"):
            training.log(manager)
        assert manager.goes_on_from == 1
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).step == 2


def test_a_run_without_a_log_ends_the_points_that_it_does_not_go_on_from(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(5):
            training.log(manager)
    plain = deltackpt.ManagerOptions()
    with manager_of(tmp_path, plain) as manager:
        result = manager.restore(0, training.state)
        training.goes_on_from(result)
        training.save(manager)
        assert manager.points() == []
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).step == 1


def test_a_run_without_a_log_goes_on_from_a_point(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(5):
            training.log(manager)
    with manager_of(tmp_path, deltackpt.ManagerOptions()) as manager:
        assert restored(manager, training).step == 5
        with pytest.raises(OptionError, match="above 5"):
            manager.save(4, training.state, touched=training.touched)
        training.save(manager)
        training.save(manager)
    with manager_of(tmp_path) as manager:
        result = restored(manager, training)
        assert (result.step, result.point) == (7, None)


def test_a_thousand_lossy_marks_err_no_more_than_one(tmp_path, training):
    chosen = options(codec="int8")
    with manager_of(tmp_path, chosen) as manager:
        training.begin(manager)
        ids = {f"tables/{name}": jnp.arange(5) for name in model.ROWS}
        for step in range(1, 121):
            training.touched = touched.mark(training.touched, ids)
            manager.log(step, training.state, touched=training.touched, full=step == 120)
    with manager_of(tmp_path, chosen) as manager:
        result = manager.restore_latest(training.state)
        assert result is not None and result.step == 120
        for name, table in training.state["tables"].items():
            rows = np.asarray(table)
            found = np.asarray(result.state["tables"][name])
            coded = model.decoded("int8", rows[:5])
            np.testing.assert_array_equal(found[:5], coded)
            np.testing.assert_array_equal(found[5:], rows[5:])


def test_ids_are_taken_for_the_touched_rows(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(3):
            training.step += 1
            training.state, ids = model.move(training.state, training.step)
            training.touched = touched.mark(training.touched, ids)
            training.states[training.step] = training.state
            # By the end of a path, in any order, several times.
            given = {name: np.asarray(rows)[::-1] for name, rows in ids.items()}
            manager.log(training.step, training.state, touched=training.touched, ids=given)
        training.save(manager)
        training.log(manager)
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).step == 5


def test_ids_that_leave_out_a_touched_row_are_found_by_the_next_save(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        training.state, ids = model.move(training.state, 1)
        training.touched = touched.mark(training.touched, ids)
        given = {name: np.asarray(rows) for name, rows in ids.items()}
        left_out = int(given["tables/users"][0])
        given["tables/users"] = given["tables/users"][given["tables/users"] != left_out]
        manager.log(1, training.state, touched=training.touched, ids=given)
        manager.wait_logged()
        assert [point.step for point in manager.points()] == [1]
        with pytest.raises(TrackingError, match=f"tables/users, of which the first is {left_out}"):
            manager.save(2, training.state, touched=training.touched)
        # Its point would be wrong.
        assert manager.points() == []
        manager.save(2, training.state, touched=training.touched)
        manager.wait()
        model.assert_same(manager.restore(2, training.state).state, training.state)


def test_rows_that_verify_tracking_finds_unmarked_end_the_points_of_the_run(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        manager.verify_tracking(training.state, touched=training.touched)
        training.log(manager)
        manager.wait_logged()
        assert [point.step for point in manager.points()] == [1]
        training.state, _ = model.move(training.state, 2)
        with pytest.raises(TrackingError):
            manager.verify_tracking(training.state, touched=training.touched)
        assert manager.points() == []
        assert manager.wait_logged() == 0
        # A base, from which the marks go on.
        assert training.save(manager).kind == "base"
        training.log(manager)
        manager.wait_logged()
    assert_found_again(tmp_path, training)


def test_a_first_step_that_fails_in_the_background_is_saved_again_by_the_log(tmp_path, training):
    with manager_of(tmp_path) as manager:
        with mock.patch.object(writer.ArrayWriter, "finish", side_effect=OSError(28, "full")):
            assert training.log(manager).saved is not None
            assert manager._saver.in_flight.future.exception(60) is not None
        with pytest.raises(SaveFailed):
            training.log(manager)
        manager.wait()
        assert manager.all_steps() == [training.step]
        training.log(manager)
        manager.wait_logged()
        assert [point.step for point in manager.points()][0] == training.step
    assert_found_again(tmp_path, training)


def test_marks_are_waited_for_with_the_first_step_that_they_lead_down_to(tmp_path, training):
    gate, finish = threading.Event(), writer.ArrayWriter.finish

    def held(self, *args, **options):
        gate.wait(60)
        return finish(self, *args, **options)

    with manager_of(tmp_path) as manager:
        with mock.patch.object(writer.ArrayWriter, "finish", held):
            manager.save(training.go(), training.state, touched=training.touched)
            training.log(manager)
            with pytest.raises(WaitTimeout):
                manager.wait_logged(0.2)
            gate.set()
            assert manager.wait_logged().step == training.step
        assert manager.points()[0].step == training.step


def test_where_the_first_step_fails_who_waits_for_marks_is_told_and_the_next_saves(
    tmp_path, training
):
    gate = threading.Event()

    def fails(*args, **options):
        # Not before the mark is taken, which would save the step itself then.
        gate.wait(60)
        raise OSError(28, "full")

    with manager_of(tmp_path) as manager:
        with mock.patch.object(writer.ArrayWriter, "finish", fails):
            manager.save(training.go(), training.state, touched=training.touched)
            training.log(manager)
            gate.set()
            with pytest.raises(SaveFailed):
                manager.wait_logged()
        assert training.log(manager).saved is not None
        training.log(manager)
        assert manager.wait_logged().step == training.step


def test_without_anything_to_go_on_from_the_step_is_saved_instead(tmp_path, training):
    with manager_of(tmp_path) as manager:
        logged = training.log(manager, items={"position": b"\x00\x01", "epoch": 3})
        assert logged.kind is None and logged.saved is not None
        assert logged.saved.kind == "base" and "saved the step instead" in logged.reason
        manager.wait()
        result = manager.restore(1, training.state, items={"epoch": None, "position": None})
        assert result.items == {"epoch": 3, "position": {"base64": "AAE="}}


def test_items_of_a_point_come_back_as_they_were_given(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        given = {"data": b"\x00\xff", "epoch": {"number": 3, "of": [1, 2.5, None]}}
        training.log(manager, items=given)
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).items == given


def test_soft_marks_alone_are_no_points_and_a_full_one_has_their_rows(tmp_path, training):
    with manager_of(tmp_path, options(dense="soft")) as manager:
        training.begin(manager)
        for _ in range(4):
            assert training.log(manager).kind == "soft"
        manager.wait_logged()
        assert manager.points() == []
        assert manager.wait_logged() == 0
        assert training.log(manager, full=True).kind == "full"
    with manager_of(tmp_path) as manager:
        assert restored(manager, training).step == 5


def test_the_log_saves_a_step_where_it_has_outgrown_the_tables(tmp_path, training):
    with manager_of(tmp_path, options(most_bytes=1e-9)) as manager:
        training.begin(manager)
        assert training.log(manager).kind == "full"
        manager.wait_logged()
        logged = training.log(manager)
        assert logged.saved is not None and "most_bytes" in logged.reason
        assert training.log(manager).kind == "full"


def test_a_step_that_log_has_saved_is_not_saved_again(tmp_path, training):
    with manager_of(tmp_path, options(most_bytes=1e-9)) as manager:
        training.begin(manager)
        training.log(manager)
        manager.wait_logged()
        logged = training.log(manager)
        assert logged.saved is not None
        saved = manager.save(training.step, training.state, touched=training.touched)
        assert (saved.step, saved.kind) == (2, logged.saved.kind) and "by log()" in saved.reason
        with pytest.warns(UserWarning, match="without the metrics"):
            manager.save(training.step, training.state, metrics={"loss": 1.0})
        training.save(manager)
        assert manager.all_steps() == [0, 2, 3]


def test_marks_below_the_last_two_steps_are_removed(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        for _ in range(6):
            for _ in range(3):
                training.log(manager)
            training.save(manager)
            manager.wait_logged()
        manager.save(training.go(), training.state, touched=training.touched)
        manager.wait()
        assert len(list((tmp_path / "log" / "0" / "0").glob("*.seg"))) <= 4
        assert all(point.step > 4 for point in manager.points())


def test_a_damaged_step_costs_nothing_where_the_log_reaches_below_it(tmp_path, training):
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        training.log(manager)
        training.save(manager)
        for _ in range(3):
            training.log(manager)
    manifest = tmp_path / "2" / "embeddings" / "manifest.0.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    with manager_of(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = restored(manager, training)
        assert (result.step, result.chain) == (5, (0,))


def test_a_trainer_that_lost_its_lease_logs_no_more(tmp_path, training):
    with contextlib.ExitStack() as held:
        manager = held.enter_context(manager_of(tmp_path))
        training.begin(manager)
        training.log(manager)
        manager.wait_logged()
        lease = max(tmp_path.glob("lease.*.msgpack"))
        epoch = int(lease.name.split(".")[1])
        (tmp_path / f"lease.{epoch + 1}.msgpack").write_bytes(lease.read_bytes())
        with pytest.raises(FencedError):
            training.log(manager)
            manager.wait_logged()
        held.pop_all()
    with pytest.raises(FencedError):
        manager.close()


def test_bad_arguments_are_told_by_name(tmp_path, training):
    with manager_of(tmp_path, deltackpt.ManagerOptions()) as manager:
        with pytest.raises(OptionError, match=r"ManagerOptions\(log=LogOptions"):
            training.log(manager)
    with manager_of(tmp_path) as manager:
        training.begin(manager)
        training.log(manager)
        step, state = training.step, training.state
        for bad, found in (
            ({"ids": {"nothing": [1]}}, "no such table"),
            ({"ids": {"tables/users": [0.5]}}, "integers"),
            ({"ids": {"tables/users": [700]}}, "rows from 0 to 699"),
            ({"ids": {"tables/users": [-1]}}, "rows from 0 to 699"),
            ({"items": {"a": object()}}, "JSON"),
            ({"items": {1: 2, "a": 3}}, r"texts as their names, found 1 \(int\)"),
            ({"items": {"\ud800": 2}}, "texts as their names"),
        ):
            with pytest.raises(OptionError, match=found):
                manager.log(step + 1, state, touched=training.touched, **bad)
        with pytest.raises(OptionError, match=f"above {step}"):
            manager.log(step, state, touched=training.touched)
        with pytest.raises(OptionError, match="LogOptions.buffer_bytes"):
            deltackpt.LogOptions(buffer_bytes=0)
        assert isinstance(manager.wait_logged(), LogPoint)
        # What was refused has counted, and cost nothing.
        training.log(manager)
    with manager_of(tmp_path) as manager:
        restored(manager, training)
