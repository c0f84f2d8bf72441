# SPDX-License-Identifier: Apache-2.0
"""One process of a multi-process job that a test controls, stops and kills; see ``many.py``.

Run as a program, it is a fork server: it imports everything once, without starting a JAX backend,
and forks a process per line of JSON on stdin. Each process connects to its job's socket, executes
requests, a line of JSON each, and answers each with one line. No answer sent before a SIGKILL is
lost.

The state is a function of the step alone, so any process and the test can compute what a
checkpoint must hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
from flat_options import manager_options
from jax._src import distributed
from orbax.checkpoint import v1

import deltackpt
from deltackpt import manager, touched
from deltackpt.handlers import orbax_dense
from deltackpt.ledger.directory import Root
from deltackpt.options import Extents, Tiers, Timeouts
from deltackpt.resources import runtime
from deltackpt.restore import placing
from deltackpt.save import commit, exits, pending_save
from deltackpt.session import step_reader
from deltackpt.storage import batch, ocdbt, shard_writer, zarr_writer
from deltackpt.storage.posix import DirectFile, DurableDir

#: Row counts divisible by 8 devices, and widths divisible by 4. Every table is large enough that
#: each process writes a share of it, whatever the sharding.
ROWS = {"rows": 2400, "columns": 480, "replicated": 1600}
WIDTHS = {"rows": 8, "columns": 16, "replicated": 4}
KERNEL = (64, 16)
#: Rows of each table that a step changes.
BATCH = 48
SELECT = "tables/*"
SLOTS = {
    "tables/rows": {"accumulator": "slots/rows"},
    "tables/columns": {"moment": "slots/columns"},
}
#: Shardings of a state: axes by leaf, as in a PartitionSpec. A job trains with "trained". "turned"
#: shards every leaf along another axis or not at all; "cut" gives each device its own piece;
#: "whole" keeps columns together.
LAYOUTS: dict[str, dict[str, list[Any]]] = {
    "trained": {
        "tables/rows": ["x"],
        "slots/rows": ["x"],
        "tables/columns": [None, "y"],
        "slots/columns": [None, "y"],
        "tables/replicated": [],
        "dense/kernel": [None, "y"],
    },
    "turned": {
        "tables/rows": [None, "x"],
        "slots/rows": [],
        "tables/columns": ["y"],
        "slots/columns": ["y", "x"],
        "tables/replicated": [["x", "y"]],
        "dense/kernel": [["y", "x"]],
    },
    "whole": {"tables/rows": ["x"], "slots/rows": ["x"], "tables/columns": ["x"]},
    "cut": {
        "tables/rows": [["x", "y"]],
        "slots/rows": [["x", "y"]],
        "tables/columns": ["x", "y"],
        "slots/columns": ["x", "y"],
        "tables/replicated": [["x", "y"]],
        "dense/kernel": ["x", "y"],
    },
}
POLICIES = {
    "consecutive": deltackpt.policies.Consecutive,
    "one_shot": deltackpt.policies.OneShot,
    "intermittent": deltackpt.policies.Intermittent,
}
#: Heartbeat timeout, after which JAX itself would abort the processes.
_NEVER_SECS = 600
_HELD_SECS = 120.0
_PR_SET_PDEATHSIG = 1
_POLL_SECS = 0.005


def tables() -> deltackpt.Tables:
    """The tables of the state, with their slots."""
    return deltackpt.Tables(select=SELECT, slots=SLOTS)


# The state.


@dataclasses.dataclass(frozen=True)
class Model:
    """The training state at any step.

    Attributes:
      rows: table name to its rows at the start.
      grown: steps, and the row counts of tables from each of them on.
      batch: rows of each table that a step changes.
      reach: fraction of each table, from its first row on, that contains the changed rows.
      kernel: shape of the sharded dense leaf; None for ``KERNEL``, all of which changes.
        If it is given, a step changes few values.
      nan: whether a value of a slot is NaN, which equals no value.
    """

    rows: dict[str, int] = dataclasses.field(default_factory=lambda: dict(ROWS))
    grown: list[tuple[int, dict[str, int]]] = dataclasses.field(default_factory=list)
    batch: int = BATCH
    reach: float = 1.0
    kernel: list[int] | None = None
    nan: bool = False

    def rows_at(self, step: int) -> dict[str, int]:
        """Table name to its rows at a step."""
        rows = dict(self.rows)
        for first, more in self.grown:
            rows |= more if first <= step else {}
        return rows

    def changed(self, step: int) -> dict[str, np.ndarray]:
        """Table name to the rows that the step changes, each once."""
        rng = np.random.default_rng([1, step])
        found = {}
        for name, rows in self.rows_at(step).items():
            reach = int(rows * self.reach)
            found[name] = rng.choice(reach, min(reach, self.batch), replace=False, shuffle=False)
        return found

    def at(self, step: int) -> dict[str, Any]:
        """The state at a step, numpy leaves."""
        rows = self.rows_at(step)
        tables = {name: _initial(name, count) for name, count in rows.items()}
        slots = {
            "rows": np.zeros(rows["rows"], np.float32),
            "columns": np.zeros((rows["columns"], WIDTHS["columns"]), np.float32),
        }
        if self.nan:
            slots["rows"][-1] = np.nan
        for now in range(1, step + 1):
            rng = np.random.default_rng([2, now])
            for name, ids in self.changed(now).items():
                fresh = rng.standard_normal((len(ids), WIDTHS[name]), np.float32)
                tables[name][ids] = fresh
                if name in slots:
                    slots[name][ids] += fresh[:, 0] if name == "rows" else fresh
        rng = np.random.default_rng([3, step])
        dense = {
            "kernel": rng.standard_normal(KERNEL, np.float32),
            "bias": rng.standard_normal(KERNEL[1], np.float32),
        }
        if self.kernel is not None:
            dense["kernel"] = self._kernel(step)
        step_leaf = np.array(step, np.int32)
        return {"tables": tables, "slots": slots, "dense": dense, "step": step_leaf}

    def _kernel(self, step: int) -> np.ndarray:
        kernel = np.random.default_rng(3).standard_normal(self.kernel, np.float32)
        for now in range(1, step + 1):
            rng = np.random.default_rng([4, now])
            kernel.reshape(-1)[rng.integers(0, kernel.size, 50)] = rng.standard_normal()
        return kernel


def _initial(name: str, rows: int) -> np.ndarray:
    """The table before the first step; a larger table begins with the same rows."""
    rng = np.random.default_rng([0, sorted(WIDTHS).index(name)])
    return rng.standard_normal((rows, WIDTHS[name]), np.float32)


@dataclasses.dataclass(frozen=True)
class Place:
    """Placement of a state on the first devices of the job, a mesh of axes x and y.

    Attributes:
      mesh: its shape.
      layout: one of ``LAYOUTS``.
      across: the major axis, which spans processes.
      host: the leaves that are NumPy arrays, which every process has.
    """

    mesh: tuple[int, int]
    layout: str = "trained"
    across: str = "x"
    host: tuple[str, ...] = ()

    def sharding(self, name: str) -> jax.sharding.NamedSharding:
        """The sharding of a leaf, by its path."""
        devices = np.array(jax.devices()[: self.mesh[0] * self.mesh[1]])
        if self.across == "x":
            devices = devices.reshape(self.mesh)
        else:
            devices = devices.reshape(self.mesh[::-1]).T
        spec = (tuple(a) if isinstance(a, list) else a for a in LAYOUTS[self.layout].get(name, []))
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def placed(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state as global arrays; each process makes its own shards."""

        return jax.tree.map(
            lambda leaf, like: (
                leaf
                if isinstance(like, np.ndarray)
                else jax.make_array_from_callback(
                    leaf.shape, like.sharding, leaf.__getitem__, dtype=leaf.dtype
                )
            ),
            state,
            self.template(state),
        )

    def template(self, state: dict[str, Any]) -> dict[str, Any]:
        """The template to restore a state like this one into."""

        def place(path: Any, leaf: np.ndarray) -> Any:
            if _name(path) in self.host:
                return np.empty_like(leaf)
            sharding = self.sharding(_name(path))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map_with_path(place, state)


