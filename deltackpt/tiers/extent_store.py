# SPDX-License-Identifier: Apache-2.0
"""Extents: bundles in a preallocated file, each made durable by one ``fdatasync``.

``docs/reference/format.md`` specifies the file. It is filled completely when it is created, so
later writes allocate nothing. Bundles are never overwritten, and only the newest can be torn, which
is detected when the file is opened. The header of a dropped one is replaced and fsynced first, so
it cannot reappear after a power cut.

Measured on ext4 for 10 MB on an idle disk: 27 ms and 3.8 ms of CPU; a directory of 20 files takes
39 and 13. Next to a process that fsyncs files: 30 and 178 ms (``benchmarks/extents.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from deltackpt import events
from deltackpt.errors import (
    ClosedError,
    Damaged,
    InUse,
    OptionError,
    OutOfSpace,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import extents
from deltackpt.format.extents import BLOCK_BYTES, ExtentDivision, ExtentHeader
from deltackpt.ledger import lease
from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.storage import posix
from deltackpt.storage.digests import crc32c
from deltackpt.storage.posix import DirectFile, DurableDir
from deltackpt.storage.store import Missing
from deltackpt.tiers import bundles
from deltackpt.tiers.bundles import Bundle, BundleRef, SegmentReader

#: Names of the file, of its lock, and of a file under construction.
FILE, _LOCK, _MAKING = "extents", "extents.lock", "extents.making"
#: Bytes per write: most deltas take one write. Next to another process that fsyncs files, 10 MB
#: took 41 ms this way and 56 ms in pieces of 2 MiB (alone 27 and 25). Reading the next piece
#: concurrently in another thread took 3 % less time for 200 MB but 23 % more CPU.
_PIECE_BYTES = 16 << 20
#: Must fit together: while a base and its deltas wait for the upload, the next ones arrive.
_BASES, _DELTAS = 2, 4


class ExtentFile:
    """A file of extents that stores bundles; thread-safe; open in one process at a time."""

    name = "extents"

    def __init__(self, directory: Path, *, nbytes: int, extent_bytes: int = 64 << 20):
        """Opens the file, or creates it, which writes all of it once.

        ``nbytes`` counts all extents; ``extent_bytes``, a multiple of 4 KiB, includes a header of 4
        KiB. Raises InUse if another process has it open, OptionError if the sizes differ from the
        file's.
        """
        self.path = directory / FILE
        self._division = ExtentDivision(extent_bytes, nbytes // extent_bytes)
        self._lock = threading.Lock()
        self._buffer = aligned_buffer(BLOCK_BYTES + min(_PIECE_BYTES, extent_bytes - BLOCK_BYTES))
        #: By key, in the order in which they were written.
        self._held: dict[str, _Held] = {}
        #: The highest sequence number in any header, so that none is reused.
        self._sequence = 0
        refusal = InUse(
            f"{self.path}: expected no other trainer to use these extents, found one that does; "
            "give each its own Extents.directory, or stop the other trainer and the processes "
            "that it forked"
        )
        DurableDir(directory, private=True).create()
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(lease.file_lock(directory / _LOCK, refusal, private=True))
            except InUse:
                # The holder may be a manager of this process, which is closed if the new one can
                # open.
                with contextlib.closing(DirectFile(self.path, new=False)) as self._file:
                    self._require_division(self._read_division())
                raise
            if not self.path.exists():
                _make(directory, self._division)
            self._file = DirectFile(self.path, new=False)
            opened.callback(self._file.close)
            self._scan()
            self._opened = opened.pop_all()
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether writes bypass the page cache; if not, they can slow training down."""
        return self._file.direct

    def require_room(self, base_bytes: int, delta_bytes: int) -> None:
        """Checks that two bases and four deltas of these sizes fit, so that it does not fill up."""
        of_base, of_delta = map(self._division.extents, (base_bytes, delta_bytes))
        needed = _BASES * of_base + _DELTAS * of_delta
        if needed > self._division.count:
            raise OptionError(
                f"Extents.nbytes: expected at least {needed * self._division.extent_bytes:,} for "
                f"two bases of {base_bytes:,} bytes and four deltas of {delta_bytes:,} in extents "
                f"of {self._division.extent_bytes:,}, found {self._shown()}; remove {self.path} "
                "once nothing in it is needed, then set that many bytes, or smaller extents"
            )

    def refs(self) -> list[BundleRef]:
        """See ``Tier``; oldest first."""
        with self._used():
            return [held.ref for held in self._held.values() if held.is_complete]

    def open(self, ref: BundleRef) -> SegmentReader:
        """See ``Tier``; uses memory for one extent."""
        with self._used():
            held = self._held.get(ref.key)
        if held is None or not held.is_complete or held.ref != ref:
            raise Missing(f"{self.path}: {ref.key}", "no such bundle")
        load = functools.partial(self._read_payload, held, self._buffer_for(held))
        return SegmentReader(ref, self._division.payload_bytes, load)

    def put(self, bundle: Bundle) -> None:
        """See ``Tier``; OutOfSpace if too few extents are free."""
        ref = bundle.ref
        with self._used():
            held = self._held.get(ref.key)
            if held is not None and held.is_complete:
                if held.ref != ref:
                    raise TargetDiffers(
                        f"{self.path}: expected {ref}, found {held.ref} under that key; drop "
                        "that one first"
                    )
                return
            if held is not None:
                self._let_go([held])
            self._sequence += 1
            # Not valid yet, but must be dropped: after an error the disk contents are unknown.
            held = _Held(ref, self._sequence, self._free_extents(ref))
            self._held[ref.key] = held
            try:
                self._write(bundle, held)
            except BaseException:
                with contextlib.suppress(StorageError):
                    self._let_go([held])
                raise
            held.is_complete = True

    def delete(self, refs: Collection[BundleRef]) -> None:
        """See ``Tier``; none of them can reappear once this has returned."""
        with self._used():
            self._let_go([self._held[key] for key, _, _ in refs if key in self._held])

    def close(self) -> None:
        """See ``Tier``; afterwards another process may open the file."""
        with self._lock:
            self._closed = True
            self._opened.close()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"{self.path}: expected an open file, found it closed; open it again"
                )
            yield

    def _scan(self) -> None:
        block = self._buffer[:BLOCK_BYTES]
        found = self._read_division()
        # Bundles that another division would overwrite or not find.
        streams: dict[tuple[int, str], dict[int, tuple[ExtentHeader, int]]] = {}
        damaged: list[int] = []
        for extent in range(found.count):
            self._file.read_into(found.start(extent), block)
            header = extents.read_header(block.tobytes())
            if header is None and block.any():
                damaged.append(extent)
            if header is not None:
                self._sequence = max(self._sequence, header.sequence)
                pieces = streams.setdefault((header.sequence, header.key), {})
                pieces[header.number] = header, extent
        for (sequence, key), pieces in sorted(streams.items()):
            headers = tuple(pieces[number][0] for number in sorted(pieces))
            if _is_whole(headers, found):
                ref = BundleRef(key, sum(one.nbytes for one in headers), headers[-1].crc32c)
                taken = tuple(pieces[number][1] for number in sorted(pieces))
                self._held[key] = _Held(ref, sequence, taken, headers, is_complete=True)
        self._require_division(found)
        self._check_newest()
        if damaged:
            events.warn(
                f"{self.path}: expected intact headers in all extents, found {damaged} damaged; "
                "their contents are lost, unless they were being written when the power failed"
            )

    def _read_division(self) -> ExtentDivision:
        block = self._buffer[:BLOCK_BYTES]
        self._file.read_into(0, block)
        return extents.read_division(block.tobytes(), posix.object_name(self.path))

    def _require_division(self, found: ExtentDivision) -> None:
        if found != self._division:
            held = f", which hold {len(self._held)} saves" if self._held else ""
            raise OptionError(
                f"{self.path}: expected {self._shown()}, as Extents specifies, found {found.count} "
                f"extents of {found.extent_bytes:,} bytes{held}; set "
                f"nbytes={found.count * found.extent_bytes} and "
                f"extent_bytes={found.extent_bytes}, or remove it once none of them is needed"
            )

    def _check_newest(self) -> None:
        """Drops the bundle that the previous process was writing when it ended, if it is torn."""
        for held in [one for one in self._held.values() if one.sequence == self._sequence]:
            try:
                buffer = self._buffer_for(held)
                for number in range(len(held.headers)):
                    self._read_payload(held, buffer, number)
            except Damaged:
                self._let_go([held])

    def _buffer_for(self, held: _Held) -> np.ndarray:
        return aligned_buffer(max(header.nbytes for header in held.headers))

    def _read_payload(self, held: _Held, buffer: np.ndarray, number: int) -> memoryview:
        """Reads and verifies the payload of an extent of a bundle."""
        header, extent = held.headers[number], held.extents[number]
        payload = buffer[: header.nbytes]
        at = self._division.start(extent) + BLOCK_BYTES
        self._file.read_into(at, buffer[: _in_blocks(header.nbytes)])
        crc = crc32c(payload, held.headers[number - 1].crc32c if number else 0)
        if crc != header.crc32c:
            raise Damaged(
                f"{posix.object_name(self.path)}, extent {extent}",
                f"piece {number} of {header.key}, crc32c {header.crc32c:08x}",
                f"{crc:08x}",
            )
        return payload.data

    def _free_extents(self, ref: BundleRef) -> tuple[int, ...]:
        taken = {extent for held in self._held.values() for extent in held.extents}
        free = [extent for extent in range(self._division.count) if extent not in taken]
        needed = self._division.extents(ref.nbytes)
        if needed > len(free):
            room = self._division.extent_bytes
            raise OutOfSpace(
                f"{self.path}: expected {needed * room:,} free bytes for {ref.key} of "
                f"{ref.nbytes:,}, found {len(free) * room:,} free and {len(taken) * room:,} "
                f"held by {len(self._held)} saves; let the upload catch up, or increase "
                "Extents.nbytes"
            )
        return tuple(free[:needed])

    def _write(self, bundle: Bundle, held: _Held) -> None:
        headers: list[ExtentHeader] = []
        start, crc = 0, 0
        for number, extent in enumerate(held.extents):
            nbytes = min(self._division.payload_bytes, held.ref.nbytes - start)
            at = self._division.start(extent)
            crc, last = self._write_payload(bundle, start, nbytes, at + BLOCK_BYTES, crc)
            start += nbytes
            if start == held.ref.nbytes:
                bundles.require_crc32c(held.ref, crc)
            header = ExtentHeader(
                held.sequence, number, len(held.extents), nbytes, crc, held.ref.key
            )
            headers.append(header)
            # Written together with the payload if that is one piece.
            self._write_header(at, header, behind=last)
        self._file.sync(metadata=False)
        held.headers = tuple(headers)

    def _write_payload(
        self, bundle: Bundle, start: int, nbytes: int, at: int, crc: int
    ) -> tuple[int, int]:
        """Writes what the buffer cannot hold; returns the CRC32C and the bytes left there."""
        room = self._buffer[BLOCK_BYTES:]
        for offset in range(0, nbytes, len(room)):
            piece = room[: min(len(room), nbytes - offset)]
            bundle.read_into(start + offset, piece.data)
            crc = crc32c(piece, crc)
            padded = room[: _in_blocks(len(piece))]
            padded[len(piece) :] = 0
            if nbytes <= len(room):
                return crc, len(padded)
            self._file.write(at + offset, padded)
        return crc, 0

    def _write_header(self, at: int, header: ExtentHeader, behind: int = 0) -> None:
        block = extents.header_block(header)
        self._buffer[:BLOCK_BYTES] = np.frombuffer(block, np.uint8)
        self._file.write(at, self._buffer[: BLOCK_BYTES + behind])

    def _let_go(self, many: Collection[_Held]) -> None:
        # Keep the highest number, which may be recorded nowhere else: a number must not be reused.
        gone = ExtentHeader(self._sequence, 0, 0, 0, 0, "")
        for held in many:
            self._write_header(self._division.start(held.extents[0]), gone)
        if many:
            self._file.sync(metadata=False)
        for held in many:
            del self._held[held.ref.key]

    def _shown(self) -> str:
        return f"{self._division.count} extents of {self._division.extent_bytes:,} bytes"


