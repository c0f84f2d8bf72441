# SPDX-License-Identifier: Apache-2.0
"""Manifests: frozen records of what a save holds, and their encoding. No I/O, no JAX.

``docs/reference/format.md`` specifies them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import google_crc32c

from deltackpt.format import blocks, dense_blocks, records
from deltackpt.format.dense_blocks import DenseBlocks
from deltackpt.format.records import Unsound
from deltackpt.format.segments import FieldSpec, GroupEntry, Segment
from deltackpt.format.soundness import (
    check_save_id,
    check_segment,
    features_in,
    is_name,
    refuse_unknown,
    require,
)

#: What the bytes of a manifest begin with.
MAGIC = "deltackpt.manifest"
#: Features that a reader must know to read a step; unknown ones raise FormatTooNew.
KNOWN_FEATURES: frozenset[str] = frozenset(
    {"encodings", "parts", "rolling", "dense_blocks", "layers"}
)
#: Required unless everything is stored ``raw``: rows may be stored next to their codes.
ENCODINGS = "encodings"
#: Required for saves by several processes: only process 0's manifest describes the tables.
PARTS = "parts"
#: Needed by a save from which a restore may go back a few saves only, not to a base.
ROLLING = "rolling"
#: Needed by a delta whose dense leaves are in our item, complete or relative to its parent's.
DENSE_BLOCKS = "dense_blocks"
#: Required for deltas whose arrays are in a layer file.
LAYERS = "layers"

#: Fields that are the same in all saves of a run, and large where there are many tables.
_ALIKE = frozenset(
    {"groups", "tables", "dense", "tracking_paths", "writers", "dense_blocks.values"}
)
_sound_paths = records.Sound()

#: Names of parents in a manifest: what is read ahead at once.
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
class RollingShare:
    """The share of all rows that a delta of a rolling base holds in addition to the touched ones.

    Attributes:
      window: number of saves within which every row is written.
      number: index of the share. For a table of n rows, it is the rows from
        ``n * number // window`` to ``n * (number + 1) // window``.
      filled: number of consecutive saves, along the chain and up to this one, that have written
        their share; at most ``window``.
    """

    window: int
    number: int
    filled: int

    @property
    def full(self) -> bool:
        """Whether the save and those before it in the window hold every row."""
        return self.filled >= self.window

    def rows(self, group: GroupEntry, tables: Iterable[TableEntry]) -> range | blocks.Ranges:
        """The virtual rows of a group that are in the share."""
        return blocks.rows_of(
            (table.offset + self._first(table.rows), table.offset + self._last(table.rows))
            for table in members(group, tables)
        )

    def _first(self, rows: int) -> int:
        return rows * self.number // self.window

    def _last(self, rows: int) -> int:
        return rows * (self.number + 1) // self.window


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table: the paths of its leaves in the state, and its place in its group.

    ``leaves`` maps a field name to the key path of its leaf; a leaf of a field with trailing shape
    t has shape (rows, *t).
    """

    name: str
    group: str
    offset: int
    rows: int
    leaves: dict[str, KeyPath]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLeaf:
    """A leaf that is neither table nor slot: its key path in the state and its dense item key."""

    path: KeyPath
    key: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tables, their groups and the dense leaves of one state; equal for equal states.

    Codecs are not part of it: each save plans its own.

    Attributes:
      groups: the groups, named ``g0``, ``g1``, ... in the order of their first table.
      tables: the tables in the order of their names.
      dense: every leaf that is neither table nor slot nor TouchState.
      tracking_paths: paths of TouchStates, which are never saved.
    """

    groups: tuple[GroupEntry, ...]
    tables: tuple[TableEntry, ...]
    dense: tuple[DenseLeaf, ...]
    tracking_paths: tuple[KeyPath, ...]

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}

    def has_rows_of(self, other: Layout) -> bool:
        """Returns whether another layout has the same tables and slots, by name.

        The types of the containers around them may differ: a state that was imported as plain
        dicts is restored into a ``TrainState``.
        """
        return self.groups == other.groups and [_table_by_name(table) for table in self.tables] == [
            _table_by_name(table) for table in other.tables
        ]


def _table_by_name(table: TableEntry) -> tuple[Any, ...]:
    leaves = {field: path_name(path) for field, path in table.leaves.items()}
    return table.name, table.group, table.offset, table.rows, leaves


#: A share of the rows of each table is counted in these.
WHOLE_SHARE = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cover:
    """The region of a group that contains a part's rows, not necessarily all of the region.

    Its size does not grow with the number of tables if a mesh shards all of them alike.

    Attributes:
      group: the group.
      tables: ranges of the tables that it has rows of, numbered in the order of their offsets.
      share: range of rows within each of these tables, from ``share[0]`` to ``share[1]``, in
        units of ``rows / WHOLE_SHARE``.
      columns: columns of the fields that are as wide as the table.
    """

    group: str
    tables: tuple[tuple[int, int], ...]
    share: tuple[int, int]
    columns: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRef:
    """The layer file with the arrays of a part.

    Attributes:
      nbytes: its length.
      crc32c: CRC32C of all its bytes but the last four.
      digest: its last four bytes as a little-endian number, its own checksum.
    """

    nbytes: int
    crc32c: int
    digest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Process 0's index entry for a part.

    Attributes:
      process: index of the process.
      crc32c: CRC32C of the bytes of its manifest; 0 in process 0's own.
      nbytes: bytes of its arrays, before any compression.
      covers: regions that contain its rows.
    """

    process: int
    crc32c: int
    nbytes: int
    covers: tuple[Cover, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One process's part of a save.

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
    dense: tuple[DenseLeaf, ...] = ()
    tracking_paths: tuple[KeyPath, ...] = ()
    #: Which digest files were promised: "item", and "step" under our own commit. "dense" where
    #: the item of a compacted base holds Orbax's of the dense leaves: those of the item cover it.
    digests: tuple[str, ...] = ("item",)
    #: CRC32C of the bytes of this part's ``digests.<process>.msgpack``; 0 if it has a layer.
    item_digests_crc32c: int = 0
    #: The layer file with its arrays; None if they are Zarr arrays, as in a base.
    layer: LayerRef | None = None
    writers: dict[str, str] = dataclasses.field(default_factory=dict)
    #: How often the run had been restored before, itself included.
    restores: int = 0
    #: The newest compacted base that process 0 knew of when it wrote this.
    compacted: BaseRef | None = None
    #: Names of the step directories that a restore reads too, the parent's first, at most
    #: ``MOST_PARENTS``: for reading ahead, and no more; ``parent`` is the truth. Process 0's alone.
    parents: tuple[str, ...] = ()
    #: The share of all rows that a delta of a rolling base holds.
    rolling: RollingShare | None = None
    features: tuple[str, ...] = ()
    #: CRC32C of what the process takes the tables to be, and of the codecs that it planned.
    plan_crc32c: int = 0
    #: Group to how many cells of all fields it writes in a base; nothing where it writes none.
    owned_cells: dict[str, int] = dataclasses.field(default_factory=dict)
    covers: tuple[Cover, ...] = ()
    #: What was touched of the rows whose stamps other processes hold too; of parts but process 0's.
    shared_stamps: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Every part, by process; only in process 0's manifest, for several processes.
    parts: tuple[Part, ...] = ()
    #: The dense leaves, if they are stored in this item; in deltas, for each part its own.
    dense_blocks: DenseBlocks | None = None
    #: Bytes of the dense leaves of a base, against which deltas have theirs as blocks; 0 elsewhere.
    dense_bytes: int = 0
    #: How the manager found touched rows. Process 0's alone.
    tracking: TrackingName = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, before any compression; of all parts if it describes them."""
        return nbytes_of(self)

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}


def nbytes_of(record: Any) -> int:
    """Returns the bytes of a manifest's or outline's arrays; of all parts if it describes them.

    Excludes complete dense leaves: every save has them, and a restore reads only the newest ones.
    """
    if record.parts:
        return sum(part.nbytes for part in record.parts)
    held = record.dense_blocks
    dense = () if held is None or held.complete else held.segments
    segments = (*record.segments, *dense)
    return record.dense_bytes + sum(entry.nbytes for one in segments for entry in one.arrays)


def cover(
    group: GroupEntry,
    tables: Iterable[TableEntry],
    rows: range | blocks.Ranges,
    columns: Iterable[tuple[int, int]],
) -> Cover:
    """Returns the region of some virtual rows (at least one) and columns of a group."""
    held, low, high = [], WHOLE_SHARE, 0
    for number, table in enumerate(members(group, tables)):
        part = rows[blocks.row_slice(rows, table.offset, table.offset + table.rows)]
        if len(part):
            spans = blocks.spans_of(part)
            first, last = spans[0][0] - table.offset, spans[-1][1] - table.offset
            low = min(low, first * WHOLE_SHARE // table.rows)
            high = max(high, -(-last * WHOLE_SHARE // table.rows))
            held.append((number, number + 1))
    spans = list(columns)
    return Cover(
        group=group.name,
        tables=blocks.joined(held),
        share=(low, high),
        columns=(min(first for first, _ in spans), max(last for _, last in spans)),
    )


def path_name(path: KeyPath) -> str:
    """Returns a path as a string: its components joined with '/'."""
    return "/".join(str(step) for _, step in path)


def plan_crc32c(record: Manifest) -> int:
    """Returns the CRC32C of the data that all processes must agree on.

    They are tables, groups, codecs and dense leaves.
    """
    names = ("groups", "tables", "dense", "tracking_paths")
    return google_crc32c.value(records.packed({name: getattr(record, name) for name in names}))


def members(group: GroupEntry, tables: Iterable[TableEntry]) -> list[TableEntry]:
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


def to_bytes(record: Any, magic: str = MAGIC) -> bytes:
    """Encodes a record of this module (or a dataclass like them) with its checksum."""
    return records.to_bytes(record, magic)


def from_bytes(data: bytes, cls: type = Manifest, *, name: str, magic: str = MAGIC) -> Any:
    """Decodes bytes of ``to_bytes``; ``name`` names the object in errors.

    Raises:
      Damaged: the bytes are truncated, altered, not a record of this kind, or invalid.
      FormatTooNew: a later version wrote it, or it needs a feature unknown here.
      FormatTooOld: a development version wrote it.
    """
    if cls is Manifest:
        record = records.quickly(cls, data, name=name, magic=magic, alike=_ALIKE)
        if record is not None and is_current(record):
            with contextlib.suppress(Unsound):
                _check(record)
                return record
    fields = records.fields_of(data, name=name, magic=magic)
    try:
        if cls is Manifest:
            refuse_unknown(features_in(fields), KNOWN_FEATURES, name)
        record = records.built(cls, fields)
        if isinstance(record, Manifest):
            if not is_current(record):
                raise records.too_old(name, "a delta in a layer file", "one in Zarr arrays")
            _check(record)
    except Unsound as error:
        raise error.damage(name) from error
    return record


def is_current(record: Any) -> bool:
    """Returns whether this version reads the save of a manifest or outline."""
    features = set(record.features)
    return features <= KNOWN_FEATURES and (record.kind == "base" or LAYERS in features)


def _check(record: Manifest) -> None:
    """Checks a manifest on its own; ``bounds`` checks it against its groups.

    Raises:
      Unsound: the manifest is invalid.
    """
    check_ids(record)
    is_base = record.kind == "base"
    require(is_base == (record.layer is None), "a layer if it is a delta", record.layer, "layer")
    if is_base:
        ranged = all(segment.ranges is not None for segment in record.segments)
        require(ranged, "ranges of rows in a base", "row indices", "segments")
        require(record.dense_blocks is None, "dense leaves in Orbax's item", "blocks")
    if not _sound_paths.has(record.tables, record.dense, record.tracking_paths):
        check_paths(record)
        _sound_paths.add(record.tables, record.dense, record.tracking_paths)
    for number, segment in enumerate(record.segments):
        try:
            check_segment(segment)
        except Unsound as error:
            raise error.within(f"segments[{number}]") from None
    if record.dense_blocks is not None:
        try:
            dense_blocks.check(record.dense_blocks, remember=True)
        except Unsound as error:
            raise error.within("dense_blocks") from None


def check_ids(record: Any) -> None:
    """Checks the identity of the save in a manifest or outline.

    Raises:
      Unsound: the identity is invalid.
    """
    ids = [("save_id", record.save_id)]
    if record.parent is not None:
        ids.append(("parent.save_id", record.parent.save_id))
        directory = record.parent.step_dir
        require(is_name(directory), "the name of a directory", directory, "parent.step_dir")
    for place, save_id in ids:
        check_save_id(save_id, place)
    if (rolling := record.rolling) is not None:
        window, number, filled = rolling.window, rolling.number, rolling.filled
        require(window > 1, "at least 2 saves", window, "rolling.window")
        require(0 <= number < window, f"a share below {window}", number, "rolling.number")
        require(1 <= filled <= window, f"1 to {window} saves", filled, "rolling.filled")
    process, count = record.process, record.process_count
    require(process < count, f"a process below {count}", process, "process")
    for parent in record.parents:
        require(is_name(parent), "the name of a directory", parent, "parents")


def check_paths(record: Any) -> None:
    """Checks the paths of tables and dense leaves in a record.

    Raises:
      Unsound: a path is invalid.
    """
    for path in key_paths(record):
        require(all(_is_key(*entry) for entry in path), "a key path", path)


def key_paths(record: Any) -> Iterator[KeyPath]:
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
