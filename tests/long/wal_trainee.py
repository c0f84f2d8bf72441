# SPDX-License-Identifier: Apache-2.0
"""A training process that appends to a WAL, for harnesses that kill it; see ``trainee.py``.

It notes, in order, *offers* (states passed to ``save()``, or to ``append()`` as a full record) and
which of them were *acknowledged*. A later process must find an offer that is not older than the
last acknowledged one.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Run as a program, it shares options with tests in the parent directory.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import trainee
from surroundings import Surroundings
from trainee import POLICIES, changed, difference, name, note

import deltackpt
from deltackpt import events
from deltackpt.errors import DeltackptError
from deltackpt.save import tracking_audit
from deltackpt.wal import audit


def log_options(given: dict[str, Any]) -> deltackpt.WalOptions:
    """The options of a WAL, from JSON."""
    backend = deltackpt.wal.LocalWal(**given.get("backend", {}))
    return deltackpt.WalOptions(
        backend=backend, **{k: v for k, v in given.items() if k != "backend"}
    )


class Logging(trainee.Training):
    """A training loop that also appends to a WAL."""

    def __init__(self, saver: Any, root: Path, branch: int, surroundings: Surroundings, ids: bool):
        super().__init__(saver, root, branch, surroundings)
        self._ids = ids
        #: Steps trained since the last append() that wrote a record.
        self._unlogged: list[tuple[int, int]] = []

    def start(self) -> None:
        """Resumes from the newest step or point."""
        note("restoring")
        result = self._saver.restore_latest(self.template())
        found = {"step": 0, "wrong": None, "history": name(()), "items": None, "log": False}
        found["inexact"] = {}
        if result is not None:
            found = self._found(result)
            self._adopt(result)
        note("ready", **found)

    def train(self, steps: int) -> None:
        """Trains some steps and appends none."""
        for _ in range(steps):
            super().train(1)
            self._unlogged.append((self.step, self._branch))

    def log(self, steps: int = 1) -> None:
        """Trains and appends each step."""
        for _ in range(steps):
            self.train(1)
            self._log()

    def union(self, steps: int = 1) -> None:
        """Trains and appends all steps at once."""
        self.train(steps)
        self._log()

    def save(self, steps: int = 1) -> None:
        """Trains and saves."""
        self.train(steps)
        self._offer("save")
        saved = self._saver.save(self.step, self._state(), touched=self.marks)
        if saved.kind is None:
            note("withdrawn", reason=saved.reason)
        else:
            note("taken", save=saved.kind)

    def forget(self, steps: int = 1) -> None:
        """Saves, then appends steps whose rows are not marked: that saves a base instead."""
        self.save()
        self.wait()  # No point above this step is acknowledged, and so none is lost.
        kept = self.marks
        self.train(steps)
        self.marks = kept
        self._log()

    def wait(self) -> None:
        """Waits until all saves are committed."""
        self._saver.wait_until_finished()
        note("acknowledged", by="wait")

    def wait_appended(self) -> None:
        """Waits until all records are durable."""
        _acknowledge("wait_appended", self._saver.wait_appended())

    def look(self, which: int = 0) -> None:
        """Restores a step or a point and compares it, but keeps the state in memory."""
        result = self._any(which)
        if result is not None:
            note("looked", **self._found(result))

    def roll(self, which: int = 0) -> None:
        """Resumes from an older step or point."""
        result = self._any(which)
        if result is not None:
            note("looked", **self._found(result))
            self._adopt(result)
            self._offer("roll")

    def _any(self, which: int) -> Any:
        standing: list[Any] = [*self._saver.all_steps(), *self._saver.recovery_points()]
        return self._reached(standing[which % len(standing)]) if standing else None

    def _log(self) -> None:
        ids = None
        if self._ids:
            ids = {f"tables/{key}": [] for key in trainee.TABLES}
            for step, branch in self._unlogged:
                for key, rows in changed(step, branch).items():
                    ids[f"tables/{key}"].append(rows)
            ids = {key: jax.numpy.concatenate(rows) for key, rows in ids.items()}
        self._offer("log")
        logged = self._saver.append(
            self.step,
            self._state(),
            touched=self.marks,
            ids=ids,
            items={"history": name(self.history)},
        )
        saved = logged.saved is not None and logged.saved.kind is not None
        if logged.kind is not None:
            self._unlogged = []
        if logged.kind == "full" or saved:
            note("logged", reason=logged.reason)
        else:
            note("withdrawn", mark=logged.kind, reason=logged.reason)
        _acknowledge("recovery", logged.recovery)

    def _offer(self, by: str) -> None:
        note("offered", by=by, step=self.step, history=name(self.history))

    def _drain(self) -> None:
        self._saver.wait_appended()
        self.wait()

    def _call(self) -> None:
        self.log()
        self.wait_appended()

    def _not_kept(self) -> None:
        """Withdraws nothing: an offered state may exist or not."""

    def _adopt(self, result: Any) -> None:
        super()._adopt(result)
        self._unlogged = []

    def _found(self, result: deltackpt.Restored) -> dict[str, Any]:
        return {
            **super()._found(result),
            "items": result.items.get("history"),
            "log": result.point is not None,
        }


def _acknowledge(by: str, found: deltackpt.RecoveryPoint | int | None) -> None:
    if found is not None:
        step = found if isinstance(found, int) else found.step
        note("acknowledged", by=by, step=step)


def log(task: dict[str, Any]) -> None:
    """Resumes from the newest step or point and executes ``task["doings"]``."""
    root = Path(task["root"])
    trainee._arm(task, root)
    trainee.watch_encoders()
    if any(doing == "forget" for doing, *_ in task["doings"]):
        # Check every row, as in a state that is smaller than the sample.
        tracking_audit.ROWS, audit._ROWS, audit._EVERY = 1 << 20, 1 << 20, 1
    with trainee.around(
        task,
        policy=POLICIES[task.get("policy", "consecutive")](),
        dense=deltackpt.Dense(**task.get("dense", {})),
        max_to_keep=task.get("max_to_keep", 2),
        durability=task.get("durability", "power"),
        wal=log_options(task.get("log_options", {})),
    ) as (saver, surroundings):
        training = Logging(saver, root, task["branch"], surroundings, task.get("ids", False))
        training.start()
        for doing, *number in task["doings"]:
            getattr(training, doing)(*number)
    if root.exists():
        note("acknowledged", by="close")
    note("done", calls=trainee._calls())


class Noted:
    """Notes failures (``deltackpt.events.EventHandler``)."""

    def receive(self, event: events.Event) -> None:
        """Notes a failure and disarms the injected faults."""
        if isinstance(event, events.FailureEvent):
            trainee._shim_call("faults_disarm")
            note("failure", operation=event.operation, text=str(event))


def log_through_faults(task: dict[str, Any]) -> None:
    """Trains, saves and appends while an I/O call fails; then continues, and restores."""
    root = Path(task["root"])
    trainee._arm(task, root)
    replay, marks, step = trainee.Replay(), trainee.new_marks(Surroundings()), 0
    mark = jax.jit(deltackpt.touched.mark)
    with contextlib.ExitStack() as stack:
        saver = None
        for _ in range(task["steps"]):
            step += 1
            marks = mark(marks, {f"tables/{key}": rows for key, rows in changed(step).items()})
            state = jax.device_put(replay.at(trainee.plain(step)))
            try:
                if saver is None:
                    saver = stack.enter_context(_through_faults(root, task))
                if step % task["every"] == 1:
                    saver.save(step, state, touched=marks)
                    saver.wait_until_finished()
                    note("acknowledged", by="wait", step=step)
                else:
                    logged = saver.append(step, state, touched=marks)
                    note("logged", mark=logged.kind, step=step, reason=logged.reason)
                if step % task["waits"] == 0:
                    _acknowledge("wait_appended", saver.wait_appended())
            except DeltackptError as error:
                trainee._refused(error)
        trainee._shim_call("faults_disarm")
        assert saver is not None, "a fault outlived its cause"
        note("last", step=step)
        with contextlib.suppress(DeltackptError):
            # Raises a failure that was not reported yet.
            saver.wait_until_finished()
    with trainee.manager(root, access="read", wal=log_options({})) as reader:
        result = reader.restore_latest(trainee.template())
        assert result is not None
        note("restored", step=result.step, wrong=difference(result.state, result.step, replay))


def _through_faults(root: Path, task: dict[str, Any]) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": deltackpt.Tables(select=trainee.SELECT, slots=trainee.SLOTS)},
        options=deltackpt.ManagerOptions(max_to_keep=2, wal=log_options(task["log_options"])),
        event_handlers=(Noted(),),
    )


if __name__ == "__main__":
    tasks = {"log": log, "log_through_faults": log_through_faults}
    with mock.patch.object(trainee, "TASKS", tasks):
        trainee.serve()
