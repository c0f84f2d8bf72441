# SPDX-License-Identifier: Apache-2.0
"""Formats byte sizes and counts for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in a unit that suits, powers of 1024.

    Examples:
      >>> size(1536), size(12), size(5 << 30)
      ('1.5 KiB', '12 B', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: int, noun: str) -> str:
    """Returns a count with its noun.

    Examples:
      >>> count(1, "delta"), count(1200, "file")
      ('1 delta', '1,200 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
