# SPDX-License-Identifier: Apache-2.0
"""Work that yields to others, and keeps to its own CPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection

from deltackpt.errors import OptionError

_NICE = 10


def lower() -> None:
    """Lets the calling thread yield to others: to Linux a thread is a process of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def pin(cpus: Collection[int] | None) -> None:
    """Lets the calling thread, and what it starts, run on some CPUs only; on all for None.

    What the process may not use by the time is left out; where nothing is left, nothing changes.
    """
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), cpus)


def check(cpus: Collection[int] | None) -> None:
    """Checks that this process may use some CPUs.

    Raises:
      OptionError: one of them it may not.
    """
    if cpus is None:
        return
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - allowed):
        raise OptionError(
            f"Background.cpus: expected CPUs that this process may use, {sorted(allowed)}, found "
            f"{missing} among them; name others, or ask the scheduler for more"
        )
