# SPDX-License-Identifier: Apache-2.0
"""Followed weights: every version is one complete state of the trainer, despite failures."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import flip
from test_follower import wait_until

import deltackpt
from deltackpt import serving, touched
from deltackpt.errors import ClosedError, Damaged, OptionError, ServiceUnavailable, WaitTimeout
from deltackpt.serving import Live, ServedLeaves
from deltackpt.storage.store import FileStore
from deltackpt.testing import Disk
from deltackpt.testing.training_run import TrainingRun

#: Guards against hangs only.
HANG_SECS = 60.0
TABLES = deltackpt.Tables(select="table", slots={})
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


class Trainer(TrainingRun):
    """A run that waits for each save and record."""

    #: Part of the weights that a step changes.
    share = 0.01

    def __init__(self, root: Path, codec: Any = "lossless", **options: Any):
        options = {"dense": deltackpt.Dense(deltas="blocks", codec=codec), **options}
        state = initial()
        super().__init__(
            root,
            options=deltackpt.ManagerOptions(**options),
            tables=TABLES,
            state=state,
            touched=touched.init({"table": state["table"]}),
            move=self._moved,
        )
        self.open()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def _moved(self, state: Any, marks: Any, step: int) -> tuple[Any, Any]:
        """Changes some elements of the weights, and all of the moments."""
        rng = np.random.default_rng(step)
        params = dict(state["params"])
        for name in ("w", "odd"):
            array = np.array(params[name])
            flat = array.reshape(-1).view(np.uint16)
            flat[rng.choice(flat.size, int(self.share * flat.size), replace=False)] ^= 1
            params[name] = jax.device_put(array, params[name].sharding)
        params["layers"] = [jnp.float32(step), params["layers"][1]]
        return {**state, "params": params, "nu": state["nu"] * 0.9}, marks

    def log(self) -> None:
        self.append()
        self.manager.wait_appended()
        self.manager.wait_until_finished()

    def assert_shown(self, live: Live, step: int | None = None) -> None:
        """Asserts that a step (default: the last one) is shown, bit for bit."""
        step = self.step if step is None else step
        assert_shows(live, self.states[step], step)

    def assert_applied(self, live: Live) -> None:
        assert live.advance()
        self.assert_shown(live)


@pytest.fixture
def trainer(tmp_path) -> Iterator[Trainer]:
    """A trainer that has saved step 1."""
    with Trainer(tmp_path / "root") as found:
        found.save()
        yield found


@pytest.fixture
def live(trainer) -> Live:
    """A follower that shows step 1 of the trainer."""
    found = opened(trainer.root)
    trainer.assert_applied(found)
    return found


def opened(root: Path, leaves: Any = "params/**", **options: Any) -> Live:
    return serving.follow(root, leaves, poll_secs=None, **options)


def shown(live: Live) -> ServedLeaves:
    """The leaves of the newest version."""
    with live.version() as version:
        return version.dense


def address(array: np.ndarray) -> int:
    return array.ctypes.data


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


# Versions.


@pytest.mark.parametrize("codec", ["lossless", {"params/w": "ef4", "params/odd": "ef8"}])
def test_each_version_equals_a_restore(tmp_path, codec):
    with Trainer(tmp_path, codec) as trainer:
        trainer.save()
        live, late = opened(tmp_path), opened(tmp_path)
        for number in range(8):
            assert live.advance() and not live.advance()
            with deltackpt.CheckpointManager(
                tmp_path,
                handlers={"embeddings": TABLES},
                options=deltackpt.ManagerOptions(access="read"),
            ) as manager:
                restored = manager.restore(trainer.step, trainer.state).state
            assert_shows(live, restored, trainer.step)
            if codec == "lossless":
                trainer.assert_shown(live)
            if number % 3 == 2:  # It catches up on several at once.
                late.advance()
                assert_shows(late, restored, trainer.step)
            trainer.save(force_base=number == 4)
        assert live.problem is None


def test_a_tree_is_nested_like_the_state(trainer):
    live = opened(trainer.root, ["params/layers/*", "params/b", "step"])
    live.advance()
    tree = shown(live).tree()
    assert {*tree} == {"params", "step"} and {*tree["params"]} == {"b", "layers"}
    assert tree["params"]["layers"][0] == 1.0 and tree["step"].shape == ()


def test_only_blocks_that_changed_are_read(trainer, live):
    # The whole base, in Orbax's layout.
    assert shown(live).bytes_read >= shown(live).nbytes
    for _ in range(3):
        trainer.save()
        trainer.assert_applied(live)
        assert 0 < shown(live).bytes_read < shown(live).nbytes / 40


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
        for write in (trainer.save, trainer.save, trainer.log, trainer.log, trainer.save):
            long, short = long * 1.001, short + 1
            trainer.state = {**trainer.state, "long": long, "short": short}
            write()
            read.clear()
            assert live.advance()
            found = shown(live)
            assert [*found] == ["short"] and np.array_equal(found["short"], short)
            assert found.bytes_read < long.nbytes / 16
            # Includes headers and manifests.
            assert sum(read) < long.nbytes / 8


def test_a_flipped_bit_is_detected_only_in_leaves_that_are_followed(tmp_path):
    with Trainer(tmp_path, dense=deltackpt.Dense(deltas="whole")) as trainer:
        marked = np.arange(1024, dtype=np.int32) + 123_456_789
        trainer.state |= {"long": jnp.ones(1 << 20), "short": jnp.asarray(marked)}
        trainer.save()
    [file] = [path for path in Path(tmp_path, "1/dense/d").iterdir() if path.is_file()]
    of_short = file.read_bytes().index(marked.tobytes()) + 5
    flip(file, of_short)
    with pytest.raises(Damaged, match=f"1/dense/d/{file.name}"):
        opened(tmp_path, "short").advance()
    flip(file, of_short)
    flip(file, file.stat().st_size // 2 + (1 << 19))
    assert opened(tmp_path, "short").advance()
    with pytest.raises(Damaged):
        opened(tmp_path, "long").advance()


def test_versions_share_the_memory_of_unchanged_leaves(trainer):
    live = opened(trainer.root, "**")
    live.advance()
    with live.version() as before:
        trainer.save()
        live.advance()
        with live.version() as after:
            old, new = before.dense, after.dense
            assert address(new["params/layers/1"]) == address(old["params/layers/1"])
            assert address(new["params/w"]) != address(old["params/w"])
            changed = [path for path in new if new.content(path) != old.content(path)]
    assert sorted(changed) == ["nu", "params/layers/0", "params/odd", "params/w"]


def test_memory_without_readers_is_reused(trainer, live):
    places = []
    for _ in range(5):
        trainer.save()
        live.advance()
        places.append(address(shown(live)["params/w"]))
        gc.collect()
    assert len({*places}) == 2


def test_an_array_that_is_kept_does_not_change(trainer, live):
    kept = shown(live)["params/w"][3:5]
    for _ in range(4):
        trainer.save()
        live.advance()
        gc.collect()
    assert kept.tobytes() == np.asarray(trainer.states[1]["params"]["w"])[3:5].tobytes()


def test_a_concurrent_reader_sees_only_complete_versions(trainer):
    with serving.follow(trainer.root, "params/**", poll_secs=0.001) as live:
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
            least = min(number, 2)
            wait_until(lambda least=least: len(seen) > least)
        live.wait_ready(HANG_SECS, trainer.step)
        stop.set()
        for one in readers:
            one.join()
    assert not wrong and len(seen) > 2
    for step, found in seen.items():
        assert found == hash(np.asarray(trainer.states[step]["params"]["w"]).tobytes())


@pytest.mark.filterwarnings("ignore:.*dense leaves are saved whole, by Orbax's handler")
@pytest.mark.parametrize("deltas", ["whole", "blocks"])
def test_leaves_that_only_orbax_can_write_are_shown_unchanged(tmp_path, deltas):
    with Trainer(tmp_path, dense=deltackpt.Dense(deltas=deltas)) as trainer:
        trainer.state |= {"complex": np.array(1j), "a/b": "a text", "c/d": np.float32(1), "n": 3}
        live = opened(tmp_path, ["params/w", "complex", "a/b", "c/d", "n"])
        for _ in range(2):
            trainer.save()
            live.advance()
            found = dict(shown(live))
            expected = np.asarray(trainer.state["params"]["w"])
            assert found.pop("params/w").tobytes() == expected.tobytes()
            assert found == {"complex": 1j, "c/d": 1, "n": 3}


def test_two_leaves_with_the_same_path_are_not_confused(tmp_path):
    with Trainer(tmp_path, dense=deltackpt.Dense()) as trainer:
        trainer.state |= {"a": {"b": np.ones(2)}, "a/b": np.zeros(2)}
        trainer.save()
    trainer.assert_applied(opened(tmp_path, ["params/**"]))
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
            assert live.status().step == step and ("late" in shown(live)) == (step >= 3)
        for found in (shown(live), shown(live).tree()):
            assert np.array_equal(found["late"], np.arange(700))


@pytest.mark.parametrize("deltas", ["blocks", "whole"])
def test_leaves_without_elements_are_left_out(tmp_path, deltas):
    with Trainer(tmp_path, dense=deltackpt.Dense(deltas=deltas)) as trainer:
        trainer.state = {**trainer.state, "empty": jnp.zeros((0, 3))}
        live = opened(tmp_path, ["params/**", "empty"])
        for _ in range(3):
            trainer.save()
            trainer.assert_applied(live)


def test_sharded_leaves_are_assembled_and_freed_with_their_version(tmp_path):
    """The step itself is kept as the base of the next one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    with Trainer(tmp_path, wal=deltackpt.WalOptions(dense="whole")) as trainer:
        params = trainer.state["params"]
        params["w"] = jax.device_put(params["w"], sharding)
        live = opened(tmp_path)
        for _ in range(2):
            trainer.save()
            trainer.assert_applied(live)
        assembled = weakref.ref(shown(live)["params/w"])
        assert assembled() is not None
        trainer.log()
        trainer.assert_applied(live)
        gc.collect()
        assert assembled() is None


