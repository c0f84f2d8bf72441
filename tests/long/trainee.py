# SPDX-License-Identifier: Apache-2.0
"""A training process that harnesses kill, cut off from its disk, or starve.

Run as a program it is a fork server: it imports everything once, without starting a jax backend,
and forks a child per task, so that a training process starts in a fraction of a second. Tasks
come as lines of JSON on stdin; children note what they know as lines of JSON on stdout, where
nothing that was noted before a SIGKILL is lost.

The state is a function of the step alone: what a checkpoint of a step must hold is computed, not
remembered.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import deltackpt
from deltackpt import layout, touched
from deltackpt.errors import DeltackptError, SaveFailed

TABLES = {"users": (4000, 16), "items": (600, 16), "tiny": (7, 4)}
#: Rows of each table that a step changes.
BATCH = 24
SELECT = "tables/*"
SLOTS = {f"tables/{name}": {"accumulator": f"slots/{name}"} for name in TABLES}
LOG_ONLY, KILL, FAIL_ONCE, FAIL_FROM = range(4)


class Replay:
    """The training state at any step, by replaying the steps before it."""

    def __init__(self) -> None:
        self._step = -1
        self._state: dict[str, Any] = {}

    def at(self, step: int) -> dict[str, Any]:
        """The state at a step, numpy leaves; a copy."""
        if step < self._step or self._step < 0:
            self._start()
        while self._step < step:
            self._advance()
        return jax.tree.map(lambda leaf: np.array(leaf), self._state)

    def _start(self) -> None:
        rng = np.random.default_rng(0)
        self._step = 0
        self._state = {
            "tables": {
                name: rng.standard_normal(shape, np.float32) for name, shape in TABLES.items()
            },
            "slots": {name: np.zeros(rows, np.float32) for name, (rows, _) in TABLES.items()},
            "dense": {"kernel": np.zeros((64, 48), np.float32), "bias": np.zeros(48, np.float32)},
            "step": np.array(0, np.int32),
        }

    def _advance(self) -> None:
        self._step += 1
        rng = np.random.default_rng(self._step)
        state = self._state
        for name, ids in changed(self._step).items():
            state["tables"][name][ids] = rng.standard_normal((BATCH, TABLES[name][1]), np.float32)
            state["slots"][name][ids] += 1
        state["dense"] = {
            name: rng.standard_normal(leaf.shape, np.float32)
            for name, leaf in state["dense"].items()
        }
        state["step"] = np.array(self._step, np.int32)


def changed(step: int) -> dict[str, np.ndarray]:
    """Rows that a step changes, by table."""
    rng = np.random.default_rng([step, 1])
    return {name: rng.integers(0, rows, BATCH) for name, (rows, _) in TABLES.items()}


def difference(found: Any, step: int, replay: Replay) -> str | None:
    """The first leaf in which a state differs from that of a step, None where none does."""
    for path, leaf in jax.tree.leaves_with_path(replay.at(step)):
        other = found
        for key in path:
            other = other[key.key]
        other = np.asarray(other)
        if other.dtype != leaf.dtype or other.tobytes() != leaf.tobytes():
            rows = np.flatnonzero((other != leaf).reshape(len(leaf), -1).any(1)) if leaf.ndim else 0
            return f"step {step}: {jax.tree_util.keystr(path)} differs in rows {rows}"
    return None


def manager(root: Path, **options: Any) -> deltackpt.CheckpointManager:
    """A manager for the trainee's state."""
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": deltackpt.Tables(select=SELECT, slots=SLOTS)},
        options=deltackpt.ManagerOptions(**options),
    )


def template() -> dict[str, Any]:
    """The state's structure."""
    return jax.tree.map(jnp.asarray, Replay().at(0))


def note(kind: str, **what: Any) -> None:
    """Tells the harness; one write, so that it is there in full or not at all."""
    os.write(1, (json.dumps({"note": kind, **what}) + "\n").encode())


