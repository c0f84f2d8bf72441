# SPDX-License-Identifier: Apache-2.0
"""Tiers near the trainer, against published measurements: DeepFreeze, CHFS, PyMM.

The shared file system is a store on one node, limited to 100 MB/s. ``dense_job.py`` runs the jobs;
``clustering.py``, ``extents.py`` and ``neighbours.py`` add the other lines.

    python benchmarks/tiers.py --json tiers.json
    python benchmarks/tiers.py --only clustering --repeats 3
    python benchmarks/tiers.py --scale 0.01 --repeats 1 --processes 1 --iterations 2
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clustering
import dense_job
import extents
import neighbours
import stores
from report import Report, Sample, arguments, secs

#: Bandwidth of the shared file system.
SHARED_BYTES_PER_SEC = 100e6
#: Bandwidth of each node's store and link together, so low that two cores are not the limit.
SLOW_BYTES_PER_SEC = 8e6
_BLOCKED_BAR, _OVERHEAD_BAR = 1 / 10, 1 / 5
_GATHER_BARS = {4: 1 / 3.9, 8: 1 / 6}


def freeze(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """DeepFreeze's table: blocking phase and overhead."""
    for state in ("ResNet-50", "NT3"):
        for count in options.processes:
            with stores.node_stores(1, SHARED_BYTES_PER_SEC) as server:
                found = dense_job.run(
                    "freeze",
                    state,
                    server.url,
                    memory / "job",
                    processes=count,
                    scale=options.scale,
                    repeats=options.repeats,
                )
            title = f"{state}-sized, {dense_job.nbytes(state, options.scale) / 1e6:.0f} MB, {count}"
            title += " process" + ("es" if count > 1 else "")
            for figure, words, bar in (
                ("blocked", "save() blocks", _BLOCKED_BAR),
                ("overhead", "overhead", _OVERHEAD_BAR),
            ):
                ours, theirs = (_sample(found, way, figure) for way in ("ours", "Orbax"))
                report.compare(
                    f"{title}: {words}", ours, "Orbax, synchronous", theirs, secs, bar=bar
                )
    report.note(
        "Overhead: the step that saves and the next one, less two steps without a save. Orbax: "
        "uncompressed, to memory, while its bytes cross the same link; a save ends with the later."
    )


def gather(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """CHFS's table: a store over nodes against one shared root with the bandwidth of a node."""
    nbytes = dense_job.nbytes("NT3", options.scale)
    for count, bar in _GATHER_BARS.items():
        with (
            stores.node_stores(count, SLOW_BYTES_PER_SEC) as nodes,
            stores.node_stores(1, SLOW_BYTES_PER_SEC) as shared,
        ):
            found = dense_job.run(
                "gather",
                "NT3",
                nodes.url,
                memory / "job",
                processes=1,
                scale=options.scale,
                repeats=options.repeats,
                against=shared.url,
            )
        for figure, words in (("durable", "saved"), ("restored", "restored")):
            ours, theirs = (_sample(found, way, figure) for way in ("nodes", "shared"))
            report.compare(
                f"NT3-sized, {nbytes / 1e6:.0f} MB: {words}, {count} stores",
                ours,
                "one root",
                theirs,
                secs,
                bar=bar,
            )
        cpu = _sample(found, "nodes", "restore_cpu")
        report.state(f"CPU of the restoring process, {count} stores", cpu, secs)
    report.note(
        f"Each store and the root transfer {SLOW_BYTES_PER_SEC / 1e6:.0f} MB/s. Restored: by a new "
        "manager with an empty staging directory; its start is included."
    )


def kmeans(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """PyMM's table: k-means, saved at every iteration."""
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.directory) as disk:
        clustering.measure(
            report,
            memory,
            Path(disk),
            scale=options.scale,
            repeats=options.repeats,
            iterations=options.iterations,
        )


def on_disk(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """Extents against new directories."""
    del memory
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.directory) as disk:
        nbytes = int(extents.NBYTES * options.scale)
        extents.measure(report, Path(disk), nbytes=nbytes, repeats=options.repeats)


def at_neighbours(report: Report, options: argparse.Namespace, memory: Path) -> None:
    """Fragments at peers, and lost nodes."""
    del memory
    neighbours.measure(report, scale=options.scale, repeats=options.repeats)


TABLES: dict[str, Callable[[Report, argparse.Namespace, Path], None]] = {
    "freeze": freeze,
    "gather": gather,
    "clustering": kmeans,
    "extents": on_disk,
    "neighbours": at_neighbours,
}


def _sample(found: list[dict[str, Any]], way: str, figure: str) -> Sample:
    return Sample(tuple(one[figure] for one in found if one["way"] == way))


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__)
    parser.set_defaults(repeats=5)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=[*TABLES], help="tables")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of a job")
    parser.add_argument("--iterations", type=int, default=20, help="of k-means in a round")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for stages")
    options = parser.parse_args()
    report = Report(
        "Near the training, and beside what others measured",
        sizes=f"Steps of {dense_job.PAUSE_SECS} s in which the cores are free; "
        f"{options.repeats} rounds in turn, median (range)",
    )
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.memory) as memory:
        for name in options.only:
            TABLES[name](report, options, Path(memory))
            report.section()
    report.show(options.json, options.markdown)


if __name__ == "__main__":
    main()
