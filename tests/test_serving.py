# SPDX-License-Identifier: Apache-2.0
"""Followed weights: every version is one complete state of the trainer, despite failures."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltackpt
from deltackpt import serving, touched
from deltackpt.errors import (
    ClosedError,
    Damaged,
    OptionError,
    ServiceUnavailable,
    WaitTimeout,
)
from deltackpt.maintenance.compact import compact
from deltackpt.serving import Live, ServedLeaves
from deltackpt.storage.store import FileStore
from deltackpt.testing import Disk, StoredChunk, stored_chunks

#: Guards against hangs only.
HANG_SECS = 60.0
HANDLERS = {"embeddings": deltackpt.Tables(select="table", slots={})}
#: Elements of the larger leaf: 1 MiB of bf16.
COUNT = 1 << 19


pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


def initial(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "table": jnp.zeros((100, 4)),
        "params": {
            "w": jnp.asarray(rng.normal(size=(512, COUNT // 512)), jnp.bfloat16),
            "odd": jnp.asarray(rng.normal(size=(33, 77)), jnp.bfloat16),
            "b": jnp.zeros(7, jnp.bfloat16),
            "layers": [jnp.float32(1), jnp.arange(3000)],
            "none": None,
        },
        "nu": jnp.asarray(rng.random((300, 70)), jnp.float32),
        "step": jnp.int32(0),
    }


class Trainer:
    """A manager, and the states that it saved or appended."""

    def __init__(self, root: Path, codec: Any = "lossless", **options: Any):
        self.root = root
        options = {"dense": deltackpt.Dense(deltas="blocks", codec=codec), **options}
        self.manager = deltackpt.CheckpointManager(
            root, handlers=HANDLERS, options=deltackpt.ManagerOptions(**options)
        )
        self.state = initial()
        self.marks = touched.init({"table": self.state["table"]})
        self.step = 0
        self.states: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def train(self, share: float = 0.01) -> None:
        """Changes some elements of the weights, and all of the moments."""
        self.step += 1
        rng = np.random.default_rng(self.step)
        params = dict(self.state["params"])
        for name in ("w", "odd"):
            array = np.array(params[name])
            flat = array.reshape(-1).view(np.uint16)
            flat[rng.choice(flat.size, int(share * flat.size), replace=False)] ^= 1
            params[name] = jax.device_put(array, params[name].sharding)
        params["layers"] = [jnp.float32(self.step), params["layers"][1]]
        self.state = {**self.state, "params": params, "nu": self.state["nu"] * 0.9}

    def save(self, **options: Any) -> int:
        self.train()
        self.manager.save(self.step, self.state, touched=self.marks, **options)
        self.manager.wait_until_finished()
        self.states[self.step] = self.state
        return self.step

    def log(self) -> int:
        self.train()
        self.manager.append(self.step, self.state, touched=self.marks)
        self.manager.wait_appended()
        self.manager.wait_until_finished()
        self.states[self.step] = self.state
        return self.step


def opened(root: Path, leaves: Any = "params/**", **options: Any) -> Live:
    return serving.follow(root, leaves, poll_secs=None, **options)


def assert_shows(live: Live, state: dict[str, Any], step: int) -> None:
    with live.version() as version:
        assert version.step == step
        assert_is(version.dense, state["params"])


def assert_is(dense: ServedLeaves, params: dict[str, Any]) -> None:
    expected = {
        "params/w": params["w"],
        "params/odd": params["odd"],
        "params/b": params["b"],
        "params/layers/0": params["layers"][0],
        "params/layers/1": params["layers"][1],
    }
    assert {*dense} == {*expected}
    for path, leaf in expected.items():
        found = dense[path]
        assert (found.shape, found.dtype.name) == (leaf.shape, leaf.dtype.name), path
        assert found.tobytes() == np.asarray(leaf).tobytes(), (path, dense.step)
        assert not found.flags.writeable


def chunks_of(step_dir: Path) -> list[StoredChunk]:
    """The blocks of a delta that hold bf16 weights."""
    found = stored_chunks(step_dir, "*", segment="dense.bfloat16*")
    assert found
    return found


# Versions.


@pytest.mark.parametrize("codec", ["lossless", {"params/w": "ef4", "params/odd": "ef8"}])
def test_each_version_equals_a_restore(tmp_path, codec):
    with Trainer(tmp_path, codec) as trainer:
        trainer.save()
        live, late = opened(tmp_path), opened(tmp_path)
        for number in range(8):
            assert live.advance() and not live.advance()
            with deltackpt.CheckpointManager(
                tmp_path, handlers=HANDLERS, options=deltackpt.ManagerOptions(access="read")
            ) as manager:
                restored = manager.restore(trainer.step, trainer.state).state
            assert_shows(live, restored, trainer.step)
            if codec == "lossless":
                assert_shows(live, trainer.state, trainer.step)
            if number % 3 == 2:  # It catches up on several at once.
                late.advance()
                assert_shows(late, restored, trainer.step)
            trainer.save(force_base=number == 4)
        assert live.problem is None


def test_a_tree_is_nested_like_the_state(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
    live = opened(tmp_path, ["params/layers/*", "params/b", "step"])
    live.advance()
    with live.version() as version:
        tree = version.dense.tree()
    assert {*tree} == {"params", "step"} and {*tree["params"]} == {"b", "layers"}
    assert tree["params"]["layers"][0] == 1.0 and tree["step"].shape == ()


def test_only_blocks_that_changed_are_read(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        live.advance()
        with live.version() as version:
            # The whole base, in Orbax's layout.
            assert version.dense.bytes_read >= version.dense.nbytes
        for _ in range(3):
            trainer.save()
            live.advance()
            with live.version() as version:
                assert 0 < version.dense.bytes_read < version.dense.nbytes / 40
                assert_is(version.dense, trainer.state["params"])


@pytest.mark.parametrize(("deltas", "dense"), [("whole", "whole"), ("blocks", "delta")])
def test_following_a_short_leaf_does_not_read_a_long_one(tmp_path, monkeypatch, deltas, dense):
    read, real = [], FileStore.read_into

    def counted(store: Any, key: str, start: int, out: Any, **how: Any) -> Any:
        read.append(sum(map(len, out)))
        return real(store, key, start, out, **how)

    monkeypatch.setattr(FileStore, "read_into", counted)
    options = {"dense": deltackpt.Dense(deltas=deltas), "wal": deltackpt.WalOptions(dense=dense)}
    with Trainer(tmp_path, **options) as trainer:
        noise = np.random.default_rng(0).normal(size=1 << 20)
        long, short = jnp.asarray(noise, jnp.float32), jnp.zeros(1024)
        live = opened(tmp_path, "short")
        for take in (trainer.save, trainer.save, trainer.log, trainer.log, trainer.save):
            long, short = long * 1.001, short + 1
            trainer.state = {**trainer.state, "long": long, "short": short}
            take()
            read.clear()
            assert live.advance()
            with live.version() as version:
                assert [*version.dense] == ["short"] and np.array_equal(
                    version.dense["short"], short
                )
                assert version.dense.bytes_read < long.nbytes / 16
            # Includes headers and manifests.
            assert sum(read) < long.nbytes / 8


def test_a_flipped_bit_is_detected_only_in_leaves_that_are_followed(tmp_path):
    with Trainer(tmp_path, dense=deltackpt.Dense(deltas="whole")) as trainer:
        marked = np.arange(1024, dtype=np.int32) + 123_456_789
        trainer.state |= {"long": jnp.ones(1 << 20), "short": jnp.asarray(marked)}
        trainer.save()
        [file] = [path for path in Path(tmp_path, "1/dense/d").iterdir() if path.is_file()]
        whole = file.read_bytes()
        at = whole.index(marked.tobytes())
        for place, is_found in ((at + 5, True), (len(whole) // 2 + (1 << 19), False)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            live = opened(tmp_path, "short")
            if is_found:
                with pytest.raises(Damaged, match=f"1/dense/d/{file.name}"):
                    live.advance()
            else:  # This reader does not read it; a reader of ``long`` detects it.
                assert live.advance()
                with pytest.raises(Damaged):
                    opened(tmp_path, "long").advance()


def test_versions_share_the_memory_of_unchanged_leaves(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path, "**")
        live.advance()
        with live.version() as before:
            trainer.save()
            live.advance()
            with live.version() as after:
                assert (
                    after.dense["params/layers/1"].ctypes.data
                    == before.dense["params/layers/1"].ctypes.data
                )
                assert after.dense["params/w"].ctypes.data != before.dense["params/w"].ctypes.data
                changed = [
                    path
                    for path in after.dense
                    if after.dense.content(path) != before.dense.content(path)
                ]
        assert sorted(changed) == ["nu", "params/layers/0", "params/odd", "params/w"]


def test_memory_without_readers_is_reused(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        places = []
        for _ in range(6):
            live.advance()
            with live.version() as version:
                places.append(version.dense["params/w"].ctypes.data)
            del version
            gc.collect()
            trainer.save()
        # The first version has the memory of the base's values.
        assert len({*places[1:]}) == 2


def test_an_array_that_is_kept_does_not_change(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        live.advance()
        with live.version() as version:
            kept = version.dense["params/w"][3:5]
        del version
        expected = np.asarray(trainer.state["params"]["w"])[3:5].tobytes()
        for _ in range(4):
            trainer.save()
            live.advance()
            gc.collect()
        assert kept.tobytes() == expected


def test_a_concurrent_reader_sees_only_complete_versions(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        with serving.follow(tmp_path, "params/**", poll_secs=0.001) as live:
            live.wait_ready(HANG_SECS)
            seen: dict[int, int] = {}
            wrong: list[int] = []
            stop = threading.Event()

            def read() -> None:
                while not stop.is_set():
                    with live.version() as version:
                        step = version.step
                        # From the same step, even during an update.
                        number = float(version.dense["params/layers/0"])
                        seen[step] = hash(version.dense["params/w"].tobytes())
                        if number != step:
                            wrong.append(step)

            readers = [threading.Thread(target=read) for _ in range(2)]
            for one in readers:
                one.start()
            for number in range(12):
                trainer.save(force_base=number == 6)
                # On a busy machine, a version may be replaced before a reader sees it.
                end = time.monotonic() + HANG_SECS
                while len(seen) <= min(number, 2):
                    assert time.monotonic() < end, "no reader sees a new version"
                    time.sleep(0.001)
            live.wait_ready(HANG_SECS, trainer.step)
            stop.set()
            for one in readers:
                one.join()
        assert not wrong and len(seen) > 2
        for step, found in seen.items():
            assert found == hash(np.asarray(trainer.states[step]["params"]["w"]).tobytes())


def test_leaves_that_orbax_writes_are_read_by_orbax(tmp_path):
    with Trainer(tmp_path) as trainer:
        # Our writer leaves these leaves to Orbax's.
        trainer.state = {**trainer.state, "name": "a text", "number": 3}
        live = opened(tmp_path, ["params/**", "number", "name"])
        for _ in range(2):
            trainer.save()
            live.advance()
            with live.version() as version:
                assert (
                    version.dense["params/w"].tobytes()
                    == np.asarray(trainer.state["params"]["w"]).tobytes()
                )
                assert version.dense["number"] == 3


def test_leaves_that_only_orbax_can_write_are_shown_unchanged(tmp_path):
    with Trainer(tmp_path, dense=deltackpt.Dense()) as trainer:
        further = {"complex": np.array(1j), "a/b": "a text", "c/d": np.float32(1)}
        trainer.state = {**trainer.state, **further}
        live = opened(tmp_path, ["complex", "a/b", "c/d"])
        for _ in range(2):
            trainer.save()
            live.advance()
            with live.version() as version:
                assert version.dense.keys() == {"complex", "c/d"}
                assert version.dense["complex"].shape == version.dense["c/d"].shape == ()
                assert version.dense["complex"] == 1j and version.dense["c/d"] == 1


def test_two_leaves_with_the_same_path_are_not_confused(tmp_path):
    with Trainer(tmp_path, dense=deltackpt.Dense()) as trainer:
        trainer.state = {**trainer.state, "a": {"b": np.ones(2)}, "a/b": np.zeros(2)}
        trainer.save()
    live = opened(tmp_path, ["params/**"])
    live.advance()
    assert_shows(live, trainer.state, trainer.step)
    with pytest.raises(OptionError, match=r"several with\n  a/b\n"):
        opened(tmp_path, "**").advance()


@pytest.mark.parametrize("before", [None, ..., "a text"])
def test_leaves_that_appear_or_become_arrays_between_two_deltas_are_shown(tmp_path, before):
    with Trainer(tmp_path) as trainer:
        if before is not ...:
            trainer.state = {**trainer.state, "late": before}
        live = opened(tmp_path, ["params/**", "late"])
        for step in range(1, 5):
            if step == 3:
                trainer.state = {**trainer.state, "late": jnp.arange(700)}
            trainer.save()
            live.advance()
            with live.version() as version:
                assert version.step == step and ("late" in version.dense) == (step >= 3)
        with live.version() as version:
            assert np.array_equal(version.dense["late"], np.arange(700))
            assert np.array_equal(version.dense.tree()["late"], np.arange(700))


@pytest.mark.parametrize("deltas", ["blocks", "whole"])
def test_leaves_without_elements_are_left_out(tmp_path, deltas):
    with Trainer(tmp_path, dense=deltackpt.Dense(deltas=deltas)) as trainer:
        trainer.state = {**trainer.state, "empty": jnp.zeros((0, 3))}
        live = opened(tmp_path, ["params/**", "empty"])
        for _ in range(3):
            trainer.save()
            live.advance()
            assert_shows(live, trainer.state, trainer.step)


def test_sharded_leaves_are_assembled(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    with Trainer(tmp_path) as trainer:
        params = trainer.state["params"]
        params = {**params, "w": jax.device_put(params["w"], sharding)}
        trainer.state = {**trainer.state, "params": params}
        live = opened(tmp_path)
        for _ in range(3):
            trainer.save()
            live.advance()
            assert_shows(live, trainer.state, trainer.step)


# Failures.


@pytest.mark.parametrize(
    ("leaves", "found"),
    [
        ("table", "only tables and slots\n  table"),
        (["head", "heads/*"], "none\nthe dense leaves are\n  nu\n  params/b"),
        ("params/none", "found only other leaves that match\n  params/none"),
    ],
)
def test_missing_leaves_are_an_error(tmp_path, leaves, found):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        with pytest.raises(OptionError, match=found):
            opened(tmp_path, leaves).advance()
        with serving.follow(tmp_path, leaves) as live, pytest.raises(OptionError, match=found):
            live.wait_ready(HANG_SECS)


def test_one_of_several_patterns_without_a_match_warns_once(tmp_path, caplog):
    with Trainer(tmp_path) as trainer:
        live = opened(tmp_path, ["params/**", "heads/*"])
        for _ in range(2):
            trainer.save()
            assert live.advance()
    assert [one.message for one in caplog.records if "heads" in one.message] == [
        "leaves: 'heads/*' does not match any dense leaf yet"
    ]


def test_nothing_is_shown_before_the_first_step(tmp_path):
    with Trainer(tmp_path) as trainer:
        live = opened(tmp_path)
        assert not live.advance()
        for ask in (live.staleness, live.dense_on_device, live.version().__enter__):
            with pytest.raises(ServiceUnavailable):
                ask()
        with pytest.raises(WaitTimeout):
            live.wait_ready(0.0)
        trainer.save()
        assert live.advance()
        live.wait_ready(0.0)


def test_a_damaged_version_is_never_shown_and_the_next_one_is(tmp_path, caplog):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        trainer.save()
        live.advance()
        step, state = trainer.step, trainer.state
        trainer.save()
        damaged = chunks_of(tmp_path / str(trainer.step))
        for chunk in damaged:
            chunk.flip()
            with caplog.at_level(logging.WARNING):
                assert not live.advance()
            assert live.problem is not None
            assert_shows(live, state, step)
            assert live.staleness().steps == 1
            chunk.flip()
            live._candidates._refused.clear()
        assert "a newer version cannot be read" in caplog.text
        damaged[0].flip()
        assert not live.advance()
        trainer.save(force_base=True)
        assert live.advance()
        assert live.problem is None
        assert_shows(live, trainer.state, trainer.step)


def test_a_failure_midway_does_not_change_a_version_in_use(tmp_path):
    """Two saves are applied at once; the second fails after the first is applied."""
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        live.advance()
        with live.version() as version:
            shown = trainer.state["params"]
            trainer.save()
            middle, state = trainer.step, trainer.state
            trainer.save()
            with Disk(tmp_path) as disk:
                disk.fail("read", rf"^{trainer.step}/.*/layer", times=None)
                assert live.advance() and live.problem is not None
                assert disk.failures
            assert_is(version.dense, shown)
        assert_shows(live, state, middle)
        trainer.save()
        assert live.advance()
        assert_shows(live, trainer.state, trainer.step)


def test_a_rollback_is_followed(tmp_path):
    with Trainer(tmp_path) as trainer:
        for _ in range(4):
            trainer.save()
        live = opened(tmp_path)
        live.advance()
        found = trainer.manager.restore(2, trainer.states[2])
        trainer.state, trainer.marks = found.state, found.touched
        trainer.step = 2
        trainer.train(share=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.save()
        live.advance()
        with live.version() as version:
            assert_is(version.dense, trainer.state["params"])
        trainer.save()
        assert live.advance()
        assert_shows(live, trainer.state, trainer.step)


def test_a_step_that_is_removed_while_it_is_read_is_not_shown(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        live.advance()
        step, state = trainer.step, trainer.state
        trainer.save()
        with Disk(tmp_path) as disk:
            disk.on("read", lambda _: shutil.rmtree(tmp_path / "2"), "^2/.*/layer", times=1)
            assert not live.advance()
        assert_shows(live, state, step)
        assert live.problem is not None


def test_retention_may_remove_the_steps_that_a_version_was_built_from(tmp_path):
    policy = deltackpt.policies.Consecutive(max_chain=2)
    options = {"max_to_keep": 1, "deltas": deltackpt.DeltaOptions(policy=policy)}
    with Trainer(tmp_path, **options) as trainer:
        trainer.save()
        live = opened(tmp_path)
        for number in range(10):
            trainer.save()
            if number % 3 != 1:
                live.advance()
                assert_shows(live, trainer.state, trainer.step)


def test_a_compacted_chain_is_read_through_its_new_base(tmp_path):
    with Trainer(tmp_path, {"params/w": "ef4"}) as trainer:
        for _ in range(4):
            trainer.save()
        live = opened(tmp_path)
        live.advance()
        with live.version() as version:
            expected = {path: array.tobytes() for path, array in version.dense.items()}
        compact(tmp_path)
        late = opened(tmp_path)
        late.advance()
        with late.version() as version:
            assert {path: array.tobytes() for path, array in version.dense.items()} == expected
        for _ in range(2):
            trainer.save()
            assert live.advance() and late.advance()
            with live.version() as one, late.version() as other:
                assert one.step == other.step == trainer.step
                assert {path: array.tobytes() for path, array in one.dense.items()} == {
                    path: array.tobytes() for path, array in other.dense.items()
                }


def test_after_closing_nothing_is_followed_and_versions_stay(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = serving.follow(tmp_path, "params/**", poll_secs=0.01)
        live.wait_ready(HANG_SECS)
        live.close()
        live.close()
        assert not any(one.name == "deltackpt-serving" for one in threading.enumerate())
        with pytest.raises(ClosedError):
            live.advance()
        assert_shows(live, trainer.state, trainer.step)


# The WAL.


@pytest.mark.parametrize("dense", ["whole", "delta"])
def test_wal_records_are_followed(tmp_path, dense):
    with Trainer(tmp_path, wal=deltackpt.WalOptions(dense=dense)) as trainer:
        trainer.save()
        live, steps_alone = opened(tmp_path), opened(tmp_path, wal=False)
        for number in range(7):
            trainer.save() if number == 3 else trainer.log()
            live.advance()
            assert_shows(live, trainer.state, trainer.step)
            with live.version() as version:
                assert (version.point is None) == (number == 3)
            steps_alone.advance()
            with steps_alone.version() as version:
                assert version.step == (1 if number < 3 else 5)
                assert_is(version.dense, trainer.states[version.step]["params"])


# On devices.


def test_only_changed_leaves_are_placed_again(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        live = opened(tmp_path)
        live.advance()
        first = live.dense_on_device()
        again = live.dense_on_device()
        assert again.tree["params"]["w"] is first.tree["params"]["w"]
        kept = np.asarray(first.tree["params"]["w"]).tobytes()
        for _ in range(3):
            trainer.save()
            live.advance()
        device = jax.devices()[1]
        last = live.dense_on_device({"params/w": device})
        assert last.step == trainer.step
        assert last.tree["params"]["layers"][1] is first.tree["params"]["layers"][1]
        assert last.tree["params"]["w"].devices() == {device}
        np.testing.assert_array_equal(last.tree["params"]["w"], trainer.state["params"]["w"])
        # jax may have aliased the memory, so it is not reused.
        assert np.asarray(first.tree["params"]["w"]).tobytes() == kept


@pytest.mark.parametrize("dense", ["whole", "blocks"])
def test_a_typed_key_is_shown_with_its_implementation(tmp_path, dense):
    keys = {"one": jax.random.key(1), "more": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    options = deltackpt.Dense(deltas=dense)
    with Trainer(tmp_path, dense=options, wal=deltackpt.WalOptions()) as trainer:
        live = opened(tmp_path, ["rng/**", "params/b"])
        saves = [trainer.save, trainer.save, trainer.log, trainer.save, trainer.save]
        for impl, save in zip(["rbg", "rbg", "rbg", "unsafe_rbg", "unsafe_rbg"], saves):
            data = jax.random.key_data(keys["more"]) + 1
            keys = {**keys, "more": jax.random.wrap_key_data(data, impl=impl)}
            trainer.state = {**trainer.state, "rng": keys}
            save()
            live.advance()
            with live.version() as version:
                assert version.dense.prng_impls == {"rng/one": "threefry2x32", "rng/more": impl}
                for name, key in keys.items():
                    data = np.asarray(jax.random.key_data(key))
                    np.testing.assert_array_equal(version.dense[f"rng/{name}"], data)
            found = live.dense_on_device().tree
            assert found["params"]["b"].dtype == jnp.bfloat16
            for name, key in keys.items():
                assert found["rng"][name].dtype == key.dtype
                assert (found["rng"][name] == key).all()
            assert live.dense_on_device().tree["rng"]["more"] is found["rng"]["more"]


# Processes.

READER = """
    import json, sys
    from deltackpt import serving

    root, last = sys.argv[1], int(sys.argv[2])
    found = []
    with serving.follow(root, "params/**", poll_secs=0.01) as live:
        live.wait_ready(60)
        while True:
            with live.version() as version:
                import hashlib
                digest = hashlib.sha256(version.dense["params/w"].tobytes()).hexdigest()
                found.append((version.step, digest))
                if version.step >= last:
                    break
            live.wait_ready(60, version.step + 1)
    assert not {"jax", "ray", "orbax"} & {*sys.modules}, "nothing of it is needed"
    print(json.dumps(found))
"""


def test_another_process_follows_the_trainer_without_jax(tmp_path):
    with Trainer(tmp_path) as trainer:
        trainer.save()
        last = 8
        reader = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(READER), tmp_path, str(last)],
            stdout=subprocess.PIPE,
            text=True,
        )
        while trainer.step < last:
            trainer.save(force_base=trainer.step == 4)
        told, _ = reader.communicate(timeout=2 * HANG_SECS)
        assert reader.returncode == 0
        found = json.loads(told)
        assert found[-1][0] == last
        for step, digest in found:
            array = np.asarray(trainer.states[step]["params"]["w"])
            assert digest == hashlib.sha256(array.tobytes()).hexdigest()
