# SPDX-License-Identifier: Apache-2.0
"""The ledger of a store that has no rename: numbered entries, each put where there is none.

Claim, commit, rollback, retention and compaction are each one such write, so that none needs a
rename, a lock or a clock, and a trainer is fenced by the very write that would commit.

To change the state: 1. Put the entry after the newest known, only where there is none. 2. Refused:
the one that stands there may be this one, its answer lost; its nonce tells. Else the newest is read
and the change is made to that. 3. List what comes after. If there is something, the next entry must
name this one; otherwise this one fell into a hole that collection left, and counts as refused. That
is what makes the collection of old entries safe beside a writer who stopped for however long.

A write whose answer never came may still arrive. So what an entry that was sent names is kept until
its number is known to hold an entry; and a change is judged anew by what the newest entry says.

What a root promises of commit, durability and lease: a step appears by one conditional put, and is
as durable as the store makes it; who has lost the claim can commit nothing, however late; nothing
depends on clocks. The store must refuse a conditional put of a key that is there, which opening
probes, and listings must show what was put before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import google_crc32c

from deltackpt.errors import (
    BrokenChain,
    DeltackptError,
    FencedError,
    InUse,
    StorageError,
    TargetDiffers,
)
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries, lease
from deltackpt.ledger.entries import (
    Claim,
    Entry,
    LogRef,
    Page,
    PageRef,
    RolledBack,
    Standing,
    State,
    Unit,
)
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.view import KEPT_ENTRIES, JournalView, entry_name
from deltackpt.storage.store import Exists, Missing, Spot

#: Old entries are deleted this many at a time.
_DELETED_AT_ONCE = 32

#: What becomes of a state: the fields of its entry that change, None where nothing does.
Change = Callable[[State], Mapping[str, Any] | None]


class Journal(JournalView):
    """The journal of a root, for whoever writes it.

    A trainer claims it; who adds what belongs to the trainer's claim (its promoter, a compactor)
    resumes that claim, and is refused once another one has been made.
    """

    def __init__(self, root: Spot):
        """Opens one; nothing is read or written yet."""
        super().__init__(root)
        self._claim: Claim | None = None
        #: Prefixes of entries whose answers never came, by the number that these were to have.
        self._sent: dict[str, int] = {}
        #: Prefixes of uploads that were given up here, and of what was removed here.
        self._failed: set[str] = set()
        #: Whether the known state may be an old one.
        self._stale = True
        #: Held while the state is changed; readers go on meanwhile.
        self._writing = threading.RLock()

    # ---- who writes

    @property
    def claimed(self) -> Claim:
        """The claim under which this one writes."""
        assert self._claim is not None
        return self._claim

    def claim(self, *, after_epoch: int | None = None) -> Claim:
        """Takes the root: whoever held it can commit nothing more.

        Args:
          after_epoch: take it only after this epoch, and from nobody else.

        Raises:
          InUse: another epoch than ``after_epoch`` holds it.
          Damaged, FormatTooNew: the newest entry cannot be understood.
          StorageError: the store refused.
        """
        holder = uuid.uuid4().hex

        def change(state: State) -> Mapping[str, Any] | None:
            if any(one.lease.holder == holder for one in state.entry.claims):
                return None
            if after_epoch not in (None, state.epoch):
                raise InUse(
                    f"{self.root}: expected its claim at epoch {after_epoch}, found epoch "
                    f"{state.epoch}: a trainer started meanwhile; it collects by itself"
                )
            taken = Lease(
                epoch=state.epoch + 1,
                holder=holder,
                host=socket.gethostname(),
                pid=os.getpid(),
                since_secs=time.time(),
            )
            return {"claims": (*state.entry.claims, Claim(lease=taken))[-entries.MOST_CLAIMS :]}

        state = self._change(change)
        for one in state.entry.claims:
            if one.lease.holder == holder:
                self._claim = one
                return one
        raise self._fenced(state.claim, holder)  # As many came after it as an entry remembers.

    def resume(self, holder: str | None = None) -> Claim:
        """Goes on under the newest claim.

        Args:
          holder: of the claim that it must be.

        Raises:
          FencedError: it is another's; or there is none.
          StorageError: the store refused.
        """
        newest = self.state().claim
        if newest is None or holder not in (None, newest.lease.holder):
            raise self._fenced(newest, holder)
        self._claim, self._stale = newest, False
        return newest

    def check(self) -> State:
        """Checks that the claim is still the newest; one listing.

        Raises:
          FencedError: it is not.
          StorageError: the store refused.
        """
        state = self.state()
        self._require_claim(state)
        return state

    def begin(self, goes_on: SaveId | None, stages: Iterable[str] = ()) -> None:
        """Notes what training goes on from under the claim, before its first save.

        Args:
          goes_on: the save that was restored, None where training began afresh.
          stages: ids of the stages of its processes.

        Raises:
          FencedError, StorageError: as ``commit``.
        """

        def change(state: State) -> Mapping[str, Any] | None:
            claim = state.entry.claims[-1]
            began = dataclasses.replace(claim, began=True, goes_on=goes_on, stages=(*stages,))
            if began == claim:
                return None
            return {"claims": (*state.entry.claims[:-1], began)}

        self._claim = self._change_own(change).claim

    # ---- what is committed

    def prefix(self, unit: Unit, token: str | None = None) -> str:
        """A fresh place to put the files of a unit, below the root."""
        epoch = self.claimed.lease.epoch
        return entries.prefix_of(unit, epoch, token or uuid.uuid4().hex[:12])

    def commit(self, standing: Standing, *, alone: bool = False, anew: bool = False) -> Standing:
        """Makes a step, or a compacted base, visible; its files have been put by now.

        Args:
          standing: what it is, under a prefix of this claim.
          alone: whether a base may stand without the step that it stands for, as in a copy.
          anew: whether it takes the place of an upload of the same save, as where that is damaged.

        Returns:
          What stands for the save now: another upload of it where that came first.

        Raises:
          FencedError: the claim is another's; nothing becomes visible.
          BrokenChain: the parent, or the step of a base, is gone.
          TargetDiffers: another save has the name.
          StorageError: the store refused, or did not answer: it may be committed, which the next
            call tells.
        """
        unit, save_id = standing.unit, standing.save_id
        replaced: list[Standing] = []

        def change(state: State) -> Mapping[str, Any] | None:
            there = state.standings.get(unit)
            if there is not None and there.save_id == save_id:
                if not anew or there.prefix == standing.prefix:
                    return None
                replaced[:] = [there]
                self._outlive(replaced)
                return self._with(state, {**state.standings, unit: standing})
            if there is not None:
                raise TargetDiffers(
                    f"{self.root}: expected no {unit.name}, or save id {save_id}, found save id "
                    f"{there.save_id}: it is not touched; roll back behind it first"
                )
            if unit.item is None and state.held(save_id) and not anew:
                return None  # It was committed, and retired since.
            self._require_parent(state, standing, alone=alone)
            fields = self._with(state, {**state.standings, unit: standing})
            if unit.item is None:
                fields["promoted"] = entries.promoted_with(state.entry.promoted, save_id)
            return fields

        state = self._change_own(change, standing.prefix)
        self.delete(one.prefix for one in replaced)
        return state.standings.get(unit, standing)

    def _require_parent(self, state: State, standing: Standing, *, alone: bool) -> None:
        parent = standing.parent
        if standing.item is not None:
            of = state.steps.get(standing.step)
            if not alone and (of is None or of.save_id != standing.save_id):
                raise BrokenChain(
                    f"{self.root}: base of step {standing.step}: expected save id "
                    f"{standing.save_id} to stand, found {of.save_id if of else 'none'}; fold "
                    "again"
                )
        elif parent is not None and not (
            state.stands(parent.save_id) or state.stands(standing.save_id)
        ):
            raise BrokenChain(
                f"{self.root}: step {standing.step}: expected its parent {parent.step_dir} (save "
                f"id {parent.save_id}) to stand, found that it was removed; the next save is a base"
            )

    def retire(self, units: Collection[Unit] | Mapping[Unit, SaveId]) -> list[Standing]:
        """Makes units invisible, such that none that stays needs them, then deletes their files.

        Args:
          units: which; with save ids, only where they are these saves.

        Returns:
          What was removed.

        Raises:
          FencedError, StorageError: as ``commit``.
        """
        removed: dict[Unit, Standing] = {}

        def change(state: State) -> Mapping[str, Any] | None:
            found = {unit: state.standings[unit] for unit in units if unit in state.standings}
            if isinstance(units, Mapping):
                meant = units.items()
                found = {
                    unit: there for unit, there in found.items() if (unit, there.save_id) in meant
                }
            removed.update(found)
            if not found:
                return None
            self._outlive(found.values())
            kept = {unit: one for unit, one in state.standings.items() if unit not in found}
            return self._with(state, kept)

        self._change_own(change)
        self.delete(one.prefix for one in removed.values())
        return [*removed.values()]

    def roll_back(
        self, after: int, run: str, *, only: Collection[SaveId] | None = None
    ) -> list[int]:
        """Takes every step after one, and its base, out of what is committed.

        Its files stay, named in the journal, until they are collected or too many others follow.

        Args:
          after: the step that training goes on from.
          run: id of the run that goes on.
          only: the saves that are meant; every later one by default.

        Returns:
          The steps, ascending.

        Raises:
          FencedError, StorageError: as ``commit``.
        """
        later: list[Standing] = []
        given_up: list[Standing] = []

        def change(state: State) -> Mapping[str, Any] | None:
            found = [
                one
                for one in state.standings.values()
                if one.step > after and (only is None or one.save_id in only)
            ]
            if not found:
                return None
            later[:] = found
            aside = (
                *state.entry.rolled_back,
                *(RolledBack(run=run, standing=one) for one in found),
            )
            cut = max(0, len(aside) - entries.MOST_ROLLED_BACK)
            given_up[:] = [one.standing for one in aside[:cut]]
            self._outlive(given_up)
            units = {one.unit for one in found}
            kept = {unit: one for unit, one in state.standings.items() if unit not in units}
            return {**self._with(state, kept), "rolled_back": aside[cut:]}

        self._change_own(change)
        self.delete(one.prefix for one in given_up)
        return sorted({one.step for one in later if one.item is None})

    def forget_rolled_back(self) -> list[Standing]:
        """Deletes what training went back behind.

        Raises:
          FencedError, StorageError: as ``commit``.
        """
        removed: list[Standing] = []

        def change(state: State) -> Mapping[str, Any] | None:
            removed[:] = [one.standing for one in state.entry.rolled_back]
            self._outlive(removed)
            return {"rolled_back": ()} if removed else None

        self._change_own(change)
        self.delete(one.prefix for one in removed)
        return removed

    # ---- the log between the steps

    def add_log(self, ref: LogRef) -> bool:
        """Makes the head of a stretch count, which has been put by now.

        Earlier stretches count from now on only as far as it goes on from them.

        Args:
          ref: where it stands, under a prefix of this claim.

        Returns:
          Whether it does: not where the stretch is known by another prefix, or a newer one is.

        Raises:
          FencedError, StorageError: as ``commit``.
        """
        given_up: list[LogRef] = []

        def change(state: State) -> Mapping[str, Any] | None:
            logs = state.entry.logs
            if logs and logs[-1].stretch >= ref.stretch:
                return None
            every = (*logs, ref)
            given_up[:] = every[: -entries.MOST_LOGS]
            self._failed.update(one.prefix for one in given_up)
            return {"logs": every[-entries.MOST_LOGS :]}

        state = self._change_own(change, ref.prefix)
        self.delete(one.prefix for one in given_up)
        return ref in state.entry.logs

    def retire_logs(self, stretches: Collection[int]) -> None:
        """Makes stretches of the log count no more, then deletes what is there of them.

        Raises:
          FencedError, StorageError: as ``commit``.
        """
        removed: list[LogRef] = []

        def change(state: State) -> Mapping[str, Any] | None:
            logs = state.entry.logs
            found = [one for one in logs if one.stretch in stretches]
            removed.extend(found)
            self._failed.update(one.prefix for one in found)
            return {"logs": tuple(one for one in logs if one not in found)} if found else None

        self._change_own(change)
        self.delete(one.prefix for one in removed)

    # ---- what is in nobody's way any more

    def give_up(self, prefix: str) -> None:
        """An upload has failed: ``sweep`` deletes what it put, once it cannot be committed."""
        self._failed.add(prefix)

    def _outlive(self, standings: Iterable[Standing]) -> None:
        """``sweep`` deletes their files where the answer of what removes them, or more, is lost."""
        self._failed.update(one.prefix for one in standings)

    def sweep(self) -> int:
        """Deletes what no state names and none ever will; returns how many objects that were.

        These are the uploads of claims that are over, and those that were given up here. Whoever
        still uploads under a claim that is over cannot commit it.

        Raises:
          FencedError: the claim is another's: what is left over is his to sweep.
          StorageError: the store refused.
        """
        state = self.check()
        count = 0
        for keys in self.left_over(state).values():
            self.root.store.delete(keys)
            count += len(keys)
        at = self.root / entries.PAGES
        named = {page.name for page in state.entry.pages}
        pages = (key.removeprefix(self._key("")) for key in at.store.keys(at.key))
        over = [
            self._key(name)
            for name in pages
            if name not in named and (entries.page_epoch(name) or state.epoch) < state.epoch
        ]
        at.store.delete(over)
        self._failed = {prefix for prefix in self._failed if not self._is_over(state, prefix)}
        return count + len(over)

    def left_over(self, state: State) -> dict[str, list[str]]:
        """Prefixes of uploads that no entry names, nor can any more, with the keys below them."""
        found: dict[str, list[str]] = {}
        for folder in (entries.SAVES, entries.BASES, entries.LOGS):
            at = self.root / folder
            inside = f"{at.key}/"
            for key in at.store.keys(at.key):
                parts = key.removeprefix(inside).split("/")
                deep = 2 if folder == entries.BASES else 1
                prefix = "/".join([folder, *parts[:deep]])
                if len(parts) > deep and self._is_over(state, prefix):
                    found.setdefault(prefix, []).append(key)
        return found

    def _is_over(self, state: State, prefix: str) -> bool:
        """Whether no entry names a prefix, and none can any more."""
        epoch = entries.prefix_epoch(prefix)
        if epoch is None or prefix in state.prefixes:
            return False
        if epoch < state.epoch:
            return True
        return prefix in self._failed and state.entry.number >= self._sent.get(prefix, 0)

    def delete(self, prefixes: Iterable[str]) -> None:
        """Deletes the files under prefixes that no entry names any more."""
        for prefix in prefixes:
            at = self.root / prefix
            at.store.delete(at.store.keys(at.key))

    def _delete_old_entries(self, *, least: int) -> None:
        """Deletes entries of which enough newer ones stand, where there are so many of them."""
        newest = self._known.entry.number
        with self._lock:
            old = {number for number in self._older if number <= newest - KEPT_ENTRIES}
            if len(old) < least:
                return
            self._older -= old
        # What cannot be deleted now is in nobody's way.
        with contextlib.suppress(StorageError):
            self.root.store.delete(self._key(entry_name(number)) for number in sorted(old))

    # ---- how the state changes

    def _change_own(self, change: Change, prefix: str | None = None) -> State:
        """As ``_change``, under the claim and never without it.

        Raises:
          FencedError: it is another's.
        """

        def checked(state: State) -> Mapping[str, Any] | None:
            self._require_claim(state)
            return change(state)

        return self._change(checked, prefix)

    def _change(self, change: Change, prefix: str | None = None) -> State:
        """Makes a change to the newest state, whatever that is by then.

        Args:
          change: what becomes of a state. It is asked again where another entry came first, and
            where an answer was lost: it tells by the state whether it was made already.
          prefix: what the change makes visible.

        Returns:
          The state with the change.
        """
        with self._writing:
            fresh = self._stale
            state = self.state() if fresh else self.known
            while True:
                try:
                    fields = change(state)
                except DeltackptError:
                    if fresh:
                        raise
                    fields = None
                if fields is None and fresh:
                    self._stale = False
                    return state
                if fields is not None:
                    entry = dataclasses.replace(
                        state.entry,
                        **fields,
                        number=state.entry.number + 1,
                        nonce=uuid.uuid4().hex,
                        previous=state.entry.nonce,
                    )
                    # Until it is known to be in force, another state may be the newest.
                    self._stale = True
                    if prefix is not None:
                        self._sent[prefix] = entry.number
                    if self._put(entry):
                        return self._in_force(entry)
                state, fresh = self.state(), True

    def _in_force(self, entry: Entry) -> State:
        state = self._learn(entry, [])
        self._stale = False
        # Whatever else was sent under its number, or an earlier one, has lost.
        self._sent = {one: number for one, number in self._sent.items() if number > entry.number}
        self._delete_old_entries(least=_DELETED_AT_ONCE)
        return state

    def _put(self, entry: Entry) -> bool:
        """Puts an entry after the one that it follows; returns whether it is in force."""
        at = self.root / entry_name(entry.number)
        data = entries.to_bytes(entry)
        try:
            at.store.put(at.key, data, absent=True)
        except Exists:
            # Of the same nonce it is this one, and the answer was lost.
            with contextlib.suppress(Missing):
                if self._entry(entry.number).nonce != entry.nonce:
                    return False
        later = self._numbers(entry.number)
        if not later:
            return True
        try:
            return self._entry(entry.number + 1).previous == entry.nonce
        except Missing:
            return False

    def _with(self, state: State, standings: Mapping[Unit, Standing]) -> dict[str, Any]:
        """The fields of an entry with other standings; the oldest of too many go to a page."""
        pages = {
            ref: page
            for ref, page in state.pages.items()
            if all(standings.get(one.unit) == one for one in page.standings)
        }
        paged = {one.unit for page in pages.values() for one in page.standings}
        inline = [standings[unit] for unit in sorted(standings.keys() - paged, key=_order)]
        while len(inline) > entries.INLINE:
            page = Page(standings=tuple(inline[: entries.PAGE]))
            pages[self._put_page(page)] = page
            inline = inline[entries.PAGE :]
        return {"standings": tuple(inline), "pages": tuple(pages)}

    def _put_page(self, page: Page) -> PageRef:
        """Puts a page, of which nobody knows before an entry names it."""
        data = entries.to_bytes(page)
        name = entries.page_name(self.claimed.lease.epoch)
        at = self.root / name
        at.store.put(at.key, data)
        return PageRef(name=name, crc32c=google_crc32c.value(data))

    def _require_claim(self, state: State) -> None:
        holder = self.claimed.lease.holder
        if state.claim is None or state.claim.lease.holder != holder:
            raise self._fenced(state.claim, holder)

    def _fenced(self, newest: Claim | None, holder: str | None) -> FencedError:
        own = "a claim" if holder is None else f"to hold its claim (holder {holder[:8]})"
        found = "none"
        if newest is not None:
            held = newest.lease
            found = (
                f"epoch {held.epoch} held by process {held.pid} on {held.host} (holder "
                f"{held.holder[:8]}) since {lease.utc(held.since_secs)}"
            )
        return FencedError(
            f"{self.root}: expected {own}, found {found}; stop this trainer, its later steps are "
            "not committed"
        )


def _order(unit: Unit) -> tuple[int, str]:
    return unit.step, unit.item or ""
