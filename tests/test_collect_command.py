# SPDX-License-Identifier: Apache-2.0
"""``deltackpt gc`` removes only unneeded objects, also if other processes are active."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from unittest import mock

import hypothesis
import model
import pytest
from command import run
from damages import flip
from hypothesis import strategies as st
from test_compact import contents, manager, run_compaction

import deltackpt
from deltackpt import errors
from deltackpt.format import manifest, naming, records
from deltackpt.ledger.directory import Root
from deltackpt.ledger.lease import Lease
from deltackpt.maintenance import compact, verify
from deltackpt.maintenance import gc as collection
from deltackpt.maintenance.garbage import Retention
from deltackpt.maintenance.gc import collect, collectable
from deltackpt.maintenance.verify import verify_root
from deltackpt.reading import stored_saves
from deltackpt.storage import posix
from deltackpt.storage.store import store_path
from deltackpt.testing import Disk


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Steps 0 to 4, of which 0 and 3 are bases, with a compacted base of 1."""
    root = tmp_path_factory.mktemp("written") / "root"
    state, touched = model.start()
    with manager(root, policy=deltackpt.policies.Consecutive(max_chain=2)) as trainer:
        for step in range(5):
            trainer.save(step, state, touched=touched)
            state, touched = model.train(state, touched, step)
    run_compaction(root, 1)
    return root


@pytest.fixture
def root(written, tmp_path) -> Path:
    """A copy of ``written``, whose trainer has ended."""
    shutil.copytree(written, tmp_path / "root")
    ended(tmp_path / "root")
    return tmp_path / "root"


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def ended(root: Path, **changes) -> None:
    """Signs the lease as a process of this host that ended long ago."""
    (path,) = root.glob("lease.*")
    lease = Lease(
        epoch=naming.lease_epoch(path.name) or 0,
        holder="x" * 32,
        host=socket.gethostname(),
        pid=ended_pid(),
        since_secs=0.0,
    )
    lease = dataclasses.replace(lease, **changes)
    path.write_bytes(records.to_bytes(lease, "deltackpt.lease"))
    for one in (path, *root.glob("[0-9]*")):
        os.utime(one, (1e9, 1e9))


def leave(root: Path, *, age_secs: float = 1e6) -> list[str]:
    """Leaves the remains of an interrupted save, deletion and compaction."""
    names = [
        "9.orbax-checkpoint-tmp",
        f"{naming.REMOVED}7",
        f"{naming.COMPACTED}/{naming.compaction_name('4')}",
    ]
    changed = time.time() - age_secs
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "chunk").write_bytes(b"bytes")
        for path in (root / name / "chunk", root / name):
            os.utime(path, (changed, changed))
    return names


def names(found: collection.Collectable) -> list[str]:
    return [one.name for one in found.removable]


def snapshot(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


# Removals.


def test_leftovers_are_removed_and_every_step_stays(root):
    left = leave(root)
    before = {step: contents(root, step) for step in range(5)}
    listed = collectable(root)
    assert listed.in_use is None
    assert sorted(names(listed)) == sorted(left)
    assert all(one.nbytes == 5 for one in listed.removable)
    done = collect(root)
    assert sorted(names(done)) == sorted(left) and done.kept == (0, 1, 2, 3, 4)
    assert not any((root / name).exists() for name in left)
    assert {step: contents(root, step) for step in range(5)} == before
    assert verify_root(root).intact
    assert names(collect(root, offline=True)) == []


def test_steps_are_removed_newest_first_and_chains_stay(root):
    done = collect(root, retention=Retention(keep_last=1))
    assert names(done) == ["2", "1", "0", "compacted/1/embeddings"]
    assert done.kept == (3, 4)
    assert sorted(path.name for path in root.glob("[0-9]*")) == ["3", "4"]
    assert verify_root(root).intact
    assert not list(root.glob(f"*{naming.TEMPORARY}*"))


def test_steps_that_a_compacted_base_replaces_are_removed_and_the_base_stays(root):
    before = contents(root, 2)
    done = collect(root, retention=Retention(keep_last=1, keep_every=2))
    assert done.kept == (0, 2, 3, 4) and names(done) == ["1"]
    assert contents(root, 2) == before
    assert verify_root(root).intact


def test_rolled_back_runs_are_removed_only_on_request(root):
    aside = root / naming.ROLLED_BACK / "run" / "8"
    aside.mkdir(parents=True)
    (aside / "file").write_text("123")
    assert names(collect(root)) == []
    assert aside.is_dir()
    ended(root)
    assert names(collect(root, rolled_back=True)) == [f"{naming.ROLLED_BACK}/run"]
    assert not aside.exists()


def test_an_unreadable_step_prevents_all_removals(root):
    (root / "1" / "embeddings" / naming.manifest_name(0)).write_bytes(b"damaged")
    found = collectable(root, retention=Retention(keep_last=1))
    assert names(found) == [] and "[1] are unreadable" in found.notes[0]


def test_a_damaged_compacted_base_replaces_nothing_and_stays(root):
    path = root / "compacted" / "1" / "embeddings" / naming.manifest_name(0)
    path.write_bytes(b"damaged")
    found = collectable(root, retention=Retention(keep_last=1, keep_every=2))
    assert names(found) == [] and "compacted/1 stays" in found.notes[0]


@hypothesis.given(
    steps=st.sets(st.integers(0, 50), min_size=1),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 9),
)
def test_retention_keeps_what_it_says_and_the_newest(steps, keep_last, keep_every):
    kept = Retention(keep_last=keep_last, keep_every=keep_every).keeps(steps)
    assert kept <= steps and max(steps) in kept
    if keep_last is None and keep_every is None:
        assert kept == steps
    if keep_last is not None:
        assert set(sorted(steps)[-keep_last:]) <= kept
    if keep_every is not None:
        assert {step for step in steps if step % keep_every == 0} <= kept


