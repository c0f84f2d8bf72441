# SPDX-License-Identifier: Apache-2.0
"""What a compaction will do: which rows of a step's tables make up which part of the new base.

A plan is a pure description, which any process can follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from deltackpt.errors import BrokenChain, StepNotFound
from deltackpt.format import names
from deltackpt.format.blocks import Span
from deltackpt.format.manifest import SaveId
from deltackpt.format.segments import GroupEntry
from deltackpt.ledger.directory import Root
from deltackpt.reading import chains, dense_values, removal, saves
from deltackpt.reading.saves import StoredSave

#: A part is a few seconds of work: what a worker that is lost has to do again.
_PART_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a compaction will do.

    Attributes:
      directory: root of the steps.
      item: name of our item in them.
      step: the step that is folded.
      save_id: its save id, which the base will bear.
      temporary: name of the temporary directory below ``compacted/``.
      parts: of each part its spans of virtual rows, by group.
      nbytes: bytes of all rows of all fields, unencoded.
      deltas: how many deltas are folded.
      dense_bytes: bytes of the dense leaves, where the step has them as blocks; else they stay in
        the step, and the base has none.
    """

    directory: Path
    item: str
    step: int
    save_id: SaveId
    temporary: str
    parts: tuple[tuple[tuple[str, Span], ...], ...]
    nbytes: int
    deltas: int
    dense_bytes: int = 0

    @property
    def step_dir(self) -> Path:
        """Directory of the step."""
        return self.directory / str(self.step)

    @property
    def workspace(self) -> Path:
        """The temporary directory."""
        return self.directory / names.COMPACTED / self.temporary

    @property
    def item_dir(self) -> Path:
        """Where the base is put together."""
        return self.workspace / self.item


def plan(
    directory: Path, *, item: str = names.EMBEDDINGS_ITEM, step: int | None = None, parts: int = 1
) -> Plan | None:
    """Divides the rows of a step's tables into parts of nearly equal bytes.

    Args:
      directory: root of the steps.
      item: name of our item in them.
      step: the step; the newest by default.
      parts: how many parts, or a multiple of it where they would be larger than some GiB.

    Returns:
      The plan; None where the step is a base alone, compacted or not.

    Raises:
      StepNotFound: there is no such step.
      RestoreError: what else is wrong with its chain.
    """
    named, root = step is not None, Root.open(directory, item=item, read_only=True)
    if step is None:
        step = root.newest_step()
        if step is None:
            raise StepNotFound(f"{directory}: expected committed steps, found none; check the path")
    step_dir = directory / str(step)
    try:
        with removal.standing(step_dir, during="compacted", instead="compact"):
            found = chains.read_chain(step_dir, item)
    except BrokenChain as error:
        if named or root.newest_step() == step:
            raise
        # A later step was committed meanwhile, of whose window this one is a part.
        raise removal.gone(step_dir, during="compacted", instead="compact") from error
    if len(found) == 1:
        return None
    groups = found[-1].layout.groups
    nbytes = sum(group.rows * group.row_bytes for group in groups)
    count = parts * max(1, math.ceil(nbytes / (parts * _PART_BYTES)))
    return Plan(
        directory=directory,
        item=item,
        step=step,
        save_id=found[-1].info.save_id,
        temporary=names.compaction_name(step_dir.name),
        parts=_divided(groups, nbytes, count),
        nbytes=nbytes,
        deltas=sum(save.info.kind == "delta" for save in found),
        dense_bytes=sum(value.nbytes for value in dense_values.listed(found[-1])),
    )


def chain(plan: Plan) -> tuple[StoredSave, ...]:
    """The chain that is folded, as it stands now.

    Raises:
      StepGone: it is no more what was planned for: the step went, or stands as a part of the
        windows of later steps alone, since retention removed what was before it.
    """
    try:
        found = chains.read_chain(plan.step_dir, plan.item)
    except BrokenChain as error:
        raise removal.gone(plan.step_dir, during="compacted", instead="compact") from error
    if found[-1].info.save_id != plan.save_id:
        raise removal.gone(plan.step_dir, during="compacted", instead="compact")
    return found


def standing(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Within, what fails since the step is no more what was planned for is ``StepGone``."""
    return removal.standing(
        plan.step_dir,
        stands=lambda: saves.stands(plan.step_dir, plan.save_id, plan.item),
        during="compacted",
        instead="compact",
    )


def _divided(
    groups: Sequence[GroupEntry], nbytes: int, count: int
) -> tuple[tuple[tuple[str, Span], ...], ...]:
    """All rows, cut into parts of nearly equal bytes; without parts that hold nothing."""
    starts = [0, *itertools.accumulate(group.rows * group.row_bytes for group in groups)]

    def row(group: GroupEntry, start: int, at: int) -> int:
        return min(max(0, at - start) // group.row_bytes, group.rows)

    parts = []
    for number in range(count):
        low, high = number * nbytes // count, (number + 1) * nbytes // count
        spans = (
            (group.name, (row(group, start, low), row(group, start, high)))
            for group, start in zip(groups, starts, strict=False)
        )
        parts.append(tuple((name, span) for name, span in spans if span[0] < span[1]))
    return tuple(part for part in parts if part) or ((),)
