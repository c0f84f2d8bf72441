# SPDX-License-Identifier: Apache-2.0
"""Recovery of bundles after a staging directory is lost: abandoned saves are not revived."""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any

import hypothesis
import hypothesis.strategies as st

from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.entries import CatalogEntry, Entry, LeaseClaim, State
from deltackpt.ledger.lease import Lease
from deltackpt.tiers import startup
from deltackpt.tiers.bundles import BundleManifest
from deltackpt.tiers.staging import RunLineage


def claim(
    epoch: int, holder: str, *, began: bool = False, resumed_from: SaveId | None = None
) -> LeaseClaim:
    lease = Lease(epoch=epoch, holder=holder, host="host", pid=1, since_secs=0.0)
    return LeaseClaim(lease=lease, began=began, resumed_from=resumed_from)


@dataclasses.dataclass
class History:
    """The actions of trainers, and the saves that each moment built on."""

    drawn: random.Random
    claims: list[LeaseClaim] = dataclasses.field(default_factory=list)
    packs: list[BundleManifest] = dataclasses.field(default_factory=list)
    #: Saves that training builds on, oldest first: now, and at each moment that made one.
    line: list[SaveId] = dataclasses.field(default_factory=list)
    lines: dict[tuple[int, int], list[SaveId]] = dataclasses.field(default_factory=dict)
    at_root: int = 0
    begun: RunLineage | None = None
    known: dict[str, RunLineage] = dataclasses.field(default_factory=dict)
    runs: int = 0
    generation: int = 0
    resumed_from: SaveId | None = None
    attempt: int = 0

    @property
    def moment(self) -> tuple[int, int]:
        return len(self.claims), self.generation

    def take_over(self) -> None:
        """Another trainer takes the root and restores the newest or an older step."""
        self.claims.append(claim(len(self.claims) + 1, f"holder{len(self.claims)}"))
        self.generation = 0
        self._go_on(self.drawn.randint(self.at_root, len(self.line)))

    def go_back(self) -> None:
        """The same trainer restores an older step."""
        kept = self.drawn.randint(self.at_root, len(self.line))
        if kept < len(self.line):
            self.generation += 1
        self._go_on(kept)

    def _go_on(self, kept: int) -> None:
        self.line = self.line[:kept]
        self.resumed_from = self.line[-1] if self.line else None
        self.runs += 1
        before = None if self.resumed_from is None else self.known[self.resumed_from.run]
        self.begun = RunLineage(
            run=f"run{self.runs}",
            epoch=len(self.claims),
            holder=self.claims[-1].lease.holder,
            generation=self.generation,
            ancestors={}
            if before is None or self.resumed_from is None
            else before.followed(self.resumed_from),
        )
        self.known[self.begun.run] = self.begun

    def save(self) -> None:
        if not self.claims:
            self.take_over()
        newest = self.claims[-1]
        if not newest.began:
            self.claims[-1] = dataclasses.replace(
                newest, began=True, resumed_from=self.resumed_from
            )
            self.lines.setdefault((len(self.claims), 0), [*self.line])
        self.attempt += 1
        step = (self.line[-1].step if self.line else 0) + self.drawn.randint(1, 3)
        assert self.begun is not None
        save_id = SaveId(self.begun.run, step, self.attempt)
        self.line.append(save_id)
        self.lines[self.moment] = [*self.line]
        self.packs.append(
            BundleManifest(
                save_id=save_id,
                lineage=self.begun,
                root="s3://bucket/run",
                shard=0,
                shards=1,
                files={},
            )
        )

    def upload(self) -> None:
        self.at_root = self.drawn.randint(self.at_root, len(self.line))

    def state(self) -> State:
        root = {*self.line[: self.at_root]}
        moments = [one.lineage.moment for one in self.packs if one.save_id in root]
        claims = (
            dataclasses.replace(
                one,
                generations=max(
                    (generation + 1 for epoch, generation in moments if epoch == one.lease.epoch),
                    default=0,
                ),
            )
            for one in self.claims
        )
        return State(_as_entry(types.SimpleNamespace(claims=tuple(claims))))

    def traces(self, packs: list[BundleManifest]) -> set[tuple[int, int]]:
        """The moments that some bundles and the journal name."""
        found = {one.lineage.moment for one in packs}
        for claim in self.state().entry.claims:
            if claim.began:
                found.add((claim.lease.epoch, max(0, claim.generations - 1)))
        return found & self.lines.keys()

    def waiting(self) -> list[BundleManifest]:
        root = {*self.line[: self.at_root]}
        return [one for one in self.packs if one.save_id not in root]


def _as_entry(found: Any) -> Entry:
    return dataclasses.replace(Entry(), claims=found.claims)


STEPS = st.lists(
    st.sampled_from(["save", "save", "save", "take_over", "go_back", "upload"]), max_size=25
)


