# SPDX-License-Identifier: Apache-2.0
"""Opens a bucket for a manager: for writing with a staging directory, or directly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from deltackpt import events
from deltackpt.errors import Damaged, DeltackptError, InUse, OptionError
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import MOST_CLAIMS, LeaseClaim, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import BucketSteps, find_item, open_steps, refuse_foreign
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import WalReader
from deltackpt.storage import buckets, posix, redaction
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.tiers import recovery
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.peers import PeerGroup
from deltackpt.tiers.recovery import Recovered
from deltackpt.tiers.replication import FindPeers, ReplicationClient
from deltackpt.tiers.staged_root import StagedRoot
from deltackpt.tiers.staging import Orders, RollBack, StagingDir, check_stage, default_stage
from deltackpt.tiers.wal_upload import WalUpload

#: Defines ``peer_group(...)``.
_DISCOVERY = "deltackpt.service.discovery"


def saves_to(where: str | os.PathLike[str], options: ManagerOptions, process: int) -> Path:
    """Returns the staging directory in which a process's manager makes its saves."""
    return _stage_of(where, options.tiers or Tiers(), process).steps


def open_root(
    where: str | os.PathLike[str],
    *,
    item: str,
    options: ManagerOptions,
    writing: bool,
    process: int = 0,
    processes: int = 1,
    taking: Callable[[], None] = lambda: None,
) -> Steps:
    """Opens a bucket; a trainer takes its lease and its staging directory.

    The trainer must then call ``confirm`` or ``abandon``. All checks run first, so a process that
    fails to open the directory does not fence a trainer. ``taking`` closes other managers of this
    process that use the same extents.
    """
    tiers = options.tiers or Tiers()
    limit = options.timeouts.store_secs
    if options.read_only:
        return open_steps(where, item=item, endpoint=tiers.endpoint, deadline_secs=limit)
    place = buckets.locate(where, endpoint=tiers.endpoint)
    root = place.open(deadline_secs=limit)
    if tiers.peers is not None and tiers.shared and processes > 1:
        raise OptionError(
            "Tiers.peers: expected one process, or a staging directory for each, found "
            f"{processes} processes that share one, which survives the loss of a node anyway; set "
            "Tiers(shared=False)"
        )
    stage = _stage_of(where, tiers, process)
    part, parts = (0, 1) if tiers.shared else (process, processes)
    if not writing and parts == 1:
        return _open_for_reading(stage, JournalView(root), options, processes)
    journal = Journal(root)
    if writing:
        if journal.state().entry.number or journal.problems:
            find_item(BucketSteps(journal, item), item)
        else:
            refuse_foreign(root)
    check_stage(stage, place.url, tiers.endpoint)
    if writing:
        buckets.probe(root)
        if tiers.peers is not None:
            importlib.import_module(_DISCOVERY).require_nodes(place.url, item, tiers.peers)
    claim = None if writing else journal.resume()
    with contextlib.ExitStack() as opened:
        stage.make()
        # Before the leases: another manager of this process may have to commit before it closes.
        extents = _extents(tiers, process, opened, taking)
        if extents is not None and writing:
            recovery.refuse_another_root(extents, place.url, part)
        local = Root.open(stage.steps, item=item, confirmed=False)
        opened.callback(local.abandon)
        if claim is None:
            opened.callback(_withdraw, journal)
            claim = journal.claim(pending=True)
        if not local.has_rival:
            local.confirm()  # Leftovers may fill the file system.
        # While this trainer holds the lease, no other trainer's orders take force.
        old = check_stage(stage, place.url, tiers.endpoint)
        _drop_what_was_at_the_root(stage, local, journal.known)
        if writing:
            old = _reconciled_orders(stage, local, old, journal.known)
            if parts > 1:
                # The other processes do not see this staging directory: they read the log state
                # remotely.
                WalUpload(stage).upload_headers(journal)
        client = ReplicationClient(
            stage,
            local,
            journal,
            options,
            holder=claim.lease.holder,
            part=part,
            parts=parts,
            extents=extents,
            find_peers=_finder(place.url, item, tiers, claim),
        )
        opened.callback(client.close)
        recovered = client.recover(place.url, old)
        if not tiers.shared:
            old = _without_other_parts(stage, local, journal.known, parts, old)
        orders = _orders(old, local, place.url, claim, options, part, parts, recovered)
        stage.announce(orders)
        held = StagedRoot(stage, local, journal, orders, options, client, processes=processes)
        held.failed_start_cleanup = opened.pop_all()
        return held


