# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as a notice of preemption."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Termination:
    """Listens for SIGTERM from the first query on; an existing handler still runs.

    Only for single-process jobs: with several, JAX's own handler must not be replaced.
    """

    def __init__(self) -> None:
        """Does not listen yet: without a query, a SIGTERM ends the process."""
        self._pid = os.getpid()
        self._listening = False
        self._closed = False
        self._received = False
        self._step: int | None = None
        self._former: Any = None

    def announced(self, step: int) -> bool:
        """Starts to listen; returns whether a SIGTERM arrived, for the first step after it."""
        if not (self._listening or self._closed):
            self._listen()
        if self._received and self._step is None:
            self._step = step
        return self._step == step

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Only there Python lets handlers be changed; another thread may ask later.
        self._listening = True
        self._former = signal.getsignal(signal.SIGTERM)
        if self._former is not None:  # None: it was not put there by Python.
            signal.signal(signal.SIGTERM, self._on_signal)

    def close(self) -> None:
        """Restores the previous handler; from another thread, forwards signals to it instead."""
        self._closed = True
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._former)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        mine = os.getpid() == self._pid and not self._closed
        self._received = self._received or mine
        # A second signal is for the former handler alone, which may end the process.
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._former)
        if callable(self._former):
            self._former(number, frame)
        elif not mine and self._former == signal.SIG_DFL:
            # In a forked child, or if nothing will save: end as without us.
            os.kill(os.getpid(), number)
