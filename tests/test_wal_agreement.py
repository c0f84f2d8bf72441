# SPDX-License-Identifier: Apache-2.0
"""Agreement on a call at which all processes save: all interleavings of a small job, and more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TypeVar

import pytest

from deltackpt.wal.agreement import (
    AgreedOutcome,
    Leader,
    Member,
    ProcessStatus,
    Proposal,
    SaveRequest,
    too_long,
)

NEEDED = SaveRequest("one process needs it", restarts_wal=False)
DEADLINE_SECS = 10.0
_T = TypeVar("_T")


class Job:
    """Some processes and their messages, each of which is delayed or lost."""

    def __init__(self, count: int, calls: int, *, requesting: int):
        self.members = [Member() for _ in range(count)]
        self.calls = [0] * count
        self.most_calls = calls
        self.requesting: int | None = requesting
        self.leader = Leader(count, DEADLINE_SECS)
        self.now = 0.0
        self.proposal: Proposal | None = None
        self.statuses: dict[int, ProcessStatus] = {}
        self.outcomes: dict[int, bool] = {}
        #: For each process, the proposal whose outcome it waits for.
        self.waits: list[Proposal | None] = [None] * count
        self.saved: list[tuple[int, ...]] = [()] * count
        self.dead: set[int] = set()
        self.losses = 1

    def key(self) -> object:
        members = tuple((m._calls, m._last_proposal, m._accepted) for m in self.members)
        leader = tuple(vars(self.leader).values())
        told = tuple(sorted(self.statuses.items()))
        outcomes = tuple(sorted(self.outcomes.items()))
        rest = (self.requesting, self.now, self.proposal, tuple(self.waits), tuple(self.saved))
        return members, leader, told, outcomes, rest, frozenset(self.dead)

    # Events that may happen next, in any order.

    def events(self) -> Iterator[tuple[str, int]]:
        for process, member in enumerate(self.members):
            if process in self.dead:
                continue
            if self.waits[process] is not None:
                yield "give up", process
                if self.waits[process].id in self.outcomes:
                    yield "learn", process
            elif self.calls[process] < self.most_calls:
                yield "call", process
            if self.proposal is not None and self.proposal.id >= member.next_id:
                yield "hear", process
            if self.statuses.get(process) != self._status(process):
                yield "tell", process
            if process and self.losses:
                yield "die", process
        if 0 not in self.dead:
            yield "lead", 0

    def do(self, event: str, process: int) -> None:
        getattr(self, event.replace(" ", "_"))(process)

    def call(self, process: int) -> None:
        self.calls[process] += 1
        self.waits[process] = self.members[process].call()

    def learn(self, process: int) -> None:
        proposal = self.waits[process]
        assert proposal is not None
        self.waits[process] = None
        if self.outcomes[proposal.id]:
            self.saved[process] += (proposal.number,)
            if process == self.requesting:
                self.requesting = None

    def give_up(self, process: int) -> None:
        proposal = self.waits[process]
        assert proposal is not None
        self.outcomes.setdefault(proposal.id, False)
        self.learn(process)

    def hear(self, process: int) -> None:
        assert self.proposal is not None
        self.members[process].receive(self.proposal)

    def tell(self, process: int) -> None:
        self.statuses[process] = self._status(process)

    def die(self, process: int) -> None:
        self.dead.add(process)
        self.losses -= 1

    def lead(self, _: int) -> None:
        found = self.leader.next_action(self.now, self.statuses, None)
        if isinstance(found, Proposal):
            self.proposal = found
        elif isinstance(found, AgreedOutcome):
            is_agreed = self.outcomes.setdefault(found.proposal.id, found.is_agreed)
            answers = [s for s in self.statuses.values() if s.last_proposal == found.proposal.id]
            refused = not all(one.accepted for one in answers)
            self.leader.record_outcome(self.now, is_agreed=is_agreed, refused=refused)

    def _status(self, process: int) -> ProcessStatus:
        return self.members[process].status(NEEDED if process == self.requesting else None)

    def check(self) -> None:
        """Checks that if one process saves, every other that reaches the call does, or will."""
        for numbers in self.saved:
            for number in numbers:
                for process, calls in enumerate(self.calls):
                    waits = self.waits[process]
                    undecided = waits is not None and waits.number == number
                    passed = calls >= number and not undecided
                    assert not passed or number in self.saved[process], vars(self)


def copied(one: _T) -> _T:
    """Copies the attributes: ``copy.copy`` would take most of the time of the loop below."""
    found = object.__new__(type(one))
    vars(found).update(vars(one))
    return found


@pytest.mark.parametrize(("count", "calls", "losses"), [(2, 3, 1), (2, 4, 0), (3, 2, 0)])
def test_in_every_interleaving_all_that_reach_the_call_save_or_none_does(count, calls, losses):
    first = Job(count, calls, requesting=count - 1)
    first.losses = losses
    seen, waiting, agreed, refused, lost = {first.key()}, [first], 0, 0, 0
    while waiting:
        job = waiting.pop()
        job.check()
        agreed += any(job.saved)
        refused += False in job.outcomes.values()
        lost += bool(job.dead) and any(job.saved)
        if job.leader._id > 1 + (count == 2):
            continue
        for event in job.events():
            after = copied(job)
            for name, value in vars(job).items():
                if isinstance(value, (list, dict, set)):
                    setattr(after, name, value.copy())
            after.leader, after.members = copied(job.leader), [*map(copied, job.members)]
            after.do(*event)
            if (key := after.key()) not in seen:
                seen.add(key)
                waiting.append(after)
    assert agreed and refused and bool(lost) == bool(losses)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 4, 7])
def test_all_save_in_the_end_however_messages_are_delayed(count, seed):
    rng = random.Random(f"{count} {seed}")
    job = Job(count, 1 << 30, requesting=rng.randrange(count))
    job.losses = 0
    while job.requesting is not None or len({*job.saved}) > 1:
        # Training keeps them within a step of each other.
        ahead = {("call", p) for p in range(count) if job.calls[p] > min(job.calls)}
        events = [e for e in job.events() if e[0] != "give up" and e not in ahead]
        weights = [8 if event[0] == "call" else 1 for event in events]
        job.do(*rng.choices(events, weights)[0])
        job.check()
        job.now += 0.01
        assert min(job.calls) < 20_000
    assert {len(numbers) for numbers in job.saved} == {1}


@pytest.mark.parametrize("seed", range(20))
def test_if_a_process_is_lost_no_other_saves_alone_or_waits_forever(seed):
    rng = random.Random(seed)
    job = Job(3, 400, requesting=1)
    job.die(2)
    while min(job.calls[:2]) < job.most_calls:
        event = rng.choice(list(job.events()))
        job.do(*event)
        job.check()
        job.now += 0.1
    assert job.saved == [(), (), ()]


def test_a_refusal_leads_to_a_proposal_further_ahead():
    leader, ahead = Leader(1, DEADLINE_SECS), []
    for now in range(4):
        proposal = leader.next_action(
            now, {0: ProcessStatus(calls=5, request=NEEDED, last_proposal=now)}, None
        )
        assert isinstance(proposal, Proposal)
        ahead.append(proposal.number - 5)
        answer = ProcessStatus(calls=9, request=NEEDED, last_proposal=proposal.id, accepted=False)
        found = leader.next_action(now, {0: answer}, None)
        assert found == AgreedOutcome(proposal, False)
        leader.record_outcome(now, is_agreed=False, refused=True)
    assert ahead == [2, 4, 8, 16]


def test_an_unanswered_proposal_is_withdrawn_and_the_next_comes_later():
    leader = Leader(2, DEADLINE_SECS)
    statuses = {0: ProcessStatus(request=NEEDED), 1: ProcessStatus()}
    proposal = leader.next_action(0.0, statuses, None)
    assert isinstance(proposal, Proposal)
    assert leader.next_action(DEADLINE_SECS - 1, statuses, None) is None
    assert leader.next_action(DEADLINE_SECS, statuses, None) == AgreedOutcome(proposal, False)
    leader.record_outcome(DEADLINE_SECS, is_agreed=False, refused=False)
    assert leader.next_action(DEADLINE_SECS + 0.5, statuses, None) is None
    assert isinstance(leader.next_action(DEADLINE_SECS + 1, statuses, None), Proposal)


def test_a_status_from_before_the_agreed_call_requests_no_second_step():
    leader, requesting = Leader(1, DEADLINE_SECS), ProcessStatus(calls=5, request=NEEDED)
    proposal = leader.next_action(0.0, {0: requesting}, None)
    assert isinstance(proposal, Proposal)
    accepted = requesting._replace(last_proposal=1, accepted=True)
    assert leader.next_action(0.0, {0: accepted}, None) == AgreedOutcome(proposal, True)
    leader.record_outcome(0.0, is_agreed=True, refused=False)
    assert leader.next_action(0.0, {0: accepted}, None) is None
    assert (
        leader.next_action(0.0, {0: accepted._replace(calls=8, passed=1, request=None)}, None)
        is None
    )
    again = leader.next_action(0.0, {0: accepted._replace(calls=9, passed=1)}, None)
    assert isinstance(again, Proposal) and again.id == 2


def test_a_request_for_a_new_epoch_takes_precedence_over_one_to_save():
    anew = SaveRequest("rows were left out", restarts_wal=True)
    proposal = Leader(2, 1.0).next_action(
        0.0, {0: ProcessStatus(request=NEEDED), 1: ProcessStatus(request=anew)}, None
    )
    assert isinstance(proposal, Proposal) and proposal.request == anew


def test_the_total_bytes_of_all_processes_make_a_wal_too_long():
    statuses = {0: ProcessStatus(grown=60, dense=10), 1: ProcessStatus(grown=60, dense=10)}
    assert too_long(statuses, 1.0, 99)
    assert not too_long(statuses, 1.0, 100)
    assert not too_long({0: statuses[0]}, 1.0, 99)
