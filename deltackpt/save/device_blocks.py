# SPDX-License-Identifier: Apache-2.0
"""Encodes blocks of dense leaves on accelerators, so that only codes are copied to the host.

A leaf with a difference codec keeps its reference on its device: its own size once more, twice
while a save is written. The arithmetic is that of readers, bit for bit: the product of a code and
its scale has no rounding error, so it does not matter whether the compiler fuses it with the sum.
Blocks with values so small that a device might treat them as 0 are stored raw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltackpt.codecs import block_codecs
from deltackpt.codecs.block_codecs import Linear
from deltackpt.codecs.row_codecs import BFLOAT16_FLAG, Uniform
from deltackpt.format.row_blocks import BLOCK, blocks_of
from deltackpt.resources.runtime import Runtime
from deltackpt.save import encode, encode_blocks
from deltackpt.save.block_codes import Array, EncodedBlocks, LeafDelta, encode_leaf, within_budget
from deltackpt.state import placement

#: Numbers of at least this magnitude have sums that are 0 or no subnormal float32.
_SMALLEST = 2.0**-100
_SIGN = 0x7FFFFFFF


def can_encode(codec: str, dtype: str) -> bool:
    """Returns whether leaves of a dtype are encoded on their device by a codec."""
    return (
        codec != block_codecs.LOSSLESS
        and isinstance(found := block_codecs.get(codec), Linear)
        and found.relative
        and found.accepts_dtype(dtype)
    )


def capture(source: jax.Array, window: tuple[slice, ...]) -> jax.Array:
    """Copies part of an array as blocks, (blocks, 256), on its device, before later steps run."""
    bounds = [chunk.indices(size)[:2] for chunk, size in zip(window, source.shape, strict=True)]
    with placement.on_device_of(source):
        return _window(source, tuple(bounds))


@functools.partial(jax.jit, static_argnums=1)
def _window(source: jax.Array, window: tuple[tuple[int, int], ...]) -> jax.Array:
    flat = source[tuple(slice(*chunk) for chunk in window)].reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(blocks_of(flat.size), BLOCK)


@placement.neutral()
def encode_leaf_there(
    leaf: jax.Array,
    reference: Array | None,
    codec: str,
    max_error: float | None,
    runtime: Runtime,
) -> LeafDelta:
    """Encodes a leaf on its device, or on the host if no difference codec applies.

    See ``block_codes.encode_leaf``; ``codec`` must be one that ``can_encode``.
    """

    def attempt(codec: str) -> tuple[LeafDelta, Callable[[], float]]:
        if not can_encode(codec, leaf.dtype.name):
            return on_host(codec), lambda: 0.0
        if not isinstance(reference, jax.Array):
            return on_host(block_codecs.LOSSLESS, f"{codec}: no reference"), lambda: 0.0
        found, share = _encoded(codec, leaf, reference)
        return found, lambda: share

    def on_host(codec: str, reason: str = "") -> LeafDelta:
        before = None if reference is None else np.asarray(reference)
        # Memory of its own: jax may alias the result, so it must not be reused.
        own = runtime.with_memory(leaf.nbytes)
        coded = encode_leaf(np.asarray(leaf), before, codec, max_error, own)
        if coded.codec != block_codecs.LOSSLESS:
            decoded = jax.device_put(coded.decoded, leaf.sharding)
        else:
            decoded = leaf if coded.pieces or reference is None else reference
        return coded._replace(decoded=decoded, reason=reason or coded.reason)

    return within_budget(codec, max_error, attempt)


class _OnDevice(NamedTuple):
    """What a program makes of a leaf; the first axis of all but ``vanished`` is n."""

    arrays: dict[str, jax.Array]
    changed: jax.Array
    representable: jax.Array
    squared_error: jax.Array
    squared_norm: jax.Array
    decoded: jax.Array  # (n, 256); uncoded and unchanged blocks are those of the leaf
    vanished: jax.Array  # share of positive numbers lost; 0 if there are negative ones


def _encoded(codec: str, leaf: jax.Array, reference: jax.Array) -> tuple[LeafDelta, float]:
    """The leaf, and ``_OnDevice.vanished``."""
    code = block_codecs.get(codec)
    assert isinstance(code, Linear)
    with placement.on_device_of(leaf):
        found = _program(code.code, leaf, reference)
    copies = jax.tree.map(placement.host_copy, found[:5])  # All but the decoded values.
    arrays, changed, representable, lost, norm = jax.tree.map(np.asarray, copies)
    coded, left = np.flatnonzero(changed & representable), np.flatnonzero(changed & ~representable)
    stored = code.stored(np.dtype(leaf.dtype))
    pieces = []
    if len(coded):
        chosen = {
            suffix: np.ascontiguousarray(arrays[suffix][coded]).view(stored[suffix].dtype)
            for suffix in stored
        }
        pieces.append(EncodedBlocks(codec, coded, chosen))
    if len(left):
        rows = np.asarray(leaf[jnp.asarray(left)])
        raw = block_codecs.get("raw").stored(rows.dtype)[""]
        pieces.append(EncodedBlocks("raw", left, {"": rows.view(raw.dtype)}))
    decoded = found.decoded if pieces else reference
    total = float(lost[coded].sum(dtype=np.float64))
    whole = float(norm[np.isfinite(norm)].sum(dtype=np.float64))
    error = encode_blocks.relative(total, whole)
    return LeafDelta(pieces, decoded, codec, "", error), float(found.vanished)


# With excess precision, XLA drops the rounding of `decoded` on GPUs: the error would be that of
# sums that no reader sees, and sums that round to infinity would count as finite.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_allow_excess_precision": False}
)
def _program(code: Uniform, now: jax.Array, before: jax.Array) -> _OnDevice:
    values, reference = now.astype(jnp.float32), before.astype(jnp.float32)
    found = encode.encode(code, values - reference)
    sums = reference + _changes(code, found.arrays)
    decoded = sums.astype(now.dtype)
    representable = found.representable & _large(reference) & jnp.isfinite(decoded).all(axis=1)
    changed = (_bits(now) != _bits(before)).any(axis=1)
    coded = (representable & changed)[:, None]
    error = jnp.where(coded, decoded.astype(jnp.float32) - values, 0)
    return _OnDevice(
        arrays=dict(found.arrays),
        decoded=jnp.where(coded, decoded, now),
        changed=changed,
        representable=representable,
        squared_error=jnp.sum(jnp.square(error), axis=1),
        squared_norm=jnp.sum(jnp.square(values), axis=1),
        vanished=_vanished(now, jnp.where(coded, decoded, now)),
    )


def _vanished(now: jax.Array, decoded: jax.Array) -> jax.Array:
    positive = now > 0
    lost = jnp.mean(positive & (decoded <= 0), dtype=jnp.float32)
    share = jnp.mean(positive, dtype=jnp.float32)
    return jnp.where((now < 0).any() | (share == 0), 0, lost / jnp.where(share > 0, share, 1))


def _changes(code: Uniform, arrays: Any) -> jax.Array:
    """Codes times their scales, (n, 256) float32: without a rounding error."""
    packed, scale = arrays[""], arrays["scale"]
    if code.bits == 8:
        codes = packed
    else:
        assert code.bits == 4
        codes = jnp.concatenate([packed & 15, packed >> 4], axis=1)
    return (codes.astype(jnp.float32) - code.middle) * _scales(scale)[:, None]


def _scales(patterns: jax.Array) -> jax.Array:
    """Scales as float32, by integers alone: see ``Uniform``."""
    brain = (patterns & BFLOAT16_FLAG) != 0
    wide = patterns.astype(jnp.uint32)
    of_brain = lax.bitcast_convert_type((wide & 0x7FFF) << 16, jnp.float32)
    # A float16 that is a scale is normal, or 0.
    normal = lax.bitcast_convert_type((wide << 13) + jnp.uint32(112 << 23), jnp.float32)
    small = wide.astype(jnp.float32) * 2.0**-24
    of_half = jnp.where(wide < 1 << 10, small, normal)
    return jnp.where(brain, of_brain, of_half)


def _large(values: jax.Array) -> jax.Array:
    """Whether all elements of a block are 0, or so large that sums with them are not subnormal."""
    patterns = lax.bitcast_convert_type(values, jnp.int32) & _SIGN
    least = int(np.float32(_SMALLEST).view(np.int32))
    return ((patterns == 0) | (patterns >= least)).all(axis=1)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.dtype(f"u{values.dtype.itemsize}"))
