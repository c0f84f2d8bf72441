# SPDX-License-Identifier: Apache-2.0
"""The follower and the readers of ``serving.py``, in processes of their own, without jax."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import numpy as np

from deltackpt import serving

_READY_SECS = 300.0


def follower(directory: str, address: str, poll_secs: float) -> None:
    """Shares the tables; prints when each version was shown until its input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with serving.follow(directory, tables="**", poll_secs=poll_secs) as live:
        live.wait_ready(_READY_SECS)
        live.share(address)
        print("ready", flush=True)
        last = -1
        while not ended.is_set():
            try:
                live.wait_ready(0.2, last + 1)
            except TimeoutError:
                continue
            shown = time.time()
            with live.version() as version:
                last = version.step
                captured = version.unix_secs
            print(json.dumps([last, shown, captured]), flush=True)


def reader(address: str, rows: int, lookups: int, batch: int, seed: int) -> None:
    """Looks up rows that all hold the step; prints the mixed versions that it saw."""
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
    print(json.dumps({"mixed": mixed, "done": done, "versions": len(versions), "secs": secs}))


def gather(address: str, rows: int, batch: int, repeats: int) -> None:
    """Prints the processor seconds per million rows of lookups of random rows, per repetition."""
    rng, attached, found = np.random.default_rng(0), serving.attach(address), []
    asked = [rng.integers(0, rows, batch) for _ in range(64)]
    for _ in range(repeats):
        count, started = 0, time.process_time()
        while count < 1_000_000:
            with attached.version() as version:
                version.lookup("a", asked[(count // batch) % 64])
            count += batch
        found.append((time.process_time() - started) * 1e6 / count)
    print(json.dumps(found))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(dest="role", required=True)
    one = roles.add_parser("follower")
    one.add_argument("directory")
    one.add_argument("address")
    one.add_argument("--poll-secs", type=float, default=0.005)
    two = roles.add_parser("reader")
    two.add_argument("address")
    for name in ("rows", "lookups", "batch", "seed"):
        two.add_argument(f"--{name}", type=int, required=True)
    three = roles.add_parser("gather")
    three.add_argument("address")
    for name in ("rows", "batch", "repeats"):
        three.add_argument(f"--{name}", type=int, required=True)
    options = vars(parser.parse_args())
    role = options.pop("role")
    {"follower": follower, "reader": reader, "gather": gather}[role](**options)


if __name__ == "__main__":
    main()
