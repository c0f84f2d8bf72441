# SPDX-License-Identifier: Apache-2.0
"""Writes an HTML page about a checkpoint directory: its contents, and what can be restored.

The page is a single self-contained file without scripts, external fonts or external images; a
content security policy forbids them. Plots are SVG in the page's text color, which follows the
light or dark mode of the system.

Importing this module needs the extra ``plots``.
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.__about__ import __version__
from deltackpt.errors import RestoreError, StorageError
from deltackpt.format import naming, row_blocks
from deltackpt.inspect import descriptions, pictures, plots
from deltackpt.inspect.dense_items import (
    DENSE_COLUMNS,
    PLACEHOLDERS,
    SAVED_COLUMNS,
    dense_lines,
    saved_line,
)
from deltackpt.inspect.descriptions import EPOCH_COLUMNS, SAVE_COLUMNS, epoch_line, save_line
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir
from deltackpt.units import count, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from deltackpt.format.manifest import TableFigures
    from deltackpt.inspect import Checkpoints, Save, Step
    from deltackpt.inspect.dense_items import SavedLeaf
    from deltackpt.reading.wal_index import RecoveryPoint

#: Lines of the table of steps; the page counts the older ones that are left out.
_MOST_STEPS = 1000
#: Dense leaves in the table; each must be opened for its shape.
_MOST_LEAVES = 500
_MOST_WARNINGS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Summary of a page that was written.

    Attributes:
      path: path of the page.
      nbytes: size of the page in bytes.
      steps: number of steps in the directory.
      compacted: number of compacted bases in the directory.
      newest: the newest step, or None.
      restorable: the newest step with an intact chain, according to the manifests, or None.
      warnings: problems, most important first.
    """

    path: str
    nbytes: int
    steps: int
    compacted: int
    newest: int | None
    restorable: int | None
    warnings: tuple[str, ...]


def write(ck: Checkpoints, path: str | os.PathLike[str]) -> Report:
    """Writes the page atomically.

    Most data is read from manifests. Two plots read the busiest table: the row indices of at most
    400 deltas, and at most 64 MiB of values.

    Args:
      ck: the directory.
      path: path of the page; its directory must exist.

    Raises:
      StorageError: the page cannot be written, or the directory cannot be listed.

    Examples:
      >>> write(open("/data/run-17"), "report.html").restorable  # doctest: +SKIP
      1200
    """
    facts = _gathered(ck)
    drawn, missing = _drawn(ck, facts)
    warnings = (*_warnings(facts), *missing)
    text = _page(ck, facts, drawn, warnings).encode()
    target = posix.user_path(path)
    DurableDir(target.parent).write(target, text)
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
    """A snapshot of a directory, so that all parts of the page agree."""

    saves: Sequence[Save]
    compacted: Mapping[int, int]  #: Bytes on disk.
    step: Step | None  #: The newest with an intact chain.
    problems: Mapping[int, str]
    fields: Mapping[str, Sequence[tuple[Save, TableFigures]]]
    dense: Sequence[Sequence[object]] = ()  #: Under ``DENSE_COLUMNS``.
    dense_note: str = ""
    dense_saved: Sequence[SavedLeaf] = ()
    wal: Sequence[Sequence[object]] = ()  #: Under ``EPOCH_COLUMNS``, newest first.
    point: RecoveryPoint | None = None  #: The newest full one.
    unread: Sequence[str] = ()

    @property
    def busiest(self) -> str | None:
        """The table with the most rows in deltas."""
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
        except RestoreError as error:  # Retention may have removed it: try an older one.
            problems[save.step] = str(error)
    unread: list[str] = []
    dense, note, saved = [], "", ()
    lines, point = [], None
    try:
        if step is not None:
            (dense, note), saved = _dense_lines(step), step.dense_saved
    except (RestoreError, StorageError) as error:
        unread.append(f"The dense leaves are not shown: {error}")
    try:
        wal = ck.wal
        lines = [epoch_line(one) for one in wal.epochs]
        point = next((one for one in wal.recovery_points() if one.full), None)
        if wal.problem:
            unread.append(f"The valid recovery points cannot be determined: {wal.problem}")
    except (RestoreError, StorageError) as error:
        unread.append(f"The write-ahead log is not shown: {error}")
    return _Facts(
        saves=saves,
        compacted=ck.compacted,
        step=step,
        problems=dict(sorted(problems.items())),
        fields=fields,
        dense=dense,
        dense_note=note,
        dense_saved=saved,
        wal=lines,
        point=point,
        unread=unread,
    )


def _dense_lines(step: Step) -> tuple[list[tuple[object, ...]], str]:
    """Lines under ``DENSE_COLUMNS``, and a note about the leaves without a line."""
    leaves = list(step.dense.values())
    held = [leaf for leaf in leaves if leaf.kind not in PLACEHOLDERS]
    lines, _ = dense_lines(held[:_MOST_LEAVES])
    _, note = dense_lines(leaf for leaf in leaves if leaf.kind in PLACEHOLDERS)
    if further := len(held) - _MOST_LEAVES:
        note = f"and {further:,} more leaves {note}" if further > 0 else note
    return lines, note


