# SPDX-License-Identifier: Apache-2.0
"""A bucket as a trainer's checkpoint directory: saves are staged locally, then uploaded.

Only opening, restores of evicted saves, and ``settle`` wait for the bucket. The trainer writes
orders into the staging directory, and reads the uploader's progress.
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
from typing import Any

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
from deltackpt.format import chain, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import BaseRef, SaveId
from deltackpt.ledger.committed import Committed
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import Hidden, Standing, State, Unit
from deltackpt.ledger.held import Held
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.kept import Kept
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.promoted_log import JournaledLogs
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import inventory
from deltackpt.reading.wal_locations import WalLocation, WalLocations
from deltackpt.storage import files
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import FileStore, Missing, StorePath
from deltackpt.tiers import eviction
from deltackpt.tiers.client import ReplicationClient
from deltackpt.tiers.layers import Layers
from deltackpt.tiers.stage import (
    Line,
    Orders,
    Retired,
    RollBack,
    Stage,
    key_of,
)


class StagedRoot(Held):
    """A trainer's staging directory and the remote directory, in one process of a job.

    The first process *leads*: it holds the claim, and orders all remote changes. The others share
    its staging directory, and only save their parts there; or each has one of its own, whose
    replicator uploads the parts.
    """

    def __init__(
        self,
        stage: Stage,
        local: Root,
        journal: JournalView,
        orders: Orders,
        options: ManagerOptions,
        client: ReplicationClient,
        *,
        processes: int,
    ):
        """Created by ``opening.open_root``.

        Args:
          stage: the staging directory.
          local: its checkpoint directory, whose lease this process holds, unless it shares it.
          journal: journal of the remote directory, which is claimed.
          orders: the current orders under that claim.
          options: the user's options.
          client: the replicas.
          processes: number of processes that save together.
        """
        self._readable_secs = options.timeouts.save_secs
        self._stage = stage
        self._local = local
        self._client = client
        #: Closes everything that is open, and releases the claim; for ``abandon``.
        self.undo = contextlib.ExitStack()
        self._journal = journal
        self._orders = orders
        #: Whether ``confirm`` was called; before, the orders are only announced.
        self._is_confirmed = False
        self._tiers = options.tiers or Tiers()
        #: Whether another process holds the lease of the staging directory.
        self._is_beside = local.epoch == 0
        self._leads = orders.process == 0 and not self._is_beside
        self.tells = not self._is_beside
        #: Units that still exist remotely until the orders are carried out, but are hidden here.
        self._hidden = _gone(orders)
        #: Number of processes that write into the staging directory.
        self._processes = 1 if orders.apart else processes
        self.apart = orders.apart
        self._layers = Layers(
            FileStore(local.path), self._at_remote(), orders.url, apart=orders.apart
        )
        super().__init__(StorePath(self._layers, ""), local.item, local.path, orders.url)
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
        #: Whether there are saves that no ``settle`` call has covered.
        self._is_unconfirmed = bool(self._client.lag())

    @property
    def epoch(self) -> int:
        """See ``Held``."""
        return self._local.epoch

    @property
    def opened_dir(self) -> Path:
        """See ``Held``."""
        return self._stage.path

    def confirm(self) -> None:
        """See ``Held``; starts the uploader if it has something to do.

        Raises:
          FencedError: a newer trainer has started, or a newer start of this process supersedes this
            one. In the staging directory, the orders of a newer trainer stay in force.
        """
        if self._is_beside:
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
        is_recorded = self._start_claim()
        self.undo.pop_all()
        try:
            self._client.confirm()
            if not is_recorded or self._client.lag() or (self.log_dir.exists() and not self.apart):
                self._client.start()
        except StorageError as error:  # Each save retries.
            events.warn(str(error))

    def _start_claim(self) -> bool:
        """Records that the claim is not pending; returns whether the uploader need not do so."""
        if not self._leads:
            return True
        assert isinstance(self._journal, Journal)
        try:
            self._journal.start()
        except StorageError as error:
            events.warn(
                f"{self}: the claim is still recorded as that of a starting trainer, which the "
                f"uploader will change: {error}"
            )
            return False
        return True

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """See ``Held``: a save that lacks a process's part can never be uploaded."""
        infos = {step: info for step, info in self._local.saves().items() if info is not None}
        held = self._journal.known.held
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
        """See ``Steps``: a step with a part in each staging directory is read remotely.

        For other steps, evicted saves are recovered from nearer replicas.
        """
        if not self.apart:
            self._bring_near(step)
            return
        deadline = time.monotonic() + self._readable_secs
        self._client.hurry()
        while (info := self._local.saves().get(step)) is not None:
            self._look()
            progress = self._client.progress()
            if self._journal.known.held(info.save_id):
                return
            if (problem := progress.damaged.get(key_of(step, info.save_id))) is not None:
                raise Damaged(f"step {step}", "an uploaded save", problem)
            if not self._client.go_on(deadline):
                raise WaitTimeout(
                    f"step {step}: expected it to be uploaded to {self} within "
                    f"{self._readable_secs:g} s (Timeouts.save_secs), since each process has a "
                    "part of it in its own staging directory, found "
                    f"{progress.problem or 'the upload in progress'}; restore again, or check the "
                    "network"
                )

    def _bring_near(self, step: int) -> None:
        local, bases = self._local.saves(), self.compacted()
        infos = {number: info for number, info in self.saves().items() if info is not None}
        chain_of = eviction.chain_steps(step, infos) & infos.keys()
        newest_base = max((one for one in chain_of if infos[one].save_id in bases), default=0)
        missing = [one for one in chain_of if one >= newest_base and one not in local]
        with self._leaving:
            self._client.recover([infos[one].save_id for one in sorted(missing)])

    def source_of(self, save_id: SaveId) -> str:
        """See ``Steps``."""
        info = None if self.apart else self._local.saves().get(save_id.step)
        if info is None or info.save_id != save_id:
            return super().source_of(save_id)
        return self._client.source_of(save_id)

    def unusable(self) -> Mapping[int, RestoreError]:
        """See ``Steps``: saves in replicas that could not be recovered."""
        return self._client.unusable

    def _at_remote(self) -> Committed:
        """The remote directory's contents, for readers.

        Only the leading process, its uploader and a compactor change it, so that process knows all
        but the newest uploads and bases.
        """
        if self._leads:
            return Committed(self._journal, hidden=lambda: self._hidden, asks=False)
        return Committed(self._journal)

    @property
    def log_at(self) -> WalLocation:
        """See ``Steps``.

        A single staging directory may lack part of the log, so it is read remotely.
        """
        at_root = JournaledLogs(self._journal.root, self._remote, self.topics)
        return at_root if self.apart else WalLocations([super().log_at, at_root])

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

    def stands(self, save_id: SaveId) -> bool:
        """See ``Held``; the answer is the same in every process."""
        shown = self._remote().uploads - self._hidden
        return any(found == save_id for _, found in shown)

    def base_of(self, save_id: SaveId) -> BaseRef | None:
        """See ``Held``."""
        for one in self._bases_at_root():
            if one.save_id == save_id:
                return BaseRef(save_id=save_id, nbytes=one.nbytes)
        return None

    def metadata(self, step: int) -> bytes:
        """See ``Steps``; read once."""
        info = self.saves().get(step)
        if info is None:
            return super().metadata(step)
        if info.save_id not in self._metadata and self.apart:
            with contextlib.suppress(RestoreError, StorageError):
                path = self._local.path / str(step) / names.STEP_METADATA
                self._metadata[info.save_id] = files.read_bytes(path)
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
        near = self._client.held()
        found = False
        for number in eviction.chain_steps(step, infos) & local.keys():
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
                    self._client.recover([save_id])
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

    def _at_root(self) -> dict[int, Standing]:
        """Remote steps, as far as known."""
        steps = self._journal.known.steps
        return {step: one for step, one in steps.items() if self._is_shown(one)}

    def _bases_at_root(self) -> list[Standing]:
        """Remote compacted bases, as far as known."""
        return [
            one
            for one in self._journal.known.bases.values()
            if one.item == self.item and self._is_shown(one)
        ]

    def _is_shown(self, one: Standing) -> bool:
        return (one.unit, one.save_id) not in self._hidden

    # ---- lease

    def check_lease(self, *, ask: bool = False) -> None:
        """See ``Held``."""
        self._local.check_lease()
        self._client.require_claim()
        if ask and isinstance(self._journal, Journal):
            self._journal.check()

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """See ``Held``."""
        if self._is_beside:
            return
        with self._ordering:
            orders = self._orders
            if not orders.began:
                self._order(began=True, goes_on=goes_on)
            if orders.line(run) is None:
                self._order(lines=self._lines(goes_on, run))
                self._client.start()

    def _lines(self, goes_on: SaveId | None, run: str) -> tuple[Line, ...]:
        """Lineages of the staged runs, and of a run that begins."""
        past: dict[str, int] = {}
        if goes_on is not None:
            before = self._orders.line(goes_on.run)
            past = {goes_on.run: goes_on.attempt} if before is None else before.followed(goes_on)
        here = {info.save_id.run for info in self._local.saves().values() if info is not None}
        kept = [one for one in self._orders.lines if one.run in here]
        begun = Line(
            run=run,
            epoch=self._orders.epoch,
            holder=self._orders.holder,
            era=self._orders.era,
            past=past,
        )
        return (*kept, begun)

    # ---- rollback and removal

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Held``; the leading process rolls the remote directory back."""
        if self._is_beside:
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
            self._order(rolled_back=[one], gone=one.saves, **self._orders.next_era(run))
            self._hide(_given_up(one, self.item))
            self._client.forget(one.saves)
        if self._leads and (at_root := sorted(later.keys() - {*moved})):
            events.warn(
                f"{self}: resuming from step {step}, the later steps {at_root} are rolled back"
            )
        return sorted({*later, *moved})

    def remove_steps(self, steps: Collection[int]) -> None:
        """See ``Held``; the leading process retires saves, and the others evict their parts."""
        if not self._leads:
            return
        with self._ordering:
            infos = self.saves()
            ids = {step: info.save_id for step in steps if (info := infos.get(step)) is not None}
            # Otherwise the other processes' parts would wait for this one forever.
            if not self.apart:
                self._local.remove_steps(steps)
                self._client.forget({*ids.values()})
            every = [
                Retired(number=0, step=step, item=None, save_id=save_id)
                for step, save_id in ids.items()
            ]
            self._retire(every, gone=() if self.apart else ids.values())

    def _retire(self, retired: Iterable[Retired], gone: Collection[SaveId] = ()) -> None:
        with self._ordering:
            every = [*retired]
            if every:
                self._order(retired=every, gone=gone)
                self._hide({(one.unit, one.save_id) for one in every})

    def _hide(self, units: Collection[tuple[Unit, SaveId]]) -> None:
        """Hides units that still exist remotely until the orders are carried out."""
        needed = self._journal.known.uploads | _gone(self._orders)
        self._hidden = (self._hidden & needed) | frozenset(units)

    def note_kept(self, kept: Kept | None) -> None:
        """See ``Held``."""
        self._local.note_kept(kept)

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Held``: also evicts from the staging directory."""
        if self._is_beside:
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
        rolled_back = local.entries(local.path / names.ROLLED_BACK)
        for folder in sorted(rolled_back, key=lambda one: one.lstat().st_mtime)[:-1]:
            local.remove(folder)

    def _tidy(self) -> None:
        """Evicts what the staging directory no longer needs, as far as known."""
        self._look()
        if not self._is_beside:
            with self._leaving:
                self._evict()

    def _look(self) -> None:
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
        """Evicts uploaded saves that are in none of the newest chains."""
        if self.apart:
            self._evict_parts()
            return
        infos = {step: info for step, info in self._local.saves().items() if info is not None}
        at_root = {one.save_id for one in self._at_root().values()}
        old = eviction.evictable(
            infos, self._tiers.keep_local, lambda info: info.save_id in at_root
        )
        surplus = [step for step in old if not self._readers[step]]
        for step in surplus:
            with contextlib.suppress(DeltackptError):
                self.metadata(step)
        self._remove_evicted(surplus)

    def _remove_evicted(self, steps: Collection[int]) -> None:
        self._local.remove_steps(steps)
        if steps:
            self._client.look()  # Peers drop their copies.

    def _evict_parts(self) -> None:
        """Evicts parts of saves that were uploaded, or never will be."""
        progress, newest = self._client.progress(), max(self._local.steps(), default=None)
        surplus = [
            step
            for step, info in self._local.saves().items()
            if info is not None
            and step != newest
            and not self._readers[step]
            and (
                self._client.is_uploaded(info.save_id, progress)
                or key_of(step, info.save_id) in progress.damaged
            )
        ]
        self._remove_evicted(surplus)

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
        """See ``Held``."""
        return self._client.make_room(nbytes * self._processes)

    def give_up(self) -> None:
        """See ``Held``."""
        self._client.give_up()

    def committed(self) -> None:
        """See ``Held``."""
        self._is_unconfirmed = True
        self._client.committed(self._orders)

    def settle(self, timeout_secs: float) -> None:
        """See ``Held``."""
        tier = self._tiers.wait_for
        if tier == "staging":
            return
        self._client.wait(tier, timeout_secs)
        if tier == "remote":
            self._confirm()
        self._client.check_damaged(tier)
        with contextlib.suppress(StorageError):  # Retried after the next save.
            self._tidy()

    def _confirm(self) -> None:
        """Checks with a listing and a read that the remote directory holds the uploaded saves.

        Raises:
          FencedError: it was emptied, or another trainer took it before the newest save was made.
        """
        self._look()
        if isinstance(self._journal, Journal):
            try:
                self._journal.confirm()
            except FencedError:
                # The next trainer continues from the steps that were confirmed before.
                if self._is_unconfirmed or self._journal.is_replaced:
                    raise
        self._is_unconfirmed = False

    def news(self) -> list[Event]:
        """See ``Held``."""
        return self._client.news()

    def abandon(self) -> None:
        """See ``Steps``."""
        self.give_up()
        self._tender.shutdown()
        with contextlib.ExitStack() as parts:
            parts.callback(self._client.close)
            parts.callback(self.undo.close)
            if self._is_in_force():
                parts.callback(self._local.abandon)
                with contextlib.suppress(FencedError, StorageError):
                    self._finish_start()  # An interrupt may have ended ``confirm``.

    def close(self) -> None:
        """Closes everything that is open; the uploader continues until nothing is left."""
        self.give_up()
        self._tender.shutdown()
        with contextlib.ExitStack() as parts:
            parts.callback(self._client.close)
            parts.callback(self._local.close)
            self._tended.result()
            with contextlib.suppress(StorageError):
                self._tidy()

    def _newest_local(self) -> SaveId | None:
        """The newest staged save."""
        infos = self._local.saves()
        known = [info.save_id for _, info in sorted(infos.items()) if info is not None]
        return known[-1] if known else None

    def _order(
        self,
        *,
        rolled_back: Iterable[RollBack] = (),
        retired: Iterable[Retired] = (),
        gone: Collection[SaveId] = (),
        **changes: Any,
    ) -> None:
        """Writes new orders, without those of the old ones that are done.

        Args:
          rolled_back: new rollbacks.
          retired: units that are unneeded once the newest staged save is uploaded.
          gone: saves that were removed deliberately: retirements that wait for one of them wait for
            the newest instead.
          **changes: new values of additional fields.
        """
        # The orders may be those of the next trainer on this staging directory.
        self._local.check_lease()
        old, progress = self._orders, self._client.progress()
        number, newest = old.number + 1, self._newest_local()
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
            self._client.wake()
        else:
            self._stage.announce(self._orders)


def _gone(orders: Orders) -> Hidden:
    """Units that must not remain remotely."""
    back = (_given_up(one, orders.item) for one in orders.rolled_back)
    return frozenset({(one.unit, one.save_id) for one in orders.retired}.union(*back))


def _given_up(one: RollBack, item: str) -> Hidden:
    """Units that were rolled back: steps, and the bases that replace them."""
    return frozenset(
        (Unit(save_id.step, of), save_id) for save_id in one.saves for of in (None, item)
    )
