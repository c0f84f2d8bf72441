# SPDX-License-Identifier: Apache-2.0
"""Times blocks of dense leaves: encoding and decoding beside a copy."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import ways
from report import Report, Sample, interleaved, percent, speed

from deltackpt.codecs import block_codecs
from deltackpt.format.dtypes import dtype_of
from deltackpt.format.row_blocks import BLOCK
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes
from deltackpt.save.block_codes import EncodedBlocks, LeafDelta

#: Bars with compiled kernels, as multiples of the time of a plain copy: to encode some cases, to
#: encode others, and to decode.
BARS = {"ef4 of float32": 2.0}
ENCODE_BAR, DECODE_BAR = 6.0, 4.0
#: Seconds for a GB of bf16 weights of which 1 % changed, lossless.
SPARSE_BAR = 1.0
#: Blocks that a thread decodes at once.
_SPAN_BLOCKS = 1 << 12
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
        patterns = found.reshape(-1).view(block_codecs.bits_dtype(kind))
        patterns[places] ^= 1
        yield Case(f"exact, 1 % of {dtype} changed", "lossless", weights, found)


def measure(case: Case, pool: Runtime) -> dict[str, float]:
    """Copies, encodes and decodes a leaf: seconds per GB, and the stored share and error."""
    out = host_memory.empty_buffer(case.now.shape, case.now.dtype)
    bits = block_codecs.bits_dtype(case.now.dtype)
    seconds = {"copy": ways.copy_secs(case.now, out, pool)}
    started = time.perf_counter()
    leaf = block_codes.encode_leaf(case.now, case.before, case.codec, None, pool)
    seconds["encode"] = time.perf_counter() - started
    np.copyto(out, case.before)
    seconds["decode"] = _decode(leaf, out, pool)
    assert np.array_equal(out.view(bits), np.asarray(leaf.decoded).view(bits))
    stored = sum(piece.nbytes for piece in leaf.pieces) / case.now.nbytes
    other = {"stored": stored, "error": leaf.error}
    pool.memory.give_back([leaf.decoded])
    return {what: value / case.now.nbytes * 1e9 for what, value in seconds.items()} | other


def _decode(leaf: LeafDelta, out: np.ndarray, pool: Runtime) -> float:
    """Seconds to decode the leaf in place, over its parent."""
    started = time.perf_counter()
    work = [one for piece in leaf.pieces for one in _spans(piece, out.dtype)]
    list(pool.map(lambda piece: _apply(piece, out), work))
    return time.perf_counter() - started


def _spans(piece: EncodedBlocks, dtype: np.dtype) -> Iterator[EncodedBlocks]:
    stored = block_codecs.get(piece.codec).stored(dtype)
    ends = None
    if any(array.ragged for array in stored.values()):
        ends = np.concatenate([[0], np.cumsum(piece.arrays["count"], dtype=np.int64)])
    for start in range(0, len(piece.blocks), _SPAN_BLOCKS):
        stop = min(start + _SPAN_BLOCKS, len(piece.blocks))
        arrays = {}
        for suffix, array in stored.items():
            part = slice(start, stop)
            if array.ragged:
                assert ends is not None
                part = slice(ends[start], ends[stop])
            arrays[suffix] = piece.arrays[suffix][part]
        yield EncodedBlocks(piece.codec, piece.blocks[start:stop], arrays)


def _apply(piece: EncodedBlocks, out: np.ndarray) -> None:
    first, last = int(piece.blocks[0]), int(piece.blocks[-1]) + 1
    rows = range(first, last) if last - first == len(piece.blocks) else piece.blocks
    block_codecs.get(piece.codec).decode(piece.arrays, rows, out)


def add(report: Report, count: int, rounds: int) -> None:
    """Adds lines for leaves of ``count`` blocks."""
    with Runtime(_THREADS, memory_bytes=1 << 30) as pool:
        for case in cases(count):
            found = interleaved(rounds, {"": functools.partial(measure, case, pool)})
            for what, bar in (
                ("encode", BARS.get(case.name, ENCODE_BAR)),
                ("decode", DECODE_BAR),
            ):
                mine, copied = found("", what), found("", "copy")
                report.compare(f"{case.name}: {what}", mine, "a copy", copied, speed, bar=bar)
            if case.codec == "lossless" and case.now.dtype.name == "bfloat16":
                line = f"{case.name}: encode"
                report.state(line, found("", "encode"), speed, bar=SPARSE_BAR)
            for what in ("stored", "error"):
                share = Sample(found("", what).values[:1])
                report.state(f"{case.name}: {what}", share, percent)
    report.section()
