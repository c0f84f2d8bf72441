# SPDX-License-Identifier: Apache-2.0
"""What happened, in figures: one event per save and per restore.

Each event is one line of the logger ``deltackpt.events`` and goes to every sink that the user
gave to the manager.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from deltackpt.manifest import Kind

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A committed save; seconds are wall time, bytes are those of this process's part.

    ``ratio`` is the bytes written over the bytes of all rows unencoded.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreEvent:
    """A restored step."""

    step: int
    process: int
    chain: tuple[int, ...]
    source: str
    bytes_read: int
    seconds: float


Event = SaveEvent | RestoreEvent


class Sink(Protocol):
    """Receives events, on the thread that saves; must return quickly and not raise."""

    def receive(self, event: Event) -> None:
        """Called once per event."""
        ...


def emit(event: Event, sinks: Iterable[Sink] = ()) -> None:
    """Logs an event and hands it to the sinks."""
    figures: dict[str, Any] = dataclasses.asdict(event)
    name = "save" if isinstance(event, SaveEvent) else "restore"
    line = " ".join(f"{key}={_shown(value)}" for key, value in figures.items())
    _logger.info("%s %s", name, line)
    for sink in sinks:
        sink.receive(event)


def _shown(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else repr(value)
