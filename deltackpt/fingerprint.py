# SPDX-License-Identifier: Apache-2.0
"""Row fingerprints: detect which rows of a table changed, independent of the cause.

They need 8 bytes per row (12 in a ``RowTracker``), and do not slow down the training step.
"""

from __future__ import annotations

from deltackpt.tracking.fingerprints import RowTracker, changed_rows, fingerprint, fingerprints

__all__ = ["RowTracker", "changed_rows", "fingerprint", "fingerprints"]
