# SPDX-License-Identifier: Apache-2.0
"""Tables of numbers and text, which the command line, notebooks and the report show."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

#: Maximum number of lines of a table in a notebook: the first and the last ones.
MOST_LINES = 40


class Listing(NamedTuple):
    """A table; a cell is a number, a text, or None for no value."""

    columns: Sequence[str]
    lines: Sequence[Sequence[object]]
    title: str = ""

    def html(self, most_lines: int = MOST_LINES) -> str:
        """Returns an HTML table; None is an en dash, and a long table is cut in the middle."""
        rows = ["".join(map(_cell, line)) for line in self.lines]
        if (left_out := len(rows) - most_lines) > 0:
            more = f'<td colspan="{len(self.columns)}">… {left_out:,} more …</td>'
            rows = [*rows[: most_lines // 2], more, *rows[-(most_lines // 2) :]]
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        return (
            '<table class="deltackpt" style="border-spacing:0.8em 0.2em">'
            f"{caption if self.title else ''}<thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
        )


def _cell(value: object) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, int) and not isinstance(value, bool):
        return f'<td style="text-align:right">{value:,}</td>'
    return f"<td>{html.escape(str(value))}</td>"
