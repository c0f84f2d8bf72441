# SPDX-License-Identifier: Apache-2.0
"""Commands that run until they are stopped: follow, upload, node-store."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltackpt import units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import Output
from deltackpt.errors import OptionError

if TYPE_CHECKING:
    from deltackpt.wal import KafkaWal


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt follow /shared/run-17 --tables 'users' --port 9480\n"
    "  deltackpt follow s3://bucket/run --tables '**' --share /run/rows.address --shard 1/4"
)
@terminal.root
@click.option("--tables", multiple=True, help="Glob over table names to follow; repeatable.")
@click.option("--slots", multiple=True, help="Glob over the tables' slots to hold; repeatable.")
@click.option("--leaves", multiple=True, help="Glob over dense leaves to follow; repeatable.")
@click.option("--shard", default="0/1", show_default=True, help="Shard of the rows, as I/N.")
@click.option(
    "--share",
    type=terminal.UserPath(dir_okay=False, path_type=Path),
    help="File for the address that deltackpt.serving.attach() opens.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free port by default.")
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address of the status page.")
@click.option("--poll-secs", type=float, default=0.1, show_default=True)
@click.option("--memory", "memory_bytes", type=terminal.Size(), help="Memory limit for rows.")
@terminal.item
@terminal.endpoint
@terminal.kafka_config
@terminal.as_json
def follow(
    directory: str,
    shard: str,
    wal: KafkaWal | None,
    share: Path | None,
    port: int,
    bind: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Keep the newest tables and dense leaves of DIRECTORY in memory.

    The command prints the URL of a status page and runs until SIGTERM or SIGINT. The page has no
    authentication. Prometheus's metrics are below it, at /metrics.
    """
    from deltackpt import serving

    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise click.BadParameter(f"expected I/N, such as 0/4, found {shard!r}")
    live = serving.follow(
        directory, shard=int(number), shards=int(count), wal=wal or True, **options
    )
    with terminal.termination() as wait, live:
        if share is not None:
            live.share(share)
        url = live.serve_status(port, bind)
        value = {"directory": directory, "url": url}
        terminal.show(as_json, value, [f"follows {directory}: {url}"])
        wait()


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt upload /dev/shm/run-17 --status\n"
    "  deltackpt upload /dev/shm/run-17 --until-empty"
)
@click.argument(
    "stage", metavar="STAGING", type=terminal.UserPath(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="Exit once every save is uploaded; otherwise run until stopped.",
)
@click.option("--status", "only_status", is_flag=True, help="Only print the progress.")
@terminal.prints
def upload(stage: Path, until_empty: bool, only_status: bool) -> Output:
    """Upload the saves in the staging directory STAGING to the trainer's bucket.

    The trainer's own uploader survives the trainer. Use this command if it cannot: in a container's
    stop hook, in a job epilogue, or beside the trainer. It waits while another uploader works in
    STAGING, and can be killed at any time.

    With --status, the exit code is 1 if saves are waiting or cannot be uploaded.
    """
    from deltackpt.tiers import replicator
    from deltackpt.tiers.cursor import Trainer
    from deltackpt.tiers.staging import StagingDir
    from deltackpt.tiers.uploader import Uploader

    found = StagingDir(stage.absolute())
    if not only_status:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        trainer = Trainer(is_gone=until_empty)
        with replicator.only_one(found, trainer) as is_one:
            if is_one:
                Uploader(found, adopts=True).run(trainer)
    status = replicator.status_of(found)
    if status is None:
        return Output(None, ["no save was ever staged here"])
    lines = [f"target   {status.url}"]
    lines += [f"waiting  {units.count(status.waiting, 'save')}, {units.size(status.nbytes)}"]
    lines += [f"damaged  {key}: {text}" for key, text in status.damaged.items()]
    if status.problem:
        since = time.strftime("%H:%M:%S", time.localtime(status.problem_unix_secs))
        lines.append(f"failing since {since}: {status.problem}")
    return Output(status, lines, failed=bool(status.waiting or status.damaged))


_TOKEN = "DELTACKPT_NODES_TOKEN"
_MOST_TOKEN_BYTES = 4096


@click.command(
    "node-store",
    epilog="\b\nExamples:\n"
    "  deltackpt node-store /nvme/store --port 9470 --token-file ~/.nodes-token\n"
    "  deltackpt node-store --memory 64GiB --bind 10.0.0.7",
)
@click.argument(
    "directory", required=False, type=terminal.UserPath(file_okay=False, path_type=Path)
)
@click.option(
    "--memory", type=terminal.Size(), help="Serve this much memory instead of a directory."
)
@click.option("--bind", help="Address to listen on; this node's own by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free port by default.")
@click.option(
    "--token-file",
    type=terminal.UserPath(dir_okay=False, path_type=Path),
    help=f"File with the token, readable only by its owner; the variable {_TOKEN} by default.",
)
@click.option("--bytes-per-sec", type=terminal.Size(), help="Limit for sending and receiving.")
@terminal.as_json
def node_store(
    directory: Path | None,
    memory: int | None,
    bind: str | None,
    port: int,
    token_file: Path | None,
    bytes_per_sec: int | None,
    as_json: bool,
) -> None:
    """Serve DIRECTORY as a part of a store nodes://HOST:PORT,HOST:PORT/PATH.

    Nothing is encrypted, and every holder of the token can read and write everything: use it only
    on a trusted network. The command prints its address and runs until SIGTERM or SIGINT.
    """
    from deltackpt.nodes.blobs import MemoryBlobs
    from deltackpt.nodes.directory_blobs import DirectoryBlobs
    from deltackpt.nodes.server import NodeServer, Tokens

    if (directory is None) == (memory is None):
        raise click.UsageError("expected DIRECTORY or --memory, found both or neither; pass one")
    token = _token(token_file)
    with contextlib.ExitStack() as stack:
        wait = stack.enter_context(terminal.termination())
        if directory is not None:
            blobs, held = DirectoryBlobs(directory.absolute()), str(directory)
        else:
            assert memory is not None
            blobs, held = MemoryBlobs(memory), f"{units.size(memory)} of memory"
        stack.enter_context(contextlib.closing(blobs))
        server = NodeServer(
            blobs,
            bind=bind or own_address(),
            port=port,
            tokens=Tokens(token),
            bytes_per_sec=bytes_per_sec,
        )
        stack.enter_context(contextlib.closing(server))
        value = {"address": server.address, "pid": os.getpid()}
        terminal.show(as_json, value, [f"{server.address}: {held}"])
        wait()


def own_address() -> str:
    """Returns the address at which other nodes reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Sends nothing: the kernel only chooses the source address.
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    raise OptionError(
        "--bind: expected a network on which this node has an address, found none; pass --bind an "
        "address"
    )


def _token(path: Path | None) -> str:
    """Returns the token that clients must send; only the owner may be able to read its file."""
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
