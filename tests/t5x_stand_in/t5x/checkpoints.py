# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as T5X names them, and a manager that writes every leaf with Orbax."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from t5x import state_utils


def get_local_data(x):
    """Returns the data of the first local device."""
    return x.addressable_data(0) if isinstance(x, jax.Array) else x


def all_steps(checkpoints_dir):
    """Returns the steps in ascending order, including dangling links."""
    found = (re.fullmatch(r"checkpoint_(\d+)", name) for name in os.listdir(checkpoints_dir))
    return sorted(int(match[1]) for match in found if match)


def get_step_from_checkpoint_dir(checkpoints_dir):
    """Returns the model directory and the step of one of its checkpoints."""
    parent, name = os.path.split(checkpoints_dir.rstrip("/"))
    return parent, int(name.removeprefix("checkpoint_"))


def populate_metrics_for_steps(checkpoints_dir, metric_name, steps):
    """Returns the values of a summary by step, from lines of JSON."""
    folder, _, tag = metric_name.rpartition("/")
    path = Path(checkpoints_dir, folder, "summaries.jsonl")
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {line["step"]: line[tag] for line in lines if line["step"] in steps}


@dataclasses.dataclass
class _OrbaxParamInfo:
    name: str
    mesh_axes: Any


def _construct_orbax_param_infos(train_state, partitioner):
    axes = partitioner.get_mesh_axes(train_state)
    return axes.mapped(_OrbaxParamInfo).state_dict()


class DatasetCheckpointHandler(ocp.CheckpointHandler):
    """Saves and restores the position of an iterator by its own ``save`` and ``load``."""

    def __init__(self, checkpoint_filename, should_write_dataset_ckpt):
        self._filename, self._writes = checkpoint_filename, should_write_dataset_ckpt

    def save(self, directory, args):
        """Saves the position."""
        if self._writes:
            args.item.save(os.fspath(directory / self._filename))

    def restore(self, directory, args=None):
        """Moves the iterator to the saved position."""
        if self._writes:
            args.item.load(os.fspath(directory / self._filename))
            return args.item
        return None


@ocp.args.register_with_handler(DatasetCheckpointHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class DatasetArgs(ocp.args.CheckpointArgs):
    """The iterator."""

    item: Any = None


class OrbaxCheckpointManagerInterface:
    """T5X's own manager; the tests need only one save and one restore."""

    def __init__(
        self,
        directory,
        train_state,
        partitioner,
        dataset_iterator=None,
        save_dtype=None,
        restore_dtype=None,
        keep=None,
        period=1,
        checkpoint_steps=None,
        keep_dataset_checkpoints=None,
        force_keep_period=None,
        metric_name_to_monitor=None,
        metric_mode="max",
        keep_checkpoints_without_metrics=True,
    ):
        self._directory, self._train_state, self._partitioner = directory, train_state, partitioner

    @property
    def directory(self):
        """The model directory."""
        return self._directory

    def all_steps(self):
        """The steps in the model directory."""
        return all_steps(self._directory)

    def latest_step(self):
        """The newest step."""
        return max(self.all_steps(), default=None)

    def should_save(self, step):
        """Whether a step is to be saved."""
        return step not in self.all_steps()

    def wait_until_finished(self):
        """Saves are finished when ``save`` returns."""

    def close(self):
        """Nothing is open."""

    def save(self, train_state, state_transformation_fns=(), force=True):
        """Saves every leaf."""
        path = Path(self._directory, f"checkpoint_{int(train_state.step)}", "state")
        ocp.PyTreeCheckpointer().save(path, train_state.state_dict())
        return True

    def restore(
        self,
        step=None,
        path=None,
        fallback_state=None,
        state_transformation_fns=(),
        lazy_parameters=False,
    ):
        """Restores every leaf with the partitioner's shardings."""
        axes = self._partitioner.get_mesh_axes(self._train_state)
        args = axes.mapped(
            lambda name, spec: ocp.ArrayRestoreArgs(
                sharding=jax.sharding.NamedSharding(self._partitioner.mesh, spec)
            )
        )
        found = ocp.PyTreeCheckpointer().restore(
            Path(path, "state"), restore_args=args.state_dict()
        )
        assert state_utils.flatten_state_dict(found).keys() == self._train_state.leaves.keys()
        return self._train_state.restore_state(found)


class Checkpointer:
    """T5X's first checkpointer, the default of a configuration."""