# Conflicts.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pid": os.getpid()}, "which is running"),
        ({"pid": 1}, "which is running"),
        ({"host": "another-host"}, "which may be running"),
    ],
)
def test_a_trainer_that_may_be_running_is_never_disturbed(changes, expected, root):
    leave(root)
    ended(root, **changes)
    before = snapshot(root)
    with pytest.raises(errors.InUse, match=expected):
        collect(root, retention=Retention(keep_last=1))
    assert snapshot(root) == before
    listed = collectable(root)
    assert listed.in_use is not None and expected in listed.in_use


def test_a_recently_changed_unfinished_save_may_belong_to_a_trainer(root):
    leave(root, age_secs=5.0)
    with pytest.raises(errors.InUse, match="something unfinished that changed"):
        collect(root)
    assert (root / "9.orbax-checkpoint-tmp").is_dir()


@pytest.mark.parametrize("unsigned", [True, False])
def test_without_a_readable_lease_nothing_is_removed(unsigned, root):
    (path,) = root.glob("lease.*")
    path.write_bytes(b"") if unsigned else path.unlink()
    with pytest.raises(errors.InUse, match="lease"):
        collect(root)


def test_offline_fences_a_trainer_that_is_still_running(tmp_path):
    state, touched = model.start()
    trainer = manager(tmp_path)
    for step in (1, 2):
        trainer.save(step, state, touched=touched)
    trainer.wait_until_finished()
    collect(tmp_path, offline=True)
    with pytest.raises(errors.FencedError):
        trainer.save(3, state, touched=touched)
    trainer.close()
    assert verify_root(tmp_path).intact


def test_a_compaction_under_way_is_left_alone(root):
    leave(root)
    with compact.exclusive(root):
        pass  # It removes the remains of an interrupted one.
    with compact.exclusive(root), pytest.raises(errors.AlreadyCompacting):
        collect(root)


def test_a_trainer_that_starts_during_gc_keeps_the_remaining_steps(root):
    with Disk(root) as disk, pytest.raises(errors.FencedError):
        disk.on("rename", lambda _: Root.open(root), naming.REMOVED, times=1)
        collect(root, retention=Retention(keep_last=1))
    assert sorted(path.name for path in root.glob("[0-9]")) == ["0", "1", "3", "4"]
    assert verify_root(root).intact


@pytest.mark.parametrize("cut_after", range(9))
def test_an_interrupted_collection_leaves_each_step_whole_or_removed(cut_after, root):
    """Interrupted at each rename and removal."""
    leave(root)
    before = {step: contents(root, step) for step in (3, 4)}
    with Disk(root) as disk, contextlib.suppress(errors.StorageError):
        disk.fail(("rename", "rmdir"), after=cut_after, times=None)
        collect(root, retention=Retention(keep_last=1))
    assert verify_root(root).intact
    collect(root, retention=Retention(keep_last=1), offline=True)
    assert sorted(path.name for path in root.glob("[0-9]*")) == ["3", "4"]
    assert {step: contents(root, step) for step in (3, 4)} == before
    assert stored_saves.compacted_bases(root) == {}


def test_foreign_directories_are_refused(tmp_path):
    with pytest.raises(errors.StorageError):
        collect(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "notes.txt").write_text("somebody's")
    with pytest.raises(errors.ForeignDirectory):
        collect(tmp_path, offline=True)


@pytest.mark.parametrize("what", ["lease.*", "4"])
def test_a_trainer_in_another_container_that_saved_recently_is_not_disturbed(what, root):
    """Its process ID is meaningless here."""
    (path,) = root.glob(what)
    os.utime(path)
    with pytest.raises(errors.InUse, match="which has ended, and a .* that changed"):
        collect(root)


