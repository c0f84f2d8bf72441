# SPDX-License-Identifier: Apache-2.0
"""Two trainers that fence each other, and a reader, on a real server and a bad network.

Some trainers are killed before or after a request of a claim, a put, a retirement or a rollback.
The campaign's seed determines the fate of each request. The order of requests depends on the
machine.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import proxy
import pytest
import servers
from damages import DAMAGES, HOWS
from faulty_buckets import chain, faulty, fresh, opened
from harness import raced

from deltackpt.errors import BrokenChain, FencedError, StorageError, TargetDiffers
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo
from deltackpt.ledger import entries
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView, entry_name
from deltackpt.storage.store import Missing, Store, StorePath

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

_DEADLINE_SECS = 0.7
_FILES = ("x", "commit.msgpack")


#: Where trainers are killed, and how often: some are rarer than others.
_PHASES = {"claim": 0.1, "put: files": 0.05, "put: entry": 0.05, "retire": 0.2, "rollback": 0.3}
#: In a recorded run, at least so many kills on each server.
_LEAST_KILLS = 20
#: Rounds per server: Azurite collects garbage every ten minutes, and does not answer meanwhile.
_ROUNDS = 50
_REQUESTS = ("get", "read_into", "length", "keys", "folders", "put", "delete")


class _Died(Exception):
    """An operation failed too often."""


class _Killed(Exception):
    """A trainer was killed."""


class _Mortal:
    """A store whose client may be killed before or after one of its next requests."""

    def __init__(self, held: Store):
        self._held = held
        #: Number of request boundaries that the client survives; None for all.
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._held, name)
        if name not in _REQUESTS:
            return found

        def request(*arguments: object, **options: object) -> Any:
            self._survive()
            answer = found(*arguments, **options)
            self._survive()
            return answer

        return request

    def _survive(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _Killed


def _tried(work, times: int = 6):
    for _ in range(times):
        try:
            return work()
        except Missing:
            raise
        except StorageError:
            pass
    raise _Died


class _Trainer:
    """A trainer that resumes from the newest step until it is fenced, and then claims again."""

    def __init__(self, root: StorePath, drawn: random.Random, damaged: dict[str, bytes]):
        self.live, self.drawn, self.claims = root, drawn, 3
        self.root, self.store = root, _Mortal(root.store)
        #: The original contents of damaged entries.
        self.damaged = damaged
        self.committed: list[tuple[str, CatalogEntry]] = []
        self.fenced = 0
        self.killed: Counter[str] = Counter()

    def train(self) -> None:
        for _ in range(self.claims):
            # A process that gets too many faults dies; another one follows.
            with contextlib.suppress(_Died, _Killed):
                self.store = _Mortal(self.live.store)
                self.root = StorePath(cast(Store, self.store), self.live.key)
                try:
                    self._train(Journal(self.root), f"{self.drawn.getrandbits(64):016x}")
                except (FencedError, BrokenChain, TargetDiffers):
                    self.fenced += 1

    @contextlib.contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        """Counts a kill in a phase; a killed process sends no other request."""
        if self.drawn.random() < _PHASES[phase]:
            self.store.left = self.drawn.randrange(10)
        try:
            yield
        except _Killed:
            self.killed[phase] += 1
            raise
        self.store.left = None

    def _train(self, ledger: Journal, run: str) -> None:
        with self._in("claim"):
            _tried(ledger.claim)
        parent = next(reversed(_tried(ledger.state).steps.values()), None)
        _tried(lambda: ledger.start_run(parent.save_id if parent else None))
        for attempt in range(1, self.drawn.randrange(2, 6)):
            parent = self._save(
                ledger, SaveId(run, parent.step + 1 if parent else 0, attempt), parent
            )
            if self.drawn.random() < 0.5:
                _tried(ledger.copy_newest)
                if self.drawn.random() < 0.5:
                    self._damage(ledger.known.entry.number)
            if self.drawn.random() < 0.3:
                steps = [*_tried(ledger.state).steps.values()]
                first = max(
                    (n for n, one in enumerate(steps) if one.info.kind == "base"), default=0
                )
                old = [one.prefix for one in steps[:first]]
                with self._in("retire"):
                    _tried(functools.partial(ledger.retire, lambda state, old=old: old))
            if self.drawn.random() < 0.3:
                _tried(ledger.sweep)
        if parent is not None and self.drawn.random() < 0.3:
            with self._in("rollback"):
                _tried(lambda: ledger.roll_back(parent.step - 1, run))

    def _damage(self, number: int) -> None:
        """Removes or alters an entry that has a copy."""
        at = self.root / entry_name(number)
        with contextlib.suppress(Missing):
            data = _tried(lambda: at.store.get(at.key))
            if self.damaged.setdefault(at.name, data) is not data:
                return
            altered = DAMAGES[self.drawn.choice(HOWS)](data)
            if altered is None:
                _tried(lambda: at.store.delete([at.key]))
            else:
                _tried(lambda: at.store.put(at.key, altered))

    def _save(self, ledger: Journal, save_id: SaveId, parent: CatalogEntry | None) -> CatalogEntry:
        unit = ObjectKey(save_id.step)
        if self.drawn.random() < 0.4:
            parent = None
        of = ParentRef(save_id=parent.save_id, step_dir=str(parent.step)) if parent else None
        info = SaveInfo(
            save_id=save_id,
            kind="delta" if of else "base",
            parent=of,
            step_dir=str(unit.step),
            nbytes=10,
        )
        with self._in("put: files"):
            prefix = _tried(lambda: self._upload(ledger, unit))
        standing = CatalogEntry(info=info, item=unit.item, prefix=prefix, stored_bytes=2, crc32c=1)
        with self._in("put: entry"):
            stands = _tried(lambda: ledger.commit(standing))
        self.committed.append((prefix, stands))
        return stands

    def _upload(self, ledger: Journal, unit: ObjectKey) -> str:
        prefix = ledger.prefix(unit)
        try:
            for name in _FILES:
                at = self.root / prefix / name
                at.store.put(at.key, prefix.encode())
        except StorageError:
            ledger.abandon_upload(prefix)
            raise
        return prefix


def _read(root: StorePath, over: threading.Event) -> int:
    """Checks that each step is complete as long as it is listed."""
    shown, read = JournalView(root), 0
    while not over.is_set():
        try:
            state = shown.state()
        except StorageError:
            continue
        for one in state.steps.values():
            assert one.info.parent is None or state.exists(one.info.parent.save_id), one
            at = root / one.prefix / "x"
            try:
                assert at.store.get(at.key) == one.prefix.encode()
                read += 1
            except Missing:
                with contextlib.suppress(_Died):
                    newer = _tried(shown.state)
                    assert one.prefix not in {each.prefix for each in newer.steps.values()}
            except StorageError:
                pass
    return read


def _check(
    root: StorePath, trainers: list[_Trainer], damaged: Mapping[str, bytes]
) -> list[entries.Entry]:
    history = chain(root, damaged)
    epochs = [one.lease.epoch for one in history[-1].claims]
    assert epochs == [*range(1, len(epochs) + 1)]
    ever = {one.prefix for entry in history for one in entry.catalog}
    for trainer in trainers:
        for prefix, stands in trainer.committed:
            assert stands.prefix in ever, f"{prefix} was told to be committed, and never was"
    last = Journal(root)
    last.claim()
    last.sweep()
    found = Counter(f"saves/{key.partition('/')[0]}" for key in (root / entries.SAVES).keys())
    assert found == {prefix: len(_FILES) for prefix in last.known.prefixes}
    return history


@pytest.mark.parametrize("scheme", ["s3", "gcs", "azure"])
@pytest.mark.parametrize("faults", [0.02, 0.1])
def test_two_trainers_on_a_bad_network_lose_no_commit(campaign, figures, tmp_path, scheme, faults):
    drawn = campaign.random("bucket orders", scheme, faults)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    killed: Counter[str] = Counter(dict.fromkeys(_PHASES, 0))
    seeds = [drawn.getrandbits(32) for _ in range(campaign.count(400))]
    for first in range(0, len(seeds), _ROUNDS):
        (folder := tmp_path / str(first)).mkdir()
        with getattr(servers, scheme)(folder) as server, faulty(server) as network:
            for seed in seeds[first : first + _ROUNDS]:
                try:
                    found, struck, kills = _round(network, random.Random(seed), faults)
                except BaseException as error:
                    error.add_note(f"round of {seed}, {scheme}, {faults}")
                    raise
                counts += found
                kinds += struck
                killed.update(kills)
    figures(f"two trainers on {scheme}", **counts, faults=dict(kinds), killed_in=dict(killed))
    assert not campaign.full or min(killed.values()) >= _LEAST_KILLS, killed


def _round(
    network: proxy.Proxy, drawn: random.Random, faults: float
) -> tuple[Counter[str], Counter[str], Counter[str]]:
    where = fresh(network)
    fates = [drawn.choice(proxy.KINDS) if drawn.random() < faults else None for _ in range(20_000)]
    plan = network.plan(where, lambda number: fates[number % len(fates)], after=drawn.randrange(40))

    def root() -> StorePath:
        return opened(network, where, _DEADLINE_SECS, retries=drawn.random() < 0.5)

    damaged: dict[str, bytes] = {}
    trainers = [_Trainer(root(), random.Random(drawn.getrandbits(32)), damaged) for _ in range(2)]
    reads = raced([trainer.train for trainer in trainers], functools.partial(_read, root()))
    network.plan(where, proxy.at({}))
    plan.tell()
    history = _check(opened(network, where, 60), trainers, damaged)
    committed = sum(len(trainer.committed) for trainer in trainers)
    fenced = sum(trainer.fenced for trainer in trainers)
    found = Counter(rounds=1, entries=len(history), commits=committed, fenced=fenced, reads=reads)
    found["damaged"] = len(damaged)
    killed = sum((trainer.killed for trainer in trainers), Counter[str]())
    return found, Counter(kind for _, kind in plan.struck), killed
