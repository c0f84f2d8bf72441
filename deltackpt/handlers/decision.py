# SPDX-License-Identifier: Apache-2.0
"""Decides whether a step is saved, with an Orbax policy or at a fixed interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp

from deltackpt.handlers import retention
from deltackpt.handlers.flight import InFlight
from deltackpt.handlers.retention import CommittedStep
from deltackpt.handlers.run import Run

_policies = ocp.checkpoint_managers


def should_save(
    run: Run,
    step: int,
    in_flight: InFlight | None,
    metrics: Mapping[str, Any] | None,
    preempted: Callable[[int], bool],
) -> bool:
    """Returns whether the options select a step; process 0 decides for all processes.

    Args:
      run: the manager's run.
      step: the training step.
      in_flight: the save in flight, if any.
      metrics: the known metrics of the step.
      preempted: whether the job will be preempted at a step.
    """
    policy = run.options.save_decision_policy
    if policy is None:
        return step % (run.options.save_interval_steps or 1) == 0

    def decide() -> bool:
        now = {"metrics": dict(metrics or {}), "commit_timestamp_nsecs": time.time_ns()}
        previous = retention.committed_steps(run.root)
        if in_flight is not None and in_flight.step not in [known.step for known in previous]:
            # It began earlier, and will be committed before the next one.
            previous.append(CommittedStep(in_flight.step, lambda: now))
        context = _policies.DecisionContext(
            is_saving_in_progress=in_flight is not None and not in_flight.future.done(),
            reached_preemption=preempted(step),
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
        )
        return bool(policy.should_save(CommittedStep(step, lambda: now), previous, context=context))

    return run.among.of_first(f"deciding on step {step}", decide)
