# SPDX-License-Identifier: Apache-2.0
"""Peer addresses and credentials, passed from the trainer to its uploader process."""

from __future__ import annotations

import dataclasses

from deltackpt.errors import OptionError
from deltackpt.format import manifest

_MAGIC = "deltackpt.keepers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperNode:
    """A node that holds other nodes' fragments in its memory.

    Attributes:
      node: its name, which stays the same if its address changes.
      address: its server's address, "host:port".
      rack: its failure domain; "" if unknown.
    """

    node: str
    address: str
    rack: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keepers:
    """The peers of a node, how they store bundles, and the token that they accept.

    Attributes:
      root: prefix of all keys; one per checkpoint directory.
      own: this process's node, which stores no fragments of its own saves.
      token: the token that peer agents accept.
      nodes: all peer nodes, including ``own``.
      k: number of fragments that restore a bundle; 1 for copies.
      m: number of additional fragments.
      deadline_secs: deadline of each request in seconds.
    """

    root: str
    own: str
    token: str = dataclasses.field(repr=False)
    nodes: tuple[KeeperNode, ...]
    k: int
    m: int
    deadline_secs: float = 10.0

    @property
    def others(self) -> tuple[KeeperNode, ...]:
        """All nodes except ``own``."""
        return tuple(one for one in self.nodes if one.node != self.own)

    def require_nodes(self) -> None:
        """Checks that there are at least as many other nodes as fragments.

        Raises:
          OptionError: there are fewer.
        """
        found, needed = len(self.others), self.k + self.m
        if found < needed:
            how = f"Copies(copies={needed})" if self.k == 1 else f"Erasure(k={self.k}, m={self.m})"
            others = ", ".join(one.node for one in self.others) or "none"
            raise OptionError(
                f"Tiers.peers={how}: expected {needed} nodes besides this one, found {found} "
                f"({others}); add nodes, or request fewer fragments"
            )

    def to_bytes(self) -> bytes:
        """Serializes the record with its token; anyone who can read it can access the peers."""
        return manifest.to_bytes(self, _MAGIC)

    @classmethod
    def from_bytes(cls, data: bytes) -> Keepers:
        """Parses the result of ``to_bytes``.

        Raises:
          Damaged, FormatTooNew: the record is not readable.
        """
        return manifest.from_bytes(data, cls, name="neighbours.msgpack", magic=_MAGIC)
