# SPDX-License-Identifier: Apache-2.0
"""A training process that harnesses kill, cut off from its disk, or starve.

Run as a program, it is a fork server: it imports everything once, without starting a jax backend,
and forks a child per task, so a training process starts in a fraction of a second. Tasks arrive as
lines of JSON on stdin. Children write notes as lines of JSON on stdout; a SIGKILL loses no note
that was already written.

The state is a function of its history, the steps trained to reach it. Each rollback starts a new
branch. The state contains the history, and the harness gets it before each save: the expected
contents of a checkpoint are computed, not remembered.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# The options that it shares with the tests are in the parent directory.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flat_options import manager_options
from surroundings import Surroundings

import deltackpt
import deltackpt.manager  # Imports Orbax, which the package imports lazily.
from deltackpt import touched
from deltackpt.errors import (
    AlreadyCompacting,
    DeltackptError,
    SaveFailed,
    StepGone,
    StepNotFound,
)
from deltackpt.layers.write import LayerFile
from deltackpt.maintenance import compact
from deltackpt.save import dense_save
from deltackpt.save.block_codes import LeafDelta
from deltackpt.save.dense_save import DenseValue

TABLES = {"users": (4000, 16), "items": (600, 16), "tiny": (7, 4)}
#: Rows of each table that a step changes.
BATCH = 24
SELECT = "tables/*"
SLOTS = {f"tables/{name}": {"accumulator": f"slots/{name}"} for name in TABLES}
#: Leaves that some processes save with lossy codecs, and the maximum error of a save.
LOSSY = {"dense/weights": "ef4", "dense/mu": "int8", "dense/nu": "log4"}
MAX_ERROR = 0.05
POLICIES = {
    "consecutive": lambda: deltackpt.policies.Consecutive(max_chain=3),
    "one_shot": deltackpt.policies.OneShot,
    "intermittent": deltackpt.policies.Intermittent,
}
LOG_ONLY, KILL, FAIL_ONCE, FAIL_FROM = range(4)
#: Number of calls within which a missing root must raise an error.
_ENOUGH = 6


#: Runs of steps on one branch: first step, last step, branch.
History = tuple[tuple[int, int, int], ...]
_LONGEST_HISTORY = 256


def plain(step: int) -> History:
    """The history of a step without a rollback."""
    return ((1, step, 0),) if step else ()


def followed(history: History, step: int, branch: int) -> History:
    """A history extended by one step."""
    if history and history[-1][1:] == (step - 1, branch):
        return (*history[:-1], (history[-1][0], step, branch))
    return (*history, (step, step, branch))


def name(history: History) -> str:
    """A digest that identifies a history."""
    return hashlib.blake2b(json.dumps(history).encode(), digest_size=8).hexdigest()


class Replay:
    """Computes the training state after any history by replaying its steps."""

    def __init__(self) -> None:
        self._done: list[tuple[int, int]] | None = None
        self._state: dict[str, Any] = {}

    def at(self, history: History) -> dict[str, Any]:
        """A copy of the state, with numpy leaves."""
        steps = [
            (step, branch) for first, last, branch in history for step in range(first, last + 1)
        ]
        if self._done is None or self._done != steps[: len(self._done)]:
            self._start()
        assert self._done is not None
        for step, branch in steps[len(self._done) :]:
            self._advance(step, branch)
        self._done = steps
        state = jax.tree.map(lambda leaf: np.array(leaf), self._state)
        rows = np.array(history, np.int32).reshape(-1, 3)
        state["dense"]["history"] = np.zeros((_LONGEST_HISTORY, 3), np.int32)
        state["dense"]["history"][: len(rows)] = rows
        return state

    def _start(self) -> None:
        rng = np.random.default_rng(0)
        self._done = []
        self._state = {
            "tables": {
                name: rng.standard_normal(shape, np.float32) for name, shape in TABLES.items()
            },
            "slots": {name: np.zeros(rows, np.float32) for name, (rows, _) in TABLES.items()},
            "dense": {
                "kernel": np.zeros((64, 48), np.float32),
                "bias": np.zeros(48, np.float32),
                "frozen": rng.standard_normal((8, 256), np.float32),
                "half": np.zeros((10, 256), ml_dtypes.bfloat16),
                "weights": rng.standard_normal((10, 300), np.float32),
                "mu": np.zeros(600, np.float32),
                "nu": np.zeros(600, np.float32),
            },
            "step": np.array(0, np.int32),
        }

    def _advance(self, step: int, branch: int) -> None:
        rng = np.random.default_rng([step, branch])
        state = self._state
        for name, ids in changed(step, branch).items():
            state["tables"][name][ids] = rng.standard_normal((BATCH, TABLES[name][1]), np.float32)
            state["slots"][name][ids] += 1
        dense = state["dense"]
        for leaf in (dense["kernel"], dense["bias"]):
            leaf[...] = rng.standard_normal(leaf.shape, np.float32)
        # A few elements of one leaf, none of another, and optimizer-like updates of the others.
        dense["half"].reshape(-1)[rng.integers(0, dense["half"].size, 8)] = step + 1000 * branch
        dense["weights"] += 0.1 * rng.standard_normal(dense["weights"].shape, np.float32)
        gradient = rng.standard_normal(dense["mu"].shape, np.float32)
        dense["mu"] += np.float32(0.1) * (gradient - dense["mu"])
        dense["nu"] += np.float32(0.01) * (gradient * gradient - dense["nu"])
        state["step"] = np.array(step, np.int32)


def changed(step: int, branch: int = 0) -> dict[str, np.ndarray]:
    """Row indices that a step changes, by table."""
    rng = np.random.default_rng([step, branch, 1])
    return {name: rng.integers(0, rows, BATCH) for name, (rows, _) in TABLES.items()}


def history_of(found: Any) -> History:
    """The history stored in a state."""
    rows = np.asarray(found["dense"]["history"])
    return tuple((int(a), int(b), int(c)) for a, b, c in rows if b)


def difference(found: Any, step: int, replay: Replay) -> str | None:
    """The first leaf in which a state differs from that of its history; None if all are equal.

    Lossy leaves only have to be within the error limit of a save. Callers with the ``encoded``
    notes can also compare them with the encoder's output.
    """
    history = history_of(found)
    if not history or history[-1][1] != step:
        return f"step {step}: it holds that of {history}"
    for path, leaf in jax.tree.leaves_with_path(replay.at(history)):
        other = found
        for key in path:
            other = other[key.key]
        other = np.asarray(other)
        if _path(path) in LOSSY and (other.dtype, other.shape) == (leaf.dtype, leaf.shape):
            if np.linalg.norm(other - leaf) > 1.001 * MAX_ERROR * np.linalg.norm(leaf):
                return f"step {step}, {history}: {_path(path)} has lost more than it may"
        elif other.dtype != leaf.dtype or other.tobytes() != leaf.tobytes():
            rows = np.flatnonzero((other != leaf).reshape(len(leaf), -1).any(1)) if leaf.ndim else 0
            return f"step {step}, {history}: {jax.tree_util.keystr(path)} differs in rows {rows}"
    return None


def inexact(found: Any, replay: Replay) -> dict[str, str]:
    """Digests of the lossy leaves that differ from those of the state's history."""
    expected = replay.at(history_of(found))
    digests = {}
    for path in LOSSY:
        group, leaf = path.split("/")
        data = np.asarray(found[group][leaf]).tobytes()
        if data != expected[group][leaf].tobytes():
            digests[path] = digest(data)
    return digests


