# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of blocks compute the bits of numpy, on every instruction set of this CPU."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import forced, supported
from machine import required
from test_block_codes import DIFFERENCES, LOSSY, bits, leaves

from deltackpt import codecs, kernels
from deltackpt.codecs import block_codecs
from deltackpt.format.row_blocks import BLOCK
from deltackpt.resources.runtime import Runtime
from deltackpt.save import block_codes, encode_blocks

#: A signaling NaN is an invalid operation for some CPUs.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


@pytest.fixture(params=["avx512", "avx2", "baseline"], scope="module")
def path(request) -> str:
    """Each instruction set."""
    required(bool(supported()), "deltackpt._kernels is not built: run make kernels")
    if request.param not in supported():
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


@pytest.fixture
def built(path):
    """The compiled module."""
    from deltackpt import _kernels

    with forced(path):
        yield _kernels


def same_arrays(found, expected) -> bool:
    """Whether two mappings have the same arrays, bit for bit."""
    return {name: (one.dtype, one.tobytes()) for name, one in found.items()} == {
        name: (one.dtype, one.tobytes()) for name, one in expected.items()
    }


# Lossy codecs.


@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=150, deadline=None)
@given(found=leaves(), known=st.booleans(), swap=st.booleans())
def test_encoded_blocks_are_those_of_numpy(name, found, known, swap, path):
    before, now = found[::-1] if swap else found
    codec, coded = block_codecs.get(name), {}
    reference = before if known or codec.relative else None
    outs = {one: np.full_like(now, 7) for one in (path, "")}
    for one, out in outs.items():
        with forced(one):
            coded[one] = encode_blocks.encode(codec, now, reference, out)
    mine, expected = coded[path], coded[""]
    assert mine.states.tolist() == expected.states.tolist()
    assert same_arrays(mine.arrays, expected.arrays)
    assert bits(outs[path]).tolist() == bits(outs[""]).tolist()
    assert math.isclose(mine.squared_error, expected.squared_error, rel_tol=1e-5)
    assert math.isclose(mine.squared_norm, expected.squared_norm, rel_tol=1e-5)
    rows = np.flatnonzero(mine.states == kernels.CODED)
    decoded = {one: before.copy() for one in outs}
    for one, data in decoded.items():
        with forced(one), np.errstate(all="ignore"):
            codec.decode(mine.arrays, rows, data)
    assert bits(decoded[path]).tolist() == bits(decoded[""]).tolist()
    assert bits(decoded[path])[rows].tolist() == bits(outs[path])[rows].tolist()


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", [*LOSSY, "lossless"])
def test_results_do_not_depend_on_the_size_of_the_pieces(name, dtype, path, monkeypatch):
    rng = np.random.default_rng(0)
    count = 5000  # So many blocks are written past the cache.
    before = (np.abs(rng.normal(size=(count, BLOCK))) + 0.1).astype(np.float32).astype(dtype)
    now = (before.astype(np.float32) * np.float32(1.01)).astype(dtype)
    now[100:300] = before[100:300]
    now[2000, 3] = np.nan
    now[3000:3100, 1:] = before[3000:3100, 1:]
    with Runtime(2) as runtime, forced(path):
        whole = block_codes.encode_leaf(now, before, name, None, runtime)
        monkeypatch.setattr(block_codes, "_SPAN_BLOCKS", 7)
        cut = block_codes.encode_leaf(now, before, name, None, runtime)
    assert np.asarray(whole.decoded).tobytes() == np.asarray(cut.decoded).tobytes()
    for one, other in zip(whole.pieces, cut.pieces, strict=True):
        assert one.codec == other.codec and same_arrays(one.arrays, other.arrays)
        assert one.blocks.tolist() == other.blocks.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_short_float_is_widened_and_narrowed_like_a_cast(dtype, path):
    kind = codecs.dtype_of(dtype)
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(-1, BLOCK)
    values = patterns.view(kind)
    finite = np.isfinite(values.astype(np.float32)).all(axis=1)
    data, wide = values[finite].copy(), values[finite].astype(np.float32)
    rows = range(len(data))
    arrays = {
        "": np.full((len(data), BLOCK // 2), 0x99, np.uint8),  # Code 1 everywhere.
        "scale": (2.0 ** np.linspace(-14, 8, len(data))).astype(np.float16),
    }
    with forced(path):
        block_codecs.get("ef4").decode(arrays, rows, data)
    with np.errstate(over="ignore"):
        expected = (wide + arrays["scale"].astype(np.float32)[:, None]).astype(kind)
    assert data.view(np.uint16).tolist() == expected.view(np.uint16).tolist()


@pytest.mark.parametrize("name", ["ef4", "ef8", "int8"])
def test_any_scale_decodes_as_in_numpy(name, path):
    rng = np.random.default_rng(0)
    codec = block_codecs.get(name)
    bits_each = 4 if name == "ef4" else 8
    for start in range(0, 1 << 16, 1 << 12):
        scales = np.arange(start, start + (1 << 12), dtype=np.uint16).view(np.float16)
        shape = (len(scales), BLOCK * bits_each // 8)
        arrays = {"": rng.integers(0, 256, shape, np.uint8), "scale": scales}
        found = {}
        for one in (path, ""):
            found[one] = np.ones((len(scales), BLOCK), np.float32)
            with forced(one), np.errstate(all="ignore"):
                codec.decode(arrays, range(len(scales)), found[one])
        assert np.array_equal(found[path], found[""], equal_nan=True)


@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
@pytest.mark.parametrize("name", ["log4", "log8"])
def test_any_stored_bytes_of_logarithms_decode_as_in_numpy(name, dtype, path):
    rng, count = np.random.default_rng(0), 3000
    codec, kind = block_codecs.get(name), codecs.dtype_of(dtype)
    arrays = {
        suffix: rng.integers(0, 1 << 8 * array.dtype.itemsize, (count, *array.trailing)).astype(
            array.dtype
        )
        for suffix, array in codec.stored(kind).items()
    }
    if name == "log4":
        arrays["step"] %= block_codecs.WIDEST_STEP + 1
    rows = np.sort(rng.choice(2 * count, count, replace=False))
    found = {}
    for one in (path, ""):
        found[one] = np.abs(np.random.default_rng(1).normal(size=(2 * count, BLOCK))).astype(kind)
        with forced(one):
            codec.decode(arrays, rows, found[one])
    assert bits(found[path]).tolist() == bits(found[""]).tolist()


def test_the_logarithm_is_within_its_error_for_all_positive_numbers():
    with np.errstate(over="ignore"):
        for start in range(1, 0x7F800000, 1 << 26):
            patterns = np.arange(start, min(start + (1 << 26), 0x7F800000), 997, dtype=np.uint32)
            exact = block_codecs.FINE * np.log2(patterns.view(np.float32).astype(np.float64))
            points, rest = encode_blocks._any_logarithm(patterns)
            assert np.abs(points + rest.astype(np.float64) - exact).max() < 0.0003


def test_points_of_the_grid_are_encoded_as_they_are(path):
    """Blocks that were decoded by log8 have the same codes when they are encoded again."""
    rng, places = np.random.default_rng(0), block_codecs.powers("float32")
    firsts = rng.integers(0, block_codecs.PLACES - 254, 200)
    codes = rng.integers(0, 255, (200, BLOCK))
    codes[:, :2] = 0, 254
    now = places[firsts[:, None] + codes]
    # Below the normal numbers, several points are the same number.
    firsts, now = firsts[now.min(axis=1) >= 2.0**-126], now[now.min(axis=1) >= 2.0**-126]
    out = np.empty_like(now)
    with forced(path):
        found = encode_blocks.encode(block_codecs.get("log8"), now, None, out)
    assert (found.arrays["step"] == 1).all() and (found.arrays["low"] == firsts).all()
    assert (out == now).all() and found.squared_error == 0


# Changed elements.


@st.composite
def changed_leaves(draw):
    """Blocks of unsigned integers before and after a step, of which some elements changed."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    dtype = draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
    count = draw(st.sampled_from([0, 1, 2, 17]))
    before = rng.integers(0, 256, (count, BLOCK * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    now = before.copy()
    for block in now:
        places = rng.choice(BLOCK, draw(st.sampled_from([0, 0, 1, 3, 32, 33, 255, 256])), False)
        block[places] ^= np.array(draw(st.sampled_from([1, 128])), dtype)
    return before, now


@given(found=changed_leaves(), most=st.integers(0, BLOCK))
@settings(max_examples=200, deadline=None)
def test_changed_elements_are_those_of_numpy(found, most, path):
    before, now = found
    expected = block_codes._sparse(now, before, most)
    with forced(path):
        mine = kernels.encode_sparse(now, before, most)
    for one, other in zip(mine, expected, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    states, counts, at, changes = mine
    arrays, rows = {"count": counts, "at": at, "": changes}, np.flatnonzero(states == kernels.CODED)
    for one in (path, ""):
        for chosen in (rows, range(len(rows))):
            data = before.copy() if chosen is rows else before[rows]
            with forced(one):
                block_codecs.get("sparse").decode(arrays, chosen, data)
            assert (data[np.asarray(chosen, np.int64)] == now[rows]).all()


@pytest.mark.parametrize("one", ["built", ""])
def test_elements_that_do_not_ascend_are_an_error_and_change_nothing(one, path):
    data = np.zeros((3, BLOCK), np.uint16)
    counts, changes = np.array([2, 2], np.uint16), np.ones(4, np.uint16)
    codec = block_codecs.get("sparse")
    with forced(path if one else ""):
        for at in ([1, 0, 1, 2], [0, 1, 2, 2]):
            arrays = {"count": counts, "at": np.array(at, np.uint8), "": changes}
            with pytest.raises(ValueError, match="ascending positions"):
                codec.decode(arrays, np.array([0, 2]), data)
        arrays = {"count": counts, "at": np.array([9, 10, 0], np.uint8), "": changes}
        with pytest.raises(ValueError, match="expected 4 items.* found 3"):
            codec.decode(arrays, np.array([0, 2]), data)
    assert not data.any()


# Arguments.

_BLOCKS = 4


def encoding(name: str = "ef4", dtype: str = "float32") -> dict[str, object]:
    """Arguments of ``_kernels.encode_blocks`` by name."""
    count, kind = _BLOCKS, codecs.dtype_of(dtype)
    tables = {"log8": block_codecs.places(dtype), "log4": block_codecs.factors()}
    return {
        "codec": kernels._BLOCK_CODECS[name],
        "type": kernels._DTYPES[dtype],
        "now": np.ones((count, BLOCK), kind),
        "before": np.ones((count, BLOCK), kind),
        "out": np.zeros((count, BLOCK), kind),
        "states": np.zeros(count, np.uint8),
        "codes": np.zeros((count, BLOCK // 2 if name in ("ef4", "log4") else BLOCK), np.uint8),
        "words": None if name == "log4" else np.zeros(count, np.uint16),
        "steps": np.zeros(count, np.uint8) if "log" in name else None,
        "table": tables.get(name),
        "low": 0,
        "high": 0,
    }


def decoding(name: str = "ef4", dtype: str = "float32") -> dict[str, object]:
    """Arguments of ``_kernels.decode_blocks`` by name."""
    given = encoding(name, dtype)
    rows = {"rows": np.arange(_BLOCKS), "first": 0, "count": _BLOCKS}
    names = ("codes", "words", "steps", "table")
    stored = {key: given[key] for key in names}
    return {"codec": given["codec"], "type": given["type"], **rows, **stored, "data": given["out"]}


def sparse() -> dict[str, object]:
    """Arguments of ``_kernels.apply_sparse`` by name."""
    return {
        "itemsize": 2,
        "rows": np.arange(_BLOCKS),
        "first": 0,
        "count": _BLOCKS,
        "counts": np.ones(_BLOCKS, np.uint16),
        "at": np.zeros(_BLOCKS, np.uint8),
        "changes": np.ones(_BLOCKS, np.uint16),
        "data": np.zeros((_BLOCKS, BLOCK), np.uint16),
    }


def sparse_encoding() -> dict[str, object]:
    """Arguments of ``_kernels.encode_sparse`` by name."""
    return {
        "itemsize": 2,
        "most": 3,
        "now": np.ones((_BLOCKS, BLOCK), np.uint16),
        "before": np.ones((_BLOCKS, BLOCK), np.uint16),
        "states": np.zeros(_BLOCKS, np.uint8),
        "counts": np.zeros(_BLOCKS, np.uint16),
        "at": np.zeros(3 * _BLOCKS, np.uint8),
        "changes": np.zeros(3 * _BLOCKS, np.uint16),
    }


FUNCTIONS = {
    "encode_blocks": encoding,
    "decode_blocks": decoding,
    "apply_sparse": sparse,
    "encode_sparse": sparse_encoding,
}


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", block_codecs.FLOATS)
def test_no_array_of_another_size_or_item_size_is_taken(name, dtype, built):
    for function, arguments in FUNCTIONS.items():
        given = arguments(name, dtype) if "blocks" in function else arguments()
        getattr(built, function)(*given.values())
        for key, array in given.items():
            if not isinstance(array, np.ndarray):
                continue
            wrong = [array[:-1], array[:, :-1] if array.ndim == 2 else array[::2]]
            wrong += [np.zeros((*array.shape, 2), array.dtype)[..., 0], array.astype(np.float64)]
            wrong += [np.concatenate([array, array]), np.frombuffer(b"", array.dtype)]
            if key == "data":  # It may be longer.
                wrong.pop(4)
            for one in wrong:
                with pytest.raises((ValueError, TypeError, IndexError)):
                    getattr(built, function)(*{**given, key: one}.values())
            if array.itemsize > 1:
                unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
                with pytest.raises(ValueError, match="aligned"):
                    unaligned = unaligned.reshape(array.shape)
                    getattr(built, function)(*{**given, key: unaligned}.values())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arrays_that_are_written_overlap_no_others(function, built):
    given = FUNCTIONS[function]()
    written = {"out", "states", "codes", "words", "data", "counts", "at", "changes"}
    if function in ("decode_blocks", "apply_sparse"):
        written = {"data"}
    arrays = {key: one for key, one in given.items() if isinstance(one, np.ndarray)}
    room = np.zeros(1 << 16, np.uint8)
    for key in written & arrays.keys():
        for other in arrays.keys() - {key}:
            views = {
                name: room[: arrays[name].nbytes].view(arrays[name].dtype) for name in (key, other)
            }
            with pytest.raises((ValueError, IndexError)):
                getattr(built, function)(*{**given, **views}.values())


@pytest.mark.parametrize("function", ["decode_blocks", "apply_sparse"])
@pytest.mark.parametrize(
    "rows",
    [
        [0, 1, 2, 4],
        [0, 1, 1, 2],
        [3, 2, 1, 0],
        [-1, 0, 1, 2],
        [0, 1, 2, 2**62],
        [0, 1, 2, 2**63 - 1],
        [2**63 - 1, 0, 1, 2],
    ],
)
def test_rows_out_of_range_or_order_are_errors(function, rows, built):
    given = FUNCTIONS[function]() | {"rows": np.array(rows)}
    with pytest.raises(IndexError, match="ascending row indices in 0 to 3"):
        getattr(built, function)(*given.values())
    for first, count in ((1, 4), (-1, 4), (2**62, 4), (0, -1), (0, 2**62)):
        wrong = given | {"rows": None, "first": first, "count": count}
        with pytest.raises((IndexError, ValueError)):
            getattr(built, function)(*wrong.values())


def test_unknown_codecs_types_and_sizes_are_errors(built):
    for function, key, values in (
        ("encode_blocks", "codec", (-1, 6)),
        ("encode_blocks", "type", (-1, 3)),
        ("decode_blocks", "codec", (-1, 6)),
        ("decode_blocks", "type", (-1, 3)),
        ("apply_sparse", "itemsize", (-1, 0, 3, 16)),
        ("encode_sparse", "itemsize", (-1, 0, 3, 16)),
        ("encode_sparse", "most", (-1, 257)),
    ):
        for value in values:
            given = FUNCTIONS[function]() | {key: value}
            with pytest.raises(ValueError, match="expected"):
                getattr(built, function)(*given.values())


@pytest.mark.parametrize("name", [*DIFFERENCES, "log4"])
def test_relative_codecs_need_a_reference(name, built):
    given = encoding(name) | {"before": None}
    with pytest.raises(ValueError, match="expected a reference"):
        built.encode_blocks(*given.values())


def test_threads_may_encode_at_the_same_time(path):
    rng = np.random.default_rng(0)
    now = rng.normal(size=(3000, BLOCK)).astype(np.float32)
    before = rng.normal(size=now.shape).astype(np.float32)
    with contextlib.ExitStack() as stack:
        stack.enter_context(forced(path))
        runtime = stack.enter_context(Runtime(8))
        outs = [np.empty_like(now) for _ in range(8)]
        codec = block_codecs.get("ef4")
        found = runtime.map(lambda out: encode_blocks.encode(codec, now, before, out), outs)
    for one, out in zip(found, outs, strict=True):
        assert same_arrays(one.arrays, found[0].arrays)
        assert out.tobytes() == outs[0].tobytes()
