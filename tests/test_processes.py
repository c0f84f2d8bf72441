# SPDX-License-Identifier: Apache-2.0
"""Saves and restores by several real processes, some of which are killed; see ``many.py``.

``test_meshes.py`` covers many more topologies, with threads instead of processes, and
``long/test_process_kills.py`` many more kills.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import many
import many_worker
import pytest
from machine import required
from many import Answer, Job, Server
from many_worker import Model

import deltackpt
from deltackpt.storage import arrays
from deltackpt.testing import StoredChunk, stored_chunks

PLACE = {"mesh": [2, 2]}
TURNED = {"mesh": [4, 1], "layout": "turned"}
#: Deadline of a save with a missing process; longer than the skew on a busy machine.
PEERS_SECS = 4.0
#: Far longer than any wait that ends by itself.
HANG_SECS = 60.0


def started(job: Job, root: Path, place: dict[str, Any], **options: Any) -> None:
    """Opens the managers of a job and makes its state."""
    job.all("open", root=str(root), **options)
    job.all("start", place=place)


def saved(job: Job, step: int, **arguments: Any) -> tuple[Answer, list[dict[str, Any]]]:
    """Makes a committed save; returns the common answer and the report of each process."""
    job.all("train", to=step)
    answer = job.one("save", **arguments)
    reports = []
    for found in job.all("wait"):
        [report] = found["reports"]
        reports.append(report)
    return answer, reports


@contextlib.contextmanager
def running(
    server: Server,
    directory: Path,
    place: dict[str, Any] | None = None,
    *,
    steps: int = 0,
    processes: int = 2,
    model: Model | None = None,
    **options: Any,
) -> Iterator[Job]:
    """A job on ``root`` that has saved its first steps, and ends cleanly."""
    with Job(server, directory / "jobs", processes=processes, model=model) as job:
        started(job, directory / "root", place or PLACE, **options)
        for step in range(steps):
            saved(job, step)
        yield job
        job.close()


def assert_each_restores(
    job: Job, step: int, place: dict[str, Any] | None = None, **more: Any
) -> list[Answer]:
    """Each process of a job restores the newest step, bit for bit."""
    expected = {"step": step, "wrong": None, **more.pop("expected", {})}
    answers = job.all("restore_latest", place=place, **more)
    for answer in answers:
        assert {key: answer[key] for key in expected} == expected
    return answers


def assert_restores(
    server: Server,
    root: Path,
    step: int | None,
    place: dict[str, Any],
    *,
    model: Model | None = None,
    goes_on: bool = True,
    **topology: int,
) -> None:
    """A fresh job restores a step (by default the newest) bit for bit and saves the next one."""
    newest = max(step_numbers(root))
    with Job(server, root.parent / "jobs", model=model, **topology) as job:
        job.all("open", root=str(root))
        if step is None:
            found = job.all("restore_latest", place=place, like=newest)
        else:
            found = job.all("restore", step=step, place=place, like=step)
        for answer in found:
            assert (answer["step"], answer["wrong"]) == (step or newest, None)
            assert answer["skipped"] == []
        if goes_on:
            after = newest + 1
            answer, _ = saved(job, after)
            assert answer["kind"] == "delta", answer
            assert_each_restores(job, after, place, like=after)
        job.close()


def step_numbers(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


def assert_read_alone(root: Path, step: int, model: Model | None = None) -> None:
    """Reads a step in the test's own process, without a template."""
    with deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": many_worker.tables()},
        options=deltackpt.ManagerOptions(access="read"),
    ) as reader:
        found = reader.restore(step).state
    assert many_worker.difference(found, (model or Model()).at(step)) is None


# Saves, and restores on other topologies.


