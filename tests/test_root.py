# SPDX-License-Identifier: Apache-2.0
"""The checkpoint directory: opening, lease, rollback, collection."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import command as command_line
import model
import pytest
from flat_options import manager_options
from machine import required
from model import before_first_call

import deltackpt
from deltackpt import errors, inspect, serving
from deltackpt.format import naming
from deltackpt.ledger import lease
from deltackpt.ledger.directory import Root
from deltackpt.maintenance.compact import compact
from deltackpt.save.pending_save import PendingSave
from deltackpt.storage import posix
from deltackpt.testing import Disk
from deltackpt.tiers import copy as copying

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


def manager_of(path: Path | str, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(path, handlers=HANDLERS, **options)


@pytest.fixture
def opened(tmp_path) -> Root:
    return Root.open(tmp_path)


def steps_in(path: Path) -> list[int]:
    return sorted(Root.open(path, read_only=True).steps())


def before_commit(act: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Runs ``act`` when the first save in flight is about to commit."""
    return before_first_call(PendingSave, "complete", lambda *_: act())


def point(link: Path, to: str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(to)


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    log = deltackpt.WalOptions(backend=deltackpt.wal.LocalWal(directory="~/log"))
    options = deltackpt.ManagerOptions(wal=log)
    for given in ("~/run", Path("~/run")):
        with manager_of(given, options=options) as manager:
            if manager.latest_step() is None:
                manager.save(0, model.initial())
    assert {path.name for path in home.iterdir()} == {"run", "log"}
    assert log.backend.directory == str(home / "log")
    assert len(inspect.open("~/run")) == 1
    with serving.follow("~/run", poll_secs=None) as live:
        assert live.advance()
    for command in (
        ("ls", "~/run"),
        ("verify", "~/run"),
        ("report", "~/run", "-o", "~/report.html"),
        ("export", "parquet", "~/run", "~/exported"),
        ("copy", "~/run", "~/copied"),
        ("compact", "~/run"),
        ("doctor", "~/run"),
    ):
        done = command_line.run(*command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    assert (home / "copied" / "0").is_dir() and (home / "report.html").is_file()
    assert not [*elsewhere.iterdir()]


def test_a_tilde_of_an_unknown_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.OptionError, match=r"'~user' of a user .* or \./~nobody\.here/run"):
        manager_of("~nobody.here/run")
    with pytest.raises(errors.OptionError, match="~nobody"):
        inspect.open("~nobody.here/run")
    manager_of("./~nobody.here").close()
    assert (tmp_path / "~nobody.here").is_dir()


def fill(path: Path) -> None:
    """Writes until the file system is full."""
    path.mkdir()
    with contextlib.suppress(OSError):
        (path / "chunk").write_bytes(bytes(1 << 20))


@contextlib.contextmanager
def mounted_tmpfs(path: Path, size: str) -> Iterator[Path]:
    """Mounts a small file system; needs root."""
    able = os.geteuid() == 0 and shutil.which("mount") is not None
    required(able, "mounting a small tmpfs needs root and mount")
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    done = subprocess.run(mount, capture_output=True, text=True)
    required(done.returncode == 0, f"a tmpfs is needed: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


# Opening.


@pytest.mark.parametrize(
    "directory", ["s3://bucket/run", "gs://bucket/run", Path("s3://bucket/run"), "file:///tmp/run"]
)
@pytest.mark.parametrize("read_only", [False, True])
def test_every_scheme_is_refused_at_once(directory, read_only, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UnsupportedRoot, match="mount it"):
        Root.open(directory, read_only=read_only)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "2024-report", "checkpoint_12", "lease.txt"])
def test_a_foreign_directory_is_refused_and_left_alone(name, read_only, tmp_path):
    (tmp_path / name).write_text("somebody else's")
    with pytest.raises(errors.ForeignDirectory, match=name):
        Root.open(tmp_path, read_only=read_only)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["100", "7.orbax-checkpoint-tmp", "lost+found", "rolled-back"])
