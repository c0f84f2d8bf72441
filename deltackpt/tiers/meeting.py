# SPDX-License-Identifier: Apache-2.0
"""How the promoters of several stages bring one save to the root, each its part.

They know without asking each other where its files go: the place follows from the trainer's claim
and the save. Each puts its files there and tells so by an object in the root's ``meeting/``. That
of process 0, whose stage describes all of the save, commits once all have told. Whoever cannot do
its part tells that instead, and then the save does not come to the root.
"""

from __future__ import annotations

import dataclasses
import hashlib

from deltackpt.format import manifest
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import SAVES, prefix_epoch
from deltackpt.storage.store import Spot

MEETING = "meeting"
_MAGIC = "deltackpt.stage.part"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a promoter tells of its part.

    Attributes:
      process: whose stage it is.
      nbytes: of the files that it put.
      objects: how many these were.
      problem: why the save cannot come to the root; None where the part is there.
    """

    process: int
    nbytes: int = 0
    objects: int = 0
    problem: str | None = None


def token_of(save_id: SaveId) -> str:
    """What the place of a save ends in, on every node."""
    known = f"{save_id.run}.{save_id.attempt}.{save_id.step}"
    return hashlib.sha256(known.encode()).hexdigest()[:12]


class Meeting:
    """Where the promoters meet for one save."""

    def __init__(self, root: Spot, prefix: str):
        """Of a save whose files go below ``prefix``."""
        self._at = root / MEETING / prefix.removeprefix(f"{SAVES}/")
        self._known: dict[int, Told] = {}

    def tell(self, told: Told) -> None:
        """Tells the others; to tell the same again changes nothing.

        Raises:
          StorageError: the root refused.
        """
        at = self._at / f"{told.process}.msgpack"
        at.store.put(at.key, manifest.to_bytes(told, _MAGIC))
        self._known[told.process] = told

    def told(self) -> dict[int, Told]:
        """What was told, by process.

        Raises:
          Damaged: something else stands there.
          StorageError: the root refused.
        """
        for name in self._at.keys():
            at = self._at / name
            process = int(name.partition(".")[0])
            if process not in self._known or process == 0:
                data = at.store.get(at.key)
                self._known[process] = manifest.from_bytes(data, Told, name=str(at), magic=_MAGIC)
        return dict(self._known)

    def end(self) -> None:
        """Removes what was told; the journal tells the rest.

        Raises:
          StorageError: the root refused.
        """
        self._at.store.delete([(self._at / name).key for name in self._at.keys()])


def sweep(root: Spot, epoch: int) -> None:
    """Removes what was told under claims that are over.

    Raises:
      StorageError: the root refused.
    """
    at = root / MEETING
    for name in at.folders():
        of = prefix_epoch(f"{SAVES}/{name}")
        if of is not None and of < epoch:
            at.store.delete([(at / name / one).key for one in (at / name).keys()])
