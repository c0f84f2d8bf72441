# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of rows, jitted: on an accelerator before the copy, on the CPU in the background.

The arithmetic is float32, and what a row is encoded to depends on that row alone. Rounding to the
16-bit parameters is done on bit patterns: XLA may leave out conversions to a shorter float and
back, and it flushes subnormal numbers.

Measured on two cores, 64 columns: plain widths 5 GB/s of float32 input, the search 1.2 to 1.5. The
search reads a piece some twenty times. It runs along the columns of a transposed piece, a row in
each lane, which is two to three times as fast as sums along each row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltackpt import codecs
from deltackpt.codecs import packing, uniform
from deltackpt.codecs.codec import Codec
from deltackpt.codecs.uniform import Uniform

#: Bytes of float32 input that are encoded at once on the CPU: they stay in the cache (measured at
#: 64 columns: half of it costs a fifth of the speed, eight times as much three quarters).
PIECE_BYTES = 2 << 20
_LEAST_ROWS = 64
_UNROLLED = 4


class Encoded(NamedTuple):
    """Encoded rows, on a device or in host memory.

    Attributes:
      arrays: codec suffix to stored array, first axis n; 16-bit floats as their bit patterns.
      held: (n,) bool, False for rows that the codec does not hold: their arrays say nothing.
      squared_error: (n,) float32, sum of the squares of what decoding changes.
      squared_norm: (n,) float32, sum of the squares of the row; both 0 where it is not held.
    """

    arrays: Mapping[str, jax.Array | np.ndarray]
    held: jax.Array | np.ndarray
    squared_error: jax.Array | np.ndarray
    squared_norm: jax.Array | np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def encode(codec: Codec, rows: jax.Array) -> Encoded:
    """Encodes rows (n, *trailing) of a float dtype by a lossy codec."""
    values = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    if isinstance(codec, Uniform):
        return _uniform(codec, values)
    assert isinstance(codec, codecs.ShorterFloat)
    return _shorter(codec, values, rows.shape)


class Piece(Protocol):
    """Consecutive rows of one field on their way to storage."""

    def host(self) -> np.ndarray:
        """The rows in host memory, (n, *trailing)."""
        ...

    def encoded(self, codec: Codec) -> Encoded:
        """The rows encoded by a lossy codec, in host memory."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class HostPiece:
    """Rows in host memory, at most ``piece_rows`` where they are encoded."""

    rows: np.ndarray

    def host(self) -> np.ndarray:
        """See ``Piece``."""
        return self.rows

    def encoded(self, codec: Codec) -> Encoded:
        """See ``Piece``."""
        return on_host(codec, self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePiece:
    """The first ``count`` of rows on an accelerator; only what is stored comes to the host.

    ``dispatched`` is the codec, and what it makes of the rows, where that is on its way already.
    """

    rows: jax.Array
    count: int
    dispatched: tuple[Codec, Encoded] | None = None

    @classmethod
    def dispatch(cls, codec: Codec, rows: jax.Array, count: int) -> DevicePiece:
        """Encodes rows on their device and starts the copy of that to the host."""
        encoded = encode(codec, rows)
        for array in jax.tree.leaves(encoded):
            array.copy_to_host_async()
        return cls(rows, count, (codec, encoded))

    def host(self) -> np.ndarray:
        """See ``Piece``."""
        return np.asarray(self.rows)[: self.count]

    def encoded(self, codec: Codec) -> Encoded:
        """See ``Piece``."""
        if self.dispatched is not None and self.dispatched[0] == codec:
            return to_host(self.dispatched[1], self.count)
        return to_host(encode(codec, self.rows), self.count)


def on_host(codec: Codec, rows: np.ndarray) -> Encoded:
    """Encodes rows in host memory, (n, *trailing), n at most ``piece_rows``, on the CPU.

    Lengths are rounded up to powers of two, so that few programs are compiled.
    """
    count = len(rows)
    length = max(_LEAST_ROWS, 1 << max(0, count - 1).bit_length())
    if length > count:
        padded = np.zeros((length, *rows.shape[1:]), rows.dtype)
        padded[:count] = rows
        rows = padded
    with _on_cpu():
        found = jax.block_until_ready(encode(codec, rows))
    return to_host(found, count)


def to_host(encoded: Encoded, count: int) -> Encoded:
    """The first ``count`` rows in host memory; waits for them."""
    return jax.tree.map(lambda array: np.asarray(array)[:count], encoded)


def piece_rows(trailing: tuple[int, ...]) -> int:
    """Rows of a piece for ``on_host``: a power of two."""
    row_bytes = 4 * max(1, int(np.prod(trailing, dtype=np.int64)))
    return 1 << max(_LEAST_ROWS, PIECE_BYTES // row_bytes).bit_length() - 1


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """Keeps host memory off an accelerator, where there is a CPU backend beside it."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


