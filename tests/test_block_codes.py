# SPDX-License-Identifier: Apache-2.0
"""Blocks of dense leaves: stored blocks decode to the reference of the next save."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt import codecs
from deltackpt.codecs import block_codecs
from deltackpt.format.row_blocks import BLOCK
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes
from deltackpt.save.block_codes import LeafDelta

LOSSY = [name for name in block_codecs.names() if name != block_codecs.LOSSLESS]
DIFFERENCES = ["ef4", "ef8"]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 2.0**-126, -(2.0**-60), 1.0, 65504.0, -70000.0]
SPECIAL += [3.4e38, -3.4e38, np.inf, -np.inf, np.nan]


@pytest.fixture(scope="module")
def pool():
    with Runtime(2) as found:
        yield found


@st.composite
def leaves(draw):
    """Three blocks before and after a step, with some extreme values."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    dtype = codecs.dtype_of(draw(st.sampled_from(block_codecs.FLOATS)))
    magnitude = 2.0 ** draw(st.sampled_from([-130, -60, -20, -10, 0, 0, 10, 14, 100]))
    change = draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 1e3]))
    spread = draw(st.sampled_from([0, 1, 20]))
    before = rng.normal(size=(3, BLOCK)) * magnitude * 2.0 ** rng.uniform(-spread, 0, (3, BLOCK))
    now = before * (1 + change * rng.normal(size=before.shape))
    if draw(st.booleans()):
        before, now = np.abs(before), np.abs(now)
    with np.errstate(over="ignore"):
        before, now = before.astype(np.float32).astype(dtype), now.astype(np.float32).astype(dtype)
    places = st.tuples(st.integers(0, 3 * BLOCK - 1), st.sampled_from(SPECIAL))
    with np.errstate(over="ignore"):
        for array in (before, now):
            for at, value in draw(st.lists(places, max_size=5)):
                array.reshape(-1)[at] = np.float32(value).astype(dtype)
    if draw(st.booleans()):
        now[1] = before[1]
    filled = draw(st.sampled_from([0, 1, 255]))
    for array in (before, now):
        array.reshape(-1)[3 * BLOCK - filled :] = 0
    return before, now


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(block_codecs.bits_dtype(array.dtype))


