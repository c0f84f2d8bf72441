# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks of a dense leaf: only changed ones, with the smallest codec.

Unchanged blocks are omitted. Each lossless block becomes a few elements with their positions, byte
planes of the XOR with the reference, or the raw bits. The error of a lossy code is measured while
it is encoded. A leaf over its budget is encoded with the next more precise codec, and finally
losslessly: the save never fails for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.codecs.of_blocks import PIECE_BLOCKS
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.resources.runtime import Runtime
from deltackpt.save import encode_blocks
from deltackpt.save.dense_references import Array

#: Blocks that one thread encodes at once.
_SPAN_BLOCKS = 1 << 14
#: Most numbers of a block that are kept with their places, by bytes of a number: with more the
#: other lossless codecs are smaller (bf16: byte planes of the XOR have a quarter of the bytes).
_MOST_SPARSE = {1: 96, 2: 32, 4: 160, 8: 200}
#: Most of the positive numbers of a leaf without negative ones that may be lost: such leaves are
#: second moments, by whose roots an optimizer divides, and l2 errors do not feel the small ones.
_MOST_VANISHED = 0.01
#: Bytes of numbers whose XOR gains by byte planes; wider ones lose time and gain a third.
_PLANES_BYTES = 2
#: Share of the blocks of a piece from which on all are encoded where they lie, and those that did
#: not change are dropped then: copies of the others would cost a third of all time.
_MOSTLY = 0.75
#: Words of 8 bytes of a block that are looked at first.
_FIRST_WORDS = 4


