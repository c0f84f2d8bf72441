# SPDX-License-Identifier: Apache-2.0
"""Stacked tables of jax-tpu-embedding: saved as logical rows, restored on any number of cores."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import test_meshes
from hypothesis import given
from job import Job
from model import commit

import deltackpt
from deltackpt import coordination, inspect, interchange
from deltackpt.errors import (
    Damaged,
    OptionError,
    TableSelectionError,
    TemplateMismatch,
    TrackingError,
)
from deltackpt.format import naming
from deltackpt.integrations import sparsecore
from deltackpt.integrations.sparsecore import StackedTable, StackMember
from deltackpt.layers.targets import wanted_rows
from deltackpt.maintenance import compact
from deltackpt.reading import chains, inventory, reader, shard_arrays, stored_saves
from deltackpt.resources.runtime import Runtime
from deltackpt.restore import placing
from deltackpt.save import capture, lineage, pending_save
from deltackpt.state import placement
from deltackpt.state.stacks import MemberRows
from deltackpt.state.tables import join
from deltackpt.storage import zarr_writer

#: Two stacks: widths 12 and 10 share 16 columns; the other table is alone, with 8 of 8.
STACKS = {
    "wide": (
        StackMember(name="users", rows=700, width=12),
        StackMember(name="items", rows=301, width=10),
        StackMember(name="tiny", rows=5, width=16),
    ),
    "narrow": (StackMember(name="ads", rows=97, width=8),),
}
MEMBERS = {member.name: member for members in STACKS.values() for member in members}
OPTIONS = deltackpt.ManagerOptions(
    wal=deltackpt.WalOptions(max_wal_ratio=1e9),
    deltas=deltackpt.DeltaOptions(policy=deltackpt.policies.Consecutive(max_chain=100)),
)


def opened(root, tables: deltackpt.Tables, **options) -> deltackpt.CheckpointManager:
    chosen = dataclasses.replace(OPTIONS, **options)
    return deltackpt.CheckpointManager(root, handlers={"embeddings": tables}, options=chosen)


def tree(leaf: Callable[[str, str], Any]) -> dict:
    """Builds the tables and slots of each stack; ``leaf`` takes a field of a model and a stack."""
    return {
        stack: {
            "table": leaf("tables", stack),
            "slot": {"accumulator": leaf("accumulators", stack), "counts": leaf("counts", stack)},
        }
        for stack in STACKS
    }


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices with some SparseCores each."""

    devices: int
    cores: int = 1
    replicas: int = 1

    @property
    def stacks(self) -> dict[str, StackedTable]:
        return {
            stack: StackedTable(
                members=members, shards=self.devices * self.cores, rotation=self.cores
            )
            for stack, members in STACKS.items()
        }

    @property
    def tables(self) -> deltackpt.Tables:
        return deltackpt.Tables(
            select="embeddings/*/table",
            slots={
                f"embeddings/{stack}/table": {
                    "accumulator": f"embeddings/{stack}/slot/accumulator",
                    "counts": f"embeddings/{stack}/slot/counts",
                }
                for stack in STACKS
            },
            stacks={f"embeddings/{stack}/table": one for stack, one in self.stacks.items()},
        )

    def placed(self, array: np.ndarray) -> jax.Array:
        devices = np.array(jax.devices()[: self.replicas * self.devices])
        mesh = jax.sharding.Mesh(devices.reshape(self.replicas, self.devices), ("y", "x"))
        spec = jax.sharding.PartitionSpec("x", *[None] * (array.ndim - 1))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        # Each process makes its own shards.
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def manager(self, root, **options) -> deltackpt.CheckpointManager:
        return opened(root, self.tables, **options)

    def state(self, model: Model, padding: float = 0.0) -> dict:
        """Places a model's tables in stacked arrays of this topology."""
        placed = jax.tree.map(self.placed, self.arrays(model, padding))
        return {**placed, "bias": jnp.asarray(model.bias)}

    def arrays(self, model: Model, padding: float = 0.0) -> dict:
        """Stacks a model's tables for this topology, in host memory."""

        def stack_of(field: str, stack: str) -> np.ndarray:
            chunks = [getattr(model, field)[member.name] for member in STACKS[stack]]
            return stacked(chunks, self, padding)

        return {"embeddings": tree(stack_of)}


