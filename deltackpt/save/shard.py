# SPDX-License-Identifier: Apache-2.0
"""Encodes and writes the fields of one process's shard of a save.

If the measured error of a lossy codec exceeds the budget, its arrays are removed and the next more
precise codec is tried. Rows that a codec cannot represent are stored raw, with their positions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.codecs import Codec, Lossless
from deltackpt.errors import ErrorBudgetExceeded, OptionError
from deltackpt.format import manifest, row_blocks
from deltackpt.format.manifest import Layout
from deltackpt.format.row_blocks import ArrayEntry, Segment
from deltackpt.policies import PlannedCodec
from deltackpt.resources.runtime import Runtime
from deltackpt.save.capture import BusyClock, CapturedRows, RowPiece, SegmentSource, encode_ahead
from deltackpt.save.encode import Encoded
from deltackpt.storage import shard_writer
from deltackpt.storage.shard_writer import SegmentSink, StoredField, WrittenArray

#: Rows that a codec does not hold stay in memory until the others are written: at most that many,
#: or that share of all.
_FEW_ROWS, _MOST_BESIDE = 4096, 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field to store."""

    name: str
    trailing: tuple[int, ...]  # shape of this process's columns of a row
    dtype: np.dtype
    tables: Sequence[str]  # of the group, in the order of their offsets
    #: (len(tables) + 1,): positions in the segment at which each table's rows begin and end.
    bounds: np.ndarray
    planned: PlannedCodec  # the codec to try first
    pinned: bool = False  # its rows are views of the state; a change during the write is detected

    @property
    def count(self) -> int:
        """Returns the number of rows."""
        return int(self.bounds[-1])

    @property
    def raw_bytes(self) -> int:
        """Returns the bytes of all rows unencoded."""
        return self.count * math.prod(self.trailing) * self.dtype.itemsize


def write_field(
    place: SegmentSink,
    field: Field,
    pieces: Callable[[Codec], Iterator[RowPiece]],
    runtime: Runtime,
    encoding: BusyClock,
) -> StoredField:
    """Writes a field with the planned codec, or the first more precise one within the budget.

    ``pieces`` is called once per attempted codec. Raises ErrorBudgetExceeded if more precise codecs
    are not allowed.
    """
    plan = field.planned
    if not _fits(field, plan.codec):  # the shard of a table that is split by columns
        reason = f"raw: columns of shape {field.trailing} are too narrow for {plan.codec}"
        plan = dataclasses.replace(plan, codec="raw", reason=reason)
    while True:
        codec = codecs.get(plan.codec)
        if codecs.is_lossless(codec):
            return _write_lossless(place, field, plan, codec, pieces(codec), encoding)
        attempt = _Attempt(place, field, codec)
        for piece, encoded in encode_ahead(codec, encoding.over(pieces(codec)), runtime, encoding):
            attempt.write(piece, encoded)
            if attempt.hopeless():
                break
        fault = attempt.fault()
        if fault is None:
            return attempt.finish(plan)
        attempt.remove()
        if fault.over_budget and plan.when_exceeded == "refuse":
            raise ErrorBudgetExceeded(
                f"segment {place.segment}, {field.name}: expected an error within max_error="
                f"{plan.max_error:g} of the norm of the rows, found that {fault.text}; "
                "choose a more precise codec, a wider budget, or when_exceeded='widen'"
            )
        plan = _wider(field, plan, fault)


def _constant(field: Field, codec: str) -> StoredField:
    """Returns the record of a field of evicted rows, which needs no arrays."""
    return shard_writer.stored_field(
        field.name, [], codec=codec, reason=f"{codec}: evicted", bounds=field.bounds
    )


class _Fault(NamedTuple):
    """Why a codec is unsuitable; ``over_budget`` if its error is too large."""

    text: str
    over_budget: bool


