# SPDX-License-Identifier: Apache-2.0
"""What every store promises; a store is tested by a subclass that says how one is made."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import Damaged
from deltackpt.storage.kv_store import reachable
from deltackpt.storage.store import Exists, Missing, Spot, Stamp, Store


class MemoryStore:
    """The promises and nothing else: what other stores are compared with."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._made: dict[str, int] = {}
        self._number = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return "memory:"

    def get(self, key: str) -> bytes:
        if key not in self._held:
            raise Missing(f"{self.url}/{key}")
        return self._held[key]

    def read_into(self, key, start, parts, *, whole=False) -> None:
        data = self.get(key)
        wanted = sum(part.nbytes for part in parts)
        first = start + len(data) if start < 0 else start
        if first < 0 or first + wanted > len(data) or (whole and first + wanted != len(data)):
            raise Damaged(f"{self.url}/{key}", f"{wanted} bytes", f"{len(data)} bytes")
        for part in parts:
            part[:] = data[first : first + part.nbytes]
            first += part.nbytes

    def length(self, key: str) -> int:
        return len(self.get(key))

    def version(self, key: str) -> bytes:
        return self.get(key)

    def put(self, key: str, data, *, absent: bool = False) -> None:
        with self._lock:
            if absent and key in self._held:
                raise Exists(f"{self.url}/{key}: expected nothing there, found an object")
            self._held[key] = bytes(data)
            for folder in _folders_of(key):
                if folder not in self._made:
                    self._number += 1
                    self._made[folder] = self._number

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        inside = f"{folder}/" if folder else ""
        return sorted(key for key in self._held if key.startswith(inside) and key > after)

    def folders(self, folder: str) -> list[str]:
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside) for key in self.keys(folder))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, keys) -> None:
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            self._made = {one: at for one, at in self._made.items() if self.keys(one)}

    def stamp(self, folder: str) -> Stamp | None:
        made = self._made.get(folder)
        return None if made is None else Stamp(made, tuple(self.keys(folder)))

    def kvstore(self, folder: str) -> None:
        return None


def _folders_of(key: str) -> list[str]:
    parts = key.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


_NAMES = st.sampled_from(["a", "b", "a.b", "3", "30", "c0", "%2F", "ü"])
_KEYS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)


