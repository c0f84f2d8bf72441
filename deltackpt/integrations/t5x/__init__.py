# SPDX-License-Identifier: Apache-2.0
"""T5X's checkpoints through deltackpt: a drop-in for its ``checkpoint_manager_cls``.

With T5X's own launcher a run needs a few lines of gin, and no change of its code::

    from deltackpt.integrations import t5x as deltackpt_t5x

    utils.SaveCheckpointConfig.checkpoint_manager_cls = @deltackpt_t5x.checkpoint_manager()
    utils.RestoreCheckpointConfig.checkpoint_manager_cls = @deltackpt_t5x.checkpoint_manager()

The training step needs no line either: the rows that changed are found at each save. Files and
names are described in ``layout``.
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
    # Names of checkpoints (``layout``) are read without T5X; all else needs it.
    if name in __all__:
        return getattr(importlib.import_module("deltackpt.integrations.t5x.manager"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
