# SPDX-License-Identifier: Apache-2.0
"""Retention that never removes what a kept step needs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import orbax.checkpoint as ocp

from deltackpt import processes
from deltackpt.format import chain
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.policy.retention import PreservationPolicy

_logger = logging.getLogger(__name__)

_policies = ocp.checkpoint_managers


@dataclasses.dataclass(frozen=True)
class KeepChain:
    """An Orbax ``PreservationPolicy`` that closes another one's answer over the chains.

    Orbax asks before the newest step is committed, so the saves in flight and their parents
    count as kept. Where a step's manifest cannot be read, everything is kept.

    Attributes:
      inner: the user's policy.
      protected: saves that must stay whatever the policy says; ``Lineage.protected``.
      saves: what each committed step is, None where it cannot be read; ``Root.saves``.
      compacted: saves for which a compacted base stands, so that what it replaced may go;
        ``Root.compacted``.
      deletes: whether this process deletes; on the others the answer only keeps Orbax's list of
        steps short, and costs nothing.
    """

    inner: PreservationPolicy
    protected: Callable[[], frozenset[SaveId]]
    saves: Callable[[], Mapping[int, SaveInfo | None]]
    compacted: Callable[[], Collection[SaveId]] = frozenset
    deletes: bool = True

    def should_preserve(
        self,
        checkpoints: Sequence[_policies.PolicyCheckpointInfo],
        *,
        context: _policies.PreservationContext,
    ) -> list[bool]:
        """Which checkpoints stay."""
        if not self.deletes:
            return [checkpoint is checkpoints[-1] for checkpoint in checkpoints]
        wanted = list(self.inner.should_preserve(checkpoints, context=context))
        if all(wanted):
            return wanted
        by_step = dict(self.saves())
        unreadable = [step for step, info in by_step.items() if info is None]
        if unreadable:
            process = processes.index()
            _logger.warning(
                "process %d: steps %s cannot be read: retention keeps every step",
                process,
                unreadable,
                extra={"process_index": process},
            )
            return [True] * len(wanted)
        infos = {step: info for step, info in by_step.items() if info is not None}
        keep = [
            infos[checkpoint.step].save_id
            for checkpoint, stays in zip(checkpoints, wanted, strict=True)
            if stays and checkpoint.step in infos
        ]
        live = chain.live_set(keep, infos.values(), self.protected(), self.compacted())
        return [
            stays or checkpoint.step not in infos or infos[checkpoint.step].save_id in live
            for checkpoint, stays in zip(checkpoints, wanted, strict=True)
        ]


def as_policy(
    retention: int | PreservationPolicy | None,
) -> PreservationPolicy:
    """The policy of ``ManagerOptions.retention``: a number keeps that many newest steps."""
    if retention is None or isinstance(retention, int):
        return _policies.LatestN(retention)
    return retention
