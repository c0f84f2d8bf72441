# SPDX-License-Identifier: Apache-2.0
"""``deltackpt service`` and ``deltackpt peers``: start, show and stop what runs on Ray."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from deltackpt import service, units
from deltackpt.cli import terminal
from deltackpt.cli.terminal import Output
from deltackpt.errors import ServiceUnavailable
from deltackpt.format import naming
from deltackpt.inspect.listing import Listing

if TYPE_CHECKING:
    from deltackpt.service.peer_agents import AgentState
    from deltackpt.service.restore_service import ReplicaStatus, ServiceStatus

_CONNECT_SECS = 20.0
_COLUMNS = (
    "shard", "replica", "node", "pid", "step", "recovery point", "behind", "lag", "bytes", "health",
)  # fmt: skip


def _on_ray(command: Callable[..., None]) -> Callable[..., None]:
    """Adds DIRECTORY, --address and --item to a command, and connects to the cluster."""

    @terminal.root
    @click.option(
        "--address", default="auto", show_default=True, help="Address of the Ray cluster."
    )
    # No search for the item: this machine may not see the directory.
    @click.option(
        "--item",
        default=naming.EMBEDDINGS_ITEM,
        show_default=True,
        help="deltackpt's item in each step.",
    )
    @functools.wraps(command)
    def run(directory: str, address: str, item: str, **options: object) -> None:
        connect(address)
        command(directory=directory, item=item, **options)

    return run


@click.group("service")
def group() -> None:
    """Manage the hot standby: the newest state of a directory in memory, on Ray."""


@group.command(
    epilog="\b\nExample:\n  deltackpt service start /shared/run-17 --replicas 2 --compact-after 10"
)
@_on_ray
@click.option("--shards", type=int, help="Actors that share the rows; one per node by default.")
@click.option("--replicas", type=int, default=1, show_default=True, help="Copies of each row.")
@click.option("--memory", "memory_bytes", type=terminal.Size(), help="Memory limit per actor.")
@click.option("--compact-after", type=int, metavar="N", help="Compact chains of N deltas.")
@terminal.endpoint
@terminal.kafka_config
@click.option("--wait", "wait_secs", type=float, help="Seconds to wait until it is ready.")
@terminal.prints
def start(directory: str, item: str, wait_secs: float | None, **options: Any) -> Output:
    """Start the hot standby of DIRECTORY, or its missing actors."""
    standby = service.start(directory, options=service.ServiceOptions(item=item, **options))
    if wait_secs is not None:
        standby.wait_ready(timeout_secs=wait_secs)
    replicas = len(standby.replicas())
    return Output(
        {"directory": standby.directory, "replicas": replicas},
        [f"{standby.directory}: {units.count(replicas, 'actor')}"],
    )


@group.command(epilog="\b\nExample:\n  deltackpt service status /shared/run-17 --json")
@_on_ray
@terminal.prints
def status(directory: str, item: str) -> Output:
    """Show step, lag, bytes and health of each actor; exit code 1 if one lags or is unhealthy."""
    found = service.connect(directory, item).status()
    well = all(one.found is not None and not one.found.code for one in found.replicas)
    return Output(
        _plain(found),
        [
            Listing(_COLUMNS, [_cells(one) for one in found.replicas], found.directory),
            f"newest committed step: {'-' if found.newest_step is None else found.newest_step}",
            f"compaction: {found.compactor or 'none'}",
        ],
        failed=not well or found.step != found.newest_step,
    )


@group.command(epilog="\b\nExample:\n  deltackpt service stop /shared/run-17")
@_on_ray
@terminal.prints
def stop(directory: str, item: str) -> Output:
    """Stop the hot standby of DIRECTORY; steps and compacted bases are kept."""
    return _ended(directory, service.stop(directory, item))


def _ended(directory: str, count: int) -> Output:
    text = f"{directory}: {units.count(count, 'actor')} ended"
    return Output({"directory": directory, "actors_ended": count}, [text])


def connect(address: str) -> None:
    """Connects to a running Ray cluster within 20 s; never starts one."""
    service.require_ray()
    import ray

    from deltackpt.resources.runtime import Task

    joining = Task(
        lambda: ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    )
    # Ray would retry for minutes if the head node was stopped.
    threading.Thread(target=joining.run, daemon=True).start()
    try:
        joining.future.result(_CONNECT_SECS)
    except Exception as error:
        is_late = not joining.future.done()
        found = f"no answer within {_CONNECT_SECS:.0f} s" if is_late else str(error)
        raise ServiceUnavailable(
            f"Ray at {address!r}: expected a running cluster, found {found}; start one with ray "
            "start, or pass --address"
        ) from error


def _cells(one: ReplicaStatus) -> list[object]:
    found, replica = one.found, one.replica
    cells: list[object] = [f"{replica.shard} of {replica.shards}", replica.index]
    if found is None:
        return [*cells, *[None] * 7, one.problem]
    behind = None
    if one.step is not None and found.newest_step is not None:
        behind = found.newest_step - one.step
    point = None if found.point is None else found.point.step
    lag = None if found.lag_secs is None else f"{found.lag_secs:.2f} s"
    cells += [found.node[:8], str(found.pid), one.step, point, behind, lag]
    return [*cells, found.nbytes, found.health]


def _plain(found: ServiceStatus) -> dict[str, object]:
    return {
        "directory": found.directory,
        "step": found.step,
        "newest_step": found.newest_step,
        "compactor": found.compactor,
        "replicas": [
            {
                "shard": one.replica.shard,
                "shards": one.replica.shards,
                "replica": one.replica.index,
                "problem": one.problem,
                **(dataclasses.asdict(one.found) if one.found is not None else {}),
                "step": one.step,
            }
            for one in found.replicas
        ],
    }


@click.group("peers")
def peers() -> None:
    """Manage peers, which keep saves in the memory of other nodes, on Ray."""


@peers.command("status", epilog="\b\nExample:\n  deltackpt peers status s3://bucket/run-17 --json")
@_on_ray
@terminal.prints
def peers_status(directory: str, item: str) -> Output:
    """Show memory and address of every peer; the exit code is 1 if one does not answer."""
    from deltackpt.service import peer_agents

    found = peer_agents.states(directory, item)
    plain = {node: one and dataclasses.asdict(one) for node, one in found.items()}
    columns = ("node", "address", "pid", "fragments", "free", "memory", "trainer")
    lines = [_peer_cells(*peer) for peer in found.items()]
    return Output(
        {"directory": directory, "peers": plain},
        [Listing(columns, lines, directory)],
        failed=None in found.values(),
    )


@peers.command("stop", epilog="\b\nExample:\n  deltackpt peers stop s3://bucket/run-17")
@_on_ray
@terminal.prints
def stop_peers(directory: str, item: str) -> Output:
    """Stop the peers of DIRECTORY and discard their copies; DIRECTORY does not change."""
    from deltackpt.service import peer_agents

    return _ended(directory, peer_agents.stop(directory, item))


def _peer_cells(node: str, one: AgentState | None) -> list[object]:
    if one is None:
        return [node[:8], "does not answer", *[None] * 5]
    claimed = "yes" if one.claimed else "no"
    sizes = [one.fragments, one.free_bytes, one.memory_bytes]
    return [node[:8], one.address, str(one.pid), *sizes, claimed]
