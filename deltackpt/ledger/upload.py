# SPDX-License-Identifier: Apache-2.0
"""Uploads the files of a step or a compacted base to a bucket, with their digests.

Each file is compared with its digest, so altered files never reach a bucket. One object with all
digests follows; then the unit may be committed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping

import google_crc32c

from deltackpt.errors import Damaged
from deltackpt.ledger.committed import SEGMENT_BYTES, segment_name
from deltackpt.ledger.entries import COMMIT
from deltackpt.resources.runtime import Pace, Runtime
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest, Digests, Streamed
from deltackpt.storage.store import StorePath

#: Concurrent uploads: enough to hide the latency of a service.
WORKERS = 8
#: Maximum bytes in flight, over all objects. TensorStore holds a second copy.
_IN_FLIGHT_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Uploaded:
    """What was uploaded under a prefix; the CRC32C is that of the object with the digests."""

    nbytes: int  # total size of all files
    crc32c: int
    objects: int  # including that one


def upload(
    source: StorePath,
    files: Mapping[str, Digest],
    target: StorePath,
    *,
    workers: int = WORKERS,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Uploaded:
    """Uploads files, then their digests: ``send``, then ``describe``."""
    objects = send(source, files, target, workers=workers, on_bytes=on_bytes)
    return describe(files, target, objects)


def describe(files: Mapping[str, Digest], target: StorePath, objects: int) -> Uploaded:
    """Uploads the digests of the files under a prefix; returns what was uploaded."""
    record = digests.digests_bytes(Digests.of(files))
    to = target / COMMIT
    to.store.put(to.key, record)
    return Uploaded(
        nbytes=sum(digest.length for digest in files.values()),
        crc32c=google_crc32c.value(record),
        objects=objects + 1,
    )


def send(
    source: StorePath,
    files: Mapping[str, Digest],
    target: StorePath,
    *,
    done: set[str] | None = None,
    workers: int = WORKERS,
    pace: Pace | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Uploads files, which remain invisible until ``describe``; returns the number of objects.

    ``done`` names files uploaded by an earlier attempt, and is extended. ``on_bytes`` is called
    from several threads. Raises Damaged if a source file is missing or altered.
    """
    pace, stopped = pace or Pace(), threading.Event()
    runtime = Runtime(workers, memory_bytes=_IN_FLIGHT_BYTES)
    done = set() if done is None else done

    def put(name: str) -> None:
        try:
            put_segments(name)
        except BaseException:
            stopped.set()
            raise

    def put_segments(name: str) -> None:
        at, expected = source / name, files[name]
        count = _segments(expected)
        sent = Streamed()
        for number in range(count):
            start = number * SEGMENT_BYTES
            nbytes = min(SEGMENT_BYTES, expected.length - start)
            with runtime.memory.reserved(nbytes):
                pace.acquire(nbytes, stopped)
                if stopped.is_set():
                    return
                data = _read(at, start, nbytes, whole=count == 1)
                sent.add(data)
                to = target / (name if count == 1 else segment_name(name, number))
                if number + 1 == count:
                    sent.check(at.shown(), expected)
                to.store.put(to.key, data)
            on_bytes(nbytes)
        done.add(name)

    with runtime:
        # Largest first, so that the last upload to finish is small.
        runtime.map(put, sorted(files.keys() - done, key=lambda name: -files[name].length))
    return sum(map(_segments, files.values()))


def _segments(file: Digest) -> int:
    return max(1, -(-file.length // SEGMENT_BYTES))


def _read(at: StorePath, start: int, nbytes: int, *, whole: bool) -> bytes:
    with at.missing_is_damage(at.shown()):
        if whole:
            data = at.store.get(at.key)
            if len(data) != nbytes:
                raise Damaged(at.shown(), f"{nbytes} bytes", f"{len(data)} bytes")
            return data
        piece = bytearray(nbytes)
        at.store.read_into(at.key, start, [memoryview(piece)])
        return bytes(piece)
