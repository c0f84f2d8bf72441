# SPDX-License-Identifier: Apache-2.0
"""Options and actors of the hot standby, and messages between its replicas and clients.

A replica answers with ``records.to_bytes``: another version may not load Ray's pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
import ray.exceptions
import ray.util

from deltackpt.__about__ import __version__
from deltackpt.errors import OptionError, RestoreError, ServiceMismatch, ServiceUnavailable
from deltackpt.format import naming, records
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.options import KafkaWal
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.standby.cached_files import CachedFile
from deltackpt.standby.shared_memory import MemoryAddress
from deltackpt.storage import buckets

_T = TypeVar("_T")

#: Ray namespace of all deltackpt actors.
NAMESPACE = "deltackpt"
_REPLICA = re.compile(r"restore/([0-9a-f]+)/(\d+)-of-(\d+)/(\d+)")


class Replica(NamedTuple):
    """A replica of a service: it holds shard ``shard`` of ``shards``, as its copy ``index``."""

    key: str
    shard: int
    shards: int
    index: int

    @property
    def name(self) -> str:
        """Returns the name of its actor."""
        return f"restore/{self.key}/{self.shard}-of-{self.shards}/{self.index}"

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards}, replica {self.index}"


def key(directory: str | os.PathLike[str], item: str) -> str:
    """Returns the common part of the names of one service: one item of one directory."""
    return hashlib.sha256(f"{root_name(directory)}\0{item}".encode()).hexdigest()[:16]


def root_name(directory: str | os.PathLike[str]) -> str:
    """Returns a directory's canonical name: an absolute path, or a URL."""
    if buckets.file_path(directory) is not None:
        return os.fspath(Path(buckets.file_path(directory) or "").absolute())
    return buckets.locate(directory).url


def compactor_name(service: str) -> str:
    """Returns the name of the actor that compacts a service's chains."""
    return f"compact/{service}"


def replicas(service: str) -> list[Replica]:
    """Returns the replicas of a service that Ray knows, including restarting ones."""
    found = []
    for name in listed():
        match = _REPLICA.fullmatch(name)
        if match is not None and match[1] == service:
            found.append(Replica(match[1], int(match[2]), int(match[3]), int(match[4])))
    return sorted(found)


def listed() -> list[str]:
    """Returns the names of all deltackpt actors in the cluster."""
    every: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in every if entry["namespace"] == NAMESPACE]


def node_id() -> str:
    """Returns Ray's id of this node."""
    return ray.get_runtime_context().get_node_id()


def actor(replica: Replica) -> Any:
    """Returns the actor of a replica; raises ``ServiceUnavailable`` if it no longer exists."""
    try:
        return ray.get_actor(replica.name, namespace=NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"{replica}: expected a running actor, found none; start the service again"
        ) from error


def call(replica: Replica, method: str, *arguments: object) -> Any:
    """Calls a method of a replica's actor; returns a reference to the answer.

    Raises ``ServiceUnavailable`` as ``actor`` does, and ``ServiceMismatch`` if the actor's version
    has no such method, or one with other parameters.
    """
    try:
        return getattr(actor(replica), method).remote(*arguments)
    except (AttributeError, TypeError) as error:  # Ray checks calls against the actor's class.
        raise mismatch(str(replica), f"{method}(): {error}") from error


def answer(replica: Replica, call: ray.ObjectRef[_T], timeout_secs: float) -> _T:
    """Returns a replica's answer; raises ``ServiceUnavailable`` if none arrives in time."""
    try:
        return ray.get(call, timeout=timeout_secs)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceUnavailable(
            f"{replica}: expected an answer within {timeout_secs:.1f} s, found none; check its node"
        ) from error
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"{replica}: expected an answer, found {shown(error)}; Ray restarts it automatically"
        ) from error