# Shorter floats.


def _shorter(codec: codecs.ShorterFloat, values: jax.Array, shape: tuple[int, ...]) -> Encoded:
    held = _within(values, codec.smallest, codec.largest)
    values = jnp.where(held[:, None], values, 0)
    kind = jnp.bfloat16 if codec.dtype == "bfloat16" else jnp.float16
    # The barrier keeps XLA from leaving out the rounding.
    short = lax.optimization_barrier(values.astype(kind))
    error = short.astype(jnp.float32) - values
    stored = lax.bitcast_convert_type(short, jnp.uint16).reshape(shape)
    return Encoded({"": stored}, held, _squares(error), _squares(values))


# Uniform codes.


def _uniform(codec: Uniform, values: jax.Array) -> Encoded:
    held = _within(values, uniform.SMALLEST, uniform.LARGEST)
    values = jnp.where(held[:, None], values, 0)
    low, high = jnp.min(values, axis=1), jnp.max(values, axis=1)
    parameters = _parameters(codec, low, high)
    if codec.bins or codec.refits:
        parameters = _searched(codec, values.T, low, high)
    scale, offset = parameters.scale[:, None], parameters.offset[:, None]
    codes = _codes(codec, (values - offset) * _inverse(scale))
    error = codes * scale + offset - values
    arrays = {
        "": _packed((codes + codec.middle).astype(jnp.uint8), codec.bits),
        "scale": parameters.scale_bits,
    }
    if not codec.symmetric:
        arrays["offset"] = parameters.offset_bits
    return Encoded(arrays, held, _squares(error), _squares(values))


class _Parameters(NamedTuple):
    """Scale and offset of each row, (n,): as float32, and as the patterns that are stored."""

    scale: jax.Array
    offset: jax.Array
    scale_bits: jax.Array
    offset_bits: jax.Array


def _parameters(codec: Uniform, low: jax.Array, high: jax.Array) -> _Parameters:
    """Those that spread the codes over [low, high]."""
    if codec.symmetric:
        scale = jnp.maximum(-low, high) / codec.highest
        return _stored(codec, scale, jnp.zeros_like(scale))
    scale = (high - low) / (codec.highest - codec.lowest)
    return _stored(codec, scale, low + codec.middle * scale)


def _stored(codec: Uniform, scale: jax.Array, offset: jax.Array) -> _Parameters:
    """Rounded to float16, or to bfloat16 where that cannot hold them."""
    reach = jnp.abs(offset) + codec.middle * scale
    half = (reach < uniform.FLOAT16_BELOW) & ((scale >= uniform.FLOAT16_SCALE) | (scale == 0))
    half_scale, half_scale_bits = _rounded_half(scale)
    half_offset, half_offset_bits = _rounded_half(offset)
    brain_scale, brain_scale_bits = _rounded_brain(scale)
    brain_offset, brain_offset_bits = _rounded_brain(offset)
    return _Parameters(
        jnp.where(half, half_scale, brain_scale),
        jnp.where(half, half_offset, brain_offset),
        jnp.where(half, half_scale_bits, brain_scale_bits | jnp.uint16(0x8000)),
        jnp.where(half, half_offset_bits, brain_offset_bits),
    )