def stacked(chunks: list[np.ndarray], topology: Topology, padding: float) -> np.ndarray:
    """Stacks tables by whole-array operations, without row indices."""
    shards, found = topology.devices * topology.cores, []
    width = max(-(-chunk.shape[1] // 8) * 8 for chunk in chunks) if chunks[0].ndim > 1 else None
    for number, chunk in enumerate(chunks):
        columns = [] if width is None else [(0, width - chunk.shape[1])]
        padded = np.pad(chunk, [(0, -len(chunk) % (8 * shards)), *columns], constant_values=padding)
        by_shard = padded.reshape(-1, shards, *padded.shape[1:]).swapaxes(0, 1)
        found.append(np.roll(by_shard, number * topology.cores, axis=0))
    together = np.concatenate(found, axis=1)
    return together.reshape(-1, *together.shape[2:])


@dataclasses.dataclass
class Model:
    """Logical tables with slots, trained on the host."""

    tables: dict[str, np.ndarray]
    accumulators: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    bias: np.ndarray
    touched: deltackpt.touched.TouchState

    @classmethod
    def new(cls, seed: int = 0, sharding: jax.sharding.Sharding | None = None) -> Model:
        rng = np.random.default_rng(seed)
        fields = [
            {
                name: rng.normal(size=(one.rows, one.width)).astype(np.float32)
                for name, one in MEMBERS.items()
            }
            for _ in range(2)
        ]
        counts = {
            name: rng.integers(9, size=one.rows, dtype=np.int32) for name, one in MEMBERS.items()
        }
        templates = sparsecore.templates(Topology(1).stacks.values(), sharding=sharding)
        touched = deltackpt.touched.init(templates)
        return cls(*fields, counts, np.zeros(3, np.float32), touched)

    def plain(self) -> dict:
        """The state of a trainer that does not stack its tables."""

        def put(field: str, stack: str) -> dict:
            return {member.name: getattr(self, field)[member.name] for member in STACKS[stack]}

        return {"embeddings": tree(put), "bias": self.bias}

    def trained(self, seed: int, *, marked: bool = True) -> Model:
        """Changes some rows, by id; the ids reach ``mark`` with duplicates."""
        rng = np.random.default_rng(seed)
        found = Model(
            *(
                {name: rows.copy() for name, rows in field.items()}
                for field in (self.tables, self.accumulators, self.counts)
            ),
            self.bias + 1,
            self.touched,
        )
        ids = {name: rng.integers(one.rows, size=12) for name, one in MEMBERS.items()}
        for name, rows in ids.items():
            found.tables[name][rows] = rng.normal(size=(12, MEMBERS[name].width))
            found.accumulators[name][rows] += 1
            found.counts[name][rows] += 1
        if marked:
            found.touched = deltackpt.touched.mark(self.touched, ids)
        return found


def model_at(step: int) -> Model:
    """The model of a step, without marks: the oracle of other processes."""
    model = Model.new()
    for number in range(step):
        model = model.trained(number)
    return model


def moved_rows(one: Model, other: Model) -> int:
    return sum(int((one.tables[n] != other.tables[n]).any(axis=1).sum()) for n in MEMBERS)


def assert_holds(state: dict, model: Model, topology: Topology) -> None:
    """Asserts that each logical row is, bit for bit, where the topology has it."""
    wanted = topology.state(model)
    np.testing.assert_array_equal(state["bias"], model.bias)

    def check(layout: StackedTable, found: jax.Array, expected: jax.Array) -> None:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.sharding == expected.sharding
        for member in layout.members:
            rows = layout.physical_rows(member.name, np.arange(member.rows))
            columns = (slice(member.width),) if found.ndim > 1 else ()
            one, other = (np.asarray(array)[(rows, *columns)] for array in (found, expected))
            assert one.tobytes() == other.tobytes()

    for stack, layout in topology.stacks.items():
        trees = state["embeddings"][stack], wanted["embeddings"][stack]
        jax.tree.map(functools.partial(check, layout), *trees)


def template(topology: Topology) -> dict:
    """An abstract state of a topology."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        topology.state(Model.new()),
    )


def saved_run(root, topology: Topology) -> list[Model]:
    """Saves a base and two deltas, and appends two WAL records."""
    models = [Model.new()]
    with topology.manager(root) as manager:
        for step in range(5):
            model = models[-1]
            call = manager.save if step < 3 else manager.append
            call(step, topology.state(model), touched=model.touched)
            manager.wait_until_finished()
            models.append(model.trained(step))
        manager.wait_appended()
    return models[:-1]


def assert_steps(root, target: Topology, models: dict[int, Model]) -> None:
    """Asserts that a reader of another topology restores each step."""
    with target.manager(root, access="read") as manager:
        for step, model in models.items():
            assert_holds(manager.restore(step, template(target)).state, model, target)


def assert_newest(root, target: Topology, model: Model) -> None:
    with target.manager(root, access="read") as manager:
        assert_holds(manager.restore_latest(template(target)).state, model, target)


# --- The mapping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [np.array([1, 5, 21, 24]), range(3, 24)], ids=["indices", "range"])
def test_a_gather_reads_members_of_stacks_and_plain_tables(rows):
    member = StackMember(name="users", rows=20, width=4)
    stack = StackedTable(members=(member,), shards=2, rotation=1)
    users, plain = np.random.default_rng(0).standard_normal((2, 20, 4), np.float32)
    array = np.zeros((stack.shape[0], stack.shape[1]), np.float32)
    array[stack.physical_rows("users", np.arange(20)), :4] = users
    source = capture.FieldSource(
        *((0, 4), (4,), array.dtype, True, np.array([[0, 20], [20, 25]]), np.array([0, 15])),
        [MemberRows(array, stack, member), plain],
    )
    out = np.empty((len(rows), 4), np.float32)
    source.gather(rows, out)
    np.testing.assert_array_equal(out, np.concatenate([users, plain[5:10]])[rows])


@given(
    rows=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    shards=st.integers(1, 17),
    rotation=st.integers(0, 20),
)
def test_every_id_has_one_row_and_every_other_row_is_padding(rows, shards, rotation):
    members = tuple(StackMember(name=f"t{i}", rows=count, width=4) for i, count in enumerate(rows))
    stack = StackedTable(members=members, shards=shards, rotation=rotation)
    numbers, ids = stack.ids(np.arange(stack.shape[0]))
    assert (numbers >= 0).sum() == sum(rows)
    for number, member in enumerate(members):
        physical = stack.physical_rows(member.name, np.arange(member.rows))
        assert (numbers[physical] == number).all()
        assert (ids[physical] == np.arange(member.rows)).all()


@given(
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    devices=st.sampled_from([1, 2, 4, 8]),
    cores=st.integers(1, 4),
)
def test_the_row_indices_agree_with_stacking_whole_tables(rows, devices, cores):
    topology = Topology(devices, cores)
    members = tuple(StackMember(name=f"t{i}", rows=count, width=1) for i, count in enumerate(rows))
    stack = StackedTable(members=members, shards=devices * cores, rotation=cores)
    chunks = [np.arange(count) + 1000 * i for i, count in enumerate(rows)]
    whole = stacked(chunks, topology, -1)
    assert len(whole) == stack.shape[0]
    for member, chunk in zip(members, chunks, strict=True):
        assert (whole[stack.physical_rows(member.name, np.arange(member.rows))] == chunk).all()


@pytest.mark.parametrize(("devices", "cores"), [(1, 4), (2, 2), (4, 2), (8, 4)])
def test_the_mapping_agrees_with_that_of_jax_tpu_embedding(devices, cores):
    reason = "jax-tpu-embedding is not installed"
    embedding = pytest.importorskip("jax_tpu_embedding.sparsecore.lib.nn.embedding", reason=reason)
    spec = pytest.importorskip("jax_tpu_embedding.sparsecore.lib.nn.embedding_spec", reason=reason)
    stacking = pytest.importorskip(
        "jax_tpu_embedding.sparsecore.lib.nn.table_stacking", reason=reason
    )
    rng, specs, features, values = np.random.default_rng(0), [], [], {}
    for name, rows, width in [("a", 64, 12), ("b", 120, 10), ("c", 1000, 16), ("d", 33, 32)]:
        one = spec.TableSpec(
            vocabulary_size=rows,
            embedding_dim=width,
            initializer=jnp.zeros,
            optimizer=spec.AdagradOptimizerSpec(),
            combiner="sum",
            name=name,
        )
        specs.append(one)
        shape = (16, width)
        features.append(
            spec.FeatureSpec(table_spec=one, input_shape=(16, 1), output_shape=shape, name=name)
        )
        values[name] = rng.random((rows, width), np.float32)
    counts = {"global_device_count": devices, "num_sc_per_device": cores}
    logging.disable(logging.WARNING)
    try:
        embedding.auto_stack_tables(features, **counts)
        embedding.prepare_feature_specs_for_training(features, **counts)
    finally:
        logging.disable(logging.NOTSET)
    shards = devices * cores
    found = sparsecore.stacked_tables(specs, shards=shards)
    assert sorted(len(stack.members) for stack in found.values()) == [1, 3]
    arrays = stacking.stack_and_shard_tables(specs, [values[one.name] for one in specs], shards)
    for name, stack in found.items():
        array = np.asarray(arrays[name]).reshape(-1, arrays[name].shape[-1])
        assert array.shape == stack.shape
        for member in stack.members:
            rows = stack.physical_rows(member.name, np.arange(member.rows))
            np.testing.assert_array_equal(array[rows, : member.width], values[member.name])
    with pytest.raises(OptionError, match="expected its first row at"):
        sparsecore.stacked_tables(specs, shards=2 * shards)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"members": ()}, "at least one member"),
        ({"shards": 0}, "positive shards"),
        ({"rotation": -1}, "rotation of 0 or more"),
        ({"members": [StackMember(name="a/b", rows=1, width=1)]}, "without '/'"),
        ({"members": [StackMember(name="a", rows=1, width=1)] * 2}, "different name"),
    ],
)
def test_an_impossible_stack_is_refused(wrong, named):
    good = {"members": [StackMember(name="a", rows=1, width=1)], "shards": 1, "rotation": 0}
    with pytest.raises(OptionError, match=named):
        StackedTable(**good | wrong)


def test_ids_outside_a_table_and_unknown_tables_are_refused():
    stack = Topology(2).stacks["wide"]
    with pytest.raises(OptionError, match="below 700, found 3 to 700"):
        stack.physical_rows("users", [3, 700])
    with pytest.raises(OptionError, match="one of the members users, items, tiny"):
        stack.physical_rows("ads", 0)


# --- Saves and restores --------------------------------------------------------------------------

TOPOLOGIES = [Topology(1), Topology(2), Topology(4), Topology(8)]


@pytest.mark.parametrize("source", [*TOPOLOGIES, Topology(2, 4), Topology(4, 3)], ids=str)
def test_a_run_is_restored_on_every_other_topology_bit_for_bit(tmp_path, source):
    models = saved_run(tmp_path, source)
    for target in TOPOLOGIES:
        assert_steps(tmp_path, target, dict(enumerate(models[:3])))
        with target.manager(tmp_path, access="read") as manager:
            for point in manager.recovery_points():
                found = manager.restore(point, template(target)).state
                assert_holds(found, models[point.step], target)
            assert {point.step for point in manager.recovery_points()} == {3, 4}


def test_a_base_holds_plain_tables_that_any_zarr_reader_opens(tmp_path):
    [model, *_] = saved_run(tmp_path, Topology(8))
    layout = stored_saves.read_save(tmp_path / "0").layout
    assert sorted(table.name.rpartition("/")[2] for table in layout.tables) == sorted(MEMBERS)
    found = {}
    for array in (tmp_path / "0" / naming.EMBEDDINGS_ITEM).rglob("zarr.json"):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array.parent}/"}}
        opened = ts.open(spec).result()
        if opened.dtype == ts.float32:
            found.setdefault(opened.shape[1], []).append(opened.read().result())
    for table in layout.tables:
        name = table.name.rpartition("/")[2]
        rows = slice(table.offset, table.offset + table.rows)
        assert any(
            np.array_equal(array[rows], model.tables[name]) for array in found[MEMBERS[name].width]
        )


def test_compaction_and_inspect_see_logical_rows(tmp_path):
    models = saved_run(tmp_path, Topology(8))
    history = inspect.open(tmp_path).history("embeddings/wide/table/items", [0, 150, 300])
    assert history.steps.tolist() == [0, 1, 2, 3, 4]
    for step, values in zip(history.steps.tolist(), history.values, strict=True):
        np.testing.assert_array_equal(values, models[step].tables["items"][[0, 150, 300]])
    assert compact.compact(tmp_path, step=2, memory_bytes=64 << 20) is not None
    assert_steps(tmp_path, Topology(2), {2: models[2]})
    assert_newest(tmp_path, Topology(2), models[4])


def test_an_orbax_checkpoint_of_stacked_arrays_is_imported_and_restored_elsewhere(tmp_path):
    model, source, target = Model.new(), Topology(8), Topology(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", source.state(model, padding=3))
    interchange.import_orbax(
        tmp_path / "orbax",
        tmp_path / "run",
        tables=source.tables,
        step=7,
        abstract_state=template(source),
    )
    with target.manager(tmp_path / "run") as manager:
        restored = manager.restore(7, template(target))
        assert_holds(restored.state, model, target)
        after = dataclasses.replace(model, touched=restored.touched).trained(1)
        manager.save(8, target.state(after), touched=after.touched)
        [report] = manager.wait_until_finished()
        assert (report.kind, report.rows) == ("delta", moved_rows(model, after))


@pytest.mark.parametrize("codec", ["lossless", "int8", "adaptive4"])
def test_a_codec_stores_what_it_stores_of_plain_tables(tmp_path, codec):
    topology, model, found = Topology(4), Model.new(), []
    plain = deltackpt.Tables(select="embeddings/*/table/*", slots={}, codec=codec)
    for tables in (dataclasses.replace(topology.tables, codec=codec), plain):
        with opened(tmp_path / str(len(found)), tables) as manager:
            for step, one in enumerate((model, model.trained(1))):
                state = topology.state(one)
                if tables is plain:
                    embeddings = one.plain()["embeddings"]
                    tables_only = {stack: {"table": embeddings[stack]["table"]} for stack in STACKS}
                    state = {"embeddings": tables_only}
                commit(manager, step, state, touched=one.touched)
            found.append(manager.read(1, {"users": None, "items": None, "ads": None}).tables)
    for name, fields in found[1].items():
        np.testing.assert_array_equal(found[0][name]["values"], fields["values"])


def test_padding_keeps_the_values_of_a_template_of_arrays_and_is_zero_without(tmp_path):
    models = saved_run(tmp_path, Topology(4))
    target = Topology(2)
    stack = target.stacks["wide"]
    padding = stack.ids(np.arange(stack.shape[0]))[0] < 0
    with target.manager(tmp_path, access="read") as manager:
        ones = manager.restore(2, target.state(Model.new(), padding=7)).state
        zeros = manager.restore(2, template(target)).state
    for state, value in ((ones, 7), (zeros, 0)):
        assert_holds(state, models[2], target)
        held = np.asarray(state["embeddings"]["wide"]["table"])
        assert (held[padding] == value).all()
        rows = stack.physical_rows("items", np.arange(301))
        assert (held[rows, 10:] == value).all()


@pytest.fixture
def accelerator(monkeypatch) -> None:
    """Treats the arrays of the tests' devices, which are CPUs, as those of accelerators."""
    monkeypatch.setattr(placement, "on_host", lambda array: not isinstance(array, jax.Array))


@pytest.mark.parametrize("place", ["host", "accelerator"])
def test_training_may_donate_the_arrays_while_a_base_is_written(
    tmp_path, monkeypatch, request, place
):
    if place == "accelerator":
        request.getfixturevalue("accelerator")
    model, topology = Model.new(), Topology(4)
    donated, read = threading.Event(), capture.PinnedRows.pieces

    def waiting(*arguments):
        donated.wait(60)
        return read(*arguments)

    monkeypatch.setattr(capture.PinnedRows, "pieces", waiting)
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    with topology.manager(tmp_path) as manager:
        manager.save(0, state := topology.state(model), touched=model.touched)
        state = step(state)
        donated.set()
        manager.wait_until_finished()
        assert_holds(manager.restore(0, template(topology)).state, model, topology)


def test_rows_are_gathered_on_an_accelerator_before_they_are_copied(tmp_path, accelerator):
    models = saved_run(tmp_path, Topology(4))
    assert_steps(tmp_path, Topology(2), dict(enumerate(models[:3])))
    assert_newest(tmp_path, Topology(2), models[-1])


def test_a_state_in_which_ids_moved_unmarked_is_refused(tmp_path):
    model, topology = Model.new(), Topology(4)
    with topology.manager(tmp_path) as manager:
        assert manager.verify_tracking(topology.state(model), touched=model.touched) is False
        after = model.trained(1)
        assert manager.verify_tracking(topology.state(after), touched=after.touched) is True
        wrong = after.trained(2, marked=False)
        with pytest.raises(TrackingError, match="embeddings/.*/table/"):
            manager.verify_tracking(topology.state(wrong), touched=wrong.touched)


def test_without_marks_fingerprints_find_the_rows(tmp_path):
    model, topology = Model.new(), Topology(4)
    with topology.manager(tmp_path, wal=None) as manager:
        manager.save(0, topology.state(model))
        after = model.trained(1)
        manager.save(1, topology.state(after))
        [_, report] = manager.wait_until_finished()
        assert (report.kind, report.rows) == ("delta", moved_rows(model, after))
        assert_holds(manager.restore(1, template(topology)).state, after, topology)


def test_saving_the_restored_step_again_writes_nothing(tmp_path):
    saved_run(tmp_path, Topology(4))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "2").rglob("*")}
    with Topology(4).manager(tmp_path) as manager:
        restored = manager.restore(2, template(Topology(4)))
        commit(manager, 2, restored.state, touched=restored.touched)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "2").rglob("*")} == before
        altered = dict(restored.state, bias=restored.state["bias"] + 1)
        with pytest.raises(OptionError):
            manager.save(2, altered, touched=restored.touched)


