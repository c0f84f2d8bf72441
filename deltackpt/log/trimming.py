# SPDX-License-Identifier: Apache-2.0
"""Removes what no restore needs of the logs: marks below the last two committed steps.

Those above the step before the newest stay, so that a damaged step costs nothing.
"""

from __future__ import annotations

from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import StretchHead
from deltackpt.reading.stretches import Logs
from deltackpt.storage.store import Spot
from deltackpt.upkeep import stretches


def trim(at: Spot, head: StretchHead, process: int, step: SaveId) -> None:
    """Removes files of marks that are not above a step.

    Each process removes its own of the stretch that is written, process 0 all of earlier stretches.

    Args:
      at: the folder of the heads.
      head: of the stretch that is written.
      process: index of this process.
      step: a committed step, to which restores may still go back.

    Raises:
      StorageError: the store refused.
    """
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
                stretches.remove(logs, number)
