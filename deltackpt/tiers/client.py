# SPDX-License-Identifier: Apache-2.0
"""A manager's connection to the replicas of its staging directory.

The thread that commits a save to the staging directory also writes it to the extents, so waiting
for the save includes that. It is dropped from the extents when space is needed and it was uploaded,
or at once on a rollback. The replicator process uploads saves and pushes them to peers; here, peers
are only read, if something is missing in the staging directory. Its progress is read from the
staging directory; only a recovery, and a search for new peers, send requests.
"""

from __future__ import annotations

import contextlib
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
from deltackpt.reading import saves
from deltackpt.storage import files
from deltackpt.tiers import packing, recall
from deltackpt.tiers.extents import ExtentFile
from deltackpt.tiers.keepers import Keepers
from deltackpt.tiers.neighbours import Neighbours
from deltackpt.tiers.packing import FilePack, Holder
from deltackpt.tiers.recall import Recalled
from deltackpt.tiers.running import Running
from deltackpt.tiers.stage import Orders, Progress, Stage, Tier, key_of, step_of

#: Seconds between two polls of the replicator's progress while a caller waits.
_POLL_SECS = 0.02
#: Seconds between two searches for peers.
_FIND_SECS = 2.0
#: Finds peers, given those found before.
FindPeers = Callable[[Keepers | None], Keepers]


