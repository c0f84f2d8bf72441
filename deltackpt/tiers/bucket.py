# SPDX-License-Identifier: Apache-2.0
"""A bucket as a copy source or target, written through its journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from deltackpt.errors import Damaged, RestoreError, StorageError
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
from deltackpt.storage.store import Missing, StorePath
from deltackpt.tiers.places import differs, gone, pieces_of


class Bucket:
    """Steps and bases in a bucket; each copied one is committed by one journal entry.

    Copies made by earlier versions, which have markers instead of a journal, are readable.
    """

    def __init__(self, where: str | os.PathLike[str], endpoint: str | None, item: str):
        """Opens a bucket; writes nothing."""
        place = buckets.place(where, endpoint=endpoint)
        self.name = place.url
        self.item = item
        self._root = place.open()
        self._journal = Journal(self._root)
        self._store: Committed | None = None
        #: Whether this copy has claimed it for writing.
        self._is_claimed = False
        self._prefixes: dict[Unit, str] = {}
        self._uploaded: dict[Unit, tuple[Uploaded, SaveInfo]] = {}

    def __enter__(self) -> Bucket:
        """Takes no lock: any other copy that claims the bucket fences this one."""
        return self

    def __exit__(self, *error: object) -> None:
        """Releases nothing; copies the journal entry that names all copied steps."""
        if self._is_claimed and error[0] is None:
            self._journal.copy_newest()

    def steps(self) -> list[int]:
        """See ``Place``."""
        return [unit.step for unit in self._units() if unit.item is None]

    def in_use(self) -> str | None:
        """See ``Place``; a claim by a trainer counts, since its end is not known."""
        claim = self._journal.state().trainer
        if claim is None or self._is_claimed:
            return None
        held = claim.lease
        return (
            f"a trainer that holds it: epoch {held.epoch}, process {held.pid} on {held.host}, "
            f"since {lease.utc(held.since_secs)}"
        )

    def store_path(self, unit: Unit) -> StorePath:
        """See ``Place``."""
        return StorePath(self._committed(), unit.name)

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        standing = self._journal.state().standings.get(unit)
        if standing is not None:
            return standing.info
        at = StorePath(self._committed(), str(unit.step))
        folder = self.store_path(unit)
        if not folder.is_dir():
            return None
        try:
            if unit.item is None:
                return saves.read_save(at, self.item).info
            return saves.read_base(at, unit.item).info
        except RestoreError:
            if not folder.is_dir():  # The unit was removed concurrently.
                return None
            raise

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        try:
            return self._committed().digests(unit)
        except Missing as error:
            raise gone(self, unit) from error

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        if unit not in self._units():
            return False
        try:
            known = self.digests(unit)
        except Damaged:
            return False  # The caller copies it again over the damaged one.
        if _figures(known) != _figures(expected):
            raise differs(f"{self.name}/{unit.name}", "another save")
        return not recheck or all(self._is(unit, *one) for one in expected.items())

    def _is(self, unit: Unit, name: str, expected: Digest) -> bool:
        try:
            for _ in pieces_of(self.store_path(unit) / name, expected):
                pass
        except RestoreError:
            return False
        return True

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``; claims the bucket if necessary."""
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
        source: StorePath,
        expected: Mapping[str, Digest],
        *,
        workers: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Uploads the files of a unit after ``begin``.

        Args:
          unit: the unit.
          info: its entry in the chain.
          source: the folder with its files.
          expected: their digests.
          workers: number of concurrent uploads.
          on_bytes: called with bytes uploaded, from several threads.

        Raises:
          Damaged: a source file is missing or altered.
          StorageError: the source or the bucket reported an error.
        """
        target = self._root / self._prefixes[unit]
        put = upload(source, expected, target, workers=workers, on_bytes=on_bytes)
        self._uploaded[unit] = put, info

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        put, info = self._uploaded.pop(unit)
        prefix = self._prefixes.pop(unit)
        standing = Standing.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
        # A base can exist without its step being copied; a damaged unit is replaced.
        self._journal.commit(standing, alone=True, anew=True)

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``: an interrupted copy used another prefix, which is swept later."""
        return False

    def write(self, unit: Unit, name: str, pieces: Iterable[bytes | bytearray]) -> None:
        """Never called: ``take`` uploads all files of a unit."""
        raise StorageError(
            f"{self.name}/{unit.name}/{name}: expected complete units, found a single file"
        )

    def _units(self) -> Mapping[Unit, str]:
        return self._committed().units()

    def _committed(self) -> Committed:
        """The committed units, by journal if there is one by now."""
        if self._store is None or self._journal.known.entry.number == 0:
            is_journal = self._journal.state().entry.number > 0
            self._store = Committed(Journaled(self._journal) if is_journal else Copied(self._root))
        return self._store


def _figures(digests: Mapping[str, Digest]) -> dict[str, tuple[int, int, int]]:
    """Values that identify a file's version."""
    return {name: digest[:3] for name, digest in digests.items()}
