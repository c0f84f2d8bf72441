# SPDX-License-Identifier: Apache-2.0
"""What happened, in figures: one event per save, per restore, and per one that failed.

Each event is one record of the logger ``deltackpt.events`` and goes to every sink that the user
gave to the manager. The record bears the event itself and the index of the process as
attributes ``event`` and ``process_index``, for handlers that filter or format on them.

All times are wall time. A stage that several threads work at lasts while at least one of them
does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any, Literal, Protocol

from deltackpt.errors import DeltackptError, MissingExtra
from deltackpt.format.figures import LeafFigures as LeafFigures
from deltackpt.format.figures import TableFigures as TableFigures
from deltackpt.format.manifest import Kind

#: What may fail.
Operation = Literal["save", "restore", "skip", "promote", "push", "log"]

_logger = logging.getLogger(__name__)
#: Where the files of deltackpt lie.
_PACKAGE = os.path.dirname(__file__) + os.sep


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A committed save; rows and bytes are those of this process's part.

    Attributes:
      step: the training step.
      kind: base or delta.
      reason: why it is one.
      process: index of the process.
      rows: rows written.
      total_rows: rows of all tables.
      bytes_written: bytes of tables and slots on disk, with their digests and manifest.
      ratio: ``bytes_written`` over the bytes of all rows unencoded.
      blocked_secs: how long ``save()`` kept the training thread, the wait for an earlier save
        included.
      extract_secs: finding the touched rows and copying them. That is part of ``blocked_secs``,
        but for rows on their way from an accelerator, which arrive in the background.
      room_secs: in the background, until there was room in the stage of a bucket
        (``Tiers.stage_bytes``); the next ``save()`` waits meanwhile.
      encode_secs: in the background, while at least one thread made stored bytes of rows; others
        may have written meanwhile. Rows that a base or a large delta holds in the training state
        are read from there in this time.
      write_secs: the rest of the time until the arrays were written: the storage alone was waited
        for. With ``encode_secs`` it is the whole of encoding and writing.
      digest_secs: the digests of the part and its manifest; of several processes, process 0 waits
        for the parts of the others here.
      commit_secs: from the moment that all files of this process were written, dense leaves too,
        until the step was committed: merged dense leaves, digests of the whole step, fsync of all
        of it, rename, and the wait for other processes.
      total_secs: from the call of ``save()`` until the step was committed. What no stage has went
        to dense leaves and other items, which are written after the tables.
      committed_unix_secs: when the step was committed, in seconds since 1970. The event itself
        comes later, at the manager's next call.
      tables: each table and slot of which rows were written; not in the log's line.
      dense_bytes: bytes on disk of dense leaves that lie beside the tables as blocks, in deltas of
        ``Dense(deltas="own")``; 0 where they are an item of Orbax's. ``bytes_written`` counts none.
      dense: each of these leaves, whether it changed or not; not in the log's line.
    """

    step: int
    kind: Kind
    reason: str
    process: int
    rows: int
    total_rows: int
    bytes_written: int
    ratio: float
    blocked_secs: float
    extract_secs: float
    room_secs: float
    encode_secs: float
    write_secs: float
    digest_secs: float
    commit_secs: float
    total_secs: float
    committed_unix_secs: float
    tables: tuple[TableFigures, ...] = ()
    dense_bytes: int = 0
    dense: tuple[LeafFigures, ...] = ()

    @property
    def dense_relative_error(self) -> float:
        """The greatest relative error of a dense leaf; 0 where all were lossless."""
        return max((figures.relative_error for figures in self.dense), default=0.0)

    @property
    def widened(self) -> tuple[LeafFigures, ...]:
        """Dense leaves with another codec than was asked for; their reasons say why."""
        return tuple(figures for figures in self.dense if figures.reason)

    @property
    def relative_error(self) -> float:
        """The greatest relative error of a table or slot; 0 where all were lossless."""
        return max((figures.relative_error for figures in self.tables), default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreEvent:
    """A restored step.

    Attributes:
      step: the training step.
      process: index of the process.
      chain: the steps that were read, base first.
      source: where the tables came from.
      bytes_read: bytes of tables and slots that were read.
      find_secs: finding the chain, and checking the step's files.
      read_secs: reading, verifying, decoding and merging; dense leaves too.
      place_secs: placing the state on the devices, and further items.
      total_secs: the whole call, for this step.
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
class PromotionEvent:
    """A save that was brought from the stage of this node to the root.

    Attributes:
      step: the training step.
      process: index of the process.
      bytes_sent: bytes of its files.
      objects: how many objects were put: the files, their digests, and the entry of the journal.
      seconds: from when its upload was begun until it was committed at the root.
      lag_secs: from when it was made in the stage until it was committed at the root.
      committed_unix_secs: when it was, in seconds since 1970.
      waiting: saves in the stage that are not at the root yet.
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
class LogEvent:
    """A mark of the log that is durable; rows and bytes are those of this process.

    It is told at the manager's next call, and at the level DEBUG: there may be one at each step.

    Attributes:
      step: the training step.
      process: index of the process.
      kind: ``full`` with dense leaves, else ``soft``.
      rows: rows written.
      bytes_written: bytes of its frames, dense leaves included.
      dense_bytes: bytes of dense leaves.
      blocked_secs: how long ``log()`` kept the training thread.
      encode_secs: in the background, until its frames were made.
      write_secs: until the system had taken them.
      sync_secs: of the ``fdatasync`` that made it durable, for all its marks.
      durable_secs: from the call of ``log()`` until then.
      batches_in_sync: how many marks that made durable.
      committed_unix_secs: when it was durable, in seconds since 1970.
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
    sync_secs: float
    durable_secs: float
    batches_in_sync: int
    committed_unix_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureEvent:
    """A save, a promotion or a restore that failed; no touched row is lost by it.

    A wait that runs out is none: what it waited for goes on.

    Attributes:
      step: the training step; None where no one step is meant, as for ``NoIntactStep``.
      process: index of the process.
      operation: ``save`` or ``restore``, ``skip`` for a step that ``restore_latest()`` found
        not intact and passed over, ``promote`` where the root cannot be reached: promotion is
        tried again until it can; or ``log`` where marks could not be made durable, or, told by
        process 0 with the code ``log-behind``, where processes are far behind the others with them.
      code: ``code`` of the error; the name of its class where it is not one of deltackpt's.
      message: of the error.
      seconds: from the call of ``save()`` or of the restore until this event. A save that fails in
        the background is told at the manager's next call.
    """

    step: int | None
    process: int
    operation: Operation
    code: str
    message: str
    seconds: float

    @classmethod
    def of(
        cls,
        error: Exception,
        operation: Operation,
        step: int | None,
        *,
        process: int,
        seconds: float,
    ) -> FailureEvent:
        """The event of an error."""
        code = error.code if isinstance(error, DeltackptError) else type(error).__name__
        return cls(
            step=step,
            process=process,
            operation=operation,
            code=code,
            message=str(error),
            seconds=seconds,
        )


Event = SaveEvent | RestoreEvent | PromotionEvent | LogEvent | FailureEvent


class Sink(Protocol):
    """Receives events.

    ``receive`` is called once per event, in the order of the events, on the thread that called
    the manager: it must return quickly. That is never a background thread. So a save that ended
    in the background is told at the next ``save()``, ``wait()``, ``close()`` or restore, and a
    sink needs no lock. The save is committed, or has failed, by then: a sink that raises is
    reported as a ``RuntimeWarning`` and the other sinks still receive the event.
    """

    def receive(self, event: Event) -> None:
        """Takes note of one event."""
        ...


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns of the line outside of deltackpt that led here, whatever lies between."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def emit(event: Event, sinks: Iterable[Sink] = ()) -> None:
    """Logs an event as one line and hands it to the sinks.

    Saves, restores and promotions are logged at INFO, skipped steps and promotions that are tried
    again at WARNING, other failures at ERROR.

    Args:
      event: what happened.
      sinks: who else is told.

    Example:
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
            _figures(event),
            extra={"event": event, "process_index": event.process},
        )
    for sink in sinks:
        try:
            sink.receive(event)
        except Exception as error:
            warn(
                f"event sink {sink!r}: {type(error).__name__} at the {_name(event)} of step "
                f"{event.step}: {error}; nothing else is affected",
                RuntimeWarning,
            )


