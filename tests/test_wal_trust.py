# SPDX-License-Identifier: Apache-2.0
"""Rows that changed without being marked: ``append()`` finds them; no wrong state is restored."""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import tracemalloc
from typing import Any
from unittest import mock

import jax.numpy as jnp
import model
import numpy as np
import pytest
from test_follower import grown
from test_wal import WalRun, options, quiet

import deltackpt
from deltackpt import touched
from deltackpt.errors import (
    AppendFailed,
    DeltackptError,
    FencedError,
    OptionError,
    OutOfSpace,
    StorageError,
    TrackingError,
)
from deltackpt.save import capture
from deltackpt.testing import Disk, TrainingRun
from deltackpt.wal import audit, recorder

#: Enough records to audit every row of the small state once.
ALL_LOOKED_AT = 60


class Forgetful(WalRun):
    """Marks only some of the rows that change, or names rows by ids."""

    def forget(self, keep: slice, *, by_ids: bool = False) -> dict[str, Any] | None:
        """Trains one step; marks only some of its ids, or returns only some if ``by_ids``."""
        self.step += 1
        self.state, ids = model.move(self.state, self.step, rows=400)
        kept = {name: rows[keep] for name, rows in ids.items()}
        self.touched = touched.mark(self.touched, ids if by_ids else kept)
        self.states[self.step] = self.state
        return {name: np.asarray(rows) for name, rows in kept.items()} if by_ids else None

    def append_forgetful(self, keep: slice, *, by_ids: bool = False) -> deltackpt.Appended:
        ids = self.forget(keep, by_ids=by_ids)
        return self.manager.append(self.step, self.state, touched=self.touched, ids=ids)

    def append_named(self, since: int | None = None) -> deltackpt.Appended:
        """Appends one step with the ids of all steps after ``since`` (default: the last one)."""
        since = self.step if since is None else since
        self.train()
        ids = model.moved(*(self.states[step] for step in range(since, self.step + 1)))
        return self.manager.append(self.step, self.state, touched=self.touched, ids=ids)

    def verify(self) -> Any:
        return self.manager.verify_tracking(self.state, touched=self.touched)

    def check_newest(self) -> None:
        """Waits for all records and checks the newest restored state."""
        self.manager.wait_appended()
        self.check(self.manager.restore_latest(self.state))


def check_after_a_restart(run: TrainingRun, step: int | None = None) -> None:
    """Asserts that the newest restored state is the one of a step (default: the last one)."""
    with run.open() as reader:
        found = reader.restore_latest(run.state)
        assert found.step == (run.step if step is None else step)
        run.check(found)


@pytest.fixture
def run(tmp_path) -> Forgetful:
    return Forgetful(tmp_path, options=options())


def test_auditing_every_row_of_a_small_state_raises_no_false_alarm(run):
    with run.started():
        for number in range(ALL_LOOKED_AT):
            by_ids = number % 3 == 0
            logged = run.append_forgetful(slice(None), by_ids=True) if by_ids else run.append()
            assert logged.saved is None
            if number == ALL_LOOKED_AT // 2:
                assert "rows differ" not in run.save().reason


def test_without_the_tracking_audit_no_record_is_audited(run):
    deltas = deltackpt.DeltaOptions(tracking_audit=False)
    with run.started(deltackpt.ManagerOptions(deltas=deltas, wal=options().wal)):
        for _ in range(8):
            assert run.append_forgetful(slice(0)).saved is None
    assert jnp.any(run.state["tables"]["users"] != run.states[0]["tables"]["users"])


def test_rows_on_an_accelerator_are_checked_by_the_next_call(run, monkeypatch):
    monkeypatch.setattr(capture, "on_host", lambda array: False)
    monkeypatch.setattr(audit, "_EVERY", 1)
    with run.started() as manager:
        run.append()
        assert run.append_forgetful(slice(0)).kind == "full"
        with (
            pytest.warns(UserWarning, match="saved as a base"),
            pytest.raises(TrackingError, match="rows differ from those in the WAL"),
        ):
            manager.wait_appended()
        assert run.points() == []
        saved = run.append().saved
        assert saved.kind == "base"


def test_records_after_a_base_for_unmarked_rows_do_not_build_on_an_older_step(run):
    """The audit fails after a restore, before anything is appended."""
    run.begin(1)
    with run.open() as manager:
        run.resume()
        run.verify()
        run.forget(slice(0))
        with pytest.raises(TrackingError), quiet():
            run.verify()
        assert run.append().saved.kind == "base"
        base = run.step
        manager.wait_until_finished()
        assert run.append().kind == "full"
        manager.wait_appended()
        with pytest.raises(OptionError, match="recovery point"):
            manager.delete(base)
        run.check_newest()


# Ids of calls that appended nothing.


