# SPDX-License-Identifier: Apache-2.0
"""Committed saves as they stand on disk: their manifests, their chains, their arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from deltackpt import chain, codecs, integrity, layout, manifest
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
    Cover,
    Encoding,
    FieldSpec,
    GroupEntry,
    Layout,
    Manifest,
    Segment,
    TableEntry,
)
from deltackpt.storage import arrays, files
from deltackpt.storage.arrays import ChunkSums

_GONE_CHECKS = 5
_GONE_INTERVAL_SECS = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSave:
    """A committed save; ``head`` is the manifest of process 0, the others are read when needed."""

    info: SaveInfo
    step_dir: Path
    item: str
    head: Manifest

    @property
    def item_dir(self) -> Path:
        """Directory of our item in the step."""
        return self.step_dir / self.item

    def parts(self, wanted: Callable[[Cover], bool] | None = None) -> list[StoredPart]:
        """The parts with rows that are wanted, by process; all of them by default.

        Args:
          wanted: whether something that lies within a cover is wanted.

        Raises:
          Damaged: a manifest is missing, altered, or another one.
        """
        if not self.head.parts:
            return [self._part(0)]
        return [
            self._part(part.process)
            for part in self.head.parts
            if wanted is None or any(map(wanted, part.covers))
        ]

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """What every process wrote."""
        return tuple(part.record for part in self.parts())

    @functools.cached_property
    def _read(self) -> dict[int, StoredPart]:
        return {0: StoredPart(self.item_dir, self.head, self.head.group_by_name)}

    def _part(self, process: int) -> StoredPart:
        if process not in self._read:
            name = layout.manifest_name(process)
            data = files.read_bytes(self.item_dir / name)
            expected = self.head.parts[process].crc32c
            if (found := google_crc32c.value(data)) != expected:
                shown = f"{self.step_dir.name}/{self.item}/{name}"
                raise Damaged(shown, f"crc32c {expected:08x}", f"crc32c {found:08x}")
            record = manifest.from_bytes(data, name=f"{self.step_dir.name}/{self.item}/{name}")
            groups = self.head.group_by_name
            _check_codecs(record, groups, f"{self.step_dir.name}/{self.item}/{name}")
            self._read[process] = StoredPart(self.item_dir, record, groups)
        return self._read[process]

    @property
    def layout(self) -> Layout:
        """Tables and groups of the save, whatever its codecs."""
        first = self.head
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


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPart:
    """What one process wrote of a save.

    Attributes:
      item_dir: directory of our item in the step.
      record: its manifest.
      groups: the save's groups by name.
    """

    item_dir: Path
    record: Manifest
    groups: Mapping[str, GroupEntry]

    @functools.cached_property
    def checksums(self) -> dict[str, dict[str, ChunkSums]]:
        """Directory of each array below the item's to its chunks' paths and checksums."""
        found: dict[str, dict[str, ChunkSums]] = {}
        digests = integrity.read_item_digests(self.item_dir, self.record)
        for name in digests.files:
            array, _, chunk = name.rpartition("/c/")
            found.setdefault(array, {})[f"c/{chunk}"] = digests.chunk(name)
        return found

    def directory(self, segment: Segment, entry: ArrayEntry) -> Path:
        """Directory of a stored array."""
        return layout.array_dir(self.item_dir, self.record.process, segment.name, entry.name)

    def read_array(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads rows of one stored array, every chunk verified to be the one written there."""
        directory = self.directory(segment, entry)
        name = directory.relative_to(self.item_dir).as_posix()
        checksums = self.checksums.get(name, {})
        arrays.read_array(directory, entry, start, stop, out, checksums=checksums)


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
    name = f"{step_dir.name}/{item}/{layout.manifest_name(0)}"
    head = manifest.from_bytes(
        files.read_bytes(item_dir / layout.manifest_name(0), name), name=name
    )
    chain.check_index(head)
    _check_codecs(head, head.group_by_name, name)
    info = SaveInfo(
        save_id=head.save_id,
        kind=head.kind,
        parent=head.parent,
        step_dir=step_dir.name,
        nbytes=head.nbytes,
    )
    return StoredSave(info, step_dir, item, head)


def _check_codecs(record: Manifest, groups: Mapping[str, GroupEntry], name: str) -> None:
    unknown = {
        segment.spec(groups[segment.group], field).codec
        for segment in record.segments
        for field in segment.fields
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
    first = min((segment.columns[0] for segment, _ in parts), default=0)
    rows = sum(part.rows[place] for segment, part in parts if segment.columns[0] == first)
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
