# SPDX-License-Identifier: Apache-2.0
"""The steps of a bucket for reading, named by its journal."""

from __future__ import annotations

from collections.abc import Iterator

from deltackpt.errors import Damaged, ForeignDirectory, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.uploaded_wal import UploadedWals
from deltackpt.ledger.view import JOURNAL, JournalView
from deltackpt.reading.wal_locations import WalLocation
from deltackpt.storage import buckets
from deltackpt.storage.store import Store, StorePath


class BucketSteps(Steps):
    """The steps named by a journal, for reading."""

    def __init__(self, journal: JournalView, item: str, store: Store | None = None):
        """Reads from ``store``, by default the committed objects; sends no request yet."""
        store = store or CommittedStore(journal)
        super().__init__(StorePath(store, ""), item, given=journal.root.store.url)
        self.journal = journal

    @property
    def wal_location(self) -> WalLocation:
        """See ``Steps``; reads the journal again."""
        state = self.journal.state()
        return UploadedWals(self.journal.root, lambda: state, self.topics)

    def rolled_back(self) -> Iterator[SaveId]:
        """See ``Steps``."""
        return (one.entry.save_id for one in self.journal.known.entry.rolled_back)

    def known_newest_step(self) -> int | None:
        """See ``Steps``."""
        return max(self.journal.known.steps, default=None)

    def await_readable(self, step: int) -> None:
        """See ``Steps``: another save may have taken the step's number since it was listed."""
        self.journal.state()

    def problems(self) -> list[Damaged]:
        """See ``Steps``."""
        return self.journal.problems

    def lost_steps(self) -> dict[int, Damaged]:
        """See ``Steps``."""
        return self.journal.lost_saves


def open_journal(at: StorePath, item: str) -> BucketSteps:
    """Opens a bucket that has a journal for reading; StorageError if it has none."""
    journal = JournalView(at)
    if not journal.state().entry.number:
        for problem in journal.problems:
            raise problem
        raise StorageError(
            f"{at}: expected a journal in {JOURNAL}/, found none; check the URL, or wait for the "
            "first save of its trainer"
        )
    return BucketSteps(journal, item)


def refuse_foreign(root: StorePath) -> None:
    """Checks that a location without a journal is empty: nothing is hidden or swept."""
    found = root.names()
    if found == [JOURNAL] and (root / JOURNAL).names() == buckets.probes(root):
        return  # Left by an interrupted first start.
    if found:
        raise ForeignDirectory(
            f"{root}: expected an empty location or a deltackpt checkpoint directory, found "
            f"{found[:5]}; use another path in the bucket"
        )
