# SPDX-License-Identifier: Apache-2.0
"""Node stores for a benchmark: servers in separate processes, each with a rate limit.

The limit covers a server's store and link together: each byte written or read counts once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_TOKEN = "DELTACKPT_NODES_TOKEN"


class Stores:
    """Running servers.

    Attributes:
      addresses: of each server.
      token: required by the servers; also in the environment, which uploaders inherit.
    """

    def __init__(self) -> None:
        """Made by ``node_stores``."""
        self.addresses: list[str] = []
        self.token = os.environ.setdefault(_TOKEN, secrets.token_urlsafe(32))
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def url(self) -> str:
        """The URL of a store over all servers."""
        return f"nodes://{','.join(self.addresses)}"

    def start(self, command: list[str]) -> None:
        """Starts a server."""
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._processes.append(process)
        self.addresses.append(_address(process))

    def kill(self, number: int) -> None:
        """Kills a server."""
        process = self._processes[number]
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def close(self) -> None:
        """Kills all servers."""
        for number in range(len(self._processes)):
            self.kill(number)


@contextlib.contextmanager
def node_stores(
    count: int, bytes_per_sec: float | None = None, *, memory_bytes: int = 8 << 30
) -> Iterator[Stores]:
    """Starts servers that store bytes in memory, and kills them by their ids.

    Args:
      count: how many.
      bytes_per_sec: limit on what each of them sends and receives; None for no limit.
      memory_bytes: capacity of each of them.
    """
    command = [sys.executable, "-m", "deltackpt.cli", "node-store", "--bind", "127.0.0.1", "--json"]
    command += ["--memory", str(memory_bytes)]
    if bytes_per_sec is not None:
        command += ["--bytes-per-sec", str(round(bytes_per_sec))]
    with contextlib.closing(Stores()) as stores:
        for _ in range(count):
            stores.start(command)
        yield stores


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        line = process.stdout.readline()
        if not line:
            sys.exit(f"a node store ended with {process.wait()}")
        said += line
    return json.loads(said)["address"]