@hypothesis.settings(max_examples=500)
@hypothesis.given(steps=STEPS, seed=st.integers(0, 1 << 32))
def test_saves_that_training_builds_on_are_recovered_and_no_others(steps, seed):
    history = History(random.Random(seed))
    for step in steps:
        if history.claims or step in ("save", "take_over"):
            getattr(history, step)()
    packs = history.waiting()
    counting = current(packs, history.state(), lines_of(packs))
    # Expected: the saves behind the newest moment of which a save or a claim is left.
    if packs:
        newest = max(history.traces(packs))
        expected = {*history.lines[newest]} & {one.save_id for one in packs}
        assert counting == expected


@hypothesis.given(steps=STEPS, seed=st.integers(0, 1 << 32), lost=st.integers(0, 1 << 32))
def test_lost_bundles_never_revive_abandoned_saves(steps, seed, lost):
    history = History(random.Random(seed))
    for step in steps:
        if history.claims or step in ("save", "take_over"):
            getattr(history, step)()
    drawn = random.Random(lost)
    packs = [one for one in history.waiting() if drawn.random() < 0.7]
    counting = current(packs, history.state(), lines_of(packs))
    if traces := history.traces(packs):
        assert counting <= {*history.lines[max(traces)]}


def current(packs: list[BundleManifest], state: State, lines: list[RunLineage]) -> set[SaveId]:
    why_stale = startup.classify(state, lines)
    return {one.save_id for one in packs if why_stale(one.save_id, one.lineage) is None}


def why_stale(pack: BundleManifest, state: State, lines: list[RunLineage]) -> str | None:
    return startup.classify(state, lines)(pack.save_id, pack.lineage)


def lines_of(packs: list[BundleManifest]) -> list[RunLineage]:
    return [one.lineage for one in packs]


def one_pack(**changes: Any) -> BundleManifest:
    history = History(random.Random(0))
    history.save()
    return dataclasses.replace(history.packs[0], **changes)


def state_of(*claims: LeaseClaim) -> State:
    return State(_as_entry(types.SimpleNamespace(claims=claims)))


def test_bundles_of_another_root_under_the_url_do_not_count():
    pack = one_pack()
    why = why_stale(pack, state_of(claim(1, "somebody else")), [pack.lineage])
    assert why is not None and "another checkpoint directory" in why
    assert why_stale(pack, state_of(), [pack.lineage]) is not None


def test_an_existing_staging_directory_shows_that_training_rolled_back():
    pack = one_pack()
    later = RunLineage(run="later", epoch=1, holder=pack.lineage.holder, generation=1, ancestors={})
    state = state_of(claim(1, pack.lineage.holder, began=True))
    why = why_stale(pack, state, [pack.lineage, later])
    assert why is not None and "generation 1" in why
    after = dataclasses.replace(later, ancestors={pack.save_id.run: pack.save_id.attempt})
    assert why_stale(pack, state, [pack.lineage, after]) is None


def test_an_upload_after_a_rollback_supersedes_saves_of_earlier_trainers():
    pack = one_pack()
    later = claim(2, "next", began=True, resumed_from=pack.save_id)
    first = claim(1, pack.lineage.holder, began=True)
    for generations, is_stale in [(0, False), (1, False), (2, True)]:
        state = state_of(first, dataclasses.replace(later, generations=generations))
        assert (why_stale(pack, state, [pack.lineage]) is not None) == is_stale


def test_the_lineage_of_a_fenced_run_is_ignored():
    pack = one_pack()
    fenced = RunLineage(
        run="fenced", epoch=1, holder=pack.lineage.holder, generation=1, ancestors={}
    )
    state = state_of(
        claim(1, pack.lineage.holder), claim(2, "next", began=True, resumed_from=pack.save_id)
    )
    assert why_stale(pack, state, [pack.lineage, fenced]) is None


def test_rolled_back_steps_at_the_root_are_named():
    lineage = RunLineage(run="new", epoch=1, generation=1, ancestors={"old": 2}, holder="somebody")
    pack = one_pack(save_id=SaveId("new", 2, 1), lineage=lineage)
    old = [
        CatalogEntry(
            info=SaveInfo(
                save_id=SaveId("old", step, step + 1),
                kind="base",
                parent=None,
                step_dir=str(step),
                nbytes=1,
            ),
            item=None,
            prefix=f"saves/{step}.1.0123456789abcdef",
            stored_bytes=1,
            crc32c=0,
        )
        for step in range(4)
    ]
    state = State(Entry(claims=(claim(1, "somebody"),), catalog=tuple(old)))
    assert {one.step for one in startup.unfinished_rollback([pack], state, [pack.lineage])} == {
        2,
        3,
    }
    onwards = dataclasses.replace(pack, lineage=dataclasses.replace(lineage, ancestors={"old": 4}))
    assert startup.unfinished_rollback([onwards], state, [onwards.lineage]) == ()
    after = RunLineage(run="old", epoch=1, holder="somebody", generation=2, ancestors={"new": 1})
    assert startup.unfinished_rollback([pack], state, [pack.lineage, after]) == ()
    assert startup.unfinished_rollback([], state, []) == ()
    # Uploads of the run, or of a later one, follow its rollback.
    uploaded = dataclasses.replace(state.entry.claims[0], generations=2)
    state = State(dataclasses.replace(state.entry, claims=(uploaded,)))
    assert startup.unfinished_rollback([pack], state, [pack.lineage]) == ()
