# SPDX-License-Identifier: Apache-2.0
"""Advises from measured costs how often to save, and whether by WAL record, delta or base.

The kinds of saves are nested: a WAL record every T_wal, a delta every T_delta, a base every T_base,
each an integer multiple of the one before. A run that restarts every M seconds on average loses,
per second,

    sum of stall / T                                     of all kinds; a base replaces a delta
  + (T / 2 + persist) / M                                of the finest kind: repeated work
  + restore of the base / M
  + restore of a delta * deltas since the base / M
  + restore of a record * records since the last step / M

On average (n - 1) / 2 saves of a kind follow the last one of the next kind, where n is the ratio of
their intervals, plus persist / T while that one is not durable yet. For one kind this is Young's
model ("A first order approximation to the optimum checkpoint interval", CACM 1974), with higher
orders by Daly ("A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS
2006). Several kinds are multi-level checkpoints (Moody et al., SC 2010; Di et al., IPDPS 2014), but
each is assumed to survive the failures that end a run: the coarser ones shorten the restore.

For given ratios the loss is A / T + T / 2M + C of the finest interval T, with its minimum at sqrt(2
A M). The bounds (a step, persist, the budget) are lower bounds of T. T is therefore exact, and only
the ratios are searched: every integer up to 20, then in steps of 5 %. The result is within 0.1 % of
the smallest loss, and a higher cost never improves it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.events import AppendEvent, Event, RestoreEvent, SaveEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """An interval between saves, in seconds, and why.

    Attributes:
      interval_secs: the interval.
      reason: what determines it.
      every_steps: the interval in training steps; None if ``step_secs`` was not passed.
    """

    interval_secs: float
    reason: str
    every_steps: int | None = None


def advise_interval(
    *,
    stall_secs: float,
    persist_secs: float,
    mtbr_secs: float,
    max_overhead: float = 0.01,
) -> Advice:
    """Advises the time between saves that minimizes the time lost to saves and restarts.

    Args:
      stall_secs: measured training time that one save costs.
      persist_secs: measured time from ``save()`` until the step is durable; saves cannot be more
        frequent.
      mtbr_secs: mean time between restarts of the job.
      max_overhead: largest share of training time that saves may cost, as a fraction.

    Returns:
      The interval: Daly's estimate, or more if the overhead budget or the speed of the store
      requires it.

    Raises:
      OptionError: an argument is not a positive finite number, or the budget is not below 1.
    """
    positive(stall_secs=stall_secs, persist_secs=persist_secs, mtbr_secs=mtbr_secs)
    fraction(max_overhead=max_overhead)
    return longest(
        {
            f"Daly's optimum for a stall of {stall_secs:g} s and a restart every {mtbr_secs:g} s": (
                _daly(stall_secs, mtbr_secs)
            ),
            f"the budget of {max_overhead:.2%} for a stall of {stall_secs:g} s": (
                stall_secs / max_overhead
            ),
            f"a save is durable only after {persist_secs:g} s": persist_secs,
        }
    )


def longest(candidates: Mapping[str, float]) -> Advice:
    """Returns the longest interval of reason to seconds: an optimum and its lower bounds."""
    reason = max(candidates, key=lambda name: candidates[name])
    return Advice(interval_secs=candidates[reason], reason=reason)


def positive(**arguments: float) -> None:
    """Raises ``OptionError`` for named arguments that are not positive finite numbers."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value > 0):
            raise OptionError(f"{name}: expected a positive finite number, found {value}")


def fraction(**arguments: float) -> None:
    """Raises ``OptionError`` for named arguments that are not between 0 and 1, exclusive."""
    positive(**arguments)
    for name, value in arguments.items():
        if value >= 1:
            raise OptionError(f"{name}: expected a fraction below 1, found {value}")


def _daly(stall_secs: float, mtbr_secs: float) -> float:
    """Returns Daly's higher-order estimate (his equation 37)."""
    if stall_secs >= 2 * mtbr_secs:
        return mtbr_secs
    ratio = stall_secs / (2 * mtbr_secs)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * stall_secs * mtbr_secs) * series - stall_secs


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


class _Run(NamedTuple):
    mtbr_secs: float
    step_secs: float
    max_overhead: float


#: One figure, or an array of one figure for each ratio.
_Figures = float | np.ndarray


