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
from collections.abc import Sequence
from pathlib import Path

from deltackpt import layout, manifest, stored
from deltackpt.chain import SaveInfo
from deltackpt.errors import RestoreError
from deltackpt.manifest import BaseRef, Kind, Layout, Manifest, ParentRef, SaveId
from deltackpt.policy import BaseOrDelta, Consecutive, Decision, History, LeftToCompaction
from deltackpt.storage import files
from deltackpt.touched import clock_exhausted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intent:
    """What one save will be.

    ``since_clock`` is the parent's clock: rows stamped after it are touched. It is None for a
    base. ``restores`` counts how often training has gone on from a restored step.
    """

    kind: Kind
    save_id: SaveId
    parent: ParentRef | None
    since_clock: int | None
    reason: str
    restores: int = 0


@dataclasses.dataclass(kw_only=True)
class _Known:
    """A save of this process: committed, or in flight."""

    info: SaveInfo
    path: Path
    clock: int | None
    layout: Layout
    total_bytes: int = 0
    chain_length: int = 0


class Lineage:
    """Decides what each save is and remembers what was committed; thread-safe."""

    def __init__(
        self,
        policy: BaseOrDelta | None = None,
        *,
        item: str = layout.EMBEDDINGS_ITEM,
        protected: bool = True,
        run: str | None = None,
        compacted: bool = False,
    ):
        """Starts a new run.

        Args:
          policy: base or delta; ``Consecutive()`` by default.
          item: name of our item in a step directory.
          protected: whether retention is bound to this lineage by ``KeepChain``; where it is
            not, every save is a base, since a stock policy would delete bases under live deltas.
          run: id of the run; several processes must have agreed on it.
          compacted: whether bases are left to compaction.
        """
        self._policy = policy or Consecutive()
        if compacted:
            self._policy = LeftToCompaction(policy=self._policy)
        self._compacted = compacted
        self._item = item
        self._protected = protected
        self._lock = threading.RLock()
        self._start_run(run)

    @classmethod
    def unprotected(cls, run: str | None = None) -> Lineage:
        """A lineage whose saves are all bases."""
        return cls(protected=False, run=run)

    @property
    def run(self) -> str:
        """Id of the run: new at every start and at every restore."""
        return self._run

    def begin(
        self,
        step: int,
        step_dir: Path,
        *,
        clock: int | None,
        layout: Layout,
        force_base: bool = False,
    ) -> Intent:
        """Decides what the save of ``step`` is and notes it as in flight.

        Args:
          step: the training step.
          step_dir: where it will stand once committed.
          clock: clock of the TouchState that it saw, None without one.
          layout: the tables' layout; a delta's parent must have an equal one.
          force_base: take a base whatever the policy says.
        """
        with self._lock:
            seen = self._settle()
            self._attempt += 1
            save_id = SaveId(self._run, step, self._attempt)
            kind, parent, reason = self._decide(clock, layout, force_base, seen)
            ref = None
            if parent is not None:
                ref = ParentRef(save_id=parent.info.save_id, step_dir=parent.info.step_dir)
            info = SaveInfo(
                save_id=save_id, kind=kind, parent=ref, step_dir=step_dir.name, nbytes=0
            )
            self._in_flight = _Known(info=info, path=step_dir, clock=clock, layout=layout)
            if parent is not None:
                self._in_flight.total_bytes = parent.total_bytes
                self._in_flight.chain_length = parent.chain_length + 1
            return Intent(
                kind=kind,
                save_id=save_id,
                parent=ref,
                since_clock=parent.clock if parent is not None else None,
                reason=reason,
                restores=self._restores,
            )

    def next(self, *, clock: int | None, layout: Layout, force_base: bool = False) -> Decision:
        """What ``begin`` would decide now, without noting anything."""
        with self._lock:
            seen = self._settle()
            kind, parent, reason = self._decide(clock, layout, force_base, seen)
            if parent is None:
                return Decision(kind=kind, parent=None, reason=reason)
            which = "base" if parent is self._anchor else "previous"
            return Decision(kind=kind, parent=which, reason=reason)

    @property
    def attempts(self) -> int:
        """How many saves of the run were begun."""
        return self._attempt

    def count_attempts(self, number: int) -> None:
        """Counts a save that other processes have begun, and this one could not."""
        with self._lock:
            self._attempt = max(self._attempt, number)

    def failed(self, save_id: SaveId) -> None:
        """Forgets the save in flight, unless it was committed; the parent and its clock stay."""
        with self._lock:
            self._settle()
            if self._in_flight is not None and self._in_flight.info.save_id == save_id:
                self._in_flight = None

    def adopt(
        self,
        target: SaveInfo,
        step_dir: Path,
        layout: Layout,
        *,
        sizes: Sequence[int],
        restores: int = 0,
        run: str | None = None,
    ) -> None:
        """Starts a new run at a restored step: the parent of what follows, at clock 0.

        Args:
          target: the save that was restored.
          step_dir: the restored step.
          layout: the tables' layout.
          sizes: bytes of each save of its chain, base first; several processes must have agreed
            on them.
          restores: how often training had been restored when the step was saved.
          run: id of the new run; several processes must have agreed on it.
        """
        with self._lock:
            self._start_run(run)
            self._restores = restores + 1
            self._previous = self._anchor = _Known(
                info=target,
                path=step_dir,
                clock=0,
                layout=layout,
                total_bytes=sum(sizes),
                chain_length=len(sizes) - 1,
            )
            self._base_bytes = sizes[0]
            self._since = [self._previous]

    def newest_compacted(self) -> BaseRef | None:
        """The newest compacted base that stands for a save of this run, or the restored one.

        For the manifest that process 0 writes in the background: each process goes on from what it
        reads there, so that all decide alike.
        """
        with self._lock:
            candidates = [] if not self._compacted else self._since[::-1]
        for known in candidates:
            with contextlib.suppress(RestoreError, OSError):
                base = stored.read_compacted(known.path, known.info.save_id, self._item)
                if base is not None:
                    return BaseRef(save_id=base.info.save_id, nbytes=base.info.nbytes)
        return None

    def restart(self) -> None:
        """Starts a new run without a parent: the next save is a base."""
        with self._lock:
            self._start_run()

    def protected(self) -> frozenset[SaveId]:
        """Saves that retention must not remove: possible parents, and what is in flight."""
        with self._lock:
            self._settle()
            known = (self._anchor, self._previous, self._in_flight)
            ids = {entry.info.save_id for entry in known if entry is not None}
            if self._in_flight is not None and self._in_flight.info.parent is not None:
                ids.add(self._in_flight.info.parent.save_id)
            return frozenset(ids)

    def _start_run(self, run: str | None = None) -> None:
        self._run = run or new_run()
        self._restores = 0
        self._attempt = 0
        #: The newest save whose clock is known and that deltas may all be taken against.
        self._anchor: _Known | None = None
        self._previous: _Known | None = None
        self._in_flight: _Known | None = None
        #: The anchor and the saves since, oldest first, where compaction may make one an anchor.
        self._since: list[_Known] = []
        #: The save for which the compacted base stands that the anchor is.
        self._base_id: SaveId | None = None
        self._base_bytes = 0
        self._delta_bytes: list[int] = []

    def _settle(self) -> _Known | None:
        """Promotes the save in flight if it was committed: the save that was found to stand."""
        known = self._in_flight
        head = None if known is None else _standing(known, self._item)
        if known is None or head is None:
            return None
        self._in_flight = None
        # The bytes of every process's part: all processes decide from the same figures.
        known.info = dataclasses.replace(known.info, nbytes=head.nbytes)
        known.total_bytes += head.nbytes
        self._previous = known
        if known.info.kind == "base":
            self._anchor, self._base_bytes, self._delta_bytes = known, known.info.nbytes, []
            self._since, self._base_id = [], None
        else:
            self._delta_bytes.append(known.info.nbytes)
        if self._compacted:
            self._since.append(known)
            if head.compacted is not None:
                self._go_on_from(head.compacted)
        return known

    def _go_on_from(self, base: BaseRef) -> None:
        """Takes a save for which a compacted base stands as the anchor: its chain is no more."""
        ids = [known.info.save_id for known in self._since]
        if base.save_id not in ids or self._base_id == base.save_id:
            return
        self._since = self._since[ids.index(base.save_id) :]
        anchor, *later = self._since
        anchor.total_bytes, anchor.chain_length = base.nbytes, 0
        descend = {base.save_id: anchor}
        self._delta_bytes = []
        for known in later:
            parent = None if known.info.parent is None else descend.get(known.info.parent.save_id)
            if parent is not None:
                known.total_bytes = parent.total_bytes + known.info.nbytes
                known.chain_length = parent.chain_length + 1
                descend[known.info.save_id] = known
                self._delta_bytes.append(known.info.nbytes)
        self._anchor, self._base_bytes, self._base_id = anchor, base.nbytes, base.save_id

    def _decide(
        self, clock: int | None, layout: Layout, force_base: bool, seen: _Known | None
    ) -> tuple[Kind, _Known | None, str]:
        anchor, previous = self._anchor, self._previous
        for applies, reason in (
            (force_base, "base: asked for by the caller"),
            (not self._protected, "base: nothing protects a chain from retention"),
            (clock is None, "base: no TouchState was given"),
            (anchor is None or previous is None, "base: no committed save to build on"),
            (clock is not None and clock_exhausted(clock), "base: the clock is exhausted"),
        ):
            if applies:
                return "base", None, reason
        assert anchor is not None and previous is not None and clock is not None
        if previous.layout != layout:
            return "base", None, "base: the tables are not those of the parent"
        if any(known.clock is None or known.clock > clock for known in (anchor, previous)):
            return "base", None, "base: the TouchState is not the one that the parent saw"
        decision = self._policy.decide(
            History(
                base_bytes=self._base_bytes,
                delta_bytes=tuple(self._delta_bytes),
                chain_length=previous.chain_length,
                chain_bytes=previous.total_bytes,
                anchor_chain_length=anchor.chain_length,
                anchor_chain_bytes=anchor.total_bytes,
            )
        )
        if decision.kind == "base":
            return "base", None, decision.reason
        parent = anchor if decision.parent == "base" else previous
        if parent is not seen and not self._stands(parent):
            return "base", None, f"base: the parent at {parent.info.step_dir} is gone"
        return "delta", parent, decision.reason

    def _stands(self, known: _Known) -> bool:
        """Whether a save, or a compacted base for it, is there to be a parent."""
        if _standing(known, self._item) is not None:
            return True
        try:
            base = stored.read_compacted(known.path, known.info.save_id, self._item)
        except (RestoreError, OSError):
            return False
        return base is not None


def new_run() -> str:
    """An id for a run."""
    return uuid.uuid4().hex


def _standing(known: _Known, item: str) -> Manifest | None:
    """The manifest at the path of a save, if it is that save's: if it was committed."""
    try:
        head = read_manifest(known.path, item)
    except (RestoreError, OSError):
        return None
    return head if head.save_id == known.info.save_id else None


def read_manifest(step_dir: Path, item: str, process: int = 0) -> Manifest:
    """Reads one manifest of a step.

    Raises:
      Damaged: it is missing or altered.
    """
    path = step_dir / item / layout.manifest_name(process)
    name = f"{step_dir.name}/{item}/{path.name}"
    return manifest.from_bytes(files.read_bytes(path), name=name)
