# SPDX-License-Identifier: Apache-2.0
"""Starts, finds and stops the hot standby of a directory."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deltackpt.errors import OptionError, ServiceMismatch, ServiceUnavailable
from deltackpt.format import naming
from deltackpt.ledger.directory import Root
from deltackpt.service import protocol
from deltackpt.service.actor import CONCURRENCY, RestoreActor
from deltackpt.service.compactor import Compactor
from deltackpt.service.protocol import Replica, ServiceOptions
from deltackpt.service.restore_service import RestoreService
from deltackpt.storage import buckets

_START_SECS = 30.0
_STOP_SECS = 15.0


def start(
    directory: str | os.PathLike[str], *, options: ServiceOptions | None = None
) -> RestoreService:
    """Starts the service of a directory, or its missing replicas.

    Returns once the replicas exist, or after half a minute if the cluster has no room for them yet.
    They load in the background.

    Replicas are detached actors: they outlive the job that starts them, and Ray restarts those that
    die, on another node if theirs is lost. Shard i prefers node i, like the shards of a mesh over
    the nodes in that order.

    Args:
      directory: the checkpoint directory as every node sees it, created if it does not exist; or a
        bucket URL.
      options: options of the service.

    Raises:
      ServiceUnavailable: this process is not connected to Ray, or the cluster has no node.
      ServiceMismatch: the directory's service is running with another number of shards.
      OptionError: more replicas than nodes.
      StorageError, ForeignDirectory, UnsupportedRoot: the directory cannot be used.
    """
    options = options or ServiceOptions()
    nodes = living_nodes()
    root = protocol.root_name(directory)
    if buckets.is_url(root):
        # The directory may still be empty.
        buckets.locate(root, endpoint=options.endpoint).open()
    elif os.path.isdir(root):
        Root.open(root, item=options.item, read_only=True).close()
    else:
        os.makedirs(root)
    key = protocol.key(root, options.item)
    running = {replica.shards for replica in protocol.replicas(key)}
    count = options.shards or (running.pop() if len(running) == 1 else len(nodes))
    if running - {count}:
        raise ServiceMismatch(
            f"service of {root}: expected {count} shards, found replicas of {sorted(running)}; "
            "stop it first: deltackpt.service.stop(directory)"
        )
    if options.replicas > len(nodes):
        raise OptionError(
            f"ServiceOptions.replicas: expected at most one per node, found {options.replicas} "
            f"for {len(nodes)} nodes"
        )
    created = []
    remote: Any = ray.remote
    actor = remote(concurrency_groups=CONCURRENCY)(RestoreActor)
    for shard in range(count):
        for index in range(options.replicas):
            replica = Replica(key, shard, count, index)
            handle = actor.options(
                **detached(replica.name, nodes[(shard + index) % len(nodes)], options.memory_bytes),
                max_concurrency=4,
            ).remote(root, replica, options)
            created.append(handle.describe.remote())
    if options.compact_after is not None:
        compactor: Any = ray.remote(Compactor)
        handle = compactor.options(
            **detached(protocol.compactor_name(key), nodes[-1]), max_concurrency=2
        ).remote(root, count, options)
        created.append(handle.describe.remote())
    # Ray drops a detached actor if its driver exits before the actor was created.
    ray.wait(created, num_returns=len(created), timeout=_START_SECS)
    return RestoreService(root, options.item)


def stop(directory: str | os.PathLike[str], item: str = naming.EMBEDDINGS_ITEM) -> int:
    """Stops the service of a directory; steps and compacted bases are kept.

    Returns:
      The number of actors stopped.

    Raises:
      ServiceUnavailable: this process is not connected to Ray.
    """
    living_nodes()
    key = protocol.key(directory, item)
    names = [replica.name for replica in protocol.replicas(key)]
    actors = []
    for name in (*names, protocol.compactor_name(key)):
        with contextlib.suppress(ValueError):  # There is no compactor, or the actor has exited.
            actors.append(ray.get_actor(name, namespace=protocol.NAMESPACE))
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait(
            [actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=_STOP_SECS
        )
    for actor in actors:
        ray.kill(actor, no_restart=True)
    return len(actors)


def living_nodes() -> list[str]:
    """Returns Ray's ids of the nodes by address; only nodes with CPUs, if there are any."""
    if not ray.is_initialized():
        raise ServiceUnavailable(
            "expected a process connected to Ray, found that ray.init() was not called; connect "
            "to the cluster first"
        )
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive = [node for node in alive if node["Resources"].get("CPU")] or alive
    alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    if not alive:
        raise ServiceUnavailable("expected a living node in the Ray cluster, found none; start one")
    return [node["NodeID"] for node in alive]


def detached(
    name: str, node: str, memory_bytes: int | None = None, *, soft: bool = True
) -> dict[str, object]:
    """Returns the options of a detached actor that prefers a node, or requires it if not soft."""
    return {
        "name": name,
        "namespace": protocol.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        # Ray 2.60 ignores the affinity of an actor that requests no resources.
        "memory": memory_bytes or 1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=soft),
    }
