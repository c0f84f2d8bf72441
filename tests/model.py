# SPDX-License-Identifier: Apache-2.0
"""A small training state and the model of it that tests keep in memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import codecs, touched
from deltackpt.save import encode

ROWS = {"users": 700, "items": 300, "tiny": 5}
WIDTH = {"users": 8, "items": 8, "tiny": 4}

#: How the tests' tables and slots are chosen.
SELECT = "tables/*"
SLOTS = {f"tables/{name}": {"accumulator": f"slots/{name}"} for name in ROWS}


def initial(seed: int = 0) -> dict:
    """Three tables of two widths, row-wise slots, and dense leaves of several kinds."""
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


def new_touched(state: dict) -> touched.TouchState:
    """A TouchState for all tables, under their full names."""
    return touched.init({f"tables/{name}": leaf for name, leaf in state["tables"].items()})


def move(state: dict, seed: int, *, rows: int = 20) -> tuple[dict, dict[str, jax.Array]]:
    """One step: some rows of some tables change with their slots, and all dense leaves do.

    Returns:
      The state after it, and the ids of the rows that changed, by the tables' full names.
    """
    rng = np.random.default_rng(seed)
    ids = {}
    tables, slots = dict(state["tables"]), dict(state["slots"])
    for name, count in ROWS.items():
        drawn = rng.integers(0, count, int(rng.integers(0, rows + 1)))
        if drawn.size == 0:
            continue
        change = rng.normal(size=(drawn.size, WIDTH[name])).astype(np.float32)
        # In numpy, and ids of one size: each other number of ids would be compiled anew.
        table, slot = np.array(tables[name]), np.array(slots[name])
        table[drawn] = change
        np.add.at(slot, drawn, 1.0)
        tables[name] = jax.device_put(table, getattr(tables[name], "sharding", None))
        slots[name] = jax.device_put(slot, getattr(slots[name], "sharding", None))
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


def train(
    state: dict, touch_state: touched.TouchState, seed: int, *, rows: int = 20
) -> tuple[dict, touched.TouchState]:
    """One step, and its rows marked."""
    moved, ids = move(state, seed, rows=rows)
    return moved, touched.mark(touch_state, ids)


def assert_same(found: dict, expected: dict) -> None:
    """Bit for bit equality of two states."""
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


def decoded(
    codec: str,
    rows: np.ndarray,
    encoder: Callable[[codecs.Codec, np.ndarray], encode.Encoded] = encode.on_host,
) -> np.ndarray:
    """What a codec makes of rows, each encoded by itself; rows it does not hold as they are."""
    chosen, out = codecs.get(codec), np.empty_like(rows)
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        encoded = encoder(chosen, part)
        shapes = chosen.stored(rows.shape[1:], rows.dtype)
        chosen.decode(
            {key: np.asarray(encoded.arrays[key]).view(shapes[key].dtype) for key in shapes},
            out[start : start + 64],
        )
        missing = ~np.asarray(encoded.held)
        out[start : start + 64][missing] = part[missing]
    return out


def assert_same_or_decoded(found: dict, expected: dict, codec: str) -> None:
    """As ``assert_same``, but a row of a table may also be what the codec makes of it."""
    tables = dict(expected["tables"])
    for name, table in tables.items():
        rows = np.asarray(table)
        if not codecs.get(codec).lossless:
            coded = decoded(codec, rows)
            restored = np.asarray(found["tables"][name])
            changed = (restored != rows).any(axis=1)
            assert restored[changed].tobytes() == coded[changed].tobytes(), name
            rows = np.where(changed[:, None], coded, rows)
        tables[name] = jnp.asarray(rows)
    assert_same(found, {**expected, "tables": tables})
