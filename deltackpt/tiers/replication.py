# SPDX-License-Identifier: Apache-2.0
"""A manager's connection to the tiers of its staging directory.

The thread that commits a save to the staging directory also writes it to the extents, so waiting
for the save includes that. It is deleted from the extents when space is needed and it was uploaded,
or at once on a rollback. Only a recovery, and a search for new peers, send requests.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from deltackpt import events
from deltackpt.errors import (
    Damaged,
    DeltackptError,
    FencedError,
    OutOfSpace,
    RestoreError,
    SaveFailed,
    StorageError,
    WaitTimeout,
)
from deltackpt.events import Event, FailureEvent, Operation, UploadEvent
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.view import JournalView
from deltackpt.options import ManagerOptions, Tiers
from deltackpt.reading import stored_saves
from deltackpt.storage import posix
from deltackpt.tiers import bundles, recovery
from deltackpt.tiers.bundles import StagedBundle, Tier
from deltackpt.tiers.cursor import HURRY, LOOK
from deltackpt.tiers.extent_store import ExtentFile
from deltackpt.tiers.peers import PeerGroup, PeerTier
from deltackpt.tiers.recovery import Recovered
from deltackpt.tiers.replicator import ReplicatorProcess
from deltackpt.tiers.staging import Orders, StagingDir, TierName, TierProgress, key_of, step_of

#: Seconds between two polls of the replicator's progress while a caller waits.
_POLL_SECS = 0.02
#: Seconds between two searches for peers.
_FIND_SECS = 2.0
#: Finds peers, given those found before.
FindPeers = Callable[[PeerGroup | None], PeerGroup]


class ReplicationClient:
    """The tiers of one staging directory; used by the saving and by the training thread."""

    def __init__(
        self,
        stage: StagingDir,
        local: Root,
        journal: JournalView,
        options: ManagerOptions,
        *,
        holder: str,
        part: int = 0,
        parts: int = 1,
        extents: ExtentFile | None = None,
        find_peers: FindPeers | None = None,
    ):
        """Finds the peers, and again whenever they do not answer the replicator."""
        self.process = ReplicatorProcess(stage, cpus=options.background.cpus)
        #: Errors of saves that a tier has but that could not be recovered, by step.
        self.unusable: Mapping[int, RestoreError] = {}
        self._stage, self._local, self._journal = stage, local, journal
        self._tiers = options.tiers or Tiers()
        self._fsync = options.writes.durability == "power"
        self._holder, self._part, self._parts = holder, part, parts
        self._stopped_waiting = threading.Event()
        self._extents, self._peers = extents, None
        self._find, self._group = find_peers, None
        self._found_at = 0.0
        #: The tier from which each save was recovered.
        self._sources: dict[SaveId, str] = {}
        #: Size of the newest delta in the extents, in bytes.
        self._delta_bytes = 0
        #: Whether the trainer has started; before, the replicator serves the previous one.
        self._is_confirmed = False
        #: Bytes of the staged saves, by ``key_of``.
        self._sizes: dict[str, int] = {}
        #: What was reported: the number of uploads, damaged saves, problems that persist.
        self._reported_uploads = 0
        self._reported_damaged: set[str] = set()
        self._reported_problems: set[str] = set()
        self._raised: set[str] = set()
        if find_peers is not None:
            self._connect(find_peers(None))

    # ---- the replicator

    def confirm(self) -> None:
        """Passes the peers to the replicator: the trainer has started."""
        self._is_confirmed = True
        self._stage.note_peers(None if self._group is None else self._group.to_bytes())

    def start(self) -> None:
        """Starts the replicator unless it is running, or another process of the job owns it."""
        if self._local.epoch:
            self.process.start()

    def require_claim(self) -> None:
        """Raises FencedError if the replicator has found another trainer there."""
        if (fenced := self.progress().fenced) is not None:
            raise FencedError(fenced)

    def keep_waiting(self, deadline: float | None = None) -> bool:
        """Waits a moment; returns whether to continue, by default until ``stop_waiting``."""
        self._local.check_held()
        self.require_claim()
        self.start()
        if deadline is None:
            return not self._stopped_waiting.wait(_POLL_SECS)
        time.sleep(_POLL_SECS)
        return time.monotonic() < deadline

    def stop_waiting(self) -> None:
        """Ends waiting for room, because the manager is closed."""
        self._stopped_waiting.set()

    def close(self) -> None:
        """Closes all tiers; the replicator continues until nothing is left."""
        self.process.close()
        for tier in self._near:
            tier.close()

    # ---- what has reached the tiers

    def progress(self, tier: TierName = "remote") -> TierProgress:
        """Returns the replicator's last report on a tier."""
        return self._stage.progress(self._holder, tier)

    def is_uploaded(self, save_id: SaveId, progress: TierProgress | None = None) -> bool:
        """Returns whether a save was ever committed remotely."""
        return (progress or self.progress()).has(save_id) or self._journal.known.was_committed(
            save_id
        )

    def lag(self, tier: TierName = "remote") -> dict[int, int]:
        """Returns the staged steps that have reached neither a tier nor a later one, with bytes."""
        progress, found = self.progress(tier), dict[int, int]()
        uploaded = progress if tier == "remote" else self.progress()
        for step, info in self._local.saves().items():
            key = key_of(step, info and info.save_id)
            if key in progress.damaged or self._is_unreadable(step, progress):
                continue
            if info is None:
                has_reached = step in self._journal.known.steps
            else:
                has_reached = progress.has(info.save_id) or self.is_uploaded(info.save_id, uploaded)
            if not has_reached:
                if key not in self._sizes:
                    self._sizes[key] = posix.tree_bytes(self._local.path / str(step))
                found[step] = self._sizes[key]
        return found

    def _is_unreadable(self, step: int, progress: TierProgress) -> bool:
        """Whether the replicator cannot identify a step's save, although it is known here."""
        if key_of(step, None) not in progress.damaged:
            return False
        try:
            stored_saves.read_info(self._local.at(step), self._local.item)
        except RestoreError:
            return True
        return False  # Another save has taken its place.

    def wait(self, tier: TierName, timeout_secs: float) -> None:
        """Waits until every staged save has reached a tier; a WaitTimeout loses nothing."""
        deadline = time.monotonic() + timeout_secs
        if tier == "remote":
            self.process.wake(HURRY)
        while behind := self.lag(tier):
            self._find_peers()
            if not self.keep_waiting(deadline):
                problem = self.progress(tier).problem or self.process.ended
                raise WaitTimeout(
                    f"{self._journal.root}: expected every save to reach tier {tier!r} within "
                    f"{timeout_secs} s (ManagerOptions.timeouts), found {len(behind)} saves of "
                    f"{sum(behind.values()):,} bytes only in the staging directory "
                    f"{self._stage.path}{f', because {problem}' if problem else ''}; the uploader "
                    "continues: call wait_until_finished() again, or check the network"
                )

    def check_damaged(self, tier: TierName) -> None:
        """Raises SaveFailed once for each save that cannot reach a tier."""
        damaged = self.progress(tier).damaged
        # The oldest first, so that all processes name the same one; later ones may follow from it.
        for key in _oldest_first(damaged.keys() - self._raised):
            self._raised.add(key)
            where = str(self._journal.root) if tier == "remote" else "peers"
            raise SaveFailed(
                f"a staged save cannot reach {where}: {damaged[key]}; the next save is a base"
            )

    def make_room(self, nbytes: int) -> str | None:
        """Waits until there is room for a save in the staging directory; see ``WritableRoot``."""
        most = self._tiers.max_staging_bytes
        while (behind := sum(self.lag().values())) and behind + nbytes > most:
            if not self.keep_waiting():
                raise StorageError(
                    f"{self._stage.path}: expected room for a save of {nbytes:,} bytes in addition "
                    f"to {behind:,} that are not uploaded to {self._journal.root} yet "
                    f"(Tiers.max_staging_bytes={most:,}), found none when the manager was "
                    "closed; the uploader continues, save again later"
                )
        if nbytes <= most:
            return None
        return (
            f"a save of {nbytes:,} bytes exceeds Tiers.max_staging_bytes={most:,}; it was staged "
            "alone"
        )

    def poll_events(self) -> list[Event]:
        """Returns the events since the last call; emits warnings about the replicator."""
        while self.process.warnings:
            events.warn(self.process.warnings.pop(0))
        progress, found = self.progress(), list[Event]()
        failure = functools.partial(FailureEvent, process=self._part)
        new = [one for one in progress.recent if one.number > self._reported_uploads]
        behind = self.lag() if new else {}
        for one in new:
            self._reported_uploads = one.number
            found.append(
                UploadEvent(
                    step=one.save_id.step,
                    process=self._part,
                    bytes_sent=one.nbytes,
                    objects=one.objects,
                    seconds=one.seconds,
                    lag_secs=one.lag_secs,
                    committed_unix_secs=one.committed_unix_secs,
                    waiting=len(behind),
                    waiting_bytes=sum(behind.values()),
                )
            )
        for key in _oldest_first(progress.damaged.keys() - self._reported_damaged):
            self._reported_damaged.add(key)
            found.append(
                failure(
                    step=step_of(key),
                    operation="upload",
                    code=Damaged.code,
                    message=progress.damaged[key],
                    seconds=0.0,
                )
            )
        tiers: list[tuple[Operation, TierProgress]]
        tiers = [("upload", progress), ("push", self.progress("peers"))]
        for operation, tier in tiers:
            if tier.problem is None:
                self._reported_problems.discard(operation)
            elif operation not in self._reported_problems:
                self._reported_problems.add(operation)
                found.append(
                    failure(
                        step=None,
                        operation=operation,
                        code=tier.code,
                        message=tier.problem,
                        seconds=max(0.0, time.time() - tier.problem_unix_secs),
                    )
                )
        return found

    # ---- extents and peers

    @property
    def _near(self) -> list[Tier]:
        """The tiers that hold bundles, the nearest first."""
        found: list[Tier | None] = [self._extents, self._peers]
        return [one for one in found if one is not None]

    def _find_peers(self) -> None:
        """Searches for new or restarted peers if they do not accept pushes; rate-limited."""
        is_due = time.monotonic() - self._found_at > _FIND_SECS
        if self._find is not None and is_due and self.progress("peers").problem is not None:
            with contextlib.suppress(DeltackptError):  # The problem persists and has been reported.
                self._connect(self._find(self._group))

    def _connect(self, group: PeerGroup) -> None:
        self._found_at = time.monotonic()
        if group == self._group:
            return
        if self._is_confirmed:
            self._stage.note_peers(group.to_bytes())  # If this fails, the next search retries.
        if self._peers is not None:
            self._peers.close()
        self._group, self._peers = group, PeerTier(group)
        if self._is_confirmed:
            self.process.wake(LOOK)

    def recover(self, root: str, old: Orders | None) -> Recovered:
        """See ``recovery.recover``; also raises OptionError if there are too few peers."""
        found = Recovered({}, (), (), {})
        if self._near:
            found = recovery.recover(
                self._stage,
                self._local,
                self._near,
                root,
                self._journal.known,
                old,
                part=self._part,
                parts=self._parts,
                fsync=self._fsync,
            )
        self._sources |= found.sources
        self.unusable = found.unusable
        if self._group is not None and self._peers is not None:
            if silent := self._peers.silent():
                events.warn(
                    f"peers: expected an answer from all nodes, found none from {silent}; saves "
                    "that only they hold are left there, and training continues without them"
                )
            self._warn_of_lost(self._peers)
            self._group.require_nodes()  # The remaining nodes were asked before.
        return found

    def _warn_of_lost(self, peers: PeerTier) -> None:
        """Warns about each save that too few nodes are left to recover."""
        here = {info.save_id for info in self._local.saves().values() if info is not None}
        found = peers.survey()
        for name, ref in bundles.newest_first(found.every - found.whole):
            is_needed = name.save_id not in here and not self._journal.known.was_committed(
                name.save_id
            )
            if name.part == self._part and is_needed:
                try:
                    with peers.open(ref):
                        pass
                except StorageError as error:
                    events.warn(f"step {name.step} cannot be recovered: {error}")

    def fetch(self, save_ids: Collection[SaveId]) -> None:
        """Fetches saves into the staging directory from extents and peers, if they hold them."""
        offers = recovery.offered(self._near, self._part) if save_ids else []
        for save_id in save_ids:
            source = recovery.fetch(self._local, save_id, offers, fsync=self._fsync)
            if source is not None:
                self._sources[save_id] = source

    def recoverable(self) -> set[SaveId]:
        """Returns the recoverable saves, as far as is known without reading them."""
        return {one.name.save_id for one in recovery.offered(self._near, self._part)}

    def source_of(self, save_id: SaveId) -> str:
        """Returns where a staged save was recovered from: "staging" if it was made there."""
        return self._sources.get(save_id, "staging")

    def committed(self, orders: Orders) -> None:
        """Replicates staged saves; raises StorageError if the extents fail or stay full."""
        self.start()
        self.process.wake()
        self._find_peers()
        extents = self._extents
        known = [info for info in self._local.saves().values() if info is not None]
        if extents is None or not known:
            return
        held = {bundles.save_of(ref) for ref in extents.refs()}
        *older, newest = sorted(known, key=lambda one: one.save_id.step)
        for info in (*(one for one in older if not self._may_go(one.save_id)), newest):
            if info.save_id in held:
                continue
            bundle = bundles.staged_bundle(self._stage, info.save_id, self._local.item, orders)
            if info.parent is None:
                extents.require_room(bundle.ref.nbytes, self._delta_bytes)
            else:
                self._delta_bytes = bundle.ref.nbytes
            self._put(extents, bundle)

    def _put(self, extents: ExtentFile, bundle: StagedBundle) -> None:
        """Writes a save to the extents; deletes the oldest that may go if they are full."""
        while True:
            try:
                extents.put(bundle)
                return
            except OutOfSpace:
                oldest_first = reversed(bundles.newest_first(extents.refs()))
                gone = (ref for name, ref in oldest_first if self._may_go(name.save_id))
                if (ref := next(gone, None)) is not None:
                    extents.delete([ref])
                elif not self.keep_waiting():
                    raise StorageError(
                        f"{self._stage.path}: expected room in Tiers.extents for a save, found "
                        f"only saves that were not uploaded to {self._journal.root} yet when the "
                        "manager was closed; the uploader continues, save again later"
                    ) from None

    def _may_go(self, save_id: SaveId) -> bool:
        """Whether a save was uploaded, can never be, or was removed deliberately."""
        infos = self._local.saves()
        info = infos.get(save_id.step)
        if info is None or info.save_id != save_id:
            # A save with an unreadable manifest may be this one.
            return info is not None or save_id.step not in infos
        progress = self.progress()
        is_damaged = key_of(save_id.step, save_id) in progress.damaged
        return is_damaged or self.is_uploaded(save_id, progress)

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Deletes rolled-back saves from the extents durably; peers delete what is not staged."""
        if self._extents is not None and save_ids:
            refs = self._extents.refs()
            self._extents.delete([one for one in refs if bundles.save_of(one) in save_ids])


def _oldest_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: (step_of(key), key))
