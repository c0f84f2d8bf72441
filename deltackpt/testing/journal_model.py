# SPDX-License-Identifier: Apache-2.0
"""Trainers, compactors and readers of one journal, with their requests in a random order.

Each actor is a thread that stops before every request; one at a time continues, chosen by a seed.
Answers are lost, writes are executed long after the client gave up, and old entries are deleted
after a few newer ones. In the end, what the calls returned is compared with what is stored.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
import types
from collections.abc import Callable
from typing import TypeVar, cast
from unittest import mock

from deltackpt.errors import BrokenChain, FencedError, TargetDiffers
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo
from deltackpt.ledger import entries, journal, lease, view
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.storage.store import Exists, Missing, Store, StorePath, Unanswered
from deltackpt.testing.memory_store import MemoryStore

_T = TypeVar("_T")

#: Probability per turn that an entry, or one of its copies, is damaged.
_DAMAGES = 0.02


class _Stopped(BaseException):
    pass


class _Turns:
    """Runs actors in turns, in a random order."""

    def __init__(self, drawn: random.Random):
        self._drawn = drawn
        self._waiting: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._killed: set[str] = set()
        self._here = threading.local()
        self.failures: list[BaseException] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
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
        """Waits for the next turn of the calling actor; other threads continue at once."""
        name = getattr(self._here, "name", None)
        if name is None:
            return
        self._back.release()
        self._waiting[name].acquire()
        if name in self._killed:
            raise _Stopped

    def kill(self, name: str) -> None:
        self._killed.add(name)

    def go(self) -> bool:
        """Runs one actor up to its next request; False if all have ended."""
        if not self._waiting:
            return False
        self._waiting[self._drawn.choice(sorted(self._waiting))].release()
        self._back.acquire()
        return True

    @property
    def names(self) -> list[str]:
        return sorted(self._waiting)


class _FaultyStore:
    """A store behind a network that loses answers and delays writes."""

    def __init__(self, store: Store, drawn: random.Random, turns: _Turns, faults: float):
        self.url = store.url
        self.held = store
        self.turns = turns
        self.faults = faults
        #: Every version of every object.
        self.ever: dict[str, list[bytes]] = {}
        self._drawn = drawn
        self._late: list[Callable[[], None]] = []

    def arrive(self) -> None:
        """Executes a write that its client gave up long ago."""
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
        """Writes an object, possibly later or without an answer."""
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
                raise Exists("an entry that the client sent twice")
            raise Unanswered("its answer lost")

    def delete(self, keys):
        for key in [*keys]:
            self.turns.wait()
            if self._drawn.random() < self.faults / 2:
                self._late.append(lambda key=key: self.held.delete([key]))
                raise Unanswered("on its way for long")
            self.held.delete([key])


@dataclasses.dataclass
class Observed:
    """What the actors observed.

    ``committed`` maps the prefixes whose commit returned to the record that it returned.
    ``withdrawn`` epochs were, or may have been, withdrawn; ``claimed`` excludes withdrawn ones.
    ``rolled_back`` holds the prefixes of saves whose rollback returned.
    """

    committed: list[tuple[str, CatalogEntry]] = dataclasses.field(default_factory=list)
    claimed: list[int] = dataclasses.field(default_factory=list)
    withdrawn: set[int] = dataclasses.field(default_factory=set)
    rolled_back: set[str] = dataclasses.field(default_factory=set)
    damaged: int = 0


class JournalModel:
    """One root with a journal, and its users.

    Attributes:
      observed: what the actors observed.

    Example:
      >>> JournalModel(seed=0).run()
    """

    def __init__(
        self,
        seed: int,
        *,
        store: Store | None = None,
        faults: float = 0.06,
        empties: bool = False,
        starts: float = 0.0,
    ):
        """Prepares a random run.

        Args:
          seed: determines the run.
          store: an empty store (default: a ``MemoryStore``).
          faults: share of requests that fail or whose answer is lost.
          empties: whether all objects are removed at some moment.
          starts: share of trainers whose claims are pending first; half of these fail to start.
        """
        self.drawn = random.Random(seed)
        self.turns = _Turns(self.drawn)
        self.store = _FaultyStore(store or MemoryStore(), self.drawn, self.turns, faults)
        self.root = StorePath(cast(Store, self.store), "run")
        self.observed = Observed()
        self.starts = starts
        #: Number of the turn before which every object is removed.
        self._emptied_at = self.drawn.randrange(20, 600) if empties else None
        #: Ledgers with a claim, and those whose claim was removed with everything else.
        self._holders: set[Journal] = set()
        self._lost: set[Journal] = set()
        self._number = 0

    def run(self, trainers: int = 4, *, most: int = 3000) -> None:
        """Starts, runs and kills actors until all have ended, then checks what is stored.

        Args:
          trainers: number of trainers.
          most: maximum number of turns before the actors are killed.

        Raises:
          AssertionError: a promise of the journal was broken.
        """
        with (
            mock.patch.object(view, "KEPT_ENTRIES", 3),
            mock.patch.object(journal, "KEPT_ENTRIES", 3),
            mock.patch.object(journal, "_DELETED_AT_ONCE", 1),
            # A holder waits for a starting trainer by a clock of its checks.
            mock.patch.object(lease, "GRACE_SECS", 30),
            mock.patch.object(lease, "time", _clock()),
        ):
            left = trainers
            for number in range(most):
                if number == self._emptied_at:
                    self.empty()
                    left = 0
                if left and (not self.turns.names or self.drawn.random() < 0.02):
                    left -= 1
                    self._start("trainer", self.train)
                    # A second writer's entry that was sent before the root is emptied may be
                    # stored after that, in place of a removed one.
                    if self.drawn.random() < 0.6 and self._emptied_at is None:
                        self._start("compactor", self.compact)
                    if self.drawn.random() < 0.6:
                        self._start("reader", self.read)
                if self.drawn.random() < _DAMAGES:
                    self.damage()
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

    def empty(self) -> None:
        """Removes every object and every delayed write."""
        self.store._late.clear()
        self.store.held.delete(self.store.held.keys(""))
        self._lost |= self._holders

    def damage(self) -> None:
        """Damages or removes a recent entry, or its copy, if the other one is intact."""
        held = self.store.held
        found = held.keys(f"run/{view.JOURNAL}")[-2:]
        pairs = [(key, copy) for key in found if (copy := entries.copied_name(key)) is not None]
        both = [pair for pair in pairs if pair[1] in found and len({*map(held.get, pair)}) == 1]
        if both:
            key = self.drawn.choice(self.drawn.choice(both))
            data = self._damaged(held.get(key))
            held.delete([key]) if data is None else held.put(key, data)
            self.observed.damaged += 1

    def _damaged(self, data: bytes) -> bytes | None:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data
        return self.drawn.choice((None, data[:middle], flipped))

    def _start(self, kind: str, work: Callable[[], None]) -> None:
        self._number += 1
        self.turns.start(f"{kind}-{self._number}", work)

    # ---- actors

    def retried(self, work: Callable[[], _T], times: int = 4) -> _T:
        """Retries after lost answers, like the uploader."""
        for _ in range(times):
            try:
                return work()
            except Unanswered:
                pass
        raise _Stopped

    def upload(self, unit: ObjectKey, ledger: Journal) -> str:
        """Puts the files of a unit; a retry uses another prefix."""

        def put() -> str:
            prefix = ledger.prefix(unit)
            try:
                for name in ("x", "commit.msgpack"):
                    at = self.root / prefix / name
                    at.store.put(at.key, prefix.encode())
            except Unanswered:
                ledger.abandon_upload(prefix)
                raise
            return prefix

        return self.retried(put)

    def train(self) -> None:
        """Runs a trainer that continues from the newest step, or from an older one."""
        ledger = Journal(self.root)
        pending = self.starts > 0 and self.drawn.random() < self.starts
        epoch = self.retried(lambda: ledger.claim(pending=pending)).lease.epoch
        self._holders.add(ledger)
        if pending and self.drawn.random() < 0.5:
            self.observed.withdrawn.add(epoch)
            self.retried(ledger.withdraw)
            return
        if pending:
            try:
                self.retried(ledger.start)
            except FencedError:
                return
        self.observed.claimed.append(epoch)
        run = f"{self.drawn.getrandbits(64):016x}"
        newest = [*self.retried(ledger.state).steps.values()][-1:]
        if newest and self.drawn.random() < 0.3:
            newest = [self.drawn.choice([*ledger.known.steps.values()])]
        parent = newest[0].info if newest else None
        attempt = 0
        try:
            resumed_from = parent.save_id if parent else None
            self.retried(lambda: ledger.start_run(resumed_from))
            if parent is not None:
                after = parent.save_id.step
                later = {one.prefix for one in ledger.known.entry.catalog if one.step > after}
                self.retried(lambda: ledger.roll_back(after, run))
                self.observed.rolled_back |= later
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
                self.save(ledger, info, ObjectKey(step))
                parent = info
                if self.drawn.random() < 0.5:
                    self.retried(ledger.copy_newest)
                if self.drawn.random() < 0.3:
                    self.retain(ledger)
                if self.drawn.random() < 0.3:
                    self.retried(ledger.sweep)
        except (FencedError, BrokenChain):
            pass

    def save(self, ledger: Journal, info: SaveInfo, unit: ObjectKey) -> None:
        """Uploads and commits; sometimes uploads again before the outcome is known."""
        for _ in range(4):
            prefix = self.upload(unit, ledger)
            standing = CatalogEntry(
                info=info, item=unit.item, prefix=prefix, stored_bytes=2, crc32c=1
            )
            is_lost = ledger in self._lost
            try:
                stands = ledger.commit(standing)
            except Unanswered:
                if self.drawn.random() < 0.5:
                    ledger.abandon_upload(prefix)
                    if self.drawn.random() < 0.5:
                        self.retried(ledger.sweep)
                    continue
                stands = self.retried(lambda standing=standing: ledger.commit(standing))
            except BrokenChain:
                ledger.abandon_upload(prefix)
                raise
            assert not is_lost, f"{prefix} was committed in a root that was emptied"
            self.observed.committed.append((prefix, stands))
            if stands.prefix != prefix:
                ledger.abandon_upload(prefix)
            return
        raise _Stopped

    def retain(self, ledger: Journal) -> None:
        """Retires what the newest chain does not need."""
        state = self.retried(ledger.state)
        steps = [*state.steps.values()]
        first = max((n for n, one in enumerate(steps) if one.info.kind == "base"), default=0)
        old = {one.object_key for one in steps[:first]}
        try:
            ledger.retire(
                lambda state: (
                    one.prefix for unit, one in state.catalog.items() if ObjectKey(unit.step) in old
                )
            )
        except Unanswered:
            pass

    def compact(self) -> None:
        """Compacts a step, under the current claim."""
        for _ in range(3):
            ledger = Journal(self.root)
            try:
                self.retried(lambda ledger=ledger: ledger.resume(wait=True))
                self._holders.add(ledger)
                steps = [*ledger.known.steps.values()]
                if not steps:
                    continue
                of = self.drawn.choice(steps)
                unit = ObjectKey(of.step, "embeddings")
                info = dataclasses.replace(of.info, kind="base", parent=None)
                self.save(ledger, info, unit)
            except (FencedError, BrokenChain, TargetDiffers):
                pass

    def read(self) -> None:
        """Checks that every listed step is complete for as long as it is listed."""
        shown = JournalView(self.root)
        for _ in range(6):
            rolled_back = {*self.observed.rolled_back}
            try:
                state = shown.state()
            except Unanswered:
                continue
            if self._lost:
                return  # Delayed writes may still be executed, without what they refer to.
            again = rolled_back.intersection(one.prefix for one in state.entry.catalog)
            assert not again, f"{again} were rolled back before"
            for one in state.catalog.values():
                if one.info.parent is not None:
                    assert state.exists(one.info.parent.save_id) or any(
                        base.save_id == one.save_id for base in state.bases.values()
                    ), one
                try:
                    at = self.root / one.prefix / "x"
                    assert at.store.get(at.key) == one.prefix.encode()
                except Unanswered:
                    continue
                except Missing:
                    if self._lost:
                        return
                    newer = self.retried(shown.state)
                    assert one.prefix not in {
                        standing.prefix for standing in newer.catalog.values()
                    }, f"{one.prefix} is listed but has no files"

    # ---- what is stored

    def history(self) -> list[entries.Entry]:
        """Returns the entries that were ever valid, newest first."""
        shown = JournalView(self.root).state().entry
        found = [shown] if shown.number else []
        while found and found[-1].number > 1:
            before = found[-1].number - 1
            ever = self.store.ever[self.root.key + "/" + view.entry_name(before)]
            every = [entries.entry_from(data, name="", number=before) for data in ever]
            found += [one for one in every if one.nonce == found[-1].previous]
            assert found[-1].number == before, (
                f"entry {before} is not the one that the next entry follows"
            )
        return found

    def check(self) -> None:
        """Compares what the actors observed with what is stored."""
        if self._lost:
            return  # Delayed writes may have been executed since.
        history = self.history()
        epochs = [claim.lease.epoch for entry in history[:1] for claim in entry.claims]
        gaps = {*range(1, max(epochs, default=0))} - {*epochs}
        assert epochs == sorted({*epochs})
        assert gaps <= self.observed.withdrawn or len(epochs) == entries.MOST_CLAIMS
        assert len(set(self.observed.claimed)) == len(self.observed.claimed), (
            "two claims of one epoch"
        )
        assert {*self.observed.claimed} <= {*epochs}
        ever = {}
        for entry in history:
            inline = (*entry.catalog, *(one.entry for one in entry.rolled_back))
            ever.update((one.prefix, one) for one in inline)
        for prefix, stands in self.observed.committed:
            assert stands.prefix in ever, f"{prefix} was reported as committed but is in no entry"
        state = JournalView(self.root).state()
        for one in state.catalog.values():
            at = self.root / one.prefix
            assert len(at.keys()) == 2, f"{one.prefix} is committed but incomplete"
        if history:
            # The next trainer deletes everything that is not referred to.
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


def _clock() -> types.SimpleNamespace:
    """A clock that moves by one whenever it is read."""
    ticks = itertools.count()
    return types.SimpleNamespace(
        monotonic=lambda: next(ticks),
        sleep=lambda _: None,
        time=time.time,
        gmtime=time.gmtime,
        strftime=time.strftime,
    )
