# SPDX-License-Identifier: Apache-2.0
"""Our dense writer against stock Orbax: equal keys, bytes, metadata and restores."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from machine import free_port
from orbax.checkpoint import v1
from written import write_dense

from deltackpt.errors import Disagreement, UnsupportedLeaf
from deltackpt.format.manifest import SaveId
from deltackpt.resources.runtime import Runtime
from deltackpt.save import dense_layout
from deltackpt.save.dense_save import DenseLeaves
from deltackpt.storage import ocdbt
from deltackpt.storage.batch import FileBatch

_FILES = ("_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0")
Pair = collections.namedtuple("Pair", "a b")


@struct.dataclass
class State:
    """A state in the style of flax."""

    step: jax.Array
    params: Any


def values_in(folder: Path) -> dict[str, bytes]:
    """Returns all keys and values of a database."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return {key.decode(): bytes(store.read(key).result().value) for key in store.list().result()}


def _put(array: Any, *spec: Any) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def _sharded() -> dict[str, Any]:
    rows = jnp.arange(16.0).reshape(8, 2)
    return {
        "replicated": _put(rows),
        "partly": _put(rows, "x"),
        "split": _put(rows, "x", "y"),
        "one_axis": _put(rows, ("x", "y")),
        "odd": _put(jnp.arange(15.0).reshape(3, 5)),
        "second_axis": _put(jnp.arange(24.0).reshape(3, 8)),
        "second_mesh_axis": _put(jnp.arange(8), None or "y"),
        "axis_last": _put(jnp.arange(24.0).reshape(3, 8), None, "x"),
        "bf16": _put(jnp.ones((4, 2), jnp.bfloat16), "x"),
        "scalar": _put(jnp.float32(7)),
        "keys": _put(jax.random.split(jax.random.key(3), 8), "x"),
        "elsewhere": jax.device_put(jnp.arange(5.0), jax.devices()[1]),
    }


def _kinds() -> dict[str, Any]:
    dtypes = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"]
    dtypes += sorted(dense_layout._NAMED_DTYPES)
    return {
        "dtypes": {name: jnp.arange(5).astype(name) for name in dtypes},
        "numpy": {
            name: np.arange(6).astype(name).reshape(2, 3)
            for name in ("bool", "int64", "uint64", "float64", "float32")
        },
        "numpy_scalars": [np.float32(2), np.float64(3), np.int64(-3), np.uint8(1)],
        "no_axes": np.array(3.0),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "python": (1, 2.5, True, False, -7, (1 << 64) - 1),
        "text": {"a": "hi", "b": ("", "späße")},
        "nothing": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "zeros": jnp.zeros(3),
        "pair": Pair(1, jnp.ones(2)),
        "numbers": {3: 5, 10: jnp.ones(1)},
        "key": jax.random.key(3, impl="rbg"),
    }


_TREES = {
    "sharded": _sharded,
    "kinds": _kinds,
    "flax": lambda: State(step=jnp.int32(4), params={"w": _put(jnp.arange(8.0), "x")}),
    "numpy only": lambda: {"a": np.arange(4), "b": 1},
    "list": lambda: [jnp.ones(2), {"a": (1, np.ones(2))}],
    "dots": lambda: {"a.b": jnp.ones(2), "a": {"c": 1}, "with space": 2},
}


