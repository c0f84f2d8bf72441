# SPDX-License-Identifier: Apache-2.0
"""Our writer of chunks: TensorStore's bytes, whatever the file system allows or refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from deltackpt.errors import OutOfSpace, StorageError
from deltackpt.storage import chunks


def _stock(directory: Path, array: np.ndarray) -> bytes:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory}/"},
        "metadata": {
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shape)}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        "store_data_equal_to_fill_value": True,
    }
    if array.itemsize == 1:
        spec["metadata"]["codecs"][0] = {"name": "bytes"}
    ts.open(spec, create=True).result().write(array).result()
    return (directory / "c" / "/".join("0" * array.ndim)).read_bytes()


def _ours(path: Path, array: np.ndarray) -> bytes:
    memory = chunks.Memory(array.nbytes)
    memory.array[: array.nbytes] = array.reshape(-1).view(np.uint8)
    writer = chunks.Writer()
    writer.write(path, memory, array.nbytes)
    writer.force([path.parent])
    return path.read_bytes()


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "float16"])
@pytest.mark.parametrize("shape", [(1,), (1023, 1), (1024,), (4092,), (511, 2), (5000, 64)])
def test_bytes_equal_tensorstores(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    assert _ours(tmp_path / "ours", array) == _stock(tmp_path / "stock", array)


def test_memory_is_used_again_for_shorter_chunks(tmp_path: Path) -> None:
    memory, writer = chunks.Memory(20_000), chunks.Writer(descriptors=2)
    for n in (20_000, 5, 9_999, 0):
        array = np.full(n, n % 251, np.uint8)
        memory.array[:n] = array
        writer.write(tmp_path / str(n), memory, n)
    writer.force()
    for n in (20_000, 5, 9_999):
        array = np.full(n, n % 251, np.uint8)
        assert (tmp_path / str(n)).read_bytes() == _stock(tmp_path / f"stock{n}", array)
    assert (tmp_path / "0").stat().st_size == chunks.CRC_BYTES


def _failing(monkeypatch: Any, name: str, fails: Callable[..., int | None]) -> list[Any]:
    real, calls = getattr(os, name), []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if number := fails(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, name, call)
    return calls


def test_refused_at_open(tmp_path: Path, monkeypatch: Any) -> None:
    array = np.arange(5000)
    expected = _stock(tmp_path / "stock", array)
    _failing(monkeypatch, "open", lambda p, f, *m: errno.EINVAL if f & os.O_DIRECT else None)
    assert _ours(tmp_path / "ours", array) == expected


def test_refused_at_the_first_write(tmp_path: Path, monkeypatch: Any) -> None:
    array = np.arange(5000)
    expected = _stock(tmp_path / "stock", array)
    seen: list[int] = []
    refuse = lambda *_: None if seen else seen.append(1) or errno.EINVAL  # noqa: E731
    _failing(monkeypatch, "pwrite", refuse)
    assert _ours(tmp_path / "ours", array) == expected


@pytest.mark.parametrize("most", [4096, 5000, 8192])
def test_writes_cut_short_go_on(most: int, tmp_path: Path, monkeypatch: Any) -> None:
    array = np.arange(5000)
    expected = _stock(tmp_path / "stock", array)
    real = os.pwrite
    # The kernel would refuse an odd length of a direct write; buffered writes may be cut anywhere.
    cut = most if most % 4096 else None

    def short(descriptor: int, data: Any, at: int) -> int:
        return real(descriptor, data[:most], at)

    if cut:
        _failing(monkeypatch, "open", lambda p, f, *m: errno.EINVAL if f & os.O_DIRECT else None)
    monkeypatch.setattr(os, "pwrite", short)
    assert _ours(tmp_path / "ours", array) == expected


def test_full_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    _failing(monkeypatch, "pwrite", lambda *_: errno.ENOSPC)
    with pytest.raises(OutOfSpace, match="ours"):
        _ours(tmp_path / "ours", np.arange(5000))


@pytest.mark.parametrize("call", ["fsync", "fstat"])
def test_errors_of_forcing_name_the_file(call: str, tmp_path: Path, monkeypatch: Any) -> None:
    memory, writer = chunks.Memory(10), chunks.Writer()
    writer.write(tmp_path / "ours", memory, 10)
    # pytest itself calls fstat when a test ends.
    with monkeypatch.context() as patched:
        _failing(patched, call, lambda *_: errno.EIO)
        with pytest.raises(StorageError, match=r"ours.*Input/output"):
            writer.force()


def test_tmpfs() -> None:
    path = Path(f"/dev/shm/deltackpt-chunks-{os.getpid()}")
    array = np.arange(5000)
    try:
        assert _ours(path, array)[: array.nbytes] == array.tobytes()
    finally:
        path.unlink()


_FORKING = """
import os, sys, threading, numpy as np
from pathlib import Path
from deltackpt.storage import chunks
over = threading.Event()
def fork():
    while not over.is_set():
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
thread = threading.Thread(target=fork); thread.start()
memory, writer = chunks.Memory(1 << 20), chunks.Writer()
for n in range(8):
    memory.array[: 1 << 20] = n
    writer.write(Path(sys.argv[1]) / str(n), memory, 1 << 20)
writer.force(); over.set(); thread.join()
"""


def test_while_the_process_forks(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORKING, str(tmp_path)], check=True, timeout=280)
    for n in range(8):
        assert set((tmp_path / str(n)).read_bytes()[: 1 << 20]) == {n}


def test_descriptors_stay_within_the_budget(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory, writer = chunks.Memory(10), chunks.Writer(descriptors=3)
    for n in range(10):
        writer.write(tmp_path / str(n), memory, 10)
        assert len(os.listdir("/proc/self/fd")) <= before + 3
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before
