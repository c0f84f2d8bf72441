# SPDX-License-Identifier: Apache-2.0
"""Plots of a checkpoint directory.

Every function returns a matplotlib figure, which notebooks show and ``savefig`` writes. pyplot is
not used: no display is needed and no global state changes. If there are more tables or saves than
a plot can show, it shows a selection, which its title names.

Importing this module needs the extra ``plots``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from deltackpt import units
from deltackpt.errors import OptionError
from deltackpt.format import naming, row_blocks
from deltackpt.inspect import pictures
from deltackpt.units import count

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deltackpt.inspect import Checkpoints, Save

#: Tables or fields with their own line.
_TOP = 8
#: Columns of a heat map, and points of a line: a screen cannot resolve more.
_MOST_COLUMNS = 400
_MOST_POINTS = 400
#: Steps in a plot of drift.
_MOST_DRIFT_STEPS = 400
_QUANTILES = {0.5: "median", 0.9: "90 % quantile", 0.99: "99 % quantile", 1.0: "largest"}
#: Up to this many points are drawn as individual markers.
_SINGLED_OUT = 100


class _Markers(TypedDict, total=False):
    color: str
    marker: str
    markersize: float
    markeredgewidth: float
    fillstyle: Literal["none"]


_BASE: _Markers = {"marker": "s", "color": pictures.BLUE}
_DELTA: _Markers = {"marker": "o", "color": pictures.ORANGE}
_COMPACTED: _Markers = {
    "marker": "o",
    "markersize": 11,
    "markeredgewidth": 1.8,
    "fillstyle": "none",
    "color": pictures.GREEN,
}


def timeline(
    ck: Checkpoints | Sequence[Save],
    *,
    compacted: Mapping[int, int] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Plots the bytes of every save by kind, with a line from each delta to its parent.

    Steps with a compacted base are marked; the title includes its bytes.

    Args:
      ck: the directory, or some of its saves.
      compacted: bytes of compacted bases by step; by default those of the directory, or none if
        ``ck`` is a selection of saves.
      ax: where to draw; a new figure by default.

    Examples:
      >>> timeline(open(directory)).savefig("timeline.svg")  # doctest: +SKIP
    """
    ax = pictures.axes(ax)
    saves = _saves(ck)
    if compacted is None:
        compacted = {} if isinstance(ck, Sequence) else ck.compacted
    pictures.step_axis(ax, [save.step for save in saves])
    whole = _whole(saves)
    if not saves:
        pictures.note(ax, "no step was saved")
    elif whole:
        pictures.byte_axis(ax, [save.disk_bytes for save in whole], "bytes on disk")
    at = {save.step: (save.step, save.disk_bytes) for save in whole}
    links = [(at[s.step], at[s.parent]) for s in whole if s.parent is not None and s.parent in at]
    entries: list[tuple[str, Artist]] = []
    if links:
        entries.append(("link to parent", pictures.draw_links(ax, links)))
    size = 6.0 if len(saves) <= _SINGLED_OUT else 3.0
    looks: Sequence[tuple[str, list[Save], _Markers]] = (
        ("delta", [s for s in whole if s.kind == "delta"], _DELTA | {"markersize": size}),
        ("base", [s for s in whole if s.kind == "base"], _BASE | {"markersize": size}),
        ("with a compacted base", [s for s in whole if s.compacted], _COMPACTED),
    )
    for label, chosen, look in looks:
        if chosen:
            steps, sizes = zip(*(at[save.step] for save in chosen))
            entries.append((label, ax.plot(steps, sizes, linestyle="none", **look)[0]))
    damaged = [save.step for save in saves if save.problem]
    if damaged:
        marks = pictures.mark_steps(ax, damaged, pictures.RED, height=0.04, marker="X", size=9)
        entries.append(("cannot be restored", marks))
    pictures.legend(ax, entries)
    total = units.size(disk_bytes(saves, compacted))
    bases = f"; {count(len(compacted), 'compacted base')}" if compacted else ""
    pictures.title(ax, f"{count(len(saves), 'save')}: {kinds(saves)}{bases}; {total} on disk")
    return pictures.figure(ax)


