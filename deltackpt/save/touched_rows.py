# SPDX-License-Identifier: Apache-2.0
"""Determines which rows were touched, from the stamps of the rows on this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import TrackingError
from deltackpt.format import blocks
from deltackpt.format.blocks import Span
from deltackpt.format.segments import GroupEntry
from deltackpt.resources.runtime import Runtime
from deltackpt.save import extract
from deltackpt.save.division import Batch, Division, StampsByTable, stamp_shards_of
from deltackpt.state import contexts, ownership

#: More stamps are looked at by another thread.
_INLINE_STAMPS = 1 << 20
#: Distinct shards of one array of stamps, by the rows that they hold.
_Shards = Sequence[tuple[Span, Any]]


class _Look(NamedTuple):
    """What is to be looked at of one array of stamps: spans of a table, virtual ones of a group."""

    stamps: Any
    shards: _Shards
    since: int
    offset: int
    spans: Sequence[Span]


class Stamps:
    """The stamps of this process's rows, by group; threads find the touched rows."""

    def __init__(self, division: Division, stamps: StampsByTable, runtime: Runtime):
        """Takes the stamps; reads none.

        Args:
          division: which rows this process reads.
          stamps: stamps of every table.
          runtime: whose threads read them.
        """
        self._division = division
        self._layout = division.layout
        self._stamps = stamps
        self._runtime = runtime
        self._looking: dict[str, list[Callable[[], np.ndarray]]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._spans = division.held

    @property
    def places(self) -> tuple[str, ...]:
        """Returns the paths of the TouchStates."""
        return tuple({place: None for held in self._stamps.values() for place in held})

    def look(self, since: Mapping[str, int]) -> None:
        """Starts to find the touched rows.

        Args:
          since: TouchState path to the clock after which rows are touched.
        """
        self._rows = {}
        for group in self._layout.groups:
            looking = self._looking[group.name] = []
            for tables in self._division.batches[group.name]:
                looking.append(self._look_at(tables, since))

    def _look_at(self, tables: Batch, since: Mapping[str, int]) -> Callable[[], np.ndarray]:
        """What gives the touched rows of some tables; threads are at it where that helps."""
        if tables.end_to_end:
            [place] = self.places
            stamps = [
                shard
                for table, _ in tables.tables
                for _, shard in self._shards_of(table.name, place)
            ]
            start = tables.tables[0][0].offset
            # A thread would only wait for its turn to run Python.
            return functools.partial(_look_through, stamps, since[place], start)
        looks = []
        for table, spans in tables.tables:
            looks.append([])
            for place, stamps in self._stamps[table.name].items():
                shards = self._shards_of(table.name, place)
                looks[-1].append(_Look(stamps, shards, since[place], table.offset, spans))
        stamps = sum(stop - start for _, spans in tables.tables for start, stop in spans)
        if stamps <= _INLINE_STAMPS:
            return functools.partial(_look_all, looks)
        return self._runtime.submit(_look_all, looks).result

    def touched(self, group: str, spans: tuple[Span, ...]) -> np.ndarray:
        """Returns the touched rows within spans, virtual, int64 ascending; call ``look`` first.

        A row is touched if any TouchState marks it.

        Raises:
          TrackingError: stamps of the rows are on other processes.
        """
        if group not in self._rows:
            parts = [look() for look in self._looking[group]]
            self._rows[group] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        rows = self._rows[group]
        if spans == self._spans[group]:
            return rows
        parts = [rows[blocks.row_slice(rows, *span)] for span in spans]
        return np.concatenate(parts) if parts else rows[:0]

    def at(self, group: GroupEntry, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns TouchState path to the stamps, int32, of a few virtual rows.

        A stamp is -1 if the TouchState lacks it, or if it is not on this process.
        """
        return self.dispatch_at(group, rows)()

    def dispatch_at(
        self, group: GroupEntry, rows: np.ndarray
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Starts to read ``at``; returns a function that waits for the result."""
        members, starts = self._division.members[group.name], self._division.offsets[group.name]
        numbers = np.searchsorted(starts, rows, "right") - 1
        one = len(rows) > 0 and numbers[0] == numbers[-1]
        parts = []
        for number in numbers[:1] if one else blocks.distinct(numbers):
            table = members[number]
            for place in self._stamps.get(table.name, {}):
                for (first, last), shard in self._shards_of(table.name, place):
                    part = blocks.row_slice(rows, table.offset + first, table.offset + last)
                    if part.start < part.stop:
                        local = rows[part] - (table.offset + first)
                        parts.append((place, part, extract.few(shard, local)))

        def landed() -> dict[str, np.ndarray]:
            found = {place: np.full(len(rows), -1, np.int32) for place in self.places}
            for place, part, taken in parts:
                found[place][part] = np.asarray(taken)[: part.stop - part.start]
            return found

        return landed

    def shared(self, since: Mapping[str, int]) -> dict[str, int]:
        """Returns the CRC32C of the touched rows, for stamps that other processes hold too.

        Each process updates replicated stamps on its own. If they differed, the processes would
        write their rows by different stamps.

        Args:
          since: TouchState path to the clock after which rows are touched.

        Returns:
          (table, rows, path) to a checksum that must be equal on all processes.
        """
        found = {}
        for table in self._layout.tables:
            for place, stamps in self._stamps.get(table.name, {}).items():
                elsewhere = ownership.shared_rows(stamps)
                for span, shard in self._shards_of(table.name, place):
                    if span in elsewhere:
                        looking = self._runtime.submit(
                            _crc32c_of_touched, stamps, [(span, shard)], since[place], span
                        )
                        found[f"{table.name}[{span[0]}:{span[1]}]@{place}"] = looking
        return {key: looking.result() for key, looking in found.items()}

    def _shards_of(self, table: str, place: str) -> _Shards:
        stamps = self._stamps[table][place]
        return [
            (span, ownership.shard_data(stamps, shard))
            for span, shard in self._division.stamp_shards[table][place]
        ]


def _look_all(tables: Sequence[Sequence[_Look]]) -> np.ndarray:
    """The touched rows of some tables, in their order; each may have several arrays of stamps."""
    return np.concatenate([_union([_touched_rows(*look) for look in looks]) for looks in tables])


def _look_through(stamps: Sequence[Any], since_clock: int, start: int) -> np.ndarray:
    """The touched rows of stamps that lie end to end from a virtual row on, in host memory.

    A call of numpy for each table would take longer than looking at a small one.
    """
    found = np.concatenate(list(map(np.asarray, stamps))) > since_clock
    return found.nonzero()[0] + np.int64(start)


def touched_rows(stamps: Any, since_clock: int, offset: int, spans: Sequence[Span]) -> np.ndarray:
    """Returns virtual indices, int64 ascending, of the rows stamped after ``since_clock``.

    Args:
      stamps: the stamps of a table, (rows,).
      since_clock: the clock.
      offset: the virtual index of the table's first row.
      spans: rows of the table to read, ascending.

    Raises:
      TrackingError: this process does not hold the stamps of these rows.
    """
    shards = [
        (span, ownership.shard_data(stamps, shard)) for span, shard in stamp_shards_of(stamps)
    ]
    return _touched_rows(stamps, shards, since_clock, offset, spans)


def _touched_rows(
    stamps: Any,
    shards: Sequence[tuple[Span, Any]],
    since_clock: int,
    offset: int,
    spans: Sequence[Span],
) -> np.ndarray:
    if len(spans) == len(shards) == 1 and spans[0] == shards[0][0]:
        (start, stop), shard = shards[0]
        return _touched_in(shard, since_clock, 0, stop - start) + np.int64(start + offset)
    found = [np.empty(0, np.int64)]
    for start, stop in spans:
        for (first, last), shard in shards:
            low, high = max(start, first), min(stop, last)
            if low == start < high:
                rows = _touched_in(shard, since_clock, low - first, high - first)
                found.append(rows + np.int64(first + offset))
                start = high
        if start < stop:
            raise TrackingError(
                f"stamps of shape {stamps.shape}: expected those of rows {start} to {stop} on this "
                f"process, found the sharding {getattr(stamps, 'sharding', None)}; pass the stamps "
                "the sharding of their table's rows: touched.init(tables)"
            )
    return np.concatenate(found)


def _touched_in(stamps: Any, since_clock: int, start: int, stop: int) -> np.ndarray:
    """Rows of ``[start, stop)`` of one shard stamped after the clock."""
    if extract.on_host(stamps):
        found = (np.asarray(stamps)[start:stop] > since_clock).nonzero()[0]
        return found + start if start else found
    with contexts.neutral(), contexts.beside(stamps):
        count = int(_count_touched(stamps, since_clock))
        rows = np.asarray(_touched(stamps, since_clock, size=extract.bucket(count)))[:count]
    return rows[(rows >= start) & (rows < stop)].astype(np.int64)


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the ascending union of several ascending arrays."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _crc32c_of_touched(
    stamps: Any, shards: Sequence[tuple[Span, Any]], since_clock: int, span: Span
) -> int:
    """A checksum of the rows of a span that were touched, and of when."""
    rows = _touched_rows(stamps, shards, since_clock, 0, [span])
    [(_, shard)] = shards
    when = np.empty(0, np.int32)
    if len(rows):
        when = np.asarray(extract.few(shard, rows - span[0]))[: len(rows)]
    crc = google_crc32c.value(rows.astype("<i8").tobytes())
    return google_crc32c.extend(crc, (when - np.int32(since_clock)).astype("<i4").tobytes())


@jax.jit
def _count_touched(stamps: jax.Array, since_clock: int) -> jax.Array:
    return jnp.sum(stamps > since_clock, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def _touched(stamps: jax.Array, since_clock: int, *, size: int) -> jax.Array:
    return jnp.nonzero(stamps > since_clock, size=size)[0].astype(jnp.int32)
