# SPDX-License-Identifier: Apache-2.0
"""Codecs of dense leaves: blocks of 256 elements, most of them as changes of a reference.

A *reference* is the decoded block of the parent. A *relative* codec stores the change from it, so
errors do not add up along a chain: each save corrects the errors of the previous one. Other codecs
need no reference, and a reader starts with the newest block that uses one of them.

Decode arithmetic is normative: in float32 a product without rounding error (a code of at most 8
bits, a scale of at most 11), then one sum, rounded once; the result is the same whether they are
fused or not. Subnormal numbers follow IEEE 754. A sum is subnormal only if the reference is and the
code is 0: scales are so large that a sum that nearly cancels is 0 or far from subnormal. Compilers
that flush subnormal numbers to 0, such as XLA on the CPU, must not change blocks that contain one.

The logarithmic codecs serve second moments, which span many powers of two within one block: a
linear code would turn the small ones into zero. Their grid has 128 points per octave. A table of
constants represents it, since the last bit of ``exp2`` differs between machines: the float32
nearest to ``2**(m / 128)`` for m from 0 to 127, and these times powers of two. ``log8`` looks its
values up; ``log4`` multiplies the reference by one of them, rounded once, the same on every
machine.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from deltackpt import kernels
from deltackpt.codecs import row_codecs
from deltackpt.codecs.row_codecs import StoredArray, Uniform
from deltackpt.errors import OptionError
from deltackpt.format.dtypes import dtype_of, stored_dtype
from deltackpt.format.row_blocks import BLOCK, LOSSLESS

#: Dtypes of numbers that lossy codecs take.
FLOATS = ("float32", "bfloat16", "float16")

#: Ascending row indices of blocks: a range, or int64 (n,).
BlockRows = range | np.ndarray


@dataclasses.dataclass(frozen=True)
class BlockCodec(abc.ABC):
    """How blocks of one dtype are stored. Stateless; numpy only."""

    name: str  # In manifests and options.
    lossless: bool = True  # Whether decoded blocks equal the blocks bit for bit.
    relative: bool = False  # Whether decoding needs a reference.

    def accepts_dtype(self, dtype: str) -> bool:
        """Returns whether blocks of a dtype can be stored."""
        return self.lossless or dtype in FLOATS

    @abc.abstractmethod
    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """Returns suffix to stored array; the main one has the suffix ``""``."""

    @abc.abstractmethod
    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """Decodes n blocks in place; ``ValueError`` if the arrays cannot be of n blocks.

        ``rows`` are n ascending row indices of ``data``, (m, 256) contiguous, of the blocks' dtype.
        For relative codecs, these rows contain the reference.
        """


def pieces(
    arrays: Mapping[str, np.ndarray], rows: BlockRows, count: int
) -> Iterator[tuple[dict[str, np.ndarray], slice | np.ndarray]]:
    """Yields the stored arrays of ``count`` blocks at a time, with the index of their rows."""
    for start in range(0, len(rows), count):
        chunk = slice(start, start + count)
        some = rows[chunk]
        index = slice(some.start, some.stop) if isinstance(some, range) else some
        yield {suffix: array[chunk] for suffix, array in arrays.items()}, index


def widened(values: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Returns values (n, 256) as float32: themselves, or the first rows of ``out`` (m, 256)."""
    if values.dtype == np.float32:
        return values
    out = out[: len(values)]
    if values.dtype == np.float16:
        with np.errstate(invalid="ignore"):  # Some CPUs warn of signaling NaN.
            kernels.widen_halves(values.view(np.uint16), out)
    else:
        np.copyto(out, values)
    return out


