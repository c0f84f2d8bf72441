# SPDX-License-Identifier: Apache-2.0
"""Chains: what a step needs, what retention must keep, and how broken chains are reported."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import BrokenChain
from deltackpt.format import chain
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo


def save(step: int, parent: int | None = None, run: str = "run") -> SaveInfo:
    ref = None
    if parent is not None:
        ref = ParentRef(save_id=SaveId(run, parent, 0), step_dir=str(parent))
    return SaveInfo(
        save_id=SaveId(run, step, 0),
        kind="base" if parent is None else "delta",
        parent=ref,
        step_dir=str(step),
        nbytes=1,
    )


#: For each step, its parent among the earlier ones or None.
forests = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        *(
            st.one_of(st.none(), st.integers(0, step - 1)) if step else st.none()
            for step in range(count)
        )
    )
)


@given(forests)
def test_a_chain_descends_to_a_base_and_is_given_base_first(parents):
    saves = {str(step): save(step, parent) for step, parent in enumerate(parents)}
    for step in range(len(parents)):
        found = chain.restore_chain(saves[str(step)], saves)
        assert found[0].kind == "base" and found[-1] is saves[str(step)]
        for parent, child in zip(found, found[1:], strict=False):
            assert child.parent is not None and child.parent.save_id == parent.save_id


@given(forests, st.data())
def test_the_live_set_is_exactly_what_kept_saves_need(parents, data):
    saves = {str(step): save(step, parent) for step, parent in enumerate(parents)}
    keep = data.draw(st.sets(st.sampled_from([info.save_id for info in saves.values()])))
    flying = data.draw(st.sets(st.sampled_from([info.save_id for info in saves.values()])))
    live = chain.live_set(keep, saves.values(), flying)
    assert keep <= live and flying <= live
    left = {name: info for name, info in saves.items() if info.save_id in live}
    needed = set()
    for info in left.values():
        if info.save_id in keep | flying:
            needed |= {piece.save_id for piece in chain.restore_chain(info, left)}
    assert live == needed


@given(forests, st.data())
def test_a_missing_save_breaks_only_the_chains_through_it(parents, data):
    saves = {str(step): save(step, parent) for step, parent in enumerate(parents)}
    gone = data.draw(st.sampled_from(sorted(saves)))
    left = {name: info for name, info in saves.items() if name != gone}
    for name, info in left.items():
        through = {piece.step_dir for piece in chain.restore_chain(info, saves)}
        if gone in through:
            with pytest.raises(BrokenChain, match=rf"^\[?.*step {name}.*parent {gone} .*missing"):
                chain.restore_chain(info, left)
        else:
            chain.restore_chain(info, left)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (
            lambda s: {**s, "2": save(2, None, "other")},
            "expected save id run/2/0, found save id other",
        ),
        (lambda s: {**s, "2": s["1"]}, r"parent 2.*found save id run/1/0"),
        (
            lambda s: {**s, "3": dataclasses.replace(s["3"], parent=None)},
            "expected a delta with a parent, found none",
        ),
        (
            lambda s: {**s, "1": dataclasses.replace(s["1"], parent=s["2"].parent)},
            "expected a base without a parent",
        ),
        (
            lambda s: {
                **s,
                "2": dataclasses.replace(
                    s["2"], parent=ParentRef(save_id=SaveId("run", 3, 0), step_dir="3")
                ),
            },
            "expected a step below 2",
        ),
    ],
    ids=["another run", "another step", "no parent", "base with parent", "a circle"],
)
def test_the_error_names_the_fault_and_the_newest_intact_step(spoil, match):
    saves = {"0": save(0), "1": save(1), "2": save(2, 1), "3": save(3, 2)}
    spoilt = spoil(saves)
    with pytest.raises(BrokenChain, match=match) as caught:
        chain.restore_chain(spoilt["3"], spoilt)
    assert "newest intact step examined is" in str(caught.value)


# --- walk ------------------------------------------------------------------------------------


def test_a_walk_looks_up_a_parent_after_its_child_is_consumed() -> None:
    events: list[object] = []

    def find(parent: ParentRef) -> SaveInfo:
        events.append(parent.step_dir)
        return save(1)

    for found in chain.walk(save(2, 1), find):
        events.append(found.save_id.step)
    assert events == [2, "1", 1]


@pytest.mark.parametrize(
    ("start", "parents", "expected"),
    [
        (save(1), {}, [save(1)]),
        # A cycle ends, and the found save is yielded even if it is not the parent.
        (save(3, 2), {"2": save(2, 3), "3": save(3, 2)}, [save(3, 2), save(2, 3)]),
        (save(2, 1), {"1": save(1, run="other")}, [save(2, 1), save(1, run="other")]),
    ],
    ids=["base", "cycle", "another run"],
)
def test_a_walk_yields_what_it_finds(start, parents, expected) -> None:
    assert list(chain.walk(start, lambda parent: parents[parent.step_dir])) == expected


def test_a_walk_propagates_lookup_errors() -> None:
    def find(parent: ParentRef) -> SaveInfo:
        raise BrokenChain(parent.step_dir)

    with pytest.raises(BrokenChain, match="1"):
        list(chain.walk(save(2, 1), find))
