# SPDX-License-Identifier: Apache-2.0
"""Intervals of WAL records, deltas and bases: the least loss of a model, within its bounds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from deltackpt.errors import OptionError
from deltackpt.events import AppendEvent, RestoreEvent, SaveEvent
from deltackpt.policies import Cost, MeasuredCosts, Regime, RegimeAdvice, advise_regime

FREE = Cost(stall_secs=0.0, persist_secs=0.0, restore_secs=0.0)
BASE = Cost(stall_secs=2.0, persist_secs=60.0, restore_secs=40.0)
DELTA = Cost(stall_secs=0.05, persist_secs=0.5, restore_secs=0.3)
MARK = Cost(stall_secs=0.002, persist_secs=0.02, restore_secs=0.003)

seconds = st.floats(1e-4, 1e3)
costs = st.builds(Cost, stall_secs=seconds, persist_secs=seconds, restore_secs=seconds)
maybe = st.none() | costs
runs = st.fixed_dictionaries(
    {
        "mtbr_secs": st.floats(60, 1e6),
        "step_secs": st.floats(1e-2, 10),
        "max_overhead": st.floats(1e-3, 0.5),
    }
)
RUN = {"mtbr_secs": 6 * 3600.0, "step_secs": 0.5, "max_overhead": 0.01}


def expected_loss(
    steps: dict[str, int], cost: dict[str, Cost], *, mtbr_secs: float, step_secs: float
) -> tuple[float, float]:
    """Recomputes the model for one schedule: the stalls' share of time, and the total loss."""
    every = {kind: count * step_secs for kind, count in steps.items()}
    rate = {kind: 1 / secs for kind, secs in every.items()}
    if "delta" in every:
        rate["delta"] -= rate["base"]
    stalls = sum(cost[kind].stall_secs * rate[kind] for kind in every)
    saves = [kind for kind in every if kind != "wal"]
    late = sum(cost[kind].persist_secs * rate[kind] for kind in saves) / sum(
        rate[kind] for kind in saves
    )
    durable = cost["wal"].persist_secs if "wal" in every else late
    restart = min(every.values()) / 2 + durable + cost["base"].restore_secs
    if "delta" in every:
        age = every["base"] / 2 - every["delta"] / 2 + cost["base"].persist_secs
        restart += cost["delta"].restore_secs * age / every["delta"]
    if "wal" in every:
        age = min(every[kind] for kind in saves) / 2 - every["wal"] / 2 + late
        restart += cost["wal"].restore_secs * age / every["wal"]
    return stalls, stalls + restart / mtbr_secs


def schedule(regime: Regime) -> dict[str, int]:
    return {kind: getattr(regime, kind).every_steps for kind in regime.kinds}


def brute_force(cost: dict[str, Cost], most: int, run: dict[str, float]) -> float:
    """The least loss of all schedules whose ratios are below ``most``."""
    least = math.inf
    for kinds in (("base",), ("delta", "base"), ("wal", "base"), ("wal", "delta", "base")):
        if not cost.keys() >= set(kinds):
            continue
        for ratios in itertools.product(*[range(1, most)], *[range(2, most)] * (len(kinds) - 1)):
            steps = dict(zip(kinds, itertools.accumulate(ratios, int.__mul__), strict=True))
            if any(steps[k] * run["step_secs"] < cost[k].persist_secs for k in kinds):
                continue
            stalls, loss = expected_loss(
                steps, cost, mtbr_secs=run["mtbr_secs"], step_secs=run["step_secs"]
            )
            if stalls <= run["max_overhead"]:
                least = min(least, loss)
    return least


@pytest.mark.parametrize(
    ("base", "delta", "mark", "mtbr_secs"),
    [
        ((0.5, 3, 5), (0.05, 0.5, 0.5), (0.01, 0.1, 0.1), 600.0),
        ((0.5, 3, 5), (0.05, 0.5, 0.5), (0.01, 0.1, 0.1), 60.0),
        ((0.1, 1, 1), (0.05, 0.9, 0.5), (0.04, 0.1, 0.3), 300.0),
        ((2, 12, 5), (0.05, 0.5, 0.05), (0.0001, 4.0, 2.0), 900.0),
        ((0.3, 1, 90), (0.2, 1, 0.01), (0.1, 0.5, 5.0), 1200.0),
    ],
)
@pytest.mark.parametrize("max_overhead", [0.02, 0.4])
def test_no_schedule_loses_less_than_the_advised_one(base, delta, mark, mtbr_secs, max_overhead):
    cost = {
        kind: Cost(stall_secs=stall, persist_secs=persist, restore_secs=restore)
        for kind, (stall, persist, restore) in (("base", base), ("delta", delta), ("wal", mark))
    }
    run = {"mtbr_secs": mtbr_secs, "step_secs": 1.0, "max_overhead": max_overhead}
    advised = advise_regime(**cost, **run).regime
    assert advised.overhead <= brute_force(cost, 26, run) * 1.001


