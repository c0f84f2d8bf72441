# SPDX-License-Identifier: Apache-2.0
"""Records: dataclasses as checked bytes, and back; limits on their contents. No I/O, no jax.

Anyone who can write to a directory can write a record with a valid checksum, so no value is
trusted: each must have the type that the dataclass declares, and integers must not be negative.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import threading
import types
import typing
import urllib.parse
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import google_crc32c
import msgpack

from deltackpt.errors import Damaged, FormatTooNew, FormatTooOld, OptionError
from deltackpt.format import dtypes

if TYPE_CHECKING:
    from deltackpt.format.manifest import SaveId
    from deltackpt.format.row_blocks import ArrayEntry, Segment

FORMAT_VERSION = 1
#: Most bytes of a record: one of a million tables has fewer. A file may claim any length.
MOST_BYTES = 1 << 30
#: The field of a body that repeats the version, where its checksum covers it.
_VERSION = "format_version"
_SHOWN_CHARACTERS = 60
#: Paths whose components are names according to ``is_name``.
_INSIDE = re.compile(r"(?!/)(?:(?:^|/)(?!\.{1,2}(?:/|\Z))[^/\0]{1,255})+")
#: Maximum length of a file's path below its directory, an operating system limit.
_PATH_CHARACTERS = 4096
#: Maximum number of folders above a file: creating and removing them recurses.
_MOST_FOLDERS = 100
#: Length of ``Digest.tail``: the last bytes of a file, stored unhashed.
TAIL_BYTES = 4
#: Most cached values of shared fields: those of a few layouts, and two of each process of a job.
KEPT_FIELDS = 64
_NIL = b"\xc0"
_MSGPACK_ERRORS = (ValueError, TypeError, OverflowError, msgpack.UnpackException)
_Record = TypeVar("_Record")
_Result = TypeVar("_Result")
#: Fields whose equal bytes are decoded once, since all saves of a run have the same tables. With
#: the dataclass of a field, only these of its fields are.
Shared = Mapping[str, "tuple[type, Shared] | None"]


class InvalidRecord(ValueError):
    """A record with a valid checksum but invalid contents; ``place`` is where in the record."""

    def __init__(self, expected: str, found: object, place: str = ""):
        self.expected = expected
        self.found = found if isinstance(found, str) else shown(found)
        self.place = place
        super().__init__(f"{place}: expected {self.expected}, found {self.found}")

    def within(self, name: str) -> InvalidRecord:
        """Returns the same error, seen from the enclosing record."""
        inner = self.place if not self.place or self.place[0] == "[" else f".{self.place}"
        return InvalidRecord(self.expected, self.found, f"{name}{inner}")


@contextlib.contextmanager
def within(place: str) -> Iterator[None]:
    """Adds the place of an inner record to InvalidRecord errors."""
    try:
        yield
    except InvalidRecord as error:
        raise error.within(place) from None


@contextlib.contextmanager
def as_damage(name: str) -> Iterator[None]:
    """Turns InvalidRecord errors into the ``Damaged`` error of an object."""
    try:
        yield
    except InvalidRecord as error:
        where = f" in {error.place}" if error.place else ""
        raise Damaged(name, f"{error.expected}{where}", error.found) from error


class IdentityCache(Generic[_Result]):
    """Results by inputs of which some are compared by identity; evicts the oldest. Thread-safe.

    Shared fields of equal bytes are the same objects, and ``tables.split`` returns the same layout
    for equal states. Comparing two layouts of a thousand tables would cost more than is saved.
    """

    def __init__(self, most: int = 8):
        self._most, self._lock = most, threading.Lock()
        self._known: dict[Hashable, tuple[tuple[object, ...], _Result]] = {}

    def get(self, make: Callable[[], _Result], *values: object, rest: Hashable = None) -> _Result:
        """Returns the result for the same values and an equal ``rest``; caches no error."""
        key = rest, *map(id, values)
        known = self._known.get(key)
        if known is None:
            # Keeps the values alive, so that their identities stay unique.
            known = values, make()
            with self._lock:
                self._known[key] = known
                while len(self._known) > self._most:
                    del self._known[next(iter(self._known))]
        return known[1]

    def clear(self) -> None:
        """Empties the cache."""
        with self._lock:
            self._known.clear()


def shown(value: object) -> str:
    """Formats a value of a record for an error message, with limited length."""
    if isinstance(value, (list, tuple, dict, str, bytes)) and len(value) > _SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep to be shown"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def to_bytes(record: object, magic: str, cached: Set[str] = frozenset()) -> bytes:
    """Encodes a dataclass with its checksum; raises OptionError if readers would not accept it.

    Reuses the encoding of a ``cached`` field for records that contain the same object in it.
    """
    fields = _fields(record) | {_VERSION: FORMAT_VERSION}
    packer = msgpack.Packer(use_bin_type=True, default=_fields)
    pieces = [packer.pack_map_header(len(fields))]
    for name, value in fields.items():
        pack = functools.partial(packer.pack, value)
        pieces += packer.pack(name), _encodings.get(pack, value) if name in cached else pack()
    body = b"".join(pieces)
    head = {"format": magic, "version": FORMAT_VERSION, "crc32c": google_crc32c.value(body)}
    data = packed(head | {"body": body})
    if len(data) > MOST_BYTES:
        raise OptionError(
            f"{magic}: expected a record of at most {MOST_BYTES} bytes, found {len(data)}; use "
            "fewer tables, or more processes"
        )
    return data


#: Encodings of ``cached`` fields, by the identity of their values, which must not change.
_encodings: IdentityCache[bytes] = IdentityCache()


def packed(value: Mapping[str, object]) -> bytes:
    """Returns a map as msgpack; dataclasses in it become maps of their fields."""
    data = msgpack.packb(value, use_bin_type=True, default=_fields)
    assert data is not None
    return data


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in _names(type(record))}


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def from_bytes(
    data: bytes,
    kind: type[_Record],
    *,
    name: str,
    magic: str,
    known_features: frozenset[str] | None = None,
    shared: Shared = types.MappingProxyType({}),
    since_development: frozenset[str] = frozenset(),
) -> _Record:
    """Decodes bytes of ``to_bytes``; ``name`` names the object in errors.

    Records without a field in ``since_development`` were written by a development version. For the
    other arguments, see ``built``. Raises Damaged, FormatTooNew or FormatTooOld.
    """
    version, body = _head_of(data, name, magic)
    with as_damage(name):
        fields = _fields_in(body)
        if _VERSION not in fields:
            raise _too_old(name, f"a version in the body of the {magic} record")
        _check_version(name, version, _unpacked(fields[_VERSION]))
        if not since_development <= fields.keys():
            raise _too_old(name, f"{' and '.join(sorted(since_development))} in the record")
        return _built(kind, fields, name, known_features, shared)


def built(
    data: bytes,
    kind: type[_Record],
    *,
    name: str,
    known_features: frozenset[str] | None = None,
) -> _Record:
    """Builds a dataclass from a msgpack map of its fields, whose bytes are verified.

    Unknown fields are ignored. If ``known_features`` are given, raises FormatTooNew if the record
    needs others. Raises Damaged if the map or a field is invalid; ``name`` is for errors.
    """
    with as_damage(name):
        return _built(kind, _fields_in(data), name, known_features, {})


def unpacked(data: bytes, kind: type[_Record]) -> _Record:
    """Like ``built``, but raises InvalidRecord."""
    return _built(kind, _fields_in(data), "", None, {})


def _check_version(name: str, version: int, repeated: object) -> None:
    """Checks the version in a record's body; no checksum covers the one beside the body."""
    if type(repeated) is not int or repeated < 1:
        raise InvalidRecord("a version", repeated, _VERSION)
    if repeated > FORMAT_VERSION:
        raise FormatTooNew(
            f"{name}: written with format version {repeated}, this deltackpt reads up to "
            f"{FORMAT_VERSION}; install a newer deltackpt"
        )
    if version != repeated:
        raise Damaged(name, f"version {repeated} as its body says", f"version {version}")