class _Attempt:
    """A field on its way through one lossy codec."""

    def __init__(self, place: SegmentSink, field: Field, codec: Codec):
        self._place, self._field, self._codec = place, field, codec
        self._entries = _entries(field, codec)
        self._writers = {suffix: place.writer(entry) for suffix, entry in self._entries.items()}
        self._done = 0
        self._squared_error = np.zeros(len(field.tables))
        self._squared_norm = np.zeros(len(field.tables))
        self._raw_rows: list[np.ndarray] = []
        self._raw_positions: list[np.ndarray] = []

    def write(self, piece: RowPiece, encoded: Encoded) -> None:
        """Writes the next rows, and measures their decoding error."""
        for suffix, stored in self._writers.items():
            array = np.asarray(encoded.arrays[suffix])
            stored.write(array.view(self._entries[suffix].dtype))
        held = np.asarray(encoded.representable)
        if not held.all():
            missing = np.flatnonzero(~held)
            self._raw_rows.append(piece.host()[missing])
            self._raw_positions.append(missing + self._done)
        stop = self._done + len(held)
        for sums, found in (
            (self._squared_error, encoded.squared_error),
            (self._squared_norm, encoded.squared_norm),
        ):
            self._count(sums, np.asarray(found), stop)
        self._done = stop

    def _count(self, sums: np.ndarray, found: np.ndarray, stop: int) -> None:
        """Adds figures of the rows ``[done, stop)`` to those of their tables."""
        bounds, start = self._field.bounds, self._done
        first = int(np.searchsorted(bounds, start, "right")) - 1
        for table in range(first, len(sums)):
            low, high = max(int(bounds[table]), start), min(int(bounds[table + 1]), stop)
            if low >= stop:
                break
            sums[table] += found[low - start : high - start].sum(dtype=np.float64)

    def finish(self, plan: PlannedCodec) -> StoredField:
        written = [
            WrittenArray(self._entries[suffix], stored.finish())
            for suffix, stored in self._writers.items()
        ]
        if self._raw_rows:
            written += self._write_raw_rows()
        return shard_writer.stored_field(
            self._field.name,
            written,
            codec=plan.codec,
            reason=plan.reason,
            bounds=self._field.bounds,
            squared_error=self._squared_error,
            squared_norm=self._squared_norm,
        )

    def remove(self) -> None:
        for stored in self._writers.values():
            stored.remove()

    def _write_raw_rows(self) -> Iterator[WrittenArray]:
        rows = np.concatenate(self._raw_rows).view(codecs.stored_dtype(self._field.dtype))
        positions = np.concatenate(self._raw_positions)
        for suffix, array, zstd in (
            (codecs.RAW_ROWS, rows, False),
            (codecs.RAW_POSITIONS, positions, True),
        ):
            name = codecs.array_name(self._field.name, suffix)
            entry = row_blocks.array_entry(name, array.shape, array.dtype, zstd=zstd)
            yield shard_writer.write_array(self._place, entry, [array])

    @property
    def _raw_count(self) -> int:
        return sum(len(rows) for rows in self._raw_rows)

    def hopeless(self) -> bool:
        """Returns whether so many rows are stored raw that the codec gains too little."""
        raw, count = self._raw_count, self._field.count
        if raw == 0:
            return False
        saved_bytes = self._field.raw_bytes - sum(entry.nbytes for entry in self._entries.values())
        too_large = raw * self._field.raw_bytes >= saved_bytes * count
        return too_large or raw > max(_FEW_ROWS, count * _MOST_BESIDE)

    def fault(self) -> _Fault | None:
        """Returns why the codec is unsuitable, or None."""
        name, field = self._codec.name, self._field
        if self.hopeless():
            text = f"{name} cannot represent {self._raw_count} of {self._done} rows"
            return _Fault(text, over_budget=False)
        bound = field.planned.max_error
        if bound is None:
            return None
        error, norm = self._squared_error, self._squared_norm
        errors = np.sqrt(np.divide(error, norm, out=np.zeros_like(error), where=error > 0))
        worst = int(np.argmax(errors))
        if errors[worst] <= bound:
            return None
        text = f"{name} would change the rows of {field.tables[worst]} by {errors[worst]:.3g}"
        return _Fault(text, over_budget=True)


