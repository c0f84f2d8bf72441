# SPDX-License-Identifier: Apache-2.0
"""Streams fresh tables and dense leaves from a training run to serving and rollout processes.

``follow`` opens a checkpoint directory and returns a ``Live``, whose ``Version``s provide the rows
and dense leaves of one step or recovery point. ``attach`` looks up rows in the memory of a follower
in another process. ``patches`` holds files of changes for inference engines. Only methods that
place arrays on devices import jax; nothing imports Ray.
"""

from __future__ import annotations

from deltackpt.serving import patches as patches
from deltackpt.serving.attach import Attached, attach
from deltackpt.serving.leaves import ServedLeaves
from deltackpt.serving.live import DeviceTable, DeviceWeights, Live, Staleness, follow
from deltackpt.serving.row_changes import ChangeBatch, Changes
from deltackpt.serving.status import FollowerStatus, TableStatus
from deltackpt.serving.version import Position, Version

__all__ = [
    "Attached",
    "ChangeBatch",
    "Changes",
    "ServedLeaves",
    "DeviceTable",
    "DeviceWeights",
    "FollowerStatus",
    "Live",
    "Position",
    "Staleness",
    "TableStatus",
    "Version",
    "attach",
    "follow",
    "patches",
]
