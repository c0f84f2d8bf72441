# SPDX-License-Identifier: Apache-2.0
"""Encodes values of the dense item relative to the parent, into segments of blocks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from deltackpt.codecs import StoredArray, of_blocks
from deltackpt.format import blocks, dense_blocks
from deltackpt.format.dense_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    PLAIN_BYTES_OF,
    BlockedValue,
    DenseBlocks,
    Key,
)
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.figures import LeafFigures
from deltackpt.format.manifest import RollingShare
from deltackpt.format.segments import ArrayEntry, Segment
from deltackpt.save import block_codes, device_blocks, leaf_parts
from deltackpt.save.block_codes import CodedBlocks, CodedLeaf
from deltackpt.save.dense_coding import Coding
from deltackpt.save.dense_references import Array, Decoded, Hashes
from deltackpt.storage import arrays, parts
from deltackpt.storage.parts import Place, StoredArrays

#: Leaves whose codec a record explains.
_MOST_REASONS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class TakenValue:
    """A captured value of the dense item.

    Attributes:
      key: key in Orbax's database, or a file's path in the item.
      file: whether it is a file.
      data: (blocks, 256) of the leaf's dtype, padded with zeros, in host memory or on its device;
        (n,) uint8 for a plain value.
      count: number of elements; for a plain value, of bytes.
      shape: shape of the chunk; None for a plain value that is not an array.
      coding: how to encode it.
      leaf: path of its leaf; empty without one.
    """

    key: str
    file: bool
    data: Array
    count: int
    shape: tuple[int, ...] | None
    dtype: np.dtype
    coding: Coding
    leaf: str = ""

    @property
    def plain(self) -> bool:
        """Returns whether it is stored as bytes."""
        return self.data.ndim == 1

    @property
    def array(self) -> np.ndarray:
        """Returns the chunk, or the bytes."""
        data = np.asarray(self.data)
        if self.shape is None:
            return data
        flat = data.reshape(-1)
        found = flat.view(self.dtype) if self.plain else flat[: self.count]
        return found.reshape(self.shape)


class CodedValue(NamedTuple):
    """An encoded value.

    Attributes:
      taken: the captured value.
      leaf: its blocks; None for a plain value.
      decoded: its decoded value, in the memory of ``taken``.
      changed: whether any of it is stored.
    """

    taken: TakenValue
    leaf: CodedLeaf | None
    decoded: Array
    changed: bool


def encode(
    values: Sequence[TakenValue],
    before: Decoded,
    pool: concurrent.futures.Executor,
    *,
    skip_unchanged: bool = True,
    hashes: Mapping[Key, Hashes] | None = None,
    rolling: RollingShare | None = None,
) -> list[CodedValue]:
    """Encodes values relative to the parent, each with its coding.

    Args:
      values: the values of one process.
      before: the decoded values of the parent; values not among them are stored whole.
      pool: runs the encoding.
      skip_unchanged: whether to omit unchanged values.
      hashes: hashes of leaves of the parent that are not in ``before``.
      rolling: the save's share of a rolling base.
    """
    found = []
    for value in values:
        key = value.file, value.key
        reference = before.get(key)
        if reference is not None and (
            reference.shape != value.data.shape or reference.dtype != value.data.dtype
        ):
            reference = None
        if value.plain:
            same = (
                skip_unchanged and reference is not None and bool((reference == value.data).all())
            )
            shared = rolling is not None and bool(leaf_parts.share_of(1, rolling, value.key))
            found.append(CodedValue(value, None, value.data, not same or shared))
            continue
        hashed = None if hashes is None or rolling is not None else hashes.get(key)
        leaf = _encoded(value, reference, hashed, rolling, pool, skip_unchanged)
        found.append(CodedValue(value, leaf, leaf.decoded, bool(leaf.pieces)))
    return found


def _encoded(
    value: TakenValue,
    reference: Array | None,
    hashed: Hashes | None,
    rolling: RollingShare | None,
    pool: concurrent.futures.Executor,
    skip_unchanged: bool,
) -> CodedLeaf:
    data, (codec, max_error) = value.data, value.coding
    there = reference is None or isinstance(reference, jax.Array)
    if isinstance(data, jax.Array) and there and rolling is None and hashed is None:
        return device_blocks.encode_leaf_there(
            data, reference, codec, max_error, pool, skip_unchanged=skip_unchanged
        )
    data = np.asarray(data)
    reference = None if reference is None else np.asarray(reference)
    parts = None
    if reference is not None and rolling is not None:
        parts = leaf_parts.with_share(data, reference, rolling, value.key)
    elif reference is None and hashed is not None:
        parts = leaf_parts.by_hashes(data, hashed)
    if parts is None:
        return block_codes.encode_leaf(
            data, reference, codec, max_error, pool, skip_unchanged=skip_unchanged
        )
    return leaf_parts.encode_parts(
        data, parts, codec, max_error, pool, skip_unchanged=skip_unchanged
    )


class WrittenDense(NamedTuple):
    """Encoded values that were written.

    Attributes:
      record: their record in the manifest.
      nbytes: total size of their files in bytes.
      leaves: figures of each leaf that this process has a part of.
    """

    record: DenseBlocks
    nbytes: int
    leaves: tuple[LeafFigures, ...]


class CodedDense:
    """Encoded values, ready to be written to a shard or a WAL record."""

    def __init__(self, values: Sequence[CodedValue]):
        """Takes those of one process, in the order of the item."""
        self.values = values
        described = [
            BlockedValue(
                key=one.taken.key,
                file=one.taken.file,
                dtype="uint8" if one.taken.plain else one.taken.data.dtype.name,
                count=one.taken.count,
                group=PLAIN if one.taken.plain else one.taken.data.dtype.name,
                at=None,
            )
            for one in values
        ]
        at, placed = 0, []
        for one, value in zip(values, described, strict=True):
            if value.plain and one.changed:
                value, at = dataclasses.replace(value, at=at), at + value.count
            placed.append(value)
        self._described = tuple(dense_blocks.laid_out(placed))

    def write(self, place_of: Callable[[str], Place]) -> DenseBlocks:
        """Writes the arrays of all segments.

        Args:
          place_of: returns the destination of a segment.
        """
        segments = list(self._plain(place_of))
        for (group, codec), pieces in sorted(self._by_codec().items()):
            place = place_of(f"{dense_blocks.SEGMENTS}{group}.{codec}")
            reason = self._reason(group, codec)
            segments.append(_written(place, group, codec, pieces, reason))
        return DenseBlocks(values=self._described, segments=tuple(segments))

    def told(self, record: DenseBlocks) -> WrittenDense:
        """Returns the values that ``write`` has written, with figures by leaf.

        The bytes of a segment are divided in proportion to those of its arrays before compression.

        Args:
          record: the result of ``write``.
        """
        on_disk = {
            (segment.group, encoding.codec): encoding.nbytes
            for segment in record.segments
            for encoding in segment.encodings
        }
        arrays_of = {
            place: max(1, sum(piece.nbytes for piece in pieces))
            for place, pieces in self._by_codec().items()
        }
        plain = sum(one.taken.count for one in self.values if one.changed and one.taken.plain)
        if plain:
            arrays_of[PLAIN, "raw"] = plain
        shares = {place: on_disk[place] / nbytes for place, nbytes in arrays_of.items()}
        by_leaf: dict[str, list[LeafFigures]] = {}
        for one in self.values:
            if one.taken.leaf:
                by_leaf.setdefault(one.taken.leaf, []).append(_figures(one, shares))
        leaves = tuple(LeafFigures.joined(found) for found in by_leaf.values())
        return WrittenDense(record, sum(on_disk.values()), leaves)

    def _reason(self, group: str, codec: str) -> str:
        """Lists leaves with another codec than requested, and why."""
        found = [
            f"{one.taken.leaf}: {one.leaf.reason}"
            for one, value in zip(self.values, self._described, strict=True)
            if one.leaf is not None and one.leaf.reason and value.group == group
            if any(piece.codec == codec for piece in one.leaf.pieces)
        ]
        told = "; ".join(dict.fromkeys(found[:_MOST_REASONS]))
        return told if len(found) <= _MOST_REASONS else f"{told}; and others"

    def _plain(self, place_of: Callable[[str], Place]) -> Iterator[Segment]:
        held = [
            np.asarray(one.taken.data) for one in self.values if one.changed and one.taken.plain
        ]
        if any(data.nbytes for data in held):
            yield write_plain(place_of, held, zstd=True)

    def _by_codec(self) -> dict[tuple[str, str], list[CodedBlocks]]:
        """Returns the pieces of each group and codec in order, with block indices in the group."""
        found: dict[tuple[str, str], list[CodedBlocks]] = {}
        for one, value in zip(self.values, self._described, strict=True):
            for piece in () if one.leaf is None else one.leaf.pieces:
                assert value.at is not None
                moved = piece._replace(blocks=piece.blocks + value.at)
                found.setdefault((value.group, piece.codec), []).append(moved)
        return found


def write_plain(
    place_of: Callable[[str], Place], held: Sequence[np.ndarray], *, zstd: bool
) -> Segment:
    """Writes the bytes of plain values.

    Args:
      place_of: returns the destination of a segment.
      held: (n,) uint8 each, not all empty.
      zstd: whether to compress them.
    """
    place = place_of(f"{dense_blocks.SEGMENTS}{PLAIN}")
    total = sum(data.nbytes for data in held)
    entry = arrays.array_entry(PLAIN_BYTES_OF, (total,), np.dtype(np.uint8), zstd=zstd)
    stored = parts.stored_field(
        PLAIN_BYTES_OF,
        parts.write_array(place, entry, [np.concatenate(held)]),
        codec="raw",
        reason="",
        bounds=np.array([0, total]),
    )
    return parts.stored_segment(place, PLAIN, (0, 1), range(total), StoredArrays((), 0), [stored])


def _figures(one: CodedValue, shares: Mapping[tuple[str, str], float]) -> LeafFigures:
    """Returns figures of one value.

    Args:
      one: the value.
      shares: group and codec to bytes on disk per byte before compression.
    """
    taken, leaf = one.taken, one.leaf
    if leaf is None:
        nbytes = round(taken.count * shares[PLAIN, "raw"]) if one.changed else 0
        return LeafFigures(
            taken.leaf, of_blocks.LOSSLESS, "", taken.count, nbytes, 1, int(one.changed), 0.0
        )
    group = taken.data.dtype.name
    return LeafFigures(
        leaf=taken.leaf,
        codec=leaf.codec,
        reason=leaf.reason,
        raw_bytes=taken.count * taken.data.itemsize,
        nbytes=round(sum(piece.nbytes * shares[group, piece.codec] for piece in leaf.pieces)),
        blocks=len(taken.data),
        changed_blocks=sum(len(piece.blocks) for piece in leaf.pieces),
        relative_error=leaf.error,
    )


def _written(
    place: Place, group: str, codec: str, pieces: Sequence[CodedBlocks], reason: str
) -> Segment:
    numbers = np.concatenate([piece.blocks for piece in pieces])
    rows: blocks.Rows = numbers
    if len(numbers) == numbers[-1] + 1 - numbers[0]:
        rows = range(int(numbers[0]), int(numbers[-1]) + 1)
    row_numbers = parts.write_rows(place, rows)
    written = []
    stored = of_blocks.get(codec).stored(dtype_of(group))
    for suffix, array in stored.items():
        held = [piece.arrays[suffix] for piece in pieces]
        written.append(parts.write_array(place, entry_of(suffix, array, held), held))
    field = parts.stored_field(
        BLOCKS,
        StoredArrays.joined(written),
        codec=codec,
        reason=reason,
        bounds=np.array([0, len(rows)]),
    )
    return parts.stored_segment(place, group, (0, BLOCK), rows, row_numbers, [field])


def entry_of(suffix: str, array: StoredArray, held: Sequence[np.ndarray]) -> ArrayEntry:
    """Returns the stored array of some blocks, in chunks of 16 MiB."""
    count = sum(len(one) for one in held)
    name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
    shape = (count, *array.trailing)
    return arrays.array_entry(
        name, shape, array.dtype, zstd=array.zstd, byte_planes=array.byte_planes
    )