def _name(path: Any) -> str:
    return "/".join(key.key for key in path)


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first leaf whose shards in this process are not bit-identical to the expected ones."""
    if jax.tree.structure(found) != jax.tree.structure(expected):
        return f"expected {jax.tree.structure(expected)}, found {jax.tree.structure(found)}"
    for path, leaf in jax.tree.leaves_with_path(expected):
        other = functools.reduce(lambda node, key: node[key.key], path, found)
        pieces = [((...,), other)]
        if isinstance(other, jax.Array):
            pieces = [(shard.index, shard.data) for shard in other.addressable_shards]
        if other.shape != leaf.shape or other.dtype != leaf.dtype:
            return f"{_name(path)}: {other.dtype}{other.shape}, not {leaf.dtype}{leaf.shape}"
        for index, piece in pieces:
            if np.asarray(piece).tobytes() != leaf[index].tobytes():
                return f"{_name(path)} differs in {index}"
    return None


# One process.


class Link:
    """The socket to the test: lines of JSON, each sent atomically."""

    def __init__(self, name: str):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._lock = threading.Lock()

    def send(self, line: dict[str, Any]) -> None:
        """Sends a line."""
        with self._lock:
            self._socket.sendall(json.dumps(line).encode() + b"\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the requests of the test."""
        with self._socket.makefile("r") as lines:
            for line in lines:
                yield json.loads(line)


