# SPDX-License-Identifier: Apache-2.0
"""RestoreActor: a ``Follower`` as a Ray actor.

Calls run in threads of their own; the Follower advances in another and keeps polling after errors.
"""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import ray

from deltackpt.errors import DeltackptError, RestoreError, ServiceUnavailable, without_frames
from deltackpt.service import protocol
from deltackpt.service.protocol import Description, Pinned, Replica, ServiceOptions
from deltackpt.standby.follower import Follower

_logger = logging.getLogger(__name__)

#: Longest pause between two polls of an unusable directory.
_REST_SECS = 5.0
_STOP_SECS = 10.0
#: Threads for calls that may wait or copy; other calls are answered regardless of these.
CONCURRENCY = {"pin": 16, "read": 4}


class RestoreActor:
    """Holds one shard of a directory's tables in memory; see ``Follower`` and ``protocol``."""

    def __init__(self, directory: str, replica: Replica, options: ServiceOptions):
        os.nice(options.nice)
        self._directory, self._replica, self._options = directory, replica, options
        self._follower: Follower | None = None
        self._error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="deltackpt-follow", daemon=True)
        self._thread.start()

    def describe(self) -> bytes:
        """Returns a packed ``Description``."""
        follower, error = self._follower, self._error
        holding = newest = None
        health, nbytes = "starting", 0
        if follower is not None:
            holding, health, nbytes = follower.loaded, follower.health, follower.nbytes
            try:
                newest = follower.newest_step()
            except DeltackptError as found:
                error = found
        return protocol.packed(
            Description(
                directory=self._directory,
                node=protocol.node_id(),
                pid=os.getpid(),
                health=f"{type(error).__name__}: {error}" if error is not None else health,
                code=getattr(error, "code", "") if error is not None else "",
                save_id=None if holding is None else holding.save.save_id,
                point=None if holding is None or holding.point is None else holding.point.save_id,
                newest_step=newest,
                lag_secs=None if holding is None else holding.lag_secs,
                nbytes=nbytes,
            )
        )

    @ray.method(concurrency_group="pin")
    def pin(self, request: bytes, timeout_secs: float) -> bytes:
        """Pins a state for a reader: a packed ``PinRequest``; returns a packed ``Pinned``."""
        try:
            asked = protocol.request_from(request)
        except RestoreError as error:
            # The reader has another version. It reports that, since the answer has this protocol.
            return protocol.packed(Pinned(refused=str(error)))
        try:
            follower = self._opened()
            pin, holding = follower.pin(asked.save_id, timeout_secs, asked.point)
        except ServiceUnavailable as error:
            held = None if self._follower is None else self._follower.loaded
            found = None if held is None else held.save.save_id
            is_ahead = held is not None and held.may_reach(asked.save_id, asked.point)
            soon = is_ahead and self._error is None
            return protocol.packed(Pinned(refused=str(error), soon=soon, loaded=found))
        files = holding.files
        return protocol.packed(
            Pinned(
                pin=pin,
                loaded=asked.save_id,
                point=holding.point,
                address=follower.address,
                sequence=holding.sequence,
                chain=holding.chain,
                files=() if files is None else files.index,
                files_address=None if files is None else files.memory.address,
            )
        )

    def renew(self, pin: int) -> bool:
        """Extends a pin; returns False if it has expired."""
        return self._follower is not None and self._follower.renew(pin)

    def unpin(self, pin: int) -> None:
        """Releases a pin."""
        if self._follower is not None:
            self._follower.unpin(pin)

    @ray.method(concurrency_group="read")
    def read(self, pin: int, start: int, stop: int, files: bool) -> np.ndarray | str:
        """Returns bytes of a pinned state's rows or files, or a string that explains why not."""
        try:
            return self._opened().read(pin, start, stop, files=files)
        except ServiceUnavailable as error:
            return str(error)

    def stop(self) -> None:
        """Stops following; the caller kills the actor afterwards."""
        self._stopping.set()
        self._thread.join(_STOP_SECS)

    def _opened(self) -> Follower:
        if self._follower is None:
            raise ServiceUnavailable(f"{self._replica}: starting")
        return self._follower

    def _follow(self) -> None:
        rest = 0.0
        while not self._stopping.wait(rest):
            try:
                if self._follower is None:
                    self._follower = Follower(
                        self._directory,
                        item=self._options.item,
                        shard=self._replica.shard,
                        shards=self._replica.shards,
                        memory_bytes=self._options.memory_bytes,
                        endpoint=self._options.endpoint,
                        wal=self._options.wal,
                        # Restores need dense leaves, too.
                        soft=False,
                    )
                self._follower.advance()
                self._error, rest = None, self._options.rest_secs(self._directory)
            except Exception as error:
                # Keep polling after any error, since it may be fixed; report it in the status.
                if str(error) != str(self._error):
                    _logger.warning("%s of %s", self._replica, self._directory, exc_info=True)
                self._error, rest = (
                    without_frames(error),
                    min(_REST_SECS, 2 * rest + self._options.rest_secs(self._directory)),
                )
