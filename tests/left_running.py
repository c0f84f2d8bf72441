# SPDX-License-Identifier: Apache-2.0
"""Finds and kills processes of deltackpt that run on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def uploaders(node: Path) -> list[int]:
    """Returns the process ids of the uploaders of a staging directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"deltackpt.tiers.replicator" in words and os.fsencode(node) in words:
                    found.append(int(entry.name))
    return found


def kill_uploaders(node: Path) -> int:
    """Kills the uploaders of a staging directory and waits for their ends; returns their number."""
    found = uploaders(node)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while {*found} & {*uploaders(node)}:
        time.sleep(0.01)
    return len(found)
