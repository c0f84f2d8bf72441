# SPDX-License-Identifier: Apache-2.0
"""The files of one save on their way to the disk: digested from memory, forced together at the end.

Forcing 22 files one after the other takes 108 to 295 ms, by eight threads at the end 14. Chunks go
past the page cache: beside a training loop on two cores 60 MB written by O_DIRECT cost 2.6 ms of
training, buffered 15 to 54. Descriptors stay open until their files are forced, so that no write
error is lost.

What is written directly lies in aligned memory that forked children share: ``aligned_buffer``.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import resource
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from deltackpt.errors import StorageError
from deltackpt.resources.memory import ALIGNMENT, aligned_buffer, is_aligned
from deltackpt.resources.pace import Pace
from deltackpt.resources.workers import FORCERS, drain
from deltackpt.storage import aligned, digests, files
from deltackpt.storage.crc import BLOCK_BYTES, CRC_BYTES, ChunkSums, crc32c, joined
from deltackpt.storage.digests import Digest

#: What is written at once; a multiple of blocks and of every alignment that is used.
_PIECE_BYTES = 4 << 20
#: Files of fewer bytes go through the page cache.
_DIRECT_BYTES = 128 << 10
#: A new file, which nobody else has made.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_T = TypeVar("_T")
_own = threading.local()


class FileBatch:
    """New files below one directory; thread-safe but for ``force`` and ``close``."""

    def __init__(
        self,
        top: Path,
        *,
        fsync: bool,
        pool: concurrent.futures.Executor | None = None,
        descriptors: int | None = None,
        pace: Pace | None = None,
    ):
        """Begins an empty one.

        Args:
          top: existing directory; digests name files below it.
          fsync: whether ``force`` forces anything.
          pool: threads that force files; the calling one by default.
          descriptors: most files that stay open; a quarter of the process's limit by default.
          pace: of what is written; as fast as the disk takes it by default.
        """
        self.top = top
        #: Of what is written; whoever writes files to be adopted takes from it too.
        self.pace = pace or Pace()
        #: Path below ``top`` to the digest of each file that was written so far.
        self.digests: dict[str, Digest] = {}
        self._fsync = fsync
        self._pool = pool
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._budget = descriptors or max(1, limit // 4)
        self._lock = threading.Lock()
        #: Files that are open until they are forced, in the order in which they were written.
        self._open: dict[Path, int] = {}
        #: Files that others wrote and closed.
        self._closed: dict[Path, None] = {}
        self._directories: dict[Path, None] = {}
        self._direct = True

    def make(self, directory: Path) -> None:
        """Makes a directory, and what is missing between it and ``top``.

        Raises:
          StorageError: the store refused.
        """
        missing = []
        with self._lock, files.typed_errors(directory, "make a directory"):
            while directory != self.top and directory not in self._directories:
                missing.append(directory)
                directory = directory.parent
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                self._directories[folder] = None

    def write(self, path: Path, data: bytes, *, whole: bool = False) -> None:
        """Writes a file; its directory was made.

        Args:
          path: the file.
          data: its contents.
          whole: whether other processes, who look for it, must not see it before it is whole and
            forced; its name is forced later.

        Raises:
          StorageError: the store refused, or something has that name.
        """
        contents = np.frombuffer(data, np.uint8)
        with files.typed_errors(path, "write"):
            if whole:
                self._write_whole(path, contents)
            elif len(data) < _DIRECT_BYTES:
                self.pace.take(len(data))
                with self._new(path) as descriptor:
                    aligned.write_all(descriptor, contents, 0)
            else:
                self._write_pieces(path, _Pieces(contents))
        self._note(path, digests.digest_bytes(data))

    def below(self, directory: Path, *, relative_to: Path) -> dict[str, Digest]:
        """Digests of what was written below a directory, by posix path below another."""
        prefix, cut = f"{self._name(directory)}/", len(self._name(relative_to))
        return {
            name[cut:].lstrip("/"): digest
            for name, digest in list(self.digests.items())
            if name.startswith(prefix)
        }

    def write_chunk(
        self, path: Path, rows: np.ndarray, padding: int = 0, *, held: bool = False
    ) -> ChunkSums:
        """Writes an uncompressed chunk of a Zarr v3 array: its rows, zeros and the CRC32C of both.

        Args:
          path: the file; its directory was made.
          rows: contiguous; written from where they are if they are aligned.
          padding: bytes of zeros after them.
          held: whether others might change them meanwhile, which is found.

        Raises:
          StorageError: the store refused, something has that name, or the rows changed.
        """
        chunk = _Chunk(rows.reshape(-1).view(np.uint8), padding)
        with files.typed_errors(path, "write"):
            self._write_pieces(path, chunk)
        if held and chunk.crc_again() != chunk.crc:
            raise StorageError(
                f"{path}: expected the rows that were there when its checksum was taken, found "
                "others: the arrays changed while they were written; do not write into numpy "
                'leaves, nor donate with base_snapshot="hold", before the save has released them. '
                "Nothing was committed"
            )
        sums = chunk.sums()
        self._note(path, Digest(chunk.nbytes, sums.crc32c, sums.crc32c, sums.blocks))
        return sums

    def adopt(self, directory: Path, *, but: Collection[Path] = ()) -> int:
        """Takes over the files below a directory that others wrote and closed, and reads them.

        Args:
          directory: where; what this batch wrote itself is left as it is.
          but: directories below it that are left out.

        Returns:
          The bytes of the files that were taken over.

        Raises:
          StorageError: one cannot be read.
        """
        nbytes = 0
        for top, folders, names in os.walk(directory):
            folder = Path(top)
            folders[:] = [name for name in folders if folder / name not in but]
            self._directories[folder] = None
            for name in names:
                if self._name(folder / name) not in self.digests:
                    nbytes += self.adopt_file(folder / name)
        return nbytes

    def adopt_file(self, path: Path) -> int:
        """As ``adopt``, of one file."""
        digest = digests.digest_file(path)
        with self._lock:
            self.digests[self._name(path)] = digest
            self._closed[path] = None
        return digest.length

    def remove(self, directory: Path) -> None:
        """Removes a directory again, with all that was written below it.

        Raises:
          StorageError: the store refused.
        """
        prefix = f"{self._name(directory)}/"
        with self._lock:
            for path in [path for path in self._open if path.is_relative_to(directory)]:
                _close_quietly([self._open.pop(path)])
            for paths in (self._closed, self._directories):
                for path in [path for path in paths if path.is_relative_to(directory)]:
                    del paths[path]
            for name in [name for name in self.digests if name.startswith(prefix)]:
                del self.digests[name]
        with files.typed_errors(directory, "be removed"):
            shutil.rmtree(directory)

    def force(self) -> None:
        """Forces all files, then all directories and ``top``; afterwards the batch is empty.

        Raises:
          StorageError: one of them, which is named, could not be forced.
        """
        opened, self._open = self._open, {}
        closed, self._closed = self._closed, {}
        directories, self._directories = self._directories, {}
        try:
            if self._fsync:
                self._each(_force, [*opened.items(), *((path, None) for path in closed)])
                self._each(_force, [(path, None) for path in (*directories, self.top)])
        except BaseException:
            _close_quietly(opened.values())
            raise
        _close_all(opened)

    def close(self) -> None:
        """Gives up what was not forced."""
        while self._open:
            _close_quietly([self._open.popitem()[1]])

    def _name(self, path: Path) -> str:
        """Posix path below the top, "" of that itself."""
        return str(path)[len(str(self.top)) + 1 :]

    def _note(self, path: Path, digest: Digest) -> None:
        self.digests[self._name(path)] = digest

    @contextlib.contextmanager
    def _new(self, path: Path, flags: int = 0) -> Iterator[int]:
        """A new file, to be forced later; it is removed again where the context fails."""
        descriptor = self._made(path, flags)
        try:
            yield descriptor
        except BaseException:
            _close_quietly([descriptor])
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if not self._fsync:
            os.close(descriptor)
            return
        early = None
        with self._lock:
            self._open[path] = descriptor
            if len(self._open) > self._budget:
                oldest = next(iter(self._open))
                early = oldest, self._open.pop(oldest)
        if early is not None:
            try:
                _force(early)
            except BaseException:
                _close_quietly([early[1]])
                raise
            _close_all(dict([early]))

    def _made(self, path: Path, flags: int = 0) -> int:
        descriptor = os.open(path, _NEW | flags, 0o666)
        with self._lock:
            # Once more, where it was forced before there was this name in it.
            if path.parent != self.top:
                self._directories[path.parent] = None
        return descriptor

    def _write_whole(self, path: Path, data: np.ndarray) -> None:
        """A file that has its name only once its contents are on disk, for who finds it there."""
        aside = path.with_name(f".{path.name}.tmp")
        descriptor = self._made(aside)
        try:
            try:
                aligned.write_all(descriptor, data, 0)
                if self._fsync:
                    os.fsync(descriptor)
            except BaseException:
                _close_quietly([descriptor])
                raise
            os.close(descriptor)
            os.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise

    def _write_pieces(self, path: Path, pieces: _Pieces) -> None:
        """Past the page cache, if the file system allows it."""
        if not (self._direct and self._write_directly(path, pieces)):
            self._direct = False
            with self._new(path) as descriptor:
                for start, piece in pieces.pieces(direct=False):
                    self.pace.take(piece.nbytes)
                    aligned.write_all(descriptor, piece, start)

    def _write_directly(self, path: Path, pieces: _Pieces) -> bool:
        """Whether the file system took it; it refuses before it takes anything."""
        try:
            with self._new(path, os.O_DIRECT) as descriptor:
                aligned.check_alignment(descriptor)
                for start, piece in pieces.pieces(direct=True):
                    self.pace.take(piece.nbytes)
                    aligned.write_aligned(descriptor, piece, start)
                os.ftruncate(descriptor, pieces.nbytes)
        except OSError as error:
            if error.errno not in aligned.REFUSED:
                raise
            # Some file systems make the file before they refuse.
            path.unlink(missing_ok=True)
            return False
        return True

    def _each(self, action: Callable[[_T], None], items: Collection[_T]) -> None:
        if self._pool is None:
            for item in items:
                action(item)
            return
        left = collections.deque(items)
        # A hand-over costs more than many a file. All are waited for before the first error is
        # raised, so that descriptors may be closed.
        count = min(len(items), FORCERS)
        pending = [self._pool.submit(drain, left, action) for _ in range(count)]
        concurrent.futures.wait(pending)
        for future in pending:
            future.result()


class _Pieces:
    """The bytes of a file, in pieces to be written."""

    def __init__(self, data: np.ndarray):
        self._data = data
        #: Of the file.
        self.nbytes = data.nbytes

    def pieces(self, *, direct: bool) -> Iterator[tuple[int, np.ndarray]]:
        """Where each begins, and its bytes, valid until the next: aligned ones for direct writes.

        The last direct one is longer than the file: a multiple of the alignment.
        """
        data = self._data
        in_place = not direct or is_aligned(data)
        for start in range(0, self.nbytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, self.nbytes - start)
            stop, end = start + length, start + -(-length // ALIGNMENT) * ALIGNMENT
            if in_place and (end if direct else stop) <= data.nbytes:
                piece = data[start:stop]
                self._passed(start, piece)
            else:
                piece = _bounce()[: end - start]
                given = data[start:stop]
                piece[: len(given)] = given
                piece[len(given) :] = 0
                self._passed(start, piece[:length])
            yield start, piece if direct else piece[:length]

    def _passed(self, start: int, piece: np.ndarray) -> None:
        """Told of each piece before it is written, in order; may change what is behind the data."""


class _Chunk(_Pieces):
    """A chunk's file: data, zeros and the CRC32C of both, which is taken on the way."""

    def __init__(self, data: np.ndarray, padding: int):
        super().__init__(data)
        self._padding = padding
        self.nbytes = data.nbytes + padding + CRC_BYTES
        self.crc = 0
        self._blocks: list[int] = []

    def _passed(self, start: int, piece: np.ndarray) -> None:
        if start == 0:
            self.crc, self._blocks = 0, []
        total = self.nbytes - CRC_BYTES
        self._sum(piece[: max(0, total - start)])
        if (stop := start + len(piece)) > total:
            # The checksum, which may begin in the piece before.
            crc = np.frombuffer(self.crc.to_bytes(CRC_BYTES, "little"), np.uint8)
            first = max(0, total - start)
            piece[first:] = crc[start + first - total : stop - total]

    def _sum(self, data: np.ndarray) -> None:
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            own = crc32c(block)
            self._blocks.append(own)
            if len(block) == BLOCK_BYTES:
                self.crc = joined(self.crc, own, BLOCK_BYTES)
            else:
                self.crc = crc32c(block, self.crc)

    def sums(self) -> ChunkSums:
        return ChunkSums(self.crc, np.array(self._blocks, "<u4").tobytes())

    def crc_again(self) -> int:
        """The CRC32C of what the memory holds now."""
        crc = crc32c(self._data)
        for start in range(0, self._padding, BLOCK_BYTES):
            crc = crc32c(np.zeros(min(BLOCK_BYTES, self._padding - start), np.uint8), crc)
        return crc


def _bounce() -> np.ndarray:
    """Aligned memory of this thread for one piece."""
    found: tuple[int, np.ndarray] | None = getattr(_own, "bounce", None)
    if found is None or found[0] != os.getpid():
        # A forked child shares that of the thread that forked.
        found = _own.bounce = os.getpid(), aligned_buffer(_PIECE_BYTES)
    return found[1]


def _close_all(opened: Mapping[Path, int]) -> None:
    """Closes files; some file systems say only then that a write was lost.

    Raises:
      StorageError: one of them, which is named, could not be closed; all of them are.
    """
    left = dict(opened)
    try:
        while left:
            path, descriptor = left.popitem()
            with files.typed_errors(path, "close"):
                os.close(descriptor)
    finally:
        _close_quietly(left.values())


def _close_quietly(descriptors: Iterable[int]) -> None:
    """Closes what was given up: another error is on its way, or nobody needs the file."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _force(item: tuple[Path, int | None]) -> None:
    path, descriptor = item
    with files.typed_errors(path, "force to disk"):
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if descriptor is None else descriptor
        try:
            files.fsync(own)
        finally:
            if descriptor is None:
                os.close(own)
