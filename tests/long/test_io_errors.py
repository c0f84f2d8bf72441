# SPDX-License-Identifier: Apache-2.0
"""A full or failing disk, from any I/O call on: the process survives and loses nothing."""

from __future__ import annotations

import collections
import errno

import harness
import pytest
import trainee

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

#: At most; a run that makes fewer calls gets a fault in each.
FAULTS = 240
SAVES = 5


@pytest.mark.parametrize(
    ("action", "number"),
    [
        (trainee.FAIL_ONCE, errno.EIO),
        (trainee.FAIL_ONCE, errno.ENOSPC),
        (trainee.FAIL_FROM, errno.ENOSPC),
    ],
    ids=["one EIO", "one ENOSPC", "ENOSPC until space is freed"],
)
def test_a_failed_io_call_is_a_typed_error_and_the_next_save_loses_nothing(
    trainees, tmp_path, campaign, record, action, number
):
    rehearsal = trainees.run("suffer", tmp_path / "rehearsal", saves=SAVES)
    assert rehearsal.status == 0, trainees.diagnosis()
    random_ = campaign.random("faults", action, number)
    calls = len(rehearsal.calls)
    faults = min(campaign.count(FAULTS), calls)
    outcomes: collections.Counter[str] = collections.Counter()
    for fault in range(faults):
        # One call from each of ``faults`` equal ranges of calls.
        at = random_.randrange(calls * fault // faults, calls * (fault + 1) // faults) + 1
        root = tmp_path / f"root{fault}"
        ended = trainees.run("suffer", root, saves=SAVES, action=action, at=at, errno=number)
        where = ended.calls.get(at)
        assert ended.status == 0, (where, ended.notes, trainees.diagnosis())
        refused = ended.noted("refused")
        outcomes[", ".join(note["error"] for note in refused) or "nothing to report"] += 1
        for note in refused:
            assert note["text"].strip(), where
        # A step whose last fsync failed may exist although its commit was not reported.
        assert ended.last("restored", "step") >= ended.last("committed", "step"), (where, ended)
        assert ended.last("restored", "wrong") is None, (where, ended.notes)
        assert harness.newest(root) == ended.last("restored", "step")
    record(f"{faults} faults over {calls} calls:")
    for name, count in outcomes.most_common():
        record(f"  {count:4d} {name}")
