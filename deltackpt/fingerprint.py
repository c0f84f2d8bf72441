# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of rows: which rows of a table changed, whoever changed them.

Eight bytes per row (of ``RowTracker`` twelve) and nothing per training step; see the guide on
tracking.
"""

from __future__ import annotations

from deltackpt.tracking.fingerprints import (
    RowTracker,
    changed_rows,
    fingerprint,
    fingerprints,
    verify_tracking,
)

__all__ = ["RowTracker", "changed_rows", "fingerprint", "fingerprints", "verify_tracking"]
