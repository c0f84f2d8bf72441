# SPDX-License-Identifier: Apache-2.0
"""Events: one for each save, restore, WAL append, upload and failure.

Each event is logged as one record of the logger ``deltackpt.events`` and passed to every event
handler of the manager. The record has the event and the index of the process as attributes
``event`` and ``process_index``, for filters and formatters.

Times are wall time in seconds, sizes are bytes. A stage that several threads work on lasts as long
as at least one of them works on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from deltackpt.errors import DeltackptError, MissingExtra
from deltackpt.format.manifest import Kind, LeafFigures, TableFigures

if TYPE_CHECKING:
    import prometheus_client

#: Operations that can fail.
Operation = Literal["save", "restore", "skip", "upload", "push", "append"]

_logger = logging.getLogger(__name__)
#: Files whose callers a warning points to: this package, and the module of its context managers.
_INNER = (os.path.dirname(__file__) + os.sep, contextlib.__file__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A committed save. Rows and bytes are those of this process's shard.

    Attributes:
      step: the training step.
      kind: ``"base"`` or ``"delta"``.
      reason: why the save is a base or a delta.
      process: index of the process.
      rows: rows written.
      total_rows: rows of all tables.
      bytes_written: bytes of tables and slots on disk, with their digests and manifest.
      ratio: ``bytes_written`` over the unencoded size of all rows.
      blocked_secs: how long ``save()`` blocked, including the wait for an earlier save.
      extract_secs: finding and copying the touched rows. It is part of ``blocked_secs``, except for
        rows that arrive from an accelerator in the background.
      room_secs: background wait for space in the staging directory (``Tiers.max_staging_bytes``); a
        ``save()`` during it waits too.
      encode_secs: background time during which at least one thread encoded rows; others may have
        written at the same time. Bases and large deltas read their rows from the training state in
        this time.
      write_secs: remaining time until the arrays were written: waiting for storage only. With
        ``encode_secs`` it is the whole time of encoding and writing.
      digest_secs: digests and manifest of the shard, except for process 0's manifest.
      commit_secs: from the last of these files, dense leaves included, to the commit: merging dense
        leaves, process 0's manifest, digests of the whole step, fsync, rename, and the wait for
        other processes.
      total_secs: from the call of ``save()`` to the commit. Time that is in no other field was
        spent on dense leaves and other items that took longer than the tables beside them.
      committed_unix_secs: time of the commit, in seconds since 1970. The event itself is emitted at
        the manager's next call.
      tables: figures of each table and slot with rows; not in the log line.
      dense_bytes: bytes on disk of the dense leaves in a delta's shard; 0 for a base. Not part of
        ``bytes_written``.
      dense: with ``Dense(deltas="blocks")``, figures of each of these leaves, whether it changed or
        not; not in the log line.
    """

    step: int
    kind: Kind
    reason: str
    process: int
    rows: int
    total_rows: int
    bytes_written: int
    ratio: float = 0.0
    blocked_secs: float = 0.0
    extract_secs: float
    room_secs: float = 0.0
    encode_secs: float
    write_secs: float
    digest_secs: float
    commit_secs: float = 0.0
    total_secs: float = 0.0
    committed_unix_secs: float = 0.0
    tables: tuple[TableFigures, ...] = ()
    dense_bytes: int = 0
    dense: tuple[LeafFigures, ...] = ()

    @property
    def dense_relative_error(self) -> float:
        """Returns the largest relative error of a dense leaf; 0 if all are lossless."""
        return max((figures.relative_error for figures in self.dense), default=0.0)

    @property
    def widened(self) -> tuple[LeafFigures, ...]:
        """Returns the dense leaves that were stored with another codec than requested."""
        return tuple(figures for figures in self.dense if figures.reason)

    @property
    def relative_error(self) -> float:
        """Returns the largest relative error of a table or slot; 0 if all are lossless."""
        return max((figures.relative_error for figures in self.tables), default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreEvent:
    """A restored step or recovery point.

    Attributes:
      step: the training step.
      process: index of the process.
      chain: the steps that were read, base first.
      source: source of the tables: ``"storage"`` or ``"service"``.
      bytes_read: bytes of tables and slots that this process read.
      find_secs: finding the chain and checking the step's files.
      read_secs: reading, verifying, decoding and merging, including dense leaves.
      place_secs: placing the state on devices, and restoring additional items.
      total_secs: the whole restore of this step.
    """

    step: int
    process: int
    chain: tuple[int, ...]
    source: str
    bytes_read: int
    find_secs: float
    read_secs: float
    place_secs: float
    total_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadEvent:
    """A save that was uploaded from the staging directory to the checkpoint directory.

    Attributes:
      step: the training step.
      process: index of the process.
      bytes_sent: bytes of its files.
      objects: number of objects written: the files, their digests and the journal entry.
      seconds: from the start of the upload to the commit in the bucket.
      lag_secs: from the commit in the staging directory to the commit in the bucket.
      committed_unix_secs: time of the commit in the bucket, in seconds since 1970.
      waiting: number of saves in the staging directory that are not uploaded yet.
      waiting_bytes: bytes of their files.
    """

    step: int
    process: int
    bytes_sent: int
    objects: int
    seconds: float
    lag_secs: float
    committed_unix_secs: float
    waiting: int
    waiting_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppendEvent:
    """A durable WAL record. Rows and bytes are those of this process.

    It is emitted at the manager's next call and logged at DEBUG, since each step may have one.

    Attributes:
      step: the training step.
      process: index of the process.
      kind: ``"full"`` (with dense leaves) or ``"soft"`` (rows only).
      rows: rows written.
      bytes_written: bytes of its record, including dense leaves.
      dense_bytes: bytes of dense leaves, as stored.
      blocked_secs: how long ``append()`` blocked.
      encode_secs: background time until its arrays were encoded; long ones are written meanwhile.
      write_secs: after that, until the operating system had accepted the record.
      sync_secs: the ``fdatasync`` that made it durable, shared by all waiting records.
      durable_secs: from the call of ``append()`` until it was durable.
      batches_in_sync: number of records that this ``fdatasync`` made durable.
      committed_unix_secs: when it became durable, in seconds since 1970.
    """

    step: int
    process: int
    kind: Literal["full", "soft"]
    rows: int
    bytes_written: int
    dense_bytes: int
    blocked_secs: float
    encode_secs: float
    write_secs: float
    sync_secs: float = 0.0
    durable_secs: float = 0.0
    batches_in_sync: int = 0
    committed_unix_secs: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureEvent:
    """A failed save, restore, append or upload. No touched row is lost.

    A wait that times out is not a failure, because the save continues.

    Attributes:
      step: the training step; None if no single step is meant, as for ``NoIntactStep``.
      process: index of the process.
      operation: ``"save"``; ``"restore"``; ``"skip"``: a restore skipped a damaged step,
        recovery point or journal object; ``"upload"``: the bucket is unreachable (uploads are
        retried) or a save cannot be uploaded; ``"push"``: a save cannot be copied to peers
        (retried); ``"append"``: WAL records could not be made durable, or processes lag far behind
        the others (reported by process 0 with the code ``wal-behind``).
      code: the error's ``code``, or the name of its class if it is not from deltackpt.
      message: the error's message.
      seconds: from the call of ``save()`` or of the restore until this event. A save that fails in
        the background is reported at the manager's next call.
    """

    step: int | None
    process: int
    operation: Operation
    code: str
    message: str
    seconds: float

    @classmethod
    def from_error(
        cls,
        error: Exception,
        operation: Operation,
        step: int | None,
        *,
        process: int,
        seconds: float,
    ) -> FailureEvent:
        """Returns the event of an error."""
        code = error.code if isinstance(error, DeltackptError) else type(error).__name__
        return cls(
            step=step,
            process=process,
            operation=operation,
            code=code,
            message=str(error),
            seconds=seconds,
        )


Event = SaveEvent | RestoreEvent | UploadEvent | AppendEvent | FailureEvent


class EventHandler(Protocol):
    """Receives events.

    The manager calls ``receive`` once per event, in order, on the thread that called the manager
    and never on a background thread. A handler needs no lock and must return quickly. It must not
    save, append, restore, wait or close with that manager, which raises ``ClosedError``. Background
    work is reported at the next ``save()``, ``append()``, ``wait_until_finished()``, ``close()`` or
    restore. By then the save is committed or has failed: an exception in a handler becomes a
    ``RuntimeWarning``, and the other handlers still run.
    """

    def receive(self, event: Event) -> None:
        """Handles one event."""
        ...


class CallWarnings:
    """The warnings of a manager's current call; only one thread uses the manager at a time.

    Warnings are issued when the call ends: with ``-W error``, they interrupt no change.
    """

    def __init__(self) -> None:
        #: None between calls.
        self._found: list[tuple[str, type[Warning]]] | None = None

    def add(self, message: str, category: type[Warning]) -> bool:
        """Defers a warning; returns False if the call has ended."""
        found = self._found
        if found is not None:
            found.append((message, category))
        return found is not None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defers the warnings of a block to the end of the outermost one, on whichever thread.

        The first that is an error is raised; it, or the block's own error, has the others as notes.
        """
        outer, is_outermost = _thread.call, self._found is None
        found: list[tuple[str, type[Warning]]] | None = None
        raised: BaseException | None = None
        try:
            _thread.call = self
            if is_outermost:
                self._found = []
            yield
        except BaseException as error:
            raised = error
        finally:  # An interrupt here would otherwise silence all later warnings.
            _thread.call = outer
            if is_outermost:
                found, self._found = self._found, None
        raised = _issued(found or (), raised)
        if raised is not None:
            raise raised

    def issue(self) -> None:
        """Issues the warnings so far; the first that is an error is raised, as by ``deferred``."""
        found, self._found = self._found, []
        if (error := _issued(found or (), None)) is not None:
            raise error


class _Thread(threading.local):
    """The manager's call that runs on a thread: ``warn`` is called where the manager is unknown."""

    call: CallWarnings | None = None


_thread = _Thread()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that points to the nearest caller outside deltackpt; may be deferred."""
    if _thread.call is None or not _thread.call.add(message, category):
        _issue(message, category)


def _issue(message: str, category: type[Warning]) -> None:
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _issued(
    found: Iterable[tuple[str, type[Warning]]], raised: BaseException | None
) -> BaseException | None:
    """Issues warnings; returns what is to be raised."""
    for message, category in found:
        try:
            _issue(message, category)
        except Warning as error:
            if raised is None:
                raised = error
            else:
                raised.add_note(f"{category.__name__}: {message}")
    return raised


def emit(
    event: Event, event_handlers: Iterable[EventHandler] = (), *, log_message: bool = True
) -> None:
    """Logs an event as one line and passes it to the event handlers.

    Saves, restores and uploads are logged at INFO, appends at DEBUG, skipped steps and failed
    uploads at WARNING, other failures at ERROR.

    Args:
      event: the event.
      event_handlers: handlers that receive it.
      log_message: whether the line contains a failure's ``message``. If the caller also gets it as
        an exception or a warning, it would otherwise be printed twice.

    Examples:
      >>> class Kept(list):
      ...     receive = list.append
      >>> kept = Kept()
      >>> event = RestoreEvent(
      ...     step=7, process=0, chain=(5, 7), source="storage", bytes_read=4096,
      ...     find_secs=0.1, read_secs=0.3, place_secs=0.1, total_secs=0.5,
      ... )
      >>> emit(event, [kept])
      >>> kept[0].chain
      (5, 7)
    """
    level = _level(event)
    if _logger.isEnabledFor(level):
        _logger.log(
            level,
            "process %d: %s %s",
            event.process,
            _name(event),
            _figures(event, () if log_message else ("message",)),
            extra={"event": event, "process_index": event.process},
        )
    for handler in event_handlers:
        try:
            handler.receive(event)
        except Exception as error:
            warn(
                f"event handler {handler!r}: {type(error).__name__} at the {_name(event)} of step "
                f"{event.step}: {error}; nothing else is affected",
                RuntimeWarning,
            )


class OrbaxLoggerHandler:
    """Passes each event as one dict to an Orbax logger, like Orbax's own step statistics.

    The dict contains ``event`` (``save``, ``restore``, ``upload``, ``append`` or ``failure``) and
    each field by its name, in JSON types, which ``orbax.checkpoint.logging.CloudLogger`` can send.

    Examples:
      >>> import orbax.checkpoint as ocp
      >>> handler = OrbaxLoggerHandler(ocp.logging.StandardLogger())
    """

    def __init__(self, logger: OrbaxLogger):
        """Wraps an ``orbax.checkpoint.logging.AbstractLogger``."""
        self._logger = logger

    def receive(self, event: Event) -> None:
        """See ``EventHandler``."""
        entry = dataclasses.asdict(event)
        if "chain" in entry:
            entry["chain"] = list(entry["chain"])
        if isinstance(event, SaveEvent):
            entry["tables"] = [figures._asdict() for figures in event.tables]
            entry["dense"] = [figures._asdict() for figures in event.dense]
            entry["relative_error"] = event.relative_error
            entry["dense_relative_error"] = event.dense_relative_error
        # A logger may write into it: Orbax's CloudLogger does.
        self._logger.log_entry({"event": _name(event), **entry})


class OrbaxLogger(Protocol):
    """The part of ``orbax.checkpoint.logging.AbstractLogger`` that is used."""

    def log_entry(self, msg: object, /) -> object:
        """Logs one entry."""
        ...


class PrometheusHandler:
    """Counts events as Prometheus metrics named ``deltackpt_*``, labeled by process.

    Needs the extra ``deltackpt[metrics]``. Create one per registry, since a registry accepts each
    name once.

    Attributes:
      registry: the registry that holds the metrics.
    """

    def __init__(self, registry: prometheus_client.CollectorRegistry | None = None):
        """Registers the metrics, in prometheus_client's default registry if None is given.

        Raises:
          MissingExtra: prometheus_client is not installed.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra(
                "PrometheusHandler: expected prometheus_client, found that it cannot be imported; "
                'run: pip install "deltackpt[metrics]"'
            ) from error
        self.registry = prometheus_client.REGISTRY if registry is None else registry

        self._counters = {
            name: prometheus_client.Counter(
                f"deltackpt_{name}", text, labels, registry=self.registry
            )
            for name, (text, labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: prometheus_client.Gauge(f"deltackpt_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in _GAUGES.items()
        }
        self._seconds = {
            name: prometheus_client.Histogram(
                f"deltackpt_{name}_seconds",
                f"Time of {text} by stage",
                (*labels, "stage"),
                registry=self.registry,
                buckets=_SECONDS_BUCKETS,
            )
            for name, (text, labels) in _SECONDS.items()
        }

    def receive(self, event: Event) -> None:
        """See ``EventHandler``."""
        process = str(event.process)
        if isinstance(event, SaveEvent):
            self._receive_save(event)
        elif isinstance(event, RestoreEvent):
            labels = (process, event.source)
            self._add(labels, restores=1, restored_bytes=event.bytes_read)
            self._observe("restore", labels, event, _RESTORE_STAGES)
        elif isinstance(event, UploadEvent):
            self._add((process,), uploads=1, uploaded_bytes=event.bytes_sent)
            self._seconds["upload"].labels(process, "upload").observe(event.seconds)
            self._seconds["upload"].labels(process, "lag").observe(event.lag_secs)
            self._set((process,), last_uploaded_step=event.step, waiting_bytes=event.waiting_bytes)
        elif isinstance(event, AppendEvent):
            labels, nbytes = (process, event.kind), event.bytes_written
            self._add(labels, appends=1, appended_rows=event.rows, appended_bytes=nbytes)
            self._observe("append", labels, event, _APPEND_STAGES)
            self._set(labels, last_appended_step=event.step)
        else:
            labels = (process, event.operation, event.code)
            self._add(labels, failures=1)
            self._set(labels, last_failure_timestamp_seconds=time.time())

    def _receive_save(self, event: SaveEvent) -> None:
        process, written_at = str(event.process), event.committed_unix_secs
        labels = (process, event.kind)
        self._add(labels, saves=1, saved_rows=event.rows, saved_bytes=event.bytes_written)
        self._add(labels, saved_dense_bytes=event.dense_bytes)
        self._observe("save", labels, event, _SAVE_STAGES)
        self._set(labels, saved_ratio=event.ratio)
        self._set((process,), last_saved_step=event.step, last_commit_timestamp_seconds=written_at)
        for figures in event.tables:
            of_table = (process, figures.table, figures.field)
            self._add((*of_table, figures.codec), saved_table_bytes=figures.nbytes)
            self._set(of_table, relative_error=figures.relative_error)
        for figures in event.dense:
            # A model may have thousands of lossless leaves: too many series.
            if figures.codec != "lossless" or figures.reason:
                of_leaf = (process, figures.leaf)
                self._add((*of_leaf, figures.codec), saved_leaf_bytes=figures.nbytes)
                self._set(of_leaf, leaf_relative_error=figures.relative_error)

    def _add(self, labels: tuple[str, ...], **amounts: int) -> None:
        for name, amount in amounts.items():
            self._counters[name].labels(*labels).inc(amount)

    def _set(self, labels: tuple[str, ...], **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].labels(*labels).set(value)

    def _observe(
        self, name: str, labels: tuple[str, ...], event: Event, stages: Iterable[str]
    ) -> None:
        for stage in stages:
            self._seconds[name].labels(*labels, stage).observe(getattr(event, f"{stage}_secs"))


_OF_PROCESS = ("process",)
_OF_KIND = ("process", "kind")
_OF_TABLE = ("process", "table", "field")
_OF_LEAF = ("process", "leaf")
_OF_RESTORE = ("process", "source")
_OF_FAILURE = ("process", "operation", "code")
#: Metric, without ``deltackpt_``, to its description and labels.
_COUNTERS = {
    "saves": ("Committed saves", _OF_KIND),
    "saved_rows": ("Rows written", _OF_KIND),
    "saved_bytes": ("Bytes written", _OF_KIND),
    "saved_table_bytes": ("Bytes written of a table or slot", (*_OF_TABLE, "codec")),
    "saved_dense_bytes": ("Bytes written of dense leaves that deltas store as blocks", _OF_KIND),
    "saved_leaf_bytes": (
        "Bytes written of a dense leaf with a lossy codec requested",
        (*_OF_LEAF, "codec"),
    ),
    "restores": ("Restored steps", _OF_RESTORE),
    "restored_bytes": ("Bytes read", _OF_RESTORE),
    "uploads": ("Uploaded saves", _OF_PROCESS),
    "uploaded_bytes": ("Bytes of uploaded saves", _OF_PROCESS),
    "appends": ("Durable WAL records", _OF_KIND),
    "appended_rows": ("Rows in WAL records", _OF_KIND),
    "appended_bytes": ("Bytes of WAL records", _OF_KIND),
    "failures": ("Failed operations, and skipped steps", _OF_FAILURE),
}
_GAUGES = {
    "saved_ratio": (
        "Bytes of the newest save of a kind over the bytes of all rows unencoded",
        _OF_KIND,
    ),
    "last_saved_step": ("Step of the newest committed save", _OF_PROCESS),
    "last_commit_timestamp_seconds": (
        "When the newest save was committed, in seconds since 1970",
        _OF_PROCESS,
    ),
    "relative_error": ("Relative l2 error of the newest save of a table or slot", _OF_TABLE),
    "leaf_relative_error": (
        "Relative l2 error of the newest save of a dense leaf with a lossy codec requested",
        _OF_LEAF,
    ),
    "last_uploaded_step": ("Step of the newest uploaded save", _OF_PROCESS),
    "waiting_bytes": ("Bytes in the staging directory that are not uploaded yet", _OF_PROCESS),
    "last_appended_step": ("Step of the newest durable WAL record", _OF_KIND),
    # A counter that first appears as 1 shows no increase: alert on this gauge instead.
    "last_failure_timestamp_seconds": (
        "When the newest failure was reported, in seconds since 1970",
        _OF_FAILURE,
    ),
}
_SECONDS = {
    "save": ("a save", _OF_KIND),
    "restore": ("a restore", _OF_RESTORE),
    "upload": ("an upload", _OF_PROCESS),
    "append": ("a WAL record", _OF_KIND),
}
_SAVE_STAGES = ("blocked", "extract", "room", "encode", "write", "digest", "commit", "total")
_APPEND_STAGES = ("blocked", "encode", "write", "sync", "durable")
_RESTORE_STAGES = ("find", "read", "place", "total")
# A small delta takes 30 ms, a base of a large model minutes, a WAL record a few ms.
_SECONDS_BUCKETS = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    *(3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
)


def _name(event: Event) -> str:
    return type(event).__name__.removesuffix("Event").lower()


def _level(event: Event) -> int:
    if isinstance(event, AppendEvent):
        return logging.DEBUG
    if not isinstance(event, FailureEvent):
        return logging.INFO
    return logging.WARNING if event.operation in ("skip", "upload") else logging.ERROR


def _figures(event: Event, left_out: tuple[str, ...]) -> str:
    """Returns ``key=value`` pairs in the order of the fields, without the process."""
    names = [field.name for field in dataclasses.fields(event)]
    left_out = ("process", "tables", "dense", *left_out)
    figures = {name: getattr(event, name) for name in names if name not in left_out}
    if isinstance(event, SaveEvent):
        figures["relative_error"] = event.relative_error
        if event.dense:
            figures["dense_relative_error"] = event.dense_relative_error
        if event.widened:
            figures["widened"] = [f"{one.leaf}: {one.reason}" for one in event.widened]
    return " ".join(f"{key}={_shown(value)}" for key, value in figures.items())


def _shown(value: object) -> str:
    return f"{value:.6f}" if isinstance(value, float) else repr(value)
