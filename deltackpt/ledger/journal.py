# SPDX-License-Identifier: Apache-2.0
"""The ledger of a store without rename: numbered entries, each written only if absent.

``docs/reference/format.md`` specifies how the state changes. Each claim, commit or rollback is one
such write, without a rename, a lock or a clock, so a fenced trainer can never commit. A write
without a response may still take effect: files named by a sent entry are kept until its number is
known to hold an entry, and a change is re-evaluated against the newest one. The holder copies a
rollback before it commits anything else.

A trainer that claims the directory skips an unreadable entry. The holder of a claim stops there,
since the entry may be another trainer's claim. A claim is pending until its trainer has started;
meanwhile the previous holder commits nothing, and waits as ``lease`` limits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DeltackptError,
    FencedError,
    InUse,
    StorageError,
    TargetDiffers,
)
from deltackpt.format.manifest import SaveId
from deltackpt.ledger import entries, lease
from deltackpt.ledger.entries import (
    CatalogEntry,
    Entry,
    LeaseClaim,
    ObjectKey,
    RolledBack,
    State,
    WalRef,
)
from deltackpt.ledger.lease import Lease
from deltackpt.ledger.view import KEPT_ENTRIES, JournalView, entry_name
from deltackpt.storage.store import Exists, Missing, StorePath

#: Old entries are deleted in batches of this size.
_DELETED_AT_ONCE = 32
#: Between two checks of a claim whose trainer has not started yet.
_POLL_SECS = 0.25

#: Computes the entry of the changed state; None if nothing changes.
Change = Callable[[State], Entry | None]
_T = TypeVar("_T")


class _Pending(FencedError):
    """Another trainer has claimed the directory, and has not started yet."""

    def __init__(self, text: str, claimants: Mapping[int, Lease]):
        super().__init__(text)
        self.claimants = claimants


class Journal(JournalView):
    """The writable journal of a checkpoint directory.

    A trainer claims it. Processes that act for the trainer (its uploader, a compactor) resume that
    claim, and are rejected once there is a newer one.
    """

    def __init__(self, root: StorePath, *, while_waiting: Callable[[], None] = lambda: None):
        """Reads nothing yet; ``while_waiting`` may raise while another trainer starts."""
        super().__init__(root)
        self._while_waiting = while_waiting
        self._claim: LeaseClaim | None = None
        #: Holder of the claim that ``claim`` took, or tried to take.
        self._claimed_holder: str | None = None
        #: Prefixes of entries without a response, by entry number.
        self._sent: dict[str, int] = {}
        #: Prefixes of uploads that were abandoned here, and of units removed here.
        self._failed: set[str] = set()
        #: Whether the known state may be outdated.
        self._stale = True
        self._grace = lease.Grace(_POLL_SECS)
        #: Held while the state is changed; readers are not blocked.
        self._writing = threading.RLock()

    @property
    def in_doubt(self) -> bool:
        """Whether a change without a response may be in force."""
        return self._stale

    # ---- claims

    @property
    def claimed(self) -> LeaseClaim:
        """The claim under which this journal writes."""
        assert self._claim is not None
        return self._claim

    def claim(self, *, after_epoch: int | None = None, pending: bool = False) -> LeaseClaim:
        """Claims the directory: the previous holder can no longer commit.

        With ``after_epoch``, raises InUse unless that is the newest epoch. If the claim is
        ``pending``, the previous holder waits until ``start`` or ``withdraw``.
        """
        lease = Lease.new(0, pending=pending)
        holder = self._claimed_holder = lease.holder
        self.is_replaced = False

        def change(state: State) -> Entry | None:
            if state.claim_of(holder) is not None:
                return None
            if after_epoch not in (None, state.epoch):
                raise InUse(
                    f"{self.root}: expected its claim at epoch {after_epoch}, found epoch "
                    f"{state.epoch}: a trainer started concurrently; it collects garbage itself"
                )
            own = LeaseClaim(lease=dataclasses.replace(lease, epoch=state.next_epoch))
            claims = (*state.entry.claims, own)[-entries.MOST_CLAIMS :]
            return dataclasses.replace(state.entry, claims=claims)

        state = self._change(change)
        self._claim = state.claim_of(holder)
        if self._claim is None:  # More claims followed than an entry keeps.
            raise self._fenced(state.claim, holder)
        return self._claim

    def start(self) -> None:
        """Ends the pending state of the claim; does not wait for newer trainers that start."""
        holder = self.claimed.lease.holder

        def change(state: State) -> Entry | None:
            with contextlib.suppress(_Pending):
                self._require_claim(state)
            claims = state.entry.claims
            started = tuple(_started(one) if one.lease.holder == holder else one for one in claims)
            return None if started == claims else dataclasses.replace(state.entry, claims=started)

        self._claim = self._change(change).claim_of(holder) or self._claim

    def withdraw(self) -> None:
        """Removes the claim that ``claim`` took: the previous trainer holds the directory again.

        Does nothing if training began under it, if another trainer that has started follows it, or
        if it is the only claim.
        """

        def change(state: State) -> Entry | None:
            claims, own = state.entry.claims, state.claim_of(self._claimed_holder)
            if own is None or own.began or own == claims[0]:
                return None
            # If the later ones are withdrawn too, this one must not fence the previous trainer.
            if not all(one.lease.pending for one in state.claims_after(own)):
                return None
            left = tuple(one for one in claims if one != own)
            withdrawn = max(own.lease.epoch, state.entry.withdrawn)
            return dataclasses.replace(state.entry, claims=left, withdrawn=withdrawn)

        if self._claimed_holder is not None:
            self._change(change)

    def resume(self, holder: str | None = None, *, wait: bool = False) -> LeaseClaim:
        """Continues under the newest claim; FencedError if it is another holder's.

        With ``wait``, waits first until the trainer that holds it has started, or failed to.
        """

        def newest() -> LeaseClaim:
            state = self.state()
            found = state.claim
            if self._lost or found is None or holder not in (None, found.lease.holder):
                raise self._superseded(state, holder)
            if wait and found.lease.pending and self._grace.wait({found.lease.epoch: found.lease}):
                return newest()
            return found

        self._claim = self._patiently(newest)
        self._stale = self.is_replaced = False
        return self._claim

    def check(self) -> State:
        """Checks with one listing that the claim is still the newest; raises FencedError."""

        def checked() -> State:
            state = self.state()
            self._require_claim(state)
            return state

        return self._patiently(checked)

    def confirm(self) -> State:
        """Like ``check``, but also reads the newest entry, and rewrites it if it was lost."""
        state = self.check()
        number, exists = state.entry.number, self._exists(state.entry)
        if exists:
            return state
        if exists is False:
            self._forget()
        return self._change_own(lambda state: None if state.entry.number > number else state.entry)

    def _exists(self, entry: Entry) -> bool | None:
        """Whether an entry, or its copy, is stored; None if neither is readable."""
        found = None
        with contextlib.suppress(Missing, Damaged):
            found = self._nonces(entry.number)[0] == entry.nonce
        if not found:
            with contextlib.suppress(Missing, Damaged):
                found = self._nonces(entry.number, copy=True)[0] == entry.nonce
                # A copy alone may have been put after everything else was removed.
                found = found and (entry.number == 1 or self._follows(entry))
        return found

    def copy_newest(self) -> None:
        """Writes a copy of the newest known entry, and deletes older copies."""
        entry = self._known.entry
        if entry.number in self._copies or not entry.number:
            return
        at = self._at(entry.number, copy=True)
        at.store.put(at.key, entries.to_bytes(entry))
        with self._lock:
            old = {one for one in self._copies if one < entry.number}
            self._copies = self._copies - old | {entry.number}
        # A failed deletion is harmless.
        with contextlib.suppress(StorageError):
            copies = (entries.copy_name(entry_name(one)) for one in sorted(old))
            self.root.store.delete(map(self._key, copies))

    def start_run(self, resumed_from: SaveId | None) -> None:
        """Records, before the first save, from which save training resumes."""

        def change(state: State) -> Entry | None:
            claim = state.entry.claims[-1]
            began = dataclasses.replace(_started(claim), began=True, resumed_from=resumed_from)
            if began == claim:
                return None
            return dataclasses.replace(state.entry, claims=(*state.entry.claims[:-1], began))

        self._claim = self._change_own(change).claim

    # ---- commits

    def prefix(self, unit: ObjectKey, token: str | None = None) -> str:
        """Returns a new prefix for the files of a unit, below the root."""
        epoch = self.claimed.lease.epoch
        return entries.prefix_of(unit, epoch, token or uuid.uuid4().hex[:12])

    def commit(
        self,
        added: CatalogEntry,
        *,
        moment: tuple[int, int] | None = None,
        alone: bool = False,
        replace: bool = False,
    ) -> CatalogEntry:
        """Makes a step or a base visible after its files were uploaded; returns its record.

        The record is that of another upload if it came first. ``moment`` is as for
        ``State.with_committed``. ``alone`` allows a base without its step, as in a copy;
        ``replace`` replaces an earlier upload of the same save. Raises FencedError (nothing becomes
        visible), BrokenChain (the parent, or a base's step, was removed) or TargetDiffers (another
        save has the name); after a StorageError, the next call determines the outcome.
        """
        unit, save_id = added.object_key, added.save_id

        def change(state: State) -> Entry | None:
            there = state.catalog.get(unit)
            if there is None:
                if unit.item is None and state.was_committed(save_id) and not replace:
                    return None  # It was committed, and has been retired since.
                self._require_parent(state, added, alone=alone)
            elif there.save_id != save_id:
                raise TargetDiffers(
                    f"{self.root}: expected no {unit.name}, or save id {save_id}, found save id "
                    f"{there.save_id}, which was not touched; roll back to an earlier step first"
                )
            elif not replace or there.prefix == added.prefix:
                return None
            return state.with_committed(added, moment)

        state = self._change_own(change, added.prefix)
        return state.catalog.get(unit, added)

    def _require_parent(self, state: State, added: CatalogEntry, *, alone: bool) -> None:
        parent = added.info.parent
        if added.item is not None:
            of = state.steps.get(added.step)
            if not alone and (of is None or of.save_id != added.save_id):
                raise BrokenChain(
                    f"{self.root}: base of step {added.step}: expected save id "
                    f"{added.save_id} to be committed, found {of.save_id if of else 'none'}; "
                    "compact again"
                )
        elif parent is not None and not (
            state.exists(parent.save_id) or state.exists(added.save_id)
        ):
            raise BrokenChain(
                f"{self.root}: step {added.step}: expected its parent {parent.step_dir} (save "
                f"id {parent.save_id}) to be committed, found that it was removed; the next save "
                "is a base"
            )

    def retire(self, which: Callable[[State], Iterable[str]]) -> None:
        """Un-commits units or WAL epochs, which nothing may need, and deletes their files."""

        def change(state: State) -> Entry | None:
            prefixes = state.prefixes.intersection(which(state))
            return state.without(prefixes) if prefixes else None

        self._change_own(change)

    def roll_back(
        self, after: int, run: str, *, only: Collection[SaveId] | None = None
    ) -> list[int]:
        """Un-commits later steps (or ``only`` some) and their bases; returns the steps, ascending.

        The files remain, named in the journal, until they are collected or too many others follow.
        """
        later: list[CatalogEntry] = []

        def change(state: State) -> Entry | None:
            found = [
                one
                for one in state.entry.catalog
                if one.step > after and (only is None or one.save_id in only)
            ]
            if not found:
                return None
            later[:] = found
            aside = (RolledBack(run=run, entry=one) for one in found)
            rolled_back = (*state.entry.rolled_back, *aside)[-entries.MOST_ROLLED_BACK :]
            kept = state.without({one.prefix for one in found})
            return dataclasses.replace(kept, rolled_back=rolled_back)

        self._change_own(change)
        # Without it, losing one entry would bring back rolled-back steps.
        self.copy_newest()
        return sorted({one.step for one in later if one.item is None})

    # ---- write-ahead log

    def add_wal(self, ref: WalRef) -> bool:
        """Commits a WAL epoch whose header was uploaded; returns whether it did.

        It does not if the epoch has another prefix, or a newer one exists. Earlier epochs count
        from now on only up to the recovery point from which it forked.
        """

        def change(state: State) -> Entry | None:
            logs = state.entry.logs
            if logs and logs[-1].epoch >= ref.epoch:
                return None
            return dataclasses.replace(state.entry, logs=(*logs, ref)[-entries.MOST_LOGS :])

        return ref in self._change_own(change, ref.prefix).entry.logs

    # ---- sweeping

    def abandon_upload(self, prefix: str) -> None:
        """Abandons an upload: ``sweep`` deletes its files once it can no longer be committed."""
        self._failed.add(prefix)

    def sweep(self) -> int:
        """Deletes files that no state names or ever will; returns the number of objects.

        These are the uploads of superseded and withdrawn claims, and those abandoned here. An
        upload under such a claim can never be committed.
        """
        state = self.check()
        count = 0
        for keys in self.find_leftovers(state).values():
            self.root.store.delete(keys)
            count += len(keys)
        self._failed = {prefix for prefix in self._failed if not self._is_over(state, prefix)}
        return count

    def find_leftovers(self, state: State) -> dict[str, list[str]]:
        """Returns prefixes of uploads that no entry names or ever can, with the keys below them."""
        found: dict[str, list[str]] = {}
        for folder in (entries.SAVES, entries.BASES, entries.LOGS):
            at = self.root / folder
            inside = f"{at.key}/"
            for key in at.store.keys(at.key):
                components = key.removeprefix(inside).split("/")
                deep = 2 if folder == entries.BASES else 1
                prefix = "/".join([folder, *components[:deep]])
                if len(components) > deep and self._is_over(state, prefix):
                    found.setdefault(prefix, []).append(key)
        return found

    def _is_over(self, state: State, prefix: str) -> bool:
        """Whether no entry names a prefix, or ever can."""
        epoch = entries.prefix_epoch(prefix)
        if epoch is None or prefix in state.prefixes:
            return False
        is_superseded = epoch != state.epoch and epoch < state.next_epoch
        is_lost = prefix in self._failed and state.entry.number >= self._sent.get(prefix, 0)
        return is_superseded or is_lost

    def delete(self, prefixes: Iterable[str]) -> None:
        """Deletes the files under prefixes that no entry names."""
        for prefix in prefixes:
            at = self.root / prefix
            at.store.delete(at.store.keys(at.key))

    def _delete_old_entries(self) -> None:
        """Deletes old entries once enough newer ones exist."""
        newest = self._known.entry.number
        with self._lock:
            old = {number for number in self._older if number <= newest - KEPT_ENTRIES}
            if len(old) < _DELETED_AT_ONCE:
                return
            self._older -= old
        # A failed deletion is harmless.
        with contextlib.suppress(StorageError):
            self.root.store.delete(self._key(entry_name(number)) for number in sorted(old))

    # ---- changing the state

    def _change_own(self, change: Change, prefix: str | None = None) -> State:
        def checked(state: State) -> Entry | None:
            self._require_claim(state)
            return change(state)

        return self._patiently(lambda: self._change(checked, prefix))

    def _patiently(self, work: Callable[[], _T]) -> _T:
        """Repeats some work while another trainer has a pending claim, which it may withdraw."""
        while True:
            try:
                found = work()
            except _Pending as error:
                self._while_waiting()
                if not self._grace.wait(error.claimants):
                    raise FencedError(str(error)) from None
            else:
                self._grace.reset()
                return found

    def _change(self, change: Change, prefix: str | None = None) -> State:
        """Applies a change, which makes ``prefix`` visible, to the newest state; returns that."""
        with self._writing:
            fresh = self._stale
            state = self.state() if fresh else self.known
            # ``change`` is called again if another entry came first or a response was lost, so it
            # must detect from the state whether it was already applied.
            while True:
                try:
                    changed = change(state)
                except DeltackptError:
                    if fresh:
                        raise
                    changed = None
                if changed is None and fresh:
                    self._stale = False
                    return state
                if changed is not None and self._claim and self._exists(state.entry) is False:
                    # Another journal with as many entries has replaced it.
                    self._forget()
                elif changed is not None:
                    entry = dataclasses.replace(
                        changed,
                        number=max(state.entry.number, *self._lost, 0) + 1,
                        nonce=uuid.uuid4().hex,
                        previous=state.entry.nonce,
                    )
                    # Until it is known to be in force, another state may be the newest.
                    self._stale = True
                    if prefix is not None:
                        self._sent[prefix] = entry.number
                    # ``sweep`` deletes their files if the response is lost.
                    dropped = state.prefixes - State(entry).prefixes
                    self._failed |= dropped
                    if self._put(entry, state.entry):
                        found = self._in_force(entry)
                        self.delete(dropped)
                        self._failed -= dropped
                        return found
                state, fresh = self.state(), True

    def _in_force(self, entry: Entry) -> State:
        state = self.learn(entry)
        self._stale = False
        # Anything else that was sent under this number, or an earlier one, has lost.
        self._sent = {one: number for one, number in self._sent.items() if number > entry.number}
        self._delete_old_entries()
        return state

    def _put(self, entry: Entry, before: Entry) -> bool:
        """Writes an entry after its predecessor; returns whether it is in force."""
        at = self.root / entry_name(entry.number)
        data = entries.to_bytes(entry)
        try:
            at.store.put(at.key, data, absent=True)
        except Exists:
            # The same nonce: it is this entry, and the response was lost.
            try:
                if self._nonces(entry.number)[0] != entry.nonce:
                    return False
            except Missing:
                pass
            except Damaged:
                return False
        listed = self._listed(before.number - 1)
        if entry.number in listed.copies:
            # The nonce of another entry, which was in force before this one replaced it.
            with contextlib.suppress(Missing, Damaged):
                if self._nonces(entry.number, copy=True)[0] != entry.nonce:
                    return False
        if any(number > entry.number for number in listed.entries):
            with contextlib.suppress(Missing, Damaged):
                return self._nonces(entry.number + 1)[1] == entry.nonce
            return False
        there = listed.entries | listed.copies
        if not before.number or before.number in there or self._follows(before):
            return True
        # The journal was removed: a lone entry would name files that no longer exist.
        at.store.delete([at.key])
        return False

    def _require_claim(self, state: State) -> None:
        holder = self.claimed.lease.holder
        is_own = state.claim is not None and state.claim.lease.holder == holder
        if not is_own or self._lost or self.is_replaced:
            raise self._superseded(state, holder)

    def _superseded(self, state: State, holder: str | None) -> FencedError:
        """The error of a holder whose claim is not the newest; ``_Pending`` if it may be again."""
        error, own = self._fenced(state.claim, holder), state.claim_of(holder)
        later = () if own is None else state.claims_after(own)
        if later and all(one.lease.pending for one in later) and not self._lost:
            return _Pending(str(error), {one.lease.epoch: one.lease for one in later})
        return error

    def _fenced(self, newest: LeaseClaim | None, holder: str | None) -> FencedError:
        own = "a claim" if holder is None else f"to hold its claim (holder {holder[:8]})"
        found = "none: the journal was removed, as when the bucket is emptied"
        if self._lost:
            found = f"an entry that may be another trainer's ({self._lost[max(self._lost)]})"
        elif newest is not None and newest.lease.holder == holder:
            found = "another journal in its place"
        elif newest is not None:
            found = str(newest.lease)
        return FencedError(
            f"{self.root}: expected {own}, found {found}; stop this trainer, since its later steps "
            "are not committed"
        )


def _started(claim: LeaseClaim) -> LeaseClaim:
    return dataclasses.replace(claim, lease=dataclasses.replace(claim.lease, pending=False))
