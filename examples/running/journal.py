# SPDX-License-Identifier: Apache-2.0
"""A run's events: progress for the terminal, and JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console

import deltackpt
from deltackpt import events


class Journal:
    """Prints progress, and appends one JSON object per line to a file if there is one.

    Lines are flushed to the operating system at once, so they survive a kill of the process. Losses
    are written as hexadecimal floats: equal text means equal bits.
    """

    def __init__(self, console: Console, path: Path | None, processes: int = 1):
        """Opens the file for appending.

        Args:
          console: where to print.
          path: the file, or None.
          processes: number of processes; the figures of a save cover one process's shard.
        """
        self._console = console
        self._processes = processes
        self._file: IO[str] | None = None if path is None else path.open("a")

    def receive(self, event: events.Event) -> None:
        """Handles the end of a save or a restore (``deltackpt.events.EventHandler``)."""
        if isinstance(event, events.SaveEvent):
            self.write("save", **dataclasses.asdict(event))
            share = event.rows / event.total_rows
            error = f", off by {event.relative_error:.2%}" if event.relative_error else ""
            written_secs = event.encode_secs + event.write_secs + event.digest_secs
            piece = f"shard {event.process} of {self._processes}: " if self._processes > 1 else ""
            self._console.print(
                f"  saved step {event.step}: [bold]{event.kind}[/], {piece}{event.rows:,} rows "
                f"({share:.1%}), {size(event.bytes_written)}{error}, blocked "
                f"{event.blocked_secs * 1e3:.0f} ms, wrote {written_secs * 1e3:.0f} ms",
                soft_wrap=True,
            )
        elif isinstance(event, events.RestoreEvent):
            self.write("restore", **dataclasses.asdict(event))
        elif isinstance(event, events.AppendEvent):
            self.write("durable", **dataclasses.asdict(event))
        elif isinstance(event, events.UploadEvent):
            self.write("upload", **dataclasses.asdict(event))
            self._console.print(
                f"  uploaded step {event.step}: {size(event.bytes_sent)} in {event.objects} "
                f"objects, {event.lag_secs:.2f} s after its save; {event.waiting} steps wait",
                soft_wrap=True,
            )
        else:
            self.write("failure", **dataclasses.asdict(event))

    def steps(self, first: int, losses: list[Any]) -> None:
        """Losses of consecutive steps, from step ``first`` on."""
        for i, loss in enumerate(losses):
            self.write("step", step=first + i, loss=float(loss).hex())

    def logged(self, logged: deltackpt.Appended) -> None:
        """Records that ``append()`` returned."""
        recovery = logged.recovery
        self.write(
            "logged",
            unix_secs=time.time(),
            step=logged.step,
            kind=logged.kind,
            blocked_secs=logged.blocked_secs,
            recovery=recovery.step if isinstance(recovery, deltackpt.RecoveryPoint) else recovery,
        )

    def write(self, event: str, **figures: Any) -> None:
        """Appends a line to the file."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **figures}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns all lines, oldest first; a kill may truncate the last one."""
    whole = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in whole if line.endswith("\n")]


def read(path: Path, event: str) -> list[dict[str, Any]]:
    """Returns the lines of one kind of event."""
    return [entry for entry in lines(path) if entry["event"] == event]


def size(nbytes: float) -> str:
    """Formats bytes for people: 1.3 MB.

    Example:
      >>> size(512), size(1_300_000), size(2.5e9)
      ('512 B', '1.3 MB', '2.5 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
