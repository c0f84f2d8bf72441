# SPDX-License-Identifier: Apache-2.0
"""Finds steps and compacted bases that no kept step needs, and removes obsolete WAL epochs.

What remains must be intact: the bases that replace steps, and the newest kept chain, are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal

from deltackpt.errors import RestoreError, StorageError
from deltackpt.format import chain, naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.steps import Steps
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import WalReader
from deltackpt.reading.wal_locations import WalFolder
from deltackpt.storage.store import StorePath

if TYPE_CHECKING:
    from deltackpt.maintenance.verify import Verified


def remove_wal_epoch(at: WalFolder, number: int) -> None:
    """Removes a WAL epoch: its segments first, because only its header names them.

    If its header cannot be read, segments in another directory stay.
    """
    folders, logs = {at.segments(number)}, WalReader(at)
    with contextlib.suppress(RestoreError):  # Its other directory is not known.
        folders.add(logs.segments_of(logs.head(number)))
    for folder in folders:
        folder.store.delete([(folder / key).key for key in folder.keys()])
    # Another directory with its segments has a copy of its header.
    for folder in folders:
        place = folder.parent / naming.epoch_name(number)
        place.store.delete([place.key])


Kind = Literal[
    "interrupted save",
    "interrupted deletion",
    "interrupted compaction",
    "compacted base",
    "step",
    "rolled-back run",
    "WAL epoch",
]


@dataclasses.dataclass(frozen=True)
class Removable:
    """An object that nothing needs; ``name`` is its relative path in the checkpoint directory."""

    name: str
    kind: Kind
    reason: str
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Steps to keep: the newest ones, and multiples of ``keep_every``; every step by default."""

    keep_last: int | None = None
    keep_every: int | None = None

    def keeps(self, steps: Collection[int]) -> frozenset[int]:
        """Returns the steps to keep."""
        if self.keep_last is None and self.keep_every is None:
            return frozenset(steps)
        kept = set(sorted(steps)[-self.keep_last :] if self.keep_last else ())
        # Always keep the newest step, from which the next run resumes.
        kept.add(max(steps, default=0))
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return frozenset(kept & set(steps))


#: Keeps every step.
KEEP_ALL = Retention()


class GarbageFinder:
    """Finds the steps and compacted bases that can be removed."""

    def __init__(self, opened: Steps, retention: Retention):
        """Initializes the search; reads nothing."""
        self._root = opened
        self._at = opened.store_path
        self._item = opened.item
        self._retention = retention
        self._notes: list[str] = []
        self._verified: Verified = {}

    def find(self) -> tuple[list[Removable], list[str]]:
        """Returns removable steps, newest first, and bases; and notes on what is kept, and why."""
        saves = self._root.saves()
        infos = {step: info for step, info in saves.items() if info is not None}
        unreadable = sorted(set(saves) - set(infos))
        if unreadable:
            return [], [f"every step and base stays: the manifests of {unreadable} are unreadable"]
        keep = self._retention.keeps(infos)
        bases = self._bases()
        while True:
            live = self._live(infos, keep, bases)
            standing = [infos[step] for step in live]
            ids = _ids(bases.values())
            needed = chain.needed_bases(standing, (), ids)
            steps = sorted(set(infos) - live, reverse=True)
            unneeded = [name for name, info in sorted(bases.items()) if info.save_id not in needed]
            if not steps and not unneeded:
                break
            ends = [name for name, info in bases.items() if info.save_id in needed]
            damaged = [name for name in ends if self._is_damaged(name)]
            if not damaged:
                break
            # A damaged base replaces nothing: the steps below it are needed.
            bases = {name: info for name, info in bases.items() if name not in damaged}
        kept = {*map(str, live), *(f"{naming.COMPACTED}/{name}" for name in {*bases} - {*unneeded})}
        newest_first = sorted(keep, reverse=True)
        if (steps or unneeded) and not any(self._is_intact(step, kept) for step in newest_first):
            self._notes.append("every step and base stays: no kept step is intact")
            return [], self._notes
        if extra := sorted(live - keep):
            self._notes.append(
                f"the steps {extra} stay only because kept chains need them; "
                "deltackpt compact shortens a chain"
            )
        removable = [
            removable_at(self._at / str(step), "step", "no kept step needs it") for step in steps
        ]
        for name in unneeded:
            at = naming.compacted_dir(self._at / name, self._item)
            removable.append(removable_at(at, "compacted base", "no chain uses it"))
        return removable, self._notes

    def _bases(self) -> Mapping[str, SaveInfo]:
        """Compacted bases by step name; unreadable ones stay."""
        bases = {}
        for name in stored_saves.compacted_bases(self._at, self._item):
            try:
                bases[name] = stored_saves.read_base(self._at / name, self._item).info
            except (RestoreError, StorageError) as error:
                self._notes.append(
                    f"{naming.COMPACTED}/{name} stays because it is damaged: {error}"
                )
        return bases

    def _live(
        self, infos: Mapping[int, SaveInfo], keep: Collection[int], bases: Mapping[str, SaveInfo]
    ) -> frozenset[int]:
        """Steps that must stay, including those needed by chains of deltackpt's other items."""
        ids = [infos[step].save_id for step in keep]
        live = chain.live_set(ids, infos.values(), (), _ids(bases.values()))
        steps = {step for step, info in infos.items() if info.save_id in live}
        for item in self._other_items(infos):
            others = Steps(self._at, item).saves()
            unknown = (self._at / str(step) / item for step, info in others.items() if info is None)
            if any(at.is_dir() for at in unknown):
                return frozenset(infos)  # It is not known what its chains need.
            known = {step: info for step, info in others.items() if info is not None}
            ids = [known[step].save_id for step in steps if step in known]
            live = chain.live_set(ids, known.values())
            steps |= {step for step, info in known.items() if info.save_id in live}
        return frozenset(steps) & frozenset(infos)

    def _other_items(self, steps: Collection[int]) -> set[str]:
        step_dirs = (self._at / str(step) for step in steps)
        folders = (at / name for at in step_dirs for name in at.folders())
        found = (at.name for at in folders if (at / naming.manifest_name(0)).is_file())
        return {*found} - {self._item}

    def _is_intact(self, step: int, kept: Collection[str]) -> bool:
        """Reads what a restore of a step from the ``kept`` saves needs; notes why it fails."""
        # Not imported above: trainers remove WAL epochs with this module, and verify nothing.
        from deltackpt.maintenance.verify import broken_by

        if reason := broken_by(self._root, step, kept, self._verified):
            self._notes.append(f"step {step} cannot be restored: {reason}")
        return not reason

    def _is_damaged(self, name: str) -> bool:
        """Reads a compacted base; notes that it stays if it is damaged."""
        from deltackpt.maintenance.verify import damage_of

        shown = f"{naming.COMPACTED}/{name}"
        if damage := damage_of(self._root, shown, self._verified):
            self._notes.append(f"{shown} stays because it is damaged: {damage}")
        return bool(damage)


def removable_at(at: StorePath, kind: Kind, reason: str) -> Removable:
    """Describes an object; its name is its key in the store."""
    return Removable(at.key, kind, reason, at.tree_bytes())


def _ids(saves: Collection[SaveInfo]) -> frozenset[SaveId]:
    return frozenset(info.save_id for info in saves)
