# SPDX-License-Identifier: Apache-2.0
"""Where an export goes: a directory that appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltackpt.errors import OutOfSpace, StorageError, TargetExists, UnsupportedRoot
from deltackpt.storage import files

# One slash is enough: pathlib turns "s3://bucket" into "s3:/bucket".
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote.

    Attributes:
      path: the directory.
      step: the step that it holds.
      nbytes: bytes of its files.
      files: names of its files below ``path``, sorted.
      left_out: '/'-joined paths of leaves that the format cannot hold, sorted.
      changed: '/'-joined paths, or column names, of what has another type there, to what it is.
    """

    path: Path
    step: int
    nbytes: int
    files: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    changed: dict[str, str] = dataclasses.field(default_factory=dict)


def local_path(path: str | os.PathLike[str]) -> Path:
    """An absolute path of a file system.

    Raises:
      UnsupportedRoot: it has a scheme.
    """
    if _SCHEME.match(os.fspath(path)):
        raise UnsupportedRoot(
            f"{os.fspath(path)}: expected a path of a file system, found a scheme; export to and "
            "import from a local directory, and copy it"
        )
    return Path(path).absolute()


@contextlib.contextmanager
def published(target: Path, *, needed_bytes: int = 0) -> Iterator[Path]:
    """A new directory to write into, which becomes ``target`` where nothing is raised.

    What was written is on disk before it bears the name. A process that is killed leaves a hidden
    directory ``.<name>.<id>.tmp`` beside the target.

    Args:
      target: the name; its parents are made.
      needed_bytes: what will be written at least.

    Yields:
      The directory to write into.

    Raises:
      TargetExists: there is something of that name.
      OutOfSpace, StorageError: the file system refused.
    """
    _refuse_existing(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = files.free_bytes(target.parent)
        if free_bytes < needed_bytes:
            raise OutOfSpace(
                f"{target}: expected room for {needed_bytes:,} bytes, found {free_bytes:,} free; "
                "free space, or export elsewhere"
            )
        try:
            temporary.mkdir()
            yield temporary
            files.fsync_tree(temporary)
            _refuse_existing(target)
            files.rename(temporary, target, fsync=True)
        except BaseException:
            files.remove_tree(temporary)
            raise


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Turns an operating system's refusal to write an export into a typed error."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (StorageError, TargetExists)) or error.errno is None:
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{target}: expected room to write, found the file system full; free space, or "
                "export elsewhere: nothing was left behind"
            ) from error
        raise StorageError(
            f"{target}: expected to write, found {os.strerror(error.errno)}; check the file "
            "system and its permissions, then try again: nothing was left behind"
        ) from error


def exported(
    target: Path,
    step: int,
    *,
    left_out: Sequence[str] = (),
    changed: dict[str, str] | None = None,
) -> Exported:
    """Describes a target that was published."""
    found = sorted(path for path in target.rglob("*") if path.is_file())
    return Exported(
        path=target,
        step=step,
        nbytes=sum(path.stat().st_size for path in found),
        files=tuple(path.relative_to(target).as_posix() for path in found),
        left_out=tuple(sorted(left_out)),
        changed=changed or {},
    )


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise TargetExists(
            f"{target}: expected nothing of that name, found a file or directory; remove it, or "
            "export under another name"
        )
