# SPDX-License-Identifier: Apache-2.0
"""Kills a training process with SIGKILL at every I/O call and at random moments.

The process saves, applies retention, rolls back on disk and in memory, restarts tracking, compacts
and restores older steps. The next process restores the newest committed step and compares it bit
for bit. Deltas hold dense leaves as Orbax does or as blocks. Lossy leaves must match what the
encoder reported before the write, and stay within the error that a save may make.
"""

from __future__ import annotations

import collections
import json
import random
import time
from typing import Any

import harness
import pytest
import trainee
from harness import Ended, Expected

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

KILLS = 2000
#: In a recorded run, each lane kills at least so many processes in each phase.
LEAST_KILLS = 20
#: One pytest-xdist worker runs each.
LANES = [pytest.param(n, marks=pytest.mark.xdist_group(f"kills {n}")) for n in range(2)]
#: Lives per directory: a longer history takes longer to replay.
LIVES = 40
DOINGS = 6


@pytest.mark.parametrize("lane", LANES)
def test_killed_anywhere_the_newest_committed_step_restores_exactly(
    trainees, tmp_path, campaign, figures, lane
):
    random_ = campaign.random("kills", lane)
    kills, least = campaign.count(KILLS) // len(LANES), campaign.count(LEAST_KILLS)
    calls, moments = rehearsed(trainees, tmp_path / "rehearsal")
    phases: collections.Counter[str] = collections.Counter({name: 0 for name in harness.PHASES})
    kinds: collections.Counter[str] = collections.Counter()
    lives = restores = inexact = 0
    root, expected, told = tmp_path / "root", Expected(), []
    outside = harness.Outside(tmp_path / "outside")
    while phases.total() < kills or min(phases.values()) < least:
        if lives % LIVES == 0:
            root, expected = tmp_path / f"root{lives}", Expected()
        lives += 1
        assert lives < 4 * kills, f"not every phase was hit: {phases}"
        missing = phases.total() >= kills
        kill, since, after = draw_kill(random_, phases, calls, moments, missing=missing)
        task = {**harness.draw_life(random_, lives % LIVES + 1, DOINGS), **kill}
        outside.plant(random_, root)
        standing, compared = harness.newest(root), (expected.restored, expected.inexact)
        running = trainees.start("train", root, **task)
        ended = running.end(since, after, running.kill)
        told = [*told[-2:], json.dumps({"task": task, "notes": ended.notes})]
        with harness.telling(root, *told):
            assert ended.status in (0, -9), trainees.diagnosis()
            expected.check(ended, standing)
            harness.put_back(root, ended)
            outside.check()
        restores += expected.restored - compared[0]
        inexact += expected.inexact - compared[1]
        if ended.status == -9 and ended.calls:
            phases[harness.phase(*killing_call(ended, kill))] += 1
            kinds[kind(ended)] += 1
    figures(
        "kills",
        kills=phases.total(),
        lives=lives,
        restores=restores,
        of_lossy_leaves=inexact,
        phase=dict(phases),
        moment=dict(kinds),
    )


def rehearsed(trainees: harness.Trainees, root) -> tuple[int, dict[str, float]]:
    """Measures the I/O calls and seconds of an undisturbed life; the first fills XLA's cache.

    Returns:
      The number of calls; and the seconds of the restore and of the rest, by their first note.
    """
    life: dict[str, Any] = {
        "doings": [*([["save", 1 + number % 2] for number in range(DOINGS)]), ["compact"]],
        "dense": {"deltas": "blocks", "codec": trainee.LOSSY},
    }
    calls, secs = 0, {}
    for number in (1, 2):
        ended, secs = timed(trainees.start("train", root, branch=100 * number, **life))
        assert ended.status == 0, trainees.diagnosis()
        calls = len(ended.calls)
    seen = {harness.phase(*call) for call in ended.calls.values()}
    assert seen <= set(harness.PHASES) == set(harness.MATCHES), seen - set(harness.PHASES)
    return calls, secs


def timed(running: harness.Running) -> tuple[Ended, dict[str, float]]:
    """Returns how a life ended, and the seconds of its restore and of the rest, by first note."""
    at: dict[str, float] = {}
    for note in running:
        at[note["note"]] = time.perf_counter()
    secs = {}
    if "done" in at:
        secs = {"restoring": at["ready"] - at["restoring"], "ready": at["done"] - at["ready"]}
    return running.ended(), secs


def draw_kill(
    random_: random.Random,
    phases: collections.Counter[str],
    calls: int,
    moments: dict[str, float],
    *,
    missing: bool,
) -> tuple[dict, str, float | None]:
    """Draws where a process kills itself, or after which note and delay the test kills it.

    Once enough processes were killed, each life aims at one of the phases that are still missing.
    """
    plans = ("call", "call", "call", "phase", "phase", "ready", "ready", "restoring")
    plan = "phase" if missing else random_.choice(plans)
    if plan in moments:
        return {}, plan, random_.uniform(0, moments[plan] * (1 if plan == "restoring" else 3 / 5))
    if plan == "phase":
        fewest = min(phases.values())
        # Random among the rarest: a life may not reach its phase.
        rarest = random_.choice([phase for phase, hits in phases.items() if hits == fewest])
        # Few lives remove or roll back more than once.
        at = random_.choice((1, 1, 2, 3, 4)) if missing else random_.randint(1, 3)
        match = harness.MATCHES[rarest]
    else:
        # Not every drawn action saves.
        at, match = random_.randint(1, calls * 3 // 5), ""
    return {"action": trainee.KILL, "at": at, "match": match}, "ready", None


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
    """Describes what the process was saving when it died."""
    begun, saving = ended.last("begun", "step"), ended.noted("saving")
    if not ended.noted("ready"):
        return "before its restore had ended"
    if begun is None:
        return "before the first save"
    if saving and saving[-1]["step"] == begun:
        return f"after a {saving[-1]['save']} was taken"
    return "in the blocking half of a save"
