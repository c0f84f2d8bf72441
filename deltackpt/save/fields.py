# SPDX-License-Identifier: Apache-2.0
"""Encodes one field of one segment into stored arrays; checks the error and widens the codec.

A lossy codec is tried, and its error is measured while it is written. If it exceeds the budget, its
arrays are removed and the next more precise codec is tried. Rows that a codec cannot represent are
stored raw, with their positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt import codecs
from deltackpt.codecs import Codec, Lossless
from deltackpt.errors import ErrorBudgetExceeded, OptionError
from deltackpt.format.segments import ArrayEntry
from deltackpt.policies import Choice, CodecChoice
from deltackpt.resources.runtime import Runtime
from deltackpt.save.encode import Encoded
from deltackpt.save.pieces import Piece, ahead
from deltackpt.storage import arrays, parts
from deltackpt.storage.parts import Place, StoredArrays, StoredField

#: Rows that a codec does not hold stay in memory until the others are written: at most that many,
#: or that share of all.
_FEW_ROWS, _MOST_BESIDE = 4096, 1 / 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A field to store.

    Attributes:
      name: the field's name.
      trailing: shape of this process's part of a row.
      dtype: dtype of the table.
      tables: names of the group's tables, in the order of their offsets.
      bounds: (len(tables) + 1,): positions in the segment at which each table's rows begin and end.
      choice: the user's codec choice.
      planned: the codec to try first.
      held: whether its rows are views of the training state, which might change concurrently.
    """

    name: str
    trailing: tuple[int, ...]
    dtype: np.dtype
    tables: Sequence[str]
    bounds: np.ndarray
    choice: CodecChoice
    planned: Choice
    held: bool = False

    @property
    def count(self) -> int:
        """Returns the number of rows."""
        return int(self.bounds[-1])

    @property
    def raw_bytes(self) -> int:
        """Returns the bytes of all rows unencoded."""
        return self.count * math.prod(self.trailing) * self.dtype.itemsize


def write_field(
    place: Place,
    field: Field,
    pieces: Callable[[Codec], Iterator[Piece]],
    runtime: Runtime,
) -> StoredField:
    """Writes a field with the planned codec, or with the first more precise one within the budget.

    Args:
      place: destination.
      field: what to store.
      pieces: returns the rows in order, for a given codec; called once per attempted codec.
      runtime: encodes several pieces concurrently.

    Raises:
      ErrorBudgetExceeded: the planned codec would exceed the user's bound, and more precise ones
        are not allowed.
      StorageError: the store reported an error.
    """
    plan = field.planned
    if not _fits(field, plan.codec):  # the shard of a table that is split by columns
        reason = f"raw: columns of shape {field.trailing} are too narrow for {plan.codec}"
        plan = Choice(codec="raw", reason=reason)
    while True:
        codec = codecs.get(plan.codec)
        if codecs.is_lossless(codec):
            return _write_lossless(place, field, plan, codec, pieces(codec))
        attempt = _Attempt(place, field, codec)
        for piece, encoded in ahead(codec, pieces(codec), runtime):
            attempt.write(piece, encoded)
            if attempt.hopeless():
                break
        fault = attempt.fault()
        if fault is None:
            return attempt.finish(plan)
        attempt.remove()
        if fault.over_budget and field.choice.when_exceeded == "refuse":
            raise ErrorBudgetExceeded(
                f"segment {place.segment}, {field.name}: expected an error within max_error="
                f"{field.choice.max_error:g} of the norm of the rows, found that {fault.text}; "
                "choose a more precise codec, a wider budget, or when_exceeded='widen'"
            )
        plan = _wider(field, plan.codec, fault)


def constant(field: Field, codec: str) -> StoredField:
    """Returns the record of a field of evicted rows, which needs no arrays."""
    nothing = StoredArrays((), 0)
    return parts.stored_field(
        field.name, nothing, codec=codec, reason=f"{codec}: evicted", bounds=field.bounds
    )


class _Fault(NamedTuple):
    """Why a codec is unsuitable; ``over_budget`` if its error is too large."""

    text: str
    over_budget: bool