def chain_lengths(ck: Checkpoints | Sequence[Save], *, ax: Axes | None = None) -> Figure:
    """Plots how many deltas a restore of each step merges onto its base.

    Args:
      ck: the directory, or some of its saves.
      ax: where to draw; a new figure by default.
    """
    ax = pictures.axes(ax, height=2.6)
    saves = _saves(ck)
    whole = _whole(saves)
    steps = [save.step for save in whole]
    pictures.step_axis(ax, steps)
    if not whole:
        pictures.note(ax, "no step can be restored")
        return pictures.figure(ax)
    lengths = [save.chain_length or 0 for save in whole]
    marker = "o" if len(steps) <= _SINGLED_OUT else ""
    look: _Markers = {"color": pictures.ORANGE, "marker": marker, "markersize": 4}
    drawn = ax.plot(steps, lengths, drawstyle="steps-mid", **look)[0]
    entries: list[tuple[str, Artist]] = [("deltas", drawn)]
    if bases := [save.step for save in whole if save.kind == "base"]:
        entries.append(("base", pictures.mark_steps(ax, bases)))
    if compacted := [save.step for save in whole if save.compacted]:
        entries.append(("compacted base", pictures.mark_steps(ax, compacted, pictures.GREEN)))
    pictures.count_axis(ax, max(lengths), "deltas")
    pictures.legend(ax, entries)
    most = f"at most {count(max(lengths), 'delta')}"
    if left_out := len(saves) - len(whole):
        most += f"; without {count(left_out, 'step')} that cannot be restored"
    pictures.title(ax, f"Deltas that a restore merges: {most}")
    return pictures.figure(ax)


def touched_fraction(
    ck: Checkpoints | Sequence[Save], tables: Sequence[str] | None = None, *, ax: Axes | None = None
) -> Figure:
    """Plots the share of each table's rows in each delta.

    If there are more than 8 tables, those with the most rows written have their own lines. All
    others are drawn together, as their median and the range from the 10th to the 90th percentile.

    Args:
      ck: the directory, or some of its saves; bases are ignored.
      tables: names of the tables; all by default.
      ax: where to draw; a new figure by default.

    Raises:
      OptionError: no save contains rows of a table of that name.
    """
    ax = pictures.axes(ax)
    saves = _whole(_saves(ck))
    steps, shares, written = _touched_shares(saves)
    if tables is not None:
        shares = {name: shares[name] for name in _known(tables, shares)}
    pictures.step_axis(ax, [save.step for save in saves])
    if not steps:
        pictures.note(ax, "no delta was saved")
        return pictures.figure(ax)
    ranked = sorted(shares, key=lambda name: -written[name])
    entries = _draw_lines(ax, steps, {name: shares[name] for name in ranked})
    pictures.share_axis(ax, np.array(list(shares.values())), "rows touched since the parent")
    if bases := [save.step for save in saves if save.kind == "base"]:
        entries.append(("base: all rows", pictures.mark_steps(ax, bases)))
    pictures.legend(ax, entries)
    which = _chosen(ranked, "with the most rows written") + _windows(len(steps))
    pictures.title(ax, f"Share of rows in deltas{which}")
    return pictures.figure(ax)


def activity(ck: Checkpoints, table: str, *, bins: int = 64, ax: Axes | None = None) -> Figure:
    """Plots which parts of a table are touched, as a heat map of rows over deltas.

    The table is divided into ranges of rows; the color is the share of a range that is in a
    delta. If there are more than 400 deltas, 400 evenly spaced ones are read.

    Args:
      ck: the directory.
      table: name of the table.
      bins: number of ranges of rows.
      ax: where to draw; a new figure by default.

    Raises:
      OptionError: the table does not exist, or ``bins`` is less than 1.
      RestoreError: a delta cannot be read.
    """
    if bins < 1:
        raise OptionError(f"bins: expected at least 1, found {bins}; pass a positive number")
    ax = pictures.axes(ax)
    deltas = [save for save in _whole(ck.saves) if save.kind == "delta"]
    shown = [deltas[i] for i in _spread(len(deltas), _MOST_COLUMNS)]
    if not shown:
        pictures.note(ax, "no delta was saved")
        return pictures.figure(ax)
    found = ck.at(shown[-1].step).tables
    [table] = _known([table], found)
    rows = found[table].shape[0]
    edges = np.unique(np.linspace(0, rows, bins + 1).astype(np.int64))
    shares = np.zeros((len(edges) - 1, len(shown)))
    for column, save in enumerate(shown):
        touched = ck.touched(save.step, tables=[table]).get(table, np.empty(0, np.int64))
        shares[:, column] = np.histogram(touched, edges)[0] / np.diff(edges)
    steps = [save.step for save in shown]
    ax.grid(False)
    columns = _column_edges(steps)
    mesh = ax.pcolormesh(
        columns, edges, shares, cmap="cividis", norm=pictures.shares_norm(shares), rasterized=True
    )
    bar = pictures.figure(ax).colorbar(mesh, ax=ax, pad=0.015, label="share of rows in the delta")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    bar.outline.set_visible(False)
    pictures.step_axis(ax, steps)
    ax.set_xlim(columns[0], columns[-1])
    ax.set_ylabel(f"row index, in ranges of {int(np.diff(edges).max()):,}")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    some = f", {len(shown):,} of {len(deltas):,} deltas" if len(shown) < len(deltas) else ""
    pictures.title(ax, f"Touched rows of {pictures.short(table)}{some}")
    return pictures.figure(ax)


