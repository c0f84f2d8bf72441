# SPDX-License-Identifier: Apache-2.0
"""The checkpoint manager for T5X, and the factory that configures it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.typing import DTypeLike

from deltackpt import coordination, events, inspect
from deltackpt.coordination import Coordinator
from deltackpt.errors import (
    FencedError,
    NoIntactStep,
    OptionError,
    RestoreError,
    SaveFailed,
    TemplateMismatch,
)
from deltackpt.format import naming
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.integrations.t5x.layout import StepLinks, model_dir_of, tables_of
from deltackpt.integrations.t5x.model import (
    ModelLeaves,
    Partitioner,
    TrainState,
    Transformation,
    cast,
    chosen_values,
    flat,
    leaves_of,
)
from deltackpt.integrations.t5x.settings import (
    BestByMetric,
    Settings,
    Wait,
    checkpoints,
    resume_with,
)
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.outcomes import Saved
from deltackpt.reading import stored_saves
from deltackpt.state.groups import CodecOption
from deltackpt.storage import digests

#: T5X's name of the item that holds the data position.
_DATASET = "dataset"


def checkpoint_manager(
    *,
    tables: str | Sequence[str] = ("target/**/embedding",),
    codec: CodecOption = "raw",
    slot_codec: CodecOption = "raw",
    options: ManagerOptions | None = None,
    wait: Wait = "deferred",
) -> Callable[..., DeltaCheckpointManager]:
    """Returns a factory for T5X's checkpoint manager, and makes T5X resume with it.

    The same settings return the same object, because T5X compares the saving and the restoring
    class by ``is``. T5X's ``train()`` builds its resume configuration without a way to set the
    class; this function therefore calls ``resume_with``.

    Args:
      tables: path patterns of the tables in T5X's state dict, whose parameters are below
        ``target/``. The default selects the token embeddings of T5X's models, but not
        ``rel_embedding``.
      codec: codec of the tables' rows: a name, or any value that ``Tables`` accepts.
      slot_codec: codec of the slots' rows.
      options: options of the manager; this integration sets ``tracking``. ``max_to_keep`` or
        ``preservation_policy`` apply if T5X does not set ``keep``.
      wait: behavior of T5X's wait after each save. ``"deferred"`` returns immediately, so that
        training continues; ``"each"`` waits, as T5X's own manager does. See
        ``DeltaCheckpointManager.wait_until_finished``.

    Raises:
      OptionError: a setting has an invalid value.
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


#: One factory per distinct settings, for all calls of ``checkpoint_manager``.
_made: list[functools.partial[DeltaCheckpointManager]] = []


