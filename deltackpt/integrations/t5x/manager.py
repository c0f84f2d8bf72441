# SPDX-License-Identifier: Apache-2.0
"""The manager that T5X is given, and the settings that make it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from deltackpt import events, inspect, processes
from deltackpt.errors import (
    FencedError,
    NoIntactStep,
    OptionError,
    RestoreError,
    SaveFailed,
    TemplateMismatch,
)
from deltackpt.format import names
from deltackpt.handlers.agreement import Processes
from deltackpt.integrations.t5x.layout import StepLinks, model_dir_of, tables_of
from deltackpt.integrations.t5x.model import ModelLeaves, cast, flat, leaves_of, taken
from deltackpt.integrations.t5x.modules import checkpoints
from deltackpt.integrations.t5x.resuming import resume_with
from deltackpt.integrations.t5x.retention import retention_of
from deltackpt.integrations.t5x.settings import Settings, Wait
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.outcomes import Saved
from deltackpt.state.groups import CodecOption
from deltackpt.storage import digests

#: T5X's name of the item that holds the position of the data.
_DATASET = "dataset"


def checkpoint_manager(
    *,
    tables: str | Sequence[str] = ("target/**/embedding",),
    codec: CodecOption = "raw",
    slot_codec: CodecOption = "raw",
    options: ManagerOptions | None = None,
    wait: Wait = "deferred",
) -> Callable[..., DeltaCheckpointManager]:
    """Returns what T5X calls to make its checkpoint manager, and makes T5X resume with it.

    The same settings give the same object, because T5X compares the one that saves with the one
    that restores by ``is``. T5X's ``train()`` builds the configuration that it resumes with by
    itself, without asking for a class: see ``resume_with``, which this calls.

    Args:
      tables: path patterns of the tables in T5X's state dict; ``target/`` are the parameters. The
        default finds the token embeddings of T5X's models, and not their ``rel_embedding``.
      codec: how the tables' rows are stored: the name of a codec, or what ``Tables`` takes.
      slot_codec: how their slots' rows are stored.
      options: how to save; ``tracking`` is set here, ``retention`` counts where T5X's
        ``keep`` and its like say nothing.
      wait: what T5X's wait after each save does: ``"deferred"``: it lets training go on;
        ``"each"``: it waits, as with T5X's own manager. See
        ``DeltaCheckpointManager.wait_until_finished``.

    Raises:
      OptionError: a setting has a value that cannot work.
    """
    given = options or ManagerOptions()
    settings = Settings(
        tables=(tables,) if isinstance(tables, str) else tuple(tables),
        codec=codec,
        slot_codec=slot_codec,
        options=dataclasses.replace(
            given, deltas=dataclasses.replace(given.deltas, tracking="fingerprints")
        ),
        wait=wait,
    )
    found = next((made for made in _made if made.keywords["settings"] == settings), None)
    if found is None:
        found = functools.partial(DeltaCheckpointManager, settings=settings)
        _made.append(found)
    resume_with(found)
    return found


#: What ``checkpoint_manager`` has returned, each for settings of its own.
_made: list[functools.partial[DeltaCheckpointManager]] = []


class DeltaCheckpointManager(checkpoints.OrbaxCheckpointManagerInterface):
    """T5X's manager of checkpoints, over a ``deltackpt.CheckpointManager``.

    Made by T5X, through what ``checkpoint_manager`` returns. A training job takes the lease of
    ``<model_dir>/deltackpt`` at once. A job that only reads, which has no save configuration, takes
    none and writes nothing, so that the trainer beside it goes on.

    Saved is T5X's own state dict with its names, after the state transformations of its save
    configuration; ``target`` is cast to the configuration's ``dtype``.

    Checkpoints that T5X itself wrote stay what they are, and are restored by T5X's code: a run can
    go on from one with deltackpt, and its first save is a base.

    In a job of several processes each makes one, and calls it at the same points; ``all_steps`` and
    ``latest_step`` are answered by each for itself. What is restored process 0 chooses.
    """

    def __init__(
        self,
        directory: str,
        train_state: Any,
        partitioner: Any,
        dataset_iterator: Any = None,
        save_dtype: Any = None,
        restore_dtype: Any = None,
        keep: int | None = None,
        period: int | None = None,
        checkpoint_steps: Sequence[int] | None = None,
        keep_dataset_checkpoints: int | None = None,
        force_keep_period: int | None = None,
        metric_name_to_monitor: str | None = None,
        metric_mode: Literal["max", "min"] = "max",
        keep_checkpoints_without_metrics: bool = True,
        *,
        settings: Settings,
    ):
        """Takes T5X's arguments; T5X's own constructor is not called, which would open Orbax.

        Args:
          directory: T5X's model directory, or one of its checkpoints to read.
          train_state: T5X's train state with abstract leaves.
          partitioner: T5X's partitioner.
          dataset_iterator: position of the data, saved and restored with the state.
          save_dtype: dtype of ``target`` in the checkpoints; None for that of the state.
          restore_dtype: dtype of the restored ``target``; None for that of the checkpoint.
          keep: how many newest steps stay, or best ones with ``metric_name_to_monitor``.
          period: steps between two saves; only ``should_save`` asks for it. A job without it and
            without a ``save_dtype`` only reads.
          checkpoint_steps: not used, T5X's loop sees to them.
          keep_dataset_checkpoints: not used, each position of the data stays with its step.
          force_keep_period: steps that it divides stay as well.
          metric_name_to_monitor: ``<folder>/<tag>`` of a TensorBoard summary below the model
            directory; the best steps stay, not the newest.
          metric_mode: whether the greatest or the least is the best.
          keep_checkpoints_without_metrics: steps without a value stay as well.
          settings: of ``checkpoint_manager``.

        Raises:
          UnsupportedRoot: the directory is not in a file system.
          OptionError: both T5X and ``options.retention`` say which steps stay; or there are steps
            of ours that T5X did not see.
          ProcessFailed, ProcessMissing: another process could not make its own, or did not come.
        """
        self._train_state = train_state
        self._partitioner = partitioner
        self._dataset_iterator = dataset_iterator
        self._save_dtype = save_dtype
        self._restore_dtype = restore_dtype
        self._period = period
        self._settings = settings
        self._directory = os.fspath(directory)
        self._model = ModelLeaves(train_state, partitioner)
        self._links = StepLinks(model_dir_of(directory))
        self._processes = Processes(
            f"t5x:{self._links.model_dir}", settings.options.timeouts.processes_secs
        )
        self._newest_link = self._processes.of_first(
            "looking for checkpoints", lambda: max(self._links.steps(), default=None)
        )
        retention = retention_of(
            self._links.model_dir,
            keep,
            force_keep_period,
            metric_name_to_monitor,
            metric_mode,
            keep_checkpoints_without_metrics,
        )
        if retention is None:
            retention = settings.options.retention
        elif settings.options.retention is not None:
            raise OptionError(
                "options.retention: expected none beside keep, force_keep_period or "
                "metric_name_to_monitor of T5X's save configuration, found both; give one of them"
            )
        self._options = dataclasses.replace(settings.options, retention=retention)
        data_layout = partitioner.get_data_layout()
        self._handlers: dict[str, Any] = {}
        if dataset_iterator is not None:
            # The name and the condition of T5X's own manager.
            self._handlers[_DATASET] = checkpoints.DatasetCheckpointHandler(
                f"train_ds-{data_layout.shard_id:03}-of-{data_layout.num_shards:03}",
                data_layout.is_first_host_in_replica_set,
            )
        #: The step that the state of this run has in this directory.
        self._at: int | None = None
        #: Whether no step of ours has a name yet; the same on every process.
        self._unnamed = False
        self._writer: CheckpointManager | None = None
        if save_dtype is not None or period is not None:
            self._writer = self._open_writer()

    @property
    def directory(self) -> epath.Path:
        """T5X's model directory."""
        return epath.Path(self._links.model_dir)

    def all_steps(self) -> Sequence[int]:
        """Steps of the model directory, ascending: committed ones of ours, and T5X's own."""
        return sorted({*self._committed(), *self._links.others()})

    def latest_step(self) -> int | None:
        """The newest of ``all_steps``; None where there is none."""
        return max(self.all_steps(), default=None)

    def should_save(self, step: int) -> bool:
        """Whether the period of the save configuration asks for a save."""
        step = names.as_step(step)
        return step != self._at and step % (self._period or 1) == 0

    def save(
        self,
        train_state: Any,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        force: bool = True,
    ) -> bool:
        """Saves a train state; returns as soon as training may go on.

        The very first save is waited for: until it is committed nothing may have a name that T5X
        would resume from. Every later one has its name first, so that T5X finds it wherever the
        process is killed. While an exception is handled, as by T5X before a preemption, the failure
        of an earlier save is no error: this one is waited for, and a warning tells of the other.

        Args:
          train_state: T5X's train state.
          state_transformation_fns: of T5X's save configuration; the tables keep their paths.
          force: whether ``should_save`` is not asked.

        Returns:
          Whether it was taken; False for the step that is committed or restored already, as when
          T5X stops early just after a save: that save is waited for, and taken anew if it failed.

        Raises:
          SaveFailed: an earlier save failed in the background; this one was taken.
          FencedError: another trainer has taken over the model directory.
        """
        step = names.as_step(np.asarray(checkpoints.get_local_data(train_state.step)))
        if not force and not self.should_save(step):
            return False
        if step == self._at and self._is_committed():
            return False
        if self._writer is None:
            self._writer = self._open_writer()
        state = self._saved_form(train_state, state_transformation_fns)
        first = self._unnamed
        if not first and self._keeps_names(self._writer):
            self._links.add(step)
        failure: SaveFailed | None = None
        try:
            self._writer.save(step, state, items=self._items())
        except SaveFailed as error:
            if not isinstance(error.taken, Saved):
                self._at = None
                raise
            failure = error
        if first:
            self._wait(self._writer)
        self._at, self._newest_link, self._unnamed = step, step, False
        if self._keeps_names(self._writer):
            self._links.match([*self._committed(), step])
        self._tell(self._writer, failure)
        return True

    def wait_until_finished(self) -> None:
        """What T5X calls after each periodic save, before it goes on to train.

        With ``wait="deferred"`` it returns at once, or T5X would never train while it saves. That
        is safe: what a save in flight still reads are buffers of its own, or ones that it holds
        against donation; T5X's evaluations use the live state; and a save that fails is raised by
        the next one, or by ``close()``. While an exception is handled the wait is real: T5X's
        emergency save before a preemption calls this in its ``except`` block.

        Raises:
          SaveFailed: a save failed in the background.
        """
        if self._writer is None:
            return
        if self._settings.wait == "each" or _handles_exception():
            self._wait(self._writer)

    def close(self) -> None:
        """Waits for the save in flight and gives the directory back.

        Raises:
          SaveFailed: a save failed in the background.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        finally:
            if self._keeps_names(writer):
                committed = self._committed()
                newest = max(committed, default=-1)
                # None is made, or a run that has gone back and saved nothing would undo that. Above
                # the newest a trainer that starts just now may have a save in flight.
                named = self._links.steps()
                self._links.match([step for step in named if step in committed or step > newest])

    def restore(
        self,
        step: int | None = None,
        path: str | None = None,
        fallback_state: Mapping[str, Any] | None = None,
        state_transformation_fns: Sequence[Callable[..., Any]] = (),
        lazy_parameters: bool | None = False,
    ) -> Any:
        """Restores a train state, placed as the partitioner says.

        Asked for the newest step of its own model directory, a trainer goes on from the newest one
        that is intact, with a warning where that is another: a save that was cut off leaves a name
        behind. An older step is that step: the next save moves the later ones aside. So it is where
        the newest names were removed, which is how one goes back in T5X.

        Of several processes process 0 chooses, and where one cannot read its part none goes on.

        Args:
          step: of the model directory; the newest where neither it nor a path is given.
          path: ``<model_dir>/checkpoint_<step>``, of this model directory or another.
          fallback_state: state dict that gives the leaves which the checkpoint lacks.
          state_transformation_fns: called with the checkpoint's tree and the state dict of this
            model. As in T5X's own manager the leaves of the tree know their shape and dtype, and
            only what the functions leave is read: leaves may be renamed and dropped.
          lazy_parameters: not used, as in T5X's own manager.

        Returns:
          The train state.

        Raises:
          ValueError: both a step and a path were given.
          OptionError: a trainer goes back to a checkpoint of T5X's own from which steps of ours go
            on.
          RestoreError: what is wrong with the step.
          ProcessFailed, ProcessMissing: another process could not go on, or did not come.
        """
        if step is not None and path is not None:
            raise ValueError("expected a step or a path, found both; give one of them")
        step = None if step is None else names.as_step(step)
        found_path, is_stock = self._processes.of_first(
            "choosing a checkpoint", lambda: self._checkpoint(step, path)
        )
        model_dir, chosen = checkpoints.get_step_from_checkpoint_dir(found_path)
        links = StepLinks(model_dir)
        own = self._is_own(links)
        if is_stock:
            restored = self._restore_stock(found_path, fallback_state, state_transformation_fns)
            self._at = chosen if own else self._at
            return restored
        if own and self._writer is not None:
            leaves = self._resumed(self._writer, chosen, state_transformation_fns)
            state = self._model.placed(leaves, fallback_state or {}, self._restore_dtype)
        else:
            chosen = self._readable(links, chosen)
            with self._processes.together(f"reading step {chosen}"):
                found = inspect.open(links.root).at(chosen)
                leaves = self._model.chosen(leaves_of(found), state_transformation_fns)
                leaves = self._model.read(leaves)
            state = self._model.placed(leaves, fallback_state or {}, self._restore_dtype)
            with self._processes.together(f"restoring the position of the data of step {chosen}"):
                self._restore_data(found)
        return self._train_state.restore_state(state)

    # What is saved.

    def _open_writer(self) -> CheckpointManager:
        tables = tables_of(
            self._train_state.state_dict(),
            self._settings.tables,
            codec=self._settings.codec,
            slot_codec=self._settings.slot_codec,
        )
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(
                CheckpointManager(
                    self._links.root,
                    handlers={names.EMBEDDINGS_ITEM: tables, **self._handlers},
                    options=self._options,
                )
            )
            steps = self._processes.of_first("naming steps", lambda: self._named(manager))
            if steps and self._newest_link is None:
                raise OptionError(
                    f"{self._links.model_dir}: expected a checkpoint_<step> for each step in "
                    f"{self._links.root.name}, found the steps {steps} and none, so T5X did not "
                    "resume; they are there now: start again"
                )
            self._unnamed = not steps
            stack.pop_all()
            return manager

    def _named(self, manager: CheckpointManager) -> list[int]:
        """The committed steps, which have their names now."""
        steps = manager.all_steps()
        # A name that was removed to go back does not come again.
        newest = self._links.newest_of(steps)
        self._links.match([step for step in steps if newest is None or step <= newest])
        return steps

    def _keeps_names(self, writer: CheckpointManager) -> bool:
        """Whether T5X's names are this process's to change: it holds the directory's lease."""
        if processes.index() > 0:
            return False
        try:
            writer.check_lease()
        except FencedError:
            # The commit of the save says it, to all processes.
            return False
        return True

    def _is_committed(self) -> bool:
        """Whether the step that this run is at was committed; waits for its save in flight."""
        if self._writer is None:
            return True
        at, failure = self._at, None
        try:
            self._wait(self._writer)
        except SaveFailed as error:
            failure = error
        # A process that waited in vain may not know that process 0 has committed.
        committed = self._processes.of_first("asking for the last save", lambda: failure is None)
        if committed:
            self._at = at
        if failure is not None:
            outcome = "process 0 has committed it" if committed else "it is saved anew"
            events.warn(f"{failure}; {outcome}")
        return committed

    def _wait(self, writer: CheckpointManager) -> None:
        """Waits for the save in flight; where it failed, its step may be saved again."""
        try:
            writer.wait()
        except SaveFailed:
            self._at = None
            raise

    def _tell(self, writer: CheckpointManager, failure: SaveFailed | None) -> None:
        """Raises the failure of an earlier save; not in the place of an exception under way."""
        if failure is None:
            return
        if not _handles_exception():
            raise failure
        self._wait(writer)
        events.warn(str(failure))

    def _saved_form(
        self, train_state: Any, transformation_fns: Sequence[Callable[..., Any]]
    ) -> Any:
        """The state dict as it is saved."""
        state = train_state.state_dict()
        if transformation_fns:
            # T5X's own record of each parameter, which its functions are given and give back.
            infos = checkpoints._construct_orbax_param_infos(self._train_state, self._partitioner)
            for fn in transformation_fns:
                state, infos = fn(state, infos)
        return {**state, "target": cast(state["target"], self._save_dtype)}

    def _items(self) -> dict[str, ocp.args.CheckpointArgs]:
        if self._dataset_iterator is None:
            return {}
        return {_DATASET: checkpoints.DatasetArgs(self._dataset_iterator)}

    def _committed(self) -> list[int]:
        if self._writer is not None:
            return list(self._writer.all_steps())
        return inspect.open(self._links.root).steps if self._links.root.is_dir() else []

    # What is restored: leaves by their '/'-joined paths.

    def _resumed(
        self, writer: CheckpointManager, step: int, transformation_fns: Sequence[Callable[..., Any]]
    ) -> dict[str, Any]:
        """Leaves of a step of this run, from which the manager that saves goes on."""
        step, newest, later = self._processes.of_first("choosing a step", lambda: self._goal(step))
        if later:
            events.warn(
                f"{self._links.model_dir}: going back to step {step}, the newest with a "
                f"checkpoint_<step>; the later steps {later} have none, the next save moves them "
                "aside"
            )
        stored = self._newest_leaves() if newest else self._stored_leaves(step)
        chosen = self._model.chosen(stored, transformation_fns)
        template = self._model.template(stored) if self._model.is_own(stored, chosen) else None
        try:
            if newest:
                restored = writer.restore_latest(template, items=self._items())
            else:
                restored = writer.restore(step, template, items=self._items())
        except TemplateMismatch as error:
            raise TemplateMismatch(
                f"{error}; in T5X: give checkpoint_manager.tables, and save_dataset, as in the run "
                "that saved, or start in another model directory"
            ) from error
        if restored is None:
            raise NoIntactStep(f"{self._links.root}: expected a committed step, found none")
        if restored.step != step:
            events.warn(
                f"checkpoint_{step} in {self._links.model_dir} is not the newest intact step; "
                f"going on from step {restored.step}"
            )
        self._at = restored.step
        return taken(chosen, stored, flat(restored.state))

    def _goal(self, step: int) -> tuple[int, bool, list[int]]:
        """Where a run that is to resume from a step goes on.

        Returns:
          The step; whether it means the newest intact one; and the later steps, where the names of
          the newest were removed to go back.
        """
        committed = self._committed()
        newest = step == self._newest_link or step >= max(committed, default=step)
        named = self._links.newest_of(committed)
        later = [found for found in committed if named is not None and found > named]
        if newest and named is not None and later:
            return named, False, later
        return step, newest, []

    def _checkpoint(self, step: int | None, path: str | None) -> tuple[str, bool]:
        """The path of the checkpoint that is meant, and whether T5X itself wrote it."""
        if path is None:
            step = max(self.all_steps(), default=0) if step is None else step
            path = os.fspath(self._links.model_dir / f"checkpoint_{step}")
        model_dir, number = checkpoints.get_step_from_checkpoint_dir(os.fspath(path))
        links = StepLinks(model_dir)
        is_stock = number in links.others() or not links.root.is_dir()
        if is_stock and self._is_own(links) and self._writer is not None:
            self._check_none_above(number)
        return os.fspath(path), is_stock

    def _is_own(self, links: StepLinks) -> bool:
        """Whether these are the names in the model directory of this job."""
        return links.model_dir.resolve() == self._links.model_dir.resolve()

    def _readable(self, links: StepLinks, step: int) -> int:
        """The step, or the newest where it is not committed yet: somebody else may be writing."""

        def committed() -> int:
            newest = inspect.open(links.root).newest
            return step if newest is None else min(step, newest)

        found = self._processes.of_first("choosing a step", committed)
        if found != step:
            events.warn(
                f"checkpoint_{step} in {links.model_dir} is not committed; reading step {found}"
            )
        return found

    def _check_none_above(self, step: int) -> None:
        """Checks that a run can go on from a checkpoint of T5X's own."""
        above = [found for found in self._committed() if found > step]
        if above:
            raise OptionError(
                f"{self._links.model_dir}: expected no step of deltackpt above checkpoint_{step}, "
                f"which T5X itself wrote, found {above}; resume from checkpoint_{above[-1]}, or "
                f"move {self._links.root} away to go back"
            )

    def _restore_data(self, step: inspect.Step) -> None:
        """Moves the iterator of the data to where it was at a step.

        Raises:
          TemplateMismatch: the step was saved without it.
          Damaged: a file of it is missing or altered; the iterator stays where it is.
          StepGone: the step was removed meanwhile.
        """
        if self._dataset_iterator is None:
            return
        self._check_position(step)
        for damage in digests.check_step_files(
            step.path, wanted=lambda name: name.startswith(f"{_DATASET}/")
        ):
            step.check_stands()
            raise damage
        [args] = self._items().values()
        self._handlers[_DATASET].restore(epath.Path(step.path / _DATASET), args)
        step.check_stands()

    def _check_position(self, step: inspect.Step) -> None:
        """Checks that a step holds the position of the data, of as many processes as there are.

        Raises:
          TemplateMismatch: the step was saved without it, or by more or fewer processes.
          StepGone: the step was removed meanwhile.
        """
        if not (step.path / _DATASET).is_dir():
            step.check_stands()
            raise TemplateMismatch(
                f"{step.path}: expected the position of the data ({_DATASET}), found that it was "
                "saved without; leave restore_dataset, and save_dataset, off to start from it"
            )
        # T5X's names. Any of them, so that every process finds the same: not each has its own.
        name = f"train_ds-*-of-{self._partitioner.get_data_layout().num_shards:03}"
        if processes.count() > 1:
            name = f"process_*-of-{processes.count()}/{name}"
        if not any((step.path / _DATASET).glob(f"{name}*")):
            step.check_stands()
            files = (step.path / _DATASET).rglob("train_ds-*")
            found = sorted({path.name.partition(".")[0] for path in files})
            raise TemplateMismatch(
                f"{step.path}: expected the position of the data as {name}, found "
                f"{', '.join(found) or 'none'}; start as many processes as saved it, or leave "
                "restore_dataset, and save_dataset, off to start from it"
            )

    def _stored_leaves(self, step: int) -> dict[str, Any]:
        with self._processes.together(f"reading what step {step} holds"):
            found = inspect.open(self._links.root).at(step)
            if self._dataset_iterator is not None:
                self._check_position(found)
            return leaves_of(found)

    def _newest_leaves(self) -> dict[str, Any]:
        """Lazy leaves of the newest step that every process can read."""
        steps = self._processes.of_first("listing steps", self._committed)
        for step in sorted(steps, reverse=True):
            try:
                return self._stored_leaves(step)
            except RestoreError as error:
                # restore_latest() says what is wrong with it.
                if not error.another_step_may_do:
                    raise
        raise NoIntactStep(
            f"{self._links.root}: expected a step that can be read, found none; copy the directory "
            "back from a backup, or start again in an empty model directory"
        )

    def _restore_stock(
        self,
        path: str,
        fallback_state: Mapping[str, Any] | None,
        transformation_fns: Sequence[Callable[..., Any]],
    ) -> Any:
        """Restores a checkpoint that T5X itself wrote, with T5X's code."""
        stock = checkpoints.OrbaxCheckpointManagerInterface(
            self._directory,
            self._train_state,
            self._partitioner,
            self._dataset_iterator,
            restore_dtype=self._restore_dtype,
        )
        try:
            return stock.restore(
                path=path,
                fallback_state=fallback_state,
                state_transformation_fns=transformation_fns,
            )
        finally:
            stock.close()


def _handles_exception() -> bool:
    """Whether this is called in an ``except`` block, as by T5X before a preemption."""
    return sys.exc_info()[0] is not None
