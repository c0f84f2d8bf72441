# SPDX-License-Identifier: Apache-2.0
"""Uploads the saves of a staging directory to the remote checkpoint directory, one after the other.

All remote changes are made here, under the trainer's claim and in this order: the start of
training, rollbacks, then the saves, parents first, and retirements. A kill leaves files that no
entry names; they are swept later.

If each process of a job has a staging directory, each uploader uploads its shard of a save to a
path that is derived from the claim and the save, and writes an object there that reports success or
failure. Process 0's uploader commits the save once all shards are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DeltackptError,
    FencedError,
    FormatTooNew,
    RestoreError,
    StepGone,
    StorageError,
    TargetDiffers,
)
from deltackpt.events import UploadEvent
from deltackpt.format import naming, records
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.entries import CatalogEntry, ObjectKey, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.upload import Unit, describe, send
from deltackpt.reading import inventory, stored_saves
from deltackpt.resources.runtime import Pace
from deltackpt.storage import buckets
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Missing, StorePath, Unanswered
from deltackpt.tiers.cursor import IDLE_SECS, Cursor, StagedSave
from deltackpt.tiers.staging import (
    MOST_RECENT,
    Orders,
    StagingDir,
    TierProgress,
    key_of,
)
from deltackpt.tiers.wal_upload import WalUpload

_logger = logging.getLogger(__name__)

#: Folder of the reports of several uploaders, below the prefix of a save.
REPORTS = "shard-reports"
_REPORT, _SUFFIX = "deltackpt.stage.shard", ".msgpack"
_REPORT_NAME = re.compile(rf"(0|[1-9][0-9]{{0,8}}){re.escape(_SUFFIX)}")
#: Shortest and longest interval between two polls of the other uploaders' reports.
_OTHERS_SECS = (0.05, 2.0)
#: Maximum delay of a shard, for any time between saves.
MOST_DELAY_SECS = 60.0


class _Superseded(DeltackptError):
    """Another trainer took over the staging directory; abandon the in-flight upload."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardReport:
    """An uploader's report on its shard of a save; ``problem`` is why it cannot be uploaded."""

    process: int
    objects: int = 0
    problem: str | None = None


class ShardReports:
    """The reports of all uploaders on one save; of a single uploader, they are not stored."""

    def __init__(self, at: StorePath | None):
        self._at = at
        self._known: dict[int, ShardReport] = {}

    def publish(self, report: ShardReport) -> None:
        """Stores a report. Idempotent."""
        if self._at is not None:
            at = self._at / f"{report.process}{_SUFFIX}"
            at.store.put(at.key, records.to_bytes(report, _REPORT))
        self._known[report.process] = report

    def read(self) -> dict[int, ShardReport]:
        """Returns the reports by process; process 0 may replace its own."""
        for name in [] if self._at is None else self._at.keys():
            match = _REPORT_NAME.fullmatch(name)
            if self._at is None or match is None:
                continue
            if (process := int(match[1])) not in self._known or process == 0:
                with contextlib.suppress(Missing):  # Process 0 has removed it since.
                    self._known[process] = _read_report(self._at / name, process)
        return dict(self._known)

    def remove(self) -> None:
        """Removes the reports after the commit, which the journal records."""
        if self._at is not None:
            self._at.store.delete([(self._at / name).key for name in self._at.keys()])


@dataclasses.dataclass(kw_only=True, eq=False)
class _Upload:
    """A save that is being uploaded; in a job of several uploaders, all derive the same path."""

    save: StagedSave
    info: SaveInfo
    prefix: str
    reports: ShardReports  # reports of all uploaders
    files: dict[str, Digest] | None = None  # of all processes, if process 0 has read them
    done: set[str] = dataclasses.field(default_factory=set)  # files already uploaded
    sent: ShardReport | None = None  # the report of this uploader
    committed: CatalogEntry | None = None  # set before the commit, whose response may be lost
    objects: int = 0  # of all processes, with the digests and the journal entry
    began: float = 0.0  # of ``time.perf_counter()``

    def unit(self, files: Mapping[str, Digest]) -> Unit:
        return Unit(ObjectKey(self.save.step), self.info, self.save.at, files)


