# SPDX-License-Identifier: Apache-2.0
"""Dense leaves as blocks: copied when a save is taken, encoded against those of its parent.

A base keeps them in Orbax's layout, exact; a delta as blocks of our item. What they decode to is
the *reference* of the next delta: see ``dense_references``. A delta whose parent has none holds
whole leaves.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.codecs import of_blocks
from deltackpt.errors import OptionError, UnsupportedLeaf
from deltackpt.format import blocks, dense_blocks, globs
from deltackpt.format.dense_blocks import (
    BLOCK,
    BLOCKS,
    PLAIN,
    PLAIN_BYTES_OF,
    BlockedValue,
    DenseBlocks,
)
from deltackpt.format.manifest import ArrayEntry, DenseLeaf, RollingShare, SaveId, path_name
from deltackpt.format.segments import Segment
from deltackpt.save import block_codes, dense_layout, extract, leaf_parts
from deltackpt.save.block_codes import CodedBlocks, CodedLeaf
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.dense_layout import Chunk
from deltackpt.save.dense_references import Decoded, Hashes, Key, Left, References
from deltackpt.storage import arrays, parts
from deltackpt.storage.ocdbt import ZARRAY, Value
from deltackpt.storage.parts import Place, StoredArrays

#: Smaller leaves are copied into memory of their own: staging has whole MiB.
_STAGED_BYTES = 1 << 20


class Coding(NamedTuple):
    """How a leaf is kept in deltas.

    Attributes:
      codec: ``exact``, or a lossy one.
      max_error: most relative l2 error; None for any.
    """

    codec: str = of_blocks.EXACT
    max_error: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TakenValue:
    """A value of the dense item in memory of its own.

    Attributes:
      key: of Orbax's database, or a file's path in the item.
      file: whether it is a file.
      data: (blocks, 256) of the leaf's dtype, filled up with zeros; of a plain value (n,) uint8.
      count: numbers of the leaf; of a plain value its bytes.
      shape: of the chunk; None of a plain value that is no array.
      coding: how it is kept.
      leaf: path of the leaf that it is of; empty where it is of none.
    """

    key: str
    file: bool
    data: np.ndarray
    count: int
    shape: tuple[int, ...] | None
    dtype: np.dtype
    coding: Coding
    leaf: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is kept as bytes."""
        return self.data.ndim == 1

    @property
    def array(self) -> np.ndarray:
        """The chunk, or the bytes."""
        if self.shape is None:
            return self.data
        flat = self.data.reshape(-1)
        found = flat.view(self.dtype) if self.plain else flat[: self.count]
        return found.reshape(self.shape)


class TakenDense:
    """What this process has of the dense leaves, independent of later training steps."""

    def __init__(self, values: Sequence[TakenValue], plan: dense_layout.Plan, keeper: DenseKeeper):
        """Made by ``DenseKeeper.take``."""
        self.values = values
        self.plan = plan
        self._keeper = keeper

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(value.data.nbytes for value in self.values)

    def as_item(self, save_id: SaveId) -> DenseLeaves:
        """The item of a base in Orbax's layout; its leaves are references from its commit on."""
        references = self._keeper.references
        decoded = {(value.file, value.key): value.data for value in self.values}
        references.stage(save_id, Left(decoded, self._counts()))
        values = [
            Value(value.key, bytes(value.data) if value.shape is None else value.array)
            for value in self.values
            if not value.file
        ]
        return DenseLeaves(self.plan, values, references.staging, [])

    def coded(
        self,
        parent: SaveId | None,
        save_id: SaveId,
        pool: concurrent.futures.Executor,
        *,
        rolling: RollingShare | None = None,
    ) -> CodedDense:
        """The values of a delta, encoded against those of its parent.

        Args:
          parent: of the delta.
          save_id: of the delta.
          pool: encodes.
          rolling: the share that it holds of a rolling base.
        """
        references, counts = self._keeper.references, self._counts()
        left = references.of(parent).of(counts)
        found = encode(
            self.values,
            left.data,
            pool,
            skip_unchanged=self._keeper.skip_unchanged,
            hashes=left.hashes,
            rolling=rolling,
        )
        decoded = {(one.taken.file, one.taken.key): one.decoded for one in found}
        references.stage(save_id, Left(decoded, counts))
        self.release()
        return CodedDense(found)

    def release(self) -> None:
        """Gives up what no save holds; safe to call again."""
        self._keeper.references.done_with(value.data for value in self.values)

    def _counts(self) -> dict[Key, int]:
        return {(value.file, value.key): value.count for value in self.values}


