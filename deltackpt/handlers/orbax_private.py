# SPDX-License-Identifier: Apache-2.0
"""Every private name of Orbax that deltackpt needs, tested against the pinned version.

- ``AtomicRenameTemporaryPath``: Orbax takes a ``temporary_path_class`` as a public option, but
  exports neither its protocol nor the class that renames.
- ``CommitFutureAwaitingContractedSignals``: the future that waits for the step's directory; a
  plain executor future would race its creation.
- ``barrier_secs``: how long Orbax's barriers on the training thread last, a constant of its module.
- ``step_metadata_file_path``: where the step's metadata stands, to complete it before the commit.
- ``AsyncCheckpointHandler``: the base class of v0 handlers that save in the background.
- ``COMMIT_SUCCESS_FILE``, ``TMP_DIR_SUFFIX``: names of the commit.
- ``remove_by``: Orbax removes steps oldest first, and has no option for another order.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures.future import CommitFutureAwaitingContractedSignals
from orbax.checkpoint._src.handlers.async_checkpoint_handler import AsyncCheckpointHandler
from orbax.checkpoint._src.metadata.checkpoint import step_metadata_file_path
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path.atomicity import (
    COMMIT_SUCCESS_FILE,
    TMP_DIR_SUFFIX,
    AtomicRenameTemporaryPath,
)

__all__ = [
    "COMMIT_SUCCESS_FILE",
    "TMP_DIR_SUFFIX",
    "AsyncCheckpointHandler",
    "AtomicRenameTemporaryPath",
    "CommitFutureAwaitingContractedSignals",
    "barrier_secs",
    "remove_by",
    "step_metadata_file_path",
]


@contextlib.contextmanager
def barrier_secs(secs: float) -> Iterator[None]:
    """Bounds the barriers that Orbax's ``save()`` meets at on the training thread.

    Orbax gives them no timeout, and 300 s by a constant of its module: for the time of the call
    another one.
    """
    kept = multihost._DEFAULT_BARRIER_TIMEOUT
    multihost._DEFAULT_BARRIER_TIMEOUT = max(1, int(secs))
    try:
        yield
    finally:
        multihost._DEFAULT_BARRIER_TIMEOUT = kept


def remove_by(manager: ocp.CheckpointManager, remove: Callable[[Sequence[int]], None]) -> None:
    """Has a manager's retention remove steps by another function, called after each commit.

    Orbax's own removes the oldest first: cut half-way, it leaves deltas whose parents are gone.

    Args:
      manager: of Orbax, just made.
      remove: called in Orbax's background thread with all steps that go.
    """
    # What Orbax's ``create_checkpoint_deleter`` made, which has nothing to close without a thread.
    manager._checkpoint_deleter = _Remover(remove)


class _Remover:
    """Orbax's ``CheckpointDeleter``, a protocol that it does not export."""

    def __init__(self, remove: Callable[[Sequence[int]], None]):
        self._remove = remove

    def delete(self, step: int) -> None:
        self._remove([step])

    def delete_steps(self, steps: Sequence[int]) -> None:
        self._remove(steps)

    def close(self) -> None:
        """Nothing is open."""
