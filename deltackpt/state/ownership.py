# SPDX-License-Identifier: Apache-2.0
"""Assigns rows to processes: exactly one process writes each row of each field.

A field's sharding splits its table into boxes of rows and columns. If several devices hold a box,
it is divided among them by rows. Every process computes the same division from the shardings alone,
so they need not communicate. It looks only at its own shards, so the work per process does not grow
with the number of processes (except for one cached map of devices per sharding).

Only processes that hold the stamps of a box can determine which of its rows are touched. A device
writes rows only if its process also holds their stamps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from deltackpt import processes
from deltackpt.errors import TrackingError
from deltackpt.format.blocks import Box, Span
from deltackpt.state import placement

#: A device writes at least so much of a box, where the box has it: slivers of a small table would
#: cost a restore one request each.
_LEAST_BYTES = 4096
_REMEMBERED = 1 << 16

#: Row part and column part of a table, by number.
_Cell = tuple[int, int]


#: In place of the number of a shard: the array itself is it.
ITSELF = -1


class Share(NamedTuple):
    """Rows that this process writes.

    Attributes:
      box: box of the table that contains the rows.
      shard: index of the array's addressable shard that holds them, or ``ITSELF``.
      skip: number of rows of the shard before these rows.
    """

    box: Box
    shard: int
    skip: int


class _Owned(NamedTuple):
    """A box, the device that writes it, and how many rows of its shard precede it."""

    box: Box
    device: Any
    skip: int


def shares(leaf: Any, stamps: Any = None, *, turn: int = 0) -> Iterator[Share]:
    """Returns the rows of one field of a table that this process writes; equal for equal arrays.

    Args:
      leaf: (rows, *trailing), a ``jax.Array`` with any sharding. A numpy array is assumed to be
        equal on every process.
      stamps: the table's stamps, (rows,); None if touched rows are not needed.
      turn: index of the table, used to spread small tables over the devices.

    Raises:
      TrackingError: no process holds both some rows and their stamps.
    """
    row_bytes = math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize
    if not isinstance(leaf, jax.Array):
        rows, columns = leaf.shape[0], (0, _width(leaf.shape))
        owners = _owners(tuple(range(processes.count())), rows * row_bytes, turn)
        for number, owner in enumerate(owners):
            span = _part((0, rows), number, len(owners))
            if owner == processes.index() and span[0] < span[1]:
                yield Share(Box(span, columns), ITSELF, span[0])
        return
    known = stamps.sharding if isinstance(stamps, jax.Array) else None
    shard_of = _shard_numbers(leaf)
    here = processes.index()
    for owned in _owned(leaf.sharding, known, leaf.shape, row_bytes, turn, here):
        yield Share(owned.box, shard_of[owned.device], owned.skip)


def shard_boxes(array: jax.Array) -> dict[Box, int]:
    """Returns the distinct boxes of this process, each with the index of a shard that holds it."""
    shard_of = _shard_numbers(array)
    return {box: shard_of[device] for device, box in boxes(array.sharding, array.shape).items()}


def _shard_numbers(array: jax.Array) -> dict[Any, int]:
    if len(array.sharding.device_set) == 1:
        return dict.fromkeys(array.sharding.device_set, ITSELF)
    return {shard.device: number for number, shard in enumerate(array.addressable_shards)}


def shard_data(array: Any, shard: int) -> Any:
    """Returns one shard of an array: see ``Share.shard``."""
    return array if shard == ITSELF else array.addressable_shards[shard].data


def boxes(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """Returns the box of each device of this process.

    Args:
      sharding: the field's sharding.
      shape: the field's shape, (rows, *trailing).
    """
    return {
        device: _box(index, shape)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if processes.of(device) == processes.index()
    }


def device_boxes(leaf: Any) -> dict[Any, Box]:
    """Returns the box of each device of this process, for a leaf that is to be placed.

    Args:
      leaf: (rows, *trailing), abstract or not. The key of the only box is None if no device must
        hold it.
    """
    sharding = placement.sharding_of(leaf)
    if sharding is None:
        return {None: whole(leaf.shape)}
    return boxes(sharding, leaf.shape)


def shared_rows(stamps: Any) -> frozenset[Span]:
    """Returns rows of the stamps that this and other processes hold, by shard.

    Args:
      stamps: (rows,); a numpy array is assumed to be the same on every process.
    """
    if not isinstance(stamps, jax.Array):
        return frozenset({(0, stamps.shape[0])} if processes.count() > 1 else ())
    return _shared_rows(stamps.sharding, stamps.shape, processes.index())


@functools.lru_cache(_REMEMBERED)
def _shared_rows(sharding: Any, shape: tuple[int, ...], here: int) -> frozenset[Span]:
    grid = _grid(sharding, _parts(sharding, shape))
    found = set()
    for device, box in boxes(sharding, shape).items():
        holders = {processes.of(other) for other in grid.holders[grid.cell_of[device]]}
        if holders - {here}:
            found.add(box.rows)
    return frozenset(found)


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole field of some shape, (rows, *trailing)."""
    return Box((0, shape[0]), (0, _width(shape)))


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    padded = (*index, slice(None), slice(None))
    first, last, _ = padded[0].indices(shape[0])
    left, right, _ = padded[1].indices(_width(shape))
    return Box((first, last), (left, right))


