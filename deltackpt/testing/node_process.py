# SPDX-License-Identifier: Apache-2.0
"""Node stores in processes of their own, as users start them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

#: Runs in a checkout, too, that is not installed.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from deltackpt.cli import main; "
    "sys.argv[0] = 'node-store'; sys.argv.insert(1, 'node-store'); main()"
)
#: Its server finishes the requests that it is serving.
_END_SECS = 60.0
_PACKAGES = Path(__file__).parents[2]


class NodeProcess(NamedTuple):
    """A running node store.

    Attributes:
      address: ``host:port`` of its server.
      process: the process that serves.
    """

    address: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def node_process(token: str, *arguments: object) -> Iterator[NodeProcess]:
    """Runs ``deltackpt node-store`` on loopback and ends it with SIGTERM.

    Args:
      token: the secret that clients present.
      arguments: further arguments of the command, such as its directory, or ``"--memory", "1GiB"``.

    Yields:
      The node, once it serves.

    Raises:
      RuntimeError: the process ended before it served, or did not end within a minute of SIGTERM
        and was killed.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".token"))
        file.write(token)
        file.flush()
        command = [sys.executable, "-P", "-c", _PROGRAM, _PACKAGES, "--token-file", file.name]
        process = stack.enter_context(
            subprocess.Popen(
                [*map(str, (*command, *arguments)), "--bind", "127.0.0.1", "--json"],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        try:
            stdout = cast(IO[str], process.stdout)
            text = ""
            while not text.rstrip().endswith("}"):
                line = stdout.readline()
                if not line:
                    raise RuntimeError(
                        f"expected the node to serve, but it exited: {process.wait()}"
                    )
                text += line
            yield NodeProcess(json.loads(text)["address"], process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_SECS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise RuntimeError(
                    f"expected the node to end within {_END_SECS:.0f} s of SIGTERM; it was killed"
                ) from error
