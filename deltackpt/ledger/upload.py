# SPDX-License-Identifier: Apache-2.0
"""Puts the files of a step, or of a compacted base, into a bucket, and says what they are.

Each file is read, compared with its digest and put: what is altered at the source reaches no
bucket. The digests of all of them follow as one object; then the unit may be committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

import google_crc32c

from deltackpt.errors import Damaged
from deltackpt.ledger.committed import COMMIT, SEGMENT_BYTES, segment_name
from deltackpt.resources.pace import Pace
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest, Digests, Streamed
from deltackpt.storage.store import Spot

#: Objects on their way at a time: enough to hide the latency of a service.
WORKERS = 8
#: Most bytes on their way at a time, all objects together. TensorStore holds them once more.
IN_FLIGHT_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class Uploaded:
    """What was put under a prefix.

    Attributes:
      nbytes: bytes of all files.
      crc32c: of the object that holds their digests.
      objects: how many objects were put, that one included.
    """

    nbytes: int
    crc32c: int
    objects: int


class InFlight:
    """Bytes on their way; who wants more than there is room for waits."""

    def __init__(self, most: int = IN_FLIGHT_BYTES):
        """Holds none yet."""
        self._most = most
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Waits until there is room; what is larger than all of it goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._most)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


def upload(
    source: Spot,
    files: Mapping[str, Digest],
    target: Spot,
    *,
    done: set[str] | None = None,
    workers: int = WORKERS,
    pace: Pace | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Uploaded:
    """Puts files, and then what they are: ``send``, then ``describe``."""
    objects = send(source, files, target, done=done, workers=workers, pace=pace, on_bytes=on_bytes)
    return describe(files, target, objects)


def describe(files: Mapping[str, Digest], target: Spot, objects: int) -> Uploaded:
    """Puts what the files under a prefix are, all of which have been put.

    Args:
      files: as for ``send``.
      target: likewise.
      objects: how many objects they are.

    Raises:
      StorageError: the store refused, or did not answer.
    """
    record = digests.digests_bytes(Digests.of(files))
    to = target / COMMIT
    to.store.put(to.key, record)
    return Uploaded(
        nbytes=sum(digest.length for digest in files.values()),
        crc32c=google_crc32c.value(record),
        objects=objects + 1,
    )


def send(
    source: Spot,
    files: Mapping[str, Digest],
    target: Spot,
    *,
    done: set[str] | None = None,
    workers: int = WORKERS,
    pace: Pace | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Puts files; nothing is visible before it is committed what they are.

    Args:
      source: the folder that they are read from.
      files: posix path below it to what the file should be.
      target: the fresh prefix.
      done: files that are there by now, where that was tried before; those that are put join them.
      workers: objects on their way at a time.
      pace: bounds the bytes per second.
      on_bytes: called with bytes put, from several threads.

    Returns:
      How many objects they are.

    Raises:
      Damaged: a file is missing or altered at the source; it is named.
      StorageError: either store refused, or did not answer.
    """
    pace, in_flight, stopped = pace or Pace(), InFlight(), threading.Event()
    done = set() if done is None else done

    def put(name: str) -> None:
        at, expected = source / name, files[name]
        count = _segments(expected)
        sent = Streamed()
        for number in range(count):
            start = number * SEGMENT_BYTES
            nbytes = min(SEGMENT_BYTES, expected.length - start)
            with in_flight.taken(nbytes):
                pace.take(nbytes, stopped)
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

    with concurrent.futures.ThreadPoolExecutor(workers, "deltackpt-upload") as pool:
        # The largest first: the last to end is a small one.
        order = sorted(files.keys() - done, key=lambda name: -files[name].length)
        pending = [pool.submit(put, name) for name in order]
        try:
            for future in concurrent.futures.as_completed(pending):
                future.result()
        except BaseException:
            stopped.set()
            for future in pending:
                future.cancel()
            raise
    return sum(map(_segments, files.values()))


def _segments(file: Digest) -> int:
    """How many objects a file is."""
    return max(1, -(-file.length // SEGMENT_BYTES))


def _read(at: Spot, start: int, nbytes: int, *, whole: bool) -> bytes:
    with at.missing_is_damage(at.shown()):
        if whole:
            data = at.store.get(at.key)
            if len(data) != nbytes:
                raise Damaged(at.shown(), f"{nbytes} bytes", f"{len(data)} bytes")
            return data
        piece = bytearray(nbytes)
        at.store.read_into(at.key, start, [memoryview(piece)])
        return bytes(piece)
