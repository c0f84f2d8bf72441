# SPDX-License-Identifier: Apache-2.0
"""Holds and drops packs in a file of extents until it is ended, and says what it has done.

    python extent_worker.py DIRECTORY SEED

Each line on stdout is a note in JSON: ``ready``; ``holding`` before, ``held`` after a hold;
``dropping`` before, ``dropped`` after a drop.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memory_pack import MemoryPack

from deltackpt.tiers.extents import ExtentFile

EXTENT_BYTES, COUNT = 1 << 20, 24
MOST_BYTES = 5 << 20


def main(directory: Path, seed: int) -> None:
    random_ = random.Random(seed)
    held = opened(directory)
    note("ready")
    # A run that an earlier process began never goes on: its keys are used once.
    for number in range(1_000_000):
        pack = MemoryPack(f"run{seed}.{number}", random_.randint(0, MOST_BYTES))
        labels = held.labels()
        while len(labels) > random_.randint(1, 3) or full(labels):
            gone = labels[: random_.randint(1, len(labels) - 1)] if len(labels) > 1 else labels
            note("dropping", keys=[label.key for label in gone])
            held.drop(gone)
            note("dropped", keys=[label.key for label in gone])
            labels = held.labels()
        note("holding", key=pack.label.key, nbytes=pack.label.nbytes)
        held.hold(pack)
        note("held", key=pack.label.key, nbytes=pack.label.nbytes)


def opened(directory: Path) -> ExtentFile:
    """The file, as all of its processes open it."""
    return ExtentFile(directory, nbytes=COUNT * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def full(labels: list) -> bool:
    """Whether another pack might not fit."""
    extents = sum(label.nbytes // (EXTENT_BYTES - 4096) + 1 for label in labels)
    return extents + MOST_BYTES // (EXTENT_BYTES - 4096) + 1 > COUNT


def note(kind: str, **fields: object) -> None:
    print(json.dumps({"note": kind, **fields}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
