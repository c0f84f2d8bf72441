# SPDX-License-Identifier: Apache-2.0
"""Names of a service's actors, derived from the directory, so that no coordinator is needed."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.util

from deltackpt.storage import buckets

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
    if buckets.is_path(directory):
        return os.fspath(Path(buckets.file_path(directory) or "").absolute())
    return buckets.place(directory).url


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
