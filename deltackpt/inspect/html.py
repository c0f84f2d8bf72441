# SPDX-License-Identifier: Apache-2.0
"""Small HTML tables, in which a notebook shows a directory, a step, a table and a diff."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

#: Most lines of a table that a notebook shows; the first and the last ones.
MOST_LINES = 40


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
    left_out = len(lines) - MOST_LINES
    shown: list[Any] = list(lines)
    if left_out > 0:
        shown = ends(lines)
        shown.insert(len(shown) // 2, None)
    for line in shown:
        if line is None:
            text = f"… {left_out:,} more …"
            out.append(f'<tr><td colspan="{len(columns)}">{text}</td></tr>')
        else:
            out.append(f"<tr>{''.join(_cell(value) for value in line)}</tr>")
    out.append("</tbody></table>")
    return "".join(out)


def ends(values: Sequence[Any]) -> list[Any]:
    """The first and the last of more values than a page shows."""
    half = MOST_LINES // 2
    return [*values[:half], *values[-half:]]


def utc(secs: float | None) -> str | None:
    """A time in seconds since 1970 as text, to the minute; None where it is not known."""
    return None if secs is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(secs))


def shape_text(shape: Sequence[int]) -> str:
    """A shape as a reader says it; that of a number is ``scalar``."""
    return " × ".join(f"{length:,}" for length in shape) or "scalar"


def _cell(value: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
