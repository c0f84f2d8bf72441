# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables, JSON, progress bars."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table

#: Minimum width of a table's last column; it is left out if the terminal is narrower.
_LEAST_LAST = 24


@contextlib.contextmanager
def progress(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on stderr if that is a terminal; removes it at the end.

    Args:
      label: what is in progress.
      quiet: show no bar.

    Yields:
      A callback for the bytes done and the total bytes.
    """
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    disable = quiet or not console.is_terminal
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=disable
    ) as shown:
        task = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def print_json(value: Any) -> None:
    """Prints a value as JSON: dataclasses as objects, numpy values as numbers and lists."""
    click.echo(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Converts a value to JSON types; infinities, NaN and other objects become strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> None:
    """Prints a table; columns that contain only numbers are aligned to the right.

    If the table is too wide for the terminal, the last column is wrapped or left out. If stdout is
    not a terminal, nothing is shortened.

    Args:
      columns: headings.
      rows: a value for each column; None is shown as ``-``.
      title: line above the table.
    """
    console = rich.console.Console()
    box = rich.box.SIMPLE_HEAD
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) + 2 for column in zip(columns, *cells)]
    if not console.is_terminal:
        console, box = rich.console.Console(width=10_000), None
    elif sum(widths[:-1]) + _LEAST_LAST > console.width < sum(widths):
        # Never cut numbers: leave out the text column at the end instead.
        columns, cells, widths = columns[:-1], [row[:-1] for row in cells], widths[:-1]
        console.width = max(console.width, sum(widths))
    if title:
        click.echo(f"\n{title}")
    shown = rich.table.Table(box=box, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(columns):
        values = [row[number] for row in rows if row[number] is not None]
        is_number = bool(values) and all(_is_number(value) for value in values)
        last = number == len(columns) - 1
        side = "right" if is_number else "left"
        shown.add_column(rich.markup.escape(name), justify=side, overflow="fold", no_wrap=not last)
    for row in cells:
        shown.add_row(*map(rich.markup.escape, row))
    console.print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a string that starts with one: a size, a time."""
    return isinstance(value, (int, float)) or str(value)[:1].isdigit()


@contextlib.contextmanager
def termination() -> Iterator[Callable[[], None]]:
    """Yields a function that waits until SIGTERM or SIGINT has arrived.

    Python runs handlers between two instructions of the main thread, so a handler does not run if
    the signal arrives just before that thread blocks. The file descriptor is written at once.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    former_descriptor = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    former = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def wait() -> None:
        while os.read(readable, 1)[0] not in numbers:
            pass  # Another signal with a handler.

    try:
        yield wait
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(former_descriptor)
        os.close(readable)
        os.close(writable)