#: Points of the grid per octave.
FINE = 128
#: The grid ranges from ``2**LOWEST_POWER`` to below ``2**END_POWER``: all positive float32 numbers.
LOWEST_POWER, END_POWER = -149, 128
#: Number of points of the grid.
PLACES = (END_POWER - LOWEST_POWER) * FINE
#: Codes of ``log4`` are the moves -7 to 7 plus 8; code 0 is the symbol of zero.
MIDDLE, FURTHEST = 8, 7
#: The widest step of ``log4`` in points: decoded values are within an eighth of an octave.
WIDEST_STEP = 32
#: Dtype to the smallest and largest positive numbers that ``log4`` can represent, before and after
#: a change: their products are normal numbers of the dtype.
WITHIN = {
    "float32": (2.0**-120, 2.0**120),
    "bfloat16": (2.0**-120, 2.0**120),
    "float16": (2.0**-12, 2.0**14),
}
#: Blocks that are decoded at once stay in the cache.
_PIECE_BLOCKS = 256
_SIGNIFICAND_BITS = 23


@functools.cache
def octave() -> tuple[int, ...]:
    """Returns the 24-bit integers nearest to ``2**(23 + m / 128)``, by exact arithmetic.

    Examples:
      >>> octave()[0] == 2**23, octave()[64] == round(2**23 * 2**0.5)
      (True, True)
    """
    precision = 128
    # 2**(1/2), 2**(1/4), ..., 2**(1/128) with ``precision`` fractional bits.
    roots = [2 << precision]
    while len(roots) <= FINE.bit_length() - 1:
        roots.append(math.isqrt(roots[-1] << precision))
    found = []
    for place in range(FINE):
        power = 1 << precision
        for number, root in enumerate(reversed(roots[1:])):
            if place >> number & 1:
                power = power * root >> precision
        shift = precision - _SIGNIFICAND_BITS
        found.append((power + (1 << (shift - 1))) >> shift)
    return tuple(found)


@functools.cache
def powers(dtype: str) -> np.ndarray:
    """Returns the decoded value of each grid point, (PLACES,) of a float dtype, ascending.

    The value is the nearest power of two in float32, rounded to the dtype; never zero or infinite.
    """
    significands = np.array(octave(), np.float64) * 2.0**-_SIGNIFICAND_BITS
    scales = np.ldexp(1.0, np.arange(LOWEST_POWER, END_POWER))
    # Bit patterns: a processor may flush subnormal numbers.
    exact = (scales[:, None] * significands).reshape(-1)
    units = np.rint(exact * 2.0**149)
    normal = exact.astype(np.float32).view(np.uint32)
    found = np.where(exact < 2.0**-126, np.minimum(units, 2.0**23), 0).astype(np.uint32)
    found = np.where(exact < 2.0**-126, found, normal).view(np.float32)
    if dtype == "float16":
        found = np.clip(found, 2.0**-24, 65504).astype(np.float16)
    elif dtype == "bfloat16":
        patterns = found.view(np.uint32)
        patterns = (patterns + 0x7FFF + ((patterns >> 16) & 1)) >> 16
        found = np.clip(patterns, 1, 0x7F7F).astype(np.uint16).view(dtype_of(dtype))
    found.flags.writeable = False
    return found


@functools.cache
def factors() -> np.ndarray:
    """Returns the multipliers of the codes of ``log4``, float32 (steps, 16); 0 for zero."""
    steps = np.arange(WIDEST_STEP + 1)[:, None]
    changes = np.arange(-MIDDLE, FURTHEST + 1) * steps
    found = powers("float32")[changes - LOWEST_POWER * FINE]
    found[:, 0] = 0
    found.flags.writeable = False
    return found


@functools.cache
def places(dtype: str) -> np.ndarray:
    """Returns ``powers`` for all 16-bit points, (65536,); past the end, the last one."""
    found = np.full(1 << 16, powers(dtype)[-1])
    found[:PLACES] = powers(dtype)
    return found


