# SPDX-License-Identifier: Apache-2.0
"""Distinguishes steps that are removed while they are read from damage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DeltackptError,
    RestoreError,
    StepGone,
    StorageError,
)
from deltackpt.storage.store import StorePath, store_path

_GONE_CHECKS = 5
_GONE_INTERVAL_SECS = 0.1


@contextlib.contextmanager
def standing(
    step_dir: StorePath | Path,
    *,
    stands: Callable[[], bool] | None = None,
    during: str = "read",
    instead: str = "restore",
) -> Iterator[None]:
    """Raises ``StepGone`` if an error inside occurs because a step was removed or replaced.

    A removed step can cause any error: a missing file, a file of another save, an error of a
    library. If the step still exists, the error is raised unchanged.

    Args:
      step_dir: the step.
      stands: returns whether the step is still the same save; by default, whether its directory is
        the same as at the start. A step that does not exist at the start cannot be removed.
      during: what is done to the step, as a participle for the message.
      instead: what to do with the newest step instead, for the message.

    Raises:
      StepGone: the error occurred because the step was removed.
    """
    at = store_path(step_dir)
    stamp = at.stamp()
    stands = stands or (lambda: stamp is None or stamp.same(at.stamp()))
    try:
        yield
    except Exception as error:
        if is_of_reading(error) and goes(lambda: not stands(), error):
            raise gone(step_dir, during=during, instead=instead) from error
        raise


def goes(removed: Callable[[], bool], cause: Exception) -> bool:
    """Returns whether something is removed, or is being removed, after a file of it was missing.

    Other tools do not rename a directory first: they empty it before they remove it.
    """
    checks = _GONE_CHECKS if isinstance(cause, (BrokenChain, Damaged, OSError)) else 1
    for check in range(checks):
        if removed():
            return True
        if check + 1 < checks:
            time.sleep(_GONE_INTERVAL_SECS)
    return False


def is_of_reading(error: Exception) -> bool:
    """Returns whether a removal may have caused an error that was not reported yet."""
    if isinstance(error, StepGone):
        return False
    return isinstance(error, (RestoreError, StorageError)) or not isinstance(error, DeltackptError)


def gone(step_dir: StorePath | Path, *, during: str = "read", instead: str = "restore") -> StepGone:
    """Returns the error for a step that was removed, or replaced by another save of its number.

    Args:
      step_dir: the step.
      during: what was being done to it.
      instead: what to do with the newest step instead, for the message.
    """
    return StepGone(
        f"step directory {step_dir}: expected it to stay while it was {during}, found it removed "
        f"or replaced; {instead} the newest step instead"
    )
