# SPDX-License-Identifier: Apache-2.0
"""Small HTML tables for notebooks: a directory, a step, a table, a diff."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Any

#: Maximum number of lines of a table in a notebook: the first and the last ones.
MOST_LINES = 40


def table(columns: Sequence[str], lines: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Returns an HTML table; numbers are aligned to the right, long tables cut in the middle.

    Args:
      columns: headings.
      lines: a value for each column; None is shown as an en dash.
      caption: plain text above the table.
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
    """Returns the first and last ``MOST_LINES // 2`` values."""
    half = MOST_LINES // 2
    return [*values[:half], *values[-half:]]


def utc(secs: float | None) -> str | None:
    """Formats a time in seconds since 1970, to the minute; None stays None."""
    return None if secs is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(secs))


def shape_text(shape: Sequence[int]) -> str:
    """Formats a shape, such as ``3 × 4``; that of a scalar is ``scalar``."""
    return " × ".join(f"{length:,}" for length in shape) or "scalar"


def _cell(value: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
