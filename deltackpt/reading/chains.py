# SPDX-License-Identifier: Apache-2.0
"""Finds chains of committed saves: what restoring a step reads.

If a trainer, a compactor or retention replaces a save during the search, it is looked up again. A
damaged compacted base is skipped if the saves that it replaces still exist.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from deltackpt.errors import (
    BrokenChain,
    DamagedWal,
    DeltackptError,
    FormatMismatch,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
    TemplateMismatch,
)
from deltackpt.format import chain, manifest, naming
from deltackpt.format.manifest import Layout, ParentRef, SaveId, SaveInfo
from deltackpt.lazy_import import LazyModule
from deltackpt.reading.stored_saves import (
    StoredSave,
    Where,
    compacted_bases,
    detect_removal,
    gone,
    is_being_removed,
    is_of_reading,
    read_compacted,
    read_save,
)
from deltackpt.resources.runtime import Runtime, Task
from deltackpt.storage.store import StorePath, store_path

if TYPE_CHECKING:
    from deltackpt import events
else:  # Only warnings need it.
    events = LazyModule("deltackpt.events")

#: How often to look up a chain again that trainers and compactors keep replacing.
_MOST_CHAINS = 8
#: Manifests are prefetched after so many reads in a row took so long.
_SLOW_READS, _SLOW_SECS = 3, 1e-3
#: Manifests that are read at the same time; longer ones may not be wanted.
_PREFETCHES, _PREFETCHED_BYTES = 16, 1 << 22

_T = TypeVar("_T")


def read_chain(
    step_dir: Where,
    item: str = naming.EMBEDDINGS_ITEM,
    *,
    compacted: bool = True,
    unusable: Collection[str] = (),
) -> tuple[StoredSave, ...]:
    """Returns the saves that restoring a step reads, base first.

    A compacted base may replace saves, unless ``compacted`` is False or its step is ``unusable``;
    one with a damaged manifest is skipped, with a warning, if those saves still exist. Raises as
    ``read_save`` does, BrokenChain, and StepGone if the step was removed at the same time.
    """
    step_dir = store_path(step_dir)
    with detect_removal(step_dir):
        for _ in range(_MOST_CHAINS):
            before = compacted_bases(step_dir.parent, item)
            try:
                usable = before.keys() - unusable if compacted else ()
                return _walked(step_dir, item, _among(usable))
            except RestoreError:
                # A compaction may have replaced it by a base after the lookup.
                if not step_dir.is_dir() or compacted_bases(step_dir.parent, item) == before:
                    raise
    raise StepGone(
        f"step directory {step_dir}: expected its chain not to change during the read, "
        f"found it replaced {_MOST_CHAINS} times; try again"
    )


def _among(bases: Collection[str]) -> Callable[[StorePath], bool]:
    """Returns whether a compacted base was listed; querying the store at each link takes longer."""
    return lambda base: base.parent.name in bases


def read_whole(saves: Sequence[StoredSave], read: Callable[[Sequence[StoredSave]], _T]) -> _T:
    """Reads a chain; if that fails, calls ``read`` with another chain to the same step.

    A damaged compacted base is skipped if what it replaced still exists. A chain that compaction
    and retention replaced at the same time is read through its new base.
    """
    unusable: set[StorePath] = set()
    for _ in range(_MOST_CHAINS):
        try:
            return read(saves)
        except (FormatMismatch, TemplateMismatch, DamagedWal):
            raise
        except RestoreError as error:
            if saves[0].compacted:
                unusable.add(saves[0].item_dir)
            other = _other_chain(saves, unusable)
            if other is None:
                raise
            events.warn(
                f"step {saves[-1].info.step_dir}: reading it through {saves[0].name} failed "
                f"({error}); reading it through {other[0].name} instead"
            )
            saves = other
    return read(saves)


def _other_chain(
    saves: Sequence[StoredSave], unusable: set[StorePath]
) -> tuple[StoredSave, ...] | None:
    target = saves[-1]
    try:
        found = _walked(target.step_dir, target.item, lambda base: base not in unusable)
    except RestoreError:
        return None
    # A chain of dense leaves may begin at a delta that contains all of them.
    last = found[-len(saves) :]
    same = [save.item_dir for save in last] == [save.item_dir for save in saves]
    return None if same or found[-1].info.save_id != target.info.save_id else found


def _walked(
    step_dir: StorePath, item: str, usable: Callable[[StorePath], bool]
) -> tuple[StoredSave, ...]:
    """Returns the current chain of a step; ``usable`` filters compacted bases."""
    coming: dict[StorePath, Task[bytes]] = {}
    slow_reads = 0
    damaged: list[RestoreError] = []

    def compacted(where: StorePath, save_id: SaveId) -> StoredSave | None:
        if not usable(naming.compacted_dir(where, item)):
            return None
        try:
            return read_compacted(where, save_id, item)
        except RestoreError as error:
            damaged.append(error)
            return None

    def fetched(at: StorePath, shown: str) -> bytes:
        nonlocal slow_reads
        if (prefetched := coming.pop(at, None)) is not None:
            with contextlib.suppress(DeltackptError, OSError):
                return prefetched.result()
        started = time.perf_counter()
        data = at.read(shown)
        slow_reads = slow_reads + 1 if time.perf_counter() - started > _SLOW_SECS else 0
        return data

    def read(where: StorePath) -> StoredSave:
        found = read_save(where, item, read=fetched)
        # Only a hint, which pays off if a store is slow: the parents' references decide.
        for parent in found.head.parents if slow_reads >= _SLOW_READS else ():
            at = step_dir.parent / parent / item / naming.manifest_name(0)
            if at not in coming:
                read_start = functools.partial(at.read, most_bytes=_PREFETCHED_BYTES)
                coming[at] = runtime.submit(read_start)
        return found

    saves: dict[str, StoredSave] = {}

    def find(parent: ParentRef) -> SaveInfo | None:
        where = step_dir.parent / parent.step_dir
        try:
            found = compacted(where, parent.save_id) or read(where)
        except StepNotFound:
            return None  # restore_chain names what is missing.
        saves[parent.step_dir] = found
        return found.info

    with Runtime(_PREFETCHES) as runtime:
        own = read(step_dir)
        target = compacted(step_dir, own.info.save_id) or own
        saves[target.step_dir.name] = target
        by_dir = {info.step_dir: info for info in chain.walk(target.info, find)}
    try:
        infos = chain.restore_chain(target.info, by_dir)
    except BrokenChain as error:
        if damaged:
            raise damaged[-1] from error
        raise
    for error in damaged:
        events.warn(
            f"step {step_dir.name}: a compacted base in its chain is skipped, it is not "
            f"intact: {error}"
        )
    return tuple(saves[info.step_dir] for info in infos)


def since(newest: StoredSave, held: SaveId, layout: Layout) -> list[StoredSave] | None:
    """Returns the saves after a held one, oldest first; None if they do not descend from it.

    Only descendants of the held save, which has ``layout``, can be applied. A delta against an
    earlier save contains every row touched since, unless training rolled back in memory; held rows
    may then be from the discarded steps. If parents do not match, reading the whole chain reports
    it.
    """
    if newest.info.save_id == held:
        return []
    found = [newest]
    while found[0].layout == layout and (parent := found[0].info.parent) is not None:
        if parent.save_id.step >= found[0].info.save_id.step:
            break
        if parent.save_id == held:
            return found
        try:
            found.insert(0, read_save(newest.step_dir.parent / parent.step_dir, newest.item))
        except (RestoreError, StorageError):
            break
        if found[0].info.save_id != parent.save_id:
            break
    return None


@contextlib.contextmanager
def detect_chain_removal(saves: Sequence[StoredSave]) -> Iterator[None]:
    """Like ``detect_removal``, for saves found earlier, whose parents retention may have removed.

    A compacted base may replace what was removed: the step can be read through another chain.
    """
    try:
        yield
    except Exception as error:
        if is_of_reading(error):
            raise_if_removed(saves, error)
        raise


def raise_if_removed(saves: Sequence[StoredSave], cause: Exception) -> None:
    """Raises StepGone if a save of the chain vanishes within a moment, or was replaced.

    Retention of earlier versions removed parents first, so one may vanish before its children.
    """

    def removed() -> bool:
        missing.extend(save for save in saves if not save.item_dir.is_dir() or _is_another(save))
        return bool(missing)

    missing: list[StoredSave] = []
    if is_being_removed(removed, cause):
        raise gone(missing[0].step_dir) from cause


def _is_another(save: StoredSave) -> bool:
    """Returns whether another save is in the place of a save, as after a rollback."""
    try:
        data = (save.item_dir / naming.manifest_name(0)).read()
        return manifest.from_bytes(data, name=save.name).save_id != save.info.save_id
    except (RestoreError, OSError):
        return False
