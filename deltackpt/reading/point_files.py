# SPDX-License-Identifier: Apache-2.0
"""The parts of a recovery point other than tables, as files, so that they transfer like a step's.

The rows of its records are stored as bitmaps, by table; restores keep their indices for the next
deltas. Dense leaves that a delta stores as blocks are stored in the same way, next to the step's
files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.format.manifest import Layout
from deltackpt.reading.stored_dense import DenseValues

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
    """Returns the argument of ``to_files``, which shares the memory of the files."""
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
