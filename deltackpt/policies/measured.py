# SPDX-License-Identifier: Apache-2.0
"""Measures what saves, WAL records and restores cost, from the events of a running job.

An event handler keeps the newest figures of each kind and returns their medians. A first save that
compiles, or one that met a busy disk, does not move a median. It reads no clock.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from deltackpt.errors import OptionError
from deltackpt.events import AppendEvent, Event, RestoreEvent, SaveEvent
from deltackpt.policies.regimes import Cost, RecoveryKind, RegimeAdvice, advise_regime

#: Figures kept for each kind: enough for a steady median, few enough to follow changes.
_KEPT = 64


class _Taken(NamedTuple):
    stall_secs: float
    persist_secs: float
    nbytes: int


class MeasuredCosts:
    """An event handler that measures the costs that ``advise_regime`` needs.

    - ``stall_secs`` is how long the call blocked. Events do not contain the training time lost to
      background work: if that matters, compare steps with and without saves, and add it.
    - ``persist_secs`` ends when the save is committed or the WAL record is durable. A save that is
      uploaded to a bucket is then committed in the staging directory.
    - ``restore_secs`` is estimated from bytes: those of a median save of a kind, times the time
      that restores took per byte. Before the first restore, reading a save is assumed to take as
      long as making it durable. Dense leaves of WAL records are not counted: a restore reads those
      of one record.

    All figures are from this process.

    Examples:
      >>> costs = MeasuredCosts()  # CheckpointManager(root, event_handlers=(costs,))
      >>> costs.cost("base") is None
      True
    """

    def __init__(self) -> None:
        """Creates a handler without figures."""
        self._taken: dict[RecoveryKind, collections.deque[_Taken]] = {
            kind: collections.deque(maxlen=_KEPT) for kind in ("wal", "delta", "base")
        }
        self._secs_per_byte: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def receive(self, event: Event) -> None:
        """See ``EventHandler``."""
        if isinstance(event, SaveEvent):
            taken = _Taken(event.blocked_secs, event.total_secs, event.bytes_written)
            self._taken[event.kind].append(taken)
        elif isinstance(event, RestoreEvent) and event.bytes_read:
            self._secs_per_byte.append(event.total_secs / event.bytes_read)
        elif isinstance(event, AppendEvent) and event.kind == "full":
            rows_bytes = event.bytes_written - event.dense_bytes
            self._taken["wal"].append(_Taken(event.blocked_secs, event.durable_secs, rows_bytes))

    def cost(self, kind: RecoveryKind) -> Cost | None:
        """Returns the median costs of a kind; None if no event of that kind was received.

        Args:
          kind: ``wal`` for full WAL records, ``delta`` or ``base``.
        """
        taken = self._taken[kind]
        if not taken:
            return None
        stall, persist, nbytes = (_median(column) for column in zip(*taken, strict=True))
        restore = nbytes * _median(self._secs_per_byte) if self._secs_per_byte else persist
        return Cost(stall_secs=stall, persist_secs=persist, restore_secs=restore)

    def advise(
        self, *, mtbr_secs: float, step_secs: float, max_overhead: float = 0.01
    ) -> RegimeAdvice:
        """Returns the advice for the measured costs; see ``advise_regime``.

        Raises:
          OptionError: no base was measured yet, or an argument is invalid.
        """
        base = self.cost("base")
        if base is None:
            raise OptionError(
                "MeasuredCosts.advise: expected the event of a base, found none; ask again after "
                "save(step, state, force_base=True), or call advise_regime with figures of your own"
            )
        return advise_regime(
            base=base,
            delta=self.cost("delta"),
            wal=self.cost("wal"),
            mtbr_secs=mtbr_secs,
            step_secs=step_secs,
            max_overhead=max_overhead,
        )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
