# SPDX-License-Identifier: Apache-2.0
"""Layers: all dtypes, rows and codecs are read back, in few ranges."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import google_crc32c
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from machine import open_files
from made_up_layers import (
    RUN,
    Array,
    Memory,
    Rows,
    append,
    contents_of,
    groups_of,
    layers_in,
    manifest_of,
    opened,
    read_all,
    write,
)

from deltackpt.errors import Damaged, OptionError, OutOfSpace, StorageError
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import Ranges, rows_of
from deltackpt.layers import footer
from deltackpt.layers.footer import GAPS, PAGE_BYTES, TRAILER_BYTES, EpochRef, LayerArray, RowGroup
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.layers.write import REMOVED, LayerFile, LayerShard, WrittenLayer
from deltackpt.resources import runtime as runtimes
from deltackpt.resources.host_memory import aligned_buffer
from deltackpt.resources.runtime import Pace, Runtime
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.posix import DirectFile
from deltackpt.storage.store import StorePath, store_path

GOLDEN = Path(__file__).parent / "golden"
DTYPES = ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "complex64")
TRAILINGS = ((), (3,), (256,), (2, 5), (0,), (11, 3))
FAST = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Layer(NamedTuple):
    """An open layer, what is read of it, and its only row group."""

    reader: LayerReader
    source: Memory
    group: RowGroup
    arrays: dict[str, LayerArray]


def layer_of(path: Path, groups: Sequence[Rows], **options) -> Layer:
    """Writes a layer of row groups and opens its bytes; ``group`` is the first."""
    write(path, [(manifest_of(), groups)], **options)
    source = Memory(path.read_bytes())
    reader = LayerReader(source, len(source.data))
    group = reader.manifest.row_groups[0]
    return Layer(reader, source, group, reader.arrays(group))


@contextlib.contextmanager
def layer_file(path: Path, **options) -> Iterator[LayerFile]:
    runtime = Runtime()
    file = LayerFile(DirectFile(path), runtime, **options)
    try:
        yield file
    finally:
        file.file.close()
        runtime.close()


def finished(layer, *groups: Rows) -> WrittenLayer:
    described = tuple(group.described for group in groups)
    return layer.finish(manifest_of(row_groups=described))


def assert_holds(path: Path, written: WrittenLayer, groups: Sequence[Rows]) -> None:
    """Checks the checksum, chunks and contents of a file of one layer."""
    data = path.read_bytes()
    assert google_crc32c.value(data[:-4]) == written.crc32c
    found = opened(data)
    found.verify()
    assert {name: held for name, held in read_all(found).items() if name != REMOVED} == (
        contents_of(groups)
    )


CHUNK_BYTES = st.sampled_from([1, 512, 128 << 10])
BUFFER_BYTES = st.sampled_from([8192, 40_000, 1 << 20])


@st.composite
def row_groups(draw, name: str) -> list[Rows]:
    """A row group, or the same rows split by columns."""
    count = draw(st.sampled_from([0, 1, 2, 50, 900]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["range", "ranges", "dense", "sparse", "huge"]))
    if kind == "range":
        start = draw(st.sampled_from([0, 7, 1 << 40]))
        rows = range(start, start + count)
    elif kind == "ranges":
        rows = rows_of([(3, 3 + count), (count + 10, 2 * count + 11)])
    else:
        most = {"dense": 2, "sparse": 70_000, "huge": (1 << 62) // (count + 1)}[kind]
        rows = np.cumsum(random.integers(1, most + 1, count))
    arrays = []
    for number in range(draw(st.integers(0, 3))):
        dtype, trailing = np.dtype(draw(st.sampled_from(DTYPES))), draw(st.sampled_from(TRAILINGS))
        few = draw(st.booleans())  # Few distinct values compress.
        # A codec stores only some rows uncompressed.
        length = len(rows) if draw(st.booleans()) else len(rows) // 3
        shape = (length, *trailing)
        values = random.integers(0, 3 if few else 100, shape).astype(dtype)
        compression = draw(st.sampled_from(["", "zstd", "planes"]))
        arrays.append(Array(f"a{number}", values, compression))
    codecs = {one.name: one.compression for one in arrays}
    whole = Rows(name, "users", rows, arrays, codecs=codecs)
    wide = [one for one in arrays if one.data.shape[1:] == (3,)]
    if not wide:
        return [whole]
    left = [Array(one.name, one.data[:, :2]) for one in wide]
    right = [Array(one.name, one.data[:, 2:], one.compression) for one in wide]
    return [
        Rows(f"{name}.0", "users", rows, left, columns=(0, 2)),
        Rows(f"{name}.1", "users", rows, right, columns=(2, 3)),
    ]


@FAST
@given(data=st.data())
def test_written_layers_are_read_back(tmp_path_factory, data):
    layers = []
    for number in range(data.draw(st.integers(1, 3))):
        groups = [
            group
            for name in "ab"[: data.draw(st.integers(0, 2))]
            for group in data.draw(row_groups(name))
        ]
        layers.append((manifest_of(number + 1, process=number % 2, process_count=2), groups))
    path = tmp_path_factory.mktemp("layers") / "layers"
    chunk_bytes, buffer_bytes = data.draw(CHUNK_BYTES), data.draw(BUFFER_BYTES)
    written = write(path, layers, buffer_bytes=buffer_bytes, chunk_bytes=chunk_bytes, fsync=False)
    data_of = path.read_bytes()
    found = layers_in(StoredBytes(store_path(path)), data_of)
    assert [(one.start, one.start + one.nbytes, one.digest) for one in found] == [
        one[:3] for one in written
    ]
    assert [google_crc32c.value(data_of[one.start : one.stop - 4]) for one in written] == [
        one.crc32c for one in written
    ]
    for number, (layer, (manifest, groups)) in enumerate(zip(found, layers, strict=True)):
        layer.verify()
        assert (layer.manifest.save_id, layer.manifest.parent) == (
            manifest.save_id,
            manifest.parent,
        )
        assert layer.manifest.sequence == number
        assert read_all(layer) == contents_of(groups)
        for group, own in zip(groups, layer.manifest.row_groups, strict=True):
            described = (own.name, own.group, own.kind, own.columns, own.codecs)
            assert described == (group.name, group.group, group.kind, group.columns, group.codecs)


@FAST
@given(data=st.data())
def test_a_range_of_an_array_equals_that_part_of_the_whole_array(tmp_path_factory, data):
    (group, *_) = data.draw(row_groups("a"))
    path = tmp_path_factory.mktemp("layers") / "layer"
    layer = layer_of(path, [group], chunk_bytes=data.draw(st.sampled_from([1, 700])))
    rows, arrays = contents_of([group])["a" if group.columns is None else "a.0"]
    for name, array in layer.arrays.items():
        start = data.draw(st.integers(0, array.shape[0]))
        stop = data.draw(st.integers(start, array.shape[0]))
        out = np.empty((stop - start, *array.shape[1:]), array.dtype)
        layer.reader.read_into(array, start, stop, out)
        if name != GAPS:
            whole = np.frombuffer(arrays[name], array.dtype).reshape(array.shape)
            assert out.tobytes() == whole[start:stop].tobytes()
    near = st.integers(-2, 2).flatmap(lambda by: st.sampled_from([0, *rows]).map(by.__add__))
    first, stop = max(0, data.draw(near)), max(0, data.draw(near))
    held, position = layer.reader.rows(layer.group, first, stop)
    expected = [row for row in rows if first <= row < stop]
    assert np.asarray(held).tolist() == expected
    assert position == sum(row < first for row in rows) or not expected


def aligned(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows in memory that can be written directly, (count, width) float32."""
    out = aligned_buffer(4 * count * width)[: 4 * count * width].view(np.float32)
    out[:] = np.random.default_rng(seed).standard_normal(len(out), np.float32)
    return out.reshape(count, width)


