# SPDX-License-Identifier: Apache-2.0
"""How often to save.

Sources: Young, "A first order approximation to the optimum checkpoint interval", CACM 1974;
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 2006.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from deltackpt.errors import OptionError


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
    """Returns the advice that satisfies all candidates: an optimum, and its lower bounds.

    Args:
      candidates: reason to interval in seconds.
    """
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
