# SPDX-License-Identifier: Apache-2.0
"""A root that is a bucket, as a trainer holds it: its saves are made in a stage, and promoted.

Nothing here waits for the bucket but opening, a restore of what has left the stage, and ``settle``:
the trainer writes orders into the stage, and learns from the promoter's progress what is done.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    RestoreError,
    SaveFailed,
    StorageError,
    WaitTimeout,
)
from deltackpt.events import Event
from deltackpt.format import chain, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import BaseRef, SaveId
from deltackpt.ledger.committed import Catalog, Committed
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import Standing, State, Unit
from deltackpt.ledger.held import Held
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.kept import Kept
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.promoted_log import JournaledLogs
from deltackpt.ledger.view import JournalView
from deltackpt.options import Tiers
from deltackpt.reading import inventory
from deltackpt.reading.log_places import LogLayers, LogPlaces
from deltackpt.storage import files
from deltackpt.storage.store import FileStore, Missing, Spot
from deltackpt.tiers import eviction
from deltackpt.tiers.lag import Lag
from deltackpt.tiers.layers import Hidden, Layers, Seen
from deltackpt.tiers.near import Near
from deltackpt.tiers.running import Running
from deltackpt.tiers.stage import (
    Line,
    Orders,
    Retired,
    RollBack,
    Stage,
    key_of,
)

#: Between two looks at the progress of a promoter.
_POLL_SECS = 0.02


class StagedRoot(Held):
    """The stage of a trainer, and the root behind it."""

    def __init__(
        self,
        stage: Stage,
        local: Root,
        journal: JournalView,
        orders: Orders,
        tiers: Tiers,
        near: Near,
        *,
        processes: int = 1,
        readable_secs: float = 0.0,
        cpus: Collection[int] | None = None,
    ):
        """Made by ``opening.open_root``.

        Args:
          stage: where saves are made.
          local: its checkpoint directory, whose lease is held.
          journal: of the root, which is claimed.
          orders: those that stand in the stage, under that claim.
          tiers: as the user wants them.
          near: what is held near the stage.
          processes: how many save together.
          readable_secs: the longest wait for a step that comes to the root.
          cpus: where the promoter runs.
        """
        self._readable_secs = readable_secs
        self._stage = stage
        self._local = local
        self._near = near
        self._journal = journal
        self._orders = orders
        self._tiers = tiers
        #: What is at the root until the orders are carried out, and no more here.
        self._hidden = _gone(orders)
        #: How many processes write into the stage.
        self._processes = 1 if orders.apart else processes
        self.apart = orders.apart
        self._layers = Layers(
            FileStore(local.path), Committed(self._catalog()), orders.url, apart=orders.apart
        )
        super().__init__(Spot(self._layers, ""), local.item, local.path, orders.url)
        self._running = Running(stage, cpus=cpus)
        self._lag = Lag(stage, local, journal, orders.holder, orders.process)
        #: Held while a step leaves the stage, and while one is taken to be read there.
        self._leaving = threading.Lock()
        #: How many read the files of a step, which does not leave the stage meanwhile.
        self._readers: collections.Counter[int] = collections.Counter()
        #: Orders are written, and the promoter started, by one thread at a time.
        self._ordering = threading.RLock()
        self._metadata: dict[SaveId, bytes] = {}
        self._warnings: list[str] = []
        self._given_up = threading.Event()
        self._tended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._tended.set_result(None)
        self._tender = concurrent.futures.ThreadPoolExecutor(1, "deltackpt-tiers")
        if not orders.apart and (self._lag.behind() or self.log_dir.exists()):
            self._start()

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """See ``Held``: a save of which a process has no part can never come to the root."""
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
                f"{self._stage.path}: expected a part of steps {lost} in the stage of each process "
                f"of the job, found that some have none; what is here was moved to {aside}"
            )
            gone = {infos[step].save_id for step in lost}
            self._near.forget(gone)
            with self._ordering:
                self._orders = self._orders.without(gone)
                self._order()
                self._hidden = _gone(self._orders)
        if self._lag.behind():
            self._start()

    def await_readable(self, step: int) -> None:
        """See ``Steps``: a step of which each stage has a part is read from the root.

        Of another the saves that have left the stage are brought back from what is nearer.
        """
        if not self.apart:
            self._bring_near(step)
            return
        deadline = time.monotonic() + self._readable_secs
        self._running.hurry()
        while (info := self._local.saves().get(step)) is not None:
            self._look()
            progress = self._lag.progress
            if self._journal.known.held(info.save_id):
                return
            if (problem := progress.damaged.get(key_of(step, info.save_id))) is not None:
                raise Damaged(f"step {step}", "a save that comes to the root", problem)
            self._lag.require_claim()
            self._start()
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"step {step}: expected it at {self} within {self._readable_secs:g} s "
                    "(Timeouts.save_secs), since each process has a part of it in its own stage, "
                    f"found {progress.problem or 'it on its way'}; restore again, or look at the "
                    "network"
                )
            time.sleep(_POLL_SECS)

    def _bring_near(self, step: int) -> None:
        local, bases = self._local.saves(), self.compacted()
        infos = {number: info for number, info in self.saves().items() if info is not None}
        chain_of = eviction.chain_steps(step, infos) & infos.keys()
        newest_base = max((one for one in chain_of if infos[one].save_id in bases), default=0)
        missing = [one for one in chain_of if one >= newest_base and one not in local]
        with self._leaving:
            self._near.bring([infos[one].save_id for one in sorted(missing)])

    def source_of(self, save_id: SaveId) -> str:
        """See ``Steps``."""
        info = None if self.apart else self._local.saves().get(save_id.step)
        if info is None or info.save_id != save_id:
            return super().source_of(save_id)
        return self._near.source_of(save_id)

    def _catalog(self) -> Catalog:
        """What is at the root, for readers."""
        return Seen(self._journal, lambda: self._hidden)

    @property
    def log_at(self) -> LogPlaces:
        """See ``Steps``; of several stages none has all of a log, and the root names it."""
        at_root = JournaledLogs(self._journal.root, self._log_state)
        return at_root if self.apart else LogLayers([super().log_at, at_root])

    def _log_state(self) -> State:
        """What the root has of the log, as far as is known."""
        return self._journal.known

    # ---- what is committed

    def saves(self) -> dict[int, SaveInfo | None]:
        """See ``Steps``; what is at the root is known from its journal."""
        found: dict[int, SaveInfo | None] = {
            step: one.info for step, one in self._at_root().items()
        }
        return found | self._local.saves()

    def compacted(self) -> frozenset[SaveId]:
        """See ``Steps``."""
        return frozenset(one.save_id for one in self._bases_at_root())

    def stands(self, save_id: SaveId) -> bool:
        """See ``Held``."""
        shown = self._journal.known.uploads - self._hidden
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

    def newest_lease(self) -> Lease | None:
        """See ``Steps``."""
        claim = self._journal.known.claim
        return None if claim is None else claim.lease

    def found_damaged(self, step: int) -> bool:
        """See ``Steps``: copies in the stage of what is held elsewhere, too, are read again."""
        at_root, local = self._at_root(), self._local.saves()
        infos = {number: one.info for number, one in at_root.items()}
        infos |= {number: info for number, info in local.items() if info is not None}
        near = self._near.held()
        found = False
        for number in eviction.chain_steps(step, infos) & local.keys():
            save_id = infos[number].save_id if number in infos else None
            if number not in at_root and save_id not in near:
                continue
            if inventory.verify_step(self._local.at(number), self.item):
                self._local.set_aside(number, self._stage.aside("damaged") / uuid.uuid4().hex)
                events.warn(
                    f"{self._stage.path}: step {number} is damaged in the stage, was moved to "
                    "aside/damaged, and is read from where else it is held"
                )
                if save_id in near and save_id is not None:
                    self._near.bring([save_id])
                found = True
        return found

    @contextlib.contextmanager
    def local(self, step: int, name: str) -> Iterator[Path]:
        """See ``Steps``; what is read in the stage stays there meanwhile."""
        with self._leaving:
            self._readers[step] += 1
        try:
            with super().local(step, name) as folder:
                yield folder
        finally:
            with self._leaving:
                self._readers[step] -= 1

    def _held_at(self, step: int) -> Spot:
        return self._layers.at(str(step))

    def _scratch(self) -> Path:
        folder = self._stage.fetched
        files.make_folder(folder)
        return folder

    def _at_root(self) -> dict[int, Standing]:
        """Steps at the root, as far as is known."""
        steps = self._journal.known.steps
        return {step: one for step, one in steps.items() if self._is_shown(one)}

    def _bases_at_root(self) -> list[Standing]:
        """Compacted bases at the root, as far as is known."""
        return [
            one
            for one in self._journal.known.bases.values()
            if one.item == self.item and self._is_shown(one)
        ]

    def _is_shown(self, one: Standing) -> bool:
        return (one.unit, one.save_id) not in self._hidden

    # ---- who may write

    def check_lease(self, *, ask: bool = False) -> None:
        """See ``Held``."""
        self._local.check_lease()
        self._lag.require_claim()
        if ask and isinstance(self._journal, Journal):
            self._journal.check()

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """See ``Held``."""
        with self._ordering:
            orders = self._orders
            if not orders.began:
                self._order(began=True, goes_on=goes_on)
            if orders.line(run) is None:
                self._order(lines=self._lines(goes_on, run))
                self._start()

    def _lines(self, goes_on: SaveId | None, run: str) -> tuple[Line, ...]:
        """The lines of the runs in the stage, and that of a run that begins."""
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

    # ---- what becomes of what is committed

    def roll_back(self, step: int, run: str) -> list[int]:
        """See ``Held``."""
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
            # Those in the stage first: what stands there is promoted, whatever was ordered before.
            moved = self._local.roll_back(step, run)
            if not later:
                return moved
            # First the orders, which say to the next start that what is held near does not count.
            self._order(rolled_back=[one], gone=one.saves, era=self._orders.era + 1)
            self._hide(_given_up(one, self.item))
            self._near.forget(one.saves)
        if at_root := sorted(later.keys() - {*moved}):
            events.warn(
                f"{self}: going on from step {step}, the later steps {at_root} are rolled back"
            )
        return sorted({*later, *moved})

    def remove_steps(self, steps: Collection[int]) -> None:
        """See ``Held``."""
        with self._ordering:
            infos = self.saves()
            ids = {step: info.save_id for step in steps if (info := infos.get(step)) is not None}
            if not self.apart:  # Else the others' parts would wait for this one for ever.
                self._local.remove_steps(steps)
                self._near.forget({*ids.values()})
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
        """Shows units no more, which are at the root until the orders are carried out."""
        needed = self._journal.known.uploads | _gone(self._orders)
        self._hidden = (self._hidden & needed) | frozenset(units)

    def note_kept(self, kept: Kept | None) -> None:
        """See ``Held``."""
        self._local.note_kept(kept)

    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """See ``Held``: what need not be in the stage leaves it, too."""
        self._local.collect(protected)
        if self._tended.done():
            self._tended.result()
            self._tended = self._tender.submit(self._tend, protected)

    def _tend(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        self._tidy()
        self._drop_bases(protected)
        # The stage is no archive: what was at the root is named by its journal.
        rolled_back = [*(self._local.path / names.ROLLED_BACK).glob("*")]
        for folder in sorted(rolled_back, key=lambda one: one.stat().st_mtime)[:-1]:
            files.remove_tree(folder)

    def _tidy(self) -> None:
        """Removes from the stage what need not be there, as far as is known by now."""
        self._look()
        with self._leaving:
            self._evict()

    def _look(self) -> None:
        """Learns from the promoter what is at the root by now; the root itself is not asked."""
        if self._lag.progress.entry <= self._journal.known.entry.number:
            return
        data = self._stage.entry()
        # Half of one, of a power cut, is replaced by the next; the promoter tells what is wrong
        # with the root.
        with contextlib.suppress(RestoreError, StorageError, Missing):
            if data is not None:
                self._journal.learn(data, f"{self._stage.path}/entry.msgpack")

    def _evict(self) -> None:
        """Removes from the stage what is at the root and in none of the newest chains."""
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
        self._local.remove_steps(surplus)

    def _evict_parts(self) -> None:
        """Removes parts of saves that came to the root, or never will."""
        progress, newest = self._lag.progress, max(self._local.steps(), default=None)
        surplus = [
            step
            for step, info in self._local.saves().items()
            if info is not None
            and step != newest
            and not self._readers[step]
            and (
                self._lag.is_held(info.save_id, progress)
                or key_of(step, info.save_id) in progress.damaged
            )
        ]
        self._local.remove_steps(surplus)

    def _drop_bases(self, protected: Callable[[], frozenset[SaveId]]) -> None:
        """Retires compacted bases in which no chain ends."""
        bases = self._bases_at_root()
        if not bases:
            return
        # As for a directory: asked for after the bases were listed.
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

    # ---- between stage and root

    def make_room(self, nbytes: int) -> str | None:
        """See ``Held``."""
        most, nbytes = self._tiers.stage_bytes, nbytes * self._processes
        while (behind := sum(self._lag.behind().values())) and behind + nbytes > most:
            self._lag.require_claim()
            self._start()
            if self._given_up.wait(_POLL_SECS):
                raise StorageError(
                    f"{self._stage.path}: expected room for a save of {nbytes:,} bytes beside "
                    f"{behind:,} that are not at {self} yet (Tiers.stage_bytes {most:,}), found "
                    "none when the manager was closed; the promoter goes on, save again then"
                )
        if nbytes <= most:
            return None
        return (
            f"a save of {nbytes:,} bytes is larger than Tiers.stage_bytes, {most:,}, and went alone"
        )

    def give_up(self) -> None:
        """See ``Held``."""
        self._given_up.set()

    def committed(self) -> None:
        """See ``Held``."""
        self._start()
        self._running.wake()
        self._meet_again()
        self._near.hold(
            self._local.saves().values(),
            self.item,
            self._orders,
            may_go=self._may_go,
            wait=self._wait_for_root,
        )

    def _meet_again(self) -> None:
        """Finds neighbours anew where they do not take what they are given."""
        if self._lag.pushed.problem is not None:
            with contextlib.suppress(DeltackptError):  # The problem is told, and stands.
                self._near.find_again()

    def _may_go(self, save_id: SaveId) -> bool:
        """Whether extents need not hold a save where another one needs the room.

        It is at the root, can never come there, or left the stage on purpose.
        """
        infos = self._local.saves()
        info = infos.get(save_id.step)
        if info is None or info.save_id != save_id:
            # One whose manifest cannot be read may be it.
            return info is not None or save_id.step not in infos
        progress = self._lag.progress
        return self._lag.is_held(save_id, progress) or (
            key_of(save_id.step, save_id) in progress.damaged
        )

    def _wait_for_root(self) -> None:
        self._lag.require_claim()
        self._start()
        if self._given_up.wait(_POLL_SECS):
            raise StorageError(
                f"{self._stage.path}: expected room in Tiers.extents for a save, found none that "
                f"is at {self} yet when the manager was closed; the promoter goes on, save again "
                "then"
            )

    def settle(self, timeout_secs: float) -> None:
        """See ``Held``."""
        if self._tiers.wait_for == "stage":
            return
        deadline = time.monotonic() + timeout_secs
        if self._tiers.wait_for == "root":
            self._running.hurry()
        while behind := self._lag.short_of(self._tiers.wait_for):
            self._lag.require_claim()
            self._start()
            self._meet_again()
            if time.monotonic() >= deadline:
                problem = self._lag.problem(self._tiers.wait_for) or self._running.ended
                raise WaitTimeout(
                    f"{self}: expected every save at the {self._tiers.wait_for} within "
                    f"{timeout_secs} s (ManagerOptions.timeouts), found {len(behind)} saves of "
                    f"{sum(behind.values()):,} bytes still in the stage {self._stage.path}"
                    f"{f', because {problem}' if problem else ''}; the promoter goes on by itself: "
                    "wait() again, or look at the network"
                )
            time.sleep(_POLL_SECS)
        problem = self._lag.newly_damaged(self._tiers.wait_for)
        if problem is not None:
            where = str(self) if self._tiers.wait_for == "root" else "the neighbours"
            raise SaveFailed(
                f"a save that was made in the stage cannot come to {where}: {problem}; the next "
                "save is a base"
            )
        with contextlib.suppress(StorageError):  # Tried again after the next save.
            self._tidy()

    def news(self) -> list[Event]:
        """See ``Held``."""
        for text in self._drain():
            events.warn(text)
        return self._lag.news()

    def close(self) -> None:
        """Ends what is open; the promoter goes on until nothing is left."""
        self.give_up()
        self._tender.shutdown()
        try:
            self._tended.result()
            with contextlib.suppress(StorageError):
                self._tidy()
            self._local.close()
        finally:
            self._near.close()
            self._running.close()

    def _newest_local(self) -> SaveId | None:
        """The newest save in the stage."""
        infos = self._local.saves()
        known = [info.save_id for _, info in sorted(infos.items()) if info is not None]
        return known[-1] if known else None

    def _start(self) -> None:
        with self._ordering:
            warning = self._running.start()
            if warning is not None:
                self._warnings.append(warning)

    def _drain(self) -> list[str]:
        with self._ordering:
            found, self._warnings = self._warnings, []
        return found

    def _order(
        self,
        *,
        rolled_back: Iterable[RollBack] = (),
        retired: Iterable[Retired] = (),
        gone: Collection[SaveId] = (),
        **changes: Any,
    ) -> None:
        """Writes new orders; what is done of the old ones is left out.

        Args:
          rolled_back: what training went back behind.
          retired: what nothing needs any more, once the newest save of the stage is at the root.
          gone: saves that were removed on purpose: what waits for one waits for the newest instead.
          **changes: of further fields.
        """
        old, progress = self._orders, self._lag.progress
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
        self._stage.order(self._orders)
        self._running.wake()


def _gone(orders: Orders) -> Hidden:
    """What is not to be at the root."""
    back = (_given_up(one, orders.item) for one in orders.rolled_back)
    return frozenset({(one.unit, one.save_id) for one in orders.retired}.union(*back))


def _given_up(one: RollBack, item: str) -> Hidden:
    """What training went back behind: steps, and the bases that stand for them."""
    return frozenset(
        (Unit(save_id.step, of), save_id) for save_id in one.saves for of in (None, item)
    )