def test_a_table_may_grow_to_further_ids(tmp_path, caplog):
    model, topology = Model.new(), Topology(2)
    with topology.manager(tmp_path) as manager:
        manager.save(0, topology.state(model), touched=model.touched)
    [ads] = STACKS["narrow"]
    members = (dataclasses.replace(ads, rows=130),)
    grown = StackedTable(members=members, shards=2, rotation=topology.cores)
    state = topology.state(model)
    narrow = state["embeddings"]["narrow"]
    narrow["table"] = topology.placed(np.full(grown.shape, 5, np.float32))
    narrow["slot"]["accumulator"] = topology.placed(np.full(grown.shape, 6, np.float32))
    narrow["slot"]["counts"] = topology.placed(np.full(grown.shape[0], 7, np.int32))
    tables = topology.tables
    stacks = {**tables.stacks, "embeddings/narrow/table": grown}
    with opened(tmp_path, dataclasses.replace(tables, stacks=stacks)) as manager:
        found = manager.restore(0, state).state["embeddings"]["narrow"]["table"]
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        with pytest.raises(TemplateMismatch, match="pass a template of arrays"):
            manager.restore(0, abstract)
    rows = np.asarray(found)[grown.physical_rows("ads", np.arange(130))]
    np.testing.assert_array_equal(rows[:97], model.tables["ads"])
    assert (rows[97:] == 5).all()