@pytest.mark.parametrize("by_ids", [False, True])
def test_rows_named_when_nothing_could_be_appended_are_not_missed_later(run, by_ids):
    """The step that the next record would continue from was deleted, so the call saves a step."""
    with run.started() as manager:
        run.save()
        assert run.append_named(since=0).kind == "full"
        run.save()
        manager.delete(run.step)
        logged = run.append_named(since=2) if by_ids else run.append()
        assert logged.saved is not None
        for _ in range(2):
            assert run.append_named().kind == "full"
        run.save()
        assert run.append_named(since=run.step - 1).kind == "full"


def test_records_after_a_removed_wal_continue_from_the_save_that_replaces_it(run):
    """The ids name only rows since the last call; earlier rows were in the removed records."""
    with run.started() as manager:
        for _ in range(2):
            run.append_named()
        manager.wait_appended()
        shutil.rmtree(run.root / "log")
        with quiet():
            while (logged := run.append_named()).saved is None:
                with contextlib.suppress(AppendFailed):
                    manager.wait_appended()
        for _ in range(2):
            assert run.append_named().kind == "full"
        manager.wait_appended()
        with pytest.raises(OptionError, match="recovery point"):
            manager.delete(logged.saved.step)
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))


# Calls that save a step instead of a record, and their effect on later calls.


@pytest.mark.parametrize("restored", [False, True])
def test_rows_of_a_call_with_a_bad_step_are_in_the_next_record(run, restored):
    with run.started() as manager:
        assert run.append_named().kind == "full"
        manager.wait_appended()
        if restored:
            run.resume()
        run.train()
        with pytest.raises(OptionError, match="-1"):
            manager.append(-1, run.state, touched=run.touched, ids={})
        assert run.append_named().kind == "full"
        manager.wait_appended()
        run.save()
        manager.delete(run.step)
    check_after_a_restart(run, 3)


@pytest.mark.parametrize("ids", [{"users": [[1], [2, 3]]}, {"users": [-1]}, ["users"]])
def test_invalid_ids_still_start_the_wal_as_on_the_other_processes(run, ids):
    run.begin(0)
    with run.open() as manager:
        run.resume()
        run.train()
        with pytest.raises((OptionError, TypeError, ValueError, AttributeError)):
            manager.append(run.step, run.state, touched=run.touched, ids=ids)
        assert [*(run.root / "log").glob("*.msgpack")]
        # The stamps include these rows.
        assert run.append_named().kind == "full"
        run.check_newest()


@pytest.mark.parametrize("failed_by_ids", [False, True])
def test_rows_of_a_call_that_cannot_start_the_wal_are_in_the_next_record(run, failed_by_ids):
    run.begin(1)
    with run.open() as manager, Disk(run.root) as disk:
        run.resume()
        disk.fail(path=r"^log/[^/]*$", errno=errno.ENOSPC)
        with pytest.raises(OutOfSpace, match="log"):
            run.append_named() if failed_by_ids else run.append()
        assert run.append_named().kind == "full"
        manager.wait_appended()
        newest = run.step
        run.save()
        manager.delete(run.step)
    check_after_a_restart(run, newest)


@pytest.mark.parametrize("dense_every", [1, 2])
def test_rows_named_in_a_call_that_saved_a_step_instead_are_not_missed(run, dense_every):
    kinds = set()
    # After any record the WAL exceeds its size limit.
    with run.started(options(max_wal_ratio=1e-9, dense_every=dense_every)) as manager:
        for _ in range(8):
            logged = run.append_named()
            kinds.add("saved" if logged.saved else logged.kind)
            manager.wait_appended()
        run.save()
    assert "saved" in kinds and kinds & {"soft", "full"}
    check_after_a_restart(run)


def test_an_epoch_that_cannot_be_opened_is_begun_again_even_for_the_former_tables(run):
    with run.started(appends=1) as manager:
        larger = grown(run.state, 5)
        marks = model.new_touched(larger)
        manager.save(2, larger, touched=marks)
        fails = mock.Mock(side_effect=StorageError("log/1.msgpack: found an I/O error"))
        with mock.patch.object(recorder, "head_of", fails):
            with pytest.raises(StorageError, match="log/1"):
                manager.append(3, larger, touched=marks)
        run.step = 3
        assert run.append().saved is not None
        assert run.append().kind == "full"
        manager.wait_appended()
        manager.wait_until_finished()
    check_after_a_restart(run)


# An epoch header that cannot be written when a run's points must be invalidated.


def again(run: Forgetful, call: Any) -> Any:
    """Passes the unchanged state to a call as that of the next step."""
    run.step += 1
    return call(run.step, run.state, touched=run.touched)


def misled(manager: Any, run: Forgetful, how: str) -> None:
    """Makes a manager detect that its WAL is wrong."""
    if how == "verify":
        run.verify()
        run.forget(slice(0))
        with pytest.raises(TrackingError, match="tables/"), quiet():
            run.verify()
        return
    run.append_forgetful(slice(0), by_ids=True)
    with pytest.raises(TrackingError, match="marked but not named"), quiet():
        again(run, manager.save)


