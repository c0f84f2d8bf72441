# SPDX-License-Identifier: Apache-2.0
"""Where neighbours are and what lets in there: what a trainer tells its promoter of them."""

from __future__ import annotations

import dataclasses

from deltackpt.errors import OptionError
from deltackpt.format import manifest

_MAGIC = "deltackpt.keepers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeeperNode:
    """A node that holds fragments of others in its memory.

    Attributes:
      node: its name, which it keeps while its address changes.
      address: of its server, "host:port".
      rack: where it stands; "" where that is not known.
    """

    node: str
    address: str
    rack: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keepers:
    """Where neighbours are, how they hold packs, and what lets in there.

    Attributes:
      root: what all keys begin with; of one root.
      own: the node that this process is on, which holds nothing of its own.
      token: what keepers let in.
      nodes: all of them.
      k: fragments that any so many give a pack back; 1 for copies.
      m: further ones.
      deadline_secs: of each question.
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
        """The nodes but one's own."""
        return tuple(one for one in self.nodes if one.node != self.own)

    def require_nodes(self) -> None:
        """Checks that there are as many other nodes as fragments.

        Raises:
          OptionError: there are fewer.
        """
        found, needed = len(self.others), self.k + self.m
        if found < needed:
            how = f"Copies(copies={needed})" if self.k == 1 else f"Erasure(k={self.k}, m={self.m})"
            others = ", ".join(one.node for one in self.others) or "none"
            raise OptionError(
                f"Tiers.neighbours={how}: expected {needed} nodes beside one's own, found {found} "
                f"({others}); add nodes, or ask for less"
            )

    def to_bytes(self) -> bytes:
        """As a record, which whoever reads it is let in with."""
        return manifest.to_bytes(self, _MAGIC)

    @classmethod
    def from_bytes(cls, data: bytes) -> Keepers:
        """What ``to_bytes`` gave.

        Raises:
          Damaged, FormatTooNew: it is something else.
        """
        return manifest.from_bytes(data, cls, name="neighbours.msgpack", magic=_MAGIC)
