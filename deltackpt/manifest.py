# SPDX-License-Identifier: Apache-2.0
"""What a save holds: frozen records and their bytes. No I/O, no jax.

The bytes are one msgpack map with a CRC32C of its body, specified in ``docs/format.md``.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

import google_crc32c
import msgpack

from deltackpt.errors import Damaged, FormatTooNew

FORMAT_VERSION = 1
#: Features that a reader must know to read a step; unknown ones raise FormatTooNew.
KNOWN_FEATURES: frozenset[str] = frozenset({"encodings"})
#: Needed by what is not stored ``raw``: rows may stand beside their codes.
ENCODINGS = "encodings"

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
class FieldSpec:
    """One field of a group: ``values`` or ``slot.<name>``.

    ``trailing`` is the shape of one row; ``always`` fields are written whole in every delta.
    ``codec`` is the one planned for a save; a segment may have another: ``Segment.spec``.
    """

    name: str
    trailing: tuple[int, ...]
    dtype: str
    codec: str = "raw"
    always: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEntry:
    """Tables of equal fields, laid end to end; ``rows`` is the length of the virtual table."""

    name: str
    rows: int
    fields: tuple[FieldSpec, ...]


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
class ArrayEntry:
    """One stored Zarr array: its shape is the truth, not that of ``zarr.json``.

    ``chunk_rows`` rows of the first axis make a chunk; other axes are not split. ``zstd`` and
    ``byte_planes`` arrays are compressed, the latter with their last axis first; others can be
    read straight from their chunk files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    zstd: bool = False
    byte_planes: bool = False

    @property
    def compressed(self) -> bool:
        """Whether a chunk's file holds something else than the bytes of its rows."""
        return self.zstd or self.byte_planes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How one field of a segment was stored, and what that changed.

    Attributes:
      field: the field.
      codec: the codec that was used in the end.
      reason: why this one, for people.
      nbytes: bytes of its stored arrays, checksums and compression included.
      rows: rows of each table of the group, in the order of their offsets.
      squared_error: likewise the sum of the squares of what decoding changes; 0 where lossless.
      squared_norm: likewise the sum of the squares of the rows; 0 where lossless. Rows that are
        stored beside their codes count in neither.
    """

    field: str
    codec: str
    reason: str
    nbytes: int
    rows: tuple[int, ...]
    squared_error: tuple[float, ...]
    squared_norm: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows of one group that a part holds, with the same fields for each.

    Either ``ranges`` lists the virtual rows as half-open ranges in ascending order, or it is
    None and the array ``rows.gaps`` holds them. ``count`` is the number of rows. Segments lie in
    the part's directory under ``name``.
    """

    name: str
    group: str
    columns: tuple[int, int]
    count: int
    ranges: tuple[tuple[int, int], ...] | None
    fields: tuple[str, ...]
    arrays: tuple[ArrayEntry, ...]
    encodings: tuple[Encoding, ...] = ()

    def spec(self, planned: FieldSpec) -> FieldSpec:
        """A field's spec with the codec that this segment has it in."""
        for encoding in self.encodings:
            if encoding.field == planned.name and encoding.codec != planned.codec:
                return dataclasses.replace(planned, codec=encoding.codec)
        return planned


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLeaf:
    """A leaf that is neither table nor slot: its key path in the state and its dense item key."""

    path: KeyPath
    key: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one process wrote of one save."""

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
    #: Which digest files were promised: "item", and "step" under our own commit.
    digests: tuple[str, ...] = ("item",)
    #: CRC32C of the bytes of this part's ``digests.<process>.msgpack``.
    item_digests_crc32c: int = 0
    writers: dict[str, str] = dataclasses.field(default_factory=dict)
    #: How often the run had been restored before, itself included.
    restores: int = 0
    features: tuple[str, ...] = ()

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}


def members(group: GroupEntry, tables: Iterable[TableEntry]) -> list[TableEntry]:
    """A group's tables in the order of their offsets, which is that of ``Encoding``'s figures."""
    return sorted((t for t in tables if t.group == group.name), key=lambda t: t.offset)


def to_bytes(record: Any, magic: str = "deltackpt.manifest") -> bytes:
    """Encodes a record of this module (or a dataclass like them) with its checksum."""
    body = _packed(dataclasses.asdict(record))
    head = {"format": magic, "version": FORMAT_VERSION, "crc32c": google_crc32c.value(body)}
    return _packed(head | {"body": body})


def _packed(value: dict[str, Any]) -> bytes:
    data = msgpack.packb(value, use_bin_type=True)
    assert data is not None
    return data


def from_bytes(
    data: bytes, cls: type = Manifest, *, name: str, magic: str = "deltackpt.manifest"
) -> Any:
    """Decodes bytes of ``to_bytes``; ``name`` names the object in errors.

    Raises:
      Damaged: the bytes are truncated, altered or not a record of this kind.
      FormatTooNew: a later version wrote it, or it needs a feature unknown here.
    """
    try:
        head = msgpack.unpackb(data, raw=False)
        if not isinstance(head, dict) or head.get("format") != magic:
            raise ValueError("no such magic")
        version, crc, body = head["version"], head["crc32c"], head["body"]
        if not isinstance(version, int):
            raise ValueError("no version")
    except Exception as error:
        raise Damaged(name, f"a {magic} record", f"{len(data)} other bytes ({error})") from error
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"{name}: written with format version {version}, this deltackpt reads up to "
            f"{FORMAT_VERSION}; install a newer deltackpt"
        )
    found = google_crc32c.value(body)
    if found != crc:
        raise Damaged(name, f"crc32c {crc:08x}", f"crc32c {found:08x}")
    fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if unknown := set(fields.get("features", ())) - KNOWN_FEATURES:
        raise FormatTooNew(
            f"{name}: needs features {sorted(unknown)}, unknown to this deltackpt; "
            "install a newer deltackpt"
        )
    return _build(cls, fields)


def _build(kind: Any, value: Any) -> Any:
    """Turns plain msgpack values back into the records that ``kind`` describes."""
    return _builder(kind)(value)


@functools.cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """What ``_build`` does for one type: a chain of twenty saves has some ten thousand values."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        parts = {name: _builder(hint) for name, hint in hints.items()}
        make: Any = kind
        return lambda value: make(**{k: parts[k](v) for k, v in value.items() if k in parts})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [_builder(arg) for arg in args if arg is not type(None)]
        build = inner[0] if len(inner) == 1 else _as_is
        return lambda value: None if value is None else build(value)
    if origin is tuple:
        builders = [_builder(arg) for arg in args if arg is not Ellipsis]
        if all(build is _as_is for build in builders):
            return tuple
        if len(builders) < len(args):
            return lambda value: tuple(map(builders[0], value))
        return lambda value: tuple(build(item) for build, item in zip(builders, value, strict=True))
    if origin is dict:
        build = _builder(args[1])
        return lambda value: {k: build(item) for k, item in value.items()}
    return _as_is


def _as_is(value: Any) -> Any:
    return value
