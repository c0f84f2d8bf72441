# SPDX-License-Identifier: Apache-2.0
"""What one call of ``log()`` takes of the training state, and the frames that it becomes.

Rows and dense leaves are copied before ``log()`` returns: they are of one moment. Rows are encoded
in the background by what encodes those of deltas, with the same budgets of errors: a lossy row is a
whole value, encoded once from the live one, however many marks there are.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deltackpt.errors import OptionError
from deltackpt.format import blocks, frames, manifest
from deltackpt.format.blocks import VALUES
from deltackpt.format.frames import (
    DenseHead,
    DenseValue,
    Head,
    ItemsHead,
    LoggedItem,
    MarkHead,
    RowsHead,
)
from deltackpt.format.manifest import ArrayEntry, Layout, SaveId
from deltackpt.policy import CodecChoice
from deltackpt.reading.replay import differed
from deltackpt.save import fields
from deltackpt.save.dense import DenseLeaves
from deltackpt.save.extract import SegmentSource
from deltackpt.save.part import Plans, fields_of
from deltackpt.save.taken import CopiedRows
from deltackpt.storage import parts

#: Differences of dense leaves are taken so often before they are whole again.
_DIFFERENCES = 15
#: Of a chunk whose numbers are no array: its bytes.
_BYTE = 1


@dataclasses.dataclass(eq=False, kw_only=True)
class Batch:
    """What one process logs at one call.

    Attributes:
      save_id: of its mark.
      full: whether the dense leaves are in it.
      rows: copied, or on their way.
      layout: tables and groups.
      choices: group name to field name to the codec of the log.
      plans: the codecs that are tried first.
      dense: copied dense leaves of a full mark.
      items: further items, by name.
      nbytes: of rows and dense leaves, before they are encoded.
      unix_ns: when it was taken.
      started: likewise, of ``time.perf_counter()``.
      blocked_secs: how long ``log()`` took.
      figures: what writing it took, once it is written.
    """

    save_id: SaveId
    full: bool
    rows: CopiedRows
    layout: Layout
    choices: Mapping[str, Mapping[str, CodecChoice]]
    plans: Plans
    dense: DenseLeaves | None
    items: Sequence[Item]
    nbytes: int
    unix_ns: int
    started: float
    blocked_secs: float = 0.0
    figures: Figures | None = None

    def release(self) -> None:
        """Gives the memory back; safe to call again."""
        self.rows.release()
        if self.dense is not None:
            self.dense.release()

    @property
    def row_count(self) -> int:
        """Rows of tables, those of several column ranges once for each."""
        return sum(len(one.rows) for one in self.rows.segments if VALUES in one.fields)

    @property
    def row_numbers(self) -> dict[str, np.ndarray]:
        """Table name to the numbers of its rows that it holds, int64 ascending.

        Without those of fields that are ``always`` written.
        """
        found: dict[str, np.ndarray] = {}
        for segment in self.rows.segments:
            if not isinstance(segment.rows, np.ndarray):
                continue
            for table in manifest.members(
                self.layout.group_by_name[segment.group], self.layout.tables
            ):
                part = blocks.row_slice(segment.rows, table.offset, table.offset + table.rows)
                rows = segment.rows[part] - table.offset
                if len(rows):
                    held = found.get(table.name)
                    found[table.name] = rows if held is None else np.union1d(held, rows)
        return found


class Figures(NamedTuple):
    """What writing a batch took.

    Attributes:
      nbytes: of its frames.
      dense_bytes: of dense leaves among them.
      encode_secs: until the frames were ready.
      write_secs: until the system had taken them.
    """

    nbytes: int
    dense_bytes: int
    encode_secs: float
    write_secs: float


class Item(NamedTuple):
    """A further item of a mark."""

    name: str
    kind: str
    data: bytes


def items_of(given: Mapping[str, Any] | None) -> tuple[Item, ...]:
    """Further items as they are kept: bytes as they are, all else as JSON.

    Raises:
      OptionError: one is neither.
    """
    found = []
    for name, value in sorted((given or {}).items()):
        if isinstance(value, bytes):
            found.append(Item(name, "bytes", value))
            continue
        try:
            found.append(Item(name, "json", json.dumps(value).encode()))
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"items[{name!r}]: expected bytes, or what JSON can write, found "
                f"{type(value).__name__}: {error}; give what a data iterator's get_state() returns"
            ) from error
    return tuple(found)


def as_json(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further items for a step that is saved instead of a mark: bytes as base64."""
    return {
        name: {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for name, value in (given or {}).items()
    }


class _Array(NamedTuple):
    """Takes the pieces of one array, which stay as they are until the frame is written."""

    pieces: list[np.ndarray]

    def write(self, rows: np.ndarray) -> None:
        """See ``RowsWriter``."""
        self.pieces.append(np.ascontiguousarray(rows))

    def finish(self) -> int:
        """See ``RowsWriter``."""
        return sum(piece.nbytes for piece in self.pieces)

    def remove(self) -> None:
        """See ``RowsWriter``."""
        self.pieces.clear()


class _FramePlace:
    """Where the arrays of a segment go: to the body of a frame. See ``parts.Place``."""

    def __init__(self, segment: str):
        self._segment = segment
        self._arrays: dict[str, _Array] = {}

    @property
    def segment(self) -> str:
        return self._segment

    def writer(self, entry: ArrayEntry) -> _Array:
        found = self._arrays[entry.name] = _Array([])
        return found

    def write_array(
        self, entry: ArrayEntry, pieces: Iterable[np.ndarray], *, held: bool = False
    ) -> int:
        writer = self.writer(entry)
        for piece in pieces:
            writer.write(piece)
        return writer.finish()

    def body(self, entries: Iterable[ArrayEntry]) -> list[Sequence[np.ndarray]]:
        """The pieces of each array."""
        return [self._arrays[entry.name].pieces for entry in entries]


class Frame(NamedTuple):
    """A frame that is to be written: its head, and the arrays of its body in pieces."""

    head: Head
    body: Sequence[Sequence[frames.Buffer]]


def frames_of(
    batch: Batch, parent: SaveId, differences: Differences, pool: concurrent.futures.Executor
) -> Iterator[Frame]:
    """The frames of a batch, its mark last; the rows have landed.

    Args:
      batch: what was taken.
      parent: of its mark.
      differences: what dense leaves are the difference to.
      pool: encodes rows.

    Raises:
      ErrorBudgetExceeded: a codec would exceed the user's bound, who refuses wider ones.
    """
    count = 0
    for frame in itertools.chain(_row_frames(batch, pool), _dense_frames(batch, differences)):
        yield frame
        count += 1
    if batch.items:
        heads = [LoggedItem(name=i.name, kind=i.kind, nbytes=len(i.data)) for i in batch.items]  # pyright: ignore[reportArgumentType]
        yield Frame(ItemsHead(items=tuple(heads)), [[item.data] for item in batch.items])
        count += 1
    mark = MarkHead(
        save_id=batch.save_id,
        parent=parent,
        full=batch.full,
        frames=count,
        unix_ns=batch.unix_ns,
    )
    yield Frame(mark, [])


def _row_frames(batch: Batch, pool: concurrent.futures.Executor) -> Iterator[Frame]:
    groups = batch.layout.group_by_name
    for number, source in enumerate(batch.rows.segments):
        place = _FramePlace(f"{source.group}.{number}")
        row_numbers = parts.write_rows(place, source.rows)
        described = fields_of(
            groups[source.group], source, batch.layout, batch.choices, batch.plans, held=False
        )
        stored = [
            fields.write_field(
                place, field, functools.partial(batch.rows.pieces, number, field.name), pool
            )
            for field in described
        ]
        segment = parts.stored_segment(
            place, source.group, source.columns, source.rows, row_numbers, stored
        )
        yield Frame(RowsHead(segment=segment), place.body(segment.arrays))


def cut(segments: Iterable[SegmentSource]) -> list[SegmentSource]:
    """Segments none of which has more bytes than a frame takes."""
    found = []
    for segment in segments:
        limit = max(1, frames.BODY_BYTES // max(1, segment.row_bytes))
        for start in range(0, len(segment.rows), limit):
            rows = segment.rows[start : start + limit]
            found.append(dataclasses.replace(segment, rows=rows))
    return found


# Dense leaves.


class Differences:
    """Values of the full mark before, to which those of the next are the difference."""

    def __init__(self, *, wanted: bool):
        """There is none before the first.

        Args:
          wanted: whether differences are taken at all.
        """
        self._wanted = wanted
        self._before: dict[str, np.ndarray] = {}
        self._seqs: dict[int, int] = {}
        self._count = 0

    def restart(self) -> None:
        """The next full mark is whole: a file begins, or one was lost."""
        self._before, self._seqs, self._count = {}, {}, 0

    def next(self) -> None:
        """Begins a full mark."""
        if self._count > _DIFFERENCES:
            self.restart()
        self._count += 1

    def of(self, number: int, key: str, data: np.ndarray, itemsize: int) -> _Coded:
        """What a value is kept as.

        Args:
          number: of its frame among those of dense leaves.
          key: of the value.
          data: its bytes, (n,) uint8.
          itemsize: of its numbers.
        """
        before, against = self._before.get(key), self._seqs.get(number)
        if not self._wanted:
            return _Coded(data, None)
        self._before[key] = data.copy()
        if before is None or against is None or before.size != data.size:
            return _Coded(data, None)
        return _Coded(np.frombuffer(differed(data, before, itemsize), np.uint8), against)

    def stand_at(self, written: Iterable[Frame], seqs: Iterable[int]) -> None:
        """Notes the seqs that the frames of a batch were given."""
        found = [seq for frame, seq in zip(written, seqs) if isinstance(frame.head, DenseHead)]
        if found:
            self._seqs = dict(enumerate(found))


class _Coded(NamedTuple):
    data: np.ndarray
    against: int | None


def _dense_frames(batch: Batch, differences: Differences) -> Iterator[Frame]:
    """Dense leaves: each frame holds the same keys in all marks of a file."""
    if batch.dense is None:
        return
    differences.next()
    for number, chunk in enumerate(_frame_values(batch.dense)):
        heads, bodies = [], []
        coded = [(one, differences.of(number, one.key, one.data, one.itemsize)) for one in chunk]
        # All values of a frame are differences to one frame, or none is.
        whole = any(found.against is None for _, found in coded)
        for one, found in coded:
            data = one.data if whole else found.data
            heads.append(
                DenseValue(
                    key=one.key,
                    file=one.file,
                    nbytes=data.nbytes,
                    decoded_bytes=one.data.nbytes,
                    itemsize=one.itemsize,
                    against=None if whole else found.against,
                )
            )
            bodies.append([data])
        yield Frame(DenseHead(values=tuple(heads)), bodies)


class _Plain(NamedTuple):
    """A value, or a file, of the dense item: its bytes, (n,) uint8."""

    key: str
    file: bool
    data: np.ndarray
    itemsize: int


def dense_values(frame: Frame) -> tuple[DenseValue, ...]:
    """The values that a frame of dense leaves holds; of other frames none."""
    return frame.head.values if isinstance(frame.head, DenseHead) else ()


def _frame_values(dense: DenseLeaves) -> Iterator[list[_Plain]]:
    """The values of each frame: small ones together."""
    held: list[_Plain] = []
    nbytes = 0
    for one in _plain_values(dense):
        if held and nbytes + one.data.nbytes > frames.BODY_BYTES:
            yield held
            held, nbytes = [], 0
        held.append(one)
        nbytes += one.data.nbytes
    if held:
        yield held


def _plain_values(dense: DenseLeaves) -> Iterator[_Plain]:
    for name, text in dense.files.items():
        yield _Plain(name, True, np.frombuffer(text.encode(), np.uint8), _BYTE)
    for key, data in dense.values:
        if isinstance(data, bytes):
            yield _Plain(key, False, np.frombuffer(data, np.uint8), _BYTE)
        else:
            # Views of dtypes that no buffer describes are bytes like all others.
            flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            yield _Plain(key, False, flat, data.dtype.itemsize)
