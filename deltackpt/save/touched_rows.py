# SPDX-License-Identifier: Apache-2.0
"""Which rows were touched, by the stamps of the rows that this process holds."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from deltackpt.errors import TrackingError
from deltackpt.format import blocks, manifest
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import GroupEntry, Layout
from deltackpt.resources.staging import Staging
from deltackpt.save import extract
from deltackpt.state import ownership

#: Table name to the place of each TouchState that has stamps of it, to these, (rows,).
StampsByTable = Mapping[str, Mapping[str, Any]]


class Stamps:
    """The stamps of the rows of this process, by group; threads look for the touched ones."""

    def __init__(
        self,
        layout: Layout,
        stamps: StampsByTable,
        staging: Staging,
        held: Mapping[str, tuple[Span, ...]],
    ):
        """Takes the stamps; looks at none.

        Args:
          layout: tables and groups.
          stamps: of every table.
          staging: whose threads look.
          held: group to the virtual rows of it that this process reads.
        """
        self._layout = layout
        self._stamps = stamps
        self._staging = staging
        self._shards: dict[tuple[str, str], list[tuple[Span, Any]]] = {}
        self._looking: dict[str, list[list[concurrent.futures.Future[np.ndarray]]]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._spans = held

    @property
    def places(self) -> tuple[str, ...]:
        """Of the TouchStates."""
        return tuple({place: None for held in self._stamps.values() for place in held})

    def look(self, since: Mapping[str, int]) -> None:
        """Starts to look for the touched rows.

        Args:
          since: place of each TouchState to the clock after which its rows are touched.
        """
        self._rows = {}
        for group in self._layout.groups:
            rows = blocks.rows_of(self._spans[group.name])
            self._looking[group.name] = []
            for table in manifest.members(group, self._layout.tables):
                held = rows[blocks.row_slice(rows, table.offset, table.offset + table.rows)]
                if len(held):
                    spans = [(a - table.offset, b - table.offset) for a, b in blocks.spans_of(held)]
                    self._looking[group.name].append(
                        [
                            self._staging.submit(
                                _touched_rows,
                                stamps,
                                self._shards_of(table.name, place),
                                since[place],
                                table.offset,
                                spans,
                            )
                            for place, stamps in self._stamps[table.name].items()
                        ]
                    )

    def touched(self, group: str, spans: tuple[Span, ...]) -> np.ndarray:
        """The touched rows within some spans, virtual, int64 ascending; ``look`` comes first.

        A row is touched where any TouchState says so.

        Raises:
          TrackingError: stamps of the rows are on other processes.
        """
        if group not in self._rows:
            parts = [_union([look.result() for look in looks]) for looks in self._looking[group]]
            self._rows[group] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        rows = self._rows[group]
        if spans == self._spans[group]:
            return rows
        parts = [rows[blocks.row_slice(rows, *span)] for span in spans]
        return np.concatenate(parts) if parts else rows[:0]

    def at(self, group: GroupEntry, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Place of each TouchState to the stamps, int32, of a few virtual rows.

        Stamps that a TouchState does not have, or not on this process, are -1.
        """
        members = manifest.members(group, self._layout.tables)
        found = {place: np.full(len(rows), -1, np.int32) for place in self.places}
        starts = [table.offset for table in members]
        for number in np.unique(np.searchsorted(starts, rows, "right") - 1):
            table = members[number]
            for place in self._stamps.get(table.name, {}):
                for (first, last), shard in self._shards_of(table.name, place):
                    part = blocks.row_slice(rows, table.offset + first, table.offset + last)
                    if part.start < part.stop:
                        local = rows[part] - (table.offset + first)
                        extract.take_few(shard, local, found[place][part])
        return found

    def shared(self, since: Mapping[str, int]) -> dict[str, int]:
        """CRC32C of what was touched of the stamps that other processes hold too.

        Replicated stamps are updated by each process for itself: where they differ, each would
        write its rows by other marks.

        Args:
          since: place of each TouchState to the clock after which its rows are touched.

        Returns:
          A key of table, rows and place, to a number that all holders must find alike.
        """
        found = {}
        for table in self._layout.tables:
            for place, stamps in self._stamps.get(table.name, {}).items():
                elsewhere = ownership.shared_rows(stamps)
                for span, shard in self._shards_of(table.name, place):
                    if span in elsewhere:
                        looking = self._staging.submit(
                            _crc32c_of_touched, stamps, [(span, shard)], since[place], span
                        )
                        found[f"{table.name}[{span[0]}:{span[1]}]@{place}"] = looking
        return {key: looking.result() for key, looking in found.items()}

    def _shards_of(self, table: str, place: str) -> list[tuple[Span, Any]]:
        if (table, place) not in self._shards:
            self._shards[table, place] = _stamp_shards(self._stamps[table][place])
        return self._shards[table, place]


