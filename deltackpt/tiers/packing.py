# SPDX-License-Identifier: Apache-2.0
"""Packs: the files of a save as one stream, for whatever holds whole saves near the stage.

A pack is a prefix of 16 bytes, a record that names the files with their digests, and the files end
to end. Its CRC32C follows from the digests, so that nothing is read to make one: it is read once,
by whoever takes it, in pieces of any length. Holders (extents, neighbours) know a pack by its
label alone; what is in it is known here, and every file is checked against its digest when it is
unpacked. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import re
import struct
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import manifest, names
from deltackpt.format.manifest import SaveId
from deltackpt.format.records import MOST_BYTES
from deltackpt.reading import inventory
from deltackpt.storage import crc, digests, files
from deltackpt.storage.digests import Digest, Streamed
from deltackpt.storage.store import Missing, spot
from deltackpt.tiers.stage import Line

_MAGIC = "deltackpt.pack"
_PREFIX = struct.Struct("<8sQ")
_PREFIX_MAGIC = b"dckpack1"
_KEY = re.compile(r"([0-9a-z]{1,64})\.(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.(\d{1,18})\.(\d{1,9})")
_PIECE_BYTES = 4 << 20


class Label(NamedTuple):
    """What a holder knows of a pack.

    Attributes:
      key: no other pack has it; ``PackName.key``.
      nbytes: of the whole stream.
      crc32c: of the whole stream.
    """

    key: str
    nbytes: int
    crc32c: int


class PackName(NamedTuple):
    """Which save a pack is of, and when it was made.

    Attributes:
      run: of the save.
      attempt: of the save.
      step: of the save.
      epoch: of the claim under which the run of the save began.
      era: how often training had gone back by then under that claim.
      part: of which process of several that have a stage each; else 0.
    """

    run: str
    attempt: int
    step: int
    epoch: int
    era: int
    part: int

    @property
    def key(self) -> str:
        """As a name of small letters, digits and points."""
        return ".".join(map(str, self))

    @property
    def save_id(self) -> SaveId:
        """Which save it is of."""
        return SaveId(self.run, self.step, self.attempt)

    @classmethod
    def of(cls, key: str) -> PackName | None:
        """The name in a key; None where it is another key."""
        match = _KEY.fullmatch(key)
        return cls(match[1], *(int(match[group]) for group in range(2, 7))) if match else None


class Reader(Protocol):
    """The bytes of a pack that is held somewhere."""

    def read_into(self, start: int, out: memoryview) -> None:
        """Fills ``out`` with the bytes from ``start`` on.

        Raises:
          Damaged: they are not those that were held.
          StorageError: they cannot be had.
        """
        ...


class Pack(Reader, Protocol):
    """A pack that is to be held; may be read by several threads."""

    @property
    def label(self) -> Label:
        """What it is known by."""
        ...


class Holder(Protocol):
    """Where packs are held near the stage.

    Attributes:
      name: what ``Restored.source`` says of saves that came from there.
    """

    name: str

    def labels(self) -> list[Label]:
        """Packs that can be had whole, as far as is known without reading them."""
        ...

    def reading(self, label: Label) -> AbstractContextManager[Reader]:
        """A pack, for as long as it is read.

        Raises:
          Damaged, StorageError: it cannot be had.
        """
        ...

    def hold(self, pack: Pack) -> None:
        """Takes a pack, which is safe there when this returns; to do it again changes nothing.

        Raises:
          StorageError: there is no room, or it is refused; nothing that was held is lost.
        """
        ...

    def drop(self, labels: Collection[Label]) -> None:
        """Lets packs go, for good; what is missing is fine."""
        ...

    def close(self) -> None:
        """Ends what is open; what is held stays."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What is in a pack.

    Attributes:
      save_id: the save.
      epoch: as in ``PackName``.
      era: as in ``PackName``.
      past: as in ``Line``, of the run of the save.
      root: its URL.
      holder: of the claim of that epoch: which of the roots that stood under the URL.
      part: as in ``PackName``.
      parts: how many there are.
      files: length, CRC32C and tail of each file, as in ``Digest``, by its path below the step; in
        the order of the stream.
    """

    save_id: SaveId
    epoch: int
    era: int
    past: dict[str, int]
    root: str
    holder: str
    part: int
    parts: int
    files: dict[str, tuple[int, int, int]]

    @property
    def name(self) -> PackName:
        """The name of the pack."""
        run, step, attempt = self.save_id.run, self.save_id.step, self.save_id.attempt
        return PackName(run, attempt, step, self.epoch, self.era, self.part)

    @property
    def line(self) -> Line:
        """That of the run of the save."""
        return Line(
            run=self.save_id.run,
            epoch=self.epoch,
            holder=self.holder,
            era=self.era,
            past=self.past,
        )


class FilePack:
    """A pack of the files of a step directory, which are read as they are asked for."""

    def __init__(self, step_dir: Path, contents: Contents):
        """Reads nothing.

        Args:
          step_dir: the step.
          contents: what it is; ``contents_of``.
        """
        record = manifest.to_bytes(contents, _MAGIC)
        self._step_dir = step_dir
        self._head = _PREFIX.pack(_PREFIX_MAGIC, len(record)) + record
        self._names = [*contents.files]
        lengths = (length for length, _, _ in contents.files.values())
        #: Where each file begins, and where the last one ends.
        self._starts = [*itertools.accumulate(lengths, initial=len(self._head))]
        total = crc.crc32c(np.frombuffer(self._head, np.uint8))
        for found in contents.files.values():
            total = crc.joined(total, whole_crc32c(Digest(*found)), found[0])
        self._label = Label(contents.name.key, self._starts[-1], total)

    @property
    def label(self) -> Label:
        """See ``Pack``."""
        return self._label

    def read_into(self, start: int, out: memoryview) -> None:
        """See ``Pack``.

        Raises:
          Missing: the step was removed meanwhile.
          Damaged: a file is shorter than its digest says.
        """
        if start < 0 or start + len(out) > self._label.nbytes:
            raise ValueError(f"{self._label.key}: bytes {start} to {start + len(out)} of a pack")
        if start < len(self._head):
            taken = min(len(self._head) - start, len(out))
            out[:taken] = self._head[start : start + taken]
            start, out = start + taken, out[taken:]
        number = bisect.bisect_right(self._starts, start) - 1
        while len(out):
            taken = min(self._starts[number + 1] - start, len(out))
            if taken:
                self._read_file(self._names[number], start - self._starts[number], out[:taken])
            start, out, number = start + taken, out[taken:], number + 1

    def _read_file(self, name: str, start: int, out: memoryview) -> None:
        path = self._step_dir / name
        try:
            with open(path, "rb", buffering=0) as file:
                while len(out):
                    count = os.preadv(file.fileno(), [out], start)
                    if count == 0:
                        shown = files.object_name(path)
                        raise Damaged(shown, f"{len(out)} more bytes", "its end")
                    start, out = start + count, out[count:]
        except FileNotFoundError as error:
            raise Missing(str(path)) from error
        except OSError as error:
            raise files.unreadable(path, error) from error


def contents_of(
    step_dir: Path,
    save_id: SaveId,
    item: str,
    *,
    line: Line,
    root: str,
    part: int = 0,
    parts: int = 1,
) -> Contents:
    """What a pack of a committed step has: every file of it, with its digest.

    Digests are those that the step's own records hold; files that no record knows, as those of
    foreign handlers, are read for it.

    Args:
      step_dir: the step, or what one process has of it.
      save_id: which save it is.
      item: name of our item.
      line: of the run of the save.
      root: as in ``Contents``.
      part: as in ``Contents``.
      parts: as in ``Contents``.

    Raises:
      Missing: the step was removed meanwhile.
      StorageError: it cannot be read.
    """
    if not step_dir.is_dir():
        raise Missing(str(step_dir), "no such step")
    known = inventory.read_inventory(step_dir, item, unreadable=True).files
    found: dict[str, tuple[int, int, int]] = {}
    for name in sorted(spot(step_dir).keys()):
        digest = known.get(name)
        if digest is None:
            digest = digests.digest_file(step_dir / name)
        found[name] = digest[:3]
    return Contents(
        save_id=save_id,
        epoch=line.epoch,
        era=line.era,
        past=line.past,
        root=root,
        holder=line.holder,
        part=part,
        parts=parts,
        files=found,
    )


def whole_crc32c(digest: Digest) -> int:
    """CRC32C of all bytes of a file, of a digest of it, which leaves the last four out."""
    tail = digest.tail.to_bytes(min(digest.length, crc.CRC_BYTES), "little")
    return crc.crc32c(np.frombuffer(tail, np.uint8), digest.crc32c)


def read_contents(reader: Reader, label: Label) -> tuple[Contents, int]:
    """What is in a pack that is held, and where its first file begins.

    Raises:
      Damaged: it is altered, or another pack.
      StorageError: it cannot be had.
    """
    prefix = bytearray(_PREFIX.size)
    if label.nbytes < len(prefix):
        raise Damaged(label.key, f"a pack of at least {len(prefix)} bytes", f"{label.nbytes} bytes")
    reader.read_into(0, memoryview(prefix))
    magic, length = _PREFIX.unpack(prefix)
    if magic != _PREFIX_MAGIC or length > min(label.nbytes - len(prefix), MOST_BYTES):
        raise Damaged(label.key, "the beginning of a pack", f"{bytes(prefix[:8])!r}, {length}")
    record = bytearray(length)
    reader.read_into(len(prefix), memoryview(record))
    found: Contents = manifest.from_bytes(bytes(record), Contents, name=label.key, magic=_MAGIC)
    start = len(prefix) + length
    # Names lead nowhere else: the check of records of digests is that of these.
    digests.digests_from(digests.digests_bytes(digests.Digests(found.files)), name=label.key)
    if found.name.key != label.key:
        raise Damaged(label.key, "the pack of that name", f"{found.name.key}")
    if start + sum(length for length, _, _ in found.files.values()) != label.nbytes:
        raise Damaged(label.key, f"{label.nbytes} bytes", "files of another length in all")
    return found, start


def unpack(reader: Reader, label: Label, folder: Path, *, fsync: bool) -> Contents:
    """Makes the files of a pack anew, each checked against its digest.

    Args:
      reader: the bytes of the pack.
      label: which pack.
      folder: where to; it is made, and nobody reads it before it has another name.
      fsync: whether all of it is on disk when this returns.

    Raises:
      Damaged: a byte is not what was packed.
      StorageError: it cannot be had, or not be written.
    """
    contents, start = read_contents(reader, label)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with files.typed_errors(folder, "unpack a save"):
        folder.mkdir(parents=True)
        for name, found in contents.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            streamed = Streamed()
            with open(path, "wb", buffering=0) as file:
                for offset in range(0, found[0], _PIECE_BYTES):
                    piece = buffer[: min(_PIECE_BYTES, found[0] - offset)]
                    reader.read_into(start + offset, piece)
                    streamed.add(piece)
                    _write(file.fileno(), piece)
                if fsync:
                    os.fsync(file.fileno())
            streamed.check(f"{label.key}/{name}", Digest(*found))
            start += found[0]
    if fsync:
        files.fsync_tree(folder, folders_only=True)
    return contents


def _write(descriptor: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(descriptor, piece) :]


def save_of(label: Label) -> SaveId | None:
    """Which save a pack is of; None of one that has another key than ours."""
    name = PackName.of(label.key)
    return None if name is None else name.save_id


def newest_first(labels: Collection[Label]) -> list[tuple[PackName, Label]]:
    """Packs with their names, the newest first; what has another key is none of ours."""
    named = [(name, label) for label in labels if (name := PackName.of(label.key)) is not None]
    return sorted(named, key=lambda one: (one[0].epoch, one[0].era, one[0].attempt), reverse=True)


def temporary_folder(folder: Path, step: str) -> Path:
    """Where a step is unpacked before it has its name; what a cut leaves is a leftover."""
    return folder / f"{step}{names.TEMPORARY}-recalled-{os.urandom(4).hex()}"
