# SPDX-License-Identifier: Apache-2.0
"""Restores of deltas with dense leaves as blocks: bits, kinds of leaves, reads, damage.

Direct restores into shardings are compared with Orbax's handler on a full item.
"""

from __future__ import annotations

import contextlib
import itertools
import re
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
from deltackpt.reading import chains, orbax_values
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
LAST = 3
_numbers = itertools.count()


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
        if (
            isinstance(leaf, jax.Array)
            and jnp.issubdtype(leaf.dtype, jnp.floating)
            and leaf.size > 9
        ):
            found = np.array(leaf)
            flat = found.reshape(-1)
            flat[draws.integers(0, flat.size, 1 + flat.size // 50)] += 0.25
            return jax.device_put(found, leaf.sharding)
        return leaf

    moved = {**jax.tree.map(move, state), "table": state["table"]}
    return {**moved, "count": state["count"] + 1, "number": 4 + step}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A base and three deltas, and their states."""
    root = tmp_path_factory.mktemp("run")
    return root, write(root)


def write(root: Path | str) -> list[dict]:
    state = initial()
    marks = touched.init({"table": state["table"]})
    states = []
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=OPTIONS) as manager:
        for step in range(LAST + 1):
            state = changed(state, step) if step else state
            marks = touched.mark(marks, {"table": jnp.arange(2)})
            assert manager.save(step, state, touched=marks).kind == ("delta" if step else "base")
            manager.wait_until_finished()
            states.append(state)
    return states


def dense_of(state: dict) -> dict:
    """The dense leaves of a state, as nested dicts."""
    choice = HANDLERS["embeddings"]
    return tables.split(state, choice).dense


@pytest.fixture(scope="module")
def managers(run, tmp_path_factory) -> Iterator[tuple[Any, Any]]:
    """Readers of the deltas, and of a copy whose last step is compacted to an Orbax item."""
    compacted = tmp_path_factory.mktemp("compacted") / "run"
    shutil.copytree(run[0], compacted)
    assert compact.compact(compacted, step=LAST) is not None
    options = deltackpt.ManagerOptions(access="read")
    with contextlib.ExitStack() as stack:
        yield tuple(
            stack.enter_context(
                deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options)
            )
            for root in (run[0], compacted)
        )


def assert_both_ways_alike(managers, template: dict | None) -> Any:
    """Checks that the chain and Orbax's handler give equal leaves or errors; returns them."""
    of_chain, of_item = managers
    found = told(lambda: of_chain.restore(LAST, template).state)
    with not_straight():
        assert found == told(lambda: of_item.restore(LAST, template).state)
    return found


def told(read: Callable[[], Any]):
    """Leaves with everything that distinguishes them, or the error."""
    try:
        found = read()
    except Exception as error:
        return type(error), str(error)
    leaves, structure = jax.tree.flatten(found, is_leaf=lambda leaf: leaf is None)
    return structure, [described(leaf) for leaf in leaves]


def described(leaf):
    if isinstance(leaf, jax.Array):
        data = leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
        shards = [
            (shard.device, np.asarray(shard.data).tobytes()) for shard in data.addressable_shards
        ]
        return (
            "jax",
            leaf.dtype,
            leaf.shape,
            leaf.sharding,
            getattr(leaf, "weak_type", False),
            leaf.committed,
            shards,
        )
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
    assert_both_ways_alike(managers, {**jax.tree.unflatten(structure, flat), "table": table})


def test_without_a_template_both_readers_give_the_same(managers):
    structure, _ = assert_both_ways_alike(managers, None)
    assert structure.num_leaves > 20


def test_leaves_that_only_one_side_has_are_named(run, managers):
    state = run[1][-1]
    for template in (
        {**state, "more": jnp.zeros(3)},
        {key: leaf for key, leaf in state.items() if key != "w"},
    ):
        assert assert_both_ways_alike(managers, template)[0] is TemplateMismatch


def test_a_restored_state_is_bit_for_bit_the_saved_one_and_may_be_donated(run):
    root, states = run
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for step, state in enumerate(states):
            found = manager.restore(step, state).state
            assert bits(found) == bits(state)
        twice = jax.jit(lambda leaf: leaf * 2, donate_argnums=0)
        np.testing.assert_array_equal(twice(found["w"]), np.asarray(states[-1]["w"]) * 2)
        assert bits(manager.restore(LAST, state).state["w"]) == bits(state["w"])


def test_only_the_requested_leaves_are_read(run):
    root, states = run
    options = deltackpt.ManagerOptions(access="read")
    with (
        deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager,
        read_groups() as read,
    ):
        found = manager.read_state(LAST, {"w": states[-1]["w"], "text": ""})
        assert found.state["text"] == "a text" and bits(found.state["w"]) == bits(states[-1]["w"])
        assert dtypes_of(read) == {"float32"}
        manager.read_state(LAST, {"half": states[-1]["half"]})
        assert dtypes_of(read) == {"float32", "bfloat16"}


@contextlib.contextmanager
def read_groups() -> Iterator[list[tuple[int, str]]]:
    """Collects the step and row group of each layer array that is read."""
    found: list[tuple[int, str]] = []
    real = LayerReader.read_into

    def counted(layer: LayerReader, array: LayerArray, *arguments: Any) -> None:
        found.append((layer.id.step, array.row_group))
        real(layer, array, *arguments)

    with mock.patch.object(LayerReader, "read_into", counted):
        yield found


def dtypes_of(read: list[tuple[int, str]]) -> set[str]:
    """The dtypes of the blocks of dense leaves that were read."""
    names = (group.split(".") for _, group in read if group.startswith("dense."))
    return {name[1] for name in names} - {"plain"}


def test_only_the_chunks_of_the_devices_of_an_array_are_read(run):
    root, states = run
    chain = chains.read_chain(root / str(LAST))
    item = StoredItem(chain)
    of_first = {
        device: box for device, box in dense_leaves._boxes(states[0]["cut"], (64, 96)).items()
    }
    array = StoredLeaves(item, "it")._stored["cut",]
    assert array.chunks == (16, 48)
    keys = array.keys([of_first[jax.devices()[0]]])
    assert keys == {"cut/0.0"} and set(item.read(keys.__contains__).values) == keys


def test_a_leaf_that_is_read_in_several_pieces_is_complete(tmp_path, monkeypatch):
    """Blocks are decoded in spans of 4 MiB, each after all the values it changes were read."""
    monkeypatch.setattr(orbax_values, "_PIECE_BYTES", (4 << 20) + 100)
    state = {"table": jnp.zeros((16, 4)), "large": jnp.arange((9 << 20) // 2, dtype=jnp.float32)}
    marks = touched.init({"table": state["table"]})
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=OPTIONS) as manager:
        for step in range(3):
            # Some elements of each block of 256.
            changed = jnp.arange(step, state["large"].size, 251)
            state = {**state, "large": state["large"].at[changed].add(step + 0.5)}
            marks = touched.mark(marks, {"table": jnp.arange(2)})
            assert manager.save(step, state, touched=marks).kind == ("delta" if step else "base")
            manager.wait_until_finished()
        assert bits(manager.restore(2, state).state) == bits(state)


def items_of(root: Path) -> OrbaxItems:
    return OrbaxItems(Root.open(root, read_only=True), {})


def not_straight():
    """Makes Orbax's handler read what is otherwise read directly."""
    return mock.patch.object(item_reader, "_straight", return_value=None)


@pytest.mark.parametrize("with_template", [True, False])
def test_an_orbax_item_that_is_read_directly_equals_what_orbax_reads(run, with_template):
    root, states = run
    abstract = dense_of(states[0]) if with_template else None
    items = items_of(root)
    read = items.straight(0, abstract)
    assert read is not None
    found = read()
    with not_straight():
        by_orbax = items.dense(0, abstract)
    assert told(lambda: found.leaves) == told(lambda: by_orbax.leaves)
    # Deltas are read through their chains.
    assert items.straight(LAST, abstract) is None and not by_orbax.chunks


def test_8000_small_leaves_need_no_call_of_orbax(tmp_path, monkeypatch):
    """Orbax takes over a millisecond per leaf; their metadata alone exceeds a MiB."""
    _check_reads_need_no_orbax(tmp_path, monkeypatch, 8000, lambda _, manager: [manager.restore(0)])


def test_no_way_to_read_small_leaves_calls_orbax(tmp_path, monkeypatch):
    monkeypatch.setattr(dense_leaves, "_LEFT_BYTES", 0)  # As if there were 8,000.

    def reads(state, manager):
        yield manager.restore(0)
        yield manager.restore(0, state)
        yield manager.read_state(0, {"leaves": state["leaves"]})
        yield mock.Mock(state=OrbaxItems(manager._root, {}).dense(0, None).leaves)
        assert manager.item_metadata(0)["leaves"]["leaf 7"].shape == (2,)

    _check_reads_need_no_orbax(tmp_path, monkeypatch, 20, reads)


def test_no_way_to_read_python_numbers_calls_orbax(tmp_path, monkeypatch):
    """Orbax takes over a millisecond per number. Types and values stay the same."""
    monkeypatch.setattr(dense_leaves, "_LEFT_BYTES", 0)
    numbers = {"int": 3, "-": -(1 << 40), "unsigned": (1 << 63) + 5, "float": 0.1, "true": True}
    state = {"table": np.ones((4, 2)), "of": numbers, "array": np.arange(3)}
    other = {name: type(number)(0) for name, number in numbers.items()}
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        manager.save(0, state)
        manager.wait_until_finished()
        without = manager.restore(0).state["of"]
        described = manager.item_metadata(0)["of"]
        monkeypatch.setattr(orbax_dense, "handler", None)
        for found in (
            manager.restore(0, {**state, "of": other}).state["of"],
            manager.read_state(0, {"of": other}).state["of"],
        ):
            assert found == numbers
            assert {name: type(found[name]) for name in numbers} == {
                name: type(number) for name, number in numbers.items()
            }
        arrays = {name: np.zeros((), without[name].dtype) for name in numbers}
        assert told_values(manager.restore(0, {**state, "of": arrays}).state["of"]) == (
            told_values(manager.restore(0).state["of"])
        )
        again = manager.item_metadata(0)["of"]
        assert told_values(manager.restore(0).state["of"]) == told_values(without)
        assert {name: (type(one), one.dtype, one.shape) for name, one in again.items()} == {
            name: (type(one), one.dtype, one.shape) for name, one in described.items()
        }


def told_values(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (type(one), one.dtype, one.shape, one.item()) for name, one in found.items()}


def _check_reads_need_no_orbax(root, monkeypatch, count, reads):
    leaves = {f"leaf {i}": np.full(2, i) for i in range(count)}
    state = {"table": np.ones((4, 2)), "leaves": leaves}
    with deltackpt.CheckpointManager(root, handlers=HANDLERS) as manager:
        manager.save(0, state)
        manager.wait_until_finished()
        monkeypatch.setattr(orbax_dense, "handler", None)
        for found in reads(state, manager):
            assert all(found.state["leaves"][name][1] == i for i, name in enumerate(leaves))


def test_items_that_cannot_be_read_directly_are_left_to_orbax(run):
    root, states = run
    items, abstract = items_of(root), dense_of(states[0])
    for template in (
        {**abstract, "more": jnp.zeros(3)},
        {key: leaf for key, leaf in abstract.items() if key != "w"},
    ):
        assert items.straight(0, template) is None
    for leaf in (jnp.zeros((40, 301)), jax.ShapeDtypeStruct((40, 300), np.float16), 1, None):
        template = {**abstract, "w": leaf}
        read = items.straight(0, template)
        assert read is not None
        found = told(read)
        assert found[0] is TemplateMismatch
        with not_straight():
            assert found == told(lambda wanted=template: items.dense(0, wanted))
    # A missing chunk means zeros.
    with mock.patch.object(orbax_values.OrbaxValues, "nbytes", return_value=None):
        assert items.straight(0, abstract) is None
    with mock.patch.object(dense_leaves, "_LEFT_BYTES", 0):
        with mock.patch.object(dense_leaves, "_array", return_value=None):
            assert items.straight(0, abstract) is None


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_of_a_base_is_named_and_the_step_is_not_restored(tmp_path, run, how):
    root = tmp_path / "run"
    shutil.copytree(run[0] / "0", root / "0")
    options = deltackpt.ManagerOptions(access="read")
    files = [path for path in sorted((root / "0" / DENSE_ITEM).rglob("*")) if path.is_file()]
    assert len(files) > 4
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for path in files:
            data = path.read_bytes()
            at = len(data) // 2
            changed = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(changed if how == "flip" else data[:at])
            for template in (run[1][0], None):
                with pytest.raises(Damaged, match=re.escape(path.relative_to(root).as_posix())):
                    manager.restore(0, template)
            path.write_bytes(data)
        assert bits(manager.restore(0, run[1][0]).state) == bits(run[1][0])


@pytest.mark.parametrize("step", [0, LAST])
def test_a_reference_that_shares_memory_with_a_leaf_outlives_its_donation(run, tmp_path, step):
    root, states = tmp_path / "run", run[1]
    for number in range(step + 1):
        shutil.copytree(run[0] / str(number), root / str(number))
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=OPTIONS) as manager:
        restored = manager.restore(step, states[step])
        state, marked = restored.state, restored.touched
        assert marked is not None
        own = manager._run
        assert own.dense is not None
        kept = own.dense.references.of(own.lineage.newest_committed).data
        [shared] = [data for (_, key), data in kept.items() if key.startswith("even/")]
        [shard] = state["even"].addressable_shards
        assert np.asarray(shared).ctypes.data == shard.data.unsafe_buffer_pointer()
        add = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
        moved = {**state, "even": add(state["even"]), "w": add(state["w"])}
        jax.block_until_ready(moved)
        marks = touched.mark(marked, {"table": jnp.arange(2)})
        assert manager.save(step + 1, moved, touched=marks).kind == "delta"
        manager.wait_until_finished()
        assert bits(manager.restore(step + 1, moved).state) == bits(moved)


def blocks(root: Path, step: int, name: str) -> list[Path]:
    return sorted((root / str(step)).rglob(name))


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
    root, states = tmp_path / "run", run[1]
    shutil.copytree(run[0], root)
    files = [path for path in (root / str(step)).rglob("*") if path.match(f"{step}/{name}")]
    places = {path: path.stat().st_size // 3 for path in files}
    for chunk in [] if files else stored_chunks(root / str(step), "*", segment=name):
        places[chunk.path] = chunk.offset + chunk.nbytes // 3
    assert places
    for path, at in places.items():
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data if how == "flip" else data[:at])
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
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
    root, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run[0], root)
    write(other)
    [ours] = (root / "0" / "dense" / "d").iterdir()
    [theirs] = (other / "0" / "dense" / "d").iterdir()
    shutil.copy(theirs, ours)
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        with pytest.raises(Damaged, match="0/dense/d/"):
            manager.restore(LAST)


def test_codes_that_need_no_reference_are_read_once(tmp_path):
    options = deltackpt.ManagerOptions(
        dense=deltackpt.Dense(deltas="blocks", codec={"nu": "int8"}, max_error=None)
    )
    state = {"table": jnp.zeros((16, 4)), "nu": jnp.linspace(0.0, 1.0, 1 << 16)}
    marks = touched.init({"table": state["table"]})
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options) as manager:
        for step in range(5):
            marks = touched.mark(marks, {"table": jnp.arange(2)})
            manager.save(step, {**state, "nu": state["nu"] + step}, touched=marks)
            manager.wait_until_finished()
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
    context = ts.Context()
    spec = {"driver": "memory", "path": "x y/"}
    most = data.draw(st.sampled_from([200, 100_000_000]))
    config = {"max_decoded_node_bytes": most, "max_inline_value_bytes": 1024}
    store = ts.KvStore.open(
        {"driver": "ocdbt", "base": spec, "config": config}, context=context
    ).result()
    for part in (sorted(values)[::2], sorted(values)[1::2]):
        with ts.Transaction(atomic=True) as transaction:
            for name in part:
                store.with_transaction(transaction)[name] = values[name]
    found = ocdbt.index(kv_store.Reachable(spec, context))
    files = ts.KvStore.open(spec, context=context).result()
    for name, where in found.values.items():
        if isinstance(where, ocdbt.Extent):
            stop = where.start + where.nbytes
            where = files[where.file][where.start : stop]
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
    expected = dense_restore_digests(step)
    found = orbax_values.OrbaxValues(store_path(item), lambda: expected)
    keys = [(False, key) for key in values]
    for some in (keys, keys[:2], keys[3:]):
        read = orbax_values.OrbaxValues(store_path(item), lambda: expected).read(some)
        assert {key: bytes(data) for (_, key), data in read.items()} == {
            key: values[key].tobytes() for _, key in some
        }
    assert sorted(found.keys()) == sorted(keys)
    for path in sorted((item / "d").iterdir()):
        data = path.read_bytes()
        for at in (0, 1025, len(data) // 2, len(data) - 5, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(Damaged, match=f"3/dense/d/{path.name}"):
                orbax_values.OrbaxValues(store_path(item), lambda: expected).read(keys)
        path.write_bytes(data)


def dense_restore_digests(step: Path):
    found = digests.digest_tree(step)
    return {name.removeprefix(f"{DENSE_ITEM}/"): digest for name, digest in found.items()}


@contextlib.contextmanager
def reader_of_a_bucket(root: Path, tmp_path: Path) -> Iterator[deltackpt.CheckpointManager]:
    """A manager that reads a copy of a directory in a new bucket."""
    with servers.s3(tmp_path) as server, servers.environment_of(server):
        url = server.bucket(f"bucket{next(_numbers)}") + "/run"
        copy(root, url, all_steps=True, endpoint=server.endpoint)
        options = deltackpt.ManagerOptions(
            access="read", tiers=deltackpt.Tiers(endpoint=server.endpoint)
        )
        with deltackpt.CheckpointManager(url, handlers=HANDLERS, options=options) as manager:
            yield manager


def test_a_chain_in_a_bucket_is_restored(run, tmp_path):
    root, states = run
    with reader_of_a_bucket(root, tmp_path) as manager:
        found = manager.restore(LAST, states[-1]).state
    assert bits(found) == bits(states[-1])


def test_a_base_in_a_bucket_is_downloaded_once_and_read_directly(run, tmp_path):
    root, states = run
    read: list[str] = []

    def counted(name: str):
        real = getattr(CommittedStore, name)

        def call(self: CommittedStore, key: str, *arguments, **options):
            read.append(key)
            return real(self, key, *arguments, **options)

        return mock.patch.object(CommittedStore, name, call)

    with reader_of_a_bucket(root, tmp_path) as manager:
        with counted("get"), counted("read_into"):
            with mock.patch.object(orbax_dense, "from_folder", side_effect=AssertionError):
                found = manager.restore(0, states[0]).state
    assert bits(found) == bits(states[0])
    data = [key for key in read if key.startswith(f"0/{DENSE_ITEM}/d/")]
    assert data and len(data) == len({*data})
