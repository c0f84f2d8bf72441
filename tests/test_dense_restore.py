# SPDX-License-Identifier: Apache-2.0
"""Restores of deltas with dense leaves as blocks: bits, kinds of leaves, reads, damage.

Direct restores into shardings are compared with Orbax's handler on a full item.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import servers
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from model import commit

import deltackpt
from deltackpt import touched
from deltackpt.errors import Damaged, TemplateMismatch
from deltackpt.format.naming import DENSE_ITEM
from deltackpt.handlers import dense_leaves, item_reader, orbax_dense
from deltackpt.handlers.dense_leaves import StoredLeaves
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.layers.footer import LayerArray
from deltackpt.layers.read import LayerReader
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.directory import Root
from deltackpt.maintenance import compact
from deltackpt.reading import chains, orbax_values, zarr_arrays
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.state import tables
from deltackpt.storage import digests, kv_store, ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.store import store_path
from deltackpt.testing import Disk, stored_chunks
from deltackpt.tiers.copy import copy

P = jax.sharding.PartitionSpec
HANDLERS = {"embeddings": deltackpt.Tables(select="table", slots={})}
OPTIONS = deltackpt.ManagerOptions(dense=deltackpt.Dense(deltas="blocks"))
READ = deltackpt.ManagerOptions(access="read")
LAST = 3


def opened(root: Path | str, options=READ) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options)


def save_all(manager, states: list[dict], first: int = 0, marks=None) -> None:
    """Saves and commits states in turn, each with two touched rows; step 0 is a base."""
    marks = marks or touched.init({"table": states[0]["table"]})
    for step, state in enumerate(states, first):
        marks = touched.mark(marks, {"table": jnp.arange(2)})
        assert manager.save(step, state, touched=marks).kind == ("delta" if step else "base")
        manager.wait_until_finished()


def sharding(*spec) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.sharding.NamedSharding(mesh, P(*spec))


def initial() -> dict:
    """Leaves of every kind."""
    draws = np.random.default_rng(0)

    def normal(*shape: int, dtype=np.float32) -> np.ndarray:
        return draws.standard_normal(shape).astype(dtype)

    return {
        "table": jnp.zeros((16, 4)),
        "w": jnp.asarray(normal(40, 300)),
        "cut": jax.device_put(normal(64, 96), sharding("x", "y")),
        "replicas": jax.device_put(normal(64, 96), sharding(None, "y")),
        "half": jnp.asarray(normal(50, 100, dtype=ml_dtypes.bfloat16)),
        "even": jnp.asarray(normal(64, 256)),
        "small": jnp.arange(5, dtype=jnp.int8),
        "truth": jnp.asarray(normal(5000) > 0),
        "count": jnp.int32(3),
        "weak": jnp.asarray(2.5),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(8), 3),
        "host": normal(30, 70),
        "scalar": np.float32(0.5),
        "number": 4,
        "rate": 0.25,
        "flag": True,
        "text": "a text",
        "nothing": None,
        "hollow": {},
        "nested": {"a": [jnp.ones(2000), ()], "empty": np.zeros((0, 3), np.int16)},
    }


def changed(state: dict, step: int) -> dict:
    draws = np.random.default_rng(step)

    def move(leaf):
        floats = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not floats or leaf.size <= 9:
            return leaf
        found = np.array(leaf)
        flat = found.reshape(-1)
        flat[draws.integers(0, flat.size, 1 + flat.size // 50)] += 0.25
        return jax.device_put(found, leaf.sharding)

    moved = {**jax.tree.map(move, state), "table": state["table"]}
    return {**moved, "count": state["count"] + 1, "number": 4 + step}


def write(root: Path) -> list[dict]:
    states = [initial()]
    for step in range(1, LAST + 1):
        states.append(changed(states[-1], step))
    with opened(root, OPTIONS) as manager:
        save_all(manager, states)
    return states


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A base and three deltas, and their states."""
    root = tmp_path_factory.mktemp("run")
    return root, write(root)


