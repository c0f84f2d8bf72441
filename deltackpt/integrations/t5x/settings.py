# SPDX-License-Identifier: Apache-2.0
"""Settings of the manager for T5X, its preservation policies, and the used parts of T5X."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orbax.checkpoint as ocp

from deltackpt.errors import MissingExtra, OptionError
from deltackpt.options import ManagerOptions
from deltackpt.state.groups import CodecOption

try:
    checkpoints: types.ModuleType = importlib.import_module("t5x.checkpoints")
    state_utils: types.ModuleType = importlib.import_module("t5x.state_utils")
    utils: types.ModuleType = importlib.import_module("t5x.utils")
except ImportError as error:
    raise MissingExtra(
        "deltackpt.integrations.t5x: expected the package t5x, found that it cannot be imported "
        f"({error}); T5X is not on PyPI: install it from "
        "https://github.com/google-research/t5x"
    ) from error


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
    """Returns the values of a summary by step, without NaN."""
    found = checkpoints.populate_metrics_for_steps(os.fspath(model_dir), metric, steps)
    return {step: float(value) for step, value in found.items() if not np.isnan(value)}


Wait = Literal["deferred", "each"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of ``checkpoint_manager``; comparable, since T5X compares the factories."""

    tables: tuple[str, ...]
    codec: CodecOption
    slot_codec: CodecOption
    options: ManagerOptions
    wait: Wait

    def __post_init__(self) -> None:
        if self.wait not in ("deferred", "each"):
            raise OptionError(
                f"wait: expected 'deferred' or 'each', found {self.wait!r}; 'deferred' lets "
                "training continue while a checkpoint is written"
            )
        if self.options.read_only:
            raise OptionError(
                "options: expected a trainer's options, found access="
                f"{self.options.access!r}; leave it out: a job that only reads takes no lease "
                "anyway"
            )
        if self.options.writes.when_busy != "wait":
            raise OptionError(
                "options.writes.when_busy: expected 'wait', found "
                f"{self.options.writes.when_busy!r}; leave it out: T5X would continue without its "
                "emergency save and its last save, and never requests a pending one"
            )


#: Attribute of the patched constructor that holds its defaults. Decorators that copy attributes,
#: such as gin's, share it.
_DEFAULTS = "_deltackpt_defaults"


def resume_with(manager_cls: Callable[..., object]) -> None:
    """Makes a class the default of T5X's ``RestoreCheckpointConfig`` in this process.

    ``t5x.train.train`` builds its resume configuration with T5X's own class and offers no way to
    name another; T5X then refuses to resume with a class other than the one that saves. A
    configuration that names a class keeps it. May be called again; other decorators of the
    constructor are preserved, below and above.

    Args:
      manager_cls: the factory that T5X calls to create a manager.
    """
    config = utils.RestoreCheckpointConfig
    defaults = getattr(config.__init__, _DEFAULTS, None)
    if defaults is None:
        defaults = _with_defaults(config)
    defaults["checkpoint_manager_cls"] = manager_cls


def _with_defaults(config: Any) -> dict[str, object]:
    """Wraps a class's constructor so that it takes defaults from the returned dict."""
    defaults: dict[str, object] = {}
    original = config.__init__

    @functools.wraps(original)
    def init(self: object, *args: object, **kwargs: object) -> None:
        original(self, *args, **{**defaults, **kwargs})

    setattr(init, _DEFAULTS, defaults)
    config.__init__ = init
    return defaults
