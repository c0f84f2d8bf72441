# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of processes that append to the WAL, at every I/O call and at any moment.

They append and save in any mixture, compact, roll back to steps and recovery points, and read
others. Each successor restores the newest step or point. Acknowledged data must exist and equal an
undisturbed run bit for bit, or the encoder's output if the codec is lossy. Then the same for jobs
of two and four processes, some of which continue for a while after one dies.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import time
from typing import Any

import harness
import many_worker
import pytest
import trainee
import wal_harness
import wal_job_worker
from many import Job, Process, Server
from test_kills import killing_call, timed
from wal_harness import Offers

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

#: Total kills, by the number of processes.
KILLS = {1: 700, 2: 200, 4: 100}
#: Each lane runs on one worker of pytest-xdist.
LANES = [pytest.param(n, marks=pytest.mark.xdist_group(f"log kills {n}")) for n in range(2)]
#: Lives per directory: a longer history takes longer to replay.
LIVES, LIVES_OF_SEVERAL = 40, 10
DOINGS = 8
#: Model of the multi-process jobs: a step changes few blocks of its kernel.
MODEL = many_worker.Model(kernel=[64, 256])
_PROCESSES_SECS = 60.0
_LONGEST_LIFE_SECS = 1.0
#: How long the other processes continue after one dies.
_LONGEST_WITHOUT_SECS = 0.3


@pytest.mark.parametrize("lane", LANES)
def test_a_kill_anywhere_loses_no_acknowledged_record_and_alters_no_bit(
    log_trainees, tmp_path, campaign, figures, lane
):
    random_ = campaign.random("log kills", lane)
    kills = campaign.count(KILLS[1]) // len(LANES)
    calls, moments = rehearsed(log_trainees, tmp_path / "rehearsal")
    phases: collections.Counter[str] = collections.Counter({name: 0 for name in wal_harness.PHASES})
    lives = restores = of_points = inexact = 0
    root, offers, told = tmp_path / "root", Offers(), []
    outside = harness.Outside(tmp_path / "outside")
    # In a part, all kills may come before the first commit.
    while phases.total() < kills or restores + offers.restored == 0:
        if lives % LIVES == 0:
            restores, of_points = restores + offers.restored, of_points + offers.of_points
            inexact += offers.inexact
            root, offers = tmp_path / f"root{lives}", Offers()
        lives += 1
        assert lives < 20 * kills, f"most lives end by themselves or restore nothing: {phases}"
        kill, since, after = draw_kill(random_, phases, calls, moments)
        task = {**wal_harness.draw_log_life(random_, (lives - 1) % LIVES + 1, DOINGS), **kill}
        outside.plant(random_, root)
        running = log_trainees.start("log", root, **task)
        ended = running.end(since, after, running.kill)
        told = [*told[-2:], json.dumps({"task": task, "notes": ended.notes})]
        with harness.telling(root, *told):
            assert ended.status in (0, -signal.SIGKILL), log_trainees.diagnosis()
            offers.check(ended)
            harness.put_back(root, ended)
            outside.check()
        if ended.status == -signal.SIGKILL and ended.calls:
            phases[wal_harness.phase(*killing_call(ended, kill))] += 1
    figures(
        "kills of one process that logs",
        kills=phases.total(),
        lives=lives,
        restores=restores + offers.restored,
        restores_of_points=of_points + offers.of_points,
        of_lossy_leaves=inexact + offers.inexact,
        phase=dict(phases),
    )


def rehearsed(trainees, root) -> tuple[int, dict[str, float]]:
    """I/O calls and seconds of an undisturbed life, like ``test_kills.rehearsed``."""
    life: dict[str, Any] = {
        "doings": [
            ["save", 1],
            ["log", 3],
            ["union", 2],
            ["save", 1],
            ["log", 5],
            ["wait_appended"],
        ],
        "dense": {"deltas": "blocks", "codec": trainee.LOSSY},
        "log_options": {"dense": "delta"},
    }
    calls, secs = 0, {}
    for number in (1, 2):
        ended, secs = timed(trainees.start("log", root, branch=100 * number, **life))
        assert ended.status == 0, trainees.diagnosis()
        calls = len(ended.calls)
    seen = {wal_harness.phase(*call) for call in ended.calls.values()}
    assert seen <= set(wal_harness.PHASES), seen - set(wal_harness.PHASES)
    return calls, secs