def test_a_directory_with_our_or_orbax_files_is_accepted(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("beside it")
    Root.open(tmp_path).close()
    assert (tmp_path / "notes.txt").exists()


def test_opening_creates_a_directory_and_its_parents(tmp_path):
    with Disk(tmp_path) as disk:
        Root.open(tmp_path / "a" / "b").close()
    # The names of both directories, then the lease in the second.
    assert {*map(str, (tmp_path, tmp_path / "a", tmp_path / "a" / "b"))} <= {*disk.paths("fsync")}


def test_read_only_needs_a_directory_and_leaves_no_trace(tmp_path):
    with pytest.raises(errors.StorageError, match="expected a directory to read"):
        Root.open(tmp_path / "none", read_only=True)
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    reader = Root.open(tmp_path, read_only=True)
    reader.check_lease()
    reader.close()
    assert [path.name for path in tmp_path.iterdir()] == ["5.orbax-checkpoint-tmp"]


def test_a_path_that_is_a_file_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError, match="file: expected a directory, found a file"):
        Root.open(tmp_path / "file")


@pytest.mark.processes
def test_a_read_only_file_system_is_a_typed_error_for_a_trainer_only(tmp_path):
    with mounted_tmpfs(tmp_path / "fs", "1m") as path:
        (path / "3").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        with pytest.raises(errors.StorageError, match="take the lease.*[Rr]ead-only file system"):
            Root.open(path)
        assert steps_in(path) == [3]


@pytest.mark.processes
def test_a_full_file_system_opens_once_leftovers_are_removed(tmp_path):
    with mounted_tmpfs(tmp_path / "fs", "256k") as path:
        leftover = path / "9.orbax-checkpoint-tmp"
        fill(leftover)
        assert posix.free_bytes(path) == 0
        Root.open(path).close()
        assert not leftover.exists()


@pytest.mark.processes
def test_a_full_file_system_is_out_of_space(tmp_path):
    with mounted_tmpfs(tmp_path / "fs", "256k") as path:
        fill(path / "3")
        with pytest.raises(errors.OutOfSpace, match="make room or keep fewer steps"):
            Root.open(path)
        assert steps_in(path) == [3]


def test_only_directories_with_canonical_names_are_steps(tmp_path):
    for name in ("0", "12", "007", "12.orbax-checkpoint-tmp", "٣", "rolled-back", "deleted"):
        (tmp_path / name).mkdir()
    (tmp_path / "13").write_text("a file")
    assert steps_in(tmp_path) == [0, 12]


def test_a_vanished_directory_is_a_typed_error(tmp_path):
    opened = Root.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(errors.StorageError, match="expected to list it"):
        opened.steps()
    message = r"run: expected the directory .* moved or removed; move it"
    with pytest.raises(errors.StorageError, match=message):
        opened.check_lease()


# The lease.


def test_the_newest_starter_takes_over_and_the_older_is_fenced(tmp_path):
    first = Root.open(tmp_path)
    first.check_lease()
    second = Root.open(tmp_path)
    second.check_lease()
    with pytest.raises(errors.FencedError) as caught:
        first.check_lease()
    process = f"process {os.getpid()}"
    for piece in ("epoch 1", "epoch 2", process, socket.gethostname(), "UTC", "stop this trainer"):
        assert piece in str(caught.value)


def test_a_restart_after_close_or_kill_takes_over_at_once(tmp_path):
    for _ in range(3):
        Root.open(tmp_path)
    Root.open(tmp_path).check_lease()
    assert [path.name for path in tmp_path.glob("lease.*")] == [naming.lease_name(4)]


def test_exactly_one_of_the_trainers_that_start_at_once_holds_the_lease(tmp_path):
    barrier = threading.Barrier(8)

    def start(path: Path) -> Root:
        barrier.wait()
        return Root.open(path)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for number in range(12):
            holders = 0
            for trainer in [*pool.map(start, [tmp_path / str(number)] * 8)]:
                with contextlib.suppress(errors.FencedError):
                    trainer.check_lease()
                    holders += 1
            assert holders == 1


