# SPDX-License-Identifier: Apache-2.0
"""The steps of a checkpoint directory, for readers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deltackpt.errors import BrokenChain, Damaged, RestoreError
from deltackpt.format import chain, naming
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.lazy_import import LazyModule
from deltackpt.reading.wal_locations import WalFolder, WalLocation
from deltackpt.storage.digests import check_step_files
from deltackpt.storage.store import DirIdentity, FileStore, StorePath

if TYPE_CHECKING:
    from deltackpt.ledger.recovery import DamagedSave
    from deltackpt.reading import stored_saves
    from deltackpt.reading.wal_topics import WalTopics
else:  # A new directory has no saves to read.
    stored_saves = LazyModule("deltackpt.reading.stored_saves")


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
    # A local directory needs neither import.
    import tempfile

    from deltackpt.ledger.committed import CommittedStore

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