def decoded(leaf: LeafDelta, reference: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """Decodes the stored blocks as a reader does."""
    out = np.full_like(like, 7) if reference is None else reference.copy()
    seen = np.zeros(len(like), int)
    for piece in leaf.pieces:
        codec = block_codecs.get(piece.codec)
        for suffix, array in codec.stored(like.dtype).items():
            assert piece.arrays[suffix].dtype == array.dtype
        with np.errstate(all="ignore"):
            codec.decode(piece.arrays, piece.blocks, out)
        seen[piece.blocks] += 1
    assert seen.max(initial=0) <= 1
    return out


def encode(now, before, codec, pool, max_error=None, **options) -> LeafDelta:
    return block_codes.encode_leaf(now, before, codec, max_error, pool, **options)


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    error = found.astype(np.float64) - exact.astype(np.float64)
    return float(np.linalg.norm(error) / np.linalg.norm(exact.astype(np.float64)))


# All codecs.


@pytest.mark.parametrize("name", block_codecs.names())
@settings(max_examples=60, deadline=None)
@given(found=leaves(), known=st.booleans())
def test_stored_blocks_decode_to_the_reported_bits(name, found, known, pool):
    before, now = found
    reference = before if known else None
    leaf = encode(now, reference, name, pool)
    assert np.array_equal(bits(decoded(leaf, reference, now)), bits(leaf.decoded))
    if leaf.codec == block_codecs.LOSSLESS:
        assert np.array_equal(bits(leaf.decoded), bits(now))
    # Values that are not finite are kept, and no other value becomes non-finite.
    strange = ~np.isfinite(now.astype(np.float32))
    assert np.array_equal(bits(leaf.decoded)[strange], bits(now)[strange])
    assert np.isfinite(leaf.decoded.astype(np.float32)[~strange]).all()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bool", "float64", "complex64"])
def test_exact_keeps_every_bit_of_every_dtype(dtype, pool):
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    before = rng.integers(0, 2 if dtype == "bool" else 256, (6, BLOCK * kind.itemsize), np.uint8)
    now = before.copy()
    now[1, 5] ^= 1
    now[3] ^= 1
    before, now = before.view(kind), now.view(kind)
    for reference in (None, before):
        leaf = encode(now, reference, "lossless", pool)
        assert decoded(leaf, reference, now).tobytes() == now.tobytes()
        assert leaf.decoded is now


@pytest.mark.parametrize("name", block_codecs.names())
def test_blocks_that_did_not_change_are_left_out(name, pool):
    rng = np.random.default_rng(0)
    before = np.abs(rng.normal(size=(700, BLOCK))).astype(np.float32)
    now = before.copy()
    now[[3, 500, 699]] *= np.float32(1.01)
    leaf = encode(now, before, name, pool)
    stored = sorted(number for piece in leaf.pieces for number in piece.blocks.tolist())
    assert stored == [3, 500, 699]
    same = encode(before.copy(), before, name, pool)
    assert not same.pieces and same.decoded is before


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("kept", [3, 30])
def test_unchanged_blocks_keep_their_bits_beside_few_or_many_changed_ones(name, dtype, kept, pool):
    rng = np.random.default_rng(0)
    before = (np.abs(rng.normal(size=(40, BLOCK))) + 0.1).astype(np.float32).astype(dtype)
    before[:3, :4] = [-0.0, np.nan, -np.inf, 1.0]
    now = before.copy()
    now[kept:] = (now[kept:].astype(np.float32) * np.float32(1.1)).astype(dtype)
    now[39, 7] = np.nan
    leaf = encode(now, before, name, pool)
    stored = {piece.codec: piece.blocks.tolist() for piece in leaf.pieces}
    assert stored == {name: list(range(kept, 39)), "raw": [39]}
    assert np.array_equal(bits(leaf.decoded[:kept]), bits(before[:kept]))
    assert np.array_equal(bits(decoded(leaf, before, now)), bits(leaf.decoded))
    # Blocks that did not change, or are kept as they are, add no error.
    lost = leaf.decoded[kept:39].astype(np.float64) - now[kept:39].astype(np.float64)
    exact = now.astype(np.float64)
    norm = np.square(exact[np.isfinite(exact)]).sum()
    assert leaf.error == pytest.approx(np.sqrt(np.square(lost).sum() / norm), rel=1e-3)


@pytest.mark.parametrize("name", LOSSY)
def test_stored_blocks_of_a_lossy_leaf_do_not_refer_to_its_memory(name, pool):
    """It may be reused before they are written."""
    before = np.ones((6, BLOCK), np.float32)
    now = np.full_like(before, 2)
    now[:, 3] = np.nan
    leaf = encode(now, before, name, pool)
    assert {piece.codec for piece in leaf.pieces} == {"raw"} and leaf.decoded is not now
    for piece in leaf.pieces:
        assert not np.may_share_memory(piece.arrays[""], now)
    assert np.array_equal(bits(decoded(leaf, before, now)), bits(now))


@pytest.mark.parametrize("codec", ["ef4", "log4"])
def test_memory_of_attempts_beyond_the_budget_is_given_back(codec):
    rng = np.random.default_rng(0)
    before = np.abs(rng.normal(size=(2000, BLOCK))).astype(np.float32)
    now = (before * np.float32(1.1)).astype(np.float32)
    with Runtime(2) as runtime:
        limit = runtime.memory.limit_bytes
        leaf = encode(now, before, codec, runtime, max_error=0.0)
        assert leaf.codec == "lossless" and runtime.memory.fits(limit)
        leaf = encode(now, before, codec, runtime)
        assert leaf.codec == codec and not runtime.memory.fits(limit)
        runtime.memory.give_back([leaf.decoded])
        assert runtime.memory.fits(limit)
        same = encode(now, now.copy(), codec, runtime)
        assert not same.pieces and runtime.memory.fits(limit)


# Errors.


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", LOSSY)
def test_the_reported_error_is_that_of_the_decoded_values(name, dtype, pool):
    rng = np.random.default_rng(0)
    before = np.abs(rng.normal(size=(300, BLOCK))).astype(np.float32).astype(dtype)
    now = (np.abs(before.astype(np.float32) + 0.01 * rng.normal(size=before.shape))).astype(dtype)
    leaf = encode(now, before, name, pool)
    assert leaf.codec == name
    assert leaf.error == pytest.approx(relative(leaf.decoded, now), rel=1e-3)
    assert leaf.error > 0


@pytest.mark.parametrize("name", ["ef4", "ef8", "log4"])
def test_without_a_reference_a_leaf_is_exact_and_reports_why(name, pool):
    now = np.ones((3, BLOCK), np.float32)
    leaf = encode(now, None, name, pool)
    assert (leaf.codec, leaf.error) == ("lossless", 0) and "no reference" in leaf.reason


@pytest.mark.parametrize("name", ["int8", "ef4"])
def test_tiny_values_are_measured_although_their_squares_underflow(name, pool):
    rng = np.random.default_rng(0)
    before = (2.0**-70 * rng.normal(size=(4, BLOCK))).astype(np.float32)
    now = before + (2.0**-72 * rng.normal(size=before.shape)).astype(np.float32)
    leaf = encode(now, before, name, pool)
    assert leaf.codec == name and [piece.codec for piece in leaf.pieces] == [name]
    assert leaf.error == pytest.approx(relative(leaf.decoded, now), rel=1e-3)


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", ["ef4", "ef8", "log4"])
def test_errors_do_not_grow_over_ten_saves_unlike_those_of_a_naive_chain(name, dtype, pool):
    rng = np.random.default_rng(0)
    exact = np.abs(rng.normal(size=(60, BLOCK))) + 0.1
    kept = naive = exact.astype(np.float32).astype(dtype)
    previous, errors, naive_errors = kept, [], []
    for _ in range(10):
        exact = exact * 2.0 ** (0.02 * rng.normal(size=exact.shape))
        now = exact.astype(np.float32).astype(dtype)
        leaf = encode(now, kept, name, pool)
        assert leaf.codec == name
        kept = decoded(leaf, kept, now)
        errors.append(relative(kept, now))
        # The naive chain encodes changes of the exact values and accumulates the coding errors.
        naive = decoded(encode(now, previous, name, pool), naive, now)
        naive_errors.append(relative(naive, now))
        previous = now
    assert np.mean(errors[5:]) < 1.1 * np.mean(errors[:5])
    assert naive_errors[-1] > 2 * errors[-1]


# The arithmetic.


@pytest.mark.parametrize("name", DIFFERENCES)
def test_products_of_codes_and_scales_are_exact(name):
    code = block_codecs.get(name).code
    codes = np.arange(code.lowest, code.highest + 1, dtype=np.int8)
    patterns = np.arange(1 << 15, dtype=np.uint16)
    for short in ("float16", "bfloat16"):
        with np.errstate(invalid="ignore"):
            scales = patterns.view(codecs.dtype_of(short)).astype(np.float64)
        # Far beyond the largest scale that any encoder stores.
        scales = scales[np.isfinite(scales) & (scales < 2.0**120)]
        exact = codes * scales[:, None]
        assert np.array_equal(codes * scales.astype(np.float32)[:, None], exact)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_fused_multiply_add_gives_the_same_bits(name, pool):
    rng = np.random.default_rng(0)
    scales = 2.0 ** rng.uniform(-30, 10, (500, 1))
    before = (rng.normal(size=(500, BLOCK)) * 2.0 ** rng.uniform(-20, 10, (500, 1))).astype("f4")
    now = before + (scales * rng.normal(size=before.shape)).astype(np.float32)
    leaf = encode(now, before, name, pool)
    [piece] = leaf.pieces
    before = before[piece.blocks]  # The changes of the others vanish in them.
    code = block_codecs.get(name).code
    change = np.empty_like(before)
    code.decode(piece.arrays, change)
    scale, _ = code._parameters(piece.arrays)
    places = np.rint(change / np.where(scale > 0, scale, 1)[:, None]).astype(np.float32)

    @jax.jit
    def fused(before, places, scale):
        return before + places * scale[:, None]

    found = np.asarray(fused(before, places, jnp.asarray(scale)))
    kept = leaf.decoded[piece.blocks]
    assert np.array_equal(bits(found), bits(kept))
    # Rounded once, from the exact sum.
    once = before.astype(np.float64) + places.astype(np.float64) * scale[:, None]
    assert np.array_equal(once.astype(np.float32), kept)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_subnormal_references_are_kept_if_nothing_is_added(name, pool):
    before = np.full((1, BLOCK), 1e-40, np.float32)
    now = before.copy()
    now[0, 0] = 1.0
    leaf = encode(now, before, name, pool)
    assert [piece.codec for piece in leaf.pieces] == [name]
    assert np.array_equal(bits(leaf.decoded)[0, 1:], bits(before)[0, 1:])


@pytest.mark.parametrize("name", DIFFERENCES)
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 32), power=st.integers(-126, 0), least=st.integers(-80, 0))
def test_no_sum_is_subnormal_if_the_reference_is_not(name, seed, power, least, pool):
    rng = np.random.default_rng(seed)
    before = (rng.normal(size=(2, BLOCK)) * 2.0**power).astype(np.float32)
    before[np.abs(before) < 2.0**-126] = 0
    # Vanishing values, beside one that sets the scale.
    now = (before * np.float32(2.0**-30)).astype(np.float32)
    now[:, 0] = before[:, 0] + np.float32(2.0**least)
    leaf = encode(now, before, name, pool)
    coded = [piece for piece in leaf.pieces if piece.codec == name]
    for piece in coded:
        found = np.abs(leaf.decoded[piece.blocks])
        assert ((found == 0) | (found >= 2.0**-126)).all()


