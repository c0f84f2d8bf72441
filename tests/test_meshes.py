# SPDX-License-Identifier: Apache-2.0
"""Saves on one mesh, restores on another: eight devices, divided among one to eight processes.

The processes are threads of a ``Job``; each reads and writes only shards on its own devices.
``test_processes.py`` runs real ones.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from job import DEVICES, Job, step_writers

import deltackpt
from deltackpt import coordination
from deltackpt.coordination import Coordinator
from deltackpt.errors import Disagreement, ProcessFailed, TrackingError
from deltackpt.reading import chains, reader, stored_saves
from deltackpt.resources.runtime import Runtime
from deltackpt.restore import placing
from deltackpt.save import lineage, pending_save
from deltackpt.save.pending_save import Embeddings
from deltackpt.state import placement, tables

P = jax.sharding.PartitionSpec
#: Mesh shapes with axes x and y; smaller meshes use a subset of the devices.
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8), (2, 2), (1, 2), (1, 1)]
SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(None, "y"), P(None, "x"), P("x", "y"), P("y", "x")]
#: Rows by table: multiples of eight, which jax requires, but not of every number of replicas.
ROWS = {"a": 8, "b": 88, "c": 400, "d": 1000}
WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """The layout of a state: a mesh, and a spec for each table and for its slots."""

    mesh: tuple[int, int]
    first: int
    specs: dict[str, jax.sharding.PartitionSpec]
    narrow: dict[str, jax.sharding.PartitionSpec]
    memory: str | None = None

    def sharding(self, spec) -> jax.sharding.NamedSharding:
        size = self.mesh[0] * self.mesh[1]
        devices = np.array(jax.devices()[self.first : self.first + size]).reshape(self.mesh)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        return jax.sharding.NamedSharding(mesh, spec, memory_kind=self.memory)

    def shardings(self) -> dict:
        specs = {"tables": self.specs, "wide": self.specs, "narrow": self.narrow}
        return jax.tree.map(self.sharding, specs, is_leaf=lambda x: isinstance(x, P))


@st.composite
def topologies(draw):
    mesh = draw(st.sampled_from(MESHES))
    first = draw(st.integers(0, DEVICES - mesh[0] * mesh[1]))
    specs = {name: draw(st.sampled_from(SPECS)) for name in ROWS}
    rows = [P(), P("x"), P("y"), P(("x", "y"))]
    narrow = {name: draw(st.sampled_from([P(*specs[name][:1]), *rows])) for name in ROWS}
    memory = draw(st.sampled_from([None, None, "pinned_host", "unpinned_host"]))
    return Topology(mesh, first, specs, narrow, memory)


def initial() -> dict:
    rng = np.random.default_rng(0)
    return {
        "tables": {name: rng.normal(size=(n, WIDTH)).astype("f4") for name, n in ROWS.items()},
        "wide": {name: rng.normal(size=(n, WIDTH)).astype("f4") for name, n in ROWS.items()},
        "narrow": {name: rng.random(n).astype("f4") for name, n in ROWS.items()},
    }


RUNTIME = Runtime(memory_bytes=1 << 28)
TABLES = deltackpt.Tables(
    select="tables/*", slots={"tables/*": {"moment": "wide/{name}", "accumulator": "narrow/{name}"}}
)


def trained(state: dict, seed: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Changes some rows of some tables, and their slots."""
    rng = np.random.default_rng(seed)
    new = jax.tree.map(np.copy, state)
    touched = {}
    for name, rows in ROWS.items():
        ids = rng.choice(rows, int(rng.integers(0, rows // 4 + 1)), replace=False)
        touched[f"tables/{name}"] = ids
        for held in new.values():
            held[name][ids] = rng.random(held[name][ids].shape)
    return new, touched


class Run:
    """A training run that saves on a topology."""

    def __init__(self, job: Job, topology: Topology, root: Path):
        self.job, self.topology, self.root = job, topology, root
        run = lineage.new_run()
        self.lineages = [lineage.Lineage(run=run) for _ in range(job.count)]
        self.touched = deltackpt.touched.init(
            {
                f"tables/{name}": jax.ShapeDtypeStruct(
                    (rows, WIDTH), np.float32, sharding=topology.sharding(topology.specs[name])
                )
                for name, rows in ROWS.items()
            }
        )

    def mark(self, ids: dict[str, np.ndarray]) -> None:
        stamps = dict(self.touched.stamps)
        clock = self.touched.clock + 1
        for name, rows in ids.items():
            changed = np.array(stamps[name])
            changed[rows] = int(clock)
            stamps[name] = jax.device_put(changed, stamps[name].sharding)
        self.touched = self.touched._replace(clock=clock, stamps=stamps)

    def save(self, step: int, state: dict, *, secs: float = 30.0, **changes) -> list:
        """Reports or errors by process; commits if there are only reports."""
        placed = jax.device_put(state, self.topology.shardings())
        split = tables.split(placed, TABLES)
        item = self.root / f"{step}.orbax-checkpoint-tmp" / "embeddings"
        item.mkdir(parents=True)

        def piece(index: int):
            embeddings = Embeddings(
                split=split,
                touched=self.touched,
                lineage=self.lineages[index],
                fsync=False,
                runtime=RUNTIME,
            )
            changed = changes.get("change", lambda index, given: given)(index, embeddings)
            coordinator, own = Coordinator(str(self.root), secs), self.lineages[index]
            attempt = own.attempts + 1
            with self.job.lock:  # Real processes do not share jax objects.
                try:
                    pending = pending_save.capture(changed, step, self.root / str(step))
                except Exception as error:
                    # As the manager does; otherwise the others would wait for this process.
                    step_writers(coordinator, item.parent, f"{own.run}-{attempt}").fail(error)
                    raise
            pending.wait_copied()
            pending.write_alone(item, coordinator)
            return pending.event

        found = self.job.on_each(piece)
        if not any(isinstance(result, Exception) for result in found):
            item.parent.rename(self.root / str(step))
        else:
            shutil.rmtree(item.parent)
        return found


def assert_restores(root: Path, step: int, job: Job, topology: Topology, state: dict) -> None:
    """Checks that each process reads its own boxes, bit for bit."""
    template = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        topology.shardings(),
    )
    expected = tables.split(state, TABLES).fields

    def own(index: int):
        saves = chains.read_chain(root / str(step))
        wanted = placing.wanted_of(tables.split(template, TABLES).fields)
        for name, fields in reader.restore_tables(saves, wanted=wanted).buffers.items():
            for field, held in fields.items():
                whole = expected[name][field]
                for ((start, stop), (first, last), _), buffer in held.items():
                    piece = whole[start:stop, first:last] if whole.ndim > 1 else whole[start:stop]
                    assert piece.tobytes() == buffer.tobytes(), (index, name, field)
        return wanted

    with job.running():
        for found in job.on_each(own):
            if isinstance(found, Exception):
                raise found


def slow_examples(count: int) -> settings:
    """Settings of a property whose examples take seconds: shrinking one would take minutes."""
    return settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@slow_examples(25)
@given(
    save=topologies(),
    savers=st.sampled_from([1, 2, 4, 8]),
    restores=st.lists(
        st.tuples(topologies(), st.sampled_from([1, 2, 4, 8])), min_size=2, max_size=2
    ),
)
def test_any_mesh_restores_on_any_other(tmp_path_factory, save, savers, restores):
    root = tmp_path_factory.mktemp("root")
    job, states = Job(savers), [initial()]
    with job.running():
        run = Run(job, save, root)
        found = run.save(0, states[0])
        for step in (1, 2):
            if any(isinstance(result, TrackingError) for result in found):
                # The rows of some slots are not on the processes that have their stamps.
                assert any(isinstance(result, (TrackingError, ProcessFailed)) for result in found)
                return
            assert not [result for result in found if isinstance(result, Exception)], found
            state, ids = trained(states[-1], step)
            run.mark(ids)
            states.append(state)
            found = run.save(step, state)
            assert {report.kind for report in found} == {"delta"}
            rows = sum(len(rows) for rows in ids.values())
            assert sum(report.rows for report in found) >= rows
        head = stored_saves.read_save(root / "0")
        assert sum(sum(r.owned_cells.values()) for r in head.manifests) in (
            0,
            sum(ROWS.values()) * (2 * WIDTH + 1),
        )
    for topology, count in restores:
        for step, state in enumerate(states):
            assert_restores(root, step, Job(count), topology, state)
    # A single device, as in a notebook, and no template.
    whole = reader.restore_tables(chains.read_chain(root / "2")).fields
    for name, fields in tables.split(states[2], TABLES).fields.items():
        for field, leaf in fields.items():
            assert whole[name][field].tobytes() == leaf.tobytes()


SHARDED = Topology((8, 1), 0, dict.fromkeys(ROWS, P("x")), dict.fromkeys(ROWS, P("x")))
REPLICATED = Topology((2, 4), 0, dict.fromkeys(ROWS, P()), dict.fromkeys(ROWS, P()))


def test_replicas_share_the_rows_and_each_is_written_once(tmp_path):
    job = Job(4)
    with job.running():
        reports = Run(job, REPLICATED, tmp_path).save(0, initial())
        rows = [report.rows for report in reports]
    assert sum(rows) == sum(ROWS.values())
    # The largest table is divided; small ones are assigned to different processes.
    assert min(rows) > 0.15 * sum(rows), rows


@slow_examples(10)
@given(topology=topologies(), count=st.sampled_from([1, 2, 4, 8]))
def test_each_row_of_a_slot_on_the_host_is_written_once_where_its_stamp_is(topology, count):
    rows, slot = ROWS["d"], np.zeros(ROWS["d"], np.float32)
    sharding = topology.sharding(topology.narrow["d"])
    stamps = jax.device_put(np.zeros(rows, np.int32), sharding)
    job = Job(count)

    def own(index: int) -> tuple[np.ndarray, np.ndarray]:
        written, known = np.zeros(rows, int), np.zeros(rows, bool)
        for owned in placement.owned_boxes(slot, stamps):
            written[slice(*owned.box.rows)] += 1
        for box in placement.boxes(sharding, stamps.shape).values():
            known[slice(*box.rows)] = True
        return written, known

    with job.running():
        found = job.on_each(own)
        one_process = len({coordination.process_of(one) for one in sharding.device_set}) == 1
    assert (sum(written for written, _ in found) == 1).all()
    # Stamps of one process may be its own.
    assert one_process or all(known[written > 0].all() for written, known in found)


@pytest.mark.parametrize("what", ["kind", "codec", "tables"])
def test_every_process_detects_a_disagreement_at_the_commit(tmp_path, what):
    job = Job(4)

    def change(index: int, embeddings: Embeddings) -> Embeddings:
        if index != 2:
            return embeddings
        if what == "kind":
            return dataclasses.replace(embeddings, force_base=True)
        chosen = {"codec": "int8"} if what == "codec" else {"select": ["tables/a", "tables/b"]}
        slots = {"slots": TABLES.slots} if what == "codec" else {"slots": {}}
        given = {"select": "tables/*", **slots, **chosen}
        return dataclasses.replace(
            embeddings,
            split=tables.split(
                jax.device_put(initial(), SHARDED.shardings()), deltackpt.Tables(**given)
            ),
            touched=embeddings.touched if what == "codec" else None,
        )

    with job.running():
        run = Run(job, SHARDED, tmp_path)
        assert not [r for r in run.save(0, initial()) if isinstance(r, Exception)]
        state, ids = trained(initial(), 1)
        run.mark(ids)
        found = run.save(1, state, change=change)
        assert isinstance(found[0], Disagreement), found
        assert "process 2" in str(found[0])
        for error in (found[1], found[2], found[3]):
            assert isinstance(error, ProcessFailed) and "process 2" in str(error)
        assert not (tmp_path / "1").exists()
        # Nothing is lost: the next save covers the rows.
        run.save(2, state)
        parent = stored_saves.read_save(tmp_path / "2").info.parent
        assert parent is not None and parent.step_dir == "0"
    assert_restores(tmp_path, 2, Job(2), REPLICATED, state)


@pytest.mark.parametrize("what", ["stamps", "rows changed"])
def test_replicas_with_different_marks_commit_nothing_wrong(tmp_path, what):
    """Each would write its half of the rows based on its own marks."""
    job = Job(4)
    with job.running():
        run = Run(job, REPLICATED, tmp_path)
        assert not [r for r in run.save(0, initial()) if isinstance(r, Exception)]
        state, ids = trained(initial(), 1)
        before = run.touched
        run.mark(ids)

        def change(index: int, embeddings: Embeddings) -> Embeddings:
            # Process 2 got no marks, or its clock advanced but its marks were lost.
            if index != 2:
                return embeddings
            other = before if what == "stamps" else before._replace(clock=run.touched.clock)
            return dataclasses.replace(embeddings, touched=other)

        found = run.save(1, state, change=change)
        assert all(isinstance(error, (TrackingError, ProcessFailed)) for error in found), found
        assert any("tables/" in str(error) for error in found), found
        assert all(error.leaves_doubt for error in found)
        assert not (tmp_path / "1").exists()
        for own in run.lineages:
            own.distrust("the marks of the processes differ")
        [*reports] = run.save(2, state)
        assert {report.kind for report in reports} == {"base"}
    assert_restores(tmp_path, 2, Job(2), SHARDED, state)


def test_processes_audit_a_sample_and_all_are_notified_of_a_fault(tmp_path):
    job = Job(4)
    with job.running():
        run = Run(job, SHARDED, tmp_path)
        assert not [r for r in run.save(0, initial()) if isinstance(r, Exception)]
        state = initial()
        state["tables"]["c"][-1] += 1.0  # This row is not marked.
        run.mark({"tables/b": np.arange(1)})
        found = run.save(1, state)
        assert all(isinstance(error, (TrackingError, ProcessFailed)) for error in found), found
        assert any("table tables/c: rows 399" in str(error) for error in found), found
        assert all(error.leaves_doubt for error in found)
        assert not (tmp_path / "1").exists()


def test_process_local_tables_are_refused(tmp_path):
    job = Job(2)
    rows = {"a": np.ones((8, 4), np.float32)}
    with job.running():
        lineages = [lineage.Lineage(run="00") for _ in range(2)]
        item = tmp_path / "0.orbax-checkpoint-tmp" / "embeddings"
        item.mkdir(parents=True)

        def piece(index: int):
            local = jax.device_put(rows, jax.devices()[4 * index])
            split = tables.split({"t": local}, deltackpt.Tables(select="t/*"))
            embeddings = Embeddings(split=split, lineage=lineages[index], fsync=False)
            pending = pending_save.capture(embeddings, 0, tmp_path / "0")
            pending.wait_copied()
            pending.write_alone(item, Coordinator(str(tmp_path), 20.0))
            return pending.event

        found = job.on_each(piece)
    assert isinstance(found[0], Disagreement) and "one global array" in str(found[0])
    assert isinstance(found[1], ProcessFailed)
