# SPDX-License-Identifier: Apache-2.0
"""Jobs of several real processes, joined by ``jax.distributed`` on the loopback interface.

A test asks the processes of a job to do something, all at once, and compares their answers. Every
wait has a limit, which only guards against hangs, and no process outlives its job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import many_worker
import pytest
from machine import free_port

#: A process that sends nothing for this long counts as hung.
SILENCE_SECS = 120.0
_POLL_SECS = 0.01
#: How long a hung process gets to print its stacks.
_STACKS_SECS = 2.0

Answer = dict[str, Any]


class Server:
    """Forks the processes of jobs from one that has imported everything."""

    def __init__(self, worker: str = many_worker.__file__, **environment: str):
        """Starts it; it imports and its processes run the file ``worker``."""
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, worker], env=environment, **pipes)
        self._lock = threading.Lock()

    def start(self, task: dict[str, Any]) -> int:
        """Starts a process; its id is not reused before ``end``."""
        return self._order(task)["pid"]

    def end(self, pid: int) -> int:
        """Waits for a process that was killed or hung up; returns its exit status."""
        return self._order({"end": pid})["status"]

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SILENCE_SECS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


class Process:
    """One process of a job.

    Attributes:
      number: its index in the job.
      pid: its process id.
      reached: the points of saves at which it died, stopped or was paused.
      status: its exit status, None while it runs; negative for a signal.
    """

    def __init__(self, number: int, pid: int, job: Job, server: Server, diagnosis: Path):
        self.number, self.pid = number, pid
        self.reached: list[str] = []
        self.status: int | None = None
        self._job, self._server, self._diagnosis = job, server, diagnosis
        self._link: socket.socket | None = None
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        self._reader: threading.Thread | None = None

    def connected(self, link: socket.socket) -> None:
        """Starts to read its answers from its connection to the job."""
        self._link = link
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, do: str, **arguments: Any) -> None:
        """Sends a request; does nothing if the process is dead."""
        assert self._link is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._link.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, timeout_secs: float = SILENCE_SECS) -> Answer:
        """Its next answer; its exit status as ``ended`` if it ends instead."""
        try:
            found = self._answers.get(timeout=timeout_secs)
        except queue.Empty:
            pytest.fail(f"process {self.number} hangs\n{self._job.stacks()}")
        if found is not None:
            return found
        self._answers.put(None)
        return {"ended": self.end()}

    def has_answered(self, times: int) -> bool:
        """Whether at least ``times`` answers are queued."""
        return self._answers.qsize() >= times

    def wait_reached(self, point: str) -> None:
        """Waits until it reports that it reached a point of a save."""
        what = f"process {self.number} reaches {point!r}"
        wait_until(lambda: point in self.reached, what, self._job.stacks)

    def hang_up(self) -> None:
        """Closes the request stream, so that the process ends."""
        assert self._link is not None
        self._link.shutdown(socket.SHUT_WR)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, unless it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> int:
        """Waits for its end after a kill or hang-up; returns its exit status."""
        if self.status is None:
            self.status = self._server.end(self.pid)
        return self.status

    def close(self) -> None:
        """Kills it if it still runs."""
        self.kill()
        self.end()
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            assert self._reader is not None
            self._reader.join(SILENCE_SECS)
            self._link.close()

    def diagnosis(self) -> str:
        """The end of what it printed."""
        return self.output()[-4000:]

    def output(self) -> str:
        """All that it printed."""
        return self._diagnosis.read_text(errors="replace") if self._diagnosis.exists() else ""

    def _read(self) -> None:
        assert self._link is not None
        with contextlib.suppress(OSError), self._link.makefile("r") as lines:
            for line in lines:
                told = json.loads(line)
                if "reached" in told:
                    self.reached.append(told["reached"])
                else:
                    self._answers.put(told)
        self._answers.put(None)


class Job:
    """Several processes that form one distributed JAX job; a context manager."""

    def __init__(
        self,
        server: Server,
        directory: Path,
        *,
        processes: int,
        devices: int = 2,
        model: many_worker.Model | None = None,
        apart: bool = False,
    ):
        """Starts nothing yet.

        Each process has ``devices``. A new directory in ``directory`` is for logs. If ``apart``,
        JAX's coordinator runs in its own process instead of in process 0.
        """
        self.count, self.devices = processes, devices
        self.model = model or many_worker.Model()
        self.processes: list[Process] = []
        self._leader: Process | None = None
        self._server, self._apart = server, apart
        number = len(list(directory.glob("job.*")))
        self._directory = directory / f"job.{number}"

    def __enter__(self) -> Job:
        self._directory.mkdir(parents=True)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                # A Linux abstract name does not depend on the length of a path. Data that a killed
                # process wrote to such a socket can still be read, while TCP may drop it.
                listener.bind(f"\0deltackpt-{uuid.uuid4().hex}")
                listener.listen(self.count + 1)
                listener.settimeout(SILENCE_SECS)
                self._start(listener)
            address = f"127.0.0.1:{free_port()}"
            if self._leader is not None:
                self._leader.ask("lead", address=address)
                assert "error" not in self._leader.answer()
            self.all("join", address=address, apart=self._apart)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Process 0 or the leader last: the others print pages when they lose their coordinator.
        everybody = [*reversed(self.processes), *([self._leader] if self._leader else [])]
        for process in everybody:
            process.kill()
        for process in everybody:
            process.close()

    def ask(self, do: str, *, of: Iterable[int] | None = None, **arguments: Any) -> None:
        """Sends a request to all processes, or to some of them."""
        for process in self.processes if of is None else [self.processes[i] for i in of]:
            process.ask(do, **arguments)

    def answers(self, *, of: Iterable[int] | None = None) -> list[Answer]:
        """The next answer of all processes, or of some of them."""
        found = self.processes if of is None else [self.processes[i] for i in of]
        return [process.answer() for process in found]

    def each(self, do: str, **arguments: Any) -> list[Answer]:
        """Sends a request to all processes; returns all answers, errors and ends included."""
        self.ask(do, **arguments)
        return self.answers()

    def all(self, do: str, **arguments: Any) -> list[Answer]:
        """Sends a request to all processes, all of which must succeed."""
        found = self.each(do, **arguments)
        for process, answer in zip(self.processes, found):
            failed = answer.get("error") or answer.get("ended")
            assert failed is None, f"process {process.number}, {do}: {failed}\n{self.diagnosis()}"
        return found

    def one(self, do: str, **arguments: Any) -> Answer:
        """Sends a request to all processes, which must all give the same answer."""
        found = [
            {key: value for key, value in answer.items() if key not in ("secs", "warnings")}
            for answer in self.all(do, **arguments)
        ]
        assert all(answer == found[0] for answer in found), found
        return found[0]

    def close(self) -> None:
        """Closes the managers and ends all processes cleanly."""
        self.all("close")
        if self.count > 1:
            # Process 0 runs the coordinator: it must stay until the others have left.
            others = range(1, self.count)
            self.ask("leave", of=others)
            assert not any("error" in answer for answer in self.answers(of=others))
            self.ask("leave", of=[0])
            self.answers(of=[0])
        for process in self.processes:
            process.hang_up()
        statuses = [process.answer() for process in self.processes]
        assert statuses == [{"ended": 0}] * self.count, f"{statuses}\n{self.diagnosis()}"

    def release(self) -> None:
        """Resumes the processes that are paused at a point of a save."""
        self._release.touch()

    def diagnosis(self) -> str:
        """The end of what all processes printed."""
        return "\n".join(f"[{p.number}] {p.diagnosis()}" for p in self.processes)

    def stacks(self) -> str:
        """The end of the output of all processes, then the stacks of all their threads."""
        before = self.diagnosis()
        printed = [len(process.output()) for process in self.processes]
        for process in self.processes:
            process.kill(signal.SIGUSR1)
        time.sleep(_STACKS_SECS)
        found = (process.output()[end:] for process, end in zip(self.processes, printed))
        return "\n".join([before, *(f"[{number}] {text}" for number, text in enumerate(found))])

    @property
    def _release(self) -> Path:
        return self._directory / "release"

    def _start(self, listener: socket.socket) -> None:
        started = []
        for number in range(self.count + self._apart):
            diagnosis = self._directory / f"{number}.txt"
            task = {
                "socket": listener.getsockname()[1:].decode(),
                "process": number,
                "count": self.count,
                "devices": self.devices,
                "diagnosis": str(diagnosis),
                "release": str(self._release),
                "model": dataclasses.asdict(self.model),
            }
            pid = self._server.start(task)
            started.append(Process(number, pid, self, self._server, diagnosis))
            # Registered at once, so that it is ended even after an error.
            self.processes = started[: self.count]
            self._leader = started[self.count] if number == self.count else None
        for _ in started:
            link, _ = listener.accept()
            link.settimeout(None)
            started[json.loads(_first_line(link))["process"]].connected(link)


def wait_until(
    true: Callable[[], object], what: str, diagnosis: Callable[[], str] = lambda: ""
) -> None:
    """Waits until a condition is true; fails the test after a limit."""
    deadline = time.monotonic() + SILENCE_SECS
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"expected that {what}, found that it does not\n{diagnosis()}")
        time.sleep(_POLL_SECS)


def _first_line(link: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        found += link.recv(1)
    return found
