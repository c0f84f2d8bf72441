# SPDX-License-Identifier: Apache-2.0
"""A bucket as a copy source or target, written through its journal."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping

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
from deltackpt.tiers.places import Write, differs, gone, pieces_of


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

    @contextlib.contextmanager
    def writing(
        self, unit: Unit, info: SaveInfo, expected: Mapping[str, Digest]
    ) -> Iterator[Write]:
        """See ``Place``; claims the bucket if necessary."""
        if not self._is_claimed:
            if not self._journal.state().entry.number:
                refuse_foreign(self._root)
            buckets.probe(self._root)
            self._journal.claim()
            self._is_claimed = True
        prefix = self._journal.prefix(unit)
        sent: list[Uploaded] = []

        def write(source: StorePath, workers: int, on_bytes: Callable[[int, int], None]) -> None:
            target = self._root / prefix
            on_sent = functools.partial(on_bytes, 0)
            sent.append(upload(source, expected, target, workers=workers, on_bytes=on_sent))

        try:
            yield write
        except RestoreError:
            self._journal.give_up(prefix)
            with contextlib.suppress(StorageError):  # It is swept later.
                self._journal.delete([prefix])
            raise
        [put] = sent
        self.publish(Standing.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c))

    def publish(self, standing: Standing) -> None:
        """Commits an uploaded unit; one that is damaged is replaced."""
        # A base can exist without its step being copied.
        self._journal.commit(standing, alone=True, anew=True)


def _figures(digests: Mapping[str, Digest]) -> dict[str, tuple[int, int, int]]:
    """Values that identify a file's version."""
    return {name: digest[:3] for name, digest in digests.items()}
