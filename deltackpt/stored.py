# SPDX-License-Identifier: Apache-2.0
"""Committed saves as they stand on disk: their manifests, their chains, their arrays."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltackpt import blocks, chain, integrity, layout, manifest
from deltackpt.chain import SaveInfo
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    ForeignDirectory,
    RestoreError,
    StepGone,
    StepNotFound,
)
from deltackpt.manifest import ArrayEntry, Manifest, Segment
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
        """Tables and groups of the save."""
        first = self.manifests[0]
        return Layout(
            groups=first.groups,
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
    first = records[0]
    info = SaveInfo(
        save_id=first.save_id,
        kind=first.kind,
        parent=first.parent,
        step_dir=step_dir.name,
        nbytes=sum(stored_bytes(record) for record in records),
    )
    return StoredSave(info, step_dir, item, tuple(records))


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
