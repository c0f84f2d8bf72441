# SPDX-License-Identifier: Apache-2.0
"""Waits of Orbax, which have no limit of their own."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from deltackpt.errors import WaitTimeout


def bounded(call: Callable[[], object], timeout_secs: float, what: str) -> None:
    """Runs a wait with a limit.

    Args:
      call: the wait.
      timeout_secs: the limit.
      what: what is waited for, for the error.

    Raises:
      WaitTimeout: it did not end in time; it goes on in a thread.
    """
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name="deltackpt-wait", daemon=True).start()
    try:
        outcome.result(timeout_secs)
    except TimeoutError as error:
        if outcome.done():
            raise
        raise WaitTimeout(
            f"{what}: expected it to end within {timeout_secs} s (ManagerOptions.timeouts), found "
            "it still running; look at the storage, then wait() again"
        ) from error
