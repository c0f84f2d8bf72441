# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, and their fallbacks.

``deltackpt._kernels`` is compiled from C when the package is built, if there is a compiler. Its
functions release the GIL, so the threads of a ``Runtime`` run them in parallel. ``gather``,
``scan`` and ``widen_halves`` use numpy if the module was not built, and compute the same bits.
The other functions need it: if ``available`` returns False, their callers use XLA or numpy.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np


def _imported() -> ModuleType | None:
    """Returns the compiled module; None if it was not built, or from another source."""
    try:
        from deltackpt import _kernels
    except ImportError:  # It is optional.
        return None
    source = Path(__file__).with_name("_kernels.c")
    if source.exists() and zlib.crc32(source.read_bytes()) != _kernels.SOURCE_CRC32:
        warnings.warn(
            f"the compiled kernels are not used: {_kernels.__file__} was built from another "
            f"version of {source}; run make kernels, or reinstall deltackpt",
            stacklevel=2,
        )
        return None
    return _kernels


_built = _imported()
_used = _built
#: Stamps per compiled call, which limits the memory for its result.
_SCANNED_AT_ONCE = 1 << 22


def available() -> bool:
    """Returns whether the compiled kernels are used."""
    return _used is not None


def instruction_set() -> str:
    """Returns the instruction set in use: avx512, avx2 or baseline; "" without compiled kernels."""
    return "" if _used is None else _used.path()


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets that this CPU supports, the fastest first; none if not built."""
    return () if _built is None else _built.paths()


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Makes all threads use one of ``instruction_sets``, or no compiled kernels if it is ""."""
    global _used
    before, set_before = _used, instruction_set()
    if name:
        assert _built is not None
        _built.use(name)
    _used = _built if name else None
    try:
        yield
    finally:
        _used = before
        if _used is not None:
            _used.use(set_before)


def _plain(array: np.ndarray) -> bool:
    # numpy aligns complex numbers to half their size.
    address, _ = array.__array_interface__["data"]
    return array.flags.c_contiguous and not address % max(1, array.itemsize)


# Rows.