def append_whole(run: Forgetful, how: str) -> deltackpt.Appended:
    """Appends a step with all rows marked, and named if ``how`` is ``"ids"``."""
    return run.append_forgetful(slice(None), by_ids=True) if how == "ids" else run.append()


@pytest.mark.parametrize("how", ["verify", "ids"])
def test_a_wal_that_cannot_be_ended_fails_every_call_until_it_is(run, how):
    with run.open() as manager, Disk(run.root) as disk:
        run.save_initial()
        run.append_durably(2)
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
        assert run.points() == []
        assert append_whole(run, how).saved is not None
        saved = run.step
        append_whole(run, how)
        assert manager.wait_appended() == manager.recovery_points()[0]
        assert run.points()[0] == run.step and run.points()[-1] > saved
    check_after_a_restart(run)


@pytest.mark.parametrize("how", ["verify", "ids"])
def test_a_wal_whose_directory_is_gone_is_restarted(tmp_path, run, how):
    with run.started(appends=2) as manager:
        shutil.rmtree(tmp_path / "log")
        misled(manager, run, how)
        for _ in range(2):
            append_whole(run, how)
        manager.wait_appended()
    check_after_a_restart(run)


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


@pytest.mark.parametrize("bad", ["step", "leaf", "lease"])
def test_ids_of_a_call_that_failed_early_are_in_the_next_record(untracked, bad, monkeypatch):
    run = untracked
    with run.open() as manager:
        manager.save(0, run.state)
        assert named_alone(run).kind == "full"
        manager.wait_appended()
        changes = {"step": {"step": -1}, "leaf": {"state": {**run.state, "bad": object()}}}
        with pytest.raises(DeltackptError), monkeypatch.context() as patch:
            if bad == "lease":
                patch.setattr(manager._recorder, "_report", fenced)
            named_alone(run, **changes.get(bad, {}))
        assert named_alone(run).kind == "full"
        manager.wait_appended()
    check_after_a_restart(run, 3)


def fenced() -> None:
    raise FencedError("another trainer took over")


@pytest.mark.parametrize("saves", [False, True])
def test_records_of_an_earlier_state_do_not_replay_onto_the_save_that_it_left(run, saves):
    """The earlier state is that of the last record; only a save has seen a later one."""
    with run.open() as manager:
        run.save_initial()
        run.append()
        earlier = run.state, run.touched
        run.train(2)
        run.save()
        run.state, run.touched = earlier
        if saves:
            run.save()
        saved = run.append().saved
        assert (saved is None) == saves
        manager.wait_until_finished()
        assert run.append().kind == "full"
        manager.wait_appended()
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))
    check_after_a_restart(run, run.step)


@pytest.mark.parametrize("by_ids", [False, True])
def test_a_save_of_an_earlier_state_is_what_the_next_record_continues_from(run, by_ids):
    with run.open() as manager:
        run.save_initial()
        for _ in range(2):
            run.append()
        earlier = run.state, run.touched
        for _ in range(3):
            logged = run.append_named() if by_ids else run.append()
            assert logged.kind == "full"
        manager.wait_appended()
        run.state, run.touched = earlier
        run.save(wait=False)
        saved = run.step
        # The clock passes that of the last record.
        run.train(3)
        for _ in range(2):
            logged = run.append_named(saved) if by_ids else run.append()
            assert logged.kind == "full"
        manager.wait_until_finished()
        manager.wait_appended()
        for point in manager.recovery_points():
            run.check(manager.restore(point, run.state))
        assert manager.recovery_points()[0].step == run.step
    check_after_a_restart(run, run.step)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("ids", [None, {"users": [-1]}])
def test_a_step_is_saved_if_the_ids_of_an_earlier_call_are_unknown(untracked, ids, saves):
    run = untracked
    with run.open() as manager:
        manager.save(0, run.state)
        assert named_alone(run).kind == "full"
        with pytest.raises(DeltackptError):
            named_alone(run, ids=ids)
        if saves:
            manager.save(run.train(), run.state)
        logged = named_alone(run)
        assert logged.saved is not None and "did not name its rows" in logged.reason
        manager.wait_until_finished()
        for _ in range(2):
            assert named_alone(run).kind == "full"
        manager.wait_appended()
    check_after_a_restart(run, run.step)


def test_a_step_deleted_while_an_older_one_is_inspected_is_not_a_recovery_point(run):
    with run.open():
        run.save_initial()
        older = run.step
        run.save()
    with run.open() as manager:
        resumed = run.resume().step
        run.append(full=True)
        run.save(force_base=True)
        newest = manager.latest_step()
        manager.wait_appended()
        manager.restore(older, run.state)
        for step in (resumed, newest):
            manager.delete(step)
        appended = run.append()
        recovery = getattr(appended.recovery, "step", appended.recovery)
        assert recovery not in (resumed, newest)
        manager.wait_until_finished()
        assert run.append().kind == "full"
        manager.wait_appended()
    check_after_a_restart(run, run.step)


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
