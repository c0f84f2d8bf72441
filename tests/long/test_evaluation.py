# SPDX-License-Identifier: Apache-2.0
"""An evaluation process restores in a loop while the trainer saves and retention deletes."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SECS = 60
SAVE = [["save", 1], ["wait"], ["save", 2], ["wait"]]


def test_a_reader_during_training_and_retention_always_gets_a_whole_step(
    trainees, second_trainees, tmp_path, record
):
    root = tmp_path / "root"
    first = trainees.run("train", root, doings=SAVE, branch=0)
    assert first.status == 0, trainees.diagnosis()
    training = trainees.start("train", root, doings=SAVE, branch=1, rounds=10**6, max_to_keep=1)
    reading = second_trainees.run("evaluate", root, secs=SECS)
    training.kill()
    for _ in training:
        pass
    trained = training.ended()
    assert reading.status == 0, (reading.notes, second_trainees.diagnosis())
    read = [note["step"] for note in reading.noted("read")]
    assert [note for note in reading.noted("read") if note["wrong"] is not None] == []
    assert read == sorted(read)
    removed = sum("removal" in name for name in _phases(trained))
    record(
        f"{len(read)} restores of {len(set(read))} steps in {SECS} s, while "
        f"{len(trained.noted('waited'))} steps were saved and {removed} calls removed some; "
        f"a newer step was taken {sum(note['retries'] for note in reading.noted('read'))} "
        "times because the one being read was removed"
    )
    assert len(set(read)) > 5
    assert removed


def _phases(ended) -> list[str]:
    import harness

    return [harness.phase(*call) for call in ended.calls.values()]
