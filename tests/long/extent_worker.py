# SPDX-License-Identifier: Apache-2.0
"""Stores and drops packs in an extent file until it is killed, and reports what it did.

    python extent_worker.py DIRECTORY SEED

Each line on stdout is a note in JSON: ``ready``; ``holding`` before and ``held`` after ``hold``;
``dropping`` before and ``dropped`` after ``drop``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memory_pack import MemoryPack

from deltackpt.tiers import extent_store
from deltackpt.tiers.extent_store import ExtentFile

EXTENT_BYTES, COUNT = 1 << 20, 24
MOST_BYTES = 5 << 20


def main(directory: Path, seed: int) -> None:
    random_ = random.Random(seed)
    # Write each extent in one call, or in several.
    extent_store._PIECE_BYTES = random_.choice((EXTENT_BYTES, EXTENT_BYTES // 4))
    held = opened(directory)
    note("ready")
    # No process continues an earlier one's run: keys are used once.
    for number in range(1_000_000):
        pack = MemoryPack(f"run{seed}.{number}", random_.randint(0, MOST_BYTES))
        labels = held.refs()
        while len(labels) > random_.randint(1, 3) or full(labels):
            gone = labels[: random_.randint(1, len(labels) - 1)] if len(labels) > 1 else labels
            note("dropping", keys=[label.key for label in gone])
            held.delete(gone)
            note("dropped", keys=[label.key for label in gone])
            labels = held.refs()
        note("holding", key=pack.ref.key, nbytes=pack.ref.nbytes)
        held.put(pack)
        note("held", key=pack.ref.key, nbytes=pack.ref.nbytes)


def opened(directory: Path) -> ExtentFile:
    """The extent file, opened with the options that all processes use."""
    return ExtentFile(directory, nbytes=COUNT * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def full(labels: list) -> bool:
    """Whether another pack might not fit."""
    taken = sum(label.nbytes // (EXTENT_BYTES - 4096) + 1 for label in labels)
    return taken + MOST_BYTES // (EXTENT_BYTES - 4096) + 1 > COUNT


def note(kind: str, **fields: object) -> None:
    print(json.dumps({"note": kind, **fields}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
