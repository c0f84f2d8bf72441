# SPDX-License-Identifier: Apache-2.0
"""The command that makes a node's directory, or memory, part of a store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import click

from deltackpt import units
from deltackpt.cli import arguments, terminal
from deltackpt.errors import OptionError

_TOKEN = "DELTACKPT_NODES_TOKEN"
_MOST_TOKEN_BYTES = 4096


@click.command(
    "node-store",
    epilog="\b\nExamples:\n"
    "  deltackpt node-store /nvme/store --port 9470 --token-file ~/.nodes-token\n"
    "  deltackpt node-store --memory 64GiB --bind 10.0.0.7",
)
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--memory", type=arguments.Size(), help="Keep so much in memory, and no directory.")
@click.option("--bind", help="Address to listen on; this node's own by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one by default.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with the token, which its owner alone reads; {_TOKEN} by default.",
)
@click.option("--bytes-per-sec", type=arguments.Size(), help="The most that is sent and received.")
@click.option("--peers", help="All nodes of the store, as its URL names them, to forward reads to.")
@arguments.as_json
def node_store(
    directory: Path | None,
    memory: int | None,
    bind: str | None,
    port: int,
    token_file: Path | None,
    bytes_per_sec: int | None,
    peers: str | None,
    as_json: bool,
) -> None:
    """Serve DIRECTORY to other nodes, as a part of a root nodes://HOST:PORT,HOST:PORT/PATH.

    It prints the address, and serves until SIGTERM or SIGINT. Who has the token reads and writes
    all of it, and nothing is encrypted: it is for a network whose hosts are trusted.

    With --peers any of the nodes hands out what the others hold, as TensorStore's http driver needs
    it, which knows one address.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt.nodes.directory import DirectoryShelf
    from deltackpt.nodes.elsewhere import Elsewhere
    from deltackpt.nodes.server import NodeServer
    from deltackpt.nodes.shelves import MemoryShelf
    from deltackpt.nodes.tokens import Tokens
    from deltackpt.storage.nodes import addresses_of

    if (directory is None) == (memory is None):
        raise click.UsageError("expected DIRECTORY or --memory, found both or neither; give one")
    token = _token(token_file)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with contextlib.ExitStack() as stack:
        others = None
        if peers is not None:
            others = stack.enter_context(contextlib.closing(Elsewhere(addresses_of(peers), token)))
        if directory is not None:
            shelf, held = DirectoryShelf(directory.absolute()), str(directory)
        else:
            assert memory is not None
            shelf, held = MemoryShelf(memory), f"{units.size(memory)} of memory"
        stack.enter_context(contextlib.closing(shelf))
        server = NodeServer(
            shelf,
            bind=bind or own_address(),
            port=port,
            tokens=Tokens(token),
            bytes_per_sec=bytes_per_sec,
            elsewhere=others,
        )
        stack.enter_context(contextlib.closing(server))
        if as_json:
            terminal.print_json({"address": server.address, "pid": os.getpid()})
        else:
            click.echo(f"{server.address}: {held}")
        ended.wait()


def own_address() -> str:
    """The address of this node that others reach it at.

    Raises:
      OptionError: its name stands for none, or for the loopback one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Nothing is sent: the kernel says which address it would be sent from.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    raise OptionError(
        "--bind: expected a network that this node has an address on, found none; name an address"
    )


def _token(path: Path | None) -> str:
    """The token that is let in.

    Raises:
      OptionError: there is none, or others can read it.
    """
    if path is None:
        from deltackpt.storage import buckets

        found = buckets.nodes_token()
        if found is None:
            raise OptionError(
                f"--token-file: expected one, or {_TOKEN} in the environment, found neither; make "
                "a token: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return found
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
                raise OptionError(
                    f"{path}: expected a file that its owner alone can read, found the mode "
                    f"{stat.S_IMODE(about.st_mode):04o}; chmod 600 {path}"
                )
            return file.read(_MOST_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise OptionError(
            f"{path}: expected a file with the token, found {error.strerror}; name another"
        ) from error
