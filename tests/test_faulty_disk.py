# SPDX-License-Identifier: Apache-2.0
"""``testing.Disk`` injects the faults of its rules, and none after it is closed."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from deltackpt.testing import Disk


def written(path, data=b"12345678"):
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        return os.write(descriptor, data)
    finally:
        os.fsync(descriptor)
        os.close(descriptor)


def test_calls_are_recorded_in_order_with_their_paths(disk, tmp_path):
    written(tmp_path / "a")
    (tmp_path / "b").mkdir()
    os.replace(tmp_path / "a", tmp_path / "b" / "a")
    os.truncate(tmp_path / "b" / "a", 2)
    (tmp_path / "b" / "a").read_bytes()
    (tmp_path / "b" / "a").unlink()
    folder = os.open(tmp_path, os.O_RDONLY)
    os.rmdir("b", dir_fd=folder)
    os.fdatasync(folder)
    os.close(folder)
    names = [(call.name, call.path[len(str(tmp_path)) :]) for call in disk.calls]
    assert names == [
        ("open", "/a"),
        ("write", "/a"),
        ("fsync", "/a"),
        ("mkdir", "/b"),
        ("rename", "/b/a"),
        ("truncate", "/b/a"),
        ("remove", "/b/a"),
        ("rmdir", "/b"),
        ("fdatasync", ""),
    ]


def test_a_rule_honors_after_and_times(disk, tmp_path):
    disk.fail("write", r"^a\d$", errno=errno.ENOSPC, after=1, times=2)
    results = []
    for number in range(5):
        try:
            results.append(written(tmp_path / f"a{number}"))
        except OSError as error:
            results.append(error.errno)
        written(tmp_path / f"b{number}")
    assert results == [8, errno.ENOSPC, errno.ENOSPC, 8, 8]
    assert [call.path for call in disk.failures] == [f"{tmp_path}/a1", f"{tmp_path}/a2"]
    disk.fail("fsync", times=None)
    disk.clear()
    written(tmp_path / "c")
    with pytest.raises(ValueError, match="writev"):
        disk.fail("writev")


def test_only_rules_that_name_reads_match_them(disk, tmp_path):
    written(tmp_path / "a")
    disk.fail(after=1)
    assert (tmp_path / "a").read_bytes() == b"12345678" and not disk.paths("read")
    disk.clear()
    disk.fail("read", "^a$")
    with pytest.raises(OSError, match="Input/output"):
        (tmp_path / "a").read_bytes()
    assert disk.paths("read") == [f"{tmp_path}/a"]


def test_a_short_write_transfers_its_bytes_even_if_it_fails(disk, tmp_path):
    disk.shorten(3, times=2)
    assert written(tmp_path / "a") == 3
    disk.fail("write")
    with pytest.raises(OSError, match="Input/output"):
        written(tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"123" and written(tmp_path / "c") == 8


@pytest.mark.parametrize("limits", [(2, 5), (5, 2)])
def test_the_shortest_write_of_several_disks_applies(disk, tmp_path, limits):
    disk.shorten(limits[0])
    with Disk(tmp_path) as other:
        other.shorten(limits[1])
        assert written(tmp_path / "a") == 2


def test_a_paused_call_waits_for_its_release_and_may_then_fail(disk, tmp_path):
    failed = []

    def write():
        try:
            written(tmp_path / "a")
        except OSError as error:
            failed.append(error.errno)

    with disk.pause("fsync", errno=errno.EIO) as held:
        thread = threading.Thread(target=write)
        thread.start()
        assert held.reached.wait(60) and not failed
    thread.join(60)
    assert failed == [errno.EIO]


def test_a_copy_is_the_state_that_a_kill_before_the_call_leaves(disk, tmp_path, tmp_path_factory):
    target = tmp_path_factory.mktemp("copies") / "copy"
    disk.copy(target, "rename")
    written(tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "b")
    assert disk.image == target and os.listdir(target) == ["a"]


def test_a_closed_disk_patches_and_refuses_nothing(tmp_path):
    real = os.write
    with Disk(tmp_path) as disk:
        disk.fail(times=None)
        assert os.write is not real
        with pytest.raises(OSError, match="Input/output"):
            (tmp_path / "a").mkdir()
        (tmp_path.parent / "beside").mkdir()
    assert os.write is real
    (tmp_path / "a").mkdir()
