# SPDX-License-Identifier: Apache-2.0
"""One compaction, for a fresh process that does not load JAX."""

from __future__ import annotations

from pathlib import Path

import fresh

from deltackpt.maintenance import compact


def compacted(root: str, memory_bytes: int) -> dict[str, float]:
    """Compacts the newest chain; returns its extra memory."""
    before = fresh.status_bytes("VmRSS")
    fresh.reset_peak()
    done = compact.compact(Path(root), memory_bytes=memory_bytes)
    assert done is not None
    return {"extra": fresh.status_bytes("VmHWM") - before}
