# SPDX-License-Identifier: Apache-2.0
"""Steps whose dense leaves are blocks: inspected, verified, collected, exported and copied."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import command
import jax
import numpy as np
import pytest
from damages import damage
from dense_runs import STEPS, by_orbax, restored, run_compaction, written, written_once
from safetensors.numpy import load_file
from test_dense_blocks_trust import EF4, of_segment
from test_hostile_records import MANIFEST, change

from deltackpt import inspect, interchange
from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.maintenance import estimate, gc, verify
from deltackpt.maintenance.garbage import Retention
from deltackpt.reading import orbax_values, stored_saves
from deltackpt.testing import stored_chunks
from deltackpt.tiers import copy as copying

__all__ = ["written", "written_once"]


@pytest.fixture
def root(written) -> Path:
    return written[0]


# Inspection.


def assert_shown(root: Path, states: dict[int, dict], steps: Iterable[int]) -> None:
    """Checks that inspection shows the values that restores return, bit for bit."""
    for step in steps:
        found = inspect.open(root).at(step)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(states[step])]
        names = ["/".join(one.key for one in path) for path in paths]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = dict(zip(names, restored(root, step, states[step]), strict=True))
        del expected["emb"]
        shown = {name: leaf for name, leaf in found.dense.items() if leaf.kind != "None"}
        assert shown.keys() == expected.keys()
        for name, leaf in shown.items():
            value = leaf.value.encode() if leaf.kind == "string" else np.asarray(leaf).tobytes()
            assert value == expected[name], name
        assert found.dense["key"].kind == "key" and found.dense["name"].value == "a text"
        assert found.items["dense"]["params/w"].shape == (60, 70)
        w = np.asarray(found["params/w"])
        assert (found["params/w"][3:5, 1] == w[3:5, 1]).all() and found["params/w"][2, 3] == w[2, 3]


def compacted_alone(root: Path, step: int) -> None:
    """Compacts a step and removes the steps below it."""
    run_compaction(root, step)
    for below in range(1, step):
        shutil.rmtree(root / str(below))


def base_data(root: Path) -> Path:
    """A data file of the Orbax item of the base."""
    return next((root / "1/dense/d").iterdir())


def files_below(folder: Path) -> dict[Path, int]:
    """The files of a folder, and their sizes."""
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_every_leaf_is_shown_as_it_restores(written):
    root, states = written
    assert_shown(root, states, (1, 2, 5))
    compacted_alone(root, 4)
    assert_shown(root, states, (4, 5))


def test_a_leaf_is_checked_before_it_is_shown(root):
    found = inspect.open(root).at(4)
    before = np.asarray(found["params/exact"]).tobytes()
    [chunk] = stored_chunks(root / "3", "blocks.scale", segment="dense.float32.ef4")
    chunk.flip()
    with pytest.raises(Damaged, match="3/embeddings/layer.0: row group 'dense.float32.ef4'"):
        [np.asarray(leaf) for leaf in found.dense.values() if leaf.kind == "array"]
    chunk.flip()
    assert np.asarray(found["params/exact"]).tobytes() == before
    damage(base_data(root), "flipped")
    with pytest.raises(Damaged, match="1/dense/d/"):
        np.asarray(found["frozen"])


def test_the_stored_form_of_dense_leaves_is_reported(root):
    ck = inspect.open(root)
    assert ck.at(1).dense_saved == () and ck.save_of(1).dense_nbytes is None
    saved = {leaf.name: leaf for leaf in ck.at(3).dense_saved}
    assert saved["params/w"].codecs == ("ef4",) and saved["params/v"].codecs == ("ef8",)
    assert saved["nu"].codecs == ("int8",) and saved["params/half"].codecs == ("sparse",)
    assert saved["params/w"].blocks == saved["params/w"].total_blocks == 17
    assert saved["frozen"].blocks == 0 and saved["frozen"].nbytes == 0
    assert saved["frozen"].codecs == () and saved["frozen"].raw_bytes == 12000
    assert 0 < saved["params/half"].blocks < saved["params/half"].total_blocks
    assert saved["count"].codecs == ("plain",) and saved["count"].total_blocks == 0
    assert 0.1 < saved["params/w"].nbytes / saved["params/w"].raw_bytes < 0.16
    assert ck.save_of(3).dense_nbytes > saved["nu"].nbytes


def test_commands_report_how_dense_leaves_are_stored(root):
    listed = command.run("ls", root)
    assert listed.returncode == 0 and listed.stdout.count("raw, dense ef4+ef8+int8") == 4
    shown = command.run("show", root, 3).stdout
    assert "dense leaves in this save" in shown and "ef4" in shown
    reported = json.loads(command.run("show", root, 3, "--json").stdout)
    assert reported["dense_bytes"] > 0 and {"ef4", "int8"} <= {*reported["dense_codecs"]}
    assert {"table": "emb", "field": "values", "codec": "raw"}.items() <= reported["tables"][
        0
    ].items()
    [frozen] = [leaf for leaf in reported["dense_saved"] if leaf["name"] == "frozen"]
    assert frozen["codecs"] == [] and frozen["blocks"] == 0
    assert "dense leaves in this save" in inspect.open(root).at(3)._repr_html_()


# Verification.


def verdicts(root: Path) -> dict[int, tuple[str, ...]]:
    """Maps steps to the saves that break them."""
    return {one.step: one.broken_by for one in verify.verify_root(root).steps}


def test_every_damaged_file_of_blocks_and_items_is_found(root):
    run_compaction(root, 3)
    chunks = stored_chunks(root / "4", "*")
    files = files_below(root / "compacted/3/embeddings/dense")
    chosen = [path for path, size in files.items() if size]
    assert len(chosen) + len(chunks) > 20

    def problems() -> tuple[list[str], set[int]]:
        found = verify.verify_root(root)
        broken = {one.step for one in found.steps if not one.restorable}
        return [problem.object_name for problem in found.problems], broken

    for chunk in chunks:
        chunk.flip()
        named, broken = problems()
        assert any(re.search(rf"4/embeddings/{chunk.name}", name) for name in named), chunk
        assert broken == {4, 5}, chunk
        chunk.flip()
    for path in chosen:
        damage(path, "flipped")
        named, broken = problems()
        assert str(path.relative_to(root)) in named, path
        # A compacted base is skipped while the steps that it replaced exist.
        assert broken == set(), path
        damage(path, "flipped")


def test_a_damaged_item_of_a_base_breaks_the_deltas_that_build_on_it(root):
    for path in (base_data(root), root / "1" / naming.STEP_DIGESTS):
        damage(path, "flipped")
        assert verdicts(root) == dict.fromkeys(STEPS, ("1",))
        damage(path, "flipped")
    shutil.rmtree(root / "1/dense")
    assert verdicts(root) == dict.fromkeys(STEPS, ("1",))


def test_a_chain_with_an_incomplete_value_is_reported(root):
    with without("frozen/0.0"):
        report = verify.verify_root(root)
    assert [one.restorable for one in report.steps] == [True, False, False, False, False]
    assert str(report.problems[0]).startswith(
        "1/dense: expected 12000 bytes of frozen/0.0, which 2/embeddings builds on, found none"
    )


def without(key: str):
    """Makes the items of bases lack a value."""
    real = orbax_values.OrbaxValues.nbytes

    def nbytes(self, one):
        return None if one[1] == key else real(self, one)

    return mock.patch.object(orbax_values.OrbaxValues, "nbytes", nbytes)


def test_blocks_with_an_unknown_codec_are_reported(root):
    change(root, 3, MANIFEST, of_segment(EF4, "encodings", 0, "codec", to="new"))
    report = verify.verify_root(root, steps=[3])
    assert not any(one.restorable for one in report.steps)
    assert any("dense.float32.ef4" in str(problem) for problem in report.problems)


def test_an_estimate_counts_blocks_and_the_item_that_they_build_on(root):
    beside = sum(path.stat().st_size for path in (root / "3").iterdir() if path.is_file())
    expected = sum(files_below(root / "1/dense").values()) + beside
    for step in (2, 3):
        shard = stored_saves.read_save(root / str(step)).shards()[0]
        for segment in shard.record.dense_blocks.segments:
            expected += sum(shard.arrays.files_of(segment).values())
    found = estimate.restore_plan(root, 3)
    assert found.dense_bytes == expected
    tables = 50 * 8 * 4
    assert found.memory_bytes == tables and found.merged_bytes > tables + 60_000
    run_compaction(root, 3)
    item = sum(files_below(root / "compacted/3/embeddings/dense").values())
    assert estimate.restore_plan(root, 3).dense_bytes == item + beside
    assert "dense leaves:" in command.run("plan", root, 3).stdout


def test_collection_removes_only_what_a_compacted_base_replaces(written):
    root, states = written
    run_compaction(root, 4)
    before = restored(root, 5, states[5])
    done = gc.collect(root, retention=Retention(keep_last=1), offline=True)
    assert {one.name for one in done.removable} >= {"1", "2", "3"}
    assert restored(root, 5, states[5]) == before
    assert not verify.verify_root(root).problems


def test_collection_keeps_all_steps_if_the_item_of_the_kept_chain_is_damaged(root):
    damage(base_data(root), "flipped")
    found = gc.collectable(root, retention=Retention(keep_last=1))
    assert not [one for one in found.removable if one.kind == "step"]


# Exports and copies.


def shown(root: Path, step: int, name: str) -> bytes:
    return np.asarray(inspect.open(root).at(step)[name]).tobytes()


@pytest.mark.parametrize("compacted", [False, True])
def test_stock_orbax_reads_an_export(written, compacted, tmp_path):
    root, states = written
    if compacted:
        run_compaction(root, 4)
    done = interchange.export_orbax(root, 4, tmp_path / "export")
    assert done.step == 4 and not done.changed
    state = by_orbax(tmp_path / "export/4/default")
    for name in ("w", "v", "exact", "half", "bias"):
        assert state["params"][name].tobytes() == shown(root, 4, f"params/{name}")
    assert state["frozen"].tobytes() == np.asarray(states[4]["frozen"]).tobytes()
    assert state["name"] == "a text" and int(state["count"]) == int(states[4]["count"])


def test_tensors_of_dense_leaves_are_exported(root, tmp_path):
    interchange.export_safetensors(root, 3, tmp_path / "out")
    tensors = {}
    for path in (tmp_path / "out").rglob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors["params/w"].tobytes() == shown(root, 3, "params/w")


@pytest.mark.parametrize("compacted", [False, True])
def test_a_copy_of_a_chain_restores_from_its_new_place(written, compacted, tmp_path):
    root, states = written
    before = restored(root, 5, states[5])
    if compacted:
        run_compaction(root, 3)
    assert copying.copy(root, tmp_path / "copy").steps == (5,)
    assert restored(tmp_path / "copy", 5, states[5]) == before
    assert not verify.verify_root(tmp_path / "copy").problems
