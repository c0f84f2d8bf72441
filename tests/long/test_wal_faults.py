# SPDX-License-Identifier: Apache-2.0
"""Power cuts, full disks and failing disks under processes that append to a WAL."""

from __future__ import annotations

import collections
import errno
import shutil

import harness
import pytest
import trainee
import wal_harness
from test_power_cuts import KINDS, disk
from wal_harness import Offers

__all__ = ["disk"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

CUTS = 100
#: More than a process can do before its power cut.
DOINGS = 80
#: Then a new directory starts: a longer history takes longer to replay.
LIVES = 20
_LONGEST_CUT_SECS = 1.0
FAULTS = 160
#: Steps of a training run, and how often it saves and waits for its WAL records.
STEPS, EVERY, WAITS = 12, 5, 3
_FAULTS = {
    "one EIO": (trainee.FAIL_ONCE, errno.EIO),
    "one ENOSPC": (trainee.FAIL_ONCE, errno.ENOSPC),
    "ENOSPC until space is freed": (trainee.FAIL_FROM, errno.ENOSPC),
}


def test_an_acknowledged_record_survives_a_power_cut(
    log_trainees, disk, tmp_path, campaign, figures
):
    random_ = campaign.random("power cuts of logs", disk.kind)
    phases: collections.Counter[str] = collections.Counter()
    cuts = restores = of_points = 0
    root, offers = disk.mount / "root", Offers()
    outside = harness.Outside(tmp_path / "outside")
    while cuts < campaign.count(CUTS) / len(KINDS):
        if cuts % LIVES == 0:
            restores, of_points = restores + offers.restored, of_points + offers.of_points
            shutil.rmtree(root, ignore_errors=True)
            root, offers = disk.mount / f"root{cuts}", Offers()
        cuts += 1
        life = wal_harness.draw_log_life(random_, (cuts - 1) % LIVES + 1, DOINGS)
        outside.plant(random_, root)
        running = log_trainees.start("log", root, **life)
        ended = running.end(
            "ready",
            random_.uniform(0, _LONGEST_CUT_SECS),
            lambda killed=running: (disk.cut(), killed.kill()),
        )
        disk.restart()
        with harness.telling(root, life):
            assert ended.noted("ready"), (ended.notes, log_trainees.diagnosis())
            # Acknowledged records must survive the power cut.
            offers.check(ended)
            harness.put_back(root, ended)
            outside.check()
        if ended.calls:
            phases[wal_harness.phase(*ended.calls[max(ended.calls)])] += 1
    figures(
        f"power cuts of logs on {disk.kind}",
        cuts=cuts,
        restores=restores + offers.restored,
        restores_of_points=of_points + offers.of_points,
        phase=dict(phases),
    )


@pytest.mark.parametrize("on_failure", ["save", "raise"])
@pytest.mark.parametrize("fault", _FAULTS)
def test_a_failed_io_call_is_reported_and_no_row_is_lost(
    log_trainees, tmp_path, campaign, record, fault, on_failure
):
    action, number = _FAULTS[fault]
    task = {
        "steps": STEPS,
        "every": EVERY,
        "waits": WAITS,
        "log_options": {"on_failure": on_failure, "backend": {"segment_bytes": 1 << 16}},
    }
    rehearsal = log_trainees.run("log_through_faults", tmp_path / "rehearsal", **task)
    assert rehearsal.status == 0, log_trainees.diagnosis()
    assert rehearsal.last("restored", "step") == STEPS and not rehearsal.noted("failure")
    of_log = [call for call, (_, path) in rehearsal.calls.items() if path.startswith("/log")]
    random_ = campaign.random("faults under the log", fault, on_failure)
    faults = campaign.count(FAULTS)
    outcomes: collections.Counter[str] = collections.Counter()
    for fault_number in range(faults):
        # Half of them hit the WAL; the others are spread evenly over all calls.
        calls = len(rehearsal.calls)
        at = random_.randrange(calls * fault_number // faults, calls * (fault_number + 1) // faults)
        at = random_.choice(of_log) if fault_number % 2 else at + 1
        root = tmp_path / f"root{fault_number}"
        fault_at = {"action": action, "at": at, "errno": number}
        ended = log_trainees.run("log_through_faults", root, **task, **fault_at)
        where = ended.calls.get(at)
        assert ended.status == 0, (where, ended.notes, log_trainees.diagnosis())
        told = [*ended.noted("refused"), *ended.noted("failure")]
        for note in told:
            assert note["text"].strip(), where
        outcomes[
            ", ".join(sorted({note.get("error") or "event" for note in told})) or "nothing"
        ] += 1
        if where is not None and where[0] == "write" and wal_harness.phase(*where) == "log: frames":
            assert told, (where, ended.notes)
        assert ended.last("restored", "wrong") is None, (where, ended.notes)
        # Steps after the fault are durable again, with the rows of the failed ones.
        assert ended.last("restored", "step") >= ended.last("acknowledged", "step"), (where, ended)
        if fault_number % 2 and ended.calls and at < len(ended.calls) // 2:
            assert ended.last("acknowledged", "step") == STEPS, (where, ended.notes)
    record(f"{faults} faults over {len(rehearsal.calls)} calls, {len(of_log)} of them of the log:")
    for name, count in outcomes.most_common():
        record(f"  {count:4d} {name}")
