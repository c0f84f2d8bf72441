# SPDX-License-Identifier: Apache-2.0
"""A bucket as a copy source or target, written through its journal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger import lease
from deltackpt.ledger.committed import Committed
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import refuse_foreign, refuse_old_copies
from deltackpt.ledger.upload import Uploaded, upload
from deltackpt.storage import buckets
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Missing, StorePath
from deltackpt.tiers.places import differs, gone, pieces_of


class Bucket:
    """Steps and bases in a bucket; each copied one is committed by one journal entry."""

    def __init__(self, where: str | os.PathLike[str], endpoint: str | None, item: str):
        """Opens a bucket; writes nothing."""
        place = buckets.place(where, endpoint=endpoint)
        self.name = place.url
        self.item = item
        self._root = place.open()
        self._journal = Journal(self._root)
        self._store = Committed(self._journal)
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
        found = [unit.step for unit in self._store.units() if unit.item is None]
        if not self._journal.known.entry.number:
            refuse_old_copies(self._root)
        return found

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
        return StorePath(self._store, unit.name)

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        standing = self._journal.state().standings.get(unit)
        return None if standing is None else standing.info

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        try:
            return self._store.digests(unit)
        except Missing as error:
            raise gone(self, unit) from error

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        if unit not in self._store.units():
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


def _figures(digests: Mapping[str, Digest]) -> dict[str, tuple[int, int, int]]:
    """Values that identify a file's version."""
    return {name: digest[:3] for name, digest in digests.items()}