def drift(
    ck: Checkpoints,
    table: str,
    rows: npt.ArrayLike | None = None,
    base: int | None = None,
    *,
    seed: int = 0,
    ax: Axes | None = None,
) -> Figure:
    """Plots how far rows have moved since a step, as quantiles of the l2 distance.

    If there are more than 400 steps, 400 evenly spaced ones are read.

    Args:
      ck: the directory.
      table: name of the table.
      rows: row indices, (R,) integers; by default a sample of 1,024 in runs of 16 adjacent rows,
        or fewer if their values over all steps would take more than 64 MiB.
      base: the step from which distances are measured; by default the oldest with rows of the
        table.
      seed: seed of the sample.
      ax: where to draw; a new figure by default.

    Raises:
      OptionError: the table or step does not exist.
      RestoreError: a save cannot be read.
    """
    moved = _drift(ck, table, rows, base, seed)
    ax = pictures.axes(ax)
    pictures.step_axis(ax, moved.steps)
    finite = np.isfinite(moved.distances).all(axis=0)
    if not finite.any():
        pictures.note(ax, "no row is finite at every step")
        return pictures.figure(ax)
    quantiles = np.quantile(moved.distances[:, finite], list(_QUANTILES), axis=1)
    marker = "o" if len(moved.steps) <= _SINGLED_OUT else ""
    entries: list[tuple[str, Artist]] = []
    for label, line, color in zip(_QUANTILES.values(), quantiles, pictures.LINES):
        look: _Markers = {"color": color, "marker": marker, "markersize": 3.5}
        entries.append((label, ax.plot(moved.steps, line, **look)[0]))
    low, middle = quantiles[:2]
    filled = ax.fill_between(moved.steps, low, middle, color=pictures.BLUE, alpha=0.12, linewidth=0)
    entries.insert(0, ("median to 90 % quantile", filled))
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"l2 distance from step {moved.steps[0]:,}")
    pictures.legend(ax, entries[::-1])
    pictures.title(ax, moved.title(table))
    return pictures.figure(ax)


def codec_error(ck: Checkpoints | Sequence[Save], *, ax: Axes | None = None) -> Figure:
    """Plots the relative l2 error of lossy codecs in each save, by table and slot.

    If there are more than 8 of these, those with the largest errors have their own lines. All
    others are drawn together, as their median and the range from the 10th to the 90th percentile.

    Args:
      ck: the directory, or some of its saves.
      ax: where to draw; a new figure by default.
    """
    ax = pictures.axes(ax)
    saves = _whole(_saves(ck))
    errors: dict[str, np.ndarray] = {}
    for column, save in enumerate(saves):
        for figures in save.tables:
            if figures.relative_error > 0:
                name = f"{_field_name(figures.table, figures.field)} ({figures.codec})"
                line = errors.setdefault(name, np.full(len(saves), np.nan))
                line[column] = figures.relative_error
    pictures.step_axis(ax, [save.step for save in saves])
    if not errors:
        pictures.note(ax, "every save is lossless" if saves else "no step can be restored")
        return pictures.figure(ax)
    ranked = sorted(errors, key=lambda name: -np.nanmax(errors[name]))
    ordered = {name: errors[name] for name in ranked}
    entries = _draw_lines(ax, [save.step for save in saves], ordered)
    pictures.share_axis(ax, np.array(list(errors.values())), "relative l2 error")
    pictures.legend(ax, entries)
    which = _chosen(ranked, "with the largest errors") + _windows(len(saves))
    pictures.title(ax, f"Codec errors{which}")
    return pictures.figure(ax)