@st.composite
def long_groups(draw) -> list[Rows]:
    """Row groups whose arrays can be written from their memory."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        width = draw(st.sampled_from([1, 6, 16, 100]))
        rows = aligned(draw(st.integers(1, 700_000 // width)), width, number)
        found.append(Rows(f"g{number}", f"g{number}", range(len(rows)), [Array("v", rows)]))
    return found


@pytest.mark.parametrize("are_long", [False, True])
@FAST
@given(data=st.data())
def test_several_threads_write_arrays_of_a_layer_in_pieces(tmp_path_factory, are_long, data):
    if are_long:
        groups = data.draw(long_groups())
        chunk_bytes = data.draw(st.sampled_from([1024, 4096, 10_000, 128 << 10]))
        buffer_bytes = data.draw(st.sampled_from([8192, 40_000, 2 << 20]))
    else:
        found = [one for one in data.draw(row_groups("a")) if one.columns is None]
        groups = found or groups_of()[:1]
        chunk_bytes, buffer_bytes = data.draw(CHUNK_BYTES), data.draw(BUFFER_BYTES)
    path = tmp_path_factory.mktemp("layers") / "layer"
    arrays = []
    for group in groups:
        for one in group.arrays:
            cuts = st.sampled_from([0, 5, 1 << 14]) if are_long else st.integers(0, len(one.data))
            pieces = np.split(one.data, sorted(data.draw(st.sets(cuts))))
            arrays.append((group, one, pieces))
    removed = data.draw(st.sets(st.sampled_from([one.name for _, one, _ in arrays] or [""])))

    def write_array(group: Rows, one: Array, pieces: list[np.ndarray]) -> None:
        arguments = (group.name, one.name, one.data.shape, one.data.dtype, one.compression)
        if one.name in removed:
            writer = layer.array(*arguments)
            writer.write(pieces[0].copy())
            writer.remove()
        writer = layer.array(*arguments)
        for piece in pieces:
            writer.write(piece if are_long else piece.copy())
        writer.finish()

    with layer_file(path, fsync=False, chunk_bytes=chunk_bytes, buffer_bytes=buffer_bytes) as file:
        layer = file.start_layer(manifest_of())
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(layer.write_rows, group.name, group.rows) for group in groups]
            jobs += [pool.submit(write_array, *one) for one in arrays]
            for job in jobs:
                job.result()
        written = finished(layer, *groups)
    assert_holds(path, written, groups)


def test_rows_of_another_shape_are_refused(tmp_path):
    with layer_file(tmp_path / "layer") as file:
        layer = file.start_layer(manifest_of())
        for shape in ((10, 3), (10, 1), (10, 8)):
            writer = layer.array("t", "v", (10, 4), np.dtype(np.float32))
            with pytest.raises(ValueError, match="reshape"):
                writer.write(np.zeros(shape, np.float32))
        layer.abandon()


@pytest.mark.parametrize("width", [64, 100])
def test_a_long_array_is_written_from_its_memory_by_two_threads(tmp_path, monkeypatch, width):
    rows, together, taken = aligned(40_000, width), threading.Barrier(2), []
    group = Rows("t", "t", range(len(rows)), [Array("v", rows)])
    with layer_file(tmp_path / "layer") as file:
        real = file.file.write

        def write(start, data):
            piece = (data.ctypes.data - rows.ctypes.data, len(data))
            taken.append(piece)
            if taken.index(piece) < 2:
                together.wait(30)
            real(start, data)

        monkeypatch.setattr(file.file, "write", write)
        layer = file.start_layer(manifest_of())
        writer = layer.array("t", "v", rows.shape, rows.dtype)
        writer.write(rows)
        pieces = sorted(taken)
        assert pieces[0][0] == 0
        for (start, count), (next_, _) in itertools.pairwise(pieces):
            assert start + count == next_
        assert rows.nbytes - sum(count for _, count in pieces) < 128 << 10
        writer.finish()
        written = finished(layer, group)
    assert_holds(tmp_path / "layer", written, [group])


@pytest.mark.parametrize("changes", [{2}, {2, 6}], ids=["once", "and back"])
@pytest.mark.parametrize("sizes", [[20_000], [100, 19_900]])
def test_rows_that_change_during_a_write_raise(tmp_path, monkeypatch, sizes, changes):
    rows = np.ones((20_000, 2), np.float32)
    with layer_file(tmp_path / "layer", chunk_bytes=4096, buffer_bytes=16 << 10) as file:
        layer, real = file.start_layer(manifest_of()), file.file.write
        writes = itertools.count(1)

        def changing(*arguments):
            real(*arguments)
            if next(writes) in changes:
                rows[:] = -rows

        monkeypatch.setattr(file.file, "write", changing)
        writer = layer.array("t", "values", rows.shape, rows.dtype, check=True)
        with pytest.raises(StorageError, match="the arrays changed while they were written"):
            for piece in np.split(rows, np.cumsum(sizes)[:-1]):
                writer.write(piece)
        layer.abandon()


def test_the_footer_of_another_layer_is_rejected_before_it_is_read(tmp_path):
    layer = layer_of(tmp_path / "layer", groups_of())
    digest, source = layer.reader.digest, layer.source
    assert LayerReader(source, len(source.data), digest=digest).digest == digest
    with pytest.raises(Damaged, match=f"footer: expected crc32c {digest ^ 1:08x}"):
        LayerReader(source, len(source.data), digest=digest ^ 1)


def test_a_footer_that_claims_to_be_huge_is_damage(tmp_path):
    """A sparse file of any length costs nothing."""
    path, nbytes = tmp_path / "layer", 1 << 42
    write(path, [(manifest_of(), groups_of())])
    tail, end = bytearray(path.read_bytes()[-TRAILER_BYTES:]), nbytes - PAGE_BYTES - TRAILER_BYTES
    fixed = footer._TRAILER.pack(footer._TRAILER_MAGIC, footer.VERSION, nbytes, PAGE_BYTES, end)
    tail[: len(fixed)] = fixed
    with open(path, "r+b") as out:
        out.seek(nbytes - len(tail))
        out.write(tail)
    with pytest.raises(Damaged, match="footer: expected at most"):
        LayerReader(StoredBytes(store_path(path)), nbytes)


@pytest.mark.parametrize("version", sorted(GOLDEN.glob("layers-v*")), ids=lambda path: path.name)
def test_golden_layers_are_read(version):
    expected = json.loads((version / "expected.json").read_text())
    step, wal = version / "step", version / "wal"
    layers = [LayerReader(StoredBytes(store_path(step)), step.stat().st_size)]
    layers += layers_in(StoredBytes(store_path(wal)), wal.read_bytes())
    assert [str(layer.manifest.save_id.step) for layer in layers] == [*expected]
    for layer in layers:
        layer.verify()
        known = expected[str(layer.manifest.save_id.step)]
        assert (layer.start, layer.digest) == (known.pop("start"), known.pop("digest"))
        step = layer.manifest.save_id.step
        rows = [each + step for each in (3, 4, 260, 70_000, 70_001)]
        item = b'{"step": %d}' % step
        numbers = {
            "users.0": rows,
            "users.1": rows,
            "users.count": [*range(3000)],
            "float32": [1, 2, 9],
            "metrics": [*range(len(item))],
        }
        found = read_all(layer)
        assert {name: held[0] for name, held in found.items()} == numbers
        assert found["metrics"][1]["bytes"] == item
        is_step = known.pop("file") == "step"
        assert layer.manifest.epoch == (None if is_step else EpochRef(number=2, crc32c=0x01020304))
        assert layer.manifest.schema == (b"schema" if is_step else b"")
        assert known == {
            name: {array: hashlib.sha256(data).hexdigest() for array, data in arrays.items()}
            for name, (_, arrays) in found.items()
        }


@pytest.fixture
def big(tmp_path) -> tuple[Layer, np.ndarray, np.ndarray]:
    """A layer of 4,000 rows of 64 float32 with a slot, among 100,000; the rows and the values."""
    rows = np.unique(np.random.default_rng(0).integers(0, 100_000, 4000))
    values = np.random.default_rng(1).standard_normal((len(rows), 64), np.float32)
    arrays = [Array("values", values), Array("slot.m", values * 2)]
    return layer_of(tmp_path / "layer", [Rows("users", "users", rows, arrays)]), rows, values


def test_one_row_with_its_slot_needs_four_ranges(big):
    (reader, source, group, arrays), rows, values = big
    assert len(source.ranges) == 1
    wanted, out = int(rows[1234]), np.empty((1, 64), np.float32)
    held, position = reader.rows(group, wanted, wanted + 1)
    assert (position, np.asarray(held).tolist()) == (1234, [wanted])
    for name, factor in (("values", 1), ("slot.m", 2)):
        reader.read_into(arrays[name], position, position + 1, out)
        assert np.array_equal(out[0], values[1234] * factor)
    assert len(source.ranges) == 4
    assert sum(nbytes for _, nbytes in source.ranges) < 310_000


def test_layers_are_read_by_ranges_of_an_object_store(big):
    data, store = big[0].source.data, KvStore({"driver": "memory"}, "memory:")
    store.put("3/layer.0", data)
    # The layer may be part of a bundle.
    store.put("bundle", bytes(100) + data + bytes(100))
    for name, start in (("3/layer.0", 0), ("bundle", 100)):
        layer = LayerReader(StoredBytes(StorePath(store, name)), len(data), start=start)
        layer.verify()
        out = np.empty((2, 64), np.float32)
        layer.read_into(layer.arrays(layer.manifest.row_groups[0])["values"], 7, 9, out)
        assert np.array_equal(out, big[2][7:9])


def test_a_missing_row_needs_only_the_chunk_of_row_indices_around_it(tmp_path):
    group = Rows("t", "t", np.arange(0, 40_000, 2), [])
    layer = layer_of(tmp_path / "layer", [group], chunk_bytes=4096)
    ranges = layer.source.ranges
    ranges.clear()
    assert len(layer.reader.rows(layer.group, 20_001, 20_002).rows) == 0
    assert [nbytes for _, nbytes in ranges] == [4096]
    ranges.clear()
    assert len(layer.reader.rows(layer.group, 50_000, 60_000).rows) == 0 and ranges == []


def test_a_whole_array_is_one_range_and_no_other_byte_is_read(big):
    (reader, source, _, arrays), rows, values = big
    source.ranges.clear()
    out = np.empty_like(values)
    reader.read_into(arrays["slot.m"], 0, len(rows), out)
    assert np.array_equal(out, values * 2)
    ((start, nbytes),) = source.ranges
    # The array begins at a page, after some padding.
    assert (start + nbytes - out.nbytes) % PAGE_BYTES == 0
    assert nbytes < out.nbytes + PAGE_BYTES


def test_whole_chunks_are_read_into_the_target_without_a_copy(big):
    (reader, source, _, arrays), rows, values = big
    out = np.empty_like(values)
    with mock.patch.object(source, "read_into", side_effect=source.read_into) as read:
        reader.read_into(arrays["values"], 0, len(rows), out)
    targets = itertools.chain.from_iterable(call.args[1] for call in read.call_args_list)
    inside = sum(
        one.nbytes
        for one in targets
        if 0 <= np.frombuffer(one, np.uint8).ctypes.data - out.ctypes.data < out.nbytes
    )
    assert inside == out.nbytes


@pytest.mark.parametrize(
    "out",
    [np.empty((3, 2), np.float64), np.empty((2, 2), np.float32), np.empty((2, 3), np.float32).T],
)
def test_a_target_that_does_not_fit_is_rejected(tmp_path, out):
    group = Rows("t", "t", range(3), [Array("values", np.ones((3, 2), np.float32))])
    layer = layer_of(tmp_path / "layer", [group])
    for start, stop, target in ((0, 3, out), (2, 4, np.empty((2, 2), np.float32))):
        with pytest.raises(OptionError, match="array 'values'"):
            layer.reader.read_into(layer.arrays["values"], start, stop, target)


@pytest.mark.parametrize("rows", [[3, 2], [1, 1], [-1, 4]])
def test_rows_that_do_not_ascend_are_not_written(tmp_path, rows):
    group = Rows("t", "t", np.array(rows), [])
    with pytest.raises(OptionError, match="row group 't'"):
        write(tmp_path / "layer", [(manifest_of(), [group])])


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Writes by their offset, and flushes, in order."""
    found: list[str] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: found.append(f"write {at}") or pwrite(fd, data, at)
    )
    monkeypatch.setattr(os, "fdatasync", lambda fd: found.append("flush") or fdatasync(fd))
    return found


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3]])
def test_each_small_layer_is_one_write_and_all_are_flushed_once(tmp_path, calls, numbers):
    layers = [(manifest_of(number), groups_of(number)) for number in numbers]
    starts = [one.start for one in write(tmp_path / "layers", layers)]
    assert calls == [*(f"write {start}" for start in starts), "flush"] and starts[0] == 0


