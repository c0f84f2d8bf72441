# SPDX-License-Identifier: Apache-2.0
"""Saves with lossy codecs: restored values, recorded errors, and widened or refused codecs."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import model
import numpy as np
import prometheus_client
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import deltackpt
from deltackpt import codecs
from deltackpt.errors import (
    ErrorBudgetExceeded,
    FormatTooNew,
    OptionError,
    SaveFailed,
    TableSelectionError,
)
from deltackpt.events import PrometheusHandler
from deltackpt.format import manifest
from deltackpt.format.row_blocks import Encoding
from deltackpt.reading import stored_saves
from deltackpt.save import capture
from deltackpt.save.capture import HostPiece
from deltackpt.testing import StoredChunk, stored_chunks

ROWS, WIDTH = 3000, 16
LOSSY = ["bf16", "fp16", "int8", "int4", "int3", "int2", "symmetric4", "greedy2", "adaptive3"]
LOSSY += ["adaptive4"]


def tables(codec="raw", **options) -> dict[str, deltackpt.Tables]:
    chosen = deltackpt.Tables(
        select="tables/*",
        slots={f"tables/{name}": {"acc": f"slots/{name}"} for name in "ab"},
        codec=codec,
        **options,
    )
    return {"embeddings": chosen}


def state_of(seed: int = 0, dtype=jnp.float32) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "tables": {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH)), dtype) for name in ("a", "b")},
        "slots": {name: jnp.asarray(rng.random((ROWS, WIDTH)), jnp.float32) for name in "ab"},
        "bias": jnp.ones(3),
    }


def marked(state: dict, seed: int, rows: np.ndarray, **odd: float):
    """The state after an update of ``rows`` of table a, some of which get odd values."""
    change = np.random.default_rng(seed).normal(size=(len(rows), WIDTH)).astype(np.float32)
    for place, value in odd.items():
        change[int(place.removeprefix("row"))] = value
    moved = {**state, "tables": dict(state["tables"]), "slots": dict(state["slots"])}
    table = np.array(state["tables"]["a"])
    table[rows] = change
    moved["tables"]["a"] = jnp.asarray(table)
    slot = np.array(state["slots"]["a"])
    slot[rows] += 1
    moved["slots"]["a"] = jnp.asarray(slot)
    return moved


def saved(root, codec, rows=None, *, base=None, marks=None, options=None, **odd):
    """Saves a base and a delta; returns both states and the report of the delta."""
    rows = np.arange(0, ROWS, 3) if rows is None else rows
    base = state_of() if base is None else base
    state = marked(base, 1, rows, **odd)
    touched = deltackpt.touched.init(base["tables"])
    handlers = codec if isinstance(codec, dict) else tables(codec)
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        manager.save(0, base, touched=touched)
        manager.wait_until_finished()
        touched = deltackpt.touched.mark(touched, {"a": jnp.asarray(rows)})
        assert manager.save(1, state, touched=touched).kind == "delta"
        (report,) = manager.wait_until_finished()
    return base, state, report


def restored(root, template=None, step=1, handlers=None, rows=None):
    options = deltackpt.ManagerOptions(access="read")
    handlers = handlers or tables()
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        if rows is not None:
            return manager.read(step, rows).tables
        return manager.restore(step, template).state


def encodings(root, step: int) -> dict[tuple[str, str], Encoding]:
    (record,) = stored_saves.read_save(Path(root) / str(step)).manifests
    return {
        (segment.group, encoding.field): encoding
        for segment in record.segments
        for encoding in segment.encodings
    }


@pytest.mark.parametrize("codec", LOSSY)
def test_a_delta_restores_decoded_rows_and_everything_else_bit_for_bit(codec, tmp_path):
    base, state, report = saved(tmp_path, codec, row5=np.nan, row700=np.inf, row9=0.0)
    found = restored(tmp_path, state)
    rows = np.arange(0, ROWS, 3)
    expected = np.array(base["tables"]["a"])
    expected[rows] = model.decoded(codec, np.asarray(state["tables"]["a"])[rows])
    assert np.asarray(found["tables"]["a"]).tobytes() == expected.tobytes()
    assert np.isnan(expected[rows[5]]).all() and np.isinf(expected[rows[700]]).all()
    state["tables"]["a"] = jnp.asarray(expected)
    model.assert_same(found, state)
    model.assert_same(restored(tmp_path, base, 0), base)
    # The reported figures match the saved rows.
    values = next(figures for figures in report.tables if figures.field == "values")
    finite = np.isfinite(expected[rows]).all(axis=1)
    truth = np.asarray(marked(base, 1, rows)["tables"]["a"])[rows]
    truth[9] = 0
    error = np.linalg.norm((expected[rows] - truth)[finite]) / np.linalg.norm(truth[finite])
    assert values.codec == codec and values.rows == len(rows)
    assert values.relative_error == pytest.approx(error, rel=1e-3)
    assert values.ratio < 0.6
    slots = next(figures for figures in report.tables if figures.field == "slot.acc")
    assert (slots.codec, slots.relative_error) == ("raw", 0.0)


@pytest.mark.parametrize("codec", ["bf16", "adaptive2", "int8"])
def test_the_device_path_writes_the_bytes_of_the_host_path(codec, tmp_path):
    saved(tmp_path / "host", codec, row5=np.nan)
    with mock.patch.object(capture, "on_host", return_value=False):
        saved(tmp_path / "device", codec, row5=np.nan)
    for step in ("0", "1"):
        by_name = [
            {chunk.name: contents(chunk) for chunk in stored_chunks(tmp_path / side / step, "*")}
            for side in ("host", "device")
        ]
        assert by_name[0] and by_name[0] == by_name[1]


def contents(chunk: StoredChunk) -> bytes:
    return chunk.path.read_bytes()[chunk.offset : chunk.offset + chunk.nbytes]


def test_bases_and_slots_are_quantized_on_request(tmp_path):
    choice = deltackpt.policies.CodecChoice(delta="int4", base="int8")
    slots = {"tables/a": "bf16", "**": "lossless"}
    base, state, _ = saved(tmp_path, tables(choice, slot_codec=slots))
    rows = np.arange(0, ROWS, 3)
    found = restored(tmp_path, state)
    expected = model.decoded("int8", np.asarray(base["tables"]["a"]))
    expected[rows] = model.decoded("int4", np.asarray(state["tables"]["a"])[rows])
    assert np.asarray(found["tables"]["a"]).tobytes() == expected.tobytes()
    assert np.asarray(found["tables"]["b"]).tobytes() == (
        model.decoded("int8", np.asarray(base["tables"]["b"])).tobytes()
    )
    slots = np.array(base["slots"]["a"])
    slots[rows] = model.decoded("bf16", np.asarray(state["slots"]["a"])[rows])
    assert np.asarray(found["slots"]["a"]).tobytes() == slots.tobytes()
    assert np.asarray(found["slots"]["b"]).tobytes() == np.asarray(base["slots"]["b"]).tobytes()


def test_lossless_slots_and_rows_are_smaller_and_restore_bit_for_bit(tmp_path):
    _, state, report = saved(tmp_path, tables("lossless", slot_codec="lossless"), row5=np.nan)
    model.assert_same(restored(tmp_path, state), state)
    assert all(figures.ratio < 0.95 for figures in report.tables)
    part = restored(tmp_path, rows={"tables/a": (100, 200)})["tables/a"]
    assert part["values"].tobytes() == np.asarray(state["tables"]["a"])[100:200].tobytes()


def test_row_ranges_are_read_with_rows_that_are_stored_raw(tmp_path):
    _, state, _ = saved(tmp_path, "int4", row5=np.nan, row30=np.inf, row31=-np.inf)
    whole = np.asarray(restored(tmp_path, state)["tables"]["a"])
    for span in ((0, 16), (15, 16), (16, 90), (90, 94), (2000, 3000), (40, 40)):
        part = restored(tmp_path, rows={"tables/a": span})["tables/a"]["values"]
        assert part.tobytes() == whole[slice(*span)].tobytes()


def test_rows_of_a_column_sharded_table(tmp_path):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    state = state_of()
    sharding = NamedSharding(jax.make_mesh((2,), ("c",), devices=jax.devices()[:2]), P(None, "c"))
    state["tables"]["a"] = jax.device_put(state["tables"]["a"], sharding)
    touched = deltackpt.touched.init(state["tables"])
    with deltackpt.CheckpointManager(tmp_path, handlers=tables("int4")) as manager:
        manager.save(0, state, touched=touched)
        rows = np.arange(0, ROWS, 5)
        touched = deltackpt.touched.mark(touched, {"a": jnp.asarray(rows)})
        manager.save(1, state, touched=touched)
        report = manager.wait_until_finished()[-1]
    values = np.asarray(state["tables"]["a"])
    expected = values.copy()
    for half in (slice(0, 8), slice(8, 16)):
        expected[rows, half] = model.decoded("int4", np.ascontiguousarray(values[rows, half]))
    found = np.asarray(restored(tmp_path, state)["tables"]["a"])
    assert found.tobytes() == expected.tobytes()
    assert [figures.rows for figures in report.tables if figures.field == "values"] == [len(rows)]


def test_a_table_whose_rows_the_codec_cannot_represent_is_stored_raw_with_the_reason(tmp_path):
    rows = np.arange(10)
    odd = {f"row{i}": np.nan for i in range(10)}
    _, state, report = saved(tmp_path, "int4", rows, **odd)
    model.assert_same(restored(tmp_path, state), state)
    values = next(figures for figures in report.tables if figures.field == "values")
    assert values.codec == "raw"
    assert values.reason.startswith("raw: int4 cannot represent 10 of 10 rows")


def test_raw_steps_require_no_codec_feature_of_their_reader(tmp_path):
    saved(tmp_path, "raw")
    found = [stored_saves.read_save(tmp_path / step).manifests[0].features for step in ("0", "1")]
    assert found == [(), (manifest.DENSE_BLOCKS, manifest.LAYERS)]


def test_many_rows_beyond_the_range_of_a_codec_are_not_collected_in_memory(tmp_path):
    state = {"tables": {"a": jnp.full((100_000, 16), 1e-6)}, "slots": {}}
    chosen = deltackpt.Tables(
        select="tables/*", slots={}, codec=deltackpt.policies.CodecChoice(base="fp16")
    )
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": chosen}) as manager:
        manager.save(0, state)
        (report,) = manager.wait_until_finished()
    (figures,) = report.tables
    seen = int(figures.reason.split(" of ")[1].split()[0])
    assert figures.codec == "raw" and seen < 100_000
    assert sorted(p.name for p in (tmp_path / "0/embeddings/part.0/g0.0").iterdir()) == ["values"]
    model.assert_same(restored(tmp_path, state, 0, {"embeddings": chosen}), state)


def test_column_shards_too_narrow_to_gain_are_stored_raw(tmp_path):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    sharding = NamedSharding(jax.make_mesh((8,), ("c",)), P(None, "c"))
    state = {"tables": {"a": jax.device_put(jnp.ones((64, 8)), sharding)}}
    chosen = deltackpt.Tables(select="tables/*", codec=deltackpt.policies.CodecChoice(base="int8"))
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": chosen}) as manager:
        manager.save(0, state)
        (report,) = manager.wait_until_finished()
    (figures,) = report.tables
    assert figures.reason == "raw: columns of shape (1,) are too narrow for int8"
    model.assert_same(restored(tmp_path, state, 0, {"embeddings": chosen}), state)


def test_encoding_needs_no_implicit_transfer(tmp_path):
    with jax.transfer_guard("disallow"):
        pieces = HostPiece(np.ones((10, 16), np.float32))
        assert pieces.encoded(codecs.get("adaptive4")).representable.all()


@pytest.mark.parametrize("name", ["acc.raw", "acc.raw_at", "acc.scale", "acc.offset"])
def test_slots_named_like_arrays_of_a_codec_are_refused(name, tmp_path):
    state = {"tables": {"a": jnp.ones((20, 8))}, "slots": {"x": jnp.ones(20), "y": jnp.ones(20)}}
    slots = {"tables/a": {"acc": "slots/x", name: "slots/y"}}
    chosen = deltackpt.Tables(select="tables/*", slots=slots)
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": chosen}) as manager:
        with pytest.raises(TableSelectionError, match=f"tables/a: .*slot.{name}.*rename the slot"):
            manager.save(0, state)


def test_rows_beyond_the_range_of_a_codec_restore_bit_for_bit(tmp_path):
    _, state, _ = saved(tmp_path, "fp16", row3=1e5, row4=1e-30, row6=3e38)
    found = np.asarray(restored(tmp_path, state)["tables"]["a"])
    for row in (9, 12, 18):
        assert found[row].tobytes() == np.asarray(state["tables"]["a"])[row].tobytes()


def test_a_save_over_its_budget_is_widened_until_it_fits(tmp_path):
    choice = deltackpt.policies.CodecChoice(delta="adaptive2", max_error=0.02)
    _, state, report = saved(tmp_path, choice, row5=np.nan)
    values = next(figures for figures in report.tables if figures.field == "values")
    assert values.codec == "adaptive8" and 0 < values.relative_error <= 0.02
    assert "adaptive4 would change the rows of tables/a by 0.0" in values.reason
    assert "more than 0.02 (planned adaptive2: chosen for deltas)" in values.reason
    rows = np.arange(0, ROWS, 3)
    found = np.asarray(restored(tmp_path, state)["tables"]["a"])[rows]
    expected = model.decoded("adaptive8", np.asarray(state["tables"]["a"])[rows])
    assert found.tobytes() == expected.tobytes()
    (recorded,) = [e for (_, field), e in encodings(tmp_path, 1).items() if field == "values"]
    assert (recorded.codec, recorded.reason) == (values.codec, values.reason)


def test_a_budget_of_zero_ends_in_raw(tmp_path):
    choice = deltackpt.policies.CodecChoice(delta="int8", base="bf16", max_error=0)
    base, state, report = saved(tmp_path, choice)
    # A reader that does not know encodings would decode by the planned codec.
    assert manifest.ENCODINGS in stored_saves.read_save(tmp_path / "1").manifests[0].features
    model.assert_same(restored(tmp_path, state), state)
    model.assert_same(restored(tmp_path, base, 0), base)
    assert {figures.codec for figures in report.tables} == {"raw"}


def test_the_budget_applies_to_each_table_separately(tmp_path):
    base = state_of()
    base["tables"]["b"] = base["tables"]["b"].at[:, 0].set(1000.0)
    touched = deltackpt.touched.init(base["tables"])
    choice = deltackpt.policies.CodecChoice(delta="int4", max_error=0.06)
    with deltackpt.CheckpointManager(tmp_path, handlers=tables(choice)) as manager:
        manager.save(0, base, touched=touched)
        touched = deltackpt.touched.mark(touched, {name: jnp.arange(0, ROWS, 4) for name in "ab"})
        manager.save(1, base, touched=touched)
        report = manager.wait_until_finished()[-1]
    worst = {f.table: f for f in report.tables if f.field == "values"}
    assert worst["tables/a"].relative_error <= 0.06
    assert worst["tables/a"].codec == worst["tables/b"].codec == "int8"
    assert "rows of tables/a by" in worst["tables/b"].reason


def test_a_save_over_its_budget_can_be_refused_and_loses_no_row(tmp_path):
    strict = deltackpt.policies.CodecChoice(delta="int2", max_error=0.05, when_exceeded="refuse")
    state = state_of()
    touched = deltackpt.touched.init(state["tables"])
    with deltackpt.CheckpointManager(tmp_path, handlers=tables(strict)) as manager:
        manager.save(0, state, touched=touched)
        manager.wait_until_finished()
        state = marked(state, 1, np.arange(0, ROWS, 3))
        touched = deltackpt.touched.mark(touched, {"a": jnp.arange(0, ROWS, 3)})
        manager.save(1, state, touched=touched)
        with pytest.raises(SaveFailed, match=r"max_error=0.05 .*int2 would change .*tables/a"):
            manager.wait_until_finished()
        with pytest.raises(SaveFailed) as caught:
            manager.save(2, state, touched=touched)
            manager.wait_until_finished()
        assert isinstance(caught.value.__cause__, ErrorBudgetExceeded)
        assert manager.all_steps() == [0]
        assert manager.save(3, state, touched=touched, force_base=True).kind == "base"
        manager.wait_until_finished()
    model.assert_same(restored(tmp_path, state, 3), state)


def test_a_change_of_codec_needs_no_base(tmp_path):
    base, state, _ = saved(tmp_path, "int4")
    with deltackpt.CheckpointManager(tmp_path, handlers=tables("adaptive2")) as manager:
        found = manager.restore_latest(base)
        touched = deltackpt.touched.mark(found.touched, {"a": jnp.arange(7)})
        result = manager.save(2, found.state, touched=touched)
        manager.wait_until_finished()
    assert (result.kind, encodings(tmp_path, 2)["g0", "values"].codec) == ("delta", "adaptive2")


def test_bits_grow_with_the_number_of_restores(tmp_path):
    policy = deltackpt.policies.BitWidthPolicy(
        expected_restores=1, codecs=deltackpt.policies.CHECK_N_RUN
    )
    base = state_of()
    found = []
    for run in range(5):
        touched = deltackpt.touched.init(base["tables"])
        with deltackpt.CheckpointManager(tmp_path, handlers=tables(policy)) as manager:
            manager.restore_latest(base)
            for step in (2 * run, 2 * run + 1):
                manager.save(step, base, touched=touched)
                touched = deltackpt.touched.mark(touched, {"a": jnp.arange(0, 99, 2)})
            manager.wait_until_finished()
        (record,) = stored_saves.read_save(tmp_path / str(2 * run + 1)).manifests
        values = encodings(tmp_path, 2 * run + 1)["g0", "values"]
        found.append((record.restores, values.codec, values.reason))
    assert [restores for restores, _, _ in found] == [0, 1, 2, 3, 4]
    assert [codec for _, codec, _ in found] == [
        "adaptive2", "adaptive2", "adaptive4", "adaptive4", "adaptive4"
    ]  # fmt: skip
    assert found[0][2] == "adaptive2: 1 restores expected"
    assert found[2][2] == "adaptive4: 4 restores expected after 2 restores; 1 were expected"


def test_reading_does_not_count_as_a_restore(tmp_path):
    base, state, _ = saved(tmp_path, "raw")
    restored(tmp_path, state)
    with deltackpt.CheckpointManager(tmp_path, handlers=tables()) as manager:
        manager.read(1, {"tables/a": None})
        manager.save(2, state, force_base=True)
        manager.wait_until_finished()
    assert stored_saves.read_save(tmp_path / "2").manifests[0].restores == 0


def test_metrics_and_events_report_bytes_and_errors_of_each_table(tmp_path):
    registry = prometheus_client.CollectorRegistry()
    base = state_of()
    touched = deltackpt.touched.init(base["tables"])
    event_handlers = (PrometheusHandler(registry),)
    with deltackpt.CheckpointManager(
        tmp_path, handlers=tables("int4"), event_handlers=event_handlers
    ) as manager:
        manager.save(0, base, touched=touched)
        touched = deltackpt.touched.mark(touched, {"a": jnp.arange(0, ROWS, 4)})
        manager.save(1, base, touched=touched)
        report = manager.wait_until_finished()[-1]
    values = next(figures for figures in report.tables if figures.field == "values")
    place = {"process": "0", "table": "tables/a", "field": "values"}
    error = registry.get_sample_value("deltackpt_relative_error", place)
    assert error == pytest.approx(values.relative_error) and error > 0.01
    written = registry.get_sample_value(
        "deltackpt_saved_table_bytes_total", place | {"codec": "int4"}
    )
    assert written == values.nbytes
    stated = sum(figures.nbytes for figures in report.tables)
    assert stated == pytest.approx(report.bytes_written, rel=0.25)


# Errors.


def with_codec(root: Path, name: str) -> None:
    """Puts another codec's name into the manifest of step 1."""
    path = root / "1" / "embeddings" / "manifest.0.msgpack"
    record = manifest.from_bytes(path.read_bytes(), name="m")
    segments = tuple(
        dataclasses.replace(
            segment,
            encodings=tuple(dataclasses.replace(e, codec=name) for e in segment.encodings),
        )
        for segment in record.segments
    )
    path.write_bytes(manifest.to_bytes(dataclasses.replace(record, segments=segments)))


