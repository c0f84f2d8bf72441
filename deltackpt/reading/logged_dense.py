# SPDX-License-Identifier: Apache-2.0
"""Dense leaves of a recovery point, from its records; no jax.

A full record contains its leaves whole, or as blocks relative to those of the previous full record
in the same segment; ``stored_dense`` applies them like those of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format.dense_blocks import Key
from deltackpt.format.manifest import SaveId
from deltackpt.reading import stored_dense
from deltackpt.reading.orbax_values import OnFilled, nobody
from deltackpt.reading.stored_dense import DenseShard, DenseValues, OnBytes, uncounted
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.reading.wal_records import ProcessWal, WalRecord, damage_of

#: The values of a process's part of the item.
Values = Mapping[Key, memoryview]
#: Whether the value of a key of the database is asked for; files always are.
Wanted = Callable[[str], bool]


def everything(key: str) -> bool:
    """Wants every value."""
    return True


class DenseKept:
    """A cache of the dense leaves read last, from which the next ones may continue."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        #: Epoch, process and record to the decoded values.
        self.values: dict[tuple[int, int, SaveId], Values] = {}


def dense_of(
    plan: ReplayPlan,
    kept: DenseKept | None = None,
    wanted: Wanted = everything,
    *,
    on_bytes: OnBytes = uncounted,
) -> DenseValues:
    """Returns the dense leaves of the recovery point.

    Args:
      plan: the replay plan to the recovery point.
      kept: cache of earlier calls with the same ``wanted``; this call adds what it reads.
      wanted: which values to read.
      on_bytes: called with the lengths of what is read.

    Raises:
      DamagedWal: the leaves are missing or altered.
    """
    values: dict[str, memoryview] = {}
    files: dict[str, memoryview] = {}
    before, now = kept or DenseKept(), DenseKept()
    for process, record in plan.last_records.items():
        log = plan.view.processes[process].log
        dense = ProcessDense(plan.view.head.epoch, process, log, wanted, on_bytes)
        with damage_of(record):
            for (file, key), data in dense.values_of(record, before, now).items():
                (files if file else values)[key] = data
    if kept is not None:
        kept.values = now.values
    return DenseValues(values, files)


class ProcessDense:
    """Reads the dense leaves that one process has appended."""

    def __init__(
        self,
        epoch: int,
        process: int,
        log: ProcessWal,
        wanted: Wanted = everything,
        on_bytes: OnBytes = uncounted,
    ):
        """Reads nothing yet.

        Args:
          epoch: sequence number of the epoch.
          process: index of the process.
          log: what it wrote.
          wanted: as for ``dense_of``.
          on_bytes: as for ``dense_of``.
        """
        self._wanted, self._on_bytes = wanted, on_bytes
        self._epoch = epoch
        self._process = process
        self._records = {record.save_id.attempt: record for record in log.records}

    def values_of(self, record: WalRecord, before: DenseKept, now: DenseKept) -> Values:
        """Returns the process's part of the dense item at a record.

        Args:
          record: one of its records.
          before: values that were read before.
          now: receives the values that are read.

        Raises:
          Damaged: a record, or one that it continues from, is missing or altered.
        """
        if record.dense is None:
            return {}
        sources, held, at = [], None, record
        while at is not None:
            sources.append([self._source(at)])
            at = self._before(at)
            held = None if at is None else before.values.get(self._key(at))
            if held is not None:
                break
        name = record.name
        base = None if held is None else _Held(held, name)
        values, files = stored_dense.values_of(sources, base, name, self._wanted)
        found = {(False, key): data for key, data in values.items()}
        found |= {(True, key): data for key, data in files.items()}
        now.values[self._key(record)] = found
        return found

    def _source(self, record: WalRecord) -> DenseShard:
        assert record.dense is not None
        return DenseShard(record.arrays, record.dense, record.name, self._on_bytes)

    def _key(self, record: WalRecord) -> tuple[int, int, SaveId]:
        return self._epoch, self._process, record.save_id

    def _before(self, record: WalRecord) -> WalRecord | None:
        """Returns the record that the leaves of one are relative to; None if they are whole.

        Raises:
          Damaged: the record does not exist.
        """
        number = record.head.against
        if number is None:
            return None
        found = self._records.get(number)
        if (
            found is None
            or found.save_id.attempt >= record.save_id.attempt
            or found.head.values is None
        ):
            raise Damaged(record.name, f"an earlier record {number} that it is relative to", "none")
        return found


class _Held(NamedTuple):
    """The values of an earlier record; see ``dense.Base``."""

    values: Values
    name: str

    def nbytes(self, key: Key) -> int | None:
        """See ``Base``."""
        found = self.values.get(key)
        return None if found is None else found.nbytes

    def fill(self, into: Mapping[Key, np.ndarray], on_filled: OnFilled = nobody) -> None:
        """See ``Base``."""
        for key, out in into.items():
            data = self.values.get(key)
            if data is None or data.nbytes != len(out):
                have = "none" if data is None else f"{data.nbytes}"
                expected = f"{len(out)} bytes of {key[1]} in the previous record"
                raise Damaged(self.name, expected, have)
            out[:] = np.frombuffer(data, np.uint8)
