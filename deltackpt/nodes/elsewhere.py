# SPDX-License-Identifier: Apache-2.0
"""Forwards reads to the other nodes of a store, for clients that know only one address.

TensorStore's ``http`` driver has a single base URL. The node at that address therefore also serves
the objects of the other nodes, through a buffer of one piece.
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
          addresses: addresses of all nodes, as in the URL of the store.
          token: what they let in.

        Raises:
          OptionError: an address is invalid.
        """
        self._nodes = {
            address: Node(address, token, deadline_secs=_DEADLINE_SECS) for address in addresses
        }

    def find(self, key: str, own: str) -> Held:
        """Opens an object that another node holds.

        Args:
          key: key of the object.
          own: the node that does not have it.

        Raises:
          Missing: it does not exist, or belongs to that node itself.
          Refused, Unanswered: the other node refused the request, or did not answer.
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
    """See ``Held``; if the object is replaced during the answer, the answer ends early."""

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
            raise OSError(f"{self._key}: the object was replaced while it was sent")
        connection.sendall(piece)
        return nbytes

    def close(self) -> None:
        """See ``Held``: nothing is held."""
