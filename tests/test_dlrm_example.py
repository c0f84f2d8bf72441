# SPDX-License-Identifier: Apache-2.0
"""The DLRM example: readers, sparse optimizer, and resumed runs that equal uninterrupted ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servers
from dlrm_jax import data, demo, demo_log, demo_s3, demo_serving, main, model, optimizer, trainer
from machine import required
from running import demonstration, journal, kafka_cluster

import deltackpt
from deltackpt.testing import stored_chunks

SMALL = ["--scale", "0.005", "--width", "8", "--bottom", "16", "--top", "16", "--batch", "64"]


def dense_row_wise_adagrad(table, accumulator, ids, gradients, rate):
    """The same optimizer over a dense gradient, in float64."""
    dense = np.zeros(table.shape, np.float64)
    np.add.at(dense, ids, np.asarray(gradients, np.float64))
    accumulator = accumulator + np.mean(dense**2, axis=1)
    return table - rate * dense / (np.sqrt(accumulator) + 1e-8)[:, None], accumulator


@pytest.mark.parametrize("rows", [1, 7, 500])
def test_sparse_update_equals_a_dense_reference(rows):
    random = np.random.default_rng(rows)
    table = random.normal(size=(rows, 4)).astype(np.float32)
    accumulator = random.random(rows).astype(np.float32)
    update = jax.jit(optimizer.row_wise_adagrad, static_argnames="learning_rate")
    for _ in range(3):
        ids = random.integers(rows, size=64).astype(np.int32)
        gradients = random.normal(size=(64, 4)).astype(np.float32)
        expected = dense_row_wise_adagrad(table, accumulator, ids, gradients, 0.1)
        found = update(table, accumulator, ids, gradients, learning_rate=0.1)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
        untouched = np.setdiff1d(np.arange(rows), ids)
        assert np.array_equal(np.asarray(found[0])[untouched], table[untouched])
        table, accumulator = np.asarray(found[0]), np.asarray(found[1])


def test_gradients_of_repeated_ids_are_summed_once_per_row():
    rows, summed = optimizer.sum_by_row(
        jnp.array([5, 2, 5, 0]), jnp.array([[1.0], [2.0], [3.0], [4.0]]), 6
    )
    assert rows[:3].tolist() == [0, 2, 5]
    assert rows[3] >= 6
    assert summed.tolist() == [[4.0], [2.0], [4.0], [0.0]]


def test_step_marks_exactly_the_rows_that_it_changes():
    sizes = trainer.ModelOptions(rows={"C1": 50, "C2": 300}, width=4, bottom=(8,), top=(8,))
    traffic = data.ZipfTraffic(sizes.rows, 32, exponent=1.07, seed=3)
    state = trainer.init_state(sizes, 0)
    before = jax.tree.map(np.array, (state.tables, state.accumulators))
    batch = traffic.batch(0)
    state, _, _ = trainer.train_step(sizes)(state, batch)
    for name in sizes.rows:
        changed = np.flatnonzero(
            np.any(np.asarray(state.tables[name]) != before[0][name], axis=1)
            | (np.asarray(state.accumulators[name]) != before[1][name])
        )
        marked = np.flatnonzero(np.asarray(state.touched.stamps[name]))
        assert set(changed) <= set(marked)
        assert set(marked) == set(batch.ids[name])


LINE = ["1", "5", "", "-1", *["2"] * 10, "05db9164", "", *["68fd1e64"] * 24]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_kaggle_lines_are_read(tmp_path, newline):
    path = tmp_path / "train.txt"
    zeros = ["0"] + [""] * 39
    path.write_bytes(newline.join(["\t".join(LINE), "\t".join(zeros)]).encode())
    rows = data.table_rows("kaggle", 0.001)
    batch = data.CriteoFile(path, rows, 2).batch(0)
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.numeric.shape == (2, 13)
    np.testing.assert_allclose(batch.numeric[0, :4], np.log1p([5, 0, 0, 2]), rtol=1e-6)
    assert not batch.numeric[1].any()
    assert batch.ids["C1"].tolist() == [data.hashed_row(b"05db9164", rows["C1"]), 0]
    assert batch.ids["C2"].tolist() == [0, 0]
    assert list(batch.ids) == [f"C{i}" for i in range(1, 27)]


def test_csv_with_a_header_reads_like_the_kaggle_format(tmp_path):
    header = ["label", *[f"I{i}" for i in range(1, 14)], *[f"C{i}" for i in range(1, 27)]]
    csv, tsv = tmp_path / "sample.csv", tmp_path / "train.txt"
    csv.write_text(",".join(header) + "\n" + (",".join(LINE) + "\n") * 3)
    tsv.write_text(("\t".join(LINE) + "\n") * 3)
    rows = data.table_rows("thesis", 0.01)
    readers = [data.CriteoFile(path, rows, 2) for path in (csv, tsv)]
    assert [reader.lines for reader in readers] == [3, 3]
    assert_equal_batches(readers[0].batch(1), readers[1].batch(1))


def test_criteo_sample_is_read(shared):
    rows = data.table_rows("kaggle", 0.001)
    reader = data.CriteoFile(shared / "criteo_sample.txt", rows, 200)
    batch = reader.batch(0)
    assert reader.lines == 200
    assert batch.labels.sum() == 49
    assert np.isfinite(batch.numeric).all()
    for name, ids in batch.ids.items():
        assert ids.min() >= 0 and ids.max() < rows[name]


def test_batches_of_a_file_are_consecutive_lines_that_wrap_at_its_end(tmp_path):
    path = tmp_path / "train.txt"
    lines = 2500  # more than two marks of the line index
    path.write_text("".join("\t".join([str(i), *[""] * 39]) + "\n" for i in range(lines)))
    reader = data.CriteoFile(path, {"C1": 10}, 700)
    assert reader.lines == lines
    for step in range(5):
        expected = [(step * 700 + i) % lines for i in range(700)]
        assert reader.batch(step).labels.tolist() == expected


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b,c\n")
    with pytest.raises(ValueError, match="expected 40 fields"):
        data.CriteoFile(path, {"C1": 10}, 2)
    with pytest.raises(ValueError, match="1 to 26 row counts"):
        data.table_rows(str(path))


def test_batches_depend_on_seed_and_step_only():
    rows = {"C1": 100, "C2": 7}
    first = data.ZipfTraffic(rows, 32, exponent=1.07, seed=1)
    again = data.ZipfTraffic(rows, 32, exponent=1.07, seed=1)
    first.batch(0)
    assert_equal_batches(first.batch(5), again.batch(5))
    assert not np.array_equal(first.batch(5).numeric, first.batch(6).numeric)


@pytest.mark.parametrize("exponent", [0.0, 0.9, 1.0, 1.07, 1.45])
def test_zipf_rows_stay_in_the_table_and_follow_the_exponent(exponent):
    rows = 1000
    ids = data.zipf_rows(np.random.default_rng(0), rows, 500_000, exponent)
    assert ids.min() >= 0 and ids.max() < rows
    share = np.sort(np.bincount(ids, minlength=rows))[::-1][:10].sum() / len(ids)
    ranks = np.arange(1, rows + 1.0) ** -exponent
    # The samples follow the continuous law, which is slightly flatter at its head.
    assert share == pytest.approx(ranks[:10].sum() / ranks.sum(), rel=0.25)


def test_area_under_curve_shares_ranks_among_ties():
    labels = np.array([1, 0, 1, 0])
    assert model.area_under_curve(np.ones(4), labels) == 0.5
    assert model.area_under_curve(np.array([2.0, 1, 4, 3]), labels) == 0.75


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def run(name: str, *arguments: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        places = ["--directory", str(tmp_path / name), "--journal", str(path)]
        every = ["--save-every", "5", "--print-every", "5", "--durability", "process"]
        main.main([*SMALL, *places, *every, *arguments])
        return path

    whole = run("whole", "--steps", "20")
    run("parts", "--steps", "10")
    pieces = run("parts", "--steps", "20", "--resume")
    assert journal.read(pieces, "step") == journal.read(whole, "step")
    assert journal.read(pieces, "end")[-1] == journal.read(whole, "end")[-1]
    kinds = [entry["kind"] for entry in journal.read(pieces, "save")]
    assert kinds == ["base", "delta", "delta", "delta"]


def test_quantized_deltas_are_smaller_and_resume(tmp_path, capsys):
    arguments = [*SMALL, "--save-every", "5", "--durability", "process"]
    written = {}
    for codec in ("raw", "int4"):
        directory = tmp_path / codec
        arguments = [*arguments, "--directory", str(directory), "--codec", codec]
        main.main([*arguments, "--steps", "10"])
        main.main([*arguments, "--steps", "15", "--resume"])
        written[codec] = sum(chunk.nbytes for chunk in stored_chunks(directory / "15", "values*"))
    assert "off by" in capsys.readouterr().out
    assert 0 < written["int4"] < written["raw"] / 1.9


def test_a_used_directory_is_not_trained_into_without_resume(tmp_path):
    arguments = [*SMALL, "--steps", "2", "--directory", str(tmp_path / "run")]
    main.main(arguments)
    with pytest.raises(SystemExit, match="--resume"):
        main.main(arguments)


def test_demo_recognizes_a_save_in_progress(tmp_path):
    assert demonstration.save_in_progress(tmp_path) is None
    (tmp_path / "20" / "embeddings").mkdir(parents=True)
    assert demonstration.save_in_progress(tmp_path) is None
    begun = tmp_path / "40.orbax-checkpoint-tmp"
    (begun / "embeddings").mkdir(parents=True)
    assert demonstration.save_in_progress(tmp_path) is None
    chunk = begun / "embeddings" / "shard.0" / "g0.0" / "values" / "c.0.0"
    chunk.parent.mkdir(parents=True)
    assert demonstration.save_in_progress(tmp_path) is None
    chunk.write_text("rows")
    assert demonstration.save_in_progress(tmp_path) == begun
    shutil.rmtree(begun / "embeddings" / "shard.0")
    assert demonstration.save_in_progress(tmp_path) is None
    (begun / "embeddings" / "layer.0").write_text("rows")
    assert demonstration.save_in_progress(tmp_path) == begun


def test_a_kill_costs_the_steps_appended_past_the_resume_step(tmp_path):
    path = tmp_path / "killed.jsonl"
    told = [
        {"event": "start", "step": 0},
        {"event": "logged", "step": 1, "recovery": 0},
        {"event": "logged", "step": 2, "recovery": 1},
        {"event": "start", "step": 1},
        {"event": "start", "step": 1},
        {"event": "logged", "step": 2, "recovery": None},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in told) + '{"event": "sta')
    first, second = demo_log.kills_of(path)
    assert (first.logged, first.acknowledged, first.restored, first.repeated) == (2, 1, 1, 1)
    assert (second.logged, second.repeated) == (1, 0)


def test_state_splits_into_tables_with_their_accumulators():
    sizes = trainer.ModelOptions(rows={"C1": 5, "C2": 6}, width=4, bottom=(8,), top=(8,))
    split = deltackpt.handlers.split(trainer.init_state(sizes, 0), trainer.checkpoint_tables())
    assert sorted(split.fields) == ["tables/C1", "tables/C2"]
    assert all(len(fields) == 2 for fields in split.fields.values())
    assert split.touched is not None
    assert "accumulators" not in split.dense


def assert_equal_batches(first: data.Batch, second: data.Batch) -> None:
    for mine, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.array_equal(mine, theirs)


#: Demos: the program, its arguments beside the scale, and what it prints if all is well.
DEMOS = {
    "one process": (demo, [], "nothing was lost"),
    "Criteo": (demo, [], "nothing was lost"),
    "WAL": (demo_log, ["--steps=24", "--kills=3"], "no acknowledged step was lost"),
    "Kafka": (demo_log, ["--steps=24", "--kills=3", "--kafka"], "no acknowledged step was lost"),
    "serving": (demo_serving, ["--steps=24"], "none is mixed or wrong"),
    "bucket": (demo_s3, [], "no step in the bucket was lost"),
}


@pytest.mark.long
@pytest.mark.drawn("demos", 2)
@pytest.mark.parametrize("name", DEMOS)
def test_demos_prove_that_nothing_is_lost(tmp_path, request, name):
    program, arguments, told = DEMOS[name]
    if name == "Criteo":
        arguments = ["--data", str(request.getfixturevalue("shared") / "criteo_sample.txt")]
    elif name == "Kafka":
        reason = kafka_cluster.missing()
        required(reason is None, str(reason))
    elif name == "bucket":
        servers.program("versitygw")
    done = subprocess.run(
        [sys.executable, program.__file__, "--scale=0.1", f"--directory={tmp_path}", *arguments],
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    assert told in " ".join(done.stdout.split())
    assert name != "bucket" or "PutObject" in done.stdout
