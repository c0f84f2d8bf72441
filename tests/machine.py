# SPDX-License-Identifier: Apache-2.0
"""What tests need of the machine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

import pytest


def required(there: bool, reason: str) -> None:
    """Skips a test that misses something of the machine; with ``CI=true`` it fails."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true")
    pytest.skip(reason)


def free_port() -> int:
    """A port of loopback that is free, below those that the system gives to other sockets."""
    draw = random.SystemRandom()  # Workers may have seeded the other one alike.
    while True:
        port = draw.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def open_files(folder: Path) -> list[str]:
    """Paths below a folder that this process has open, whatever other threads have open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile, or that of the listing.
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/") or path == str(folder)]
