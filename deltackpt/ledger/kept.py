# SPDX-License-Identifier: Apache-2.0
"""A note of what a trainer's retention policy keeps, for tools that inspect the directory.

Only the trainer can evaluate its policy, so it records the result next to the steps after each
commit. The note is informational and is not fsynced: a missing or torn note, or one of a later
version, is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from deltackpt.errors import RestoreError
from deltackpt.format import manifest, names
from deltackpt.storage import files
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import StorePath

_MAGIC = "deltackpt.kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a policy kept when it was last evaluated.

    Attributes:
      policy: name of the policy's type.
      newest: the newest step it was evaluated on.
      steps: the steps that it keeps, ascending, without those that only their chains need.
    """

    policy: str
    newest: int
    steps: tuple[int, ...]


def note(root: Path, kept: Kept | None) -> None:
    """Records what a policy keeps, replacing the previous note; None if it keeps every step.

    Raises:
      StorageError: writing or removing it failed.
    """
    if kept is not None:
        DurableDir(root, fsync=False).write(root / names.KEPT, manifest.to_bytes(kept, _MAGIC))
        return
    with files.typed_errors(root / names.KEPT, "remove"):
        (root / names.KEPT).unlink(missing_ok=True)


def noted(root: StorePath) -> Kept | None:
    """Returns what a policy keeps; None if there is no readable note.

    Raises:
      StorageError: the store reported an error.
    """
    with contextlib.suppress(RestoreError):
        data = (root / names.KEPT).read(names.KEPT)
        return manifest.from_bytes(data, Kept, name=names.KEPT, magic=_MAGIC)
    return None
