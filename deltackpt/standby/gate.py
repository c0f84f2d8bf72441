# SPDX-License-Identifier: Apache-2.0
"""Between readers that copy one state and the writer that makes the next of it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator

#: A reader that was killed holds the writer up so long at most.
PIN_SECS = 30.0
#: A reader that lives holds it up so long at most, however often it asks for more.
MOST_PINNED_SECS = 600.0
#: So long new readers may come in while the writer waits for others.
_PATIENCE_SECS = 5.0


class Gate:
    """Readers pin the state for a limited time; the writer waits until none does.

    Pins are numbers, so that their holders may be other processes.
    """

    def __init__(self) -> None:
        """Open for everybody."""
        self._changed = threading.Condition()
        #: Pin to when it ends, and to when it ends at the latest, on the monotonic clock.
        self._pins: dict[int, tuple[float, float]] = {}
        self._writing = False
        self._waiting_since: float | None = None

    def pin(self, timeout_secs: float) -> int | None:
        """Keeps the writer out for ``PIN_SECS``; None where it is in for as long as the timeout."""
        end = time.monotonic() + timeout_secs
        with self._changed:
            while self._writing or self._impatient():
                if not self._changed.wait(end - time.monotonic()):
                    return None
            # Drawn, so that it means nothing to a gate that has taken the place of this one.
            pin = 1 + secrets.randbits(62)
            now = time.monotonic()
            self._pins[pin] = now + PIN_SECS, now + MOST_PINNED_SECS
            return pin

    def renew(self, pin: int) -> bool:
        """Keeps the writer out for ``PIN_SECS`` more, if it may; False where the pin has ended."""
        with self._changed:
            now = time.monotonic()
            end, latest = self._pins.get(pin, (now, now))
            if end <= now:
                return False
            self._pins[pin] = min(now + PIN_SECS, latest), latest
            return True

    def unpin(self, pin: int) -> None:
        """Ends a pin; nothing where it has ended."""
        with self._changed:
            self._pins.pop(pin, None)
            self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Waits until every pin has ended; no new one begins within."""
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
        """How long the last pin lasts; forgets those that have ended."""
        now = time.monotonic()
        self._pins = {pin: ends for pin, ends in self._pins.items() if ends[0] > now}
        return max((end for end, _ in self._pins.values()), default=now) - now
