# SPDX-License-Identifier: Apache-2.0
"""Tests of the promises of ``deltackpt.storage.store.Store``, to be subclassed for each store."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import Damaged
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.store import Exists, Missing, Store, StorePath
from deltackpt.testing.memory_store import MemoryStore

_NAMES = st.sampled_from(["a", "b", "a.b", "3", "30", "c0", "%2F", "ü"])
_KEYS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)


class StoreSuite:
    """Tests of one store; a subclass overrides the fixture ``make``.

    Example::

        class TestMemoryStore(StoreSuite):
            @pytest.fixture
            def make(self):
                return MemoryStore
    """

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        """Returns a function that makes an empty store; overridden by each subclass."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, make) -> Store:
        """An empty store."""
        return make()

    def test_an_object_is_read_back_and_listed(self, store):
        """An object is read back as written last, and listed."""
        store.put("3/item/x", b"abc")
        store.put("3/item/x", b"longer than before")
        store.put("3/y", memoryview(b""))
        assert store.get("3/item/x") == b"longer than before" and store.get("3/y") == b""
        assert [store.length(key) for key in ("3/item/x", "3/y")] == [18, 0]
        assert store.keys("") == store.keys("3") == ["3/item/x", "3/y"]

    def test_a_missing_object_raises_missing_from_every_method(self, store):
        """A missing object raises ``Missing``; missing folders are empty."""
        store.put("3/x", b"abc")
        for key in ("4", "3/y", "3/x/y", "3"):
            for ask in (store.get, store.length, lambda key: store.read_into(key, 0, [])):
                if key == "3" and ask not in (store.get, store.length):
                    continue  # Not every file system refuses to open a folder.
                with pytest.raises(Missing, match=key):
                    ask(key)
        assert store.keys("4") == store.folders("4") == store.folders("3/x") == []
        assert store.dir_identity("4") is None and store.dir_identity("3/x") is None
        store.delete(["4", "3/y"])
        assert store.keys("") == ["3/x"]

    def test_ranges_fill_the_given_buffers(self, store):
        """A range is read into buffers in their order."""
        data = bytes(range(100))
        store.put("x", data)
        for start, sizes, whole in (
            (0, (100,), True),
            (0, (60, 0, 40), True),
            (7, (10, 20), False),
            (-4, (4,), False),
            (-100, (3,), False),
            (100, (), False),
        ):
            buffers = [bytearray(size) for size in sizes]
            store.read_into("x", start, [memoryview(buffer) for buffer in buffers], whole=whole)
            first = start % 100 if start < 0 else start
            assert b"".join(buffers) == data[first : first + sum(sizes)]

    def test_a_range_outside_the_object_is_damaged(self, store):
        """A range outside the object raises ``Damaged``."""
        store.put("x", bytes(100))
        for start, size, whole in (
            (0, 101, False),
            (0, 101, True),
            (0, 99, True),
            (95, 6, False),
            (-101, 4, False),
        ):
            with pytest.raises(Damaged, match="x"):
                store.read_into("x", start, [memoryview(bytearray(size))], whole=whole)

    def test_a_version_changes_with_the_object(self, store):
        """The version of an object changes with it."""
        store.put("x", b"a")
        first = store.version("x")
        assert store.version("x") == first
        store.put("x", b"abc")
        assert store.version("x") != first
        with pytest.raises(Missing, match="y"):
            store.version("y")

    def test_a_conditional_put_succeeds_once(self, store):
        """A conditional put succeeds only if the key is absent."""
        store.put("journal/1", b"first", absent=True)
        with pytest.raises(Exists, match="journal/1"):
            store.put("journal/1", b"second", absent=True)
        assert store.get("journal/1") == b"first" and store.keys("") == ["journal/1"]
        store.delete(["journal/1"])
        store.put("journal/1", b"third", absent=True)
        assert store.get("journal/1") == b"third"

    def test_one_of_many_concurrent_conditional_puts_succeeds(self, store):
        """One of many concurrent conditional puts succeeds."""

        def put(number: int) -> bool:
            try:
                store.put("journal/1", b"%d" % number * 1000, absent=True)
            except Exists:
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            won = [number for number, did in enumerate(pool.map(put, range(32))) if did]
        assert len(won) == 1 and store.get("journal/1") == b"%d" % won[0] * 1000

    def test_concurrent_puts_and_deletes_are_atomic(self, store):
        """Concurrent puts and deletes of a key are atomic."""

        def work(number: int) -> None:
            for _ in range(20):
                store.put("a/b/x", b"%d" % number * 500)
                try:
                    assert len(set(store.get("a/b/x"))) == 1
                except Missing:
                    pass
                if number == 0:
                    store.delete(["a/b/x"])

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        store.put("a/b/x", b"last")
        assert store.get("a/b/x") == b"last"

    def test_listing_resumes_after_a_key_and_names_folders(self, store):
        """Listing is recursive and sorted, and resumes after a key."""
        for key in ("10/a/x", "9/x", "9/a/b/y", "9/a/c", "z"):
            store.put(key, b".")
        assert store.keys("", after="9/a/b/y") == ["9/a/c", "9/x", "z"]
        assert store.keys("9", after="9/a/c") == ["9/x"]
        assert store.folders("") == ["10", "9"] and store.folders("9") == ["a"]
        assert store.folders("9/a") == ["b"] and store.folders("9/a/b") == []

    def test_a_folder_that_was_replaced_has_another_stamp(self, store):
        """The identity of a folder differs from that of its replacement."""
        store.put("3/x", b"a")
        first = store.dir_identity("3")
        assert (
            first is not None
            and first.same(store.dir_identity("3"))
            and first == store.dir_identity("3")
        )
        store.put("4/x", b"a")
        assert first == store.dir_identity("3") and not first.same(store.dir_identity("4"))
        store.put("3/y", b"a")
        assert first.same(store.dir_identity("3")) and first != store.dir_identity("3")
        store.delete(store.keys("3"))
        assert store.dir_identity("3") is None and "3" not in store.folders("")
        store.put("3/x", b"b")  # With the same bytes it could be equal.
        assert store.dir_identity("3") != first

    def test_a_store_path_is_a_path_in_the_store(self, store):
        """A ``StorePath`` is a path in the store."""
        at = StorePath(store, "") / "3" / "item"
        (at / "a").store.put((at / "a").key, b"abc")
        (at / "b/c").store.put((at / "b/c").key, b"d")
        assert (at.key, at.name, at.parent.name) == ("3/item", "item", "3")
        assert at.parent.parent == StorePath(store, "") and str(at) == f"{store.url}/3/item"
        assert at.keys() == ["a", "b/c"] and at.folders() == ["b"]
        assert (at / "b").below(at.parent) == "item/b"
        assert (at / "a").read() == b"abc" and (at / "a").length() == 3
        assert (at / "a").is_file() and at.is_dir() and not (at / "x").exists()
        with pytest.raises(Damaged, match=r"3/item/x: expected a file, found no such file"):
            (at / "x").read()
        with pytest.raises(Damaged, match=r"shown: expected at most 2 bytes, found 3 bytes"):
            (at / "a").read("shown", most_bytes=2)

    def test_tensorstore_shares_the_objects(self, store):
        """TensorStore reads and writes the same objects."""
        spec = store.kvstore("3/array")
        if spec is None:
            return  # It reads a copy: the next test.
        assert spec["path"].endswith("3/array/")
        if spec["driver"] == "memory":
            return  # A memory driver of its own; only used in this suite.
        store.put("3/array/c/0", b"abc")
        kvstore = ts.KvStore.open(spec).result()
        assert kvstore.read("c/0").result().value == b"abc"
        kvstore.write("c/1", b"d").result()
        assert store.get("3/array/c/1") == b"d"

    def test_tensorstore_reads_a_folder_directly_or_a_copy(self, store):
        """TensorStore reads a folder, directly or through a copy."""
        store.put("3/array/c/0", b"abc")
        store.put("3/array/zarr.json", b"{}")
        store.put("3/other", b"")
        found = reachable(StorePath(store, "3/array"))
        if found.spec["driver"] == "memory" and store.kvstore("3") is not None:
            return
        kvstore = ts.KvStore.open(found.spec, context=found.context).result()
        assert sorted(kvstore.list().result()) == [b"c/0", b"zarr.json"]
        assert kvstore.read("c/0").result().value == b"abc"
        with pytest.raises(Missing) if store.kvstore("3") is None else contextlib.nullcontext():
            reachable(StorePath(store, "3/array"), ["c/1"])

    def test_random_calls_match_the_memory_store(self, make):
        """Random calls have the same results as those of ``MemoryStore``."""

        @given(data=st.data())
        def compared(data):
            store, oracle = make(), MemoryStore()
            for _ in range(data.draw(st.integers(1, 12))):
                key = data.draw(_KEYS)
                if any(
                    other.startswith(f"{key}/") or key.startswith(f"{other}/")
                    for other in oracle.keys("")
                ):
                    continue  # In a file system a name is either a file or a folder.
                what = data.draw(st.sampled_from(["put", "absent", "delete"]))
                contents = data.draw(st.binary(max_size=5))
                for one in (store, oracle):
                    if what == "delete":
                        one.delete([key])
                        continue
                    try:
                        one.put(key, contents, absent=what == "absent")
                    except Exists:
                        assert what == "absent"
                after = data.draw(_KEYS)
                for folder in ("", "a", "a/b"):
                    assert store.keys(folder, after=after) == oracle.keys(folder, after=after)
                    assert store.folders(folder) == oracle.folders(folder)
                    known = oracle.dir_identity(folder) is not None
                    assert not folder or (store.dir_identity(folder) is not None) == known
                assert {key: store.get(key) for key in store.keys("")} == {
                    key: oracle.get(key) for key in oracle.keys("")
                }

        compared()
