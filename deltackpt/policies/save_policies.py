# SPDX-License-Identifier: Apache-2.0
"""Policies of a save: a base or a delta, which codec, and what Orbax's policies decide.

Sources: Eisenman et al., "Check-N-Run: a Checkpointing System for Training Deep Learning
Recommendation Models", NSDI 2022, sections 4.1 (one-shot, consecutive, intermittent) and 5.2.2 (bit
widths by the expected number of restores, and 8 bits once they exceed the expectation). Every
restore adds the error of one decoding to the training state, so a run that is restored more often
needs more precise rows.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from deltackpt import codecs
from deltackpt.errors import OptionError
from deltackpt.format.manifest import Kind


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides which steps are saved; Orbax's ``checkpoint_managers`` has such policies."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Returns whether to save a step.

        Args:
          step: the step, with ``step``, ``time`` and ``metrics``.
          previous_steps: the committed steps and the one in flight, oldest first, with the same
            fields.
          context: Orbax's: whether a save is in progress, and whether a preemption is announced.
        """
        ...


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps are kept; the policies in Orbax's ``checkpoint_managers`` implement it.

    It is called before each commit and must be pure: its arguments are its only input. The chain of
    a kept step is always kept too.
    """

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each checkpoint whether it is kept.

        Args:
          checkpoints: the committed ones, oldest first: with ``step``, ``time`` and ``metrics``.
          context: Orbax's context.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveHistory:
    """The input of a policy: the saves since the base, or since a restore.

    Attributes:
      base_bytes: bytes of the base.
      delta_bytes: bytes of each delta committed since, oldest first.
      chain_length: deltas that restoring the newest save reads.
      chain_bytes: bytes that restoring the newest save reads, its base included.
      delta_base_chain_length: deltas that a restore of the save below ``delta_bytes`` reads: 0
        for a base, more for a restored delta.
      delta_base_chain_bytes: bytes that a restore of that save reads.
    """

    base_bytes: int
    delta_bytes: tuple[int, ...]
    chain_length: int
    chain_bytes: int
    delta_base_chain_length: int = 0
    delta_base_chain_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about the next save, and its reason.

    ``parent`` is ``"base"`` for the base (or the restored step), ``"previous"`` for the newest
    save, and None if the save is a base.
    """

    kind: Kind
    parent: Literal["base", "previous"] | None
    reason: str


