# SPDX-License-Identifier: Apache-2.0
"""Compaction: merges a chain into a new base next to the steps, without the trainer.

``plan`` divides the rows into shards, ``merge_shard`` writes one shard in any process that sees the
directory, and ``publish`` makes the base visible by one rename.

A compacted base replaces its step in chains: it has that step's save id and contains every row bit
for bit as a restore returns it. It is stored like the base of several processes, so readers need
no special code. Rows are never re-encoded: values that a lossy codec has changed are stored as
they are. The step keeps its dense leaves; if it has them as blocks, the base contains them decoded,
as Orbax's item. A killed compaction leaves only a temporary directory, which the next one removes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deltackpt.errors import (
    AlreadyCompacting,
    Damaged,
    OptionError,
    StepNotFound,
    StorageError,
)
from deltackpt.format import manifest, naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import lease
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.upload import Unit, commit
from deltackpt.maintenance.base_merge import MergedShard, merge_shard, most_workers, written_shard
from deltackpt.maintenance.plan import CompactionPlan, chain, detect_step_removal, plan
from deltackpt.reading import chains, inventory, stored_saves
from deltackpt.reading.reader import Progress, ProgressMeter
from deltackpt.reading.stored_dense import StoredItem
from deltackpt.reading.stored_saves import StoredSave, read_base
from deltackpt.resources.runtime import Runtime
from deltackpt.storage import buckets, posix, shard_writer
from deltackpt.storage.posix import DurableDir, fsync_path
from deltackpt.storage.store import store_path

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


#: Merges all shards of a plan: called with the plan, the number of concurrent shards, the memory
#: limit of each, and the progress callback.
MergeShards = Callable[[CompactionPlan, int, int, Progress | None], list[MergedShard]]


def compact(
    directory: str | os.PathLike[str],
    *,
    item: str = naming.EMBEDDINGS_ITEM,
    step: int | None = None,
    workers: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    progress: Progress | None = None,
    merge_shards: MergeShards | None = None,
    endpoint: str | None = None,
) -> Compacted | None:
    """Merges the chain of a step into a new base, while trainers and readers run.

    For a bucket, the chain is first downloaded to temporary files, and the base is uploaded. No
    lock is needed there: a concurrent compaction finds the base that was committed first.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL.
      item: name of deltackpt's item in the steps.
      step: the step; the newest by default.
      workers: number of shards to merge in parallel; by default one per CPU, or fewer if the memory
        limit requires it.
      memory_bytes: memory limit for all workers together, in bytes.
      progress: called with bytes done and total bytes, from any thread.
      merge_shards: merges the shards; by default, threads with a lower priority do.
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
      FormatTooOld: a development version wrote it.
      OutOfSpace, StorageError: the storage failed. After any error, nothing was published.
    """
    started = time.perf_counter()
    if workers is not None and workers < 1:
        raise OptionError(f"workers: expected at least 1, found {workers}")
    path = buckets.file_path(directory)
    if path is None:
        opened = open_steps(directory, item=item, endpoint=endpoint)
        merge_chain = functools.partial(
            compact,
            item=item,
            workers=workers,
            memory_bytes=memory_bytes,
            progress=progress,
            merge_shards=merge_shards,
        )
        done = _compact_in_bucket(opened, item, step, merge_chain)
        return done and dataclasses.replace(done, seconds=time.perf_counter() - started)
    wanted = workers or len(os.sched_getaffinity(0))
    root = path.absolute()
    with exclusive(root):
        planned = plan(root, item=item, step=step, shards=wanted)
        if planned is None:
            return None
        posix.require_room(
            root,
            planned.nbytes + planned.dense_bytes,
            f"compacted step {planned.step} in {root}",
            "free space or keep fewer steps, then retry",
        )
        with detect_step_removal(planned):
            most = most_workers(planned, chain(planned), memory_bytes)
        count = min(wanted, len(planned.shards), most)
        try:
            merged = (merge_shards or _by_threads)(planned, count, memory_bytes // count, progress)
            publish(planned)
        finally:
            DurableDir(planned.directory).remove(planned.workspace)
    return Compacted(
        step=planned.step,
        save_id=planned.save_id,
        deltas=planned.deltas,
        bytes_read=sum(shard.bytes_read for shard in merged),
        bytes_written=sum(shard.bytes_written for shard in merged),
        seconds=time.perf_counter() - started,
    )


def _compact_in_bucket(
    opened: Steps, item: str, step: int | None, merge_chain: Callable[..., Compacted | None]
) -> Compacted | None:
    """Compacts a step of a bucket, the newest by default, in a temporary directory."""
    assert isinstance(opened, BucketSteps)
    step = opened.newest_step() if step is None else step
    if step is None:
        raise StepNotFound(f"{opened}: expected committed steps, found none; check the URL")
    at = opened.at(step)
    with tempfile.TemporaryDirectory(prefix="deltackpt-compact-") as scratch:
        folder = Path(scratch)
        with stored_saves.detect_removal(at, during="compacted", instead="compact"):
            found = chains.read_chain(at, item)
            if len(found) == 1:
                return None
            held = at.store
            assert isinstance(held, CommittedStore)
            for save in found:
                held.fetch(save.item_dir.key, folder / save.item_dir.key)
            item_below = StoredItem(found)
            if item_below.shards and item_below.base is not None:
                _fetch_item(held, item_below.base.save, folder)
        done = merge_chain(folder, step=step)
        if done is not None:
            _put_base(Journal(opened.journal.root), folder, ObjectKey(step, item))
        return done


def _fetch_item(held: CommittedStore, base: StoredSave, folder: Path) -> None:
    """Downloads the base's dense item and the digests of its step."""

    def wanted(name: str) -> bool:
        is_digests = name == naming.STEP_DIGESTS or naming.step_digests_process(name) is not None
        return is_digests or name.startswith(f"{naming.DENSE_ITEM}/")

    if not base.compacted:  # It was downloaded with the base.
        held.fetch(base.step_dir.key, folder / base.step_dir.key, wanted)


