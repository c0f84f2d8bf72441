# SPDX-License-Identifier: Apache-2.0
"""Local replicas of staged saves: extents that the trainer fills, and peers to read from.

The thread that commits a save to the staging directory also writes it to the extents, so waiting
for the save includes that. It is dropped from the extents when space is needed and it was uploaded,
or at once on a rollback. The uploader process writes to peers (``pushing``); here they are only
read, if something is missing in the staging directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from deltackpt import events
from deltackpt.errors import OutOfSpace, RestoreError, StorageError
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import State
from deltackpt.reading import saves
from deltackpt.storage.store import Missing, store_path
from deltackpt.tiers import packing, recall
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import FilePack, Holder
from deltackpt.tiers.recall import Recalled
from deltackpt.tiers.stage import Line, Orders, Stage

#: Seconds between two searches for peers.
_FIND_SECS = 2.0
#: Finds peers, given those found before.
FindNeighbours = Callable[[Keepers | None], Keepers]


class Near:
    """The replicas of one staging directory.

    Used by the saving thread and by the training thread.
    """

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
        """Finds the peers.

        Args:
          stage: this process's staging directory.
          local: its checkpoint directory.
          extents: the trainer's extents.
          find_neighbours: finds peer nodes; called now, and when peers do not answer the uploader.
          part: the process, if several have a staging directory each.
          parts: the number of such processes.
          fsync: whether recovered saves are fsynced in the staging directory.
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
        #: The source of each recovered save.
        self._where: dict[SaveId, str] = {}
        #: Errors of saves that are held but could not be recovered, by step.
        self.unusable: Mapping[int, RestoreError] = {}
        #: Size of the newest delta that was held, in bytes.
        self._delta_bytes = 0
        #: Whether the trainer has started; before, the uploader serves the previous one.
        self._is_confirmed = False
        if find_neighbours is not None:
            self._meet(find_neighbours(None))

    def confirm(self) -> None:
        """Passes the peers to the uploader: the trainer has started.

        Raises:
          StorageError: writing failed.
        """
        self._is_confirmed = True
        self._stage.note_keepers(None if self._keepers is None else self._keepers.to_bytes())

    @property
    def _holders(self) -> list[Holder]:
        """The nearest first."""
        found: list[Holder | None] = [self._extents, self._neighbours]
        return [one for one in found if one is not None]

    def find_again(self) -> None:
        """Finds new or restarted peers; rate-limited.

        Raises:
          ServiceError: the peers cannot be queried.
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
        if self._is_confirmed:
            self._stage.note_keepers(keepers.to_bytes())

    def recall(self, root: str, state: State, old: Orders | None) -> Recalled:
        """Recovers the saves that count; see ``recall.recall``.

        Raises:
          OptionError: a replica belongs to another checkpoint directory, or there are too few
            peers.
        """
        found = Recalled({}, (), (), {})
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
        self.unusable = found.unusable
        if self._keepers is not None and self._neighbours is not None:
            if silent := self._neighbours.silent():
                events.warn(
                    f"peers: expected an answer from all nodes, found none from {silent}; saves "
                    "that only they hold are left there, and training continues without them"
                )
            self._warn_of_lost(self._neighbours, state)
            self._keepers.require_nodes()  # The remaining nodes were asked before.
        return found

    def _warn_of_lost(self, neighbours: Neighbours, state: State) -> None:
        """Warns about each save that too few nodes are left to recover."""
        here = {info.save_id for info in self._local.saves().values() if info is not None}
        for name, label in packing.newest_first(neighbours.incomplete()):
            if name.part == self._part and name.save_id not in here:
                if not state.held(name.save_id):
                    try:
                        with neighbours.reading(label):
                            pass
                    except StorageError as error:
                        events.warn(f"step {name.step} cannot be recovered: {error}")

    def bring(self, wanted: Iterable[SaveId]) -> None:
        """Recovers saves into the staging directory from replicas nearer than the remote one."""
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
        """Returns the recoverable saves, as far as is known without reading them."""
        return {name.save_id for name, _ in recall.offered(self._holders, self._part)}

    def source_of(self, save_id: SaveId) -> str:
        """Returns where a staged save was recovered from.

        The staging directory if it was made there.
        """
        return self._where.get(save_id, "staging")

    def hold(
        self,
        infos: Iterable[SaveInfo | None],
        item: str,
        orders: Orders,
        *,
        may_go: Callable[[SaveId], bool],
        wait: Callable[[], None],
    ) -> None:
        """Writes the staged saves that the extents lack into them, if there are extents.

        Older ones come first: one that failed before is a parent of those after it.

        Args:
          infos: the staged saves; None for those whose manifests are unreadable.
          item: name of the deltackpt item.
          orders: the current orders.
          may_go: whether a save may be dropped.
          wait: called if nothing may be dropped; it raises to end the wait for room.

        Raises:
          OptionError: the extents are too small for such saves.
          Damaged: a save's bytes differ from those written.
          StorageError: writing failed.
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
        """Drops rolled-back saves from the extents durably.

        Peers drop everything that is not staged.

        Raises:
          StorageError: the extents reported an error.
        """
        if self._extents is not None and save_ids:
            labels = self._extents.labels()
            self._extents.drop([one for one in labels if packing.save_of(one) in save_ids])

    def close(self) -> None:
        """Closes all replicas."""
        for holder in self._holders:
            holder.close()

    def _make_room(self, extents: ExtentFile, may_go: Callable[[SaveId], bool]) -> bool:
        """Drops the oldest save that may be dropped; returns whether there was one."""
        for name, label in reversed(packing.newest_first(extents.labels())):
            if may_go(name.save_id):
                extents.drop([label])
                return True
        return False


def pack_of(stage: Stage, save_id: SaveId, item: str, orders: Orders) -> FilePack:
    """Returns the bundle of a staged save, under the current orders.

    Raises:
      Missing: it was evicted, or another save has its step.
      Damaged: its manifest is not readable.
      StorageError: reading failed.
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
    if saves.read_info(store_path(step_dir), item).save_id != save_id:
        raise Missing(str(step_dir), "another save in its place")
    return FilePack(step_dir, contents)


def _unknown(save_id: SaveId, orders: Orders) -> Line:
    """Lineage for an unknown run: no known ancestors."""
    return Line(run=save_id.run, epoch=orders.epoch, holder=orders.holder, era=orders.era, past={})