# --- Several processes ---------------------------------------------------------------------------


@functools.cache
def runtime() -> Runtime:
    """The runtime of all simulated processes; not made before ``many.Server`` has forked."""
    return Runtime(memory_bytes=1 << 28)


def replicated_model() -> Model:
    """A model whose stamps are on every process of a job."""
    every = jax.sharding.Mesh(jax.devices(), ("x",))
    return Model.new(sharding=jax.sharding.NamedSharding(every, jax.sharding.PartitionSpec()))


def save_on_each(job: Job, root, step: int, topology: Topology, model: Model, lineages) -> list:
    """Saves a step on all processes of a job; returns their reports."""
    split = deltackpt.handlers.split(topology.state(model), topology.tables)
    item = root / f"{step}.orbax-checkpoint-tmp" / naming.EMBEDDINGS_ITEM
    item.mkdir(parents=True)

    def chunk(index: int):
        embeddings = pending_save.Embeddings(
            split=split,
            touched=model.touched,
            lineage=lineages[index],
            fsync=False,
            runtime=runtime(),
        )
        with job.lock:  # Real processes do not share jax objects.
            pending = pending_save.capture(embeddings, step, root / str(step))
        pending.wait_copied()
        pending.write_alone(item, coordination.Coordinator(str(root), 300.0))
        return pending.event

    found = job.on_each(chunk)
    for result in found:
        if isinstance(result, Exception):
            raise result
    item.parent.rename(root / str(step))
    return found


