# SPDX-License-Identifier: Apache-2.0
"""What tests need from the machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import pytest


def required(there: bool, reason: str) -> None:
    """Skips a test if the machine lacks something; fails it with ``CI=true``."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true")
    pytest.skip(reason)


def free_port() -> int:
    """A free loopback port below the range that the system assigns to other sockets."""
    draw = random.SystemRandom()  # Test workers may share the default generator's seed.
    while True:
        port = draw.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def open_files(folder: Path) -> list[str]:
    """Paths below a folder that this process has open; other threads may close files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # Closed since, or the listing's own.
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/") or path == str(folder)]
