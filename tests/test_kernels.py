# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels compute the bits of their fallbacks, on every instruction set of this CPU."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import google_crc32c
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import forced, supported
from machine import required

from deltackpt import codecs, kernels
from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.save import encode
from deltackpt.storage import digests

#: "" is the fallback.
PATHS = ["avx512", "avx2", "baseline", ""]
WIDTHS = [1, 3, 16, 63, 64, 65, 100]


@pytest.fixture(params=PATHS, autouse=True, scope="module")
def path(request):
    """Forces one instruction set."""
    required(bool(supported()), "deltackpt._kernels is not built: run make kernels")
    if request.param and request.param not in supported():
        pytest.skip(f"this CPU has no {request.param}")
    with forced(request.param):
        assert kernels.instruction_set() == request.param
        yield request.param


def test_a_module_that_was_built_from_another_source_is_not_used(monkeypatch, built):
    assert kernels._imported() is built
    monkeypatch.setattr(built, "SOURCE_CRC32", built.SOURCE_CRC32 ^ 1)
    with pytest.warns(UserWarning, match="built from another version.*run make kernels"):
        assert kernels._imported() is None


# Arguments.


@pytest.fixture
def built(path):
    """The compiled module."""
    if not path:
        pytest.skip("the fallback checks nothing")
    from deltackpt import _kernels

    return _kernels


def test_the_stub_declares_all_functions_and_arguments(built):
    stub = ast.parse(Path(kernels.__file__).with_name("_kernels.pyi").read_text())
    counts = {one.name: len(one.args.posonlyargs) for one in stub.body if hasattr(one, "args")}
    assert {*counts} == {name for name in dir(built) if callable(getattr(built, name))}
    for name, count in counts.items():
        if count:
            with pytest.raises(TypeError, match=f"exactly {count} argument"):
                getattr(built, name)()


def test_an_unknown_instruction_set_is_an_error(built):
    with pytest.raises(ValueError, match="expected one of paths"):
        built.use("mmx")


# Rows.


def gather(sources, rows, out, firsts=None) -> None:
    """Gathers a list of rows of each source."""
    firsts = np.zeros(len(sources), np.int64) if firsts is None else np.array(firsts)
    stops = np.cumsum([len(each) for each in rows])
    shifted = [np.asarray(each, np.int64) + first for each, first in zip(rows, firsts, strict=True)]
    kernels.gather(sources, firsts, stops, np.concatenate(shifted), out)


@given(st.data())
def test_gathered_rows_are_those_of_numpy(data):
    dtypes = ["float32", "bfloat16", "float16", "float64", "int8", "bool", "int4"]
    dtype = np.dtype(data.draw(st.sampled_from(dtypes)))
    width, random = data.draw(st.sampled_from(WIDTHS)), np.random.default_rng(0)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    sources = [random.integers(0, 2, (length, width)).astype(dtype) for length in lengths]
    if data.draw(st.booleans()):
        sources[0] = np.repeat(sources[0], 2, 0)[::2]
    if dtype != np.float64 and data.draw(st.booleans()):
        sources = [*map(jnp.asarray, sources)]
    rows = [data.draw(st.lists(st.integers(0, length - 1), max_size=50)) for length in lengths]
    out = np.ones((sum(map(len, rows)), width), dtype)
    firsts = data.draw(st.lists(st.integers(0, 2**40), min_size=len(rows), max_size=len(rows)))
    gather(sources, rows, out, firsts)
    wanted = [np.asarray(one)[each] for one, each in zip(sources, rows, strict=True)]
    assert out.tobytes() == np.concatenate(wanted).tobytes()


def test_large_gathers_bypass_the_caches_and_copy_the_same_rows():
    sources = np.random.default_rng(0).standard_normal((4, 250, 64)).astype(np.float32)
    rows = [np.arange(10_000) * 7 % 250 for _ in sources]
    out = aligned_buffer(40_000 * 256).view(np.float32).reshape(-1, 64)
    assert out.nbytes > 8 << 20
    gather([*sources], rows, out)
    np.testing.assert_array_equal(out, np.concatenate([*map(np.take, sources, rows, [0] * 4)]))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,)])
