# SPDX-License-Identifier: Apache-2.0
"""Restores of deltas that have dense leaves as blocks: bits, kinds of leaves, what is read, damage.

What goes straight into its shardings is compared with Orbax's handler on a folder with all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from pathlib import Path
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
from deltackpt.format.names import DENSE_ITEM
from deltackpt.handlers import dense, dense_leaves
from deltackpt.handlers.dense_leaves import DenseLeaves
from deltackpt.handlers.reading import OrbaxItems
from deltackpt.ledger.directory import Root
from deltackpt.reading import chains, dense_values, dense_work, orbax_values
from deltackpt.reading.dense_values import DenseItem
from deltackpt.restore.step_files import DenseFiles
from deltackpt.state import tables
from deltackpt.storage import digests, kv_store, ocdbt, ocdbt_index
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.store import spot
from deltackpt.tiers.copy import copy

P = jax.sharding.PartitionSpec
HANDLERS = {"embeddings": deltackpt.Tables(select="table", slots={})}
OPTIONS = deltackpt.ManagerOptions(dense=deltackpt.Dense(deltas="own"))
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
    """A base and three deltas, and the states."""
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
            manager.wait()
            states.append(state)
    return states


def dense_of(state: dict) -> dict:
    """The dense leaves of the nested dicts that a split makes of a state."""
    choice = HANDLERS["embeddings"]
    return tables.split(state, choice).dense


def by_folder(chain, abstract: dict | None) -> dict:
    """Orbax's handler on the item as files."""
    handler = dense.handler()
    with contextlib.closing(DenseFiles(dense_values.of_step(chain))) as files:
        folder = dense_leaves.epath.Path(files.folder(DENSE_ITEM))
        metadata = handler.metadata(folder)
        if abstract is not None:
            dense.check(abstract, metadata.tree, LAST)
        args = dense.restore_args(abstract, metadata)
        return dense.restored(handler.restore(folder, args=args), abstract, LAST)


def straight(chain, abstract: dict | None) -> dict:
    return DenseLeaves(DenseItem(chain)).restored(abstract, LAST).leaves


def told(way, chain, abstract):
    """Leaves with all that tells them apart, or the error."""
    try:
        found = way(chain, abstract)
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
    """Leaves but for what a template has no say in: whether jax may move them, or widen them."""
    found = [described(leaf) for leaf in jax.tree.leaves(state)]
    return [(*one[:4], *one[6:]) if one[0] == "jax" else one for one in found]


def templates(leaf) -> list:
    """What a template may have in the place of a leaf, some of it wrong."""
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
def test_both_ways_give_the_same_leaves_or_the_same_error(run, data):
    root, states = run
    chain = chains.read_chain(root / str(LAST))
    abstract = dense_of(states[-1])
    flat, structure = jax.tree.flatten(abstract, is_leaf=lambda leaf: leaf is None)
    wrong = data.draw(st.integers(0, 2), "leaves that may be wrong")
    at = data.draw(st.sets(st.integers(0, len(flat) - 1), max_size=wrong + 1), "which")
    for number in at:
        flat[number] = data.draw(st.sampled_from(templates(flat[number])), f"leaf {number}")
    given_ = jax.tree.unflatten(structure, flat)
    assert told(straight, chain, given_) == told(by_folder, chain, given_)


@pytest.mark.parametrize("step", range(LAST + 1))
def test_without_a_template_both_ways_give_the_same(run, step):
    chain = chains.read_chain(run[0] / str(step))
    assert told(straight, chain, None) == told(by_folder, chain, None)


def test_leaves_that_only_one_side_has_are_named(run):
    root, states = run
    chain = chains.read_chain(root / str(LAST))
    abstract = dense_of(states[-1])
    for template in (
        {**abstract, "more": jnp.zeros(3)},
        {key: leaf for key, leaf in abstract.items() if key != "w"},
    ):
        found = told(straight, chain, template)
        assert found == told(by_folder, chain, template) and found[0] is TemplateMismatch


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