def assert_stored(root, step: int, model: Model) -> None:
    """Asserts that a step has the logical rows of a model, bit for bit."""
    for name, fields in reader.restore_tables(chains.read_chain(root / str(step))).fields.items():
        member = name.rpartition("/")[2]
        assert fields["values"].tobytes() == model.tables[member].tobytes()
        assert fields["slot.counts"].tobytes() == model.counts[member].tobytes()


@st.composite
def topologies(draw):
    devices = draw(st.sampled_from([1, 2, 4, 8]))
    replicas = draw(st.sampled_from([one for one in (1, 2, 4) if one * devices <= 8]))
    return Topology(devices, draw(st.integers(1, 3)), replicas)


@test_meshes.slow_examples(12)
@given(
    save=topologies(),
    savers=st.sampled_from([2, 4, 8]),
    restores=st.lists(st.tuples(topologies(), st.sampled_from([1, 2, 4])), min_size=2, max_size=2),
    memory_bytes=st.sampled_from([1, 1 << 28]),
)
def test_any_processes_restore_what_any_others_saved(
    tmp_path_factory, save, savers, restores, memory_bytes
):
    root, model = tmp_path_factory.mktemp("root"), replicated_model()
    job, run, models = Job(savers), lineage.new_run(), []
    with (
        job.running(),
        mock.patch.object(runtime().memory, "limit_bytes", memory_bytes),
        mock.patch.object(zarr_writer, "_CHUNK_ROWS", 16),
    ):
        lineages = [lineage.Lineage(run=run) for _ in range(job.count)]
        for step in range(3):
            found = save_on_each(job, root, step, save, model, lineages)
            assert {report.kind for report in found} == {"delta" if step else "base"}
            rows = sum(one.rows for one in MEMBERS.values())
            changed = moved_rows(models[-1], model) if models else rows
            assert sum(report.rows for report in found) == changed
            models.append(model)
            model = model.trained(step)
    assert not [one for step in range(3) for one in inventory.verify_step(root / str(step))]
    first = chains.read_chain(root / "0")
    chunk = reader.restore_tables(first, wanted=wanted_rows(first[-1].layout, {"users": (10, 30)}))
    found = chunk.fields["embeddings/wide/table/users"]["values"]
    assert found.tobytes() == models[0].tables["users"][10:30].tobytes()
    for step, one in enumerate(models):
        assert_stored(root, step, one)
    for topology, count in restores:
        for step, one in enumerate(models):
            assert_each_restores(root, step, Job(count), topology, one)