def _rounded_half(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(float32, float16 pattern) of magnitudes below 65504, rounded to nearest even."""
    magnitude = jnp.abs(value)
    pattern = lax.bitcast_convert_type(magnitude, jnp.uint32)
    pattern = (pattern + 0xFFF + ((pattern >> 13) & 1)) & jnp.uint32(0xFFFFE000)
    normal = lax.bitcast_convert_type(pattern, jnp.float32)
    units = jnp.round(jnp.minimum(magnitude, 1.0) * 2.0**24)
    small = magnitude < 2.0**-14
    bits = jnp.where(small, units.astype(jnp.uint32), (pattern >> 13) - (112 << 10))
    found = jnp.where(small, units * 2.0**-24, normal)
    negative = value < 0
    bits = jnp.where(negative, bits | 0x8000, bits)
    return jnp.where(negative, -found, found), bits.astype(jnp.uint16)


def _rounded_brain(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(float32, bfloat16 pattern), rounded to nearest even."""
    pattern = lax.bitcast_convert_type(value, jnp.uint32)
    pattern = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(pattern, jnp.float32), (pattern >> 16).astype(jnp.uint16)


def _codes(codec: Uniform, places: jax.Array) -> jax.Array:
    """Codes less the middle, as float32, of values in units of the scale from the offset."""
    return jnp.round(jnp.clip(places, codec.lowest, codec.highest))


def _inverse(scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)


def _searched(codec: Uniform, columns: jax.Array, low: jax.Array, high: jax.Array) -> _Parameters:
    """The best of the whole range, of every range that the search visits, and of the fits."""
    best = _Best.of(codec, columns, _parameters(codec, low, high))
    if codec.bins:
        shrink = (high - low) / codec.bins

        def step(_: int, state: tuple[jax.Array, jax.Array, _Best]) -> tuple:
            low, high, best = state
            raised = _parameters(codec, low + shrink, high)
            lowered = _parameters(codec, low, high - shrink)
            errors = _squared_errors(codec, columns, (raised, lowered))
            better = errors[0] < errors[1]
            low = jnp.where(better, low + shrink, low)
            high = jnp.where(better, high, high - shrink)
            seen = _Best(jnp.minimum(*errors), _chosen(better, raised, lowered))
            return low, high, seen.better(best)

        best = lax.fori_loop(0, codec.steps, step, (low, high, best))[2]
    latest = best.parameters
    for _ in range(codec.refits):
        latest = _fitted(codec, columns, latest)
        best = _Best.of(codec, columns, latest).better(best)
    return best.parameters


class _Best(NamedTuple):
    squared_error: jax.Array
    parameters: _Parameters

    @classmethod
    def of(cls, codec: Uniform, columns: jax.Array, parameters: _Parameters) -> _Best:
        return cls(_squared_errors(codec, columns, (parameters,))[0], parameters)

    def better(self, other: _Best) -> _Best:
        """The better of the two in each row, the other where they are equal."""
        chosen = self.squared_error < other.squared_error
        return _chosen(chosen, self, other)


def _chosen(condition: jax.Array, first: NamedTuple, second: NamedTuple):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _squared_errors(
    codec: Uniform, columns: jax.Array, candidates: tuple[_Parameters, ...]
) -> list[jax.Array]:
    """Sum of squared errors (n,) of each candidate over the columns (width, n)."""
    units = [(found.offset, _inverse(found.scale)) for found in candidates]

    def add(column: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        added = []
        for (offset, inverse), total in zip(units, sums, strict=True):
            place = (column - offset) * inverse
            added.append(total + jnp.square(_codes(codec, place) - place))
        return added

    sums = _over_columns(columns, [jnp.zeros_like(columns[0]) for _ in candidates], add)
    squares = [total * jnp.square(found.scale) for total, found in zip(sums, candidates)]
    # Without a scale the places say nothing of the error, and there is nothing to search.
    return [jnp.where(found.scale > 0, s, jnp.inf) for s, found in zip(squares, candidates)]


def _fitted(codec: Uniform, columns: jax.Array, parameters: _Parameters) -> _Parameters:
    """The least-squares scale and offset for the codes that the given ones lead to."""
    offset, inverse = parameters.offset, _inverse(parameters.scale)

    def add(column: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        place = (column - offset) * inverse
        code = _codes(codec, place)
        terms = (code, place, code * code, code * place)
        return [total + term for total, term in zip(sums, terms, strict=True)]

    code, place, square, product = _over_columns(columns, [jnp.zeros_like(offset)] * 4, add)
    width = columns.shape[0]
    spread = square - code * code / width
    slope = (product - code * place / width) / jnp.where(spread > 0, spread, 1)
    slope = jnp.where((spread > 0) & (slope > 0), slope, 1)
    shift = (place - slope * code) / width
    return _stored(codec, parameters.scale * slope, offset + parameters.scale * shift)


def _over_columns(
    columns: jax.Array,
    sums: list[jax.Array],
    add: Callable[[jax.Array, list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    def body(number: int, sums: list[jax.Array]) -> list[jax.Array]:
        return add(columns[number], sums)

    return lax.fori_loop(0, columns.shape[0], body, sums, unroll=_UNROLLED)


# Both.


def _within(values: jax.Array, smallest: float, largest: float) -> jax.Array:
    """Whether the largest magnitude of each row is 0 or lies in [smallest, largest].

    Bit patterns of magnitudes ascend as they do; NaN and infinities are above all.
    """
    patterns = lax.bitcast_convert_type(values, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    greatest = jnp.max(patterns, axis=1, initial=0)
    low, high = np.array([smallest, largest], np.float32).view(np.uint32)
    return (greatest == 0) | ((greatest >= low) & (greatest <= high))


def _squares(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(values), axis=1)


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """See ``packing``: (n, width) uint8 to (n, packed_bytes)."""
    return jnp.concatenate(list(_packed_parts(codes, bits)), axis=1)


def _packed_parts(codes: jax.Array, bits: int) -> Iterator[jax.Array]:
    rows, width = codes.shape
    for part, shift in packing.PARTS[bits]:
        plane = packing.plane_bytes(width, part)
        places = 8 // part
        held = (codes >> shift) & ((1 << part) - 1)
        padded = jnp.pad(held, ((0, 0), (0, places * plane - width)))
        packed = padded[:, :plane]
        for place in range(1, places):
            packed |= padded[:, place * plane : (place + 1) * plane] << (place * part)
        yield packed
