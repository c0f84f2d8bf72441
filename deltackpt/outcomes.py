# SPDX-License-Identifier: Apache-2.0
"""What the manager's ``save`` and ``restore`` give back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from deltackpt.errors import RestoreError, ServiceError
from deltackpt.format.manifest import Kind
from deltackpt.reading.stretches import LogPoint
from deltackpt.state.touch_state import TouchState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What ``save()`` did.

    Attributes:
      step: the step asked for.
      kind: base or delta; None where the save was skipped.
      reason: why.
      blocked_secs: how long ``save()`` kept the training thread.
    """

    step: int
    kind: Kind | None
    reason: str
    blocked_secs: float

    @classmethod
    def skipped(cls, step: int, why: str, started: float) -> Saved:
        """No save, and why; ``started`` is of ``time.perf_counter()``."""
        seconds = time.perf_counter() - started
        return cls(step=step, kind=None, reason=f"skipped: {why}", blocked_secs=seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logged:
    """What ``log()`` did.

    Attributes:
      step: the step asked for.
      kind: ``"full"``: a mark with dense leaves, which can be restored once every process has it;
        ``"soft"``: one of rows alone; None where no mark was taken.
      reason: why.
      blocked_secs: how long ``log()`` kept the training thread.
      recovery: what a restore would find if the job were killed now, as far as is known: the newest
        point that is durable, or a committed step; None without any.
      saved: what was saved instead, where ``log()`` has taken a step.
    """

    step: int
    kind: Literal["full", "soft"] | None
    reason: str
    blocked_secs: float
    recovery: LogPoint | int | None
    saved: Saved | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """A restored step.

    Attributes:
      step: its number; that of the point where one was restored.
      state: the state, like the template; without one, nested dicts and lists of numpy arrays.
      touched: a fresh TouchState for what follows; None where the step was read only.
      items: further items that were asked for.
      chain: the steps that were read, base first.
      skipped: newer steps that are not intact, with what is wrong with them.
      source: where each save of the chain was read, base first: the ``"root"``; where there are
        tiers, the ``"stage"``, or ``"extents"`` or ``"neighbours"``, from which it came back there;
        or ``"service"``, which has all of them merged. ``"log"`` behind them where marks were
        replayed, which those of a point that the service holds were already.
      service_error: why they did not come from the service that there is; None where they did,
        or where there is none.
      bytes_read: bytes of tables and slots that were read.
      seconds: wall time of the whole restore.
      point: the point of the log that it is; None where it is a step.
    """

    step: int
    state: Any
    touched: TouchState | None
    items: dict[str, Any]
    chain: tuple[int, ...]
    skipped: tuple[tuple[int, RestoreError], ...]
    source: tuple[str, ...]
    bytes_read: int
    seconds: float
    service_error: ServiceError | None = None
    point: LogPoint | None = None

    def __getitem__(self, item: str) -> Any:
        """A further item, as of Orbax's ``Composite``."""
        return self.items[item]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadState:
    """Leaves of a step in a template of another structure; what ``read_state()`` gives back.

    Attributes:
      step: its number.
      state: like the template.
      missing: paths that the step does not have: the template's leaves are there.
      unused: paths of the step that the template does not ask for.
      cast: paths whose dtype is the template's, not the stored one.
    """

    step: int
    state: Any
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadRows:
    """Rows of some tables of a step; what ``read()`` gives back.

    Attributes:
      step: its number.
      tables: table path to ``"values"`` and the names of slots to the rows asked for, on the host.
      chain: the steps that were read, base first.
      bytes_read: bytes of tables and slots that were read.
      seconds: wall time.
    """

    step: int
    tables: Mapping[str, Mapping[str, np.ndarray]]
    chain: tuple[int, ...]
    bytes_read: int
    seconds: float