class ReplicationClient:
    """The replicas of one staging directory; used by the saving and by the training thread."""

    def __init__(
        self,
        stage: Stage,
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
        """Finds the peers.

        Args:
          stage: the staging directory.
          local: its checkpoint directory.
          journal: journal of the remote directory, as far as known.
          options: the user's options.
          holder: holder of the claim under which the replicator runs.
          part: the process, if several have a staging directory each.
          parts: the number of such processes.
          extents: the trainer's extents.
          find_peers: finds peer nodes; called now, and when peers do not answer the replicator.
        """
        self._stage = stage
        self._local = local
        self._journal = journal
        self._tiers = options.tiers or Tiers()
        self._fsync = options.writes.durability == "power"
        self._holder = holder
        self._part, self._parts = part, parts
        #: Whether another process of the job owns the replicator.
        self._is_beside = local.epoch == 0
        self._running = Running(stage, cpus=options.background.cpus)
        #: Serializes starting the replicator.
        self._starting = threading.Lock()
        self._warnings: list[str] = []
        self._given_up = threading.Event()
        self._extents = extents
        self._find = find_peers
        self._keepers: Keepers | None = None
        self._neighbours: Neighbours | None = None
        self._found_at = 0.0
        #: The source of each recovered save.
        self._where: dict[SaveId, str] = {}
        #: Errors of saves that are held but could not be recovered, by step.
        self.unusable: Mapping[int, RestoreError] = {}
        #: Size of the newest delta in the extents, in bytes.
        self._delta_bytes = 0
        #: Whether the trainer has started; before, the replicator serves the previous one.
        self._is_confirmed = False
        #: Bytes of the staged saves, by ``key_of``.
        self._sizes: dict[str, int] = {}
        self._told_uploads = 0
        self._told_damaged: set[str] = set()
        #: Operations whose problem was reported and persists.
        self._told_problems: set[str] = set()
        self._raised: set[str] = set()
        if find_peers is not None:
            self._connect(find_peers(None))

    # ---- the replicator

    def confirm(self) -> None:
        """Passes the peers to the replicator: the trainer has started.

        Raises:
          StorageError: writing failed.
        """
        self._is_confirmed = True
        self._stage.note_keepers(None if self._keepers is None else self._keepers.to_bytes())

    def start(self) -> None:
        """Starts the replicator unless it is running.

        Raises:
          StorageError: it failed to start.
        """
        if not self._is_beside:
            with self._starting:
                if (warning := self._running.start()) is not None:
                    self._warnings.append(warning)

    def wake(self) -> None:
        """Notifies the replicator of new work."""
        self._running.wake()

    def look(self) -> None:
        """Notifies the replicator of another change; a caller may still be waiting."""
        self._running.look()

    def hurry(self) -> None:
        """Notifies the replicator that a caller is waiting, until the next ``wake``."""
        self._running.hurry()

    def require_claim(self) -> None:
        """Checks that no other trainer has taken the remote directory.

        Raises:
          FencedError: the replicator found that another trainer has taken it.
        """
        if (fenced := self.progress().fenced) is not None:
            raise FencedError(fenced)

    def go_on(self, deadline: float | None = None) -> bool:
        """Waits a moment for the replicator, which is restarted if necessary.

        Returns:
          Whether to continue: until the deadline, or by default until ``give_up``.

        Raises:
          FencedError: another trainer has taken over.
        """
        self._local.check_held()
        self.require_claim()
        self.start()
        if deadline is None:
            return not self._given_up.wait(_POLL_SECS)
        time.sleep(_POLL_SECS)
        return time.monotonic() < deadline

    def give_up(self) -> None:
        """Ends waiting for room, because the manager is closed."""
        self._given_up.set()

    def close(self) -> None:
        """Closes all replicas; the replicator continues until nothing is left."""
        self._running.close()
        for holder in self._holders:
            holder.close()

    # ---- what has reached the tiers

    def progress(self, tier: Tier = "remote") -> Progress:
        """Returns the replicator's last report on a tier."""
        return self._stage.progress(self._holder, tier)

    def is_uploaded(self, save_id: SaveId, progress: Progress | None = None) -> bool:
        """Returns whether a save was ever committed remotely."""
        return (progress or self.progress()).has(save_id) or self._journal.known.held(save_id)

    def lag(self, tier: Tier = "remote") -> dict[int, int]:
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
                    self._sizes[key] = files.tree_bytes(self._local.path / str(step))
                found[step] = self._sizes[key]
        return found

    def _is_unreadable(self, step: int, progress: Progress) -> bool:
        """Whether the replicator cannot identify a step's save, although it is known here."""
        if key_of(step, None) not in progress.damaged:
            return False
        try:
            saves.read_info(self._local.at(step), self._local.item)
        except RestoreError:
            return True
        return False  # Another save has taken its place.

    def wait(self, tier: Tier, timeout_secs: float) -> None:
        """Waits until every staged save has reached a tier.

        Raises:
          WaitTimeout: the timeout expired; nothing is lost.
          FencedError: another trainer has taken over.
        """
        deadline = time.monotonic() + timeout_secs
        if tier == "remote":
            self.hurry()
        while behind := self.lag(tier):
            self._find_peers()
            if not self.go_on(deadline):
                problem = self.progress(tier).problem or self._running.ended
                raise WaitTimeout(
                    f"{self._journal.root}: expected every save to reach tier {tier!r} within "
                    f"{timeout_secs} s (ManagerOptions.timeouts), found {len(behind)} saves of "
                    f"{sum(behind.values()):,} bytes only in the staging directory "
                    f"{self._stage.path}{f', because {problem}' if problem else ''}; the uploader "
                    "continues: call wait_until_finished() again, or check the network"
                )

    def check_damaged(self, tier: Tier) -> None:
        """Raises the reason why a save cannot reach a tier, once for each such save.

        Raises:
          SaveFailed: a save cannot reach the tier.
        """
        damaged = self.progress(tier).damaged
        # The oldest first, so that all processes name the same one; later ones may follow from it.
        for key in _oldest_first(damaged.keys() - self._raised):
            self._raised.add(key)
            where = str(self._journal.root) if tier == "remote" else "peers"
            raise SaveFailed(
                f"a staged save cannot reach {where}: {damaged[key]}; the next save is a base"
            )

    def make_room(self, nbytes: int) -> str | None:
        """Waits until there is room for a save in the staging directory; see ``Held``."""
        most = self._tiers.max_staging_bytes
        while (behind := sum(self.lag().values())) and behind + nbytes > most:
            if not self.go_on():
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

    def news(self) -> list[Event]:
        """Returns the events since the last call; emits warnings about the replicator."""
        with self._starting:
            warnings, self._warnings = self._warnings, []
        for text in warnings:
            events.warn(text)
        progress, found = self.progress(), list[Event]()
        new = [one for one in progress.recent if one.number > self._told_uploads]
        behind = self.lag() if new else {}
        for one in new:
            self._told_uploads = one.number
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
        for key in _oldest_first(progress.damaged.keys() - self._told_damaged):
            self._told_damaged.add(key)
            message = progress.damaged[key]
            found.append(self._failure("upload", Damaged.code, message, step_of(key), 0.0))
        problems: list[tuple[Operation, Progress]]
        problems = [("upload", progress), ("push", self.progress("peers"))]
        for operation, told in problems:
            if told.problem is None:
                self._told_problems.discard(operation)
            elif operation not in self._told_problems:
                self._told_problems.add(operation)
                secs = max(0.0, time.time() - told.problem_unix_secs)
                found.append(self._failure(operation, told.code, told.problem, None, secs))
        return found

    def _failure(
        self, operation: Operation, code: str, message: str, step: int | None, seconds: float
    ) -> FailureEvent:
        return FailureEvent(
            step=step,
            process=self._part,
            operation=operation,
            code=code,
            message=message,
            seconds=seconds,
        )

    # ---- extents and peers

    @property
    def _holders(self) -> list[Holder]:
        """The nearest first."""
        found: list[Holder | None] = [self._extents, self._neighbours]
        return [one for one in found if one is not None]

    def _find_peers(self) -> None:
        """Searches for new or restarted peers if they do not accept pushes; rate-limited."""
        is_due = time.monotonic() - self._found_at > _FIND_SECS
        if self._find is not None and is_due and self.progress("peers").problem is not None:
            with contextlib.suppress(DeltackptError):  # The problem persists and has been reported.
                self._connect(self._find(self._keepers))

    def _connect(self, keepers: Keepers) -> None:
        self._found_at = time.monotonic()
        if keepers == self._keepers:
            return
        if self._is_confirmed:
            self._stage.note_keepers(keepers.to_bytes())  # If this fails, the next search retries.
        if self._neighbours is not None:
            self._neighbours.close()
        self._keepers, self._neighbours = keepers, Neighbours(keepers)
        if self._is_confirmed:
            self.look()

    def recall(self, root: str, old: Orders | None) -> Recalled:
        """Recovers the saves that count; see ``recall.recall``.

        Raises:
          OptionError: a replica belongs to another checkpoint directory, or there are too few
            peers.
        """
        found, state = Recalled({}, (), (), {}), self._journal.known
        if self._holders:
            found = recall.recall(
                self._stage,
                self._local,
                self._holders,
                root,
                state,
                old,
                part=self._part,
                parts=self._parts,
                fsync=self._fsync,
            )
        self._where |= found.where
        self.unusable = found.unusable
        if self._keepers is not None and self._neighbours is not None:
            if silent := self._neighbours.silent():
                events.warn(
                    f"peers: expected an answer from all nodes, found none from {silent}; saves "
                    "that only they hold are left there, and training continues without them"
                )
            self._warn_of_lost(self._neighbours)
            self._keepers.require_nodes()  # The remaining nodes were asked before.
        return found

    def _warn_of_lost(self, neighbours: Neighbours) -> None:
        """Warns about each save that too few nodes are left to recover."""
        here = {info.save_id for info in self._local.saves().values() if info is not None}
        for name, label in packing.newest_first(neighbours.incomplete()):
            if name.part != self._part or name.save_id in here:
                continue
            if not self._journal.known.held(name.save_id):
                try:
                    with neighbours.reading(label):
                        pass
                except StorageError as error:
                    events.warn(f"step {name.step} cannot be recovered: {error}")

    def recover(self, wanted: Iterable[SaveId]) -> None:
        """Brings saves into the staging directory from replicas nearer than the remote one."""
        missing = [*wanted] if self._holders else []
        if not missing:
            return
        offers = recall.offered(self._holders, self._part)
        held = {name.save_id for name, _ in offers}
        for save_id in missing:
            if save_id in held:
                holder = recall.bring(self._local, save_id, offers, fsync=self._fsync)
                if holder is not None:
                    self._where[save_id] = holder

    def held(self) -> set[SaveId]:
        """Returns the recoverable saves, as far as is known without reading them."""
        return {name.save_id for name, _ in recall.offered(self._holders, self._part)}

    def source_of(self, save_id: SaveId) -> str:
        """Returns where a staged save was recovered from.

        The staging directory if it was made there.
        """
        return self._where.get(save_id, "staging")

    def committed(self, orders: Orders) -> None:
        """Replicates the newest staged save, and older ones that failed before.

        Raises:
          OptionError: the extents are too small for such saves.
          Damaged: a save's bytes differ from those written.
          StorageError: writing to the extents failed, or they stay full until ``give_up``.
        """
        self.start()
        self.wake()
        self._find_peers()
        extents = self._extents
        known = [info for info in self._local.saves().values() if info is not None]
        if extents is None or not known:
            return
        held = {packing.save_of(label) for label in extents.labels()}
        *older, newest = sorted(known, key=lambda one: one.save_id.step)
        for info in (*(one for one in older if not self._may_go(one.save_id)), newest):
            if info.save_id in held:
                continue
            pack = packing.pack_of(self._stage, info.save_id, self._local.item, orders)
            if info.parent is None:
                extents.require_room(pack.label.nbytes, self._delta_bytes)
            else:
                self._delta_bytes = pack.label.nbytes
            self._hold(extents, pack)

    def _hold(self, extents: ExtentFile, pack: FilePack) -> None:
        """Writes a save to the extents; drops the oldest that may be dropped if they are full."""
        while True:
            try:
                extents.hold(pack)
                return
            except OutOfSpace:
                oldest_first = reversed(packing.newest_first(extents.labels()))
                gone = (label for name, label in oldest_first if self._may_go(name.save_id))
                if (label := next(gone, None)) is not None:
                    extents.drop([label])
                elif not self.go_on():
                    raise StorageError(
                        f"{self._stage.path}: expected room in Tiers.extents for a save, found "
                        f"only saves that were not uploaded to {self._journal.root} yet when the "
                        "manager was closed; the uploader continues, save again later"
                    ) from None

    def _may_go(self, save_id: SaveId) -> bool:
        """Whether the extents may drop a save to make room.

        It was uploaded, can never be, or was removed deliberately.
        """
        infos = self._local.saves()
        info = infos.get(save_id.step)
        if info is None or info.save_id != save_id:
            # A save with an unreadable manifest may be this one.
            return info is not None or save_id.step not in infos
        progress = self.progress()
        is_damaged = key_of(save_id.step, save_id) in progress.damaged
        return is_damaged or self.is_uploaded(save_id, progress)

    def forget(self, save_ids: Collection[SaveId]) -> None:
        """Drops rolled-back saves from the extents durably.

        Peers drop everything that is not staged.

        Raises:
          StorageError: the extents reported an error.
        """
        if self._extents is not None and save_ids:
            labels = self._extents.labels()
            self._extents.drop([one for one in labels if packing.save_of(one) in save_ids])


def _oldest_first(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: (step_of(key), key))
