# SPDX-License-Identifier: Apache-2.0
"""Imports a stock Orbax checkpoint as the first base of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from deltackpt.errors import Damaged, InUse, OptionError, TargetExists
from deltackpt.format import naming, row_blocks
from deltackpt.format.naming import PyTree
from deltackpt.interchange import orbax_source
from deltackpt.interchange.target import local_path
from deltackpt.ledger.directory import Root
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.state.tables import Tables, join, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
      path: the new checkpoint directory.
      step: number of its first step.
      source: the pytree that was read.
      tables: the tables' names, each with the names of its slots.
      nbytes: bytes of tables and slots written.
    """

    path: Path
    step: int
    source: Path
    tables: dict[str, tuple[str, ...]]
    nbytes: int


def import_orbax(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    tables: Tables,
    step: int | None = None,
    abstract_state: PyTree = None,
    item: str | None = None,
    name: str = naming.EMBEDDINGS_ITEM,
    options: ManagerOptions | None = None,
) -> Imported:
    """Imports a stock Orbax checkpoint as the first base of a new checkpoint directory.

    The source may be a pytree, a step or a directory of steps, written by v0 or v1; it is not
    modified. Afterwards ``CheckpointManager(directory).restore_latest(state)`` returns the same
    bits, and the next save is a delta. The import is atomic: the directory holds the complete step
    or none.

    Without ``abstract_state``, leaves are nested dicts and lists as Orbax stored them. That is
    enough for dicts, dataclasses, optax states and a Flax ``TrainState``; slots are found if the
    optimizer state is called ``opt_state``. An NNX state needs ``abstract_state``.

    Needs host memory for twice the state (measured): the state, and one copy in Orbax.

    Args:
      source: the Orbax checkpoint.
      directory: the new checkpoint directory; it may exist but must not hold a step.
      tables: which leaves are tables, as you will pass it to the manager.
      step: for a directory of steps, the step to import (default: the newest); otherwise the number
        to give the step (default: taken from the step's directory).
      abstract_state: the state's structure with arrays or ``jax.ShapeDtypeStruct`` leaves, as in
        training. It may hold a ``TouchState``, and its optimizer may be wrapped by ``track``.
      item: name of the pytree in the source's step, if it has several.
      name: name of the deltackpt item in the steps.
      options: options of the manager that writes the step.

    Raises:
      TargetExists: the directory already holds steps.
      InUse: a trainer may be using the directory.
      StepNotFound, ForeignDirectory, Damaged, StepGone: the source is not readable.
      OptionError: the source has several items, or no step number and none was given.
      TemplateMismatch: the leaves, shapes or dtypes of ``abstract_state`` differ from the source's.
      TableSelectionError: ``tables`` does not fit the state.
      SaveFailed, StorageError, OutOfSpace: writing the step failed.
    """
    goal = local_path(directory)
    _refuse_steps(goal)
    found = orbax_source.locate(local_path(source), item=item, step=step)
    number = found.step if step is None else step
    if number is None:
        raise OptionError(
            f"{found.path}: expected a step number in the path, found none; pass step=..."
        )
    state = _without_touched(found.read(abstract_state), tables)
    options = options or ManagerOptions()
    if isinstance(options, ManagerOptions) and options.deltas.tracking == "auto":
        # Hashing would be in vain, and the trainer that follows chooses the tracking.
        deltas = dataclasses.replace(options.deltas, tracking="touched")
        options = dataclasses.replace(options, deltas=deltas)
    with CheckpointManager(goal, handlers={name: tables}, options=options) as manager:
        manager.save(number, state)
        [report] = manager.wait_until_finished()
    return Imported(
        path=goal,
        step=number,
        source=found.path,
        tables=_chosen(state, tables),
        nbytes=report.bytes_written,
    )


def _refuse_steps(directory: Path) -> None:
    # Before a manager takes the lease, which a trainer may hold.
    with contextlib.suppress(FileNotFoundError):
        if not any(directory.iterdir()):
            return
        opened = Root.open(directory, read_only=True)
        if steps := sorted(opened.steps()):
            raise TargetExists(
                f"{directory}: expected no step, found {steps[:8]}; import into an empty directory "
                "and continue the run there"
            )
        _refuse_trainer(opened)


def _refuse_trainer(opened: Root) -> None:
    try:
        lease = opened.newest_lease()
    except Damaged:
        return  # An import or a trainer that was killed before it signed the lease.
    if lease is not None and lease.runs is not False:
        raise InUse(
            f"{opened.path}: expected no trainer, found the lease held by process {lease.pid} on "
            f"{lease.host}; import into an empty directory and continue the run there"
        )


def _without_touched(state: PyTree, choice: Tables) -> PyTree:
    """Returns the state with a fresh TouchState in place of each of the template's."""
    pieces = split(state, choice)
    return join(state, pieces.layout, pieces.fields, pieces.dense, None)


def _chosen(state: PyTree, choice: Tables) -> dict[str, tuple[str, ...]]:
    fields = split(state, choice).fields
    slot = row_blocks.slot_field("")
    return {
        name: tuple(
            sorted(field.removeprefix(slot) for field in found if field != row_blocks.VALUES)
        )
        for name, found in fields.items()
    }
