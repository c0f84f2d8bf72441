# SPDX-License-Identifier: Apache-2.0
"""``deltackpt doctor``: findings on real file systems, and their severity."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import command
import jax.numpy as jnp
import psutil
import pytest
from click.testing import CliRunner
from instruction_sets import forced, supported
from machine import required
from test_bad_input import tmpfs

import deltackpt
from deltackpt import cli
from deltackpt.format import naming
from deltackpt.maintenance import doctor
from deltackpt.maintenance.doctor import machine
from deltackpt.maintenance.doctor.machine import Finding, Mount

MIB = 1 << 20


def by_subject(findings) -> dict[str, Finding]:
    found = {finding.subject: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def of(directory, **options) -> dict[str, Finding]:
    """Findings about a directory, by subject."""
    findings = doctor.examine(directory, **options)
    return by_subject([finding for finding in findings if finding.area == "directory"])


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


# A real directory.


def test_a_good_directory_is_measured_and_left_unchanged(tmp_path):
    (tmp_path / "5").mkdir()
    found = of(tmp_path)
    assert {"file system", "free space", "exclusive creation", "rename", "fsync"} <= {*found}
    assert found["directory"].severity == found["rename"].severity == "ok"
    assert found["exclusive creation"].severity == "ok"
    assert found["steps"].found == "1 committed, newest 5"
    assert "ms for a rename" in found["fsync"].found
    assert names(tmp_path) == {"5"}


def test_read_only_writes_nothing(tmp_path):
    with mock.patch("tempfile.mkdtemp", side_effect=AssertionError("it wrote")):
        found = of(tmp_path, read_only=True)
    assert found["directory"].severity == "ok" and "fsync" not in found


def test_a_missing_directory_is_not_created(tmp_path):
    missing = tmp_path / "run" / "17"
    found = of(missing)
    assert found["directory"].severity == "warning"
    assert found["directory"].action.endswith(f"mkdir -p {missing}")
    assert "file system" in found and "fsync" not in found
    assert names(tmp_path) == set()


def test_a_directory_with_foreign_contents_is_a_problem(tmp_path):
    (tmp_path / "photos").mkdir()
    found = of(tmp_path)
    assert found["directory"].severity == "problem" and "photos" in found["directory"].found


def test_an_unsupported_url_scheme_is_a_problem():
    found = of("hdfs://name/run")
    assert [finding.severity for finding in found.values()] == ["problem"]
    assert "does not support" in found["bucket"].found


def test_a_file_url_is_a_problem_and_not_a_missing_directory(tmp_path):
    found = by_subject(doctor.examine(f"file://{tmp_path}"))
    assert found["directory"].severity == "problem"
    assert "found the scheme 'file'" in found["directory"].found


def test_an_empty_name_is_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "other").touch()
    monkeypatch.chdir(tmp_path)
    assert by_subject(doctor.examine(""))["directory"].severity == "problem"


@pytest.mark.parametrize("call", ["os.fsync", "os.rename", "os.replace"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_file_system_error_is_a_problem_and_leaves_no_files(tmp_path, call, code):
    with mock.patch(call, side_effect=OSError(code, os.strerror(code))):
        found = of(tmp_path)
    assert found["writing"].severity == "problem"
    assert found["writing"].found == os.strerror(code)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("call", "broken", "subject"),
    [
        ("pathlib.Path.touch", lambda *_, **__: None, "exclusive creation"),
        ("os.replace", lambda old, new: shutil.copy(old, new), "rename"),
        ("os.rename", lambda old, new: shutil.copytree(old, new, dirs_exist_ok=True), "rename"),
    ],
)
def test_a_file_system_without_posix_semantics_is_a_problem(tmp_path, call, broken, subject):
    with mock.patch(call, broken):
        finding = of(tmp_path)[subject]
    assert finding.severity == "problem" and finding.meaning
    assert names(tmp_path) == set()


@pytest.mark.processes
def test_sigterm_leaves_no_files(tmp_path):
    program = (
        "import os, sys, time\n"
        "from deltackpt import cli\n"
        "os.fsync = lambda _: print('measuring', flush=True) or time.sleep(600)\n"
        f"sys.argv[1:] = ['doctor', {str(tmp_path)!r}]\n"
        "cli.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as running:
        try:
            assert running.stdout is not None and running.stdout.readline() == b"measuring\n"
            assert len(names(tmp_path)) == 1
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 128 + signal.SIGTERM
        finally:
            running.kill()
    assert names(tmp_path) == set()


# Real file systems.


@contextlib.contextmanager
def ext4(tmp_path: Path, options: str) -> Iterator[Path]:
    """A mounted ext4 on a loop device."""
    able = os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None
    required(able, "an ext4 of its own needs root and mkfs.ext4")
    image, point = tmp_path / "disk.img", tmp_path / "disk of ext4"
    with open(image, "wb") as file:
        file.truncate(400 * MIB)
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", f"loop,{options}", str(image), str(point)], capture_output=True, text=True
    )
    required(not mounted.returncode, f"a loop device is needed: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.processes
def test_ext4_is_local_and_measured(tmp_path):
    with ext4(tmp_path, "rw") as point:
        (point / "run").mkdir()
        found = of(point / "run")
    assert found["file system"].severity == "ok"
    assert found["file system"].found.startswith("ext4, local: ")
    assert f" on {point} (" in found["file system"].found
    assert "ms for a rename" in found["fsync"].found


@pytest.mark.processes
def test_ext4_without_flushes_is_a_problem(tmp_path):
    with ext4(tmp_path, "nobarrier") as point:
        found = of(point, read_only=True)
    assert found["file system"].severity == "problem"
    assert "power cut" in found["file system"].meaning


@pytest.mark.processes
def test_a_read_only_mount_is_a_problem_unless_only_reading(tmp_path):
    with ext4(tmp_path, "ro") as point:
        found, reading = of(point), of(point, read_only=True)
        done = CliRunner().invoke(cli.cli, ["doctor", str(point)])
    assert found["file system"].severity == found["directory"].severity == "problem"
    assert "fsync" not in found and "writing" not in found
    assert done.exit_code == 1
    assert all(finding.severity != "problem" for finding in reading.values())


def test_memory_does_not_survive_a_power_cut_and_a_small_disk_has_little_room(tmp_path):
    with tmpfs(tmp_path / "small", "size=8m") as point:
        found = of(point)
        assert names(point) == set()
    assert found["file system"].severity == "warning"
    assert "does not survive a power cut" in found["file system"].meaning
    assert found["free space"].severity == "warning"


# Contents of a directory.


def save(directory: Path, *more: str) -> str:
    """A program that saves step 1 in a directory."""
    return "\n".join(
        [
            "import jax.numpy as jnp, os, deltackpt",
            "tables = deltackpt.Tables(select='t')",
            f"saver = deltackpt.CheckpointManager({str(directory)!r}, handlers={{'e': tables}})",
            "saver.save(1, {'t': jnp.ones((10, 2))})",
            "saver.wait_until_finished()",
            *more,
        ]
    )


def test_the_lease_holder_is_reported(tmp_path):
    tables = deltackpt.Tables(select="t")
    with deltackpt.CheckpointManager(tmp_path, handlers={"e": tables}) as saver:
        saver.save(1, {"t": jnp.ones((10, 2))})
        saver.wait_until_finished()
        found = of(tmp_path, read_only=True)
    lease = found["lease"]
    assert lease.severity == "note" and "which is running" in lease.found
    assert lease.found.startswith(f"epoch 1: process {os.getpid()} on ")
    assert found["steps"].found == "1 committed, newest 1"


@pytest.mark.processes
def test_a_killed_lease_holder_is_ok(tmp_path):
    subprocess.run([sys.executable, "-c", save(tmp_path, "os._exit(9)")], check=False)
    lease = of(tmp_path, read_only=True)["lease"]
    assert lease.severity == "ok" and "which has ended" in lease.found


def test_an_unsigned_lease_is_reported(tmp_path):
    (tmp_path / naming.lease_name(7)).touch()
    lease = of(tmp_path, read_only=True)["lease"]
    assert lease.severity == "note" and lease.found == "epoch 7, not signed"


# Mounts.

#: Device, mount point, kind and options, as psutil lists them.
TABLE = [
    ("/dev/vda", "/", "ext4", "rw,relatime,discard"),
    ("server:/export", "/data", "nfs4", "rw,hard,vers=4.2"),
    ("tmpfs", "/data/my runs", "tmpfs", "rw,size=4k"),
    ("/dev/vdb", "/data/over", "ext4", "rw"),
    ("/dev/vdc", "/data/over", "xfs", "ro,nobarrier"),
]


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/", "ext4", "/"),
        ("/database", "ext4", "/"),
        ("/data", "nfs4", "/data"),
        ("/data/my runs/17", "tmpfs", "/data/my runs"),
        ("/data/my", "nfs4", "/data"),
        ("/data/over/a", "xfs", "/data/over"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_newest(path, kind, point, monkeypatch):
    names = ("device", "mountpoint", "fstype", "opts")
    listed = [types.SimpleNamespace(**dict(zip(names, one, strict=True))) for one in TABLE]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)
    mount = machine.mount_of(path)
    assert mount is not None and (mount.kind, mount.point) == (kind, point)
    assert kind != "xfs" or mount.options == ("ro", "nobarrier")


def mounted(kind: str, *options: str, source: str = "/dev/vda") -> Mount:
    return Mount(point="/data", kind=kind, source=source, options=("rw", *options))


@pytest.mark.parametrize(
    ("mount", "severity", "match"),
    [
        (mounted("ext4"), "ok", ""),
        (mounted("xfs", "noatime"), "ok", ""),
        (mounted("ext4", "barrier=0"), "problem", "power cut"),
        (mounted("xfs", "ro"), "problem", "but not saved"),
        (mounted("nfs4", "hard"), "note", "depend on the server's rename"),
        (mounted("nfs", "soft"), "warning", "slow to answer"),
        (mounted("lustre"), "note", "depend on the server's rename"),
        (mounted("tmpfs"), "warning", "power cut"),
        (mounted("overlay"), "warning", "container"),
        (mounted("fuse.gcsfuse", source="bucket"), "problem", "not atomic"),
        (mounted("fuse", source="mountpoint-s3"), "problem", "not atomic"),
        (mounted("fuse.sshfs"), "warning", "fsync"),
        (mounted("exfat"), "warning", "fsync"),
        (None, "note", "cannot be determined"),
    ],
)
def test_a_file_system_is_classified_by_its_guarantees(mount, severity, match):
    found = machine.mount_finding(mount)
    assert found.severity == severity and match in found.meaning
    assert severity in ("ok", "note") or found.action


@pytest.mark.parametrize(("secs", "severity"), [(0.001, "ok"), (0.3, "warning")])
def test_a_slow_fsync_is_a_warning(secs, severity):
    found = machine.fsync_finding(secs, 0.001)
    assert found.severity == severity and bool(found.action) == (severity == "warning")


# The machine and the versions.


@pytest.mark.parametrize(
    ("text", "severity"),
    [("always [madvise] never", "ok"), ("always madvise [never]", "warning"), ("", None)],
)
def test_disabled_huge_pages_are_a_warning(tmp_path, monkeypatch, text, severity):
    setting = tmp_path / "enabled"
    setting.write_text(text)
    monkeypatch.setattr(machine, "_HUGE_PAGES", setting)
    found = [one for one in machine.machine_findings() if one.subject == "huge pages"]
    assert [finding.severity for finding in found] == [severity] * (severity is not None)


@pytest.mark.parametrize(
    ("found", "required", "severity"),
    [
        ("0.12.8", True, "ok"),
        ("0.12.9rc1", True, "ok"),
        ("0.13.0", True, "problem"),
        ("0.11.30", True, "problem"),
        (None, True, "problem"),
        (None, False, "note"),
    ],
)
def test_a_version_is_checked_against_the_range(found, required, severity):
    finding = machine.version_finding(
        "orbax-checkpoint", found, "<0.13,>=0.12.8", required=required
    )
    assert finding.severity == severity
    assert severity == "ok" or 'pip install "orbax-checkpoint>=0.12.8,<0.13"' in finding.action


def test_the_installed_versions_are_supported():
    found = by_subject(doctor.examine())
    for name in ("python", "jax", "orbax-checkpoint", "tensorstore", "numpy", "flax"):
        assert found[name].severity == "ok", found[name]
    assert {finding.area for finding in found.values()} == {"machine", "software"}
    assert {"memory", "open files"} <= {*found}


def test_missing_kernels_are_a_note():
    with forced(""):
        found = by_subject(doctor.examine())["kernels"]
        assert (found.severity, found.found) == ("note", "not compiled")
    for path in supported():
        with forced(path):
            found = by_subject(doctor.examine())["kernels"]
            assert (found.severity, found.found) == ("ok", f"compiled, {path}")


# The command.


def run(*arguments: object, absent: tuple[str, ...] = ()):
    """Runs the command in a process that cannot import the ``absent`` packages."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}));"
        f"sys.argv[1:] = {['doctor', *map(str, arguments)]!r};"
        "from deltackpt import cli; cli.main()"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
    )


