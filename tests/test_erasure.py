# SPDX-License-Identifier: Apache-2.0
"""Fragments: any k of k + m restore the bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt.errors import MissingExtra, OptionError
from deltackpt.tiers import erasure

CODES = [(1, 0), (1, 1), (1, 3), (3, 0), (2, 1), (5, 1), (2, 2), (4, 2), (3, 3)]
STRIPE = erasure.STRIPE_BYTES
LENGTHS = [1, 63, 64, 4097, STRIPE - 1, STRIPE, STRIPE + 1, 2 * STRIPE + 12345]


def needs_library(k: int, m: int) -> None:
    if k > 1 and m > 1:
        pytest.importorskip("pyeclib", reason="needs deltackpt[erasure]")


def padded(k: int, nbytes: int, seed: int = 0) -> memoryview:
    found = bytearray(erasure.padded_bytes(k, nbytes))
    found[:nbytes] = np.random.default_rng(seed).bytes(nbytes)
    return memoryview(found)


def restored(code: erasure.Code, coded: list[bytes], gone: set[int], nbytes: int) -> bytes:
    """The bytes restored from the remaining fragments."""
    out = memoryview(bytearray(nbytes))
    for number in set(range(code.k)) - gone:
        start = 0
        for stripe in erasure.stripes(code.k, out):
            at = erasure.piece(code.k, stripe, number)
            at[:] = coded[number][start : start + len(at)]
            start += len(at)
    further = {
        number: memoryview(coded[number])
        for number in range(code.k, code.k + code.m)
        if number not in gone
    }
    lost = gone & set(range(code.k))
    if lost:
        erasure.restore(code, out, further, lost)
    return bytes(out)


def coded(code: erasure.Code, data: memoryview) -> list[bytes]:
    return [b"".join(chunks) for chunks in erasure.fragments(code, data)]


@pytest.mark.parametrize(("k", "m"), CODES)
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_any_k_fragments_restore_the_bytes(k, m, nbytes):
    needs_library(k, m)
    code, data = erasure.code_of(k, m), padded(k, nbytes)
    every = coded(code, data)
    assert len({len(one) for one in every}) == 1
    for gone in itertools.combinations(range(k + m), m):
        assert restored(code, every, set(gone), len(data)) == data


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_up_to_m_losses_are_restored(data):
    k, m = data.draw(st.sampled_from(CODES))
    needs_library(k, m)
    code = erasure.code_of(k, m)
    given_bytes = padded(k, data.draw(st.integers(1, 3000)), seed=data.draw(st.integers(0, 9)))
    gone = data.draw(st.sets(st.integers(0, k + m - 1), max_size=m))
    assert restored(code, coded(code, given_bytes), gone, len(given_bytes)) == given_bytes


@pytest.mark.parametrize(("k", "m"), [(2, 1), (4, 2)])
def test_the_first_fragments_are_the_bytes_themselves_and_no_copy(k, m):
    needs_library(k, m)
    data = padded(k, 3 * STRIPE)
    found = erasure.fragments(erasure.code_of(k, m), data)
    for number in range(k):
        for stripe, one in zip(erasure.stripes(k, data), found[number], strict=True):
            assert one.obj is data.obj
            assert one == erasure.piece(k, stripe, number)


def test_reed_solomon_fragments_have_no_headers_of_the_library():
    needs_library(4, 2)
    data = padded(4, 100_000)
    for number, chunks in enumerate(erasure.fragments(erasure.code_of(4, 2), data)):
        assert sum(map(len, chunks)) == len(data) // 4, number


def test_fragments_of_the_same_bytes_are_the_same():
    """So a fragment that was sent before need not be sent again."""
    needs_library(4, 2)
    assert coded(erasure.code_of(4, 2), padded(4, 99)) == coded(
        erasure.code_of(4, 2), padded(4, 99)
    )


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, -1), (20, 13)])
def test_invalid_codes_are_refused(k, m):
    with pytest.raises(OptionError, match=f"k={k} and m={m}"):
        erasure.code_of(k, m)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyeclib", None)
    with pytest.raises(MissingExtra, match=r"deltackpt\[erasure\]"):
        erasure.code_of(4, 2)
    erasure.code_of(4, 1)
    erasure.code_of(1, 2)
