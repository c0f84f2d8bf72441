# SPDX-License-Identifier: Apache-2.0
"""Chooses the codec of deltas by how often a run will be restored.

Every restore adds the error of one decoding to the training state, so a run that is restored more
often needs more precise rows.

Source: Eisenman et al., "Check-N-Run", NSDI 2022, section 5.2.2 (bit widths by the expected number
of restores, and 8 bits once they exceed the expectation).
"""

from __future__ import annotations

import dataclasses
import math
import numbers

from deltackpt import codecs
from deltackpt.errors import OptionError

#: Most restores of a run to the codec that is precise enough, measured: docs/project/accuracy.md.
MEASURED = ((1.0, "adaptive3"), (3.0, "adaptive4"), (math.inf, "int8"))
#: The same by Check-N-Run, section 6.2.
CHECK_N_RUN = (
    (1.0, "adaptive2"),
    (3.0, "adaptive3"),
    (20.0, "adaptive4"),
    (math.inf, "int8"),
)


def is_at_least_zero(value: object) -> bool:
    """Returns whether a value is a finite number of at least 0."""
    return isinstance(value, numbers.Real) and math.isfinite(value) and float(value) >= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A codec and why it was chosen."""

    codec: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BitWidthPolicy:
    """Chooses the bits per code from the expected number of restores of a run.

    If a run has been restored more often than expected, the policy expects twice the count.

    Attributes:
      expected_restores: expected number of restores over the whole run.
      codecs: pairs (maximum restores, codec) in ascending order; the last one has no maximum.

    Examples:
      >>> policy = BitWidthPolicy.from_failures(
      ...     mean_secs_between_failures=86_400, run_secs=3 * 86_400
      ... )
      >>> policy.choose(0).codec, policy.choose(4).codec
      ('adaptive4', 'int8')
    """

    expected_restores: float
    codecs: tuple[tuple[float, str], ...] = MEASURED

    def __post_init__(self) -> None:
        if not is_at_least_zero(self.expected_restores):
            raise OptionError(
                "BitWidthPolicy.expected_restores: expected a finite number of at least 0, found "
                f"{self.expected_restores!r}"
            )
        try:
            limits = [float(limit) for limit, _ in self.codecs]
        except (TypeError, ValueError) as error:
            raise OptionError(
                "BitWidthPolicy.codecs: expected pairs of (most restores, codec), found "
                f"{self.codecs!r}"
            ) from error
        ascending = all(low < high for low, high in zip(limits, limits[1:]))
        if not limits or limits[-1] != math.inf or not ascending:
            raise OptionError(
                "BitWidthPolicy.codecs: expected ascending limits that end with math.inf, found "
                f"{limits}"
            )
        for _, name in self.codecs:
            codecs.get(name)
        object.__setattr__(self, "codecs", tuple((limit, name) for limit, name in self.codecs))

    @classmethod
    def from_failures(
        cls,
        *,
        mean_secs_between_failures: float,
        run_secs: float,
        codecs: tuple[tuple[float, str], ...] = MEASURED,
    ) -> BitWidthPolicy:
        """Expects a restore for every failure of a run of ``run_secs``.

        Args:
          mean_secs_between_failures: mean time between failures of the whole job. If each of n
            machines fails once in m seconds, this is m / n.
          run_secs: planned duration of the training, in seconds.
          codecs: as for the class.

        Raises:
          OptionError: an argument is not a positive finite number.
        """
        for name, value in (
            ("mean_secs_between_failures", mean_secs_between_failures),
            ("run_secs", run_secs),
        ):
            if not is_at_least_zero(value) or value == 0:
                raise OptionError(f"{name}: expected a positive finite number, found {value!r}")
        return cls(expected_restores=run_secs / mean_secs_between_failures, codecs=codecs)

    def choose(self, restores: int) -> Choice:
        """Returns the codec of the next delta.

        Args:
          restores: number of times that the run has been restored so far.
        """
        expected, why = self.expected_restores, "expected"
        if restores > expected:
            expected = 2.0 * restores
            why = f"expected after {restores} restores; {self.expected_restores:g} were expected"
        codec = next(codec for limit, codec in self.codecs if expected <= limit)
        return Choice(codec=codec, reason=f"{codec}: {expected:g} restores {why}")
