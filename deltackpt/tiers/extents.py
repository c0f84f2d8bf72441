# SPDX-License-Identifier: Apache-2.0
"""Extents: packs in a file whose space was taken once, each durable by one ``fdatasync``.

The file is written from end to end when it is made, so that no later write allocates anything, and
divided into extents of one size. A pack takes as many as it needs of those that hold nothing, is
written into them past the page cache, and stands when all of its headers do. So what was held
before is never written over, and a pack that was torn is none: its sequence number is used once,
and its checksums say the rest. Only the newest can be torn, since each hold ends with its
``fdatasync``; that one is read when the file is opened.

What is dropped has the header of its first extent replaced, and forced, before its extents are
used again: it does not come back, whenever the power goes.

Measured on ext4, 10 MB: 27 ms and 3.8 ms of CPU with the disk for itself, where a directory of 20
files takes 39 and 13, and one write in place 27 and 0.9; beside a process that forces files 30, 178
and 38 ms (``benchmarks/extents.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from deltackpt.format.extents import BLOCK_BYTES, Division, Header
from deltackpt.ledger import locks
from deltackpt.resources.memory import aligned_buffer
from deltackpt.storage import files
from deltackpt.storage.aligned import BlockFile
from deltackpt.storage.crc import crc32c
from deltackpt.storage.store import Missing
from deltackpt.tiers.packing import Label, Pack

#: Of the file, of that of its lock, and of one that is being made.
FILE, _LOCK, _MAKING = "extents", "extents.lock", "extents.making"
#: What is written at once: most deltas by one write. While another process forced files 10 MB took
#: 41 ms so, in pieces of 2 MiB 56 (alone 27 and 25). Reading the next piece meanwhile, in another
#: thread, took 3 % less time for 200 MB and 23 % more CPU.
_PIECE_BYTES = 16 << 20
#: What has to fit beside each other: while a base and its deltas wait for the root, the next ones.
_BASES, _DELTAS = 2, 4


class ExtentFile:
    """A file of extents, as a holder of packs; thread-safe.

    It belongs to one process at a time. One pack is taken at a time, for which other calls wait.

    Attributes:
      name: see ``Holder``.
      path: the file.
    """

    name = "extents"

    def __init__(self, directory: Path, *, nbytes: int, extent_bytes: int = 64 << 20):
        """Opens the file, or makes it, which writes all of it once.

        Args:
          directory: where it is, or will be.
          nbytes: of all extents.
          extent_bytes: of each, with a header of 4 KiB; a multiple of that.

        Raises:
          InUse: another one has it open.
          OptionError: the file that is there is divided otherwise.
          OutOfSpace: there is no room for it.
          Damaged, FormatTooNew: the file that is there cannot be used.
          StorageError: the store refused.
        """
        self.path = directory / FILE
        self._division = Division(extent_bytes, nbytes // extent_bytes)
        self._lock = threading.Lock()
        self._buffer = aligned_buffer(BLOCK_BYTES + min(_PIECE_BYTES, extent_bytes - BLOCK_BYTES))
        #: By key, in the order in which they were taken.
        self._held: dict[str, _Held] = {}
        #: The newest of any header, so that none is used twice.
        self._sequence = 0
        refusal = InUse(
            f"{self.path}: expected no other trainer to use these extents, found one that does; "
            "give each its own Extents.directory, or end the other one and what it has forked"
        )
        files.make_durable(directory)
        with contextlib.ExitStack() as opened:
            opened.enter_context(locks.held(directory / _LOCK, refusal))
            if not self.path.exists():
                _make(directory, self._division)
            self._file = BlockFile(self.path)
            opened.callback(self._file.close)
            self._look()
            self._opened = opened.pop_all()
        self._closed = False

    @property
    def direct(self) -> bool:
        """Whether it is written past the page cache; else through it, which training feels."""
        return self._file.direct

    def require_room(self, base_bytes: int, delta_bytes: int) -> None:
        """Refuses to begin with a file that would be full before the root has what it holds.

        Args:
          base_bytes: of a packed base.
          delta_bytes: of a packed delta.

        Raises:
          OptionError: two bases and four deltas do not fit into it.
        """
        of_base, of_delta = map(self._division.extents, (base_bytes, delta_bytes))
        needed = _BASES * of_base + _DELTAS * of_delta
        if needed > self._division.count:
            raise OptionError(
                f"Extents.nbytes: expected at least {needed * self._division.extent_bytes:,} for "
                f"two bases of {base_bytes:,} bytes and four deltas of {delta_bytes:,} in extents "
                f"of {self._division.extent_bytes:,}, found {self._shown()}; remove {self.path} "
                "once nothing in it is needed, and give so many, or smaller extents"
            )

    def labels(self) -> list[Label]:
        """See ``Holder``; oldest first."""
        with self._used():
            return [held.label for held in self._held.values() if held.stands]

    @contextlib.contextmanager
    def reading(self, label: Label) -> Iterator[HeldPack]:
        """See ``Holder``; takes memory of one extent.

        Raises:
          Missing: it is not held.
        """
        with self._used():
            held = self._held.get(label.key)
        if held is None or not held.stands or held.label != label:
            raise Missing(f"{self.path}: {label.key}", "no such pack")
        yield HeldPack(self._file, self._division, held)

    def hold(self, pack: Pack) -> None:
        """See ``Holder``.

        Raises:
          OutOfSpace: too few extents hold nothing.
          Damaged: the bytes of the pack are not those of its label.
          TargetDiffers: another pack of that key is held.
          StorageError: the store refused.
        """
        label = pack.label
        with self._used():
            held = self._held.get(label.key)
            if held is not None and held.stands:
                if held.label != label:
                    raise TargetDiffers(
                        f"{self.path}: expected to hold {label}, found {held.label} under that "
                        "key; drop that one first"
                    )
                return
            if held is not None:
                self._let_go([held])
            self._sequence += 1
            # Not yet standing, and in need of being let go: an error does not say what is on disk.
            held = _Held(label, self._sequence, self._free_extents(label))
            self._held[label.key] = held
            try:
                self._write(pack, held)
            except BaseException:
                with contextlib.suppress(StorageError):
                    self._let_go([held])
                raise
            held.stands = True

    def drop(self, labels: Collection[Label]) -> None:
        """See ``Holder``; none of them comes back once this has returned.

        Raises:
          StorageError: the store refused; they are held still, those that were to be dropped.
        """
        with self._used():
            self._let_go([self._held[key] for key, _, _ in labels if key in self._held])

    def close(self) -> None:
        """See ``Holder``; another process may open it then."""
        with self._lock:
            self._closed = True
            self._opened.close()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.path}: expected it open, found it closed; open it anew")
            yield

    def _look(self) -> None:
        """Finds what is held."""
        block = self._buffer[:BLOCK_BYTES]
        shown = files.object_name(self.path)
        self._file.read_into(0, block)
        found = extents.read_division(block.tobytes(), shown)
        # What would be written over, or not be found, by another division.
        streams: dict[tuple[int, str], dict[int, tuple[Header, int]]] = {}
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
                label = Label(key, sum(one.nbytes for one in headers), headers[-1].crc32c)
                taken = tuple(pieces[number][1] for number in sorted(pieces))
                self._held[key] = _Held(label, sequence, taken, headers, stands=True)
        if found != self._division:
            raise OptionError(
                f"{self.path}: expected {self._shown()}, as Extents says, found "
                f"{found.count} extents of {found.extent_bytes:,} bytes, which hold "
                f"{len(self._held)} saves; give nbytes={found.count * found.extent_bytes} and "
                f"extent_bytes={found.extent_bytes}, or remove it once none of them is needed"
            )
        self._check_newest()
        if damaged:
            events.warn(
                f"{self.path}: expected headers in all extents, found those of {damaged} damaged: "
                "what was held there is lost, unless it was being written when the power went"
            )

    def _check_newest(self) -> None:
        """Lets the pack go that was being written when the one before this ended, if it is torn."""
        for held in [one for one in self._held.values() if one.sequence == self._sequence]:
            try:
                HeldPack(self._file, self._division, held).check()
            except Damaged:
                self._let_go([held])

    def _free_extents(self, label: Label) -> tuple[int, ...]:
        taken = {extent for held in self._held.values() for extent in held.extents}
        free = [extent for extent in range(self._division.count) if extent not in taken]
        needed = self._division.extents(label.nbytes)
        if needed > len(free):
            room = self._division.extent_bytes
            raise OutOfSpace(
                f"{self.path}: expected {needed * room:,} free bytes for {label.key} of "
                f"{label.nbytes:,}, found {len(free) * room:,} free and {len(taken) * room:,} "
                f"held by {len(self._held)} saves; let the root catch up, or give a greater "
                "Extents.nbytes"
            )
        return tuple(free[:needed])

    def _write(self, pack: Pack, held: _Held) -> None:
        headers: list[Header] = []
        start, crc = 0, 0
        for number, extent in enumerate(held.extents):
            nbytes = min(self._division.payload_bytes, held.label.nbytes - start)
            at = self._division.start(extent)
            crc, last = self._write_payload(pack, start, nbytes, at + BLOCK_BYTES, crc)
            start += nbytes
            if start == held.label.nbytes and crc != held.label.crc32c:
                raise Damaged(
                    held.label.key,
                    f"a pack of crc32c {held.label.crc32c:08x}",
                    f"{crc:08x}",
                    "its files were altered while they were read, or since they were written",
                )
            header = Header(held.sequence, number, len(held.extents), nbytes, crc, held.label.key)
            headers.append(header)
            # With the payload, where that is one piece.
            self._write_header(at, header, behind=last)
        self._file.force()
        held.headers = tuple(headers)

    def _write_payload(
        self, pack: Pack, start: int, nbytes: int, at: int, crc: int
    ) -> tuple[int, int]:
        """Writes a piece of a pack, but where it fits into the buffer leaves it in there.

        Returns:
          The checksum up to its end, and how many bytes are left in the buffer, behind the header.
        """
        room = self._buffer[BLOCK_BYTES:]
        for offset in range(0, nbytes, len(room)):
            piece = room[: min(len(room), nbytes - offset)]
            pack.read_into(start + offset, piece.data)
            crc = crc32c(piece, crc)
            padded = room[: _in_blocks(len(piece))]
            padded[len(piece) :] = 0
            if nbytes <= len(room):
                return crc, len(padded)
            self._file.write(at + offset, padded)
        return crc, 0

    def _write_header(self, at: int, header: Header, behind: int = 0) -> None:
        block = extents.header_block(header)
        self._buffer[:BLOCK_BYTES] = np.frombuffer(block, np.uint8)
        self._file.write(at, self._buffer[: BLOCK_BYTES + behind])

    def _let_go(self, many: Collection[_Held]) -> None:
        # Without its newest number, which might be the only trace of it, one would be used twice.
        gone = Header(self._sequence, 0, 0, 0, 0, "")
        for held in many:
            self._write_header(self._division.start(held.extents[0]), gone)
        if many:
            self._file.force()
        for held in many:
            del self._held[held.label.key]

    def _shown(self) -> str:
        return f"{self._division.count} extents of {self._division.extent_bytes:,} bytes"


class HeldPack:
    """The bytes of a pack that is held, as a ``Reader``; thread-safe.

    An extent is read whole into memory and checked there before any byte of it is given out, so
    that each is read once by whoever goes from the beginning to the end.
    """

    def __init__(self, file: BlockFile, division: Division, held: _Held):
        """Reads nothing yet."""
        self._file = file
        self._division = division
        self._held = held
        self._lock = threading.Lock()
        most = max(header.nbytes for header in held.headers)
        self._buffer = aligned_buffer(most)
        self._number: int | None = None

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Reader``."""
        label = self._held.label
        if start < 0 or start + len(out) > label.nbytes:
            raise ValueError(f"{label.key}: bytes {start} to {start + len(out)} of {label.nbytes}")
        with self._lock:
            while len(out):
                number, offset = divmod(start, self._division.payload_bytes)
                given = self._payload(number)[offset : offset + len(out)]
                out[: len(given)] = given.data
                start, out = start + len(given), out[len(given) :]

    def check(self) -> None:
        """Reads all of it.

        Raises:
          Damaged: it is not what was held.
          StorageError: it cannot be read.
        """
        with self._lock:
            for number in range(len(self._held.headers)):
                self._payload(number)

    def _payload(self, number: int) -> np.ndarray:
        header = self._held.headers[number]
        payload = self._buffer[: header.nbytes]
        if number == self._number:
            return payload
        self._number = None
        at = self._division.start(self._held.extents[number]) + BLOCK_BYTES
        self._file.read_into(at, self._buffer[: _in_blocks(header.nbytes)])
        crc = crc32c(payload, self._held.headers[number - 1].crc32c if number else 0)
        if crc != header.crc32c:
            raise Damaged(
                f"{files.object_name(self._file.path)}, extent {self._held.extents[number]}",
                f"piece {number} of {header.key}, crc32c {header.crc32c:08x}",
                f"{crc:08x}",
            )
        self._number = number
        return payload


