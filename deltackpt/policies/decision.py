# SPDX-License-Identifier: Apache-2.0
"""Which steps are saved: Orbax's save decision policies are accepted as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


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
