# SPDX-License-Identifier: Apache-2.0
"""Every codec is bit-exact, or within its stated error bound for every row."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from oracles import make_oracles

from deltackpt import codecs
from deltackpt.codecs import row_codecs
from deltackpt.errors import OptionError
from deltackpt.save import capture, encode

LOSSY = [name for name in codecs.names() if not codecs.get(name).lossless]
UNIFORM = [name for name in LOSSY if isinstance(codecs.get(name), codecs.Uniform)]
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"]
DTYPES += ["int4", "uint4"]
DTYPES += ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]

# Few shapes, since each is compiled once per codec.
SHAPES = [(8, 24), (8, 33)]
any_bits = st.sampled_from(SHAPES).flatmap(lambda shape: arrays.arrays(np.uint32, shape))
sensible = st.sampled_from(SHAPES).flatmap(
    lambda shape: arrays.arrays(
        np.float32, shape, elements=st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=True)
    )
)


def through(name: str, rows: np.ndarray) -> tuple[np.ndarray, encode.Encoded]:
    """Rows after a lossy round trip, and their encoding."""
    codec = codecs.get(name)
    encoded = encode.on_host(codec, rows)
    stored = codec.stored(rows.shape[1:], rows.dtype)
    assert encoded.arrays.keys() == stored.keys()
    found = {}
    for suffix, array in stored.items():
        found[suffix] = np.asarray(encoded.arrays[suffix]).view(array.dtype)
        assert found[suffix].shape == (len(rows), *array.trailing)
    out = np.full_like(rows, 7)
    codec.decode(found, out)
    return out, encoded


def assert_within_bound(name: str, rows: np.ndarray) -> None:
    """Checks that encoded rows are within the bound, and the reported figures."""
    found, encoded = through(name, rows)
    held = np.asarray(encoded.representable)
    kept = rows[held]
    error = found[held].astype(np.float64) - kept.astype(np.float64)
    error = np.linalg.norm(error, axis=1)
    assert (error <= codecs.get(name).error_bound(kept)).all()
    norm = np.linalg.norm(kept.astype(np.float64), axis=1)
    visible = norm > 2.0**-50
    assert np.allclose(np.sqrt(encoded.squared_norm[held][visible]), norm[visible], rtol=1e-5)
    slack = 1e-3 * error + 1e-7 * norm + 2.0**-60
    assert (np.abs(np.sqrt(encoded.squared_error[held]) - error) <= slack).all()
    assert not np.asarray(encoded.squared_error)[~held].any()
    assert not np.asarray(encoded.squared_norm)[~held].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["raw", "lossless"])
def test_lossless_codecs_keep_every_bit_of_every_dtype(name, dtype):
    kind, codec = codecs.dtype_of(dtype), codecs.get(name)
    data = np.random.default_rng(0).integers(0, 256, (64, 16), np.uint8)
    values = (data & 1).astype(bool) if dtype == "bool" else data.view(kind)
    if dtype in ("int4", "uint4"):
        values = (data & 7).astype(kind)
    assert codecs.is_lossless(codec)
    stored = codec.stored(values.shape[1:], kind)[""]
    view = codec.stored_view(values)
    assert (view.shape[1:], view.dtype) == (stored.trailing, stored.dtype)
    out = np.empty_like(values)
    codec.decode({"": view.copy()}, out)
    assert out.tobytes() == codec.rows_view(view.copy(), kind).tobytes() == values.tobytes()
    assert not codec.error_bound(values).any()


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25, deadline=None)
@given(any_bits)
def test_rows_of_any_bits_are_within_the_bound_or_not_held(name, bits):
    assert_within_bound(name, bits.view(np.float32))


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=25, deadline=None)
@given(sensible)
def test_sensible_rows_are_held_and_within_the_bound(name, rows):
    _, encoded = through(name, rows)
    greatest = np.abs(rows).max(axis=1)
    low, high = (
        (row_codecs.SMALLEST, row_codecs.LARGEST)
        if name in UNIFORM
        else (codecs.get(name).smallest, codecs.get(name).largest)
    )
    expected = (greatest == 0) | ((greatest >= low) & (greatest <= high))
    assert np.array_equal(encoded.representable, expected)
    assert_within_bound(name, rows)


@pytest.mark.parametrize("name", LOSSY)
def test_rows_of_every_magnitude_are_within_the_bound(name):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 24)) * 2.0 ** rng.integers(-60, 60, (400, 1))
    rows += 2.0 ** rng.integers(-30, 30, (400, 1)) * (rng.random((400, 1)) < 0.3)
    assert_within_bound(name, rows.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int8", "adaptive4", "symmetric3"])
def test_tables_of_shorter_floats_are_quantized_too(name, dtype):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 24)) * 2.0 ** rng.integers(-30, 16, (2000, 1))
    rows = np.clip(rows, -65504, 65504).astype(codecs.dtype_of(dtype))
    rows[::7] += codecs.dtype_of(dtype).type(3)
    assert_within_bound(name, rows)
    found, encoded = through(name, rows)
    assert np.isfinite(found[encoded.representable].astype(np.float32)).all()
    assert np.asarray(encoded.representable).mean() > 0.7


@pytest.mark.parametrize("name", UNIFORM)
def test_float16_rows_near_the_largest_value_do_not_become_infinite(name):
    rows = np.random.default_rng(0).uniform(-65504, 65504, (500, 24)).astype(np.float16)
    rows[::2] *= np.float16(2**-1.5)
    assert_within_bound(name, rows)
    found, encoded = through(name, rows)
    assert np.isfinite(found[encoded.representable]).all()


@pytest.mark.parametrize("name", ["int2", "int8", "adaptive4", "symmetric4"])
def test_subnormal_float16_rows_are_within_the_bound(name):
    bits = np.random.default_rng(0).integers(0, 0x400, (500, 24)).astype(np.uint16)
    assert_within_bound(name, bits.view(np.float16))


@pytest.mark.parametrize("name", UNIFORM)
def test_the_error_of_tiny_nearly_constant_rows_is_detected(name):
    steps = np.random.default_rng(0).integers(0, 200, (500, 24)) * 2.0**-23
    for magnitude in (2.0**-36, 2.0**-44, 1.0):
        assert_within_bound(name, (1.7 * magnitude * (1 + steps)).astype(np.float32))


@pytest.mark.parametrize("name", LOSSY)
def test_the_encoding_of_a_row_depends_only_on_that_row(name):
    rows = np.random.default_rng(1).normal(size=(300, 24)).astype(np.float32)
    rows[5, 3], rows[77] = np.nan, 0
    together = encode.on_host(codecs.get(name), rows)
    for piece in (slice(0, 1), slice(70, 150), slice(299, 300)):
        alone = encode.on_host(codecs.get(name), rows[piece])
        assert np.array_equal(together.representable[piece], alone.representable)
        for suffix, array in alone.arrays.items():
            assert together.arrays[suffix][piece].tobytes() == array.tobytes()


@pytest.mark.parametrize("name", LOSSY)
def test_rows_with_nothing_to_quantize(name):
    rows = np.zeros((7, 24), np.float32)
    rows[1] = -0.0
    rows[2], rows[3] = 0.25, -1.5
    rows[4] = 2.0**-140  # subnormal
    rows[5, 0], rows[6, 23] = np.inf, np.nan
    found, encoded = through(name, rows)
    assert encoded.representable.tolist() == [True, True, True, True, False, False, False]
    exact = 2 if name.startswith("symmetric") else 4
    assert (found[:exact] == rows[:exact]).all(), "zeros, and offsets of few bits, are exact"


@settings(max_examples=200, deadline=None)
@given(arrays.arrays(np.uint32, (8, 24)))
def test_shorter_floats_round_to_the_nearest_even(bits):
    rows = bits.view(np.float32)
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        found, encoded = through(name, rows)
        with np.errstate(all="ignore"):
            expected = rows.astype(dtype).astype(np.float32)
        normal = np.abs(rows) >= codecs.get(name).smallest
        held = encoded.representable[:, None] & normal
        assert np.array_equal(found[held], expected[held])


def test_a_bfloat16_of_the_first_format_version_decodes_to_its_upper_half():
    stored = np.array([[0x3F80, 0x7FC1, 0xFF80, 0x0001]], np.uint16)
    out = np.empty((1, 4), np.float32)
    codecs.get("bf16").decode({"": stored}, out)
    assert out.view(np.uint32).tolist() == [[0x3F800000, 0x7FC10000, 0xFF800000, 0x00010000]]


@pytest.mark.parametrize("bits", row_codecs.PARTS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_packed_codes_round_trip(bits, data):
    width = data.draw(st.sampled_from([1, 2, 3, 5, 8, 11, 24, 64]))
    codes = data.draw(arrays.arrays(np.uint8, (4, width), elements=st.integers(0, 2**bits - 1)))
    packed = np.asarray(encode._packed(jnp.asarray(codes), bits))
    assert packed.shape == (4, row_codecs.packed_bytes(width, bits))
    assert np.array_equal(row_codecs.unpack(packed, bits, width), codes)


@pytest.mark.parametrize("bits", make_oracles.BITS)
@pytest.mark.parametrize("source", make_oracles.inputs())
def test_the_mean_error_is_at_most_pytorchs(source, bits):
    table = json.loads(make_oracles.TABLE.read_text())["mean l2 error"][source]
    rows = make_oracles.inputs()[source]
    assert make_oracles.digest(rows) == table["sha256"], "the table is of other rows"
    found, _ = through(f"adaptive{bits}", rows)
    error = np.linalg.norm((found - rows).astype(np.float64), axis=1).mean()
    assert error <= table[str(bits)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_kind_of_search_is_at_least_as_good_as_the_one_before(bits):
    rows = make_oracles.inputs()["heavy-tailed (Student t, 3)"]
    errors = [
        np.asarray(through(f"{kind}{bits}", rows)[1].squared_error)
        for kind in ("int", "greedy", "adaptive")
    ]
    assert (errors[1] <= errors[0] * 1.0001).all()
    assert (errors[2] <= errors[1] * 1.0001).all()
    assert errors[2].mean() < errors[1].mean() < errors[0].mean()


@pytest.mark.parametrize("name", codecs.names())
def test_ever_wider_codecs_end_in_raw(name):
    seen = [name]
    while seen[-1] != "raw":
        seen.append(codecs.wider(seen[-1]))
        assert len(seen) <= 8


@pytest.mark.parametrize(
    ("name", "trailing", "dtype", "message"),
    [
        ("bf16", (4,), "int32", "bf16: expected float32 rows, found int32; use codec raw"),
        ("fp16", (4,), "float64", "fp16: expected float32 rows, found float64"),
        ("int4", (4,), "int8", "int4: expected rows of float32, bfloat16, float16, found int8"),
        ("int8", (), "float32", r"int8: .*wide enough.*shape \(\): 4 bytes raw, 5 encoded"),
        ("int4", (1,), "float32", "int4: .*wide enough to gain.*use codec raw or bf16"),
        ("int8", (4,), "bfloat16", r"8 bytes raw, 8 encoded"),
        ("lossless", (4,), "int8", "lossless: expected elements of at least two bytes, found int8"),
    ],
)
def test_a_codec_that_cannot_represent_the_rows_raises(name, trailing, dtype, message):
    with pytest.raises(OptionError, match=message):
        codecs.get(name).check(trailing, codecs.dtype_of(dtype))


@pytest.mark.parametrize("name", ["int5", "adaptive16", "INT8", "", "float8"])
def test_an_unknown_codec_lists_the_known_ones(name):
    with pytest.raises(OptionError, match=rf"codec '{name}'.*adaptive2.*raw.*2, 3, 4 or 8 bits"):
        codecs.get(name)


def test_multidimensional_rows_are_quantized_like_flat_ones():
    rows = np.random.default_rng(0).normal(size=(10, 4, 6)).astype(np.float32)
    flat, _ = through("int4", rows.reshape(10, 24))
    found, _ = through("int4", rows)
    assert np.array_equal(found.reshape(10, 24), flat)


def test_pieces_are_powers_of_two_of_rows():
    for trailing in ((64,), (3,), (), (1 << 20,)):
        rows = capture.piece_rows(trailing)
        assert rows & (rows - 1) == 0
        assert rows >= 64 and math.prod(trailing) * 4 * rows >= 1 << 8
