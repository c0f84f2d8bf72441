# SPDX-License-Identifier: Apache-2.0
"""Tables that share one array whose rows are permuted for SparseCores, read and written by id.

A checkpoint holds each table as logical rows, so it does not depend on the topology. Only row
indices are permuted: a delta reads the touched rows where they are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from deltackpt import coordination
from deltackpt.cached import cached_property
from deltackpt.errors import OptionError, TableSelectionError
from deltackpt.format import row_blocks
from deltackpt.format.manifest import path_name
from deltackpt.format.naming import Leaf
from deltackpt.format.row_blocks import VALUES, Box
from deltackpt.state import paths, placement
from deltackpt.state.groups import TableFields
from deltackpt.state.paths import Flat

if TYPE_CHECKING:
    import numpy.typing as npt

#: A shard of a member has a multiple of so many rows, and a row of so many elements.
_ALIGNED = 8
#: Devices index rows with int32.
_MOST_ROWS = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackMember:
    """One of the tables in a stacked array.

    Attributes:
      name: the table's name in checkpoints: the last component of its path, without ``/``.
      rows: number of its ids: the vocabulary, without padding.
      width: elements of a row, without padding.
    """

    name: str
    rows: int
    width: int


class MemberRun(NamedTuple):
    """Consecutive rows of a stacked array, the first with ``id``, then every S-th for S shards."""

    row: int
    id: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedTable:
    """The layout of one stacked array: which row holds which id of which table.

    With S shards, id ``i`` of member ``k`` is in shard ``(i + k * rotation) % S``. A shard is a
    block of consecutive rows. It holds the members one after the other, each padded to the same
    multiple of 8 rows in every shard; in its member's part of the shard, the id is in row
    ``i // S``. A row is as wide as the widest member, padded to a multiple of 8 elements. These are
    the rules of jax-tpu-embedding (``table_stacking.py``), which are restated here.

    Attributes:
      members: the tables in the order in which they were stacked.
      shards: number of SparseCores of the topology: devices times SparseCores per device.
      rotation: shards by which each member is rotated against the one before;
        jax-tpu-embedding's default is the number of SparseCores per device.

    Raises:
      OptionError: a number is not positive, or two members have the same name.

    Examples:
      >>> users = StackMember(name="users", rows=20, width=12)
      >>> items = StackMember(name="items", rows=9, width=16)
      >>> stack = StackedTable(members=(users, items), shards=2, rotation=1)
      >>> stack.shape
      (48, 16)
      >>> stack.physical_rows("items", [0, 1, 2]).tolist()
      [40, 16, 41]
    """

    members: tuple[StackMember, ...]
    shards: int
    rotation: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        sizes = [self.shards, *(size for one in self.members for size in (one.rows, one.width))]
        if not self.members or min(sizes) < 1 or self.rotation < 0:
            raise OptionError(
                "StackedTable: expected at least one member, positive shards, rows and widths, and "
                f"a rotation of 0 or more, found {self}"
            )
        names = [member.name for member in self.members]
        if len({*names}) < len(names) or not all(name and "/" not in name for name in names):
            raise OptionError(
                "StackedTable: expected a different name for each member, not empty and without "
                f"'/', found {', '.join(map(repr, names))}; rename them"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the stacked array: rows and width, with padding."""
        return self.shards * self._offsets[-1], _padded(
            max(member.width for member in self.members), _ALIGNED
        )

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The row of each member in a shard, and the rows of a shard."""
        counts = (
            _padded(member.rows, _ALIGNED * self.shards) // self.shards for member in self.members
        )
        return (0, *itertools.accumulate(counts))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {member.name: number for number, member in enumerate(self.members)}

    def physical_rows(self, member: str, ids: object) -> np.ndarray:
        """Returns the rows of the stacked array that hold some ids of a member.

        The result is int64, in the shape of ``ids``.

        Raises:
          OptionError: the stack has no such member, or an id is outside its rows.
        """
        if member not in self._numbers:
            raise OptionError(
                f"StackedTable: expected one of the members {', '.join(self._numbers)}, found "
                f"{member!r}"
            )
        number, ids = self._numbers[member], np.asarray(ids, np.int64)
        rows = self.members[number].rows
        if ids.size and not 0 <= ids.min() <= ids.max() < rows:
            raise OptionError(
                f"StackedTable: member {member}: expected ids of at least 0 and below {rows:,}, "
                f"found {ids.min():,} to {ids.max():,}"
            )
        shard = (ids + number * self.rotation) % self.shards
        return shard * self._offsets[-1] + self._offsets[number] + ids // self.shards

    def first_id(self, member: str, shard: int) -> int:
        """Returns the lowest id that a shard holds of a member, if it holds any."""
        return (shard - self._numbers[member] * self.rotation) % self.shards

    def runs(self, member: str) -> Iterator[MemberRun]:
        """Returns the rows of a member: a run for each shard that holds ids of it."""
        rows = self.members[self._numbers[member]].rows
        for first in range(min(rows, self.shards)):
            yield MemberRun(
                int(self.physical_rows(member, first)), first, -(-(rows - first) // self.shards)
            )

    def ids(self, rows: object) -> tuple[np.ndarray, np.ndarray]:
        """Returns which member and id each row of the stacked array holds, for rows of any shape.

        The members are positions in ``members``, -1 for padding; both results are int64 in that
        shape.
        """
        shard, row = np.divmod(np.asarray(rows, np.int64), self._offsets[-1])
        number = np.searchsorted(self._offsets, row, "right") - 1
        first = (shard - number * self.rotation) % self.shards
        ids = (row - np.asarray(self._offsets)[number]) * self.shards + first
        counts = np.array([member.rows for member in self.members])
        return np.where(ids < counts[number], number, -1), ids


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class MemberRows:
    """One table in a stacked array, which looks like an array (rows, *trailing); copies nothing.

    ``array`` is None if only parts of it are kept; ``columns`` is () if the rows are not padded.
    Rows on other processes read as zeros.
    """

    def __init__(self, array: Leaf, stack: StackedTable, member: StackMember):
        self.array, self.stack, self.member = array, stack, member
        trailing = tuple(array.shape[1:])
        # A slot may be narrower than the rows, such as one value a row; it is not padded then.
        padded = trailing == stack.shape[1:]
        self.columns = (slice(member.width),) if padded else ()
        self.shape = (member.rows, *((member.width,) if padded else trailing))
        self.dtype = np.dtype(array.dtype)
        self._chunks: tuple[tuple[int, np.ndarray | jax.Array], ...] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: slice) -> np.ndarray:
        # Slices have no step: rows are read in pieces.
        start, stop, _ = ids.indices(len(self))
        out = np.zeros((stop - start, *self.shape[1:]), self.dtype)
        self.copy(start, stop, out)
        return out

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        rows = self[:]
        return rows if dtype is None else rows.astype(dtype)

    @property
    def on_host(self) -> bool:
        """Returns whether the stacked array is in host memory."""
        if self._chunks is None:
            return placement.on_host(self.array)
        return all(placement.on_host(chunk) for _, chunk in self._chunks)

    def owned_phases(self) -> tuple[int, ...]:
        """Returns the ids, modulo the SparseCores, that this process writes."""
        shards = self.stack.shards
        here, owners = coordination.process_index(), placement.block_owners(self.array, shards)
        owned = (shard for shard, owner in enumerate(owners) if owner == here)
        return tuple(sorted(self.stack.first_id(self.member.name, shard) for shard in owned))

    def box(self) -> Box:
        """Returns the rows that this process restores: those of its SparseCores."""
        shards, whole = self.stack.shards, placement.whole(self.shape)
        if coordination.process_count() == 1:
            return whole
        size = self.array.shape[0] // shards
        held = {
            shard
            for box in placement.device_boxes(self.array).values()
            for shard in range(box.rows[0] // size, box.rows[1] // size)
        }
        phases = sorted(self.stack.first_id(self.member.name, shard) for shard in held)
        return whole if len(held) == shards else whole._replace(cycle=(shards, tuple(phases)))

    def detached(self) -> MemberRows | jax.Array:
        """Returns rows that outlive a donation: views in host memory, a copy on devices."""
        if not self.on_host and coordination.process_count() == 1:
            return self.on_device(np.arange(len(self)))
        found = MemberRows(self.array, self.stack, self.member)
        chunks = self._local_chunks()
        if not self.on_host:
            chunks = tuple(
                (row, copied(chunk[row - first : row - first + count]))
                for first, chunk in chunks
                for row, _, count in self.stack.runs(self.member.name)
                if first <= row < first + len(chunk)
            )
        found.array, found._chunks = None, chunks
        return found

    def take(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the rows of some ids in host memory, (len(ids), *trailing)."""
        if out is None:
            out = np.zeros((len(ids), *self.shape[1:]), self.dtype)
        if not self.on_host:
            out[...] = np.asarray(self.on_device(ids))
            return out
        rows = self.stack.physical_rows(self.member.name, ids)
        for first, view in self._local_chunks():
            local = rows - first
            held = np.flatnonzero((local >= 0) & (local < len(view)))
            # Faster than an index of rows and columns, although it copies the padding too.
            found = view.take(local[held], 0)
            out[held] = found[(slice(None), *self.columns)]
        return out

    def copy(self, start: int, stop: int, out: np.ndarray) -> None:
        """Copies the rows of consecutive ids into ``out``, (stop - start, *trailing)."""
        if not self.on_host:
            self.take(np.arange(start, stop), out)
            return
        shards = self.stack.shards
        chunks = self._local_chunks()
        for run in self.stack.runs(self.member.name):
            for first, view in chunks:
                low = max(-(-(start - run.id) // shards), first - run.row, 0)
                high = min(-(-(stop - run.id) // shards), first + len(view) - run.row, run.count)
                if low < high:
                    rows = slice(run.row + low - first, run.row + high - first)
                    ids = slice(run.id + low * shards - start, None, shards)
                    out[ids][: high - low] = view[(rows, *self.columns)]

    def on_device(self, ids: np.ndarray) -> jax.Array:
        """Starts to gather the rows of some ids on the devices of the stacked array."""
        rows = self.stack.physical_rows(self.member.name, ids).astype(np.int32)
        width = self.member.width if self.columns else None
        if coordination.process_count() == 1:
            with placement.on_device_of(self.array):
                return gathered(self.array, rows, width=width)
        # One process cannot run a program on an array of several processes: each device gathers
        # its own rows.
        out: jax.Array | None = None
        for first, chunk in self._local_chunks():
            assert isinstance(chunk, jax.Array)
            if out is None:
                [device] = chunk.devices()
                out = jnp.zeros((len(ids), *self.shape[1:]), self.dtype, device=device)
            at = np.flatnonzero((rows >= first) & (rows < first + len(chunk)))
            # Padding limits how many sizes compile; indices past the last row are dropped.
            padding = (1 << max(0, len(at) - 1).bit_length()) - len(at)
            if len(at):
                local = np.pad(rows[at] - first, (0, padding))
                found = jax.device_put(gathered(chunk, local, width=width), device)
                at = np.pad(at.astype(np.int32), (0, padding), constant_values=len(ids))
                out = _placed_at(out, at, found)
        assert out is not None
        return out

    def _local_chunks(self) -> tuple[tuple[int, np.ndarray | jax.Array], ...]:
        """The parts of the stacked array on this process, each with its first row; not copied."""
        if self._chunks is not None:
            return self._chunks
        if not isinstance(self.array, jax.Array):
            return ((0, self.array),)
        found = {
            box.rows[0]: placement.shard_data(self.array, shard)
            for box, shard in placement.shard_boxes(self.array).items()
        }
        if self.on_host:
            return tuple((first, np.asarray(chunk)) for first, chunk in found.items())
        return tuple(found.items())


@jax.jit
def copied(rows: jax.Array) -> jax.Array:
    """Returns a copy on the same device."""
    return jnp.copy(rows)


@jax.jit
def _placed_at(out: jax.Array, rows: np.ndarray, found: jax.Array) -> jax.Array:
    return out.at[rows].set(found, mode="drop")


@functools.partial(jax.jit, static_argnames="width")
def gathered(array: jax.Array, rows: np.ndarray, *, width: int | None = None) -> jax.Array:
    """Returns rows of an array on its device, without the columns from ``width`` on."""
    found = array.at[rows].get(mode="clip")
    return found if width is None else found[:, :width]


@dataclasses.dataclass(frozen=True, eq=False)
class RestoredMember:
    """Rows of a table of a stacked array that were read into host memory: those of its box."""

    rows: np.ndarray
    target: MemberRows
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the table."""
        return self.target.shape

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Returns the sharding of stamps: each process needs those of the rows that it writes."""
        sharding = getattr(self.target.array, "sharding", None)
        if coordination.process_count() == 1 or not isinstance(sharding, NamedSharding):
            return None
        return NamedSharding(sharding.mesh, PartitionSpec())

    def at(self, run: MemberRun) -> np.ndarray:
        """Returns the rows of a run: all that are at its phase."""
        if self.box.cycle is None:
            return self.rows[run.id :: self.target.stack.shards]
        _, phases = self.box.cycle
        return self.rows[phases.index(run.id) :: len(phases)]

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype of the table."""
        return self.rows.dtype


def array_of(leaf: object) -> Leaf:
    """Returns the array that holds a field of a table: the stacked one, or the leaf itself."""
    return leaf.array if isinstance(leaf, MemberRows) else leaf


def assembled(chunks: Sequence[RestoredMember | MemberRows]) -> Leaf:
    """Returns a stacked array like its template, with the rows of all its members.

    Padding is as in the template if that is an array, otherwise zero. If no member was restored,
    the result is their own array.
    """
    restored = [chunk for chunk in chunks if isinstance(chunk, RestoredMember)]
    if not restored:
        return array_of(chunks[0])
    target = restored[0].target
    leaf, stack = target.array, target.stack
    is_device_array = isinstance(leaf, jax.Array)
    has_values = not leaf.is_deleted() if is_device_array else isinstance(leaf, np.ndarray)
    known = placement.local_arrays(leaf) if has_values else {}
    boxes = placement.device_boxes(leaf)
    held = {}
    for device, box in boxes.items():
        if box in held:
            continue
        shape = (box.rows[1] - box.rows[0], *leaf.shape[1:])
        held[box] = np.array(known[device]) if known else np.zeros(shape, target.dtype)
        for chunk in restored:
            for run in stack.runs(chunk.target.member.name):
                low, high = row_blocks.common(box.rows, (run.row, run.row + run.count))
                if low < high:
                    rows = slice(low - box.rows[0], high - box.rows[0])
                    found = chunk.at(run)[low - run.row : high - run.row]
                    held[box][(rows, *chunk.target.columns)] = found
    if isinstance(leaf, np.ndarray):
        return held[boxes[None]]
    return placement.assembled(leaf, boxes, held)


class StackedView(NamedTuple):
    """A table of a stacked leaf of a state, by the leaf's position."""

    leaf: int
    stack: StackedTable
    member: StackMember

    def of(self, leaves: Sequence[object]) -> MemberRows:
        """Returns the table in a state's leaves."""
        return MemberRows(leaves[self.leaf], self.stack, self.member)


def expanded(
    found: Sequence[TableFields], flat: Flat, stacks: Mapping[str, StackedTable]
) -> tuple[list[TableFields], Flat, tuple[StackedView, ...]]:
    """Replaces stacked tables by their members, sorted by name, whose leaves are appended views."""
    for pattern in sorted(stacks):
        paths.matching("stacks", pattern, [table.name for table in found])
    tables: list[TableFields] = []
    leaves, all_paths, views = list(flat.leaves), list(flat.paths), []
    for table in found:
        patterns = [pattern for pattern in stacks if paths.matches(pattern, table.name)]
        if not patterns:
            tables.append(table)
            continue
        if len(patterns) > 1:
            raise TableSelectionError(
                f"stacks: table {table.name}: expected one pattern that matches it, found "
                f"{', '.join(map(repr, patterns))}"
            )
        stack = stacks[patterns[0]]
        for i, _ in table.fields.values():
            _check_stacked(path_name(flat.paths[i]), flat.leaves[i], stack)
        values = flat.leaves[table.fields[VALUES][0]]
        if tuple(values.shape) != stack.shape:
            raise TableSelectionError(_misshapen(table.name, values, stack))
        for member in stack.members:
            fields = {}
            for field, (i, always) in table.fields.items():
                fields[field] = (len(leaves), always)
                view = StackedView(i, stack, member)
                views.append(view)
                leaves.append(view.of(flat.leaves))
                all_paths.append((*flat.paths[i], ("dict", member.name)))
            tables.append(TableFields(f"{table.name}/{member.name}", fields))
    tables.sort(key=lambda table: table.name)
    in_variable = flat.in_variable + [False] * len(views)
    return tables, Flat(leaves, all_paths, in_variable, flat.treedef), tuple(views)


def _check_stacked(name: str, leaf: Leaf, stack: StackedTable) -> None:
    shape = tuple(leaf.shape)
    if len(shape) > 2 or shape[:1] != stack.shape[:1]:
        raise TableSelectionError(_misshapen(name, leaf, stack))
    if stack.shape[0] > _MOST_ROWS:
        raise TableSelectionError(
            f"stacks: {name}: expected at most {_MOST_ROWS:,} rows, found {stack.shape[0]:,}; "
            "stack fewer tables"
        )
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return
    shard: tuple[int, ...] = sharding.shard_shape(shape)
    if shard[1:] != shape[1:]:
        raise TableSelectionError(
            f"stacks: {name}: expected whole rows on each device, found sharding {sharding}; shard "
            "it by rows"
        )
    chunks = -(-stack.shape[0] // max(1, shard[0]))
    if coordination.process_count() > 1 and stack.shards % chunks:
        raise TableSelectionError(
            f"stacks: {name}: expected the rows of each of {stack.shards} SparseCores on one "
            f"device, found sharding {sharding}, which splits them into {chunks} shards; shard the "
            "array over all devices by its first axis"
        )


def _misshapen(name: str, leaf: Leaf, stack: StackedTable) -> str:
    return (
        f"stacks: {name}: expected shape {list(stack.shape)} for {stack.shards} shards, found "
        f"{list(leaf.shape)}; give the number of SparseCores of this topology, and the rows and "
        "width of each table without padding"
    )


def by_leaf(fields: Mapping[str, object]) -> dict[str, list[RestoredMember | MemberRows]]:
    """Returns the path name of each stacked leaf to its members."""
    found: dict[str, list[RestoredMember | MemberRows]] = {}
    for name, value in fields.items():
        if isinstance(value, (RestoredMember, MemberRows)):
            found.setdefault(name.rpartition("/")[0], []).append(value)
    return found