class DeltaCheckpointManager(checkpoints.OrbaxCheckpointManagerInterface):
    """T5X's checkpoint manager on top of ``deltackpt.CheckpointManager``.

    T5X creates it through the factory that ``checkpoint_manager`` returns. A training job takes the
    lease of ``<model_dir>/deltackpt`` at once. A job without a save configuration only reads: it
    takes no lease and writes nothing, so a concurrent trainer is not disturbed.

    It saves T5X's state dict with T5X's names, after the state transformations of the save
    configuration; ``target`` is cast to the configuration's ``dtype``.

    Checkpoints that T5X wrote are left unchanged and are restored by T5X's code. A run can resume
    from one with deltackpt; its first save is then a base.

    In a multi-process job, each process creates one and calls it at the same points. ``all_steps``
    and ``latest_step`` are local to each process; process 0 chooses the step to restore.
    """

    def __init__(
        self,
        directory: str,
        train_state: TrainState,
        partitioner: Partitioner,
        dataset_iterator: object = None,
        save_dtype: DTypeLike | None = None,
        restore_dtype: DTypeLike | None = None,
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
        """Takes T5X's arguments. Does not call T5X's own constructor, which would open Orbax.

        Args:
          directory: T5X's model directory, or one of its checkpoints to read.
          train_state: T5X train state with abstract leaves.
          partitioner: T5X's partitioner.
          dataset_iterator: data iterator whose position is saved and restored with the state.
          save_dtype: dtype of ``target`` in the checkpoints; None keeps the state's dtype.
          restore_dtype: dtype of the restored ``target``; None keeps the checkpoint's dtype.
          keep: how many of the newest steps to keep, or of the best with
            ``metric_name_to_monitor``.
          period: steps between two saves, used by ``should_save`` only. A job with neither
            ``period`` nor ``save_dtype`` only reads.
          checkpoint_steps: not used; T5X's loop handles them.
          keep_dataset_checkpoints: not used; each data position is part of its step.
          force_keep_period: also keeps the steps that are multiples of it.
          metric_name_to_monitor: ``<folder>/<tag>`` of a TensorBoard summary below the model
            directory; keeps the best steps instead of the newest.
          metric_mode: whether the largest or the smallest value is best.
          keep_checkpoints_without_metrics: also keeps steps without a value.
          settings: the settings of ``checkpoint_manager``.

        Raises:
          UnsupportedRoot: the directory is not in a file system.
          OptionError: both T5X and the options specify which steps to keep, or there are deltackpt
            steps that T5X did not see.
          ProcessFailed, ProcessMissing: another process failed to create its manager, or did not
            call.
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
        self._processes = Coordinator(
            f"t5x:{self._links.model_dir}", settings.options.timeouts.processes_secs
        )
        self._newest_link = self._processes.from_process_0(
            "looking for checkpoints", lambda: max(self._links.steps(), default=None)
        )
        self._options = settings.options
        if keep is not None:
            if self._options.max_to_keep or self._options.preservation_policy:
                raise OptionError(
                    "options.max_to_keep, options.preservation_policy: expected neither together "
                    "with keep, force_keep_period or metric_name_to_monitor of T5X's save "
                    "configuration, found both; set one of them"
                )
            policies = ocp.checkpoint_managers
            kept = policies.LatestN(keep)
            if metric_name_to_monitor is not None:
                kept = BestByMetric(
                    model_dir=self._links.model_dir,
                    metric=metric_name_to_monitor,
                    mode=metric_mode,
                    keep=keep,
                    keep_without=keep_checkpoints_without_metrics,
                )
            if force_keep_period is not None:
                every = policies.EveryNSteps(force_keep_period)
                kept = policies.AnyPreservationPolicy([kept, every])
            self._options = dataclasses.replace(self._options, preservation_policy=kept)
        data_layout = partitioner.get_data_layout()
        self._handlers: dict[str, ocp.CheckpointHandler] = {}
        if dataset_iterator is not None:
            # Name and condition of T5X's own manager.
            self._handlers[_DATASET] = checkpoints.DatasetCheckpointHandler(
                f"train_ds-{data_layout.shard_id:03}-of-{data_layout.num_shards:03}",
                data_layout.is_first_host_in_replica_set,
            )
        #: The step in this directory at which this run's state is.
        self._at: int | None = None
        #: Whether no deltackpt step has a T5X name yet; the same on every process.
        self._unnamed = False
        self._writer: CheckpointManager | None = None
        if save_dtype is not None or period is not None:
            self._writer = self._open_writer()

    @property
    def directory(self) -> epath.Path:
        """T5X's model directory."""
        return epath.Path(self._links.model_dir)

    def all_steps(self) -> Sequence[int]:
        """Returns the committed deltackpt steps and T5X's own checkpoints, ascending."""
        return sorted({*self._committed(), *self._links.others()})

    def latest_step(self) -> int | None:
        """Returns the newest of ``all_steps``, or None."""
        return max(self.all_steps(), default=None)

    def should_save(self, step: int) -> bool:
        """Returns whether a save is due according to the save configuration's period."""
        step = naming.as_step(step)
        return step != self._at and step % (self._period or 1) == 0

    def save(
        self,
        train_state: TrainState,
        state_transformation_fns: Sequence[Transformation] = (),
        force: bool = True,
    ) -> bool:
        """Saves a train state; returns as soon as training may continue.

        The first save blocks until it is committed: before that, nothing may have a name that T5X
        would resume from. Later saves get their name first, so T5X finds them even if the process
        is killed. While an exception is being handled, as by T5X before a preemption, an earlier
        failed save only causes a warning, and this save blocks until it is committed.

        Args:
          train_state: T5X's train state.
          state_transformation_fns: those of T5X's save configuration; they must not change the
            tables' paths.
          force: whether to skip the ``should_save`` check.

        Returns:
          Whether a save was started. False if the step is already committed or was just restored,
          as when T5X stops early right after a save; the call waits for that save and repeats it if
          it failed.

        Raises:
          SaveFailed: an earlier background save failed; this one was captured.
          FencedError: another trainer has taken over the model directory.
        """
        step = naming.as_step(np.asarray(checkpoints.get_local_data(train_state.step)))
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
            if not isinstance(error.saved, Saved):
                self._at = None
                raise
            failure = error
        if first:
            self._wait(self._writer)
        self._at, self._newest_link, self._unnamed = step, step, False
        if self._keeps_names(self._writer):
            self._links.match([*self._committed(), step])
        if failure is not None:
            if not _handles_exception():
                raise failure
            self._wait(self._writer)
            events.warn(str(failure))
        return True

    def wait_until_finished(self) -> None:
        """Called by T5X after each periodic save, before training continues.

        With ``wait="deferred"`` it returns immediately; otherwise T5X would never train during a
        save. This is safe: a save in flight reads only its own buffers, or buffers that it protects
        from donation. T5X's evaluations use the live state. The next save or ``close()`` raises the
        error of a failed save. While an exception is being handled it does wait, because T5X's
        emergency save before a preemption calls it in an ``except`` block.

        Raises:
          SaveFailed: a background save failed.
        """
        if self._writer is None:
            return
        if self._settings.wait == "each" or _handles_exception():
            self._wait(self._writer)

    def close(self) -> None:
        """Waits for the save in flight and releases the directory.

        Raises:
          SaveFailed: a background save failed.
        """
        self._processes.close()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with contextlib.closing(writer):
            if not self._keeps_names(writer):
                return
            try:
                writer.wait_until_finished()
            finally:
                committed = self._committed()
                newest = max(committed, default=-1)
                # Creates no name: that would undo a rollback after which nothing was saved yet.
                # Above the newest step, a trainer that is just starting may have a save in flight.
                named = self._links.steps()
                self._links.match([step for step in named if step in committed or step > newest])

    def restore(
        self,
        step: int | None = None,
        path: str | None = None,
        fallback_state: Mapping[str, PyTree] | None = None,
        state_transformation_fns: Sequence[Transformation] = (),
        lazy_parameters: bool | None = False,
    ) -> TrainState:
        """Restores a train state, placed by the partitioner.

        If the newest step of its own model directory is requested, a trainer resumes from the
        newest intact step. It warns if that is a different one, because an interrupted save leaves
        a name behind. If an older step is requested, that step is restored, and the next save moves
        the later ones aside. Removing the newest names, which is how T5X users roll back, has the
        same effect.

        In a multi-process job process 0 chooses the step, and all processes fail if one cannot read
        its part.

        Args:
          step: step of the model directory; the newest if neither ``step`` nor ``path`` is given.
          path: ``<model_dir>/checkpoint_<step>``, of this model directory or another.
          fallback_state: state dict that provides leaves missing from the checkpoint.
          state_transformation_fns: called with the checkpoint's tree and this model's state dict.
            As in T5X's own manager, leaves have a shape and dtype, may be renamed or dropped, and
            only the remaining ones are read.
          lazy_parameters: not used (as in T5X's own manager).

        Returns:
          The train state.

        Raises:
          ValueError: both a step and a path were given.
          OptionError: a trainer rolls back to one of T5X's own checkpoints although later deltackpt
            steps exist.
          RestoreError: the step cannot be restored.
          ProcessFailed, ProcessMissing: another process failed, or did not call.
        """
        if step is not None and path is not None:
            raise ValueError("expected a step or a path, found both; pass one of them")
        step = None if step is None else naming.as_step(step)
        found_path, is_stock = self._processes.from_process_0(
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
            with self._processes.together(f"restoring the data position of step {chosen}"):
                self._restore_data(found)
        return self._train_state.restore_state(state)

    # Saving.

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
                    handlers={naming.EMBEDDINGS_ITEM: tables, **self._handlers},
                    options=self._options,
                )
            )
            steps = self._processes.from_process_0("naming steps", lambda: self._named(manager))
            if steps and self._newest_link is None:
                raise OptionError(
                    f"{self._links.model_dir}: expected a checkpoint_<step> for each step in "
                    f"{self._links.root.name}, found steps {steps} without one, so T5X did not "
                    "resume; the names exist now: start the job again"
                )
            self._unnamed = not steps
            stack.pop_all()
            return manager

    def _named(self, manager: CheckpointManager) -> list[int]:
        """The committed steps, after giving each a name."""
        steps = manager.all_steps()
        # Do not recreate a name that was removed to roll back.
        newest = self._links.newest_of(steps)
        self._links.match([step for step in steps if newest is None or step <= newest])
        return steps

    def _keeps_names(self, writer: CheckpointManager) -> bool:
        """Whether this process may change T5X's names: it holds the directory's lease."""
        if coordination.process_index() > 0:
            return False
        try:
            writer.check_lease()
        except FencedError:
            # The commit reports it to all processes.
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
        # A process that timed out may not know that process 0 has committed.
        committed = self._processes.from_process_0(
            "checking the last save", lambda: failure is None
        )
        if committed:
            self._at = at
        if failure is not None:
            outcome = "process 0 has committed it" if committed else "it is saved again"
            events.warn(f"{failure}; {outcome}")
        return committed

    def _wait(self, writer: CheckpointManager) -> None:
        """Waits for the save in flight; if it failed, its step may be saved again."""
        try:
            writer.wait_until_finished()
        except SaveFailed:
            self._at = None
            raise

    def _saved_form(
        self, train_state: TrainState, transformation_fns: Sequence[Transformation]
    ) -> dict[str, PyTree]:
        state = train_state.state_dict()
        if transformation_fns:
            # T5X's per-parameter record, which its functions receive and return.
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

    # Restoring: leaves by their '/'-joined paths.

    def _resumed(
        self, writer: CheckpointManager, step: int, transformation_fns: Sequence[Transformation]
    ) -> dict[str, Leaf]:
        """Leaves of a step of this run, from which the saving manager continues."""
        step, newest, later = self._processes.from_process_0(
            "choosing a step", lambda: self._goal(step)
        )
        if later:
            events.warn(
                f"{self._links.model_dir}: rolling back to step {step}, the newest with a "
                f"checkpoint_<step>; the later steps {later} have none and will be moved aside by "
                "the next save"
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
                f"{error}; in T5X: set checkpoint_manager.tables and save_dataset as in the run "
                "that saved, or start in another model directory"
            ) from error
        if restored is None:
            raise NoIntactStep(f"{self._links.root}: expected a committed step, found none")
        self._at = restored.step
        if restored.step != step:
            events.warn(
                f"checkpoint_{step} in {self._links.model_dir} is not the newest intact step; "
                f"resuming from step {restored.step}"
            )
        return chosen_values(chosen, stored, flat(restored.state))

    def _goal(self, step: int) -> tuple[int, bool, list[int]]:
        """Returns where to resume, whether that is the newest intact step, and the later steps."""
        committed = self._committed()
        newest = step == self._newest_link or step >= max(committed, default=step)
        named = self._links.newest_of(committed)
        later = [found for found in committed if named is not None and found > named]
        # There are later steps if the newest names were removed to roll back.
        if newest and named is not None and later:
            return named, False, later
        return step, newest, []

    def _checkpoint(self, step: int | None, path: str | None) -> tuple[str, bool]:
        """Returns the requested checkpoint's path, and whether T5X wrote it."""
        if path is None:
            step = max(self.all_steps(), default=0) if step is None else step
            path = os.fspath(self._links.model_dir / f"checkpoint_{step}")
        model_dir, number = checkpoints.get_step_from_checkpoint_dir(os.fspath(path))
        links = StepLinks(model_dir)
        is_stock = number in links.others() or not links.root.is_dir()
        if is_stock and self._is_own(links) and self._writer is not None:
            # Otherwise the run cannot continue from it.
            if above := [found for found in self._committed() if found > number]:
                raise OptionError(
                    f"{self._links.model_dir}: expected no deltackpt step after "
                    f"checkpoint_{number}, which T5X itself wrote, found {above}; resume from "
                    f"checkpoint_{above[-1]}, or move {self._links.root} away to roll back"
                )
        return os.fspath(path), is_stock

    def _is_own(self, links: StepLinks) -> bool:
        return links.model_dir.resolve() == self._links.model_dir.resolve()

    def _readable(self, links: StepLinks, step: int) -> int:
        """Returns the step, or the newest one if it is not committed yet."""

        def committed() -> int:
            # Another job may be writing.
            newest = inspect.open(links.root).newest
            return step if newest is None else min(step, newest)

        found = self._processes.from_process_0("choosing a step", committed)
        if found != step:
            events.warn(
                f"checkpoint_{step} in {links.model_dir} is not committed; reading step {found}"
            )
        return found

    def _restore_data(self, step: inspect.Step) -> None:
        if self._dataset_iterator is None:
            return
        with stored_saves.detect_removal(step.path):
            step.check_exists()  # It may be another save of the number since it was opened.
            self._check_position(step)
            # If a file is missing or altered, the iterator is not moved.
            files = stored_saves.read_save(step.path).head.files
            for damage in digests.check_step_files(
                step.path, files, wanted=lambda name: name.startswith(f"{_DATASET}/")
            ):
                raise damage
            [args] = self._items().values()
            self._handlers[_DATASET].restore(epath.Path(step.path / _DATASET), args)
        step.check_exists()

    def _check_position(self, step: inspect.Step) -> None:
        """Checks that a step holds the data position of the current number of processes."""
        if not (step.path / _DATASET).is_dir():
            step.check_exists()
            raise TemplateMismatch(
                f"{step.path}: expected a data position ({_DATASET}), found none; turn "
                "restore_dataset and save_dataset off to start from this step"
            )
        # T5X's file names. Any of them will do: every process must see the same, and not each has
        # its own.
        name = f"train_ds-*-of-{self._partitioner.get_data_layout().num_shards:03}"
        if coordination.process_count() > 1:
            name = f"process_*-of-{coordination.process_count()}/{name}"
        if not any((step.path / _DATASET).glob(f"{name}*")):
            step.check_exists()
            files = (step.path / _DATASET).rglob("train_ds-*")
            found = sorted({path.name.partition(".")[0] for path in files})
            raise TemplateMismatch(
                f"{step.path}: expected the data position as {name}, found "
                f"{', '.join(found) or 'none'}; start as many processes as saved it, or turn "
                "restore_dataset and save_dataset off to start from this step"
            )

    def _stored_leaves(self, step: int) -> dict[str, Leaf]:
        with self._processes.together(f"reading the contents of step {step}"):
            found = inspect.open(self._links.root).at(step)
            if self._dataset_iterator is not None:
                with stored_saves.detect_removal(found.path):
                    self._check_position(found)
            return leaves_of(found)

    def _newest_leaves(self) -> dict[str, Leaf]:
        """Lazy leaves of the newest step that every process can read."""
        steps = self._processes.from_process_0("listing steps", self._committed)
        for step in sorted(steps, reverse=True):
            try:
                return self._stored_leaves(step)
            except RestoreError as error:
                # restore_latest() reports what is wrong with it.
                if not error.another_step_may_do:
                    raise
        raise NoIntactStep(
            f"{self._links.root}: expected a readable step, found none; restore the directory from "
            "a backup, or start again in an empty model directory"
        )

    def _restore_stock(
        self,
        path: str,
        fallback_state: Mapping[str, PyTree] | None,
        transformation_fns: Sequence[Transformation],
    ) -> TrainState:
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
    """Whether the caller is in an ``except`` block, as T5X is before a preemption."""
    return sys.exc_info()[0] is not None
