# SPDX-License-Identifier: Apache-2.0
"""Work that yields to others."""

from __future__ import annotations

import contextlib
import os
import threading

_NICE = 10


def lower() -> None:
    """Lets the calling thread yield to others: to Linux a thread is a process of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
