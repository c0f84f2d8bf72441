# SPDX-License-Identifier: Apache-2.0
"""What a save holds: frozen records and their bytes. No I/O, no jax.

What they mean is specified in ``docs/format.md``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import google_crc32c

from deltackpt.errors import FormatTooNew
from deltackpt.format import blocks, dense_blocks, records
from deltackpt.format.dense_blocks import DenseBlocks
from deltackpt.format.records import Unsound
from deltackpt.format.segments import FieldSpec, GroupEntry, Segment
from deltackpt.format.soundness import MOST, check_segment, is_name, require

#: What the bytes of a manifest begin with.
MAGIC = "deltackpt.manifest"
#: Features that a reader must know to read a step; unknown ones raise FormatTooNew.
KNOWN_FEATURES: frozenset[str] = frozenset({"encodings", "parts", "rolling", "dense_blocks"})
#: Needed by what is not stored ``raw``: rows may stand beside their codes.
ENCODINGS = "encodings"
#: Needed by what several processes wrote: only process 0's manifest says what the tables are.
PARTS = "parts"
#: Needed by a save from which a restore may go back a few saves only, not to a base.
ROLLING = "rolling"
#: Needed by a delta whose dense leaves are blocks of our item, by way of those of its parent.
DENSE_BLOCKS = "dense_blocks"

#: Fields that are the same in all saves of a run, and large where there are many tables.
_ALIKE = frozenset({"groups", "tables", "dense", "tracking_paths", "writers"})
_sound_paths = records.Sound()

#: Names of parents in a manifest: what is read ahead at once.
MOST_PARENTS = 64
#: Kinds of the steps of a key path.
_PATH_KINDS = ("dict", "seq", "attr", "flat")
Kind = Literal["base", "delta"]
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
    """A compacted base: the save that it stands for, and the bytes of its arrays."""

    save_id: SaveId
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollingShare:
    """The share of all rows that a delta of a rolling base holds besides the touched ones.

    Attributes:
      window: in how many saves every row is written.
      number: which share it is, from 0 on: of a table of n rows those from ``n * number // window``
        to ``n * (number + 1) // window``.
      filled: how many saves in a row, along the chain and up to this one, have written theirs;
        ``window`` where there are more.
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
    """One table: where its leaf and its slots' leaves stand in the state, and in its group.

    ``leaves`` maps a field name to the key path of its leaf; a leaf of a field with trailing
    shape t has shape (rows, *t).
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
      tracking_paths: where TouchStates stand; they are never saved.
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
        """Whether the tables and slots of another layout are those of this one, by their names.

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
    """Where the rows of a part lie in one group: no others are in it, not all of them need be.

    Its size does not grow with the number of tables where a mesh shards them all alike.

    Attributes:
      group: the group.
      tables: spans of the tables that it has rows of, numbered in the order of their offsets.
      share: of each of these tables, the rows from ``share[0]`` to ``share[1]``, in units of
        ``rows / WHOLE_SHARE``.
      columns: of the fields that are as wide as the table.
    """

    group: str
    tables: tuple[tuple[int, int], ...]
    share: tuple[int, int]
    columns: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What process 0 says of the part of another process, or of its own.

    Attributes:
      process: which.
      crc32c: CRC32C of the bytes of its manifest; 0 in process 0's own.
      nbytes: bytes of its arrays, before any compression.
      covers: where its rows lie.
    """

    process: int
    crc32c: int
    nbytes: int
    covers: tuple[Cover, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one process wrote of one save.

    Where there are several, that of process 0 comes last and speaks for all: ``groups``,
    ``tables``, ``dense`` and ``tracking_paths`` are in it alone.
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
    #: CRC32C of the bytes of this part's ``digests.<process>.msgpack``.
    item_digests_crc32c: int = 0
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
    #: Every part, by process; in the manifest of process 0, where there are several.
    parts: tuple[Part, ...] = ()
    #: The dense leaves, where they are blocks of this item; of a delta, and of each part its own.
    dense_blocks: DenseBlocks | None = None
    #: Bytes of the dense leaves of a base, against which deltas have theirs as blocks; 0 elsewhere.
    dense_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, before any compression; of all parts where it speaks for them."""
        return nbytes_of(self)

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}


