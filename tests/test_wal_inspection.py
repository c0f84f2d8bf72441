# SPDX-License-Identifier: Apache-2.0
"""WAL inspection and maintenance: ``ls``, ``history``, ``verify``, ``doctor``, ``gc``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import model
import numpy as np
import pytest
from command import run
from damages import damage, flip
from golden import make_golden
from made_up_wals import records_in
from test_collect_command import ended

import deltackpt
from deltackpt import RecoveryPoint, inspect
from deltackpt.cli import terminal
from deltackpt.errors import Damaged, DamagedWal, RestoreError, StorageError
from deltackpt.format import wal_format
from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_format import EpochHeader, RecordHead
from deltackpt.layers.footer import EpochRef
from deltackpt.ledger.directory import Root
from deltackpt.maintenance import doctor
from deltackpt.maintenance.garbage import Retention
from deltackpt.maintenance.gc import collect, collectable
from deltackpt.maintenance.verify import verify_root
from deltackpt.resources.runtime import Runtime
from deltackpt.testing import Disk, DiskCall, TrainingRun, states, stored_chunks
from deltackpt.wal.segment_files import FilledRecord, SegmentWriter

GOLDEN = Path(make_golden.__file__).parent / "log-v1"
HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


class Written(NamedTuple):
    """A root, and its valid saved and appended states."""

    root: Path
    states: dict[int, dict]

    @property
    def newest(self) -> int:
        return max(self.states)


def manager(root: Path, **options) -> deltackpt.CheckpointManager:
    log = deltackpt.WalOptions(**options)
    return deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=deltackpt.ManagerOptions(wal=log)
    )


def save_and_append(trainer: deltackpt.CheckpointManager, saved: set[int], last: int, **save: Any):
    """Trains steps 0 to ``last``: saves some of them and appends the others; returns the states."""
    state = model.initial()
    touched, states = model.new_touched(state), {0: state}
    for step in range(last + 1):
        if step:
            state, touched = model.train(state, touched, step)
            states[step] = state
        if step in saved:
            trainer.save(step, state, touched=touched, **save)
        else:
            trainer.append(step, state, touched=touched)
    trainer.wait_until_finished()
    trainer.wait_appended()
    return states


def continue_from(
    trainer: deltackpt.CheckpointManager,
    found: deltackpt.Restored | None,
    steps: Iterable[int],
    call: str = "append",
) -> dict[int, Any]:
    """Continues from a restored state: trains, and saves or appends steps; returns the states."""
    assert found.touched is not None
    state, touched, states = found.state, found.touched, {}
    for step in steps:
        state, touched = model.train(state, touched, 100 + step)
        states[step] = state
        getattr(trainer, call)(step, state, touched=touched)
        trainer.wait_until_finished()
    trainer.wait_appended()
    return states


def write(root: Path, resume: int = 5, last: int = 9, **options) -> Written:
    """Saves 0 and 3, appends up to 6; resumes at a point, and appends up to the last step."""
    with manager(root, **options) as trainer:
        states = save_and_append(trainer, {0, 3}, 6)
    with manager(root, **options) as trainer:
        found = trainer.restore(resume, model.initial())
        assert found.point is not None
        states |= continue_from(trainer, found, range(resume + 1, last + 1))
    return Written(root, states)


def reading(root: Path) -> deltackpt.CheckpointManager:
    options = deltackpt.ManagerOptions(access="read", multiprocess=False)
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options)


def json_of(*arguments: object) -> Any:
    """Runs a command with ``--json`` and parses its output."""
    return json.loads(run(*arguments, "--json").stdout)


def steps_of(points: Iterable[RecoveryPoint]) -> list[int]:
    return [point.step for point in points]


@pytest.fixture(scope="module", params=["whole", "delta"])
def written(tmp_path_factory, request) -> Written:
    root = tmp_path_factory.mktemp("written") / "root"
    return write(root, dense_every=2, dense=request.param)  # Every other point is full.


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


def restores(root: Path, point: RecoveryPoint) -> bool:
    """Whether a point can be restored."""
    with reading(root) as reader:
        try:
            return reader.restore(point, model.initial()).point == point
        except RestoreError:
            return False


def test_ls_lists_epochs_and_points(written):
    listed = run("ls", written.root)
    assert listed.returncode == 0 and "recovery point 5 of epoch 0, step 3" in listed.stdout
    assert re.search(r"\b8 +1 (soft|full)\b", run("ls", written.root, "--wal", "--last", 3).stdout)
    listed = json_of("ls", written.root, "--wal")
    points, epochs = listed["recovery_points"], listed["epochs"]
    assert [one["save_id"]["step"] for one in points] == [9, 8, 7, 6, 5, 4, 2, 1]
    assert [one["epoch"] for one in points] == [1] * 4 + [0] * 4
    assert [one["number"] for one in epochs] == [1, 0]
    assert [one["full_recovery_points"] for one in epochs] == [2, 2]
    assert epochs[0]["forked_from"]["epoch"] == 0
    # Without --wal the output is a list of steps.
    assert [one["step"] for one in json_of("ls", written.root)] == [0, 3]


def test_a_root_without_a_wal_has_no_epoch(saved):
    ck = inspect.open(saved)
    assert ck.recovery_points() == [] and ck.wal.epochs == ()
    assert "epoch" not in run("ls", saved).stdout
    assert verify_root(saved).points == ()
    assert "WAL" not in by_subject(saved)


@pytest.mark.parametrize("array", ["values", "rows.*"])
def test_a_point_is_read_above_an_older_step_if_its_own_is_damaged(copy, written, array):
    expected = {name: np.asarray(table) for name, table in written.states[9]["tables"].items()}
    opened = inspect.open(copy).at(9)
    for chunk in stored_chunks(copy / "3", array):
        chunk.flip()
    is_skipped = functools.partial(pytest.warns, UserWarning, match="step 3 is skipped")
    with is_skipped(), reading(copy) as reader:
        restored = reader.restore(9, model.initial())
    for found in (opened, inspect.open(copy).at(9)):
        with is_skipped():
            rows = {name: np.asarray(found.tables[f"tables/{name}"]) for name in expected}
        assert found.reads == ("0", str(found.point))
        for name in expected:
            np.testing.assert_array_equal(rows[name], expected[name])
            np.testing.assert_array_equal(rows[name], restored.state["tables"][name])
    with is_skipped():
        diff = inspect.open(copy).diff(0, 9)
    for name in expected:
        differs = np.asarray(written.states[0]["tables"][name]) != expected[name]
        assert diff[f"tables/{name}"].rows.tolist() == np.flatnonzero(differs.any(axis=1)).tolist()


def test_threads_that_read_a_point_above_a_damaged_step_read_the_same(copy, written):
    expected = {name: np.asarray(table) for name, table in written.states[9]["tables"].items()}
    found = inspect.open(copy).at(9)
    for chunk in stored_chunks(copy / "3"):
        chunk.flip()
    begin = threading.Barrier(8)

    def read(number: int) -> dict[str, np.ndarray]:
        begin.wait()
        return {name: np.asarray(found.tables[f"tables/{name}"]) for name in expected}

    with pytest.warns(UserWarning, match="step 3 is skipped") as warned:
        with ThreadPoolExecutor(8) as pool:
            results = [*pool.map(read, range(8))]
    assert len(warned) == 1 and found.chain == (0,)
    for rows in results:
        for name in expected:
            np.testing.assert_array_equal(rows[name], expected[name])


def test_a_point_is_opened_above_an_older_step_if_its_own_cannot_be_read(copy, written):
    found = inspect.open(copy)
    assert found.at(9).reads == ("0", "3", str(found.at(9).point))
    manifest = copy / "3" / "embeddings" / "manifest.0.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step 3 is skipped"):
        point = found.at(9)
    assert point.reads == ("0", str(point.point)) and point.path == copy / "0"
    point.check_exists()
    for name, table in written.states[9]["tables"].items():
        np.testing.assert_array_equal(point.tables[f"tables/{name}"], table)


def test_a_point_without_an_intact_step_below_names_the_damage(copy):
    for step in ("0", "3"):
        for chunk in stored_chunks(copy / step):
            chunk.flip()
    found = inspect.open(copy).at(9).tables["tables/users"]
    with pytest.warns(UserWarning, match="step 3 is skipped"), pytest.raises(Damaged, match="^0/"):
        np.asarray(found)


@pytest.mark.parametrize(("a", "b"), [(0, 9), (3, 5), (5, 9), (9, 3)])
def test_a_diff_of_points_has_the_rows_that_differ(written, a, b):
    found = inspect.open(written.root).diff(a, b)
    assert (found.a, found.b) == (a, b)
    for name in written.states[a]["tables"]:
        before, after = (np.asarray(written.states[one]["tables"][name]) for one in (a, b))
        expected = np.flatnonzero((before != after).reshape(len(before), -1).any(axis=1))
        assert found[f"tables/{name}"].rows.tolist() == expected.tolist()


def test_a_diff_of_a_slot_that_is_always_written_has_all_rows_that_differ(tmp_path):
    def moved(state, touched, step):
        state, touched = states.train(state, touched, step)
        slots = {name: slot + 1 for name, slot in state["slots"].items()}
        return {**state, "slots": slots}, touched

    tables = dataclasses.replace(states.tables(), always="accumulator")
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions())
    trained = TrainingRun(tmp_path, options=options, tables=tables, move=moved)
    with trained.open() as trainer:
        trained.save()
        trained.append()
        trainer.wait_appended()
    found = inspect.open(tmp_path).diff(1, 2, field="slot.accumulator")
    assert {name: len(one.rows) for name, one in found.tables.items()} == {
        f"tables/{name}": rows for name, rows in states.ROWS.items()
    }


def test_commands_accept_every_restorable_point(written, tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    root = written.root
    with manager(root) as trainer:
        points = trainer.recovery_points()
    for point in points:
        step = point.step
        shown = run("show", root, step)
        assert shown.returncode == 0 and str(point) in shown.stdout, shown.stderr
        assert "tables/users" in shown.stdout and "dense/kernel" in shown.stdout
        shown = json_of("show", root, step)
        assert shown["kind"] == "recovery point"
        assert shown["recovery_point"]["epoch"] == point.epoch
        planned = run("plan", root, step)
        assert planned.returncode == 0 and f"up to {point}" in planned.stdout, planned.stderr
        plan = json_of("plan", root, step)
        assert plan["wal_bytes"] > 0 and plan["dense_bytes"] > 0 and plan["step"] == step
        assert run("diff", root, 0, step).returncode == 0
        target = tmp_path / str(step)
        done = run("export", "safetensors", root, target, step)
        assert done.returncode == 0, done.stderr
        kernel = load_file(target / "model.safetensors")["dense/kernel"]
        assert kernel.tobytes() == np.asarray(written.states[step]["dense"]["kernel"]).tobytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "ROOT", 8),
        ("show", "ROOT", 99),
        ("plan", "ROOT", 99),
        ("diff", "ROOT", 0, 99),
        ("export", "safetensors", "ROOT", "TARGET", 99),
        ("history", "ROOT", "tables/none", 1),
        ("diff", "ROOT", 0, 3, "--table", "none"),
    ],
)
def test_errors_of_commands_advise_commands(written, tmp_path, arguments):
    places = {"ROOT": written.root, "TARGET": tmp_path / "target"}
    told = run(*(places.get(one, one) for one in arguments))
    assert told.returncode == 1 and not _PYTHON.search(told.stderr), told.stderr
    if 99 in arguments:
        assert "recovery point 9 of WAL epoch 1" in told.stderr and "deltackpt ls" in told.stderr


def test_no_error_of_a_command_advises_python():
    """Checks the errors of modules that commands use, as the command line shows them."""
    package = Path(deltackpt.__file__).parent
    folders = ("format", "inspect", "interchange", "ledger", "reading", "maintenance")
    for path in [
        package / "errors.py",
        *(path for folder in folders for path in (package / folder).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) or _is_advice(node):
                for text in _texts(node):
                    assert not _PYTHON.search(terminal.as_commands(text)), (path.name, text)


#: A method call in the advice of an error.
_PYTHON = re.compile(r"\b(?!DIR\b)[a-z_]+\((?:[a-z_]+=\w+)?\)|\bsee step")


def _is_advice(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return any(getattr(one, "id", getattr(one, "attr", "")) in _ADVICE for one in node.targets)


#: Names of variables with the advice of an error.
_ADVICE = ("action", "known")


def _texts(node: ast.AST) -> list[str]:
    """Strings below a node, with ``{}`` for interpolated values."""
    found = []
    inside: set[int] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in one.values]
            found.append("".join(map(str, parts)))
            inside |= {id(p) for p in one.values}
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in inside:
            found.append(one.value)
    return found


def test_ls_verify_and_points_agree_after_collect(tmp_path):
    with manager(tmp_path) as trainer:
        save_and_append(trainer, {0, 3}, 5, force_base=True)
    assert steps_of(inspect.open(tmp_path).recovery_points()) == [5, 4, 2, 1]
    collect(tmp_path, retention=Retention(keep_last=1), offline=True)
    with reading(tmp_path) as reader:
        known = reader.recovery_points()
    ck = inspect.open(tmp_path)
    assert steps_of(known) == [5, 4] and ck.recovery_points() == known
    assert [one.point for one in verify_root(tmp_path).points] == known[::-1]
    assert [one.full_points for one in ck.wal.epochs] == [2]
    listed = json_of("ls", tmp_path, "--wal")["recovery_points"]
    assert [one["save_id"]["step"] for one in listed] == [5, 4]
    assert run("ls", tmp_path, "--wal").stdout.endswith("2 recovery points\n")
    assert run("show", tmp_path, 2).returncode == 1


@pytest.mark.parametrize("field", ["values", "slot.accumulator"])
def test_history_has_every_point_between_the_steps_bit_for_bit(written, field):
    rows = [0, 3, 17, 299, 41]
    found = inspect.open(written.root).history("tables/items", rows, field=field)
    assert found.steps.tolist() == list(range(10))
    assert {step for step, kind in enumerate(found.point_kinds) if not kind} == {0, 3}
    assert set(filter(None, found.point_kinds)) == {"full", "soft"}
    leaves = "tables" if field == "values" else "slots"
    for step in range(10):
        expected = np.asarray(written.states[step][leaves]["items"])[rows]
        assert found.values[step].tobytes() == expected.tobytes(), step


def test_written_rows_include_all_changed_rows(written):
    rows = np.arange(model.ROWS["users"])
    found = inspect.open(written.root).history("tables/users", rows)
    for number in range(1, len(found.steps)):
        before, now = (np.asarray(found.values[at]) for at in (number - 1, number))
        changed = (before != now).any(axis=1)
        assert (found.written[number] | ~changed).all(), found.steps[number]
        assert not found.written[number].all()


def test_history_of_named_steps_or_without_the_wal_has_only_steps(written):
    ck = inspect.open(written.root)
    assert ck.history("tables/users", 1, wal=False).steps.tolist() == [0, 3]
    assert ck.history("tables/users", 1, steps=[3]).point_kinds == (None,)
    command = "history", written.root, "tables/users", "1"
    shown = run(*command).stdout
    assert "recovery point" in shown and "full" in shown and "soft" in shown
    shown = run(*command, "--no-wal").stdout
    assert "recovery point" not in shown and "written" in shown
    kinds = [one["recovery_point"] is None for one in json_of(*command)]
    assert kinds == [step in (0, 3) for step in range(10)]


def test_history_names_a_damaged_record(copy):
    record = records_in(copy / "log/1/0")[-1]
    for segment in record.rows:
        [(start, _), *_] = record.chunks_of(segment.name, "values")
        flip(record.path, start)
    ck = inspect.open(copy)
    with pytest.raises(DamagedWal, match=rf"record {record.seq}\b.*array 'values', chunk 0"):
        ck.history("tables/items", 0)
    assert ck.history("tables/items", 0, wal=False).steps.tolist() == [0, 3]


def test_the_golden_wal_is_verified():
    report = verify_root(GOLDEN)
    assert report.intact and [one.point.step for one in report.points][-1] == 20
    assert len(report.points) == 7 and all(one.restorable for one in report.points)


@pytest.mark.parametrize("how", ["truncated", "removed"])
def test_damage_to_the_point_that_an_epoch_resumes_from_invalidates_its_points(copy, how):
    damage(sorted(copy.glob("log/0/0/*.seg"))[-1], how)
    report = verify_root(copy)
    assert not report.intact
    assert not any(verdict.restorable for verdict in report.points if verdict.point.epoch == 1)
    void = [verdict.point for verdict in report.points if not verdict.restorable]
    assert void and not any(restores(copy, point) for point in void)
    told = run("verify", copy)
    assert told.returncode == 1 and "; not restorable: " in told.stdout


def test_obsolete_records_may_be_damaged(copy):
    # Record 6 of the first run is past the point that the second one resumes from.
    [*_, last] = sorted(copy.glob("log/0/0/*.seg"))
    os.truncate(last, last.stat().st_size - 10)
    assert verify_root(copy).intact
    with manager(copy) as trainer:
        continue_from(trainer, trainer.restore(3, model.initial()), [20])
    flip(last, 200)
    report = verify_root(copy)
    assert report.intact and sum("no longer valid" in note for note in report.notes) == 2
    assert [verdict.point.step for verdict in report.points] == [20]


def test_records_trimmed_during_verification_are_not_damage(copy):
    def trim(_: DiskCall) -> None:
        for path in segments(copy):
            path.unlink()

    with Disk(copy) as disk:
        # After all frame headers and before the first body are read.
        disk.on("read", trim, "[.]seg$", after=len(segments(copy)), times=1)
        report = verify_root(copy)
    assert report.intact and report.points == ()
    assert any("trimmed while" in note for note in report.notes)


def test_a_damaged_newest_header_is_always_reported_and_removes_nothing(copy):
    flip(copy / "log/1.msgpack", 30)
    (copy / "log/1/head.msgpack").unlink()
    report = verify_root(copy)
    assert not report.intact and report.problems[0].object_name == "log/1.msgpack"
    assert "cannot determine which WAL epochs are valid" in run("ls", copy).stdout
    assert by_subject(copy)["WAL"].severity == "problem"
    found = collect(copy)
    assert not found.removable and "the WAL stays" in found.notes[0]
    assert (copy / "log/0.msgpack").is_file()


def test_a_partially_removed_epoch_is_not_damage(copy, tmp_path):
    """The segments are removed first; the header and the progress are left."""
    left = [copy / "log/1.msgpack", copy / "log/1/head.msgpack", copy / "log/1/0/progress"]
    kept = {path: path.read_bytes() for path in left}
    with manager(copy) as trainer:
        newest = trainer.restore_latest(model.initial())
        continue_from(trainer, newest, range(20, 24), "save")
    assert not left[0].exists()
    for path, data in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    report = verify_root(copy)
    assert report.intact and not report.problems
    with manager(copy) as trainer:
        again = trainer.restore_latest(model.initial())
    assert again.step == 23 and again.skipped == ()


@pytest.mark.parametrize(("moved", "newest"), [(1, 4), (2, 1)])
@pytest.mark.parametrize("by", ["save", "append"])
def test_abandoned_points_are_invalid_once_a_later_step_is_set_aside(
    tmp_path, moved, newest, by, monkeypatch
):
    """The trainer dies while the steps are moved: a point above the older step stays invalid."""
    with manager(tmp_path) as trainer:
        save_and_append(trainer, {0, 1, 4, 5}, 5)
    assert 3 in steps_of(inspect.open(tmp_path).recovery_points())
    left, set_aside = [moved], Root.set_aside

    def dies(self: Root, *arguments: Any) -> None:
        set_aside(self, *arguments)
        left[0] -= 1
        if not left[0]:
            raise StorageError("killed")

    monkeypatch.setattr(Root, "set_aside", dies)
    with contextlib.suppress(StorageError), manager(tmp_path) as trainer:
        continue_from(trainer, trainer.restore(1, model.initial()), [2], by)
    monkeypatch.undo()
    assert inspect.open(tmp_path).recovery_points() == []
    with reading(tmp_path) as reader:
        again = reader.restore_latest(model.initial())
    assert (again.step, again.point) == (newest, None)


def test_collect_removes_only_epochs_that_nothing_resumes_from(copy):
    assert [one for one in collectable(copy).removable if one.kind == "WAL epoch"] == []
    with manager(copy) as trainer:
        continue_from(trainer, trainer.restore(3, model.initial()), [20])
        point = trainer.wait_appended()
    flip(copy / "log/0.msgpack", 30)  # The header of an obsolete epoch is not needed.
    ended(copy)
    gone = collect(copy).removable
    assert [one.name for one in gone if one.kind == "WAL epoch"] == ["log/1", "log/0"]
    assert sorted(path.name for path in (copy / "log").iterdir()) == ["2", "2.msgpack"]
    assert verify_root(copy).intact and inspect.open(copy).recovery_points() == [point]
    with manager(copy) as trainer:
        newest = trainer.restore_latest(model.initial())
    assert newest.point == point


def test_trimming_removes_earlier_epochs_with_damaged_headers(copy):
    with manager(copy) as trainer:
        found = trainer.restore_latest(model.initial())
        flip(copy / "log/0.msgpack", 30)
        continue_from(trainer, found, range(20, 24), "save")
    assert {path.name for path in (copy / "log").glob("*.msgpack")} == {"2.msgpack"}


def by_subject(root: Path) -> dict[str, doctor.Finding]:
    return {one.subject: one for one in doctor.examine(root, read_only=True)}


def put_records(root: Path, process: int, numbers: range) -> None:
    """Writes the records of one process to epoch 0 of a two-process WAL."""
    run_id, at = "a" * 32, root / "log"
    at.mkdir(exist_ok=True)
    head = EpochHeader(epoch=0, run=run_id, process_count=2, base=None, continues=None)
    (at / "0.msgpack").write_bytes(wal_format.epoch_header_bytes(head))
    writer = SegmentWriter(
        at, at / "0" / str(process), Runtime(),
        epoch=EpochRef.from_header(head), process=process, process_count=2, fsync=False,
    )  # fmt: skip
    for number in numbers:
        record_head = RecordHead(part=0, part_start=0, full=True, unix_ns=number * 10**9)
        save_id, parent = (SaveId(run_id, one, one) for one in (number, number - 1))
        writer.write(save_id, parent, lambda _, head=record_head: FilledRecord(head, ()))
    writer.close()


@pytest.fixture
def saved(tmp_path) -> Path:
    """A root with a step and no WAL."""
    with deltackpt.CheckpointManager(tmp_path / "root", handlers=HANDLERS) as trainer:
        trainer.save(0, model.initial())
        trainer.wait_until_finished()
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("behind", "severity"), [(range(1, 399), "note"), (range(1, 3), "warning"), (None, "warning")]
)
def test_the_doctor_names_a_process_that_holds_points_back(saved, behind, severity):
    put_records(saved, 0, range(1, 400))
    if behind is not None:
        put_records(saved, 1, behind)
    finding = by_subject(saved)["WAL processes"]
    assert finding.severity == severity and "of 2, 1 " in finding.found
    assert any("are behind the others" in note for note in verify_root(saved).notes)


def test_the_doctor_reports_nothing_if_all_processes_have_all_records(saved):
    for process in range(2):
        put_records(saved, process, range(1, 4))
    assert "WAL processes" not in by_subject(saved)


def test_the_doctor_finds_a_missing_wal_directory(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    with manager(root, backend=deltackpt.wal.LocalWal(directory=str(elsewhere))) as trainer:
        save_and_append(trainer, {0}, 1)
    assert "1 full recovery point, newest 1 " in by_subject(root)["WAL"].found
    shutil.rmtree(elsewhere)
    finding = by_subject(root)["directory of WAL epoch 0"]
    assert finding.severity == "problem" and "elsewhere" in finding.found
