# SPDX-License-Identifier: Apache-2.0
"""Limits of background work, and the upload schedule of several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import deltackpt
from deltackpt.errors import OptionError, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import Entry, State
from deltackpt.options import Background, ManagerOptions
from deltackpt.resources.runtime import Pace, Runtime
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.store import store_path
from deltackpt.tiers import cursor, replicator
from deltackpt.tiers.cursor import Cursor, StagedSave, Trainer
from deltackpt.tiers.staging import Orders, StagingDir, TierProgress
from deltackpt.tiers.uploader import (
    MOST_DELAY_SECS,
    REPORTS,
    ShardReport,
    ShardReports,
    Uploader,
    delay_secs,
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def one_cpu() -> int:
    """One of several CPUs that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a machine of several CPUs is needed to see where a thread runs")
    return cpus[-1]


def threads_of(name: str, others: Sequence[threading.Thread]) -> Iterator[int]:
    return (
        thread.native_id
        for thread in threading.enumerate()
        if thread.name.startswith(name) and thread.native_id is not None and thread not in others
    )


def cpus_of(task: Path) -> str:
    (line,) = (
        line
        for line in (task / "status").read_text().splitlines()
        if line.startswith("Cpus_allowed_list")
    )
    return line.split()[1]


def test_bytes_are_not_sent_faster_than_the_pace_and_a_pause_gives_no_credit():
    clock = Clock()
    pace = Pace(1000.0, clock=clock)
    assert [pace.reserve(nbytes) for nbytes in (500, 1000, 1)] == pytest.approx([0.0, 0.5, 1.5])
    clock.now += 1.0
    assert pace.reserve(1) == pytest.approx(0.501)
    clock.now += 3600.0
    assert [pace.reserve(1000) for _ in range(2)] == pytest.approx([0.0, 1.0])


def test_a_waiting_thread_continues_when_the_pace_is_lifted():
    pace = Pace(1e-6)
    pace.acquire(1)
    waiting = threading.Thread(target=pace.acquire, args=(1,))
    waiting.start()
    with pace.lifted(), pace.lifted():
        assert pace.reserve(1 << 40) == 0.0
        waiting.join(60.0)
        assert not waiting.is_alive()
    assert pace.reserve(1) == 0.0
    assert pace.reserve(1) > 0.0


def test_every_byte_of_a_batch_counts_towards_its_pace(tmp_path):
    runtime = Runtime()
    pace = runtime.pace = Pace(1e12, clock=Clock())
    batch = FileBatch(tmp_path, fsync=False, runtime=runtime)
    batch.write(tmp_path / "small", b"x" * 1000)
    batch.write(tmp_path / "large", b"x" * (1 << 20))
    batch.write_chunk(tmp_path / "chunk", np.ones(5 << 20, np.uint8))
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert pace.reserve(0) == pytest.approx(written / 1e12, rel=0.01)
    batch.close()


def test_save_threads_run_on_the_given_cpus(tmp_path, one_cpu):
    state = {"tables": {"a": jnp.ones((512, 16))}}
    options = ManagerOptions(background=Background(cpus=[one_cpu], threads=1))
    others = threading.enumerate()
    with deltackpt.CheckpointManager(
        tmp_path / "run",
        handlers={"embeddings": deltackpt.Tables(select="tables/*")},
        options=options,
    ) as manager:
        manager.save(0, state, touched=deltackpt.touched.init(state["tables"]))
        manager.wait_until_finished()
        threads = threads_of("deltackpt-save", others)
        found = [cpus_of(Path(f"/proc/self/task/{one}")) for one in threads]
    assert found and set(found) == {str(one_cpu)}
    assert cpus_of(Path(f"/proc/self/task/{threading.get_native_id()}")) != str(one_cpu)


def test_a_manager_keeps_a_limited_number_of_threads_until_it_is_closed(tmp_path):
    state = {"tables": {f"table{number}": jnp.ones((512, 16)) for number in range(30)}}
    others = threading.enumerate()
    with deltackpt.CheckpointManager(
        tmp_path / "run", handlers={"embeddings": deltackpt.Tables(select="tables/*")}
    ) as manager:
        marks = deltackpt.touched.init(state["tables"])
        for step in range(4):
            manager.save(step, state, touched=marks, force_base=True)
            manager.wait_until_finished()
        kept = [one for one in threading.enumerate() if one not in others]
    assert 1 <= sum(one.name.startswith("deltackpt-save") for one in kept) <= 9
    assert {one.name.rpartition("_")[0] for one in kept} <= {"deltackpt-save", "deltackpt-collect"}
    for one in kept:
        one.join(60.0)
        assert not one.is_alive()