class OrbaxLoggerSink:
    """Hands each event to an Orbax logger as one dict, as Orbax hands its own step statistics.

    The dict holds ``event`` (``save``, ``restore``, ``promotion`` or ``failure``) and every figure
    by its name, in the types of JSON: what ``orbax.checkpoint.logging.CloudLogger`` can send.

    Example:
      >>> import orbax.checkpoint as ocp
      >>> sink = OrbaxLoggerSink(ocp.logging.StandardLogger())
    """

    def __init__(self, logger: OrbaxLogger):
        """Wraps a logger.

        Args:
          logger: an ``orbax.checkpoint.logging.AbstractLogger``.
        """
        self._logger = logger

    def receive(self, event: Event) -> None:
        """See ``Sink``."""
        entry = dataclasses.asdict(event)
        for name in ("tables", "chain"):
            if name in entry:
                entry[name] = list(entry[name])
        if isinstance(event, SaveEvent):
            entry["dense"] = [figures._asdict() for figures in event.dense]
            entry["relative_error"] = event.relative_error
            entry["dense_relative_error"] = event.dense_relative_error
        # A logger may write into it: Orbax's CloudLogger does.
        self._logger.log_entry({"event": _name(event), **entry})


class OrbaxLogger(Protocol):
    """What is used of ``orbax.checkpoint.logging.AbstractLogger``."""

    def log_entry(self, msg: Any, /) -> Any:
        """Logs one entry."""
        ...