class EncodedBlocks(NamedTuple):
    """Some blocks of a leaf in one codec.

    Attributes:
      codec: name of the codec.
      blocks: indices of the blocks in the leaf, int64 (n,), ascending.
      arrays: suffix to stored array.
    """

    codec: str
    blocks: np.ndarray
    arrays: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the arrays, before any compression."""
        return sum(array.nbytes for array in self.arrays.values())


class LeafDelta(NamedTuple):
    """The stored form of a leaf, and its decoded values.

    Attributes:
      pieces: different blocks each.
      decoded: (blocks, 256): the reference of the next save. If nothing is lost it is the leaf, or
        the reference if nothing changed.
      codec: the codec of changed blocks: ``lossless`` or a lossy one.
      reason: why it is not the requested codec; empty if it is.
      error: relative l2 error of the leaf; 0 if nothing is lost.
    """

    pieces: Sequence[EncodedBlocks]
    decoded: Array
    codec: str
    reason: str
    error: float


def encode_leaf(
    leaf: np.ndarray,
    reference: np.ndarray | None,
    codec: str,
    max_error: float | None,
    runtime: Runtime,
    *,
    skip_unchanged: bool = True,
    alone: range = range(0),
    only: Sequence[range] | None = None,
) -> LeafDelta:
    """Encodes the changed blocks of a leaf.

    Args:
      leaf: (blocks, 256), the last block padded with zeros.
      reference: (blocks, 256), the decoded values of the parent, or None.
      codec: ``lossless``, or a lossy one.
      max_error: maximum relative l2 error of the leaf; None for no limit.
      runtime: encodes spans.
      skip_unchanged: whether to omit unchanged blocks.
      alone: blocks that are encoded without the reference.
      only: ranges of blocks outside of which none has changed; None if that is unknown.
    """
    ranges = [range(len(leaf))] if only is None else only
    spans = [span for one in ranges for span in _spans(one, alone)]

    def attempt(codec: str) -> tuple[LeafDelta, Callable[[], float]]:
        reason = ""
        if codec != of_blocks.LOSSLESS and not _can(codec, leaf, reference):
            reason = f"{codec}: no reference" if reference is None else f"{codec}: {leaf.dtype}"
            codec = of_blocks.LOSSLESS
        decoded = leaf
        if codec != of_blocks.LOSSLESS:
            decoded = np.empty_like(leaf) if only is None else leaf.copy()

        def of_span(blocks: range) -> _Span:
            part, start = slice(blocks.start, blocks.stop), blocks.start
            before = None if reference is None or start in alone else reference[part]
            if codec == of_blocks.LOSSLESS:
                return _exact(leaf[part], before, start, skip_unchanged)
            if before is None and of_blocks.get(codec).relative:
                np.copyto(decoded[part], leaf[part])
                found = _exact(leaf[part], None, start, skip_unchanged)
                return found._replace(squared_norm=encode_blocks.squares(leaf[part]))
            return _lossy(codec, leaf[part], before, start, decoded[part], skip_unchanged)

        found = runtime.map(of_span, spans)
        pieces = _joined(piece for span in found for piece in span.pieces)
        if not pieces and reference is not None:
            decoded = reference
        lost = math.fsum(span.squared_error for span in found)
        error = encode_blocks.relative(lost, math.fsum(span.squared_norm for span in found))
        delta = LeafDelta(pieces, decoded, codec, reason, error if pieces else 0.0)
        return delta, lambda: _vanished(leaf, decoded, codec)

    return within_budget(codec, max_error, attempt)


def _spans(blocks: range, alone: range) -> Iterator[range]:
    """Cuts a range of blocks into what one thread encodes at once."""
    cuts = {blocks.start, blocks.stop, *(at for at in (alone.start, alone.stop) if at in blocks)}
    for first, last in itertools.pairwise(sorted(cuts)):
        for start in range(first, last, _SPAN_BLOCKS):
            yield range(start, min(start + _SPAN_BLOCKS, last))


def within_budget(
    codec: str,
    max_error: float | None,
    attempt: Callable[[str], tuple[LeafDelta, Callable[[], float]]],
) -> LeafDelta:
    """Encodes a leaf with a codec, or the first more precise one within the budget.

    Args:
      codec: the codec to try first.
      max_error: maximum relative l2 error of the leaf; None for no limit.
      attempt: encodes it with a codec, or losslessly if that is impossible; returns a function for
        the share of positive values that is lost in a leaf without negative ones.
    """
    reason = ""
    while True:
        found, vanished = attempt(codec)
        if max_error is None or found.codec == of_blocks.LOSSLESS:
            break
        if found.error > max_error:
            reason = f"{codec} would change it by {found.error:.3g}, more than {max_error:g}"
            codec = of_blocks.wider(codec)
        elif (share := vanished()) > _MOST_VANISHED:
            reason = f"{codec} would make {share:.0%} of its positive values 0 or less"
            codec = of_blocks.LOGARITHM
        else:
            break
    return found._replace(reason=found.reason or reason)


def _vanished(leaf: np.ndarray, decoded: np.ndarray, codec: str) -> float:
    """Returns the share of values that a linear code loses in a leaf without negative values."""
    if not of_blocks.is_linear(codec):
        return 0.0
    lost = total = 0
    for first in range(0, len(leaf), _SPAN_BLOCKS):
        rows, found = leaf[first : first + _SPAN_BLOCKS], decoded[first : first + _SPAN_BLOCKS]
        with np.errstate(invalid="ignore"):  # NaN compares false.
            # Nearly all leaves have some in the first span.
            if (rows < 0).any():
                return 0.0
            positive = rows > 0
            total += int(np.count_nonzero(positive))
            lost += int(np.count_nonzero(positive & (found <= 0)))
    return lost / total if total else 0.0


class _Span(NamedTuple):
    pieces: list[EncodedBlocks]
    squared_error: float
    squared_norm: float


def _can(codec: str, leaf: np.ndarray, reference: np.ndarray | None) -> bool:
    found = of_blocks.get(codec)
    return found.takes(leaf.dtype.name) and not (found.relative and reference is None)


def _joined(pieces: Iterable[EncodedBlocks]) -> list[EncodedBlocks]:
    """Joins the pieces of each codec."""
    found: dict[str, list[EncodedBlocks]] = {}
    for piece in pieces:
        found.setdefault(piece.codec, []).append(piece)
    return [
        EncodedBlocks(
            codec,
            np.concatenate([one.blocks for one in held]),
            {name: np.concatenate([one.arrays[name] for one in held]) for name in held[0].arrays},
        )
        if len(held) > 1
        else held[0]
        for codec, held in sorted(found.items())
    ]


def changed_blocks(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns which blocks changed, by their bits: (n,) bool."""
    words, other = now.view(np.uint64), before.view(np.uint64)
    # An optimizer step nearly always changes the first elements of a block.
    changed = words[:, 0] != other[:, 0]
    for word in range(1, _FIRST_WORDS):
        changed |= words[:, word] != other[:, word]
    same = np.flatnonzero(~changed)
    if len(same) == len(now):
        return (words != other).any(axis=1)
    if len(same):
        changed[same] = (words[same] != other[same]).any(axis=1)
    return changed


# Lossless.


