# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, and their fallbacks.

``deltackpt._kernels`` is compiled from C when the package is built, if there is a compiler. Its
functions release the GIL, so the threads of a ``Runtime`` run them in parallel. ``gather``,
``scatter``, ``scan`` and ``widen_halves`` use numpy if the module was not built, and compute the
same bits. The other functions need it: if ``available`` returns False, their callers use XLA or
numpy, and google_crc32c for checksums. In shapes, n is the number of rows, blocks or bytes; arrays
are contiguous.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from types import ModuleType

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


_used = _imported()
#: Stamps per compiled call, which limits the memory for its result.
_SCANNED_AT_ONCE = 1 << 22


def available() -> bool:
    """Returns whether the compiled kernels are used."""
    return _used is not None


def instruction_set() -> str:
    """Returns the instruction set in use: avx512, avx2 or baseline; "" without compiled kernels."""
    return "" if _used is None else _used.path()


def _is_aligned(array: np.ndarray) -> bool:
    # numpy aligns complex numbers to half their size.
    address, _ = array.__array_interface__["data"]
    return array.flags.c_contiguous and not address % max(1, array.itemsize)


# Rows.


def _as_numpy(arrays: Sequence[object]) -> list[np.ndarray]:
    return [*map(np.asarray, arrays)]


#: Using the buffer of a jax array takes half as long as ``np.asarray``; some dtypes have none.
_CONVERSIONS: tuple[Callable[[Sequence[object]], Sequence[object]], ...] = (list, _as_numpy)


def gather(
    sources: Sequence[object],
    firsts: np.ndarray,
    stops: np.ndarray,
    rows: np.ndarray,
    out: np.ndarray,
) -> None:
    """Copies rows (n,) of numpy or jax arrays into ``out``, a contiguous array of their dtype.

    ``rows`` up to the first of the ``stops`` are those of the first source, and so on; each of the
    ``firsts`` is the index of the first row of a source. ``out`` does not overlap the sources. A
    row index that is out of range raises ``IndexError``; nothing is written then.
    """
    if not out.size:
        return
    if _used is not None and _is_aligned(out):
        rows = np.ascontiguousarray(rows, np.int64)
        for convert in _CONVERSIONS:
            with contextlib.suppress(BufferError):  # Not contiguous, or a dtype without buffers.
                _used.gather(convert(sources), out.itemsize, out[0].size, firsts, stops, rows, out)
                return
    sources = _as_numpy(sources)
    starts = np.concatenate([[0], stops[:-1]])
    chunks = [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist())]
    local = rows - np.repeat(firsts, stops - starts)
    for source, first, chunk in zip(sources, firsts.tolist(), chunks):
        if len(found := local[chunk]) and not 0 <= found.min() <= found.max() < len(source):
            raise IndexError(f"gather: expected rows in {first} to {first + len(source) - 1}")
    for source, chunk in zip(sources, chunks):
        # mode="clip" lets numpy write straight into `out`.
        source.take(local[chunk], 0, out[chunk], "clip")


def scatter(
    values: np.ndarray,
    positions: np.ndarray | None,
    rows: np.ndarray,
    first: int,
    out: np.ndarray,
) -> None:
    """Copies row ``positions[i]`` of values to row ``rows[i]`` of ``out``.

    Both arrays are contiguous, and have rows of one size; ``first`` is the index of the first row
    of ``out``. If ``positions``, (n,) int64 like ``rows``, is None, there are n values, which are
    copied in order. An index that is out of range raises ``IndexError``, values of another size or
    number a ``ValueError``; nothing is written then.
    """
    row_bytes = math.prod(out.shape[1:]) * out.itemsize
    count, found = len(values if positions is None else positions), len(values) * row_bytes
    if (count, found) != (len(rows), values.nbytes):
        raise ValueError(f"scatter: expected {len(rows)} rows of {row_bytes} bytes, found others")
    if not row_bytes:
        return
    rows = np.ascontiguousarray(rows, np.int64)
    data = [one.reshape(-1).view(np.uint8) for one in (values, out)]
    if _used is not None:
        _used.scatter(data[0], row_bytes, positions, rows, first, data[1])
        return
    for found, low, count in ((rows, first, len(out)), (positions, 0, len(values))):
        if found is not None and len(found) and not low <= found.min() <= found.max() < low + count:
            raise IndexError(f"scatter: expected indices in {low} to {low + count - 1}")
    # numpy moves elements of one large dtype 1.5 times as fast.
    source, target = (one.view(np.dtype((np.void, row_bytes))) for one in data)
    target[rows - first] = source if positions is None else source[positions]