@dataclasses.dataclass
class _Held:
    """A pack, and the extents that it takes.

    Attributes:
      label: of the pack.
      sequence: of its headers.
      extents: in the order of its pieces.
      headers: of them, once they are written.
      stands: whether it is all there, on disk.
    """

    label: Label
    sequence: int
    extents: tuple[int, ...]
    headers: tuple[Header, ...] = ()
    stands: bool = False


def _is_whole(headers: tuple[Header, ...], division: Division) -> bool:
    """Whether some headers, in order and of one stream, are all that it has."""
    counts = {header.pieces for header in headers}
    full = all(header.nbytes == division.payload_bytes for header in headers[:-1])
    return (
        counts == {len(headers)}
        and [header.number for header in headers] == [*range(len(headers))]
        and full
        and headers[-1].nbytes <= division.payload_bytes
    )


def _make(directory: Path, division: Division) -> None:
    """Makes the file, and takes all of its space by writing it."""
    making = directory / _MAKING
    try:
        with files.typed_errors(
            making,
            f"take {division.nbytes:,} bytes for extents",
            full="free space, or give a smaller Extents.nbytes",
        ):
            # What a start that was cut short has left.
            making.unlink(missing_ok=True)
            with open(making, "xb") as new:
                os.posix_fallocate(new.fileno(), 0, division.nbytes)
            _fill(making, division)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    files.rename(making, directory / FILE, fsync=True)


def _fill(path: Path, division: Division) -> None:
    """Writes it once: space that was never written is still a change of the file system's."""
    with contextlib.closing(BlockFile(path)) as file:
        zeros = aligned_buffer(_PIECE_BYTES)
        for start in range(BLOCK_BYTES, division.nbytes, len(zeros)):
            file.write(start, zeros[: division.nbytes - start])
        zeros[:BLOCK_BYTES] = np.frombuffer(extents.division_block(division), np.uint8)
        file.write(0, zeros[:BLOCK_BYTES])
        file.force()


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
