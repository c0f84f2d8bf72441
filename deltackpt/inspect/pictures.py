# SPDX-License-Identifier: Apache-2.0
"""Helpers for the plots: figures without pyplot, colors, axes in steps and bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence

import numpy as np

from deltackpt import units
from deltackpt.errors import MissingExtra

try:
    import matplotlib
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        MultipleLocator,
    )
except ImportError as error:
    raise MissingExtra(
        "plots and reports: expected matplotlib, found that it cannot be imported; run: "
        'pip install "deltackpt[plots]"'
    ) from error

#: Lines and text; a page replaces it by its own text color, for dark mode.
INK = "#1b1d21"
#: Okabe and Ito's palette, which is safe for color-blind readers.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
LINES = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED, "#B8A800", INK)
#: Readable on white and on black.
GREY = "#888888"

_NAME_LENGTH = 34
#: Metadata that matplotlib adds to an SVG by default.
_SVG_METADATA = ("Creator", "Date", "Format", "Type")
#: Below this ratio of the largest to the smallest value, the axis is linear.
_LOG_RATIO = 16.0
#: Up to this many steps each have a tick; otherwise ticks are at round numbers.
_FEW_STEPS = 12
#: Width of a digit of a tick label in inches, and the share of the width beside a legend.
_DIGIT_INCHES = 0.09
_AXES_SHARE = 0.8


class Picture(Figure):
    """A figure that needs no display, and that notebooks show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def axes(ax: Axes | None, height: float = 3.6) -> Axes:
    """Returns the axes, or those of a new figure of ``height`` inches, in deltackpt's style."""
    if ax is None:
        ax = Picture(figsize=(9.0, height), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def figure(ax: Axes) -> Figure:
    """Returns the root figure of axes."""
    found = ax.get_figure(root=True)
    assert found is not None
    return found


def title(ax: Axes, text: str) -> None:
    """Writes a title at the left; ``$`` in names is not parsed as a formula."""
    ax.set_title(text, loc="left", fontsize=10, parse_math=False)


def note(ax: Axes, text: str) -> None:
    """Writes a reason into empty axes."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", parse_math=False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel("")
    ax.spines[:].set_visible(False)
    ax.grid(False)


def legend(ax: Axes, entries: Sequence[tuple[str, object]]) -> None:
    """Puts a legend beside the axes; labels are plain text and may start with ``_``."""
    if not entries:
        return
    labels, drawn = zip(*entries)
    shown = ax.legend(
        drawn,
        labels,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=8,
    )
    for text in shown.get_texts():
        text.set_parse_math(False)


def short(name: str) -> str:
    """Replaces the middle of a long name with an ellipsis."""
    if len(name) <= _NAME_LENGTH:
        return name
    half = (_NAME_LENGTH - 1) // 2
    return f"{name[: _NAME_LENGTH - 1 - half]}…{name[-half:]}"


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Sets up the x axis for training steps; ``steps`` are ascending."""
    ax.set_xlabel("training step")
    if 0 < len(steps) <= _FEW_STEPS:
        room = _AXES_SHARE * ax.bbox.width / figure(ax).dpi
        ax.xaxis.set_major_locator(FixedLocator(_ticks(steps, room)))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if steps:
        margin = max(0.5, 0.02 * (steps[-1] - steps[0]))
        ax.set_xlim(steps[0] - margin, steps[-1] + margin)


def _ticks(steps: Sequence[int], room: float) -> list[int]:
    """Chooses the steps whose labels fit side by side into ``room`` inches."""
    label = (len(f"{steps[-1]:,}") + 2) * _DIGIT_INCHES
    apart = label / room * (steps[-1] - steps[0])
    chosen = [steps[0]]
    for step in steps[1:]:
        if step - chosen[-1] >= apart:
            chosen.append(step)
    return chosen


def byte_axis(ax: Axes, sizes: Iterable[int], label: str) -> None:
    """Sets up the y axis for bytes: logarithmic if they span more than a factor of 16."""
    ax.set_ylabel(label)
    known = [size for size in sizes if size > 0] or [1]
    if max(known) / min(known) > _LOG_RATIO:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
        ax.set_ylim(min(known) / 2, max(known) * 2)
    else:
        ax.yaxis.set_major_locator(MultipleLocator(2 ** np.floor(np.log2(max(known) / 3))))
        ax.set_ylim(0, max(known) * 1.15)
    ax.yaxis.set_major_formatter(FuncFormatter(_bytes_label))


def _bytes_label(value: float, _: object) -> str:
    return units.size(value).replace(".0 ", " ")


def share_axis(ax: Axes, shares: np.ndarray, label: str) -> None:
    """Sets up the y axis for percentages, like ``byte_axis``; NaN and zeros are ignored."""
    ax.set_ylabel(label)
    known = shares[np.isfinite(shares) & (shares > 0)]
    low, high = (known.min(), known.max()) if known.size else (1.0, 1.0)
    if high / low > _LOG_RATIO:
        # Linear below the smallest share, so that zeros are visible.
        least = 10 ** np.floor(np.log10(low))
        ax.set_yscale("symlog", linthresh=least, linscale=0.3)
        ax.set_ylim(-0.02 * least, high * 1.6)
    else:
        ax.set_ylim(0, high * 1.1)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def shares_norm(shares: np.ndarray) -> PowerNorm:
    """Returns a color scale from 0 that separates small shares too."""
    return PowerNorm(0.5, vmin=0.0, vmax=float(shares.max()) or 1.0)


def count_axis(ax: Axes, most: int, label: str) -> None:
    """Sets up the y axis for integers from 0 to ``most``."""
    ax.set_ylabel(label)
    ax.set_ylim(0, max(1, most) * 1.1)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def mark_steps(
    ax: Axes,
    steps: Sequence[int],
    color: str = GREY,
    *,
    height: float = 1.0,
    marker: str = "v",
    size: float = 5,
) -> Artist:
    """Marks steps at a share of the height of the axes; returns the artist."""
    return ax.plot(
        steps,
        np.full(len(steps), height),
        linestyle="none",
        marker=marker,
        markersize=size,
        color=color,
        transform=ax.get_xaxis_transform(),
        clip_on=False,
    )[0]


def draw_links(
    ax: Axes, links: Sequence[tuple[tuple[float, float], tuple[float, float]]]
) -> Artist:
    """Draws thin lines between pairs of points; returns the artist."""
    return ax.add_collection(
        LineCollection(links, colors=GREY, linewidths=0.8, alpha=0.5, zorder=1), autolim=False
    )


def svg(picture: Figure, prefix: str) -> str:
    """Renders a figure as an ``<svg>`` element, with ``prefix`` before its ids.

    Lines and text have the page's color, the background is transparent, and text stays text.
    """
    for text in picture.findobj(Text):
        text.set_color(INK)
    for ax in picture.axes:
        ax.tick_params(which="both", color=INK, labelcolor=INK)
        ax.spines[:].set_color(INK)
        ax.patch.set_alpha(0.0)
    buffer = io.StringIO()
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": prefix,
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        }
    ):
        picture.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(_SVG_METADATA)
        )
    element = buffer.getvalue()
    element = element[element.index("<svg") :].strip()
    return re.sub(r"<[^>]+>", lambda tag: _own(tag[0], prefix), element)


def _own(tag: str, prefix: str) -> str:
    """Adds the prefix to the ids in a tag, and replaces the ink by the page's color."""
    tag = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", tag)
    return tag.replace(INK, "currentColor")
