# SPDX-License-Identifier: Apache-2.0
"""Retention that never removes what a kept step needs, by the rules of Orbax's policies."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from deltackpt import processes
from deltackpt.errors import RestoreError
from deltackpt.format import chain
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.held import Held
from deltackpt.ledger.kept import Kept
from deltackpt.ledger.steps import Steps
from deltackpt.policy.retention import PreservationPolicy

_logger = logging.getLogger(__name__)

_policies = ocp.checkpoint_managers


@dataclasses.dataclass(frozen=True)
class CommittedStep:
    """A committed step as policies see it; its metadata is read where one looks at that.

    Attributes:
      step: its number.
      read: gives what Orbax's metadata of the step says.
    """

    step: int
    read: Callable[[], Mapping[str, Any]]

    @functools.cached_property
    def _metadata(self) -> Mapping[str, Any]:
        return self.read()

    @property
    def metrics(self) -> dict[str, Any] | None:
        """What ``save()`` was given as metrics; None where that was nothing."""
        return dict(self._metadata.get("metrics") or {}) or None

    @property
    def time(self) -> datetime.datetime:
        """When it was committed."""
        nanoseconds = self._metadata.get("commit_timestamp_nsecs") or 0
        return datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)


def committed_steps(root: Steps) -> list[CommittedStep]:
    """All committed steps of a directory, oldest first."""
    return [
        CommittedStep(step, functools.partial(_metadata, root, step))
        for step in sorted(root.steps())
    ]


def enforce(policy: PreservationPolicy, root: Held, protected: frozenset[SaveId]) -> None:
    """Removes what a policy does not keep and no kept step needs, and notes what it keeps.

    Where the manifest of a step cannot be read, everything stays.

    Args:
      policy: the user's; ``as_policy``.
      root: of the steps.
      protected: saves that stay whatever the policy says; ``Lineage.protected``.

    Raises:
      StorageError: the store refused.
    """
    if type(policy) is _policies.LatestN and policy.n is None:
        root.note_kept(None)
        return
    steps = committed_steps(root)
    context = _policies.PreservationContext()
    wanted = list(policy.should_preserve(steps, context=context))
    if not all(wanted):
        root.remove_steps(_surplus(steps, wanted, root, protected))
    # Last: a full disk gets room first.
    newest = max((checkpoint.step for checkpoint in steps), default=-1)
    stay = tuple(one.step for one, stays in zip(steps, wanted, strict=True) if stays)
    root.note_kept(Kept(policy=type(policy).__name__, newest=newest, steps=stay))


def _surplus(
    steps: Sequence[CommittedStep],
    wanted: Sequence[bool],
    root: Steps,
    protected: frozenset[SaveId],
) -> list[int]:
    """The steps that a policy does not keep, and that no kept step needs."""
    infos = root.saves()
    unreadable = [step for step, info in infos.items() if info is None]
    if unreadable:
        process = processes.index()
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


def as_policy(retention: int | PreservationPolicy | None) -> PreservationPolicy:
    """The policy of ``ManagerOptions.retention``: a number keeps that many newest steps."""
    if retention is None or isinstance(retention, int):
        return _policies.LatestN(retention)
    return retention


def _metadata(root: Steps, step: int) -> Mapping[str, Any]:
    """What a step was saved with; nothing where that cannot be understood.

    Raises:
      StorageError: the store refused: that says nothing about the step.
    """
    try:
        found = json.loads(root.metadata(step))
    except (RestoreError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