@pytest.mark.parametrize("processes", [2, 4])
def test_a_save_of_several_processes_restores_on_fewer_and_on_more(server, tmp_path, processes):
    root, model = tmp_path / "root", Model()
    place = PLACE if processes == 2 else {"mesh": [4, 2], "across": "y"}
    with running(server, tmp_path, place, processes=processes) as job:
        base, reports = saved(job, 0)
        assert base["kind"] == "base"
        assert_counts(reports, model.rows, place, processes)
        for step in (1, 2):
            delta, reports = saved(job, step)
            assert delta["kind"] == "delta"
            assert_counts(reports, changed_rows(model, step), place, processes)
        # Each process reads its own shards correctly.
        assert_each_restores(job, 2, place, expected={"chain": [0, 1, 2]})
        # Those without a device of the mesh read nothing.
        assert_each_restores(job, 2, {"mesh": [1, 1]}, expected={"chain": [0, 1, 2]})
    assert step_numbers(root) == [0, 1, 2]
    for step in (0, 1, 2):
        assert_read_alone(root, step)
    others = 4 if processes == 2 else 2
    turned = TURNED if others == 4 else {"mesh": [1, 4]}
    shutil.copytree(root, tmp_path / "copy")
    assert_restores(server, root, None, turned, processes=others, devices=4 // others)
    rows = {"mesh": [2, 2], "layout": "turned", "across": "y"}
    topology = {"processes": 1, "devices": 4}
    assert_restores(server, tmp_path / "copy", 1, rows, goes_on=False, **topology)


def changed_rows(model: Model, step: int) -> dict[str, int]:
    return {name: len(ids) for name, ids in model.changed(step).items()}


def assert_counts(
    reports: list[dict[str, Any]], rows: dict[str, int], place: dict[str, Any], processes: int
) -> None:
    """Each process reports what it wrote itself, and together they wrote each cell once."""
    assert len({(report["step"], report["kind"]) for report in reports}) == 1
    found: collections.Counter[str] = collections.Counter()
    for report in reports:
        found.update(report["tables"])
        values = [n for name, n in report["tables"].items() if name.endswith(":values")]
        assert report["rows"] == sum(values)
        assert report["rows"] > 0 and report["bytes"] > 0
    # Processes along y hold different columns; each writes part of every row.
    sections = processes if place.get("across") == "y" else 1
    times = {"tables/columns": min(sections, place["mesh"][1])}
    for name, count in found.items():
        table = name.partition(":")[0]
        assert count == rows[table.removeprefix("tables/")] * times.get(table, 1), (name, reports)


def test_processes_find_the_rows_that_changed_without_marks(server, tmp_path):
    model = Model()
    with running(server, tmp_path, steps=1, tracking="fingerprints") as job:
        delta, reports = saved(job, 1)
        assert delta["kind"] == "delta"
        assert_counts(reports, changed_rows(model, 1), PLACE, 2)
        assert_each_restores(job, 1, TURNED)
        delta, reports = saved(job, 2)
        assert delta["kind"] == "delta"
        # A row counts once for each process that holds columns of it.
        assert max(report["rows"] for report in reports) <= len(model.rows) * model.batch
        assert_each_restores(job, 2, PLACE)
    assert_read_alone(tmp_path / "root", 2)


#: Each policy makes bases and deltas within a few saves.
POLICIES = {
    "consecutive": {"max_chain": 2},
    "one_shot": {"max_restore_ratio": 1.2},
    "intermittent": {},
}


def test_policies_decide_the_same_on_every_process(server, tmp_path):
    """Shards differ in size, but policies decide by the sizes of whole saves."""
    with Job(server, tmp_path, processes=2, model=Model(reach=0.8, batch=240)) as job:
        for policy, bounds in POLICIES.items():
            root, kinds = tmp_path / policy, []
            started(job, root, PLACE, policy=policy, bounds=bounds)
            while min(kinds.count("base"), kinds.count("delta")) < 2:
                step = len(kinds)
                assert step < 10, (policy, kinds)
                job.all("train", to=step)
                decision = job.one("next_save")
                answer = job.one("save")
                assert (answer["kind"], answer["reason"]) == (decision["kind"], decision["reason"])
                sections = [found["reports"][0]["bytes"] for found in job.all("wait")]
                assert answer["kind"] == "base" or sections[0] != sections[1], sections
                kinds.append(answer["kind"])
            assert_each_restores(job, len(kinds) - 1, PLACE)
            job.all("close")


@pytest.mark.parametrize(("when_busy", "held_up"), [("skip", 1), ("coalesce", 0)])
def test_processes_agree_on_a_busy_writer(server, tmp_path, when_busy, held_up):
    with running(server, tmp_path, steps=1, when_busy=when_busy) as job:
        job.all("train", to=1)
        holder = job.processes[held_up]
        holder.ask("arm", at="during its shard", action="hold")
        holder.answer()
        assert job.one("save")["kind"] == "delta"
        holder.wait_reached("during its shard")
        job.all("train", to=2)
        skipped = job.one("save")
        assert skipped["kind"] is None
        assert skipped["reason"].startswith("skipped: step 1 is still being saved")
        job.release()
        job.all("wait")
        job.all("train", to=3)
        due = when_busy == "coalesce"
        taken = job.one("save_if_due")
        assert (taken["kind"], taken["step"]) == (("delta", 3) if due else (None, None))
        if not due:
            assert job.one("save")["kind"] == "delta"
        for answer in job.all("wait"):
            # It includes the changes of the skipped save.
            assert [report["step"] for report in answer["reports"]] == [3]
    assert step_numbers(tmp_path / "root") == [0, 1, 3]
    assert_read_alone(tmp_path / "root", 3)


@pytest.mark.parametrize("tracking", ["touched", "fingerprints"])
def test_all_processes_agree_on_whether_the_restored_step_has_changed(server, tmp_path, tracking):
    with running(server, tmp_path, steps=2, tracking=tracking) as job:
        same = [("copy", {"process": 0}), ("copy", {"process": 1}), ("train", {"to": 1})]
        for change, arguments in same:
            assert_each_restores(job, 1, PLACE, like=1)
            job.all(change, **arguments)
            answer = job.one("save")
            assert answer["kind"] is None and "it was restored" in answer["reason"]
        for process, what in itertools.product((0, 1), ("state", "metrics")):
            job.all("restore_latest", place=PLACE, like=1)
            if what == "state":
                job.all("alter", process=process)
            for one in job.processes:
                is_first = what == "metrics" and one.number == process
                one.ask("save", metrics={"loss": 0.5} if is_first else None)
            for answer in job.answers():
                assert answer["error"]["type"] == "OptionError", answer
                assert "expected a step above 1" in answer["error"]["text"]


@pytest.mark.parametrize("tracking", ["touched", "auto"])
def test_a_state_on_the_devices_of_one_process_is_saved_and_restored(server, tmp_path, tracking):
    side = {"mesh": [2, 1]}
    with running(server, tmp_path, side, steps=2, tracking=tracking) as job:
        if tracking == "auto":
            job.all("hide_marks")
        saved(job, 2)
        assert_each_restores(job, 2, side, like=2)
        saved(job, 3)
        assert saved(job, 4)[0]["kind"] == "delta"
    assert_restores(server, tmp_path / "root", 4, PLACE, goes_on=False, processes=2)


def test_dense_leaves_are_restored_without_the_orbax_handler(server, tmp_path):
    with running(server, tmp_path, steps=1) as job:
        job.all("fault", at="reading through Orbax")
        for where in (PLACE, TURNED, None):
            assert_each_restores(job, 0, where)


def chunk_of(root: Path, step: int, process: int, field: str) -> StoredChunk:
    """The largest chunk of a field that a process wrote."""
    found = stored_chunks(root / str(step), field)
    own = (chunk for chunk in found if chunk.process == process)
    return max(own, key=lambda chunk: chunk.nbytes)


def test_damage_read_by_one_process_makes_every_process_fall_back(server, tmp_path):
    root, place = tmp_path / "root", {"mesh": [2, 2], "layout": "cut"}
    with running(server, tmp_path, place, steps=3):
        pass
    chunk = chunk_of(root, 2, 1, "values")
    chunk.flip()
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root))
        found = assert_each_restores(job, 1, place, expected={"chain": [0, 1]})
        for number, answer in enumerate(found):
            [[step, error]] = answer["skipped"]
            assert step == 2
            assert re.search(chunk.name, error["text"])
            # The process whose shards are damaged detected it and notified the other.
            assert error["type"] == ("Damaged" if number == 1 else "RestoreError")
            assert number == 1 or re.search(r"\b1:? Damaged", error["text"]), error
            assert any("step 2 is skipped" in warning for warning in answer["warnings"])
        # The next save moves the damaged step aside for all processes.
        assert saved(job, 3)[0]["kind"] == "delta"
        assert_each_restores(job, 3, place, expected={"skipped": []})
        job.close()
    assert step_numbers(root) == [0, 1, 3]
    chunk_of(root, 0, 0, "values").flip()
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("open", root=str(root))
        for answer in job.each("restore_latest", place=place):
            assert answer["error"]["type"] == "NoIntactStep", answer
            assert "embeddings/shard.0" in answer["error"]["text"]


