# SPDX-License-Identifier: Apache-2.0
"""The local and remote steps of a replicated checkpoint directory.

A step in the local directory is read there. The journal lists the remote steps.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deltackpt import events
from deltackpt.errors import Damaged, RestoreError, StorageError, WaitTimeout
from deltackpt.format import chain, naming
from deltackpt.format.manifest import BaseRef, SaveId, SaveInfo
from deltackpt.ledger.bucket_steps import BucketSteps
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.entries import CatalogEntry, ObjectKey, State
from deltackpt.ledger.steps import local_folder
from deltackpt.ledger.uploaded_wal import UploadedWals
from deltackpt.reading import inventory
from deltackpt.reading.wal_locations import WalFolder, WalLocation, WalLocations
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import (
    DirIdentity,
    FileStore,
    Missing,
    ReadOnlyStore,
    Store,
    StorePath,
    store_path,
)
from deltackpt.tiers.cursor import HURRY
from deltackpt.tiers.staging import key_of

if TYPE_CHECKING:
    from deltackpt.tiers.replication import ReplicationClient

_T = TypeVar("_T")


class ReplicatedSteps(BucketSteps):
    """The local and remote steps of a ``ReplicationClient``."""

    def __init__(self, client: ReplicationClient, readable_secs: float):
        """``readable_secs`` limits ``await_readable``."""
        # Only the leading process, its uploader and a compactor change the remote directory, so
        # the leading process misses only the newest uploads and bases.
        remote = CommittedStore(
            client.journal, hidden=lambda: client.orders.hidden, refresh=not client.leads
        )
        local = FileStore(client.local.path)
        # Without a shared file system, the local directory has one shard of a step.
        store = remote if client.no_shared_fs else _NearestStore(local, remote)
        super().__init__(client.journal, client.local.item, store)
        self.given = client.orders.url
        self._client, self._local = client, client.local
        self._readable_secs = readable_secs
        #: Lock for evicting a step and for choosing one to read.
        self.leaving = threading.Lock()
        #: Number of readers of each step, which prevent its eviction.
        self.readers: collections.Counter[int] = collections.Counter()
        self._metadata: dict[SaveId, bytes] = {}

    @property
    def wal_location(self) -> WalLocation:
        """See ``Steps``; read remotely if a single local directory may lack shards of it."""
        uploaded = UploadedWals(self.journal.root, self._client.remote, self.topics)
        if self._client.no_shared_fs:
            return uploaded
        local = WalFolder(store_path(self._local.wal_dir), self.topics)
        return WalLocations([local, uploaded])

    def steps(self) -> list[int]:
        """See ``Steps``; only the leading process knows all remote steps without a request."""
        if not self._client.leads:
            self.journal.state()
        return [*self.saves()]

    def saves(self) -> dict[int, SaveInfo | None]:
        """See ``Steps``."""
        found: dict[int, SaveInfo | None] = {
            step: one.info for step, one in self.uploaded().items()
        }
        return found | {
            step: info
            for step, info in self._local.saves().items()
            if info is None or not self._is_removed(step, info.save_id)
        }

    def _is_removed(self, step: int, save_id: SaveId) -> bool:
        """Whether a local save does not count: a removed shard stays until it is uploaded."""
        if self._client.no_shared_fs and self.journal.known.was_committed(save_id):
            return True  # Unless ``uploaded`` has it.
        return (ObjectKey(step), save_id) in self._client.orders.hidden

    def known(self) -> dict[int, SaveInfo]:
        """Returns the saves with readable manifests."""
        return {step: info for step, info in self.saves().items() if info is not None}

    def uploaded(self) -> dict[int, CatalogEntry]:
        """Returns the remote steps."""
        steps = self.journal.known.steps
        return {step: one for step, one in steps.items() if self._is_shown(one)}

    def uploaded_bases(self) -> list[CatalogEntry]:
        """Returns the compacted bases, which are all remote."""
        bases = self.journal.known.bases.values()
        return [one for one in bases if one.item == self.item and self._is_shown(one)]

    def _is_shown(self, one: CatalogEntry) -> bool:
        return (one.object_key, one.save_id) not in self._client.orders.hidden

    def compacted(self) -> frozenset[SaveId]:
        """See ``Steps``."""
        return frozenset(one.save_id for one in self.uploaded_bases())

    def rolled_back(self) -> Iterator[SaveId]:
        """See ``Steps``."""
        return self._local.rolled_back()

    def exists(self, save_id: SaveId) -> bool:
        """Returns whether a save was uploaded; the answer is the same in every process."""
        hidden = self._client.orders.hidden

        def has(state: State) -> bool:
            return any(found == save_id for _, found in state.uploads - hidden)

        # The training thread asks: a request only if it is needed, since an outage may last.
        return has(self.journal.known) or has(self._client.remote())

    def base_of(self, save_id: SaveId) -> BaseRef | None:
        """Returns the compacted base of a save."""
        found = (one.info.nbytes for one in self.uploaded_bases() if one.save_id == save_id)
        nbytes = next(found, None)
        return None if nbytes is None else BaseRef(save_id=save_id, nbytes=nbytes)

    def metadata(self, step: int) -> bytes:
        """See ``Steps``; read once."""
        infos = self.known()
        if (info := infos.get(step)) is None:
            return super().metadata(step)
        known = self._metadata
        if (found := known.get(info.save_id)) is None:
            try:
                found = store_path(self._local.step_dir(step) / naming.STEP_METADATA).read()
            except (RestoreError, StorageError):
                found = super().metadata(step)
            ids = {one.save_id for one in infos.values()}
            # Without those of removed saves.
            self._metadata = {one: data for one, data in [*known.items()] if one in ids}
            self._metadata[info.save_id] = found
        return found

    def lost_steps(self) -> dict[int, Damaged]:
        """See ``Steps``: except local ones."""
        lost = super().lost_steps()
        local = self._local.saves() if lost else {}
        return {step: why for step, why in lost.items() if step not in local}

    def source_of(self, save_id: SaveId) -> str:
        """Returns where a save is read: the remote directory, unless there is a nearer copy."""
        info = None if self._client.no_shared_fs else self._local.saves().get(save_id.step)
        if info is None or info.save_id != save_id:
            return "directory"
        return self._client.replicas.sources.get(save_id, "staging")

    # ---- bringing steps back

    def await_readable(self, step: int) -> None:
        """See ``Steps``; fetches evicted saves from nearer tiers, or awaits the upload."""
        if self._client.no_shared_fs:
            self._await_upload(step)
            return
        local, bases, infos = self._local.saves(), self.compacted(), self.known()
        steps = chain_steps(step, infos) & infos.keys()
        newest_base = max((one for one in steps if infos[one].save_id in bases), default=0)
        missing = [one for one in steps if one >= newest_base and one not in local]
        with self.leaving:
            self._client.replicas.fetch([infos[one].save_id for one in sorted(missing)])

    def _await_upload(self, step: int) -> None:
        client, deadline = self._client, time.monotonic() + self._readable_secs
        client.process.wake(HURRY)
        while (info := self._local.saves().get(step)) is not None:
            progress = client.progress()
            if self.journal.known.was_committed(info.save_id):
                return
            if (problem := progress.damaged.get(key_of(step, info.save_id))) is not None:
                raise Damaged(f"step {step}", "an uploaded save", problem)
            if not client.keep_waiting(deadline):
                raise WaitTimeout(
                    f"step {step}: expected it to be uploaded to {self} within "
                    f"{self._readable_secs:g} s (Timeouts.save_secs), since each process has a "
                    "shard of it in its own staging directory, found "
                    f"{progress.problem or 'the upload in progress'}; restore again, or check the "
                    "network"
                )

    def found_damaged(self, step: int) -> bool:
        """Moves damaged local saves aside that exist elsewhere; returns whether to read again."""
        uploaded, local, infos = self.uploaded(), self._local.saves(), self.known()
        offered = {one.name.save_id for one in self._client.replicas.offers()}
        found = False
        for number in chain_steps(step, infos) & local.keys():
            save_id = infos[number].save_id if number in infos else None
            if number not in uploaded and save_id not in offered:
                continue
            if inventory.verify_step(self._local.at(number), self.item):
                self._local.set_aside(number, self._client.stage.aside_damaged())
                events.warn(
                    f"{self._client.stage.path}: step {number} is damaged in the staging "
                    "directory; it was moved to aside/damaged and is read from another copy"
                )
                if save_id in offered and save_id is not None:
                    self._client.replicas.fetch([save_id])
                found = True
        return found

    @contextlib.contextmanager
    def local(self, step: int, name: str) -> Iterator[Path]:
        """See ``Steps``; a local step is not evicted while it is read."""
        with self.leaving:
            self.readers[step] += 1
        store, stage = self.store_path.store, self._client.stage
        try:
            if isinstance(store, _NearestStore):
                store = store.store_with(str(step))
            if not isinstance(store, FileStore):
                DurableDir(stage.path, fsync=False).make(stage.fetched)
            with local_folder(StorePath(store, f"{step}/{name}"), stage.fetched) as folder:
                yield folder
        finally:
            with self.leaving:
                self.readers[step] -= 1


class _NearestStore(ReadOnlyStore):
    """The steps of a local directory and of its remote one; thread-safe."""

    def __init__(self, local: FileStore, remote: CommittedStore):
        self._local, self._remote = local, remote

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._remote.url

    def store_with(self, key: str) -> Store:
        """Returns the store that holds a key or a folder; the local one if both do."""
        step = key.partition("/")[0]
        is_step = naming.step_number(step) is not None
        return (
            self._local if is_step and self._local.dir_identity(step) is not None else self._remote
        )

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return self._call(key, lambda store: store.get(key))

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        self._call(key, lambda store: store.read_into(key, start, buffers, whole=whole))

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._call(key, lambda store: store.length(key))

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._call(key, lambda store: store.version(key))

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``; without a folder, only remote keys."""
        return self._call(folder, lambda store: store.keys(folder, after=after))

    def folders(self, folder: str) -> list[str]:
        """See ``Store``; without a folder, only remote ones."""
        return self._call(folder, lambda store: store.folders(folder))

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """See ``Store``."""
        return self._call(folder, lambda store: store.dir_identity(folder))

    def kvstore(self, folder: str) -> dict[str, object] | None:
        """See ``Store``."""
        return self._call(folder, lambda store: store.kvstore(folder))

    def _call(self, key: str, call: Callable[[Store], _T]) -> _T:
        found = self.store_with(key)
        try:
            return call(found)
        except Missing:
            if found is self._local and self.store_with(key) is self._remote:
                return call(self._remote)  # It was evicted concurrently.
            raise


def chain_steps(step: int, infos: Mapping[int, SaveInfo]) -> set[int]:
    """Returns the steps of a chain, as far as they are known."""
    by_id = {info.save_id: info for info in infos.values()}
    if step not in infos:
        return {step}
    saves = chain.walk(infos[step], lambda parent: by_id.get(parent.save_id))
    return {int(info.step_dir) for info in saves}
