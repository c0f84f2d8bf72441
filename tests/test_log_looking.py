# SPDX-License-Identifier: Apache-2.0
"""Looking at logs and keeping them: ``ls``, ``history``, ``verify``, ``doctor``, ``collect``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import model
import numpy as np
import pytest
from command import run
from golden import make_golden
from test_collect_command import ended

import deltackpt
from deltackpt import inspect
from deltackpt.errors import DamagedLog
from deltackpt.format import stretches
from deltackpt.format.frames import Kind, MarkHead
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.log import dense_frames
from deltackpt.log.frame import Frame
from deltackpt.log.segments import SegmentWriter
from deltackpt.reading import log_states, logged_dense, replay, saves
from deltackpt.reading.stretches import LogPoint, Logs, newest_way
from deltackpt.reading.targets import Targets
from deltackpt.storage.store import spot
from deltackpt.upkeep import doctor, verify_log
from deltackpt.upkeep.collect import collect, collectable
from deltackpt.upkeep.doctor import log as doctor_log
from deltackpt.upkeep.verify import verify_root

GOLDEN = Path(make_golden.__file__).parent / "log-v1"
HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


class Written(NamedTuple):
    """A root, and the states that were saved and logged there, as far as they count."""

    root: Path
    states: dict[int, dict]


def manager(root: Path, **options) -> deltackpt.CheckpointManager:
    log = deltackpt.LogOptions(**options)
    return deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=deltackpt.ManagerOptions(log=log)
    )


def write(root: Path, **options) -> Written:
    """Steps 0 and 3, marks up to 6; then from point 4 on marks up to 9, each second one full."""
    state = model.initial()
    states = {0: state}
    touched = model.new_touched(state)
    with manager(root, dense_every=2, **options) as trainer:
        trainer.save(0, state, touched=touched)
        for step in range(1, 7):
            state, touched = model.train(state, touched, step)
            states[step] = state
            if step == 3:
                trainer.save(step, state, touched=touched)
            else:
                trainer.log(step, state, touched=touched)
        trainer.wait()
    with manager(root, dense_every=2, **options) as trainer:
        found = trainer.restore(5, state)
        assert found.point is not None and found.touched is not None
        state, touched = found.state, found.touched
        for step in range(6, 10):
            state, touched = model.train(state, touched, 100 + step)
            states[step] = state
            trainer.log(step, state, touched=touched)
        trainer.wait_logged()
    return Written(root, states)


@pytest.fixture(scope="module", params=["whole", "delta"])
def written(tmp_path_factory, request) -> Written:
    return write(tmp_path_factory.mktemp("written") / "root", dense=request.param)


@pytest.fixture
def copy(written, tmp_path) -> Path:
    """A copy of the root, whose trainer has ended."""
    shutil.copytree(written.root, tmp_path / "root")
    for lease in sorted(tmp_path.glob("root/lease.*"))[:-1]:
        lease.unlink()
    ended(tmp_path / "root")
    return tmp_path / "root"


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("log/*/*/*.seg"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def restores(root: Path, point: LogPoint) -> bool:
    """Whether all that a restore of a point reads of the log is whole."""
    history = Logs(spot(root) / "log").read()
    steps = {
        step: saves.read_info(spot(root / str(step)), "embeddings").save_id
        for step in inspect.open(root).steps
    }
    way = newest_way(history, steps, at=point.step)
    if way is None or way.point != point:
        return False
    layout = way.era.head.layout
    try:
        replay.replay(way, Targets((), layout), layout)
        logged_dense.dense_of(way)
        replay.items_of(way)
    except DamagedLog:
        return False
    return True


def test_all_points_are_told_without_jax_as_the_manager_tells_them(written):
    with manager(written.root) as trainer:
        known = trainer.points()
    ck = inspect.open(written.root)
    assert [point for point in ck.points() if point.full] == known
    assert [point.step for point in ck.points()] == [9, 8, 7, 6, 5, 4, 2, 1]
    newest, first = ck.log.stretches
    assert newest.live and first.live and newest.continues is not None
    assert (newest.base and newest.base.step, newest.continues.save_id.step) == (3, 5)
    assert newest.marks == (4,) and newest.full_points == 2 and not newest.problem
    assert first.newest is not None and first.newest.step == 5


def test_ls_lists_stretches_and_points(written):
    listed = run("ls", written.root)
    assert listed.returncode == 0 and "point 5 of stretch 0, step 3" in listed.stdout
    points = run("ls", written.root, "--log", "--last", "3").stdout
    assert "8       1 soft" in points or "8       1 full" in points
    told = json.loads(run("ls", written.root, "--log", "--json").stdout)
    assert [one["save_id"]["step"] for one in told["points"]] == [9, 8, 7, 6, 5, 4, 2, 1]
    assert [one["number"] for one in told["stretches"]] == [1, 0]
    # What is told of the steps alone stays a list of them.
    assert [one["step"] for one in json.loads(run("ls", written.root, "--json").stdout)] == [0, 3]


def test_a_root_without_a_log_has_no_stretch(tmp_path):
    state = model.initial()
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as trainer:
        trainer.save(0, state)
        trainer.wait()
    ck = inspect.open(tmp_path)
    assert ck.points() == [] and ck.log.stretches == ()
    assert "stretch" not in run("ls", tmp_path).stdout
    assert verify_root(tmp_path).points == ()
    assert "log" not in {finding.subject for finding in doctor.examine(tmp_path, read_only=True)}


# History.


@pytest.mark.parametrize("field", ["values", "slot.accumulator"])
def test_history_tells_every_point_between_the_steps_bit_for_bit(written, field):
    rows = [0, 3, 17, 299, 41]
    found = inspect.open(written.root).history("tables/items", rows, field=field)
    assert found.steps.tolist() == list(range(10))
    kinds = ["full" if step % 2 == 0 else "soft" for step in range(10)]
    assert {step for step, mark in zip(range(10), found.marks, strict=True) if not mark} == {0, 3}
    assert set(filter(None, found.marks)) == set(kinds)
    for number, step in enumerate(found.steps.tolist()):
        state = written.states[step]
        leaf = state["tables"] if field == "values" else state["slots"]
        expected = np.asarray(leaf["items"])[rows]
        assert found.values[number].tobytes() == expected.tobytes(), step


def test_a_mark_holds_the_rows_that_it_says(written):
    rows = np.arange(model.ROWS["users"])
    found = inspect.open(written.root).history("tables/users", rows)
    for number in range(1, len(found.steps)):
        before, now = (np.asarray(found.values[at]) for at in (number - 1, number))
        changed = (before != now).any(axis=1)
        assert (found.written[number] | ~changed).all(), found.steps[number]
        assert not found.written[number].all()


def test_history_of_named_steps_or_without_the_log_tells_steps_alone(written):
    ck = inspect.open(written.root)
    assert ck.history("tables/users", 1, log=False).steps.tolist() == [0, 3]
    assert ck.history("tables/users", 1, steps=[3]).marks == (None,)
    shown = run("history", written.root, "tables/users", "1").stdout
    assert "mark" in shown and "full" in shown and "soft" in shown
    assert "mark" not in run("history", written.root, "tables/users", "1", "--no-log").stdout
    told = json.loads(run("history", written.root, "tables/users", "1", "--json").stdout)
    assert [one["mark"] is None for one in told] == [step in (0, 3) for step in range(10)]


def test_history_names_a_damaged_mark(copy):
    era = Logs(spot(copy) / "log").read().eras[0]
    [*_, mark] = era.processes[0].log.marks
    frame = next(frame for frame in mark.frames if frame.kind == Kind.ROWS)
    flip(Path(frame.segment), frame.start)
    ck = inspect.open(copy)
    group = frame.head.segment.group
    table = next(table.name for table in era.head.tables if table.group == group)
    with pytest.raises(DamagedLog, match=rf"frame {frame.place.seq}\b"):
        ck.history(table, 0)
    assert ck.history(table, 0, log=False).steps.tolist() == [0, 3]


# Verification.


def test_a_sound_log_is_verified_and_every_point_restores(written):
    report = verify_root(written.root)
    assert report.intact and not report.notes
    assert [verdict.point.step for verdict in report.points] == sorted(
        point.step for point in inspect.open(written.root).points() if point.full
    )
    assert all(verdict.restorable for verdict in report.points)
    assert all(restores(written.root, verdict.point) for verdict in report.points)
    told = run("verify", written.root)
    assert told.returncode == 0 and "full points can be restored, the newest of step" in told.stdout


def test_the_golden_log_is_verified():
    report = verify_root(GOLDEN)
    assert report.intact and [one.point.step for one in report.points][-1] == 20
    assert len(report.points) == 7 and all(one.restorable for one in report.points)


@pytest.mark.parametrize("part", range(8))
def test_a_flipped_bit_is_found_and_no_point_is_promised_that_does_not_restore(copy, part):
    whole = {verdict.point for verdict in verify_root(copy).points}
    paths = segments(copy)
    path = paths[part % len(paths)]
    flip(path, path.stat().st_size * (2 * part + 1) // 18)
    report = verify_root(copy)
    told = {verdict.point: verdict.restorable for verdict in report.points}
    for point in whole:
        assert told.get(point, False) == restores(copy, point), point
    # Only what is behind the point that the second run goes on from may be altered unnoticed.
    assert not report.intact or report.notes or all(map(told.get, whole))


def test_damage_before_the_last_frames_is_never_taken_for_a_torn_tail(copy):
    for path in segments(copy)[:2]:
        intact = path.read_bytes()
        for at in (5, 90, len(intact) // 3):
            flip(path, at)
            report = verify_root(copy)
            assert not report.intact and report.problems[0].stops == "points"
            assert str(path.relative_to(copy)) in report.problems[0].object_name
            path.write_bytes(intact)
    assert run("verify", copy).returncode == 0


@pytest.mark.parametrize("count", [1, 3, 40, 200])
def test_a_torn_tail_of_the_newest_stretch_is_no_damage(copy, count):
    newest = segments(copy)[-1]
    os.truncate(newest, newest.stat().st_size - count)
    report = verify_root(copy)
    assert report.intact and any("torn frame" in note for note in report.notes)
    assert 9 not in {verdict.point.step for verdict in report.points}


def test_the_point_that_a_stretch_goes_on_from_is_never_a_torn_tail(copy):
    [*_, last] = sorted(copy.glob("log/0/0/*.seg"))
    os.truncate(last, last.stat().st_size // 2)
    report = verify_root(copy)
    assert not report.intact
    assert not any(verdict.restorable for verdict in report.points if verdict.point.stretch == 1)


def test_a_missing_segment_makes_the_points_behind_it_void(copy):
    [*_, last] = sorted(copy.glob("log/0/0/*.seg"))
    last.unlink()
    report = verify_root(copy)
    assert not report.intact
    void = [verdict.point.step for verdict in report.points if not verdict.restorable]
    assert void and not any(
        restores(copy, one.point) for one in report.points if not one.restorable
    )
    told = run("verify", copy)
    assert told.returncode == 1 and "void" in told.stdout


def test_what_counts_no_more_may_be_damaged(copy):
    # Mark 6 of the first run is behind the point that the second one goes on from.
    [*_, last] = sorted(copy.glob("log/0/0/*.seg"))
    os.truncate(last, last.stat().st_size - 10)
    assert verify_root(copy).intact
    with manager(copy) as trainer:
        found = trainer.restore(3, model.initial())
        assert found.touched is not None
        state, touched = model.train(found.state, found.touched, 5)
        trainer.log(20, state, touched=touched)
        trainer.wait_logged()
    flip(last, 200)
    report = verify_root(copy)
    assert report.intact and sum("counts no more" in note for note in report.notes) == 2
    assert [verdict.point.step for verdict in report.points] == [20]


def test_marks_that_are_trimmed_meanwhile_are_no_damage(copy, monkeypatch):
    def then_trimmed(at):
        found = log_states.log_state(at)
        for path in segments(copy):
            path.unlink()
        return found

    monkeypatch.setattr(verify_log, "log_state", then_trimmed)
    report = verify_root(copy)
    assert report.intact and report.points == ()
    assert any("trimmed while" in note for note in report.notes)


def test_dense_leaves_without_a_chunk_are_found(tmp_path):
    plain = dense_frames._plain_values

    def without_one(dense):
        return (one for one in plain(dense) if not one.key.endswith("/0.0"))

    with mock.patch.object(dense_frames, "_plain_values", without_one):
        root = write_short(tmp_path / "root")
    report = verify_root(root)
    assert not report.intact and "arrays imply" in report.problems[0].expected
    assert [verdict.restorable for verdict in report.points] == [False]


def write_short(root: Path, **backend) -> Path:
    """A step and a mark above it."""
    state = model.initial()
    touched = model.new_touched(state)
    with manager(root, backend=deltackpt.LocalLog(**backend)) as trainer:
        trainer.save(0, state, touched=touched)
        state, touched = model.train(state, touched, 1)
        trainer.log(1, state, touched=touched)
        trainer.wait_logged()
    return root


def test_a_damaged_newest_head_is_told_by_all_and_removes_nothing(copy):
    flip(copy / "log/1.msgpack", 30)
    report = verify_root(copy)
    assert not report.intact and report.problems[0].object_name == "log/1.msgpack"
    assert "nobody can tell" in run("ls", copy).stdout
    assert by_subject(copy)["log"].severity == "problem"
    found = collect(copy)
    assert not found.removable and "the log stays" in found.notes[0]
    assert (copy / "log/0.msgpack").is_file()


# Removal.


def test_collect_removes_stretches_that_nothing_goes_on_from_and_no_other(copy):
    assert [one for one in collectable(copy).removable if one.kind == "stretch"] == []
    with manager(copy) as trainer:
        found = trainer.restore(3, model.initial())
        assert found.touched is not None
        state, touched = model.train(found.state, found.touched, 5)
        trainer.log(20, state, touched=touched)
        point = trainer.wait_logged()
    flip(copy / "log/0.msgpack", 30)  # Of what counts no more even the head is of no use.
    ended(copy)
    gone = collect(copy).removable
    assert [one.name for one in gone if one.kind == "stretch"] == ["log/1", "log/0"]
    assert sorted(path.name for path in (copy / "log").iterdir()) == ["2", "2.msgpack"]
    assert verify_root(copy).intact and inspect.open(copy).points() == [point]
    with manager(copy) as trainer:
        newest = trainer.restore_latest(state)
    assert newest is not None and newest.point == point


def test_trimming_removes_earlier_stretches_whose_heads_are_damaged(copy):
    with manager(copy) as trainer:
        found = trainer.restore_latest(model.initial())
        assert found is not None and found.touched is not None
        flip(copy / "log/0.msgpack", 30)
        state, touched = found.state, found.touched
        for step in range(20, 24):
            state, touched = model.train(state, touched, step)
            trainer.save(step, state, touched=touched)
            trainer.wait()
    assert {path.name for path in (copy / "log").glob("*.msgpack")} == {"2.msgpack"}


def test_roots_that_share_a_directory_for_their_logs_do_not_meet(tmp_path):
    roots = [write_short(tmp_path / name, directory=str(tmp_path / "logs")) for name in "ab"]
    for root in roots:
        report = verify_root(root)
        assert report.intact and [one.point.step for one in report.points] == [1]


# The doctor.


def by_subject(root: Path) -> dict[str, doctor.Finding]:
    return {one.subject: one for one in doctor.examine(root, read_only=True)}


def put_marks(root: Path, process: int, numbers: range) -> None:
    """A log of two processes as stretch 0: the marks of one of them."""
    run_id = "a" * 32
    at = root / "log"
    at.mkdir(exist_ok=True)
    head = StretchHead(stretch=0, run=run_id, process_count=2, base=None, continues=None)
    (at / "0.msgpack").write_bytes(stretches.to_bytes(head))
    writer = SegmentWriter(at / "0" / str(process), stretch=0, process=process, fsync=False)
    for number in numbers:
        mark = MarkHead(
            save_id=SaveId(run_id, number, number),
            parent=SaveId(run_id, number - 1, number - 1),
            full=True,
            frames=0,
            unix_ns=number * 10**9,
        )
        writer.write([Frame(mark, [])], number)
    writer.close()


@pytest.fixture
def saved(tmp_path) -> Path:
    """A root with a step and no log."""
    with deltackpt.CheckpointManager(tmp_path / "root", handlers=HANDLERS) as trainer:
        trainer.save(0, model.initial())
        trainer.wait()
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("behind", "severity"), [(range(1, 399), "note"), (range(1, 3), "warning"), (None, "warning")]
)
def test_the_doctor_names_a_process_that_holds_points_back(saved, behind, severity):
    put_marks(saved, 0, range(1, 400))
    if behind is not None:
        put_marks(saved, 1, behind)
    finding = by_subject(saved)["processes of the log"]
    assert finding.severity == severity and "of 2, 1 " in finding.found
    assert any("have not come as far" in note for note in verify_root(saved).notes)


def test_the_doctor_is_content_where_all_processes_have_all_marks(saved):
    for process in range(2):
        put_marks(saved, process, range(1, 4))
    assert "processes of the log" not in by_subject(saved)


def test_the_doctor_finds_a_log_directory_that_is_gone(tmp_path):
    root = write_short(tmp_path / "root", directory=str(tmp_path / "elsewhere"))
    found = by_subject(root)
    assert found["log"].figures["newest_point"] == 1
    shutil.rmtree(tmp_path / "elsewhere")
    finding = by_subject(root)["log directory of stretch 0"]
    assert finding.severity == "problem" and "elsewhere" in finding.found


def test_the_doctor_finds_gaps_stretches_left_over_and_logs_that_are_long(copy):
    assert by_subject(copy)["log to replay"].severity == "ok"
    with mock.patch.object(doctor_log, "_LEAST_BASE_BYTES", 1):
        with mock.patch("deltackpt.format.segments.FieldSpec.row_bytes", 0):
            assert by_subject(copy)["log to replay"].severity == "warning"
    first, *_ = sorted(copy.glob("log/0/0/*.seg"))
    flip(first, 90)
    assert by_subject(copy)["gaps of the log"].severity == "warning"
    with manager(copy) as trainer:
        found = trainer.restore(3, model.initial())
        trainer.save(50, found.state, touched=found.touched)
        trainer.wait()
    assert by_subject(copy)["stretches left over"].figures["stretches"] == [0, 1]
