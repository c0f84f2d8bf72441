# SPDX-License-Identifier: Apache-2.0
"""A checkpoint or WAL directory that is moved or removed under a trainer is never recreated."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model
import orbax.checkpoint as ocp
import pytest
from test_wal import assert_found_again, quiet
from test_wal_disk import options

import deltackpt
from deltackpt import RecoveryPoint
from deltackpt.errors import DeltackptError, SaveFailed, StorageError
from deltackpt.testing import STEP_FILES, Disk, TrainingRun, states

#: Calls of ``append()`` after which a failing WAL must have raised.
ENOUGH = 6


@pytest.fixture
def run(tmp_path) -> TrainingRun:
    return TrainingRun(tmp_path / "root", options=options("process"))


def told(manager: Any, run: TrainingRun) -> DeltackptError:
    """Appends, and waits for each record, until an error is raised."""
    for _ in range(ENOUGH):
        try:
            run.append()
            manager.wait_appended()
        except DeltackptError as error:
            return error
    raise AssertionError("nothing was said")


def assert_not_made_anew_while_moved(
    manager: Any, run: TrainingRun, folder: Path, match: str
) -> None:
    """Moves a folder of the WAL away and back; calls fail in between and then work again."""
    away = folder.with_name("away")
    folder.rename(away)
    for _ in range(ENOUGH):
        assert told(manager, run).code in ("storage", "append-failed")
    with pytest.raises(StorageError, match=match):
        run.save()
    assert not folder.exists()
    away.rename(folder)
    for _ in range(ENOUGH):
        with contextlib.suppress(DeltackptError):  # A background failure is raised once.
            run.append()
            manager.wait_appended()
    assert manager.wait_appended() is not None


def test_a_directory_that_is_moved_during_a_save_is_not_recreated(tmp_path, run):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    with run.open(tables=states.tables("lossless")), quiet():
        run.save_initial()
        with Disk(root) as disk:
            disk.on("open", lambda _: root.rename(elsewhere), STEP_FILES + ".*/layer", times=1)
            with pytest.raises(SaveFailed):
                run.save()
        assert not root.exists()
        elsewhere.rename(root)
        assert run.save().kind == "delta"
    assert_found_again(run)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 28])
def test_a_moved_directory_is_not_recreated_and_works_again_once_moved_back(
    tmp_path, run, durability, segment_bytes
):
    root = tmp_path / "root"
    given = options(durability, backend=deltackpt.wal.LocalWal(segment_bytes=segment_bytes))
    with run.open(given) as manager, quiet():
        run.save_initial()
        run.append()
        manager.wait_appended()
        assert_not_made_anew_while_moved(manager, run, root, "moved or removed")
    assert_found_again(run)


def test_a_removed_directory_is_not_recreated(tmp_path, run):
    root = tmp_path / "root"
    handlers = {
        "embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS),
        "extra": ocp.PyTreeCheckpointHandler(),
    }
    manager = run.manager = deltackpt.CheckpointManager(
        root, handlers=handlers, options=options("process")
    )
    with quiet():
        run.save_initial()
        run.append()
        manager.wait_appended()
        shutil.rmtree(root)
        told(manager, run)
        extra = {"extra": ocp.args.PyTreeSave({"one": 1.0})}
        for _ in range(2):
            with pytest.raises(DeltackptError):
                manager.save(run.train(), run.state, touched=run.touched, items=extra)
        with contextlib.suppress(DeltackptError):
            manager.close()
    assert not root.exists()


def _heads(root: Path, apart: Path) -> None:
    shutil.rmtree(root / "log")


def _apart(root: Path, apart: Path) -> None:
    [run] = apart.iterdir()
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("apart", "remove"),
    [(False, _heads), (True, _heads), (True, _apart)],
    ids=["heads", "heads of a log elsewhere", "log elsewhere"],
)
def test_a_removed_wal_is_restarted_and_its_acknowledged_records_exist(
    tmp_path, run, apart, remove: Callable[[Path, Path], None]
):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    backend = deltackpt.wal.LocalWal(directory=str(elsewhere) if apart else None)
    given = options("process", backend=backend)
    with run.open(given) as manager, quiet():
        run.save_initial()
        run.append()
        manager.wait_appended()
        remove(root, elsewhere)
        acknowledged = None
        for _ in range(ENOUGH):
            with contextlib.suppress(DeltackptError):
                run.append()
                acknowledged = manager.wait_appended()
        assert isinstance(acknowledged, RecoveryPoint) and acknowledged.step == run.step
    assert_found_again(run)


def test_the_directory_of_a_wal_elsewhere_is_not_recreated(tmp_path, run):
    _root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    given = options("process", backend=deltackpt.wal.LocalWal(directory=str(elsewhere)))
    with run.open(given) as manager, quiet():
        run.save_initial()
        run.append()
        manager.wait_appended()
        match = "elsewhere: .* moved or removed"
        assert_not_made_anew_while_moved(manager, run, elsewhere, match)
    assert_found_again(run)
