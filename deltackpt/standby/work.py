# SPDX-License-Identifier: Apache-2.0
"""What must be added to the rows that are held, so that they become those of another state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from deltackpt import codecs
from deltackpt.errors import RestoreError, StorageError
from deltackpt.format.blocks import RowBlock
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Layout
from deltackpt.reading import reader, replay, saves
from deltackpt.reading.reader import Read
from deltackpt.reading.replay import SeenRows
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import Way
from deltackpt.reading.targets import Targets
from deltackpt.standby.difference import changed_rows

#: Reads, verifies and decodes some rows, of one field each; later blocks replace earlier ones.
Load = Callable[[], list[RowBlock]]


class HeldStep(Protocol):
    """What is gone on from."""

    @property
    def save(self) -> SaveInfo:
        """The step that is held."""
        ...

    @property
    def layout(self) -> Layout:
        """Its tables and dense leaves."""
        ...


def since(newest: StoredSave, held: HeldStep) -> list[StoredSave] | None:
    """The saves after the one that is held, oldest first; None where it is none of their parents.

    Only its children may be added to what is held. A delta against an earlier save has every row
    that was touched since, but for a training that went back in memory: rows that are held may
    then be of moments that were given up. Where parents do not fit together, reading the whole
    chain will say so.
    """
    if newest.info.save_id == held.save.save_id:
        return []
    found = [newest]
    while found[-1].layout == held.layout:
        save_id, parent = found[-1].info.save_id, found[-1].info.parent
        if parent is None or parent.save_id.step >= save_id.step:
            return None
        if parent.save_id == held.save.save_id:
            return found[::-1]
        try:
            save = saves.read_save(newest.step_dir.parent / parent.step_dir, newest.item)
        except (RestoreError, StorageError):
            return None
        if save.info.save_id != parent.save_id:
            return None
        found.append(save)
    return None


def loads(
    chain: Sequence[StoredSave], marks: Way | None, targets: Targets, layout: Layout, seen: SeenRows
) -> Iterator[Load]:
    """The pieces of saves, and of marks above them, in the order in which they are applied.

    The row numbers of one save are in memory at a time.

    Args:
      chain: the saves, oldest first.
      marks: to be applied after them.
      targets: what is held.
      layout: its tables.
      seen: gets the rows of the marks as they are loaded.
    """
    for save in chain:
        for piece in reader.pieces(save, targets):
            yield functools.partial(_found, piece, compare=save.info.kind == "base")
    if marks is not None:
        for logged in replay.pieces(marks, layout, seen):
            yield functools.partial(logged.load, targets)


def are_lossless(chain: Sequence[StoredSave], marks: Way | None) -> bool:
    """Whether saves and marks hold all their rows bit for bit."""
    planned = {spec.codec for save in chain for group in save.head.groups for spec in group.fields}
    used = {
        segment.spec(leg.head.group_by_name[segment.group], field).codec
        for leg in (() if marks is None else marks.legs)
        for segment in replay.segments_of(leg)
        for field in segment.fields
    }
    return all(codecs.is_lossless(codecs.get(name)) for name in planned | used)


def _found(piece: Read, *, compare: bool) -> list[RowBlock]:
    """The rows of a piece, or those that differ from what is held."""
    first, *beside = piece.load()
    # What is beside replaces rows of the first block, which may be among those that differ.
    return [*(changed_rows(first, piece.targets) if compare else [first]), *beside]
