# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories with a rollback in their history, and checks of reads after damage."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import command
import jax
import jax.numpy as jnp
import numpy as np
from damages import DAMAGES

import deltackpt
import deltackpt.inspect
from deltackpt import serving, touched
from deltackpt.errors import NoIntactStep, RestoreError
from deltackpt.events import Event, FailureEvent
from deltackpt.ledger import entries
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.maintenance.verify import verify_root
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import stored_saves
from deltackpt.storage import buckets
from deltackpt.tiers import replicator
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.staging import StagingDir
from deltackpt.tiers.uploader import Uploader

HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}
#: Steps of the final lineage to the steps that their restores read.
CHAINS = {1: (1,), 2: (1, 2), 3: (1, 2, 3)}
#: Steps that a rollback removes; the first number is used again.
ABANDONED = (3, 9)
_ROWS = 40

Objects = Mapping[str, bytes]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Skips waits for concurrent removals and starts no uploaders; ``upload_all`` replaces them."""
    with (
        mock.patch.object(stored_saves, "_GONE_CHECKS", 1),
        mock.patch.object(replicator.ReplicatorProcess, "start", lambda self: None),
    ):
        yield


def upload_all(stage: Path) -> None:
    """Uploads everything in a staging directory to its remote directory."""
    Uploader(StagingDir(stage)).run(Trainer(is_gone=True))


class EventHandler(list[Event]):
    """Keeps all events."""

    def receive(self, event: Event) -> None:
        self.append(event)


@dataclasses.dataclass
class Where:
    """A local checkpoint directory, or the URL of a bucket with a trainer's staging directory.

    Attributes:
      root: path or URL, as users pass it.
      stage: the trainer's staging directory; None for a local directory.
      endpoint: of the bucket's server.
    """

    root: str
    stage: Path | None = None
    endpoint: str | None = None

    def options(self) -> ManagerOptions:
        if self.stage is None:
            return ManagerOptions()
        return ManagerOptions(
            tiers=Tiers(staging_dir=str(self.stage), endpoint=self.endpoint, wait_for="staging")
        )

    @contextlib.contextmanager
    def trainer(self, *event_handlers: EventHandler) -> Iterator[deltackpt.CheckpointManager]:
        """Opens a trainer; on exit, uploads what it saved."""
        with deltackpt.CheckpointManager(
            self.root, handlers=HANDLERS, options=self.options(), event_handlers=event_handlers
        ) as manager:
            yield manager
        if self.stage is not None:
            upload_all(self.stage)


def initial() -> dict:
    """A small state."""
    users = jnp.arange(_ROWS * 4, dtype=jnp.float32).reshape(_ROWS, 4)
    return {"tables": {"users": users}, "dense": {"kernel": jnp.arange(6.0)}}


def trained(state: dict, marks: touched.TouchState, seed: int) -> tuple[dict, touched.TouchState]:
    """One step: three rows and the dense leaf change."""
    rows = jnp.arange(3) * 5 + seed % 7
    users = state["tables"]["users"].at[rows].add(seed + 1.0)
    moved = {"tables": {"users": users}, "dense": {"kernel": state["dense"]["kernel"] + seed}}
    return moved, touched.mark(marks, {"users": rows})


def same(found: dict, expected: dict) -> bool:
    """Whether two states are the same bit for bit."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def reader(
    root: str, endpoint: str | None = None, *event_handlers: EventHandler
) -> deltackpt.CheckpointManager:
    """A manager that only reads."""
    tiers = None if endpoint is None else Tiers(endpoint=endpoint)
    options = ManagerOptions(access="read", tiers=tiers)
    return deltackpt.CheckpointManager(
        root, handlers=HANDLERS, options=options, event_handlers=event_handlers
    )


