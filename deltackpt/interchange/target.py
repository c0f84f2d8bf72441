# SPDX-License-Identifier: Apache-2.0
"""Export targets: a directory that appears under its name complete, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import numpy as np

from deltackpt.errors import OptionError, TargetExists, UnsupportedRoot
from deltackpt.format import naming
from deltackpt.inspect import Step
from deltackpt.inspect.dense_items import PLACEHOLDERS
from deltackpt.storage import posix, redaction
from deltackpt.storage.posix import DurableDir, fsync_tree, temporary_beside

# One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
      path: the target directory.
      step: the exported step.
      nbytes: total size of its files in bytes.
      files: names of the files below ``path``, sorted.
      left_out: '/'-joined paths of leaves that the format cannot store, sorted. None and empty
        containers, such as optax's ``MaskedNode`` and ``EmptyState``, are not listed.
      changed: '/'-joined paths, or column names, of leaves stored with another type, mapped to that
        type.
    """

    path: Path
    step: int
    nbytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    changed: dict[str, str] = dataclasses.field(default_factory=dict)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a local path; raises ``UnsupportedRoot`` for a URL."""
    if _SCHEME.match(os.fspath(path)):
        raise UnsupportedRoot(
            f"{redaction.shown(path)}: expected a file system path, found a URL scheme; export to "
            "and import from a local directory, and copy it"
        )
    return posix.user_path(path)


def chosen(step: Step, patterns: str | Sequence[str]) -> set[str]:
    """Returns the paths of a step's tables, slots and dense leaves that match some globs."""
    slots = {path for table in step.tables.values() for path in table.leaves.values()}
    every, found = slots | {*step.dense}, set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {name for name in every if naming.matches(pattern, name)}
        if not matched and pattern != "**":
            empty = {name for name, leaf in step.dense.items() if leaf.kind in PLACEHOLDERS}
            raise OptionError(
                f"step {step.step}: expected a leaf that matches {pattern!r}, found\n"
                f"{naming.listed(every - empty)}\nask for some of these"
            )
        found |= matched
    return found


@contextlib.contextmanager
def published(target: Path, *, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a new directory, which is fsynced and renamed to ``target`` if the block succeeds.

    A killed process leaves a hidden directory ``.<name>.<id>.tmp`` next to the target.
    ``needed_bytes`` is a lower bound of what will be written.
    """
    _refuse_existing(target)
    temporary = temporary_beside(target)
    action, advice = "write it (nothing was left behind)", "make room, or export elsewhere"
    with posix.typed_errors(target, action, full=advice):
        target.parent.mkdir(parents=True, exist_ok=True)
        posix.require_room(target.parent, needed_bytes, target, "make room, or export elsewhere")
        try:
            temporary.mkdir()
            yield temporary
            fsync_tree(temporary)
            _refuse_existing(target)
            DurableDir(target.parent).publish(temporary, target)
        except BaseException:
            DurableDir(target.parent).remove(temporary)
            raise


def widened(dtype: np.dtype, known: Container[str]) -> np.dtype | None:
    """Returns a dtype that a format knows by name, if necessary a wider one; None without one."""
    if dtype.name in known:
        return dtype
    if dtype.name.startswith(("int", "uint")):
        return np.dtype(np.int8 if dtype.name.startswith("int") else np.uint8)
    is_short_float = "float" in dtype.name and dtype.itemsize <= 2
    return np.dtype(np.float32) if is_short_float else None


def exported(
    target: Path, step: int, *, left_out: Sequence[str] = (), changed: dict[str, str]
) -> Exported:
    """Describes a published target."""
    found = sorted(path for path in target.rglob("*") if path.is_file())
    return Exported(
        path=target,
        step=step,
        nbytes=sum(path.stat().st_size for path in found),
        files=tuple(path.relative_to(target).as_posix() for path in found),
        left_out=tuple(sorted(left_out)),
        changed=changed,
    )


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise TargetExists(
            f"{target}: expected a new path, found an existing file or directory; remove it, or "
            "choose another name"
        )