def scan(stamps: Sequence[Sized], clock: int, first: int = 0) -> np.ndarray:
    """Returns the int64 indices of the int32 stamps above a clock, ascending.

    The numpy or jax arrays count as one; ``first`` is the index of the first stamp.
    """
    count = sum(map(len, stamps))
    if not count:
        return np.empty(0, np.int64)
    if count > _SCANNED_AT_ONCE:
        chunks = []
        for one in _as_numpy(stamps):
            for start in range(0, len(one), _SCANNED_AT_ONCE):
                piece = one[start : start + _SCANNED_AT_ONCE]
                chunks.append(scan([piece], clock, first))
                first += len(piece)
        return np.concatenate(chunks)
    if _used is not None:
        # Pages that are never written take no memory.
        found = np.empty(count, np.int64)
        for convert in _CONVERSIONS:
            with contextlib.suppress(BufferError):  # Not contiguous, or a dtype without buffers.
                found.resize(_used.scan(convert(stamps), clock, first, found), refcheck=False)
                return found
    return (np.concatenate(_as_numpy(stamps)) > clock).nonzero()[0] + np.int64(first)


def encode_uniform(
    rows: np.ndarray,
    width: int,
    codec: tuple[int, bool, int, int, float, float, float],
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    representable: np.ndarray,
    squared_error: np.ndarray,
    squared_norm: np.ndarray,
) -> None:
    """Encodes rows of a float dtype, of ``width`` elements, as ``codecs.Uniform``.

    ``codec`` is bits, whether it is symmetric, steps, refits, 1 / bins (0 without a search), and
    the smallest and largest magnitudes of rows that it can represent. ``arrays`` receive the codes,
    (n, packed bytes) uint8; the scales, (n,) uint16; and the offsets, (n,) uint16, or None if
    symmetric. ``representable``, (n,) bool, and the errors, (n,) float32, receive the fields of
    ``save.encode.Encoded`` with these names.
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
    """Rounds float32 rows of ``width`` elements to ``dtype``, bfloat16 or float16.

    ``limits`` are the smallest and largest magnitudes of rows that the codec can represent;
    ``patterns``, uint16, receives the bits. The other arrays are as for ``encode_uniform``.
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
    """Decodes ``codecs.Uniform`` into ``out``, (n, *trailing) float32, aligned.

    ``codes`` are (n, packed bytes) uint8; ``scale`` and ``offset``, (n,) of any 16-bit dtype, are
    the stored bits.
    """
    assert _used is not None
    codes, scale = np.require(codes, None, "C"), np.require(scale, None, ("C", "A"))
    offset = None if offset is None else np.require(offset, None, ("C", "A"))
    _used.decode_uniform(codes, scale, offset, bits, math.prod(out.shape[1:]), out)


def widen_halves(patterns: np.ndarray, out: np.ndarray) -> None:
    """Converts float16 bits, (n, *trailing) uint16, to float32 in ``out``, of the same shape."""
    if _used is None or not (_is_aligned(patterns) and _is_aligned(out)):
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


