# SPDX-License-Identifier: Apache-2.0
"""Which marks of the log a follower applies above a step, looked at again and again.

The choice is that of a restore from storage: the newest point above all steps, by way of the newest
step below it that is on its line of training. So what turns out dead is chosen no more: a restart
has gone on from an earlier point, or marks were void because writing them had failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping

from deltackpt.errors import DamagedLog, DeltackptError, RestoreError, StorageError, without_frames
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.steps import Steps
from deltackpt.reading import saves
from deltackpt.reading.stretches import History, LogPoint, Logs, Way, newest_way
from deltackpt.storage.store import Stamp

#: So long a damaged mark is not read again.
_REFUSED_SECS = 30.0


class Marks:
    """The log of a root, as far as it was read; used by one thread."""

    def __init__(self, root: Steps, item: str, *, soft: bool):
        """Reads nothing yet.

        Args:
          root: of the steps.
          item: name of our item in them.
          soft: whether marks without dense leaves are applied, too.
        """
        self._logs = Logs(root.log_at)
        self._ids = _SaveIds(root, item)
        self._soft = soft
        self._history = History(())
        self._unreadable: DeltackptError | None = None
        #: What is wrong with marks, and when they are read again, on the monotonic clock.
        self._refused: dict[SaveId, tuple[float, RestoreError]] = {}

    def look(self) -> None:
        """Takes what was written since; of what cannot be read nothing counts, nor was applied."""
        now = time.monotonic()
        self._refused = {mark: told for mark, told in self._refused.items() if now < told[0]}
        try:
            self._history, self._unreadable = self._logs.read(), None
        except (RestoreError, StorageError) as error:
            self._history, self._unreadable = History(()), without_frames(error)

    @property
    def newest_step(self) -> int | None:
        """Training step of the newest point with dense leaves; None where there is none."""
        return next((one.step for one in self._history.points() if one.full), None)

    def way(self, steps: Collection[int]) -> Way | None:
        """From the step to hold to the point to hold; None where it is the newest step itself.

        Args:
          steps: those that are intact, as far as is known.
        """
        if not self._history.eras:
            return None
        return newest_way(self._history, self._ids.of(steps), self._refused.keys(), soft=self._soft)

    def full(self, way: Way) -> Way | None:
        """The way from the same step to the newest point on it that has dense leaves."""
        if way.point.full:
            return way
        for point in self._history.points():
            if point.full and way.after(point) is not None:
                return self._history.way(point, way.step)
        return None

    def leads_to(self, step: SaveId, point: LogPoint) -> bool:
        """Whether a step was taken by a training that had gone through a point before.

        Every row of the marks up to the point is then in the deltas up to the step.
        """
        history = self._history
        return point.step <= step.step and history.counts(point) and history.has_step(step)

    def refuse(self, way: Way, error: DamagedLog) -> None:
        """Takes no way over a damaged mark for a while."""
        told = time.monotonic() + _REFUSED_SECS, without_frames(error)
        self._refused[way.point.save_id] = told
        if isinstance(error.mark, SaveId):
            self._refused[error.mark] = told

    def problem(self, step: int) -> DeltackptError | None:
        """What is wrong with the log above a training step."""
        found = [told for mark, (_, told) in self._refused.items() if mark.step > step]
        for era in self._history.eras[:1]:
            for process in era.processes.values():
                found += process.log.altered_above(step)
        return found[0] if found else self._unreadable


class _SaveIds(Mapping[int, SaveId | None]):
    """Which save a step is, asked only where the log has to know; None where nobody can say."""

    def __init__(self, root: Steps, item: str):
        self._root, self._item = root, item
        self._steps: Collection[int] = ()
        self._known: dict[int, tuple[Stamp, SaveId]] = {}

    def of(self, steps: Collection[int]) -> _SaveIds:
        self._steps = steps
        self._known = {step: known for step, known in self._known.items() if step in steps}
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> SaveId | None:
        at = self._root.at(step)
        stamp = at.stamp()
        known = self._known.get(step)
        if stamp is not None and (known is None or known[0] != stamp):
            known = None
            with contextlib.suppress(RestoreError, StorageError):
                known = stamp, saves.read_info(at, self._item).save_id
            if known is not None:
                self._known[step] = known
        return None if stamp is None or known is None else known[1]
