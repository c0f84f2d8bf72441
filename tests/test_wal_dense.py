# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of records as blocks relative to the previous record: points, errors, failures."""

from __future__ import annotations

import contextlib
import errno
import random
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import flip
from made_up_wals import change, records_in, to
from test_wal_disk import CALLS, LOG, assert_nothing_is_tried_again

import deltackpt
from deltackpt import touched
from deltackpt.errors import AppendFailed, OptionError
from deltackpt.maintenance.verify import verify_root
from deltackpt.testing import Disk, DiskCall, TrainingRun

#: Globs of leaves to their codecs, and the leaves that these change.
LOSSY = {"params/kernel": "ef4", "params/wide": "ef8", "moments/**": "int8"}
CHANGED = {"params/kernel", "params/wide", "moments/mu"}


def initial(seed: int) -> dict:
    draw = np.random.default_rng(seed).normal
    return {
        "table": jnp.zeros((50, 4)),
        "params": {
            "kernel": jnp.asarray(draw(size=(40, 60)), jnp.float32),
            "wide": jnp.asarray(draw(size=(3, 700)), jnp.float32),
            "half": jnp.asarray(draw(size=9000), jnp.bfloat16),
            "frozen": jnp.asarray(draw(size=(64, 64)), jnp.float32),
            "bias": jnp.zeros(3),
        },
        "moments": {"mu": jnp.asarray(draw(size=2000), jnp.float32)},
        "count": jnp.int32(0),
        "ids": jnp.arange(3000),
    }


def moved(state, marks, step: int):
    """One step: changes few elements of ``half``, all of others, and none of ``frozen``."""
    drawn, params = np.random.default_rng(step), state["params"]

    def noise(shape) -> np.ndarray:
        return (1e-3 * drawn.normal(size=shape)).astype(np.float32)

    half = np.array(params["half"])
    half[drawn.integers(0, len(half), 50)] += 1
    row = step % 50
    changed = {name: params[name] for name in ("kernel", "wide", "bias")}
    changed |= {"mu": state["moments"]["mu"], "count": state["count"], "table": state["table"]}
    noises = {"kernel": noise((40, 60)), "wide": noise((3, 700)), "mu": noise(2000)}
    found, marks = _moved(changed, noises, marks, np.array([row]))
    state = {
        **state,
        "table": found["table"],
        "params": {
            **params,
            **{name: found[name] for name in ("kernel", "wide", "bias")},
            "half": jnp.asarray(half),
        },
        "moments": {"mu": found["mu"]},
        "count": found["count"],
    }
    return state, marks


@jax.jit
def _moved(leaves, noises, marks, rows):
    found = {name: leaves[name] + noise for name, noise in noises.items()}
    found["mu"] = 0.9 * leaves["mu"] + noises["mu"]
    found |= {"bias": leaves["bias"] + 1, "count": leaves["count"] + 1}
    found["table"] = leaves["table"].at[rows].add(1.0)
    return found, touched.mark(marks, {"table": rows})


class Training(TrainingRun):
    """A training with dense leaves of several kinds."""

    def __init__(self, root: Path, seed: int = 0):
        state = initial(seed)
        super().__init__(
            root, state=state, touched=touched.init({"table": state["table"]}), move=moved
        )

    def start(self, appended: int):
        """Saves, then appends records and waits until they are durable."""
        self.save()
        for _ in range(appended):
            self.append()
        self.manager.wait_appended()

    def opened(self, *, codec=None, deltas="whole", tables="raw", durability="process", **log):
        options = deltackpt.ManagerOptions(
            writes=deltackpt.WriteOptions(durability=durability),
            dense=deltackpt.Dense(deltas=deltas, codec=codec or {}),
            wal=deltackpt.WalOptions(**{"dense": "delta"} | log),
        )
        return self.open(options, tables=deltackpt.Tables(select="table", codec=tables))


@pytest.fixture
def training(tmp_path) -> Training:
    return Training(tmp_path)