def test_a_codec_of_a_newer_version_is_named(tmp_path):
    _, state, _ = saved(tmp_path, "int4")
    with_codec(tmp_path, "vq256")
    for read in (lambda m: m.restore(1, state), lambda m: m.restore_latest(state)):
        options = deltackpt.ManagerOptions(access="read")
        with deltackpt.CheckpointManager(tmp_path, handlers=tables(), options=options) as manager:
            with pytest.raises(FormatTooNew, match=r"1/embeddings.*found \['vq256'\]; install the"):
                read(manager)


def test_damaged_codes_are_named_and_the_previous_step_is_restored(tmp_path):
    base, state, _ = saved(tmp_path, "int4", row5=np.nan)
    [segment] = stored_saves.read_save(tmp_path / "1").parts()[0].segments
    arrays = sorted(entry.name for entry in segment.arrays)
    expected = ["rows.gaps", "slot.acc", "values", "values.offset", "values.raw", "values.raw_at"]
    assert arrays == [*expected, "values.scale"]
    for array in arrays:
        damaged = tmp_path / "damaged" / array
        for step in ("0", "1"):
            shutil.copytree(tmp_path / step, damaged / step)
        (chunk,) = stored_chunks(damaged / "1", array, segment="g0.0")
        chunk.flip()
        options = deltackpt.ManagerOptions(access="read")
        with (
            warnings.catch_warnings(),
            deltackpt.CheckpointManager(damaged, handlers=tables(), options=options) as manager,
        ):
            warnings.simplefilter("ignore")
            result = manager.restore_latest(base)
        assert result.step == 0 and array in str(result.skipped[0][1])
        model.assert_same(result.state, base)


