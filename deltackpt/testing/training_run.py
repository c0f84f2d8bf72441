# SPDX-License-Identifier: Apache-2.0
"""A training run that keeps an exact copy of the state of every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from deltackpt.events import EventHandler
from deltackpt.format.naming import PyTree
from deltackpt.manager import CheckpointManager
from deltackpt.options import ManagerOptions
from deltackpt.outcomes import Appended, Restored, Saved
from deltackpt.state.tables import Tables
from deltackpt.state.touch_state import TouchState
from deltackpt.testing import states


class TrainingRun:
    """A run of one process: a state, its steps, and managers of one checkpoint directory.

    Attributes:
      root: the checkpoint directory or URL.
      state: the state now.
      touched: its TouchState.
      step: number of steps so far.
      states: every step to the state that was trained, saved or appended there.
      manager: the newest manager; None before ``open``.

    Example:
      >>> import tempfile
      >>> run = TrainingRun(tempfile.mkdtemp())
      >>> with run.open():
      ...     _ = run.save()
      ...     run.save().kind
      'delta'
      >>> with run.open():
      ...     run.resume().step
      2
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        options: ManagerOptions | None = None,
        tables: Tables | None = None,
        state: PyTree = None,
        touched: TouchState | None = None,
        move: Callable[[PyTree, TouchState, int], tuple[PyTree, TouchState]] = states.train,
        event_handlers: Sequence[EventHandler] = (),
    ):
        """Starts a run at step 0.

        Args:
          root: checkpoint directory or URL.
          options: of managers that are opened without any.
          tables: which leaves of the state are tables (default: those of ``states.initial``).
          state: at step 0 (default: ``states.initial()``).
          touched: its TouchState, needed with another state.
          move: returns the state and the TouchState after a step, given both before it and its
            number.
          event_handlers: of every manager.
        """
        self.root = root
        self.state: PyTree = states.initial() if state is None else state
        self.touched: Any = states.new_touched(self.state) if touched is None else touched
        self.step = 0
        self.states: dict[int, PyTree] = {0: self.state}
        self.manager: Any = None
        self._options = options
        self._tables = tables or states.tables()
        self._move = move
        self._event_handlers = tuple(event_handlers)

    def open(
        self, options: ManagerOptions | None = None, *, tables: Tables | None = None
    ) -> CheckpointManager:
        """Opens a manager, which the methods below use from now on; close it with ``with``."""
        self.manager = CheckpointManager(
            self.root,
            handlers={"embeddings": tables or self._tables},
            options=options or self._options,
            event_handlers=self._event_handlers,
        )
        return self.manager

    def train(self, steps: int = 1) -> int:
        """Trains and returns the new step."""
        for _ in range(steps):
            self.step += 1
            self.state, self.touched = self._move(self.state, self.touched, self.step)
            self.states[self.step] = self.state
        return self.step

    def save_initial(self) -> None:
        """Saves step 0 and waits."""
        self.manager.save(0, self.state, touched=self.touched)
        self.manager.wait_until_finished()

    def save(self, *, wait: bool = True, **arguments: object) -> Saved:
        """Trains one step and saves it; ``arguments`` are those of ``CheckpointManager.save``."""
        saved = self.manager.save(self.train(), self.state, touched=self.touched, **arguments)
        if wait:
            self.manager.wait_until_finished()
        return saved

    def append(self, **arguments: object) -> Appended:
        """Trains one step and appends it to the write-ahead log."""
        return self.manager.append(self.train(), self.state, touched=self.touched, **arguments)

    def check(self, found: Restored) -> None:
        """Asserts that a restored state is the one of its step, bit for bit."""
        states.assert_same(found.state, self.states[found.step])

    def check_steps(self) -> list[int]:
        """Restores every committed step, checks it and returns all of them."""
        steps = list(self.manager.all_steps())
        for step in steps:
            self.check(self.manager.restore(step, self.state))
        return steps

    def resume(self) -> Restored:
        """Restores the newest step or recovery point, checks it and continues from there.

        Raises:
          AssertionError: nothing can be restored, or the state differs from the one of its step.
        """
        found = self.manager.restore_latest(self.state)
        assert found is not None, f"{self.root}: expected a step to restore, found none"
        self.continue_from(found)
        return found

    def continue_from(self, found: Restored) -> None:
        """Checks a restored state and continues training from it."""
        self.check(found)
        self.state, self.touched, self.step = found.state, found.touched, found.step
