# SPDX-License-Identifier: Apache-2.0
"""Plots of a checkpoint directory.

Every function returns a matplotlib figure, which notebooks show and ``savefig`` writes. pyplot is
not used: no display is needed and no global state changes. If there are more tables or saves than
a plot can show, it shows a selection, which its title names.

Importing this module needs the extra ``plots``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from deltackpt import units
from deltackpt.errors import MissingExtra, OptionError
from deltackpt.format import naming, row_blocks
from deltackpt.units import count

try:
    from matplotlib import rc_context
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator
except ImportError as error:
    raise MissingExtra(
        "plots and reports: expected matplotlib, found that it cannot be imported; run: "
        'pip install "deltackpt[plots]"'
    ) from error

if TYPE_CHECKING:
    import numpy.typing as npt

    from deltackpt.inspect import Checkpoints, Save

_T = TypeVar("_T")

#: Okabe and Ito's palette, which is safe for color-blind readers.
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
_LINES = (_BLUE, _ORANGE, _GREEN, "#CC79A7", "#56B4E9", _RED, "#B8A800", "#1b1d21")
#: Saves in a plot: a screen cannot resolve more. Up to the second number, each has a marker.
_MOST_SAVES = 400
_SINGLED_OUT = 100
_QUANTILES = {0.5: "median", 0.9: "90 % quantile", 0.99: "99 % quantile", 1.0: "largest"}
_NAME_LENGTH = 34
#: Above this ratio of the largest to the smallest value, an axis is logarithmic.
_LOG_RATIO = 16.0
#: Rows of a sample, of each run of adjacent rows, and its memory limit over all steps.
_SAMPLE_ROWS = 1024
_RUN_ROWS = 16
_SAMPLE_BYTES = 64 << 20


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
    drawing = _Drawing(ax)
    saves = _saves(ck)
    if compacted is None:
        compacted = {} if isinstance(ck, Sequence) else ck.compacted
    drawing.step_axis([save.step for save in saves])
    whole = _whole(saves)
    if not saves:
        drawing.note("no step was saved")
    elif whole:
        drawing.byte_axis([save.disk_bytes for save in whole])
    at = {save.step: (save.step, save.disk_bytes) for save in whole}
    links = [(at[s.step], at[s.parent]) for s in whole if s.parent is not None and s.parent in at]
    if links:
        lines = LineCollection(links, colors=_GREY, linewidths=0.8, alpha=0.5, zorder=1)
        drawing.add("link to parent", drawing.ax.add_collection(lines, autolim=False))
    size = 6.0 if len(saves) <= _SINGLED_OUT else 3.0
    ring = {"markersize": 11, "markeredgewidth": 1.8, "fillstyle": "none"}
    for label, chosen, look in (
        ("delta", [s for s in whole if s.kind == "delta"], {"color": _ORANGE, "markersize": size}),
        ("base", [s for s in whole if s.kind == "base"], {"color": _BLUE, "markersize": size}),
        ("with a compacted base", [s for s in whole if s.compacted], {"color": _GREEN, **ring}),
    ):
        if chosen:
            steps, sizes = zip(*(at[save.step] for save in chosen))
            marker = "s" if label == "base" else "o"
            drawing.line(label, steps, sizes, linestyle="none", marker=marker, **look)
    drawing.mark("cannot be restored", [s.step for s in saves if s.problem], _RED, height=0.04)
    total = units.size(disk_bytes(saves, compacted))
    bases = f"; {count(len(compacted), 'compacted base')}" if compacted else ""
    return drawing.done(f"{count(len(saves), 'save')}: {kinds(saves)}{bases}; {total} on disk")


def chain_lengths(ck: Checkpoints | Sequence[Save], *, ax: Axes | None = None) -> Figure:
    """Plots how many deltas a restore of each step merges onto its base.

    Args:
      ck: the directory, or some of its saves.
      ax: where to draw; a new figure by default.
    """
    drawing = _Drawing(ax, height=2.6)
    saves = _saves(ck)
    whole = _whole(saves)
    steps = [save.step for save in whole]
    drawing.step_axis(steps)
    if not whole:
        return drawing.note("no step can be restored")
    lengths = [save.chain_length or 0 for save in whole]
    drawing.line("deltas", steps, lengths, drawstyle="steps-mid", color=_ORANGE)
    drawing.mark("base", [save.step for save in whole if save.kind == "base"])
    drawing.mark("compacted base", [save.step for save in whole if save.compacted], _GREEN)
    drawing.ax.set_ylabel("deltas")
    drawing.ax.set_ylim(0, max(1, *lengths) * 1.1)
    drawing.ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    most = f"at most {count(max(lengths), 'delta')}"
    if left_out := len(saves) - len(whole):
        most += f"; without {count(left_out, 'step')} that cannot be restored"
    return drawing.done(f"Deltas that a restore merges: {most}")


def touched_fraction(
    ck: Checkpoints | Sequence[Save], tables: Sequence[str] | None = None, *, ax: Axes | None = None
) -> Figure:
    """Plots the share of each table's rows in each delta.

    If there are more than 8 tables, those with the most rows written are drawn. If there are more
    than 400 deltas, 400 evenly spaced ones are.

    Args:
      ck: the directory, or some of its saves; bases are ignored.
      tables: names of the tables; all by default.
      ax: where to draw; a new figure by default.

    Raises:
      OptionError: no save contains rows of a table of that name.
    """
    drawing = _Drawing(ax)
    saves = _whole(_saves(ck))
    deltas = [save for save in saves if save.kind == "delta"]
    shown = _spread(deltas)
    shares: dict[str, np.ndarray] = {}
    written: dict[str, int] = {}
    for column, save in enumerate(shown):
        held = {f.table: f.rows for f in save.tables if f.field == row_blocks.VALUES}
        for name, total in save.table_rows.items():
            line = shares.setdefault(name, np.full(len(shown), np.nan))
            line[column] = held.get(name, 0) / max(1, total)
            written[name] = written.get(name, 0) + held.get(name, 0)
    if tables is not None:
        shares = {name: shares[name] for name in _known(tables, shares)}
    drawing.step_axis([save.step for save in saves])
    if not shown:
        return drawing.note("no delta was saved")
    ranked = sorted(shares, key=lambda name: -written[name])
    drawing.lines([save.step for save in shown], {name: shares[name] for name in ranked})
    drawing.share_axis(shares.values(), "rows touched since the parent")
    drawing.mark("base: all rows", [save.step for save in saves if save.kind == "base"])
    which = _of_tables(ranked, "with the most rows written") + _of_saves(shown, deltas, "deltas")
    return drawing.done(f"Share of rows in deltas{which}")


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
    drawing = _Drawing(ax)
    deltas = [save for save in _whole(ck.saves) if save.kind == "delta"]
    shown = _spread(deltas)
    if not shown:
        return drawing.note("no delta was saved")
    found = ck.at(shown[-1].step).tables
    [table] = _known([table], found)
    rows = found[table].shape[0]
    edges = np.unique(np.linspace(0, rows, bins + 1).astype(np.int64))
    shares = np.zeros((len(edges) - 1, len(shown)))
    for column, save in enumerate(shown):
        touched = ck.touched(save.step, tables=[table]).get(table, np.empty(0, np.int64))
        shares[:, column] = np.histogram(touched, edges)[0] / np.diff(edges)
    steps = np.array([save.step for save in shown], np.float64)
    widths = np.diff(steps) if len(steps) > 1 else np.ones(1)
    # Columns are centred near the steps.
    first, last = steps[0] - widths[0] / 2, steps[-1] + widths[-1] / 2
    columns = np.array([first, *(steps[1:] + steps[:-1]) / 2, last])
    ax = drawing.ax
    ax.grid(False)
    # A color scale that separates small shares too.
    norm = PowerNorm(0.5, vmin=0.0, vmax=float(shares.max()) or 1.0)
    mesh = ax.pcolormesh(columns, edges, shares, cmap="cividis", norm=norm, rasterized=True)
    bar = drawing.figure.colorbar(mesh, ax=ax, pad=0.015, label="share of rows in the delta")
    bar.ax.yaxis.set_major_formatter(_PERCENT)
    drawing.step_axis([save.step for save in shown])
    ax.set_xlim(columns[0], columns[-1])
    ax.set_ylabel(f"row index, in ranges of {int(np.diff(edges).max()):,}")
    ax.yaxis.set_major_formatter(_NUMBER)
    return drawing.done(f"Touched rows of {_short(table)}{_of_saves(shown, deltas, 'deltas')}")


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
    whole = _whole(ck.saves)
    if base is None:
        oldest = {figures.table: save.step for save in whole[::-1] for figures in save.tables}
        [table] = _known([table], oldest)
        base = oldest[table]
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
    history = ck.history(table, np.unique(np.asarray(rows, np.int64)), steps=_spread(later))
    steps, values = history.steps.tolist(), history.values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is nan, which is left out.
        moved = (values - values[0]).reshape(*values.shape[:2], -1)
        distances = np.linalg.norm(moved, axis=2)
    finite = np.isfinite(distances).all(axis=0)
    drawing = _Drawing(ax)
    drawing.step_axis(steps)
    if not finite.any():
        return drawing.note("no row is finite at every step")
    quantiles = np.quantile(distances[:, finite], list(_QUANTILES), axis=1)
    filled = drawing.ax.fill_between(steps, *quantiles[:2], color=_BLUE, alpha=0.12, linewidth=0)
    for label, line, color in reversed([*zip(_QUANTILES.values(), quantiles, _LINES)]):
        drawing.line(label, steps, line, color=color)
    drawing.add("median to 90 % quantile", filled)
    drawing.ax.set_ylim(bottom=0)
    drawing.ax.set_ylabel(f"l2 distance from step {steps[0]:,}")
    title = f"Drift of {_short(table)}: {distances.shape[1]:,} of {count(total, 'row')}"
    title += f", {100 * (distances[-1] > 0).mean():.0f} % of them moved"
    if len(steps) < len(later):
        title += f", at {len(steps):,} of {len(later):,} steps"
    if left_out := np.count_nonzero(~finite):
        title += f"; without {left_out:,} that {'is' if left_out == 1 else 'are'} not finite"
    return drawing.done(title)


def codec_error(ck: Checkpoints | Sequence[Save], *, ax: Axes | None = None) -> Figure:
    """Plots the relative l2 error of lossy codecs in each save, by table and slot.

    If there are more than 8 of these, those with the largest errors are drawn. If there are more
    than 400 saves, 400 evenly spaced ones are.

    Args:
      ck: the directory, or some of its saves.
      ax: where to draw; a new figure by default.
    """
    drawing = _Drawing(ax)
    saves = _whole(_saves(ck))
    shown = _spread(saves)
    errors: dict[str, np.ndarray] = {}
    for column, save in enumerate(shown):
        for found in save.tables:
            if found.relative_error > 0:
                field = "" if found.field == row_blocks.VALUES else f" {found.field}"
                name = f"{found.table}{field} ({found.codec})"
                line = errors.setdefault(name, np.full(len(shown), np.nan))
                line[column] = found.relative_error
    steps = [save.step for save in shown]
    drawing.step_axis(steps)
    if not errors:
        return drawing.note("every save is lossless" if saves else "no step can be restored")
    ranked = sorted(errors, key=lambda name: -np.nanmax(errors[name]))
    drawing.lines(steps, {name: errors[name] for name in ranked})
    drawing.share_axis(errors.values(), "relative l2 error")
    which = _of_tables(ranked, "with the largest errors") + _of_saves(shown, saves, "saves")
    return drawing.done(f"Codec errors{which}")


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


def svg(figure: Figure) -> bytes:
    """Returns a figure as SVG with text elements, without metadata.

    Text as paths, matplotlib's default, makes an image three times as large.
    """
    buffer, metadata = io.BytesIO(), ("Creator", "Date", "Format", "Type")
    with rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(metadata))
    return buffer.getvalue()


class _Picture(Figure):
    """A figure that needs no display, and that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