def test_the_header_of_a_long_layer_is_written_last(tmp_path, calls):
    layer = layer_of(tmp_path / "layer", groups_of(count=5000), buffer_bytes=16_384)
    assert len(calls) > 5
    assert [calls[0], *calls[-2:]] == ["write 0", "write 0", "flush"]
    layer.reader.verify()


def test_layers_are_gathered_while_others_are_written(tmp_path, monkeypatch):
    writing, gathered, pwrite = threading.Event(), threading.Event(), os.pwrite

    def slow(*arguments):
        writing.set()
        assert gathered.wait(30)
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", slow)
    rows = np.arange(16_000).reshape(4000, 4)
    group = Rows("t", "t", range(4000), [Array("v", rows)])
    with layer_file(tmp_path / "layer", chunk_bytes=4096, buffer_bytes=100_000) as file:
        layer = file.start_layer(manifest_of())
        writer = layer.array("t", "v", rows.shape, rows.dtype)
        writer.write(rows[:3900])
        assert writing.wait(30)
        gathered.set()
        writer.write(rows[3900:])
        writer.finish()
        written = finished(layer, group)
    assert_holds(tmp_path / "layer", written, [group])


def test_a_file_system_may_refuse_direct_writes(tmp_path, monkeypatch):
    refused, pwrite = [], os.pwrite

    def refuse(descriptor, data, start):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "no direct writes")
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", refuse)
    layers = [(manifest_of(number), groups_of(number)) for number in (1, 2)]
    path = tmp_path / "layers"
    write(path, layers, buffer_bytes=8192)
    assert 0 < len(refused) <= 3  # Several threads may find it out at once.
    found = layers_in(StoredBytes(store_path(path)), path.read_bytes())
    assert [read_all(one) for one in found] == [contents_of(groups) for _, groups in layers]


