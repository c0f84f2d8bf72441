# SPDX-License-Identifier: Apache-2.0
"""Points and steps removed during a restore: trimmed, or compacted.

At the n-th access of a restore, the directory switches to a later state of its trainer. A restore
of the newest state succeeds and reports no damage. A restore of a given step or point is complete,
or its error names what can be restored instead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dense_states
import model
import numpy as np
import pytest
from dense_states import Loop, opened
from test_step_gone import Accesses, watched

import deltackpt
from deltackpt import RecoveryPoint, inspect
from deltackpt.errors import OptionError, StepGone, StepNotFound
from deltackpt.maintenance.compact import compact
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading import stored_saves

LOG = deltackpt.WalOptions(dense="delta")
GONE = (StepGone, StepNotFound)
#: One in this many accesses of a restore is tested.
STRIDE = 9


def log(saver: deltackpt.CheckpointManager, loop: Loop, *steps: int, **append: Any) -> None:
    """Trains and appends each step, and waits until the records are durable."""
    for step in steps:
        loop.train()
        loop.states[step] = loop.state
        saver.append(step, loop.state, touched=loop.touched, **append)
    saver.wait_appended()


def trimmed(saver: deltackpt.CheckpointManager) -> None:
    """Waits for the trim that the last committed step started."""
    saver.wait_until_finished()
    # The next ``append()`` or ``save()`` would notice the commit, but here there is neither.
    saver._recorder.recovery(fresh=True)
    if saver._recorder._trimming is not None:
        saver._recorder._trimming.result()


class Moments(NamedTuple):
    """A directory before and after its trainer's next action."""

    before: Path
    after: Path
    states: dict[int, Any]

    def check(self, found: deltackpt.Restored) -> None:
        model.assert_same(found.state, self.states[found.step])


@contextlib.contextmanager
def warnings_are(action: Any) -> Iterator[None]:
    """Ignores warnings, or raises them if ``action`` is ``"error"``."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        yield


def restore_newest(reader: deltackpt.CheckpointManager) -> deltackpt.Restored:
    """Restores the newest state; nothing is skipped."""
    result = reader.restore_latest(dense_states.initial())
    assert result.skipped == ()
    return result


def moments_of(
    path: Path,
    first: Callable[[Any, Loop], None],
    then: Callable[[Any, Loop], None],
    **options: Any,
) -> Moments:
    """Runs two actions of a trainer and copies the directory in between.

    Args:
      path: parent of the directory and its copy.
      first: the first action; receives the manager and the loop.
      then: the second action; same arguments.
      **options: options of the manager.
    """
    loop, before, root = Loop(), path / "before", path / "root"
    with opened(root, wal=LOG, **options) as saver:
        first(saver, loop)
        saver.wait_until_finished()
        shutil.copytree(root, before)
        then(saver, loop)
    return Moments(before, root, loop.states)


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def become(root: Path, after: Path) -> None:
    """Applies a trainer's changes: adds new steps by rename, then removes the old files."""
    for name in sorted(os.listdir(after)):
        if name.isdecimal() and not (root / name).exists():
            shutil.copytree(after / name, root / f"{name}.coming")
            (root / f"{name}.coming").rename(root / name)
    for name in ("compacted", "log"):
        if (after / name).exists():
            shutil.copytree(after / name, root / name, dirs_exist_ok=True)
    for name in sorted(os.listdir(root), key=len, reverse=True):
        if name.isdecimal() and not (after / name).exists():
            shutil.rmtree(root / name)
    for name in files_of(root) - files_of(after):
        (root / name).unlink()


@pytest.fixture(autouse=True)
def nobody_at_work(monkeypatch) -> None:
    """Readers do not wait to see whether a removal is under way."""
    monkeypatch.setattr(stored_saves, "_GONE_INTERVAL_SECS", 0.0)


def reading(root: Path) -> deltackpt.CheckpointManager:
    options = deltackpt.ManagerOptions(access="read", wal=deltackpt.WalOptions())
    return deltackpt.CheckpointManager(root, handlers=dense_states.HANDLERS, options=options)


