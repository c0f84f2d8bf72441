# SPDX-License-Identifier: Apache-2.0
"""Measures in interleaved rounds, prints a table with bars, and writes a result as JSON.

A result holds the commit, date, machine, load, versions and command, every measured value, the
bars, and the tables that the documentation shows. ``tools/tables.py`` renders those.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

_REPOSITORY = Path(__file__).resolve().parents[1]
#: Width of the widest printed table.
_WIDTH = 200
#: The load average and the time when this process began to measure.
_STARTED = os.getloadavg()[0], time.time()

Unit = Callable[[float], str]


class Sample(NamedTuple):
    """Measurements of repeated runs, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return median(self.values)

    def over(self, other: Sample) -> Sample:
        """Ratios round by round, so that noise that lasts longer than a round cancels out."""
        return self.with_each(other, lambda a, b: a / b)

    def minus(self, other: Sample) -> Sample:
        """Differences round by round."""
        return self.with_each(other, lambda a, b: a - b)

    def with_each(self, other: Sample, combine: Callable[[float, float], float]) -> Sample:
        """Combines the values of each round."""
        pairs = zip(self.values, other.values, strict=True)
        return Sample(tuple(combine(a, b) for a, b in pairs))

    def mapped(self, function: Callable[[float], float]) -> Sample:
        """Applies a function to each value."""
        return Sample(tuple(map(function, self.values)))

    def shown(self, unit: Unit) -> str:
        """Median and range."""
        middle, low, high = (unit(f) for f in (self.median, min(self.values), max(self.values)))
        if low == high:
            return middle
        if unit is speed:  # The least time is the highest speed.
            low, high = high, low
        shared = re.sub(r"[\d.,+-]+", "{}", middle)
        if re.sub(r"[\d.,+-]+", "{}", low) == re.sub(r"[\d.,+-]+", "{}", high) == shared:
            low, high = (re.sub(r"^x|[^\d.]+$", "", text) for text in (low, high))
        return f"{middle} ({low}{'–' if min(self.values) >= 0 else ' to '}{high})"


class Figures:
    """Measured values by candidate and figure, one per round."""

    def __init__(self) -> None:
        """Starts empty."""
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, candidate: str, values: Mapping[str, float]) -> None:
        """Adds the values of a round."""
        for figure, value in values.items():
            self._values[candidate, figure].append(value)

    def __call__(self, candidate: str, figure: str) -> Sample:
        """Returns a figure of all rounds."""
        return Sample(tuple(self._values[candidate, figure]))

    def __contains__(self, key: tuple[str, str]) -> bool:
        return bool(self._values.get(key))

    @property
    def candidates(self) -> list[str]:
        """The candidates, in the order of their first values."""
        return list(dict.fromkeys(candidate for candidate, _ in self._values))


def interleaved(
    repeats: int,
    candidates: Mapping[str, Callable[[], Mapping[str, float]]],
    *,
    warm_up: int = 1,
) -> Figures:
    """Runs all candidates in turn, round by round, after rounds that do not count."""
    found = Figures()
    for number in range(-warm_up, repeats):
        for name, measure in candidates.items():
            gc.collect()
            values = measure()
            if number >= 0:
                found.add(name, values)
    return found


class Cost(NamedTuple):
    """What a block of code cost this process.

    Attributes:
      secs: wall time.
      cpu: CPU seconds of all threads.
      switches: context switches.
      threads: threads that were started on this machine, without those of the kernel.
      calls: system calls that read or write.
      fsyncs: calls of ``os.fsync`` and ``os.fdatasync``.
    """

    secs: float
    cpu: float
    switches: float
    threads: float
    calls: float
    fsyncs: float


@contextlib.contextmanager
def metered() -> Iterator[list[Cost]]:
    """Measures a block; the list has its cost once it has ended."""
    found: list[Cost] = []
    forced: list[int] = []
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def counted(call: Callable[[int], None]) -> Callable[[int], None]:
        return lambda descriptor: (forced.append(descriptor), call(descriptor))[1]

    for name, call in real.items():
        setattr(os, name, counted(call))
    used, threads, calls = _used(), _thread_id(), _io_calls()
    started = time.perf_counter()
    try:
        yield found
    finally:
        seconds = time.perf_counter() - started
        cpu, switches = (after - before for after, before in zip(_used(), used, strict=True))
        for name, call in real.items():
            setattr(os, name, call)
        # Thread IDs increase, so threads that have already ended count too.
        threads = _thread_id() - threads - 1 - _kernel_threads(threads)
        found.append(Cost(seconds, cpu, switches, threads, _io_calls() - calls, len(forced)))


def cpu_secs() -> float:
    """CPU seconds of this process."""
    return _used()[0]


def _used() -> tuple[float, int]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nvcsw + used.ru_nivcsw


def _thread_id() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
    thread.start()
    thread.join()
    return found[0]


