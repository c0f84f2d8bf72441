# SPDX-License-Identifier: Apache-2.0
"""Errors for the mistakes of new users name the remedy and lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from command import run
from flat_options import manager_options
from flax import nnx
from orbax.checkpoint import v1

import deltackpt
from deltackpt import interchange, touched
from deltackpt.errors import (
    ForeignDirectory,
    OptionError,
    TableSelectionError,
    TemplateMismatch,
    TrackingError,
)

STATE = {name: {"table": jnp.ones((4, 2))} for name in "ab"} | {"dense": jnp.ones(3)}
TABLES = deltackpt.Tables(select="*/table")


def manager(root: Path, handlers: Any = None, **options: Any) -> deltackpt.CheckpointManager:
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": TABLES} if handlers is None else handlers,
        options=manager_options(**options),
    )


def saved(root: Path, handlers: Any = None, **arguments: Any) -> Path:
    with manager(root, handlers) as saver:
        saver.save(1, STATE, **arguments)
    return root


def stock_saved(root: Path) -> Path:
    with ocp.CheckpointManager(root) as stock:
        stock.save(3, args=ocp.args.StandardSave(STATE))
    return root


@contextlib.contextmanager
def refused_unchanged(folder: Path, match: str) -> Iterator[None]:
    """A directory is refused, without advice about backups, and nothing in it changes."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(ForeignDirectory, match=match) as caught:
        yield
    assert "backup" not in str(caught.value)
    assert sorted(folder.rglob("*")) == before


# Directories.


def test_an_error_for_another_item_name_names_the_one_in_the_step(tmp_path):
    root = saved(tmp_path / "root", {"words": TABLES})
    match = r"found deltackpt's under the name 'words'; pass the manager handlers=\{'words': Tables"
    with refused_unchanged(root, match):
        manager(root)
    with manager(root, access="read") as reader:
        with refused_unchanged(root, match):
            reader.restore_latest(STATE)
        with refused_unchanged(root, match):
            reader.restore(1)


@pytest.mark.parametrize("access", ["write", "read"])
def test_an_error_for_steps_of_stock_orbax_suggests_import(tmp_path, access):
    root = stock_saved(tmp_path / "stock")
    match = rf"3: .* stock Orbax with the items \['default'\]; .*'deltackpt import {root} NEW_DIR"
    with refused_unchanged(root, match), manager(root, access=access) as reader:
        reader.restore_latest(STATE)
    interchange.import_orbax(root, tmp_path / "new", tables=TABLES)
    with manager(tmp_path / "new") as saver:
        assert saver.restore_latest(STATE).step == 3


def test_a_checkpoint_of_stock_orbax_is_not_a_directory_of_steps(tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "old", STATE)
    v1.save(tmp_path / "new", STATE)
    for name in ("old", "new"):
        with refused_unchanged(tmp_path, f"stock Orbax.*deltackpt import .*{name}"):
            manager(tmp_path / name)


def test_a_step_of_stock_orbax_among_ours_is_skipped_with_a_warning(tmp_path):
    root = stock_saved(saved(tmp_path / "root"))
    with manager(root, access="read") as reader:
        with pytest.warns(UserWarning, match=r"step 3 is skipped: .*stock Orbax"):
            found = reader.restore_latest(STATE)
    assert found.step == 1
    assert [step for step, _ in found.skipped] == [3]


# Templates.


@pytest.mark.parametrize(
    ("then", "now", "side"),
    [("*/table", "a/table", "by the manager's Tables"), ("a/table", "*/table", "in the step")],
    ids=["fewer", "more"],
)
def test_a_changed_select_is_named_as_such(tmp_path, then, now, side):
    root = saved(tmp_path / "root", {"embeddings": deltackpt.Tables(select=then)})
    with manager(root, {"embeddings": deltackpt.Tables(select=now)}) as reader:
        with pytest.raises(
            TemplateMismatch, match=rf"b/table.*dense leaf {side}.*another Tables\(select=.*a/table"
        ):
            reader.restore_latest(STATE)
        assert jax.tree.structure(reader.restore_latest().state) == jax.tree.structure(STATE)


