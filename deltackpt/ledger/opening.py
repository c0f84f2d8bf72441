# SPDX-License-Identifier: Apache-2.0
"""Opens the steps of a directory or of a bucket, to be read: which it is says where it is."""

from __future__ import annotations

import os

from deltackpt.errors import ForeignDirectory, OptionError, StorageError, UnsupportedRoot
from deltackpt.format import names
from deltackpt.ledger.committed import Committed, Copied, Journaled
from deltackpt.ledger.directory import Root
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.promoted_log import JournaledLogs
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.view import JOURNAL, JournalView
from deltackpt.reading.log_places import LogPlaces
from deltackpt.storage import buckets
from deltackpt.storage.store import DEADLINE_SECS, Spot


class BucketSteps(Steps):
    """The steps that a journal names, to be read."""

    def __init__(self, journal: JournalView, item: str):
        """Reads by a journal; nothing is asked yet."""
        super().__init__(
            Spot(Committed(Journaled(journal)), ""), item, given=journal.root.store.url
        )
        self.journal = journal

    @property
    def log_at(self) -> LogPlaces:
        """See ``Steps``; the journal is asked anew."""
        state = self.journal.state()
        return JournaledLogs(self.journal.root, lambda: state)

    def known_newest_step(self) -> int | None:
        """See ``Steps``."""
        return max(self.journal.known.steps, default=None)

    def await_readable(self, step: int) -> None:
        """See ``Steps``: another save may have the step's number since it was seen last."""
        self.journal.state()

    def newest_lease(self) -> Lease | None:
        """See ``Steps``."""
        claim = self.journal.known.claim
        return None if claim is None else claim.lease


def open_steps(
    where: str | os.PathLike[str],
    *,
    item: str | None = None,
    endpoint: str | None = None,
    deadline_secs: float = DEADLINE_SECS,
) -> Steps:
    """Opens the steps of a directory or of a bucket, to be read; nothing is made or removed.

    Args:
      where: a path, a URL (``file://``, ``s3://``, ``gs://``, ``az://``, ``nodes://``) or a kvstore
        spec as JSON.
      item: name of our item in the steps; found in the newest step by default.
      endpoint: address of the server of a bucket, where it is not the service's own.
      deadline_secs: of each call of a bucket.

    Raises:
      StorageError: it does not exist, or cannot be read.
      ForeignDirectory: it holds nothing that deltackpt or Orbax wrote.
      UnsupportedRoot: the scheme is unknown.
      OptionError: no bucket is named; or the newest step holds other items of ours, or several.
    """
    path = buckets.file_path(where)
    if path is not None:
        opened: Steps = Root.open(path, item=item or names.EMBEDDINGS_ITEM, read_only=True)
    else:
        at = buckets.place(where, endpoint=endpoint).open(deadline_secs=deadline_secs)
        opened = _in_bucket(at, item or names.EMBEDDINGS_ITEM)
    opened.item = find_item(opened, item)
    return opened


def _in_bucket(at: Spot, item: str) -> Steps:
    journal = JournalView(at)
    if journal.state().entry.number:
        return BucketSteps(journal, item)
    copied = Steps(Spot(Committed(Copied(at)), ""), item)
    if copied.steps():
        return copied
    if journal.state().entry.number:  # The first trainer came meanwhile.
        return BucketSteps(journal, item)
    raise StorageError(
        f"{at}: expected a journal in {JOURNAL}/, or markers of copies in {names.COPIED}/, found "
        "neither; check the URL, or wait for the first save of its trainer"
    )


def refuse_foreign(root: Spot) -> None:
    """Checks that a place without a journal is empty: nobody knows what would be hidden, or swept.

    Raises:
      UnsupportedRoot: it holds copies with markers.
      ForeignDirectory: it holds other things.
    """
    found = root.names()
    if found == [JOURNAL] and (root / JOURNAL).names() == buckets.probes(root):
        return  # Of a first start that was cut.
    if names.COPIED in found:
        raise UnsupportedRoot(
            f"{root}: expected a journal, or nothing, found copies with markers in "
            f"{names.COPIED}/, as earlier versions made them; they can be read and copied "
            "('deltackpt copy') to another place, which can be written"
        )
    if found:
        raise ForeignDirectory(
            f"{root}: expected an empty place, or a root of deltackpt, found {found[:5]}; give "
            "another path in the bucket"
        )


def find_item(steps: Steps, wanted: str | None) -> str:
    """Name of our item in some steps: that of the newest one.

    Args:
      steps: where.
      wanted: the name where the caller knows it; it is checked.

    Returns:
      The name; the default one where there is no step, or none of ours in it.

    Raises:
      OptionError: the newest step holds other items of ours, or several.
      StorageError: it cannot be read.
    """
    newest = steps.known_newest_step()
    found: list[str] = []
    if newest is not None:
        at = steps.at(newest)
        found = [name for name in at.folders() if (at / name / names.manifest_name(0)).is_file()]
    if wanted is None and len(found) < 2:
        return found[0] if found else names.EMBEDDINGS_ITEM
    if wanted is not None and (not found or wanted in found):
        return wanted
    raise OptionError(
        f"{steps}: expected one item that deltackpt wrote in step {newest}"
        f"{'' if wanted is None else f', {wanted!r},'} found {found}; name one of them"
    )
