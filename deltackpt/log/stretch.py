# SPDX-License-Identifier: Apache-2.0
"""A stretch: its head, the writer of this process, and the points that are known."""

from __future__ import annotations

import collections
import contextlib
import threading
from pathlib import Path

import numpy as np

from deltackpt.errors import Damaged, OptionError
from deltackpt.format import names, stretches
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.stretches import Continues, StretchHead
from deltackpt.handlers.run import Run
from deltackpt.log.dense_frames import DenseFrames
from deltackpt.log.progress import Progress
from deltackpt.log.segments import SegmentWriter
from deltackpt.log.writer import Durable, LogWriter
from deltackpt.reading.log_places import LogFolder
from deltackpt.reading.stretches import LogPoint, Logs, apart_folder
from deltackpt.save.dense_blocks import DenseKeeper
from deltackpt.storage.store import Exists, spot

#: Durable marks that other processes may not have yet.
_KEPT = 4096


class Stretch:
    """The log that a run writes."""

    def __init__(
        self, run: Run, head: StretchHead, directory: Path, references: DenseKeeper | None
    ):
        """Writes nothing yet.

        Args:
          run: the manager's run.
          head: of the stretch.
          directory: of the logs of all processes.
          references: what dense leaves are against; None where they are whole.
        """
        options = run.options.log
        assert options is not None
        self.head = head
        self._lock = threading.Lock()
        self._durable: collections.deque[Durable] = collections.deque(maxlen=_KEPT)
        self.progress = Progress(directory, run.among.index, head.process_count)
        segments = SegmentWriter(
            directory / str(run.among.index),
            stretch=head.stretch,
            process=run.among.index,
            fsync=run.fsync,
        )
        self.writer = LogWriter(
            segments,
            check=run.held.check_lease,
            process=run.among.index,
            dense=DenseFrames(references),
            segment_bytes=options.backend.segment_bytes,
            buffer_bytes=options.buffer_bytes,
            deadline_secs=options.deadline_secs,
            workers=run.workers,
            notify=self._is_durable,
        )

    @classmethod
    def open(cls, run: Run, head: StretchHead, references: DenseKeeper | None) -> Stretch:
        """A stretch whose head stands; see ``Stretch``."""
        folder = LogFolder(spot(run.held.log_dir))
        if head.directory is not None:
            folder = apart_folder(head.directory, head.run)
        return cls(run, head, Path(folder.segments(head.stretch)), references)

    def newest_point(self, *, fresh: bool) -> LogPoint | None:
        """The newest full point that every process has, as far as is known.

        Args:
          fresh: whether the others are asked how far they are.
        """
        number = self.progress.of_all(fresh=fresh)
        with self._lock:
            found = (
                one for one in reversed(self._durable) if one.full and one.save_id.attempt <= number
            )
            newest = next(found, None)
        if newest is None:
            return None
        return LogPoint(self.head.stretch, newest.save_id, True, newest.unix_secs)

    def close(self) -> dict[str, np.ndarray]:
        """Ends the writer; returns the rows that no durable mark holds, by table."""
        self.writer.close()
        return self.writer.take_owed()

    def void(self) -> None:
        """Has the other processes know that no mark of this one counts."""
        self.progress.note(0, 0)

    def _is_durable(self, mark: Durable) -> None:
        with self._lock:
            self._durable.append(mark)
        self.progress.note(mark.save_id.attempt, mark.save_id.step)


def write_head(
    logs: Logs,
    *,
    run: str,
    layout: Layout | None,
    process_count: int,
    base: SaveId | None,
    continues: Continues | None,
    directory: str | None,
    log_dir: Path,
) -> int:
    """Writes the head of a new stretch; earlier ones count only as far as it goes on from them.

    Args:
      logs: of the root.
      run: id of the run.
      layout: of the state that is logged; None where none is.
      process_count: how many processes log.
      base: the step that training goes on from.
      continues: the point that it was restored at.
      directory: of the segments, where that is not beside the heads; it has the head, too, by which
        whoever looks there knows that the segments are of this root.
      log_dir: of the heads.

    Returns:
      Its number.

    Raises:
      StorageError: it cannot be written.
    """
    while True:
        number = max(logs.numbers(), default=-1) + 1
        head = StretchHead(
            stretch=number,
            run=run,
            process_count=process_count,
            base=base,
            continues=continues,
            directory=directory,
            groups=() if layout is None else layout.groups,
            tables=() if layout is None else layout.tables,
            dense=() if layout is None else layout.dense,
            tracking_paths=() if layout is None else layout.tracking_paths,
        )
        name, data = names.stretch_name(number), stretches.to_bytes(head)
        if directory is not None:
            # It may be there from a call whose next write failed.
            apart = apart_folder(directory, run).at / name
            apart.store.put(apart.key, data)
        place = spot(log_dir) / name
        try:
            place.store.put(place.key, data, absent=True)
        except Exists:
            continue  # Another trainer's, whom the lease tells from us.
        return number


def head_of(run: Run, logs: Logs, number: int) -> StretchHead:
    """The head that process 0 has written, as this process sees it.

    Args:
      run: the manager's run.
      logs: of the root.
      number: of the stretch.

    Raises:
      OptionError: this process does not see the directory that process 0 logs to.
      Damaged: it is missing, or altered.
    """
    options = run.options.log
    assert options is not None
    if (directory := options.backend.directory) is None:
        return logs.head(number)
    found: StretchHead | None = None
    with contextlib.suppress(Damaged):
        name, data = apart_folder(directory, run.lineage.run).head(number)
        found = stretches.from_bytes(data, name=name)
    if found is None:
        raise OptionError(
            f"LogOptions.backend: expected a directory that all {run.among.count} processes see, "
            f"found that process {run.among.index} does not find in {directory} what process 0 has "
            "written there; give one that is shared between the nodes"
        )
    return found
