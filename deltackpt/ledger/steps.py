# SPDX-License-Identifier: Apache-2.0
"""The steps and recovery points of a checkpoint directory, for readers.

If a file of a save is damaged, the steps that need it are given up unread. An error may also come
from the network, from permissions, or from another save's record, so the named file must differ
from the records of its own save.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DamagedWal,
    DeltackptError,
    RestoreError,
    StepNotFound,
)
from deltackpt.format import chain, naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.committed import CommittedStore
from deltackpt.ledger.entries import COMMIT, prefix_step
from deltackpt.reading import inventory, stored_saves
from deltackpt.reading.shard_arrays import is_of_dense_segment
from deltackpt.reading.wal_index import (
    Loss,
    RecoveryPoint,
    ReplayPlan,
    WalIndex,
    WalReader,
    coverings,
    newest_plan,
)
from deltackpt.reading.wal_locations import WalFolder, WalLocation
from deltackpt.storage import digests
from deltackpt.storage.digests import check_step_files
from deltackpt.storage.store import DirIdentity, FileStore, StorePath

if TYPE_CHECKING:
    from deltackpt.reading.wal_topics import WalTopics


class DamagedSave(NamedTuple):
    """A save, or its compacted base, with a damaged file."""

    step: int
    compacted: bool
    #: Whether every chain with the save reads the file: a later save may replace a dense leaf.
    every_child: bool


def find_damaged_save(error: BaseException, root: StorePath, item: str) -> DamagedSave | None:
    """Returns the save that a read error names if its file, which is read, is damaged."""
    if not isinstance(error, Damaged) or isinstance(error, DamagedWal):
        return None
    # The name of a layer file is followed by that of a chunk, that of a chunk's file by a block.
    name, _, within = error.object_name.partition(": ")
    path = name.partition(", ")[0].split("/")
    if path[-1] == COMMIT and (step := prefix_step("/".join(path[-3:-1]))) is not None:
        path = [str(step), COMMIT]  # Where a bucket stores it.
    inside = {item, naming.DENSE_ITEM, naming.STEP_DIGESTS, COMMIT}
    found_at = [
        at
        for at in range(1, len(path))
        if path[at] in inside and naming.step_number(path[at - 1]) is not None
    ]
    if not found_at:
        return None
    at = found_at[-1]
    compacted = path[at] == item and path[max(0, at - 2)] == naming.COMPACTED
    shown = f"{naming.COMPACTED}/{path[at - 1]}" if compacted else path[at - 1]
    folder, file = root / shown, "/".join(path[at:])
    try:
        if not folder.is_dir():
            return None
        found = inventory.read_inventory(folder, item, shown=shown)
        records = {one.object_name for one in found.damage}
        known = {file: found.files[file]} if file in found.files else {}
        is_record = not records.isdisjoint((error.object_name, f"{shown}/{file}"))
        if not is_record and not digests.check_files(folder, known):
            return None
    except (DeltackptError, OSError):
        return None
    below = path[at + 1 :]
    of_dense = (
        path[at] in (naming.DENSE_ITEM, naming.STEP_DIGESTS) or naming.DENSE_ITEM in below[:1]
    )
    of_dense = of_dense or is_of_dense_segment(f"{'/'.join(below)}: {within}")
    return DamagedSave(int(path[at - 1]), compacted, not of_dense)


class Steps:
    """Committed steps and their compacted bases; ``topics`` reads WAL epochs in Kafka."""

    topics: WalTopics | None = None

    def __init__(
        self, store_path: StorePath, item: str, *, given: str | os.PathLike[str] | None = None
    ):
        """Reads a folder of steps that the user gave as ``given``; sends no request yet."""
        self.store_path = store_path
        self.item = item
        self.given = os.fspath(given) if given is not None else str(store_path)
        self._known: dict[str, SaveInfo] = {}
        self._bases: dict[tuple[str, DirIdentity], SaveInfo] = {}
        #: Accessed by the training thread and by the collector.
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.store_path)

    @property
    def wal_location(self) -> WalLocation:
        """The location of the WAL."""
        return WalFolder(self.store_path / naming.LOG, self.topics)

    def at(self, step: int) -> StorePath:
        """Where a step is, if it is committed."""
        return self.store_path / str(step)

    def steps(self) -> list[int]:
        """Returns the committed steps, in no order; lists the directory once."""
        numbers = map(naming.step_number, self.store_path.folders())
        return [number for number in numbers if number is not None]

    def newest_step(self) -> int | None:
        """Returns the newest committed step, or None."""
        return max(self.steps(), default=None)

    def known_newest_step(self) -> int | None:
        """Like ``newest_step``, but may return the last known value if that is cheaper."""
        return self.newest_step()

    def saves(self) -> dict[int, SaveInfo | None]:
        """Returns each committed step, which is read once; None if its manifest is unreadable."""
        with self._lock:
            steps = {str(step): step for step in self.steps()}
            self._known = {name: info for name, info in self._known.items() if name in steps}
            found: dict[int, SaveInfo | None] = {}
            for name, step in steps.items():
                if name not in self._known:
                    # Removed concurrently, or damaged: it remains unknown.
                    with contextlib.suppress(RestoreError, OSError):
                        self._known[name] = stored_saves.read_info(
                            self.store_path / name, self.item
                        )
                found[step] = self._known.get(name)
            return found

    def rolled_back(self) -> Iterator[SaveId]:
        """Returns rolled-back steps that still exist."""
        aside = self.store_path / naming.ROLLED_BACK
        for folder in (aside / run for run in aside.folders()):
            for name in folder.folders():
                if naming.step_number(name) is not None:
                    with contextlib.suppress(RestoreError, OSError):
                        yield stored_saves.read_info(folder / name, self.item).save_id

    def restorable(self) -> dict[int, SaveId]:
        """Returns the committed steps with complete chains, with their save ids."""
        standing = {info.step_dir: info for info in self.saves().values() if info is not None}
        # Read after the steps: what a base replaces is deleted once the base exists.
        bases = self._compacted()
        read = {name: base for name, base in bases.items() if _replaces(base, standing.get(name))}
        by_dir = standing | read
        found = {}
        for name, info in standing.items():
            with contextlib.suppress(BrokenChain):
                chain.restore_chain(by_dir[name], by_dir)
                found[info.save_id.step] = info.save_id
        return found

    def lost_with(self, damaged: Collection[DamagedSave], step: int) -> set[int]:
        """Returns the steps that cannot be restored for the same reason as a step, including it.

        ``damaged`` are proven so; if there are none, a parent is missing or another save. Reads
        manifests only. A save whose manifest cannot be read now may be intact.
        """
        infos = self.saves()
        listed = {*stored_saves.compacted_bases(self.store_path, self.item)}
        bases = self._compacted()
        standing = {info.step_dir: info for info in infos.values() if info is not None}
        used = {name: base for name, base in bases.items() if _replaces(base, standing.get(name))}
        unreadable = {str(number) for number, info in infos.items() if info is None}

        def broken_at(without: Collection[DamagedSave]) -> dict[int, str]:
            plain = {str(one.step) for one in without if not one.compacted}
            gone = {str(one.step) for one in without if one.compacted}
            by_dir = {name: info for name, info in standing.items() if name not in plain}
            by_dir |= {name: base for name, base in used.items() if name not in gone}
            unknown = (unreadable - plain) | (listed - bases.keys() - gone)
            found = ((number, _broken_at(str(number), by_dir, unknown)) for number in infos)
            return {number: name for number, name in found if name is not None}

        broken = broken_at(())
        if not damaged:
            return {number for number, name in broken.items() if name == broken.get(step)}
        found = broken_at(damaged).keys() - broken.keys()
        whole = standing | used
        if all(one.every_child for one in damaged) or str(step) not in whole:
            return found
        parents = chain.walk(whole[str(step)], lambda parent: whole.get(parent.step_dir))
        return found & {int(info.step_dir) for info in parents}

    def compacted(self) -> frozenset[SaveId]:
        """Returns the saves with a compacted base whose manifest is readable."""
        return frozenset(info.save_id for info in self._compacted().values())

    def _compacted(self) -> dict[str, SaveInfo]:
        """Compacted bases by step name; each is read once."""
        with self._lock:
            bases = stored_saves.compacted_bases(self.store_path, self.item)
            self._bases = {key: info for key, info in self._bases.items() if key in bases.items()}
            for key in bases.items():
                if key not in self._bases:
                    with contextlib.suppress(RestoreError, OSError):
                        found = stored_saves.read_base(self.store_path / key[0], self.item)
                        self._bases[key] = found.info
            return {name: info for (name, _), info in self._bases.items()}

    def check_step_files(
        self, step_dir: StorePath | Path, share: tuple[int, int] = (0, 1), *, dense: bool = True
    ) -> None:
        """Checks a step's files that have no checksum of their own, or the i-th of n shares."""
        record = stored_saves.read_save(step_dir, self.item).head
        if "step" not in record.digests:
            return
        others = f"{naming.DENSE_ITEM}/"
        for damage in check_step_files(
            step_dir, record.files, share, wanted=lambda name: dense or not name.startswith(others)
        ):
            raise damage

    def metadata(self, step: int) -> bytes:
        """Returns a step's Orbax metadata, as stored; Damaged if it is missing."""
        return (self.at(step) / naming.STEP_METADATA).read()

    @contextlib.contextmanager
    def local(self, step: int, name: str) -> Iterator[Path]:
        """Yields a local folder of a step; of a bucket, a verified download, deleted afterwards."""
        with local_folder(self.at(step) / name, None) as folder:
            yield folder

    def await_readable(self, step: int) -> None:
        """Waits until a step can be read; most directories return at once."""

    def problems(self) -> list[Damaged]:
        """Returns damage to the records of committed steps; only buckets can have any."""
        return []

    def lost_steps(self) -> dict[int, Damaged]:
        """Returns steps that may have been committed, according to the remaining records."""
        return {}

    def close(self) -> None:
        """Closes everything that is open."""
        if self.topics is not None:
            self.topics.close()

    def abandon(self) -> None:
        """Closes it after the manager's constructor failed; returns the lease if possible."""
        self.close()


