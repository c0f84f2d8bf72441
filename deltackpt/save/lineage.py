# SPDX-License-Identifier: Apache-2.0
"""Lineage: the trainer's record of its own saves.

A save becomes a parent only once its own save id is found at its path, without listing a directory
or parsing names. After a failed save, the parent of the next delta is still the last committed
save, with its clock, and no touched row is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from deltackpt.errors import RestoreError
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import BaseRef, Kind, Layout, Manifest, ParentRef, SaveId
from deltackpt.policies import BaseOrDelta, Consecutive, Decision, LeftToCompaction
from deltackpt.save.branch import (
    Branch,
    Clocks,
    Known,
    Reading,
    Written,
    clocks_seen,
    discontinuity,
)
from deltackpt.state.touch_state import clock_exhausted
from deltackpt.storage.store import store_path

if TYPE_CHECKING:
    from deltackpt.format.wal_format import Continues
    from deltackpt.save.tracking_audit import Samples
    from deltackpt.tiers.replicated_steps import ReplicatedSteps

#: How many branches that restores left are kept for ``go_back``.
_FORMER = 4
#: Reason of a base if nothing tracks the rows.
UNTRACKED = "base: no TouchState was given"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intent:
    """The decision about one save; by default, that it is a base.

    ``recent``, for a base, is TouchState path to its clock at the previous save, 0 if unknown: if
    tracking is wrong, errors are most likely in rows touched since then. ``unmarked``, for a delta,
    is table name to rows to save although no stamp marks them, int64 ascending: those that a
    restore replayed from the WAL (``Known.replayed``), and those by which the table has grown.
    """

    save_id: SaveId
    reason: str  # why it is a base or a delta
    kind: Kind = "base"
    parent: ParentRef | None = None
    #: TouchState path to the clock after which rows are touched.
    since: Mapping[str, int] = dataclasses.field(default_factory=dict)
    restores: int = 0  # how often training has resumed from a restored step
    sample: Samples | None = None  # rows sampled at the parent
    #: TouchState path to its reading at the parent.
    seen: Mapping[str, Reading] = dataclasses.field(default_factory=dict)
    recent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    clocks_unchanged: bool = False  # no clock has advanced since the parent
    parents: tuple[str, ...] = ()  # see ``Manifest.parents``
    unmarked: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Lineage:
    """Decides between base and delta; thread-safe: polls and asks the policy under its lock."""

    def __init__(
        self,
        policy: BaseOrDelta | None = None,
        *,
        item: str = naming.EMBEDDINGS_ITEM,
        protected: bool = True,
        run: str | None = None,
        compacted: bool = False,
        uploaded: ReplicatedSteps | None = None,
    ):
        """Starts a new run, on whose id several processes must have agreed.

        If retention does not query this lineage (``protected``), every save is a base: a stock
        policy would delete bases under live deltas. If ``compacted``, bases are left to compaction.
        ``uploaded`` steps exist although they are not at their path.
        """
        self.policy = policy or Consecutive()
        if compacted:
            self.policy = LeftToCompaction(policy=self.policy)
        self._compacted = compacted
        self._item = item
        self._uploaded = uploaded
        self._protected = protected
        self._lock = threading.RLock()
        self._branch = Branch(run=run or new_run())
        #: Branches that restores have left, the newest last.
        self._former: list[Branch] = []
        #: Deleted saves, of former branches too.
        self._deleted: set[SaveId] = set()
        #: How many saves were begun, of all branches.
        self._begun = 0
        #: Why the next saves are bases, until one is committed.
        self._distrusted: str | None = None
        #: ``_begun`` at that time: only the commit of a base begun later ends the distrust.
        self._distrusted_at = 0
        #: Step of the oldest lost save, if that is the reason.
        self._lost: int | None = None
        #: A fault that only this process has found: its shard of the next delta fails.
        self.suspected: str | None = None

    @property
    def run(self) -> str:
        """Returns the id of the run: new at every start and at every restore."""
        return self._branch.run

    def start_save(
        self, step: int, step_dir: Path, *, clocks: Clocks, layout: Layout, force_base: bool = False
    ) -> Intent:
        """Records a save as in flight; returns the decision: a base, or a delta and its parent."""
        with self._lock:
            self._poll()
            branch = self._branch
            branch.attempts += 1
            self._begun += 1
            save_id = SaveId(branch.run, step, branch.attempts)
            parent, reason = self._decide(branch, clocks, layout, force_base)
            before = branch.begun
            known = branch.start_save(save_id, step_dir, parent, clocks, layout, self._begun)
            if parent is None:
                recent = {} if before is None else clocks_seen(clocks, before.clocks)
                # Never read before: all that it ever touched is recent.
                recent = recent or {reading.place: 0 for reading in clocks.readings}
                return Intent(
                    save_id=save_id, reason=reason, restores=branch.restores, recent=recent
                )
            return _delta(known, parent, reason, branch.restores)

    def as_base(self, intent: Intent, reason: str) -> Intent:
        """Returns the intent of the delta that was just started, turned into a base."""
        with self._lock:
            self._branch.make_base(intent.save_id)
        return Intent(
            save_id=intent.save_id,
            reason=f"base: {reason}",
            restores=intent.restores,
            recent=intent.since,
        )

    def record_sample(self, save_id: SaveId, sample: Samples) -> None:
        """Keeps the rows sampled at the save in flight, for the audits of later saves."""
        with self._lock:
            known = self._branch.in_flight
            if known is not None and known.info.save_id == save_id:
                known.sample = sample

    def distrust(self, reason: str) -> None:
        """Makes the next saves bases, until one is committed: touched rows cannot be trusted."""
        with self._polled():
            self._distrusted, self._distrusted_at, self._lost = reason, self._begun, None
            self.suspected = None

    def suspect(self, found: str) -> None:
        """Makes this process's shard of the next delta fail, so that all processes save a base."""
        with self._lock:
            self.suspected, self._distrusted_at = found, self._begun

    @property
    def distrusted(self) -> str | None:
        """Returns why the next save is a base; None if it need not be, or one is in flight."""
        with self._polled() as branch:
            flight = branch.in_flight
            if flight and flight.info.kind == "base" and flight.number > self._distrusted_at:
                return None
            return self._distrusted

    def lost(self, step: int, reason: str) -> None:
        """Records that a save, and the saves on top of it, cannot be uploaded: a base is next.

        If a base was started since then, nothing else is needed. The oldest of several saves gives
        the reason: processes may hear of the others at different times.
        """
        with self._polled() as branch:
            newest = branch.in_flight
            base = newest if newest and newest.info.kind == "base" else branch.delta_base
            if base is None or base.info.save_id.step <= step:
                if self._distrusted is None or self._lost is None or step < self._lost:
                    self._distrusted, self._lost = reason, step
                self._distrusted_at = self._begun

    def next(self, *, clocks: Clocks, layout: Layout) -> Decision:
        """Returns what ``start_save`` would decide now, without starting a save.

        A delta may still become a base, if the tracking audit fails or nearly all rows are touched.
        """
        with self._polled() as branch:
            branch = self._resumable(clocks) or branch
            parent, reason = self._decide(branch, clocks, layout, False)
            if parent is None:
                return Decision(kind="base", parent=None, reason=reason)
            which = "base" if parent is branch.delta_base else "previous"
            return Decision(kind="delta", parent=which, reason=reason)

    @property
    def restored(self) -> int | None:
        """Returns the restored step that the branch started from, until the first save."""
        branch = self._branch
        if branch.previous is None or branch.attempts or branch.left_after != self._begun:
            return None
        return branch.previous.info.save_id.step

    def parent_has(self, layout: Layout) -> bool:
        """Returns whether the possible parent of the next save has these tables."""
        previous = self._branch.previous
        return previous is not None and previous.layout == layout

    @property
    def forked_from(self) -> Continues | None:
        """Returns the restored recovery point, until a save of it is committed."""
        with self._polled() as branch:
            return None if branch.previous is None else branch.previous.continues

    @property
    def restores(self) -> int:
        """Returns the number of times that training was restored."""
        return self._branch.restores

    @property
    def newest_known(self) -> Known | None:
        """Returns the newest save, committed or in flight, or None."""
        with self._polled() as branch:
            return branch.in_flight or branch.previous

    @property
    def newest_committed(self) -> SaveId | None:
        """Returns the newest save that is known to be committed or was restored, or None."""
        with self._polled() as branch:
            return None if branch.previous is None else branch.previous.info.save_id

    def poll(self) -> None:
        """Records the save in flight as committed if it is: its files may be removed later."""
        with self._polled():
            pass

    def forget(self, save_id: SaveId) -> bool:
        """Forgets a deleted save if it is the newest committed one; returns whether it was."""
        with self._polled() as branch:
            self._deleted.add(save_id)
            return self._forget_deleted(branch)

    def _forget_deleted(self, branch: Branch) -> bool:
        if branch.previous is None or branch.previous.info.save_id not in self._deleted:
            return False
        if branch.delta_base is branch.previous:
            branch.delta_base = None
        branch.previous = None
        return True

    def next_parent(self, save_id: SaveId) -> SaveId:
        """Returns the expected parent of the next delta; the save itself if that is unknown."""
        with self._polled() as branch:
            if branch.previous is None or branch.previous.info.save_id != save_id:
                return save_id
            assert branch.delta_base is not None
            parent = self.policy.decide(branch.history).parent
            return branch.delta_base.info.save_id if parent == "base" else save_id

    @property
    def attempts(self) -> int:
        """Returns the number of saves that the run has started."""
        return self._branch.attempts

    def count_attempts(self, number: int) -> None:
        """Counts a save that other processes have started and this one could not."""
        with self._lock:
            self._branch.attempts = max(self._branch.attempts, number)

    def wrote(self, save_id: SaveId, written: Written) -> None:
        """Keeps the contents of the manifest of the save in flight: it need not be decoded."""
        with self._lock:
            known = self._branch.in_flight
            if known is not None and known.info.save_id == save_id:
                known.written = written

    def failed(self, save_id: SaveId) -> None:
        """Forgets the save in flight, unless it was committed; the parent and its clocks stay."""
        with self._polled() as branch:
            if branch.in_flight is not None and branch.in_flight.info.save_id == save_id:
                branch.in_flight = None

    def adopt(
        self, known: Known, *, base_bytes: int, restores: int = 0, run: str | None = None
    ) -> None:
        """Starts a new run at a restored step, the parent of the next save; see ``go_back``.

        Several processes must have agreed on ``run``, and on the bytes of the chain, whose base has
        ``base_bytes``. Its clocks are those of fresh TouchStates, 0; ``restores`` is the number in
        the step.
        """
        with self._lock:
            branch = Branch(run=run or new_run(), restores=restores + 1, base_bytes=base_bytes)
            branch.previous = branch.delta_base = branch.begun = known
            branch.since = [known]
            self._leave(branch)
            self._distrusted = self._lost = self.suspected = None

    @property
    def can_go_back(self) -> bool:
        """Returns whether a restore has left a branch with a save."""
        return bool(self._former)

    def go_back(self, clocks: Clocks) -> bool:
        """Returns to the branch before a restore, if the TouchStates belong to it; returns whether.

        The step was then restored only for inspection, and training continues with its state in
        memory; ``restored`` is reset, unless there was a save since.
        """
        with self._polled():
            former = self._resumable(clocks)
            if former is None:
                return False
            self._former.remove(former)
            self._leave(former)
            self._distrusted = self._distrusted or former.distrusted
            self.suspected = self.suspected or former.suspected
            self._forget_deleted(former)
            return True

    def _resumable(self, clocks: Clocks) -> Branch | None:
        """Returns the former branch that ``go_back`` would resume, or None."""
        if not clocks.readings or self._branch.knows(clocks):
            return None
        return next((one for one in reversed(self._former) if one.knows(clocks)), None)

    def _leave(self, branch: Branch) -> None:
        self._poll()
        self._branch.in_flight = None
        self._branch.left_after = self._begun
        self._branch.distrusted, self._branch.suspected = self._distrusted, self.suspected
        if self._branch.previous is not None:
            self._former.append(self._branch)
        if len(self._former) > _FORMER:
            # Drop branches without saves first: their steps were only inspected.
            looked_at = [former for former in self._former if not former.attempts]
            self._former.remove((looked_at or self._former)[0])
        self._branch = branch

    def newest_compacted(self) -> BaseRef | None:
        """Returns the newest compacted base of a save of this run, or the restored one.

        Process 0 writes it to the manifest in the background, and each process uses what it reads
        there, so that all decide alike.
        """
        with self._lock:
            candidates = [] if not self._compacted else self._branch.since[::-1]
        found = map(self._base_of, candidates)
        return next((base for base in found if base is not None), None)

    def protected(self) -> frozenset[SaveId]:
        """Returns saves that retention must keep: possible parents, and the save in flight."""
        with self._polled() as branch:
            return branch.protected

    @contextlib.contextmanager
    def _polled(self) -> Iterator[Branch]:
        with self._lock:
            self._poll()
            yield self._branch

    def _poll(self) -> None:
        """Advances the branch to the save in flight if it was committed. Under the lock."""
        known = self._branch.in_flight
        head = None if known is None else _committed_manifest(known, self._item)
        if known is None or head is None:
            return
        self._branch.advance(head, compacted=self._compacted)
        if known.info.kind == "base" and known.number > self._distrusted_at:
            self._distrusted = self._lost = self.suspected = None

    def _decide(
        self, branch: Branch, clocks: Clocks, layout: Layout, force_base: bool
    ) -> tuple[Known | None, str]:
        """Returns the parent of a delta, or None for a base, and the reason."""
        delta_base, previous = branch.delta_base, branch.previous
        exhausted = any(clock_exhausted(reading.clock) for reading in clocks.readings)
        for applies, reason in (
            (force_base, "base: requested by the caller"),
            (not self._protected, "base: nothing protects a chain from retention"),
            (delta_base is None or previous is None, "base: no committed save to build on"),
            (not clocks.readings and not layout.tables, "base: the state has no tables"),
            (not clocks.readings, UNTRACKED),
            (exhausted, "base: the clock is exhausted"),
            (self._distrusted is not None, f"base: {self._distrusted}"),
        ):
            if applies:
                return None, reason
        assert delta_base is not None and previous is not None
        for known in (previous, delta_base):
            if layout.new_rows_since(known.layout) is None:
                differ = "dense leaves" if known.layout.has_rows_of(layout) else "tables"
                return None, f"base: the {differ} differ from the parent's"
            if reason := discontinuity(clocks, known):
                return None, f"base: {reason}"
        decision = self.policy.decide(branch.history)
        if decision.kind == "base":
            return None, decision.reason
        parent = delta_base if decision.parent == "base" else previous
        if not self._exists(parent):
            return None, f"base: the parent at {parent.info.step_dir} was removed"
        return parent, decision.reason

    def _exists(self, known: Known) -> bool:
        """Returns whether a save, or a compacted base for it, exists as a parent."""
        if _committed_manifest(known, self._item) is not None:
            return True
        if self._uploaded is not None and self._uploaded.exists(known.info.save_id):
            return True
        return self._base_of(known) is not None

    def _base_of(self, known: Known) -> BaseRef | None:
        """Returns the readable compacted base that replaces a save, or None."""
        from deltackpt.reading import stored_saves  # Needed only if a save no longer exists.

        with contextlib.suppress(RestoreError, OSError):
            base = stored_saves.read_compacted(known.path, known.info.save_id, self._item)
            if base is not None:
                return BaseRef(save_id=base.info.save_id, nbytes=base.info.nbytes)
        return None if self._uploaded is None else self._uploaded.base_of(known.info.save_id)


