# SPDX-License-Identifier: Apache-2.0
"""Runs functions of a benchmark in new processes, alone or joined as a JAX job."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# An installed package has bytecode. Without it, each process would compile the package, which adds
# 0.1 s to a restore.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
#: A process that takes longer to start, or to reach the others, has failed.
START_SECS = 120
#: Printed before each result: libraries print, too.
_MARK = "\x1eresult "


def started(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[str]:
    """Starts a process that calls a function of a module, with arguments that JSON can hold."""
    file = sys.modules[function.__module__].__file__
    assert file is not None
    words = [json.dumps(arguments, default=str), Path(file).stem, function.__name__]
    return subprocess.Popen(
        [sys.executable, __file__, *words],
        **{"stdout": subprocess.PIPE, "text": True, **more},
        env=os.environ | dict(environment or {}),
    )


def say(result: Any) -> None:
    print(_MARK + json.dumps(result), flush=True)


def heard(process: subprocess.Popen[str]) -> Any:
    """The next result of a process.

    Raises:
      RuntimeError: the process ended without one.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if _MARK in line:  # Libraries may print without ending the line.
            return json.loads(line.partition(_MARK)[2])
    raise RuntimeError(f"{process.args} ended with {process.wait()}")


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process, and returns its result."""
    with started(function, *arguments) as process:
        found = heard(process)
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}")
    return found


def call_job(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    devices: int = 1,
    limit: int = 900,
) -> list[Any]:
    """Calls a function in each process of a JAX job on the CPU; returns all results.

    Raises:
      RuntimeError: a process failed, or they did not end in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        workers, outputs = [], []
        for rank in range(processes):
            environment = {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "BENCHMARK_JOB": f"{address} {processes} {rank} {limit}",
            }
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            streams = {"stdout": outputs[-1], "stderr": subprocess.STDOUT}
            worker = started(function, *arguments, environment=environment, **streams)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        deadline = time.monotonic() + limit
        # One that fails leaves the others waiting.
        while any(one.poll() is None for one in workers):
            if time.monotonic() > deadline or any(one.returncode for one in workers):
                break
            time.sleep(0.1)
        found = []
        for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
            output.seek(0)
            text = output.read()
            if worker.poll() != 0:
                raise RuntimeError(f"process {rank} of {processes} failed:\n{text[-4000:]}")
            found.append(json.loads(text.rpartition(_MARK)[2].splitlines()[0]))
    return found


def status_bytes(name: str) -> int:
    """Returns a memory figure of this process: ``VmRSS``, ``VmHWM`` or ``RssShmem``."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Returns free memory to the system, and resets the peak of the resident memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _join_job(address: str, processes: str, rank: str, limit: str) -> None:
    import jax

    signal.alarm(int(limit))  # Ends this process even if the parent is gone.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if int(processes) > 1:
        jax.distributed.initialize(
            address,
            int(processes),
            int(rank),
            coordinator_bind_address=address,
            initialization_timeout=START_SECS,
        )


def main() -> None:
    arguments, module, name = sys.argv[1:]
    job = os.environ.pop("BENCHMARK_JOB", "")
    if job:
        _join_job(*job.split())
    try:
        found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    except BaseException:
        if job:  # At its exit, JAX would wait for the other processes, which wait for this one.
            traceback.print_exc()
            os._exit(1)
        raise
    if found is not None:
        # The module of this file may be imported under its own name, too.
        say(found)


if __name__ == "__main__":
    main()
