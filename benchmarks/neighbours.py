# SPDX-License-Identifier: Apache-2.0
"""Bundles at peers: the cost of encoding, and of reading if some nodes are lost.

Nodes are server processes that keep bytes in memory. Each round starts new ones and then kills the
two that hold the first two fragments. Those are pieces of the bundle itself, so all of it must be
decoded.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict

import numpy as np
import stores
from report import Report, Sample, secs, speed, timed

from deltackpt.storage import placement
from deltackpt.storage.crc import crc32c
from deltackpt.tiers import erasure
from deltackpt.tiers.keepers import KeeperNode, Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import Label

_NBYTES = 128 << 20
_K, _M = 4, 2
#: A bundle is encoded piece by piece, so that each piece stays in the cache.
_SEGMENT_BYTES = 16 << 20
#: Seconds per GB on one core (2 GB/s); ratio to the time with all nodes alive.
_ENCODE_BAR, _LOST_BAR = 0.5, 2.0


class _Pack:
    """A bundle in memory."""

    def __init__(self, data: np.ndarray):
        self._data = data
        self.label = Label("0123abcd.1.1.1.0.0", len(data), crc32c(data))

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self._data[start : start + len(out)].data


def measure(report: Report, *, scale: float, repeats: int) -> None:
    """Adds the lines of this table to a report."""
    # A multiple of 1 MiB, so that all stripes are whole.
    nbytes = max(_K, round(_NBYTES * scale) >> 20) << 20
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    report.state(
        f"cut into {_K} + {_M} fragments, one core",
        _encoding(data, repeats),
        speed,
        bar=_ENCODE_BAR,
    )
    pack = _Pack(data)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        _round(pack, found)
    held, alive, lost = (Sample(tuple(found[name])) for name in ("held", "alive", "lost"))
    size = f"{nbytes / 1e6:.0f} MB"
    report.compare(
        f"{size} read with {_M} of {_K + _M} nodes lost",
        lost,
        "all alive",
        alive,
        secs,
        bar=_LOST_BAR,
    )
    report.state(f"{size} given to {_K + _M} nodes", held, secs)


def _encoding(data: np.ndarray, repeats: int) -> Sample:
    """CPU seconds per GB."""
    code = erasure.code_of(_K, _M)
    padded = memoryview(bytearray(erasure.padded_bytes(_K, len(data))))
    padded[: len(data)] = data.data
    values = []
    for _ in range(repeats + 1):
        before = time.thread_time()
        for start in range(0, len(padded), _SEGMENT_BYTES):
            erasure.fragments(code, padded[start : start + _SEGMENT_BYTES])
        values.append((time.thread_time() - before) / len(data) * 1e9)
    return Sample(tuple(values[1:]))  # The first one uses fresh memory.


def _round(pack: _Pack, found: dict[str, list[float]]) -> None:
    names = [f"node{number}" for number in range(_K + _M)]
    with stores.node_stores(_K + _M) as servers:
        keepers = Keepers(
            root="bench",
            own="trainer",
            token=servers.token,
            nodes=tuple(
                KeeperNode(node=name, address=address)
                for name, address in zip(names, servers.addresses, strict=True)
            ),
            k=_K,
            m=_M,
        )
        with contextlib.closing(Neighbours(keepers)) as neighbours:
            found["held"].append(timed(lambda: neighbours.hold(pack)))
            out = np.zeros(pack.label.nbytes, np.uint8)
            _read(neighbours, pack, out)  # Warm-up: fresh memory, fresh connections.
            found["alive"].append(_read(neighbours, pack, out))
            for name in placement.ranked(pack.label.key, names)[:_M]:
                servers.kill(names.index(name))
            found["lost"].append(_read(neighbours, pack, out))


def _read(neighbours: Neighbours, pack: _Pack, out: np.ndarray) -> float:
    def read() -> None:
        with neighbours.reading(pack.label) as reader:
            reader.read_into(0, out.data)

    out[:] = 0
    seconds = timed(read)
    assert crc32c(out) == pack.label.crc32c, "what was read is not what was held"
    return seconds