def touched_rows(stamps: Any, since_clock: int, offset: int, spans: Sequence[Span]) -> np.ndarray:
    """Virtual indices, int64 ascending, of the rows stamped after ``since_clock``.

    Args:
      stamps: of a table, (rows,).
      since_clock: the clock.
      offset: the virtual index of the table's first row.
      spans: rows of the table to look at, ascending.

    Raises:
      TrackingError: stamps of these rows are on other processes.
    """
    return _touched_rows(stamps, _stamp_shards(stamps), since_clock, offset, spans)


def _touched_rows(
    stamps: Any,
    shards: Sequence[tuple[Span, Any]],
    since_clock: int,
    offset: int,
    spans: Sequence[Span],
) -> np.ndarray:
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
                f"process, found the sharding {getattr(stamps, 'sharding', None)}; give the stamps "
                "the sharding of their table's rows: touched.init(tables)"
            )
    return np.concatenate(found)


def _stamp_shards(stamps: Any) -> list[tuple[Span, Any]]:
    """The distinct shards of stamps on this process, by the rows that they hold."""
    if not isinstance(stamps, jax.Array):
        return [((0, stamps.shape[0]), stamps)]
    held = {shard.device: shard.data for shard in stamps.addressable_shards}
    by_rows = {
        box.rows: held[device]
        for device, box in ownership.boxes(stamps.sharding, stamps.shape).items()
    }
    return sorted(by_rows.items(), key=lambda item: item[0])


def _touched_in(stamps: Any, since_clock: int, start: int, stop: int) -> np.ndarray:
    """Rows of ``[start, stop)`` of one shard stamped after the clock."""
    if extract.on_host(stamps):
        return np.flatnonzero(np.asarray(stamps)[start:stop] > since_clock) + start
    count = int(_count_touched(stamps, since_clock))
    rows = np.asarray(_touched(stamps, since_clock, size=extract.bucket(count)))[:count]
    return rows[(rows >= start) & (rows < stop)].astype(np.int64)


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Ascending rows of which each is in one of several ascending arrays."""
    return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))


def _crc32c_of_touched(
    stamps: Any, shards: Sequence[tuple[Span, Any]], since_clock: int, span: Span
) -> int:
    """A checksum of the rows of a span that were touched, and of when."""
    rows = _touched_rows(stamps, shards, since_clock, 0, [span])
    [(_, shard)] = shards
    when = np.empty(len(rows), np.int32)
    if len(rows):
        extract.take_few(shard, rows - span[0], when)
    crc = google_crc32c.value(rows.astype("<i8").tobytes())
    return google_crc32c.extend(crc, (when - np.int32(since_clock)).astype("<i4").tobytes())


@jax.jit
def _count_touched(stamps: jax.Array, since_clock: int) -> jax.Array:
    return jnp.sum(stamps > since_clock, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def _touched(stamps: jax.Array, since_clock: int, *, size: int) -> jax.Array:
    return jnp.nonzero(stamps > since_clock, size=size)[0].astype(jnp.int32)
