# SPDX-License-Identifier: Apache-2.0
"""What a trainer holds: the steps of a root, and what becomes of them as it saves."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Collection
from pathlib import Path

from deltackpt.events import Event
from deltackpt.format import names
from deltackpt.format.manifest import BaseRef, SaveId
from deltackpt.ledger.kept import Kept
from deltackpt.ledger.steps import Steps
from deltackpt.reading.log_places import LogFolder, LogPlaces
from deltackpt.storage.store import Spot, spot


class Held(Steps, abc.ABC):
    """The steps of a root that one trainer writes.

    Attributes:
      path: the directory that saves are made in: the root itself, or its stage.
      apart: whether of a job of several processes each has a ``path`` that the others do not see.
      tells: whether what happened in the background is this process's to tell.
    """

    apart = False
    tells = True

    def __init__(self, spot: Spot, item: str, path: Path, given: str | os.PathLike[str]):
        """Holds nothing yet.

        Args:
          spot: the folder that committed steps are read from.
          item: name of our item in a step.
          path: the directory that saves are made in.
          given: how the user named the root.
        """
        super().__init__(spot, item, given=given)
        self.path = path

    def step_dir(self, step: int) -> Path:
        """Where a step is made visible by a rename; it need not be read from there."""
        return self.path / str(step)

    @property
    def log_dir(self) -> Path:
        """Where the log is written: where saves are made."""
        return self.path / names.LOG

    @property
    def log_at(self) -> LogPlaces:
        """See ``Steps``."""
        return LogFolder(spot(self.log_dir))

    @abc.abstractmethod
    def check_lease(self, *, ask: bool = False) -> None:
        """Checks that nobody else has taken the root; called before every commit.

        Args:
          ask: whether a bucket is asked; else this is what is known of it by now.

        Raises:
          FencedError: a newer trainer holds it, or another directory stands in its place.
          StorageError: nothing stands there any more, or it cannot be read.
        """

    @abc.abstractmethod
    def roll_back(self, step: int, run: str) -> list[int]:
        """Takes every step after ``step`` out of the committed ones, with a warning.

        Args:
          step: the step that training goes on from.
          run: id of the run that goes on.

        Returns:
          The steps.
        """

    @abc.abstractmethod
    def remove_steps(self, steps: Collection[int]) -> None:
        """Removes committed steps, such that no step that stays needs one of them.

        Raises:
          StorageError: the store refused.
        """

    @abc.abstractmethod
    def collect(self, protected: Callable[[], frozenset[SaveId]] = frozenset) -> None:
        """Removes in the background what nothing needs; a failure surfaces at the next call.

        Args:
          protected: saves in flight, and possible parents; ``Lineage.protected``.
        """

    @abc.abstractmethod
    def note_kept(self, kept: Kept | None) -> None:
        """Notes what the trainer's policy keeps; None: every step.

        Raises:
          StorageError: it cannot be written.
        """

    # What only a root with tiers has to do.

    def stands(self, save_id: SaveId) -> bool:
        """Whether a save whose step is not in ``path`` is committed all the same."""
        return False

    def base_of(self, save_id: SaveId) -> BaseRef | None:
        """The compacted base that stands for a save, where it is not in ``path``."""
        return None

    def join(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Called first, by all processes of a job: what counts is what all of them have.

        Args:
          gather: what each process gives, on every process.
        """

    def begin(self, goes_on: SaveId | None, run: str) -> None:
        """Notes what training goes on from, before its first save.

        Args:
          goes_on: the save; None where it begins afresh.
          run: that goes on.

        Raises:
          StorageError: it cannot be noted.
        """

    def make_room(self, nbytes: int) -> str | None:
        """Waits until a save of so many bytes may be made; called in the background.

        Returns:
          A warning.

        Raises:
          FencedError: the root is another's meanwhile.
        """

    def give_up(self) -> None:
        """No save waits for room any more: the manager is closed."""

    def committed(self) -> None:
        """A step has been made visible in ``path``; called in the background of its save.

        Raises:
          StorageError: it is not as safe as it has to be.
        """

    def settle(self, timeout_secs: float) -> None:
        """Waits until every save that was made is where ``Tiers.wait_for`` says.

        Raises:
          WaitTimeout: it is not within that time; nothing is lost.
          FencedError: the root is another's meanwhile.
          Damaged: one cannot come there.
        """

    def news(self) -> list[Event]:
        """What has happened in the background since the last call."""
        return []
