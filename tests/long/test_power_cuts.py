# SPDX-License-Identifier: Apache-2.0
"""Power cuts at random moments: what ``wait()`` has promised is there, exactly.

A loop device with ext4 or XFS is cut off by the file system's own shutdown, without a flush of
its log, unmounted, and mounted again, which replays the journal. That tells what was forced to
disk from what was only written: data, file names and renames alike. It does not lose what a
drive's own volatile cache would lose after a flush.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from harness import Ended, Trainees

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

CUTS = 30
#: More than a process gets to before its cut.
SAVES = 60
#: FS_IOC_SHUTDOWN of ext4 and XFS, and its flag "do not flush the log".
_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_IMAGE_BYTES = 400 << 20
_LONGEST_CUT_SECS = 1.5


@dataclasses.dataclass
class Disk:
    """A file system on a loop device."""

    device: str
    mount: Path

    def cut(self) -> None:
        """The power goes."""
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """The power is back: the journal is replayed."""
        _run("umount", str(self.mount))
        _run("mount", self.device, str(self.mount))


@pytest.fixture(params=["ext4", "xfs"])
def disk(request, tmp_path) -> Iterator[Disk]:
    """A fresh file system of either kind."""
    if os.geteuid() != 0:
        pytest.skip("cutting the power of a loop device needs root")
    for tool in ("losetup", "mount", "umount", f"mkfs.{request.param}"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    image, mount = tmp_path / "disk.img", tmp_path / "mount"
    with open(image, "wb") as file:
        file.truncate(_IMAGE_BYTES)
    mount.mkdir()
    try:
        device = _run("losetup", "--find", "--show", str(image)).strip()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device: {error.stderr.strip()}")
    with contextlib.ExitStack() as undo:
        undo.callback(_run, "losetup", "--detach", device)
        _run(f"mkfs.{request.param}", "-q", device)
        _run("mount", device, str(mount))
        undo.callback(_run, "umount", str(mount))
        yield Disk(device, mount)


def train_and_cut(trainees: Trainees, disk: Disk, root: Path, secs: float, **what) -> Ended:
    """Trains, and cuts the power some time after the first save began."""
    running = trainees.start("train", root, saves=SAVES, **what)
    timer = threading.Timer(secs, lambda: (disk.cut(), running.kill()))
    armed = False
    for note in running:
        if note["note"] == "begun" and not armed:
            timer.start()
            armed = True
    if armed:
        timer.join()
    return running.ended()


def test_a_step_that_was_waited_for_survives_a_power_cut(trainees, disk, tmp_path, record):
    random_ = random.Random(1)
    root = disk.mount / "root"
    phases: collections.Counter[str] = collections.Counter()
    waited_for = cuts = in_flight = 0
    while cuts < CUTS:
        secs = random_.uniform(0, _LONGEST_CUT_SECS)
        ended = train_and_cut(trainees, disk, root, secs, wait_every=random_.choice((1, 2, 3)))
        _check_start(ended, waited_for, trainees)
        waited_for = max(waited_for, ended.last("committed", "step") or 0)
        in_flight += (ended.last("begun", "step") or 0) > waited_for
        cuts += 1
        disk.restart()
        if ended.calls:
            phases[harness.phase(*ended.calls[max(ended.calls)])] += 1
        assert harness.newest(root) >= waited_for, (harness.steps_in(root), waited_for)
        _check_with_stock_orbax(root, harness.newest(root))
    ended = trainees.run("train", root, saves=SAVES)
    assert ended.status == 0, trainees.diagnosis()
    _check_start(ended, waited_for, trainees)
    kind = _run("findmnt", "--noheadings", "--output", "FSTYPE", str(disk.mount)).strip()
    record(
        f"{kind}: {cuts} power cuts, {in_flight} with a save in flight, up to step "
        f"{waited_for}: every step that was waited for restored exactly; cut in"
    )
    for name, count in phases.most_common():
        record(f"  {name:40s} {count:4d}")


def _check_start(ended: Ended, waited_for: int, trainees: Trainees) -> None:
    """The process that starts after a cut restores the newest step, exactly."""
    [ready] = ended.noted("ready") or [None]
    assert ready is not None, (ended.notes, trainees.diagnosis())
    assert ready["wrong"] is None, ready
    assert ready["step"] >= waited_for, (ready, waited_for)
    assert ready["skipped"] == 0, ready


def _check_with_stock_orbax(root: Path, step: int) -> None:
    """Dense leaves and Orbax's own metadata of the newest step, read by stock Orbax."""
    if step == 0:
        return
    import orbax.checkpoint as ocp
    import trainee

    with ocp.CheckpointManager(
        root, item_names=("dense",), options=ocp.CheckpointManagerOptions(read_only=True)
    ) as manager:
        assert manager.latest_step() == step
        assert manager.metadata(step) is not None
        found = manager.restore(step, args=ocp.args.Composite(dense=ocp.args.StandardRestore()))
    expected = trainee.Replay().at(step)
    assert found.dense["dense"]["bias"].tobytes() == expected["dense"]["bias"].tobytes()
    assert found.dense["dense"]["kernel"].tobytes() == expected["dense"]["kernel"].tobytes()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
