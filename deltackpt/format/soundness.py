# SPDX-License-Identifier: Apache-2.0
"""Limits on the contents of records: names that stay inside their save, countable sizes."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deltackpt.errors import FormatTooNew
from deltackpt.format import dtypes, records
from deltackpt.format.records import Unsound

if TYPE_CHECKING:
    from deltackpt.format.manifest import SaveId
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
    """Checks a property of a record.

    Raises:
      Unsound: the property is violated.
    """
    if not holds:
        raise Unsound(expected, found, place)


def is_name(name: str) -> bool:
    """Returns whether a string is a single path component, so that it cannot leave its save."""
    return (
        0 < len(name.encode()) <= _NAME_BYTES
        and name not in (".", "..")
        and not {"/", "\0"}.intersection(name)
    )


def check_save_id(save_id: SaveId, place: str) -> None:
    """Checks the identity of a save or WAL record.

    Raises:
      Unsound: the identity is invalid.
    """
    require(is_name(save_id.run), "the id of a run", save_id.run, f"{place}.run")
    require(save_id.step <= MOST, f"at most {MOST}", save_id.step, f"{place}.step")


def features_in(fields: Mapping[str, Any]) -> list[str]:
    """Returns the features that a record needs, before its other fields are checked.

    Raises:
      Unsound: they are not names.
    """
    features = fields.get("features", [])
    if type(features) is not list or not all(type(feature) is str for feature in features):
        raise Unsound("names of features", features, "features")
    return features


def refuse_unknown(features: Iterable[str], known: frozenset[str], name: str) -> None:
    """Refuses a record that needs features unknown here.

    Raises:
      FormatTooNew: a later version of deltackpt wrote it.
    """
    if unknown := {*features} - known:
        raise FormatTooNew(
            f"{name}: expected known features, found {sorted(unknown)}; install a newer deltackpt"
        )


def check_segment(segment: Segment) -> None:
    """Checks a segment's record on its own.

    Raises:
      Unsound: the record is invalid.
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
