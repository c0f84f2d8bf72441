# SPDX-License-Identifier: Apache-2.0
"""Records touched rows as stamps, inside or outside jit.

``mark`` stamps the rows whose ids a step used. ``track`` wraps an optimizer so that it stamps the
rows that it changes. ``save`` finds the ``TouchState`` in the state or takes it as an argument.
"""

from __future__ import annotations

from deltackpt.state.touch_state import (
    CLOCK_MAX,
    UNKNOWN,
    Marks,
    TouchState,
    clock_exhausted,
    find,
    fresh,
    is_touch_state,
)
from deltackpt.tracking.optimizer import TrackState, track
from deltackpt.tracking.stamps import init, mark, mark_rows

__all__ = [
    "CLOCK_MAX",
    "UNKNOWN",
    "Marks",
    "TouchState",
    "TrackState",
    "clock_exhausted",
    "find",
    "fresh",
    "init",
    "is_touch_state",
    "mark",
    "mark_rows",
    "track",
]
