# SPDX-License-Identifier: Apache-2.0
"""The cost of one save, a delta or a base: time, CPU, bytes, threads and context switches.

deltackpt saves the rows touched since the previous save, Orbax the whole state. Both are compared
with the limits of the machine for the same bytes in the same round. For the time that blocks
training: a scan of all stamps and one `np.take` of the rows by two threads into warm memory. For
the rest: writing and fsyncing one file, buffered or with O_DIRECT, whichever is faster.

python benchmarks/step.py --json step.json
python benchmarks/step.py --scale 0.01 --repeats 1      # a smoke test
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import state as states
import ways
from report import Report, arguments, count, interleaved, megabytes, metered, secs

#: Saves: their rows, as a count or as a share below 1, and their way; ``BASE`` is a full save.
BASE = "a base"
DELTAS = {
    "4,000 rows, `int4`": (4_000, "int4"),
    "4,000 rows, `raw`": (4_000, "power"),
    "200,000 rows, `raw`": (0.05, "power"),
    "200,000 rows, `int4`": (0.05, "int4"),
    "200,000 rows, `adaptive4`": (0.05, "adaptive4"),
    "200,000 rows, `lossless`": (0.05, "lossless"),
    '200,000 rows, `durability="process"`': (0.05, "process"),
    BASE: (0.05, "base"),
}
#: Bases have a directory of their own.
WAYS = ways.WAYS | {"base": ways.Deltas}
#: Saves of each method before the measured ones.
WARM_UP = 3
#: Deltas per full save of Orbax, which takes longer.
PER_ROUND = 4
#: Bars of a durable delta against Orbax's defaults and tuned; and its limit: so many writes, secs.
_BARS = {
    "4,000 rows, `int4`": (1 / 100, 1 / 80, None),
    "200,000 rows, `raw`": (1 / 25, 1 / 20, 0.015),
    "200,000 rows, `int4`": (1 / 30, 1 / 25, 0.020),
    "200,000 rows, `adaptive4`": (1 / 30, 1 / 25, 0.020),
    "200,000 rows, `lossless`": (1 / 25, 1 / 20, None),
    '200,000 rows, `durability="process"`': (1 / 25, 1 / 20, None),
    BASE: (1 / 2.5, 1 / 2, None),
}
#: Bars of bytes against Orbax's.
_BYTES_BARS = {"200,000 rows, `raw`": 1 / 18, "200,000 rows, `int4`": 1 / 100}
_BLOCKED_TIMES, _BLOCKED_SECS, _DURABLE_TIMES, _BASE_TIMES = 1.3, 0.003, 1.5, 1.3


class Round:
    """The save methods over one state, which training changes between saves."""

    def __init__(self, root: Path, scale: float):
        self._root = root
        self._state = states.make(scale)
        self._step = 0
        self._ways: dict[str, ways.Way] = {}

    def run(self, name: str, rows: float, times: int, base: bool = False) -> dict[str, float]:
        """Saves so many rows, or bases, and returns the medians."""
        if name not in self._ways:
            self._ways[name] = WAYS[name](self._root / name)
            self._ways[name].save(self._step, self._state, base=True)
            self._ways[name].wait()
            for _ in range(WARM_UP):
                self._once(name, 1000)
        # The first delta also has the rows that steps of other methods touched.
        found = [self._once(name, rows, base) for _ in range(times + (times > 1))][-times:]
        return {key: sorted(one[key] for one in found)[len(found) // 2] for key in found[0]}

    def _once(self, name: str, rows: float, base: bool = False) -> dict[str, float]:
        total = sum(table.shape[0] for table in self._state.tables.values())
        self._step += 1
        ids = states.random_ids(
            self._state, min(0.5, rows if rows < 1 else rows / total), self._step
        )
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
            with metered() as more:
                ways.fsync_all(step_dir)
            ways.keep_only(way.root, self._step)
            found["write"] = ways.write_secs(self._root / "plain", nbytes)
            return found | {"forced": cost.secs + more[0].secs}
        found |= {"gather": ways.gather_secs(self._state, ids), "least bytes": self._bytes(ids)}
        return found | {"write": ways.write_secs(self._root / "plain", nbytes)}

    def _bytes(self, ids: dict[str, np.ndarray]) -> float:
        """Raw bytes of some rows with their slots, 2 % more, and of the dense leaves."""
        rows = sum(map(len, ids.values()))
        return 1.02 * rows * 4 * (states.WIDTH + 1) + ways.nbytes(self._state.dense)

    def close(self) -> None:
        """Closes all managers."""
        for way in self._ways.values():
            way.close()


def main() -> None:
    """Measures, and prints the results and which bars hold."""
    options = arguments(__doc__).parse_args()
    report = Report("One save", sizes=f"State W at {options.scale:g} of its rows. {ways.TUNED}")
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        running = Round(Path(place), options.scale)
        candidates = {
            name: functools.partial(
                running.run, way, rows, 1 if name == BASE else PER_ROUND, name == BASE
            )
            for name, (rows, way) in DELTAS.items()
        } | {name: functools.partial(running.run, name, 1000, 1) for name in ways.THEIRS}
        found = interleaved(options.repeats, candidates, warm_up=0)
        running.close()
    for name in DELTAS:
        defaults_bar, tuned_bar, extra = _BARS.get(name, (None, None, None))
        blocked, durable = found(name, "blocked"), found(name, "durable")
        tuned, write = found("Orbax tuned", "blocked"), found(name, "write")
        bar = None if name == BASE else 1.0
        report.compare(f"{name}: blocked", blocked, "Orbax tuned", tuned, secs, bar=bar)
        if name == BASE:
            report.compare(f"{name}: durable", durable, "a write", write, secs, bar=_BASE_TIMES)
        if name == "200,000 rows, `raw`":
            mine, limit = found(name, "bytes"), found(name, "least bytes")
            what = "rows + 2 % + dense leaves"
            report.compare(f"{name}: bytes", mine, what, limit, megabytes, bar=1.0)
        if extra is not None:
            limit = found(name, "gather").mapped(lambda s: _BLOCKED_TIMES * s + _BLOCKED_SECS)
            report.compare(f"{name}: blocked", blocked, "1.3 gathers + 3 ms", limit, secs, bar=1.0)
            limit = write.mapped(lambda s, by=extra: _DURABLE_TIMES * s + by)
            what = f"1.5 writes + {1e3 * extra:.0f} ms"
            report.compare(f"{name}: durable", durable, what, limit, secs, bar=1.0)
        for other, bar in zip(ways.THEIRS, (defaults_bar, tuned_bar), strict=True):
            theirs = found(other, "durable")
            report.compare(f"{name}: durable", durable, other, theirs, secs, bar=bar)
            # A fair comparison: Orbax with the fsyncs that it leaves out.
            forced = found(other, "forced")
            report.compare(f"{name}: durable", durable, f"{other} + fsync", forced, secs)
            mine, theirs = found(name, "bytes"), found(other, "bytes")
            bar = _BYTES_BARS.get(name)
            report.compare(f"{name}: bytes", mine, other, theirs, megabytes, bar=bar)
        report.compare(
            f"{name}: CPU", found(name, "cpu"), "Orbax tuned", found("Orbax tuned", "cpu"), secs
        )
        for what in ("switches", "calls", "fsyncs", "threads"):
            bar = 0 if what == "threads" else None
            report.state(f"{name}: {what}", found(name, what), count, bar=bar)
        report.section()
    figures = ("blocked", "durable", "cpu", "bytes")
    report.publish(
        "deltas",
        ("save", "`save()` blocks", "durable after", "CPU time", "bytes"),
        [
            [
                name,
                *((found(name, f), megabytes if f == "bytes" else secs) for f in figures),
            ]
            for name in (*DELTAS, *ways.THEIRS)
        ],
        "A write and fsync of the bytes of 200,000 raw rows took "
        f"{found('200,000 rows, `raw`', 'write').shown(secs)} in the same rounds.",
    )
    report.show(options)


if __name__ == "__main__":
    main()
