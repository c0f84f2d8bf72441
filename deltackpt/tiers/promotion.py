# SPDX-License-Identifier: Apache-2.0
"""Uploads the saves of a staging directory, one after the other.

All remote changes are made here, under the trainer's claim and in this order: the start of
training, rollbacks, then the saves, parents first, and retirements. All files of a save are
uploaded before one journal entry makes it visible. A kill in between leaves files that no entry
names; they are swept later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import time
from collections.abc import Hashable
from typing import Protocol

from deltackpt.errors import (
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
from deltackpt.ledger.entries import Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import upload
from deltackpt.reading import inventory, saves
from deltackpt.resources.pace import Pace
from deltackpt.storage import buckets
from deltackpt.storage.store import Stamp, Unanswered, store_path
from deltackpt.tiers import arrivals, meeting
from deltackpt.tiers.arrivals import Arrivals
from deltackpt.tiers.log_promotion import LogPromotion
from deltackpt.tiers.part_promotion import Look, PartPromotion
from deltackpt.tiers.stage import Orders, Progress, Stage, key_of

_logger = logging.getLogger(__name__)

#: Seconds between two polls of an idle staging directory.
_IDLE_SECS = 5.0
#: Shortest and longest back-off before a retry, with random jitter.
_BACK_OFF_SECS = (0.1, 30.0)


class _Superseded(DeltackptError):
    """Another trainer took over the staging directory; abandon the in-flight upload."""


class Trainer(Protocol):
    """The process that makes the saves."""

    @property
    def is_gone(self) -> bool:
        """Returns whether no more orders or saves will come."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Returns whether a caller is waiting for the pending saves."""
        ...

    def wait(self, secs: float) -> None:
        """Waits for a time, or until there may be work."""
        ...


@dataclasses.dataclass(frozen=True)
class _Upload:
    """A save that is being uploaded.

    Attributes:
      save_id: id of the save.
      prefix: destination of its files.
      done: files already uploaded.
    """

    save_id: SaveId
    prefix: str
    done: set[str] = dataclasses.field(default_factory=set)


