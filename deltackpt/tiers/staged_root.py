# SPDX-License-Identifier: Apache-2.0
"""A bucket as a trainer's checkpoint directory: saves are staged locally, then uploaded.

Only opening, restores of evicted saves, and ``wait_uploaded`` wait for the bucket. The trainer
writes orders into the staging directory, and reads the uploader's progress.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    FencedError,
    RestoreError,
    StorageError,
    WaitTimeout,
)
from deltackpt.events import Event
from deltackpt.format import chain, naming
from deltackpt.format.manifest import BaseRef, SaveId, SaveInfo
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.directory import Kept, Root, WritableRoot
from deltackpt.ledger.entries import CatalogEntry, Hidden, ObjectKey, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.uploaded_wal import UploadedWals
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import inventory
from deltackpt.reading.wal_locations import WalLocation, WalLocations
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import FileStore, Missing, StorePath
from deltackpt.tiers import staged_store
from deltackpt.tiers.cursor import HURRY, LOOK
from deltackpt.tiers.replication import ReplicationClient
from deltackpt.tiers.staged_store import StagedStore
from deltackpt.tiers.staging import (
    Orders,
    Retired,
    RollBack,
    RunLineage,
    StagingDir,
    key_of,
)


class StagedRoot(WritableRoot):
    """A trainer's staging directory and the remote directory, in one process of a job.

    The first process *leads*: it holds the claim, and orders all remote changes. The others share
    its staging directory, and only save their parts there; or each has one of its own, whose
    replicator uploads the parts.
    """

    def __init__(
        self,
        stage: StagingDir,
        local: Root,
        journal: JournalView,
        orders: Orders,
        options: ManagerOptions,
        client: ReplicationClient,
        *,
        processes: int,
    ):
        """Created by ``open_root``, which has claimed the journal and written ``orders``."""
        self._readable_secs = options.timeouts.save_secs
        self._stage = stage
        self._local = local
        self._client = client
        #: Closes everything that is open, and releases the claim; for ``abandon``.
        self.failed_start_cleanup = contextlib.ExitStack()
        self._journal = journal
        self._orders = orders
        #: Whether ``confirm`` was called; before, the orders are only announced.
        self._is_confirmed = False
        self._tiers = options.tiers or Tiers()
        #: Whether another process holds the lease of the staging directory.
        self._is_reader = local.epoch == 0
        self._leads = orders.process == 0 and not self._is_reader
        self.emits_events = not self._is_reader
        #: Units that still exist remotely until the orders are carried out, but are hidden here.
        self._hidden = _gone(orders)
        #: Number of processes that write into the staging directory.
        self._processes = 1 if orders.no_shared_fs else processes
        self.no_shared_fs = orders.no_shared_fs
        # Only it, its uploader and a compactor make remote changes, so the leading process knows
        # all but the newest uploads and bases.
        if self._leads:
            remote = CommittedStore(journal, hidden=lambda: self._hidden, refresh=False)
        else:
            remote = CommittedStore(journal)
        self._layers = StagedStore(
            FileStore(local.path), remote, orders.url, no_shared_fs=orders.no_shared_fs
        )
        super().__init__(StorePath(self._layers, ""), local.item, local.path, orders.url)
        self.opened_dir = stage.path
        #: Held while a step is evicted, and while one is chosen for reading.
        self._leaving = threading.Lock()
        #: Number of readers of each step, which prevent its eviction.
        self._readers: collections.Counter[int] = collections.Counter()
        #: Serializes writing orders.
        self._ordering = threading.RLock()
        self._metadata: dict[SaveId, bytes] = {}
        self._tended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._tended.set_result(None)
        self._tender = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-tiers")
        #: Whether there are saves that no ``wait_uploaded`` call has covered.
        self._is_unconfirmed = bool(self._client.lag())

    @property
    def epoch(self) -> int:
        """See ``WritableRoot``."""
        return self._local.epoch

    def confirm(self) -> None:
        """See ``WritableRoot``; starts the uploader if it has something to do.

        If a newer trainer has started (FencedError), its orders in the staging directory stay in
        force.
        """
        if self._is_reader:
            return
        self._local.check_start()
        self._is_confirmed = True
        self._stage.order(self._orders)
        self._finish_start()
        DurableDir(self._stage.path).remove(self._stage.fetched)

    def _is_in_force(self) -> bool:
        """Whether this trainer's orders have replaced those of the previous one."""
        with contextlib.suppress(RestoreError, StorageError):
            orders = self._stage.orders() if self._is_confirmed else None
            return orders is not None and orders.holder == self._orders.holder
        return False

    def _finish_start(self) -> None:
        """Fences the previous holder once the orders are in force. Idempotent."""
        self._local.confirm()
        is_recorded = True
        if self._leads:
            assert isinstance(self._journal, Journal)
            try:
                self._journal.start()
            except StorageError as error:
                is_recorded = False
                events.warn(
                    f"{self}: the claim is still recorded as that of a starting trainer, which the "
                    f"uploader will change: {error}"
                )
        self.failed_start_cleanup.pop_all()
        try:
            self._client.confirm()
            if (
                not is_recorded
                or self._client.lag()
                or (self.wal_dir.exists() and not self.no_shared_fs)
            ):
                self._client.start()
        except StorageError as error:  # Each save retries.
            events.warn(str(error))

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """See ``WritableRoot``: a save that lacks a process's part can never be uploaded."""
        infos = {step: info for step, info in self._local.saves().items() if info is not None}
        held = self._journal.known.was_committed
        waiting = {
            key_of(step, info.save_id): step
            for step, info in infos.items()
            if not held(info.save_id)
        }
        common = set[str].intersection(*map(set, gather(sorted(waiting))))
        aside = self._stage.aside(f"epoch-{self._orders.epoch}-{uuid.uuid4().hex[:8]}")
        lost = sorted(waiting[key] for key in waiting.keys() - common)
        for step in reversed(lost):
            self._local.set_aside(step, aside / str(step))
        if lost:
            events.warn(
                f"{self._stage.path}: expected a part of steps {lost} in the staging directory of "
                "each process of the job, found that some have none; the parts here were moved to "
                f"{aside}"
            )
            gone = {infos[step].save_id for step in lost}
            self._client.forget(gone)
            with self._ordering:
                self._orders = self._orders.without(gone)
                self._order()
                self._hidden = _gone(self._orders)

    def await_readable(self, step: int) -> None:
        """See ``Steps``; fetches evicted saves from nearer tiers, or awaits the upload."""
        if not self.no_shared_fs:
            self._fetch_chain(step)
            return
        deadline = time.monotonic() + self._readable_secs
        self._client.process.wake(HURRY)
        while (info := self._local.saves().get(step)) is not None:
            self._read_progress()
            progress = self._client.progress()
            if self._journal.known.was_committed(info.save_id):
                return
            if (problem := progress.damaged.get(key_of(step, info.save_id))) is not None:
                raise Damaged(f"step {step}", "an uploaded save", problem)
            if not self._client.keep_waiting(deadline):
                raise WaitTimeout(
                    f"step {step}: expected it to be uploaded to {self} within "
                    f"{self._readable_secs:g} s (Timeouts.save_secs), since each process has a "
                    "part of it in its own staging directory, found "
                    f"{progress.problem or 'the upload in progress'}; restore again, or check the "
                    "network"
                )

    def _fetch_chain(self, step: int) -> None:
        local, bases = self._local.saves(), self.compacted()
        infos = {number: info for number, info in self.saves().items() if info is not None}
        chain_of = staged_store.chain_steps(step, infos) & infos.keys()
        newest_base = max((one for one in chain_of if infos[one].save_id in bases), default=0)
        missing = [one for one in chain_of if one >= newest_base and one not in local]
        with self._leaving:
            self._client.fetch([infos[one].save_id for one in sorted(missing)])

    def source_of(self, save_id: SaveId) -> str:
        """See ``Steps``."""
        info = None if self.no_shared_fs else self._local.saves().get(save_id.step)
        if info is None or info.save_id != save_id:
            return super().source_of(save_id)
        return self._client.source_of(save_id)

    def unusable(self) -> Mapping[int, RestoreError]:
        """See ``Steps``: saves in replicas that could not be recovered."""
        return self._client.unusable

    @property
    def wal_location(self) -> WalLocation:
        """See ``Steps``; read remotely if a single staging directory may lack part of it."""
        at_root = UploadedWals(self._journal.root, self._remote, self.topics)
        return at_root if self.no_shared_fs else WalLocations([super().wal_location, at_root])

    def _remote(self) -> State:
        """The remote state: as far as known, but at least what the leading process has seen."""
        if not self._leads:
            with contextlib.suppress(StorageError):
                return self._journal.state()
        return self._journal.known

    # ---- committed saves

    def saves(self) -> dict[int, SaveInfo | None]:
        """See ``Steps``; the remote saves are known from the journal."""
        found: dict[int, SaveInfo | None] = {
            step: one.info for step, one in self._at_root().items()
        }
        return found | self._local.saves()

    def compacted(self) -> frozenset[SaveId]:
        """See ``Steps``."""
        return frozenset(one.save_id for one in self._bases_at_root())

    def exists(self, save_id: SaveId) -> bool:
        """See ``WritableRoot``; the answer is the same in every process."""
        shown = self._remote().uploads - self._hidden
        return any(found == save_id for _, found in shown)

    def base_of(self, save_id: SaveId) -> BaseRef | None:
        """See ``WritableRoot``."""
        found = (one.nbytes for one in self._bases_at_root() if one.save_id == save_id)
        nbytes = next(found, None)
        return None if nbytes is None else BaseRef(save_id=save_id, nbytes=nbytes)

    def metadata(self, step: int) -> bytes:
        """See ``Steps``; read once."""
        info = self.saves().get(step)
        if info is None:
            return super().metadata(step)
        if info.save_id not in self._metadata and self.no_shared_fs:
            with contextlib.suppress(RestoreError, StorageError):
                path = self._local.path / str(step) / naming.STEP_METADATA
                self._metadata[info.save_id] = posix.read_bytes(path)
        if info.save_id not in self._metadata:
            self._metadata[info.save_id] = super().metadata(step)
        return self._metadata[info.save_id]

    def problems(self) -> list[Damaged]:
        """See ``Steps``."""
        return self._journal.problems

    def lost_steps(self) -> dict[int, Damaged]:
        """See ``Steps``: except staged ones."""
        lost = self._journal.lost_saves
        local = self._local.saves() if lost else {}
        return {step: why for step, why in lost.items() if step not in local}

    def newest_lease(self) -> Lease | None:
        """See ``Steps``."""
        claim = self._journal.known.claim
        return None if claim is None else claim.lease

    def found_damaged(self, step: int) -> bool:
        """See ``Steps``: staged copies of saves that exist elsewhere are also moved aside."""
        at_root, local = self._at_root(), self._local.saves()
        infos = {number: one.info for number, one in at_root.items()}
        infos |= {number: info for number, info in local.items() if info is not None}
        near = self._client.recoverable()
        found = False
        for number in staged_store.chain_steps(step, infos) & local.keys():
            save_id = infos[number].save_id if number in infos else None
            if number not in at_root and save_id not in near:
                continue
            if inventory.verify_step(self._local.at(number), self.item):
                self._local.set_aside(number, self._stage.aside("damaged") / uuid.uuid4().hex)
                events.warn(
                    f"{self._stage.path}: step {number} is damaged in the staging directory; it "
                    "was moved to aside/damaged and is read from another copy"
                )
                if save_id in near and save_id is not None:
                    self._client.fetch([save_id])
                found = True
        return found

    @contextlib.contextmanager
    def local(self, step: int, name: str) -> Iterator[Path]:
        """See ``Steps``; a staged step is not evicted while it is read."""
        with self._leaving:
            self._readers[step] += 1
        try:
            with super().local(step, name) as folder:
                yield folder
        finally:
            with self._leaving:
                self._readers[step] -= 1

    def _held_at(self, step: int) -> StorePath:
        return self._layers.at(str(step))

    def _scratch(self) -> Path:
        folder = self._stage.fetched
        DurableDir(self._stage.path, fsync=False).make(folder)
        return folder

    def _at_root(self) -> dict[int, CatalogEntry]:
        steps = self._journal.known.steps
        return {step: one for step, one in steps.items() if self._is_shown(one)}

    def _bases_at_root(self) -> list[CatalogEntry]:
        return [
            one
            for one in self._journal.known.bases.values()
            if one.item == self.item and self._is_shown(one)
        ]

    def _is_shown(self, one: CatalogEntry) -> bool:
        return (one.object_key, one.save_id) not in self._hidden

    # ---- lease

    def check_lease(self, *, refresh: bool = False) -> None:
        """See ``WritableRoot``."""
        self._local.check_lease()
        self._client.require_claim()
        if refresh and isinstance(self._journal, Journal):
            self._journal.check()

    def begin_run(self, resumed_from: SaveId | None, run: str) -> None:
        """See ``WritableRoot``."""
        if self._is_reader:
            return
        with self._ordering:
            orders = self._orders
            if not orders.began:
                self._order(began=True, goes_on=resumed_from)
            if orders.lineage(run) is None:
                self._order(lines=self._lineages(resumed_from, run))
                self._client.start()

    def _lineages(self, resumed_from: SaveId | None, run: str) -> tuple[RunLineage, ...]:
        """Lineages of the staged runs, and of a run that begins."""
        past: dict[str, int] = {}
        if resumed_from is not None:
            before = self._orders.lineage(resumed_from.run)
            past = (
                {resumed_from.run: resumed_from.attempt}
                if before is None
                else before.followed(resumed_from)
            )
        here = {info.save_id.run for info in self._local.saves().values() if info is not None}
        kept = [one for one in self._orders.lines if one.run in here]
        return (*kept, self._orders.new_lineage(run, past))

    # ---- rollback and removal

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``WritableRoot``; the leading process rolls the remote directory back."""
        if self._is_reader:
            return []
        with self._ordering:
            later = {
                number: info.save_id
                for number, info in self.saves().items()
                if number > step and info is not None
            }
            bases = (one.save_id for one in self._bases_at_root() if one.step > step)
            one = RollBack(
                number=0, after=step, run=run, saves=tuple(sorted({*later.values(), *bases}))
            )
            # Staged saves first: they would be uploaded regardless of earlier orders.
            moved = self._local.roll_back(step, run)
            if not later:
                return moved
            # Orders first: they tell the next start which replicas do not count.
            self._order(rolled_back=[one], gone=one.saves, **self._orders.next_generation(run))
            self._client.forget(one.saves)
        if self._leads and (at_root := sorted(later.keys() - {*moved})):
            events.warn(
                f"{self}: resuming from step {step}, the later steps {at_root} are rolled back"
            )
        return sorted({*later, *moved})

    def remove_steps(self, steps: Collection[int]) -> None:
        """See ``WritableRoot``; the leading process retires saves, the others evict their parts."""
        if not self._leads:
            return
        with self._ordering:
            infos = self.saves()
            ids = {step: info.save_id for step in steps if (info := infos.get(step)) is not None}
            # Otherwise the other processes' parts would wait for this one forever.
            if not self.no_shared_fs:
                self._local.remove_steps(steps)
                self._client.forget({*ids.values()})
            every = [
                Retired(number=0, step=step, item=None, save_id=save_id)
                for step, save_id in ids.items()
            ]
            self._retire(every, gone=() if self.no_shared_fs else ids.values())

    def _retire(self, retired: Iterable[Retired], gone: Collection[SaveId] = ()) -> None:
        with self._ordering:
            every = [*retired]
            if every:
                self._order(retired=every, gone=gone)

    def write_kept(self, kept: Kept | None) -> None:
        """See ``WritableRoot``."""
        self._local.write_kept(kept)

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``WritableRoot``: also evicts from the staging directory."""
        if self._is_reader:
            return
        self._local.collect(protected)
        if self._tended.done():
            before = self._tended
            self._tended = self._tender.submit(self._tend, protected)
            before.result()

    def _tend(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        self._tidy()
        with contextlib.suppress(FencedError):  # The next commit reports it.
            self._drop_bases(protected)
        # Evicted saves remain available: the remote journal lists them.
        local = DurableDir(self._local.path)
        rolled_back = local.entries(local.path / naming.ROLLED_BACK)
        for folder in sorted(rolled_back, key=lambda one: one.lstat().st_mtime)[:-1]:
            local.remove(folder)

    def _tidy(self) -> None:
        """Evicts what the staging directory no longer needs, as far as known."""
        self._read_progress()
        if not self._is_reader:
            with self._leaving:
                self._evict()

    def _read_progress(self) -> None:
        """Reads the uploader's progress; does not query the remote directory."""
        if self._client.progress().entry <= self._journal.known.entry.number:
            return
        data = self._stage.entry()
        # A record torn by a power cut is replaced by the next one; the uploader reports remote
        # problems.
        with contextlib.suppress(RestoreError, StorageError, Missing):
            if data is not None:
                self._journal.learn(data, f"{self._stage.path}/entry.msgpack")

    def _evict(self) -> None:
        """Evicts uploaded saves in none of the newest chains; and parts that never will be."""
        infos = {step: info for step, info in self._local.saves().items() if info is not None}
        if self.no_shared_fs:
            progress, newest = self._client.progress(), max(self._local.steps(), default=None)
            old = [
                step
                for step, info in infos.items()
                if step != newest
                and (
                    self._client.is_uploaded(info.save_id, progress)
                    or key_of(step, info.save_id) in progress.damaged
                )
            ]
        else:
            at_root = {one.save_id for one in self._at_root().values()}
            keep = self._tiers.keep_local
            old = staged_store.evictable(infos, keep, lambda info: info.save_id in at_root)
        surplus = [step for step in old if not self._readers[step]]
        for step in [] if self.no_shared_fs else surplus:
            with contextlib.suppress(DeltackptError):
                self.metadata(step)
        self._local.remove_steps(surplus)
        if surplus:
            self._client.process.wake(LOOK)  # Peers delete their copies.

    def _drop_bases(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        """Retires compacted bases that no chain uses."""
        bases = self._bases_at_root()
        if not bases or not self._leads:
            return
        # As for a directory: computed after the bases were listed.
        in_flight, infos = protected(), self.saves().values()
        known = [info for info in infos if info is not None]
        if len(known) < len(infos):
            return
        needed = chain.needed_bases(known, in_flight, {one.save_id for one in bases})
        self._retire(
            Retired(number=0, step=one.step, item=one.item, save_id=one.save_id)
            for one in bases
            if one.save_id not in needed
        )

    # ---- staging and upload

    def make_room(self, nbytes: int) -> str | None:
        """See ``WritableRoot``."""
        return self._client.make_room(nbytes * self._processes)

    def stop_waiting(self) -> None:
        """See ``WritableRoot``."""
        self._client.stop_waiting()

    def committed(self) -> None:
        """See ``WritableRoot``."""
        self._is_unconfirmed = True
        self._client.committed(self._orders)

    def wait_uploaded(self, timeout_secs: float) -> None:
        """See ``WritableRoot``."""
        tier = self._tiers.wait_for
        if tier == "staging":
            return
        self._client.wait(tier, timeout_secs)
        if tier == "remote":
            self._read_progress()
            if isinstance(self._journal, Journal):
                try:  # A listing and a read show that it holds the uploaded saves.
                    self._journal.confirm()
                except FencedError:
                    # The next trainer continues from the steps that were confirmed before.
                    if self._is_unconfirmed or self._journal.is_replaced:
                        raise
            self._is_unconfirmed = False
        self._client.check_damaged(tier)
        with contextlib.suppress(StorageError):  # Retried after the next save.
            self._tidy()

    def poll_events(self) -> list[Event]:
        """See ``WritableRoot``."""
        return self._client.poll_events()

    def abandon(self) -> None:
        """See ``Steps``."""
        self.stop_waiting()
        self._tender.shutdown()
        with contextlib.ExitStack() as parts:
            parts.callback(self._client.close)
            parts.callback(self.failed_start_cleanup.close)
            if self._is_in_force():
                parts.callback(self._local.abandon)
                with contextlib.suppress(FencedError, StorageError):
                    self._finish_start()  # An interrupt may have ended ``confirm``.

    def close(self) -> None:
        """Closes everything that is open; the uploader continues until nothing is left."""
        self.stop_waiting()
        self._tender.shutdown()
        with contextlib.ExitStack() as parts:
            parts.callback(super().close)
            parts.callback(self._client.close)
            parts.callback(self._local.close)
            self._tended.result()
            with contextlib.suppress(StorageError):
                self._tidy()

    def _order(
        self,
        *,
        rolled_back: Iterable[RollBack] = (),
        retired: Iterable[Retired] = (),
        gone: Collection[SaveId] = (),
        **changes: object,
    ) -> None:
        """Writes new orders, without those of the old ones that are done."""
        # The orders may be those of the next trainer on this staging directory.
        self._local.check_lease()
        old, progress = self._orders, self._client.progress()
        number, infos = old.number + 1, self._local.saves()
        # ``retired`` units are unneeded once the newest staged save is uploaded. Retirements that
        # wait for one of ``gone``, which were removed deliberately, wait for the newest instead.
        known = [info.save_id for _, info in sorted(infos.items()) if info is not None]
        newest = known[-1] if known else None
        self._orders = dataclasses.replace(
            old,
            number=number,
            rolled_back=(
                *(one for one in old.rolled_back if one.number > progress.orders),
                *(dataclasses.replace(one, number=number) for one in rolled_back),
            ),
            retired=(
                *(
                    dataclasses.replace(one, after=newest) if one.after in gone else one
                    for one in old.retired
                    if one.number > progress.retired
                ),
                *(dataclasses.replace(one, number=number, after=newest) for one in retired),
            ),
            **changes,
        )
        if self._is_confirmed:
            self._stage.order(self._orders)
            self._client.process.wake()
        else:
            self._stage.announce(self._orders)
        # Some units still exist remotely after their orders were carried out, as far as known.
        self._hidden = (self._hidden & self._journal.known.uploads) | _gone(self._orders)


def _gone(orders: Orders) -> Hidden:
    """Units that must not remain remotely; a rolled-back save may have a compacted base."""
    back = (one for each in orders.rolled_back for one in each.saves)
    return frozenset(
        {(one.object_key, one.save_id) for one in orders.retired}
        | {(ObjectKey(one.step, of), one) for one in back for of in (None, orders.item)}
    )