def test_rows_without_items_and_scalars_are_gathered(shape):
    source = np.ones(shape, ml_dtypes.bfloat16)
    gather([source], [[]], np.zeros((0, *shape[1:]), source.dtype))


@pytest.mark.parametrize("rows", [[4], [0, -1], [2**62], [-(2**63)]])
def test_a_row_out_of_range_is_an_error_and_writes_nothing(rows):
    source, out = np.ones((4, 3), np.float32), np.zeros((1 + len(rows), 3), np.float32)
    with pytest.raises(IndexError, match="expected rows in 0 to 3"):
        gather([source, source], [[0], rows], out)
    assert not out.any()


def test_bad_arguments_of_gather_are_errors(built):
    source, rows, out = np.ones((4, 3), np.float32), np.arange(2), np.zeros((2, 3), np.float32)

    def call(sources=(source,), items=3, stops=(2,), rows: np.ndarray = rows, out=out):
        firsts = np.zeros(len(sources), np.int64)
        built.gather([*sources], 4, items, firsts, np.array(stops), rows, out)

    with pytest.raises(TypeError, match="rows: expected items of 8 bytes, found 4"):
        call(rows=rows.astype(np.int32))
    with pytest.raises(TypeError, match="source: expected items of 4 bytes, found 8"):
        call([source.astype(np.float64)])
    with pytest.raises(ValueError, match="out: expected 6 items, found 3"):
        call(out=out[:1])
    with pytest.raises(ValueError, match="do not overlap"):
        call(out=source[:2])
    with pytest.raises(ValueError, match="at least one item"):
        call(items=0)
    with pytest.raises(ValueError, match="that fit into memory"):
        call(items=2**62, stops=(0,), rows=rows[:0], out=out[:0])
    for stops in [(1, 1), (2, 1), (-1, 2), (3, 2), (2, 3)]:
        with pytest.raises(ValueError, match="expected ascending stops"):
            call([source, source], stops=stops)
    with pytest.raises(ValueError, match="stops: expected 2 items, found 1"):
        call([source, source])
    with pytest.raises(BufferError, match="expected C-contiguous"):
        call([source, source[:, ::2]], items=2, stops=(2, 2))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call()


@given(st.data())
def test_scattered_rows_are_those_of_numpy(data):
    dtype = np.dtype(data.draw(st.sampled_from(["float32", "bfloat16", "float64", "bool", "int4"])))
    width, random = data.draw(st.sampled_from(WIDTHS)), np.random.default_rng(0)
    length = data.draw(st.integers(1, 60))
    rows = np.array(data.draw(st.lists(st.integers(0, length - 1))), np.int64)
    shape = () if data.draw(st.booleans()) else (width,)
    count, positions = len(rows), None
    if data.draw(st.booleans()):
        count = data.draw(st.integers(1, 60))
        drawn = st.lists(st.integers(0, count - 1), min_size=len(rows), max_size=len(rows))
        positions = np.array(data.draw(drawn), np.int64)
    first = data.draw(st.integers(-(2**40), 2**40))
    values, out = (random.integers(0, 2, (n, *shape)).astype(dtype) for n in (count, length))
    wanted = out.copy()
    wanted[rows] = values if positions is None else values[positions]
    kernels.scatter(values, positions, rows + first, first, out)
    assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("aligned", [True, False])
def test_rows_are_scattered_past_the_caches_into_large_arrays(aligned):
    random = np.random.default_rng(0)
    values = random.standard_normal((3000, 48)).astype(np.float32)
    start = 0 if aligned else 4
    out = aligned_buffer((9 << 20) + start)[start:][: 9 << 20].view(np.float32).reshape(-1, 48)
    positions, rows = random.permutation(3000), random.integers(0, len(out), 3000)
    assert len({*rows.tolist()}) < 3000
    wanted = out.copy()
    wanted[rows] = values[positions]
    kernels.scatter(values, positions, rows, 0, out)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("positions", [None, [0, 1]])
