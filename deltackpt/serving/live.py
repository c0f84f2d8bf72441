# SPDX-License-Identifier: Apache-2.0
"""The newest intact tables and dense leaves of a run, in this process's memory or on devices."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deltackpt.errors import (
    ClosedError,
    DeltackptError,
    MissingExtra,
    OptionError,
    ServiceUnavailable,
    WaitTimeout,
    without_frames,
)
from deltackpt.format.manifest import nested_at, path_name
from deltackpt.format.naming import PyTree
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.options import KafkaWal
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.serving.attach import SharedVersion
from deltackpt.serving.leaves import LeafReplica
from deltackpt.serving.row_changes import NO_ROWS, Changes
from deltackpt.serving.status import FollowerStatus, StatusServer, TableStatus
from deltackpt.serving.version import Position, PublishedState, Version, Versions
from deltackpt.serving.version_replica import TableChoice, VersionReplica
from deltackpt.standby.follower import RowReplica
from deltackpt.standby.tailer import Tailer

if TYPE_CHECKING:
    import jax


def jax_module() -> types.ModuleType:
    """Imports jax, which only this module needs, or raises ``MissingExtra``."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise MissingExtra(
            "serving: expected jax, found that it cannot be imported; install jax, or look up rows "
            "with version()"
        ) from error


def neutral() -> contextlib.AbstractContextManager[None]:
    """Returns ``state.placement.neutral()``, which imports jax."""
    return importlib.import_module("deltackpt.state.placement").neutral()


class DeviceRows:
    """All held rows of one table as one ``jax.Array``; an earlier one is donated.

    ``number`` is that of the version in the array; None before the first.
    """

    def __init__(self, sharding: object):
        self.number: int | None = None
        self.array: jax.Array | None = None
        self._sharding = sharding
        self._scatter: Callable[..., jax.Array] | None = None

    def put(self, number: int, rows: np.ndarray) -> jax.Array:
        """Transfers all rows; returns the array when they were read."""
        jax = jax_module()
        with neutral():
            devices = jax.device_put(rows[:0], self._sharding).devices()
            if any(device.platform == "cpu" for device in devices):
                # jax aliases the rows even with may_alias=False (jax issue 37830); they change in
                # place.
                rows = rows.copy()
            array = jax.block_until_ready(jax.device_put(rows, self._sharding))
            self.array, self.number = array, number
            self._scatter = jax.jit(_set_rows, donate_argnums=0, out_shardings=array.sharding)
        return array

    def change(self, number: int, at: np.ndarray, values: np.ndarray) -> jax.Array:
        """Replaces rows at unique positions; returns the array. ``put`` comes first."""
        # Sizes are powers of two, so that few programs are compiled; the rest is out of bounds.
        size = 1 << (max(1, len(at)) - 1).bit_length()
        array, scatter = self.array, self._scatter
        assert array is not None and scatter is not None
        padded = np.full(size, len(array), np.int32)
        padded[: len(at)] = at
        new_rows = np.zeros((size, *values.shape[1:]), values.dtype)
        new_rows[: len(at)] = values
        with neutral():
            # Donated: it is lost if this fails.
            self.array, self.number = None, None
            self.array, self.number = scatter(array, padded, new_rows), number
        return self.array


