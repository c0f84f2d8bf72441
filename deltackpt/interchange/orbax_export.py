# SPDX-License-Identifier: Apache-2.0
"""Exports a step as a plain Orbax checkpoint, which both APIs of stock Orbax restore.

The target is a v0 ``CheckpointManager`` directory with one step and the item ``default``.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from jax import tree_util

from deltackpt import events, inspect
from deltackpt.errors import DeltackptError, OptionError, OutOfSpace, StorageError
from deltackpt.format.manifest import nest
from deltackpt.format.naming import COMMIT_SUCCESS, PyTree
from deltackpt.handlers import orbax_dense
from deltackpt.interchange.orbax_source import with_numbers
from deltackpt.interchange.target import Exported, chosen, exported, local_path, published
from deltackpt.manager import CheckpointManager
from deltackpt.options import KafkaWal, ManagerOptions, WalOptions
from deltackpt.reading.reader import Progress
from deltackpt.state import paths
from deltackpt.state.tables import Tables
from deltackpt.storage import posix

_ITEM = "default"
_FULL = ("No space left on device", "Disk quota exceeded")


def export_orbax(
    directory: str | os.PathLike[str],
    step: int | None,
    target: str | os.PathLike[str],
    *,
    item: str | None = None,
    leaves: str | Sequence[str] = "**",
    wal: KafkaWal | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes a step as a plain Orbax checkpoint with tables, slots and dense leaves as one state.

    The state has the structure of a restore without a template: nested dicts and lists, with named
    tuples and classes as dicts of their fields. Arrays are stored as numpy arrays, so they restore
    on any machine; a template with shardings returns ``jax.Array`` leaves. Orbax rejects arrays
    without elements, so they are stored as the string ``deltackpt:empty:<dtype>:<shape>``.

    A Flax NNX state is stored as its pure dict. To restore it, use ``nnx.to_pure_dict(state)`` as
    the template, then ``nnx.replace_by_pure_dict`` with ``nnx.restore_int_paths``. A warning
    explains this if the state holds lists.

    Needs host memory for three copies of the state (measured), two of them in Orbax.

    Args:
      directory: path or bucket URL of the checkpoint directory.
      step: the step; None for the newest.
      target: the new directory; it appears complete or not at all.
      item: name of the deltackpt item in the steps; detected by default.
      leaves: globs over the '/'-joined paths of the tables, slots and dense leaves to export. A
        list that loses elements becomes a dict keyed by element index.
      wal: how to read WAL records in Kafka, such as ``KafkaWal(config=...)``.
      progress: called with the bytes of tables read so far and the total.

    Returns:
      What was written; ``changed`` lists the arrays that were stored as strings.

    Raises:
      TargetExists: the target exists.
      UnsupportedRoot: Orbax cannot write to the path of the target.
      RestoreError: the step is not readable.
      OptionError: a glob matches no leaf, two leaves would get the same name in Orbax, or Orbax
        cannot store the dtype of a table.
      OutOfSpace, StorageError: the file system reported an error.
    """
    goal = local_path(target)
    posix.check_path(goal, writing=True)
    with inspect.open(directory, item=item, wal=wal) as checkpoints:
        found = checkpoints.at(step)
        number = found.step
        patterns = (leaves,) if isinstance(leaves, str) else (*leaves,)
        # Report errors in the globs before anything is read.
        wanted = None if patterns == ("**",) else chosen(found, patterns)
        with published(goal) as temporary:
            state = _restored(directory, number, checkpoints.item, wal, progress)
            state = with_numbers(state, found.dense)
            if wanted is not None:
                state = _only(state, wanted)
            _check_names(state)
            _check_dtypes(state)
            _warn_of_nnx(state)
            args = orbax_dense.save_args(state)
            before, after = ocp.tree.to_flat_dict(state), ocp.tree.to_flat_dict(args.item)
            changed = {
                "/".join(path): "text"
                for path, leaf in after.items()
                if isinstance(leaf, str) and not isinstance(before[path], str)
            }
            _write(args, temporary, number, goal)
    return exported(goal, number, changed=changed)


def _restored(
    directory: str | os.PathLike[str],
    step: int,
    item: str,
    wal: KafkaWal | None,
    progress: Progress | None,
) -> PyTree:
    # The step itself records which of its leaves are tables.
    handlers = {item: Tables(select="**")}
    options = ManagerOptions(access="read", wal=wal and WalOptions(backend=wal))
    with CheckpointManager(directory, handlers=handlers, options=options) as manager:
        return manager.restore(step, progress=progress).state


def _only(state: PyTree, wanted: Collection[str]) -> PyTree:
    """Selects leaves of nested dicts and lists; returns them in nested dicts."""
    found: list[tuple[Sequence[Hashable], PyTree]] = []
    for path, leaf in tree_util.tree_leaves_with_path(state, is_leaf=paths.is_empty):
        keys = [step.key if isinstance(step, tree_util.DictKey) else str(step.idx) for step in path]
        if "/".join(map(str, keys)) in wanted:
            found.append((keys, leaf))
    return nest(found)


def _warn_of_nnx(state: PyTree) -> None:
    """Warns about an NNX state, whose own template stock Orbax would reject here."""
    steps = {step for path, _ in tree_util.tree_leaves_with_path(state) for step in path}
    # Only NNX states have integer keys in place of lists.
    if any(isinstance(step, tree_util.DictKey) and isinstance(step.key, int) for step in steps):
        events.warn(
            "export: found integer keys, as in a Flax NNX state, and stored them as strings; to "
            "restore with Orbax, pass nnx.to_pure_dict(state) as the template, then call "
            "nnx.replace_by_pure_dict(state, nnx.restore_int_paths(restored))"
        )


def _check_names(state: PyTree) -> None:
    """Checks that leaf names are distinct in Orbax, which joins keys with '.'."""
    names = collections.Counter(".".join(path) for path in ocp.tree.to_flat_dict(state))
    clashes = sorted(name for name, count in names.items() if count > 1)
    if clashes:
        raise OptionError(
            "export: expected distinct leaf names, found more than one leaf with each of the "
            f"Orbax names {clashes}; rename the keys that contain a '.'"
        )


def _check_dtypes(state: PyTree) -> None:
    """Checks that Orbax can store the arrays: tables may have other dtypes, such as uint4."""
    faults = [
        f"{'/'.join(path)} {fault}"
        for path, leaf in ocp.tree.to_flat_dict(state).items()
        if isinstance(leaf, np.ndarray) and (fault := orbax_dense.fault(leaf)) is not None
    ]
    if faults:
        raise OptionError(
            f"export: expected leaves that Orbax can store, found\n{paths.listed(faults)}\n"
            "choose other leaves, or export to safetensors"
        )


def _write(args: ocp.args.PyTreeSave, root: Path, step: int, goal: Path) -> None:
    step_dir = root / str(step)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(step_dir, args=ocp.args.Composite(**{_ITEM: args}))
        for path in step_dir.rglob(COMMIT_SUCCESS):
            # Orbax logged the name of a temporary directory.
            path.write_text(f"Checkpoint commit was successful to {goal.name}/{step}")
    except (DeltackptError, OSError):
        raise
    except Exception as error:
        # TensorStore raises plain errors that quote the system's message.
        kind = OutOfSpace if any(text in str(error) for text in _FULL) else StorageError
        raise kind(
            f"{goal}: expected Orbax to write the state, found {type(error).__name__}: {error}; "
            "check the file system and its free space (nothing was left behind)"
        ) from error
