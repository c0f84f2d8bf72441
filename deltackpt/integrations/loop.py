# SPDX-License-Identifier: Apache-2.0
"""Checkpointing for your own training loop: plain optax, Flax Linen, Flax NNX, with Grain data.

A step always holds the state, its tables and the data iterator's position at the same moment.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import jax

from deltackpt.coordination import Coordinator
from deltackpt.errors import OptionError, SaveFailed, chained
from deltackpt.events import EventHandler
from deltackpt.format import naming
from deltackpt.format.naming import PyTree
from deltackpt.handlers.iterators import (
    DataIterator,
    IteratorHandler,
    IteratorRestore,
    IteratorSave,
    move_to,
    position_of,
)
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.outcomes import Saved
from deltackpt.state import paths
from deltackpt.state.tables import Tables

#: The checkpoint item that holds the data iterator's position.
DATA_ITEM = "data"

State = TypeVar("State")


class LoopCheckpoints:
    """Resumes a training loop, and saves its state together with the data iterator's position.

    A state is any pytree of arrays, such as a dict or a ``TrainState``. It may contain Flax NNX
    objects (a ``Module``, an ``Optimizer``, ``Rngs``, a ``Variable``): their variables are saved,
    and ``resume`` writes them back into the same objects.

    Defaults are those of ``CheckpointManager``. ``tracking`` is ``"auto"``: a ``TouchState`` in the
    state is used if there is one, otherwise changed rows are found by their fingerprints.

    Step ``n`` is the state after ``n`` training steps. Use it as a context manager: leaving it
    waits for the saves in flight.

    Attributes:
      manager: the underlying ``CheckpointManager``, for less common operations.

    Examples:
      >>> import tempfile, jax.numpy as jnp
      >>> def train_step(state):
      ...     return {"emb": state["emb"].at[1].add(1.0), "bias": state["bias"] + 1.0}
      >>> def train(directory, steps):
      ...     state = {"emb": jnp.zeros((4, 2)), "bias": jnp.zeros(())}
      ...     with LoopCheckpoints(directory, tables=Tables(select="emb"), every_steps=2) as saves:
      ...         state, done = saves.resume(state)
      ...         for step in range(done + 1, steps + 1):
      ...             state = train_step(state)
      ...             saves.after_step(step, state)
      ...         saves.save(steps, state)
      ...     return done, float(state["bias"])
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     train(directory, 3), train(directory, 6)
      ((0, 3.0), (3, 6.0))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int,
        tables: Tables | None = None,
        data: DataIterator | None = None,
        options: ManagerOptions | None = None,
        event_handlers: tuple[EventHandler, ...] = (),
    ):
        """Opens a checkpoint directory.

        Args:
          directory: the checkpoint directory, created if it does not exist.
          every_steps: ``after_step`` saves at multiples of this number of steps.
          tables: which leaves of the state are embedding tables; by default those named
            ``embedding`` or ``embeddings`` with at least 4,096 rows.
          data: the iterator that the loop reads batches from, such as a Grain iterator. Each
            process has its own.
          options: options of the manager. ``DeltaOptions(tracking="touched")`` requires a
            ``TouchState``.
          event_handlers: receive save and restore events.

        Raises:
          OptionError: the options are invalid, or ``data`` has no position to save.
          UnsupportedRoot, ForeignDirectory, StorageError: the directory cannot be used.
        """
        if every_steps < 1:
            raise OptionError(f"every_steps: expected at least 1 step, found {every_steps}")
        if data is not None and not isinstance(data, DataIterator):
            raise OptionError(
                "data: expected an iterator with get_state() and set_state(), such as iter(...) "
                f"of a grain DataLoader or IterDataset, found a {type(data).__name__}"
            )
        self._data = data
        self._every_steps = every_steps
        #: Whether a coalesced save is pending: one was requested while another was in flight.
        self._save_pending = False
        #: The step that the loop resumed from or saved last.
        self._newest: int | None = None
        #: Whether the loop resumed there from a recovery point, which is not a step.
        self._is_point = False
        tables = Tables(select=paths.DEFAULT_SELECT) if tables is None else tables
        handlers: dict[str, object] = {naming.EMBEDDINGS_ITEM: tables}
        if data is not None:
            handlers[DATA_ITEM] = IteratorHandler()
        options = options or ManagerOptions()
        self.manager = CheckpointManager(
            directory, handlers=handlers, options=options, event_handlers=event_handlers
        )
        self._processes = Coordinator(
            f"loop:{os.fspath(directory)}", options.timeouts.processes_secs, alone=options.alone
        )

    def resume(self, state: State) -> tuple[State, int]:
        """Resumes from the newest intact step, if there is one; call it before the loop.

        Args:
          state: the initial state of a new run, which also provides the shardings. Its NNX objects
            are updated in place.

        Returns:
          The state and its number of completed training steps; the given state and 0 if no step was
          ever committed.

        Raises:
          NoIntactStep: steps were committed, but none is intact.
          TemplateMismatch: the newest step is intact but was saved from a different state, by a
            different number of processes, or with different data.
          FormatTooNew: it needs a newer deltackpt.
          ProcessFailed: another process failed to resume.
        """
        items = {} if self._data is None else {DATA_ITEM: IteratorRestore()}
        found = self.manager.restore_latest(_variables(state), items=items)
        if found is None:
            return state, 0
        if self._data is not None:
            with self._processes.together(f"resuming the data iterator of step {found.step}"):
                move_to(self._data, found.items[DATA_ITEM])
        self._newest, self._is_point = found.step, found.point is not None
        return _put_back(state, found.state), found.step

    def after_step(self, step: int, state: PyTree) -> Saved | None:
        """Saves a step if a save is due; call it after every training step.

        A save is due at every multiple of ``every_steps`` and when the platform has announced a
        preemption; in that case the call returns once the step is durable. With
        ``when_busy="coalesce"``, a pending save is also due as soon as the writer is free.
        Otherwise the call takes microseconds.

        Args:
          step: number of completed training steps. A plain int is cheapest; a JAX scalar blocks
            until it is computed.
          state: the state, with the structure that was given to ``resume``. The data position is
            the current one.

        Returns:
          What was saved; None if nothing was due.

        Raises:
          SaveFailed: an earlier background save failed; this one was captured.
          FencedError: another trainer has taken over the directory.
        """
        step = naming.as_step(step)
        due = step % self._every_steps == 0
        if self.manager.reached_preemption(step) or (self._save_pending and not due):
            return self._save(self.manager.save_if_due, step, state)
        return self._save(self.manager.save, step, state) if due else None

    def save(self, step: int, state: PyTree) -> Saved | None:
        """Saves a step now, unless it is already saved; call it after the loop.

        Its arguments are those of ``after_step``.

        Returns:
          What was saved; None if the step already existed.

        Raises:
          SaveFailed: an earlier background save failed; this one was captured, unless the error
            reports otherwise.
          FencedError: another trainer has taken over the directory.
        """
        step = naming.as_step(step)
        if step == self._newest and self._is_committed(step):
            return None
        saved = self._save(self.manager.save, step, state)
        if saved is not None and saved.kind is None:
            self.manager.wait_until_finished()
            saved = self._save(self.manager.save, step, state)
        return saved

    def _is_committed(self, step: int) -> bool:
        """Whether a captured step was committed, and neither rolled back nor deleted."""
        failed = False
        try:
            self.manager.wait_until_finished()
        except SaveFailed:
            failed = True

        def exists() -> bool:
            if failed or self.manager.resume_step != step:
                return False
            return self._is_point or step in self.manager.all_steps()

        # Listings can differ between processes.
        return self._processes.from_process_0(f"looking for step {step}", exists)

    def close(self) -> None:
        """Waits for the saves in flight and releases the directory.

        Raises:
          SaveFailed: a save failed in the background.
        """
        with contextlib.closing(self._processes):
            self.manager.close()

    def __enter__(self) -> LoopCheckpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with chained(error):
            self.close()

    def _save(self, how: Callable[..., Saved | None], step: int, state: PyTree) -> Saved | None:
        """Saves in one of the manager's ways, which are not called if nothing is due."""
        items = {}
        if self._data is not None:
            # On this thread and before the save begins: later the loop has taken more batches.
            items[DATA_ITEM] = IteratorSave(position_of(self._data))
        try:
            # Looking up the state takes a millisecond with nnx objects, so it happens only now.
            saved = how(step, _variables(state), items=items)
        except SaveFailed as error:
            if isinstance(error.saved, Saved):
                self._note(error.saved)
            raise
        self._note(saved)
        return saved

    def _note(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.kind is not None:
            self._newest, self._is_point = saved.step, False
        self._save_pending = (
            saved.kind is None and self.manager.options.writes.when_busy == "coalesce"
        )


def _variables(state: PyTree) -> PyTree:
    """The state with an ``nnx.State`` in place of each nnx object."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # no such object can exist where flax.nnx was never imported
        return state
    return jax.tree.map(
        lambda node: nnx.state(node) if isinstance(node, nnx.Pytree) else node,
        state,
        is_leaf=lambda node: isinstance(node, nnx.Pytree),
    )


def _put_back(state: State, found: PyTree) -> State:
    """``found``, like ``_variables(state)``, with the nnx objects of ``state``, updated."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return found
    in_place = (nnx.Pytree, nnx.Variable)

    def put(node: PyTree, restored: PyTree) -> PyTree:
        if not isinstance(node, in_place):
            return restored
        nnx.update(node, restored)
        return node

    return jax.tree.map(put, state, found, is_leaf=lambda node: isinstance(node, in_place))
