# SPDX-License-Identifier: Apache-2.0
"""Dense leaves and further items of committed steps, read by Orbax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.handlers import dense
from deltackpt.handlers.agreement import Processes
from deltackpt.handlers.orbax_private import barrier_secs
from deltackpt.restore.steps import Items


class OrbaxItems:
    """The ``ItemReader`` of a manager."""

    def __init__(
        self,
        manager: Callable[[], ocp.CheckpointManager],
        processes: Processes,
        processes_secs: float,
    ):
        """Reads nothing yet.

        Args:
          manager: Orbax's; asked for anew each time, since a failure replaces it.
          processes: those that read beside this one.
          processes_secs: how long to wait for them.
        """
        self._manager = manager
        self._processes = processes
        self._processes_secs = processes_secs

    def dense(self, step: int, abstract: dict[str, Any] | None) -> dict[str, Any]:
        """As ``ItemReader.dense``."""
        metadata = self._manager().item_metadata(step)[names.DENSE_ITEM]
        if abstract is not None:
            dense.check(abstract, metadata, step)
        args = dense.restore_args(abstract, metadata)
        restored = self.items(step, {names.DENSE_ITEM: args})
        return dense.restored(restored[names.DENSE_ITEM], abstract, step)

    def items(self, step: int, items: Items) -> Mapping[str, Any]:
        """As ``ItemReader.items``; Orbax has all processes meet at a barrier afterwards."""
        try:
            with barrier_secs(self._processes_secs):
                return self._manager().restore(step, args=ocp.args.Composite(**items))
        except jax.errors.JaxRuntimeError as error:
            if self._processes.count == 1:
                raise
            what = f"restoring {', '.join(items)} of step {step}"
            raise RestoreError(str(self._processes.named(what, error))) from error
