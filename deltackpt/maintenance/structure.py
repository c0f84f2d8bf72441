# SPDX-License-Identifier: Apache-2.0
"""Checks that the records of a save are consistent, and cover every row once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltackpt import codecs
from deltackpt.format import naming, row_blocks
from deltackpt.format.manifest import Manifest
from deltackpt.format.row_blocks import PLAIN, FieldSpec, GroupEntry, Segment, Span, width
from deltackpt.layers import row_indices
from deltackpt.reading import bounds, stored_dense
from deltackpt.reading.shard_arrays import ZarrArrays
from deltackpt.reading.stored_dense import DenseShard
from deltackpt.reading.stored_saves import StoredSave, StoredShard
from deltackpt.resources import host_memory


def structure_problems(save: StoredSave) -> Iterator[tuple[str, str, str]]:
    """Yields inconsistencies of a save's records: (path in the item's directory, expected, found).

    The save's files must match its digests: row indices are read from them.
    """
    shards = save.shards()
    bounds.check_paths(save.layout, save.name)
    yield from _disagreements(save.head, [shard.record for shard in shards])
    held: dict[tuple[str, str], list[tuple[Span | None, row_blocks.Rows]]] = {}
    for shard in shards:
        for segment in shard.record.segments:
            place = f"{naming.shard_dir(Path(), shard.record.process)}/{segment.name}"
            wrong = list(_segment_problems(shard, segment))
            yield from ((f"{place}{below}", wanted, found) for below, wanted, found in wrong)
            if not wrong:
                rows = row_indices.segment_rows(shard, segment)
                group = shard.groups[segment.group]
                for spec in group.fields:
                    if spec.name in segment.fields:
                        split = group.columns(spec) is not None
                        columns = segment.columns if split else None
                        held.setdefault((group.name, spec.name), []).append((columns, rows))
    for group in save.head.groups:
        yield from _coverage_problems(save.head, group, held)
    if save.head.dense_blocks is not None:
        for shard, dense_shard in zip(save.shards(), stored_dense.shards(save), strict=True):
            yield from _dense_problems(shard, dense_shard)


def _disagreements(head: Manifest, records: Sequence[Manifest]) -> Iterator[tuple[str, str, str]]:
    """Inconsistencies between the records of several processes."""
    for record in records:
        name = naming.manifest_name(record.process)
        for field in ("save_id", "kind", "parent", "process_count", "restores", "plan_crc32c"):
            wanted, found = getattr(head, field), getattr(record, field)
            if wanted != found:
                yield name, f"{field} {wanted} as in the record of process 0", f"{field} {found}"
    for shard, record in zip(head.shards, records, strict=False):
        name = naming.manifest_name(shard.process)
        if record.process != shard.process:
            yield name, f"the shard of process {shard.process}", f"that of {record.process}"
        if shard.nbytes != (own := _own_bytes(record)):
            yield name, f"{shard.nbytes} bytes of arrays as in the index", f"{own}"
        if shard.covers != record.covers:
            yield name, "the covers in the index", "others"
    if head.shards:
        for group in head.groups:
            wanted = group.rows * sum(width(spec.trailing) for spec in group.fields)
            found = sum(record.owned_cells.get(group.name, 0) for record in records)
            if found != wanted:
                name = naming.manifest_name(0)
                yield name, f"{wanted} cells of {group.name} in all shards", f"{found}"


def _own_bytes(record: Manifest) -> int:
    return dataclasses.replace(record, shards=()).nbytes


def _dense_problems(shard: StoredShard, dense_shard: DenseShard) -> Iterator[tuple[str, str, str]]:
    """Inconsistencies in the blocks of dense leaves that a process wrote."""
    held: dict[str, list[row_blocks.Rows]] = {}
    folder = naming.shard_dir(Path(), shard.record.process)
    for segment in dense_shard.record.segments:
        wrong = list(_segment_problems(shard, segment))
        for below, wanted, found in wrong:
            yield f"{folder}/{segment.name}{below}", wanted, found
        if wrong:
            continue
        if segment.group != PLAIN:
            codec = dense_shard.field_of(segment).codec
            if dense_shard.record.complete and codec.relative:
                yield f"{folder}/{segment.name}", "blocks without a reference", codec.name
            held.setdefault(segment.group, []).append(dense_shard.rows(segment))
        elif segment.count != (total := row_blocks.plain_bytes(dense_shard.record)):
            yield f"{folder}/{segment.name}", f"{total} bytes of plain values", f"{segment.count}"
    for group, rows in held.items():
        if twice := _rows_in_two(*row_blocks.sorted_spans(rows)):
            yield f"{folder}", f"each block of {group} in one segment", f"{twice} in two"


def _segment_problems(shard: StoredShard, segment: Segment) -> Iterator[tuple[str, str, str]]:
    """Inconsistencies within a segment: (path, what was expected, what was found)."""
    shard.check(segment)  # The number of chunks.
    for entry in segment.arrays:
        if isinstance(shard.arrays, ZarrArrays):
            for chunk in shard.arrays.missing(segment, entry):
                yield f"/{entry.name}/{chunk}", "a chunk with a digest", "none"
        if entry.name.endswith(f".{codecs.RAW_POSITIONS}"):
            at = host_memory.empty_buffer(entry.shape, np.dtype(entry.dtype))
            shard.read_into(segment, entry, 0, len(at), at)
            if len(at) and (at[0] < 0 or at[-1] >= segment.count or np.any(np.diff(at) <= 0)):
                yield f"/{entry.name}", f"ascending positions below {segment.count}", f"{at[:4]}"


def _coverage_problems(
    head: Manifest,
    group: GroupEntry,
    held: Mapping[tuple[str, str], Sequence[tuple[Span | None, row_blocks.Rows]]],
) -> Iterator[tuple[str, str, str]]:
    """Rows that are missing in all segments, and rows that are in two."""
    for spec in group.fields:
        found = held.get((group.name, spec.name), [])
        for columns, rows in _by_columns(group, spec, found):
            starts, stops, reached = row_blocks.sorted_spans(rows)
            twice = _rows_in_two(starts, stops, reached)
            missing = group.rows - (sum(map(len, rows)) - twice)
            name = f"{group.name}.{spec.name}, columns [{columns[0]}, {columns[1]})"
            if twice:
                yield name, "each row in one segment", f"{twice} rows in two"
            if (head.kind == "base" or spec.always) and missing:
                holes = reached[:-1][starts > reached[:-1]]
                first = int(holes[0] if len(holes) else reached[-1])
                text = f"{missing} rows in none, the first of them {first}"
                yield name, f"all {group.rows} rows", text


def _rows_in_two(starts: np.ndarray, stops: np.ndarray, reached: np.ndarray) -> int:
    return int(np.maximum(0, np.minimum(stops, reached[:-1]) - starts).sum())


def _by_columns(
    group: GroupEntry, spec: FieldSpec, found: Sequence[tuple[Span | None, row_blocks.Rows]]
) -> Iterator[tuple[Span, list[row_blocks.Rows]]]:
    """The columns of a field, cut at the bounds of segments, with the rows of each."""
    whole = group.columns(spec) or (0, 1)
    spans = [columns or whole for columns, _ in found]
    cuts = sorted({*whole, *(bound for span in spans for bound in span)})
    for first, last in itertools.pairwise(cuts):
        yield (
            (first, last),
            [
                rows
                for span, (_, rows) in zip(spans, found, strict=True)
                if span[0] <= first and last <= span[1]
            ],
        )