def changed_numbers(now: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many elements of each block changed, (n,) int64, and which, (n, 256)."""
    bits = of_blocks.bits_dtype(now.dtype)
    changed = now.view(bits) != before.view(bits)
    # Sums of 32 truth values in each of 8 bytes, then of these: thrice as fast as a sum of bools.
    sums = np.add.reduce(changed.view(np.uint64), axis=1)
    return sums.view(np.uint8).reshape(len(now), 8).sum(axis=1, dtype=np.int64), changed


def _exact(now: np.ndarray, before: np.ndarray | None, start: int, skip_unchanged: bool) -> _Span:
    itemsize = now.dtype.itemsize
    if before is None:
        blocks = np.arange(len(now))
        codec = "planes" if itemsize == _PLANES_BYTES else "raw"
        return _Span([_lossless(codec, now, None, blocks, start)], 0.0, 0.0)
    counts, changed = changed_numbers(now, before)
    few = counts <= _MOST_SPARSE[itemsize]
    if skip_unchanged:
        few &= counts > 0
    pieces = []
    if few.any():
        pieces.append(_sparse(now, before, changed, counts, np.flatnonzero(few), start))
    many = np.flatnonzero(counts > _MOST_SPARSE[itemsize])
    if len(many):
        codec = "xor" if itemsize == _PLANES_BYTES else "raw"
        pieces.append(_lossless(codec, now, before, many, start))
    return _Span(pieces, 0.0, 0.0)


def _lossless(
    codec: str, now: np.ndarray, before: np.ndarray | None, blocks: np.ndarray, start: int
) -> EncodedBlocks:
    chosen = _rows(now, blocks)
    bits = of_blocks.bits_dtype(now.dtype)
    if codec == "xor":
        assert before is not None
        chosen = np.bitwise_xor(chosen.view(bits), _rows(before, blocks).view(bits))
    [(_, array)] = of_blocks.get(codec).stored(now.dtype).items()
    stored = np.ascontiguousarray(chosen).view(array.dtype).reshape(len(blocks), *array.trailing)
    return EncodedBlocks(codec, blocks + start, {"": stored})


def _rows(blocks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return blocks if len(chosen) == len(blocks) else blocks[chosen]


def _sparse(
    now: np.ndarray,
    before: np.ndarray,
    changed: np.ndarray,
    counts: np.ndarray,
    blocks: np.ndarray,
    start: int,
) -> EncodedBlocks:
    bits = of_blocks.bits_dtype(now.dtype)
    # Places among all numbers: gathering whole blocks first would read them all once more.
    found = np.flatnonzero(_rows(changed, blocks))
    at = (found & (BLOCK - 1)).astype(np.uint8)
    places = blocks[found >> 8] * BLOCK + at if len(blocks) < len(now) else found
    flat_now, flat_before = now.reshape(-1).view(bits), before.reshape(-1).view(bits)
    arrays = {
        "count": counts[blocks].astype(np.uint16),
        "at": at,
        "": flat_now[places] ^ flat_before[places],
    }
    return EncodedBlocks("sparse", blocks + start, arrays)


# Lossy.


def _lossy(
    codec: str,
    now: np.ndarray,
    before: np.ndarray | None,
    start: int,
    decoded: np.ndarray,
    skip_unchanged: bool,
) -> _Span:
    """Encodes a span; ``decoded`` receives what a reader will decode."""
    pieces: list[EncodedBlocks] = []
    error = norm = 0.0
    for first in range(0, len(now), PIECE_BLOCKS):
        part = slice(first, first + PIECE_BLOCKS)
        rows, out = now[part], decoded[part]
        reference = None if before is None else before[part]
        norm += encode_blocks.squares(rows)
        numbers = np.arange(start + first, start + first + len(rows))
        piece = _Piece(rows, reference, numbers, out)
        changed = np.ones(len(rows), bool)
        if reference is not None and skip_unchanged:
            changed = changed_blocks(rows, reference)
        if np.count_nonzero(changed) > _MOSTLY * len(rows):
            coded, missed = _coded(codec, piece, changed)
            if not changed.all():
                assert reference is not None
                out[~changed] = reference[~changed]
        else:
            assert reference is not None
            np.copyto(out, reference)
            coded, missed = _gathered(codec, piece, changed)
        pieces += coded
        error += missed
    return _Span(pieces, error, norm)


class _Piece(NamedTuple):
    """Blocks that are encoded at once.

    Attributes:
      rows: (n, 256).
      reference: (n, 256), or None.
      numbers: numbers of the blocks in the leaf.
      out: as ``rows``, gets what they decode to.
    """

    rows: np.ndarray
    reference: np.ndarray | None
    numbers: np.ndarray
    out: np.ndarray


def _coded(codec: str, piece: _Piece, wanted: np.ndarray) -> tuple[list[EncodedBlocks], float]:
    """Encodes a piece; blocks that a codec cannot represent get the next more precise one.

    Args:
      codec: the codec to try first.
      piece: ``out`` is undefined for blocks that are not wanted.
      wanted: (n,) bool.

    Returns:
      The stored pieces, and the sum of the squares of their errors.
    """
    rows, reference, numbers, out = piece
    if codec == of_blocks.LOSSLESS:
        np.copyto(out, rows)
        raw = _lossless("raw", rows, None, np.flatnonzero(wanted), 0)
        return [raw._replace(blocks=numbers[wanted])], 0.0
    coded = encode_blocks.encode(of_blocks.get(codec), rows, reference, out, wanted)
    if coded.held.all():
        return [EncodedBlocks(codec, numbers, coded.arrays)], coded.squared_error
    pieces = []
    if coded.held.any():
        arrays = {name: array[coded.held] for name, array in coded.arrays.items()}
        pieces.append(EncodedBlocks(codec, numbers[coded.held], arrays))
    others, missed = _gathered(of_blocks.wider(codec), piece, wanted & ~coded.held)
    return pieces + others, coded.squared_error + missed


def _gathered(codec: str, piece: _Piece, wanted: np.ndarray) -> tuple[list[EncodedBlocks], float]:
    """See ``_coded``, through copies, if few are wanted; the rest of ``out`` is unchanged."""
    count = np.count_nonzero(wanted)
    if not count:
        return [], 0.0
    before = None if piece.reference is None else piece.reference[wanted]
    found = np.empty((count, BLOCK), piece.out.dtype)
    few = _Piece(piece.rows[wanted], before, piece.numbers[wanted], found)
    coded = _coded(codec, few, np.ones(count, bool))
    piece.out[wanted] = found
    return coded