@given(costs, maybe, maybe, runs)
def test_the_reported_loss_is_that_of_the_reported_schedule(base, delta, wal, run):
    given_ = {"base": base, "delta": delta, "wal": wal}
    cost = {kind: one for kind, one in given_.items() if one is not None}
    for regime in advise_regime(**given_, **run).regimes:
        steps = schedule(regime)
        stalls, loss = expected_loss(
            steps, cost, mtbr_secs=run["mtbr_secs"], step_secs=run["step_secs"]
        )
        assert regime.overhead == pytest.approx(loss)
        assert regime.stall_share == pytest.approx(stalls, abs=1e-12)


@given(costs, maybe, maybe, runs)
def test_no_kind_is_more_frequent_than_steps_persists_and_budget_allow(base, delta, wal, run):
    given_ = {"base": base, "delta": delta, "wal": wal}
    advice = advise_regime(**given_, **run)
    for regime in advice.regimes:
        assert regime.stall_share <= run["max_overhead"] * (1 + 1e-9)
        below = 1
        for kind in regime.kinds:
            every = getattr(regime, kind)
            assert every.every_steps >= 1
            assert every.every_steps % below == 0
            assert every.interval_secs == pytest.approx(every.every_steps * run["step_secs"])
            assert every.interval_secs >= given_[kind].persist_secs * (1 - 1e-9)
            below = every.every_steps
    assert advice.regime.overhead == min(regime.overhead for regime in advice.regimes)


def overhead(**arguments) -> float:
    return advise_regime(**arguments).regime.overhead


@given(costs, maybe, maybe, runs, st.floats(1, 100))
def test_fewer_restarts_never_lose_more(base, delta, wal, run, factor):
    rarer = {**run, "mtbr_secs": run["mtbr_secs"] * factor}
    kinds = {"base": base, "delta": delta, "wal": wal}
    assert overhead(**kinds, **rarer) <= overhead(**kinds, **run) * (1 + 1e-9)


@given(costs, maybe, maybe, runs, st.floats(1, 100), st.data())
def test_a_higher_cost_never_reduces_the_loss(base, delta, wal, run, factor, data):
    kinds = {"base": base, "delta": delta, "wal": wal}
    kind = data.draw(st.sampled_from([kind for kind, cost in kinds.items() if cost is not None]))
    name = data.draw(st.sampled_from(["stall_secs", "persist_secs", "restore_secs"]))
    # A WAL that costs as much as deltas is ignored until deltas become more expensive.
    assume(kind != "delta" or wal is None or wal.stall_secs < delta.stall_secs)
    dearer = dataclasses.replace(kinds[kind], **{name: getattr(kinds[kind], name) * factor})
    assert overhead(**{**kinds, kind: dearer}, **run) >= overhead(**kinds, **run) * (1 - 1e-9)


@given(costs, maybe, runs)
def test_a_free_wal_has_a_record_at_every_step(base, delta, run):
    # Bases are rare then, but there is at least one per 1e9 records.
    assume(2 * run["mtbr_secs"] * base.stall_secs / 1e9 < run["step_secs"] ** 2)
    advice = advise_regime(base=base, delta=delta, wal=FREE, **run)
    finest = getattr(advice.regime, advice.regime.kinds[0])
    assert finest.every_steps == 1
    assert advice.regime.wal is not None


@given(costs, costs, runs, st.tuples(*[st.floats(1, 10)] * 3))
@example(BASE, DELTA, RUN, (1.0, 1.0, 1.0))
def test_a_wal_as_expensive_as_deltas_is_not_advised(base, delta, run, factors):
    wal = Cost(
        stall_secs=delta.stall_secs * factors[0],
        persist_secs=delta.persist_secs * factors[1],
        restore_secs=delta.restore_secs * factors[2],
    )
    advice = advise_regime(base=base, delta=delta, wal=wal, **run)
    assert advice.regime.wal is None
    assert advice.regime == advise_regime(base=base, delta=delta, **run).regime
    assert any(reason.startswith("no wal: ") for reason in advice.reasons)


