# SPDX-License-Identifier: Apache-2.0
"""T5X checkpoints through deltackpt: a drop-in ``checkpoint_manager_cls``.

With T5X's launcher, a run needs a few lines of gin and no code changes::

    from deltackpt.integrations import t5x as deltackpt_t5x

    utils.SaveCheckpointConfig.checkpoint_manager_cls = @deltackpt_t5x.checkpoint_manager()
    utils.RestoreCheckpointConfig.checkpoint_manager_cls = @deltackpt_t5x.checkpoint_manager()

The training step does not change either: each save detects the changed rows. See ``layout`` for
files and names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltackpt.integrations.t5x.manager import DeltaCheckpointManager, checkpoint_manager
    from deltackpt.integrations.t5x.resuming import resume_with
    from deltackpt.integrations.t5x.settings import Wait

__all__ = ["DeltaCheckpointManager", "Wait", "checkpoint_manager", "resume_with"]


def __getattr__(name: str) -> Any:
    # ``layout`` is readable without T5X; everything else needs it.
    if name in __all__:
        return getattr(importlib.import_module("deltackpt.integrations.t5x.manager"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
