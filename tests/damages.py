# SPDX-License-Identifier: Apache-2.0
"""Damage to one file: what a disk, a copy or a hand does to it."""

from __future__ import annotations

from pathlib import Path

HOWS = ("removed", "truncated", "flipped")


def damage(path: Path, how: str) -> None:
    """Damages a file by one of ``HOWS``; to flip it once more mends it."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:middle])
    else:
        data[middle] ^= 1
        path.write_bytes(data)