@pytest.mark.parametrize(
    ("dtype", "pattern"), [("float16", 0x7D01), ("bfloat16", 0x7FA1), ("float32", 0x7FA00001)]
)
@pytest.mark.parametrize("name", ["ef4", "ef8", "int8", "log4", "log8"])
def test_signaling_nans_keep_their_bits_without_a_warning(name, dtype, pattern, pool):
    rng = np.random.default_rng(0)
    before = np.abs(rng.normal(size=(8, BLOCK))).astype(codecs.dtype_of(dtype))
    now = (before.astype(np.float32) * np.float32(1.01)).astype(before.dtype)
    for one in (before, now):
        bits(one)[2, 5] = pattern
    found = encode(now, before, name, pool, 0.05)
    assert bits(found.decoded)[2, 5] == pattern


# Logarithms.


def test_grid_constants_are_correctly_rounded():
    fine, octave = block_codecs.FINE, block_codecs.octave()
    assert len(octave) == fine
    for place, found in enumerate(octave):
        # found - 1/2 < 2**(23 + place / fine) < found + 1/2, in integers.
        power = 2 ** ((23 + 1) * fine + place)
        assert (2 * found - 1) ** fine < power < (2 * found + 1) ** fine


def test_grid_points_are_constants_times_powers_of_two():
    table = block_codecs.powers("float32")
    octave = np.array(block_codecs.octave(), np.float64) / 2.0**23
    assert len(table) == block_codecs.PLACES < 1 << 16
    for power in (-126, -125, -1, 0, 1, 127):
        at = (power - block_codecs.LOWEST_POWER) * block_codecs.FINE
        assert np.array_equal(table[at : at + block_codecs.FINE], octave * 2.0**power)
    least = 2.0**-149
    below = table[: (-126 - block_codecs.LOWEST_POWER) * block_codecs.FINE].astype(np.float64)
    exact = np.ldexp(octave, np.arange(block_codecs.LOWEST_POWER, -126)[:, None]).reshape(-1)
    assert np.array_equal(below, np.rint(exact / least) * least)


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
def test_grid_points_are_positive_finite_and_ascending(dtype):
    table = block_codecs.powers(dtype)
    values = table.astype(np.float64)
    assert table.dtype.name == dtype
    assert (values > 0).all() and np.isfinite(values).all() and (np.diff(values) >= 0).all()
    exact = block_codecs.powers("float32")
    with np.errstate(over="ignore"):
        rounded = exact.astype(dtype)
    inside = np.isfinite(rounded.astype(np.float32)) & (rounded.astype(np.float32) > 0)
    assert np.array_equal(table[inside], rounded[inside])


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
def test_any_stored_bytes_of_log8_decode_to_finite_values(dtype):
    rng = np.random.default_rng(0)
    arrays = {
        "": rng.integers(0, 256, (512, BLOCK), np.uint8),
        "low": rng.integers(0, 1 << 16, 512, np.uint16),
        "step": rng.integers(0, 256, 512, np.uint8),
    }
    out = np.empty((512, BLOCK), codecs.dtype_of(dtype))
    block_codecs.get("log8").decode(arrays, range(512), out)
    values = out.astype(np.float32)
    assert np.isfinite(values).all() and np.array_equal(values > 0, arrays[""] > 0)


