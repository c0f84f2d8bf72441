# SPDX-License-Identifier: Apache-2.0
"""The stage of a root: where saves are made, and what trainer and promoter tell each other there.

A stage is a directory of a node::

    stage.lock          held by the promoter, of which there is one
    orders.msgpack      written by the trainer: under which claim, and what to do at the root
    progress.msgpack    written by the promoter: what is done, and what stands in the way
    neighbours.msgpack  written by the trainer: where neighbours are, and what lets in there
    pushed.msgpack      written by the promoter: what neighbours hold
    entry.msgpack       and the newest entry of the root's journal
    promoter.log        what the promoter says
    steps/              the saves: a checkpoint directory like any other
    aside/              saves that training went on without, and damaged ones

Both records are replaced whole. The orders are forced to disk before what they make possible; the
progress is not, since the root itself tells it. So whoever is killed at whatever moment is followed
by one who knows what to do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from deltackpt.errors import Damaged, OptionError, RestoreError
from deltackpt.format import manifest
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries
from deltackpt.ledger.entries import Entry, Unit
from deltackpt.storage import files

_ORDERS = "deltackpt.stage.orders"
_PROGRESS = "deltackpt.stage.progress"
_PUSHED = "deltackpt.stage.pushed"
#: Earlier runs that a line names.
_MOST_RUNS = 256
#: Promotions that the progress tells of.
MOST_RECENT = 256
_NAMES = {
    *("steps", "stage.lock", "promoter.log", "aside", "fetched"),
    *("progress.msgpack", "entry.msgpack", "neighbours.msgpack", "pushed.msgpack"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """What the saves of a run come after.

    Attributes:
      run: the run.
      epoch: of the claim under which it began.
      holder: of that claim.
      era: how often training had gone back by then under it.
      past: the greatest attempt of each earlier run that it comes after; of the newest runs.
    """

    run: str
    epoch: int
    holder: str
    era: int
    past: dict[str, int]

    @property
    def moment(self) -> tuple[int, int]:
        """When it began: moments of greater epochs, then eras, are later."""
        return self.epoch, self.era

    def has(self, save_id: SaveId) -> bool:
        """Whether a save of an earlier run is one that the saves of the run come after."""
        return save_id.attempt <= self.past.get(save_id.run, -1)

    def followed(self, save_id: SaveId) -> dict[str, int]:
        """The past of a run that goes on from a save of this one."""
        return dict([*self.past.items(), (save_id.run, save_id.attempt)][-_MOST_RUNS:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollBack:
    """Saves that training went back behind.

    Attributes:
      number: of the orders that gave it first.
      after: the step that training went on from.
      run: the run that went on.
      saves: every save of a later step that was, or might have been, at the root.
    """

    number: int
    after: int
    run: str
    saves: tuple[SaveId, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retired:
    """A save, or a compacted base, that nothing needs any more.

    Attributes:
      number: of the orders that gave it first.
      step: its number.
      item: of a base the item for which it stands.
      save_id: which it is.
      after: the newest save in the stage by then: until that is at the root, what it replaces is
        what the root has. None where there was none.
    """

    number: int
    step: int
    item: str | None
    save_id: SaveId
    after: SaveId | None = None

    @property
    def unit(self) -> Unit:
        """What it is at the root."""
        return Unit(self.step, self.item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """What a trainer has to be done at the root.

    Attributes:
      number: greater in each that is written.
      stage: id of the stage.
      url: of the root.
      endpoint: address of its server; the provider's own where there is none.
      item: name of our item in a step.
      holder: of the claim under which all of it is done; none before there is one.
      epoch: of that claim.
      began: whether training has begun under it.
      goes_on: what it went on from.
      era: how often training has gone back since under the claim.
      lines: of the runs whose saves are in the stage.
      rolled_back: in this order, before any save that is in the stage is brought to the root.
      retired: each once the save that it says is at the root.
      bytes_per_sec: the most that is sent.
      store_secs: the longest wait for an answer.
      process: whose stage it is.
      processes: how many stages there are, where each of several processes has its own.
    """

    number: int
    stage: str
    url: str
    endpoint: str | None
    item: str
    holder: str = ""
    epoch: int = 0
    began: bool = False
    goes_on: SaveId | None = None
    era: int = 0
    lines: tuple[Line, ...] = ()
    rolled_back: tuple[RollBack, ...] = ()
    retired: tuple[Retired, ...] = ()
    bytes_per_sec: float | None = None
    store_secs: float = 60.0
    process: int = 0
    processes: int = 1

    @property
    def apart(self) -> bool:
        """Whether the stage holds a part of each save."""
        return self.processes > 1

    def line(self, run: str) -> Line | None:
        """That of a run; None where none is known."""
        return next((one for one in self.lines if one.run == run), None)

    def without(self, lost: Collection[SaveId]) -> Orders:
        """As if what waits to be retired until one of some saves comes, which are lost, stayed."""
        kept = tuple(one for one in self.retired if one.after not in lost)
        return dataclasses.replace(self, retired=kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promoted:
    """A save that was brought to the root; moments are in seconds since 1970."""

    number: int
    save_id: SaveId
    nbytes: int
    objects: int
    seconds: float
    lag_secs: float
    committed_unix_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a promoter has come.

    Attributes:
      holder: of the claim that it works under.
      pid: its process.
      orders: number of the newest orders that are carried out, but for what they retire.
      retired: what was retired by orders of this number, or a smaller one, is.
      entry: number of the newest entry of the root's journal that it has seen.
      held: the greatest attempt that was ever committed at the root, of each run in the stage.
      damaged: saves that cannot come to the root, by ``key_of``, and why.
      recent: the newest promotions; their numbers count all of this holder.
      problem: why nothing goes on; None where it does.
      code: of the error that this is.
      problem_unix_secs: since when.
      fenced: what is said of whoever has taken the root meanwhile.
    """

    holder: str
    pid: int = 0
    orders: int = 0
    retired: int = 0
    entry: int = 0
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    recent: tuple[Promoted, ...] = ()
    problem: str | None = None
    code: str = ""
    problem_unix_secs: float = 0.0
    fenced: str | None = None

    def is_at_root(self, save_id: SaveId) -> bool:
        """Whether a save was committed there, though it may have gone since."""
        return self.held.get(save_id.run, -1) >= save_id.attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pushed:
    """What neighbours hold.

    Attributes:
      holder: of the claim that the promoter works under.
      saves: those that they hold whole, by ``key_of``.
      damaged: those of the stage that cannot be pushed, by ``key_of``, and why.
      problem: why no others come there; None where they do.
      code: of the error that this is.
      problem_unix_secs: since when, in seconds since 1970.
    """

    holder: str
    saves: tuple[str, ...] = ()
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    code: str = ""
    problem_unix_secs: float = 0.0


