# SPDX-License-Identifier: Apache-2.0
"""The cost of many tables: state W's rows in 10 tables and in 1,000, the same rows touched."""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import report as reports
import state as states
import ways
from report import Report, Sample, interleaved, ratio

import deltackpt

_FEW, _MANY = "10 tables", "1,000 tables"
#: Share of the rows that change between two saves.
_SHARE = 0.05
#: Bar of blocked time and CPU with many tables.
_BAR = 2.0
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
    report.state(_MANY, Sample(tuple(map(max, *ratios))), ratio, bar=_BAR)
    columns = ("a delta of", "`save()` blocks", "CPU time", "durable after")
    report.publish("tables", columns, found.rows((_FEW, _MANY), *figures))


if __name__ == "__main__":
    reports.main("Many tables", many)