def _put_base(journal: Journal, folder: Path, key: ObjectKey) -> None:
    """Uploads and commits a compacted base, unless the bucket has one already."""
    assert key.item is not None
    journal.resume(wait=True)
    source, info = store_path(folder / key.name), read_base(folder / str(key.step), key.item).info
    files = inventory.every_digest(source, key.item, base=True)
    commit(Unit(key, info, source, files), journal)
    journal.copy_newest()


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Locks a directory for compaction, and removes leftovers of killed ones.

    Raises ``AlreadyCompacting`` if another process, while it lives, has the lock.
    """
    if not directory.is_dir():
        raise StepNotFound(
            f"{directory}: expected a directory of steps, found none; check the path"
        )
    # Before anything is created there: the directory may not be deltackpt's.
    Root.open(directory, read_only=True).close()
    opened, folder = DurableDir(directory), directory / naming.COMPACTED
    path = folder / naming.COMPACTION_LOCK
    opened.make(folder)
    refusal = AlreadyCompacting(
        f"{directory}: expected no other compaction, found the lock {path} held by another "
        "process; wait until it has ended"
    )
    with lease.file_lock(path, refusal):
        for entry in opened.entries(folder):
            if naming.is_compaction(entry.name):
                opened.remove(entry)
        yield


def publish(plan: CompactionPlan) -> None:
    """Makes the base visible by one rename, unless the save already has a compacted base."""
    with contextlib.suppress(Damaged):
        if stored_saves.read_compacted(plan.step_dir, plan.save_id, plan.item) is not None:
            return
    opened, count = DurableDir(plan.directory), len(plan.shards)
    written = []
    for number in range(count):
        shard = written_shard(plan, number)
        if shard is None:
            raise Damaged(
                f"{plan.temporary}/{number}",
                f"shard {number} of {count}",
                "no such shard",
                "merge it, then publish again",
            )
        written.append(shard)
    base, final = plan.shard_dir(0), naming.compacted_dir(plan.step_dir, plan.item)
    if count > 1:
        head, *others = written
        index = (
            shard_writer.shard_entry(head.record, 0),
            *(shard_writer.shard_entry(shard.record, shard.crc32c) for shard in others),
        )
        record = manifest.to_bytes(dataclasses.replace(head.record, shards=index))
        opened.write(base / naming.manifest_name(0), record)
    chain(plan)  # Raises an error if the step was removed.
    with posix.typed_errors(final, "be published"):
        moving = DurableDir(plan.directory, fsync=False)
        for number in range(1, count):
            for path in moving.entries(plan.shard_dir(number)):
                moving.publish(path, base / path.name)
        fsync_path(base)
    try:
        # Move a stale or damaged base out of the way.
        opened.publish(final, plan.workspace / "replaced")
    except StorageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    opened.publish(base, final)
    with posix.typed_errors(final, "be published"):
        fsync_path(final.parent.parent)  # A killed compaction may have made its folder.


def _by_threads(
    planned: CompactionPlan, threads: int, memory_bytes: int, progress: Progress | None
) -> list[MergedShard]:
    """Merges all shards in threads of a lower priority: measured no slower than processes."""
    meter = ProgressMeter(progress, planned.nbytes)
    run = functools.partial(merge_shard, planned, memory_bytes=memory_bytes, on_bytes=meter.add)
    with Runtime(size=threads, low_priority=True) as runtime:
        futures = [runtime.start(run, number) for number in range(len(planned.shards))]
        for future in concurrent.futures.as_completed(futures):
            future.result()
    return [future.result() for future in futures]