_NUMBER = FuncFormatter(lambda value, _: f"{value:,.0f}")
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g} %")
_BYTES = FuncFormatter(lambda value, _: units.size(value).replace(".0 ", " "))


class _Drawing:
    """Axes in deltackpt's style, with the entries of a legend."""

    def __init__(self, ax: Axes | None, height: float = 3.6):
        if ax is None:
            ax = _Picture(figsize=(9.0, height), layout="constrained").subplots()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
        ax.set_axisbelow(True)
        figure = ax.get_figure(root=True)
        assert figure is not None
        self.ax, self.figure = ax, figure
        self._entries: list[tuple[str, Artist]] = []

    def add(self, label: str, drawn: Artist) -> None:
        self._entries.append((label, drawn))

    def line(self, label: str, x: Sequence[int], y: Sequence[float] | np.ndarray, **look: Any):
        marker = "o" if len(x) <= _SINGLED_OUT else ""
        self.add(label, self.ax.plot(x, y, **{"marker": marker, "markersize": 3.5, **look})[0])

    def lines(self, steps: Sequence[int], found: Mapping[str, np.ndarray]) -> None:
        """Draws as many lines as there are colors, without the steps at which one has no value."""
        for (name, line), color in zip(found.items(), _LINES):
            known = np.isfinite(line)
            x = [step for step, has in zip(steps, known) if has]
            self.line(_short(name), x, line[known], color=color)

    def mark(self, label: str, steps: Sequence[int], color: str = _GREY, height: float = 1.0):
        """Marks steps at a share of the height of the axes."""
        if steps:
            place = self.ax.get_xaxis_transform()
            look = {"marker": "v" if height == 1 else "X", "linestyle": "none", "clip_on": False}
            heights = np.full(len(steps), height)
            self.line(label, steps, heights, color=color, transform=place, markersize=6, **look)

    def step_axis(self, steps: Sequence[int]) -> None:
        """Sets up the x axis; ``steps`` are ascending."""
        self.ax.set_xlabel("training step")
        self.ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        self.ax.xaxis.set_major_formatter(_NUMBER)
        if steps:
            margin = max(0.5, 0.02 * (steps[-1] - steps[0]))
            self.ax.set_xlim(steps[0] - margin, steps[-1] + margin)

    def byte_axis(self, sizes: Iterable[int]) -> None:
        self.ax.set_ylabel("bytes on disk")
        known = [size for size in sizes if size > 0] or [1]
        if max(known) / min(known) > _LOG_RATIO:
            self.ax.set_yscale("log", base=2)
            self.ax.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
            self.ax.set_ylim(min(known) / 2, max(known) * 2)
        else:
            step = 2 ** np.floor(np.log2(max(known) / 3))
            self.ax.yaxis.set_major_locator(MultipleLocator(step))
            self.ax.set_ylim(0, max(known) * 1.15)
        self.ax.yaxis.set_major_formatter(_BYTES)

    def share_axis(self, lines: Iterable[np.ndarray], label: str) -> None:
        self.ax.set_ylabel(label)
        shares = np.concatenate([*lines, np.zeros(0)])
        known = shares[np.isfinite(shares) & (shares > 0)]
        low, high = (known.min(), known.max()) if known.size else (1.0, 1.0)
        if high / low > _LOG_RATIO:
            # Linear below the smallest share, so that zeros are visible.
            least = 10 ** np.floor(np.log10(low))
            self.ax.set_yscale("symlog", linthresh=least, linscale=0.3)
            self.ax.set_ylim(-0.02 * least, high * 1.6)
        else:
            self.ax.set_ylim(0, high * 1.1)
        self.ax.yaxis.set_major_formatter(_PERCENT)

    def note(self, text: str) -> Figure:
        """Writes a reason into empty axes."""
        where = self.ax.transAxes
        self.ax.text(0.5, 0.5, text, transform=where, ha="center", va="center", parse_math=False)
        self.ax.set_axis_off()
        return self.figure

    def done(self, title: str) -> Figure:
        """Writes the title and the legend, in which names are plain text and may start with _."""
        self.ax.set_title(title, loc="left", fontsize=10, parse_math=False)
        if self._entries:
            labels, drawn = zip(*self._entries)
            place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
            legend = self.ax.legend(drawn, labels, frameon=False, fontsize=8, **place)
            for text in legend.get_texts():
                text.set_parse_math(False)
        return self.figure