def test_changed_slots_are_named_as_such(tmp_path):
    params = {"table": jnp.ones((4, 2))}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    found = deltackpt.Tables(select="params/table")
    none = deltackpt.Tables(select="params/table", slots={})
    for number, (then, now) in enumerate([(found, none), (none, found)]):
        with manager(tmp_path / str(number), {"embeddings": then}) as saver:
            saver.save(1, state)
        with manager(tmp_path / str(number), {"embeddings": now}) as reader:
            with pytest.raises(TemplateMismatch, match=r"dense leaf .*another Tables\(slots="):
                reader.restore_latest(state)


# Arguments.


@pytest.mark.parametrize(
    "handlers", [TABLES, [TABLES], "embeddings", {("a", TABLES)}], ids=lambda h: type(h).__name__
)
def test_an_error_for_handlers_that_are_not_a_mapping_shows_one(tmp_path, handlers):
    with pytest.raises(OptionError, match=r"handlers: expected a mapping.*\{'embeddings': Tables"):
        manager(tmp_path / "root", handlers)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "name",
    ["dense", "commit_success.txt", "_CHECKPOINT_METADATA", "digests.step.msgpack", "a/b", "", 3]
    + ["digests.step.0.msgpack", "..", "x.orbax-checkpoint-tmp", "é" * 128, "a\0", "\ud800"],
)
@pytest.mark.parametrize("ours", [False, True])
def test_a_reserved_item_name_is_refused(tmp_path, name, ours):
    handlers = {name: TABLES}
    if not ours:
        handlers = {"embeddings": TABLES, name: ocp.JsonCheckpointHandler()}
    with pytest.raises(OptionError, match=r"handlers\[.*reserved.*choose another name"):
        manager(tmp_path / "root", handlers)
    assert not (tmp_path / "root").exists()


def test_options_of_another_class_are_named(tmp_path):
    with pytest.raises(OptionError, match=r"deltackpt\.ManagerOptions.*CheckpointManagerOptions"):
        deltackpt.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions())


@pytest.mark.parametrize("given", [jnp.ones((4, 2)), [jnp.ones((4, 2))]], ids=["array", "list"])
def test_an_error_for_calls_without_a_mapping_shows_one(given):
    marks, ids = touched.init({"words": jnp.ones((4, 2))}), {"words": jnp.arange(2)}
    for call in (
        lambda: touched.init(given),
        lambda: touched.mark(marks, given),
        lambda: touched.mark(marks, ids, mask=given),
        lambda: touched.grow(marks, given),
    ):
        with pytest.raises(TrackingError, match=r"expected a mapping.*\{'words': array\}"):
            call()


def test_a_touch_state_of_other_tables_makes_no_row_doubtful(tmp_path):
    marks = touched.init({"a/table": jnp.ones((4, 2)), "b/table": jnp.ones((4, 2))})
    other = touched.init({"a/table": jnp.ones((9, 2)), "b/table": jnp.ones((4, 2))})
    with manager(tmp_path) as saver:
        saver.save(1, STATE, touched=marks)
        saver.wait_until_finished()
        with pytest.raises(TrackingError, match="expected 4 stamps, found 9"):
            saver.verify_tracking(STATE, touched=other)
        assert saver.next_save(STATE, touched=marks).kind == "delta"


def test_a_touch_state_of_another_class_is_refused(tmp_path):
    with manager(tmp_path) as saver, pytest.raises(OptionError, match=r"touched\.init.*dict"):
        marks: Any = {"a/table": jnp.zeros(4)}
        saver.save(1, STATE, touched=marks)


ITEMS = {"embeddings": TABLES, "json": ocp.JsonCheckpointHandler()}


