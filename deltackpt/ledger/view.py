# SPDX-License-Identifier: Apache-2.0
"""Reads a journal: one listing and one read return the state of a checkpoint directory.

The newest entry may be lost or damaged, like any object, so most entries have a copy. If both are
lost, the previous entry is the state, and the loss is reported.
"""

from __future__ import annotations

import contextlib
import re
import threading
from typing import NamedTuple

from deltackpt.errors import Damaged
from deltackpt.ledger import entries
from deltackpt.ledger.entries import Entry, State
from deltackpt.storage.store import Missing, StorePath

#: Folder of the entries, below the root.
JOURNAL = "journal"
#: Digits of a number in a key, so that keys sort by number.
_DIGITS = 20
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})(\.copy)?\.msgpack")
#: Entries are kept until this many are newer; a reader that finds one gone looks again.
KEPT_ENTRIES = 100
_NOTHING = State(Entry())
_OTHER_READ = "its other copy is read instead"
_LOST = "the previous entry is read instead, so its changes are unknown; the next entry replaces it"


class _Listed(NamedTuple):
    """Numbers of the entries, and of the copies of entries, in a store."""

    entries: frozenset[int]
    copies: frozenset[int]


class JournalView:
    """The journal of a checkpoint directory, for readers; thread-safe."""

    def __init__(self, root: StorePath):
        """Reads nothing yet; ``root`` holds ``journal/`` and the committed files."""
        self.root = root
        self._known = _NOTHING
        #: Numbers of older entries that may still exist, and of copies.
        self._older: set[int] = set()
        self._copies: set[int] = set()
        #: Unreadable entries without a readable copy.
        self._lost: dict[int, Damaged] = {}
        #: All errors found, by object name.
        self._problems: dict[str, Damaged] = {}
        self._lost_saves: dict[int, Damaged] = {}
        #: The state and the missing entries for which lost saves were last searched.
        self._scanned: tuple[int, ...] = ()
        #: Whether the known journal no longer exists.
        self.is_replaced = False
        self._lock = threading.Lock()

    @property
    def known(self) -> State:
        """The last known state, or the initial one; sends no request."""
        return self._known

    @property
    def problems(self) -> list[Damaged]:
        """Journal objects that were found missing or damaged so far."""
        return [*self._problems.values()]

    @property
    def lost_saves(self) -> dict[int, Damaged]:
        """Steps with remote files that a lost entry may have committed."""
        return dict(self._lost_saves)

    def state(self) -> State:
        """Returns the newest entry's state: one listing, and a read if there is a newer entry.

        If neither the newest entry nor its copy can be read, the previous entry is used, and
        ``problems`` reports that.
        """
        before: _Listed | None = None
        while True:
            known = self._known.entry
            listed = self._listed(known.number - 1)
            if self._is_severed(known, listed):
                self._forget()
                continue
            try:
                found = self._newest(listed, is_same=listed == before)
            except Missing:
                # Collected because many entries followed: there are newer ones now.
                before = listed
                continue
            if found is not None:
                return found
            if self._follows(known):
                return self._known  # Only its entry was lost.
            self._forget()

    def audit(self) -> list[Damaged]:
        """Reads the newest entry and its copy; returns ``problems``."""
        state = self.state()
        listed = self._listed(state.entry.number - 1)
        for is_copy in (False, True):
            if state.entry.number in (listed.copies if is_copy else listed.entries):
                with contextlib.suppress(Missing):  # Collected concurrently.
                    try:
                        self._entry(state.entry.number, copy=is_copy)
                    except Damaged as error:
                        self._record_problem(error, _OTHER_READ)
        return self.problems

    def _newest(self, listed: _Listed, *, is_same: bool) -> State | None:
        """Returns the newest readable state; None if the known one was removed."""
        known = self._known.entry.number
        there = listed.entries | listed.copies
        lost = False
        for number in sorted((one for one in there if one > known), reverse=True):
            # ``is_same``: a missing object is lost, since nothing came after it.
            found = None if number in self._lost else self._readable(number, listed, is_same)
            if found is not None:
                state = self.learn(found, listed)
                if lost:
                    self._scan_for_saves(state)
                return state
            lost = True
        # A copy alone proves nothing: it may have been written after everything else was removed.
        if known and known not in listed.entries and not lost:
            return None
        if lost:
            self._scan_for_saves(self._known)
        return self._known

    def _readable(self, number: int, listed: _Listed, is_same: bool) -> Entry | None:
        """Returns an entry, read from its copy if it has one; None if neither can be read."""
        missing = Damaged(self._at(number).shown(), "an entry", "no such file")
        problem = None if number in listed.entries else missing
        # A copy belongs to an entry that was in force. If that was lost, a delayed write may put
        # another in its place, so an entry without a copy is listed again after it was read.
        for is_copy in (True, False):
            if number not in (listed.copies if is_copy else listed.entries):
                continue
            try:
                found = self._entry(number, copy=is_copy)
            except Missing:
                if not is_same:
                    raise
            except Damaged as error:
                problem = problem or error
            else:
                if problem is not None:
                    self._record_problem(problem, _OTHER_READ)
                if not is_copy and number not in listed.copies:
                    again = self._listed(number - 1)
                    if again.entries - listed.entries or again.copies - listed.copies:
                        raise Missing(str(self._at(number)))
                return found
        if not is_same:
            raise Missing(str(self._at(number)))  # A copy of it may have been put since.
        self._lost[number] = self._record_problem(problem or missing, _LOST)
        return None

    def _record_problem(self, problem: Damaged, action: str) -> Damaged:
        """Records a problem, and how it is handled."""
        reported = Damaged(problem.object_name, problem.expected, problem.found, action)
        self._problems[reported.object_name] = reported
        return reported

    def _follows(self, entry: Entry) -> bool:
        """Whether the previous entry, which may itself be lost, exists."""
        with contextlib.suppress(Missing, Damaged):
            return self._nonces(entry.number - 1)[0] == entry.previous
        return False

    def _is_severed(self, known: Entry, listed: _Listed) -> bool:
        """Returns whether newer entries exist, but the known journal was removed before them."""
        there = listed.entries | listed.copies
        if not known.number or not there or known.number in there:
            return False
        # An upload that was under way when the bucket was emptied leaves such an entry.
        return max(there) < known.number + KEPT_ENTRIES and not self._follows(known)

    def _forget(self) -> None:
        """Forgets the known state: its journal was removed or replaced."""
        with self._lock:
            self._known, self.is_replaced = _NOTHING, True
            self._older, self._copies, self._lost = set(), set(), {}

    def _scan_for_saves(self, state: State) -> None:
        """Records complete steps that may be committed although the entry for them is lost."""
        scanned = state.entry.number, *self._lost
        if scanned == self._scanned:
            return
        self._scanned = scanned
        problem = next(reversed(self._problems.values()))
        at = self.root / entries.SAVES
        for key in at.keys():
            prefix, _, name = f"{entries.SAVES}/{key}".rpartition("/")
            epoch, step = entries.prefix_epoch(prefix), entries.prefix_step(prefix)
            if name != entries.COMMIT or epoch is None or step is None:
                continue
            if prefix not in state.prefixes and epoch >= state.epoch:
                self._lost_saves[step] = problem

    def learn(self, entry: Entry, listed: _Listed | None = None) -> State:
        """Adopts an entry as the newest, unless a newer one is known; sends no request."""
        with self._lock:
            if listed is not None:
                self._copies |= listed.copies
            if entry.number > self._known.entry.number:
                self._older.update(() if listed is None else listed.entries)
                if self._known.entry.number:
                    self._older.add(self._known.entry.number)
                self._older.discard(entry.number)
                self._known = State(entry)
                self._lost = {one: why for one, why in self._lost.items() if one > entry.number}
            return self._known

    def _listed(self, after: int) -> _Listed:
        """Numbers of the entries, and of the copies, after a given one."""
        folder = self._key(JOURNAL)
        start = self._key(entry_name(after)) if after > 0 else ""
        keys = self.root.store.keys(folder, after=start)
        named = map(_NAME.fullmatch, (key.removeprefix(f"{folder}/") for key in keys))
        found = [(int(one[1]), one[2]) for one in named if one and int(one[1]) > max(after, 0)]
        return _Listed(
            frozenset(number for number, copy in found if not copy),
            frozenset(number for number, copy in found if copy),
        )

    def _entry(self, number: int, *, copy: bool = False) -> Entry:
        at = self._at(number, copy=copy)
        return entries.entry_from(at.store.get(at.key), name=at.shown(), number=number)

    def _nonces(self, number: int, *, copy: bool = False) -> tuple[str, str]:
        """The nonces of an entry, or of its copy, and of its predecessor; raises as ``_entry``."""
        at = self._at(number, copy=copy)
        return entries.nonces_of(at.store.get(at.key), name=at.shown(), number=number)

    def _at(self, number: int, *, copy: bool = False) -> StorePath:
        name = entry_name(number)
        return self.root / (entries.copy_name(name) if copy else name)

    def _key(self, name: str) -> str:
        return f"{self.root.key}/{name}" if self.root.key else name


def entry_name(number: int) -> str:
    """Returns an entry's name below the root."""
    return f"{JOURNAL}/{number:0{_DIGITS}}.msgpack"
