# SPDX-License-Identifier: Apache-2.0
"""Restore: read a chain and merge it, newest wins, straight into the final host buffers.

The base's chunks are read into the buffers themselves. Then, save by save, the chunks of each
delta are read, verified, decoded into a small piece and scattered; within one save the chunks
hold different rows, so they run in parallel, and a save is finished before the next begins.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deltackpt import blocks, codecs, layout, merge
from deltackpt.blocks import EncodedBlock, RowBlock, Rows
from deltackpt.chain import SaveInfo
from deltackpt.errors import (
    RestoreError,
    TemplateMismatch,
)
from deltackpt.manifest import ArrayEntry, FieldSpec, Manifest, Segment
from deltackpt.merge import Target
from deltackpt.staging import Staging
from deltackpt.storage import files, gaps
from deltackpt.stored import (
    StoredSave,
    check_complete,
    entry_bytes,
    raise_if_removed,
    read_chain,
)
from deltackpt.tables import Layout

#: Called with (bytes read so far, bytes to read in all), from a background thread.
Progress = Callable[[int, int], None]

_READERS = 2
#: Kept for the next piece: fresh memory would cost more than the merge.
_SCRATCH_BYTES = 128 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredTables:
    """Merged tables and slots in host memory.

    Attributes:
      fields: table name to field name to array, (rows asked for, *trailing).
      rows: table name to the half-open range of rows that was asked for.
      layout: tables and groups of the step.
      chain: the saves that were read, base first.
      bytes_read: bytes of the stored arrays that were read.
      seconds: wall time of reading and merging.
    """

    fields: dict[str, dict[str, np.ndarray]]
    rows: dict[str, tuple[int, int]]
    layout: Layout
    chain: tuple[SaveInfo, ...]
    bytes_read: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AbstractEmbeddings:
    """What to restore of an item: table name to field name to abstract leaf.

    A leaf is a ``jax.ShapeDtypeStruct`` (its sharding is used) or an array. ``tables`` None asks
    for everything, on the host.
    """

    tables: Mapping[str, Mapping[str, Any]] | None = None


def load_item(item_dir: Path, abstract: AbstractEmbeddings | None) -> RestoredTables:
    """Restores one item of a step, for the adapters of Orbax.

    Args:
      item_dir: directory of the item in a committed step.
      abstract: what to restore, and where to put it.

    Raises:
      RestoreError: what is wrong with the step, or with what was asked for.
    """
    saves = read_chain(item_dir.parent, item_dir.name)
    wanted = None
    if abstract is not None and abstract.tables is not None:
        wanted = dict.fromkeys(abstract.tables)
        stored = abstract_of(saves[-1]).tables or {}
        for name, fields in abstract.tables.items():
            for field, leaf in fields.items():
                _check_leaf(name, field, leaf, stored.get(name, {}).get(field))
    merged = restore_tables(saves, wanted=wanted)
    if abstract is None or abstract.tables is None:
        return merged
    chosen = {
        name: {field: merged.fields[name][field] for field in fields}
        for name, fields in abstract.tables.items()
    }
    return dataclasses.replace(merged, fields=place(chosen, abstract.tables))


def abstract_of(save: StoredSave) -> AbstractEmbeddings:
    """Shapes and dtypes of a step's tables and slots."""
    groups = {group.name: group for group in save.layout.groups}
    return AbstractEmbeddings(
        tables={
            table.name: {
                spec.name: jax.ShapeDtypeStruct(
                    (table.rows, *spec.trailing), codecs.dtype_of(spec.dtype)
                )
                for spec in groups[table.group].fields
            }
            for table in save.layout.tables
        }
    )


def _check_leaf(name: str, field: str, wanted: Any, stored: Any) -> None:
    found = None if stored is None else (tuple(stored.shape), stored.dtype)
    if found != (tuple(wanted.shape), wanted.dtype):
        raise TemplateMismatch(
            f"table {name}, {field}: expected by the template {wanted.dtype}{wanted.shape}, found "
            f"in the step {found or 'no such array'}; ask for what metadata() shows"
        )


