# SPDX-License-Identifier: Apache-2.0
"""Cost of a round trip of an object to a node, compared with a bare socket into mapped memory.

python benchmarks/nodes.py [--scale S] [--repeats N] [--directory D]
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from report import Report, Sample, arguments, timed

from deltackpt.storage.nodes import Node

_NBYTES = 60_000_000
_PIECE_BYTES = 1 << 20


def bare_server() -> None:
    """Receives an object into mapped memory, or sends it back, until the client disconnects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        memory = memoryview(mmap.mmap(-1, int(sys.argv[2])))
        memory[:] = bytes(len(memory))
        while asked := connection.recv(1):
            if asked == b"P":
                receive(connection, memory)
                connection.sendall(b".")
            else:
                connection.sendall(memory)


def receive(connection: socket.socket, memory: memoryview) -> None:
    """Fills ``memory`` from the socket."""
    done = 0
    while done < len(memory):
        piece = min(_PIECE_BYTES, len(memory) - done)
        done += connection.recv_into(memory[done:], piece, socket.MSG_WAITALL)


class Bare:
    """A client of ``bare_server``."""

    def __init__(self, port: int):
        """Connects."""
        self._connection = socket.create_connection(("127.0.0.1", port))

    def put(self, data: memoryview) -> None:
        """Sends an object and waits for the acknowledgment."""
        self._connection.sendall(b"P")
        self._connection.sendall(data)
        self._connection.recv(1)

    def read_into(self, out: memoryview) -> None:
        """Reads an object."""
        self._connection.sendall(b"G")
        receive(self._connection, out)

    def close(self) -> None:
        """Closes the connection, which also stops the server."""
        self._connection.close()


@contextlib.contextmanager
def started(command: list[str], token: str) -> Iterator[tuple[str, int]]:
    """Starts a server; yields the first word that it prints and its process ID."""
    environment = os.environ | {"DELTACKPT_NODES_TOKEN": token}
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0].rstrip(":"), process.pid
        process.terminate()


def cpu_secs(pid: int) -> float:
    """CPU seconds used by a server's threads and by this process."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    theirs = sum(int(each.read_text().split()[0]) for each in threads)
    return theirs / 1e9 + time.process_time()


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__)
    given = parser.parse_args()
    nbytes = max(_PIECE_BYTES, int(_NBYTES * given.scale))
    data = memoryview(np.random.default_rng(0).bytes(nbytes))
    out = memoryview(bytearray(nbytes))
    token = secrets.token_urlsafe(32)
    serve = ["-m", "deltackpt.cli", "node-store", "--bind", "127.0.0.1"]
    took: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
        ways: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {}
        port, pid = stack.enter_context(started([__file__, "--bare-server", str(nbytes)], token))
        bare = stack.enter_context(contextlib.closing(Bare(int(port))))
        ways["bare socket"] = (lambda: bare.put(data), lambda: bare.read_into(out), pid)
        for name, where in (("memory", ["--memory", "4GiB"]), ("directory", [str(folder)])):
            address, pid = stack.enter_context(started([*serve, *where], token))
            node = stack.enter_context(contextlib.closing(Node(address, token)))
            ways[name] = (
                lambda node=node: node.put("x", [data]),
                lambda node=node: node.read_into("x", 0, [out]),
                pid,
            )
        for number in range(given.repeats + 1):
            for name, (put, get, pid) in ways.items():
                for what, call in (("put", put), ("get", get)):
                    before = cpu_secs(pid)
                    secs_taken = timed(call)
                    if number:  # The first round is a warm-up: it faults in fresh memory.
                        key = f"{what}, {name}"
                        took.setdefault(key, []).append(nbytes / secs_taken / 1e9)
                        cpu = (cpu_secs(pid) - before) / (nbytes / 1e9)
                        took.setdefault(f"{key}: CPU", []).append(cpu)
    assert out == data
    report = Report("A node's server on loopback", sizes=f"{nbytes / 1e6:.0f} MB an object")
    found = {name: Sample(tuple(values)) for name, values in took.items()}
    for what in ("put", "get"):
        for name in ("memory", "directory"):
            for kind, unit in (("", rate), (": CPU", secs_a_gb)):
                report.compare(
                    f"{what}, {name}{kind}",
                    found[f"{what}, {name}{kind}"],
                    f"bare socket{kind}",
                    found[f"{what}, bare socket{kind}"],
                    unit,
                )
    report.note("CPU is of the server and the client; a put into the directory is on its disk.")
    report.show(given.json, given.markdown)


def rate(value: float) -> str:
    """Formats a rate in GB/s."""
    return f"{value:.2f} GB/s"


def secs_a_gb(value: float) -> str:
    """Formats CPU seconds per GB."""
    return f"{value:.2f} s/GB"


if __name__ == "__main__":
    if "--bare-server" in sys.argv:
        bare_server()
    else:
        main()