@dataclasses.dataclass
class _Held:
    """A bundle, and its extents in the order of its pieces; complete once it is durable."""

    ref: BundleRef
    sequence: int
    extents: tuple[int, ...]
    headers: tuple[ExtentHeader, ...] = ()
    is_complete: bool = False


def _is_whole(headers: tuple[ExtentHeader, ...], division: ExtentDivision) -> bool:
    """Whether the headers are complete, in order and of one bundle."""
    most = division.payload_bytes
    return (
        {header.pieces for header in headers} == {len(headers)}
        and [header.number for header in headers] == [*range(len(headers))]
        and all(header.nbytes == most for header in headers[:-1])
        and headers[-1].nbytes <= most
    )


def _make(directory: Path, division: ExtentDivision) -> None:
    making = directory / _MAKING
    try:
        with posix.typed_errors(
            making,
            f"allocate {division.nbytes:,} bytes for extents",
            full="make room, or set a smaller Extents.nbytes",
        ):
            # Left by an interrupted start.
            making.unlink(missing_ok=True)
            with contextlib.closing(DirectFile(making, private=True)) as file:
                os.posix_fallocate(file.descriptor, 0, division.nbytes)
                _fill(file, division)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    DurableDir(directory).publish(making, directory / FILE)


def _fill(file: DirectFile, division: ExtentDivision) -> None:
    """Writes the file once: a first write to allocated space still changes file system metadata."""
    zeros = aligned_buffer(_PIECE_BYTES)
    for start in range(BLOCK_BYTES, division.nbytes, len(zeros)):
        file.write(start, zeros[: division.nbytes - start])
    zeros[:BLOCK_BYTES] = np.frombuffer(extents.division_block(division), np.uint8)
    file.write(0, zeros[:BLOCK_BYTES])
    file.sync(metadata=False)


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
