# SPDX-License-Identifier: Apache-2.0
"""Writes an HTML page about a checkpoint directory: its contents, and what can be restored.

The page is a single self-contained file without scripts, external fonts or external images; a
content security policy forbids them. Plots are embedded SVG images.

Importing this module needs the extra ``plots``.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import html
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltackpt.__about__ import __version__
from deltackpt.errors import RestoreError, StorageError
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import TableFigures
from deltackpt.inspect import plots
from deltackpt.inspect.dense_items import PLACEHOLDERS, list_dense, list_saved
from deltackpt.inspect.descriptions import list_epochs, list_saves, shape_text, utc
from deltackpt.inspect.listing import Listing
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir
from deltackpt.units import count, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from deltackpt.inspect import Checkpoints, Save, Step

#: Lines of the table of steps, and of dense leaves, each of which must be opened for its shape.
_MOST_STEPS = 1000
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
    page = _Page(ck)
    text = page.text().encode()
    target = posix.user_path(path)
    DurableDir(target.parent).write(target, text)
    return Report(
        path=os.fspath(path),
        nbytes=len(text),
        steps=len(page.saves),
        compacted=len(page.compacted),
        newest=page.saves[-1].step if page.saves else None,
        restorable=None if page.step is None else page.step.step,
        warnings=tuple(page.warnings),
    )


class _Page:
    """A snapshot of a directory, so that all parts of the page agree."""

    def __init__(self, ck: Checkpoints):
        self._ck = ck
        self.saves = ck.saves
        self.compacted = ck.compacted
        self._problems = {save.step: save.problem for save in self.saves if save.problem}
        #: The newest step with an intact chain.
        self.step = self._newest_intact()
        self.warnings = [*self._restore_warnings()] if self.saves else ["No step was saved yet."]
        self._cards = [*self._summary()]
        #: Id and heading of each section, and its contents.
        self._sections = {
            ("plots", "Plots"): "".join(self._drawn()),
            ("tables", "Tables"): self._tables(),
            ("dense", "Dense leaves"): self._readable("dense leaves are", self._dense),
            ("wal", "Write-ahead log"): self._readable("write-ahead log is", self._wal),
            ("steps", "Steps"): self._steps(),
        }

    def text(self) -> str:
        sections = {key: text for key, text in self._sections.items() if text}
        warnings = "".join(f"<li>{html.escape(text)}</li>" for text in self.warnings)
        return _PAGE.format(
            name=html.escape(self._ck.store_path.name),
            path=html.escape(str(self._ck.store_path)),
            item=html.escape(self._ck.item),
            links="".join(f'<a href="#{at}">{name}</a>' for at, name in sections),
            cards="".join(
                f"<div><dt>{label}</dt><dd><b>{html.escape(value)}</b>"
                f"<small>{html.escape(detail)}</small></dd></div>"
                for label, value, detail in self._cards
            ),
            warnings=f'<ul class="warnings">{warnings}</ul>' if warnings else "",
            sections="".join(
                f'<h2 id="{at}">{name}</h2>{text}' for (at, name), text in sections.items()
            ),
            version=__version__,
            made=utc(time.time()),
        )

    def _newest_intact(self) -> Step | None:
        for save in reversed(self.saves):
            try:
                if save.step not in self._problems:
                    return self._ck.at(save.step)
            except RestoreError as error:  # Retention may have removed it: try an older one.
                self._problems[save.step] = str(error)
        return None

    def _restore_warnings(self) -> Iterator[str]:
        newest = self.saves[-1].step
        if self.step is None:
            yield "No step can be restored."
        elif self.step.step != newest:
            yield f"Step {newest:,} cannot be restored; the newest that can is {self.step.step:,}."
        for step, problem in sorted(self._problems.items())[-_MOST_WARNINGS:]:
            yield f"Step {step:,}: {problem}"
        if (older := len(self._problems) - _MOST_WARNINGS) > 0:
            yield f"{count(older, 'older step')} cannot be restored either: see the table of steps."

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """Label, value and detail of each figure at the top of the page."""
        saves = self.saves
        if not saves:
            yield "steps", "none", ""
            return
        newest = saves[-1]
        at = utc(newest.committed_at)
        yield "newest step", f"{newest.step:,}", f"committed {at} UTC" if at else ""
        if self.step is None:
            yield "restorable", "none", "no chain is intact, by manifests"
        else:
            value = "yes" if self.step.step == newest.step else f"{self.step.step:,}"
            yield "restorable", value, f"{_read_for(self.step)}, by manifests"
        yield "saves", f"{len(saves):,}", plots.kinds(saves)
        written = plots.disk_bytes(saves, self.compacted)
        detail = f"{size(newest.disk_bytes)} for the newest step"
        if self.compacted:
            bases = count(len(self.compacted), "compacted base")
            detail += f", {size(sum(self.compacted.values()))} for {bases}"
        yield "on disk", size(written), detail
        full = _full_bytes(saves, self.compacted)
        if full > written:
            detail = f"{size(full)} if every save were a base"
            yield "saved by deltas", f"{1 - written / full:.1%}", detail
        shares = [s.rows / s.total_rows for s in saves if s.kind == "delta" and s.total_rows]
        if shares:
            yield "rows in a delta", f"{np.median(shares):.2%}", "of all rows, median"

    def _drawn(self) -> Iterator[str]:
        saves, table = self.saves, self._busiest()
        wanted: dict[str, Callable[[], Figure]] = {
            "Saves": lambda: plots.timeline(saves, compacted=self.compacted),
            "Chains": lambda: plots.chain_lengths(saves),
        }
        if table is not None:
            wanted["Touched rows"] = lambda: plots.touched_fraction(saves)
            wanted["Where rows are touched"] = lambda: plots.activity(self._ck, table)
            wanted["Drift of rows"] = lambda: plots.drift(self._ck, table)
        if any(figures.relative_error for save in saves for figures in save.tables):
            wanted["Codec errors"] = lambda: plots.codec_error(saves)
        for heading, draw in wanted.items():
            try:
                yield _image(draw())
            except RestoreError as error:
                self.warnings.append(f"The plot “{heading}” is left out: {error}")

    def _busiest(self) -> str | None:
        """The table with the most rows in deltas."""
        rows = dict.fromkeys(() if self.step is None else self.step.tables, 0)
        for save in self.saves:
            for figures in save.tables if save.kind == "delta" else ():
                if figures.table in rows and figures.field == row_blocks.VALUES:
                    rows[figures.table] += figures.rows
        return max(rows, key=lambda name: rows[name]) if any(rows.values()) else None

    def _tables(self) -> str:
        by_table = collections.defaultdict[str, list[TableFigures]](list)
        for save in self.saves:
            for figures in save.tables:
                by_table[figures.table].append(figures)
        lines: list[tuple[object, ...]] = []
        for name, table in {} if self.step is None else self.step.tables.items():
            held = by_table[name]
            error = max((figures.relative_error for figures in held), default=0.0)
            lines.append(
                (
                    name,
                    shape_text(table.shape),
                    table.dtype.name,
                    ", ".join(table.slots) or None,
                    ", ".join(sorted({figures.codec for figures in held})) or None,
                    sum(figures.rows for figures in held if figures.field == row_blocks.VALUES),
                    size(sum(figures.nbytes for figures in held)),
                    f"{error:.2%}" if error else "none",
                )
            )
        return Listing(_TABLE_COLUMNS, lines).html(len(lines))

    def _readable(self, what: str, describe: Callable[[], str]) -> str:
        """Returns a section; if it cannot be read, warns and leaves it out."""
        try:
            return describe()
        except (RestoreError, StorageError) as error:
            self.warnings.append(f"The {what} not shown: {error}")
            return ""

    def _dense(self) -> str:
        leaves = [] if self.step is None else list(self.step.dense.values())
        held = [leaf for leaf in leaves if leaf.kind not in PLACEHOLDERS]
        note = list_dense(leaf for leaf in leaves if leaf.kind in PLACEHOLDERS).title
        if len(held) > _MOST_LEAVES:
            note = f"and {len(held) - _MOST_LEAVES:,} more leaves {note}"
        text = list_dense(held[:_MOST_LEAVES]).html(_MOST_LEAVES) if held else ""
        text += f"<p>{html.escape(note)}</p>" if note else ""
        if self.step is not None and self.step.dense_saved:
            text += list_saved(self.step.dense_saved).html(_MOST_LEAVES)
        return text

    def _wal(self) -> str:
        wal = self._ck.wal
        if wal.problem:
            text = f"The valid recovery points cannot be determined: {wal.problem}"
            self.warnings.append(text)
        for point in [one for one in wal.recovery_points() if one.full][:1]:
            detail = f"appended {utc(point.unix_secs)} UTC"
            self._cards.append(("newest recovery point", f"{point.step:,}", detail))
        return list_epochs(wal).html() if wal.epochs else ""

    def _steps(self) -> str:
        shown = self.saves[: -_MOST_STEPS - 1 : -1]
        older = len(self.saves) - len(shown)
        note = f"<p>{count(older, 'older step')} not shown.</p>" if older else ""
        return list_saves(shown).html(_MOST_STEPS) + note


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


def _image(figure: Figure) -> str:
    """A plot as an image whose alternative text is the title."""
    data = base64.b64encode(plots.svg(figure)).decode()
    title = html.escape(figure.axes[0].get_title(loc="left"))
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'


_TABLE_COLUMNS = (
    "table", "shape", "dtype", "slots", "codecs", "rows written", "on disk", "largest error",
)  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: checkpoints</title>
<style>
body {{ margin: 0 auto; padding: 2rem 1.25rem; max-width: 82rem; color: #1b1d21; background: #fff;
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }}
small, dt, footer {{ color: #5f6570; }} nav a {{ margin-right: 1rem; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; }}
dd {{ margin: 0; }} dd b {{ display: block; font-size: 1.4rem; }}
.warnings {{ color: #b33c00; }} img {{ display: block; width: 100%; }}
table {{ width: 100%; font-size: .85rem; }} th, td {{ text-align: left; vertical-align: top; }}
</style>
</head>
<body>
<h1>{name}</h1>
<p>{path}, item {item}</p>
<nav>{links}</nav>
<dl>{cards}</dl>
<p><small>Based on manifests: they show which saves a restore needs, and that these exist.
<code>deltackpt verify</code> reads every byte.</small></p>
{warnings}
{sections}
<footer>Generated by deltackpt {version} at {made} UTC.</footer>
</body>
</html>
"""
