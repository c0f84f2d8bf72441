# SPDX-License-Identifier: Apache-2.0
"""Extraction: the accelerator's path returns the same rows as numpy."""

from __future__ import annotations

from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from hypothesis import given, settings

import deltackpt
from deltackpt import codecs
from deltackpt.format import row_blocks
from deltackpt.resources.runtime import Runtime
from deltackpt.save import capture, selection

P = jax.sharding.PartitionSpec


def touched_rows(stamps, since: int, spans, *, on_host: bool = True) -> np.ndarray:
    """The touched rows of a table that begins at virtual row 7."""
    shards = [stamps]
    if isinstance(stamps, jax.Array):
        shards = [shard.data for shard in stamps.addressable_shards]
    ends = 7 + np.cumsum([0, *map(len, shards)])
    bounds = np.stack([ends[:-1], ends[1:]], axis=1)
    dtype = np.dtype(np.int32)
    source = capture.FieldSource((0, 1), (), dtype, on_host, bounds, ends[:-1], shards)
    found = [selection.touched_rows(source, since, start + 7, stop + 7) for start, stop in spans]
    return np.concatenate([np.empty(0, np.int64), *found])


# Each shape on each device costs a compilation of about a second, so there are few of both.
@settings(max_examples=50)
@given(
    rows=st.sampled_from([3, 3 * 50, 3 * 200]),
    since=st.integers(0, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_touched_rows_on_the_device_are_those_on_the_host(rows, since, seed, data):
    ends = data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=6).map(sorted))
    spans = row_blocks.joined(zip(ends[::2], ends[1::2]))
    stamps = np.random.default_rng(seed).integers(0, 5, rows).astype(np.int32)
    mesh = jax.make_mesh((3,), ("x",), devices=jax.devices()[:3])
    sharded = jax.device_put(stamps, jax.sharding.NamedSharding(mesh, P("x")))
    wanted = [row for start, stop in spans for row in range(start, stop) if stamps[row] > since]
    expected = touched_rows(stamps, since, spans)
    assert expected.tolist() == [row + 7 for row in wanted]
    with mock.patch.object(capture, "on_host", lambda array: False):
        found = touched_rows(sharded, since, spans, on_host=False)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


def test_device_programs_read_no_stamps_in_host_memory():
    shards = [jnp.array([1, 3, 3]), jnp.zeros(0, jnp.int32), jnp.array([3, 1])]
    bounds = np.array([[0, 3], [3, 3], [3, 5]])
    source = capture.FieldSource(
        (0, 1), (), np.dtype(np.int32), False, bounds, bounds[:, 0], shards
    )
    with (
        mock.patch.object(capture, "on_host", lambda array: array is shards[0]),
        mock.patch.object(selection, "_touched", wraps=selection._touched) as program,
    ):
        assert selection.touched_rows(source, 2, 1, 5).tolist() == [1, 2, 3]
        assert selection.touched_rows(source, 2, 3, 3).tolist() == []
    assert all(call.args[0] is not shards[0] for call in program.call_args_list)


@pytest.mark.parametrize(
    ("spec", "on_host"), [(P("x"), True), (P("x"), False), (P(), False), (P(None, "x"), False)]
)
def test_a_save_with_scans_on_threads_restores_exactly(spec, on_host, tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    handlers = {"embeddings": deltackpt.Tables(select="table")}
    state = {"table": jax.device_put(np.random.default_rng(0).random((4096, 16)), sharding)}
    touched = deltackpt.touched.init(state)
    with (
        mock.patch.object(capture, "on_host", lambda array: on_host),
        mock.patch.object(selection, "_INLINE_STAMPS", 500),
        deltackpt.CheckpointManager(tmp_path, handlers=handlers) as manager,
    ):
        manager.save(0, state, touched=touched)
        ids = jnp.array([0, 5, 511, 512, 4095])
        rows = state["table"].at[ids].get(out_sharding=jax.sharding.NamedSharding(mesh, P())) + 1
        state = {"table": state["table"].at[ids].set(rows, out_sharding=sharding)}
        touched = deltackpt.touched.mark(touched, {"table": ids})
        assert manager.save(1, state, touched=touched).kind == "delta"
        [_, report] = manager.wait_until_finished()
        assert report.rows == 5
        found = manager.restore(1, state).state
    model.assert_same(found, state)


def test_a_gather_of_no_rows_is_empty():
    bounds, firsts = np.array([[0, 8]]), np.array([0])
    dtype = np.dtype(np.float32)
    source = capture.FieldSource((0, 4), (4,), dtype, True, bounds, firsts, [jnp.ones((8, 4))])
    segment = capture.SegmentSource("g0", (0, 4), np.empty(0, np.int64), {"values": source})
    found = capture.StagedRows([segment], {}, Runtime())
    found.land()
    assert not [*found.pieces(0, "values", codecs.get("raw"))]


@pytest.mark.parametrize(
    ("made", "rows", "on_host", "expected"),
    [
        (jnp.ones, range(2, 7), True, True),
        (np.ones, range(2, 7), True, True),
        (lambda shape: np.ones(shape, order="F"), range(2, 7), True, False),
        (np.ones, np.arange(2, 7), True, False),
        (jnp.ones, range(2, 7), False, False),
    ],
    ids=["jax", "numpy", "columns first", "row indices", "device"],
)
def test_only_ranges_of_contiguous_host_rows_are_views(made, rows, on_host, expected):
    data = made((8, 4))
    bounds, firsts = np.array([[0, 8]]), np.array([0])
    source = capture.FieldSource(
        (0, 4), (4,), np.dtype(data.dtype), on_host, bounds, firsts, [data]
    )
    segment = capture.SegmentSource("g0", (0, 4), rows, {"values": source})
    with mock.patch.object(capture, "on_host", lambda _: on_host):
        pinned = capture.PinnedRows([segment])
        [piece] = pinned.pieces(0, "values", codecs.get("raw"))
        found = np.ascontiguousarray(piece.host())
    assert segment.is_view("values") == expected
    assert np.shares_memory(found, np.asarray(data)) == expected
