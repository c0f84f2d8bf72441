# SPDX-License-Identifier: Apache-2.0
"""Drives training processes that are killed, starved or cut off; see ``trainee.py``."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import surroundings
import trainee
from machine import required

from deltackpt.format import naming

HERE = Path(__file__).resolve().parent
#: A training process that sends no note for this long counts as hung.
SILENCE_SECS = 600


@dataclasses.dataclass
class Ended:
    """A training process that ended.

    Attributes:
      status: its exit code, negative for a signal.
      notes: its notes, in order.
      calls: the I/O calls below the root that it entered, by number: (call, path below the root).
    """

    status: int
    notes: list[dict[str, Any]]
    calls: dict[int, tuple[str, str]]

    def noted(self, kind: str) -> list[dict[str, Any]]:
        """The notes of one kind."""
        return [note for note in self.notes if note["note"] == kind]

    def last(self, kind: str, field: str) -> Any:
        """A field of the last note of a kind, or None."""
        found = self.noted(kind)
        return found[-1][field] if found else None


class Trainees:
    """A fork server that runs one training process at a time."""

    def __init__(self, directory: Path, program: str = "trainee.py"):
        """Starts the server.

        Args:
          directory: for the I/O shim and the logs.
          program: what the processes run; a file next to this one.
        """
        self.directory = directory
        self._diagnosis = directory / "diagnosis.txt"
        self._numbers = itertools.count()
        environment = {**os.environ, "LD_PRELOAD": str(_shim(directory)), "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        # Without the cache, a process spends most of the time before its first save compiling.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(directory / "compiled")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, task: str, root: Path, **what: Any) -> Ended:
        """Runs a task in a new process until it ends."""
        running = self.start(task, root, **what)
        for _ in running:
            pass
        return running.ended()

    def start(self, task: str, root: Path, **what: Any) -> Running:
        """Starts a task in a new process."""
        log = self.directory / f"calls.{next(self._numbers)}.txt"
        log.touch()
        line = {
            "task": task,
            "root": str(root),
            "log": str(log),
            "diagnosis": str(self._diagnosis),
            **what,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(line) + "\n")
        self._server.stdin.flush()
        return Running(self, log)

    def next_note(self) -> dict[str, Any]:
        """Waits for the next note."""
        try:
            return json.loads(self._lines.get(timeout=SILENCE_SECS))
        except queue.Empty:
            pytest.fail(f"a training process hangs\n{self.diagnosis()}")

    def diagnosis(self) -> str:
        """The end of what the processes wrote to stderr."""
        return self._diagnosis.read_text()[-4000:] if self._diagnosis.exists() else ""

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(SILENCE_SECS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._server.stdout is not None
        with self._server.stdout as stdout:
            for line in stdout:
                self._lines.put(line)


class Running:
    """A training process; iteration yields its notes as they arrive, until it ends."""

    def __init__(self, trainees: Trainees, log: Path):
        self._trainees = trainees
        self._log = log
        self._notes: list[dict[str, Any]] = []
        self._status: int | None = None
        self.pid: int = trainees.next_note()["pid"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._status is None:
            note = self._trainees.next_note()
            if note["note"] == "ended":
                self._status = note["status"]
            else:
                self._notes.append(note)
                yield note

    def end(self, kind: str, secs: float | None, action: Callable[[], None]) -> Ended:
        """Runs it until it ends; calls ``action`` ``secs`` after its first note of a kind."""
        timer: threading.Timer | None = None
        for note in self:
            if secs is not None and timer is None and note["note"] == kind:
                timer = threading.Timer(secs, action)
                timer.start()
        if timer is not None:
            timer.cancel()
            timer.join()
        return self.ended()

    def kill(self) -> None:
        """SIGKILL, unless it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        """Its status, notes and I/O calls, after it has ended."""
        assert self._status is not None
        calls = {}
        # A kill may tear the last line.
        for line in self._log.read_text().split("\n")[:-1]:
            number, call, *path = line.split(" ", 2)
            calls[int(number)] = (call, path[0] if path else "")
        self._log.unlink()
        return Ended(self._status, self._notes, calls)


class Encoded:
    """Allowed values of lossily encoded leaves, as the encoder reported them."""

    def __init__(self) -> None:
        #: (history, leaf) to digests.
        self._said: dict[tuple[str, str], set[str]] = {}

    def take(self, note: dict[str, Any]) -> None:
        """Records what an encoder reported."""
        for leaf, digest in note["leaves"].items():
            self._said.setdefault((note["history"], leaf), set()).add(digest)

    def check(self, note: dict[str, Any]) -> bool:
        """Checks restored leaves; returns whether any of them is inexact."""
        for leaf, digest in note["inexact"].items():
            said = self._said.get((note["history"], leaf), set())
            assert digest in said, (leaf, note, said)
        return bool(note["inexact"])