def shown(error: Exception) -> str:
    """Returns the first line of a Ray error's message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


_DIRECTORY_SECS, _BUCKET_SECS = 0.1, 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """How a directory's state is kept in memory.

    Attributes:
      item: name of the deltackpt item in a step.
      shards: into how many shards the rows of each table are split; default: the number of nodes.
      replicas: how many replicas of each shard there are, on different nodes.
      memory_bytes: maximum memory of one replica in bytes. Ray reserves it when it places the
        replica; by default a replica may use all memory of its node.
      poll_secs: seconds between two polls for a new step; each poll lists the checkpoint directory
        once. Default: 0.1 for a directory, 5 for a bucket, where listings are billed.
      compact_after: merge a chain of this many deltas into a new base, in the background; None
        disables compaction.
      compact_memory_bytes: memory for compaction in bytes, for all shards together.
      nice: CPU niceness of the replicas, 0 to 19.
      endpoint: address of the bucket's server, if it is not the cloud provider's default.
      wal: how the replicas read WAL records in Kafka, such as ``KafkaWal(config=...)``. Ray stores
        it: if it has secrets, pass a function that reads them on each node as ``config``.
    """

    item: str = naming.EMBEDDINGS_ITEM
    shards: int | None = None
    replicas: int = 1
    memory_bytes: int | None = None
    poll_secs: float | None = None
    compact_after: int | None = None
    compact_memory_bytes: int = 1 << 30
    nice: int = 10
    endpoint: str | None = None
    wal: KafkaWal | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("shards", 1),
            ("replicas", 1),
            ("memory_bytes", 1),
            ("compact_after", 1),
            ("compact_memory_bytes", 1 << 20),
            ("nice", 0),
        ):
            found = getattr(self, name)
            if found is not None and found < least:
                raise OptionError(
                    f"ServiceOptions.{name}: expected at least {least}, found {found!r}"
                )
        if self.poll_secs is not None and not self.poll_secs > 0:
            raise OptionError(
                "ServiceOptions.poll_secs: expected a positive number of seconds, found "
                f"{self.poll_secs!r}"
            )

    def rest_secs(self, directory: str) -> float:
        """Seconds to pause between two polls of a checkpoint directory."""
        if self.poll_secs is not None:
            return self.poll_secs
        return _BUCKET_SECS if buckets.is_url(directory) else _DIRECTORY_SECS


#: Incremented when a replica's answers or arguments change their meaning.
PROTOCOL = 5
_MAGIC = "deltackpt.service"
_Record = TypeVar("_Record", "Description", "Pinned")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """A replica's description of itself: identity, contents and health.

    ``code`` is that of the current error, or empty. ``lag_secs`` is the time from the commit of
    ``save_id``, or from ``point`` above it, until the replica held that state.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    directory: str
    node: str
    pid: int
    health: str
    code: str = ""
    save_id: SaveId | None = None
    point: SaveId | None = None
    newest_step: int | None = None
    lag_secs: float | None = None
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinRequest:
    """The state that a reader wants: a step, or a recovery point above it."""

    save_id: SaveId
    point: RecoveryPoint | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned:
    """A state that a replica keeps for a reader.

    ``pin`` is 0 if the state is not pinned: ``refused`` is the reason, and ``soon`` whether the
    replica may hold it soon. ``point`` is the recovery point above the save ``loaded``.
    ``chain`` lists the merged saves, base first. ``address`` and ``files_address`` are paths of
    memory for processes on the same machine; ``sequence`` is that of the memory.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    pin: int = 0
    refused: str = ""
    soon: bool = False
    loaded: SaveId | None = None
    point: RecoveryPoint | None = None
    address: MemoryAddress | None = None
    sequence: int = 0
    chain: tuple[SaveInfo, ...] = ()
    files: tuple[CachedFile, ...] = ()
    files_address: MemoryAddress | None = None


def packed(record: Description | PinRequest | Pinned) -> bytes:
    """Returns the bytes of a request or an answer."""
    return records.to_bytes(record, _MAGIC)


def request_from(data: bytes) -> PinRequest:
    """Decodes a request; raises ``RestoreError`` if another version encoded it."""
    return records.from_bytes(data, PinRequest, name="request", magic=_MAGIC)


def unpacked(data: bytes, kind: type[_Record], replica: str) -> _Record:
    """Decodes an answer; raises ``ServiceMismatch`` if another version encoded it."""
    try:
        found = records.from_bytes(data, kind, name=replica, magic=_MAGIC)
        if found.protocol == PROTOCOL:
            return found
        problem = f"protocol {found.protocol} of version {found.version}"
    except (RestoreError, TypeError) as error:
        problem = str(error)
    raise mismatch(replica, problem)


def mismatch(replica: str, problem: str) -> ServiceMismatch:
    """Returns the error for a replica of another version."""
    return ServiceMismatch(
        f"{replica}: expected an answer of protocol {PROTOCOL} (version {__version__}), found "
        f"{problem}; install one version of deltackpt everywhere, stop the service and start it "
        "again"
    )
