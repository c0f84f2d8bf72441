# SPDX-License-Identifier: Apache-2.0
"""Replays the breaks of tests/covered/*.toml: each broken line must make the named test fail.

python tools/replay_breaks.py --check                     # static: files, lines and tests exist
python tools/replay_breaks.py --only NAME [--only NAME]
python tools/replay_breaks.py --sample 8 [--seed SEED]
python tools/replay_breaks.py                             # all of them

Each entry records example tests that were deleted because another test covers their promise:

[[covered]]
name = "wal-record-cut-short"               # unique
promise = "A record that was cut short is not replayed."
deleted = ["tests/test_wal.py::test_x"]     # ids without parameters
file = "deltackpt/reading/wal_records.py"
line = "if len(data) < expected:"           # text that occurs once in the file
broken = "if False:"                        # what replaces it
caught_by = "tests/test_wal_invariants.py::test_y"
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import functools
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import typing
import xml.etree.ElementTree as ET
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
_LEDGER = REPOSITORY / "tests" / "covered"
_LIMIT_SECS = 300
#: Shared with the copy, which stays small.
_LINKED = (".venv", "build")
_NOT_COPIED = (".git", ".hypothesis", ".pytest_cache", "site", "dist", ".cache", *_LINKED)
#: Errors of a break that does not even run; they say nothing about the promise.
_NOT_RUN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "IndentationError")


class Break(typing.NamedTuple):
    """A deleted group of tests, and the broken code that another test catches."""

    name: str
    promise: str
    deleted: list[str]
    file: str
    line: str
    broken: str
    caught_by: str

    def problems(self) -> list[str]:
        """Returns what is wrong without running anything."""
        path = REPOSITORY / self.file
        found = path.read_text().count(self.line) if path.is_file() else 0
        problems = [f"{self.file} contains the line {found} times, not once"] * (found != 1)
        if self.line == self.broken:
            problems.append("the broken line equals the original")
        if not _exists(self.caught_by):
            problems.append(f"{self.caught_by} does not exist")
        problems += [f"{test} still exists" for test in self.deleted if _exists(test)]
        return [f"{self.name}: {problem}" for problem in problems]


def ledger() -> list[Break]:
    """Returns all entries, by file and in their order there."""
    return [
        Break(**entry)
        for path in sorted(_LEDGER.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["covered"]
    ]


def check(breaks: list[Break]) -> list[str]:
    """Returns the problems of the entries that can be found without running them."""
    names = [each.name for each in breaks]
    twice = {f"{name} is the name of several entries" for name in names if names.count(name) > 1}
    return [*sorted(twice), *(problem for each in breaks for problem in each.problems())]


def _exists(test: str) -> bool:
    """Whether the file of a test id defines its classes and function."""
    file, *names = test.partition("[")[0].split("::")
    path = REPOSITORY / file
    if not path.is_file() or not names:
        return False
    body = _statements(path)
    for name in names:
        found = [node for node in body if name in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


@functools.cache
def _statements(path: Path) -> list[ast.stmt]:
    """The statements of a file."""
    return ast.parse(path.read_text()).body


def _names(node: ast.AST) -> list[str]:
    """The names that a statement defines."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [getattr(node, "name", ""), *(one.id for one in targets if isinstance(one, ast.Name))]


def replay(found: Break) -> str | None:
    """Breaks a copy of the repository and runs the test; returns why the break was not caught."""
    with tempfile.TemporaryDirectory(prefix="deltackpt-break-") as place:
        copy = Path(place) / "copy"
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        for name in _LINKED:
            if (REPOSITORY / name).exists():
                (copy / name).symlink_to((REPOSITORY / name).resolve())
        path = copy / found.file
        text = path.read_text()
        path.write_text(text.replace(found.line, found.broken))
        if found.file.endswith(".c"):
            subprocess.run([sys.executable, "hatch_build.py"], cwd=copy, check=True)
        report = Path(place) / "report.xml"
        # A test that misses something of the machine must be skipped: its failure would count.
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment["PYTHONPATH"] = os.pathsep.join((str(copy), str(copy / "tests")))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--tb=short"]
        command += ["-p", "no:cacheprovider", "--hypothesis-profile=ci", "--hypothesis-seed=0"]
        command += ["-m", "", f"--junitxml={report}", f"--basetemp={place}/tests", found.caught_by]
        try:
            subprocess.run(
                command, cwd=copy, env=environment, timeout=_LIMIT_SECS, capture_output=True
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {_LIMIT_SECS} s"
        return _uncaught(report)


def _uncaught(report: Path) -> str | None:
    """Returns why no test failed by an assertion or an error of the library."""
    if not report.exists():
        return "pytest wrote no report"
    cases = list(ET.parse(report).iter("testcase"))
    failures = [node.get("message", "") for case in cases for node in case.iter("failure")]
    if not failures:
        errors = [node.get("message", "") for case in cases for node in case.iter("error")]
        return f"{len(cases)} tests, none failed; errors: {errors}"
    if failures[0].startswith(_NOT_RUN):
        return f"the broken code does not run: {failures[0]}"
    return None


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="run no test")
    parser.add_argument("--only", action="append", metavar="NAME", help="replay this entry")
    parser.add_argument("--sample", type=int, metavar="N", help="replay N random entries")
    parser.add_argument("--seed", type=int, help="of the sample (default: a new one)")
    parser.add_argument("--workers", type=int, default=2, help="replays at the same time")
    options = parser.parse_args()

    breaks = ledger()
    if problems := check(breaks):
        print("\n".join(problems))
        return 1
    if options.check:
        print(f"{len(breaks)} breaks, {sum(len(each.deleted) for each in breaks)} deleted tests")
        return 0
    if options.only:
        if unknown := set(options.only) - {each.name for each in breaks}:
            parser.error(f"no such entries: {sorted(unknown)}")
        breaks = [each for each in breaks if each.name in options.only]
    if options.sample is not None:
        seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
        print(f"--sample {options.sample} --seed {seed}")
        breaks = random.Random(seed).sample(breaks, min(options.sample, len(breaks)))

    def timed(each: Break) -> tuple[str | None, float]:
        started = time.monotonic()
        return replay(each), time.monotonic() - started

    uncaught = 0
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for each, (reason, secs) in zip(breaks, pool.map(timed, breaks), strict=True):
            uncaught += reason is not None
            print(f"{each.name}: {reason or 'caught'} ({secs:.0f} s)", flush=True)
    print(f"{len(breaks) - uncaught} of {len(breaks)} breaks caught")
    return min(uncaught, 1)


if __name__ == "__main__":
    sys.exit(main())
