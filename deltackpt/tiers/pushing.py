# SPDX-License-Identifier: Apache-2.0
"""Brings the saves of a stage to neighbours, and lets go there of what has left the stage.

It works in a thread of the promoter's process beside the promotion to the root, so that an outage
of one does not stand in the way of the other. Neighbours hold what the stage holds: a save is
pushed after those before it, and dropped once the stage has let it go.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable

from deltackpt.errors import DeltackptError, RestoreError, StorageError
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.reading import saves
from deltackpt.storage.store import Missing, spot
from deltackpt.tiers import near, packing
from deltackpt.tiers.neighbours import Keepers, Neighbours
from deltackpt.tiers.packing import Label
from deltackpt.tiers.stage import Orders, Pushed, Stage, key_of

_logger = logging.getLogger(__name__)

#: Between two looks at a stage: what the newest save waits before it is pushed.
_POLL_SECS = 0.03
_BACK_OFF_SECS = (0.1, 10.0)
#: Between two questions what neighbours hold: a keeper may have lost all of it.
_ASK_SECS = 10.0


class Pusher:
    """Keeps neighbours of a stage what the stage is."""

    def __init__(self, stage: Stage, open_neighbours: Callable[[Keepers], Neighbours] = Neighbours):
        """Asks nobody yet.

        Args:
          stage: whose saves these are.
          open_neighbours: by what the trainer wrote of its keepers.
        """
        self._stage = stage
        self._open = open_neighbours
        self._neighbours: Neighbours | None = None
        self._stamp: object = None
        self._asked_at = 0.0
        #: What they hold, all of it, or some.
        self._held: dict[SaveId, Label] = {}
        self._parts: set[Label] = set()
        self._pushed = Pushed(holder="")
        self._ended = threading.Event()

    def start(self) -> threading.Thread:
        """Works in a thread until ``end``."""
        thread = threading.Thread(target=self._run, name="deltackpt-push", daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Ends the thread once it has done what it does."""
        self._ended.set()

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            rest = _POLL_SECS
            try:
                if self.step():
                    continue
                failures = 0
            except (StorageError, RestoreError) as error:
                failures += 1
                self._fail(error)
                most = min(_BACK_OFF_SECS[0] * 2 ** min(failures, 20), _BACK_OFF_SECS[1])
                rest = most * random.uniform(0.5, 1.0)
            self._ended.wait(rest)

    def step(self) -> bool:
        """Pushes one save, the oldest that is in the stage and not at the neighbours.

        Returns:
          Whether there was one.

        Raises:
          StorageError: neighbours refused, or did not answer; to be tried again.
        """
        orders, neighbours = self._stage.orders(), self._opened()
        if orders is None or neighbours is None:
            return False
        found = self._saves(orders)
        for save_id in sorted(found, key=lambda one: one.step):
            if save_id not in self._held:
                try:
                    pack = near.pack_of(self._stage, save_id, orders.item, orders)
                    neighbours.hold(pack)
                except Missing:
                    return True  # It left the stage meanwhile.
                self._held[save_id] = pack.label
                self._tell(orders)
                return True
        if orders.began:
            self._drop_but(found, neighbours)
        self._tell(orders)
        return False

    def _drop_but(self, kept: set[SaveId], neighbours: Neighbours) -> None:
        """Lets neighbours let go of what is not in the stage, and of what they have in part."""
        gone = {label for save_id, label in self._held.items() if save_id not in kept}
        gone |= self._parts - {*self._held.values()}
        if gone:
            neighbours.drop(gone)
            self._held = {one: label for one, label in self._held.items() if one in kept}
            self._parts.clear()

    def _opened(self) -> Neighbours | None:
        """The neighbours that the trainer has found, anew where it found others."""
        stamp = self._stage.keepers_stamp()
        if stamp != self._stamp or self._neighbours is None:
            data = self._stage.keepers()
            if data is None:
                return None
            if self._neighbours is not None:
                self._neighbours.close()
                self._neighbours = None
            self._neighbours = self._open(Keepers.from_bytes(data))
            self._ask(self._neighbours)
            self._stamp = stamp
        elif time.monotonic() - self._asked_at > _ASK_SECS:
            self._ask(self._neighbours)
        return self._neighbours

    def _ask(self, neighbours: Neighbours) -> None:
        """Asks what the neighbours hold."""
        part = self._part()
        named = packing.newest_first(neighbours.complete())
        self._held = {name.save_id: label for name, label in named if name.part == part}
        named = packing.newest_first({*neighbours.labels(), *neighbours.incomplete()})
        self._parts = {label for name, label in named if name.part == part}
        self._asked_at = time.monotonic()

    def _part(self) -> int:
        orders = self._stage.orders()
        return orders.process if orders is not None and orders.apart else 0

    def _saves(self, orders: Orders) -> set[SaveId]:
        """The saves in the stage; those whose manifests cannot be read are nobody's to push."""
        at, found = spot(self._stage.steps), set[SaveId]()
        for name in at.folders():
            if names.step_number(name) is not None:
                try:
                    found.add(saves.read_info(at / name, orders.item).save_id)
                except RestoreError:
                    continue
        return found

    def _tell(self, orders: Orders) -> None:
        keys = tuple(sorted(key_of(one.step, one) for one in self._held))
        self._report(Pushed(holder=orders.holder, saves=keys))

    def _fail(self, error: DeltackptError) -> None:
        orders = self._stage.orders()
        if self._pushed.problem is None:
            _logger.warning("%s", error)
        since = self._pushed.problem_unix_secs or time.time()
        self._report(
            dataclasses.replace(
                self._pushed,
                holder="" if orders is None else orders.holder,
                problem=str(error),
                code=error.code,
                problem_unix_secs=since,
            )
        )

    def _report(self, pushed: Pushed) -> None:
        if pushed != self._pushed:
            self._stage.report_pushed(pushed)
            self._pushed = pushed
