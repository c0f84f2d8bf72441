# SPDX-License-Identifier: Apache-2.0
"""CPU seconds that a GB costs on each path of the background: what training loses half of.

State W is saved, promoted to versitygw, compacted and followed, each path alone, with nothing
beside it; the CPU is that of this process, all its threads, user and system. The server's is not.

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
from deltackpt.storage.store import spot
from deltackpt.upkeep.compact import compact

_ITEM = "embeddings"
#: Of the rows between two saves.
_SHARE = 0.2
_MEMORY = 256 << 20


class Cycles:
    """CPU seconds of calls."""

    def __init__(self) -> None:
        """None were made."""
        #: By path and kind, "user" and "system": seconds per GB, round by round.
        self.found: dict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, path: str, call: Callable[[], object], nbytes: Callable[[], int]) -> None:
        """Makes a call that takes so many bytes from one place to another."""
        before = os.times()
        call()
        after, gigabytes = os.times(), nbytes() / 1e9
        self.found[path, "user"].append((after.user - before.user) / gigabytes)
        self.found[path, "system"].append((after.system - before.system) / gigabytes)


def rounds(
    options: argparse.Namespace, disk: Path, memory: Path, bucket: str, server: s3_server.Server
) -> Cycles:
    """Every path, as often as is asked for; the first time is not counted."""
    cycles = Cycles()
    state = states.make(options.scale)
    opened = buckets.place(bucket, endpoint=server.endpoint).open()
    step = 0
    for number in range(options.repeats + 1):
        if number == 1:
            cycles.found.clear()
        for where, folder in (("a disk", disk), ("memory", memory)):
            root = folder / str(number)
            way = ways.Deltas(root, "power", base_snapshot="block")
            for kind in ("base", "delta"):
                step += 1
                state = states.change(state, states.random_ids(state, _SHARE, step))
                ways.settle(state)
                saved = root / str(step)

                def save(way=way, step=step, state=state, kind=kind) -> None:
                    way.save(step, state, base=kind == "base")
                    way.wait()

                cycles.note(f"a {kind} to {where}", save, lambda: ways.tree_bytes(saved))
            way.close()
            base = root / str(step - 1)
            digests = inventory.every_digest(spot(base), _ITEM)
            cycles.note(
                f"promotion from {where}",
                lambda: send(spot(base), digests, opened / f"{where[-4:]}{number}"),
                lambda: ways.tree_bytes(base),
            )
            following = Follower(root, item=_ITEM)
            cycles.note(
                f"following a base and a delta on {where}",
                following.advance,
                lambda: ways.tree_bytes(root),
            )
            del following
            cycles.note(
                f"compaction on {where}",
                lambda: compact(root, workers=1, memory_bytes=_MEMORY),
                lambda: ways.tree_bytes(base),
            )
            shutil.rmtree(root)
    return cycles


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
