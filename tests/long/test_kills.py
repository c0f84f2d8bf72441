# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every I/O step of a training process, and at any moment.

The process saves, retains, goes back on disk and in memory, tracks anew and looks at older steps;
each next one restores the newest committed step and compares it bit for bit.
"""

from __future__ import annotations

import collections
import random
import time

import harness
import pytest
import trainee
from harness import Ended, Expected

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

KILLS = 2000
#: Each is the work of one worker of pytest-xdist.
LANES = [pytest.param(n, marks=pytest.mark.xdist_group(f"kills {n}")) for n in range(2)]
#: Then a new directory is begun: the longer a history, the longer is its replay.
LIVES = 40
DOINGS = 6


@pytest.mark.parametrize("lane", LANES)
def test_killed_anywhere_the_newest_committed_step_restores_exactly(
    trainees, tmp_path, campaign, figures, lane
):
    random_ = campaign.random("kills", lane)
    kills = campaign.count(KILLS) // len(LANES)
    calls, secs = rehearsed(trainees, tmp_path / "rehearsal")
    phases: collections.Counter[str] = collections.Counter({name: 0 for name in harness.PHASES})
    kinds: collections.Counter[str] = collections.Counter()
    lives = restores = 0
    root, expected = tmp_path / "root", Expected()
    while phases.total() < kills or 0 in phases.values():
        if lives % LIVES == 0:
            root, expected = tmp_path / f"root{lives}", Expected()
        lives += 1
        assert lives < 4 * kills, f"not every phase was hit: {phases}"
        kill, after = draw_kill(random_, phases, calls, secs, missing=phases.total() >= kills)
        task = {**harness.draw_life(random_, lives % LIVES + 1, DOINGS), **kill}
        standing, compared = harness.newest(root), expected.restored
        running = trainees.start("train", root, **task)
        ended = running.end("ready", after, running.kill)
        assert ended.status in (0, -9), (ended.notes, trainees.diagnosis())
        expected.check(ended, standing)
        restores += expected.restored - compared
        if ended.status == -9 and ended.calls:
            phases[harness.phase(*killing_call(ended, kill))] += 1
            kinds[kind(ended)] += 1
    figures(
        "kills",
        kills=phases.total(),
        lives=lives,
        restores=restores,
        phase=dict(phases),
        moment=dict(kinds),
    )


def rehearsed(trainees: harness.Trainees, root) -> tuple[int, float]:
    """I/O calls and seconds of a life that nobody ends; the first fills XLA's cache."""
    saves = [["save", 1 + number % 2] for number in range(DOINGS)]
    for life in (1, 2):
        running, started = trainees.start("train", root, doings=saves, branch=100 * life), 0.0
        for note in running:
            if note["note"] == "ready":
                started = time.perf_counter()
        secs = time.perf_counter() - started
        ended = running.ended()
        assert ended.status == 0, trainees.diagnosis()
    seen = {harness.phase(*call) for call in ended.calls.values()}
    assert seen <= set(harness.PHASES), seen - set(harness.PHASES)
    return len(ended.calls), secs


def draw_kill(
    random_: random.Random,
    phases: collections.Counter[str],
    calls: int,
    secs: float,
    *,
    missing: bool,
) -> tuple[dict, float | None]:
    """Where a process kills itself, or when it is killed from outside.

    Where only phases are missing that are hard to hit, these are aimed at.
    """
    way = "phase" if missing else random_.choice(("call", "call", "phase", "moment"))
    if way == "moment":
        return {}, random_.uniform(0, secs * 3 / 5)
    rarest = min(phases, key=phases.__getitem__)
    if way == "phase" and rarest in harness.MATCHES:
        # Few lives remove or roll back more than once.
        at, match = 1 if missing else random_.randint(1, 3), harness.MATCHES[rarest]
    else:
        # Of what is drawn not everything saves.
        at, match = random_.randint(1, calls * 3 // 5), ""
    return {"action": trainee.KILL, "at": at, "match": match}, None


def killing_call(ended: Ended, kill: dict) -> tuple[str, str]:
    """The call in which a process was killed: the ``at``-th of those that match, or its last."""
    if not kill:
        return ended.calls[max(ended.calls)]
    if not kill["match"]:
        return ended.calls[kill["at"]]
    lines = {number: f"{number} {' '.join(call)}\n" for number, call in ended.calls.items()}
    matching = [number for number in sorted(lines) if kill["match"] in lines[number]]
    return ended.calls[matching[kill["at"] - 1]]


def kind(ended: Ended) -> str:
    """What was being saved when the process died."""
    begun, saving = ended.last("begun", "step"), ended.noted("saving")
    if begun is None:
        return "before the first save"
    if saving and saving[-1]["step"] == begun:
        return f"after a {saving[-1]['save']} was taken"
    return "in the blocking half of a save"
