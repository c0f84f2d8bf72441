# SPDX-License-Identifier: Apache-2.0
"""A call of ``save()``: its arguments, the save in flight, and its failure."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from deltackpt.errors import DeltackptError, OptionError, OutOfSpace, SaveFailed, TrackingFailed
from deltackpt.format.naming import Leaf
from deltackpt.handlers.items import Items
from deltackpt.outcomes import Saved
from deltackpt.save.commit import Committed
from deltackpt.save.pending_save import PendingSave, RefusedSave
from deltackpt.state.touch_state import TouchState


@dataclasses.dataclass(frozen=True, eq=False)
class SaveArguments:
    """The arguments of ``save()`` other than step and state; ``ids`` is from ``append()``."""

    touched: TouchState | None = None
    items: Items | None = None
    metrics: Mapping[str, float] | None = None
    force_base: bool = False
    custom_metadata: Mapping[str, object] | None = None
    ids: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("metrics", "custom_metadata"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _as_json(name, given))
        if not (self.touched is None or isinstance(self.touched, TouchState)):
            raise OptionError(
                "touched: expected a TouchState from deltackpt.touched.init() or mark(), found "
                f"{type(self.touched).__name__}; pass its result"
            )

    @property
    def save_unchanged(self) -> bool:
        """Whether the arguments require a save even if the state is the restored one."""
        others = self.items, self.metrics, self.custom_metadata, self.ids
        return self.force_base or any(others)


def _as_json(name: str, given: object) -> dict[str, object]:
    """Returns a copy as JSON values; scalars of numpy and jax become numbers."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{name}: expected a mapping, found {type(given).__name__}")
    try:
        return json.loads(json.dumps(dict(given), default=_number))
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # Of ``item()``, too.
        raise OptionError(
            f"{name}: expected JSON values, found {reprlib.repr(given)}: {error}; pass numbers, "
            "strings, lists and dicts; convert arrays with .tolist()"
        ) from error


def _number(value: Leaf) -> object:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not one of these")


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """A save that failed in the background."""

    step: int
    cause: Exception

    def error(self, taken: Saved | None) -> SaveFailed:
        """Returns the error to raise from ``cause``; ``taken`` is the save made since then."""
        cause = self.cause
        is_known = isinstance(cause, DeltackptError)
        detail = str(cause) if is_known else f"{type(cause).__name__}: {cause}"
        is_doubtful = is_known and cause.leaves_doubt
        if taken is not None:
            follow = f"step {taken.step} is being saved"
            follow += "" if is_doubtful else " and contains its rows"
        elif is_doubtful:
            follow = "the next save is a base"
        else:
            follow = "no touched row is lost, save again"
            if isinstance(cause, OutOfSpace):
                follow = f"keep fewer steps; {follow}"
        kind = TrackingFailed if is_doubtful else SaveFailed
        error = kind(f"the save of step {self.step} failed: {detail}; {follow}")
        error.saved = taken
        return error


class Done(NamedTuple):
    """The result of the background half of a committed save."""

    room_secs: float  # how long it waited for room
    committed: Committed
    warnings: tuple[str, ...]  # about other problems


@dataclasses.dataclass(eq=False)
class InFlight:
    """The save in flight."""

    step: int
    temporary: Path
    pending: PendingSave | RefusedSave  # its tables, or why this process cannot save them
    future: Future[Done]
    started: float  # when ``save()`` was called, ``time.perf_counter()``
    blocked_secs: float = 0.0  # how long ``save()`` blocked

    @property
    def is_reported(self) -> bool:
        """Returns whether ``save()`` itself raised the error."""
        return isinstance(self.pending, RefusedSave)

    @property
    def is_lost(self) -> bool:
        """Returns whether the save failed and the failure was not reported yet."""
        return self.future.done() and self.future.exception() is not None
