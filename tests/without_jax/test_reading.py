# SPDX-License-Identifier: Apache-2.0
"""inspect reads every codec, every policy and every kind of leaf, without jax.

Run it in the environment with jax, and through ``make test-without-jax`` in one without.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import deltackpt.inspect
from deltackpt.inspect import lazy

RUNS = (
    "kinds",
    "codecs",
    "one-shot",
    "intermittent",
    "always",
    "compacted",
    "golden-v1",
    "golden-encodings-v1",
    "golden-shards-v1",
    "stock",
)


def expected(run: Path, step: int) -> tuple[dict[str, bytes], dict[str, dict]]:
    """Bytes of arrays, and other facts about each leaf, by path."""
    with np.load(run / f"{step}.npz") as held:
        arrays = {name.removeprefix("at:"): held[name].tobytes() for name in held.files}
    return arrays, json.loads((run / f"{step}.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_every_leaf_of_every_step_equals_the_restored_one(runs, name):
    ck = deltackpt.inspect.open(runs / name / "steps")
    assert ck.steps
    for number in ck.steps:
        arrays, known = expected(runs / name, number)
        step, seen = ck.at(number), set()
        for table in step.tables.values():
            for field, path in table.leaves.items():
                held = table.field(field)
                assert np.asarray(held).tobytes() == arrays[path], (number, path)
                assert (list(held.shape), held.dtype.name) == (
                    known[path]["shape"],
                    known[path]["dtype"],
                )
                seen.add(path)
        for path, leaf in step.dense.items():
            seen.add(path)
            if "value" in known[path]:
                assert leaf.value == known[path]["value"], path
                continue
            assert np.asarray(leaf.value).tobytes() == arrays[path], path
            if leaf.kind in ("array", "key"):
                assert list(leaf.shape) == known[path]["shape"], path
                assert leaf.dtype.name == known[path]["dtype"], path
        assert seen == known.keys()


def test_leaves_report_their_kind(runs):
    dense = deltackpt.inspect.open(runs / "kinds" / "steps").at()
    kinds = {name.removeprefix("dense/"): dense[name].kind for name in dense.dense}
    assert kinds["key"] == kinds["keys"] == "key" and kinds["text"] == "string"
    assert kinds["none"] == "None" and kinds["empty dict"] == "empty"
    assert kinds["whole"] == kinds["real"] == kinds["yes"] == "scalar"
    assert dense["dense/keys"].prng_impl == "rbg" and "key<rbg>" in repr(dense["dense/keys"])
    assert dense["dense/big"][3:5, ::7].shape == (2, 143)
    assert dense["dense/no elements"][:].shape == (0, 3)
    assert all(repr(leaf) for leaf in dense.dense.values())
    with pytest.raises(TypeError, match="see its value"):
        _ = dense["dense/text"].dtype


def test_items_of_a_stock_step_are_read_too(runs):
    step = deltackpt.inspect.open(runs / "stock" / "steps").at(0)
    assert list(step.items) == ["pytree"] and not step.dense
    assert step.items["pytree"]["kernel"].shape == (4, 3)


@pytest.mark.parametrize("name", RUNS)
def test_the_history_of_a_row_is_that_row_at_each_step(runs, name):
    ck = deltackpt.inspect.open(runs / name / "steps")
    for table in ck.at().tables.values():
        for field in table.leaves:
            rows = [0, len(table) - 1, len(table) // 2, 0]
            found = ck.history(table.name, rows, field=field)
            for step, values in zip(found.steps, found.values, strict=True):
                same = ck.at(int(step)).tables[table.name].field(field)[rows]
                assert values.tobytes() == same.tobytes(), (step, table.name, field)


@pytest.mark.parametrize("name", RUNS)
def test_a_diff_names_the_rows_that_differ(runs, name):
    ck = deltackpt.inspect.open(runs / name / "steps")
    first, last = ck.steps[0], ck.steps[-1]
    found = ck.diff(first, last)
    assert not found.only_a and not found.only_b
    for table, changed in found.tables.items():
        before, after = (np.asarray(ck.at(step).tables[table]) for step in (first, last))
        rows = [r for r in range(len(after)) if before[r].tobytes() != after[r].tobytes()]
        assert changed.rows.tolist() == rows, table


class Held(lazy.LazyArray):
    """A lazy array over an array in memory, which records what is read."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.name, self.shape, self.dtype = "held", array.shape, array.dtype
        self.most_rows = 0

    def _read(self, spans):
        self.most_rows = max(self.most_rows, sum(stop - start for start, stop in spans))
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        return np.concatenate([self.array[start:stop] for start, stop in spans])


SHAPES = [(7,), (9, 3), (5, 2, 4), (1, 1)]


def indices(length: int):
    """Indices of one axis."""
    ints = st.integers(-length, length - 1)
    bound = st.none() | st.integers(-length - 2, length + 2)
    steps = st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3])
    return (
        ints
        | ints.map(np.int64)
        | st.builds(slice, bound, bound, steps)
        | st.lists(ints, max_size=5).map(lambda some: np.array(some, int))
        | st.lists(ints, min_size=4, max_size=4).map(lambda some: np.array(some).reshape(2, 2))
        | st.lists(st.booleans(), min_size=length, max_size=length).map(np.array)
    )


