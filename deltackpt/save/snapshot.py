# SPDX-License-Identifier: Apache-2.0
"""The blocking half of a save: decides on a base or a delta, and captures its rows.

The lineage decides between base and delta, the stamps determine the touched rows, the audit
checks a few other rows, and the rows are copied or held. All of it is dispatched before the
training thread continues: later steps may donate the tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt import codecs, processes
from deltackpt.codecs import Codec
from deltackpt.errors import OutOfSpace
from deltackpt.format.manifest import Kind
from deltackpt.format.segments import width
from deltackpt.policies import Choice, CodecChoice, too_large
from deltackpt.resources.runtime import Runtime
from deltackpt.save import proof
from deltackpt.save.clocks import Clocks, Reading
from deltackpt.save.extract import SegmentSource
from deltackpt.save.flight import Embeddings, PendingSave
from deltackpt.save.lineage import Intent, Lineage
from deltackpt.save.part import PartPlan, Plans
from deltackpt.save.selection import Sources, including
from deltackpt.save.taken import CopiedRows, HeldRows
from deltackpt.state.marks import match_marks
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import Marks
from deltackpt.storage import files


def take(embeddings: Embeddings, step: int, step_dir: Path) -> PendingSave:
    """Captures what a save needs from the training state.

    The caller must ``wait_copied()`` before training continues. If the tracking audit finds the
    touched rows wrong, a single process saves a base at once; several fail in the background,
    before the commit.

    Args:
      embeddings: the state, its touched rows and its lineage.
      step: the training step.
      step_dir: the step's path once it is committed.

    Raises:
      TrackingError: a TouchState does not fit the tables.
      OutOfSpace: the store has too little free space for the save.
    """
    started = time.perf_counter()
    split, marks = embeddings.split, embeddings.marks
    lineage = embeddings.lineage or Lineage.unprotected()
    runtime = embeddings.runtime or Runtime(memory_bytes=1 << 30)
    stamps = match_marks(marks, split.layout) if marks else {}
    intent = lineage.begin(
        step,
        step_dir,
        clocks=clocks_of(split, marks),
        layout=split.layout,
        force_base=embeddings.force_base,
    )
    faults, shared_stamps = None, {}
    try:
        sources = Sources(split.layout, split.fields, stamps, runtime)
        if since := intent.since or intent.recent:
            sources.stamps.look(since)
        if embeddings.options.sampled_proof and marks and embeddings.lineage is not None:
            found = proof.take(sources, intent)
            lineage.witnessed(intent.save_id, found.witness)
            faults = lineage.suspected
            if found.faults:
                faults = proof.text(found.faults, "in the parent")
        if intent.kind == "delta" and processes.count() > 1:
            shared_stamps = sources.stamps.shared(intent.since)
        elif intent.kind == "delta" and faults is not None:
            intent = lineage.as_base(intent, faults)
        touched = including(sources.stamps.touched, intent.replayed, split.layout)
        segments = sources.segments(
            whole=intent.kind == "base", rolling=intent.rolling, touched=touched
        )
        if intent.kind == "delta" and processes.count() == 1:
            delta_bytes, base_bytes = _expected_bytes(split, segments, intent)
            # A delta's dense bytes are known only after encoding.
            base_bytes += embeddings.dense_bytes
            if (reason := too_large(lineage.policy, delta_bytes, base_bytes)) is not None:
                intent = lineage.as_base(intent, reason)
                segments = sources.segments(whole=True)
        kinds: set[Kind] = {intent.kind} if intent.rolling is None else {"base", "delta"}
        plans = {kind: planned(split.codecs, kind, intent.restores) for kind in kinds}
        nbytes = sum(segment.nbytes for segment in segments)
        require_room(step_dir.parent, nbytes, step)
        if intent.kind == "delta" and runtime.memory.fits(nbytes + embeddings.copied_bytes):
            rows = CopiedRows(segments, lambda one: codecs_of(plans[one.kind][one.group]), runtime)
        else:
            rows = HeldRows(segments)
    except BaseException:
        lineage.failed(intent.save_id)
        raise
    plan = PartPlan(
        intent=intent,
        layout=split.layout,
        choices=split.codecs,
        plans=plans[intent.kind],
        share_plans=plans.get("base", {}),
        owned=sources.owned,
        shared_stamps=shared_stamps,
        lineage=embeddings.lineage,
        digests=embeddings.options.digests,
        tracking=embeddings.tracking,
    )
    return PendingSave(
        plan,
        rows,
        faults=faults,
        nbytes=nbytes,
        extract_secs=time.perf_counter() - started,
        fsync=embeddings.options.fsync,
        runtime=runtime,
    )


def planned(choices: Mapping[str, Mapping[str, CodecChoice]], kind: Kind, restores: int) -> Plans:
    """Returns the codecs that a save, or a WAL record, tries first.

    Args:
      choices: group name to field name to the user's codec.
      kind: base, delta or WAL record.
      restores: number of times that training was restored.
    """
    return {
        group: {field: choice.planned(kind, restores=restores) for field, choice in held.items()}
        for group, held in choices.items()
    }


def clocks_of(split: Split, marks: Sequence[Marks]) -> Clocks:
    """Returns the state of tracking; waits for the training step that computes it.

    Args:
      split: the state.
      marks: its TouchStates, and the one passed by the caller.
    """
    readings = [Reading(place, _int(state.identity), _int(state.clock)) for place, state in marks]
    windows = [(_int(updates), _int(gathered)) for updates, gathered in split.windows]
    return Clocks(readings=tuple(readings), windows=tuple(windows))


def _int(scalar: Any) -> int:
    """A scalar of the state; ten times as fast as ``int`` of one in host memory."""
    return int(np.asarray(scalar))


def _expected_bytes(
    split: Split, segments: Sequence[SegmentSource], intent: Intent
) -> tuple[int, int]:
    """Bytes that a delta of some segments, and a base, would write before any compression."""
    delta_bytes = base_bytes = 0
    for group in split.layout.groups:
        for spec in group.fields:
            choice, dtype = split.codecs[group.name][spec.name], codecs.dtype_of(spec.dtype)
            row_bytes = {}
            for kind in ("delta", "base"):
                codec = codecs.get(choice.planned(kind, restores=intent.restores).codec)
                arrays_of = codec.stored(spec.trailing, dtype).values()
                row_bytes[kind] = sum(math.prod(a.trailing) * a.dtype.itemsize for a in arrays_of)
            held = [s for s in segments if s.group == group.name and spec.name in s.fields]
            # Segments of other columns hold the same rows.
            cells = sum(len(s.rows) * math.prod(s.fields[spec.name].trailing[:1]) for s in held)
            delta_bytes += cells * row_bytes["delta"] // width(spec.trailing)
            base_bytes += group.rows * row_bytes["base"]
    return delta_bytes, base_bytes


def codecs_of(plan: Mapping[str, Choice]) -> dict[str, Codec]:
    """Returns field name to the codec that is tried first."""
    return {field: codecs.get(choice.codec) for field, choice in plan.items()}


def require_room(root: Path, nbytes: int, step: int) -> None:
    """Checks that a file system has room.

    Raises:
      OutOfSpace: the file system has too little free space.
    """
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = files.free_bytes(existing)
    if free < nbytes:
        raise OutOfSpace(
            f"step {step} in {root}: expected room for {nbytes:,} bytes, found {free:,} free; "
            "free space or keep fewer steps, then save again: no touched row is lost"
        )
