# SPDX-License-Identifier: Apache-2.0
"""Every private name of Orbax that deltackpt needs, tested against the pinned version.

- ``AtomicRenameTemporaryPath``: Orbax takes a ``temporary_path_class`` as a public option, but
  exports neither its protocol nor the class that renames.
- ``CommitFutureAwaitingContractedSignals``: the future that waits for the step's directory; a
  plain executor future would race its creation.
- ``step_metadata``: name and bytes of the step's metadata, to complete it before the commit.
"""

from orbax.checkpoint._src.futures.future import CommitFutureAwaitingContractedSignals
from orbax.checkpoint._src.handlers.async_checkpoint_handler import AsyncCheckpointHandler
from orbax.checkpoint._src.metadata.checkpoint import step_metadata_file_path
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
    "step_metadata_file_path",
]