def _too_old(name: str, expected: str) -> FormatTooOld:
    """Returns the error for a record without a field that development versions did not write."""
    return FormatTooOld(
        f"{name}: expected {expected}, found none, as written by a development version of "
        "deltackpt; restore it with that version, and save it to a new directory with this one"
    )


@functools.lru_cache(KEPT_FIELDS)
def _built_once(kind: type, field: str, data: bytes) -> object:
    return _field_builders(kind)[0][field](_unpacked(data))


def _built(
    kind: type[_Record],
    fields: Mapping[str, bytes],
    name: str,
    known_features: frozenset[str] | None,
    shared: Shared,
) -> _Record:
    if known_features is not None:
        _check_features(fields, known_features, name)
    builders, required = _field_builders(kind)
    _check_required(required, fields)
    found = {}
    for field, make in builders.items():
        if (data := fields.get(field)) is None:
            continue
        kept = shared.get(field)
        try:
            if kept is not None and data != _NIL:
                found[field] = _built(kept[0], _fields_in(data), name, None, kept[1])
            elif field in shared:
                found[field] = _built_once(kind, field, data)
            else:
                found[field] = make(_unpacked(data))
        except InvalidRecord as error:
            raise error.within(field) from None
    return kind(**found)


def _check_required(required: Set[str], fields: Mapping[str, object]) -> None:
    if not required <= fields.keys():
        raise InvalidRecord(f"fields {sorted(required - fields.keys())}", "none of that name")