@pytest.mark.parametrize("api", ["v0", "v1"])
def test_the_handlers_alone_work_under_stock_orbax(server, tmp_path, api):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        job.all("start", place={"mesh": [2, 2]}, step=3)
        job.all("stock_save", root=str(root), api=api)
        for reader in ("v0", "v1"):
            for answer in job.all("stock_load", root=str(root), api=reader, place=TURNED, step=3):
                assert (answer["wrong"], answer["kinds"]) == (None, ["base"])
    assert (root / "3" / "embeddings" / "shard.1").is_dir()


# Bytes that a restore reads.

#: 34 MB, so that a part of it is large compared with blocks and metadata. No shard boundary is a
#: block boundary.
LARGE = Model(
    rows={"rows": 500_040, "columns": 120_008, "replicated": 60_008}, batch=30_000, reach=1.0
)
#: Arrays that each process reads in part: rows, accumulators, four times columns
#: with their moments (a segment for each column range), and the replicated table.
PIECES = 7


@contextlib.contextmanager
def traced(job: Job, directory: Path) -> Iterator[list[Path]]:
    """Yields a folder for each process, with a file of traced reads for each of its threads."""
    there = shutil.which("strace") is not None
    required(there, "strace is needed to count what a process reads")
    calls = "trace=read,readv,pread64,preadv,preadv2,mmap,sendfile,copy_file_range"
    folders, tracers = [], []
    try:
        for process in job.processes:
            folder = directory / f"trace.{process.number}"
            folder.mkdir()
            folders.append(folder)
            command = ["strace", "-f", "-ff", "-y", "-s", "0", "-e", calls, "-e", "signal=none"]
            command += ["-o", str(folder / "calls"), "-p", str(process.pid)]
            said = (folder / "said").open("w+")
            tracer = subprocess.Popen(command, stdout=said, stderr=said)
            said.close()
            tracers.append(tracer)
        for folder, tracer in zip(folders, tracers):
            text = folder / "said"

            def attached(text: Path = text, tracer: Any = tracer) -> bool:
                if tracer.poll() is not None:
                    pytest.skip(f"strace cannot attach here: {text.read_text().strip()}")
                return "attached" in text.read_text()

            many.wait_until(attached, "strace attaches")
        yield folders
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
        for tracer in tracers:
            try:
                tracer.wait(many.SILENCE_SECS)
            finally:
                tracer.kill()
                tracer.wait()


