# SPDX-License-Identifier: Apache-2.0
"""Encodes some blocks of a leaf relative to the parent, and others on their own.

A delta of a rolling base contains a share of each leaf in full. If the reference of a leaf did not
fit into memory, only its hashes are known.
"""

from __future__ import annotations

import concurrent.futures
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.format.manifest import RollingShare
from deltackpt.save import block_codes, encode_blocks
from deltackpt.save.block_codes import CodedLeaf
from deltackpt.save.dense_references import Hashes


class LeafPart(NamedTuple):
    """Some blocks of a leaf.

    Attributes:
      blocks: a slice, or indices, int64, ascending.
      reference: their values in the parent; None if they are encoded on their own.
    """

    blocks: slice | np.ndarray
    reference: np.ndarray | None


def with_share(
    leaf: np.ndarray, reference: np.ndarray, share: RollingShare, key: str
) -> list[LeafPart]:
    """Splits a leaf into its share of a rolling base and the rest, relative to the parent.

    Args:
      leaf: (blocks, 256).
      reference: (blocks, 256).
      share: the save's share of a rolling base.
      key: key of the leaf.
    """
    found = share_of(len(leaf), share, key)
    before, own, after = (
        slice(0, found.start),
        slice(found.start, found.stop),
        slice(found.stop, len(leaf)),
    )
    parts = [
        LeafPart(before, reference[before]),
        LeafPart(own, None),
        LeafPart(after, reference[after]),
    ]
    return [part for part in parts if len(leaf[part.blocks])]


def share_of(count: int, share: RollingShare, key: str) -> range:
    """Returns the blocks of a leaf that a save of a rolling base contains in full.

    They depend only on the leaf, so any ``window`` consecutive saves contain all of its blocks even
    if other leaves are added or removed. Small leaves start at different saves.
    """
    turned = (share.number + zlib.crc32(key.encode())) % share.window
    return range(count * turned // share.window, count * (turned + 1) // share.window)


def by_hashes(leaf: np.ndarray, hashes: Hashes) -> list[LeafPart]:
    """Returns the blocks that may have changed since they were hashed, without reference."""
    changed = hashes.changed(leaf)
    return [LeafPart(changed, None)] if len(changed) else []


def encode_parts(
    leaf: np.ndarray,
    parts: Sequence[LeafPart],
    codec: str,
    max_error: float | None,
    pool: concurrent.futures.Executor,
    *,
    skip_unchanged: bool,
) -> CodedLeaf:
    """Like ``block_codes.encode_leaf``, part by part; blocks in no part are unchanged.

    Each part stays within the error budget, so the leaf does too.
    """
    found = [
        block_codes.encode_leaf(
            leaf[part.blocks],
            part.reference,
            _alone(codec) if part.reference is None else codec,
            max_error,
            pool,
            skip_unchanged=skip_unchanged,
        )
        for part in parts
    ]
    pieces = [
        piece._replace(blocks=_numbers(part)[piece.blocks])
        for part, coded in zip(parts, found, strict=True)
        for piece in coded.pieces
    ]
    # In order over all parts; one segment contains all blocks of a codec.
    pieces.sort(key=lambda piece: piece.blocks[0])
    lossy = [number for number, coded in enumerate(found) if coded.codec != of_blocks.LOSSLESS]
    decoded = leaf
    if lossy:
        decoded = leaf.copy()
        for number in lossy:
            decoded[parts[number].blocks] = found[number].decoded
    # Blocks relative to the parent represent the leaf's coding best.
    order = sorted(range(len(parts)), key=lambda number: parts[number].reference is None)
    told = found[order[0]] if order else CodedLeaf([], leaf, of_blocks.LOSSLESS, "", 0.0)
    error = _error_of(leaf, [(parts[number], found[number].error) for number in lossy])
    return CodedLeaf(pieces, decoded, told.codec, told.reason, error)


def _alone(codec: str) -> str:
    """Returns the codec for blocks that are encoded by themselves."""
    if codec != of_blocks.LOSSLESS and of_blocks.get(codec).relative:
        return of_blocks.LOSSLESS
    return codec


def _numbers(part: LeafPart) -> np.ndarray:
    if isinstance(part.blocks, slice):
        return np.arange(part.blocks.start, part.blocks.stop)
    return part.blocks


def _error_of(leaf: np.ndarray, parts: Sequence[tuple[LeafPart, float]]) -> float:
    """Returns the relative l2 error of a leaf by those of its parts."""
    if not any(error for _, error in parts):
        return 0.0
    squares = encode_blocks.squares
    lost = sum(error**2 * squares(leaf[part.blocks]) for part, error in parts)
    return encode_blocks.relative(lost, squares(leaf))