def digest(data: bytes) -> str:
    """A digest of a leaf's bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _path(path: Any) -> str:
    return "/".join(key.key for key in path)


def watch_encoders() -> None:
    """Makes saves note the decoded values of lossy leaves before writing them."""
    real = dense_save.encode

    def encode(values: Sequence[DenseValue], *arguments: Any, **options: Any) -> list[LeafDelta]:
        found = [*real(values, *arguments, **options)]
        chunks: dict[str, dict[int, np.ndarray]] = collections.defaultdict(dict)
        for value, delta in zip(values, found, strict=True):
            decoded = dataclasses.replace(value, data=np.asarray(delta.decoded))
            # Leaves are sharded by their first axis.
            number = value.key.rpartition("/")[2].partition(".")[0]
            chunks[value.leaf][int(number) if number.isdecimal() else 0] = decoded.array
        leaves = {
            leaf: np.concatenate([pieces[number] for number in sorted(pieces)])
            if len(pieces) > 1
            else pieces[0]
            for leaf, pieces in chunks.items()
        }
        held = {path: digest(leaves[path].tobytes()) for path in LOSSY}
        history = history_of({"dense": {"history": leaves["dense/history"]}})
        note("encoded", history=name(history), leaves=held)
        return found

    dense_save.encode = encode


def manager(root: Path, **options: Any) -> deltackpt.CheckpointManager:
    """A manager for the trainee's state."""
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": deltackpt.Tables(select=SELECT, slots=SLOTS)},
        options=manager_options(**options),
    )


