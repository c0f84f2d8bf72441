# SPDX-License-Identifier: Apache-2.0
"""Damaged WALs: acknowledged state is restored, or its loss is reported."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import model
import pytest
from damages import HOWS, damage, flip
from made_up_wals import MadeUpLog, bounds_of, history_of, records_in
from test_events import Kept
from test_wal_inspection import HANDLERS, Written, continue_from, manager, segments, write

import deltackpt
from deltackpt import events
from deltackpt.errors import Damaged, DamagedWal, NoIntactStep, RestoreError
from deltackpt.format import naming
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.reading.wal_locations import NAME
from deltackpt.session.restore_choice import RestoreChooser
from deltackpt.storage.store import FileStore
from deltackpt.testing import Disk, DiskCall


@pytest.fixture(scope="module", params=["whole", "delta"])
def written(tmp_path_factory, request) -> Written:
    """A root whose segments have one record each, or several."""
    backend = deltackpt.wal.LocalWal(segment_bytes=1 if request.param == "whole" else 1 << 14)
    root = tmp_path_factory.mktemp("damaged") / "root"
    return write(root, resume=4, last=8, dense=request.param, backend=backend)


@pytest.fixture
def copy(written, tmp_path) -> Written:
    shutil.copytree(written.root, tmp_path / "root")
    return Written(tmp_path / "root", written.states)


def restore(root: Path) -> tuple[deltackpt.Restored, list[str], list[events.FailureEvent]]:
    """The newest state that a reader restores, its warnings, and its failure events."""
    kept, options = Kept(), deltackpt.ManagerOptions(access="read", multiprocess=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with deltackpt.CheckpointManager(
            root, handlers=HANDLERS, options=options, event_handlers=(kept,)
        ) as reader:
            found = reader.restore_latest(model.initial())
    failures = [one for one in kept.received if isinstance(one, events.FailureEvent)]
    return found, [str(one.message) for one in caught], failures


def assert_newest_is_restored(written: Written) -> None:
    found, _, _ = restore(written.root)
    assert (found.step, found.skipped) == (written.newest, ())
    model.assert_same(found.state, written.states[found.step])


def assert_restored_or_reported(written: Written) -> int:
    """Checks that the newest state restores, or an older one and every report names the loss."""
    found, warned, failures = restore(written.root)
    model.assert_same(found.state, written.states[found.step])
    report = verify_root(written.root)
    if found.step == written.newest:
        assert found.skipped == ()
        return found.step
    steps = [step for step, _ in found.skipped]
    assert steps and min(steps) > found.step and isinstance(found.skipped[0][1], DamagedWal)
    assert any("is skipped" in text for text in warned)
    assert {one.step for one in failures if one.operation == "skip"} == {*steps}
    names = [problem.object_name for problem in report.problems]
    assert any(error.object_name in names for _, error in found.skipped), (found.skipped, names)
    return found.step


def flips(path: Path) -> Iterator[int]:
    """Offsets in the header, the chunks, the footer and the trailer of each record."""
    for record in records_in(path.parent):
        if record.path == path:
            start, end = record.layer.start, record.layer.start + record.layer.nbytes
            arrays = record.layer.manifest.arrays
            chunks = [at for of in arrays for at in record.chunks_of(of.row_group, of.name)]
            yield from {start, start + 28, start + 4095, *(first for first, _ in chunks)}
            yield from {end - 64, end - 1, max(stop for _, stop in chunks)}


def cuts(path: Path) -> Iterator[int]:
    """Lengths that end at or within each record."""
    for start, end in bounds_of(path.read_bytes()):
        yield from (start, (start + end) // 2, end - 1)


@pytest.mark.parametrize("seed", range(2))
def test_damage_to_any_wal_file_loses_nothing_or_is_reported(seed, copy):
    drawn, older = random.Random(seed), 0
    files = [path for path in sorted(copy.root.glob("log/**/*")) if path.is_file()]
    for number, path in enumerate(files):
        intact, is_segment = path.read_bytes(), path.suffix == ".seg"
        how = HOWS[(number + seed) % len(HOWS)]
        if how == "removed":
            path.unlink()
        elif how == "truncated":
            os.truncate(path, drawn.choice([*cuts(path)] if is_segment else range(len(intact))))
        elif path.name != NAME:  # It has no checksum, and nothing depends on it.
            flip(path, drawn.choice([*flips(path)] if is_segment else range(len(intact))))
        older += assert_restored_or_reported(copy) < copy.newest
        path.write_bytes(intact)
    assert older


def restorable_points(root: Path, points: list[RecoveryPoint]) -> dict[RecoveryPoint, bool]:
    """Whether a reader restores each recovery point."""
    found, options = {}, deltackpt.ManagerOptions(access="read", multiprocess=False)
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as reader:
        for point in points:
            try:
                restored = reader.restore(point, model.initial())
            except RestoreError:
                found[point] = False
            else:
                found[point] = restored.point == point
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("nobody_removes_steps")
def test_a_point_is_reported_restorable_exactly_if_it_restores_above_damaged_steps(copy):
    points = [one.point for one in verify_root(copy.root).points]
    tried, outcomes = [points[0], points[-1]], set()
    files = (path for path in sorted(copy.root.glob("[03]/**/*")) if path.is_file())
    kinds = {(path.parts[-2], path.suffix): path for path in files if path.stat().st_size}
    for path, how in zip(kinds.values(), itertools.cycle(HOWS)):
        intact = path.read_bytes()
        damage(path, how)
        found = {one.point: one.restorable for one in verify_root(copy.root).points}
        assert [*found] == points, path
        assert {one: found[one] for one in tried} == restorable_points(copy.root, tried), path
        outcomes |= {*found.values()}
        path.write_bytes(intact)
    assert outcomes == {True, False}


def test_a_damaged_wal_is_read_only_twice_while_its_trainer_commits(copy):
    min(copy.root.glob("log/1/0/*.seg")).unlink()
    real, looks = RestoreChooser._choose, []

    def look(*arguments):
        """Makes each look choose something different."""
        chosen, lost = real(*arguments)
        looks.append((tuple if len(looks) % 2 == 0 else list)(chosen))
        return looks[-1], lost

    with mock.patch.object(RestoreChooser, "_choose", look):
        found, warned, _ = restore(copy.root)
    assert found.skipped and warned
    assert len(looks) == 2


def test_zeros_after_a_power_cut_are_not_damage(copy):
    last = segments(copy.root)[-1]
    intact = last.read_bytes()
    last.write_bytes(intact + bytes(300))
    assert_newest_is_restored(copy)
    (last.parent / NAME).unlink()
    start, end = bounds_of(intact)[-1]
    last.write_bytes(intact[: (start + end) // 2] + bytes(300))
    found, _, _ = restore(copy.root)
    assert found.step < copy.newest and found.skipped == ()


def test_a_hole_at_the_end_of_a_segment_is_not_read(copy, monkeypatch):
    os.truncate(segments(copy.root)[-1], 1 << 40)
    read, read_into = [], FileStore.read_into

    def counted(store, key, start, buffers, **how):
        read.append(sum(buffer.nbytes for buffer in buffers))
        assert sum(read) < 1 << 30, "the hole is read"
        read_into(store, key, start, buffers, **how)

    monkeypatch.setattr(FileStore, "read_into", counted)
    assert_newest_is_restored(copy)
    assert verify_root(copy.root).intact


def test_a_part_killed_before_its_first_record_is_not_damage(copy):
    last = segments(copy.root)[-1]
    place = naming.parse_segment_name(last.name)
    last.with_name(naming.segment_name(place.part + 1, place.seq)).write_bytes(b"dc")
    assert_newest_is_restored(copy)
    assert verify_root(copy.root).intact


@pytest.mark.parametrize("how", ["removed", "truncated", "flipped"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_one_damaged_header_costs_nothing_and_is_reported(how, epoch, copy):
    damage(copy.root / "log" / f"{epoch}.msgpack", how)
    found, warned, failures = restore(copy.root)
    assert (found.step, found.skipped) == (copy.newest, ())
    model.assert_same(found.state, copy.states[copy.newest])
    assert any("its copy was read" in text for text in warned) and failures
    [problem] = verify_root(copy.root).problems
    assert problem.stops == "nothing" and f"log/{epoch}.msgpack" in problem.object_name


def lose_header(root: Path, epoch: int) -> None:
    (root / f"log/{epoch}.msgpack").unlink()
    (root / f"log/{epoch}/head.msgpack").unlink()


def test_a_lost_header_never_revives_a_rolled_back_branch(copy):
    lose_header(copy.root, 1)
    with pytest.raises(Damaged, match=r"log/1\.msgpack.*it is unknown which recovery points count"):
        restore(copy.root)
    assert not verify_root(copy.root).intact
    # The next run does not reuse its number.
    with manager(copy.root) as trainer:
        found = trainer.restore_latest(model.initial(), wal=False)
        assert (found.step, found.point) == (3, None)
        continue_from(trainer, found, [9])
    assert (copy.root / "log/2.msgpack").exists()
    assert restore(copy.root)[0].step == 9


def test_a_lost_header_of_a_run_without_a_wal_revives_nothing(copy):
    with deltackpt.CheckpointManager(copy.root, handlers=HANDLERS) as trainer:
        found = trainer.restore(3, model.initial())
        state, touched = model.train(found.state, found.touched, 50)
        model.commit(trainer, 5, state, touched=touched)
    (copy.root / "log/2.msgpack").unlink()
    found, _, _ = restore(copy.root)
    assert (found.step, found.point) == (5, None)
    model.assert_same(found.state, state)


def test_a_lost_header_of_an_epoch_that_a_later_one_resumes_from_is_reported(copy):
    lose_header(copy.root, 0)
    assert assert_restored_or_reported(copy) == 3


def test_a_header_removed_while_another_run_begins_is_not_damage(tmp_path):
    at = MadeUpLog(tmp_path / "log").begin().append(1).at

    def begin_another(_: DiskCall) -> None:
        MadeUpLog(at, epoch=1, run="b1").begin()
        (at / "0.msgpack").unlink()

    with Disk(at) as disk:
        disk.on("read", begin_another, r"^0[.]msgpack$", times=1)
        assert history_of(at).views[0].head.epoch == 1


def test_a_header_in_another_directory_replaces_a_damaged_one(tmp_path):
    MadeUpLog(tmp_path / "far").begin().append(1)
    near = MadeUpLog(tmp_path / "near").begin().append(1)
    (near.at / "0.msgpack").write_bytes(b"torn")
    history = history_of(near.at, tmp_path / "far")
    assert [point.step for point in history.points()] == [1] and len(history.replaced) == 1


@pytest.mark.parametrize(("has_step", "found"), [(False, "no step"), (True, "none among 2 steps")])
def test_without_an_intact_step_the_error_names_the_damaged_wal(copy, has_step, found):
    for segment in segments(copy.root):
        flip(segment, 30)
    for step in (0, 3):
        if has_step:
            (copy.root / f"{step}/embeddings/manifest.0.msgpack").write_bytes(b"")
        else:
            shutil.rmtree(copy.root / str(step))
    message = f"expected an intact step, found {found} and a damaged WAL: "
    with pytest.raises(NoIntactStep, match=message):
        restore(copy.root)
