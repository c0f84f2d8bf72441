# SPDX-License-Identifier: Apache-2.0
"""The staging directory, where saves are made, and the records that trainer and replicator share.

A staging directory is local to a node::

    replicator.lock         held by the replicator, of which there is one
    orders.<lease>.msgpack  written by the trainer: its claim, what to do remotely, and its peers
    starting.msgpack        the same by a trainer that starts, for the other processes of its job
    progress.msgpack        written by the replicator: the newest entry of the remote journal, and
                            what blocks the upload
    peers.progress.msgpack  the same for peers: which saves they hold
    uploader.log            the replicator's log
    steps/                  the saves: a checkpoint directory like any other
    aside/                  superseded and damaged saves

Records are replaced atomically. Orders are fsynced before anything relies on them; progress can be
rebuilt from the remote directory. Either process can therefore be killed at any time.

A trainer writes its orders only once it has started, so a start that fails has nothing to undo
here. The orders of the newest lease are in force: an older trainer that stalls between its lease
check and the write does not replace them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged, FormatTooNew, OptionError, RestoreError
from deltackpt.events import UploadEvent
from deltackpt.format import records
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.entries import Entry, Hidden, ObjectKey, State
from deltackpt.storage import posix
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import store_path

_ORDERS = "deltackpt.stage.orders"
_PROGRESS = "deltackpt.stage.progress"
#: Fields of orders that development versions did not write.
_SINCE_DEVELOPMENT = frozenset(("generation", "lineages"))
#: Number of earlier runs that a lineage records.
_MOST_RUNS = 256
#: Number of uploads that the progress records.
MOST_RECENT = 256
#: The tiers that a replicator fills.
TierName = Literal["remote", "peers"]
_PROGRESS_NAMES: dict[TierName, str] = {
    "remote": "progress.msgpack",
    "peers": "peers.progress.msgpack",
}
_NAMES = {
    *("steps", "replicator.lock", "uploader.log", "aside", "fetched"),
    *("progress.msgpack", "peers.progress.msgpack", "starting.msgpack"),
}
_ORDERS_NAME = re.compile(r"orders\.([1-9][0-9]{0,17})\.msgpack")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunLineage:
    """The ancestors of a run's saves."""

    run: str
    epoch: int  # of the claim under which the run began
    holder: str  # of that claim
    generation: int  # number of rollbacks under that claim before the run began
    ancestors: dict[str, int]  # greatest attempt of each of the newest runs that it descends from

    @property
    def moment(self) -> tuple[int, int]:
        """When it began: greater epochs, then generations, are later."""
        return self.epoch, self.generation

    def has(self, save_id: SaveId) -> bool:
        """Returns whether the run's saves descend from a save of an earlier run."""
        return save_id.attempt <= self.ancestors.get(save_id.run, -1)

    def followed(self, save_id: SaveId) -> dict[str, int]:
        """Returns the ancestors of a run that resumes from a save of this one."""
        return dict([*self.ancestors.items(), (save_id.run, save_id.attempt)][-_MOST_RUNS:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removal:
    """A save, or a compacted base, that must be removed from the remote directory.

    It was rolled back, or is unneeded. Until ``after``, the newest staged save at that time, is
    uploaded, the remote directory still needs what that replaces. None if no save was staged.
    """

    number: int  # of the orders that first contained it
    step: int
    item: str | None
    save_id: SaveId
    after: SaveId | None = None
    run: str | None = None  # the run that resumed from an earlier step; None if it is unneeded

    @property
    def unit(self) -> tuple[ObjectKey, SaveId]:
        """Returns the key of its unit in the remote directory, and the save in it."""
        return ObjectKey(self.step, self.item), self.save_id

    def is_open(self, done: TierProgress, remote: State) -> bool:
        """Returns whether its unit is uploaded, or an upload that is not listed may be committing.

        ``remote`` must not be older than ``done``.
        """
        return self.number > done.orders or self.unit in remote.uploads


def rolled_back(saves: Iterable[SaveId], item: str, run: str, number: int = 0) -> list[Removal]:
    """Returns removals of saves that a run has rolled back, and of their compacted bases."""
    return [
        Removal(number=number, step=one.step, item=of, save_id=one, run=run)
        for one in saves
        for of in (None, item)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerNode:
    """A node that holds other nodes' fragments in its memory."""

    node: str  # stays the same if the address changes
    address: str  # "host:port"
    rack: str = ""  # failure domain; "" if unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerGroup:
    """The peers of a node, how they store bundles, and the token that they accept."""

    root: str  # prefix of all keys; one per checkpoint directory
    own: str  # this process's node, which stores no fragments of its own saves
    token: str = dataclasses.field(repr=False)
    nodes: tuple[PeerNode, ...]  # including ``own``
    k: int
    m: int
    deadline_secs: float = 10.0  # of each request

    @property
    def others(self) -> tuple[PeerNode, ...]:
        """All nodes except ``own``."""
        return tuple(one for one in self.nodes if one.node != self.own)

    def require_nodes(self) -> None:
        """Checks that there are at least as many other nodes as fragments."""
        found, needed = len(self.others), self.k + self.m
        if found < needed:
            how = f"Copies(copies={needed})" if self.k == 1 else f"Erasure(k={self.k}, m={self.m})"
            others = ", ".join(one.node for one in self.others) or "none"
            raise OptionError(
                f"Tiers.peers={how}: expected {needed} nodes besides this one, found {found} "
                f"({others}); add nodes, or request fewer fragments"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What a trainer orders the replicator to do."""

    number: int  # increases with every write
    lease: int  # epoch of the trainer's lease of the staging directory
    url: str
    endpoint: str | None  # None for the provider's default
    item: str
    holder: str = ""  # of the claim for all changes; empty before there is one
    epoch: int = 0  # of that claim
    began: bool = False  # whether training has begun under that claim
    resumed_from: SaveId | None = None  # the save from which it resumed
    generation: int = 0  # number of rollbacks since then under the claim
    lineages: tuple[RunLineage, ...] = ()  # of the runs with staged saves
    removals: tuple[Removal, ...] = ()  # rollbacks in this order, before any upload
    bytes_per_sec: float | None = None
    store_secs: float = 60.0  # timeout of a request
    peers: PeerGroup | None = None  # anyone who can read its token can access the peers
    process: int = 0
    processes: int = 1  # number of staging directories, if each process has its own

    @property
    def no_shared_fs(self) -> bool:
        """Whether the staging directory contains only one shard of each save."""
        return self.processes > 1

    @cached_property
    def hidden(self) -> Hidden:
        """The remote units that are to be removed, and are therefore ignored."""
        return frozenset(one.unit for one in self.removals)

    def next_generation(self, run: str) -> dict[str, Any]:
        """Returns the fields that a rollback by a run changes; its WAL may have begun before."""
        generation = self.generation + 1
        own = (
            dataclasses.replace(one, generation=generation) if one.run == run else one
            for one in self.lineages
        )
        return {"generation": generation, "lineages": (*own,)}

    def lineage(self, run: str) -> RunLineage | None:
        """Returns a run's lineage; None if unknown."""
        return next((one for one in self.lineages if one.run == run), None)

    def new_lineage(self, run: str, ancestors: dict[str, int]) -> RunLineage:
        """Returns the lineage of a run that begins under these orders."""
        return RunLineage(
            run=run,
            epoch=self.epoch,
            holder=self.holder,
            generation=self.generation,
            ancestors=ancestors,
        )

    def without(self, lost: Collection[SaveId]) -> Orders:
        """Returns the orders without the removals that wait for one of some lost saves."""
        kept = tuple(one for one in self.removals if one.after not in lost)
        return dataclasses.replace(self, removals=kept)

    def pending(self, done: TierProgress, remote: State) -> tuple[Removal, ...]:
        """Returns the removals that are not ``done``, or wait; ``remote`` must not be older."""
        return tuple(
            one
            for one in self.removals
            if one.is_open(done, remote)
            or (one.after is not None and done.lacks(one.after.step, one.after, remote))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierProgress:
    """What has reached a tier; the fields from ``pid`` on are for the remote one."""

    holder: str  # of the claim under which the replicator runs
    saves: tuple[str, ...] = ()  # that peers hold completely, by ``key_of``
    #: Why saves cannot reach the tier, by ``key_of``.
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None  # why nothing reaches the tier
    code: str = ""
    problem_unix_secs: float = 0.0  # since when
    pid: int = 0  # of the uploader
    orders: int = 0  # number of the newest orders carried out, except waiting removals
    #: The newest remote journal entry that it has seen, which the trainer then need not fetch.
    entry: Entry = dataclasses.field(default_factory=Entry)
    uploads: int = 0  # number of uploads of this holder
    recent: tuple[UploadEvent, ...] = ()  # the newest ones, without ``waiting``
    fenced: str | None = None  # message about the trainer that took the remote directory

    def lacks(self, step: int, save_id: SaveId | None, remote: State) -> bool:
        """Returns whether a staged save has reached neither the tier nor ``remote``, but still may.

        ``remote`` must not be older than the progress of the upload. If the save's manifest is
        unreadable, it has no ``save_id`` here, and only the step counts.
        """
        key = key_of(step, save_id)
        if key in self.damaged or key in self.saves:
            return False
        if save_id is None:
            return step not in remote.steps
        return not remote.was_committed(save_id)


def key_of(step: int, save_id: SaveId | None) -> str:
    """Returns the name of a save in the progress; just the step if its manifest is unreadable."""
    return f"step.{step}" if save_id is None else f"{save_id.run}.{save_id.attempt}.{step}"


def step_of(key: str) -> int:
    """Returns the step in a result of ``key_of``."""
    return int(key.rpartition(".")[2])


class StagingDir:
    """The staging directory; ``fetched`` briefly caches remote files."""

    def __init__(self, path: Path):
        self.path = path
        self.steps = path / "steps"
        self.lock = path / "replicator.lock"
        self.log = path / "uploader.log"
        self.fetched = path / "fetched"
        self._starting = path / "starting.msgpack"

    def make(self) -> None:
        """Creates it and its folders, private to this user, since they hold the weights."""
        for folder in (self.path, self.steps, self.aside("")):
            DurableDir(folder, private=True).create()

    def aside(self, why: str) -> Path:
        """Returns a folder for saves that readers should no longer find."""
        return self.path / "aside" / why

    def aside_damaged(self) -> Path:
        """Returns a new folder for a damaged save."""
        return self.aside("damaged") / uuid.uuid4().hex

    def _leases(self) -> list[int]:
        if not self.path.is_dir():
            return []
        found = map(_ORDERS_NAME.fullmatch, posix.listing(self.path))
        return sorted(int(one[1]) for one in found if one is not None)

    def _orders(self, lease: int) -> Path:
        return self.path / f"orders.{lease}.msgpack"

    def _progress(self, tier: TierName) -> Path:
        return self.path / _PROGRESS_NAMES[tier]

    def orders(self) -> Orders | None:
        """Returns the orders of the newest trainer that has started; None without any."""
        while leases := self._leases():
            found = _read_orders(self._orders(leases[-1]))
            if found is not None:
                return found
            # A newer trainer has removed the file since it was listed.
        return None

    def announced(self) -> Orders | None:
        """Returns the orders that a trainer last announced; None if there were never any."""
        return _read_orders(self._starting)

    def order(self, orders: Orders) -> None:
        """Writes orders durably; without effect if a newer lease has orders."""
        path = self._orders(orders.lease)
        self._write(path, records.to_bytes(orders, _ORDERS), fsync=True)
        for lease in self._leases():
            if lease < orders.lease:
                with contextlib.suppress(OSError):  # A leftover is harmless.
                    self._orders(lease).unlink()

    def announce(self, orders: Orders) -> None:
        """Writes the orders of a trainer that starts, which are not in force yet."""
        self._write(self._starting, records.to_bytes(orders, _ORDERS))

    def progress(self, holder: str, tier: TierName = "remote") -> TierProgress:
        """Returns what has reached a tier under a claim; empty if it is missing or unreadable.

        If a newer deltackpt runs the replicator, as after an upgrade, that is the problem.
        """
        path = self._progress(tier)
        try:
            found = _progress_from(store_path(path).read(), path.name)
        except FormatTooNew as error:
            return TierProgress(
                holder=holder,
                problem=f"its uploader is newer than this process: {error}, and restart it",
                code=error.code,
                problem_unix_secs=time.time(),
            )
        except RestoreError:  # None yet, or lost in a power cut: the replicator rebuilds it.
            return TierProgress(holder=holder)
        return found if found.holder == holder else TierProgress(holder=holder)

    def report(self, progress: TierProgress, tier: TierName = "remote") -> None:
        """Reports the progress of a tier to the trainer."""
        self._write(self._progress(tier), records.to_bytes(progress, _PROGRESS))

    def _write(self, path: Path, data: bytes, *, fsync: bool = False) -> None:
        """Writes a record that only this user can read."""
        DurableDir(path.parent, fsync=fsync, private=True).write(path, data)


def _read_orders(path: Path) -> Orders | None:
    try:
        data = store_path(path).read()
    except Damaged:
        if not os.path.lexists(path):
            return None
        raise
    return _orders_from(data, str(path))


@functools.lru_cache(2)
def _orders_from(data: bytes, name: str) -> Orders:
    """Decodes orders, once: the uploader reads the same file for each piece that it sends."""
    return records.from_bytes(
        data, Orders, name=name, magic=_ORDERS, since_development=_SINCE_DEVELOPMENT
    )


@functools.lru_cache(4)
def _progress_from(data: bytes, name: str) -> TierProgress:
    """Decodes progress; cached, as the trainer polls a file that contains a journal entry."""
    found = records.from_bytes(data, TierProgress, name=name, magic=_PROGRESS)
    if found.entry.number:
        entries.check_entry(found.entry, name)
    return found


def default_stage(url: str, endpoint: str | None) -> Path:
    """Returns the default staging directory of a URL: the same in each process of a user."""
    named = os.path.expandvars("$XDG_CACHE_HOME")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OptionError(
            f"Tiers.staging_dir: expected a home directory for the staging directory of {url}, "
            "found none; set a local directory"
        ) from error
    known = hashlib.sha256(f"{url}\n{endpoint or ''}".encode()).hexdigest()[:16]
    return cache / "deltackpt" / "stages" / known


def check_stage(stage: StagingDir, url: str, endpoint: str | None) -> Orders | None:
    """Returns the orders in a staging directory; OptionError if it belongs to another URL."""
    try:
        found = stage.orders()
    except Damaged as error:
        error.action = (
            f"if every save in {stage.steps} was uploaded, remove {stage.path}; otherwise copy it "
            "to another directory first"
        )
        raise
    if found is not None and (found.url, found.endpoint) != (url, endpoint):
        at = f" at {found.endpoint}" if found.endpoint else ""
        raise OptionError(
            f"Tiers.staging_dir={str(stage.path)!r}: expected the staging directory of {url}, "
            f"found that of {found.url}{at}; use a separate staging directory for each URL"
        )
    if found is None and stage.path.is_dir():
        foreign = {*posix.listing(stage.path)} - _NAMES
        if any(not name.startswith(".") for name in foreign):
            raise OptionError(
                f"Tiers.staging_dir={str(stage.path)!r}: expected an empty directory or a staging "
                f"directory, found {sorted(foreign)[:5]}; use another directory"
            )
    return found
