# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of any saves equal a model in memory, also if leaves were added or reordered."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_layers import Array, Rows, manifest_of, write

from deltackpt.errors import Damaged
from deltackpt.format import row_blocks
from deltackpt.format.dtypes import dtype_of, stored_dtype
from deltackpt.format.records import InvalidRecord
from deltackpt.format.row_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    SEGMENTS,
    BlockedValue,
    DenseBlocks,
    Key,
    rows_of,
)
from deltackpt.layers import block_pieces, row_indices, targets
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.reading import stored_dense
from deltackpt.reading.shard_arrays import LayerArrays
from deltackpt.reading.stored_dense import DensePlan, DenseShard, DenseValues
from deltackpt.reading.wal_records import segment_of
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.store import store_path

DTYPES = ("uint16", "float32", "bfloat16")
CODECS = ("raw", "planes", "xor", "sparse")
#: Key to dtype and number of elements; some are plain.
LEAVES = {
    "a": ("uint16", 700),
    "b": ("uint16", 256),
    "c": ("float32", 1000),
    "d": ("float32", 300),
    "e": ("uint8", 5),
    "f": ("uint16", 3000),
    "g": ("bfloat16", 600),
}
#: Key to its bits: (blocks, 256) unsigned; a plain one (n,) uint8.
State = dict[str, np.ndarray]


def is_plain(key: str) -> bool:
    return LEAVES[key][0] == "uint8"


def bits_of(dtype: str) -> np.dtype:
    return np.dtype(f"u{dtype_of(dtype).itemsize}")


def new_leaf(key: str, rng: np.random.Generator) -> np.ndarray:
    dtype, count = LEAVES[key]
    if is_plain(key):
        return rng.integers(0, 256, count, np.uint8)
    held = np.zeros((row_blocks.blocks_of(count), BLOCK), bits_of(dtype))
    held.reshape(-1)[:count] = rng.integers(0, 1 << 16, count)
    return held


def arrays_of(dtype: str, codec: str, now: np.ndarray, before: np.ndarray) -> list[Array]:
    """The stored arrays of some blocks."""
    if codec == "raw":
        return [Array(BLOCKS, now.view(stored_dtype(dtype_of(dtype))))]
    if codec in ("planes", "xor"):
        bits = now if codec == "planes" else now ^ before
        return [Array(BLOCKS, bits.reshape(-1).view(np.uint8).reshape(*now.shape, -1), "planes")]
    changed = now ^ before
    row, at = np.nonzero(changed)
    counts = np.bincount(row, minlength=len(now)).astype(np.uint16)
    return [
        Array(f"{BLOCKS}.count", counts, "zstd"),
        Array(f"{BLOCKS}.at", at.astype(np.uint8), "zstd"),
        Array(BLOCKS, changed[row, at], "zstd"),
    ]