def dense_of(state: dict) -> dict:
    """The dense leaves of a state, as nested dicts."""
    return tables.split(state, HANDLERS["embeddings"]).dense


def copied(run: tuple[Path, list[dict]], to: Path, last: int = LAST) -> Path:
    """Copies the steps of a run up to ``last``."""
    for step in range(last + 1):
        shutil.copytree(run[0] / str(step), to / "run" / str(step))
    return to / "run"


@pytest.fixture(scope="module")
def managers(run, tmp_path_factory) -> Iterator[tuple[Any, Any]]:
    """Readers of the deltas, and of a copy whose last step is compacted to an Orbax item."""
    compacted = copied(run, tmp_path_factory.mktemp("compacted"))
    assert compact.compact(compacted, step=LAST) is not None
    with opened(run[0]) as of_chain, opened(compacted) as of_item:
        yield of_chain, of_item


def assert_equal_outcomes(managers, template: dict | None) -> Any:
    """Checks that the chain and Orbax's handler give equal leaves or errors; returns them."""
    of_chain, of_item = managers
    found = outcome(lambda: of_chain.restore(LAST, template).state)
    with by_orbax():
        assert found == outcome(lambda: of_item.restore(LAST, template).state)
    return found


def outcome(read: Callable[[], Any]):
    """Leaves with everything that distinguishes them, or the error."""
    try:
        found = read()
    except Exception as error:
        return type(error), str(error)
    leaves, structure = jax.tree.flatten(found, is_leaf=lambda leaf: leaf is None)
    return structure, [described(leaf) for leaf in leaves]


def by_orbax():
    """Makes Orbax's handler read what is otherwise read directly."""
    return mock.patch.object(item_reader, "_straight", return_value=None)


def described(leaf):
    if isinstance(leaf, jax.Array):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(leaf) if is_key else leaf
        shards = [(one.device, np.asarray(one.data).tobytes()) for one in data.addressable_shards]
        weak = getattr(leaf, "weak_type", False)
        return "jax", leaf.dtype, leaf.shape, leaf.sharding, weak, leaf.committed, shards
    if isinstance(leaf, np.ndarray):
        kept = leaf.flags.writeable, leaf.flags.c_contiguous
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes(), kept
    return type(leaf), leaf


def bits(state) -> list:
    """Leaves without what a template does not determine: weak types and commitment."""
    found = [described(leaf) for leaf in jax.tree.leaves(state)]
    return [(*one[:4], *one[6:]) if one[0] == "jax" else one for one in found]


def templates(leaf) -> list:
    """Template values for a leaf, some of them wrong."""
    found = [leaf]
    if isinstance(leaf, jax.Array):
        kinds = [None, jax.sharding.SingleDeviceSharding(jax.devices()[3])]
        if leaf.ndim == 2 and leaf.shape[0] % 4 == 0 and leaf.shape[1] % 4 == 0:
            kinds += [sharding("x"), sharding("y", "x"), sharding(), sharding(None, ("x", "y"))]
        found += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kind) for kind in kinds]
        found += [jax.ShapeDtypeStruct((*leaf.shape, 2), leaf.dtype)]
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            found += [np.zeros(leaf.shape, leaf.dtype), np.zeros(leaf.shape, np.complex64), 1, 1.5]
            found += [np.zeros(leaf.shape, leaf.dtype).astype(leaf.dtype.newbyteorder(">"))]
    if isinstance(leaf, (int, float)):
        found += [1, 0.5, np.int8(1), jnp.zeros(()), jax.ShapeDtypeStruct((), np.int32), "text"]
    return found + [None, ...]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_both_readers_give_the_same_leaves_or_the_same_error(run, managers, data):
    template = dict(run[1][-1])
    table = template.pop("table")
    flat, structure = jax.tree.flatten(template, is_leaf=lambda leaf: leaf is None)
    wrong = data.draw(st.integers(0, 2), "leaves that may be wrong")
    at = data.draw(st.sets(st.integers(0, len(flat) - 1), max_size=wrong + 1), "which")
    for number in at:
        flat[number] = data.draw(st.sampled_from(templates(flat[number])), f"leaf {number}")
    assert_equal_outcomes(managers, {**jax.tree.unflatten(structure, flat), "table": table})


