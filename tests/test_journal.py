# SPDX-License-Identifier: Apache-2.0
"""The journal: one writer, whatever is lost, late, or collected meanwhile."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from journal_model import World
from store_suite import MemoryStore

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    FencedError,
    FormatTooNew,
    InUse,
    StorageError,
    TargetDiffers,
)
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import ParentRef, SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import KEPT_ENTRIES, JournalView, entry_name
from deltackpt.storage.store import FileStore, Spot


@pytest.fixture(params=["memory", "files"])
def root(request, tmp_path) -> Spot:
    """A store; on a directory the journal keeps the same promises."""
    return Spot(MemoryStore() if request.param == "memory" else FileStore(tmp_path), "run")


@pytest.fixture
def in_memory() -> Spot:
    return Spot(MemoryStore(), "run")


def claimed(root: Spot) -> Journal:
    ledger = Journal(root)
    ledger.claim()
    return ledger


def upload(
    ledger: Journal,
    step: int,
    *,
    run: str = "r",
    attempt: int | None = None,
    parent: Standing | None = None,
    item: str | None = None,
) -> Standing:
    """What is committed next, its one file put."""
    unit = Unit(step, item)
    info = SaveInfo(
        save_id=SaveId(run, step, step + 1 if attempt is None else attempt),
        kind="delta" if parent else "base",
        parent=ParentRef(save_id=parent.save_id, step_dir=str(parent.step)) if parent else None,
        step_dir=str(step),
        nbytes=3,
    )
    prefix = ledger.prefix(unit)
    (at := ledger.root / prefix / "x").store.put(at.key, b"abc")
    return Standing.of(info, unit, prefix, stored_bytes=3, crc32c=7)


def commit(ledger: Journal, step: int, **how) -> Standing:
    return ledger.commit(upload(ledger, step, **how))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_orders_lose_no_commit(first):
    for seed in range(first, first + 20):
        World(seed).run()


# Claims.


def test_the_newest_claim_writes_and_the_older_ones_are_told_who_holds_it(root):
    older = claimed(root)
    first = commit(older, 1)
    newer = claimed(root)
    assert [older.claimed.lease.epoch, newer.claimed.lease.epoch] == [1, 2]
    with pytest.raises(FencedError, match=r"found epoch 2 held by process \d+ on .* since 20"):
        commit(older, 2)
    for ask in (older.check, lambda: older.retire([Unit(1)]), lambda: older.roll_back(0, "q")):
        with pytest.raises(FencedError, match="epoch 2"):
            ask()
    assert newer.state().steps == {1: first}
    commit(newer, 2, run="s", parent=first)
    assert sorted(JournalView(root).state().steps) == [1, 2]


def test_a_claim_after_an_epoch_is_of_nobody_else(root):
    claimed(root)
    with pytest.raises(InUse, match="epoch 0, found epoch 1"):
        Journal(root).claim(after_epoch=0)
    assert Journal(root).claim(after_epoch=1).lease.epoch == 2


def test_who_resumes_a_claim_writes_under_it_until_another_is_made(root):
    with pytest.raises(FencedError, match="expected a claim, found none"):
        Journal(root).resume()
    trainer, other = claimed(root), Journal(root)
    other.resume(trainer.claimed.lease.holder)
    first = commit(trainer, 1)
    commit(other, 1, item="embeddings", attempt=2)
    commit(trainer, 2, parent=first)
    newest = claimed(root)
    with pytest.raises(FencedError, match="epoch 2"):
        other.resume(trainer.claimed.lease.holder)
    with pytest.raises(FencedError, match="epoch 2"):
        commit(other, 3)
    assert {*newest.state().standings} == {Unit(1), Unit(1, "embeddings"), Unit(2)}


def test_a_claim_says_what_training_went_on_from(root):
    ledger = claimed(root)
    assert JournalView(root).state().claim == ledger.claimed and not ledger.claimed.began
    first = commit(ledger, 1)
    ledger.begin(first.save_id, ["stage"])
    claim = JournalView(root).state().claim
    assert claim == ledger.claimed
    assert (claim.began, claim.goes_on, claim.stages) == (True, first.save_id, ("stage",))
    number = ledger.known.entry.number
    ledger.begin(first.save_id, ["stage"])
    assert ledger.state().entry.number == number


# Commits.


def test_a_commit_is_two_requests_and_opening_a_listing_and_a_read():
    class Counted(MemoryStore):
        def __init__(self):
            super().__init__()
            self.count = Counter()

        def get(self, key):
            self.count["get"] += 1
            return super().get(key)

        def put(self, key, data, *, absent=False):
            self.count["put"] += 1
            super().put(key, data, absent=absent)

        def keys(self, folder, *, after=""):
            self.count["list"] += 1
            return super().keys(folder, after=after)

    store = Counted()
    ledger = claimed(Spot(store, "run"))
    saves = [upload(ledger, step) for step in range(20)]
    store.count.clear()
    for save in saves:
        ledger.commit(save)
    assert store.count == {"put": 20, "list": 20}
    store.count.clear()
    assert len(JournalView(Spot(store, "run")).state().steps) == 20
    assert store.count == {"get": 1, "list": 1}


def test_a_commit_that_is_made_twice_is_one(root):
    ledger = claimed(root)
    first = upload(ledger, 1)
    again = dataclasses.replace(first, prefix=ledger.prefix(first.unit))
    assert ledger.commit(first) == first
    assert ledger.commit(first) == first and ledger.commit(again) == first
    assert ledger.known.entry.number == 2
    ledger.retire([Unit(1)])
    assert ledger.commit(again) == again  # It stood, and was retired: it does not come back.
    assert ledger.state().steps == {}


def test_a_step_of_another_save_is_not_touched(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    with pytest.raises(
        TargetDiffers, match=r"expected no 1, or save id s/1/2, found save id r/1/2"
    ):
        commit(ledger, 1, run="s")
    assert ledger.state().steps == {1: first}


def test_no_delta_is_committed_without_its_parent_nor_a_base_without_its_step(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    second = upload(ledger, 2, parent=first)
    ledger.retire([Unit(1)])
    with pytest.raises(BrokenChain, match=r"its parent 1 \(save id r/1/2\)"):
        ledger.commit(second)
    with pytest.raises(BrokenChain, match="base of step 1: expected save id r/1/2 to stand"):
        commit(ledger, 1, item="embeddings")
    third = commit(ledger, 3)
    base = commit(ledger, 3, item="embeddings")
    ledger.retire([Unit(3)])
    assert third.save_id == base.save_id
    commit(ledger, 4, parent=third)  # The base stands for the step.
    alone = upload(ledger, 5, item="embeddings")
    ledger.commit(alone, alone=True)
    delta = dataclasses.replace(upload(ledger, 5, parent=second), save_id=alone.save_id)
    ledger.commit(delta)
    assert sorted(ledger.state().steps) == [4, 5]


def test_what_is_retired_is_gone_with_its_files(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    commit(ledger, 2, parent=first)
    third = commit(ledger, 3)
    assert [one.step for one in ledger.retire([Unit(1), Unit(2), Unit(9)])] == [1, 2]
    assert JournalView(root).state().steps == {3: third}
    assert (root / entries.SAVES).keys() == [f"{third.prefix.partition('/')[2]}/x"]
    assert ledger.known.held(first.save_id) and not ledger.known.stands(first.save_id)


def test_what_is_rolled_back_stays_until_it_is_forgotten(root):
    ledger = claimed(root)
    saves = [commit(ledger, step) for step in range(4)]
    commit(ledger, 3, item="embeddings", attempt=4)
    assert ledger.roll_back(1, "s") == [2, 3] and ledger.roll_back(1, "s") == []
    state = JournalView(root).state()
    assert sorted(state.standings) == [Unit(0), Unit(1)]
    assert {(one.run, one.standing.unit.name) for one in state.entry.rolled_back} == {
        ("s", "2"),
        ("s", "3"),
        ("s", "compacted/3/embeddings"),
    }
    assert ledger.sweep() == 0 and len((root / saves[3].prefix).keys()) == 1
    again = commit(ledger, 2, run="s", attempt=0)
    assert len(ledger.forget_rolled_back()) == 3
    assert (root / saves[3].prefix).keys() == [] and (root / entries.BASES).keys() == []
    assert ledger.state().steps[2] == again and len((root / again.prefix).keys()) == 1


# Many saves, many entries.


def test_many_steps_stand_in_pages_and_an_entry_stays_small(in_memory):
    root = in_memory
    ledger = claimed(root)
    drawn = random.Random(7)
    expected, last = {}, None
    for step in range(700):
        last = commit(ledger, step, parent=last if step % 10 else None)
        expected[step] = last
        if step % 50 == 49:
            # Retired are whole chains, wherever they stand.
            first = drawn.choice([s for s in expected if s % 10 == 0 and s + 9 in expected])
            ledger.retire([Unit(s) for s in range(first, first + 10)])
            expected = {s: one for s, one in expected.items() if not first <= s < first + 10}
    state = JournalView(root).state()
    assert state.steps == expected == ledger.state().steps and state.entry.pages
    length = root.store.length((root / entry_name(state.entry.number)).key)
    assert length < 350 * (entries.INLINE + 1) and len(state.entry.standings) <= entries.INLINE
    numbers = [key for key in (root / "journal").keys()]
    assert KEPT_ENTRIES <= len(numbers) < KEPT_ENTRIES + 40
    newer = claimed(root)
    assert newer.sweep() > 0
    assert len((root / entries.PAGES).keys()) == len(newer.known.entry.pages)
    assert JournalView(root).state().steps == expected


def test_who_slept_through_a_hundred_entries_finds_the_newest(in_memory):
    root = in_memory
    sleeper, reader = claimed(root), JournalView(root)
    reader.state()
    newer = claimed(root)
    for step in range(KEPT_ENTRIES + 60):
        commit(newer, step)
    assert not root.store.keys("run", after="") == []
    with pytest.raises(FencedError, match="epoch 2"):
        commit(sleeper, 500)
    assert len(reader.state().steps) == KEPT_ENTRIES + 60
    assert max(newer.state().steps) == KEPT_ENTRIES + 59
    assert max(JournalView(root).state().steps) == KEPT_ENTRIES + 59


# What is left over.


def test_uploads_of_claims_that_are_over_and_those_given_up_are_swept(root):
    older = claimed(root)
    cut, kept = upload(older, 1), commit(older, 2)
    newer = claimed(root)
    own, failed = upload(newer, 3), upload(newer, 4, item="embeddings")
    newer.give_up(failed.prefix)
    with pytest.raises(FencedError):
        older.sweep()
    assert newer.sweep() == 2 and newer.sweep() == 0
    assert [len((root / one.prefix).keys()) for one in (cut, kept, own, failed)] == [0, 1, 1, 0]
    newer.commit(own)


@pytest.mark.parametrize("lost", ["answer", "deletion"])
def test_what_was_removed_is_swept_though_no_answer_came(lost):
    class Lossy(MemoryStore):
        lost = ""

        def _lose(self, what):
            if self.lost == what:
                self.lost = ""
                raise StorageError("no answer came in time")

        def put(self, key, data, *, absent=False):
            super().put(key, data, absent=absent)
            self._lose("answer")

        def delete(self, keys):
            self._lose("deletion")
            super().delete(keys)

    store = Lossy()
    ledger = claimed(Spot(store, "run"))
    for step in range(4):
        commit(ledger, step)
    ledger.roll_back(2, "s")
    for remove in (lambda: ledger.retire([Unit(0)]), ledger.forget_rolled_back):
        store.lost = lost
        with pytest.raises(StorageError, match="no answer"):
            remove()
        remove()
    ledger.sweep()
    kept = {one.prefix for one in ledger.state().steps.values()}
    assert {f"saves/{key.partition('/')[0]}" for key in (ledger.root / "saves").keys()} == kept


# Entries that cannot be believed.


def test_an_altered_entry_is_damage_and_a_later_one_says_so(in_memory):
    root = in_memory
    ledger = claimed(root)
    one = commit(ledger, 1)
    at = root / entry_name(ledger.known.entry.number)
    whole = at.store.get(at.key)
    for place in range(0, len(whole), 7):
        altered = bytearray(whole)
        altered[place] ^= 4
        at.store.put(at.key, bytes(altered))
        with pytest.raises((Damaged, FormatTooNew), match=at.name):
            JournalView(root).state()
    known = ledger.known.entry
    for change, expected in (
        ({"number": 7}, "that of number 7"),
        ({"claims": ()}, "claims of ascending epochs"),
        ({"standings": (dataclasses.replace(one, prefix="saves/2.1.aaaaaaaaaaaa"),)}, "prefix of"),
        ({"standings": (dataclasses.replace(one, prefix="saves/../1.1.aaaaaaaa"),)}, "prefix of"),
        ({"standings": (dataclasses.replace(one, item="a/b"),)}, "prefix of"),
        ({"pages": (entries.PageRef(name="../x", crc32c=0),)}, "names of pages"),
    ):
        at.store.put(at.key, entries.to_bytes(dataclasses.replace(known, **change)))
        with pytest.raises(Damaged, match=expected):
            JournalView(root).state()
    at.store.put(at.key, entries.to_bytes(dataclasses.replace(known, features=("tomorrow",))))
    with pytest.raises(FormatTooNew, match="tomorrow"):
        Journal(root).claim()


def test_a_lost_or_altered_page_is_damage(in_memory):
    root = in_memory
    ledger = claimed(root)
    for step in range(entries.INLINE + 1):
        commit(ledger, step)
    page = root / ledger.known.entry.pages[0].name
    data = page.store.get(page.key)
    page.store.put(page.key, data[:-1])
    with pytest.raises(Damaged, match="crc32c"):
        JournalView(root).state()
    page.store.delete([page.key])
    with pytest.raises(Damaged, match="an entry and the pages that it names"):
        JournalView(root).state()
    page.store.put(page.key, data)
    assert len(JournalView(root).state().steps) == entries.INLINE + 1


def test_what_else_lies_in_the_journal_is_passed_over(root):
    ledger = claimed(root)
    commit(ledger, 1)
    for name in ("x", "1.msgpack", "99999999999999999999.txt", "a" * 20 + ".msgpack"):
        root.store.put(f"run/journal/{name}", b"?")
    assert sorted(JournalView(root).state().steps) == [1]
    commit(ledger, 2)