@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (0, [4, 0]),
        (0, [0, -1]),
        (0, [0, 2**62]),
        (7, [7, 6]),
        (7, [11, 7]),
        (-(2**63), [2**63 - 1, -(2**63)]),
    ],
)
def test_a_row_out_of_range_is_not_scattered(first, rows, positions):
    out = np.zeros((4, 3), np.float32)
    at = None if positions is None else np.array(positions)
    with pytest.raises(IndexError, match=f"in {first} to {first + 3}"):
        kernels.scatter(np.ones((2, 3), np.float32), at, np.array(rows), first, out)
    assert not out.any()


@pytest.mark.parametrize("positions", [[0, 2], [-1, 0], [2**62, 0], [0, -(2**63)]])
def test_a_position_out_of_range_is_not_scattered(positions):
    out = np.zeros((4, 3), np.float32)
    with pytest.raises(IndexError, match="in 0 to 1"):
        kernels.scatter(np.ones((2, 3), np.float32), np.array(positions), np.arange(2), 0, out)
    assert not out.any()


@pytest.mark.parametrize("positions", [None, [0, 1]])
def test_rows_of_another_width_are_not_scattered(positions):
    out = np.zeros((4, 3), np.float32)
    at = None if positions is None else np.array(positions)
    for shape in [(2, 6), (2,), (2, 0)]:
        with pytest.raises(ValueError, match="expected 2 rows of 12 bytes"):
            kernels.scatter(np.ones(shape, np.float32), at, np.arange(2), 0, out)
    assert not out.any()


@pytest.mark.parametrize("positions", [None, [0]])
def test_another_number_of_values_is_not_scattered(positions):
    out = np.zeros((4, 3), np.float32)
    at = None if positions is None else np.array(positions)
    for count in (1, 3):
        with pytest.raises(ValueError, match="expected 2 rows of 12 bytes"):
            kernels.scatter(np.ones((count, 3), np.float32), at, np.arange(2), 0, out)
    assert not out.any()


def test_bad_arguments_of_scatter_are_errors(built):
    source, rows, out = np.ones(8, np.uint8), np.arange(2), np.zeros(16, np.uint8)
    with pytest.raises(TypeError, match="rows: expected items of 8 bytes, found 4"):
        built.scatter(source, 4, None, rows.astype(np.int32), 0, out)
    with pytest.raises(TypeError, match="positions: expected items of 8 bytes, found 4"):
        built.scatter(source, 4, rows.astype(np.int32), rows, 0, out)
    with pytest.raises(ValueError, match="positions: expected 2 items, found 1"):
        built.scatter(source, 4, rows[:1], rows, 0, out)
    with pytest.raises(ValueError, match="source: expected 6 items, found 8"):
        built.scatter(source, 3, None, rows, 0, out)
    with pytest.raises(IndexError, match="in 0 to 1, found 2"):  # A part of a row is not a row.
        built.scatter(source, 3, rows + 1, rows, 0, out)
    for positions in (None, rows):
        with pytest.raises(ValueError, match="do not overlap"):
            built.scatter(out[:8], 4, positions, rows, 0, out)
        for row_bytes in (0, -1, 2**62):
            with pytest.raises(ValueError, match="at least one byte that fit"):
                built.scatter(source, row_bytes, positions, rows, 0, out)
    with pytest.raises(ValueError, match="do not overlap"):
        built.scatter(source, 4, rows, rows, 0, rows.view(np.uint8))
    with pytest.raises(OverflowError):
        built.scatter(source, 4, None, rows, 2**63, out)


