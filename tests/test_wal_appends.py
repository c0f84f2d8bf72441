# SPDX-License-Identifier: Apache-2.0
"""Calls of ``append()`` that save a step instead, and their effect on later calls."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import deltackpt
from deltackpt import touched
from deltackpt.errors import StorageError
from deltackpt.wal import recorder

ROWS, WIDTH = 64, 4


def manager(root, **options: Any) -> deltackpt.CheckpointManager:
    log = deltackpt.WalOptions(**options)
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": deltackpt.Tables(select="table", slots={})},
        options=deltackpt.ManagerOptions(wal=log),
    )


class Training:
    """Each step changes a few rows, and the one dense leaf."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"table": jnp.zeros((ROWS, WIDTH)), "dense": jnp.zeros(512)}
        self.touched = touched.init({"table": self.state["table"]})

    def step(self, number: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(number).choice(ROWS, 5, replace=False).astype(np.int32)
        self.state = {
            "table": self.state["table"].at[ids].set(float(number)),
            "dense": self.state["dense"] + 1,
        }
        self.touched = touched.mark(self.touched, {"table": ids})
        return {"table": ids}

    def equals(self, other: Any) -> bool:
        return all(np.array_equal(self.state[name], other[name]) for name in self.state)


@pytest.mark.parametrize("dense_every", [1, 2])
def test_rows_named_in_a_call_that_saved_a_step_instead_are_not_missed(tmp_path, dense_every):
    training = Training()
    # After any record the WAL exceeds its size limit.
    with manager(tmp_path, max_wal_ratio=1e-9, dense_every=dense_every) as saver:
        saver.save(0, training.state, touched=training.touched)
        kinds = []
        for number in range(1, 9):
            ids = training.step(number)
            logged = saver.append(number, training.state, touched=training.touched, ids=ids)
            kinds.append("saved" if logged.saved else logged.kind)
            saver.wait_appended()
        saver.save(9, training.state, touched=training.touched)
    assert "saved" in kinds and {*kinds} & {"soft", "full"}
    with manager(tmp_path) as reader:
        found = reader.restore_latest(training.state)
    assert found is not None and training.equals(found.state)


def test_acknowledged_records_outlive_a_restore_of_an_older_step(tmp_path):
    training = Training()
    with manager(tmp_path) as saver:
        saver.save(0, training.state, touched=training.touched)
        for number in (1, 2):
            training.step(number)
            saver.append(number, training.state, touched=training.touched)
        saver.wait_appended()
        saver.restore(0, training.state)
        training.step(3)
        logged = saver.append(3, training.state, touched=training.touched)
        saver.wait_appended()
        assert logged.kind == "full"
        assert [point.step for point in saver.recovery_points()] == [3, 2, 1]
        found = saver.restore_latest(training.state)
    assert found is not None and found.step == 3 and training.equals(found.state)


def test_a_newer_step_that_was_only_inspected_does_not_stop_the_wal(tmp_path):
    training = Training()
    with manager(tmp_path) as saver:
        for number in (0, 4):
            saver.save(number, training.state, touched=training.touched)
            training.step(number)
        older = saver.restore(0, training.state)
        training.state, training.touched = dict(older.state), older.touched
        saver.restore(4, training.state)
        with warnings.catch_warnings():
            # Later steps are moved aside.
            warnings.simplefilter("ignore")
            for number in (1, 2):
                ids = training.step(number)
                saver.append(number, training.state, touched=training.touched, ids=ids)
        saver.wait_until_finished()
    with manager(tmp_path) as reader:
        found = reader.restore_latest(training.state)
    assert found is not None and found.step == 2 and training.equals(found.state)


def test_ids_of_an_abandoned_state_are_not_compared_with_the_resumed_state(tmp_path):
    training = Training()
    with manager(tmp_path) as saver:
        saver.save(0, training.state, touched=training.touched)
        for number in (1, 2):
            ids = training.step(number)
            saver.append(number, training.state, touched=training.touched, ids=ids)
        saver.wait_until_finished()
        older = saver.restore(0, training.state)
        training.state, training.touched = dict(older.state), older.touched
        training.step(7)
        saver.save(7, training.state, touched=training.touched)
    with manager(tmp_path) as reader:
        found = reader.restore_latest(training.state)
    assert found is not None and found.step == 7 and training.equals(found.state)


def test_an_epoch_that_cannot_be_opened_is_begun_again_even_for_the_former_tables(
    tmp_path, monkeypatch
):
    training, opened = Training(), recorder.head_of

    def fails(*given: Any) -> Any:
        raise StorageError("log/1.msgpack: expected to read it, found an I/O error")

    with manager(tmp_path) as saver:
        saver.save(0, training.state, touched=training.touched)
        training.step(1)
        saver.append(1, training.state, touched=training.touched)
        larger = {**training.state, "table": jnp.pad(training.state["table"], ((0, 8), (0, 0)))}
        marks = touched.init({"table": larger["table"]})
        saver.save(2, larger, touched=marks)
        monkeypatch.setattr(recorder, "head_of", fails)
        with pytest.raises(StorageError, match="log/1"):
            saver.append(3, larger, touched=marks)
        monkeypatch.setattr(recorder, "head_of", opened)
        assert saver.append(4, training.state, touched=training.touched).saved is not None
        training.step(5)
        assert saver.append(5, training.state, touched=training.touched).kind == "full"
        saver.wait_appended()
        saver.wait_until_finished()
    with manager(tmp_path) as reader:
        found = reader.restore_latest(training.state)
    assert found is not None and found.step == 5 and training.equals(found.state)