def leaves_of(state) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def error_of(found, expected) -> dict[str, float]:
    """Relative l2 error of each leaf; leaves that are equal bit for bit have none."""
    errors = {}
    given = leaves_of(expected)
    for name, leaf in leaves_of(found).items():
        wanted = given[name]
        assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
        if leaf.tobytes() != wanted.tobytes():
            change = leaf.astype(np.float64) - wanted.astype(np.float64)
            errors[name] = float(np.linalg.norm(change) / np.linalg.norm(wanted.astype(np.float64)))
    return errors


def wholes_of(root: Path, epoch: int = 0) -> list[bool]:
    """Whether the dense leaves of each record of process 0 are whole."""
    records = records_in(root / "log" / str(epoch) / "0")
    return [record.head.against is None for record in records]


def test_every_point_is_exact_and_a_record_holds_what_changed(tmp_path, training):
    with training.opened() as manager:
        training.start(20)
        points = manager.recovery_points()
        assert len(points) == 20
        for point in points:
            found = manager.restore(point, training.state)
            assert error_of(found.state, training.states[point.step]) == {}
    # The first record of the file and each 16th are whole.
    assert wholes_of(tmp_path) == [number % 16 == 0 for number in range(20)]
    for record in records_in(tmp_path / "log/0/0"):
        if record.head.against is None:
            continue
        stored = {(one.group, one.encodings[0].codec): one for one in record.dense}
        assert stored["bfloat16", "sparse"].count <= 36
        # Nothing of the frozen leaf or the integers.
        floats = [one.count for (group, _), one in stored.items() if group == "float32"]
        assert sum(floats) == 10 + 9 + 8
        assert {group for group, _ in stored} == {"float32", "bfloat16", "plain"}
    assert verify_root(tmp_path).intact


def test_references_of_the_wal_are_separate_from_those_of_saves(tmp_path, training):
    with training.opened(codec=LOSSY, deltas="blocks") as manager:
        training.save()
        for _ in range(3):
            for _ in range(3):
                training.append()
            # The writer starts a file with the first record that it writes after a commit.
            manager.wait_appended()
            training.save()
        training.append()
        manager.wait_appended()
        # No trimming runs after this.
        points = manager.recovery_points()
        # The first record of a file is whole; older files are gone.
        whole = wholes_of(tmp_path)
        assert whole[-4:] == [True, False, False, True]
        for at in (*manager.all_steps(), *points):
            found = manager.restore(at, training.state)
            errors = error_of(found.state, training.states[found.step])
            assert errors.keys() <= CHANGED and all(error < 0.05 for error in errors.values())


def test_training_that_resumes_from_a_point_starts_with_a_whole_record(tmp_path, training):
    with training.opened(codec=LOSSY) as manager:
        training.start(3)
    with training.opened(codec=LOSSY) as manager:
        found = manager.restore_latest(training.state)
        assert found is not None and found.point is not None
        training.state, training.touched = found.state, found.touched
        for _ in range(2):
            training.append()
        manager.wait_appended()
        again = manager.restore_latest(training.state)
        assert again is not None and again.step == training.step
        assert max(error_of(again.state, training.state).values(), default=0) < 0.05
    assert wholes_of(tmp_path, 1) == [True, False]


# Failures.


def test_repeated_failures_lose_no_point(tmp_path, disk: Disk, monkeypatch):
    """Calls are refused at random; every recovery point restores what was given."""
    # Keep records that the steps saved in between would trim.
    monkeypatch.setattr("deltackpt.wal.epoch.OpenEpoch.truncate", lambda *arguments: None)
    drawn = random.Random(0)
    training = Training(tmp_path)
    with training.opened(
        codec={"params/kernel": "ef8"}, durability="power", on_failure="save"
    ) as manager:
        training.save()

        def refuse_some(call: DiskCall) -> None:
            if drawn.random() < 0.06:
                raise OSError(errno.EIO, "injected")

        disk.on(CALLS, refuse_some, LOG)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(60):
                training.append()
                if drawn.random() < 0.5:
                    with contextlib.suppress(AppendFailed):
                        manager.wait_appended()
        disk.clear()
        with contextlib.suppress(AppendFailed):
            manager.wait_appended()
        manager.wait_until_finished()
        points = manager.recovery_points()
        assert len(points) > 10
        for point in points:
            errors = error_of(
                manager.restore(point, training.state).state, training.states[point.step]
            )
            assert errors.keys() <= {"params/kernel"} and max(errors.values(), default=0) < 1e-2
    assert_nothing_is_tried_again(disk)


