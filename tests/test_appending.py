# SPDX-License-Identifier: Apache-2.0
"""Appending to files: the bytes are those that were given, past the page cache or through it."""

from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest
from machine import open_files

from deltackpt.storage import aligned, appending
from deltackpt.storage.appending import Appender

BLOCK = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Long runs are those of a few blocks, and so are the pieces of a direct write."""
    monkeypatch.setattr(appending, "DIRECT_BYTES", 2 * BLOCK)
    monkeypatch.setattr(appending, "_PIECE_BYTES", 3 * BLOCK)


def runs(lengths: list[list[int]]) -> list[list[bytes]]:
    """Random bytes: those of each call of ``append``, in buffers of such lengths."""
    random = np.random.default_rng(0)
    return [[random.bytes(length) for length in own] for own in lengths]


def appended(path: Any, given: list[list[bytes]]) -> list[int]:
    """Appends the bytes of each call; returns how long the file was after each."""
    file, lengths = Appender(), []
    file.begin(path)
    for own in given:
        file.append([memoryview(one) for one in own])
        lengths.append(path.stat().st_size)
    file.end()
    return lengths


def joined(given: list[list[bytes]]) -> bytes:
    return b"".join(one for own in given for one in own)


LENGTHS = [
    [[1]],
    [[0, BLOCK, 0], [2 * BLOCK]],
    [[2 * BLOCK]],
    [[2 * BLOCK - 1], [2 * BLOCK]],
    [[100, 3 * BLOCK, 5, 7 * BLOCK + 3], [9], [10 * BLOCK]],
    [[17], [1] * 3 * BLOCK, [5 * BLOCK, 1]],
    [[9 * BLOCK], [9 * BLOCK + 1], [], [9 * BLOCK - 1]],
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_appended_is_in_the_file(lengths, tmp_path):
    given = runs(lengths)
    found = appended(tmp_path / "a", given)
    assert (tmp_path / "a").read_bytes() == joined(given)
    assert found == np.cumsum([sum(own) for own in lengths]).tolist()


def test_long_runs_pass_the_cache_and_short_ones_do_not(tmp_path, monkeypatch):
    direct, cached = [], []
    pwrite, writev = os.pwrite, os.writev

    def past(descriptor: int, data: Any, at: int) -> int:
        direct.append((at, len(data)))
        return pwrite(descriptor, data, at)

    def through(descriptor: int, buffers: Any) -> int:
        cached.append(sum(len(one) for one in buffers))
        return writev(descriptor, buffers)

    monkeypatch.setattr(os, "pwrite", past)
    monkeypatch.setattr(os, "writev", through)
    appended(tmp_path / "a", runs([[100], [5 * BLOCK], [200]]))
    # The rest of the first block and what fills no block are the cache's.
    assert direct == [(BLOCK, 3 * BLOCK), (4 * BLOCK, BLOCK)]
    assert cached == [100, BLOCK - 100, 100, 200]


@pytest.mark.parametrize("at", [0, 1])
def test_a_file_system_without_direct_writes(at, tmp_path, monkeypatch):
    """It refuses when the file is opened, or not before the first write."""
    real = os.open, os.pwrite

    def opened(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and at == 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real[0](path, flags, *mode)

    def written(*given: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", written)
    given = runs(LENGTHS[4])
    appended(tmp_path / "a", given)
    assert (tmp_path / "a").read_bytes() == joined(given)


def test_another_alignment_goes_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(aligned, "alignment", lambda descriptor: 2 * BLOCK)
    monkeypatch.setattr(os, "pwrite", lambda *given: pytest.fail("written directly"))
    given = runs(LENGTHS[4])
    appended(tmp_path / "a", given)
    assert (tmp_path / "a").read_bytes() == joined(given)


@pytest.mark.parametrize("more", [0, 100])
def test_writes_that_are_cut_short_go_on(more, tmp_path, monkeypatch):
    real = os.pwrite

    def short(descriptor: int, data: Any, at: int) -> int:
        # The kernel takes whole blocks; more of the last one may count as taken.
        return min(len(data), real(descriptor, data[:BLOCK], at) + more)

    monkeypatch.setattr(os, "pwrite", short)
    given = runs(LENGTHS[4])
    appended(tmp_path / "a", given)
    assert (tmp_path / "a").read_bytes() == joined(given)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_is_refused_is_raised_and_what_stands_is_a_part(number, after, tmp_path, monkeypatch):
    real, left = os.pwrite, [after]

    def write(descriptor: int, data: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        # Each is cut short: what is refused may be the rest of a piece.
        return real(descriptor, data[:BLOCK], at)

    monkeypatch.setattr(os, "pwrite", write)
    given, path = runs([[100], [9 * BLOCK]]), tmp_path / "a"
    if number == errno.EINVAL and after == 0:
        # It takes none, and the cache takes them all.
        appended(path, given)
        assert path.read_bytes() == joined(given)
        return
    with pytest.raises(OSError) as caught:
        appended(path, given)
    assert caught.value.errno == number
    assert path.read_bytes() == joined(given)[: (1 + after) * BLOCK]


def test_a_file_that_is_there_is_not_appended_to(tmp_path):
    (tmp_path / "a").write_bytes(b"others'")
    file = Appender()
    with pytest.raises(FileExistsError):
        file.begin(tmp_path / "a")
    assert file.descriptor is None
    file.end()
    assert (tmp_path / "a").read_bytes() == b"others'"


def test_files_follow_each_other_and_leave_no_descriptor(tmp_path):
    file = Appender()
    for number in range(3):
        file.begin(tmp_path / str(number))
        file.append([memoryview(bytes([number]) * 3 * BLOCK)])
        file.end()
        file.end()
    assert [(tmp_path / str(n)).read_bytes() for n in range(3)] == [
        bytes([n]) * 3 * BLOCK for n in range(3)
    ]
    assert not open_files(tmp_path)
