# SPDX-License-Identifier: Apache-2.0
"""Names of a service's actors: whoever knows the directory finds them, without a coordinator."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.util

from deltackpt.storage import buckets

#: Ray's namespace of all our actors.
NAMESPACE = "deltackpt"
_MEMBER = re.compile(r"restore/([0-9a-f]+)/(\d+)-of-(\d+)/(\d+)")


class Member(NamedTuple):
    """One member of a service: it holds shard ``shard`` of ``shards``, as replica ``replica``."""

    key: str
    shard: int
    shards: int
    replica: int

    @property
    def name(self) -> str:
        """Name of its actor."""
        return f"restore/{self.key}/{self.shard}-of-{self.shards}/{self.replica}"

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.shards}, replica {self.replica}"


def key(directory: str | os.PathLike[str], item: str) -> str:
    """What names of one service have in common: of one item of one directory."""
    return hashlib.sha256(f"{root_name(directory)}\0{item}".encode()).hexdigest()[:16]


def root_name(directory: str | os.PathLike[str]) -> str:
    """How a root is named: a path from the top, or a URL."""
    if buckets.is_path(directory):
        return os.fspath(Path(buckets.file_path(directory) or "").absolute())
    return buckets.place(directory).url


def compactor_name(service: str) -> str:
    """Name of the actor that folds a service's chains."""
    return f"compact/{service}"


def members(service: str) -> list[Member]:
    """The members of a service that Ray knows, restarting ones included."""
    found = []
    for name in listed():
        match = _MEMBER.fullmatch(name)
        if match is not None and match[1] == service:
            found.append(Member(match[1], int(match[2]), int(match[3]), int(match[4])))
    return sorted(found)


def listed() -> list[str]:
    """Names of all our actors in the cluster."""
    every: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in every if entry["namespace"] == NAMESPACE]


def node_id() -> str:
    """Ray's id of this node."""
    return ray.get_runtime_context().get_node_id()
