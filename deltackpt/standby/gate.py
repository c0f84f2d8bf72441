# SPDX-License-Identifier: Apache-2.0
"""Lets readers copy a state before the writer changes it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

#: How long a killed reader can block the writer.
PIN_SECS = 30.0
#: How long a live reader can block it, however often it renews.
MOST_PINNED_SECS = 600.0
#: How long new readers are admitted while the writer waits.
_PATIENCE_SECS = 5.0


class Gate:
    """Readers pin the state for a limited time; the writer waits until no pin is left.

    Pins are numbers, so other processes can hold them.
    """

    def __init__(self) -> None:
        """Starts open."""
        self._changed = threading.Condition()
        #: For each pin its expiry, and its latest possible expiry, on the monotonic clock.
        self._pins: dict[int, tuple[float, float]] = {}
        self._writing = False
        self._waiting_since: float | None = None

    def pin(self, timeout_secs: float) -> int | None:
        """Blocks the writer for ``PIN_SECS``.

        Returns None if the writer is active for the whole timeout.
        """
        end = time.monotonic() + timeout_secs
        with self._changed:
            while self._writing or self._impatient():
                if not self._changed.wait(end - time.monotonic()):
                    return None
            # Random, so that it is invalid for a gate that replaces this one.
            pin = 1 + secrets.randbits(62)
            now = time.monotonic()
            self._pins[pin] = now + PIN_SECS, now + MOST_PINNED_SECS
            return pin

    def renew(self, pin: int) -> bool:
        """Extends a pin by ``PIN_SECS`` if allowed; returns False if it has expired."""
        with self._changed:
            now = time.monotonic()
            end, latest = self._pins.get(pin, (now, now))
            if end <= now:
                return False
            self._pins[pin] = min(now + PIN_SECS, latest), latest
            return True

    def unpin(self, pin: int) -> None:
        """Releases a pin; does nothing if it has expired."""
        with self._changed:
            self._pins.pop(pin, None)
            self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Waits until every pin has expired; no new pin starts inside the context."""
        with self._changed:
            self._waiting_since = time.monotonic()
            while (left := self._pinned_secs()) > 0:
                self._changed.wait(left)
            self._waiting_since, self._writing = None, True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _impatient(self) -> bool:
        since = self._waiting_since
        return since is not None and time.monotonic() - since > _PATIENCE_SECS

    def _pinned_secs(self) -> float:
        """Time until the last pin expires; forgets expired ones."""
        now = time.monotonic()
        self._pins = {pin: ends for pin, ends in self._pins.items() if ends[0] > now}
        return max((end for end, _ in self._pins.values()), default=now) - now
