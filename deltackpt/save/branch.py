# SPDX-License-Identifier: Apache-2.0
"""The saves of one process since a start or a restore, and their clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deltackpt.format import manifest
from deltackpt.format.manifest import BaseRef, Layout, ParentRef, SaveId, SaveInfo
from deltackpt.policies import SaveHistory
from deltackpt.state.touch_state import UNKNOWN

if TYPE_CHECKING:
    from deltackpt.format.wal_format import Continues
    from deltackpt.save.tracking_audit import Samples


class Reading(NamedTuple):
    """One TouchState at a save: its path, identity and clock."""

    place: str
    identity: int
    clock: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """The state of tracking at a save.

    ``windows``: for each gradient accumulator (``optax.MultiSteps``), the number of updates that it
    has made, and the number of steps gathered for the next one.
    """

    readings: tuple[Reading, ...] = ()  # one per TouchState
    windows: tuple[tuple[int, int], ...] = ()

    def seen(self, reading: Reading) -> Reading | None:
        """Returns this record's reading of a TouchState that was read later, or None.

        A TouchState that has moved within the state is found by its identity. If several have the
        same identity, the one with the lowest clock is safe for all.
        """
        same = [known for known in self.readings if known.identity == reading.identity]
        here = [known for known in same if known.place == reading.place]
        return min(here or same, key=lambda known: known.clock, default=None)

    def is_older_than(self, earlier: Clocks) -> bool:
        """Returns whether a TouchState has gone back since ``earlier`` was read."""
        pairs = ((reading, earlier.seen(reading)) for reading in self.readings)
        return any(seen is not None and reading.clock < seen.clock for reading, seen in pairs)

    def starts_in(self, other: Clocks) -> bool:
        """Returns whether all windows here started when ``other`` was read, or later."""
        return len(self.windows) == len(other.windows) and all(
            updates > before or (updates == before and not gathered)
            for (updates, _), (before, gathered) in zip(self.windows, other.windows)
        )

    @property
    def gathers(self) -> bool:
        """Returns whether rows already marked may still move without being marked again."""
        return any(gathered for _, gathered in self.windows)


def clocks_seen(clocks: Clocks, earlier: Clocks) -> dict[str, int]:
    """Returns TouchState path to its earlier clock; empty if one was not read."""
    found = {reading.place: earlier.seen(reading) for reading in clocks.readings}
    if None in found.values():
        return {}
    return {place: seen.clock for place, seen in found.items() if seen is not None}


class Written(NamedTuple):
    """What the manifest of process 0 records about a save as a whole."""

    crc32c: int  # of the manifest: an equal file need not be decoded again
    nbytes: int  # of the arrays of all shards
    compacted: BaseRef | None  # the newest compacted base that process 0 knew


@dataclasses.dataclass(kw_only=True)
class Known:
    """A save of this process: committed, or in flight.

    ``settled`` contains, for each reading, the clock since which no accumulator had marked rows. It
    is None if nothing is known about the time before, so unmarked rows may move. ``written`` is set
    once its manifest was written, or read.
    """

    info: SaveInfo
    path: Path
    clocks: Clocks
    layout: Layout
    settled: Clocks | None
    written: Written | None = None
    #: Step directories of its parents, nearest first: ``Manifest.parents``.
    parents: tuple[str, ...] = ()
    #: How many saves of the lineage had been begun with it.
    number: int = 0
    total_bytes: int = 0
    chain_length: int = 0
    sample: Samples | None = None
    #: Table name to the indices of rows that a restore read from the WAL: every delta against this
    #: save contains them, since no stamp marks them.
    replayed: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    #: The restored recovery point, which replays onto this save.
    continues: Continues | None = None


@dataclasses.dataclass(kw_only=True)
class Branch:
    """The saves since a start or a restore."""

    run: str
    restores: int = 0
    attempts: int = 0
    #: How many saves of any branch had been begun when it was left.
    left_after: int = 0
    #: ``Lineage.distrusted`` and ``Lineage.suspected`` when it was left.
    distrusted: str | None = None
    suspected: str | None = None
    #: The newest save whose clocks are known and that deltas may all be taken against.
    delta_base: Known | None = None
    previous: Known | None = None
    in_flight: Known | None = None
    #: The newest save that was begun, committed or not.
    begun: Known | None = None
    #: The delta base and later saves, oldest first, if compaction may replace one by a base.
    since: list[Known] = dataclasses.field(default_factory=list)
    #: The save that the compacted delta base replaces.
    base_id: SaveId | None = None
    base_bytes: int = 0
    delta_bytes: list[int] = dataclasses.field(default_factory=list)

    @property
    def protected(self) -> frozenset[SaveId]:
        """Returns possible parents, and the save in flight."""
        known = (self.delta_base, self.previous, self.in_flight)
        ids = {entry.info.save_id for entry in known if entry is not None}
        if self.in_flight is not None and self.in_flight.info.parent is not None:
            ids.add(self.in_flight.info.parent.save_id)
        return frozenset(ids)

    @property
    def history(self) -> SaveHistory:
        """Returns the input for the policy; needs a committed save."""
        assert self.delta_base is not None and self.previous is not None
        return SaveHistory(
            base_bytes=self.base_bytes,
            delta_bytes=tuple(self.delta_bytes),
            chain_length=self.previous.chain_length,
            chain_bytes=self.previous.total_bytes,
            delta_base_chain_length=self.delta_base.chain_length,
            delta_base_chain_bytes=self.delta_base.total_bytes,
        )

    def knows(self, clocks: Clocks) -> bool:
        """Returns whether the newest save is known to have seen each of some TouchStates."""
        if self.previous is None:
            return False
        return all(
            reading.identity != UNKNOWN and self.previous.clocks.seen(reading) is not None
            for reading in clocks.readings
        )

    def start_save(
        self,
        save_id: SaveId,
        step_dir: Path,
        parent: Known | None,
        clocks: Clocks,
        layout: Layout,
        number: int,
    ) -> Known:
        """Records a save as in flight; ``number`` counts all saves started, this one included."""
        ref, parents = None, ()
        if parent is not None:
            parents = (parent.info.step_dir, *parent.parents)[: manifest.MOST_PARENTS]
            ref = ParentRef(save_id=parent.info.save_id, step_dir=parent.info.step_dir)
        kind = "base" if parent is None else "delta"
        info = SaveInfo(save_id=save_id, kind=kind, parent=ref, step_dir=step_dir.name, nbytes=0)
        self.begun = self.in_flight = Known(
            info=info,
            path=step_dir,
            clocks=clocks,
            layout=layout,
            settled=settled(clocks, self.begun),
            number=number,
            total_bytes=0 if parent is None else parent.total_bytes,
            chain_length=0 if parent is None else parent.chain_length + 1,
            parents=parents,
        )
        return self.begun

    def make_base(self, save_id: SaveId) -> None:
        """Turns the delta in flight into a base."""
        known = self.in_flight
        assert known is not None and known.info.save_id == save_id
        known.info = dataclasses.replace(known.info, kind="base", parent=None)
        known.total_bytes = known.chain_length = 0
        known.parents = ()

    def advance(self, head: Written, *, compacted: bool) -> None:
        """Records the save in flight as committed; if ``compacted``, a base may replace a save."""
        known, self.in_flight = self.in_flight, None
        assert known is not None
        # The bytes of every process's shard: all processes decide from the same figures.
        known.info = dataclasses.replace(known.info, nbytes=head.nbytes)
        known.total_bytes += head.nbytes
        self.previous = known
        if known.info.kind == "base":
            self.delta_base, self.base_bytes, self.delta_bytes = known, known.info.nbytes, []
            self.since, self.base_id = [], None
        else:
            self.delta_bytes.append(known.info.nbytes)
        if compacted:
            self.since.append(known)
            if head.compacted is not None:
                self._set_delta_base(head.compacted)

    def _set_delta_base(self, base: BaseRef) -> None:
        """Re-bases the branch on a save that a compacted base replaces."""
        ids = [known.info.save_id for known in self.since]
        if base.save_id not in ids or self.base_id == base.save_id:
            return
        self.since = self.since[ids.index(base.save_id) :]
        delta_base, *later = self.since
        delta_base.total_bytes, delta_base.chain_length = base.nbytes, 0
        descend = {base.save_id: delta_base}
        self.delta_bytes = []
        for known in later:
            parent = None if known.info.parent is None else descend.get(known.info.parent.save_id)
            if parent is not None:
                known.total_bytes = parent.total_bytes + known.info.nbytes
                known.chain_length = parent.chain_length + 1
                descend[known.info.save_id] = known
                self.delta_bytes.append(known.info.nbytes)
        self.delta_base, self.base_bytes, self.base_id = delta_base, base.nbytes, base.save_id


def discontinuity(clocks: Clocks, parent: Known) -> str | None:
    """Returns why the touched rows since a save do not follow from some TouchStates, or None."""
    for reading in clocks.readings:
        where = f"the TouchState at {reading.place}" if reading.place else "the given TouchState"
        seen = parent.clocks.seen(reading)
        if seen is None:
            return (
                f"{where} is unrelated to the save of step {parent.info.save_id.step}: it was "
                "re-created, or is of another run"
            )
        if seen.clock > reading.clock:
            return (
                f"{where} is older than its parent's: its clock {reading.clock} is before "
                f"{seen.clock}, that of the save of step {parent.info.save_id.step}"
            )
    places = {reading.place for reading in clocks.readings}
    identities = {reading.identity for reading in clocks.readings}
    for known in parent.clocks.readings:
        if known.place not in places and known.identity not in identities:
            where = f"at {known.place} in" if known.place else "passed to"
            return (
                f"the TouchState {where} the save of step {parent.info.save_id.step} is missing now"
            )
    if parent.settled is None:
        return (
            "a gradient accumulator contained rows from before its TouchState was created, which "
            "may have moved since without being marked"
        )
    return None


def settled(clocks: Clocks, begun: Known | None) -> Clocks | None:
    """Returns the clocks since which rows may move after a save without being marked again.

    ``optax.MultiSteps`` moves and resets all gathered rows at the last step of a window, regardless
    of when they were marked in it. A save in the middle of a window is therefore settled only up to
    a save at its start or in an earlier window.
    """
    if not clocks.gathers:
        return clocks
    if begun is None:
        return None
    before = begun.clocks if clocks.starts_in(begun.clocks) else begun.settled
    if before is None:
        return None
    found = [before.seen(reading) for reading in clocks.readings]
    if None in found:
        return None
    readings = tuple(
        reading._replace(clock=min(reading.clock, seen.clock))
        for reading, seen in zip(clocks.readings, found)
        if seen is not None
    )
    return dataclasses.replace(clocks, readings=readings)
