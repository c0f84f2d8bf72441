# SPDX-License-Identifier: Apache-2.0
"""Every object name, built and parsed here only.

Inside an Orbax step directory::

    <step>/
      embeddings/                      the item of DeltaHandler (its name is the user's)
        manifest.<process>.msgpack     written last of its part
        digests.<process>.msgpack      length and CRC32C of every file of the part
        part.<process>/<segment>/<array>/zarr.json, c/...
      dense/                           Orbax's own PyTree item
      digests.step.<process>.msgpack   the dense files of one of several processes
      digests.step.msgpack             everything else in the step, written just before the commit

Beside the steps::

    compacted/
      lock                             held by the one compactor of the directory
      <step>/<item>/                   a base that stands for the item of the step
        dense/                         Orbax's item, where the step has dense leaves as blocks
      <step>.<id>.tmp/                 one that is being folded
    kept.msgpack                       what the trainer's policy of retention keeps
    log/
      <stretch>.msgpack                the head of a stretch: what its log goes on from
      <stretch>/<process>/<part>-<seq>.seg   frames, end to end
"""

from __future__ import annotations

import operator
import re
import urllib.parse
import uuid
from typing import NamedTuple, Protocol, Self, SupportsIndex, TypeVar

from deltackpt.errors import OptionError

EMBEDDINGS_ITEM = "embeddings"
DENSE_ITEM = "dense"
STEP_DIGESTS = "digests.step.msgpack"
#: Longest name that file systems take.
_NAME_BYTES = 255
#: What Orbax says of a step: its items, metrics and times.
STEP_METADATA = "_CHECKPOINT_METADATA"
#: Orbax's item of what was measured at a step, and the file in it.
METRICS = "metrics"
#: What Orbax looks for where directories cannot be renamed.
COMMIT_SUCCESS = "commit_success.txt"
#: What Orbax's PyTree handler says of an item's leaves, in the item.
PYTREE_METADATA = "_METADATA"
#: Every file of Orbax's and ours that stands beside the items of a step.
_STEP_FILES = (STEP_DIGESTS, STEP_METADATA, COMMIT_SUCCESS)
#: What Orbax calls an item, or a step, that is not whole yet.
TEMPORARY = ".orbax-checkpoint-tmp"
#: Moved-aside steps of a rolled-back run, beside the steps.
ROLLED_BACK = "rolled-back"
#: Steps that are being deleted: renamed here first, then emptied.
TRASH = "deleted"
#: Bases that compaction folded, beside the steps that they stand for.
COMPACTED = "compacted"
COMPACTION_LOCK = "lock"
#: What was logged between steps, beside them.
LOG = "log"
#: What the trainer's policy of retention keeps.
KEPT = "kept.msgpack"
#: The newest step that a record can hold: an int64.
LAST_STEP = (1 << 63) - 1
#: What a copy has not finished yet; hidden, so that nobody takes it for a step.
COPYING = ".copying"
#: Markers of what is whole in an object store.
COPIED = "copied"
GAPS = "rows.gaps"

#: Folder of the nodes of a database, where they do not stand beside values in "d/".
DENSE_NODES = "n/"

_MANIFEST = re.compile(r"manifest\.(\d+)\.msgpack")
_STEP_DIGESTS = re.compile(r"digests\.step\.(\d+)\.msgpack")
#: What Orbax calls the folder of the dense files that a process writes.
_DENSE_PART = re.compile(r"ocdbt\.process_(\d+)")
_DENSE_NODE = re.compile(rf"[^/]+/ocdbt\.process_\d+/(manifest\.ocdbt|{DENSE_NODES}.+)")
_PART = re.compile(r"part\.\d+")
#: The digests of a part are covered by its manifest.
_OTHERS = re.compile(r"(manifest|digests)\.[1-9]\d*\.msgpack")
_FAILURE = re.compile(r"failed\.(\d+)\.json")
_STEP = re.compile(r"0|[1-9][0-9]*")
_LEASE = re.compile(r"lease\.(\d+)\.msgpack")
_STRETCH = re.compile(r"(0|[1-9]\d{0,17})\.msgpack")
_SEGMENT = re.compile(r"(\d{5})-(\d{20})\.seg")
_PIECE = re.compile(r"(\d{20})-(\d{20})\.(0|[1-9]\d{0,18})")
_COMPACTION = re.compile(r".+\.[0-9a-f]{32}\.tmp")


def is_item_name(name: object) -> bool:
    """Whether an item may be called so: one folder in a step, with a name to itself."""
    if not isinstance(name, str) or name in ("", ".", "..", DENSE_ITEM, *_STEP_FILES):
        return False
    if {"/", "\0"}.intersection(name) or any("\ud800" <= one <= "\udfff" for one in name):
        return False
    if len(name.encode()) > _NAME_BYTES:
        return False
    return TEMPORARY not in name and step_digests_process(name) is None


def manifest_name(process: int) -> str:
    """Name of a process's manifest in the item's directory."""
    return f"manifest.{process}.msgpack"