@contextlib.contextmanager
def local_folder(at: StorePath, scratch: Path | None) -> Iterator[Path]:
    """Yields a local folder; a remote one is downloaded to ``scratch``, or the system default."""
    if isinstance(at.store, FileStore):
        yield Path(at)
        return
    assert isinstance(at.store, CommittedStore)
    with tempfile.TemporaryDirectory(prefix="deltackpt-", dir=scratch) as folder:
        at.store.fetch(at.key, Path(folder))
        yield Path(folder)


def _broken_at(name: str, by_dir: Mapping[str, SaveInfo], unknown: Collection[str]) -> str | None:
    """The save where the chain of a step breaks; None if it is whole, or may be."""
    if name not in by_dir:
        return None if name in unknown else name
    broken = chain.broken_at(by_dir[name], by_dir)
    if broken is None or (broken.parent is not None and broken.parent.step_dir in unknown):
        return None
    return broken.step_dir


def _replaces(base: SaveInfo, save: SaveInfo | None) -> bool:
    """Whether a compacted base belongs to a save, or to one that no longer exists."""
    return save is None or save.save_id == base.save_id


def locate(root: Steps, requested: int | RecoveryPoint) -> tuple[int, ReplayPlan | None]:
    """Finds a committed step, or the step and WAL records for a recovery point; StepNotFound."""
    if isinstance(requested, int) and root.at(requested).dir_identity() is not None:
        return requested, None
    index, steps = WalReader(root.wal_location).read(), root.restorable()
    plan = plan_to(index, steps, requested)
    if plan is not None:
        return plan.step.step, plan
    index.require_topics()
    _, unreached = coverings(index, steps)
    points = [point for point in index.points() if point not in unreached]
    number = requested if isinstance(requested, int) else requested.step
    raise StepNotFound(
        f"{root}: expected step {number} or a full recovery point of that number, found neither; "
        f"{nearest(number, steps, points)}; see steps and recovery_points()"
    )


