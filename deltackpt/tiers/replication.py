# SPDX-License-Identifier: Apache-2.0
"""A manager's connection to the tiers of its checkpoint directory, which is local.

The manager saves to a plain directory. The thread that commits a save there also writes it to the
extents, so waiting for the save includes that. A replicator, another process, copies it to the
remote directory and to peers. The manager writes orders for it into the staging directory, and
reads its progress; only opening, ``wait`` and a search for new peers send requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    FencedError,
    RestoreError,
    SaveFailed,
    StorageError,
    WaitTimeout,
)
from deltackpt.events import Event, FailureEvent, Operation
from deltackpt.format import chain, naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.entries import ObjectKey, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import stored_saves
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir
from deltackpt.tiers.cursor import HURRY, LOOK
from deltackpt.tiers.local_replicas import LocalReplicas
from deltackpt.tiers.replicated_steps import ReplicatedSteps, chain_steps
from deltackpt.tiers.replicator import ReplicatorProcess
from deltackpt.tiers.staging import (
    Orders,
    PeerGroup,
    Removal,
    RunLineage,
    TierName,
    TierProgress,
    key_of,
    rolled_back,
    step_of,
)
from deltackpt.tiers.wal_upload import oldest_needed

#: Seconds between two polls of the replicator's progress while a caller waits.
_POLL_SECS = 0.02
#: Seconds between two searches for peers.
_FIND_SECS = 2.0
#: Finds peers, given those found before.
FindPeers = Callable[[PeerGroup | None], PeerGroup]


class ReplicationClient:
    """The tiers of one local directory; used by the saving and the training thread.

    The first process of a job *leads*: it orders all remote changes. The others either share its
    staging directory and only read it, or each has its own, with its shards of the saves.
    """

    def __init__(
        self,
        replicas: LocalReplicas,
        journal: JournalView,
        options: ManagerOptions,
        orders: Orders,
        *,
        processes: int = 1,
        find_peers: FindPeers | None = None,
    ):
        """Created by ``startup.open_bucket``, which has announced the ``orders``.

        ``find_peers`` is called again whenever peers do not answer the replicator.
        """
        self.replicas, self.journal, self.orders = replicas, journal, orders
        self.stage, self.local = replicas.stage, replicas.local
        self.process = ReplicatorProcess(self.stage, cpus=options.background.cpus)
        #: Closes everything that is open, and releases the claim; for ``abandon``.
        self.failed_start_cleanup = contextlib.ExitStack()
        self.no_shared_fs = orders.no_shared_fs
        #: Whether another process holds the lease of the staging directory.
        self._is_reader = self.local.epoch == 0
        self.emits_events = not self._is_reader
        self.leads = orders.process == 0 and not self._is_reader
        self._tiers = options.tiers or Tiers()
        self._shard = orders.process
        #: Number of processes that write into the staging directory.
        self._writers = 1 if self.no_shared_fs else processes
        self._stopped_waiting = threading.Event()
        self._find = find_peers
        self._found_at = time.monotonic()
        #: Whether the trainer has started; before, the replicator serves the previous one, and the
        #: orders are only announced.
        self._is_confirmed = False
        #: Whether the orders were written; if writing failed, the next save retries it.
        self._is_written = True
        #: Serializes writing orders.
        self._ordering = threading.RLock()
        #: Bytes of the local saves, by ``key_of``.
        self._sizes: dict[str, int] = {}
        #: Already reported: the number of uploads, damaged saves, persisting problems.
        self._reported_uploads = 0
        self._reported_damaged: set[str] = set()
        self._reported_problems: set[str] = set()
        self._raised: set[str] = set()
        #: Deleted saves; ``wait`` waits until the uploader has deleted them.
        self._deleted: set[tuple[ObjectKey, SaveId]] = set()
        self.steps = ReplicatedSteps(self, options.timeouts.save_secs)
        #: Whether there are saves that no call of ``wait`` has confirmed.
        self._is_unconfirmed = bool(self.lag())

    def __str__(self) -> str:
        return str(self.journal.root)

    # ---- start and end

    def confirm(self) -> None:
        """See ``Root``; starts the replicator if it has something to do.

        If a newer trainer has started (FencedError), its orders in the staging directory stay in
        force.
        """
        if self._is_reader:
            return
        self.local.check_lease(is_starting=True)
        self._is_confirmed = True
        self.stage.order(self.orders)
        self._finish_start()
        DurableDir(self.stage.path).remove(self.stage.fetched)

    def _is_in_force(self) -> bool:
        """Whether this trainer's orders have replaced those of the previous one."""
        with contextlib.suppress(RestoreError, StorageError):
            orders = self.stage.orders() if self._is_confirmed else None
            return orders is not None and orders.holder == self.orders.holder
        return False

    def _finish_start(self) -> None:
        """Fences the previous holder once the orders are in force. Idempotent."""
        self.local.confirm()
        is_recorded = True
        if self.leads:
            assert isinstance(self.journal, Journal)
            try:
                self.journal.start()
            except StorageError as error:
                is_recorded = False
                events.warn(
                    f"{self}: the claim is still recorded as that of a starting trainer, which the "
                    f"uploader will change: {error}"
                )
        self.failed_start_cleanup.pop_all()
        try:
            has_wal = self.local.wal_dir.exists() and not self.no_shared_fs
            if not is_recorded or has_wal or self.lag():
                self.start()
        except StorageError as error:  # Each save retries.
            events.warn(str(error))

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Moves saves aside that lack some process's shard; called first, with an all-gather.

        Such a save can never be uploaded.
        """
        infos = {step: info for step, info in self.local.saves().items() if info is not None}
        held = self.journal.known.was_committed
        waiting = {
            key_of(step, info.save_id): step
            for step, info in infos.items()
            if not held(info.save_id)
        }
        common = set[str].intersection(*map(set, gather(sorted(waiting))))
        lost = sorted(waiting[key] for key in waiting.keys() - common)
        if not lost:
            return
        aside = self.stage.aside(f"epoch-{self.orders.epoch}-{uuid.uuid4().hex[:8]}")
        for step in reversed(lost):
            self.local.set_aside(step, aside / str(step))
        events.warn(
            f"{self.stage.path}: expected a shard of steps {lost} in the staging directory of each "
            f"process of the job, found that some have none; the shards here were moved to {aside}"
        )
        gone = {infos[step].save_id for step in lost}
        self.replicas.forget(gone)
        with self._ordering:
            self.orders = self.orders.without(gone)
            self._order()

    def start(self) -> None:
        """Starts the replicator unless it is running, or another process of the job owns it."""
        if not self._is_reader:
            self.process.start()

    def stop_waiting(self) -> None:
        """Ends waiting for room, because the manager is closed."""
        self._stopped_waiting.set()

    def abandon(self) -> None:
        """See ``Steps``."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.steps.close)
            stack.callback(self._close_tiers)
            stack.callback(self.failed_start_cleanup.close)
            if self._is_in_force():
                stack.callback(self.local.abandon)
                with contextlib.suppress(FencedError, StorageError):
                    self._finish_start()  # ``confirm`` may have been interrupted.

    def close(self) -> None:
        """Closes everything that is open; the replicator continues until nothing is left."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.steps.close)
            stack.callback(self._close_tiers)
            stack.callback(self.local.close)
            with contextlib.suppress(StorageError):
                self._tidy()

    def _close_tiers(self) -> None:
        self.stop_waiting()
        self.process.close()
        self.replicas.close()

    # ---- claim and orders

    def check_claim(self, *, refresh: bool = False) -> None:
        """Raises FencedError if another trainer has taken the remote directory.

        Without ``refresh``, the replicator's last report counts, and no request is sent.
        """
        if (fenced := self.progress().fenced) is not None:
            raise FencedError(fenced)
        if refresh and isinstance(self.journal, Journal):
            self.journal.check()

    def start_run(self, resumed_from: SaveId | None, run: str) -> None:
        """Records, before the first save, from which save (or None) a run resumes."""
        if self._is_reader:
            return
        with self._ordering:
            self._write_orders()
            if not self.orders.began:
                self._order(began=True, resumed_from=resumed_from)
            if self.orders.lineage(run) is None:
                self._order(lineages=self._lineages(resumed_from, run))
                self.start()

    def _write_orders(self) -> None:
        """Writes the orders again if the last write failed."""
        with self._ordering:
            if not self._is_written:
                self._order()

    def _lineages(self, resumed_from: SaveId | None, run: str) -> tuple[RunLineage, ...]:
        """Returns the lineages of the local runs and of a new run."""
        ancestors: dict[str, int] = {}
        if resumed_from is not None:
            before = self.orders.lineage(resumed_from.run)
            ancestors = (
                {resumed_from.run: resumed_from.attempt}
                if before is None
                else before.followed(resumed_from)
            )
        here = {info.save_id.run for info in self.local.saves().values() if info is not None}
        kept = [one for one in self.orders.lineages if one.run in here]
        return (*kept, self.orders.new_lineage(run, ancestors))

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Root``; the leading process orders the rollback of the remote directory."""
        if self._is_reader:
            return []
        with self._ordering:
            self._write_orders()
            later = {
                number: info.save_id for number, info in self.steps.known().items() if number > step
            }
            bases = (one.save_id for one in self.steps.uploaded_bases() if one.step > step)
            saves = sorted({*later.values(), *bases})
            # Shards of deleted steps may still be staged.
            staged = self.local.saves().items()
            gone = {*saves, *(one.save_id for number, one in staged if number > step and one)}
            # Local saves first: they would be uploaded regardless of earlier orders.
            moved = self.local.roll_back(step, run)
            if not later:
                if moved:
                    self._order(gone=gone)
                    self.replicas.forget(gone)
                return moved
            # Orders first: they tell the next start which replicas do not count.
            removals = rolled_back(saves, self.local.item, run)
            self._order(removals, gone=gone, **self.orders.next_generation(run))
            self.replicas.forget(gone)
        if self.leads and (uploaded := sorted(later.keys() - {*moved})):
            events.warn(
                f"{self}: resuming from step {step}, the later steps {uploaded} are rolled back"
            )
        return sorted({*later, *moved})

    def remove_steps(self, steps: Collection[int]) -> None:
        """See ``Root``; the leading process retires saves, the others evict their shards."""
        if not self.leads:
            return
        with self._ordering:
            infos = self.steps.known()
            ids = {step: infos[step].save_id for step in steps if step in infos}
            # Otherwise the other processes' shards would wait for this one forever.
            if not self.no_shared_fs:
                self.local.remove_steps(steps)
                self.replicas.forget({*ids.values()})
            self._remove(
                (Removal(number=0, step=step, item=None, save_id=one) for step, one in ids.items()),
                gone=() if self.no_shared_fs else ids.values(),
            )

    def note_deleted(self, save_id: SaveId) -> None:
        """Notes that the user deleted a save; ``wait`` waits for its remote deletion."""
        self._deleted.add((ObjectKey(save_id.step), save_id))
        with contextlib.suppress(StorageError):  # ``wait`` and each save retry.
            self.start()

    def _remove(self, unneeded: Iterable[Removal], gone: Collection[SaveId] = ()) -> None:
        """Orders the removal of what is unneeded once the newest local save is uploaded."""
        with self._ordering:
            newest = self._newest_save()
            if removals := [dataclasses.replace(one, after=newest) for one in unneeded]:
                self._order(removals, gone=gone)

    def _newest_save(self) -> SaveId | None:
        known = [info.save_id for info in self.local.saves().values() if info is not None]
        return max(known, key=lambda one: one.step, default=None)

    def _order(
        self, removals: Iterable[Removal] = (), gone: Collection[SaveId] = (), **changes: object
    ) -> None:
        """Writes new orders; removals that waited for ``gone`` saves wait for the newest one."""
        # The orders may be those of the next trainer on this staging directory.
        self.local.check_lease()
        old, number = self.orders, self.orders.number + 1
        before = old.pending(self.progress(), self.journal.known)
        newest = self._newest_save() if gone else None
        self.orders = dataclasses.replace(
            old,
            number=number,
            removals=(
                *(
                    dataclasses.replace(one, after=newest) if one.after in gone else one
                    for one in before
                ),
                *(dataclasses.replace(one, number=number) for one in removals),
            ),
            **changes,
        )
        self._is_written = False
        if self._is_confirmed:
            self.stage.order(self.orders)
            self.process.wake(LOOK)
        else:
            self.stage.announce(self.orders)
        self._is_written = True

    # ---- eviction

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Root``: also evicts what is uploaded from the local directory."""
        if not self._is_reader:
            self.local.collect(protected, before=functools.partial(self._tend, protected))

    def _tend(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        with contextlib.suppress(FencedError, OSError):
            self._help_on_full_disk()
        self._tidy()
        with contextlib.suppress(FencedError):  # The next commit reports it.
            self._drop_bases(protected)
        # Evicted saves remain available: the remote journal lists them.
        local = DurableDir(self.local.path)
        rolled_back = local.entries(self.local.path / naming.ROLLED_BACK)
        for folder in sorted(rolled_back, key=lambda one: one.lstat().st_mtime)[:-1]:
            local.remove(folder)

    def _help_on_full_disk(self) -> None:
        """Restarts the uploader, and reads the journal if it may have no room for its reports."""
        if behind := self.lag():
            self.local.check_lease(wait=False)
            self.start()
            if posix.free_bytes(self.stage.path) < 2 * max(behind.values()):
                self.journal.state()

    def _tidy(self) -> None:
        """Evicts what the local directory no longer needs, as far as this process knows."""
        self.progress()  # Adopts what is uploaded.
        if not self._is_reader:
            with self.steps.leaving:
                self._evict()

    def _evict(self) -> None:
        """Evicts uploaded saves outside the newest chains, and shards of saves without others."""
        infos = {step: info for step, info in self.local.saves().items() if info is not None}
        if self.no_shared_fs:
            progress, newest = self.progress(), max(self.local.steps(), default=None)
            old = [
                step
                for step, info in infos.items()
                if step != newest and not progress.lacks(step, info.save_id, self.journal.known)
            ]
        else:
            uploaded = {one.save_id for one in self.steps.uploaded().values()}
            kept = _newest_chains(infos, self._tiers.keep_local)
            old = [step for step in infos.keys() - kept if infos[step].save_id in uploaded]
        surplus = [step for step in old if not self.steps.readers[step]]
        for step in [] if self.no_shared_fs else surplus:
            with contextlib.suppress(DeltackptError):
                self.steps.metadata(step)  # It is kept in memory.
        self.local.remove_steps(surplus)
        if surplus:
            self.process.wake(LOOK)  # Peers delete their copies.

    def _drop_bases(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        """Retires compacted bases that no chain uses."""
        bases = self.steps.uploaded_bases()
        if not bases or not self.leads:
            return
        # As for a directory: computed after the bases were listed.
        in_flight, infos = protected(), self.steps.saves().values()
        known = [info for info in infos if info is not None]
        if len(known) < len(infos):
            return
        needed = chain.needed_bases(known, in_flight, {one.save_id for one in bases})
        self._remove(
            Removal(number=0, step=one.step, item=one.item, save_id=one.save_id)
            for one in bases
            if one.save_id not in needed
        )

    # ---- what has reached the tiers

    def progress(self, tier: TierName = "remote") -> TierProgress:
        """Returns the replicator's last report on a tier; adopts the journal entry in it."""
        found = self.stage.progress(self.orders.holder, tier)
        self.journal.learn(found.entry)
        return found

    def oldest_needed(self) -> SaveId | None:
        """Returns the oldest uploaded save onto which a new node may replay the WAL, if known."""
        self.progress()
        return oldest_needed(self.journal.known)

    def remote(self) -> State:
        """Returns the remote state, at least as new as the leading process has seen."""
        if not self.leads:
            with contextlib.suppress(StorageError):
                return self.journal.state()
        return self.journal.known

    def lag(self, tier: TierName = "remote") -> dict[int, int]:
        """Returns the staged steps that have reached neither a tier nor a later one, with bytes."""
        self.progress()  # Adopts what is uploaded: it counts as having reached every tier.
        progress, found = self.progress(tier), dict[int, int]()
        before, sizes = self._sizes, dict[str, int]()
        for step, info in self.local.saves().items():
            save_id = info and info.save_id
            key = key_of(step, save_id)
            if key in before:
                sizes[key] = before[key]
            lacks = progress.lacks(step, save_id, self.journal.known)
            if not lacks or self._is_unreadable(step, progress):
                continue
            if key not in sizes:
                sizes[key] = self.local.at(step).tree_bytes()
            found[step] = sizes[key]
        self._sizes = sizes  # Without saves that are no longer staged.
        return found

    def _is_unreadable(self, step: int, progress: TierProgress) -> bool:
        """Whether the replicator cannot identify a step's save, although it is known here."""
        if key_of(step, None) not in progress.damaged:
            return False
        try:
            stored_saves.read_info(self.local.at(step), self.local.item)
        except RestoreError:
            return True
        return False  # Another save has taken its place.

    def keep_waiting(self, deadline: float | None = None) -> bool:
        """Waits a moment; returns whether to continue, by default until ``stop_waiting``."""
        self.local.check_lease(wait=False)
        self.check_claim()
        self.start()
        if deadline is None:
            return not self._stopped_waiting.wait(_POLL_SECS)
        time.sleep(_POLL_SECS)
        return time.monotonic() < deadline

    def wait(self, timeout_secs: float) -> None:
        """Waits until all saves reach ``Tiers.wait_for``, and deletions the remote directory.

        A WaitTimeout loses nothing. Raises SaveFailed, once, for a save that never can.
        """
        tier, deadline = self._tiers.wait_for, time.monotonic() + timeout_secs
        if tier == "staging":
            return
        if tier == "remote":
            self.process.wake(HURRY)
        while (behind := self.lag(tier)) or (tier == "remote" and self._is_deleting()):
            self._find_peers()
            if not self.keep_waiting(deadline):
                problem = self.progress(tier).problem or self.process.ended
                left = f"{len(behind)} saves of {sum(behind.values()):,} bytes"
                raise WaitTimeout(
                    f"{self}: expected every save to reach tier {tier!r} within {timeout_secs} s "
                    f"(ManagerOptions.timeouts), found {left if behind else 'deletions'} only in "
                    f"the staging directory {self.stage.path}"
                    f"{f', because {problem}' if problem else ''}; the uploader continues: call "
                    "wait_until_finished() again, or check the network"
                )
        if tier == "remote":
            if isinstance(self.journal, Journal):
                try:  # A listing and a read show that it holds the uploaded saves.
                    self.journal.confirm()
                except FencedError:
                    # The next trainer continues from the steps that were confirmed before.
                    if self._is_unconfirmed or self.journal.is_replaced:
                        raise
            self._is_unconfirmed = False
        self._check_damaged(tier)
        with contextlib.suppress(StorageError):  # Retried after the next save.
            self._tidy()

    def _is_deleting(self) -> bool:
        """Returns whether the uploader can delete a step that the user deleted, and has not yet."""
        if not self._deleted:
            return False
        progress, known = self.progress(), self.journal.known
        removals = self.orders.removals
        self._deleted &= {one.unit for one in removals if one.is_open(progress, known)}
        return any(
            one.unit in self._deleted
            and (one.after is None or key_of(one.after.step, one.after) not in progress.damaged)
            for one in removals
        )

    def _check_damaged(self, tier: TierName) -> None:
        """Raises SaveFailed once for each save that cannot reach a tier."""
        damaged = self.progress(tier).damaged
        # The oldest first, so that all processes name the same one; later ones may follow from it.
        for key in _oldest_first(damaged.keys() - self._raised):
            self._raised.add(key)
            where = str(self.journal.root) if tier == "remote" else "peers"
            raise SaveFailed(
                f"a staged save cannot reach {where}: {damaged[key]}; the next save is a base"
            )

    def make_room(self, nbytes: int) -> str | None:
        """Waits in the background for room for a save; may return a warning.

        ``nbytes`` are those of this process.
        """
        nbytes, most = nbytes * self._writers, self._tiers.max_staging_bytes
        while (behind := sum(self.lag().values())) and behind + nbytes > most:
            if not self.keep_waiting():
                raise StorageError(
                    f"{self.stage.path}: expected room for a save of {nbytes:,} bytes in addition "
                    f"to {behind:,} that are not uploaded to {self.journal.root} yet "
                    f"(Tiers.max_staging_bytes={most:,}), found none when the manager was "
                    "closed; the uploader continues, save again later"
                )
        if nbytes <= most:
            return None
        return (
            f"a save of {nbytes:,} bytes exceeds Tiers.max_staging_bytes={most:,}; it was staged "
            "alone"
        )

    def committed(self) -> None:
        """Called in the background of a save once its step is in the local directory.

        Raises StorageError if the extents fail or stay full.
        """
        self._is_unconfirmed = True
        with contextlib.suppress(FencedError, StorageError):  # The next save retries.
            self._write_orders()
        self.start()
        self.process.wake()
        self._find_peers()
        self.replicas.put(self.orders, self._may_go, self.keep_waiting)

    def _may_go(self, save_id: SaveId) -> bool:
        """Returns whether a save was uploaded, can never be, or was removed deliberately."""
        infos = self.local.saves()
        info = infos.get(save_id.step)
        if info is None or info.save_id != save_id:
            # A save with an unreadable manifest may be this one.
            return info is not None or save_id.step not in infos
        return not self.progress().lacks(save_id.step, save_id, self.journal.known)

    def poll_events(self) -> list[Event]:
        """Returns the events since the last call; emits warnings about the replicator."""
        while self.process.warnings:
            events.warn(self.process.warnings.pop(0))
        progress, found = self.progress(), list[Event]()
        if (new := progress.uploads - self._reported_uploads) > 0:
            self._reported_uploads, behind = progress.uploads, self.lag()
            waiting = {"waiting": len(behind), "waiting_bytes": sum(behind.values())}
            found += (dataclasses.replace(one, **waiting) for one in progress.recent[-new:])
        failure = functools.partial(FailureEvent, process=self._shard)
        for key in _oldest_first(progress.damaged.keys() - self._reported_damaged):
            self._reported_damaged.add(key)
            step, code, message = step_of(key), Damaged.code, progress.damaged[key]
            found.append(
                failure(step=step, operation="upload", code=code, message=message, seconds=0.0)
            )
        tiers: list[tuple[Operation, TierProgress]]
        tiers = [("upload", progress), ("push", self.progress("peers"))]
        for operation, tier in tiers:
            if tier.problem is None:
                self._reported_problems.discard(operation)
            elif operation not in self._reported_problems:
                self._reported_problems.add(operation)
                found.append(
                    failure(
                        step=None,
                        operation=operation,
                        code=tier.code,
                        message=tier.problem,
                        seconds=max(0.0, time.time() - tier.problem_unix_secs),
                    )
                )
        return found

    # ---- peers

    def _find_peers(self) -> None:
        """Searches for new or restarted peers if they do not accept pushes; rate-limited."""
        is_due = time.monotonic() - self._found_at > _FIND_SECS
        if self._find is None or not is_due or self.progress("peers").problem is None:
            return
        with contextlib.suppress(DeltackptError):  # The problem persists and has been reported.
            group = self._find(self.orders.peers)
            self._found_at = time.monotonic()
            with self._ordering:
                if group != self.orders.peers:
                    self.replicas.connect(group)
                    self._order(peers=group)
                elif not self._is_written:
                    self._order()


def _newest_chains(infos: dict[int, SaveInfo], count: int) -> set[int]:
    """Returns the steps of the ``count`` newest chains."""
    kept: set[int] = set()
    oldest: set[int] = set()
    for step in sorted(infos, reverse=True):
        steps = chain_steps(step, infos)
        if min(steps) not in oldest:
            if len(oldest) == count:
                break
            oldest.add(min(steps))
        kept |= steps
    return kept


def _oldest_first(keys: Iterable[str]) -> Sequence[str]:
    return sorted(keys, key=lambda key: (step_of(key), key))
