# SPDX-License-Identifier: Apache-2.0
"""Deltas that contain all dense leaves, in the shard of their tables."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
import pytest
from dense_states import Loop, assert_exact, opened, own
from shown import dense_leaves
from test_hostile_records import MANIFEST, change

import deltackpt
from deltackpt import inspect
from deltackpt.errors import Damaged
from deltackpt.format.naming import DENSE_ITEM
from deltackpt.maintenance import verify
from deltackpt.reading import stored_saves
from deltackpt.testing import Disk, stored_chunks

WHOLE = deltackpt.Dense()
BLOCKS = deltackpt.Dense(deltas="blocks")
READ = {"access": "read"}


def record_of(root: Path, step: int):
    found = stored_saves.read_save(root / str(step)).head.dense_blocks
    assert found is not None
    return found


def test_a_delta_stores_raw_values_in_its_shard_and_a_base_orbaxs_item(tmp_path):
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        assert loop.steps(saver, 1, 2, 3) == ["base", "delta", "delta"]
        assert_exact(saver, loop.states)
    assert [own(tmp_path, step) for step in (1, 2, 3)] == [False, True, True]
    record = record_of(tmp_path, 3)
    assert record.complete
    assert {one.codec for segment in record.segments for one in segment.encodings} == {"raw"}
    groups = [segment.group for segment in record.segments]
    assert sorted(groups) == ["bfloat16", "bool", "float32", "int32", "plain"]
    assert all(segment.ranges is not None for segment in record.segments)


def test_no_older_save_is_read(tmp_path):
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        loop.steps(saver, 1, 2, 3)
    shutil.rmtree(tmp_path / "1" / DENSE_ITEM)
    for chunk in stored_chunks(tmp_path / "2", "*", segment="dense.*"):
        chunk.flip()
    with opened(tmp_path, WHOLE, **READ) as reader:
        model.assert_same(reader.restore(3, loop.states[3]).state, loop.states[3])
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step))
    dense = {name: leaf for name, leaf in loop.states[3].items() if name != "emb"}
    with opened(tmp_path, WHOLE, **READ) as reader:
        model.assert_same(reader.read_state(3, dense).state, dense)


def test_nothing_is_kept_in_memory_after_the_save(tmp_path):
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        loop.steps(saver, 1, 2, 3)
        run = saver._run
        assert run.dense is None and not run.runtime.memory._lent


@pytest.mark.parametrize("dense", [WHOLE, BLOCKS], ids=["whole", "blocks"])
def test_leaves_may_change_and_be_donated_once_save_has_returned(tmp_path, dense):
    loop = Loop()
    loop.state["host"] = np.arange(100_000, dtype=np.float32)
    with opened(tmp_path, dense) as saver:
        loop.steps(saver, 1)
        loop.train()
        expected = jax.tree.map(lambda leaf: leaf if leaf is None else jnp.copy(leaf), loop.state)
        step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + 1, params), donate_argnums=0)
        with Disk(tmp_path) as disk, disk.pause("write", "layer") as paused:
            saver.save(2, loop.state, touched=loop.touched)
            assert paused.reached.wait(60)
            step(loop.state["params"])
            step(loop.state["nu"])
            loop.state["host"][:] = -1
        saver.wait_until_finished()
        assert inspect.open(tmp_path).save_of(2).kind == "delta"
        model.assert_same(saver.restore(2, expected).state, expected)


def test_dense_leaves_do_not_count_towards_the_length_of_a_chain(tmp_path):
    """Every save has all of them; a restore reads only the newest."""
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        kinds_of = loop.steps(saver, *range(1, 8))
    assert kinds_of == ["base", *["delta"] * 6]
    base, delta = (stored_saves.read_save(tmp_path / str(step)).head for step in (1, 7))
    assert base.nbytes == loop.state["emb"].nbytes
    assert delta.nbytes < base.nbytes / 10 < delta.dense_blocks.nbytes


def incomplete(body: Any) -> None:
    body["dense_blocks"]["segments"].pop()


def no_bytes(body: Any) -> None:
    values = body["dense_blocks"]["values"]
    next(one for one in values if one["group"] == "plain")["at"] = None


def relative(body: Any) -> None:
    segments = body["dense_blocks"]["segments"]
    found = next(one for one in segments if one["group"] == "float32")
    found["encodings"][0]["codec"] = "ef8"


@pytest.mark.parametrize("case", [incomplete, no_bytes, relative])
def test_a_record_that_is_not_as_complete_as_it_claims_is_damaged(
    tmp_path, case: Callable[[Any], None], nobody_removes_steps
):
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        loop.steps(saver, 1, 2)
    change(tmp_path, 2, MANIFEST, case)
    with pytest.raises(Damaged):
        dense_leaves(tmp_path, 2)
    assert not verify.verify_root(tmp_path).intact


STOCK = """
import sys
sys.modules["deltackpt"] = None
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

root, step = sys.argv[1:]
path = f"{root}/{step}"


def by_manager(args=None, **options):
    with ocp.CheckpointManager(root, **options) as manager:
        return manager.restore(int(step), args=args)


def by_v1():
    with v1.training.Checkpointer(root) as checkpointer:
        return checkpointer.load_checkpointables(int(step))


standard, pytree = ocp.args.StandardRestore(), ocp.args.PyTreeRestore()
for name, restore in {
    "manager": by_manager,
    "manager, standard": lambda: by_manager(standard),
    "manager, dense": lambda: by_manager(ocp.args.Composite(dense=standard)),
    "manager, dense as a tree": lambda: by_manager(ocp.args.Composite(dense=pytree)),
    "manager, names": lambda: by_manager(item_names=("embeddings", "dense")),
    "standard": lambda: ocp.StandardCheckpointer().restore(path),
    "standard, dense": lambda: ocp.StandardCheckpointer().restore(f"{path}/dense"),
    "tree": lambda: ocp.PyTreeCheckpointer().restore(path),
    "tree, dense": lambda: ocp.PyTreeCheckpointer().restore(f"{path}/dense"),
    "v1": lambda: v1.load(path),
    "v1, all": by_v1,
}.items():
    try:
        restore()
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
    else:
        print(f"{name}: restored")
"""


@pytest.mark.processes
def test_stock_orbax_reports_an_error_for_a_delta_and_opens_the_dense_leaves_of_a_base(tmp_path):
    loop = Loop()
    with opened(tmp_path, WHOLE) as saver:
        loop.steps(saver, 1, 2)

    def found(step: int) -> dict[str, str]:
        program = [sys.executable, "-c", STOCK, str(tmp_path), str(step)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return dict(line.split(": ") for line in done.stdout.splitlines())

    errors = found(2)
    assert len(errors) == 11 and "restored" not in errors.values(), errors
    restored = [name for name, result in found(1).items() if result == "restored"]
    assert {"manager, dense", "manager, dense as a tree", "tree, dense", "v1"} <= {*restored}