@pytest.mark.parametrize(
    ("codec", "slot_codec", "error", "message"),
    [
        ("int5", "raw", OptionError, "codec 'int5': expected one of"),
        (4, "raw", OptionError, "codec: expected a name, a BitWidthPolicy or a CodecChoice"),
        ({"tables/a": "zip"}, "raw", OptionError, "codec 'zip'"),
        ("raw", {"tables/a": None}, OptionError, "codec: expected a name"),
        ({"tables/q": "int4"}, "raw", TableSelectionError, "codec: pattern 'tables/q' matches no"),
        ("raw", {"slots": "bf16"}, TableSelectionError, "slot_codec: pattern 'slots' matches no"),
        ("int8", "raw", OptionError, "table tables/narrow, values: codec int8: .*wide enough"),
        ({"**/a": "int4"}, "int8", OptionError, "table tables/a, slot.acc: codec int8: .*wide"),
        (
            deltackpt.policies.BitWidthPolicy(expected_restores=1),
            "raw",
            OptionError,
            "narrow, values",
        ),
    ],
)
def test_unusable_codecs_are_refused_before_anything_is_written(
    codec, slot_codec, error, message, tmp_path
):
    state = {
        "tables": {"a": jnp.ones((20, 8)), "narrow": jnp.ones((20, 1))},
        "slots": {"a": jnp.ones(20)},
    }
    slots = {"tables/a": {"acc": "slots/a"}}
    with pytest.raises(error, match=message):
        chosen = deltackpt.Tables(
            select="tables/*", slots=slots, codec=codec, slot_codec=slot_codec
        )
        with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": chosen}) as manager:
            manager.save(0, state)
    assert not (tmp_path / "0").exists()
