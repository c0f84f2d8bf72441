# SPDX-License-Identifier: Apache-2.0
"""Kills a clustering that saves at every iteration with SIGKILL, at any moment.

A restart finds the state of an acknowledged iteration or a later one, bit for bit equal to that of
an uninterrupted run. The staging directory in memory is kept, or removed as on a node restart, so
that only the extents are left.
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from left_running import kill_uploaders

from deltackpt.testing import node_process

sys.path.insert(0, str(Path(__file__).parent))

import kmeans_trainee

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

#: Kills for each way to restart.
KILLS = 100
#: Then a clustering starts over, so that first saves are hit, too.
LIVES = 5
ITERATIONS = 400
_LONGEST_SECS = 0.6
#: A timeout; no test asserts on it.
_PATIENCE_SECS = 120
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["kmeans_trainee"])


class Place:
    """One clustering: where it saves, and its journal."""

    def __init__(self, url: str, stage: Path, folder: Path, token: str, *, promotes: bool):
        self._url, self.stage, self._folder = url, stage, folder
        self._environment = {"DELTACKPT_NODES_TOKEN": token, "JAX_PLATFORMS": "cpu"}
        self._promotes = promotes
        self._journal = folder / "journal.jsonl"
        folder.mkdir()

    def start(self, seed: int, iterations: int = ITERATIONS) -> Any:
        """Starts or restarts it."""
        process = _CONTEXT.Process(
            target=kmeans_trainee.cluster,
            args=(
                *(self._url, str(self.stage), str(self._folder / "extents"), str(self._journal)),
                *(self._environment, seed, iterations, self._promotes),
            ),
        )
        process.start()
        return process

    def told(self) -> list[dict[str, Any]]:
        """The journal of all its lives; the last line of each may be torn."""
        found = []
        if self._journal.exists():
            for line in self._journal.read_bytes().split(b"\n"):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def kill_uploaders(self) -> None:
        """Kills the uploaders of its staging directory."""
        kill_uploaders(self.stage)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[dict[str, int]]:
    """Digests after each iteration of an uninterrupted clustering."""
    path = tmp_path_factory.mktemp("reference") / "digests.json"
    process = _CONTEXT.Process(target=kmeans_trainee.reference, args=(str(path), ITERATIONS))
    process.start()
    process.join()
    return json.loads(path.read_text())


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(prefix="kmeans-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("stage", ["kept", "removed"])
def test_killed_at_any_moment_it_resumes_from_what_was_acknowledged(
    stage, tmp_path, in_memory, expected, campaign, figures
):
    draw, kills = campaign.random("k-means kills", stage), campaign.count(KILLS)
    phases: collections.Counter[str] = collections.Counter()
    token, restored, farthest = secrets.token_urlsafe(32), 0, 0
    with node_process(token, "--memory", "1GiB") as root, contextlib.ExitStack() as stack:
        for kill in range(kills):
            if kill % LIVES == 0:
                place = Place(
                    f"nodes://{root.address}/run{kill}",
                    in_memory / str(kill),
                    tmp_path / str(kill),
                    token,
                    promotes=stage == "kept",
                )
                stack.callback(place.kill_uploaders)
            before = len(place.told())
            process = place.start(draw.randrange(1 << 30))
            if draw.random() < 0.9:
                # Kill it during its saves, even on a slow machine.
                _await(place, process, "saving", draw.randrange(1, 12), before)
            time.sleep(draw.uniform(0, _LONGEST_SECS))
            process.kill()
            process.join()
            assert process.exitcode in (-signal.SIGKILL, 0), place.told()[-3:]
            if stage == "removed":
                place.kill_uploaders()
                shutil.rmtree(place.stage, ignore_errors=True)
            phases[place.told()[-1]["what"] if len(place.told()) > before else "starting"] += 1
            if kill % LIVES == LIVES - 1 or kill == kills - 1:
                last = place.start(0, iterations=0)
                last.join(_PATIENCE_SECS)
                assert last.exitcode == 0, place.told()[-3:]
                found, reached = _check(place.told(), expected, stage)
                restored, farthest = restored + found, max(farthest, reached)
    assert restored and farthest > 1
    figures(f"k-means, stage {stage}", kills=kills, restored=restored, phase=dict(phases))


def _await(place: Place, process: Any, what: str, times: int, before: int) -> None:
    """Waits until it has journaled an event that often, or has ended."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while process.is_alive() and time.monotonic() < deadline:
        if sum(one["what"] == what for one in place.told()[before:]) >= times:
            return
        time.sleep(0.01)


def _check(
    told: list[dict[str, Any]], expected: list[dict[str, int]], stage: str
) -> tuple[int, int]:
    """Checks the state at each start; returns the number of restores and the last iteration."""
    held = begun = restored = 0
    for one in told:
        if one["what"] == "ready":
            iteration = one["iteration"]
            assert held <= iteration <= begun, (one, held, begun)
            assert one["digests"] == expected[iteration], one
            if iteration:
                restored += 1
                where = {"extents"} if stage == "removed" else {"staging"}
                assert {*one["source"]} <= where, one
            # An iteration that was not acknowledged may be lost and repeated.
            held = begun = iteration
        elif one["what"] == "saving":
            begun = one["iteration"]
        elif one["what"] == "held":
            held = one["iteration"]
    return restored, held