class Uploader(Cursor):
    """Uploads saves from one staging directory, one at a time."""

    tier = "remote"

    def __init__(
        self,
        stage: StagingDir,
        orders: Orders | None = None,
        progress: TierProgress | None = None,
        *,
        adopts: bool = False,
    ):
        """Reads nothing yet; with ``adopts``, it continues for other trainers."""
        super().__init__(stage, progress)
        #: The orders that were read last, and the journal under their claim; see ``step``.
        self._orders = orders
        self._journal: Journal | None = None
        self._adopts = adopts
        self._pace = Pace()
        #: Saves that are not complete yet, by key.
        self._uploads: dict[str, _Upload] = {}
        #: Seconds until a shard is due; None if no shard is waiting for its turn.
        self._turn_secs: float | None = None
        self._patience = _OTHERS_SECS[0]
        self._wal: WalUpload | None = None
        #: Whether the remote directory may hold files to sweep.
        self._is_littered = True
        #: The newest withdrawn epoch whose files were swept.
        self._withdrawn = 0

    @property
    def orders(self) -> Orders:
        """The orders of the current step."""
        assert self._orders is not None
        return self._orders

    @property
    def journal(self) -> Journal:
        """The remote journal, under the claim of the orders."""
        assert self._journal is not None
        return self._journal

    def is_done(self) -> bool:
        """See ``Cursor``; tidies the remote directory first."""
        if self._journal is not None and self._orders is not None and self._orders.process == 0:
            self._journal.copy_newest()  # Once for many consecutive saves.
            self._sweep()
        if not self.trainer.is_gone:
            return False
        if self._orders is None:
            return self.stage.orders() is None
        if self._is_changed() or self.waiting():
            return False
        return self._wal is None or not self._wal.nbytes()

    def rest_secs(self) -> float:
        """See ``Cursor``: less while other uploaders are to report, or before a shard is due."""
        if any(one.sent is not None for one in self._uploads.values()):
            found = self._patience
            self._patience = min(self._patience * 1.3, _OTHERS_SECS[1])
            return found
        self._patience = _OTHERS_SECS[0]
        return IDLE_SECS if self._turn_secs is None else min(IDLE_SECS, self._turn_secs)

    def is_retried(self, error: Exception) -> bool:
        """See ``Cursor``; a fenced uploader waits for the orders of another trainer."""
        if isinstance(error, _Superseded):
            return self._adopts
        if isinstance(error, FencedError):
            self.report_failure(error, fenced=str(error))
            if self.trainer.is_gone and not self._adopts:
                return False
            while not self.trainer.is_gone and not self._is_changed():
                self.trainer.wait(self.trainer.signals, IDLE_SECS)
            return not self.trainer.is_gone or self._is_changed()
        if not isinstance(error, (StorageError, RestoreError)):
            raise error
        self.report_failure(error)
        if self.trainer.is_gone and isinstance(error, RestoreError):
            # The staging directory or the journal is damaged: waiting does not fix that.
            raise error
        if isinstance(error, FormatTooNew) and self._is_changed():
            # The orders of a newer deltackpt, whose own uploader waits for this one to end.
            raise error
        return True

    # ---- one step

    def step(self) -> bool:
        """Carries out pending orders, and uploads one save; returns whether it did."""
        # The order matters: saves that are staged by now were made after these orders.
        found = self._staged()
        orders = self._orders = self.stage.orders()
        if orders is None or not orders.holder:
            return False
        wal, journal = self._resumed(), self.journal
        self.forget_replaced(found)
        others = orders.process > 0 and any(one.sent is not None for one in self._uploads.values())
        if others or self.progress.problem is not None:
            if self._needs_no_request():
                # The trainer may wait for the deletion of a step that was never uploaded.
                self._report_state(orders=orders.number)
            # Commits whose responses were lost may have succeeded, here or elsewhere.
            journal.check()
        for upload in [*self._uploads.values()]:
            if upload.committed in journal.known.entry.catalog:
                self._report_uploaded(upload)
        self._carry_out()
        self._retire()
        self._report_state(problem=None, code="", problem_unix_secs=0.0, pid=os.getpid())
        # Before the saves: the staged saves were made after the epoch headers of their runs.
        wal.upload_headers()
        wal.trim()
        waiting = [one for one in found if self._is_waiting(one)]
        self._forget_others({one.key for one in waiting})
        self._turn_secs = None
        for save in waiting:
            if save.info is None:
                self.report_unreadable(save, orders.item)
            elif self._advance(save, save.info, found):
                return True
        return wal.step(self._pace, every=self.trainer.is_gone)

    def waiting(self) -> list[int]:
        """Returns the staged steps that were not uploaded yet."""
        return [one.step for one in self._staged() if self._is_waiting(one)]

    def _is_waiting(self, save: StagedSave) -> bool:
        remote = State(self.progress.entry) if self._journal is None else self._journal.known
        return self.progress.lacks(save.step, save.info and save.info.save_id, remote)

    def _staged(self) -> list[StagedSave]:
        item = naming.EMBEDDINGS_ITEM if self._orders is None else self._orders.item
        return self.scan(item)

    def _is_changed(self) -> bool:
        with contextlib.suppress(RestoreError, StorageError):
            return self.stage.orders() != self._orders
        return True  # The next step reports that they cannot be read.

    def _resumed(self) -> WalUpload:
        """Resumes the claim of the orders, unless that was done; returns the upload of its WAL."""
        orders = self.orders
        if self._wal is not None and self.progress.holder == orders.holder:
            return self._wal
        if self._journal is not None:
            self._journal = self._wal = None
            raise _Superseded(f"{self.stage.path}: another trainer has taken over")
        self.progress = self.stage.progress(orders.holder)  # Before an error is reported there.
        place = buckets.locate(orders.url, endpoint=orders.endpoint)
        root = place.open(deadline_secs=orders.store_secs)
        journal = Journal(root, while_waiting=self._check_orders)
        if journal.resume(orders.holder).lease.pending and orders.process == 0:
            journal.start()  # The trainer has started, but the store did not answer.
        self._journal, self._pace = journal, Pace(orders.bytes_per_sec)
        self._uploads, self._is_littered = {}, True
        self._wal = WalUpload(self.stage, journal)
        return self._wal

    def _check_orders(self) -> None:
        """Checks for a takeover during an upload; called by several threads."""
        with contextlib.suppress(RestoreError, StorageError):
            newest = self.stage.orders()
            if newest is not None and newest.holder != self.orders.holder:
                raise _Superseded(f"{self.stage.path}: another trainer has taken over")

    # ---- orders

    def _carry_out(self) -> None:
        orders, done = self.orders, self.progress.orders
        if orders.number == done or orders.process > 0:
            return
        if orders.began and not self.journal.claimed.began:
            self.journal.start_run(orders.resumed_from)
        saves: dict[str, set[SaveId]] = {}
        for one in orders.removals:
            if one.number > done and one.run is not None:
                saves.setdefault(one.run, set()).add(one.save_id)
        for run, only in saves.items():
            if steps := self.journal.roll_back(-1, run, only=only):
                _logger.info("steps %s rolled back", steps)

    def _needs_no_request(self) -> bool:
        """Returns whether ``_carry_out`` would change nothing."""
        orders, journal = self.orders, self.journal
        begins = orders.began and not journal.claimed.began
        return not (orders.process > 0 or journal.in_doubt or begins) and not any(
            one.run is not None and one.number > self.progress.orders for one in orders.removals
        )

    def _retire(self) -> None:
        """Retires what is unneeded, if its replacement, or a later one, is uploaded."""
        uploads = self.journal.known.uploads
        ready = {
            one.unit
            for one in self.orders.removals
            if one.run is None
            and one.unit in uploads
            and (one.after is None or self._has_come(one.after))
        }
        if ready:
            try:
                self.journal.retire(
                    lambda state: (
                        one.prefix
                        for unit, one in state.catalog.items()
                        if (unit, one.save_id) in ready
                    )
                )
            except StorageError:
                self._is_littered = True  # Its files may still exist, but nothing refers to them.
                raise
        self._report_state(orders=self.orders.number)

    def _has_come(self, save_id: SaveId) -> bool:
        """Whether a save was uploaded; or a later one, if it cannot be."""
        state = self.journal.known
        if state.was_committed(save_id):
            return True
        is_damaged = key_of(save_id.step, save_id) in self.progress.damaged
        return is_damaged and max(state.steps, default=-1) > save_id.step

    def _sweep(self) -> None:
        """Deletes remote files of interrupted uploads, which are harmless, once per occasion."""
        withdrawn = self.journal.known.entry.withdrawn
        if self._is_littered or withdrawn > self._withdrawn:
            self._is_littered, self._withdrawn = False, withdrawn
            try:
                count = self.journal.sweep()
            except StorageError as error:
                self._is_littered = isinstance(error, Unanswered)
                self.report_failure(error)
                return
            if count:
                _logger.info("deleted %d objects that no journal entry names", count)

    def _report_state(self, **changes: object) -> None:
        """Reports the remote contents according to the journal, and other changes."""
        holder = self.journal.claimed.lease.holder
        self.report(entry=self.journal.known.entry, holder=holder, **changes)

    # ---- one save

    def _advance(self, save: StagedSave, info: SaveInfo, found: Sequence[StagedSave]) -> bool:
        """Uploads a shard of a save, which process 0 commits; returns whether it did anything."""
        orders, upload = self.orders, self._upload_of(save, info)
        is_sent = upload.sent is not None
        if upload.sent is None:
            self._turn_secs = self._until_turn(save, found)
            if self._turn_secs is not None:
                return False
            upload.began = upload.began or time.perf_counter()
            report = upload.reports.read().get(orders.process)
            if report is None:
                report = self._send(upload)
                upload.reports.publish(report)
            upload.sent, self._patience = report, _OTHERS_SECS[0]
        known = upload.reports.read()
        reports = {one: known[one] for one in range(orders.processes) if one in known}
        problem = next((one.problem for one in reports.values() if one.problem is not None), None)
        if problem is None and orders.process == 0:
            problem = self._never_coming(upload, reports, found)
        if problem is not None:
            if orders.process > 0 and reports.get(0, upload.sent).problem is None:
                return False  # Process 0 reports it to all, or has committed it another way.
            self._fail(upload, problem)
            return True
        if orders.process > 0 or len(reports) < orders.processes:
            return not is_sent
        if self._must_wait(info, found):
            return False
        try:
            files = upload.files or inventory.every_digest(save.at, orders.item)
            upload.committed = describe(upload.unit(files), self.journal.root, upload.prefix)
            upload.objects = sum(one.objects for one in reports.values()) + 2
            self._require_parent(info)
            if not self._is_staged(upload):
                raise StepGone(f"step {save.step}: expected {info.save_id}, found it replaced")
            lineage = orders.lineage(info.save_id.run)
            self.journal.commit(upload.committed, moment=lineage and lineage.moment)
        except (RestoreError, TargetDiffers) as error:
            # Training continued without it.
            self._fail(upload, str(error))
            return True
        self._report_uploaded(upload)
        return True

    def _upload_of(self, save: StagedSave, info: SaveInfo) -> _Upload:
        upload = self._uploads.get(save.key)
        if upload is not None:
            upload.save, upload.info = save, info
            return upload
        token = None
        if self.orders.no_shared_fs:
            token = hashlib.sha256(save.key.encode()).hexdigest()[:12]
        prefix = self.journal.prefix(ObjectKey(save.step), token)
        at = None if token is None else self.journal.root / prefix / REPORTS
        self._uploads[save.key] = upload = _Upload(
            save=save, info=info, prefix=prefix, reports=ShardReports(at)
        )
        return upload

    def _require_parent(self, info: SaveInfo) -> None:
        """Checks that the parent was uploaded; reads the journal if that is not known."""
        parent, journal = info.parent, self.journal
        if parent is None or journal.known.exists(parent.save_id):
            return
        if not journal.state().exists(parent.save_id):
            raise BrokenChain(
                f"step {info.step_dir}: expected its parent {parent.step_dir} (save id "
                f"{parent.save_id}) to be uploaded, found that it is not; the next base will be "
                "uploaded"
            )

    def _is_staged(self, upload: _Upload) -> bool:
        try:
            found = stored_saves.read_info(upload.save.at, self.orders.item)
        except Damaged:
            return upload.save.at.is_dir()
        return found.save_id == upload.info.save_id

    def _send(self, upload: _Upload) -> ShardReport:
        """Uploads this staging directory's own files; returns a report."""
        orders, at = self.orders, upload.save.at
        try:
            if not orders.no_shared_fs:
                self._require_parent(upload.info)
            if orders.process > 0:
                own = inventory.only_at(at, orders.item, orders.process)
            else:
                upload.files = inventory.every_digest(at, orders.item)
                own = dict(upload.files)
                for other in range(1, orders.processes):
                    for name in inventory.only_at(at, orders.item, other):
                        own.pop(name, None)
            objects = send(
                upload.unit(own),
                self.journal.root / upload.prefix,
                done=upload.done,
                pace=self._pace,
                on_bytes=lambda count: self._check_orders(),
            )
        except RestoreError as error:
            of = f"the shard of process {orders.process}: " if orders.no_shared_fs else ""
            return ShardReport(process=orders.process, problem=f"{of}{error}")
        return ShardReport(process=orders.process, objects=objects)

    def _until_turn(self, save: StagedSave, found: Sequence[StagedSave]) -> float | None:
        """Seconds until a shard is due; None means now, also if a later save is waiting as well."""
        orders, is_hurried = self.orders, self.trainer.is_gone or self.trainer.is_waiting
        if not orders.no_shared_fs or is_hurried or save.step != found[-1].step:
            return None
        made = sorted(_made_secs(one.at) for one in found)
        return delay_secs(made, time.time(), orders.process, orders.processes) or None

    def _never_coming(
        self, upload: _Upload, reports: Mapping[int, ShardReport], found: Sequence[StagedSave]
    ) -> str | None:
        """Why shards of a save will never arrive: their uploaders have moved on to a later one."""
        missing, step = {*range(self.orders.processes)} - reports.keys(), upload.save.step
        for later in found:
            known = self._uploads.get(later.key)
            if not missing or later.step <= step or known is None:
                continue
            if not (moved_on := missing & known.reports.read().keys()):
                continue
            # Reports come in order of steps: this one may have come after ``reports`` was read.
            if moved_on := sorted(moved_on - upload.reports.read().keys()):
                return f"process {moved_on[0]} has no shard of step {step}, and one of {later.step}"
        return None

    def _must_wait(self, info: SaveInfo, found: Sequence[StagedSave]) -> bool:
        """Returns whether a save's parent, or an earlier save of its run, may still be uploaded."""
        parent, own = info.parent, info.save_id
        # Once a save of a run is committed, the earlier ones of the run count as uploaded.
        return any(
            (parent is not None and other == parent.save_id)
            or (other.run == own.run and other.attempt < own.attempt)
            for one in found
            if one.info is not None and self._is_waiting(one)
            for other in (one.info.save_id,)
        )

    def _fail(self, upload: _Upload, problem: str) -> None:
        """Reports to all why a save cannot be uploaded, unless it is not staged any more."""
        if self.orders.process == 0:
            upload.reports.publish(ShardReport(process=0, problem=problem))
        if self._is_staged(upload):
            self.report_damaged(upload.save, problem)
        self._forget_others(self._uploads.keys() - {upload.save.key})

    def _forget_others(self, kept: Collection[str]) -> None:
        """Forgets all uploads but some; their files are swept."""
        for key in self._uploads.keys() - kept:
            upload = self._uploads.pop(key)
            # Without a shared file system, other uploaders may still send files there.
            if not self.orders.no_shared_fs:
                self.journal.abandon_upload(upload.prefix)
                self._is_littered = True

    def _report_uploaded(self, upload: _Upload) -> None:
        save, before, now = upload.save, self.progress, time.time()
        assert upload.committed is not None
        del self._uploads[save.key]
        event = UploadEvent(
            step=save.step,
            process=self.orders.process,
            bytes_sent=upload.committed.stored_bytes,
            objects=upload.objects,
            seconds=time.perf_counter() - upload.began,
            lag_secs=max(0.0, now - _made_secs(save.at)),
            committed_unix_secs=now,
            waiting=0,
            waiting_bytes=0,
        )
        recent = (*before.recent, event)[-MOST_RECENT:]
        self._report_state(uploads=before.uploads + 1, recent=recent)
        _logger.info(
            "uploaded step %d: %d bytes in %.2f s", save.step, event.bytes_sent, event.seconds
        )
        upload.reports.remove()  # If that fails, they are removed with the save.


def delay_secs(made: Sequence[float], now: float, process: int, processes: int) -> float:
    """Returns how long an uploader of several waits with the newest staged save, in seconds.

    All processes save at the same step, and the slowest one determines the duration of a training
    step. Uploader *i* of *n* therefore starts at *i / n* of the time between two saves, so its load
    affects one process at a time. There is no delay if that time is unknown or the clock changed.
    """
    if len(made) < 2:
        return 0.0
    interval, age = made[-1] - made[-2], now - made[-1]
    share = min(MOST_DELAY_SECS, process / processes * interval)
    return max(0.0, share - age) if age >= 0 else 0.0


def _read_report(at: StorePath, process: int) -> ShardReport:
    """Reads a report; if it is unreadable, its save cannot be uploaded: no process replaces it."""
    data = at.store.get(at.key)
    try:
        return records.from_bytes(data, ShardReport, name=at.shown(), magic=_REPORT)
    except RestoreError as error:
        return ShardReport(process=process, problem=f"the report of process {process}: {error}")


def _made_secs(at: StorePath) -> float:
    """When a staged save was made, in seconds since 1970."""
    try:
        return os.stat(at).st_mtime
    except OSError:  # The save was removed concurrently.
        return time.time()
