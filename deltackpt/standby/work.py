# SPDX-License-Identifier: Apache-2.0
"""The data to apply to the held rows to reach another state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from deltackpt import codecs
from deltackpt.errors import RestoreError, StorageError
from deltackpt.format.blocks import RowBlock
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Layout
from deltackpt.layers import merge
from deltackpt.layers.merge import Piece
from deltackpt.layers.targets import Targets
from deltackpt.reading import reader, replay, saves
from deltackpt.reading.replay import SeenRows
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.standby.difference import changed_rows

#: Reads, verifies and decodes some rows, of one field each; later blocks replace earlier ones.
Load = Callable[[], list[RowBlock]]


class HeldStep(Protocol):
    """The step that is held before an update."""

    @property
    def save(self) -> SaveInfo:
        """The step that is held."""
        ...

    @property
    def layout(self) -> Layout:
        """Its tables and dense leaves."""
        ...


def since(newest: StoredSave, held: HeldStep) -> list[StoredSave] | None:
    """Returns the saves after the held one, oldest first; None if they do not descend from it.

    Only descendants of the held save can be applied. A delta against an earlier save contains every
    row touched since, unless training rolled back in memory; held rows may then be from the
    discarded steps. If parents do not match, reading the whole chain reports it.
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
    chain: Sequence[StoredSave],
    plan: ReplayPlan | None,
    targets: Targets,
    layout: Layout,
    seen: SeenRows,
) -> Iterator[Load]:
    """Yields the pieces of saves, and of records above them, in the order to apply them.

    The row indices of one save at a time are in memory.

    Args:
      chain: the saves, oldest first.
      plan: records to apply after them.
      targets: the held memory.
      layout: its tables.
      seen: receives the rows of the records as they are loaded.
    """
    for save in chain:
        shards = reader.layers_of([save], targets)
        for piece in itertools.chain.from_iterable(merge.plan(shards, targets)):
            yield functools.partial(_found, piece, compare=save.info.kind == "base")
    if plan is not None:
        records = replay.layers_of(plan, layout)
        for piece in itertools.chain.from_iterable(replay.stages(records, targets, seen)):
            yield piece.load


def are_lossless(chain: Sequence[StoredSave], plan: ReplayPlan | None) -> bool:
    """Returns whether saves and records hold all their rows bit for bit."""
    planned = {spec.codec for save in chain for group in save.head.groups for spec in group.fields}
    used = {
        segment.spec(of_epoch.head.group_by_name[segment.group], field).codec
        for of_epoch in (() if plan is None else plan.segments)
        for segment in replay.segments_of(of_epoch)
        for field in segment.fields
    }
    return all(codecs.is_lossless(codecs.get(name)) for name in planned | used)


def _found(piece: Piece, *, compare: bool) -> list[RowBlock]:
    """The rows of a piece, or those that differ from the held ones."""
    first, *beside = piece.load()
    # Other blocks replace rows of the first one, which may be among the different ones.
    return [*(changed_rows(first, piece.targets) if compare else [first]), *beside]
