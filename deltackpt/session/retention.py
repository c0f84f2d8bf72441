# SPDX-License-Identifier: Apache-2.0
"""Retention that never removes what a kept step needs, with Orbax's preservation policies."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from deltackpt import coordination
from deltackpt.errors import RestoreError
from deltackpt.format import chain
from deltackpt.format.manifest import SaveId
from deltackpt.lazy_import import LazyModule
from deltackpt.ledger import directory
from deltackpt.ledger.directory import Kept
from deltackpt.ledger.steps import Steps
from deltackpt.options import ManagerOptions
from deltackpt.policies.save_policies import PreservationPolicy

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

    from deltackpt.session.run import Run
else:
    ocp = LazyModule("orbax.checkpoint")

_logger = logging.getLogger(__name__)


class StepMetadata(TypedDict, total=False):
    """The part of Orbax's metadata of a step that policies use."""

    metrics: dict[str, float] | None
    commit_timestamp_nsecs: int | None  # since 1970


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A committed step as policies see it; its metadata is read when a policy accesses it."""

    step: int
    read: Callable[[], StepMetadata]

    @functools.cached_property
    def _metadata(self) -> StepMetadata:
        return self.read()

    @property
    def metrics(self) -> dict[str, float] | None:
        """Returns the metrics passed to ``save()``, or None."""
        return dict(self._metadata.get("metrics") or {}) or None

    @property
    def time(self) -> datetime.datetime:
        """Returns when it was committed."""
        nanoseconds = self._metadata.get("commit_timestamp_nsecs") or 0
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)


def committed_steps(root: Steps) -> list[CommittedStep]:
    """Returns all committed steps of a directory, oldest first."""
    return [
        CommittedStep(step, functools.partial(_metadata, root, step))
        for step in sorted(root.steps())
    ]


@dataclasses.dataclass(frozen=True)
class LatestN:
    """Keeps the newest ``n`` steps, like Orbax's policy of this name, without importing Orbax."""

    n: int

    def should_preserve(self, checkpoints: Sequence[object], *, context: object) -> list[bool]:
        """See ``PreservationPolicy``."""
        return [position <= self.n for position in range(len(checkpoints), 0, -1)]


def enforce(policy: PreservationPolicy, run: Run) -> None:
    """Removes steps that neither a policy nor a kept step needs, and records the kept steps.

    If the manifest of a step cannot be read, nothing is removed. Saves that the lineage protects
    are kept regardless of the policy. Raises StorageError.
    """
    protected = run.lineage.protected()
    steps = committed_steps(run.root)
    if isinstance(policy, LatestN):
        wanted = policy.should_preserve(steps, context=None)
    else:
        context = ocp.checkpoint_managers.PreservationContext()
        wanted = list(_nan_is_worst(policy).should_preserve(steps, context=context))
    if not all(wanted):
        run.ledger.remove_steps(_surplus(steps, wanted, run.root, protected))
    # Last: a full disk gets room first.
    newest = max((checkpoint.step for checkpoint in steps), default=-1)
    stay = tuple(one.step for one, stays in zip(steps, wanted, strict=True) if stays)
    note = Kept(policy=type(policy).__name__, newest=newest, steps=stay)
    directory.write_kept(run.local.path, note)


def _surplus(
    steps: Sequence[CommittedStep],
    wanted: Sequence[bool],
    root: Steps,
    protected: frozenset[SaveId],
) -> list[int]:
    """Returns the steps that a policy does not keep, and that no kept step needs."""
    infos = root.saves()
    unreadable = [step for step, info in infos.items() if info is None]
    if unreadable:
        process = coordination.process_index()
        _logger.warning(
            "process %d: steps %s cannot be read: retention keeps every step",
            process,
            unreadable,
            extra={"process_index": process},
        )
        return []
    known = {step: info for step, info in infos.items() if info is not None}
    keep = [
        known[checkpoint.step].save_id
        for checkpoint, stays in zip(steps, wanted, strict=True)
        if stays and checkpoint.step in known
    ]
    live = chain.live_set(keep, known.values(), protected, root.compacted())
    return [
        checkpoint.step
        for checkpoint, stays in zip(steps, wanted, strict=True)
        if not stays and checkpoint.step in known and known[checkpoint.step].save_id not in live
    ]


def _nan_is_worst(policy: Any) -> PreservationPolicy:
    """Returns the policy with a ``BestN`` that ranks NaN below every number."""
    changed = copy.copy(policy)
    if isinstance(policy, ocp.checkpoint_managers.BestN):
        metric_of, worst = policy.get_metric_fn, policy.reverse

        # Orbax's may keep only a NaN. If all steps have NaN, the newest is kept.
        def ranked(metrics: object) -> tuple[bool, float]:
            value = metric_of(metrics)
            is_nan = bool(value != value)
            return is_nan is worst, 0.0 if is_nan else value

        changed.get_metric_fn = ranked
    elif isinstance(policy, ocp.checkpoint_managers.AnyPreservationPolicy):
        changed.policies = [_nan_is_worst(one) for one in policy.policies]
    else:
        return policy
    return changed


def policy_of(options: ManagerOptions) -> PreservationPolicy | None:
    """Returns the policy that decides which committed steps are kept; None if all are."""
    policy = options.preservation_policy
    if policy is None:
        return None if options.max_to_keep is None else LatestN(options.max_to_keep)
    return None if policy == ocp.checkpoint_managers.LatestN(None) else policy


def _metadata(root: Steps, step: int) -> StepMetadata:
    """Returns what a step was saved with; empty if that cannot be parsed."""
    try:
        found: StepMetadata = json.loads(root.metadata(step))
    except (RestoreError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
