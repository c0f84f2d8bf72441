# SPDX-License-Identifier: Apache-2.0
"""The lineage decides from the saves that it finds on disk; the saves here are made up."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import made_up_saves
import pytest
from hypothesis import given, settings

from deltackpt.format import naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.policies import Consecutive, OneShot
from deltackpt.save.branch import Clocks, Known, Reading, settled
from deltackpt.save.lineage import Lineage

LAYOUT = made_up_saves.layout()


def at(clock: int, *, place: str = "", identity: int = 7, windows=()) -> Clocks:
    return Clocks(readings=(Reading(place, identity, clock),), windows=tuple(windows))


class Trainer:
    """Begins saves at the steps of a directory."""

    def __init__(self, root: Path, **options):
        self.root = root
        self.lineage = Lineage(**options)

    def begin(self, step: int, clocks: Clocks | None = None, **options):
        clocks = at(step) if clocks is None else clocks
        options = {"layout": LAYOUT} | options
        return self.lineage.start_save(step, self.root / str(step), clocks=clocks, **options)

    def save(self, step: int, clocks: Clocks | None = None, **options):
        intent = self.begin(step, clocks, **options)
        made_up_saves.commit(self.root / str(step), intent)
        return intent


@pytest.fixture
def trainer(tmp_path):
    return Trainer(tmp_path)


def test_the_first_save_is_a_base_and_the_next_a_delta_since_its_clock(trainer):
    first = trainer.save(1)
    assert (first.kind, first.parent, first.since) == ("base", None, {})
    assert first.reason == "base: no committed save to build on"
    second = trainer.begin(2)
    assert second.kind == "delta" and second.since == {"": 1}
    assert second.parent is not None and second.parent.save_id == first.save_id
    assert second.parent.step_dir == "1"


def test_a_save_that_failed_after_its_commit_is_still_the_parent(trainer):
    trainer.save(1)
    second = trainer.save(2)
    trainer.lineage.failed(second.save_id)
    third = trainer.begin(3)
    assert third.parent is not None and third.parent.save_id == second.save_id


def test_a_damaged_manifest_makes_no_parent(trainer):
    trainer.save(1)
    path = trainer.root / "1" / naming.EMBEDDINGS_ITEM / naming.manifest_name(0)
    path.write_bytes(path.read_bytes()[:-1])
    assert trainer.begin(2).reason == "base: no committed save to build on"


def test_a_removed_parent_makes_a_base(trainer):
    trainer.save(1)
    trainer.save(2)
    assert trainer.lineage.next(clocks=at(3), layout=LAYOUT).kind == "delta"
    shutil.rmtree(trainer.root / "2")
    assert trainer.begin(3).reason == "base: the parent at 2 was removed"


def test_a_compacted_base_with_the_parents_save_id_replaces_it(trainer):
    trainer.save(1)
    second = trainer.save(2)
    assert trainer.lineage.next(clocks=at(3), layout=LAYOUT).kind == "delta"
    made_up_saves.compact(trainer.root / "2", second.save_id)
    shutil.rmtree(trainer.root / "2")
    third = trainer.begin(3)
    assert third.parent is not None and third.parent.save_id == second.save_id
    made_up_saves.compact(trainer.root / "2", SaveId("other", 2, 1))
    trainer.lineage.failed(third.save_id)
    assert trainer.begin(4).reason == "base: the parent at 2 was removed"


def test_a_compacted_base_announced_by_process_0_starts_a_new_chain(tmp_path):
    trainer = Trainer(tmp_path, compacted=True, policy=Consecutive(max_chain=2))
    trainer.save(1)
    second = trainer.save(2)
    assert trainer.lineage.newest_compacted() is None
    base = made_up_saves.compact(tmp_path / "2", second.save_id)
    third = trainer.begin(3)
    assert trainer.lineage.newest_compacted() == base
    made_up_saves.commit(tmp_path / "3", third, compacted=base)
    fourth = trainer.begin(4)
    # The second of the chain: without compaction it would be the third, beyond the bound.
    assert fourth.kind == "delta" and fourth.reason == "delta: number 2 of at most 2 in the chain"


def test_a_due_base_is_left_to_compaction(tmp_path):
    trainer = Trainer(tmp_path, compacted=True, policy=Consecutive(max_chain=2))
    for step in (1, 2, 3):
        trainer.save(step)
    assert trainer.begin(4).reason.startswith("delta: a base is left to compaction")


def test_one_shot_deltas_are_all_taken_against_the_base(tmp_path):
    trainer = Trainer(tmp_path, policy=OneShot())
    base = trainer.save(1)
    for step in (2, 3):
        intent = trainer.save(step)
        assert intent.since == {"": 1}
        assert intent.parent is not None and intent.parent.save_id == base.save_id


def test_a_base_reports_its_reason(trainer):
    trainer.save(1)
    asked = trainer.lineage.next
    for clocks, options, reason in (
        (Clocks(), {}, "no TouchState was given"),
        (at(2), {"layout": made_up_saves.layout(50)}, "the tables differ from the parent's"),
        (at(2, identity=8), {}, "is unrelated to the save of step 1"),
        (at(0), {}, "its clock 0 is before 1"),
        (at((1 << 31) - 1), {}, "the clock is exhausted"),
    ):
        decision = asked(clocks=clocks, **({"layout": LAYOUT} | options))
        assert decision.kind == "base" and reason in decision.reason
    assert asked(clocks=at(2), layout=LAYOUT).parent == "base"
    assert "requested by the caller" in trainer.begin(2, force_base=True).reason


def test_a_missing_touch_state_makes_a_base(trainer):
    both = Clocks(readings=(Reading("a", 1, 1), Reading("b", 2, 1)))
    trainer.save(1, both)
    decision = trainer.lineage.next(clocks=at(2, place="a", identity=1), layout=LAYOUT)
    assert (
        decision.kind == "base" and "at b in the save of step 1 is missing now" in decision.reason
    )


def test_clocks_are_older_if_any_touch_state_has_gone_back_and_others_are_unknown():
    before = Clocks(readings=(Reading("a", 1, 5), Reading("b", 2, 5)))
    for a, other, expected in ((4, 3, True), (5, 3, False), (6, 2, False), (4, 2, True)):
        now = Clocks(readings=(Reading("a", 1, a), Reading("b", other, 5)))
        assert now.is_older_than(before) is expected


def test_a_touch_state_that_moved_within_the_state_is_recognized_by_its_identity(trainer):
    trainer.save(1, at(1, place="a"))
    assert trainer.begin(2, at(2, place="b")).since == {"b": 1}


def test_with_a_stock_retention_policy_every_save_is_a_base(tmp_path):
    trainer = Trainer(tmp_path, protected=False)
    trainer.save(1)
    assert trainer.begin(2).reason == "base: nothing protects a chain from retention"


def test_after_distrust_saves_are_bases_until_a_base_begun_since_is_committed(trainer):
    trainer.save(1)
    early = trainer.begin(2, force_base=True)
    trainer.lineage.distrust("doubt")
    made_up_saves.commit(trainer.root / "2", early)
    lost = trainer.begin(3)
    assert lost.reason == "base: doubt"
    trainer.lineage.failed(lost.save_id)
    assert trainer.save(4).reason == "base: doubt"
    assert trainer.begin(5).kind == "delta"


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_the_oldest_of_several_lost_saves_is_named_in_any_report_order(trainer, order):
    for step in (1, 2, 3):
        trainer.save(step)
    for step in order:
        trainer.lineage.lost(step, f"step {step} is lost")
    assert trainer.save(4).reason == "base: step 2 is lost"
    assert trainer.save(5).kind == "delta"
    trainer.lineage.lost(5, "step 5 is lost")
    assert trainer.begin(6).reason == "base: step 5 is lost"


def test_a_lost_save_causes_one_base_however_late_it_is_reported(trainer):
    trainer.save(1)
    assert [trainer.save(step).kind for step in (2, 3)] == ["delta"] * 2
    trainer.lineage.lost(2, "step 2 is lost")
    assert trainer.begin(4).reason == "base: step 2 is lost"
    trainer.lineage.lost(3, "its parent is not there")  # The base is in flight.
    assert trainer.save(5).kind == "base"
    trainer.lineage.lost(3, "its parent is not there")
    assert trainer.save(6).kind == "delta"
    trainer.lineage.lost(6, "step 6 is lost")
    assert trainer.save(7).reason == "base: step 6 is lost"


def test_later_deltas_build_on_a_delta_that_became_a_base(trainer):
    trainer.save(1)
    intent = trainer.lineage.as_base(trainer.begin(2), "nearly all rows")
    assert (intent.kind, intent.parent, intent.since) == ("base", None, {})
    assert intent.reason == "base: nearly all rows" and intent.recent == {"": 1}
    made_up_saves.commit(trainer.root / "2", intent)
    assert trainer.lineage.next(clocks=at(3), layout=LAYOUT).parent == "base"


def test_saves_in_flight_and_their_possible_parents_are_protected(trainer):
    base, delta = trainer.save(1), trainer.save(2)
    flying = trainer.begin(3)
    assert trainer.lineage.protected() == {base.save_id, delta.save_id, flying.save_id}


def test_a_witness_is_that_of_the_parent(trainer):
    first = trainer.save(1)
    trainer.lineage.record_sample(SaveId("other", 1, 1), "not this one")
    trainer.lineage.record_sample(first.save_id, "rows")
    second = trainer.begin(2)
    assert second.sample == "rows" and not second.clocks_unchanged
    trainer.lineage.failed(second.save_id)
    assert trainer.begin(3, at(1)).clocks_unchanged


def test_rows_that_an_accumulator_still_holds_are_saved_again(trainer):
    trainer.save(1, at(10, windows=[(1, 0)]))
    trainer.save(2, at(12, windows=[(1, 2)]))
    # In the middle of the previous save's window: its rows change when the window ends.
    third = trainer.save(3, at(14, windows=[(2, 0)]))
    assert third.parent is not None and third.parent.step_dir == "2"
    assert third.since == {"": 10}
    assert trainer.begin(4, at(16, windows=[(2, 2)])).since == {"": 14}


def restored(trainer: Trainer, intent, clocks: Clocks) -> None:
    info = SaveInfo(
        save_id=intent.save_id,
        kind=intent.kind,
        parent=intent.parent,
        step_dir=str(intent.save_id.step),
        nbytes=160,
    )
    known = Known(
        info=info,
        path=trainer.root / info.step_dir,
        clocks=clocks,
        layout=LAYOUT,
        settled=settled(clocks, None),
        total_bytes=1760,
        chain_length=1,
    )
    trainer.lineage.adopt(known, base_bytes=1600, restores=intent.restores)


def test_a_restored_step_is_the_parent_of_a_new_run(trainer):
    trainer.save(1)
    second = trainer.save(2)
    run = trainer.lineage.run
    restored(trainer, second, at(0, identity=8))
    assert trainer.lineage.run != run
    third = trainer.begin(3, at(1, identity=8))
    assert third.parent is not None and third.parent.save_id == second.save_id
    assert (third.since, third.restores) == ({"": 0}, 1)


def test_a_run_reports_the_restored_step_until_it_saves(trainer, tmp_path):
    first = trainer.save(1)
    later = Trainer(tmp_path)
    assert later.lineage.restored is None
    restored(later, first, at(0))
    assert later.lineage.restored == 1
    later.begin(2)
    assert later.lineage.restored is None


def test_a_run_can_go_back_from_a_step_that_was_only_inspected(trainer):
    first = trainer.save(1)
    second = trainer.save(2)
    assert not trainer.lineage.can_go_back
    restored(trainer, first, at(0, identity=8))
    assert trainer.lineage.can_go_back
    assert not trainer.lineage.go_back(at(1, identity=8))
    assert trainer.lineage.next(clocks=at(3), layout=LAYOUT).kind == "delta"
    assert trainer.lineage.go_back(at(3))
    third = trainer.begin(3)
    assert third.parent is not None and third.parent.save_id == second.save_id


@pytest.mark.parametrize("found", ["distrust", "suspect", "lost"])
def test_a_run_that_goes_back_still_distrusts_its_rows(trainer, found):
    first = trainer.save(1)
    lineage = trainer.lineage
    lineage.lost(1, "doubt") if found == "lost" else getattr(lineage, found)("doubt")
    restored(trainer, first, at(0, identity=8))
    assert (lineage.distrusted, lineage.suspected) == (None, None)
    assert lineage.go_back(at(2))
    assert "doubt" in (lineage.distrusted, lineage.suspected)
    trainer.save(2, force_base=True)
    assert (lineage.distrusted, lineage.suspected) == (None, None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["commit", "fail", "late", "foreign", "remove"]), max_size=12),
    st.sampled_from([Consecutive(max_chain=4), OneShot(max_chain=4)]),
)
def test_a_delta_holds_all_rows_since_a_committed_save(outcomes, policy):
    """After any outcomes, a parent is valid and ``since`` is not after its clock."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder), policy=policy)
        stand: dict[SaveId, int] = {}
        for step, outcome in enumerate(outcomes, 1):
            intent = trainer.begin(step)
            if intent.kind == "delta":
                assert intent.parent is not None
                assert intent.since[""] <= stand[intent.parent.save_id]
            step_dir = trainer.root / str(step)
            if outcome in ("commit", "late", "remove"):
                made_up_saves.commit(step_dir, intent)
                stand[intent.save_id] = step
            if outcome == "foreign":
                other = made_up_saves.record(SaveId("other", step, 1))
                made_up_saves.write(step_dir / naming.EMBEDDINGS_ITEM, other)
            if outcome in ("fail", "late"):
                trainer.lineage.failed(intent.save_id)
            if outcome == "remove":
                shutil.rmtree(step_dir)
                del stand[intent.save_id]
