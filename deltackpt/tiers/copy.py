# SPDX-License-Identifier: Apache-2.0
"""Copies chains to another directory, to an object store, and back.

A *unit*, the smallest thing that becomes visible atomically, is a step or a compacted base. Units
are copied dependencies first, so every step at the target is restorable at any moment. Every byte
is checked when it is read, and again by reading it back. An interrupted copy can be restarted. An
entry at the target that is another save, or cannot be identified, is never touched; a damaged copy
of the same save is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from deltackpt import events
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    InUse,
    RestoreError,
    StepNotFound,
    TargetDiffers,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.entries import ObjectKey
from deltackpt.ledger.upload import WORKERS, Unit
from deltackpt.reading import chains
from deltackpt.reading.reader import Progress
from deltackpt.storage import buckets
from deltackpt.tiers.copy_locations import Bucket, Directory, gone

Location = Directory | Bucket
_ACTION = "copy another step, or restore this one from a backup"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """Result of a copy: names of the copied units, in order, and of those found at the target."""

    steps: tuple[int, ...]  # the requested steps that are now restorable at the target
    copied: tuple[str, ...]
    found: tuple[str, ...]
    file_count: int
    bytes_written: int
    bytes_found: int
    seconds: float


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    item: str = naming.EMBEDDINGS_ITEM,
    steps: Collection[int] | None = None,
    all_steps: bool = False,
    recheck: bool = False,
    offline: bool = False,
    endpoint: str | None = None,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> Copied:
    """Copies steps with everything that restoring them needs; the copy is restorable on its own.

    ``steps`` defaults to the newest. ``recheck`` reads existing units at the target in full and
    replaces damaged ones. ``offline`` asserts that no trainer uses the target. ``progress``
    receives the bytes done and the total, from any thread. If a step is removed or replaced during
    the copy (StepGone), no part of it is visible.
    """
    started = time.perf_counter()
    here, there = (_place(one, endpoint, item, workers) for one in (source, target))
    wanted = _wanted(here, steps, all_steps)
    with there:
        if not offline and (reason := there.in_use()) is not None:
            raise InUse(
                f"{there.name}: expected no running trainer, found {reason}; copy to another "
                "target. If you know that it has ended, use --offline"
            )
        if not steps:
            _require_not_ahead(here, there)
        run = _CopyRun(here, there, recheck, progress)
        run.copy_chains(wanted)
    return Copied(
        steps=tuple(wanted),
        copied=tuple(run.copied),
        found=tuple(run.found),
        file_count=run.file_count,
        bytes_written=run.bytes_written,
        bytes_found=run.bytes_found,
        seconds=time.perf_counter() - started,
    )


def _require_not_ahead(source: Location, target: Location) -> None:
    """Checks that the source's newest step will also be the target's newest, as in any copy."""
    standing = source.steps()
    # After a rollback at the source, the target may hold later steps, from which a restart would
    # resume.
    later = [step for step in sorted(target.steps()) if step > max(standing)]
    if later:
        raise TargetDiffers(
            f"{target.name}: expected no step after {max(standing)}, the newest of {source.name}, "
            f"found {later[-5:]}; if they were rolled back at the source, move them away or copy "
            "to an empty target; to repair single steps, name them"
        )


@dataclasses.dataclass
class _CopyRun:
    """One run of copying units."""

    _source: Location
    _target: Location
    _recheck: bool
    _progress: Progress | None
    copied: list[str] = dataclasses.field(default_factory=list)
    found: list[str] = dataclasses.field(default_factory=list)
    file_count: int = 0
    bytes_written: int = 0
    bytes_found: int = 0
    #: The source unit that was found damaged.
    _damaged: ObjectKey | None = None
    _total: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def copy_chains(self, steps: Sequence[int]) -> None:
        """Copies steps with their dependencies, bypassing damaged compacted bases."""
        source, target, unusable = self._source, self._target, set[ObjectKey]()
        units = _units(source, steps, unusable)
        while True:
            try:
                self._copy(units)
                break
            except Damaged as error:
                base = self._damaged
                if base is None or base.item is None or base in unusable:
                    raise
                unusable.add(base)
                try:
                    units = _units(source, steps, unusable)
                except RestoreError:
                    raise error from None
                events.warn(
                    f"{source.name}/{base.name}: expected an intact compacted base, found it "
                    f"damaged ({error}); copying the saves that it replaces instead"
                )
        try:
            _units(target, steps, set())
        except RestoreError as error:
            raise InUse(
                f"{target.name}: expected the dependencies of steps {list(steps)} to remain during "
                f"the copy, found that something was removed ({error}); stop the process that "
                "removes steps there, then copy again"
            ) from error

    def _copy(self, saves: Mapping[ObjectKey, SaveInfo]) -> None:
        """Copies units, each of which must still be the given save; completed ones remain."""
        done, units = {*self.copied, *self.found}, list[Unit]()
        for key, info in saves.items():
            if key.name not in done:
                with self._reading(key, info.save_id):
                    units.append(self._source.unit(key, info))
        self._total = self.bytes_written + self.bytes_found + sum(unit.nbytes for unit in units)
        for unit in units:
            if self._target.contains(unit, recheck=self._recheck):
                self.found.append(unit.name)
                self._done(unit.nbytes, 0)
                continue
            self._target.add(unit, self._reading(unit.key, unit.info.save_id), self._done)
            self.file_count += len(unit.files)
            self.copied.append(unit.name)

    @contextlib.contextmanager
    def _reading(self, key: ObjectKey, save_id: SaveId) -> Iterator[None]:
        try:
            with _check_unchanged(self._source, key, save_id):
                yield
        except Damaged as error:
            self._damaged = key
            raise Damaged(error.object_name, error.expected, error.found, _ACTION) from error

    def _done(self, found: int, written: int) -> None:
        with self._lock:
            self.bytes_written += written
            self.bytes_found += found
            if self._progress is not None:
                self._progress(self.bytes_written + self.bytes_found, self._total)


def _place(
    where: str | os.PathLike[str],
    endpoint: str | None,
    item: str = naming.EMBEDDINGS_ITEM,
    workers: int = WORKERS,
) -> Location:
    path = buckets.file_path(where)
    if path is not None:
        return Directory(path.absolute(), item, workers)
    return Bucket(where, endpoint, item, workers)


def _wanted(source: Location, steps: Collection[int] | None, all_steps: bool) -> list[int]:
    standing = sorted(source.steps())
    if not standing:
        raise StepNotFound(f"{source.name}: expected complete steps, found none; check the path")
    if all_steps:
        return standing
    wanted = sorted(set(steps)) if steps else standing[-1:]
    missing = [step for step in wanted if step not in standing]
    if missing:
        raise StepNotFound(
            f"{source.name}: expected steps {missing}, found {standing[-5:]} as the newest; choose "
            "steps that are complete there"
        )
    return wanted


def _units(
    source: Location, steps: Sequence[int], unusable: Collection[ObjectKey]
) -> dict[ObjectKey, SaveInfo]:
    """The units that restoring the steps needs, with their saves, in copy order."""
    found: dict[ObjectKey, SaveInfo] = {}
    for step in steps:
        found.update(_chain_units(source, step, unusable))
    # A save depends only on earlier steps, and on the base that replaces it.
    order = sorted(found, key=lambda key: (key.step, key.item is None))
    return {key: found[key] for key in order}


def _chain_units(
    source: Location, step: int, unusable: Collection[ObjectKey]
) -> dict[ObjectKey, SaveInfo]:
    """The units of one chain, and the step itself, which its compacted base does not replace."""
    own = source.info(ObjectKey(step))
    if own is None:
        raise gone(source, ObjectKey(step))
    with _check_unchanged(source, ObjectKey(step), own.save_id):
        saves = chains.read_chain(
            source.store_path(ObjectKey(step)),
            source.item,
            unusable=[str(key.step) for key in unusable],
        )
    units = {ObjectKey(step): own}
    for save in saves:
        key = ObjectKey(int(save.info.step_dir), source.item if save.compacted else None)
        units[key] = save.info
    return units


@contextlib.contextmanager
def _check_unchanged(source: Location, key: ObjectKey, save_id: SaveId) -> Iterator[None]:
    """Checks after a copy that a source unit is still the same save: StepGone if it is not."""
    cause: RestoreError | None = None
    try:
        yield
    except (Damaged, BrokenChain) as error:
        cause = error
    try:
        now = source.info(key)
    except RestoreError as error:
        raise cause or error from None
    if now is None or now.save_id != save_id:
        raise gone(source, key) from cause
    if cause is not None:
        raise cause
