# SPDX-License-Identifier: Apache-2.0
"""Globs over '/'-joined paths, and lists of paths in error messages."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

#: How many paths an error lists before it says how many more there are.
_LISTED = 40


def listed(names: Iterable[str]) -> str:
    """Names one per line for an error message, the first few where there are many."""
    names = sorted(names)
    lines = [f"  {name}" for name in names[:_LISTED]]
    if len(names) > _LISTED:
        lines.append(f"  ... and {len(names) - _LISTED} more")
    return "\n".join(lines) if lines else "  (none)"


@functools.lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    """The regular expression of a path glob."""
    out, position = [], 0
    while position < len(pattern):
        rest = pattern[position:]
        if rest.startswith("**/"):
            out.append("(?:.*/)?")
            position += 3
        elif rest.startswith("**"):
            out.append(".*")
            position += 2
        elif rest[0] == "*":
            out.append("[^/]*")
            position += 1
        elif rest[0] == "?":
            out.append("[^/]")
            position += 1
        else:
            out.append(re.escape(rest[0]))
            position += 1
    return re.compile("".join(out), re.DOTALL)


def matches(pattern: str | re.Pattern[str], name: str) -> bool:
    """Whether a path's text matches one glob or compiled pattern, from end to end."""
    compiled = _glob(pattern) if isinstance(pattern, str) else pattern
    return compiled.fullmatch(name) is not None
