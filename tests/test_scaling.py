# SPDX-License-Identifier: Apache-2.0
"""Cost of a save per process: the counts of docs/project/design.md."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from job import Job
from test_meshes import RUNTIME, P

import deltackpt
from deltackpt.coordination import Coordinator
from deltackpt.layers.targets import Targets, empty_buffers
from deltackpt.reading import stored_saves
from deltackpt.restore import placing
from deltackpt.save import lineage, pending_save
from deltackpt.save.pending_save import Embeddings
from deltackpt.state import tables

ROWS, WIDTH = 64, 4
FEW, MANY = 6, 60
#: Metadata bytes per table that a process writes rows of: its ranges and figures.
PART_BYTES_PER_TABLE = 60
#: Bytes of process 0's manifest per table, independent of the number of processes.
HEAD_BYTES_PER_TABLE = 330
#: Bytes of process 0's manifest per process, independent of the number of tables.
HEAD_BYTES_PER_PROCESS = 80


def sharded(count: int, ids: np.ndarray) -> tuple[dict, deltackpt.TouchState]:
    """``count`` row-sharded tables with row-wise slots; the ids are touched in each."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    by_rows = jax.sharding.NamedSharding(mesh, P("x"))
    names = [f"t{number:04d}" for number in range(count)]
    state = {
        "tables": {name: np.ones((ROWS, WIDTH), np.float32) for name in names},
        "slots": {name: np.ones(ROWS, np.float32) for name in names},
    }
    stamps = np.zeros(ROWS, np.int32)
    stamps[ids] = 1
    touched = deltackpt.TouchState(
        np.int32(1),
        {f"tables/{name}": jax.device_put(stamps, by_rows) for name in names},
        np.int32(7),
    )
    return jax.device_put(state, by_rows), touched


TABLES = deltackpt.Tables(
    select="tables/*", slots={"tables/*": {"accumulator": "slots/{name}"}}, slot_codec="raw"
)


def save(root: Path, processes: int, count: int) -> None:
    """Saves a base and a delta."""
    job = Job(processes)
    with job.running():
        lineages = [lineage.Lineage(run="00" * 16) for _ in range(processes)]
        for step, ids in ((0, np.arange(0)), (1, np.arange(0, ROWS, 2))):
            state, touched = sharded(count, ids)
            clock = touched._replace(clock=np.int32(step))
            split = tables.split(state, TABLES)
            item = root / f"{step}.orbax-checkpoint-tmp" / "embeddings"
            item.mkdir(parents=True)

            def shard(index: int, split=split, touched=clock, step=step, item=item):
                embeddings = Embeddings(
                    split=split,
                    touched=touched,
                    lineage=lineages[index],
                    fsync=False,
                    runtime=RUNTIME,
                )
                with job.lock:
                    pending = pending_save.capture(embeddings, step, root / str(step))
                pending.wait_copied()
                pending.write_alone(item, Coordinator(str(root), 60.0))
                return pending.event

            for result in job.on_each(shard):
                assert not isinstance(result, Exception), result
            item.parent.rename(root / str(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Item directories of a base and a delta by (step, processes, tables)."""
    found = {}
    for processes in (1, 2, 4):
        for count in (FEW, MANY):
            root = tmp_path_factory.mktemp("root")
            save(root, processes, count)
            for step in (0, 1):
                found[step, processes, count] = root / str(step) / "embeddings"
    yield found
    for item in found.values():
        shutil.rmtree(item.parent, ignore_errors=True)


def objects(item: Path, process: int) -> list[str]:
    """Files that a process wrote."""
    names = (f"shard.{process}/**/*", f"layer.{process}", f"*.{process}.msgpack")
    found = [path for name in names for path in item.glob(name) if path.is_file()]
    return sorted(str(path.relative_to(item)) for path in found)


def size(item: Path, process: int, kind: str = "manifest") -> int:
    return (item / f"{kind}.{process}.msgpack").stat().st_size


@pytest.mark.parametrize("step", [0, 1])
def test_objects_per_process_do_not_depend_on_processes_or_tables(saved, step):
    for processes in (1, 2, 4):
        for count in (FEW, MANY):
            item = saved[step, processes, count]
            for process in range(processes):
                # In a base: zarr.json and one chunk of values and slot, digests, manifest.
                assert len(objects(item, process)) == (2 if step else 6)
            assert len(list(item.iterdir())) == (2 if step else 3) * processes


@pytest.mark.parametrize("step", [0, 1])
def test_payload_is_divided_among_the_processes(saved, step):
    for count in (FEW, MANY):
        for processes in (1, 2, 4):
            item = saved[step, processes, count]
            for process in range(processes):
                held = sum(
                    entry.nbytes
                    for segment in stored_saves.read_save(item.parent)
                    .shards()[process]
                    .record.segments
                    for entry in segment.arrays
                    if entry.name != "rows.gaps"
                )
                rows = count * ROWS // (2 if step else 1) // processes
                assert held == rows * (WIDTH + 1) * 4


@pytest.mark.parametrize("step", [0, 1])
def test_metadata_of_a_shard_grows_with_its_tables_only(saved, step):
    for processes in (2, 4):
        for process in range(1, processes):
            few, many = (size(saved[step, processes, count], process) for count in (FEW, MANY))
            assert many - few <= PART_BYTES_PER_TABLE * (MANY - FEW)
    if not step:
        digests = [size(saved[step, p, c], 0, "digests") for p in (1, 4) for c in (FEW, MANY)]
        assert max(digests) - min(digests) <= 16
    for count in (FEW, MANY):
        assert abs(size(saved[step, 2, count], 1) - size(saved[step, 4, count], 1)) <= 2 * count


@pytest.mark.parametrize("step", [0, 1])
def test_the_index_grows_with_processes_and_tables_but_not_their_product(saved, step):
    grown = {
        count: size(saved[step, 4, count], 0) - size(saved[step, 2, count], 0)
        for count in (FEW, MANY)
    }
    # Two more processes cost the same with few tables and with ten times as many; only the
    # digits of process 0's own ranges vary.
    assert all(abs(cost) <= 2 * HEAD_BYTES_PER_PROCESS + 2 * MANY for cost in grown.values()), grown
    assert abs(grown[MANY] - grown[FEW]) <= 2 * (MANY - FEW), grown
    for processes in (1, 2, 4):
        few, many = (size(saved[step, processes, count], 0) for count in (FEW, MANY))
        assert many - few <= HEAD_BYTES_PER_TABLE * (MANY - FEW)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_restore_on_the_same_mesh_reads_its_own_shard_only(saved, step, count):
    job = Job(4)
    save_ = stored_saves.read_save(saved[step, 4, count].parent)
    with job.running():
        state, _ = sharded(count, np.arange(0))
        fields = tables.split(state, TABLES).fields

        def shards(index: int) -> list[int]:
            _, targets = empty_buffers(save_.layout, placing.wanted_of(fields))
            assert isinstance(targets, Targets)
            wanted = functools.partial(targets.touch, save_.head)
            return [shard.record.process for shard in save_.shards(wanted)]

        assert job.on_each(shards) == [[0], [1], [2], [3]]
