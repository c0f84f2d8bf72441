# SPDX-License-Identifier: Apache-2.0
"""Staging in memory with extents on disk: staged saves survive a power cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from damages import flip
from test_tiers import Node, alone, eventually, one, s3, same, staged, without_uploader

import deltackpt
from deltackpt.errors import InUse, OptionError, SaveFailed, StorageError, WaitTimeout
from deltackpt.options import Tiers, Timeouts
from deltackpt.tiers import Extents
from deltackpt.tiers.extent_store import ExtentFile

__all__ = ["alone", "one", "s3"]

EXTENT = 64 << 10
_numbers = itertools.count()
_MAGIC = re.compile(b"dckpack1")


class ExtentNode(Node):
    """A machine whose staging directory is lost in a power cut, but not its extents."""

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        return super().manager(**{"extents": self.of_size(40), "wait_for": "staging", **options})

    def of_size(self, extents: int) -> Extents:
        size = extents * EXTENT
        return Extents(directory=str(self.extents), nbytes=size, extent_bytes=EXTENT)

    def bundle(self, number: int) -> int:
        """Where a bundle starts in the extents."""
        return [
            found.start() for found in _MAGIC.finditer((self.extents / "extents").read_bytes())
        ][number]

    @property
    def extents(self) -> Path:
        return self.stage.path.with_name(f"{self.stage.path.name}-extents")

    def cut_power(self) -> None:
        """Discards everything in memory."""
        shutil.rmtree(self.stage.path)

    def after_power_cut(self, step: int, steps: list[int] | None = None, **options: Any) -> Any:
        self.cut_power()
        return self.resumed(step, steps, **options)


@contextlib.contextmanager
def failing(method: str) -> Iterator[None]:
    """Calls of a method of the extents fail with an I/O error."""

    def refuse(self, _):
        raise StorageError("extents: expected to write, found an input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtentFile, method, refuse)
        yield


def damage_staged(one: ExtentNode, step: int) -> None:
    """Flips a bit in the large files of a staged step."""
    for path in (one.stage.steps / str(step)).rglob("*"):
        if path.is_file() and path.stat().st_size > 4000:
            flip(path, 100)


@pytest.fixture
def node(s3, tmp_path) -> Iterator[Callable[[], ExtentNode]]:
    url = s3.bucket(f"extents{next(_numbers)}") + "/some/run"
    made = (ExtentNode(url, s3.endpoint, tmp_path / f"node{number}") for number in range(9))
    yield lambda: next(made)


def test_uploaded_saves_are_read_from_the_extents_if_staging_is_lost(one):
    one.run(0, 1, 2, wait_for="remote")
    assert one.after_power_cut(2).source == ("extents",) * 3
    shutil.rmtree(one.extents)
    assert one.after_power_cut(2).source == ("directory",) * 3


def test_saves_that_another_trainer_continued_without_are_moved_aside(node, monkeypatch):
    one, two = node(), node()
    one.run(0, wait_for="remote")
    with monkeypatch.context() as patch:
        without_uploader(patch)
        one.run(1)
    two.run(2, wait_for="remote")
    one.cut_power()
    with pytest.warns(UserWarning, match="step 1 is superseded: training continued without"):
        manager = one.manager()
    with manager:
        assert sorted(manager.all_steps()) == [0, 2]
        assert len([*one.stage.path.glob("aside/*/1/*/embeddings")]) == 1
    one.cut_power()
    with one.manager() as manager:  # The extents no longer have it.
        assert sorted(manager.all_steps()) == [0, 2]


def test_a_step_damaged_in_staging_is_read_from_the_extents(one, alone):
    with one.manager() as manager:
        one.saves(manager, 0, 1, 2)
        for path in (one.stage.steps / "1").rglob("*"):
            if path.is_file() and path.name != "manifest.0.msgpack":
                path.write_bytes(b"altered")
        expected = one.held()
        with pytest.warns(UserWarning, match="step 1 is damaged in the staging directory"):
            found = one.restore(manager)
        assert (found.step, found.source) == (2, ("staging", "extents", "staging"))
        assert same(one.held(), expected)


def test_full_extents_drop_uploaded_saves_first(one):
    small = one.of_size(12)
    with one.manager(extents=small, wait_for="remote") as manager:
        one.saves(manager, *range(30))
        held = {one.name.save_id for one in staged(manager).replicas.offers()}
        assert len(held) <= 12 and max(one.step for one in held) == 29
    assert set(one.after_power_cut(29, extents=small).source) == {"directory", "extents"}


def test_full_extents_wait_for_uploads_until_the_manager_is_closed(one, alone):
    manager = one.manager(extents=one.of_size(12), timeouts=Timeouts(close_secs=10.0))
    one.saves(manager, *range(12))
    one.save(manager, 12)
    with pytest.raises(WaitTimeout):
        manager.close()
    assert one.local() == [*range(13)]


def test_extents_that_are_too_small_are_refused_at_the_first_base(one, monkeypatch):
    one.state["tables"]["words"] = jnp.zeros((60_000, 4), jnp.float32)
    one.touched = deltackpt.touched.init(one.state["tables"])
    without_uploader(monkeypatch)
    manager = one.manager(extents=one.of_size(16))
    manager.save(0, one.state, touched=one.touched)
    with pytest.raises(SaveFailed, match="two bases of .* and four deltas"):
        manager.wait_until_finished()
    manager.close()


def test_extents_belong_to_one_remote_directory_and_one_trainer(one, s3, tmp_path, alone):
    with one.manager() as manager:
        one.save(manager, 0)
        other = ExtentNode(s3.bucket("of-another-root") + "/run", s3.endpoint, one.stage.path)
        shared = one.of_size(40)
        other.stage = type(one.stage)(tmp_path / "elsewhere")
        with pytest.raises(InUse):
            other.manager(extents=shared)
    healthy = ExtentNode(other.url, s3.endpoint, tmp_path / "healthy")
    with healthy.manager() as trainer:
        healthy.save(trainer, 0)
        with pytest.raises(OptionError, match="found saves of s3://extents"):
            other.manager(extents=shared)
        healthy.saves(trainer, 1)
    with one.manager() as manager:
        one.restore(manager)


def test_after_a_write_error_in_the_extents_no_row_is_lost(one, alone):
    with one.manager() as manager:
        one.saves(manager, 0)
        state, touched = one.state, one.touched
        with failing("put"):
            one.save(manager, 1)
            with pytest.raises(SaveFailed, match="input/output error"):
                manager.wait_until_finished()
        one.state, one.touched = state, touched
        with pytest.raises(OptionError, match="expected a step above 1"):  # It is committed.
            one.save(manager, 1)
        one.saves(manager, 2)
    one.after_power_cut(2)


def test_a_shard_that_other_processes_lack_is_dropped(one, alone):
    with one.manager() as manager:
        one.saves(manager, 0, 1)
        found = staged(manager)
        with pytest.warns(UserWarning, match="expected a shard of steps"):
            found.join(lambda keys: [keys, [key for key in keys if key.endswith(".0")]])
        assert {one.name.step for one in found.replicas.offers()} == {0}
    one.cut_power()
    with one.manager() as manager:
        assert manager.all_steps() == [0]


def test_a_failed_drop_fails_the_save_and_rolled_back_saves_do_not_return(one, alone):
    with one.manager() as manager:
        one.saves(manager, 0, 1, 2)
        one.restore(manager, 0)
        with failing("delete"), pytest.warns(UserWarning, match="rolled-back"):
            with pytest.raises(StorageError):
                one.save(manager, 1)
        one.saves(manager, 2)
    with pytest.warns(UserWarning, match="is superseded: training continued without it"):
        one.after_power_cut(2, [0, 2])


def test_invalid_extents_are_refused_by_name():
    for wrong, match in (
        ({"nbytes": 5 << 20, "extent_bytes": 1 << 20}, "Extents.nbytes"),
        ({"nbytes": 1 << 30, "extent_bytes": 5000}, "Extents.extent_bytes"),
        ({"nbytes": 1 << 30, "extent_bytes": 4096}, "Extents.extent_bytes"),
    ):
        with pytest.raises(OptionError, match=match):
            Extents(directory="/nowhere", **wrong)
    with pytest.raises(OptionError, match=r"Tiers.extents: expected a deltackpt.tiers.Extents"):
        Tiers(extents="/nvme/extents")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"Tiers.peers: expected a deltackpt.tiers.Copies or"):
        Tiers(peers=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="peers to wait for"):
        Tiers(wait_for="peers")


def others_can_read(folder: Path) -> Iterator[str]:
    """Files below a directory that other users can open, if they can enter the directory."""
    for path in sorted(folder.iterdir()):
        mode = path.stat().st_mode
        if path.is_file() and mode & 0o077:
            yield str(path)
        elif path.is_dir() and mode & 0o011:
            yield from others_can_read(path)


@pytest.mark.parametrize(("made_before", "shared"), [(True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:.*rolled-back")
def test_only_the_user_can_read_the_files_of_a_run_on_a_node(one, made_before, shared):
    before = os.umask(0)
    try:
        if made_before:  # By a user who deliberately lets others in.
            for folder in (one.stage.path, one.extents):
                folder.mkdir(mode=0o755, parents=True)
        options: dict[str, Any] = {"wait_for": "remote", "shared": shared}
        one.run(0, 1, 2, **options)
        one.run(2, start=1, **options)
        for folder in (one.stage.path, one.extents):
            assert folder.stat().st_mode & 0o777 == (0o755 if made_before else 0o700)
            assert [*others_can_read(folder)] == []
        steps = (one.stage.path if shared else one.stage.path / "process-0") / "steps"
        steps.chmod(0o750)  # The user then lets a group in.
        one.run(4, **options)
        assert steps.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


# ---- restarts, rollbacks, damage and power cuts in a row


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_bundle_does_not_remove_earlier_ones(one, alone):
    for step in range(3):
        one.run(step)
    one.cut_power()
    flip(one.extents / "extents", one.bundle(1) + 40)
    with one.manager() as manager:
        assert one.restore(manager).step == 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_with_a_damaged_header_is_reported(one, alone):
    one.run(0, 1, 2)
    one.cut_power()
    flip(one.extents / "extents", one.bundle(2) - 4096 + 60)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        with one.manager() as manager:
            assert one.restore(manager).step == 1
    assert reported


@pytest.mark.parametrize("lost", ["step", "manifest"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_staging_lost_is_read_from_the_extents(one, alone, lost):
    for step in range(3):
        one.run(step)
    if lost == "step":
        shutil.rmtree(one.stage.steps / "0")
    else:
        for path in (one.stage.steps / "2").rglob("manifest.0.msgpack"):
            path.write_bytes(b"altered")
    one.resumed(2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("appends", [False, True])
def test_after_an_error_during_a_rollback_no_rolled_back_save_returns(one, alone, appends):
    with one.manager(wal=deltackpt.WalOptions() if appends else None) as manager:
        one.saves(manager, 0, 1, 2, 3)
        one.restore(manager, 1)
        state, touched = one.state, one.touched
        with failing("delete"), pytest.raises(StorageError):
            if appends:
                one.train(2)
                manager.append(2, one.state, touched=one.touched)
            else:
                one.save(manager, 2)
        one.state, one.touched = state, touched
        one.saves(manager, 2)
    one.after_power_cut(2, [0, 1, 2])


@pytest.mark.parametrize("appends", [False, True])
def test_a_rollback_whose_warning_is_an_error_is_complete(node, monkeypatch, appends):
    one = node()
    without_uploader(monkeypatch)
    with one.manager(wal=deltackpt.WalOptions() if appends else None) as manager:
        one.saves(manager, 0, 1, 2, 3)
        one.restore(manager, 1)
        with pytest.raises(UserWarning, match=r"later steps \[2, 3\] were moved to rolled-back"):
            if appends:
                one.train(2)
                manager.append(2, one.state, touched=one.touched)
            else:
                one.save(manager, 2)
        one.saves(manager, 5)
    one.after_power_cut(5, [0, 1, 5] if appends else [0, 1, 2, 5])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saves_that_are_never_uploaded_do_not_fill_the_extents(one, monkeypatch):
    small = one.of_size(12)
    with monkeypatch.context() as patch:
        without_uploader(patch)
        one.run(*range(12), extents=small)
    damage_staged(one, 0)
    with one.manager(extents=small, timeouts=Timeouts(save_secs=60.0, close_secs=60.0)) as manager:
        one.restore(manager)
        for step in range(12, 16):
            one.saves(manager, step, bases=[step])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_repeated_rollbacks_and_power_cuts(one, alone):
    expected, step = None, 0
    drawn = random.Random(7)
    line = []
    for _ in range(10):
        with one.manager() as manager:
            if line:
                assert one.restore(manager).step == line[-1]
                assert same(one.held(), expected)
                assert manager.all_steps() == line
            for _ in range(drawn.randint(0, 3)):
                if line and drawn.random() < 0.5:
                    kept = drawn.randint(1, len(line))
                    one.restore(manager, line[kept - 1])
                    line = line[:kept]
                for _ in range(drawn.randint(1, 2)):
                    step = (line[-1] if line else 0) + 1
                    one.save(manager, step, force_base=drawn.random() < 0.3)
                    line.append(step)
                manager.wait_until_finished()
                expected = one.held()
        if drawn.random() < 0.6:
            one.cut_power()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saves_repaired_from_the_extents_are_uploaded(one, monkeypatch):
    with monkeypatch.context() as patch:
        without_uploader(patch)
        one.run(0, 1, 2)
    damage_staged(one, 0)
    with one.manager() as manager:
        damaged = staged(manager).progress
        eventually(lambda: len(damaged().damaged) == 3, "the uploader reports it")
        assert one.restore(manager).source[0] == "extents"  # Repaired.
        one.saves(manager, 3)
        eventually(lambda: 3 in one.root() or len(damaged().damaged) > 3, "it is uploaded")
    assert one.root() == [0, 1, 2, 3]
