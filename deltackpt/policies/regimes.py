# SPDX-License-Identifier: Apache-2.0
"""Chooses which of WAL records, deltas and bases to write, and how often.

Kinds are nested: a WAL record every T_wal, a delta every T_delta, a base every T_base, each an
integer multiple of the one before. A run that restarts every M seconds on average loses, per
second,

    sum of stall / T                                     of all kinds; a base replaces a delta
  + (T / 2 + persist) / M                                of the finest kind: repeated work
  + restore of the base / M
  + restore of a delta * deltas since the base / M
  + restore of a record * records since the last step / M

On average (n - 1) / 2 saves of a kind follow the last one of the next kind, where n is the ratio of
their intervals, plus persist / T while that one is not durable yet. For one kind, the first two
lines are Young's model ("A first order approximation to the optimum checkpoint interval", CACM
1974; Daly, FGCS 2006, for higher orders). Several kinds at once are the multi-level checkpoints of
SCR (Moody et al., "Design, modeling, and evaluation of a scalable multi-level checkpointing
system", SC 2010), VeloC (Nicolae et al., IPDPS 2019) and Di et al. ("Optimization of multi-level
checkpoint model for large scale HPC applications", IPDPS 2014). There the more expensive level
survives more failures. Here it shortens the restore, and every kind is assumed to survive the
failures that end a run.

For given ratios the loss is A / T + T / 2M + C of the finest interval T, with its minimum at sqrt(2
A M). The bounds (a step, persist, the budget) are lower bounds of T. T is therefore exact, and only
the ratios are searched: every integer up to 20, then in steps of 5 %. The result is within 0.1 % of
the smallest loss, and a higher cost never improves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.policies.interval import Advice, fraction, longest, positive

#: What a run can resume from, finest first.
RecoveryKind = Literal["wal", "delta", "base"]

_MIXTURES: tuple[tuple[RecoveryKind, ...], ...] = (
    ("base",),
    ("delta", "base"),
    ("wal", "base"),
    ("wal", "delta", "base"),
)
_NAMES: Mapping[RecoveryKind, str] = {"wal": "record", "delta": "delta", "base": "base"}
#: The largest ratio: if restores cost nothing, the next kind is never needed.
_MOST = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The measured cost of one WAL record, delta or base.

    Attributes:
      stall_secs: training time that it costs: how long the call blocks, plus what the background
        work takes from the training steps.
      persist_secs: time from the call until a restart would find the save or record.
      restore_secs: time that it adds to a restore: replay for a WAL record, merging for a delta,
        and everything else for a base.
    """

    stall_secs: float
    persist_secs: float
    restore_secs: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise OptionError(
                    f"Cost.{name}: expected a finite number of seconds, 0 or more, found {value}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regime:
    """How often each kind is written, and the training time that this costs.

    Attributes:
      base: interval of bases.
      delta: interval of deltas, or of bases in their place; None for never.
      wal: interval of full WAL records; None for never.
      stall_share: share of training time for saves and WAL records.
      rework_share: share that is repeated after restarts.
      restore_share: share of restores.
    """

    base: Advice
    delta: Advice | None = None
    wal: Advice | None = None
    stall_share: float
    rework_share: float
    restore_share: float

    @property
    def overhead(self) -> float:
        """Returns the total loss as a fraction of training time; 1 or more means no progress."""
        return self.stall_share + self.rework_share + self.restore_share

    @property
    def kinds(self) -> tuple[RecoveryKind, ...]:
        """Returns the kinds that are written, finest first."""
        return tuple(kind for kind in _MIXTURES[-1] if getattr(self, kind) is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegimeAdvice:
    """Advice on which kinds of save to write, and how often.

    Attributes:
      regime: the recommended regime.
      regimes: the best regime for each combination of kinds, cheapest first.
      reasons: one line for each kind.
    """

    regime: Regime
    regimes: tuple[Regime, ...]
    reasons: tuple[str, ...]


def advise_regime(
    *,
    base: Cost,
    delta: Cost | None = None,
    wal: Cost | None = None,
    mtbr_secs: float,
    step_secs: float,
    max_overhead: float = 0.01,
) -> RegimeAdvice:
    """Advises which of WAL records, deltas and bases to write, and how often.

    Costs are assumed to be the same at every interval. A record or delta over more steps contains
    more rows, so measure again after you follow the advice, and repeat.

    Args:
      base: costs of a base.
      delta: costs of a delta whose parent is the previous save, or None.
      wal: costs of a full WAL record; None if there is no WAL. A WAL that costs training as much as
        deltas, and is durable no sooner, is never advised.
      mtbr_secs: mean time between restarts of the job.
      step_secs: duration of a training step, without saves.
      max_overhead: largest share of training time that stalls may take, as a fraction.

    Returns:
      The combination that loses the least training time to stalls, repeated work and restores.
      Nothing is written more often than once a step, or before the previous one is durable.

    Raises:
      OptionError: an argument is not a positive finite number, or the budget is not below 1.

    Examples:
      >>> advice = advise_regime(
      ...     base=Cost(stall_secs=2.0, persist_secs=60.0, restore_secs=40.0),
      ...     delta=Cost(stall_secs=0.05, persist_secs=0.5, restore_secs=0.3),
      ...     wal=Cost(stall_secs=0.002, persist_secs=0.02, restore_secs=0.003),
      ...     mtbr_secs=6 * 3600, step_secs=0.5,
      ... )
      >>> advice.regime.kinds
      ('wal', 'delta', 'base')
    """
    positive(mtbr_secs=mtbr_secs, step_secs=step_secs)
    fraction(max_overhead=max_overhead)
    costs: dict[RecoveryKind, Cost] = {"base": base}
    if delta is not None:
        costs["delta"] = delta
    if wal is not None and not _dominated(wal, delta):
        costs["wal"] = wal
    run = _Run(mtbr_secs=mtbr_secs, step_secs=step_secs, max_overhead=max_overhead)
    found = [_least(kinds, costs, run) for kinds in _MIXTURES if costs.keys() >= set(kinds)]
    # Sorting is stable: among equals, the combination of fewer kinds is first.
    regimes = tuple(sorted(found, key=lambda regime: regime.overhead))
    return RegimeAdvice(
        regime=regimes[0], regimes=regimes, reasons=tuple(_reasons(regimes, wal, delta))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """The same for every combination."""

    mtbr_secs: float
    step_secs: float
    max_overhead: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Terms:
    """The loss at given ratios, as a function of the finest interval T; arrays over the ratios.

    Attributes:
      times: the interval of each kind, in T.
      stall_secs: stalls of all kinds within T.
      replay_secs: the part of a restore that is proportional to 1 / T, times T.
      fixed_secs: the rest of a restore.
      late_secs: from the newest save of the finest kind until it is durable.
      shortest_secs: lower bound of T by persist times.
    """

    times: Sequence[Any]
    stall_secs: Any
    replay_secs: Any
    fixed_secs: Any
    late_secs: Any
    shortest_secs: Any


def _dominated(wal: Cost, delta: Cost | None) -> bool:
    """Returns whether WAL records stall training as much as deltas and are durable no sooner."""
    return (
        delta is not None
        and wal.stall_secs >= delta.stall_secs
        and wal.persist_secs >= delta.persist_secs
    )


def _terms(
    kinds: Sequence[RecoveryKind], costs: Mapping[RecoveryKind, Cost], ratios: Sequence[Any]
) -> _Terms:
    times: list[Any] = [1]
    for ratio in ratios:
        times.append(times[-1] * ratio)
    by_kind = dict(zip(kinds, times, strict=True))
    # One save is under way at a time, so steps are durable as late as deltas and bases on average.
    late = costs["base"].persist_secs
    stalls = sum(costs[kind].stall_secs / by_kind[kind] for kind in kinds)
    if "delta" in kinds:
        late = costs["delta"].persist_secs + (late - costs["delta"].persist_secs) / ratios[-1]
        stalls = stalls - costs["delta"].stall_secs / by_kind["base"]
    replay, fixed = 0.0, costs["base"].restore_secs
    for kind, time, ratio in zip(kinds, times, ratios, strict=False):
        below = late if kind == "wal" else costs["base"].persist_secs
        replay = replay + costs[kind].restore_secs * below / time
        fixed = fixed + costs[kind].restore_secs * (ratio - 1) / 2
    shortest = 0.0
    for kind in kinds:
        shortest = np.maximum(shortest, costs[kind].persist_secs / by_kind[kind])
    return _Terms(
        times=times,
        stall_secs=stalls,
        replay_secs=replay,
        fixed_secs=fixed,
        late_secs=costs["wal"].persist_secs if "wal" in kinds else late,
        shortest_secs=shortest,
    )


def _shares(terms: _Terms, interval_secs: Any, run: _Run) -> tuple[Any, Any, Any]:
    """Returns shares of training time: stalls, repeated work, restores."""
    return (
        terms.stall_secs / interval_secs,
        (interval_secs / 2 + terms.late_secs) / run.mtbr_secs,
        (terms.fixed_secs + terms.replay_secs / interval_secs) / run.mtbr_secs,
    )


def _best(terms: _Terms, run: _Run) -> Any:
    """Returns the finest interval that loses least, in whole steps."""
    bound = np.maximum(terms.shortest_secs, terms.stall_secs / run.max_overhead)
    # A quotient of seconds is not exactly whole where the seconds are.
    fewest = np.maximum(1, np.ceil(bound / run.step_secs * (1 - 1e-12)))
    wanted = _optimum(terms, run) / run.step_secs
    below = np.maximum(fewest, np.floor(wanted))
    above = np.maximum(fewest, np.ceil(wanted))
    lost = [sum(_shares(terms, steps * run.step_secs, run)) for steps in (below, above)]
    return np.where(lost[0] <= lost[1], below, above)


def _optimum(terms: _Terms, run: _Run) -> Any:
    return np.sqrt(2 * run.mtbr_secs * terms.stall_secs + 2 * terms.replay_secs)


def _least(kinds: Sequence[RecoveryKind], costs: Mapping[RecoveryKind, Cost], run: _Run) -> Regime:
    """Returns the regime of some kinds that loses least."""
    ratios = np.meshgrid(*[_RATIOS] * (len(kinds) - 1), indexing="ij", sparse=True)
    terms = _terms(kinds, costs, ratios)
    lost = sum(_shares(terms, _best(terms, run) * run.step_secs, run))
    place = np.unravel_index(np.argmin(lost), np.shape(lost))
    chosen = [int(_RATIOS[index]) for index in place]
    terms = _terms(kinds, costs, chosen)
    steps = int(_best(terms, run))
    stall, rework, restore = _shares(terms, steps * run.step_secs, run)
    reasons = [_finest_reason(kinds, costs, terms, run)]
    reasons += [
        f"one for {ratio:,} {_NAMES[finer]}s: stalls and longer restores together cost least"
        for finer, ratio in zip(kinds, chosen, strict=False)
    ]
    advice = {
        kind: Advice(
            interval_secs=steps * time * run.step_secs, reason=reason, every_steps=steps * time
        )
        for kind, time, reason in zip(kinds, terms.times, reasons, strict=True)
    }
    return Regime(
        **advice,
        stall_share=float(stall),
        rework_share=float(rework),
        restore_share=float(restore),
    )


def _finest_reason(
    kinds: Sequence[RecoveryKind], costs: Mapping[RecoveryKind, Cost], terms: _Terms, run: _Run
) -> str:
    name, persist = _NAMES[kinds[0]], costs[kinds[0]].persist_secs
    return longest(
        {
            f"the optimum for stalls of {float(terms.stall_secs):.3g} s and a restart every "
            f"{run.mtbr_secs:g} s": float(_optimum(terms, run)),
            f"the budget of {run.max_overhead:.2%} for stalls of {float(terms.stall_secs):.3g} s": (
                float(terms.stall_secs) / run.max_overhead
            ),
            f"a {name} is durable only after {persist:g} s": persist,
            "coarser kinds are not durable sooner": float(terms.shortest_secs),
            f"a step takes {run.step_secs:g} s": run.step_secs,
        }
    ).reason


def _reasons(regimes: Sequence[Regime], wal: Cost | None, delta: Cost | None) -> list[str]:
    advised = regimes[0]
    lines = []
    for kind in advised.kinds:
        advice: Advice = getattr(advised, kind)
        lines.append(f"{kind}: every {advice.every_steps:,} steps: {advice.reason}")
    for kind, cost in (("wal", wal), ("delta", delta)):
        if cost is None or kind in advised.kinds:
            continue
        tried = next((regime for regime in regimes if kind in regime.kinds), None)
        if tried is None:
            lines.append(
                f"no {kind}: a record stalls training as much as a delta and is durable no sooner"
            )
        else:
            lines.append(
                f"no {kind}: {tried.overhead:.3%} of training time is lost with it, "
                f"{advised.overhead:.3%} without"
            )
    return lines


def _ratios() -> list[int]:
    found = [2]
    while found[-1] < _MOST:
        found.append(max(found[-1] + 1, round(found[-1] * 1.05)))
    return found


_RATIOS = np.array(_ratios(), dtype=np.float64)