def train(task: dict[str, Any]) -> None:
    """Goes on from the newest step, saves ``task["saves"]`` times."""
    replay, root = Replay(), Path(task["root"])
    _arm(task, root)
    options = {
        "policy": deltackpt.Consecutive(max_chain=3),
        "retention": task.get("retention", 2),
        "durability": task.get("durability", "power"),
    }
    with manager(root, **options) as saver:
        leftovers = [path.name for path in root.glob("*.orbax-checkpoint-tmp*")]
        leftovers += [path.name for path in root.glob(f"{layout.TRASH}/*/*")]
        result = saver.restore_latest(template())
        step = result.step if result is not None else 0
        wrong = difference(result.state, step, replay) if result is not None else None
        skipped = len(result.skipped) if result is not None else 0
        note("ready", step=step, wrong=wrong, leftovers=leftovers, skipped=skipped)
        marks = (
            result.touched
            if result is not None
            else touched.init(
                {f"tables/{name}": jnp.zeros(shape) for name, shape in TABLES.items()}
            )
        )
        mark = jax.jit(touched.mark)
        for number in range(task["saves"]):
            for _ in range(1 + number % 2):
                step += 1
                ids = {f"tables/{name}": rows for name, rows in changed(step).items()}
                marks = mark(marks, ids)
            state = jax.tree.map(jnp.asarray, replay.at(step))
            note("begun", step=step)
            saved = saver.save(step, state, touched=marks)
            note("saving", step=step, save=saved.kind)
            if number % task.get("wait_every", 1) == 0:
                saver.wait()
                note("committed", step=step)
    note("done", calls=_calls())


def suffer(task: dict[str, Any]) -> None:
    """Trains and saves while an I/O call fails; each failure must be one of ours."""
    replay, root = Replay(), Path(task["root"])
    mark = jax.jit(touched.mark)
    _arm(task, root)
    step = 0
    marks = touched.init({f"tables/{name}": jnp.zeros(shape) for name, shape in TABLES.items()})
    for life in range(2):
        # The second manager starts after the fault, with the marks of the first.
        try:
            with manager(root, retention=2, policy=deltackpt.Consecutive(max_chain=3)) as saver:
                for _ in range(task["saves"]):
                    step += 1
                    ids = {f"tables/{name}": rows for name, rows in changed(step).items()}
                    marks = mark(marks, ids)
                    state = jax.tree.map(jnp.asarray, replay.at(step))
                    try:
                        saver.save(step, state, touched=marks)
                        saver.wait()
                        note("committed", step=step)
                    except DeltackptError as error:
                        _refused(error)
                        if isinstance(error, SaveFailed) and error.taken is not None:
                            # An earlier save failed late; this one was taken.
                            saver.wait()
                            note("committed", step=step)
        except DeltackptError as error:
            _refused(error)
            assert life == 0, "a fault outlived its cause"
            continue
        break
    _shim_call("faults_disarm")
    with manager(root, read_only=True) as reader:
        result = reader.restore_latest(template())
        assert result is not None
        wrong = difference(result.state, result.step, replay)
        note("restored", step=result.step, wrong=wrong, skipped=len(result.skipped))


def evaluate(task: dict[str, Any]) -> None:
    """Restores the newest step in a loop, as a process beside the trainer does."""
    replay = Replay()
    until = time.monotonic() + task["secs"]
    with manager(Path(task["root"]), read_only=True) as reader:
        abstract = template()
        while time.monotonic() < until:
            result = reader.restore_latest(abstract)
            assert result is not None
            wrong = difference(result.state, result.step, replay)
            note("read", step=result.step, wrong=wrong, retries=len(result.skipped))


def _refused(error: DeltackptError) -> None:
    _shim_call("faults_disarm")
    note("refused", error=type(error).__name__, text=str(error))


def _shim_call(name: str) -> None:
    shim = _shim()
    if shim is not None:
        getattr(shim, name)()


def _shim() -> Any:
    shim = ctypes.CDLL(None)
    return shim if hasattr(shim, "faults_arm") else None


def _arm(task: dict[str, Any], root: Path) -> None:
    shim = _shim()
    if shim is not None and "log" in task:
        shim.faults_calls.restype = ctypes.c_long
        shim.faults_arm(
            str(root).encode(),
            task["log"].encode(),
            task.get("action", LOG_ONLY),
            ctypes.c_long(task.get("at", 0)),
            task.get("errno", 0),
            task.get("match", "").encode(),
        )


def _calls() -> int:
    shim = _shim()
    return 0 if shim is None else int(shim.faults_calls())


TASKS = {"train": train, "suffer": suffer, "evaluate": evaluate}


def _child(task: dict[str, Any]) -> None:
    diagnosis = os.open(task["diagnosis"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(diagnosis, 2)
    warnings.simplefilter("ignore")
    try:
        TASKS[task["task"]](task)
    except BaseException:
        traceback.print_exc()
        note("raised", error=traceback.format_exc().strip().splitlines()[-1])
        os._exit(1)
    os._exit(0)


def serve() -> None:
    """Forks a child per task, and says how each ended."""
    for line in sys.stdin:
        task = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(task)
        note("started", pid=pid)
        _, status = os.waitpid(pid, 0)
        note("ended", status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
