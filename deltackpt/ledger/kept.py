# SPDX-License-Identifier: Apache-2.0
"""The note of what a trainer's policy keeps, for those who look at the directory.

Nobody but the trainer can ask its policy. So it notes the answer beside the steps after each
commit; nothing is decided by the note, and it is not forced to disk: where it is missing, half of
one or of a later version, it says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from deltackpt.errors import RestoreError
from deltackpt.format import manifest, names
from deltackpt.storage import files
from deltackpt.storage.store import Spot

_MAGIC = "deltackpt.kept"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What a policy said when it was last asked.

    Attributes:
      policy: the name of its type.
      newest: the newest step that it was asked about.
      steps: those that it keeps, ascending; what only their chains need is not among them.
    """

    policy: str
    newest: int
    steps: tuple[int, ...]


def note(root: Path, kept: Kept) -> None:
    """Notes what a policy keeps, in the place of what it kept before.

    Raises:
      StorageError: it cannot be written.
    """
    files.write_atomic(root / names.KEPT, manifest.to_bytes(kept, _MAGIC), fsync=False)


def forget(root: Path) -> None:
    """Removes the note: every step is kept now.

    Raises:
      StorageError: it cannot be removed.
    """
    with files.typed_errors(root / names.KEPT, "remove"):
        (root / names.KEPT).unlink(missing_ok=True)


def noted(root: Spot) -> Kept | None:
    """What a policy keeps; None where nobody noted that, or nobody can read it.

    Raises:
      StorageError: the store refused.
    """
    with contextlib.suppress(RestoreError):
        data = (root / names.KEPT).read(names.KEPT)
        return manifest.from_bytes(data, Kept, name=names.KEPT, magic=_MAGIC)
    return None
