# SPDX-License-Identifier: Apache-2.0
"""Upload schedule: staggers a job's uploaders so that they do not all send at once.

All processes save at the same step, and the slowest process determines the duration of a training
step. Uploader *i* of *n* therefore starts at *i / n* of the time between two saves. Their load
affects one process at a time, and a shared link or bucket serves one uploader at a time. A save is
complete once the last part is uploaded, which is later by that much.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Maximum delay of a save, for any time between saves.
MOST_SECS = 60.0


def delay_secs(made: Sequence[float], now: float, process: int, processes: int) -> float:
    """Returns how long an uploader waits with the newest staged save.

    Args:
      made: times at which the staged saves were made, in order.
      now: the current time of the same clock.
      process: index of the uploader's process.
      processes: number of processes.

    Returns:
      Seconds, at most ``MOST_SECS``; 0 if the time between saves is not known yet, or the clock was
      changed.
    """
    if len(made) < 2:
        return 0.0
    interval, age = made[-1] - made[-2], now - made[-1]
    share = min(MOST_SECS, process / processes * interval)
    return max(0.0, share - age) if age >= 0 else 0.0
