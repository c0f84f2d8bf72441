# SPDX-License-Identifier: Apache-2.0
"""Starts replication: claims the remote checkpoint directory, and recovers local saves.

Saves that training rolled back or superseded must not return. The claims in the remote journal
record from where each trainer resumed, and orders and bundles record the lineage of each run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from deltackpt import events
from deltackpt.errors import Damaged, DeltackptError, InUse, OptionError
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.bucket_steps import BucketSteps, refuse_foreign
from deltackpt.ledger.directory import Root
from deltackpt.ledger.entries import MOST_CLAIMS, LeaseClaim, State
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.opening import find_item, open_steps
from deltackpt.ledger.steps import Steps
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import WalReader
from deltackpt.storage import buckets, posix, redaction
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path
from deltackpt.tiers.bundles import BundleManifest
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.local_replicas import LocalReplicas
from deltackpt.tiers.replication import FindPeers, ReplicationClient
from deltackpt.tiers.staging import (
    Orders,
    PeerGroup,
    Removal,
    RunLineage,
    StagingDir,
    check_stage,
    default_stage,
    rolled_back,
)
from deltackpt.tiers.wal_upload import WalUpload

#: Module that finds peers, imported only if ``Tiers.peers`` is set.
_DISCOVERY = "deltackpt.service.discovery"


def saves_to(where: str | os.PathLike[str], options: ManagerOptions, process: int) -> Path:
    """Returns the local directory in which a process's manager makes its saves."""
    return _stage_of(where, options.tiers or Tiers(), process).steps


def open_bucket(
    where: str | os.PathLike[str],
    *,
    item: str,
    options: ManagerOptions,
    writing: bool,
    process: int = 0,
    processes: int = 1,
    taking: Callable[[], None] = lambda: None,
) -> Steps | ReplicationClient:
    """Opens a bucket for reading, or with a local directory; a trainer takes the leases of both.

    The trainer must then call ``confirm`` or ``abandon``. Its claim is pending until then, and is
    withdrawn if a check fails, so a process that fails to open the directory does not fence a
    trainer. ``taking`` closes other managers of this process that use the same extents.
    """
    tiers, limit = options.tiers or Tiers(), options.timeouts.store_secs
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
    shard, shards = (0, 1) if tiers.shared else (process, processes)
    fsync = options.writes.durability == "power"
    if not writing and shards == 1:
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
        local = Root.open(stage.steps, item=item, confirmed=False)
        local.opened_dir = stage.path
        opened.callback(local.abandon)
        if claim is None:
            opened.callback(_withdraw, journal)
            claim = journal.claim(pending=True)
        if not local.has_rival:
            local.confirm()  # Leftovers may fill the file system.
        # While this trainer holds the lease, no other trainer's orders take force.
        old = check_stage(stage, place.url, tiers.endpoint)
        found = LocalReplicas(stage, local, extents, shard, shards, fsync=fsync)
        opened.callback(found.close)
        find = _finder(place.url, item, tiers, claim)
        peers = None if find is None else find(None)
        if peers is not None:
            found.connect(peers)
        first = Orders(
            number=1,
            lease=local.epoch,
            url=place.url,
            endpoint=tiers.endpoint,
            item=item,
            holder=claim.lease.holder,
            epoch=claim.lease.epoch,
            bytes_per_sec=tiers.bytes_per_sec,
            store_secs=limit,
            peers=peers,
            process=shard,
            processes=shards,
        )
        start = _Startup(stage, local, journal.known, first, found, writing, not tiers.shared)
        orders = start.run(old, WalUpload(stage, journal).upload_headers)
        if peers is not None:
            peers.require_nodes()  # The remaining nodes were asked before.
        stage.announce(orders)
        client = ReplicationClient(
            found, journal, options, orders, processes=processes, find_peers=find
        )
        client.failed_start_cleanup = opened.pop_all()
        return client


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
) -> ReplicationClient:
    """Opens the directories that the first process of the job has just opened."""
    claim = journal.state().claim
    orders = stage.announced()
    if orders is None or claim is None or orders.holder != claim.lease.holder:
        raise OptionError(
            f"Tiers.staging_dir={str(stage.path)!r}: expected the directory that process 0 opened, "
            f"found {'none' if orders is None else 'another one'}; use a directory that all "
            "processes see, or one per process: Tiers(shared=False)"
        )
    local = Root.open(stage.steps, item=orders.item, read_only=True)
    local.opened_dir = stage.path
    none = LocalReplicas(stage, local)
    return ReplicationClient(none, journal, options, orders, processes=processes)