def template() -> dict[str, Any]:
    """The state's structure."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), Replay().at(()))


def note(kind: str, **what: Any) -> None:
    """Sends a note to the harness, in a single write so that it is complete or absent."""
    os.write(1, (json.dumps({"note": kind, **what}) + "\n").encode())


def new_marks(surroundings: Surroundings) -> touched.TouchState:
    """A new TouchState, created as in a training loop."""
    tables = surroundings.placed(Replay().at(()))["tables"]
    with surroundings.entered():
        return touched.init({f"tables/{name}": table for name, table in tables.items()})


def moved_of(root: Path) -> Path:
    """The path of a root while it is moved away."""
    return root.with_name(f"{root.name}.moved")


class Training:
    """A training loop that runs commands and notes what it does."""

    def __init__(self, saver: Any, root: Path, branch: int, surroundings: Surroundings):
        self._saver: deltackpt.CheckpointManager = surroundings.around(saver)
        self._surroundings = surroundings
        self._root = root
        self._replay = Replay()
        self._mark = jax.jit(touched.mark)
        #: Each rollback starts a new branch.
        self._branch = branch
        self.step = 0
        self.history: History = ()
        self.marks = new_marks(surroundings)
        self._kept = (self.history, self.marks)
        #: Identity of the TouchState of the newest save, or of the restore that was resumed from.
        self._known = touched.UNKNOWN
        #: The step that ``look`` has restored since.
        self._looked: int | None = None

    def start(self, leftovers: list[str]) -> None:
        """Resumes from the newest step."""
        note("restoring")
        result = self._saver.restore_latest(self.template())
        if result is not None:
            found = self._found(result)
            self._adopt(result)
        else:
            found = {"step": 0, "wrong": None, "history": name(()), "inexact": {}}
        skipped = len(result.skipped) if result is not None else 0
        note("ready", **found, leftovers=leftovers, skipped=skipped)
        self.keep()

    def template(self) -> Any:
        """The abstract state for a restore."""
        return self._surroundings.abstract(Replay().at(()))

    def train(self, steps: int) -> None:
        """Trains some steps."""
        for _ in range(steps):
            self.step += 1
            self.history = followed(self.history, self.step, self._branch)
            ids = changed(self.step, self._branch)
            self.marks = self._mark(self.marks, {f"tables/{key}": ids[key] for key in ids})

    def save(self, steps: int = 1) -> None:
        """Trains, and saves."""
        self.train(steps)
        self._save(self._saver.save)

    def save_if_due(self, steps: int = 1) -> None:
        """Trains, and saves if a save is due."""
        self.train(steps)
        self._save(self._saver.save_if_due)

    def wait(self) -> None:
        """Waits until all saves are committed."""
        self._saver.wait_until_finished()
        note("waited")

    def keep(self) -> None:
        """Remembers the state and its TouchState."""
        self._kept = (self.history, self.marks)

    def back(self, steps: int = 1) -> None:
        """Resumes from the remembered state, as after a NaN loss."""
        self.history, self.marks = self._kept
        self._branch += 1
        self.save(steps)

    def init(self, steps: int = 1) -> None:
        """Starts a new TouchState, as at each epoch."""
        self.marks = new_marks(self._surroundings)
        self.save(steps)

    def look(self, which: int = 0) -> None:
        """Restores a step, compares it, and continues with the state in memory."""
        self._restored(which)

    def roll(self, which: int = 0) -> None:
        """Continues from an older step."""
        result = self._restored(which)
        if result is not None:
            self._adopt(result)
            note("rolling", step=self.step)
            self.save()

    def compact(self) -> None:
        """Compacts the newest chain into a base, while a save may be in flight."""
        with (
            self._surroundings.entered(),
            contextlib.suppress(AlreadyCompacting, StepGone, StepNotFound),
        ):
            done = compact.compact(self._root)
            note("compacted", step=done and done.step)

    def move(self) -> None:
        """Moves the root away and back; a save must succeed afterwards."""
        self._drain()
        self._root.rename(moved_of(self._root))
        self._must_fail()
        moved_of(self._root).rename(self._root)
        for _ in range(_ENOUGH):
            try:
                self.save()
                return self.wait()
            except DeltackptError:  # The failure is reported once.
                self._not_kept()
        raise AssertionError("a root that was moved back takes no save")

    def remove(self) -> None:
        """Removes the root for good."""
        self._drain()
        self._root.rename(moved_of(self._root))
        note("removed")
        while moved_of(self._root).exists():  # The manager still removes files, too.
            shutil.rmtree(moved_of(self._root), ignore_errors=True)
        self._must_fail()

    def _must_fail(self) -> None:
        """Checks that calls raise our errors and do not recreate the root."""
        for _ in range(_ENOUGH):
            try:
                self._call()
            except DeltackptError as error:
                note("refused", error=type(error).__name__, text=str(error))
                self._not_kept()
                break
        else:
            raise AssertionError("nothing was said of a root that is gone")
        assert not self._root.exists(), [*self._root.rglob("*")]

    def _drain(self) -> None:
        """Waits until nothing is in flight."""
        self.wait()

    def _call(self) -> None:
        """Makes a call that needs the root."""
        self.save()
        self.wait()

    def _not_kept(self) -> None:
        """Notes that the newest save has failed."""
        note("failed")

    def _save(self, save: Any) -> None:
        state = self._state()
        if self._looked is not None and int(self.marks.identity) != self._known:
            # A TouchState without a save does not show that the step was only restored by ``look``.
            note("rolling", step=self._looked)
        note("begun", step=self.step, history=name(self.history))
        saved = save(self.step, state, touched=self.marks)
        if saved is None or saved.kind is None:
            note("skipped", step=self.step)
        else:
            self._known, self._looked = int(self.marks.identity), None
            note("saving", step=self.step, save=saved.kind)

    def _state(self) -> Any:
        return self._surroundings.placed(self._replay.at(self.history))

    def _restored(self, which: int) -> Any:
        standing = self._saver.all_steps()
        if not standing:
            return None
        result = self._reached(standing[which % len(standing)])
        if result is not None:
            note("looked", **self._found(result))
            self._looked = result.step
        return result

    def _reached(self, step: Any) -> Any:
        """Restores a step or point; None if it was removed."""
        try:
            return self._saver.restore(step, self.template())
        except (StepGone, StepNotFound):  # Removed when the save in flight was committed.
            return None

    def _adopt(self, result: Any) -> None:
        self.step, self.history = result.step, history_of(result.state)
        self.marks = result.touched
        self._known, self._looked = int(self.marks.identity), None
        self._branch += 1

    def _found(self, result: deltackpt.Restored) -> dict[str, Any]:
        replay = Replay()
        return {
            "step": result.step,
            "wrong": difference(result.state, result.step, replay)
            or self._surroundings.misplaced(result.state),
            "history": name(history_of(result.state)),
            "inexact": inexact(result.state, replay),
        }


@contextlib.contextmanager
def around(task: dict[str, Any], **options: Any) -> Iterator[tuple[Any, Surroundings]]:
    """A manager created in the task's surroundings; its root may be removed before it closes."""
    surroundings = Surroundings(**task.get("surroundings", {}))
    if surroundings.context == "others":  # One of them logs everything that is compiled.
        logging.getLogger("jax").setLevel(logging.ERROR)
    with surroundings.entered():
        saver = manager(Path(task["root"]), **options)
    try:
        with saver:
            yield saver, surroundings
    except DeltackptError:
        if Path(task["root"]).exists():
            raise


