# SPDX-License-Identifier: Apache-2.0
"""Lossy encoding of rows: on an accelerator before the copy, on the CPU in the background.

XLA encodes on accelerators, and on the CPU without compiled kernels; ``kernels`` computes the same
bits. The code of a row depends on that row alone. Rounding to the 16-bit parameters is done on bit
patterns, because XLA may drop conversions to a shorter float and back, and flushes subnormal
numbers. The search runs along the columns of a transposed piece, with a row in each SIMD lane: two
to three times as fast as sums along each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltackpt import codecs, kernels
from deltackpt.codecs import Codec, row_codecs
from deltackpt.codecs.row_codecs import Uniform
from deltackpt.state import placement

#: Shorter pieces are padded to it.
LEAST_ROWS = 64
_UNROLLED = 4
_SMALLEST_NORMAL = np.float32(2.0**-126)


class Encoded(NamedTuple):
    """Encoded rows, on a device or in host memory; the first axis of each array is n."""

    arrays: Mapping[str, jax.Array | np.ndarray]  # suffix to array; 16-bit floats as patterns
    representable: jax.Array | np.ndarray  # else arrays are undefined, sums 0
    squared_error: jax.Array | np.ndarray  # of the decoding error, float32
    squared_norm: jax.Array | np.ndarray  # of the row, float32


@functools.partial(jax.jit, static_argnums=0)
def encode(codec: Codec, rows: jax.Array) -> Encoded:
    """Encodes rows (n, *trailing) of a float dtype with a lossy codec."""
    values = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    if isinstance(codec, Uniform):
        return _uniform(codec, values, rows.dtype)
    assert isinstance(codec, codecs.ShorterFloat)
    return _shorter(codec, values, rows.shape)


@placement.neutral()
def on_host(codec: Codec, rows: np.ndarray) -> Encoded:
    """Encodes rows in host memory, (n, *trailing), n at most ``piece_rows``, on the CPU.

    Without compiled kernels, XLA encodes them, with lengths rounded up to powers of two, so that
    few programs are compiled. Only the sums of squares may then differ, in their last bits.
    """
    count = len(rows)
    if kernels.available():
        return _compiled(codec, np.ascontiguousarray(rows))
    length = max(LEAST_ROWS, 1 << max(0, count - 1).bit_length())
    if length > count:
        padded = np.zeros((length, *rows.shape[1:]), rows.dtype)
        padded[:count] = rows
        rows = padded
    # jax.device_put instead costs a tenth of the speed.
    with jax.default_device(_cpu()):
        return to_host(encode(codec, rows), count)


def _compiled(codec: Codec, rows: np.ndarray) -> Encoded:
    count, width = len(rows), math.prod(rows.shape[1:])
    arrays = {
        suffix: np.empty((count, *array.trailing), np.uint16 if suffix else array.dtype)
        for suffix, array in codec.stored(rows.shape[1:], rows.dtype).items()
    }
    figures = [np.empty(count, dtype) for dtype in (bool, np.float32, np.float32)]
    if isinstance(codec, Uniform):
        shrink = float(_reciprocal(codec.bins)) if codec.bins else 0.0
        kernels.encode_uniform(
            rows,
            width,
            (
                codec.bits,
                codec.symmetric,
                codec.steps,
                codec.refits,
                shrink,
                row_codecs.SMALLEST,
                row_codecs.largest(rows.dtype),
            ),
            (arrays[""], arrays["scale"], arrays.get("offset")),
            *figures,
        )
    else:
        assert isinstance(codec, codecs.ShorterFloat)
        limits = codec.smallest, codec.largest
        kernels.encode_shorter(rows, width, codec.dtype, limits, arrays[""], *figures)
    return Encoded(arrays, *figures)


@placement.neutral()
def to_host(encoded: Encoded, count: int) -> Encoded:
    """Returns the first ``count`` rows in host memory; waits for them."""
    return jax.tree.map(lambda array: np.asarray(array)[:count], encoded)


def _cpu() -> Any:
    """Returns a CPU device, which keeps host memory off an accelerator; None without one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


# Shorter floats.


def _shorter(codec: codecs.ShorterFloat, values: jax.Array, shape: tuple[int, ...]) -> Encoded:
    norm = _squares(values)
    representable = _within(values, norm, codec.smallest, codec.largest)
    values = jnp.where(representable[:, None], values, 0)
    rounded = _rounded_brain if codec.dtype == "bfloat16" else _rounded_half
    found, patterns = rounded(values)
    error = _squares(found - values)
    return Encoded(
        {"": patterns.reshape(shape)}, representable, error, jnp.where(representable, norm, 0)
    )


