# SPDX-License-Identifier: Apache-2.0
"""Manifests: frozen records of what a save holds, their encoding and statistics. No I/O, no JAX.

``docs/reference/format.md`` specifies them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import google_crc32c
import numpy as np

from deltackpt.format import records, row_blocks
from deltackpt.format.naming import Leaf, PyTree
from deltackpt.format.records import (
    InvalidRecord,
    check_save_id,
    check_segment,
    is_name,
    require,
)
from deltackpt.format.row_blocks import DenseBlocks, Encoding, FieldSpec, GroupEntry, Segment

if TYPE_CHECKING:
    from deltackpt.format.wal_format import EpochHeader

#: What the bytes of a manifest begin with.
MAGIC = "deltackpt.manifest"
#: Features that a reader must know to read a step; unknown ones raise FormatTooNew.
KNOWN_FEATURES: frozenset[str] = frozenset({"encodings", "shards", "dense_blocks", "layers"})
#: Required unless everything is stored ``raw``: rows may be stored next to their codes.
ENCODINGS = "encodings"
#: Required for saves by several processes: only process 0's manifest describes the tables.
SHARDS = "shards"
#: Required for deltas whose dense leaves are in our item, complete or relative to the parent's.
DENSE_BLOCKS = "dense_blocks"
#: Required for deltas whose arrays are in a layer file.
LAYERS = "layers"

#: Fields that are the same in all saves of a run, and large where there are many tables.
_SHARED: records.Shared = {
    **dict.fromkeys(("groups", "tables", "dense", "tracking_paths", "writers")),
    "dense_blocks": (DenseBlocks, {"values": None, "segments": None}),
}
#: Fields of manifests that development versions did not write, or wrote under other names. They
#: also gave the files of bases other names.
_SINCE_DEVELOPMENT = frozenset({"files", "shards"})
_Key = TypeVar("_Key")
_sound: records.IdentityCache[None] = records.IdentityCache(records.KEPT_FIELDS)

#: Most entries of ``Manifest.parents``, all of which a restore reads ahead at once.
MOST_PARENTS = 64
#: Kinds of the steps of a key path.
_PATH_KINDS = ("dict", "seq", "attr", "flat")
Kind = Literal["base", "delta"]
#: How a save found the touched rows; "" if nothing tracked them.
TrackingName = Literal["touched", "fingerprints", ""]
#: One typed step of a key path: ("dict", key), ("seq", index), ("attr", name) or ("flat", index).
KeyEntry = tuple[str, str | int]
KeyPath = tuple[KeyEntry, ...]


@dataclasses.dataclass(frozen=True, order=True)
class SaveId:
    """Identity of one save: no two saves ever share one."""

    run: str
    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.run[:8]}/{self.step}/{self.attempt}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParentRef:
    """The parent of a delta, and the name of its step directory beside the delta's own."""

    save_id: SaveId
    step_dir: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseRef:
    """A compacted base: the save that it replaces, and the bytes of its arrays."""

    save_id: SaveId
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table: its position in its group, and field name to the key path of its leaf.

    A leaf of a field with trailing shape t has shape (rows, *t).
    """

    name: str
    group: str
    offset: int
    rows: int
    leaves: dict[str, KeyPath]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseEntry:
    """A leaf that is neither table nor slot: its key path in the state and its dense item key."""

    path: KeyPath
    key: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tables, their groups and the dense leaves of one state; equal for equal states.

    Groups are named ``g0``, ``g1``, ... in the order of their first table; tables are in the order
    of their names. ``dense`` is every leaf that is neither table nor slot nor TouchState. Codecs
    are not part of the layout: each save plans its own.
    """

    groups: tuple[GroupEntry, ...]
    tables: tuple[TableEntry, ...]
    dense: tuple[DenseEntry, ...]
    tracking_paths: tuple[KeyPath, ...]

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}

    def has_rows_of(self, other: Layout) -> bool:
        """Returns whether another layout has the same tables and slots, by name.

        The containers around them may differ: a state imported as plain dicts is restored into a
        ``TrainState``.
        """
        return self.groups == other.groups and [_table_by_name(table) for table in self.tables] == [
            _table_by_name(table) for table in other.tables
        ]

    def new_rows_since(self, parent: Layout) -> dict[str, range] | None:
        """Returns table name to the rows that were appended since the parent's layout.

        None if the layouts differ in anything else. A table that another one follows in its group
        cannot grow, since that would move the other one.
        """
        if self == parent:
            return {}
        tables = [*zip(parent.tables, self.tables)]
        if _without_rows(parent) != _without_rows(self) or any(a.rows > b.rows for a, b in tables):
            return None
        return {b.name: range(a.rows, b.rows) for a, b in tables if a.rows < b.rows}


