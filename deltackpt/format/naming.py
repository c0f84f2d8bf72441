# SPDX-License-Identifier: Apache-2.0
"""Builds and parses all object names; matches globs over paths.

Inside an Orbax step directory::

    <step>/
      embeddings/                      the item of DeltaHandler (its name is the user's)
        manifest.<process>.msgpack     written last in its shard
        layer.<process>                the arrays of a delta
        digests.<process>.msgpack      of a base: length and CRC32C of every file of the shard
        shard.<process>/<segment>/<array>/zarr.json, c.<i>...    the arrays of a base
      dense/                           an Orbax PyTree item
      digests.step.<process>.msgpack   the other files of one process, if it has any
      digests.step.msgpack             everything else in a base, written just before the commit

Beside the steps::

    compacted/
      lock                             held by the compactor of the directory
      <step>/<item>/                   a base that replaces the item of the step
        dense/                         Orbax's item, if the step stores dense leaves as blocks
      <step>.<id>.tmp/                 a base that is being merged
    kept.msgpack                       the steps that the preservation policy keeps
    log/
      <epoch>.msgpack                  the header of a WAL epoch, with its fork point
      <epoch>/head.msgpack             a copy of the header
      <epoch>/<process>/<part>-<seq>.seg     segments: layers, appended
"""

from __future__ import annotations

import functools
import operator
import re
import reprlib
import urllib.parse
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeAlias, TypeVar

from deltackpt.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from deltackpt.storage.store import StorePath

_Where = TypeVar("_Where", "Path", "StorePath")
#: A state, a template or a part of one: nested containers of any type that JAX has registered.
PyTree: TypeAlias = Any
#: A leaf of a tree: an array, a description of one, or a plain value.
Leaf: TypeAlias = Any

EMBEDDINGS_ITEM = "embeddings"
DENSE_ITEM = "dense"
STEP_DIGESTS = "digests.step.msgpack"
#: Longest name that file systems take.
_NAME_BYTES = 255
#: Orbax's metadata of a step: its items, metrics and times.
STEP_METADATA = "_CHECKPOINT_METADATA"
#: By this name, the metadata refers to the handler of our item.
TABLES_HANDLER = "deltackpt.handlers.v1.DeltaCheckpointableHandler"
#: Orbax's item of what was measured at a step, and the file in it.
METRICS = "metrics"
#: What Orbax looks for where directories cannot be renamed.
COMMIT_SUCCESS = "commit_success.txt"
#: Orbax's metadata of an item's leaves, in the item.
PYTREE_METADATA = "_METADATA"
#: Every file of Orbax and deltackpt next to the items of a step.
_STEP_FILES = (STEP_DIGESTS, STEP_METADATA, COMMIT_SUCCESS)
#: What Orbax calls an item, or a step, that is not whole yet.
TEMPORARY = ".orbax-checkpoint-tmp"
#: Moved-aside steps of a rolled-back run, beside the steps.
ROLLED_BACK = "rolled-back"
#: Prefix of the names that steps and bases get before they are deleted.
REMOVED = f"0{TEMPORARY}-removed-"
#: Compacted bases, next to the steps that they replace.
COMPACTED = "compacted"
COMPACTION_LOCK = "lock"
#: The write-ahead log, next to the steps.
LOG = "log"
#: The copy of a WAL epoch's header, next to its segments.
HEAD_COPY = "head.msgpack"
#: What the trainer's policy of retention keeps.
KEPT = "kept.msgpack"
#: The newest step that a record can hold: an int64.
LAST_STEP = (1 << 63) - 1
#: Unfinished copies; hidden, so that they are not taken for steps.
COPYING = ".copying"
GAPS = "rows.gaps"

#: Folder of a database's nodes, if they are not stored with the values in "d/".
DENSE_NODES = "n/"

