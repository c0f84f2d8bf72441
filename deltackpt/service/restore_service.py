# SPDX-License-Identifier: Apache-2.0
"""RestoreService: client of a directory's hot standby, for trainers, notebooks and the CLI."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time

import ray
import ray.exceptions

from deltackpt.errors import ServiceError, ServiceMismatch, ServiceUnavailable, TooLittleMemory
from deltackpt.format import naming
from deltackpt.layers.targets import Wanted
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.service import protocol
from deltackpt.service.protocol import Description, Replica
from deltackpt.service.replica_reads import reading
from deltackpt.storage import buckets

_ASK_AGAIN_SECS = 0.05
_DESCRIBE_SECS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """One replica's status, as it reported it.

    Attributes:
      replica: its shard, and its index among the copies of the shard.
      found: its self-description; None if it does not answer.
      problem: why it does not answer.
    """

    replica: Replica
    found: Description | None
    problem: str = ""

    @property
    def step(self) -> int | None:
        """The step that the replica holds."""
        save_id = None if self.found is None else self.found.save_id
        return None if save_id is None else save_id.step


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """Status of a service at one moment.

    Attributes:
      directory: the checkpoint directory.
      replicas: its replicas, ordered by shard and index.
      compactor: status of the actor that compacts chains; None without compaction.
    """

    directory: str
    replicas: tuple[ReplicaStatus, ...]
    compactor: str | None

    @property
    def step(self) -> int | None:
        """The oldest step among the newest that each shard holds; None if a shard holds none."""
        held: dict[int, list[int]] = {one.replica.shard: [] for one in self.replicas}
        for one in self.replicas:
            if one.step is not None:
                held[one.replica.shard].append(one.step)
        return min(map(max, held.values()), default=None) if all(held.values()) else None

    @property
    def newest_step(self) -> int | None:
        """The newest committed step that any replica sees."""
        seen = [one.found.newest_step for one in self.replicas if one.found is not None]
        return max((step for step in seen if step is not None), default=None)


class RestoreService:
    """Client of the hot standby of one item in one directory; a ``RowSource``.

    It keeps no connections: every call looks up the replicas again, so it survives their restarts.
    """

    def __init__(self, directory: str | os.PathLike[str], item: str = naming.EMBEDDINGS_ITEM):
        """See ``service.connect``."""
        self.directory = protocol.root_name(directory)
        self.item = item
        self._key = protocol.key(directory, item)

    def __repr__(self) -> str:
        return f"RestoreService({self.directory!r}, {self.item!r})"

    # Restoring.

    def tables(
        self,
        save: StoredSave,
        wanted: Wanted | None = None,
        *,
        timeout_secs: float = 10.0,
        point: RecoveryPoint | None = None,
        files: bool = True,
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        """Reads the wanted parts of a step from the replicas' memory; see ``RowSource``."""
        place = _resolved(self.directory), self.item
        if place != (_resolved(str(save.step_dir.parent)), save.item):
            raise ServiceMismatch(
                f"{self}: expected the service of {save.step_dir.parent}, item {save.item!r}, "
                "found that of another directory; call connect() with the manager's directory"
            )
        replicas = self._by_shard(min(_DESCRIBE_SECS, timeout_secs / 2))
        return reading(
            save, replicas, wanted, timeout_secs=timeout_secs, point=point, with_files=files
        )

    # Status.

    def status(self, timeout_secs: float = _DESCRIBE_SECS) -> ServiceStatus:
        """Returns the status of every replica, including those that do not answer in time.

        Raises:
          ServiceUnavailable: no service is running, or this process is not connected to Ray.
        """
        replicas = self.replicas()
        asked = []
        for replica in replicas:
            try:
                asked.append((replica, protocol.call(replica, "describe")))
            except (ServiceError, ray.exceptions.RayError) as error:
                asked.append((replica, error))
        end = time.monotonic() + timeout_secs
        found = []
        for replica, answer in asked:
            try:
                if isinstance(answer, Exception):
                    raise answer
                data = protocol.answer(replica, answer, max(0.0, end - time.monotonic()))
                described = protocol.unpacked(data, Description, str(replica))
                found.append(ReplicaStatus(replica=replica, found=described))
            except (ServiceError, ray.exceptions.RayError) as error:
                found.append(
                    ReplicaStatus(replica=replica, found=None, problem=protocol.shown(error))
                )
        return ServiceStatus(
            directory=self.directory,
            replicas=tuple(found),
            compactor=_compactor_status(self._key, max(0.1, end - time.monotonic())),
        )

    def wait_ready(self, step: int | None = None, timeout_secs: float = 60.0) -> ServiceStatus:
        """Waits until every replica holds a given step, or the newest committed one.

        Args:
          step: wait for this step or a later one; by default the newest that the replicas see.
          timeout_secs: maximum wait in seconds.

        Raises:
          TooLittleMemory: a replica cannot hold its rows.
          ServiceUnavailable: the timeout expired; the message lists each replica's status.
        """
        end = time.monotonic() + timeout_secs
        while True:
            found = self.status(max(_ASK_AGAIN_SECS, min(_DESCRIBE_SECS, end - time.monotonic())))
            wanted = found.newest_step if step is None else step
            held = [one.step for one in found.replicas]
            if wanted is not None and all(one is not None and one >= wanted for one in held):
                return found
            for one in found.replicas:
                if one.found is not None and one.found.code == TooLittleMemory.code:
                    raise TooLittleMemory(one.found.health)
            if time.monotonic() > end:
                raise ServiceUnavailable(
                    f"{self}: expected every replica to hold step {wanted} within {timeout_secs} "
                    f"s, found {_status_text(found)}; check the nodes, or allow more time"
                )
            time.sleep(_ASK_AGAIN_SECS)

    def replicas(self) -> list[Replica]:
        """Returns the replicas that Ray knows.

        Raises:
          ServiceUnavailable: no replica exists, or this process is not connected to Ray.
        """
        if not ray.is_initialized():
            raise ServiceUnavailable(
                f"{self}: expected a process connected to Ray, found that ray.init() was not "
                "called; connect to the cluster first"
            )
        found = protocol.replicas(self._key)
        if not found:
            raise ServiceUnavailable(
                f"{self}: expected a service in this Ray cluster, found none; start one with "
                "deltackpt.service.start(directory)"
            )
        return found

    def _by_shard(self, timeout_secs: float) -> list[list[Replica]]:
        """Returns the replicas of each shard, in the order in which to try them."""
        replicas = self.replicas()
        count = replicas[0].shards
        by_shard = [
            [one for one in replicas if (one.shard, one.shards) == (shard, count)]
            for shard in range(count)
        ]
        for shard, found in enumerate(by_shard):
            if not found:
                raise ServiceUnavailable(
                    f"{self}: expected a replica of shard {shard} of {count}, found none; start "
                    "the service again"
                )
        here = protocol.node_id()
        if any(len(found) > 1 for found in by_shard):
            answers = self.status(timeout_secs).replicas
            nodes = {one.replica: one.found.node for one in answers if one.found is not None}
            for found in by_shard:
                # Replicas on this node first, unresponsive ones last, otherwise random to spread
                # many readers.
                random.shuffle(found)
                found.sort(key=lambda replica: (nodes.get(replica) != here, replica not in nodes))
        return by_shard


