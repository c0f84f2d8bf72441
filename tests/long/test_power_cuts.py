# SPDX-License-Identifier: Apache-2.0
"""Power cuts at random moments: every save that was waited for must survive bit for bit.

The file system of a loop device (ext4 or XFS) is shut down by its own ioctl without a log flush,
unmounted, and mounted again, which replays the journal. Data, file names and renames survive only
if they were fsynced. It does not simulate the loss of a drive's volatile cache.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from harness import Expected
from machine import required
from many import Job
from test_processes import assert_read_alone, saved, started
from test_step_kills import assert_goes_on_alone

from deltackpt.reading import stored_saves
from deltackpt.storage import posix

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

CUTS = 500
#: More than a process can do before the cut.
DOINGS = 80
#: Cuts per directory: a longer history takes longer to replay.
LIVES = 40
#: FS_IOC_SHUTDOWN of ext4 and XFS, and its flag "do not flush the log".
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_IMAGE_BYTES = 400 << 20
_LONGEST_CUT_SECS = 1.0
CUTS_OF_TWO = 100
#: Points at which a process is delayed while the other one does its part.
LATE = (
    ("before its shard", "waiting for the shards"),
    ("before its shard", "during its shard", "before its manifest", "before its word"),
)
#: Maximum time for the rest of the step after the release.
_LONGEST_COMMIT_SECS = 0.2


@dataclasses.dataclass
class Disk:
    """A file system on a loop device."""

    device: str
    mount: Path
    kind: str

    def cut(self) -> None:
        """Cuts the power."""
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Restores the power, which replays the journal."""
        _run("umount", str(self.mount))
        _run("mount", self.device, str(self.mount))


KINDS = [
    pytest.param(kind, marks=pytest.mark.xdist_group(f"power cuts {kind}"))
    for kind in ("ext4", "xfs")
]


@pytest.fixture(params=KINDS)
def disk(request, tmp_path) -> Iterator[Disk]:
    """A new file system."""
    required(os.geteuid() == 0, "cutting the power of a loop device needs root")
    for tool in ("losetup", "mount", "umount", f"mkfs.{request.param}"):
        required(shutil.which(tool) is not None, f"{tool} is needed to make a file system")
    image, mount = tmp_path / "disk.img", tmp_path / "mount"
    with open(image, "wb") as file:
        file.truncate(_IMAGE_BYTES)
    mount.mkdir()
    device = ""
    try:
        device = _run("losetup", "--find", "--show", str(image)).strip()
    except subprocess.CalledProcessError as error:
        required(False, f"a loop device is needed: {error.stderr.strip()}")
    with contextlib.ExitStack() as undo:
        undo.callback(_run, "losetup", "--detach", device)
        _run(f"mkfs.{request.param}", "-q", device)
        _run("mount", device, str(mount))
        undo.callback(_run, "umount", str(mount))
        yield Disk(device, mount, request.param)


def test_an_fsync_after_the_disk_is_lost_raises(disk):
    (disk.mount / "folder" / "old").mkdir(parents=True)
    posix.fsync_tree(disk.mount)
    with contextlib.ExitStack() as undo:
        descriptors = [os.open(path, os.O_RDONLY) for path in (disk.mount, disk.mount / "folder")]
        for descriptor in descriptors:
            undo.callback(os.close, descriptor)
        os.rename(disk.mount / "folder" / "old", disk.mount / "new")
        disk.cut()
        for descriptor in descriptors:
            with pytest.raises(OSError):
                posix.fsync(descriptor)
    with pytest.raises(OSError):
        posix.fsync_path(disk.mount)
    disk.restart()
    assert (disk.mount / "folder" / "old").is_dir() and not (disk.mount / "new").exists()


