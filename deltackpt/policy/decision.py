# SPDX-License-Identifier: Apache-2.0
"""Which steps are saved, as Orbax asks it: its own policies are accepted as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SaveDecisionPolicy(Protocol):
    """Decides which steps are saved; every policy of Orbax's ``checkpoint_managers`` is one."""

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """Whether a step is to be saved.

        Args:
          step: the step, with ``step``, ``time`` and ``metrics``.
          previous_steps: the committed ones and the one in flight, oldest first, ditto.
          context: of Orbax: whether a save is in progress, and whether a preemption is announced.
        """
        ...
