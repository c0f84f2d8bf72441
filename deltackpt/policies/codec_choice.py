# SPDX-License-Identifier: Apache-2.0
"""The choice of codecs for one field: for deltas, for bases, and an error budget."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt import codecs
from deltackpt.errors import OptionError
from deltackpt.format.manifest import Kind
from deltackpt.policies.bit_width import BitWidthPolicy, Choice, is_at_least_zero

WhenExceeded = Literal["widen", "refuse"]


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
    def of(cls, given: str | BitWidthPolicy | CodecChoice) -> CodecChoice:
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

    def planned(self, kind: Kind, *, restores: int) -> Choice:
        """Returns the codec that the next save tries first, before its error is known."""
        if kind == "base":
            return Choice(codec=self.base, reason=f"{self.base}: chosen for bases")
        if isinstance(self.delta, BitWidthPolicy):
            return self.delta.choose(restores)
        return Choice(codec=self.delta, reason=f"{self.delta}: chosen for deltas")