def _short(name: str) -> str:
    """Replaces the middle of a long name with an ellipsis."""
    half = (_NAME_LENGTH - 1) // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[:half]}…{name[-half:]}"


def _saves(ck: Checkpoints | Sequence[Save]) -> Sequence[Save]:
    return ck if isinstance(ck, Sequence) else ck.saves


def _whole(saves: Sequence[Save]) -> list[Save]:
    """Saves that can be restored, by their manifests."""
    return [save for save in saves if not save.problem]


def _of_tables(ranked: Sequence[str], why: str) -> str:
    most = len(_LINES)
    return f": the {most} {why}, of {len(ranked):,}" if len(ranked) > most else ""


def _of_saves(shown: Sequence[object], every: Sequence[object], what: str) -> str:
    return f", {len(shown):,} of {len(every):,} {what}" if len(shown) < len(every) else ""


def _known(names: Sequence[str], known: Mapping[str, object]) -> list[str]:
    found = [naming.meant(name, known, OptionError) for name in names]
    for name in found:
        if name not in known:
            raise OptionError(
                f"table {name!r}: expected one of {', '.join(sorted(known)[:10])}"
                f"{' ...' if len(known) > 10 else ''}, found none of that name; choose one of these"
            )
    return found


def _spread(values: Sequence[_T]) -> list[_T]:
    """At most 400 evenly spaced values, including both ends."""
    last = len(values) - 1
    places = np.linspace(0, last, min(len(values), _MOST_SAVES)).astype(int)
    return [values[place] for place in np.unique(places)]


def _sample(rows: int, row_bytes: int, seed: int) -> np.ndarray:
    """Returns runs of adjacent rows at random positions: verifying a block reads many anyway."""
    most = min(_SAMPLE_ROWS, max(_RUN_ROWS, _SAMPLE_BYTES // max(1, row_bytes)))
    if rows <= most:
        return np.arange(rows)
    starts = np.arange(0, rows, _RUN_ROWS)
    chosen = np.random.default_rng(seed).choice(starts, most // _RUN_ROWS, replace=False)
    found = np.sort(chosen)[:, None] + np.arange(_RUN_ROWS)
    return found[found < rows]
