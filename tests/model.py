# SPDX-License-Identifier: Apache-2.0
"""The kit's states, the placements of their arrays, and what lossy codecs make of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from deltackpt import codecs
from deltackpt.save import encode
from deltackpt.testing.states import (
    ROWS,
    SELECT,
    SLOTS,
    WIDTH,
    assert_same,
    initial,
    like,
    move,
    new_touched,
    start,
    train,
)

__all__ = [
    "ROWS",
    "SELECT",
    "SLOTS",
    "WIDTH",
    "assert_same",
    "assert_same_or_decoded",
    "before_first_call",
    "commit",
    "decoded",
    "initial",
    "like",
    "move",
    "moved",
    "new_touched",
    "placements",
    "start",
    "train",
]


def commit(manager: Any, *what: Any, **how: Any) -> None:
    """Saves a step and waits until it is committed."""
    manager.save(*what, **how)
    manager.wait_until_finished()


@contextlib.contextmanager
def before_first_call(where: Any, name: str, act: Callable[..., object]) -> Iterator[None]:
    """Calls ``act`` with the arguments of the first call of a function, before the function."""
    real, first = getattr(where, name), iter([True])

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(first, False):
            act(*args)
        return real(*args, **kwargs)

    with mock.patch.object(where, name, call):
        yield


def placements(tree: object) -> list[object]:
    """Whether each array is committed, and its sharding."""
    return [(leaf.committed, leaf.sharding) for leaf in jax.tree.leaves(tree)]


def moved(*states: dict[str, Any]) -> dict[str, np.ndarray]:
    """The rows of each table that differ between two consecutive states."""
    found = {}
    for name in states[0]["tables"]:
        tables = [np.asarray(state["tables"][name]) for state in states]
        differs = [(one != next_one).any(axis=1) for one, next_one in itertools.pairwise(tables)]
        found[name] = np.flatnonzero(np.any(differs, axis=0))
    return found


def decoded(
    codec: str,
    rows: np.ndarray,
    encoder: Callable[[codecs.Codec, np.ndarray], encode.Encoded] = encode.on_host,
) -> np.ndarray:
    """Rows as a codec decodes them, each encoded by itself; rows it does not hold unchanged."""
    chosen, out = codecs.get(codec), np.empty_like(rows)
    for at in range(0, len(rows), 64):
        piece = rows[at : at + 64]
        encoded = encoder(chosen, piece)
        shapes = chosen.stored(rows.shape[1:], rows.dtype)
        chosen.decode(
            {key: np.asarray(encoded.arrays[key]).view(shapes[key].dtype) for key in shapes},
            out[at : at + 64],
        )
        missing = ~np.asarray(encoded.representable)
        out[at : at + 64][missing] = piece[missing]
    return out


def assert_same_or_decoded(found: dict, expected: dict, codec: str) -> None:
    """Like ``assert_same``, but a row of a table may also be what the codec decodes."""
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
