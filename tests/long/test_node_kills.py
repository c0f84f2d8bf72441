# SPDX-License-Identifier: Apache-2.0
"""SIGKILL in jobs whose processes have their own staging directories, and in their uploaders.

Steps that every process waited for are at the root. The next job resumes from there or from staged
steps: on the same nodes, without some of them, or with another number of processes. Some jobs first
resume from an earlier step, which rolls the later ones back.
"""

from __future__ import annotations

import collections
import contextlib
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import servers
from left_running import kill_uploaders
from many import Job, Server
from test_bad_bundles import FILES, Bundle, bytes_of, name_of, pieces, remade, with_files

from deltackpt.errors import OutOfSpace
from deltackpt.ledger.opening import open_steps
from deltackpt.maintenance.verify import verify_root
from deltackpt.tiers.extent_store import ExtentFile

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

KILLS = 200
PEERS_SECS = 60.0
#: The mesh of a job, by its number of processes.
MESHES = {1: [2, 2], 2: [2, 2], 3: [3, 1], 4: [2, 2]}
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

    def extents(self, number: int) -> Path:
        """The directory of a node's extents, one folder for each process that ran there."""
        return self.folder / f"extents{number}"

    def plant(self, draw: random.Random) -> int:
        """Puts a forged bundle into the extents of some nodes."""
        count = 0
        for place in sorted(self.folder.glob("extents*/process-*")):
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

    def open(self, job: Job, at: Sequence[int], **options: Any) -> None:
        """Opens a manager in each process, on the node that ``at`` has for it."""
        for process, number in zip(job.processes, at):
            tiers = {
                "staging_dir": str(self.node(number)),
                "endpoint": self.endpoint,
                "shared": False,
                "extents": {"directory": str(self.extents(number)), **EXTENTS},
            }
            process.ask("open", root=self.url, tiers=tiers, processes_secs=PEERS_SECS, **options)
        for answer in job.answers():
            assert "error" not in answer and "ended" not in answer, answer

    def lose(self, number: int, *, disk: bool) -> None:
        """Restarts a node with an empty staging directory, or also loses its ``disk``."""
        self.kill_uploaders(number)
        shutil.rmtree(self.node(number), ignore_errors=True)
        if disk:
            shutil.rmtree(self.extents(number), ignore_errors=True)

    def kill_uploaders(self, number: int) -> int:
        return sum(map(kill_uploaders, self.node(number).glob("process-*")))


def test_kills_on_nodes_lose_no_step_that_all_processes_waited_for(
    server, bucket, tmp_path, campaign, figures
):
    draw, kills = campaign.random("nodes"), campaign.count(KILLS)
    nodes = Nodes(tmp_path, bucket.bucket("nodes") + "/run", bucket.endpoint)
    hits: collections.Counter[str] = collections.Counter()
    #: The newest step that all processes waited for, and the newest that a restore may find.
    acked, newest = -1, -1
    saves, bundles = 0, 0
    while hits.total() < kills:
        bundles += nodes.plant(draw)
        count = draw.choice([1, 2, 2, 2, 3, 4])
        place = {"mesh": MESHES[count]}
        # Most starts keep each process on its node.
        at = [*range(count)] if draw.random() < 0.7 else draw.sample(range(5), count)
        with Job(server, tmp_path / "jobs", processes=count, devices=max(1, 4 // count)) as job:
            nodes.open(job, at, max_to_keep=draw.choice([None, None, 2, 4]))
            found = job.all("restore_latest", place=place, like=max(newest, 0))
            [step] = {answer["step"] for answer in found}
            if step is None:
                assert acked == -1
                job.all("start", place=place)
                step = -1
            else:
                assert acked <= step <= newest, (found, acked, newest)
                assert all(answer["wrong"] is None for answer in found), found
                if draw.random() < 0.3:
                    step = draw.choice(job.one("steps")["steps"])
                    found = job.all("restore", step=step, place=place)
                    assert all(answer["wrong"] is None for answer in found), found
            what = draw.choice(["process", "process", "uploader", "job", "everything"])
            until = time.monotonic() + draw.random() * 2.5
            while time.monotonic() < until:
                acked = min(acked, step)  # The first save rolls later steps back.
                step += 1
                newest = max(newest, step)
                job.ask("train", to=step)
                job.ask("save")
                job.ask("wait")
                if what == "uploader" and draw.random() < 0.5:
                    hits["uploader"] += nodes.kill_uploaders(draw.choice(at))
                if what != "uploader" and time.monotonic() + 0.3 * draw.random() > until:
                    break  # In the middle of a save.
                answers = [job.answers() for _ in range(3)]
                assert not any("error" in one or "ended" in one for each in answers for one in each)
                acked, newest, saves = step, step, saves + 1
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
                for number in at:
                    hits["uploader"] += nodes.kill_uploaders(number)
        if draw.random() < 0.2:
            nodes.lose(draw.choice(at), disk=draw.random() < 0.5)
            hits["node"] += 1
    with Job(server, tmp_path / "jobs", processes=2, devices=2) as job:
        nodes.open(job, range(2))
        found = job.all("restore_latest", place={"mesh": MESHES[2]}, like=max(newest, 0))
        assert all(answer["wrong"] is None and answer["step"] >= acked for answer in found)
        job.all("train", to=newest + 1)
        job.all("save")
        job.all("wait")
        job.close()
    assert newest + 1 in open_steps(nodes.url, endpoint=nodes.endpoint).steps()
    assert verify_root(nodes.url, endpoint=nodes.endpoint).intact
    figures(
        "kills on nodes of a job",
        hits=dict(hits),
        saves={"waited for by all": saves},
        bad_bundles=bundles,
    )
