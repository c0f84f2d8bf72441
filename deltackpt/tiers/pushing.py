# SPDX-License-Identifier: Apache-2.0
"""Replicates staged saves to peers, and drops peer copies of evicted ones.

It runs in a thread of the uploader process, concurrently with the upload, so an outage of one does
not block the other. Peers mirror the staging directory: saves are pushed in order, and dropped once
they are evicted from it.
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
from deltackpt.storage.store import Missing, store_path
from deltackpt.tiers import near, packing
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import Label
from deltackpt.tiers.stage import Orders, Pushed, Stage, key_of

_logger = logging.getLogger(__name__)

#: Seconds between two polls: the longest delay before the newest save is pushed.
_POLL_SECS = 0.03
_BACK_OFF_SECS = (0.1, 10.0)
#: Seconds between two queries of the peers' contents: an agent may have lost all of it.
_ASK_SECS = 10.0


class Pusher:
    """Mirrors the staging directory to peer nodes."""

    def __init__(self, stage: Stage, open_neighbours: Callable[[Keepers], Neighbours] = Neighbours):
        """Sends no request yet.

        Args:
          stage: the staging directory.
          open_neighbours: connects to the peers that the trainer recorded.
        """
        self._stage = stage
        self._open = open_neighbours
        self._neighbours: Neighbours | None = None
        self._stamp: object = None
        self._asked_at = 0.0
        #: What peers hold: complete bundles, and partial ones.
        self._held: dict[SaveId, Label] = {}
        self._parts: set[Label] = set()
        #: Saves that cannot be pushed, with an identifier of the copy.
        self._damaged: dict[tuple[int, SaveId | None], tuple[object, str]] = {}
        self._pushed = self._told = Pushed(holder="")
        self._ended = threading.Event()

    def start(self) -> threading.Thread:
        """Starts a thread that runs until ``end``."""
        thread = threading.Thread(target=self._run, name="deltackpt-push", daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Stops the thread after its current work."""
        self._ended.set()

    def _run(self) -> None:
        failures = 0
        while not self._ended.is_set():
            rest = _POLL_SECS
            try:
                if self.step():
                    continue
                failures = 0
            except Exception as error:  # Any error is reported, and the push is retried.
                failures += 1
                self._fail(error)
                most = min(_BACK_OFF_SECS[0] * 2 ** min(failures, 20), _BACK_OFF_SECS[1])
                rest = most * random.uniform(0.5, 1.0)
            self._ended.wait(rest)

    def step(self) -> bool:
        """Pushes one save, the oldest that is staged and not held by peers.

        Returns:
          Whether a save was pushed.

        Raises:
          StorageError: peers reported an error or did not answer; retry.
          RestoreError: the staging directory is not readable.
        """
        before = self._stage.orders()
        if before is None:
            return False
        found = self._saves(before.item)
        # The order matters: saves that are staged by now were made under these or earlier orders.
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
            return  # It was evicted concurrently.
        except Damaged as error:
            self._damaged[save_id.step, save_id] = stamp, str(error)
            _logger.error("step %d cannot be pushed: %s", save_id.step, error)
        else:
            self._held[save_id] = pack.label
        self._tell()

    def _is_damaged(self, save_id: SaveId, stamp: object) -> bool:
        """Whether this copy of a save is known to be damaged."""
        known = self._damaged.get((save_id.step, save_id))
        return known is not None and known[0] == stamp

    def _drop(self, labels: set[Label], neighbours: Neighbours) -> None:
        """Drops peer copies of evicted saves, and partial ones."""
        if labels:
            neighbours.drop(labels)
            self._held = {one: label for one, label in self._held.items() if label not in labels}
            self._parts -= labels

    def _opened(self, orders: Orders) -> Neighbours | None:
        """The peers that the trainer has found; reconnects if they changed."""
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

    def _saves(self, item: str) -> dict[SaveId, object]:
        """The staged saves with an identifier of each folder; records damaged ones."""
        at, found = store_path(self._stage.steps), dict[SaveId, object]()
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

    def _fail(self, error: Exception) -> None:
        expected = isinstance(error, DeltackptError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        if self._pushed.problem is None:
            _logger.warning("%s", text, exc_info=not expected)
        told = dataclasses.replace(
            self._pushed,
            problem=text,
            code=error.code if expected else DeltackptError.code,
            problem_unix_secs=self._pushed.problem_unix_secs or time.time(),
        )
        try:
            self._report(told)
        except StorageError as refused:
            # The staging directory may be full; work continues regardless.
            _logger.warning("%s", refused)

    def _report(self, pushed: Pushed) -> None:
        if pushed != self._told:
            self._stage.report_pushed(pushed)
            self._told = pushed
        self._pushed = pushed
