# SPDX-License-Identifier: Apache-2.0
"""A small training state with tables, slots and dense leaves, and steps that change it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import touched
from deltackpt.format.naming import PyTree
from deltackpt.state.groups import CodecOption
from deltackpt.state.tables import Tables

ROWS = {"users": 700, "items": 300, "tiny": 5}
WIDTH = {"users": 8, "items": 8, "tiny": 4}
#: Selects the tables and their slots.
SELECT = "tables/*"
SLOTS = {f"tables/{name}": {"accumulator": f"slots/{name}"} for name in ROWS}


def tables(codec: CodecOption = "raw") -> Tables:
    """Returns the handler of the tables and slots of ``initial``."""
    return Tables(select=SELECT, slots=SLOTS, codec=codec)


def initial(seed: int = 0) -> dict[str, PyTree]:
    """Returns three tables of two widths, row-wise slots, and dense leaves of several kinds."""
    rng = np.random.default_rng(seed)
    return {
        "tables": {
            name: jnp.asarray(rng.normal(size=(rows, WIDTH[name])), jnp.float32)
            for name, rows in ROWS.items()
        },
        "slots": {name: jnp.asarray(rng.random(rows), jnp.float32) for name, rows in ROWS.items()},
        "dense": {"kernel": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "none": None},
        "key": jax.random.key(seed),
        "step": jnp.int32(0),
    }


def new_touched(state: dict[str, PyTree]) -> touched.TouchState:
    """Returns a TouchState for all tables, under their full names."""
    return touched.init({f"tables/{name}": leaf for name, leaf in state["tables"].items()})


def start() -> tuple[dict[str, PyTree], touched.TouchState]:
    """Returns ``initial()`` and its TouchState."""
    state = initial()
    return state, new_touched(state)


def move(
    state: dict[str, PyTree], seed: int, *, rows: int = 20
) -> tuple[dict[str, PyTree], dict[str, jax.Array]]:
    """Changes at most ``rows`` rows per table with their slots, and all dense leaves.

    ``seed`` determines the step. Returns the new state, and the int32 ids of the changed rows by
    the tables' full names.
    """
    rng = np.random.default_rng(seed)
    ids = {}
    tables, slots = dict(state["tables"]), dict(state["slots"])
    for name, count in ROWS.items():
        drawn = rng.integers(0, count, int(rng.integers(0, rows + 1)))
        if drawn.size == 0:
            continue
        change = rng.normal(size=(drawn.size, WIDTH[name])).astype(np.float32)
        # In numpy, with a constant number of ids: each other shape would be compiled anew.
        table, slot = np.array(tables[name]), np.array(slots[name])
        table[drawn] = change
        np.add.at(slot, drawn, 1.0)
        tables[name] = like(tables[name], table)
        slots[name] = like(slots[name], slot)
        ids[f"tables/{name}"] = jnp.asarray(np.resize(drawn, max(rows, 1)))
    moved = {
        **state,
        "tables": tables,
        "slots": slots,
        "dense": {"kernel": state["dense"]["kernel"] + 1, "none": None},
        "key": jax.random.fold_in(state["key"], seed),
        "step": state["step"] + 1,
    }
    return moved, ids


def like(array: jax.Array, values: np.ndarray) -> jax.Array:
    """Returns other values, placed like an array; uncommitted if it is."""
    return jax.device_put(values, array.sharding if array.committed else None)


def train(
    state: dict[str, PyTree], touch_state: touched.TouchState, seed: int, *, rows: int = 20
) -> tuple[dict[str, PyTree], touched.TouchState]:
    """Makes one step and marks its rows."""
    moved, ids = move(state, seed, rows=rows)
    return moved, touched.mark(touch_state, ids)


def assert_same(found: object, expected: object) -> None:
    """Asserts that two states have the same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert left.dtype == right.dtype, name
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        left, right = np.asarray(left), np.asarray(right)
        assert left.shape == right.shape, name
        assert left.tobytes() == right.tobytes(), name