_CALL = re.compile(r"(\w+)\((?:[^<>]*?)\d+<([^>]*)>.*\)\s+= (-?\w+)")


def bytes_read(folder: Path, root: Path) -> collections.Counter[str]:
    """Maps each file in the root to the bytes read from it, according to system calls."""
    found: collections.Counter[str] = collections.Counter()
    for path in folder.glob("calls.*"):
        for line in path.read_text(errors="replace").splitlines():
            call = _CALL.match(line)
            if call is None or not call[2].startswith(f"{root}/"):
                continue
            assert call[1] != "mmap", f"expected no mapped file, which cannot be counted: {line}"
            found[call[2]] += max(0, int(call[3], 0))
    return found


@pytest.mark.parametrize(("savers", "readers"), [(2, 4), (4, 2)])
def test_a_process_reads_only_the_byte_ranges_of_its_shards(server, tmp_path, savers, readers):
    """Counts reads at the system-call level, including metadata, gap arrays and dense leaves.

    If a process needs part of an array, it reads whole blocks: up to two blocks more than its rows
    take. It also reads the small files of a step at most twice, because dense files are both
    digested and restored.
    """
    root = tmp_path / "root"
    place = {"mesh": [savers, 2], "layout": "cut"}
    options = {"model": LARGE, "durability": "process"}
    with running(server, tmp_path, place, steps=2, processes=savers, **options):
        pass
    place = {"mesh": [readers, 2], "layout": "cut"}
    with Job(server, tmp_path / "jobs", processes=readers, model=LARGE) as job:
        job.all("open", root=str(root), durability="process")
        with traced(job, tmp_path) as folders:
            assert_each_restores(job, 1, place)
        shares = [answer["bytes"] for answer in job.all("share", first=0)]
        job.close()
    files = {path: path.stat().st_size for path in root.rglob("*") if path.is_file()}
    chunks = {p for p in files if p.name.startswith("c.") or p.name.startswith("layer.")}
    total = sum(files[path] for path in chunks)
    small = sum(size for path, size in files.items() if path not in chunks)
    assert total > 35e6 and small < 0.02 * total, (total, small)
    # The shares cover everything exactly once.
    assert abs(sum(shares) - total) < 0.01 * total, (shares, total)
    for folder, share in zip(folders, shares):
        by_file = bytes_read(folder, root)
        read = sum(by_file.values())
        allowed = share + 2 * (2 * PIECES * arrays.BLOCK_BYTES) + 2 * small
        assert share <= read <= allowed, (share, read, allowed, total, by_file)
        # Each byte range is read once, except for layer blocks that two pieces share.
        for path in chunks:
            shared = 2 * PIECES * arrays.BLOCK_BYTES if path.name.startswith("layer.") else 0
            assert by_file[str(path)] <= files[path] + shared, path


