# SPDX-License-Identifier: Apache-2.0
"""Which committed steps are kept: Orbax's preservation policies are accepted as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


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
