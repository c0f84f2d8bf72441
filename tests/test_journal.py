# SPDX-License-Identifier: Apache-2.0
"""The journal has one writer, even if objects are lost, late or collected."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Collection

import pytest
from damages import DAMAGES

from deltackpt import errors
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo
from deltackpt.ledger import entries, lease
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import KEPT_ENTRIES, JournalView, entry_name
from deltackpt.storage.store import FileStore, StorePath
from deltackpt.testing import JournalModel, MemoryStore


@pytest.fixture(params=["memory", "files"])
def root(request, tmp_path) -> StorePath:
    """A root in memory or in a directory; the journal behaves the same in both."""
    return StorePath(MemoryStore() if request.param == "memory" else FileStore(tmp_path), "run")


@pytest.fixture
def in_memory() -> StorePath:
    return StorePath(MemoryStore(), "run")


def claimed(root: StorePath) -> Journal:
    ledger = Journal(root)
    ledger.claim()
    return ledger


def upload(
    ledger: Journal,
    step: int,
    *,
    run: str = "r",
    attempt: int | None = None,
    parent: CatalogEntry | None = None,
    item: str | None = None,
) -> CatalogEntry:
    """Uploads the one file of the next commit."""
    unit = ObjectKey(step, item)
    info = SaveInfo(
        save_id=SaveId(run, step, step + 1 if attempt is None else attempt),
        kind="delta" if parent else "base",
        parent=ParentRef(save_id=parent.save_id, step_dir=str(parent.step)) if parent else None,
        step_dir=str(step),
        nbytes=3,
    )
    prefix = ledger.prefix(unit)
    (at := ledger.root / prefix / "x").store.put(at.key, b"abc")
    return CatalogEntry(info=info, item=unit.item, prefix=prefix, stored_bytes=3, crc32c=7)


def damage(at: StorePath, how: str) -> None:
    data = DAMAGES[how](at.store.get(at.key))
    at.store.delete([at.key]) if data is None else at.store.put(at.key, data)


def retire(ledger: Journal, units: Collection[ObjectKey]) -> None:
    ledger.retire(
        lambda state: (one.prefix for one in state.entry.catalog if one.object_key in units)
    )


def forget_rolled_back(ledger: Journal) -> None:
    ledger.retire(lambda state: (one.entry.prefix for one in state.entry.rolled_back))


def commit(ledger: Journal, step: int, **how) -> CatalogEntry:
    return ledger.commit(upload(ledger, step, **how))


def steps_of(root: StorePath) -> list[int]:
    """The committed steps, according to a new reader."""
    return sorted(JournalView(root).state().steps)


def starting_in(root: StorePath) -> Journal:
    """A trainer that has claimed the root and is still starting."""
    ledger = Journal(root)
    ledger.claim(pending=True)
    return ledger


def assert_fenced(match: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(errors.FencedError, match=match):
            call()


@pytest.mark.parametrize(
    ("options", "first"),
    [({}, first) for first in range(0, 120, 20)]
    + [({"empties": True}, first) for first in range(0, 80, 20)]
    + [({"starts": 0.6}, first) for first in range(0, 80, 20)],
)
def test_random_orders_lose_no_commit(options, first):
    """Also if the root is emptied, in which case nothing is committed, and if starts fail."""
    for seed in range(first, first + 20):
        JournalModel(seed, **options).run()


# Claims.


def test_the_newest_claim_writes_and_errors_of_older_ones_name_its_holder(root):
    older = claimed(root)
    first = commit(older, 1)
    newer = claimed(root)
    assert [older.claimed.lease.epoch, newer.claimed.lease.epoch] == [1, 2]
    held = r"found epoch 2 held by process \d+ on .* since 20"
    assert_fenced(held, lambda: commit(older, 2))
    remove, roll_back = lambda: retire(older, [ObjectKey(1)]), lambda: older.roll_back(0, "q")
    assert_fenced("epoch 2", older.check, remove, roll_back)
    assert newer.state().steps == {1: first}
    commit(newer, 2, run="s", parent=first)
    assert steps_of(root) == [1, 2]


def test_a_claim_after_an_epoch_fails_if_the_epoch_has_advanced(root):
    claimed(root)
    with pytest.raises(errors.InUse, match="epoch 0, found epoch 1"):
        Journal(root).claim(after_epoch=0)
    assert Journal(root).claim(after_epoch=1).lease.epoch == 2


def test_a_resumed_claim_can_write_until_another_claim_is_made(root):
    assert_fenced("expected a claim, found none", Journal(root).resume)
    trainer, other = claimed(root), Journal(root)
    other.resume(trainer.claimed.lease.holder)
    first = commit(trainer, 1)
    commit(other, 1, item="embeddings", attempt=2)
    commit(trainer, 2, parent=first)
    newest = claimed(root)
    holder = trainer.claimed.lease.holder
    assert_fenced("epoch 2", lambda: other.resume(holder), lambda: commit(other, 3))
    assert {*newest.state().catalog} == {ObjectKey(1), ObjectKey(1, "embeddings"), ObjectKey(2)}


def test_a_claim_records_the_step_that_training_resumed_from(root):
    ledger = claimed(root)
    assert JournalView(root).state().claim == ledger.claimed and not ledger.claimed.began
    first = commit(ledger, 1)
    ledger.start_run(first.save_id)
    claim = JournalView(root).state().claim
    assert claim == ledger.claimed
    assert (claim.began, claim.resumed_from) == (True, first.save_id)
    number = ledger.known.entry.number
    ledger.start_run(first.save_id)
    assert ledger.state().entry.number == number


# Commits.


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


def test_a_commit_takes_three_requests_and_opening_takes_two():
    store = Counted()
    ledger = claimed(StorePath(store, "run"))
    saves = [upload(ledger, step) for step in range(20)]
    store.count.clear()
    for save in saves:
        ledger.commit(save)
    assert store.count == {"get": 20, "put": 20, "list": 20}
    for lists in (2, 1):  # An entry without a copy is listed again after it was read.
        store.count.clear()
        assert len(JournalView(StorePath(store, "run")).state().steps) == 20
        assert store.count == {"get": 1, "list": lists}
        ledger.copy_newest()


def test_a_repeated_commit_is_idempotent(root):
    ledger = claimed(root)
    first = upload(ledger, 1)
    again = dataclasses.replace(first, prefix=ledger.prefix(first.object_key))
    assert ledger.commit(first) == first
    assert ledger.commit(first) == first and ledger.commit(again) == first
    assert ledger.known.entry.number == 2
    retire(ledger, [ObjectKey(1)])
    assert ledger.commit(again) == again  # It was committed and retired; it stays retired.
    assert ledger.state().steps == {}


def test_a_step_of_another_save_is_not_overwritten(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    with pytest.raises(
        errors.TargetDiffers, match=r"expected no 1, or save id s/1/2, found save id r/1/2"
    ):
        commit(ledger, 1, run="s")
    assert ledger.state().steps == {1: first}


def test_no_delta_is_committed_without_its_parent_nor_a_base_without_its_step(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    second = upload(ledger, 2, parent=first)
    retire(ledger, [ObjectKey(1)])
    with pytest.raises(errors.BrokenChain, match=r"its parent 1 \(save id r/1/2\)"):
        ledger.commit(second)
    with pytest.raises(
        errors.BrokenChain, match="base of step 1: expected save id r/1/2 to be committed"
    ):
        commit(ledger, 1, item="embeddings")
    third = commit(ledger, 3)
    base = commit(ledger, 3, item="embeddings")
    retire(ledger, [ObjectKey(3)])
    assert third.save_id == base.save_id
    commit(ledger, 4, parent=third)  # The base replaces the step as a parent.
    alone = upload(ledger, 5, item="embeddings")
    ledger.commit(alone, alone=True)
    delta = upload(ledger, 5, parent=second)
    assert delta.save_id == alone.save_id
    ledger.commit(delta)
    assert sorted(ledger.state().steps) == [4, 5]


def test_retired_saves_are_gone_with_their_files(root):
    ledger = claimed(root)
    first = commit(ledger, 1)
    commit(ledger, 2, parent=first)
    third = commit(ledger, 3)
    retire(ledger, [ObjectKey(1), ObjectKey(2), ObjectKey(9)])
    assert JournalView(root).state().steps == {3: third}
    assert (root / entries.SAVES).keys() == [f"{third.prefix.partition('/')[2]}/x"]
    assert ledger.known.was_committed(first.save_id) and not ledger.known.exists(first.save_id)


def test_rolled_back_saves_stay_until_they_are_forgotten(root):
    ledger = claimed(root)
    saves = [commit(ledger, step) for step in range(4)]
    commit(ledger, 3, item="embeddings", attempt=4)
    assert ledger.roll_back(1, "s") == [2, 3] and ledger.roll_back(1, "s") == []
    state = JournalView(root).state()
    assert sorted(state.catalog) == [ObjectKey(0), ObjectKey(1)]
    assert {(one.run, one.entry.object_key.name) for one in state.entry.rolled_back} == {
        ("s", "2"),
        ("s", "3"),
        ("s", "compacted/3/embeddings"),
    }
    assert ledger.sweep() == 0 and len((root / saves[3].prefix).keys()) == 1
    again = commit(ledger, 2, run="s", attempt=0)
    forget_rolled_back(ledger)
    assert (root / saves[3].prefix).keys() == [] and (root / entries.BASES).keys() == []
    assert ledger.state().steps[2] == again and len((root / again.prefix).keys()) == 1


# Many saves, many entries.


def test_an_entry_names_all_of_many_steps_and_few_entries_are_kept(in_memory):
    root = in_memory
    ledger = claimed(root)
    drawn = random.Random(7)
    expected, last = {}, None
    for step in range(250):
        last = commit(ledger, step, parent=last if step % 10 else None)
        expected[step] = last
        if step % 50 == 49:
            # Retire whole chains, at any position.
            first = drawn.choice([s for s in expected if s % 10 == 0 and s + 9 in expected])
            retire(ledger, [ObjectKey(s) for s in range(first, first + 10)])
            expected = {s: one for s, one in expected.items() if not first <= s < first + 10}
    state = JournalView(root).state()
    assert state.steps == expected == ledger.state().steps
    length = root.store.length((root / entry_name(state.entry.number)).key)
    assert length < 350 * (len(expected) + 1)
    assert KEPT_ENTRIES <= len((root / "journal").keys()) < KEPT_ENTRIES + 40


def test_a_journal_that_missed_a_hundred_entries_finds_the_newest(in_memory):
    root = in_memory
    sleeper, reader = claimed(root), JournalView(root)
    reader.state()
    newer = claimed(root)
    for step in range(KEPT_ENTRIES + 60):
        commit(newer, step)
    assert not root.store.keys("run", after="") == []
    assert_fenced("epoch 2", lambda: commit(sleeper, 500))
    assert len(reader.state().steps) == KEPT_ENTRIES + 60
    assert max(newer.state().steps) == KEPT_ENTRIES + 59
    assert max(JournalView(root).state().steps) == KEPT_ENTRIES + 59


# Leftovers.


@pytest.mark.parametrize("lost", ["answer", "deletion"])
def test_removed_saves_are_swept_even_if_no_answer_came(lost):
    class Lossy(MemoryStore):
        lost = ""

        def _lose(self, what):
            if self.lost == what:
                self.lost = ""
                raise errors.StorageError("no answer came in time")

        def put(self, key, data, *, absent=False):
            super().put(key, data, absent=absent)
            self._lose("answer")

        def delete(self, keys):
            self._lose("deletion")
            super().delete(keys)

    store = Lossy()
    ledger = claimed(StorePath(store, "run"))
    for step in range(4):
        commit(ledger, step)
    ledger.roll_back(2, "s")
    for remove in (lambda: retire(ledger, [ObjectKey(0)]), lambda: forget_rolled_back(ledger)):
        store.lost = lost
        with pytest.raises(errors.StorageError, match="no answer"):
            remove()
        remove()
    ledger.sweep()
    kept = {one.prefix for one in ledger.state().steps.values()}
    assert {f"saves/{key.partition('/')[0]}" for key in (ledger.root / "saves").keys()} == kept


# Damaged entries.


def test_an_altered_entry_is_skipped_and_reported_and_a_newer_format_is_refused(in_memory):
    root = in_memory
    ledger = claimed(root)
    one = commit(ledger, 1)
    at = root / entry_name(ledger.known.entry.number)
    whole = at.store.get(at.key)

    def told() -> str:
        view = JournalView(root)
        assert view.state().steps == {}
        assert [*view.lost_saves] == []  # Its commit.msgpack was not put.
        return str(view.problems)

    for place in range(0, len(whole), 7):
        altered = bytearray(whole)
        altered[place] ^= 4
        at.store.put(at.key, bytes(altered))
        assert at.name in told()
    known, elsewhere = ledger.known.entry, dataclasses.replace(one.info, step_dir="../1")
    for change, expected in (
        ({"number": 7}, "that of number 7"),
        ({"claims": ()}, "claims with ascending epochs"),
        ({"catalog": (dataclasses.replace(one, prefix="saves/2.1.aaaaaaaaaaaa"),)}, "prefix of"),
        ({"catalog": (dataclasses.replace(one, prefix="saves/../1.1.aaaaaaaa"),)}, "prefix of"),
        ({"catalog": (dataclasses.replace(one, item="a/b"),)}, "prefix of"),
        ({"catalog": (dataclasses.replace(one, info=elsewhere),)}, "step directory 1"),
    ):
        at.store.put(at.key, entries.to_bytes(dataclasses.replace(known, **change)))
        assert expected in told()
    at.store.put(at.key, entries.to_bytes(dataclasses.replace(known, features=("tomorrow",))))
    with pytest.raises(errors.FormatTooNew, match="tomorrow"):
        Journal(root).claim()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_read_from_its_copy(root, how):
    ledger = claimed(root)
    commit(ledger, 1)
    ledger.copy_newest()
    commit(ledger, 2)
    ledger.copy_newest()
    ledger.copy_newest()
    assert len([key for key in (root / "journal").keys() if "copy" in key]) == 1
    number = ledger.known.entry.number
    damage(root / entry_name(number), how)
    view = JournalView(root)
    assert sorted(view.state().steps) == [1, 2] and view.lost_saves == {}
    assert len(view.audit()) == 1 and "its other copy is read" in str(view.problems)
    assert sorted(ledger.state().steps) == [1, 2]
    commit(ledger, 3)
    assert commit(claimed(root), 4, run="s") and sorted(ledger.state().steps) == [1, 2, 3, 4]


def test_a_delayed_entry_in_the_place_of_a_lost_rollback_is_not_read():
    """A reader lists the rollback before its copy is put, and reads it after it was lost."""

    class Racing(MemoryStore):
        race = None

        def get(self, key):
            if self.race is not None:
                race, self.race = self.race, None
                race()
            return super().get(key)

    store = Racing()
    root = StorePath(store, "run")
    ledger = claimed(root)
    first = commit(ledger, 1)
    commit(ledger, 2, parent=first)
    before = ledger.known.entry
    ledger.roll_back(1, "s")
    name = entry_name(before.number + 1)
    entry, copy = (root / name).key, (root / entries.copy_name(name)).key
    late = dataclasses.replace(
        before, number=before.number + 1, nonce="f" * 32, previous=before.nonce
    )
    copied = store.get(copy)
    store.delete([copy])

    def race() -> None:
        store.put(copy, copied)
        store.put(entry, entries.to_bytes(late))

    store.race = race
    view = JournalView(root)
    assert sorted(view.state().steps) == [1] and sorted(view.state().steps) == [1]
    # Nor does a trainer that starts then.
    store.delete([copy])
    store.put(entry, copied)
    store.race = race
    assert sorted(claimed(root).known.steps) == [1]


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_without_a_copy_the_previous_entry_is_read_and_the_step_reported(root, how):
    ledger = claimed(root)
    first = commit(ledger, 1)
    second = upload(ledger, 2, parent=first)
    (at := root / second.prefix / entries.COMMIT).store.put(at.key, b"abc")
    ledger.commit(second)
    view = JournalView(root)
    damage(root / entry_name(ledger.known.entry.number), how)
    assert view.state().steps == {1: first} and [*view.lost_saves] == [2]
    assert str(view.lost_saves[2]) == str(view.problems[0]) and "are unknown" in str(view.problems)
    assert ledger.state().steps == {1: first, 2: second}  # It has already read the entry.
    # A journal that resumes the claim cannot tell whether its entry is the newest.
    holder = ledger.claimed.lease.holder
    assert_fenced("an entry that may be another trainer", lambda: Journal(root).resume(holder))
    newest = claimed(root)
    assert newest.claimed.lease.epoch == 2 and newest.known.steps == {1: first}
    third = commit(newest, 2, run="s", parent=first)
    assert JournalView(root).state().steps == view.state().steps == {1: first, 2: third}
    assert_fenced("found epoch 2", lambda: commit(ledger, 3, parent=first))


# Journals that are removed while a trainer holds their claim.


def empty(root: StorePath) -> None:
    root.store.delete(root.store.keys(root.key))


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ("nobody", "found none: the journal was removed"),
        ("another trainer", "found epoch 1 held by"),
        ("one with as many saves", "found epoch 1 held by"),
        ("one that was there before", "another journal in its place"),
    ],
)
def test_nothing_is_committed_or_confirmed_in_an_emptied_root(root, others, found):
    ledger = claimed(root)
    first = commit(ledger, 1)
    older = {key: root.store.get(key) for key in root.store.keys(root.key)}
    commit(ledger, 2)
    commit(ledger, 3)
    ledger.confirm()
    empty(root)
    if others in ("another trainer", "one with as many saves"):
        other = claimed(root)
        for step in range(4, 7) if others == "one with as many saves" else ():
            commit(other, step)
    if others == "one that was there before":
        for key, data in older.items():
            root.store.put(key, data)
    keys = root.store.keys(root.key)
    late = upload(ledger, 4, parent=first)
    assert_fenced(found, lambda: ledger.commit(late), ledger.confirm, ledger.check)
    assert {*root.store.keys(root.key)} - {*keys} == {f"{root.key}/{late.prefix}/x"}


def test_a_reader_follows_the_new_journal_of_an_emptied_root(root):
    commit(claimed(root), 1)
    view = JournalView(root)
    assert sorted(view.state().steps) == [1]
    empty(root)
    assert view.state().entry.number == 0
    commit(claimed(root), 2)
    assert sorted(view.state().steps) == [2]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_entry_that_is_lost_while_its_trainer_runs_is_rewritten(root, how):
    ledger = claimed(root)
    commit(ledger, 1)
    commit(ledger, 2)
    number = ledger.known.entry.number
    damage(root / entry_name(number), how)
    assert sorted(ledger.confirm().steps) == [1, 2]
    view = JournalView(root)
    assert sorted(view.state().steps) == [1, 2] and view.state().entry.number == number + 1
    assert ledger.confirm().entry.number == number + 1
    commit(ledger, 3)
    assert sorted(view.state().steps) == [1, 2, 3]


def test_confirm_takes_a_listing_and_a_read_and_a_copy_takes_a_put():
    store = Counted()
    ledger = claimed(StorePath(store, "run"))
    commit(ledger, 1)
    store.count.clear()
    ledger.confirm()
    assert store.count == {"get": 1, "list": 1}
    store.count.clear()
    ledger.copy_newest()
    ledger.copy_newest()
    assert store.count["put"] == 1 and store.count["get"] == 0


def test_foreign_objects_in_the_journal_are_ignored(root):
    ledger = claimed(root)
    commit(ledger, 1)
    for name in ("x", "1.msgpack", "99999999999999999999.txt", "a" * 20 + ".msgpack"):
        root.store.put(f"run/journal/{name}", b"?")
    assert steps_of(root) == [1]
    commit(ledger, 2)


# ---- a trainer that is starting


def beside(work) -> concurrent.futures.Future:
    """Starts work in another thread and asserts that it waits for a starting trainer."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    found = pool.submit(work)
    pool.shutdown(wait=False)
    with pytest.raises(concurrent.futures.TimeoutError):
        found.result(0.3)
    return found


