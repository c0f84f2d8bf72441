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
import itertools
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


def ratio(value: float) -> str:
    """A ratio in readable form: 1/18.2 below 0.5, x1.05 above."""
    return f"1/{1 / value:.1f}" if 0 < value < 0.5 else f"x{value:.2f}"


def secs(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if abs(value) < 0.9995 else f"{value:.2f} s"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def times(value: float) -> str:
    """A multiple, of the undisturbed time or of the state."""
    return f"x{value:.2f}"


def percent(value: float) -> str:
    return f"{value:.3%}"


def speed(value: float) -> str:
    """Seconds per GB as GB per second."""
    return f"{1 / value:.2f} GB/s"


def count(value: float) -> str:
    return f"{value:,.0f}"


#: Units by name, for results.
UNITS: dict[str, Unit] = {
    unit.__name__: unit for unit in (ratio, secs, megabytes, times, percent, speed, count)
}


class Sample(NamedTuple):
    """Measurements of repeated runs, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def over(self, other: Sample) -> Sample:
        """Ratios round by round, so that noise that lasts longer than a round cancels out."""
        return Sample(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def minus(self, other: Sample) -> Sample:
        return Sample(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def mapped(self, function: Callable[[float], float]) -> Sample:
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
        self._values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, candidate: str, values: Mapping[str, float]) -> None:
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

    def cells(self, candidate: str, *figures: str, **units: Unit) -> list[Any]:
        """Cells of a published table: figures in seconds, then others with their units."""
        return [
            (self(candidate, f), unit) for f, unit in ({f: secs for f in figures} | units).items()
        ]

    def rows(self, candidates: Iterable[str], *figures: str, **units: Unit) -> list[list[Any]]:
        """Rows of a published table, which begin with the candidate."""
        return [[name, *self.cells(name, *figures, **units)] for name in candidates]


def slowest(pieces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest value of each figure, over the processes of a job."""
    return {key: max(piece[key] for piece in pieces) for key in pieces[0] if key != "name"}


def joined(
    views: Sequence[Sequence[Mapping[str, Any]]],
    combine: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, float]] = slowest,
) -> Figures:
    """Combines what each process of a job measured; ``name`` is the candidate of a view."""
    found = Figures()
    for pieces in zip(*views, strict=True):
        found.add(pieces[0]["name"], combine(pieces))
    return found


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
    """What a block of code cost this process."""

    secs: float
    cpu: float  # Seconds of all threads.
    switches: float  # Context switches.
    threads: float  # Started on this machine, without those of the kernel.
    calls: float  # System calls that read or write.
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
        ids = range(threads + 1, _thread_id())
        threads = len(ids) - _kernel_threads(ids)
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


def _kernel_threads(ids: range) -> int:
    """Returns how many threads with some IDs are the kernel's: writes to a disk start some."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            found += int(path.name) in ids and parent == "2"  # kthreadd
    return found


def _io_calls() -> int:
    return sum(map(int, re.findall(r"sysc[rw]: (\d+)", Path("/proc/self/io").read_text())))


def timed(call: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Report:
    """Collects comparisons, and prints them as lines of one table."""

    def __init__(self, title: str, *, sizes: str = ""):
        """Starts an empty report; ``sizes`` describes what is measured, in a line."""
        self.sizes = sizes
        self._table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, name in enumerate(("what", "measured", "against", "measured", "ratio", "bar")):
            justify = "left" if number in (0, 2) else "right"
            self._table.add_column(name, justify=justify, no_wrap=True)
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
        unit: Unit = secs,
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

    def against(
        self,
        what: str,
        found: Figures,
        figure: str,
        ours: str,
        theirs: Iterable[str],
        unit: Unit = secs,
        *,
        bars: Sequence[float | None] = (),
    ) -> None:
        """Compares a figure of ours with that of each other candidate."""
        for other, bar in itertools.zip_longest(theirs, bars):
            self.compare(what, found(ours, figure), other, found(other, figure), unit, bar=bar)

    def state(
        self, what: str, measured: Sample, unit: Unit = secs, *, bar: float | None = None
    ) -> None:
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
        self._table.add_section()

    def note(self, text: str) -> None:
        self._notes.append(text)

    def publish(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | tuple[Sample, Unit]]],
        *remarks: str,
    ) -> None:
        """Adds a table that a page shows: texts, figures with units, and sentences below it."""
        cells = [[c if isinstance(c, str) else _cell(*c) for c in row] for row in rows]
        self._tables[name] = {"columns": list(columns), "rows": cells, "remarks": list(remarks)}

    def show(self, options: argparse.Namespace) -> None:
        """Prints the table, and writes the result if the command line names a file."""
        console = Console(width=max(_WIDTH, Console().width), highlight=False)
        console.print(self._table)
        for text in (*self._notes, self.sizes):
            console.print(text)
        if options.json is None:
            return
        result = provenance() | {
            "rounds": options.repeats,
            "sizes": self.sizes,
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


#: A part of a benchmark: measures in a directory of its own, and adds lines to the report.
Part = Callable[[Report, argparse.Namespace, Path], None]


def run_parts(
    report: Report,
    options: argparse.Namespace,
    pieces: Mapping[str, Part],
    names: Iterable[str],
) -> None:
    """Runs parts of a benchmark, each in a temporary directory of its own; shows the report."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=options.directory) as place:
            pieces[name](report, options, Path(place))
        report.section()
    report.show(options)


def main(
    title: str,
    measure: Part | Mapping[str, Part],
    sizes: Callable[[argparse.Namespace], str] = lambda _: "",
    **options: Any,
) -> None:
    """Runs a benchmark: parses the command line, measures, and shows the report.

    Args:
      title: title of the report.
      measure: the benchmark, or its parts, of which ``--only`` chooses some.
      sizes: describes what is measured, unless the benchmark does.
      options: defaults of further options; the option of a tuple takes several values.
    """
    parser = arguments(sys.modules["__main__"].__doc__)
    pieces = measure if isinstance(measure, Mapping) else {Path(sys.argv[0]).stem: measure}
    for name, default in {"only": tuple(pieces), **options}.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("repeats", "scale"):
            parser.set_defaults(**{name: default})
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            choices = default if name == "only" else None
            kind = type(default[0])
            parser.add_argument(flag, type=kind, nargs="+", choices=choices, default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    given = parser.parse_args()
    run_parts(
        Report(title, sizes=sizes(given)),
        given,
        pieces,
        given.only if pieces is measure else pieces,
    )