@pytest.mark.parametrize("buffer_bytes", [8192, 1 << 20])
def test_a_full_disk_is_a_typed_error_and_nothing_more_is_written(tmp_path, buffer_bytes):
    with layer_file(tmp_path / "layers", buffer_bytes=buffer_bytes) as file:
        append(file, manifest_of(1), groups_of(1))
        file.sync()
        with mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "full")):
            with pytest.raises(OutOfSpace, match="layers"):
                append(file, manifest_of(2), groups_of(2))
        for call in (file.sync, lambda: append(file, manifest_of(2), groups_of(2))):
            with pytest.raises(StorageError, match="begin another"):
                call()
        file.file.close()
        # The runtime is still usable.
        other = LayerFile(DirectFile(tmp_path / "other"), file._runtime, buffer_bytes=buffer_bytes)
        append(other, manifest_of(1), groups_of(1))
        other.file.close()
    data = (tmp_path / "layers").read_bytes()
    (found,) = layers_in(Memory(data), data)
    assert read_all(found) == contents_of(groups_of(1))


def test_a_failed_flush_is_not_repeated(tmp_path):
    with layer_file(tmp_path / "layer") as file:
        append(file, manifest_of(), [])
        with mock.patch("os.fdatasync", side_effect=OSError(errno.EIO, "lost")):
            with pytest.raises(StorageError, match="force to disk"):
                file.sync()
        with pytest.raises(StorageError, match="begin another"):
            file.sync()


