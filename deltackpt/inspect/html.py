# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of a directory, a step, a table and a diff: small HTML tables."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltackpt.units import size

if TYPE_CHECKING:
    from deltackpt.inspect.changes import Diff
    from deltackpt.inspect.checkpoints import Checkpoints, Save
    from deltackpt.inspect.dense import DenseLeaf
    from deltackpt.inspect.lazy import LazyArray
    from deltackpt.inspect.step import Step, Table

#: Most lines of a table that a notebook shows; the first and the last ones.
_MOST_LINES = 40
#: Rows of a table that it shows.
_SHOWN_ROWS = 5


def table(columns: Sequence[str], lines: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A table; numbers are aligned to the right, and long ones are shortened in the middle.

    Args:
      columns: headings.
      lines: a value for each column; None is shown as an en dash.
      caption: above it, as plain text.
    """
    out = ['<table class="deltackpt" style="border-spacing:0.8em 0.2em">']
    if caption:
        out.append(f'<caption style="text-align:left">{html.escape(caption)}</caption>')
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    out.append(f"<thead><tr>{heads}</tr></thead><tbody>")
    left_out = len(lines) - _MOST_LINES
    shown: list[Any] = list(lines)
    if left_out > 0:
        shown = _ends(lines)
        shown.insert(len(shown) // 2, None)
    for line in shown:
        if line is None:
            text = f"… {left_out:,} more …"
            out.append(f'<tr><td colspan="{len(columns)}">{text}</td></tr>')
        else:
            out.append(f"<tr>{''.join(_cell(value) for value in line)}</tr>")
    out.append("</tbody></table>")
    return "".join(out)


def directory_page(ck: Checkpoints) -> str:
    """A directory: its first and its last steps."""
    steps = ck.steps
    shown = steps if len(steps) <= _MOST_LINES else _ends(steps)
    lines = [save_line(save) for save in ck.saves_of(shown)]
    title = f"{ck.path}: {len(steps):,} steps, newest {ck.newest}"
    if len(shown) < len(steps):
        title += f", {len(lines)} shown: the first and the last"
    return table(SAVE_COLUMNS, lines, title)


def _ends(values: Sequence[Any]) -> list[Any]:
    half = _MOST_LINES // 2
    return [*values[:half], *values[-half:]]


SAVE_COLUMNS = (
    "step",
    "kind",
    "parent",
    "deltas",
    "rows",
    "of all",
    "on disk",
    "codecs",
    "committed (UTC)",
    "why",
)


def save_line(save: Save) -> tuple[Any, ...]:
    """A step as a line under ``SAVE_COLUMNS``."""
    kind = f"{save.kind} (compacted)" if save.compacted else save.kind
    return (
        save.step,
        kind or "unreadable",
        save.parent,
        save.chain_length,
        save.rows,
        f"{save.rows / save.total_rows:.2%}" if save.total_rows else None,
        size(save.disk_bytes),
        "+".join(sorted({figures.codec for figures in save.tables})) or None,
        utc(save.committed_at),
        save.problem or save.reason.removeprefix(f"{save.kind}: "),
    )


def step_page(step: Step) -> str:
    """A step: its tables and dense leaves."""
    chain = " → ".join(step.reads)
    parts = [table(FIELD_COLUMNS, field_lines(step), f"step {step.step}, read through {chain}")]
    if step.dense:
        lines = [dense_line(leaf) for leaf in step.dense.values()]
        parts.append(table(DENSE_COLUMNS, lines))
    return "".join(parts)


FIELD_COLUMNS = ("table", "field", "shape", "dtype", "bytes")


def field_lines(step: Step) -> list[tuple[Any, ...]]:
    """The tables and slots of a step as lines under ``FIELD_COLUMNS``."""
    found: list[tuple[Any, ...]] = []
    for name, values in step.tables.items():
        fields: dict[str, LazyArray] = {"values": values}
        fields |= {f"slot.{slot}": held for slot, held in values.slots.items()}
        found += [(name, field, *_array(held)) for field, held in fields.items()]
    return found


FIGURE_COLUMNS = ("table", "field", "codec", "rows", "on disk", "of unencoded", "error", "why")


def figure_lines(save: Save) -> list[tuple[Any, ...]]:
    """What a save holds of each field of each table, as lines under ``FIGURE_COLUMNS``."""
    return [
        (
            figures.table,
            figures.field,
            figures.codec,
            figures.rows,
            size(figures.nbytes),
            f"{figures.ratio:.1%}",
            f"{figures.relative_error:.2g}" if figures.relative_error else None,
            figures.reason,
        )
        for figures in save.tables
    ]


DENSE_COLUMNS = ("dense leaf", "shape", "dtype", "bytes")


def dense_line(leaf: DenseLeaf) -> tuple[Any, ...]:
    """Name, shape, dtype and bytes of a dense leaf; its value where it is no array."""
    if leaf.kind in ("None", "empty", "string"):
        return leaf.name, repr(leaf.value), leaf.kind, None
    dtype = leaf.dtype.name if leaf.kind != "key" else f"key<{leaf.prng_impl}>"
    return leaf.name, _shape(leaf.shape), dtype, size(leaf.nbytes)


def table_page(found: Table) -> str:
    """A table: what it is, and its first rows."""
    count = min(_SHOWN_ROWS, len(found))
    first = found[:count].reshape(count, -1)
    shown = min(8, first.shape[1])
    more = ("…",) if first.shape[1] > shown else ()
    columns = ("row", *map(str, range(shown)), *more)
    lines = [
        (row, *(f"{value:.6g}" for value in first[row, :shown].tolist()), *more)
        for row in range(count)
    ]
    slots = ", ".join(found.slots) or "none"
    title = (
        f"{found.name}: {_shape(found.shape)} {found.dtype.name}, {size(found.nbytes)}, "
        f"slots: {slots}"
    )
    return table(columns, lines, title)


DIFF_COLUMNS = ("table", "rows changed", "of all", "added", "median change", "99 %", "largest")


def diff_lines(found: Diff) -> list[tuple[Any, ...]]:
    """The tables of a diff as lines under ``DIFF_COLUMNS``: l2 norms of the changes."""
    lines: list[tuple[Any, ...]] = []
    for name, changed in found.tables.items():
        norms = changed.quantiles((0.5, 0.99, 1.0))
        lines.append(
            (
                name,
                len(changed.rows),
                f"{changed.fraction:.2%}",
                changed.added,
                *(f"{norms[of]:.4g}" if norms else None for of in (0.5, 0.99, 1.0)),
            )
        )
    return lines


def diff_page(found: Diff) -> str:
    """A diff: a line for each table."""
    title = f"{found.field}: step {found.a} → {found.b}, l2 norms of the rows' changes"
    return table(DIFF_COLUMNS, diff_lines(found), title)


def utc(secs: float | None) -> str | None:
    """A time in seconds since 1970 as text, to the minute; None where it is not known."""
    return None if secs is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(secs))


def _array(found: Any) -> tuple[str, str, str]:
    return _shape(found.shape), found.dtype.name, size(found.nbytes)


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(f"{length:,}" for length in shape) or "scalar"


def _cell(value: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
