# SPDX-License-Identifier: Apache-2.0
"""Committed saves as they stand on disk: their manifests, their chains, their arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltackpt import blocks, chain, codecs, integrity, layout, manifest
from deltackpt.chain import SaveInfo
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    ForeignDirectory,
    FormatTooNew,
    RestoreError,
    StepGone,
    StepNotFound,
)
from deltackpt.events import TableFigures
from deltackpt.manifest import (
    ArrayEntry,
    Encoding,
    FieldSpec,
    GroupEntry,
    Manifest,
    Segment,
    TableEntry,
)
from deltackpt.storage import arrays, files
from deltackpt.tables import Layout

_GONE_CHECKS = 5
_GONE_INTERVAL_SECS = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSave:
    """A committed save as its manifests describe it, process 0 first."""

    info: SaveInfo
    step_dir: Path
    item: str
    manifests: tuple[Manifest, ...]

    @property
    def item_dir(self) -> Path:
        """Directory of our item in the step."""
        return self.step_dir / self.item

    @functools.cached_property
    def checksums(self) -> dict[str, dict[str, int]]:
        """Directory of each array below the item's to its chunks' paths and CRC32Cs."""
        found: dict[str, dict[str, int]] = {}
        for record in self.manifests:
            digests = integrity.read_item_digests(self.item_dir, record)
            for name, (_, _, tail) in digests.files.items():
                array, _, chunk = name.rpartition("/c/")
                found.setdefault(array, {})[f"c/{chunk}"] = tail
        return found

    def read_array(
        self,
        process: int,
        segment: Segment,
        entry: ArrayEntry,
        start: int,
        stop: int,
        out: np.ndarray,
    ) -> None:
        """Reads rows of one stored array, every chunk verified to be the one written there."""
        directory = layout.array_dir(self.item_dir, process, segment.name, entry.name)
        name = directory.relative_to(self.item_dir).as_posix()
        checksums = self.checksums.get(name, {})
        arrays.read_array(directory, entry, start, stop, out, checksums=checksums)

    @property
    def layout(self) -> Layout:
        """Tables and groups of the save, whatever its codecs."""
        first = self.manifests[0]
        plain = FieldSpec.codec
        return Layout(
            groups=tuple(
                dataclasses.replace(
                    group,
                    fields=tuple(dataclasses.replace(spec, codec=plain) for spec in group.fields),
                )
                for group in first.groups
            ),
            tables=first.tables,
            dense=first.dense,
            tracking_paths=first.tracking_paths,
        )


def read_save(step_dir: Path, item: str = layout.EMBEDDINGS_ITEM) -> StoredSave:
    """Reads and checks the manifests of one step.

    Raises:
      StepNotFound: there is no such step directory.
      ForeignDirectory: the step holds no item of ours.
      Damaged: a manifest is missing, altered, or of another save.
      FormatTooNew: it has codecs that are not known here.
    """
    item_dir = step_dir / item
    if not step_dir.is_dir():
        raise StepNotFound(
            f"{step_dir}: expected a committed step, found no such directory; "
            "list the steps with all_steps()"
        )
    if not item_dir.is_dir():
        raise ForeignDirectory(
            f"{step_dir}: expected an item {item!r} written by deltackpt, found "
            f"{sorted(path.name for path in step_dir.iterdir())}; check the directory and the "
            "item's name, or restore it with the library that wrote it"
        )
    names = {layout.manifest_process(path.name): path for path in item_dir.iterdir()}
    paths = {process: path for process, path in names.items() if process is not None}
    if 0 not in paths:
        raise Damaged(
            f"{step_dir.name}/{item}/{layout.manifest_name(0)}", "a manifest", "no such file"
        )
    records = [
        manifest.from_bytes(files.read_bytes(path), name=f"{step_dir.name}/{item}/{path.name}")
        for _, path in sorted(paths.items())
    ]
    chain.check_parts(records)
    _check_codecs(records, f"{step_dir.name}/{item}")
    first = records[0]
    info = SaveInfo(
        save_id=first.save_id,
        kind=first.kind,
        parent=first.parent,
        step_dir=step_dir.name,
        nbytes=sum(stored_bytes(record) for record in records),
    )
    return StoredSave(info, step_dir, item, tuple(records))


def _check_codecs(records: Sequence[Manifest], name: str) -> None:
    unknown = {
        segment.spec(spec).codec
        for record in records
        for segment in record.segments
        for spec in record.group_by_name[segment.group].fields
        if spec.name in segment.fields
    }.difference(codecs.names())
    if unknown:
        raise FormatTooNew(
            f"{name}: expected codecs among {codecs.names()}, found {sorted(unknown)}; "
            "install the newer deltackpt that wrote it"
        )


def table_figures(
    groups: Sequence[GroupEntry], tables: Sequence[TableEntry], segments: Sequence[Segment]
) -> tuple[TableFigures, ...]:
    """What segments hold of each table, by field.

    A field's bytes are shared out by rows. The bytes of the row numbers, which serve all fields
    of a segment, are in none of them.

    Args:
      groups: of the save.
      tables: of the save.
      segments: of one part, or of all.
    """
    found = []
    for group in groups:
        members = manifest.members(group, tables)
        for spec in group.fields:
            parts = [
                (segment, encoding)
                for segment in segments
                for encoding in segment.encodings
                if (segment.group, encoding.field) == (group.name, spec.name)
            ]
            row_bytes = math.prod(spec.trailing) * codecs.dtype_of(spec.dtype).itemsize
            for place, table in enumerate(members):
                figures = _figures(table.name, spec.name, place, parts, row_bytes)
                if figures.rows:
                    found.append(figures)
    return tuple(found)


def _figures(
    table: str, field: str, place: int, parts: Sequence[tuple[Segment, Encoding]], row_bytes: int
) -> TableFigures:
    """Figures of the table that stands at ``place`` in its group."""
    # Segments of other columns hold the same rows again.
    rows = sum(part.rows[place] for segment, part in parts if segment.columns[0] == 0)
    nbytes = sum(
        round(part.nbytes * part.rows[place] / max(1, sum(part.rows))) for _, part in parts
    )
    norm = sum(part.squared_norm[place] for _, part in parts)
    error = sum(part.squared_error[place] for _, part in parts)
    return TableFigures(
        table=table,
        field=field,
        codec="+".join(sorted({part.codec for _, part in parts})),
        reason="; ".join(sorted({part.reason for _, part in parts})),
        rows=rows,
        nbytes=nbytes,
        ratio=nbytes / max(1, rows * row_bytes),
        relative_error=math.sqrt(error / norm) if norm else 0.0,
    )


def stored_bytes(record: Manifest) -> int:
    """Bytes of a part's arrays, before any compression."""
    return sum(entry_bytes(entry) for segment in record.segments for entry in segment.arrays)