# Uniform codes.


def _uniform(codec: Uniform, values: jax.Array, dtype: np.dtype) -> Encoded:
    norm = _squares(values)
    representable = _within(values, norm, row_codecs.SMALLEST, row_codecs.largest(dtype))
    values = jnp.where(representable[:, None], values, 0)
    low, high = jnp.min(values, axis=1), jnp.max(values, axis=1)
    parameters = _parameters(codec, low, high)
    if codec.bins or codec.refits:
        parameters = _searched(codec, values.T, low, high)
    scale, offset = parameters.scale[:, None], parameters.offset[:, None]
    places = (values - offset) * _inverse(scale)
    codes = _codes(codec, places)
    if dtype == jnp.float32:
        # Without a scale, the codes do not determine the error.
        missed = jnp.where(scale > 0, (codes - places) * scale, values - offset)
    else:
        rounded = _rounded_brain if dtype == jnp.bfloat16 else _rounded_half
        missed = rounded(codes * scale + offset)[0] - values
    arrays = {
        "": _packed((codes + codec.middle).astype(jnp.uint8), codec.bits),
        "scale": parameters.scale_bits,
    }
    if not codec.symmetric:
        arrays["offset"] = parameters.offset_bits
    return Encoded(arrays, representable, _squares(missed), jnp.where(representable, norm, 0))


class _Parameters(NamedTuple):
    """Scale and offset of each row, (n,): as float32, and as the patterns that are stored."""

    scale: jax.Array
    offset: jax.Array
    scale_bits: jax.Array
    offset_bits: jax.Array


def _parameters(codec: Uniform, low: jax.Array, high: jax.Array) -> _Parameters:
    """Returns the parameters that spread the codes over [low, high]."""
    if codec.symmetric:
        scale = jnp.maximum(-low, high) * _reciprocal(codec.highest)
        return _stored(codec, scale, jnp.zeros_like(scale))
    scale = (high - low) * _reciprocal(codec.highest - codec.lowest)
    return _stored(codec, scale, low + codec.middle * scale)


def _stored(codec: Uniform, scale: jax.Array, offset: jax.Array) -> _Parameters:
    """Returns them rounded to float16, or to bfloat16 if float16 cannot represent them."""
    reach = jnp.abs(offset) + codec.middle * scale
    half = (reach < row_codecs.FLOAT16_BELOW) & ((scale >= row_codecs.FLOAT16_SCALE) | (scale == 0))
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
    negative = value <= -_SMALLEST_NORMAL
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
    """Returns the best of the whole range, the range that the search finds, and each fit."""
    candidate = best = _parameters(codec, low, high)
    least = jnp.full_like(low, jnp.inf)
    if codec.bins:
        least = _measured(codec, columns, candidate)[0]
        candidate = _parameters(codec, *_shrunk(codec, columns, low, high))
    for number in range(codec.refits + 1):
        # Compare l2 errors: their squares may underflow.
        error, fitted = _measured(codec, columns, candidate, fit=number < codec.refits)
        better = error < least
        least = jnp.where(better, error, least)
        best = _Parameters(
            *(jnp.where(better, one, other) for one, other in zip(candidate, best, strict=True))
        )
        candidate = fitted
    return best


