# SPDX-License-Identifier: Apache-2.0
"""inspect against an in-memory model: random chains, many shards, changing topologies.

``without_jax/`` reads real runs, with dense leaves and every codec, without jax.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax
import model
import numpy as np
import orbax.checkpoint as ocp
import pytest
import test_meshes
from damages import flip
from hypothesis import given
from job import Job
from test_compact import manager, run_compaction, write_chain
from test_meshes import Run, Topology, initial, topologies, trained

import deltackpt
from deltackpt import errors, inspect
from deltackpt.format.dtypes import dtype_of
from deltackpt.reading import chains, stored_saves
from deltackpt.reading.orbax_values import item_values
from deltackpt.save import lineage
from deltackpt.state import tables
from deltackpt.storage.store import StorePath, store_path

TABLE = "tables/users"


def fields(state: dict) -> dict[str, dict[str, np.ndarray]]:
    """Leaves of a ``test_meshes`` state, by table and field."""
    return tables.split(state, test_meshes.TABLES).fields


def saver_of(root: Path, select: str = "t") -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers={"embeddings": deltackpt.Tables(select=select)}
    )


def saved(root: Path, *states: dict, select: str = "t") -> inspect.Checkpoint:
    """Saves a base of each state; returns the opened checkpoint."""
    with saver_of(root, select) as saver:
        for step, state in enumerate(states):
            model.commit(saver, step, state)
    return inspect.open(root)


def flip_dense(root: Path) -> None:
    """Damages the file of the dense leaves of step 0."""
    [data] = root.glob("0/dense/d/*")
    flip(data, data.stat().st_size - 1)


def replace_step_2(root: Path, states: dict[int, dict], *rows: int) -> None:
    """Restores step 1, marks some rows, and saves another step 2."""
    with manager(root) as saver:
        result = saver.restore(1, states[1])
        marks = deltackpt.touched.mark(result.touched, {TABLE: jax.numpy.array(rows, int)})
        with pytest.warns(UserWarning, match="rolled-back"):
            saver.save(2, result.state, touched=marks)


def continued(root: Path, step: int, job: Job, topology: Topology) -> Run:
    """Continues from a step on another topology."""
    run = Run(job, topology, root)
    chain = chains.read_chain(root / str(step))
    new = lineage.new_run()
    reading = lineage.Reading("", int(run.touched.identity), 0)
    clocks = lineage.Clocks(readings=(reading,))
    for own in run.lineages:
        known = lineage.Known(
            info=chain[-1].info,
            path=root / str(step),
            clocks=clocks,
            layout=chain[-1].layout,
            settled=clocks,
            total_bytes=sum(save.info.nbytes for save in chain),
            chain_length=len(chain) - 1,
        )
        own.adopt(known, base_bytes=chain[0].info.nbytes, run=new)
    return run


@test_meshes.slow_examples(12)
@given(
    runs=st.lists(st.tuples(topologies(), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 16),
    data=st.data(),
)
def test_lazy_reads_histories_and_diffs_match_the_model(tmp_path_factory, runs, seed, data):
    root = tmp_path_factory.mktemp("root")
    states, held, step = [initial()], [{}], 0
    for number, (topology, count) in enumerate(runs):
        job = Job(count)
        with job.running():
            run = Run(job, topology, root) if not number else continued(root, step, job, topology)
            if not number:
                found = run.save(0, states[0])
                if any(isinstance(result, errors.TrackingError) for result in found):
                    return  # No process that holds the stamps of these slots has their rows.
            for _ in range(2):
                state, ids = trained(states[-1], seed + step)
                run.mark(ids)
                found = run.save(step + 1, state)
                if any(isinstance(result, errors.TrackingError) for result in found):
                    return
                assert not [result for result in found if isinstance(result, Exception)], found
                step += 1
                states.append(state)
                held.append(ids)
    ck = inspect.open(root)
    assert ck.steps == list(range(step + 1))
    # If tables are grouped differently on a new topology, the save is a base.
    for save in ck.saves:
        if save.kind == "base":
            held[save.step] = {name: np.arange(len(t)) for name, t in ck.at(0).tables.items()}
    for at, state in enumerate(states):
        for name, expected in fields(state).items():
            table = ck.at(at).tables[name]
            for field, leaf in expected.items():
                lazy = table.field(field)
                assert (lazy.shape, lazy.dtype) == (leaf.shape, leaf.dtype)
                index = data.draw(st.lists(st.integers(-len(leaf), len(leaf) - 1), max_size=9))
                rows = np.array(index, int)
                assert lazy[rows].tobytes() == leaf[rows].tobytes()
            assert np.asarray(table).tobytes() == expected["values"].tobytes()
        touched = ck.touched(at)
        for name, rows in held[at].items():
            assert touched[name].tolist() == sorted(rows.tolist())
    name = data.draw(st.sampled_from(sorted(fields(states[0]))))
    field = data.draw(st.sampled_from(["values", "slot.moment", "slot.accumulator"]))
    leaves = [fields(state)[name][field] for state in states]
    rows = data.draw(st.lists(st.integers(0, len(leaves[0]) - 1), min_size=1, max_size=6))
    history = ck.history(name, rows, field=field)
    assert history.values.tobytes() == np.stack([leaf[rows] for leaf in leaves]).tobytes()
    for at in range(step + 1):
        assert history.written[at].tolist() == [row in held[at][name] for row in rows]
    first, last = sorted(data.draw(st.tuples(st.integers(0, step), st.integers(0, step))))
    changed = ck.diff(first, last, field=field)[name]
    before, after = leaves[first], leaves[last]
    differs = (before != after).reshape(len(before), -1).any(axis=1)
    assert changed.rows.tolist() == np.flatnonzero(differs).tolist()
    wide = (after - before).reshape(len(before), -1).astype(np.float64)
    np.testing.assert_allclose(changed.norms, np.linalg.norm(wide, axis=1)[differs], rtol=1e-6)


def test_a_diff_compares_only_rows_that_a_save_in_between_holds(tmp_path):
    write_chain(tmp_path)
    ck = inspect.open(tmp_path)
    touched = np.unique(np.concatenate([ck.touched(step)[TABLE] for step in (2, 3)]))
    found = ck.diff(1, 3)[TABLE]
    assert found.compared == len(touched) < found.total_rows
    assert set(found.rows) <= set(touched)
    # The reverse diff has the same rows.
    assert ck.diff(3, 1)[TABLE].rows.tolist() == found.rows.tolist()


def test_a_change_of_sign_of_zero_or_of_a_nan_is_a_difference(tmp_path):
    table = np.ones((4, 2), np.float32)
    table[0], table[1] = 0.0, np.nan
    touched = deltackpt.touched.init({"t": jax.numpy.asarray(table)})
    with saver_of(tmp_path) as saver:
        model.commit(saver, 0, {"t": jax.numpy.asarray(table)}, touched=touched)
        table[0], table[3] = -0.0, np.inf
        touched = deltackpt.touched.mark(touched, {"t": jax.numpy.arange(4)})
        saver.save(1, {"t": jax.numpy.asarray(table)}, touched=touched)
    found = inspect.open(tmp_path).diff(0, 1)["t"]
    assert found.rows.tolist() == [0, 3]
    assert found.norms.tolist() == [0.0, np.inf]
    assert found.relative.tolist() == [0.0, np.inf]
    assert found.largest().tolist() == [3, 0]
    assert found.quantiles((0.0, 1.0)) == {0.0: 0.0, 1.0: np.inf}


def test_history_shows_which_rows_existed_before_a_table_grew(tmp_path):
    small, large = np.zeros((3, 2), np.float32), np.ones((5, 2), np.float32)
    with saver_of(tmp_path) as saver:
        for step, table in enumerate((small, large)):
            model.commit(saver, step, {"t": table}, touched=deltackpt.touched.init({"t": table}))
    ck = inspect.open(tmp_path)
    found = ck.history("t", [4, 0])
    assert found.present.tolist() == [[False, True], [True, True]]
    assert found.values.tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert found.to_pandas().index.tolist() == [(0, 0), (1, 4), (1, 0)]
    assert ck.diff(0, 1)["t"].added == 2
    with pytest.raises(errors.TemplateMismatch, match=r"within \[0, 5\), found 5;"):
        ck.history("t", 5)


def test_history_reads_each_save_once(tmp_path):
    write_chain(tmp_path)
    opened = []
    real = stored_saves.StoredShard.read_into

    def counting(shard, segment, entry, start, *arguments):
        opened.append((shard.record.save_id, segment.name, entry.name, start))
        return real(shard, segment, entry, start, *arguments)

    with mock.patch.object(stored_saves.StoredShard, "read_into", counting):
        inspect.open(tmp_path).history(TABLE, 3)
    assert len(opened) == len(set(opened))


def test_a_damaged_row_is_named_and_others_still_read(tmp_path):
    table = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
    lazy = saved(tmp_path, {"t": table}).at(0)["t"]
    [chunk] = tmp_path.glob("0/embeddings/shard.0/*/values/c.0.0")
    flip(chunk, chunk.stat().st_size // 2)
    assert lazy[3].tobytes() == table[3].tobytes()
    with pytest.raises(errors.Damaged, match="values/c.0.0"):
        lazy[2048]


def test_a_damaged_compacted_base_is_skipped(tmp_path):
    states = write_chain(tmp_path)
    run_compaction(tmp_path)
    next(tmp_path.glob("compacted/4/embeddings/shard.0/*/values/c.0.0")).write_bytes(b"")
    step = inspect.open(tmp_path).at(4)
    with pytest.warns(UserWarning, match="instead") as caught:
        found = {name: np.asarray(step[f"tables/{name}"]) for name in ("users", "items")}
    assert len(caught) == 1
    for name, values in found.items():
        assert values.tobytes() == np.asarray(states[4]["tables"][name]).tobytes()


def test_history_of_all_steps_omits_steps_that_were_removed(tmp_path):
    write_chain(tmp_path)
    ck = inspect.open(tmp_path)
    with mock.patch.object(type(ck), "steps", [0, 1, 2, 3, 4, 99]):
        assert ck.history(TABLE, 0).steps.tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(errors.StepNotFound):
            ck.history(TABLE, 0, steps=[99])


def test_a_step_that_replaces_a_rolled_back_one_is_read_again(tmp_path):
    states = write_chain(tmp_path)
    ck = inspect.open(tmp_path)
    assert len(ck.saves) == 5
    old = ck.touched(2)[TABLE]
    replace_step_2(tmp_path, states, 0, 1, 2)
    assert len(old) and ck.touched(2)[TABLE].tolist() == [0, 1, 2]
    assert [save.step for save in ck.saves] == [0, 1, 2]


def test_saves_describe_each_step(tmp_path):
    write_chain(tmp_path)
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "1" / "embeddings" / "manifest.0.msgpack").write_bytes(b"no")
    saves = {save.step: save for save in inspect.open(tmp_path).saves}
    assert [(s.kind, s.parent, s.chain_length) for s in saves.values()] == [
        ("base", None, 0),
        (None, None, None),
        ("delta", 1, None),
        ("delta", 3, None),
    ]
    assert saves[0].rows == saves[0].total_rows == sum(model.ROWS.values())
    assert saves[0].disk_bytes > saves[0].nbytes > 0 and saves[0].committed_at is not None
    assert saves[0].problem == "" and "manifest.0" in saves[1].problem
    assert "its parent, step 1, is missing or damaged" in saves[2].problem


@pytest.mark.processes
def test_opening_lists_once_and_reading_a_row_opens_only_files_of_its_chain(tmp_path):
    write_chain(tmp_path, 3)
    few = opened_files(tmp_path)
    for number in range(40):  # Unrelated steps beside the chain.
        shutil.copytree(tmp_path / "0", tmp_path / str(1000 + number))
    shutil.copytree(tmp_path / "0", tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    assert opened_files(tmp_path) == few > 0


def opened_files(root: Path) -> int:
    """Counts the files that reading a row of step 2 opens, with Python's audit hook."""
    program = (
        "import sys, deltackpt.inspect as i, google_crc32c, tensorstore, msgpack, numpy\n"
        "count = 0\n"
        "def hook(event, arguments):\n"
        "    global count\n"
        "    count += event == 'open' and str(arguments[0]).startswith(sys.argv[1])\n"
        "i.open(sys.argv[1], item='embeddings').at(2)\n"
        "sys.addaudithook(hook)\n"
        "i.open(sys.argv[1], item='embeddings').at(2)['tables/users'][3]\n"
        "print(count)"
    )
    command = [sys.executable, "-c", program, os.fspath(root)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


def test_notebook_pages_escape_names(tmp_path):
    tables = (make((12, 30), np.float32) for make in (np.ones, np.zeros))
    ck = saved(tmp_path, *({"<b>&": table} for table in tables), select="*")
    for shown in (ck, ck.at(), ck.at()["<b>&"], ck.diff(0, 1)):
        page = shown._repr_html_()
        assert "<b>" not in page and page.count("<table") == page.count("</table>") > 0
    assert "&lt;b&gt;&amp;" in ck.at()._repr_html_()


def test_results_are_short_in_an_interpreter(tmp_path):
    write_chain(tmp_path, 2)
    ck = inspect.open(tmp_path)
    diff = ck.diff(0, 1)
    for shown in (ck, ck.saves[-1], diff, diff[TABLE], ck.history(TABLE, [0])):
        assert repr(shown).startswith(f"<{type(shown).__name__} ") and len(repr(shown)) < 150


def test_errors_for_wrong_names_list_what_exists(tmp_path):
    write_chain(tmp_path, 2)
    ck = inspect.open(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    for error, match, call in (
        (KeyError, "tables/users", lambda: ck.at()["tables/user"]),
        (errors.TemplateMismatch, "slot.accumulator", lambda: ck.at()[TABLE].field("slot.moment")),
        (errors.TemplateMismatch, "neither step", lambda: ck.diff(0, 1, tables=["nope"])),
        (errors.TemplateMismatch, "expected one of tables/", lambda: ck.history("nope", 0)),
        (errors.TemplateMismatch, "indices of at least 0", lambda: ck.history(TABLE, -1)),
        (errors.StorageError, None, lambda: inspect.open(tmp_path / "nothing")),
        (errors.ForeignDirectory, "found a step; pass", lambda: inspect.open(tmp_path / "1")),
        (errors.StepNotFound, "first save", lambda: inspect.open(empty).at()),
        (
            errors.OptionError,
            r"'typo', found \['embeddings'\]",
            lambda: inspect.open(tmp_path, item="typo"),
        ),
    ):
        with pytest.raises(error, match=match):
            call()
    assert inspect.open(empty).saves == ()


def test_a_missing_pandas_is_named(tmp_path, monkeypatch):
    write_chain(tmp_path, 2)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(errors.MissingExtra, match="pip install pandas"):
        inspect.open(tmp_path).diff(0, 1).to_pandas()


def test_dense_leaves_of_a_replaced_step_are_never_mixed_with_its_tables(tmp_path):
    states = write_chain(tmp_path)
    ck = inspect.open(tmp_path)
    step, row = ck.at(2), ck.touched(2)[TABLE][0]
    kernel = step["dense/kernel"]
    assert kernel[:].tobytes() == np.asarray(states[2]["dense"]["kernel"]).tobytes()
    replace_step_2(tmp_path, states)
    for read in (lambda: kernel[:], lambda: step["step"].value, lambda: step[TABLE][row]):
        with pytest.raises(errors.StepGone, match="removed or replaced"):
            read()


def test_a_history_never_mixes_steps_of_two_runs(tmp_path):
    states = write_chain(tmp_path)
    ck = inspect.open(tmp_path)
    real = stored_saves.read_save
    done = []

    def racing(step_dir, item="embeddings", **how):
        if step_dir.name == "3" and not done:  # 2 was read; it and 3 are replaced now.
            done.append(True)
            with manager(tmp_path) as saver:
                result = saver.restore(1, states[1])
                with pytest.warns(UserWarning, match="rolled-back"):
                    saver.save(2, result.state, touched=result.touched)
                saver.save(3, result.state, touched=result.touched)
        return real(step_dir, item, **how)

    with mock.patch.object(stored_saves, "read_save", racing):
        found = ck.history(TABLE, range(50))
    assert done and found.steps.tolist() == [0, 1, 2, 3]
    again = np.asarray(states[1]["tables"]["users"])[:50].tobytes()
    assert [values.tobytes() for values in found.values[1:]] == [again] * 3


def test_dense_damage_is_found_after_a_first_read_too(tmp_path):
    write_chain(tmp_path, 1)
    read, unread = (inspect.open(tmp_path).at(0) for _ in range(2))
    before = read["dense/kernel"][:]
    assert read["dense/kernel"][:].tobytes() == before.tobytes()
    flip_dense(tmp_path)
    for step in (read, unread):
        with pytest.raises(errors.Damaged, match="dense/d/"):
            step["dense/kernel"][:]
        assert step[TABLE][:3].shape == (3, 8)


def test_no_damage_of_an_item_changes_the_value_of_a_leaf(tmp_path):
    arrays = {dtype: np.ones((3, 2), dtype_of(dtype)) for dtype in ("int4", "bfloat16", "float64")}
    leaves = {**arrays, "large": np.arange(5000.0), "number": 5, "text": "a", "empty": np.zeros(0)}

    def values() -> dict[str, str]:
        dense = inspect.open(tmp_path).at(0).dense
        return {
            name: repr((leaf, np.asarray(leaf.value).tobytes())) for name, leaf in dense.items()
        }

    saved(tmp_path, {"t": np.ones((3, 2), np.float32), "d": leaves})
    intact, damaged = values(), 0
    for file in filter(Path.is_file, (tmp_path / "0" / "dense").rglob("*")):
        data = file.read_bytes()
        for at in range(0, len(data), -(-len(data) // 3)):
            flip(file, at)
            try:
                assert values() == intact, (file, at)
            except errors.Damaged:
                damaged += 1
            file.write_bytes(data)
    assert damaged > 10


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_items_in_each_layout_of_orbax_are_read(tmp_path, monkeypatch, use_ocdbt, use_zarr3):
    # A file of Zarr may be longer than any file of this project.
    monkeypatch.setitem(StorePath.read.__kwdefaults__, "most_bytes", 5000)
    state = {"d": {"large": np.arange(5000.0)}, "manifest": np.int8([3]), "number": 5, "text": "a"}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    ocp.Checkpointer(handler).save(tmp_path / "item", args=ocp.args.PyTreeSave(state))
    source = item_values(store_path(tmp_path / "item"), None)
    leaves = inspect.DenseItem(tmp_path / "item", lambda: source, exists=lambda: True)
    assert leaves["number"].value == 5 and leaves["text"].value == "a"
    assert leaves["manifest"][:].dtype == np.int8 and leaves["manifest"][0] == 3
    found = np.asarray(leaves["d/large"])
    assert found.tobytes() == state["d"]["large"].tobytes() and found.flags.writeable


def test_listing_dense_leaves_does_not_read_the_data(tmp_path):
    write_chain(tmp_path, 1)
    for data in tmp_path.glob("0/dense/**/d/*"):
        data.write_bytes(b"")
    step = inspect.open(tmp_path).at(0)
    assert "dense/kernel" in list(step)
    (tmp_path / "0" / "dense" / "_METADATA").write_text("{}")
    with pytest.raises(errors.Damaged, match="_METADATA"):
        list(inspect.open(tmp_path).at(0))


def test_dense_leaves_index_as_numpy_does_and_keep_their_own_names(tmp_path):
    kernel = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    state = {"t": np.ones((3, 2), np.float32), "a": {"b": kernel}, "a/b": kernel + 1}
    step = saved(tmp_path / "a#b %41", state).at(0)
    found = [np.asarray(leaf).tobytes() for leaf in step.dense.values()]
    assert sorted(found) == sorted([kernel.tobytes(), (kernel + 1).tobytes()])
    leaf = next(leaf for leaf in step.dense.values() if leaf[0, 0] == 0.0)
    indices = (
        *(2, -1, slice(-2, None), slice(0, 100), slice(None, None, 2), slice(4, 1, -1)),
        *((1, -1), (slice(1, 3), slice(2, 9)), [0, -1], (..., 2), kernel > 5, None, slice(2, 1)),
    )
    for index in indices:
        assert np.array_equal(leaf[index], kernel[index]), index
    with pytest.raises(IndexError):
        leaf[6]


def test_strings_with_slashes_in_their_keys_are_shown(tmp_path):
    leaves = {"a/b": "a text", "a": {"b": "another"}, "c~1d": np.zeros((0, 3)), "e": np.ones(2)}
    dense = saved(tmp_path, {"t": np.ones((3, 2), np.float32), "d": leaves}).at(0).dense
    texts = sorted(leaf.value for leaf in dense.values() if leaf.kind == "string")
    assert texts == ["a text", "another"]
    assert dense["d/c~1d"].kind == "array" and dense["d/c~1d"].shape == (0, 3)


def test_a_history_over_two_row_types_names_the_step_of_each(tmp_path):
    ck = saved(tmp_path, *({"t": np.ones((4, width), np.float32)} for width in (2, 3)))
    with pytest.raises(errors.TemplateMismatch, match=r"float32\[2\] from step 0, float32\[3\]"):
        ck.history("t", 0)
    assert ck.history("t", 0, steps=[1]).values.shape == (1, 1, 3)
    assert ck.diff(0, 1).only_a == ck.diff(0, 1).only_b == ("t",)
    assert len(ck.diff(0, 1).to_pandas()) == 0


def test_changes_of_large_integers_and_nan_do_not_spoil_the_other_figures(tmp_path):
    ids = np.full((3, 1), 1 << 60, np.int64)
    ck = saved(
        tmp_path,
        {"ids": ids, "rows": np.ones((3, 1), np.float32)},
        {
            "ids": ids + np.array([[1], [-3], [0]]),
            "rows": np.array([[np.nan], [3.0], [2.0]], np.float32),
        },
        select="*",
    )
    found = ck.diff(0, 1)
    assert found["ids"].norms.tolist() == [1.0, 3.0]
    assert found["rows"].quantiles((0.0, 0.5, 1.0)) == {0.0: 1.0, 0.5: 2.0, 1.0: np.inf}
    with pytest.raises(errors.TemplateMismatch, match="no table with it"):
        ck.diff(0, 1, field="slot.typo")


def test_an_unreadable_step_is_listed_with_the_others(tmp_path):
    write_chain(tmp_path, 3)
    real = stored_saves.read_save

    def refusing(step_dir, item="embeddings"):
        if step_dir.name == "1":
            raise PermissionError(13, "Permission denied")
        return real(step_dir, item)

    with mock.patch.object(stored_saves, "read_save", refusing):
        saves = inspect.open(tmp_path).saves
    assert [bool(save.problem) for save in saves] == [False, True, True]
    assert "Permission denied" in saves[1].problem


def test_closing_checkpoints_closes_the_connections_to_kafka(tmp_path):
    saved(tmp_path, {"t": np.ones((3, 2), np.float32)})
    with inspect.open(tmp_path) as ck:
        topics = ck._root.topics = mock.Mock()
        assert ck.steps == [0]
        assert not topics.close.called
    topics.close.assert_called_once_with()