@pytest.mark.parametrize(
    ("items", "match"),
    [
        ({"json": {"a": 1}}, r"items\['json'\]: expected JsonSaveArgs.*dict.*ocp\.args\.JsonSave"),
        ({"json": ocp.args.StandardSave({"a": 1})}, r"expected JsonSaveArgs.*StandardSaveArgs"),
        ({"json": ocp.args.JsonRestore()}, r"expected JsonSaveArgs.*JsonRestoreArgs"),
        ({"json": None}, r"expected JsonSaveArgs.*NoneType"),
        ({"other": ocp.args.StandardSave({})}, r"items\['other'\].*\['json'\].*handlers="),
        ({"embeddings": ocp.args.JsonSave({})}, r"items\['embeddings'\].*save\(step, state\)"),
        ({"dense": ocp.args.PyTreeSave({})}, r"items\['dense'\].*save\(step, state\)"),
        ({"embeddings": ocp.args.PyTreeSave({})}, r"items\['embeddings'\].*save\(step, state\)"),
        (
            {"x" * 256: ocp.args.JsonSave({})},
            r"items\['x+'\]: expected one of the items with a handler",
        ),
        ([1], r"items: expected a mapping.*list"),
        ({"json": ocp.args.JsonSave({"a": object()})}, r"items\['json'\].*a JSON value.*object"),
        ({"json": ocp.args.JsonSave({"a": jnp.ones(1)})}, r"items\['json'\].*x\.tolist"),
    ],
    ids=lambda given: "" if isinstance(given, str) else str(given)[:30],
)
def test_items_that_no_handler_accepts_are_refused_before_the_save_starts(tmp_path, items, match):
    with manager(tmp_path, ITEMS) as saver:
        with pytest.raises(OptionError, match=match):
            saver.save(1, STATE, items=items)
        assert saver.save(1, STATE, items={"json": ocp.args.JsonSave({"a": 1})}).kind == "base"


def test_items_that_no_handler_restores_are_refused(tmp_path):
    with manager(tmp_path, ITEMS) as saver:
        saver.save(1, STATE, items={"json": ocp.args.JsonSave({"a": 1})})
        saver.wait_until_finished()
        refused: Any = (
            ({"json": ocp.args.JsonSave({"a": 1})}, r"expected JsonRestoreArgs.*JsonSaveArgs"),
            ({"json": {"a": 1}}, r"expected JsonRestoreArgs.*dict"),
            ({"other": ocp.args.StandardRestore()}, r"items\['other'\].*handlers="),
            (["json"], "expected a mapping"),
        )
        for items, match in refused:
            with pytest.raises(OptionError, match=match):
                saver.restore_latest(STATE, items=items)
        for args in (ocp.args.JsonRestore(), None):
            assert saver.restore(1, STATE, items={"json": args}).items == {"json": {"a": 1}}


# Changes after save() has returned.


def test_a_json_item_that_is_changed_after_save_is_saved_as_it_was(tmp_path, monkeypatch):
    changed = threading.Event()
    write = ocp.JsonCheckpointHandler._save_fn

    async def write_late(handler: Any, value: Any, directory: Any) -> None:
        await asyncio.to_thread(changed.wait, 60)
        await write(handler, value, directory)

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", write_late)
    progress = {"epochs": [{"loss": 0.5}], "run": ("a", 1)}
    with manager(tmp_path, ITEMS) as saver:
        saver.save(1, STATE, items={"json": ocp.args.JsonSave(progress)})
        progress["epochs"][0]["loss"] = 7.0
        progress["epochs"].append({})
        progress["more"] = 1
        changed.set()
        saver.wait_until_finished()
        found = saver.restore(1, items={"json": ocp.args.JsonRestore()}).items["json"]
    assert found == {"epochs": [{"loss": 0.5}], "run": ["a", 1]}


