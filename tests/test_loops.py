# SPDX-License-Identifier: Apache-2.0
"""Typical training loops resume as the same run, and train every sample exactly once."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from flat_options import manager_options

from deltackpt.testing import failing_saves, paused_saves

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import jax.numpy as jnp
import loops_worker
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import flags
from flax import linen, nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import free_port
from rich.console import Console

import deltackpt
from deltackpt import events, inspect, touched
from deltackpt.errors import (
    NoIntactStep,
    OptionError,
    OutOfSpace,
    SaveFailed,
    StorageError,
    TemplateMismatch,
)
from deltackpt.handlers.iterators import IteratorHandler, IteratorSave
from deltackpt.integrations.loop import LoopCheckpoints

grain = pytest.importorskip("grain")

from loops import demo, lineage, nnx_loop, optax_loop, policy_loop  # noqa: E402

ROWS, WIDTH, SAMPLES, BATCH = 48, 4, 24, 4
MARKS = deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking="touched"))
LOOPS = {"optax": optax_loop, "nnx": nnx_loop}


# Loops of every kind, each with a table, dense leaves, slots and non-parameter state.


class Kind(NamedTuple):
    """A kind of loop; if ``sparse``, a step changes only the rows that it looks up."""

    state: Any
    step: Any
    select: str
    tracking: str = "fingerprints"
    sparse: bool = True


def optax_kind(optimizer, *, tracking="fingerprints", sparse=True) -> Kind:
    def state():
        params = {"emb": jax.random.normal(jax.random.key(0), (ROWS, WIDTH)), "w": jnp.ones(WIDTH)}
        return {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(1)}

    @jax.jit
    def step(state, ids):
        def loss(params):
            kept = jax.random.bernoulli(jax.random.fold_in(state["key"], 0), 0.9, (BATCH, WIDTH))
            return jnp.tanh((params["emb"][ids] * kept) @ params["w"]).mean()

        grads = jax.grad(loss)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        key = jax.random.split(state["key"], 1)[0]
        return {"params": params, "opt_state": opt_state, "key": key}

    return Kind(state, step, "params/emb", tracking, sparse)


def linen_kind() -> Kind:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            return jnp.tanh(linen.Dense(1)(linen.Embed(ROWS, WIDTH, name="emb")(ids))).mean()

    model, optimizer = Model(), optax.adagrad(0.1)

    def state():
        params = model.init(jax.random.key(0), jnp.zeros(BATCH, jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    @jax.jit
    def step(state, ids):
        grads = jax.grad(lambda params: model.apply({"params": params}, ids))(state.params)
        return state.apply_gradients(grads=grads)

    return Kind(state, step, "params/**/embedding")


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.emb = nnx.Embed(ROWS, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, ids):
        return jnp.tanh(self.out(self.norm(self.dropout(self.emb(ids))))).mean()


def nnx_kind(form, select, optimizer=None, tracking="fingerprints") -> Kind:
    """An nnx loop; ``form`` makes its state from the model, its optimizer and a counter."""
    chosen = optimizer or optax.adagrad(0.1)

    def state():
        model = NnxModel(nnx.Rngs(0, dropout=1))
        return form(model, nnx.Optimizer(model, chosen, wrt=nnx.Param))

    @nnx.jit
    def train(model, optimizer, ids):
        optimizer.update(model, nnx.grad(lambda model: model(ids))(model))

    def step(state, ids):
        model, optimizer, *counter = state.values() if isinstance(state, dict) else state
        train(model, optimizer, ids)
        return state if not counter else (model, optimizer, counter[0] + 1)

    return Kind(state, step, select, tracking)


def in_dict(model, optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


KINDS = {
    "optax with adagrad": optax_kind(optax.adagrad(0.1)),
    "optax with adam": optax_kind(optax.adam(0.1), sparse=False),
    "optax with track": optax_kind(touched.track(optax.adagrad(0.1), "emb"), tracking="touched"),
    "linen": linen_kind(),
    "nnx in a dict": nnx_kind(in_dict, "model/emb/embedding"),
    "nnx with track": nnx_kind(
        in_dict,
        "model/emb/embedding",
        touched.track(optax.adagrad(0.1), "**/embedding"),
        tracking="touched",
    ),
    "nnx in a tuple": nnx_kind(
        lambda model, optimizer: (model, optimizer, jnp.zeros((), jnp.int32)), "0/emb/embedding"
    ),
}


class Source:
    """Samples by index: an id, and the index itself."""

    def __init__(self, name="source"):
        self.name = name

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"sample": np.int32(index), "id": np.int32(index * 31 % ROWS)}

    def __repr__(self):
        return self.name


def dataset_of(workers=0, epochs=None):
    found = grain.MapDataset.source(Source()).shuffle(3).repeat(epochs)
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    found = found.batch(BATCH, drop_remainder=True).to_iter_dataset(ahead)
    if workers:
        found = found.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers))
    return found


def loader_of(workers=0, source="source", epochs=None):
    options = {"shard_options": grain.sharding.NoSharding(), "shuffle": True, "seed": 3}
    sampler = grain.samplers.IndexSampler(SAMPLES, num_epochs=epochs, **options)
    return grain.DataLoader(
        data_source=Source(source),
        sampler=sampler,
        operations=[grain.transforms.Batch(BATCH, drop_remainder=True)],
        worker_count=workers,
    )


def on_devices():
    buffers = {"cpu_buffer_size": 3, "device_buffer_size": 2}
    return grain.experimental.device_put(dataset_of(), jax.local_devices()[0], **buffers)


PIPELINES = {
    "dataset": dataset_of,
    "loader": loader_of,
    "dataset with a worker": lambda: dataset_of(workers=1),
    "loader with a worker": lambda: loader_of(workers=1),
    "dataset that is put on devices ahead": on_devices,
}


@contextlib.contextmanager
def opened(pipeline):
    """An iterator of a pipeline; its workers end with the context."""
    flags.FLAGS.mark_as_parsed()
    iterator = iter(PIPELINES[pipeline]())
    try:
        yield iterator
    finally:
        getattr(iterator, "_iterator", iterator).close()


ADAGRAD = KINDS["optax with adagrad"]


def checkpoints(root, iterator=None, *, kind=ADAGRAD, every=2, event_handlers=(), **options):
    return LoopCheckpoints(
        root,
        tables=deltackpt.Tables(select=kind.select),
        every_steps=every,
        data=iterator,
        options=manager_options(**{"tracking": kind.tracking, **options}),
        event_handlers=event_handlers,
    )


@contextlib.contextmanager
def job(root, pipeline="dataset", **options):
    """A run of a loop: its checkpoints, and an iterator of its pipeline."""
    with opened(pipeline) as iterator, checkpoints(root, iterator, **options) as saves:
        yield saves, iterator


def train(root, steps, *, pipeline="dataset", kind=ADAGRAD, lose=0, every=2):
    """Trains up to a step, then trains ``lose`` more steps that are not saved."""
    with job(root, pipeline, kind=kind, every=every) as (saves, iterator):
        state, done = saves.resume(kind.state())
        for step in range(done + 1, steps + 1):
            state = kind.step(state, next(iterator)["id"])
            saves.after_step(step, state)
        saves.save(steps, state)
        saved = leaves(state)
        for batch in itertools.islice(iterator, lose):
            state = kind.step(state, batch["id"])
    return done, saved


def samples(iterator, count):
    """The samples of the next batches."""
    return [batch["sample"].tolist() for batch in itertools.islice(iterator, count)]


def assert_resumes(root, step, state, following=None):
    """A new run resumes from ``step``, and its data continues with the batch ``following``."""
    with job(root) as (saves, iterator):
        found, done = saves.resume(ADAGRAD.state())
        assert done == step
        assert following is None or next(iterator)["sample"].tolist() == following
    assert_same(leaves(found), leaves(state))


def leaves(state):
    """All leaves by path, without those that track rows."""
    state = jax.tree.map(
        lambda node: nnx.state(node) if isinstance(node, nnx.Pytree) else node,
        state,
        is_leaf=lambda node: isinstance(node, nnx.Pytree),
    )
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        name = jax.tree_util.keystr(path)
        if not any(field in name for field in ("stamps", "clock", "identity")):
            found[name] = np.array(jnp.asarray(leaf))  # A TrainState begins with a plain 0.
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype, name
        assert found[name].tobytes() == leaf.tobytes(), name


def damage(root, step, file):
    """Changes a byte in the middle of a file of a step."""
    [path] = Path(root, str(step)).glob(file)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Resumed runs.


@pytest.mark.parametrize(
    "options",
    [
        deltackpt.ManagerOptions(max_to_keep=3),
        deltackpt.ManagerOptions(deltas=deltackpt.DeltaOptions(tracking_audit=False)),
    ],
)
def test_options_without_tracking_leave_a_loop_its_fingerprints(tmp_path, options):
    state = {"emb": jnp.zeros((ROWS, WIDTH))}
    tables = deltackpt.Tables(select="emb")
    with LoopCheckpoints(tmp_path, tables=tables, every_steps=1, options=options) as saves:
        assert saves.after_step(1, state).kind == "base"
        state = {"emb": state["emb"].at[3].add(1.0)}
        assert saves.after_step(2, state).kind == "delta"
        assert [report.rows for report in saves.manager.wait_until_finished()] == [ROWS, 1]
    with LoopCheckpoints(tmp_path, tables=tables, every_steps=1, options=MARKS) as saves:
        assert saves.manager.options.deltas.tracking == "touched"  # As given.


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_loop_ends_in_the_state_of_an_uninterrupted_one(tmp_path, name):
    kind, cut = KINDS[name], tmp_path / "cut"
    _, expected = train(tmp_path / "whole", 8, kind=kind, every=8)
    assert train(cut, 3, kind=kind, lose=1)[0] == 0
    assert train(cut, 5, kind=kind, lose=2, every=5)[0] == 3
    for step in (5, 8):
        done, found = train(cut, 8, kind=kind)
        assert done == step
        assert_same(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_delta_has_only_the_rows_that_the_loop_changed(tmp_path, name):
    kind, seen = KINDS[name], []
    options = {"kind": kind, "every": 1, "event_handlers": (mock.Mock(receive=seen.append),)}
    with opened("dataset") as iterator:
        with checkpoints(tmp_path, iterator, **options) as saves:
            state = kind.state()
            for step, batch in enumerate(itertools.islice(iterator, 4), 1):
                state = kind.step(state, batch["id"])
                saves.after_step(step, state)
        with checkpoints(tmp_path, iterator, **options) as saves:
            state, done = saves.resume(kind.state())
            state = kind.step(state, next(iterator)["id"])
            saved = saves.after_step(done + 1, state)
            assert saved is not None and saved.kind == "delta"
    kinds = [(event.kind, event.rows) for event in seen if isinstance(event, events.SaveEvent)]
    assert kinds[0] == ("base", ROWS)
    for how, rows in kinds[1:]:
        assert how == "delta"
        assert 0 < rows <= BATCH if kind.sparse else rows > BATCH


def test_nnx_objects_are_updated_in_place_and_shared_variables_stay_shared(tmp_path):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.emb = nnx.Embed(ROWS, WIDTH, rngs=rngs)
            self.out = self.emb
            self.rngs = rngs.fork()

    class Counter(nnx.Variable):
        pass

    def state(seed):
        return {"model": Tied(nnx.Rngs(seed)), "count": Counter(jnp.zeros((), jnp.int32)), "n": 0}

    kind = KINDS["nnx in a dict"]
    first = state(0)
    with checkpoints(tmp_path, kind=kind) as saves:
        first["model"].emb.embedding[...] += 1.0
        first["model"].rngs.params()
        first["count"].set_value(jnp.full((), 5, jnp.int32))
        saves.save(3, {**first, "n": 7})
    second = state(1)
    embedding, count = second["model"].emb.embedding, second["count"]
    with checkpoints(tmp_path, kind=kind) as saves:
        found, done = saves.resume(second)
    assert (done, found["n"]) == (3, 7)
    assert found["model"] is second["model"] and found["count"] is count
    assert second["model"].emb.embedding is embedding is second["model"].out.embedding
    assert_same(leaves(found), leaves({**first, "n": 7}))


# The position of the data.


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(name, marks=[pytest.mark.processes] if "worker" in name else [])
        for name in PIPELINES
    ],
)
def test_the_position_is_that_of_the_step_despite_read_ahead(tmp_path, pipeline):
    with opened(pipeline) as iterator:
        order = samples(iterator, 12)
    assert sorted(sum(order[:6], [])) == sorted(sum(order[6:], [])) == list(range(SAMPLES))
    with job(tmp_path, pipeline, every=4) as (saves, iterator), paused_saves(tmp_path) as held:
        state, _ = saves.resume(ADAGRAD.state())
        for step in range(1, 5):
            next(iterator)
            saves.after_step(step, state)
        assert samples(iterator, 3) == order[4:7]
        held.release()
    with job(tmp_path, pipeline) as (saves, iterator):
        assert saves.resume(ADAGRAD.state())[1] == 4
        assert samples(iterator, 8) == order[4:]


def test_every_sample_is_yielded_once_if_the_data_ends_with_a_save(tmp_path):
    iterator = iter(dataset_of(epochs=1))
    with checkpoints(tmp_path, iterator, every=100) as saves:
        state, step = ADAGRAD.state(), 0
        for step, _ in enumerate(iterator, 1):
            saves.after_step(step, state)
        saves.save(step, state)
    again = iter(dataset_of(epochs=1))
    with checkpoints(tmp_path, again) as saves:
        assert saves.resume(ADAGRAD.state())[1] == SAMPLES // BATCH
        assert next(again, None) is None


def test_an_iterator_keeps_its_position_if_no_step_is_intact(tmp_path):
    train(tmp_path, 2)
    damage(tmp_path, 2, "data/*.json")
    iterator = iter(dataset_of())
    with (
        checkpoints(tmp_path, iterator) as saves,
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(NoIntactStep),
    ):
        saves.resume(ADAGRAD.state())
    assert iterator.get_state() == iter(dataset_of()).get_state()


@pytest.mark.parametrize("pipeline", ["dataset", "loader"])
def test_grain_and_orbax_alone_read_and_write_the_position(tmp_path, pipeline):
    train(tmp_path / "ours", 3, pipeline=pipeline)
    handlers = {"data": grain.checkpoint.CheckpointHandler()}
    with opened(pipeline) as expected, opened(pipeline) as iterator:
        with ocp.CheckpointManager(tmp_path / "ours", item_handlers=handlers) as stock:
            args = ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator))
            stock.restore(3, args=args)
        assert samples(iterator, 6) == samples(expected, 9)[3:]
    with opened(pipeline) as written:
        samples(written, 3)
        grain.checkpoint.CheckpointHandler().save(tmp_path, written)
    [path] = tmp_path.glob("process_*.json")
    assert IteratorHandler().restore(tmp_path) == path.read_bytes()
    assert json.loads(path.read_bytes()) == json.loads(
        Path(tmp_path, "ours", "3", "data", path.name).read_bytes()
    )


def test_the_handler_also_saves_without_a_manager(tmp_path):
    handler = IteratorHandler()
    handler.save(tmp_path, IteratorSave(b"anywhere"))  # pyright: ignore[reportArgumentType]
    assert handler.restore(tmp_path) == b"anywhere"  # pyright: ignore[reportArgumentType]


# When steps are saved.


def test_tables_are_found_by_name_if_none_are_given(tmp_path):
    state = {"embedding": jnp.zeros((5000, 2)), "bias": jnp.zeros(3)}
    with LoopCheckpoints(tmp_path, every_steps=1) as checkpoints:
        checkpoints.resume(state)
        checkpoints.after_step(1, state)
    assert [*inspect.open(tmp_path).at().tables] == ["embedding"]


def test_steps_are_saved_when_due_and_the_last_one_on_request(tmp_path):
    with checkpoints(tmp_path, every=3) as saves:
        state, _ = saves.resume(ADAGRAD.state())
        saved = [step for step in range(1, 9) if saves.after_step(step, state) is not None]
        assert saved == [3, 6]
        assert saves.save(8, state) is not None
        assert saves.save(8, state) is None
        saves.manager.wait_until_finished()
        assert saves.manager.all_steps() == [3, 6, 8]


def test_a_coalesced_save_has_the_position_of_its_own_step(tmp_path):
    with job(tmp_path, when_busy="coalesce") as (saves, iterator):
        state = ADAGRAD.state()
        with paused_saves(tmp_path) as held:
            for step in range(1, 6):
                state = ADAGRAD.step(state, next(iterator)["id"])
                saved = saves.after_step(step, state)
                assert (saved is not None and saved.kind is not None) == (step == 2)
            held.release()
            saves.manager.wait_until_finished()
        for _ in range(2):
            state = ADAGRAD.step(state, next(iterator)["id"])
        saved = saves.after_step(7, state)
        assert saved is not None and saved.step == 7
        saves.manager.wait_until_finished()
        assert saves.after_step(9, state) is None
        assert saves.manager.all_steps() == [2, 7]
        [following] = samples(iterator, 1)
    assert_resumes(tmp_path, 7, state, following)


@pytest.mark.parametrize("when_busy", ["wait", "skip", "coalesce"])
def test_the_last_step_is_saved_while_another_is_in_flight(tmp_path, when_busy):
    with paused_saves(tmp_path) as held, checkpoints(tmp_path, when_busy=when_busy) as saves:
        saves.after_step(2, ADAGRAD.state())
        threading.Timer(0.2, held.release).start()
        saved = saves.save(3, ADAGRAD.state())
        assert saved is not None and saved.kind is not None
        saves.manager.wait_until_finished()
        assert saves.manager.latest_step() == 3


# Failures.


def failing(owner, call, number=errno.ENOSPC):
    """Makes calls that take a path first fail for the files of positions."""
    real = getattr(owner, call)

    def refuse(path, *arguments, **options):
        if fnmatch.fnmatch(Path(path).name, "process_*.json"):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    return mock.patch.object(owner, call, refuse)


def test_an_unwritable_position_fails_the_save_and_keeps_the_previous_step(tmp_path):
    with job(tmp_path, every=1) as (saves, iterator):
        state = ADAGRAD.step(ADAGRAD.state(), next(iterator)["id"])
        saves.after_step(1, state)
        saves.manager.wait_until_finished()
        batch = next(iterator)
        with failing(Path, "write_bytes"):
            saves.after_step(2, ADAGRAD.step(state, batch["id"]))
            with pytest.raises(SaveFailed, match="room to write") as failure:
                saves.manager.wait_until_finished()
        assert isinstance(failure.value.__cause__, OutOfSpace)
    assert_resumes(tmp_path, 1, state, batch["sample"].tolist())


def test_the_last_step_is_saved_again_if_its_save_failed(tmp_path):
    state = ADAGRAD.state()
    with checkpoints(tmp_path, every=1) as saves:
        with failing_saves(tmp_path, errno.ENOSPC):
            saves.after_step(1, state)
            with pytest.raises(SaveFailed):
                saves.manager.wait_until_finished()
        assert saves.save(1, state) is not None
        saves.manager.wait_until_finished()
        assert saves.manager.all_steps() == [1]
        assert saves.save(1, state) is None


def test_the_last_step_is_saved_again_after_a_rollback(tmp_path):
    with checkpoints(tmp_path, every=1) as saves, opened("dataset") as iterator:
        state = ADAGRAD.state()
        for step in (1, 2):
            state = ADAGRAD.step(state, next(iterator)["id"])
            saves.after_step(step, state)
        saves.manager.wait_until_finished()
        before = saves.manager.restore(1, ADAGRAD.state()).state
        other = ADAGRAD.step(before, next(iterator)["id"])
        with pytest.warns(UserWarning, match="later steps"):
            assert saves.save(2, other) is not None
        saves.manager.wait_until_finished()
    with checkpoints(tmp_path) as saves:
        found, done = saves.resume(ADAGRAD.state())
    assert done == 2
    assert_same(leaves(found), leaves(other))


def test_the_restored_step_is_saved_again_after_its_deletion(tmp_path):
    state = ADAGRAD.state()
    with checkpoints(tmp_path) as saves:
        for step in (2, 4):
            saves.after_step(step, state)
    with checkpoints(tmp_path) as saves:
        state, done = saves.resume(state)
        assert saves.save(done, state) is None
        saves.manager.delete(done)
        assert saves.save(done, state) is not None
        assert saves.save(done, state) is None
        assert saves.manager.all_steps() == [2, 4]


def test_the_step_of_a_preemption_is_durable_even_if_an_earlier_save_failed(tmp_path):
    state = ADAGRAD.state()
    with checkpoints(tmp_path, every=100) as saves:
        with failing_saves(tmp_path, errno.ENOSPC):
            saves.save(1, state)
            while saves.manager._saver.busy():
                pass
        with mock.patch.object(saves.manager, "reached_preemption", return_value=True):
            with pytest.raises(SaveFailed) as failure:
                saves.after_step(2, state)
        assert failure.value.saved is not None
        assert saves.manager.latest_step() == 2


def test_a_wait_after_a_preemption_returns_the_events_of_its_save(tmp_path):
    state = ADAGRAD.state()
    with checkpoints(tmp_path, every=100) as saves:
        saves.save(1, state)
        with mock.patch.object(saves.manager, "reached_preemption", return_value=True):
            assert saves.manager.save_if_due(2, state) is not None
        assert [event.step for event in saves.manager.wait_until_finished()] == [1, 2]
        assert saves.manager.wait_until_finished() == []


def test_a_position_that_is_unreadable_or_of_another_process_count_is_refused(tmp_path):
    train(tmp_path, 2)
    with job(tmp_path) as (saves, _):
        with failing(os, "open", errno.EIO):
            with pytest.raises(StorageError, match="process_0-of-1.json"):
                saves.resume(ADAGRAD.state())
        with mock.patch("deltackpt.coordination.process_count", return_value=2):
            with pytest.raises(TemplateMismatch, match=r"one of 2 .* process_0-of-1.json"):
                IteratorHandler().restore(tmp_path / "2" / "data")  # pyright: ignore[reportArgumentType]
        assert saves.resume(ADAGRAD.state())[1] == 2


def test_a_step_without_a_position_is_refused_unless_none_is_requested(tmp_path):
    with checkpoints(tmp_path) as saves:
        saves.save(2, ADAGRAD.state())
    match = "expected the items data, found no data; restore without them"
    with job(tmp_path) as (saves, _), pytest.raises(TemplateMismatch, match=match):
        saves.resume(ADAGRAD.state())
    with checkpoints(tmp_path) as saves:
        assert saves.resume(ADAGRAD.state())[1] == 2


def test_another_pipeline_is_refused(tmp_path):
    train(tmp_path, 2, pipeline="loader")
    with checkpoints(tmp_path, iter(loader_of(source="another source"))) as saves:
        with pytest.raises(TemplateMismatch, match="does not match datasource"):
            saves.resume(ADAGRAD.state())


@pytest.mark.parametrize(
    "given_data", [dataset_of(), loader_of(), (n for n in range(3)), [1, 2]], ids=lambda d: type(d)
)
def test_data_without_a_position_is_refused(tmp_path, given_data):
    with pytest.raises(OptionError, match=r"get_state\(\) and set_state\(\)"):
        checkpoints(tmp_path, given_data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", [{"next": {1, 2}}, {0: 7}, {"next": (1, 2)}])
def test_a_position_that_is_neither_bytes_nor_json_is_refused(tmp_path, state):
    odd = mock.Mock(get_state=lambda: state, set_state=lambda state: None)
    with checkpoints(tmp_path, odd, every=1) as saves:
        with pytest.raises(OptionError, match="bytes or a JSON value"):
            saves.after_step(1, ADAGRAD.state())


@pytest.mark.parametrize("every", [0, -5])
def test_a_non_positive_save_interval_is_refused(tmp_path, every):
    with pytest.raises(OptionError, match="every_steps"):
        checkpoints(tmp_path, every=every)


# Random sequences of starts, unsaved steps and damage.


class Counted(NamedTuple):
    """A state that records the ids it was trained on."""

    emb: jax.Array
    seen: jax.Array


@settings(max_examples=15)
@given(
    starts=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 4),
            st.sampled_from([None, "data/*.json", "*/manifest.0.msgpack"]),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_state_and_data_always_have_the_same_step(tmp_path_factory, starts):
    """Each start trains, then trains unsaved steps, and may damage the newest step."""
    root = tmp_path_factory.mktemp("run")
    order = [batch["id"].tolist() for batch in itertools.islice(iter(dataset_of()), 60)]
    first = Counted(jnp.zeros((ROWS, 1), jnp.int32), jnp.zeros((60, BATCH), jnp.int32))
    for trained, unsaved, damaged in starts:
        iterator = iter(dataset_of())
        # Steps are skipped, then moved aside: both warn.
        with (
            warnings.catch_warnings(action="ignore", category=UserWarning),
            LoopCheckpoints(
                root, tables=deltackpt.Tables(select="emb"), every_steps=2, data=iterator
            ) as saves,
        ):
            state, done = saves.resume(first)
            assert state.seen[:done].tolist() == order[:done]
            assert not state.seen[done:].any()
            assert int(state.emb.sum()) == done * BATCH
            for step in range(done + 1, done + trained + unsaved + 1):
                ids = next(iterator)["id"]
                assert ids.tolist() == order[step - 1]
                state = Counted(state.emb.at[ids].add(1), state.seen.at[step - 1].set(ids))
                if step <= done + trained:
                    saves.after_step(step, state)
        steps = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
        if damaged and len(steps) > 1:
            damage(root, steps[-1], damaged)


# Loops in processes that are killed.


def end_of(folder, loop, arguments):
    """Digest and samples of an uninterrupted run in this process."""
    path = folder / "whole.jsonl"
    LOOPS[loop].main([f"--directory={folder / 'whole'}", f"--journal={path}", *arguments])
    [end] = demo.journal.read(path, "end")
    return end["digest"], lineage.read([path]).samples


def check_killed(folder, loop, pipeline, *, kills, workers=0, seed=0):
    # Enough epochs for every kill to come before the end.
    epochs = 1 + kills // 2
    arguments = f"--epochs={epochs} --every=10 --pipeline={pipeline} --workers={workers}".split()
    digest, samples = end_of(folder, loop, arguments)
    assert demo.whole_epochs(samples)
    run = demo.Run(loop=loop, folder=folder / "killed", arguments=arguments)
    rng = random.Random(seed)
    for number in range(kills):
        run.kill(rng, in_save=number % 2 == 0)
    assert run.finish(Console(quiet=True)) == digest
    found = lineage.read(run.journals)
    assert found.samples == samples
    assert len(found.starts) == kills + 1 and found.starts[0] == 0


@pytest.mark.processes
def test_a_killed_loop_trains_every_sample_once_and_ends_in_the_same_state(tmp_path):
    check_killed(tmp_path, "optax", "dataset", kills=2)


@pytest.mark.long
@pytest.mark.drawn("loops", 2)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("loop", "pipeline", "workers"),
    [("nnx", "dataset", 0), ("nnx", "loader", 2), ("optax", "dataset", 2), ("optax", "loader", 0)],
)
def test_a_repeatedly_killed_loop_ends_in_the_same_state(tmp_path, loop, pipeline, workers):
    check_killed(tmp_path, loop, pipeline, kills=4, workers=workers, seed=workers + 1)


def test_the_lineage_omits_steps_trained_after_the_last_save(tmp_path):
    def written(name, *entries):
        path = tmp_path / name
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"event": "st')
        return path

    def step(number, *samples):
        return {"event": "step", "step": number, "samples": list(samples)}

    journals = [
        written("0", {"event": "start", "step": 0}, step(1, 5, 6), step(2, 7, 8), step(3, 1, 2)),
        written("1"),
        written("2", {"event": "start", "step": 2}, step(3, 3, 4)),
    ]
    found = lineage.read(journals)
    assert found.samples == [[5, 6], [7, 8], [3, 4]]
    assert (found.starts, found.repeated) == ([0, 2], 1)
    with pytest.raises(ValueError, match="expected step 4, found 9"):
        lineage.read([*journals, written("3", {"event": "start", "step": 3}, step(9, 1))])


# Several processes, each with its own data.


def processes(root, count, *, steps, kill_after=0, refusing=-1):
    """Runs a job of real processes; returns the output of each."""
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    said = [root.with_name(f"{root.name}-{number}.jsonl") for number in range(count)]
    members = []
    try:
        for number, path in enumerate(said):
            # Gloo writes to stdout.
            path.write_text("")
            numbers = (count, number, steps, kill_after, refusing)
            command = [sys.executable, loops_worker.__file__, address, root, path, *numbers]
            members.append(subprocess.Popen(list(map(str, command)), env=environment))
        for member in members:
            member.wait(200)
    finally:
        for member in members:
            member.kill()
            member.wait()
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in said]


@pytest.mark.processes
def test_each_of_two_killed_processes_resumes_with_its_own_data(tmp_path):
    whole = processes(tmp_path / "whole", 2, steps=loops_worker.STEPS)
    killed = processes(tmp_path / "killed", 2, steps=loops_worker.STEPS, kill_after=7)
    resumed = processes(tmp_path / "killed", 2, steps=loops_worker.STEPS)
    seen = []
    for expected, before, after in zip(whole, killed, resumed, strict=True):
        done = after[0]["resumed"]
        assert 0 < done < 7 and not any("end" in line for line in before)
        samples = [line["samples"] for line in before[1:]][:done]
        samples += [line["samples"] for line in after[1:-1]]
        assert samples == [line["samples"] for line in expected[1:-1]]
        assert after[-1] == expected[-1]
        seen += sum(samples, [])
    assert sorted(seen) == list(range(loops_worker.SAMPLES))
    [alone] = processes(tmp_path / "killed", 1, steps=loops_worker.STEPS)
    assert alone[0]["refused"] == "TemplateMismatch"
    assert "process_0-of-2.json, process_1-of-2.json" in alone[0]["why"]
    refused = processes(tmp_path / "killed", 2, steps=loops_worker.STEPS, refusing=1)
    assert [lines[0]["refused"] for lines in refused] == ["ProcessFailed", "TemplateMismatch"]
    assert "found on process 1 TemplateMismatch: " in refused[0][0]["why"]
    assert "this position is of other data" in refused[0][0]["why"]


@pytest.mark.processes
def test_rollouts_use_the_exact_bits_of_the_trainer(tmp_path, capsys):
    assert policy_loop.main([f"--directory={tmp_path / 'run'}", "--steps=12"]) == 0
    assert "bit-exact with the trainer at that step      yes" in capsys.readouterr().out
