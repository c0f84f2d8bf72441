# SPDX-License-Identifier: Apache-2.0
"""The cost of one save, a delta or a base: time, CPU, bytes, threads and context switches.

deltackpt saves the rows touched since the previous save, Orbax the whole state. Both are compared
with the limits of the machine for the same bytes in the same round. For the time that blocks
training: a scan of all stamps and one `np.take` of the rows by two threads into warm memory. For
the rest: writing and fsyncing one file, buffered or with O_DIRECT, whichever is faster.

``tables`` saves state W's rows in 10 tables and in 1,000, the same rows touched.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import state as states
import ways
from report import Report, Sample, count, interleaved, megabytes, metered, ratio, secs

import deltackpt


class Case(NamedTuple):
    """A kind of save, and its targets."""

    rows: float  # Touched rows: a count, or a fraction below 1.
    way: str  # Name in ``ways.WAYS``.
    durable: tuple[float | None, float | None] = (1 / 25, 1 / 20)  # Time relative to Orbax's.
    nbytes: float | None = None  # Bytes relative to both of Orbax's.
    limit_secs: float | None = None  # Allowance on top of the machine's limits.


BASE, RAW = "a base", "200,000 rows, `raw`"
CASES = {
    "4,000 rows, `int4`": Case(4_000, "int4", (1 / 100, 1 / 80)),
    "4,000 rows, `raw`": Case(4_000, "power", (None, None)),
    RAW: Case(0.05, "power", nbytes=1 / 18, limit_secs=0.015),
    "200,000 rows, `int4`": Case(0.05, "int4", (1 / 30, 1 / 25), 1 / 100, limit_secs=0.020),
    "200,000 rows, `adaptive4`": Case(0.05, "adaptive4", (1 / 30, 1 / 25), limit_secs=0.020),
    "200,000 rows, `lossless`": Case(0.05, "lossless"),
    '200,000 rows, `durability="process"`': Case(0.05, "process"),
    BASE: Case(0.05, "base", (1 / 2.5, 1 / 2)),
}
#: Bases have a directory of their own.
WAYS = ways.WAYS | {"base": ways.Deltas}
#: Saves of each method before the measured ones.
WARM_UP = 3
#: Deltas per full save of Orbax, which takes longer.
PER_ROUND = 4
#: Targets as multiples of the machine's limits: blocking, a durable delta, a durable base.
_BLOCKED_TIMES, _BLOCKED_SECS, _DURABLE_TIMES, _BASE_TIMES = 1.3, 0.003, 1.5, 1.3


class Round:
    """The save methods over one state, which training changes between saves."""

    def __init__(self, root: Path, scale: float):
        self._root, self._state, self._step = root, states.make(scale), 0
        self._ways: dict[str, ways.Way] = {}

    def run(self, name: str, rows: float, times: int, base: bool = False) -> dict[str, float]:
        """Saves so many rows, or bases, and returns the medians."""
        if name not in self._ways:
            self._ways[name] = WAYS[name](self._root / name)
            self._ways[name].saved(self._step, self._state, base=True)
            for _ in range(WARM_UP):
                self._once(name, 1000)
        # The first delta also has the rows that steps of other methods touched.
        found = [self._once(name, rows, base) for _ in range(times + (times > 1))][-times:]
        return {key: median_high(one[key] for one in found) for key in found[0]}

    def _once(self, name: str, rows: float, base: bool = False) -> dict[str, float]:
        total = sum(table.shape[0] for table in self._state.tables.values())
        self._step += 1
        share = min(0.5, rows if rows < 1 else rows / total)
        ids = states.random_ids(self._state, share, self._step)
        self._state = jax.block_until_ready(states.change(self._state, ids))
        time.sleep(0.05)
        way, step_dir = self._ways[name], self._root / name / str(self._step)
        with metered() as spent:
            started = time.perf_counter()
            way.save(self._step, self._state, base=base)
            blocked = time.perf_counter() - started
            way.wait()
        [cost] = spent
        nbytes = ways.tree_bytes(step_dir)
        found = {"blocked": blocked, "durable": cost.secs, **cost._asdict(), "bytes": nbytes}
        if name in ways.THEIRS or base:
            found["forced"] = cost.secs + reports.timed(lambda: ways.fsync_all(step_dir))
            ways.keep_only(way.root, self._step)
        else:
            found["gather"] = ways.gather_secs(self._state, ids)
            # Raw rows with their slots, 2 % more, and the dense leaves.
            least = 1.02 * sum(map(len, ids.values())) * 4 * (states.WIDTH + 1)
            found["least bytes"] = least + ways.nbytes(self._state.dense)
        return found | {"write": ways.write_secs(self._root / "plain", nbytes)}

    def close(self) -> None:
        for way in self._ways.values():
            way.close()


def add(report: Report, name: str, case: Case, found: reports.Figures) -> None:
    blocked, durable, write = (found(name, what) for what in ("blocked", "durable", "write"))
    tuned = ways.THEIRS[1:]
    blocked_bar = None if name == BASE else 1.0
    report.against(f"{name}: blocked", found, "blocked", name, tuned, bars=[blocked_bar])
    if name == BASE:
        report.compare(f"{name}: durable", durable, "a write", write, bar=_BASE_TIMES)
    if name == RAW:
        mine, limit = found(name, "bytes"), found(name, "least bytes")
        what = "rows + 2 % + dense leaves"
        report.compare(f"{name}: bytes", mine, what, limit, megabytes, bar=1.0)
    if (extra := case.limit_secs) is not None:
        limit = found(name, "gather").mapped(lambda s: _BLOCKED_TIMES * s + _BLOCKED_SECS)
        report.compare(f"{name}: blocked", blocked, "1.3 gathers + 3 ms", limit, bar=1.0)
        limit = write.mapped(lambda s: _DURABLE_TIMES * s + extra)
        what = f"1.5 writes + {1e3 * extra:.0f} ms"
        report.compare(f"{name}: durable", durable, what, limit, bar=1.0)
    for other, bar in zip(ways.THEIRS, case.durable, strict=True):
        report.compare(f"{name}: durable", durable, other, found(other, "durable"), bar=bar)
        # A fair comparison: Orbax with the fsyncs that it leaves out.
        report.compare(f"{name}: durable", durable, f"{other} + fsync", found(other, "forced"))
        bars = [case.nbytes]
        report.against(f"{name}: bytes", found, "bytes", name, [other], megabytes, bars=bars)
    report.against(f"{name}: CPU", found, "cpu", name, tuned)
    for what in ("switches", "calls", "fsyncs"):
        report.state(f"{name}: {what}", found(name, what), count)
    report.state(f"{name}: threads", found(name, "threads"), count, bar=0)
    report.section()


def deltas(report: Report, options: argparse.Namespace, place: Path) -> None:
    report.sizes = f"State W at {options.scale:g} of its rows. {ways.TUNED}"
    running = Round(place, options.scale)
    candidates = {
        name: functools.partial(
            running.run, case.way, case.rows, 1 if name == BASE else PER_ROUND, name == BASE
        )
        for name, case in CASES.items()
    } | {name: functools.partial(running.run, name, 1000, 1) for name in ways.THEIRS}
    found = interleaved(options.repeats, candidates, warm_up=0)
    running.close()
    for name, case in CASES.items():
        add(report, name, case, found)
    report.publish(
        "deltas",
        ("save", "`save()` blocks", "durable after", "CPU time", "bytes"),
        found.rows(candidates, "blocked", "durable", "cpu", bytes=megabytes),
        "A write and fsync of the bytes of 200,000 raw rows took "
        f"{found(RAW, 'write').shown(secs)} in the same rounds.",
    )


# Many tables.

_FEW, _MANY = "10 tables", "1,000 tables"
#: Share of the rows that change between two saves.
_SHARE = 0.05
#: Target for blocked time and CPU with many tables.
_MANY_BAR = 2.0
_TABLES = deltackpt.Tables(select="tables/*", slots={"tables/*": {"sum": "slots/{name}"}})


class Trainer:
    """A state of several equal tables that is saved repeatedly."""

    def __init__(self, root: Path, tables: int, rows: int, width: int):
        """Creates tables that have ``rows`` rows in total."""
        random = np.random.default_rng(0)
        names = [f"table{number:04d}" for number in range(tables)]
        shape = rows // tables, width
        self.state = {
            "tables": {name: jnp.asarray(random.random(shape, np.float32)) for name in names},
            "slots": {name: jnp.asarray(random.random(shape[:1], np.float32)) for name in names},
        }
        self._touched = deltackpt.touched.init(self.state["tables"])
        self.way = ways.Deltas(root, "process", tables=_TABLES)
        self._step = 0

    def save(self, share: float) -> dict[str, float]:
        """Marks a share of the rows of each table, as a training step would, and saves."""
        random, clock = np.random.default_rng(self._step), int(self._touched.clock) + 1
        stamps = {}
        for name, known in self._touched.stamps.items():
            marked = np.array(known)
            marked[random.choice(len(marked), round(len(marked) * share), replace=False)] = clock
            stamps[name] = jnp.asarray(marked)
        self._touched = self._touched._replace(clock=jnp.int32(clock), stamps=stamps)
        jax.block_until_ready((self._touched, self.state))
        cpu, started = time.process_time(), time.perf_counter()
        self.way.save(self._step, self.state, touched=self._touched)
        blocked = time.perf_counter() - started
        self.way.wait()
        self._step += 1
        durable = time.perf_counter() - started
        return {"blocked": blocked, "CPU": time.process_time() - cpu, "durable": durable}


def many(report: Report, options: argparse.Namespace, place: Path) -> None:
    rows = round(sum(states.ROWS.values()) * options.scale)
    report.sizes = f"{rows:,} rows of {states.WIDTH} float32, {_SHARE:.0%} of them touched."
    trainers = {
        name: Trainer(place / name, int(name.split()[0].replace(",", "")), rows, states.WIDTH)
        for name in (_FEW, _MANY)
    }
    saves = {name: functools.partial(one.save, _SHARE) for name, one in trainers.items()}
    # First a base, and deltas whose memory is reused.
    found = interleaved(options.repeats, saves, warm_up=3)
    for trainer in trainers.values():
        trainer.way.close()
    figures = ("blocked", "CPU", "durable")
    for what in figures:
        report.against(f"a delta of {_MANY}, {what}", found, what, _MANY, [_FEW])
    ratios = [found(_MANY, what).over(found(_FEW, what)).values for what in figures[:2]]
    report.state(_MANY, Sample(tuple(map(max, *ratios))), ratio, bar=_MANY_BAR)
    columns = ("a delta of", "`save()` blocks", "CPU time", "durable after")
    report.publish("tables", columns, found.rows((_FEW, _MANY), *figures))


if __name__ == "__main__":
    reports.main("One save", {"deltas": deltas, "tables": many})