class CodedValue(NamedTuple):
    """A value that was encoded.

    Attributes:
      taken: what it was.
      leaf: its blocks; None of a plain value.
      decoded: what it will decode to.
      changed: whether anything of it is stored.
    """

    taken: TakenValue
    leaf: CodedLeaf | None
    decoded: np.ndarray
    changed: bool


def encode(
    values: Sequence[TakenValue],
    before: Decoded,
    pool: concurrent.futures.Executor,
    *,
    skip_unchanged: bool = True,
    hashes: Mapping[Key, Hashes] | None = None,
    rolling: RollingShare | None = None,
) -> list[CodedValue]:
    """Encodes values against what they were, by what each is kept by.

    Args:
      values: of one process.
      before: what those of the parent decode to; values that are not there are whole.
      pool: encodes.
      skip_unchanged: whether what did not change is left out.
      hashes: of leaves of the parent that are not there.
      rolling: the share that a save of a rolling base holds by itself.
    """
    found = []
    for value in values:
        key = value.file, value.key
        reference = before.get(key)
        if reference is not None and (
            reference.shape != value.data.shape or reference.dtype != value.data.dtype
        ):
            reference = None
        if value.plain:
            same = (
                skip_unchanged and reference is not None and bool((reference == value.data).all())
            )
            shared = rolling is not None and bool(leaf_parts.share_of(1, rolling, value.key))
            found.append(CodedValue(value, None, value.data, not same or shared))
            continue
        hashed = None if hashes is None or rolling is not None else hashes.get(key)
        leaf = _encoded(value, reference, hashed, rolling, pool, skip_unchanged)
        found.append(CodedValue(value, leaf, leaf.decoded, bool(leaf.pieces)))
    return found


def _encoded(
    value: TakenValue,
    reference: np.ndarray | None,
    hashed: Hashes | None,
    rolling: RollingShare | None,
    pool: concurrent.futures.Executor,
    skip_unchanged: bool,
) -> CodedLeaf:
    data, (codec, max_error) = value.data, value.coding
    parts = None
    if reference is not None and rolling is not None:
        parts = leaf_parts.with_share(data, reference, rolling, value.key)
    elif reference is None and hashed is not None:
        parts = leaf_parts.by_hashes(data, hashed)
    if parts is None:
        return block_codes.encode_leaf(
            data, reference, codec, max_error, pool, skip_unchanged=skip_unchanged
        )
    return leaf_parts.encode_parts(
        data, parts, codec, max_error, pool, skip_unchanged=skip_unchanged
    )


class CodedDense:
    """Encoded values, ready to be written to a part or to frames."""

    def __init__(self, values: Sequence[CodedValue]):
        """Of one process, in the order of the item."""
        self.values = values
        described = [
            BlockedValue(
                key=one.taken.key,
                file=one.taken.file,
                dtype="uint8" if one.taken.plain else one.taken.data.dtype.name,
                count=one.taken.count,
                group=PLAIN if one.taken.plain else one.taken.data.dtype.name,
                at=None,
            )
            for one in values
        ]
        at, placed = 0, []
        for one, value in zip(values, described, strict=True):
            if value.plain and one.changed:
                value, at = dataclasses.replace(value, at=at), at + value.count
            placed.append(value)
        self._described = tuple(dense_blocks.laid_out(placed))

    def write(self, place_of: Callable[[str], Place]) -> DenseBlocks:
        """Writes the arrays of all segments.

        Args:
          place_of: where the segment of a name goes.
        """
        segments = list(self._plain(place_of))
        for (group, codec), pieces in sorted(self._by_codec().items()):
            place = place_of(f"dense.{group}.{codec}")
            segments.append(_written(place, group, codec, pieces))
        return DenseBlocks(values=self._described, segments=tuple(segments))

    def _plain(self, place_of: Callable[[str], Place]) -> Iterator[Segment]:
        held = [one.taken.data for one in self.values if one.changed and one.taken.plain]
        total = sum(data.nbytes for data in held)
        if not total:
            return
        place = place_of(f"dense.{PLAIN}")
        entry = arrays.array_entry(PLAIN_BYTES_OF, (total,), np.dtype(np.uint8), zstd=True)
        stored = parts.stored_field(
            PLAIN_BYTES_OF,
            parts.write_array(place, entry, [np.concatenate(held)]),
            codec="raw",
            reason="",
            bounds=np.array([0, total]),
        )
        rows = range(total)
        yield parts.stored_segment(place, PLAIN, (0, 1), rows, StoredArrays((), 0), [stored])

    def _by_codec(self) -> dict[tuple[str, str], list[CodedBlocks]]:
        """The pieces of each group and codec in order, their blocks counted in the group."""
        found: dict[tuple[str, str], list[CodedBlocks]] = {}
        for one, value in zip(self.values, self._described, strict=True):
            for piece in () if one.leaf is None else one.leaf.pieces:
                assert value.at is not None
                moved = piece._replace(blocks=piece.blocks + value.at)
                found.setdefault((value.group, piece.codec), []).append(moved)
        return found


