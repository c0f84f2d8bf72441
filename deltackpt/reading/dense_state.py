# SPDX-License-Identifier: Apache-2.0
"""Decoded dense leaves, brought up to date by the layers that follow; no jax.

A delta is relative to its parent, and a WAL record to an earlier record of its process, alike. The
state below is never written: values that do not change are shared with it. What a recovery point
has besides tables is also available as files, so that it transfers like a step's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.reading import stored_dense
from deltackpt.reading.stored_dense import (
    DenseShard,
    DenseValues,
    Room,
    StoredItem,
    new_memory,
)
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.wal_records import ProcessWal, WalRecord, damage_of
from deltackpt.storage.store import StorePath

#: Segment and id of a WAL record to the dense leaves of its process at it.
KnownStates = dict[tuple[StorePath, SaveId], DenseValues]
#: Whether to read the value of a key of the database; files are always read.
Wanted = Callable[[str], bool]


def everything(key: str) -> bool:
    """Wants every value."""
    return True


def after(
    before: DenseValues,
    newer: Sequence[StoredSave],
    wanted: Wanted = everything,
    *,
    room: Room = new_memory,
) -> DenseValues | None:
    """Returns the dense leaves after further saves, oldest first; None if one has Orbax's item.

    ``before`` are the leaves before the first of the saves. ``room`` allocates the values that
    change.
    """
    item = StoredItem(newer)
    if item.base is not None:
        return None
    return stored_dense.values_of(item.shards, before, newer[-1].name, wanted, room)


def key_of(record: WalRecord) -> tuple[StorePath, SaveId]:
    """Returns the key of a record among known states."""
    return record.segment, record.save_id


def at_record(
    record: WalRecord,
    records: Mapping[int, WalRecord],
    known: KnownStates,
    wanted: Wanted = everything,
    *,
    room: Room = new_memory,
) -> DenseValues:
    """Returns the dense leaves of one process at a WAL record; see ``after``.

    ``records`` are the process's records by attempt; ``known`` the leaves at earlier ones.
    """
    layers, before, at = [], None, record
    while at is not None and before is None and at.dense is not None:
        layers.append([DenseShard(at.arrays, at.dense, at.name)])
        at = _reference(at, records)
        before = None if at is None else known.get(key_of(at))
    if not layers:
        return DenseValues({}, {})
    return stored_dense.values_of(layers, before, record.name, wanted, room)


def at_point(
    plan: ReplayPlan,
    known: KnownStates | None = None,
    wanted: Wanted = everything,
    *,
    room: Room = new_memory,
) -> DenseValues:
    """Returns the dense leaves of a recovery point, of all processes; raises DamagedWal.

    ``known`` are the leaves at the records of an earlier call with the same ``wanted``; they are
    replaced by those of this call.
    """
    found: KnownStates = {}
    for process, record in plan.last_records.items():
        with damage_of(record):
            found[key_of(record)] = at_record(
                record,
                by_attempt(plan.view.processes[process].log),
                {} if known is None else known,
                wanted,
                room=room,
            )
    if known is not None:
        known.clear()
        known.update(found)
    pieces = found.values()
    return DenseValues(
        {key: data for piece in pieces for key, data in piece.values.items()},
        {name: data for piece in pieces for name, data in piece.files.items()},
        bytes_read=sum(piece.bytes_read for piece in pieces),
    )


def by_attempt(log: ProcessWal) -> dict[int, WalRecord]:
    """Returns the records of a process by attempt."""
    return {record.save_id.attempt: record for record in log.records}


def _reference(record: WalRecord, records: Mapping[int, WalRecord]) -> WalRecord | None:
    """Returns the record that the leaves of one are relative to; None if they are whole."""
    number = record.head.against
    if number is None:
        return None
    found = records.get(number)
    if found is None or number >= record.save_id.attempt or found.head.values is None:
        raise Damaged(record.name, f"an earlier record {number} that it is relative to", "none")
    return found


_VALUES, _FILES, _ROWS = "values/", "files/", "rows/"
#: Prefix of the dense leaves of a delta without a dense item.
STEP = f"{naming.DENSE_ITEM}/"
#: The processes that have items, and those of each.
_ITEMS, _BYTES, _JSON = "items/", "bytes/", "json/"


class RecordedState(NamedTuple):
    """A full recovery point without its tables.

    ``items`` are its additional items, by process and name. ``rows`` are those of all records since
    its step, wanted or not, by table: int64, ascending.
    """

    dense: DenseValues
    items: Mapping[int, Mapping[str, object]]
    rows: Mapping[str, np.ndarray]

    def items_for(self, process: int, count: int) -> dict[str, object]:
        """Returns the items for a process: its own, or process 0's if the count has changed."""
        return dict(self.items[process if count == len(self.items) else 0])


def to_files(state: RecordedState, layout: Layout) -> dict[str, bytes | memoryview]:
    """Returns the files of a recovery point, by their names."""
    dense = state.dense
    found: dict[str, bytes | memoryview] = {
        **{name_of(key): data for key, data in dense.values.items()},
        **{name_of(name, file=True): data for name, data in dense.files.items()},
    }
    for process, items in state.items.items():
        found[f"{_ITEMS}{process}"] = b""
        for name, item in items.items():
            if isinstance(item, bytes):
                found[f"{_BYTES}{process}/{name}"] = item
            else:
                found[f"{_JSON}{process}/{name}"] = json.dumps(item).encode()
    for table in layout.tables:
        held = np.zeros(table.rows, bool)
        held[state.rows[table.name]] = True
        found[_ROWS + table.name] = np.packbits(held).data
    return found


def state_of(files: Mapping[str, np.ndarray], layout: Layout) -> RecordedState:
    """Returns the argument of ``to_files``; the memory of the files, which it shares, must stay."""
    rows = {}
    for table in layout.tables:
        name = _ROWS + table.name
        if name not in files:
            raise Damaged(name, "a file of the point in memory", "none")
        bits = files[name]
        if len(bits) != -(-table.rows // 8):
            raise Damaged(name, f"a bit for each of {table.rows} rows", f"{len(bits)} bytes")
        rows[table.name] = np.flatnonzero(np.unpackbits(bits, count=table.rows))
    items: dict[int, dict[str, object]] = {int(process): {} for process in _below(files, _ITEMS)}
    for folder, decode in ((_BYTES, bytes), (_JSON, _of_json)):
        for key, data in _below(files, folder).items():
            process, _, name = key.partition("/")
            items[int(process)][name] = decode(data)
    return RecordedState(dense_of(files), items, rows)


def name_of(key: str, *, file: bool = False) -> str:
    """Returns the file of a value of the dense item, or of a file of it."""
    return f"{_FILES if file else _VALUES}{key}"


def dense_of(files: Mapping[str, np.ndarray], folder: str = "") -> DenseValues:
    """Returns the dense leaves among some files, whose memory they share.

    ``folder`` is a prefix of their names: ``STEP`` for a delta.
    """
    return DenseValues(_below(files, folder + _VALUES), _below(files, folder + _FILES))


def _of_json(data: memoryview) -> object:
    return json.loads(bytes(data))


def _below(files: Mapping[str, np.ndarray], folder: str) -> dict[str, memoryview]:
    return {
        name.removeprefix(folder): data.data
        for name, data in files.items()
        if name.startswith(folder)
    }
