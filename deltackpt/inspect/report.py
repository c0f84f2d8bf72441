# SPDX-License-Identifier: Apache-2.0
"""One page about a directory of checkpoints, for people: what is there, and whether it is well.

The page is a single file that asks for nothing else: no scripts, no fonts, no images from
elsewhere, and a policy in its head that forbids them. Pictures are SVG in the ink of the page,
which is light or dark as the reader's system is.

Importing it needs the extra ``plots``.
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltackpt.__about__ import __version__
from deltackpt.errors import RestoreError
from deltackpt.format import blocks, names
from deltackpt.inspect import html as markup
from deltackpt.inspect import pictures, plots
from deltackpt.inspect.save import SAVE_COLUMNS, save_line
from deltackpt.storage import files
from deltackpt.units import count, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from deltackpt.events import TableFigures
    from deltackpt.inspect import Checkpoints, Save, Step

#: Lines of the table of steps; older ones are left out, and the page says so.
_MOST_STEPS = 1000
_MOST_WARNINGS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a page was made of.

    Attributes:
      path: the page.
      nbytes: its length.
      steps: steps of the directory.
      compacted: compacted bases of the directory.
      newest: the newest step; None where there is none.
      restorable: the newest step whose chain is whole; None where there is none.
      warnings: what a reader should know first.
    """

    path: str
    nbytes: int
    steps: int
    compacted: int
    newest: int | None
    restorable: int | None
    warnings: tuple[str, ...]