def test_only_the_leaves_that_are_asked_for_are_decoded(run):
    root, states = run
    asked: list[set[str]] = []
    real = DenseItem.read

    def read(self, wanted):
        found = real(self, wanted)
        names = {key.rpartition("/")[0] for key in found.values if not key.endswith(ocdbt.ZARRAY)}
        if names:
            asked.append(names)
        return found

    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        with mock.patch.object(DenseItem, "read", read):
            found = manager.read_state(LAST, {"w": states[-1]["w"], "text": ""})
    assert asked == [{"w"}] and found.state["text"] == "a text"
    assert bits(found.state["w"]) == bits(states[-1]["w"])


def test_of_arrays_on_few_devices_no_other_chunk_is_read(run):
    root, states = run
    chain = chains.read_chain(root / str(LAST))
    item = DenseItem(chain)
    of_first = {
        device: box for device, box in dense_leaves._boxes(states[0]["cut"], (64, 96)).items()
    }
    array = DenseLeaves(item)._stored["cut",]
    assert array.chunks == (16, 48)
    keys = array.keys([of_first[jax.devices()[0]]])
    assert keys == {"cut/0.0"} and set(item.read(keys.__contains__).values) == keys


@pytest.mark.parametrize("piece", [1000, 4096, 8 << 20])
@pytest.mark.parametrize("stretch", [512, 2048, 4 << 20])
def test_however_a_base_is_cut_all_that_is_above_it_is_decoded_once(run, piece, stretch):
    root, states = run
    chain = chains.read_chain(root / str(LAST))
    with (
        mock.patch.object(orbax_values, "_PIECE_BYTES", piece),
        mock.patch.object(dense_work, "_STRETCH_BYTES", stretch),
    ):
        found = straight(chain, dense_of(states[-1]))
    assert bits(found) == bits(dense_of(states[-1]))


def items_of(root: Path) -> OrbaxItems:
    return OrbaxItems(Root.open(root, read_only=True), {})


@pytest.mark.parametrize("with_template", [True, False])
def test_orbaxs_item_is_read_straight_and_gives_what_orbax_gives(run, with_template):
    root, states = run
    abstract = dense_of(states[0]) if with_template else None
    items = items_of(root)
    read = items.straight(0, abstract)
    assert read is not None
    found, by_orbax = read(), items.dense(0, abstract)
    assert told(lambda *_: found.leaves, None, None) == told(lambda *_: by_orbax.leaves, None, None)
    # Deltas are read by their chains.
    assert items.straight(LAST, abstract) is None and not by_orbax.chunks


def test_what_does_not_go_straight_is_left_to_orbax(run):
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
        found = told(lambda _, __, read=read: read(), None, None)
        assert found[0] is TemplateMismatch
        assert found == told(lambda _, wanted: items.dense(0, wanted), None, template)
    # A chunk that is not there stands for zeros.
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
        manager.wait()
        assert bits(manager.restore(step + 1, moved).state) == bits(moved)
    chain = chains.read_chain(root / str(step + 1))
    assert bits(straight(chain, dense_of(moved))) == bits(dense_of(moved))


def blocks(root: Path, step: int, name: str) -> list[Path]:
    return sorted((root / str(step)).rglob(name))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (0, "dense/d/*"),
        (0, "dense/manifest.ocdbt"),
        (0, "dense/_METADATA"),
        (1, "embeddings/part.0/dense.float32.sparse/*/c/0"),
        (2, "embeddings/part.0/dense.bfloat16.sparse/*/c/0"),
        (3, "embeddings/part.0/dense.plain/bytes/c/0"),
        (2, "embeddings/digests.0.msgpack"),
    ],
)
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damage_is_found_and_named_and_an_older_step_is_restored(run, tmp_path, step, name, how):
    root, states = tmp_path / "run", run[1]
    shutil.copytree(run[0], root)
    files = [path for path in (root / str(step)).rglob("*") if path.match(f"{step}/{name}")]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        at = len(data) // 3
        data[at] ^= 4
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(data if how == "flip" else data[:at])
    chain = chains.read_chain(root / str(LAST)) if name != "embeddings/manifest.0.msgpack" else ()
    with pytest.raises(Damaged) as error:
        straight(chain, dense_of(states[-1]))
    assert str(error.value).startswith(f"{step}/") or f"/{step}/" in str(error.value)
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        if not step:
            return
        with pytest.warns(UserWarning, match="skipped"):
            found = manager.restore_latest(states[0])
        assert found.step == step - 1
        assert bits(found.state["w"]) == bits(states[step - 1]["w"])