def _warnings(facts: _Facts) -> Iterator[str]:
    if not facts.saves:
        yield "No step was saved yet."
        return
    newest = facts.saves[-1].step
    if facts.step is None:
        yield "No step can be restored."
    elif facts.step.step != newest:
        yield f"Step {newest:,} cannot be restored; the newest that can is {facts.step.step:,}."
    yield from facts.unread
    for step, problem in list(facts.problems.items())[-_MOST_WARNINGS:]:
        yield f"Step {step:,}: {problem}"
    if len(facts.problems) > _MOST_WARNINGS:
        older = len(facts.problems) - _MOST_WARNINGS
        yield f"{count(older, 'older step')} cannot be restored either: see the table of steps."


def _drawn(ck: Checkpoints, facts: _Facts) -> tuple[list[str], list[str]]:
    """(plots as HTML, warnings about those that could not be drawn)."""
    saves, table = facts.saves, facts.busiest
    wanted: list[tuple[str, str, Callable[[], Figure]]] = [
        ("timeline", "Saves", lambda: plots.timeline(saves, compacted=facts.compacted)),
        ("chains", "Chains", lambda: plots.chain_lengths(saves)),
    ]
    if table is not None:
        wanted += [
            ("touched", "Touched rows", lambda: plots.touched_fraction(ck)),
            ("activity", "Where rows are touched", lambda: plots.activity(ck, table)),
            ("drift", "Drift of rows", lambda: plots.drift(ck, table)),
        ]
    if any(f.relative_error for held in facts.fields.values() for _, f in held):
        wanted.append(("errors", "Codec errors", lambda: plots.codec_error(saves)))
    drawn, missing = [], []
    for name, heading, draw in wanted:
        try:
            element = pictures.svg(draw(), name)
        except RestoreError as error:
            missing.append(f"The plot “{heading}” is left out: {error}")
            continue
        drawn.append(f'<figure aria-label="{heading}">{element}</figure>')
    return drawn, missing


def _page(ck: Checkpoints, facts: _Facts, drawn: Sequence[str], warnings: Sequence[str]) -> str:
    name = html.escape(ck.store_path.name)
    return _PAGE.format(
        name=name,
        path=html.escape(str(ck.store_path)),
        item=html.escape(ck.item),
        style=_STYLE,
        version=__version__,
        made=descriptions.utc(time.time()),
        cards="".join(_card(*card) for card in _cards(facts)),
        warnings=_list(warnings),
        pictures="".join(drawn),
        tables=_table(_TABLE_COLUMNS, _table_lines(facts)),
        further="".join(_further(facts)),
        links="".join(f'<a href="#{at}">{name}</a>' for at, name in _sections(facts)),
        steps=_steps(facts),
    )


def _sections(facts: _Facts) -> Iterator[tuple[str, str]]:
    """(id, name) of the sections that only some directories have."""
    if facts.dense or facts.dense_note:
        yield "dense", "Dense leaves"
    if facts.wal:
        yield "wal", "Write-ahead log"


def _further(facts: _Facts) -> Iterator[str]:
    for at, name in _sections(facts):
        yield f'<h2 id="{at}">{name}</h2>'
        if at == "wal":
            yield _table(EPOCH_COLUMNS, facts.wal)
            continue
        if facts.dense:
            yield _table(DENSE_COLUMNS, facts.dense)
        if facts.dense_note:
            yield f"<p>{html.escape(facts.dense_note)}.</p>"
        if facts.dense_saved:
            yield "<h3>Blocks in the newest save</h3>"
            yield _table(SAVED_COLUMNS, map(saved_line, facts.dense_saved[:_MOST_LEAVES]))


def _cards(facts: _Facts) -> Iterator[tuple[str, str, str, str]]:
    """(label, value, detail, class) of each card at the top of the page."""
    saves = facts.saves
    if not saves:
        yield "steps", "none", "", ""
        return
    newest = saves[-1]
    at = descriptions.utc(newest.committed_at)
    yield "newest step", f"{newest.step:,}", f"committed {at} UTC" if at else "", ""
    if facts.step is None:
        yield "restorable", "none", "no chain is intact, by manifests", "bad"
    else:
        well = facts.step.step == newest.step
        value, kind = ("yes", "good") if well else (f"{facts.step.step:,}", "bad")
        yield "restorable", value, f"{_read_for(facts.step)}, by manifests", kind
    if facts.point is not None:
        at = descriptions.utc(facts.point.unix_secs)
        yield "newest recovery point", f"{facts.point.step:,}", f"appended {at} UTC", ""
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
        more = f"{size(full)} if every save were a base"
        yield "saved by deltas", f"{1 - written / full:.1%}", more, ""
    shares = [s.rows / s.total_rows for s in saves if s.kind == "delta" and s.total_rows]
    if shares:
        yield "rows in a delta", f"{np.median(shares):.2%}", "of all rows, median", ""


def _read_for(step: Step) -> str:
    """Describes what a restore of a step reads."""
    base = "a compacted base" if step.reads[0].startswith(naming.COMPACTED) else "a base"
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
    "table", "shape", "dtype", "slots", "codecs", "rows written", "on disk", "largest error",
)  # fmt: skip