def _saves(ck: Checkpoints | Sequence[Save]) -> Sequence[Save]:
    return ck if isinstance(ck, Sequence) else ck.saves


def _whole(saves: Sequence[Save]) -> list[Save]:
    """Saves that can be restored, by their manifests."""
    return [save for save in saves if not save.problem]


def kinds(saves: Sequence[Save]) -> str:
    """Counts bases, deltas, unreadable saves and broken chains, as text."""
    found = [save.kind for save in saves]
    pieces = [count(found.count(kind), kind) for kind in ("base", "delta")]
    if unreadable := found.count(None):
        pieces.append(f"{unreadable:,} unreadable")
    text = ", ".join(pieces)
    if broken := sum(bool(save.problem) for save in saves if save.kind):
        text += f"; {count(broken, 'broken chain')}"
    return text


def disk_bytes(saves: Sequence[Save], compacted: Mapping[int, int]) -> int:
    """Sums the bytes on disk of saves and compacted bases."""
    return sum(save.disk_bytes for save in saves) + sum(compacted.values())


def _touched_shares(
    saves: Sequence[Save],
) -> tuple[list[int], dict[str, np.ndarray], dict[str, int]]:
    """Returns the deltas' steps, share of rows by table (NaN without it), and rows by table."""
    deltas = [save for save in saves if save.kind == "delta"]
    shares: dict[str, np.ndarray] = {}
    written: dict[str, int] = {}
    for column, save in enumerate(deltas):
        held = {f.table: f.rows for f in save.tables if f.field == row_blocks.VALUES}
        for name, total in save.table_rows.items():
            line = shares.setdefault(name, np.full(len(deltas), np.nan))
            line[column] = held.get(name, 0) / max(1, total)
            written[name] = written.get(name, 0) + held.get(name, 0)
    return [save.step for save in deltas], shares, written


def _draw_lines(
    ax: Axes, steps: Sequence[int], lines: Mapping[str, np.ndarray]
) -> list[tuple[str, Artist]]:
    """Draws the first lines and the range of all others; returns labels and artists."""
    entries: list[tuple[str, Artist]] = []
    marker = "o" if len(steps) <= _SINGLED_OUT else ""
    names = list(lines)
    middles = _medians(np.asarray(steps, np.float64))
    for name, color in zip(names[:_TOP], pictures.LINES):
        line = _medians(lines[name])
        known = np.isfinite(line)
        look: _Markers = {"color": color, "marker": marker, "markersize": 3.5}
        drawn = ax.plot(middles[known], line[known], linewidth=1.2, **look)[0]
        entries.append((pictures.short(name), drawn))
    others = np.array([_medians(lines[name]) for name in names[_TOP:]])
    if others.size:
        known = np.isfinite(others).any(axis=0)
        low, middle, high = np.nanquantile(others[:, known], (0.1, 0.5, 0.9), axis=0)
        ax.fill_between(middles[known], low, high, color=pictures.GREY, alpha=0.3, linewidth=0)
        drawn = ax.plot(middles[known], middle, color=pictures.GREY, linestyle="--")[0]
        entries.append((f"{count(len(others), 'other')}: median, 10 to 90 %", drawn))
    return entries


