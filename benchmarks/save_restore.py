# SPDX-License-Identifier: Apache-2.0
"""Restores of state W (1.04 GB) against Orbax, and what a save costs a training loop.

Restores run in fresh processes: ours of a base and ten deltas, Orbax's of a full save, and the
limit, a read of the same files. ``training`` measures the time that a save of 5 % of the rows costs
a loop on the same cores.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from pathlib import Path
from typing import Any

import fresh
import jax
import report as reports
import state as states
import ways
from report import Figures, Report, interleaved, times

TOUCHED = 0.05
#: Deltas on the base in a restored chain.
CHAIN = 10
OURS = ("power", "process")
#: Bars against Orbax's defaults and tuned; and against the limit of the machine.
_LOST, _LOST_SECS = (1 / 25, 1 / 15), 0.015
_RESTORE, _RESTORE_LIMIT = (1 / 2.5, 0.75), {"warm": 1.3, "cold": 1.1}


def sizes(options: argparse.Namespace) -> str:
    scale = options.scale
    rows, nbytes = sum(states.rows_at(scale).values()), ways.nbytes(states.template(scale))
    return (
        f"State: {rows:,} rows of {states.WIDTH} float32 in {len(states.ROWS)} tables, "
        f"{nbytes / 1e9:.2f} GB with slots and dense leaves; {TOUCHED:.0%} of the rows touched "
        f"between saves. {ways.TUNED}"
    )


def training(report: Report, options: argparse.Namespace, root: Path) -> None:
    """The cost of a save to a training loop on the same cores."""
    loop, step = states.Loop(states.make(options.scale), batches=8), 0
    managers = ways.opened(root, (*OURS, *ways.THEIRS))
    for name in OURS:
        managers[name].saved(0, loop.state, base=True)

    def save(name: str) -> dict[str, float]:
        nonlocal step
        step += 1
        loop.change(TOUCHED, 1000 + step)
        ways.warm_memory(loop.state)
        found = loop.disturbed(lambda: managers[name].save(step, loop.state), managers[name].wait)
        if name in ways.THEIRS:
            ways.keep_only(managers[name].root, step)
        return found | {"limit": found["blocked"] + _LOST_SECS}

    loop.quiet()
    candidates = {name: functools.partial(save, name) for name in managers}
    found = interleaved(options.repeats, candidates)
    for manager in managers.values():
        manager.close()
    for name in OURS:
        title = f"training time lost per delta, {name}"
        report.against(title, found, "lost", name, ways.THEIRS, bars=_LOST)
        limit = found(name, "limit")
        report.compare(title, found(name, "lost"), "blocked + 15 ms", limit, bar=1.0)
    report.against("durable under training, power", found, "written", "power", ways.THEIRS)
    for name in managers:
        report.state(f"steps meanwhile, {name}", found(name, "slower"), times)


def restores(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Restores in new processes: ours of a base and ten deltas, Orbax's of a full save."""
    expected = build_chains(root, options.scale, ("power", "adaptive4"))
    for name in ("power", *ways.THEIRS):
        check(name, root / name, options.scale, expected)
    found = Figures()
    caches = ("warm", "cold") if ways.drop_caches() else ("warm",)
    for _ in range(options.repeats):
        for name in ("power", "adaptive4", *ways.THEIRS):
            for cache in reversed(caches):
                ways.drop_caches() if cache == "cold" else ways.read_through(root / name)
                values = fresh.call(restored, name, root / name, options.scale, False)
                found.add(name, {cache: values["secs"]})
                if name == "power":
                    if cache == "cold":
                        ways.drop_caches()
                    found.add("limit", {cache: fresh.call(ways.read_secs, root / name)})
    for cache in caches:
        title = f"restore of base + {CHAIN} deltas"
        bars = _RESTORE if cache == "warm" else ()
        report.against(f"{title}, power, {cache}", found, cache, "power", ways.THEIRS, bars=bars)
        report.against(f"{title}, adaptive4, {cache}", found, cache, "adaptive4", ways.THEIRS)
        mine, limit = found("power", cache), found("limit", cache)
        what, bar = "a read of the files", _RESTORE_LIMIT[cache]
        report.compare(f"{title}, power, {cache}", mine, what, limit, bar=bar)
    report.note("Every state restored from raw rows was equal, by checksum.")
    rows = []
    for cache in caches:
        others = [cell for other in (*ways.THEIRS, "limit") for cell in found.cells(other, cache)]
        for name, label in (("power", "raw"), ("adaptive4", "`adaptive4`")):
            rows.append([f"{CHAIN} {label} deltas, {cache}", *found.cells(name, cache), *others])
    report.publish(
        "restores",
        ("restore", "deltackpt", *ways.THEIRS, "a read of deltackpt's files"),
        rows,
        f"A base and {CHAIN} raw deltas take {ways.tree_bytes(root / 'power') / 1e9:.2f} GB; "
        f"Orbax reads {ways.tree_bytes(root / 'Orbax tuned') / 1e9:.2f} GB.",
    )


def build_chains(root: str | Path, scale: float, names: tuple[str, ...]) -> int:
    """Saves a base and ten deltas in some ways, and a full save with Orbax; returns a checksum."""
    state = states.make(scale)
    managers = ways.opened(root, (*names, *ways.THEIRS))
    for number in range(CHAIN + 1):
        state = states.change(state, states.random_ids(state, TOUCHED, 5000 + number))
        for name in names:
            managers[name].saved(number, state, base=number == 0)
    for name in ways.THEIRS:
        managers[name].save(0, state)
    for manager in managers.values():
        manager.wait()
        manager.close()
    return ways.checksum(state)


def restored(name: str, root: str, scale: float, digest: bool) -> dict[str, Any]:
    """Restores the newest step; in a process of its own."""
    template = states.template(scale)
    ways.warm_memory(template)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    # Otherwise the full collection that is due after the imports falls into some restores: 0.1 s.
    gc.collect()
    started = time.perf_counter()
    manager = ways.WAYS[name](Path(root))
    state = manager.restore(template)
    seconds = time.perf_counter() - started
    manager.close()
    return {"secs": seconds, "digest": ways.checksum(state) if digest else None}


def check(name: str, root: Path, scale: float, digest: int) -> None:
    """Restores the newest step in a new process, and compares its checksum."""
    found = fresh.call(restored, name, root, scale, True)
    assert found["digest"] == digest, f"{name}: the restored state differs"


if __name__ == "__main__":
    pieces = {"training": training, "restores": restores}
    reports.main("Saving and restoring against Orbax", pieces, sizes)
