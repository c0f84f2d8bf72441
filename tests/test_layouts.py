# SPDX-License-Identifier: Apache-2.0
"""Values computed once per layout, and the chain that manifests name as a hint."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from hypothesis import strategies as st

import deltackpt
from deltackpt.errors import Damaged, StorageError
from deltackpt.format import manifest, naming, records
from deltackpt.format.manifest import Manifest
from deltackpt.reading import chains, reader, stored_saves
from deltackpt.save import selection
from deltackpt.state import placement
from deltackpt.state import tables as state_tables
from deltackpt.storage.store import StorePath

HANDLERS = {"embeddings": deltackpt.Tables(select="tables/*")}
OPTIONS = deltackpt.ManagerOptions(
    deltas=deltackpt.DeltaOptions(
        policy=deltackpt.policies.Consecutive(max_chain=1000, max_restore_ratio=1e9)
    )
)


def a_state(count: int, rows: int = 64, width: int = 4):
    random = np.random.default_rng(0)
    return {
        "tables": {
            f"t{number:03d}": jnp.asarray(random.random((rows, width), np.float32))
            for number in range(count)
        },
        "bias": jnp.zeros(3),
    }


def moved(state, touched, ids):
    tables = {name: table.at[ids].add(1) for name, table in state["tables"].items()}
    marked = deltackpt.touched.mark(touched, dict.fromkeys(tables, ids))
    return {**state, "tables": tables}, marked


def saved(root: Path, count: int, steps: int):
    """Saves a chain of ``steps`` steps with ``count`` tables; returns the saved states."""
    state = a_state(count)
    touched, states = deltackpt.touched.init(state["tables"]), []
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=OPTIONS) as manager:
        for step in range(steps):
            model.commit(manager, step, state, touched=touched)
            states.append(state)
            state, touched = moved(state, touched, jnp.array([step % 64, 63]))
    return states


def head_of(root: Path, step: int) -> Manifest:
    return stored_saves.read_save(root / str(step)).head


def rewrite(root: Path, step: int, **changed) -> None:
    """Replaces fields of a manifest."""
    path = root / str(step) / naming.EMBEDDINGS_ITEM / naming.manifest_name(0)
    record = dataclasses.replace(head_of(root, step), **changed)
    path.write_bytes(manifest.to_bytes(record))


# --- Once per layout -----------------------------------------------------------------------------


def test_ownership_is_computed_once_for_a_layout_and_not_at_each_save(tmp_path):
    tables = deltackpt.Tables(select="tables/*")
    state = a_state(7)
    touched = deltackpt.touched.init(state["tables"])
    with (
        mock.patch.object(placement, "owned_boxes", wraps=placement.owned_boxes) as shares,
        deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager,
    ):
        counts = []
        for step in range(4):
            model.commit(manager, step, state, touched=touched)
            counts.append(shares.call_count)
            state, touched = moved(state, touched, jnp.array([1]))
    assert counts == [7] * 4


def test_rows_of_one_device_are_read_at_once_even_if_their_stamps_are_sharded():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    rows, columns = (
        jax.sharding.NamedSharding(mesh, spec)
        for spec in (jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(None, "x"))
    )
    stamps = jax.device_put(jnp.zeros((64, 1), jnp.int32), rows)
    table = jnp.zeros((64, 16))
    for placed, boxes in ((table, 1), (jax.device_put(table, columns), mesh.size)):
        owned = [*placement.owned_boxes(placed, stamps, turn=0)]
        assert [one.box.rows for one in owned] == [(0, 64)] * boxes


def test_tables_with_stamps_in_two_touch_states_are_tracked_one_by_one(tmp_path):
    state = a_state(2)
    first, second = (deltackpt.touched.init(state["tables"]) for _ in range(2))
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        manager.save(0, {**state, "marks": first}, touched=second)
        moved_once, first = moved(state, first, jnp.array([5]))
        moved_twice, second = moved(moved_once, second, jnp.array([9]))
        manager.save(1, {**moved_twice, "marks": first}, touched=second)
        [_, report] = manager.wait_until_finished()
        assert (report.kind, report.rows) == ("delta", 4)
        model.assert_same(manager.restore(1, moved_twice).state, moved_twice)


#: Of a table: rows, width, dtype, shape of a slot's value, placement.
KINDS = (
    st.sampled_from([16, 24, 64]),
    st.sampled_from([1, 4]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([(), (4,)]),
    st.sampled_from(["one device", "rows", "copies", "numpy"]),
)
LAYOUTS = st.dictionaries(st.sampled_from("abc"), st.tuples(*KINDS), min_size=1)


def on(place: str):
    """A layout of one table with a placement."""
    return {"a": (64, 4, "float32", (), place)}


@st.composite
def similar_layouts(draw):
    """A layout, and others that differ from it in one property of one table."""
    first = draw(LAYOUTS)
    found = [first]
    for number in draw(st.lists(st.integers(0, len(KINDS)), min_size=1, max_size=2)):
        name = draw(st.sampled_from(sorted(first)))
        if number == len(KINDS):
            found.append({**first, "d": first[name]})
            continue
        table = list(first[name])
        table[number] = draw(KINDS[number].filter(lambda kind, old=table[number]: kind != old))
        found.append({**first, name: tuple(table)})
    return found


def placed(array: np.ndarray, place: str):
    if place == "numpy":
        return array
    if place == "one device":
        return jnp.asarray(array)
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("x" if place == "rows" else None)
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))


def state_of(layout, random: np.random.Generator):
    state = {"tables": {}, "slots": {}, "bias": jnp.asarray(random.random(3))}
    for name, (rows, width, dtype, slot, place) in layout.items():
        values = random.integers(-100, 100, (rows, width)).astype(jnp.dtype(dtype))
        state["tables"][name] = placed(values, place)
        state["slots"][name] = placed(random.random((rows, *slot), np.float32), place)
    return state


@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(
    layouts=similar_layouts(),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    marks=st.booleans(),
    seed=st.integers(0, 1000),
)
@hypothesis.example(layouts=[on("rows"), on("one device")], order=[0], marks=True, seed=0)
@hypothesis.example(layouts=[on("rows"), on("one device")], order=[0], marks=False, seed=0)
@hypothesis.example(
    layouts=[on("numpy"), on("rows"), on("copies")], order=[2, 1], marks=False, seed=0
)
def test_saves_of_changing_layouts_are_the_same_with_and_without_cached_values(
    layouts, order, marks, seed
):
    random = np.random.default_rng(seed)
    found: dict[str, list] = {"cached": [], "computed": []}
    tracking = (
        OPTIONS
        if marks
        else dataclasses.replace(
            OPTIONS, deltas=dataclasses.replace(OPTIONS.deltas, tracking="fingerprints")
        )
    )
    choice = deltackpt.Tables(select="tables/**", slots={"tables/**": {"s": "slots/{name}"}})
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        managers = {
            kind: stack.enter_context(
                deltackpt.CheckpointManager(
                    Path(directory, kind), handlers={"embeddings": choice}, options=tracking
                )
            )
            for kind in found
        }
        states, before, touched = [], None, None
        for step, number in enumerate([0, 1, *order]):
            layout = layouts[number % len(layouts)]
            state = state_of(layout, random)
            if layout == before and touched is not None:
                ids = {name: random.integers(0, layout[name][0], 5) for name in layout}
                state = kept_but(state, states[-1], ids)
                touched = deltackpt.touched.mark(touched, ids)
            else:
                touched = deltackpt.touched.init(state["tables"])
            states.append(state)
            before = layout
            for kind, manager in managers.items():
                with contextlib.ExitStack() as uncached:
                    if kind == "computed":
                        forget(uncached)
                    saved = manager.save(step, state, touched=touched if marks else None)
                    [report] = manager.wait_until_finished()
                found[kind].append((saved.kind, saved.reason, report.rows, report.total_rows))
        for step, state in enumerate(states):
            model.assert_same(managers["cached"].restore(step, state).state, state)
    assert found["cached"] == found["computed"]


def forget(stack: contextlib.ExitStack) -> None:
    """Has everything computed anew that depends on a layout alone."""
    stack.enter_context(
        mock.patch.object(records.IdentityCache, "get", lambda self, make, *_, rest=None: make())
    )
    state_tables._known.clear()


def kept_but(state, before, ids):
    """The tables and slots of ``before`` with the rows ``ids`` of ``state``."""
    kept = {"tables": {}, "slots": {}, "bias": state["bias"]}
    for kind in ("tables", "slots"):
        for name, new in state[kind].items():
            array = np.array(before[kind][name])
            array[ids[name]] = np.asarray(new)[ids[name]]
            is_host = isinstance(new, np.ndarray)
            kept[kind][name] = array if is_host else jax.device_put(array, new.sharding)
    return kept


def test_values_cached_by_layout_are_not_shared_with_an_equal_layout():
    known: records.IdentityCache[int] = records.IdentityCache()
    one, other = (manifest.Layout((), (), (), ()) for _ in range(2))
    assert known.get(lambda: 1, one, rest="a") == 1
    assert known.get(lambda: 2, one, rest="a") == 1
    assert known.get(lambda: 3, one, rest="b") == 3
    assert known.get(lambda: 4, other, rest="a") == 4
    known.clear()
    assert known.get(lambda: 5, one, rest="a") == 5


def decoded(record: Manifest, **dense: Any) -> Manifest:
    """Encodes a manifest whose record of dense leaves has other fields, and decodes it."""
    assert record.dense_blocks is not None
    blocks = dataclasses.replace(record.dense_blocks, **dense)
    data = manifest.to_bytes(dataclasses.replace(record, dense_blocks=blocks))
    return manifest.from_bytes(data, name="it")


def test_an_equal_field_of_a_sound_record_is_checked_again_beside_others(tmp_path):
    saved(tmp_path, 1, 2)
    record = head_of(tmp_path, 1)
    assert record.dense_blocks is not None
    values, [segment, *others] = record.dense_blocks.values, record.dense_blocks.segments
    other = dataclasses.replace(segment, group="float64")
    with pytest.raises(Damaged, match="dense_blocks"):
        decoded(record, segments=(other, *others))
    unchanged = tuple(dataclasses.replace(value, at=None) for value in values)
    partial = decoded(record, values=unchanged, segments=(), complete=False)
    with pytest.raises(Damaged, match="dense_blocks"):
        decoded(partial, complete=True)


def test_shared_fields_of_the_processes_of_a_job_are_decoded_once(tmp_path):
    saved(tmp_path, 1, 2)
    record = head_of(tmp_path, 1)
    assert record.dense_blocks is not None
    values, segments = record.dense_blocks.values, record.dense_blocks.segments

    def decoded_of(process: int) -> manifest.DenseBlocks:
        found = decoded(
            dataclasses.replace(record, process=process, process_count=24),
            values=tuple(dataclasses.replace(one, key=f"{one.key}{process}") for one in values),
            segments=tuple(dataclasses.replace(o, name=f"{o.name}{process}") for o in segments),
        ).dense_blocks
        assert found is not None
        return found

    first, second = ([decoded_of(process) for process in range(24)] for _ in range(2))
    for one, again in zip(first, second, strict=True):
        assert one.values is again.values and one.segments is again.segments


def test_a_division_keeps_no_array(tmp_path):
    state = a_state(2)
    split = deltackpt.handlers.split(state, HANDLERS["embeddings"])
    found = selection.divide(split.layout, split.fields, {})
    plans = [
        plan for by_rows in found.fields.values() for p in by_rows.values() for plan in p.values()
    ]
    assert plans
    leaves = jax.tree.leaves([dataclasses.astuple(plan) for plan in plans])
    assert not any(isinstance(leaf, jax.Array) for leaf in leaves)


# --- Similar manifests ---------------------------------------------------------------------------


def test_manifests_of_one_run_share_equal_parts(tmp_path):
    saved(tmp_path, 3, 3)
    heads = [head_of(tmp_path, step) for step in range(3)]
    assert heads[1].tables is heads[2].tables
    assert heads[1].groups is heads[2].groups
    assert heads[1].save_id != heads[2].save_id


@pytest.mark.parametrize(
    "changed", [{"tables": 3}, {"kind": "neither"}, {"save_id": None}, {"parents": ["../x"]}]
)
def test_an_invalid_manifest_is_reported_as_an_entry_and_as_a_whole(tmp_path, changed):
    saved(tmp_path, 1, 1)
    path = tmp_path / "0" / naming.EMBEDDINGS_ITEM / naming.manifest_name(0)
    record = head_of(tmp_path, 0)
    body = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    made = dataclasses.make_dataclass("Body", list(body))(**(body | changed))
    path.write_bytes(records.to_bytes(made, "deltackpt.manifest"))
    with pytest.raises(Damaged):
        stored_saves.read_save(tmp_path / "0")
    with pytest.raises(Damaged):
        stored_saves.read_info(tmp_path / "0")


def test_the_entry_of_a_step_equals_that_of_its_save(tmp_path):
    saved(tmp_path, 3, 3)
    for step in range(3):
        assert (
            stored_saves.read_info(tmp_path / str(step))
            == stored_saves.read_save(tmp_path / str(step)).info
        )


# --- The chain as a hint -------------------------------------------------------------------------


def test_a_delta_names_a_limited_number_of_parents_nearest_first(tmp_path):
    with mock.patch("deltackpt.format.manifest.MOST_PARENTS", 3):
        saved(tmp_path, 1, 6)
    assert [head_of(tmp_path, step).parents for step in range(6)] == [
        (),
        ("0",),
        ("1", "0"),
        ("2", "1", "0"),
        ("3", "2", "1"),
        ("4", "3", "2"),
    ]


def test_a_run_that_resumes_from_a_restored_step_names_its_chain(tmp_path):
    [*_, state] = saved(tmp_path, 1, 3)
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=OPTIONS) as manager:
        result = manager.restore_latest(state)
        assert result is not None
        state, touched = moved(result.state, result.touched, jnp.array([7]))
        assert manager.save(3, state, touched=touched).kind == "delta"
    assert head_of(tmp_path, 3).parents == ("2", "1", "0")


@pytest.fixture
def slow_store():
    """Treats every response of a store as slow, so that hints are followed at once."""
    with mock.patch.multiple(chains, _SLOW_SECS=-1.0, _SLOW_READS=1):
        yield


def test_a_slow_store_is_read_ahead_by_the_hint(tmp_path, slow_store):
    saved(tmp_path, 1, 5)
    read, is_prefetching = collections.Counter(), threading.Event()
    real = StorePath.read

    def counted(at, *arguments, **options):
        read[at] += 1
        if threading.current_thread() is not threading.main_thread():
            is_prefetching.set()
        elif len(read) > 1:  # Only a prefetch that no thread has begun is left to this one.
            assert is_prefetching.wait(60)
        return real(at, *arguments, **options)

    with mock.patch.object(StorePath, "read", counted):
        found = chains.read_chain(tmp_path / "4")
    assert [save.info.step_dir for save in found] == ["0", "1", "2", "3", "4"]
    assert is_prefetching.is_set()
    assert [*read.values()] == [1] * 5  # Each manifest is read once.


@pytest.mark.parametrize(
    "parents", [(), ("1", "2"), ("99", "98"), ("0", "0", "4"), tuple(map(str, range(200)))]
)
def test_a_wrong_hint_still_gives_the_chain_of_the_parents(tmp_path, slow_store, parents):
    states = saved(tmp_path, 2, 5)
    for step in (2, 4):
        rewrite(tmp_path, step, parents=parents)
    found = chains.read_chain(tmp_path / "4")
    assert [save.info.step_dir for save in found] == ["0", "1", "2", "3", "4"]
    fields = reader.restore_tables(found).fields
    for name, table in states[4]["tables"].items():
        np.testing.assert_array_equal(fields[f"tables/{name}"]["values"], table)


def test_an_altered_manifest_is_damage_even_if_it_was_read_ahead(tmp_path, slow_store):
    saved(tmp_path, 1, 4)
    path = tmp_path / "1" / naming.EMBEDDINGS_ITEM / naming.manifest_name(0)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="1/embeddings"):
        chains.read_chain(tmp_path / "3")


def test_a_fast_store_is_not_read_ahead(tmp_path):
    saved(tmp_path, 1, 4)
    with mock.patch.object(chains, "_SLOW_SECS", 3600.0):
        with mock.patch.object(ThreadPoolExecutor, "submit") as submit:
            chains.read_chain(tmp_path / "3")
    submit.assert_not_called()


def test_a_manifest_that_could_not_be_read_ahead_is_read_again(tmp_path, slow_store):
    saved(tmp_path, 1, 4)
    real = StorePath.read

    def refused(at, *arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            raise StorageError(f"{at}: expected to read it, found an error")
        return real(at, *arguments, **options)

    with mock.patch.object(StorePath, "read", refused):
        found = chains.read_chain(tmp_path / "3")
    assert [save.info.step_dir for save in found] == ["0", "1", "2", "3"]
