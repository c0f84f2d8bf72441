# SPDX-License-Identifier: Apache-2.0
"""Saves of device tables have the right bytes although the next training step overwrites them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from flat_options import manager_options

import deltackpt
from deltackpt import codecs
from deltackpt.save import capture, encode, selection

ROWS = {"users": 5000, "items": 3000}
WIDTH = 16
LOSSY = ("int8", "adaptive4")


def initial(device: jax.Device) -> dict:
    random = np.random.default_rng(0)
    state = {
        "tables": {
            name: random.normal(size=(rows, WIDTH)).astype(np.float32)
            for name, rows in ROWS.items()
        },
        "slots": {name: random.random(rows, np.float32) for name, rows in ROWS.items()},
        "dense": {"kernel": random.random((32, 32), np.float32)},
    }
    return jax.device_put(state, device)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train(state: dict, touched: deltackpt.TouchState, ids: dict) -> tuple:
    """Changes the rows that ``ids`` name, their slots and the dense part, and marks the rows."""
    tables, slots = dict(state["tables"]), dict(state["slots"])
    for name, rows in ids.items():
        tables[name] = tables[name].at[rows].multiply(1.25)
        slots[name] = slots[name].at[rows].add(0.5)
    dense = jax.tree.map(lambda kernel: kernel * 0.5, state["dense"])
    touched = deltackpt.touched.mark(touched, ids)
    return {"tables": tables, "slots": slots, "dense": dense}, touched


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(state: dict) -> dict:
    """Replaces all values."""
    return jax.tree.map(lambda leaf: -2 * leaf - 1, state)


@jax.jit
def copied(state: dict) -> dict:
    return jax.tree.map(jnp.copy, state)


def some_ids(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.choice(rows, rows // 2, replace=False).astype(np.int32)
        for name, rows in ROWS.items()
    }


def save_and_overwrite(manager: deltackpt.CheckpointManager, step: int, state, touched) -> tuple:
    """Saves a state that the steps after the call, dispatched at once, donate and overwrite.

    Returns:
      The state given to ``save()``, in host memory, and the result.
    """
    kept, given = copied(state), jax.tree.leaves((state["tables"], state["slots"]))
    saved = manager.save(step, state, touched=touched)
    for _ in range(3):
        state = overwrite(state)
    assert all(leaf.is_deleted() for leaf in given)
    manager.wait_until_finished()
    return jax.tree.map(np.asarray, kept), saved


def open_manager(root, codec="raw", **options) -> deltackpt.CheckpointManager:
    handlers = {
        "embeddings": deltackpt.Tables(
            select="tables/*", slots={"tables/*": {"accumulator": "slots/{name}"}}, codec=codec
        )
    }
    return deltackpt.CheckpointManager(root, handlers=handlers, options=manager_options(**options))


def on_device(device: jax.Device, codec: codecs.Codec, rows: np.ndarray) -> encode.Encoded:
    """Encodes at most 64 rows on a device; for ``model.decoded``."""
    padded = np.zeros((64, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    piece = capture.DevicePiece.dispatch(codec, jax.device_put(padded, device), len(rows))
    return piece.encoded(codec)


def coded(device: jax.Device, codec: str, state: dict, ids: dict[str, np.ndarray]) -> dict:
    """Returns a state whose rows ``ids`` were encoded on a device and decoded."""
    tables = {name: table.copy() for name, table in state["tables"].items()}
    for name, rows in ids.items():
        encoder = functools.partial(on_device, device)
        tables[name][rows] = model.decoded(codec, tables[name][rows], encoder)
    return {**state, "tables": tables}


def coded_on_either(device, codec: str, state: dict, ids: dict[str, np.ndarray], found) -> dict:
    """Like ``coded``, but takes a row as the CPU encodes it if ``found`` matches that."""
    tables = coded(device, codec, state, ids)["tables"]
    for name, rows in ids.items():
        on_cpu = model.decoded(codec, state["tables"][name][rows])
        same = (on_cpu == np.asarray(found["tables"][name])[rows]).all(axis=1)
        tables[name][rows[same]] = on_cpu[same]
    return {**state, "tables": tables}


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 4999, 5000])
def test_touched_rows_on_the_device_are_those_on_the_host(device, count):
    stamps = np.zeros(5000, np.int32)
    stamps[np.random.default_rng(count).choice(5000, count, replace=False)] = 3
    spans = [(0, 1000), (1500, 5000)]
    rows = np.flatnonzero(stamps)
    expected = [row + 7 for row in rows if not 1000 <= row < 1500]
    for data in (stamps, jax.device_put(stamps, device)):
        on_host = data is stamps
        bounds, firsts = np.array([[7, 5007]]), np.array([7])
        source = capture.FieldSource((0, 1), (), stamps.dtype, on_host, bounds, firsts, [data])
        found = [selection.touched_rows(source, 2, start + 7, stop + 7) for start, stop in spans]
        assert np.concatenate(found).tolist() == expected


@pytest.mark.parametrize("codec", ["raw", *LOSSY])
def test_delta_of_tables_that_are_overwritten_at_once_restores_exactly(
    device, codec, tmp_path, monkeypatch
):
    # Several pieces for each field: the smallest are 1024 rows.
    monkeypatch.setattr(capture, "_DEVICE_PIECE_BYTES", 1 << 16)
    state = initial(device)
    touched = deltackpt.touched.init(state["tables"])
    with open_manager(tmp_path, codec) as manager:
        manager.save(0, state, touched=touched)
        manager.wait_until_finished()
        # The test does not wait for the steps before the save either.
        for seed in (1, 2):
            state, touched = train(state, touched, some_ids(seed))
        expected, saved = save_and_overwrite(manager, 1, state, touched)
        assert saved.kind == "delta"
        found = manager.restore(1, jax.device_put(expected, device)).state
    assert {leaf.device for leaf in jax.tree.leaves(found)} == {device}
    if codec != "raw":
        first, second = some_ids(1), some_ids(2)
        ids = {name: np.union1d(first[name], second[name]) for name in ROWS}
        expected = coded(device, codec, expected, ids)
    model.assert_same(found, expected)


@pytest.mark.parametrize("codec", LOSSY)
def test_device_encodes_as_the_cpu_does(device, codec):
    rows = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    rows[7] = 0
    rows[11, 3] = np.nan
    host = model.decoded(codec, rows)
    found = model.decoded(codec, rows, functools.partial(on_device, device))
    # Some processors round divisions and fused multiplications differently. This rarely changes a
    # stored scale or code, and never the size of the errors.
    same = (found.view(np.int32) == host.view(np.int32)).all(axis=1)
    assert same.mean() >= 0.99
    assert same[[7, 11]].all()
    whole = np.isfinite(rows).all(axis=1)
    wrong, allowed = ((coded - rows)[whole] for coded in (found, host))
    np.testing.assert_allclose((wrong**2).sum(), (allowed**2).sum(), rtol=0.01)


@pytest.mark.parametrize("base_snapshot", ["hold", "block"])
def test_base_of_tables_that_are_overwritten_at_once_restores_exactly(
    device, base_snapshot, tmp_path
):
    state = initial(device)
    touched = deltackpt.touched.init(state["tables"])
    with open_manager(tmp_path, base_snapshot=base_snapshot) as manager:
        state, touched = train(state, touched, some_ids(1))
        expected, saved = save_and_overwrite(manager, 0, state, touched)
        assert saved.kind == "base"
        found = manager.restore(0, jax.device_put(expected, device)).state
    model.assert_same(found, expected)


@pytest.mark.parametrize("codec", ["raw", "adaptive4"])
def test_delta_above_the_staging_budget_restores_exactly(device, codec, tmp_path):
    state = initial(device)
    touched = deltackpt.touched.init(state["tables"])
    with open_manager(tmp_path, codec, staging_bytes=1 << 10) as manager:
        manager.save(0, state, touched=touched)
        manager.wait_until_finished()
        state, touched = train(state, touched, some_ids(1))
        expected, saved = save_and_overwrite(manager, 1, state, touched)
        assert saved.kind == "delta"
        found = manager.restore(1, jax.device_put(expected, device)).state
    if codec != "raw":
        # Without room on the device, rows are encoded on the CPU.
        expected = coded_on_either(device, codec, expected, some_ids(1), found)
    model.assert_same(found, expected)
