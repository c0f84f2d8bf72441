# SPDX-License-Identifier: Apache-2.0
"""A training process that logs its steps, for harnesses that kill it; see ``trainee.py``.

What it notes is an account of *offers*: states of which it said, in this order, that they are to be
kept, by ``save()`` or by a full mark of ``log()``; and of those that were *acknowledged*. Whoever
starts after it must find an offer that is not older than the last acknowledged one.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Run as a program it stands beside the tests that it shares options with.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import trainee
from trainee import POLICIES, changed, difference, history_of, inexact, name, note

import deltackpt
from deltackpt import events
from deltackpt.errors import DeltackptError


def log_options(given: dict[str, Any]) -> deltackpt.LogOptions:
    """The options of a log, from JSON."""
    backend = deltackpt.LocalLog(**given.get("backend", {}))
    return deltackpt.LogOptions(
        backend=backend, **{k: v for k, v in given.items() if k != "backend"}
    )


class Logging(trainee.Training):
    """A loop that also logs."""

    def __init__(self, saver: deltackpt.CheckpointManager, root: Path, branch: int, ids: bool):
        super().__init__(saver, root, branch)
        self._ids = ids
        #: What was trained since the last log() that took something.
        self._unlogged: list[tuple[int, int]] = []

    def start(self) -> None:
        """Goes on from the newest step or point."""
        note("restoring")
        result = self._saver.restore_latest(trainee.template())
        found = {"step": 0, "wrong": None, "history": name(()), "items": None, "log": False}
        found["inexact"] = {}
        if result is not None:
            found = self._found(result)
            self._adopt(result)
        note("ready", **found)

    def train(self, steps: int) -> None:
        """Some steps, none of them logged."""
        for _ in range(steps):
            super().train(1)
            self._unlogged.append((self.step, self._branch))

    def log(self, steps: int = 1) -> None:
        """Trains, and logs each step."""
        for _ in range(steps):
            self.train(1)
            self._log()

    def union(self, steps: int = 1) -> None:
        """Trains, and logs all steps at once."""
        self.train(steps)
        self._log()

    def save(self, steps: int = 1) -> None:
        """Trains, and saves."""
        self.train(steps)
        self._offer("save")
        saved = self._saver.save(self.step, self._state(), touched=self.marks)
        if saved.kind is None:
            note("withdrawn", reason=saved.reason)
        else:
            note("taken", save=saved.kind)

    def wait(self) -> None:
        """Until all saves are committed."""
        self._saver.wait()
        note("acknowledged", by="wait")

    def wait_logged(self) -> None:
        """Until all marks are durable."""
        _acknowledge("wait_logged", self._saver.wait_logged())

    def look(self, which: int = 0) -> None:
        """Restores a step or a point, compares it, and goes on with what is in memory."""
        result = self._any(which)
        if result is not None:
            note("looked", **self._found(result))

    def roll(self, which: int = 0) -> None:
        """Goes on from an older step or point."""
        result = self._any(which)
        if result is not None:
            note("looked", **self._found(result))
            self._adopt(result)
            self._offer("roll")

    def _any(self, which: int) -> Any:
        standing: list[Any] = [*self._saver.all_steps(), *self._saver.points()]
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
        logged = self._saver.log(
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

    def _state(self) -> Any:
        return jax.device_put(self._replay.at(self.history))

    def _adopt(self, result: Any) -> None:
        super()._adopt(result)
        self._unlogged = []

    def _found(self, result: deltackpt.Restored) -> dict[str, Any]:
        return {
            "step": result.step,
            "wrong": difference(result.state, result.step, trainee.Replay()),
            "inexact": inexact(result.state, trainee.Replay()),
            "history": name(history_of(result.state)),
            "items": result.items.get("history"),
            "log": result.point is not None,
        }


def _acknowledge(by: str, found: deltackpt.LogPoint | int | None) -> None:
    if found is not None:
        step = found if isinstance(found, int) else found.step
        note("acknowledged", by=by, step=step)


def log(task: dict[str, Any]) -> None:
    """Goes on from the newest step or point, and does ``task["doings"]``."""
    root = Path(task["root"])
    trainee._arm(task, root)
    trainee.watch_encoders()
    with trainee.manager(
        root,
        policy=POLICIES[task.get("policy", "consecutive")](),
        dense=deltackpt.Dense(**task.get("dense", {})),
        retention=task.get("retention", 2),
        durability=task.get("durability", "power"),
        log=log_options(task.get("log_options", {})),
    ) as saver:
        training = Logging(saver, root, task["branch"], task.get("ids", False))
        training.start()
        for doing, *number in task["doings"]:
            getattr(training, doing)(*number)
    note("acknowledged", by="close")
    note("done", calls=trainee._calls())


class Noted:
    """Notes what is durable and what failed (``deltackpt.events.Sink``)."""

    def receive(self, event: events.Event) -> None:
        """A save or a batch ended, well or not; space is freed once one did not."""
        if isinstance(event, events.FailureEvent):
            trainee._shim_call("faults_disarm")
            note("failure", operation=event.operation, text=str(event))


def log_through_faults(task: dict[str, Any]) -> None:
    """Trains, saves and logs while an I/O call fails; then logs on, and restores."""
    root = Path(task["root"])
    trainee._arm(task, root)
    replay, marks, step = trainee.Replay(), trainee.new_marks(), 0
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
                    saver.wait()
                    note("acknowledged", by="wait", step=step)
                else:
                    logged = saver.log(step, state, touched=marks)
                    note("logged", mark=logged.kind, step=step, reason=logged.reason)
                if step % task["waits"] == 0:
                    _acknowledge("wait_logged", saver.wait_logged())
            except DeltackptError as error:
                trainee._refused(error)
        trainee._shim_call("faults_disarm")
        assert saver is not None, "a fault outlived its cause"
        note("last", step=step)
        with contextlib.suppress(DeltackptError):
            # A failure that nobody was told of yet, told now.
            saver.wait()
    with trainee.manager(root, access="read", log=log_options({})) as reader:
        result = reader.restore_latest(trainee.template())
        assert result is not None
        note("restored", step=result.step, wrong=difference(result.state, result.step, replay))


def _through_faults(root: Path, task: dict[str, Any]) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": deltackpt.Tables(select=trainee.SELECT, slots=trainee.SLOTS)},
        options=deltackpt.ManagerOptions(retention=2, log=log_options(task["log_options"])),
        sinks=(Noted(),),
    )


if __name__ == "__main__":
    tasks = {"log": log, "log_through_faults": log_through_faults}
    with mock.patch.object(trainee, "TASKS", tasks):
        trainee.serve()
