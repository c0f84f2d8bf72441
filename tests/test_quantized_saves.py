# SPDX-License-Identifier: Apache-2.0
"""Saves with lossy codecs: restored values, recorded errors, and widened or refused codecs."""

from __future__ import annotations

import dataclasses
import shutil
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
from deltackpt.policies import BitWidthPolicy, CodecChoice
from deltackpt.reading import stored_saves
from deltackpt.save import capture
from deltackpt.save.capture import HostPiece
from deltackpt.testing import StoredChunk, stored_chunks

ROWS, WIDTH = 3000, 16
LOSSY = ["bf16", "fp16", "int8", "int4", "int3", "int2", "symmetric4", "greedy2", "adaptive3"]
LOSSY += ["adaptive4"]
TRAINED = np.arange(0, ROWS, 3)


def tables(codec="raw", **options) -> deltackpt.Tables:
    slots = {f"tables/{name}": {"acc": f"slots/{name}"} for name in "ab"}
    return deltackpt.Tables(select="tables/*", **{"slots": slots, "codec": codec, **options})


def manager_of(root, chosen=None, **given) -> deltackpt.CheckpointManager:
    chosen = tables() if chosen is None else chosen
    return deltackpt.CheckpointManager(root, handlers={"embeddings": chosen}, **given)


def reader_of(root, chosen=None) -> deltackpt.CheckpointManager:
    return manager_of(root, chosen, options=deltackpt.ManagerOptions(access="read"))


def needs_eight_devices() -> None:
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")


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
    table, slot = np.array(state["tables"]["a"]), np.array(state["slots"]["a"])
    table[rows] = change
    slot[rows] += 1
    return {
        **state,
        "tables": {**state["tables"], "a": jnp.asarray(table)},
        "slots": {**state["slots"], "a": jnp.asarray(slot)},
    }


def saved(root, codec, rows=TRAINED, **odd):
    """Saves a base and a delta of table a; returns both states and the report of the delta."""
    base = state_of()
    state = marked(base, 1, rows, **odd)
    return base, state, report_of_delta(root, codec, base, state, a=rows)


def report_of_delta(root, codec, base, state, *, event_handlers=(), **rows: np.ndarray):
    """Saves a base and a delta of these rows of each table."""
    chosen = codec if isinstance(codec, deltackpt.Tables) else tables(codec)
    touched = deltackpt.touched.init(base["tables"])
    with manager_of(root, chosen, event_handlers=event_handlers) as manager:
        model.commit(manager, 0, base, touched=touched)
        marks = {name: jnp.asarray(ids) for name, ids in rows.items()}
        touched = deltackpt.touched.mark(touched, marks)
        assert manager.save(1, state, touched=touched).kind == "delta"
        (report,) = manager.wait_until_finished()
    return report


def report_of_base(root, chosen, state):
    """Saves one step."""
    with manager_of(root, chosen) as manager:
        manager.save(0, state)
        (report,) = manager.wait_until_finished()
    return report


def values_of(report, field: str = "values"):
    """The figures of a field of the first table."""
    return next(figures for figures in report.tables if figures.field == field)


def restored(root, template, step=1, chosen=None):
    with reader_of(root, chosen) as manager:
        return manager.restore(step, template).state


def restored_rows(root, start: int, stop: int):
    """The values of rows of table a in step 1."""
    with reader_of(root) as manager:
        return manager.read(1, {"tables/a": (start, stop)}).tables["tables/a"]["values"]


def record_of(root, step: int) -> manifest.Manifest:
    (record,) = stored_saves.read_save(Path(root) / str(step)).manifests
    return record


def encodings(root, step: int) -> dict[tuple[str, str], Encoding]:
    return {
        (segment.group, encoding.field): encoding
        for segment in record_of(root, step).segments
        for encoding in segment.encodings
    }