def _extents(
    tiers: Tiers, process: int, opened: contextlib.ExitStack, taking: Callable[[], None]
) -> ExtentFile | None:
    """Opens a process's extents; ``taking`` closes its other managers if they use them."""
    if tiers.extents is None:
        return None
    folder = posix.user_path(tiers.extents.directory)
    if not tiers.shared:
        folder /= f"process-{process}"
    sizes = {"nbytes": tiers.extents.nbytes, "extent_bytes": tiers.extents.extent_bytes}
    try:
        found = ExtentFile(folder, **sizes)
    except InUse:
        taking()
        found = ExtentFile(folder, **sizes)
    opened.callback(found.close)
    return found


def _finder(url: str, item: str, tiers: Tiers, claim: LeaseClaim) -> FindPeers | None:
    """Returns a function that finds the requested peers through Ray, imported on first use."""
    how = tiers.peers
    if how is None:
        return None
    holder = f"{claim.lease.epoch:020}.{claim.lease.holder}"

    def find(earlier: PeerGroup | None) -> PeerGroup:
        discovery = importlib.import_module(_DISCOVERY)
        return discovery.peer_group(url, item, how, holder, earlier=earlier)

    return find


def classify(
    state: State, lineages: Sequence[RunLineage]
) -> Callable[[SaveId, RunLineage], str | None]:
    """Returns a function that explains why a save that was never uploaded is stale; pure.

    A save is stale if it belongs to a former directory at the URL. It is also stale if a later run,
    or a later trainer of the directory, does not descend from it, or if a save after a later
    rollback was uploaded. ``lineages`` include those of the saves.
    """
    by_run = {lineage.run: lineage for lineage in lineages}
    began = [claim for claim in state.entry.claims if claim.began]
    claimed = {claim.lease.epoch: claim.lease.holder for claim in state.entry.claims}
    #: The newest moment of an uploaded save that a rollback under its claim preceded.
    uploaded = max(
        (
            (claim.lease.epoch, claim.generations - 1)
            for claim in state.entry.claims
            if claim.generations > 1
        ),
        default=(0, 0),
    )
    #: Lineages with later descendants of any of their saves: earlier ones are irrelevant.
    living: list[RunLineage] = []

    def descends(resumed_from: SaveId | None, run: str, attempt: int) -> bool:
        """Returns whether a trainer that resumes from a save descends from an attempt of a run."""
        if resumed_from is None:
            return False
        if resumed_from.run == run:
            return attempt <= resumed_from.attempt
        lineage = by_run.get(resumed_from.run)
        return lineage is not None and attempt <= lineage.ancestors.get(run, -1)

    def reason_stale(lineage: RunLineage, attempt: int) -> str | None:
        if not claimed or lineage.epoch < min(claimed):
            return "its claim was superseded by more trainers than the journal records"
        if claimed.get(lineage.epoch) != lineage.holder:
            return "another checkpoint directory is at the URL now"
        # Uploads are in order: what that save descends from was uploaded before it.
        if lineage.moment < uploaded:
            return f"training continued without it (epoch {uploaded[0]}, generation {uploaded[1]})"
        for one in living:
            if one.moment > lineage.moment and attempt > one.ancestors.get(lineage.run, -1):
                moment = f"epoch {one.epoch}, generation {one.generation}"
                return f"training continued without it ({moment})"
        for claim in began:
            epoch = claim.lease.epoch
            if epoch > lineage.epoch and not descends(claim.resumed_from, lineage.run, attempt):
                return f"training continued without it (epoch {epoch})"
        return None

    for lineage in sorted(lineages, key=lambda lineage: lineage.moment, reverse=True):
        if reason_stale(lineage, 0) is None:
            living.append(lineage)
    return lambda save_id, lineage: reason_stale(lineage, save_id.attempt)


