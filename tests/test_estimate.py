# SPDX-License-Identifier: Apache-2.0
"""``deltackpt plan``: counts the bytes that a restore reads, and measures its time."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import model
import pytest
from command import run
from golden import make_golden
from test_compact import manager, run_compaction, write_chain
from test_verify import chunk, flip

import deltackpt
from deltackpt.errors import Damaged, StepNotFound
from deltackpt.format import row_blocks
from deltackpt.layers import row_indices
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.maintenance import estimate
from deltackpt.maintenance.estimate import restore_plan
from deltackpt.reading import chains, reader, stored_dense
from deltackpt.resources import host_memory
from deltackpt.storage.store import store_path

GOLDEN = Path(make_golden.__file__).parent


def array_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("shard.*/**/c.*") if path.is_file()]


def chunk_bytes(layer_file: Path) -> int:
    """Bytes of the chunks of tables in a layer file."""
    layer = LayerReader(StoredBytes(store_path(layer_file)), layer_file.stat().st_size)
    rows = {group.name for group in layer.manifest.row_groups if group.kind == "rows"}
    arrays = [array for array in layer.manifest.arrays if array.row_group in rows]
    return sum(layer.bytes_of(array) for array in arrays)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("written")
    write_chain(root, 4, codec="adaptive4", slot_codec="bf16")
    return root


@pytest.mark.parametrize("name", ["v1", "shards-v1", "encodings-v1"])
def test_the_plan_counts_the_bytes_on_disk(name):
    plan = restore_plan(GOLDEN / name, 20)
    assert [save.name for save in plan.chain] == ["10", "20"]
    assert [save.kind for save in plan.chain] == ["base", "delta"]
    for save in plan.chain:
        held = array_files(GOLDEN / name / save.name)
        layers = [*(GOLDEN / name / save.name).rglob("layer.*")]
        assert save.file_count == len(held) + len(layers)
        sizes = [*(path.stat().st_size for path in held), *map(chunk_bytes, layers)]
        assert save.nbytes == sum(sizes)
    assert plan.bytes_read == pytest.approx(sum(t.bytes_read for t in plan.tables), abs=10)
    assert {table.table: table.rows for table in plan.tables} == {
        "tables/users": 50,
        "tables/items": 30,
        "tables/half": 20,
        "tables/coarse": 40,
        "tables/ids": 12,
    }
    read = {table.table: table.rows_read for table in plan.tables}
    assert read["tables/users"] == 50 + 5 and read["tables/ids"] == 24


def test_planned_memory_equals_what_a_restore_fills(written):
    plan = restore_plan(written)
    found = reader.restore_tables(chains.read_chain(written / "3"))
    filled = {
        name: sum(array.nbytes for array in fields.values())
        for name, fields in found.fields.items()
    }
    assert {table.table: table.memory_bytes for table in plan.tables} == filled
    assert plan.memory_bytes == sum(filled.values())
    dense = stored_dense.listed(chains.read_chain(written / "3")[-1])
    assert plan.merged_bytes == plan.memory_bytes + sum(value.nbytes for value in dense)
    assert (plan.dense_file_count, plan.dense_bytes) != (0, 0)


def test_a_compacted_base_is_planned_at_its_path(written, tmp_path):
    write_chain(tmp_path, 4)
    run_compaction(tmp_path, 1)
    plan = restore_plan(tmp_path, 2)
    assert [save.name for save in plan.chain] == ["compacted/1/embeddings", "2"]
    assert plan.chain[0].compacted and not plan.chain[1].compacted


def test_small_steps_are_measured_as_a_whole(written):
    found = restore_plan(written).estimate
    assert found.sampled_share == 1.0
    assert 0 < found.records_secs < found.seconds and found.tables_secs > 0


def test_the_sample_is_bounded(written, monkeypatch):
    """The measurement must stay short even for a step that takes an hour to restore."""
    monkeypatch.setattr(estimate, "_SAMPLE_BYTES", 1)
    monkeypatch.setattr(estimate, "_WINDOW_BYTES", 600)
    found = restore_plan(written).estimate
    assert 0 < found.sampled_share < 0.1
    assert found.tables_secs > 0


def test_rows_are_merged_within_the_window(written, monkeypatch):
    taken: list[int] = []
    real = host_memory.empty_buffer

    def noted(shape, dtype):
        buffer = real(shape, dtype)
        taken.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(estimate, "_WINDOW_BYTES", 600)
    monkeypatch.setattr(host_memory, "empty_buffer", noted)
    assert restore_plan(written).estimate.tables_secs > 0
    assert max(taken) <= 600


def test_a_sample_reads_only_the_row_indices_that_it_needs(tmp_path, monkeypatch):
    with mock.patch.object(row_blocks, "CHUNK_BYTES", 512):
        write_chain(tmp_path, 3, rows=400)
    read: list[tuple[int, int]] = []
    real = row_indices.rows_within

    def noted(layer, segment, span):
        found = real(layer, segment, span)
        if segment.ranges is None:
            read.append((len(found.rows), segment.count))
        return found

    monkeypatch.setattr(estimate, "_SAMPLE_BYTES", 1)
    monkeypatch.setattr(estimate, "_WINDOW_BYTES", 2000)
    monkeypatch.setattr(row_indices, "rows_within", noted)
    found = restore_plan(tmp_path).estimate
    assert 0 < found.sampled_share < 0.5 and found.tables_secs > 0
    assert max(count for _, count in read) > 100
    assert all(rows < count / 2 for rows, count in read if count > 100)


def test_columns_of_several_processes_count_rows_once():
    plan = restore_plan(GOLDEN / "shards-v1", 10)
    assert plan.chain[0].rows == 50 + 30 + 20 + 40 + 12


def test_a_step_without_touched_rows_adds_no_reads(tmp_path):
    state, touched = model.start()
    with manager(tmp_path, policy=deltackpt.policies.Consecutive()) as trainer:
        for step in (1, 2):
            trainer.save(step, state, touched=touched)
    plan = restore_plan(tmp_path)
    assert (plan.chain[1].rows, plan.chain[1].nbytes) == (0, 0)


def test_damage_and_missing_steps_raise(tmp_path):
    write_chain(tmp_path, 1)
    with pytest.raises(StepNotFound):
        restore_plan(tmp_path, 9)
    victim = chunk(tmp_path / "0")
    flip(victim, victim)
    with pytest.raises(Damaged):
        restore_plan(tmp_path)


def test_the_command_shows_chain_tables_time_and_compaction(written):
    found = run("plan", written, 2, "--tables")
    assert found.returncode == 0, found.stderr
    for piece in ("adaptive4", "tables/users", "memory: ", "time: about ", "compaction: a base of"):
        assert piece in found.stdout
    told = json.loads(run("plan", written, "--json").stdout)
    assert told["step"] == 3 and told["estimate"]["seconds"] > 0
    assert run("plan", written, 99).returncode == 1
    assert run("plan", written, "x").returncode == 2
