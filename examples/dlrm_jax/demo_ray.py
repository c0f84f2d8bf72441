# SPDX-License-Identifier: Apache-2.0
"""Kills two training workers and a hot-standby actor of a Ray job, which recovers from memory.

python examples/dlrm_jax/demo_ray.py

Starts its own Ray node on the loopback interface, submits ray_cluster/train_dlrm.py to it twice,
once uninterrupted, and compares every restored state with the uninterrupted run's state at that
step. It kills only processes that it started, by process id.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from running import demonstration, journal
from running.ports import free_ports
from running.progress import Progress

REPOSITORY = Path(__file__).resolve().parents[2]
_RAY = str(Path(sys.executable).with_name("ray"))
_STEPS, _SAVE_EVERY = 160, 10
_WORKERS, _DEVICES, _SHARDS = 2, 2, 2
#: Number of committed steps after a start or restart before the next kill.
_COMMITTED_FIRST = 2
_JOB_SECS, _POLL_SECS = 900, 0.1
_PR_SET_PDEATHSIG = 1
_ARGUMENTS = (
    *(f"--steps={_STEPS}", f"--save-every={_SAVE_EVERY}", f"--print-every={_SAVE_EVERY}"),
    *("--batch=512", "--bottom=128", "--top=256-128", "--digests", "--processes-secs=30"),
)
#: Environment of the node and its clients. Without the second setting, Ray would listen on the
#: machine's address; tokens would be written to the home directory.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # How often Ray Train polls its workers, in seconds.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


class Node:
    """A Ray head on the loopback interface.

    Attributes:
      address: address for drivers.
      dashboard: address for job submission.
    """

    def __init__(self, place: Path):
        """Chooses ports; starts nothing yet."""
        self._place = place
        names = [
            *("port", "dashboard-port", "dashboard-agent-listen-port"),
            *("dashboard-agent-grpc-port", "runtime-env-agent-port"),
            *("metrics-export-port", "ray-client-server-port"),
        ]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.address = f"127.0.0.1:{self._ports['port']}"
        self.dashboard = f"http://127.0.0.1:{self._ports['dashboard-port']}"

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Runs the node; everything that it started ends with the block."""
        with (self._place / "ray.log").open("wb") as log:
            head = subprocess.Popen(
                [
                    *(_RAY, "start", "--head", "--block", "--dashboard-host=127.0.0.1"),
                    *(f"--temp-dir={self._place}", f"--num-cpus={_WORKERS + 1}"),
                    *("--object-store-memory=300000000", "--disable-usage-stats"),
                    # Any free port, instead of a range that another cluster may use.
                    *("--min-worker-port=0", "--max-worker-port=0"),
                    *(f"--{name}={port}" for name, port in self._ports.items()),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Signals to the terminal's group are for this process, which ends Ray in order.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            waited("the Ray node", lambda: self._answers(head))
            yield
        finally:
            ended(psutil.Process(head.pid))

    def _answers(self, head: subprocess.Popen[bytes]) -> bool:
        if head.poll() is not None:
            sys.exit(
                f"Ray exited with code {head.returncode}:\n{(self._place / 'ray.log').read_text()}"
            )
        return not subprocess.run(
            [_RAY, "job", "list", f"--address={self.dashboard}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode


class Job:
    """ray_cluster/train_dlrm.py, submitted to a node."""

    def __init__(self, node: Node, root: Path, name: str, scale: float):
        """Chooses the arguments; submits nothing yet.

        Args:
          node: the node to run on.
          root: directory for its files.
          name: name of the job.
          scale: factor on the tables' rows.
        """
        self.directory = root / name
        self._journal = root / f"{name}.jsonl"
        self._log = root / f"{name}.log"
        self._command = [
            *(_RAY, "job", "submit", f"--address={node.dashboard}", f"--submission-id={name}"),
            *(f"--working-dir={REPOSITORY}", "--", sys.executable, "ray_cluster/train_dlrm.py"),
            *(f"--directory={self.directory}", f"--storage={root / 'ray'}", f"--name={name}"),
            *(f"--workers={_WORKERS}", f"--cpu-devices={_DEVICES}", f"--service-shards={_SHARDS}"),
            *("--", *_ARGUMENTS, f"--scale={scale}", f"--journal={self._journal}"),
        ]

    def submit(self) -> subprocess.Popen[bytes]:
        """Submits the job; the returned process ends with the job."""
        with self._log.open("wb") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)

    def check(self, submission: subprocess.Popen[bytes]) -> None:
        """Exits with the end of the job's output if it failed."""
        if submission.poll() not in (None, 0):
            words = self._log.read_text(errors="replace").splitlines()[-40:]
            sys.exit("\n".join([f"the job failed with status {submission.returncode}:", *words]))

    def entries(self, event: str) -> list[dict[str, Any]]:
        """Returns the job's journal."""
        return journal.read(self._journal, event) if self._journal.exists() else []

    def progress(self, console: Console) -> Progress:
        """Shows the progress of the job."""
        return Progress(console, "training", self._journal, _STEPS)

    def digests(self) -> dict[int, str]:
        """Returns the digest of the state that was passed to each ``save``."""
        return {entry["step"]: entry["digest"] for entry in self.entries("saved")}


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    console = Console(highlight=False)
    started = time.perf_counter()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]  # Of another cluster.
    os.environ.update(_ENVIRONMENT)
    # Ray's sockets lie here, whose paths may have 107 characters.
    place = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        with tempfile.TemporaryDirectory(prefix="dlrm-demo-", dir=options.directory) as folder:
            node, root = Node(place), Path(folder)
            console.rule("[bold]1. Start a Ray node on the loopback interface")
            with node.started():
                console.print(f"jobs are submitted to {node.dashboard}")
                console.print(f"Ray writes its files in {place}", soft_wrap=True)
                equal = interrupted(node, root, options.scale, console)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    console.print(
        "[green]nothing was lost" if equal else "[red]the runs differ",
        f"(done in {time.perf_counter() - started:.0f} s)",
    )
    return 0 if equal else 1


def interrupted(node: Node, root: Path, scale: float, console: Console) -> bool:
    """Runs both jobs, kills processes of the second, and returns whether they are equal."""
    import ray

    from deltackpt import service

    whole, killed = Job(node, root, "whole", scale), Job(node, root, "killed", scale)
    console.rule(f"[bold]2. ray job submit: {_WORKERS} workers x {_DEVICES} devices, uninterrupted")
    submission = whole.submit()
    waited("the job", lambda: finished(whole, submission), whole.progress(console))
    console.print(f"{_STEPS} steps, a save every {_SAVE_EVERY}")

    console.rule("[bold]3. The same job, and SIGKILL to three of its processes")
    ray.init(node.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        service.stop(whole.directory)
        submission = killed.submit()
        kill_a_worker(node, killed, submission, console)
        kill_a_restore_actor(killed, submission, console)
        kill_a_worker(node, killed, submission, console)
        waited("the job", lambda: finished(killed, submission), killed.progress(console))
    finally:
        ray.shutdown()

    console.rule("[bold]4. Compare with the uninterrupted run")
    return show_states(whole, killed, console)


def kill_a_worker(
    node: Node, job: Job, submission: subprocess.Popen[bytes], console: Console
) -> None:
    """Kills a training worker after a save, and waits until the job resumes."""
    from ray.util.state import list_actors

    await_saves(job, submission, console)
    step = demonstration.committed(job.directory)[-1]
    alive: Any = list_actors(
        node.dashboard, filters=[("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    )
    pid = max(actor.pid for actor in alive)
    restarts = len(job.entries("restored"))
    os.kill(pid, signal.SIGKILL)
    started = time.perf_counter()
    console.print(f"[bold red]SIGKILL[/] to a training worker (pid {pid}) after step {step}")
    waited("the restart", lambda: went_on(job, submission, restarts), job.progress(console))
    event = job.entries("restore")[-1]
    console.print(
        f"  all workers have restarted after {time.perf_counter() - started:.0f} s: step "
        f"{event['step']} restored from [bold]{event['source']}[/] in {event['total_secs']:.2f} s"
    )


def kill_a_restore_actor(job: Job, submission: subprocess.Popen[bytes], console: Console) -> None:
    """Kills a hot-standby replica, and waits until it holds the newest step again."""
    from deltackpt import service

    await_saves(job, submission, console)
    restore_service = service.connect(job.directory)
    victim = restore_service.status(_JOB_SECS).replicas[-1]
    assert victim.found is not None
    os.kill(victim.found.pid, signal.SIGKILL)
    started = time.perf_counter()
    console.print(
        f"[bold red]SIGKILL[/] to the hot-standby actor of {victim.replica}\n  (pid "
        f"{victim.found.pid}), which held step {victim.step}"
    )
    console.print("  waiting until Ray has restarted it and it has read the newest step")
    restore_service.wait_ready(demonstration.committed(job.directory)[-1], _JOB_SECS)
    back = restore_service.status(_JOB_SECS).replicas[-1]
    assert back.found is not None
    console.print(
        f"  it is back as pid {back.found.pid} with step {back.step} after "
        f"{time.perf_counter() - started:.1f} s; training continued"
    )


def await_saves(job: Job, submission: subprocess.Popen[bytes], console: Console) -> None:
    """Waits until the job has committed some more steps."""
    known = len(demonstration.committed(job.directory)) if job.directory.exists() else 0

    def saved() -> bool:
        job.check(submission)
        if submission.poll() is not None:
            sys.exit("the job finished before all kills; the machine is too fast for this scale")
        return len(demonstration.committed(job.directory)) >= known + _COMMITTED_FIRST

    waited("saves", saved, job.progress(console))


def went_on(job: Job, submission: subprocess.Popen[bytes], restarts: int) -> bool:
    """Returns whether the job has restored another step."""
    job.check(submission)
    return len(job.entries("restored")) > restarts


def finished(job: Job, submission: subprocess.Popen[bytes]) -> bool:
    """Returns whether the job has succeeded."""
    job.check(submission)
    return submission.poll() is not None


def show_states(whole: Job, killed: Job, console: Console) -> bool:
    """Prints whether the states equal the uninterrupted run's bit for bit, and returns it."""
    expected = whole.digests()
    table = Table(
        "state", "step", "tables from", "SHA-256 of every leaf", "result", box=box.SIMPLE_HEAD
    )
    found = []
    restores = zip(killed.entries("restore"), killed.entries("restored"), strict=True)
    rows = [("restored", entry, event["source"]) for event, entry in restores]
    rows += [("at the end", entry, "") for entry in killed.entries("end")]
    for name, entry, source in rows:
        found.append(entry["digest"] == expected[entry["step"]])
        mark = "[green]equal" if found[-1] else "[red]DIFFERENT"
        table.add_row(name, str(entry["step"]), source, entry["digest"][:16], mark)
    console.print(table)
    sources = [event["source"] for event in killed.entries("restore")]
    console.print(f"{len(sources)} restarts; the last restored from {sources[-1]}")
    return all(found) and len(found) == 3 and sources[-1] == "service"


def end_with_parent() -> None:
    """Makes the kernel kill a new child if this process is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl")


def waited(what: str, done: Callable[[], bool], progress: Progress | None = None) -> None:
    """Polls until ``done()`` with progress output; exits after a time limit."""
    deadline = time.monotonic() + _JOB_SECS
    while not done():
        if progress is not None:
            progress.show()
        if time.monotonic() > deadline:
            sys.exit(f"{what} took more than {_JOB_SECS} s")
        time.sleep(_POLL_SECS)


def ended(process: psutil.Process) -> None:
    """Ends a process and its descendants."""
    family = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
        process.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for straggler in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            straggler.kill()
    psutil.wait_procs(alive, timeout=10)


def parsed() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scale", type=float, default=0.10003, help="factor on the tables' row counts"
    )
    parser.add_argument("--directory", type=Path, help="where to create the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run(parsed()))
