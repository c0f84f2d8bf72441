# SPDX-License-Identifier: Apache-2.0
"""Chooses ports for servers that are started, or started again, later."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Returns free loopback ports outside the range that the system assigns to other sockets.

    Ray assigns ports below 20000 to its workers.
    """
    draw = random.SystemRandom()  # Test workers may share the default generator's seed.
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = draw.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    """Returns one such port."""
    return free_ports(1)[0]
