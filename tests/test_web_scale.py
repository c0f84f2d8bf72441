# SPDX-License-Identifier: Apache-2.0
"""The simulation of a job at web scale: time and bytes are conserved, small cases match by hand."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import hypothesis.strategies as st
import pytest
import web_scale
from hypothesis import given, settings
from web_scale import Inputs, Job, Simulation, Way

from deltackpt.policies import Consecutive

SMALL = Job(hosts=8, restart_secs=5)


@functools.cache
def small_ways() -> list[Way]:
    """The ways of the small job: their intervals take longer to compute than a simulation."""
    return web_scale.ways(SMALL, Inputs(), 1.0)


#: Operations that take no time, so that only stalls and restarts do.
FREE = Inputs(
    store=math.inf,
    network=math.inf,
    puts_per_sec=math.inf,
    store_secs=0,
    message_secs=0,
    parse_secs=0,
    spread=0,
)
EVERY_100 = Way(name="full saves", policy=None, where="store", fixed_stall_secs=2, base_every=100)


def outcome(way: Way, job: Job, failures: list[float], until: float, inputs: Inputs = FREE):
    run = Simulation(job, way, inputs, failures=failures, load=1.0, seed=0)
    return run.run(until)


def pieces(found) -> tuple[float, float, float, float]:
    return found.useful_secs, found.rework_secs, found.stall_secs, found.recovery_secs


ONE = Job(hosts=1, restart_secs=7)


@pytest.mark.parametrize(
    ("failures", "until", "expected"),
    [
        # Saves at 100 and 202 s, for 2 s each.
        ([], 250, (246, 0, 4, 0)),
        # Lost: the 46 steps since the second save. Then 7 s, and a save at 357 s.
        ([250], 400, (341, 46, 6, 7)),
        # The save of step 100 is not durable yet: all steps are lost, half of the stall is spent.
        ([101], 150, (42, 100, 1, 7)),
        # The second failure finds the job in recovery for 3 s, which begins again.
        ([250, 253], 400, (338, 46, 6, 10)),
        # The end is in a recovery: only durable steps count.
        ([250], 252, (200, 46, 4, 2)),
    ],
)
def test_one_host_loses_the_time_that_was_computed_by_hand(failures, until, expected):
    assert pieces(outcome(EVERY_100, ONE, failures, until)) == pytest.approx(expected)


def test_without_failures_a_run_loses_its_stalls_alone():
    found = outcome(EVERY_100, ONE, [], 102 * 50 + 1)
    assert pieces(found) == pytest.approx((100 * 50 + 1, 0, 2 * 50, 0))
    assert (found.saves["base"], found.wasted) == (50, 0)


def test_records_shorten_what_a_failure_loses():
    records = dataclasses.replace(
        EVERY_100, policy=Consecutive(), wal_share=1.0, wal_every=10, fixed_stall_secs=0
    )
    inputs = dataclasses.replace(FREE, record_secs=0)
    found = outcome(records, ONE, [257.5], 300, inputs)
    assert found.lost_secs == pytest.approx([7.5])
    assert found.saves == {"base": 2, "wal": 23 + 3}


@settings(max_examples=40)
@given(
    name=st.integers(0, 7),
    gaps=st.lists(st.floats(0.5, 2000), max_size=30),
    restart=st.floats(0, 100),
    until=st.floats(1, 20_000),
)
def test_time_and_bytes_are_conserved_for_any_failures(name, gaps, restart, until):
    job, inputs = dataclasses.replace(SMALL, restart_secs=restart), Inputs()
    way = small_ways()[name]
    failures = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    found = outcome(way, job, failures, until, inputs)
    assert sum(pieces(found)) == pytest.approx(until)
    assert min(*pieces(found), *found.lost_secs, *found.recoveries, found.wasted) >= -1e-9
    kept = sum(found.written.values()) + found.wasted + found.pending
    assert kept == pytest.approx(found.begun)
    assert len(found.lost_secs) <= sum(failure < until for failure in failures)


def test_a_seed_determines_the_run():
    inputs = Inputs()
    for way in web_scale.ways(SMALL, inputs, 1.0):
        runs = [web_scale.simulated(SMALL, way, inputs, 2, seed, 1.0) for seed in (3, 3, 4)]
        assert runs[0] == runs[1] != runs[2]


def test_the_policy_bounds_the_chain():
    way = Way(name="deltas", policy=Consecutive(max_chain=5), where="store", delta_every=10)
    found = outcome(way, ONE, [], 600)
    # 59 saves, since the stalls delay them by some milliseconds each.
    assert found.saves == {"delta": 50, "base": 9}


def test_fragments_of_a_save_are_in_different_racks():
    placed = web_scale.peers(Job(hosts=120, rack_hosts=10))
    assert placed.most_in_rack == 1
    assert 1 < placed.load < 4


def test_the_commit_of_a_base_at_scale_costs_what_the_design_page_says():
    job = Job()
    base = web_scale.coordination(job, Inputs(), "base", job.base_bytes, readers=1)
    assert base.puts == pytest.approx(650_000, rel=0.1)
    assert base.nbytes == pytest.approx(440e6, rel=0.1)
    assert base.seconds > 60  # 2,000 files in turn.
    at_once = web_scale.coordination(job, Inputs(), "base", job.base_bytes, readers=32)
    assert at_once.seconds < 5