def test_a_claim_that_was_withdrawn_fences_nobody(in_memory):
    first, uploader = claimed(in_memory), Journal(in_memory)
    held = first.claimed.lease.holder
    for step in range(3):
        second = starting_in(in_memory)
        waiting = beside(lambda step=step: commit(first, step))
        resumed = beside(lambda: uploader.resume(held))
        second.withdraw()
        waiting.result(60)
        assert resumed.result(60).lease.holder == held
        assert_fenced("epoch", second.check)
    assert sorted(first.check().steps) == [0, 1, 2]


@pytest.mark.parametrize(
    "ends", [Journal.start, lambda other: other.start_run(None)], ids=["start", "begin"]
)
def test_the_previous_holder_is_fenced_once_a_trainer_has_started(in_memory, ends):
    first, second = claimed(in_memory), starting_in(in_memory)
    waiting = beside(first.check)
    ends(second)
    assert_fenced("epoch 2", lambda: waiting.result(60))
    commit(second, 1)
    assert not second.check().claim.lease.pending


def test_a_claim_after_a_pending_one_fences_at_once(in_memory):
    first, second = claimed(in_memory), starting_in(in_memory)
    claimed(in_memory)
    assert_fenced("epoch 3", first.check, second.check)


def test_a_start_that_takes_too_long_fences(in_memory, monkeypatch):
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    first = claimed(in_memory)
    starting_in(in_memory)
    assert_fenced("epoch 2", *[lambda: commit(first, 1)] * 2)