def every_turn(
    moments: Moments,
    path: Path,
    call: Callable[[deltackpt.CheckpointManager], None],
    stride: int = STRIDE,
) -> None:
    """Calls ``call`` once for each tested access at which the directory switches."""
    root, at = path / "turning", 1
    while True:
        shutil.copytree(moments.before, root)
        with reading(root) as reader:
            shutil.rmtree(root)
            shutil.copytree(moments.before, root)
            accesses = Accesses([root], at, lambda: become(root, moments.after))
            try:
                with watched(accesses):
                    call(reader)
            except Exception as error:
                raise AssertionError(f"at access {at}: {type(error).__name__}: {error}") from error
            finally:
                shutil.rmtree(root)
        if not accesses.came:
            return
        at += stride


def logged(saver: Any, loop: Loop) -> None:
    """Saves steps 1 and 2, and appends points 3 to 5."""
    loop.steps(saver, 1, 2)
    log(saver, loop, 3, 4, 5)


def saved_twice(saver: Any, loop: Loop) -> None:
    """Saves two more steps, so that the points are trimmed."""
    loop.steps(saver, 6)
    log(saver, loop, 7)
    loop.steps(saver, 8)
    trimmed(saver)


@pytest.fixture(scope="module")
def trimming(tmp_path_factory) -> Moments:
    found = moments_of(tmp_path_factory.mktemp("trimming"), logged, saved_twice, max_to_keep=1)
    with reading(found.after) as reader:
        assert [point.step for point in reader.recovery_points()] == [7]
    return found


def test_if_the_newest_point_is_trimmed_the_newer_step_is_restored(trimming, tmp_path):
    seen = set()

    def newest(reader: deltackpt.CheckpointManager) -> None:
        with warnings_are("error"):
            result = restore_newest(reader)
        trimming.check(result)
        seen.add(result.step)

    every_turn(trimming, tmp_path, newest)
    assert seen == {5, 8}


@pytest.mark.parametrize("by", ["number", "point"])
def test_a_trimmed_point_is_restored_or_the_error_names_the_nearest(trimming, tmp_path, by):
    with reading(trimming.before) as reader:
        [asked] = [point for point in reader.recovery_points() if point.step == 4]
    errors: list[str] = []

    def one(reader: deltackpt.CheckpointManager) -> None:
        try:
            trimming.check(reader.restore(asked if by == "point" else 4, dense_states.initial()))
        except GONE as error:
            errors.append(str(error))

    every_turn(trimming, tmp_path, one)
    assert any("found it removed" in text for text in errors)
    near = "nearest that can be restored: recovery point 7 of WAL epoch"
    for text in errors:
        assert near in text or "step 2" in text, text


def went_back(saver: Any, loop: Loop) -> None:
    """Training resumes from step 1, which abandons step 2 and the points above it."""
    loop.states = {}
    with warnings_are("ignore"):
        found = saver.restore(1, loop.state)
        assert found.step == 1
        loop.state, loop.touched = found.state, found.touched
        loop.steps(saver, 3)


def went_back_and_on(saver: Any, loop: Loop) -> None:
    """Also saves one more step, so that the abandoned WAL epoch is trimmed."""
    went_back(saver, loop)
    with warnings_are("ignore"):
        loop.steps(saver, 4)
        trimmed(saver)


@pytest.fixture(scope="module", params=[went_back, went_back_and_on])
def going_back(tmp_path_factory, request) -> Moments:
    return moments_of(tmp_path_factory.mktemp("back"), logged, request.param)


def test_a_newest_point_abandoned_by_a_rollback_is_not_reported_damaged(going_back, tmp_path):
    seen = set()

    def newest(reader: deltackpt.CheckpointManager) -> None:
        with warnings_are("error"):
            result = restore_newest(reader)
        seen.add((result.step, result.point is not None))

    every_turn(going_back, tmp_path, newest, stride=20)
    assert (5, True) in seen and len(seen) >= 2


