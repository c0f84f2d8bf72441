# SPDX-License-Identifier: Apache-2.0
"""SIGKILL in jobs whose processes have their own staging directories, and in their uploaders.

Steps that every process waited for are at the root. The next job resumes from there or from staged
steps: on the same nodes, without some of them, or with another number of processes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import servers
from left_running import uploaders
from many import Job, Server
from test_bad_bundles import FILES, Bundle, bytes_of, name_of, pieces, remade, with_files

from deltackpt.errors import OutOfSpace
from deltackpt.ledger.opening import open_steps
from deltackpt.maintenance.verify import verify_root
from deltackpt.tiers.extent_store import ExtentFile

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

KILLS = 200
PEERS_SECS = 6.0
PLACE = {"mesh": [2, 2]}
EXTENTS = {"nbytes": 8 << 20, "extent_bytes": 128 << 10}


@pytest.fixture
def bucket(tmp_path):
    with servers.s3(tmp_path / "server") as running, servers.environment_of(running):
        yield running


@pytest.fixture
def server(bucket):
    found = Server(**bucket.environment)
    yield found
    found.close()


class Nodes:
    """Machines, each with a staging directory for each process that ran there."""

    def __init__(self, folder: Path, url: str, endpoint: str):
        self.folder, self.url, self.endpoint = folder, url, endpoint

    def node(self, number: int) -> Path:
        return self.folder / f"node{number}"

    def plant(self, draw: random.Random) -> int:
        """Puts a forged bundle into the extents of some nodes."""
        count = 0
        for place in sorted(self.extents.glob("process-*")):
            if draw.random() < 0.5:
                continue
            with contextlib.closing(ExtentFile(place, **EXTENTS)) as file:
                if not (labels := file.refs()):
                    continue
                body, _ = pieces(Bundle(labels[-1].key, bytes_of(file, labels[-1])))
                name = draw.choice(sorted(FILES))
                files, payload = FILES[name]
                body = with_files(body, files)
                print("bad bundle", place.name, name)
                with contextlib.suppress(OutOfSpace):
                    file.put(remade(body, payload, name_of(body).key))
                    count += 1
        return count

    @property
    def extents(self) -> Path:
        """The directory of the processes' extents, one folder each."""
        return self.folder / "extents"

    def open(self, job: Job) -> None:
        for number, process in enumerate(job.processes):
            tiers = {
                "staging_dir": str(self.node(number)),
                "endpoint": self.endpoint,
                "shared": False,
            }
            tiers["extents"] = {"directory": str(self.extents), **EXTENTS}
            process.ask("open", root=self.url, tiers=tiers, processes_secs=PEERS_SECS)
        for answer in job.answers():
            assert "error" not in answer and "ended" not in answer, answer

    def uploaders(self, number: int) -> list[int]:
        return uploaders(self.node(number) / f"process-{number}")

    def kill_uploaders(self, number: int) -> int:
        found = self.uploaders(number)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)


def test_kills_on_nodes_lose_no_step_that_all_processes_waited_for(
    server, bucket, tmp_path, campaign, figures
):
    draw, kills = campaign.random("nodes"), campaign.count(KILLS)
    nodes = Nodes(tmp_path, bucket.bucket("nodes") + "/run", bucket.endpoint)
    hits: collections.Counter[str] = collections.Counter()
    acked, step, saves, bundles = -1, -1, 0, 0
    while hits.total() < kills:
        bundles += nodes.plant(draw)
        count = draw.choice([2, 2, 2, 4])
        with Job(server, tmp_path / "jobs", processes=count, devices=4 // count) as job:
            nodes.open(job)
            found = job.all("restore_latest", place=PLACE, like=max(step, 0))
            steps = {answer["step"] for answer in found}
            assert len(steps) == 1, found
            newest = steps.pop()
            if newest is None:
                assert acked == -1
                job.all("start", place=PLACE)
                step = -1
            else:
                assert newest >= acked and all(answer["wrong"] is None for answer in found), (
                    found,
                    acked,
                )
                step = newest
            what = draw.choice(["process", "process", "uploader", "job", "everything"])
            at = time.monotonic() + draw.random() * 2.5
            while time.monotonic() < at:
                step += 1
                job.ask("train", to=step)
                job.ask("save")
                job.ask("wait")
                if what == "uploader" and draw.random() < 0.5:
                    hits["uploader"] += nodes.kill_uploaders(draw.randrange(count))
                if what != "uploader" and time.monotonic() + 0.3 * draw.random() > at:
                    break  # In the middle of a save.
                answers = [job.answers() for _ in range(3)]
                assert not any("error" in one or "ended" in one for each in answers for one in each)
                acked, saves = step, saves + 1
            time.sleep(draw.random() * 0.2)
            if what == "process":
                job.processes[draw.randrange(count)].kill()
                hits["process"] += 1
                time.sleep(draw.random() * 0.2)
            elif what != "uploader":
                for process in job.processes:
                    process.kill()
                hits["job"] += 1
            if what == "everything":
                for number in range(count):
                    hits["uploader"] += nodes.kill_uploaders(number)
        if draw.random() < 0.15:
            lost = draw.randrange(count)
            nodes.kill_uploaders(lost)
            shutil.rmtree(nodes.node(lost))
            hits["node"] += 1
    with Job(server, tmp_path / "jobs", processes=2, devices=2) as job:
        nodes.open(job)
        found = job.all("restore_latest", place=PLACE, like=max(step, 0))
        assert all(answer["wrong"] is None and answer["step"] >= acked for answer in found)
        job.all("train", to=step + 1)
        job.all("save")
        job.all("wait")
        job.close()
    assert step + 1 in open_steps(nodes.url, endpoint=nodes.endpoint).steps()
    assert verify_root(nodes.url, endpoint=nodes.endpoint).intact
    figures(
        "kills on nodes of a job",
        hits=dict(hits),
        saves={"waited for by all": saves},
        bad_bundles=bundles,
    )
