# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of one of two real processes at each point at which a step is incomplete.

``test_step_transaction.py`` does the same with copies, for one process; ``long/test_kills.py`` at
any I/O call.
"""

from __future__ import annotations

import signal
from pathlib import Path

import many_worker
import pytest
from many import Job
from many_worker import Model
from test_processes import (
    HANG_SECS,
    PEERS_SECS,
    assert_misses,
    assert_read_alone,
    saved,
    started,
    step_numbers,
)

import deltackpt

pytestmark = pytest.mark.processes

#: Points of process 0, how many passes to skip, and whether the step is committed.
COMMIT = [
    ("commit: digests", 0, False),
    ("commit: after the digests", 0, False),
    ("commit: before the rename", 0, False),
    ("commit: between the rename and the fsync", 0, True),
    ("commit: after the rename", 0, True),
]
#: It fsyncs while the others write, then what it wrote since.
FIRST = [
    *(
        (moment, after, False)
        for after in range(2)
        for moment in ("before a force", "after a force")
    ),
    ("before the merge", 0, False),
    *COMMIT,
]
#: After its message process 0 has all that it needs to commit.
SECOND = [
    ("before a force", 0, False),
    ("after a force", 0, False),
    ("before its word", 0, False),
    ("after its word", 0, True),
]


@pytest.mark.parametrize(
    ("victim", "moment", "after", "committed"),
    [*((0, *case) for case in FIRST), *((1, *case) for case in SECOND)],
)
def test_every_committed_step_is_intact_after_a_kill_at_any_point(
    server, tmp_path, victim, moment, after, committed
):
    root = tmp_path / "root"
    with Job(server, tmp_path / "jobs", processes=2, devices=1, apart=True) as job:
        started(job, root, {"mesh": [2, 1]})
        saved(job, 0)
        saved(job, 1)
        job.all("train", to=2)
        # After the commit, the other finds the step once process 0 is silent.
        secs = HANG_SECS if committed and victim == 1 else PEERS_SECS
        job.all("limit", processes_secs=secs)
        armed = job.processes[victim]
        armed.ask("arm", at=moment, action="kill", after=after)
        assert "error" not in armed.answer()
        # Only bases have per-process databases of dense leaves, which are merged.
        job.ask("save", force_base=moment == "before the merge")
        job.ask("wait")
        armed.wait_reached(moment)
        job.answers()
        waits = job.answers()
        assert armed.status == -signal.SIGKILL
        if committed:
            assert "error" not in waits[1 - victim], waits
        else:
            assert_misses(waits[1 - victim], victim)
    assert step_numbers(root) == ([0, 1, 2] if committed else [0, 1])
    for step in step_numbers(root):
        assert_read_alone(root, step)
    assert_goes_on_alone(root)


def test_a_step_of_two_processes_whose_last_fsync_failed_is_valid_for_both(server, tmp_path):
    """Process 0 gets an error that it may not survive a power cut; both continue from it."""
    root, place = tmp_path / "root", {"mesh": [2, 1]}
    with Job(server, tmp_path / "jobs", processes=2, devices=1) as job:
        started(job, root, place)
        saved(job, 0)
        job.all("train", to=1)
        job.processes[0].ask("fault", at="commit: between the rename and the fsync", number=5)
        assert "error" not in job.processes[0].answer()
        job.all("save")
        first, second = job.each("wait")
        assert first["error"]["cause"]["type"] == "StorageError" and "error" not in second
        for step in (2, 3):
            assert saved(job, step)[0]["kind"] == "delta"
        found = job.all("restore_latest", place=place, like=3)
        assert {(answer["step"], answer["wrong"]) for answer in found} == {(3, None)}
        job.close()
    assert step_numbers(root) == [0, 1, 2, 3]


def assert_goes_on_alone(root: Path) -> None:
    """The next manager finds only steps, and continues from the newest with a delta."""
    newest, known = max(step_numbers(root)), Model()
    with deltackpt.CheckpointManager(root, handlers={"embeddings": many_worker.tables()}) as saver:
        assert not list(root.glob("*.orbax-checkpoint-tmp*"))
        found = saver.restore_latest(known.at(newest))
        assert found is not None and found.touched is not None
        assert (found.step, found.skipped) == (newest, ())
        ids = {f"tables/{name}": rows for name, rows in known.changed(newest + 1).items()}
        marks = deltackpt.touched.mark(found.touched, ids)
        state = known.at(newest + 1)
        assert saver.save(newest + 1, state, touched=marks).kind == "delta"
        saver.wait_until_finished()
    assert_read_alone(root, newest + 1)