def _kernel_threads(since: int) -> int:
    """Returns the number of kernel threads with a greater ID: writes to a disk start some."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            found += int(path.name) > since and parent == "2"  # kthreadd
    return found


def _io_calls() -> int:
    return sum(map(int, re.findall(r"sysc[rw]: (\d+)", Path("/proc/self/io").read_text())))


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Report:
    """Collects comparisons, and prints them as lines of one table."""

    def __init__(self, title: str, *, sizes: str):
        """Starts an empty report; ``sizes`` describes what is measured, in a line."""
        self._table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, name in enumerate(("what", "measured", "against", "measured", "ratio", "bar")):
            justify = "left" if number in (0, 2) else "right"
            self._table.add_column(name, justify=justify, no_wrap=True)
        self._sizes = sizes
        self._rows: list[dict[str, Any]] = []
        self._bars: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._tables: dict[str, Any] = {}

    def compare(
        self,
        what: str,
        ours: Sample,
        against: str,
        theirs: Sample,
        unit: Unit,
        *,
        bar: float | None = None,
    ) -> None:
        """Adds a line: ours over theirs round by round, and whether the median meets the bar."""
        ratios = ours.over(theirs)
        verdict = self._judge(f"{what} against {against}", ratios.median, bar, ratio)
        self._rows.append(
            {"name": what, **_cell(ours, unit), "against": against, "theirs": theirs.values}
        )
        shown = ours.shown(unit), against, theirs.shown(unit), ratios.shown(ratio)
        self._table.add_row(what, *shown, verdict)

    def state(self, what: str, measured: Sample, unit: Unit, *, bar: float | None = None) -> None:
        """Adds a line of a figure that is compared only with its bar."""
        verdict = self._judge(what, measured.median, bar, unit)
        self._rows.append({"name": what, **_cell(measured, unit)})
        self._table.add_row(what, measured.shown(unit), "", "", "", verdict)

    def _judge(self, name: str, value: float, bar: float | None, unit: Unit) -> str:
        holds = bar is None or bool(value <= bar)
        self._bars.append({"name": name, "ratio": value, "bar": bar, "holds": holds})
        if bar is None:
            return ""
        return f"{unit(bar)} {'[green]holds' if holds else '[red]missed'}"

    def section(self) -> None:
        """Draws a line below the last row."""
        self._table.add_section()

    def note(self, text: str) -> None:
        """Adds a line below the table."""
        self._notes.append(text)

    def publish(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | tuple[Sample, Unit]]],
        *remarks: str,
    ) -> None:
        """Adds a table that a page of the documentation shows.

        Args:
          name: the page asks for it by this name.
          columns: headings.
          rows: texts, and figures with their unit.
          remarks: sentences below the table.
        """
        cells = [[c if isinstance(c, str) else _cell(*c) for c in row] for row in rows]
        self._tables[name] = {"columns": list(columns), "rows": cells, "remarks": list(remarks)}

    def show(self, options: argparse.Namespace) -> None:
        """Prints the table, and writes the result if the command line names a file."""
        console = Console(width=max(_WIDTH, Console().width), highlight=False)
        console.print(self._table)
        for text in (*self._notes, self._sizes):
            console.print(text)
        if options.json is None:
            return
        result = provenance() | {
            "rounds": options.repeats,
            "sizes": self._sizes,
            "tables": self._tables,
            "bars": self._bars,
            "rows": self._rows,
            "notes": self._notes,
        }
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _cell(sample: Sample, unit: Unit) -> dict[str, Any]:
    if unit.__name__ in UNITS:
        return {"unit": unit.__name__, "values": [float(f"{v:.5g}") for v in sample.values]}
    return {"unit": "text", "values": list(sample.values), "text": sample.shown(unit)}


def provenance() -> dict[str, Any]:
    """Where, when and how this process measured."""
    names = ("jax", "orbax-checkpoint", "tensorstore", "numpy")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    script = Path(sys.argv[0]).name
    given = re.sub(r" --(json|directory)[= ]\S+", "", " ".join(["", *sys.argv[1:]])).split()
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *given]),
        "commit": _git("rev-parse", "--short=7", "HEAD"),
        # Results and the pages that show them change while several benchmarks run.
        "clean": not _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cpu": _processor(), "cores": os.cpu_count(), "memory_gib": round(memory)},
        "load": [round(_STARTED[0], 2), round(os.getloadavg()[0], 2)],
        "secs": round(time.time() - _STARTED[1]),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in names},
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(_REPOSITORY), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def arguments(description: str | None, *, repeats: int = 7) -> argparse.ArgumentParser:
    """An argument parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the sizes")
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved rounds")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory")
    return parser


def run_parts(
    report: Report,
    options: argparse.Namespace,
    parts: Mapping[str, Callable[[Report, argparse.Namespace, Path], None]],
    names: Iterable[str],
) -> None:
    """Runs parts of a benchmark, each in a temporary directory of its own; shows the report."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=options.directory) as place:
            parts[name](report, options, Path(place))
    report.show(options)


def ratio(value: float) -> str:
    """A ratio in readable form: 1/18.2 below 0.5, x1.05 above.

    Example:
      >>> ratio(0.05), ratio(1.5)
      ('1/20.0', 'x1.50')
    """
    return f"1/{1 / value:.1f}" if 0 < value < 0.5 else f"x{value:.2f}"


def secs(value: float) -> str:
    """Seconds in a readable unit."""
    return f"{value * 1e3:.3g} ms" if abs(value) < 0.9995 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    """Bytes in units of 10^6."""
    return f"{value / 1e6:.1f} MB"


def times(value: float) -> str:
    """A multiple, of the undisturbed time or of the state."""
    return f"x{value:.2f}"


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{value:.3%}"


def speed(value: float) -> str:
    """Seconds per GB as GB per second."""
    return f"{1 / value:.2f} GB/s"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


#: Units by name, for results.
UNITS: dict[str, Unit] = {
    unit.__name__: unit for unit in (ratio, secs, megabytes, times, percent, speed, count)
}
