# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of any saves equal a model in memory, also if leaves were added or reordered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_layers import Array, Rows, append, manifest_of

from deltackpt.errors import Damaged
from deltackpt.format import row_blocks
from deltackpt.format.dtypes import dtype_of, stored_dtype
from deltackpt.format.records import InvalidRecord
from deltackpt.format.row_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    BlockedValue,
    DenseBlocks,
    Key,
    rows_of,
)
from deltackpt.layers import merge
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.layers.write import LayerFile
from deltackpt.reading import stored_dense
from deltackpt.reading.part_arrays import LayerArrays
from deltackpt.reading.stored_dense import DensePlan, DenseShard, DenseValues
from deltackpt.reading.wal_records import segment_of
from deltackpt.resources.runtime import Runtime
from deltackpt.storage.posix import DirectFile
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
        self.rng = np.random.default_rng(seed)
        self.folder, self.runtime = folder, Runtime()
        self.state: State = {}
        #: Newest first, and the state below all of them.
        self.saves: list[list[DenseShard]] = []
        self.below: State = {}

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
        values, plain = [], []
        ends = dict.fromkeys(DTYPES, 0)
        #: Dtype and codec to rows of the group, and the bits now and before.
        found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
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
                rows = np.array([at + row]), data[[row]], old[None]
                found.setdefault((dtype, codec), []).append(rows)
        groups = [
            Rows(
                f"{row_blocks.SEGMENTS}{dtype}.{codec}",
                dtype,
                self._rows([rows for rows, _, _ in parts]),
                arrays_of(
                    dtype, codec, *(np.concatenate(x) for x in list(zip(*parts, strict=True))[1:])
                ),
                kind="blocks",
                columns=(0, BLOCK),
                codecs={BLOCKS: codec},
            )
            for (dtype, codec), parts in found.items()
        ]
        if any(map(len, plain)):
            data = np.concatenate(plain)
            name = f"{row_blocks.SEGMENTS}{PLAIN}"
            array = Array(row_blocks.PLAIN_BYTES_OF, data)
            groups.append(Rows(name, PLAIN, range(len(data)), [array], "item", (0, 1)))
        layer = self._written(groups)
        record = DenseBlocks(
            values=tuple(values),
            segments=tuple(
                segment_of(group, layer.arrays(group).values())
                for group in layer.manifest.row_groups
            ),
        )
        row_blocks.check(record)
        shown = f"save {len(self.saves)}, process {process}"
        return DenseShard(LayerArrays(lambda: layer, name=shown, file=""), record, shown)

    def _rows(self, parts: list[np.ndarray]) -> np.ndarray | range:
        rows = np.concatenate(parts)
        spans = rows_of((int(row), int(row) + 1) for row in rows)
        return spans if isinstance(spans, range) and self.rng.random() < 0.5 else rows

    def _written(self, groups: list[Rows]) -> LayerReader:
        path = self.folder / f"layer.{len(list(self.folder.iterdir()))}"
        file = LayerFile(DirectFile(path), self.runtime, fsync=False, chunk_bytes=1024)
        written = append(file, manifest_of(), groups)
        file.file.close()
        return LayerReader(StoredBytes(store_path(path)), written.stop)

    def close(self) -> None:
        self.runtime.close()


class Below:
    """The state below the saves, as a base."""

    def __init__(self, state: State):
        self._state = state

    def nbytes(self, key: Key) -> int | None:
        return None if key[1] not in self._state else len(bytes_of(key[1], self._state[key[1]]))

    def fill(self, into, on_filled=None) -> None:
        for (_, key), out in into.items():
            if key not in self._state or len(out) != len(bytes_of(key, self._state[key])):
                raise Damaged("base", key, "none")
            out[:] = np.frombuffer(bytes_of(key, self._state[key]), np.uint8)
            if on_filled is not None:
                for start in range(0, len(out), 1 << 20):
                    on_filled((False, key), start, min(start + (1 << 20), len(out)))


def bytes_of(key: str, data: np.ndarray) -> bytes:
    count = LEAVES[key][1]
    return data.reshape(-1)[:count].tobytes()


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
    window=st.sampled_from([1, 3000, 1 << 20]),
)
def test_any_saves_restore_the_values_of_the_model(
    tmp_path_factory, data, saves, seed, checked, chain, window
):
    with (
        mock.patch.object(stored_dense, "_SMALL_BYTES", checked),
        mock.patch.object(stored_dense, "_CHAIN_BYTES", chain),
        mock.patch.object(merge, "_WINDOW_BYTES", window),
    ):
        check_model(tmp_path_factory, data, saves, seed)


