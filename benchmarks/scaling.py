# SPDX-License-Identifier: Apache-2.0
"""Weak scaling: saves of 1, 2 and 4 processes, with equal rows per process, against Orbax.

The processes are real ones on this machine, joined by gloo on loopback. Tables and slots are
sharded by rows over all devices; the dense part is replicated. A save blocks for the time of the
slowest process's call. It is durable when ``wait()`` has returned on every process.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fresh
import jax
import numpy as np
import report as reports
import state as states
import ways
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from report import Figures, Report, count, megabytes, secs

#: Rows of each process, in the proportions of state W: 130 MB of tables and slots.
ROWS = {name: rows // 8 for name, rows in states.ROWS.items()}
#: The dense part, 0.64 MB: as large relative to one process's rows as in state W.
KERNEL = 400
TOUCHED = 0.05
#: Bars of a durable delta, its blocking, and a durable base, against Orbax's defaults and tuned.
BARS = {
    ("delta", "durable"): (1 / 8, 1 / 5),
    ("delta", "blocked"): (None, 1.0),
    ("base", "durable"): (1 / 2.5, 1 / 2),
    ("base", "blocked"): (None, None),
}
#: Names of files that carry their process; the first process writes all others.
_WRITER = re.compile(r"(?:process_|shard\.|manifest\.|digests\.)(\d+)")


# Code of the processes.


def saves(directory: str, scale: float, rounds: int) -> list[dict[str, Any]]:
    """This process's view of every save; what it restores must equal what it saved."""
    state = make(scale)
    managers = ways.opened(directory, (*ways.THEIRS, "power"))
    found, step = [], 0
    for number in range(rounds + 1):
        for name, manager in managers.items():
            first = step + 1
            for kind in (name,) if name in ways.THEIRS else ("base", "delta"):
                step += 1
                state = states.change(state, states.random_ids(state, TOUCHED, step))
                view = save(manager, step, state, base=kind == "base")
                if number:
                    found.append(view | {"name": kind})
            if jax.process_index() == 0:
                ways.keep_only(manager.root, first)
            multihost_utils.sync_global_devices("kept")
    restored = managers["power"].restore(state)
    for manager in managers.values():
        manager.close()
    assert all(map(np.array_equal, shards(restored), shards(state))), "the restored state differs"
    return found


def save(manager: ways.Way, step: int, state: states.State, *, base: bool) -> dict[str, Any]:
    """Saves once, all processes at the same time, and waits for it; the clock is machine-wide."""
    jax.block_until_ready(state)
    ways.warm_memory(shards(state))
    multihost_utils.sync_global_devices("save")
    view: dict[str, Any] = {"started": time.perf_counter()}
    manager.save(step, state, base=base)
    view["returned"] = time.perf_counter()
    manager.wait()
    view["committed"] = time.perf_counter()
    multihost_utils.sync_global_devices("saved")
    sizes, folder = [], manager.root / str(step)
    for path in ways.files_in(folder):
        writer = _WRITER.search(str(path.relative_to(folder)))
        if jax.process_index() == (int(writer[1]) if writer else 0):
            sizes.append(path.stat().st_size)
    multihost_utils.sync_global_devices("counted")
    return view | {"bytes": sum(sizes), "files": len(sizes)}


def shardings() -> tuple[NamedSharding, NamedSharding]:
    """By rows over all devices of the job, and replicated on them."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec())


def make(scale: float) -> states.State:
    """A small state W over all processes together; random, like ``states.make``."""
    by_rows, everywhere = shardings()
    devices = jax.device_count()
    rows = {
        name: max(1, round(number * scale * jax.process_count() / devices)) * devices
        for name, number in ROWS.items()
    }

    def values() -> states.State:
        return states.random_state(rows, {"kernel": KERNEL}, seed=0)

    placed = jax.tree.map(
        lambda leaf: by_rows if leaf.shape[:1] and leaf.shape[0] in rows.values() else everywhere,
        jax.eval_shape(values),
    )
    return jax.jit(values, out_shardings=placed)()


def shards(state: Any) -> list[jax.Array]:
    """The shards of a state that this process holds."""
    leaves = jax.tree.leaves(state._replace(touched=()))
    return [shard.data for leaf in leaves for shard in leaf.addressable_shards]


# Code of the launcher.


def combined(pieces: Sequence[Any]) -> dict[str, float]:
    """One save as all its processes saw it."""
    return {
        "blocked": max(piece["returned"] - piece["started"] for piece in pieces),
        "durable": max(p["committed"] for p in pieces) - min(p["started"] for p in pieces),
        "bytes": sum(piece["bytes"] for piece in pieces),
        "files": sum(piece["files"] for piece in pieces),
        "bytes by one process, at most": max(piece["bytes"] for piece in pieces),
    }


def add(report: Report, found: Figures, title: str) -> None:
    for (kind, figure), bars in BARS.items():
        report.against(f"{title}: {kind} {figure}", found, figure, kind, ways.THEIRS, bars=bars)
    for kind in ("delta", "base"):
        for figure in ("bytes", "bytes by one process, at most", "files"):
            unit = count if figure == "files" else megabytes
            report.against(f"{title}: {figure}, {kind}", found, figure, kind, ways.THEIRS[1:], unit)
    report.section()


def processes(report: Report, options: argparse.Namespace, place: Path) -> None:
    rows = sum(ROWS.values()) * options.scale
    report.sizes = (
        f"Each process: {rows:,.0f} rows of {states.WIDTH} float32 in {len(ROWS)} tables, "
        f"{rows * (states.WIDTH + 1) * 4 / 1e6:.0f} MB with slots, on {options.devices} virtual "
        f"devices; {4 * KERNEL**2 / 1e6:.2f} MB dense, replicated; {TOUCHED:.0%} of the rows "
        f"touched between saves. {ways.TUNED}"
    )
    report.note("The processes share the cores and the disk, so growth with their number says")
    report.note("little of processes on machines of their own. Every restored state was equal.")
    table, bases = [], []
    for number in sorted(options.processes):
        where = place / str(number), options.scale, options.repeats
        views = fresh.call_job(saves, number, *where, devices=options.devices)
        found = reports.joined(views, combined)
        add(report, found, f"{number} process{'es' if number > 1 else ''}")
        for figure, words in (("durable", "durable after"), ("blocked", "`save()` blocks")):
            cells = [*found.cells("delta", figure), *found.cells("Orbax tuned", figure)]
            table.append([str(number), words, *cells])
        bases.append(found("base", "durable").shown(secs))
    columns = ("processes", "", "deltackpt", "Orbax tuned")
    report.publish("processes", columns, table, f"Bases are durable after {', '.join(bases)}.")


if __name__ == "__main__":
    # Devices are virtual ones of each process.
    title = "Weak scaling of saves against Orbax"
    reports.main(title, processes, repeats=5, processes=(1, 2, 4), devices=2)
