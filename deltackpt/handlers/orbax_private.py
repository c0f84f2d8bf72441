# SPDX-License-Identifier: Apache-2.0
"""Every private name of Orbax that deltackpt needs, tested against the pinned version.

- ``AtomicRenameTemporaryPath``: Orbax takes a ``temporary_path_class`` as a public option, but
  exports neither its protocol nor the class that renames.
- ``CommitFutureAwaitingContractedSignals``: the future that waits for the step's directory; a
  plain executor future would race its creation.
- ``barrier_secs``: how long Orbax's barriers on the training thread last, a constant of its module.
- ``step_metadata``: name and bytes of the step's metadata, to complete it before the commit.
"""

import contextlib
from collections.abc import Iterator

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