def _window(count: int) -> int:
    """Number of saves per point of a line."""
    return -(-count // _MOST_POINTS)


def _windows(count: int) -> str:
    return f"; medians of {_window(count)} saves each" if _window(count) > 1 else ""


def _medians(line: np.ndarray) -> np.ndarray:
    """Medians of windows of a line; NaN for a window without values."""
    window = _window(len(line))
    if window <= 1:
        return line
    padded = np.pad(line, (0, -len(line) % window), constant_values=np.nan).reshape(-1, window)
    known = np.isfinite(padded).any(axis=1)
    middles = np.full(len(padded), np.nan)
    middles[known] = np.nanmedian(padded[known], axis=1)
    return middles


def _chosen(ranked: Sequence[str], why: str) -> str:
    return f": the {_TOP} {why}, of {len(ranked):,}" if len(ranked) > _TOP else ""


def _field_name(table: str, field: str) -> str:
    return table if field == row_blocks.VALUES else f"{table} {field}"


def _known(names: Sequence[str], known: Mapping[str, object]) -> list[str]:
    found = [naming.meant(name, known, OptionError) for name in names]
    for name in found:
        if name not in known:
            raise OptionError(
                f"table {name!r}: expected one of {', '.join(sorted(known)[:10])}"
                f"{' ...' if len(known) > 10 else ''}, found none of that name; choose one of these"
            )
    return found


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced indices below ``count``, including both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int)).tolist()


def _column_edges(steps: Sequence[int]) -> np.ndarray:
    """Edges of columns centred near the steps."""
    middles = np.asarray(steps, np.float64)
    if len(middles) == 1:
        return middles[0] + np.array([-0.5, 0.5])
    between = (middles[1:] + middles[:-1]) / 2
    first, last = 2 * middles[0] - between[0], 2 * middles[-1] - between[-1]
    return np.concatenate([[first], between, [last]])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Drift:
    """Distances (steps, rows) of rows from their values at the first of some steps."""

    steps: list[int]
    distances: np.ndarray
    total_steps: int
    total_rows: int

    def title(self, table: str) -> str:
        rows = self.distances.shape[1]
        moved = 100 * (self.distances[-1] > 0).mean()
        text = f"Drift of {pictures.short(table)}: {rows:,} of {count(self.total_rows, 'row')}"
        text += f", {moved:.0f} % of them moved"
        if len(self.steps) < self.total_steps:
            text += f", at {len(self.steps):,} of {self.total_steps:,} steps"
        if left_out := np.count_nonzero(~np.isfinite(self.distances).all(axis=0)):
            text += f"; without {left_out:,} that {'is' if left_out == 1 else 'are'} not finite"
        return text


def _drift(
    ck: Checkpoints, table: str, rows: npt.ArrayLike | None, base: int | None, seed: int
) -> _Drift:
    whole = _whole(ck.saves)
    if base is None:
        holding = {figures.table: save.step for save in whole[::-1] for figures in save.tables}
        [table] = _known([table], holding)
        base = holding[table]
    later = [save.step for save in whole if save.step >= base]
    if base not in later:
        raise OptionError(
            f"base: expected a restorable step of {ck.store_path}, found {base}; see ck.saves"
        )
    tables = ck.at(base).tables
    [table] = _known([table], tables)
    total = tables[table].shape[0]
    if rows is None:
        rows = _sample(total, tables[table].row_bytes * len(later), seed)
    steps = [later[place] for place in _spread(len(later), _MOST_DRIFT_STEPS)]
    history = ck.history(table, np.unique(np.asarray(rows, np.int64)), steps=steps)
    origin = history.values[0].astype(np.float64)
    return _Drift(
        steps=history.steps.tolist(),
        distances=np.array([_distances(values, origin) for values in history.values]),
        total_steps=len(later),
        total_rows=total,
    )


#: Rows of a sample, and of each run of adjacent rows.
_SAMPLE_ROWS = 1024
_RUN_ROWS = 16
#: Memory limit of a sample, over all steps.
_SAMPLE_BYTES = 64 << 20


def _sample(rows: int, row_bytes: int, seed: int) -> np.ndarray:
    """Returns runs of adjacent rows at random positions: verifying a block reads many anyway."""
    most = min(_SAMPLE_ROWS, max(_RUN_ROWS, _SAMPLE_BYTES // max(1, row_bytes)))
    if rows <= most:
        return np.arange(rows)
    starts = np.arange(0, rows, _RUN_ROWS)
    chosen = np.random.default_rng(seed).choice(starts, most // _RUN_ROWS, replace=False)
    found = np.sort(chosen)[:, None] + np.arange(_RUN_ROWS)
    return found[found < rows]


def _distances(values: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Returns the l2 distance of each row from its origin."""
    with np.errstate(invalid="ignore"):  # inf - inf is nan, which is left out.
        difference = values.astype(np.float64) - origin
        return np.linalg.norm(difference.reshape(len(difference), -1), axis=1)