@pytest.mark.parametrize("rows", [4, 400_000])
def test_values_changed_in_place_after_save_are_saved_as_they_were(tmp_path, rows):
    def ones() -> dict[str, Any]:
        return {"large": np.ones(rows), "list": [np.ones(2), np.array(1.0)]}

    handlers = {
        "embeddings": deltackpt.Tables(select="table", slots={"table": {"sum": "sum"}}),
        "standard": ocp.StandardCheckpointHandler(),
        "tree": ocp.PyTreeCheckpointHandler(),
        "array": ocp.ArrayCheckpointHandler(),
    }
    state = {"table": np.ones((rows, 2)), "sum": np.ones(rows), **ones()}
    standard, tree, array = ones(), ones(), np.ones(rows)
    marks = touched.init({"table": state["table"]})
    everything = (state, standard, tree, array)
    with manager(tmp_path, handlers) as saver:
        for step in (1, 2):  # A base and a delta of all rows.
            items = {
                "standard": ocp.args.StandardSave(standard),
                "tree": ocp.args.PyTreeSave(tree),
                "array": ocp.args.ArraySave(array),
            }
            saver.save(step, state, touched=marks, items=items)
            for leaf in jax.tree.leaves(everything):
                leaf[...] = 7
            for changed in (state, standard, tree):
                changed["list"].append(np.ones(1))
                changed["more"] = np.ones(1)
            saver.wait_until_finished()
            items = {
                "standard": ocp.args.StandardRestore(),
                "tree": ocp.args.PyTreeRestore(),
                "array": ocp.args.ArrayRestore(),
            }
            found = saver.restore(step, items=items)
            leaves = jax.tree.leaves((found.state, found.items))
            assert len(leaves) == 2 + 3 * 3 + 1
            assert all((np.asarray(leaf) == 1).all() for leaf in leaves)
            for leaf in jax.tree.leaves(everything):
                leaf[...] = 1
            for changed in (state, standard, tree):
                changed["list"].pop()
                del changed["more"]
            marks = touched.mark(marks, {"table": jnp.arange(rows)})


def test_an_export_of_an_nnx_state_explains_how_to_restore_it(tmp_path):
    class Model(nnx.Module):
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.embed = nnx.Embed(10, 4, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    handlers = {"embeddings": deltackpt.Tables(select="**/embedding")}
    model, other = nnx.state(Model(0)), nnx.state(Model(1))
    with manager(tmp_path / "run", handlers) as saver:
        saver.save(1, model)
    with pytest.warns(UserWarning, match=r"nnx\.to_pure_dict.*nnx\.restore_int_paths"):
        interchange.export_orbax(tmp_path / "run", None, tmp_path / "plain")
    with ocp.CheckpointManager(tmp_path / "plain") as stock:
        found = stock.restore(1, args=ocp.args.StandardRestore(nnx.to_pure_dict(other)))
    nnx.replace_by_pure_dict(other, nnx.restore_int_paths(found))
    jax.tree.map(np.testing.assert_array_equal, other, model)


# Slots that are saved as dense leaves.


def adam_state(rows: int = 40_000) -> dict[str, Any]:
    params = {"emb": jnp.ones((rows, 8)), "kernel": jnp.ones((rows, 8)), "bias": jnp.zeros(3)}
    return {"params": params, "opt_state": optax.adam(1e-3).init(params)}


@pytest.mark.parametrize(
    ("slots", "shown"),
    [
        ({}, ["opt_state/0/mu/emb", "opt_state/0/nu/emb"]),
        ({"params/emb": {"mu": "opt_state/0/mu/emb"}}, ["opt_state/0/nu/emb"]),
    ],
    ids=["none declared", "one declared"],
)
def test_slots_that_each_save_writes_whole_cause_one_warning(tmp_path, slots, shown):
    handlers = {"embeddings": deltackpt.Tables(select="params/emb", slots=slots)}
    state = adam_state()
    with manager(tmp_path, handlers) as saver:
        saver.restore_latest(state)
        with pytest.warns(UserWarning, match=r"MB of slots whole") as caught:
            saver.save(1, state)
        [warning] = caught
        assert [line.strip() for line in str(warning.message).splitlines()[1:-1]] == shown
        assert warning.filename == __file__
        saver.save(2, state)
        saver.save(3, {**state, "more": jnp.ones(2)})


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        (None, 40_000),
        ({"**": {"mu": "opt_state/0/mu/{name}", "nu": "opt_state/0/nu/{name}"}}, 40_000),
        ({}, 20),
    ],
    ids=["found", "declared", "small"],
)
def test_slots_that_are_saved_by_rows_or_small_cause_no_warning(tmp_path, slots, rows):
    handlers = {"embeddings": deltackpt.Tables(select="params/emb", slots=slots)}
    with manager(tmp_path, handlers) as saver, warnings.catch_warnings():
        warnings.simplefilter("error")
        saver.save(1, adam_state(rows))


