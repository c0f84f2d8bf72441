# SPDX-License-Identifier: Apache-2.0
"""T5X's restore configuration, and the lookup of the checkpoint to resume from."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from t5x import checkpoints, state_utils


@dataclasses.dataclass
class RestoreCheckpointConfig:
    """Where to restore from, and how."""

    path: str | Sequence[str]
    mode: str = "latest"
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = checkpoints.Checkpointer
    state_transformation_fns: Sequence[Any] = ()
    checkpoint_manager_cls: Any = checkpoints.OrbaxCheckpointManagerInterface

    def __post_init__(self):
        if self.assignment_map is not None:
            renamed = functools.partial(
                state_utils.apply_assignment_map, assignment_map=self.assignment_map
            )
            self.state_transformation_fns = (renamed, *self.state_transformation_fns)


def get_first_valid_restore_config_and_paths(restore_cfgs):
    """Returns the first configuration, and the newest checkpoint of its directory."""
    [config] = restore_cfgs
    steps = checkpoints.all_steps(config.path)
    return config, [os.path.join(config.path, f"checkpoint_{step}") for step in steps[-1:]]
