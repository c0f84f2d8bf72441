# SPDX-License-Identifier: Apache-2.0
"""A unique path suffix identifies a table in every API that takes table names."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import deltackpt
from deltackpt import cli, interchange, touched
from deltackpt.errors import OptionError, TemplateMismatch, TrackingError
from deltackpt.format import naming
from deltackpt.inspect import plots

USERS, ITEMS = "params/tables/users", "params/tables/items"
OTHERS = "other/tables/items"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A base and two deltas; two of the tables share their last path component."""
    root = tmp_path_factory.mktemp("names") / "run"
    state = {
        "params": {"tables": {"users": jnp.ones((8, 2)), "items": jnp.ones((8, 2))}},
        "other": {"tables": {"items": jnp.ones((4, 2))}, "users": jnp.zeros(3)},
        "sums": {"users": jnp.zeros(8)},
    }
    tables = deltackpt.Tables(select="*/tables/*", slots={USERS: {"sum": "sums/users"}})
    marks = touched.init({USERS: jnp.ones((8, 2)), ITEMS: jnp.ones((8, 2)), OTHERS: jnp.ones(4)})
    with deltackpt.CheckpointManager(root, handlers={"embeddings": tables}) as manager:
        manager.save(0, state, touched=marks)
        for step in (1, 2):
            table = state["params"]["tables"]["users"].at[step].add(1.0)
            state["params"]["tables"]["users"] = table
            marks = touched.mark(marks, {"users": jnp.array([step])})
            manager.save(step, state, touched=marks)
    return root


def ambiguous(error: type[Exception]):
    return pytest.raises(error, match=rf"several\n +{OTHERS}\n +{ITEMS}\n.*more of the path")


def test_the_rule():
    names = [USERS, ITEMS, OTHERS, "users"]
    assert naming.meant("users", names, ValueError) == "users"
    assert naming.meant("tables/users", names, ValueError) == USERS
    assert naming.meant("params/tables/items", names, ValueError) == ITEMS
    assert naming.meant("sers", names, ValueError) == "sers"
    with ambiguous(ValueError):
        naming.meant("tables/items", names, ValueError)


def test_mark_accepts_path_suffixes(run):
    marks = touched.init({USERS: jnp.ones((8, 2)), ITEMS: jnp.ones((8, 2)), OTHERS: jnp.ones(4)})
    assert touched.mark(marks, {"users": jnp.array([3])}).stamps[USERS].tolist()[3] == 1
    with ambiguous(TrackingError):
        touched.mark(marks, {"items": jnp.array([3])})


def test_inspect_accepts_path_suffixes(run):
    ck = deltackpt.inspect.open(run)
    step = ck.at(2)
    assert step["tables/users"].name == USERS
    assert step["tables/users.slot.sum"][3] == 0
    assert step["other/users"].shape == (3,)
    assert "tables/users" in step and "nobody" not in step
    assert list(ck.touched(2, tables=["users"])) == [USERS]
    assert ck.touched(2, tables=["nobody"]) == {}
    history = ck.history("users", [1, 2])
    assert history.table == USERS
    assert history.values[:, 0, 0].tolist() == [1, 2, 2]
    diff = ck.diff(0, 2, tables=["users"])
    assert list(diff.tables) == [USERS]
    assert diff["users"].rows.tolist() == [1, 2]
    for call in (
        lambda: step["items"],
        lambda: "items" in step,
        lambda: ck.touched(2, tables=["items"]),
        lambda: ck.history("items", [1]),
        lambda: ck.diff(0, 2, tables=["items"]),
    ):
        with ambiguous(TemplateMismatch):
            call()


def test_an_exact_dense_leaf_name_is_not_taken_for_a_table_suffix(tmp_path):
    state = {"tables": {"words": jnp.ones((4, 2))}, "words": jnp.zeros(3)}
    tables = deltackpt.Tables(select="tables/words")
    with deltackpt.CheckpointManager(tmp_path, handlers={"embeddings": tables}) as manager:
        manager.save(0, state)
    step = deltackpt.inspect.open(tmp_path).at(0)
    assert step["words"].shape == (3,)
    assert "words" in step


def test_plots_accept_path_suffixes(run):
    ck = deltackpt.inspect.open(run)
    plots.activity(ck, "users")
    plots.drift(ck, "users")
    plots.touched_fraction(ck, tables=["users"])
    for draw in (plots.activity, plots.drift):
        with ambiguous(OptionError):
            draw(ck, "items")


def test_a_read_of_some_tables_accepts_path_suffixes(run):
    tables = deltackpt.Tables(select="*/tables/*", slots={USERS: {"sum": "sums/users"}})
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(
        run, handlers={"embeddings": tables}, options=options
    ) as manager:
        found = manager.read(2, {"users": (1, 3)}).tables
        assert list(found) == [USERS]
        assert np.asarray(found[USERS]["values"]).tolist() == [[2, 2], [2, 2]]
        with ambiguous(TemplateMismatch):
            manager.read(2, {"items": None})


def test_exports_accept_path_suffixes(run, tmp_path):
    done = interchange.export_parquet(run, None, tmp_path / "one", tables="users")
    assert done.files == ("params%2Ftables%2Fusers.parquet",)
    done = interchange.export_parquet(run, None, tmp_path / "all", tables=["**/items", "users"])
    assert len(done.files) == 3
    with ambiguous(TemplateMismatch):
        interchange.export_parquet(run, None, tmp_path / "none", tables="items")
    assert not (tmp_path / "none").exists()


def test_the_command_line_accepts_path_suffixes(run, tmp_path):
    def asked(*arguments: str) -> str:
        done = CliRunner().invoke(cli.cli, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    found = json.loads(asked("diff", str(run), "0", "2", "--table", "users", "--json"))
    assert list(found["tables"]) == [USERS]
    assert USERS in asked("history", str(run), "users", "1")
    target = str(tmp_path / "users")
    assert "1 file" in asked("export", "parquet", str(run), target, "--table", "users")
    with ambiguous(TemplateMismatch):
        asked("history", str(run), "items", "1")
