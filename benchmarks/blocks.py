# SPDX-License-Identifier: Apache-2.0
"""Times blocks of dense leaves: encoding and decoding beside a copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import ways
from report import Report, Sample, interleaved, percent, speed, timed

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
    """A leaf of (blocks, 256), and how it is coded."""

    name: str
    codec: str
    before: np.ndarray  # What the parent decodes to.
    now: np.ndarray  # One step later.


def cases(count: int) -> Iterator[Case]:
    """The cases with so many blocks, one at a time."""
    random = np.random.default_rng(0)
    before = random.standard_normal((count, BLOCK), np.float32)
    # An optimizer step: most changes are small, some are not.
    change = random.standard_normal((count, BLOCK), np.float32)
    change *= np.float32(1e-3) * random.standard_exponential((count, 1), np.float32)
    moments = np.square(before)
    later = moments * np.exp2(20 * change)
    for dtype in ("float32", "bfloat16"):
        kind = dtype_of(dtype)
        for codec in ("ef4", "ef8", "int8", "log4", "log8"):
            old, new = (moments, later) if "log" in codec else (before, before + change)
            yield Case(f"{codec} of {dtype}", codec, old.astype(kind), new.astype(kind))
        weights = before.astype(kind)
        found = weights.copy()
        places = random.integers(0, found.size, found.size // 100)
        found.reshape(-1).view(block_codecs.bits_dtype(kind))[places] ^= 1
        yield Case(f"exact, 1 % of {dtype} changed", "lossless", weights, found)


def measure(case: Case, pool: Runtime) -> dict[str, float]:
    """Copies, encodes and decodes a leaf: seconds per GB, and the stored share and error."""
    out = host_memory.empty_buffer(case.now.shape, case.now.dtype)
    bits = block_codecs.bits_dtype(case.now.dtype)
    leaves: list[LeafDelta] = []

    def encode() -> None:
        leaves.append(block_codes.encode_leaf(case.now, case.before, case.codec, None, pool))

    def decode() -> None:
        work = [one for piece in leaf.pieces for one in _spans(piece, out.dtype)]
        list(pool.map(lambda piece: _apply(piece, out), work))

    seconds = {"copy": ways.copy_secs(case.now, out, pool), "encode": timed(encode)}
    [leaf] = leaves
    np.copyto(out, case.before)
    seconds["decode"] = timed(decode)
    assert np.array_equal(out.view(bits), np.asarray(leaf.decoded).view(bits))
    stored = sum(piece.nbytes for piece in leaf.pieces) / case.now.nbytes
    other = {"stored": stored, "error": leaf.error}
    pool.memory.give_back([leaf.decoded])
    return {what: value / case.now.nbytes * 1e9 for what, value in seconds.items()} | other


def _spans(piece: EncodedBlocks, dtype: np.dtype) -> Iterator[EncodedBlocks]:
    """Parts of encoded blocks, which threads decode over the parent."""
    stored = block_codecs.get(piece.codec).stored(dtype)
    counts = piece.arrays["count"] if any(one.ragged for one in stored.values()) else ()
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    for start in range(0, len(piece.blocks), _SPAN_BLOCKS):
        part = slice(start, min(start + _SPAN_BLOCKS, len(piece.blocks)))
        values = slice(*ends[[part.start, part.stop]]) if len(counts) else part
        arrays = {
            suffix: piece.arrays[suffix][values if one.ragged else part]
            for suffix, one in stored.items()
        }
        yield EncodedBlocks(piece.codec, piece.blocks[part], arrays)


def _apply(piece: EncodedBlocks, out: np.ndarray) -> None:
    first, last = int(piece.blocks[0]), int(piece.blocks[-1]) + 1
    rows = range(first, last) if last - first == len(piece.blocks) else piece.blocks
    block_codecs.get(piece.codec).decode(piece.arrays, rows, out)


def add(report: Report, count: int, rounds: int) -> None:
    """Adds lines for leaves of ``count`` blocks."""
    with Runtime(_THREADS, memory_bytes=1 << 30) as pool:
        for case in cases(count):
            found = interleaved(rounds, {"": functools.partial(measure, case, pool)})
            bars = {"encode": BARS.get(case.name, ENCODE_BAR), "decode": DECODE_BAR}
            for what, bar in bars.items():
                mine, copied = found("", what), found("", "copy")
                report.compare(f"{case.name}: {what}", mine, "a copy", copied, speed, bar=bar)
            if case.codec == "lossless" and case.now.dtype.name == "bfloat16":
                line = f"{case.name}: encode"
                report.state(line, found("", "encode"), speed, bar=SPARSE_BAR)
            for what in ("stored", "error"):
                share = Sample(found("", what).values[:1])
                report.state(f"{case.name}: {what}", share, percent)
    report.section()
