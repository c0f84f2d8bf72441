# SPDX-License-Identifier: Apache-2.0
"""Settings and summaries of the long test loops."""

from __future__ import annotations

import json

import campaign
import pytest
from campaign import Campaign
from machine import required


def test_a_missing_tool_skips_a_test_and_fails_it_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="mkfs"):
        required(False, "mkfs.xfs is needed")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="mkfs"):
        required(False, "mkfs.xfs is needed")
    required(True, "it is there")


def test_a_seed_repeats_what_is_drawn_and_each_test_draws_its_own():
    one, same, other = Campaign(True, 1), Campaign(True, 1), Campaign(True, 2)
    draw = one.random("kills", 0).random()
    assert draw == same.random("kills", 0).random()
    assert draw not in (one.random("kills", 1).random(), other.random("kills", 0).random())
    assert (one.count(2000), Campaign(False, 1).count(2000)) == (2000, 100)


def test_a_summary_adds_up_the_tests_of_a_loop(tmp_path):
    figures = [
        ("kills", {"kills": 1000, "phase": {"dense": 3}}),
        ("kills", {"kills": 1001, "phase": {"dense": 4, "commit": 1}}),
        ("cuts", {"cuts": 500}),
    ]
    found = campaign.summary(Campaign(True, 7), figures, 61.4)
    assert found["loops"]["kills"] == {
        "tests": 2,
        "kills": 2001,
        "phase": {"dense": 7, "commit": 1},
    }
    assert found["seed"] == 7 and found["secs"] == 61 and "jax" in found["versions"]
    campaign.write(found, tmp_path / "build" / "long_loops")
    assert json.loads((tmp_path / "build" / "long_loops.json").read_text()) == found
    text = (tmp_path / "build" / "long_loops.md").read_text()
    assert "| kills | 2 tests, 2,001 kills |" in text and "Seed 7, 61 s" in text