def train(where: Where, between: Callable[[], None] = lambda: None) -> dict[int, dict]:
    """Trains, rolls back ``ABANDONED`` and continues; returns the states of ``CHAINS``.

    Args:
      where: an empty checkpoint directory.
      between: called after the rollback of the abandoned steps, before the next save.
    """
    states: dict[int, dict] = {}
    state = initial()
    marks = touched.init(state["tables"])
    with where.trainer() as manager:
        for step in (1, 2, *ABANDONED):
            manager.save(step, state, touched=marks)
            states[step] = state
            state, marks = trained(state, marks, step)
    real = Journal.roll_back

    def roll_back(self: Journal, *args: Any, **how: Any) -> list[int]:
        done = real(self, *args, **how)
        between()
        return done

    with mock.patch.object(Journal, "roll_back", roll_back), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with where.trainer() as manager:
            found = manager.restore(2, states[2])
            assert found.touched is not None
            states[3], marks = trained(found.state, found.touched, 33)
            manager.save(3, states[3], touched=marks)
    return {step: states[step] for step in CHAINS}


class Bucket:
    """A bucket that can be damaged and repaired.

    Attributes:
      url: its URL.
      states: what was saved, by step.
      whole: its objects after all saves.
      between: its objects right after the rollback.
      prefixes: key prefixes of the committed steps, to the steps.
    """

    def __init__(self, url: str, folder: Path, *, endpoint: str | None = None):
        """Trains; ``folder`` gets the staging directories of nodes."""
        self.url, self._folder, self._endpoint = url, folder, endpoint
        self._at = buckets.locate(url, endpoint=endpoint).open()
        self._count = itertools.count()
        #: Its current objects; None if a node may have changed them.
        self._now: Objects | None = None
        self.between: Objects = {}
        self.states = train(self.new_node(), self._keep)
        self.whole = self._objects()
        found = JournalView(self._at).state().steps
        self.prefixes = {one.prefix: step for step, one in found.items()}

    def _objects(self) -> dict[str, bytes]:
        return {key: self._at.store.get(key) for key in self._at.store.keys("")}

    def _keep(self) -> None:
        self.between = self._objects()

    @property
    def needed(self) -> list[str]:
        """Keys of its objects, without those of abandoned steps."""
        left = entries.SAVES
        return [key for key in self.whole if self.step_of(key) or not key.startswith(left)]

    def put(self, wanted: Objects) -> None:
        """Replaces its contents with these objects."""
        now = self._objects() if self._now is None else self._now
        self._at.store.delete(now.keys() - wanted.keys())
        for key, data in wanted.items():
            if now.get(key) != data:
                self._at.store.put(key, data)
        self._now = wanted

    def damage(self, before: Objects, key: str, how: str) -> list[int]:
        """Damages one object; returns the steps whose chains are intact."""
        data = DAMAGES[how](before[key])
        others = {one: held for one, held in before.items() if one != key}
        self.put(others if data is None else {**others, key: data})
        return [one for one in CHAINS if self.step_of(key) not in CHAINS[one]]

    def step_of(self, key: str) -> int | None:
        """The committed step that an object belongs to."""
        return self.prefixes.get("/".join(key.split("/")[:2]))

    def steps(self) -> list[int]:
        """The committed steps."""
        return [*JournalView(self._at).state().steps]

    def new_node(self) -> Where:
        """A node with an empty staging directory."""
        stage, self._now = self._folder / f"stage{next(self._count)}", None
        return Where(self.url, stage, self._endpoint)


