# SPDX-License-Identifier: Apache-2.0
"""Measured figures as one table, as ratios against bars, and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

#: Width of the widest table.
_WIDTH = 200


@dataclasses.dataclass(frozen=True)
class Sample:
    """Measurements of repeated runs, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return median(self.values)

    def over(self, other: Sample) -> Sample:
        """Ratios round by round, so that noise that lasts longer than a round cancels out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def plus(self, other: Sample) -> Sample:
        """Sums round by round."""
        return Sample(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    def shown(self, unit: Callable[[float], str]) -> str:
        """Median and range."""
        if len(self.values) == 1 or min(self.values) == max(self.values):
            return unit(self.median)
        return f"{unit(self.median)} ({unit(min(self.values))} - {unit(max(self.values))})"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A ratio of ours to a reference; ``bar`` is its maximum, None if it is only reported."""

    name: str
    ratio: float
    bar: float | None

    @property
    def holds(self) -> bool:
        """Whether the bar is met; true without a bar."""
        return self.bar is None or self.ratio <= self.bar


class Report:
    """Collects comparisons and prints them as lines of one table."""

    def __init__(self, title: str, *, sizes: str):
        """Starts an empty report.

        Args:
          title: the table's title.
          sizes: the measured sizes, in a line.
        """
        self._table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column, right in (
            ("what", False),
            ("measured", True),
            ("against", False),
            ("measured", True),
            ("ratio", True),
            ("bar", True),
            ("", False),
        ):
            self._table.add_column(column, justify="right" if right else "left", no_wrap=True)
        self._sizes = sizes
        self._bars: list[Bar] = []
        self._notes: list[str] = []

    def compare(
        self,
        what: str,
        ours: Sample,
        against: str,
        theirs: Sample,
        unit: Callable[[float], str],
        *,
        bar: float | None = None,
    ) -> None:
        """Adds a line: ours over theirs round by round, and whether the median meets the bar."""
        ratios = ours.over(theirs)
        entry = Bar(f"{what} against {against}", ratios.median, bar)
        self._bars.append(entry)
        self._table.add_row(
            what,
            ours.shown(unit),
            against,
            theirs.shown(unit),
            ratios.shown(ratio),
            "" if bar is None else ratio(bar),
            "" if bar is None else "[green]holds" if entry.holds else "[red]missed",
        )

    def state(
        self,
        what: str,
        measured: Sample,
        unit: Callable[[float], str],
        *,
        bar: float | None = None,
    ) -> None:
        """Adds a line of a figure that is compared only with its bar."""
        entry = Bar(what, measured.median, bar)
        self._bars.append(entry)
        self._table.add_row(
            what,
            measured.shown(unit),
            *("", "", ""),
            "" if bar is None else unit(bar),
            "" if bar is None else "[green]holds" if entry.holds else "[red]missed",
        )

    def section(self) -> None:
        """Draws a line below the last row."""
        self._table.add_section()

    def note(self, text: str) -> None:
        """Adds a line below the table."""
        self._notes.append(text)

    def markdown(self) -> str:
        """The table as Markdown for the documentation."""
        columns = [
            [str(column.header), *(re.sub(r"\[\w+\]", "", str(cell)) for cell in column.cells)]
            for column in self._table.columns
        ]
        lines = [
            f"| {' | '.join((*row[:5], ' '.join(filter(None, row[5:]))))} |"
            for row in zip(*columns, strict=True)
        ]
        lines.insert(1, f"|{' --- |' * 6}")
        return "\n".join(lines)

    def show(self, path: Path | None, markdown: Path | None = None) -> None:
        """Prints the table.

        Args:
          path: a file to write the ratios to as JSON.
          markdown: a file to write the table and its notes to.
        """
        console = Console(width=max(_WIDTH, Console().width), highlight=False)
        console.print(self._table)
        for text in self._notes:
            console.print(text)
        below = f"{self._sizes}\n{machine()}"
        console.print(below)
        if path is not None:
            entries = [dataclasses.asdict(bar) | {"holds": bar.holds} for bar in self._bars]
            path.write_text(json.dumps(entries, indent=1) + "\n")
        if markdown is not None:
            markdown.write_text("\n".join([self.markdown(), "", *self._notes, below, ""]))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the ratios and bars to this file")
    parser.add_argument("--markdown", type=Path, help="write the table for the docs to this file")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the sizes")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved rounds")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory")
    return parser


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def ratio(value: float) -> str:
    """A ratio in readable form: 1/18.2 below 0.5, x 1.05 above.

    Example:
      >>> ratio(0.05), ratio(1.5)
      ('1/20.0', 'x 1.50')
    """
    if 0 < value < 0.5:
        return f"1/{1 / value:.1f}"
    return f"x {value:.2f}"


def secs(value: float) -> str:
    """Seconds in a readable unit."""
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Bytes in units of 10^6."""
    return f"{value / 1e6:.1f} MB"


def times(value: float) -> str:
    """A multiple of the undisturbed time."""
    return f"x {value:.2f}"


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{value:.3%}"


def speed(value: float) -> str:
    """Seconds per GB as GB per second."""
    return f"{1 / value:.2f} GB/s"


def machine() -> str:
    """The machine and the versions, in a line."""
    names = ("deltackpt", "jax", "orbax-checkpoint", "tensorstore", "numpy")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, load {load:.1f}; Python "
        f"{platform.python_version()}, {versions}"
    )


def _version(name: str) -> str:
    if name == "deltackpt":
        from deltackpt import __version__

        return __version__
    return importlib.metadata.version(name)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
