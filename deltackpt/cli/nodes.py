# SPDX-License-Identifier: Apache-2.0
"""``deltackpt node-store``: serves a node's directory, or memory, as a part of a store."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
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
@click.argument(
    "directory", required=False, type=arguments.UserPath(file_okay=False, path_type=Path)
)
@click.option(
    "--memory", type=arguments.Size(), help="Serve this much memory instead of a directory."
)
@click.option("--bind", help="Address to listen on; this node's own by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free port by default.")
@click.option(
    "--token-file",
    type=arguments.UserPath(dir_okay=False, path_type=Path),
    help=f"File with the token, readable only by its owner; the variable {_TOKEN} by default.",
)
@click.option("--bytes-per-sec", type=arguments.Size(), help="Limit for sending and receiving.")
@click.option("--peers", help="All nodes, as in the URL of the store, to forward reads to.")
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
    """Serve DIRECTORY as a part of a store nodes://HOST:PORT,HOST:PORT/PATH.

    Nothing is encrypted, and every holder of the token can read and write everything: use it only
    on a trusted network. The command prints its address and runs until SIGTERM or SIGINT.

    With --peers, each node also serves what the others store. TensorStore's http driver needs this,
    because it connects to a single address.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt.nodes.directory import DirectoryShelf
    from deltackpt.nodes.elsewhere import Elsewhere
    from deltackpt.nodes.server import NodeServer
    from deltackpt.nodes.shelves import MemoryShelf
    from deltackpt.nodes.tokens import Tokens
    from deltackpt.storage.nodes import addresses_of

    if (directory is None) == (memory is None):
        raise click.UsageError("expected DIRECTORY or --memory, found both or neither; pass one")
    token = _token(token_file)
    with contextlib.ExitStack() as stack:
        wait = stack.enter_context(terminal.termination())
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
        wait()


def own_address() -> str:
    """Returns the address at which other nodes reach this one.

    Raises:
      OptionError: this node has no address on a network.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Sends nothing: the kernel only chooses the source address.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    raise OptionError(
        "--bind: expected a network on which this node has an address, found none; pass --bind an "
        "address"
    )


def _token(path: Path | None) -> str:
    """Returns the token that clients must send.

    Raises:
      OptionError: the token is missing, or others can read its file.
    """
    if path is None:
        from deltackpt.storage import buckets

        found = buckets.nodes_token()
        if found is None:
            raise OptionError(
                f"--token-file: expected a file, or {_TOKEN} in the environment, found neither; "
                "make a token: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return found
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
                raise OptionError(
                    f"{path}: expected a file that only its owner can read, found the mode "
                    f"{stat.S_IMODE(about.st_mode):04o}; chmod 600 {path}"
                )
            return file.read(_MOST_TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise OptionError(
            f"{path}: expected a file with the token, found {error.strerror}; pass another file"
        ) from error
