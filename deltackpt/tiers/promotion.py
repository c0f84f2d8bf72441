# SPDX-License-Identifier: Apache-2.0
"""Brings the saves of a stage to its root, one after the other.

What happens at the root happens here, under the trainer's claim and in one order: that training
begins, what it goes back behind, then the saves, parents first, and what is retired. A save is
whole at the root before one entry of the journal makes it visible. Whoever is killed in between
leaves files that no entry names, which are swept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DeltackptError,
    FencedError,
    RestoreError,
    StepGone,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import Uploaded, describe, send, upload
from deltackpt.reading import inventory, saves
from deltackpt.resources.pace import Pace
from deltackpt.storage import buckets
from deltackpt.storage.store import Spot, Stamp, Unanswered, spot
from deltackpt.tiers import meeting, stagger
from deltackpt.tiers.log_promotion import LogPromotion
from deltackpt.tiers.meeting import Meeting, Told, token_of
from deltackpt.tiers.stage import MOST_RECENT, Orders, Progress, Promoted, Stage, key_of

_logger = logging.getLogger(__name__)

#: Between two looks at a stage in which nothing waits.
_IDLE_SECS = 5.0
#: Before what failed is tried again, at first and at most; each time some part of it.
_BACK_OFF_SECS = (0.1, 30.0)
#: Between two looks at what other promoters have told, at first and at most.
_OTHERS_SECS = (0.05, 2.0)


class _Superseded(DeltackptError):
    """Another trainer has taken the stage; what is under way is not worth to be finished."""


class Trainer(Protocol):
    """Whoever makes the saves."""

    @property
    def is_gone(self) -> bool:
        """Whether there will be no further orders or saves."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for the saves that there are."""
        ...

    def wait(self, secs: float) -> None:
        """Waits so long, or until there may be something to do."""
        ...


@dataclasses.dataclass(frozen=True)
class _Upload:
    """A save on its way to the root.

    Attributes:
      save_id: which.
      prefix: where its files go.
      done: those that are there.
    """

    save_id: SaveId
    prefix: str
    done: set[str] = dataclasses.field(default_factory=set)