@pytest.mark.parametrize("memory_bytes", [1, 1 << 28], ids=["pinned", "staged"])
def test_each_accelerator_of_a_process_gathers_its_own_rows(tmp_path, accelerator, memory_bytes):
    job, model, run, models = Job(2), replicated_model(), lineage.new_run(), []
    with job.running(), mock.patch.object(runtime().memory, "limit_bytes", memory_bytes):
        lineages = [lineage.Lineage(run=run) for _ in range(job.count)]
        for step in range(2):
            save_on_each(job, tmp_path, step, Topology(8), model, lineages)
            models.append(model)
            model = model.trained(step)
    for step, one in enumerate(models):
        assert_stored(tmp_path, step, one)


def test_row_indices_of_a_base_that_do_not_ascend_are_damage(tmp_path):
    job, model, run = Job(2), replicated_model(), lineage.new_run()
    with job.running():
        lineages = [lineage.Lineage(run=run) for _ in range(job.count)]
        save_on_each(job, tmp_path, 0, Topology(8), model, lineages)
    read_into = shard_arrays.ZarrArrays.read_into

    def altered(self, segment, entry, start, stop, out):
        read_into(self, segment, entry, start, stop, out)
        if entry.name == naming.GAPS:
            out[3] = 0

    with (
        mock.patch.object(shard_arrays.ZarrArrays, "read_into", altered),
        pytest.raises(Damaged, match="rows.gaps/c.0: expected ascending rows after -1"),
    ):
        reader.restore_tables(chains.read_chain(tmp_path / "0"))