class StoreSuite:
    """Tests of a store; the fixture ``make`` gives what makes an empty one."""

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        raise NotImplementedError

    @pytest.fixture
    def store(self, make) -> Store:
        return make()

    def test_what_was_put_is_got_and_listed(self, store):
        store.put("3/item/x", b"abc")
        store.put("3/item/x", b"longer than before")
        store.put("3/y", memoryview(b""))
        assert store.get("3/item/x") == b"longer than before" and store.get("3/y") == b""
        assert [store.length(key) for key in ("3/item/x", "3/y")] == [18, 0]
        assert store.keys("") == store.keys("3") == ["3/item/x", "3/y"]

    def test_what_is_missing_says_so_whoever_asks(self, store):
        store.put("3/x", b"abc")
        for key in ("4", "3/y", "3/x/y", "3"):
            for ask in (store.get, store.length, lambda key: store.read_into(key, 0, [])):
                if key == "3" and ask not in (store.get, store.length):
                    continue  # To open a folder is no error of every file system.
                with pytest.raises(Missing, match=key):
                    ask(key)
        assert store.keys("4") == store.folders("4") == store.folders("3/x") == []
        assert store.stamp("4") is None and store.stamp("3/x") is None
        store.delete(["4", "3/y"])
        assert store.keys("") == ["3/x"]

    def test_ranges_fill_the_buffers_that_are_given(self, store):
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
            parts = [bytearray(size) for size in sizes]
            store.read_into("x", start, [memoryview(part) for part in parts], whole=whole)
            first = start % 100 if start < 0 else start
            assert b"".join(parts) == data[first : first + sum(sizes)]

    def test_an_object_of_another_length_is_damaged(self, store):
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

    def test_a_version_changes_with_what_is_under_a_key(self, store):
        store.put("x", b"a")
        first = store.version("x")
        assert store.version("x") == first
        store.put("x", b"abc")
        assert store.version("x") != first
        with pytest.raises(Missing, match="y"):
            store.version("y")

    def test_a_key_that_must_be_absent_is_put_once(self, store):
        store.put("journal/1", b"first", absent=True)
        with pytest.raises(Exists, match="journal/1"):
            store.put("journal/1", b"second", absent=True)
        assert store.get("journal/1") == b"first" and store.keys("") == ["journal/1"]
        store.delete(["journal/1"])
        store.put("journal/1", b"third", absent=True)
        assert store.get("journal/1") == b"third"

    def test_of_many_that_want_a_key_one_gets_it(self, store):
        def put(number: int) -> bool:
            try:
                store.put("journal/1", b"%d" % number * 1000, absent=True)
            except Exists:
                return False
            return True

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            won = [number for number, did in enumerate(pool.map(put, range(32))) if did]
        assert len(won) == 1 and store.get("journal/1") == b"%d" % won[0] * 1000

    def test_puts_of_one_key_are_whole_beside_each_other_and_beside_deletion(self, store):
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

    def test_listing_goes_on_after_a_key_and_names_folders(self, store):
        for key in ("10/a/x", "9/x", "9/a/b/y", "9/a/c", "z"):
            store.put(key, b".")
        assert store.keys("", after="9/a/b/y") == ["9/a/c", "9/x", "z"]
        assert store.keys("9", after="9/a/c") == ["9/x"]
        assert store.folders("") == ["10", "9"] and store.folders("9") == ["a"]
        assert store.folders("9/a") == ["b"] and store.folders("9/a/b") == []

    def test_a_folder_has_a_stamp_that_another_one_in_its_place_has_not(self, store):
        store.put("3/x", b"a")
        first = store.stamp("3")
        assert first is not None and first.same(store.stamp("3")) and first == store.stamp("3")
        store.put("4/x", b"a")
        assert first == store.stamp("3") and not first.same(store.stamp("4"))
        store.put("3/y", b"a")
        assert first.same(store.stamp("3")) and first != store.stamp("3")
        store.delete(store.keys("3"))
        assert store.stamp("3") is None and "3" not in store.folders("")
        store.put("3/x", b"b")  # Of the same bytes it may be the same.
        assert store.stamp("3") != first

    def test_spots_name_places_in_it(self, store):
        at = Spot(store, "") / "3" / "item"
        (at / "a").store.put((at / "a").key, b"abc")
        (at / "b/c").store.put((at / "b/c").key, b"d")
        assert (at.key, at.name, at.parent.name) == ("3/item", "item", "3")
        assert at.parent.parent == Spot(store, "") and str(at) == f"{store.url}/3/item"
        assert at.keys() == ["a", "b/c"] and at.folders() == ["b"]
        assert (at / "b").below(at.parent) == "item/b"
        assert (at / "a").read() == b"abc" and (at / "a").length() == 3
        assert (at / "a").is_file() and at.is_dir() and not (at / "x").exists()
        with pytest.raises(Damaged, match=r"3/item/x: expected a file, found no such file"):
            (at / "x").read()
        with pytest.raises(Damaged, match=r"shown: expected at most 2 bytes, found 3 bytes"):
            (at / "a").read("shown", most_bytes=2)

    def test_tensorstore_reads_and_writes_the_same_place(self, store):
        spec = store.kvstore("3/array")
        if spec is None:
            return  # Read by a copy: the next test.
        assert spec["path"].endswith("3/array/")
        if spec["driver"] == "memory":
            return  # One of a process; only this suite has such.
        store.put("3/array/c/0", b"abc")
        kvstore = ts.KvStore.open(spec).result()
        assert kvstore.read("c/0").result().value == b"abc"
        kvstore.write("c/1", b"d").result()
        assert store.get("3/array/c/1") == b"d"

    def test_tensorstore_reads_a_folder_in_its_place_or_a_copy(self, store):
        store.put("3/array/c/0", b"abc")
        store.put("3/array/zarr.json", b"{}")
        store.put("3/other", b"")
        found = reachable(Spot(store, "3/array"))
        if found.spec["driver"] == "memory" and store.kvstore("3") is not None:
            return
        kvstore = ts.KvStore.open(found.spec, context=found.context).result()
        assert sorted(kvstore.list().result()) == [b"c/0", b"zarr.json"]
        assert kvstore.read("c/0").result().value == b"abc"
        with pytest.raises(Missing) if store.kvstore("3") is None else contextlib.nullcontext():
            reachable(Spot(store, "3/array"), ["c/1"])

    def test_any_calls_give_what_a_dict_gives(self, make):
        @given(data=st.data())
        def compared(data):
            store, oracle = make(), MemoryStore()
            for _ in range(data.draw(st.integers(1, 12))):
                key = data.draw(_KEYS)
                if any(
                    other.startswith(f"{key}/") or key.startswith(f"{other}/")
                    for other in oracle.keys("")
                ):
                    continue  # A name is a file or a folder, where a file system is to hold it.
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
                    known = oracle.stamp(folder) is not None
                    assert not folder or (store.stamp(folder) is not None) == known
                assert {key: store.get(key) for key in store.keys("")} == {
                    key: oracle.get(key) for key in oracle.keys("")
                }

        compared()