# Failures.


@pytest.mark.parametrize(
    ("leaves", "found"),
    [
        ("table", "only tables and slots\n  table"),
        (["head", "heads/*"], "none\nthe dense leaves are\n  nu\n  params/b"),
        ("params/none", "found only other leaves that match\n  params/none"),
    ],
)
def test_missing_leaves_are_an_error(trainer, leaves, found):
    with pytest.raises(OptionError, match=found):
        opened(trainer.root, leaves).advance()
    with serving.follow(trainer.root, leaves) as live, pytest.raises(OptionError, match=found):
        live.wait_ready(HANG_SECS)


def test_one_of_several_patterns_without_a_match_warns_once(trainer, caplog):
    live = opened(trainer.root, ["params/**", "heads/*"])
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


def test_a_failure_midway_does_not_change_a_version_in_use(trainer, live):
    """Two saves are applied at once; the second fails after the first is applied."""
    with live.version() as version:
        trainer.save()
        trainer.save()
        with Disk(trainer.root) as disk:
            disk.fail("read", "^3/.*/layer", times=None)
            assert live.advance() and live.problem is not None
            assert disk.failures
        assert_is(version.dense, trainer.states[1]["params"])
    trainer.assert_shown(live, 2)
    trainer.save()
    trainer.assert_applied(live)


