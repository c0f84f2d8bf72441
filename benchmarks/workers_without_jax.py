# SPDX-License-Identifier: Apache-2.0
"""Functions that run in processes without JAX: followers, readers, a compaction."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import fresh
import numpy as np

from deltackpt import serving
from deltackpt.maintenance import compact
from deltackpt.wal import KafkaWal

_READY_SECS, _POLL_SECS = 300.0, 0.005


def follow(directory: str, address: str, kafka: list[str]) -> list[tuple[int, float, float]]:
    """Shares the tables until its input ends; returns when each version was shown and captured."""
    wal: Any = KafkaWal(kafka[0], config={"bootstrap.servers": kafka[1]}) if kafka else True
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    found = []
    with serving.follow(directory, tables="**", wal=wal, poll_secs=_POLL_SECS) as live:
        live.wait_ready(_READY_SECS)
        live.share(address)
        fresh.say("ready")
        last = -1
        while not ended.is_set():
            try:
                live.wait_ready(0.2, last + 1)
            except TimeoutError:
                continue
            shown = time.time()
            with live.version() as version:
                last = version.step
                found.append((last, shown, version.unix_secs))
    return found


def read(address: str, rows: int, lookups: int, batch: int, seed: int) -> dict[str, float]:
    """Looks up rows that all hold the step; returns the mixed versions that it saw."""
    rng, attached = np.random.default_rng(seed), serving.attach(address)
    asked = [rng.integers(0, rows, batch) for _ in range(256)]
    mixed, done, versions = 0, 0, set()
    started = time.process_time()
    while done < lookups:
        with attached.version() as version:
            for number in range(4):
                values, found = version.lookup("ab"[number % 2], asked[(done + number) % 256])
                mixed += not (found.all() and (values == version.step).all())
            done += 4
            versions.add(version.step)
    secs = time.process_time() - started
    return {"mixed": mixed, "done": done, "versions": len(versions), "secs": secs}


def gather(address: str, rows: int, batch: int, repeats: int) -> list[float]:
    """CPU seconds per million rows of lookups of random rows, per repetition."""
    rng, attached, found = np.random.default_rng(0), serving.attach(address), []
    asked = [rng.integers(0, rows, batch) for _ in range(64)]
    for _ in range(repeats):
        count, started = 0, time.process_time()
        while count < 1_000_000:
            with attached.version() as version:
                version.lookup("a", asked[(count // batch) % 64])
            count += batch
        found.append((time.process_time() - started) * 1e6 / count)
    return found


def compacted(root: str, memory_bytes: int) -> dict[str, float]:
    """Compacts the newest chain; returns its extra memory."""
    before = fresh.status_bytes("VmRSS")
    fresh.reset_peak()
    done = compact.compact(Path(root), memory_bytes=memory_bytes)
    assert done is not None
    return {"extra": fresh.status_bytes("VmHWM") - before}
