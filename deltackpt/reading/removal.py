# SPDX-License-Identifier: Apache-2.0
"""Steps that go while they are read: what fails because of it is told from damage."""

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
from deltackpt.storage.store import Spot, spot

_GONE_CHECKS = 5
_GONE_INTERVAL_SECS = 0.1


@contextlib.contextmanager
def standing(
    step_dir: Spot | Path,
    *,
    stands: Callable[[], bool] | None = None,
    during: str = "read",
    instead: str = "restore",
) -> Iterator[None]:
    """Within, whatever fails since a step was removed or replaced is raised as ``StepGone``.

    Anything may fail then: a file is missing, one of another save does not fit, a library raises
    what it likes. Of a step that stands the error stays what it is: damage is damage.

    Args:
      step_dir: the step.
      stands: whether it is still the one that is read; by default, whether its directory is the
        one that it is now. A step that is not there now cannot go.
      during: what is being done to it.
      instead: what to do to the newest step instead.

    Raises:
      StepGone: what failed, failed because the step went.
    """
    at = spot(step_dir)
    stamp = at.stamp()
    stands = stands or (lambda: stamp is None or stamp.same(at.stamp()))
    try:
        yield
    except Exception as error:
        if is_of_reading(error) and goes(lambda: not stands(), error):
            raise gone(step_dir, during=during, instead=instead) from error
        raise


def goes(removed: Callable[[], bool], cause: Exception) -> bool:
    """Whether something is removed, or is so within a moment where a file of it is missing.

    A directory that is not renamed first, as by others, is emptied before it goes.
    """
    checks = _GONE_CHECKS if isinstance(cause, (BrokenChain, Damaged, OSError)) else 1
    for check in range(checks):
        if removed():
            return True
        if check + 1 < checks:
            time.sleep(_GONE_INTERVAL_SECS)
    return False


def is_of_reading(error: Exception) -> bool:
    """Whether a removal may be behind an error, which nobody has told yet."""
    if isinstance(error, StepGone):
        return False
    return isinstance(error, (RestoreError, StorageError)) or not isinstance(error, DeltackptError)


def gone(step_dir: Spot | Path, *, during: str = "read", instead: str = "restore") -> StepGone:
    """What to raise where a step was removed, or replaced by another save of its number.

    Args:
      step_dir: the step.
      during: what was being done to it.
      instead: what to do to the newest step instead.
    """
    return StepGone(
        f"step directory {step_dir}: expected it to stay while it was {during}, found it removed "
        f"or replaced; {instead} the newest step instead"
    )