def _width(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else 1


@functools.lru_cache(_REMEMBERED)
def _owned(
    sharding: Any, stamps: Any, shape: tuple[int, ...], row_bytes: int, turn: int, here: int
) -> tuple[_Owned, ...]:
    """Returns what process ``here``, this one, writes of a field."""
    parts = _parts(sharding, shape)
    grid = _grid(sharding, parts)
    local = {}
    for device, box in boxes(sharding, shape).items():
        local.setdefault(box, device)
    found: list[_Owned] = []
    for box, holder in sorted(local.items(), key=lambda item: item[0]):
        cell = grid.cell_of[holder]
        for rows, knowing in _known(stamps, shape[0], box.rows):
            holders = grid.holders[cell]
            if knowing is not None:
                holders = tuple(d for d in holders if processes.of(d) in knowing)
                if not holders:
                    raise TrackingError(
                        f"rows {rows} of an array of shape {shape}: expected their stamps on a "
                        f"process that holds them, found sharding {sharding} and stamps of "
                        f"sharding {stamps}; shard tables, slots and stamps over the same devices"
                    )
            nbytes = (rows[1] - rows[0]) * row_bytes // parts[1]
            owners = _owners(holders, nbytes, turn + sum(cell))
            for number, owner in enumerate(owners):
                part = _part(rows, number, len(owners))
                if processes.of(owner) == here and part[0] < part[1]:
                    skip = part[0] - box.rows[0]
                    _append(found, _Owned(Box(part, box.columns), owner, skip))
    return tuple(found)


def _append(found: list[_Owned], more: _Owned) -> None:
    """Appends, or extends the last one if ``more`` continues it."""
    if found:
        last = found[-1]
        together = (last.device, last.box.columns) == (more.device, more.box.columns)
        if together and last.box.rows[1] == more.box.rows[0]:
            rows = (last.box.rows[0], more.box.rows[1])
            found[-1] = last._replace(box=Box(rows, last.box.columns))
            return
    found.append(more)


def _known(stamps: Any, rows: int, span: Span) -> Iterator[tuple[Span, frozenset[int] | None]]:
    """Splits a span of rows at the boundaries of the stamps' shards.

    Yields:
      Each piece, and the processes that hold its stamps; None if that does not matter.
    """
    if stamps is None:
        yield span, None
        return
    (count, _) = parts = _parts(stamps, (rows,))
    grid = _grid(stamps, parts)
    for number in range(count):
        piece = _part((0, rows), number, count)
        common = max(span[0], piece[0]), min(span[1], piece[1])
        if common[0] < common[1]:
            yield common, frozenset(map(processes.of, grid.holders[number, 0]))


def _owners(holders: tuple[Any, ...], nbytes: int, turn: int) -> tuple[Any, ...]:
    """Returns the holders that write a part each, spread evenly over them."""
    count = min(len(holders), max(1, nbytes // _LEAST_BYTES))
    first = turn % len(holders)
    turned = holders[first:] + holders[:first]
    return tuple(turned[number * len(holders) // count] for number in range(count))


def _part(span: Span, number: int, count: int) -> Span:
    """Returns one of ``count`` nearly equal parts of a span."""
    length = span[1] - span[0]
    return span[0] + length * number // count, span[0] + length * (number + 1) // count


def _parts(sharding: Any, shape: tuple[int, ...]) -> _Cell:
    """Returns into how many parts a sharding splits rows and columns."""
    shard = sharding.shard_shape(shape)
    if shard[2:] != shape[2:]:
        raise TrackingError(
            f"array of shape {shape}: expected a sharding of its first two axes, found "
            f"{sharding}; shard tables and slots by rows and columns only"
        )
    counts = [max(1, -(-size // max(1, part))) for size, part in zip(shape[:2], shard[:2])]
    return counts[0], counts[1] if len(counts) > 1 else 1


class _Grid(NamedTuple):
    """Which devices hold which part, in an order that is the same on every process."""

    holders: dict[_Cell, tuple[Any, ...]]
    cell_of: dict[Any, _Cell]


@functools.lru_cache(_REMEMBERED)
def _grid(sharding: Any, parts: _Cell) -> _Grid:
    holders: dict[_Cell, list[Any]] = {}
    cell_of = {}
    # The parts as an array with one element each, so that cells do not depend on the rows.
    for device, index in _indices(sharding, parts).items():
        box = _box(index, parts)
        cell_of[device] = cell = (box.rows[0], box.columns[0])
        holders.setdefault(cell, []).append(device)
    return _Grid({cell: _ordered(devices) for cell, devices in holders.items()}, cell_of)


def _ordered(devices: list[Any]) -> tuple[Any, ...]:
    """Orders by process and index; one CPU device per process, as they share memory."""
    found = sorted(devices, key=lambda device: (processes.of(device), device.id))
    if any(device.platform != "cpu" for device in found):
        return tuple(found)
    return tuple({processes.of(device): device for device in reversed(found)}.values())[::-1]


def _indices(sharding: Any, parts: _Cell) -> dict[Any, tuple[slice, ...]]:
    try:
        return sharding.devices_indices_map(parts)
    except ValueError:  # A sharding of one axis.
        found = sharding.devices_indices_map(parts[:1])
        return {device: (*index, slice(None)) for device, index in found.items()}
