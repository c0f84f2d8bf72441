# SPDX-License-Identifier: Apache-2.0
"""Keepers: an actor on each node that holds packs of other nodes in memory.

Ray says who is there and hands over the token; the bytes go by sockets of the keepers' own, past
Ray's object store. A keeper lets in who shows a token of the newest claim of its root: whoever
trained before is shut out as soon as another trainer takes over. It is bound to its node; one that
died comes back empty, at another address and with no token, until ``keepers`` hands it one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deltackpt.format import manifest
from deltackpt.nodes.server import NodeServer
from deltackpt.nodes.shelves import MemoryShelf
from deltackpt.nodes.tokens import Tokens
from deltackpt.options import Copies, Erasure
from deltackpt.service import lifecycle, names
from deltackpt.tiers.keepers import KeeperNode, Keepers

_MAGIC = "deltackpt.keeper"
_START_SECS = 30.0
_ANSWER_SECS = 5.0
_NICE = 5
#: Labels of Ray's nodes that say where they stand, the first that is known.
_RACK_LABELS = ("deltackpt/rack", "ray.io/availability-zone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperState:
    """What a keeper says of itself.

    Attributes:
      node: Ray's id of its node.
      address: of its server.
      pid: its process.
      memory_bytes: the most that it holds.
      free_bytes: what is left of it.
      fragments: how many it holds.
      claimed: whether a trainer has given it a token.
    """

    node: str
    address: str
    pid: int
    memory_bytes: int
    free_bytes: int
    fragments: int
    claimed: bool


class Keeper:
    """Holds fragments of packs in memory, and a server that takes and gives them."""

    def __init__(self, memory_bytes: int):
        """Serves nobody yet: there is no token.

        Args:
          memory_bytes: the most that it holds.
        """
        os.nice(_NICE)
        self._memory_bytes = memory_bytes
        self._shelf = MemoryShelf(memory_bytes)
        self._tokens = Tokens()
        self._server = NodeServer(
            self._shelf, bind=ray.util.get_node_ip_address(), tokens=self._tokens
        )
        self._holder: str | None = None

    def describe(self) -> bytes:
        """A ``KeeperState``."""
        count = len(self._shelf.keys("", after="", most=1 << 30))
        state = KeeperState(
            node=names.node_id(),
            address=self._server.address,
            pid=os.getpid(),
            memory_bytes=self._memory_bytes,
            free_bytes=self._shelf.free_bytes,
            fragments=count,
            claimed=self._holder is not None,
        )
        return manifest.to_bytes(state, _MAGIC)

    def admit(self, holder: str, token: str, claims: bool) -> str:
        """Lets in who shows a token of a claim.

        Args:
          holder: of the claim; that of a later one is greater.
          token: further ones of the same claim are let in, too; those of others not any more.
          claims: whether the root was just taken by it.

        Returns:
          The address of the server; "" where another claim's tokens hold.
        """
        if self._holder == holder:
            self._tokens.admit(token)
        elif claims or self._holder is None or holder > self._holder:
            self._tokens.rotate(token)
            self._holder = holder
        else:
            return ""
        return self._server.address

    def stop(self) -> None:
        """Ends the server; what was held is gone."""
        self._server.close()
        self._shelf.close()


def keepers(
    root: str | os.PathLike[str],
    item: str,
    how: Copies | Erasure,
    holder: str,
    *,
    earlier: Keepers | None = None,
) -> Keepers:
    """Starts the keepers of a root that are missing, and is let in by all of them.

    Args:
      root: a directory or a URL.
      item: name of our item in its steps.
      how: packs are held.
      holder: of the claim under which it is asked for. The newest claim of a root shuts earlier
        ones out.
      earlier: what this gave before under the same claim: nodes that came, and keepers that were
        started again, are let in on the same token.

    Returns:
      Those that answered; ``Keepers.require_nodes`` says whether they are enough.

    Raises:
      ServiceUnavailable: this process is not connected to Ray, or the cluster has no node.
    """
    key = names.key(root, item)
    token = secrets.token_urlsafe(32) if earlier is None else earlier.token
    alive = lifecycle.living_nodes()
    remote: Any = ray.remote
    actor = remote(Keeper)
    asked = {}
    for node in alive:
        handle = actor.options(
            name=keeper_name(key, node),
            namespace=names.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Ray 2.60 puts an actor that asks for nothing on any node, whatever its affinity.
            memory=how.memory_bytes,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            max_concurrency=2,
        ).remote(how.memory_bytes)
        asked[node] = handle.admit.remote(holder, token, earlier is None)
    answers = _answers(asked, _START_SECS if earlier is None else _ANSWER_SECS)
    racks = _racks()
    copies = how.copies if isinstance(how, Copies) else 0
    return Keepers(
        root=key,
        own=names.node_id(),
        token=token,
        nodes=tuple(
            KeeperNode(node=node, address=address, rack=racks.get(node, ""))
            for node, address in answers.items()
            if address
        ),
        k=how.k if isinstance(how, Erasure) else 1,
        m=how.m if isinstance(how, Erasure) else copies - 1,
    )


def states(root: str | os.PathLike[str], item: str) -> dict[str, KeeperState | None]:
    """What keepers of a root say, by node; None of one that does not answer.

    Raises:
      ServiceUnavailable: this process is not connected to Ray.
    """
    lifecycle.living_nodes()
    found = _found(names.key(root, item))
    asked = {node: handle.describe.remote() for node, handle in found.items()}
    answers = _answers(asked, _ANSWER_SECS)
    return {
        node: manifest.from_bytes(answers[node], KeeperState, name=f"keeper {node}", magic=_MAGIC)
        if node in answers
        else None
        for node in sorted(found)
    }


def stop(root: str | os.PathLike[str], item: str) -> int:
    """Ends the keepers of a root; what they held is gone.

    Returns:
      How many were ended.

    Raises:
      ServiceUnavailable: this process is not connected to Ray.
    """
    lifecycle.living_nodes()
    found = _found(names.key(root, item))
    _answers({node: handle.stop.remote() for node, handle in found.items()}, _ANSWER_SECS)
    for handle in found.values():
        ray.kill(handle, no_restart=True)
    return len(found)


def keeper_name(key: str, node: str) -> str:
    """Name of the actor that keeps for a root on a node."""
    return f"{key}-keeper-{node}"


def _found(key: str) -> dict[str, Any]:
    """Actors of a root that Ray knows, by node."""
    found = {}
    prefix = keeper_name(key, "")
    for name in names.listed():
        if name.startswith(prefix):
            with contextlib.suppress(ValueError):  # It has ended by itself.
                found[name.removeprefix(prefix)] = ray.get_actor(name, namespace=names.NAMESPACE)
    return found


def _answers(asked: dict[str, Any], secs: float) -> dict[str, Any]:
    """What came in time, by node."""
    done, _ = (
        ray.wait([*asked.values()], num_returns=len(asked), timeout=secs) if asked else ([], 0)
    )
    answered = set(done)
    found = {}
    for node, reference in asked.items():
        if reference in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # It, or its node, died.
                found[node] = ray.get(reference)
    return found


def _racks() -> dict[str, str]:
    """Where nodes stand, of those whose labels say it."""
    found = {}
    for node in ray.nodes():
        labels = node.get("Labels") or {}
        rack = next((labels[name] for name in _RACK_LABELS if labels.get(name)), None)
        if rack is not None:
            found[node["NodeID"]] = rack
    return found