_STEP_DIGESTS = re.compile(r"digests\.step\.(\d+)\.msgpack")
#: What Orbax calls the folder of the dense files that a process writes.
_DENSE_NODE = re.compile(rf"[^/]+/ocdbt\.process_\d+/(manifest\.ocdbt|{DENSE_NODES}.+)")
_SHARD = re.compile(r"(shard|layer)\.\d+")
#: The digests of a shard are covered by its manifest.
_OTHERS = re.compile(r"(manifest|digests)\.[1-9]\d*\.msgpack")
_STEP = re.compile(r"0|[1-9][0-9]*")
_LEASE = re.compile(r"lease\.(\d+)\.msgpack")
_EPOCH_HEADER = re.compile(r"(0|[1-9]\d{0,17})\.msgpack")
_SEGMENT = re.compile(r"(\d{5})-(\d{20})\.seg")
_PIECE = re.compile(r"(\d{20})-(\d{20})\.(0|[1-9]\d{0,18})")
_COMPACTION = re.compile(r".+\.[0-9a-f]{32}\.tmp")


def is_item_name(name: object) -> bool:
    """Returns whether a name is valid for an item: one unique folder in a step."""
    if not isinstance(name, str) or name in ("", ".", "..", DENSE_ITEM, *_STEP_FILES):
        return False
    if {"/", "\0"}.intersection(name) or any("\ud800" <= one <= "\udfff" for one in name):
        return False
    if len(name.encode()) > _NAME_BYTES:
        return False
    return TEMPORARY not in name and step_digests_process(name) is None


def manifest_name(process: int) -> str:
    """Returns the name of a process's manifest in the item's directory."""
    return f"manifest.{process}.msgpack"


def position_name(process: int, count: int) -> str:
    """Name of the position of a process's data iterator: grain's name."""
    return f"process_{process}-of-{count}.json"


def digests_name(process: int) -> str:
    """Name of a process's digests in the item's directory."""
    return f"digests.{process}.msgpack"


def step_digests_name(process: int) -> str:
    """Name of the digests of the dense files that one of several processes wrote."""
    return f"digests.step.{process}.msgpack"


def step_digests_process(name: str) -> int | None:
    """Returns the process of step digests; None if the name is not one of step digests."""
    match = _STEP_DIGESTS.fullmatch(name)
    return int(match[1]) if match else None


def dense_process_dir(process: int) -> str:
    """Name of the folder of the dense files that a process writes."""
    return f"ocdbt.process_{process}"


def is_dense_node(name: str) -> bool:
    """Returns whether a path in a step is a manifest or node of a process's dense database."""
    return _DENSE_NODE.fullmatch(name) is not None


def shard_dir(item_dir: _Where, process: int) -> _Where:
    """Directory of a process's arrays."""
    return item_dir / f"shard.{process}"


def layer_name(process: int) -> str:
    """Name of the file with a process's arrays of a delta."""
    return f"layer.{process}"


def is_of_shard(name: str) -> bool:
    """Returns whether a path in the item's directory is covered by a process's own records.

    Process 0's index covers the files next to the arrays, except process 0's manifest and digests.
    """
    top = name.partition("/")[0]
    return _SHARD.fullmatch(top) is not None or _OTHERS.fullmatch(top) is not None


def array_dir(item_dir: _Where, process: int, segment: str, array: str) -> _Where:
    """Directory of a Zarr array of a shard; its name is percent-encoded: it may hold slashes."""
    return shard_dir(item_dir, process) / segment / urllib.parse.quote(array, safe="")


def step_number(name: str) -> int | None:
    """Returns the step of a committed step's directory name; None for other names."""
    return int(name) if _STEP.fullmatch(name) else None


