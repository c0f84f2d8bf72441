# SPDX-License-Identifier: Apache-2.0
"""Staging in memory with extents on disk: staged saves survive a power cut."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servers
from test_tiers import Node, eventually, same, staged, without_promoter

import deltackpt
from deltackpt.errors import InUse, OptionError, SaveFailed, StorageError, WaitTimeout
from deltackpt.options import Tiers, Timeouts
from deltackpt.tiers import Extents
from deltackpt.tiers.extent_store import ExtentFile

EXTENT = 64 << 10
_numbers = itertools.count()


class ExtentNode(Node):
    """A machine whose staging directory is lost in a power cut, but not its extents."""

    def manager(self, **options: Any) -> deltackpt.CheckpointManager:
        given = Extents(directory=str(self.extents), nbytes=40 * EXTENT, extent_bytes=EXTENT)
        return super().manager(**{"extents": given, "wait_for": "staging", **options})

    @property
    def extents(self) -> Path:
        return self.stage.path.with_name(f"{self.stage.path.name}-extents")

    def cut_power(self) -> None:
        """Discards everything in memory."""
        shutil.rmtree(self.stage.path)

    def begin_anew(self) -> None:
        self.begin(99)


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as found:
        with servers.environment_of(found):
            yield found


@pytest.fixture
def node(s3, tmp_path) -> Iterator[Callable[[], ExtentNode]]:
    url = s3.bucket(f"extents{next(_numbers)}") + "/some/run"
    made = (ExtentNode(url, s3.endpoint, tmp_path / f"node{number}") for number in range(9))
    yield lambda: next(made)


def test_saves_that_were_never_uploaded_are_restored_after_a_power_cut(node, monkeypatch):
    one = node()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            for step in range(4):
                one.save(manager, step, metrics={"loss": float(step)})
            manager.wait_until_finished()
    one.cut_power()
    expected = one.held()
    one.begin_anew()
    with one.manager(wait_for="remote") as manager:
        found = one.restore(manager)
        assert (found.step, found.source) == (3, ("extents",) * 4)
        assert same(one.held(), expected)
        one.save(manager, 4)
        manager.wait_until_finished()
        assert one.root() == [0, 1, 2, 3, 4]
        assert manager.restore(4, jax.eval_shape(lambda: one.state)).source == (
            *("extents",) * 4,
            "staging",
        )


def test_uploaded_saves_are_read_from_the_extents_if_staging_is_lost(node):
    one = node()
    with one.manager(wait_for="remote") as manager:
        for step in range(3):
            one.save(manager, step)
    expected = one.held()
    one.cut_power()
    with one.manager() as manager:
        assert one.restore(manager).source == ("extents",) * 3
        assert same(one.held(), expected)
    one.cut_power()
    shutil.rmtree(one.extents)
    with one.manager() as manager:
        assert one.restore(manager).source == ("directory",) * 3
        assert same(one.held(), expected)


def test_rolled_back_saves_do_not_return(node, monkeypatch):
    one = node()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            for step in range(4):
                one.save(manager, step)
            one.restore(manager, 1)
            with pytest.warns(UserWarning, match="rolled-back"):
                one.save(manager, 2)
            manager.wait_until_finished()
        expected = one.held()
        one.cut_power()
        with one.manager() as manager:
            assert manager.all_steps() == [0, 1, 2]
            one.restore(manager)
            assert same(one.held(), expected)
            one.restore(manager, 0)
            with pytest.warns(UserWarning, match="rolled-back"):
                one.save(manager, 1)
            manager.wait_until_finished()
        expected = one.held()
        one.cut_power()
        with one.manager() as manager:
            assert manager.all_steps() == [0, 1]
            one.restore(manager)
            assert same(one.held(), expected)


def test_saves_that_another_trainer_continued_without_are_moved_aside(node, monkeypatch):
    one, two = node(), node()
    with one.manager(wait_for="remote") as manager:
        one.save(manager, 0)
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            one.restore(manager)
            one.save(manager, 1)
    with two.manager(wait_for="remote") as manager:
        two.restore(manager)
        two.save(manager, 2)
    one.cut_power()
    with pytest.warns(UserWarning, match="step 1 is superseded: training continued without"):
        manager = one.manager()
    with manager:
        assert sorted(manager.all_steps()) == [0, 2]
        assert len([*one.stage.path.glob("aside/*/1/*/embeddings")]) == 1
    one.cut_power()
    with one.manager() as manager:  # The extents no longer have it.
        assert sorted(manager.all_steps()) == [0, 2]


def test_a_step_damaged_in_staging_is_read_from_the_extents(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        for step in range(3):
            one.save(manager, step)
        manager.wait_until_finished()
        for path in (one.stage.steps / "1").rglob("*"):
            if path.is_file() and path.name != "manifest.0.msgpack":
                path.write_bytes(b"altered")
        expected = one.held()
        with pytest.warns(UserWarning, match="step 1 is damaged in the staging directory"):
            found = one.restore(manager)
        assert (found.step, found.source) == (2, ("staging", "extents", "staging"))
        assert same(one.held(), expected)


def test_full_extents_drop_uploaded_saves_first(node):
    one = node()
    small = Extents(directory=str(one.extents), nbytes=12 * EXTENT, extent_bytes=EXTENT)
    with one.manager(extents=small, wait_for="remote") as manager:
        for step in range(30):
            one.save(manager, step)
        manager.wait_until_finished()
        held = staged(manager)._client.recoverable()
        assert len(held) <= 12 and max(one.step for one in held) == 29
        expected = one.held()
    one.cut_power()
    with one.manager(extents=small) as manager:
        found = one.restore(manager)
        assert found.step == 29 and set(found.source) == {"directory", "extents"}
        assert same(one.held(), expected)


def test_full_extents_wait_for_uploads_until_the_manager_is_closed(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    small = Extents(directory=str(one.extents), nbytes=12 * EXTENT, extent_bytes=EXTENT)
    manager = one.manager(extents=small, timeouts=Timeouts(close_secs=1.0))
    for step in range(12):
        one.save(manager, step)
    eventually(lambda: not manager.is_saving_in_progress(), "all are in the stage")
    manager.wait_until_finished()
    one.save(manager, 12)
    with pytest.raises(WaitTimeout):
        manager.close()
    assert one.local() == [*range(13)]


def test_extents_that_are_too_small_are_refused_at_the_first_base(node, monkeypatch):
    one = node()
    one.state["tables"]["words"] = jnp.zeros((60_000, 4), jnp.float32)
    one.touched = deltackpt.touched.init(one.state["tables"])
    small = Extents(directory=str(one.extents), nbytes=16 * EXTENT, extent_bytes=EXTENT)
    without_promoter(monkeypatch)
    manager = one.manager(extents=small)
    manager.save(0, one.state, touched=one.touched)
    with pytest.raises(SaveFailed, match="two bases of .* and four deltas"):
        manager.wait_until_finished()
    manager.close()


def test_extents_belong_to_one_remote_directory_and_one_trainer(node, s3, tmp_path, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        one.save(manager, 0)
        other = ExtentNode(s3.bucket("of-another-root") + "/run", s3.endpoint, one.stage.path)
        shared = Extents(directory=str(one.extents), nbytes=40 * EXTENT, extent_bytes=EXTENT)
        other.stage = type(one.stage)(tmp_path / "elsewhere")
        with pytest.raises(InUse):
            other.manager(extents=shared)
    healthy = ExtentNode(other.url, s3.endpoint, tmp_path / "healthy")
    with healthy.manager() as trainer:
        healthy.save(trainer, 0)
        with pytest.raises(OptionError, match="found saves of s3://extents"):
            other.manager(extents=shared)
        healthy.save(trainer, 1)
        trainer.wait_until_finished()
    with one.manager() as manager:
        one.restore(manager)


def test_a_write_error_in_the_extents_fails_the_save_and_loses_no_row(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()

        def refuse(self, pack):
            raise StorageError("extents: expected to write, found an input/output error")

        with monkeypatch.context() as patch:
            patch.setattr("deltackpt.tiers.extent_store.ExtentFile.put", refuse)
            one.save(manager, 1)
            with pytest.raises(SaveFailed, match="input/output error"):
                manager.wait_until_finished()
        one.save(manager, 2)
        manager.wait_until_finished()
    one.cut_power()
    expected = one.held()
    with one.manager() as manager:
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


def test_a_part_that_other_processes_lack_is_dropped(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        for step in range(2):
            one.save(manager, step)
        manager.wait_until_finished()
        found = staged(manager)
        with pytest.warns(UserWarning, match="expected a part of steps"):
            found.join(lambda keys: [keys, [key for key in keys if key.endswith(".0")]])
        assert {one.step for one in found._client.recoverable()} == {0}
    one.cut_power()
    with one.manager() as manager:
        assert manager.all_steps() == [0]


def test_a_failed_drop_fails_the_save_and_rolled_back_saves_do_not_return(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)

    def refuse(self, labels):
        raise StorageError("extents: expected to write, found an input/output error")

    with one.manager() as manager:
        for step in range(3):
            one.save(manager, step)
        one.restore(manager, 0)
        with monkeypatch.context() as patch:
            patch.setattr("deltackpt.tiers.extent_store.ExtentFile.delete", refuse)
            with pytest.warns(UserWarning, match="rolled-back"), pytest.raises(StorageError):
                one.save(manager, 1)
        one.save(manager, 2)
        manager.wait_until_finished()
        expected = one.held()
    one.cut_power()
    with pytest.warns(UserWarning, match="is superseded: training continued without it"):
        manager = one.manager()
    with manager:
        assert manager.all_steps() == [0, 2]
        one.restore(manager)
        assert same(one.held(), expected)


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


def test_rows_of_both_tiers_are_bit_identical(node):
    one = node()
    with one.manager(wait_for="remote") as manager:
        one.save(manager, 0)
        one.save(manager, 1)
    one.cut_power()
    with one.manager() as manager:
        near = one.restore(manager)
    one.cut_power()
    shutil.rmtree(one.extents)
    with one.manager() as manager:
        far = one.restore(manager)
    for left, right in zip(jax.tree.leaves(near.state), jax.tree.leaves(far.state), strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))


def others_can_read(folder: Path) -> Iterator[str]:
    """Files below a directory that other users can open, if they can enter the directory."""
    for path in sorted(folder.iterdir()):
        mode = path.stat().st_mode
        if path.is_file() and mode & 0o077:
            yield str(path)
        elif path.is_dir() and mode & 0o011:
            yield from others_can_read(path)


@pytest.mark.parametrize(("made_before", "shared"), [(True, False), (False, True)])
def test_only_the_user_can_read_the_files_of_a_run_on_a_node(node, made_before, shared):
    one = node()
    before = os.umask(0)
    try:
        if made_before:  # By a user who deliberately lets others in.
            for folder in (one.stage.path, one.extents):
                folder.mkdir(mode=0o755, parents=True)
        options: dict[str, Any] = {"wait_for": "remote", "shared": shared}
        with one.manager(**options) as manager:
            for step in range(3):
                one.save(manager, step)
            manager.wait_until_finished()
            one.restore(manager, 1)
            with pytest.warns(UserWarning, match="rolled-back"):
                one.save(manager, 2)
        for folder in (one.stage.path, one.extents):
            assert folder.stat().st_mode & 0o777 == (0o755 if made_before else 0o700)
            assert [*others_can_read(folder)] == []
        steps = (one.stage.path if shared else one.stage.path / "process-0") / "steps"
        steps.chmod(0o750)  # The user then lets a group in.
        with one.manager(**options) as manager:
            one.restore(manager)
            one.save(manager, 4)
        assert steps.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)


# ---- restarts, rollbacks, damage and power cuts in a row


def one_save_each_run(one, monkeypatch, count):
    for step in range(count):
        with one.manager() as manager:
            if step:
                one.restore(manager)
            one.save(manager, step)
            manager.wait_until_finished()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_that_reaches_the_extents_late_keeps_earlier_saves(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:  # run 1
        one.save(manager, 0)
        manager.wait_until_finished()
    with one.manager() as manager:  # run 2: committed, but not in the extents (as after a kill)
        one.restore(manager)

        def refuse(self, pack):
            raise StorageError("x: expected y, found z")

        with monkeypatch.context() as patch:
            patch.setattr("deltackpt.tiers.extent_store.ExtentFile.put", refuse)
            one.save(manager, 1)
            with pytest.raises(SaveFailed):
                manager.wait_until_finished()
    with one.manager() as manager:  # run 3
        assert one.restore(manager).step == 1
        one.save(manager, 2)
        manager.wait_until_finished()  # acknowledged
    expected = one.held()
    one.cut_power()
    with one.manager() as manager:
        assert sorted(manager.all_steps()) == [0, 1, 2]
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_bundle_does_not_remove_earlier_ones(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    one_save_each_run(one, monkeypatch, 3)
    one.cut_power()
    path = one.extents / "extents"
    data = bytearray(path.read_bytes())
    place = data.index(b"dckpack1")
    place = data.index(b"dckpack1", place + 8)  # of step 1
    data[place + 40] ^= 1
    path.write_bytes(data)
    with one.manager() as manager:
        assert one.restore(manager).step == 0


@pytest.mark.parametrize("is_base", [False, True], ids=["delta", "base"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rolled_back_saves_that_are_still_remote_are_ignored_after_a_power_cut(
    node, monkeypatch, is_base
):
    one = node()
    with one.manager(wait_for="remote") as manager:
        for step in range(4):
            one.save(manager, step, force_base=is_base and step == 3)
        manager.wait_until_finished()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            one.restore(manager, 1)
            one.save(manager, 2)
            manager.wait_until_finished()  # acknowledged, in the extents
        expected = one.held()
        one.cut_power()
        with one.manager() as manager:
            assert one.restore(manager).step == 2
            assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_staging_lost_is_recovered(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    one_save_each_run(one, monkeypatch, 3)
    expected = one.held()
    shutil.rmtree(one.stage.steps / "0")
    with one.manager() as manager:
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_manifest_damaged_in_staging_is_read_from_the_extents(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        for step in range(3):
            one.save(manager, step)
        manager.wait_until_finished()
    expected = one.held()
    for path in (one.stage.steps / "2").rglob("manifest.0.msgpack"):
        path.write_bytes(b"altered")
    with one.manager() as manager:
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_after_a_rollback_is_uploaded_after_a_power_cut(node, monkeypatch):
    one = node()
    with one.manager(wait_for="remote") as manager:
        for step in range(4):
            one.save(manager, step)
        manager.wait_until_finished()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            one.restore(manager, 1)
            one.save(manager, 2)
            manager.wait_until_finished()  # acknowledged, in the extents
        one.cut_power()
    with one.manager(wait_for="remote") as manager:
        assert one.restore(manager).step == 2
        one.save(manager, 3)
        manager.wait_until_finished()
        assert one.root() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_deleted_step_does_not_remove_earlier_ones(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    for step in range(3):
        with one.manager() as manager:
            if step:
                one.restore(manager)
            one.save(manager, step, force_base=True)
            manager.wait_until_finished()
            if step == 2:
                manager.delete(1)
    one.cut_power()
    with one.manager() as manager:
        assert sorted(manager.all_steps()) == [0, 2]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("appends", [False, True])
def test_after_an_error_during_a_rollback_no_rolled_back_save_returns(node, monkeypatch, appends):
    one = node()
    without_promoter(monkeypatch)
    with one.manager(wal=deltackpt.WalOptions() if appends else None) as manager:
        for step in range(4):
            one.save(manager, step)
        manager.wait_until_finished()
        one.restore(manager, 1)

        def refuse(self, labels):
            raise StorageError("extents: expected to write, found an input/output error")

        state, touched = one.state, one.touched
        with monkeypatch.context() as patch:
            patch.setattr(ExtentFile, "delete", refuse)
            with pytest.raises(StorageError):
                if appends:
                    one.train(2)
                    manager.append(2, one.state, touched=one.touched)
                else:
                    one.save(manager, 2)
        one.state, one.touched = state, touched
        one.save(manager, 2)
        manager.wait_until_finished()  # acknowledged
    expected = one.held()
    one.cut_power()
    with one.manager() as manager:
        assert manager.all_steps() == [0, 1, 2]
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saves_that_are_never_uploaded_do_not_fill_the_extents(node, monkeypatch):
    one = node()
    small = Extents(directory=str(one.extents), nbytes=12 * EXTENT, extent_bytes=EXTENT)
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager(extents=small) as manager:
            for step in range(12):
                one.save(manager, step)
            manager.wait_until_finished()
    for path in (one.stage.steps / "0").rglob("*"):  # Damages one staged file.
        if path.is_file() and path.stat().st_size > 4000:
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
    manager = one.manager(extents=small, timeouts=Timeouts(save_secs=60.0, close_secs=60.0))
    one.restore(manager)
    for step in range(12, 16):
        one.save(manager, step, force_base=True)
        manager.wait_until_finished()
    manager.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_with_a_damaged_header_is_reported(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        for step in range(3):
            one.save(manager, step)
        manager.wait_until_finished()
    one.cut_power()
    path = one.extents / "extents"
    data = bytearray(path.read_bytes())
    place = data.index(b"dckpack1")
    for _ in range(2):
        place = data.index(b"dckpack1", place + 8)  # of step 2, the newest
    data[place - 4096 + 60] ^= 1  # Its header.
    path.write_bytes(data)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with one.manager() as manager:
            assert one.restore(manager).step == 1
    assert told


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_is_refused_again_after_a_write_error_since_it_exists(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()

        def refuse(self, pack):
            raise StorageError("extents: expected to write, found an input/output error")

        state, touched = one.state, one.touched
        with monkeypatch.context() as patch:
            patch.setattr("deltackpt.tiers.extent_store.ExtentFile.put", refuse)
            one.save(manager, 1)
            with pytest.raises(SaveFailed):
                manager.wait_until_finished()
        one.state, one.touched = state, touched
        with pytest.raises(OptionError, match="expected a step above 1"):
            one.save(manager, 1)
        one.save(manager, 2)
        manager.wait_until_finished()
    expected = one.held()
    one.cut_power()
    with one.manager() as manager:
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_repeated_rollbacks_and_power_cuts(node, monkeypatch):
    one = node()
    without_promoter(monkeypatch)
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
def test_saves_repaired_from_the_extents_are_uploaded(node, monkeypatch):
    one = node()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            for step in range(3):
                one.save(manager, step)
            manager.wait_until_finished()
    for path in (one.stage.steps / "0").rglob("*"):
        if path.is_file() and path.stat().st_size > 4000:
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
    with one.manager() as manager:
        eventually(lambda: len(staged(manager)._client.progress().damaged) == 3, "it is told")
        assert one.restore(manager).source[0] == "extents"  # Repaired.
        one.save(manager, 3)
        manager.wait_until_finished()
        eventually(
            lambda: 3 in one.root() or len(staged(manager)._client.progress().damaged) > 3, "x"
        )
    assert one.root() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_abandoned_saves_with_their_own_chain_are_rolled_back_remotely(node, monkeypatch):
    one = node()
    with one.manager(wait_for="remote") as manager:
        for step in range(4):
            one.save(manager, step, force_base=step >= 2)
        manager.wait_until_finished()
    with monkeypatch.context() as patch:
        without_promoter(patch)
        with one.manager() as manager:
            one.restore(manager, 1)
            one.save(manager, 2)
            one.save(manager, 3)
            one.save(manager, 4)
            manager.wait_until_finished()
        expected = one.held()
        one.cut_power()
    with one.manager(wait_for="remote") as manager:
        assert one.restore(manager).step == 4
        assert same(one.held(), expected)
        one.save(manager, 5)
        manager.wait_until_finished()
        assert one.root() == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("idle_starts", [0, 1])
def test_extents_that_were_unavailable_do_not_bring_back_abandoned_saves(
    node, monkeypatch, idle_starts
):
    one = node()
    without_promoter(monkeypatch)
    with one.manager() as manager:
        for step in range(4):
            one.save(manager, step, force_base=step == 3)
        manager.wait_until_finished()
    with one.manager(extents=None) as manager:  # The disk is unavailable.
        one.restore(manager, 1)
        one.save(manager, 2)
        manager.wait_until_finished()  # acknowledged, in staging, which is never lost
    expected = one.held()
    for _ in range(idle_starts):
        with one.manager(extents=None) as manager:  # A start that saves nothing.
            assert one.restore(manager).step == 2
    with one.manager() as manager:  # The disk is back.
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)
