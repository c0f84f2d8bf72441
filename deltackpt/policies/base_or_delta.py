# SPDX-License-Identifier: Apache-2.0
"""Policies that decide whether the next save is a base or a delta.

Source: Eisenman et al., "Check-N-Run: a Checkpointing System for Training Deep Learning
Recommendation Models", NSDI 2022, section 4.1 (one-shot, consecutive, intermittent).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from deltackpt.errors import OptionError
from deltackpt.format.manifest import Kind, RollingShare


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The input of a policy: the saves since the base, or since a restore.

    Attributes:
      base_bytes: bytes of the base.
      delta_bytes: bytes of each delta committed since, oldest first.
      chain_length: deltas that restoring the newest save reads.
      chain_bytes: bytes that restoring the newest save reads, its base included.
      anchor_chain_length: deltas that a restore of the save below ``delta_bytes`` reads: 0 for a
        base, more for a restored delta.
      anchor_chain_bytes: bytes that a restore of that save reads.
    """

    base_bytes: int
    delta_bytes: tuple[int, ...]
    chain_length: int
    chain_bytes: int
    anchor_chain_length: int = 0
    anchor_chain_bytes: int = 0


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
    """Decides whether the next save is a base or a delta. Called once per save; must be pure."""

    def decide(self, history: History) -> Decision:
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
        if self.max_chain < 1:
            raise OptionError(f"max_chain: expected at least 1, found {self.max_chain}")
        if not self.max_restore_ratio >= 1:
            raise OptionError(
                f"max_restore_ratio: expected at least 1, found {self.max_restore_ratio}"
            )

        if not self.max_delta_ratio > 0:
            raise OptionError(
                f"max_delta_ratio: expected a positive number, found {self.max_delta_ratio}"
            )

    def _bound(self, history: History, length: int, nbytes: int) -> Decision | None:
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

    def decide(self, history: History) -> Decision:
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

    def decide(self, history: History) -> Decision:
        """See ``BaseOrDelta``."""
        return self._bound(
            history, history.anchor_chain_length, _anchor_bytes(history)
        ) or _since_base("all rows touched since the base", history)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intermittent(_Bounded):
    """One-shot deltas until a new base is predicted to write less.

    With S_k the size of delta k as a fraction of a base, the next save is a base if 1 + S_1 + ... +
    S_i <= (i + 1) * S_i: the average cost of a save since the base, the base included, has fallen
    to the size of the newest delta, and the next delta will not be smaller.
    """

    def decide(self, history: History) -> Decision:
        """See ``BaseOrDelta``."""
        bound = self._bound(history, history.anchor_chain_length, _anchor_bytes(history))
        if bound is not None:
            return bound
        sizes = [nbytes / max(1, history.base_bytes) for nbytes in history.delta_bytes]
        if sizes:
            spent, ahead = 1 + sum(sizes), (len(sizes) + 1) * sizes[-1]
            if spent <= ahead:
                return _base(f"1 + S_1 + ... + S_i = {spent:.3f} <= (i + 1) * S_i = {ahead:.3f}")
        return _since_base("a new base would not pay yet", history)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rolling:
    """A base spread over deltas: each delta also contains a share of all rows.

    Each delta contains the rows touched since the previous save, and one ``window``-th of all rows,
    encoded with the codecs of bases. The newest ``window`` saves therefore contain every row, and
    restores read only these. Only the first save of a run is a base.

    Attributes:
      window: number of saves in which every row is written; at least 2.
    """

    window: int = 16

    def __post_init__(self) -> None:
        if self.window < 2:
            raise OptionError(f"Rolling.window: expected at least 2 saves, found {self.window}")

    def decide(self, history: History) -> Decision:
        """See ``BaseOrDelta``."""
        del history
        reason = f"delta: with a share of a base that rolls over {self.window} saves"
        return Decision(kind="delta", parent="previous", reason=reason)

    def share_after(self, parent: RollingShare | None) -> RollingShare:
        """Returns the share of all rows that the next save contains.

        Args:
          parent: the share of its parent; None if the parent has none.
        """
        if parent is None or parent.window != self.window:
            return RollingShare(window=self.window, number=0, filled=1)
        return RollingShare(
            window=self.window,
            number=(parent.number + 1) % self.window,
            filled=min(parent.filled + 1, self.window),
        )


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

    def decide(self, history: History) -> Decision:
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
        fresh = History(
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


def _anchor_bytes(history: History) -> int:
    return history.anchor_chain_bytes or history.base_bytes


def _base(reason: str) -> Decision:
    return Decision(kind="base", parent=None, reason=f"base: {reason}")


def _since_base(reason: str, history: History) -> Decision:
    if history.delta_bytes:
        last = history.delta_bytes[-1] / max(1, history.base_bytes)
        reason += f" (the last delta was {last:.3f} of a base)"
    return Decision(kind="delta", parent="base", reason=f"delta: {reason}")