class Promoter:
    """Uploads saves from one staging directory, one at a time."""

    def __init__(
        self, stage: Stage, orders: Orders | None = None, progress: Progress | None = None
    ):
        """Reads and writes nothing yet; orders and progress are read unless they are passed."""
        self._stage = stage
        self._orders = orders
        self._orders_stamp: object = None
        self._journal: Journal | None = None
        self._arrivals = Arrivals(stage, progress or Progress(holder=""))
        self._parts = PartPromotion(stage, self._arrivals)
        self._pace = Pace()
        self._infos: dict[tuple[int, object], SaveInfo | None] = {}
        #: Identifies the folder of each damaged save, by ``key_of``.
        self._damaged_at: dict[str, Hashable] = {}
        #: Whether to upload parts at once, because a caller is waiting.
        self._is_hurried = True
        #: Uploaded files of a save that is not complete yet.
        self._upload: _Upload | None = None
        self._log = LogPromotion(stage)
        #: Whether no trainer appends to the WAL any more.
        self._is_over = False
        #: Whether the remote directory may hold files to sweep.
        self._is_littered = True
        #: The newest withdrawn epoch whose files were swept.
        self._withdrawn = 0

    @property
    def progress(self) -> Progress:
        """The last reported progress."""
        return self._arrivals.progress

    def run(self, trainer: Trainer, *, adopts: bool = False) -> None:
        """Runs until the trainer has ended and nothing is left, or another takes over.

        Args:
          trainer: the trainer that makes the saves.
          adopts: whether to continue for another trainer that takes over.
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
                self._copy_entry()
                self._sweep()
                trainer.wait(0.0)
                if trainer.is_gone and self._is_done():
                    return
                trainer.wait(self._until_others())
            except _Superseded:
                if not adopts:
                    return
            except FencedError as error:
                self._arrivals.fail(error, fenced=str(error))
                _logger.error("%s", error)
                if trainer.is_gone and not adopts:
                    return
                while not trainer.is_gone and not self._changed():
                    trainer.wait(_IDLE_SECS)
                if trainer.is_gone and not self._changed():
                    return
            except (StorageError, RestoreError) as error:
                failures += 1
                self._arrivals.fail(error)
                if trainer.is_gone and isinstance(error, RestoreError):
                    # The staging directory or the journal is damaged: waiting does not fix that.
                    raise
                most = min(_BACK_OFF_SECS[0] * 2 ** min(failures, 20), _BACK_OFF_SECS[1])
                trainer.wait(most * random.uniform(0.5, 1.0))

    def _until_others(self) -> float:
        """Seconds to wait for other uploaders if there is nothing to do here."""
        keys = {
            key_of(step, info.save_id)
            for (step, _), info in self._infos.items()
            if info is not None and self._is_waiting(step, info)
        }
        return min(_IDLE_SECS, self._parts.until_others(keys))

    # ---- one step

    def step(self) -> bool:
        """Carries out pending orders, and uploads one save.

        Returns:
          Whether a save was uploaded.

        Raises:
          FencedError: another trainer has taken the remote directory.
          StorageError: the remote store reported an error or did not answer; retry.
        """
        # The order matters: saves that are staged by now were made after these orders.
        found = self._saves()
        self._parts.turn_secs = None
        orders = self._load()
        if orders is None or not orders.holder:
            return False
        journal = self._resumed(orders)
        self._look_at_damaged()
        if self._arrivals.progress.problem is not None or (
            orders.process > 0 and self._parts.waits_for_others
        ):
            # Commits whose responses were lost may have succeeded, here or elsewhere.
            journal.check()
        self._carry_out(orders, journal)
        self._retire(orders, journal)
        self._arrivals.tell_state(
            journal, problem=None, code="", problem_unix_secs=0.0, pid=os.getpid()
        )
        # Before the saves: the staged saves were made after the epoch headers of their runs.
        self._log.bring_heads(journal)
        self._log.trim(journal)
        look = Look(
            orders=orders,
            journal=journal,
            found=found,
            pace=self._pace,
            is_hurried=self._is_hurried,
            on_bytes=lambda count: self._check_orders(orders),
        )
        for step, info in found:
            if info is None:
                self._tell_unreadable(step, journal)
            elif self._is_waiting(step, info) and not journal.known.held(info.save_id):
                if not orders.apart:
                    self._promote(step, info, look)
                    return True
                if self._parts.promote(step, info, look):
                    return True
        return self._log.step(journal, self._pace, every=self._is_over)

    def _look_at_damaged(self) -> None:
        """Forgets damaged saves for which another copy has been staged."""
        stands = {
            key_of(step, info and info.save_id): stamp.identity
            for (step, stamp), info in self._infos.items()
            if isinstance(stamp, Stamp)
        }
        damaged = self._arrivals.progress.damaged
        known = {key: one for key, one in self._damaged_at.items() if key in damaged}
        if any(stands.get(key, one) != one for key, one in known.items()):
            # Later saves may have failed only because of it.
            known.clear()
            self._arrivals.tell(damaged={})
        self._damaged_at = {key: one for key, one in stands.items() if key in damaged} | known

    def _is_done(self) -> bool:
        """Whether nothing is left to do, and no newer orders exist."""
        if self._orders is None:
            return self._stage.orders() is None
        if self._changed() or self.waiting():
            return False
        return self._journal is None or not self._log.nbytes(self._journal)

    def waiting(self) -> list[int]:
        """Returns the staged steps that were not uploaded yet."""
        return [step for step, info in self._saves() if self._is_waiting(step, info)]

    def _is_waiting(self, step: int, info: SaveInfo | None) -> bool:
        """Whether a save is waiting, according to the last report."""
        if info is not None:
            return self._arrivals.is_waiting(step, info.save_id)
        if key_of(step, None) in self._arrivals.progress.damaged:
            return False
        return self._journal is None or step not in self._journal.known.steps

    def _saves(self) -> list[tuple[int, SaveInfo | None]]:
        """The staged saves by step; None if a manifest is unreadable."""
        item = self._orders.item if self._orders is not None else names.EMBEDDINGS_ITEM
        at, found = store_path(self._stage.steps), dict[tuple[int, object], SaveInfo | None]()
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
                    continue  # It was removed concurrently.
            found[step, stamp] = known
        self._infos = found
        self._arrivals.runs = {info.save_id.run for info in found.values() if info is not None}
        return sorted(((step, info) for (step, _), info in found.items()), key=lambda one: one[0])

    def _tell_unreadable(self, step: int, journal: Journal) -> None:
        """Reports a damaged manifest, whose save cannot be identified."""
        key = key_of(step, None)
        if step not in journal.known.steps and key not in self._arrivals.progress.damaged:
            at = store_path(self._stage.steps) / str(step)
            try:
                saves.read_info(at, self._orders.item if self._orders else names.EMBEDDINGS_ITEM)
            except RestoreError as error:
                if at.is_dir():
                    damaged = self._arrivals.progress.damaged
                    self._arrivals.tell(damaged={**damaged, key: f"step {step}: {error}"})

    def _load(self) -> Orders | None:
        if self._changed():
            stamp = self._stage.orders_stamp()
            self._orders, self._orders_stamp = self._stage.orders(), stamp
        return self._orders

    def _changed(self) -> bool:
        return self._orders is None or self._stage.orders_stamp() != self._orders_stamp

    def _resumed(self, orders: Orders) -> Journal:
        if self._journal is not None and self._arrivals.progress.holder == orders.holder:
            return self._journal
        taken_over = self._journal is not None
        if taken_over:
            self._journal = None
            raise _Superseded(f"{self._stage.path}: another trainer has taken over")
        place = buckets.place(orders.url, endpoint=orders.endpoint)
        journal = Journal(
            place.open(deadline_secs=orders.store_secs),
            while_waiting=lambda: self._check_orders(orders),
        )
        self._arrivals.progress = self._stage.progress(orders.holder)
        if journal.resume(orders.holder).lease.pending and orders.process == 0:
            journal.start()  # The trainer has started, but the store did not answer.
        if orders.apart and orders.process == 0:
            meeting.sweep(journal.root, orders.epoch)
        self._journal, self._pace = journal, Pace(orders.bytes_per_sec)
        self._upload, self._is_littered = None, True
        self._log = LogPromotion(self._stage)
        return journal

    def _carry_out(self, orders: Orders, journal: Journal) -> None:
        """Applies pending orders. Idempotent."""
        done = self._arrivals.progress.orders
        if orders.number == done:
            return
        if orders.process > 0:
            self._arrivals.tell_state(journal, orders=orders.number)
            return
        if orders.began and not journal.claimed.began:
            journal.begin(orders.goes_on, [orders.stage])
        for one in orders.rolled_back:
            if one.number > done:
                steps = journal.roll_back(one.after, one.run, only=frozenset(one.saves))
                if steps:
                    _logger.info("resuming from step %d, steps %s rolled back", one.after, steps)
        self._arrivals.tell_state(journal, orders=orders.number)

    def _retire(self, orders: Orders, journal: Journal) -> None:
        """Retires what was ordered, if its replacement is uploaded.

        The replacement of later ones also replaces earlier ones.
        """
        waiting = [one for one in orders.retired if one.number > self._arrivals.progress.retired]
        come = (
            one.number for one in waiting if one.after is None or self._has_come(one.after, journal)
        )
        newest = max(come, default=None)
        if newest is None:
            return
        ready = {one.unit: one.save_id for one in waiting if one.number <= newest}
        try:
            journal.retire(
                lambda state: (
                    one.prefix
                    for unit, one in state.standings.items()
                    if ready.get(unit) == one.save_id
                )
            )
        except StorageError:
            self._is_littered = True  # Its files may still exist, but nothing refers to them.
            raise
        self._arrivals.tell_state(journal, retired=newest)

    def _has_come(self, save_id: SaveId, journal: Journal) -> bool:
        """Whether a save was uploaded; or a later one, if it cannot be."""
        state = journal.known
        if state.held(save_id):
            return True
        is_damaged = key_of(save_id.step, save_id) in self._arrivals.progress.damaged
        return is_damaged and max(state.steps, default=-1) > save_id.step

    def _promote(self, step: int, info: SaveInfo, look: Look) -> None:
        orders, journal = look.orders, look.journal
        source = store_path(self._stage.steps) / str(step)
        made_secs = arrivals.made_secs(source)
        started = time.perf_counter()
        if self._upload is None or self._upload.save_id != info.save_id:
            self._give_up_upload(journal)
            self._upload = _Upload(info.save_id, journal.prefix(Unit(step)))
        under_way, is_sent = self._upload, False
        try:
            arrivals.require_parent(info, journal)
            digests = inventory.every_digest(source, orders.item)
            put = upload(
                source,
                digests,
                journal.root / under_way.prefix,
                done=under_way.done,
                pace=look.pace,
                on_bytes=look.on_bytes,
            )
            if not arrivals.stands(source, info, orders.item):
                raise StepGone(f"step {step}: expected save id {info.save_id}, found it replaced")
            is_sent = True
            arrivals.commit(step, info, journal, under_way.prefix, put)
        except BaseException as error:
            # Files that are uploaded need not be sent again, however often the network fails.
            if is_sent or not isinstance(error, StorageError):
                self._give_up_upload(journal)
            if not isinstance(error, (RestoreError, TargetDiffers)):
                raise
            # Otherwise training continued without it.
            self._arrivals.cannot_come(step, info, orders.item, str(error))
            return
        self._upload = None
        self._arrivals.came(step, info, journal, put, made_secs, time.perf_counter() - started)

    def _give_up_upload(self, journal: Journal) -> None:
        """Sweeps the uploaded files of a save that is not committed."""
        if self._upload is not None:
            journal.give_up(self._upload.prefix)
            self._upload, self._is_littered = None, True

    def _check_orders(self, orders: Orders) -> None:
        """Checks for a takeover during an upload; called by several threads."""
        if self._stage.orders_stamp() == self._orders_stamp:
            return
        with contextlib.suppress(RestoreError):
            newest = self._stage.orders()
            if newest is not None and newest.holder != orders.holder:
                raise _Superseded(f"{self._stage.path}: another trainer has taken over")

    def _copy_entry(self) -> None:
        """Copies the newest entry, once for many consecutive saves."""
        if self._journal is not None and self._orders is not None and self._orders.process == 0:
            self._journal.copy_newest()

    def _sweep(self) -> None:
        """Deletes remote files left by interrupted uploads, once per occasion.

        Files that cannot be deleted are harmless; the next trainer tries again.
        """
        if self._journal is None or self._orders is None or self._orders.process > 0:
            return
        self._give_up_upload(self._journal)  # No caller waits for it any longer.
        withdrawn = self._journal.known.entry.withdrawn
        if self._is_littered or withdrawn > self._withdrawn:
            self._is_littered, self._withdrawn = False, withdrawn
            try:
                count = self._journal.sweep()
            except StorageError as error:
                self._is_littered = isinstance(error, Unanswered)
                self._arrivals.fail(error)
                return
            if count:
                _logger.info("deleted %d objects that no journal entry names", count)
