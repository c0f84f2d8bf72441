# SPDX-License-Identifier: Apache-2.0
"""SIGTERM: the next step is saved before the exit, and earlier handlers still run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import model
import numpy as np
import pytest
from machine import free_port

import deltackpt
from deltackpt.coordination import Termination

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}


@pytest.fixture(autouse=True)
def _former():
    """Restores the previous handler after each test."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_step_after_sigterm_is_announced_once():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    termination = Termination()
    assert not termination.announced(3)
    terminate()
    assert [termination.announced(step) for step in (4, 4, 5)] == [True, True, False]
    assert heard == [signal.SIGTERM]
    terminate()
    assert heard == [signal.SIGTERM] * 2  # Only the former handler gets the second.
    termination.close()


def test_no_handler_is_installed_before_the_first_query_or_after_close():
    former = signal.getsignal(signal.SIGTERM)
    termination = Termination()
    assert signal.getsignal(signal.SIGTERM) == former
    termination.announced(1)
    assert signal.getsignal(signal.SIGTERM) != former
    termination.close()
    assert signal.getsignal(signal.SIGTERM) == former
    assert not termination.announced(2)
    assert signal.getsignal(signal.SIGTERM) == former


def test_several_managers_may_close_in_any_order():
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    first, second = Termination(), Termination()
    assert not (first.announced(0) or second.announced(0))
    first.close()
    terminate()
    assert second.announced(1) and not first.announced(1)
    assert heard == [signal.SIGTERM]
    second.close()


def test_another_thread_installs_no_handler():
    former, termination = signal.getsignal(signal.SIGTERM), Termination()
    thread = threading.Thread(target=termination.announced, args=(1,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == former
    termination.announced(2)
    assert signal.getsignal(signal.SIGTERM) != former
    thread = threading.Thread(target=termination.close)
    thread.start()
    thread.join()
    heard = []
    termination._former = lambda number, frame: heard.append(number)
    terminate()  # Passed on to the former handler.
    assert heard == [signal.SIGTERM] and not termination.announced(3)


_LOOP = """
import multiprocessing, os, signal, sys, time
import model, deltackpt
root, how = sys.argv[1:]
state, touched = model.start()
handlers = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
if how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
    manager.save(0, state, touched=touched)
    if how == "deaf":
        manager.wait_until_finished()
    for step in range(1, 10_000):
        state, touched = model.train(state, touched, step % 50)
        if how != "deaf" and manager.save_if_due(step, state, touched=touched) is not None:
            assert manager.latest_step() == step and manager.reached_preemption(step)
            break
        if step == 2:
            if how == "forked":
                ready, tell = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(tell, b"!")  # Python drops what a child gets before it has begun.
                    time.sleep(60)
                    os._exit(0)
                os.read(ready, 1)
                os.kill(child, signal.SIGTERM)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            print("running", flush=True)
print("saved", step, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["plain", "handled", "forked", "deaf"])
def test_a_process_saves_before_it_ends(tmp_path, how):
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _LOOP, str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "running\n"
        run.terminate()
        output, _ = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    if how == "deaf":  # It never queried: it ends like any process.
        assert (run.returncode, output) == (-signal.SIGTERM, "")
        return
    assert run.returncode == 0
    assert output.startswith("heard\n") == (how == "handled")
    step = int(output.split()[-1])
    state, touched = model.start()
    for number in range(1, step + 1):
        state, touched = model.train(state, touched, number % 50)
    with deltackpt.CheckpointManager(tmp_path, handlers=HANDLERS) as manager:
        found = manager.restore_latest(state)
    assert found is not None and found.step == step
    for name, table in state["tables"].items():
        np.testing.assert_array_equal(found.state["tables"][name], table)


_JOB = """
import sys, time
import jax
address, process, root = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, process)
import numpy as np
import deltackpt
mesh = jax.make_mesh((2,), ("x",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
table = np.zeros((64, 4), np.float32)
state = {"emb": jax.make_array_from_callback(table.shape, rows, lambda index: table[index])}
handlers = {"embeddings": deltackpt.Tables(select="emb", slots={})}
with deltackpt.CheckpointManager(root, handlers=handlers) as manager:
    manager.save(0, state)
    for step in range(1, 10_000):
        saved = manager.save_if_due(step, state)
        if saved is not None:
            break
        if step == 2:
            print("running", flush=True)
        time.sleep(0.05)
print("saved", step, saved.kind, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("which", [0, 1])
def test_a_sigterm_to_one_process_makes_all_save_the_same_step(tmp_path, which):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-W", "ignore", "-c", _JOB, address]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    job = [
        subprocess.Popen(
            [*command, str(process), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in job:
            assert process.stdout is not None
            assert "running\n" in iter(process.stdout.readline, "")  # Gloo prints, too.
        job[which].terminate()
        # Gloo's output may come last.
        outputs = [process.communicate(timeout=240)[0].splitlines() for process in job]
    finally:
        for process in job:
            process.kill()
            process.communicate()
    assert [process.returncode for process in job] == [0, 0]
    [saved], [other] = ([line for line in of if line.startswith("saved ")] for of in outputs)
    assert saved == other
    _, step, kind = saved.split()
    assert kind in ("base", "delta")
    assert sorted(int(one.name) for one in tmp_path.iterdir() if one.name.isdigit()) == [
        0,
        int(step),
    ]