def restore_tables(
    saves: Sequence[StoredSave],
    *,
    wanted: Mapping[str, tuple[int, int] | None] | None = None,
    progress: Progress | None = None,
) -> RestoredTables:
    """Reads and merges a chain.

    Args:
      saves: a chain of ``read_chain``.
      wanted: table name to half-open row range, None for all its rows; by default every table.
      progress: called as bytes are read.

    Raises:
      Damaged: an object is missing or altered; it is named.
      StepGone: a step of the chain was removed meanwhile.
      TemplateMismatch: a wanted table or range does not exist.
    """
    started = time.perf_counter()
    target_layout = saves[-1].layout
    rows = _wanted_rows(target_layout, wanted)
    fields, targets = _buffers(target_layout, rows)
    check_complete(saves[0])
    scratch = Staging(_SCRATCH_BYTES)
    with concurrent.futures.ThreadPoolExecutor(_READERS, "deltackpt-read") as pool:
        try:
            work = list(pool.map(lambda save: _pieces(save, targets), saves))
            meter = _Meter(sum(piece.nbytes for pieces in work for piece in pieces), progress)
            for pieces in work:
                for future in [pool.submit(piece.run, meter, scratch) for piece in pieces]:
                    future.result()
        except RestoreError as error:
            pool.shutdown(cancel_futures=True)
            raise_if_removed(saves, error)
            raise
    return RestoredTables(
        fields=fields,
        rows=rows,
        layout=target_layout,
        chain=tuple(save.info for save in saves),
        bytes_read=meter.done,
        seconds=time.perf_counter() - started,
    )


