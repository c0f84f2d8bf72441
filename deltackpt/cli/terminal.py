# SPDX-License-Identifier: Apache-2.0
"""Arguments that commands share, and their output: tables, JSON, progress bars, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from deltackpt.format import naming
from deltackpt.inspect.listing import Listing

if TYPE_CHECKING:
    from deltackpt.wal import KafkaWal

_LISTS = "deltackpt ls lists the steps, and ls --wal the recovery points"
_INTACT = "deltackpt verify reports which steps and recovery points are intact"
#: Python calls in the advice of errors, as regular expressions, and the commands instead.
_COMMANDS = {
    r"pass KafkaWal\([^)]*\), in WalOptions\(backend=\.\.\.\) to a manager": (
        "pass --kafka-config FILE"
    ),
    r"(?:(?:see|call) )?(?:all_)?steps(?:\(\))? and (?:recovery_)?points\(\)"
    r"(?: list what exists)?": _LISTS,
    r"list the steps with all_steps\(\)|see (?:all_)?steps\b(?:\(\))?": (
        "deltackpt ls lists the steps"
    ),
    r"see step\.tables": "deltackpt show lists tables and slots",
    r"restore a step: restore_latest\(wal=False\)": (
        "deltackpt ls lists the steps, which do not need the WAL"
    ),
    r"restore the step itself: restore_latest\(wal=False\)": (
        "deltackpt show shows the step below it"
    ),
    r"(?:restore an older step: )?restore_latest\(\) falls back automatically"
    r"(?: to the previous recovery point)?": _INTACT,
    r"restore_latest\(\) examines all steps": "deltackpt verify examines all steps",
}


def as_commands(text: str) -> str:
    """Returns the text of an error, with commands instead of Python calls."""
    for pattern, command in _COMMANDS.items():
        text = re.sub(pattern, command, text)
    return text


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


class Size(click.ParamType):
    """A size such as ``512MiB``, ``1.5G`` or a plain number of bytes; units are powers of 1024."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """See ``click.ParamType``."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r}: expected a size such as 512MiB or 2GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class UserPath(click.Path):
    """A path whose leading ``~`` is expanded, in case the shell did not."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """See ``click.ParamType``."""
        return super().convert(os.path.expanduser(value), param, ctx)


class _Step(click.IntRange):
    name = "step number"


STEP = _Step(0, naming.LAST_STEP)
#: click does not check readability: the code that reads it reports more precise errors.
directory = click.argument("directory", type=UserPath(file_okay=False, readable=False))
#: A directory, or a bucket URL.
root = click.argument("directory", metavar="DIRECTORY|URL")
item = click.option(
    "--item",
    help="deltackpt's item in each step; detected in the newest step by default.",
    metavar="NAME",
)
endpoint = click.option(
    "--endpoint", help="Server of a bucket, if it is not the provider's own.", metavar="ADDRESS"
)


def _kafka_wal(ctx: click.Context, param: click.Parameter, path: Path | None) -> KafkaWal | None:
    if path is None:
        return None
    from deltackpt.storage import kafka
    from deltackpt.wal import KafkaWal

    # A function, so that secrets are not sent to Ray and stay current.
    settings = functools.partial(kafka.read_settings, path.absolute())
    settings()
    return KafkaWal(config=settings)


#: Passed as ``wal``.
kafka_config = click.option(
    "--kafka-config",
    "wal",
    type=UserPath(dir_okay=False, path_type=Path),
    callback=_kafka_wal,
    help="File of librdkafka settings (name=value lines), to read a WAL in Kafka.",
    metavar="FILE",
)


#: A function with the options of a command.
Command = Callable[..., Any]


class ReadSource(NamedTuple):
    """A directory or bucket that a command reads, and the options to open it."""

    directory: str
    options: dict[str, Any]


def reads(command: Command) -> Command:
    """Adds DIRECTORY and the options to open it, which are passed as a ``ReadSource``."""

    @root
    @item
    @endpoint
    @kafka_config
    @functools.wraps(command)
    def run(directory: str, item: str, endpoint: str, wal: KafkaWal, **options: object) -> None:
        how = {"item": item, "endpoint": endpoint, "wal": wal}
        command(source=ReadSource(directory, how), **options)

    return run


class Output(NamedTuple):
    """What a command prints: a value as JSON, which a function may return, or lines and tables.

    The exit code is 1 if it ``failed``.
    """

    value: object
    shown: Iterable[str | Listing]
    failed: bool = False


as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def show(as_json: bool, value: object, shown: Iterable[str | Listing]) -> None:
    """Prints a value as JSON, or lines and tables."""
    if as_json:
        click.echo(json.dumps(plain(value() if callable(value) else value), indent=2))
        return
    for piece in shown:
        if isinstance(piece, str):
            click.echo(piece)
        else:
            print_table(piece)


def prints(command: Callable[..., Output]) -> Callable[..., None]:
    """Adds ``--json`` to a command, and prints its output."""

    @as_json
    @functools.wraps(command)
    def run(as_json: bool, **options: object) -> None:
        output = command(**options)
        show(as_json, output.value, output.shown)
        if output.failed:
            sys.exit(1)

    return run


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback for bytes done and total; shows a bar on stderr if that is a terminal."""
    import rich.console  # Half the import time of numpy, and most commands show no progress.
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def plain(value: Any) -> Any:
    """Converts a value to JSON types; infinities, NaN and other objects become strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if (as_dict := getattr(value, "_asdict", None)) is not None:
        value = as_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_table(table: Listing) -> None:
    """Prints a table; columns that contain only numbers are aligned to the right, None is ``-``."""
    # Without rich: importing it would take a tenth of the time of ``ls``.
    lines = [[*table.columns], *([_cell(value) for value in row] for row in table.lines)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    columns = [*zip(*table.lines)] or [()] * len(widths)
    aligned = [str.rjust if _are_numbers(column) else str.ljust for column in columns]
    if table.title:
        click.echo(f"\n{table.title}")
    for number, line in enumerate(lines):
        cells = (align(cell, width) for align, cell, width in zip(aligned, line, widths))
        text = " ".join(cells).rstrip()
        click.echo(click.style(text, bold=True) if number == 0 else text)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _are_numbers(column: Sequence[object]) -> bool:
    """Whether all values are numbers, or strings that start with one: sizes, times; not sums."""
    values = [value for value in column if value is not None]
    return bool(values) and all(
        isinstance(value, (int, float)) or (str(value)[:1].isdigit() and " + " not in str(value))
        for value in values
    )


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
