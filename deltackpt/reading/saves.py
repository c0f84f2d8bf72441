# SPDX-License-Identifier: Apache-2.0
"""Committed saves as they stand on disk: their manifests, and their arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import google_crc32c
import numpy as np

from deltackpt.errors import (
    Damaged,
    ForeignDirectory,
    RestoreError,
    StepNotFound,
    StorageError,
)
from deltackpt.format import chain, manifest, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Cover, Layout, Manifest, SaveId
from deltackpt.format.outline import outline
from deltackpt.format.segments import ArrayEntry, FieldSpec, GroupEntry, Segment
from deltackpt.reading import bounds
from deltackpt.reading.foreign import foreign
from deltackpt.reading.removal import gone
from deltackpt.storage import arrays, digests
from deltackpt.storage.crc import ChunkSums
from deltackpt.storage.digests import Digest
from deltackpt.storage.store import Spot, Stamp, spot


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSave:
    """A committed save, or the compacted base that stands for it.

    Attributes:
      info: what chains need to know of it; of a compacted base the save id is that of the save.
      step_dir: its step directory, which may be gone where a compacted base stands for it.
      item: name of our item.
      item_dir: where its manifests and arrays are.
      head: the manifest of process 0; the others are read when needed.
    """

    info: SaveInfo
    step_dir: Spot
    item: str
    item_dir: Spot
    head: Manifest

    @property
    def name(self) -> str:
        """Where it is below the root."""
        return self.item_dir.below(self.step_dir.parent)

    @property
    def compacted(self) -> bool:
        """Whether it is a compacted base."""
        return self.item_dir != self.step_dir / self.item

    @property
    def has_dense(self) -> bool:
        """Whether its dense leaves stand for as long as chains may go through it.

        Those that a compacted base leaves to the step go with the step.
        """
        kept = self.head.dense_blocks is not None or names.DENSE_ITEM in self.head.digests
        return kept or (self.info.kind == "base" and not self.compacted)

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
            name = names.manifest_name(process)
            data = (self.item_dir / name).read()
            expected = self.head.parts[process].crc32c
            if (found := google_crc32c.value(data)) != expected:
                shown = f"{self.name}/{name}"
                raise Damaged(shown, f"crc32c {expected:08x}", f"crc32c {found:08x}")
            record = manifest.from_bytes(data, name=f"{self.name}/{name}")
            if record.process != process:
                shown = f"{self.name}/{name}"
                raise Damaged(shown, f"the part of process {process}", f"that of {record.process}")
            bounds.check_part(record, self.head, f"{self.name}/{name}")
            self._read[process] = StoredPart(self.item_dir, record, self.head.group_by_name)
        return self._read[process]

    @property
    def layout(self) -> Layout:
        """Tables and groups of the save, whatever its codecs."""
        first = self.head
        return Layout(
            groups=manifest.with_codecs(first.groups, lambda group, spec: FieldSpec.codec),
            tables=first.tables,
            dense=first.dense,
            tracking_paths=first.tracking_paths,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPart:
    """What one process wrote of a save.

    Attributes:
      item_dir: where the save's manifests and arrays are.
      record: its manifest.
      groups: the save's groups by name.
    """

    item_dir: Spot
    record: Manifest
    groups: Mapping[str, GroupEntry]

    @functools.cached_property
    def checksums(self) -> dict[str, dict[str, ChunkSums]]:
        """Directory of each array below the item's to its chunks' paths and checksums."""
        return {
            array: {chunk: ChunkSums(one.tail, one.blocks) for chunk, one in chunks.items()}
            for array, chunks in self._digests.items()
        }

    @functools.cached_property
    def _digests(self) -> dict[str, dict[str, Digest]]:
        """Directory of each array below the item's to its chunks' paths and digests."""
        found: dict[str, dict[str, Digest]] = {}
        known = digests.read_item_digests(self.item_dir, self.record)
        for name in known.files:
            array, _, chunk = name.rpartition("/c/")
            found.setdefault(array, {})[f"c/{chunk}"] = known.digest(name)
        return found

    @functools.cached_property
    def _sound(self) -> set[str]:
        """Names of the segments that were checked."""
        return set()

    def directory(self, segment: Segment, entry: ArrayEntry) -> Spot:
        """Where a stored array is."""
        return names.array_dir(self.item_dir, self.record.process, segment.name, entry.name)

    def check(self, segment: Segment) -> None:
        """Checks that the files of a segment are as long as what its arrays should hold.

        To be called before memory is taken for rows of it. The digests say how long all of them
        are, and the first chunk of each array is asked for its own length.

        Raises:
          Damaged: they are not; the array is named.
        """
        if segment.name in self._sound:
            return
        for entry in segment.arrays:
            directory = self.directory(segment, entry)
            chunks = self._digests.get(directory.below(self.item_dir), {})
            nbytes, name = arrays.chunk_bytes(entry), directory.shown(5)
            bounds.check_chunks(entry, nbytes, [one.length for one in chunks.values()], name)
            if chunks:
                first = directory / arrays.chunk_name(entry, 0)
                shown = first.shown(7)
                bounds.check_chunk(entry, nbytes, first.length(shown), shown)
        self._sound.add(segment.name)

    def chunks_of(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int
    ) -> dict[str, int]:
        """The files that rows of a stored array are read from, and how long they are."""
        directory = self.directory(segment, entry).below(self.item_dir)
        known = self._digests.get(directory, {})
        chunks = range(start // entry.chunk_rows, -(-stop // entry.chunk_rows))
        wanted = (arrays.chunk_name(entry, chunk) for chunk in chunks)
        return {f"{directory}/{name}": known[name].length for name in wanted if name in known}

    def read_array(
        self, segment: Segment, entry: ArrayEntry, start: int, stop: int, out: np.ndarray
    ) -> None:
        """Reads rows of one stored array, every chunk verified to be the one written there."""
        self.check(segment)
        directory = self.directory(segment, entry)
        checksums = self.checksums.get(directory.below(self.item_dir), {})
        arrays.read_array(directory, entry, start, stop, out, checksums=checksums)


#: A step by its spot, or by its path, which is a name in the store of its directory.
Where = Spot | Path


def read_save(
    step_dir: Where,
    item: str = names.EMBEDDINGS_ITEM,
    *,
    read: Callable[[Spot, str], bytes] = Spot.read,
) -> StoredSave:
    """Reads and checks the manifests of one step.

    Args:
      step_dir: the step.
      item: name of our item.
      read: gives the bytes of an object, which errors name so.

    Raises:
      StepNotFound: there is no such step directory.
      ForeignDirectory: the step holds no item of ours.
      Damaged: a manifest is missing, altered, or of another save.
      FormatTooNew: it has codecs that are not known here.
    """
    step_dir = spot(step_dir)
    item_dir = step_dir / item
    try:
        return _read_save(step_dir, item, item_dir, read)
    except (Damaged, StorageError):
        if not step_dir.is_dir():
            raise StepNotFound(
                f"{step_dir}: expected a committed step, found no such directory; "
                "list the steps with all_steps()"
            ) from None
        if not item_dir.is_dir():
            raise foreign(step_dir, item) from None
        raise


def read_compacted(
    step_dir: Where, save_id: SaveId, item: str = names.EMBEDDINGS_ITEM
) -> StoredSave | None:
    """Reads and checks the compacted base that stands for a save.

    Args:
      step_dir: directory of the save, which may be gone.
      save_id: of the save; a base left by another save of the same step stands for nothing.
      item: name of our item.

    Returns:
      The base; None where there is none.

    Raises:
      Damaged, FormatTooNew: as ``read_save``.
    """
    step_dir = spot(step_dir)
    item_dir = names.compacted_dir(step_dir, item)
    if not item_dir.is_dir():
        return None
    try:
        save = read_base(step_dir, item)
    except RestoreError:
        if not item_dir.is_dir():  # It was removed meanwhile.
            return None
        raise
    return save if save.info.save_id == save_id else None


def read_base(step_dir: Where, item: str = names.EMBEDDINGS_ITEM) -> StoredSave:
    """Reads and checks the compacted base of a step, whichever save it stands for.

    Raises:
      Damaged, FormatTooNew: as ``read_save``.
    """
    step_dir = spot(step_dir)
    return _read_save(step_dir, item, names.compacted_dir(step_dir, item))


def compacted_bases(root: Where, item: str = names.EMBEDDINGS_ITEM) -> dict[str, Stamp]:
    """Names of the steps that have a compacted base, each with the stamp of its folder."""
    folder = spot(root) / names.COMPACTED
    stamps = {
        step: (folder / step / item).stamp()
        for step in folder.folders()
        if not names.is_compaction(step)
    }
    return {step: stamp for step, stamp in stamps.items() if stamp is not None}


def read_info(step_dir: Where, item: str = names.EMBEDDINGS_ITEM) -> SaveInfo:
    """What chains need to know of a step, and no more of it is checked: see ``read_save``.

    Raises:
      Damaged: its manifest is missing, altered, or says what cannot be.
      FormatTooNew: a later version wrote it.
      StorageError: it cannot be read.
    """
    step_dir = spot(step_dir)
    at = step_dir / item / names.manifest_name(0)
    name = at.below(step_dir.parent)
    return SaveInfo.of(outline(at.read(name), name=name), step_dir.name)


def _read_save(
    step_dir: Spot, item: str, item_dir: Spot, read: Callable[[Spot, str], bytes] = Spot.read
) -> StoredSave:
    at = item_dir / names.manifest_name(0)
    name = at.below(step_dir.parent)
    head = manifest.from_bytes(read(at, name), name=name)
    chain.check_index(head)
    bounds.check_head(head, name)
    return StoredSave(SaveInfo.of(head, step_dir.name), step_dir, item, item_dir, head)


def stands(step_dir: Where, save_id: SaveId, item: str = names.EMBEDDINGS_ITEM) -> bool:
    """Whether a step is that save still, as far as can be told: a damaged manifest is no other."""
    step_dir = spot(step_dir)
    try:
        return read_save(step_dir, item).info.save_id == save_id
    except StepNotFound:
        return False
    except (RestoreError, StorageError):
        return step_dir.is_dir()


def check_dense(save: StoredSave) -> None:
    """Checks that a step has the dense leaves that its manifest names.

    A compacted base names them too. It has them itself where the step that it stands for has them
    as blocks; else they stay in that step.

    Raises:
      Damaged: there are none, as where a base was copied over the step.
      ForeignDirectory: another manager committed the step, which saves them elsewhere, or not.
    """
    if not save.head.dense or save.head.dense_blocks is not None:
        return
    if names.DENSE_ITEM in save.head.digests:
        return
    if (save.step_dir / names.DENSE_ITEM).is_dir():
        return
    name, leaves = f"{save.step_dir.name}/{names.DENSE_ITEM}", len(save.head.dense)
    if (save.step_dir / names.STEP_METADATA).exists():
        raise ForeignDirectory(
            f"{name}: expected {leaves} dense leaves, found no such item: another manager "
            "committed the step; restore it with that one, or its tables alone"
        )
    raise Damaged(
        name,
        f"the {leaves} dense leaves of the step",
        f"no such item: {save.item} may be a compacted base that was copied over the step",
    )


def check_stands(save: StoredSave) -> None:
    """Checks that a step is still the save that was read.

    Raises:
      StepGone: it was removed, and another save may have its number.
    """
    with contextlib.suppress(RestoreError):
        if read_save(save.step_dir, save.item_dir.name).info.save_id == save.info.save_id:
            return
    raise gone(save.step_dir)
