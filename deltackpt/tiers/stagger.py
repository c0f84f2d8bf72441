# SPDX-License-Identifier: Apache-2.0
"""When each of the promoters of a job begins, so that they do not all send at once.

All processes save at the same step, and a step of the training lasts as long as that of the slowest
process. So of *n* promoters number *i* begins at *i / n* of the time between two saves: what
they take comes to each process in turn, and a link or a bucket that they share has one of them at
a time. A save is whole at the root once the last part is there, which is later by that much.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Most that a save comes later because of this, whatever the time between saves.
MOST_SECS = 60.0


def delay_secs(made: Sequence[float], now: float, process: int, processes: int) -> float:
    """How long a promoter is to wait with the newest save in its stage.

    Args:
      made: moments at which the saves in the stage were made, in order.
      now: the moment by the same clock.
      process: whose promoter it is.
      processes: how many there are.

    Returns:
      Seconds, at most ``MOST_SECS``; 0 where the time between saves is not known yet, or the clock
      was set.
    """
    if len(made) < 2:
        return 0.0
    interval, age = made[-1] - made[-2], now - made[-1]
    share = min(MOST_SECS, process / processes * interval)
    return max(0.0, share - age) if age >= 0 else 0.0
