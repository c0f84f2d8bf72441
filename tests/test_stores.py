# SPDX-License-Identifier: Apache-2.0
"""Every store passes ``store_suite``."""

from __future__ import annotations

import errno
import os

import pytest

from deltackpt.errors import OutOfSpace, StorageError
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import Exists, FileStore, Missing, StorePath, store_path
from deltackpt.testing import Disk, MemoryStore
from deltackpt.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def make(self):
        return MemoryStore


class TestKvStore(StoreSuite):
    @pytest.fixture
    def make(self):
        return lambda: KvStore({"driver": "memory"}, "memory://")

    def test_a_store_that_cannot_be_opened_is_named(self):
        with pytest.raises(StorageError, match="nowhere://: expected to open it"):
            KvStore({"driver": "nowhere"}, "nowhere://")


class TestFileStore(StoreSuite):
    @pytest.fixture
    def make(self, tmp_path_factory):
        return lambda: FileStore(tmp_path_factory.mktemp("store"))

    def test_a_spot_is_a_path(self, store):
        store.put("3/x", b"abc")
        at = store_path(store.path / "3" / "x")
        assert at == StorePath(FileStore(store.path / "3"), "x") and store_path(at) is at
        assert os.fspath(at) == str(at) == f"{store.path}/3/x"
        assert at.parent.parent.name == store.path.name
        assert at.parent.parent.parent.name == store.path.parent.name

    def test_a_put_that_fails_leaves_what_was_there(self, store):
        store.put("3/x", b"old")
        with Disk(store.path) as disk, pytest.raises(OutOfSpace, match="3/x"):
            disk.fail("rename", errno=errno.ENOSPC)
            store.put("3/x", b"new")
        with Disk(store.path) as disk, pytest.raises(StorageError, match="3/y"):
            disk.fail("link")
            store.put("3/y", b"new", absent=True)
        assert store.keys("") == ["3/x"] and store.get("3/x") == b"old"

    @pytest.mark.parametrize(
        "removed_after", ["it was made", "mkdir found it", "its parent was made"]
    )
    def test_a_put_recreates_a_directory_that_others_remove(self, store, removed_after):
        with Disk(store.path) as disk:
            if removed_after == "it was made":
                disk.on("open", lambda _: os.rmdir(store.path / "a" / "b"), "^a/b/", times=3)
            else:
                error = errno.EEXIST if removed_after == "mkdir found it" else errno.ENOENT
                disk.fail("mkdir", "^a/b$", errno=error, times=3)
            store.put("a/b/x", b"abc", absent=True)
        assert store.get("a/b/x") == b"abc" and len(disk.paths("mkdir")) > 3

    def test_a_file_in_the_place_of_a_directory_is_not_an_existing_object(self, store):
        store.put("a", b"x")
        with pytest.raises(StorageError, match="a/b: expected to write, found Not a dir") as caught:
            store.put("a/b", b"y", absent=True)
        assert not isinstance(caught.value, Exists)

    def test_a_put_fsyncs_the_file_and_the_names_of_its_directories(self, store):
        with Disk(store.path) as disk:
            store.put("3/item/x", b"abc", absent=True)
        forced = disk.paths("fsync")
        assert os.path.dirname(forced.pop(2)) == str(store.path / "3" / "item")
        assert [os.path.relpath(name, store.path) for name in forced] == [".", "3", "3/item"]

    def test_an_unreadable_object_is_not_missing(self, store):
        (store.path / "loop").symlink_to("loop")
        os.mkfifo(store.path / "pipe")
        with pytest.raises(StorageError, match="symbolic links") as caught:
            store.get("loop")
        assert not isinstance(caught.value, Missing)
        with pytest.raises(Missing, match="something other than a file"):
            store.get("pipe")