def write(ck: Checkpoints, path: str | os.PathLike[str]) -> Report:
    """Writes the page: the file is either absent, old or complete.

    Manifests say most of it. Two pictures read the busiest table: the row numbers of at most 400
    deltas, and at most 64 MiB of values.

    Args:
      ck: the directory.
      path: of the page; its directory exists.

    Raises:
      StorageError: the page cannot be written, or the directory not be listed.

    Example:
      >>> write(open("/data/run-17"), "report.html").restorable  # doctest: +SKIP
      1200
    """
    facts = _gathered(ck)
    drawn, missing = _drawn(ck, facts)
    warnings = (*_warnings(facts), *missing)
    text = _page(ck, facts, drawn, warnings).encode()
    files.write_atomic(Path(path), text, fsync=True)
    return Report(
        path=os.fspath(path),
        nbytes=len(text),
        steps=len(facts.saves),
        compacted=len(facts.compacted),
        newest=facts.saves[-1].step if facts.saves else None,
        restorable=None if facts.step is None else facts.step.step,
        warnings=warnings,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """A directory at one moment: what is told and drawn of a live one agrees.

    Attributes:
      saves: all saves, ascending.
      compacted: bytes on disk of compacted bases, by step.
      step: the newest step whose chain is whole.
      problems: steps that cannot be restored, ascending, and why.
      fields: figures of every field of every table, by table.
    """

    saves: Sequence[Save]
    compacted: Mapping[int, int]
    step: Step | None
    problems: Mapping[int, str]
    fields: Mapping[str, Sequence[tuple[Save, TableFigures]]]

    @property
    def busiest(self) -> str | None:
        """The table of which deltas hold the most rows."""
        if self.step is None:
            return None
        rows = {
            name: sum(f.rows for save, f in held if save.kind == "delta" and _is_values(f))
            for name, held in self.fields.items()
            if name in self.step.tables
        }
        return max(rows, key=lambda name: rows[name]) if any(rows.values()) else None


def _gathered(ck: Checkpoints) -> _Facts:
    saves = ck.saves
    fields: dict[str, list[tuple[Save, TableFigures]]] = {}
    for save in saves:
        for figures in save.tables:
            fields.setdefault(figures.table, []).append((save, figures))
    problems = {save.step: save.problem for save in saves if save.problem}
    step = None
    for save in reversed(saves):
        if save.step in problems:
            continue
        try:
            step = ck.at(save.step)
            break
        except RestoreError as error:  # Retention took it meanwhile: a newer or older one stands.
            problems[save.step] = str(error)
    return _Facts(
        saves=saves,
        compacted=ck.compacted,
        step=step,
        problems=dict(sorted(problems.items())),
        fields=fields,
    )


def _warnings(facts: _Facts) -> Iterator[str]:
    if not facts.saves:
        yield "No step was saved yet."
        return
    newest = facts.saves[-1].step
    if facts.step is None:
        yield "No step can be restored."
    elif facts.step.step != newest:
        yield f"Step {newest:,} cannot be restored; the newest that can is {facts.step.step:,}."
    for step, problem in list(facts.problems.items())[-_MOST_WARNINGS:]:
        yield f"Step {step:,}: {problem}"
    if len(facts.problems) > _MOST_WARNINGS:
        older = len(facts.problems) - _MOST_WARNINGS
        yield f"{count(older, 'older step')} likewise: see the table of steps."


def _drawn(ck: Checkpoints, facts: _Facts) -> tuple[list[str], list[str]]:
    """(pictures as HTML, what could not be drawn and why)."""
    saves, table = facts.saves, facts.busiest
    wanted: list[tuple[str, str, Callable[[], Figure]]] = [
        ("timeline", "Saves", lambda: plots.timeline(saves, compacted=facts.compacted)),
        ("chains", "Chains", lambda: plots.chain_lengths(saves)),
    ]
    if table is not None:
        wanted += [
            ("touched", "Touched rows", lambda: plots.touched_fraction(ck)),
            ("activity", "Where rows are touched", lambda: plots.activity(ck, table)),
            ("drift", "How far rows move", lambda: plots.drift(ck, table)),
        ]
    if any(f.relative_error for held in facts.fields.values() for _, f in held):
        wanted.append(("errors", "Errors of codecs", lambda: plots.codec_error(saves)))
    drawn, missing = [], []
    for name, heading, draw in wanted:
        try:
            element = pictures.svg(draw(), name)
        except RestoreError as error:
            missing.append(f"The picture “{heading}” is left out: {error}")
            continue
        drawn.append(f'<figure aria-label="{heading}">{element}</figure>')
    return drawn, missing


def _page(ck: Checkpoints, facts: _Facts, drawn: Sequence[str], warnings: Sequence[str]) -> str:
    name = html.escape(ck.spot.name)
    return _PAGE.format(
        name=name,
        path=html.escape(str(ck.spot)),
        item=html.escape(ck.item),
        style=_STYLE,
        version=__version__,
        made=markup.utc(time.time()),
        cards="".join(_card(*card) for card in _cards(facts)),
        warnings=_list(warnings),
        pictures="".join(drawn),
        tables=_table(_TABLE_COLUMNS, _table_lines(facts)),
        steps=_steps(facts),
        left_out=_left_out(facts.saves),
    )


def _cards(facts: _Facts) -> Iterator[tuple[str, str, str, str]]:
    """(label, value, what else, class) of each figure at the top of the page."""
    saves = facts.saves
    if not saves:
        yield "steps", "none", "", ""
        return
    newest = saves[-1]
    at = markup.utc(newest.committed_at)
    yield "newest step", f"{newest.step:,}", f"committed {at} UTC" if at else "", ""
    if facts.step is None:
        yield "restorable", "none", "no chain is whole, by manifests", "bad"
    else:
        well = facts.step.step == newest.step
        value, kind = ("yes", "good") if well else (f"{facts.step.step:,}", "bad")
        yield "restorable", value, f"{_read_for(facts.step)}, by manifests", kind
    yield "saves", f"{len(saves):,}", plots.kinds(saves), ""
    compacted = sum(facts.compacted.values())
    written = plots.disk_bytes(saves, facts.compacted)
    more = f"{size(newest.disk_bytes)} for the newest step"
    if facts.compacted:
        bases = count(len(facts.compacted), "compacted base")
        more += f", {size(compacted)} for {bases}"
    yield "on disk", size(written), more, ""
    full = _full_bytes(saves, facts.compacted)
    if full > written:
        more = f"{size(full)} if each were a base"
        yield "saved by deltas", f"{1 - written / full:.1%}", more, ""
    shares = [s.rows / s.total_rows for s in saves if s.kind == "delta" and s.total_rows]
    if shares:
        yield "rows in a delta", f"{np.median(shares):.2%}", "of all rows, median", ""


def _read_for(step: Step) -> str:
    """What a restore of a step reads, in words."""
    base = "a compacted base" if step.reads[0].startswith(names.COMPACTED) else "a base"
    deltas = len(step.reads) - 1
    return f"{base} and {count(deltas, 'delta')}" if deltas else base


def _full_bytes(saves: Sequence[Save], compacted: Mapping[int, int]) -> int:
    """Bytes on disk if each save were as large as the base before it; 0 without any base."""
    bases = {save.step: save.disk_bytes for save in saves if save.kind == "base"}
    bases = {**compacted, **bases}
    if not bases:
        return 0
    total, base = 0, bases[min(bases)]
    for save in saves:
        base = bases.get(save.step, base)
        total += base
    return total


_TABLE_COLUMNS = (
    "table", "shape", "dtype", "slots", "codecs", "rows written", "on disk", "greatest error",
)  # fmt: skip


def _table_lines(facts: _Facts) -> Iterator[tuple[Any, ...]]:
    if facts.step is None:
        return
    for name, table in facts.step.tables.items():
        held = [figures for _, figures in facts.fields.get(name, ())]
        error = max((figures.relative_error for figures in held), default=0.0)
        yield (
            name,
            " × ".join(f"{length:,}" for length in table.shape),
            table.dtype.name,
            ", ".join(table.slots) or None,
            ", ".join(sorted({figures.codec for figures in held})) or None,
            sum(figures.rows for figures in held if _is_values(figures)),
            size(sum(figures.nbytes for figures in held)),
            f"{error:.2%}" if error else "none",
        )


def _steps(facts: _Facts) -> str:
    """The table of steps, the newest first."""
    shown = facts.saves[: -_MOST_STEPS - 1 : -1]
    bad = frozenset(number for number, save in enumerate(shown) if save.step in facts.problems)
    return _table(SAVE_COLUMNS, map(save_line, shown), bad)


def _left_out(saves: Sequence[Save]) -> str:
    if (older := len(saves) - _MOST_STEPS) <= 0:
        return ""
    return f"<p>Without {count(older, 'older step')}.</p>"


def _is_values(figures: TableFigures) -> bool:
    return figures.field == blocks.VALUES


def _card(label: str, value: str, more: str, kind: str) -> str:
    return (
        f'<div class="card {kind}"><dt>{html.escape(label)}</dt>'
        f"<dd><b>{html.escape(value)}</b><small>{html.escape(more)}</small></dd></div>"
    )


def _list(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    items = "".join(f"<li>{html.escape(text)}</li>" for text in warnings)
    return f'<ul class="warnings">{items}</ul>'


def _table(
    columns: Sequence[str],
    lines: Iterable[Sequence[Any]],
    bad: frozenset[int] = frozenset(),
) -> str:
    """A table with numbers to the right; the lines with numbers in ``bad`` are marked."""
    cells = [[_cell(value) for value in line] for line in lines]
    body = "".join(
        f"<tr{' class=bad' if number in bad else ''}>{''.join(line)}</tr>\n"
        for number, line in enumerate(cells)
    )
    heads = []
    for number, name in enumerate(columns):
        right = bool(cells) and all(line[number].startswith((_NUMBER, _NONE)) for line in cells)
        heads.append(f'<th scope="col"{" class=n" if right else ""}>{html.escape(name)}</th>')
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_NUMBER = "<td class=n>"
_NONE = "<td>–</td>"


def _cell(value: Any) -> str:
    if value is None:
        return _NONE
    text = f"{value:,}" if isinstance(value, int) else html.escape(str(value))
    return f"{_NUMBER if text[:1].isdigit() else '<td>'}{text}</td>"


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d21; --faint: #5f6570; --paper: #ffffff;
  --card: #f4f5f7; --line: #dfe2e7; --good: #00734f; --bad: #b33c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --faint: #9aa1ad; --paper: #15171b;
  --card: #1f2228; --line: #343942; --good: #3ccf9f; --bad: #ff8a4c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 70rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.4rem 0 .8rem; font-size: 1.2rem; }
header p { margin: .2rem 0 0; color: var(--faint); overflow-wrap: anywhere; }
nav { margin-top: .6rem; } nav a { margin-right: 1rem; color: inherit; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem;
  margin: 1.4rem 0 0; }
.card { padding: .7rem .9rem; background: var(--card); border-radius: .5rem;
  border-left: 3px solid var(--line); }
.card.good { border-color: var(--good); } .card.bad { border-color: var(--bad); }
.card.good b { color: var(--good); } .card.bad b { color: var(--bad); }
dt { color: var(--faint); font-size: .8rem; } dd { margin: 0; }
dd b { display: block; font-size: 1.4rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
dd small { color: var(--faint); }
.verify { margin: .7rem 0 0; color: var(--faint); font-size: .85rem; }
.warnings { margin: 1.4rem 0 0; padding: .7rem 1rem .7rem 2rem; border-radius: .5rem;
  border: 1px solid var(--bad); overflow-wrap: anywhere; }
figure { margin: 0 0 1.6rem; } figure svg { display: block; width: 100%; height: auto; }
.scroll { max-height: 32rem; overflow: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { width: 100%; border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem 1rem; text-align: left; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; }
th.n, td.n { text-align: right; } td.n { font-variant-numeric: tabular-nums; }
#steps + .scroll td:last-child { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
tr.bad td { color: var(--bad); }
footer { margin-top: 2.4rem; color: var(--faint); font-size: .8rem; }
@media print { :root { color-scheme: light; --ink: #000; --faint: #444; --paper: #fff;
  --card: #fff; --line: #bbb; --good: #00573c; --bad: #8a2e00; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll { max-height: none; overflow: visible; } th { position: static; }
  td, th { white-space: normal; padding: .1rem .5rem; } figure, tr, .card { break-inside: avoid; }
  .card { border: 1px solid var(--line); } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: checkpoints</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p>{path}, item {item}</p>
<nav><a href="#pictures">Pictures</a><a href="#tables">Tables</a><a href="#steps">Steps</a></nav>
</header>
<dl>{cards}</dl>
<p class="verify">Read from manifests: they say which saves a restore needs, and that these are
there. <code>deltackpt verify</code> reads every byte.</p>
{warnings}
<h2 id="pictures">Pictures</h2>
{pictures}
<h2 id="tables">Tables</h2>
{tables}
<h2 id="steps">Steps</h2>
{steps}
{left_out}
<footer>Made by deltackpt {version} at {made} UTC.</footer>
</body>
</html>
"""