@functools.cache
def _factors_of_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Returns ``factors`` of the lower and the upper code of a byte, each flat (steps * 256,)."""
    code = np.arange(256)
    return factors()[:, code & 15].reshape(-1), factors()[:, code >> 4].reshape(-1)


@dataclasses.dataclass(frozen=True)
class Logarithms(BlockCodec):
    """8-bit codes; each block stores its lowest point and its step.

    Code 0 is zero; code k is the point ``low + (k - 1) * step``. Blocks may contain any positive
    numbers and zeros. If a block spans 20 octaves, the relative error is at most 3 %.
    """

    name: str = "log8"
    lossless: bool = False

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {
            "": StoredArray((BLOCK,), np.dtype(np.uint8), zstd=True),
            "low": StoredArray((), np.dtype(np.uint16), zstd=True),
            "step": StoredArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``: 16-bit points; those past the end are clamped to the last one."""
        table = places(data.dtype.name)
        if kernels.available():
            codes, firsts, steps = arrays[""], arrays["low"], arrays["step"]
            kernels.decode_blocks(self.name, codes, firsts, steps, rows, data, table)
            return
        for some, index in pieces(arrays, rows, _PIECE_BLOCKS):
            codes, steps = some[""], some["step"].astype(np.uint16)[:, None]
            at = codes.astype(np.uint16)
            at *= steps
            at += some["low"][:, None] - steps
            # All indices are in the table; mode="wrap" is the fastest way to skip the check.
            found = np.take(table, at, mode="wrap")
            if not codes.all():
                found[codes == 0] = 0
            data[index] = found


@dataclasses.dataclass(frozen=True)
class LogarithmDifference(BlockCodec):
    """4-bit codes: the number of grid steps by which a value moved; each block stores its step.

    Errors do not add up, because the reference is the decoded parent. A block can be represented
    if no value moved by more than 7/4 octaves, and no zero has become nonzero.
    """

    name: str = "log4"
    lossless: bool = False
    relative: bool = True

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        packed = row_codecs.packed_bytes(BLOCK, 4)
        return {
            "": StoredArray((packed,), np.dtype(np.uint8), zstd=True),
            "step": StoredArray((), np.dtype(np.uint8), zstd=True),
        }

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``: in float32, one product, rounded to the dtype."""
        if len(steps := arrays["step"]) and steps.max() > WIDEST_STEP:
            raise ValueError(f"expected steps up to {WIDEST_STEP}, found {steps.max()}")
        if kernels.available():
            kernels.decode_blocks(self.name, arrays[""], None, steps, rows, data, factors())
            return
        half = BLOCK // 2
        for some, index in pieces(arrays, rows, _PIECE_BLOCKS):
            at = (some["step"].astype(np.intp)[:, None] << 8) | some[""]
            found = np.empty((len(at), BLOCK), np.float32)
            for first, table in zip((0, half), _factors_of_bytes(), strict=True):
                found[:, first : first + half] = np.take(table, at, mode="wrap")
            found *= data[index].astype(np.float32, copy=False)
            data[index] = found


#: Blocks that are encoded or decoded at once: 1 MiB of float32. With fewer, the calls cost more
#: than the cache saves.
PIECE_BLOCKS = 1024


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the unsigned integer dtype with the size of a dtype."""
    return np.dtype(f"u{dtype.itemsize}")


@dataclasses.dataclass(frozen=True)
class Whole(BlockCodec):
    """Stores the unchanged bits."""

    name: str = "raw"

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {"": StoredArray((BLOCK,), stored_dtype(dtype))}

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``."""
        for some, index in pieces(arrays, rows, len(rows)):
            data.view(some[""].dtype)[index] = some[""]


@dataclasses.dataclass(frozen=True)
class Planes(BlockCodec):
    """Byte planes, compressed by zstd: of the bits, or of their XOR with a reference."""

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {"": StoredArray((BLOCK, dtype.itemsize), np.dtype(np.uint8), byte_planes=True)}

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``."""
        bits = bits_dtype(data.dtype)
        blocks = data.view(bits)
        for some, index in pieces(arrays, rows, PIECE_BLOCKS):
            found = np.ascontiguousarray(some[""]).view(bits).reshape(-1, BLOCK)
            if self.relative:
                blocks[index] ^= found
            else:
                blocks[index] = found


