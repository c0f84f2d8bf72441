# SPDX-License-Identifier: Apache-2.0
"""Which nodes hold a key, without anybody who knows: rendezvous hashing.

Each node draws a number from the key and its own name, and the greatest are the holders. Where a
node comes or goes, only its own keys move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def ranked(key: str, nodes: Sequence[str], *, racks: Mapping[str, str] | None = None) -> list[str]:
    """All nodes, those first that are to hold a key; whoever asks gets the same order.

    Args:
      key: what is held.
      nodes: their names, in any order.
      racks: where nodes stand, of those of which it is known: no rack has a second node in the
        order before every rack has had one.
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
