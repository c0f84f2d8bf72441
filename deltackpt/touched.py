# SPDX-License-Identifier: Apache-2.0
"""Records touched rows as stamps, inside or outside jit.

``mark`` stamps the rows whose ids a step used. ``track`` wraps an optimizer so that it stamps the
rows that it changes. ``save`` finds the ``TouchState`` in the state or takes it as an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes
from deltackpt.state.touch_state import (
    CLOCK_MAX,
    UNKNOWN,
    Marks,
    TouchState,
    clock_exhausted,
    find,
    fresh,
    is_touch_state,
    mark_rows,
)
from deltackpt.tracking.stamps import grow, init, mark

if TYPE_CHECKING:
    from deltackpt.tracking.optimizer import TrackState, track

__all__ = [
    "CLOCK_MAX",
    "UNKNOWN",
    "Marks",
    "TouchState",
    "TrackState",
    "clock_exhausted",
    "find",
    "fresh",
    "grow",
    "init",
    "is_touch_state",
    "mark",
    "mark_rows",
    "track",
]

# The module imports optax, which is needed only to wrap an optimizer.
__getattr__ = attributes(
    __name__, dict.fromkeys(("TrackState", "track"), "deltackpt.tracking.optimizer")
)
