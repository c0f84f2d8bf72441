# SPDX-License-Identifier: Apache-2.0
"""The DLRM example on many devices: the same training, and states that move between them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import jax
import numpy as np
import pytest
from dlrm_jax import data, demo_multi, main, model, trainer
from dlrm_jax.placement import Placement
from machine import free_port
from running import journal
from running.digest import digest

#: 401 rows per table: 408 with padding.
SMALL = ["--scale", "0.005013", "--width", "8", "--bottom", "16", "--top", "16", "--batch", "64"]
#: Two tables whose rows no number of devices divides.
SIZES = trainer.ModelOptions(
    rows={"C1": 53, "C2": 301}, row_multiple=8, width=4, bottom=(8,), top=(8,)
)


@pytest.fixture(scope="module")
def placement() -> Placement:
    return Placement.over_all_devices()


@pytest.fixture(scope="module")
def made(placement) -> trainer.TrainState:
    """A state initialized on eight devices, copied to the host."""
    return jax.tree.map(np.array, trainer.init_state(SIZES, 0, placement))


class Trained(NamedTuple):
    """Two states after the same steps, and the outputs of each step."""

    alone: trainer.TrainState
    spread: trainer.TrainState
    outputs: list[tuple[Any, Any]]


@pytest.fixture(scope="module")
def trained(made, placement) -> Trained:
    """Three steps, with ids of every row, from the same state on one device and on eight."""
    traffic = data.ZipfTraffic(SIZES.rows, 2048, exponent=0.0, seed=3)
    spread = jax.device_put(made, shardings(placement))
    alone = jax.device_put(made, jax.devices()[0])
    assert digest(spread) == digest(alone)
    step, sharded_step = trainer.train_step(SIZES), trainer.train_step(SIZES, placement=placement)
    outputs = []
    for number in range(3):
        batch = traffic.batch(number)
        alone, *ours = step(alone, batch)
        spread, *theirs = sharded_step(spread, placement.batch(batch))
        outputs.append((ours, theirs))
    return Trained(alone, spread, outputs)


def shardings(placement: Placement) -> trainer.TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state(SIZES, placement))


def test_sharded_steps_equal_those_of_one_device(trained):
    for (loss, logits), (sharded_loss, sharded_logits) in trained.outputs:
        np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
        np.testing.assert_allclose(sharded_logits, logits, rtol=1e-4, atol=1e-6)
    leaves = zip(jax.tree.leaves(trained.spread), jax.tree.leaves(trained.alone), strict=True)
    for mine, theirs in leaves:
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    for name in SIZES.rows:
        ours, theirs = (state.touched.stamps[name] for state in (trained.spread, trained.alone))
        assert np.array_equal(ours, theirs)


def test_steps_keep_the_placement(trained, placement):
    assert jax.tree.map(lambda leaf: leaf.sharding, trained.spread) == shardings(placement)


def test_padding_rows_stay_zero_and_unmarked(trained):
    state = trained.spread
    for name, rows in SIZES.rows.items():
        assert state.tables[name].shape[0] % 8 == 0
        assert np.asarray(state.touched.stamps[name])[:rows].all()
        for array in (state.tables[name], state.accumulators[name], state.touched.stamps[name]):
            assert not np.asarray(array)[rows:].any()


def test_padding_changes_no_row():
    key = jax.random.key(0)
    padded, plain = (model.init_tables(key, SIZES.rows, 4, multiple) for multiple in (8, 1))
    for name, rows in SIZES.rows.items():
        assert plain[name].shape == (rows, 4)
        assert np.array_equal(padded[name][:rows], plain[name])


def test_a_state_made_on_many_devices_equals_that_of_one_up_to_rounding(made):
    alone = jax.jit(lambda: trainer.init_state(SIZES, 0))()
    for mine, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_no_device_ever_holds_a_whole_table(placement):
    traffic = data.ZipfTraffic(SIZES.rows, 32, exponent=1.07, seed=3)
    state = trainer.abstract_state(SIZES, placement)
    lowered = trainer.train_step(SIZES, placement=placement).lower(
        state, placement.batch(traffic.batch(0))
    )
    program = lowered.compile().as_text()
    for name in SIZES.rows:
        rows, width = state.tables[name].shape
        assert f"f32[{rows // jax.device_count()},{width}]" in program
        assert f"f32[{rows},{width}]" not in program


@pytest.mark.parametrize("option", ["--batch=63", "--row-multiple=1"])
def test_unequal_shares_are_refused(tmp_path, option):
    with pytest.raises(SystemExit, match=f"{option.split('=')[0]}: expected a multiple of 8"):
        main.main([*SMALL, option, "--processes", "1", "--directory", str(tmp_path)])


@pytest.mark.parametrize("option", ["--processes=2", "--coordinator=127.0.0.1:1", "--process=1"])
def test_incomplete_process_options_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main.parsed([option])
    assert "--process and --coordinator" in capsys.readouterr().err


@pytest.mark.processes
def test_two_processes_save_what_one_restores(tmp_path):
    directory, path = tmp_path / "run", tmp_path / "two.jsonl"
    arguments = [*SMALL, "--save-every=3", "--print-every=3", "--durability=process", "--digests"]
    arguments += ["--directory", str(directory)]
    coordinator = f"127.0.0.1:{free_port()}"
    processes = []
    try:
        for number in range(2):
            place = ["--processes=2", f"--process={number}", f"--coordinator={coordinator}"]
            command = [sys.executable, main.__file__, *arguments, "--steps=6", *place]
            processes.append(
                subprocess.Popen(
                    [*command, "--journal", path],
                    env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
                )
            )
        assert [process.wait(250) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [entry["kind"] for entry in journal.read(path, "save")] == ["base", "delta"]

    alone, spread = tmp_path / "alone.jsonl", tmp_path / "spread.jsonl"
    main.main([*arguments, "--steps=6", "--resume", "--journal", str(alone)])
    main.main([*arguments, "--steps=9", "--resume", "--processes=1", "--journal", str(spread)])
    [end] = journal.read(path, "end")
    for restored in (alone, spread):
        [entry] = journal.read(restored, "restored")
        assert (entry["step"], entry["digest"]) == (6, end["digest"])
    assert [entry["step"] for entry in journal.read(spread, "step")] == [6, 7, 8]
    assert [entry["kind"] for entry in journal.read(spread, "save")] == ["delta"]


def test_losses_are_compared_relatively():
    differences = demo_multi.relative_differences({3: 2.0, 4: 0.5}, {3: 2.0, 4: 0.4}, [3, 4])
    np.testing.assert_allclose(differences, [0.0, 0.25])


@pytest.mark.long
@pytest.mark.drawn("demos", 2)
@pytest.mark.timeout(900)
def test_demo_resumes_with_other_numbers_of_processes(tmp_path):
    done = subprocess.run(
        [sys.executable, demo_multi.__file__, "--scale=0.05003", f"--directory={tmp_path}"],
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0
    assert b"nothing was lost" in done.stdout