# Kills.


def missing_of(error: dict[str, Any] | None) -> dict[str, Any]:
    """The ``ProcessMissing`` error: this one, or the one in its chain of causes."""
    assert error is not None
    if error["type"] == "ProcessMissing":
        return error
    return missing_of(error["cause"])


def assert_misses(answer: Answer, victim: int) -> None:
    """Asserts that a survivor gave up in time and named the victim."""
    assert "ended" not in answer, answer
    error = missing_of(answer["error"])
    assert error["processes"] == [victim]
    assert f"process {victim}" in error["text"]
    assert "timeouts.processes_secs" in error["text"]
    assert answer["secs"] < HANG_SECS


def assert_missed_again(left: many.Process, victim: int) -> None:
    """Asserts that a survivor's save starts without waiting and its wait names the victim."""
    left.ask("save")
    assert "error" not in left.answer()
    left.ask("wait")
    assert_misses(left.answer(), victim)


#: Maps a phase to the points of a save that process 0 and the other processes reach in it.
PHASES = {
    "before": ("before its shard", "before its shard"),
    "during": ("during its shard", "during its shard"),
    "after": ("waiting for the shards", "before its word"),
    "commit": ("commit: before the rename", None),
}


def kill_in_a_save(job: Job, victim: int, phase: str) -> list[Answer]:
    """Kills one process during a save and returns the answers of all processes to ``wait``.

    Only process 0 commits. To kill another process during the commit, process 0 is held up in it
    until the other is dead.
    """
    primary, other = PHASES[phase]
    point = primary if victim == 0 or other is None else other
    armed = 0 if other is None else victim
    held_up = armed != victim
    job.processes[armed].ask("arm", at=point, action="hold" if held_up else "kill")
    assert "error" not in job.processes[armed].answer()
    job.ask("save")
    job.ask("wait")
    job.processes[armed].wait_reached(point)
    if held_up:
        job.processes[victim].kill()
        assert job.processes[victim].end() == -signal.SIGKILL
        job.release()
    saves, waits = job.answers(), job.answers()
    assert job.processes[victim].status == -signal.SIGKILL
    for number, answer in enumerate(saves):
        assert number == victim or "error" not in answer, answer
    return waits


