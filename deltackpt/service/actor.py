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

from deltackpt.errors import DeltackptError, ServiceUnavailable, without_frames
from deltackpt.format.manifest import SaveId
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
        holding = None if follower is None else follower.loaded
        newest = None
        if follower is not None:
            try:
                newest = follower.newest_step()
            except DeltackptError as found:
                error = found
        return protocol.packed(
            Description(
                directory=self._directory,
                node=protocol.node_id(),
                pid=os.getpid(),
                health=self._health if error is None else f"{type(error).__name__}: {error}",
                code=getattr(error, "code", "") if error is not None else "",
                save_id=None if holding is None else holding.save.save_id,
                point=None if holding is None or holding.point is None else holding.point.save_id,
                newest_step=newest,
                lag_secs=None if holding is None else holding.lag_secs,
                nbytes=0 if follower is None else follower.nbytes,
            )
        )

    @ray.method(concurrency_group="pin")
    def pin(
        self,
        run: str,
        step: int,
        attempt: int,
        timeout_secs: float,
        point: tuple[int, str, int, int] | None = None,
    ) -> bytes:
        """Pins a state for a reader; returns a packed ``Pinned``. ``point``: see ``point_of``."""
        follower, wanted = self._follower, SaveId(run, step, attempt)
        if follower is None:
            return protocol.packed(Pinned(refused=f"{self._replica}: {self._health}"))
        asked = None if point is None else protocol.point_of(point)
        try:
            pin, holding = follower.pin(wanted, timeout_secs, asked)
        except ServiceUnavailable as error:
            held = follower.loaded
            found = None if held is None else held.save.save_id
            soon = held is not None and held.may_reach(wanted, asked) and self._error is None
            return protocol.packed(Pinned(refused=str(error), soon=soon, loaded=found))
        files, above = holding.files, holding.point
        return protocol.packed(
            Pinned(
                pin=pin,
                loaded=wanted,
                epoch=0 if above is None else above.epoch,
                point=None if above is None else above.save_id,
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
    def read(self, pin: int, group: str, field: str, start: int, stop: int) -> np.ndarray | str:
        """Returns the bytes of virtual rows of a pinned state, or an error text."""
        if self._follower is None:
            return f"{self._replica}: {self._health}"
        try:
            rows = self._follower.read(pin, group, field, start, stop)
        except ServiceUnavailable as error:
            return str(error)
        return rows.reshape(-1).view(np.uint8)

    @ray.method(concurrency_group="read")
    def read_file(self, pin: int, name: str, start: int, stop: int) -> np.ndarray | str:
        """Returns bytes of a file of a pinned state, or a string that explains why it cannot."""
        if self._follower is None:
            return f"{self._replica}: {self._health}"
        try:
            return self._follower.read_file(pin, name, start, stop)
        except ServiceUnavailable as error:
            return str(error)

    def stop(self) -> None:
        """Stops following; the caller kills the actor afterwards."""
        self._stopping.set()
        self._thread.join(_STOP_SECS)

    @property
    def _health(self) -> str:
        return "starting" if self._follower is None else self._follower.health

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
