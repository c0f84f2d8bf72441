# SPDX-License-Identifier: Apache-2.0
"""Weights that stay fresh: dense leaves of a run, followed by processes that roll out or serve.

Neither jax nor Ray is imported. ``follow`` opens a root; a ``Live`` shows one whole ``Version`` of
the leaves after the other.
"""

from __future__ import annotations

from deltackpt.serving.live import DeviceWeights, Live, Staleness, follow
from deltackpt.serving.version import Version

__all__ = ["DeviceWeights", "Live", "Staleness", "Version", "follow"]