def test_an_invalid_log4_step_is_refused():
    arrays = {
        "": np.zeros((1, BLOCK // 2), np.uint8),
        "step": np.array([block_codecs.WIDEST_STEP + 1], np.uint8),
    }
    reference = np.ones((1, BLOCK), np.float32)
    with pytest.raises(ValueError, match="steps up to"):
        block_codecs.get("log4").decode(arrays, range(1), reference)


def moments(rng: np.random.Generator, shape: tuple[int, ...], octaves: float) -> np.ndarray:
    """Second moments, some of them zero."""
    found = np.square(rng.normal(size=shape)) * 2.0 ** rng.uniform(-octaves, 0, shape)
    return np.where(rng.random(shape) < 0.1, 0, np.maximum(found, 2.0**-140)).astype(np.float32)


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", ["log4", "log8"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), octaves=st.sampled_from([0, 8, 40, 130]))
def test_zero_stays_zero_and_positive_stays_positive(name, dtype, seed, octaves, pool):
    rng = np.random.default_rng(seed)
    before = moments(rng, (4, BLOCK), octaves).astype(dtype)
    now = moments(rng, (4, BLOCK), octaves).astype(dtype)
    now[0] = before[0] * codecs.dtype_of(dtype).type(0.75)
    leaf = encode(now, before, name, pool)
    found, exact = leaf.decoded.astype(np.float32), now.astype(np.float32)
    assert np.isfinite(found).all() and np.array_equal(found > 0, exact > 0)
    assert (found >= 0).all() and not np.signbit(found).any()


def test_log8_is_within_half_a_step_of_the_span_of_a_block(pool):
    rng = np.random.default_rng(0)
    for octaves in (1, 20, 100):
        now = moments(rng, (50, BLOCK), octaves)
        now = np.where(now < 2.0**-126, 0, now)
        leaf = encode(now, None, "log8", pool)
        assert [piece.codec for piece in leaf.pieces] == ["log8"]
        place = np.log2(now.astype(np.float64), where=now > 0, out=np.zeros(now.shape))
        found = np.log2(leaf.decoded.astype(np.float64), where=now > 0, out=np.zeros(now.shape))
        high, low = (
            np.where(now > 0, place, -np.inf).max(axis=1),
            np.where(now > 0, place, np.inf).min(axis=1),
        )
        fine = block_codecs.FINE
        steps = np.ceil(((high - low) * fine + 2) / 254)
        assert (np.abs(found - place) <= (steps[:, None] / 2 + 0.02) / fine).all()


def test_log4_is_within_an_eighth_of_an_octave_and_leaves_the_rest_to_log8(pool):
    rng = np.random.default_rng(0)
    before = np.abs(rng.normal(size=(64, BLOCK))).astype(np.float32) + np.float32(1e-6)
    moved = rng.uniform(-1, 1, before.shape) * np.linspace(0.01, 3, 64)[:, None]
    now = (before * 2.0**moved).astype(np.float32)
    before[5, 9], now[7, 9] = 0, 0
    leaf = encode(now, before, "log4", pool)
    by = {piece.codec: piece.blocks for piece in leaf.pieces}
    assert by.keys() == {"log4", "log8"}
    assert 5 in by["log8"] and 7 in by["log4"]
    held, inside = np.abs(moved).max(axis=1) < 1.74, now[by["log4"]] > 0
    assert set(np.flatnonzero(held)) - {5} <= set(by["log4"])
    error = np.log2(leaf.decoded[by["log4"]][inside] / now[by["log4"]][inside])
    assert np.abs(error).max() <= 1 / 8 + 1e-3


@pytest.mark.parametrize("strange", [-1.0, -0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["log4", "log8"])
def test_blocks_with_an_invalid_second_moment_are_kept_bit_for_bit(name, strange, pool):
    before = np.ones((3, BLOCK), np.float32)
    now = np.full_like(before, 1.25)
    now[1, 17] = strange
    leaf = encode(now, before, name, pool)
    assert [(piece.codec, piece.blocks.tolist()) for piece in leaf.pieces] == [
        (name, [0, 2]),
        ("raw", [1]),
    ]
    assert np.array_equal(bits(leaf.decoded)[1], bits(now)[1])


def test_unchanged_values_keep_their_bits_in_log4(pool):
    rng = np.random.default_rng(0)
    before = np.square(rng.normal(size=(8, BLOCK))).astype(np.float32)
    now = before.copy()
    now[:, 0] *= 2
    leaf = encode(now, before, "log4", pool)
    assert [piece.codec for piece in leaf.pieces] == ["log4"]
    assert np.array_equal(bits(leaf.decoded)[:, 1:], bits(before)[:, 1:])