def encode_blocks(
    codec: str,
    now: np.ndarray,
    before: np.ndarray | None,
    out: np.ndarray,
    *,
    table: np.ndarray | None = None,
    within: tuple[float, float] = (0.0, 0.0),
) -> tuple[np.ndarray, tuple[np.ndarray, ...], float, float]:
    """Encodes blocks (n, 256) with a lossy codec of dense leaves.

    ``before`` is the reference, or None. ``out`` receives the blocks as readers decode them; blocks
    that are not coded equal ``now``. Blocks whose bits equal the reference are skipped.
    ``table`` is ``codecs.block_codecs.places`` for log8, ``factors`` for log4, else None;
    ``within`` are the smallest and largest positive numbers that log4 can represent.

    Returns the state of each block, (n,) uint8: ``UNCHANGED``, ``CODED`` or ``LEFT``; for the m
    coded blocks, codes (m, bytes) uint8, words (m,) uint16 and steps (m,) uint8, as far as the
    codec has them; the squared error of these; and the squared norm of all finite values.
    """
    assert _used is not None
    count = len(now)
    states = np.empty(count, np.uint8)
    codes = np.empty((count, _BLOCK // 2 if codec in _FOUR_BITS else _BLOCK), np.uint8)
    words = np.empty(count, np.uint16) if codec not in _WORDLESS else None
    steps = np.empty(count, np.uint8) if codec in _STEPS else None
    limits = np.array(within, np.float32).view(np.uint32).tolist()
    coded, squared_error, squared_norm = _used.encode_blocks(
        *(_BLOCK_CODECS[codec], _DTYPES[now.dtype.name], now, before, out),
        *(states, codes, words, steps, table, *limits),
    )
    arrays = tuple(one[:coded] for one in (codes, words, steps) if one is not None)
    return states, arrays, squared_error, squared_norm


def decode_blocks(
    codec: str,
    codes: np.ndarray,
    words: np.ndarray | None,
    steps: np.ndarray | None,
    rows: range | np.ndarray,
    data: np.ndarray,
    table: np.ndarray | None = None,
) -> None:
    """Decodes n blocks in place into ascending ``rows`` of ``data``, (m, 256), the reference.

    ``codes`` are (n, bytes) uint8; ``words``, (n,) of any 16-bit dtype, scales or first points;
    ``steps``, (n,) uint8. A wrong row index raises ``IndexError``, a step of log4 above
    ``codecs.block_codecs.WIDEST_STEP`` a ``ValueError``.
    """
    assert _used is not None
    _used.decode_blocks(
        *(_BLOCK_CODECS[codec], _DTYPES[data.dtype.name], *_row_arguments(rows)),
        *(codes, words, steps, table, data),
    )


def encode_sparse(
    now: np.ndarray, before: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Finds the changed elements of blocks (n, 256), unsigned, of which at most ``most`` changed.

    Returns the state of each block, (n,) uint8: ``LEFT`` if more elements changed. For the m coded
    blocks: the numbers of changed elements, (m,) uint16; the positions of all k changed elements in
    their blocks, (k,) uint8; and the XOR of their bits, (k,) of the dtype of ``now``.
    """
    assert _used is not None
    count = len(now)
    states, counts = np.empty(count, np.uint8), np.empty(count, np.uint16)
    at, changes = np.empty(count * most, np.uint8), np.empty(count * most, now.dtype)
    coded, found = _used.encode_sparse(now.itemsize, most, now, before, states, counts, at, changes)
    # Copies free the rest of the memory.
    return states, counts[:coded].copy(), at[:found].copy(), changes[:found].copy()


def apply_sparse(
    counts: np.ndarray,
    at: np.ndarray,
    changes: np.ndarray,
    rows: range | np.ndarray,
    data: np.ndarray,
) -> None:
    """Changes elements of blocks in ascending ``rows`` of ``data``, (m, 256), by XOR.

    ``counts``, ``at`` and ``changes`` are as from ``encode_sparse``; the positions ascend in a
    block. A wrong row index raises ``IndexError``, other inconsistent arrays a ``ValueError``.
    """
    assert _used is not None
    arguments = _row_arguments(rows)
    _used.apply_sparse(changes.itemsize, *arguments, counts, at, changes, data)


def _row_arguments(rows: range | np.ndarray) -> tuple[np.ndarray | None, int, int]:
    if isinstance(rows, range):
        return None, rows.start, len(rows)
    return np.ascontiguousarray(rows, np.int64), 0, len(rows)


# Checksums.


def crc32c_blocks(
    data: np.ndarray, out: np.ndarray | None, block_bytes: int, used: int, crc: int
) -> list[int] | None:
    """Returns the CRC32C of each block of bytes, (n,) uint8, n > 0; None without hardware support.

    The first block begins ``used`` bytes earlier, whose CRC32C is ``crc``. With ``out``, (n,)
    uint8, copies the bytes there: the checksums are those of the copy.
    """
    if _used is None:
        return None
    sums = np.empty(-(-(used + len(data)) // block_bytes), np.uint32)
    if not _used.crc32c_blocks(data, out, block_bytes, used, crc, sums):
        return None
    return sums.tolist()
