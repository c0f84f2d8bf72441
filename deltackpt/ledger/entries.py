# SPDX-License-Identifier: Apache-2.0
"""Entries of a journal: records of the whole state of a checkpoint directory in a store.

An entry records who may write, which saves are committed, and where their files are. The entry with
the greatest number is authoritative, so the state is one object and changes by one write.
``docs/reference/format.md`` specifies the bytes.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from deltackpt.cached import cached_property
from deltackpt.errors import Damaged
from deltackpt.format import naming, records
from deltackpt.format.manifest import SaveId, SaveInfo
from deltackpt.ledger.lease import Lease

ENTRY_MAGIC = "deltackpt.journal.entry"
#: Fields of entries that development versions did not write.
_SINCE_DEVELOPMENT = frozenset(("catalog", "committed"))
#: Number of claims, and of runs, that an entry keeps.
MOST_CLAIMS = 100
MOST_RUNS = 4096
#: Number of rolled-back saves to keep; older ones are dropped.
MOST_ROLLED_BACK = 256
#: Number of WAL epochs to keep; older ones are dropped.
MOST_LOGS = 256

SAVES = "saves"
BASES = "bases"
LOGS = "log"
#: Object below a unit's prefix with the digests of all other files; uploaded last.
COMMIT = "commit.msgpack"
_RECORD, _COPY = ".msgpack", ".copy.msgpack"
_PREFIX = re.compile(r"(saves|bases)/(0|[1-9]\d*)\.([1-9]\d*)\.([0-9a-f]{8,32})(?:/([^/]+))?")
_LOG = re.compile(r"log/(0|[1-9]\d*)\.([1-9]\d*)\.[0-9a-f]{8,32}")


class ObjectKey(NamedTuple):
    """Names what is committed atomically: a step, or the compacted base of one of its items."""

    step: int
    item: str | None = None

    @property
    def name(self) -> str:
        """Its path below the checkpoint directory."""
        if self.item is None:
            return str(self.step)
        return f"{naming.COMPACTED}/{self.step}/{self.item}"


#: Units with their save: a compacted base has the id of its step, and remains.
Hidden = frozenset[tuple[ObjectKey, SaveId]]


def prefix_of(unit: ObjectKey, epoch: int, token: str) -> str:
    """Returns the prefix of a unit's files, never reused: the 8 to 32 hex digits are unique."""
    if unit.item is None:
        return f"{SAVES}/{unit.step}.{epoch}.{token}"
    return f"{BASES}/{unit.step}.{epoch}.{token}/{unit.item}"


def prefix_epoch(prefix: str) -> int | None:
    """Returns the epoch in a prefix, or in its part before the item; None for other names."""
    if match := _LOG.fullmatch(prefix):
        return int(match[2])
    match = _PREFIX.fullmatch(prefix)
    return int(match[3]) if match else None


def log_prefix(number: int, epoch: int) -> str:
    """Returns a new prefix for a WAL epoch, under the claim with the given epoch."""
    return f"{LOGS}/{number}.{epoch}.{uuid.uuid4().hex[:12]}"


def prefix_step(prefix: str) -> int | None:
    """Returns the step in the prefix of a step's files; None for other names."""
    match = _PREFIX.fullmatch(prefix)
    return int(match[2]) if match and match[1] == SAVES else None