@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_indexing_matches_numpy(data, shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    count = data.draw(st.integers(0, len(shape)))
    pieces = [data.draw(indices(length)) for length in shape[:count]]
    if data.draw(st.booleans()):
        pieces.insert(data.draw(st.integers(0, count)), data.draw(st.sampled_from([None, ...])))
    index = pieces[0] if len(pieces) == 1 and data.draw(st.booleans()) else tuple(pieces)
    try:
        wanted = array[index]
    except IndexError:  # Arrays that cannot be broadcast together.
        with pytest.raises(IndexError):
            Held(array)[index]
        return
    found = Held(array)[index]
    assert np.shape(found) == np.shape(wanted) and np.array_equal(found, wanted)


@pytest.mark.parametrize("wrong", [7, -8, [7], "x", 1.5, (1, 2), (..., ...), [True, False]])
def test_wrong_indices_raise_what_numpy_raises(wrong):
    array = np.zeros(7)
    with pytest.raises(IndexError):
        array[wrong]
    with pytest.raises(IndexError):
        Held(array)[wrong]


def test_scattered_rows_are_read_in_batches_and_near_ones_together():
    array = np.arange(400_000, dtype=np.float32).reshape(200_000, 2)
    held = Held(array)
    rows = np.unique(np.random.default_rng(0).integers(0, 200_000, 3000))
    full = lazy._WINDOW_BYTES
    try:
        lazy._WINDOW_BYTES = 80_000  # 10,000 rows of 8 bytes.
        assert np.array_equal(held[rows], array[rows])
        assert held.most_rows <= 10_000
        assert np.array_equal(np.stack(list(Held(array[:30]))), array[:30])
    finally:
        lazy._WINDOW_BYTES = full


def test_a_mask_of_several_axes_matches_numpy():
    array = np.arange(12.0).reshape(4, 3)
    assert np.array_equal(Held(array)[array > 4], array[array > 4])
    assert np.asarray(Held(array), np.int32).dtype == np.int32
    with pytest.raises(ValueError, match="copy"):
        np.asarray(Held(array), copy=False)


@given(
    rows=st.integers(0, 9),
    batch=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "int8", "bool", "complex64", "uint64"]),
    data=st.data(),
)
def test_statistics_in_batches_equal_those_of_all_elements_at_once(rows, batch, dtype, data):
    cells = data.draw(st.lists(st.integers(0, 3), min_size=2 * rows, max_size=2 * rows))
    array = np.array(cells, np.float64).reshape(rows, 2).astype(dtype)
    if dtype == "float32" and rows > 1:
        array[1, 0], array[0, 1] = np.nan, -np.inf
    found = lazy.statistics_of(array[i : i + batch] for i in range(0, rows, batch))
    # In double precision, like the statistics.
    exact = array.astype(np.complex128 if dtype == "complex64" else np.float64)
    flat = (np.abs(exact) if dtype == "complex64" else exact).ravel()
    finite = flat[np.isfinite(flat)]
    assert found.rows == rows
    assert found.zero_rows == int((array == 0).all(axis=1).sum())
    assert found.not_finite_rows == int((~np.isfinite(array.astype(complex))).any(axis=1).sum())
    if finite.size:
        figures = (found.mean, found.std, found.least, found.greatest)
        expected = (finite.mean(), finite.std(), finite.min(), finite.max())
        np.testing.assert_allclose(figures, expected, atol=1e-12)
    else:
        assert np.isnan(found.mean)


COMMANDS = (
    "ls {root}",
    "show {root}",
    "diff {root} 0 3",
    "history {root} tables/users 3 4",
    "verify {root}",
    "plan {root}",
    "gc {root} --dry-run",
    "copy {root} {out}/copied",
    "report {root} -o {out}/report.html",
    "export safetensors {root} {out}/tensors",
    "export parquet {root} {out}/parquet",
    "compact {out}/copied",
)


def test_read_commands_work_without_jax(runs, tmp_path):
    root = runs / "compacted" / "steps"
    for text in COMMANDS:
        arguments = text.format(root=root, out=tmp_path).split()
        found = subprocess.run(
            [sys.executable, "-m", "deltackpt.cli", *arguments, "--json"],
            capture_output=True,
            text=True,
        )
        assert (found.returncode, found.stderr) == (0, ""), text
        assert json.loads(found.stdout) is not None or text.startswith("compact")


def test_doctor_reports_what_training_would_need(runs):
    command = [sys.executable, "-m", "deltackpt.cli", "doctor", str(runs / "kinds" / "steps")]
    found = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert found.stderr == ""
    told = {one["subject"]: one for one in json.loads(found.stdout)["findings"]}
    missing = importlib.util.find_spec("jax") is None
    assert told["jax"]["severity"] == ("problem" if missing else "ok")


def test_neither_jax_nor_orbax_is_imported(runs):
    program = (
        "import sys, numpy, deltackpt.inspect\n"
        "step = deltackpt.inspect.open(sys.argv[1]).at()\n"
        "[numpy.asarray(table) for table in step.tables.values()]\n"
        "[leaf.value for leaf in step.dense.values()]\n"
        "print([name for name in ('jax', 'orbax', 'flax', 'optax') if name in sys.modules])"
    )
    root = str(runs / "kinds" / "steps")
    found = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_the_requested_environment_has_no_jax(request):
    if request.config.getoption("--runs", default=None) is None:
        pytest.skip("the environment with jax: make test-without-jax runs the one without")
    for name in ("jax", "orbax", "flax", "optax"):
        assert importlib.util.find_spec(name) is None, name
