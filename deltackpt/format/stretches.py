# SPDX-License-Identifier: Apache-2.0
"""Heads of stretches: what a log goes on from, and so which earlier marks still count.

A stretch is the log of one run: every start and every restore begins another. Its head is made
once, whole, under a number above all earlier ones, before the run saves or logs anything. From then
on it alone says what came before: the point that training went on from, or the step, or nothing.
What earlier stretches hold beyond that is dead, also what a trainer still appends that does not
know it yet.
"""

from __future__ import annotations

import dataclasses

from deltackpt.errors import FormatTooNew
from deltackpt.format import manifest, records
from deltackpt.format.manifest import DenseLeaf, KeyPath, Layout, SaveId, TableEntry
from deltackpt.format.records import Unsound
from deltackpt.format.segments import GroupEntry
from deltackpt.format.soundness import is_name, require

_MAGIC = "deltackpt.log"
#: More than any job has; the log of each is looked for.
_MOST_PROCESSES = 1 << 16
#: Features that a reader must know to read a stretch.
KNOWN_FEATURES: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continues:
    """The point of an earlier stretch that a run goes on from."""

    stretch: int
    save_id: SaveId


@dataclasses.dataclass(frozen=True, kw_only=True)
class StretchHead:
    """What a run goes on from, and what it logs.

    Attributes:
      stretch: its number.
      run: id of the run; the save ids of its marks and steps bear it.
      process_count: how many processes log; 0 where the run keeps no log, and only says what it
        goes on from.
      directory: where the segments are, where that is not beside the head.
      base: the step that training was restored from, or that the point builds on; None where it
        began afresh.
      continues: the point that training was restored at; None where it was a step.
      groups, tables, dense, tracking_paths: as in a manifest, of the state that is logged.
      features: what a reader must know.
    """

    stretch: int
    run: str
    process_count: int
    base: SaveId | None
    continues: Continues | None
    directory: str | None = None
    groups: tuple[GroupEntry, ...] = ()
    tables: tuple[TableEntry, ...] = ()
    dense: tuple[DenseLeaf, ...] = ()
    tracking_paths: tuple[KeyPath, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def group_by_name(self) -> dict[str, GroupEntry]:
        """Groups by name."""
        return {group.name: group for group in self.groups}

    @property
    def layout(self) -> Layout:
        """Tables and dense leaves of the state that is logged."""
        return Layout(self.groups, self.tables, self.dense, self.tracking_paths)


def to_bytes(head: StretchHead) -> bytes:
    """Encodes a head with its checksum."""
    return records.to_bytes(head, _MAGIC)


def from_bytes(data: bytes, *, name: str) -> StretchHead:
    """Decodes a head.

    Args:
      data: of ``to_bytes``.
      name: how errors name it.

    Raises:
      Damaged: it is altered, or says what no head can.
      FormatTooNew: a later version wrote it, or it needs a feature unknown here.
    """
    fields = records.fields_of(data, name=name, magic=_MAGIC)
    try:
        head = records.built(StretchHead, fields)
        if unknown := set(head.features) - KNOWN_FEATURES:
            raise FormatTooNew(
                f"{name}: needs features {sorted(unknown)}, unknown to this deltackpt; install a "
                "newer deltackpt"
            )
        _check(head)
    except Unsound as error:
        raise error.damage(name) from error
    return head


def _check(head: StretchHead) -> None:
    require(is_name(head.run), "the id of a run", head.run, "run")
    count = head.process_count
    require(count <= _MOST_PROCESSES, f"at most {_MOST_PROCESSES}", count, "process_count")
    if (continues := head.continues) is not None:
        before = continues.stretch
        require(before < head.stretch, "an earlier stretch", before, "continues.stretch")
        require(head.base is not None, "the step below the point", None, "base")
    manifest.check_paths(head)