class _Attempt:
    """A field on its way through one lossy codec."""

    def __init__(self, place: Place, field: Field, codec: Codec):
        self._place, self._field, self._codec = place, field, codec
        self._entries = _entries(field, codec)
        self._writers = {suffix: place.writer(entry) for suffix, entry in self._entries.items()}
        self._done = 0
        self._squared_error = np.zeros(len(field.tables))
        self._squared_norm = np.zeros(len(field.tables))
        self._beside: list[np.ndarray] = []
        self._beside_at: list[np.ndarray] = []

    def write(self, piece: Piece, encoded: Encoded) -> None:
        """Writes the next rows, and measures their decoding error."""
        for suffix, stored in self._writers.items():
            array = np.asarray(encoded.arrays[suffix])
            stored.write(array.view(self._entries[suffix].dtype))
        held = np.asarray(encoded.held)
        if not held.all():
            missing = np.flatnonzero(~held)
            self._beside.append(piece.host()[missing])
            self._beside_at.append(missing + self._done)
        stop = self._done + len(held)
        for sums, found in (
            (self._squared_error, encoded.squared_error),
            (self._squared_norm, encoded.squared_norm),
        ):
            self._count(sums, np.asarray(found), stop)
        self._done = stop

    def _count(self, sums: np.ndarray, found: np.ndarray, stop: int) -> None:
        """Adds figures of the rows ``[done, stop)`` to those of their tables."""
        bounds, start = self._field.bounds, self._done
        first = int(np.searchsorted(bounds, start, "right")) - 1
        for table in range(first, len(sums)):
            low, high = max(int(bounds[table]), start), min(int(bounds[table + 1]), stop)
            if low >= stop:
                break
            sums[table] += found[low - start : high - start].sum(dtype=np.float64)

    def finish(self, plan: Choice) -> StoredField:
        """Ends the arrays, and writes the raw rows."""
        written = []
        for suffix, stored in self._writers.items():
            written.append(StoredArrays((self._entries[suffix],), stored.finish()))
        if self._beside:
            written += self._write_beside()
        return parts.stored_field(
            self._field.name,
            StoredArrays.joined(written),
            codec=plan.codec,
            reason=plan.reason,
            bounds=self._field.bounds,
            squared_error=self._squared_error,
            squared_norm=self._squared_norm,
        )

    def remove(self) -> None:
        """Removes what was written."""
        for stored in self._writers.values():
            stored.remove()

    def _write_beside(self) -> Iterator[StoredArrays]:
        field = self._field
        stored = codecs.stored_dtype(field.dtype)
        for suffix, trailing, beside, zstd in (
            (codecs.BESIDE, field.trailing, [rows.view(stored) for rows in self._beside], False),
            (codecs.BESIDE_AT, (), self._beside_at, True),
        ):
            entry = arrays.array_entry(
                codecs.array_name(field.name, suffix),
                (self._beside_count, *trailing),
                beside[0].dtype,
                zstd=zstd,
            )
            yield parts.write_array(self._place, entry, beside)

    @property
    def _beside_count(self) -> int:
        return sum(len(rows) for rows in self._beside)

    def hopeless(self) -> bool:
        """Returns whether so many rows are stored raw that the codec gains too little."""
        beside, count = self._beside_count, self._field.count
        if beside == 0:
            return False
        saved_bytes = self._field.raw_bytes - sum(entry.nbytes for entry in self._entries.values())
        too_large = beside * self._field.raw_bytes >= saved_bytes * count
        return too_large or beside > max(_FEW_ROWS, count * _MOST_BESIDE)

    def fault(self) -> _Fault | None:
        """Returns why the codec is unsuitable, or None."""
        name, field = self._codec.name, self._field
        if self.hopeless():
            text = f"{name} cannot represent {self._beside_count} of {self._done} rows"
            return _Fault(text, over_budget=False)
        bound = field.choice.max_error
        if bound is None:
            return None
        error, norm = self._squared_error, self._squared_norm
        errors = np.sqrt(np.divide(error, norm, out=np.zeros_like(error), where=error > 0))
        worst = int(np.argmax(errors))
        if errors[worst] <= bound:
            return None
        text = f"{name} would change the rows of {field.tables[worst]} by {errors[worst]:.3g}"
        return _Fault(text, over_budget=True)


def _entries(field: Field, codec: Codec) -> dict[str, ArrayEntry]:
    """Suffix to stored array; chunks hold the rows that raw ones would.

    A restore reads and decodes chunks in parallel, so few large ones would leave it one thread.
    """
    shape = (field.count, *field.trailing)
    raw = arrays.array_entry(field.name, shape, codecs.stored_dtype(field.dtype))
    return {
        suffix: arrays.array_entry(
            codecs.array_name(field.name, suffix),
            (field.count, *array.trailing),
            array.dtype,
            byte_planes=array.byte_planes,
            chunk_rows=raw.chunk_rows,
        )
        for suffix, array in codec.stored(field.trailing, field.dtype).items()
    }


def _wider(field: Field, codec: str, fault: _Fault) -> Choice:
    name = "raw"
    if fault.over_budget:
        name = codecs.wider(codec)
        while not _fits(field, name):
            name = codecs.wider(name)
    reason = f"{name}: {fault.text}"
    if fault.over_budget:
        reason += f", more than {field.choice.max_error:g}"
    return Choice(codec=name, reason=f"{reason} (planned {field.planned.reason})")


def _fits(field: Field, name: str) -> bool:
    try:
        codecs.get(name).check(field.trailing, field.dtype)
    except OptionError:
        return False
    return True


def _write_lossless(
    place: Place, field: Field, plan: Choice, codec: Lossless, pieces: Iterator[Piece]
) -> StoredField:
    (entry,) = _entries(field, codec).values()
    rows = (codec.stored_view(np.ascontiguousarray(piece.host())) for piece in pieces)
    return parts.stored_field(
        field.name,
        parts.write_array(place, entry, rows, held=field.held),
        codec=plan.codec,
        reason=plan.reason,
        bounds=field.bounds,
    )
