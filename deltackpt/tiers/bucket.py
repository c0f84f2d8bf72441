# SPDX-License-Identifier: Apache-2.0
"""A bucket as a place of copies: read as what it holds, written through its journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from deltackpt.errors import (
    RestoreError,
    StorageError,
)
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger import lease
from deltackpt.ledger.committed import Committed, Copied, Journaled
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import refuse_foreign
from deltackpt.ledger.upload import Uploaded, upload
from deltackpt.reading import saves
from deltackpt.storage import buckets
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Missing, Spot
from deltackpt.tiers.places import differs, gone


class Bucket:
    """Units in a bucket; what is copied there is committed by one entry of its journal each.

    Copies of earlier versions, which have markers instead of a journal, can be read.
    """

    def __init__(self, where: str | os.PathLike[str], endpoint: str | None, item: str):
        """Opens a bucket; nothing is made."""
        place = buckets.place(where, endpoint=endpoint)
        self.name = place.url
        self.item = item
        self._root = place.open()
        self._journal = Journal(self._root)
        self._store: Committed | None = None
        #: Whether it was claimed, to be written.
        self._is_claimed = False
        self._prefixes: dict[Unit, str] = {}
        self._uploaded: dict[Unit, tuple[Uploaded, SaveInfo]] = {}

    def __enter__(self) -> Bucket:
        """Nothing is held: whoever else copies here claims it, and commits alone from then on."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was held."""

    def steps(self) -> list[int]:
        """See ``Place``."""
        return [unit.step for unit in self._units() if unit.item is None]

    def in_use(self) -> str | None:
        """See ``Place``; who claimed it, and trained, is not known to have ended."""
        claim = self._journal.state().claim
        if claim is None or not claim.began or self._is_claimed:
            return None
        held = claim.lease
        return (
            f"that a trainer holds it: epoch {held.epoch}, process {held.pid} on {held.host}, "
            f"since {lease.utc(held.since_secs)}"
        )

    def spot(self, unit: Unit) -> Spot:
        """See ``Place``."""
        return Spot(self._committed(), unit.name)

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        standing = self._journal.state().standings.get(unit)
        if standing is not None:
            return standing.info
        at = Spot(self._committed(), str(unit.step))
        folder = self.spot(unit)
        if not folder.is_dir():
            return None
        try:
            if unit.item is None:
                return saves.read_save(at, self.item).info
            return saves.read_base(at, unit.item).info
        except RestoreError:
            if not folder.is_dir():  # It was removed meanwhile.
                return None
            raise

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        try:
            return self._committed().digests(unit)
        except Missing as error:
            raise gone(self, unit) from error

    def read(self, unit: Unit, name: str) -> bytes:
        """See ``Place``."""
        at = self.spot(unit) / name
        with at.missing_is_damage(str(at)):
            return at.store.get(at.key)

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        if unit not in self._units():
            return False
        known = self.digests(unit)
        if _figures(known) != _figures(expected):
            raise differs(f"{self.name}/{unit.name}", "another save")
        return not recheck or all(self._is(unit, name) for name in expected)

    def _is(self, unit: Unit, name: str) -> bool:
        try:
            self.read(unit, name)
        except RestoreError:
            return False
        return True

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``; the bucket is claimed where it is not."""
        if not self._is_claimed:
            if not self._journal.state().entry.number:
                refuse_foreign(self._root)
            buckets.probe(self._root)
            self._journal.claim()
            self._is_claimed = True
        self._prefixes[unit] = self._journal.prefix(unit)

    def discard(self, unit: Unit) -> None:
        """See ``Place``."""
        prefix = self._prefixes.pop(unit, None)
        if prefix is not None:
            self._journal.give_up(prefix)
            self._journal.delete([prefix])

    def take(
        self,
        unit: Unit,
        info: SaveInfo,
        source: Spot,
        expected: Mapping[str, Digest],
        *,
        workers: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Puts the files of a unit that was begun.

        Args:
          unit: which.
          info: what chains need to know of it.
          source: the folder of its files.
          expected: their digests.
          workers: objects on their way at a time.
          on_bytes: called with bytes put, from several threads.

        Raises:
          Damaged: a file is missing or altered at the source.
          StorageError: the source or the bucket refused.
        """
        target = self._root / self._prefixes[unit]
        put = upload(source, expected, target, workers=workers, on_bytes=on_bytes)
        self._uploaded[unit] = put, info

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        put, info = self._uploaded.pop(unit)
        prefix = self._prefixes.pop(unit)
        standing = Standing.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
        # A base may stand where its step is not copied, and a unit that is damaged is replaced.
        self._journal.commit(standing, alone=True, anew=True)

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``: what a cut copy has put is under another prefix, and is swept."""
        return False

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """Never called: ``take`` puts all files of a unit."""
        raise StorageError(f"{self.name}/{unit.name}/{name}: expected whole units")

    def _units(self) -> Mapping[Unit, str]:
        return self._committed().units()

    def _committed(self) -> Committed:
        """What is committed, by a journal where there is one by now."""
        if self._store is None or self._journal.known.entry.number == 0:
            is_journal = self._journal.state().entry.number > 0
            self._store = Committed(Journaled(self._journal) if is_journal else Copied(self._root))
        return self._store


def _figures(digests: Mapping[str, Digest]) -> dict[str, tuple[int, int, int]]:
    """What tells files from others."""
    return {name: digest[:3] for name, digest in digests.items()}
