# SPDX-License-Identifier: Apache-2.0
"""Measures encoding bytes into fragments and restoring them, compared with a plain copy.

python benchmarks/erasure.py [--scale S] [--repeats N]
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
from report import Report, Sample, arguments

from deltackpt.tiers import erasure, fragments

_NBYTES = 64 << 20
_BAR_GB_PER_SEC = 2.0
_SEGMENT_BYTES = fragments.SEGMENT_BYTES


def main() -> None:
    """Measures."""
    given = arguments(__doc__).parse_args()
    nbytes = erasure.padded_bytes(4, max(1 << 20, int(_NBYTES * given.scale)))
    data = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    out = np.zeros(nbytes, np.uint8)
    ways: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(out, data)}
    for k, m in ((4, 1), (4, 2)):
        code = erasure.code_of(k, m)
        padded = data.copy().data
        further = {
            k + number: memoryview(b"".join(parts))
            for number, parts in enumerate(erasure.fragments(code, padded)[k:])
        }
        ways[f"encode {k} + {m}"] = functools.partial(encode, code, padded)
        ways[f"restore {k} + {m}, {m} lost"] = functools.partial(
            erasure.restore, code, padded, further, set(range(m))
        )
    took: dict[str, list[float]] = {}
    for number in range(given.repeats + 1):
        for name, call in ways.items():
            before = time.thread_time()
            call()
            if number:  # The first round touches fresh memory.
                took.setdefault(name, []).append(nbytes / (time.thread_time() - before) / 1e9)
    found = {name: Sample(tuple(values)) for name, values in took.items()}
    report = Report("Fragments on one core", sizes=f"{nbytes / 1e6:.0f} MB, stripes of 1 MiB")
    floor = Sample((_BAR_GB_PER_SEC,) * given.repeats)
    for name in ways:
        if name != "memcpy":
            # The ratio of the required rate to the measured one must not exceed 1.
            bar = 1.0 if name == "encode 4 + 2" else None
            report.compare("2 GB/s", floor, name, found[name], rate, bar=bar)
            report.compare(name, found[name], "memcpy", found["memcpy"], rate)
    report.note("Rates are of bytes that are held, by the CPU time of the one thread.")
    report.show(given.json, given.markdown)


def encode(code: erasure.Code, padded: memoryview) -> None:
    """Encodes one segment at a time, as they are sent."""
    for at in range(0, len(padded), _SEGMENT_BYTES):
        erasure.fragments(code, padded[at : at + _SEGMENT_BYTES])


def rate(value: float) -> str:
    """Bytes per second."""
    return f"{value:.2f} GB/s"


if __name__ == "__main__":
    main()
