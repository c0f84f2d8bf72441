# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every I/O step of a training process that saves, retains and restarts."""

from __future__ import annotations

import collections
import random

import harness
import pytest
import trainee
from harness import Ended, Trainees

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

KILLS = 200
LEAST_KILLS = 3
SAVES = 6


def check_start(ended: Ended, standing: int, waited_for: int, trainees: Trainees) -> None:
    """What must hold when a process starts where another was killed.

    Args:
      ended: the process that started.
      standing: the newest committed step when it did.
      waited_for: the newest step for which ``wait()`` had returned.
      trainees: where its stderr is.
    """
    if not ended.noted("ready"):
        # It was killed itself before it had restored.
        assert ended.status == -9, (ended.notes, trainees.diagnosis())
        return
    [ready] = ended.noted("ready")
    assert ready["wrong"] is None, ready
    assert ready["step"] == standing, ready
    assert standing >= waited_for, (ready, waited_for)
    assert not [name for name in ready["leftovers"] if "orbax-checkpoint-tmp" in name], ready


def test_killed_at_any_io_step_the_newest_committed_step_restores_exactly(
    trainees, tmp_path, record
):
    rehearsal = trainees.run("train", tmp_path / "rehearsal", saves=SAVES)
    assert rehearsal.status == 0, trainees.diagnosis()
    seen = {harness.phase(*call) for call in rehearsal.calls.values()}
    assert seen <= set(harness.PHASES), seen - set(harness.PHASES)

    random_ = random.Random(0)
    root = tmp_path / "root"
    hits: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    waited_for = runs = 0
    while hits.total() < KILLS or min(hits[name] for name in harness.PHASES) < LEAST_KILLS:
        runs += 1
        assert runs < 3 * KILLS, f"not every phase was hit: {hits}"
        rarest = min(harness.PHASES, key=lambda name: hits[name])
        if runs % 2 or rarest not in harness.MATCHES:
            at, match = random_.choice(list(rehearsal.calls)), ""
        else:
            at, match = random_.randint(1, 4), harness.MATCHES[rarest]
        standing = harness.newest(root)
        ended = trainees.run("train", root, saves=SAVES, action=trainee.KILL, at=at, match=match)
        check_start(ended, standing, waited_for, trainees)
        waited_for = max(waited_for, ended.last("committed", "step") or 0)
        if ended.status == -9:
            hits[harness.phase(*_killing_call(ended, at, match))] += 1
            kinds[_kind(ended)] += 1
        else:
            assert ended.status == 0, (ended.notes, trainees.diagnosis())
    standing = harness.newest(root)
    ended = trainees.run("train", root, saves=SAVES)
    assert ended.status == 0, trainees.diagnosis()
    check_start(ended, standing, waited_for, trainees)
    record(f"{hits.total()} kills in {runs} runs, up to step {standing}; killed in")
    for name in harness.PHASES:
        record(f"  {name:40s} {hits[name]:4d} {'#' * hits[name]}")
    record("  " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))


def _killing_call(ended: Ended, at: int, match: str) -> tuple[str, str]:
    """The call in which a process was killed: the ``at``-th of those that match."""
    if not match:
        return ended.calls[at]
    lines = {number: f"{number} {' '.join(call)}\n" for number, call in ended.calls.items()}
    return ended.calls[[number for number in sorted(lines) if match in lines[number]][at - 1]]


def _kind(ended: Ended) -> str:
    """What was being saved when the process died."""
    begun, saving = ended.last("begun", "step"), ended.noted("saving")
    if begun is None:
        return "before the first save"
    if saving and saving[-1]["step"] == begun:
        return f"in a {saving[-1]['save']}"
    return "in the blocking half of a save"
