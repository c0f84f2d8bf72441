# SPDX-License-Identifier: Apache-2.0
"""The stamps of each table among the TouchStates of a state."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deltackpt.errors import (
    TrackingError,
)
from deltackpt.format.manifest import Layout
from deltackpt.state import paths
from deltackpt.state.remembered import ByLayout
from deltackpt.state.touch_state import Marks, TouchState

#: Table name to the key of its stamps, by layout and by the stamps' names and lengths.
_matched: ByLayout[dict[str, str]] = ByLayout()


def match_touched(touched: TouchState, layout: Layout) -> dict[str, str]:
    """Finds the stamps of each table: table name to key in ``touched.stamps``.

    A key names the table with the same path; otherwise the only table whose path ends with the key,
    because ``track`` only sees paths within the params.

    Raises:
      TrackingError: a table has no stamps, two tables share some, or the row counts differ.
    """
    found = matched(touched, layout)
    for table in layout.tables:
        if table.name not in found:
            raise _without_stamps(table.name, touched.stamps)
    return found


def match_marks(marks: Sequence[Marks], layout: Layout) -> dict[str, dict[str, Any]]:
    """Returns the stamps of each table: table name to path to stamps, (rows,) int32.

    Args:
      marks: the TouchStates of a save; a table may have stamps in any of them.
      layout: the tables.

    Raises:
      TrackingError: a table has no stamps in any, or as for ``match_touched``.
    """
    found: dict[str, dict[str, Any]] = {table.name: {} for table in layout.tables}
    for place, touched in marks:
        for table, key in matched(touched, layout).items():
            found[table][place] = touched.stamps[key]
    if bare := [table for table, stamps in found.items() if not stamps]:
        known = {key for _, touched in marks for key in touched.stamps}
        raise _without_stamps(bare[0], known)
    return found


def _without_stamps(table: str, known: Iterable[str]) -> TrackingError:
    return TrackingError(
        f"table {table}: expected stamps of it in the TouchState, found only those of\n"
        f"{paths.listed(known)}\ninitialize it with every table"
    )


def matched(touched: TouchState, layout: Layout) -> dict[str, str]:
    """Returns table name to the key of its stamps, for tables that have stamps.

    Raises:
      TrackingError: two tables share stamps, or the row counts differ.
    """
    lengths = tuple([(name, stamps.shape[0]) for name, stamps in touched.stamps.items()])
    return _matched.get(layout, lengths, lambda: _find_matched(dict(lengths), layout))


def _find_matched(lengths: Mapping[str, int], layout: Layout) -> dict[str, str]:
    found: dict[str, str] = {}
    for table in layout.tables:
        steps = table.name.split("/")
        ends = ("/".join(steps[i:]) for i in range(len(steps)))
        key = next((end for end in ends if end in lengths), None)
        if key is None:
            continue
        found[table.name] = key
        rows = lengths[key]
        if rows != table.rows:
            raise TrackingError(
                f"table {table.name}: expected {table.rows} stamps, found {rows} under {key!r}; "
                "initialize the TouchState again with the tables as they are"
            )
    for key, count in collections.Counter(found.values()).items():
        if count > 1:
            sharing = [name for name, other in found.items() if other == key]
            raise TrackingError(
                f"stamps {key!r} fit more than one table:\n{paths.listed(sharing)}\n"
                "name the stamps by the tables' whole paths"
            )
    return found
