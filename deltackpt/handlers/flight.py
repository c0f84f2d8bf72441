# SPDX-License-Identifier: Apache-2.0
"""The arguments of a save, the save in flight, and its failure."""

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
    """The arguments of ``save()`` other than step and state; ``ids`` is from ``append()``."""

    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False
    custom_metadata: Mapping[str, Any] | None = None
    ids: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("metrics", "custom_metadata"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_json(name, given))
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected a TouchState from deltackpt.touched.init() or mark(), found "
                f"{type(self.touched).__name__}; pass its result"
            )


def _as_json(name: str, given: object) -> dict[str, Any]:
    """Returns a copy as JSON values; scalars of numpy and jax become numbers."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}: expected a mapping, found {type(given).__name__}")
    try:
        return json.loads(json.dumps(dict(given), default=_number))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"{name}: expected JSON values, found {given!r}: {error}; pass numbers, strings, lists "
            "and dicts; convert arrays with .tolist()"
        ) from error


def _number(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not one of these")


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A save that failed in the background."""

    step: int
    cause: Exception

    def error(self, taken: Saved | None) -> SaveFailed:
        """Returns the error to raise from ``cause``.

        Args:
          taken: the save that was made since then, or None.
        """
        if isinstance(self.cause, DeltackptError):
            detail = str(self.cause)
        else:
            detail = f"{type(self.cause).__name__}: {self.cause}"
        follow = (
            "no touched row is lost, save again"
            if taken is None
            else f"step {taken.step} is being saved and contains its rows"
        )
        if isinstance(self.cause, OutOfSpace) and taken is None:
            follow = f"keep fewer steps; {follow}"
        kind = SaveFailed
        if isinstance(self.cause, DeltackptError) and self.cause.leaves_doubt:
            kind = TrackingFailed
            follow = "the next save is a base"
            if taken is not None:
                follow = f"step {taken.step} is being saved"
        error = kind(f"the save of step {self.step} failed: {detail}; {follow}")
        error.saved = taken
        return error


class Done(NamedTuple):
    """The result of the background half of a committed save.

    Attributes:
      room_secs: how long the save waited for room.
      committed: when the step became visible.
      warnings: warnings about other problems.
    """

    room_secs: float
    committed: Committed
    warnings: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class InFlight:
    """The save in flight.

    Attributes:
      step: the training step.
      temporary: the directory in which it is written.
      pending: its tables, or why this process cannot save them.
      future: future of its background half.
      started: when ``save()`` was called, as a ``time.perf_counter()`` value.
      blocked_secs: how long ``save()`` blocked.
    """

    step: int
    temporary: Path
    pending: PendingSave | RefusedSave
    future: Future[Done]
    started: float
    blocked_secs: float = 0.0

    @property
    def told(self) -> bool:
        """Returns whether ``save()`` itself raised the error."""
        return isinstance(self.pending, RefusedSave)

    @property
    def is_lost(self) -> bool:
        """Returns whether the save failed and the failure was not reported yet."""
        return self.future.done() and self.future.exception() is not None
