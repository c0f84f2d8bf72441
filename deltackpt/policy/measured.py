# SPDX-License-Identifier: Apache-2.0
"""What saves, marks and restores cost, from the events of a running job.

A sink that keeps the newest figures of each kind and answers with their medians, which a first save
that compiles, or one that met a busy disk, does not move. It reads no clock: what it is told is all
that it knows.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from deltackpt.errors import OptionError
from deltackpt.events import Event, LogEvent, RestoreEvent, SaveEvent
from deltackpt.policy.regimes import Cost, RecoveryKind, RegimeAdvice, advise_regime

#: Of each kind: enough for a steady median, few enough to follow a job that changes.
_KEPT = 64


class _Taken(NamedTuple):
    stall_secs: float
    persist_secs: float
    nbytes: int


class MeasuredCosts:
    """A sink that measures what ``advise_regime`` asks for.

    - ``stall_secs`` is what the call blocked. What the work in the background takes from training
      steps is in no event: where it counts, compare steps with and without saves, and add it.
    - ``persist_secs`` runs until the save is committed, or the mark durable. A save that is
      promoted to a bucket is committed in the stage of its node by then.
    - ``restore_secs`` is by bytes: those that a median save of a kind wrote, in the time that
      restores took a byte. Until one was seen, a save is taken to be read in the time that it took
      to become durable. Of marks the dense leaves are not counted: a restore reads those of one.

    Figures are those of this process.

    Example:
      >>> costs = MeasuredCosts()  # CheckpointManager(root, sinks=(costs,))
      >>> costs.cost("base") is None
      True
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._taken: dict[RecoveryKind, collections.deque[_Taken]] = {
            kind: collections.deque(maxlen=_KEPT) for kind in ("log", "delta", "base")
        }
        self._secs_per_byte: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def receive(self, event: Event) -> None:
        """See ``Sink``."""
        if isinstance(event, SaveEvent):
            taken = _Taken(event.blocked_secs, event.total_secs, event.bytes_written)
            self._taken[event.kind].append(taken)
        elif isinstance(event, RestoreEvent) and event.bytes_read:
            self._secs_per_byte.append(event.total_secs / event.bytes_read)
        elif isinstance(event, LogEvent) and event.kind == "full":
            rows_bytes = event.bytes_written - event.dense_bytes
            self._taken["log"].append(_Taken(event.blocked_secs, event.durable_secs, rows_bytes))

    def cost(self, kind: RecoveryKind) -> Cost | None:
        """The medians of a kind; None where none of it was seen.

        Args:
          kind: ``log`` for full marks, ``delta`` or ``base``.
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
        """The advice for what was measured; see ``advise_regime``.

        Raises:
          OptionError: no base was seen yet, or an argument is refused.
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
            log=self.cost("log"),
            mtbr_secs=mtbr_secs,
            step_secs=step_secs,
            max_overhead=max_overhead,
        )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
