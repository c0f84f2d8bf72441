# SPDX-License-Identifier: Apache-2.0
"""What tests need from the machine."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from running.ports import free_port

__all__ = ["free_port", "open_files", "required"]


def required(there: bool, reason: str) -> None:
    """Skips a test if the machine lacks something; fails it with ``CI=true``."""
    if there:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true")
    pytest.skip(reason)


def open_files(folder: Path) -> list[str]:
    """Paths below a folder that this process has open; other threads may close files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # Closed since, or the listing's own.
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in found if path.startswith(f"{folder}/") or path == str(folder)]
