# SPDX-License-Identifier: Apache-2.0
"""Exports to safetensors and Parquet hold the bits of the step, and appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import model
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet as pq
import pytest
import safetensors
import safetensors.numpy
from command import run as in_process
from flat_options import manager_options
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compact import write_chain
from test_interchange_orbax import saved_every_kind

import deltackpt
from deltackpt import errors, inspect, interchange

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "uint8", "int4", "bool"]
EXPORTS = [interchange.export_safetensors, interchange.export_parquet]


def random_table(rows: int, row_shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """Any bits, including NaNs, infinities and subnormals."""
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    rng = np.random.default_rng(seed)
    if kind in ("int4", "bool"):
        return rng.integers(0, 2, (rows, *row_shape)).astype(dtype)
    raw = rng.integers(0, 256, (rows, *row_shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype)[..., 0]


def write_table(root: Path, table: np.ndarray, **others: np.ndarray) -> None:
    handlers = {"embeddings": deltackpt.Tables(select="deep/table")}
    options = manager_options(durability="process")
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        manager.save(1, {"deep": {"table": table}, **others})


@pytest.fixture
def chain(tmp_path) -> Path:
    """A base and four deltas."""
    write_chain(tmp_path / "run")
    return tmp_path / "run"


tables = st.builds(
    random_table,
    st.integers(1, 40),
    st.sampled_from([(), (1,), (5,), (2, 3)]),
    st.sampled_from(KINDS),
    st.integers(0, 2**32 - 1),
)


def same_bits(found: np.ndarray, expected: Any) -> None:
    expected = np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


# safetensors.


@settings(max_examples=15)
@given(tables)
def test_safetensors_hold_the_bits_of_any_table(table):
    with tempfile.TemporaryDirectory() as folder:
        run, target = Path(folder, "run"), Path(folder, "out")
        write_table(run, table)
        done = interchange.export_safetensors(run, None, target)
        found = raw_tensors(target / "model.safetensors")["deep/table"]
        wide = table.astype(np.int8) if table.dtype.name == "int4" else table
        assert done.changed == ({"deep/table": "int8"} if wide is not table else {})
        same_bits(found.view(wide.dtype).reshape(wide.shape), wide)


def raw_tensors(path: Path) -> dict[str, np.ndarray]:
    """Bytes of each tensor, by the library's own parser."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: np.frombuffer(tensor["data"], np.uint8) for name, tensor in found}


def test_safetensors_hold_every_leaf_that_is_a_tensor(tmp_path):
    state = saved_every_kind(tmp_path / "run")
    done = interchange.export_safetensors(tmp_path / "run", None, tmp_path / "out")
    assert done.left_out == ("text",)  # Not leaves without a value: "list/1", "none", "nothing".
    assert done.changed == {"int4": "int8"}
    # The library reads these as numpy arrays; it names bf16 and 8-bit floats differently.
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as found:
        metadata = found.metadata()
        for name, expected in (
            ("emb/a", state["emb"]["a"]),
            ("list/2/deep", state["list"][2]["deep"]),
            ("key", jax.random.key_data(state["key"])),
            ("keys", jax.random.key_data(state["keys"])),
            ("bool", state["bool"]),
        ):
            same_bits(found.get_tensor(name), expected)
        assert found.get_tensor("int") == 3 and found.get_tensor("float") == 2.5
        assert found.get_tensor("numpy") == 0.1
        assert found.get_slice("empty").get_shape() == [0, 3]
        assert found.get_slice("bf16").get_dtype() == "BF16"
    assert (metadata["step"], metadata["deltackpt"]) == ("4", deltackpt.__version__)
    assert metadata["save_id"] == inspect.open(tmp_path / "run").at(4).save_id
    raw = raw_tensors(tmp_path / "out" / "model.safetensors")
    for name in ("bf16", "fp8"):
        assert raw[name].tobytes() == np.asarray(state[name]).tobytes()


def test_only_chosen_leaves_are_exported(tmp_path):
    state = saved_every_kind(tmp_path / "run")
    leaves = ["emb/*", "list/**", "text"]
    done = interchange.export_safetensors(tmp_path / "run", None, tmp_path / "out", leaves=leaves)
    assert done.left_out == ("text",) and not done.changed
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    assert {*found} == {"emb/a", "list/0", "list/2/deep"}
    assert found["emb/a"].tobytes() == np.asarray(state["emb"]["a"]).tobytes()
    with pytest.raises(errors.OptionError, match=r"'nowhere/\*', found\n  bf16\n"):
        interchange.export_safetensors(tmp_path / "run", None, tmp_path / "no", leaves="nowhere/*")
    done = in_process("export", "orbax", tmp_path / "run", tmp_path / "orbax", "--leaf", "list/**")
    assert done.returncode == 0 and "left out" not in done.stdout, done.stderr
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "orbax" / "4" / "default")
    assert {*restored} == {"list"}
    same_bits(np.asarray(restored["list"]["2"]["deep"]), state["list"][2]["deep"])


