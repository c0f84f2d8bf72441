# SPDX-License-Identifier: Apache-2.0
"""Compaction preserves the state bit for bit despite kills, damage, removals and concurrency."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import model
import numpy as np
import pytest
import test_meshes
from damages import HOWS, damage
from flat_options import manager_options
from job import Job
from killed_compaction import killed_anywhere
from shown import table_fields
from test_meshes import P, Topology

import deltackpt
from deltackpt import errors
from deltackpt.format import naming, row_blocks
from deltackpt.maintenance import base_merge, compact
from deltackpt.reading import chains, reader, stored_saves
from deltackpt.storage import digests
from deltackpt.testing import Disk

MEMORY_BYTES = 64 << 20


def manager(root: Path, *, codec="raw", slot_codec="raw", always=(), **options):
    tables = deltackpt.Tables(
        select=model.SELECT, slots=model.SLOTS, always=always, codec=codec, slot_codec=slot_codec
    )
    options = manager_options(durability="process", **options)
    return deltackpt.CheckpointManager(root, handlers={"embeddings": tables}, options=options)


def bases_of_compaction(max_chain: int) -> dict:
    """A trainer that keeps one step and leaves bases to compaction."""
    policy = deltackpt.policies.Consecutive(max_chain=max_chain)
    return {"bases": "compacted", "max_to_keep": 1, "policy": policy}


def write_chain(root: Path, steps: int = 5, *, rows: int = 40, **options) -> dict[int, dict]:
    """Saves a base and deltas, the third without touched rows; returns the state of each step."""
    state, touched = model.start()
    states = {}
    with manager(root, **options) as one:
        for step in range(steps):
            one.save(step, state, touched=touched)
            states[step] = state
            state, touched = model.train(state, touched, step, rows=0 if step == 2 else rows)
    return states


def contents(root: Path, step: int, **kwargs) -> dict[tuple[str, str], bytes]:
    """All bytes of all fields of a step."""
    return bytes_of(chains.read_chain(root / str(step), **kwargs))


def bytes_of(saves: tuple[stored_saves.StoredSave, ...]) -> dict[tuple[str, str], bytes]:
    return {
        (table, field): array.tobytes()
        for table, fields in reader.restore_tables(saves).fields.items()
        for field, array in fields.items()
    }


def remove(root: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(root / str(step))


def assert_compacted(root: Path, step: int, before: dict) -> None:
    """A step is read from its compacted base alone, with the contents that it had before."""
    assert contents(root, step) == before
    assert chain(root, step) == [f"compacted/{step}/embeddings"]


def chain(root: Path, step: int) -> list[str]:
    return [save.name for save in chains.read_chain(root / str(step))]


def run_compaction(root: Path, step: int | None = None, **kwargs) -> compact.Compacted | None:
    return compact.compact(root, step=step, **{"memory_bytes": MEMORY_BYTES, **kwargs})


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root / naming.COMPACTED) if naming.is_compaction(name)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "lossless", "slot_codec": "lossless"},
        {"codec": "adaptive4", "slot_codec": "bf16"},
        {"codec": "int8"},
        {"always": ("accumulator",)},
        {"policy": deltackpt.policies.OneShot()},
    ],
    ids=str,
)
def test_every_step_restores_bit_for_bit_after_compaction(tmp_path, options):
    states = write_chain(tmp_path, **options)
    before = {step: contents(tmp_path, step) for step in states}
    done = run_compaction(tmp_path, 3)
    assert done is not None and (done.step, done.save_id.step) == (3, 3)
    assert done.deltas == len(chains.read_chain(tmp_path / "3", compacted=False)) - 1
    assert chain(tmp_path, 3) == ["compacted/3/embeddings"]
    assert {step: contents(tmp_path, step) for step in states} == before
    assert contents(tmp_path, 3, compacted=False) == before[3]
    assert leftovers(tmp_path) == []
    with manager(tmp_path, access="read") as one:
        found = one.restore(3, states[3])
    assert found.chain == (3,)
    if options.get("slot_codec", "lossless") == "lossless":
        model.assert_same_or_decoded(found.state, states[3], options.get("codec", "raw"))


def test_a_base_without_deltas_needs_no_compaction(tmp_path):
    write_chain(tmp_path)
    assert run_compaction(tmp_path, 0) is None
    assert run_compaction(tmp_path, 4) is not None
    assert run_compaction(tmp_path, 4) is None
    assert run_compaction(tmp_path, 3) is not None, "an older step of the same chain"


def test_a_shard_is_merged_in_many_windows_with_any_memory_budget(tmp_path):
    write_chain(tmp_path, codec="adaptive4", slot_codec="lossless", rows=400)
    before = contents(tmp_path, 4)
    planned = compact.plan(tmp_path, shards=5)
    assert planned.nbytes == 700 * 36 + 300 * 36 + 5 * 20
    planned = pickle.loads(pickle.dumps(planned))
    spans = [span for shard in planned.shards for span in shard]
    assert sum(stop - start for _, (start, stop) in spans) == 1005
    merged: list[int] = []
    with (
        mock.patch.object(base_merge, "_LEAST_BYTES", 1 << 10),
        mock.patch.object(base_merge, "_compressed_bytes", lambda *given: 0),
        mock.patch.object(base_merge, "_COPIES", 1),
        mock.patch.object(row_blocks, "CHUNK_BYTES", 512),
        compact.exclusive(tmp_path),
    ):
        for number, memory_bytes in enumerate((2 << 10, 4 << 10, 16 << 10, 1 << 20, 1 << 26)):
            options = {"memory_bytes": memory_bytes}
            shard = compact.merge_shard(planned, number, **options, on_bytes=merged.append)
            assert shard.bytes_read > 0
            again = compact.merge_shard(planned, number, **options)
            assert again == compact.MergedShard(bytes_read=0, bytes_written=shard.bytes_written)
        assert sum(merged) == planned.nbytes and len(merged) > 50
        assert contents(tmp_path, 4) == before and len(chain(tmp_path, 4)) == 5
        compact.publish(planned)
        compact.publish(planned)
    shutil.rmtree(planned.workspace)
    assert_compacted(tmp_path, 4, before)
    [base] = chains.read_chain(tmp_path / "4")
    assert base.head.process_count == 5 and "shards" in base.head.features
    for record in base.manifests:
        known = digests.read_item_digests(base.item_dir, record)
        assert digests.check_files(base.item_dir, known) == []


@pytest.mark.parametrize("savers", [1, 4])
@pytest.mark.parametrize("spec", [P("x"), P("y", "x")], ids=["rows", "columns too"])
def test_saves_of_several_processes_compact(tmp_path, savers, spec):
    specs = (dict.fromkeys(test_meshes.ROWS, one) for one in (spec, P(spec[0])))
    topology = Topology((4, 2), 0, *specs)
    job, states = Job(savers), [test_meshes.initial()]
    with job.running():
        run = test_meshes.Run(job, topology, tmp_path)
        run.save(0, states[0])
        for step in (1, 2, 3):
            state, ids = test_meshes.trained(states[-1], step)
            run.mark(ids)
            states.append(state)
            found = run.save(step, state)
            assert not [one for one in found if isinstance(one, Exception)]
    assert run_compaction(tmp_path, 2, workers=3).deltas == 2
    assert len(chains.read_chain(tmp_path / "3")) == 2
    for step, state in enumerate(states):
        test_meshes.assert_restores(tmp_path, step, Job(2), topology, state)


def test_tables_of_other_dtypes_compact(tmp_path):
    half = jnp.arange(48, dtype=jnp.bfloat16).reshape(12, 4)
    ints = jnp.arange(30, dtype=jnp.int32).reshape(10, 3)
    state = {"tables": {"half": half, "ints": ints}}
    touched = deltackpt.touched.init({"tables/half": half, "tables/ints": ints})
    tables = deltackpt.Tables(select="tables/*")
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as one:
        one.save(0, state, touched=touched)
        state["tables"]["half"] = half.at[3].set(-0.0)
        touched = deltackpt.touched.mark(touched, {"tables/half": jnp.array([3])})
        model.commit(one, 1, state, touched=touched)
        before = contents(tmp_path, 1)
        assert run_compaction(tmp_path, 1) is not None
        assert contents(tmp_path, 1) == before
        assert one.restore(1, state).chain == (1,)


# One at a time, nothing half-published.


def test_a_second_compactor_is_refused_and_a_reader_is_not(tmp_path):
    states = write_chain(tmp_path)
    with compact.exclusive(tmp_path):
        with pytest.raises(errors.AlreadyCompacting, match="held by another process"):
            run_compaction(tmp_path)
        assert len(chain(tmp_path, 4)) == len(states)
    assert run_compaction(tmp_path) is not None


def test_failed_compactions_raise_typed_errors(tmp_path):
    empty, other, root = tmp_path / "empty", tmp_path / "other", tmp_path / "root"
    empty.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("not ours")
    write_chain(root)
    for error, match, where, options in (
        (errors.StepNotFound, None, tmp_path / "nowhere", {}),
        (errors.StepNotFound, "committed steps", empty, {}),
        (errors.ForeignDirectory, None, other, {}),
        (errors.StepNotFound, None, root, {"step": 99}),
        (errors.OptionError, "at least", root, {"memory_bytes": 1 << 20}),
        (errors.OptionError, "workers", root, {"workers": 0}),
    ):
        with pytest.raises(error, match=match):
            run_compaction(where, **options)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    remove(root, 1)
    with pytest.raises(errors.BrokenChain, match="parent 1"):
        run_compaction(root, 4)


def test_a_full_disk_changes_nothing(tmp_path):
    write_chain(tmp_path)
    before = contents(tmp_path, 4)
    with Disk(tmp_path) as disk, pytest.raises(errors.OutOfSpace):
        disk.fail("write", f"^{naming.COMPACTED}/.*/c[.]", errno=errno.ENOSPC, after=1)
        run_compaction(tmp_path, 4)
    assert os.listdir(tmp_path / naming.COMPACTED) == [naming.COMPACTION_LOCK]
    with (
        mock.patch.object(compact.posix, "free_bytes", lambda path: 10),
        pytest.raises(errors.OutOfSpace, match="expected room for"),
    ):
        run_compaction(tmp_path, 4)
    assert contents(tmp_path, 4) == before
    assert run_compaction(tmp_path, 4) is not None


def test_a_base_with_a_missing_shard_is_not_published(tmp_path):
    write_chain(tmp_path)
    planned = compact.plan(tmp_path, shards=3)
    for number in (0, 2):
        compact.merge_shard(planned, number, memory_bytes=MEMORY_BYTES)
    with pytest.raises(errors.Damaged, match="shard 1 of 3"):
        compact.publish(planned)
    assert len(chain(tmp_path, 4)) == 5


# Killed anywhere.


@pytest.mark.timeout(900)
def test_killed_at_any_call_everything_restores_and_the_next_compaction_succeeds(tmp_path):
    write_chain(tmp_path / "root", codec="adaptive4")
    kills, published = killed_anywhere(tmp_path / "root", table_fields)
    assert kills > 40 and published >= 1
    assert chain(tmp_path / "root", 3) == ["compacted/3/embeddings"]


# Damage.


def _damaged(root: Path, how: str):
    """Each file of a compacted base damaged in turn."""
    base = root / "compacted" / "3" / "embeddings"
    for path in sorted(path for path in base.rglob("*") if path.is_file()):
        data = path.read_bytes()
        damage(path, how)
        yield path
        path.write_bytes(data)


@pytest.mark.parametrize("how", HOWS)
@mock.patch.object(stored_saves, "_GONE_INTERVAL_SECS", 0.0)
def test_a_damaged_compacted_base_is_skipped_or_an_error(tmp_path, how):
    write_chain(tmp_path)
    before = {step: contents(tmp_path, step) for step in (3, 4)}
    run_compaction(tmp_path, 3, workers=2)
    bare = tmp_path.with_name(tmp_path.name + "-bare")
    shutil.copytree(tmp_path, bare)
    remove(bare, 0, 1, 2)
    for path, other in zip(_damaged(tmp_path, how), _damaged(bare, how), strict=True):
        # Metadata for other readers has no checksum and is not read.
        # Both steps contain all their dense leaves.
        matters = path.name != "zarr.json" and naming.DENSE_ITEM not in path.parts
        for step in (3, 4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert contents(tmp_path, step) == before[step], path
            assert bool(caught) == matters, path
            assert all("compacted/3/embeddings" in str(one.message) for one in caught)
            if not matters:
                assert contents(bare, step) == before[step]
                continue
            with pytest.raises(
                errors.RestoreError, match=r"compacted/3/embed|embeddings/shard|parent 2"
            ):
                contents(bare, step)
        assert other.name == path.name


def test_a_base_whose_manifest_is_damaged_is_replaced(tmp_path):
    write_chain(tmp_path)
    before = contents(tmp_path, 3)
    run_compaction(tmp_path, 3)
    (tmp_path / "compacted/3/embeddings/manifest.0.msgpack").write_bytes(b"")
    with pytest.warns(UserWarning, match="is skipped"):
        assert run_compaction(tmp_path, 3) is not None
    assert_compacted(tmp_path, 3, before)


def test_a_base_of_another_save_of_the_same_step_is_ignored_and_replaced(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write_chain(one)
    write_chain(other, rows=11)
    run_compaction(one, 3)
    shutil.copytree(one / "compacted", other / "compacted")
    before = contents(other, 3)
    assert len(chain(other, 3)) == 4
    assert run_compaction(other, 3) is not None
    assert_compacted(other, 3, before)


# With a concurrent trainer.


def test_retention_drops_what_a_base_replaces_and_deltas_build_on_it(tmp_path):
    state, touched = model.start()
    with manager(tmp_path, **bases_of_compaction(max_chain=3)) as one:
        for step in range(12):
            saved = one.save(step, state, touched=touched)
            assert saved.kind == ("base" if step == 0 else "delta"), saved
            one.wait_until_finished()
            if step in (4, 8):
                before = contents(tmp_path, step)
                assert run_compaction(tmp_path, step) is not None
                assert contents(tmp_path, step) == before
            expected, (state, touched) = state, model.train(state, touched, step)
        one._run.root._collected.result()
        # Step 8 may be gone; the step before the newest was kept when the newest save began.
        assert set(one.all_steps()) <= {8, 9, 10, 11} and 11 in one.all_steps()
        assert os.listdir(tmp_path / "compacted") and not (tmp_path / "compacted/4").exists()
        found = one.restore(11, expected)
        assert found.chain == (8, 9, 10, 11)
        model.assert_same(found.state, expected)


def test_without_compaction_the_trainer_eventually_saves_a_base(tmp_path):
    state, touched = model.start()
    policy = deltackpt.policies.Consecutive(max_chain=2, max_restore_ratio=100.0)
    with manager(tmp_path, bases="compacted", policy=policy) as one:
        saved = []
        for step in range(10):
            saved.append(one.save(step, state, touched=touched))
            state, touched = model.train(state, touched, step)
    assert [one.kind for one in saved] == ["base", *["delta"] * 8, "base"]
    assert "left to compaction" in saved[5].reason
    assert "nothing has been compacted for 8 saves" in saved[9].reason


def test_one_shot_deltas_build_on_the_compacted_base(tmp_path):
    state, touched = model.start()
    with manager(tmp_path, bases="compacted", policy=deltackpt.policies.OneShot()) as one:
        for step in range(7):
            model.commit(one, step, state, touched=touched)
            if step == 3:
                assert run_compaction(tmp_path, 3) is not None
            expected, (state, touched) = state, model.train(state, touched, step)
        # Step 4 noted the base, so step 5 is the first delta on it.
        assert one.restore(4).chain == (0, 4)
        assert one.restore(6, expected).chain == (3, 6)


def test_a_rollback_moves_the_bases_of_later_steps_aside(tmp_path):
    states = write_chain(tmp_path, 6)
    run_compaction(tmp_path, 2)
    run_compaction(tmp_path, 5)
    with manager(tmp_path) as one:
        found = one.restore(3, states[3])
        with pytest.warns(UserWarning, match="were moved"):
            model.commit(one, 5, found.state, touched=found.touched)
        assert chain(tmp_path, 5) == ["compacted/2/embeddings", "3/embeddings", "5/embeddings"]
        model.assert_same(one.restore(5, states[3]).state, states[3])
    [aside] = (tmp_path / "rolled-back").iterdir()
    assert sorted(os.listdir(aside)) == ["4", "5", "compacted"]


# Memory.

_BOUNDED = """
import re, resource, sys, threading
from pathlib import Path
from deltackpt.maintenance import compact