def test_after_closing_nothing_is_followed_and_versions_stay(trainer):
    live = serving.follow(trainer.root, "params/**", poll_secs=0.01)
    live.wait_ready(HANG_SECS)
    live.close()
    live.close()
    assert not any(one.name == "deltackpt-serving" for one in threading.enumerate())
    with pytest.raises(ClosedError):
        live.advance()
    trainer.assert_shown(live)


# The WAL.


# On devices.


def test_only_changed_leaves_are_placed_again(trainer, live):
    first = live.dense_on_device().tree["params"]
    assert live.dense_on_device().tree["params"]["w"] is first["w"]
    kept = np.asarray(first["w"]).tobytes()
    for _ in range(3):
        trainer.save()
        live.advance()
    device = jax.devices()[1]
    last = live.dense_on_device({"params/w": device})
    assert last.step == trainer.step
    assert last.tree["params"]["layers"][1] is first["layers"][1]
    assert last.tree["params"]["w"].devices() == {device}
    np.testing.assert_array_equal(last.tree["params"]["w"], trainer.state["params"]["w"])
    # jax may have aliased the memory, so it is not reused.
    assert np.asarray(first["w"]).tobytes() == kept


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
            served, found = shown(live), live.dense_on_device().tree
            assert served.prng_impls == {"rng/one": "threefry2x32", "rng/more": impl}
            assert found["params"]["b"].dtype == jnp.bfloat16
            for name, key in keys.items():
                np.testing.assert_array_equal(served[f"rng/{name}"], jax.random.key_data(key))
                assert found["rng"][name].dtype == key.dtype
                assert (found["rng"][name] == key).all()
            assert live.dense_on_device().tree["rng"]["more"] is found["rng"]["more"]


# Processes.