def test_an_uploader_runs_on_the_given_cpus(tmp_path, monkeypatch, one_cpu):
    stage = StagingDir(tmp_path / "stage")
    stage.path.mkdir()
    told = tmp_path / "cpus"
    program = (
        "import sys, os; sys.path.append(sys.argv[2]); from deltackpt.tiers import replicator; "
        "replicator.only_one = None\n"
        "try: replicator.main(sys.argv[3:])\n"
        f"except TypeError: open({str(told)!r}, 'w').write(str(os.sched_getaffinity(0)))"
    )
    monkeypatch.setattr(replicator, "_PROGRAM", program)
    one = replicator.ReplicatorProcess(stage, cpus=[one_cpu])
    one.start()
    process = one._process
    assert isinstance(process, subprocess.Popen)
    one.close()
    assert process.wait(60.0) == 0
    assert told.read_text() == str({one_cpu})


def test_a_trainer_that_ends_before_its_uploader_emits_no_warning(tmp_path):
    program = (
        "import sys, pathlib\n"
        "from deltackpt.tiers.replicator import ReplicatorProcess\n"
        "from deltackpt.tiers.staging import StagingDir\n"
        "(stage := StagingDir(pathlib.Path(sys.argv[1]))).make()\n"
        "(uploader := ReplicatorProcess(stage)).start()\n"
        "uploader.close()"
    )
    command = [
        sys.executable,
        "-W",
        "error::ResourceWarning",
        "-c",
        program,
        str(tmp_path / "stage"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_a_wake_up_before_the_wait_is_not_lost():
    trainer = Trainer()
    seen = trainer.signals
    trainer.wake()
    started = time.monotonic()
    trainer.wait(seen, 60.0)
    assert time.monotonic() - started < 30.0


class Untidy(Cursor):
    """Has nothing to bring, and fails to tidy the tier a number of times."""

    tier = "remote"

    def __init__(self, stage: StagingDir, failures: int):
        super().__init__(stage)
        self.failures = failures

    def step(self) -> bool:
        return False

    def is_done(self) -> bool:
        self.failures -= 1
        if self.failures >= 0:
            raise StorageError("the bucket does not answer")
        return True


def test_the_back_off_grows_if_only_tidying_fails(tmp_path, monkeypatch):
    rests = list[float]()
    trainer = Trainer()
    monkeypatch.setattr(trainer, "wait", lambda seen, secs: rests.append(secs))
    monkeypatch.setattr(cursor.random, "uniform", lambda low, high: high)
    stage = StagingDir(tmp_path)
    stage.path.mkdir(exist_ok=True)
    Untidy(stage, 5).run(trainer)
    assert rests == [0.2, 0.4, 0.8, 1.6, 3.2]


def test_uploads_are_spread_over_the_save_interval_for_a_bounded_time():
    made = [0.0, 10.0, 30.0]
    assert [delay_secs(made, 30.0, process, 4) for process in range(4)] == [0, 5, 10, 15]
    assert delay_secs(made, 37.0, 3, 4) == pytest.approx(8.0)
    assert delay_secs(made, 50.0, 3, 4) == 0.0
    assert delay_secs([0.0, 86400.0], 86400.0, 1, 2) == MOST_DELAY_SECS
    # A first save, and one from the future.
    for made, now in (([], 1.0), ([1.0], 1.0), ([0.0, 100.0], 50.0)):
        assert delay_secs(made, now, 1, 2) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"cpus": []}, {"cpus": [-1]}, {"cpus": ["0"]}, {"bytes_per_sec": 0.0}, {"threads": 0}]
)
def test_options_of_background_work_are_checked_when_they_are_made(wrong):
    (name,) = wrong
    with pytest.raises(OptionError, match=f"Background.{name}"):
        Background(**wrong)


def orders_of(process: int) -> Orders:
    """Orders of one of two processes."""
    return Orders(
        number=1, lease=1, url="s3://a/b", endpoint=None, item="e", process=process, processes=2
    )