LOSSY = [name for name in codecs.names() if not codecs.get(name).lossless]
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 2.0**-48, 3e38, 65504.0, 2.0**48]


def rows_of(draw, width: int, dtype: str) -> np.ndarray:
    """Rows (40, width): normal ones of many scales, constant ones, grids, bits, special values."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (40, width)
    rows = random.standard_normal(shape, np.float32)
    rows *= np.exp2(random.integers(-60, 60, (40, 1))).astype(np.float32)
    rows[:4] = np.round(rows[:4] * 4) / 4
    rows[4:8] = random.integers(0, 5, (4, width)) * np.float32(0.1)
    rows[8] = rows[8, 0]
    rows[9:12] = random.integers(0, 2**32, (3, width), np.uint32).view(np.float32)
    for row in rows[12:20]:
        chosen = draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4))
        row[random.integers(0, width, len(chosen))] = chosen
    with np.errstate(over="ignore", invalid="ignore"):
        return rows.astype(dtype)


@given(st.data())
def test_scanned_stamps_are_those_of_numpy(data):
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    clock = data.draw(st.sampled_from([0, 5, -1, 2**31 - 1, -(2**31)]))
    arrays = []
    for length in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4)):
        stamps = np.zeros(length, np.int32)
        stamps[random.random(length) < data.draw(st.sampled_from([0, 0.02, 0.5, 1]))] = 6
        arrays.append(stamps[data.draw(st.integers(0, 20)) :])
    found = kernels.scan(
        data.draw(st.sampled_from([arrays, [*map(jnp.asarray, arrays)]])), clock, 2**40
    )
    assert found.dtype == np.int64
    wanted = np.flatnonzero(np.concatenate(arrays) > clock) + 2**40
    np.testing.assert_array_equal(found, wanted)


def test_no_stamps_are_scanned():
    found = kernels.scan([], 5)
    assert (found.dtype, len(found)) == (np.int64, 0)


def test_more_stamps_than_are_scanned_at_once_are_scanned(monkeypatch):
    monkeypatch.setattr(kernels, "_SCANNED_AT_ONCE", 100)
    stamps = np.arange(1001, dtype=np.int32)
    found = kernels.scan([stamps[:30], stamps[30:]], 50)
    np.testing.assert_array_equal(found, np.arange(51, 1001))
    assert len(kernels.scan([stamps[::2]], 50)) == 475


def test_bad_arguments_of_scan_are_errors(built):
    stamps, out = np.ones(4, np.int32), np.empty(4, np.int64)
    with pytest.raises(ValueError, match="out: expected 4 items, found 3"):
        built.scan([stamps], 0, 0, out[:3])
    with pytest.raises(TypeError, match="stamps: expected items of 4 bytes, found 8"):
        built.scan([stamps.astype(np.int64)], 0, 0, out)
    with pytest.raises(ValueError, match="do not overlap"):
        built.scan([out.view(np.int32)[:4]], 0, 0, out)
    with pytest.raises(OverflowError):
        built.scan([stamps], 2**31, 0, out)
    with pytest.raises(TypeError, match="bytes-like"):
        built.scan([object()], 0, 0, out)


#: XLA compiles a program for each codec, width and dtype, so each codec is drawn with three.
CASES = list(itertools.product([1, 3, 63, 65, 100], ["float32", "bfloat16", "float16"]))


@pytest.mark.parametrize("path", [""], indirect=True)
@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=15)
@given(st.data())
def test_encoded_rows_are_those_of_xla_on_every_path(path, name, data):
    codec = codecs.get(name)
    at = LOSSY.index(name)
    cases = [(64, "float32"), CASES[7 * at % 15], CASES[(7 * at + 5) % 15]]
    width, dtype = data.draw(st.sampled_from(cases))
    rows = rows_of(data.draw, width, dtype if isinstance(codec, codecs.Uniform) else "float32")
    expected = encode.on_host(codec, rows)
    found = []
    for each in supported():
        with forced(each):
            found.append(encode.on_host(codec, rows))
    for one in found:
        assert one.arrays.keys() == expected.arrays.keys()
        for suffix, array in expected.arrays.items():
            np.testing.assert_array_equal(one.arrays[suffix], array)
        np.testing.assert_array_equal(one.representable, expected.representable)
        assert one.squared_error.tobytes() == found[0].squared_error.tobytes()
        assert one.squared_norm.tobytes() == found[0].squared_norm.tobytes()
    # XLA adds in another order. Squares below 2**-126 become 0, or add up before they do.
    least, norm = width * 2.0**-126, expected.squared_norm
    np.testing.assert_allclose(found[0].squared_norm, norm, rtol=1e-5, atol=least)
    missed = np.abs(found[0].squared_error - expected.squared_error)
    assert (missed <= 1e-5 * norm + least).all()


@pytest.mark.parametrize("name", ["int4", "adaptive3", "fp16"])
def test_no_rows_are_encoded_to_no_rows(path, name):
    codec = codecs.get(name)
    found = encode.on_host(codec, np.empty((0, 64), np.float32))
    assert all(len(array) == 0 for array in [*found.arrays.values(), *found[1:]])


def test_bad_arguments_of_encoders_are_errors(built):
    rows, codec = np.ones((3, 8), np.float32), (4, False, 0, 0, 0.0, 1e-9, 1e9)
    codes, scale = np.empty((3, 4), np.uint8), np.empty(3, np.uint16)
    offset, held, figure = scale.copy(), np.empty(3, bool), np.empty(3, np.float32)
    good = [rows, "float32", 8, codec, codes, scale, offset, held, figure, figure.copy()]
    built.encode_uniform(*good)
    for at, bad, error in [
        (0, rows.ravel()[:-1], "expected rows of 8 items, found 23 items"),
        (0, rows.astype(np.float64), "rows: expected items of 4 bytes, found 8"),
        (1, "float64", "expected float32, bfloat16 or float16, found float64"),
        (1, "bfloat16", "rows: expected items of 2 bytes, found 4"),
        (2, 0, "expected a positive number, found 0"),
        (2, 2**62, "expected a positive number"),
        (2, 5, "expected rows of 5 items"),
        (3, (5, *codec[1:]), "expected 2, 3, 4 or 8 bits"),
        (3, (8, *codec[1:]), "codes: expected 24 items, found 12"),
        (4, codes[:2], "codes: expected 12 items, found 8"),
        (5, scale[:2], "scale: expected 3 items, found 2"),
        (6, None, "an offset unless symmetric"),
        (7, held[:2], "held: expected 3 items, found 2"),
        (8, figure.astype(float), "squared_error: expected items of 4 bytes"),
        (9, figure, "do not overlap"),
    ]:
        with pytest.raises((TypeError, ValueError), match=error):
            built.encode_uniform(*good[:at], bad, *good[at + 1 :])
    with pytest.raises(ValueError, match="codes: expected 24 items, found 3"):
        built.encode_shorter(rows, 8, "float16", 1e-9, 1e9, scale, held, figure, figure.copy())
    with pytest.raises(ValueError, match="expected bfloat16 or float16, found half"):
        built.encode_shorter(rows, 8, "half", 1e-9, 1e9, scale, held, figure, figure.copy())


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=20)
@given(st.data())
def test_decoded_rows_are_those_of_numpy_on_every_path(path, name, data):
    codec, width = codecs.get(name), data.draw(st.sampled_from(WIDTHS))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(0, 40))
    stored = {}
    for suffix, array in codec.stored((width,), np.dtype(np.float32)).items():
        shape = (count, *array.trailing)
        # Any bits, such as those of a damaged file; codes after the last are not 0 either.
        stored[suffix] = random.integers(0, 256, (*shape, array.dtype.itemsize), np.uint8)
        stored[suffix] = stored[suffix].view(array.dtype).reshape(shape)
    out, expected = np.full((2, count, width), 7, np.float32)
    with np.errstate(all="ignore"):
        codec.decode(stored, out)
        with forced(""):
            codec.decode(stored, expected)
    # The payload of a NaN is not defined.
    same = (out.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(out) & np.isnan(expected))
    assert same.all()


def test_bad_arguments_of_decoders_are_errors(built):
    codes, scale = np.zeros((3, 4), np.uint8), np.zeros(3, np.uint16)
    good = [codes, scale, scale, 4, 8, np.empty((3, 8), np.float32)]
    built.decode_uniform(*good)
    for at, bad, error in [
        (0, codes[:2], "codes: expected 12 items, found 8"),
        (1, scale[:2], "scale: expected 3 items, found 2"),
        (2, scale[:2], "offset: expected 3 items, found 2"),
        (3, 5, "expected 2, 3, 4 or 8 bits"),
        (3, 8, "codes: expected 24 items, found 12"),
        (4, 7, "out: expected rows of 7 items"),
        (4, -1, "a positive width"),
        (5, np.empty((3, 8)), "out: expected items of 4 bytes, found 8"),
    ]:
        with pytest.raises((TypeError, ValueError), match=error):
            built.decode_uniform(*good[:at], bad, *good[at + 1 :])
    with pytest.raises(ValueError, match="out: expected 3 items, found 24"):
        built.widen_halves(scale, good[-1])


# Blocks.


# Checksums.


@given(st.data())
def test_checksums_of_blocks_are_those_of_google_crc32c(data):
    nbytes = data.draw(st.integers(0, 60_000) | st.sampled_from([24_576, 49_152, 49_159]))
    block_bytes = data.draw(st.sampled_from([1, 9, 4096, 24_576, 1 << 17]))
    block_bytes = block_bytes if nbytes < 1000 else max(4096, block_bytes)
    used = data.draw(st.integers(0, block_bytes - 1))
    start = data.draw(st.integers(0, 9))
    whole = np.random.default_rng(nbytes).integers(0, 256, used + start + nbytes, np.uint8)
    before, rest = whole[:used], whole[used + start :]
    contents = before.tobytes() + rest.tobytes()
    pieces = [contents[at : at + block_bytes] for at in range(0, len(contents), block_bytes)]
    copied = np.zeros(nbytes, np.uint8) if data.draw(st.booleans()) else None
    sums = digests.BlockSums(block_bytes)
    sums.add(before)
    sums.add(rest, copied)
    assert np.frombuffer(sums.blocks, "<u4").tolist() == [*map(google_crc32c.value, pieces)]
    assert (sums.nbytes, sums.crc32c) == (len(contents), google_crc32c.value(contents))
    assert copied is None or copied.tobytes() == rest.tobytes()


def test_bad_arguments_of_checksums_are_errors(built):
    data, out, sums = np.ones(8, np.uint8), np.ones(8, np.uint8), np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="a first block that is not complete"):
        built.crc32c_blocks(data, out, 4, 4, 0, sums)
    with pytest.raises(ValueError, match="a first block that is not complete"):
        built.crc32c_blocks(data, out, 4, -1, 0, sums)
    with pytest.raises(ValueError, match="expected shorter blocks"):
        built.crc32c_blocks(data, out, 2**63 - 1, 0, 0, sums)
    with pytest.raises(ValueError, match="sums: expected 3 items, found 2"):
        built.crc32c_blocks(data, out, 4, 1, 0, sums)
    with pytest.raises(ValueError, match="out: expected 8 items, found 7"):
        built.crc32c_blocks(data, out[1:], 4, 0, 0, sums)
    with pytest.raises(TypeError, match="data: expected items of 1 bytes, found 4"):
        built.crc32c_blocks(sums, None, 4, 0, 0, sums)
    with pytest.raises(ValueError, match="do not overlap"):
        built.crc32c_blocks(data, data, 4, 0, 0, sums)