def _delta(known: Known, parent: Known, reason: str, restores: int) -> Intent:
    assert parent.settled is not None
    clocks, info = known.clocks, known.info
    seen_at = {reading: parent.clocks.seen(reading) for reading in clocks.readings}
    unmarked = dict(parent.replayed)
    for table, new in (known.layout.new_rows_since(parent.layout) or {}).items():
        unmarked[table] = np.concatenate([unmarked.get(table, ()), new]).astype(np.int64)
    return Intent(
        kind="delta",
        save_id=info.save_id,
        parent=info.parent,
        since=clocks_seen(clocks, parent.settled),
        reason=reason,
        restores=restores,
        sample=parent.sample,
        seen={now.place: then for now, then in seen_at.items() if then is not None},
        unmarked=unmarked,
        parents=known.parents,
        clocks_unchanged=info.save_id.step > parent.info.save_id.step
        and not unmarked
        and all(then and now.clock == then.clock for now, then in seen_at.items()),
    )


def new_run() -> str:
    """Returns an id for a run."""
    return uuid.uuid4().hex


def _committed_manifest(known: Known, item: str) -> Written | None:
    """Returns the contents of the manifest at the path of a save, if it is that save's."""
    try:
        path = known.path / item / naming.manifest_name(0)
        data = store_path(path).read()
        crc32c = google_crc32c.value(data)
        if known.written is None or known.written.crc32c != crc32c:
            name = path.relative_to(known.path.parent).as_posix()
            head: Manifest = manifest.from_bytes(data, name=name)
            if head.save_id != known.info.save_id:
                return None
            known.written = Written(crc32c, head.nbytes, head.compacted)
    except (RestoreError, OSError):
        return None
    return known.written
