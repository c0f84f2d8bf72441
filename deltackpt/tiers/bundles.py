# SPDX-License-Identifier: Apache-2.0
"""Bundles: the files of a save as one stream, for replicas that hold complete saves.

Its CRC32C is computed from the files' digests, so creating a bundle reads nothing; its consumer
reads it once.

A bundle has all existing files of a step directory, also those of a damaged save or of a single
process. A ``ledger.upload.Unit`` instead has all files that the save's records name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import struct
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import records
from deltackpt.format.manifest import SaveId
from deltackpt.format.records import MOST_BYTES
from deltackpt.reading import inventory, stored_saves
from deltackpt.storage import digests, posix
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.digests import Digest, verified
from deltackpt.storage.store import FileStore, Missing, fill, split, store_path
from deltackpt.tiers.staging import Orders, RunLineage, StagingDir

_MAGIC = "deltackpt.pack"
#: Fields of manifests that development versions did not write.
_SINCE_DEVELOPMENT = frozenset(("lineage", "shard"))
_PREFIX = struct.Struct("<8sQ")
_PREFIX_MAGIC = b"dckpack1"
_KEY = re.compile(r"([0-9a-z]{1,64})\.(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.(\d{1,9})")
_PIECE_BYTES = 4 << 20


class BundleRef(NamedTuple):
    """Reference to a bundle: its ``BundleName.key``, and length and CRC32C of the stream."""

    key: str
    nbytes: int
    crc32c: int


class BundleName(NamedTuple):
    """The save in a bundle, and when it was made."""

    run: str
    attempt: int
    step: int
    epoch: int  # of the claim under which the save's run began
    generation: int  # number of rollbacks under that claim before the run began
    shard: int  # the process, if several have a staging directory each; otherwise 0

    @property
    def key(self) -> str:
        """The key: lower-case letters, digits and dots."""
        return ".".join(map(str, self))

    @property
    def save_id(self) -> SaveId:
        """The save in the bundle."""
        return SaveId(self.run, self.step, self.attempt)

    @classmethod
    def parse(cls, key: str) -> BundleName | None:
        """Parses a key; returns None for a foreign one."""
        match = _KEY.fullmatch(key)
        return cls(match[1], *(int(match[group]) for group in range(2, 7))) if match else None


class Reader(Protocol):
    """The bytes of a stored bundle."""

    def read_into(self, start: int, out: memoryview) -> None:
        """Fills ``out`` from offset ``start``; Damaged if the bytes differ from those written."""
        ...


class SegmentReader:
    """A stored bundle as a ``Reader``; thread-safe. One segment, which is verified, is cached."""

    def __init__(self, ref: BundleRef, segment_bytes: int, load: Callable[[int], memoryview]):
        """``load`` reads and verifies a segment; its result is valid until the next call."""
        self._ref, self._segment_bytes, self._load = ref, segment_bytes, load
        self._lock = threading.Lock()
        self._loaded: tuple[int, memoryview] | None = None

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Reader``."""
        require_range(self._ref, start, len(out))
        with self._lock:
            ends = itertools.count(self._segment_bytes, self._segment_bytes)
            for number, at, inside in split(start, [out], ends):
                if self._loaded is None or self._loaded[0] != number:
                    self._loaded = None
                    self._loaded = number, self._load(number)
                fill(inside, self._loaded[1][at - number * self._segment_bytes :])


class Bundle(Reader, Protocol):
    """A bundle to store; several threads may read it."""

    @property
    def ref(self) -> BundleRef:
        """Its reference."""
        ...


class Tier(Protocol):
    """A store of bundles; ``name`` is the ``Restored.source`` of saves recovered from it."""

    name: str

    def refs(self) -> list[BundleRef]:
        """Returns the complete bundles, as far as is known without reading them."""
        ...

    def open(self, ref: BundleRef) -> Reader:
        """Returns a reader of a bundle; raises Damaged or StorageError if it is not readable."""
        ...

    def put(self, bundle: Bundle) -> None:
        """Stores a bundle durably; idempotent. A failure (StorageError) keeps existing bundles."""
        ...

    def delete(self, refs: Collection[BundleRef]) -> None:
        """Deletes bundles; missing ones are ignored."""
        ...

    def close(self) -> None:
        """Closes the store; stored bundles remain."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleManifest:
    """Manifest of a bundle; see ``BundleName``."""

    save_id: SaveId
    lineage: RunLineage  # of its run
    root: str  # URL of the checkpoint directory
    shard: int
    shards: int
    #: Each ``Digest[:3]`` by its path below the step, in stream order.
    files: dict[str, tuple[int, int, int]]

    @property
    def name(self) -> BundleName:
        """The bundle's name."""
        run, step, attempt = self.save_id.run, self.save_id.step, self.save_id.attempt
        return BundleName(run, attempt, step, *self.lineage.moment, self.shard)


