# SPDX-License-Identifier: Apache-2.0
"""A follower of deltas with dense blocks holds the same bits as a restore."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import model
import numpy as np
import pytest
from test_follower import Trainer, advanced, assert_holds, in_storage, opened
from test_follower_wal import Source

import deltackpt
from deltackpt.errors import RestoreError
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.maintenance.compact import compact
from deltackpt.reading import chains, dense_state, stored_dense
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.standby.follower import Follower
from deltackpt.testing import Disk, stored_chunks

CODECS = ["lossless", {"dense/wide": "ef4", "dense/weights": "ef8"}, {"dense/wide": "int8"}]


pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


class DenseTrainer(Trainer):
    """Trains dense leaves of several dtypes; one leaf does not change."""

    def __init__(self, root: Path, codec="lossless", **options):
        dense = deltackpt.Dense(deltas="blocks", codec=codec)
        super().__init__(root, dense=dense, **options)
        rng = np.random.default_rng(0)
        more = {
            "weights": jnp.asarray(rng.normal(size=(64, 301)), jnp.bfloat16),
            "wide": jnp.asarray(rng.normal(size=(300, 70)), jnp.float32),
            "frozen": jnp.asarray(rng.normal(size=(100, 100)), jnp.float32),
        }
        self.state = {**self.state, "dense": {**self.state["dense"], **more}}

    def train(self, rows: int = 20) -> None:
        super().train(rows)
        rng = np.random.default_rng(self.seed)
        dense = dict(self.state["dense"])
        weights = np.array(dense["weights"])
        weights.reshape(-1)[rng.integers(0, weights.size, 100)] += 0.01
        wide = np.asarray(dense["wide"]) + 1e-3 * rng.normal(size=(300, 70)).astype(np.float32)
        dense |= {"weights": jnp.asarray(weights), "wide": jnp.asarray(wide)}
        self.state = {**self.state, "dense": dense}


def dense_in_storage(root: Path, step: int) -> DenseValues:
    return stored_dense.open_values(chains.read_chain(root / str(step)))


def cached_files(one: Follower) -> dict[str, np.ndarray]:
    assert one.loaded is not None and one.loaded.files is not None
    files = one.loaded.files
    return {file.name: files.array(file) for file in files.index}


def assert_holds_dense(one: Follower, root: Path, step: int) -> None:
    found = dense_state.dense_of(cached_files(one), dense_state.STEP)
    expected = dense_in_storage(root, step)
    for kind in ("values", "files"):
        held, wanted = getattr(found, kind), getattr(expected, kind)
        assert held.keys() == wanted.keys()
        for key in wanted:
            assert bytes(held[key]) == bytes(wanted[key]), (step, key)


@pytest.mark.parametrize("codec", CODECS)
def test_dense_leaves_follow_base_deltas_and_base(tmp_path, codec):
    with DenseTrainer(tmp_path, codec) as trainer:
        trainer.save()
        one, late = opened(tmp_path), opened(tmp_path, 1, 2)
        for number in range(8):
            trainer.train()
            step = trainer.save(force_base=number == 4)
            advanced(one)
            assert_holds(one, step, in_storage(tmp_path, step))
            if number != 4:
                assert_holds_dense(one, tmp_path, step)
            if number in (3, 6):  # It finds several steps at once.
                advanced(late)
                assert_holds_dense(late, tmp_path, step)


def test_unchanged_values_are_not_read_again(tmp_path):
    with DenseTrainer(tmp_path) as trainer:
        trainer.save()
        one = opened(tmp_path)
        trainer.train()
        trainer.save()
        one.advance()
        trainer.train()
        step = trainer.save()
        with Disk(tmp_path) as disk:
            disk.on("read", lambda _: None, "^[12]/")
            assert one.advance()
        assert not disk.paths("read")
        assert_holds_dense(one, tmp_path, step)


def test_damaged_blocks_leave_the_held_step_unchanged(tmp_path):
    with DenseTrainer(tmp_path) as trainer:
        for _ in range(3):
            trainer.train()
            trainer.save()
        one = opened(tmp_path)
        one.advance()
        trainer.train()
        step = trainer.save()
        [*_, found] = stored_chunks(tmp_path / str(step), "blocks*")
        found.flip()
        advanced(one)
        assert one.loaded is not None and one.loaded.save.save_id.step == step - 1
        assert_holds_dense(one, tmp_path, step - 1)
        trainer.train()
        trainer.save()
        with contextlib.suppress(RestoreError):
            advanced(one)
        assert_holds_dense(one, tmp_path, step - 1)
        found.flip()
        one._tailer._refused.clear()
        advanced(one)
        assert_holds_dense(one, tmp_path, step + 1)


def test_leaves_with_another_shape_or_dtype_are_read_again(tmp_path):
    with DenseTrainer(tmp_path) as trainer:
        one = opened(tmp_path)
        for number in range(4):
            dense = dict(trainer.state["dense"])
            # The same bytes with another dtype, then with more rows.
            dense["frozen"] = dense["frozen"].view(jnp.int32) if number == 1 else dense["frozen"]
            dense["wide"] = dense["wide"] if number != 2 else jnp.tile(dense["wide"], (2, 1))
            trainer.state = {**trainer.state, "dense": dense}
            step = trainer.save()
            advanced(one)
            assert_holds(one, step, in_storage(tmp_path, step))
            if (tmp_path / str(step) / "dense").is_dir():
                assert "dense/manifest.ocdbt" in cached_files(one)
            else:
                assert_holds_dense(one, tmp_path, step)


def test_a_compacted_base_holds_the_values_of_its_deltas(tmp_path):
    with DenseTrainer(tmp_path, CODECS[1]) as trainer:
        for _ in range(4):
            trainer.train()
            trainer.save()
        one = opened(tmp_path)
        one.advance()
        expected = dense_in_storage(tmp_path, trainer.step)
        compact(tmp_path)
        late = opened(tmp_path)
        late.advance()
        for each in (one, late):
            assert_holds(each, trainer.step, in_storage(tmp_path, trainer.step))
            found = dense_state.dense_of(cached_files(each), dense_state.STEP)
            assert {key: bytes(data) for key, data in found.values.items()} == {
                key: bytes(data) for key, data in expected.values.items()
            }
        trainer.train()
        step = trainer.save()
        for each in (one, late):
            advanced(each)
            assert_holds_dense(each, tmp_path, step)


@pytest.mark.parametrize("codec", CODECS)
def test_a_restore_from_a_follower_equals_one_from_storage(tmp_path, codec):
    with DenseTrainer(tmp_path, codec) as trainer:
        trainer.save()
        for _ in range(3):
            trainer.train()
            trainer.save()
        source = Source(opened(tmp_path))
        source.follower.advance()
        expected = trainer.manager.restore(trainer.step, trainer.state)
        with mock.patch.object(OrbaxItems, "_of_blocks", side_effect=AssertionError):
            found = trainer.manager.restore_latest(trainer.state, service=source)
        assert {*found.source} == {"service"} and found.service_error is None
        model.assert_same(found.state, expected.state)
