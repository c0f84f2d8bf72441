# SPDX-License-Identifier: Apache-2.0
"""Preservation policies for T5X's ``keep``, ``force_keep_period``, ``metric_name_to_monitor``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import orbax.checkpoint as ocp

from deltackpt.integrations.t5x.modules import checkpoints
from deltackpt.policies.retention import PreservationPolicy

_policies = ocp.checkpoint_managers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestByMetric:
    """An Orbax ``PreservationPolicy`` that keeps the steps with the best values of a metric.

    The metric is a TensorBoard summary. T5X evaluates after it saves, so the policy reads the
    values each time it runs. The newest step is always kept, because training resumes from it.

    Attributes:
      model_dir: T5X's model directory.
      metric: ``<folder>/<tag>`` of the summary below it.
      mode: whether the largest or the smallest value is best.
      keep: how many steps to keep.
      keep_without: whether to keep steps without a value as well.
    """

    model_dir: Path
    metric: str
    mode: Literal["max", "min"]
    keep: int
    keep_without: bool

    def should_preserve(
        self,
        checkpoints: Sequence[_policies.PolicyCheckpointInfo],
        *,
        context: _policies.PreservationContext,
    ) -> list[bool]:
        """Returns which checkpoints to keep."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        values = _metric_values(self.model_dir, self.metric, steps)
        ranked = sorted(values, key=values.__getitem__, reverse=self.mode == "max")
        best = {*ranked[: self.keep], *steps[-1:]}
        return [step in best or (self.keep_without and step not in values) for step in steps]


def _metric_values(model_dir: Path, metric: str, steps: Sequence[int]) -> dict[int, float]:
    """Values of a summary by step; NaN is ignored."""
    found = checkpoints.populate_metrics_for_steps(os.fspath(model_dir), metric, steps)
    return {step: float(value) for step, value in found.items() if not np.isnan(value)}


def policy_of(
    model_dir: Path,
    keep: int | None,
    force_keep_period: int | None,
    metric: str | None,
    mode: Literal["max", "min"],
    keep_without: bool,
) -> PreservationPolicy | None:
    """Returns the preservation policy for T5X's arguments to ``DeltaCheckpointManager``.

    None keeps all steps.
    """
    if keep is None:
        return None
    policy = _policies.LatestN(keep)
    if metric is not None:
        policy = BestByMetric(
            model_dir=model_dir, metric=metric, mode=mode, keep=keep, keep_without=keep_without
        )
    if force_keep_period is None:
        return policy
    return _policies.AnyPreservationPolicy([policy, _policies.EveryNSteps(force_keep_period)])