def test_withdrawing_a_claim_keeps_the_newer_one_that_is_starting(in_memory):
    first, second, third = claimed(in_memory), starting_in(in_memory), starting_in(in_memory)
    second.withdraw()
    third.start()
    commit(third, 1)
    assert_fenced("epoch 3", first.check, second.check)


def test_uploads_of_a_withdrawn_claim_are_deleted_by_the_holder(in_memory):
    first = claimed(in_memory)
    kept = upload(first, 1)
    first.commit(kept)
    for number in range(3):
        second = Journal(in_memory)
        epoch = second.claim(pending=True).lease.epoch
        left = upload(second, 2).prefix
        assert not first.find_leftovers(first.state())
        second.withdraw()
        if number == 1:  # The holder is now another trainer.
            first = Journal(in_memory)
            assert first.claim().lease.epoch > epoch
        assert [*first.find_leftovers(first.state())] == [left]
        assert first.sweep() == 1
        assert not first.find_leftovers(first.state())
        assert first.check().steps[1] == kept and (in_memory / kept.prefix).keys()


def test_the_caller_can_interrupt_a_wait_for_a_starting_trainer(in_memory):
    class Other(Exception):
        pass

    def stop() -> None:
        raise Other

    first = Journal(in_memory, while_waiting=stop)
    first.claim()
    starting_in(in_memory)
    with pytest.raises(Other):
        first.check()


