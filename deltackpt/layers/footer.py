# SPDX-License-Identifier: Apache-2.0
"""Records of a layer file: header, footer and trailer, and their checks. No I/O.

A layer is a header page, chunks, a footer with the manifest, and a trailer at the very end. Offsets
count from its first byte, so layers can be appended to a file, or embedded in one.
``docs/reference/format.md`` specifies the bytes.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import google_crc32c
import numpy as np

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.format import dtypes, naming, records
from deltackpt.format.manifest import SaveId
from deltackpt.format.records import (
    MOST,
    MOST_AXES,
    MOST_ZSTD_RATIO,
    InvalidRecord,
    check_save_id,
    require,
)
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.storage.digests import crc32c

if TYPE_CHECKING:
    from deltackpt.format.wal_format import EpochHeader

VERSION = 1
#: Required for row groups with constant codecs, which have no arrays.
TOMBSTONES = "tombstones"
#: Features that a reader must know to read a layer.
KNOWN_FEATURES: frozenset[str] = frozenset({TOMBSTONES})
#: Layers begin and end at multiples of it, as direct writes require.
PAGE_BYTES = 4096
TRAILER_BYTES = 64
CRC_BYTES = 4
_MOST_CRC = (1 << 32) - 1
#: Read at once.
MOST_MANIFEST_BYTES = 1 << 30
#: A chunk is preceded by fewer zero bytes.
MOST_PADDING = PAGE_BYTES - 1
#: Name of the array with the row indices of a row group that is not a few ranges.
GAPS = naming.GAPS
GAPS_DTYPES = ("uint8", "uint16", "uint32", "uint64")
#: Row group of arrays that were abandoned while they were written.
REMOVED = "removed"
#: What the footer records of each chunk.
CHUNK = np.dtype([("offset", "<u8"), ("nbytes", "<u8"), ("crc32c", "<u4")])

_HEADER_MAGIC, _TRAILER_MAGIC = b"dckplayr", b"dckptail"
#: Magic, version, CRC32C of the run id, sequence number, bytes of the layer, predecessor's digest.
_HEADER = struct.Struct("<8sIIQQI")
#: Magic, version, bytes of the layer, offset of the footer, bytes of the manifest.
_TRAILER = struct.Struct("<8sIQQQ")
_CRC = struct.Struct("<I")
_OFFSET = struct.Struct("<Q")
#: Fields of ``CHUNK``.
_PLACE = struct.Struct("<QQI")

#: Rows of tables and slots; blocks of dense leaves; the bytes of an item, each of them a row.
Kind = Literal["rows", "blocks", "item"]
#: How the chunks of an array are compressed: not at all, by zstd, or by zstd with their last axis
#: first. A chunk that would not shrink is stored uncompressed.
Compression = Literal["", "zstd", "planes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows with the same arrays; the name is unique in the layer.

    ``group`` is the virtual table of the rows. ``columns`` is the range of columns of fields as
    wide as the table, None for all. ``ranges`` are ascending; if None, the array ``rows.gaps`` has
    the row indices, and ``bounds`` the first and last row index of each of its chunks.
    """

    name: str
    group: str
    count: int
    kind: Kind = "rows"
    columns: tuple[int, int] | None = None
    ranges: tuple[tuple[int, int], ...] | None = None
    bounds: tuple[tuple[int, int], ...] = ()
    codecs: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerArray:
    """A stored array of a core dtype of Zarr v3; only its first axis is split into chunks.

    The first axis need not have one element per row of the row group. The last chunk may be shorter
    than ``chunk_rows``. ``chunks`` is ``CHUNK`` of each chunk.
    """

    row_group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    compression: Compression = ""
    chunks: bytes = b""

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Offset, bytes and CRC32C of each chunk."""
        return tuple(_PLACE.iter_unpack(self.chunks))

    @property
    def row_bytes(self) -> int:
        """Uncompressed bytes of one element of the first axis."""
        return math.prod(self.shape[1:]) * dtypes.itemsize_of(self.dtype)

    @property
    def chunk_count(self) -> int:
        """Number of chunks; 0 if the array has no bytes."""
        return -(-self.shape[0] // self.chunk_rows) if self.row_bytes else 0

    def chunk_length(self, number: int) -> int:
        """Returns the length of a chunk along the first axis."""
        return min(self.chunk_rows, self.shape[0] - number * self.chunk_rows)


def compression_of(entry: ArrayEntry) -> Compression:
    """Returns how the chunks of an array of a segment are compressed."""
    return "planes" if entry.byte_planes else "zstd" if entry.zstd else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochRef:
    """The WAL epoch whose header, of that CRC32C, describes what all its layers share."""

    number: int
    crc32c: int

    @classmethod
    def from_header(cls, head: EpochHeader, data: bytes | None = None) -> EpochRef:
        """Returns the reference to an epoch; ``data`` is its encoded header, if that is at hand."""
        if data is None:
            from deltackpt.format import wal_format  # Layers of steps do not need it.

            data = wal_format.epoch_header_bytes(head)
        return cls(number=head.epoch, crc32c=google_crc32c.value(data))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerManifest:
    """What a layer holds: one process's shard of a save or WAL record.

    ``parent`` is the save or record that relative codecs refer to, and that the rows were touched
    since; None for a base. ``sequence`` is the position among the layers of a WAL, and
    ``predecessor`` the digest of the previous one; both 0 without one. ``epoch`` and ``schema``
    (the head of a record, see ``format.wal_format``) are those of WAL records only.
    """

    save_id: SaveId
    parent: SaveId | None = None
    process: int = 0
    process_count: int = 1
    sequence: int = 0
    predecessor: int = 0
    epoch: EpochRef | None = None
    schema: bytes = b""
    row_groups: tuple[RowGroup, ...] = ()
    arrays: tuple[LayerArray, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """What checksums of chunks begin with, so that chunks of other layers do not match."""
        found = self.save_id
        identity = (found.run, found.step, found.attempt, self.process, self.sequence)
        return google_crc32c.value("/".join(map(str, identity)).encode())


class Header(NamedTuple):
    """The first page of a layer, which leads to the next one."""

    run_crc32c: int
    sequence: int
    nbytes: int
    predecessor: int

    @classmethod
    def from_manifest(cls, manifest: LayerManifest, nbytes: int) -> Header:
        """Returns the header of a layer, which follows from its manifest and length."""
        run = google_crc32c.value(manifest.save_id.run.encode())
        return cls(run, manifest.sequence, nbytes, manifest.predecessor)

    def page(self) -> bytes:
        """Returns the bytes of the header, ``PAGE_BYTES``."""
        fixed = _HEADER.pack(
            _HEADER_MAGIC, VERSION, self.run_crc32c, self.sequence, self.nbytes, self.predecessor
        )
        data = fixed.ljust(PAGE_BYTES - CRC_BYTES, b"\0")
        return data + _CRC.pack(google_crc32c.value(data))


class Trailer(NamedTuple):
    """The last bytes of a layer.

    ``footer`` is the offset of the footer, which begins with the manifest and ends with the
    trailer. ``digest`` is the CRC32C of the footer up to here, and thereby identifies the layer.
    """

    version: int
    footer: int
    manifest_bytes: int
    digest: int


class Chunk(NamedTuple):
    """The place of a chunk: its padding from ``start``, its data in ``[offset, stop)``."""

    start: int
    offset: int
    stop: int
    crc32c: int


def header_of(page: bytes | memoryview, name: str) -> Header | None:
    """Parses a header page; returns None if it is not one. Raises FormatTooNew."""
    if bytes(page[: len(_HEADER_MAGIC)]) != _HEADER_MAGIC:
        return None
    (crc,) = _CRC.unpack(page[-CRC_BYTES:])
    if google_crc32c.value(bytes(page[:-CRC_BYTES])) != crc:
        return None
    _, version, *fields = _HEADER.unpack(page[: _HEADER.size])
    _check_version(version, f"{name}: header")
    return Header(*fields)


def pages_with_headers(data: np.ndarray) -> list[int]:
    """Returns the offsets of pages that begin like a header; ``data`` is whole pages of uint8."""
    magic = np.frombuffer(_HEADER_MAGIC, np.uint8)
    pages = data.reshape(-1, PAGE_BYTES)[:, : len(magic)]
    return (np.flatnonzero((pages == magic).all(axis=1)) * PAGE_BYTES).tolist()


def footer_bytes(manifest: LayerManifest, footer: int) -> bytes:
    """Encodes the footer that begins at an offset: manifest, padding, trailer."""
    packed = records.packed(
        {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    )
    nbytes = -(-(footer + len(packed) + TRAILER_BYTES) // PAGE_BYTES) * PAGE_BYTES
    fixed = _TRAILER.pack(_TRAILER_MAGIC, VERSION, nbytes, footer, len(packed))
    data = packed.ljust(nbytes - footer - TRAILER_BYTES, b"\0")
    data += fixed.ljust(TRAILER_BYTES - CRC_BYTES, b"\0")
    return data + _CRC.pack(google_crc32c.value(data))


def trailer_of(data: bytes | memoryview, nbytes: int, name: str) -> Trailer:
    """Parses the trailer of a layer of ``nbytes``; its checksum is not verified. Raises Damaged."""
    shown = f"{name}: footer"
    magic, version, own, footer, manifest_bytes = _TRAILER.unpack(data[: _TRAILER.size])
    (digest,) = _CRC.unpack(data[-CRC_BYTES:])
    if magic != _TRAILER_MAGIC:
        raise Damaged(shown, "the trailer of a layer", f"{magic!r}")
    if own != nbytes:
        raise Damaged(shown, f"the trailer of {nbytes} bytes", f"that of {own}")
    padding = nbytes - TRAILER_BYTES - manifest_bytes - footer
    if manifest_bytes > MOST_MANIFEST_BYTES:
        raise Damaged(shown, f"at most {MOST_MANIFEST_BYTES} bytes", f"{manifest_bytes} bytes")
    if footer < PAGE_BYTES or not 0 <= padding <= MOST_PADDING:
        raise Damaged(
            shown, f"a manifest at the end of {nbytes} bytes", f"{manifest_bytes} at {footer}"
        )
    return Trailer(version, footer, manifest_bytes, digest)


def manifest_of(trailer: Trailer, data: bytes | memoryview, name: str) -> LayerManifest:
    """Parses and verifies a whole footer; raises Damaged or FormatTooNew."""
    shown = f"{name}: footer"
    found = google_crc32c.value(bytes(data[:-CRC_BYTES]))
    if found != trailer.digest:
        raise Damaged(shown, f"crc32c {trailer.digest:08x}", f"crc32c {found:08x}")
    _check_version(trailer.version, shown)
    record = bytes(data[: trailer.manifest_bytes])
    manifest = records.built(record, LayerManifest, name=shown, known_features=KNOWN_FEATURES)
    with records.as_damage(shown):
        _check(manifest)
    return manifest


def starts_of(manifest: LayerManifest, footer: int, name: str) -> dict[int, int]:
    """Returns a map from the offset of each chunk to that of the padding before it.

    Raises Damaged if they do not cover every byte between header and footer exactly once.
    """
    starts, end = {}, PAGE_BYTES
    for offset, nbytes, _ in sorted(one for array in manifest.arrays for one in array.places):
        if not end <= offset <= end + MOST_PADDING:
            break
        starts[offset], end = end, offset + nbytes
    else:
        if end == footer:
            return starts
    raise Damaged(f"{name}: footer", "chunks that cover the layer exactly", "gaps or overlaps")


def chunk_crc32c(seed: int, offset: int, padding: np.ndarray, data: np.ndarray) -> int:
    """Returns the checksum of a chunk at an offset in the layer, and of the padding before it.

    ``seed`` is ``LayerManifest.seed``; both arrays are contiguous uint8.
    """
    return crc32c(data, google_crc32c.extend(seed, _OFFSET.pack(offset) + padding.tobytes()))


def _check_version(version: int, shown: str) -> None:
    """Checks a version whose checksum is valid, so that it is not a flipped bit."""
    if version > VERSION:
        raise FormatTooNew(
            f"{shown}: expected layers of version {VERSION} or below, found {version}; install a "
            "newer deltackpt"
        )
    if version < 1:
        raise Damaged(shown, "version 1 or above", f"version {version}")


def _check(manifest: LayerManifest) -> None:
    for place, save_id in (("save_id", manifest.save_id), ("parent", manifest.parent)):
        if save_id is not None:
            check_save_id(save_id, place)
    for place, number, most in (
        ("sequence", manifest.sequence, MOST),
        ("predecessor", manifest.predecessor, _MOST_CRC),
    ):
        require(number <= most, f"at most {most}", number, place)
    process, count = manifest.process, manifest.process_count
    require(process < count, f"a process below {count}", process, "process")
    arrays: dict[str, dict[str, LayerArray]] = {group.name: {} for group in manifest.row_groups}
    names = [group.name for group in manifest.row_groups]
    require(len(arrays) == len(names), "different names", names, "row_groups")
    for array in manifest.arrays:
        try:
            _check_array(array)
            require(array.row_group in arrays, "a known row group", array.row_group, "row_group")
            own = arrays[array.row_group]
            require(array.name not in own, "another name", array.name, "name")
        except InvalidRecord as error:
            raise error.within(f"arrays.{records.shown(array.name)}") from None
        own[array.name] = array
    for group in manifest.row_groups:
        try:
            _check_rows(group, arrays[group.name].get(GAPS))
        except InvalidRecord as error:
            raise error.within(f"row_groups.{records.shown(group.name)}") from None


def _check_rows(group: RowGroup, gaps: LayerArray | None) -> None:
    require(group.count <= MOST, f"at most {MOST}", group.count, "count")
    columns = group.columns or (0, 0)
    require(columns[0] <= columns[1] <= MOST, "ascending columns", columns, "columns")
    if group.ranges is not None:
        spans, name = group.ranges, "ranges"
        require(gaps is None, f"no array {GAPS!r} with ranges", GAPS, "ranges")
        held = sum(stop - start for start, stop in spans)
        require(held == group.count, f"ranges of {group.count} rows", held, "ranges")
    else:
        # The bounds include the last row.
        spans, name = tuple((first, last + 1) for first, last in group.bounds), "bounds"
        fits = gaps is not None and gaps.shape == (group.count,) and gaps.dtype in GAPS_DTYPES
        require(fits, f"ranges, or an array {GAPS!r} of {group.count} gaps", gaps, "ranges")
        assert gaps is not None
        require(not gaps.compression, "uncompressed gaps", gaps.compression, "ranges")
        require(len(spans) == gaps.chunk_count, f"{gaps.chunk_count} bounds", len(spans), "bounds")
        for number, (start, stop) in enumerate(spans):
            rows = gaps.chunk_length(number)
            require(stop - start >= rows, f"at least {rows} rows", stop - start, "bounds")
    flat = [bound for span in spans for bound in span]
    ascending = flat == sorted(flat) and all(start < stop for start, stop in spans)
    require(ascending and (not flat or flat[-1] <= MOST), "ascending rows", spans, name)


def _check_array(array: LayerArray) -> None:
    require(array.dtype in dtypes.NUMPY_DTYPES, records.DTYPES, array.dtype, "dtype")
    require(0 < len(array.shape) <= MOST_AXES, records.AXES, array.shape, "shape")
    require(0 < array.chunk_rows <= MOST, "1 or more", array.chunk_rows, "chunk_rows")
    rows, row_bytes, count = array.shape[0], array.row_bytes, array.chunk_count
    if (rows or 1) * (row_bytes or 1) > MOST:
        raise InvalidRecord(f"at most {MOST} bytes", array.shape, "shape")
    if len(array.chunks) != count * _PLACE.size:
        expected = f"{count * _PLACE.size} bytes of chunks"
        raise InvalidRecord(expected, len(array.chunks), "chunks")
    if not count:
        return
    sizes = [nbytes for _, nbytes, _ in array.places]
    # The last chunk may be shorter.
    last = sizes.pop()
    _check_sizes(array, array.chunk_length(count - 1) * row_bytes, last, last)
    if sizes:
        _check_sizes(array, array.chunk_rows * row_bytes, min(sizes), max(sizes))


def _check_sizes(array: LayerArray, plain: int, low: int, high: int) -> None:
    """Checks the least and the most bytes of chunks that have ``plain`` bytes uncompressed."""
    least = -(-plain // MOST_ZSTD_RATIO) if array.compression else plain
    if not least <= low <= high <= plain:
        raise InvalidRecord(f"chunks of {plain} bytes", (low, high), "chunks")