def test_an_outdated_listing_never_claims_a_past_epoch(tmp_path):
    """A trainer is delayed between its listing and its claim."""
    Root.open(tmp_path)
    real, calls = lease.epochs, iter([True])

    def late(path: Path) -> Iterator[int]:
        found = list(real(path))
        if next(calls, False):
            Root.open(tmp_path)
            Root.open(tmp_path)
        return iter(found)

    with mock.patch.object(lease, "epochs", late):
        held_up = Root.open(tmp_path)
    held_up.check_lease()
    assert held_up._lease is not None and held_up._lease.epoch == 4


@pytest.mark.parametrize("contents", [b"", b"half"])
def test_a_claim_interrupted_before_it_was_signed_still_counts(contents, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "GRACE_SECS", 0.1)
    older = Root.open(tmp_path)
    (tmp_path / naming.lease_name(2)).write_bytes(contents)
    with pytest.raises(errors.FencedError, match="epoch 2 held by a trainer that is starting"):
        older.check_lease()
    Root.open(tmp_path).check_lease()


def test_a_removed_lease_fences_its_holder(tmp_path):
    """After a manual cleanup, the next trainer starts at epoch 1 again."""
    for _ in range(3):
        holder = Root.open(tmp_path)
    (tmp_path / naming.lease_name(3)).unlink()
    with pytest.raises(errors.FencedError, match="its file removed"):
        holder.check_lease()
    Root.open(tmp_path)
    with pytest.raises(errors.FencedError):
        holder.check_lease()


def test_a_switched_root_is_fenced(tmp_path):
    """Both directories are at epoch 1; only their holders differ."""
    link = tmp_path / "current"
    point(link, "one")
    (tmp_path / "one").mkdir()
    state, touched = model.start()
    with manager_of(tmp_path / "two") as other:
        with manager_of(link) as manager:
            model.commit(manager, 1, state, touched=touched)
            switched = tmp_path / "switched"
            switched.symlink_to("two")
            switched.rename(link)
            message = r"one: expected.*current.* points to another directory now"
            with pytest.raises(errors.FencedError, match=message):
                manager.save(2, state, touched=touched)
            assert manager.all_steps() == [1]
            point(link, "one")
            manager.save(3, state, touched=touched)
        assert other.all_steps() == []
    assert steps_in(link) == [1, 3]


def test_a_save_in_flight_while_its_root_is_switched_is_not_committed_elsewhere(tmp_path):
    link = tmp_path / "current"
    point(link, "one")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    Root.open(tmp_path / "two").close()
    with manager_of(link) as manager, before_commit(lambda: point(link, "two")):
        manager.save(1, model.initial())
        with pytest.raises(errors.FencedError, match="points to another directory now"):
            manager.wait_until_finished()
    assert steps_in(tmp_path / "one") == steps_in(tmp_path / "two") == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_backup_moved_into_place_is_fenced(tmp_path, in_place):
    """The backup has the same epoch but another holder."""
    Root.open(tmp_path / "backup").close()
    state, touched = model.start()
    with manager_of(tmp_path / "run") as manager:
        model.commit(manager, 1, state, touched=touched)
        if in_place:
            shutil.copytree(tmp_path / "backup", tmp_path / "run", dirs_exist_ok=True)
        else:
            (tmp_path / "run").rename(tmp_path / "aside")
            (tmp_path / "backup").rename(tmp_path / "run")
        with pytest.raises(errors.FencedError, match="found .*epoch 1 held by process") as caught:
            manager.save(2, state, touched=touched)
        assert ("another directory in its place" in str(caught.value)) is not in_place
    assert steps_in(tmp_path / "run") == ([1] if in_place else [])


