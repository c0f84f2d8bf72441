# SPDX-License-Identifier: Apache-2.0
"""Committed saves on disk: their manifests and arrays; whether a step was removed meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c

from deltackpt.cached import cached_property
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DeltackptError,
    ForeignDirectory,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)
from deltackpt.format import chain, manifest, naming
from deltackpt.format.manifest import Cover, Layout, Manifest, SaveId, SaveInfo
from deltackpt.format.row_blocks import DenseBlocks, FieldSpec
from deltackpt.reading import bounds
from deltackpt.reading.shard_arrays import LayerArrays, Shard, arrays_of
from deltackpt.storage.store import DirIdentity, StorePath, store_path

_GONE_CHECKS = 5
_GONE_INTERVAL_SECS = 0.1


@contextlib.contextmanager
def detect_removal(
    step_dir: StorePath | Path,
    *,
    exists: Callable[[], bool] | None = None,
    during: str = "read",
    instead: str = "restore",
) -> Iterator[None]:
    """Raises ``StepGone`` if an error inside occurs because a step was removed or replaced.

    A removed step can cause any error: a missing file, a file of another save, an error of a
    library. If the step still exists, the error is raised unchanged. ``exists`` returns whether the
    step is still the same save; by default, whether its directory is the same as at the start, if
    it existed then. ``during`` (a participle) and ``instead`` complete the message.
    """
    at = store_path(step_dir)
    identity = at.dir_identity()
    exists = exists or (lambda: identity is None or identity.same(at.dir_identity()))
    try:
        yield
    except Exception as error:
        if is_of_reading(error) and is_being_removed(lambda: not exists(), error):
            raise gone(step_dir, during=during, instead=instead) from error
        raise


def is_being_removed(removed: Callable[[], bool], cause: Exception) -> bool:
    """Returns whether something is removed, or is being removed, after a file of it was missing.

    Other tools do not rename a directory first: they empty it before they remove it.
    """
    checks = _GONE_CHECKS if isinstance(cause, (BrokenChain, Damaged, OSError)) else 1
    for check in range(checks):
        if removed():
            return True
        if check + 1 < checks:
            time.sleep(_GONE_INTERVAL_SECS)
    return False


def is_of_reading(error: Exception) -> bool:
    """Returns whether a removal may have caused an error that was not reported yet."""
    if isinstance(error, StepGone):
        return False
    return isinstance(error, (RestoreError, StorageError)) or not isinstance(error, DeltackptError)


def gone(step_dir: StorePath | Path, *, during: str = "read", instead: str = "restore") -> StepGone:
    """Returns the error for a step that was removed, or replaced by another save of its number."""
    return StepGone(
        f"step directory {step_dir}: expected it to stay while it was {during}, found it removed "
        f"or replaced; {instead} the newest step instead"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSave:
    """A committed save, or the compacted base that replaces it.

    ``info`` of a compacted base has the save id of the save that it replaces; ``step_dir`` may then
    be removed. ``item_dir`` has its manifests and arrays. ``head`` is the manifest of process 0;
    others are read when needed.
    """

    info: SaveInfo
    step_dir: StorePath
    item: str
    item_dir: StorePath
    head: Manifest

    @property
    def name(self) -> str:
        """Returns its path below the root."""
        return self.item_dir.below(self.step_dir.parent)

    @property
    def compacted(self) -> bool:
        """Returns whether it is a compacted base."""
        return self.item_dir != self.step_dir / self.item

    @property
    def has_dense(self) -> bool:
        """Returns whether its dense leaves exist as long as chains may contain it.

        If a compacted base leaves them to the step, they are removed with the step.
        """
        kept = self.head.dense_blocks is not None or naming.DENSE_ITEM in self.head.digests
        return kept or (self.info.kind == "base" and not self.compacted)

    @property
    def needs_older_dense(self) -> bool:
        """Returns whether its dense leaves are changes of those of older saves."""
        return self.head.dense_blocks is not None and not self.head.dense_blocks.complete

    def shards(self, wanted: Callable[[Cover], bool] | None = None) -> list[StoredShard]:
        """Returns the shards with wanted rows, by process; all of them by default.

        ``wanted`` returns whether any row within a cover is wanted. Raises Damaged if a manifest is
        missing, altered, or of another save.
        """
        if not self.head.shards:
            return [self._shard(0)]
        return [
            self._shard(shard.process)
            for shard in self.head.shards
            if wanted is None or any(map(wanted, shard.covers))
        ]

    def dense_layers(self) -> Iterator[tuple[int, LayerArrays, DenseBlocks]]:
        """Yields each process with its layer and the dense leaves in it; Damaged if it has none."""
        for shard in self.shards():
            record, process = shard.record.dense_blocks, shard.record.process
            if record is None or not isinstance(shard.arrays, LayerArrays):
                shown = f"{self.name}/{naming.manifest_name(process)}"
                raise Damaged(shown, "blocks of dense leaves, as in the first shard", "none")
            yield process, shard.arrays, record

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """Returns the manifest of every process."""
        return tuple(shard.record for shard in self.shards())

    @cached_property
    def _read(self) -> dict[int, StoredShard]:
        return {0: self._stored(self.head)}

    def _shard(self, process: int) -> StoredShard:
        if process not in self._read:
            name = naming.manifest_name(process)
            shown = f"{self.name}/{name}"
            data = (self.item_dir / name).read()
            expected = self.head.shards[process].crc32c
            if (found := google_crc32c.value(data)) != expected:
                raise Damaged(shown, f"crc32c {expected:08x}", f"crc32c {found:08x}")
            record = manifest.from_bytes(data, name=shown)
            if record.process != process:
                raise Damaged(shown, f"the shard of process {process}", f"that of {record.process}")
            bounds.check_shard(record, self.head, shown)
            self._read[process] = self._stored(record)
        return self._read[process]

    def _stored(self, record: Manifest) -> StoredShard:
        arrays, groups = arrays_of(self.item_dir, record), self.head.group_by_name
        return StoredShard(arrays, record.segments, groups, self.item_dir, record)

    @property
    def layout(self) -> Layout:
        """Returns tables and groups of the save, independent of its codecs."""
        first = self.head
        return Layout(
            groups=manifest.with_codecs(first.groups, lambda group, spec: FieldSpec.codec),
            tables=first.tables,
            dense=first.dense,
            tracking_paths=first.tracking_paths,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StoredShard(Shard):
    """One process's shard of a save, with its manifest."""

    item_dir: StorePath
    record: Manifest