def _set_rows(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[at].set(values, mode="drop", unique_indices=False)


_logger = logging.getLogger(__name__)

#: Longest pause between attempts to read a checkpoint directory that fails.
_REST_SECS = 5.0
_STOP_SECS = 10.0
#: Between two checks of a consumer whether this object was closed.
_CHECK_SECS = 0.5
#: How long the methods of this module wait while rows change.
_OPEN_SECS = 30.0


class Staleness(NamedTuple):
    """How far a version lags behind training.

    Attributes:
      steps: number of training steps behind the newest committed step, intact or not, at the last
        poll.
      secs: seconds since the version's step was committed, or its recovery point appended.
      point: the version's recovery point; None for a step.
    """

    steps: int
    secs: float
    point: RecoveryPoint | None


class DeviceTable(NamedTuple):
    """The rows of a table on devices.

    Attributes:
      step: the training step.
      point: the recovery point; None for a step.
      array: ``jax.Array`` of the rows that this shard holds.
    """

    step: int
    point: RecoveryPoint | None
    array: jax.Array


class DeviceWeights(NamedTuple):
    """Dense leaves on devices.

    Attributes:
      step: the training step.
      point: the recovery point; None for a step.
      tree: ``jax.Array``s in nested dicts and lists, with the structure of the state.
    """

    step: int
    point: RecoveryPoint | None
    tree: PyTree


def follow(
    directory: str | os.PathLike[str],
    leaves: str | Sequence[str] = "**",
    *,
    tables: str | Sequence[str] = (),
    slots: str | Sequence[str] = (),
    shard: int = 0,
    shards: int = 1,
    wal: bool | KafkaWal = True,
    soft: bool = True,
    poll_secs: float | None = 1.0,
    reader_secs: float = 5.0,
    memory_bytes: int | None = None,
    item: str | None = None,
    endpoint: str | None = None,
) -> Live:
    """Follows the newest tables and dense leaves of a run.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL. It is only read.
      leaves: globs over the '/'-joined paths of the dense leaves, at least one of which must match;
        none for no dense leaves. ``*`` matches within a path component, ``**`` across components.
        Leaves that are not arrays, and arrays without elements, are ignored.
      tables: globs over the names of tables, or ends of names such as ``users``.
      slots: globs over the names of the tables' optimizer slots to hold; by default none.
      shard: which shard of the rows of each table to hold.
      shards: number of shards.
      wal: whether to also follow recovery points above the newest step; a ``KafkaWal`` if their
        records are in Kafka.
      soft: whether rows also follow WAL records without dense leaves; see ``Version.dense``.
      poll_secs: seconds between polls by a background thread; None polls only in ``advance``.
      reader_secs: how long the next version waits for readers of rows to close theirs.
      memory_bytes: maximum bytes of rows; by default, what the machine has.
      item: name of deltackpt's item in the steps; detected in the newest step by default.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Returns:
      A ``Live``, initially without a version; close it after use.

    Raises:
      OptionError: nothing is to be followed, or the shard does not exist.
      StorageError, ForeignDirectory, UnsupportedRoot: the directory cannot be used.
    """
    patterns, chosen, of_slots = _several(leaves), _several(tables), _several(slots)
    if not patterns and not chosen:
        raise OptionError("follow: expected leaves or tables to follow, found neither")
    if not 0 <= shard < shards:
        raise OptionError(f"follow: expected a shard in [0, {shards}), found {shard}")
    if reader_secs <= 0:
        raise OptionError(f"follow: expected positive reader_secs, found {reader_secs}")
    kafka = wal if isinstance(wal, KafkaWal) else None
    opened = open_steps(directory, item=item, endpoint=endpoint, wal=kafka, follow=True)
    tailer = Tailer(opened, opened.item, soft=soft and bool(chosen), wal=bool(wal))
    choice, rows = TableChoice(chosen, of_slots), None
    if chosen:
        rows = RowReplica(
            tailer,
            item=opened.item,
            shard=shard,
            shards=shards,
            choice=choice,
            with_files=False,
            reader_secs=reader_secs,
            memory_bytes=memory_bytes,
        )
    of_leaves = LeafReplica(opened.item, patterns) if patterns else None
    replica = VersionReplica(opened, tailer, of_leaves, rows, choice)
    return Live(str(directory), replica, tailer, poll_secs, opened)


class Live(Versions):
    """Provides the newest version of the followed tables and leaves. Every method is thread-safe.

    A reader never sees a mix of two versions. Rows change in place: they are in memory once, and a
    change waits for the open versions. Dense leaves never change: those that differ are in memory
    twice, and once more for each older version that is still referenced.

    Attributes:
      problem: why a version newer than the current one cannot be read, or None.
    """

    def __init__(
        self,
        directory: str,
        replica: VersionReplica,
        tailer: Tailer,
        poll_secs: float | None,
        opened: Steps,
    ):
        """Internal: call ``follow``."""
        super().__init__()
        self.problem: DeltackptError | None = None
        self._directory, self._replica, self._tailer = directory, replica, tailer
        self._root = opened
        self._newest: int | None = None
        self._shown: PublishedState | None = None
        self._shared: SharedVersion | None = None
        self._server: StatusServer | None = None
        self._consumers: weakref.WeakSet[Changes] = weakref.WeakSet()
        self._on_device: dict[str, tuple[object, jax.Array]] = {}
        self._tables_on_device: dict[tuple[str, object], DeviceRows] = {}
        self._advancing, self._placing = threading.Lock(), threading.Lock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if poll_secs is not None:
            self._thread = threading.Thread(
                target=self._follow, args=(poll_secs,), name="deltackpt-serving", daemon=True
            )
            self._thread.start()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def advance(self) -> bool:
        """Polls the checkpoint directory once and reads new steps and recovery points.

        Steps and recovery points that are not intact are skipped with a logged warning; the newest
        intact one becomes the current version.

        Returns:
          Whether the current version has changed.

        Raises:
          RestoreError: no step is intact; the current version stays.
          OptionError: the patterns match no dense leaf with elements, no table or no slot, or two
            matching leaves have the same path because a key contains a slash.
          TooLittleMemory: the rows do not fit.
          StorageError: the directory cannot be read; the current version stays.
          ClosedError: this object was closed.
        """
        with self._advancing:
            if self._closing.is_set():
                raise ClosedError("serving: expected an open Live, found it closed; call follow()")
            try:
                self._tailer.load_newest(self._replica)
            except DeltackptError as error:
                self._set_problem(without_frames(error))
                raise
            finally:
                changed = self._show()
                self._newest = self._tailer.newest_step()
            self._set_problem(self._tailer.problem)
            return changed

    def wait_ready(self, timeout_secs: float, step: int = 0) -> None:
        """Waits for a version.

        Args:
          timeout_secs: maximum time to wait, in seconds.
          step: minimum training step of the version.

        Raises:
          WaitTimeout: no such version appeared in time.
          OptionError: the newest step does not have the requested leaves.
          ClosedError: this object was closed while it waited.
        """
        end = time.monotonic() + timeout_secs
        with self._lock:
            while self._shown is None or self._shown.step < step:
                if self._closing.is_set():
                    raise ClosedError("serving: expected a version, found the Live closed")
                if isinstance(self.problem, OptionError):
                    raise self.problem  # Polling again cannot change the leaves of a step.
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    found = "none" if self._shown is None else f"step {self._shown.step}"
                    raise WaitTimeout(
                        f"serving: expected a version of at least step {step} within "
                        f"{timeout_secs:g} s, found {found}; "
                        f"{self.problem or 'wait for the next save, or check the trainer'}"
                    ) from self.problem

    def staleness(self) -> Staleness:
        """Returns how far the current version lags behind training, as of the last poll.

        Raises:
          ServiceUnavailable: no version is available yet.
        """
        shown = self._current()
        newest = shown.step if self._newest is None else self._newest
        secs = max(0.0, time.time() - shown.unix_secs)
        return Staleness(max(0, newest - shown.step), secs, shown.point)

    def changes(
        self,
        *,
        consumer: str = "changes",
        tables: str | Sequence[str] = "**",
        after: Position | None = None,
        batch_rows: int = 1 << 16,
        wait_secs: float | None = None,
    ) -> Changes:
        """Returns an endless iterator of the rows that change.

        Each consumer has its own position; a slow one delays neither versions nor other consumers.
        Without ``after``, or if training does not continue from it or its records were removed, the
        tables are sent whole first.

        Args:
          consumer: a name for ``status``.
          tables: globs over followed tables, or ends of their names.
          after: continue after this position, that of a complete batch. If this object has not
            seen the position, later changes are looked up in storage.
          batch_rows: maximum rows per batch.
          wait_secs: end the iteration if nothing new arrives for so long, in seconds; None waits
            until this object is closed.

        Raises:
          OptionError: no tables are followed, or ``batch_rows`` is not positive. The iterator
            raises it if no followed table matches.
        """
        self._require_tables("changes")
        if batch_rows < 1:
            raise OptionError(f"changes: expected at least 1 row per batch, found {batch_rows}")

        def opened() -> contextlib.AbstractContextManager[PublishedState | None]:
            return contextlib.nullcontext() if self._shown is None else self._opened(_OPEN_SECS)

        found = Changes(
            self._replica.changes,
            opened,
            lambda number: self._wait_for_other(number, wait_secs),
            self._replica.changed_between,
            consumer=consumer,
            tables=_several(tables),
            after=after,
            batch_rows=batch_rows,
        )
        with self._lock:
            self._consumers.add(found)
        return found

    def on_device(self, table: str, sharding: object = None) -> DeviceTable:
        """Returns the held rows of a table as a ``jax.Array`` of the newest version.

        The first call transfers all rows; later ones transfer only changed rows, and scatter them
        into the array. **This donates the array of the call before: use only the newest one.**

        Args:
          table: name of the table, or the end of exactly one name.
          sharding: a sharding or device; by default, the default device. Each one has an array.

        Raises:
          ServiceUnavailable: no version is available yet.
          OptionError: the table is not followed.
          VersionExpired: transferring all rows took longer than ``reader_secs``.
          MissingExtra: jax cannot be imported.
        """
        self._require_tables("on_device")
        with self._placing, self._opened(_OPEN_SECS) as shown:
            assert shown.rows is not None
            name = shown.rows.name_of(table)
            placed = self._tables_on_device.setdefault((name, sharding), DeviceRows(sharding))
            changed = None if placed.number is None else self._replica.changes.since(placed.number)
            array = shown.rows.array(name)
            if changed is None:
                placed_array = placed.put(shown.number, array)
                if not shown.is_current():
                    del self._tables_on_device[name, sharding]
                shown.check_current()
            else:
                at = changed.get(name, NO_ROWS) - shown.rows.tables[name].row_span[0]
                values = array[at]
                shown.check_current()
                placed_array = placed.change(shown.number, at, values)
            return DeviceTable(shown.step, shown.point, placed_array)

    def dense_on_device(self, shardings: object | Mapping[str, object] = None) -> DeviceWeights:
        """Returns the dense leaves as ``jax.Array``s; transfers only leaves that changed.

        Typed PRNG keys stay typed. The arrays are cached for the next call: do not donate
        them.

        Args:
          shardings: a sharding or device for all leaves, or a mapping from leaf paths to these; by
            default, the default device.

        Raises:
          ServiceUnavailable: no version is available yet.
          OptionError: no dense leaves are followed.
          MissingExtra: jax cannot be imported.
        """
        jax = jax_module()
        dense = Version(self._current(), self._count).dense
        with self._placing, neutral():
            placed: dict[str, tuple[object, jax.Array]] = {}
            for path in dense:
                sharding = shardings.get(path) if isinstance(shardings, Mapping) else shardings
                content = dense.content(path), dense.prng_impls.get(path), sharding
                known = self._on_device.get(path)
                if known is None or known[0] != content:
                    value = dense[path]
                    if (impl := dense.prng_impls.get(path)) is not None:
                        value = jax.random.wrap_key_data(value, impl=impl)
                    known = content, jax.device_put(value, sharding)
                placed[path] = known
            self._on_device = placed
        tree = nested_at((path, placed[path_name(path)][1]) for path in dense.paths)
        return DeviceWeights(dense.step, dense.point, tree)

    def share(self, path: str | os.PathLike[str]) -> None:
        """Lets other processes of this machine look up rows: they call ``attach(path)``.

        Args:
          path: file for the address of the memory; replaced.

        Raises:
          OptionError: no tables are followed.
          OSError: the file cannot be written.
        """
        self._require_tables("share")
        with self._lock:
            if self._shared is None:
                self._shared = SharedVersion()
            self._shared.publish(Path(path))
            if self._shown is not None:
                self._shared.write(self._shown)

    def status(self) -> FollowerStatus:
        """Returns the state of the follower, as the status page shows it."""
        shown, problem = self._shown, self.problem
        lag = None if shown is None else self.staleness()
        changed = self._replica.changes.changed_rows()
        rows, dense = (None, None) if shown is None else (shown.rows, shown.dense)
        newest, behind = 0 if shown is None else shown.number, dict[str, int]()
        with self._lock:
            for one in self._consumers:
                versions = max(0, newest - one.completed)
                behind[one.consumer] = max(versions, behind.get(one.consumer, 0))
        return FollowerStatus(
            directory=self._directory,
            position=None if shown is None else str(shown.position),
            step=None if shown is None else shown.step,
            newest_step=self._newest,
            age_secs=None if lag is None else lag.secs,
            versions=newest,
            problem=None if problem is None else str(problem),
            unix_secs=time.time(),
            tables={
                name: TableStatus(
                    rows=table.row_span[1] - table.row_span[0],
                    nbytes=table.nbytes,
                    looked_up=self._looked_up[name],
                    changed=changed.get(name, 0),
                )
                for name, table in ({} if rows is None else rows.tables).items()
            },
            dense_leaves=0 if dense is None else len(dense),
            dense_bytes=0 if dense is None else dense.nbytes,
            consumers=behind,
        )

    def serve_status(self, port: int = 0, host: str = "127.0.0.1") -> str:
        """Serves a web page, ``/status.json`` and Prometheus's ``/metrics`` until ``close``.

        A second call replaces the server.

        There is no authentication: bind only to addresses that you trust.

        Args:
          port: the port; 0 for any free one.
          host: the address to bind.

        Returns:
          URL of the page.

        Raises:
          OSError: the port is not available.
        """
        if self._server is not None:
            self._server.close()
        self._server = StatusServer(self.status, host, port)
        return self._server.url

    def close(self) -> None:
        """Stops following. Versions that are still referenced stay valid. Idempotent."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECS)
        self._root.close()
        if self._server is not None:
            self._server.close()
        with self._lock:
            self._changed.notify_all()

    def _require_tables(self, method: str) -> None:
        if not self._replica.has_tables:
            raise OptionError(f"{method}: expected followed tables, found none; pass tables=")

    def _show(self) -> bool:
        """Shows the held state to readers; returns whether it is another one."""
        shown = self._replica.shown
        if shown is None or shown is self._shown:
            return False
        with self._lock:
            if self._shared is not None:
                # Before the rows of the version before can be dropped.
                self._shared.write(shown)
            self._shown = shown
            self._changed.notify_all()
        return True

    def _current(self, end: float = 0.0) -> PublishedState:
        shown = self._shown
        if shown is None:
            problem = self.problem or "wait_ready() waits for the first"
            raise ServiceUnavailable(
                f"serving: expected a version, found none yet; {problem}"
            ) from self.problem
        return shown

    def _wait_for_other(self, number: int, wait_secs: float | None) -> bool:
        """Waits for another version; returns whether there is one."""
        end = None if wait_secs is None else time.monotonic() + wait_secs
        with self._lock:
            while self._shown is None or self._shown.number == number:
                left = _CHECK_SECS if end is None else min(_CHECK_SECS, end - time.monotonic())
                if self._closing.is_set() or left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _set_problem(self, problem: DeltackptError | None) -> None:
        if problem is not None and str(problem) != str(self.problem):
            _logger.warning("a newer version cannot be read: %s", problem)
        with self._lock:
            self.problem = problem
            self._changed.notify_all()

    def _follow(self, poll_secs: float) -> None:
        rest = 0.0
        while not self._closing.wait(rest):
            try:
                self.advance()
                rest = poll_secs
            except ClosedError:
                return
            except DeltackptError:
                # advance() has reported it; it may be fixed at a later poll.
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)
            except Exception as error:
                _logger.exception("cannot follow the checkpoint directory")
                self.problem = ServiceUnavailable(
                    "serving: expected to follow the checkpoint directory, found "
                    f"{type(error).__name__}: {error}; retrying"
                )
                self.problem.__cause__ = without_frames(error)
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
