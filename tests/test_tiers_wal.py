# SPDX-License-Identifier: Apache-2.0
"""The WAL with buckets: another node resumes from the records of a lost node."""

from __future__ import annotations

import contextlib
import copy
import itertools
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest
import servers
from damages import DAMAGES, HOWS, flip
from made_up_wals import bounds_of, records_in
from test_tiers import (
    Node,
    alone,
    breakable,
    eventually,
    nodes,
    one,
    open_at,
    other,
    s3,
    same,
    server,
)
from test_tiers_trust import upload_all

import deltackpt
from deltackpt import RecoveryPoint, WalOptions, inspect
from deltackpt.errors import DeltackptError, FencedError
from deltackpt.format import naming
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.uploaded_wal import contiguous, pieces_at
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import StorePath
from deltackpt.testing import paused_saves
from deltackpt.tiers import wal_upload
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.replication import ReplicationClient
from deltackpt.tiers.uploader import Uploader
from deltackpt.wal import LocalWal

__all__ = ["alone", "breakable", "one", "other", "s3", "server"]


class Logging(Node):
    """A node whose training appends to the WAL."""

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        return super().manager(**{"wal": WalOptions(), **options})

    def log(self, manager: deltackpt.CheckpointManager, *steps: int) -> None:
        for step in steps:
            self.train(step)
            found = manager.append(step, self.state, touched=self.touched)
            assert found.kind == "full", found
        manager.wait_appended()

    def wal_run(
        self, *steps: int, saved: Any = (), bases: Any = (), start: int | None = None, **more: Any
    ) -> None:
        """A run in staging: resumes, saves the steps in ``saved`` and appends the others."""
        with self.manager(**{"wait_for": "staging", **more}) as manager:
            if manager.all_steps():
                self.restore(manager, start)
            for is_saved, group in itertools.groupby(steps, lambda step: step in saved):
                if not is_saved:
                    self.log(manager, *group)
                    continue
                for step in group:
                    self.save(manager, step, force_base=step in bases)

    def place(self) -> StorePath:
        return open_at(self)

    def journal(self) -> Journal:
        found = Journal(self.place())
        found.state()
        return found

    def points(self) -> list[RecoveryPoint]:
        """Recovery points that a reader of the remote directory finds."""
        return inspect.open(self.url, endpoint=self.endpoint).recovery_points()

    def newest(self) -> int:
        return max((point.step for point in self.points()), default=-1)

    def uploads(self, step: int) -> None:
        eventually(lambda: self.newest() == step, "the WAL reached the root")

    @property
    def logged(self) -> Path:
        return self.stage.steps / naming.LOG


def made(server: servers.Server, tmp_path: Path) -> Iterator[Logging]:
    for each in nodes(server, tmp_path):
        yield Logging(each.url, each.endpoint, each.stage.path)


@pytest.fixture
def node(s3, tmp_path):
    found = made(s3, tmp_path)
    return lambda: next(found)


# ---- a lost node


def test_an_empty_node_continues_from_the_newest_record(server, tmp_path):
    first, second, third = itertools.islice(made(server, tmp_path), 3)
    first.wal_run(*range(8), saved=[0, 4], wait_for="remote")
    first.uploads(7)
    shutil.rmtree(first.stage.path)
    with second.manager() as manager:
        restored = second.restore(manager)
        assert (restored.step, restored.chain[-1], restored.source[-1]) == (7, 4, "wal")
        assert same(second.held(), first.held())
        second.log(manager, 8, 9)
        assert second.restore(manager).step == 9
        second.log(manager, 10)
    second.uploads(10)
    with third.manager() as manager:
        assert third.restore(manager).step == 10
        assert same(third.held(), second.held())
        assert [one.step for one in manager.recovery_points()] == [10, 9, 8, 7, 6, 5, 3, 2, 1]


def test_a_reader_of_the_remote_directory_restores_its_points(node):
    one, reader = node(), node()
    one.wal_run(0, 1, 2, saved=[0], wait_for="remote")
    one.uploads(2)
    with reader.manager(access="read", wal=None) as manager:
        assert reader.restore(manager).step == 2
        assert same(reader.held(), one.held())
        assert reader.restore(manager, 1).step == 1


