# SPDX-License-Identifier: Apache-2.0
"""Reads layers: the trailer and the footer first, then only the chunks that are needed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from deltackpt.errors import Damaged, OptionError
from deltackpt.format.records import MOST
from deltackpt.format.row_blocks import StoredRows, row_slice, rows_of
from deltackpt.layers import footer
from deltackpt.layers.footer import (
    GAPS,
    PAGE_BYTES,
    TRAILER_BYTES,
    Chunk,
    Header,
    LayerArray,
    LayerManifest,
    RowGroup,
)
from deltackpt.resources import host_memory
from deltackpt.storage import arrays
from deltackpt.storage.store import FileStore, StorePath

#: Read at once from the end of a layer: the footer of a layer with some 1,000 chunks.
_TAIL_BYTES = 32 << 10
#: Chunks are read and verified in ranges of about this length.
_RANGE_BYTES = 16 << 20
_FILE_RUN_BYTES = 4 << 20


class ByteSource(Protocol):
    """Random access to the bytes of a file, an object or memory."""

    @property
    def name(self) -> str:
        """Returns its name in errors."""
        ...

    @property
    def run_bytes(self) -> int:
        """Returns how many bytes to read at once, which are then verified."""
        ...

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Fills buffers in order with the bytes from ``start`` on: one range of an object store.

        Raises Damaged if the source does not exist or is shorter, and StorageError.
        """


class StoredBytes:
    """A file or an object of a store; see ``ByteSource``."""

    def __init__(self, at: StorePath):
        """Reads nothing yet."""
        self._store, self._key = at
        self.name = at.shown()
        # Shorter runs from files: a run is verified while its bytes are in the CPU cache.
        self.run_bytes = _FILE_RUN_BYTES if isinstance(at.store, FileStore) else _RANGE_BYTES

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """See ``ByteSource``."""
        with arrays.unreadable_is_damage(self.name, "a layer file"):
            self._store.read_into(self._key, start, buffers)


