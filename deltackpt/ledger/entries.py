# SPDX-License-Identifier: Apache-2.0
"""The records of a journal: entries, their pages, and what is said of each save. No I/O, no jax.

An entry is the whole state of a root: who may write, which steps and compacted bases are committed
and where their files stand. The entry with the greatest number is the truth, so that one object
says everything and one write changes it. Steps beyond the newest few hundred stand in pages,
objects that never change and that entries name. ``docs/format.md`` specifies the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.format import manifest, names, records
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Kind, ParentRef, RollingShare, SaveId
from deltackpt.ledger.lease import Lease

ENTRY_MAGIC = "deltackpt.journal.entry"
PAGE_MAGIC = "deltackpt.journal.page"
#: Claims, and runs, that an entry remembers.
MOST_CLAIMS = 100
MOST_RUNS = 4096
#: Saves that an entry holds itself; where there are more, the oldest of them make a page.
INLINE = 256
PAGE = 128
#: Saves of steps that were rolled back which stay; older ones are given up.
MOST_ROLLED_BACK = 256
#: Stretches of the log that stay; older ones are given up.
MOST_LOGS = 256

SAVES = "saves"
BASES = "bases"
PAGES = "pages"
LOGS = "log"
_PREFIX = re.compile(r"(saves|bases)/(0|[1-9]\d*)\.([1-9]\d*)\.([0-9a-f]{8,32})(?:/([^/]+))?")
_LOG = re.compile(r"log/(0|[1-9]\d*)\.([1-9]\d*)\.[0-9a-f]{8,32}")
_PAGE = re.compile(r"pages/([1-9]\d*)\.[0-9a-f]{32}\.msgpack")


class Unit(NamedTuple):
    """What is committed at once: a step, or the compacted base that stands for an item of it."""

    step: int
    item: str | None = None

    @property
    def name(self) -> str:
        """Its path below the root of a directory."""
        if self.item is None:
            return str(self.step)
        return f"{names.COMPACTED}/{self.step}/{self.item}"


def prefix_of(unit: Unit, epoch: int, token: str) -> str:
    """Where the files of a unit are put: a place of one upload, never used again.

    Args:
      unit: what is uploaded.
      epoch: of the claim under which it is.
      token: 8 to 32 hexadecimal digits; another upload of the unit has others.
    """
    if unit.item is None:
        return f"{SAVES}/{unit.step}.{epoch}.{token}"
    return f"{BASES}/{unit.step}.{epoch}.{token}/{unit.item}"


def prefix_epoch(prefix: str) -> int | None:
    """The epoch in a prefix, or in the part of one before its item; None of another name."""
    if match := _LOG.fullmatch(prefix):
        return int(match[2])
    match = _PREFIX.fullmatch(prefix)
    return int(match[3]) if match else None


def log_prefix(stretch: int, epoch: int) -> str:
    """A fresh place for the log of a stretch, below the root: its head, and what is promoted.

    Args:
      stretch: its number.
      epoch: of the claim under which it comes there.
    """
    return f"{LOGS}/{stretch}.{epoch}.{uuid.uuid4().hex[:12]}"


def page_name(epoch: int) -> str:
    """A fresh place for a page, below the root."""
    return f"{PAGES}/{epoch}.{uuid.uuid4().hex}.msgpack"


def page_epoch(name: str) -> int | None:
    """The epoch of a page's writer; None of another name."""
    match = _PAGE.fullmatch(name)
    return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A step, or a compacted base, that is committed.

    Attributes:
      step: its number.
      item: of a base the item for which it stands; None of a step.
      prefix: where its files stand, below the root.
      save_id: which save it is; a base bears that of its step.
      kind: base or delta.
      parent: a delta's parent.
      nbytes: bytes of its arrays.
      stored_bytes: bytes of all its files.
      crc32c: of the bytes of its ``commit.msgpack``.
      rolling: as in ``SaveInfo``.
    """

    step: int
    item: str | None
    prefix: str
    save_id: SaveId
    kind: Kind
    parent: ParentRef | None
    nbytes: int
    stored_bytes: int
    crc32c: int
    rolling: RollingShare | None = None

    @property
    def unit(self) -> Unit:
        """What it is."""
        return Unit(self.step, self.item)

    @functools.cached_property
    def info(self) -> SaveInfo:
        """What chains need to know."""
        return SaveInfo(
            save_id=self.save_id,
            kind=self.kind,
            parent=self.parent,
            step_dir=str(self.step),
            nbytes=self.nbytes,
            rolling=self.rolling,
        )

    @classmethod
    def of(
        cls, info: SaveInfo, unit: Unit, prefix: str, *, stored_bytes: int, crc32c: int
    ) -> Standing:
        """That of a save whose files stand under a prefix."""
        return cls(
            step=unit.step,
            item=unit.item,
            prefix=prefix,
            save_id=info.save_id,
            kind=info.kind,
            parent=info.parent,
            nbytes=info.nbytes,
            stored_bytes=stored_bytes,
            crc32c=crc32c,
            rolling=info.rolling,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """Who took the root, and what was gone on from.

    Attributes:
      lease: who, and when.
      began: whether training began under it; a claim that never did orphans no save.
      goes_on: the save that it went on from, None where it began afresh.
      stages: ids of the stages of its processes.
    """

    lease: Lease
    began: bool = False
    goes_on: SaveId | None = None
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack:
    """A step, or a base, that training went back behind.

    Attributes:
      run: the run that went on.
      standing: what it was.
    """

    run: str
    standing: Standing


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRef:
    """A stretch of the log whose head is at the root.

    Attributes:
      stretch: its number.
      run: id of its run.
      prefix: where its head and its pieces stand, below the root.
      crc32c: of the bytes of its head.
    """

    stretch: int
    run: str
    prefix: str
    crc32c: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRef:
    """A page that an entry names: its key below the root, and the CRC32C of its bytes."""

    name: str
    crc32c: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Saves that the entries naming it hold."""

    standings: tuple[Standing, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The state of a root.

    Attributes:
      number: its own; that of the entry before and one.
      nonce: drawn for it: whoever lost the answer of a write knows his own entry again.
      previous: nonce of the entry before.
      claims: the newest ones, ascending by epoch; the last one may write.
      standings: what is committed and stands in no page.
      pages: what else is.
      promoted: the greatest attempt that was ever committed, by run; the newest runs last.
      rolled_back: what training went back behind, and is still there.
      logs: the stretches of the log, ascending by number; the newest says what of them counts.
      features: what a reader must know; none so far.
    """

    number: int = 0
    nonce: str = ""
    previous: str = ""
    claims: tuple[Claim, ...] = ()
    standings: tuple[Standing, ...] = ()
    pages: tuple[PageRef, ...] = ()
    promoted: dict[str, int] = dataclasses.field(default_factory=dict)
    rolled_back: tuple[RolledBack, ...] = ()
    logs: tuple[LogRef, ...] = ()
    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What a root is by one entry and its pages.

    Attributes:
      entry: the entry.
      standings: all that is committed, those of pages included.
      pages: the pages that the entry names.
    """

    entry: Entry
    standings: Mapping[Unit, Standing]
    pages: Mapping[PageRef, Page]

    @functools.cached_property
    def uploads(self) -> frozenset[tuple[Unit, SaveId]]:
        """What is committed: each unit with the save that it is of."""
        return frozenset((unit, one.save_id) for unit, one in self.standings.items())

    @property
    def claim(self) -> Claim | None:
        """The newest; None where nobody ever took the root."""
        return self.entry.claims[-1] if self.entry.claims else None

    @property
    def epoch(self) -> int:
        """That of the newest claim; 0 where there is none."""
        return self.claim.lease.epoch if self.claim is not None else 0

    @functools.cached_property
    def steps(self) -> dict[int, Standing]:
        """Committed steps, ascending."""
        found = ((unit.step, one) for unit, one in self.standings.items() if unit.item is None)
        return dict(sorted(found))

    @functools.cached_property
    def bases(self) -> dict[Unit, Standing]:
        """Compacted bases."""
        return {unit: one for unit, one in self.standings.items() if unit.item is not None}

    @functools.cached_property
    def prefixes(self) -> frozenset[str]:
        """Every prefix whose files must stay."""
        every = [*self.standings.values(), *(one.standing for one in self.entry.rolled_back)]
        logs = (one.prefix for one in self.entry.logs)
        return frozenset(one.prefix for one in every).union(logs)

    def held(self, save_id: SaveId) -> bool:
        """Whether a save was ever committed here, though it may have gone since."""
        return self.entry.promoted.get(save_id.run, -1) >= save_id.attempt

    def stands(self, save_id: SaveId) -> bool:
        """Whether a save, or the base that stands for it, is committed."""
        return any(one.save_id == save_id for one in self.standings.values())


def promoted_with(promoted: Mapping[str, int], save_id: SaveId) -> dict[str, int]:
    """The greatest attempts by run, once a save is committed; the oldest runs go."""
    found = dict(promoted)
    found[save_id.run] = max(save_id.attempt, found.pop(save_id.run, -1))
    while len(found) > MOST_RUNS:
        del found[next(iter(found))]
    return found


def to_bytes(record: Entry | Page) -> bytes:
    """An entry, or a page, as a record."""
    return records.to_bytes(record, ENTRY_MAGIC if isinstance(record, Entry) else PAGE_MAGIC)


def entry_from(data: bytes, *, name: str, number: int | None) -> Entry:
    """An entry from its bytes.

    Args:
      data: of ``to_bytes``.
      name: how errors name it.
      number: the one in its key, where it has one.

    Raises:
      Damaged: it is altered, or says what no entry can.
      FormatTooNew: a later version wrote it.
    """
    found: Entry = manifest.from_bytes(data, Entry, name=name, magic=ENTRY_MAGIC)
    if found.features:
        raise FormatTooNew(
            f"{name}: needs features {sorted(found.features)}, unknown to this deltackpt; install "
            "a newer deltackpt"
        )
    if number is not None and found.number != number:
        raise Damaged(name, f"the entry of number {number}", f"that of number {found.number}")
    epochs = [claim.lease.epoch for claim in found.claims]
    if not epochs or epochs != sorted(set(epochs)) or not found.nonce:
        raise Damaged(name, "a nonce and claims of ascending epochs", f"epochs {epochs[-5:]}")
    for page in found.pages:
        if _PAGE.fullmatch(page.name) is None:
            raise Damaged(name, "names of pages", records.shown(page.name))
    check(name, found.standings)
    check(name, (one.standing for one in found.rolled_back))
    _check_logs(name, found.logs)
    return found


def page_from(data: bytes, *, name: str) -> Page:
    """A page from its bytes.

    Raises:
      Damaged, FormatTooNew: as ``entry_from``.
    """
    found: Page = manifest.from_bytes(data, Page, name=name, magic=PAGE_MAGIC)
    check(name, found.standings)
    return found


def check(name: str, standings: Iterable[Standing]) -> None:
    """Checks that records lead to no place outside of what they stand for.

    Raises:
      Damaged: one does.
    """
    for one in standings:
        match = _PREFIX.fullmatch(one.prefix)
        folder, step, item = (match[1], int(match[2]), match[5]) if match else (None, None, None)
        expected = SAVES if one.item is None else BASES
        if (folder, step, item) != (expected, one.step, one.item) or (
            one.item is not None and not names.is_item_name(one.item)
        ):
            shown = records.shown(one.prefix)
            raise Damaged(name, f"a prefix of {one.unit.name!r}", shown)
        if one.save_id.step != one.step:
            raise Damaged(name, f"a save of step {one.step}", f"save id {one.save_id}")


def _check_logs(name: str, logs: Iterable[LogRef]) -> None:
    numbers = []
    for one in logs:
        match = _LOG.fullmatch(one.prefix)
        if match is None or int(match[1]) != one.stretch:
            raise Damaged(name, f"a prefix of stretch {one.stretch}", records.shown(one.prefix))
        numbers.append(one.stretch)
    if numbers != sorted(set(numbers)):
        raise Damaged(name, "stretches of ascending numbers", f"numbers {numbers[-5:]}")
