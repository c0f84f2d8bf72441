# SPDX-License-Identifier: Apache-2.0
"""The cost of many tables: state W's rows in 10 tables and in 1,000, the same rows touched.

python benchmarks/many.py --json many.json
python benchmarks/many.py --scale 0.01 --repeats 1      # a smoke test
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import state as states
from report import Report, Sample, arguments, interleaved, ratio, secs

import deltackpt

_FEW, _MANY = "10 tables", "1,000 tables"
#: Share of the rows that change between two saves.
_SHARE = 0.05
#: Bar of blocked time and CPU with many tables.
_BAR = 2.0
_OPTIONS = deltackpt.ManagerOptions(
    deltas=deltackpt.DeltaOptions(
        policy=deltackpt.policies.Consecutive(max_chain=100_000, max_restore_ratio=1e9)
    ),
    writes=deltackpt.WriteOptions(durability="process"),
)
_HANDLERS = {
    "embeddings": deltackpt.Tables(select="tables/*", slots={"tables/*": {"sum": "slots/{name}"}})
}


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
        self.manager = deltackpt.CheckpointManager(root, handlers=_HANDLERS, options=_OPTIONS)
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
        self.manager.save(self._step, self.state, touched=self._touched)
        blocked = time.perf_counter() - started
        self.manager.wait_until_finished()
        self._step += 1
        durable = time.perf_counter() - started
        return {"blocked": blocked, "CPU": time.process_time() - cpu, "durable": durable}


def many_tables(report: Report, directory: Path, scale: float, repeats: int) -> None:
    """Compares 1,000 tables with 10."""
    rows = round(sum(states.ROWS.values()) * scale)
    trainers = {
        name: Trainer(directory / name, int(name.split()[0].replace(",", "")), rows, states.WIDTH)
        for name in (_FEW, _MANY)
    }
    saves = {name: functools.partial(one.save, _SHARE) for name, one in trainers.items()}
    # First a base, and deltas whose memory is reused.
    found = interleaved(repeats, saves, warm_up=3)
    for trainer in trainers.values():
        trainer.manager.close()
    figures = ("blocked", "CPU", "durable")
    for what in figures:
        report.compare(
            f"a delta of {_MANY}, {what}", found(_MANY, what), _FEW, found(_FEW, what), secs
        )
    ratios = [found(_MANY, what).over(found(_FEW, what)).values for what in figures[:2]]
    report.state(_MANY, Sample(tuple(map(max, *ratios))), ratio, bar=_BAR)
    report.publish(
        "tables",
        ("a delta of", "`save()` blocks", "CPU time", "durable after"),
        [[name, *((found(name, what), secs) for what in figures)] for name in (_FEW, _MANY)],
    )


def main() -> None:
    """Runs the command line."""
    options = arguments(__doc__).parse_args()
    rows = f"{sum(states.ROWS.values()) * options.scale:,.0f} rows of {states.WIDTH} float32"
    report = Report("Many tables", sizes=f"{rows}, {_SHARE:.0%} of them touched.")
    with tempfile.TemporaryDirectory(prefix="many-", dir=options.directory) as place:
        many_tables(report, Path(place), options.scale, options.repeats)
    report.show(options)


if __name__ == "__main__":
    main()
