# SPDX-License-Identifier: Apache-2.0
"""The steps of a root, for whoever reads: a directory's, or a bucket's laid out like one."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from deltackpt.errors import RestoreError
from deltackpt.format import names
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.lease import Lease
from deltackpt.reading import saves
from deltackpt.storage.digests import check_step_files
from deltackpt.storage.store import Spot, Stamp


class Steps:
    """Committed steps, and the compacted bases beside them.

    Attributes:
      spot: the folder that they stand in.
      item: name of our item in them.
    """

    def __init__(self, spot: Spot, item: str):
        """Reads a folder of steps; nothing is asked yet.

        Args:
          spot: the folder.
          item: name of our item in a step.
        """
        self.spot = spot
        self.item = item
        self._known: dict[str, SaveInfo] = {}
        self._bases: dict[tuple[str, Stamp], SaveInfo] = {}
        #: The training thread asks about saves, and the collector does.
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.spot)

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

    def check_step_files(self, step_dir: Spot | Path, share: tuple[int, int] = (0, 1)) -> None:
        """Checks the files of a step that carry no checksum of their own, dense ones included.

        Args:
          step_dir: the step.
          share: ``(i, n)`` checks the i-th of n parts of them, which make up all.

        Raises:
          Damaged: the first that is missing or altered.
        """
        record = saves.read_save(step_dir, self.item).head
        if "step" not in record.digests:
            return
        for damage in check_step_files(step_dir, share):
            raise damage

    def newest_lease(self) -> Lease | None:
        """Who holds the root; None where nobody ever did, or it is not known.

        Raises:
          Damaged: it cannot be read.
        """
        return None

    def close(self) -> None:
        """Ends what is open."""