def _dominated(wal: Cost, delta: Cost | None) -> bool:
    """Returns whether WAL records stall training as much as deltas and are durable no sooner."""
    return (
        delta is not None
        and wal.stall_secs >= delta.stall_secs
        and wal.persist_secs >= delta.persist_secs
    )


class _Loss:
    """The loss of some kinds at given ratios, as a function of the finest interval T.

    Figures are arrays over the ratios. ``times`` are in T. A restore takes ``_fixed_secs``, and
    ``_replay_secs`` / T. The newest save of the finest kind is durable after ``_late_secs``.
    """

    def __init__(
        self,
        kinds: Sequence[RecoveryKind],
        costs: Mapping[RecoveryKind, Cost],
        ratios: Sequence[_Figures],
        run: _Run,
    ):
        self._run = run
        self.times: list[_Figures] = [1]
        for ratio in ratios:
            self.times.append(self.times[-1] * ratio)
        by_kind = dict(zip(kinds, self.times, strict=True))
        # One save is under way at a time, so steps are durable as late as deltas and bases on
        # average.
        late = costs["base"].persist_secs
        stalls: _Figures = sum(costs[kind].stall_secs / by_kind[kind] for kind in kinds)
        if "delta" in kinds:
            late = costs["delta"].persist_secs + (late - costs["delta"].persist_secs) / ratios[-1]
            stalls = stalls - costs["delta"].stall_secs / by_kind["base"]
        self.stall_secs = stalls
        self._late_secs = costs["wal"].persist_secs if "wal" in kinds else late
        self._replay_secs: _Figures = 0.0
        self._fixed_secs: _Figures = costs["base"].restore_secs
        for kind, time, ratio in zip(kinds, self.times, ratios, strict=False):
            below = late if kind == "wal" else costs["base"].persist_secs
            self._replay_secs = self._replay_secs + costs[kind].restore_secs * below / time
            self._fixed_secs = self._fixed_secs + costs[kind].restore_secs * (ratio - 1) / 2
        #: Bounds T by persist times.
        self.shortest_secs: _Figures = 0.0
        for kind in kinds:
            persist = costs[kind].persist_secs / by_kind[kind]
            self.shortest_secs = np.maximum(self.shortest_secs, persist)

    def shares(self, steps: _Figures) -> tuple[_Figures, _Figures, _Figures]:
        """Shares of stalls, repeated work and restores, if T is so many steps."""
        interval_secs, mtbr_secs = steps * self._run.step_secs, self._run.mtbr_secs
        return (
            self.stall_secs / interval_secs,
            (interval_secs / 2 + self._late_secs) / mtbr_secs,
            (self._fixed_secs + self._replay_secs / interval_secs) / mtbr_secs,
        )

    def optimum_secs(self) -> _Figures:
        return np.sqrt(2 * self._run.mtbr_secs * self.stall_secs + 2 * self._replay_secs)

    def best_steps(self) -> _Figures:
        """The T that loses least, in whole steps."""
        run = self._run
        bound = np.maximum(self.shortest_secs, self.stall_secs / run.max_overhead)
        # A quotient of seconds is not exactly whole where the seconds are.
        fewest = np.maximum(1, np.ceil(bound / run.step_secs * (1 - 1e-12)))
        wanted = self.optimum_secs() / run.step_secs
        below, above = (np.maximum(fewest, near(wanted)) for near in (np.floor, np.ceil))
        return np.where(sum(self.shares(below)) <= sum(self.shares(above)), below, above)