class Worker:
    """Handles requests: each names a public method and has its arguments as JSON."""

    def __init__(self, task: dict[str, Any], link: Link):
        self._task, self._link = task, link
        self._model = Model(**task["model"])
        self._manager: deltackpt.CheckpointManager | None = None
        self._place = Place((task["count"] * task["devices"], 1))
        self._step = 0
        self._state: dict[str, Any] = {}
        self._marks: touched.TouchState | None = None
        self._hides_marks = False

    def run(self) -> None:
        """Answers requests until the test closes the connection."""
        for line in self._link.lines():
            started = time.perf_counter()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                answer: dict[str, Any] = {"answer": line["do"]}
                try:
                    answer |= getattr(self, line.pop("do"))(**line) or {}
                except (Exception, KeyboardInterrupt) as error:
                    traceback.print_exc()
                    answer["error"] = _told(error)
            answer["warnings"] = [str(warning.message) for warning in caught]
            answer["secs"] = time.perf_counter() - started
            self._link.send(answer)

    # Requests.

    def lead(self, address: str) -> None:
        """Starts the job's coordinator outside of the job's processes."""
        task = self._task
        self._service = distributed._jax.get_distributed_runtime_service(
            address, task["count"], heartbeat_timeout=_NEVER_SECS, recoverable=True
        )

    def join(self, address: str, apart: bool = False) -> None:
        """Starts JAX with the other processes, and, unless ``apart``, the coordinator."""
        task = self._task
        if apart:
            service = mock.Mock(return_value=None)
            mock.patch.object(distributed._jax, "get_distributed_runtime_service", service).start()
        jax.config.update("jax_num_cpu_devices", task["devices"])
        if task["count"] > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.config.update("jax_enable_recoverability", True)
            jax.distributed.initialize(
                address,
                task["count"],
                task["process"],
                coordinator_bind_address=address if task["process"] == 0 else None,
                heartbeat_timeout_seconds=_NEVER_SECS,
            )
        assert jax.process_count() == task["count"]
        assert jax.device_count() == task["count"] * task["devices"]

    def open(
        self,
        root: str,
        processes_secs: float = 60.0,
        policy: str = "consecutive",
        bounds: dict[str, Any] | None = None,
        notes: bool = False,
        tiers: dict[str, Any] | None = None,
        dense: str = "whole",
        event_handlers: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        """Creates the manager.

        Args:
          root: its directory.
          processes_secs: timeout for other processes.
          policy: one of ``POLICIES``; ``bounds`` are its options.
          notes: whether steps have another item, with an Orbax handler.
          tiers: options of ``Tiers`` if the root is a bucket.
          dense: how deltas hold the dense leaves.
        """
        self._notes = notes
        handlers: dict[str, Any] = {"embeddings": tables()}
        if notes:
            handlers["notes"] = ocp.JsonCheckpointHandler()
        self._manager = deltackpt.CheckpointManager(
            root,
            handlers=handlers,
            options=manager_options(
                policy=POLICIES[policy](**bounds or {}),
                timeouts=Timeouts(processes_secs=processes_secs),
                tiers=None if tiers is None else _tiers(tiers),
                dense=deltackpt.Dense(deltas=dense),
                **options,
            ),
            event_handlers=event_handlers,
        )

    def limit(self, processes_secs: float) -> None:
        """Changes the timeout for other processes from the next save on."""
        timeouts = dataclasses.replace(
            self._manager.options.timeouts, processes_secs=processes_secs
        )
        run = self._manager._run
        run.options = dataclasses.replace(run.options, timeouts=timeouts)
        run.coordinator.timeout_secs = processes_secs

    def start(self, place: dict[str, Any], step: int = 0) -> None:
        """Sets the state of a step, with no row touched yet."""
        self._place, self._step = _place(place), step
        self._state = self._place.placed(self._model.at(step))
        self._marks = self._fresh()

    def train(self, to: int, forget: list[int] | None = None) -> None:
        """Trains up to step ``to``; the processes in ``forget`` lose the marks of these steps."""
        kept = self._marks
        while self._step < to:
            before = self._model.rows_at(self._step)
            self._step += 1
            if self._model.rows_at(self._step) != before:
                self._state = self._place.placed(self._model.at(self._step))
                self._marks = touched.grow(self._marks, self._tables())
            self._marks = _marked(self._marks, self._model.changed(self._step))
        self._state = self._place.placed(self._model.at(self._step))
        if jax.process_index() in (forget or ()):
            self._marks = kept

    def renew(self) -> None:
        """Resets the marks in mid-run."""
        self._marks = self._fresh()

    def copy(self, process: int) -> None:
        """Replaces the arrays of one process with new ones over the same shards."""
        if jax.process_index() == process:
            self._state = jax.tree.map(
                lambda leaf: jax.make_array_from_single_device_arrays(
                    leaf.shape, leaf.sharding, [shard.data for shard in leaf.addressable_shards]
                ),
                self._state,
            )

    def alter(self, process: int) -> None:
        """Changes an element of the dense leaves that one process holds."""

        def altered(leaf: jax.Array) -> jax.Array:
            shards = [np.array(shard.data) for shard in leaf.addressable_shards]
            if jax.process_index() == process:
                for shard in shards:
                    shard.flat[0] += 1
            devices = (shard.device for shard in leaf.addressable_shards)
            arrays = [jax.device_put(*pair) for pair in zip(shards, devices, strict=True)]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

        self._state["dense"] = jax.tree.map(altered, self._state["dense"])

    def hide_marks(self) -> None:
        """Stops passing a TouchState."""
        self._hides_marks = True

    def _given(self) -> touched.TouchState | None:
        hides = self._hides_marks or self._manager.options.deltas.tracking == "fingerprints"
        return None if hides else self._marks

    def next_save(self) -> dict[str, Any]:
        """Returns what the next save would be."""
        decision = self._manager.next_save(self._state, touched=self._given())
        return dataclasses.asdict(decision)

    def save(self, **arguments: Any) -> dict[str, Any]:
        """Saves the state."""
        if self._notes:
            arguments["items"] = {"notes": ocp.args.JsonSave({"step": self._step})}
        saved = self._manager.save(self._step, self._state, touched=self._given(), **arguments)
        return {"step": saved.step, "kind": saved.kind, "reason": saved.reason}

    def save_if_due(self) -> dict[str, Any]:
        """Saves the state if a save is due."""
        saved = self._manager.save_if_due(self._step, self._state, touched=self._given())
        return {"kind": saved and saved.kind, "step": saved and saved.step}

    def wait(self) -> dict[str, Any]:
        """Waits for the saves in flight."""
        return {
            "reports": [
                {
                    "step": report.step,
                    "kind": report.kind,
                    "reason": report.reason,
                    "rows": report.rows,
                    "bytes": report.bytes_written,
                    "tables": {
                        f"{table.table}:{table.field}": table.rows for table in report.tables
                    },
                }
                for report in self._manager.wait_until_finished()
            ]
        }

    def connect(self, address: str) -> None:
        """Joins a Ray cluster."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own warnings.
            import ray

        ray.init(address=address, log_to_driver=False)

    def disconnect(self) -> None:
        """Leaves the Ray cluster."""
        import ray

        ray.shutdown()

    def steps(self) -> dict[str, Any]:
        """The committed steps."""
        return {"steps": self._manager.all_steps()}

    def restore_latest(
        self, place: dict[str, Any] | None = None, like: int = 0, arrays: bool = False
    ) -> dict[str, Any]:
        """Restores the newest intact step and continues from it.

        The template is the state of step ``like``, abstract or as ``arrays`` (then a table may have
        grown); without a ``place`` there is none.
        """
        template = None
        if place is not None:
            state, where = self._model.at(like), _place(place)
            template = where.placed(state) if arrays else where.template(state)
        items = {"notes": ocp.args.JsonRestore()} if self._notes else None
        result = self._manager.restore_latest(template, items=items)
        if result is None:
            return {"step": None}
        assert not self._notes or result.items == {"notes": {"step": result.step}}
        return self._restored(result, place, like if arrays else None)

    def restore(
        self, step: int, place: dict[str, Any] | None = None, like: int = 0
    ) -> dict[str, Any]:
        """Restores a step and continues from it; arguments as for ``restore_latest``."""
        template = None if place is None else _place(place).template(self._model.at(like))
        return self._restored(self._manager.restore(step, template), place)

    def stock_save(self, root: str, api: str) -> None:
        """Saves the tables with our handler under a stock Orbax manager."""
        split = deltackpt.handlers.split(self._state, tables())
        embeddings = deltackpt.handlers.Embeddings(split=split, touched=self._marks)
        if api == "v0":
            with ocp.CheckpointManager(root) as saver:
                args = ocp.args.Composite(embeddings=deltackpt.handlers.DeltaSave(embeddings))
                saver.save(self._step, args=args)
        else:
            with _registered(), v1.training.Checkpointer(root) as saver:
                saver.save_checkpointables(self._step, {"embeddings": embeddings})

    def stock_load(self, root: str, api: str, place: dict[str, Any], step: int) -> dict[str, Any]:
        """Restores the tables with our handler under a stock Orbax manager."""
        split = deltackpt.handlers.split(_place(place).template(self._model.at(step)), tables())
        wanted = placing.AbstractEmbeddings(tables=split.fields)
        if api == "v0":
            with ocp.CheckpointManager(root) as saver:
                args = ocp.args.Composite(embeddings=deltackpt.handlers.DeltaRestore(wanted))
                found = saver.restore(step, args=args)["embeddings"]
        else:
            with _registered(), v1.training.Checkpointer(root) as saver:
                found = saver.load_checkpointables(step, {"embeddings": wanted})["embeddings"]
        expected = deltackpt.handlers.split(self._model.at(step), tables()).fields
        wrong = difference({name: dict(fields) for name, fields in found.fields.items()}, expected)
        return {"wrong": wrong, "kinds": [save.kind for save in found.chain]}

    def arm(self, at: str, action: str, after: int = 0) -> None:
        """Kills or stops this process at one of ``POINTS``, passing it ``after`` times first.

        The action "hold" blocks it until the test releases it.
        """
        left = iter([False] * after + [True])

        def reached() -> None:
            if not next(left, False):
                return
            self._link.send({"reached": at})
            if action == "hold":
                _await(Path(self._task["release"]))
            else:
                # To this thread: if another one received the signal, this one would run on.
                number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
                signal.pthread_kill(threading.get_ident(), number)

        POINTS[at](reached)

    def fault(self, at: str, number: int | None = 28) -> None:
        """Raises an OSError once at a point of a save or restore; None: a KeyboardInterrupt."""
        left = iter([True])

        def reached() -> None:
            if next(left, False):
                raise KeyboardInterrupt if number is None else OSError(number, os.strerror(number))

        POINTS[at](reached)

    def usurp(self, root: str) -> None:
        """Takes the lease of a directory, as a trainer that starts now would."""
        Root.open(root)

    def slow_renames(self, secs: float = 0.3) -> None:
        """Slows down renames, mainly those of a rollback."""
        real = DurableDir.publish

        def slowly(*arguments: Any) -> None:
            time.sleep(secs)
            real(*arguments)

        mock.patch.object(DurableDir, "publish", slowly).start()

    def read_alone(self, root: str, step: int) -> None:
        """Reads a step with a manager of this process alone."""
        options = deltackpt.ManagerOptions(access="read", multiprocess=False)
        with deltackpt.CheckpointManager(
            root, handlers={"embeddings": tables()}, options=options
        ) as reader:
            found = reader.restore(step).state
        assert difference(found, self._model.at(step)) is None

    def share(self, first: int) -> dict[str, Any]:
        """Bytes that base ``first`` and its deltas hold of the tables of this process's devices."""
        fields = deltackpt.handlers.split(self._state, tables()).fields
        changed = [self._model.changed(step) for step in range(first + 1, self._step + 1)]
        total = 0
        for name, arrays_ in fields.items():
            for array in arrays_.values():
                boxes = {str(shard.index): shard for shard in array.addressable_shards}
                for shard in boxes.values():
                    start, stop, _ = shard.index[0].indices(array.shape[0])
                    rows = stop - start
                    for ids in (found[name.removeprefix("tables/")] for found in changed):
                        rows += int(((ids >= start) & (ids < stop)).sum())
                    total += rows * shard.data.nbytes // (stop - start)
        return {"bytes": total}

    def close(self) -> None:
        """Closes the manager."""
        self._manager.close()

    def diverge(self) -> None:
        """Exits like a program whose main thread raised an exception while the manager was open."""
        threading._shutdown()  # As the interpreter does; we set the exit code.
        lost = isinstance(sys.stdout, exits._LastFlush)
        os._exit(exits.EXIT_CODE if lost else 1)

    def leave(self) -> None:
        """Shuts JAX down together with the other processes."""
        jax.distributed.shutdown()

    # The parts of an answer.

    def _fresh(self) -> touched.TouchState:
        return touched.init(self._tables())

    def _tables(self) -> dict[str, Any]:
        return {f"tables/{name}": table for name, table in self._state["tables"].items()}

    def _restored(
        self, result: Any, place: dict[str, Any] | None, grown: int | None = None
    ) -> dict[str, Any]:
        expected = self._model.at(result.step)
        if grown is not None:
            # Rows that the step does not have come from the template.
            for kind in ("tables", "slots"):
                for name, leaf in self._model.at(grown)[kind].items():
                    old = expected[kind][name]
                    expected[kind][name] = np.concatenate([old, leaf[len(old) :]])
        wrong = difference(result.state, expected)
        if place is not None:
            self._place, self._step = _place(place), result.step
            self._state = result.state
            # A run that continues with fingerprints needs no TouchState.
            self._marks = self._fresh() if result.touched is None else result.touched
        return {
            "step": result.step,
            "chain": result.chain,
            "wrong": wrong,
            "source": result.source,
            "bytes_read": result.bytes_read,
            "skipped": [[step, _told(error)] for step, error in result.skipped],
        }


def _tiers(given: dict[str, Any]) -> Tiers:
    extents = given.get("extents")
    return Tiers(**given | {"extents": None if extents is None else Extents(**extents)})


def _marked(marks: touched.TouchState, ids: dict[str, np.ndarray]) -> touched.TouchState:
    """Same as ``touched.mark``, whose compilation costs each process more than a whole save."""
    clock = int(marks.clock) + 1
    stamps = dict(marks.stamps)
    for name, rows in ids.items():
        old = stamps[f"tables/{name}"]

        def stamp(index: Any, old: jax.Array = old, rows: np.ndarray = rows) -> np.ndarray:
            start, stop, _ = index[0].indices(len(old))
            shards = [s.data for s in old.addressable_shards if s.index == index]
            # JAX may also ask a process without devices of the array.
            new = np.array(shards[0]) if shards else np.zeros(stop - start, old.dtype)
            new[rows[(rows >= start) & (rows < stop)] - start] = clock
            return new

        stamps[f"tables/{name}"] = jax.make_array_from_callback(
            old.shape, old.sharding, stamp, dtype=old.dtype
        )
    return marks._replace(clock=jax.numpy.int32(clock), stamps=stamps)


def _place(given: dict[str, Any]) -> Place:
    return Place(tuple(given["mesh"]), **{k: v for k, v in given.items() if k != "mesh"})


def _told(error: BaseException) -> dict[str, Any]:
    """An error and its causes as JSON."""
    # A TensorStore error may be its own cause.
    cause = None if error.__cause__ is error else error.__cause__
    return {
        "type": type(error).__name__,
        "text": str(error),
        "processes": list(getattr(error, "processes", ())),
        "cause": None if cause is None else _told(cause),
    }


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    context = v1.Context()
    context.checkpointables.registry = v1.handlers.local_registry()
    context.checkpointables.registry.add(deltackpt.handlers.DeltaCheckpointableHandler)
    with context:
        yield


# Points of a save.


def _await(path: Path) -> None:
    deadline = time.monotonic() + _HELD_SECS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(_POLL_SECS)


#: Replaces a function by one that calls the given hook.
Point = Callable[[Callable[[], None]], None]


def _around(owner: Any, name: str, chosen: Callable[..., bool], *, before: bool) -> Point:
    """Calls a hook before or after each call of a function with chosen arguments."""

    def arm(reached: Callable[[], None]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            if before and chosen(*arguments):
                reached()
            result = real(*arguments, **options)
            if not before and chosen(*arguments):
                reached()
            return result

        mock.patch.object(owner, name, call).start()

    return arm


def _before(owner: Any, name: str, argument: Any = None) -> Point:
    """Calls a hook before each call of a function, or each with an argument."""
    return _around(owner, name, lambda *all_: argument in (None, *all_), before=True)


def _after(owner: Any, name: str, argument: Any = None) -> Point:
    """Calls a hook after each call of a function, or each with an argument."""
    return _around(owner, name, lambda *all_: argument in (None, *all_), before=False)


def _each(*points: Point) -> Point:
    """Calls a hook at each of several points."""
    return lambda reached: [point(reached) for point in points] and None


def _publishes_step(_: DurableDir, source: Path, target: Path) -> bool:
    return target.name.isdecimal()


def _renames_step(source: str, target: str) -> bool:
    return target.isdecimal()


#: Points of a save at which a process can be stopped. Only process 0 passes those of the commit.
POINTS: dict[str, Point] = {
    "before its shard": _before(pending_save.PendingSave, "write"),
    "during its shard": _each(
        _after(zarr_writer.ZarrWriter, "_write_chunk"), _after(DirectFile, "write")
    ),
    "before its manifest": _before(shard_writer, "described"),
    "before a force": _before(batch.FileBatch, "force"),
    "after a force": _after(batch.FileBatch, "force"),
    "before its word": _before(commit.StepWriters, "report", "written"),
    "after its word": _after(commit.StepWriters, "report", "written"),
    "waiting for the shards": _before(commit.StepWriters, "wait", "written"),
    "waiting for the commit": _before(commit.StepWriters, "wait", "done"),
    "before the merge": _before(ocdbt, "merge"),
    "commit: digests": _before(commit, "_commit"),
    "commit: after the digests": _after(pending_save.PendingSave, "complete"),
    "commit: before the rename": _around(DurableDir, "publish", _publishes_step, before=True),
    "commit: between the rename and the fsync": _around(os, "rename", _renames_step, before=False),
    "commit: after the rename": _around(DurableDir, "publish", _publishes_step, before=False),
    "checking the options": _before(runtime.Runtime, "__init__"),
    "the end of a start": _after(manager, "Saver"),
    "snapshot": _before(pending_save, "capture"),
    "reading dense leaves": _before(step_reader.StepReader, "_read_dense"),
    "reading through Orbax": _before(orbax_dense, "from_folder"),
    "reading notes": _before(ocp.JsonCheckpointHandler, "restore"),
}


def _die_with_parent() -> None:
    """Asks Linux for a SIGKILL when the parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(task: dict[str, Any]) -> None:
    _die_with_parent()
    diagnosis = os.open(task["diagnosis"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(diagnosis, 1)
    os.dup2(diagnosis, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    try:
        link = Link(task["socket"])
        link.send({"process": task["process"]})
        Worker(task, link).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def serve() -> None:
    """Forks a process per task; reaps it only on request, so that its id is not reused."""
    # Each task sets its number of devices.
    os.environ.pop("XLA_FLAGS", None)
    _die_with_parent()
    for line in sys.stdin:
        order = json.loads(line)
        if "end" in order:
            _, status = os.waitpid(order["end"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                _child(order)
            answer = {"pid": pid}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve()