def assert_bits(found, expected) -> None:
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("codec", LOSSY)
def test_a_delta_restores_decoded_rows_and_everything_else_bit_for_bit(codec, tmp_path):
    base, state, report = saved(tmp_path, codec, row5=np.nan, row700=np.inf, row9=0.0)
    expected, rows = np.array(base["tables"]["a"]), TRAINED
    expected[rows] = model.decoded(codec, np.asarray(state["tables"]["a"])[rows])
    assert np.isnan(expected[rows[5]]).all() and np.isinf(expected[rows[700]]).all()
    state["tables"]["a"] = jnp.asarray(expected)
    model.assert_same(restored(tmp_path, state), state)
    model.assert_same(restored(tmp_path, base, 0), base)
    # The reported figures match the saved rows.
    values = values_of(report)
    finite = np.isfinite(expected[rows]).all(axis=1)
    truth = np.asarray(marked(base, 1, rows)["tables"]["a"])[rows]
    truth[9] = 0
    error = np.linalg.norm((expected[rows] - truth)[finite]) / np.linalg.norm(truth[finite])
    assert values.codec == codec and values.rows == len(rows)
    assert values.relative_error == pytest.approx(error, rel=1e-3)
    assert values.ratio < 0.6
    slots = values_of(report, "slot.acc")
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
    choice = CodecChoice(delta="int4", base="int8")
    slots = {"tables/a": "bf16", "**": "lossless"}
    base, state, _ = saved(tmp_path, tables(choice, slot_codec=slots))
    found = restored(tmp_path, state)
    expected = model.decoded("int8", np.asarray(base["tables"]["a"]))
    expected[TRAINED] = model.decoded("int4", np.asarray(state["tables"]["a"])[TRAINED])
    assert_bits(found["tables"]["a"], expected)
    assert_bits(found["tables"]["b"], model.decoded("int8", np.asarray(base["tables"]["b"])))
    slots = np.array(base["slots"]["a"])
    slots[TRAINED] = model.decoded("bf16", np.asarray(state["slots"]["a"])[TRAINED])
    assert_bits(found["slots"]["a"], slots)
    assert_bits(found["slots"]["b"], base["slots"]["b"])


def test_lossless_slots_and_rows_are_smaller_and_restore_bit_for_bit(tmp_path):
    _, state, report = saved(tmp_path, tables("lossless", slot_codec="lossless"), row5=np.nan)
    model.assert_same(restored(tmp_path, state), state)
    assert all(figures.ratio < 0.95 for figures in report.tables)
    assert_bits(restored_rows(tmp_path, 100, 200), state["tables"]["a"][100:200])


def test_row_ranges_are_read_with_rows_that_are_stored_raw(tmp_path):
    _, state, _ = saved(tmp_path, "int4", row5=np.nan, row30=np.inf, row31=-np.inf)
    whole = np.asarray(restored(tmp_path, state)["tables"]["a"])
    for span in ((0, 16), (15, 16), (16, 90), (90, 94), (2000, 3000), (40, 40)):
        assert_bits(restored_rows(tmp_path, *span), whole[slice(*span)])


def test_rows_of_a_column_sharded_table(tmp_path):
    needs_eight_devices()
    state, rows = state_of(), np.arange(0, ROWS, 5)
    sharding = NamedSharding(jax.make_mesh((2,), ("c",), devices=jax.devices()[:2]), P(None, "c"))
    state["tables"]["a"] = jax.device_put(state["tables"]["a"], sharding)
    report = report_of_delta(tmp_path, "int4", state, state, a=rows)
    values = np.asarray(state["tables"]["a"])
    expected = values.copy()
    for half in (slice(0, 8), slice(8, 16)):
        expected[rows, half] = model.decoded("int4", np.ascontiguousarray(values[rows, half]))
    assert_bits(restored(tmp_path, state)["tables"]["a"], expected)
    assert [figures.rows for figures in report.tables if figures.field == "values"] == [len(rows)]


def test_a_table_whose_rows_the_codec_cannot_represent_is_stored_raw_with_the_reason(tmp_path):
    odd = {f"row{i}": np.nan for i in range(10)}
    _, state, report = saved(tmp_path, "int4", np.arange(10), **odd)
    model.assert_same(restored(tmp_path, state), state)
    values = values_of(report)
    assert values.codec == "raw"
    assert values.reason.startswith("raw: int4 cannot represent 10 of 10 rows")


def test_raw_steps_require_no_codec_feature_of_their_reader(tmp_path):
    saved(tmp_path, "raw")
    assert record_of(tmp_path, 0).features == ()
    assert record_of(tmp_path, 1).features == (manifest.DENSE_BLOCKS, manifest.LAYERS)


def test_many_rows_beyond_the_range_of_a_codec_are_not_collected_in_memory(tmp_path):
    state = {"tables": {"a": jnp.full((100_000, 16), 1e-6)}, "slots": {}}
    chosen = tables(CodecChoice(base="fp16"), slots={})
    (figures,) = report_of_base(tmp_path, chosen, state).tables
    seen = int(figures.reason.split(" of ")[1].split()[0])
    assert figures.codec == "raw" and seen < 100_000
    assert sorted(p.name for p in (tmp_path / "0/embeddings/shard.0/g0.0").iterdir()) == ["values"]
    model.assert_same(restored(tmp_path, state, 0, chosen), state)


def test_column_shards_too_narrow_to_gain_are_stored_raw(tmp_path):
    needs_eight_devices()
    sharding = NamedSharding(jax.make_mesh((8,), ("c",)), P(None, "c"))
    state = {"tables": {"a": jax.device_put(jnp.ones((64, 8)), sharding)}}
    chosen = deltackpt.Tables(select="tables/*", codec=CodecChoice(base="int8"))
    (figures,) = report_of_base(tmp_path, chosen, state).tables
    assert figures.reason == "raw: columns of shape (1,) are too narrow for int8"
    model.assert_same(restored(tmp_path, state, 0, chosen), state)