def nbytes_of(record: Any) -> int:
    """Bytes of the arrays of a manifest, or of an outline; of all parts where it names them."""
    if record.parts:
        return sum(part.nbytes for part in record.parts)
    dense = () if record.dense_blocks is None else record.dense_blocks.segments
    segments = (*record.segments, *dense)
    return record.dense_bytes + sum(entry.nbytes for one in segments for entry in one.arrays)


def cover(
    group: GroupEntry,
    tables: Iterable[TableEntry],
    rows: range | blocks.Ranges,
    columns: Iterable[tuple[int, int]],
) -> Cover:
    """The cover of some virtual rows, at least one, and columns of a group."""
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
    """A path as text: its steps joined with '/'."""
    return "/".join(str(step) for _, step in path)


def plan_crc32c(record: Manifest) -> int:
    """CRC32C of what all processes must agree on: tables, groups, codecs, dense leaves."""
    names = ("groups", "tables", "dense", "tracking_paths")
    return google_crc32c.value(records.packed({name: getattr(record, name) for name in names}))


def members(group: GroupEntry, tables: Iterable[TableEntry]) -> list[TableEntry]:
    """A group's tables in the order of their offsets, which is that of ``Encoding``'s figures."""
    return sorted((t for t in tables if t.group == group.name), key=lambda t: t.offset)


def with_codecs(
    groups: Iterable[GroupEntry], codec_of: Callable[[GroupEntry, FieldSpec], str]
) -> tuple[GroupEntry, ...]:
    """The groups with another codec for each of their fields."""
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
      Damaged: the bytes are truncated, altered or not a record of this kind; or it says what no
        such record can.
      FormatTooNew: a later version wrote it, or it needs a feature unknown here.
    """
    if cls is Manifest:
        record = records.quickly(cls, data, name=name, magic=magic, alike=_ALIKE)
        if record is not None and KNOWN_FEATURES.issuperset(record.features):
            with contextlib.suppress(Unsound):
                _check(record)
                return record
    fields = records.fields_of(data, name=name, magic=magic)
    try:
        if cls is Manifest:
            _check_features(fields, name)
        record = records.built(cls, fields)
        if isinstance(record, Manifest):
            _check(record)
    except Unsound as error:
        raise error.damage(name) from error
    return record


def _check_features(fields: dict[str, Any], name: str) -> None:
    features = fields.get("features", [])
    if type(features) is not list or not all(type(feature) is str for feature in features):
        raise Unsound("names of features", features, "features")
    if unknown := set(features) - KNOWN_FEATURES:
        raise FormatTooNew(
            f"{name}: needs features {sorted(unknown)}, unknown to this deltackpt; "
            "install a newer deltackpt"
        )


def _check(record: Manifest) -> None:
    """Checks what a manifest says by itself; ``bounds`` checks it against its groups.

    Raises:
      Unsound: it cannot be.
    """
    check_ids(record)
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
            dense_blocks.check(record.dense_blocks)
        except Unsound as error:
            raise error.within("dense_blocks") from None


def check_ids(record: Any) -> None:
    """Checks what a manifest, or an outline of one, says of which save it is.

    Raises:
      Unsound: there is no such save.
    """
    ids = [("save_id", record.save_id)]
    if record.parent is not None:
        ids.append(("parent.save_id", record.parent.save_id))
        directory = record.parent.step_dir
        require(is_name(directory), "the name of a directory", directory, "parent.step_dir")
    for place, save_id in ids:
        require(is_name(save_id.run), "the id of a run", save_id.run, f"{place}.run")
        require(save_id.step <= MOST, f"at most {MOST}", save_id.step, f"{place}.step")
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
    """Checks where a record of tables and dense leaves says that they stand.

    Raises:
      Unsound: there is no such place.
    """
    for path in key_paths(record):
        require(all(_is_key(*entry) for entry in path), "a key path", path)


def key_paths(record: Any) -> Iterator[KeyPath]:
    """Where everything that a record, or a layout, names stands in the state."""
    for table in record.tables:
        yield from table.leaves.values()
    for leaf in record.dense:
        yield leaf.path
    yield from record.tracking_paths


def _is_key(kind: str, key: str | int) -> bool:
    if kind == "seq":
        return type(key) is int and key >= 0
    return kind in _PATH_KINDS
