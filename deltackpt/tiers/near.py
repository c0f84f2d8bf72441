# SPDX-License-Identifier: Apache-2.0
"""What is held near the stage of a trainer: extents that it fills itself, neighbours to read from.

A save enters the extents on the thread that has just committed it to the stage, so that whoever
waits for the save waits for that, too. It leaves them when room is needed and it is at the root, or
at once where training goes back behind it. Neighbours are filled by the promoter's process
(``pushing``); here they are only read, when something is missing in the stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from deltackpt import events
from deltackpt.errors import OutOfSpace, StorageError
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.reading import saves
from deltackpt.storage.store import Missing, spot
from deltackpt.tiers import packing, recall
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import FilePack, Holder
from deltackpt.tiers.recall import Recalled
from deltackpt.tiers.stage import Line, Orders, Stage

#: Between two searches for neighbours.
_FIND_SECS = 2.0
#: Finds neighbours; those that were found before are told to it.
FindNeighbours = Callable[[Keepers | None], Keepers]


class Near:
    """The holders near one stage; used by the thread that saves, and by the training thread."""

    def __init__(
        self,
        stage: Stage,
        local: Root,
        *,
        extents: ExtentFile | None = None,
        find_neighbours: FindNeighbours | None = None,
        part: int = 0,
        parts: int = 1,
        fsync: bool = True,
    ):
        """Finds the neighbours, of whom the promoter is told.

        Args:
          stage: of this process.
          local: its checkpoint directory.
          extents: those of the trainer.
          find_neighbours: finds nodes that hold what the promoter gives them; asked now, and when
            they do not answer it.
          part: of which process of several that have a stage each.
          parts: of how many such.
          fsync: whether what comes back into the stage survives a power cut there.
        """
        self._stage = stage
        self._local = local
        self._extents = extents
        self._find = find_neighbours
        self._keepers: Keepers | None = None
        self._neighbours: Neighbours | None = None
        self._found_at = 0.0
        self._part, self._parts = part, parts
        self._fsync = fsync
        #: Where saves that came back to the stage were held.
        self._where: dict[SaveId, str] = {}
        #: Bytes of the newest delta that was held.
        self._delta_bytes = 0
        if find_neighbours is None:
            stage.note_keepers(None)
        else:
            self._meet(find_neighbours(None))

    @property
    def _holders(self) -> list[Holder]:
        """The nearest first."""
        found: list[Holder | None] = [self._extents, self._neighbours]
        return [one for one in found if one is not None]

    def find_again(self) -> None:
        """Finds neighbours anew that came, or began again; not more often than now and then.

        Raises:
          ServiceError: nobody can be asked.
        """
        if self._find is not None and time.monotonic() - self._found_at > _FIND_SECS:
            self._meet(self._find(self._keepers))

    def _meet(self, keepers: Keepers) -> None:
        self._found_at = time.monotonic()
        if keepers == self._keepers:
            return
        if self._neighbours is not None:
            self._neighbours.close()
        self._keepers, self._neighbours = keepers, Neighbours(keepers)
        self._stage.note_keepers(keepers.to_bytes())

    def recall(self, root: str, state: State, old: Orders | None) -> Recalled:
        """Brings back what counts; see ``recall.recall``.

        Raises:
          OptionError: a holder is another root's; or there are too few neighbours for what comes.
        """
        found = Recalled({}, (), ())
        if self._holders:
            found = recall.recall(
                self._stage,
                self._local,
                self._holders,
                root,
                state,
                old,
                part=self._part,
                parts=self._parts,
                fsync=self._fsync,
            )

        self._where |= found.where
        if self._keepers is not None and self._neighbours is not None:
            if silent := self._neighbours.silent():
                events.warn(
                    f"neighbours: expected an answer of all nodes, found none of {silent}; what "
                    "only they hold is left where it is, and training goes on without it"
                )
            self._warn_of_lost(self._neighbours, state)
            self._keepers.require_nodes()  # Whoever is left was asked before.
        return found

    def _warn_of_lost(self, neighbours: Neighbours, state: State) -> None:
        """Says of each save that too few nodes are left to bring back what is missing."""
        here = {info.save_id for info in self._local.saves().values() if info is not None}
        for name, label in packing.newest_first(neighbours.incomplete()):
            if name.part == self._part and name.save_id not in here:
                if not state.held(name.save_id):
                    try:
                        with neighbours.reading(label):
                            pass
                    except StorageError as error:
                        events.warn(f"step {name.step} cannot be brought back: {error}")

    def bring(self, wanted: Iterable[SaveId]) -> None:
        """Brings saves into the stage, as far as they are held near it: the root is farther."""
        missing = [*wanted] if self._holders else []
        if not missing:
            return
        offers = recall.offered(self._holders, self._part)
        held = {name.save_id for name, _ in offers}
        for save_id in missing:
            if save_id in held:
                holder = recall.bring(self._local, save_id, offers, fsync=self._fsync)
                if holder is not None:
                    self._where[save_id] = holder

    def held(self) -> set[SaveId]:
        """Saves that can be brought back, as far as is known without reading them."""
        return {name.save_id for name, _ in recall.offered(self._holders, self._part)}

    def source_of(self, save_id: SaveId) -> str:
        """Where a save that is in the stage was held before; the stage where it was made there."""
        return self._where.get(save_id, "stage")

    def hold(
        self,
        infos: Iterable[SaveInfo | None],
        item: str,
        orders: Orders,
        *,
        may_go: Callable[[SaveId], bool],
        wait: Callable[[], None],
    ) -> None:
        """Takes the saves of the stage into the extents that are not there, where there are any.

        Older ones first: one that was refused before is a parent of those after it.

        Args:
          infos: the saves in the stage; None of those whose manifests cannot be read.
          item: name of our item.
          orders: under which they stand.
          may_go: whether a save need not be held, or not any more.
          wait: called where nothing that is held may go; it raises what ends the wait for room.

        Raises:
          OptionError: the extents are too small for such saves.
          Damaged: a save is not what was written.
          StorageError: they refuse it.
        """
        extents = self._extents
        if extents is None:
            return
        held = {packing.save_of(label) for label in extents.labels()}
        known = [info for info in infos if info is not None]
        if not known:
            return
        *older, newest = sorted(known, key=lambda one: one.save_id.step)
        for info in (*(one for one in older if not may_go(one.save_id)), newest):
            if info.save_id in held:
                continue
            pack = pack_of(self._stage, info.save_id, item, orders)
            if info.parent is None:
                extents.require_room(pack.label.nbytes, self._delta_bytes)
            else:
                self._delta_bytes = pack.label.nbytes
            self._hold(extents, pack, may_go, wait)

    def _hold(
        self,
        extents: ExtentFile,
        pack: FilePack,
        may_go: Callable[[SaveId], bool],
        wait: Callable[[], None],
    ) -> None:
        while True:
            try:
                extents.hold(pack)
                return
            except OutOfSpace:
                if not self._make_room(extents, may_go):
                    wait()

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Lets saves go for good, which training went back behind; durable when it returns.

        Neighbours let go of what is not in the stage.

        Raises:
          StorageError: the extents refuse.
        """
        if self._extents is not None and save_ids:
            labels = self._extents.labels()
            self._extents.drop([one for one in labels if packing.save_of(one) in save_ids])

    def close(self) -> None:
        """Ends what is open."""
        for holder in self._holders:
            holder.close()

    def _make_room(self, extents: ExtentFile, may_go: Callable[[SaveId], bool]) -> bool:
        """Lets the oldest save go that may; says whether there was one."""
        for name, label in reversed(packing.newest_first(extents.labels())):
            if may_go(name.save_id):
                extents.drop([label])
                return True
        return False


def pack_of(stage: Stage, save_id: SaveId, item: str, orders: Orders) -> FilePack:
    """The pack of a save in a stage, under the orders that hold.

    Raises:
      Missing: it left the stage, or another save has its step.
      Damaged: its manifest cannot be read.
      StorageError: it cannot be read.
    """
    step_dir = stage.steps / str(save_id.step)
    contents = packing.contents_of(
        step_dir,
        save_id,
        item,
        line=orders.line(save_id.run) or _unknown(save_id, orders),
        root=orders.url,
        part=orders.process if orders.apart else 0,
        parts=orders.processes if orders.apart else 1,
    )
    if saves.read_info(spot(step_dir), item).save_id != save_id:
        raise Missing(str(step_dir), "another save in its place")
    return FilePack(step_dir, contents)


def _unknown(save_id: SaveId, orders: Orders) -> Line:
    """That of a run of which none was noted: it comes after nothing that is known."""
    return Line(run=save_id.run, epoch=orders.epoch, holder=orders.holder, era=orders.era, past={})