def test_an_intact_file_of_another_save_is_none_of_ours(run, tmp_path):
    root, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run[0], root)
    write(other)
    [ours] = (root / "0" / "dense" / "d").iterdir()
    [theirs] = (other / "0" / "dense" / "d").iterdir()
    shutil.copy(theirs, ours)
    with pytest.raises(Damaged, match="0/dense/d/"):
        straight(chains.read_chain(root / str(LAST)), None)


def test_codes_that_need_no_reference_are_read_once(tmp_path):
    options = deltackpt.ManagerOptions(
        dense=deltackpt.Dense(deltas="own", codec={"nu": "int8"}, max_error=None)
    )
    state = {"table": jnp.zeros((16, 4)), "nu": jnp.linspace(0.0, 1.0, 1 << 16)}
    marks = touched.init({"table": state["table"]})
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options) as manager:
        for step in range(5):
            marks = touched.mark(marks, {"table": jnp.arange(2)})
            manager.save(step, {**state, "nu": state["nu"] + step}, touched=marks)
            manager.wait()
    chain = chains.read_chain(tmp_path / "4")
    read: list[str] = []
    real = dense_values.PartSource.read

    def record(self, segment, entry, start, stop):
        read.append(self.name)
        return real(self, segment, entry, start, stop)

    with mock.patch.object(dense_values.PartSource, "read", record):
        with mock.patch.object(orbax_values._FileReader, "read", side_effect=AssertionError):
            found = straight(chain, None)
    assert {name.partition("/")[0] for name in read} == {"4"}
    np.testing.assert_allclose(found["nu"], np.asarray(state["nu"]) + 4, atol=2.5e-2)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_index_says_where_values_are(data):
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
    found = ocdbt_index.index(kv_store.Reachable(spec, context))
    files = ts.KvStore.open(spec, context=context).result()
    for name, where in found.values.items():
        if isinstance(where, ocdbt_index.Extent):
            stop = where.start + where.nbytes
            where = files[where.file][where.start : stop]
        assert bytes(where) == values[name]
    assert found.values.keys() == values.keys()


def test_values_of_any_length_are_verified_whole(tmp_path):
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
    found = orbax_values.OrbaxValues(spot(item), lambda: expected)
    keys = [(False, key) for key in values]
    for some in (keys, keys[:2], keys[3:]):
        read = orbax_values.OrbaxValues(spot(item), lambda: expected).read(some)
        assert {key: bytes(data) for (_, key), data in read.items()} == {
            key: values[key].tobytes() for _, key in some
        }
    assert sorted(found.keys()) == sorted(keys)
    for path in sorted((item / "d").iterdir()):
        data = path.read_bytes()
        for at in (0, 1025, len(data) // 2, len(data) - 5, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(Damaged, match=f"3/dense/d/{path.name}"):
                orbax_values.OrbaxValues(spot(item), lambda: expected).read(keys)
        path.write_bytes(data)


def dense_restore_digests(step: Path):
    found = digests.digest_tree(step)
    return {name.removeprefix(f"{DENSE_ITEM}/"): digest for name, digest in found.items()}


def test_a_chain_in_a_bucket_is_restored(run, tmp_path):
    root, states = run
    with servers.s3(tmp_path) as server, servers.environment_of(server):
        url = server.bucket(f"bucket{next(_numbers)}") + "/run"
        copy(root, url, all_steps=True, endpoint=server.endpoint)
        options = deltackpt.ManagerOptions(
            access="read", tiers=deltackpt.Tiers(endpoint=server.endpoint)
        )
        with deltackpt.CheckpointManager(url, handlers=HANDLERS, options=options) as manager:
            found = manager.restore(LAST, states[-1]).state
    assert bits(found) == bits(states[-1])
