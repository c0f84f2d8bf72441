# SPDX-License-Identifier: Apache-2.0
"""How each dense leaf is encoded in deltas, by the codec that the user chose for its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deltackpt.codecs import of_blocks
from deltackpt.errors import OptionError
from deltackpt.format import globs
from deltackpt.format.manifest import DenseLeaf, path_name


class Coding(NamedTuple):
    """How a leaf is encoded in deltas.

    Attributes:
      codec: ``"lossless"``, or a lossy codec.
      max_error: maximum relative l2 error; None for no limit.
    """

    codec: str = of_blocks.LOSSLESS
    max_error: float | None = None


def codings(
    codec: str | Mapping[str, str], max_error: float | None
) -> Callable[[DenseLeaf, Any], Coding]:
    """Returns a function that maps a leaf to its coding, with a cache.

    Args:
      codec: for all leaves, or by glob over their paths: the first match applies; leaves without a
        match are lossless. A single codec applies only to the floats that it can encode.
      max_error: maximum relative l2 error of a leaf.
    """
    known: dict[tuple[Any, str], Coding] = {}

    def found(leaf: DenseLeaf, dtype: Any) -> Coding:
        key = leaf.path, dtype.name
        if key not in known:
            known[key] = _coding(codec, max_error, path_name(leaf.path), dtype.name)
        return known[key]

    return found


def _coding(
    codec: str | Mapping[str, str], max_error: float | None, path: str, dtype: str
) -> Coding:
    if isinstance(codec, str):
        name, named = codec, False
    else:
        name = next((one for glob, one in codec.items() if globs.matches(glob, path)), None)
        name, named = (of_blocks.LOSSLESS, False) if name is None else (name, True)
    if name == of_blocks.LOSSLESS:
        return Coding()
    if not of_blocks.get(name).takes(dtype):
        if named:
            raise OptionError(
                f"Dense.codec: dense leaf {path}: expected {', '.join(of_blocks.FLOATS)} for "
                f"{name}, found {dtype}; integers, booleans, keys and counters are always "
                "lossless: put a glob for it with codec 'lossless' first, or leave it out"
            )
        return Coding()
    return Coding(name, max_error)
