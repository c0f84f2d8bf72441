# SPDX-License-Identifier: Apache-2.0
"""Retention that never removes what a kept step needs, with Orbax's preservation policies."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from deltackpt import coordination
from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, RestoreError
from deltackpt.format import chain, naming
from deltackpt.format.manifest import SaveId
from deltackpt.lazy_import import ocp
from deltackpt.ledger import directory
from deltackpt.ledger.directory import Kept
from deltackpt.ledger.steps import Steps
from deltackpt.options import ManagerOptions
from deltackpt.policies.save_policies import PreservationPolicy

if TYPE_CHECKING:
    from deltackpt.session.run import Run

_logger = logging.getLogger(__name__)


class StepMetadata(TypedDict, total=False):
    """The part of Orbax's metadata of a step that policies use."""

    metrics: dict[str, float] | None
    custom_metadata: dict[str, object] | None
    commit_timestamp_nsecs: int | None  # since 1970


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A committed step as policies see it; its metadata is read when a policy accesses it."""

    step: int
    read: Callable[[], StepMetadata]

    @cached_property
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
    # Before the steps: what is committed meanwhile is still protected.
    protected = run.lineage.protected()
    steps = committed_steps(run.root)
    if isinstance(policy, LatestN):
        wanted = policy.should_preserve(steps, context=None)
    else:
        context = ocp.checkpoint_managers.PreservationContext()
        wanted = list(_nan_is_worst(policy).should_preserve(steps, context=context))
    stay = [one.step for one, stays in zip(steps, wanted, strict=True) if stays]
    surplus = {one.step for one in steps}.difference(stay)
    if surplus:
        run.ledger.remove_steps(_unneeded(surplus, stay, run.root, protected))
    # Last: a full disk gets room first.
    newest = max((checkpoint.step for checkpoint in steps), default=-1)
    note = Kept(policy=type(policy).__name__, newest=newest, steps=tuple(stay))
    directory.write_kept(run.local.path, note)


def _unneeded(
    surplus: Collection[int], stay: Iterable[int], root: Steps, protected: frozenset[SaveId]
) -> list[int]:
    """Returns the surplus steps that no step that stays needs."""
    infos = root.saves()
    if unreadable := [step for step, info in infos.items() if info is None]:
        process = coordination.process_index()
        _logger.warning(
            "process %d: steps %s cannot be read: retention keeps every step",
            process,
            unreadable,
            extra={"process_index": process},
        )
        return []
    known = {step: info for step, info in infos.items() if info is not None}
    keep = [known[step].save_id for step in stay if step in known]
    live = chain.live_set(keep, known.values(), protected, root.compacted())
    return sorted(one for one in surplus if one in known and known[one].save_id not in live)


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


def read_metadata(root: Steps, step: int) -> StepMetadata:
    """Returns what a step was saved with; raises Damaged if that cannot be parsed."""
    data, name = root.metadata(step), str(root.at(step) / naming.STEP_METADATA)
    try:
        found: StepMetadata = json.loads(data)
    except ValueError as error:
        raise Damaged(name, "JSON", f"{len(data)} bytes: {error}") from error
    if not isinstance(found, dict):
        raise Damaged(name, "a JSON object", type(found).__name__)
    return found


def _metadata(root: Steps, step: int) -> StepMetadata:
    """Returns the metadata of a step; empty if it cannot be read."""
    try:
        return read_metadata(root, step)
    except RestoreError:
        return {}
