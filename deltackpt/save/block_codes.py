# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks of dense leaves against references: only changed ones, with the smallest codec.

A leaf over its error budget is encoded with the next more precise codec, and finally losslessly:
the save never fails for it. Leaves whose values do not fit into the reference memory keep a 128-bit
hash of each 64 KiB instead: that detects unchanged data, but is not a reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import xxhash

from deltackpt import kernels
from deltackpt.codecs import block_codecs
from deltackpt.format.row_blocks import BLOCK, Key
from deltackpt.kernels import CODED, LEFT, UNCHANGED
from deltackpt.resources.runtime import Runtime
from deltackpt.save import encode_blocks

#: Bytes that share a hash. A hash of 128 bits: two of any 2^50 differ but for odds of 2^-29.
HASHED_BYTES = 64 << 10

#: In host memory, or on an accelerator.
Array = np.ndarray | jax.Array
#: What values decode to: leaves as (blocks, 256) of their dtype, plain ones as (n,) uint8.
Decoded = Mapping[Key, Array]


class Hashes(NamedTuple):
    """The hashes of a leaf whose values are not kept."""

    shape: tuple[int, ...]  # of the blocks, (blocks, 256)
    dtype: np.dtype
    digests: Sequence[bytes]  # of each 64 KiB in order, 16 bytes each; the last may cover less

    @classmethod
    def from_bytes(cls, data: np.ndarray) -> Hashes:
        """Hashes blocks, (blocks, 256) and contiguous."""
        flat = data.reshape(-1).view(np.uint8)
        starts = range(0, flat.size, HASHED_BYTES)
        digests = [xxhash.xxh3_128_digest(flat[at : at + HASHED_BYTES].data) for at in starts]
        return cls(data.shape, data.dtype, digests)

    def changed(self, data: np.ndarray) -> list[range]:
        """Returns ranges of the blocks that may have changed since then, ascending."""
        now = Hashes.from_bytes(data)
        if now.shape != self.shape or now.dtype != self.dtype:
            return [range(len(data))]
        pairs = enumerate(zip(now.digests, self.digests, strict=True))
        per_digest = HASHED_BYTES // (BLOCK * data.dtype.itemsize)
        found: list[range] = []
        for start in (number * per_digest for number, (one, other) in pairs if one != other):
            first = found.pop().start if found and found[-1].stop == start else start
            found.append(range(first, min(start + per_digest, len(data))))
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class DenseReference:
    """Data that a save keeps for its deltas."""

    #: The decoded values that fit into the memory.
    data: Decoded = dataclasses.field(default_factory=dict)
    #: Elements of each value (bytes, if plain), without padding.
    counts: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    #: Of the leaves that do not fit.
    hashes: Mapping[Key, Hashes] = dataclasses.field(default_factory=dict)


#: Leaves of at least this size are decoded in memory that is reused: filling fresh memory takes as
#: long as encoding the leaf.
_LENT_BYTES = 1 << 20
#: Blocks that one thread encodes at once.
_SPAN_BLOCKS = 1 << 14
#: Maximum number of changed elements of a block that are stored with their positions, by itemsize.
#: With more, other lossless codecs are smaller (bf16: byte planes of the XOR take a quarter).
_MOST_SPARSE = {1: 96, 2: 32, 4: 160, 8: 200}
#: Maximum share of positive elements that may become 0 in a leaf without negative ones: such leaves
#: are second moments, by whose roots an optimizer divides, and l2 errors do not show small ones.
_MOST_VANISHED = 0.01
#: Bytes of the elements whose XOR gains by byte planes; wider ones lose time and gain a third.
_PLANES_BYTES = 2


