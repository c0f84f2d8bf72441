# SPDX-License-Identifier: Apache-2.0
"""Patches: applied in order they give the bits of each version, and nothing else passes."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import ml_dtypes
import model
import numpy as np
import pytest
from hypothesis import given
from test_follower_wal import Trainer

from deltackpt import serving
from deltackpt.errors import Damaged, OptionError, PatchMismatch
from deltackpt.serving import patches
from deltackpt.serving.attach import SharedVersion
from deltackpt.serving.patches import Patch

DTYPES = [np.float32, ml_dtypes.bfloat16, np.int8, np.float64, np.complex128, ml_dtypes.float8_e5m2]

State = dict[str, np.ndarray]


def assert_same(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, array in other.items():
        assert (one[name].dtype, one[name].shape) == (array.dtype, array.shape)
        assert one[name].tobytes() == array.tobytes(), name


@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 2000),
    at=st.sets(st.integers(0, 1999), max_size=50),
    seed=st.integers(0, 1000),
)
def test_a_patch_gives_the_bits_of_the_next_state(tmp_path_factory, dtype, size, at, seed):
    bits = np.random.default_rng(seed).integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8)
    before = {"w": bits.view(dtype), "same": np.zeros(3), "gone": np.ones(2)}
    changed = bits.copy().reshape(size, -1)
    changed[[one for one in at if one < size]] ^= 1
    after = {"w": changed.reshape(-1).view(dtype), "same": before["same"], "new": np.ones((2, 2))}
    path = tmp_path_factory.mktemp("patches") / "a.safetensors"
    made = patches.between(before, after, parent="1", save="2")
    assert "same" not in made.tensors
    assert patches.write(made, path) == path.stat().st_size
    state = {name: array.copy() for name, array in before.items()}
    assert patches.apply(patches.read(path), state, at="1") == "2"
    assert_same(state, after)


def test_patches_of_a_followed_run_give_each_version(tmp_path):
    root = tmp_path / "run"
    with Trainer(root) as trainer:
        trainer.save()
        live = serving.follow(root, tables="**", poll_secs=None)
        live.advance()
        changes = live.changes(wait_secs=0)
        parent, dense_parent, dense, state = "", "", {}, {}
        for number in range(6):
            with live.version() as version:
                leaves = version.dense
            found = [patches.between(dense, leaves, parent=dense_parent, save=f"{number}")]
            dense, dense_parent = leaves, f"{number}"
            batches = [*changes]
            for batch in batches:
                rows = model.ROWS[batch.table.removeprefix("tables/")]
                state.setdefault(
                    batch.table, np.zeros((rows, *batch.values.shape[1:]), batch.values.dtype)
                )
            if batches:
                found.append(patches.of_changes(batches, parent=parent))
                parent = str(batches[-1].position)
            for one in found:
                path = tmp_path / "patch.safetensors"
                patches.write(one, path)
                assert patches.apply(patches.read(path), state, at=one.parent) == one.save
            expected = {f"tables/{n}": np.asarray(t) for n, t in trainer.state["tables"].items()}
            assert_same(state, {**expected, **leaves})
            trainer.save() if number == 2 else trainer.log()
            live.advance()


def example(tmp_path: Path) -> tuple[Path, State]:
    before = {"w": np.zeros((10, 10), np.float32), "v": np.zeros(5)}
    after = {"w": before["w"].copy(), "v": np.ones(5)}
    after["w"][3, 4] = 1
    path = tmp_path / "patch.safetensors"
    patches.write(patches.between(before, after, parent="a", save="b"), path)
    return path, before


def test_a_file_that_cannot_be_written_leaves_no_temporary_file(tmp_path):
    path, _ = example(tmp_path)
    made = patches.read(path)
    for write in (lambda: patches.write(made, path), lambda: SharedVersion().publish(path)):
        fault = mock.patch.object(Path, "replace", side_effect=OSError("full"))
        with fault, pytest.raises(OSError, match="full"):
            write()
        assert [*tmp_path.iterdir()] == [path]


def test_a_patch_of_another_version_or_other_tensors_changes_nothing(tmp_path):
    path, before = example(tmp_path)
    patch = patches.read(path)
    read_only = before["w"].copy()
    read_only.flags.writeable = False
    for at, w in (
        ("b", before["w"]),
        ("a", np.zeros((10, 9), np.float32)),
        ("a", np.zeros((10, 10))),
        ("a", read_only),
        ("a", None),
    ):
        state = {"v": before["v"].copy()} | ({} if w is None else {"w": w})
        with pytest.raises(PatchMismatch):
            patches.apply(patch, state, at=at)
        assert not any(array.any() for array in state.values())


def test_each_flipped_bit_and_each_truncation_is_detected(tmp_path):
    path, before = example(tmp_path)
    whole = path.read_bytes()
    expected = {name: array.copy() for name, array in before.items()}
    patches.apply(patches.read(path), expected, at="a")
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            found = patches.read(path)
        except Damaged:
            continue
        # Only bits of the header that have no meaning, such as its padding.
        state = {name: array.copy() for name, array in before.items()}
        patches.apply(found, state, at="a")
        assert_same(state, expected)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            patches.read(path)


def test_a_patch_needs_complete_changes():
    with pytest.raises(OptionError):
        patches.of_changes([], parent="a")


def test_one_percent_of_bf16_weights_takes_less_than_two_percent_of_their_bytes(tmp_path):
    rng = np.random.default_rng(0)
    before = {"w": rng.normal(size=1 << 20).astype(ml_dtypes.bfloat16)}
    after = {"w": before["w"].copy()}
    after["w"].view(np.uint16)[rng.choice(1 << 20, (1 << 20) // 100, replace=False)] ^= 1
    made: Patch = patches.between(before, after, parent="a", save="b")
    assert patches.write(made, tmp_path / "p") < 0.02 * before["w"].nbytes