def as_step(step: SupportsIndex) -> int:
    """Returns a caller's step, such as flax's ``TrainState.step``, as a plain int.

    Raises OptionError if it is not an integer scalar from 0 to ``LAST_STEP``.
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except (RuntimeError, TypeError):  # Of a donated array; of floats, arrays and traced values.
        number = None
    if number is None or not 0 <= number <= LAST_STEP:
        raise OptionError(
            f"step: expected an integer from 0 to 2**63 - 1, or an integer scalar of numpy or jax, "
            f"found {reprlib.repr(step)} of type {type(step).__name__}; pass the number of "
            "completed training steps, outside of jit"
        )
    return number


def lease_name(epoch: int) -> str:
    """Name of an epoch's lease in the root."""
    return f"lease.{epoch}.msgpack"


def lease_epoch(name: str) -> int | None:
    """Returns the epoch of a lease; None if the name is not one of a lease."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def compacted_dir(step_dir: _Where, item: str) -> _Where:
    """Returns the directory of the compacted base of a step's item."""
    return step_dir.parent / COMPACTED / step_dir.name / item


def compaction_name(step_dir: str) -> str:
    """Returns a new name below ``COMPACTED`` for a base that is being merged."""
    return f"{step_dir}.{uuid.uuid4().hex}.tmp"


def is_compaction(name: str) -> bool:
    """Returns whether a name below ``COMPACTED`` is a base that is, or was, being merged."""
    return _COMPACTION.fullmatch(name) is not None


def epoch_name(epoch: int) -> str:
    """Returns the name of a WAL epoch's header."""
    return f"{epoch}.msgpack"


def epoch_number(name: str) -> int | None:
    """Returns the number in a WAL epoch header's name; None for other names."""
    match = _EPOCH_HEADER.fullmatch(name)
    return int(match[1]) if match else None


class SegmentId(NamedTuple):
    """The start of a WAL segment of a process: its part, and its first record."""

    part: int
    seq: int


def segment_name(part: int, seq: int) -> str:
    """Returns the name of a WAL segment; names sort in log order."""
    return f"{part:05}-{seq:020}.seg"


def parse_segment_name(name: str) -> SegmentId | None:
    """Parses a segment's name; None for other names."""
    match = _SEGMENT.fullmatch(name)
    return SegmentId(int(match[1]), int(match[2])) if match else None


class PieceRange(NamedTuple):
    """A piece of a segment in a bucket: its offsets, and the step of its last (partial) record."""

    start: int
    end: int
    step: int


def piece_name(piece: PieceRange) -> str:
    """Returns the name of a piece of a segment, below the segment's."""
    return f"{piece.start:020}-{piece.end:020}.{piece.step}"


def piece_range(name: str) -> PieceRange | None:
    """Parses a piece's name; None for other names."""
    match = _PIECE.fullmatch(name)
    return PieceRange(int(match[1]), int(match[2]), int(match[3])) if match else None


#: Maximum number of paths that an error lists.
_LISTED = 40


def listed(names: Iterable[str]) -> str:
    """Formats names one per line for an error message; only the first few of many."""
    names = sorted(names)
    lines = [f"  {name}" for name in names[:_LISTED]]
    if len(names) > _LISTED:
        lines.append(f"  ... and {len(names) - _LISTED} more")
    return "\n".join(lines) if lines else "  (none)"


def meant(name: str, names: Iterable[str], error: type[Exception]) -> str:
    """Returns the path that a name refers to: itself, or the only one that ends with ``/name``.

    Returns the name itself if no path ends with it; raises ``error`` if several do.
    """
    known = set(names)
    ends = {path for path in known if path.endswith(f"/{name}")}
    if name in known or not ends:
        return name
    if len(ends) > 1:
        raise error(
            f"table {name!r}: expected the end of exactly one path, found several\n"
            f"{listed(ends)}\nuse more of the path"
        )
    return ends.pop()


_GLOBS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@functools.lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(_GLOBS.get(piece, re.escape(piece)) for piece in pieces), re.DOTALL)


def matches(pattern: str | re.Pattern[str], name: str) -> bool:
    """Returns whether a path matches a glob or compiled pattern completely."""
    compiled = _glob(pattern) if isinstance(pattern, str) else pattern
    return compiled.fullmatch(name) is not None