class BaseOrDelta(Protocol):
    """Decides whether the next save is a base or a delta. Must be pure: any thread may ask."""

    def decide(self, history: SaveHistory) -> Decision:
        """Returns the decision, given at least one committed base."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bounded:
    """Bounds that every policy keeps.

    Attributes:
      max_chain: most deltas that a restore may read.
      max_restore_ratio: most bytes that a restore may read, as a multiple of a base.
      max_delta_ratio: most bytes that a delta may write, as a multiple of a base. A delta of nearly
        all rows costs as much as a base and doubles the restore.
    """

    max_chain: int = 50
    max_restore_ratio: float = 3.0
    max_delta_ratio: float = 0.8

    def __post_init__(self) -> None:
        for name in ("max_chain", "max_restore_ratio"):
            if not (isinstance(found := getattr(self, name), numbers.Real) and float(found) >= 1):
                raise OptionError(f"{name}: expected a number of at least 1, found {found!r}")
        if not (isinstance(found := self.max_delta_ratio, numbers.Real) and float(found) > 0):
            raise OptionError(f"max_delta_ratio: expected a positive number, found {found!r}")

    def _bound(self, history: SaveHistory, length: int, nbytes: int) -> Decision | None:
        """Returns a base if one more delta on such a chain would exceed a bound."""
        if length + 1 > self.max_chain:
            return _base(f"the chain has {length} deltas, the bound is {self.max_chain}")
        last = history.delta_bytes[-1] if history.delta_bytes else 0
        if last > self.max_delta_ratio * history.base_bytes:
            return _base(
                f"the last delta wrote {last:,} bytes, the bound is {self.max_delta_ratio:g} of a "
                f"base of {history.base_bytes:,}"
            )
        expected = nbytes + last
        limit = self.max_restore_ratio * history.base_bytes
        if expected > limit:
            return _base(
                f"a restore would read about {expected:,} bytes, the bound is {limit:,.0f} "
                f"({self.max_restore_ratio:g} bases)"
            )
        return None


def too_large(policy: BaseOrDelta, delta_bytes: int, base_bytes: int) -> str | None:
    """Returns why a delta should be a base instead, or None.

    Args:
      policy: the policy that decided; if it has no ``max_delta_ratio``, a delta stays a delta.
      delta_bytes: expected bytes of the delta, now that its rows are known.
      base_bytes: expected bytes of a base.
    """
    bounds = policy.policy if isinstance(policy, LeftToCompaction) else policy
    if not isinstance(bounds, _Bounded) or delta_bytes <= bounds.max_delta_ratio * base_bytes:
        return None
    return (
        f"a delta would write about {delta_bytes:,} bytes, a base {base_bytes:,}; the bound is "
        f"{bounds.max_delta_ratio:g} of it"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Consecutive(_Bounded):
    """Each delta contains the rows touched since the previous save; writes the fewest bytes."""

    def decide(self, history: SaveHistory) -> Decision:
        """See ``BaseOrDelta``."""
        number = history.chain_length + 1
        return self._bound(history, history.chain_length, history.chain_bytes) or Decision(
            kind="delta",
            parent="previous",
            reason=f"delta: number {number} of at most {self.max_chain} in the chain",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneShot(_Bounded):
    """Each delta contains the rows touched since the base; restores read only two saves."""

    def decide(self, history: SaveHistory) -> Decision:
        """See ``BaseOrDelta``."""
        return self._bound(
            history, history.delta_base_chain_length, _delta_base_bytes(history)
        ) or _since_base("all rows touched since the base", history)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intermittent(_Bounded):
    """One-shot deltas until a new base is predicted to write less.

    With S_k the size of delta k as a fraction of a base, the next save is a base if 1 + S_1 + ... +
    S_i <= (i + 1) * S_i: the average cost of a save since the base, the base included, has fallen
    to the size of the newest delta, and the next delta will not be smaller.
    """

    def decide(self, history: SaveHistory) -> Decision:
        """See ``BaseOrDelta``."""
        bound = self._bound(history, history.delta_base_chain_length, _delta_base_bytes(history))
        if bound is not None:
            return bound
        sizes = [nbytes / max(1, history.base_bytes) for nbytes in history.delta_bytes]
        if sizes:
            spent, ahead = 1 + sum(sizes), (len(sizes) + 1) * sizes[-1]
            if spent <= ahead:
                return _base(f"1 + S_1 + ... + S_i = {spent:.3f} <= (i + 1) * S_i = {ahead:.3f}")
        return _since_base("a new base would not pay yet", history)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftToCompaction:
    """Leaves the bases of another policy to compaction, as long as compaction runs.

    Each base is replaced by a delta, until the saves since the last base exceed the policy's bounds
    (those of ``Consecutive`` if it has none) ``patience`` times. Compaction has then stopped, and
    the save is a base.

    Attributes:
      policy: the other policy.
      patience: multiple of the policy's bounds.
    """

    policy: BaseOrDelta
    patience: int = 4

    def decide(self, history: SaveHistory) -> Decision:
        """See ``BaseOrDelta``."""
        bounds = self.policy if isinstance(self.policy, _Bounded) else Consecutive()
        saves = max(len(history.delta_bytes), history.chain_length)
        most_saves = self.patience * bounds.max_chain
        most_bytes = self.patience * bounds.max_restore_ratio * history.base_bytes
        if saves >= most_saves or history.chain_bytes > most_bytes:
            return _base(
                f"nothing has been compacted for {saves} saves, a restore reads "
                f"{history.chain_bytes:,} bytes; the bounds are {most_saves} saves and "
                f"{most_bytes:,.0f} bytes"
            )
        decision = self.policy.decide(history)
        if decision.kind == "delta":
            return decision
        # The parent of the policy's first delta.
        fresh = SaveHistory(
            base_bytes=history.base_bytes,
            delta_bytes=(),
            chain_length=0,
            chain_bytes=history.base_bytes,
        )
        parent = self.policy.decide(fresh).parent
        if parent is None:
            return decision
        reason = decision.reason.removeprefix("base: ")
        return Decision(
            kind="delta", parent=parent, reason=f"delta: a base is left to compaction: {reason}"
        )


def _delta_base_bytes(history: SaveHistory) -> int:
    return history.delta_base_chain_bytes or history.base_bytes


def _base(reason: str) -> Decision:
    return Decision(kind="base", parent=None, reason=f"base: {reason}")


def _since_base(reason: str, history: SaveHistory) -> Decision:
    if history.delta_bytes:
        last = history.delta_bytes[-1] / max(1, history.base_bytes)
        reason += f" (the last delta was {last:.3f} of a base)"
    return Decision(kind="delta", parent="base", reason=f"delta: {reason}")


#: Most restores of a run to the codec that is precise enough, measured: docs/project/accuracy.md.
MEASURED = ((1.0, "adaptive3"), (3.0, "adaptive4"), (math.inf, "int8"))
#: The same by Check-N-Run, section 6.2.
CHECK_N_RUN = (
    (1.0, "adaptive2"),
    (3.0, "adaptive3"),
    (20.0, "adaptive4"),
    (math.inf, "int8"),
)


WhenExceeded = Literal["widen", "refuse"]


def is_at_least_zero(value: object) -> bool:
    """Returns whether a value is a finite number of at least 0."""
    return isinstance(value, numbers.Real) and math.isfinite(value) and float(value) >= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCodec:
    """A codec and why it was chosen, and the budget of its error; see ``CodecChoice``."""

    codec: str
    reason: str
    max_error: float | None = None
    when_exceeded: WhenExceeded = "widen"


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
        given = {"mean_secs_between_failures": mean_secs_between_failures, "run_secs": run_secs}
        for name, value in given.items():
            if not is_at_least_zero(value) or value == 0:
                raise OptionError(f"{name}: expected a positive finite number, found {value!r}")
        return cls(expected_restores=run_secs / mean_secs_between_failures, codecs=codecs)

    def choose(self, restores: int) -> PlannedCodec:
        """Returns the codec of the next delta, for the restores of the run so far."""
        expected, why = self.expected_restores, "expected"
        if restores > expected:
            expected = 2.0 * restores
            why = f"expected after {restores} restores; {self.expected_restores:g} were expected"
        codec = next(codec for limit, codec in self.codecs if expected <= limit)
        return PlannedCodec(codec=codec, reason=f"{codec}: {expected:g} restores {why}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """How rows are stored.

    Attributes:
      delta: codec of the rows of deltas: a name, or a policy that chooses at each save.
      base: codec of the rows of bases.
      max_error: maximum relative l2 error of the rows of any one table in a save: the norm of the
        decoding error over the norm of the rows. None for no budget. Lossless codecs have no error.
      when_exceeded: what happens to rows that exceed it: ``"widen"`` stores them with the next more
        precise codec; ``"refuse"`` fails the save with ``ErrorBudgetExceeded``.

    Examples:
      >>> CodecChoice(delta="adaptive4", max_error=0.1).planned("delta", restores=0).codec
      'adaptive4'
    """

    delta: str | BitWidthPolicy = "raw"
    base: str = "raw"
    max_error: float | None = None
    when_exceeded: WhenExceeded = "widen"

    def __post_init__(self) -> None:
        if not isinstance(self.delta, BitWidthPolicy):
            codecs.get(self.delta)
        codecs.get(self.base)
        if self.max_error is not None and not is_at_least_zero(self.max_error):
            raise OptionError(
                "CodecChoice.max_error: expected None or a finite number of at least 0, found "
                f"{self.max_error!r}"
            )
        if self.when_exceeded not in ("widen", "refuse"):
            raise OptionError(
                "CodecChoice.when_exceeded: expected 'widen' or 'refuse', found "
                f"{self.when_exceeded!r}"
            )

    @classmethod
    def from_option(cls, given: str | BitWidthPolicy | CodecChoice) -> CodecChoice:
        """Returns the choice for a codec's name, or a policy, for deltas.

        Raises:
          OptionError: ``given`` is neither, or the name is unknown.
        """
        if isinstance(given, CodecChoice):
            return given
        if isinstance(given, (str, BitWidthPolicy)):
            return cls(delta=given)
        raise OptionError(
            f"codec: expected a name, a BitWidthPolicy or a CodecChoice, found {given!r}"
        )

    def names(self) -> tuple[str, ...]:
        """Returns every codec that may be used."""
        if isinstance(self.delta, BitWidthPolicy):
            return (*(name for _, name in self.delta.codecs), self.base)
        return self.delta, self.base

    def planned(self, kind: Kind, *, restores: int) -> PlannedCodec:
        """Returns the codec that the next save tries first, before its error is known."""
        if kind == "base":
            found = PlannedCodec(codec=self.base, reason=f"{self.base}: chosen for bases")
        elif isinstance(self.delta, BitWidthPolicy):
            found = self.delta.choose(restores)
        else:
            found = PlannedCodec(codec=self.delta, reason=f"{self.delta}: chosen for deltas")
        return dataclasses.replace(
            found, max_error=self.max_error, when_exceeded=self.when_exceeded
        )
