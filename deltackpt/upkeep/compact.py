# SPDX-License-Identifier: Apache-2.0
"""Compaction: merges a chain into a new base next to the steps, without the trainer.

There are three stages: ``plan`` divides the rows into parts, ``fold`` writes one part in any
process that sees the directory, and ``publish`` makes the base visible by one rename. ``compact``
runs all of them.

A compacted base replaces the step that it was merged from in chains: it has that step's save id and
contains every row bit for bit as a restore of the step returns it. It is stored like the base of
several processes, so readers need no special code. Rows are never re-encoded: values that a lossy
codec has changed are stored as they are. The step does not change and keeps its dense leaves. If it
has them as blocks, the base contains them decoded, as Orbax's item.

Until the rename, everything is in a temporary directory, which the next compaction removes. A
killed compaction therefore has no effect.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deltackpt.errors import (
    AlreadyCompacting,
    BrokenChain,
    Damaged,
    FencedError,
    OptionError,
    OutOfSpace,
    StepNotFound,
    TargetDiffers,
    UnsupportedRoot,
)
from deltackpt.format import manifest, names
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import locks
from deltackpt.ledger.committed import Committed
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import Standing, Unit
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import BucketSteps, open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.upload import upload
from deltackpt.reading import chains, inventory, removal, saves, stored_dense
from deltackpt.reading.meter import Meter, Progress
from deltackpt.reading.saves import StoredSave
from deltackpt.resources import priority
from deltackpt.storage import buckets, files, parts
from deltackpt.storage.store import store_path
from deltackpt.upkeep.fold import Folded, fold, least_memory_bytes, ready
from deltackpt.upkeep.plan import Plan, chain, plan, standing

#: Default memory limit of a compaction.
MEMORY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compacted:
    """Summary of a compaction.

    Attributes:
      step: the step that was compacted.
      save_id: its save id.
      deltas: number of deltas that were merged.
      bytes_read: bytes of the stored arrays of tables that were read.
      bytes_written: bytes of the files of the base.
      seconds: elapsed time.
    """

    step: int
    save_id: SaveId
    deltas: int
    bytes_read: int
    bytes_written: int
    seconds: float


#: Merges all parts of a plan: called with the plan, the number of concurrent parts, the memory
#: limit of each, and the progress callback.
FoldAll = Callable[[Plan, int, int, Progress | None], list[Folded]]


def compact(
    directory: str | os.PathLike[str],
    *,
    item: str = names.EMBEDDINGS_ITEM,
    step: int | None = None,
    workers: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
    fold_all: FoldAll | None = None,
    endpoint: str | None = None,
) -> Compacted | None:
    """Merges the chain of a step into a new base, while trainers and readers run.

    For a bucket, the chain is first downloaded to temporary files, and the base is uploaded. No
    lock is needed there: a concurrent compaction finds the base that was committed first.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL.
      item: name of deltackpt's item in the steps.
      step: the step; the newest by default.
      workers: number of parts to merge in parallel; by default one per CPU, or fewer if the memory
        limit requires it.
      memory_bytes: memory limit for all workers together, in bytes.
      progress: called with bytes done and total bytes, from any thread.
      fold_all: merges the parts; by default, threads with a lower priority do.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Returns:
      A summary; None if the chain is only a base.

    Raises:
      AlreadyCompacting: another process is compacting the directory.
      StepNotFound: the step does not exist.
      StepGone: retention removed the step during the compaction.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory limit is too low for one worker.
      FencedError: a trainer took the bucket during the compaction; compact again.
      UnsupportedRoot: the bucket has no journal, only copies of earlier versions.
      OutOfSpace, StorageError: the storage failed. After any error, nothing was published.
    """
    started = time.perf_counter()
    if workers is not None and workers < 1:
        raise OptionError(f"workers: expected at least 1, found {workers}")
    path = buckets.file_path(directory)
    if path is None:
        opened = open_steps(directory, item=item, endpoint=endpoint)
        folded = functools.partial(
            compact,
            item=item,
            workers=workers,
            memory_bytes=memory_bytes,
            progress=progress,
            fold_all=fold_all,
        )
        done = _compact_in_bucket(opened, item, step, folded)
        return done and dataclasses.replace(done, seconds=time.perf_counter() - started)
    wanted = workers or len(os.sched_getaffinity(0))
    root = path.absolute()
    with exclusive(root):
        planned = plan(root, item=item, step=step, parts=wanted)
        if planned is None:
            return None
        _require_room(planned)
        count = min(wanted, len(planned.parts), most_workers(planned, memory_bytes))
        try:
            folded = (fold_all or _by_threads)(planned, count, memory_bytes // count, progress)
            publish(planned)
        finally:
            files.remove_tree(planned.workspace, below=planned.directory)
    return Compacted(
        step=planned.step,
        save_id=planned.save_id,
        deltas=planned.deltas,
        bytes_read=sum(part.bytes_read for part in folded),
        bytes_written=sum(part.bytes_written for part in folded),
        seconds=time.perf_counter() - started,
    )


def _compact_in_bucket(
    opened: Steps, item: str, step: int | None, fold_chain: Callable[..., Compacted | None]
) -> Compacted | None:
    """Compacts a step of a bucket in a temporary directory.

    Args:
      opened: the steps of the bucket.
      item: name of deltackpt's item in them.
      step: the step; the newest by default.
      fold_chain: compacts a step of a directory.
    """
    if not isinstance(opened, BucketSteps):
        raise UnsupportedRoot(
            f"{opened}: expected a journal, found copies with markers, which cannot be changed; "
            "copy them to another directory, and compact there"
        )
    step = opened.newest_step() if step is None else step
    if step is None:
        raise StepNotFound(f"{opened}: expected committed steps, found none; check the URL")
    at = opened.at(step)
    with tempfile.TemporaryDirectory(prefix="deltackpt-compact-") as scratch:
        folder = Path(scratch)
        with removal.standing(at, during="compacted", instead="compact"):
            found = chains.read_chain(at, item)
            if len(found) == 1:
                return None
            held = at.store
            assert isinstance(held, Committed)
            for save in found:
                _fetch(held, save.item_dir.key, folder)
            _, base = stored_dense.shards_of(found)
            if found[-1].head.dense_blocks is not None and base is not None:
                _fetch_item(held, base, folder)
        done = fold_chain(folder, step=step)
        if done is not None:
            _put_base(Journal(opened.journal.root), folder, Unit(step, item))
        return done


def _fetch(held: Committed, key: str, folder: Path) -> None:
    target = folder / key
    target.mkdir(parents=True)
    held.fetch(key, target)


def _fetch_item(held: Committed, base: StoredSave, folder: Path) -> None:
    """Downloads the base's dense item and the digests of its step."""
    if base.compacted:
        return  # Downloaded with the base.
    step = base.step_dir.key
    _fetch(held, f"{step}/{names.DENSE_ITEM}", folder)
    for name in base.step_dir.keys():
        if name == names.STEP_DIGESTS or names.step_digests_process(name) is not None:
            (folder / step / name).write_bytes(held.get(f"{step}/{name}"))