class StagedBundle:
    """A bundle of a step directory's files, which are read on demand."""

    def __init__(self, step_dir: Path, contents: BundleManifest):
        record = records.to_bytes(contents, _MAGIC)
        self.root = contents.root
        self._files = FileStore(step_dir)
        self._head = _PREFIX.pack(_PREFIX_MAGIC, len(record)) + record
        self._names = [*contents.files]
        lengths = (length for length, _, _ in contents.files.values())
        #: The ends of the head and of each file.
        self._ends = [*itertools.accumulate(lengths, initial=len(self._head))]
        total = digests.crc32c(np.frombuffer(self._head, np.uint8))
        for found in contents.files.values():
            total = digests.joined(total, Digest(*found).whole_crc32c, found[0])
        self._label = BundleRef(contents.name.key, self._ends[-1], total)

    @property
    def ref(self) -> BundleRef:
        """See ``Bundle``."""
        return self._label

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Bundle``; raises Missing if the step was removed concurrently."""
        require_range(self._label, start, len(out))
        for number, at, inside in split(start, [out], self._ends):
            if number == 0:
                fill(inside, memoryview(self._head)[at:])
            else:
                self._files.read_into(self._names[number - 1], at - self._ends[number - 1], inside)


def manifest_of(step_dir: Path, save_id: SaveId, orders: Orders) -> BundleManifest:
    """Returns the manifest of a bundle: every file of a committed step, with its digest.

    Files that the step's records do not list, such as those of foreign handlers, are read.
    ``Missing`` means that the step was removed concurrently.
    """
    if not step_dir.is_dir():
        raise Missing(str(step_dir), "no such step")
    known = inventory.read_inventory(step_dir, orders.item, unreadable=True).files
    found: dict[str, tuple[int, int, int]] = {}
    for name in sorted(store_path(step_dir).keys()):
        digest = known.get(name)
        if digest is None:
            digest = digests.digest_file(step_dir / name)
        found[name] = digest[:3]
    return BundleManifest(
        save_id=save_id,
        # The ancestors of an unknown run are not known either.
        lineage=orders.lineage(save_id.run) or orders.new_lineage(save_id.run, {}),
        root=orders.url,
        shard=orders.process,
        shards=orders.processes,
        files=found,
    )


def staged_bundle(stage: StagingDir, save_id: SaveId, orders: Orders) -> StagedBundle:
    """Returns the bundle of a staged save; Missing if it was evicted or replaced."""
    step_dir = stage.steps / str(save_id.step)
    contents = manifest_of(step_dir, save_id, orders)
    if stored_saves.read_info(store_path(step_dir), orders.item).save_id != save_id:
        raise Missing(str(step_dir), "another save in its place")
    return StagedBundle(step_dir, contents)


def read_manifest(reader: Reader, ref: BundleRef) -> tuple[BundleManifest, int]:
    """Returns the manifest of a stored bundle, and the offset of its first file.

    Raises Damaged, FormatTooNew or FormatTooOld (a development version wrote it).
    """
    prefix = bytearray(_PREFIX.size)
    if ref.nbytes < len(prefix):
        expected = f"a bundle of at least {len(prefix)} bytes"
        raise Damaged(ref.key, expected, f"{ref.nbytes} bytes")
    reader.read_into(0, memoryview(prefix))
    magic, length = _PREFIX.unpack(prefix)
    if magic != _PREFIX_MAGIC or length > min(ref.nbytes - len(prefix), MOST_BYTES):
        raise Damaged(ref.key, "the beginning of a bundle", f"{bytes(prefix[:8])!r}, {length}")
    record = bytearray(length)
    reader.read_into(len(prefix), memoryview(record))
    found: BundleManifest = records.from_bytes(
        bytes(record),
        BundleManifest,
        name=ref.key,
        magic=_MAGIC,
        since_development=_SINCE_DEVELOPMENT,
    )
    start = len(prefix) + length
    digests.check_digests(found.files, ref.key)
    if found.name.key != ref.key or found.lineage.run != found.save_id.run:
        raise Damaged(ref.key, "the bundle of that name", f"{found.name.key}")
    if start + sum(length for length, _, _ in found.files.values()) != ref.nbytes:
        raise Damaged(ref.key, f"{ref.nbytes} bytes", "files of another total length")
    return found, start


def unpack(reader: Reader, ref: BundleRef, folder: Path, *, fsync: bool) -> BundleManifest:
    """Extracts a bundle's files into a new folder; Damaged if one does not match its digest."""
    contents, start = read_manifest(reader, ref)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with posix.typed_errors(folder, "unpack a save"):
        folder.mkdir(parents=True)
    batch = FileBatch(folder, fsync=fsync)

    def read(begin: int, offset: int, nbytes: int) -> memoryview:
        reader.read_into(begin + offset, buffer[:nbytes])
        return buffer[:nbytes]

    with contextlib.closing(batch):
        for name, found in contents.files.items():
            shown, of_file = f"{ref.key}/{name}", functools.partial(read, start)
            batch.make((folder / name).parent)
            with batch.new(folder / name) as file:
                for piece in verified(shown, Digest(*found), of_file, most_bytes=_PIECE_BYTES):
                    file.append(np.frombuffer(piece, np.uint8))
            start += found[0]
        batch.force()
    return contents


def save_of(ref: BundleRef) -> SaveId | None:
    """Returns the save of a bundle; None for a foreign key."""
    name = BundleName.parse(ref.key)
    return None if name is None else name.save_id


def newest_first(refs: Collection[BundleRef]) -> list[tuple[BundleName, BundleRef]]:
    """Returns bundles with their names, newest first; foreign keys are ignored."""
    named = [(name, ref) for ref in refs if (name := BundleName.parse(ref.key)) is not None]
    return sorted(
        named, key=lambda one: (one[0].epoch, one[0].generation, one[0].attempt), reverse=True
    )


def require_range(ref: BundleRef, start: int, nbytes: int) -> None:
    """Checks that a caller reads only bytes of the bundle."""
    if start < 0 or start + nbytes > ref.nbytes:
        raise ValueError(f"{ref.key}: bytes {start} to {start + nbytes} of {ref.nbytes}")


def require_crc32c(ref: BundleRef, found: int) -> None:
    """Raises Damaged if the bytes of a bundle that is stored do not match its reference."""
    if found != ref.crc32c:
        raise Damaged(
            ref.key,
            f"a bundle with crc32c {ref.crc32c:08x}",
            f"{found:08x}",
            "its files changed while they were read, or since they were written",
        )