class Promoter:
    """Brings saves from one stage to its root, one at a time."""

    def __init__(
        self, stage: Stage, orders: Orders | None = None, progress: Progress | None = None
    ):
        """Reads and writes nothing yet; orders and progress are read where they are not given."""
        self._stage = stage
        self._orders = orders
        self._orders_stamp: object = None
        self._journal: Journal | None = None
        self._progress = progress or Progress(holder="")
        self._pace = Pace()
        self._infos: dict[tuple[int, object], SaveInfo | None] = {}
        #: What told the folders of damaged saves from others, by ``key_of``.
        self._damaged_at: dict[str, Hashable] = {}
        #: Parts that were put at the root, of saves that are not whole there yet, by ``key_of``.
        self._sent: dict[str, Told] = {}
        self._meetings: dict[str, Meeting] = {}
        #: When their parts were begun here; of ``time.perf_counter()``.
        self._began: dict[str, float] = {}
        self._patience = _OTHERS_SECS[0]
        #: Whether parts are sent at once, as somebody waits for them.
        self._is_hurried = True
        #: Until the part of a save is to be begun here; None where none waits for its turn.
        self._turn_secs: float | None = None
        #: What was sent of a save that is not whole at the root yet.
        self._upload: _Upload | None = None
        self._log = LogPromotion(stage)
        #: Whether no trainer adds to the log.
        self._is_over = False
        #: Whether something at the root may be in nobody's way any more.
        self._is_littered = True

    @property
    def progress(self) -> Progress:
        """As it was told last."""
        return self._progress

    def run(self, trainer: Trainer, *, adopts: bool = False) -> None:
        """Works until the trainer is gone and nothing is left; or another one takes the stage.

        Args:
          trainer: whose saves these are.
          adopts: whether to go on for another trainer instead.
        """
        failures = 0
        while True:
            try:
                self._is_hurried = trainer.is_gone or trainer.is_waiting
                self._is_over = trainer.is_gone
                has_more = self.step()
                failures = 0
                if has_more:
                    continue
                self._sweep()
                trainer.wait(0.0)
                if trainer.is_gone and self._is_done():
                    return
                trainer.wait(self._until_others())
            except _Superseded:
                if not adopts:
                    return
            except FencedError as error:
                self._fail(error, fenced=str(error))
                _logger.error("%s", error)
                if trainer.is_gone and not adopts:
                    return
                while not trainer.is_gone and not self._changed():
                    trainer.wait(_IDLE_SECS)
                if trainer.is_gone and not self._changed():
                    return
            except (StorageError, RestoreError) as error:
                failures += 1
                self._fail(error)
                if trainer.is_gone and isinstance(error, RestoreError):
                    raise  # The stage, or the journal, is damaged: time does not mend that.
                most = min(_BACK_OFF_SECS[0] * 2 ** min(failures, 20), _BACK_OFF_SECS[1])
                trainer.wait(most * random.uniform(0.5, 1.0))

    def _until_others(self) -> float:
        """How long to wait where nothing can be done here: other promoters may have to come."""
        keys = {
            key_of(step, info.save_id)
            for (step, _), info in self._infos.items()
            if info is not None and self._is_waiting(step, info)
        }
        for known in (self._sent, self._meetings, self._began):
            for key in known.keys() - keys:
                del known[key]
        if not self._sent:
            self._patience = _OTHERS_SECS[0]
            return _IDLE_SECS if self._turn_secs is None else min(_IDLE_SECS, self._turn_secs)
        found, self._patience = self._patience, min(self._patience * 1.3, _OTHERS_SECS[1])
        return found

    # ---- one thing after the other

    def step(self) -> bool:
        """Carries out what was ordered, and brings one save to the root.

        Returns:
          Whether there was one.

        Raises:
          FencedError: another trainer has taken the root.
          StorageError: the root refused, or did not answer; to be tried again.
        """
        # In this order: what is in the stage by now was made after it was ordered what comes first.
        found = self._saves()
        self._turn_secs = None
        orders = self._load()
        if orders is None or not orders.holder:
            return False
        journal = self._resumed(orders)
        self._look_at_damaged()
        if self._progress.problem is not None or (orders.process > 0 and self._sent):
            journal.check()  # Commits whose answers were lost may be done, or those of others.
        self._carry_out(orders, journal)
        self._retire(orders, journal)
        self._tell_state(journal, problem=None, code="", problem_unix_secs=0.0, pid=os.getpid())
        # Before the saves: those that were found were made after the heads of their runs.
        self._log.bring_heads(journal)
        self._log.trim(journal)
        for step, info in found:
            if info is None:
                self._tell_unreadable(step, journal)
            elif self._is_waiting(step, info) and not journal.known.held(info.save_id):
                if not orders.apart:
                    self._promote(step, info, orders, journal)
                    return True
                if self._promote_part(step, info, orders, journal, found):
                    return True
        return self._log.step(journal, self._pace, every=self._is_over)

    def _look_at_damaged(self) -> None:
        """Forgets what was damaged where another copy of it has come to the stage."""
        stands = {
            key_of(step, info and info.save_id): stamp.identity
            for (step, stamp), info in self._infos.items()
            if isinstance(stamp, Stamp)
        }
        damaged = self._progress.damaged
        known = {key: one for key, one in self._damaged_at.items() if key in damaged}
        if any(stands.get(key, one) != one for key, one in known.items()):
            # Those after it may have failed for it alone.
            known.clear()
            self._tell(damaged={})
        self._damaged_at = {key: one for key, one in stands.items() if key in damaged} | known

    def _is_done(self) -> bool:
        """Whether nothing is left to do, and nothing was ordered since that was looked at."""
        if self._orders is None:
            return self._stage.orders() is None
        if self._changed() or self.waiting():
            return False
        return self._journal is None or not self._log.nbytes(self._journal)

    def waiting(self) -> list[int]:
        """The steps of the saves in the stage that may come to the root and have not."""
        return [step for step, info in self._saves() if self._is_waiting(step, info)]

    def _is_waiting(self, step: int, info: SaveInfo | None) -> bool:
        """Whether a save may come to the root, as far as was told."""
        if key_of(step, info and info.save_id) in self._progress.damaged:
            return False
        if info is None:
            return self._journal is None or step not in self._journal.known.steps
        return not self._progress.is_at_root(info.save_id)

    def _saves(self) -> list[tuple[int, SaveInfo | None]]:
        """The saves in the stage by their steps; None where a manifest cannot be read."""
        item = self._orders.item if self._orders is not None else names.EMBEDDINGS_ITEM
        at, found = spot(self._stage.steps), dict[tuple[int, object], SaveInfo | None]()
        for name in at.folders():
            step = names.step_number(name)
            stamp = None if step is None else (at / name).stamp()
            if step is None or stamp is None:
                continue
            known = self._infos.get((step, stamp))
            try:
                known = known or saves.read_info(at / name, item)
            except RestoreError:
                if not (at / name).is_dir():
                    continue  # It was removed meanwhile.
            found[step, stamp] = known
        self._infos = found
        return sorted(((step, info) for (step, _), info in found.items()), key=lambda one: one[0])

    def _tell_unreadable(self, step: int, journal: Journal) -> None:
        """A manifest that is damaged: nobody can tell which save it was, or what it was for."""
        key = key_of(step, None)
        if step not in journal.known.steps and key not in self._progress.damaged:
            at = spot(self._stage.steps) / str(step)
            try:
                saves.read_info(at, self._orders.item if self._orders else names.EMBEDDINGS_ITEM)
            except RestoreError as error:
                if at.is_dir():
                    self._tell(damaged={**self._progress.damaged, key: f"step {step}: {error}"})

    def _load(self) -> Orders | None:
        if self._changed():
            stamp = self._stage.orders_stamp()
            self._orders, self._orders_stamp = self._stage.orders(), stamp
        return self._orders

    def _changed(self) -> bool:
        return self._orders is None or self._stage.orders_stamp() != self._orders_stamp

    def _resumed(self, orders: Orders) -> Journal:
        if self._journal is not None and self._progress.holder == orders.holder:
            return self._journal
        taken_over = self._journal is not None
        if taken_over:
            self._journal = None
            raise _Superseded(f"{self._stage.path}: another trainer has come")
        place = buckets.place(orders.url, endpoint=orders.endpoint)
        journal = Journal(place.open(deadline_secs=orders.store_secs))
        self._progress = self._stage.progress(orders.holder)
        journal.resume(orders.holder)
        if orders.apart and orders.process == 0:
            meeting.sweep(journal.root, orders.epoch)
        self._journal, self._pace = journal, Pace(orders.bytes_per_sec)
        self._upload, self._is_littered = None, True
        self._log = LogPromotion(self._stage)
        return journal

    def _carry_out(self, orders: Orders, journal: Journal) -> None:
        """What was ordered since; to do it again changes nothing."""
        done = self._progress.orders
        if orders.number == done:
            return
        if orders.process > 0:
            self._tell_state(journal, orders=orders.number)
            return
        if orders.began and not journal.claimed.began:
            journal.begin(orders.goes_on, [orders.stage])
        for one in orders.rolled_back:
            if one.number > done:
                steps = journal.roll_back(one.after, one.run, only=frozenset(one.saves))
                if steps:
                    _logger.info("going on from step %d, steps %s rolled back", one.after, steps)
        self._tell_state(journal, orders=orders.number)

    def _retire(self, orders: Orders, journal: Journal) -> None:
        """What was ordered to be retired, as far as what replaces it is at the root.

        What replaces the later ones replaces the earlier ones as well.
        """
        waiting = [one for one in orders.retired if one.number > self._progress.retired]
        come = (
            one.number for one in waiting if one.after is None or self._has_come(one.after, journal)
        )
        newest = max(come, default=None)
        if newest is None:
            return
        ready = {one.unit: one.save_id for one in waiting if one.number <= newest}
        try:
            journal.retire(ready)
        except StorageError:
            self._is_littered = True  # Its files may still be there, and nothing names them.
            raise
        self._tell_state(journal, retired=newest)

    def _has_come(self, save_id: SaveId, journal: Journal) -> bool:
        """Whether a save was brought to the root; or a later one, where it cannot be."""
        state = journal.known
        if state.held(save_id):
            return True
        is_damaged = key_of(save_id.step, save_id) in self._progress.damaged
        return is_damaged and max(state.steps, default=-1) > save_id.step

    def _promote(self, step: int, info: SaveInfo, orders: Orders, journal: Journal) -> None:
        source = spot(self._stage.steps) / str(step)
        made_secs = _made_secs(source)
        started = time.perf_counter()
        if self._upload is None or self._upload.save_id != info.save_id:
            self._give_up_upload(journal)
            self._upload = _Upload(info.save_id, journal.prefix(Unit(step)))
        under_way, is_sent = self._upload, False
        try:
            self._require_parent(info, journal)
            digests = inventory.every_digest(source, orders.item)
            put = upload(
                source,
                digests,
                journal.root / under_way.prefix,
                done=under_way.done,
                pace=self._pace,
                on_bytes=lambda count: self._check_orders(orders),
            )
            if not self._stands(source, info, orders.item):
                raise StepGone(f"step {step}: expected save id {info.save_id}, found it replaced")
            is_sent = True
            _commit(step, info, journal, under_way.prefix, put)
        except BaseException as error:
            # What is there need not be sent again, however often the network breaks.
            if is_sent or not isinstance(error, StorageError):
                self._give_up_upload(journal)
            if not isinstance(error, (RestoreError, TargetDiffers)):
                raise
            # Else training went on without it.
            self._cannot_come(step, info, orders, str(error))
            return
        self._upload = None
        self._tell_promoted(step, info, journal, put, made_secs, time.perf_counter() - started)

    def _give_up_upload(self, journal: Journal) -> None:
        """What was sent of a save that is not committed is swept."""
        if self._upload is not None:
            journal.give_up(self._upload.prefix)
            self._upload, self._is_littered = None, True

    def _tell_promoted(
        self,
        step: int,
        info: SaveInfo,
        journal: Journal,
        put: Uploaded,
        made_secs: float,
        seconds: float,
    ) -> None:
        now = time.time()
        number = self._progress.recent[-1].number + 1 if self._progress.recent else 1
        promoted = Promoted(
            number=number,
            save_id=info.save_id,
            nbytes=put.nbytes,
            objects=put.objects + 1,
            seconds=seconds,
            lag_secs=max(0.0, now - made_secs),
            committed_unix_secs=now,
        )
        recent = (*self._progress.recent, promoted)[-MOST_RECENT:]
        self._tell_state(journal, recent=recent)
        _logger.info("step %d is at the root: %d bytes in %.2f s", step, put.nbytes, seconds)

    def _promote_part(
        self,
        step: int,
        info: SaveInfo,
        orders: Orders,
        journal: Journal,
        found: Sequence[tuple[int, SaveInfo | None]],
    ) -> bool:
        """Brings the part of a save in this stage to the root; process 0 commits the whole.

        Returns:
          Whether anything was done: all that is left may be for other promoters.
        """
        key, source = key_of(step, info.save_id), spot(self._stage.steps) / str(step)
        prefix = journal.prefix(Unit(step), token_of(info.save_id))
        with_others = self._meetings.setdefault(key, Meeting(journal.root, prefix))
        if key not in self._sent:
            self._turn_secs = self._until_turn(step, orders, found)
            if self._turn_secs is not None:
                return False
            self._began.setdefault(key, time.perf_counter())
            told = with_others.told().get(orders.process)
            if told is None:
                told = self._send_part(source, info, orders, journal, prefix)
                with_others.tell(told)
            self._sent[key], self._patience = told, _OTHERS_SECS[0]
            return True
        told = with_others.told()
        problems = [one.problem for one in told.values() if one.problem is not None]
        if not problems and orders.process == 0:
            problems = self._never_coming(told, orders, found, step)
        if problems:
            if orders.process == 0:
                with_others.tell(Told(process=0, problem=problems[0]))
            elif told.get(0, self._sent[key]).problem is None:
                return False  # Process 0 tells it to all, or has committed another way.
            self._cannot_come(step, info, orders, problems[0])
            return True
        if orders.process > 0 or len(told) < orders.processes:
            return False
        parent = info.parent
        if parent is not None and any(
            one is not None and one.save_id == parent.save_id and self._is_waiting(number, one)
            for number, one in found
        ):
            return False
        if (problem := self._commit_parts(step, info, orders, journal, told)) is None:
            with_others.end()
        elif self._stands(source, info, orders.item):
            with_others.tell(Told(process=0, problem=problem))
            self._cannot_come(step, info, orders, problem)
        return True

    def _until_turn(
        self, step: int, orders: Orders, found: Sequence[tuple[int, SaveInfo | None]]
    ) -> float | None:
        """Seconds until the part of a save is to be sent; None: now.

        It is behind where a later save waits as well.
        """
        if self._is_hurried or step != found[-1][0]:
            return None
        made = sorted(_made_secs(spot(self._stage.steps) / str(number)) for number, _ in found)
        secs = stagger.delay_secs(made, time.time(), orders.process, orders.processes)
        return secs or None

    def _send_part(
        self, source: Spot, info: SaveInfo, orders: Orders, journal: Journal, prefix: str
    ) -> Told:
        """Puts the files that only this stage has, and tells so, or why not."""
        item, process = orders.item, orders.process
        try:
            if process > 0:
                own = inventory.only_at(source, item, process)
            else:
                own = inventory.every_digest(source, item)
                for other in range(1, orders.processes):
                    for name in inventory.only_at(source, item, other):
                        own.pop(name, None)
            objects = send(
                source,
                own,
                journal.root / prefix,
                pace=self._pace,
                on_bytes=lambda count: self._check_orders(orders),
            )
        except RestoreError as error:
            problem = f"the part of process {process}: {error}"
            return Told(process=process, problem=problem)
        nbytes = sum(digest.length for digest in own.values())
        return Told(process=process, nbytes=nbytes, objects=objects)

    def _never_coming(
        self,
        told: dict[int, Told],
        orders: Orders,
        found: Sequence[tuple[int, SaveInfo | None]],
        step: int,
    ) -> list[str]:
        """Why parts of a save will not come: their promoters have gone on to a later one."""
        missing = {*range(orders.processes)} - told.keys()
        for number, later in found:
            if not missing or number <= step or later is None:
                continue
            known = self._meetings.get(key_of(number, later.save_id))
            if known is not None and (gone_on := sorted(missing & known.told().keys())):
                return [f"process {gone_on[0]} has no part of step {step}, and one of {number}"]
        return []

    def _commit_parts(
        self, step: int, info: SaveInfo, orders: Orders, journal: Journal, told: dict[int, Told]
    ) -> str | None:
        """Makes a save visible whose parts are all there; why it cannot, where it cannot."""
        source = spot(self._stage.steps) / str(step)
        made_secs = _made_secs(source)
        prefix = journal.prefix(Unit(step), token_of(info.save_id))
        try:
            self._require_parent(info, journal)
            every = inventory.every_digest(source, orders.item)
            objects = sum(one.objects for one in told.values())
            put = describe(every, journal.root / prefix, objects)
            _commit(step, info, journal, prefix, put)
            seconds = time.perf_counter() - self._began[key_of(step, info.save_id)]
        except (RestoreError, TargetDiffers) as error:
            return str(error)
        self._tell_promoted(step, info, journal, put, made_secs, seconds)
        return None

    def _cannot_come(self, step: int, info: SaveInfo, orders: Orders, problem: str) -> None:
        if self._stands(spot(self._stage.steps) / str(step), info, orders.item):
            _logger.error("step %d cannot come to the root: %s", step, problem)
            damaged = {**self._progress.damaged, key_of(step, info.save_id): problem}
            self._tell(damaged=damaged)

    def _require_parent(self, info: SaveInfo, journal: Journal) -> None:
        parent = info.parent
        if parent is not None and not journal.known.stands(parent.save_id):
            if not journal.state().stands(parent.save_id):
                raise BrokenChain(
                    f"step {info.step_dir}: expected its parent {parent.step_dir} (save id "
                    f"{parent.save_id}) at the root, found that it is not; the next base is"
                )

    def _stands(self, source: Spot, info: SaveInfo, item: str) -> bool:
        """Whether a save is still in the stage."""
        try:
            return saves.read_info(source, item).save_id == info.save_id
        except Damaged:
            return source.is_dir()

    def _check_orders(self, orders: Orders) -> None:
        """Called while a save is sent, by several threads."""
        if self._stage.orders_stamp() == self._orders_stamp:
            return
        with contextlib.suppress(RestoreError):
            newest = self._stage.orders()
            if newest is not None and newest.holder != orders.holder:
                raise _Superseded(f"{self._stage.path}: another trainer has come")

    def _sweep(self) -> None:
        """Deletes at the root what cut uploads left, once for each time that there may be such.

        What cannot be deleted is in nobody's way; whoever takes the root next tries again.
        """
        if self._journal is None or self._orders is None or self._orders.process > 0:
            return
        self._give_up_upload(self._journal)  # It is waited for no more.
        if self._is_littered:
            self._is_littered = False
            try:
                count = self._journal.sweep()
            except StorageError as error:
                self._is_littered = isinstance(error, Unanswered)
                self._fail(error)
                return
            if count:
                _logger.info("%d objects that no entry names were deleted", count)

    # ---- what is told

    def _tell_state(self, journal: Journal, **changes: Any) -> None:
        runs = {info.save_id.run for info in self._infos.values() if info is not None}
        promoted = journal.known.entry.promoted
        held = {run: attempt for run, attempt in promoted.items() if run in runs}
        holder, entry = journal.claimed.lease.holder, journal.known.entry
        if entry.number != self._progress.entry:
            self._stage.report_entry(entry)  # First: who reads of its number finds it.
        self._tell(entry=entry.number, held=held, holder=holder, **changes)

    def _tell(self, **changes: Any) -> None:
        progress = dataclasses.replace(self._progress, **changes)
        if progress != self._progress:
            self._stage.report(progress)
            self._progress = progress

    def _fail(self, error: DeltackptError, **changes: Any) -> None:
        """Tells what stands in the way; the first of the same kind says since when."""
        if self._progress.problem is None:
            _logger.warning("%s", error)
        since = self._progress.problem_unix_secs or time.time()
        told = {"problem": str(error), "code": error.code, "problem_unix_secs": since}
        try:
            self._tell(**told, **changes)
        except StorageError as refused:
            # The stage may be full, and work goes on all the same.
            _logger.warning("%s", refused)


def _commit(step: int, info: SaveInfo, journal: Journal, prefix: str, put: Uploaded) -> None:
    """Makes a save visible, all of whose files are at the root."""
    journal.commit(
        Standing.of(info, Unit(step), prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
    )


def _made_secs(source: Spot) -> float:
    """When a save in the stage was made, in seconds since 1970."""
    try:
        return os.stat(source).st_mtime
    except OSError:  # It was removed meanwhile.
        return time.time()
