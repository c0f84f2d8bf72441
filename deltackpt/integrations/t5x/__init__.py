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

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes

if TYPE_CHECKING:
    from deltackpt.integrations.t5x.delta_manager import DeltaCheckpointManager, checkpoint_manager
    from deltackpt.integrations.t5x.settings import Wait, resume_with

__all__ = ["DeltaCheckpointManager", "Wait", "checkpoint_manager", "resume_with"]

# ``layout`` is readable without T5X; everything else needs it.
__getattr__ = attributes(__name__, dict.fromkeys(__all__, ".delta_manager"))