def _shrunk(
    codec: Uniform, columns: jax.Array, low: jax.Array, high: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the best of the ranges that the search visits, with unrounded parameters."""
    shrink = _uncontracted((high - low) * _reciprocal(codec.bins))
    levels = codec.highest - codec.lowest

    def errors(ranges: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        scales = [(high - low) * _reciprocal(levels) for low, high in ranges]
        units = [(low, _inverse(scale)) for (low, _), scale in zip(ranges, scales, strict=True)]

        def add(column: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            found = []
            for (low, inverse), total in zip(units, sums, strict=True):
                place = (column - low) * inverse
                code = jnp.round(jnp.clip(place, 0, levels))
                found.append(total + _uncontracted(jnp.square(code - place)))
            return found

        sums = _over_columns(columns, [jnp.zeros_like(scale) for scale in scales], add)
        return [jnp.sqrt(total) * scale for total, scale in zip(sums, scales, strict=True)]

    def step(_: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, *best = state
        raised, lowered = errors([(low + shrink, high), (low, high - shrink)])
        better = raised < lowered
        low = jnp.where(better, low + shrink, low)
        high = jnp.where(better, high, high - shrink)
        found = (jnp.minimum(raised, lowered), low, high)
        chosen = found[0] < best[0]
        kept = (jnp.where(chosen, new, old) for new, old in zip(found, best, strict=True))
        return low, high, *kept

    start = (low, high, jnp.full_like(low, jnp.inf), low, high)
    *_, low, high = lax.fori_loop(0, codec.steps, step, start)
    return low, high


def _measured(
    codec: Uniform, columns: jax.Array, parameters: _Parameters, *, fit: bool = False
) -> tuple[jax.Array, _Parameters]:
    """Returns the l2 error over the columns (width, n), and parameters fitted by least squares."""
    scale, offset = parameters.scale, parameters.offset
    inverse = _inverse(scale)

    def add(column: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        place = _uncontracted((column - offset) * inverse)
        code = _codes(codec, place)
        missed = _uncontracted(jnp.square(code - place))
        terms = (missed, code, place, code * code, _uncontracted(code * place))
        return [total + term for total, term in zip(sums, terms)]

    sums = _over_columns(columns, [jnp.zeros_like(offset)] * (5 if fit else 1), add)
    # Without a scale, the codes do not determine the error, and nothing can be fitted.
    error = jnp.where(scale > 0, jnp.sqrt(sums[0]) * scale, jnp.inf)
    if not fit:
        return error, parameters
    _, code, place, square, product = sums
    share = _reciprocal(columns.shape[0])
    spread = square - _uncontracted(code * code * share)
    slope = (product - _uncontracted(code * place * share)) / jnp.where(spread > 0, spread, 1)
    slope = jnp.where((spread > 0) & (slope > 0), slope, 1)
    shift = (place - _uncontracted(slope * code)) * share
    return error, _stored(codec, scale * slope, offset + _uncontracted(scale * shift))


def _over_columns(
    columns: jax.Array,
    sums: list[jax.Array],
    add: Callable[[jax.Array, list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    width = columns.shape[0]
    return lax.fori_loop(0, width, lambda n, sums: add(columns[n], sums), sums, unroll=_UNROLLED)


# Both.


def _within(values: jax.Array, norm: jax.Array, smallest: float, largest: float) -> jax.Array:
    """Returns whether the largest magnitude of each row is 0 or in [smallest, largest]."""
    # On the CPU a maximum ignores NaN (the norm does not) and takes subnormal numbers for 0. Only
    # bit patterns tell those apart, at a high cost, so they are read only if a row seems to be 0.
    greatest = jnp.max(jnp.abs(values), axis=1, initial=0)
    tiny = greatest < smallest

    def nothing() -> jax.Array:
        patterns = lax.bitcast_convert_type(values, jnp.int32) & 0x7FFFFFFF
        return jnp.max(patterns, axis=1, initial=0) == 0

    zero = lax.cond(jnp.any(tiny), nothing, lambda: jnp.zeros(tiny.shape, bool))
    return jnp.isfinite(norm) & jnp.where(tiny, zero, greatest <= largest)


def _squares(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(values), axis=1)


def _uncontracted(product: jax.Array) -> jax.Array:
    """Returns a product of finite numbers, which no compiler contracts with a following sum."""
    return jnp.where(jnp.isfinite(product), product, jnp.inf)


def _reciprocal(count: int) -> np.float32:
    """Returns 1 / count: XLA replaces a division by a constant with this factor anyway."""
    return np.float32(1) / np.float32(count)


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """See ``packing``: (n, width) uint8 to (n, packed_bytes)."""
    planes, (rows, width) = [], codes.shape
    for part, shift in row_codecs.PARTS[bits]:
        plane = row_codecs.plane_bytes(width, part)
        places = 8 // part
        shifted = (codes >> shift) & ((1 << part) - 1)
        padded = jnp.pad(shifted, ((0, 0), (0, places * plane - width)))
        # A sum over the places is four times as fast here as slices that are joined by "or".
        shifts = jnp.arange(places, dtype=jnp.uint8)[:, None] * part
        parts = padded.reshape(rows, places, plane) << shifts
        planes.append(jnp.sum(parts, axis=1, dtype=jnp.uint8))
    return jnp.concatenate(planes, axis=1)
