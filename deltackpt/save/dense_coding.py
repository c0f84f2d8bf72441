# SPDX-License-Identifier: Apache-2.0
"""How each dense leaf is kept in deltas, by what the user chose for its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deltackpt.codecs import of_blocks
from deltackpt.errors import OptionError
from deltackpt.format import globs
from deltackpt.format.manifest import DenseLeaf, path_name


class Coding(NamedTuple):
    """How a leaf is kept in deltas.

    Attributes:
      codec: ``exact``, or a lossy one.
      max_error: most relative l2 error; None for any.
    """

    codec: str = of_blocks.EXACT
    max_error: float | None = None


def codings(
    codec: str | Mapping[str, str], max_error: float | None
) -> Callable[[DenseLeaf, Any], Coding]:
    """How each leaf is kept, by what the user chose; the answers are kept.

    Args:
      codec: for all leaves, or by glob over their paths: the first that matches; exact where none
        does. One for all takes only the floats that it can code.
      max_error: most relative l2 error of a leaf.
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
        name, named = (of_blocks.EXACT, False) if name is None else (name, True)
    if name == of_blocks.EXACT:
        return Coding()
    if not of_blocks.get(name).takes(dtype):
        if named:
            raise OptionError(
                f"Dense.codec: dense leaf {path}: {name} takes {', '.join(of_blocks.FLOATS)}, "
                f"found {dtype}; integers, truth values, keys and counters are always exact: name "
                "it by a glob of its own with codec 'exact' first, or leave it out"
            )
        return Coding()
    return Coding(name, max_error)
