# SPDX-License-Identifier: Apache-2.0
"""Lineage: what the trainer knows of its own saves.

A save becomes a parent only once it is committed, and the lineage learns that by looking for its
own save id at the path where the save in flight was to appear: no directory listing, no name
parsing. A save that failed is simply not there, so the next delta's parent is the last committed
one and its clock, and no touched row is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from deltackpt.errors import RestoreError
from deltackpt.format import manifest, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import (
    BaseRef,
    Kind,
    Layout,
    Manifest,
    ParentRef,
    RollingShare,
    SaveId,
)
from deltackpt.format.stretches import Continues
from deltackpt.ledger.held import Held
from deltackpt.policy import BaseOrDelta, Consecutive, Decision, LeftToCompaction, Rolling
from deltackpt.reading import saves
from deltackpt.save.branch import Branch, Former, Known, Written, doubt
from deltackpt.save.clocks import Clocks, Reading, clocks_seen
from deltackpt.state.touch_state import clock_exhausted
from deltackpt.storage import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intent:
    """What one save will be.

    Attributes:
      kind: base or delta.
      save_id: its id.
      parent: the save that a delta is taken against.
      since: place of each TouchState to the clock after which its rows are touched; empty for a
        base.
      reason: why.
      restores: how often training has gone on from a restored step.
      witness: sampled rows as they were at the parent (``proof.Witness``); None without any.
      seen: place of each TouchState to what was read of it at the parent.
      recent: for a base, place of each TouchState to its clock at the save before, 0 where that is
        not known: rows touched since are likely to be wrong where the tracking is.
      stands_still: whether no clock has moved since the parent.
      parents: see ``Manifest.parents``.
      rolling: the share of all rows that a delta of a rolling base holds.
      replayed: of a delta, table name to the numbers of rows that it holds besides the touched
        ones, since a restore took them from a log: see ``Known.replayed``.
    """

    kind: Kind
    save_id: SaveId
    parent: ParentRef | None
    since: Mapping[str, int]
    reason: str
    restores: int = 0
    witness: Any = None
    seen: Mapping[str, Reading] = dataclasses.field(default_factory=dict)
    recent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stands_still: bool = False
    parents: tuple[str, ...] = ()
    rolling: RollingShare | None = None
    replayed: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Lineage:
    """Decides what each save is and remembers what was committed; thread-safe."""

    def __init__(
        self,
        policy: BaseOrDelta | None = None,
        *,
        item: str = names.EMBEDDINGS_ITEM,
        protected: bool = True,
        run: str | None = None,
        compacted: bool = False,
        ledger: Held | None = None,
    ):
        """Starts a new run.

        Args:
          policy: base or delta; ``Consecutive()`` by default.
          item: name of our item in a step directory.
          protected: whether retention asks this lineage what it must keep; where it is
            not, every save is a base, since a stock policy would delete bases under live deltas.
          run: id of the run; several processes must have agreed on it.
          compacted: whether bases are left to compaction.
          ledger: says of what is not where it was saved whether it is committed all the same.
        """
        self._policy = policy or Consecutive()
        if compacted:
            self._policy = LeftToCompaction(policy=self._policy)
        self._compacted = compacted
        self._item = item
        self._ledger = ledger
        self._protected = protected
        self._lock = threading.RLock()
        self._branch = Branch(run=run or new_run())
        self._former = Former()
        #: How many saves were begun, of all branches.
        self._begun = 0
        #: Why the next saves are bases, until one is committed.
        self._distrusted: str | None = None
        #: How many saves had been begun then: a base among them does not end it.
        self._distrusted_at = 0

    @classmethod
    def unprotected(cls, run: str | None = None) -> Lineage:
        """A lineage whose saves are all bases."""
        return cls(protected=False, run=run)

    @property
    def run(self) -> str:
        """Id of the run: new at every start and at every restore."""
        return self._branch.run

    def begin(
        self,
        step: int,
        step_dir: Path,
        *,
        clocks: Clocks,
        layout: Layout,
        force_base: bool = False,
    ) -> Intent:
        """Decides what the save of ``step`` is and notes it as in flight.

        Args:
          step: the training step.
          step_dir: where it will stand once committed.
          clocks: of the TouchStates that it saw.
          layout: the tables' layout; a delta's parent must have an equal one.
          force_base: take a base whatever the policy says.
        """
        with self._lock:
            seen = self._settle()
            branch = self._branch
            branch.attempts += 1
            self._begun += 1
            save_id = SaveId(branch.run, step, branch.attempts)
            kind, parent, reason = self._decide(clocks, layout, force_base, seen)
            before = branch.begun
            info = branch.begin(kind, save_id, step_dir, parent, clocks, layout, self._begun)
            if parent is None:
                recent = {} if before is None else clocks_seen(clocks, before.clocks)
                # Never read before: all that it ever touched is recent.
                recent = recent or {reading.place: 0 for reading in clocks.readings}
                return _base(info, recent, reason, branch.restores)
            intent = _delta(info, parent, clocks, reason, branch.restores)
            assert branch.in_flight is not None
            share = None
            if isinstance(self._policy, Rolling):
                share = self._policy.share_after(parent.info.rolling)
            parents = branch.in_flight.parents
            return dataclasses.replace(intent, parents=parents, rolling=share)

    def as_base(self, intent: Intent, reason: str) -> Intent:
        """Makes a base of a delta that was just begun.

        Args:
          intent: what ``begin`` gave.
          reason: why it cannot, or need not, be a delta.
        """
        with self._lock:
            self._branch.make_base(intent.save_id)
        return dataclasses.replace(
            intent,
            kind="base",
            parent=None,
            since={},
            reason=f"base: {reason}",
            witness=None,
            seen={},
            recent=intent.since,
            stands_still=False,
            parents=(),
            rolling=None,
            replayed={},
        )

    def witnessed(self, save_id: SaveId, witness: Any) -> None:
        """Keeps sampled rows as they were at the save in flight, for the proof of later ones."""
        with self._lock:
            known = self._branch.in_flight
            if known is not None and known.info.save_id == save_id:
                known.witness = witness

    def distrust(self, reason: str) -> None:
        """Makes the next saves bases, until one of them is committed.

        Args:
          reason: why the touched rows cannot be trusted.
        """
        with self._lock:
            self._settle()
            self._distrusted, self._distrusted_at = reason, self._begun

    def lost(self, step: int, reason: str) -> None:
        """Notes that a save does not come to the root: what is taken against it cannot, either.

        A base that was begun since needs it no more, and needs no other base after it.

        Args:
          step: of the save.
          reason: why the next save is a base.
        """
        with self._lock:
            self._settle()
            newest = self._branch.in_flight
            base = newest if newest and newest.info.kind == "base" else self._branch.anchor
            if base is None or base.info.save_id.step <= step:
                self._distrusted, self._distrusted_at = reason, self._begun

    def next(self, *, clocks: Clocks, layout: Layout, force_base: bool = False) -> Decision:
        """What ``begin`` would decide now, without noting anything.

        A delta may still become a base, where the sampled proof fails or nearly all rows are
        touched.
        """
        with self._lock:
            seen = self._settle()
            kind, parent, reason = self._decide(clocks, layout, force_base, seen)
            if parent is None:
                return Decision(kind=kind, parent=None, reason=reason)
            anchored = parent is self._branch.anchor and parent.info.rolling is None
            which = "base" if anchored else "previous"
            return Decision(kind=kind, parent=which, reason=reason)

    @property
    def restored(self) -> int | None:
        """The restored step that the branch began with, until a save is begun."""
        branch = self._branch
        if branch.previous is None or branch.attempts or branch.left_after != self._begun:
            return None
        return branch.previous.info.save_id.step

    @property
    def goes_on(self) -> SaveId | None:
        """The save that the next one may be a delta of; None where there is none yet."""
        previous = self._branch.previous
        return None if previous is None else previous.info.save_id

    @property
    def continues(self) -> Continues | None:
        """The point of a log that training was restored at, until a save of it is committed."""
        with self._lock:
            self._settle()
            previous = self._branch.previous
            return None if previous is None else previous.continues

    @property
    def restores(self) -> int:
        """How often training has been restored."""
        return self._branch.restores

    @property
    def newest_known(self) -> Known | None:
        """The newest save, whether it is committed or in flight; None where there is none."""
        with self._lock:
            self._settle()
            return self._branch.in_flight or self._branch.previous

    @property
    def newest_committed(self) -> SaveId | None:
        """The newest save that is known to be committed, or was restored; None without any."""
        with self._lock:
            self._settle()
            previous = self._branch.previous
            return None if previous is None else previous.info.save_id

    def is_committed(self, save_id: SaveId) -> bool:
        """Whether the save that is told of is the newest one, and stands."""
        with self._lock:
            self._settle()
            previous = self._branch.previous
            return previous is not None and previous.info.save_id == save_id

    def next_parent(self, save_id: SaveId) -> SaveId:
        """What the policy would take the next delta against, now that a save stands.

        Args:
          save_id: of the save; the answer where it is not known to stand, or a base is next.
        """
        with self._lock:
            self._settle()
            branch = self._branch
            if branch.previous is None or branch.previous.info.save_id != save_id:
                return save_id
            assert branch.anchor is not None
            parent = self._policy.decide(branch.history).parent
            return branch.anchor.info.save_id if parent == "base" else save_id

    @property
    def policy(self) -> BaseOrDelta:
        """What decides between base and delta."""
        return self._policy

    @property
    def attempts(self) -> int:
        """How many saves of the run were begun."""
        return self._branch.attempts

    def count_attempts(self, number: int) -> None:
        """Counts a save that other processes have begun, and this one could not."""
        with self._lock:
            self._branch.attempts = max(self._branch.attempts, number)

    def wrote(self, save_id: SaveId, written: Written) -> None:
        """Keeps what the manifest of the save in flight says, so that it need not be decoded.

        Args:
          save_id: of the save; process 0 has written its manifest.
          written: what that says.
        """
        with self._lock:
            known = self._branch.in_flight
            if known is not None and known.info.save_id == save_id:
                known.written = written

    def failed(self, save_id: SaveId) -> None:
        """Forgets the save in flight, unless it was committed; the parent and its clocks stay."""
        with self._lock:
            self._settle()
            known = self._branch.in_flight
            if known is not None and known.info.save_id == save_id:
                self._branch.in_flight = None

    def adopt(
        self,
        target: SaveInfo,
        step_dir: Path,
        layout: Layout,
        *,
        sizes: Sequence[int],
        clocks: Clocks,
        restores: int = 0,
        run: str | None = None,
        witness: Any = None,
        parents: tuple[str, ...] = (),
        replayed: Mapping[str, np.ndarray] | None = None,
        continues: Continues | None = None,
    ) -> None:
        """Starts a new run at a restored step: the parent of what follows.

        What was known before stays known: see ``go_back``.

        Args:
          target: the save that was restored.
          step_dir: the restored step.
          layout: the tables' layout.
          sizes: bytes of each save of its chain, base first; several processes must have agreed
            on them.
          clocks: of the fresh TouchStates, at clock 0.
          restores: how often training had been restored when the step was saved.
          run: id of the new run; several processes must have agreed on it.
          witness: sampled rows as they were restored.
          parents: step directories of its parents, nearest first.
          replayed: table name to the numbers of rows that were taken from a log instead.
          continues: the point of the log that these rows led to.
        """
        with self._lock:
            self._leave(Branch(run=run or new_run(), restores=restores + 1))
            self._branch.go_on_from(
                Known(
                    info=target,
                    path=step_dir,
                    clocks=clocks,
                    layout=layout,
                    settled=None if clocks.gathers else clocks,
                    total_bytes=sum(sizes),
                    chain_length=len(sizes) - 1,
                    witness=witness,
                    parents=parents[: manifest.MOST_PARENTS],
                    replayed=replayed or {},
                    continues=continues,
                ),
                sizes[0],
            )
            self._distrusted = None

    @property
    def can_go_back(self) -> bool:
        """Whether a restore has left a branch with a save."""
        return bool(self._former)

    def go_back(self, clocks: Clocks) -> bool:
        """Goes back to the branch that a restore left, where the TouchStates are those of it.

        A step was restored only to be looked at, and training goes on with what it had in memory:
        then ``restored`` is what it was before, unless there was a save meanwhile.

        Args:
          clocks: of the TouchStates that the next save sees.

        Returns:
          Whether it did.
        """
        with self._lock:
            self._settle()
            if not clocks.readings or self._branch.knows(clocks):
                return False
            branch = self._former.take(clocks)
            if branch is not None:
                self._leave(branch)
            return branch is not None

    def _leave(self, branch: Branch) -> None:
        """Goes on with another branch."""
        self._settle()
        self._branch.in_flight = None
        self._branch.left_after = self._begun
        self._former.add(self._branch)
        self._branch = branch

    def newest_compacted(self) -> BaseRef | None:
        """The newest compacted base that stands for a save of this run, or the restored one.

        For the manifest that process 0 writes in the background: each process goes on from what it
        reads there, so that all decide alike.
        """
        with self._lock:
            candidates = [] if not self._compacted else self._branch.since[::-1]
        found = map(self._base_of, candidates)
        return next((base for base in found if base is not None), None)

    def protected(self) -> frozenset[SaveId]:
        """Saves that retention must not remove: possible parents, and what is in flight."""
        with self._lock:
            self._settle()
            return self._branch.protected

    def _settle(self) -> Known | None:
        """Promotes the save in flight if it was committed: the save that was found to stand."""
        known = self._branch.in_flight
        head = None if known is None else _standing(known, self._item)
        if known is None or head is None:
            return None
        self._branch.promote(head, compacted=self._compacted)
        if known.info.kind == "base" and known.number > self._distrusted_at:
            self._distrusted = None
        return known

    def _decide(
        self, clocks: Clocks, layout: Layout, force_base: bool, seen: Known | None
    ) -> tuple[Kind, Known | None, str]:
        branch = self._branch
        anchor, previous = branch.anchor, branch.previous
        exhausted = any(clock_exhausted(reading.clock) for reading in clocks.readings)
        for applies, reason in (
            (force_base, "base: asked for by the caller"),
            (not self._protected, "base: nothing protects a chain from retention"),
            (not clocks.readings, "base: no TouchState was given"),
            (anchor is None or previous is None, "base: no committed save to build on"),
            (exhausted, "base: the clock is exhausted"),
            (self._distrusted is not None, f"base: {self._distrusted}"),
        ):
            if applies:
                return "base", None, reason
        assert anchor is not None and previous is not None
        if previous.layout != layout:
            return "base", None, "base: the tables are not those of the parent"
        for known in (previous, anchor):
            if reason := doubt(clocks, known):
                return "base", None, f"base: {reason}"
        decision = self._policy.decide(branch.history)
        if decision.kind == "base":
            return "base", None, decision.reason
        parent = anchor if decision.parent == "base" else previous
        if parent is not seen and not self._stands(parent):
            return "base", None, f"base: the parent at {parent.info.step_dir} is gone"
        return "delta", parent, decision.reason

    def _stands(self, known: Known) -> bool:
        """Whether a save, or a compacted base for it, is there to be a parent."""
        if _standing(known, self._item) is not None:
            return True
        if self._ledger is not None and self._ledger.stands(known.info.save_id):
            return True
        return self._base_of(known) is not None

    def _base_of(self, known: Known) -> BaseRef | None:
        """The compacted base that stands for a save; None where there is none that can be read."""
        with contextlib.suppress(RestoreError, OSError):
            base = saves.read_compacted(known.path, known.info.save_id, self._item)
            if base is not None:
                return BaseRef(save_id=base.info.save_id, nbytes=base.info.nbytes)
        return None if self._ledger is None else self._ledger.base_of(known.info.save_id)


def _base(info: SaveInfo, recent: Mapping[str, int], reason: str, restores: int) -> Intent:
    """What a save is that needs no other."""
    return Intent(
        kind="base",
        save_id=info.save_id,
        parent=None,
        since={},
        reason=reason,
        restores=restores,
        recent=recent,
    )


def _delta(info: SaveInfo, parent: Known, clocks: Clocks, reason: str, restores: int) -> Intent:
    """What a save is that is taken against a parent."""
    assert parent.settled is not None
    seen_at = {reading: parent.clocks.seen(reading) for reading in clocks.readings}
    return Intent(
        kind="delta",
        save_id=info.save_id,
        parent=info.parent,
        since=clocks_seen(clocks, parent.settled),
        reason=reason,
        restores=restores,
        witness=parent.witness,
        seen={now.place: then for now, then in seen_at.items() if then is not None},
        replayed=parent.replayed,
        stands_still=info.save_id.step > parent.info.save_id.step
        and not parent.replayed
        and all(then and now.clock == then.clock for now, then in seen_at.items()),
    )


def new_run() -> str:
    """An id for a run."""
    return uuid.uuid4().hex


def _standing(known: Known, item: str) -> Written | None:
    """What the manifest at the path of a save says, if it is that save's: if it was committed."""
    try:
        name, data = _manifest_bytes(known.path, item, 0)
        crc32c = google_crc32c.value(data)
        if known.written is None or known.written.crc32c != crc32c:
            head: Manifest = manifest.from_bytes(data, name=name)
            if head.save_id != known.info.save_id:
                return None
            known.written = Written.of(head, crc32c)
    except (RestoreError, OSError):
        return None
    return known.written


def read_manifest(step_dir: Path, item: str, process: int = 0) -> Manifest:
    """Reads one manifest of a step.

    Raises:
      Damaged: it is missing or altered.
    """
    name, data = _manifest_bytes(step_dir, item, process)
    return manifest.from_bytes(data, name=name)


def _manifest_bytes(step_dir: Path, item: str, process: int) -> tuple[str, bytes]:
    path = step_dir / item / names.manifest_name(process)
    return f"{step_dir.name}/{item}/{path.name}", files.read_bytes(path)