class Expected:
    """Allowed contents of each step of a directory, from the notes of its trainers.

    Attributes:
      waited_for: the newest step that a wait has confirmed and no rollback has removed.
      restored: how many restores were compared.
      inexact: how many of these had lossily encoded leaves.
    """

    def __init__(self) -> None:
        self.waited_for = 0
        self.restored = self.inexact = 0
        self._encoded = Encoded()
        #: Step to the histories that it may have.
        self._may_be: dict[int, set[str]] = {}

    def check(self, ended: Ended, standing: int) -> None:
        """Checks a process's restores against earlier notes, and records its own notes.

        Args:
          ended: a process that started after another was killed.
          standing: the newest committed step when it started.
        """
        begun = saved = None
        for note in ended.notes:
            kind = note["note"]
            if kind == "ready":
                assert note["step"] == standing >= self.waited_for, (note, standing, vars(self))
                assert note["skipped"] == 0, note
                assert not [left for left in note["leftovers"] if "orbax" in left], note
                self._may_be = {
                    step: found for step, found in self._may_be.items() if step <= standing
                }
            if kind in ("ready", "looked") and note["step"]:
                assert note["wrong"] is None, note
                assert note["history"] in self._may_be[note["step"]], (note, self._may_be)
                self.restored += 1
                self.inexact += self._encoded.check(note)
            elif kind == "encoded":
                self._encoded.take(note)
            elif kind == "removed":
                self.waited_for, self._may_be, saved = 0, {}, None
            elif kind == "failed":
                saved = None
            elif kind == "rolling":
                self.waited_for = min(self.waited_for, note["step"])
            elif kind == "begun":
                step, history = note["step"], note["history"]
                known = self._may_be.setdefault(step, set())
                begun = (step, history, history not in known)
                known.add(history)
            elif kind == "skipped":
                assert begun is not None
                if begun[2]:
                    self._may_be[begun[0]].remove(begun[1])
                begun = None
            elif kind == "saving":
                saved = begun
            elif kind == "waited" and saved is not None:
                self._may_be[saved[0]] = {saved[1]}
                self.waited_for = saved[0]


def draw_life(random_: random.Random, life: int, doings: int) -> dict[str, Any]:
    """Draws a task of a training process: its actions between start and end.

    Args:
      random_: source of randomness.
      life: number of the process in the directory, from 1.
      doings: how many actions it performs.
    """
    drawn: list[list[str | int]] = []
    kinds = ("save", "keep", "back", "init", "look", "roll", "save_if_due", "compact", "move")
    for doing in random_.choices(kinds, (8, 2, 2, 1, 2, 1, 1, 1, 1), k=doings):
        if doing in ("keep", "compact", "move"):
            drawn.append([doing])
        elif doing in ("look", "roll"):
            drawn.append([doing, random_.randrange(4)])
        else:
            # The number of steps decides if the clock of rolled-back marks passes the parent's.
            drawn.append([doing, random_.choice((1, 1, 2, 5))])
        if random_.random() < 0.5:
            drawn.append(["wait"])
    return {
        **draw_around(random_, drawn),
        "branch": 1000 * life,
        "when_busy": random_.choice(("wait", "wait", "skip", "coalesce")),
        "max_to_keep": random_.choice((1, 2, 2, 4)),
        "policy": random_.choice(("consecutive", "consecutive", "one_shot")),
        "bases": random_.choice(("periodic", "compacted")),
        "dense": draw_dense(random_),
        # A layer is one write, or many.
        "buffer_bytes": random_.choice((8 << 10, 64 << 10, 6 << 20)),
    }


def draw_around(
    random_: random.Random, doings: list[list[str | int]], *, log: bool = False
) -> dict[str, Any]:
    """Draws the surroundings of a life's calls, and whether its root is removed at the end."""
    gone = [["remove"]] if random_.random() < 0.05 else []
    return {"doings": [*doings, *gone], "surroundings": surroundings.draw(random_, log=log)}


def draw_dense(random_: random.Random, *, wal_blocks: bool = False) -> dict[str, Any]:
    """Draws options of ``Dense``; a life resumes from saves with other options.

    Args:
      random_: the source.
      wal_blocks: whether WAL records hold blocks, which a codec may then encode.
    """
    deltas = random_.choice(("whole", "blocks", "blocks", "blocks"))
    codec = random_.choice(("lossless", trainee.LOSSY, trainee.LOSSY))
    return {
        "deltas": deltas,
        "codec": codec if deltas == "blocks" or wal_blocks else "lossless",
        "max_error": trainee.MAX_ERROR,
        # Usually room for all leaves, sometimes only for some.
        "max_reference_bytes": random_.choice((1 << 30, 1 << 30, 30_000)),
    }