def assert_each_restores(root, step: int, job: Job, topology: Topology, model: Model) -> None:
    """Asserts that each process gets the rows of its devices, and keeps their padding."""
    expected = topology.state(model, padding=7)
    template = topology.state(Model.new(1), padding=7)

    def own(index: int):
        split = deltackpt.handlers.split(template, topology.tables)
        merged = reader.restore_tables(
            chains.read_chain(root / str(step)), wanted=placing.wanted_of(split.fields)
        )
        with job.lock:
            placed = placing.place(merged, split.fields)
            found = join(template, split.layout, placed, split.dense, None)
        jax.tree.map(assert_shards, found["embeddings"], expected["embeddings"])

    # Each process assembles its own shards of a global array.
    with (
        job.running(),
        mock.patch.object(placement, "assembled", lambda leaf, boxes, held: HostShards(held)),
    ):
        for result in job.on_each(own):
            if isinstance(result, Exception):
                raise result


@dataclasses.dataclass(frozen=True)
class HostShards:
    """The shards of an array that one process has assembled, by box."""

    shards: dict[Any, np.ndarray]


def assert_shards(found: HostShards, expected: jax.Array) -> None:
    for box, shard in found.shards.items():
        assert shard.tobytes() == np.asarray(expected)[slice(*box.rows)].tobytes()


