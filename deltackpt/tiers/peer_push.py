# SPDX-License-Identifier: Apache-2.0
"""Replicates staged saves to peers in order, and drops peer copies of evicted ones."""

from __future__ import annotations

import threading
import time

from deltackpt.errors import Damaged
from deltackpt.format.manifest import SaveId
from deltackpt.storage.store import Missing
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import BundleRef
from deltackpt.tiers.cursor import Cursor, StagedSave, Trainer
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import Orders, PeerGroup, StagingDir, key_of

#: Seconds between two queries of the peers' contents: an agent may have lost all of it.
_ASK_SECS = 10.0


class Pusher(Cursor):
    """Mirrors a staging directory to peer nodes."""

    tier = "peers"

    def __init__(self, stage: StagingDir):
        super().__init__(stage)
        self._peers: PeerTier | None = None
        self._group: PeerGroup | None = None
        self._surveyed_at = float("-inf")
        #: The bundles on peers, and whether each is complete.
        self._found: dict[BundleRef, bool] = {}
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
        peers = None if orders is None else self._opened(orders)
        if orders is None or peers is None:
            return False
        self.report(holder=orders.holder)
        self.forget_replaced(found)
        staged = {one.info.save_id for one in found if one.info is not None}
        #: A peer may have the only intact copy of these.
        unreadable = {one.step for one in found if one.info is None}
        if orders.began:
            known = ((ref, bundles.save_of(ref)) for ref in self._found)
            self._drop(
                {
                    ref
                    for ref, save_id in known
                    if save_id not in staged and (save_id is None or save_id.step not in unreadable)
                },
                peers,
            )
        held = self._held()
        for save in found:
            if save.key in self.progress.damaged:
                continue
            if save.info is None:
                self.report_unreadable(save, orders.item)
            elif save.info.save_id not in held:
                self._push(save, save.info.save_id, orders, peers)
                return not self._is_ended
        if orders.began:
            self._drop({ref for ref, is_complete in self._found.items() if not is_complete}, peers)
        self._report_held()
        return False

    def _push(self, save: StagedSave, save_id: SaveId, orders: Orders, peers: PeerTier) -> None:
        try:
            bundle = bundles.staged_bundle(self.stage, save_id, orders)
            peers.put(bundle)
        except Missing:
            return  # It was evicted concurrently.
        except Damaged as error:
            self.report_damaged(save, str(error))
        else:
            self._found[bundle.ref] = True
        self._report_held()

    def _held(self) -> set[SaveId | None]:
        return {bundles.save_of(ref) for ref, is_complete in self._found.items() if is_complete}

    def _report_held(self) -> None:
        keys = tuple(sorted(key_of(one.step, one) for one in self._held() if one is not None))
        self.report(saves=keys, problem=None, code="", problem_unix_secs=0.0)

    def _drop(self, refs: set[BundleRef], peers: PeerTier) -> None:
        """Drops peer copies of evicted saves, and partial ones."""
        if refs:
            peers.delete(refs)
            self._found = {ref: one for ref, one in self._found.items() if ref not in refs}

    def _opened(self, orders: Orders) -> PeerTier | None:
        """The peers that the trainer has found; reconnects if they changed."""
        group = orders.peers
        if group is None:
            return None
        if self._peers is None or group != self._group:
            if self._peers is not None:
                self._peers.close()
                self._peers = None
            self._peers, self._group = PeerTier(group), group
            self._surveyed_at = float("-inf")
        if time.monotonic() - self._surveyed_at > _ASK_SECS:
            self._refresh_survey(self._peers, orders)
        return self._peers

    def _refresh_survey(self, peers: PeerTier, orders: Orders) -> None:
        """Queries what peers hold of this process's saves, and of departed processes."""
        shard, shards = orders.process, orders.processes
        found = peers.survey()
        self._found = {
            ref: name.shard == shard and ref in found.complete
            for name, ref in bundles.newest_first(found.every)
            if name.shard == shard or (shard == 0 and name.shard >= shards)
        }
        self._surveyed_at = time.monotonic()
