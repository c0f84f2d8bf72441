# SPDX-License-Identifier: Apache-2.0
"""Checks what the records of a save claim, before memory is allocated for it. No I/O, no jax.

Anyone who can write to a directory can write records with valid checksums.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from deltackpt import codecs, vocab
from deltackpt.errors import Damaged, FormatTooNew, OptionError
from deltackpt.format import dtypes as format_dtypes
from deltackpt.format import manifest, naming, records, row_blocks
from deltackpt.format.manifest import KeyPath, Layout, Manifest
from deltackpt.format.records import MOST, MOST_AXES, MOST_ZSTD_RATIO, InvalidRecord, require
from deltackpt.format.row_blocks import ArrayEntry, Encoding, FieldSpec, GroupEntry, Segment
from deltackpt.layers.footer import GAPS_DTYPES

if TYPE_CHECKING:
    from deltackpt.format.wal_format import EpochHeader

#: Rows as wide as that gain from every codec: whether one fits is then a matter of the dtype.
_WIDE = (1024,)
_sound: records.IdentityCache[None] = records.IdentityCache(records.KEPT_FIELDS)
#: Shorter lists may have as many holes as they like; all others together at most that many places.
_SHORT_LIST, _MOST_PLACES = 1024, 1 << 24


def check_head(head: Manifest, name: str) -> None:
    """Checks what the manifest of process 0 claims about the save as a whole.

    Raises Damaged if no valid save has this manifest, and FormatTooNew if a codec is not known.
    """
    with records.as_damage(name):
        require(head.process == 0, "the manifest of process 0", head.process, "process")
        check_tables(head, name)
        groups = head.group_by_name
        for shard in head.shards:
            _check_covers(shard, head, groups)
    check_shard(head, head, name)
    if not head.shards and head.kind == "base":
        _check_whole(head, name)


def check_shard(record: Manifest, head: Manifest, name: str) -> None:
    """Checks a manifest of a process's shard against process 0's; raises as ``check_head`` does."""
    groups = head.group_by_name
    tables = collections.Counter(table.group for table in head.tables)
    for segment in record.segments:
        check_segment(segment, groups, tables, name)


def check_segment(
    segment: Segment, groups: Mapping[str, GroupEntry], tables: Mapping[str, int] | None, name: str
) -> None:
    """Checks a segment of a shard or WAL record against the groups; raises as ``check_head`` does.

    ``tables`` has each group's number of tables; None if the segment has no statistics per table.
    """
    with records.as_damage(name), records.within(f"segment {segment.name}"):
        require(segment.group in groups, f"a group of {sorted(groups)}", segment.group)
        group = groups[segment.group]
        specs = _checked_fields(segment, group, name)
        _check_rows(segment, group)
        if tables is not None:
            for encoding in segment.encodings:
                _check_encoding(encoding, segment, tables[group.name])
        _check_arrays(segment, specs)


def check_tables(head: Manifest | EpochHeader, name: str) -> None:
    """Checks what a record claims about groups and tables; raises as ``check_head`` does."""
    with records.as_damage(name):
        _sound.get(lambda: _check_tables(head, name), head.groups, head.tables)


def check_chunks(entry: ArrayEntry, chunk_bytes: int, lengths: Collection[int], name: str) -> None:
    """Raises Damaged if the lengths of an array's chunk files do not fit the manifest's claims.

    ``chunk_bytes`` is the uncompressed size of a chunk, including the checksum.
    """
    count = -(-entry.shape[0] // entry.chunk_rows)
    if len(lengths) != count:
        raise Damaged(name, f"digests of {count} chunks", f"{len(lengths)}")
    for length in lengths:
        check_chunk(entry, chunk_bytes, length, name)


def check_chunk(entry: ArrayEntry, chunk_bytes: int, length: int, name: str) -> None:
    """Raises Damaged if the file of a chunk is too short for its contents."""
    if not entry.compressed and length != chunk_bytes:
        raise Damaged(name, f"{chunk_bytes} bytes", f"{length} bytes")
    if entry.compressed and length * MOST_ZSTD_RATIO < chunk_bytes:
        raise Damaged(name, f"a compressed chunk of {chunk_bytes} bytes", f"{length} bytes")


def check_paths(target: Layout, name: str) -> None:
    """Checks that key paths form one tree of bounded size, if nothing else is known.

    Raises Damaged if a leaf is inside another one, or lists would consist mostly of holes.
    """
    paths = set(manifest.key_paths(target))
    lengths: dict[KeyPath, int] = {}
    for path in paths:
        for depth, (kind, key) in enumerate(path):
            above = path[:depth]
            if above in paths:
                found = f"{manifest.path_name(path)} within {manifest.path_name(above)}"
                raise Damaged(name, "leaves side by side", found)
            if kind == "seq" and isinstance(key, int) and key >= _SHORT_LIST:
                lengths[above] = max(key, lengths.get(above, 0))
    if (places := sum(lengths.values())) > _MOST_PLACES:
        raise Damaged(name, f"lists of at most {_MOST_PLACES} places", f"{places}")


def stored_fields(segment: Segment, group: GroupEntry) -> list[str]:
    """Returns the fields of a segment that have arrays: tombstones have none.

    A base must store all rows, so that nobody can claim more than its files may hold.
    """
    return [
        field
        for field in segment.fields
        if not codecs.is_constant(segment.spec(group, field).codec)
    ]


def _check_groups(head: Manifest | EpochHeader, name: str) -> None:
    names = [group.name for group in head.groups]
    require(len({*names}) == len(names), "groups of different names", names, "groups")
    for group in head.groups:
        place = f"groups.{group.name}"
        fields = [spec.name for spec in group.fields]
        slots = [field for field in fields if field != row_blocks.VALUES]
        sound = all(field.startswith(row_blocks.slot_field("")) for field in slots)
        sound = sound and len({*slots}) == len(slots) == len(fields) - 1
        expected = "the fields values and slot.<name>, each once"
        require(sound, expected, fields, f"{place}.fields")
        require(0 < group.rows, "a row or more", group.rows, f"{place}.rows")
        row_bytes = 0
        for spec in group.fields:
            _check_spec(spec, name, f"{place}.{spec.name}")
            itemsize = codecs.dtype_of(spec.dtype).itemsize
            # A table has columns; a slot may have none.
            row_bytes += max(1, math.prod(spec.trailing)) * itemsize
        for spec in (spec for spec in group.fields if spec.key):
            dtype = codecs.dtype_of(spec.dtype)
            fault = vocab.column_fault((group.rows, *spec.trailing), dtype)
            require(fault is None, "a key column", f"{fault}", f"{place}.{spec.name}")
        keys = [spec.name for spec in group.fields if spec.key]
        require(len(keys) <= 1, "at most one key column", keys, f"{place}.fields")
        require(group.width > 0, "a column or more", group.width, f"{place}.{row_blocks.VALUES}")
        nbytes = group.rows * row_bytes
        require(nbytes <= MOST, f"at most {MOST} bytes", nbytes, place)


def _check_spec(spec: FieldSpec, name: str, place: str) -> None:
    require(not codecs.is_constant(spec.codec), "a codec with arrays", spec.codec, place)
    known = format_dtypes.is_known(spec.dtype)
    require(known, f"one of {sorted(format_dtypes.DTYPES)}", spec.dtype, place)
    require(len(spec.trailing) < MOST_AXES, "fewer axes", spec.trailing, place)
    _check_codec(spec, name)


def _check_codec(spec: FieldSpec, name: str) -> None:
    try:
        fault = _codec_fault(spec.codec, spec.dtype)
    except OptionError:
        raise FormatTooNew(
            f"{name}: expected codecs among {codecs.names()}, found {[spec.codec]}; "
            "install the newer deltackpt that wrote it"
        ) from None
    if fault:
        raise InvalidRecord(f"a codec for {spec.dtype}", f"{spec.codec} ({fault})", spec.name)


@functools.lru_cache(256)
def _codec_fault(name: str, dtype: str) -> str:
    """Returns why a codec cannot store rows of a dtype, or ""; OptionError if it is unknown."""
    codec = codecs.parse_codec(name)
    try:
        codec.check(_WIDE, codecs.dtype_of(dtype))
    except OptionError as error:
        return str(error)
    return ""


def _check_tables(head: Manifest | EpochHeader, name: str) -> None:
    _check_groups(head, name)
    groups = head.group_by_name
    names = [table.name for table in head.tables]
    require(len({*names}) == len(names), "tables of different names", names, "tables")
    ends = dict.fromkeys(groups, 0)
    for table in sorted(head.tables, key=lambda table: table.offset):
        place = f"tables.{records.shown(table.name)}"
        require(table.group in groups, f"a group of {sorted(groups)}", table.group, place)
        end = ends[table.group]
        require(table.offset == end, f"offset {end}", table.offset, place)
        require(0 < table.rows, "a row or more", table.rows, place)
        fields = {spec.name for spec in groups[table.group].fields}
        require(table.leaves.keys() == fields, f"leaves {sorted(fields)}", [*table.leaves], place)
        ends[table.group] = end + table.rows
    for group in head.groups:
        end = ends[group.name]
        require(end == group.rows, f"{group.rows} rows of {group.name}", end)


def _check_covers(
    shard: manifest.ShardEntry, head: Manifest, groups: Mapping[str, GroupEntry]
) -> None:
    for cover in shard.covers:
        place = f"shards[{shard.process}].covers"
        require(cover.group in groups, f"a group of {sorted(groups)}", cover.group, place)
        require(len(cover.tables) <= len(head.tables), "spans of tables", cover.tables, place)


def _checked_fields(segment: Segment, group: GroupEntry, name: str) -> list[FieldSpec]:
    """Returns the spec of each field of a segment."""
    known = [spec.name for spec in group.fields]
    fields = segment.fields
    require(len({*fields}) == len(fields), "fields of different names", fields, "fields")
    require({*fields} <= {*known}, f"fields among {known}", fields, "fields")
    first, last = segment.columns
    expected = f"columns within [0, {group.width})"
    require(first < last <= group.width, expected, f"[{first}, {last})", "columns")
    found = [segment.spec(group, field) for field in fields]
    for spec in found:
        _check_codec(spec, name)
    return found


def _check_rows(segment: Segment, group: GroupEntry) -> None:
    require(segment.count <= group.rows, f"at most {group.rows} rows", segment.count, "count")
    if segment.ranges is not None:
        end = segment.ranges[-1][1] if segment.ranges else 0
        expected = f"ascending ranges within [0, {group.rows})"
        require(end <= group.rows, expected, f"one up to {end}", "ranges")
        held = sum(stop - start for start, stop in segment.ranges)
        require(held == segment.count, f"{segment.count} rows", f"ranges of {held}", "ranges")
        # Otherwise a few bytes could claim any number of rows.
        stored = stored_fields(segment, group)
        require(len(stored) == len(segment.fields), "row indices of tombstones", "ranges", "ranges")


def _check_encoding(encoding: Encoding, segment: Segment, tables: int) -> None:
    place = f"encodings.{encoding.field}"
    if encoding.field not in segment.fields:
        place = f"encodings.{records.shown(encoding.field)}"
        raise InvalidRecord(f"one of {segment.fields}", encoding.field, place)
    for figures in (encoding.rows, encoding.squared_error, encoding.squared_norm):
        if len(figures) != tables:
            raise InvalidRecord(f"figures of {tables} tables", len(figures), place)
        # NaN sums of squares are allowed: a NaN in training is not damage.
        if any(figure < 0 for figure in figures):
            raise InvalidRecord("figures of 0 or more", figures, place)


def _check_arrays(segment: Segment, specs: Collection[FieldSpec]) -> None:
    """Checks that a segment has the arrays of its codecs, and at most raw rows beside them."""
    entries = {entry.name: entry for entry in segment.arrays}
    require(len(entries) == len(segment.arrays), "arrays of different names", [*entries], "arrays")
    known = set()

    # A chain has many thousands of arrays, so errors are described only if there are any.
    def check(
        name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], byte_planes: bool = False
    ) -> None:
        known.add(name)
        if name not in entries:
            raise InvalidRecord(f"an array {name}", "none in the manifest")
        _check_array(entries[name], shape, dtypes, byte_planes)

    if segment.ranges is None:
        check(naming.GAPS, (segment.count,), GAPS_DTYPES)
    for spec in specs:
        stored, lossless = _stored_arrays(spec.codec, spec.trailing, spec.dtype)
        for suffix, trailing, dtype, byte_planes in stored:
            name = codecs.array_name(spec.name, suffix)
            check(name, (segment.count, *trailing), (dtype,), byte_planes)
        if lossless:
            continue
        rows, at = (
            codecs.array_name(spec.name, suffix)
            for suffix in (codecs.RAW_ROWS, codecs.RAW_POSITIONS)
        )
        if not (rows in entries or at in entries):
            continue
        require(rows in entries and at in entries, f"both {rows} and {at}, or none", "one")
        count = entries[at].shape[0]
        require(count <= segment.count, f"at most {segment.count} rows", count, rows)
        dtype = codecs.stored_dtype(codecs.dtype_of(spec.dtype)).name
        check(rows, (count, *spec.trailing), (dtype,))
        check(at, (count,), ("int64",))
    if not entries.keys() <= known:
        raise InvalidRecord(f"arrays {sorted(known)}", sorted(entries), "arrays")


@functools.lru_cache(256)
def _stored_arrays(
    name: str, trailing: tuple[int, ...], dtype: str
) -> tuple[list[tuple[str, tuple[int, ...], str, bool]], bool]:
    """Returns suffix, trailing shape, dtype and ``byte_planes`` of a codec's arrays of a field.

    Also returns whether the codec is lossless.
    """
    codec = codecs.parse_codec(name)
    stored = codec.stored(trailing, codecs.dtype_of(dtype)).items()
    found = [(suffix, one.trailing, one.dtype.name, one.byte_planes) for suffix, one in stored]
    return found, codec.lossless


def _check_array(
    entry: ArrayEntry, shape: tuple[int, ...], dtypes: tuple[str, ...], byte_planes: bool
) -> None:
    place = f"arrays.{entry.name}"
    if entry.shape != shape:
        raise InvalidRecord(f"shape {shape}", f"shape {entry.shape}", place)
    if entry.dtype not in dtypes:
        raise InvalidRecord(f"dtype {' or '.join(dtypes)}", entry.dtype, place)
    if entry.byte_planes != byte_planes:
        raise InvalidRecord(f"byte_planes {byte_planes}", "another", place)


def _check_whole(head: Manifest, name: str) -> None:
    """Checks that the one shard of a base has as many cells of each field as its group."""
    for group in head.groups:
        for spec in group.fields:
            whole = group.columns(spec) or (0, 1)
            held = 0
            for segment in head.segments:
                if segment.group == group.name and spec.name in stored_fields(segment, group):
                    split = group.columns(spec) is not None
                    first, last = segment.columns if split else whole
                    held += segment.count * (last - first)
            cells = group.rows * (whole[1] - whole[0])
            if held < cells:
                expected = f"all {group.rows} rows of {group.name}.{spec.name}"
                raise Damaged(name, expected, f"{held} of {cells} cells")
            if held > cells:
                expected = f"each row in one segment of {group.name}.{spec.name}"
                raise Damaged(name, expected, f"{held} cells of {cells}")