def plan_to(
    index: WalIndex, steps: Mapping[int, SaveId], requested: int | RecoveryPoint
) -> ReplayPlan | None:
    """Returns how to replay to a recovery point or training step; None if no step leads there."""
    at = requested.step if isinstance(requested, RecoveryPoint) else requested
    if not any(point.full and requested in (point, point.step) for point in index.points()):
        return None
    return newest_plan(index, steps, at=at)


def nearest(number: int, steps: Iterable[int], points: Iterable[RecoveryPoint]) -> str:
    """Describes the restorable steps or recovery points nearest to a training step."""
    found = [(step, f"step {step}") for step in steps]
    found += [(point.step, str(point)) for point in points if point.full]
    below = max((one for one in found if one[0] <= number), default=None)
    above = min((one for one in found if one[0] > number), default=None)
    reported = " and ".join(one[1] for one in (below, above) if one is not None)
    return f"the nearest that can be restored: {reported}" if reported else "none can be restored"


def losses_of(root: Steps, index: WalIndex, newest: int, *, above: int = -1) -> list[Loss]:
    """Lists the lost WAL records above a step.

    The trainer may change the log while it is read, so a loss counts only if a second read of the
    log and the steps finds it again. ``index`` was read before the steps were listed. Records up to
    ``newest``, the newest restorable step on the current branch, may have been trimmed.
    """
    return [
        one
        for one in index.losses(above)
        if not one.may_be_trimmed
        or (one.step > newest and not _is_rolled_back(root, index, one.step))
    ]


def in_both(found: Sequence[Loss], again: Sequence[Loss]) -> list[Loss]:
    """Returns the losses that a second read confirms."""
    names = {one.error.object_name for one in found}
    return [one for one in again if one.error.object_name in names]


def _is_rolled_back(root: Steps, index: WalIndex, step: int) -> bool:
    """Returns whether a rollback set aside a step up to which the log was trimmed."""
    # The rollback's run has not begun a WAL epoch yet: the log still counts as if the step existed.
    return any(one.step >= step and index.has_step(one) for one in root.rolled_back())