def _withdraw(journal: Journal) -> None:
    """Undoes this manager's claim, so that the previous trainer continues."""
    try:
        journal.withdraw()
    except DeltackptError as error:
        events.warn(
            f"{journal.root}: expected to return the claim to the previous trainer, found: "
            f"{error}; that trainer may be fenced, so restart it if it reports FencedError"
        )


def _open_for_reading(
    stage: StagingDir, journal: JournalView, options: ManagerOptions, processes: int
) -> StagedRoot:
    """The staging and remote directory that the first process of a job has just opened."""
    claim = journal.state().claim
    orders = stage.announced()
    if orders is None or claim is None or orders.holder != claim.lease.holder:
        raise OptionError(
            f"Tiers.staging_dir={str(stage.path)!r}: expected the directory that process 0 opened, "
            f"found {'none' if orders is None else 'another one'}; use a directory that all "
            "processes see, or one per process: Tiers(shared=False)"
        )
    local = Root.open(stage.steps, item=orders.item, read_only=True)
    client = ReplicationClient(stage, local, journal, options, holder=orders.holder)
    return StagedRoot(stage, local, journal, orders, options, client, processes=processes)


def _extents(
    tiers: Tiers, process: int, opened: contextlib.ExitStack, taking: Callable[[], None]
) -> ExtentFile | None:
    """The extents of a process; closes another manager of it only if that uses the same."""
    if tiers.extents is None:
        return None
    folder = posix.user_path(tiers.extents.directory)
    open_file = functools.partial(
        ExtentFile,
        folder if tiers.shared else folder / f"process-{process}",
        nbytes=tiers.extents.nbytes,
        extent_bytes=tiers.extents.extent_bytes,
    )
    try:
        found = open_file()
    except InUse:
        taking()
        found = open_file()
    opened.callback(found.close)
    return found


def _finder(url: str, item: str, tiers: Tiers, claim: LeaseClaim) -> FindPeers | None:
    """A function that finds the requested peers through Ray, imported only on use."""
    how = tiers.peers
    if how is None:
        return None
    holder = f"{claim.lease.epoch:020}.{claim.lease.holder}"

    def find(earlier: PeerGroup | None) -> PeerGroup:
        discovery = importlib.import_module(_DISCOVERY)
        return discovery.peer_group(url, item, how, holder, earlier=earlier)

    return find


def _orders(
    old: Orders | None,
    local: Root,
    url: str,
    claim: LeaseClaim,
    options: ManagerOptions,
    process: int,
    processes: int,
    recovered: Recovered,
) -> Orders:
    """The first orders under a claim, including unfinished earlier ones."""
    tiers, number = options.tiers or Tiers(), 1 if old is None else old.number + 1
    lines = [*recovered.lines, *(() if old is None else old.lines)]
    rolled_back = list(() if old is None else old.rolled_back)
    if recovered.left:
        # Ordered before the recovered save was made, by orders that are lost.
        after = min(one.step for one in recovered.left) - 1
        run = recovered.lines[-1].run
        rolled_back.append(RollBack(number=number, after=after, run=run, saves=recovered.left))
    return Orders(
        number=number,
        # If the leases of the staging directory were removed, their epochs begin again.
        lease=max(local.epoch, 0 if old is None else old.lease + 1),
        stage=uuid.uuid4().hex if old is None else old.stage,
        url=url,
        endpoint=tiers.endpoint,
        item=local.item,
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
    stage: StagingDir, local: Root, state: State, processes: int, old: Orders | None
) -> Orders | None:
    """Moves parts of jobs of another size aside; returns the orders that are still valid."""
    aside = stage.aside(f"parts-{uuid.uuid4().hex[:8]}")
    moved: dict[int, SaveId] = {}
    for step, info in sorted(local.saves().items(), reverse=True):
        if info is None or state.was_committed(info.save_id):
            continue
        if stored_saves.read_save(local.at(step), local.item).head.process_count != processes:
            local.set_aside(step, aside / str(step))
            moved[step] = info.save_id
    if moved:
        events.warn(
            f"{stage.path}: expected parts of saves of {processes} processes, found steps "
            f"{sorted(moved)} of a job with another number of processes, which were not uploaded; "
            f"they were moved to {aside}"
        )
    return None if old is None else old.without(moved.values())