def _table_lines(facts: _Facts) -> Iterator[tuple[object, ...]]:
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
    """The table of steps, the newest first, and the number of those that it leaves out."""
    shown = facts.saves[: -_MOST_STEPS - 1 : -1]
    bad = frozenset(number for number, save in enumerate(shown) if save.step in facts.problems)
    older = len(facts.saves) - len(shown)
    note = f"<p>{count(older, 'older step')} not shown.</p>" if older else ""
    return _table(SAVE_COLUMNS, map(save_line, shown), bad) + note


def _is_values(figures: TableFigures) -> bool:
    return figures.field == row_blocks.VALUES


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
    columns: Sequence[str], lines: Iterable[Sequence[object]], bad: frozenset[int] = frozenset()
) -> str:
    """A table with numbers aligned to the right; the lines at indices in ``bad`` are marked."""
    cells = [[_cell(value) for value in line] for line in lines]
    body = "".join(
        f"<tr{' class=bad' if number in bad else ''}>{''.join(line)}</tr>\n"
        for number, line in enumerate(cells)
    )
    heads = []
    for number, name in enumerate(columns):
        right = bool(cells) and all(line[number].startswith((_NUMBER, _NONE)) for line in cells)
        heads.append(f'<th scope="col"{" class=n" if right else ""}>{html.escape(name)}</th>')
    kind = f"of-{columns[0].replace(' ', '-')}-{len(columns)}"
    return (
        f"<style>{_labels(kind, columns)}</style>"
        f'<div class="scroll" tabindex="0"><table class="{kind}">'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _labels(kind: str, columns: Sequence[str]) -> str:
    """Styles that label each value of a table on a narrow page, which shows rows as lists."""
    rules = (
        f".{kind} td:nth-child({number})::before {{ content: '{name}'; }}"
        for number, name in enumerate(columns, start=1)
    )
    return f"@media ({_NARROW}) {{ {' '.join(rules)} }}"


#: Narrower pages show each table row as a list, to avoid scrolling sideways.
_NARROW = "max-width: 60rem"
#: Values of at most this many characters are not wrapped.
_SHORT = 12
_NUMBER = "<td class=n>"
_NONE = "<td>–</td>"


def _cell(value: object) -> str:
    if value is None:
        return _NONE
    text = f"{value:,}" if isinstance(value, int) else html.escape(str(value))
    if text[:1].isdigit():
        return f"{_NUMBER}{text}</td>"
    return f"{'<td class=s>' if len(text) <= _SHORT else '<td>'}{text}</td>"


_STYLE = (
    """
:root { color-scheme: light dark; --ink: #1b1d21; --faint: #5f6570; --paper: #ffffff;
  --card: #f4f5f7; --line: #dfe2e7; --good: #00734f; --bad: #b33c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --faint: #9aa1ad; --paper: #15171b;
  --card: #1f2228; --line: #343942; --good: #3ccf9f; --bad: #ff8a4c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 82rem; color: var(--ink);
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
h3 { margin: 1.4rem 0 .6rem; font-size: 1rem; }
.scroll { max-height: 32rem; overflow: hidden auto; border: 1px solid var(--line);
  border-radius: .5rem; }
table { width: 100%; border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; overflow-wrap: anywhere;
  border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--card); font-weight: 600; }
th.n, td.n { text-align: right; } td.n { font-variant-numeric: tabular-nums; }
td.n, td.s { white-space: nowrap; }
th { overflow-wrap: normal; }
tr.bad td { color: var(--bad); }
footer { margin-top: 2.4rem; color: var(--faint); font-size: .8rem; }
@media print { :root { color-scheme: light; --ink: #000; --faint: #444; --paper: #fff;
  --card: #fff; --line: #bbb; --good: #00573c; --bad: #8a2e00; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll { max-height: none; overflow: visible; } th { position: static; }
  td, th { white-space: normal; padding: .1rem .5rem; } figure, tr, .card { break-inside: avoid; }
  .card { border: 1px solid var(--line); } }
"""
    f"@media screen and ({_NARROW}) {{"
    """
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table, tbody, tr { display: block; }
  tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  td, td.n, td.s { display: grid; grid-template-columns: 9rem 1fr; gap: .8rem; border: 0;
    padding: .1rem .8rem; text-align: left; white-space: normal; }
  td::before { color: var(--faint); }
}
"""
)

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
<nav><a href="#plots">Plots</a><a href="#tables">Tables</a>{links}
<a href="#steps">Steps</a></nav>
</header>
<dl>{cards}</dl>
<p class="verify">Based on manifests: they show which saves a restore needs, and that these
exist. <code>deltackpt verify</code> reads every byte.</p>
{warnings}
<h2 id="plots">Plots</h2>
{pictures}
<h2 id="tables">Tables</h2>
{tables}
{further}
<h2 id="steps">Steps</h2>
{steps}
<footer>Generated by deltackpt {version} at {made} UTC.</footer>
</body>
</html>
"""
