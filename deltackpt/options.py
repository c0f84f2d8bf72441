# SPDX-License-Identifier: Apache-2.0
"""Options of the manager: frozen, validated when they are built."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.errors import OptionError
from deltackpt.policy import BaseOrDelta, Consecutive
from deltackpt.policy.retention import PreservationPolicy

Durability = Literal["power", "process"]
WhenBusy = Literal["wait", "skip", "coalesce"]
BaseSnapshot = Literal["block", "hold"]
Bases = Literal["periodic", "compacted"]
Tracking = Literal["marks", "fingerprints"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Every wait of the manager, in seconds.

    Attributes:
      save_secs: for a save in flight, at the next ``save()`` that waits.
      close_secs: for the saves in flight at ``wait()`` and ``close()``, when a program ends without
        ``close()``, and when another manager of the process is opened on the directory.
      processes_secs: for other processes, when a manager is made or a step restored, and in the
        background of a save: process 0 waits so long for their parts once its own is done, the
        others twice as long for process 0.
      service_secs: for a restore service to hold the step, and for each of its answers; storage
        takes over afterwards.
    """

    save_secs: float = 1800.0
    close_secs: float = 3600.0
    processes_secs: float = 300.0
    service_secs: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise OptionError(
                    f"Timeouts.{field.name}: expected a positive number of seconds, found "
                    f"{getattr(self, field.name)!r}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """How a CheckpointManager saves.

    Attributes:
      tracking: how touched rows are known: ``"marks"``: by a ``TouchState`` in the state, or given
        to ``save()``; ``"fingerprints"``: the manager itself hashes each row with its slots at
        every save, and compares; 12 bytes per row on the devices, and no line in the training step.
      sampled_proof: whether each save looks again at some thousand rows that its parent sampled: a
        row that changed without being marked makes the save a base (with several processes: fails
        it, and makes the next one a base) instead of a wrong delta. Less than 2 ms.
      policy: base or delta.
      bases: ``"periodic"``: the policy's bounds make the trainer write a base now and then;
        ``"compacted"``: later bases are left to compaction, by the service or ``deltackpt
        compact``, and the trainer takes one only where it must, or where nothing was compacted
        for four times the bounds.
      retention: which committed steps stay: a number of newest steps, an Orbax
        ``PreservationPolicy``, or None for all. A kept step always keeps its chain.
      durability: ``"power"``: a step for which ``wait()`` has returned survives a power cut;
        ``"process"``: it survives the end of the process, not of the machine.
      when_busy: what ``save()`` does while a save is in flight: ``"wait"`` for it; ``"skip"``
        this one; or ``"coalesce"``: make it due, to be taken by the first ``save_if_due()`` or
        ``save()`` that finds the writer free. None of them loses a row: the next save covers
        whatever was touched since its parent. With several processes the last two ask process 0
        whether it is free, and so wait for it on the training thread.
      base_snapshot: a base holds the tables until it is written. ``"hold"`` returns from
        ``save()`` at once, and a step that donates the tables meanwhile pays a copy of them;
        ``"block"`` returns when the tables have been written, and needs no memory; so does
        ``"hold"`` where one of them is a numpy array, which may change in place.
      staging_bytes: host memory for the rows of deltas in flight. A delta that needs more is
        held like a base.
      timeouts: limits of all waits.
      read_only: restore only: no lease, no collection, no directory is made.
      alone: of a job of several processes only this one uses the manager, to read; without it
        all processes make and use it.
    """

    tracking: Tracking = "marks"
    sampled_proof: bool = True
    policy: BaseOrDelta = dataclasses.field(default_factory=Consecutive)
    bases: Bases = "periodic"
    retention: int | PreservationPolicy | None = None
    durability: Durability = "power"
    when_busy: WhenBusy = "wait"
    base_snapshot: BaseSnapshot = "hold"
    staging_bytes: int = 1 << 30
    timeouts: Timeouts = Timeouts()
    read_only: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("tracking", ("marks", "fingerprints")),
            ("bases", ("periodic", "compacted")),
            ("durability", ("power", "process")),
            ("when_busy", ("wait", "skip", "coalesce")),
            ("base_snapshot", ("block", "hold")),
        ):
            if getattr(self, name) not in known:
                raise OptionError(
                    f"ManagerOptions.{name}: expected one of {known}, found {getattr(self, name)!r}"
                )
        if self.staging_bytes <= 0:
            raise OptionError(
                f"ManagerOptions.staging_bytes: expected at least 1, found {self.staging_bytes}"
            )
        if self.alone and not self.read_only:
            raise OptionError(
                "ManagerOptions.alone: expected read_only=True with it, found a manager that may "
                "write; all processes of a job save together"
            )
        if isinstance(self.retention, int) and self.retention < 1:
            raise OptionError(
                f"ManagerOptions.retention: expected at least 1 step, found {self.retention}"
            )