def _stage_of(where: str | os.PathLike[str], tiers: Tiers, process: int) -> StagingDir:
    if tiers.staging_dir is None:
        url = buckets.locate(where, endpoint=tiers.endpoint).url
        path = default_stage(url, tiers.endpoint)
    elif (path := buckets.file_path(tiers.staging_dir)) is None:
        raise OptionError(
            "Tiers.staging_dir: expected a local directory, found "
            f"{redaction.shown(tiers.staging_dir)}; set a local path"
        )
    path = path.absolute()
    return StagingDir(path if tiers.shared else path / f"process-{process}")


def _reconciled_orders(
    stage: StagingDir, local: Root, old: Orders | None, state: State
) -> Orders | None:
    """Updates a staging directory to remote changes; returns the old orders if still valid."""
    if old is None:
        return None
    if _is_of_another_root(old, state):
        expected = "the checkpoint directory that it was last used for, found another one"
    elif _continued_elsewhere(old, state):
        expected = "that no other trainer ran since it was last used, found that one did"
    else:
        done = stage.progress(old.holder)
        return dataclasses.replace(
            old,
            rolled_back=tuple(one for one in old.rolled_back if one.number > done.orders),
            retired=tuple(one for one in old.retired if one.number > done.retired),
        )
    _move_aside(stage, local, old, state, expected)
    return dataclasses.replace(old, rolled_back=(), retired=())


def _drop_what_was_at_the_root(stage: StagingDir, local: Root, state: State) -> None:
    """Removes staged steps that were retired remotely, or are unreadable but uploaded."""
    for step, info in local.saves().items():
        at_root = state.steps.get(step)
        if info is None:
            if at_root is not None:
                local.set_aside(step, stage.aside("damaged") / uuid.uuid4().hex)
            continue
        is_at_root = at_root is not None and at_root.save_id == info.save_id
        if not is_at_root and state.was_committed(info.save_id):
            local.remove_steps([step])  # It was uploaded and has been retired remotely.


def _is_of_another_root(old: Orders, state: State) -> bool:
    """Whether the remote directory is another one: its journal lacks the old claim."""
    holders = {one.lease.epoch: one.lease.holder for one in state.entry.claims}
    if not old.holder or old.epoch < min(holders):
        return False  # Never used, or superseded by more trainers than the journal remembers.
    return holders.get(old.epoch) != old.holder


def _move_aside(stage: StagingDir, local: Root, old: Orders, state: State, expected: str) -> None:
    stale: list[int] = []
    aside = stage.aside(f"epoch-{old.epoch}-{uuid.uuid4().hex[:8]}")
    for step, info in sorted(local.saves().items(), reverse=True):
        if info is None or not state.was_committed(info.save_id):
            local.set_aside(step, aside / str(step))
            stale.append(step)
    if stale:
        events.warn(
            f"{stage.path}: expected {expected}; steps {sorted(stale)}, which are not at "
            f"{old.url}, were moved to {aside}"
        )
    if moved := _move_logs_aside(stage, local.path / naming.LOG, state, aside / naming.LOG):
        events.warn(
            f"{stage.path}: expected {expected}; the WAL of epochs {moved}, which {old.url} does "
            f"not hold, was moved to {aside / naming.LOG}"
        )


def _move_logs_aside(stage: StagingDir, log: Path, state: State, aside: Path) -> list[int]:
    """Moves WAL epochs aside whose headers were not uploaded; returns their numbers."""
    at_root = {(one.epoch, one.run) for one in state.entry.logs}
    logs, moved = WalReader(store_path(log)), list[int]()
    for number in logs.numbers():
        try:
            is_at_root = (number, logs.head(number).run) in at_root
        except Damaged:
            is_at_root = False
        if not is_at_root:
            # After a kill between the two, the next process that opens the directory moves the
            # rest.
            for name in (naming.epoch_name(number), str(number)):
                if (log / name).exists():
                    DurableDir(stage.path, fsync=False).publish(log / name, aside / name)
            moved.append(number)
    return sorted(moved)


def _continued_elsewhere(old: Orders, state: State) -> bool:
    """Returns whether another lineage advanced the remote since this one last held the lease."""
    claims = [one for one in state.entry.claims if one.lease.epoch > old.epoch]
    # A claim under which training never began supersedes nothing. If there were more claims than
    # the journal remembers, one is assumed to have begun.
    is_elsewhere = any(one.began and old.stage not in one.stages for one in claims)
    return is_elsewhere or len(claims) == MOST_CLAIMS
