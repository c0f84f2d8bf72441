# SPDX-License-Identifier: Apache-2.0
"""Merging against a model: the newest value wins for any ranges of rows and columns."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltackpt import codecs
from deltackpt.errors import Damaged
from deltackpt.format import naming, row_blocks
from deltackpt.format.records import MOST
from deltackpt.format.row_blocks import (
    VALUES,
    ArrayEntry,
    CyclicRows,
    FieldSpec,
    GroupEntry,
    RowBlock,
    Segment,
    StoredRows,
)
from deltackpt.layers import merge, row_indices
from deltackpt.layers.targets import Target, Targets
from deltackpt.resources.runtime import Runtime

ROWS, WIDTH = 40, 6
rows_of_a_block = st.one_of(
    st.sets(st.integers(0, ROWS - 1)).map(lambda rows: np.array(sorted(rows), np.int64)),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(
        lambda ends: range(min(ends), max(ends))
    ),
)
spans = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(
    lambda ends: (min(ends), max(ends))
)
columns = st.sampled_from([(0, 6), (0, 3), (3, 6), (2, 5)])


@given(
    st.lists(st.tuples(rows_of_a_block, columns, st.booleans()), max_size=5),
    st.lists(
        st.tuples(spans, columns, st.sampled_from([None, (1, (0,)), (3, (0, 2)), (4, (3,))])),
        min_size=1,
        max_size=3,
    ),
)
def test_blocks_land_where_a_naive_model_puts_them(blocks, places):
    table, targets = np.full((ROWS, WIDTH), -1.0), []
    for rows, cols, phases in places:
        cycle = None if phases is None else CyclicRows(rows, *phases)
        count = rows[1] - rows[0] if cycle is None else cycle.count
        buffer = np.full((count, cols[1] - cols[0]), -1.0)
        targets.append(Target("g", VALUES, rows, cols, buffer, cycle))
    for number, (rows, cols, picked) in enumerate(blocks):
        values = number * 1000 + np.arange(len(rows) * (cols[1] - cols[0]), dtype=float)
        values = values.reshape(len(rows), cols[1] - cols[0])
        table[np.array(rows, np.int64), cols[0] : cols[1]] = values
        positions = None
        if picked and not isinstance(rows, range):
            # Each row is at another position, after rows that the block does not have.
            positions = 2 * np.random.default_rng(number).permutation(len(rows)) + 1
            held = np.full((2 * len(rows), values.shape[1]), -3.0)
            held[positions] = values
            values = held
        merge.apply(RowBlock("g", rows, cols, {VALUES: values}), targets, positions)
        merge.apply(RowBlock("other", rows, cols, {VALUES: values * -7}), targets, positions)
    for target, (rows, cols, _) in zip(targets, places, strict=True):
        own = np.arange(*rows) if target.cycle is None else target.cycle.to_array()
        assert np.array_equal(target.buffer, table[own, cols[0] : cols[1]])


class MemoryLayer(NamedTuple):
    """A layer in memory."""

    groups: dict[str, GroupEntry]
    segments: tuple[Segment, ...]
    arrays: dict[tuple[str, str], np.ndarray]

    def name_of(self, segment: Segment, entry: ArrayEntry) -> str:
        return f"{segment.name}/{entry.name}"

    def check(self, segment: Segment) -> None:
        pass

    def row_indices(self, segment: Segment, first: int = 0, stop: int = MOST) -> StoredRows:
        rows = self.arrays[segment.name, naming.GAPS]
        found = row_blocks.row_slice(rows, first, stop)
        return StoredRows(rows[found], found.start)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        out[...] = self.arrays[segment.name, entry.name][start:stop]


GROUP = GroupEntry(
    name="g",
    rows=ROWS,
    fields=(
        FieldSpec(name=VALUES, trailing=(WIDTH,), dtype="float32", codec="bf16"),
        FieldSpec(name="slot.m", trailing=(WIDTH,), dtype="float32"),
        FieldSpec(name="slot.n", trailing=(), dtype="float32"),
    ),
)
FIELDS = st.sampled_from(
    [(VALUES, "slot.m", "slot.n"), (VALUES,), ("slot.m", "slot.n"), (VALUES, "slot.n")]
)


@st.composite
def layers_of_a_run(draw) -> list[list[MemoryLayer]]:
    """Layers of some saves; each value identifies its save, field and cell."""
    saves = []
    same = draw(st.booleans())
    grid = st.sampled_from([(0, 3), (3, 6)]) if draw(st.booleans()) else columns
    fields, cols = draw(FIELDS), draw(grid)
    for number in range(draw(st.integers(1, 5))):
        free = {name: np.ones((ROWS, WIDTH), bool) for name in (VALUES, "slot.m", "slot.n")}
        shards = []
        for shard in range(draw(st.integers(1, 2))):
            if not same:
                fields, cols = draw(FIELDS), draw(grid)
            rows = np.array(draw(rows_of_a_block), np.int64)
            # Shards of one save have disjoint cells.
            for name in fields:
                rows = rows[free[name][rows][:, slice(*cols)].all(axis=1)]
            for name in fields:
                free[name][rows] &= False
            shards.append(layer_of(number, f"s{shard}", rows, cols, fields, draw(st.booleans())))
        saves.append(shards)
    return saves


def layer_of(number, name, rows, cols, fields, gapped) -> MemoryLayer:
    chunk_rows, arrays, entries = 7, {}, []
    for spec in (spec for spec in GROUP.fields if spec.name in fields):
        values = cells_of(number, spec.name)[rows]
        if spec.codec == "bf16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        arrays[name, spec.name] = values[:, slice(*cols)] if spec.trailing else values[:, 0].copy()
        shape, dtype = arrays[name, spec.name].shape, arrays[name, spec.name].dtype.name
        entries.append(ArrayEntry(name=spec.name, shape=shape, dtype=dtype, chunk_rows=chunk_rows))
    ranges = None if gapped else row_blocks.joined((int(row), int(row) + 1) for row in rows)
    if gapped:
        arrays[name, naming.GAPS] = rows
        entries.append(
            ArrayEntry(
                name=naming.GAPS,
                shape=(len(rows),),
                dtype=arrays[name, naming.GAPS].dtype.name,
                chunk_rows=chunk_rows,
            )
        )
    segment = Segment(
        name=name,
        group="g",
        columns=cols,
        count=len(rows),
        ranges=ranges,
        fields=tuple(fields),
        arrays=tuple(entries),
    )
    return MemoryLayer({"g": GROUP}, (segment,), arrays)


def cells_of(number: int, field: str) -> np.ndarray:
    """Distinct values, whose lower bits are zero as in bfloat16."""
    first = [VALUES, "slot.m", "slot.n"].index(field) * 5 + number
    cells = np.arange(1, ROWS * WIDTH + 1, dtype=np.uint32) + first * ROWS * WIDTH
    return (cells << 16).view(np.float32).reshape(ROWS, WIDTH)


@settings(max_examples=300)
@given(
    layers_of_a_run(),
    st.tuples(st.sampled_from([0, 11]), st.sampled_from([ROWS, 29])),
    st.lists(st.integers(0, ROWS), max_size=3),
    st.sampled_from([[(0, 6)], [(0, 3), (3, 6)], [(2, 5)]]),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([-1, 100, 1 << 18]),
)
def test_pieces_of_a_stage_are_merged_in_any_order(
    saves, reach, cuts, splits, random, threads, joined_bytes
):
    low, high = sorted(reach)
    cuts = sorted({low, high, *(cut for cut in cuts if low < cut < high)})
    places = [(rows, cols) for rows in zip(cuts, cuts[1:], strict=False) for cols in splits]
    expected = {spec.name: np.full((ROWS, WIDTH), -1, np.float32) for spec in GROUP.fields}
    for number, shards in enumerate(saves):
        for layer in shards:
            [segment] = layer.segments
            rows = np.array(row_indices.segment_rows(layer, segment), np.int64)
            for name in segment.fields:
                own = slice(*segment.columns) if name != "slot.n" else slice(0, WIDTH)
                expected[name][rows, own] = cells_of(number, name)[rows, own]
    targets, written = [], collections.Counter()
    for spec in GROUP.fields:
        for rows, cols in places:
            shape = (
                (rows[1] - rows[0], cols[1] - cols[0]) if spec.trailing else (rows[1] - rows[0],)
            )
            buffer = np.full(shape, -1, np.float32)
            if spec.trailing or cols == splits[0]:
                cols = cols if spec.trailing else None
                targets.append(Target("g", spec.name, rows, cols, buffer))
    held = Targets(targets)

    def indices(layer: MemoryLayer, segment: Segment, targets: Targets) -> StoredRows | None:
        """The rows from the first to the last wanted one."""
        rows = row_indices.segment_rows(layer, segment)
        chunk = row_blocks.row_slice(rows, low, high)
        return StoredRows(rows[chunk], chunk.start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_SMALL_BYTES", joined_bytes)
        stages = [[*stage] for stage in merge.plan(saves, held, indices)]
    for stage in stages:
        random.shuffle(stage)
        for one in (section for piece in stage for section in piece.sections):
            rows = np.asarray(one.rows)
            for row in rows if one.needed is None else rows[one.needed]:
                written[one.field.segment.columns, one.field.spec.name, int(row)] += 1
    loaded = [dataclasses.replace(one, buffer=one.buffer.copy()) for one in targets]
    for block in (block for stage in stages for piece in stage for block in piece.load()):
        merge.apply(block, loaded)
    with Runtime(threads or 1) as runtime:
        merge.run(stages, runtime)
    for target, copy in zip(targets, loaded, strict=True):
        wanted = expected[target.field][slice(*target.rows)]
        wanted = wanted[:, 0] if target.columns is None else wanted[:, slice(*target.columns)]
        assert np.array_equal(target.buffer, wanted) and np.array_equal(copy.buffer, wanted)
    kinds = {(layer.segments[0].fields, layer.segments[0].columns) for of in saves for layer in of}
    is_raw = all(VALUES not in fields for fields, _ in kinds)
    gapped = all(layer.segments[0].ranges is None for of_save in saves for layer in of_save)
    if len(kinds) == 1 and gapped and not is_raw:
        assert max(written.values(), default=0) <= 1


def test_layers_with_other_rows_may_share_a_segment(monkeypatch):
    monkeypatch.setattr(
        row_indices, "MANY_ROWS", 1
    )  # Threads read row indices before they are needed.
    rows_of = [np.arange(number, 39, 3) for number in range(3)]
    layers = [
        layer_of(number, "s0", rows, (0, WIDTH), ["slot.n"], True)
        for number, rows in enumerate(rows_of)
    ]
    assert layers[0].segments == layers[1].segments == layers[2].segments
    shared = [layer._replace(segments=layers[0].segments) for layer in layers]
    buffer = np.zeros(ROWS, np.float32)
    targets = Targets([Target("g", "slot.n", (0, ROWS), None, buffer)])
    with Runtime(2) as runtime:
        planned = merge.plan([[one] for one in shared], targets, runtime=runtime)
        merge.run([[*stage] for stage in planned], runtime)
    for number, rows in enumerate(rows_of):
        assert np.array_equal(buffer[rows], cells_of(number, "slot.n")[rows, 0])


class CalledLayer(MemoryLayer):
    """Calls a function before it reads a segment."""

    call: Callable[[str], None] = staticmethod(lambda name: None)

    def read_into(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        self.call(segment.name)
        super().read_into(segment, entry, start, stop, out)


def run_three(call: Callable[[str], None]) -> None:
    """Merges a base of three shards, with three threads, and a delta after it."""
    shards = []
    for number, name in enumerate(("s0", "s1", "s2")):
        rows = np.arange(number * 10, number * 10 + 7)
        shards.append(CalledLayer(*layer_of(0, name, rows, (0, 6), ["slot.m"], False)))
    delta = CalledLayer(*layer_of(1, "later", np.arange(7), (0, 6), ["slot.m"], True))
    for layer in (*shards, delta):
        layer.call = call
    buffer = np.zeros((ROWS, WIDTH), np.float32)
    targets = Targets([Target("g", "slot.m", (0, ROWS), (0, WIDTH), buffer)])
    stages = [[*stage] for stage in merge.plan([shards, [delta]], targets)]
    with Runtime(3) as runtime:
        merge.run(stages, runtime)


@pytest.fixture
def threads(monkeypatch):
    """Small pieces are merged by several threads, too."""
    monkeypatch.setattr(merge, "_SMALL_BYTES", -1)


@pytest.mark.usefixtures("threads")
def test_pieces_of_a_stage_are_read_at_the_same_time():
    together = threading.Barrier(3)

    def call(name: str) -> None:
        if name != "later":
            together.wait(60)

    run_three(call)


@pytest.mark.usefixtures("threads")
def test_an_error_is_raised_after_all_running_reads_end():
    events, running = [], threading.Event()

    def call(name: str) -> None:
        events.append(name)
        if name == "s0":
            assert running.wait(60)
            raise Damaged("s0", "its rows", "none")
        if name == "s1":
            running.set()
            time.sleep(0.05)
            events.append("s1 is read")

    with pytest.raises(Damaged, match="s0"):
        run_three(call)
    assert "s1 is read" in events
    assert "later" not in events


@given(chunks=st.lists(st.sets(st.integers(0, 50)), max_size=5))
def test_a_union_has_each_row_once_in_ascending_order(chunks):
    found = row_blocks.union_of([np.array(sorted(chunk), np.int32) for chunk in chunks])
    assert found.dtype == np.int64 and found.tolist() == sorted(set().union(*chunks))


def test_tombstones_of_many_saves_are_joined_as_far_as_their_rows_are_short():
    spec = FieldSpec(name="values", trailing=(64,), dtype="float32", codec=codecs.ZEROS)
    nothing: Any = None  # No layer: nothing is read.
    sections = []
    for save in range(100):
        rows = np.arange(save, 10_000, 100)
        segment = Segment(
            name="g.0",
            group="g",
            columns=(0, 64),
            count=len(rows),
            ranges=None,
            fields=("values",),
            arrays=(),
        )
        field = merge.SegmentField(nothing, segment, spec, {})
        sections.append(merge.Section(field, rows, None, 0, len(rows)))
    pieces = [*merge._pieces(sections, Targets(()))]
    found = [sum(len(one.rows) for one in piece.sections) for piece in pieces]
    assert sum(found) == 10_000 and len(found) < 50
    assert max(found) * spec.row_bytes <= merge._SMALL_BYTES
