# SPDX-License-Identifier: Apache-2.0
"""Compaction plans: pure descriptions of which rows of a step's tables are in which shard."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from deltackpt.errors import StepNotFound
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.format.row_blocks import GroupEntry, Span
from deltackpt.ledger.directory import Root
from deltackpt.reading import chains, stored_dense, stored_saves
from deltackpt.reading.stored_saves import StoredSave

#: A shard is a few seconds of work, which is lost with its worker.
_SHARD_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactionPlan:
    """A plan for a compaction."""

    directory: Path
    item: str
    step: int
    save_id: SaveId
    temporary: str
    shards: tuple[tuple[tuple[str, Span], ...], ...]  #: Virtual rows of each shard, by group.
    nbytes: int  #: Before encoding.
    deltas: int
    dense_bytes: int = 0  #: 0 unless the step has its dense leaves as blocks.

    @property
    def step_dir(self) -> Path:
        """Directory of the step."""
        return self.directory / str(self.step)

    @property
    def workspace(self) -> Path:
        """The temporary directory."""
        return self.directory / naming.COMPACTED / self.temporary

    def shard_dir(self, number: int) -> Path:
        """Directory of a shard that was written; that of shard 0 becomes the base."""
        return self.workspace / str(number)


def plan(
    directory: Path, *, item: str = naming.EMBEDDINGS_ITEM, step: int | None = None, shards: int = 1
) -> CompactionPlan | None:
    """Divides the rows of a step, by default the newest, into shards of nearly equal bytes.

    Returns None if the chain is only a base. There are more shards if they would exceed 4 GiB.
    """
    if step is None:
        step = Root.open(directory, item=item, read_only=True).newest_step()
        if step is None:
            raise StepNotFound(f"{directory}: expected committed steps, found none; check the path")
    step_dir = directory / str(step)
    with stored_saves.detect_removal(step_dir, during="compacted", instead="compact"):
        found = chains.read_chain(step_dir, item)
    if len(found) == 1:
        return None
    groups = found[-1].layout.groups
    nbytes = sum(group.rows * group.row_bytes for group in groups)
    count = shards * max(1, math.ceil(nbytes / (shards * _SHARD_BYTES)))
    return CompactionPlan(
        directory=directory,
        item=item,
        step=step,
        save_id=found[-1].info.save_id,
        temporary=naming.compaction_name(step_dir.name),
        shards=_divided(groups, nbytes, count),
        nbytes=nbytes,
        deltas=sum(save.info.kind == "delta" for save in found),
        dense_bytes=sum(value.nbytes for value in stored_dense.listed(found[-1])),
    )


def chain(plan: CompactionPlan) -> tuple[StoredSave, ...]:
    """Reads the chain to merge; raises ``StepGone`` if the step was replaced since the plan."""
    with detect_step_removal(plan):
        found = chains.read_chain(plan.step_dir, plan.item)
    if found[-1].info.save_id != plan.save_id:
        raise stored_saves.gone(plan.step_dir, during="compacted", instead="compact")
    return found


def detect_step_removal(plan: CompactionPlan) -> contextlib.AbstractContextManager[None]:
    """Within, errors become ``StepGone`` if the step was removed or replaced."""
    return stored_saves.detect_removal(
        plan.step_dir,
        exists=lambda: stored_saves.exists(plan.step_dir, plan.save_id, plan.item),
        during="compacted",
        instead="compact",
    )


def _divided(
    groups: Sequence[GroupEntry], nbytes: int, count: int
) -> tuple[tuple[tuple[str, Span], ...], ...]:
    """Divides all rows into shards of nearly equal bytes; leaves out empty shards."""
    starts = [0, *itertools.accumulate(group.rows * group.row_bytes for group in groups)]

    def row(group: GroupEntry, start: int, at: int) -> int:
        return min(max(0, at - start) // group.row_bytes, group.rows)

    shards = []
    for number in range(count):
        low, high = number * nbytes // count, (number + 1) * nbytes // count
        spans = (
            (group.name, (row(group, start, low), row(group, start, high)))
            for group, start in zip(groups, starts, strict=False)
        )
        shards.append(tuple((name, span) for name, span in spans if span[0] < span[1]))
    return tuple(shard for shard in shards if shard) or ((),)
