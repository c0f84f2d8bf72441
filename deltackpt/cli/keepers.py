# SPDX-License-Identifier: Apache-2.0
"""``deltackpt peers``: shows and stops the peers that keep saves in the memory of other nodes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click
import rich.box
import rich.console
import rich.table

from deltackpt.cli import arguments, terminal
from deltackpt.cli.service import address_option, connect, item_option, print_ended

if TYPE_CHECKING:
    from deltackpt.service.keepers import KeeperState


@click.group("peers")
def group() -> None:
    """Manage peers, which keep saves in the memory of other nodes, on Ray."""


@group.command(epilog="\b\nExample:\n  deltackpt peers status s3://bucket/run-17 --json")
@arguments.root
@address_option
@item_option
@arguments.as_json
def status(directory: str, address: str, item: str, as_json: bool) -> None:
    """Show memory and address of every peer; the exit code is 1 if one does not answer."""
    connect(address)
    from deltackpt.service import keepers

    found = keepers.states(directory, item)
    if as_json:
        plain = {node: one and dataclasses.asdict(one) for node, one in found.items()}
        terminal.print_json({"directory": directory, "peers": plain})
    else:
        _show(directory, found)
    if None in found.values():
        raise click.exceptions.Exit(1)


@group.command(epilog="\b\nExample:\n  deltackpt peers stop s3://bucket/run-17")
@arguments.root
@address_option
@item_option
@arguments.as_json
def stop(directory: str, address: str, item: str, as_json: bool) -> None:
    """Stop the peers of DIRECTORY and discard their copies; DIRECTORY does not change."""
    connect(address)
    from deltackpt.service import keepers

    print_ended(directory, keepers.stop(directory, item), as_json=as_json)


def _show(directory: str, found: dict[str, KeeperState | None]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=directory)
    for name in ("node", "address", "pid", "fragments", "free", "memory", "trainer"):
        table.add_column(name, justify="left" if name in ("node", "address") else "right")
    for node, one in found.items():
        if one is None:
            table.add_row(node[:8], "does not answer")
        else:
            sizes = (f"{one.free_bytes:,}", f"{one.memory_bytes:,}")
            claimed = "yes" if one.claimed else "no"
            table.add_row(node[:8], one.address, str(one.pid), str(one.fragments), *sizes, claimed)
    rich.console.Console().print(table)