def _put_base(journal: Journal, folder: Path, unit: Unit) -> None:
    """Uploads and commits a compacted base, unless the bucket has one already."""
    assert unit.item is not None
    journal.resume(wait=True)
    source = store_path(folder / unit.name)
    prefix = journal.prefix(unit)
    try:
        put = upload(
            source, inventory.every_digest(source, unit.item, base=True), journal.root / prefix
        )
        info = saves.read_base(folder / str(unit.step), unit.item).info
        standing = Standing.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
        stands = journal.commit(standing).prefix == prefix
        journal.copy_newest()
    except (FencedError, BrokenChain, TargetDiffers):
        journal.delete([prefix])
        raise
    if not stands:
        journal.delete([prefix])


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Locks a directory for compaction, and removes leftovers of interrupted compactions.

    The kernel releases the lock when the process ends.

    Args:
      directory: the checkpoint directory.

    Raises:
      AlreadyCompacting: another process has the lock.
      StepNotFound: the directory does not exist.
      ForeignDirectory: it is not a checkpoint directory.
      StorageError: the directory cannot be written.
    """
    if not directory.is_dir():
        raise StepNotFound(
            f"{directory}: expected a directory of steps, found none; check the path"
        )
    # Before anything is created there: the directory may not be deltackpt's.
    Root.open(directory, read_only=True).close()
    folder = directory / names.COMPACTED
    path = folder / names.COMPACTION_LOCK
    if not folder.is_dir():
        with files.typed_errors(path, "be locked"):
            folder.mkdir(exist_ok=True)
            files.fsync_path(directory)
    refusal = AlreadyCompacting(
        f"{directory}: expected no other compaction, found the lock {path} held by another "
        "process; wait until it has ended"
    )
    with locks.held(path, refusal):
        for entry in files.entries_below(folder, directory):
            if names.is_compaction(entry.name):
                files.remove_tree(entry, below=directory)
        yield


def most_workers(plan: Plan, memory_bytes: int) -> int:
    """Returns how many workers can run in parallel within a memory limit.

    Raises:
      OptionError: the limit is too low for one worker.
    """
    with standing(plan):
        least = least_memory_bytes(chain(plan))
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to compact step {plan.step}, found "
            f"{memory_bytes:,}; raise it"
        )
    return memory_bytes // least


def publish(plan: Plan) -> None:
    """Makes the base visible by one rename; everything is fsynced before and after it.

    Does nothing if the save already has a compacted base.

    Raises:
      Damaged: a part is missing or altered.
      StepGone: the step was removed or replaced.
      StorageError: the storage failed.
    """
    with contextlib.suppress(Damaged):
        if saves.read_compacted(plan.step_dir, plan.save_id, plan.item) is not None:
            return
    count = len(plan.parts)
    written = []
    for number in range(count):
        part = ready(plan, number)
        if part is None:
            raise Damaged(
                f"{plan.temporary}/{plan.item}/{names.manifest_name(number)}",
                f"part {number} of {count}",
                "no such part",
                "merge it, then publish again",
            )
        written.append(part)
    if count > 1:
        head, *others = written
        index = (
            parts.part_of(head.record, 0),
            *(parts.part_of(part.record, part.crc32c) for part in others),
        )
        path = plan.item_dir / names.manifest_name(0)
        files.write_atomic(
            path, manifest.to_bytes(dataclasses.replace(head.record, parts=index)), fsync=True
        )
    with standing(plan):
        chain(plan)
    final = names.compacted_dir(plan.step_dir, plan.item)
    with files.typed_errors(final, "be published"):
        files.fsync_path(plan.item_dir)
        # Move a stale or damaged base out of the way.
        with contextlib.suppress(FileNotFoundError):
            files.rename_below(final, plan.workspace / "replaced", plan.directory)
        _rename_into(plan.item_dir, final, plan.directory)
        files.fsync_path(final.parent)
        files.fsync_path(final.parent.parent)


def _by_threads(
    planned: Plan, threads: int, memory_bytes: int, progress: Progress | None
) -> list[Folded]:
    """Merges all parts in threads of a lower priority: measured no slower than processes."""
    meter = Meter(progress, planned.nbytes)

    def run(number: int) -> Folded:
        if stop.is_set():
            raise concurrent.futures.CancelledError
        return fold(planned, number, memory_bytes=memory_bytes, progress=_share(meter))

    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(threads, "deltackpt-fold", priority.lower) as pool:
        futures = [pool.submit(run, number) for number in range(len(planned.parts))]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _share(meter: Meter) -> Progress:
    """Progress callback of one part."""
    done = 0

    def add(now: int, total: int) -> None:
        nonlocal done
        meter.add(now - done)
        done = now

    return add


def _require_room(plan: Plan) -> None:
    free, needed = files.free_bytes(plan.directory), plan.nbytes + plan.dense_bytes
    if free < needed:
        raise OutOfSpace(
            f"{plan.directory}: expected room for {needed:,} bytes to compact step "
            f"{plan.step}, found {free:,} bytes free; free space or keep fewer steps, then retry"
        )


def _rename_into(source: Path, final: Path, below: Path) -> None:
    while True:
        try:
            files.rename_below(source, final, below)
            return
        except FileNotFoundError:
            # A trainer may have removed the empty folder.
            if not source.is_dir():
                raise
