# SPDX-License-Identifier: Apache-2.0
"""Removal of stretches of a log that no restore can need, by trainers and by whoever collects."""

from __future__ import annotations

import contextlib

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.reading.stretches import Logs


def remove(logs: Logs, number: int) -> None:
    """Removes a stretch: its logs first, since no head would name them otherwise.

    Args:
      logs: of the root.
      number: of the stretch; what a head that cannot be read says of another directory stays.

    Raises:
      StorageError: the store refused.
    """
    folders = {logs.at / str(number)}
    with contextlib.suppress(RestoreError):  # Nobody can say where else it was.
        folders.add(logs.segments_of(logs.head(number)))
    for folder in folders:
        folder.store.delete([(folder / key).key for key in folder.keys()])
    place = logs.at / names.stretch_name(number)
    place.store.delete([place.key])
