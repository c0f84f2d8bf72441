# SPDX-License-Identifier: Apache-2.0
"""One process's shard of a trainer's save: its segments, then digests and manifest.

Only ``write_segments`` reads the captured training state; ``finish`` coordinates with
the other processes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deltackpt import codecs
from deltackpt.codecs import Codec
from deltackpt.format import blocks, manifest, names
from deltackpt.format.dense_blocks import DenseBlocks
from deltackpt.format.manifest import LayerRef, Layout, Manifest, TrackingName
from deltackpt.format.segments import GroupEntry, Segment
from deltackpt.policies import Choice, CodecChoice
from deltackpt.resources.runtime import Runtime
from deltackpt.save import fields
from deltackpt.save.division import Owned
from deltackpt.save.extract import SegmentSource
from deltackpt.save.fields import Field
from deltackpt.save.lineage import Intent, Lineage
from deltackpt.save.pieces import BusyClock, Piece
from deltackpt.save.taken import TakenRows
from deltackpt.save.writers import StepWriters
from deltackpt.storage import parts
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.parts import Place, Share, WrittenPart

#: Group name to field name to the codec that a save tries first.
Plans = Mapping[str, Mapping[str, Choice]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartPlan:
    """A process's part of a save, without its arrays; decided before training continues.

    Attributes:
      intent: the decision about the save.
      layout: tables and groups.
      choices: group name to field name to the user's codec.
      plans: the first codecs that this save tries.
      share_plans: the first codecs that it tries for the share of a rolling base.
      owned: the rows that the process writes in a base.
      shared_stamps: checksums that must be equal on other processes; see ``Stamps.shared``.
      lineage: lineage that knows the compacted bases, or None.
      digests: digest files that the commit writes; see ``Manifest.digests``.
      tracking: how touched rows were found.
    """

    intent: Intent
    layout: Layout
    choices: Mapping[str, Mapping[str, CodecChoice]]
    plans: Plans
    share_plans: Plans
    owned: Owned
    shared_stamps: Mapping[str, int]
    lineage: Lineage | None
    digests: tuple[str, ...]
    tracking: TrackingName = ""


def write_segments(
    rows: TakenRows,
    place_of: Callable[[str], Place],
    described: Callable[[SegmentSource], Sequence[Field]],
    runtime: Runtime,
    encoding: BusyClock,
    *,
    threads: int | None = None,
) -> list[Segment]:
    """Writes the arrays of all captured rows, which must be in host memory or encoded.

    Args:
      rows: captured rows.
      place_of: returns the destination of a segment.
      described: returns the fields of a segment.
      runtime: threads that write and encode.
      encoding: measures the encoding time, separately from writing.
      threads: number of arrays that are written at the same time; by default as many as the runtime
        allows.

    Raises:
      ErrorBudgetExceeded: a codec would exceed the user's bound, and more precise ones are not
        allowed.
      StorageError: the store reported an error.
    """
    places, writes = [], []
    for number, source in enumerate(rows.segments):
        place = place_of(f"{source.group}.{number}")
        places.append(place)
        writes.append(functools.partial(parts.write_rows, place, source.rows))
        for field in described(source):
            if source.evicted:
                codec = codecs.ONES if field.name == source.key else codecs.ZEROS
                writes.append(functools.partial(fields.constant, field, codec))
                continue
            pieces = functools.partial(_pieces, rows, encoding, number, field.name)
            writes.append(functools.partial(fields.write_field, place, field, pieces, runtime))
    stored: Iterator[Any] = iter(runtime.map(lambda write: write(), writes, threads=threads))
    return [
        parts.stored_segment(
            place,
            source.group,
            source.columns,
            source.rows,
            next(stored),
            [next(stored) for _ in source.fields],
        )
        for place, source in zip(places, rows.segments, strict=True)
    ]


def _pieces(
    rows: TakenRows, encoding: BusyClock, number: int, field: str, codec: Codec
) -> Iterator[Piece]:
    """Rows of a field in pieces; the work on them is timed."""
    return encoding.over(rows.pieces(number, field, codec))


def planned_fields(plan: PartPlan, rows: TakenRows, source: SegmentSource) -> list[Field]:
    """Returns the fields of a segment of a save to store."""
    rolled = plan.intent.kind == "delta" and source.kind == "base"
    plans = plan.share_plans if rolled else plan.plans
    return fields_of(source, plan.layout, plan.choices, plans, held=rows.held)


def fields_of(
    source: SegmentSource,
    layout: Layout,
    choices: Mapping[str, Mapping[str, CodecChoice]],
    plans: Plans,
    *,
    held: bool,
) -> list[Field]:
    """Returns the fields of a segment to store.

    Args:
      source: the segment.
      layout: tables and groups.
      choices: group name to field name to the user's codec.
      plans: the first codecs to try.
      held: whether its rows are views of the training state, which might change concurrently.
    """
    group = layout.group_by_name[source.group]
    bounds = parts.table_bounds(group, layout, source.rows)
    tables = [table.name for table in manifest.members(group, layout.tables)]
    return [
        Field(
            name=name,
            trailing=field.trailing,
            dtype=field.dtype,
            tables=tables,
            bounds=bounds,
            choice=choices[group.name][name],
            planned=plans[group.name][name],
            held=held,
        )
        for name, field in source.fields.items()
    ]


def finish(
    plan: PartPlan,
    item_dir: Path,
    segments: Sequence[Segment],
    batch: FileBatch,
    others: StepWriters,
    *,
    layer: LayerRef | None = None,
    dense: DenseBlocks | None = None,
    dense_bytes: int = 0,
) -> WrittenPart:
    """Writes digests, then the manifest; process 0 waits for the other shards in between.

    Args:
      plan: the part to write.
      item_dir: directory of the item, in the step's temporary directory.
      segments: all segments of the shard.
      batch: the batch that wrote them.
      others: the processes that write the step.
      layer: the layer file with all arrays; None if they are files of the batch.
      dense: dense leaves that were written with the segments.
      dense_bytes: see ``Manifest.dense_bytes``.

    Raises:
      StorageError: the store reported an error.
      ProcessMissing, ProcessFailed, Disagreement: as for ``StepWriters``.
    """
    several = others.count > 1
    written = parts.finish(
        item_dir,
        dataclasses.replace(_head(plan, others), dense_blocks=dense, dense_bytes=dense_bytes),
        segments,
        batch,
        layer=layer,
        share=_share(plan, segments) if several else None,
        index=functools.partial(others.collect, item_dir) if several else None,
    )
    if others.process > 0:
        path = item_dir / names.manifest_name(others.process)
        others.report("shard", others.records([path]))
    return written


def _head(plan: PartPlan, others: StepWriters) -> Manifest:
    """Returns the manifest without anything about the files."""
    intent, layout = plan.intent, plan.layout
    compacted = None
    if plan.lineage is not None and others.process == 0:
        # Process 0 informs the others about compaction.
        compacted = plan.lineage.newest_compacted()
    return Manifest(
        kind=intent.kind,
        save_id=intent.save_id,
        parent=intent.parent,
        rolling=intent.rolling,
        reason=intent.reason,
        process=others.process,
        process_count=others.count,
        groups=_planned_groups(plan),
        tables=layout.tables,
        segments=(),
        dense=layout.dense,
        tracking_paths=layout.tracking_paths,
        digests=plan.digests,
        restores=intent.restores,
        compacted=compacted,
        parents=intent.parents if others.process == 0 else (),
        tracking=plan.tracking if others.process == 0 else "",
    )


def _share(plan: PartPlan, segments: Sequence[Segment]) -> Share:
    held = {segment.group for segment in segments}
    return Share(
        owned_cells=plan.owned.cells,
        covers=tuple(plan.owned.cover(group) for group in plan.layout.groups if group.name in held),
        shared_stamps=plan.shared_stamps,
    )


def _planned_groups(plan: PartPlan) -> tuple[GroupEntry, ...]:
    """The groups with the codecs that the save planned."""
    plans = plan.plans
    return manifest.with_codecs(
        plan.layout.groups, lambda group, spec: plans[group.name][spec.name].codec
    )


def table_rows(segments: Iterable[Segment]) -> int:
    """Returns the number of table rows in a shard; rows with several column ranges count once."""
    held = [segment for segment in segments if blocks.VALUES in segment.fields]
    first = {
        segment.group: min(other.columns[0] for other in held if other.group == segment.group)
        for segment in held
    }
    return sum(segment.count for segment in held if segment.columns[0] == first[segment.group])
