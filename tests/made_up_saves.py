# SPDX-License-Identifier: Apache-2.0
"""Fake manifests of saves, with only what lineage and process 0 read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from deltackpt.format import manifest, naming
from deltackpt.format.manifest import BaseRef, Cover, LayerRef, Layout, Manifest, SaveId, TableEntry
from deltackpt.format.row_blocks import VALUES, ArrayEntry, FieldSpec, GroupEntry, Segment

ROWS, WIDTH = 100, 4
ROW_BYTES = 4 * WIDTH


def layout(rows: int = ROWS) -> Layout:
    """The layout of a single table."""
    spec = FieldSpec(name=VALUES, trailing=(WIDTH,), dtype="float32")
    group = GroupEntry(name="g0", rows=rows, fields=(spec,))
    table = TableEntry(name="t", group="g0", offset=0, rows=rows, leaves={VALUES: (("dict", "t"),)})
    return Layout((group,), (table,), (), ())


def record(save_id: SaveId, *, rows: int = ROWS, process: int = 0, **changes: Any) -> Manifest:
    """A manifest of a save that wrote the first rows of the table."""
    held = layout()
    (spec,) = held.groups[0].fields
    entry = ArrayEntry(name=VALUES, shape=(rows, WIDTH), dtype=spec.dtype, chunk_rows=rows)
    segment = Segment(
        name="g0.0",
        group="g0",
        columns=(0, WIDTH),
        count=rows,
        ranges=((0, rows),),
        fields=(VALUES,),
        arrays=(entry,),
    )
    given: dict[str, Any] = {
        "kind": "base",
        "save_id": save_id,
        "parent": None,
        "reason": "made up",
        "process": process,
        "process_count": 1,
        "groups": held.groups,
        "tables": held.tables,
        "segments": (segment,),
        "files": {},
        "shards": (),
    }
    return Manifest(**given | changes)


def cover(share: tuple[int, int] = (0, manifest.WHOLE_SHARE)) -> Cover:
    """The range of a shard's rows in the table, in units of its rows / WHOLE_SHARE."""
    return Cover(group="g0", tables=((0, 1),), share=share, columns=(0, WIDTH))


def to_bytes(made: Manifest) -> bytes:
    """The bytes of a manifest; a delta has a layer."""
    if made.kind == "delta":
        layer = LayerRef(nbytes=8192, crc32c=0, digest=0)
        made = dataclasses.replace(made, layer=layer, features=(manifest.LAYERS,))
    return manifest.to_bytes(made)


def write(item_dir: Path, made: Manifest) -> bytes:
    """Writes a manifest where its process would; returns its bytes."""
    item_dir.mkdir(parents=True, exist_ok=True)
    data = to_bytes(made)
    (item_dir / naming.manifest_name(made.process)).write_bytes(data)
    return data


def commit(
    step_dir: Path, intent: Any, *, rows: int | None = None, compacted: BaseRef | None = None
) -> None:
    """Commits a save at its step: all rows of a base, a tenth of them in a delta."""
    if rows is None:
        rows = ROWS if intent.kind == "base" else ROWS // 10
    made = record(
        intent.save_id, rows=rows, kind=intent.kind, parent=intent.parent, compacted=compacted
    )
    write(step_dir / naming.EMBEDDINGS_ITEM, made)


def compact(step_dir: Path, save_id: SaveId, *, rows: int = ROWS) -> BaseRef:
    """Writes a compacted base in place of a save."""
    write(naming.compacted_dir(step_dir, naming.EMBEDDINGS_ITEM), record(save_id, rows=rows))
    return BaseRef(save_id=save_id, nbytes=rows * ROW_BYTES)