def _check_features(fields: Mapping[str, bytes], known: frozenset[str], name: str) -> None:
    """Raises FormatTooNew if a record needs unknown features, before its other fields are built."""
    features = _unpacked(fields["features"]) if "features" in fields else []
    if type(features) is not list or not all(type(feature) is str for feature in features):
        raise InvalidRecord("names of features", features, "features")
    if unknown := {*features} - known:
        raise FormatTooNew(
            f"{name}: expected known features, found {sorted(unknown)}; install a newer deltackpt"
        )


def _fields_in(body: bytes) -> dict[str, bytes]:
    """Returns the bytes of each field of a map, all of whose elements exist."""
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(body)))
    walker.feed(body)
    found = {}
    try:
        count = walker.read_map_header()
        for _ in range(count):
            start = walker.tell()
            # Skipped first: decoding allocates a list before its elements are read.
            walker.skip()
            field, start = _unpacked(body[start : walker.tell()]), walker.tell()
            walker.skip()
            found[field] = body[start : walker.tell()]
    except _MSGPACK_ERRORS as error:
        raise InvalidRecord("a map of msgpack", str(error) or type(error).__name__) from error
    require(
        len(found) == count and walker.tell() == len(body) and {*map(type, found)} <= {str},
        *("a map of msgpack with different texts as keys", "others, or bytes after the map"),
    )
    return found


def _unpacked(data: bytes) -> object:
    """Decodes a value whose elements all exist."""
    try:
        # No list is unpacked: the keys of all our maps are strings.
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except _MSGPACK_ERRORS as error:
        raise InvalidRecord("a value of msgpack", str(error) or type(error).__name__) from error


def _head_of(data: bytes, name: str, magic: str) -> tuple[int, bytes]:
    """The version in a record's head, and its verified body."""
    try:
        head = {field: _unpacked(value) for field, value in _fields_in(data).items()}
        if head.get("format") != magic:
            raise ValueError("no such magic")
        version, crc, body = head["version"], head["crc32c"], head["body"]
        if type(version) is not int or version < 1:
            raise ValueError("no version")
        if type(crc) is not int or not isinstance(body, bytes):
            raise ValueError("no checksum of a body")
    except (ValueError, KeyError) as error:
        raise Damaged(name, f"a {magic} record", f"{len(data)} other bytes ({error})") from error
    found = google_crc32c.value(body)
    if found != crc:
        raise Damaged(name, f"crc32c {crc:08x}", f"crc32c {found:08x}")
    return version, body


