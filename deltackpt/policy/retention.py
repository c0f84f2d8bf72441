# SPDX-License-Identifier: Apache-2.0
"""Which committed steps stay, as Orbax asks it: its own policies are accepted as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps stay; every policy of Orbax's ``checkpoint_managers`` is one.

    Asked before each commit. It must be pure: it takes history as arguments and looks at nothing
    else. Whatever it says, the chain of a step that stays, stays too.
    """

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Whether each checkpoint stays.

        Args:
          checkpoints: the committed ones, oldest first: with ``step``, ``time`` and ``metrics``.
          context: of Orbax.
        """
        ...
