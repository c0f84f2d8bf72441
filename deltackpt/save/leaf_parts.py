# SPDX-License-Identifier: Apache-2.0
"""Leaves of which some blocks are encoded against the parent, and others by themselves.

A delta of a rolling base holds a share of each leaf whole; of a leaf whose reference did not fit
into memory only hashes are known.
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
      blocks: which: a slice, or their numbers, int64, ascending.
      reference: what they were in the parent; None where they are encoded by themselves.
    """

    blocks: slice | np.ndarray
    reference: np.ndarray | None


def with_share(
    leaf: np.ndarray, reference: np.ndarray, share: RollingShare, key: str
) -> list[LeafPart]:
    """The share of a rolling base by itself, the rest against the parent.

    Args:
      leaf: (blocks, 256).
      reference: likewise.
      share: of the save.
      key: of the leaf.
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
    """The blocks of a leaf that a save of a rolling base holds by themselves.

    They depend on the leaf alone, not on what lies beside it, so that any ``window`` saves hold all
    of them whatever else comes or goes. Leaves of few blocks begin at different saves.
    """
    turned = (share.number + zlib.crc32(key.encode())) % share.window
    return range(count * turned // share.window, count * (turned + 1) // share.window)


def by_hashes(leaf: np.ndarray, hashes: Hashes) -> list[LeafPart]:
    """The blocks that may have changed since they were hashed, by themselves."""
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
    """As ``block_codes.encode_leaf``, part by part; blocks in no part are as in the parent.

    Each part keeps to the error that is allowed, and so does the leaf.
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
    # In order, whichever part they are of; of one codec they come to lie in one segment.
    pieces.sort(key=lambda piece: piece.blocks[0])
    lossy = [number for number, coded in enumerate(found) if coded.codec != of_blocks.EXACT]
    decoded = leaf
    if lossy:
        decoded = leaf.copy()
        for number in lossy:
            decoded[parts[number].blocks] = found[number].decoded
    # What is encoded by itself says the least of how a leaf is kept.
    order = sorted(range(len(parts)), key=lambda number: parts[number].reference is None)
    told = found[order[0]] if order else CodedLeaf([], leaf, of_blocks.EXACT, "", 0.0)
    error = _error_of(leaf, [(parts[number], found[number].error) for number in lossy])
    return CodedLeaf(pieces, decoded, told.codec, told.reason, error)


def _alone(codec: str) -> str:
    """The codec for blocks that are encoded by themselves."""
    if codec != of_blocks.EXACT and of_blocks.get(codec).relative:
        return of_blocks.EXACT
    return codec


def _numbers(part: LeafPart) -> np.ndarray:
    if isinstance(part.blocks, slice):
        return np.arange(part.blocks.start, part.blocks.stop)
    return part.blocks


def _error_of(leaf: np.ndarray, parts: Sequence[tuple[LeafPart, float]]) -> float:
    """Relative l2 error of a leaf by those of its parts."""
    if not any(error for _, error in parts):
        return 0.0
    squares = encode_blocks.squares
    lost = sum(error**2 * squares(leaf[part.blocks]) for part, error in parts)
    return encode_blocks.relative(lost, squares(leaf))
