# SPDX-License-Identifier: Apache-2.0
"""Renders the measured tables of the documentation from the results of the benchmarks.

python tools/tables.py            # rewrites the pages
python tools/tables.py --check    # fails if a page differs from the results

A page names what it shows in a comment, `<!-- results NAME TABLE -->`; several tables with the same
columns are joined by `+`. Everything up to `<!-- end of results -->` is rendered.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
sys.path.insert(0, str(_ROOT / "benchmarks"))

from report import UNITS, Sample  # noqa: E402

_BLOCK = re.compile(r"<!-- results (?P<what>[^>]+?) -->\n.*?<!-- end of results -->", re.DOTALL)
#: A quoted figure: a number with a unit, a multiple or a fraction.
FIGURE = re.compile(
    r"(?<![\w./])(?:x\d[\d.]*|1/\d[\d.]*"
    r"|\d[\d.,]*(?:–\d[\d.,]*)? (?:ms|µs|s|MB|GB|GB/s|MB/s)(?![\w/]))"
)


def pages() -> Iterator[Path]:
    """The pages that may show results."""
    yield _ROOT / "README.md"
    yield from sorted((_ROOT / "docs").rglob("*.md"))


def result(name: str) -> dict[str, Any]:
    """Reads a result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def shown(cell: str | dict[str, Any]) -> str:
    """Formats a cell: the median, and the range of the rounds."""
    if isinstance(cell, str):
        return cell
    if cell["unit"] == "text":
        return cell["text"]
    return Sample(tuple(cell["values"])).shown(UNITS[cell["unit"]])


def provenance(found: dict[str, Any]) -> str:
    """Where and how a result was measured, in a sentence."""
    command = f" Command: `{found['command']}`." if found["command"] else ""
    if "recorded" in found:  # By hand, from a table that was published without a result.
        return found["provenance"] + command
    machine, load = found["machine"], found["load"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    changed = "" if found["clean"] else ", with changes"
    return (
        f"Commit {found['commit']}{changed} ({found['date']}); {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, load average {load[0]:.1f} before "
        f"and {load[1]:.1f} after; {versions}. Median (range) of {found['rounds']} rounds.{command}"
    )


def rendered(what: str, seen: set[str]) -> str:
    """The Markdown of some tables, with their remarks, and the provenance that was not seen yet."""
    if what == "plain caption":
        return caption()
    lines: list[str] = []
    below: list[str] = []
    for name, table in (each.split() for each in what.split("+")):
        found = result(name)
        content = found["tables"][table]
        if not lines:
            lines = [
                f"| {' | '.join(content['columns'])} |",
                f"|{' --- |' * len(content['columns'])}",
            ]
        lines += [f"| {' | '.join(map(shown, row))} |" for row in content["rows"]]
        below += [] if name in seen else [f"*{provenance(found)}*"]
        below += content["remarks"]
        seen.add(name)
    return "\n\n".join(["\n".join(lines), *below]).replace("|  |", "| |")


def caption() -> str:
    """The caption of the chart in the README."""
    found = result("plain")
    states: dict[str, dict[str, float]] = {}
    for size, name, training, *_ in found["tables"]["training"]["rows"]:
        states.setdefault(size, {})[name] = Sample(tuple(training["values"])).median
    pieces = [
        f"{size} of state: {ways['deltackpt, `TouchState`']:.2f}× with a `TouchState`, "
        f"{ways['deltackpt, fingerprints']:.2f}× with fingerprints (Orbax tuned "
        f"{ways['Orbax tuned']:.2f}×, defaults {ways['Orbax defaults']:.2f}×)"
        for size, ways in reversed(states.items())
    ]
    sizes = found["sizes"].partition(".")[0]
    machine = found["machine"]
    return (
        f"*Run time relative to no checkpoints, with default options: {sizes}. "
        f"{'. '.join(pieces)}. Commit {found['commit']}; {machine['cores']} CPU cores, "
        f"{machine['memory_gib']} GiB, load average {found['load'][0]:.1f} before; median of "
        f"{found['rounds']} rounds. Tuned: `use_compression=False`. [All benchmarks]"
        "(https://github.com/deltackpt/deltackpt/blob/main/docs/project/benchmarks.md).*"
    )


def rewritten(text: str) -> str:
    """The text of a page with its results rendered."""
    seen: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        what = match["what"]
        return f"<!-- results {what} -->\n{rendered(what, seen)}\n<!-- end of results -->"

    return _BLOCK.sub(replace, text)


def held() -> set[str]:
    """All figures that the results hold, as they are quoted."""
    texts: list[str] = []
    for path in sorted(RESULTS.glob("*.json")):
        found = result(path.stem)
        texts += [provenance(found), found["sizes"], *found["notes"]]
        texts += [shown(row) for row in found["rows"]]
        for table in found["tables"].values():
            texts += [shown(cell) for row in table["rows"] for cell in row]
            texts += [*table["columns"], *table["remarks"]]
    return {figure for text in texts for figure in quoted(text)}


def quoted(text: str) -> set[str]:
    """The figures that a text quotes, without trailing punctuation."""
    return {figure.rstrip(".,") for figure in FIGURE.findall(text)}


def unheld(page: Path, *, prose: bool) -> set[str]:
    """Figures of a page that no result holds: of its tables, or of all its text."""
    text = _BLOCK.sub("", page.read_text())
    if not prose:
        text = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return quoted(text) - held()


def main() -> int:
    """Runs the command line."""
    differing = []
    for page in pages():
        text = page.read_text()
        if (new := rewritten(text)) != text:
            differing.append(page.relative_to(_ROOT))
            if "--check" not in sys.argv[1:]:
                page.write_text(new)
    for page in differing:
        print(f"{page} {'differs from the results' if '--check' in sys.argv[1:] else 'rewritten'}")
    return 1 if differing and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
