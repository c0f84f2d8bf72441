# SPDX-License-Identifier: Apache-2.0
"""Streams fresh weights from a training run to serving and rollout processes.

``follow`` opens a checkpoint directory and returns a ``Live``, which provides complete, immutable
``Version``s of the dense leaves. Neither jax nor Ray is imported.
"""

from __future__ import annotations

from deltackpt.serving.live import DeviceWeights, Live, Staleness, follow
from deltackpt.serving.version import Version

__all__ = ["DeviceWeights", "Live", "Staleness", "Version", "follow"]
