# SPDX-License-Identifier: Apache-2.0
"""This version reads the golden checkpoints of every format version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden import make_golden
from made_up_wals import records_in

import deltackpt
from deltackpt import inspect
from deltackpt.format import naming
from deltackpt.format.records import FORMAT_VERSION
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.view import JournalView
from deltackpt.reading import chains, inventory, reader, stored_saves
from deltackpt.reading.wal_locations import newest_durable
from deltackpt.storage.store import store_path

PLAIN = sorted(path for path in Path(make_golden.__file__).parent.glob("v*"))
SHARDS = sorted(path for path in Path(make_golden.__file__).parent.glob("shards-v*"))
VERSIONS = PLAIN + SHARDS
JOURNALS = sorted(path for path in Path(make_golden.__file__).parent.glob("journal-v*"))
LOGS = sorted(path for path in Path(make_golden.__file__).parent.glob("log-v*"))
DENSE = sorted(path for path in Path(make_golden.__file__).parent.glob("dense-v*"))
ENCODED = sorted(path for path in Path(make_golden.__file__).parent.glob("encodings-v*"))


def expected_at(version: Path, step: int) -> dict:
    """The golden state after a restore: rows that a delta saved as bf16 are rounded."""
    state = make_golden.state_at(step)
    coarse = np.array(state["tables"]["coarse"])
    rounded = coarse.astype(ml_dtypes.bfloat16).astype(np.float32)
    if version in PLAIN:
        # Its base was saved raw, and the rows of its deltas as bf16.
        for later in range(1, make_golden.STEPS.index(step) + 1):
            coarse[later :: 10 * later] = rounded[later :: 10 * later]
        state["tables"]["coarse"] = coarse
    return state


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", make_golden.STEPS)
@pytest.mark.parametrize("template", [True, False])
def test_golden_checkpoint_restores_exactly(version, step, template, tmp_path):
    root = tmp_path / "golden"
    shutil.copytree(version, root)
    options = deltackpt.ManagerOptions(access="read")
    state = make_golden.state_at(step)
    with deltackpt.CheckpointManager(
        root, handlers=make_golden.HANDLERS, options=options
    ) as manager:
        result = manager.restore(step, state if template else None)
    assert result.chain == make_golden.STEPS[: make_golden.STEPS.index(step) + 1]
    found, expected = jax.tree.leaves(result.state), jax.tree.leaves(expected_at(version, step))
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert np.asarray(left).dtype == np.asarray(right).dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", make_golden.STEPS)
def test_golden_checkpoint_verifies(version, step):
    assert inventory.verify_step(version / str(step)) == []


@pytest.mark.parametrize("version", ENCODED, ids=lambda path: path.name)
@pytest.mark.parametrize("step", make_golden.STEPS)
def test_golden_codes_decode_to_their_original_bits(version, step, tmp_path):
    root = tmp_path / "golden"
    shutil.copytree(version, root)
    assert inventory.verify_step(root / str(step)) == []
    options = deltackpt.ManagerOptions(access="read")
    # The step records its codecs.
    with deltackpt.CheckpointManager(
        root, handlers=make_golden.handlers(), options=options
    ) as manager:
        state = manager.restore(step, make_golden.state_at(step)).state
    expected = json.loads((root / "expected.json").read_text())[str(step)]
    assert make_golden.digests(state) == expected
    if row := make_golden.STEPS.index(step):
        odd = np.asarray(make_golden.odd_state_at(step)["tables"]["users"])[row]
        assert np.isnan(odd).any()
        assert np.asarray(state["tables"]["users"])[row].tobytes() == odd.tobytes()


@pytest.mark.parametrize("version", DENSE, ids=lambda path: path.name)
@pytest.mark.parametrize("step", make_golden.STEPS)
@pytest.mark.parametrize("compacted", [True, False])
def test_golden_dense_blocks_decode_to_their_original_bits(version, step, compacted, tmp_path):
    root = tmp_path / "golden"
    shutil.copytree(version, root)
    if not compacted:
        shutil.rmtree(root / naming.COMPACTED)
    assert inventory.verify_step(root / str(step)) == []
    options = deltackpt.ManagerOptions(access="read")
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    with deltackpt.CheckpointManager(root, handlers=handlers, options=options) as manager:
        result = manager.restore(step, make_golden.dense_state_at(step))
    assert (len(result.chain) == 1) == (step == 10 or (compacted and step == 20))
    expected = json.loads((version / "expected.json").read_text())[str(step)]
    assert make_golden.digests(result.state) == expected


@pytest.mark.parametrize("version", DENSE, ids=lambda path: path.name)
def test_golden_dense_blocks_use_every_codec(version):
    used = {
        encoding.codec
        for step in make_golden.STEPS[1:]
        for record in stored_saves.read_save(version / str(step)).manifests
        for segment in record.dense_blocks.segments
        for encoding in segment.encodings
    }
    assert used == {"raw", "planes", "xor", "sparse", "ef8", "ef4", "int8", "log8", "log4"}
    item = version / naming.COMPACTED / "20/embeddings/dense"
    assert (item / "manifest.ocdbt").is_file()


@pytest.mark.parametrize("version", LOGS, ids=lambda path: path.name)
def test_golden_wal_has_its_original_recovery_points(version):
    wal = inspect.open(version).wal
    found = [(point.epoch, point.step, point.full) for point in wal.recovery_points()]
    # Points of the first run count only up to the one that the second run resumes from.
    assert found == [
        *((1, step, step not in make_golden.SOFT) for step in (20, 19, 18, 17, 16)),
        *((0, step, step not in make_golden.SOFT) for step in (15, 13, 12, 11)),
    ]
    assert [epoch.ends for epoch in wal.epochs] == [(), ()]
    durable = [newest_durable(store_path(version / naming.LOG / f"{n}/0")).step for n in (0, 1)]
    assert durable == [16, 20]
    stored = [
        record
        for number in (1, 0)
        for record in records_in(version / naming.LOG / str(number) / "0")
    ]
    heads = [record.head for record in stored]
    assert {head.part for head in heads} == {0, 1}
    assert {head.against is None for head in heads} == {True, False}
    dense = [segment for record in stored for segment in record.dense]
    used = {segment.encodings[0].codec for segment in dense}
    assert used == {"raw", "sparse", "planes", "xor", "ef8", "int8"}
    arrays = [array for record in stored for array in record.layer.manifest.arrays]
    assert {array.compression for array in arrays} == {"", "zstd", "planes"}
    rows = [segment for record in stored for segment in record.rows]
    names_of = {entry.name for segment in rows for entry in segment.arrays}
    assert {"values.scale", "values.raw_at", "slot.accumulator", naming.GAPS} <= names_of


@pytest.mark.parametrize("version", LOGS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", (20, 19, 17, 16, 15, 12, 11))
def test_golden_recovery_point_restores_its_original_bits(version, step, tmp_path):
    root = tmp_path / "golden"
    shutil.copytree(version, root)
    run = int(step > make_golden.GOES_ON_FROM)
    expected = make_golden.logged_state_at(step, run)
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(
        root, handlers=make_golden.LOGGED_HANDLERS, options=options
    ) as manager:
        if step == make_golden.SECOND_END:
            found = manager.restore_latest(expected)
        else:
            found = manager.restore(step, expected)
    assert found is not None and found.skipped == ()
    assert found.point is not None and found.point.step == step
    digests = json.loads((root / "expected.json").read_text())
    assert make_golden.digests(found.state) == digests[str(step)]
    assert found.items == {"position": {"step": step, "run": run}, "raw": bytes([step, run])}
    # Exactly stored leaves also follow a formula.
    for name in ("slots", "dense"):
        for (path, left), right in zip(
            jax.tree.leaves_with_path(found.state[name]),
            jax.tree.leaves(expected[name]),
            strict=True,
        ):
            if not (name == "dense" and path[0].key in {"wide", "mean"}):
                assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    users = found.state["tables"]["users"]
    assert np.asarray(users).tobytes() == np.asarray(expected["tables"]["users"]).tobytes()


def test_the_current_format_has_golden_checkpoints():
    assert f"log-v{FORMAT_VERSION}" in [path.name for path in LOGS]
    assert f"v{FORMAT_VERSION}" in [path.name for path in VERSIONS]
    assert f"shards-v{FORMAT_VERSION}" in [path.name for path in SHARDS]
    assert f"encodings-v{FORMAT_VERSION}" in [path.name for path in ENCODED]
    for path in (PLAIN[-1], DENSE[-1]):
        assert (path / "20" / naming.EMBEDDINGS_ITEM / naming.layer_name(0)).is_file()


@pytest.mark.parametrize("version", JOURNALS, ids=lambda path: path.name)
@pytest.mark.parametrize("step", make_golden.STEPS)
def test_golden_bucket_reads_like_the_directory_that_it_was_copied_from(version, step):
    journal = JournalView(store_path(version))
    assert [*journal.state().steps] == list(make_golden.STEPS)
    steps = BucketSteps(journal, naming.EMBEDDINGS_ITEM)
    found = reader.restore_tables(chains.read_chain(steps.at(step)))
    expected = reader.restore_tables(chains.read_chain(version.with_name("v1") / str(step)))
    assert found.fields.keys() == expected.fields.keys()
    for table, fields in expected.fields.items():
        for field, rows in fields.items():
            assert np.asarray(found.fields[table][field]).tobytes() == np.asarray(rows).tobytes()
    steps.check_step_files(steps.at(step))