@functools.cache
def _builder(kind: object) -> Callable[[object], Any]:
    # Built once per type: a chain of twenty saves has about ten thousand values.
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record_builder(kind)
    if (make := getattr(kind, "_make", None)) is not None:  # A named tuple.
        each = functools.partial(_each, tuple(map(_builder, typing.get_type_hints(kind).values())))
        return lambda value: make(each(value))
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return functools.partial(_one_of, args)
    if origin in (typing.Union, types.UnionType):
        inner = tuple(arg for arg in args if arg is not type(None))
        if len(inner) == 1:
            build = _builder(inner[0])
            return lambda value: None if value is None else build(value)
        expected = f"one of {', '.join(one.__name__ for one in inner)}"
        return functools.partial(_of_type, inner, expected)
    if origin is tuple:
        makers = tuple(_builder(arg) for arg in args if arg is not Ellipsis)
        is_open = args[-1] is Ellipsis
        build = functools.partial(_all, makers[0]) if is_open else functools.partial(_each, makers)
        if {*args} <= {args[0], Ellipsis} and args[0] in _SCALAR_TYPES:
            count = None if is_open else len(args)
            return functools.partial(_scalars, _SCALAR_TYPES[args[0]], count, build)
        return build
    if origin is dict and args[0] is str:
        return functools.partial(_by_name, _builder(args[1]))
    raise TypeError(f"no record holds a {kind}")


def _record_builder(kind: type) -> Callable[[object], object]:
    builders, required = _field_builders(kind)

    def build(value: object) -> object:
        if type(value) is not dict:
            raise InvalidRecord("a map", value)
        _check_required(required, value)
        name = ""
        found = {}
        try:
            for name, make in builders.items():
                if name in value:
                    found[name] = make(value[name])
        except InvalidRecord as error:
            raise error.within(name) from None
        return kind(**found)

    return build