def test_a_compactor_waits_for_a_starting_trainer_and_resumes_for_the_claim_holder(in_memory):
    first, second = claimed(in_memory), starting_in(in_memory)
    compactor = Journal(in_memory)
    resumed = beside(lambda: compactor.resume(wait=True))
    second.withdraw()
    assert resumed.result(60).lease.holder == first.claimed.lease.holder
    compactor.check()


def test_a_compactor_resumes_under_a_claim_whose_trainer_never_starts(in_memory, monkeypatch):
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    claimed(in_memory)
    second = starting_in(in_memory)
    assert Journal(in_memory).resume(wait=True).lease.holder == second.claimed.lease.holder


@pytest.mark.parametrize(
    ("claims", "expected"),
    [("", None), ("p", 1), ("s", None), ("b", 1), ("bp", 1), ("bpp", 1)]
    + [("bs", None), ("bsp", 3), ("bb", 2), ("d", None), ("bd", 1), ("sdp", 3)],
)
def test_a_starting_trainer_does_not_hide_one_that_may_be_running(
    in_memory, monkeypatch, claims, expected
):
    """b: training began; s: claimed only; p: starting; d: killed while it started."""
    for kind in claims:
        with monkeypatch.context() as patch:
            if kind == "d":
                patch.setattr(lease.Lease, "runs", property(lambda self: self.pid != 0))
                patch.setattr(lease.os, "getpid", lambda: 0)
            ledger = Journal(in_memory)
            ledger.claim(pending=kind in "pd")
            if kind == "b":
                ledger.start_run(None)
    monkeypatch.setattr(lease.Lease, "runs", property(lambda self: self.pid != 0))
    found = Journal(in_memory).state().trainer
    assert (found and found.lease.epoch) == expected