class Run:
    """A run of saves with a model of its dense leaves."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.rng = folder, np.random.default_rng(seed)
        #: The newest state; the one below all saves; the saves, newest first.
        self.state: State = {}
        self.below: State = {}
        self.saves: list[list[DenseShard]] = []

    def start(self, keys: list[str]) -> None:
        self.state = {key: new_leaf(key, self.rng) for key in keys}
        self.below = {key: data.copy() for key, data in self.state.items()}

    def save(self, keys: list[str], processes: int, codecs: tuple[str, ...], share: float) -> None:
        """Changes leaves, and writes what changed in one layer for each process."""
        before = self.state
        self.state = {
            key: before[key].copy() if key in before else new_leaf(key, self.rng) for key in keys
        }
        owned: list[list[str]] = [[] for _ in range(processes)]
        for key in keys:
            owned[int(self.rng.integers(processes))].append(key)
        written = [self._shard(own, before, codecs, share, n) for n, own in enumerate(owned)]
        self.saves.insert(0, written)

    def _shard(
        self, keys: list[str], before: State, codecs: tuple[str, ...], share: float, process: int
    ) -> DenseShard:
        values, plain, groups = [], [], []
        ends = dict.fromkeys(DTYPES, 0)
        #: Dtype and codec to rows of the group, and the bits now and before.
        found: dict[tuple[str, str], list[tuple[int, np.ndarray, np.ndarray]]] = {}
        for key in keys:
            dtype, count = LEAVES[key]
            if is_plain(key):
                at = None
                if key not in before or self.rng.random() < share:
                    self.state[key] = new_leaf(key, self.rng)
                    at = sum(map(len, plain))
                    plain.append(self.state[key])
                values.append(BlockedValue(key=key, dtype="uint8", count=count, group=PLAIN, at=at))
                continue
            data, at = self.state[key], ends[dtype]
            ends[dtype] += len(data)
            values.append(BlockedValue(key=key, dtype=dtype, count=count, group=dtype, at=at))
            for row in range(len(data)):
                if key in before and self.rng.random() > share:
                    continue
                codec = codecs[self.rng.integers(len(codecs))] if key in before else "raw"
                old = data[row].copy()
                last = min(BLOCK, count - row * BLOCK)
                data[row, self.rng.integers(0, last, 20)] ^= 5
                found.setdefault((dtype, codec), []).append((at + row, data[row], old))
        for (dtype, codec), pieces in found.items():
            rows, now, old = map(np.array, zip(*pieces, strict=True))
            spans = rows_of((int(row), int(row) + 1) for row in rows)
            if isinstance(spans, range) and self.rng.random() < 0.5:
                rows = spans
            name, arrays = f"{SEGMENTS}{dtype}.{codec}", arrays_of(dtype, codec, now, old)
            groups.append(Rows(name, dtype, rows, arrays, "blocks", (0, BLOCK), {BLOCKS: codec}))
        if plain:
            data = np.concatenate(plain)
            array = Array(row_blocks.PLAIN_BYTES_OF, data)
            name = f"{SEGMENTS}{PLAIN}"
            groups.append(Rows(name, PLAIN, range(len(data)), [array], "item", (0, 1)))
        path = self.folder / f"layer.{len(self.saves)}.{process}"
        [written] = write(path, [(manifest_of(), groups)], fsync=False, chunk_bytes=1024)
        layer = LayerReader(StoredBytes(store_path(path)), written.stop)
        segments = tuple(
            segment_of(group, layer.arrays(group).values()) for group in layer.manifest.row_groups
        )
        record = DenseBlocks(values=tuple(values), segments=segments)
        row_blocks.check(record)
        return DenseShard(LayerArrays(layer.at, name=path.name, file=""), record, path.name)


class Below:
    """The state below the saves, as a base."""

    def __init__(self, state: State):
        self._held = {key: bytes_of(key, data) for key, data in state.items()}

    def nbytes(self, key: Key) -> int | None:
        return len(self._held[key[1]]) if key[1] in self._held else None

    def fill(self, into, on_filled=None) -> int:
        def fill(key: Key) -> None:
            out = into[key]
            if self.nbytes(key) != len(out):
                raise Damaged("base", key[1], "none")
            out[:] = np.frombuffer(self._held[key[1]], np.uint8)
            if on_filled is not None:
                for start in range(0, len(out), 1 << 20):
                    on_filled(key, start, min(start + (1 << 20), len(out)))

        with Runtime(3) as runtime:
            runtime.map(fill, into)
        return sum(map(len, into.values()))


def bytes_of(key: str, data: np.ndarray) -> bytes:
    return data.reshape(-1)[: LEAVES[key][1]].tobytes()


@st.composite
def runs(draw) -> list[tuple[list[str], int, tuple[str, ...], float]]:
    keys = st.permutations([*LEAVES]).flatmap(lambda all: st.integers(1, 6).map(lambda n: all[:n]))
    same = draw(keys) if draw(st.booleans()) else None
    saves = []
    for _ in range(draw(st.integers(1, 4))):
        codecs = draw(st.lists(st.sampled_from(CODECS), min_size=1, max_size=4, unique=True))
        share = draw(st.sampled_from([0.0, 0.2, 1.0]))
        saves.append((same or draw(keys), draw(st.integers(1, 2)), tuple(codecs), share))
    return saves


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    saves=runs(),
    seed=st.integers(0, 1 << 30),
    checked=st.sampled_from([0, 64 << 20]),
    chain=st.sampled_from([1, 2000, 4 << 20]),
    window=st.sampled_from([1, 300, 3000, 1 << 20]),
    small=st.sampled_from([0, 1 << 20]),
)
def test_any_saves_restore_the_values_of_the_model(
    tmp_path_factory, data, saves, seed, checked, chain, window, small
):
    with (
        mock.patch.object(stored_dense, "_SMALL_BYTES", checked),
        mock.patch.object(stored_dense, "_SMALL_LEAF_BYTES", small),
        mock.patch.object(row_indices, "MANY_ROWS", small),
        mock.patch.object(stored_dense, "_CHAIN_BYTES", chain),
        mock.patch.object(block_pieces, "_WINDOW_BYTES", window),
    ):
        run = Run(tmp_path_factory.mktemp("layers"), seed)
        run.start([*saves[0][0], *data.draw(st.sets(st.sampled_from([*LEAVES])))])
        for save in saves:
            run.save(*save)
        check_model(run, data.draw(st.sets(st.sampled_from([*run.state])) | st.just({*run.state})))


def check_model(run: Run, wanted: set[str]) -> None:
    found = stored_dense.values_of(run.saves, Below(run.below), "newest", wanted.__contains__)
    assert {key: bytes(value) for key, value in found.values.items()} == {
        key: bytes_of(key, run.state[key]) for key in wanted
    }
    # The same from a state in memory, which is not written, and is shared if nothing changes.
    below = {key: bytearray(bytes_of(key, data)) for key, data in run.below.items()}
    before = DenseValues({key: memoryview(data) for key, data in below.items()}, {})
    again = stored_dense.values_of(run.saves, before, "newest", wanted.__contains__)
    assert again.values == found.values
    assert below == {key: bytes_of(key, data) for key, data in run.below.items()}
    needed = plan(*run.saves)
    for key in wanted:
        shared = again.values[key] is before.values.get(key)
        assert shared == ((False, key) in needed.missing.keys() - needed.changed)


@pytest.fixture
def run(tmp_path) -> Run:
    """A run without saves."""
    return Run(tmp_path, 1)


def saved(run: Run, key: str, *codecs: str) -> DenseShard:
    """The only shard of a save that changes all of a leaf."""
    run.start([key])
    run.save([key], 1, codecs, 1.0)
    [shard] = run.saves[0]
    return shard


def altered(shard: DenseShard, **fields) -> DenseShard:
    return dataclasses.replace(shard, record=dataclasses.replace(shard.record, **fields))


def plan(*saves: list[DenseShard]) -> DensePlan:
    return DensePlan([*saves], "newest", lambda key: True)


def test_a_base_is_needed_only_for_values_that_the_saves_do_not_complete(run):
    run.start(["a", "c", "e"])
    for codec in ("raw", "sparse"):
        run.save(["a", "c", "e"], 1, (codec,), 1.0)
    assert plan(*run.saves).missing == {}
    assert {key for _, key in plan(run.saves[0]).missing} == {"a", "c"}
    with pytest.raises(Damaged, match="dense leaves down to a base"):
        stored_dense.values_of(run.saves[:1], None, "newest")


def test_a_value_of_another_kind_is_damage(run):
    shard = saved(run, "a", "sparse")
    [value] = shard.record.values
    longer = dataclasses.replace(value, count=value.count + BLOCK)
    with pytest.raises(Damaged, match="956 elements of a as uint16.*700"):
        plan([altered(shard, values=(longer,))], [shard])


def test_a_block_in_two_segments_is_damage(run):
    shard = saved(run, "f", "sparse", "raw")
    one, other = shard.record.segments
    with pytest.raises(Damaged, match="blocks of no other segment"):
        plan([altered(shard, segments=(one, other, one))])


def test_plain_values_outside_the_stored_bytes_are_not_a_record(run):
    record = saved(run, "e", "raw").record
    [value], [segment] = record.values, record.segments
    beyond = dataclasses.replace(value, at=1)
    other = dataclasses.replace(segment, name=f"{SEGMENTS}{PLAIN}2")
    for values, segments in [((beyond,), (segment,)), ((value,), ()), ((value,), (segment, other))]:
        with pytest.raises(InvalidRecord):
            row_blocks.check(dataclasses.replace(record, values=values, segments=segments))


@pytest.mark.parametrize(("count", "dtype"), [(699, "uint16"), (700, "float16"), (0, "uint16")])
def test_a_state_of_another_kind_is_refused_and_not_changed(run, count, dtype):
    saved(run, "a", "sparse")
    held = np.zeros(count, dtype).view(np.uint8)
    before = DenseValues({}, {})
    if count:
        before = DenseValues({"a": held.data}, {}, {(False, "a"): dtype})
    with pytest.raises(Damaged, match="1400 bytes of a as uint16 before"):
        stored_dense.values_of(run.saves, before, "newest")
    assert not held.any()


def test_a_codec_for_other_dtypes_is_damage(run):
    shard = saved(run, "f", "raw")
    [segment] = shard.record.segments
    [encoding] = segment.encodings
    lossy = dataclasses.replace(segment, encodings=(dataclasses.replace(encoding, codec="ef8"),))
    with pytest.raises(Damaged, match="a codec of uint16"):
        shard.field_of(lossy)


def test_only_the_counts_up_to_the_needed_blocks_are_read(run):
    shard = saved(run, "f", "sparse")
    field = shard.field_of(shard.record.segments[0])
    target = targets.Target("", BLOCKS, (0, 100), None, np.zeros((100, 256), np.uint16))
    for first, count in ((0, 1), (2, 5)):
        field.piece(row_blocks.StoredRows(range(count), first), target)
    reads = []

    def read_into(*call):
        reads.append(call[2:5])
        call[5].fill(0)

    with mock.patch.object(DenseShard, "read_into", read_into):
        field.arrays(0, 1, np.empty)
    entry, start, stop = reads[0]
    assert (entry.name, start, stop) == ("blocks.count", 0, 7)


def test_threads_read_counts_once(run):
    shard = saved(run, "f", "sparse")
    field = shard.field_of(shard.record.segments[0])
    target = targets.Target("", BLOCKS, (0, 100), None, np.zeros((100, 256), np.uint16))
    field.piece(row_blocks.StoredRows(range(4), 0), target)
    real, together, reads = DenseShard.read_into, threading.Barrier(2), []

    def read_into(*call):
        reads.append(call[2].name)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # For a second thread that reads the same.
        real(*call)

    with mock.patch.object(DenseShard, "read_into", read_into), Runtime() as runtime:
        runtime.map(lambda start: field.arrays(start, start + 1, np.empty), range(2))
    assert reads.count("blocks.count") == 1


@pytest.mark.parametrize("codec", ["raw", "sparse"])
def test_a_window_is_read_once_also_if_some_blocks_need_two(run, monkeypatch, codec):
    monkeypatch.setattr(stored_dense, "_CHAIN_BYTES", 1)
    monkeypatch.setattr(stored_dense, "_SMALL_LEAF_BYTES", 0)
    monkeypatch.setattr(block_pieces, "_WINDOW_BYTES", {"raw": 2500, "sparse": 200}[codec])
    run.start(["f"])
    run.save(["f"], 1, (codec,), 1.0)
    reads = []
    read_into = DenseShard.read_into

    def counted(shard, segment, entry, start, stop, out) -> None:
        reads.append((entry.name, start))
        read_into(shard, segment, entry, start, stop, out)

    monkeypatch.setattr(DenseShard, "read_into", counted)
    check_model(run, {"f"})
    once = len(reads) // 2  # The model is checked twice.
    assert len({*reads}) == once > 2