@given(costs, runs, st.tuples(*[st.floats(1, 10)] * 3))
def test_a_delta_or_a_record_as_expensive_as_a_base_is_not_advised(base, run, factors):
    dear = Cost(
        stall_secs=base.stall_secs * factors[0],
        persist_secs=base.persist_secs * factors[1],
        restore_secs=base.restore_secs * factors[2],
    )
    for kinds in ({"delta": dear}, {"wal": dear}):
        assert advise_regime(base=base, **kinds, **run).regime.kinds == ("base",)


def test_the_usual_case_uses_all_three_kinds_each_with_a_reason():
    advice = advise_regime(base=BASE, delta=DELTA, wal=MARK, **RUN)
    assert advice.regime.kinds == ("wal", "delta", "base")
    assert [reason.split(":")[0] for reason in advice.reasons] == ["wal", "delta", "base"]
    alone = {regime.kinds: regime.overhead for regime in advice.regimes}
    assert alone["wal", "delta", "base"] < alone["delta", "base"] < alone["base",]


def test_a_kind_that_does_not_pay_off_is_reported_with_both_losses():
    slow = dataclasses.replace(MARK, restore_secs=500.0)
    advice = advise_regime(base=BASE, delta=DELTA, wal=slow, **RUN)
    assert advice.regime.wal is None
    assert any("% of training time is lost with it, " in reason for reason in advice.reasons)


@pytest.mark.parametrize("name", ["mtbr_secs", "step_secs", "max_overhead"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_advice_on_nonsense_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=name):
        advise_regime(base=BASE, **{**RUN, name: value})


@pytest.mark.parametrize("name", ["stall_secs", "persist_secs", "restore_secs"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_a_cost_that_is_not_a_duration_is_refused_by_name(name, value):
    with pytest.raises(OptionError, match=f"Cost.{name}: expected .* found"):
        dataclasses.replace(BASE, **{name: value})


def event(kind: type, /, **figures: object):
    """An event whose other required fields are zero."""
    required = (one for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING)
    return kind(**{one.name: 0 for one in required} | figures)


def saved(kind: str, *, nbytes: int, **secs: float) -> SaveEvent:
    return event(SaveEvent, kind=kind, bytes_written=nbytes, **secs)


def restored(*, total_secs: float, nbytes: int) -> RestoreEvent:
    return event(RestoreEvent, bytes_read=nbytes, read_secs=total_secs, total_secs=total_secs)


def test_measured_costs_are_medians_by_kind_and_restores_are_split_by_bytes():
    measured = MeasuredCosts()
    measured.receive(restored(total_secs=4.0, nbytes=2000))
    for blocked in (0.02, 9.0, 0.01):
        measured.receive(saved("delta", blocked_secs=blocked, total_secs=0.5, nbytes=100))
    measured.receive(saved("base", blocked_secs=1.0, total_secs=30.0, nbytes=1500))
    assert measured.cost("delta") == Cost(stall_secs=0.02, persist_secs=0.5, restore_secs=0.2)
    assert measured.cost("base") == Cost(stall_secs=1.0, persist_secs=30.0, restore_secs=3.0)
    assert measured.cost("wal") is None
    advice: RegimeAdvice = measured.advise(mtbr_secs=3600, step_secs=0.5)
    assert advice.regime.kinds == ("delta", "base")


def marked(kind: Literal["full", "soft"], *, blocked_secs: float = 0.002) -> AppendEvent:
    """The event of a WAL record of 1,500 bytes, 500 of them dense leaves."""
    figures = {"bytes_written": 1500, "dense_bytes": 500, "durable_secs": 0.02}
    return event(AppendEvent, kind=kind, blocked_secs=blocked_secs, **figures)


def test_only_full_records_are_measured_and_dense_leaves_are_not_replayed():
    measured = MeasuredCosts()
    measured.receive(restored(total_secs=4.0, nbytes=2000))
    measured.receive(marked("soft", blocked_secs=9.0))
    assert measured.cost("wal") is None
    measured.receive(marked("full"))
    assert measured.cost("wal") == Cost(stall_secs=0.002, persist_secs=0.02, restore_secs=2.0)


def test_before_any_restore_the_read_time_is_estimated_by_the_write_time():
    measured = MeasuredCosts()
    measured.receive(restored(total_secs=0.1, nbytes=0))
    measured.receive(saved("base", blocked_secs=1.0, total_secs=30.0, nbytes=1500))
    assert measured.cost("base") == Cost(stall_secs=1.0, persist_secs=30.0, restore_secs=30.0)


def test_measured_costs_without_a_base_name_the_remedy():
    measured = MeasuredCosts()
    measured.receive(saved("delta", blocked_secs=0.1, total_secs=0.5, nbytes=100))
    with pytest.raises(OptionError, match="force_base=True"):
        measured.advise(mtbr_secs=3600, step_secs=0.5)
