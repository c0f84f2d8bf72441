# SPDX-License-Identifier: Apache-2.0
"""Every private name of Orbax that deltackpt needs, tested against the pinned version.

- ``AsyncCheckpointHandler``: distinguishes handlers that write in the background from others.
- ``CommitFutureAwaitingContractedSignals``: a future that waits for the step's directory if Orbax's
  own manager creates it; a plain executor future would race its creation.
"""

from orbax.checkpoint._src.futures.future import CommitFutureAwaitingContractedSignals
from orbax.checkpoint._src.handlers.async_checkpoint_handler import AsyncCheckpointHandler

__all__ = ["AsyncCheckpointHandler", "CommitFutureAwaitingContractedSignals"]
