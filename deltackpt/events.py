# SPDX-License-Identifier: Apache-2.0
"""What happened, in figures: one event per save and per restore.

Each event is one record of the logger ``deltackpt.events`` and goes to every sink that the user
gave to the manager. The record bears the event itself and the index of the process as
attributes ``event`` and ``process_index``, for handlers that filter or format on them.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterable
from typing import Any, Protocol

from deltackpt.errors import OptionError
from deltackpt.manifest import Kind

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFigures:
    """One field of one table in a save.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      codec: how its rows were stored.
      reason: why so.
      rows: rows written.
      nbytes: their bytes on disk.
      ratio: ``nbytes`` over the bytes of these rows unencoded.
      relative_error: norm of what decoding changes over the norm of the rows; 0 where lossless.
    """

    table: str
    field: str
    codec: str
    reason: str
    rows: int
    nbytes: int
    ratio: float
    relative_error: float


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
      bytes_written: bytes of tables and slots on disk.
      ratio: ``bytes_written`` over the bytes of all rows unencoded.
      blocked_secs: how long ``save()`` kept the training thread.
      extract_secs: copying the touched rows to the host; part of ``blocked_secs``.
      write_secs: encoding the rows and writing the arrays, in the background.
      digest_secs: reading the files back for their digests.
      total_secs: from the call of ``save()`` until the step was committed.
      tables: each table and slot of which rows were written; not in the log's line.
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
    write_secs: float
    digest_secs: float
    total_secs: float
    tables: tuple[TableFigures, ...] = ()

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
      seconds: wall time of the whole restore.
    """

    step: int
    process: int
    chain: tuple[int, ...]
    source: str
    bytes_read: int
    seconds: float


Event = SaveEvent | RestoreEvent


class Sink(Protocol):
    """Receives events.

    ``receive`` is called once per event, in the order of the events, on the thread that asked
    for the save or restore: it must return quickly. The save is committed by then: a sink that
    raises is reported as a ``RuntimeWarning`` and the other sinks still receive the event.
    """

    def receive(self, event: Event) -> None:
        """Takes note of one event."""
        ...


def emit(event: Event, sinks: Iterable[Sink] = ()) -> None:
    """Logs an event as one line and hands it to the sinks.

    Args:
      event: what happened.
      sinks: who else is told.

    Example:
      >>> class Kept(list):
      ...     receive = list.append
      >>> kept = Kept()
      >>> event = RestoreEvent(
      ...     step=7, process=0, chain=(5, 7), source="storage", bytes_read=4096, seconds=0.5
      ... )
      >>> emit(event, [kept])
      >>> kept[0].chain
      (5, 7)
    """
    _logger.info(
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
            warnings.warn(
                f"event sink {sink!r}: {type(error).__name__} at the {_name(event)} of step "
                f"{event.step}: {error}; the {_name(event)} itself is complete",
                RuntimeWarning,
                stacklevel=2,
            )


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
          OptionError: prometheus_client is not installed.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise OptionError(
                "PrometheusSink: expected prometheus_client, found that it cannot be imported; "
                'run: pip install "deltackpt[metrics]"'
            ) from error
        self.registry = prometheus_client.REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Histogram(
                name, text, labels, registry=self.registry, buckets=_SECONDS_BUCKETS
            )

        self._saves = counter("deltackpt_saves", "Committed saves", "process", "kind")
        self._rows = counter("deltackpt_saved_rows", "Rows written", "process", "kind")
        self._written = counter("deltackpt_saved_bytes", "Bytes written", "process", "kind")
        self._save_secs = histogram(
            "deltackpt_save_seconds", "Time of a save by stage", "process", "kind", "stage"
        )
        self._table_bytes = counter(
            "deltackpt_saved_table_bytes",
            "Bytes written of a table or slot",
            *("process", "table", "field", "codec"),
        )
        self._table_error = prometheus_client.Gauge(
            "deltackpt_relative_error",
            "Relative l2 error of the newest save of a table or slot",
            ("process", "table", "field"),
            registry=self.registry,
        )
        self._restores = counter("deltackpt_restores", "Restored steps", "process", "source")
        self._read = counter("deltackpt_restored_bytes", "Bytes read", "process", "source")
        self._restore_secs = histogram(
            "deltackpt_restore_seconds", "Time of a restore", "process", "source"
        )
        self._step = prometheus_client.Gauge(
            "deltackpt_last_saved_step",
            "Step of the newest committed save",
            ("process",),
            registry=self.registry,
        )

    def receive(self, event: Event) -> None:
        """See ``Sink``."""
        if isinstance(event, SaveEvent):
            labels = (str(event.process), event.kind)
            self._saves.labels(*labels).inc()
            self._rows.labels(*labels).inc(event.rows)
            self._written.labels(*labels).inc(event.bytes_written)
            for stage in _STAGES:
                seconds = getattr(event, f"{stage}_secs")
                self._save_secs.labels(*labels, stage).observe(seconds)
            self._step.labels(str(event.process)).set(event.step)
            for figures in event.tables:
                place = (str(event.process), figures.table, figures.field)
                self._table_bytes.labels(*place, figures.codec).inc(figures.nbytes)
                self._table_error.labels(*place).set(figures.relative_error)
        else:
            labels = (str(event.process), event.source)
            self._restores.labels(*labels).inc()
            self._read.labels(*labels).inc(event.bytes_read)
            self._restore_secs.labels(*labels).observe(event.seconds)


_STAGES = ("blocked", "extract", "write", "digest", "total")
# A small delta takes 30 ms, a base of a large model minutes.
_SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def _name(event: Event) -> str:
    return "save" if isinstance(event, SaveEvent) else "restore"


def _figures(event: Event) -> str:
    """``key=value`` pairs in the order of the fields; the process is said before them."""
    names = [field.name for field in dataclasses.fields(event)]
    figures = {name: getattr(event, name) for name in names if name not in ("process", "tables")}
    if isinstance(event, SaveEvent):
        figures["relative_error"] = event.relative_error
    return " ".join(f"{key}={_shown(value)}" for key, value in figures.items())


def _shown(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else repr(value)
