# SPDX-License-Identifier: Apache-2.0
"""``deltackpt follow``: keeps tables and dense leaves fresh in memory, for other processes."""

from __future__ import annotations

from pathlib import Path

import click

from deltackpt.cli import arguments, terminal


@click.command(
    epilog="\b\nExamples:\n"
    "  deltackpt follow /shared/run-17 --tables 'users' --port 9480\n"
    "  deltackpt follow s3://bucket/run --tables '**' --share /run/rows.address --shard 1/4"
)
@arguments.root
@click.option("--tables", multiple=True, help="Glob over table names to follow; repeatable.")
@click.option("--slots", multiple=True, help="Glob over the tables' slots to hold; repeatable.")
@click.option("--leaves", multiple=True, help="Glob over dense leaves to follow; repeatable.")
@click.option("--shard", default="0/1", show_default=True, help="Part of the rows, as I/N.")
@click.option(
    "--share",
    type=arguments.UserPath(dir_okay=False, path_type=Path),
    help="File for the address that deltackpt.serving.attach() opens.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free port by default.")
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address of the status page.")
@click.option("--poll-secs", type=float, default=0.1, show_default=True)
@click.option("--memory", "memory_bytes", type=arguments.Size(), help="Memory limit for rows.")
@arguments.item
@arguments.endpoint
@arguments.as_json
def follow(
    directory: str,
    tables: tuple[str, ...],
    slots: tuple[str, ...],
    leaves: tuple[str, ...],
    shard: str,
    share: Path | None,
    port: int,
    bind: str,
    poll_secs: float,
    memory_bytes: int | None,
    item: str | None,
    endpoint: str | None,
    as_json: bool,
) -> None:
    """Keep the newest tables and dense leaves of DIRECTORY in memory.

    The command prints the URL of a status page and runs until SIGTERM or SIGINT. The page has no
    authentication. Prometheus's metrics are below it, at /metrics.
    """
    # Imported here: other commands need not pay for it.
    from deltackpt import serving

    number, _, count = shard.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise click.BadParameter(f"expected I/N, such as 0/4, found {shard!r}")
    live = serving.follow(
        directory,
        leaves,
        tables=tables,
        slots=slots,
        shard=int(number),
        shards=int(count),
        poll_secs=poll_secs,
        memory_bytes=memory_bytes,
        item=item,
        endpoint=endpoint,
    )
    with terminal.termination() as wait, live:
        if share is not None:
            live.share(share)
        url = live.serve_status(port, bind)
        if as_json:
            terminal.print_json({"directory": directory, "url": url})
        else:
            click.echo(f"follows {directory}: {url}")
        wait()