def test_without_a_template_both_readers_give_the_same(managers):
    structure, _ = assert_equal_outcomes(managers, None)
    assert structure.num_leaves > 20


def with_other_leaves(state: dict) -> list[dict]:
    """A leaf more; a leaf less."""
    return [
        {**state, "more": jnp.zeros(3)},
        {key: leaf for key, leaf in state.items() if key != "w"},
    ]


def test_leaves_that_only_one_side_has_are_named(run, managers):
    for template in with_other_leaves(run[1][-1]):
        assert assert_equal_outcomes(managers, template)[0] is TemplateMismatch


def test_a_restored_state_is_bit_for_bit_the_saved_one_and_may_be_donated(run):
    root, states = run
    with opened(root) as manager:
        for step, state in enumerate(states):
            found = manager.restore(step, state).state
            assert bits(found) == bits(state)
        twice = jax.jit(lambda leaf: leaf * 2, donate_argnums=0)
        np.testing.assert_array_equal(twice(found["w"]), np.asarray(states[-1]["w"]) * 2)
        assert bits(manager.restore(LAST, state).state["w"]) == bits(state["w"])


def test_only_the_requested_leaves_are_read(run):
    root, states = run
    with opened(root) as manager, read_groups() as read:
        found = manager.read_state(LAST, {"w": states[-1]["w"], "text": ""}).state
        assert found["text"] == "a text" and bits(found["w"]) == bits(states[-1]["w"])
        assert dtypes_of(read) == {"float32"}
        manager.read_state(LAST, {"half": states[-1]["half"]})
        assert dtypes_of(read) == {"float32", "bfloat16"}


@contextlib.contextmanager
def read_groups() -> Iterator[list[tuple[int, str]]]:
    """Collects the step and row group of each layer array that is read."""
    found: list[tuple[int, str]] = []
    real = LayerReader.read_into

    def counted(layer: LayerReader, array: LayerArray, *arguments: Any) -> None:
        found.append((layer.manifest.save_id.step, array.row_group))
        real(layer, array, *arguments)

    with mock.patch.object(LayerReader, "read_into", counted):
        yield found


def dtypes_of(read: list[tuple[int, str]]) -> set[str]:
    """The dtypes of the blocks of dense leaves that were read."""
    names = (group.split(".") for _, group in read if group.startswith("dense."))
    return {name[1] for name in names} - {"plain"}


def test_only_the_chunks_of_the_devices_of_an_array_are_read(run):
    root, states = run
    item = StoredItem(chains.read_chain(root / str(LAST)))
    array = StoredLeaves(item, "it")._stored["cut",]
    assert array.chunks == (16, 48)
    keys = array.keys([dense_leaves._boxes(states[0]["cut"], (64, 96))[jax.devices()[0]]])
    assert keys == {"cut/0.0"} and set(item.read(keys.__contains__).values) == keys


