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

from deltackpt.errors import Damaged, DeltackptError, RestoreError, StorageError
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.reading import saves
from deltackpt.storage.store import Missing, spot
from deltackpt.tiers import near, packing
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
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
        #: Saves that cannot be pushed, with what tells each copy of one from the next.
        self._damaged: dict[tuple[int, SaveId | None], tuple[object, str]] = {}
        self._pushed = self._told = Pushed(holder="")
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
          RestoreError: the stage cannot be understood.
        """
        before = self._stage.orders()
        if before is None:
            return False
        found = self._saves(before.item)
        # In this order: what is in the stage by now was begun under these, or earlier ones.
        orders = self._stage.orders()
        neighbours = None if orders is None else self._opened(orders)
        if orders is None or neighbours is None:
            return False
        self._pushed = dataclasses.replace(self._pushed, holder=orders.holder)
        if orders.began:
            known = {*self._held.values(), *self._parts}
            self._drop({one for one in known if packing.save_of(one) not in found}, neighbours)
        for save_id, stamp in sorted(found.items(), key=lambda one: one[0].step):
            if save_id not in self._held and not self._is_damaged(save_id, stamp):
                self._push(save_id, stamp, orders, neighbours)
                return True
        if orders.began:
            self._drop(self._parts - {*self._held.values()}, neighbours)
            self._parts.clear()
        self._tell()
        return False

    def _push(self, save_id: SaveId, stamp: object, orders: Orders, neighbours: Neighbours) -> None:
        try:
            pack = near.pack_of(self._stage, save_id, orders.item, orders)
            neighbours.hold(pack)
        except Missing:
            return  # It left the stage meanwhile.
        except Damaged as error:
            self._damaged[save_id.step, save_id] = stamp, str(error)
            _logger.error("step %d cannot be pushed: %s", save_id.step, error)
        else:
            self._held[save_id] = pack.label
        self._tell()

    def _is_damaged(self, save_id: SaveId, stamp: object) -> bool:
        """Whether this copy of a save was found to be damaged."""
        known = self._damaged.get((save_id.step, save_id))
        return known is not None and known[0] == stamp

    def _drop(self, labels: set[Label], neighbours: Neighbours) -> None:
        """Lets neighbours let go of what is not in the stage, and of what they have in part."""
        if labels:
            neighbours.drop(labels)
            self._held = {one: label for one, label in self._held.items() if label not in labels}
            self._parts -= labels

    def _opened(self, orders: Orders) -> Neighbours | None:
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
            self._ask(self._neighbours, orders)
            self._stamp = stamp
        elif time.monotonic() - self._asked_at > _ASK_SECS:
            self._ask(self._neighbours, orders)
        return self._neighbours

    def _ask(self, neighbours: Neighbours, orders: Orders) -> None:
        """Asks what the neighbours hold of this stage, and of processes that there are no more."""
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

    def _saves(self, item: str) -> dict[SaveId, object]:
        """The saves in the stage, and what tells their folders from others; damaged ones noted."""
        at, found = spot(self._stage.steps), dict[SaveId, object]()
        unreadable: dict[tuple[int, SaveId | None], tuple[object, str]] = {}
        for name in at.folders():
            step, stamp = names.step_number(name), (at / name).stamp()
            if step is None or stamp is None:
                continue
            try:
                found[saves.read_info(at / name, item).save_id] = stamp.identity
            except RestoreError as error:
                if (at / name).is_dir():
                    unreadable[step, None] = stamp.identity, str(error)
        kept = {key: one for key, one in self._damaged.items() if key[1] in found}
        self._damaged = kept | unreadable
        return found

    def _tell(self) -> None:
        keys = tuple(sorted(key_of(one.step, one) for one in self._held))
        damaged = {key_of(*key): why for key, (_, why) in self._damaged.items()}
        self._report(Pushed(holder=self._pushed.holder, saves=keys, damaged=damaged))

    def _fail(self, error: DeltackptError) -> None:
        if self._pushed.problem is None:
            _logger.warning("%s", error)
        told = dataclasses.replace(
            self._pushed,
            problem=str(error),
            code=error.code,
            problem_unix_secs=self._pushed.problem_unix_secs or time.time(),
        )
        try:
            self._report(told)
        except StorageError as refused:
            # The stage may be full, and work goes on all the same.
            _logger.warning("%s", refused)

    def _report(self, pushed: Pushed) -> None:
        if pushed != self._told:
            self._stage.report_pushed(pushed)
            self._told = pushed
        self._pushed = pushed