@pytest.mark.processes
def test_the_command_needs_neither_jax_nor_orbax(tmp_path):
    found = run(tmp_path, "--json", absent=("jax", "orbax", "flax", "ray"))
    assert found.stderr == ""
    told = json.loads(found.stdout)
    assert told["directory"] == str(tmp_path)
    severities = {finding["subject"]: finding["severity"] for finding in told["findings"]}
    assert severities["steps"] == severities["rename"] == "ok"
    assert found.returncode == ("problem" in severities.values())


@pytest.mark.processes
def test_a_missing_package_is_a_finding_and_not_a_traceback(tmp_path):
    found = run(tmp_path, absent=("tensorstore", "google_crc32c", "numpy"))
    assert found.returncode == 1 and found.stderr == ""
    for subject in ("contents", "kernels"):
        line = next(line for line in found.stdout.splitlines() if subject in line)
        assert "problem" in line and "cannot be checked" in line


def test_each_finding_is_one_line_for_pipes_with_a_summary_below(tmp_path):
    (tmp_path / naming.lease_name(7)).touch()
    found = CliRunner().invoke(cli.cli, ["doctor", str(tmp_path), "--read-only"])
    lines = found.output.splitlines()
    assert lines[0] == "Directory" and "Machine" in lines and "Software" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("  note     lease"))
    assert "was killed" in lines[at + 1] and "-> none: the next trainer" in lines[at + 2]
    assert lines[-1].startswith("0 problems") and "\x1b" not in found.output


def test_usage_errors_and_problems_have_different_exit_codes(tmp_path):
    (tmp_path / "file").touch()
    assert command.run("doctor", tmp_path / "file").returncode == 1
    assert command.run("doctor", tmp_path, "--fast").returncode == 2