@pytest.mark.parametrize("phase", ["before", "during", "after", "commit"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_and_nothing_committed_is_lost(server, tmp_path, victim, phase):
    """JAX's coordinator runs elsewhere here, as it does under a cluster's own launcher."""
    root, survivor = tmp_path / "root", 1 - victim
    with Job(server, tmp_path / "jobs", processes=2, apart=True) as job:
        started(job, root, PLACE)
        for step in (0, 1):
            saved(job, step)
        job.all("train", to=2)
        # Process 0 already has the other's shard and commits without it.
        committed = victim == 1 and phase == "commit"
        job.all("limit", processes_secs=HANG_SECS if committed else PEERS_SECS)
        waits = kill_in_a_save(job, victim, phase)
        left = job.processes[survivor]
        if committed:
            assert "error" not in waits[survivor], waits
            left.ask("limit", processes_secs=PEERS_SECS)
            assert "error" not in left.answer()
        else:
            assert_misses(waits[survivor], victim)
        left.ask("train", to=3 if committed else 2)
        assert "error" not in left.answer()
        assert_missed_again(left, victim)
    assert step_numbers(root) == ([0, 1, 2] if committed else [0, 1])
    # With more processes, or with fewer.
    processes = 4 if phase == "after" else 1
    assert_restores(server, root, None, TURNED, processes=processes, devices=4 // processes)


@pytest.mark.parametrize("phase", ["during", "commit"])
def test_jax_aborts_the_survivors_if_process_0_dies_with_the_coordinator(server, tmp_path, phase):
    """By default, JAX's coordinator runs in process 0.

    When it dies, JAX immediately aborts the other processes from C++ (SIGABRT, "the JAX distributed
    service detected fatal errors", with ``jax_enable_recoverability`` too), before any of our
    timeouts. No Python error can report the missing process. Committed steps are not affected.
    """
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2) as job:
        started(job, root, PLACE)
        saved(job, 0)
        job.all("train", to=1)
        waits = kill_in_a_save(job, 0, phase)
        assert waits[1] == {"ended": -signal.SIGABRT}
        assert "JAX distributed service detected fatal errors" in job.processes[1].output()
    assert step_numbers(root) == [0]
    assert_restores(server, root, None, {"mesh": [1, 2]}, processes=1, devices=2)


def stall_in_a_save(job: Job, root: Path, stalled: int, at: str) -> Answer:
    """Stops a process in the save of step 1 until the other misses it; returns its answer."""
    started(job, root, PLACE)
    saved(job, 0)
    job.all("train", to=1)
    process, other = job.processes[stalled], job.processes[1 - stalled]
    process.ask("arm", at=at, action="stop")
    process.answer()
    job.all("limit", processes_secs=PEERS_SECS)
    job.ask("save")
    job.ask("wait")
    process.wait_reached(at)
    assert "error" not in other.answer()
    assert_misses(other.answer(), stalled)
    process.kill(signal.SIGCONT)
    assert "error" not in process.answer()
    return process.answer()


@pytest.mark.parametrize(
    ("stalled", "at"),
    [(0, "during its shard"), (0, "commit: after the digests"), (1, "during its shard")],
)
def test_a_stalled_process_is_named_and_cannot_commit_after_it_resumes(
    server, tmp_path, stalled, at
):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2, apart=True) as job:
        answer = stall_in_a_save(job, root, stalled, at)
        # It finds the failure that the other reported.
        assert answer["error"]["cause"]["type"] == "ProcessMissing", answer
        assert step_numbers(root) == [0]
    assert_restores(server, root, None, {"mesh": [2, 1]}, processes=1, devices=2)


def test_a_process_stalled_after_it_decided_to_commit_does_so_when_it_resumes(server, tmp_path):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2, apart=True) as job:
        assert "error" not in stall_in_a_save(job, root, 0, "commit: before the rename")
        assert step_numbers(root) == [0, 1]
        job.all("limit", processes_secs=HANG_SECS)
        # The next deltas have different parents.
        job.all("train", to=2)
        job.all("save")
        first, second = (answer["error"]["cause"] for answer in job.each("wait"))
        assert first["type"] == "Disagreement" and "on parent" in first["text"]
        assert second["type"] == "ProcessFailed"
        assert_each_restores(job, 1)
        assert saved(job, 3)[0]["kind"] == "base"
        assert step_numbers(root) == [0, 1, 3]
    assert_restores(server, root, None, {"mesh": [2, 1]}, processes=1, devices=2)