#: A step by its ``StorePath``, or by its path, which is a name in the store of its directory.
Where = StorePath | Path


def read_save(
    step_dir: Where,
    item: str = naming.EMBEDDINGS_ITEM,
    *,
    read: Callable[[StorePath, str], bytes] = StorePath.read,
) -> StoredSave:
    """Reads and checks the manifest of process 0 of a step.

    ``read`` returns the bytes of an object, given its name in errors. Raises StepNotFound,
    ForeignDirectory if the step has no item of deltackpt, Damaged, and FormatTooNew if it uses
    unknown codecs.
    """
    step_dir = store_path(step_dir)
    item_dir = step_dir / item
    try:
        return _read_save(step_dir, item, item_dir, read)
    except (Damaged, StorageError):
        if not step_dir.is_dir():
            raise StepNotFound(
                f"{step_dir}: expected a committed step, found no such directory; "
                "list the steps with all_steps()"
            ) from None
        if not item_dir.is_dir() and not lacks_our_item(step_dir):
            raise foreign(step_dir, item) from None
        raise


def read_compacted(
    step_dir: Where, save_id: SaveId, item: str = naming.EMBEDDINGS_ITEM
) -> StoredSave | None:
    """Reads the compacted base that replaces a save, whose directory may be removed, or None.

    A base left by another save of the same step is ignored.
    """
    step_dir = store_path(step_dir)
    item_dir = naming.compacted_dir(step_dir, item)
    if not item_dir.is_dir():
        return None
    try:
        save = read_base(step_dir, item)
    except RestoreError:
        if not item_dir.is_dir():  # It was removed concurrently.
            return None
        raise
    return save if save.info.save_id == save_id else None


def read_base(step_dir: Where, item: str = naming.EMBEDDINGS_ITEM) -> StoredSave:
    """Reads and checks the compacted base of a step, for any save that it replaces."""
    step_dir = store_path(step_dir)
    return _read_save(step_dir, item, naming.compacted_dir(step_dir, item))


def compacted_bases(root: Where, item: str = naming.EMBEDDINGS_ITEM) -> dict[str, DirIdentity]:
    """Returns names of the steps with a compacted base, each with the identity of its folder."""
    folder = store_path(root) / naming.COMPACTED
    identities = {
        step: (folder / step / item).dir_identity()
        for step in folder.folders()
        if naming.step_number(step) is not None
    }
    return {step: identity for step, identity in identities.items() if identity is not None}


def read_info(step_dir: Where, item: str = naming.EMBEDDINGS_ITEM) -> SaveInfo:
    """Returns a step's entry in a chain; checks its manifest, but no shards: see ``read_save``."""
    step_dir = store_path(step_dir)
    at = step_dir / item / naming.manifest_name(0)
    name = at.below(step_dir.parent)
    return SaveInfo.from_manifest(manifest.from_bytes(at.read(name), name=name), step_dir.name)


