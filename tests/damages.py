# SPDX-License-Identifier: Apache-2.0
"""Damage to one file, as by a disk, a copy or a user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HOWS = ("removed", "truncated", "flipped")


def flipped(data: bytes) -> bytes:
    """Flips one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


#: Maps the bytes of an object to damaged ones; None removes it.
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = dict(
    zip(HOWS, (lambda data: None, lambda data: data[: len(data) // 2], flipped), strict=True)
)


def damage(path: Path, how: str) -> None:
    """Damages a file by one of ``HOWS``; a second flip repairs it."""
    data = DAMAGES[how](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    """Flips bits of one byte of a file in place; a second flip repairs it."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