def _entries(field: Field, codec: Codec) -> dict[str, ArrayEntry]:
    """Maps suffixes to stored arrays, whose chunks hold as many rows as raw ones."""
    shape = (field.count, *field.trailing)
    # A restore decodes chunks in parallel; few large ones would leave it one thread.
    raw = row_blocks.array_entry(field.name, shape, codecs.stored_dtype(field.dtype))
    return {
        suffix: row_blocks.array_entry(
            codecs.array_name(field.name, suffix),
            (field.count, *array.trailing),
            array.dtype,
            byte_planes=array.byte_planes,
            chunk_rows=raw.chunk_rows,
        )
        for suffix, array in codec.stored(field.trailing, field.dtype).items()
    }


def _wider(field: Field, plan: PlannedCodec, fault: _Fault) -> PlannedCodec:
    name = "raw"
    if fault.over_budget:
        name = codecs.wider(plan.codec)
        while not _fits(field, name):
            name = codecs.wider(name)
    reason = f"{name}: {fault.text}"
    if fault.over_budget:
        reason += f", more than {plan.max_error:g}"
    reason += f" (planned {field.planned.reason})"
    return dataclasses.replace(plan, codec=name, reason=reason)


def _fits(field: Field, name: str) -> bool:
    try:
        codecs.get(name).check(field.trailing, field.dtype)
    except OptionError:
        return False
    return True


def _write_lossless(
    place: SegmentSink,
    field: Field,
    plan: PlannedCodec,
    codec: Lossless,
    pieces: Iterator[RowPiece],
    encoding: BusyClock,
) -> StoredField:
    (entry,) = _entries(field, codec).values()
    rows = (codec.stored_view(np.ascontiguousarray(piece.host())) for piece in pieces)
    return shard_writer.stored_field(
        field.name,
        [shard_writer.write_array(place, entry, encoding.over(rows), pinned=field.pinned)],
        codec=plan.codec,
        reason=plan.reason,
        bounds=field.bounds,
    )


#: Group name to field name to the codec that a save tries first.
Plans = Mapping[str, Mapping[str, PlannedCodec]]


def write_segments(
    rows: CapturedRows,
    sink_of: Callable[[str], SegmentSink],
    layout: Layout,
    plans: Plans,
    runtime: Runtime,
    encoding: BusyClock,
    *,
    threads: int | None = None,
) -> list[Segment]:
    """Writes all captured rows to sinks by segment name, on threads."""
    sinks, writes = [], []
    for number, source in enumerate(rows.segments):
        sink = sink_of(f"{source.group}.{number}")
        sinks.append(sink)
        writes.append(functools.partial(shard_writer.write_rows, sink, source.rows))
        for field in _fields_of(source, layout, plans, pinned=rows.pinned):
            if source.evicted:  # Rows without ids: constant codecs stand for the fields.
                codec = codecs.ONES if field.name == source.key else codecs.ZEROS
                writes.append(functools.partial(_constant, field, codec))
                continue
            pieces = functools.partial(rows.pieces, number, field.name)
            writes.append(functools.partial(write_field, sink, field, pieces, runtime, encoding))
    stored: Iterator[Any] = iter(runtime.map(lambda write: write(), writes, threads=threads))
    return [
        shard_writer.stored_segment(
            sink,
            source.group,
            source.columns,
            source.rows,
            next(stored),
            [next(stored) for _ in source.fields],
        )
        for sink, source in zip(sinks, rows.segments, strict=True)
    ]


def _fields_of(source: SegmentSource, layout: Layout, plans: Plans, *, pinned: bool) -> list[Field]:
    group = layout.group_by_name[source.group]
    bounds = shard_writer.table_bounds(group, layout, source.rows)
    tables = [table.name for table in manifest.tables_of_group(group, layout.tables)]
    return [
        Field(
            name=name,
            trailing=field.trailing,
            dtype=field.dtype,
            tables=tables,
            bounds=bounds,
            planned=plans[group.name][name],
            pinned=pinned and source.is_view(name),
        )
        for name, field in source.fields.items()
    ]


def table_rows(segments: Iterable[Segment]) -> int:
    """Returns the number of table rows in a shard; rows with several column ranges count once."""
    held = [segment for segment in segments if row_blocks.VALUES in segment.fields]
    first = {
        segment.group: min(other.columns[0] for other in held if other.group == segment.group)
        for segment in held
    }
    return sum(segment.count for segment in held if segment.columns[0] == first[segment.group])
