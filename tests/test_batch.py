# SPDX-License-Identifier: Apache-2.0
"""Files of a save have TensorStore's bytes on any file system."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machine import open_files
from shown import bytes_below

from deltackpt.errors import OutOfSpace, StorageError
from deltackpt.format import row_blocks
from deltackpt.format.row_blocks import ArrayEntry
from deltackpt.resources.host_memory import ALIGNMENT, aligned_buffer, is_aligned
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import arrays, batch, digests
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.zarr_writer import ZarrWriter
from deltackpt.testing import Disk, DiskCall


def _stock(directory: Path, entry: ArrayEntry, values: np.ndarray) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory}/"},
        "metadata": arrays.metadata_of(entry),
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result().write(values).result()


def _aligned(values: np.ndarray) -> np.ndarray:
    memory = aligned_buffer(values.nbytes)[: values.nbytes].view(values.dtype)
    memory = memory.reshape(values.shape)
    memory[...] = values
    return memory


def _ours(path: Path, values: np.ndarray, padding: int = 0) -> bytes:
    files = FileBatch(path.parent, fsync=True)
    files.write_chunk(path, values, padding)
    files.force()
    return path.read_bytes()


def _chunk(values: np.ndarray, padding: int = 0) -> bytes:
    data = values.tobytes() + bytes(padding)
    return data + digests.crc32c(np.frombuffer(data, np.uint8)).to_bytes(4, "little")


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "float16", "complex64", "bool"])
@pytest.mark.parametrize(
    "shape", [(1,), (1023, 1), (4092,), (511, 2), (5000, 64), (7, 2, 3), (0, 5)]
)
@pytest.mark.parametrize("place", [np.copy, _aligned])
def test_arrays_match_tensorstore_byte_for_byte(shape, dtype, place, tmp_path):
    values = place(np.random.default_rng(1).integers(0, 100, shape).astype(dtype))
    with mock.patch.object(row_blocks, "CHUNK_BYTES", 100_000):
        entry = row_blocks.array_entry("a", shape, values.dtype)
    files = FileBatch(tmp_path, fsync=False)
    array = ZarrWriter(tmp_path / "ours", entry, files)
    array.write(values)
    nbytes = array.finish()
    files.force()
    _stock(tmp_path / "stock", entry, values)
    assert bytes_below(tmp_path / "ours") == bytes_below(tmp_path / "stock")
    assert nbytes == sum(map(len, bytes_below(tmp_path / "ours").values()))
    assert files.below(tmp_path / "ours", relative_to=tmp_path / "ours") == {
        name: digest._replace(blocks=files.digests[f"ours/{name}"].blocks)
        for name, digest in digests.digest_tree(tmp_path / "stock").items()
    }


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 2000),
    cuts=st.sets(st.integers(0, 2000)),
    chunk_rows=st.integers(100, 700),
    pinned=st.booleans(),
)
def test_threads_share_the_chunks_of_an_array_in_any_pieces(
    tmp_path_factory, rows, cuts, chunk_rows, pinned
):
    folder = tmp_path_factory.mktemp("shared")
    values = np.random.default_rng(rows).standard_normal((rows, 3), np.float32)
    entry = row_blocks.array_entry("a", values.shape, values.dtype, chunk_rows=chunk_rows)
    with Runtime(3) as runtime:
        files = FileBatch(folder, fsync=False, runtime=runtime)
        array = ZarrWriter(folder / "ours", entry, files, pinned=pinned)
        for piece in np.split(values, sorted(cuts)):
            array.write(piece)
        nbytes = array.finish()
        assert not (runtime.memory._lent or files._buffers)
        files.force()
    _stock(folder / "stock", entry, values)
    assert bytes_below(folder / "ours") == bytes_below(folder / "stock")
    assert nbytes == sum(map(len, bytes_below(folder / "ours").values()))


def test_held_rows_are_dropped_after_an_error(tmp_path, monkeypatch):
    def write_chunk(*_, **options):
        raise OutOfSpace("full")

    monkeypatch.setattr(FileBatch, "write_chunk", write_chunk)
    entry = row_blocks.array_entry("a", (8, 64), np.dtype(np.float32), chunk_rows=4)
    files = FileBatch(tmp_path, fsync=False)
    array = ZarrWriter(tmp_path / "ours", entry, files, pinned=True)
    pieces = [np.ones((4, 64), np.float32) for _ in range(2)]
    known = [*map(weakref.ref, pieces)]
    while pieces:
        array.write(pieces.pop(0))
    with pytest.raises(OutOfSpace) as caught:
        array.finish()
    # The traceback has the chunk that failed.
    assert caught.tb and known[1]() is None


@pytest.mark.parametrize("sizes", [[8], [3, 5]])
def test_held_rows_that_change_during_the_write_of_their_chunk_raise(tmp_path, sizes):
    entry = row_blocks.array_entry("a", (8, 64), np.dtype(np.float32))
    pieces = [np.ones((size, 64), np.float32) for size in sizes]

    def change(_: DiskCall) -> None:
        pieces[-1][2] = 2

    with Disk(tmp_path) as disk:
        disk.on("truncate", change, "ours/c")
        array = ZarrWriter(tmp_path / "ours", entry, FileBatch(tmp_path, fsync=False), pinned=True)
        for piece in pieces:
            array.write(piece)
        with pytest.raises(StorageError, match="changed while they were written"):
            array.finish()


def test_two_threads_write_chunks_of_one_array_at_the_same_time(tmp_path, monkeypatch):
    together, real = threading.Barrier(2), FileBatch.write_chunk

    def write_chunk(*arguments, **options):
        together.wait(30)
        real(*arguments, **options)

    monkeypatch.setattr(FileBatch, "write_chunk", write_chunk)
    values = np.ones((8, 64), np.float32)
    entry = row_blocks.array_entry("a", values.shape, values.dtype, chunk_rows=2)
    with Runtime(2) as runtime:
        files = FileBatch(tmp_path, fsync=False, runtime=runtime)
        array = ZarrWriter(tmp_path / "ours", entry, files)
        array.write(values)
        array.finish()
        files.force()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("ends", ["finish", "remove"])
def test_a_finished_or_abandoned_array_keeps_no_memory(tmp_path, compressed, ends):
    entry = row_blocks.array_entry(
        "a", (1600, 64), np.dtype(np.float32), chunk_rows=400, zstd=compressed
    )
    with Runtime(2) as runtime:
        files = FileBatch(tmp_path, fsync=False, runtime=runtime)
        for number in range(3):
            array = ZarrWriter(tmp_path / f"{number}", entry, files)
            rows = np.ones(entry.shape, np.float32)
            for piece in np.split(rows if ends == "finish" else rows[:500], 5):
                array.write(piece)
            getattr(array, ends)()
            assert not runtime.memory._lent
        assert not files._buffers
        files.force()


@pytest.mark.parametrize("fails_at", range(4))
def test_a_failed_write_of_gathered_chunks_is_typed_and_returns_all_memory(
    tmp_path, monkeypatch, fails_at
):
    real, started = FileBatch.write_chunk, list[Path]()

    def write_chunk(files, path, *arguments, **options):
        started.append(path)
        if len(started) > fails_at:
            raise OutOfSpace("full")
        real(files, path, *arguments, **options)

    monkeypatch.setattr(FileBatch, "write_chunk", write_chunk)
    entry = row_blocks.array_entry("a", (1600, 64), np.dtype(np.float32), chunk_rows=400)
    with Runtime(2) as runtime:
        files = FileBatch(tmp_path, fsync=False, runtime=runtime)
        array = ZarrWriter(tmp_path / "ours", entry, files)
        with pytest.raises(OutOfSpace, match="full"):
            for piece in np.split(np.ones(entry.shape, np.float32), 16):
                array.write(piece)
            array.finish()
        files.close()
        memory = runtime.memory
        kept = sum(one.nbytes for one in memory._kept)
        assert memory.nbytes == kept
    assert len(started) <= fails_at + 2


@given(
    nbytes=st.integers(0, 40_000),
    padding=st.integers(0, 20_000),
    offset=st.sampled_from([0, 1, 4096]),
    piece=st.sampled_from([4096, 8192, 1 << 16]),
)
@example(nbytes=0, padding=4093, offset=0, piece=4096)  # The checksum ends in another piece.
def test_any_length_padding_and_place_in_memory(tmp_path_factory, nbytes, padding, offset, piece):
    path = tmp_path_factory.mktemp("any") / "chunk"
    rows = aligned_buffer(nbytes + 8192)[offset : offset + nbytes]
    rows[...] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    with (
        mock.patch.object(batch, "_PIECE_BYTES", piece),
        mock.patch.object(batch, "BLOCK_BYTES", 4096),
    ):
        assert _ours(path, rows, padding) == _chunk(rows, padding)


def test_memory_aligned_by_chance_is_not_taken_for_an_aligned_buffer():
    assert is_aligned(aligned_buffer(10)[:10])
    assert is_aligned(aligned_buffer(10_000)[ALIGNMENT:].view(np.float32))
    assert not is_aligned(aligned_buffer(10)[1:])
    private = np.empty(1 << 20, np.uint8)
    start = -private.ctypes.data % ALIGNMENT
    assert not is_aligned(private[start:])


def _failing(monkeypatch: Any, name: str, fails: Callable[..., int | None]) -> list[Any]:
    real, calls = getattr(os, name), []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if number := fails(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return calls


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_direct_writes_refused_by_the_file(tmp_path, monkeypatch):
    values = np.arange(5000)
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert _ours(tmp_path / "ours", values) == _chunk(values)


@pytest.mark.parametrize("after", [0, 1])
def test_direct_writes_refused_at_a_write(tmp_path, disk, after):
    values = np.arange(3 << 18)
    disk.fail("write", errno=errno.EINVAL, after=after)
    assert _ours(tmp_path / "ours", values) == _chunk(values)


@pytest.mark.parametrize("asks", [8192, 1 << 30])
def test_another_alignment_is_written_through_the_page_cache(tmp_path, monkeypatch, asks):
    real, direct = os.pwrite, []

    def write(descriptor: int, data: Any, at: int) -> int:
        if _is_direct(descriptor):
            if at % asks or len(data) % asks:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            direct.append(at)
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    values = np.arange(5500)
    assert _ours(tmp_path / "ours", values) == _chunk(values)
    assert not direct


@pytest.mark.parametrize("most", [4096, 5000, 8192])
@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_continue(most, direct, tmp_path, monkeypatch):
    values = np.arange(5000)
    real = os.pwrite

    def short(descriptor: int, data: Any, at: int) -> int:
        if not direct and _is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        # A direct write stores whole blocks; its count may include part of the next one.
        taken = real(descriptor, data[: most - most % 4096 if direct else most], at)
        return min(len(data), taken + most % 4096) if direct else taken

    monkeypatch.setattr(os, "pwrite", short)
    assert _ours(tmp_path / "ours", values) == _chunk(values)


@pytest.mark.parametrize("data", [np.arange(5000), b"a few bytes"])
def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path, disk, data):
    files = FileBatch(tmp_path, fsync=True)
    disk.fail("write", errno=errno.ENOSPC)
    with pytest.raises(OutOfSpace, match="ours"):
        if isinstance(data, bytes):
            files.write(tmp_path / "ours", data)
        else:
            files.write_chunk(tmp_path / "ours", data)
    assert not list(tmp_path.iterdir()) and not files.digests
    files.close()


@pytest.mark.parametrize("call", ["fsync", "fstat"])
def test_fsync_errors_name_the_file(call, tmp_path, monkeypatch):
    files = FileBatch(tmp_path, fsync=True)
    files.write_chunk(tmp_path / "ours", np.arange(3))
    # pytest itself calls fstat when a test ends.
    with monkeypatch.context() as patched:
        _failing(patched, call, lambda *_: errno.EIO)
        with pytest.raises(StorageError, match=r"ours.*Input/output"):
            files.force()


def test_an_existing_name_is_refused(tmp_path):
    (tmp_path / "ours").write_bytes(b"another's")
    files = FileBatch(tmp_path, fsync=True)
    for write in (
        lambda path: files.write(path, b"x"),
        lambda path: files.write_chunk(path, np.arange(3)),
    ):
        with pytest.raises(StorageError, match="ours.*exists"):
            write(tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == b"another's"


@pytest.mark.parametrize("fsync", [True, False])
def test_everything_is_fsynced_once_and_directories_after_files(tmp_path, disk, fsync):
    files = FileBatch(tmp_path, fsync=fsync)
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_bytes(b"closed by others")
    files.make(tmp_path / "a" / "b")
    files.write_chunk(tmp_path / "a" / "b" / "chunk", np.arange(9))
    files.write(tmp_path / "a" / "small", b"small")
    assert not disk.paths("fsync")
    assert files.adopt(tmp_path / "others") == 16
    files.force()
    forced = disk.paths("fsync")
    wanted = ["a/b/chunk", "a/small", "others/file"], ["a", "a/b", "others", ""]
    below = [str(Path(path).relative_to(tmp_path)).replace(".", "") for path in forced]
    expected = [{name.replace(".", "") for name in names} for names in wanted]
    assert [set(below[:3]), set(below[3:])] == (expected if fsync else [set(), set()])
    assert len(below) == (7 if fsync else 0)
    found = {name: digest._replace(blocks=b"") for name, digest in files.digests.items()}
    assert found == digests.digest_tree(tmp_path)


def test_removed_files_leave_no_trace(tmp_path):
    files = FileBatch(tmp_path, fsync=True)
    files.make(tmp_path / "a" / "b")
    files.write_chunk(tmp_path / "a" / "b" / "chunk", np.arange(9))
    files.remove(tmp_path / "a")
    assert not files.digests and not list(tmp_path.iterdir())
    assert not open_files(tmp_path)
    files.force()


def test_a_removal_while_others_write(tmp_path):
    """Items of a step are written in parallel, and one may remove a failed attempt."""
    before = sys.getswitchinterval()
    files, over = FileBatch(tmp_path, fsync=False), threading.Event()
    digest = digests.digest_bytes(b"")

    def note() -> None:
        number = 0
        while not over.is_set():
            files._note(tmp_path / "other" / str(number), digest)
            number += 1

    thread = threading.Thread(target=note)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(200):
            files.make(tmp_path / "attempt")
            files.remove(tmp_path / "attempt")
            files.below(tmp_path / "attempt", relative_to=tmp_path)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


_FORKING = """
import os, sys, threading, numpy as np
from pathlib import Path
from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.storage.batch import FileBatch
over = threading.Event()
def fork():
    while not over.is_set():
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
thread = threading.Thread(target=fork); thread.start()
own, files = aligned_buffer(1 << 20), FileBatch(Path(sys.argv[1]), fsync=True)
for n in range(16):
    rows = own if n % 2 else np.empty(1 << 20, np.uint8)
    rows[:] = n
    files.write_chunk(Path(sys.argv[1]) / str(n), rows)
files.force(); over.set(); thread.join()
"""


def test_writes_while_the_process_forks(tmp_path):
    subprocess.run([sys.executable, "-c", _FORKING, str(tmp_path)], check=True, timeout=280)
    for n in range(16):
        assert set((tmp_path / str(n)).read_bytes()[: 1 << 20]) == {n}


def test_descriptors_stay_within_the_budget(tmp_path):
    files = FileBatch(tmp_path, fsync=True, descriptors=3)
    for n in range(10):
        files.write_chunk(tmp_path / str(n), np.arange(3))
        assert len(open_files(tmp_path)) <= 3
    files.close()
    assert not open_files(tmp_path)
