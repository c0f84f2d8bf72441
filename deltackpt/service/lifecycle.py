# SPDX-License-Identifier: Apache-2.0
"""Starting, finding and stopping the service of a directory."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deltackpt.errors import OptionError, ServiceMismatch, ServiceUnavailable
from deltackpt.format import names as file_names
from deltackpt.ledger.directory import Root
from deltackpt.service import names
from deltackpt.service.actor import CONCURRENCY, RestoreActor
from deltackpt.service.client import RestoreService
from deltackpt.service.compactor import Compactor
from deltackpt.service.names import Member
from deltackpt.service.options import ServiceOptions
from deltackpt.storage import buckets

_START_SECS = 30.0
_STOP_SECS = 15.0


def start(
    directory: str | os.PathLike[str], *, options: ServiceOptions | None = None
) -> RestoreService:
    """Starts the service of a directory, or what is missing of it.

    It returns when the members are there, which then load in the background, or after
    half a minute where the cluster has no room for them yet.

    The members are detached actors: they outlive the job that starts them, and Ray restarts those
    that die, on another node where theirs is gone. Shard i prefers node i, as the shards of a mesh
    over the nodes in that order do.

    Args:
      directory: root of the steps, as every node sees it, made where it does not exist yet; or
        the URL of a bucket.
      options: how.

    Raises:
      ServiceUnavailable: this process is not connected to Ray, or the cluster has no node.
      ServiceMismatch: a service of the directory runs with another number of shards.
      OptionError: more replicas than nodes.
      StorageError, ForeignDirectory, UnsupportedRoot: the directory cannot be used.
    """
    options = options or ServiceOptions()
    nodes = living_nodes()
    root = names.root_name(directory)
    if buckets.is_url(root):
        # There may be nothing in it yet.
        buckets.place(root, endpoint=options.endpoint).open()
    elif os.path.isdir(root):
        Root.open(root, item=options.item, read_only=True).close()
    else:
        os.makedirs(root)
    key = names.key(root, options.item)
    running = {member.shards for member in names.members(key)}
    count = options.shards or (running.pop() if len(running) == 1 else len(nodes))
    if running - {count}:
        raise ServiceMismatch(
            f"service of {root}: expected {count} shards, found members of {sorted(running)}; stop "
            "it first: deltackpt.service.stop(directory)"
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
        for replica in range(options.replicas):
            member = Member(key, shard, count, replica)
            handle = actor.options(
                **_standing(
                    member.name, nodes[(shard + replica) % len(nodes)], options.memory_bytes
                ),
                max_concurrency=4,
            ).remote(root, member, options)
            created.append(handle.describe.remote())
    if options.compact_after is not None:
        compactor: Any = ray.remote(Compactor)
        handle = compactor.options(
            **_standing(names.compactor_name(key), nodes[-1]), max_concurrency=2
        ).remote(root, count, options)
        created.append(handle.describe.remote())
    # A detached actor whose driver ends before it was created is forgotten.
    ray.wait(created, num_returns=len(created), timeout=_START_SECS)
    return RestoreService(root, options.item)


def stop(directory: str | os.PathLike[str], item: str = file_names.EMBEDDINGS_ITEM) -> int:
    """Ends the service of a directory; steps and compacted bases stay.

    Returns:
      How many actors were ended.

    Raises:
      ServiceUnavailable: this process is not connected to Ray.
    """
    living_nodes()
    key = names.key(directory, item)
    wanted = [member.name for member in names.members(key)]
    wanted += [name for name in names.listed() if name == names.compactor_name(key)]
    actors = []
    for name in wanted:
        with contextlib.suppress(ValueError):  # It has ended by itself.
            actors.append(ray.get_actor(name, namespace=names.NAMESPACE))
    with contextlib.suppress(ray.exceptions.RayError):
        ray.wait(
            [actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=_STOP_SECS
        )
    for actor in actors:
        ray.kill(actor, no_restart=True)
    return len(actors)


def living_nodes() -> list[str]:
    """Ray's ids of the nodes, in the order of their addresses; of those with CPUs where any have.

    A head that was given none is not meant to work.
    """
    if not ray.is_initialized():
        raise ServiceUnavailable(
            "expected a process that is connected to Ray, found that ray.init() was not called; "
            "connect to the cluster first"
        )
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive = [node for node in alive if node["Resources"].get("CPU")] or alive
    alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    if not alive:
        raise ServiceUnavailable("expected a node that is alive in the Ray cluster, found none")
    return [node["NodeID"] for node in alive]


def _standing(name: str, node: str, memory_bytes: int | None = None) -> dict[str, Any]:
    """Options of an actor that stays until it is stopped, on a node while there is that node."""
    return {
        "name": name,
        "namespace": names.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        # Ray 2.60 puts an actor that asks for nothing on any node, whatever its affinity.
        "memory": memory_bytes or 1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
    }