def test_a_leaf_that_is_read_in_several_pieces_is_complete(tmp_path, monkeypatch):
    """Blocks are decoded in spans of 4 MiB, each after all the values it changes were read."""
    monkeypatch.setattr(orbax_values, "_PIECE_BYTES", (4 << 20) + 100)
    large = jnp.arange((9 << 20) // 2, dtype=jnp.float32)
    states = []
    for step in range(3):
        # Some elements of each block of 256.
        large = large.at[jnp.arange(step, large.size, 251)].add(step + 0.5)
        states.append({"table": jnp.zeros((16, 4)), "large": large})
    with opened(tmp_path, OPTIONS) as manager:
        save_all(manager, states)
        assert bits(manager.restore(2, states[2]).state) == bits(states[2])


def items_of(root: Path) -> OrbaxItems:
    return OrbaxItems(Root.open(root, read_only=True), {})


@pytest.mark.parametrize("with_template", [True, False])
def test_an_orbax_item_that_is_read_directly_equals_what_orbax_reads(run, with_template):
    root, states = run
    abstract = dense_of(states[0]) if with_template else None
    items = items_of(root)
    read = items.straight(0, abstract)
    assert read is not None
    found = read()
    with by_orbax():
        expected = items.dense(0, abstract)
    assert outcome(lambda: found.leaves) == outcome(lambda: expected.leaves)
    # Deltas are read through their chains.
    assert items.straight(LAST, abstract) is None and not expected.chunks


@pytest.mark.parametrize("count", [8000, 20])
def test_small_leaves_are_read_without_a_call_of_orbax(tmp_path, monkeypatch, count):
    """Orbax takes over a millisecond per leaf; the metadata of 8,000 exceeds a MiB."""
    leaves = {f"leaf {i}": np.full(2, i) for i in range(count)}
    state = {"table": np.ones((4, 2)), "leaves": leaves}
    if count == 20:
        monkeypatch.setattr(dense_leaves, "_LEFT_BYTES", 0)  # As if there were 8,000.
    with opened(tmp_path, deltackpt.ManagerOptions()) as manager:
        commit(manager, 0, state)
        monkeypatch.setattr(orbax_dense, "handler", None)
        found = [manager.restore(0).state]
        if count == 20:
            found += [
                manager.restore(0, state).state,
                manager.read_state(0, {"leaves": leaves}).state,
                OrbaxItems(manager._run.root, {}).dense(0, None).leaves,
            ]
            assert manager.item_metadata(0)["leaves"]["leaf 7"].shape == (2,)
        for one in found:
            assert all(one["leaves"][name][1] == i for i, name in enumerate(leaves))


def test_python_numbers_are_read_without_a_call_of_orbax(tmp_path, monkeypatch):
    """Orbax takes over a millisecond per number. Types and values stay the same."""
    monkeypatch.setattr(dense_leaves, "_LEFT_BYTES", 0)
    numbers = {"int": 3, "-": -(1 << 40), "unsigned": (1 << 63) + 5, "float": 0.1, "true": True}
    state = {"table": np.ones((4, 2)), "of": numbers, "array": np.arange(3)}
    other = {name: type(number)(0) for name, number in numbers.items()}

    def kinds(found: dict[str, Any]) -> dict[str, Any]:
        return {name: (type(one), one.dtype, one.shape) for name, one in found.items()}

    def values(found: dict[str, Any]) -> tuple:
        return kinds(found), {name: one.item() for name, one in found.items()}

    with opened(tmp_path, deltackpt.ManagerOptions()) as manager:
        commit(manager, 0, state)
        without, metadata = manager.restore(0).state["of"], manager.item_metadata(0)["of"]
        monkeypatch.setattr(orbax_dense, "handler", None)
        for found in (
            manager.restore(0, {**state, "of": other}).state["of"],
            manager.read_state(0, {"of": other}).state["of"],
        ):
            assert found == numbers
            assert [type(found[name]) for name in numbers] == [*map(type, numbers.values())]
        arrays = {name: np.zeros((), without[name].dtype) for name in numbers}
        for found in (manager.restore(0, {**state, "of": arrays}), manager.restore(0)):
            assert values(found.state["of"]) == values(without)
        assert kinds(manager.item_metadata(0)["of"]) == kinds(metadata)


def test_items_that_cannot_be_read_directly_are_left_to_orbax(run):
    root, states = run
    items, abstract = items_of(root), dense_of(states[0])
    for template in with_other_leaves(abstract):
        assert items.straight(0, template) is None
    for leaf in (jnp.zeros((40, 301)), jax.ShapeDtypeStruct((40, 300), np.float16), 1, None):
        template = {**abstract, "w": leaf}
        read = items.straight(0, template)
        assert read is not None
        found = outcome(read)
        assert found[0] is TemplateMismatch
        with by_orbax():
            assert found == outcome(lambda wanted=template: items.dense(0, wanted))
    # A missing chunk means zeros.
    with mock.patch.object(orbax_values.OrbaxValues, "nbytes", return_value=None):
        assert items.straight(0, abstract) is None
    with mock.patch.object(dense_leaves, "_LEFT_BYTES", 0):
        with mock.patch.object(zarr_arrays, "parsed", return_value=None):
            assert items.straight(0, abstract) is None


def damage(path: Path, how: str, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "flip" else data[:at])


@pytest.mark.parametrize("step", [0, LAST])
def test_a_reference_that_shares_memory_with_a_leaf_outlives_its_donation(run, tmp_path, step):
    with opened(copied(run, tmp_path, last=step), OPTIONS) as manager:
        restored = manager.restore(step, run[1][step])
        state, own = restored.state, manager._run
        assert restored.touched is not None and own.dense is not None
        kept = own.dense.reference_of(own.lineage.newest_committed).data
        [shared] = [data for (_, key), data in kept.items() if key.startswith("even/")]
        [shard] = state["even"].addressable_shards
        assert np.asarray(shared).ctypes.data == shard.data.unsafe_buffer_pointer()
        add = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
        moved = {**state, "even": add(state["even"]), "w": add(state["w"])}
        jax.block_until_ready(moved)
        save_all(manager, [moved], step + 1, restored.touched)
        assert bits(manager.restore(step + 1, moved).state) == bits(moved)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (0, "dense/d/*"),
        (0, "dense/manifest.ocdbt"),
        (0, "dense/_METADATA"),
        (1, "dense.float32.sparse"),
        (2, "dense.bfloat16.sparse"),
        (3, "dense.plain"),
    ],
)
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_is_found_and_named_and_an_older_step_is_restored(run, tmp_path, step, name, how):
    root, states = copied(run, tmp_path), run[1]
    files = [path for path in (root / str(step)).rglob("*") if path.match(f"{step}/{name}")]
    places = {path: path.stat().st_size // 3 for path in files}
    for chunk in [] if files else stored_chunks(root / str(step), "*", segment=name):
        places[chunk.path] = chunk.offset + chunk.nbytes // 3
    assert places
    for path, at in places.items():
        damage(path, how, at)
    with opened(root) as manager:
        with pytest.raises(Damaged) as error:
            manager.restore(LAST, states[-1])
        assert str(error.value).startswith(f"{step}/") or f"/{step}/" in str(error.value)
        if not step:
            return
        with pytest.warns(UserWarning, match="skipped"):
            found = manager.restore_latest(states[0])
        assert found.step == step - 1
        assert bits(found.state["w"]) == bits(states[step - 1]["w"])


def test_an_intact_file_of_another_save_is_damage(run, tmp_path):
    root, other = copied(run, tmp_path), tmp_path / "other"
    write(other)
    [ours], [theirs] = ((one / "0" / "dense" / "d").iterdir() for one in (root, other))
    shutil.copy(theirs, ours)
    with opened(root) as manager, pytest.raises(Damaged, match="0/dense/d/"):
        manager.restore(LAST)


def test_codes_that_need_no_reference_are_read_once(tmp_path):
    dense = deltackpt.Dense(deltas="blocks", codec={"nu": "int8"}, max_error=None)
    state = {"table": jnp.zeros((16, 4)), "nu": jnp.linspace(0.0, 1.0, 1 << 16)}
    with opened(tmp_path, deltackpt.ManagerOptions(dense=dense)) as manager:
        save_all(manager, [{**state, "nu": state["nu"] + step} for step in range(5)])
        with Disk(tmp_path) as disk, read_groups() as read:
            disk.on("read", lambda call: None, r"/dense/d/")
            found = manager.restore(4, state).state
            assert not disk.paths("read")
            assert {step for step, group in read if group.startswith("dense.")} == {4}
            manager.restore(0, state)
            assert "/0/dense/d/" in disk.paths("read")[-1]
    np.testing.assert_allclose(found["nu"], np.asarray(state["nu"]) + 4, atol=2.5e-2)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_index_locates_values(data):
    names = data.draw(st.sets(st.text("ab/.:%é", min_size=1, max_size=9), min_size=1, max_size=30))
    values = {
        name: bytes([n]) * data.draw(st.sampled_from([0, 7, 1024, 1025, 5000]))
        for n, name in enumerate(sorted(names))
    }
    context, spec = ts.Context(), {"driver": "memory", "path": "x y/"}
    most = data.draw(st.sampled_from([200, 100_000_000]))
    config = {"max_decoded_node_bytes": most, "max_inline_value_bytes": 1024}
    database = {"driver": "ocdbt", "base": spec, "config": config}
    store = ts.KvStore.open(database, context=context).result()
    for piece in (sorted(values)[::2], sorted(values)[1::2]):
        with ts.Transaction(atomic=True) as transaction:
            for name in piece:
                store.with_transaction(transaction)[name] = values[name]
    found = ocdbt.index(kv_store.Reachable(spec, context))
    files = ts.KvStore.open(spec, context=context).result()
    for name, where in found.values.items():
        if isinstance(where, ocdbt.Extent):
            where = files[where.file][where.start : where.start + where.nbytes]
        assert bytes(where) == values[name]
    assert found.values.keys() == values.keys()


def test_values_of_any_length_are_fully_verified(tmp_path):
    step = tmp_path / "3"
    item = step / DENSE_ITEM
    draws = np.random.default_rng(0)
    lengths = [1, 1024, 1025, 4096, (8 << 20) - 3, (16 << 20) + 1]
    values = {f"v{n}/0": draws.integers(0, 256, n, np.uint8) for n in lengths}
    batch = FileBatch(step, fsync=False)
    step.mkdir()
    batch.make(item)
    ocdbt.write(item, [ocdbt.Value(key, data) for key, data in values.items()], batch)
    batch.force()
    expected = {
        name.removeprefix(f"{DENSE_ITEM}/"): digest
        for name, digest in digests.digest_tree(step).items()
    }

    def stored() -> orbax_values.OrbaxValues:
        return orbax_values.OrbaxValues(store_path(item), lambda: expected)

    keys = [(False, key) for key in values]
    for some in (keys, keys[:2], keys[3:]):
        assert {key: bytes(data) for (_, key), data in stored().read(some).items()} == {
            key: values[key].tobytes() for _, key in some
        }
    assert sorted(stored().keys()) == sorted(keys)
    for path in sorted((item / "d").iterdir()):
        data = path.read_bytes()
        for at in (0, 1025, len(data) // 2, len(data) - 5, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(Damaged, match=f"3/dense/d/{path.name}"):
                stored().read(keys)
        path.write_bytes(data)


@contextlib.contextmanager
def reader_of_a_bucket(root: Path, tmp_path: Path) -> Iterator[deltackpt.CheckpointManager]:
    """A manager that reads a copy of a directory in a bucket."""
    with servers.s3(tmp_path) as server, servers.environment_of(server):
        url = server.bucket("bucket") + "/run"
        copy(root, url, all_steps=True, endpoint=server.endpoint)
        tiers = deltackpt.Tiers(endpoint=server.endpoint)
        with opened(url, deltackpt.ManagerOptions(access="read", tiers=tiers)) as manager:
            yield manager


def test_in_a_bucket_a_chain_is_restored_and_a_base_is_downloaded_once(run, tmp_path):
    root, states = run
    read: list[str] = []

    def counted(name: str):
        real = getattr(CommittedStore, name)

        def call(self: CommittedStore, key: str, *arguments, **options):
            read.append(key)
            return real(self, key, *arguments, **options)

        return mock.patch.object(CommittedStore, name, call)

    with reader_of_a_bucket(root, tmp_path) as manager:
        assert bits(manager.restore(LAST, states[-1]).state) == bits(states[-1])
        with counted("get"), counted("read_into"):
            with mock.patch.object(orbax_dense, "from_folder", side_effect=AssertionError):
                assert bits(manager.restore(0, states[0]).state) == bits(states[0])
    data = [key for key in read if key.startswith(f"0/{DENSE_ITEM}/d/")]
    assert data and len(data) == len({*data})
