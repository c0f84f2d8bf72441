# SPDX-License-Identifier: Apache-2.0
"""Opens a root for a manager: a directory as it is, a bucket with a stage before it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import uuid
from pathlib import Path
from typing import TypeVar

from deltackpt import events
from deltackpt.errors import Damaged, OptionError
from deltackpt.format import names
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import MOST_CLAIMS, Claim, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import BucketSteps, find_item, open_steps, refuse_foreign
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import saves
from deltackpt.reading.stretches import Logs
from deltackpt.storage import buckets, files
from deltackpt.storage.store import spot
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.log_promotion import LogPromotion
from deltackpt.tiers.near import FindNeighbours, Near
from deltackpt.tiers.recall import Recalled
from deltackpt.tiers.stage import Orders, RollBack, Stage, check_stage, default_stage
from deltackpt.tiers.staged import StagedRoot
from deltackpt.tiers.staged_jobs import StagedApart, StagedBeside

#: Has ``keepers(...)``.
_DISCOVERY = "deltackpt.service.discovery"

_Kind = TypeVar("_Kind", bound=StagedRoot)


def saves_to(where: str | os.PathLike[str], options: ManagerOptions, process: int) -> Path:
    """The directory that a process's manager of a root makes its saves in.

    Raises:
      UnsupportedRoot, OptionError: it cannot be one.
    """
    path = buckets.file_path(where)
    if path is not None:
        return path
    return _stage_of(where, options.tiers or Tiers(), process).steps


def open_root(
    where: str | os.PathLike[str],
    *,
    item: str,
    options: ManagerOptions,
    writing: bool,
    process: int = 0,
    processes: int = 1,
) -> Steps:
    """Opens a root; a trainer takes it, and its stage.

    Args:
      where: a path, or a URL.
      item: name of our item in a step.
      options: of the manager.
      writing: whether saves will be made; of several processes by the first.
      process: which of them this is.
      processes: how many save together.

    Raises:
      OptionError: the tiers cannot work.
      UnsupportedRoot: the scheme is unknown, or the service does not keep what commits rest on.
      ForeignDirectory: it holds what deltackpt did not write.
      StorageError: the root does not answer, or the stage cannot be written.
    """
    tiers = options.tiers or Tiers()
    path = buckets.file_path(where)
    if path is not None:
        if options.tiers is not None:
            raise OptionError(
                f"ManagerOptions.tiers: expected none for the directory {path}, found "
                f"{options.tiers}; leave it out, or give the URL of a bucket"
            )
        return Root.open(path, item=item, read_only=not writing)
    limit = options.timeouts.store_secs
    if options.read_only:
        return open_steps(where, item=item, endpoint=tiers.endpoint, deadline_secs=limit)
    place = buckets.place(where, endpoint=tiers.endpoint)
    root = place.open(deadline_secs=limit)
    if tiers.neighbours is not None and tiers.shared and processes > 1:
        raise OptionError(
            f"Tiers.neighbours: expected one process, or a stage to each, found {processes} "
            "processes that share one, which outlives a node; give Tiers(shared=False)"
        )
    stage = _stage_of(where, tiers, process)
    count = 1 if tiers.shared else processes
    if not writing and count > 1:
        return _apart(stage, Journal(root), place.url, item, options, tiers, process, count)
    if not writing:
        return _beside(stage, JournalView(root), tiers, processes)
    journal = Journal(root)
    if journal.state().entry.number:
        find_item(BucketSteps(journal, item), item)
    else:
        refuse_foreign(root)
    old = check_stage(stage, place.url, tiers.endpoint)
    buckets.probe(root)
    with contextlib.ExitStack() as opened:
        local = Root.open(stage.steps, item=item)
        opened.callback(local.close)
        # Before the claim: who cannot use them fences nobody.
        extents = _extents(tiers, process, opened)
        claim = journal.claim()
        files.remove_tree(stage.fetched)
        old = _brought_up(stage, local, old, journal.known)
        if count > 1:
            # The other processes do not see this stage: they find by the root what was logged.
            LogPromotion(stage).bring_heads(journal)
        return _held(
            StagedRoot,
            opened,
            (stage, local, journal),
            old,
            extents,
            claim,
            place.url,
            options,
            process,
            processes,
        )


def _beside(stage: Stage, journal: JournalView, tiers: Tiers, processes: int) -> StagedBeside:
    """The stage and the root that the first process of a job has just opened.

    Raises:
      OptionError: this process does not see that stage.
    """
    claim = journal.state().claim
    orders = stage.orders()
    if orders is None or claim is None or orders.holder != claim.lease.holder:
        raise OptionError(
            f"Tiers.stage={str(stage.path)!r}: expected the stage that process 0 opened, found "
            f"{'none' if orders is None else 'another one'}: several processes save to a bucket by "
            "a stage that all of them see, so give a directory that is shared between the nodes; "
            "or a stage to each process: Tiers(shared=False)"
        )
    local = Root.open(stage.steps, item=orders.item, read_only=True)
    near = Near(stage, local)
    return StagedBeside(stage, local, journal, orders, tiers, near, processes=processes)


def _apart(
    stage: Stage,
    journal: Journal,
    url: str,
    item: str,
    options: ManagerOptions,
    tiers: Tiers,
    process: int,
    processes: int,
) -> StagedApart:
    """The stage of another process than the first, which has just taken the root.

    Raises:
      OptionError, StorageError: the stage cannot be used.
    """
    old = check_stage(stage, url, tiers.endpoint)
    claim = journal.resume()
    with contextlib.ExitStack() as opened:
        local = Root.open(stage.steps, item=item)
        opened.callback(local.close)
        extents = _extents(tiers, process, opened)
        files.remove_tree(stage.fetched)
        _drop_what_was_at_the_root(stage, local, journal.known)
        return _held(
            StagedApart,
            opened,
            (stage, local, journal),
            old,
            extents,
            claim,
            url,
            options,
            process,
            processes,
        )


def _held(
    kind: type[_Kind],
    opened: contextlib.ExitStack,
    places: tuple[Stage, Root, Journal],
    old: Orders | None,
    extents: ExtentFile | None,
    claim: Claim,
    url: str,
    options: ManagerOptions,
    process: int,
    processes: int,
) -> _Kind:
    """A stage and its root under a claim, with what came back from near it, and new orders.

    Args:
      kind: the first process's, or that of another one with a stage of its own.
      opened: what is closed where this fails.
      places: the stage, its checkpoint directory, and the root's journal.
      old: the orders before, where they still hold.
      extents: those of this process.
      claim: on the root.
      url: of the root.
      options: of the manager.
      process: which of them this is.
      processes: how many save together.

    Raises:
      OptionError: what is held near the stage is another root's; or there are too few neighbours.
      ServiceError: neighbours cannot be asked for.
      StorageError: the stage cannot be written.
    """
    tiers = options.tiers or Tiers()
    stage, local, journal = places
    part, parts = (0, 1) if tiers.shared else (process, processes)
    near = Near(
        stage,
        local,
        extents=extents,
        find_neighbours=_finder(url, local.item, tiers, claim),
        part=part,
        parts=parts,
        fsync=options.writes.durability == "power",
    )
    opened.callback(near.close)
    recalled = near.recall(url, journal.known, old)
    if not tiers.shared:
        old = _without_other_parts(stage, local, local.item, journal.known, parts, old)
    orders = _orders(old, url, local.item, claim, options, part, parts, recalled)
    stage.order(orders)
    held = kind(
        stage,
        local,
        journal,
        orders,
        tiers,
        near,
        processes=processes,
        readable_secs=options.timeouts.save_secs,
        cpus=options.background.cpus,
    )
    opened.pop_all()
    return held


def _extents(tiers: Tiers, process: int, opened: contextlib.ExitStack) -> ExtentFile | None:
    """The extents of a process, closed where what follows fails.

    Raises:
      InUse: another process holds them.
      OptionError, StorageError: they cannot be used.
    """
    if tiers.extents is None:
        return None
    folder = Path(tiers.extents.directory).absolute()
    found = ExtentFile(
        folder if tiers.shared else folder / f"process-{process}",
        nbytes=tiers.extents.nbytes,
        extent_bytes=tiers.extents.extent_bytes,
    )
    opened.callback(found.close)
    return found


def _finder(url: str, item: str, tiers: Tiers, claim: Claim) -> FindNeighbours | None:
    """What finds the neighbours that are asked for: Ray knows them, which nothing here imports."""
    how = tiers.neighbours
    if how is None:
        return None
    holder = f"{claim.lease.epoch:020}.{claim.lease.holder}"

    def find(earlier: Keepers | None) -> Keepers:
        discovery = importlib.import_module(_DISCOVERY)
        return discovery.keepers(url, item, how, holder, earlier=earlier)

    return find


def _orders(
    old: Orders | None,
    url: str,
    item: str,
    claim: Claim,
    options: ManagerOptions,
    process: int,
    processes: int,
    recalled: Recalled,
) -> Orders:
    """The first orders under a claim, with what is still to be done of those before."""
    tiers = options.tiers or Tiers()
    number = 1 if old is None else old.number + 1
    lines = [*recalled.lines, *(() if old is None else old.lines)]
    rolled_back = list(() if old is None else old.rolled_back)
    if recalled.left:
        # It was ordered before what came back was made, by orders that are lost.
        after = min(one.step for one in recalled.left) - 1
        run = recalled.lines[-1].run
        rolled_back.append(RollBack(number=number, after=after, run=run, saves=recalled.left))
    return Orders(
        number=number,
        stage=uuid.uuid4().hex if old is None else old.stage,
        url=url,
        endpoint=tiers.endpoint,
        item=item,
        holder=claim.lease.holder,
        epoch=claim.lease.epoch,
        lines=tuple({one.run: one for one in lines}.values()),
        rolled_back=tuple(rolled_back),
        retired=() if old is None else old.retired,
        bytes_per_sec=tiers.bytes_per_sec,
        store_secs=options.timeouts.store_secs,
        process=process,
        processes=processes,
    )


def _without_other_parts(
    stage: Stage, local: Root, item: str, state: State, processes: int, old: Orders | None
) -> Orders | None:
    """Moves what jobs of another number of processes have left aside: nobody completes it.

    Returns:
      What still holds of some orders.
    """
    aside = stage.aside(f"parts-{uuid.uuid4().hex[:8]}")
    moved: dict[int, SaveId] = {}
    for step, info in sorted(local.saves().items(), reverse=True):
        if info is None or state.held(info.save_id):
            continue
        if saves.read_save(local.at(step), item).head.process_count != processes:
            local.set_aside(step, aside / str(step))
            moved[step] = info.save_id
    if moved:
        events.warn(
            f"{stage.path}: expected parts of saves of {processes} processes, found steps "
            f"{sorted(moved)} of a job of another number, which did not come to the root; they "
            f"were moved to {aside}"
        )
    return None if old is None else old.without(moved.values())


def _stage_of(where: str | os.PathLike[str], tiers: Tiers, process: int) -> Stage:
    stage = _named_stage(where, tiers)
    return stage if tiers.shared else Stage(stage.path / f"process-{process}")


def _named_stage(where: str | os.PathLike[str], tiers: Tiers) -> Stage:
    if tiers.stage is None:
        return Stage(
            default_stage(buckets.place(where, endpoint=tiers.endpoint).url, tiers.endpoint)
        )
    path = buckets.file_path(tiers.stage)
    if path is None:
        raise OptionError(
            f"Tiers.stage: expected a directory of this node, found {tiers.stage}; give a path"
        )
    return Stage(path.absolute())


def _brought_up(stage: Stage, local: Root, old: Orders | None, state: State) -> Orders | None:
    """Makes a stage fit what has become of the root since; the old orders that still hold."""
    if old is None:
        return None
    _drop_what_was_at_the_root(stage, local, state)
    if _is_of_another_root(old, state):
        expected = "the root that this stage was used for last, found another one under its name"
        _move_aside(stage, local, old, state, expected)
    elif _went_on_elsewhere(old, state):
        expected = "that nobody trained on since this stage was used last, found that others did"
        _move_aside(stage, local, old, state, expected)
    else:
        done = stage.progress(old.holder)
        return dataclasses.replace(
            old,
            rolled_back=tuple(one for one in old.rolled_back if one.number > done.orders),
            retired=tuple(one for one in old.retired if one.number > done.retired),
        )
    return dataclasses.replace(old, rolled_back=(), retired=())


def _drop_what_was_at_the_root(stage: Stage, local: Root, state: State) -> None:
    """Removes what is at the root no more, and what nobody can read that is."""
    for step, info in local.saves().items():
        at_root = state.steps.get(step)
        if info is None:
            if at_root is not None:
                local.set_aside(step, stage.aside("damaged") / uuid.uuid4().hex)
            continue
        if at_root is not None and at_root.save_id == info.save_id:
            continue
        if state.held(info.save_id):
            local.remove_steps([step])  # It was at the root, and is retired.


def _is_of_another_root(old: Orders, state: State) -> bool:
    """Whether a root is not the one that a stage was used for: it knows nothing of its claim.

    What stood under the URL was removed since, and begun anew; or the URL is of another server now.
    """
    holders = {one.lease.epoch: one.lease.holder for one in state.entry.claims}
    if not old.holder or old.epoch < min(holders):
        return False  # Never used; or so many came since that the root does not remember.
    return holders.get(old.epoch) != old.holder


def _move_aside(stage: Stage, local: Root, old: Orders, state: State, expected: str) -> None:
    """Moves saves aside that training went on without, with a warning of what was expected."""
    stale: list[int] = []
    aside = stage.aside(f"epoch-{old.epoch}-{uuid.uuid4().hex[:8]}")
    for step, info in sorted(local.saves().items(), reverse=True):
        if info is None or not state.held(info.save_id):
            local.set_aside(step, aside / str(step))
            stale.append(step)
    if stale:
        events.warn(
            f"{stage.path}: expected {expected}: steps {sorted(stale)}, which are not at "
            f"{old.url}, were moved to {aside}"
        )
    if moved := _move_logs_aside(local.path / names.LOG, state, aside / names.LOG):
        events.warn(
            f"{stage.path}: expected {expected}: the log of stretches {moved}, of which {old.url} "
            f"knows nothing, was moved to {aside / names.LOG}"
        )


def _move_logs_aside(log: Path, state: State, aside: Path) -> list[int]:
    """Moves the stretches of a log aside whose heads are not at the root; their numbers.

    What those that are hold beyond what was gone on from elsewhere, the newest head says.
    """
    at_root = {(one.stretch, one.run) for one in state.entry.logs}
    logs, moved = Logs(spot(log)), list[int]()
    for number in logs.numbers():
        try:
            is_at_root = (number, logs.head(number).run) in at_root
        except Damaged:
            is_at_root = False
        if not is_at_root:
            files.make_folder(aside)
            # The head first: without it the rest is nobody's.
            for name in (names.stretch_name(number), str(number)):
                if (log / name).exists():
                    files.rename(log / name, aside / name, fsync=False)
            moved.append(number)
    return sorted(moved)


def _went_on_elsewhere(old: Orders, state: State) -> bool:
    """Whether training went on from elsewhere than a stage since its trainer took the root.

    A claim under which nobody began to train orphans nothing. Where so many came since that the
    root does not remember all of them, one is taken to have begun.
    """
    claims = [one for one in state.entry.claims if one.lease.epoch > old.epoch]
    if any(one.began and old.stage not in one.stages for one in claims):
        return True
    forgotten = len(state.entry.claims) == MOST_CLAIMS and len(claims) == MOST_CLAIMS
    return forgotten
