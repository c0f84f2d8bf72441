# SPDX-License-Identifier: Apache-2.0
"""Symbolic links in a directory that others may write into: nothing outside of it is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from test_compact import run_compaction
from test_wal import options

from deltackpt.errors import Damaged, DeltackptError
from deltackpt.format import naming
from deltackpt.format.manifest import SaveInfo
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import ObjectKey
from deltackpt.ledger.upload import Unit
from deltackpt.maintenance import compact, garbage, gc
from deltackpt.maintenance.garbage import Retention
from deltackpt.nodes.directory_blobs import INCOMING, DirectoryBlobs
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import FileStore, store_path
from deltackpt.testing import TrainingRun
from deltackpt.tiers.copy_locations import Directory

ITEM = "embeddings"
#: Depth of the folders that are handled individually; that of steps is 1.
DEPTH = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A directory with something for every deletion."""
    root = tmp_path_factory.mktemp("written") / "root"
    run = TrainingRun(root, options=options())
    for _ in range(2):
        with run.open() as manager:
            manager.restore_latest(run.state)
            for _ in range(3):
                run.save()
                run.append()
    run_compaction(root, 3)
    cut = f"{naming.COMPACTED}/3.{'0' * 32}.tmp/{ITEM}"
    for place in (
        f"{naming.REMOVED}1/{ITEM}",
        f"{naming.ROLLED_BACK}/run/7/{ITEM}",
        f"{naming.COPYING}/90/{ITEM}",
        f"{naming.COPYING}/replaced/90/{ITEM}",
        f"8{naming.TEMPORARY}-cut/{ITEM}",
        cut,
    ):
        (root / place).mkdir(parents=True)
        (root / place / "file").write_bytes(place.encode())
    return root


def folders(root: Path) -> list[str]:
    """The folders of a directory that are handled individually."""
    found = (Path(where).relative_to(root) for where, _, _ in os.walk(root))
    return sorted(
        str(one) for one in found if 0 < len(one.parts) <= (1 if one.parts[0].isdigit() else DEPTH)
    )


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(root)): one.read_bytes() for one in root.rglob("*") if one.is_file()
    }


@contextlib.contextmanager
def whatever_comes() -> Iterator[None]:
    """Ignores errors of deltackpt, and warnings."""
    with contextlib.suppress(DeltackptError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def damaged() -> Iterator[None]:
    """The reads of a source that is found damaged."""
    yield
    raise Damaged("a", "b", "c")


def remove_everything(root: Path) -> None:
    """Runs everything that removes files from a directory."""
    with whatever_comes(), contextlib.closing(Root.open(root)) as opened:
        opened.remove_steps([1, 2])
        opened.remove_discarded()
    with whatever_comes(), contextlib.closing(Root.open(root)) as opened:
        opened.collect()  # The compacted base, which no step needs.
        opened.roll_back(4, "another-run")
    with whatever_comes():
        for number in opened.wal_location.numbers():
            garbage.remove_wal_epoch(opened.wal_location, number)
    place, no_info = Directory(root, ITEM, 1), cast(SaveInfo, None)
    for key in (ObjectKey(90, None), ObjectKey(3, ITEM)):
        unit = Unit(key, no_info, store_path(root), {})
        with whatever_comes():
            place.publish(unit)
        with whatever_comes():
            place.add(unit, damaged(), lambda *_: None)
    with whatever_comes(), compact.exclusive(root):
        pass
    with whatever_comes():
        compact.compact(root, step=6)
    with whatever_comes():
        gc.collect(root, rolled_back=True, retention=Retention(keep_last=1), offline=True)


def test_everything_is_removed_without_links(written, tmp_path):
    """Shows that the next test is meaningful."""
    root = Path(shutil.copytree(written, tmp_path / "root"))
    remove_everything(root)
    left = set(folders(root))
    gone = tuple(f"{one}/" for one in (naming.ROLLED_BACK, naming.LOG))
    assert not {one for one in left if one.startswith(gone)}
    assert not {"1", f"{naming.COPYING}/90"} & left
    assert not [one for one in left if naming.TEMPORARY in one]


def test_no_deletion_follows_a_link_at_any_level_out_of_a_directory(written, tmp_path):
    for number, place in enumerate(folders(written)):
        root = Path(shutil.copytree(written, tmp_path / f"{number}" / "root"))
        outside = root.parent / "outside" / Path(place).name
        outside.parent.mkdir()
        os.rename(root / place, outside)
        (root / place).symlink_to(outside)
        before = contents(outside)
        remove_everything(root)
        found = contents(outside)
        assert before.items() <= found.items(), place
        shutil.rmtree(root.parent)


def tree(root: Path, file: str) -> Path:
    (root / file).parent.mkdir(parents=True)
    (root / file).write_bytes(b"x")
    return root / file


#: Functions that remove ``a/b/c/d`` below a directory.
REMOVALS: dict[str, Callable[[Path], Any]] = {
    "tree": lambda root: DurableDir(root).remove(root / "a" / "b"),
    "file": lambda root: DurableDir(root).remove_file(root / "a" / "b" / "c" / "d"),
    "rename": lambda root: DurableDir(root).publish(root / "a" / "b" / "c", root / "x" / "c"),
    "store": lambda root: FileStore(root).delete(["a/b/c/d"]),
    "batch": lambda root: FileBatch(root, fsync=False).remove(root / "a" / "b"),
}


@pytest.mark.parametrize("how", REMOVALS)
def test_no_deletion_follows_a_folder_that_becomes_a_link_during_it(tmp_path, how):
    real = os.open
    for place in ("a", "a/b", "a/b/c"):
        for moment in range(8):
            at = tmp_path / f"{place.replace('/', '-')}-{moment}"
            root, outside = at / "root", at / "outside"
            tree(root, "a/b/c/d")
            # It has the same names as the removed file.
            victim = tree(outside, Path("a/b/c/d").relative_to(place).as_posix())
            left = iter(range(moment))

            def opened(
                *arguments: Any, root=root, place=place, outside=outside, left=left, **more: Any
            ) -> int:
                if next(left, None) is None and not (root / place).is_symlink():
                    with contextlib.suppress(OSError):
                        os.rename(root / place, root / "away")
                        (root / place).symlink_to(outside)
                return real(*arguments, **more)

            with mock.patch.object(os, "open", opened), contextlib.suppress(OSError):
                REMOVALS[how](root)
            assert victim.read_bytes() == b"x", (place, moment)


@pytest.mark.parametrize("place", [INCOMING, "folder"])
def test_no_deletion_follows_a_link_out_of_a_node_store(tmp_path, place):
    victim = tree(tmp_path, "outside/object")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / place).symlink_to(tmp_path / "outside")
    with contextlib.suppress(DeltackptError):
        blobs = DirectoryBlobs(tmp_path / "store")
        with contextlib.closing(blobs), contextlib.suppress(DeltackptError):
            blobs.delete(f"{place}/object")
    assert victim.exists()
