# SPDX-License-Identifier: Apache-2.0
"""Uploads the parts of saves from one of several staging directories; see ``meeting``.

Each uploader uploads its own part and reports it. Process 0's uploader commits a save once all have
reported; if one cannot upload its part, the save is not committed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from deltackpt.errors import RestoreError, TargetDiffers
from deltackpt.format.chain import SaveInfo
from deltackpt.ledger.entries import Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import describe, send
from deltackpt.reading import inventory
from deltackpt.resources.pace import Pace
from deltackpt.storage.store import StorePath, store_path
from deltackpt.tiers import arrivals, stagger
from deltackpt.tiers.arrivals import Arrivals
from deltackpt.tiers.meeting import Meeting, Told, token_of
from deltackpt.tiers.stage import Orders, Stage, key_of

#: Shortest and longest interval between two polls of the other uploaders' reports.
_OTHERS_SECS = (0.05, 2.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """What an uploader found in its staging directory.

    Attributes:
      orders: the trainer's orders.
      journal: journal of the remote directory, under the trainer's claim.
      found: the staged saves by step, ascending; None if a manifest is unreadable.
      pace: limits the upload rate.
      is_hurried: whether to send parts at once, because a caller is waiting.
      on_bytes: called with bytes sent, from several threads.
    """

    orders: Orders
    journal: Journal
    found: Sequence[tuple[int, SaveInfo | None]]
    pace: Pace
    is_hurried: bool
    on_bytes: Callable[[int], None]


class PartPromotion:
    """Uploads the parts of one staging directory's saves; used by one thread.

    Attributes:
      turn_secs: seconds until a part is due; None if no part is waiting for its turn.
    """

    def __init__(self, stage: Stage, arrived: Arrivals):
        """Reads and writes nothing yet.

        Args:
          stage: this process's staging directory.
          arrived: reports the progress.
        """
        self.turn_secs: float | None = None
        self._steps = store_path(stage.steps)
        self._arrivals = arrived
        #: Uploaded parts of saves that are not complete yet, by ``key_of``.
        self._sent: dict[str, Told] = {}
        self._meetings: dict[str, Meeting] = {}
        #: When their upload started here, in ``time.perf_counter()`` seconds.
        self._began: dict[str, float] = {}
        self._patience = _OTHERS_SECS[0]

    @property
    def waits_for_others(self) -> bool:
        """Returns whether an uploaded part belongs to a save that is not known to be complete."""
        return bool(self._sent)

    def until_others(self, waiting: Collection[str]) -> float:
        """Returns the seconds until other uploaders should be polled again.

        Args:
          waiting: pending saves by ``key_of``; all others are forgotten.
        """
        for known in (self._sent, self._meetings, self._began):
            for key in known.keys() - waiting:
                del known[key]
        if not self._sent:
            self._patience = _OTHERS_SECS[0]
            return math.inf if self.turn_secs is None else self.turn_secs
        found, self._patience = self._patience, min(self._patience * 1.3, _OTHERS_SECS[1])
        return found

    def promote(self, step: int, info: SaveInfo, look: Look) -> bool:
        """Uploads one part of a save; process 0 commits the complete save.

        Args:
          step: its step.
          info: its entry in the chain.
          look: what was found in the staging directory.

        Returns:
          Whether anything was done; the rest may be up to other uploaders.

        Raises:
          FencedError: another trainer has taken the remote directory.
          StorageError: the remote store reported an error or did not answer; retry.
        """
        orders, journal = look.orders, look.journal
        key, source = key_of(step, info.save_id), self._steps / str(step)
        prefix = journal.prefix(Unit(step), token_of(info.save_id))
        with_others = self._meetings.setdefault(key, Meeting(journal.root, prefix))
        if key not in self._sent:
            self.turn_secs = self._until_turn(step, look)
            if self.turn_secs is not None:
                return False
            self._began.setdefault(key, time.perf_counter())
            told = with_others.told().get(orders.process)
            if told is None:
                told = _send(source, prefix, look)
                with_others.tell(told)
            self._sent[key], self._patience = told, _OTHERS_SECS[0]
            return True
        told = with_others.told()
        problems = [one.problem for one in told.values() if one.problem is not None]
        if not problems and orders.process == 0:
            problems = self._never_coming(step, told, with_others, look)
        if problems:
            if orders.process == 0:
                with_others.tell(Told(process=0, problem=problems[0]))
            elif told.get(0, self._sent[key]).problem is None:
                return False  # Process 0 reports it to all, or has committed it another way.
            self._arrivals.cannot_come(step, info, orders.item, problems[0])
            return True
        if orders.process > 0 or len(told) < orders.processes:
            return False
        parent = info.parent
        if parent is not None and any(
            one is not None
            and one.save_id == parent.save_id
            and self._arrivals.is_waiting(number, one.save_id)
            for number, one in look.found
        ):
            return False
        if (problem := self._commit(step, info, told, look)) is None:
            with_others.end()
        elif arrivals.stands(source, info, orders.item):
            with_others.tell(Told(process=0, problem=problem))
            self._arrivals.cannot_come(step, info, orders.item, problem)
        return True

    def _until_turn(self, step: int, look: Look) -> float | None:
        """Seconds until a part is due; None means now.

        The uploader is behind if a later save is waiting as well.
        """
        if look.is_hurried or step != look.found[-1][0]:
            return None
        made = sorted(arrivals.made_secs(self._steps / str(number)) for number, _ in look.found)
        orders = look.orders
        secs = stagger.delay_secs(made, time.time(), orders.process, orders.processes)
        return secs or None

    def _never_coming(
        self, step: int, told: Mapping[int, Told], with_others: Meeting, look: Look
    ) -> list[str]:
        """Why parts of a save will never arrive: their uploaders have moved on to a later one."""
        missing = {*range(look.orders.processes)} - told.keys()
        for number, later in look.found:
            if not missing or number <= step or later is None:
                continue
            known = self._meetings.get(key_of(number, later.save_id))
            if known is None or not (gone_on := missing & known.told().keys()):
                continue
            # Reports come in order of steps: this one may have come after ``told`` was read.
            if gone_on := sorted(gone_on - with_others.told().keys()):
                return [f"process {gone_on[0]} has no part of step {step}, and one of {number}"]
        return []

    def _commit(
        self, step: int, info: SaveInfo, told: Mapping[int, Told], look: Look
    ) -> str | None:
        """Commits a save whose parts are complete; returns why it cannot."""
        source, journal = self._steps / str(step), look.journal
        made_secs = arrivals.made_secs(source)
        prefix = journal.prefix(Unit(step), token_of(info.save_id))
        try:
            arrivals.require_parent(info, journal)
            every = inventory.every_digest(source, look.orders.item)
            objects = sum(one.objects for one in told.values())
            put = describe(every, journal.root / prefix, objects)
            arrivals.commit(step, info, journal, prefix, put)
            seconds = time.perf_counter() - self._began[key_of(step, info.save_id)]
        except (RestoreError, TargetDiffers) as error:
            return str(error)
        self._arrivals.came(step, info, journal, put, made_secs, seconds)
        return None


def _send(source: StorePath, prefix: str, look: Look) -> Told:
    """Uploads the files that only this staging directory has; returns the report or an error."""
    item, process = look.orders.item, look.orders.process
    try:
        if process > 0:
            own = inventory.only_at(source, item, process)
        else:
            own = inventory.every_digest(source, item)
            for other in range(1, look.orders.processes):
                for name in inventory.only_at(source, item, other):
                    own.pop(name, None)
        objects = send(
            source, own, look.journal.root / prefix, pace=look.pace, on_bytes=look.on_bytes
        )
    except RestoreError as error:
        problem = f"the part of process {process}: {error}"
        return Told(process=process, problem=problem)
    nbytes = sum(digest.length for digest in own.values())
    return Told(process=process, nbytes=nbytes, objects=objects)