class PrometheusSink:
    """Counts events as Prometheus metrics named ``deltackpt_*``, labelled by process.

    Needs the extra ``deltackpt[metrics]``. Make one per registry: names may be registered once.

    Attributes:
      registry: the registry that holds the metrics.
    """

    def __init__(self, registry: Any = None):
        """Registers the metrics.

        Args:
          registry: a ``prometheus_client.CollectorRegistry``; the default one where it is None.

        Raises:
          MissingExtra: prometheus_client is not installed.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra(
                "PrometheusSink: expected prometheus_client, found that it cannot be imported; "
                'run: pip install "deltackpt[metrics]"'
            ) from error
        self.registry = prometheus_client.REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Gauge(name, text, labels, registry=self.registry)

        def seconds(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Histogram(
                name, text, labels, registry=self.registry, buckets=_SECONDS_BUCKETS
            )

        of_save = ("process", "kind")
        self._saves = counter("deltackpt_saves", "Committed saves", *of_save)
        self._rows = counter("deltackpt_saved_rows", "Rows written", *of_save)
        self._written = counter("deltackpt_saved_bytes", "Bytes written", *of_save)
        self._save_secs = seconds(
            "deltackpt_save_seconds", "Time of a save by stage", *of_save, "stage"
        )
        self._ratio = gauge(
            "deltackpt_saved_ratio",
            "Bytes of the newest save of a kind over the bytes of all rows unencoded",
            *of_save,
        )
        self._step = gauge(
            "deltackpt_last_saved_step", "Step of the newest committed save", "process"
        )
        self._committed = gauge(
            "deltackpt_last_commit_timestamp_seconds",
            "When the newest save was committed, in seconds since 1970",
            "process",
        )
        of_table = ("process", "table", "field")
        self._table_bytes = counter(
            "deltackpt_saved_table_bytes", "Bytes written of a table or slot", *of_table, "codec"
        )
        self._table_error = gauge(
            "deltackpt_relative_error",
            "Relative l2 error of the newest save of a table or slot",
            *of_table,
        )
        self._dense_bytes = counter(
            "deltackpt_saved_dense_bytes",
            "Bytes written of dense leaves that lie beside the tables",
            *of_save,
        )
        of_leaf = ("process", "leaf")
        self._leaf_bytes = counter(
            "deltackpt_saved_leaf_bytes",
            "Bytes written of a dense leaf for which a lossy codec was asked",
            *of_leaf,
            "codec",
        )
        self._leaf_error = gauge(
            "deltackpt_leaf_relative_error",
            "Relative l2 error of the newest save of a dense leaf for which that was asked",
            *of_leaf,
        )
        of_restore = ("process", "source")
        self._restores = counter("deltackpt_restores", "Restored steps", *of_restore)
        self._read = counter("deltackpt_restored_bytes", "Bytes read", *of_restore)
        self._restore_secs = seconds(
            "deltackpt_restore_seconds", "Time of a restore by stage", *of_restore, "stage"
        )
        self._promoted = counter("deltackpt_promotions", "Saves brought to the root", "process")
        self._sent = counter(
            "deltackpt_promoted_bytes", "Bytes of saves brought to the root", "process"
        )
        self._promotion_secs = seconds(
            "deltackpt_promotion_seconds", "Time of a promotion by stage", "process", "stage"
        )
        self._promoted_step = gauge(
            "deltackpt_last_promoted_step", "Step of the newest save at the root", "process"
        )
        self._waiting = gauge(
            "deltackpt_waiting_bytes", "Bytes in the stage that are not at the root", "process"
        )
        of_log = ("process", "kind")
        self._marks = counter("deltackpt_marks", "Durable marks of the log", *of_log)
        self._logged_rows = counter("deltackpt_logged_rows", "Rows in marks", *of_log)
        self._logged_bytes = counter("deltackpt_logged_bytes", "Bytes of marks", *of_log)
        self._log_secs = seconds(
            "deltackpt_log_seconds", "Time of a mark by stage", *of_log, "stage"
        )
        self._logged_step = gauge(
            "deltackpt_last_logged_step", "Step of the newest durable mark", *of_log
        )
        of_failure = ("process", "operation", "code")
        self._failures = counter(
            "deltackpt_failures", "Failed saves and restores, and skipped steps", *of_failure
        )
        # A counter that begins at 1 shows no increase: alerts look at this one.
        self._failed = gauge(
            "deltackpt_last_failure_timestamp_seconds",
            "When the newest failure was told, in seconds since 1970",
            *of_failure,
        )

    def receive(self, event: Event) -> None:
        """See ``Sink``."""
        if isinstance(event, SaveEvent):
            self._receive_save(event)
        elif isinstance(event, RestoreEvent):
            labels = (str(event.process), event.source)
            self._restores.labels(*labels).inc()
            self._read.labels(*labels).inc(event.bytes_read)
            _observe(self._restore_secs, labels, event, _RESTORE_STAGES)
        elif isinstance(event, PromotionEvent):
            labels = (str(event.process),)
            self._promoted.labels(*labels).inc()
            self._sent.labels(*labels).inc(event.bytes_sent)
            self._promotion_secs.labels(*labels, "upload").observe(event.seconds)
            self._promotion_secs.labels(*labels, "lag").observe(event.lag_secs)
            self._promoted_step.labels(*labels).set(event.step)
            self._waiting.labels(*labels).set(event.waiting_bytes)
        elif isinstance(event, LogEvent):
            labels = (str(event.process), event.kind)
            self._marks.labels(*labels).inc()
            self._logged_rows.labels(*labels).inc(event.rows)
            self._logged_bytes.labels(*labels).inc(event.bytes_written)
            _observe(self._log_secs, labels, event, _LOG_STAGES)
            self._logged_step.labels(*labels).set(event.step)
        else:
            labels = (str(event.process), event.operation, event.code)
            self._failures.labels(*labels).inc()
            self._failed.labels(*labels).set_to_current_time()

    def _receive_save(self, event: SaveEvent) -> None:
        process = str(event.process)
        labels = (process, event.kind)
        self._saves.labels(*labels).inc()
        self._rows.labels(*labels).inc(event.rows)
        self._written.labels(*labels).inc(event.bytes_written)
        self._ratio.labels(*labels).set(event.ratio)
        _observe(self._save_secs, labels, event, _SAVE_STAGES)
        self._step.labels(process).set(event.step)
        self._committed.labels(process).set(event.committed_unix_secs)
        for figures in event.tables:
            place = (process, figures.table, figures.field)
            self._table_bytes.labels(*place, figures.codec).inc(figures.nbytes)
            self._table_error.labels(*place).set(figures.relative_error)
        self._dense_bytes.labels(*labels).inc(event.dense_bytes)
        for figures in event.dense:
            # Of thousands of leaves that are exact nobody makes a series each.
            if figures.codec != "exact" or figures.reason:
                self._leaf_bytes.labels(process, figures.leaf, figures.codec).inc(figures.nbytes)
                self._leaf_error.labels(process, figures.leaf).set(figures.relative_error)


_SAVE_STAGES = ("blocked", "extract", "room", "encode", "write", "digest", "commit", "total")
_LOG_STAGES = ("blocked", "encode", "write", "sync", "durable")
_RESTORE_STAGES = ("find", "read", "place", "total")
# A small delta takes 30 ms, a base of a large model minutes; marks and touched rows, a few ms.
_SECONDS_BUCKETS = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    *(3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
)


def _observe(histogram: Any, labels: tuple[str, ...], event: Event, stages: Iterable[str]) -> None:
    for stage in stages:
        histogram.labels(*labels, stage).observe(getattr(event, f"{stage}_secs"))


def _name(event: Event) -> str:
    return type(event).__name__.removesuffix("Event").lower()


def _level(event: Event) -> int:
    if isinstance(event, LogEvent):
        return logging.DEBUG
    if not isinstance(event, FailureEvent):
        return logging.INFO
    return logging.WARNING if event.operation in ("skip", "promote") else logging.ERROR


def _figures(event: Event) -> str:
    """``key=value`` pairs in the order of the fields; the process is said before them."""
    names = [field.name for field in dataclasses.fields(event)]
    left_out = ("process", "tables", "dense")
    figures = {name: getattr(event, name) for name in names if name not in left_out}
    if isinstance(event, SaveEvent):
        figures["relative_error"] = event.relative_error
        if event.dense:
            figures["dense_relative_error"] = event.dense_relative_error
        if event.widened:
            figures["widened"] = [f"{one.leaf}: {one.reason}" for one in event.widened]
    return " ".join(f"{key}={_shown(value)}" for key, value in figures.items())


def _shown(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else repr(value)
