# SPDX-License-Identifier: Apache-2.0
"""WAL epoch headers: the point a log forked from, which determines the valid earlier records.

A WAL epoch is the log of one run: every start and every restore begins a new one. Its header is
written once, atomically, with a number above all earlier ones, before the run saves or appends
anything. The newest header alone names what it continues: a recovery point, a step, or nothing.
Records of earlier epochs beyond that are ignored, including those that a fenced trainer still
appends.
"""

from __future__ import annotations

import dataclasses

from deltackpt.format import manifest, records
from deltackpt.format.manifest import DenseLeaf, KeyPath, Layout, SaveId, TableEntry
from deltackpt.format.records import Unsound
from deltackpt.format.segments import GroupEntry
from deltackpt.format.soundness import is_name, refuse_unknown, require

_MAGIC = "deltackpt.log"
#: More than any job has; the log of each is looked for.
_MOST_PROCESSES = 1 << 16
#: Feature of an epoch whose records are in a Kafka topic.
KAFKA = "kafka"
#: Features that a reader must support to read a WAL epoch.
KNOWN_FEATURES: frozenset[str] = frozenset({KAFKA})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continues:
    """The recovery point of an earlier WAL epoch from which a run resumes."""

    epoch: int
    save_id: SaveId


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalTopic:
    """The Kafka topic that holds the records of an epoch: partition p those of process p.

    Attributes:
      name: its name.
      cluster: id of its cluster.
      starts: for each partition, an offset before the first record of the epoch.
    """

    name: str
    cluster: str
    starts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochHeader:
    """Header of a WAL epoch: what the run resumed from, and what it logs.

    Attributes:
      epoch: number of the epoch.
      run: id of the run, part of the save ids of its records and steps.
      process_count: number of logging processes; 0 if the run has no log and only records its fork
        point.
      directory: location of the segments, if not next to the header.
      topic: where the records are instead of segments, if they are in Kafka.
      base: the step that was restored, or onto which the point was replayed; None for a new run.
      continues: the restored recovery point; None if a step was restored.
      groups, tables, dense, tracking_paths: same as in a manifest, for the logged state.
      features: features that a reader must support.
    """

    epoch: int
    run: str
    process_count: int
    base: SaveId | None
    continues: Continues | None
    directory: str | None = None
    topic: WalTopic | None = None
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


def to_bytes(head: EpochHeader) -> bytes:
    """Encodes a head with its checksum."""
    return records.to_bytes(head, _MAGIC)


def from_bytes(data: bytes, *, name: str) -> EpochHeader:
    """Decodes a head.

    Args:
      data: the result of ``to_bytes``.
      name: its name in errors.

    Raises:
      Damaged: it is altered or invalid.
      FormatTooNew: a later version wrote it, or it needs a feature unknown here.
    """
    fields = records.fields_of(data, name=name, magic=_MAGIC)
    try:
        head = records.built(EpochHeader, fields)
        refuse_unknown(head.features, KNOWN_FEATURES, name)
        _check(head)
    except Unsound as error:
        raise error.damage(name) from error
    return head


def _check(head: EpochHeader) -> None:
    require(is_name(head.run), "the id of a run", head.run, "run")
    count = head.process_count
    require(count <= _MOST_PROCESSES, f"at most {_MOST_PROCESSES}", count, "process_count")
    if (continues := head.continues) is not None:
        before = continues.epoch
        require(before < head.epoch, "an earlier epoch", before, "continues.epoch")
        require(head.base is not None, "the step below the point", None, "base")
    if (topic := head.topic) is not None:
        require(is_name(topic.name), "the name of a topic", topic.name, "topic.name")
        partitions = len(topic.starts)
        require(count <= partitions, f"at least {count} partitions", partitions, "topic.starts")
        require(min(topic.starts, default=0) >= 0, "offsets", topic.starts, "topic.starts")
    manifest.check_paths(head)
