# SPDX-License-Identifier: Apache-2.0
"""Storage of nodes for a benchmark: servers in processes of their own, each with a bound of bytes.

The bound is of a server's store and its link together: what is written and read counts once.
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
    """Servers that run.

    Attributes:
      addresses: of each.
      token: what they let in; it is in the environment, too, which promoters inherit.
    """

    def __init__(self) -> None:
        """Made by ``node_stores``."""
        self.addresses: list[str] = []
        self.token = os.environ.setdefault(_TOKEN, secrets.token_urlsafe(32))
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def url(self) -> str:
        """Of a store over all of them."""
        return f"nodes://{','.join(self.addresses)}"

    def start(self, command: list[str]) -> None:
        """Starts one."""
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._processes.append(process)
        self.addresses.append(_address(process))

    def kill(self, number: int) -> None:
        """Kills one."""
        process = self._processes[number]
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def close(self) -> None:
        """Kills all of them."""
        for number in range(len(self._processes)):
            self.kill(number)


@contextlib.contextmanager
def node_stores(
    count: int, bytes_per_sec: float | None = None, *, memory_bytes: int = 8 << 30
) -> Iterator[Stores]:
    """Starts servers that keep bytes in memory, and ends them by their ids.

    Args:
      count: how many.
      bytes_per_sec: the most that each of them sends and receives; None for no bound.
      memory_bytes: the most that each of them keeps.
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
