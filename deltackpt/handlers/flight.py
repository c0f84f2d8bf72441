# SPDX-License-Identifier: Apache-2.0
"""What a save is given, the one that is on its way to the commit, and how one has failed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from deltackpt.errors import DeltackptError, OptionError, OutOfSpace, SaveFailed, TrackingFailed
from deltackpt.outcomes import Saved
from deltackpt.restore.steps import Items
from deltackpt.save.flight import PendingSave, RefusedSave
from deltackpt.save.step import Committed
from deltackpt.state.touch_state import TouchState


@dataclasses.dataclass(frozen=True, eq=False)
class SaveArguments:
    """What ``save()`` was given beside step and state."""

    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False
    custom_metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("metrics", "custom_metadata"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_json(name, given))
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected the TouchState that deltackpt.touched.init() made and mark() "
                f"gave back, found {type(self.touched).__name__}; give that"
            )


def _as_json(name: str, given: object) -> dict[str, Any]:
    """A copy that JSON can hold, taken now; scalars of numpy and jax are numbers there."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}: expected a mapping, found {type(given).__name__}")
    try:
        return json.loads(json.dumps(dict(given), default=_number))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{name}: expected what JSON can write, found {given!r}: {error}; give numbers, texts, "
            "lists and dicts, arrays by .tolist()"
        ) from error


def _number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is none of these")


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A save that failed in the background."""

    step: int
    cause: Exception

    def error(self, taken: Saved | None) -> SaveFailed:
        """What is raised; its cause is to be ``cause``.

        Args:
          taken: the save that was taken since, None where none was.
        """
        if isinstance(self.cause, DeltackptError):
            detail = str(self.cause)
        else:
            detail = f"{type(self.cause).__name__}: {self.cause}"
        follow = (
            "no touched row is lost, save again"
            if taken is None
            else f"step {taken.step} was taken and covers its rows"
        )
        if isinstance(self.cause, OutOfSpace) and taken is None:
            follow = f"keep fewer steps; {follow}"
        kind = SaveFailed
        if isinstance(self.cause, DeltackptError) and self.cause.leaves_doubt:
            kind = TrackingFailed
            follow = "the next save is a base" if taken is None else f"step {taken.step} was taken"
        error = kind(f"the save of step {self.step} failed: {detail}; {follow}")
        error.taken = taken
        return error


class Done(NamedTuple):
    """What the background half of a save that stands has done.

    Attributes:
      room_secs: how long it waited for room.
      committed: when the step was written, and visible.
      warnings: of what went wrong beside it.
    """

    room_secs: float
    committed: Committed
    warnings: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class InFlight:
    """The save that is not settled yet.

    Attributes:
      step: its number.
      temporary: the directory that it is written in.
      pending: its tables, or why there are none of this process.
      future: its background half.
      started: when ``save()`` was called, of ``time.perf_counter()``.
      blocked_secs: how long ``save()`` took.
    """

    step: int
    temporary: Path
    pending: PendingSave | RefusedSave
    future: Future[Done]
    started: float
    blocked_secs: float = 0.0

    @property
    def told(self) -> bool:
        """Whether the call of ``save()`` raised why it failed."""
        return isinstance(self.pending, RefusedSave)

    @property
    def is_lost(self) -> bool:
        """Whether it failed, and nobody was told yet."""
        return self.future.done() and self.future.exception() is not None
