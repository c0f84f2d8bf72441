# SPDX-License-Identifier: Apache-2.0
"""Lazy arrays: a field of a table at a step, which reads only the requested rows."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deltackpt import codecs
from deltackpt.cached import cached_property
from deltackpt.errors import RestoreError
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveId, TableEntry
from deltackpt.format.row_blocks import Box, FieldSpec, Rows, Segment, Span, StoredRows, width
from deltackpt.layers import row_indices
from deltackpt.layers.targets import Targets, targets_of
from deltackpt.reading import dense_state, orbax_values, reader, stored_dense, wal_rows
from deltackpt.reading.chains import read_whole
from deltackpt.reading.orbax_values import OrbaxValues
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.stored_saves import StoredSave, StoredShard
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.wal_rows import SeenRows, WalRows
from deltackpt.resources import host_memory
from deltackpt.storage.digests import BLOCK_BYTES
from deltackpt.storage.store import StorePath

if TYPE_CHECKING:
    import numpy.typing as npt

#: Memory limit of one read, in addition to the requested rows.
_WINDOW_BYTES = 64 << 20
#: Item, save, process and name of a segment: a save may replace one that was rolled back.
_Place = tuple[StorePath, SaveId, int, str]
#: Memory limit of the row indices cached for the next read.
_ROW_INDICES_BYTES = 256 << 20


class LazyArray:
    """One field of a table at a step; reads only the requested rows.

    Indexing works as in numpy and returns numpy arrays; ``np.asarray`` reads everything. Each read
    merges the step's base and deltas, and verifies the data that it reads.

    Attributes:
      name: ``<table>``, or ``<table>.slot.<name>``.
      shape: (rows, *trailing).
      dtype: dtype of the rows that were passed to ``save()``.
    """

    def __init__(self, saves: Saves, table: TableEntry, spec: FieldSpec):
        """Internal: index ``Step``."""
        self._saves = saves
        self._table = table
        self._spec = spec
        own = spec.name == row_blocks.VALUES
        self.name = table.name if own else f"{table.name}.{spec.name}"
        self.shape = (table.rows, *spec.trailing)
        self.dtype = codecs.dtype_of(spec.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that all rows would occupy in memory."""
        return self.size * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes that one row would occupy in memory."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Returns rows, or parts of them, like numpy.

        Raises:
          IndexError: as for numpy.
          Damaged: a required object is missing or altered; it is named.
          StepGone: the step was removed while it was read.
        """
        np.broadcast_to(np.empty((), "V0"), self.shape)[index]  # Raises what numpy raises.
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        found = _rows_asked_for(first, len(self))
        if found is None:
            return np.asarray(self)[index]
        rows, within = found
        return self.rows(rows)[(within, *rest)]

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), self.batch_rows):
            yield from self[start : start + self.batch_rows]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self.name}: expected copy=True or None, found copy=False")
        found = self.rows(range(self.shape[0]))
        return found if dtype is None else found.astype(dtype, copy=False)

    def rows(self, rows: range | np.ndarray) -> np.ndarray:
        """Reads whole rows.

        Args:
          rows: ascending row indices without duplicates; a range must have step 1.

        Returns:
          (len(rows), *trailing).

        Raises:
          Damaged, StepGone: as for ``__getitem__``.
        """
        if not len(rows):
            return np.empty((0, *self.shape[1:]), self.dtype)
        if isinstance(rows, range):
            return self._read([(rows.start, rows.stop)])
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        at = 0
        for windows in _batches(rows, self._near_rows, self.batch_rows):
            found = self._read(windows)
            for start, stop in windows:
                end = at + int(np.searchsorted(rows[at:], stop))
                np.take(found, rows[at:end] - start, axis=0, out=out[at:end])
                at, found = end, found[stop - start :]
        return out

    def batches(self) -> Iterator[range]:
        """Yields ranges of ``batch_rows`` rows that cover the table."""
        for start in range(0, len(self), self.batch_rows):
            yield range(start, min(len(self), start + self.batch_rows))

    def statistics(self) -> Statistics:
        """Computes statistics of all elements; reads every row, in batches of 64 MiB.

        Raises:
          Damaged, StepGone: as for ``__getitem__``.
        """
        return statistics_of(self.rows(rows) for rows in self.batches())

    @property
    def batch_rows(self) -> int:
        """Number of rows in 64 MiB, at least one."""
        return max(1, _WINDOW_BYTES // max(1, self.row_bytes))

    @property
    def _near_rows(self) -> int:
        """Distance of rows that are read together anyway, because blocks are verified whole."""
        return max(1, BLOCK_BYTES // max(1, self.row_bytes))

    def _read(self, spans: Sequence[Span]) -> np.ndarray:
        return self._saves.read(self._table, self._spec, spans)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {list(self.shape)} {self.dtype.name}>"


class Saves:
    """A chain for repeated reads, with caches; ``plan`` leads from it to a recovery point."""

    def __init__(
        self,
        saves: Sequence[StoredSave],
        row_indices: RowIndexCache | None = None,
        plan: ReplayPlan | None = None,
        open_older: Callable[[RestoreError], Saves] | None = None,
    ):
        """Takes a chain of ``chains.read_chain``, and a cache of row indices.

        ``open_older`` opens the recovery point above an older step, or raises the error that shows
        that the chain is damaged.
        """
        self.chain = tuple(saves)
        self.row_indices = row_indices or RowIndexCache()
        self.plan = plan
        self._open_older = open_older
        self._older: Saves | None = None
        self._opening = threading.Lock()
        #: Orbax's items that were read, which remember what they have verified, and their versions.
        self._items: dict[StorePath, tuple[dict[str, Hashable], OrbaxValues]] = {}
        self._logged: dict[str, Mapping[str, np.ndarray]] = {}

    @property
    def current(self) -> Saves:
        """These saves, or those above an older step that are read because these are damaged."""
        return self if self._older is None else self._older.current

    @property
    def name(self) -> str:
        """Name of the step or recovery point in errors."""
        return self.target.step_dir.name if self.plan is None else str(self.plan.point)

    @property
    def target(self) -> StoredSave:
        """The newest save of the chain."""
        return self.chain[-1]

    @property
    def save_id(self) -> SaveId:
        """Id of the save; for a recovery point, of its WAL record."""
        return self.target.info.save_id if self.plan is None else self.plan.point.save_id

    @cached_property
    def layout(self) -> Layout:
        """Tables and groups of the step."""
        return self.target.layout

    def logged_rows(self, table: TableEntry) -> np.ndarray:
        """Returns the rows of a table in the WAL records above the chain, int64, ascending."""
        if self.plan is None:
            return np.empty(0, np.int64)
        if table.group not in self._logged:
            records = self._records(table.group)
            seen, nothing = SeenRows(self.layout), Targets(())
            reader.fill((), nothing, records=records, seen=seen, over_parent=True)
            self._logged[table.group] = seen.by_table()
        return self._logged[table.group][table.name]

    def read(self, table: TableEntry, spec: FieldSpec, spans: Sequence[Span]) -> np.ndarray:
        """Reads some disjoint spans of rows of one field of a table, end to end."""
        if self._older is not None:
            return self._older.read(table, spec, spans)

        def read(saves: Sequence[StoredSave]) -> np.ndarray:
            shape = sum(stop - start for start, stop in spans), *spec.trailing
            rows = host_memory.empty_buffer(shape, codecs.dtype_of(spec.dtype))
            targets = targets_in(rows, self.layout, table, spec, spans)
            records = self._records(table.group)
            reader.fill(saves, targets, records=records, indices=self.row_indices)
            self.chain = tuple(saves)  # The chain that could be read.
            return rows

        try:
            return read_whole(self.chain, read)
        except RestoreError as error:
            if self._open_older is None:
                raise
            with self._opening:
                if self._older is None:
                    older = self._open_older(error)
                    if not older.layout.has_rows_of(self.layout):
                        raise
                    self._older = older
        return self._older.read(table, spec, spans)

    def dense(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Reads the wanted values of the dense leaves, and all files of their item."""
        if self.plan is not None:
            return dense_state.at_point(self.plan, wanted=wanted)
        return stored_dense.open_values(self.chain, wanted, item_of=self._item_of)

    def _item_of(self, save: StoredSave) -> OrbaxValues:
        return self.verified(orbax_values.open_values(save))

    def verified(self, found: OrbaxValues) -> OrbaxValues:
        """Returns the values of the item that were read before, unless a file has changed since."""
        versions = found.at.versions()
        known = self._items.get(found.at)
        if known is None or known[0] != versions:
            known = self._items[found.at] = versions, found
        return known[1]

    def _records(self, group: str) -> WalRows:
        """The rows of a group in the WAL records above the chain."""
        return () if self.plan is None else wal_rows.layers_of(self.plan, self.layout, group)


