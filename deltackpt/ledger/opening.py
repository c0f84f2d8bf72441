# SPDX-License-Identifier: Apache-2.0
"""Opens the steps of a directory or a bucket for reading, depending on the path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltackpt.errors import OptionError, RestoreError
from deltackpt.format import naming
from deltackpt.lazy_import import LazyModule
from deltackpt.ledger.directory import Root
from deltackpt.ledger.steps import Steps
from deltackpt.storage import buckets
from deltackpt.storage.store import DEADLINE_SECS

if TYPE_CHECKING:
    from deltackpt.ledger import bucket_steps
    from deltackpt.options import KafkaWal
else:  # A local directory has no journal.
    bucket_steps = LazyModule("deltackpt.ledger.bucket_steps")


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
        opened = bucket_steps.open_journal(at, item or naming.EMBEDDINGS_ITEM)
    opened.item = find_item(opened, item)
    if wal is not None:
        from deltackpt.reading.wal_topics import WalTopics

        opened.topics = WalTopics(wal.config, follow=follow)
    return opened


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
