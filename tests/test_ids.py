# SPDX-License-Identifier: Apache-2.0
"""Tables with a key column: saved with their rows, checked at a restore, looked up by id."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import made_up_saves
import numpy as np
import pytest
from command import run as command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from job import Job
from numpy.testing import assert_array_equal

import deltackpt
from deltackpt import errors, inspect, policies, touched, vocab
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.row_blocks import FieldSpec, GroupEntry
from deltackpt.handlers import split, v1
from deltackpt.maintenance import compact, verify
from deltackpt.reading import bounds, inventory, stored_saves
from deltackpt.restore import placing
from deltackpt.save import capture
from deltackpt.storage import shard_writer
from deltackpt.testing import stored_chunks
from deltackpt.testing.states import assert_same

ROWS, WIDTH, IDS = 400, 8, 1000
#: Column dtypes of ids, and the largest id of each.
COLUMNS = {np.int32: 2**31 - 1, np.uint32: 2**63 - 1}
TABLES = deltackpt.Tables(
    select="tables/*", slots={"tables/*": {"uses": "uses/{name}"}}, key="keys/{name}"
)


class Vocabulary:
    """A training state of two tables whose ids come and go, and its vocabularies."""

    def __init__(self, dtype: type = np.uint32, *, rows: int = ROWS):
        self.dtype, names = dtype, ("users", "items")
        self.keys = {name: vocab.RowKeys(rows) for name in names}
        self.state: dict[str, Any] = {
            "tables": {name: jnp.zeros((rows, WIDTH)) for name in names},
            "uses": {name: jnp.zeros(rows, jnp.int32) for name in names},
            "keys": {name: jnp.asarray(self.keys[name].column(dtype)) for name in names},
            "dense": jnp.zeros(3),
        }
        self.touched = self.new_marks(self.state)

    @staticmethod
    def new_marks(state: dict[str, Any]) -> touched.TouchState:
        return touched.init({f"tables/{name}": rows for name, rows in state["tables"].items()})

    def restored(self, state: dict[str, Any], touch_state: Any) -> None:
        """Continues from a restored state: the vocabularies follow from their key columns."""
        self.state, self.touched = state, touch_state
        self.keys = {name: vocab.RowKeys.index(column) for name, column in state["keys"].items()}

    def grow(self, rows: int, *names: str) -> None:
        """Adds rows without an id to some tables, all by default."""
        self.state, added = {**self.state}, {}
        for name in names or self.keys:
            self.keys[name].grow(rows)
            for kind in ("tables", "uses"):
                # In numpy: JAX would compile a program for each number of rows.
                held = np.asarray(self.state[kind][name])
                more = np.zeros((rows - len(held), *held.shape[1:]), held.dtype)
                larger = jnp.asarray(np.concatenate([held, more]))
                self.state[kind] = {**self.state[kind], name: larger}
            column = jnp.asarray(self.keys[name].column(self.dtype))
            self.state["keys"] = {**self.state["keys"], name: column}
            added[f"tables/{name}"] = self.state["tables"][name]
        self.touched = touched.grow(self.touched, added)

    def step(self, seed: int, *, batch: int = 60, spare: int = 10, zero: bool = True) -> None:
        """Trains on some ids; evicts the least used rows for new ids, and ``spare`` more."""
        random = np.random.default_rng(seed)
        state, marked = {**self.state, "dense": self.state["dense"] + 1}, {}
        for name, keys in sorted(self.keys.items()):
            ids = IDS * keys.capacity // ROWS
            asked = random.integers(0, ids, batch) * (COLUMNS[self.dtype] // ids)
            tables, uses = np.array(state["tables"][name]), np.array(state["uses"][name])
            known = keys.find(np.unique(asked))
            count = max(0, int((known < 0).sum()) - keys.free) + spare
            evicted = keys.evict(rows=vocab.lowest(keys.column(), count, uses, keep=known))
            if zero:
                tables[evicted], uses[evicted] = 0, 0
            rows, new = keys.assign(asked)
            tables[new] = random.normal(size=(len(new), WIDTH))
            uses[new] = 0
            tables[rows] += 1
            np.add.at(uses, rows, 1)
            marked[f"tables/{name}"] = jnp.asarray(np.concatenate([rows, evicted]), jnp.int32)
            state = {
                **state,
                "tables": {**state["tables"], name: jnp.asarray(tables)},
                "uses": {**state["uses"], name: jnp.asarray(uses)},
                "keys": {**state["keys"], name: jnp.asarray(keys.column(self.dtype))},
            }
        self.state, self.touched = state, touched.mark(self.touched, marked)

    def save(self, saving: deltackpt.CheckpointManager, step: int, **options: Any) -> Any:
        return saving.save(step, self.state, touched=self.touched, **options)

    def append(self, saving: deltackpt.CheckpointManager, step: int) -> Any:
        return saving.append(step, self.state, touched=self.touched)

    def run(
        self, saving: deltackpt.CheckpointManager, *saves: int, last: int, **how: Any
    ) -> dict[int, dict[str, Any]]:
        """Trains steps from 1, saves some and appends the others; returns their states."""
        states = {}
        for number in range(1, last + 1):
            self.step(number, **how)
            states[number] = self.state
            (self.save if number in saves else self.append)(saving, number)
        saving.wait_until_finished()
        saving.wait_appended()
        return states

    def save_with_evictions(self, saving: deltackpt.CheckpointManager, **how: Any) -> None:
        """Saves a base, evicts rows, and saves a delta."""
        self.step(1, batch=12_000, spare=0)
        self.save(saving, 1)
        self.step(2, batch=500, spare=4000, **how)
        assert self.save(saving, 2).kind == "delta"
        saving.wait_until_finished()


def manager(root: Any, tables: Any = TABLES, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers={"embeddings": tables}, options=deltackpt.ManagerOptions(**options)
    )


def with_wal(root: Any) -> deltackpt.CheckpointManager:
    return manager(root, wal=deltackpt.WalOptions())


def assert_restores(root: Any, step: int, state: dict[str, Any], newest: Any = None) -> None:
    """Another manager restores a step, and the newest recovery point, bit for bit."""
    with manager(root, access="read") as reading:
        assert_same(reading.restore(step, state).state, state)
        if newest is not None:
            assert_same(reading.restore_latest(newest).state, newest)


@pytest.mark.parametrize("dtype", COLUMNS)
@pytest.mark.parametrize("zero", [True, False])
def test_a_run_that_was_killed_continues_with_the_ids_of_one_that_was_not(tmp_path, dtype, zero):
    run = Vocabulary(dtype)
    with with_wal(tmp_path) as saving:
        Vocabulary(dtype).run(saving, 1, 4, 8, last=10, zero=zero)
    for number in range(1, 11):
        run.step(number, zero=zero)
    with with_wal(tmp_path) as resumed:
        found = resumed.restore_latest(Vocabulary(dtype).state)
        assert found.step == 10 and found.chain[-2:] == (4, 8)
        assert_same(found.state, run.state)
        back = Vocabulary(dtype)
        back.restored(found.state, found.touched)
        for number in range(11, 15):
            run.step(number, zero=zero)
            back.step(number, zero=zero)
            assert_same(back.state, run.state)
        assert back.save(resumed, 14).kind == "delta"
    assert_restores(tmp_path, 14, run.state)


def test_ids_are_exact_whatever_the_codecs_of_their_table(tmp_path):
    codec = deltackpt.policies.CodecChoice(delta="int8", base="bf16")
    run = Vocabulary()
    with manager(tmp_path, dataclasses.replace(TABLES, codec=codec, slots={})) as saving:
        for number in (1, 2, 3):
            run.step(number)
            run.save(saving, number)
            saving.wait_until_finished()
            found = saving.read(number, dict.fromkeys(("tables/users", "tables/items")))
            for name, column in run.state["keys"].items():
                restored = found.tables[f"tables/{name}"]["slot.key"]
                assert restored.tobytes() == np.asarray(column).tobytes()


def test_a_step_in_which_an_id_has_two_rows_is_skipped_and_the_id_is_named(tmp_path):
    run = Vocabulary()
    with manager(tmp_path) as saving:
        for number in (1, 2):
            run.step(number)
            if number == 2:
                column = np.array(run.state["keys"]["users"])
                column[7] = column[5]
                run.state["keys"]["users"] = jnp.asarray(column)
                run.touched = touched.mark(run.touched, {"tables/users": jnp.array([7])})
            run.save(saving, number)
    assert [step.restorable for step in verify.verify_root(tmp_path).steps] == [True, False]
    with manager(tmp_path) as restoring:
        twice = int(vocab.ids_of(np.asarray(run.state["keys"]["users"]))[5])
        with pytest.raises(
            errors.DamagedKeys, match=f"table tables/users.*id {twice} in rows 5 and 7"
        ):
            restoring.restore(2, run.state)
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            assert restoring.restore_latest(run.state).step == 1
    # Damaged dense leaves hide no damaged ids.
    stored_chunks(tmp_path / "2", "*", segment="dense*")[0].flip()
    report = verify.verify_root(tmp_path)
    assert report.problems == report.saves[1].problems
    assert any(f"id {twice}" in problem.found for problem in report.problems)


def test_an_id_with_rows_on_two_processes_is_found_by_the_one_that_checks_its_table(tmp_path):
    run = Vocabulary()
    run.step(1)
    column = np.array(run.state["keys"]["users"])
    column[395] = column[5]
    run.state["keys"]["users"] = jnp.asarray(column)
    with manager(tmp_path) as saving:
        run.save(saving, 1)
    rows = NamedSharding(jax.make_mesh((8,), ("rows",)), PartitionSpec("rows"))
    sharded = jax.device_put({n: run.state[n] for n in ("tables", "uses", "keys")}, rows)
    fields = split({**run.state, **sharded}, TABLES).fields
    job = Job(2)

    def read(index: int) -> None:
        wanted = placing.AbstractEmbeddings(tables=fields)
        assert v1.load_item(tmp_path / "1" / "embeddings", wanted).placed == {}

    # Real processes place only their own shards.
    with job.running(), mock.patch.object(placing, "place", lambda merged, templates: {}):
        items, users = job.on_each(read)
    assert items is None
    assert isinstance(users, errors.DamagedKeys) and "in rows 5 and 395" in str(users)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("none/{name}", "matches nothing"),
        ("dense", "expected \\(rows,\\)|expected 400 rows"),
        ("uses/{name}", "claimed more than once"),
        ({"tables/ads": "keys/{name}"}, "matches no table"),
    ],
)
def test_a_key_column_that_cannot_be_one_is_refused(key, said):
    tables = dataclasses.replace(TABLES, key=key)
    with pytest.raises(errors.TableSelectionError, match=said):
        split(Vocabulary().state, tables)


def test_history_follows_an_id_and_omits_steps_at_which_its_row_had_another(tmp_path):
    run = Vocabulary()
    with with_wal(tmp_path) as saving:
        states = run.run(saving, 2, 4, 6, 8, last=8, spare=40)
    column = {
        step: vocab.ids_of(np.asarray(state["keys"]["users"])) for step, state in states.items()
    }
    assert_array_equal(column[8], run.keys["users"].column())
    values = np.asarray(states[8]["tables"]["users"])
    ck = inspect.open(tmp_path)
    table = ck.at(8).tables["tables/users"]
    assert_array_equal(vocab.ids_of(np.asarray(table.key)), column[8])
    ids = column[8][column[8] != -1]
    rows = table.rows_of(ids)
    assert_array_equal(column[8][rows], ids)
    assert_array_equal(table[rows], values[rows])
    found = ck.history("users", ids=ids)
    assert set(found.steps.tolist()) >= {2, 4, 6, 8}
    for number, step in enumerate(found.steps.tolist()):
        assert_array_equal(found.present[number], column[step][rows] == ids)
    assert not found.present.all()
    lines = json.loads(command("history", tmp_path, "users", "--id", ids[3], "--json").stdout)
    assert {line["id"] for line in lines} == {int(ids[3])}
    assert [line["step"] for line in lines] == found.steps[found.present[:, 3]].tolist()
    changed = ck.diff(6, 8)["users"]
    assert_array_equal(changed.ids, column[8][changed.rows])
    row = int(changed.largest(1)[0])
    shown = command("diff", tmp_path, 6, 8, "--table", "users", "--largest", 1).stdout
    assert f"rows that changed most: {row} (id {column[8][row]})" in shown
    gone = int(np.setdiff1d(column[2], column[8])[0])
    with pytest.raises(errors.TemplateMismatch, match=f"found {gone}, which has none"):
        ck.history("users", ids=gone)
    with pytest.raises(errors.OptionError, match="either rows or ids"):
        ck.history("users")


def test_only_the_named_tables_have_ids():
    tables = dataclasses.replace(TABLES, key={"tables/users": "keys/{name}"})
    pieces = split(Vocabulary().state, tables)
    keys = {table.name: table.group for table in pieces.layout.tables}
    groups = pieces.layout.group_by_name
    assert groups[keys["tables/users"]].key.name == "slot.key"
    assert groups[keys["tables/items"]].key is None
    with pytest.raises(errors.OptionError, match="key: expected a path"):
        deltackpt.Tables(select="tables/*", key=3)


def codecs_in(step_dir: Any) -> set[str]:
    """The codecs of the rows in a step."""
    save = stored_saves.read_save(step_dir, "embeddings")
    segments = [segment for shard in save.shards() for segment in shard.record.segments]
    return {encoding.codec for segment in segments for encoding in segment.encodings}


#: Deltas of any size are staged, or none is.
STAGING = [1 << 30, 1]


@pytest.mark.parametrize("staging_bytes", STAGING)
@pytest.mark.parametrize("dtype", COLUMNS)
def test_evicted_rows_cost_their_row_index_only_and_restore_bit_for_bit(
    tmp_path, dtype, staging_bytes
):
    sizes, before = {}, Vocabulary(dtype, rows=20_000)
    before.step(1, batch=12_000, spare=0)
    for zero in (True, False):
        root, run = tmp_path / str(zero), Vocabulary(dtype, rows=20_000)
        writes = deltackpt.WriteOptions(staging_bytes=staging_bytes)
        with manager(root, writes=writes) as saving:
            run.save_with_evictions(saving, zero=zero)
            assert_same(saving.restore(2, run.state).state, run.state)
        sizes[zero] = sum(path.stat().st_size for path in (root / "2").rglob("layer.*"))
        assert codecs_in(root / "2") == ({"raw", "zeros", "ones"} if zero else {"raw"})
        assert inventory.verify_step(root / "2") == []
    evicted = sum(len(before.keys[name]) - len(run.keys[name]) for name in run.keys)
    # 8 float32, an int32 slot, an id.
    row_bytes = WIDTH * 4 + 4 + (8 if dtype is np.uint32 else 4)
    assert evicted > 6000 and sizes[False] - sizes[True] > 0.97 * evicted * row_bytes


def test_rows_and_ids_that_are_sharded_alike_have_tombstones_too(tmp_path):
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def placed(state: dict[str, Any]) -> dict[str, Any]:
        rows = {name: state[name] for name in ("tables", "uses", "keys")}
        return {**state, **jax.device_put(rows, sharded)}

    run = Vocabulary(rows=20_000)
    with manager(tmp_path) as saving:
        run.step(1, batch=12_000, spare=0)
        saving.save(1, placed(run.state), touched=run.touched)
        run.step(2, batch=500, spare=4000)
        assert saving.save(2, placed(run.state), touched=run.touched).kind == "delta"
        saving.wait_until_finished()
        assert "zeros" in codecs_in(tmp_path / "2")
        assert_same(saving.restore(2, placed(run.state)).state, placed(run.state))


@pytest.mark.parametrize("staging_bytes", STAGING)
def test_rows_that_are_gathered_on_an_accelerator_have_tombstones_too(tmp_path, staging_bytes):
    run, writes = Vocabulary(rows=20_000), deltackpt.WriteOptions(staging_bytes=staging_bytes)
    not_on_host = mock.patch.object(capture, "on_host", lambda array: False)
    with not_on_host, manager(tmp_path, writes=writes) as saving:
        run.save_with_evictions(saving)
        assert "zeros" in codecs_in(tmp_path / "2")
        assert_same(saving.restore(2, run.state).state, run.state)


def test_a_row_that_gets_an_id_again_has_its_new_values(tmp_path):
    run = Vocabulary(rows=20_000)
    run.step(0, batch=12_000, spare=600)
    with with_wal(tmp_path) as saving:
        states = run.run(saving, 1, 3, 6, last=8, batch=300, spare=600)
    assert "zeros" in codecs_in(tmp_path / "6")
    ck = inspect.open(tmp_path)
    for number in (1, 3, 6, 8):
        found = ck.at(number)
        for name, rows in states[number]["tables"].items():
            table = found.tables[f"tables/{name}"]
            assert_array_equal(np.asarray(table), rows)
            assert_array_equal(np.asarray(table.key), states[number]["keys"][name])
    compact.compact(tmp_path, step=6)
    shutil.rmtree(tmp_path / "3")
    assert_restores(tmp_path, 6, states[6], states[8])
    assert not verify.verify_root(tmp_path).problems


def test_tombstones_cover_no_row_of_a_base():
    rows = 1 << 40
    spec = FieldSpec(name="values", trailing=(4,), dtype="float32")
    made = made_up_saves.record(SaveId("a" * 32, 1, 1), rows=made_up_saves.ROWS)
    group = GroupEntry(name="g0", rows=rows, fields=(spec,))
    table = dataclasses.replace(made.tables[0], rows=rows)
    nothing = shard_writer.stored_field(
        "values", [], codec="zeros", reason="", bounds=np.array([0, rows])
    )
    whole = {"count": rows, "ranges": ((0, rows),), "arrays": ()}
    segment = dataclasses.replace(made.segments[0], **whole, encodings=(nothing.encoding,))
    changed = {"groups": (group,), "tables": (table,), "segments": (segment,)}
    with pytest.raises(errors.Damaged, match="expected row indices of tombstones"):
        bounds.check_head(dataclasses.replace(made, **changed), "manifest.0")
    planned = dataclasses.replace(group, fields=(dataclasses.replace(spec, codec="zeros"),))
    with pytest.raises(errors.Damaged, match="a codec with arrays"):
        bounds.check_head(dataclasses.replace(made, groups=(planned,)), "manifest.0")
    with pytest.raises(errors.OptionError, match="codec 'zeros'"):
        deltackpt.Tables(select="tables/*", codec="zeros")


def test_a_table_that_grows_is_saved_as_a_delta_with_its_further_rows(tmp_path):
    run, states = Vocabulary(), {}
    with with_wal(tmp_path) as saving:
        for number in range(1, 9):
            if number in (4, 7):
                run.grow(3 * ROWS if number == 7 else 2 * ROWS)
            run.step(number)
            states[number] = run.state
            if number in (4, 8):  # append() saves a step if a table has grown.
                assert (run.append(saving, number).saved is None) == (number == 8)
                continue
            saved = run.save(saving, number)
            assert saved.kind == ("base" if number == 1 else "delta"), saved.reason
        saving.wait_until_finished()
        saving.wait_appended()
    assert not verify.verify_root(tmp_path).problems
    ck = inspect.open(tmp_path)
    users = np.asarray(states[7]["tables"]["users"])
    for number, state in states.items():
        if number < 8:
            assert_restores(tmp_path, number, state)
        found = np.asarray(ck.at(number)["tables/users"])
        assert_array_equal(found, np.asarray(state["tables"]["users"]))
    assert set(range(2 * ROWS, 3 * ROWS)) <= {*ck.touched(7)["tables/users"].tolist()}
    last = ck.history("users", rows=[3 * ROWS - 1, 5])
    assert_array_equal(last.values[last.steps.tolist().index(7)], users[[-1, 5]])
    compact.compact(tmp_path, step=7)
    shutil.rmtree(tmp_path / "4")
    assert_restores(tmp_path, 7, states[7], states[8])


OPERATIONS = st.one_of(
    # Few sizes: each costs compilations.
    st.tuples(st.just("grow"), st.sampled_from(["users", "items"]), st.sampled_from([1, 60, 300])),
    st.tuples(st.sampled_from(["save", "lose", "restart", "compact"])),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(OPERATIONS, min_size=4, max_size=14),
    st.sampled_from(["auto", "fingerprints"]),
    st.booleans(),
    st.sampled_from(STAGING),
)
def test_every_step_restores_whenever_tables_grow(operations, tracking, consecutive, staging_bytes):
    writes = deltackpt.WriteOptions(staging_bytes=staging_bytes)
    with tempfile.TemporaryDirectory() as root:
        check_growth(root, [("save",), *operations], tracking, consecutive, writes)


def check_growth(
    root: str,
    operations: list[Any],
    tracking: Any,
    consecutive: bool,
    writes: deltackpt.WriteOptions,
) -> None:
    """Runs operations, and compares every step that was saved with the state that it was given."""
    policy = policies.Consecutive() if consecutive else policies.OneShot()
    deltas = deltackpt.DeltaOptions(tracking=tracking, policy=policy)
    run, states, number = Vocabulary(rows=120), {}, 0
    saving = manager(root, deltas=deltas, writes=writes)

    def save() -> None:
        given = {} if tracking == "fingerprints" else {"touched": run.touched}
        saving.save(number, run.state, **given)

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: saving.close())
        for operation, *arguments in operations:
            number += 1
            run.step(number, batch=20, spare=3)
            if operation == "grow":
                name, rows = arguments
                run.grow(run.keys[name].capacity + rows, name)
                run.step(number + 1000, batch=20, spare=3)
            elif operation == "compact" and states:
                saving.wait_until_finished()
                compact.compact(root, step=max(states))
            elif operation == "restart" and states:
                saving.close()
                saving = manager(root, deltas=deltas, writes=writes)
                found = saving.restore_latest(states[max(states)])
                assert found.step == max(states)
                assert_same(found.state, states[found.step])
                run = Vocabulary(rows=1)
                run.restored(found.state, found.touched or run.new_marks(found.state))
                number = found.step
            elif operation == "lose":
                saving.wait_until_finished()
                with (
                    mock.patch.object(shard_writer, "write_manifest", side_effect=OSError("lost")),
                    contextlib.suppress(Exception),
                ):
                    save()
                    saving.wait_until_finished()
            else:
                save()
                states[number] = run.state
        saving.wait_until_finished()
        for step, state in states.items():
            assert_same(saving.restore(step, state).state, state)
        assert not verify.verify_root(root).problems


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_table_that_grows_restores_onto_other_devices(tmp_path, kind):
    mesh = jax.make_mesh((4,), ("rows",), (kind,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    run = Vocabulary()
    with manager(tmp_path) as saving:
        for number in (1, 2, 3):
            if number == 2:
                run.grow(2 * ROWS)
            run.step(number)
            sharded = {name: run.state[name] for name in ("tables", "uses", "keys")}
            state = {**run.state, **jax.device_put(sharded, rows)}
            marks = touched.grow(run.touched, {"users": state["tables"]["users"]})
            assert marks.stamps["tables/users"].sharding.is_equivalent_to(rows, 1)
            saved = saving.save(number, state, touched=marks)
            assert saved.kind == ("base" if number == 1 else "delta"), saved.reason
        saving.wait_until_finished()
        assert_same(saving.restore(3, run.state).state, run.state)
        assert_same(saving.restore(3, state).state, state)


def test_a_delta_without_the_rows_by_which_a_table_grew_is_damaged(tmp_path):
    run = Vocabulary()
    with manager(tmp_path) as saving:
        run.step(1)
        run.save(saving, 1)
        run.grow(2 * ROWS)
        run.step(2)
        with mock.patch.object(Layout, "new_rows_since", lambda *layouts: {}):
            assert run.save(saving, 2).kind == "delta"
        saving.wait_until_finished()
        with pytest.raises(
            errors.Damaged, match=r"rows \(400, 800\), which its parent does not have"
        ):
            saving.restore(2, run.state)


def test_a_table_that_another_one_follows_in_its_group_grows_with_a_base(tmp_path):
    tables = deltackpt.Tables(select="tables/*")
    state = {"tables": {name: jnp.ones((8, 2)) for name in ("a", "b")}}
    marks = touched.init({f"tables/{name}": rows for name, rows in state["tables"].items()})
    with manager(tmp_path, tables) as saving:
        saving.save(1, state, touched=marks)
        for step, (name, kind) in enumerate([("b", "delta"), ("a", "base")], 2):
            larger = jnp.concatenate([state["tables"][name], jnp.full((4, 2), step)])
            state = {"tables": {**state["tables"], name: larger}}
            marks = touched.mark(touched.grow(marks, {name: larger}), {})
            saved = saving.save(step, state, touched=marks)
            assert saved.kind == kind, saved.reason
            saving.wait_until_finished()
            assert_same(saving.restore(step, state).state, state)


def test_stamps_cannot_shrink():
    marks = touched.init({"users": jnp.zeros((8, 2))})
    with pytest.raises(errors.TrackingError, match="at least 8 rows.*has 7"):
        touched.grow(marks, {"users": jnp.zeros((7, 2))})
    with pytest.raises(errors.TrackingError, match="no table 'items'"):
        touched.grow(marks, {"items": jnp.zeros((9, 2))})
