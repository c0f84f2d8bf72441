# SPDX-License-Identifier: Apache-2.0
"""Sampled audit of the WAL: checks that each sampled row that changed is in a record.

Every fourth record compares a slice of the newest save's sample and keeps the new bits; about 50
records cover it. The other rows keep their old bits, so a later record finds a missed change.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from deltackpt.format.manifest import Layout
from deltackpt.format.row_blocks import GroupEntry, RowSet
from deltackpt.save import tracking_audit
from deltackpt.save.branch import Clocks, Known, clocks_seen
from deltackpt.save.selection import Sources, TouchedRows, Where

#: One record in so many is compared, at so many rows: 75 us of 4 calls of 1.4 ms, or 1.3 %.
_EVERY, _ROWS = 4, 128


@dataclasses.dataclass(eq=False)
class _Slice:
    """A few rows of one group as they were at the last comparison."""

    group: str
    where: Where  # See ``tracking_audit.Samples``.
    rows: np.ndarray  # Virtual, int64 ascending.
    bits: Mapping[str, np.ndarray]  # Field name to uint8 (n, row_bytes).
    since: Clocks | None  # Rows may have moved after these clocks; None if unknown.


class Audit:
    """Compares a few rows for each record; used by the training thread."""

    def __init__(self) -> None:
        self._known: Known | None = None
        self._slices: collections.deque[_Slice] = collections.deque()
        self._calls = 0
        #: Checks the rows that were requested from an accelerator.
        self._check: Callable[[], str | None] | None = None

    def start(self, known: Known | None) -> None:
        """Replaces the sample with the one of a save; None ends the audit."""
        self._known, self._check = known, None
        self._slices.clear()

    def compare(
        self,
        sources: Sources,
        given: TouchedRows | None,  # The rows of the record; None if the stamps determine them.
        *,
        clocks: Clocks,
        since: Mapping[str, int],  # TouchState path to the clock of the previous record.
        settled: Clocks | None,  # Rows may still move after these; None if unknown.
    ) -> str | None:
        """Compares the next slice if one is due; describes changed rows in no record, else None.

        Accelerator rows are compared at the next call.
        """
        found, call, self._calls = self.poll(), self._calls, self._calls + 1
        if found is not None or call % _EVERY:
            return found
        if self._known is not None:
            self._slices.extend(_slices(sources, self._known))
            self._known = None
        if not self._slices:
            return None
        one = self._slices[0]
        self._slices.rotate(-1)
        fields = sources.fields_of(one.group, one.where)
        if not one.bits.keys() <= fields.keys():
            self._slices.pop()  # The state is sharded in another way by now.
            return None
        layout, group = sources.layout, sources.layout.group_by_name[one.group]
        before = {} if one.since is None else clocks_seen(clocks, one.since)
        one.since = settled
        landing = {name: fields[name].dispatch_bits(one.rows) for name in one.bits}

        def unheld() -> np.ndarray:
            if given is None:
                return np.zeros(len(one.rows), bool)
            held = given(one.group, RowSet(((int(one.rows[0]), int(one.rows[-1]) + 1),)))
            return np.isin(one.rows, held, invert=True)

        if all(fields[name].on_host for name in one.bits):
            at = functools.partial(sources.stamps.at, group, one.rows)
            return _checked(one, layout, group, landing, at, before, since, unheld)
        # Later steps donate the state, so nothing may refer to it.
        at, missing = sources.stamps.dispatch_at(group, one.rows), unheld()
        self._check = lambda: _checked(
            one, layout, group, landing, at, before, since, lambda: missing
        )
        return None

    def poll(self) -> str | None:
        """Checks the rows that were requested from an accelerator; see ``compare``."""
        check, self._check = self._check, None
        return None if check is None else check()


def _checked(
    one: _Slice,
    layout: Layout,
    group: GroupEntry,
    landing: Mapping[str, Callable[[], np.ndarray]],
    stamps: Callable[[], Mapping[str, np.ndarray]],
    before: Mapping[str, int],
    since: Mapping[str, int],
    unheld: Callable[[], np.ndarray],
) -> str | None:
    """Keeps the bits of a slice; returns the rows that changed and that no record holds."""
    changed = []
    for name, known in one.bits.items():
        one.bits = {**one.bits, name: (now := landing[name]())}
        if now.tobytes() != known.tobytes():  # 20 times as fast as to compare arrays.
            changed.append(tracking_audit.differ(now, known))
    if not changed or not before:
        return None
    touched = recent = np.zeros(len(one.rows), bool)
    for place, now in stamps().items():
        touched, recent = touched | (now > before[place]), recent | (now > since[place])
    wrong = np.logical_or.reduce(changed) & (~touched | (recent & unheld()))
    listed = tracking_audit.by_table(layout, group, one.rows[wrong])
    faults = [tracking_audit.listed(table, [rows]) for table, rows in listed]
    return tracking_audit.text(faults, "in the WAL") if faults else None


def _slices(sources: Sources, known: Known) -> Iterator[_Slice]:
    """The sample of a save in slices of a few rows, each within one shard."""
    for (group, where), sample in (known.sample or {}).items():
        fields, count = sources.fields_of(group, where), len(sample.rows)
        starts = [field.bounds[:, 0] for field in fields.values()]
        cuts = np.searchsorted(sample.rows, np.concatenate([np.zeros(0, np.int64), *starts]))
        cuts = np.union1d(cuts, range(0, count, _ROWS))
        for start, stop in itertools.pairwise([*cuts.tolist(), count]):
            if start < stop:
                bits = {name: rows[start:stop] for name, rows in sample.bits.items()}
                yield _Slice(group, where, sample.rows[start:stop], bits, known.settled)
