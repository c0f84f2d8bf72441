# SPDX-License-Identifier: Apache-2.0
"""The steps of a root, for whoever reads: a directory's, or a bucket's laid out like one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from deltackpt.errors import BrokenChain, RestoreError
from deltackpt.format import chain, names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.committed import Committed
from deltackpt.ledger.lease import Lease
from deltackpt.reading import saves
from deltackpt.reading.log_places import LogFolder, LogPlaces
from deltackpt.storage.digests import check_step_files
from deltackpt.storage.store import FileStore, Spot, Stamp


class Steps:
    """Committed steps, and the compacted bases beside them.

    Attributes:
      spot: the folder that they stand in.
      item: name of our item in them.
      given: how the user named the root.
    """

    def __init__(self, spot: Spot, item: str, *, given: str | os.PathLike[str] | None = None):
        """Reads a folder of steps; nothing is asked yet.

        Args:
          spot: the folder.
          item: name of our item in a step.
          given: how the user named the root; by where it is, by default.
        """
        self.spot = spot
        self.item = item
        self.given = os.fspath(given) if given is not None else str(spot)
        self._known: dict[str, SaveInfo] = {}
        self._bases: dict[tuple[str, Stamp], SaveInfo] = {}
        #: The training thread asks about saves, and the collector does.
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.spot)

    @property
    def log_at(self) -> LogPlaces:
        """Where the log between the steps is read."""
        return LogFolder(self.spot / names.LOG)

    def at(self, step: int) -> Spot:
        """Where a step stands, if it is committed."""
        return self.spot / str(step)

    def steps(self) -> list[int]:
        """Committed steps, in no order: one listing of the root."""
        numbers = map(names.step_number, self.spot.folders())
        return [number for number in numbers if number is not None]

    def newest_step(self) -> int | None:
        """Newest committed step, None where there is none."""
        return max(self.steps(), default=None)

    def known_newest_step(self) -> int | None:
        """As ``newest_step``, by what was seen last where that costs less."""
        return self.newest_step()

    def saves(self) -> dict[int, SaveInfo | None]:
        """What each committed step is; None where its manifest cannot be read.

        Committed steps never change, so each is read once.
        """
        with self._lock:
            steps = {str(step): step for step in self.steps()}
            self._known = {name: info for name, info in self._known.items() if name in steps}
            found: dict[int, SaveInfo | None] = {}
            for name, step in steps.items():
                if name not in self._known:
                    # Removed while it is read, or damaged: it stays unknown.
                    with contextlib.suppress(RestoreError, OSError):
                        self._known[name] = saves.read_info(self.spot / name, self.item)
                found[step] = self._known.get(name)
            return found

    def restorable(self) -> dict[int, SaveId]:
        """Committed steps whose chains are whole, by what manifests say, each with its save id.

        Others may stand as parts of the windows of later steps.
        """
        standing = {info.step_dir: info for info in self.saves().values() if info is not None}
        # After the steps: what a base replaces goes once it is there.
        bases = self._compacted()
        read = {name: base for name, base in bases.items() if _stands_for(base, standing.get(name))}
        by_dir = standing | read
        found = {}
        for name, info in standing.items():
            with contextlib.suppress(BrokenChain):
                chain.restore_chain(by_dir[name], by_dir)
                found[info.save_id.step] = info.save_id
        return found

    def compacted(self) -> frozenset[SaveId]:
        """Saves for which a compacted base stands whose manifest can be read."""
        return frozenset(info.save_id for info in self._compacted().values())

    def _compacted(self) -> dict[str, SaveInfo]:
        """Compacted bases by the names of their steps; each is read once."""
        with self._lock:
            bases = saves.compacted_bases(self.spot, self.item)
            self._bases = {key: info for key, info in self._bases.items() if key in bases.items()}
            for key in bases.items():
                if key not in self._bases:
                    with contextlib.suppress(RestoreError, OSError):
                        found = saves.read_base(self.spot / key[0], self.item)
                        self._bases[key] = found.info
            return {name: info for (name, _), info in self._bases.items()}

    def check_step_files(
        self, step_dir: Spot | Path, share: tuple[int, int] = (0, 1), *, dense: bool = True
    ) -> None:
        """Checks the files of a step that carry no checksum of their own.

        Args:
          step_dir: the step.
          share: ``(i, n)`` checks the i-th of n parts of them, which make up all.
          dense: whether those of the dense leaves are among them.

        Raises:
          Damaged: the first that is missing or altered.
        """
        record = saves.read_save(step_dir, self.item).head
        if "step" not in record.digests:
            return
        others = f"{names.DENSE_ITEM}/"
        for damage in check_step_files(
            step_dir, share, wanted=lambda name: dense or not name.startswith(others)
        ):
            raise damage

    def metadata(self, step: int) -> bytes:
        """Orbax's metadata of a step, as it is stored.

        Raises:
          Damaged: there is none.
          StorageError: the store refused.
        """
        return (self.at(step) / names.STEP_METADATA).read()

    @contextlib.contextmanager
    def local(self, step: int, name: str) -> Iterator[Path]:
        """A folder of a step, for what reads nothing but files.

        Those of a bucket are fetched, and checked, for as long as they are needed.

        Args:
          step: the step.
          name: of the folder.

        Raises:
          Damaged: a file is not what was committed.
          StorageError: the store refused.
        """
        at = self._held_at(step) / name
        if isinstance(at.store, FileStore):
            yield Path(at)
            return
        assert isinstance(at.store, Committed)
        with tempfile.TemporaryDirectory(prefix="deltackpt-", dir=self._scratch()) as folder:
            at.store.fetch(at.key, Path(folder))
            yield Path(folder)

    def _held_at(self, step: int) -> Spot:
        """Where a step stands, in the one store that holds it."""
        return self.at(step)

    def _scratch(self) -> Path | None:
        """Where fetched files go; None: where temporary files go."""
        return None

    def await_readable(self, step: int) -> None:
        """Called before a step is read: waits until it can be; of most roots it always can.

        Raises:
          Damaged: it never can.
          WaitTimeout: it cannot yet.
        """

    def source_of(self, save_id: SaveId) -> str:
        """Where a save is read: the root, unless there are nearer places."""
        return "root"

    def found_damaged(self, step: int) -> bool:
        """A step could not be read: sets aside what is damaged where there is another copy of it.

        Returns:
          Whether to read the step again.
        """
        return False

    def check_lease(self, *, ask: bool = False) -> None:
        """Checks that what is held is not another's; who only reads holds nothing."""

    def newest_lease(self) -> Lease | None:
        """Who holds the root; None where nobody ever did, or it is not known.

        Raises:
          Damaged: it cannot be read.
        """
        return None

    def close(self) -> None:
        """Ends what is open."""


def _stands_for(base: SaveInfo, save: SaveInfo | None) -> bool:
    """Whether a compacted base is that of a save, or of one that is there no more."""
    return save is None or save.save_id == base.save_id