class LayerReader:
    """A layer whose footer is verified; everything else is verified when it is read.

    Reading raises StorageError, and Damaged with the name of the part that is altered or missing.
    """

    def __init__(
        self,
        source: ByteSource,
        nbytes: int,
        *,
        start: int = 0,
        digest: int | None = None,
        name: str = "",
        at_once: bool = False,
    ):
        """Reads and verifies the footer, usually with one range.

        ``start`` and ``nbytes`` are the layer's in the source: stores without suffix ranges cannot
        find its end. ``digest`` is the expected one, if known; ``name`` is the layer's in errors.
        ``at_once`` reads the whole layer with one range; each chunk is still verified.
        """
        self._source, self.start, self.nbytes = source, start, nbytes
        #: Whether the layer is read as a whole, and its bytes once it was.
        self._at_once = at_once
        self._loaded: np.ndarray | None = None
        self._verified: set[Chunk] = set()
        self._name = name or source.name
        trailer, data = self._read_tail(digest)
        self.digest = trailer.digest
        self.manifest: LayerManifest = footer.manifest_of(trailer, data, self._name)
        self._seed = self.manifest.seed
        self._arrays: dict[str, dict[str, LayerArray]] = {
            group.name: {} for group in self.manifest.row_groups
        }
        for array in self.manifest.arrays:
            self._arrays[array.row_group][array.name] = array
        self._starts = footer.starts_of(self.manifest, trailer.footer, self._name)
        #: Chunks of the arrays read so far, by row group and name.
        self._chunks: dict[tuple[str, str], list[Chunk]] = {}

    def at(self, source: ByteSource | None = None, *, at_once: bool = False) -> LayerReader:
        """Returns the same layer, which reads and verifies its chunks again.

        It reads them from ``source``, if given, which has the same bytes. ``at_once`` reads the
        whole layer when the first chunk is needed.
        """
        found = copy.copy(self)
        found._source = self._source if source is None else source
        found._verified = set()
        found._at_once, found._loaded = at_once, None
        return found

    def _whole(self, shown: str = "chunks") -> np.ndarray | None:
        """Returns all bytes of the layer; None if each chunk is read by itself."""
        if self._at_once and self._loaded is None:
            data = np.empty(self.nbytes, np.uint8)
            self._read(0, [data], shown)
            self._loaded = data
        return self._loaded

    def arrays(self, row_group: RowGroup) -> Mapping[str, LayerArray]:
        """Returns the arrays of a row group by name."""
        return self._arrays[row_group.name]

    def rows(self, row_group: RowGroup, first: int = 0, stop: int = MOST) -> StoredRows:
        """Returns the row indices in ``[first, stop)``; reads only the chunks around the range."""
        if row_group.ranges is not None:
            held = StoredRows(rows_of(row_group.ranges))
        else:
            held = self._read_rows(row_group, first, stop)
        found = row_slice(held.rows, first, max(first, stop))
        return StoredRows(held.rows[found], held.first + found.start)

    def chunks_of(self, array: LayerArray) -> Sequence[Chunk]:
        """Returns where the chunks of an array are."""
        key = array.row_group, array.name
        if key not in self._chunks:
            starts, places = self._starts, array.places
            self._chunks[key] = [Chunk(starts[at], at, at + size, crc) for at, size, crc in places]
        return self._chunks[key]

    def bytes_of(self, array: LayerArray) -> int:
        """Returns the stored bytes of an array."""
        return sum(one.stop - one.start for one in self.chunks_of(array))

    def read_into(self, array: LayerArray, start: int, stop: int, out: np.ndarray) -> None:
        """Reads elements ``[start, stop)`` of an array's first axis into ``out``, verified.

        ``out`` is (stop - start, *array.shape[1:]) of the stored dtype, contiguous; whole
        uncompressed chunks are read directly into it. After an error its contents are undefined.
        """
        _check_target(array, start, stop, out)
        if not out.nbytes:
            return
        target, size = out.reshape(-1).view(np.uint8), array.chunk_rows
        host_memory.populate(target)
        for batch in self._batches(array, start // size, (stop - 1) // size):
            wanted = [self._wanted(array, *one, start, stop, target) for one in batch]
            self._read_chunks(array, wanted)
            for one in wanted:
                if one.target is not None:
                    data = self._decoded(array, one)
                    one.target[:] = data[one.skipped : one.skipped + len(one.target)]

    def verify(self) -> None:
        """Verifies every byte of the layer."""
        for error in self.damage():
            raise error

    def verify_rest(self, row_groups: Collection[str]) -> None:
        """Reads and verifies the chunks of some row groups that were not read yet."""
        for array in self.manifest.arrays:
            if array.row_group in row_groups:
                for batch in self._batches(array, 0, array.chunk_count - 1):
                    unread = [one for one in batch if one[1] not in self._verified]
                    self._read_chunks(array, [_Wanted(*one, self._room(one[1])) for one in unread])

    def damage(self) -> Iterator[Damaged]:
        """Reads every byte of the layer, and yields what is altered or missing."""
        page = np.empty(PAGE_BYTES, np.uint8)
        try:
            self._read(0, [page], "header")
            if page.tobytes() != Header.from_manifest(self.manifest, self.nbytes).page():
                yield Damaged(f"{self._name}: header", "the header of its footer", "other bytes")
        except Damaged as error:
            yield error
        for array in self.manifest.arrays:
            for batch in self._batches(array, 0, array.chunk_count - 1):
                wanted = [_Wanted(*one, self._room(one[1])) for one in batch]
                try:
                    self._read_chunks(array, wanted)
                except Damaged:
                    yield from self._each_damaged(array, wanted)

    def _each_damaged(self, array: LayerArray, wanted: Sequence[_Wanted]) -> Iterator[Damaged]:
        for one in wanted:
            try:
                self._read_chunks(array, [one])
            except Damaged as error:
                yield error

    def _read_tail(self, digest: int | None) -> tuple[footer.Trailer, memoryview]:
        """Reads the footer; unverified except for the trailer's bounds."""
        nbytes, shown = self.nbytes, f"{self._name}: footer"
        if nbytes < 2 * PAGE_BYTES or nbytes % PAGE_BYTES:
            expected = f"a multiple of {PAGE_BYTES} bytes, at least {2 * PAGE_BYTES}"
            raise Damaged(shown, expected, f"{nbytes} bytes")
        tail = self._whole("footer")
        if tail is None:
            tail = np.empty(min(_TAIL_BYTES, nbytes - PAGE_BYTES), np.uint8)
            self._read(nbytes - len(tail), [tail], "footer")
        trailer = footer.trailer_of(tail[-TRAILER_BYTES:].data, nbytes, self._name)
        if digest is not None and digest != trailer.digest:
            raise Damaged(shown, f"crc32c {digest:08x}", f"crc32c {trailer.digest:08x}")
        missing = nbytes - trailer.footer - len(tail)
        if missing > 0:
            before = np.empty(missing, np.uint8)
            self._read(trailer.footer, [before], "footer")
            tail = np.concatenate([before, tail])
        return trailer, tail[len(tail) - (nbytes - trailer.footer) :].data

    def _read_rows(self, group: RowGroup, first: int, stop: int) -> StoredRows:
        """Decodes the chunks of row indices that may have some in a range."""
        below = sum(high < first for _, high in group.bounds)
        wanted = range(below, max(below, sum(low < stop for low, _ in group.bounds)))
        gaps = self._arrays[group.name][GAPS]
        start = min(wanted.start * gaps.chunk_rows, group.count)
        if not wanted:
            return StoredRows(np.empty(0, np.int64), start)
        end = min(wanted.stop * gaps.chunk_rows, group.count)
        held = np.empty(end - start, gaps.dtype)
        self.read_into(gaps, start, end, held)
        rows = held.astype(np.int64)
        for number in wanted:
            own = slice(number * gaps.chunk_rows - start, (number + 1) * gaps.chunk_rows - start)
            low, high = group.bounds[number]
            found = rows[own]
            found[0] += low
            np.cumsum(found, out=found)
            # Summing int64 cannot wrap back to ascending rows.
            if held[own][0] or found[-1] != high or not np.all(found[1:] > found[:-1]):
                shown = f"{self._name}: {_shown(gaps, number)}"
                raise Damaged(shown, f"ascending rows from {low} to {high}", "other gaps")
        return StoredRows(rows, start)

    def _batches(self, array: LayerArray, first: int, last: int) -> Iterator[_Batch]:
        """Yields chunks ``first`` to ``last`` with their numbers, in batches to read at once."""
        batch, nbytes = [], 0
        for number, chunk in enumerate(self.chunks_of(array)[first : last + 1], first):
            batch.append((number, chunk))
            nbytes += chunk.stop - chunk.start
            if nbytes >= self._source.run_bytes or number == last:
                yield batch
                batch, nbytes = [], 0

    def _wanted(
        self, array: LayerArray, number: int, chunk: Chunk, start: int, stop: int, out: np.ndarray
    ) -> _Wanted:
        """Where to read a chunk: directly into ``out``, the bytes of rows from ``start`` on."""
        row_bytes = array.row_bytes
        own, length = number * array.chunk_rows, array.chunk_length(number)
        low, high = max(start, own), min(stop, own + length)
        target = out[(low - start) * row_bytes : (high - start) * row_bytes]
        is_whole = high - low == length and len(target) == chunk.stop - chunk.offset
        if is_whole and not self._at_once:
            return _Wanted(number, chunk, target)
        return _Wanted(number, chunk, self._room(chunk), target, (low - own) * row_bytes)

    def _room(self, chunk: Chunk) -> np.ndarray:
        """Returns memory for a chunk, which already has its bytes if the layer is in memory."""
        if (whole := self._whole()) is not None:
            return whole[chunk.offset : chunk.stop]
        return np.empty(chunk.stop - chunk.offset, np.uint8)

    def _check(
        self, array: LayerArray, number: int, chunk: Chunk, padding: np.ndarray, data: np.ndarray
    ) -> None:
        found = footer.chunk_crc32c(self._seed, chunk.offset, padding, data)
        if found != chunk.crc32c:
            shown = f"{self._name}: {_shown(array, number)}"
            raise Damaged(shown, f"crc32c {chunk.crc32c:08x}", f"crc32c {found:08x}")
        self._verified.add(chunk)

    def _read_chunks(self, array: LayerArray, wanted: Sequence[_Wanted]) -> None:
        """Reads chunks, adjacent ones with one range, and verifies them."""
        if (whole := self._whole()) is not None:
            for one in wanted:
                padding = whole[one.chunk.start : one.chunk.offset]
                self._check(array, one.number, one.chunk, padding, one.data)
            return
        paddings = [np.empty(one.chunk.offset - one.chunk.start, np.uint8) for one in wanted]
        first = 0
        for number in range(1, len(wanted) + 1):
            is_next = number < len(wanted)
            if is_next and wanted[number].chunk.start == wanted[number - 1].chunk.stop:
                continue
            buffers = [
                buffer
                for one, padding in zip(wanted[first:number], paddings[first:number], strict=True)
                for buffer in (padding, one.data)
                if len(buffer)
            ]
            self._read(wanted[first].chunk.start, buffers, _shown(array, wanted[first].number))
            first = number
        for one, padding in zip(wanted, paddings, strict=True):
            self._check(array, one.number, one.chunk, padding, one.data)

    def _read(self, offset: int, buffers: Sequence[np.ndarray], shown: str) -> None:
        try:
            self._source.read_into(self.start + offset, [buffer.data for buffer in buffers])
        except Damaged as error:
            raise Damaged(f"{self._name}: {shown}", error.expected, error.found) from error

    def _decoded(self, array: LayerArray, one: _Wanted) -> np.ndarray:
        """The uncompressed bytes of a verified chunk."""
        shape = (array.chunk_length(one.number), *array.shape[1:])
        nbytes = shape[0] * array.row_bytes
        if len(one.data) == nbytes:
            return one.data
        shown = f"{self._name}: {_shown(array, one.number)}"
        planes = array.compression == "planes"
        rows = arrays.decompressed(one.data.data, shape, np.dtype(array.dtype), shown, planes)
        return rows.reshape(-1).view(np.uint8)


_Batch = list[tuple[int, Chunk]]


class _Wanted(NamedTuple):
    """A chunk to read into ``data``; its bytes from ``skipped`` on are then copied to a target."""

    number: int
    chunk: Chunk
    data: np.ndarray
    target: np.ndarray | None = None
    skipped: int = 0


def _shown(array: LayerArray, chunk: int) -> str:
    return f"row group {array.row_group!r}, array {array.name!r}, chunk {chunk}"


def _check_target(array: LayerArray, start: int, stop: int, out: np.ndarray) -> None:
    shape = stop - start, *array.shape[1:]
    is_target = out.shape == shape and out.dtype == array.dtype and out.flags.c_contiguous
    if not is_target or not 0 <= start <= stop <= array.shape[0]:
        raise OptionError(
            f"array {array.name!r}: expected rows within {array.shape[0]} and a contiguous target "
            f"of shape {shape}, {array.dtype}, found [{start}, {stop}) and {out.shape}, "
            f"{out.dtype.name}; pass such a target"
        )
