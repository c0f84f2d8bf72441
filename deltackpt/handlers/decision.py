# SPDX-License-Identifier: Apache-2.0
"""Whether a step is saved, by the rules of Orbax's policies or every so many steps."""

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
    """Whether ``ManagerOptions.decision`` takes a step; of several processes what process 0 finds.

    Args:
      run: the manager's run.
      step: the training step.
      in_flight: the save that is not settled yet.
      metrics: those of the step, as far as they are known.
      preempted: whether the job will be preempted at a step.
    """
    policy = run.options.decision
    if policy is None:
        return True
    if isinstance(policy, int):
        return step % policy == 0

    def decide() -> bool:
        now = {"metrics": dict(metrics or {}), "commit_timestamp_nsecs": time.time_ns()}
        previous = retention.committed_steps(run.root)
        if in_flight is not None and in_flight.step not in [known.step for known in previous]:
            # It began before now, and will stand before the next is committed.
            previous.append(CommittedStep(in_flight.step, lambda: now))
        context = _policies.DecisionContext(
            is_saving_in_progress=in_flight is not None and not in_flight.future.done(),
            reached_preemption=preempted(step),
            multiprocessing_options=ocp.options.MultiprocessingOptions(),
        )
        return bool(policy.should_save(CommittedStep(step, lambda: now), previous, context=context))

    return run.among.of_first(f"deciding on step {step}", decide)