def test_a_point_abandoned_by_a_rollback_is_restored_or_reported_gone(going_back, tmp_path):
    with reading(going_back.before) as reader:
        asked = reader.recovery_points()[0]

    def one(reader: deltackpt.CheckpointManager) -> None:
        with contextlib.suppress(*GONE):
            assert reader.restore(asked, dense_states.initial()).step == 5

    every_turn(going_back, tmp_path, one, stride=20)


def test_an_intact_wal_is_verified_during_a_rollback(going_back, tmp_path):
    def verified(reader: deltackpt.CheckpointManager) -> None:
        report = verify_root(tmp_path / "turning")
        assert report.problems == () and all(one.restorable for one in report.points)

    every_turn(going_back, tmp_path, verified, stride=120)


def test_points_are_listed_while_they_are_trimmed(trimming, tmp_path):
    def listed(reader: deltackpt.CheckpointManager) -> None:
        found = [point.step for point in reader.recovery_points()]
        assert {*found} <= {3, 4, 5, 7}, found

    every_turn(trimming, tmp_path, listed)


def test_errors_for_trimmed_and_unknown_points_name_the_nearest_steps(tmp_path):
    loop = Loop()
    with opened(tmp_path / "root", wal=LOG) as saver:
        logged(saver, loop)
        asked = saver.recovery_points()[0]
        saved_twice(saver, loop)
        for wanted, near in (
            (asked, "step 2 and step 6"),
            (5, "step 2 and step 6"),
            (5000, "step 8"),
        ):
            with pytest.raises(StepNotFound, match=f"nearest that can be restored.*{near}"):
                saver.restore(wanted, loop.state)
        # The failed restores do not affect training.
        loop.train()
        assert "rolled back" not in loop.save(saver, 9).reason
        model.assert_same(saver.restore(7, loop.state).state, loop.states[7])


def test_records_lost_without_a_later_step_are_damage(tmp_path):
    root, loop = tmp_path / "root", Loop()
    with opened(root, wal=LOG) as saver:
        logged(saver, loop)

    def lose() -> None:
        for segment in (root / "log").glob("*/0/*"):
            segment.unlink()

    folders = [next((root / "log").glob("*/0"))]
    with reading(root) as reader:
        whole = Accesses(folders, 0, lose)
        with watched(whole):
            reader.restore(5, loop.state)
        with (
            watched(Accesses(folders, whole.count, lose)),
            pytest.warns(UserWarning, match="point 5 is skipped"),
        ):
            result = reader.restore_latest(loop.state)
    assert result.step == 2
    assert [step for step, _ in result.skipped] == [5]


@pytest.fixture(scope="module")
def compaction(tmp_path_factory) -> Moments:
    path = tmp_path_factory.mktemp("compaction")

    def first(saver: Any, loop: Loop) -> None:
        loop.steps(saver, 1, 2, 3, 4)
        log(saver, loop, 5)

    def then(saver: Any, loop: Loop) -> None:
        assert compact(path / "root", step=4) is not None
        loop.steps(saver, 6)

    return moments_of(path, first, then, max_to_keep=2)


@pytest.mark.parametrize("asked", [None, 3, 4, 5])
def test_a_chain_compacted_during_a_restore_is_read_through_its_base(compaction, tmp_path, asked):
    assert not (compaction.after / "1").exists() and (compaction.after / "compacted/4").exists()

    def restore(reader: deltackpt.CheckpointManager) -> None:
        with warnings_are("ignore"):  # The read goes through another base.
            if asked is None:
                return compaction.check(restore_newest(reader))
            # Retention keeps two steps; earlier ones are removed with their base.
            with contextlib.suppress(*GONE * (asked == 3)):
                compaction.check(reader.restore(asked, dense_states.initial()))

    every_turn(compaction, tmp_path, restore, stride=19)