def draw_kill(
    random_: random.Random, phases: collections.Counter[str], calls: int, moments: dict[str, float]
) -> tuple[dict, str, float | None]:
    """Draws the call at which a process kills itself, or the note and delay of an outside kill."""
    plan = random_.choice(("call", "call", "call", "phase", "ready", "ready", "restoring"))
    if plan in moments:
        return {}, plan, random_.uniform(0, moments[plan])
    at, match = random_.randint(1, calls), ""
    rarest = min(wal_harness.MATCHES, key=phases.__getitem__)
    if plan == "phase":
        at, match = random_.randint(1, 3), wal_harness.MATCHES[rarest]
    return {"action": trainee.KILL, "at": at, "match": match}, "ready", None


@pytest.fixture(scope="module")
def server():
    server = Server(wal_job_worker.__file__)
    yield server
    server.close()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_kill_of_one_of_several_processes_loses_nothing_that_all_acknowledged(
    server, tmp_path, campaign, figures, processes
):
    random_ = campaign.random("log kills of several", processes)
    kills = campaign.count(KILLS[processes])
    acknowledged = reached = unacknowledged = of_points = 0
    root = tmp_path
    for life in range(kills):
        if life % LIVES_OF_SEVERAL == 0:
            root, acknowledged, reached = tmp_path / f"root{life}", 0, 0
        topology, place = _draw_topology(random_, processes)
        with Job(server, tmp_path / "jobs", apart=True, model=MODEL, **topology) as job:
            job.all("open", root=str(root), processes_secs=_PROCESSES_SECS, **_drawn(random_))
            begins = not root.exists()
            if not begins:
                found = job.all("restore_latest", place=place)
                [(step, wrong)] = {(one["step"], one.get("wrong")) for one in found}
                begins = step is None
                assert wrong is None and acknowledged <= (step or 0) <= reached, found
                of_points += not begins and found[0]["point"]
                unacknowledged += reached - (step or 0)
                acknowledged = reached = step or 0
            if begins:
                job.all("start", place=place)
            job.ask("logs", seed=random_.randrange(1 << 30), begins=begins)
            time.sleep(random_.uniform(0, _LONGEST_LIFE_SECS))
            random_.choice(job.processes).kill()
            time.sleep(random_.choice((0.0, random_.uniform(0, _LONGEST_WITHOUT_SECS))))
        # All processes are dead, so their output is complete.
        acknowledged, reached = _told(job.processes, acknowledged)
    figures(
        f"kills of one of {processes} processes that log",
        kills=kills,
        restores_of_points=of_points,
        steps_that_were_made_again=unacknowledged,
    )


def _drawn(random_: random.Random) -> dict:
    return {
        "policy": random_.choice(("consecutive", "one_shot", "intermittent")),
        "max_to_keep": random_.choice((1, 2, 4)),
        "dense": random_.choice(("whole", "blocks")),
        "log": {
            "dense": random_.choice(("whole", "delta")),
            "dense_every": random_.choice((1, 1, 3)),
            "backend": {"segment_bytes": 1 << 16},
        },
    }


def _draw_topology(random_: random.Random, processes: int) -> tuple[dict, dict]:
    count = random_.choice((processes, processes, processes, 1))
    devices = 2 if count == 1 else random_.choice((1, 2))
    mesh = [count, devices] if random_.random() < 0.5 else [devices * count, 1]
    return {"processes": count, "devices": devices}, {"mesh": mesh}


def _told(processes: list[Process], step: int) -> tuple[int, int]:
    """Returns the newest steps that any process reported as acknowledged, and as begun."""
    said = [one.split() for process in processes for one in process.reached]
    newest = {
        kind: max([step, *(int(number) for what, number in said if what == kind)])
        for kind in ("acknowledged", "begun")
    }
    return newest["acknowledged"], newest["begun"]
