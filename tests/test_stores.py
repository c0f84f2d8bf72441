# SPDX-License-Identifier: Apache-2.0
"""Stores keep what ``store_suite`` says."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from store_suite import MemoryStore, StoreSuite

from deltackpt.errors import OutOfSpace, StorageError
from deltackpt.storage import files
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import Exists, FileStore, Missing, Spot, spot


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
        at = spot(store.path / "3" / "x")
        assert at == Spot(FileStore(store.path / "3"), "x") and spot(at) is at
        assert os.fspath(at) == str(at) == f"{store.path}/3/x"
        assert at.parent.parent.name == store.path.name
        assert at.parent.parent.parent.name == store.path.parent.name

    def test_a_put_that_fails_leaves_what_was_there(self, store):
        store.put("3/x", b"old")
        with (
            mock.patch.object(os, "replace", side_effect=OSError(28, "No space left on device")),
            pytest.raises(OutOfSpace, match="3/x"),
        ):
            store.put("3/x", b"new")
        with (
            mock.patch.object(os, "link", side_effect=OSError(5, "Input/output error")),
            pytest.raises(StorageError, match="3/y"),
        ):
            store.put("3/y", b"new", absent=True)
        assert store.keys("") == ["3/x"] and store.get("3/x") == b"old"

    @pytest.mark.parametrize(
        "removed_after", ["it was made", "mkdir found it", "its parent was made"]
    )
    def test_a_put_makes_a_folder_again_that_others_remove(self, store, removed_after):
        made_durable, mkdir, tried = files.make_durable, os.mkdir, []

        def make_durable(path):
            made_durable(path)
            tried.append(path)
            if removed_after == "it was made" and len(tried) < 4:
                os.rmdir(path)

        def made(path, mode=0o777):
            if path == store.path / "a" / "b":
                tried.append(path)
                if removed_after == "mkdir found it" and len(tried) < 4:
                    raise FileExistsError(17, "File exists")
                if removed_after == "its parent was made" and len(tried) < 4:
                    raise FileNotFoundError(2, "No such file or directory")
            mkdir(path, mode)

        with (
            mock.patch.object(files, "make_durable", make_durable),
            mock.patch.object(os, "mkdir", made),
        ):
            store.put("a/b/x", b"abc", absent=True)
        assert store.get("a/b/x") == b"abc" and len(tried) > 3

    def test_a_file_in_the_place_of_a_folder_is_no_object(self, store):
        store.put("a", b"x")
        with pytest.raises(StorageError, match="expected to make a directory") as caught:
            store.put("a/b", b"y", absent=True)
        assert not isinstance(caught.value, Exists)

    def test_a_put_is_on_disk_with_the_names_of_its_folders(self, store):
        forced = []
        real = os.fsync

        def fsync(descriptor):
            forced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        with mock.patch.object(os, "fsync", fsync):
            store.put("3/item/x", b"abc", absent=True)
        assert [os.path.relpath(name, store.path) for name in forced[:2]] == ["3", "."]
        assert os.path.relpath(forced[-1], store.path) == "3/item" and len(forced) == 4

    def test_what_cannot_be_read_is_not_missing(self, store):
        (store.path / "loop").symlink_to("loop")
        os.mkfifo(store.path / "pipe")
        with pytest.raises(StorageError, match="symbolic links") as caught:
            store.get("loop")
        assert not isinstance(caught.value, Missing)
        with pytest.raises(Missing, match="something else of that name"):
            store.get("pipe")
