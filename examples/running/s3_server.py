# SPDX-License-Identifier: Apache-2.0
"""Runs a real S3 server on loopback for a demonstration: versitygw over a directory."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from running.ports import free_port

_BUILT = Path(__file__).resolve().parents[2] / "build" / "servers" / "bin" / "versitygw"
#: The kind and the outcome of a request in the server's log.
_LINE = re.compile(r" s3_(\w+) .*? (\d{3}) ")
_START_SECS = 30


class Server:
    """A running server; the environment of this process and its children holds the credentials.

    Attributes:
      endpoint: its address.
      log: log file with a line per request.
      folder: directory of its buckets.
    """

    def __init__(self, endpoint: str, log: Path, folder: Path):
        """Created by ``running``."""
        self.endpoint, self.log, self.folder = endpoint, log, folder

    def bucket(self, name: str) -> str:
        """Creates a bucket and returns its URL."""
        (self.folder / name).mkdir()
        return f"s3://{name}"

    def requests(self) -> collections.Counter[str]:
        """Returns the number of requests so far, by kind."""
        text = self.log.read_text() if self.log.exists() else ""
        return collections.Counter(match[1] for match in _LINE.finditer(text))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Starts a server, and stops it by its process id."""
    program = str(_BUILT) if _BUILT.exists() else shutil.which("versitygw")
    if program is None:
        sys.exit("versitygw: expected a built server, found none; run make servers")
    buckets, log = folder / "buckets", folder / "requests.log"
    buckets.mkdir(parents=True)
    keys = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demonstration"}
    os.environ |= {**keys, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    root = {"ROOT_ACCESS_KEY": "demo", "ROOT_SECRET_KEY": "demonstration"}
    port = free_port()
    command = [program, f"--port=127.0.0.1:{port}", "--keep-alive", f"--access-log={log}"]
    with open(folder / "server.log", "wb") as out:
        process = subprocess.Popen(
            [*command, "posix", str(buckets)], stdout=out, stderr=out, env=os.environ | root
        )
    try:
        deadline = time.monotonic() + _START_SECS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"versitygw did not start: {(folder / 'server.log').read_text()}")
            time.sleep(0.02)
        yield Server(f"http://127.0.0.1:{port}", log, buckets)
    finally:
        process.kill()
        process.wait()
