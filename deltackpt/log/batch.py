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
from deltackpt.format.frames import ItemsHead, LoggedItem, MarkHead, RowsHead
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.log.dense_frames import Dense, DenseFrames
from deltackpt.log.frame import Frame, FramePlace, body_of
from deltackpt.policy import CodecChoice
from deltackpt.save import fields
from deltackpt.save.extract import SegmentSource
from deltackpt.save.part import Plans, fields_of
from deltackpt.save.taken import CopiedRows
from deltackpt.state import paths
from deltackpt.storage import parts


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
    dense: Dense | None
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
      OptionError: one is neither, or has a name that is no text: who reads the log would take its
        mark, and all marks after it, for damage.
    """
    for name in given or {}:
        if not isinstance(name, str) or paths.printable(name) != name:
            raise OptionError(
                f"items: expected texts as their names, found {name!r} ({type(name).__name__}); "
                "name it otherwise"
            )
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


def frames_of(
    batch: Batch, parent: SaveId, dense: DenseFrames, pool: concurrent.futures.Executor
) -> Iterator[Frame]:
    """The frames of a batch, its mark last; the rows have landed.

    Args:
      batch: what was taken.
      parent: of its mark.
      dense: makes those of dense leaves.
      pool: encodes.

    Raises:
      ErrorBudgetExceeded: a codec would exceed the user's bound, who refuses wider ones.
    """
    count = 0
    leaves = dense.of(batch.dense, batch.save_id, pool)
    for frame in itertools.chain(_row_frames(batch, pool), leaves):
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
        place = FramePlace(f"{source.group}.{number}")
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
        body = body_of([(place, segment.arrays)], pool)
        yield Frame(RowsHead(segment=segment, sizes=body.sizes), body.arrays)


def cut(segments: Iterable[SegmentSource]) -> list[SegmentSource]:
    """Segments none of which has more bytes than a frame takes."""
    found = []
    for segment in segments:
        limit = max(1, frames.BODY_BYTES // max(1, segment.row_bytes))
        if len(segment.rows) <= limit:
            found.append(segment)
            continue
        for start in range(0, len(segment.rows), limit):
            rows = segment.rows[start : start + limit]
            found.append(dataclasses.replace(segment, rows=rows))
    return found
