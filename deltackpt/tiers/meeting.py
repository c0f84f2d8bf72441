# SPDX-License-Identifier: Apache-2.0
"""How the uploaders of several staging directories upload one save, each its part.

They agree on a save's path without communication: it is derived from the trainer's claim and the
save. Each uploads its files there and reports this with an object in the remote ``meeting/``.
Process 0's uploader, whose staging directory describes the complete save, commits once all have
reported. An uploader that cannot upload its part reports that instead, and the save is not
committed.
"""

from __future__ import annotations

import dataclasses
import hashlib

from deltackpt.format import manifest
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import SAVES, prefix_epoch
from deltackpt.storage.store import StorePath

MEETING = "meeting"
_MAGIC = "deltackpt.stage.part"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """An uploader's report on its part.

    Attributes:
      process: the process whose part it is.
      nbytes: size of the uploaded files.
      objects: number of uploaded objects.
      problem: why the save cannot be uploaded; None if the part was uploaded.
    """

    process: int
    nbytes: int = 0
    objects: int = 0
    problem: str | None = None


def token_of(save_id: SaveId) -> str:
    """Returns the suffix of a save's path, the same on every node."""
    known = f"{save_id.run}.{save_id.attempt}.{save_id.step}"
    return hashlib.sha256(known.encode()).hexdigest()[:12]


class Meeting:
    """The reports of all uploaders on one save."""

    def __init__(self, root: StorePath, prefix: str):
        """For a save whose files are below ``prefix``."""
        self._at = root / MEETING / prefix.removeprefix(f"{SAVES}/")
        self._known: dict[int, Told] = {}

    def tell(self, told: Told) -> None:
        """Publishes a report. Idempotent.

        Raises:
          StorageError: the remote store reported an error.
        """
        at = self._at / f"{told.process}.msgpack"
        at.store.put(at.key, manifest.to_bytes(told, _MAGIC))
        self._known[told.process] = told

    def told(self) -> dict[int, Told]:
        """Returns the reports by process.

        Raises:
          Damaged: an object is not a report.
          StorageError: the remote store reported an error.
        """
        for name in self._at.keys():
            at = self._at / name
            process = int(name.partition(".")[0])
            if process not in self._known or process == 0:
                data = at.store.get(at.key)
                self._known[process] = manifest.from_bytes(data, Told, name=str(at), magic=_MAGIC)
        return dict(self._known)

    def end(self) -> None:
        """Removes the reports after the commit, which the journal records.

        Raises:
          StorageError: the remote store reported an error.
        """
        self._at.store.delete([(self._at / name).key for name in self._at.keys()])


def sweep(root: StorePath, epoch: int) -> None:
    """Removes the reports of superseded claims.

    Raises:
      StorageError: the remote store reported an error.
    """
    at = root / MEETING
    for name in at.folders():
        of = prefix_epoch(f"{SAVES}/{name}")
        if of is not None and of < epoch:
            at.store.delete([(at / name / one).key for one in (at / name).keys()])