def key_of(step: int, save_id: SaveId | None) -> str:
    """How the progress names a save; one whose manifest cannot be read has no more than a step."""
    return f"step.{step}" if save_id is None else f"{save_id.run}.{save_id.attempt}.{step}"


def step_of(key: str) -> int:
    """The step in what ``key_of`` gave."""
    return int(key.rpartition(".")[2])


class Stage:
    """The directory."""

    def __init__(self, path: Path):
        """Nothing is made or read."""
        self.path = path

    @property
    def steps(self) -> Path:
        """The checkpoint directory."""
        return self.path / "steps"

    @property
    def lock(self) -> Path:
        """Held by the promoter."""
        return self.path / "stage.lock"

    @property
    def log(self) -> Path:
        """Where the promoter writes."""
        return self.path / "promoter.log"

    def aside(self, why: str) -> Path:
        """A folder for saves that are not to be found any more."""
        return self.path / "aside" / why

    @property
    def fetched(self) -> Path:
        """Where files of the root go that are needed for a moment."""
        return self.path / "fetched"

    @property
    def _orders(self) -> Path:
        return self.path / "orders.msgpack"

    @property
    def _entry(self) -> Path:
        return self.path / "entry.msgpack"

    @property
    def _progress(self) -> Path:
        return self.path / "progress.msgpack"

    def orders(self) -> Orders | None:
        """What the newest trainer has ordered; None where there never was one.

        Raises:
          Damaged, FormatTooNew: it cannot be understood.
          StorageError: it cannot be read.
        """
        if not self._orders.exists():
            return None
        data = files.read_bytes(self._orders)
        return manifest.from_bytes(data, Orders, name=str(self._orders), magic=_ORDERS)

    def order(self, orders: Orders) -> None:
        """Orders; on disk when it returns.

        Raises:
          StorageError: it cannot be written.
        """
        files.write_atomic(self._orders, manifest.to_bytes(orders, _ORDERS), fsync=True)

    def orders_stamp(self) -> object:
        """What changes with the orders; cheap."""
        return _stamp(self._orders)

    def progress(self, holder: str) -> Progress:
        """How far the promoter of a claim has come; where nobody can tell, nowhere."""
        try:
            data = files.read_bytes(self._progress)
            found = manifest.from_bytes(data, Progress, name=self._progress.name, magic=_PROGRESS)
        except RestoreError:  # None yet, or of a power cut: the promoter finds it out anew.
            return Progress(holder=holder)
        return found if found.holder == holder else Progress(holder=holder)

    @property
    def _keepers(self) -> Path:
        return self.path / "neighbours.msgpack"

    @property
    def _pushed(self) -> Path:
        return self.path / "pushed.msgpack"

    def keepers(self) -> bytes | None:
        """What the trainer has found of neighbours; None where there are none."""
        try:
            return files.read_bytes(self._keepers)
        except RestoreError:
            return None

    def note_keepers(self, data: bytes | None) -> None:
        """Notes where neighbours are, readable by this user alone: it lets in there.

        Raises:
          StorageError: it cannot be written.
        """
        if data is None:
            self._keepers.unlink(missing_ok=True)
        else:
            files.write_atomic(self._keepers, data, fsync=False, private=True)

    def keepers_stamp(self) -> object:
        """What changes with what was noted of neighbours; cheap."""
        return _stamp(self._keepers)

    def pushed(self, holder: str) -> Pushed:
        """What neighbours hold under a claim; where nobody can tell, nothing."""
        try:
            data = files.read_bytes(self._pushed)
            found = manifest.from_bytes(data, Pushed, name=self._pushed.name, magic=_PUSHED)
        except RestoreError:
            return Pushed(holder=holder)
        return found if found.holder == holder else Pushed(holder=holder)

    def report_pushed(self, pushed: Pushed) -> None:
        """Tells the trainer what neighbours hold.

        Raises:
          StorageError: it cannot be written.
        """
        files.write_atomic(self._pushed, manifest.to_bytes(pushed, _PUSHED), fsync=False)

    def entry(self) -> bytes | None:
        """The newest entry of the root's journal that the promoter has seen; None without any."""
        try:
            return files.read_bytes(self._entry)
        except RestoreError:
            return None

    def report_entry(self, entry: Entry) -> None:
        """Hands the newest entry of the root's journal to the trainer, who need not ask for it.

        Raises:
          StorageError: it cannot be written.
        """
        files.write_atomic(self._entry, entries.to_bytes(entry), fsync=False)

    def report(self, progress: Progress) -> None:
        """Tells the trainer.

        Raises:
          StorageError: it cannot be written.
        """
        files.write_atomic(self._progress, manifest.to_bytes(progress, _PROGRESS), fsync=False)


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def default_stage(url: str, endpoint: str | None) -> Path:
    """The stage of a root where none is named: the same one in each process of a user.

    Raises:
      OptionError: the user has no home directory.
    """
    named = os.path.expandvars("$XDG_CACHE_HOME")
    try:
        cache = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError as error:
        raise OptionError(
            f"Tiers.stage: expected a home directory to make the stage of {url} in, found none; "
            "give a directory of this node"
        ) from error
    known = hashlib.sha256(f"{url}\n{endpoint or ''}".encode()).hexdigest()[:16]
    return cache / "deltackpt" / "stages" / known


def check_stage(stage: Stage, url: str, endpoint: str | None) -> Orders | None:
    """The orders in a stage, which must be of a root.

    Raises:
      OptionError: it is the stage of another root.
      Damaged: its orders are altered.
    """
    try:
        found = stage.orders()
    except Damaged as error:
        error.action = (
            f"if no save in {stage.steps} is missing at the root, remove {stage.path}; else copy "
            "it to a directory first"
        )
        raise
    if found is not None and (found.url, found.endpoint) != (url, endpoint):
        at = f" at {found.endpoint}" if found.endpoint else ""
        raise OptionError(
            f"Tiers.stage={str(stage.path)!r}: expected a stage of {url}, found that of "
            f"{found.url}{at}; give each root a stage of its own"
        )
    if found is None and stage.path.is_dir():
        foreign = {*files.listing(stage.path)} - _NAMES
        if any(not name.startswith(".") for name in foreign):
            raise OptionError(
                f"Tiers.stage={str(stage.path)!r}: expected an empty directory, or a stage, found "
                f"{sorted(foreign)[:5]}; give another directory"
            )
    return found
