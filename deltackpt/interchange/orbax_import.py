# SPDX-License-Identifier: Apache-2.0
"""A stock Orbax checkpoint as the first base of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from deltackpt.errors import Damaged, InUse, OptionError, TargetExists
from deltackpt.format import blocks, names
from deltackpt.interchange import orbax_source
from deltackpt.interchange.target import local_path
from deltackpt.ledger.directory import Root
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.state.choice import Tables
from deltackpt.state.tables import join, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import made.

    Attributes:
      path: the directory.
      step: number of its first step.
      source: the pytree that was read.
      tables: names of the tables to the names of their slots.
      nbytes: bytes of tables and slots that were written.
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
    abstract_state: Any = None,
    item: str | None = None,
    name: str = names.EMBEDDINGS_ITEM,
    options: ManagerOptions | None = None,
) -> Imported:
    """Makes a stock Orbax checkpoint the first base of a new directory.

    The source may be a pytree, a step or a directory of steps, written by v0 or v1; it is only
    read. Afterwards ``CheckpointManager(directory).restore_latest(state)`` gives the same bits,
    and the next save is a delta. The directory has the whole step, or none, however this ends.

    Without ``abstract_state`` leaves are nested dicts and lists, as Orbax stored them: enough for
    dicts, dataclasses, optax states and a flax ``TrainState``, whose slots are found where the
    optimizer's state is called ``opt_state``. An nnx state needs ``abstract_state``.

    Needs host memory for twice the state (measured): itself, and what Orbax reads.

    Args:
      source: the checkpoint.
      directory: the new directory of checkpoints; it may exist, without a step.
      tables: which leaves are tables, as it will be given to the manager.
      step: of a directory of steps which one, the newest by default; else the number that the step
        gets, by default that of the step's directory.
      abstract_state: the state's structure with arrays or ``jax.ShapeDtypeStruct`` leaves, as
        training will have it; it may hold a ``TouchState``, and ``track`` may have been added.
      item: name of the pytree in the source's step, where it has several.
      name: name of our item in the steps.
      options: of the manager that writes the step.

    Raises:
      TargetExists: the directory has steps.
      InUse: a trainer may be at work in the directory.
      StepNotFound, ForeignDirectory, Damaged, StepGone: the source cannot be read.
      OptionError: the source has several items, or no number and none was given.
      TemplateMismatch: ``abstract_state`` has other leaves, shapes or dtypes than the source.
      TableSelectionError: ``tables`` does not fit the state.
      SaveFailed, StorageError, OutOfSpace: the step cannot be written.
    """
    goal = local_path(directory)
    _refuse_steps(goal)
    found = orbax_source.find(local_path(source), item=item, step=step)
    number = found.step if step is None else step
    if number is None:
        raise OptionError(
            f"{found.path}: expected the number of a step in its path, found none; say which step "
            "it is: step=..."
        )
    state = _without_touched(found.read(abstract_state), tables)
    with CheckpointManager(goal, handlers={name: tables}, options=options) as manager:
        manager.save(number, state)
        [report] = manager.wait()
    return Imported(
        path=goal,
        step=number,
        source=found.path,
        tables=_chosen(state, tables),
        nbytes=report.bytes_written,
    )


def _refuse_steps(directory: Path) -> None:
    # Before a manager takes the lease: a trainer may hold it.
    with contextlib.suppress(FileNotFoundError):
        if not any(directory.iterdir()):
            return
        opened = Root.open(directory, read_only=True)
        if steps := sorted(opened.steps()):
            raise TargetExists(
                f"{directory}: expected no step, found {steps[:8]}; import into an empty "
                "directory, where the run goes on"
            )
        _refuse_trainer(opened)


def _refuse_trainer(opened: Root) -> None:
    try:
        lease = opened.newest_lease()
    except Damaged:
        return  # An import, or a trainer, that was killed before it had signed.
    if lease is not None and lease.runs is not False:
        raise InUse(
            f"{opened.path}: expected no trainer there, found its lease taken by process "
            f"{lease.pid} on {lease.host}; import into an empty directory, where the run goes on"
        )


def _without_touched(state: Any, choice: Tables) -> Any:
    """The state with fresh TouchStates where the template had its own."""
    parts = split(state, choice)
    return join(state, parts.layout, parts.fields, parts.dense, None)


def _chosen(state: Any, choice: Tables) -> dict[str, tuple[str, ...]]:
    fields = split(state, choice).fields
    slot = blocks.slot_field("")
    return {
        name: tuple(sorted(field.removeprefix(slot) for field in found if field != blocks.VALUES))
        for name, found in fields.items()
    }