def _written(place: Place, group: str, codec: str, pieces: Sequence[CodedBlocks]) -> Segment:
    numbers = np.concatenate([piece.blocks for piece in pieces])
    rows: blocks.Rows = numbers
    if len(numbers) == numbers[-1] + 1 - numbers[0]:
        rows = range(int(numbers[0]), int(numbers[-1]) + 1)
    row_numbers = parts.write_rows(place, rows)
    written = []
    stored = of_blocks.get(codec).stored(dense_blocks.dtypes.dtype_of(group))
    for suffix, array in stored.items():
        held = [piece.arrays[suffix] for piece in pieces]
        written.append(parts.write_array(place, entry_of(suffix, array, held), held))
    field = parts.stored_field(
        BLOCKS,
        StoredArrays.joined(written),
        codec=codec,
        reason="",
        bounds=np.array([0, len(rows)]),
    )
    return parts.stored_segment(place, group, (0, BLOCK), rows, row_numbers, [field])


def entry_of(suffix: str, array: of_blocks.BlockArray, held: Sequence[np.ndarray]) -> ArrayEntry:
    """The stored array of some blocks; chunks hold what 16 MiB do."""
    count = sum(len(one) for one in held)
    name = f"{BLOCKS}.{suffix}" if suffix else BLOCKS
    shape = (count, *array.trailing)
    return arrays.array_entry(
        name, shape, array.dtype, zstd=array.zstd, byte_planes=array.byte_planes
    )


def codings(
    codec: str | Mapping[str, str], max_error: float | None
) -> Callable[[DenseLeaf, Any], Coding]:
    """How each leaf is kept, by what the user chose; the answers are kept.

    Args:
      codec: for all leaves, or by glob over their paths: the first that matches; exact where none
        does. One for all takes only the floats that it can code.
      max_error: most relative l2 error of a leaf.
    """
    known: dict[tuple[Any, str], Coding] = {}

    def found(leaf: DenseLeaf, dtype: Any) -> Coding:
        key = leaf.path, dtype.name
        if key not in known:
            known[key] = _coding(codec, max_error, path_name(leaf.path), dtype.name)
        return known[key]

    return found


def _coding(
    codec: str | Mapping[str, str], max_error: float | None, path: str, dtype: str
) -> Coding:
    if isinstance(codec, str):
        name, named = codec, False
    else:
        name = next((one for glob, one in codec.items() if globs.matches(glob, path)), None)
        name, named = (of_blocks.EXACT, False) if name is None else (name, True)
    if name == of_blocks.EXACT:
        return Coding()
    if not of_blocks.get(name).takes(dtype):
        if named:
            raise OptionError(
                f"Dense.codec: dense leaf {path}: {name} takes {', '.join(of_blocks.FLOATS)}, "
                f"found {dtype}; integers, truth values, keys and counters are always exact: name "
                "it by a glob of its own with codec 'exact' first, or leave it out"
            )
        return Coding()
    return Coding(name, max_error)