threading.stack_size(1 << 20)
small, large, memory_bytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
# What libraries need once, whatever there is to compact.
assert compact.compact(small, workers=2, memory_bytes=memory_bytes) is not None
data = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (data + memory_bytes, data + memory_bytes))
done = compact.compact(large, workers=2, memory_bytes=memory_bytes)
print(done.bytes_written)
"""


@pytest.mark.processes
def test_compaction_merges_four_times_its_memory_budget_under_a_hard_limit(tmp_path):
    memory_bytes = 128 << 20
    rows = 4 * memory_bytes // 260 + 1000

    def write(root: Path, rows: int) -> None:
        rng = np.random.default_rng(0)
        table = rng.standard_normal((rows, 64), np.float32)
        state = {"t": table, "s": rng.random(rows, np.float32)}
        touched = deltackpt.touched.init({"t": state["t"]})
        tables = deltackpt.Tables(select="t", slots={"t": {"s": "s"}}, codec="adaptive4")
        options = {"options": manager_options(durability="process")}
        with deltackpt.CheckpointManager(root, handlers={"embeddings": tables}, **options) as one:
            for step in range(3):
                model.commit(one, step, state, touched=touched)
                ids = rng.choice(rows, rows // 10, replace=False)
                table[ids] += 1
                touched = deltackpt.touched.mark(touched, {"t": jnp.asarray(ids)})

    write(tmp_path / "small", 1000)
    write(tmp_path / "large", rows)
    before = contents(tmp_path / "large", 2)
    # Returns freed memory to the system at once; by default the C library keeps it.
    settings = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_ARENA_MAX": "1"}
    # Thread stacks count even if unused.
    command = ["sh", "-c", 'ulimit -s 1024; exec "$@"', "sh", sys.executable, "-c", _BOUNDED]
    run = subprocess.run(
        [*command, tmp_path / "small", tmp_path / "large", str(memory_bytes)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    assert run.returncode == 0, run.stderr
    assert int(re.findall(r"\d+", run.stdout)[-1]) >= 4 * memory_bytes
    assert contents(tmp_path / "large", 2) == before
    assert len(chain(tmp_path / "large", 2)) == 1
