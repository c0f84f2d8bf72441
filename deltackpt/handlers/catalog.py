# SPDX-License-Identifier: Apache-2.0
"""What is known of committed steps without restoring them, and removing one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import orbax.checkpoint as ocp

from deltackpt.errors import Damaged, OptionError, StepNotFound
from deltackpt.format import chain, names
from deltackpt.format.manifest import SaveId
from deltackpt.handlers import retention
from deltackpt.handlers.reading import OrbaxItems
from deltackpt.handlers.run import Run
from deltackpt.policy.retention import PreservationPolicy
from deltackpt.reading import saves
from deltackpt.restore import placing
from deltackpt.state import tables
from deltackpt.storage.store import Spot

Metrics = Mapping[str, Any]
#: A metric's name, or what makes a number of all metrics of a step.
Metric = str | Callable[[Metrics], float]
Mode = Literal["max", "min"]


class Catalog:
    """The committed steps of a manager's directory."""

    def __init__(self, run: Run):
        """Reads nothing yet."""
        self._run = run
        self._items = OrbaxItems(run.root, {})

    def metadata(self, step: int) -> Mapping[str, Any]:
        """Orbax's metadata of a step: ``metrics``, ``custom_metadata``, and when it was saved.

        Raises:
          StepNotFound: it was not committed, or is gone.
          Damaged: it cannot be understood.
        """
        name = str(self._check(step) / names.STEP_METADATA)
        data = self._run.root.metadata(step)
        try:
            found = json.loads(data)
        except ValueError as error:
            raise Damaged(name, "JSON", f"{len(data)} bytes: {error}") from error
        if not isinstance(found, dict):
            raise Damaged(name, "a JSON object", type(found).__name__)
        return found

    def best(self, metric: Metric | None, mode: Mode) -> int | None:
        """The step with the best metric; as ``CheckpointManager.best_step``."""
        if mode not in ("max", "min"):
            raise OptionError(f"best_step, mode: expected 'max' or 'min', found {mode!r}")
        if metric is None:
            metric, mode = self._of_retention()
        of = metric if callable(metric) else lambda found: found[metric]
        best: tuple[float, int] | None = None
        for known in retention.committed_steps(self._run.root):
            metrics = known.metrics
            if metrics is None or (isinstance(metric, str) and metric not in metrics):
                continue
            value = float(of(metrics))
            one = (value if mode == "max" else -value, known.step)
            if value == value and (best is None or one > best):  # NaN is never the best.
                best = one
        return None if best is None else best[1]

    def _of_retention(self) -> tuple[Metric, Mode]:
        policy = _best_n(retention.as_policy(self._run.options.retention))
        if policy is None:
            raise OptionError(
                "best_step: expected a metric, or ManagerOptions.retention with a BestN policy, "
                "found neither; give e.g. best_step('loss', mode='min')"
            )
        return policy.get_metric_fn, "min" if policy.reverse else "max"

    def abstract_state(self, step: int) -> Any:
        """Shapes and dtypes of a step's state; as ``CheckpointManager.item_metadata``."""
        run = self._run
        save = saves.read_save(self._check(step), run.item)
        abstract = placing.abstract_of(save).tables or {}
        dense = self._items.abstract(step) if save.layout.dense else {}
        return tables.join(None, save.layout, abstract, dense, None)

    def delete(self, step: int) -> None:
        """Removes one step, on process 0; as ``CheckpointManager.delete``."""
        run = self._run
        with run.among.together(f"deleting step {step}", fatal=True):
            if run.among.index == 0:
                self._delete(step, run.lineage.protected())
        run.newest = run.among.of_first("the newest step", run.root.newest_step)

    def _delete(self, step: int, protected: frozenset[SaveId]) -> None:
        root = self._run.held
        self._check(step)
        infos = root.saves()
        info = infos[step]
        if info is None:
            raise Damaged(str(root.at(step)), "a manifest that can be read", "none")
        others = {number: other for number, other in infos.items() if number != step}
        unreadable = sorted(number for number, other in others.items() if other is None)
        if unreadable:
            raise OptionError(
                f"step {step}: expected to know what every other step needs, found that "
                f"{unreadable} cannot be read; look with `deltackpt verify`, and remove these first"
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
                "so that a base stands in its place"
            )
        root.remove_steps([step])
        root.collect(lambda: protected)

    def _check(self, step: int) -> Spot:
        """Where a step stands."""
        self._run.root.await_readable(step)
        step_dir = self._run.root.at(step)
        if not step_dir.is_dir():
            raise StepNotFound(
                f"step {step} in {self._run.root}: expected a committed step, found none; "
                f"there are {sorted(self._run.root.steps())}"
            )
        return step_dir


def _best_n(policy: PreservationPolicy) -> ocp.checkpoint_managers.BestN | None:
    """The policy that ranks steps, among several that are joined too."""
    if isinstance(policy, ocp.checkpoint_managers.BestN):
        return policy
    inner = [_best_n(one) for one in getattr(policy, "policies", ())]
    return next((one for one in inner if one is not None), None)