def copy_name(name: str) -> str:
    """Returns the name of the copy of an entry."""
    return f"{name.removesuffix(_RECORD)}{_COPY}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A committed step or compacted base."""

    info: SaveInfo  # a base has the save id of its step
    item: str | None  # for a base, the item that it belongs to; None for a step
    prefix: str  # of its files, below the root
    stored_bytes: int  # total size of its files
    crc32c: int  # of its ``commit.msgpack``

    @property
    def save_id(self) -> SaveId:
        """Id of the save."""
        return self.info.save_id

    @property
    def step(self) -> int:
        """The training step."""
        return self.info.save_id.step

    @property
    def object_key(self) -> ObjectKey:
        """Its unit."""
        return ObjectKey(self.step, self.item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseClaim:
    """A trainer's claim of the checkpoint directory, and the save from which it resumed."""

    lease: Lease
    began: bool = False  # whether training began under it; otherwise it supersedes no save
    resumed_from: SaveId | None = None  # None if it started from scratch
    #: One more than the rollbacks under it that preceded the newest committed save made under it; 0
    #: if no save made under it was committed.
    generations: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack:
    """A rolled-back step or base, and the run that resumed before it."""

    run: str
    entry: CatalogEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalRef:
    """A WAL epoch whose header, with the given CRC32C, is in the remote directory."""

    epoch: int
    run: str
    prefix: str
    crc32c: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The state of a checkpoint directory."""

    number: int = 0  # one more than the previous entry's
    nonce: str = ""  # lets a writer recognize its own entry after a lost response
    previous: str = ""  # nonce of the previous entry
    claims: tuple[LeaseClaim, ...] = ()  # ascending by epoch; the last one may write
    withdrawn: int = 0  # the newest epoch whose claim was withdrawn; 0 if none was
    catalog: tuple[CatalogEntry, ...] = ()  # ascending; a step precedes its bases
    #: The greatest attempt ever committed, by run; newest runs last.
    committed: dict[str, int] = dataclasses.field(default_factory=dict)
    rolled_back: tuple[RolledBack, ...] = ()  # units that still exist
    logs: tuple[WalRef, ...] = ()  # ascending; the newest determines which records count
    features: tuple[str, ...] = ()  # that a reader must support; none so far


@dataclasses.dataclass(frozen=True)
class State:
    """The state that an entry records."""

    entry: Entry

    @cached_property
    def catalog(self) -> Mapping[ObjectKey, CatalogEntry]:
        """The committed units."""
        return {one.object_key: one for one in self.entry.catalog}

    @cached_property
    def uploads(self) -> frozenset[tuple[ObjectKey, SaveId]]:
        """The committed units, each with its save."""
        return frozenset((unit, one.save_id) for unit, one in self.catalog.items())

    @property
    def claim(self) -> LeaseClaim | None:
        """The newest claim; None if there was never one."""
        return self.entry.claims[-1] if self.entry.claims else None

    def claim_of(self, holder: str | None) -> LeaseClaim | None:
        """Returns the claim of a holder, or None."""
        return next((one for one in self.entry.claims if one.lease.holder == holder), None)

    def claims_after(self, claim: LeaseClaim) -> tuple[LeaseClaim, ...]:
        """Returns the claims that followed one."""
        return tuple(one for one in self.entry.claims if one.lease.epoch > claim.lease.epoch)

    @property
    def trainer(self) -> LeaseClaim | None:
        """The claim of the trainer that may be running; None if none can be.

        A pending claim may be withdrawn, so it does not hide an earlier trainer.
        """
        starting = None
        for claim in reversed(self.entry.claims):
            if not claim.lease.pending:
                return claim if claim.began else starting
            if starting is None and claim.lease.runs is not False:
                starting = claim
        return starting

    @property
    def epoch(self) -> int:
        """The newest claim's epoch; 0 if there is no claim."""
        return self.claim.lease.epoch if self.claim is not None else 0

    @property
    def next_epoch(self) -> int:
        """The epoch of the next claim, which no claim had before."""
        return max(self.epoch, self.entry.withdrawn) + 1

    @cached_property
    def steps(self) -> dict[int, CatalogEntry]:
        """The committed steps, ascending."""
        found = ((unit.step, one) for unit, one in self.catalog.items() if unit.item is None)
        return dict(sorted(found))

    @cached_property
    def bases(self) -> dict[ObjectKey, CatalogEntry]:
        """The compacted bases."""
        return {unit: one for unit, one in self.catalog.items() if unit.item is not None}

    @cached_property
    def prefixes(self) -> frozenset[str]:
        """Every prefix whose files must remain."""
        every = [*self.catalog.values(), *(one.entry for one in self.entry.rolled_back)]
        logs = (one.prefix for one in self.entry.logs)
        return frozenset(one.prefix for one in every).union(logs)

    def with_committed(self, added: CatalogEntry, moment: tuple[int, int] | None = None) -> Entry:
        """Returns the entry after the commit of a unit, which replaces an earlier upload.

        ``moment`` is the epoch of the claim under which a step's run began, and the number of
        rollbacks under that claim before.
        """
        every = {**self.catalog, added.object_key: added}
        epoch, generation = moment or (0, 0)
        claims = (
            dataclasses.replace(one, generations=max(one.generations, generation + 1))
            if one.lease.epoch == epoch
            else one
            for one in self.entry.claims
        )
        committed = dict(self.entry.committed)
        if added.item is None:
            run, attempt = added.save_id.run, added.save_id.attempt
            committed[run] = max(attempt, committed.pop(run, -1))
        return dataclasses.replace(
            self.entry,
            claims=tuple(claims),
            catalog=tuple(sorted(every.values(), key=lambda one: (one.step, one.item or ""))),
            committed=dict([*committed.items()][-MOST_RUNS:]),
        )

    def without(self, prefixes: Collection[str]) -> Entry:
        """Returns the entry after units and WAL epochs were removed."""
        entry = self.entry
        return dataclasses.replace(
            entry,
            catalog=tuple(one for one in entry.catalog if one.prefix not in prefixes),
            rolled_back=tuple(one for one in entry.rolled_back if one.entry.prefix not in prefixes),
            logs=tuple(one for one in entry.logs if one.prefix not in prefixes),
        )

    def was_committed(self, save_id: SaveId) -> bool:
        """Returns whether a save was ever committed here, even if it has been removed since."""
        return self.entry.committed.get(save_id.run, -1) >= save_id.attempt

    def exists(self, save_id: SaveId) -> bool:
        """Returns whether a save, or its compacted base, is committed."""
        return any(one.save_id == save_id for one in self.catalog.values())


def to_bytes(entry: Entry) -> bytes:
    """Serializes an entry."""
    return records.to_bytes(entry, ENTRY_MAGIC)


def entry_from(data: bytes, *, name: str, number: int | None) -> Entry:
    """Parses an entry, or raises Damaged or FormatMismatch; ``name`` is for errors."""
    found = records.from_bytes(
        data,
        Entry,
        name=name,
        magic=ENTRY_MAGIC,
        known_features=frozenset(),
        since_development=_SINCE_DEVELOPMENT,
    )
    if number is not None and found.number != number:
        raise Damaged(name, f"the entry with number {number}", f"that of number {found.number}")
    check_entry(found, name)
    return found


def check_entry(found: Entry, name: str) -> None:
    """Raises Damaged if an entry is inconsistent."""
    epochs = [claim.lease.epoch for claim in found.claims]
    if not epochs or epochs != sorted(set(epochs)) or not found.nonce:
        raise Damaged(name, "a nonce and claims with ascending epochs", f"epochs {epochs[-5:]}")
    check(name, found.catalog)
    check(name, (one.entry for one in found.rolled_back))
    _check_logs(name, found.logs)


@dataclasses.dataclass(frozen=True)
class _Nonces:
    number: int = 0
    nonce: str = ""
    previous: str = ""


def nonces_of(data: bytes, *, name: str, number: int) -> tuple[str, str]:
    """Returns the nonces of an entry and of its predecessor, without parsing the rest."""
    found = records.from_bytes(data, _Nonces, name=name, magic=ENTRY_MAGIC)
    if found.number != number:
        raise Damaged(name, f"the entry with number {number}", f"that of number {found.number}")
    return found.nonce, found.previous


def check(name: str, catalog: Iterable[CatalogEntry]) -> None:
    """Raises Damaged if a record refers to another unit's locations."""
    for one in catalog:
        match = _PREFIX.fullmatch(one.prefix)
        folder, step, item = (match[1], int(match[2]), match[5]) if match else (None, None, None)
        expected = SAVES if one.item is None else BASES
        if (folder, step, item) != (expected, one.step, one.item) or (
            one.item is not None and not naming.is_item_name(one.item)
        ):
            shown = records.shown(one.prefix)
            raise Damaged(name, f"a prefix of {one.object_key.name!r}", shown)
        if one.info.step_dir != str(one.step):
            raise Damaged(name, f"step directory {one.step}", records.shown(one.info.step_dir))


def _check_logs(name: str, logs: Sequence[WalRef]) -> None:
    for one in logs:
        match = _LOG.fullmatch(one.prefix)
        if match is None or int(match[1]) != one.epoch:
            raise Damaged(name, f"a prefix of WAL epoch {one.epoch}", records.shown(one.prefix))
    numbers = [one.epoch for one in logs]
    if numbers != sorted(set(numbers)):
        raise Damaged(name, "WAL epochs with ascending numbers", f"numbers {numbers[-5:]}")
