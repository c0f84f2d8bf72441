# SPDX-License-Identifier: Apache-2.0
"""Opens the steps of a directory or a bucket for reading, depending on the path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltackpt.errors import (
    Damaged,
    ForeignDirectory,
    OptionError,
    RestoreError,
    StorageError,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.directory import Root
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.uploaded_wal import UploadedWals
from deltackpt.ledger.view import JOURNAL, JournalView
from deltackpt.reading.wal_locations import WalLocation
from deltackpt.storage import buckets
from deltackpt.storage.store import DEADLINE_SECS, Store, StorePath

if TYPE_CHECKING:
    from deltackpt.options import KafkaWal


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


def open_steps(
    where: str | os.PathLike[str],
    *,
    item: str | None = None,
    endpoint: str | None = None,
    wal: KafkaWal | None = None,
    follow: bool = False,
    deadline_secs: float = DEADLINE_SECS,
) -> Steps:
    """Opens the steps of a path, URL or JSON kvstore spec for reading; creates and removes nothing.

    The item is by default the one in the newest step; OptionError if that holds other or several.
    ``wal`` reads WAL records in Kafka; without it, they are reported as missing. With ``follow``,
    later ones are fetched ahead.
    """
    path = buckets.file_path(where)
    if path is not None:
        opened: Steps = Root.open(path, item=item or naming.EMBEDDINGS_ITEM, read_only=True)
    else:
        at = buckets.locate(where, endpoint=endpoint).open(deadline_secs=deadline_secs)
        opened = _in_bucket(at, item or naming.EMBEDDINGS_ITEM)
    opened.item = find_item(opened, item)
    if wal is not None:
        from deltackpt.reading.wal_topics import WalTopics

        opened.topics = WalTopics(wal.config, follow=follow)
    return opened


def _in_bucket(at: StorePath, item: str) -> Steps:
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


def find_item(steps: Steps, wanted: str | None) -> str:
    """Returns the item in the newest step, or the default; OptionError if it is ambiguous."""
    newest, found = _items(steps)
    if wanted is None and len(found) < 2:
        return found[0] if found else naming.EMBEDDINGS_ITEM
    if wanted is not None and (not found or wanted in found):
        return wanted
    raise OptionError(
        f"{steps}: expected one item that deltackpt wrote in step {newest}"
        f"{'' if wanted is None else f', {wanted!r},'} found {found}; name one of them"
    )


def _items(steps: Steps) -> tuple[int | None, list[str]]:
    """The newest step with deltackpt items, and their names."""
    newest = steps.known_newest_step()
    for step in _newest_first(newest, steps):
        at = steps.at(step)
        with contextlib.suppress(RestoreError):  # Damaged: an older step has the same items.
            found = [one for one in at.folders() if (at / one / naming.manifest_name(0)).is_file()]
            if found:
                return step, found
    return newest, []


def _newest_first(newest: int | None, steps: Steps) -> Iterator[int]:
    """Yields the newest step, then the older ones, which cost another listing."""
    if newest is not None:
        yield newest
        yield from sorted((one for one in steps.steps() if one < newest), reverse=True)