@dataclasses.dataclass(frozen=True)
class Sparse(BlockCodec):
    """The changed elements of a block: their count, positions, and XOR with the reference.

    A bf16 element takes 3 bytes before zstd: it pays off if at most a tenth of them changed.
    """

    name: str = "sparse"
    relative: bool = True

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        return {
            "count": StoredArray((), np.dtype(np.uint16), zstd=True),
            "at": StoredArray((), np.dtype(np.uint8), zstd=True, ragged=True),
            "": StoredArray((), bits_dtype(dtype), zstd=True, ragged=True),
        }

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``."""
        counts, at, changes = arrays["count"], arrays["at"], arrays[""]
        if kernels.available():
            kernels.apply_sparse(counts, at, changes, rows, data.view(changes.dtype))
            return
        total = int(counts.sum(dtype=np.int64))
        if len(counts) != len(rows) or total != len(at) or total != len(changes):
            raise ValueError(f"expected {total} items of {len(rows)} blocks, found {len(at)}")
        places = np.repeat(np.asarray(rows, np.int64) * BLOCK, counts)
        places += at
        if not (places[1:] > places[:-1]).all():
            raise ValueError("expected ascending positions, found unsorted ones")
        data.reshape(-1).view(changes.dtype)[places] ^= changes


@dataclasses.dataclass(frozen=True)
class Linear(BlockCodec):
    """A symmetric uniform code of the values, or of their difference to the reference.

    Each block has a scale.
    """

    lossless: bool = False
    code: Uniform = dataclasses.field(kw_only=True)

    def stored(self, dtype: np.dtype) -> Mapping[str, StoredArray]:
        """See ``BlockCodec``."""
        found = self.code.stored((BLOCK,), np.dtype(np.float32))
        return {name: one._replace(zstd=True) for name, one in found.items()}

    def decode(self, arrays: Mapping[str, np.ndarray], rows: BlockRows, data: np.ndarray) -> None:
        """See ``BlockCodec``."""
        if kernels.available():
            codes, scales = arrays[""], arrays["scale"]
            kernels.decode_blocks(self.name, codes, scales, None, rows, data)
            return
        room = np.empty((2, min(len(rows), PIECE_BLOCKS), BLOCK), np.float32)
        for some, index in pieces(arrays, rows, PIECE_BLOCKS):
            found = room[0, : len(some[""])]
            self.code.decode(some, found)
            if self.relative:
                # The same result whether the product and the sum are fused or not.
                found += widened(data[index], room[1])
            data[index] = found


def _uniform(name: str) -> Uniform:
    found = row_codecs.get(name)
    assert isinstance(found, Uniform)
    return found


_CODECS: dict[str, BlockCodec] = {
    codec.name: codec
    for codec in (
        Whole(),
        Planes("planes"),
        Planes("xor", relative=True),
        Sparse(),
        Linear("ef8", relative=True, code=_uniform("symmetric8")),
        Linear("ef4", relative=True, code=_uniform("symmetric4")),
        # First moments are spread around zero: without an offset their codes take a tenth less
        # after zstd, and what is zero stays so.
        Linear("int8", code=_uniform("symmetric8")),
        Logarithms(),
        LogarithmDifference(),
    )
}
#: Keeps positive values positive, without a reference.
LOGARITHM = "log8"
#: The next more precise codec; those that are not listed are followed by ``lossless``.
_WIDER = {"ef4": "ef8", "log4": "log8"}


def names() -> list[str]:
    """Returns the names for options."""
    return [LOSSLESS, *sorted(name for name, codec in _CODECS.items() if not codec.lossless)]


def get(name: str) -> BlockCodec:
    """Returns the codec of a name in a manifest; ``OptionError`` if it is unknown."""
    try:
        return _CODECS[name]
    except KeyError:
        raise OptionError(
            f"codec {name!r} of dense leaves: expected one of {sorted(_CODECS)}, found an unknown "
            "name; install a newer deltackpt if a checkpoint asks for it"
        ) from None


def is_linear(name: str) -> bool:
    """Returns whether small values may become 0 or change sign if the block also has large ones."""
    return isinstance(_CODECS.get(name), Linear)


def wider(name: str) -> str:
    """Returns the next more precise codec."""
    return _WIDER.get(name, LOSSLESS)