def train(task: dict[str, Any]) -> None:
    """Resumes from the newest step, and runs ``task["doings"]``: (method of Training, number)."""
    root = Path(task["root"])
    _arm(task, root)
    watch_encoders()
    LayerFile.__init__.__kwdefaults__["buffer_bytes"] = task.get("buffer_bytes", 6 << 20)
    options = {
        "policy": POLICIES[task.get("policy", "consecutive")](),
        "bases": task.get("bases", "periodic"),
        "dense": deltackpt.Dense(**task.get("dense", {})),
        "max_to_keep": task.get("max_to_keep", 2),
        "durability": task.get("durability", "power"),
        "when_busy": task.get("when_busy", "wait"),
    }
    with around(task, **options) as (saver, surroundings):
        leftovers = [path.name for path in root.glob("*.orbax-checkpoint-tmp*")]
        training = Training(saver, root, task["branch"], surroundings)
        training.start(leftovers)
        for doing, *number in task["doings"]:
            getattr(training, doing)(*number)
    note("done", calls=_calls())


def suffer(task: dict[str, Any]) -> None:
    """Trains and saves while an I/O call fails; each failure must be one of ours."""
    replay, root = Replay(), Path(task["root"])
    mark = jax.jit(touched.mark)
    _arm(task, root)
    step = 0
    marks = new_marks(Surroundings())
    for life in range(2):
        # The second manager starts after the fault, with the TouchState of the first.
        try:
            with manager(
                root, max_to_keep=2, policy=deltackpt.policies.Consecutive(max_chain=3)
            ) as saver:
                for _ in range(task["saves"]):
                    step += 1
                    ids = {f"tables/{name}": rows for name, rows in changed(step).items()}
                    marks = mark(marks, ids)
                    state = jax.tree.map(jnp.asarray, replay.at(plain(step)))
                    try:
                        saver.save(step, state, touched=marks)
                        saver.wait_until_finished()
                        note("committed", step=step)
                    except DeltackptError as error:
                        _refused(error)
                        if isinstance(error, SaveFailed) and error.saved is not None:
                            # An earlier save failed late; this one succeeds.
                            saver.wait_until_finished()
                            note("committed", step=step)
        except DeltackptError as error:
            _refused(error)
            assert life == 0, "a fault outlived its cause"
            continue
        break
    _shim_call("faults_disarm")
    with manager(root, access="read") as reader:
        result = reader.restore_latest(template())
        assert result is not None
        wrong = difference(result.state, result.step, replay)
        note("restored", step=result.step, wrong=wrong, skipped=len(result.skipped))


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


TASKS = {"train": train, "suffer": suffer}


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
    """Forks a child per task, and reports its exit status."""
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
