# SPDX-License-Identifier: Apache-2.0
"""Removes what no restore needs of the logs: marks below the last two committed steps.

Those above the step before the newest stay, so that a damaged step costs nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.reading.stretches import Logs
from deltackpt.storage.store import Spot, spot


def trim(log_dir: Path, head: StretchHead, process: int, step: SaveId) -> None:
    """Removes files of marks that are not above a step.

    Each process removes its own of the stretch that is written, process 0 all of earlier stretches.
    What of them is at a root that is a bucket is removed by the promoter.

    Args:
      log_dir: the folder of the heads.
      head: of the stretch that is written.
      process: index of this process.
      step: a committed step, to which restores may still go back.

    Raises:
      StorageError: the store refused.
    """
    at = spot(log_dir)
    logs = Logs(at)
    log = logs.log_of(head, process)
    log.advance()
    folder = logs.segments_of(head) / str(process)
    # The last one is being written.
    for name, marks in list(log.segments.items())[:-1]:
        if marks and all(mark.save_id.step <= step.step for mark in marks):
            folder.store.delete([(folder / name).key])
    if process == 0 and step.run == head.run:
        for number in logs.numbers():
            if number < head.stretch:
                _remove(logs, at, number)


def _remove(logs: Logs, at: Spot, number: int) -> None:
    """Removes a stretch: its logs first, since no head would name them otherwise."""
    folders = {at / str(number)}
    with contextlib.suppress(RestoreError):  # Nobody can say where else it was.
        folders.add(logs.segments_of(logs.head(number)))
    for folder in folders:
        folder.store.delete([(folder / key).key for key in folder.keys()])
    for folder in folders:
        place = folder.parent / names.stretch_name(number)
        place.store.delete([place.key])
