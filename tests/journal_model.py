# SPDX-License-Identifier: Apache-2.0
"""Trainers, compactors and readers of one journal, in a random order of what they ask of the store.

Each actor is a thread that stops before every request; one at a time goes on, drawn from a seed.
Answers are lost, writes arrive long after they were given up, and old entries are collected as soon
as a few newer ones stand. What the actors were told is compared with what became of the root.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from unittest import mock

from store_suite import MemoryStore

from deltackpt.errors import (
    BrokenChain,
    DeltackptError,
    FencedError,
    StorageError,
    TargetDiffers,
)
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import ParentRef, SaveId
from deltackpt.ledger import entries, journal, view
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.storage.store import Exists, Missing, Spot


class Unanswered(StorageError):
    """What a client says that has waited long enough."""


class _Stopped(BaseException):
    """The actor was killed."""


class Turns:
    """Who goes on: one actor at a time, drawn from a seed."""

    def __init__(self, drawn: random.Random):
        self._drawn = drawn
        self._waiting: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._killed: set[str] = set()
        self._here = threading.local()
        self.failures: list[BaseException] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Starts an actor, which waits for its first turn."""
        turn = threading.Semaphore(0)

        def run() -> None:
            self._here.name = name
            turn.acquire()
            try:
                if name not in self._killed:
                    work()
            except _Stopped:
                pass
            except BaseException as error:
                self.failures.append(error)
            del self._waiting[name]
            self._back.release()

        self._waiting[name] = turn
        threading.Thread(target=run, name=name, daemon=True).start()

    def wait(self) -> None:
        """Waits for the next turn of the actor that calls; one that is none goes on."""
        name = getattr(self._here, "name", None)
        if name is None:
            return
        self._back.release()
        self._waiting[name].acquire()
        if name in self._killed:
            raise _Stopped

    def kill(self, name: str) -> None:
        """The actor ends where it stands."""
        self._killed.add(name)

    def go(self) -> bool:
        """One actor goes on to its next request; whether there is any."""
        if not self._waiting:
            return False
        self._waiting[self._drawn.choice(sorted(self._waiting))].release()
        self._back.acquire()
        return True

    @property
    def names(self) -> list[str]:
        """Actors that have not ended."""
        return sorted(self._waiting)


class FaultyStore:
    """A store over a network that loses answers, and whose writes may arrive late."""

    def __init__(self, drawn: random.Random, turns: Turns, faults: float):
        self.url = "memory:"
        self.held = MemoryStore()
        self.turns = turns
        self.faults = faults
        #: Every object that was ever there.
        self.ever: dict[str, list[bytes]] = {}
        self._drawn = drawn
        self._late: list[Callable[[], None]] = []

    def arrive(self) -> None:
        """A write that was given up long ago arrives."""
        if self._late:
            self._late.pop(self._drawn.randrange(len(self._late)))()

    def _asked(self) -> None:
        self.turns.wait()
        if self._late and self._drawn.random() < 0.2:
            self.arrive()
        if self._drawn.random() < self.faults:
            raise Unanswered("no answer came in time")

    def get(self, key):
        self._asked()
        return self.held.get(key)

    def keys(self, folder, *, after=""):
        self._asked()
        return self.held.keys(folder, after=after)

    def put(self, key, data, *, absent=False):
        kept = bytes(data)

        def put() -> None:
            self.held.put(key, kept, absent=absent)
            self.ever.setdefault(key, []).append(kept)

        def late() -> None:
            try:
                put()
            except Exists:
                pass

        self.turns.wait()
        fate = self._drawn.random()
        if fate < self.faults / 3:
            raise Unanswered("lost on the way")
        if fate < self.faults * 2 / 3:
            self._late.append(late)
            raise Unanswered("on its way for long")
        put()
        if fate < self.faults:
            if absent and self._drawn.random() < 0.5:
                raise Exists("the client tried again by itself")
            raise Unanswered("its answer lost")

    def delete(self, keys):
        for key in [*keys]:
            self.turns.wait()
            if self._drawn.random() < self.faults / 2:
                self._late.append(lambda key=key: self.held.delete([key]))
                raise Unanswered("on its way for long")
            self.held.delete([key])


@dataclasses.dataclass
class Told:
    """What actors were told.

    Attributes:
      committed: prefixes whose commit returned, and what stood for them.
      claimed: epochs, by the actor that was given one.
    """

    committed: list[tuple[str, Standing]] = dataclasses.field(default_factory=list)
    claimed: list[int] = dataclasses.field(default_factory=list)