def _without_rows(layout: Layout) -> Layout:
    return dataclasses.replace(
        layout,
        groups=tuple(dataclasses.replace(group, rows=0) for group in layout.groups),
        tables=tuple(dataclasses.replace(table, rows=0) for table in layout.tables),
    )


def _table_by_name(table: TableEntry) -> tuple[object, ...]:
    leaves = {field: path_name(path) for field, path in table.leaves.items()}
    return table.name, table.group, table.offset, table.rows, leaves


#: A share of the rows of each table is counted in these.
WHOLE_SHARE = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cover:
    """The region of a group that contains a shard's rows, not necessarily all of the region.

    ``tables`` are ranges of table numbers, in the order of their offsets. ``share`` is the range of
    rows within each of them, in units of ``rows / WHOLE_SHARE``; ``columns`` are those of fields as
    wide as the table. The size of a cover does not grow with the number of tables if a mesh shards
    all of them alike.
    """

    group: str
    tables: tuple[tuple[int, int], ...]
    share: tuple[int, int]
    columns: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRef:
    """The layer file with the arrays of a shard.

    ``digest`` is its last four bytes as a little-endian number; ``crc32c`` covers all bytes before.
    """

    nbytes: int
    crc32c: int
    digest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """Process 0's index entry for a shard: its manifest's CRC32C (0 in its own) and its covers.

    ``nbytes`` counts its arrays before any compression.
    """

    process: int
    crc32c: int
    nbytes: int
    covers: tuple[Cover, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One process's share of a save: its shard.

    With several processes, process 0's manifest is written last and describes all: only it contains
    ``groups``, ``tables``, ``dense`` and ``tracking_paths``.
    """

    kind: Kind
    save_id: SaveId
    parent: ParentRef | None
    reason: str
    process: int
    process_count: int
    groups: tuple[GroupEntry, ...]
    tables: tuple[TableEntry, ...]
    segments: tuple[Segment, ...]
    dense: tuple[DenseEntry, ...] = ()
    tracking_paths: tuple[KeyPath, ...] = ()
    #: Which digest files were promised: "item", and "step" under our own commit. "dense" in a
    #: compacted base whose item contains Orbax's dense files: its item digests cover them.
    digests: tuple[str, ...] = ("item",)
    #: CRC32C of the bytes of this shard's ``digests.<process>.msgpack``; 0 if it has a layer.
    item_digests_crc32c: int = 0
    #: The layer file with its arrays; None if they are Zarr arrays, as in a base.
    layer: LayerRef | None = None
    #: The step's digests in process 0's manifest of a delta under our own commit, by path below the
    #: step: length, CRC32C and tail of ``storage.digests.Digest``. Bases have a file of them.
    files: dict[str, tuple[int, int, int]]
    writers: dict[str, str] = dataclasses.field(default_factory=dict)
    #: How often the run had been restored before, itself included.
    restores: int = 0
    #: The newest compacted base that process 0 knew of when it wrote this.
    compacted: BaseRef | None = None
    #: Names of the step directories that a restore reads too, the parent's first, at most
    #: ``MOST_PARENTS``: for reading ahead, and no more; ``parent`` is the truth. Process 0's alone.
    parents: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    #: CRC32C of what the process takes the tables to be, and of the codecs that it planned.
    plan_crc32c: int = 0
    #: In a base: group to the cells (rows times columns, all fields) that this process writes.
    owned_cells: dict[str, int] = dataclasses.field(default_factory=dict)
    covers: tuple[Cover, ...] = ()
    #: Checksums of the touched rows in stamp shards that others hold, too; empty in process 0's.
    shared_stamps: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Every shard, by process; only in process 0's manifest, for several processes.
    shards: tuple[ShardEntry, ...]
    #: The dense leaves, if they are stored in this item; in deltas, for each shard its own.
    dense_blocks: DenseBlocks | None = None
    #: Bytes of the dense leaves of a base, against which deltas have theirs as blocks; 0 elsewhere.
    dense_bytes: int = 0
    #: How the manager found touched rows. Process 0's alone.
    tracking: TrackingName = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, before any compression; of all shards if it describes them.

        Excludes complete dense leaves: every save has them, and a restore reads only the newest.
        """
        if self.shards:
            return sum(shard.nbytes for shard in self.shards)
        held = self.dense_blocks
        dense = () if held is None or held.complete else held.segments
        segments = (*self.segments, *dense)
        return self.dense_bytes + sum(entry.nbytes for one in segments for entry in one.arrays)

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}