class DenseKeeper:
    """Copies dense leaves for saves, and keeps what those decode to; thread-safe."""

    def __init__(
        self,
        coding_of: Callable[[DenseLeaf, Any], Coding],
        *,
        max_reference_bytes: int,
        skip_unchanged: bool,
    ):
        """Keeps nothing yet.

        Args:
          coding_of: how the leaf at a path is kept in deltas.
          max_reference_bytes: host memory for references, over all saves that are kept.
          skip_unchanged: whether what did not change is left out of deltas.
        """
        self.skip_unchanged = skip_unchanged
        self.references = References(max_reference_bytes, hashed=skip_unchanged)
        self._coding_of = coding_of

    def take(self, tree: Any, leaves: Sequence[DenseLeaf], process: int) -> TakenDense:
        """Copies what this process has of the dense leaves; waits for accelerators.

        Args:
          tree: nested containers of leaves, as they are stored.
          leaves: where each stands in the state.
          process: index of this process.

        Raises:
          UnsupportedLeaf: Orbax's handler has to write them.
        """
        plan = dense_layout.plan(tree, process)
        for chunk in plan.chunks:
            if not extract.on_host(chunk.source):
                chunk.source.copy_to_host_async()
        named = self._named(leaves, plan)
        values = [_plain(name, text.encode(), file=True) for name, text in plan.files.items()]
        values += [_plain(key, data) for key, data in plan.described.items()]
        try:
            for chunk in plan.chunks:
                values.append(self._copied(chunk, named))
        except BaseException:
            self.references.done_with(value.data for value in values)
            raise
        return TakenDense(values, plan, self)

    def adopt(
        self,
        save_id: SaveId,
        tree: Any,
        leaves: Sequence[DenseLeaf],
        process: int,
        described: Mapping[str, bytes],
    ) -> None:
        """Makes a restored state the reference of the step that it was restored from.

        Args:
          save_id: of the step.
          tree: as for ``take``, of what was restored: what the step decodes to.
          leaves: likewise.
          process: likewise.
          described: ``.zarray`` keys of the step, and their values. Leaves that lie in other chunks
            now, on another topology, are no references.
        """
        try:
            taken = self.take(tree, leaves, process)
        except UnsupportedLeaf:
            return
        changed = {
            key.removesuffix(f"/{ZARRAY}")
            for key, data in dense_layout.described(tree).items()
            if described.get(key) != data
        }
        kept = [
            value
            for value in taken.values
            if value.shape is not None and value.key.rpartition("/")[0] not in changed
        ]
        left = Left(
            {(False, value.key): value.data for value in kept},
            {(False, value.key): value.count for value in kept},
        )
        self.references.stage(save_id, left)
        self.references.committed(save_id, save_id)
        taken.release()

    def _named(
        self, leaves: Sequence[DenseLeaf], plan: dense_layout.Plan
    ) -> dict[str, tuple[str, Coding]]:
        """Name in Orbax's database to the path of the leaf, and how it is kept."""
        dtypes_of = {chunk.key.rpartition("/")[0]: chunk.source.dtype for chunk in plan.chunks}
        found = {}
        for leaf in leaves:
            name = ".".join(leaf.key)
            if name in dtypes_of:
                found[name] = path_name(leaf.path), self._coding_of(leaf, dtypes_of[name])
        return found

    def _copied(self, chunk: Chunk, named: Mapping[str, tuple[str, Coding]]) -> TakenValue:
        found = np.asarray(chunk.source)[chunk.window]
        name, _, _ = chunk.key.rpartition("/")
        leaf, coding = named.get(name, (name, Coding()))
        if dense_blocks.is_plain(found.nbytes, found.dtype.name) or not found.dtype.isnative:
            data = np.frombuffer(found.tobytes(), np.uint8)
            shape = found.shape
            return TakenValue(chunk.key, False, data, data.size, shape, found.dtype, coding, leaf)
        count = found.size
        shape = (dense_blocks.blocks_of(count), BLOCK)
        if found.nbytes < _STAGED_BYTES:
            data = np.empty(shape, found.dtype)
        else:
            data = self.references.buffer(shape, found.dtype)
        flat = data.reshape(-1)
        np.copyto(flat[:count].reshape(found.shape), found)
        flat[count:] = 0
        return TakenValue(chunk.key, False, data, count, found.shape, found.dtype, coding, leaf)


def _plain(key: str, data: bytes, *, file: bool = False) -> TakenValue:
    found = np.frombuffer(data, np.uint8)
    return TakenValue(key, file, found, len(data), None, found.dtype, Coding())
