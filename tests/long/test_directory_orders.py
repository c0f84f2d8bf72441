# SPDX-License-Identifier: Apache-2.0
"""Two trainers that fence each other in a directory, and a reader.

``test_kills.py`` kills trainers in each of these calls. The order of calls depends on the machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import raced

from deltackpt.errors import FencedError, StorageError
from deltackpt.format import naming
from deltackpt.ledger.directory import Root, is_leftover
from deltackpt.storage.posix import DurableDir

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

_FILES = ("first", "second")


class _Save(NamedTuple):
    """A save; each of its files contains its text."""

    step: int
    run: str
    epoch: int


class _Shared:
    """What the trainers of a round have done so far."""

    def __init__(self) -> None:
        #: Saves whose commit has returned.
        self.committed: list[_Save] = []
        #: Saves that a trainer removes, and the epochs and targets of rollbacks.
        self.removed: set[_Save] = set()
        self.rolled_back: list[tuple[int, int]] = []
        #: Epoch of the newest trainer that has started.
        self.epoch = 0
        self.counts: Counter[str] = Counter()

    def may_be_gone(self, save: _Save) -> bool:
        """Whether a later trainer, or its own, may have removed or rolled back a save."""
        return save in self.removed or any(
            epoch >= save.epoch and save.step > after for epoch, after in self.rolled_back
        )


def _stored(folder: Path) -> set[str]:
    """Returns the texts in the files of a step: one, if it is complete."""
    return {(folder / naming.EMBEDDINGS_ITEM / name).read_text() for name in _FILES}


class _Trainer:
    """A trainer that continues from the newest step until it is fenced, and then starts again."""

    def __init__(self, path: Path, drawn: random.Random, shared: _Shared):
        self.path, self.drawn, self.shared = path, drawn, shared

    def train(self) -> None:
        for _ in range(3):
            before = [*self.shared.committed]
            with contextlib.suppress(FencedError), contextlib.closing(Root.open(self.path)) as root:
                self.shared.epoch = max(self.shared.epoch, root.epoch)
                try:
                    self._train(root, before)
                except FencedError:
                    self.shared.counts["fenced"] += 1

    def _train(self, root: Root, before: list[_Save]) -> None:
        steps, shared = {*root.steps()}, self.shared
        lost = [one for one in before if one.step not in steps and not shared.may_be_gone(one)]
        assert not lost, (lost, steps)
        run = f"{self.drawn.getrandbits(64):016x}"
        newest = max(steps, default=-1)
        if newest >= 0 and self.drawn.random() < 0.3:
            newest = self.drawn.choice([*steps])
            shared.rolled_back.append((root.epoch, newest))
            shared.counts["rolled back"] += len(root.roll_back(newest, run))
        for _ in range(self.drawn.randrange(2, 6)):
            newest += 1
            if not self._save(root, _Save(newest, run, root.epoch)):
                return
            if self.drawn.random() < 0.3:
                old = {one for one in shared.committed if one.step < newest} - shared.removed
                shared.removed.update(old)
                root.remove_steps({one.step for one in old})
                shared.counts["removed"] += len(old)
                root.collect()

    def _save(self, root: Root, save: _Save) -> bool:
        """Saves a step; returns whether it was committed."""
        temporary = self.path / f"{save.step}{naming.TEMPORARY}-{save.run}"
        try:
            (temporary / naming.EMBEDDINGS_ITEM).mkdir(parents=True)
            for name in _FILES:
                (temporary / naming.EMBEDDINGS_ITEM / name).write_text(repr(save))
        except FileNotFoundError:  # A newer trainer removes it: the next check finds that.
            pass
        newest = self.shared.epoch
        root.check_lease()
        assert newest <= root.epoch, "the lease of an older trainer was not refused"
        try:
            DurableDir(self.path).publish(temporary, root.step_dir(save.step))
        except StorageError:  # As above, between the check and the rename.
            self.shared.counts["late"] += 1
            return False
        self.shared.committed.append(save)
        return True


def _read(path: Path, over: threading.Event) -> int:
    """Checks that each step is complete as long as it is listed."""
    read = 0
    while not over.is_set():
        for name in filter(str.isdecimal, os.listdir(path)):
            with contextlib.ExitStack() as stack:
                try:
                    # While it is open, no other directory gets its inode.
                    place = os.open(path / name, os.O_RDONLY | os.O_DIRECTORY)
                except FileNotFoundError:
                    continue
                stack.callback(os.close, place)
                try:
                    found, error = _stored(path / name), None
                except FileNotFoundError as caught:
                    found, error = set[str](), caught
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(place), os.stat(path / name)):
                        assert error is None and len(found) == 1, (name, found, error)
                        read += 1
    return read


def _round(path: Path, drawn: random.Random) -> Counter[str]:
    path.mkdir()
    shared = _Shared()
    trainers = [_Trainer(path, random.Random(drawn.getrandbits(32)), shared) for _ in range(2)]
    reads = raced([trainer.train for trainer in trainers], functools.partial(_read, path))
    with contextlib.closing(Root.open(path)) as root:
        steps = {*root.steps()}
        lost = [one for one in shared.committed if one.step not in steps]
        assert all(map(shared.may_be_gone, lost)), lost
        aside = [*(path / naming.ROLLED_BACK).glob("*/*")]
        for folder in (*(path / str(step) for step in steps), *aside):
            assert len(_stored(folder)) == 1, folder
        assert not [name for name in os.listdir(path) if is_leftover(name)]
    counts = Counter(rounds=1, commits=len(shared.committed), epochs=root.epoch, reads=reads)
    return counts + shared.counts


@pytest.mark.filterwarnings("ignore:.*were moved to")
def test_two_trainers_in_a_directory_lose_no_commit(campaign, figures, tmp_path):
    drawn = campaign.random("directory orders")
    counts: Counter[str] = Counter()
    for number in range(campaign.count(400)):
        seed = drawn.getrandbits(32)
        try:
            counts += _round(tmp_path / str(number), random.Random(seed))
        except BaseException as error:
            error.add_note(f"round of {seed}")
            raise
    figures("two trainers in a directory", **counts)
