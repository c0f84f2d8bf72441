# SPDX-License-Identifier: Apache-2.0
"""Metadata of committed steps without restoring them, and deletion of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from deltackpt.errors import Damaged, OptionError, RestoreError, StepNotFound
from deltackpt.format import chain
from deltackpt.format.manifest import SaveId
from deltackpt.format.naming import PyTree
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.lazy_import import ocp
from deltackpt.policies.save_policies import PreservationPolicy
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import WalReader, coverings
from deltackpt.restore import placing
from deltackpt.session import retention
from deltackpt.session.run import Run
from deltackpt.state import tables
from deltackpt.storage.store import StorePath

Metrics = Mapping[str, float]
#: A metric's name, or what makes a number of all metrics of a step.
Metric = str | Callable[[Metrics], float]
Mode = Literal["max", "min"]


class Catalog:
    """The committed steps of a manager's directory."""

    def __init__(self, run: Run):
        self._run = run
        self._items = OrbaxItems(run.root, {})

    def metadata(self, step: int) -> retention.StepMetadata:
        """Returns Orbax's metadata of a step: ``metrics``, ``custom_metadata``, and timestamps."""
        self._check(step)
        return retention.read_metadata(self._run.root, step)

    def best(self, metric: Metric | None, mode: Mode) -> int | None:
        """Returns the step with the best metric; see ``CheckpointManager.best_step``."""
        if mode not in ("max", "min"):
            raise OptionError(f"best_step, mode: expected 'max' or 'min', found {mode!r}")
        if metric is None:
            metric, mode = self._of_retention()
        of = metric if callable(metric) else lambda found: found[metric]
        ranked: list[tuple[float, int]] = []
        for known in retention.committed_steps(self._run.root):
            metrics = known.metrics
            if metrics is None or (isinstance(metric, str) and metric not in metrics):
                continue
            found = of(metrics)
            try:
                value = float(found)
            except (OverflowError, TypeError, ValueError) as error:
                raise OptionError(
                    f"best_step: expected a number as the metric of step {known.step}, found "
                    f"{found!r}; name a metric that is a number at all steps"
                ) from error
            if value == value:  # NaN is never the best.
                ranked.append((value if mode == "max" else -value, known.step))
        return max(ranked)[1] if ranked else None

    def _of_retention(self) -> tuple[Metric, Mode]:
        policy = _best_n(retention.policy_of(self._run.options))
        if policy is None:
            raise OptionError(
                "best_step: expected a metric, or a BestN ManagerOptions.preservation_policy, "
                "found neither; pass e.g. best_step('loss', mode='min')"
            )
        return policy.get_metric_fn, "min" if policy.reverse else "max"

    def abstract_state(self, step: int) -> PyTree:
        """Returns shapes and dtypes of a step's state; see ``CheckpointManager.item_metadata``."""
        run = self._run
        save = stored_saves.read_save(self._check(step), run.item)
        abstract = placing.abstract_of(save).tables or {}
        dense = self._items.abstract(step) if save.layout.dense else {}
        return tables.join(None, save.layout, abstract, dense, None)

    def delete(self, step: int) -> None:
        """Deletes one step, on process 0; see ``CheckpointManager.delete``."""
        run, what = self._run, f"deleting step {step}"

        def attempt() -> tuple[str | None, tuple[str, int, int] | str, bool]:
            try:
                return None, *self._delete(step, run.lineage.protected())
            except (OptionError, StepNotFound) as error:
                return type(error).__name__, str(error), False

        refusal, found, is_needed = run.coordinator.from_process_0(what, attempt, fatal=True)
        if isinstance(found, str):
            # All processes raise the same error, so that all can catch it and continue.
            raise OptionError(found) if refusal == OptionError.__name__ else StepNotFound(found)
        run.newest = run.coordinator.from_process_0("the newest step", run.root.newest_step)
        if run.restored in (None, step):
            run.deleted = step
        run.wal.deleted(SaveId(*found), is_needed=is_needed)

    def _delete(self, step: int, protected: frozenset[SaveId]) -> tuple[tuple[str, int, int], bool]:
        """Deletes a step; returns its save id, and whether only it covered trimmed WAL records."""
        root = self._run.root
        # Retention only leaves the steps of a successor alone. No request: an outage may last.
        self._run.check_lease()
        self._check(step)
        infos = root.saves()
        info = infos[step]
        if info is None:
            raise Damaged(str(root.at(step)), "a readable manifest", "none")
        others = {number: other for number, other in infos.items() if number != step}
        unreadable = sorted(number for number, other in others.items() if other is None)
        if unreadable:
            raise OptionError(
                f"step {step}: expected readable manifests of all other steps, found that those of "
                f"{unreadable} cannot be read; check with `deltackpt verify`, and remove these "
                "first"
            )
        known = [other for other in infos.values() if other is not None]
        compacted = root.compacted()
        needing = [
            number
            for number, other in sorted(others.items())
            if other is not None
            and info.save_id in chain.live_set([other.save_id], known, (), compacted)
        ]
        if needing:
            raise OptionError(
                f"step {step}: expected a step that no other needs, found that steps {needing} are "
                "deltas on top of it; delete these first, or compact the chain (deltackpt compact) "
                "so that a base replaces it"
            )
        is_needed = self._covers_trimmed(step)
        self._run.ledger.remove_steps([step])
        if (replication := self._run.replication) is not None:
            replication.note_deleted(info.save_id)
        self._run.ledger.collect(lambda: protected)
        return dataclasses.astuple(info.save_id), is_needed

    def _covers_trimmed(self, step: int) -> bool:
        """Returns whether only this step explains why WAL records are missing."""
        try:
            index = WalReader(self._run.root.wal_location).read()
        except RestoreError:
            return False  # Restores report it, with this step and without it.
        if not index.views:
            return False
        steps = self._run.root.restorable()
        left = {number: save_id for number, save_id in steps.items() if number != step}
        newest = max(left, default=-1)
        unreached = coverings(index, steps)[1]
        needing = [
            point.step
            for point in coverings(index, left)[1]
            if point.full and point.step > newest and point not in unreached
        ]
        if needing:
            raise OptionError(
                f"step {step}: expected a step that no recovery point needs, found that recovery "
                f"points {min(needing)} to {max(needing)} replay onto it; save a later step first, "
                "then delete this one"
            )
        return any(one.may_be_trimmed and one.step <= step for one in index.losses(newest))

    def _check(self, step: int) -> StorePath:
        self._run.root.await_readable(step)
        step_dir = self._run.root.at(step)
        if not step_dir.is_dir():
            raise StepNotFound(
                f"step {step} in {self._run.root}: expected a committed step, found none; "
                f"there are {sorted(self._run.root.steps())}"
            )
        return step_dir


def _best_n(policy: PreservationPolicy | None) -> ocp.checkpoint_managers.BestN | None:
    """Returns the policy that ranks steps, also from within a joined policy."""
    if policy is None or isinstance(policy, retention.LatestN):
        return None
    if isinstance(policy, ocp.checkpoint_managers.BestN):
        return policy
    inner = [_best_n(one) for one in getattr(policy, "policies", ())]
    return next((one for one in inner if one is not None), None)