def test_only_the_newest_save_is_delayed_and_only_if_the_trainer_does_not_wait(tmp_path):
    stage = StagingDir(tmp_path / "stage")
    now = time.time()
    for step in (1, 2):
        folder = stage.steps / str(step)
        folder.mkdir(parents=True)
        made = now - 1000.0 * (2 - step)
        os.utime(folder, (made, made))
    work = Uploader(stage)
    found = [StagedSave(step, None, store_path(stage.steps / str(step)), step) for step in (1, 2)]

    def secs(step: int, process: int = 1, is_hurried: bool = False) -> float | None:
        work.trainer.is_waiting = is_hurried
        work._orders = orders_of(process)
        return work._until_turn(found[step - 1], found)

    assert secs(2, is_hurried=True) is None
    assert secs(1) is None
    assert 0.0 < (secs(2) or 0.0) <= MOST_DELAY_SECS
    assert secs(2, process=0) is None


def test_a_report_under_another_claim_does_not_count(tmp_path):
    """The uploader of the earlier trainer may still write its report."""
    stage = StagingDir(tmp_path / "stage")
    stage.make()
    reported = TierProgress(holder="earlier", saves=("run.1.1",), uploads=3, fenced="replaced")
    stage.report(reported)
    assert stage.progress("earlier") == reported
    assert stage.progress("later") == TierProgress(holder="later")


def two_shards(tmp_path: Path, monkeypatch) -> Any:
    """Two staged saves of a run, each without a parent, and the uploader of process 0 of two."""
    root = store_path(tmp_path / "root")
    journal: Any = types.SimpleNamespace(
        root=root,
        prefix=lambda unit, token: f"saves/{1:020}/{unit.step}-{token}",
        known=State(Entry()),
    )
    infos: dict[int, Any] = {
        step: types.SimpleNamespace(save_id=SaveId("run", step, step), parent=None)
        for step in (1, 2)
    }
    at = store_path(tmp_path / "stage")
    found = [StagedSave(step, info, at, step) for step, info in infos.items()]
    work = Uploader(StagingDir(tmp_path / "stage"), orders_of(0))
    work._journal = journal
    monkeypatch.setattr(work, "_send", lambda *_: ShardReport(process=0))

    def advance(save: StagedSave) -> bool:
        return work._advance(save, infos[save.step], found)

    return root, work, found, advance


def test_a_base_is_not_committed_before_an_earlier_save_of_its_run(tmp_path, monkeypatch):
    _, work, found, advance = two_shards(tmp_path, monkeypatch)
    assert advance(found[0]) and advance(found[1])
    work._uploads[found[1].key].reports.publish(ShardReport(process=1))
    assert not advance(found[1])  # There is no journal to commit to.


@pytest.mark.parametrize("problem", [None, "unreadable"])
def test_reports_of_processes_that_are_not_in_the_job_do_not_count(tmp_path, monkeypatch, problem):
    _, work, found, advance = two_shards(tmp_path, monkeypatch)
    assert advance(found[0])
    work._uploads[found[0].key].reports.publish(ShardReport(process=2, problem=problem))
    assert not advance(found[0])  # There is no journal to commit to.
    assert not work.progress.damaged


def test_a_change_that_is_no_save_does_not_end_the_haste_of_a_waiting_caller():
    readable, writable = os.pipe()
    trainer = Trainer(readable)
    for words, is_waiting in (
        (b"!", True),
        (b"?", True),
        (b".", False),
        (b"?", False),
        (b".!?", True),
    ):
        seen = trainer.signals
        os.write(writable, words)
        trainer.wait(seen, 60)
        assert trainer.is_waiting == is_waiting
    seen = trainer.signals
    os.close(writable)
    trainer.wait(seen, 60)
    assert trainer.is_gone


def test_a_shard_that_arrives_during_a_poll_is_not_reported_as_missing(tmp_path, monkeypatch):
    root, work, found, advance = two_shards(tmp_path, monkeypatch)
    assert advance(found[0]) and advance(found[1])
    real = ShardReports.read

    def read(self: ShardReports) -> dict[int, ShardReport]:
        if self is work._uploads[found[1].key].reports:
            for save in found:  # Process 1 catches up after the reports on step 1 were read.
                ShardReports(work._uploads[save.key].reports._at).publish(ShardReport(process=1))
        return real(self)

    monkeypatch.setattr(ShardReports, "read", read)
    assert not advance(found[0])
    reports = real(ShardReports(work._uploads[found[0].key].reports._at))
    assert sorted(reports) == [0, 1] and not any(one.problem for one in reports.values())
    assert [key for key in root.keys() if REPORTS in key]
