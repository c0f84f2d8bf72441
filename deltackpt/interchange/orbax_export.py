# SPDX-License-Identifier: Apache-2.0
"""A step as a plain Orbax checkpoint, which stock Orbax restores with both of its APIs.

The target is the root of a v0 ``CheckpointManager`` with one step, whose one item is called
``default``. That is what ``ocp.CheckpointManager(target)`` restores by itself,
``ocp.StandardCheckpointer`` and ``ocp.PyTreeCheckpointer`` by the path ``target/STEP/default``,
and ``v1.load`` by the path ``target/STEP``.
"""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from jax import tree_util

from deltackpt import events, inspect
from deltackpt.errors import DeltackptError, OptionError, OutOfSpace, StorageError
from deltackpt.format.names import COMMIT_SUCCESS
from deltackpt.handlers import dense
from deltackpt.interchange.orbax_source import of_their_kinds
from deltackpt.interchange.target import Exported, exported, local_path, published
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.reading.reader import Progress
from deltackpt.state.choice import Tables

_ITEM = "default"
_FULL = ("No space left on device", "Disk quota exceeded")


def export_orbax(
    directory: str | os.PathLike[str],
    step: int | None,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes a step as a plain Orbax checkpoint: tables, slots and dense leaves as one state.

    The state has the structure of a restore without a template: nested dicts and lists, named
    tuples and classes as dicts of their fields. Arrays are stored as numpy arrays, so that they
    restore on any machine; a template with shardings gives ``jax.Array``s. An array without
    elements, which Orbax refuses, is stored as the text ``deltackpt:empty:<dtype>:<shape>``.

    A state of flax nnx is stored as its pure dict: ``nnx.to_pure_dict(state)`` is its template, and
    ``nnx.replace_by_pure_dict`` with ``nnx.restore_int_paths`` puts it back. A warning says so
    where the state holds lists.

    Needs host memory for three times the state (measured): itself, and what Orbax writes, twice.

    Args:
      directory: the checkpoints.
      step: the step; None for the newest.
      target: the new directory; it appears whole or not at all.
      item: name of our item in the steps; found by default.
      progress: called with bytes of tables read, and bytes in all.

    Returns:
      What was written; ``changed`` names the arrays that are texts there.

    Raises:
      TargetExists: the target exists.
      RestoreError: the step cannot be read.
      OptionError: two leaves would have one name in Orbax.
      OutOfSpace, StorageError: the file system refused.
    """
    goal = local_path(target)
    checkpoints = inspect.open(directory, item=item)
    found = checkpoints.at(step)
    number = found.step
    with published(goal) as temporary:
        state = _restored(checkpoints.path, number, checkpoints.item, progress)
        state = of_their_kinds(state, found.dense)
        _check_names(state)
        _tell_of_nnx(state)
        args = dense.save_args(state)
        before, after = ocp.tree.to_flat_dict(state), ocp.tree.to_flat_dict(args.item)
        changed = {
            "/".join(path): "text"
            for path, leaf in after.items()
            if isinstance(leaf, str) and not isinstance(before[path], str)
        }
        _write(args, temporary, number, goal)
    return exported(goal, number, changed=changed)


def _restored(directory: Path, step: int, item: str, progress: Progress | None) -> Any:
    # The step says itself which of its leaves are tables.
    handlers = {item: Tables(select="**")}
    options = ManagerOptions(access="read")
    with CheckpointManager(directory, handlers=handlers, options=options) as manager:
        return manager.restore(step, progress=progress).state


def _tell_of_nnx(state: Any) -> None:
    """Warns of a state of nnx, whose own template stock Orbax would refuse here.

    Its keys in the place of lists are integers; those of no other state are.
    """
    steps = {step for path, _ in tree_util.tree_leaves_with_path(state) for step in path}
    if any(isinstance(step, tree_util.DictKey) and isinstance(step.key, int) for step in steps):
        events.warn(
            "export: found keys that are integers, as in a state of flax nnx, and stored their "
            "texts; to restore it there give nnx.to_pure_dict(state) as the template, and put what "
            "comes back into the state by nnx.replace_by_pure_dict(state, "
            "nnx.restore_int_paths(restored))"
        )


def _check_names(state: Any) -> None:
    """Orbax joins the keys of a leaf with '.': two leaves of one name would be one file."""
    names = collections.Counter(".".join(path) for path in ocp.tree.to_flat_dict(state))
    clashes = sorted(name for name, count in names.items() if count > 1)
    if clashes:
        raise OptionError(
            f"export: expected names of leaves that differ, found that Orbax calls more than one "
            f"leaf each of {clashes}; rename the keys that hold a '.'"
        )


def _write(args: ocp.args.PyTreeSave, root: Path, step: int, goal: Path) -> None:
    step_dir = root / str(step)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(step_dir, args=ocp.args.Composite(**{_ITEM: args}))
        for path in step_dir.rglob(COMMIT_SUCCESS):
            # Orbax wrote the name of a temporary directory.
            path.write_text(f"Checkpoint commit was successful to {goal.name}/{step}")
    except (DeltackptError, OSError):
        raise
    except Exception as error:
        # TensorStore's errors are plain ones with the system's words in them.
        kind = OutOfSpace if any(text in str(error) for text in _FULL) else StorageError
        raise kind(
            f"{goal}: expected that Orbax writes the state, found {type(error).__name__}: "
            f"{error}; check the file system and its free space: nothing was left behind"
        ) from error