def test_readers_alongside_a_trainer_that_trims_retains_and_compacts(tmp_path):
    root, loop, stop = tmp_path / "root", Loop(), threading.Event()
    loop.states[0] = loop.state

    def newest(reader: deltackpt.CheckpointManager) -> None:
        result = restore_newest(reader)
        model.assert_same(result.state, loop.states[result.step])

    def any_of_them(reader: deltackpt.CheckpointManager) -> None:
        known: list[int | RecoveryPoint] = [*reader.all_steps(), *reader.recovery_points()]
        for one in known:
            with contextlib.suppress(*GONE):
                result = reader.restore(one, loop.state)
                model.assert_same(result.state, loop.states[result.step])

    def look(_: deltackpt.CheckpointManager) -> None:
        with contextlib.suppress(*GONE):
            shown = inspect.open(root)
            assert not [save.problem for save in shown.saves if save.problem]
            for step in shown.steps:
                assert np.array_equal(shown[step]["emb"][:], loop.states[step]["emb"])
        assert verify_root(root).intact

    def read(call: Callable[[deltackpt.CheckpointManager], None]) -> int:
        count = 0
        with reading(root) as reader:
            while not stop.is_set():
                call(reader)
                count += 1
        return count

    with (
        warnings.catch_warnings(),
        concurrent.futures.ThreadPoolExecutor(3) as pool,
        opened(root, wal=LOG, max_to_keep=1) as saver,
    ):
        warnings.filterwarnings("ignore", message=".*reading it through.*")
        warnings.filterwarnings("ignore", message=".*a compacted base in its chain.*")
        loop.save(saver, 0)
        busy = [pool.submit(read, call) for call in (newest, any_of_them, look)]
        try:
            for step in range(1, 40):
                log(saver, loop, step) if step % 3 else loop.steps(saver, step)
                if step % 9 == 0:
                    compact(root)
        finally:
            stop.set()
        assert all(one.result() > 0 for one in busy)


def save(saver: deltackpt.CheckpointManager, loop: Loop, step: int) -> None:
    loop.train()
    loop.save(saver, step, force_base=True)


def assert_read(root: Path, loop: Loop, step: int) -> None:
    with reading(root) as reader:
        found = reader.restore_latest(loop.state)
    assert (found.step, found.skipped) == (step, ())
    assert np.array_equal(found.state["emb"], loop.states[step]["emb"])


def test_a_step_that_the_newest_points_need_is_not_deleted(tmp_path):
    loop = Loop()
    with opened(tmp_path, wal=LOG) as saver:
        for first in 0, 10, 20:
            save(saver, loop, first)
            log(saver, loop, first + 1, first + 2)
        trimmed(saver)
        saver.delete(10)
        with pytest.raises(OptionError, match="step 20: .* points 21 to 22 .*; save a later step"):
            saver.delete(20)
        assert_read(tmp_path, loop, 22)
        save(saver, loop, 30)
        saver.delete(20)
        assert saver.all_steps() == [0, 30]
        assert_read(tmp_path, loop, 30)


def test_records_trimmed_below_deleted_steps_are_not_reported_damaged(tmp_path):
    loop = Loop()
    with opened(tmp_path, wal=LOG) as saver:
        save(saver, loop, 0)
        log(saver, loop, 1, 2)
        save(saver, loop, 10)
        log(saver, loop, 11, full=False)
        save(saver, loop, 20)
        trimmed(saver)
        saver.delete(20)
        saver.delete(10)
        assert_read(tmp_path, loop, 0)
        assert not verify_root(tmp_path).problems
        log(saver, loop, 21, 22)
        assert_read(tmp_path, loop, 22)


def test_after_the_newest_step_is_deleted_the_wal_continues_from_a_saved_step(tmp_path):
    loop = Loop()
    with opened(tmp_path, wal=LOG) as saver:
        save(saver, loop, 0)
    with opened(tmp_path, wal=LOG) as saver:
        found = saver.restore_latest(loop.state)
        loop.touched = found.touched
        save(saver, loop, 5)
        saver.delete(5)
        for step in 6, 7:
            log(saver, loop, step)
            assert_read(tmp_path, loop, step)
