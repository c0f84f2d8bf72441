# SPDX-License-Identifier: Apache-2.0
"""Nodes that hold bytes for others: the store over them, and what faults leave of it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_suite import StoreSuite

from deltackpt.nodes.directory import DirectoryShelf
from deltackpt.nodes.server import NodeServer
from deltackpt.nodes.shelves import MemoryShelf
from deltackpt.nodes.tokens import Tokens
from deltackpt.storage.nodes import Node, NodesStore

TOKEN = secrets.token_urlsafe(32)
#: Of a call that must be answered; never asserted on.
_PATIENCE_SECS = 60.0


@contextlib.contextmanager
def serving(shelf, **how) -> Iterator[NodeServer]:
    with contextlib.closing(shelf):
        how = {"bind": "127.0.0.1", "tokens": Tokens(TOKEN), **how}
        with contextlib.closing(NodeServer(shelf, **how)) as server:
            yield server


@contextlib.contextmanager
def client(server: NodeServer, token: str = TOKEN) -> Iterator[Node]:
    with contextlib.closing(Node(server.address, token, deadline_secs=_PATIENCE_SECS)) as node:
        yield node


@pytest.fixture(scope="class")
def addresses(request, tmp_path_factory) -> Iterator[list[str]]:
    """Of three nodes whose shelves are those of the test's class."""
    with contextlib.ExitStack() as stack:
        shelves = [request.cls.shelf(tmp_path_factory.mktemp("node")) for _ in range(3)]
        yield [stack.enter_context(serving(shelf)).address for shelf in shelves]


class NodesSuite(StoreSuite):
    """A store over three nodes; each empty one is a folder of its own."""

    @pytest.fixture
    def make(self, addresses):
        return lambda: NodesStore(addresses, secrets.token_hex(4), TOKEN)


class TestNodesOfMemory(NodesSuite):
    @staticmethod
    def shelf(folder: Path) -> MemoryShelf:
        return MemoryShelf(64 << 20)


class TestNodesOfDirectories(NodesSuite):
    @staticmethod
    def shelf(folder: Path) -> DirectoryShelf:
        return DirectoryShelf(folder)
