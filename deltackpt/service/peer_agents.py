# SPDX-License-Identifier: Apache-2.0
"""Peer agents: an actor on each node that holds bundles of other nodes in memory.

Ray provides discovery and hands over the token; data is sent over the agents' own sockets. An agent
admits only clients with a token of the newest lease claim of its directory, so another trainer
fences an earlier one. A crashed agent restarts on its node, empty, at another address, without a
token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.util

from deltackpt.errors import RestoreError
from deltackpt.format import records
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.options import Copies, Erasure
from deltackpt.service import lifecycle, protocol
from deltackpt.tiers.staging import PeerGroup, PeerNode

_T = TypeVar("_T")

_MAGIC = "deltackpt.peer_agent"
_START_SECS = 30.0
_ANSWER_SECS = 5.0
_NICE = 5
#: Ray node labels that name the failure domain; the first that is present is used.
_RACK_LABELS = ("deltackpt/rack", "ray.io/availability-zone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentState:
    """A peer agent's description of itself; ``claimed`` if a trainer has given it a token."""

    node: str
    address: str
    pid: int
    memory_bytes: int
    free_bytes: int
    fragments: int
    claimed: bool


class PeerAgent:
    """Holds fragments of bundles in memory, and serves them to clients."""

    def __init__(self, memory_bytes: int):
        """Starts the server; it admits no client until it has a token."""
        os.nice(_NICE)
        self._memory_bytes = memory_bytes
        self._blobs = MemoryBlobs(memory_bytes)
        self._tokens = Tokens()
        self._server = NodeServer(
            self._blobs, bind=ray.util.get_node_ip_address(), tokens=self._tokens
        )
        self._holder: str | None = None

    def describe(self) -> bytes:
        """Returns a packed ``AgentState``."""
        count = len(self._blobs.keys("", after="", most=1 << 30))
        state = AgentState(
            node=protocol.node_id(),
            address=self._server.address,
            pid=os.getpid(),
            memory_bytes=self._memory_bytes,
            free_bytes=self._blobs.free_bytes,
            fragments=count,
            claimed=self._holder is not None,
        )
        return records.to_bytes(state, _MAGIC)

    def admit(self, holder: str, token: str, claims: bool) -> str:
        """Admits another token of a claim; revokes the tokens of other claims.

        A later claim has a greater ``holder``; ``claims`` if it just took over the directory.
        Returns the server's address; "" if another claim's tokens are valid.
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
        """Stops the server and drops everything it held."""
        self._server.close()
        self._blobs.close()


def peer_group(
    root: str | os.PathLike[str],
    item: str,
    how: Copies | Erasure,
    holder: str,
    *,
    earlier: PeerGroup | None = None,
) -> PeerGroup:
    """Starts missing peer agents of a directory, and registers a token with all of them.

    The newest claim fences earlier ones. The token of an ``earlier`` result under the same claim is
    reused for new nodes and restarted agents. The result holds only the agents that answered.
    """
    token = secrets.token_urlsafe(32) if earlier is None else earlier.token
    asked = {
        node: handle.admit.remote(holder, token, earlier is None)
        for node, handle in _started(root, item, how).items()
    }
    answers = _answers(asked, _START_SECS if earlier is None else _ANSWER_SECS)
    return _peer_group(root, item, how, token, answers)


def require_nodes(root: str | os.PathLike[str], item: str, how: Copies | Erasure) -> None:
    """Raises ``OptionError`` if too few peer agents answer; changes no agent's token."""
    asked = {node: one.describe.remote() for node, one in _started(root, item, how).items()}
    answers = _answers(asked, _START_SECS)
    _peer_group(root, item, how, "", dict.fromkeys(answers, "unused")).require_nodes()


def _started(root: str | os.PathLike[str], item: str, how: Copies | Erasure) -> dict[str, Any]:
    """Returns the agents on all living nodes; starts missing ones."""
    key = protocol.key(root, item)
    remote: Any = ray.remote
    actor = remote(PeerAgent)
    return {
        node: actor.options(
            **lifecycle.detached(agent_name(key, node), node, how.memory_bytes, soft=False),
            max_concurrency=2,
        ).remote(how.memory_bytes)
        for node in lifecycle.living_nodes()
    }


def _peer_group(
    root: str | os.PathLike[str],
    item: str,
    how: Copies | Erasure,
    token: str,
    addresses: dict[str, str],
) -> PeerGroup:
    racks = _racks()
    k, m = (how.k, how.m) if isinstance(how, Erasure) else (1, how.copies - 1)
    return PeerGroup(
        root=protocol.key(root, item),
        own=protocol.node_id(),
        token=token,
        nodes=tuple(
            PeerNode(node=node, address=address, rack=racks.get(node, ""))
            for node, address in addresses.items()
            if address
        ),
        k=k,
        m=m,
    )


def states(root: str | os.PathLike[str], item: str) -> dict[str, AgentState | None]:
    """Returns the states of a directory's peer agents by node; None without a valid answer."""
    lifecycle.living_nodes()
    found = _found(protocol.key(root, item))
    asked = {node: handle.describe.remote() for node, handle in found.items()}
    answers = _answers(asked, _ANSWER_SECS)
    return {node: _state(node, answers.get(node)) for node in sorted(found)}


def _state(node: str, answer: bytes | None) -> AgentState | None:
    """Returns an agent's state; None if it did not answer or has another version."""
    with contextlib.suppress(RestoreError):
        if answer is not None:
            return records.from_bytes(answer, AgentState, name=f"peer agent {node}", magic=_MAGIC)
    return None


def stop(root: str | os.PathLike[str], item: str) -> int:
    """Stops the peer agents of a directory, which lose what they hold; returns their number."""
    lifecycle.living_nodes()
    found = _found(protocol.key(root, item))
    _answers({node: handle.stop.remote() for node, handle in found.items()}, _ANSWER_SECS)
    for handle in found.values():
        ray.kill(handle, no_restart=True)
    return len(found)


def agent_name(key: str, node: str) -> str:
    """Returns the name of the actor that serves a directory on a node."""
    return f"{key}-peer-{node}"


def _found(key: str) -> dict[str, Any]:
    """Returns a directory's actors that Ray knows, by node."""
    found = {}
    prefix = agent_name(key, "")
    for name in protocol.listed():
        if name.startswith(prefix):
            with contextlib.suppress(ValueError):  # The actor has already exited.
                found[name.removeprefix(prefix)] = ray.get_actor(name, namespace=protocol.NAMESPACE)
    return found


def _answers(asked: dict[str, ray.ObjectRef[_T]], secs: float) -> dict[str, _T]:
    """Returns the answers that arrived in time, by node."""
    done, _ = (
        ray.wait([*asked.values()], num_returns=len(asked), timeout=secs) if asked else ([], 0)
    )
    answered = set(done)
    found = {}
    for node, reference in asked.items():
        if reference in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # The actor or its node died.
                found[node] = ray.get(reference)
    return found


def _racks() -> dict[str, str]:
    """Returns the failure domains of the nodes that have such a label."""
    found = {}
    for node in ray.nodes():
        labels = node.get("Labels") or {}
        rack = next((labels[name] for name in _RACK_LABELS if labels.get(name)), None)
        if rack is not None:
            found[node["NodeID"]] = rack
    return found
