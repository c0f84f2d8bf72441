# SPDX-License-Identifier: Apache-2.0
"""Restores of state W (1.04 GB) against Orbax, and what a save costs a training loop.

Restores run in fresh processes: ours of a base and ten deltas, Orbax's of a full save, and the
limit, a read of the same files. ``training`` measures the time that a save of 5 % of the rows costs
a loop on the same cores.

python benchmarks/save_restore.py --json save_restore.json
python benchmarks/save_restore.py --scale 0.02 --repeats 2      # a smoke test
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import fresh
import jax
import state as states
import ways
from report import Figures, Report, arguments, interleaved, run_parts, secs, times

TOUCHED = 0.05
#: Deltas on the base in a restored chain.
CHAIN = 10
OURS = ("power", "process")
#: Bars against Orbax's defaults and tuned; and against the limit of the machine.
_LOST, _LOST_SECS = (1 / 25, 1 / 15), 0.015
_RESTORE, _RESTORE_LIMIT = (1 / 2.5, 0.75), {"warm": 1.3, "cold": 1.1}


def against_orbax(
    report: Report,
    title: str,
    found: Figures,
    ours: tuple[str, str],
    figure: str,
    bars: tuple[float | None, float | None] = (None, None),
) -> None:
    """Adds lines that compare a figure of ours with one of Orbax's defaults and tuned."""
    for other, bar in zip(ways.THEIRS, bars, strict=True):
        report.compare(title, found(*ours), other, found(other, figure), secs, bar=bar)


def training(report: Report, options: argparse.Namespace, root: Path) -> None:
    """The cost of a save to a training loop on the same cores."""
    loop, step = states.Loop(states.make(options.scale), batches=8), 0
    managers = {name: ways.WAYS[name](root / name) for name in (*OURS, *ways.THEIRS)}
    for name in OURS:
        managers[name].save(0, loop.state, base=True)
        managers[name].wait()

    def save(name: str) -> dict[str, float]:
        nonlocal step
        step += 1
        loop.change(TOUCHED, 1000 + step)
        ways.warm_memory(loop.state)
        before = loop.quiet()
        started = time.perf_counter()
        managers[name].save(step, loop.state)
        blocked = time.perf_counter() - started
        busy, _, steps = loop.until(managers[name].wait)
        quiet = (before + loop.quiet()) / 2
        if name in ways.THEIRS:
            ways.keep_only(managers[name].root, step)
        return {
            "lost": blocked + busy - steps * quiet,
            "limit": blocked + _LOST_SECS,
            "durable": blocked + busy,
            "slower": busy / steps / quiet,
        }

    loop.quiet()
    candidates = {name: functools.partial(save, name) for name in managers}
    found = interleaved(options.repeats, candidates)
    for manager in managers.values():
        manager.close()
    for name in OURS:
        title = f"training time lost per delta, {name}"
        against_orbax(report, title, found, (name, "lost"), "lost", _LOST)
        limit = found(name, "limit")
        report.compare(title, found(name, "lost"), "blocked + 15 ms", limit, secs, bar=1.0)
    title = "durable under training, power"
    against_orbax(report, title, found, ("power", "durable"), "durable")
    for name in managers:
        report.state(f"steps meanwhile, {name}", found(name, "slower"), times)
    report.section()


def restores(report: Report, options: argparse.Namespace, root: Path) -> None:
    """Restores in new processes: ours of a base and ten deltas, Orbax's of a full save."""
    expected = build_chains(root, options.scale, ("power", "adaptive4"))
    names = ("power", "adaptive4", *ways.THEIRS)
    for name in ("power", *ways.THEIRS):
        checked = fresh.call(restored, name, root / name, options.scale, True)
        assert checked["digest"] == expected, f"{name}: the restored state differs"
    found = Figures()
    caches = ("warm", "cold") if ways.drop_caches() else ("warm",)
    for _ in range(options.repeats):
        for name in names:
            for cache in reversed(caches):
                ways.drop_caches() if cache == "cold" else ways.read_through(root / name)
                values = fresh.call(restored, name, root / name, options.scale, False)
                found.add(name, {cache: values["secs"]})
                if name == "power":
                    if cache == "cold":
                        ways.drop_caches()
                    limit = fresh.call(ways.read_secs, root / name)
                    found.add("limit", {cache: limit})
    for cache in caches:
        for name in names[:2]:
            title = f"restore of base + {CHAIN} deltas, {name}, {cache}"
            bars = _RESTORE if (name, cache) == ("power", "warm") else (None, None)
            against_orbax(report, title, found, (name, cache), cache, bars)
        limit, bar = found("limit", cache), _RESTORE_LIMIT[cache]
        title = f"restore of base + {CHAIN} deltas, power, {cache}"
        report.compare(title, found("power", cache), "a read of the files", limit, secs, bar=bar)
    report.note("Every state restored from raw rows was equal, by checksum.")
    report.section()
    report.publish(
        "restores",
        ("restore", "deltackpt", *ways.THEIRS, "a read of deltackpt's files"),
        [
            [
                f"{CHAIN} {label} deltas, {cache}",
                (found(name, cache), secs),
                *((found(other, cache), secs) for other in (*ways.THEIRS, "limit")),
            ]
            for cache in caches
            for name, label in (("power", "raw"), ("adaptive4", "`adaptive4`"))
        ],
        f"A base and {CHAIN} raw deltas take {ways.tree_bytes(root / 'power') / 1e9:.2f} GB; "
        f"Orbax reads {ways.tree_bytes(root / 'Orbax tuned') / 1e9:.2f} GB.",
    )


def build_chains(root: str | Path, scale: float, names: tuple[str, ...]) -> int:
    """Saves a base and ten deltas in some ways, and a full save with Orbax; returns a checksum."""
    state = states.make(scale)
    managers = {name: ways.WAYS[name](Path(root, name)) for name in (*names, *ways.THEIRS)}
    for number in range(CHAIN + 1):
        state = states.change(state, states.random_ids(state, TOUCHED, 5000 + number))
        for name in names:
            managers[name].save(number, state, base=number == 0)
            managers[name].wait()
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
    started = time.perf_counter()
    manager = ways.WAYS[name](Path(root))
    state = manager.restore(template)
    seconds = time.perf_counter() - started
    manager.close()
    return {"secs": seconds, "digest": ways.checksum(state) if digest else None}


PARTS = {"training": training, "restores": restores}


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    options = parser.parse_args()
    rows = sum(states.rows_at(options.scale).values())
    report = Report(
        "Saving and restoring against Orbax",
        sizes=f"State: {rows:,} rows of {states.WIDTH} float32 in {len(states.ROWS)} tables, "
        f"{ways.nbytes(states.template(options.scale)) / 1e9:.2f} GB with slots and dense leaves; "
        f"{TOUCHED:.0%} of the rows touched between saves. {ways.TUNED}",
    )
    run_parts(report, options, PARTS, options.parts)


if __name__ == "__main__":
    main()
