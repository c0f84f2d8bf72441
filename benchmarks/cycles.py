# SPDX-License-Identifier: Apache-2.0
"""CPU seconds per GB of each background path; training loses half of them.

Saves state W, uploads it to versitygw, compacts it and follows it, one path at a time with nothing
else running. CPU is the user and system time of all threads of this process, without the server.

    make servers
    python benchmarks/cycles.py --json cycles.json --scale 0.25
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import state as states
import ways
from report import Report, Sample, arguments
from running import s3_server

from deltackpt.ledger.upload import send
from deltackpt.reading import inventory
from deltackpt.standby.follower import Follower
from deltackpt.storage import buckets
from deltackpt.storage.store import StorePath, store_path
from deltackpt.upkeep.compact import compact

_ITEM = "embeddings"
#: Share of the rows that change between two saves.
_SHARE = 0.2
_MEMORY = 256 << 20


class Cycles:
    """CPU seconds of calls."""

    def __init__(self) -> None:
        """Starts empty."""
        #: (path, "user" or "system") to seconds per GB, one per round.
        self.found: dict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, path: str, call: Callable[[], object], nbytes: Callable[[], int]) -> None:
        """Measures a call that moves ``nbytes()`` bytes."""
        before = os.times()
        call()
        after, gigabytes = os.times(), nbytes() / 1e9
        self.found[path, "user"].append((after.user - before.user) / gigabytes)
        self.found[path, "system"].append((after.system - before.system) / gigabytes)


def rounds(
    options: argparse.Namespace, disk: Path, memory: Path, bucket: str, server: s3_server.Server
) -> Cycles:
    """Measures every path ``options.repeats`` times, after a warm-up round."""
    cycles = Cycles()
    state = states.make(options.scale)
    opened = buckets.place(bucket, endpoint=server.endpoint).open()
    for number in range(options.repeats + 1):
        if number == 1:
            cycles.found.clear()
        for where, folder in (("a disk", disk), ("memory", memory)):
            state = one_round(
                cycles, state, folder / str(number), opened / f"{folder.name}{number}", where
            )
    return cycles


def one_round(
    cycles: Cycles, state: states.State, root: Path, target: StorePath, where: str
) -> states.State:
    """Measures every path once on a root that is then removed; returns the state saved last."""
    base, delta = root / "1", root / "2"
    way = ways.Deltas(root, "power", base_snapshot="block")

    def save(step: int) -> None:
        way.save(step, state, base=step == 1)
        way.wait()

    for step, kind, saved in ((1, "base", base), (2, "delta", delta)):
        state = states.change(state, states.random_ids(state, _SHARE, step))
        ways.settle(state)
        cycles.note(f"a {kind} to {where}", partial(save, step), partial(ways.tree_bytes, saved))
    way.close()
    base_bytes = partial(ways.tree_bytes, base)
    digests = inventory.every_digest(store_path(base), _ITEM)
    cycles.note(
        f"promotion from {where}", partial(send, store_path(base), digests, target), base_bytes
    )
    following = Follower(root, item=_ITEM)
    cycles.note(
        f"following a base and a delta on {where}",
        following.advance,
        partial(ways.tree_bytes, root),
    )
    del following
    folding = partial(compact, root, workers=1, memory_bytes=_MEMORY)
    cycles.note(f"compaction on {where}", folding, base_bytes)
    shutil.rmtree(root)
    return state


def main() -> int:
    """Runs the command line."""
    parser = arguments(__doc__)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="cycles-", dir=options.directory) as place,
        tempfile.TemporaryDirectory(prefix="cycles-", dir="/dev/shm") as memory,
        s3_server.running(Path(place) / "server") as server,
    ):
        disk = Path(place) / "disk"
        disk.mkdir()
        cycles = rounds(options, disk, Path(memory), f"{server.bucket('bench')}/run", server)
    nbytes = states.nbytes(states.template(options.scale))
    report = Report(
        "CPU seconds per GB of background work",
        sizes=(
            f"State W, {nbytes / 1e6:.0f} MB, {_SHARE:.0%} of its rows in a delta; "
            f"{options.repeats} rounds, median (range)"
        ),
    )
    for path in dict.fromkeys(path for path, _ in cycles.found):
        user, system = (Sample(tuple(cycles.found[path, kind])) for kind in ("user", "system"))
        report.state(f"{path}", user.plus(system), per_gigabyte)
        report.state(f"{path}, in the system", system, per_gigabyte)
    report.show(options.json, options.markdown)
    return 0


def per_gigabyte(value: float) -> str:
    """CPU seconds per GB."""
    return f"{value:.2f} s/GB"


if __name__ == "__main__":
    sys.exit(main())