@functools.cache
def _field_builders(kind: type) -> tuple[dict[str, Callable[[object], object]], set[str]]:
    """What makes each field of a dataclass, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is missing and field.default_factory is missing
    }
    return {name: _builder(hint) for name, hint in hints.items()}, required


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise InvalidRecord("a non-negative integer", value)
    return value


def _of_type(kinds: tuple[type, ...], expected: str, value: object) -> Any:
    if type(value) not in kinds:
        raise InvalidRecord(expected, value)
    return value


def _one_of(choices: tuple[object, ...], value: object) -> str:
    if type(value) is not str or value not in choices:
        raise InvalidRecord(f"one of {choices}", value)
    return value


def _all(make: Callable[[object], object], value: object) -> tuple[object, ...]:
    found = []
    for number, item in enumerate(_of_type((list,), "a list", value)):
        try:
            found.append(make(item))
        except InvalidRecord as error:
            raise error.within(f"[{number}]") from None
    return tuple(found)


def _each(makers: tuple[Callable[[object], object], ...], value: object) -> tuple[object, ...]:
    items = _of_type((list,), "a list", value)
    if len(items) != len(makers):
        raise InvalidRecord(f"a list of {len(makers)}", value)
    return tuple([make(item) for make, item in zip(makers, items, strict=True)])


def _scalars(
    kinds: frozenset[type], count: int | None, otherwise: Callable[[object], object], value: object
) -> object:
    """Checks a list of scalars, the most common kind; ``otherwise`` reports errors."""
    if type(value) is list and count in (None, len(value)) and kinds.issuperset(map(type, value)):
        if kinds is not _INT or min(value, default=0) >= 0:
            return tuple(value)
    return otherwise(value)


def _by_name(make: Callable[[object], object], value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise InvalidRecord("a map", value)
    found = {}
    name: object = None
    try:
        for name, item in value.items():
            found[name] = make(item)
    except InvalidRecord as error:
        raise error.within(f"[{shown(name)}]") from None
    if {*map(type, found)} - {str}:
        raise InvalidRecord("texts as keys", [*found])
    return found


_INT = frozenset({int})
#: The types that are accepted in a list of scalars of a type.
_SCALAR_TYPES = {int: _INT, float: frozenset({float, int}), str: frozenset({str})}
_PLAIN: dict[object, Callable[[object], object]] = {
    int: _number,
    float: functools.partial(_of_type, (float, int), "a number"),
    str: functools.partial(_of_type, (str,), "a text"),
    bytes: functools.partial(_of_type, (bytes,), "bytes"),
    bool: functools.partial(_of_type, (bool,), "true or false"),
}


#: Steps, rows and bytes are counted by signed numbers of 64 bits.
MOST = (1 << 63) - 1
#: Most axes of an array, as numpy has it.
MOST_AXES = 32
#: What errors expect of arrays; formatting these takes longer than the checks.
DTYPES, AXES = f"one of {sorted(dtypes.NUMPY_DTYPES)}", f"1 to {MOST_AXES} axes"
#: zstd makes at most a block of 128 KiB from four bytes.
MOST_ZSTD_RATIO = (128 << 10) // 4
#: Most bytes of a name that is, or becomes, a component of a path.
_NAME_BYTES = 255


def require(holds: bool, expected: str, found: object, place: str = "") -> None:
    """Raises InvalidRecord if a property of a record does not hold."""
    if not holds:
        raise InvalidRecord(expected, found, place)


def is_name(*names: str) -> bool:
    """Returns whether each string is a single path component, so that it cannot leave its save."""
    # Cached, since each save names up to 64 parents; the cache must not keep long strings.
    return max(map(len, names), default=0) <= _NAME_BYTES and all(map(_is_name, names))


@functools.lru_cache(1024)
def _is_name(name: str) -> bool:
    is_inside = name not in ("", ".", "..") and not {"/", "\0"}.intersection(name)
    return is_inside and len(name.encode()) <= _NAME_BYTES


@functools.lru_cache(1024)
def _is_quoted_name(name: str) -> bool:
    return is_name(urllib.parse.quote(name, safe=""))


def check_files(files: Mapping[str, tuple[int, int, int]]) -> None:
    """Checks digests (length, CRC32C, last bytes) of files by path below a directory.

    Raises InvalidRecord if a path leads out of the directory, or if a digest is impossible.
    """
    for path, (length, crc, tail) in files.items():
        is_inside = len(path) <= _PATH_CHARACTERS and path.count("/") <= _MOST_FOLDERS
        if not is_inside or _INSIDE.fullmatch(path) is None:
            expected = f"paths of files below it, at most {_MOST_FOLDERS} folders deep"
            raise InvalidRecord(expected, path)
        if length > MOST or crc >> 32 or tail >> 8 * min(length, TAIL_BYTES):
            raise InvalidRecord(f"a possible digest of {shown(path)}", (length, crc, tail))


def check_save_id(save_id: SaveId, place: str) -> None:
    """Raises InvalidRecord if the identity of a save or WAL record is invalid."""
    require(is_name(save_id.run), "the id of a run", save_id.run, f"{place}.run")
    require(save_id.step <= MOST, f"at most {MOST}", save_id.step, f"{place}.step")


def check_segment(segment: Segment) -> None:
    """Raises InvalidRecord if a segment's record is invalid on its own."""
    require(is_name(segment.name), "the name of a directory", segment.name, "name")
    require(segment.count <= MOST, f"at most {MOST}", segment.count, "count")
    if segment.ranges is not None:
        bounds = [bound for span in segment.ranges for bound in span]
        require(bounds == sorted(bounds), "ascending ranges", segment.ranges, "ranges")
    for entry in segment.arrays:
        try:
            _check_array(entry)
        except InvalidRecord as error:
            raise error.within(f"arrays.{shown(entry.name)}") from None


def _check_array(entry: ArrayEntry) -> None:
    is_short = len(entry.name) <= _NAME_BYTES
    require(is_short and _is_quoted_name(entry.name), "the name of a directory", entry.name, "name")
    require(entry.dtype in dtypes.NUMPY_DTYPES, DTYPES, entry.dtype, "dtype")
    require(0 < len(entry.shape) <= MOST_AXES, AXES, entry.shape, "shape")
    require(entry.chunk_rows > 0, "1 or more", entry.chunk_rows, "chunk_rows")
    # A chunk may have room for more rows than there are.
    rows = max(entry.chunk_rows, entry.shape[0])
    nbytes = math.prod((rows, *entry.shape[1:])) * dtypes.itemsize_of(entry.dtype)
    require(nbytes <= MOST and rows <= MOST, f"at most {MOST} bytes", entry.shape, "shape")