def test_encoding_needs_no_implicit_transfer(tmp_path):
    with jax.transfer_guard("disallow"):
        pieces = HostPiece(np.ones((10, 16), np.float32))
        assert pieces.encoded(codecs.get("adaptive4")).representable.all()


@pytest.mark.parametrize("name", ["acc.raw", "acc.raw_at", "acc.scale", "acc.offset"])
def test_slots_named_like_arrays_of_a_codec_are_refused(name, tmp_path):
    state = {"tables": {"a": jnp.ones((20, 8))}, "slots": {"x": jnp.ones(20), "y": jnp.ones(20)}}
    slots = {"tables/a": {"acc": "slots/x", name: "slots/y"}}
    with pytest.raises(TableSelectionError, match=f"tables/a: .*slot.{name}.*rename the slot"):
        report_of_base(tmp_path, tables(slots=slots), state)


def test_rows_beyond_the_range_of_a_codec_restore_bit_for_bit(tmp_path):
    _, state, _ = saved(tmp_path, "fp16", row3=1e5, row4=1e-30, row6=3e38)
    found = np.asarray(restored(tmp_path, state)["tables"]["a"])
    for row in (9, 12, 18):
        assert_bits(found[row], state["tables"]["a"][row])


def test_a_save_over_its_budget_is_widened_until_it_fits(tmp_path):
    choice = CodecChoice(delta="adaptive2", max_error=0.02)
    _, state, report = saved(tmp_path, choice, row5=np.nan)
    values = values_of(report)
    assert values.codec == "adaptive8" and 0 < values.relative_error <= 0.02
    assert "adaptive4 would change the rows of tables/a by 0.0" in values.reason
    assert "more than 0.02 (planned adaptive2: chosen for deltas)" in values.reason
    found = restored(tmp_path, state)["tables"]["a"][TRAINED]
    assert_bits(found, model.decoded("adaptive8", np.asarray(state["tables"]["a"])[TRAINED]))
    (recorded,) = [e for (_, field), e in encodings(tmp_path, 1).items() if field == "values"]
    assert (recorded.codec, recorded.reason) == (values.codec, values.reason)


def test_a_budget_of_zero_ends_in_raw(tmp_path):
    choice = CodecChoice(delta="int8", base="bf16", max_error=0)
    base, state, report = saved(tmp_path, choice)
    # A reader that does not know encodings would decode by the planned codec.
    assert manifest.ENCODINGS in record_of(tmp_path, 1).features
    model.assert_same(restored(tmp_path, state), state)
    model.assert_same(restored(tmp_path, base, 0), base)
    assert {figures.codec for figures in report.tables} == {"raw"}


def test_the_budget_applies_to_each_table_separately(tmp_path):
    base = state_of()
    base["tables"]["b"] = base["tables"]["b"].at[:, 0].set(1000.0)
    choice = CodecChoice(delta="int4", max_error=0.06)
    rows = np.arange(0, ROWS, 4)
    report = report_of_delta(tmp_path, choice, base, base, a=rows, b=rows)
    worst = {f.table: f for f in report.tables if f.field == "values"}
    assert worst["tables/a"].relative_error <= 0.06
    assert worst["tables/a"].codec == worst["tables/b"].codec == "int8"
    assert "rows of tables/a by" in worst["tables/b"].reason


def test_a_save_over_its_budget_can_be_refused_and_loses_no_row(tmp_path):
    strict = CodecChoice(delta="int2", max_error=0.05, when_exceeded="refuse")
    state = state_of()
    touched = deltackpt.touched.init(state["tables"])
    with manager_of(tmp_path, tables(strict)) as manager:
        model.commit(manager, 0, state, touched=touched)
        state = marked(state, 1, TRAINED)
        touched = deltackpt.touched.mark(touched, {"a": jnp.asarray(TRAINED)})
        manager.save(1, state, touched=touched)
        with pytest.raises(SaveFailed, match=r"max_error=0.05 .*int2 would change .*tables/a"):
            manager.wait_until_finished()
        with pytest.raises(SaveFailed) as caught:
            model.commit(manager, 2, state, touched=touched)
        assert isinstance(caught.value.__cause__, ErrorBudgetExceeded)
        assert manager.all_steps() == [0]
        assert manager.save(3, state, touched=touched, force_base=True).kind == "base"
        manager.wait_until_finished()
    model.assert_same(restored(tmp_path, state, 3), state)