@pytest.mark.filterwarnings("ignore")
def test_a_moved_staging_directory_is_not_recreated_and_resumes_when_moved_back(alone, one):
    elsewhere = one.stage.path.with_name("elsewhere")

    def log_on(first: int) -> None:
        for step in range(first, first + 4):
            one.train(step)
            with contextlib.suppress(DeltackptError):
                manager.append(step, one.state, touched=one.touched)
                manager.wait_appended()

    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        one.log(manager, 1)
        one.stage.path.rename(elsewhere)
        log_on(2)
        assert not one.stage.path.exists()
        elsewhere.rename(one.stage.path)
        log_on(6)
        one.log(manager, 10)
    one.resumed(10, wait_for="staging")


def test_staging_has_more_of_a_wal_epoch_than_the_remote_directory(alone, one):
    one.wal_run(0, 1, saved=[0])
    upload_all(one)
    one.wal_run(2, 3)
    assert one.newest() == 1
    one.resumed(3, wait_for="staging")
    upload_all(one)
    assert one.newest() == 3


def test_every_record_of_a_killed_trainer_is_uploaded(node):
    one = node()
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from test_tiers_wal import Logging
one = Logging({one.url!r}, {one.endpoint!r}, Path({str(one.stage.path)!r}))
manager = one.manager()
one.save(manager, 0)
one.log(manager, 1, 2, 3, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    one.uploads(4)
    for step in range(5):
        one.train(step)
    node().resumed(4, like=one)


def test_an_uploader_killed_during_an_upload_is_followed_by_another(alone, monkeypatch, one, other):
    monkeypatch.setattr(wal_upload, "SEGMENT_BYTES", 300)  # A record is several pieces.
    with one.manager(wait_for="staging") as manager:
        # An uploader that finds no save ends, and is not started again for this one.
        one.saves(manager, 0)
        upload_all(one)
        one.log(manager, 1, 2, 3)
    put, killed, lock, left = KvStore.put, 0, threading.Lock(), 0

    def dying(self: KvStore, key: str, *args: Any, **options: Any) -> None:
        nonlocal killed, left
        with lock:
            left -= 1
            is_last = left == 0
        if not is_last or killed % 2:
            put(self, key, *args, **options)
        if is_last:  # The uploader dies without an answer.
            killed += 1
            raise KeyboardInterrupt

    while True:
        left = 3
        with contextlib.suppress(KeyboardInterrupt), mock.patch.object(KvStore, "put", dying):
            work = Uploader(one.stage)
            work.trainer = Trainer(is_gone=True)
            while work.step():
                pass
            break
    assert killed > 3
    other.resumed(3, like=one, wait_for="staging")


# ---- several nodes


def test_records_beyond_the_point_that_another_node_resumed_from_are_ignored(alone, one, other):
    one.wal_run(0, 1, 2, saved=[0])
    upload_all(one)
    one.wal_run(3)  # In a WAL epoch that is never uploaded.
    with other.manager(wait_for="staging") as manager:
        assert other.restore(manager).step == 2
        other.begin(7)
        other.restore(manager, 1)
        other.log(manager, 2, 3, 4)
    upload_all(other)
    with pytest.warns(UserWarning, match=r"the WAL of epochs \[1\], which .* does not hold"):
        manager = one.manager(wait_for="staging")
    with manager:
        assert one.restore(manager).step == 4
        assert same(one.held(), other.held())
        one.log(manager, 5)
    assert sorted(path.name for path in one.logged.glob("*.msgpack")) == ["0.msgpack", "2.msgpack"]


def test_a_lease_claim_with_records_alone_counts_as_trained(alone, one, other):
    one.wal_run(0, saved=[0])
    upload_all(one)
    one.wal_run(1, saved=[1])
    other.wal_run(1, 2)
    upload_all(other)
    assert other.newest() == 2
    with pytest.warns(UserWarning, match=r"steps \[1\], which are not at"):
        with pytest.warns(UserWarning, match=r"the WAL of epochs \[1\]"):
            one.resumed(2, like=other, wait_for="staging")


@pytest.mark.parametrize("records", [0, 1])
def test_a_trainer_that_lost_its_lease_writes_no_epoch_header(monkeypatch, records, one, other):
    with one.manager() as manager:
        one.saves(manager, 0)
        with other.manager() as second:
            other.restore(second)
            other.log(second, 1)
        other.uploads(1)
        before = other.journal().known.entry.logs
        one.restore(manager, 0)
        # The uploader notices the loss when it next asks: before the first record, or after some.
        with monkeypatch.context() as patch:
            if records:
                patch.setattr(ReplicationClient, "check_claim", lambda _, **__: None)
                one.log(manager, 1)
            else:
                patch.setattr(
                    ReplicationClient, "check_claim", mock.Mock(side_effect=FencedError("taken"))
                )
                with pytest.raises(FencedError, match="taken"):
                    one.log(manager, 1)
        if records:
            with pytest.raises(FencedError):
                for step in range(2, 2000):
                    one.log(manager, step)
                    time.sleep(0.02)  # The WAL must not reach its limit before.
            # A record was given up, which every wait reports.
            with pytest.raises(FencedError):
                manager.close()
        else:
            manager.close()  # Everything that was saved is durable.
    assert other.journal().known.entry.logs == before
    assert other.newest() == 1


def test_an_epoch_header_is_uploaded_before_the_saves_of_its_run(alone, one):
    one.wal_run(0, 1, 2, 3, saved=[0])
    upload_all(one)
    one.wal_run(2, saved=[2], start=1, wal=None)
    work = Uploader(one.stage)
    while 2 not in one.root():
        heads = [ref.epoch for ref in one.journal().known.entry.logs]
        assert one.newest() == 3 or heads == [0, 1]
        work.step()
    assert [point.step for point in one.points()] == [1]


# ---- removal from the remote directory


def test_the_remote_steps_decide_which_records_are_removed(alone, one):
    one.wal_run(0, 1, 2, saved=[0])
    upload_all(one)
    with one.manager(wait_for="staging") as manager:
        one.restore(manager)
        one.log(manager, 3)
        upload_all(one)
        for step in (4, 6, 8):
            one.save(manager, step)
            one.log(manager, step + 1)
    # Staging is ahead: the remote directory has only the first step and the records above it.
    assert one.root() == [0]
    assert [point.step for point in one.points()] == [3, 2, 1]
    upload_all(one)
    assert one.root() == [0, 4, 6, 8]
    assert one.newest() == 9
    one.wal_run(10, 12, saved=[10, 12])
    upload_all(one)
    [ref] = one.journal().known.entry.logs
    assert ref.epoch == 2
    place = one.place() / naming.LOG
    assert {name.partition("/")[0] for name in place.keys()} == {ref.prefix.partition("/")[2]}
    one.resumed(12, wait_for="staging")


@pytest.mark.parametrize("kept_steps", [None, 1])
def test_a_wal_that_survives_its_node_is_trimmed_by_the_remote_steps(
    alone, one, other, tmp_path, kept_steps
):
    wal = WalOptions(backend=LocalWal(directory=str(tmp_path / "wal"), segment_bytes=1))
    with one.manager(wait_for="staging", wal=wal, max_to_keep=kept_steps) as manager:
        one.save(manager, 0)
        one.log(manager, 1)
        upload_all(one)
        for step in (2, 4, 6):
            one.save(manager, step, force_base=True)
            one.log(manager, step + 1)
        with other.manager(access="read") as reader:  # What a new node finds.
            assert other.restore(reader).step == 7
            assert same(other.held(), one.held())
        kept = len([*tmp_path.glob("wal/**/*.seg")])
        upload_all(one)
        one.saves(manager, 8)  # Trimming begins once it is committed.
        one.log(manager, 9)
        manager.recovery_points()  # Waits until trimming has ended.
        assert len([*tmp_path.glob("wal/**/*.seg")]) < kept
    with other.manager(access="read") as reader:
        assert one.root()[-1] == 6 and other.restore(reader).step == 9
        assert same(other.held(), one.held())


def test_points_below_a_step_with_other_leaves_stay_until_it_is_uploaded(alone, one, other):
    with one.manager(wait_for="staging") as manager:
        for step in (0, 1):
            one.save(manager, step)
        one.log(manager, 2, 3)
        upload_all(one)
        uploaded = copy.copy(one)
        with paused_saves(one.stage.steps):
            for step, kind in ((4, None), (5, "full")):
                one.train(step)
                one.state = {**one.state, "more": jnp.zeros(4)}
                assert manager.append(step, one.state, touched=one.touched).kind == kind
            upload_all(one)
            assert [point.step for point in one.points()] == [3, 2]
            with other.manager(access="read") as reader:
                assert other.restore(reader).step == 3
                assert same(other.held(), uploaded.held())
        manager.wait_appended()
        manager.wait_until_finished()
        upload_all(one)
        assert one.root() == [0, 1, 4] and one.newest() == 5
        assert len(one.journal().known.entry.logs) == 2
        one.train(6)
        manager.save(6, {**one.state, "more": jnp.zeros(4)}, touched=one.touched)
    upload_all(one)
    assert one.root() == [0, 1, 4, 6]
    assert len(one.journal().known.entry.logs) == 1


def test_the_wal_is_replayed_past_a_damaged_remote_step(alone, one, other):
    one.wal_run(0, 1, 2, 3, 4, saved=[0, 3], bases=[3])
    upload_all(one)
    victim = one.place() / one.journal().known.steps[3].prefix
    [key] = [key for key in victim.keys() if key.endswith("manifest.0.msgpack")]
    victim.store.put((victim / key).key, b"altered")
    with pytest.warns(UserWarning, match="point 4 is skipped"):
        found = other.resumed(4, like=one, wait_for="staging")
    assert found.chain == (0,)


# ---- damage


def test_altered_staged_records_are_not_uploaded(alone, one):
    one.wal_run(0, 1, 2, 3, saved=[0])
    [segment] = (one.logged / "0" / "0").glob("*.seg")
    first, second, _ = records_in(segment.parent)
    flip(segment, second.chunks_of(second.rows[0].name, "values")[0][0])
    upload_all(one)
    [ref] = one.journal().known.entry.logs
    [pieces] = pieces_at(one.place() / ref.prefix).values()
    assert contiguous(pieces)[-1].end == bounds_of(segment.read_bytes())[first.number][1]
    assert one.newest() == 1


@pytest.mark.parametrize("altered", [1, 2])
def test_an_altered_remote_epoch_header_is_read_from_its_copy_if_intact(alone, altered, one, other):
    one.wal_run(0, 1, saved=[0])
    upload_all(one)
    [ref] = one.journal().known.entry.logs
    for name in ("head.msgpack", "head.copy.msgpack")[:altered]:
        at = one.place() / ref.prefix / name
        data = bytearray(at.read())
        data[-1] ^= 1
        at.store.put(at.key, bytes(data))
    with other.manager(wait_for="staging") as manager:
        if altered == 1:
            with pytest.warns(UserWarning, match="crc32c .*its copy was read"):
                assert other.restore(manager).step == 1
            return
        with pytest.raises(deltackpt.errors.Damaged, match="crc32c"):
            other.restore(manager)
        found = manager.restore_latest(other.state, wal=False)
        assert found is not None and found.step == 0


@pytest.mark.parametrize("missing", [2, 3])
def test_a_missing_piece_ends_the_wal_before_it_and_is_reported(alone, missing, one, other):
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        for step in (1, 2, 3):
            one.log(manager, step)
            upload_all(one)
    [ref] = one.journal().known.entry.logs
    at = one.place() / ref.prefix
    keys = [key for key in at.keys() if key.endswith(f".{missing}")]
    assert keys
    at.store.delete([(at / key).key for key in keys])
    with other.manager(wait_for="staging") as manager:
        expected = "expected the WAL record of step 3, which was durable"
        with pytest.warns(UserWarning, match=expected):
            found = other.restore(manager)
        assert found.step == missing - 1 and [step for step, _ in found.skipped] == [3]


def test_segments_that_were_not_sent_before_later_steps_are_forgotten(alone, one):
    work = Uploader(one.stage)
    work.trainer = Trainer()
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        for first in range(1, 25, 4):
            one.log(manager, first)
            while work.step():
                pass
            one.saves(manager, *range(first + 1, first + 4))
        while work.step():
            pass
    assert work._wal is not None and sum(map(len, work._wal._sent.values())) <= 2


def dies_before_it_notes(one: Logging) -> StorePath:
    """Uploads the appended records without noting it; returns the newest piece."""
    work = Uploader(one.stage)
    work.trainer = Trainer(is_gone=True)
    with mock.patch.object(wal_upload, "_put_progress", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            while work.step():
                pass
    [ref] = one.journal().known.entry.logs
    at = one.place() / ref.prefix
    [(segment, pieces)] = pieces_at(at).items()
    return at / segment / naming.piece_name(pieces[-1])


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_piece_is_reported_even_if_its_uploader_died_before_noting_it(
    alone, how, one, other
):
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        one.log(manager, 1, 2)
        upload_all(one)
        one.log(manager, 3)
        piece = dies_before_it_notes(one)
        data = DAMAGES[how](piece.read(str(piece)))
        if data is None:
            upload_all(one)  # The next uploader, which has nothing to upload.
            piece.store.delete([piece.key])
        else:
            piece.store.put(piece.key, data)
    with other.manager(wait_for="staging") as manager:
        with pytest.warns(UserWarning, match="recovery point 3 is skipped"):
            found = other.restore(manager)
        assert found.step == 2 and [step for step, _ in found.skipped] == [3]