def test_shards_are_bounded_and_their_index_locates_each_tensor(tmp_path):
    states = write_chain(tmp_path / "run")
    done = interchange.export_safetensors(tmp_path / "run", 3, tmp_path / "out", shard_bytes=12_000)
    shards = [name for name in done.files if name.endswith(".safetensors")]
    count = len(shards)
    assert count > 1 and shards[0] == f"model-00001-of-{count:05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = {
        f"{kind}/{name}": leaf
        for kind in ("tables", "slots")
        for name, leaf in states[3][kind].items()
    }
    assert expected.keys() <= index["weight_map"].keys()
    found = {}
    for name in shards:
        shard = safetensors.numpy.load_file(tmp_path / "out" / name)
        held = [array.nbytes for array in shard.values()]
        assert sum(held) <= 12_000 or len(held) == 1
        assert {place for key, place in index["weight_map"].items() if key in shard} == {name}
        found.update(shard)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    for name, leaf in expected.items():
        same_bits(found[name], leaf)


# Parquet.


@settings(max_examples=15)
@given(tables, st.booleans())
def test_parquet_holds_the_values_of_any_table(table, in_groups):
    with tempfile.TemporaryDirectory() as folder:
        run, target = Path(folder, "run"), Path(folder, "out")
        write_table(run, table)
        with mock.patch("deltackpt.interchange.parquet._GROUP_BYTES", 64 if in_groups else 1 << 20):
            interchange.export_parquet(run, None, target)
        found = pq.read_table(target / "deep%2Ftable.parquet")
        assert found["row"].to_pylist() == list(range(len(table)))
        described = json.loads(found.schema.metadata[b"deltackpt.columns"])["values"]
        assert described == {"dtype": table.dtype.name, "row_shape": list(table.shape[1:])}
        column = found["values"].combine_chunks()
        flat = column if table.ndim == 1 else column.flatten()
        values = flat.to_numpy(zero_copy_only=False).reshape(table.shape)
        narrow = {"bfloat16": "float32", "float8_e4m3fn": "float32", "int4": "int8"}
        same_bits(values, table.astype(narrow.get(table.dtype.name, table.dtype)))


def test_parquet_has_slots_rows_and_pandas_reads_it(tmp_path):
    import pandas

    states = write_chain(tmp_path / "run")
    chosen = {"tables": ["tables/*s"], "rows": (10, 25)}
    done = interchange.export_parquet(tmp_path / "run", 4, tmp_path / "out", **chosen)
    assert done.files == ("tables%2Fitems.parquet", "tables%2Fusers.parquet")
    frame = pandas.read_parquet(tmp_path / "out" / "tables%2Fusers.parquet")
    assert list(frame.columns) == ["row", "values", "slot.accumulator"]
    assert frame["row"].tolist() == list(range(10, 25))
    same_bits(np.stack(frame["values"]), np.asarray(states[4]["tables"]["users"])[10:25])
    same_bits(frame["slot.accumulator"].to_numpy(), np.asarray(states[4]["slots"]["users"])[10:25])
    interchange.export_parquet(tmp_path / "run", 4, tmp_path / "bare", slots=False)
    found = pq.ParquetFile(tmp_path / "bare" / "tables%2Ftiny.parquet")
    assert found.schema_arrow.names == ["row", "values"]
    assert found.metadata.row_group(0).column(1).compression == "ZSTD"
    metadata = found.schema_arrow.metadata
    assert (metadata[b"deltackpt.table"], metadata[b"deltackpt.step"]) == (b"tables/tiny", b"4")


