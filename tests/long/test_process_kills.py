# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and SIGSTOP in the saves of multi-process jobs that restart on other topologies."""

from __future__ import annotations

import collections
import signal

import pytest
from many import Job, Process, wait_until
from many_worker import POINTS, Model
from test_processes import assert_misses, saved, step_numbers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

KILLS = 80
PEERS_SECS = 8.0
#: Points that all processes reach, that process 0 reaches, and that the others reach.
BOTH = ["before its shard", "during its shard", "before its manifest"]
BOTH += ["before a force", "after a force"]
PRIMARY = [*BOTH, "waiting for the shards", "before the merge"]
PRIMARY += [point for point in POINTS if point.startswith("commit")]
#: Points at which process 0 has not collected all reports: it commits nothing after a stop.
BEFORE = ["before its shard", "during its shard", "before its manifest", "waiting for the shards"]
OTHERS = [*BOTH, "before its word", "after its word", "waiting for the commit"]
#: A step changes few blocks of its kernel.
MODEL = Model(kernel=[64, 256])
TOPOLOGIES = [
    (2, 2, {"mesh": [2, 2]}),
    (4, 1, {"mesh": [4, 1], "layout": "turned"}),
    (4, 2, {"mesh": [4, 2], "across": "y"}),
    (2, 1, {"mesh": [1, 2]}),
]


def assert_fails_to_open(job: Job, ill: Process, root: str) -> None:
    """One process fails in its constructor, which fails on all; the next managers can be opened."""
    ill.ask("fault", at="the end of a start")
    ill.answer()
    errors = [answer["error"]["type"] for answer in job.each("open", root=root)]
    assert errors.pop(ill.number) == "OSError" and {*errors} <= {"ProcessFailed"}


def test_the_newest_committed_step_restores_on_any_topology_after_any_kill(
    server, tmp_path, campaign, record
):
    draw = campaign.random("kills of jobs")
    root = tmp_path / "root"
    hits: collections.Counter[tuple[str, str, str]] = collections.Counter()
    step = 0
    while hits.total() < campaign.count(KILLS):
        processes, devices, place = draw.choice(TOPOLOGIES)
        topology = {"processes": processes, "devices": devices}
        with Job(server, tmp_path / "jobs", apart=True, model=MODEL, **topology) as job:
            how = {"dense": draw.choice(("whole", "blocks", "blocks"))}
            how["policy"] = draw.choice(("consecutive", "one_shot"))
            if draw.random() < 0.3:
                assert_fails_to_open(job, draw.choice(job.processes), str(root))
            job.all("open", root=str(root), processes_secs=PEERS_SECS, **how)
            if root.exists() and step_numbers(root):
                newest = max(step_numbers(root))
                found = job.all("restore_latest", place=place, like=newest)
                assert {(answer["step"], answer["wrong"]) for answer in found} == {(newest, None)}
                step = newest
            else:
                job.all("start", place=place)
                saved(job, 0)
            victim = draw.choice([0, draw.randrange(1, processes)])
            point = draw.choice(PRIMARY if victim == 0 else OTHERS)
            # Only bases merge per-process databases of dense leaves.
            force_base = point == "before the merge"
            action, ill = draw.choice(("kill", "stop")), job.processes[victim]
            after = draw.randrange(2)
            ill.ask("arm", at=point, action=action, after=after)
            ill.answer()
            survivors = [process for process in job.processes if process is not ill]
            while point not in ill.reached:
                step += 1
                for process in job.processes:
                    process.ask("train", to=step)
                    process.ask("save", force_base=force_base)
                    process.ask("wait")
                answers = [[process.answer() for _ in range(3)] for process in survivors]
                wait_until(lambda ill=ill: ill.reached or ill.has_answered(3), "the save ends")
                if not ill.reached:
                    assert not any("error" in ill.answer() for _ in range(3))
            newest = max(step_numbers(root))
            assert newest in (step - 1, step)
            if newest < step:
                for _, _, waited in answers:
                    assert_misses(waited, victim)
            if action == "stop":
                # The others have given up by now.
                ill.kill(signal.SIGCONT)
                failed = ["error" in ill.answer() for _ in range(3)]
                committed = max(step_numbers(root)) == step
                assert failed == [False, False, not committed]
                # The second file that process 0 writes may be the index, after all reports.
                is_before = point in BEFORE and not (point == "during its shard" and after)
                assert not committed or newest == step or not is_before
            else:
                assert ill.end() == -signal.SIGKILL, point
            hits[action, "primary" if victim == 0 else "another", point] += 1
    record(f"{hits.total()} kills and stops, up to step {max(step_numbers(root))}; at")
    for (action, which, point), count in sorted(hits.items()):
        record(f"  {action:5s} {which:8s} {point:30s} {'#' * count}")