# Damage.


@pytest.mark.parametrize("group", ["bfloat16", "float32"])
@pytest.mark.parametrize("number", range(4))
def test_damaged_leaves_make_the_points_that_need_them_unrestorable(
    tmp_path, number, group, training
):
    with training.opened() as manager:
        training.start(4)
    record = records_in(tmp_path / "log/0/0")[number]
    segment = next(one for one in record.dense if one.group == group)
    [(start, end), *_] = record.chunks_of(segment.name, segment.arrays[-1].name)
    flip(record.path, (start + end) // 2)
    # The bfloat16 leaf is relative to earlier records; the changed float32 leaves are not.
    needed = [
        at >= number if group == "bfloat16" or not number else at == number for at in range(4)
    ]
    report = verify_root(tmp_path)
    assert not report.intact
    assert [one.restorable for one in report.points] == [not one for one in needed]
    with training.opened() as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = manager.restore_latest(training.state)
    step = max((2 + at for at in range(4) if not needed[at]), default=1)
    assert found is not None and found.step == step
    assert error_of(found.state, training.states[step]) == {}


@pytest.mark.parametrize("against", [0, 3, 7])
def test_a_record_relative_to_no_earlier_record_is_damaged(tmp_path, against, training):
    with training.opened():
        training.start(3)
    record = records_in(tmp_path / "log/0/0")[-1]
    change(record.path, record.number, to("against", value=against))
    with training.opened() as manager, pytest.warns(UserWarning, match="that it is relative to"):
        found = manager.restore_latest(training.state)
    assert found is not None and found.step == 3
    assert error_of(found.state, training.states[3]) == {}


# Compressed arrays.


def append_all_rows(training: Training) -> None:
    """Appends a record of all rows of the table, which compress well."""
    training.train()
    training.state = {**training.state, "table": jnp.ones((50, 4))}
    training.touched = touched.mark(training.touched, {"table": jnp.arange(50)})
    training.append()
    training.manager.wait_appended()


def test_rows_with_a_lossless_codec_are_compressed(tmp_path, training):
    with training.opened(tables="lossless") as manager:
        training.save()
        append_all_rows(training)
        found = manager.restore(training.step, training.state)
        assert np.array_equal(found.state["table"], training.state["table"])
    record = records_in(tmp_path / "log/0/0")[-1]
    [segment] = record.rows
    places = [record.chunks_of(segment.name, entry.name) for entry in segment.arrays]
    assert sum(stop - start for place in places for start, stop in place) < 50 * 4 * 4 / 2


def test_a_leaf_of_several_chunks_is_read_in_parts(tmp_path, training):
    training.state |= {"large": jnp.arange(9 << 20).astype(jnp.bfloat16)}
    with training.opened() as manager:
        training.start(1)
        assert error_of(manager.restore(training.step, training.state).state, training.state) == {}
    [record] = records_in(tmp_path / "log/0/0")
    segments = [one for one in record.dense if one.group == "bfloat16"]
    assert any(len(record.chunks_of(one.name, one.arrays[-1].name)) > 1 for one in segments)


@pytest.mark.parametrize("dense", ["whole", "delta"])
def test_a_leaf_that_no_record_can_contain_is_named_and_strings_are_contained(dense, tmp_path):
    options = deltackpt.ManagerOptions(wal=deltackpt.WalOptions(dense=dense))
    handlers = {"embeddings": deltackpt.Tables(select="table")}
    state = {"table": jnp.ones((4, 2)), "name": "x", "bias": jnp.ones(3)}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers, options=options) as manager:
        manager.save(1, state)
        manager.append(2, {**state, "name": "y"})
        manager.wait_appended()
        found = manager.restore_latest(state)
        assert found is not None and found.step == 2 and found.state["name"] == "y"
    other = {**state, "bias": jnp.ones(3, jnp.complex64)}
    with deltackpt.CheckpointManager(tmp_path / "2", handlers=handlers, options=options) as manager:
        manager.save(1, other)
        with pytest.raises(
            OptionError, match=r"\['bias'\] has dtype complex64, so that only Orbax"
        ):
            manager.append(2, other)
