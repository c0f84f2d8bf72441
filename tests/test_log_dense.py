# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of marks as blocks against those of the mark before: points, errors, failures."""

from __future__ import annotations

import contextlib
import errno
import random
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import zstandard
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_log_disk import Disk, disk

import deltackpt
from deltackpt import touched
from deltackpt.errors import Damaged, LogFailed
from deltackpt.format import frames
from deltackpt.format.dense_blocks import BlockedValue, DenseBlocks
from deltackpt.format.frames import BlocksHead, Kind, Place, RowsHead
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.log import dense_frames
from deltackpt.reading import logged_dense, saves
from deltackpt.reading.log_files import read_log
from deltackpt.reading.logged_dense import DenseKept
from deltackpt.reading.stretches import Logs
from deltackpt.resources.workers import Workers
from deltackpt.storage import arrays, frame_arrays
from deltackpt.storage.store import spot
from deltackpt.upkeep.verify import verify_root

__all__ = ["disk"]

#: Globs of leaves to their codecs, and the leaves that these change.
LOSSY = {"params/kernel": "ef4", "params/wide": "ef8", "moments/**": "int8"}
CHANGED = {"params/kernel", "params/wide", "moments/mu"}


class Training:
    """A training whose dense leaves are of several kinds, and what they were at each step."""

    def __init__(self, seed: int = 0):
        self.drawn = np.random.default_rng(seed)
        draw = self.drawn.normal
        self.state = {
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
        self.touched = touched.init({"table": self.state["table"]})
        self.step = 0
        self.states = {0: self.state}

    def go(self) -> int:
        """One step: few numbers of ``half``, all of others, and nothing of ``frozen``."""
        self.step += 1
        state, params = self.state, self.state["params"]
        half = np.array(params["half"])
        half[self.drawn.integers(0, len(half), 50)] += 1
        row = self.step % 50
        self.state = {
            **state,
            "table": state["table"].at[row].add(1.0),
            "params": {
                **params,
                "kernel": params["kernel"] + self._noise((40, 60)),
                "wide": params["wide"] + self._noise((3, 700)),
                "half": jnp.asarray(half),
                "bias": params["bias"] + 1,
            },
            "moments": {"mu": 0.9 * state["moments"]["mu"] + self._noise(2000)},
            "count": state["count"] + 1,
        }
        self.touched = touched.mark(self.touched, {"table": jnp.asarray([row])})
        self.states[self.step] = self.state
        return self.step

    def _noise(self, shape) -> jax.Array:
        return jnp.asarray(1e-3 * self.drawn.normal(size=shape), jnp.float32)

    def log(self, manager, **more):
        return manager.log(self.go(), self.state, touched=self.touched, **more)

    def save(self, manager):
        manager.save(self.go(), self.state, touched=self.touched)
        manager.wait()

    def begin(self, manager, marks: int):
        """A save, and marks after it that are durable."""
        self.save(manager)
        for _ in range(marks):
            self.log(manager)
        manager.wait_logged()


def manager_of(
    root: Path, *, codec=None, deltas="orbax", tables="raw", durability="process", **log
):
    options = deltackpt.ManagerOptions(
        writes=deltackpt.WriteOptions(durability=durability),
        dense=deltackpt.Dense(deltas=deltas, codec=codec or {}),
        log=deltackpt.LogOptions(**{"dense": "delta"} | log),
    )
    handlers = {"embeddings": deltackpt.Tables(select="table", codec=tables)}
    return deltackpt.CheckpointManager(root, handlers=handlers, options=options)


def leaves_of(state) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def error_of(found, expected) -> dict[str, float]:
    """Relative l2 error of each leaf; those that are the same bit for bit have none."""
    errors = {}
    given = leaves_of(expected)
    for name, leaf in leaves_of(found).items():
        wanted = given[name]
        assert (leaf.dtype, leaf.shape) == (wanted.dtype, wanted.shape)
        if leaf.tobytes() != wanted.tobytes():
            change = leaf.astype(np.float64) - wanted.astype(np.float64)
            errors[name] = float(np.linalg.norm(change) / np.linalg.norm(wanted.astype(np.float64)))
    return errors


def heads_of(root: Path, stretch: int = 0) -> list[list[BlocksHead]]:
    """The heads of blocks of each mark of process 0."""
    log = read_log(spot(root / "log" / str(stretch) / "0"), stretch, 0)
    return [[frame.head for frame in mark.frames_of(Kind.BLOCKS)] for mark in log.marks]


def test_every_point_is_exact_and_a_mark_holds_what_changed(tmp_path):
    training = Training()
    with manager_of(tmp_path) as manager:
        training.begin(manager, marks=20)
        points = manager.points()
        assert len(points) == 20
        for point in points:
            found = manager.restore(point, training.state)
            assert error_of(found.state, training.states[point.step]) == {}
    heads = heads_of(tmp_path)
    # Whole at the first of the file, and at each 16th.
    assert [all(head.against is None for head in mark) for mark in heads] == [
        number % 16 == 0 for number in range(20)
    ]
    for mark in heads:
        if mark[0].against is None:
            continue
        stored = {(one.group, one.encodings[0].codec): one for one in mark[0].record.segments}
        assert stored["bfloat16", "sparse"].count <= 36
        # Nothing of the frozen leaf, nor of the integers.
        floats = [one.count for (group, _), one in stored.items() if group == "float32"]
        assert sum(floats) == 10 + 9 + 8
        assert {group for group, _ in stored} == {"float32", "bfloat16", "plain"}
    assert verify_root(tmp_path).intact


def test_errors_of_a_thousand_marks_do_not_grow(tmp_path):
    training = Training()
    errors = []
    with manager_of(tmp_path, codec=LOSSY, most_bytes=1e9) as manager:
        training.save(manager)
        for number in range(1000):
            training.log(manager)
            training.states = {}
            # The last ones before one that is whole, and thus furthest from one.
            if number in (15, 511, 991):
                manager.wait_logged()
                found = manager.restore(training.step, training.state)
                errors.append(error_of(found.state, training.state))
    assert len(heads_of(tmp_path)) == 1000
    for found in errors:
        assert found.keys() == CHANGED
        assert found["params/kernel"] < 1e-3 and found["params/wide"] < 1e-4
        assert all(found[name] < 1.5 * errors[0][name] for name in found)


def test_what_is_read_at_once_and_mark_by_mark_is_the_same(tmp_path):
    training = Training()
    with manager_of(tmp_path, codec=LOSSY) as manager:
        training.begin(manager, marks=6)
    history, kept = Logs(spot(tmp_path / "log")).read(), DenseKept()
    step = saves.read_info(spot(tmp_path / "1"), "embeddings").save_id
    for point in reversed(history.points()):
        way = history.way(point, step)
        assert way is not None
        alone, after = logged_dense.dense_of(way), logged_dense.dense_of(way, kept)
        assert alone.values.keys() == after.values.keys()
        assert all(bytes(alone.values[key]) == bytes(after.values[key]) for key in alone.values)
        assert alone.files == after.files


def test_a_point_restores_onto_other_devices(tmp_path):
    training = Training()
    with manager_of(tmp_path, codec=LOSSY) as manager:
        training.begin(manager, marks=3)
        expected = manager.restore(training.step, training.state).state
        mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
        split = NamedSharding(mesh, PartitionSpec("x"))

        def placed(leaf):
            return jax.device_put(leaf, split) if leaf.ndim and leaf.shape[0] % 2 == 0 else leaf

        wanted = jax.tree.map(placed, training.state)
        found = manager.restore(training.step, wanted).state
    assert found["params"]["kernel"].sharding.is_equivalent_to(split, 2)
    assert error_of(found, expected) == {}


@pytest.mark.parametrize("codec", [{}, LOSSY], ids=["exact", "lossy"])
def test_references_of_the_log_are_not_those_of_saves(tmp_path, codec):
    training = Training()
    with manager_of(tmp_path, codec=codec, deltas="own") as manager:
        training.save(manager)
        for _ in range(3):
            for _ in range(3):
                training.log(manager)
            training.save(manager)
        training.log(manager)
        manager.wait_logged()
        # Each save begins a file, whose first mark is whole; older ones are gone.
        whole = [mark[0].against is None for mark in heads_of(tmp_path)]
        assert whole[-4:] == [True, False, False, True]
        for at in (*manager.all_steps(), *manager.points()):
            found = manager.restore(at, training.state)
            step = found.step
            errors = error_of(found.state, training.states[step])
            assert errors.keys() <= (CHANGED if codec else set())
            assert all(error < 0.05 for error in errors.values())


def test_training_that_goes_on_from_a_point_begins_whole(tmp_path):
    training = Training()
    with manager_of(tmp_path, codec=LOSSY) as manager:
        training.begin(manager, marks=3)
    with manager_of(tmp_path, codec=LOSSY) as manager:
        found = manager.restore_latest(training.state)
        assert found is not None and found.point is not None
        training.state, training.touched = found.state, found.touched
        for _ in range(2):
            training.log(manager)
        manager.wait_logged()
        again = manager.restore_latest(training.state)
        assert again is not None and again.step == training.step
        assert max(error_of(again.state, training.state).values(), default=0) < 0.05
    assert [mark[0].against is None for mark in heads_of(tmp_path, 1)] == [True, False]


# Failures.


@pytest.mark.parametrize("kind", ["writev", "fdatasync"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("codec", [{}, LOSSY], ids=["exact", "lossy"])
def test_what_failed_is_no_reference(tmp_path, disk: Disk, kind, number, codec):
    training = Training()
    failed = []
    with manager_of(tmp_path, codec=codec, durability="power") as manager:
        training.save(manager)
        disk.calls.clear()
        disk.refuse(kind, number, errno.EIO)
        for _ in range(6):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                training.log(manager)
            try:
                manager.wait_logged()
            except LogFailed:
                failed.append(training.step)
        disk.verdict = lambda kind, path: None
        assert len(failed) == 1
        for point in manager.points():
            found = manager.restore(point, training.state)
            errors = error_of(found.state, training.states[point.step])
            assert errors.keys() <= (CHANGED if codec else set())
            assert all(error < 0.05 for error in errors.values())
    steps = [step for step in range(2, 8) if step not in failed]
    whole = [mark[0].against is None for mark in heads_of(tmp_path)]
    assert whole == [step in (steps[0], failed[0] + 1) for step in steps]


def test_marks_behind_one_that_failed_are_no_references_either(tmp_path, disk: Disk):
    training = Training()
    with manager_of(tmp_path, codec=LOSSY, durability="power", when_full="wait") as manager:
        training.save(manager)
        training.log(manager)
        manager.wait_logged()
        disk.refuse("fdatasync", 0, errno.EIO)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                training.log(manager)
            with contextlib.suppress(LogFailed):
                manager.wait_logged()
            disk.verdict = lambda kind, path: None
            for _ in range(2):
                training.log(manager)
        manager.wait_logged()
        found = manager.restore(training.step, training.state)
        assert max(error_of(found.state, training.state).values()) < 0.05
    disk.assert_nothing_is_tried_again()
    assert verify_root(tmp_path).intact


def test_a_process_that_fails_again_and_again_loses_no_point(tmp_path, disk: Disk, monkeypatch):
    """Calls are refused at random: what restores is what was given, at each point that there is."""
    # Whenever the steps that are saved in between would have them removed.
    monkeypatch.setattr("deltackpt.log.trimming.trim", lambda *arguments: None)
    drawn = random.Random(0)
    training = Training()
    with manager_of(
        tmp_path, codec={"params/kernel": "ef8"}, durability="power", on_failure="save"
    ) as manager:
        training.save(manager)
        disk.verdict = lambda kind, path: errno.EIO if drawn.random() < 0.06 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(60):
                training.log(manager)
                if drawn.random() < 0.5:
                    with contextlib.suppress(LogFailed):
                        manager.wait_logged()
        disk.verdict = lambda kind, path: None
        with contextlib.suppress(LogFailed):
            manager.wait_logged()
        manager.wait()
        points = manager.points()
        assert len(points) > 10
        for point in points:
            errors = error_of(
                manager.restore(point, training.state).state, training.states[point.step]
            )
            assert errors.keys() <= {"params/kernel"} and max(errors.values(), default=0) < 1e-2
    disk.assert_nothing_is_tried_again()


# Damage.


@pytest.mark.parametrize("number", range(4))
def test_a_damaged_frame_falls_back_to_the_point_before(tmp_path, number):
    training = Training()
    with manager_of(tmp_path) as manager:
        training.begin(manager, marks=4)
    log = read_log(spot(tmp_path / "log" / "0" / "0"), 0, 0)
    [frame] = log.marks[number].frames_of(Kind.BLOCKS)
    [path] = tmp_path.glob("log/0/0/*.seg")
    data = bytearray(path.read_bytes())
    data[frame.start + frame.body_bytes // 2] ^= 1
    path.write_bytes(data)
    report = verify_root(tmp_path)
    assert not report.intact
    assert [one.restorable for one in report.points] == [at < number for at in range(4)]
    with manager_of(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = manager.restore_latest(training.state)
    assert found is not None and found.step == 1 + number
    assert error_of(found.state, training.states[1 + number]) == {}


def test_a_frame_against_no_earlier_mark_is_damage(tmp_path):
    training = Training()
    with manager_of(tmp_path) as manager:
        training.begin(manager, marks=3)
    log = read_log(spot(tmp_path / "log/0/0"), 0, 0)
    for against in (0, 3, 7):
        mark = log.marks[-1]
        [frame] = mark.frames_of(Kind.BLOCKS)
        head = BlocksHead(record=frame.head.record, against=against, sizes=frame.head.sizes)
        others = tuple(one for one in mark.frames if one is not frame)
        altered = mark._replace(frames=(*others, frame._replace(head=head)))
        reader = logged_dense.ProcessDense(0, 0, log)
        with pytest.raises(Damaged, match="that it is against"):
            reader.values_of(altered, DenseKept(), DenseKept())


# Arrays of frames.


@pytest.fixture(scope="module")
def pool():
    workers = Workers()
    yield workers.encoders


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int64"])
@pytest.mark.parametrize("kind", ["plain", "zstd", "byte_planes"])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
@pytest.mark.parametrize("noise", [False, True])
def test_arrays_are_read_as_they_were_written(pool, dtype, kind, rows, noise):
    drawn = np.random.default_rng(0)
    array = drawn.integers(0, 250 if noise else 2, (rows, 6, 4)).astype(dtype)
    entry = arrays.array_entry(
        "it", array.shape, array.dtype, zstd=kind == "zstd", byte_planes=kind == "byte_planes",
        chunk_rows=7,
    )  # fmt: skip
    body = frame_arrays.body_of([(entry, np.array_split(array, 3))], pool)
    head = RowsHead(segment=segment_of(entry), sizes=body.sizes)
    assert bool(body.sizes) == (kind != "plain" and rows > 0)
    data = b"".join(frames.encode(Place(0, 0, 1, 0), head, body.arrays, 0).buffers)
    prefix = frames.prefix_of(data[: frames.PREFIX_BYTES], "it")
    assert prefix.version == (2 if body.sizes else 1)
    start = frames.PREFIX_BYTES + prefix.head_bytes
    assert frames.head_of(prefix, data[frames.PREFIX_BYTES : start], 0, "it") == head
    held = memoryview(data)[start : start + prefix.body_bytes]
    [stored] = frame_arrays.stored_of(head.arrays, head.sizes, held, "it")
    for low, high in ((0, rows), (rows // 3, rows), (rows // 2, rows // 2), (0, rows // 2)):
        assert np.array_equal(stored.rows(low, high), array[low:high])
    if body.sizes and not noise and rows == 64:
        assert prefix.body_bytes < 0.6 * array.nbytes


def segment_of(entry: ArrayEntry) -> Segment:
    return Segment(
        name="s", group="g", columns=(0, 1), count=0, ranges=None, fields=(), arrays=(entry,)
    )


@pytest.mark.parametrize(
    "sizes",
    [((1,),), ((9, 9),), ((1 << 20,),), ((8,), (8,)), ((0,),)],
    ids=["too few bytes", "too many chunks", "longer than it is", "another array", "none"],
)
def test_sizes_that_cannot_be_are_damage(sizes):
    entry = arrays.array_entry("it", (1 << 16,), np.dtype(np.uint8), zstd=True)
    head = RowsHead(segment=segment_of(entry), sizes=sizes)
    data = b"".join(frames.encode(Place(0, 0, 1, 0), head, [[bytes(8)]], 0).buffers)
    prefix = frames.prefix_of(data[: frames.PREFIX_BYTES], "it")
    end = frames.PREFIX_BYTES + prefix.head_bytes
    with pytest.raises(Damaged):
        frames.head_of(prefix, data[frames.PREFIX_BYTES : end], 0, "it")


@pytest.mark.parametrize(
    "stored",
    [
        b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\0\0",
        zstandard.compress(bytes(100)),
        b"no zstd",
    ],
    ids=["1 TiB", "another length", "none"],
)
def test_a_chunk_that_holds_something_else_is_damage(stored):
    entry = arrays.array_entry("it", (1000,), np.dtype(np.uint8), zstd=True)
    body = memoryview(stored + bytes(-len(stored) % 8))
    with pytest.raises(Damaged):
        frame_arrays.arrays_of([entry], ((len(stored),),), body, "it")


@pytest.mark.parametrize("key", ["../out", "/etc/passwd", "a//b"])
def test_files_of_a_frame_stay_in_the_item(key):
    value = BlockedValue(key=key, file=True, dtype="uint8", count=0, group="plain", at=0)
    head = BlocksHead(record=DenseBlocks(values=(value,), segments=()))
    data = b"".join(frames.encode(Place(0, 0, 1, 0), head, [], 0).buffers)
    prefix = frames.prefix_of(data[: frames.PREFIX_BYTES], "it")
    end = frames.PREFIX_BYTES + prefix.head_bytes
    with pytest.raises(Damaged, match="a path in the item"):
        frames.head_of(prefix, data[frames.PREFIX_BYTES : end], 0, "it")


def test_rows_by_a_lossless_codec_are_compressed(tmp_path):
    training = Training()
    with manager_of(tmp_path, tables="lossless") as manager:
        training.save(manager)
        training.go()
        training.state = {**training.state, "table": jnp.ones((50, 4))}
        training.touched = touched.mark(training.touched, {"table": jnp.arange(50)})
        training.log(manager)
        manager.wait_logged()
        found = manager.restore(training.step, training.state)
        assert np.array_equal(found.state["table"], training.state["table"])
    [mark] = read_log(spot(tmp_path / "log/0/0"), 0, 0).marks
    [frame] = mark.frames_of(Kind.ROWS)
    assert frame.head.sizes and frame.body_bytes < 50 * 4 * 4 / 2


def test_a_mark_of_many_leaves_is_cut_into_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(dense_frames.frames, "BODY_BYTES", 1 << 14)
    training = Training()
    with manager_of(tmp_path, codec=LOSSY) as manager:
        training.begin(manager, marks=3)
        found = manager.restore(training.step, training.state)
        assert max(error_of(found.state, training.state).values()) < 0.05
    assert {len(mark) > 3 for mark in heads_of(tmp_path)} == {True}
    assert ml_dtypes.bfloat16 == found.state["params"]["half"].dtype
