# SPDX-License-Identifier: Apache-2.0
"""The resident memory of this process, private and shared, and its peak."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path


def trim() -> None:
    """Gives free memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak() -> None:
    """Lets the peak of the resident memory, private and shared, begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """A figure of this process's memory."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
