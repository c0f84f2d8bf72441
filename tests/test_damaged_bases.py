# SPDX-License-Identifier: Apache-2.0
"""A damaged save that several steps need is read once, and all these steps are named."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import servers
from damaged_roots import EventHandler

import deltackpt
from deltackpt import touched
from deltackpt.errors import BrokenChain, Damaged, NoIntactStep
from deltackpt.maintenance.compact import compact
from deltackpt.reading import stored_saves
from deltackpt.session.step_reader import StepReader
from deltackpt.storage import arrays, digests
from deltackpt.storage.store import FileStore
from deltackpt.testing import stored_chunks
from deltackpt.tiers.copy import copy

_numbers = itertools.count()
HANDLERS = {"embeddings": deltackpt.Tables(select="table", slots={})}
#: Steps saved as bases, each followed by deltas.
BASES = (1, 3)
LAST = 8


def written(root: Path, dense: deltackpt.Dense | None = None) -> list[dict]:
    """Returns the states of steps 0 to ``LAST``; saves all but the first."""
    state = {"table": np.zeros((64, 4), np.float32), "w": np.zeros((40, 300), np.float32)}
    states, marks = [state], touched.init({"table": state["table"]})
    options = deltackpt.ManagerOptions() if dense is None else deltackpt.ManagerOptions(dense=dense)
    with deltackpt.CheckpointManager(root, handlers=HANDLERS, options=options) as manager:
        for step in range(1, LAST + 1):
            state = {name: leaf.copy() for name, leaf in state.items()}
            state["table"][step] = state["w"][step, 0] = step
            marks = touched.mark(marks, {"table": jnp.arange(step, step + 1)})
            manager.save(step, state, touched=marks, force_base=step in BASES)
            manager.wait_until_finished()
            states.append(state)
    return states


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict]]:
    root = tmp_path_factory.mktemp("run")
    return root, written(root)


@pytest.fixture
def root(run, tmp_path) -> Path:
    shutil.copytree(run[0], tmp_path / "root")
    return tmp_path / "root"


def chunk(folder: Path) -> Path:
    """A file with rows of a step or of a compacted base."""
    return stored_chunks(folder)[0].path


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "flip":
        # Restores do not read the headers of layers.
        data[stored_chunks(path.parents[1])[0].offset if path.name == "layer.0" else 0] ^= 4
        path.write_bytes(data)
    else:
        path.write_bytes(data[:-1])


class Restore:
    """Runs ``restore_latest()`` and records what it did.

    Attributes:
      read: the steps that it tried, in order.
      skipped: steps to their errors, newest first.
      told: steps to the messages of their events.
      warned: its warnings.
    """

    def __init__(self, root: Path | str, states: list[dict], expected: int | None, **options):
        self.read: list[int] = []
        real = StepReader.find

        def find(reader):
            self.read.append(reader.step)
            real(reader)

        events = EventHandler()
        managed = deltackpt.ManagerOptions(access="read", **options)
        with (
            deltackpt.CheckpointManager(
                root, handlers=HANDLERS, options=managed, event_handlers=(events,)
            ) as manager,
            mock.patch.object(StepReader, "find", find),
            pytest.warns(UserWarning) as warned,
            pytest.raises(NoIntactStep) if expected is None else contextlib.nullcontext(),
        ):
            found = manager.restore_latest(states[0])
        self.warned = [str(one.message) for one in warned]
        self.told = {
            one.step: one.message
            for one in events
            if isinstance(one, deltackpt.events.FailureEvent) and one.operation == "skip"
        }
        self.skipped = {}
        if expected is not None:
            assert found is not None and found.step == expected
            for name, leaf in states[expected].items():
                np.testing.assert_array_equal(found.state[name], leaf)
            self.skipped = dict(found.skipped)

    def names(self, steps: list[int], name: str) -> None:
        """Checks that one object lost all the steps, and that it is named with them."""
        assert [*self.skipped] == steps == [*self.told]
        [warning] = self.warned
        assert warning.startswith(f"step {steps[0]} is skipped")
        which = f"steps {', '.join(map(str, reversed(steps)))} need it"
        for text in (warning, *map(str, self.skipped.values()), *self.told.values()):
            assert name in text and which in text


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_steps_on_a_damaged_base_are_skipped_unread(root, run, how):
    damage(chunk(root / "3"), how)
    found = Restore(root, run[1], 2)
    assert found.read == [8, 2]
    found.names([8, 7, 6, 5, 4, 3], "3/embeddings/shard.0/g0.0/values/c.0.0: ")
    assert all(isinstance(error, Damaged) for error in found.skipped.values())


@pytest.mark.parametrize("name", ["manifest.0.msgpack", "layer.0"])
def test_steps_on_a_damaged_delta_are_skipped_unread_and_those_below_it_are_not(root, run, name):
    damage(root / "5" / "embeddings" / name, "flip")
    found = Restore(root, run[1], 4)
    assert found.read == [8, 4]
    found.names([8, 7, 6, 5], f"5/embeddings/{name}: ")


def test_steps_on_a_missing_delta_are_skipped_unread(root, run):
    shutil.rmtree(root / "5")
    found = Restore(root, run[1], 4)
    assert found.read == [8, 4]
    found.names([8, 7, 6], "parent 5 (save id ")
    assert all(isinstance(error, BrokenChain) for error in found.skipped.values())


def test_steps_that_are_lost_for_another_reason_are_reported_separately(root, run):
    shutil.rmtree(root / "1")
    damage(chunk(root / "3"), "flip")
    found = Restore(root, run[1], None)
    assert found.read == [8, 2]
    assert [*found.told] == [8, 7, 6, 5, 4, 3, 2]
    assert all(("3/embeddings" in text) == (step > 2) for step, text in found.told.items())


def test_a_damaged_base_is_not_read_twice(root, run):
    for base in BASES:
        damage(chunk(root / str(base)), "flip")
    found = Restore(root, run[1], None)
    assert found.read == [8, 2]
    assert [*found.told] == [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("stays", [True, False], ids=["with its steps", "alone"])
def test_a_damaged_compacted_base_loses_only_steps_without_another_chain(root, run, stays):
    compact(root, step=5)
    damage(chunk(root / "compacted" / "5"), "flip")
    if stays:
        damage(chunk(root / "7"), "flip")
        found = Restore(root, run[1], 6)
        assert found.read == [8, 6] and [*found.skipped] == [8, 7]
        return
    for step in (3, 4):
        shutil.rmtree(root / str(step))
    found = Restore(root, run[1], 2)
    assert found.read == [8, 2]
    found.names([8, 7, 6, 5], "compacted/5/embeddings/shard.0/g0.0/values/c.0.0: ")


def test_a_compacted_base_above_a_damaged_base_keeps_its_steps(root, run):
    compact(root, step=5)
    damage(chunk(root / "3"), "flip")
    damage(chunk(root / "8"), "flip")
    found = Restore(root, run[1], 7)
    assert found.read == [8, 7] and [*found.skipped] == [8]


@pytest.mark.parametrize("name", ["3/dense/d/*", "5/embeddings/layer.0"])
def test_damaged_blocks_of_dense_leaves_lose_the_steps_of_one_chain(tmp_path, name):
    root = tmp_path / "root"
    states = written(root, deltackpt.Dense(deltas="blocks"))
    path = next(path for path in sorted(root.glob(name)) if path.is_file())
    if name[0] == "3":
        damage(path, "flip")
    else:
        stored_chunks(root / "5", segment="dense.*", array="blocks")[0].flip()
    base = int(name[0])
    found = Restore(root, states, base - 1)
    assert found.read == [8, base - 1]
    found.names([*range(8, base - 1, -1)], f"{path.relative_to(root)}")


def test_an_error_that_the_files_do_not_confirm_loses_only_one_step(root, run):
    at = chunk(root / "3")
    real = arrays.read_array
    failed = []

    def read_array(directory, *arguments, **options):
        if str(directory).endswith("/3/embeddings/shard.0/g0.0/values") and not failed:
            failed.append(directory)
            raise Damaged(str(at.relative_to(root)), "a chunk", "the answer of a broken cache")
        return real(directory, *arguments, **options)

    with mock.patch.object(arrays, "read_array", read_array):
        found = Restore(root, run[1], 7)
    assert found.read == [8, 7] and [*found.skipped] == [8]


def test_a_manifest_that_cannot_be_read_now_loses_no_step(root, run):
    damage(chunk(root / "7"), "flip")
    real = FileStore.get
    refused = iter([True])

    def get(store, key):
        if key.endswith("5/embeddings/manifest.0.msgpack") and was_read and next(refused, False):
            raise deltackpt.errors.StorageError("the network is away")
        return real(store, key)

    was_read: list[bool] = []
    blamed = deltackpt.session.restore_choice.recovery.find_damaged_save

    def after(*arguments):
        found = blamed(*arguments)
        was_read.append(True)
        return found

    with (
        mock.patch.object(FileStore, "get", get),
        mock.patch.object(deltackpt.session.restore_choice.recovery, "find_damaged_save", after),
    ):
        found = Restore(root, run[1], 6)
    assert next(refused, None) is None
    assert found.read == [8, 6] and [*found.skipped] == [8, 7]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[servers.Server]:
    with servers.s3(tmp_path_factory.mktemp("server")) as running:
        with servers.environment_of(running):
            yield running


@pytest.mark.parametrize("how", ["flip", "gone"])
@pytest.mark.parametrize("name", ["embeddings/shard.0/g0.0/values/c.0.0", "commit.msgpack"])
@pytest.mark.parametrize("step", [3, 5])
def test_steps_on_a_damaged_save_in_a_bucket_are_skipped_unread(root, run, bucket, step, name, how):
    url = bucket.bucket(f"damaged{next(_numbers)}") + "/run"
    copy(root, url, all_steps=True, endpoint=bucket.endpoint)
    options = deltackpt.Tiers(endpoint=bucket.endpoint)
    place = deltackpt.storage.buckets.locate(url, endpoint=bucket.endpoint).open()
    if step == 5:
        name = name.replace("shard.0/g0.0/values/c.0.0", "layer.0")
    [key] = [key for key in place.keys() if key.endswith(name) and key.startswith(f"saves/{step}.")]
    at = place / key
    data = at.store.get(at.key)
    if how == "gone":
        at.store.delete([at.key])
    else:
        at.store.put(at.key, data[:-1] + bytes([data[-1] ^ 4]))
    found = Restore(url, run[1], step - 1, tiers=options)
    assert found.read == [8, step - 1]
    found.names([*range(8, step - 1, -1)], f"/{name}: ")
    assert all(re.search(rf"\b{step}(\.\w+)*/{name}", text) for text in found.told.values())


def test_digests_of_another_step_are_damage(tmp_path):
    """As in a backup that mixes steps: a delta's digests have no file of the dense item."""
    states = written(tmp_path, deltackpt.Dense(deltas="blocks"))
    files = stored_saves.read_save(tmp_path / "5").head.files
    others = {name: digests.Digest(*of) for name, of in files.items()}
    (tmp_path / "3" / "digests.step.msgpack").write_bytes(digests.digests_bytes(others))
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS, options=options) as manager:
        with pytest.raises((Damaged, BrokenChain)):
            manager.restore(6, states[6])
        with pytest.warns(UserWarning, match="skipped"):
            found = manager.restore_latest(states[6])
    assert found.step == 2
    np.testing.assert_array_equal(found.state["w"], states[2]["w"])