def test_errors_name_what_cannot_be_exported_to_parquet(chain, tmp_path, monkeypatch):
    with pytest.raises(errors.TemplateMismatch, match="other"):
        interchange.export_parquet(chain, None, tmp_path / "out", tables=["other"])
    with pytest.raises(errors.TemplateMismatch, match=r"tables/tiny.*within \[0, 5\)"):
        interchange.export_parquet(chain, None, tmp_path / "out", rows=(0, 100))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.MissingExtra, match="interchange"):
        interchange.export_parquet(chain, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Both.


@pytest.mark.parametrize("name", ["v1", "shards-v1", "encodings-v1"])
def test_deltas_codecs_and_shards_are_exported_as_inspect_reads_them(tmp_path, name):
    interchange.export_safetensors(GOLDEN / name, 30, tmp_path / "tensors")
    interchange.export_parquet(GOLDEN / name, 30, tmp_path / "parquet")
    step = inspect.open(GOLDEN / name).at(30)
    raw = raw_tensors(tmp_path / "tensors" / "model.safetensors")
    for table in step.tables.values():
        for field, path in table.leaves.items():
            assert raw[path].tobytes() == np.asarray(table.field(field)).tobytes()
        file = tmp_path / "parquet" / f"{table.name.replace('/', '%2F')}.parquet"
        values = pq.read_table(file)["values"].combine_chunks().flatten().to_numpy()
        assert values.tobytes() == np.asarray(table).astype(values.dtype).tobytes()


def test_a_leaf_that_safetensors_cannot_hold_is_named(tmp_path):
    write_table(tmp_path / "run", np.ones((4, 2)), waves=np.ones(3, np.complex128))
    with pytest.raises(errors.OptionError, match="waves.*complex128"):
        interchange.export_safetensors(tmp_path / "run", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def failing(number: int):
    """An ``open`` that cannot write files; directories can be created."""

    def opened(path, mode="r", *arguments, **options):
        if "w" in mode:
            raise OSError(number, os.strerror(number))
        return open(path, mode, *arguments, **options)

    return opened


@pytest.mark.parametrize("export", EXPORTS)
def test_a_failed_export_leaves_nothing_and_touches_nothing(chain, tmp_path, export):
    (tmp_path / "taken").mkdir()
    with pytest.raises(errors.TargetExists):
        export(chain, None, tmp_path / "taken")
    with pytest.raises(errors.StepNotFound):
        export(chain, 99, tmp_path / "out")
    module = sys.modules[export.__module__]
    for number, kind in ((28, errors.OutOfSpace), (5, errors.StorageError)):
        with mock.patch.object(module, "open", failing(number), create=True):
            with pytest.raises(kind, match="nothing was left behind"):
                export(chain, None, tmp_path / "out")
    for path in (chain / "0" / "embeddings").rglob("c.*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(errors.Damaged):
        export(chain, None, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["run", "taken"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("export", EXPORTS)
def test_a_disk_that_fills_up_is_out_of_space(chain, tmp_path, export):
    module = sys.modules[export.__module__]
    with mock.patch.object(module, "open", lambda *_: open("/dev/full", "wb"), create=True):
        with pytest.raises(errors.OutOfSpace):
            export(chain, None, tmp_path / "out")
    assert os.listdir(tmp_path) == ["run"]


def test_too_little_space_is_reported_before_anything_is_written(chain, tmp_path):
    with mock.patch("deltackpt.storage.posix.free_bytes", return_value=100):
        with pytest.raises(errors.OutOfSpace, match="100 free"):
            interchange.export_safetensors(chain, None, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "out").exists()


# The commands.


def command(*arguments: object, cwd: Path | None = None):
    program = [sys.executable, "-W", "error", "-m", "deltackpt.cli"]
    return subprocess.run(
        [*program, *arguments], capture_output=True, text=True, cwd=cwd, timeout=240
    )


def test_commands_export_and_report_what_they_did(chain, tmp_path):
    found = in_process("export", "safetensors", chain, tmp_path / "st", 2)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("step 2: 1 file of ") and "left out" not in found.stdout
    arguments = ("--table", "tables/users", "--no-slots", "--rows", "5:9", "--json")
    found = in_process("export", "parquet", chain, tmp_path / "pq", *arguments)
    assert json.loads(found.stdout)["files"] == ["tables%2Fusers.parquet"], found.stderr
    rows = pq.read_table(tmp_path / "pq" / "tables%2Fusers.parquet")["row"]
    assert rows.to_pylist() == [5, 6, 7, 8]
    found = in_process("export", "parquet", chain, tmp_path / "pq")
    assert found.returncode == 1 and found.stderr.endswith("[target-exists]\n")
    found = in_process("export", "parquet", chain, tmp_path / "x", "--rows", "5")
    assert found.returncode == 2


@pytest.mark.processes
def test_commands_switch_a_run_over_and_back(chain, tmp_path):
    found = command("export", "orbax", chain, tmp_path / "plain")
    assert found.returncode == 0, found.stderr
    folder = os.path.dirname(model.__file__)
    program = f"import sys; sys.path.insert(0, {folder!r})\nimport model\nmake = model.initial\n"
    (tmp_path / "my_model.py").write_text(program)
    again = ("import", tmp_path / "plain", tmp_path / "again", "--tables", "tables/*")
    again = (*again, "--slot", "accumulator=slots/{name}")
    for extra in ((), ("--template", "my_model:make")):
        found = command(*again, *extra, cwd=tmp_path)
        assert found.returncode == 0, found.stderr
        assert "accumulator" in found.stdout and "step 4: " in found.stdout
        shutil.rmtree(tmp_path / "again")
    assert command(*again, "--slot", "x").returncode == 2
    found = command(*again, "--template", "no_such:thing")
    assert found.returncode == 1 and found.stderr.endswith("[option]\n")
