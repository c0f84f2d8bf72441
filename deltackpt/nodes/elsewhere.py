# SPDX-License-Identifier: Apache-2.0
"""What another node of the same store holds, for clients that know one address only.

TensorStore's ``http`` driver has one base URL: whichever node it is that of hands out what the node
holds that the key belongs to. Bytes go through a buffer of one piece.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from deltackpt.nodes.shelves import Held
from deltackpt.storage.nodes import Node
from deltackpt.storage.placement import ranked
from deltackpt.storage.store import Missing

_PIECE_BYTES = 1 << 20
_DEADLINE_SECS = 15.0


class Elsewhere:
    """The objects of the other nodes of a store; thread-safe."""

    def __init__(self, addresses: Sequence[str], token: str):
        """Asks nothing yet.

        Args:
          addresses: of all nodes, as the URL of the store names them.
          token: what they let in.

        Raises:
          OptionError: one is none.
        """
        self._nodes = {
            address: Node(address, token, deadline_secs=_DEADLINE_SECS) for address in addresses
        }

    def find(self, key: str, own: str) -> Held:
        """Opens an object of another node.

        Args:
          key: of it.
          own: the node that does not have it.

        Raises:
          Missing: there is none, or it would be that node's own.
          Refused, Unanswered: the other node does not give it.
        """
        owner = ranked(key, [*self._nodes])[0]
        if owner == own:
            raise Missing(key)
        return _Forwarded(self._nodes[owner], key)

    def close(self) -> None:
        """Closes the connections to the other nodes."""
        for node in self._nodes.values():
            node.close()


class _Forwarded:
    """See ``Held``; one that is replaced meanwhile ends the answer, as it may be of both."""

    def __init__(self, node: Node, key: str):
        self._node, self._key = node, key
        self.nbytes, self.version = node.length_and_version(key)
        self._buffer = bytearray()

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """See ``Held``."""
        nbytes = min(nbytes, _PIECE_BYTES)
        if not self._buffer:
            self._buffer = bytearray(min(self.nbytes, _PIECE_BYTES))
        piece = memoryview(self._buffer)[:nbytes]
        self._node.read_into(self._key, start, [piece])
        if self._node.version(self._key) != self.version:
            raise OSError(f"{self._key}: it was replaced while it was sent")
        connection.sendall(piece)
        return nbytes

    def close(self) -> None:
        """See ``Held``: nothing is held."""
