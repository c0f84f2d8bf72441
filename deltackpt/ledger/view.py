# SPDX-License-Identifier: Apache-2.0
"""What a journal says, for readers: one listing and one read tell the state of a root."""

from __future__ import annotations

import threading

import google_crc32c

from deltackpt.errors import Damaged
from deltackpt.ledger import entries
from deltackpt.ledger.entries import Entry, Page, PageRef, Standing, State, Unit
from deltackpt.storage.store import Missing, Spot

#: The folder of entries and pages, below the root.
JOURNAL = "journal"
#: Digits of a number in a key, so that keys are in the order of the numbers.
_DIGITS = 20
#: Entries stay until this many are newer; whoever reads one looks again where it has gone.
KEPT_ENTRIES = 100
#: How often a reader looks again where the newest entry has gone while it was read.
_TRIES = 20
_NOTHING = State(entry=Entry(), standings={}, pages={})


class JournalView:
    """The journal of a root, for whoever asks; every method may be called from several threads."""

    def __init__(self, root: Spot):
        """Opens one; nothing is read yet.

        Args:
          root: the folder that holds ``journal/`` and what is committed.
        """
        self.root = root
        self._known = _NOTHING
        #: Numbers of entries that may still be there, older than the known one.
        self._older: set[int] = set()
        self._lock = threading.Lock()

    @property
    def known(self) -> State:
        """What was seen last, or the state before all others; the store is not asked."""
        return self._known

    def state(self) -> State:
        """What the newest entry says: one listing, and a read where there is a newer one.

        Raises:
          Damaged, FormatTooNew: it cannot be understood.
          StorageError: the store refused.
        """
        tries = 0
        while found := self._numbers(self._known.entry.number):
            try:
                return self._learn(self._entry(max(found)), found)
            except Missing as error:
                # Collected, since so many came after it while it was read.
                tries += 1
                if tries == _TRIES:
                    at = self.root / entry_name(max(found))
                    expected = "an entry and the pages that it names"
                    raise Damaged(at.shown(), expected, str(error)) from error
        return self._known

    def learn(self, data: bytes, name: str) -> State:
        """Takes what another process has read of the newest entry; only its pages are asked for.

        Args:
          data: the bytes of an entry.
          name: how errors name it.

        Raises:
          Damaged, FormatTooNew: it cannot be understood.
          StorageError: the store refused a page.
        """
        entry = entries.entry_from(data, name=name, number=None)
        return self._learn(entry, []) if entry.number > self._known.entry.number else self._known

    def _learn(self, entry: Entry, numbers: list[int]) -> State:
        """Takes an entry for the newest, unless a newer one is known; numbers are of all found."""
        known = self._known.pages
        pages = {ref: known.get(ref) or self._page(ref) for ref in entry.pages}
        standings: dict[Unit, Standing] = {}
        for page in pages.values():
            standings.update((one.unit, one) for one in page.standings)
        standings.update((one.unit, one) for one in entry.standings)
        with self._lock:
            if entry.number > self._known.entry.number:
                self._older.update(numbers)
                if self._known.entry.number:
                    self._older.add(self._known.entry.number)
                self._older.discard(entry.number)
                self._known = State(entry=entry, standings=standings, pages=pages)
            return self._known

    def _numbers(self, after: int) -> list[int]:
        """Numbers of the entries after one."""
        folder = self._key(JOURNAL)
        keys = self.root.store.keys(folder, after=self._key(entry_name(after)) if after else "")
        found = (_number(key.removeprefix(f"{folder}/")) for key in keys)
        return [number for number in found if number is not None and number > after]

    def _entry(self, number: int) -> Entry:
        """An entry.

        Raises:
          Missing: there is none of that number any more.
        """
        at = self.root / entry_name(number)
        return entries.entry_from(at.store.get(at.key), name=at.shown(), number=number)

    def _page(self, ref: PageRef) -> Page:
        """A page.

        Raises:
          Missing: it was collected, so that a newer entry names others.
        """
        at = self.root / ref.name
        data = at.store.get(at.key)
        if (found := google_crc32c.value(data)) != ref.crc32c:
            raise Damaged(at.shown(), f"crc32c {ref.crc32c:08x}", f"crc32c {found:08x}")
        return entries.page_from(data, name=at.shown())

    def _key(self, name: str) -> str:
        """Where a name below the root stands in the store."""
        return f"{self.root.key}/{name}" if self.root.key else name


def entry_name(number: int) -> str:
    """Where an entry stands, below the root."""
    return f"{JOURNAL}/{number:0{_DIGITS}}.msgpack"


def _number(name: str) -> int | None:
    """The number of an entry's name, None of another one."""
    digits = name.removesuffix(".msgpack")
    if len(digits) == _DIGITS and digits != name and digits.isascii() and digits.isdecimal():
        return int(digits)
    return None