def _read_save(
    step_dir: StorePath,
    item: str,
    item_dir: StorePath,
    read: Callable[[StorePath, str], bytes] = StorePath.read,
) -> StoredSave:
    at = item_dir / naming.manifest_name(0)
    name = at.below(step_dir.parent)
    head = manifest.from_bytes(read(at, name), name=name)
    chain.check_index(head)
    bounds.check_head(head, name)
    return StoredSave(SaveInfo.from_manifest(head, step_dir.name), step_dir, item, item_dir, head)


def exists(step_dir: Where, save_id: SaveId, item: str = naming.EMBEDDINGS_ITEM) -> bool:
    """Returns whether a step is still the same save; a damaged manifest counts as the same."""
    step_dir = store_path(step_dir)
    try:
        return read_save(step_dir, item).info.save_id == save_id
    except StepNotFound:
        return False
    except (RestoreError, StorageError):
        return step_dir.is_dir()


def check_dense(save: StoredSave) -> None:
    """Raises Damaged if a step lacks the dense leaves that its manifest names.

    A compacted base names them too. It contains them if the replaced step has them in its shards;
    otherwise they stay in that step. Raises ForeignDirectory if another manager committed the step
    and saves them elsewhere, or not at all.
    """
    if not save.head.dense or save.head.dense_blocks is not None:
        return
    has_own = naming.DENSE_ITEM in save.head.digests
    if save.compacted if has_own else (save.step_dir / naming.DENSE_ITEM).is_dir():
        return
    name, leaves = f"{save.step_dir.name}/{naming.DENSE_ITEM}", len(save.head.dense)
    if not has_own and (save.step_dir / naming.STEP_METADATA).exists():
        raise ForeignDirectory(
            f"{name}: expected {leaves} dense leaves, found no such item: another manager "
            "committed the step; restore it with that manager, or restore only its tables"
        )
    raise Damaged(
        name,
        f"the {leaves} dense leaves of the step",
        f"no such item: {save.item} may be a compacted base that was copied over the step",
    )


def check_exists(save: StoredSave) -> None:
    """Raises StepGone if a step is no longer the save that was read."""
    with contextlib.suppress(RestoreError):
        if read_save(save.step_dir, save.item_dir.name).info.save_id == save.info.save_id:
            return
    raise gone(save.step_dir)


def foreign(step_dir: StorePath | Path, item: str) -> ForeignDirectory:
    """Returns the error for a step without a deltackpt item of a given name."""
    step_dir = store_path(step_dir)
    found: object = f"the directories {step_dir.folders()}"
    ours = _our_items(step_dir)
    if ours:
        found = f"deltackpt's under the name {' and '.join(map(repr, ours))}"
        action = (
            f"pass the manager handlers={{{ours[0]!r}: Tables(...)}}, or readers item={ours[0]!r} "
            f"(--item {ours[0]})"
        )
    elif _is_of_orbax(step_dir):
        found = f"a step of stock Orbax with the items {step_dir.folders()}"
        action = (
            f"make it the first base of a new directory with 'deltackpt import "
            f"{step_dir.parent} NEW_DIRECTORY --tables PATTERN', and continue there"
        )
    else:
        action = (
            "check the directory and the item's name, or restore it with the library that wrote it"
        )
    return ForeignDirectory(
        f"{step_dir}: expected an item {item!r} written by deltackpt, found {found}; {action}"
    )


def is_checkpoint(step_dir: StorePath | Path) -> bool:
    """Returns whether a directory is a step of deltackpt (with any item name) or of Orbax."""
    step_dir = store_path(step_dir)
    return bool(_our_items(step_dir)) or _is_of_orbax(step_dir)


def lacks_our_item(step_dir: StorePath) -> bool:
    """Returns whether deltackpt's manager committed a step whose deltackpt item is missing."""
    if _our_items(step_dir):
        return False
    if (step_dir / naming.STEP_DIGESTS).is_file():
        return True
    with contextlib.suppress(Damaged, StorageError):  # A delta has its digests in the item.
        return f'"{naming.TABLES_HANDLER}"'.encode() in (step_dir / naming.STEP_METADATA).read()
    return False


def _our_items(step_dir: StorePath) -> list[str]:
    found = step_dir.folders()
    return [name for name in found if (step_dir / name / naming.manifest_name(0)).is_file()]


def _is_of_orbax(step_dir: StorePath) -> bool:
    places = (step_dir, *(step_dir / name for name in step_dir.folders()))
    return not lacks_our_item(step_dir) and any(
        (at / naming.PYTREE_METADATA).is_file() for at in places
    )
