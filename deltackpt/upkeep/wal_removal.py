# SPDX-License-Identifier: Apache-2.0
"""Removal of obsolete WAL epochs, by trainers and by garbage collection."""

from __future__ import annotations

import contextlib

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_locations import WalFolder


def remove(at: WalFolder, number: int) -> None:
    """Removes a WAL epoch: its segments first, because only its header names them.

    Args:
      at: the folder of the epoch headers.
      number: number of the epoch. If its header cannot be read, segments in another directory stay.

    Raises:
      StorageError: the store reported an error.
    """
    folders, logs = {at.segments(number)}, WalReader(at)
    with contextlib.suppress(RestoreError):  # Its other directory is not known.
        folders.add(logs.segments_of(logs.head(number)))
    for folder in folders:
        folder.store.delete([(folder / key).key for key in folder.keys()])
    # Another directory with its segments has a copy of its header.
    for folder in folders:
        place = folder.parent / names.epoch_name(number)
        place.store.delete([place.key])
