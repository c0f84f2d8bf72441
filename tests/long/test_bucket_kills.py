# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of trainers and uploaders of a bucket; nodes that are lost and return; two trainers."""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import servers
from left_running import kill_uploaders, uploaders

sys.path.insert(0, str(Path(__file__).parent))

import bucket_trainee
from bucket_trainee import HANDLERS, check, fresh

import deltackpt
from deltackpt.errors import StepGone, StorageError
from deltackpt.ledger.journal import Journal
from deltackpt.maintenance.verify import verify_root
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.storage import buckets

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

#: Kills at each server.
KILLS = 1000
SERVERS = ("s3", "gcs", "azure")
#: Guards against hangs only.
_PATIENCE_SECS = 120


class Field:
    """A remote directory, the nodes that train on it, and their journal."""

    def __init__(self, server: servers.Server, url: str, folder: Path, draw: Any):
        self.server, self.url, self.folder, self.draw = server, url, folder, draw
        self.journal = folder / "journal.jsonl"
        self.nodes = [folder / "node0"]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["bucket_trainee"])
        self._branch = 0
        #: How often the remote directory was emptied and made ready for another run.
        self.emptied = 0
        self.hits: collections.Counter[str] = collections.Counter()

    def start(self, node: Path, steps: int | None = None, *, may_empty: bool = False) -> Any:
        """Starts a trainer on a node; it may empty the remote directory."""
        self._branch += 1
        endpoint = self.server.endpoint
        environment = dict(self.server.environment)
        if self.server.scheme == "gs":
            environment["TENSORSTORE_GCS_HTTP_URL"] = endpoint
        process = self._context.Process(
            target=bucket_trainee.train,
            args=(
                *(self.url, endpoint, str(node), str(self.journal), environment),
                *(self._branch, self.draw.randrange(1 << 30), steps, may_empty),
            ),
        )
        process.start()
        return process

    def told(self) -> list[dict[str, Any]]:
        """Reads the trainers' journal; the last line of a killed trainer may be cut."""
        if not self.journal.exists():
            return []
        found = []
        for line in self.journal.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if isinstance(one, dict)]

    def put_stages_back(self) -> None:
        """Moves back the staging directories that killed trainers had moved."""
        for node in self.nodes:
            if (away := bucket_trainee.away_of(node)).exists():
                assert not node.exists(), [*node.rglob("*")]
                away.rename(node)
                self.hits["moved stage"] += 1

    def empties(self) -> int:
        """Counts how often a trainer began to empty the remote directory."""
        return sum(one["what"] == "empties" for one in self.told())

    def end_emptying(self) -> None:
        """Removes objects that were uploaded while a trainer emptied the remote directory."""
        if self.empties() == self.emptied:
            return
        for node in self.nodes:
            kill_uploaders(node)
        bucket_trainee.empty(self.url, self.server.endpoint)
        self.emptied += 1
        self.hits["emptied root"] += 1

    def reader(self) -> deltackpt.CheckpointManager:
        """Opens a reader of the remote directory without local tiers."""
        tiers = Tiers(endpoint=self.server.endpoint)
        return deltackpt.CheckpointManager(
            self.url, handlers=HANDLERS, options=ManagerOptions(access="read", tiers=tiers)
        )

    def newest(self) -> tuple[int, list[int]] | None:
        """Returns the newest remote step and its history, which its rows confirm."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # No step is skipped.
            with self.reader() as manager:
                found = manager.restore_latest(jax.eval_shape(fresh))
        return None if found is None else (found.step, check(found.state, found.step))

    def expected(self) -> list[int]:
        """Returns the history that must be remote: acknowledged and not rolled back since."""
        history: list[int] = []
        for one in self.told():
            if one["what"] == "acked":
                history = one["history"]
            elif one["what"] == "goes on" and one["back"]:
                common = [a for a, b in zip(history, one["history"], strict=False) if a == b]
                history = history[: len(common)]
            elif one["what"] == "empties":
                history = []
        return history


@pytest.fixture(params=SERVERS)
def field(request, tmp_path, campaign) -> Iterator[Field]:
    start = getattr(servers, request.param)
    with start(tmp_path / "server") as server, servers.environment_of(server):
        url = server.bucket("bucket") + "/run"
        found = Field(server, url, tmp_path, campaign.random("buckets", request.param))
        yield found
        for node in found.nodes:
            kill_uploaders(node)


def test_every_acknowledged_save_is_remote_after_any_kill(field, campaign, figures):
    draw, kills = field.draw, campaign.count(KILLS)
    stop, problems = threading.Event(), list[BaseException]()

    def watch() -> None:
        while not stop.wait(0.05):
            before = field.empties(), field.emptied
            try:
                field.newest()
            except (StepGone, StorageError):  # A trainer removed it, or none exists yet.
                pass
            except BaseException as error:
                if before[0] == before[1] and before == (field.empties(), field.emptied):
                    problems.append(error)
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    node = field.nodes[0]
    try:
        while field.hits.total() < kills and not problems:
            node = _next_node(field, node)
            has_rival = draw.random() < 0.1
            trainer, beside = field.start(node, may_empty=not has_rival), None
            if has_rival:
                field.nodes.append(field.folder / f"node{len(field.nodes)}")
                time.sleep(draw.random())
                beside = (field.nodes[-1], field.start(field.nodes[-1]))
            if draw.random() < 0.9:
                _await_open(field, (trainer,) if beside is None else (trainer, beside[1]))
            if draw.random() < 0.7:
                # So that even on a slow machine the kill falls into its saves.
                _await_saves(field, trainer, draw.randrange(1, 12))
            time.sleep(draw.random() * 0.7)
            what = draw.choice(["trainer", "uploader", "both", "both"])
            if what in ("uploader", "both") and kill_uploaders(node):
                field.hits["uploader"] += 1
            if what == "uploader":
                time.sleep(draw.random())
            for one in (trainer, beside[1] if beside else None):
                if one is not None and one.is_alive():
                    one.kill()
                    field.hits["trainer"] += 1
                if one is not None:
                    one.join()
                    assert one.exitcode in (-signal.SIGKILL, 0, 3, 4, 5, 6), (
                        one.exitcode,
                        field.told()[-3:],
                    )
            if what == "both":
                kill_uploaders(node)
            field.put_stages_back()
            field.end_emptying()
            if beside is not None:
                field.hits["two trainers"] += 1
                node = beside[0]
            _check(field)
    finally:
        stop.set()
        watcher.join()
    assert not problems, problems[0]
    _end(field, node)
    lines = collections.Counter(one["what"] for one in field.told())
    figures("bucket kills", hits=dict(field.hits), told=dict(lines))


def _await_open(field: Field, trainers: tuple[Any, ...]) -> None:
    """Waits until the trainers that were started last have opened the directory or ended."""
    branches = range(field._branch - len(trainers) + 1, field._branch + 1)
    deadline = time.monotonic() + _PATIENCE_SECS
    for branch, trainer in zip(branches, trainers, strict=True):
        while trainer.is_alive() and time.monotonic() < deadline:
            if any(one["branch"] == branch for one in field.told()):
                break
            time.sleep(0.02)


def _await_saves(field: Field, trainer: Any, count: int) -> None:
    """Waits for some more saves, or until a trainer has ended."""
    deadline, told = time.monotonic() + _PATIENCE_SECS, len(field.told())
    while trainer.is_alive() and time.monotonic() < deadline:
        if sum(one["what"] == "saved" for one in field.told()[told:]) >= count:
            return
        time.sleep(0.02)


def _next_node(field: Field, node: Path) -> Path:
    """Returns the same node, an empty one, or an old one with a stale staging directory."""
    drawn = field.draw.random()
    if drawn < 0.15:
        field.nodes.append(field.folder / f"node{len(field.nodes)}")
        field.hits["empty node"] += 1
        return field.nodes[-1]
    if drawn < 0.25:
        field.hits["old node"] += 1
        return field.draw.choice(field.nodes)
    return node


def _check(field: Field) -> None:
    """Asserts that every acknowledged save is remote unless it was rolled back."""
    expected = field.expected()
    if not expected:
        return
    newest = field.newest()
    assert newest is not None
    step, history = newest
    # Uploaders may still be running: the remote directory has this or more.
    assert history[: len(expected)] == expected, (step, history, expected, field.told()[-20:])


def _end(field: Field, node: Path) -> None:
    """Runs a last trainer; then no garbage is left and every uploader has ended."""
    last = field.start(node, steps=3)
    last.join(_PATIENCE_SECS)
    assert last.exitcode == 0, field.told()[-3:]
    deadline = time.monotonic() + _PATIENCE_SECS
    for one in field.nodes:
        while uploaders(one) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not uploaders(one), (one / "uploader.log").read_text()[-2000:]
    _check(field)
    assert verify_root(field.url, endpoint=field.server.endpoint).intact
    journal = Journal(buckets.locate(field.url, endpoint=field.server.endpoint).open())
    journal.claim()
    journal.sweep()
    named = journal.state().prefixes
    for key in (journal.root / "saves").keys():
        assert f"saves/{key.split('/')[0]}" in named, key
