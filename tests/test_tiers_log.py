# SPDX-License-Identifier: Apache-2.0
"""The log between steps against buckets: what a lost node had logged is gone on from elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from test_tiers import (
    Breakable,
    Node,
    breakable,
    eventually,
    nodes,
    s3,
    same,
    server,
)
from test_tiers_trust import alone, promote

import deltackpt
from deltackpt import LogOptions
from deltackpt.errors import FencedError
from deltackpt.format import names
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.promoted_log import pieces_at
from deltackpt.reading.stretches import LogPoint, Logs
from deltackpt.storage import buckets
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import Spot, Unanswered
from deltackpt.tiers import log_promotion
from deltackpt.tiers.promotion import Promoter

__all__ = ["alone", "breakable", "s3", "server"]


class Logging(Node):
    """A node whose training logs."""

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        return super().manager(**{"log": LogOptions(), **options})

    def log(self, manager: deltackpt.CheckpointManager, *steps: int) -> None:
        for step in steps:
            self.train(step)
            found = manager.log(step, self.state, touched=self.touched)
            assert found.kind == "full", found
        manager.wait_logged()

    def place(self) -> Spot:
        return buckets.place(self.url, endpoint=self.endpoint).open()

    def journal(self) -> Journal:
        found = Journal(self.place())
        found.state()
        return found

    def points(self) -> list[LogPoint]:
        """What a reader of the root finds."""
        return Logs(open_steps(self.url, endpoint=self.endpoint).log_at).read().points()

    def newest(self) -> int:
        return max((point.step for point in self.points()), default=-1)

    @property
    def logged(self) -> Path:
        return self.stage.steps / names.LOG


def made(server: servers.Server, tmp_path: Path) -> Iterator[Logging]:
    for one in nodes(server, tmp_path):
        yield Logging(one.url, one.endpoint, one.stage.path)


@pytest.fixture
def node(s3, tmp_path):
    found = made(s3, tmp_path)
    return lambda: next(found)


# ---- a lost node


def test_an_empty_node_goes_on_from_the_newest_mark(server, tmp_path):
    found = made(server, tmp_path)
    first, second, third = next(found), next(found), next(found)
    with first.manager() as manager:
        first.save(manager, 0)
        first.log(manager, 1, 2, 3)
        first.save(manager, 4)
        first.log(manager, 5, 6, 7)
    eventually(lambda: first.newest() == 7, "the log at the root")
    shutil.rmtree(first.stage.path)
    with second.manager() as manager:
        restored = second.restore(manager)
        assert (restored.step, restored.chain[-1], restored.source[-1]) == (7, 4, "log")
        assert same(second.held(), first.held())
        second.log(manager, 8, 9)
        assert second.restore(manager).step == 9
        second.log(manager, 10)
    eventually(lambda: second.newest() == 10, "the log at the root")
    with third.manager() as manager:
        assert third.restore(manager).step == 10
        assert same(third.held(), second.held())
        assert [one.step for one in manager.points()] == [10, 9, 8, 7, 6, 5, 3, 2, 1]


def test_a_reader_of_the_root_restores_its_points(node):
    one = node()
    with one.manager() as manager:
        one.save(manager, 0)
        one.log(manager, 1, 2)
    eventually(lambda: one.newest() == 2, "the log at the root")
    reader = node()
    with reader.manager(access="read", log=None) as manager:
        assert reader.restore(manager).step == 2
        assert same(reader.held(), one.held())
        assert reader.restore(manager, 1).step == 1


def test_the_stage_has_more_of_a_stretch_than_the_root(node, alone):
    one = node()
    with one.manager(wait_for="stage") as manager:
        one.save(manager, 0)
        one.log(manager, 1)
    promote(one)
    with one.manager(wait_for="stage") as manager:
        one.restore(manager)
        one.log(manager, 2, 3)
    assert one.newest() == 1
    expected = one.held()
    with one.manager(wait_for="stage") as manager:
        assert one.restore(manager).step == 3
        assert same(one.held(), expected)
    promote(one)
    assert one.newest() == 3