@dataclasses.dataclass
class Readers:
    """Every entry point that reads a root, compared with the states that were saved.

    Attributes:
      root: path or URL, as users pass it.
      states: what was saved, by step.
      intact: steps whose restore reads nothing damaged.
      endpoint: of a bucket's server.
    """

    root: str
    states: Mapping[int, dict]
    intact: Collection[int]
    endpoint: str | None = None

    @property
    def least(self) -> int:
        """The newest step that must be restored."""
        return max(self.intact, default=0)

    def _manager(self, *event_handlers: EventHandler) -> deltackpt.CheckpointManager:
        return reader(self.root, self.endpoint, *event_handlers)

    def restores_the_newest(self) -> None:
        told, newest = EventHandler(), max(self.states)
        with warnings.catch_warnings(record=True) as warned, self._manager(told) as manager:
            warnings.simplefilter("always")
            try:
                found = manager.restore_latest(self.states[newest])
            except NoIntactStep:
                assert not self.intact
                return
        assert found is not None, "nothing was restored"
        assert found.step in self.states and found.step >= self.least, found.step
        assert same(found.state, self.states[found.step])
        skipped = [step for step, _ in found.skipped]
        if found.step < newest:
            assert newest in skipped, "what was skipped is not reported"
        events = [one for one in told if isinstance(one, FailureEvent)]
        assert {one.step for one in events if one.operation == "skip"} >= {*skipped}
        texts = [str(one.message) for one in warned]
        assert all(any(re.search(rf"\b{step}\b", text) for text in texts) for step in skipped)

    def restores_a_step(self) -> None:
        with warnings.catch_warnings(), self._manager() as manager:
            warnings.simplefilter("ignore")
            assert {*manager.all_steps()} >= {*self.intact} and manager.recovery_points() == []
            if self.intact:
                expected = self.states[self.least]
                assert same(manager.restore(self.least, expected).state, expected)

    def reads_a_step(self) -> None:
        with warnings.catch_warnings(), self._manager() as manager:
            warnings.simplefilter("ignore")
            if self.intact:
                expected = self.states[self.least]
                rows = manager.read(self.least, {"tables/users": None}).tables["tables/users"]
                assert np.array_equal(rows["values"], expected["tables"]["users"])
                read = manager.read_state(self.least, {"dense": expected["dense"]})
                assert same(read.state, {"dense": expected["dense"]})

    def looks_inside(self) -> None:
        opened = deltackpt.inspect.open(self.root, endpoint=self.endpoint)
        assert {*opened.steps} >= {*self.intact}
        assert [save.step for save in opened.saves] == opened.steps
        if self.intact:
            users = opened.at(self.least).tables["tables/users"]
            assert np.array_equal(np.asarray(users), self.states[self.least]["tables"]["users"])
        assert opened.recovery_points() == [] and repr(opened) and opened._repr_html_()

    def verifies(self) -> None:
        found = verify_root(self.root, endpoint=self.endpoint)
        restorable = {one.step for one in found.steps if one.restorable}
        assert restorable >= {*self.intact}
        with warnings.catch_warnings(), self._manager() as manager:
            warnings.simplefilter("ignore")
            for step in restorable:
                expected = self.states[step]
                assert same(manager.restore(step, expected).state, expected)

    def lists(self) -> None:
        where = () if self.endpoint is None else ("--endpoint", self.endpoint)
        found = command.run("ls", self.root, *where)
        assert found.returncode == 0, found.stderr
        assert all(str(step) in found.stdout for step in self.intact)

    def follows(self) -> None:
        with serving.follow(self.root, "dense/*", poll_secs=None, endpoint=self.endpoint) as live:
            try:
                live.advance()
            except RestoreError:
                assert not self.intact
                return
            with live.version() as version:
                assert version.step in self.states and version.step >= self.least
                expected = self.states[version.step]["dense"]["kernel"]
                assert np.array_equal(version.dense["dense/kernel"], expected)


#: All entry points.
READS: list[Callable[[Readers], None]] = [
    Readers.restores_the_newest,
    Readers.restores_a_step,
    Readers.reads_a_step,
    Readers.looks_inside,
    Readers.verifies,
    Readers.lists,
    Readers.follows,
]


def goes_on(where: Where, states: Mapping[int, dict], intact: Collection[int]) -> None:
    """Checks that a new trainer restores and saves, and that a reader restores that save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with where.trainer() as manager:
            try:
                found = manager.restore_latest(states[max(states)])
            except NoIntactStep:
                assert not intact
                return
            assert found is not None and found.touched is not None, "nothing was restored"
            assert found.step in states and found.step >= max(intact, default=0), found.step
            assert same(found.state, states[found.step])
            state, marks = trained(found.state, found.touched, 77)
            manager.save(10, state, touched=marks)
        with reader(where.root, where.endpoint) as manager:
            result = manager.restore_latest(state)
    assert result is not None and result.step == 10 and result.skipped == ()
    assert same(result.state, state)