class Clock:
    """Replaces the time module in a wait."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


def starting(epoch: int, holder: str) -> dict[int, lease.Lease]:
    own = dict(host="elsewhere", pid=1, since_secs=0.0, pending=True)
    return {epoch: lease.Lease(epoch=epoch, holder=holder, **own)}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(lease, "time", clock := Clock())
    return clock


def test_each_starting_trainer_has_a_grace_period_of_its_own(clock):
    grace = lease.Grace(1.0)
    for epoch, holder in ((2, "a"), (2, "b")):  # The second claims as the first withdraws.
        began = clock.now
        while clock.now < began + lease.GRACE_SECS - 1:
            assert grace.wait(starting(epoch, holder))
    while grace.wait(starting(2, "c")):
        pass
    assert clock.now == 3 * lease.GRACE_SECS - 2


def test_the_wait_for_one_of_several_starting_trainers_is_not_extended_by_the_others(clock):
    grace, slow = lease.Grace(1.0), starting(2, "slow")
    while grace.wait(slow | starting(3, f"{clock.now // 10}")):
        pass
    assert clock.now == lease.GRACE_SECS


def test_a_stream_of_starts_stalls_a_trainer_for_a_bounded_time(clock):
    grace = lease.Grace(1.0)
    for _ in range(2):
        began = clock.now
        while grace.wait(starting(2, f"{clock.now // 10}")):
            pass
        assert clock.now - began == lease.GRACE_PERIODS * lease.GRACE_SECS
        grace.reset()