def read_chain(step_dir: Path, item: str = layout.EMBEDDINGS_ITEM) -> tuple[StoredSave, ...]:
    """The saves that restoring a step reads, base first.

    Raises:
      StepNotFound, ForeignDirectory, Damaged: as ``read_save``.
      BrokenChain: a parent is missing or is another save than the one named.
      StepGone: the step was removed meanwhile.
    """
    saves: dict[str, StoredSave] = {}
    target = current = read_save(step_dir, item)
    try:
        while True:
            saves[current.step_dir.name] = current
            parent = current.info.parent
            if parent is None or parent.step_dir in saves:
                break
            current = read_save(step_dir.parent / parent.step_dir, item)
    except StepNotFound:
        pass  # restore_chain names what is missing.
    try:
        infos = chain.restore_chain(target.info, {name: save.info for name, save in saves.items()})
    except BrokenChain as error:
        raise_if_removed((target,), error)
        raise
    return tuple(saves[info.step_dir] for info in infos)


def raise_if_removed(saves: Sequence[StoredSave], cause: RestoreError) -> None:
    """Raises StepGone where a step of the chain vanishes within a moment.

    Retention removes a chain step by step, so a missing parent may precede its children's end.
    """
    for check in range(_GONE_CHECKS):
        for save in saves:
            if not save.item_dir.is_dir():
                raise StepGone(
                    f"step directory {save.step_dir}: expected it to stay while it was read, "
                    "found it removed; restore the newest step instead"
                ) from cause
        if check + 1 < _GONE_CHECKS:
            time.sleep(_GONE_INTERVAL_SECS)


def check_complete(base: StoredSave) -> None:
    """A base must hold every row of every field."""
    covered: dict[tuple[str, str], int] = {}
    for record in base.manifests:
        for segment in record.segments:
            width = segment.columns[1] - segment.columns[0]
            for field in segment.fields:
                cells = segment.count * (width if field == blocks.VALUES else 1)
                covered[segment.group, field] = covered.get((segment.group, field), 0) + cells
    for group in base.layout.groups:
        for spec in group.fields:
            width = spec.trailing[0] if spec.name == blocks.VALUES and spec.trailing else 1
            found = covered.get((group.name, spec.name), 0)
            if found != group.rows * width:
                raise Damaged(
                    f"{base.step_dir.name}/{base.item}",
                    f"a base with {group.rows * width} cells of {group.name}.{spec.name}",
                    f"{found}",
                )


def entry_bytes(entry: ArrayEntry) -> int:
    """Bytes of a stored array, before any compression."""
    return int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(entry.dtype).itemsize