def test_a_change_of_codec_needs_no_base(tmp_path):
    base, state, _ = saved(tmp_path, "int4")
    with manager_of(tmp_path, tables("adaptive2")) as manager:
        found = manager.restore_latest(base)
        touched = deltackpt.touched.mark(found.touched, {"a": jnp.arange(7)})
        result = manager.save(2, found.state, touched=touched)
        manager.wait_until_finished()
    assert (result.kind, encodings(tmp_path, 2)["g0", "values"].codec) == ("delta", "adaptive2")


def test_bits_grow_with_the_number_of_restores(tmp_path):
    policy = BitWidthPolicy(expected_restores=1, codecs=deltackpt.policies.CHECK_N_RUN)
    base, found, reasons = state_of(), [], []
    for run in range(5):
        touched = deltackpt.touched.init(base["tables"])
        with manager_of(tmp_path, tables(policy)) as manager:
            manager.restore_latest(base)
            for step in (2 * run, 2 * run + 1):
                manager.save(step, base, touched=touched)
                touched = deltackpt.touched.mark(touched, {"a": jnp.arange(0, 99, 2)})
            manager.wait_until_finished()
        values = encodings(tmp_path, 2 * run + 1)["g0", "values"]
        found.append((record_of(tmp_path, 2 * run + 1).restores, values.codec))
        reasons.append(values.reason)
    assert found == [(run, "adaptive2" if run < 2 else "adaptive4") for run in range(5)]
    assert reasons[0] == "adaptive2: 1 restores expected"
    assert reasons[2] == "adaptive4: 4 restores expected after 2 restores; 1 were expected"


def test_reading_does_not_count_as_a_restore(tmp_path):
    _, state, _ = saved(tmp_path, "raw")
    restored(tmp_path, state)
    with manager_of(tmp_path) as manager:
        manager.read(1, {"tables/a": None})
        manager.save(2, state, force_base=True)
    assert record_of(tmp_path, 2).restores == 0


def test_metrics_and_events_report_bytes_and_errors_of_each_table(tmp_path):
    registry = prometheus_client.CollectorRegistry()
    base, handlers = state_of(), (PrometheusHandler(registry),)
    rows = np.arange(0, ROWS, 4)
    report = report_of_delta(tmp_path, "int4", base, base, event_handlers=handlers, a=rows)
    values = values_of(report)
    place = {"process": "0", "table": "tables/a", "field": "values"}
    error = registry.get_sample_value("deltackpt_relative_error", place)
    assert error == pytest.approx(values.relative_error) and error > 0.01
    place["codec"] = "int4"
    assert registry.get_sample_value("deltackpt_saved_table_bytes_total", place) == values.nbytes
    stated = sum(figures.nbytes for figures in report.tables)
    assert stated == pytest.approx(report.bytes_written, rel=0.25)


# Errors.


def with_codec(root: Path, name: str) -> None:
    """Puts another codec's name into the manifest of step 1."""
    path = root / "1" / "embeddings" / "manifest.0.msgpack"
    record = manifest.from_bytes(path.read_bytes(), name="m")
    segments = []
    for segment in record.segments:
        changed = tuple(dataclasses.replace(e, codec=name) for e in segment.encodings)
        segments.append(dataclasses.replace(segment, encodings=changed))
    path.write_bytes(manifest.to_bytes(dataclasses.replace(record, segments=tuple(segments))))


def test_a_codec_of_a_newer_version_is_named(tmp_path):
    _, state, _ = saved(tmp_path, "int4")
    with_codec(tmp_path, "vq256")
    for read in (lambda m: m.restore(1, state), lambda m: m.restore_latest(state)):
        with reader_of(tmp_path) as manager:
            with pytest.raises(FormatTooNew, match=r"1/embeddings.*found \['vq256'\]; install the"):
                read(manager)


def test_damaged_codes_are_named_and_the_previous_step_is_restored(tmp_path):
    base, state, _ = saved(tmp_path, "int4", row5=np.nan)
    [segment] = stored_saves.read_save(tmp_path / "1").shards()[0].segments
    arrays = sorted(entry.name for entry in segment.arrays)
    expected = ["rows.gaps", "slot.acc", "values", "values.offset", "values.raw", "values.raw_at"]
    assert arrays == [*expected, "values.scale"]
    for array in arrays:
        damaged = tmp_path / "damaged" / array
        for step in ("0", "1"):
            shutil.copytree(tmp_path / step, damaged / step)
        (chunk,) = stored_chunks(damaged / "1", array, segment="g0.0")
        chunk.flip()
        with reader_of(damaged) as manager, pytest.warns(UserWarning, match="skipped"):
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
        (BitWidthPolicy(expected_restores=1), "raw", OptionError, "narrow, values"),
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
        chosen = tables(codec, slots=slots, slot_codec=slot_codec)
        report_of_base(tmp_path, chosen, state)
    assert not (tmp_path / "0").exists()
