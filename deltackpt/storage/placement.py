# SPDX-License-Identifier: Apache-2.0
"""Rendezvous hashing: which nodes hold a key, without a coordinator.

Each node's score is a hash of the key and its name; the nodes with the greatest scores hold the
key. When a node joins or leaves, only its own keys move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def ranked(key: str, nodes: Sequence[str], *, racks: Mapping[str, str] | None = None) -> list[str]:
    """Returns all nodes in order of preference for a key; the same for every caller.

    Args:
      key: the key.
      nodes: their names, in any order.
      racks: failure domains of nodes, if known: each domain appears once in the order before any
        appears twice.
    """
    drawn = sorted(nodes, key=lambda node: _drawn(key, node), reverse=True)
    before: dict[str, int] = {}
    rounds = []
    for node in drawn:
        rack = (racks or {}).get(node, node)
        rounds.append(before.get(rack, 0))
        before[rack] = rounds[-1] + 1
    return [drawn[i] for i in sorted(range(len(drawn)), key=rounds.__getitem__)]


def _drawn(key: str, node: str) -> bytes:
    return hashlib.blake2b(f"{node}\n{key}".encode(), digest_size=16).digest()
