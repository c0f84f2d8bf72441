# SPDX-License-Identifier: Apache-2.0
"""Times the encoding and decoding of dense leaves as blocks, for ``codecs.py``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.format.dense_blocks import BLOCK
from deltackpt.format.dtypes import dtype_of
from deltackpt.resources import memory
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes
from deltackpt.save.block_codes import EncodedBlocks, LeafDelta

#: Blocks that a thread decodes at once.
_STRETCH = 1 << 12
_THREADS = 2


class Case(NamedTuple):
    """A leaf and how it is coded.

    Attributes:
      name: its name in the table.
      codec: its codec.
      before: (blocks, 256), what the parent decodes to.
      now: the same shape, one step later.
    """

    name: str
    codec: str
    before: np.ndarray
    now: np.ndarray


class Measured(NamedTuple):
    """Measurements of a case.

    Attributes:
      seconds: operation to seconds per GB of the leaf, one value per round.
      stored: fraction of the leaf's bytes that is stored, before zstd.
      error: relative l2 error.
    """

    seconds: dict[str, list[float]]
    stored: float
    error: float


def cases(count: int) -> Iterator[Case]:
    """The cases, one at a time.

    Args:
      count: blocks of a leaf.
    """
    random = np.random.default_rng(0)
    before = random.standard_normal((count, BLOCK), np.float32)
    # An optimizer step: most changes are small, some are not.
    change = random.standard_normal((count, BLOCK), np.float32)
    change *= np.float32(1e-3) * random.standard_exponential((count, 1), np.float32)
    for dtype in ("float32", "bfloat16"):
        kind = dtype_of(dtype)
        for codec in ("ef4", "ef8", "int8"):
            yield Case(
                f"{codec} of {dtype}", codec, before.astype(kind), (before + change).astype(kind)
            )
        moments = np.square(before)
        later = moments * np.exp2(20 * change)
        for codec in ("log4", "log8"):
            yield Case(f"{codec} of {dtype}", codec, moments.astype(kind), later.astype(kind))
        weights = before.astype(kind)
        found = weights.copy()
        places = random.integers(0, found.size, found.size // 100)
        patterns = found.reshape(-1).view(of_blocks.bits_dtype(kind))
        patterns[places] ^= 1
        yield Case(f"exact, 1 % of {dtype} changed", "lossless", weights, found)


def measure(case: Case, rounds: int, pool: Runtime) -> Measured:
    """Copies, encodes and decodes a leaf in turn, with two threads each."""
    seconds: dict[str, list[float]] = defaultdict(list)
    out = memory.empty_buffer(case.now.shape, case.now.dtype)
    gigabytes = case.now.nbytes / 1e9
    for number in range(rounds + 1):
        found = {"copy": _copy(case.now, out, pool)}
        started = time.perf_counter()
        leaf = block_codes.encode_leaf(case.now, case.before, case.codec, None, pool)
        found["encode"] = time.perf_counter() - started
        np.copyto(out, case.before)
        found["decode"] = _decode(leaf, out, pool)
        bits = of_blocks.bits_dtype(out.dtype)
        assert np.array_equal(out.view(bits), leaf.decoded.view(bits))
        if number:
            for what, value in found.items():
                seconds[what].append(value / gigabytes)
    stored = sum(piece.nbytes for piece in leaf.pieces) / case.now.nbytes
    return Measured(dict(seconds), stored, leaf.error)


def _copy(leaf: np.ndarray, out: np.ndarray, pool: Runtime) -> float:
    step = -(-len(leaf) // _THREADS)
    parts = [slice(start, start + step) for start in range(0, len(leaf), step)]
    started = time.perf_counter()
    list(pool.map(lambda part: np.copyto(out[part], leaf[part]), parts))
    return time.perf_counter() - started


def _decode(leaf: LeafDelta, out: np.ndarray, pool: Runtime) -> float:
    """Seconds to decode the leaf in place, over its parent."""
    started = time.perf_counter()
    work = [one for piece in leaf.pieces for one in _stretches(piece, out.dtype)]
    list(pool.map(lambda piece: _apply(piece, out), work))
    return time.perf_counter() - started


def _stretches(piece: EncodedBlocks, dtype: np.dtype) -> Iterator[EncodedBlocks]:
    stored = of_blocks.get(piece.codec).stored(dtype)
    ends = None
    if any(array.ragged for array in stored.values()):
        ends = np.concatenate([[0], np.cumsum(piece.arrays["count"], dtype=np.int64)])
    for start in range(0, len(piece.blocks), _STRETCH):
        stop = min(start + _STRETCH, len(piece.blocks))
        arrays = {}
        for suffix, array in stored.items():
            part = slice(start, stop)
            if array.ragged:
                assert ends is not None
                part = slice(ends[start], ends[stop])
            arrays[suffix] = piece.arrays[suffix][part]
        yield EncodedBlocks(piece.codec, piece.blocks[start:stop], arrays)


def _apply(piece: EncodedBlocks, out: np.ndarray) -> None:
    codec, blocks = of_blocks.get(piece.codec), piece.blocks
    if isinstance(codec, of_blocks.Sparse):
        codec.change(piece.arrays, blocks, out)
        return
    first, last = int(blocks[0]), int(blocks[-1]) + 1
    if last - first == len(blocks):
        part = out[first:last]
        codec.decode(piece.arrays, part if codec.relative else None, part)
        return
    found = out[blocks]
    codec.decode(piece.arrays, found if codec.relative else None, found)
    out[blocks] = found
