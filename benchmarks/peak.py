# SPDX-License-Identifier: Apache-2.0
"""The resident memory of this process, private and shared, and its peak."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path


def trim() -> None:
    """Returns free memory to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak() -> None:
    """Resets the peak of the resident memory, private and shared."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """Returns a memory figure of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