def test_with_several_processes_a_sparse_core_is_on_one_device(monkeypatch):
    topology, devices = Topology(2), Topology(4)
    state = jax.tree.map(devices.placed, topology.arrays(Model.new()))
    deltackpt.handlers.split(state, topology.tables)
    monkeypatch.setattr(coordination, "process_count", lambda: 2)
    with pytest.raises(TableSelectionError, match="each of 2 SparseCores on one device"):
        deltackpt.handlers.split(state, topology.tables)


def test_arrays_that_do_not_fit_their_stack_are_refused():
    topology = Topology(2)
    state, tables = topology.state(Model.new()), topology.tables
    split, wide = deltackpt.handlers.split, topology.stacks["wide"]
    for stacks, match in (
        (Topology(8).tables.stacks, "for 8 shards, found"),
        ({**tables.stacks, "embeddings/other": wide}, "'embeddings/other' matches no table"),
        ({**tables.stacks, "**": wide}, "one pattern that matches it"),
    ):
        with pytest.raises(TableSelectionError, match=match):
            split(state, dataclasses.replace(tables, stacks=stacks))
    with pytest.raises(OptionError, match="expected a StackedTable for 'a'"):
        deltackpt.Tables(select="a", stacks={"a": 8})
    columns = jax.sharding.NamedSharding(
        jax.sharding.Mesh(jax.devices()[:2], ("x",)), jax.sharding.PartitionSpec(None, "x")
    )
    wide = state["embeddings"]["wide"]
    wide["table"] = jax.device_put(wide["table"], columns)
    with pytest.raises(TableSelectionError, match="expected whole rows on each device"):
        split(state, tables)