def manifest_process(name: str) -> int | None:
    """Process of a manifest's name, None where the name is another object's."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def position_name(process: int, count: int) -> str:
    """Name of the position of a process's data iterator: grain's name."""
    return f"process_{process}-of-{count}.json"


def failure_name(process: int) -> str:
    """Name of the note of a process that could not write its part; never in a committed step."""
    return f"failed.{process}.json"


def failure_process(name: str) -> int | None:
    """Process of a failure's note, None where the name is another object's."""
    match = _FAILURE.fullmatch(name)
    return int(match[1]) if match else None


def digests_name(process: int) -> str:
    """Name of a process's digests in the item's directory."""
    return f"digests.{process}.msgpack"


def step_digests_name(process: int) -> str:
    """Name of the digests of the dense files that one of several processes wrote."""
    return f"digests.step.{process}.msgpack"


def step_digests_process(name: str) -> int | None:
    """Process of such digests, None where the name is another object's."""
    match = _STEP_DIGESTS.fullmatch(name)
    return int(match[1]) if match else None


def dense_part(process: int) -> str:
    """Name of the folder of the dense files that a process writes."""
    return f"ocdbt.process_{process}"


def dense_process(name: str) -> int | None:
    """Process whose dense files a folder of Orbax's holds, None for another folder."""
    match = _DENSE_PART.fullmatch(name)
    return int(match[1]) if match else None


class _Folder(Protocol):
    """A path of a file system, or a spot of a store."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def __truediv__(self, name: str, /) -> Self: ...


_Where = TypeVar("_Where", bound=_Folder)


def is_dense_node(name: str) -> bool:
    """Whether a path below a step is a manifest or a node of a process's database of dense leaves.

    Where nodes have a folder of their own, these say all but the values.
    """
    return _DENSE_NODE.fullmatch(name) is not None


def part_dir(item_dir: _Where, process: int) -> _Where:
    """Directory of a process's arrays."""
    return item_dir / f"part.{process}"


def is_of_part(name: str) -> bool:
    """Whether a path in the item's directory is covered by what a process says of its own part.

    The arrays are by its digests; what stands beside them is by process 0's index, but for the
    manifest and the digests of process 0 itself.
    """
    top = name.partition("/")[0]
    return _PART.fullmatch(top) is not None or _OTHERS.fullmatch(top) is not None


def array_dir(item_dir: _Where, process: int, segment: str, array: str) -> _Where:
    """Directory of one Zarr array of a part; the name is percent-encoded, it may hold slashes."""
    return part_dir(item_dir, process) / segment / urllib.parse.quote(array, safe="")


def step_number(name: str) -> int | None:
    """Number of a committed step's directory, None where the name is another object's."""
    return int(name) if _STEP.fullmatch(name) else None


def as_step(step: SupportsIndex) -> int:
    """The number of a step that a caller gives, as a plain int.

    Args:
      step: an int, or an integer scalar of numpy or jax, such as flax's ``TrainState.step``.

    Raises:
      OptionError: it is not an integer, or is none that a step can have.
    """
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:  # A float, an array of several, a traced number: each says so in its way.
        number = None
    if number is None or not 0 <= number <= LAST_STEP:
        raise OptionError(
            f"step: expected an integer from 0 to 2**63 - 1, or an integer scalar of numpy or jax, "
            f"found {step!r} of type {type(step).__name__}; give the number of training steps "
            "taken, outside of jit"
        )
    return number


def lease_name(epoch: int) -> str:
    """Name of an epoch's lease in the root."""
    return f"lease.{epoch}.msgpack"


def lease_epoch(name: str) -> int | None:
    """Epoch of a lease's name, None where the name is another object's."""
    match = _LEASE.fullmatch(name)
    return int(match[1]) if match else None


def compacted_dir(step_dir: _Where, item: str) -> _Where:
    """Directory of the compacted base that stands for an item of a step."""
    return step_dir.parent / COMPACTED / step_dir.name / item


def copied_name(unit: str) -> str:
    """Key of the marker of a step, or of a compacted base, in an object store."""
    return f"{COPIED}/{unit}.msgpack"


def compaction_name(step_dir: str) -> str:
    """A fresh name below ``COMPACTED`` for a base that is being folded."""
    return f"{step_dir}.{uuid.uuid4().hex}.tmp"


def is_compaction(name: str) -> bool:
    """Whether a name below ``COMPACTED`` is that of a base that is, or was, being folded."""
    return _COMPACTION.fullmatch(name) is not None


def stretch_name(stretch: int) -> str:
    """Name of the head of a stretch of the log."""
    return f"{stretch}.msgpack"


def stretch_number(name: str) -> int | None:
    """Number of the stretch that a head's name is of, None where it is another object's."""
    match = _STRETCH.fullmatch(name)
    return int(match[1]) if match else None


class SegmentPlace(NamedTuple):
    """Where a segment of a process's log begins: in which part, and with which frame."""

    part: int
    seq: int


def segment_name(part: int, seq: int) -> str:
    """Name of a segment of a process's log; they sort as they follow each other."""
    return f"{part:05}-{seq:020}.seg"


def segment_place(name: str) -> SegmentPlace | None:
    """Where a segment of that name begins, None where it is another object's."""
    match = _SEGMENT.fullmatch(name)
    return SegmentPlace(int(match[1]), int(match[2])) if match else None


class PieceRange(NamedTuple):
    """A piece of a segment at a root that is a bucket.

    Attributes:
      start: where it begins in the segment.
      end: where the next one begins.
      step: of the last mark in it, or the one that it is a part of.
    """

    start: int
    end: int
    step: int


def piece_name(piece: PieceRange) -> str:
    """Name of a piece of a segment, below the segment's."""
    return f"{piece.start:020}-{piece.end:020}.{piece.step}"


def piece_range(name: str) -> PieceRange | None:
    """What a piece of that name holds, None where it is another object's."""
    match = _PIECE.fullmatch(name)
    return PieceRange(int(match[1]), int(match[2]), int(match[3])) if match else None
