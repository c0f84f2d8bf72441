# SPDX-License-Identifier: Apache-2.0
"""Adds timeouts to waits of Orbax, which have none."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from deltackpt.errors import WaitTimeout
from deltackpt.resources.workers import complete


def bounded(call: Callable[[], object], timeout_secs: float, what: str) -> None:
    """Runs a wait with a timeout.

    Args:
      call: the wait.
      timeout_secs: the limit.
      what: what is awaited, for the error.

    Raises:
      WaitTimeout: it timed out; it continues in a thread.
    """
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
    thread = threading.Thread(
        target=complete, args=(outcome, call), name="deltackpt-wait", daemon=True
    )
    thread.start()
    try:
        outcome.result(timeout_secs)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise WaitTimeout(
            f"{what}: expected it to end within {timeout_secs} s (ManagerOptions.timeouts), found "
            "it still running; check the storage, then wait again"
        ) from error
