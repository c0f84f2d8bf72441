# SPDX-License-Identifier: Apache-2.0
"""Regressions of staging directories and uploaders that an adversarial review found."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from test_tiers import ROWS, Node, alone, eventually, node, one, open_at, other, s3, same, staged

import deltackpt
from deltackpt import inspect, touched
from deltackpt.errors import ForeignDirectory, OptionError, OutOfSpace
from deltackpt.format import naming
from deltackpt.ledger.journal import Journal
from deltackpt.maintenance.compact import compact
from deltackpt.options import DeltaOptions
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import Refused, StorePath, Unanswered
from deltackpt.testing import MemoryStore
from deltackpt.tiers import cursor, replicator
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.staging import StagingDir, default_stage, step_of
from deltackpt.tiers.uploader import ShardReport, ShardReports, Uploader

__all__ = ["alone", "node", "one", "other", "s3"]

#: Limit for work that must end by itself.
_LIMIT_SECS = 60


def saves_each(one: Node, manager: deltackpt.CheckpointManager, *steps: int, **more: Any) -> None:
    """Saves steps and waits for each."""
    for step in steps:
        one.saves(manager, step, **more)


def upload_all(one: Node) -> None:
    """Runs an uploader without a trainer until all is uploaded; fails if it does not end."""
    work = Uploader(one.stage)
    found: list[BaseException] = []

    def run() -> None:
        try:
            work.run(Trainer(is_gone=True))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LIMIT_SECS)
    assert not thread.is_alive(), "the uploader does not end"
    assert not found, found


def test_a_compacted_and_retired_step_is_still_the_parent_of_later_ones(one):
    with one.manager(max_to_keep=2, deltas=DeltaOptions(bases="compacted")) as manager:
        saves_each(one, manager, 0, 1, 2, 3)
        compact(one.url, step=3, endpoint=one.endpoint)
        saves_each(one, manager, 4, 5, 6, 7, 8)
        eventually(lambda: 3 not in one.root(), "the compacted step is retired")
        held = one.held()
        found = one.restore(manager)
        assert (found.step, found.chain, found.skipped) == (8, (3, 4, 5, 6, 7, 8), ())
        assert same(one.held(), held)


def test_an_unneeded_base_is_retired_by_the_trainer_that_saw_it_appear(one):
    with one.manager(max_to_keep=1, deltas=DeltaOptions(bases="compacted")) as manager:
        saves_each(one, manager, 0, 1, 2)
        compact(one.url, step=2, endpoint=one.endpoint)
        saves_each(one, manager, *range(3, 8), bases=(5, 6, 7))
        eventually(lambda: not Journal(open_at(one)).state().bases, "the base is retired")
        assert one.restore(manager).step == 7


def test_retention_continues_if_a_save_that_it_waited_for_was_rolled_back(one):
    bases = range(1000)
    with one.manager(max_to_keep=2, wait_for="staging") as manager:
        saves_each(one, manager, 1, 2, 3, bases=bases)
        eventually(lambda: one.root() == [2, 3], "the first ones come")
        process = manager._run.replication.process._process
        os.kill(process.pid, signal.SIGSTOP)  # The bucket is slow.
        os.waitpid(process.pid, os.WUNTRACED)
        try:
            one.saves(manager, 4, bases=bases)
            with pytest.warns(UserWarning, match="resuming from step 3"):
                one.restore(manager, 3)
                one.saves(manager, 5, bases=bases)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        saves_each(one, manager, 6, 7, 8, bases=bases)
        eventually(lambda: one.root() == [7, 8] == manager.all_steps(), "retention goes on")
        steps = itertools.count(9)

        def shrunk() -> bool:
            # Later orders leave out finished ones.
            one.saves(manager, next(steps), bases=bases)
            return len(one.stage.orders().removals) < 4

        eventually(shrunk, "orders do not pile up")


def test_retention_continues_after_restarts_in_an_outage(one):
    with one.manager(max_to_keep=1) as manager:
        saves_each(one, manager, 1, 2, bases=(1, 2))
    for step in (3, 4):
        one.staged_run(step, bases=[step], max_to_keep=1)
    with one.manager(max_to_keep=1) as manager:
        one.restore(manager)
        saves_each(one, manager, 5, 6, bases=(5, 6))
        eventually(lambda: one.root() == [6] == manager.all_steps(), "retention goes on")


def test_a_step_stays_if_its_replacement_is_lost(one):
    one.run(1)
    held = one.held()
    one.staged_run(2, bases=[2], max_to_keep=1)
    orders = one.stage.orders()
    assert orders is not None and [removal.step for removal in orders.removals] == [1]
    shutil.rmtree(one.stage.steps / "2")
    with one.manager(max_to_keep=1) as manager:
        assert manager.all_steps() == [1]
        one.restore(manager)
        assert same(one.held(), held)
        saves_each(one, manager, 3, 4, bases=(3, 4))
        eventually(lambda: one.root() == [4] == manager.all_steps(), "retention goes on")


def fill(patch: pytest.MonkeyPatch, one: Node) -> None:
    """Lets no record be written into a staging directory."""
    real = DurableDir.write

    def write(self, path, *given, **more) -> None:
        if path.parent == one.stage.path:
            raise OutOfSpace(f"{path}: expected room to write, found the file system full")
        real(self, path, *given, **more)

    patch.setattr(DurableDir, "write", write)


@pytest.mark.parametrize("reported", [True, False])
def test_uploaded_saves_make_room_after_a_save_that_found_the_disk_full(
    one, alone, monkeypatch, reported
):
    def free_bytes(_: Path) -> int:
        used = [*one.local(), *one.stage.steps.glob(f"{naming.REMOVED}*")]
        return 0 if len(used) >= 3 else 1 << 40

    def is_saved() -> bool:
        with contextlib.suppress(OutOfSpace):
            one.saves(manager, 4, bases=[4])
            return True
        return False

    with one.manager(keep_local=1, wait_for="staging") as manager:
        with mock.patch("deltackpt.storage.posix.free_bytes", free_bytes):
            one.saves(manager, 1, 2, 3, bases=(1, 2, 3))
            assert not is_saved()
            with monkeypatch.context() as patched:
                if not reported:
                    fill(patched, one)
                upload_all(one)
            eventually(is_saved, "there is room again")
        assert manager.all_steps() == [1, 2, 3, 4]

        def are_sizes_dropped():  # The saving thread may still evict.
            staged(manager).lag()
            return {step_of(key) for key in staged(manager)._sizes} <= {*one.local()}

        eventually(are_sizes_dropped, "the sizes of evicted saves are dropped")


def test_reports_of_uploaders_are_told_from_other_objects_and_damaged_ones():
    at = StorePath(MemoryStore(), "shard-reports/1.1.0123456789ab")
    shards, own = ShardReports(at), ShardReport(process=1, objects=7)
    shards.publish(own)
    for name in ("notes.txt", "1.msgpack.old", "x/0.msgpack", "01.msgpack", "-1.msgpack"):
        at.store.put((at / name).key, b"of somebody else")
    assert shards.read() == {1: own} == ShardReports(at).read()
    at.store.put((at / "0.msgpack").key, b"damaged")
    for found in (shards.read(), ShardReports(at).read()):
        assert found[1] == own and "report of process 0" in str(found[0].problem)
    # Process 0 replaces its own.
    ShardReports(at).publish(ShardReport(process=0))
    assert shards.read() == {0: ShardReport(process=0), 1: own}


def test_a_removed_shard_that_waits_for_its_upload_is_ordered_once_and_not_listed(one, alone):
    with one.manager(max_to_keep=1, wait_for="staging") as manager:
        staged(manager).no_shared_fs = True  # As if other processes had shards of each save.
        saves_each(one, manager, 1, 2, 3, 4, 5, bases=(1, 2, 3, 4, 5))
        assert manager.all_steps() == [5]
        orders = one.stage.orders()
        assert orders is not None and [removal.step for removal in orders.removals] == [1, 2, 3, 4]
        assert one.local() == [1, 2, 3, 4, 5]
        upload_all(one)
        assert one.root() == [5]
        staged(manager).progress()
        assert manager.all_steps() == [5]


@pytest.mark.filterwarnings("ignore:.*resuming from step")
def test_orders_that_could_not_be_written_are_written_before_the_next_save(one):
    with one.manager() as manager:
        one.saves(manager, 1, 2, bases=(1, 2))
        one.restore(manager, 1)
        tiers, run = staged(manager), manager._run.lineage
        tiers.start_run(run.newest_committed, run.run)
        full = mock.Mock(side_effect=OutOfSpace("the disk is full"))
        with mock.patch.object(StagingDir, "order", full), pytest.raises(OutOfSpace):
            one.saves(manager, 3, bases=[3])
        one.saves(manager, 3, bases=[3])
        eventually(lambda: one.root() == [1, 3], "step 2 is rolled back")


def test_staging_of_another_remote_directory_at_the_same_url_is_moved_aside(one, other):
    one.run(100, 101)
    # Somebody empties the bucket to start over.
    store = open_at(one).store
    store.delete(store.keys(""))
    with pytest.warns(UserWarning, match=r"steps \[100, 101\], .* another checkpoint"):
        with one.manager() as manager:
            assert manager.latest_step() is None
    assert len([*one.stage.path.glob("aside/*/*")]) == 2
    one.begin(1)
    one.run(100)
    store.delete(store.keys(""))
    other.begin(7)
    other.run(1, 2)
    with pytest.warns(UserWarning, match=r"steps \[100\], .* another checkpoint"):
        one.resumed(2, like=other)
    assert one.root() == [1, 2]


def test_an_uploader_without_delete_permission_ends_and_reports_it(one, alone, monkeypatch):
    one.manager(wait_for="staging").close()
    open_at(one).store.put("saves/2.1.0123456789ab/x", b"of an upload that was cut")
    one.run(1, wait_for="staging")
    listed: list[str] = []

    def refuse(self, wanted) -> None:
        if [*wanted]:
            raise Refused("expected to delete, found: PERMISSION_DENIED")

    def count(self, folder: str, *, after: str = "", keys=KvStore.keys) -> list[str]:
        listed.append(folder)
        return keys(self, folder, after=after)

    with monkeypatch.context() as patched:
        patched.setattr(KvStore, "delete", refuse)
        patched.setattr(KvStore, "keys", count)
        upload_all(one)
    assert one.root() == [1]
    assert sum(folder.endswith("saves") for folder in listed) == 1
    status = replicator.status_of(one.stage)
    assert status is not None and status.waiting == 0 and "PERMISSION_DENIED" in str(status.problem)


def test_an_uploader_survives_a_full_staging_directory(one, alone, monkeypatch):
    one.run(1, 2, 3, bases=(2, 3), wait_for="staging")
    with monkeypatch.context() as patched:
        fill(patched, one)
        upload_all(one)
    # Only uploaded saves make room.
    assert one.root() == [1, 2, 3]
    status = replicator.status_of(one.stage)
    assert status is not None and status.waiting == 3
    one.run(4, wait_for="staging", bases=[4])
    upload_all(one)
    assert one.root() == [1, 2, 3, 4]
    status = replicator.status_of(one.stage)
    assert status is not None and (status.waiting, status.problem) == (0, None)


def test_an_upload_that_fails_repeatedly_sends_each_file_once(one, alone, monkeypatch):
    one.run(1, wait_for="staging")
    put, sent, broken = KvStore.put, list[str](), 0

    def breaking(self, key: str, data, *, absent: bool = False) -> None:
        nonlocal broken
        if key.endswith("commit.msgpack") and broken < 3:
            broken += 1
            raise Unanswered("the network broke")
        sent.append(key)
        put(self, key, data, absent=absent)

    monkeypatch.setattr(KvStore, "put", breaking)
    monkeypatch.setattr(cursor, "BACK_OFF_SECS", (0.01, 0.02))
    upload_all(one)
    assert broken == 3 and one.root() == [1]
    files_sent = [key for key in sent if key.startswith("saves/")]
    assert len(files_sent) == len({*files_sent})
    assert len({key.split("/")[1] for key in open_at(one).keys() if key.startswith("saves/")}) == 1


def test_uploads_whose_commits_get_no_answer_are_reported_once(one, alone, monkeypatch):
    one.run(1, 2, 3, bases=(2,), wait_for="staging")

    def unanswered(self, key: str, data, *, absent: bool = False, put=KvStore.put) -> None:
        put(self, key, data, absent=absent)
        if absent:  # A journal entry.
            raise Unanswered("the network broke")

    monkeypatch.setattr(KvStore, "put", unanswered)
    monkeypatch.setattr(cursor, "BACK_OFF_SECS", (0.01, 0.02))
    upload_all(one)
    assert one.root() == [1, 2, 3]
    uploads = one.stage.progress(one.stage.orders().holder).recent
    assert [upload.step for upload in uploads] == [1, 2, 3]
    assert all(upload.bytes_sent > 0 and upload.objects > 2 for upload in uploads)


def test_uploaded_files_of_a_rolled_back_save_are_swept(one, alone, monkeypatch):
    def breaking(self, key: str, data, *, absent: bool = False, put=KvStore.put) -> None:
        if key.endswith("commit.msgpack") and "/2." in key:
            raise Unanswered("the network broke")
        put(self, key, data, absent=absent)

    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 1, 2, bases=(1, 2))
        work = Uploader(one.stage)
        with monkeypatch.context() as patched:
            patched.setattr(KvStore, "put", breaking)
            assert work.step()
            with pytest.raises(Unanswered):
                work.step()
        assert any(key.startswith("saves/2.") for key in open_at(one).keys())
        with pytest.warns(UserWarning, match="resuming from step 1"):
            one.restore(manager, 1)
            one.saves(manager, 3, bases=[3])
    upload_all(one)
    work.run(Trainer(is_gone=True))
    assert one.root() == [1, 3]
    assert not any(key.startswith("saves/2.") for key in open_at(one).keys())


def test_a_reader_does_not_restore_a_step_that_was_replaced_since_its_last_read(node):
    one, reading = node(), node()
    with one.manager() as manager:
        one.saves(manager, 1, 2, 3)
        with reading.manager(access="read") as reader:
            looking = inspect.open(one.url, endpoint=one.endpoint)

            def reads_newest() -> bool:
                reading.restore(reader, 3)
                inspected = looking.at(3)["words"][[0, 9]]
                return same(reading.held(), one.held()) and np.array_equal(
                    inspected, one.held()["words"][[0, 9]]
                )

            assert reads_newest()
            one.restore(manager, 2)
            words = one.state["tables"]["words"] + 100
            one.state = {"tables": {"words": words}, "bias": one.state["bias"]}
            one.touched = touched.mark(one.touched, {"words": jnp.arange(ROWS)})
            with pytest.warns(UserWarning, match="resuming from step 2"):
                one.saves(manager, 3)
            assert reads_newest()


def test_a_step_that_is_being_read_is_not_evicted_from_staging(one):
    with one.manager(keep_local=1) as manager:
        one.saves(manager, 1, bases=[1])
        with manager._run.root.local(1, "dense") as folder:
            saves_each(one, manager, 2, 3, bases=(2, 3))
            assert folder.is_relative_to(one.stage.steps) and [*folder.iterdir()]
            assert 1 in one.local() and 2 not in one.local()
    # Steps uploaded after the last save are evicted as well.
    assert one.local() == [3]


def test_a_first_start_killed_in_its_probe_can_be_repeated(one):
    class Killed(BaseException):
        pass

    with mock.patch.object(KvStore, "delete", side_effect=Killed), pytest.raises(Killed):
        one.manager()
    assert [key.startswith("journal/probe.") for key in open_at(one).keys()] == [True]
    one.run(1)
    assert one.root() == [1]
    other = Node(one.url + "/beside", one.endpoint, one.stage.path.with_name("beside"))
    open_at(other).store.put("journal/notes", b"")
    with pytest.raises(ForeignDirectory):
        other.manager()


def test_an_uploader_imports_nothing_from_its_trainers_working_directory(
    one, tmp_path, monkeypatch
):
    (tmp_path / "random.py").write_text("raise ImportError('of the trainer')")
    monkeypatch.chdir(tmp_path)
    one.run(1)
    assert one.root() == [1]


def test_without_a_home_directory_the_staging_directory_is_required(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    homeless = mock.Mock(side_effect=RuntimeError("Could not determine home directory."))
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(OptionError, match=r"Tiers.staging_dir: expected a home directory"):
        default_stage("s3://bucket/run", None)
