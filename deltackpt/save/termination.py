# SPDX-License-Identifier: Apache-2.0
"""SIGTERM as the announcement of an end: the next step that asks is saved before it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Termination:
    """Listens for SIGTERM once somebody asks for it; the handler that was there still runs.

    Python runs handlers in the main thread, between two of its instructions. Where jax, or another
    library, has put a handler of its own outside of Python, it is left alone: jax's announces
    preemptions to all processes of a job.
    """

    def __init__(self) -> None:
        """Does not listen yet: whoever never asks wants a SIGTERM to end the process."""
        self._pid = os.getpid()
        self._listening = False
        self._closed = False
        self._received = False
        self._step: int | None = None
        self._former: Any = None

    def announced(self, step: int) -> bool:
        """Whether a SIGTERM has come, for the first step that is asked for after it; listens.

        Args:
          step: the training step.
        """
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
        """Puts back the handler that was there; from another thread, lets signals through to it."""
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
            # A child that was forked, or nobody who would save: it ends as without us.
            os.kill(os.getpid(), number)