def phase(call: str, path: str) -> str:
    """Returns the phase of a save, a start or a removal in which it entered an I/O call.

    Args:
      call: the call, as the shim names it.
      path: its path below the root; for a rename, the new path.
    """
    top, _, below = path.lstrip("/").partition("/")
    if top.startswith("rolled-back"):
        return "rollback: later steps aside"
    if "-removed-" in top:
        return "removal: rename" if call == "rename" else "removal: collection"
    if top.startswith("compacted"):
        return "compaction"
    if top.startswith((".lease", "lease")) or not top:
        return "start: lease" if top else "commit: rename, fsync of the directory"
    if not below and call == "rename" and top.isdecimal():
        return "commit: rename, fsync of the directory"
    if top.isdecimal():
        return "removal: collection"
    item, _, inner = below.partition("/")
    if not below:
        return "step: temporary directory" if call == "mkdir" else "commit: fsync of the step"
    if call == "fsync":
        return "commit: fsync of the step"
    if item.startswith("embeddings"):
        if inner.startswith("layer."):
            return "tables: layer"
        if inner.startswith("shard."):
            return "tables: values and slots"
        return "tables: manifest and digests"
    if item.startswith("dense"):
        return "dense leaves"
    if "digests.step" in item:
        return "commit: digests of the step"
    return "step: Orbax's metadata"


PHASES = (
    "start: lease",
    "step: temporary directory",
    "step: Orbax's metadata",
    "tables: layer",
    "tables: values and slots",
    "tables: manifest and digests",
    "dense leaves",
    "compaction",
    "commit: digests of the step",
    "commit: fsync of the step",
    "commit: rename, fsync of the directory",
    "removal: rename",
    "removal: collection",
    "rollback: later steps aside",
)


#: Text in the shim's lines of a phase; one of a life's first such lines is of that phase.
MATCHES = {
    "start: lease": "lease.",
    "step: temporary directory": "mkdir /",
    "step: Orbax's metadata": "_CHECKPOINT_METADATA",
    "tables: layer": "/layer.",
    "tables: values and slots": "/values",
    "tables: manifest and digests": "/embeddings/manifest.",
    "dense leaves": "/dense/",
    "compaction": "/compacted/",
    "commit: digests of the step": "digests.step",
    "commit: fsync of the step": "fsync /",
    "commit: rename, fsync of the directory": "fsync \n",
    "removal: rename": f"rename /{naming.REMOVED}",
    "removal: collection": f"unlink /{naming.REMOVED}",
    "rollback: later steps aside": "rolled-back",
}


def put_back(root: Path, ended: Ended) -> None:
    """Moves a root back if a process left it moved, unless it was removed."""
    moved = trainee.moved_of(root)
    if ended.noted("removed"):
        for place in (moved, root):  # A power cut may have undone the removal.
            shutil.rmtree(place, ignore_errors=True)
    elif moved.exists():
        assert not root.exists(), [*root.rglob("*")]
        moved.rename(root)


class Outside:
    """Files outside the roots that links in the roots point to; none is ever removed."""

    def __init__(self, folder: Path):
        self._folder = folder
        # The same names as files that are removed below a root.
        for name in ("file", "1/embeddings/file", "embeddings/file"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        self._files = self._found()

    def plant(self, random_: random.Random, root: Path) -> None:
        """Half of the time, adds a link in a root at a path that is removed sooner or later."""
        run = f"{random_.getrandbits(128):032x}"
        places = [
            f"{naming.REMOVED}{run}",
            f"{naming.REMOVED}{run}/1",
            f"{naming.ROLLED_BACK}/{run}",
            f"{naming.COMPACTED}/3.{run}.tmp",
            f"{naming.COMPACTED}/3.{run}.tmp/embeddings",
            f"9000{naming.TEMPORARY}-{run}-0",
            f"9000{naming.TEMPORARY}-{run}-0/embeddings",
            *(f"{step}/{run}" for step in steps_in(root)[:1]),
        ]
        place = root / random_.choice(places)
        if random_.random() < 0.5 and root.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(self._folder)

    def check(self) -> None:
        """Checks that all of them exist, unchanged."""
        assert self._found() == self._files

    def _found(self) -> dict[str, str]:
        return {str(one): one.read_text() for one in self._folder.rglob("*") if one.is_file()}


@contextlib.contextmanager
def telling(*what: Any) -> Iterator[None]:
    """Adds the data that reproduces a failure to its message."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError("\n".join(map(str, [*what, error]))) from error


def raced(trainers: Sequence[Callable[[], None]], read: Callable[[threading.Event], int]) -> int:
    """Runs trainers at once, beside a reader until they are over; returns how much it read."""
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(trainers) + 1) as pool:
        reading = pool.submit(read, over)
        try:
            for done in [pool.submit(trainer) for trainer in trainers]:
                done.result()
        finally:
            over.set()
        return reading.result()


def steps_in(root: Path) -> list[int]:
    """The committed steps, from the directory listing."""
    return sorted(int(path.name) for path in root.glob("[0-9]*") if path.name.isdecimal())


def newest(root: Path) -> int:
    """The newest committed step, or 0."""
    return max(steps_in(root), default=0)


def _shim(directory: Path) -> Path:
    """Builds ``io_faults.c``."""
    required(shutil.which("gcc") is not None, "gcc is needed to build the I/O shim")
    built = directory / "io_faults.so"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(built),
        str(HERE / "io_faults.c"),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(built))
    return built
