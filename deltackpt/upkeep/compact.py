# SPDX-License-Identifier: Apache-2.0
"""Compaction: a chain folded into a new base, beside the steps, without the trainer.

Three stages: ``plan`` divides the rows into parts, ``fold`` writes one part, in whichever process
sees the directory, and ``publish`` makes the base visible by one rename. ``compact`` does it all.

A compacted base stands for the step that it was folded from: it bears that step's save id, holds
every row as a restore of the step would give it, bit for bit, and is stored like the base of
several processes, so that readers need to know nothing more. Rows are never encoded again: what a
lossy codec made of them is stored as it is. The step does not change, and keeps its dense leaves;
where it has them as blocks, the base holds them as Orbax's item, decoded.

Until the rename everything lies in a temporary directory, which whoever compacts next removes: a
compaction that is killed anywhere has changed nothing.
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
from deltackpt.reading import chains, dense_values, inventory, removal, saves
from deltackpt.reading.meter import Meter, Progress
from deltackpt.reading.saves import StoredSave
from deltackpt.resources import priority
from deltackpt.storage import buckets, files, parts
from deltackpt.storage.store import spot
from deltackpt.upkeep.fold import Folded, fold, least_memory_bytes, ready
from deltackpt.upkeep.plan import Plan, chain, plan, standing

#: Memory of a compaction where the caller does not say it.
MEMORY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compacted:
    """What a compaction did.

    Attributes:
      step: the step that the new base stands for.
      save_id: its save id.
      deltas: how many deltas were folded.
      bytes_read: bytes of the stored arrays of tables that were read.
      bytes_written: bytes of the files of the base.
      seconds: wall time.
    """

    step: int
    save_id: SaveId
    deltas: int
    bytes_read: int
    bytes_written: int
    seconds: float


#: Folds all parts of a plan: called with the plan, how many parts may be folded at a time, the most
#: memory of each, and what to tell of the progress.
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
    """Folds the chain of a step into a new base, beside trainers and readers of the directory.

    The chain of a bucket is fetched to temporary files first, and the base is put there. No lock
    is needed: whoever comes second finds the base.

    Args:
      directory: root of the steps: a path, or the URL of a bucket.
      item: name of our item in them.
      step: the step; the newest by default.
      workers: how many parts are folded at a time; one for each CPU by default, fewer where the
        memory does not suffice.
      memory_bytes: most memory of all workers together.
      progress: called with bytes folded and bytes in all, from any thread.
      fold_all: folds the parts; by default threads do, at a lowered priority.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Returns:
      What was done; None where the step is a base alone.

    Raises:
      AlreadyCompacting: another process compacts the directory.
      StepNotFound: there is no such step.
      StepGone: retention removed the step meanwhile.
      Damaged, BrokenChain: the chain is not intact.
      OptionError: the memory does not suffice for one worker.
      FencedError: a trainer has taken the bucket meanwhile; compact again.
      UnsupportedRoot: the bucket has no journal, but copies of earlier versions.
      OutOfSpace, StorageError: the store refused. Whatever is raised, nothing was published.
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
            files.remove_tree(planned.workspace)
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
    """Compacts a step of a bucket, in a directory that holds its chain for as long.

    Args:
      opened: the steps of the bucket.
      item: name of our item in them.
      step: the step; the newest by default.
      fold_chain: compacts a step of a directory.
    """
    if not isinstance(opened, BucketSteps):
        raise UnsupportedRoot(
            f"{opened}: expected a journal, found copies with markers, to which nothing is added; "
            "copy them to another place, and compact there"
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
            _, base = dense_values.sources_of(found)
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
    """Fetches the dense leaves that deltas go on from, and the digests of the step."""
    if base.compacted:
        return  # They came with it.
    step = base.step_dir.key
    _fetch(held, f"{step}/{names.DENSE_ITEM}", folder)
    for name in base.step_dir.keys():
        if name == names.STEP_DIGESTS or names.step_digests_process(name) is not None:
            (folder / step / name).write_bytes(held.get(f"{step}/{name}"))


def _put_base(journal: Journal, folder: Path, unit: Unit) -> None:
    """Commits the compacted base in a directory to a bucket; nothing where one stands there."""
    assert unit.item is not None
    journal.resume()
    source = spot(folder / unit.name)
    prefix = journal.prefix(unit)
    try:
        put = upload(
            source, inventory.every_digest(source, unit.item, base=True), journal.root / prefix
        )
        info = saves.read_base(folder / str(unit.step), unit.item).info
        standing = Standing.of(info, unit, prefix, stored_bytes=put.nbytes, crc32c=put.crc32c)
        stands = journal.commit(standing).prefix == prefix
    except (FencedError, BrokenChain, TargetDiffers):
        journal.delete([prefix])
        raise
    if not stands:
        journal.delete([prefix])


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds the directory against other compactors, and removes what cut compactions left.

    The kernel lets go of it when the process ends, however it does.

    Args:
      directory: root of the steps.

    Raises:
      AlreadyCompacting: another process holds it.
      StepNotFound: there is no such directory.
      ForeignDirectory: it holds other things than checkpoints.
      StorageError: the directory cannot be written.
    """
    if not directory.is_dir():
        raise StepNotFound(
            f"{directory}: expected a directory of steps, found none; check the path"
        )
    # Before anything is made there: it may be another's.
    Root.open(directory, read_only=True).close()
    folder = directory / names.COMPACTED
    path = folder / names.COMPACTION_LOCK
    if not folder.is_dir():
        with files.typed_errors(path, "be locked"):
            folder.mkdir(exist_ok=True)
            files.fsync_path(directory)
    refusal = AlreadyCompacting(
        f"{directory}: expected no other compaction of it, found its lock {path} held by another "
        "process; wait until that one has ended"
    )
    with locks.held(path, refusal):
        for entry in folder.iterdir():
            if names.is_compaction(entry.name):
                files.remove_tree(entry)
        yield


def most_workers(plan: Plan, memory_bytes: int) -> int:
    """How many workers may fold parts at a time within so much memory.

    Raises:
      OptionError: not even one.
    """
    with standing(plan):
        least = least_memory_bytes(chain(plan))
    if memory_bytes < least:
        raise OptionError(
            f"memory_bytes: expected at least {least:,} to fold step {plan.step}, found "
            f"{memory_bytes:,}; give it more"
        )
    return memory_bytes // least


def publish(plan: Plan) -> None:
    """Makes the base visible, by one rename; everything is on disk before and after it.

    It does nothing where a base already stands for the save.

    Raises:
      Damaged: a part is missing or altered.
      StepGone: the step was removed, or is another save now.
      StorageError: the store refused.
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
                "fold it, then publish again",
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
        _move_aside(final, plan.workspace)
        _rename_into(plan.item_dir, final)
        files.fsync_path(final.parent)
        files.fsync_path(final.parent.parent)


def _by_threads(
    planned: Plan, threads: int, memory_bytes: int, progress: Progress | None
) -> list[Folded]:
    """All parts, by threads of lowered priority: measured no slower than processes."""
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
    """What one part calls with what it has done so far."""
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
            f"{plan.step}, found {free:,} free; free space or keep fewer steps, then compact again"
        )


def _move_aside(final: Path, workspace: Path) -> None:
    """Makes place where a base stands for nothing: of another save, or damaged."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(final, workspace / "replaced")


def _rename_into(source: Path, final: Path) -> None:
    while True:
        final.parent.mkdir(exist_ok=True)
        try:
            os.rename(source, final)
            return
        except FileNotFoundError:
            # A trainer removes the folder where it finds it empty.
            if not source.is_dir():
                raise
