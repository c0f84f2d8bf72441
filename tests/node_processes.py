# SPDX-License-Identifier: Apache-2.0
"""Nodes as users start them: one process each, ended by its id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class NodeProcess(NamedTuple):
    """A node that runs.

    Attributes:
      address: of its server.
      process: that serves.
    """

    address: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def node_process(token: str, *arguments: object) -> Iterator[NodeProcess]:
    """``deltackpt node-store`` on loopback, while it is needed."""
    command = [sys.executable, "-m", "deltackpt.cli", "node-store", *map(str, arguments)]
    with subprocess.Popen(
        [*command, "--bind", "127.0.0.1", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "DELTACKPT_NODES_TOKEN": token,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = process.stdout.readline()
                assert line, f"the node ended with {process.wait()}"
                text += line
            yield NodeProcess(json.loads(text)["address"], process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