def targets_in(
    rows: np.ndarray, layout: Layout, table: TableEntry, spec: FieldSpec, spans: Sequence[Span]
) -> Targets:
    """Returns memory for disjoint spans of rows of one field, end to end, as targets of a merge."""
    columns, boxes, at = (0, width(spec.trailing)), dict[Box, np.ndarray](), 0
    for start, stop in spans:
        boxes[Box((start, stop), columns)] = rows[at : at + stop - start]
        at += stop - start
    return targets_of({table.name: {spec.name: boxes}}, layout)


class RowIndexCache:
    """LRU cache of the row indices of deltas. Thread-safe."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._held: collections.OrderedDict[_Place, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, shard: StoredShard, segment: Segment, targets: Targets) -> StoredRows | None:
        """See ``layers.row_indices.RowIndices``."""
        if targets.reach(segment) is None:
            return None
        return StoredRows(self.rows_of(shard, segment))

    def rows_of(self, shard: StoredShard, segment: Segment) -> Rows:
        """Returns the rows of a segment; ``Damaged`` if row indices are missing or altered."""
        record = shard.record
        key = (shard.item_dir, record.save_id, record.process, segment.name)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        found = row_indices.segment_rows(shard, segment)
        if isinstance(found, np.ndarray):
            self._keep(key, found)
        return found

    def _keep(self, key: _Place, found: np.ndarray) -> None:
        with self._lock:
            if key not in self._held:
                self._held[key] = found
                self._nbytes += found.nbytes
            while self._nbytes > _ROW_INDICES_BYTES:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes


def _rows_asked_for(
    index: object, total: int
) -> tuple[range | np.ndarray, slice | np.ndarray | int] | None:
    """Ascending rows to read, and the index that selects the requested ones from them.

    None for new axes, ellipses and masks of several axes. The index was checked by numpy.
    """
    if isinstance(index, slice):
        rows = range(*index.indices(total))
        ascending = rows if rows.step > 0 else rows[::-1]
        within = slice(None, None, 1 if rows.step > 0 else -1)
        return ascending if ascending.step == 1 else np.array(ascending, np.int64), within
    chosen = np.array(index, np.int64) if isinstance(index, list) and not index else index
    chosen = np.asarray(chosen)
    if chosen.dtype == np.bool_ and chosen.ndim == 1:
        rows = np.flatnonzero(chosen)
        return rows, np.arange(len(rows))
    if chosen.dtype.kind not in "iu":
        return None
    asked = chosen.astype(np.int64)
    rows, within = np.unique(np.where(asked < 0, asked + total, asked), return_inverse=True)
    return rows, within.reshape(asked.shape) if asked.ndim else int(within.reshape(-1)[0])


def _batches(rows: np.ndarray, gap: int, most: int) -> Iterator[list[Span]]:
    """Windows over ascending rows at most ``gap`` apart, in batches of about ``most`` rows."""
    gaps = np.flatnonzero(np.diff(rows) > gap) + 1
    windows: list[Span] = []
    held = 0
    for piece in np.split(rows, gaps):
        start = int(piece[0])
        while start <= piece[-1]:
            # A window longer than a batch is cut; the rest starts at the next requested row.
            stop = min(int(piece[-1]) + 1, start + most)
            if held and held + stop - start > most:
                yield windows
                windows, held = [], 0
            windows.append((start, stop))
            held += stop - start
            following = np.searchsorted(piece, stop)
            if following == len(piece):
                break
            start = int(piece[following])
    if windows:
        yield windows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of the elements of some rows; of the magnitudes, if they are complex.

    Attributes:
      rows: number of rows.
      mean: mean of the finite elements; NaN if no element is finite.
      std: standard deviation of the finite elements; NaN if no element is finite.
      least: smallest finite element; NaN if no element is finite.
      greatest: largest finite element; NaN if no element is finite.
      zero_rows: number of rows that contain only zeros.
      not_finite_rows: number of rows with an infinity or NaN.
    """

    rows: int
    mean: float
    std: float
    least: float
    greatest: float
    zero_rows: int
    not_finite_rows: int


