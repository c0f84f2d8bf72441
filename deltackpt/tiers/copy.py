# SPDX-License-Identifier: Apache-2.0
"""Copies of whole chains: to another directory, to an object store, and back.

A *unit* is what becomes visible at once: a step, or a compacted base. Units are copied one after
the other, what others need first, so that at every moment each step at the target can be restored.
Every byte is checked against its digest when it is read, and again by reading it back. A copy that
is cut anywhere goes on where it was: what is there already and matches is not written again.

A name at the target belongs to one save. What stands there and is not that save, or cannot be told
to be it, is never touched; what is that save and damaged is replaced.

In a directory a unit is put together in ``.copying/`` and appears by one rename. A bucket is
claimed, as by a trainer, and a unit appears by an entry of its journal: a copy is a promotion from
one ledger to another.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
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
    StorageError,
    TargetDiffers,
)
from deltackpt.format import chain, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import ParentRef, SaveId
from deltackpt.ledger.entries import Unit
from deltackpt.ledger.upload import InFlight
from deltackpt.reading.reader import Progress
from deltackpt.storage import buckets
from deltackpt.storage.digests import Digest
from deltackpt.tiers.bucket import Bucket
from deltackpt.tiers.directory import Directory
from deltackpt.tiers.places import (
    Place,
    check_bytes,
    digests_bytes,
    gone,
)

#: Files on their way at a time: enough to hide the latency of a bucket.
WORKERS = 8
#: Most bytes on their way at a time; a larger file goes alone.
_MEMORY_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """What a copy did.

    Attributes:
      steps: the steps that can now be restored at the target, as far as they were asked for.
      copied: names of the units that were copied, in order.
      found: names of those that were there already.
      file_count: files that were written.
      bytes_written: bytes of these.
      bytes_found: bytes that were there already.
      seconds: wall time.
    """

    steps: tuple[int, ...]
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
    item: str = names.EMBEDDINGS_ITEM,
    steps: Collection[int] | None = None,
    all_steps: bool = False,
    recheck: bool = False,
    offline: bool = False,
    endpoint: str | None = None,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> Copied:
    """Copies steps with all that restoring them needs; the copy restores from its new place.

    Args:
      source: a directory, a URL (``s3://``, ``nodes://``, ...), or a kvstore
        spec of TensorStore as JSON.
      target: likewise.
      item: name of our item in the steps.
      steps: the steps to copy; by default the newest.
      all_steps: whether to copy all of them.
      recheck: whether what is whole at the target is read again, and copied again where it is
        damaged; by default its records are compared, and that no file is missing.
      offline: the caller's word that no trainer is at work at the target.
      endpoint: address of the server of a bucket, where it is not the service's own.
      workers: files on their way at a time.
      progress: called with bytes done and bytes in all, from any thread.

    Raises:
      StepNotFound: there is no such step.
      StepGone: a step was removed or replaced while it was copied; nothing of it is visible.
      Damaged, BrokenChain: something at the source is not intact; it is named.
      TargetDiffers: the target holds something else under the name of a save that is copied; or,
        where no steps are named, later steps that the source has not.
      InUse: a trainer may be at work at the target, another process copies to it or collects it.
      ForeignDirectory: the target holds other things than checkpoints.
      OutOfSpace, StorageError: the source or the target refused.
    """
    started = time.perf_counter()
    here, there = _place(source, endpoint, item), _place(target, endpoint, item)
    wanted = _wanted(here, steps, all_steps)
    with there:
        if not offline and (reason := there.in_use()) is not None:
            raise InUse(
                f"{there.name}: expected that no trainer is at work, found {reason}; copy to "
                "another place. Where you know that it has ended, copy with --offline"
            )
        if not steps:
            _require_not_ahead(here, there)
        run = _Run(here, there, workers, recheck, progress)
        _copy_chains(run, here, there, wanted)
    return Copied(
        steps=tuple(wanted),
        copied=tuple(run.copied),
        found=tuple(run.found),
        file_count=run.file_count,
        bytes_written=run.bytes_written,
        bytes_found=run.bytes_found,
        seconds=time.perf_counter() - started,
    )


def _require_not_ahead(source: Place, target: Place) -> None:
    """Checks that the newest step of the source will be that of the target, as of any copy of it.

    After a rollback of the source the target has steps that a restart would go on from.
    """
    standing = source.steps()
    later = [step for step in sorted(target.steps()) if step > max(standing)]
    if later:
        raise TargetDiffers(
            f"{target.name}: expected no step after {max(standing)}, the newest of {source.name}, "
            f"found {later[-5:]}; where they were rolled back at the source move them away, or "
            "copy to an empty place; to mend single steps there name them"
        )


def _copy_chains(run: _Run, source: Place, target: Place, steps: Sequence[int]) -> None:
    """Copies steps with what they need, not through compacted bases that are damaged."""
    unusable: set[Unit] = set()
    units = _units(source, steps, unusable)
    while True:
        try:
            run.copy(units)
            break
        except Damaged as error:
            base = run.damaged
            if base is None or base.item is None or base in unusable:
                raise
            unusable.add(base)
            try:
                units = _units(source, steps, unusable)
            except RestoreError:
                raise error from None
            target.discard(base)
            events.warn(
                f"{source.name}/{base.name} is not copied, it is damaged ({error}); the saves that "
                "it stands for are copied instead"
            )
    try:
        _units(target, steps, set())
    except RestoreError as error:
        raise InUse(
            f"{target.name}: expected all that steps {list(steps)} need to stay while they were "
            f"copied, found that something was removed ({error}); end what removes steps there, "
            "then copy again"
        ) from error


class _Run:
    """The copying of some units."""

    def __init__(
        self,
        source: Place,
        target: Place,
        workers: int,
        recheck: bool,
        progress: Progress | None,
    ):
        self.copied: list[str] = []
        self.found: list[str] = []
        self.file_count = 0
        self.bytes_written = 0
        self.bytes_found = 0
        #: The unit of the source that was found damaged.
        self.damaged: Unit | None = None
        self._source = source
        self._target = target
        self._workers = workers
        self._recheck = recheck
        self._progress = progress
        self._total = 0
        self._lock = threading.Lock()
        self._memory = InFlight(_MEMORY_BYTES)

    def copy(self, units: Mapping[Unit, SaveId]) -> None:
        """Copies units, each of which must be the save that is given; those that are done stay."""
        done = {*self.copied, *self.found}
        expected: dict[Unit, dict[str, Digest]] = {}
        for unit, save_id in units.items():
            if unit.name not in done:
                with self._reading(unit, save_id):
                    expected[unit] = self._source.digests(unit)
        self._total = self.bytes_written + self.bytes_found
        self._total += sum(digests_bytes(digests) for digests in expected.values())
        with concurrent.futures.ThreadPoolExecutor(self._workers, "deltackpt-copy") as pool:
            for unit, digests in expected.items():
                if self._target.holds(unit, digests, recheck=self._recheck):
                    self.found.append(unit.name)
                    self._done(0, digests_bytes(digests))
                    continue
                self._target.begin(unit, digests)
                with self._reading(unit, units[unit]):
                    if isinstance(self._target, Bucket):
                        self._send(self._target, unit, digests)
                    else:
                        self._copy_files(pool, unit, digests)
                self._target.publish(unit, digests)
                self.copied.append(unit.name)

    @contextlib.contextmanager
    def _reading(self, unit: Unit, save_id: SaveId) -> Iterator[None]:
        try:
            with _standing(self._source, unit, save_id):
                yield
        except Damaged:
            self.damaged = unit
            raise

    def _send(self, target: Bucket, unit: Unit, digests: Mapping[str, Digest]) -> None:
        """Has a bucket take a unit, which is checked while it is read."""
        info = self._source.info(unit)
        if info is None:
            raise gone(self._source, unit)
        target.take(
            unit,
            info,
            self._source.spot(unit),
            digests,
            workers=self._workers,
            on_bytes=lambda count: self._done(count, 0, files=0),
        )
        with self._lock:
            self.file_count += len(digests)

    def _copy_files(
        self, pool: concurrent.futures.Executor, unit: Unit, digests: Mapping[str, Digest]
    ) -> None:
        futures = [
            pool.submit(self._copy_file, unit, name, digest) for name, digest in digests.items()
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _copy_file(self, unit: Unit, name: str, expected: Digest) -> None:
        with self._memory.taken(expected.length):
            if self._target.written(unit, name, expected):
                self._done(0, expected.length)
                return
            data = self._source.read(unit, name)
            check_bytes(f"{self._source.name}/{unit.name}/{name}", data, expected)
            self._target.write(unit, name, data)
            if not self._target.written(unit, name, expected):
                raise StorageError(
                    f"{self._target.name}/{unit.name}/{name}: expected to read back what was "
                    "written, found other bytes; check the store, then copy again"
                )
            self._done(expected.length, 0)

    def _done(self, written: int, found: int, *, files: int | None = None) -> None:
        with self._lock:
            self.file_count += written > 0 if files is None else files
            self.bytes_written += written
            self.bytes_found += found
            if self._progress is not None:
                self._progress(self.bytes_written + self.bytes_found, self._total)


def _place(
    where: str | os.PathLike[str], endpoint: str | None, item: str = names.EMBEDDINGS_ITEM
) -> Directory | Bucket:
    """What a path, a URL or a spec means."""
    path = buckets.file_path(where)
    if path is not None:
        return Directory(path.absolute(), item)
    return Bucket(where, endpoint, item)


def _wanted(source: Place, steps: Collection[int] | None, all_steps: bool) -> list[int]:
    """The steps to copy."""
    standing = sorted(source.steps())
    if not standing:
        raise StepNotFound(f"{source.name}: expected whole steps, found none; check where it is")
    if all_steps:
        return standing
    wanted = sorted(set(steps)) if steps else standing[-1:]
    missing = [step for step in wanted if step not in standing]
    if missing:
        raise StepNotFound(
            f"{source.name}: expected the steps {missing}, found {standing[-5:]} as the newest; "
            "copy steps that stand there whole"
        )
    return wanted


def _units(source: Place, steps: Sequence[int], unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """What restoring the steps needs and which saves these are, in an order to copy them in."""
    found: dict[Unit, SaveId] = {}
    for step in steps:
        found.update(_chain_units(source, step, unusable))
    # A save needs none but of earlier steps, and the base that stands for itself.
    order = sorted(found, key=lambda unit: (unit.step, unit.item is None))
    return {unit: found[unit] for unit in order}


def _chain_units(source: Place, step: int, unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """The units of one chain."""
    own = source.info(Unit(step))
    if own is None:
        raise gone(source, Unit(step))
    with _standing(source, Unit(step), own.save_id):
        return _chain_of(source, own, unusable)


def _chain_of(source: Place, own: SaveInfo, unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """The units of the chain of a step."""
    units = {Unit(int(own.step_dir)): own.save_id}

    def held(save: SaveInfo) -> SaveInfo:
        base = _base(source, save.step_dir, save.save_id, unusable)
        if base is None:
            units[Unit(int(save.step_dir))] = save.save_id
            return save
        units[Unit(int(base.step_dir), source.item)] = base.save_id
        return base

    def find(parent: ParentRef) -> SaveInfo | None:
        below = _base(source, parent.step_dir, parent.save_id, unusable)
        below = below or source.info(Unit(int(parent.step_dir)))
        return None if below is None else held(below)  # restore_chain names what is missing.

    target = held(own)
    saves: dict[str, SaveInfo] = {}
    still = math.inf
    for save in chain.walk(target, find):
        saves[save.step_dir] = save
        parent, still = save.parent, save.still(still)
        if parent is None or not still or parent.step_dir in saves:
            break
        if names.step_number(parent.step_dir) is None:
            raise Damaged(
                f"{source.name}/{save.step_dir}", "a step as its parent", repr(parent.step_dir)
            )
    chain.restore_chain(target, saves)
    return units


@contextlib.contextmanager
def _standing(source: Place, unit: Unit, save_id: SaveId) -> Iterator[None]:
    """Checks afterwards that a unit of the source is still the save that it was.

    What was read of it meanwhile may be of another save otherwise.

    Raises:
      StepGone: it is not, whatever failed.
    """
    cause: RestoreError | None = None
    try:
        yield
    except (Damaged, BrokenChain) as error:
        cause = error
    try:
        now = source.info(unit)
    except RestoreError as error:
        raise cause or error from None
    if now is None or now.save_id != save_id:
        raise gone(source, unit) from cause
    if cause is not None:
        raise cause


def _base(
    source: Place, step_dir: str, save_id: SaveId, unusable: Collection[Unit]
) -> SaveInfo | None:
    """The compacted base that stands for a save; one that is damaged stands for nothing."""
    unit = Unit(int(step_dir), source.item)
    if unit in unusable:
        return None
    try:
        base = source.info(unit)
    except RestoreError:
        return None
    return base if base is not None and base.save_id == save_id else None