def test_a_trainer_that_starts_before_the_lease_is_taken_keeps_it(root):
    leave(root)
    real, started = collection.exclusive, []

    def exclusive(path):
        started.append(Root.open(path))
        return real(path)

    with (
        mock.patch.object(collection, "exclusive", exclusive),
        pytest.raises(errors.InUse, match="started concurrently"),
    ):
        collect(root, retention=Retention(keep_last=1))
    started[0].check_lease()
    assert len(collectable(root).kept) == 5


def test_a_copy_to_the_directory_and_a_collection_exclude_each_other(root):
    with collection.exclusive(root), pytest.raises(errors.InUse, match="no other copy"):
        collect(root, offline=True)
    collect(root)
    assert not (root / naming.COPYING).exists()


def values(folder: Path) -> Path:
    return sorted(folder.rglob("values/c.0.0"))[0]


def test_a_damaged_compacted_base_never_replaces_its_chain(root):
    """Its manifest is intact, but its rows are not."""
    run_compaction(root, 4)
    ended(root)
    before = contents(root, 4, compacted=False)
    flip(values(root / "compacted" / "4"), 0)
    done = collect(root, retention=Retention(keep_last=1))
    assert done.kept == (3, 4) and "compacted/4 stays because it is damaged" in done.notes[0]
    assert contents(root, 4, compacted=False) == before


def test_only_what_is_kept_is_read(root):
    """Reading what is about to be removed could take much longer than removing it."""
    run_compaction(root, 4)
    ended(root)
    with mock.patch.object(verify, "verify_save", wraps=verify.verify_save) as read:
        found = collectable(root, retention=Retention(keep_last=1))
    assert {"0", "3", "compacted/1/embeddings"} <= {*names(found)}
    assert sorted(call.args[0].name for call in read.call_args_list) == ["4", "compacted/4"]


def test_nothing_is_removed_if_no_kept_step_is_intact(root):
    flip(values(root / "3"), 0)
    before = snapshot(root)
    found = collectable(root, retention=Retention(keep_last=1))
    assert names(found) == [] and "no kept step is intact" in found.notes[-1]
    assert "step 4 cannot be restored: 3/embeddings" in found.notes[-2]
    assert snapshot(root) == before
    older = collectable(root, retention=Retention(keep_last=1, keep_every=2))
    assert names(older) == ["1"] and "step 4 cannot" in older.notes[0]


def test_steps_that_only_chains_need_are_reported(root):
    (note,) = collectable(root, retention=Retention(keep_last=1)).notes
    assert "[3] stay only because kept chains" in note and "deltackpt compact" in note


def test_chains_of_another_deltackpt_item_stay(root):
    """Another manager uses the same directory; its step 4 needs all steps."""
    ids = {}
    for step in range(5):
        shutil.copytree(root / str(step) / "embeddings", root / str(step) / "others")
        path = root / str(step) / "others" / naming.manifest_name(0)
        record = manifest.from_bytes(path.read_bytes(), name="m")
        parent = None
        if step:
            parent = manifest.ParentRef(save_id=ids[step - 1], step_dir=str(step - 1))
        record = dataclasses.replace(record, parent=parent, kind="delta" if step else "base")
        ids[step] = record.save_id
        path.write_bytes(manifest.to_bytes(record))
    found = collectable(root, retention=Retention(keep_last=1))
    assert found.kept == (0, 1, 2, 3, 4)


def test_files_that_vanish_while_sizes_are_summed_are_skipped(root):
    leave(root)
    (root / "9.orbax-checkpoint-tmp" / "gone").symlink_to("nowhere")
    assert store_path(root / "9.orbax-checkpoint-tmp").tree_bytes() == 5
    assert store_path(root / "none").tree_bytes() == 0
    real = os.stat

    def stat(path, **kwargs):
        if isinstance(path, str) and path.endswith("chunk"):
            raise FileNotFoundError(path)
        return real(path, **kwargs)

    with mock.patch.object(posix.os, "stat", stat):
        assert collectable(root).nbytes == 0


# The command.


def test_a_dry_run_lists_all_with_sizes_and_reasons_and_changes_nothing(root):
    leave(root)
    before = snapshot(root)
    found = run("gc", root, "--dry-run", "--keep-last", 1)
    assert found.returncode == 0, found.stderr
    assert "no kept step needs it" in found.stdout
    assert "would remove 7 objects" in found.stdout
    assert snapshot(root) == before
    told = json.loads(run("gc", root, "--dry-run", "--json").stdout)
    assert told["dry_run"] and len(told["removable"]) == 3


def test_exit_codes_show_whether_to_retry(root, tmp_path):
    ended(root, pid=os.getpid())
    found = run("gc", root)
    assert found.returncode == 75 and found.stderr.endswith("[in-use]\n")
    assert "note: refused unless --offline is given" in run("gc", root, "--dry-run").stdout
    assert "refused" not in run("gc", root, "--dry-run", "--offline").stdout
    assert run("gc", root, "--offline").returncode == 0
    assert run("gc", tmp_path / "none").returncode == 1
    assert run("gc", root, "--keep-last", 0).returncode == 2