def check_model(tmp_path_factory, data, saves, seed):
    run = Run(tmp_path_factory.mktemp("layers"), seed)
    run.start([*saves[0][0], *data.draw(st.sets(st.sampled_from([*LEAVES])))])
    for keys, processes, codecs, share in saves:
        run.save(keys, processes, codecs, share)
    wanted = data.draw(st.sets(st.sampled_from([*run.state])) | st.just({*run.state}))
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
    plan = DensePlan(run.saves, "newest", lambda key: True)
    for key in wanted:
        shared = again.values[key] is before.values.get(key)
        assert shared == ((False, key) in plan.missing.keys() - plan.changed)
    run.close()


@pytest.fixture
def run(tmp_path) -> Iterator[Run]:
    """A run without saves."""
    made = Run(tmp_path, 1)
    yield made
    made.close()


def test_a_base_is_needed_only_for_values_that_the_saves_do_not_complete(run):
    run.start(["a", "c", "e"])
    run.save(["a", "c", "e"], 1, ("raw",), 1.0)
    run.save(["a", "c", "e"], 1, ("sparse",), 1.0)
    assert DensePlan(run.saves, "newest", lambda key: True).missing == {}
    relative = DensePlan(run.saves[:1], "newest", lambda key: True)
    assert {key for _, key in relative.missing} == {"a", "c"}
    with pytest.raises(Damaged, match="dense leaves down to a base"):
        stored_dense.values_of(run.saves[:1], None, "newest")


def test_a_value_of_another_kind_is_damage(run):
    run.start(["a"])
    run.save(["a"], 1, ("sparse",), 1.0)
    [shard] = run.saves[0]
    [value] = shard.record.values
    longer = dataclasses.replace(value, count=value.count + BLOCK)
    other = dataclasses.replace(shard.record, values=(longer,))
    newest = dataclasses.replace(shard, record=other)
    with pytest.raises(Damaged, match="956 elements of a as uint16.*700"):
        DensePlan([[newest], [shard]], "newest", lambda key: True)


def test_a_block_in_two_segments_is_damage(run):
    run.start(["f"])
    run.save(["f"], 1, ("sparse", "raw"), 1.0)
    [shard] = run.saves[0]
    one, other = shard.record.segments
    twice = dataclasses.replace(shard.record, segments=(one, other, one))
    with pytest.raises(Damaged, match="blocks of no other segment"):
        DensePlan([[dataclasses.replace(shard, record=twice)]], "newest", lambda key: True)


def test_plain_values_outside_the_stored_bytes_are_not_a_record(run):
    run.start(["e"])
    run.save(["e"], 1, ("raw",), 1.0)
    record = run.saves[0][0].record
    [value], [segment] = record.values, record.segments
    beyond = dataclasses.replace(value, at=1)
    other = dataclasses.replace(segment, name=f"{row_blocks.SEGMENTS}{PLAIN}2")
    for values, segments in [
        ((beyond,), (segment,)),
        ((value,), ()),
        ((value,), (segment, other)),
    ]:
        with pytest.raises(InvalidRecord):
            row_blocks.check(dataclasses.replace(record, values=values, segments=segments))


@pytest.mark.parametrize(("count", "dtype"), [(699, "uint16"), (700, "float16"), (0, "uint16")])
def test_a_state_of_another_kind_is_refused_and_not_changed(run, count, dtype):
    run.start(["a"])
    run.save(["a"], 1, ("sparse",), 1.0)
    held = np.zeros(count, dtype).view(np.uint8)
    before = (
        DenseValues({"a": held.data}, {}, {(False, "a"): dtype}) if count else DenseValues({}, {})
    )
    with pytest.raises(Damaged, match="1400 bytes of a as uint16 before"):
        stored_dense.values_of(run.saves, before, "newest")
    assert not held.any()


def test_a_codec_for_other_dtypes_is_damage(run):
    run.start(["f"])
    run.save(["f"], 1, ("raw",), 1.0)
    [shard] = run.saves[0]
    [segment] = shard.record.segments
    [encoding] = segment.encodings
    lossy = dataclasses.replace(segment, encodings=(dataclasses.replace(encoding, codec="ef8"),))
    with pytest.raises(Damaged, match="a codec of uint16"):
        shard.field_of(lossy)


def test_only_the_counts_up_to_the_needed_blocks_are_read(run):
    run.start(["f"])
    run.save(["f"], 1, ("sparse",), 1.0)
    [shard] = run.saves[0]
    field = shard.field_of(shard.record.segments[0])
    with mock.patch.object(merge, "_WINDOW_BYTES", 1):
        first, last = field.elements("at", 0, 1)
        assert (first, len(field._ends_to(1))) == (0, 2)
        assert field.elements("at", 1, 12)[0] == last