def _stock(directory: Path, tree: Any) -> Path:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    with ocp.CheckpointManager(directory, item_handlers={"dense": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(dense=ocp.args.PyTreeSave(tree)))
    return directory / "0" / "dense"


def _ours(directory: Path, tree: Any) -> Path:
    item = directory / "0" / "dense"
    item.mkdir(parents=True)
    digests = write_dense(item, tree)
    assert {str(path.relative_to(item)) for path in item.rglob("*") if path.is_file()} == {*digests}
    handlers = {"dense": ocp.PyTreeCheckpointHandler().typestr()}
    (item.parent / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": handlers}))
    return item


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _same(ours: Any, stock: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert a.sharding == b.sharding
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert a.dtype == b.dtype
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", _TREES)
def test_bytes_and_metadata_equal_stock(name: str, tmp_path: Path) -> None:
    tree = _TREES[name]()
    stock, ours = _stock(tmp_path / "stock", tree), _ours(tmp_path / "ours", tree)
    assert values_in(ours) == values_in(stock)
    for file in _FILES:
        assert _json(ours / file) == _json(stock / file), file


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("name", _TREES)
def test_stock_restores_the_same(name: str, tmp_path: Path) -> None:
    tree = _TREES[name]()
    stock, ours = _stock(tmp_path / "stock", tree), _ours(tmp_path / "ours", tree)
    found = []
    for item in (ours, stock):
        with ocp.CheckpointManager(item.parent.parent) as manager:
            by_manager = manager.restore(0)["dense"]
        handler = ocp.PyTreeCheckpointHandler()
        # Stock Orbax cannot restore numpy scalars with a template that has some.
        like = jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, tree)
        template = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
        )
        by_v1 = v1.load(item.parent, checkpointable_name="dense")
        found.append((by_manager, handler.restore(item, args=template), by_v1))
    for a, b in zip(*found, strict=True):
        _same(a, b)


def test_large_values_are_referenced_and_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    big = rng.standard_normal((16, 1 << 18), np.float32)
    tree = {"numpy": big, "zeros": np.zeros_like(big), "halves": _put(big, None, "y")}
    tree["single"] = jnp.asarray(big)
    ours, stock = _ours(tmp_path / "ours", tree), _stock(tmp_path / "stock", tree)
    assert values_in(ours) == values_in(stock)


def _values(plan: dense_layout.Plan) -> list[ocdbt.Value]:
    chunks = [
        ocdbt.Value(chunk.key, np.ascontiguousarray(np.asarray(source)[chunk.window]))
        for chunk, source in zip(plan.chunks, plan.sources, strict=True)
    ]
    return [*(ocdbt.Value(key, data) for key, data in plan.described.items()), *chunks]


def _write_part(item: Path, process: int, values: list[ocdbt.Value]) -> None:
    ocdbt.write(ocdbt.process_directory(item, process), values, FileBatch(item, fsync=False))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_merge_with_a_missing_child_raises(missing: int, tmp_path: Path) -> None:
    plan = dense_layout.plan(_sharded())
    half = len(plan.chunks) // 2
    values = _values(plan)
    pieces = [values[:-half], values[-half:]]
    for process, piece in enumerate(pieces):
        if process != missing:
            _write_part(tmp_path, process, piece)
    with pytest.raises(Disagreement, match="missing"):
        ocdbt.merge(tmp_path, [0, 1], plan.described)
    assert not (tmp_path / "manifest.ocdbt").exists()
    _write_part(tmp_path, missing, pieces[missing])
    ocdbt.merge(tmp_path, [0, 1], plan.described)
    assert values_in(tmp_path) == values_in(_stock(tmp_path / "stock", _sharded()))


def test_a_merge_of_many_leaves_reads_files_as_often_as_one_of_few(tmp_path: Path) -> None:
    def reads(count: int) -> int:
        item = tmp_path / str(count)
        item.mkdir()
        plan = dense_layout.plan({f"leaf{number}": np.arange(4) for number in range(count)})
        values = _values(plan)
        for process, piece in enumerate((values[:count], values[count:])):
            _write_part(item, process, piece)
        before = _file_reads()
        ocdbt.merge(item, [0, 1], plan.described)
        return _file_reads() - before

    # TensorStore reads and decodes a whole node for each value.
    assert reads(200) == reads(2) > 0


def _file_reads() -> int:
    """Returns the count of TensorStore's file reads in this process."""
    name = "/tensorstore/kvstore/file/read"
    found = ts.experimental_collect_matching_metrics(name)  # Empty before the first read.
    return sum(one["values"][0]["value"] for one in found if one["name"] == name)


def test_two_writers_of_one_value_are_rejected(tmp_path: Path) -> None:
    plan = dense_layout.plan({"a": jnp.ones(2)})
    for process in (0, 1):
        _write_part(tmp_path, process, _values(plan))
    with pytest.raises(Disagreement, match="processes 0 and 1"):
        ocdbt.merge(tmp_path, [0, 1], plan.described)


def test_equal_names_are_rejected() -> None:
    with pytest.raises(UnsupportedLeaf, match=r"\['a'\]\['b'\].*\['a.b'\]"):
        dense_layout.plan({"a.b": 1, "a": {"b": 2}})


@pytest.mark.parametrize(
    "leaf",
    [
        np.bool_(True),
        b"raw",
        1j,
        np.complex64(1),
        np.zeros(0),
        1 << 64,
        np.arange(3, dtype=">i4"),
        np.array(["a"]),
        np.longdouble(1),
        Ellipsis,
        object(),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_unsupported_leaves_are_reported(leaf: Any) -> None:
    assert dense_layout.covered(leaf)
    with pytest.raises(UnsupportedLeaf, match=r"\['a'\]"):
        dense_layout.plan({"a": leaf})


def test_another_process_writes_only_its_chunks() -> None:
    plan = dense_layout.plan(_kinds() | {"rows": _put(jnp.arange(8.0), "x")}, process=1)
    assert not plan.described
    assert set(plan.files) == {"array_metadatas/process_1"}
    assert not [chunk for chunk in plan.chunks if chunk.key.startswith("numpy")]


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.processes), pytest.param(4, marks=pytest.mark.long)]
)
def test_several_processes_equal_stock(count: int, tmp_path: Path) -> None:
    port = free_port()
    worker = Path(__file__).with_name("dense_layout_worker.py")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    jobs = [
        subprocess.Popen(
            [sys.executable, worker, str(number), str(count), str(port), tmp_path], env=environment
        )
        for number in range(count)
    ]
    try:
        assert [job.wait(250) for job in jobs] == [0] * count
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    stock, ours = tmp_path / "stock" / "0" / "dense", tmp_path / "ours"
    assert values_in(ours) == values_in(stock)
    metadatas = [f"array_metadatas/process_{number}" for number in range(count)]
    for file in (*_FILES, *metadatas):
        assert _json(ours / file) == _json(stock / file), file