def place(
    fields: Mapping[str, Mapping[str, np.ndarray]], templates: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Puts merged buffers where the template's leaves are: in their shardings, or on the host.

    Args:
      fields: table name to field name to host buffer.
      templates: likewise to the template's leaf; a numpy leaf keeps the buffer as it is.
    """
    return {
        name: {field: _placed(buffer, templates[name][field]) for field, buffer in held.items()}
        for name, held in fields.items()
    }


def _placed(buffer: np.ndarray, template: Any) -> Any:
    if isinstance(template, np.ndarray):
        return buffer
    sharding = getattr(template, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if len(sharding.device_set) == 1:
        # The buffer is ours alone and aligned: the CPU backend may keep it without a copy.
        return jax.device_put(buffer, sharding, may_alias=True)
    return jax.make_array_from_callback(buffer.shape, sharding, lambda index: buffer[index])


def check_template(expected: Layout, save: StoredSave) -> None:
    """Checks that a step holds the tables and slots that a template asks for.

    Raises:
      TemplateMismatch: a table or slot is missing on either side, or differs in shape or dtype.
    """
    step = save.info.save_id.step
    found, wanted = _described(save.layout), _described(expected)
    for name in sorted(found.keys() | wanted.keys()):
        have, want = found.get(name), wanted.get(name)
        if have != want:
            raise TemplateMismatch(
                f"step {step}, {name}: expected by the template {want or 'no such array'}, found "
                f"in the step {have or 'no such array'}; give the state that was saved as the "
                "template, or restore without one"
            )


def _described(target: Layout) -> dict[str, str]:
    groups = {group.name: group for group in target.groups}
    return {
        f"table {table.name}, {spec.name}": f"{spec.dtype}{[table.rows, *spec.trailing]}"
        for table in target.tables
        for spec in groups[table.group].fields
    }


def _wanted_rows(
    target: Layout, wanted: Mapping[str, tuple[int, int] | None] | None
) -> dict[str, tuple[int, int]]:
    tables = {table.name: table for table in target.tables}
    chosen = dict.fromkeys(tables) if wanted is None else dict(wanted)
    rows = {}
    for name, span in chosen.items():
        if name not in tables:
            raise TemplateMismatch(
                f"table {name!r}: expected one of {sorted(tables)}, found no such table in the "
                "step; ask for one of them"
            )
        start, stop = span if span is not None else (0, tables[name].rows)
        if not 0 <= start <= stop <= tables[name].rows:
            raise TemplateMismatch(
                f"table {name!r}: expected a row range within [0, {tables[name].rows}), found "
                f"[{start}, {stop}); ask for rows that the step holds"
            )
        rows[name] = (start, stop)
    return rows


def _buffers(
    target: Layout, rows: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, dict[str, np.ndarray]], list[Target]]:
    groups = {group.name: group for group in target.groups}
    fields: dict[str, dict[str, np.ndarray]] = {}
    targets = []
    for table in target.tables:
        if table.name not in rows:
            continue
        start, stop = rows[table.name]
        fields[table.name] = {}
        for spec in groups[table.group].fields:
            buffer = files.empty_buffer((stop - start, *spec.trailing), codecs.dtype_of(spec.dtype))
            fields[table.name][spec.name] = buffer
            targets.append(
                Target(
                    group=table.group,
                    field=spec.name,
                    rows=(table.offset + start, table.offset + stop),
                    columns=(0, spec.trailing[0] if spec.trailing else 1),
                    buffer=buffer,
                )
            )
    return fields, targets


class _Meter:
    """Counts bytes read, for the progress callback."""

    def __init__(self, total: int, progress: Progress | None):
        self.done = 0
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._progress is not None:
                self._progress(self.done, self._total)


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """Positions ``[start, stop)`` of one field of a segment: within one chunk of its main array."""

    field: _StoredField
    rows: Rows
    start: int
    stop: int
    targets: tuple[Target, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the piece."""
        return sum(
            entry_bytes(entry) * (self.stop - self.start) // max(1, self.field.segment.count)
            for entry in (*self.field.stored.values(), *self.field.beside)
        )

    def run(self, meter: _Meter, scratch: Staging) -> None:
        """Reads, decodes and merges the piece; what is read on the way is in ``scratch``."""
        direct = self._direct_target()
        if direct is not None:
            self._read(self.field.stored[""], direct.view(codecs.stored_dtype(direct.dtype)))
        else:
            self._merge(scratch)
            self._merge_beside()
        meter.add(self.nbytes)

    def _direct_target(self) -> np.ndarray | None:
        """The part of a final buffer that the stored bytes can be read into as they are."""
        if self.field.spec.codec != "raw" or not isinstance(self.rows, range):
            return None
        for target in self.targets:
            first, last = target.rows
            if first <= self.rows.start and self.rows.stop <= last:
                view = target.buffer[self.rows.start - first : self.rows.stop - first]
                width = self.field.stored[""].shape[1:]
                return view if view.shape[1:] == width else None
        return None

    def _merge(self, scratch: Staging) -> None:
        found: dict[str, np.ndarray] = {}
        segment = self.field.segment
        try:
            for entry in self.field.stored.values():
                shape = (self.stop - self.start, *entry.shape[1:])
                found[entry.name] = scratch.take(shape, np.dtype(entry.dtype))
                self._read(entry, found[entry.name])
            block = EncodedBlock(segment.group, self.rows, segment.columns, found)
            merge.apply_encoded(block, [self.field.spec], self.targets)
        finally:
            for buffer in found.values():
                scratch.give_back(buffer)

    def _merge_beside(self) -> None:
        """Rows of the piece that its codec did not hold replace what it made of them."""
        field = self.field
        if not field.beside:
            return
        first, last = np.searchsorted(field.beside_at, (self.start, self.stop))
        if first == last:
            return
        entry = field.beside[0]
        found = np.empty((last - first, *entry.shape[1:]), np.dtype(entry.dtype))
        field.read(entry, int(first), int(last), found)
        rows = np.asarray(self.rows)[field.beside_at[first:last] - self.start]
        values = {field.spec.name: found.view(codecs.dtype_of(field.spec.dtype))}
        block = RowBlock(field.segment.group, rows, field.segment.columns, values)
        merge.apply(block, self.targets)

    def _read(self, entry: ArrayEntry, out: np.ndarray) -> None:
        self.field.read(entry, self.start, self.stop, out)


@dataclasses.dataclass(frozen=True, eq=False)
class _StoredField:
    """One field of a segment: its spec with the codec that it was stored by."""

    save: StoredSave
    process: int
    segment: Segment
    spec: FieldSpec

    @functools.cached_property
    def stored(self) -> dict[str, ArrayEntry]:
        """Codec suffix to the stored array."""
        suffixes = codecs.get(self.spec.codec).stored(
            self.spec.trailing, codecs.dtype_of(self.spec.dtype)
        )
        return {suffix: self._entries[self._name(suffix)] for suffix in suffixes}

    @functools.cached_property
    def beside(self) -> tuple[ArrayEntry, ...]:
        """The rows that the codec did not hold, and their positions; empty where there are none."""
        if codecs.get(self.spec.codec).lossless:
            return ()
        names = [self._name(suffix) for suffix in (codecs.BESIDE, codecs.BESIDE_AT)]
        return tuple(self._entries[name] for name in names if name in self._entries)

    @functools.cached_property
    def beside_at(self) -> np.ndarray:
        """Positions in the segment, ascending, of the rows that the codec did not hold."""
        entry = self.beside[1]
        out = np.empty(entry.shape, np.dtype(entry.dtype))
        self.read(entry, 0, entry.shape[0], out)
        return out

    @functools.cached_property
    def _entries(self) -> dict[str, ArrayEntry]:
        return {entry.name: entry for entry in self.segment.arrays}

    def _name(self, suffix: str) -> str:
        return codecs.array_name(self.spec.name, suffix)

    def read(self, entry: ArrayEntry, start: int, stop: int, out: np.ndarray) -> None:
        """Reads rows of one of the arrays."""
        self.save.read_array(self.process, self.segment, entry, start, stop, out)


def _pieces(save: StoredSave, targets: Sequence[Target]) -> list[_Piece]:
    """The work of one save, in pieces of different rows."""
    found = []
    for record in save.manifests:
        groups = record.group_by_name
        for segment in record.segments:
            specs = {spec.name: spec for spec in groups[segment.group].fields}
            for field in segment.fields:
                chosen = tuple(t for t in targets if (t.group, t.field) == (segment.group, field))
                if chosen:
                    stored = _StoredField(save, record.process, segment, segment.spec(specs[field]))
                    found += _field_pieces(stored, record, chosen)
    return found


def _field_pieces(
    stored: _StoredField, record: Manifest, targets: tuple[Target, ...]
) -> Iterator[_Piece]:
    chunk_rows = stored.stored[""].chunk_rows
    for rows, first in _runs(stored.save, record, stored.segment):
        spans = [blocks.row_slice(rows, *target.rows) for target in targets]
        for start, stop in _merged(spans):
            while start < stop:
                position = first + start
                chunk_end = (position // chunk_rows + 1) * chunk_rows - first
                end = min(stop, chunk_end)
                yield _Piece(stored, rows[start:end], position, first + end, targets)
                start = end


def _runs(save: StoredSave, record: Manifest, segment: Segment) -> Iterator[tuple[Rows, int]]:
    """(virtual rows, position of the first) of a segment's ranges, or of its gap-coded rows."""
    if segment.ranges is None:
        yield _read_rows(save, record, segment), 0
        return
    position = 0
    for start, stop in segment.ranges:
        yield range(start, stop), position
        position += stop - start


def _merged(spans: Sequence[slice]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((span.start, span.stop) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return merged


def _read_rows(save: StoredSave, record: Manifest, segment: Segment) -> np.ndarray:
    """The touched rows of a segment, checked against its group."""
    entry = next(entry for entry in segment.arrays if entry.name == layout.GAPS)
    out = np.empty(entry.shape, np.dtype(entry.dtype))
    save.read_array(record.process, segment, entry, 0, entry.shape[0], out)
    name = f"{save.step_dir.name}/{save.item}/part.{record.process}/{segment.name}/{entry.name}"
    total = record.group_by_name[segment.group].rows
    return gaps.decode_gaps(out, total_rows=total, name=name)