def connect(
    directory: str | os.PathLike[str], item: str = naming.EMBEDDINGS_ITEM
) -> RestoreService:
    """Returns a client of a directory's running service.

    Args:
      directory: the checkpoint directory, as it was passed to ``start``.
      item: name of the deltackpt item in a step.

    Raises:
      ServiceUnavailable: no service is running, or this process is not connected to Ray.
    """
    service = RestoreService(directory, item)
    service.replicas()
    return service


def find(
    directory: str | os.PathLike[str], item: str = naming.EMBEDDINGS_ITEM
) -> RestoreService | None:
    """Like ``connect``, but returns None if no service is running."""
    if not ray.is_initialized() or not protocol.replicas(protocol.key(directory, item)):
        return None
    return RestoreService(directory, item)


def _status_text(found: ServiceStatus) -> str:
    return "; ".join(
        f"{one.replica}: {one.problem or (one.found.health if one.found else '')} (step {one.step})"
        for one in found.replicas
    )


def _compactor_status(key: str, timeout_secs: float) -> str | None:
    try:
        actor = ray.get_actor(protocol.compactor_name(key), namespace=protocol.NAMESPACE)
        return str(ray.get(actor.describe.remote(), timeout=timeout_secs))
    except ValueError:
        return None
    except ray.exceptions.RayError as error:
        return protocol.shown(error)


def _resolved(root: str) -> str:
    """Resolves symbolic links in a local path; URLs are unchanged."""
    path = buckets.file_path(root)
    return root if path is None else os.path.realpath(path)