def test_a_step_that_was_waited_for_survives_a_power_cut(
    trainees, disk, tmp_path, campaign, figures
):
    random_ = campaign.random("power cuts", disk.kind)
    phases: collections.Counter[str] = collections.Counter()
    cuts = in_flight = restores = 0
    root, expected = disk.mount / "root", Expected()
    outside = harness.Outside(tmp_path / "outside")
    while cuts < campaign.count(CUTS) / len(KINDS):
        if cuts % LIVES == 0:
            shutil.rmtree(root, ignore_errors=True)
            root, expected = disk.mount / f"root{cuts}", Expected()
        cuts += 1
        outside.plant(random_, root)
        standing, compared = harness.newest(root), expected.restored
        life = harness.draw_life(random_, cuts % LIVES + 1, DOINGS)
        running = trainees.start("train", root, **life)
        ended = running.end(
            "begun",
            random_.uniform(0, _LONGEST_CUT_SECS),
            lambda killed=running: (disk.cut(), killed.kill()),
        )
        with harness.telling(root, life):
            assert ended.noted("ready"), (ended.notes, trainees.diagnosis())
            expected.check(ended, standing)
        restores += expected.restored - compared
        begun, waited = ended.last("saving", "step"), expected.waited_for
        in_flight += begun is not None and begun > waited
        disk.restart()
        if ended.calls:
            phases[harness.phase(*ended.calls[max(ended.calls)])] += 1
        with harness.telling(root, life):
            harness.put_back(root, ended)
            outside.check()
            assert harness.newest(root) >= waited, _told(root, ended, expected)
            _check_with_stock_orbax(root, harness.newest(root))
    figures(
        f"power cuts of {disk.kind}",
        cuts=cuts,
        with_a_save_in_flight=in_flight,
        restores=restores,
        phase=dict(phases),
    )


@pytest.mark.parametrize("late", [0, 1])
def test_a_step_of_two_processes_survives_a_power_cut_if_one_is_late(
    server, disk, tmp_path, campaign, figures, late
):
    """Each process fsyncs its files before it reports; process 0 fsyncs only names, and commits."""
    random_ = campaign.random("power cuts of two", disk.kind, late)
    outcomes: collections.Counter[str] = collections.Counter()
    for cut in range(campaign.count(CUTS_OF_TWO)):
        root = disk.mount / f"root{cut}"
        moment = random_.choice(LATE[late])
        # Half of the cuts come right after both processes report the commit.
        after_release_secs = None if cut % 2 == 0 else random_.uniform(0, _LONGEST_COMMIT_SECS)
        with Job(server, tmp_path / "jobs", processes=2, devices=1, apart=True) as job:
            started(job, root, {"mesh": [2, 1]})
            saved(job, 0)
            saved(job, 1)
            job.all("train", to=2)
            job.processes[late].ask("arm", at=moment, action="hold")
            assert "error" not in job.processes[late].answer()
            job.all("save")
            job.ask("wait")
            job.processes[late].wait_reached(moment)
            job.release()
            if after_release_secs is None:
                assert not any("error" in answer for answer in job.answers())
            else:
                time.sleep(after_release_secs)
            disk.cut()
        disk.restart()
        standing = harness.steps_in(root)
        expected = [[0, 1, 2]] if after_release_secs is None else [[0, 1], [0, 1, 2]]
        assert standing in expected, (standing, moment, after_release_secs)
        for step in standing:
            assert_read_alone(root, step)
        assert_goes_on_alone(root)
        shutil.rmtree(root)
        outcomes["with it" if 2 in standing else "without the step in flight"] += 1
    figures(f"power cuts of two processes, {disk.kind}", cuts=outcomes.total(), left=dict(outcomes))


def _told(root: Path, ended: harness.Ended, expected: Expected) -> str:
    """Formats the remaining files and the last calls of the trainer."""
    left = sorted(str(path.relative_to(root)) for path in root.glob("*/*/*") if path.is_dir())
    calls = [f"{number} {' '.join(call)}" for number, call in sorted(ended.calls.items())[-60:]]
    pieces = [harness.steps_in(root), left, vars(expected), *ended.notes[-12:], *calls]
    return "\n".join(map(str, pieces))


def _check_with_stock_orbax(root: Path, step: int) -> None:
    """Checks that stock Orbax reads the dense leaves and metadata of the newest step."""
    if step == 0:
        return
    if stored_saves.read_save(root / str(step)).head.dense_blocks is not None:
        # Stock Orbax cannot read blocks; the next trainer compares them.
        return
    import orbax.checkpoint as ocp
    import trainee

    with ocp.CheckpointManager(
        root, item_names=("dense",), options=ocp.CheckpointManagerOptions(read_only=True)
    ) as manager:
        assert manager.latest_step() == step
        assert manager.metadata(step) is not None
        found = manager.restore(step, args=ocp.args.Composite(dense=ocp.args.StandardRestore()))
    expected = trainee.Replay().at(trainee.history_of(found.dense))
    assert found.dense["dense"]["bias"].tobytes() == expected["dense"]["bias"].tobytes()
    assert found.dense["dense"]["kernel"].tobytes() == expected["dense"]["kernel"].tobytes()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
