# SPDX-License-Identifier: Apache-2.0
"""The cost of many tables, many steps and long chains.

State W's rows in 10 tables and in 1,000, the same rows touched: each save's blocked time and CPU.
Then a directory of 1,000 small deltas: opening it, with the metadata that chains need, and the
cost of one more delta in a chain. The latter compares restores of the newest step and of one half
as far from the base.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import state as states
from report import Report, Sample, arguments, ratio, secs, timed

import deltackpt
from deltackpt.ledger.directory import Root

_FEW, _MANY = 10, 1000
#: Share of the rows that change between two saves.
_SHARE = 0.05
_OPTIONS = deltackpt.ManagerOptions(
    deltas=deltackpt.DeltaOptions(
        policy=deltackpt.policies.Consecutive(max_chain=100_000, max_restore_ratio=1e9)
    ),
    writes=deltackpt.WriteOptions(durability="process"),
)
_HANDLERS = {
    "embeddings": deltackpt.Tables(select="tables/*", slots={"tables/*": {"sum": "slots/{name}"}})
}


@dataclasses.dataclass
class Trainer:
    """A state of several tables that is saved repeatedly.

    Attributes:
      manager: with its own directory.
      state: tables and slots, all of the same size.
      touched: its TouchState.
      step: number of the next save.
    """

    manager: deltackpt.CheckpointManager
    state: dict[str, dict[str, jax.Array]]
    touched: deltackpt.TouchState
    step: int = 0

    @classmethod
    def of(cls, root: Path, tables: int, rows: int, width: int) -> Trainer:
        """A trainer whose tables have ``rows`` rows in total."""
        random = np.random.default_rng(0)
        names = [f"table{number:04d}" for number in range(tables)]
        shape = rows // tables, width
        state = {
            "tables": {name: jnp.asarray(random.random(shape, np.float32)) for name in names},
            "slots": {name: jnp.asarray(random.random(shape[:1], np.float32)) for name in names},
        }
        manager = deltackpt.CheckpointManager(root, handlers=_HANDLERS, options=_OPTIONS)
        return cls(manager, state, deltackpt.touched.init(state["tables"]))

    def touch(self, share: float) -> None:
        """Marks a share of the rows of each table, as a training step would."""
        random, clock = np.random.default_rng(self.step), int(self.touched.clock) + 1
        stamps = {}
        for name, known in self.touched.stamps.items():
            marked = np.array(known)
            marked[random.choice(len(marked), round(len(marked) * share), replace=False)] = clock
            stamps[name] = jnp.asarray(marked)
        self.touched = self.touched._replace(clock=jnp.int32(clock), stamps=stamps)
        jax.block_until_ready((self.touched, self.state))

    def save(self) -> tuple[float, float, float]:
        """Saves a step; returns its blocked seconds, CPU seconds and seconds until the commit."""
        cpu, started = time.process_time(), time.perf_counter()
        self.manager.save(self.step, self.state, touched=self.touched)
        blocked = time.perf_counter() - started
        self.manager.wait_until_finished()
        self.step += 1
        return blocked, time.process_time() - cpu, time.perf_counter() - started


def many_tables(report: Report, directory: Path, scale: float, repeats: int) -> None:
    """Compares 1,000 tables with 10."""
    rows = round(sum(states.ROWS.values()) * scale)
    trainers = {
        count: Trainer.of(directory / f"{count}-tables", count, rows, states.WIDTH)
        for count in (_FEW, _MANY)
    }
    found: dict[int, list[tuple[float, float, float]]] = {_FEW: [], _MANY: []}
    for trainer in trainers.values():
        for _ in range(3):  # A base, and deltas whose memory is reused.
            trainer.touch(_SHARE)
            trainer.save()
    for _ in range(repeats):
        for count, trainer in trainers.items():
            trainer.touch(_SHARE)
            found[count].append(trainer.save())
    for trainer in trainers.values():
        trainer.manager.close()
    worst: list[tuple[float, ...]] = []
    for what, number in (("blocked", 0), ("CPU", 1), ("durable", 2)):
        few, many = (Sample(tuple(s[number] for s in found[count])) for count in (_FEW, _MANY))
        report.compare(f"a delta of {_MANY:,} tables, {what}", many, f"{_FEW}", few, secs)
        if what != "durable":
            worst.append(many.over(few).values)
    report.state(f"{_MANY:,} tables", Sample(tuple(map(max, zip(*worst)))), ratio, bar=2.0)


def many_steps(report: Report, directory: Path, steps: int, repeats: int) -> None:
    """Measures a directory whose steps form one chain."""
    root = directory / "steps"
    trainer = Trainer.of(root, 5, 10_000, 16)
    for _ in range(steps):
        trainer.touch(0.005)
        trainer.save()
    trainer.manager.close()
    opening: list[float] = []
    links: list[float] = []
    half = steps // 2
    for _ in range(repeats):
        opening.append(timed(lambda: Root.open(root, read_only=True).saves()))
        with deltackpt.CheckpointManager(root, handlers=_HANDLERS, options=_OPTIONS) as manager:
            near, far = (
                timed(functools.partial(manager.restore, step, trainer.state))
                for step in (steps - 1 - half, steps - 1)
            )
        links.append((far - near) / half)
    report.state(f"opening {steps:,} steps", Sample(tuple(opening)), secs, bar=0.2)
    report.state("a link of a chain", Sample(tuple(links)), secs, bar=0.5e-3)


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the directory")
    options = parser.parse_args()
    rows = f"{sum(states.ROWS.values()) * options.scale:,.0f} rows of {states.WIDTH} float32"
    report = Report("Many tables, many steps", sizes=f"{rows}, {_SHARE:.0%} of them touched.")
    with tempfile.TemporaryDirectory(prefix="many-", dir=options.directory) as place:
        many_tables(report, Path(place), options.scale, options.repeats)
        report.section()
        many_steps(report, Path(place), options.steps, options.repeats)
    report.show(options.json, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