def test_copies_of_small_leaves_share_memory_that_is_used_again() -> None:
    runtime = Runtime()
    memory = runtime.memory
    tree = {f"{n:02d}": np.full(5000 + n, n, np.float32 if n % 3 else np.int16) for n in range(40)}
    captured = DenseLeaves.capture(tree, 0, runtime)
    for value, leaf in zip(captured.chunks, tree.values(), strict=True):
        np.testing.assert_array_equal(value.array, leaf)
    nbytes = memory.nbytes
    assert nbytes > 0 and not memory.fits(memory.limit_bytes)
    captured.release()
    assert memory.fits(memory.limit_bytes)
    with (
        mock.patch.object(runtime, "map", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        DenseLeaves.capture(tree, 0, runtime)
    assert memory.fits(memory.limit_bytes) and memory.nbytes == nbytes


class _Sink:
    """Keeps copies of the pieces of each array."""

    def __init__(self, segment: str, pieces: dict[str, list[np.ndarray]]):
        self.segment, self._pieces = segment, pieces.setdefault(segment, [])

    def writer(self, entry: Any, *, pinned: bool = False) -> _Sink:
        return self

    def write(self, rows: np.ndarray) -> None:
        self._pieces.append(rows.copy())

    def finish(self) -> int:
        return sum(rows.nbytes for rows in self._pieces)


def test_copies_of_one_dtype_are_written_as_one_piece() -> None:
    dtypes = [np.float32, np.float32, np.int16]
    tree = {f"{n}": np.full(5000 + n, n, dtypes[n % 3]) for n in range(9)}
    tree["9"] = np.full(1 << 19, 9, np.float32)
    pieces: dict[str, list[np.ndarray]] = {}
    captured = DenseLeaves.capture(tree, 0, Runtime())
    captured.write_layer(lambda segment: _Sink(segment, pieces), SaveId("run", 1, 0), None)
    for dtype in (np.float32, np.int16):
        [[blocks]] = [one for name, one in pieces.items() if np.dtype(dtype).name in name]
        for leaf in (leaf for leaf in tree.values() if leaf.dtype == dtype):
            own, blocks = np.split(blocks, [-(-leaf.size // 256)])
            np.testing.assert_array_equal(own.reshape(-1)[: leaf.size], leaf)
            assert not own.reshape(-1)[leaf.size :].any()
        assert not len(blocks)
