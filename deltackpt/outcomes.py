# SPDX-License-Identifier: Apache-2.0
"""Results of the manager's ``save``, ``append``, ``restore`` and ``read``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from deltackpt.errors import RestoreError, ServiceError
from deltackpt.format.manifest import Kind
from deltackpt.format.naming import PyTree
from deltackpt.state.touch_state import TouchState
from deltackpt.units import count, size

if TYPE_CHECKING:
    from deltackpt.reading.wal_index import RecoveryPoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """Result of ``save()``.

    Attributes:
      step: the training step.
      kind: ``"base"`` or ``"delta"``; None if the save was skipped.
      reason: why the step was saved in this way, or not saved.
      blocked_secs: how long ``save()`` blocked, in seconds.
    """

    step: int
    kind: Kind | None
    reason: str
    blocked_secs: float

    @classmethod
    def skipped(cls, step: int, why: str, started: float) -> Saved:
        """Returns the result of a skipped save; ``started`` is a ``time.perf_counter()`` value."""
        seconds = time.perf_counter() - started
        return cls(step=step, kind=None, reason=f"skipped: {why}", blocked_secs=seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appended:
    """Result of ``append()``.

    Attributes:
      step: the training step.
      kind: ``"full"``: a record with dense leaves, a recovery point once every process has it;
        ``"soft"``: rows only; None if nothing was appended.
      reason: why the step was saved in this way, or not saved.
      blocked_secs: how long ``append()`` blocked, in seconds.
      recovery: the state that a restore would find if the job were killed now, as far as this
        process knows: the newest durable recovery point, or a committed step; None if neither
        exists.
      saved: the save that was made instead, if any.
    """

    step: int
    kind: Literal["full", "soft"] | None
    reason: str
    blocked_secs: float
    recovery: RecoveryPoint | int | None
    saved: Saved | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """A restored step or recovery point.

    Attributes:
      step: the training step.
      state: the state, like the template; without one, nested dicts and lists of numpy arrays.
      touched: a fresh ``TouchState`` for the following saves; None if the run continues with
        fingerprints, or if there was no template.
      items: the requested additional items.
      chain: the steps that were read, base first.
      skipped: newer steps that are not intact, each with its error, which names the damaged object
        and the other steps that need it; also steps in extents or on peers that could not be
        recovered.
      source: where each save of the chain was read from, base first: ``"directory"`` (the
        checkpoint directory); with tiers also ``"staging"`` (the staging directory), or
        ``"extents"`` or ``"peers"``, from which it was recovered; or ``"service"`` (a hot standby),
        which holds them merged. ``"wal"`` follows if WAL records were replayed; a hot standby has
        already replayed those of its own point.
      bytes_read: bytes of tables and slots that were read.
      seconds: wall time of the whole restore.
      service_error: why the connected hot standby did not provide the tables; None if it did, or if
        none is connected.
      point: the restored recovery point; None if a step was restored.
    """

    step: int
    state: PyTree
    touched: TouchState | None
    items: dict[str, Any]
    chain: tuple[int, ...]
    skipped: tuple[tuple[int, RestoreError], ...]
    source: tuple[str, ...]
    bytes_read: int
    seconds: float
    service_error: ServiceError | None = None
    point: RecoveryPoint | None = None

    def __getitem__(self, item: str) -> Any:
        """Returns an additional item, as Orbax's ``Composite`` does."""
        return self.items[item]

    def __repr__(self) -> str:
        what = f"step {self.step}" if self.point is None else str(self.point)
        skipped = ", ".join(str(step) for step, _ in self.skipped)
        return (
            f"<Restored {what}, from {', '.join(dict.fromkeys(self.source)) or 'no tables'}: "
            f"{size(self.bytes_read)} in {self.seconds:.2g} s"
            f"{f'; skipped {skipped}, see skipped' if skipped else ''}>"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadState:
    """Leaves of a step in the structure of a template; result of ``read_state()``.

    Attributes:
      step: the training step.
      state: the filled template.
      missing: template paths that the step lacks; the template's own leaves are kept.
      unused: paths of the step that the template does not name, without None and empty containers
        such as optax's ``MaskedNode`` and ``EmptyState``.
      cast: paths whose values were cast to the template's dtype.
    """

    step: int
    state: PyTree
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]

    def __repr__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("missing", "unused", "cast")}
        shown = ", ".join(f"{number} {name}" for name, number in counts.items())
        return f"<ReadState of step {self.step}: {shown}>"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadRows:
    """Rows of some tables of a step; the result of ``read()``.

    Attributes:
      step: the training step.
      tables: by table path, the requested rows of ``"values"`` and each ``"slot.<name>"``, on the
        host.
      chain: the steps that were read, base first.
      bytes_read: bytes of tables and slots that were read.
      seconds: wall time in seconds.
    """

    step: int
    tables: Mapping[str, Mapping[str, np.ndarray]]
    chain: tuple[int, ...]
    bytes_read: int
    seconds: float

    def __repr__(self) -> str:
        return (
            f"<ReadRows of step {self.step}: {count(len(self.tables), 'table')}, "
            f"{size(self.bytes_read)} in {self.seconds:.2g} s>"
        )
