# SPDX-License-Identifier: Apache-2.0
"""Replicates staged saves to peers, and drops peer copies of evicted ones.

Peers mirror the staging directory: saves are pushed in order, and dropped once they are evicted
from it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltackpt.errors import Damaged
from deltackpt.format.manifest import SaveId
from deltackpt.storage.store import Missing
from deltackpt.tiers import packing
from deltackpt.tiers.cursor import Cursor, StagedSave, Trainer
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import Label
from deltackpt.tiers.stage import Orders, Stage, key_of

#: Seconds between two queries of the peers' contents: an agent may have lost all of it.
_ASK_SECS = 10.0


class Pusher(Cursor):
    """Mirrors a staging directory to peer nodes."""

    tier = "peers"

    def __init__(self, stage: Stage, open_neighbours: Callable[[Keepers], Neighbours] = Neighbours):
        """Sends no request yet.

        Args:
          stage: the staging directory.
          open_neighbours: connects to the peers that the trainer recorded.
        """
        super().__init__(stage)
        self._open = open_neighbours
        self._neighbours: Neighbours | None = None
        self._stamp: object = None
        self._asked_at = 0.0
        #: What peers hold: complete bundles, and partial ones.
        self._held: dict[SaveId, Label] = {}
        self._parts: set[Label] = set()
        self._is_ended = False

    def start(self, trainer: Trainer) -> threading.Thread:
        """Starts a thread that runs until ``end``."""
        thread = threading.Thread(
            target=self.run, args=(trainer,), name="deltackpt-push", daemon=True
        )
        thread.start()
        return thread

    def end(self) -> None:
        """Stops the thread after its current work."""
        self._is_ended = True
        self.trainer.wake(is_waiting=self.trainer.is_waiting)

    def is_done(self) -> bool:
        """See ``Cursor``."""
        return self._is_ended

    def is_retried(self, error: Exception) -> bool:
        """See ``Cursor``: errors of any kind are retried, until the end."""
        return super().is_retried(error) and not self._is_ended

    def step(self) -> bool:
        """See ``Cursor``."""
        before = self.stage.orders()
        if before is None:
            return False
        found = self.scan(before.item)
        # The order matters: saves that are staged by now were made under these or earlier orders.
        orders = self.stage.orders()
        neighbours = None if orders is None else self._opened(orders)
        if orders is None or neighbours is None:
            return False
        self.report(holder=orders.holder)
        self.forget_replaced(found)
        staged = {one.info.save_id for one in found if one.info is not None}
        #: A peer may have the only intact copy of these.
        unreadable = {one.step for one in found if one.info is None}
        if orders.began:
            known = {one: packing.save_of(one) for one in (*self._held.values(), *self._parts)}
            gone = {
                one
                for one, save_id in known.items()
                if save_id not in staged and (save_id is None or save_id.step not in unreadable)
            }
            self._drop(gone, neighbours)
        for save in found:
            if save.key in self.progress.damaged:
                continue
            if save.info is None:
                self.report_unreadable(save, orders.item)
            elif save.info.save_id not in self._held:
                self._push(save, save.info.save_id, orders, neighbours)
                return not self._is_ended
        if orders.began:
            self._drop(self._parts - {*self._held.values()}, neighbours)
            self._parts.clear()
        self._report_held()
        return False

    def _push(
        self, save: StagedSave, save_id: SaveId, orders: Orders, neighbours: Neighbours
    ) -> None:
        try:
            pack = packing.pack_of(self.stage, save_id, orders.item, orders)
            neighbours.hold(pack)
        except Missing:
            return  # It was evicted concurrently.
        except Damaged as error:
            self.report_damaged(save, str(error))
        else:
            self._held[save_id] = pack.label
        self._report_held()

    def _report_held(self) -> None:
        keys = tuple(sorted(key_of(one.step, one) for one in self._held))
        self.report(saves=keys, problem=None, code="", problem_unix_secs=0.0)

    def _drop(self, labels: set[Label], neighbours: Neighbours) -> None:
        """Drops peer copies of evicted saves, and partial ones."""
        if labels:
            neighbours.drop(labels)
            self._held = {one: label for one, label in self._held.items() if label not in labels}
            self._parts -= labels

    def _opened(self, orders: Orders) -> Neighbours | None:
        """The peers that the trainer has found; reconnects if they changed."""
        stamp = self.stage.keepers_stamp()
        if stamp != self._stamp or self._neighbours is None:
            data = self.stage.keepers()
            if data is None:
                return None
            if self._neighbours is not None:
                self._neighbours.close()
                self._neighbours = None
            self._neighbours = self._open(Keepers.from_bytes(data))
            self._ask(self._neighbours, orders)
            self._stamp = stamp
        elif time.monotonic() - self._asked_at > _ASK_SECS:
            self._ask(self._neighbours, orders)
        return self._neighbours

    def _ask(self, neighbours: Neighbours, orders: Orders) -> None:
        """Queries what peers hold of this process's saves, and of departed processes."""
        part, parts = (orders.process, orders.processes) if orders.apart else (0, 1)
        complete, every = neighbours.survey()
        named = packing.newest_first(complete)
        self._held = {name.save_id: label for name, label in named if name.part == part}
        named = packing.newest_first(every)
        self._parts = {
            label
            for name, label in named
            if name.part == part or (part == 0 and name.part >= parts)
        }
        self._asked_at = time.monotonic()
