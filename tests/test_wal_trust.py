# SPDX-License-Identifier: Apache-2.0
"""Rows that changed without being marked: ``append()`` finds them; no wrong state is restored."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import tracemalloc
import warnings
from typing import Any

import jax.numpy as jnp
import model
import numpy as np
import pytest
from test_wal import options

import deltackpt
from deltackpt import touched
from deltackpt.errors import (
    AppendFailed,
    DeltackptError,
    FencedError,
    OptionError,
    OutOfSpace,
    TrackingError,
)
from deltackpt.save.capture import FieldSource
from deltackpt.testing import Disk, TrainingRun
from deltackpt.wal import audit

#: Enough records to audit every row of the small state once.
ALL_LOOKED_AT = 60


class Forgetful(TrainingRun):
    """Marks only some of the rows that change."""

    def forget(self, keep: slice, *, by_ids: bool = False) -> dict[str, Any] | None:
        """Trains one step; marks only some of its ids, or returns only some if ``by_ids``."""
        self.step += 1
        self.state, ids = model.move(self.state, self.step, rows=400)
        kept = {name: rows[keep] for name, rows in ids.items()}
        self.touched = touched.mark(self.touched, ids if by_ids else kept)
        self.states[self.step] = self.state
        return {name: np.asarray(rows) for name, rows in kept.items()} if by_ids else None


@pytest.fixture
def run(tmp_path) -> Forgetful:
    return Forgetful(tmp_path, options=options())


@pytest.mark.parametrize("by_ids", [False, True])
@pytest.mark.parametrize("after_restore", [False, True])
def test_rows_missing_from_all_records_make_append_save_a_base(run, by_ids, after_restore):
    with run.open() as manager:
        run.save_initial()
        for _ in range(3):
            run.append()
        manager.wait_appended()
        if after_restore:
            run.continue_from(manager.restore_latest(run.state))
        with pytest.warns(UserWarning, match=r"(?s)is saved as a base.*table tables/.*: rows \d"):
            for _ in range(8):
                ids = run.forget(slice(None, None, 2), by_ids=by_ids)
                logged = manager.append(run.step, run.state, touched=run.touched, ids=ids)
                if logged.saved is not None:
                    break
        assert logged.saved is not None and logged.saved.kind == "base"
        assert "rows differ from those" in logged.reason
        saved = run.step
        manager.wait_until_finished()
        # Points of the previous run, which this one resumed from, stay valid.
        assert [point.step for point in manager.recovery_points()] == (
            [3, 2, 1] if after_restore else []
        )
        for _ in range(2):
            assert run.append().kind == "full"
        manager.wait_appended()
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found is not None and found.step == run.step
        model.assert_same(found.state, run.state)
        model.assert_same(reader.restore(saved, run.state).state, run.states[saved])


def test_auditing_every_row_of_a_small_state_raises_no_false_alarm(run):
    with run.open() as manager:
        run.save_initial()
        for number in range(ALL_LOOKED_AT):
            ids = run.forget(slice(None), by_ids=True) if number % 3 == 0 else None
            if ids is None:
                run.train()
            logged = manager.append(run.step, run.state, touched=run.touched, ids=ids)
            assert logged.saved is None
            if number == ALL_LOOKED_AT // 2:
                assert "rows differ" not in run.save().reason


def test_without_the_tracking_audit_no_record_is_audited(run):
    given = deltackpt.ManagerOptions(
        deltas=deltackpt.DeltaOptions(tracking_audit=False), wal=options().wal
    )
    with run.open(given) as manager:
        run.save_initial()
        for _ in range(8):
            run.forget(slice(0))
            logged = manager.append(run.step, run.state, touched=run.touched)
            assert logged.saved is None
    assert jnp.any(run.state["tables"]["users"] != run.states[0]["tables"]["users"])


def test_rows_on_an_accelerator_are_checked_by_the_next_call(run, monkeypatch):
    monkeypatch.setattr(FieldSource, "on_host", property(lambda source: False))
    monkeypatch.setattr(audit, "_EVERY", 1)
    with run.open() as manager:
        run.save_initial()
        run.append()
        run.forget(slice(0))
        assert manager.append(run.step, run.state, touched=run.touched).kind == "full"
        with (
            pytest.warns(UserWarning, match="saved as a base"),
            pytest.raises(TrackingError, match="rows differ from those in the WAL"),
        ):
            manager.wait_appended()
        assert manager.recovery_points() == []
        saved = run.append().saved
        assert saved is not None and saved.kind == "base"


def test_records_after_a_base_for_unmarked_rows_do_not_build_on_an_older_step(run):
    """The audit fails after a restore, before anything is appended."""
    with run.open() as manager:
        run.save_initial()
        run.append()
        manager.wait_appended()
    with run.open() as manager:
        run.continue_from(manager.restore_latest(run.state))
        manager.verify_tracking(run.state, touched=run.touched)
        run.forget(slice(0))
        with pytest.raises(TrackingError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.verify_tracking(run.state, touched=run.touched)
        assert run.append().saved.kind == "base"
        base = run.step
        manager.wait_until_finished()
        assert run.append().kind == "full"
        manager.wait_appended()
        with pytest.raises(OptionError, match="recovery point"):
            manager.delete(base)
        run.check(manager.restore_latest(run.state))


# Ids of calls that appended nothing.


def named(manager: Any, run: Forgetful, since: int) -> deltackpt.Appended:
    """Appends one step with the ids of all steps after ``since``."""
    run.train()
    ids = model.moved(*(run.states[step] for step in range(since, run.step + 1)))
    return manager.append(run.step, run.state, touched=run.touched, ids=ids)


@pytest.mark.parametrize("by_ids", [False, True])
def test_rows_named_when_nothing_could_be_appended_are_not_missed_later(run, by_ids):
    """The step that the next record would continue from was deleted, so the call saves a step."""
    with run.open() as manager:
        run.save_initial()
        run.save()
        assert named(manager, run, since=0).kind == "full"
        run.save()
        manager.delete(run.step)
        logged = named(manager, run, since=2) if by_ids else run.append()
        assert logged.saved is not None
        for _ in range(2):
            assert named(manager, run, since=run.step).kind == "full"
        run.save()
        assert named(manager, run, since=run.step - 1).kind == "full"


def test_records_after_a_removed_wal_continue_from_the_save_that_replaces_it(run):
    """The ids name only rows since the last call; earlier rows were in the removed records."""
    with run.open() as manager:
        run.save_initial()
        for _ in range(2):
            named(manager, run, since=run.step)
        manager.wait_appended()
        shutil.rmtree(run.root / "log")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while (logged := named(manager, run, since=run.step)).saved is None:
                with contextlib.suppress(AppendFailed):
                    manager.wait_appended()
        for _ in range(2):
            assert named(manager, run, since=run.step).kind == "full"
        manager.wait_appended()
        with pytest.raises(OptionError, match="recovery point"):
            manager.delete(logged.saved.step)
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))


def test_a_state_in_memory_is_appended_after_a_restored_one_was(run):
    """The ids name the rows since a call on the branch that was briefly left."""
    with run.open() as manager:
        run.save_initial()
        for _ in range(2):
            named(manager, run, since=run.step)
        manager.wait_appended()
        found = manager.restore(0, run.state)
        manager.append(0, found.state, touched=found.touched)
        assert named(manager, run, since=2).kind == "full"
        manager.wait_appended()
        run.check(manager.restore_latest(run.state))


@pytest.mark.parametrize("restored", [False, True])
def test_rows_of_a_call_with_a_bad_step_are_in_the_next_record(run, restored):
    with run.open() as manager:
        run.save_initial()
        assert named(manager, run, since=0).kind == "full"
        manager.wait_appended()
        if restored:
            run.continue_from(manager.restore_latest(run.state))
        run.train()
        with pytest.raises(OptionError, match="-1"):
            manager.append(-1, run.state, touched=run.touched, ids={})
        assert named(manager, run, since=run.step).kind == "full"
        manager.wait_appended()
        run.save()
        manager.delete(run.step)
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found.step == 3
        run.check(found)


@pytest.mark.parametrize("ids", [{"users": [[1], [2, 3]]}, {"users": [-1]}, ["users"]])
def test_invalid_ids_still_start_the_wal_as_on_the_other_processes(run, ids):
    with run.open() as manager:
        run.save_initial()
    with run.open() as manager:
        run.continue_from(manager.restore_latest(run.state))
        run.train()
        with pytest.raises((OptionError, TypeError, ValueError, AttributeError)):
            manager.append(run.step, run.state, touched=run.touched, ids=ids)
        assert [*(run.root / "log").glob("*.msgpack")]
        # The stamps include these rows.
        assert named(manager, run, since=run.step).kind == "full"
        manager.wait_appended()
        run.check(manager.restore_latest(run.state))


@pytest.mark.parametrize("failed_by_ids", [False, True])
def test_rows_of_a_call_that_cannot_start_the_wal_are_in_the_next_record(run, failed_by_ids):
    with run.open() as manager:
        run.save_initial()
        run.append()
        manager.wait_appended()
    with run.open() as manager, Disk(run.root) as disk:
        run.continue_from(manager.restore_latest(run.state))
        disk.fail(path=r"^log/[^/]*$", errno=errno.ENOSPC)
        with pytest.raises(OutOfSpace, match="log"):
            if failed_by_ids:
                named(manager, run, since=1)
            else:
                run.append()
        assert named(manager, run, since=2).kind == "full"
        manager.wait_appended()
        newest = run.step
        run.save()
        manager.delete(run.step)
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found is not None and found.step == newest
        run.check(found)


# An epoch header that cannot be written when a run's points must be invalidated.


def again(run: Forgetful, call: Any) -> Any:
    """Passes the unchanged state to a call as that of the next step."""
    run.step += 1
    return call(run.step, run.state, touched=run.touched)


def misled(manager: Any, run: Forgetful, how: str) -> None:
    """Makes a manager detect that its WAL is wrong."""
    if how == "verify":
        manager.verify_tracking(run.state, touched=run.touched)
        run.forget(slice(0))
        with pytest.raises(TrackingError, match="tables/"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.verify_tracking(run.state, touched=run.touched)
        return
    ids = run.forget(slice(0), by_ids=True)
    manager.append(run.step, run.state, touched=run.touched, ids=ids)
    with pytest.raises(TrackingError, match="marked but not named"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again(run, manager.save)


def logged_whole(manager: Any, run: Forgetful, how: str) -> deltackpt.Appended:
    """Appends a step with all rows marked, and named if ``how`` is ``"ids"``."""
    ids = run.forget(slice(None), by_ids=True) if how == "ids" else None
    if ids is None:
        run.train()
    return manager.append(run.step, run.state, touched=run.touched, ids=ids)


@pytest.mark.parametrize("how", ["verify", "ids"])
def test_a_wal_that_cannot_be_ended_fails_every_call_until_it_is(run, how):
    with run.open() as manager, Disk(run.root) as disk:
        run.save_initial()
        for _ in range(2):
            run.append()
        manager.wait_appended()
        disk.fail(path=r"^log/[^/]*$", errno=errno.ENOSPC, times=None)
        misled(manager, run, how)
        for call in (
            lambda: again(run, manager.append),
            manager.wait_appended,
            lambda: manager.restore_latest(run.state),
            lambda: again(run, manager.save),
            manager.wait_until_finished,
        ):
            with pytest.raises(OutOfSpace, match="log"):
                call()
        disk.clear()
        manager.wait_appended()
        assert manager.recovery_points() == []
        assert logged_whole(manager, run, how).saved is not None
        saved = run.step
        logged_whole(manager, run, how)
        assert manager.wait_appended() == manager.recovery_points()[0]
        assert manager.recovery_points()[0].step == run.step
        assert manager.recovery_points()[-1].step > saved
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found is not None and found.step == run.step
        model.assert_same(found.state, run.state)


@pytest.mark.parametrize("how", ["verify", "ids"])
def test_a_wal_whose_directory_is_gone_is_restarted(tmp_path, run, how):
    with run.open() as manager:
        run.save_initial()
        for _ in range(2):
            run.append()
        manager.wait_appended()
        shutil.rmtree(tmp_path / "log")
        misled(manager, run, how)
        for _ in range(2):
            logged_whole(manager, run, how)
        manager.wait_appended()
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found is not None and found.step == run.step
        model.assert_same(found.state, run.state)


# Ids alone: only the caller knows which rows were touched.


@pytest.fixture
def untracked(tmp_path) -> TrainingRun:
    """A run that passes no TouchState and does not hash rows."""
    deltas = deltackpt.DeltaOptions(tracking="touched")
    return TrainingRun(tmp_path, options=deltackpt.ManagerOptions(deltas=deltas, wal=options().wal))


def named_alone(run: TrainingRun, **changes: Any) -> deltackpt.Appended:
    """Appends one step with its ids; ``changes`` replace arguments of ``append()``."""
    step = run.train()
    ids = model.moved(run.states[step - 1], run.state)
    return run.manager.append(**{"step": step, "state": run.state, "ids": ids, **changes})


def check_after_a_restart(run: TrainingRun, step: int) -> None:
    """Asserts that the newest restored state is the one of a step."""
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found is not None and found.step == step
        run.check(found)


@pytest.mark.parametrize("bad", ["step", "leaf", "lease"])
def test_ids_of_a_call_that_failed_early_are_in_the_next_record(untracked, bad, monkeypatch):
    run = untracked
    with run.open() as manager:
        manager.save(0, run.state)
        assert named_alone(run).kind == "full"
        manager.wait_appended()
        with pytest.raises(DeltackptError), monkeypatch.context() as patch:
            if bad == "step":
                named_alone(run, step=-1)
            elif bad == "leaf":
                named_alone(run, state={**run.state, "bad": object()})
            else:
                patch.setattr(manager._recorder, "_report", fenced)
                named_alone(run)
        assert named_alone(run).kind == "full"
        manager.wait_appended()
    check_after_a_restart(run, 3)


def fenced() -> None:
    raise FencedError("another trainer took over")


#: Calls whose ids take 8 MB.
MANY_CALLS = 1000


@pytest.mark.parametrize("bad", ["items", "leaf"])
@pytest.mark.parametrize("tracked", [False, True])
def test_ids_of_many_calls_take_the_memory_of_one_set(run, untracked, bad, tracked):
    run = run if tracked else untracked
    ids = {name: np.arange(rows) for name, rows in model.ROWS.items()}
    bad_items = {"items": {"at": object()}} if bad == "items" else {}
    with run.open() as manager:
        touched = {"touched": run.touched} if tracked else {}
        manager.save(0, run.state, **touched)
        state = {**run.state, "bad": object()} if bad == "leaf" else run.state

        def call(step: int) -> None:
            with contextlib.suppress(DeltackptError):
                manager.append(step, state, ids=ids, full=False, **bad_items, **touched)

        call(1)
        manager.wait_appended()
        tracemalloc.start()
        for step in range(2, MANY_CALLS):
            call(step)
        manager.wait_appended()
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert grown < 1 << 20