def unfinished_rollback(
    back: Sequence[BundleManifest], state: State, lineages: Sequence[RunLineage]
) -> tuple[SaveId, ...]:
    """Returns remote saves that a rollback should have removed but never did. Pure."""
    if not back:
        return ()
    newest = max(back, key=lambda one: (one.lineage.moment, one.save_id.step))
    done = {one.lease.epoch: one.generations for one in state.entry.claims}
    epoch, generation = newest.lineage.moment
    if generation < done.get(epoch, 0):
        return ()  # A save was uploaded after its run had rolled back others.
    by_run = {lineage.run: lineage for lineage in lineages}

    def is_in_lineage(save_id: SaveId) -> bool:
        if save_id.run == newest.save_id.run:
            return True
        after = by_run.get(save_id.run)
        return newest.lineage.has(save_id) or (after is not None and after.has(newest.save_id))

    steps = [one for one in state.catalog.values() if one.item is None]
    kept = max((one.step for one in steps if is_in_lineage(one.save_id)), default=-1)
    return tuple(
        one.save_id
        for one in steps
        if one.step > kept
        and not is_in_lineage(one.save_id)
        and (entries.prefix_epoch(one.prefix) or 0) <= epoch
    )


@dataclasses.dataclass
class _Startup:
    """Reconciles a local directory with the remote state and with its replicas."""

    stage: StagingDir
    local: Root
    state: State
    orders: Orders  # without what earlier ones leave to do
    replicas: LocalReplicas
    writing: bool
    no_shared_fs: bool

    def run(self, old: Orders | None, upload_headers: Callable[[], None]) -> Orders:
        """Moves superseded saves aside, recovers missing ones; returns the first orders."""
        elsewhere = self._elsewhere(old) if self.writing and old is not None else None
        if old is not None:
            done, counts = self.stage.progress(old.holder), self.writing and elsewhere is None
            # Only the first process orders removals.
            removals = old.pending(done, self.state) if counts else ()
            old = dataclasses.replace(old, removals=removals)
        found = self.replicas.manifests(self.orders.url)
        known = () if old is None else old.lineages
        lineages = (*(one.lineage for one in found), *known)
        why_stale = classify(self.state, lineages)
        # Earlier trainers of this directory have moved superseded saves aside already.
        is_behind = old is not None and any(
            one.lineage.moment > (old.epoch, old.generation) for one in found
        )
        self._leave_behind(known if is_behind else (), why_stale, elsewhere)
        if self.writing and self.orders.no_shared_fs:
            # The other processes do not see this directory: they read WAL headers remotely.
            upload_headers()
        removals = () if old is None else old.removals
        removed = {one.save_id for one in removals if one.run is None}

        def why_not(one: BundleManifest) -> str | None:
            is_removed = one.save_id in removed
            return "it was removed" if is_removed else why_stale(one.save_id, one.lineage)

        back = self.replicas.recover(found, self.state, why_not)
        old = None if old is None else old.without(self._lost(removals))
        return self._first_orders(old, back, unfinished_rollback(back, self.state, lineages))

    def _lost(self, removals: Sequence[Removal]) -> set[SaveId]:
        """Returns lost saves that removals wait for; these removals must not happen."""
        here = {info.save_id for info in self.local.saves().values() if info is not None}
        awaited = {one.after for one in removals if one.after is not None}
        return {one for one in awaited - here if not self.state.was_committed(one)}

    def _first_orders(
        self, old: Orders | None, back: Sequence[BundleManifest], left: tuple[SaveId, ...]
    ) -> Orders:
        """Returns the first orders under a claim, including unfinished earlier ones."""
        lineages = {one.lineage.run: one.lineage for one in back}
        orders = self.orders
        if old is not None:
            lineages |= {one.run: one for one in old.lineages}
            orders = dataclasses.replace(
                orders,
                number=old.number + 1,
                # If the leases of the directory were removed, their epochs begin again.
                lease=max(orders.lease, old.lease + 1),
                removals=old.removals,
            )
        removals = orders.removals
        if left:
            # Ordered before the recovered save was made, by orders that are lost.
            run = back[-1].lineage.run
            removals = (*removals, *rolled_back(left, orders.item, run, orders.number))
        return dataclasses.replace(orders, lineages=tuple(lineages.values()), removals=removals)

    def _elsewhere(self, old: Orders) -> str | None:
        """Returns why saves that were not uploaded are superseded, or None."""
        holders = {one.lease.epoch: one.lease.holder for one in self.state.entry.claims}
        # A directory that was never used, or that more trainers followed than the journal records.
        is_unknown = not old.holder or old.epoch < min(holders)
        if not is_unknown and holders.get(old.epoch) != old.holder:
            return "another checkpoint directory is at the URL now"
        # A claim under which training never began supersedes nothing. If there were more claims
        # than the journal records, one is assumed to have begun.
        later = [one for one in self.state.entry.claims if one.lease.epoch > old.epoch]
        if any(one.began for one in later) or len(later) == MOST_CLAIMS:
            return "training continued without it, in another staging directory"
        return None

    def _leave_behind(
        self,
        known: Sequence[RunLineage],
        why_stale: Callable[[SaveId, RunLineage], str | None],
        elsewhere: str | None,
    ) -> None:
        """Removes or moves aside superseded and damaged saves."""
        by_run, moved = {one.run: one for one in known}, dict[str, list[int]]()
        aside = self.stage.aside(f"left-{self.orders.epoch}-{uuid.uuid4().hex[:8]}")
        for step, info in sorted(self.local.saves().items(), reverse=True):
            why, uploaded = elsewhere, self.state.steps.get(step)
            if info is None and uploaded is not None:
                self.local.set_aside(step, self.stage.aside_damaged())
                continue
            if info is not None and self.state.was_committed(info.save_id):
                is_retired = uploaded is None or uploaded.save_id != info.save_id
                # With another process count, shards are read remotely: other nodes have some.
                if is_retired or self._why_no_shard(step) is not None:
                    self.local.remove_steps([step])
                continue
            if info is not None and why is None:
                if (run := by_run.get(info.save_id.run)) is not None:
                    why = why_stale(info.save_id, run)
                if why is None:
                    why = self._why_no_shard(step)
            if why is not None:
                self.local.set_aside(step, aside / str(step))
                moved.setdefault(why, []).append(step)
        for why, steps in moved.items():
            events.warn(
                f"{self.stage.path}: steps {sorted(steps)}, which are not at {self.orders.url}, "
                f"are superseded: {why}; they were moved to {aside}"
            )
        if elsewhere is not None and (epochs := self._move_wal_aside(aside / naming.LOG)):
            events.warn(
                f"{self.stage.path}: the WAL of epochs {epochs}, which {self.orders.url} does not "
                f"hold, is superseded: {elsewhere}; it was moved to {aside / naming.LOG}"
            )

    def _why_no_shard(self, step: int) -> str | None:
        if not self.no_shared_fs:
            return None
        count = stored_saves.read_save(self.local.at(step), self.local.item).head.process_count
        if count == self.orders.processes:
            return None
        return f"they are shards of saves of {count} processes, not {self.orders.processes}"

    def _move_wal_aside(self, aside: Path) -> list[int]:
        """Moves WAL epochs aside whose headers were not uploaded; returns their numbers."""
        log, moved = self.local.wal_dir, list[int]()
        uploaded = {(one.epoch, one.run) for one in self.state.entry.logs}
        epochs = WalReader(store_path(log))
        for number in epochs.numbers():
            with contextlib.suppress(Damaged):
                if (number, epochs.head(number).run) in uploaded:
                    continue
            # If a kill separates the two, the next start moves the second.
            for name in (naming.epoch_name(number), str(number)):
                if (log / name).exists():
                    DurableDir(self.stage.path, fsync=False).publish(log / name, aside / name)
            moved.append(number)
        return sorted(moved)


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