def test_a_copy_of_a_root_in_its_place_is_fenced_although_it_has_the_same_lease(tmp_path):
    opened = Root.open(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    with pytest.raises(errors.FencedError, match="another directory in its place"):
        opened.check_lease()
    opened.close()


def test_a_newer_holder_whose_lease_cannot_be_read_fences_too(tmp_path, opened):
    Root.open(tmp_path)
    too_new = errors.FormatTooNew("lease.2.msgpack: of a later version")
    with (
        mock.patch.object(lease, "read_lease", side_effect=too_new),
        pytest.raises(errors.FencedError, match="epoch 2 held by a trainer of a newer deltackpt"),
    ):
        opened.check_lease()


def test_a_fenced_trainer_removes_nothing_of_the_newer_one(tmp_path):
    older = Root.open(tmp_path)
    Root.open(tmp_path)
    in_flight = tmp_path / "7.orbax-checkpoint-tmp"
    in_flight.mkdir()
    older.remove_leftovers()
    older.close()
    assert in_flight.is_dir()


# Rollback.


def test_steps_after_a_rollback_are_moved_aside_durably_newest_first(tmp_path, opened):
    for step in (100, 110, 120, 130):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "file").write_text(str(step))
    with (
        Disk(tmp_path) as disk,
        pytest.warns(UserWarning, match=r"from step 110.*\[120, 130\].*rolled-back/run-b"),
    ):
        assert opened.roll_back(110, "run-b") == [130, 120]
    assert [Path(path).name for path in disk.paths("rename")] == ["130", "120"]
    # Each is durable in both directories before the next one is moved.
    for number, call in enumerate(disk.calls):
        if call.name == "rename":
            synced = {one.path for one in disk.calls[number + 1 : number + 3]}
            assert synced == {str(tmp_path), str(Path(call.path).parent)}
    assert sorted(opened.steps()) == [100, 110]
    assert (tmp_path / "rolled-back" / "run-b" / "130" / "file").read_text() == "130"


def test_rolling_back_to_the_newest_step_moves_nothing(tmp_path, opened):
    (tmp_path / "10").mkdir()
    assert opened.roll_back(10, "run") == []
    assert not (tmp_path / naming.ROLLED_BACK).exists()


def test_a_step_number_saved_again_after_a_rollback_is_read_again(tmp_path):
    state, touched = model.start()
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            model.commit(manager, step, state, touched=touched)
        before = manager._run.root.saves()
        result = manager.restore(1, state)
        with pytest.warns(UserWarning, match="rolled-back"):
            model.commit(manager, 2, result.state, touched=result.touched)
        after = manager._run.root.saves()
        assert set(after) == {1, 2}
        assert after[1] == before[1]
        assert after[2].save_id.run != before[2].save_id.run


# Collection.


def test_leftovers_of_interrupted_saves_and_deletions_are_removed_at_open(tmp_path):
    other = f"copy of {naming.REMOVED}1"
    for name in ("5.orbax-checkpoint-tmp", f"{naming.REMOVED}1", "4", other):
        piece = tmp_path / name / "embeddings" / "shard.0"
        piece.mkdir(parents=True)
        (piece / "chunk").write_bytes(b"bytes")
    opened = Root.open(tmp_path)
    assert opened.steps() == [4]
    assert [path.name for path in tmp_path.glob(f"*{naming.TEMPORARY}*")] == [other]
    opened.close()
    assert (tmp_path / other / "embeddings" / "shard.0" / "chunk").exists()


def test_renames_of_removals_are_durable_before_anything_is_deleted(tmp_path, opened):
    removed = tmp_path / f"{naming.REMOVED}1"
    removed.mkdir()
    with Disk(tmp_path) as disk:
        opened.remove_discarded()
    first, second = disk.calls[:2]
    assert (first.name, first.path) == ("fsync", str(tmp_path))
    assert second.name != "fsync" and second.path == str(removed)


def test_a_foreign_folder_beside_compacted_bases_is_ignored(tmp_path):
    with manager_of(tmp_path) as manager:
        model.commit(manager, 1, model.initial())
    (tmp_path / naming.COMPACTED / "old" / "embeddings").mkdir(parents=True)
    assert inspect.open(tmp_path).compacted == {}


def test_a_damaged_step_is_listed_as_unknown(tmp_path):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            model.commit(manager, step, model.initial())
    (tmp_path / "2" / "embeddings" / naming.manifest_name(0)).write_bytes(b"damaged")
    saves = Root.open(tmp_path, read_only=True).saves()
    assert saves[2] is None
    assert saves[1] is not None and saves[1].step_dir == "1"