# States without tables, and averages of tables.


@pytest.mark.parametrize("deltas", ["whole", "blocks"])
@pytest.mark.parametrize("handlers", [None, {"embeddings": deltackpt.Tables(select=())}])
def test_a_state_without_tables_is_saved_and_restored(tmp_path, handlers, deltas):
    state = {"w": jnp.arange(1000.0), "b": jnp.zeros(3), "none": None}
    dense = deltackpt.Dense(deltas=deltas)
    options = deltackpt.ManagerOptions(dense=dense, wal=deltackpt.WalOptions())
    kinds = []
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as saver:
        for step in range(3):
            state = {**state, "w": state["w"].at[step].add(1.0)}
            told = pytest.warns(UserWarning, match="4,096 rows, so the state has no table")
            with told if handlers is None and not step else warnings.catch_warnings():
                if handlers is not None or step:
                    warnings.simplefilter("error")
                kinds.append(saver.save(step, state).kind)
            saver.wait_until_finished()
        if deltas == "blocks":
            state = {**state, "w": state["w"].at[9].add(1.0)}
            assert saver.append(3, state).kind == "full"
            saver.wait_appended()
    assert kinds == ["base", *["delta" if deltas == "blocks" else "base"] * 2]
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as saver:
        found = saver.restore_latest(jax.tree.map(jnp.zeros_like, state))
        assert found.step == (3 if deltas == "blocks" else 2)
        jax.tree.map(np.testing.assert_array_equal, found.state, state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Each manager warns once.
            saver.save(found.step + 1, found.state)
    for command in ("ls", "show", "verify", "plan"):
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
    assert [*deltackpt.inspect.open(tmp_path).at().dense] == ["b", "none", "w"]


def test_an_explicit_pattern_must_match_a_table(tmp_path):
    with manager(tmp_path, {"embeddings": deltackpt.Tables(select="nowhere/*")}) as saver:
        with pytest.raises(TableSelectionError, match=r"matches nothing.*\n.*\n.*select=\(\)"):
            saver.save(0, {"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("select", "average", "told"),
    [
        ("params/*", "shadow/users", "a table too: Tables(select=[..., 'shadow/users'])"),
        (["params/*", "ema/*"], "ema/users", "ema.at[ids].set("),
        ("params/*", "shadow/others", None),
        (["params/*", "heads/*"], "heads/users", None),
    ],
    ids=["dense", "a table", "of another name", "two tables"],
)
def test_an_average_of_a_table_causes_a_warning_with_the_remedy(tmp_path, select, average, told):
    folder, name = average.split("/")
    table = jnp.ones((20_000, 16))
    state = {"params": {"users": table}, folder: {name: table * 0.5}}
    with manager(tmp_path, {"embeddings": deltackpt.Tables(select=select)}) as saver:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.save(0, state)
            saver.save(1, state, force_base=True)
    found = [str(one.message) for one in caught if "averages (EMA)" in str(one.message)]
    assert len(found) == (told is not None)
    if told is not None:
        assert told in found[0] and f"{average}, of table params/users" in found[0]