class EncodedBlocks(NamedTuple):
    """Some blocks of a leaf in one codec."""

    codec: str
    blocks: np.ndarray  # indices of the blocks in the leaf, int64 (n,), ascending
    arrays: Mapping[str, np.ndarray]  # suffix to stored array

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the arrays, before any compression."""
        return sum(array.nbytes for array in self.arrays.values())


class LeafDelta(NamedTuple):
    """The stored form of a leaf, and its decoded values.

    ``decoded``, (blocks, 256), is the reference of the next save: the leaf itself if nothing is
    lost, the old reference if nothing changed.
    """

    pieces: Sequence[EncodedBlocks]  # different blocks each
    decoded: Array
    codec: str  # of the changed blocks: ``lossless`` or a lossy one
    reason: str  # why it is not the requested codec; empty if it is
    error: float  # relative l2 error of the leaf


def encode_leaf(
    leaf: np.ndarray,
    reference: np.ndarray | None,
    codec: str,
    max_error: float | None,
    runtime: Runtime,
    *,
    only: Sequence[range] | None = None,
) -> LeafDelta:
    """Encodes the changed blocks of a leaf, (blocks, 256), its last block padded with zeros.

    ``decoded`` of a large lossy leaf is lent from the memory of ``runtime``: the caller gives it
    back. No block outside of ``only`` has changed; None if that is unknown.
    """
    ranges = [range(len(leaf))] if only is None else only
    spans = [span for one in ranges for span in _spans(one)]
    room: np.ndarray | None = None

    def attempt(codec: str) -> tuple[LeafDelta, Callable[[], float]]:
        nonlocal room
        reason = ""
        if codec != block_codecs.LOSSLESS and not _can(codec, leaf, reference):
            reason = f"{codec}: no reference" if reference is None else f"{codec}: {leaf.dtype}"
            codec = block_codecs.LOSSLESS
        decoded = leaf
        if codec != block_codecs.LOSSLESS:
            if room is None:
                is_lent = leaf.nbytes >= _LENT_BYTES
                room = (runtime.memory.allocate if is_lent else np.empty)(leaf.shape, leaf.dtype)
                if only is not None:
                    np.copyto(room, leaf)
            decoded = room

        def of_span(blocks: range) -> _Span:
            chunk, start = slice(blocks.start, blocks.stop), blocks.start
            before = None if reference is None else reference[chunk]
            if codec == block_codecs.LOSSLESS:
                return _exact(leaf[chunk], before, start)
            return _lossy(codec, leaf[chunk], before, start, decoded[chunk])

        found = runtime.map(of_span, spans)
        pieces = _joined(piece for span in found for piece in span.pieces)
        if not pieces and reference is not None:
            decoded = reference
        lost = math.fsum(span.squared_error for span in found)
        error = encode_blocks.relative(lost, math.fsum(span.squared_norm for span in found))
        delta = LeafDelta(pieces, decoded, codec, reason, error if pieces else 0.0)
        return delta, lambda: _vanished(leaf, decoded, codec)

    found = None
    try:
        found = within_budget(codec, max_error, attempt)
        return found
    finally:
        if room is not None and (found is None or found.decoded is not room):
            runtime.memory.give_back([room])


def _spans(blocks: range) -> Iterator[range]:
    """Cuts a range of blocks into what one thread encodes at once."""
    for start in range(blocks.start, blocks.stop, _SPAN_BLOCKS):
        yield range(start, min(start + _SPAN_BLOCKS, blocks.stop))


def within_budget(
    codec: str,
    max_error: float | None,
    attempt: Callable[[str], tuple[LeafDelta, Callable[[], float]]],
) -> LeafDelta:
    """Encodes a leaf with a codec, or the first more precise one within the budget.

    ``attempt`` also returns a function for the share of positive values that is lost in a leaf
    without negative ones; if a codec is impossible, it encodes losslessly.
    """
    reason = ""
    while True:
        found, vanished = attempt(codec)
        if max_error is None or found.codec == block_codecs.LOSSLESS:
            break
        if found.error > max_error:
            reason = f"{codec} would change it by {found.error:.3g}, more than {max_error:g}"
            codec = block_codecs.wider(codec)
        elif (share := vanished()) > _MOST_VANISHED:
            reason = f"{codec} would make {share:.0%} of its positive values 0 or less"
            codec = block_codecs.LOGARITHM
        else:
            break
    return found._replace(reason=found.reason or reason)


def _vanished(leaf: np.ndarray, decoded: np.ndarray, codec: str) -> float:
    """Returns the share of values that a linear code loses in a leaf without negative values."""
    if not block_codecs.is_linear(codec):
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
    found = block_codecs.get(codec)
    return found.accepts_dtype(leaf.dtype.name) and not (found.relative and reference is None)


def _joined(pieces: Iterable[EncodedBlocks]) -> list[EncodedBlocks]:
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


# Lossless.


def _exact(now: np.ndarray, before: np.ndarray | None, start: int) -> _Span:
    itemsize = now.dtype.itemsize
    if before is None:
        blocks = np.arange(len(now))
        codec = "planes" if itemsize == _PLANES_BYTES else "raw"
        return _Span([_lossless(codec, now, None, blocks, start)], 0.0, 0.0)
    bits, most = block_codecs.bits_dtype(now.dtype), _MOST_SPARSE[itemsize]
    encode = kernels.encode_sparse if kernels.available() else _sparse
    states, counts, at, changes = encode(now.view(bits), before.view(bits), most)
    few, many = np.flatnonzero(states == CODED), np.flatnonzero(states == LEFT)
    pieces = []
    if len(few):
        pieces.append(
            EncodedBlocks("sparse", few + start, {"count": counts, "at": at, "": changes})
        )
    if len(many):
        codec = "xor" if itemsize == _PLANES_BYTES else "raw"
        pieces.append(_lossless(codec, now, before, many, start))
    return _Span(pieces, 0.0, 0.0)


def _sparse(
    now: np.ndarray, before: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    changed = now != before
    counts = changed.sum(axis=1, dtype=np.uint16)
    states = np.where(counts > most, LEFT, CODED).astype(np.uint8)
    states[counts == 0] = UNCHANGED
    coded = states == CODED
    changed &= coded[:, None]
    places = np.flatnonzero(changed)
    changes = now.reshape(-1)[places] ^ before.reshape(-1)[places]
    return states, counts[coded], (places % BLOCK).astype(np.uint8), changes


def _lossless(
    codec: str, now: np.ndarray, before: np.ndarray | None, blocks: np.ndarray, start: int
) -> EncodedBlocks:
    chosen = _rows(now, blocks)
    bits = block_codecs.bits_dtype(now.dtype)
    if codec == "xor":
        assert before is not None
        chosen = np.bitwise_xor(chosen.view(bits), _rows(before, blocks).view(bits))
    [(_, array)] = block_codecs.get(codec).stored(now.dtype).items()
    stored = np.ascontiguousarray(chosen).view(array.dtype).reshape(len(blocks), *array.trailing)
    return EncodedBlocks(codec, blocks + start, {"": stored})


def _rows(blocks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return blocks if len(chosen) == len(blocks) else blocks[chosen]


# Lossy.


def _lossy(
    codec: str,
    now: np.ndarray,
    before: np.ndarray | None,
    start: int,
    decoded: np.ndarray,
) -> _Span:
    """Encodes a span; ``decoded`` receives the values that a reader decodes."""
    found = encode_blocks.encode(block_codecs.get(codec), now, before, decoded)
    coded, left = np.flatnonzero(found.states == CODED), np.flatnonzero(found.states == LEFT)
    pieces = [EncodedBlocks(codec, coded + start, found.arrays)] if len(coded) else []
    error = found.squared_error
    # Blocks that the codec cannot represent are encoded with the next more precise one.
    if len(left) and (wider := block_codecs.wider(codec)) == block_codecs.LOSSLESS:
        pieces.append(_lossless("raw", decoded, None, left, start))
    elif len(left):
        few = np.empty((len(left), BLOCK), now.dtype)
        reference = None if before is None else before[left]
        more = _lossy(wider, now[left], reference, 0, few)
        decoded[left] = few
        pieces += [one._replace(blocks=left[one.blocks] + start) for one in more.pieces]
        error += more.squared_error
    return _Span(pieces, error, found.squared_norm)
