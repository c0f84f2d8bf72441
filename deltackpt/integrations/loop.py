# SPDX-License-Identifier: Apache-2.0
"""Saves of a training loop of your own: plain optax, flax linen, flax nnx, with grain's data.

The state, its tables and the position of the data iterator are of one step, always.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax

from deltackpt.errors import OptionError, SaveFailed
from deltackpt.events import Sink
from deltackpt.format import names
from deltackpt.handlers.agreement import Processes
from deltackpt.handlers.iterators import (
    DataIterator,
    IteratorHandler,
    IteratorRestore,
    IteratorSave,
    move_to,
    position_of,
)
from deltackpt.manager import CheckpointManager
from deltackpt.options import DeltaOptions, ManagerOptions
from deltackpt.outcomes import Saved
from deltackpt.state.choice import Tables

#: The item of a step that holds the position of the data iterator.
DATA_ITEM = "data"

State = TypeVar("State")


class LoopCheckpoints:
    """Resumes a training loop, and saves its state together with the position of its data.

    A state is any pytree of arrays, such as a dict or a ``TrainState``. Wherever it holds flax nnx
    objects (a ``Module``, an ``Optimizer``, ``Rngs``, a ``Variable``), their variables are saved,
    and ``resume`` puts them back into the same objects.

    Step ``n`` is the state after ``n`` training steps. Use it as a context manager: leaving it
    waits for the saves in flight.

    Attributes:
      manager: the manager that saves, for everything that a loop needs seldom.

    Example:
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
        tables: Tables,
        every_steps: int,
        data: DataIterator | None = None,
        options: ManagerOptions | None = None,
        sinks: tuple[Sink, ...] = (),
    ):
        """Opens a directory.

        Args:
          directory: root of the steps; made where it does not exist.
          tables: which leaves of the state are embedding tables.
          every_steps: ``after_step`` saves the multiples of it.
          data: the iterator that the loop takes its batches from, such as one of grain's. Each
            process has its own.
          options: of the manager; by default the rows that changed are found by their
            fingerprints, which needs no line in the training step. Where the state holds a
            ``TouchState``, give ``DeltaOptions(tracking="marks")``.
          sinks: receivers of save and restore events.

        Raises:
          OptionError: the options cannot work, or ``data`` has no position to save.
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
        #: Whether the manager owes a save that came while another was in flight.
        self._owed = False
        #: The step that the loop resumed from or saved last.
        self._newest: int | None = None
        handlers: dict[str, Any] = {names.EMBEDDINGS_ITEM: tables}
        if data is not None:
            handlers[DATA_ITEM] = IteratorHandler()
        options = options or ManagerOptions(deltas=DeltaOptions(tracking="fingerprints"))
        self.manager = CheckpointManager(directory, handlers=handlers, options=options, sinks=sinks)
        self._processes = Processes(
            f"loop:{os.fspath(directory)}", options.timeouts.processes_secs, alone=options.alone
        )

    def resume(self, state: State) -> tuple[State, int]:
        """Goes on from the newest intact step, if there is one; call it before the loop.

        Args:
          state: the state that a new run begins with; its shardings are used. Its nnx objects are
            updated in place.

        Returns:
          The state, and how many training steps it has behind it: the state as it was given and 0
          where no step was ever committed.

        Raises:
          NoIntactStep: steps were committed and none is intact.
          TemplateMismatch: the newest step is intact and was saved from another state, by another
            number of processes, or with other data.
          FormatTooNew: it needs a newer deltackpt.
          ProcessFailed: another process could not go on.
        """
        items = {} if self._data is None else {DATA_ITEM: IteratorRestore()}
        found = self.manager.restore_latest(_variables(state), items=items)
        if found is None:
            return state, 0
        if self._data is not None:
            with self._processes.together(f"going on with the data of step {found.step}"):
                move_to(self._data, found.items[DATA_ITEM])
        self._newest = found.step
        return _put_back(state, found.state), found.step

    def after_step(self, step: int, state: Any) -> Saved | None:
        """Saves a step where a save is due; call it after every training step.

        A save is due at every multiple of ``every_steps``, at the step for which the platform has
        announced a preemption (the call then returns when the step is durable), and, with
        ``when_busy="coalesce"``, as soon as the writer is free. Otherwise the call costs
        microseconds.

        Args:
          step: how many training steps the state has behind it, an integer; a plain int costs
            least, a jax scalar is waited for.
          state: the state, in the form that was given to ``resume``; the position of the data is
            that of now.

        Returns:
          What was saved; None where nothing was due.

        Raises:
          SaveFailed: an earlier save failed in the background; this one was taken.
          FencedError: another trainer has taken over the directory.
        """
        step = names.as_step(step)
        due = step % self._every_steps == 0
        if self.manager.reached_preemption(step) or (self._owed and not due):
            return self._save(self.manager.save_if_due, step, state)
        return self._save(self.manager.save, step, state) if due else None

    def save(self, step: int, state: Any) -> Saved | None:
        """Saves a step now, unless it was saved already; call it after the loop.

        Args:
          step: as for ``after_step``.
          state: as for ``after_step``.

        Returns:
          What was saved; None where the step was there already.

        Raises:
          SaveFailed: an earlier save failed in the background; this one was taken, unless the
            error says otherwise.
          FencedError: another trainer has taken over the directory.
        """
        step = names.as_step(step)
        if step == self._newest and self._is_committed(step):
            return None
        saved = self._save(self.manager.save, step, state)
        if saved is not None and saved.kind is None:
            self.manager.wait()
            saved = self._save(self.manager.save, step, state)
        return saved

    def _is_committed(self, step: int) -> bool:
        """Whether a step that was taken has come to stay, and nobody has gone back behind it."""
        try:
            self.manager.wait()
        except SaveFailed:
            return False
        return self.manager.goes_on_from == step

    def close(self) -> None:
        """Waits for the saves in flight and gives the directory back.

        Raises:
          SaveFailed: a save failed in the background.
        """
        self.manager.close()

    def __enter__(self) -> LoopCheckpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _save(self, how: Callable[..., Saved | None], step: int, state: Any) -> Saved | None:
        """Saves in one of the manager's ways, which are not called where nothing is due.

        What is saved is looked up only now: it takes a millisecond with nnx objects.
        """
        items = {}
        if self._data is not None:
            # On this thread and before the save begins: later the loop has taken more batches.
            items[DATA_ITEM] = IteratorSave(position_of(self._data))
        try:
            saved = how(step, _variables(state), items=items)
        except SaveFailed as error:
            self._note(error.taken)
            raise
        self._note(saved)
        return saved

    def _note(self, saved: Any) -> None:
        if saved is None:
            return
        if saved.kind is not None:
            self._newest = saved.step
        self._owed = saved.kind is None and self.manager.options.writes.when_busy == "coalesce"


def _variables(state: Any) -> Any:
    """The state with an ``nnx.State`` in place of each nnx object."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # no such object can exist where flax.nnx was never imported
        return state
    return jax.tree.map(
        lambda node: nnx.state(node) if isinstance(node, nnx.Pytree) else node,
        state,
        is_leaf=lambda node: isinstance(node, nnx.Pytree),
    )


def _put_back(state: State, found: Any) -> State:
    """``found``, like ``_variables(state)``, with the nnx objects of ``state``, updated."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return found
    in_place = (nnx.Pytree, nnx.Variable)

    def put(node: Any, restored: Any) -> Any:
        if not isinstance(node, in_place):
            return restored
        nnx.update(node, restored)
        return node

    return jax.tree.map(put, state, found, is_leaf=lambda node: isinstance(node, in_place))
