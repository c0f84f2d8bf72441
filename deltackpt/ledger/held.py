# SPDX-License-Identifier: Apache-2.0
"""A trainer's writable checkpoint directory: its steps, and how saves change them."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from deltackpt.events import Event
from deltackpt.format import names
from deltackpt.format.manifest import BaseRef, SaveId
from deltackpt.ledger import lease
from deltackpt.ledger.kept import Kept
from deltackpt.ledger.steps import Steps
from deltackpt.reading.wal_locations import WalFolder, WalLocation
from deltackpt.storage.posix import DurableDir
from deltackpt.storage.store import StorePath, store_path


class Held(Steps, abc.ABC):
    """The checkpoint directory that one trainer writes.

    Attributes:
      path: the local directory in which saves are made: the checkpoint directory, or its staging
        directory.
      apart: whether each process of a job has a ``path`` that the others do not see.
      tells: whether this process reports background events.
    """

    apart = False
    tells = True

    def __init__(self, store_path: StorePath, item: str, path: Path, given: str | os.PathLike[str]):
        """Stores its arguments only.

        Args:
          store_path: the folder from which committed steps are read.
          item: name of the deltackpt item in a step.
          path: the local directory in which saves are made.
          given: the path or URL that the user passed.
        """
        super().__init__(store_path, item, given=given)
        self.path = path

    def step_dir(self, step: int) -> Path:
        """Returns the path to which a step is renamed; it need not be read from there."""
        return self.path / str(step)

    @property
    def epoch(self) -> int:
        """The epoch of the lease of ``path``; 0 if another process of the job holds it."""
        return 0

    @property
    def opened_dir(self) -> Path:
        """The directory that was opened: ``path``, or the staging directory that contains it."""
        return self.path

    def remove_remade(self, temporary: Path) -> None:
        """Removes what a failed save created in place of a directory that was moved or removed.

        TensorStore creates all parent folders of a file. A directory in use has a lease file.
        """
        # It no longer exists, or another process has written there.
        with contextlib.suppress(OSError):
            if [*lease.epochs(self.path)]:
                return
            DurableDir(temporary.parent).remove(temporary)
            for folder in (self.path, *self.path.parents):
                folder.rmdir()
                if folder == self.opened_dir:
                    break

    @property
    def log_dir(self) -> Path:
        """The directory of the WAL: where saves are made."""
        return self.path / names.LOG

    @property
    def log_at(self) -> WalLocation:
        """See ``Steps``."""
        return WalFolder(store_path(self.log_dir), self.topics)

    @abc.abstractmethod
    def check_lease(self, *, ask: bool = False) -> None:
        """Checks that no other trainer has taken the lease; called before every commit.

        Args:
          ask: whether to query a bucket; otherwise the last known state is used.

        Raises:
          FencedError: a newer trainer holds it, or another directory has replaced it.
          StorageError: it no longer exists, or is not readable.
        """

    @abc.abstractmethod
    def roll_back(self, step: int, run: str) -> list[int]:
        """Un-commits every step after ``step``, with a warning.

        Args:
          step: the step from which training resumes.
          run: id of the run that resumes.

        Returns:
          The removed steps.
        """

    @abc.abstractmethod
    def remove_steps(self, steps: Collection[int]) -> None:
        """Removes committed steps; no remaining step may need one of them.

        Raises:
          StorageError: the store reported an error.
        """

    @abc.abstractmethod
    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """Deletes unneeded files in the background; a failure is raised by the next call.

        Args:
          protected: saves in flight and possible parents; ``Lineage.protected``.
        """

    @abc.abstractmethod
    def note_kept(self, kept: Kept | None) -> None:
        """Records which steps the trainer's policy keeps; None means every step.

        Raises:
          StorageError: writing failed.
        """

    def confirm(self) -> None:
        """Called once every process has its manager: fences the previous holder.

        If it raises, ``abandon`` returns the lease or completes this.

        Raises:
          FencedError: a newer trainer has started.
        """

    # Only for directories with tiers.

    def stands(self, save_id: SaveId) -> bool:
        """Returns whether a save is committed although its step is not in ``path``."""
        return False

    def base_of(self, save_id: SaveId) -> BaseRef | None:
        """Returns the compacted base of a save, if it is not in ``path``."""
        return None

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Called first, by all processes of a job: only saves that all of them have count.

        Args:
          gather: collects a value from each process, on every process.
        """

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """Records, before the first save, from which save training resumes.

        Args:
          goes_on: the save; None if training starts from scratch.
          run: id of the run that resumes.

        Raises:
          StorageError: writing failed.
        """

    def make_room(self, nbytes: int) -> str | None:
        """Waits until there is room for a save of the given size; called in the background.

        Returns:
          A warning, or None.

        Raises:
          FencedError: another trainer has taken over.
        """

    def give_up(self) -> None:
        """Ends waiting for room, because the manager is closed."""

    def committed(self) -> None:
        """Called in the background of a save after its step was renamed into ``path``.

        Raises:
          StorageError: it did not reach the required tier.
        """

    def settle(self, timeout_secs: float) -> None:
        """Waits until every save has reached the tier ``Tiers.wait_for``.

        Raises:
          WaitTimeout: the timeout expired; nothing is lost.
          FencedError: another trainer has taken over.
          Damaged: a save cannot reach the tier.
        """

    def news(self) -> list[Event]:
        """Returns the background events since the last call."""
        return []