def test_a_long_run_does_not_pile_up_removed_steps(tmp_path):
    state, touched = model.start()
    policy = deltackpt.policies.Consecutive(max_chain=1)
    options = manager_options(policy=policy, durability="process", max_to_keep=1)
    with manager_of(tmp_path, options=options) as manager:
        for step in range(1, 13):
            model.commit(manager, step, state, touched=touched)
            # Background removal may take long on a busy machine.
            while len(list(tmp_path.glob(f"{naming.REMOVED}*"))) > 2:
                time.sleep(0.01)
    assert not [*tmp_path.glob(f"*{naming.TEMPORARY}*")]


def refuse(call: object) -> None:
    """A full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_compacted_base_is_removed_on_a_disk_without_room_for_another_folder(tmp_path):
    state, touched = model.start()
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            model.commit(manager, step, state, touched=touched)
        compact(tmp_path, step=2)
        model.commit(manager, 3, state, touched=touched, force_base=True)
        collected = manager._run.root
        assert isinstance(collected, Root) and inspect.open(tmp_path).compacted
        with Disk(tmp_path) as disk:
            disk.on("mkdir", refuse)
            for step in (2, 1):
                manager.delete(step)
                collected._collected.result()
        assert inspect.open(tmp_path).compacted == {}
        assert not [name for name in os.listdir(tmp_path) if naming.TEMPORARY in name]


def test_what_another_trainer_has_deleted_does_not_stop_a_removal(tmp_path, opened, monkeypatch):
    gone, removed = (tmp_path / f"{naming.REMOVED}{number}" for number in range(2))
    removed.mkdir()
    monkeypatch.setattr(opened, "_discarded", lambda: [gone, removed])
    opened.remove_discarded()
    assert not removed.exists()


def test_a_step_is_deleted_on_a_disk_without_room_for_another_folder(tmp_path):
    with manager_of(tmp_path) as manager:
        for step in (1, 2):
            model.commit(manager, step, model.initial(), force_base=True)
        with Disk(tmp_path) as disk:
            disk.on("mkdir", refuse)
            manager.delete(1)
        assert manager.all_steps() == [2]
        assert not [name for name in os.listdir(tmp_path) if name.startswith("1")]


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?"])
def test_a_path_that_orbax_would_take_for_a_pattern_is_refused(tmp_path, name):
    with pytest.raises(errors.UnsupportedRoot, match="treats them as glob patterns"):
        Root.open(tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "found"), [("back\\slash", "a backslash"), ("\udcff", "bytes that are not UTF-8")]
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_tensorstore_would_misread_is_refused(tmp_path, name, found, read_only):
    with pytest.raises(errors.UnsupportedRoot, match=f"found {found}") as caught:
        Root.open(tmp_path / name, read_only=read_only)
    assert str(caught.value).encode()
    with pytest.raises(errors.UnsupportedRoot, match=f"found {found}"):
        copying.copy(tmp_path, tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["a\0b", "file:///a%00b"])
def test_a_path_with_a_nul_character_is_refused(where):
    with pytest.raises(errors.OptionError, match="found a NUL character"):
        deltackpt.CheckpointManager(where)


def test_a_failed_collection_is_raised_by_close_which_closes_the_directory(
    tmp_path, monkeypatch, opened
):
    monkeypatch.setattr(Root, "remove_discarded", mock.Mock(side_effect=RuntimeError("broken")))
    (tmp_path / f"{naming.REMOVED}1").mkdir()
    opened.collect()
    with pytest.raises(RuntimeError, match="broken"):
        opened.close()
    opened_files = [one for one in Path("/proc/self/fd").iterdir() if one.exists()]
    assert tmp_path not in [one.readlink() for one in opened_files]


def test_removed_steps_are_deleted_if_what_precedes_that_fails(tmp_path, opened):
    (opened.step_dir(1) / "embeddings").mkdir(parents=True)
    opened.remove_steps([1])
    opened.collect(before=mock.Mock(side_effect=errors.OutOfSpace("full")))
    with pytest.raises(errors.OutOfSpace, match="full"):
        opened.close()
    assert not [*tmp_path.glob(f"*{naming.TEMPORARY}*")]