def _least(kinds: Sequence[RecoveryKind], costs: Mapping[RecoveryKind, Cost], run: _Run) -> Regime:
    """Returns the regime of some kinds that loses least."""
    ratios = np.meshgrid(*[_RATIOS] * (len(kinds) - 1), indexing="ij", sparse=True)
    loss = _Loss(kinds, costs, ratios, run)
    lost = sum(loss.shares(loss.best_steps()))
    place = np.unravel_index(np.argmin(lost), np.shape(lost))
    chosen = [int(_RATIOS[index]) for index in place]
    loss = _Loss(kinds, costs, chosen, run)
    steps = int(loss.best_steps())
    stall, rework, restore = map(float, loss.shares(steps))
    name, persist, stalls = _NAMES[kinds[0]], costs[kinds[0]].persist_secs, float(loss.stall_secs)
    finest = longest(
        {
            f"the optimum for stalls of {stalls:.3g} s and a restart every {run.mtbr_secs:g} s": (
                float(loss.optimum_secs())
            ),
            f"the budget of {run.max_overhead:.2%} for stalls of {stalls:.3g} s": (
                stalls / run.max_overhead
            ),
            f"a {name} is durable only after {persist:g} s": persist,
            "coarser kinds are not durable sooner": float(loss.shortest_secs),
            f"a step takes {run.step_secs:g} s": run.step_secs,
        }
    )
    reasons = [finest.reason] + [
        f"one for {ratio:,} {_NAMES[finer]}s: stalls and longer restores together cost least"
        for finer, ratio in zip(kinds, chosen, strict=False)
    ]
    advice = {
        kind: Advice(
            interval_secs=steps * time * run.step_secs, reason=reason, every_steps=steps * time
        )
        for kind, time, reason in zip(kinds, map(int, loss.times), reasons, strict=True)
    }
    return Regime(**advice, stall_share=stall, rework_share=rework, restore_share=restore)


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


#: Figures kept for each kind: enough for a steady median, few enough to follow changes.
_KEPT = 64


class _Measurement(NamedTuple):
    stall_secs: float
    persist_secs: float
    nbytes: int


class MeasuredCosts:
    """An event handler that measures the costs that ``advise_regime`` needs.

    - ``stall_secs`` is how long the call blocked. Events do not contain the training time lost to
      background work: if that matters, compare steps with and without saves, and add it.
    - ``persist_secs`` ends when the save is committed or the WAL record is durable. A save that is
      uploaded to a bucket is then committed in the staging directory.
    - ``restore_secs`` is estimated from bytes: those of a median save of a kind, times the time
      that restores took per byte. Before the first restore, reading a save is assumed to take as
      long as making it durable. Dense leaves of WAL records are not counted: a restore reads those
      of one record.

    All figures are from this process.

    Examples:
      >>> costs = MeasuredCosts()  # CheckpointManager(root, event_handlers=(costs,))
      >>> costs.cost("base") is None
      True
    """

    def __init__(self) -> None:
        self._measured: dict[RecoveryKind, collections.deque[_Measurement]] = {
            kind: collections.deque(maxlen=_KEPT) for kind in ("wal", "delta", "base")
        }
        self._secs_per_byte: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def receive(self, event: Event) -> None:
        """See ``EventHandler``."""
        if isinstance(event, SaveEvent):
            measured = _Measurement(event.blocked_secs, event.total_secs, event.bytes_written)
            self._measured[event.kind].append(measured)
        elif isinstance(event, RestoreEvent) and event.bytes_read:
            self._secs_per_byte.append(event.total_secs / event.bytes_read)
        elif isinstance(event, AppendEvent) and event.kind == "full":
            rows_bytes = event.bytes_written - event.dense_bytes
            self._measured["wal"].append(
                _Measurement(event.blocked_secs, event.durable_secs, rows_bytes)
            )

    def cost(self, kind: RecoveryKind) -> Cost | None:
        """Returns the median costs of a kind (``wal``: full records); None before its first."""
        measured = self._measured[kind]
        if not measured:
            return None
        stall, persist, nbytes = (_median(column) for column in zip(*measured, strict=True))
        restore = nbytes * _median(self._secs_per_byte) if self._secs_per_byte else persist
        return Cost(stall_secs=stall, persist_secs=persist, restore_secs=restore)

    def advise(
        self, *, mtbr_secs: float, step_secs: float, max_overhead: float = 0.01
    ) -> RegimeAdvice:
        """Returns the advice for the measured costs; see ``advise_regime``.

        Raises:
          OptionError: no base was measured yet, or an argument is invalid.
        """
        base = self.cost("base")
        if base is None:
            raise OptionError(
                "MeasuredCosts.advise: expected the event of a base, found none; ask again after "
                "save(step, state, force_base=True), or call advise_regime with figures of your own"
            )
        return advise_regime(
            base=base,
            delta=self.cost("delta"),
            wal=self.cost("wal"),
            mtbr_secs=mtbr_secs,
            step_secs=step_secs,
            max_overhead=max_overhead,
        )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
