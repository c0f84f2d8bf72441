# SPDX-License-Identifier: Apache-2.0
"""Removes WAL records that no restore needs: those below the last two committed steps.

Records above the step before the newest stay, so that a damaged step costs nothing.
"""

from __future__ import annotations

from pathlib import Path

from deltackpt.format.manifest import SaveId
from deltackpt.format.wal_epochs import EpochHeader
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.storage.store import store_path
from deltackpt.upkeep import wal_removal
from deltackpt.wal.kafka_writer import KafkaWriter


def trim(
    log_dir: Path, head: EpochHeader, process: int, step: SaveId, kafka: KafkaWriter | None
) -> None:
    """Removes segments that contain only records up to a step.

    Each process removes its own segments of the current epoch; process 0 removes all files of
    earlier epochs. The uploader removes files in a bucket.

    Args:
      log_dir: the folder of the headers.
      head: header of the current epoch.
      process: index of this process.
      step: a committed step that restores may still fall back to.
      kafka: writes the current epoch, if it is in Kafka.

    Raises:
      StorageError: the store reported an error.
    """
    at = WalFolder(store_path(log_dir))
    logs = WalReader(at)
    is_of_epoch = step.run == head.run
    if kafka is not None:
        # Only the beginning of a partition can be deleted: with all earlier epochs, or nothing.
        if is_of_epoch:
            kafka.truncate(step.step)
    else:
        _remove_segments(logs, head, process, step.step)
    if process == 0 and is_of_epoch:
        for number in logs.numbers():
            if number < head.epoch:
                wal_removal.remove(at, number)


def _remove_segments(logs: WalReader, head: EpochHeader, process: int, step: int) -> None:
    log = logs.log_of(head, process)
    log.advance()
    folder = logs.segments_of(head) / str(process)
    # The last one is being written.
    for name, records in list(log.segments.items())[:-1]:
        if records and all(record.save_id.step <= step for record in records):
            folder.store.delete([(folder / name).key])
