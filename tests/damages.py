# SPDX-License-Identifier: Apache-2.0
"""Damage to one file: what a disk, a copy or a hand does to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

HOWS = ("removed", "truncated", "flipped")


def flipped(data: bytes) -> bytes:
    """One bit in the middle is another one."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


#: What becomes of the bytes of an object; None: it is not there any more.
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = dict(
    zip(HOWS, (lambda data: None, lambda data: data[: len(data) // 2], flipped), strict=True)
)


def damage(path: Path, how: str) -> None:
    """Damages a file by one of ``HOWS``; to flip it once more mends it."""
    data = DAMAGES[how](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    """Flips bits of one byte of a file, in place; to flip them once more mends it."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))
