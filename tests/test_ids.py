# SPDX-License-Identifier: Apache-2.0
"""Tables with a key column: saved with their rows, checked at a restore, looked up by id."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from command import run as command

import deltackpt
from deltackpt import inspect, touched, vocab
from deltackpt.errors import DamagedKeys, OptionError, TableSelectionError, TemplateMismatch
from deltackpt.handlers import split
from deltackpt.testing.states import assert_same

ROWS, WIDTH, IDS = 400, 8, 1000
#: Column dtypes of ids, and the largest id of each.
COLUMNS = {np.int32: 2**31 - 1, np.uint32: 2**63 - 1}
TABLES = deltackpt.Tables(
    select="tables/*", slots={"tables/*": {"uses": "uses/{name}"}}, key="keys/{name}"
)


class Vocabulary:
    """A training state of two tables whose ids come and go, and its vocabularies."""

    def __init__(self, dtype: type = np.uint32):
        self.dtype, names = dtype, ("users", "items")
        self.keys = {name: vocab.RowKeys(ROWS) for name in names}
        self.state: dict[str, Any] = {
            "tables": {name: jnp.zeros((ROWS, WIDTH)) for name in names},
            "uses": {name: jnp.zeros(ROWS, jnp.int32) for name in names},
            "keys": {name: jnp.asarray(self.keys[name].column(dtype)) for name in names},
            "dense": jnp.zeros(3),
        }
        self.touched = touched.init(
            {f"tables/{name}": rows for name, rows in self.state["tables"].items()}
        )

    def restored(self, state: dict[str, Any], touch_state: Any) -> None:
        """Continues from a restored state: the vocabularies follow from their key columns."""
        self.state, self.touched = state, touch_state
        self.keys = {name: vocab.RowKeys.index(column) for name, column in state["keys"].items()}

    def step(self, seed: int, *, batch: int = 60, spare: int = 10, zero: bool = True) -> None:
        """Trains on some ids; evicts the least used rows for new ids, and ``spare`` more."""
        random = np.random.default_rng(seed)
        state, marked = {**self.state, "dense": self.state["dense"] + 1}, {}
        for name, keys in sorted(self.keys.items()):
            asked = random.integers(0, IDS, batch) * (COLUMNS[self.dtype] // IDS)
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
            saving.save(number, run.state, touched=run.touched)
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
            saving.save(number, run.state, touched=run.touched)
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
                saving.save(number, run.state, touched=run.touched)
                saving.wait_until_finished()
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