def gather(source: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of an array into ``out``.

    Args:
      source: (length, *trailing).
      rows: (n,) row indices, each in 0 to length - 1.
      out: (n, *trailing) of the same dtype, contiguous; it does not overlap ``source``.

    Raises:
      IndexError: a row index is out of range. Nothing is written then.
    """
    if _used is None or not (_plain(source) and _plain(out)) or not source[:1].size:
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(source):
            raise IndexError(f"gather: expected rows in 0 to {len(source) - 1}")
        # mode="clip" lets numpy write straight into `out`.
        source.take(rows, 0, out, "clip")
        return
    row_items = source[0].size
    _used.gather(source, source.itemsize, row_items, np.ascontiguousarray(rows, np.int64), out)


def scan(stamps: np.ndarray, clock: int, first: int = 0) -> np.ndarray:
    """Returns the indices of the stamps above a clock, ascending.

    Args:
      stamps: (n,) int32.
      clock: int32.
      first: the index of the first stamp.

    Returns:
      int64 indices from ``first`` to first + n - 1.
    """
    if _used is None or not _plain(stamps):
        return (stamps > clock).nonzero()[0] + np.int64(first)
    parts = []
    for start in range(0, max(1, len(stamps)), _SCANNED_AT_ONCE):
        part = stamps[start : start + _SCANNED_AT_ONCE]
        # Pages that are never written take no memory.
        found = np.empty(len(part), np.int64)
        found.resize(_used.scan(part, clock, first + start, found), refcheck=False)
        parts.append(found)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def encode_uniform(
    rows: np.ndarray,
    width: int,
    codec: tuple[int, bool, int, int, float, float, float],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    representable: np.ndarray,
    squared_error: np.ndarray,
    squared_norm: np.ndarray,
) -> None:
    """Encodes n rows as ``codecs.Uniform``; ``available`` must be True.

    Args:
      rows: (n, *trailing) float32, bfloat16 or float16, contiguous.
      width: elements per row.
      codec: bits, whether it is symmetric, steps, refits, 1 / bins (0 without a search), and the
        smallest and largest magnitudes of rows that it can represent.
      arrays: receive the codes, (n, packed bytes) uint8; the scales, (n,) uint16; and the offsets,
        (n,) uint16, or None if the codec is symmetric.
      representable: (n,) bool, receives ``save.encode.Encoded.representable``.
      squared_error: (n,) float32, receives the field of ``Encoded`` with this name.
      squared_norm: (n,) float32, likewise.
    """
    assert _used is not None
    name = rows.dtype.name
    _used.encode_uniform(
        rows, name, width, codec, *arrays, representable, squared_error, squared_norm
    )


def encode_shorter(
    rows: np.ndarray,
    width: int,
    dtype: str,
    limits: tuple[float, float],
    patterns: np.ndarray,
    representable: np.ndarray,
    squared_error: np.ndarray,
    squared_norm: np.ndarray,
) -> None:
    """Rounds n float32 rows to ``dtype``; ``available`` must be True.

    Args:
      rows: (n, *trailing) float32, contiguous.
      width: elements per row.
      dtype: bfloat16 or float16.
      limits: the smallest and largest magnitudes of rows that the codec can represent.
      patterns: (n, *trailing) uint16, receives the bits of the rounded values.
      representable: (n,) bool, receives ``save.encode.Encoded.representable``.
      squared_error: (n,) float32, receives the field of ``Encoded`` with this name.
      squared_norm: (n,) float32, likewise.
    """
    assert _used is not None
    figures = representable, squared_error, squared_norm
    _used.encode_shorter(rows, width, dtype, *limits, patterns, *figures)


def decode_uniform(
    codes: np.ndarray,
    scale: np.ndarray,
    offset: np.ndarray | None,
    bits: int,
    out: np.ndarray,
) -> None:
    """Decodes n rows of ``codecs.Uniform``; ``available`` must be True.

    Args:
      codes: (n, packed bytes) uint8.
      scale: (n,) of any 16-bit dtype: the stored bits.
      offset: (n,), as ``scale``; None if the codec is symmetric.
      bits: bits per code.
      out: (n, *trailing) float32, contiguous and aligned; receives the rows.
    """
    assert _used is not None
    codes, scale = np.require(codes, None, "C"), np.require(scale, None, ("C", "A"))
    offset = None if offset is None else np.require(offset, None, ("C", "A"))
    _used.decode_uniform(codes, scale, offset, bits, math.prod(out.shape[1:]), out)


def widen_halves(patterns: np.ndarray, out: np.ndarray) -> None:
    """Converts float16 bits, (n, *trailing) uint16, to float32 in ``out``, of the same shape."""
    if _used is None or not (_plain(patterns) and _plain(out)):
        np.copyto(out, patterns.view(np.float16))
    else:
        _used.widen_halves(patterns, out)


# Blocks.

#: State of a block: equal to the reference, encoded, or not representable by the codec.
UNCHANGED, CODED, LEFT = range(3)
_BLOCK = 256
#: Numbers in ``_kernels.c`` of the codecs of dense leaves, and of dtypes.
_BLOCK_CODECS = {"int8": 0, "ef4": 1, "ef8": 2, "log8": 3, "log4": 4}
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
#: Codecs with 4 bits per element, with a step per block, and without a 16-bit word per block.
_FOUR_BITS, _STEPS, _WORDLESS = {"ef4", "log4"}, {"log8", "log4"}, {"log4"}


class CodedBlocks(NamedTuple):
    """The result of ``encode_blocks``.

    Attributes:
      states: (n,) uint8: ``UNCHANGED``, ``CODED`` or ``LEFT``.
      arrays: arrays of the m coded blocks: codes, (m, bytes) uint8; then, if the codec has them,
        words (scales or first points), (m,) uint16, and steps, (m,) uint8.
      squared_error: sum of the squared errors of the coded blocks.
      squared_norm: sum of the squares of the finite values of all blocks.
    """

    states: np.ndarray
    arrays: tuple[np.ndarray, ...]
    squared_error: float
    squared_norm: float


def encode_blocks(
    codec: str,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    *,
    skip_unchanged: bool,
    table: np.ndarray | None = None,
    within: tuple[float, float] = (0.0, 0.0),
) -> CodedBlocks:
    """Encodes blocks with a lossy codec of dense leaves; ``available`` must be True.

    Args:
      codec: name of the codec.
      now: (n, 256) of a float dtype, contiguous.
      before: (n, 256), the reference; None without one.
      out: (n, 256), receives the blocks as readers decode them; blocks that are not coded equal
        ``now``.
      skip_unchanged: whether to skip blocks whose bits equal the reference.
      table: ``codecs.block_codecs.places`` for log8, ``factors`` for log4, else None.
      within: the smallest and largest positive numbers that log4 can represent.
    """
    assert _used is not None
    count = len(now)
    states = np.empty(count, np.uint8)
    codes = np.empty((count, _BLOCK // 2 if codec in _FOUR_BITS else _BLOCK), np.uint8)
    words = np.empty(count, np.uint16) if codec not in _WORDLESS else None
    steps = np.empty(count, np.uint8) if codec in _STEPS else None
    limits = np.array(within, np.float32).view(np.uint32).tolist()
    coded, squared_error, squared_norm = _used.encode_blocks(
        *(_BLOCK_CODECS[codec], _DTYPES[now.dtype.name], skip_unchanged, now, before, out),
        *(states, codes, words, steps, table, *limits),
    )
    arrays = tuple(one[:coded] for one in (codes, words, steps) if one is not None)
    return CodedBlocks(states, arrays, squared_error, squared_norm)


def decode_blocks(
    codec: str,
    codes: np.ndarray,
    words: np.ndarray | None,
    steps: np.ndarray | None,
    rows: range | np.ndarray,
    data: np.ndarray,
    table: np.ndarray | None = None,
) -> None:
    """Decodes blocks in place; ``available`` must be True.

    Args:
      codec: name of the codec.
      codes: (n, bytes) uint8.
      words: (n,) of any 16-bit dtype, scales or first points; None if the codec has none.
      steps: (n,) uint8; None if the codec has none.
      rows: n row indices of ``data``, ascending.
      data: (m, 256) of a float dtype, contiguous; contains the reference.
      table: see ``encode_blocks``.

    Raises:
      IndexError: the row indices do not ascend, or one is out of range.
      ValueError: a step of log4 exceeds ``codecs.block_codecs.WIDEST_STEP``.
    """
    assert _used is not None
    _used.decode_blocks(
        *(_BLOCK_CODECS[codec], _DTYPES[data.dtype.name], *_row_arguments(rows)),
        *(codes, words, steps, table, data),
    )


def encode_sparse(
    now: np.ndarray, before: np.ndarray, most: int, *, skip_unchanged: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Finds the changed elements of blocks in which few changed; ``available`` must be True.

    Args:
      now: (n, 256) unsigned integers, contiguous.
      before: the same shape and dtype.
      most: maximum number of changed elements of a coded block.
      skip_unchanged: whether to skip blocks without changes.

    Returns:
      The state of each block, (n,) uint8: ``LEFT`` if more elements changed. For the m coded
      blocks: the numbers of changed elements, (m,) uint16; the positions of all k changed elements
      in their blocks, (k,) uint8; and the XOR of their bits, (k,) of the dtype of ``now``.
    """
    assert _used is not None
    count = len(now)
    states, counts = np.empty(count, np.uint8), np.empty(count, np.uint16)
    at, changes = np.empty(count * most, np.uint8), np.empty(count * most, now.dtype)
    coded, found = _used.encode_sparse(
        now.itemsize, most, skip_unchanged, now, before, states, counts, at, changes
    )
    # Copies free the rest of the memory.
    return states, counts[:coded].copy(), at[:found].copy(), changes[:found].copy()


def apply_sparse(
    counts: np.ndarray,
    at: np.ndarray,
    changes: np.ndarray,
    rows: range | np.ndarray,
    data: np.ndarray,
) -> None:
    """Changes elements of blocks in place by XOR; ``available`` must be True.

    Args:
      counts: (n,) uint16, the number of changed elements of each block.
      at: (k,) uint8, their positions, ascending in a block.
      changes: (k,) unsigned integers, the XOR of their bits.
      rows: n row indices of ``data``, ascending.
      data: (m, 256) of the dtype of ``changes``, contiguous.

    Raises:
      IndexError: the row indices do not ascend, or one is out of range.
      ValueError: the lengths of ``at`` and ``changes`` differ from the sum of ``counts``, a count
        exceeds 256, or the positions of a block do not ascend.
    """
    assert _used is not None
    arguments = _row_arguments(rows)
    _used.apply_sparse(changes.itemsize, *arguments, counts, at, changes, data)


def _row_arguments(rows: range | np.ndarray) -> tuple[np.ndarray | None, int, int]:
    if isinstance(rows, range):
        return None, rows.start, len(rows)
    return np.ascontiguousarray(rows, np.int64), 0, len(rows)