def statistics_of(batches: Iterable[np.ndarray]) -> Statistics:
    """Computes the statistics of rows given in batches, (n, *trailing) each."""
    rows = zero_rows = not_finite_rows = count = 0
    mean = squares = 0.0
    least, greatest = math.inf, -math.inf
    for batch in batches:
        wide = np.abs(batch) if batch.dtype.kind == "c" else batch
        flat = wide.reshape(len(batch), math.prod(batch.shape[1:])).astype(np.float64)
        finite = np.isfinite(flat)
        rows += len(flat)
        zero_rows += int((flat == 0).all(axis=1).sum())
        not_finite_rows += int((~finite.all(axis=1)).sum())
        values = flat[finite]
        if not values.size:
            continue
        # Chan, Golub and LeVeque 1979: combines means and squares of two parts.
        own = float(values.mean())
        total = count + values.size
        squares += float(((values - own) ** 2).sum())
        squares += (own - mean) ** 2 * count * values.size / total
        mean += (own - mean) * values.size / total
        count = total
        least, greatest = min(least, float(values.min())), max(greatest, float(values.max()))
    return Statistics(
        rows=rows,
        mean=mean if count else math.nan,
        std=math.sqrt(squares / count) if count else math.nan,
        least=least if count else math.nan,
        greatest=greatest if count else math.nan,
        zero_rows=zero_rows,
        not_finite_rows=not_finite_rows,
    )
