# SPDX-License-Identifier: Apache-2.0
"""Thread priority and CPU affinity of background work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection

from deltackpt.errors import OptionError

_NICE = 10


def lower() -> None:
    """Lowers the calling thread's priority; on Linux, niceness is per thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def pin(cpus: Collection[int] | None) -> None:
    """Restricts the calling thread and its children to some CPUs; None allows all.

    CPUs that the process may no longer use are ignored; if none remains, nothing changes.
    """
    if cpus is not None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(threading.get_native_id(), cpus)


def check(cpus: Collection[int] | None) -> None:
    """Checks that this process may use some CPUs.

    Raises:
      OptionError: the process may not use one of them.
    """
    if cpus is None:
        return
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - allowed):
        raise OptionError(
            f"Background.cpus: expected CPUs that this process may use, {sorted(allowed)}, found "
            f"{missing}; choose others, or request more from the scheduler"
        )
