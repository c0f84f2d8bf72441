# SPDX-License-Identifier: Apache-2.0
"""Policies: base or delta, save interval, and bit width."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import OptionError
from deltackpt.policies import (
    CHECK_N_RUN,
    BitWidthPolicy,
    CodecChoice,
    Consecutive,
    Decision,
    Intermittent,
    LeftToCompaction,
    OneShot,
    SaveHistory,
    advise_interval,
    too_large,
)

BASE = 1000
sizes = st.lists(st.integers(0, 1500), max_size=20)


def history(deltas: list[int], *, one_shot: bool = False) -> SaveHistory:
    last = deltas[-1] if deltas else 0
    return SaveHistory(
        base_bytes=BASE,
        delta_bytes=tuple(deltas),
        chain_length=min(1, len(deltas)) if one_shot else len(deltas),
        chain_bytes=BASE + (last if one_shot else sum(deltas)),
    )


@given(sizes)
def test_intermittent_takes_a_base_when_check_n_runs_predictor_does(deltas):
    policy = Intermittent(max_restore_ratio=1e9, max_delta_ratio=1e9)
    decision = policy.decide(history(deltas, one_shot=True))
    shares = [size / BASE for size in deltas]
    predicted = bool(shares) and 1 + sum(shares) <= (len(shares) + 1) * shares[-1]
    assert (decision.kind == "base") == predicted
    assert decision.parent == (None if predicted else "base")


@given(sizes)
def test_one_shot_builds_on_the_base_and_consecutive_on_the_newest(deltas):
    unbounded = {"max_chain": 1000, "max_restore_ratio": 1e9, "max_delta_ratio": 1e9}
    assert OneShot(**unbounded).decide(history(deltas, one_shot=True)).parent == "base"
    assert Consecutive(**unbounded).decide(history(deltas)).parent == "previous"


@given(sizes, st.integers(1, 30), st.floats(1, 5))
def test_no_chain_is_longer_or_larger_than_its_bounds(deltas, longest, ratio):
    """The policy assumes that the next delta has the size of the last one."""
    policy = Consecutive(max_chain=longest, max_restore_ratio=ratio)
    taken: list[int] = []
    for size in deltas:
        before = history(taken)
        if policy.decide(before).kind == "base":
            taken = []
            continue
        assert len(taken) + 1 <= longest
        assert before.chain_bytes + (taken[-1] if taken else 0) <= ratio * BASE
        taken.append(size)


@pytest.mark.parametrize("policy", [Consecutive(), OneShot(), Intermittent()])
def test_a_delta_of_nearly_all_rows_becomes_a_base(policy):
    for wrapped in (policy, LeftToCompaction(policy=policy)):
        assert too_large(wrapped, 800, BASE) is None
        assert "the bound is 0.8" in (too_large(wrapped, 801, BASE) or "")
    # With several processes, only the size of the last delta is known.
    assert policy.decide(history([801])).kind == "base"


def test_a_policy_without_the_bound_keeps_its_deltas():
    class Own:
        def decide(self, history):
            return Decision(kind="delta", parent="previous", reason="delta: always")

    assert too_large(Own(), 10 * BASE, BASE) is None


@pytest.mark.parametrize("policy", [Consecutive, OneShot, Intermittent])
def test_every_decision_has_a_reason_that_names_the_kind(policy):
    for deltas in ([], [10], [900, 900]):
        decision = policy(max_chain=1).decide(history(deltas))
        assert decision.reason.startswith(f"{decision.kind}: ")


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_chain": 0},
        {"max_restore_ratio": 0.5},
        {"max_restore_ratio": math.nan},
        {"max_delta_ratio": 0.0},
        {"max_delta_ratio": math.nan},
    ],
)
@pytest.mark.parametrize("policy", [Consecutive, OneShot, Intermittent])
def test_a_bound_that_no_chain_can_satisfy_is_refused(policy, bounds):
    with pytest.raises(OptionError, match=f"{next(iter(bounds))}: expected .* found"):
        policy(**bounds)


positive = st.floats(1e-3, 1e6)


@given(positive, positive, positive, st.floats(1e-4, 0.99))
def test_advice_respects_the_budget_and_the_speed_of_the_store(stall, persist, restarts, budget):
    advice = advise_interval(
        stall_secs=stall, persist_secs=persist, mtbr_secs=restarts, max_overhead=budget
    )
    assert stall / advice.interval_secs <= budget * (1 + 1e-9)
    assert advice.interval_secs >= persist
    assert advice.reason


def test_cheap_saves_are_advised_at_youngs_optimum():
    advice = advise_interval(stall_secs=0.02, persist_secs=0.1, mtbr_secs=3600)
    young = math.sqrt(2 * 0.02 * 3600)
    assert advice.interval_secs == pytest.approx(young, rel=0.01)
    assert "Daly" in advice.reason


@pytest.mark.parametrize("name", ["stall_secs", "persist_secs", "mtbr_secs", "max_overhead"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_advice_on_nonsense_is_refused_by_name(name, value):
    given_ = {"stall_secs": 1.0, "persist_secs": 1.0, "mtbr_secs": 1.0, "max_overhead": 0.1}
    with pytest.raises(OptionError, match=name):
        advise_interval(**{**given_, name: value})


@given(st.floats(0, 100), st.integers(0, 200), st.permutations([1.0, 3.0, 20.0, 50.0]).map(sorted))
def test_a_run_that_is_restored_more_often_never_gets_fewer_bits(expected, restores, limits):
    names = ["adaptive2", "adaptive3", "adaptive4", "int8"]
    pairs = (*zip(limits, names, strict=True), (math.inf, "raw"))
    policy = BitWidthPolicy(expected_restores=expected, codecs=pairs)
    order = [name for _, name in pairs]
    chosen = [order.index(policy.choose(count).codec) for count in range(restores + 1)]
    assert chosen == sorted(chosen)
    limit = pairs[chosen[-1]][0]
    assert max(expected, restores) <= limit


def test_bits_follow_check_n_runs_thresholds():
    chosen = {
        expected: BitWidthPolicy(expected_restores=expected, codecs=CHECK_N_RUN).choose(0).codec
        for expected in (0, 1, 1.01, 3, 3.5, 20, 21, 1000)
    }
    assert list(chosen.values()) == [
        "adaptive2", "adaptive2", "adaptive3", "adaptive3", "adaptive4", "adaptive4", "int8", "int8"
    ]  # fmt: skip


def test_an_exceeded_expectation_is_taken_as_twice_the_count():
    policy = BitWidthPolicy(expected_restores=2)
    assert policy.choose(2).reason == "adaptive4: 2 restores expected"
    found = policy.choose(11)
    assert found.codec == "int8"
    assert found.reason == "int8: 22 restores expected after 11 restores; 2 were expected"


def test_expected_restores_are_derived_from_failures():
    policy = BitWidthPolicy.from_failures(mean_secs_between_failures=3600, run_secs=36_000)
    assert policy.expected_restores == 10


_FROM_FAILURES = BitWidthPolicy.from_failures


@pytest.mark.parametrize(
    ("make", "given_", "message"),
    [
        (BitWidthPolicy, {"expected_restores": -1}, "expected_restores: .*found -1"),
        (BitWidthPolicy, {"expected_restores": math.nan}, "expected_restores: .*found nan"),
        (BitWidthPolicy, {"codecs": ()}, r"math.inf, found \[\]"),
        (BitWidthPolicy, {"codecs": ("int4",)}, "pairs of"),
        (BitWidthPolicy, {"codecs": ((3, "raw"),)}, r"found \[3.0\]"),
        (BitWidthPolicy, {"codecs": ((3, "raw"), (1, "raw"))}, "ascending limits"),
        (BitWidthPolicy, {"codecs": ((math.inf, "int5"),)}, "codec 'int5'"),
        (_FROM_FAILURES, {"mean_secs_between_failures": 0}, "failures: expected a positive"),
        (_FROM_FAILURES, {"run_secs": math.inf}, "run_secs: expected a positive"),
        (CodecChoice, {"delta": "int7"}, "codec 'int7'"),
        (CodecChoice, {"base": "int7"}, "codec 'int7'"),
        (CodecChoice, {"max_error": -0.1}, "max_error: .*found -0.1"),
        (CodecChoice, {"max_error": math.inf}, "max_error: .*found inf"),
        (CodecChoice, {"when_exceeded": "warn"}, "'widen' or 'refuse', found 'warn'"),
    ],
)
def test_impossible_bit_widths_and_choices_are_refused(make, given_, message):
    needed = {
        BitWidthPolicy: {"expected_restores": 1},
        _FROM_FAILURES: {"mean_secs_between_failures": 1, "run_secs": 1},
    }
    with pytest.raises(OptionError, match=message):
        make(**needed.get(make, {}) | given_)