class World:
    """One root, and those who use it."""

    def __init__(self, seed: int, *, faults: float = 0.06):
        self.drawn = random.Random(seed)
        self.turns = Turns(self.drawn)
        self.store = FaultyStore(self.drawn, self.turns, faults)
        self.root = Spot(self.store, "run")
        self.told = Told()
        self._number = 0

    def run(self, trainers: int = 4, *, most: int = 3000) -> None:
        """Lets everybody work, kills some, starts others, until all have ended."""
        with (
            mock.patch.object(view, "KEPT_ENTRIES", 3),
            mock.patch.object(journal, "KEPT_ENTRIES", 3),
            mock.patch.object(journal, "_DELETED_AT_ONCE", 1),
            mock.patch.object(entries, "INLINE", 4),
            mock.patch.object(entries, "PAGE", 2),
        ):
            left = trainers
            for _ in range(most):
                if left and (not self.turns.names or self.drawn.random() < 0.02):
                    left -= 1
                    self._start("trainer", self.train)
                    if self.drawn.random() < 0.6:
                        self._start("compactor", self.compact)
                    if self.drawn.random() < 0.6:
                        self._start("reader", self.read)
                if self.turns.names and self.drawn.random() < 0.002:
                    self.turns.kill(self.drawn.choice(self.turns.names))
                if not self.turns.go() and not left:
                    break
            for name in self.turns.names:
                self.turns.kill(name)
            while self.turns.go():
                pass
            while self.store._late:
                self.store.arrive()
            self.store.faults = 0
            if self.turns.failures:
                raise self.turns.failures[0]
            self.check()

    def _start(self, kind: str, work: Callable[[], None]) -> None:
        self._number += 1
        self.turns.start(f"{kind}-{self._number}", work)

    # ---- actors

    def tried(self, work: Callable[[], object], times: int = 4) -> object:
        """Tries again where no answer came, as a promoter does."""
        for _ in range(times):
            try:
                return work()
            except Unanswered:
                pass
        raise _Stopped

    def upload(self, unit: Unit, ledger: Journal) -> str:
        """Puts the files of a unit; a retried upload has a prefix of its own."""

        def put() -> str:
            prefix = ledger.prefix(unit)
            try:
                for name in ("x", "commit.msgpack"):
                    at = self.root / prefix / name
                    at.store.put(at.key, prefix.encode())
            except Unanswered:
                ledger.give_up(prefix)
                raise
            return prefix

        return self.tried(put)

    def train(self) -> None:
        """A trainer that goes on from the newest step."""
        ledger = Journal(self.root)
        self.told.claimed.append(self.tried(ledger.claim).lease.epoch)
        run = f"{self.drawn.getrandbits(64):016x}"
        newest = [*self.tried(ledger.state).steps.values()][-1:]
        if newest and self.drawn.random() < 0.3:
            newest = [self.drawn.choice([*ledger.known.steps.values()])]
        parent = newest[0].info if newest else None
        attempt = 0
        try:
            goes_on = parent.save_id if parent else None
            self.tried(lambda: ledger.begin(goes_on))
            if parent is not None:
                after = parent.save_id.step
                self.tried(lambda: ledger.roll_back(after, run))
            for _ in range(self.drawn.randrange(8)):
                attempt += 1
                step = parent.save_id.step + 1 if parent else 0
                delta = parent is not None and self.drawn.random() < 0.7
                info = SaveInfo(
                    save_id=SaveId(run, step, attempt),
                    kind="delta" if delta else "base",
                    parent=ParentRef(save_id=parent.save_id, step_dir=parent.step_dir)
                    if delta and parent
                    else None,
                    step_dir=str(step),
                    nbytes=10,
                )
                self.save(ledger, info, Unit(step))
                parent = info
                if self.drawn.random() < 0.3:
                    self.retain(ledger)
                if self.drawn.random() < 0.3:
                    self.tried(ledger.sweep)
        except (FencedError, BrokenChain):
            pass

    def save(self, ledger: Journal, info: SaveInfo, unit: Unit) -> None:
        """Uploads and commits; now and then it is uploaded again before that is known."""
        for _ in range(4):
            prefix = self.upload(unit, ledger)
            standing = Standing.of(info, unit, prefix, stored_bytes=2, crc32c=1)
            try:
                stands = ledger.commit(standing)
            except Unanswered:
                if self.drawn.random() < 0.5:
                    ledger.give_up(prefix)
                    if self.drawn.random() < 0.5:
                        self.tried(ledger.sweep)
                    continue
                stands = self.tried(lambda standing=standing: ledger.commit(standing))
            except BrokenChain:
                ledger.give_up(prefix)
                raise
            self.told.committed.append((prefix, stands))
            if stands.prefix != prefix:
                ledger.give_up(prefix)
            return
        raise _Stopped

    def retain(self, ledger: Journal) -> None:
        """Removes what the newest chain does not need."""
        state = self.tried(ledger.state)
        steps = [*state.steps.values()]
        first = max((n for n, one in enumerate(steps) if one.kind == "base"), default=0)
        old = [one.unit for one in steps[:first]]
        gone = [unit for unit in state.bases if Unit(unit.step) in old]
        try:
            ledger.retire([*old, *gone])
        except Unanswered:
            pass

    def compact(self) -> None:
        """Folds the newest delta, under whatever claim there is."""
        for _ in range(3):
            ledger = Journal(self.root)
            try:
                self.tried(ledger.resume)
                steps = [*ledger.known.steps.values()]
                if not steps:
                    continue
                of = self.drawn.choice(steps)
                unit = Unit(of.step, "embeddings")
                info = dataclasses.replace(of.info, kind="base", parent=None)
                self.save(ledger, info, unit)
            except (FencedError, BrokenChain, TargetDiffers):
                pass

    def read(self) -> None:
        """Restores: each step that is listed is whole, as long as it is listed."""
        shown = JournalView(self.root)
        for _ in range(6):
            try:
                state = shown.state()
            except Unanswered:
                continue
            for one in state.standings.values():
                if one.parent is not None:
                    assert state.stands(one.parent.save_id) or any(
                        base.save_id == one.save_id for base in state.bases.values()
                    ), one
                try:
                    at = self.root / one.prefix / "x"
                    assert at.store.get(at.key) == one.prefix.encode()
                except Unanswered:
                    continue
                except Missing:
                    newer = self.tried(shown.state)
                    assert one.prefix not in {
                        standing.prefix for standing in newer.standings.values()
                    }, f"{one.prefix} is listed and has no files"

    # ---- what became of it

    def history(self) -> list[entries.Entry]:
        """The entries that were ever in force, newest first."""
        shown = JournalView(self.root).state().entry
        found = [shown] if shown.number else []
        while found and found[-1].number > 1:
            before = found[-1].number - 1
            ever = self.store.ever[self.root.key + "/" + view.entry_name(before)]
            every = [entries.entry_from(data, name="", number=before) for data in ever]
            found += [one for one in every if one.nonce == found[-1].previous]
            assert found[-1].number == before, f"entry {before} is not what the next one follows"
        return found

    def check(self) -> None:
        """Compares what was told with what is in force."""
        history = self.history()
        epochs = [claim.lease.epoch for entry in history[:1] for claim in entry.claims]
        assert epochs == [*range(1, len(epochs) + 1)] or len(epochs) == entries.MOST_CLAIMS
        assert len(set(self.told.claimed)) == len(self.told.claimed), "two hold one epoch"
        assert {*self.told.claimed} <= {*epochs}
        ever = {}
        for entry in history:
            inline = (*entry.standings, *(one.standing for one in entry.rolled_back))
            ever.update((one.prefix, one) for one in inline)
        for key, datas in self.store.ever.items():
            if f"/{entries.PAGES}/" in key:
                for data in datas:
                    for one in entries.page_from(data, name=key).standings:
                        ever.setdefault(one.prefix, one)
        for prefix, stands in self.told.committed:
            assert stands.prefix in ever, f"{prefix} was told to be committed, and never was"
        state = JournalView(self.root).state()
        for one in state.standings.values():
            at = self.root / one.prefix
            assert len(at.keys()) == 2, f"{one.prefix} is committed and not whole"
        if history:
            # Whoever comes next leaves nothing that nobody names.
            last = Journal(self.root)
            last.claim()
            last.sweep()
            there = {
                key
                for folder in (entries.SAVES, entries.BASES)
                for key in (self.root / folder).keys()
            }
            named = {prefix.partition("/")[2] for prefix in last.known.prefixes}
            for key in there:
                assert any(key.startswith(f"{prefix}/") for prefix in named), key


def errors_of(seed: int, **how: float) -> DeltackptError | AssertionError | None:
    """What goes wrong with a seed, None where nothing does."""
    try:
        World(seed, **how).run()
    except (DeltackptError, AssertionError) as error:
        return error
    return None