def cover(
    group: GroupEntry,
    tables: Iterable[TableEntry],
    rows: range | row_blocks.Ranges,
    columns: Iterable[tuple[int, int]],
) -> Cover:
    """Returns the region of some virtual rows (at least one) and columns of a group."""
    held, low, high = [], WHOLE_SHARE, 0
    for number, table in enumerate(tables_of_group(group, tables)):
        piece = rows[row_blocks.row_slice(rows, table.offset, table.offset + table.rows)]
        if len(piece):
            spans = row_blocks.spans_of(piece)
            first, last = spans[0][0] - table.offset, spans[-1][1] - table.offset
            low = min(low, first * WHOLE_SHARE // table.rows)
            high = max(high, -(-last * WHOLE_SHARE // table.rows))
            held.append((number, number + 1))
    spans = list(columns)
    return Cover(
        group=group.name,
        tables=row_blocks.joined(held),
        share=(low, high),
        columns=(min(first for first, _ in spans), max(last for _, last in spans)),
    )


def path_name(path: KeyPath) -> str:
    """Returns a path as a string: its components joined with '/'."""
    return "/".join(str(step) for _, step in path)


def plan_crc32c(record: Manifest) -> int:
    """Returns the CRC32C of what all processes must agree on: tables, groups, codecs, leaves."""
    names = ("groups", "tables", "dense", "tracking_paths")
    return google_crc32c.value(records.packed({name: getattr(record, name) for name in names}))


def tables_of_group(group: GroupEntry, tables: Iterable[TableEntry]) -> list[TableEntry]:
    """Returns a group's tables by offset, in the order of ``Encoding``'s figures."""
    return sorted((t for t in tables if t.group == group.name), key=lambda t: t.offset)


def with_codecs(
    groups: Iterable[GroupEntry], codec_of: Callable[[GroupEntry, FieldSpec], str]
) -> tuple[GroupEntry, ...]:
    """Returns the groups with other codecs for their fields."""
    return tuple(
        dataclasses.replace(
            group,
            fields=tuple(
                dataclasses.replace(spec, codec=codec_of(group, spec)) for spec in group.fields
            ),
        )
        for group in groups
    )


#: Fields that are the same objects in all saves of a layout.
_CACHED = frozenset({"tables", "dense", "tracking_paths"})


def to_bytes(record: Manifest) -> bytes:
    """Encodes a manifest with its checksum."""
    return records.to_bytes(record, MAGIC, _CACHED)


def from_bytes(data: bytes, *, name: str) -> Manifest:
    """Decodes a manifest, which ``name`` names in errors.

    Raises Damaged, FormatTooNew or FormatTooOld (a development version wrote it).
    """
    record = records.from_bytes(
        data,
        Manifest,
        name=name,
        magic=MAGIC,
        known_features=KNOWN_FEATURES,
        shared=_SHARED,
        since_development=_SINCE_DEVELOPMENT,
    )
    with records.as_damage(name):
        _check(record)
    return record


def _check(record: Manifest) -> None:
    """Checks a manifest on its own; ``bounds`` checks it against its groups."""
    _check_ids(record)
    is_base = record.kind == "base"
    require(is_base == (record.layer is None), "a layer if it is a delta", record.layer, "layer")
    if is_base:
        require(record.dense_blocks is None, "dense leaves in Orbax's item", "blocks")
    named = record.tables, record.dense, record.tracking_paths
    _sound.get(lambda: check_paths(record), *named)
    for number, segment in enumerate(record.segments):
        try:  # A context would take as long as the check itself.
            check_segment(segment)
        except InvalidRecord as error:
            raise error.within(f"segments[{number}]") from None
    with records.within("files"):
        records.check_files(record.files)
    if (dense := record.dense_blocks) is not None:
        # Equal records share their fields, and those of whole leaves are equal in all saves.
        with records.within("dense_blocks"):
            _sound.get(
                lambda: row_blocks.check(dense), dense.values, dense.segments, rest=dense.complete
            )


def _check_ids(record: Manifest) -> None:
    ids = [("save_id", record.save_id)]
    if record.parent is not None:
        ids.append(("parent.save_id", record.parent.save_id))
        directory = record.parent.step_dir
        require(is_name(directory), "the name of a directory", directory, "parent.step_dir")
    for place, save_id in ids:
        check_save_id(save_id, place)
    process, count = record.process, record.process_count
    require(process < count, f"a process below {count}", process, "process")
    if not is_name(*record.parents):
        raise InvalidRecord("names of directories", record.parents, "parents")


def check_paths(record: Manifest | Layout | EpochHeader) -> None:
    """Raises InvalidRecord if a path of a table or dense leaf is invalid."""
    for path in key_paths(record):
        require(all(_is_key(*entry) for entry in path), "a key path", path)


def key_paths(record: Manifest | Layout | EpochHeader) -> Iterator[KeyPath]:
    """Yields the paths of everything that a record or layout names in the state."""
    for table in record.tables:
        yield from table.leaves.values()
    for leaf in record.dense:
        yield leaf.path
    yield from record.tracking_paths


def _is_key(kind: str, key: str | int) -> bool:
    if kind == "seq":
        return type(key) is int and key >= 0
    return kind in _PATH_KINDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """The fields of a committed save that chain logic needs."""

    save_id: SaveId
    kind: Kind
    parent: ParentRef | None
    step_dir: str
    nbytes: int

    @classmethod
    def from_manifest(cls, head: Manifest, step_dir: str) -> SaveInfo:
        """Builds the record from process 0's manifest, which lacks the step directory's name."""
        return cls(
            save_id=head.save_id,
            kind=head.kind,
            parent=head.parent,
            step_dir=step_dir,
            nbytes=head.nbytes,
        )


class TableFigures(NamedTuple):
    """One field of one table in a save.

    Attributes:
      table: the table.
      field: ``values`` or ``slot.<name>``.
      codec: how its rows were stored.
      reason: why that codec was chosen.
      rows: rows written.
      nbytes: their bytes on disk.
      ratio: ``nbytes`` over the bytes of these rows unencoded.
      relative_error: norm of the decoding error over the norm of the rows; 0 if lossless.
    """

    table: str
    field: str
    codec: str
    reason: str
    rows: int
    nbytes: int
    ratio: float
    relative_error: float


class LeafFigures(NamedTuple):
    """One dense leaf that a delta stores as blocks, or one process's piece of it.

    Attributes:
      leaf: its path.
      codec: ``lossless``, or the lossy codec that was used.
      reason: why the codec differs from the configured one; empty if it does not.
      raw_bytes: unencoded bytes of the leaf itself.
      nbytes: bytes on disk.
      blocks: number of its blocks of 256 elements; 1 if it is smaller than a block.
      changed_blocks: number of blocks that are stored.
      relative_error: norm of the decoding error over the norm of the leaf; 0 if lossless.
    """

    leaf: str
    codec: str
    reason: str
    raw_bytes: int
    nbytes: int
    blocks: int
    changed_blocks: int
    relative_error: float

    @classmethod
    def joined(cls, pieces: Sequence[LeafFigures]) -> LeafFigures:
        """Combines the figures of a leaf's chunks; the largest error is kept."""
        return cls(
            leaf=pieces[0].leaf,
            codec="+".join(sorted({piece.codec for piece in pieces})),
            reason="; ".join(sorted({piece.reason for piece in pieces} - {""})),
            raw_bytes=sum(piece.raw_bytes for piece in pieces),
            nbytes=sum(piece.nbytes for piece in pieces),
            blocks=sum(piece.blocks for piece in pieces),
            changed_blocks=sum(piece.changed_blocks for piece in pieces),
            relative_error=max(piece.relative_error for piece in pieces),
        )


def table_figures(
    groups: Sequence[GroupEntry], tables: Sequence[TableEntry], segments: Sequence[Segment]
) -> tuple[TableFigures, ...]:
    """Returns figures of the rows that segments hold of each table, by field.

    A field's bytes are divided among tables in proportion to their rows. Row indices, which all
    fields of a segment share, are not counted.
    """
    found = []
    for group in groups:
        members = tables_of_group(group, tables)
        for spec in group.fields:
            pieces = [
                (segment, encoding)
                for segment in segments
                for encoding in segment.encodings
                if (segment.group, encoding.field) == (group.name, spec.name)
            ]
            found += _field_figures(members, spec, pieces)
    return tuple(found)


def _field_figures(
    members: Sequence[TableEntry], spec: FieldSpec, pieces: Sequence[tuple[Segment, Encoding]]
) -> Iterator[TableFigures]:
    # Segments of other columns hold the same rows again.
    first = min((segment.columns[0] for segment, _ in pieces), default=0)
    rows, nbytes = np.zeros(len(members), np.int64), np.zeros(len(members), np.int64)
    norm, error = np.zeros(len(members)), np.zeros(len(members))
    for segment, piece in pieces:
        counts = np.array(piece.rows)
        if segment.columns[0] == first:
            rows += counts
        nbytes += np.rint(piece.nbytes * (counts / max(1, counts.sum()))).astype(np.int64)
        norm += piece.squared_norm
        error += piece.squared_error
    codec = "+".join(sorted({piece.codec for _, piece in pieces}))
    reason = "; ".join(sorted({piece.reason for _, piece in pieces}))
    ratio = nbytes / np.maximum(1, rows * spec.row_bytes)
    relative = np.sqrt(np.divide(error, norm, out=np.zeros_like(norm), where=norm != 0))
    columns = rows.tolist(), nbytes.tolist(), ratio.tolist(), relative.tolist()
    for table, count, size, share, deviation in zip(members, *columns, strict=True):
        if count:
            yield TableFigures(table.name, spec.name, codec, reason, count, size, share, deviation)


def nested(layout: Layout, by_name: Mapping[str, object], dense: Mapping[str, object]) -> PyTree:
    """Returns nested dicts and lists of all leaves, by their typed key paths."""
    stored = (path for table in layout.tables for path in table.leaves.values())
    found: list[tuple[KeyPath, object]] = [
        (path, by_name[name]) for path in stored if (name := path_name(path)) in by_name
    ]
    for leaf in layout.dense:
        with contextlib.suppress(KeyError):  # dense leaves may be restored in part
            found.append((leaf.path, dense_at(dense, leaf.key)))
    return nested_at(found)


def nested_at(found: Iterable[tuple[KeyPath, object]]) -> PyTree:
    """Returns nested dicts and lists of some leaves, each at its typed key path."""
    found = [*found]
    if len(found) == 1 and not found[0][0]:
        return found[0][1]  # The state itself is a leaf.
    return _typed(nest(found))


def nest(found: Iterable[tuple[Sequence[_Key], object]]) -> dict[_Key, PyTree]:
    """Returns nested dicts of some leaves, each at its path of keys."""
    root: dict[_Key, PyTree] = {}
    for path, leaf in found:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def _typed(root: dict[Any, PyTree]) -> PyTree:
    """Turns nested dicts with key entries as keys into lists and plain dicts."""
    # Without recursion, because Python's stack limits its depth.
    nodes: list[dict[Any, PyTree]] = [root]
    for node in nodes:
        nodes += filter(_is_nested, node.values())
    typed: dict[int, PyTree] = {}
    for node in reversed(nodes):
        items = {key[1]: typed.get(id(child), child) for key, child in node.items()}
        is_list = node and all(key[0] == "seq" for key in node)
        # A hole is a part of the state that had no leaf, or was not requested.
        typed[id(node)] = [items.get(i) for i in range(max(items) + 1)] if is_list else items
    return typed[id(root)]


def _is_nested(node: object) -> bool:
    """Returns whether a node is a dict of ``nest``, rather than a leaf."""
    return isinstance(node, dict) and all(isinstance(key, tuple) and len(key) == 2 for key in node)


def dense_at(dense: Mapping[str, object], key: tuple[str, ...]) -> Leaf:
    """Returns the dense leaf at a key of nested dicts."""
    node: PyTree = dense
    for step in key:
        if not isinstance(node, Mapping):
            raise KeyError(step)
        node = node[step]
    return node
