# SPDX-License-Identifier: Apache-2.0
"""Sends units, which are steps and compacted bases, to a bucket, and commits them there.

Each file is compared with its digest, so altered files never reach a bucket. One object with all
digests follows; then the unit may be committed. The uploader of a job with several processes does
these steps separately, since each process sends its files; copies and compaction do all at once.

How saves get from one place to another::

    what            is missing if            is verified by            is committed by
    copy            lengths, records differ  digests                   rename, or journal entry
    upload          never committed there    digests                   journal entry
    compacted base  not committed there      digests                   journal entry
    download        always                   digests                   nobody: it is temporary
    bundle          the tier lacks its key   CRC32C of the stream      the tier
    recovered save  not here, not remote     digests                   rename
    WAL records     piece names lack them    their own checksums       the epoch's header

A copy to a directory is also read back, one to a bucket is not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import google_crc32c

from deltackpt.errors import BrokenChain, RestoreError, StorageError, TargetDiffers
from deltackpt.format.manifest import SaveInfo
from deltackpt.ledger.committed import SEGMENT_BYTES, object_name
from deltackpt.ledger.entries import COMMIT, CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.resources.runtime import Pace, Runtime
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import StorePath

#: Concurrent files: enough to hide the latency of a service.
WORKERS = 8
#: Maximum bytes in flight, over all files. A file of several pieces holds the next one as well, and
#: TensorStore a second copy of each.
_IN_FLIGHT_BYTES = 32 << 20


class Unit(NamedTuple):
    """A step or compacted base in some place: what is copied, and becomes visible, as a whole."""

    key: ObjectKey
    info: SaveInfo
    at: StorePath
    files: Mapping[str, Digest]  # by path below ``at``

    @property
    def name(self) -> str:
        """Its path below a checkpoint directory."""
        return self.key.name

    @property
    def nbytes(self) -> int:
        """The total size of its files."""
        return sum(digest.length for digest in self.files.values())


def send(
    unit: Unit,
    target: StorePath,
    *,
    done: set[str] | None = None,
    workers: int = WORKERS,
    pace: Pace | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> int:
    """Uploads a unit's files, which remain invisible; returns the number of objects.

    ``done`` names files uploaded by an earlier attempt, and is extended. ``on_bytes`` is called
    from several threads. Raises Damaged if a source file is missing or altered.
    """
    pace, stopped = pace or Pace(), threading.Event()
    done = set() if done is None else done

    def put(name: str) -> None:
        file = unit.files[name]
        pieces = digests.verified_file(unit.at / name, file, most_bytes=SEGMENT_BYTES)
        try:
            for number, piece in enumerate(pieces):
                pace.acquire(len(piece), stopped)
                if stopped.is_set():
                    return
                to = target / object_name(name, file, number)
                to.store.put(to.key, piece)
                on_bytes(len(piece))
        except BaseException:
            stopped.set()
            raise
        done.add(name)

    with Runtime(workers, memory_bytes=_IN_FLIGHT_BYTES) as runtime:
        # Largest first, so that the last upload to finish is small.
        runtime.map(
            put,
            sorted(unit.files.keys() - done, key=lambda name: -unit.files[name].length),
            cost=lambda name: min(unit.files[name].length, SEGMENT_BYTES),
        )
    return sum(max(1, -(-file.length // SEGMENT_BYTES)) for file in unit.files.values())


def describe(unit: Unit, root: StorePath, prefix: str) -> CatalogEntry:
    """Uploads the digests of a unit's files, which are below a prefix; returns what to commit."""
    record = digests.digests_bytes(unit.files)
    to = root / prefix / COMMIT
    to.store.put(to.key, record)
    return CatalogEntry(
        info=unit.info,
        item=unit.key.item,
        prefix=prefix,
        stored_bytes=unit.nbytes,
        crc32c=google_crc32c.value(record),
    )


def commit(
    unit: Unit,
    journal: Journal,
    *,
    reading: AbstractContextManager[None] | None = None,
    workers: int = WORKERS,
    on_bytes: Callable[[int], None] = lambda count: None,
    alone: bool = False,
    replace: bool = False,
) -> CatalogEntry:
    """Uploads and commits a unit; ``reading`` surrounds the reads, and see ``Journal.commit``.

    Deletes the files of an upload that was certainly not committed. After FencedError or a failure
    of the storage it may be, so the files remain until a later holder of the bucket sweeps them.
    """
    prefix = journal.prefix(unit.key)
    try:
        with reading or contextlib.nullcontext():
            send(unit, journal.root / prefix, workers=workers, on_bytes=on_bytes)
            entry = describe(unit, journal.root, prefix)
    except RestoreError:
        _discard(prefix, journal)
        raise
    try:
        entry = journal.commit(entry, alone=alone, replace=replace)
    except (BrokenChain, TargetDiffers):
        _discard(prefix, journal)
        raise
    if entry.prefix != prefix:  # Another upload of the same save came first.
        _discard(prefix, journal)
    return entry


def _discard(prefix: str, journal: Journal) -> None:
    with contextlib.suppress(StorageError):  # The next holder of the bucket sweeps it.
        journal.delete([prefix])
