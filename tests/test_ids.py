# SPDX-License-Identifier: Apache-2.0
"""Tables with a key column: saved with their rows, checked at a restore, looked up by id."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import made_up_saves
import model
import numpy as np
import pytest
from command import run as command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import deltackpt
from deltackpt import inspect, policies, touched, vocab
from deltackpt.errors import (
    Damaged,
    DamagedKeys,
    OptionError,
    TableSelectionError,
    TemplateMismatch,
    TrackingError,
)
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.format.row_blocks import FieldSpec, GroupEntry
from deltackpt.handlers import split
from deltackpt.maintenance import compact, verify
from deltackpt.reading import bounds, inventory, stored_saves
from deltackpt.save import capture
from deltackpt.storage import parts as storage_parts
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
                held = self.state[kind][name]
                more = jnp.full((rows - len(held), *held.shape[1:]), 0, held.dtype)
                self.state[kind] = {**self.state[kind], name: jnp.concatenate([held, more])}
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


def manager(root: Any, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root, handlers={"embeddings": TABLES}, options=deltackpt.ManagerOptions(**options)
    )


@pytest.mark.parametrize("dtype", COLUMNS)
@pytest.mark.parametrize("zero", [True, False])
def test_a_run_that_was_killed_continues_with_the_ids_of_one_that_was_not(tmp_path, dtype, zero):
    run, lost = Vocabulary(dtype), Vocabulary(dtype)
    options = {"wal": deltackpt.WalOptions()}
    with manager(tmp_path, **options) as saving:
        for number in range(1, 13):
            lost.step(number, zero=zero)
            if number in (1, 4, 8):
                saving.save(number, lost.state, touched=lost.touched)
            elif number < 11:
                saving.append(number, lost.state, touched=lost.touched)
        saving.wait_appended()
    for number in range(1, 11):
        run.step(number, zero=zero)
    with manager(tmp_path, **options) as resumed:
        found = resumed.restore_latest(Vocabulary(dtype).state)
        assert found.step == 10 and found.chain[-2:] == (4, 8)
        assert_same(found.state, run.state)
        back = Vocabulary(dtype)
        back.restored(found.state, found.touched)
        for number in range(11, 15):
            run.step(number, zero=zero)
            back.step(number, zero=zero)
            assert_same(back.state, run.state)
        saved = resumed.save(14, back.state, touched=back.touched)
        assert saved.kind == "delta"
    with manager(tmp_path) as third:
        assert_same(third.restore(14, run.state).state, run.state)


def test_ids_are_exact_whatever_the_codecs_of_their_table(tmp_path):
    lossy = dataclasses.replace(
        TABLES, codec=deltackpt.policies.CodecChoice(delta="int8", base="bf16"), slots={}
    )
    run = Vocabulary()
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": lossy}) as saving:
        for number in (1, 2, 3):
            run.step(number)
            model.commit(saving, number, run.state, touched=run.touched)
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
            saving.save(number, run.state, touched=run.touched)
    verdicts = verify.verify_root(tmp_path).steps
    assert [verdict.restorable for verdict in verdicts] == [True, False]
    with manager(tmp_path) as restoring:
        twice = int(vocab.ids_of(np.asarray(run.state["keys"]["users"]))[5])
        with pytest.raises(DamagedKeys, match=f"table tables/users.*id {twice} in rows 5 and 7"):
            restoring.restore(2, run.state)
        with pytest.warns(UserWarning, match="step 2 is skipped"):
            assert restoring.restore_latest(run.state).step == 1


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
    with pytest.raises(TableSelectionError, match=said):
        split(Vocabulary().state, tables)


def test_history_follows_an_id_and_omits_steps_at_which_its_row_had_another(tmp_path):
    run, column = Vocabulary(), {}
    with manager(tmp_path, wal=deltackpt.WalOptions()) as saving:
        for number in range(1, 9):
            run.step(number, spare=40)
            column[number] = run.keys["users"].column()
            values = np.asarray(run.state["tables"]["users"])
            if number % 2:
                saving.append(number, run.state, touched=run.touched)
            else:
                model.commit(saving, number, run.state, touched=run.touched)
    ck = inspect.open(tmp_path)
    table = ck.at(8).tables["tables/users"]
    np.testing.assert_array_equal(vocab.ids_of(np.asarray(table.key)), column[8])
    ids = column[8][column[8] != -1]
    rows = table.rows_of(ids)
    np.testing.assert_array_equal(column[8][rows], ids)
    np.testing.assert_array_equal(table[rows], values[rows])
    found = ck.history("users", ids=ids)
    assert set(found.steps.tolist()) >= {2, 4, 6, 8}
    for number, step in enumerate(found.steps.tolist()):
        np.testing.assert_array_equal(found.present[number], column[step][rows] == ids)
    assert not found.present.all()
    lines = json.loads(command("history", tmp_path, "users", "--id", ids[3], "--json").stdout)
    assert {line["id"] for line in lines} == {int(ids[3])}
    assert [line["step"] for line in lines] == found.steps[found.present[:, 3]].tolist()
    changed = ck.diff(6, 8)["users"]
    np.testing.assert_array_equal(changed.ids, column[8][changed.rows])
    row = int(changed.largest(1)[0])
    shown = command("diff", tmp_path, 6, 8, "--table", "users", "--largest", 1).stdout
    assert f"rows that changed most: {row} (id {column[8][row]})" in shown
    gone = int(np.setdiff1d(column[2], column[8])[0])
    with pytest.raises(TemplateMismatch, match=f"found {gone}, which has none"):
        ck.history("users", ids=gone)
    with pytest.raises(OptionError, match="either rows or ids"):
        ck.history("users")


def test_only_the_named_tables_have_ids():
    tables = dataclasses.replace(TABLES, key={"tables/users": "keys/{name}"})
    parts = split(Vocabulary().state, tables)
    keys = {table.name: table.group for table in parts.layout.tables}
    groups = parts.layout.group_by_name
    assert groups[keys["tables/users"]].key.name == "slot.key"
    assert groups[keys["tables/items"]].key is None
    with pytest.raises(OptionError, match="key: expected a path"):
        deltackpt.Tables(select="tables/*", key=3)


def layer_bytes(step_dir: Any) -> int:
    return sum(path.stat().st_size for path in step_dir.rglob("layer.*"))


def codecs_in(step_dir: Any) -> set[str]:
    """The codecs of the rows in a step."""
    save = stored_saves.read_save(step_dir, "embeddings")
    segments = [segment for part in save.parts() for segment in part.record.segments]
    return {encoding.codec for segment in segments for encoding in segment.encodings}


@pytest.mark.parametrize("dtype", COLUMNS)
def test_evicted_rows_cost_their_row_index_only_and_restore_bit_for_bit(tmp_path, dtype):
    sizes = {}
    for zero in (True, False):
        root = tmp_path / str(zero)
        with manager(root) as saving:
            run = Vocabulary(dtype, rows=20_000)
            run.step(1, batch=12_000, spare=0)
            saving.save(1, run.state, touched=run.touched)
            before = sum(map(len, run.keys.values()))
            run.step(2, batch=500, spare=4000, zero=zero)
            assert saving.save(2, run.state, touched=run.touched).kind == "delta"
            saving.wait_until_finished()
            assert_same(saving.restore(2, run.state).state, run.state)
        sizes[zero] = layer_bytes(root / "2")
        assert codecs_in(root / "2") == ({"raw", "zeros", "ones"} if zero else {"raw"})
        assert inventory.verify_step(root / "2") == []
    evicted = before - sum(map(len, run.keys.values()))
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


def test_rows_that_are_gathered_on_an_accelerator_have_tombstones_too(tmp_path):
    run = Vocabulary(rows=20_000)
    with mock.patch.object(capture, "on_host", lambda array: False), manager(tmp_path) as saving:
        run.step(1, batch=12_000, spare=0)
        saving.save(1, run.state, touched=run.touched)
        run.step(2, batch=500, spare=4000)
        model.commit(saving, 2, run.state, touched=run.touched)
        assert "zeros" in codecs_in(tmp_path / "2")
        assert_same(saving.restore(2, run.state).state, run.state)


def test_a_row_that_gets_an_id_again_has_its_new_values(tmp_path):
    run, states = Vocabulary(rows=20_000), {}
    with manager(tmp_path, wal=deltackpt.WalOptions()) as saving:
        for number in range(1, 9):
            run.step(number, batch=12_000 if number == 1 else 300, spare=600)
            states[number] = run.state
            if number in (1, 3, 6):
                saving.save(number, run.state, touched=run.touched)
            else:
                saving.append(number, run.state, touched=run.touched)
        saving.wait_appended()
    assert "zeros" in codecs_in(tmp_path / "6")
    ck = inspect.open(tmp_path)
    for number in (1, 3, 6, 8):
        found = ck.at(number)
        for name, rows in states[number]["tables"].items():
            np.testing.assert_array_equal(np.asarray(found.tables[f"tables/{name}"]), rows)
            key = np.asarray(found.tables[f"tables/{name}"].key)
            np.testing.assert_array_equal(key, states[number]["keys"][name])
    compact.compact(tmp_path, step=6)
    shutil.rmtree(tmp_path / "3")
    with manager(tmp_path, access="read") as restoring:
        assert_same(restoring.restore(6, states[6]).state, states[6])
        assert_same(restoring.restore_latest(states[6]).state, states[8])
    assert not verify.verify_root(tmp_path).problems


def test_tombstones_cover_no_row_of_a_base():
    rows = 1 << 40
    spec = FieldSpec(name="values", trailing=(4,), dtype="float32")
    made = made_up_saves.record(SaveId("a" * 32, 1, 1), rows=made_up_saves.ROWS)
    group = GroupEntry(name="g0", rows=rows, fields=(spec,))
    table = dataclasses.replace(made.tables[0], rows=rows)
    nothing = storage_parts.stored_field(
        "values",
        storage_parts.StoredArrays((), 0),
        codec="zeros",
        reason="",
        bounds=np.array([0, rows]),
    )
    segment = dataclasses.replace(
        made.segments[0],
        count=rows,
        ranges=((0, rows),),
        arrays=(),
        encodings=(nothing.encoding,),
    )
    changed = {"groups": (group,), "tables": (table,), "segments": (segment,)}
    with pytest.raises(Damaged, match="expected row indices of tombstones"):
        bounds.check_head(dataclasses.replace(made, **changed), "manifest.0")
    planned = dataclasses.replace(group, fields=(dataclasses.replace(spec, codec="zeros"),))
    with pytest.raises(Damaged, match="a codec with arrays"):
        bounds.check_head(dataclasses.replace(made, groups=(planned,)), "manifest.0")
    with pytest.raises(OptionError, match="codec 'zeros'"):
        deltackpt.Tables(select="tables/*", codec="zeros")


def train_until_killed(root: str) -> None:
    """Saves and appends ten steps, then dies in the next save."""
    run = Vocabulary()
    with manager(root, wal=deltackpt.WalOptions()) as saving:
        for number in range(1, 11):
            run.step(number)
            if number in (1, 6):
                saving.save(number, run.state, touched=run.touched)
            else:
                saving.append(number, run.state, touched=run.touched)
        saving.wait_until_finished()
        saving.wait_appended()
        run.step(11)
        saving.save(11, run.state, touched=run.touched, force_base=True)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_a_process_that_is_killed_resumes_with_the_same_rows(tmp_path):
    code = f"import test_ids; test_ids.train_until_killed({str(tmp_path)!r})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False)
    assert ended.returncode == -signal.SIGKILL
    run, back = Vocabulary(), Vocabulary()
    with manager(tmp_path, wal=deltackpt.WalOptions()) as resumed:
        found = resumed.restore_latest(back.state)
        assert found.step in (10, 11)
        back.restored(found.state, found.touched)
        for number in range(1, 21):
            run.step(number)
            if number > found.step:
                back.step(number)
                resumed.append(number, back.state, touched=back.touched)
        assert_same(back.state, run.state)


def test_a_table_that_grows_is_saved_as_a_delta_with_its_further_rows(tmp_path):
    run, states = Vocabulary(), {}
    with manager(tmp_path, wal=deltackpt.WalOptions()) as saving:
        for number in range(1, 9):
            if number in (4, 7):
                run.grow(3 * ROWS if number == 7 else 2 * ROWS)
            run.step(number)
            states[number] = run.state
            if number in (4, 8):  # append() saves a step if a table has grown.
                found = saving.append(number, run.state, touched=run.touched)
                assert (found.saved is None) == (number == 8)
                continue
            saved = saving.save(number, run.state, touched=run.touched)
            assert saved.kind == ("base" if number == 1 else "delta"), saved.reason
        saving.wait_until_finished()
        saving.wait_appended()
    assert not verify.verify_root(tmp_path).problems
    ck = inspect.open(tmp_path)
    users = np.asarray(states[7]["tables"]["users"])
    for number, state in states.items():
        if number < 8:
            with manager(tmp_path, access="read") as restoring:
                assert_same(restoring.restore(number, state).state, state)
        found = ck.at(number)["tables/users"]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(state["tables"]["users"]))
    assert set(range(2 * ROWS, 3 * ROWS)) <= {*ck.touched(7)["tables/users"].tolist()}
    last = ck.history("users", rows=[3 * ROWS - 1, 5])
    np.testing.assert_array_equal(last.values[last.steps.tolist().index(7)], users[[-1, 5]])
    compact.compact(tmp_path, step=7)
    shutil.rmtree(tmp_path / "4")
    with manager(tmp_path, access="read") as restoring:
        assert_same(restoring.restore(7, states[7]).state, states[7])
        assert_same(restoring.restore_latest(states[8]).state, states[8])


OPERATIONS = st.one_of(
    st.tuples(st.just("grow"), st.sampled_from(["users", "items"]), st.integers(1, 300)),
    st.tuples(st.sampled_from(["save", "lose", "restart", "compact"])),
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(OPERATIONS, min_size=4, max_size=14),
    st.sampled_from(["auto", "fingerprints"]),
    st.booleans(),
)
def test_every_step_restores_whenever_tables_grow(operations, tracking, consecutive):
    with tempfile.TemporaryDirectory() as root:
        check_growth(root, [("save",), *operations], tracking, consecutive)


def check_growth(root: str, operations: list[Any], tracking: Any, consecutive: bool) -> None:
    """Runs operations, and compares every step that was saved with the state that it was given."""
    policy = policies.Consecutive() if consecutive else policies.OneShot()
    deltas = deltackpt.DeltaOptions(tracking=tracking, policy=policy)
    run, states, number = Vocabulary(rows=120), {}, 0
    saving = manager(root, deltas=deltas)

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
                saving = manager(root, deltas=deltas)
                found = saving.restore_latest(states[max(states)])
                assert found.step == max(states)
                assert_same(found.state, states[found.step])
                run = Vocabulary(rows=1)
                run.restored(found.state, found.touched or run.new_marks(found.state))
                number = found.step
            elif operation == "lose":
                saving.wait_until_finished()
                with (
                    mock.patch.object(storage_parts, "finish", side_effect=OSError("lost")),
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
        saving.save(1, run.state, touched=run.touched)
        run.grow(2 * ROWS)
        run.step(2)
        with mock.patch.object(Layout, "new_rows_since", lambda *layouts: {}):
            assert saving.save(2, run.state, touched=run.touched).kind == "delta"
        saving.wait_until_finished()
        with pytest.raises(Damaged, match=r"rows \(400, 800\), which its parent does not have"):
            saving.restore(2, run.state)


def test_a_table_that_another_one_follows_in_its_group_grows_with_a_base(tmp_path):
    tables = deltackpt.Tables(select="tables/*")
    state = {"tables": {name: jnp.ones((8, 2)) for name in ("a", "b")}}
    marks = touched.init({f"tables/{name}": rows for name, rows in state["tables"].items()})
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as saving:
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
    with pytest.raises(TrackingError, match="at least 8 rows.*has 7"):
        touched.grow(marks, {"users": jnp.zeros((7, 2))})
    with pytest.raises(TrackingError, match="no table 'items'"):
        touched.grow(marks, {"items": jnp.zeros((9, 2))})
