# SPDX-License-Identifier: Apache-2.0
"""Globs over '/'-joined paths, their unique ends, and lists of paths in error messages."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

#: Maximum number of paths that an error lists.
_LISTED = 40


def listed(names: Iterable[str]) -> str:
    """Formats names one per line for an error message; only the first few of many."""
    names = sorted(names)
    lines = [f"  {name}" for name in names[:_LISTED]]
    if len(names) > _LISTED:
        lines.append(f"  ... and {len(names) - _LISTED} more")
    return "\n".join(lines) if lines else "  (none)"


def meant(name: str, names: Iterable[str], error: type[Exception]) -> str:
    """Returns the path that a name refers to: itself, or the only one that ends with it.

    Args:
      name: a '/'-joined path, or the last steps of one: ``users`` for ``params/tables/users``.
      names: the paths.
      error: type of the error for an ambiguous name.

    Returns:
      The path; the name itself if no path ends with it.

    Raises:
      error: several paths end with it; the message lists them.

    Examples:
      >>> meant("users", ["tables/users", "tables/items"], ValueError)
      'tables/users'
    """
    known = set(names)
    ends = {path for path in known if path.endswith(f"/{name}")}
    if name in known or not ends:
        return name
    if len(ends) > 1:
        raise error(
            f"table {name!r}: expected the end of exactly one path, found several\n"
            f"{listed(ends)}\nuse more of the path"
        )
    return ends.pop()


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
    """Returns whether a path matches a glob or compiled pattern completely."""
    compiled = _glob(pattern) if isinstance(pattern, str) else pattern
    return compiled.fullmatch(name) is not None
