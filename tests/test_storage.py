# SPDX-License-Identifier: Apache-2.0
"""Arrays on disk: any Zarr reader opens them, reads are verified, and errors name the chunk."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import write_array, write_digested

from deltackpt.errors import Damaged, OutOfSpace, StorageError
from deltackpt.format import row_blocks
from deltackpt.storage import arrays, batch, digests
from deltackpt.storage.digests import ChunkSums
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import split


def write(directory: Path, data: np.ndarray, *, zstd: bool = False, cuts=()) -> arrays.ArrayEntry:
    entry = row_blocks.array_entry("a", data.shape, data.dtype, zstd=zstd)
    write_array(directory, entry, np.split(data, sorted(cuts)), fsync=False)
    return entry


def tails(directory: Path) -> dict[str, ChunkSums]:
    """Returns the sums of each chunk by digests without blocks: its trailing CRC32C."""
    return {
        name: ChunkSums(digest.tail)
        for name, digest in digests.digest_tree(directory).items()
        if name.startswith("c.")
    }


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 300),
    trailing=st.sampled_from([(), (3,), (2, 5)]),
    dtype=st.sampled_from(["float32", "uint16", "bool", "int64", "complex64"]),
    chunk=st.integers(50, 4000),
    zstd=st.booleans(),
    data=st.data(),
)
def test_arrays_written_in_pieces_are_read_in_ranges(
    tmp_path_factory, rows, trailing, dtype, chunk, zstd, data
):
    directory = tmp_path_factory.mktemp("array")
    size = int(np.prod((rows, *trailing)))
    values = np.random.default_rng(size).integers(0, 2, size).astype(dtype)
    values = (values * 77).astype(dtype).reshape(rows, *trailing)
    cuts = data.draw(st.sets(st.integers(0, rows), max_size=4))
    with mock.patch.object(row_blocks, "CHUNK_BYTES", chunk):
        entry = write(directory, values, zstd=zstd, cuts=cuts)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    out = np.zeros((stop - start, *trailing), dtype)
    arrays.read_array(directory, entry, start, stop, out)
    assert np.array_equal(out, values[start:stop])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{directory}/"}}
    assert np.array_equal(ts.open(spec).result().read().result(), values)


def test_digests_from_memory_are_those_of_the_files(tmp_path):
    values = np.random.default_rng(0).normal(size=(1001, 7)).astype(np.float32)
    with mock.patch.object(row_blocks, "CHUNK_BYTES", 5000):
        entry = row_blocks.array_entry("a", values.shape, values.dtype)
        written = write_digested(tmp_path / "a", entry, [values], fsync=True)
    computed = {name: digest._replace(blocks=b"") for name, digest in written.items()}
    assert len(computed) > 2
    assert computed == digests.digest_tree(tmp_path / "a")


@given(length=st.integers(0, 40), most=st.integers(1, 50), flipped=st.integers(-1, 40))
def test_the_last_piece_of_an_altered_file_never_arrives(length, most, flipped):
    data = bytearray(range(1, length + 1))
    expected, given = digests.digest_bytes(data), data[:]
    altered = 0 <= flipped < length
    if altered:
        given[flipped] ^= 1
    came: list[bytes] = []

    def read(start: int, nbytes: int) -> bytes:
        return bytes(given[start : start + nbytes])

    with pytest.raises(Damaged, match="the file") if altered else contextlib.nullcontext():
        came.extend(digests.verified("the file", expected, read, most_bytes=most))
    count = max(1, -(-length // most))
    assert len(came) == count - altered and b"".join(came) == given[: sum(map(len, came))]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    sizes=st.lists(st.integers(0, 12), max_size=5),
    first=st.integers(0, 20),
)
def test_a_read_over_several_pieces_is_one_read_of_each(lengths, sizes, first):
    ends = [*itertools.accumulate(lengths)]
    data = bytes(range(sum(lengths)))
    buffers = [bytearray(size) for size in sizes]
    wanted = data[first : first + sum(sizes)]
    numbers = []
    for number, start, inside in split(first, map(memoryview, buffers), ends):
        numbers.append(number)
        for buffer in inside:
            assert start + len(buffer) <= ends[number]
            buffer[:] = data[start : start + len(buffer)]
            start += len(buffer)
    assert numbers == sorted(set(numbers))
    assert b"".join(buffers)[: len(wanted)] == wanted


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 300),
    width=st.integers(1, 9),
    chunk=st.integers(50, 4000),
    block=st.integers(1, 700),
    data=st.data(),
)
def test_reading_some_rows_of_a_chunk_reads_only_their_blocks(
    tmp_path_factory, rows, width, chunk, block, data
):
    directory = tmp_path_factory.mktemp("array")
    values = np.random.default_rng(rows).normal(size=(rows, width)).astype(np.float32)
    read = []

    real = os.preadv

    def counted(file, buffers, offset):
        read.append(sum(map(len, buffers)))
        return real(file, buffers, offset)

    with (
        mock.patch.object(row_blocks, "CHUNK_BYTES", chunk),
        mock.patch.object(arrays, "BLOCK_BYTES", block),
        mock.patch.object(batch, "BLOCK_BYTES", block),
        mock.patch.object(os, "preadv", counted),
    ):
        entry = row_blocks.array_entry("a", values.shape, values.dtype)
        sums = write_array(directory, entry, [values], fsync=False)
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        out = np.zeros((stop - start, width), np.float32)
        arrays.read_array(directory, entry, start, stop, out, checksums=sums)
        assert np.array_equal(out, values[start:stop])
        chunks = -(-stop // entry.chunk_rows) - start // entry.chunk_rows
        spare = 2 * (block - 1) + chunks * 4 + arrays.chunk_bytes(entry) * (stop == rows)
        assert sum(read) <= out.nbytes + spare
        if start < stop:
            damaged = data.draw(st.integers(start, stop - 1))
            path = directory / arrays.chunk_name(entry, damaged // entry.chunk_rows)
            content = bytearray(path.read_bytes())
            content[damaged % entry.chunk_rows * width * 4] ^= 1
            path.write_bytes(content)
            with pytest.raises(Damaged, match=r"c\."):
                arrays.read_array(directory, entry, start, stop, out, checksums=sums)


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("how", ["removed", "truncated", "flipped", "grown"])
def test_a_damaged_chunk_is_named(tmp_path, zstd, how):
    directory = tmp_path / "9" / "embeddings" / "shard.0" / "g0.0" / "values"
    values = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    entry = write(directory, values, zstd=zstd)
    checksums = tails(directory)
    chunk = directory / "c.0.0"
    data = chunk.read_bytes()
    if how == "removed":
        chunk.unlink()
    else:
        flipped = data[:40] + bytes([data[40] ^ 1]) + data[41:]
        chunk.write_bytes({"truncated": data[:-9], "flipped": flipped, "grown": data + b"x"}[how])
    for start, stop in ((0, 100), (3, 50)):
        out = np.empty((stop - start, 4), np.float32)
        with pytest.raises(Damaged, match="shard.0/g0.0/values/c.0.0"):
            arrays.read_array(directory, entry, start, stop, out, checksums=checksums)


def test_an_atomic_write_leaves_the_old_contents_when_it_fails(tmp_path):
    path = tmp_path / "file"
    DurableDir(tmp_path).write(path, b"old")
    with (
        mock.patch("os.replace", side_effect=OSError(28, "No space left on device")),
        pytest.raises(OutOfSpace, match="free space"),
    ):
        DurableDir(tmp_path).write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("absent", [False, True])
def test_writers_of_one_file_never_mix_their_bytes(tmp_path, absent):
    """Two containers on a shared file system can have equal process and thread ids."""
    path, name = tmp_path / "file", "link" if absent else "replace"
    directory = DurableDir(tmp_path, fsync=False)
    real, others = getattr(os, name), iter([b"the other's"])
    written: list[bytes] = []

    def late(source: str, target: str, **folders: int | bool) -> None:
        """Publishes a file after another writer has published its own."""
        for data in others:
            directory.write(path, data)
        written.append((tmp_path / source).read_bytes())
        real(source, target, **folders)

    with (
        mock.patch.object(os, "getpid", lambda: 7),
        mock.patch.object(threading, "get_native_id", lambda: 7),
        mock.patch.object(os, name, late),
        pytest.raises(StorageError) if absent else contextlib.nullcontext(),
    ):
        directory.write(path, b"own", absent=absent)
    assert written[-1] == b"own"
    assert path.read_bytes() == (b"the other's" if absent else b"own")
    assert os.listdir(tmp_path) == ["file"]
