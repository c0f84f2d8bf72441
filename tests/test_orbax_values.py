# SPDX-License-Identifier: Apache-2.0
"""Partial reads of an Orbax item: verified by blocks, like whole files."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import deltackpt
from deltackpt.errors import Damaged
from deltackpt.reading import orbax_values, stored_saves
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.storage import digests
from deltackpt.storage.digests import BLOCK_BYTES
from deltackpt.storage.store import store_path

#: Leaf sizes in bytes: around the block size, and around what a database node stores inline.
SIZES = (
    4,
    900,
    1100,
    5000,
    BLOCK_BYTES - 4,
    BLOCK_BYTES,
    BLOCK_BYTES + 12,
    3 * BLOCK_BYTES,
    1 << 20,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A step whose dense leaves are in one file of about two MiB."""
    rng = np.random.default_rng(0)
    state = {f"leaf{n}": jnp.asarray(rng.integers(0, 256, n, np.uint8)) for n in SIZES}
    root = tmp_path_factory.mktemp("dense") / "root"
    handlers = {"embeddings": deltackpt.Tables(select=())}
    with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
        manager.save(1, state)
    return root


def item(root: Path) -> OrbaxValues:
    return orbax_values.open_values(stored_saves.read_save(root / "1"))


def data_file(root: Path) -> Path:
    return max((root / "1" / "dense" / "d").iterdir(), key=lambda path: path.stat().st_size)


def test_a_partial_read_returns_the_same_values_and_reads_little_more(root):
    every = [key for key in item(root).keys() if not key[0]]
    whole, rng = item(root).read(every), np.random.default_rng(1)
    for count in (1, 1, 1, 2, 3, 5, len(every)):
        some = [every[i] for i in rng.choice(len(every), count, replace=False)]
        one = item(root)
        found = one.read(some)
        assert {key: bytes(data) for key, data in found.items()} == {
            key: bytes(whole[key]) for key in some
        }
        wanted = sum(data.nbytes for data in found.values())
        assert one.bytes_read <= min(
            wanted + 4 * count * BLOCK_BYTES, data_file(root).stat().st_size + 2**16
        )


def test_a_flipped_bit_is_never_read_and_does_not_affect_other_values(root):
    path, rng = data_file(root), np.random.default_rng(2)
    intact = path.read_bytes()
    every = [key for key in item(root).keys() if not key[0]]
    whole, raised, passed = item(root).read(every), 0, 0
    places = [*rng.integers(0, len(intact), 12), len(intact) - 1, len(intact) - 5]
    for place in map(int, places):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 4]) + intact[place + 1 :])
        for key in every:
            if key[1].endswith("/.zarray"):
                continue
            try:
                assert bytes(item(root).read([key])[key]) == bytes(whole[key]), (place, key)
                passed += 1
            except Damaged as error:
                assert "1/dense" in str(error)
                raised += 1
        with pytest.raises(Damaged):
            item(root).read(every)
        # ``verify`` finds it, wherever it is.
        assert digests.check_step_files(store_path(root / "1"), {})
    path.write_bytes(intact)
    assert raised and passed > raised