def test_writes_respect_the_pace(tmp_path):
    taken = []

    class Watched(Pace):
        def acquire(self, nbytes, stopped=None):
            taken.append(nbytes)

    write(tmp_path / "layer", [(manifest_of(), groups_of())], buffer_bytes=8192, pace=Watched())
    assert sum(taken) == (tmp_path / "layer").stat().st_size + PAGE_BYTES


def test_equal_saves_have_equal_bytes_and_others_have_other_checksums(tmp_path):
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        write(tmp_path / name, [(manifest_of(number), groups_of(1))])
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    one, other = opened(a).manifest, opened(c).manifest
    assert one.row_groups == other.row_groups
    assert {array.chunks for array in one.arrays}.isdisjoint(array.chunks for array in other.arrays)


FORKED = """
import os, numpy as np
from deltackpt.resources.host_memory import aligned_buffer
held = aligned_buffer(9 << 20)
held[:] = 7
child = os.fork()
if not child:
    wiped = not held.any()
    held[:] = 1
    del held
    os._exit(0 if wiped else 1)
assert os.waitpid(child, 0)[1] == 0
assert (held == 7).all() and held.ctypes.data % 4096 == 0
"""


def test_forked_children_may_touch_and_free_write_memory():
    subprocess.run([sys.executable, "-c", FORKED], check=True)


def test_ranges_of_rows_are_stored_as_ranges(tmp_path):
    rows = rows_of([(0, 4), (9, 12)])
    assert isinstance(rows, Ranges)
    values = np.arange(7, dtype=np.int16)
    layer = layer_of(tmp_path / "layer", [Rows("t", "t", rows, [Array("values", values)])])
    assert layer.group.ranges == ((0, 4), (9, 12)) and [*layer.arrays] == ["values"]
    held, position = layer.reader.rows(layer.group, 3, 11)
    assert (position, np.asarray(held).tolist()) == (3, [3, 9, 10])
    assert layer.reader.manifest.save_id == SaveId(RUN, 1, 1)


def test_a_shard_that_cannot_begin_leaves_no_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes, "aligned_buffer", mock.Mock(side_effect=MemoryError("no memory")))
    batch, save_id = FileBatch(tmp_path, fsync=True), SaveId(RUN, 1, 1)
    with Runtime() as runtime:
        with pytest.raises(MemoryError):
            LayerShard(tmp_path, save_id, None, batch, runtime, process=0, process_count=1)
        assert not open_files(tmp_path)
