# SPDX-License-Identifier: Apache-2.0
"""What a record can say at all: names that stay in their save, numbers that can be counted."""

from __future__ import annotations

import math
import urllib.parse
from typing import TYPE_CHECKING

from deltackpt.format import dtypes, records
from deltackpt.format.records import Unsound

if TYPE_CHECKING:
    from deltackpt.format.segments import ArrayEntry, Segment

#: Core dtypes of Zarr v3, which hold all others.
STORED_DTYPES = frozenset(
    (
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
#: Steps, rows and bytes are counted by signed numbers of 64 bits.
MOST = (1 << 63) - 1
#: Most axes of an array, as numpy has it.
MOST_AXES = 32
#: zstd makes at most a block of 128 KiB from four bytes.
MOST_ZSTD_RATIO = (128 << 10) // 4
#: Most bytes of a name that is, or becomes, a component of a path.
_NAME_BYTES = 255


def require(holds: bool, expected: str, found: object, place: str = "") -> None:
    """Checks something that a record says.

    Raises:
      Unsound: it does not hold.
    """
    if not holds:
        raise Unsound(expected, found, place)


def is_name(name: str) -> bool:
    """Whether a text is one component of a path: no name of a record leads out of its save."""
    return (
        0 < len(name.encode()) <= _NAME_BYTES
        and name not in (".", "..")
        and not {"/", "\0"}.intersection(name)
    )


def check_segment(segment: Segment) -> None:
    """Checks what a manifest says of a segment by itself.

    Raises:
      Unsound: it cannot be.
    """
    require(is_name(segment.name), "the name of a directory", segment.name, "name")
    require(segment.count <= MOST, f"at most {MOST}", segment.count, "count")
    if segment.ranges is not None:
        bounds = [bound for span in segment.ranges for bound in span]
        require(bounds == sorted(bounds), "ascending ranges", segment.ranges, "ranges")
    for entry in segment.arrays:
        try:
            _check_array(entry)
        except Unsound as error:
            raise error.within(f"arrays.{records.shown(entry.name)}") from None


def _check_array(entry: ArrayEntry) -> None:
    directory = urllib.parse.quote(entry.name, safe="")
    require(is_name(directory), "the name of a directory", entry.name, "name")
    require(entry.dtype in STORED_DTYPES, f"one of {sorted(STORED_DTYPES)}", entry.dtype, "dtype")
    require(0 < len(entry.shape) <= MOST_AXES, f"1 to {MOST_AXES} axes", entry.shape, "shape")
    require(entry.chunk_rows > 0, "1 or more", entry.chunk_rows, "chunk_rows")
    # A chunk may have room for more rows than there are.
    rows = max(entry.chunk_rows, entry.shape[0])
    nbytes = math.prod((rows, *entry.shape[1:])) * dtypes.itemsize_of(entry.dtype)
    require(nbytes <= MOST and rows <= MOST, f"at most {MOST} bytes", entry.shape, "shape")
