# SPDX-License-Identifier: Apache-2.0
"""Writes dense leaves into a layer: whole, or the blocks that changed since the parent.

A leaf is a table of 256-wide rows. Leaves of one dtype are stored end to end, and each codec has a
segment with some of their blocks. Small values and files are one segment of bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from deltackpt.codecs import of_blocks
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
from deltackpt.format.segments import Segment
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes, device_blocks
from deltackpt.save.block_codes import EncodedBlocks, LeafDelta
from deltackpt.save.dense_coding import Coding
from deltackpt.save.dense_references import Array, Left
from deltackpt.storage import arrays, parts
from deltackpt.storage.parts import Place, StoredArrays

#: Leaves whose codec a record explains.
_MOST_REASONS = 16
#: Fewer plain bytes of whole leaves are not worth the time of the compressor's threads.
_COMPRESSED_BYTES = 64 << 10
_RAW = "raw"


@dataclasses.dataclass(eq=False, slots=True)
class DenseValue:
    """A captured value of the dense item.

    Attributes:
      key: key in Orbax's database, or a file's path in the item.
      group: its dtype if it is stored as blocks, otherwise ``plain``.
      data: (n,) uint8 for a plain value. Otherwise (blocks, 256), padded with zeros, in host memory
        or on its device; whole leaves may lack the padding.
      shape: shape of the chunk; None for a plain value that is not an array.
      dtype: dtype of the chunk.
      coding: how deltas encode it.
      leaf: path of its leaf; empty without one.
      file: whether it is a file.
    """

    key: str
    group: str
    data: Array
    shape: tuple[int, ...] | None
    dtype: np.dtype
    coding: Coding = Coding()
    leaf: str = ""
    file: bool = False

    @classmethod
    def of_bytes(cls, key: str, data: bytes, *, file: bool = False) -> DenseValue:
        """Returns a value that is not an array."""
        found = np.frombuffer(data, np.uint8)
        return cls(key, PLAIN, found, None, found.dtype, file=file)

    @property
    def item_key(self) -> Key:
        """Returns its key among all values of the item."""
        return self.file, self.key

    @property
    def plain(self) -> bool:
        """Returns whether it is stored as bytes."""
        return self.group == PLAIN

    @property
    def count(self) -> int:
        """Returns the number of elements; for a plain value, of bytes."""
        return self.data.size if self.shape is None or self.plain else math.prod(self.shape)

    @property
    def array(self) -> np.ndarray:
        """Returns the chunk, or the bytes."""
        flat = np.asarray(self.data).reshape(-1)
        if self.shape is None:
            return flat
        return (flat.view(self.dtype) if self.plain else flat[: self.count]).reshape(self.shape)


class WrittenDense(NamedTuple):
    """Dense leaves that were written.

    Attributes:
      record: their record in the manifest.
      nbytes: their stored bytes.
      leaves: figures of each leaf that this process has a part of; none of whole leaves.
    """

    record: DenseBlocks
    nbytes: int
    leaves: tuple[LeafFigures, ...] = ()


def write_whole(
    place_of: Callable[[str], Place],
    values: Iterable[DenseValue],
    pieces: Mapping[str, Sequence[np.ndarray]],
) -> WrittenDense:
    """Writes all values in full: raw blocks, and bytes.

    Args:
      place_of: returns the destination of a segment.
      values: the values of one process.
      pieces: group to the blocks of its values in their order, (n, 256) each.
    """
    values = sorted(values, key=lambda value: "" if value.plain else value.group)
    segments = []
    plain = [np.asarray(value.data) for value in values if value.plain]
    if nbytes := sum(data.nbytes for data in plain):
        segments.append(write_plain(place_of, plain, zstd=nbytes >= _COMPRESSED_BYTES))
    for group, held in sorted(pieces.items()):
        rows = range(sum(map(len, held)))
        segments.append(_write_blocks(place_of, group, _RAW, rows, {"": held}))
    described = tuple(_described(values, [True] * len(values)))
    record = DenseBlocks(values=described, segments=tuple(segments), complete=True)
    return WrittenDense(record, sum(_stored_bytes(record).values()))


def encode(
    values: Sequence[DenseValue],
    parent: Left,
    runtime: Runtime,
    *,
    skip_unchanged: bool = True,
    rolling: RollingShare | None = None,
) -> list[LeafDelta]:
    """Encodes values relative to the parent, each with its coding.

    Args:
      values: the values of one process.
      parent: what is known of the parent's values; values not in it are stored whole.
      runtime: runs the encoding.
      skip_unchanged: whether to omit unchanged values.
      rolling: the save's share of a rolling base.
    """
    return [_encoded(value, parent, runtime, skip_unchanged, rolling) for value in values]


def _encoded(
    value: DenseValue,
    parent: Left,
    runtime: Runtime,
    skip_unchanged: bool,
    rolling: RollingShare | None,
) -> LeafDelta:
    data, reference, hashes = value.data, None, None
    if parent.counts.get(value.item_key) == value.count:
        reference, hashes = parent.data.get(value.item_key), parent.hashes.get(value.item_key)
    if reference is not None and (reference.shape, reference.dtype) != (data.shape, data.dtype):
        reference = None
    share = (
        range(0)
        if rolling is None
        else _share_of(1 if value.plain else len(data), rolling, value.key)
    )
    if value.plain:
        same = skip_unchanged and reference is not None and bool((reference == data).all())
        pieces = [EncodedBlocks(_RAW, np.arange(1), {"": np.asarray(data)})]
        return LeafDelta([] if same and not share else pieces, data, of_blocks.LOSSLESS, "", 0.0)
    if rolling is None and hashes is None and isinstance(data, jax.Array):
        if reference is None or isinstance(reference, jax.Array):
            return device_blocks.encode_leaf_there(
                data, reference, *value.coding, runtime, skip_unchanged=skip_unchanged
            )
    data = np.asarray(data)
    return block_codes.encode_leaf(
        data,
        None if reference is None else np.asarray(reference),
        *value.coding,
        runtime,
        skip_unchanged=skip_unchanged,
        alone=share,
        only=None if hashes is None or rolling is not None else hashes.changed(data),
    )


def _share_of(count: int, share: RollingShare, key: str) -> range:
    """Returns the blocks of a leaf that a save of a rolling base contains in full.

    They depend only on the leaf, so any ``window`` consecutive saves contain all of its blocks even
    if other leaves are added or removed. Small leaves start at different saves.
    """
    turned = (share.number + zlib.crc32(key.encode())) % share.window
    return range(count * turned // share.window, count * (turned + 1) // share.window)


def write_changes(
    place_of: Callable[[str], Place], values: Sequence[DenseValue], deltas: Sequence[LeafDelta]
) -> WrittenDense:
    """Writes the changed blocks of values.

    Args:
      place_of: returns the destination of a segment.
      values: the values of one process, in the order of the item.
      deltas: the result of ``encode``.
    """
    described = tuple(_described(values, [bool(delta.pieces) for delta in deltas]))
    pieces: dict[tuple[str, str], list[EncodedBlocks]] = collections.defaultdict(list)
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for value, delta, stored in zip(values, deltas, described, strict=True):
        for piece in delta.pieces:
            assert stored.at is not None
            place = value.group, piece.codec
            pieces[place].append(piece._replace(blocks=piece.blocks + stored.at))
            if delta.reason:
                reasons[place].append(f"{value.leaf}: {delta.reason}")
    segments = []
    plain = [piece.arrays[""] for piece in pieces.get((PLAIN, _RAW), ())]
    if any(data.nbytes for data in plain):
        segments.append(write_plain(place_of, plain, zstd=True))
    for group, codec in sorted(pieces.keys() - {(PLAIN, _RAW)}):
        held, reason = pieces[group, codec], reasons[group, codec]
        rows: blocks.Rows = np.concatenate([piece.blocks for piece in held])
        if len(rows) == rows[-1] + 1 - rows[0]:
            rows = range(int(rows[0]), int(rows[-1]) + 1)
        by_suffix = {name: [piece.arrays[name] for piece in held] for name in held[0].arrays}
        told = "; ".join(dict.fromkeys(reason[:_MOST_REASONS]))
        told += "; and others" if len(reason) > _MOST_REASONS else ""
        segments.append(_write_blocks(place_of, group, codec, rows, by_suffix, told))
    record = DenseBlocks(values=described, segments=tuple(segments))
    on_disk = _stored_bytes(record)
    shares = {
        place: on_disk.get(place, 0) / max(1, sum(piece.nbytes for piece in held))
        for place, held in pieces.items()
    }
    by_leaf: dict[str, list[LeafFigures]] = collections.defaultdict(list)
    for value, delta in zip(values, deltas, strict=True):
        if value.leaf:
            by_leaf[value.leaf].append(_figures(value, delta, shares))
    leaves = tuple(LeafFigures.joined(found) for found in by_leaf.values())
    return WrittenDense(record, sum(on_disk.values()), leaves)


def _described(values: Iterable[DenseValue], stored: Iterable[bool]) -> Iterator[BlockedValue]:
    """Yields the records of values, end to end in each group; plain ones only if stored."""
    ends: dict[str, int] = {}
    for value, is_stored in zip(values, stored, strict=True):
        at, count, group = None, value.count, value.group
        if is_stored or group != PLAIN:
            at = ends.get(group, 0)
            ends[group] = at + (count if group == PLAIN else dense_blocks.blocks_of(count))
        yield BlockedValue(
            key=value.key,
            file=value.file,
            dtype="uint8" if group == PLAIN else group,
            count=count,
            group=group,
            at=at,
        )


def _stored_bytes(record: DenseBlocks) -> dict[tuple[str, str], int]:
    """Returns group and codec to the stored bytes of their segment."""
    return {
        (segment.group, encoding.codec): encoding.nbytes
        for segment in record.segments
        for encoding in segment.encodings
    }


def _figures(
    value: DenseValue, delta: LeafDelta, shares: Mapping[tuple[str, str], float]
) -> LeafFigures:
    """Returns figures of one value.

    Args:
      value: the value.
      delta: its encoded changes.
      shares: group and codec to bytes on disk per byte before compression.
    """
    return LeafFigures(
        leaf=value.leaf,
        codec=delta.codec,
        reason=delta.reason,
        raw_bytes=value.count * value.data.dtype.itemsize,
        nbytes=round(sum(one.nbytes * shares[value.group, one.codec] for one in delta.pieces)),
        blocks=1 if value.plain else len(value.data),
        changed_blocks=sum(len(one.blocks) for one in delta.pieces),
        relative_error=delta.error,
    )


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
    data = np.concatenate(held)
    entry = arrays.array_entry(PLAIN_BYTES_OF, data.shape, data.dtype, zstd=zstd)
    stored = parts.write_array(place, entry, [data])
    bounds = np.array([0, len(data)])
    field = parts.stored_field(PLAIN_BYTES_OF, stored, codec=_RAW, reason="", bounds=bounds)
    rows, none = range(len(data)), StoredArrays((), 0)
    return parts.stored_segment(place, PLAIN, (0, 1), rows, none, [field])


def _write_blocks(
    place_of: Callable[[str], Place],
    group: str,
    codec: str,
    rows: blocks.Rows,
    held: Mapping[str, Sequence[np.ndarray]],
    reason: str = "",
) -> Segment:
    """Writes blocks of one group and codec.

    Args:
      place_of: returns the destination of a segment.
      group: dtype of the blocks.
      codec: their codec.
      rows: indices of the blocks in the group.
      held: suffix to the stored array, in pieces.
      reason: why leaves have another codec than requested.
    """
    place, written = place_of(f"{dense_blocks.SEGMENTS}{group}.{codec}"), []
    row_numbers = parts.write_rows(place, rows)
    for suffix, array in of_blocks.get(codec).stored(dtype_of(group)).items():
        pieces = [piece.view(array.dtype) for piece in held[suffix]]
        entry = arrays.array_entry(
            f"{BLOCKS}.{suffix}" if suffix else BLOCKS,
            (sum(map(len, pieces)), *array.trailing),
            array.dtype,
            zstd=array.zstd,
            byte_planes=array.byte_planes,
        )
        written.append(parts.write_array(place, entry, pieces))
    stored, bounds = StoredArrays.joined(written), np.array([0, len(rows)])
    field = parts.stored_field(BLOCKS, stored, codec=codec, reason=reason, bounds=bounds)
    return parts.stored_segment(place, group, (0, BLOCK), rows, row_numbers, [field])
