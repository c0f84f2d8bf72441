# SPDX-License-Identifier: Apache-2.0
"""Manager options by their field names alone; a test seldom changes more than one."""

import dataclasses
from typing import Any

from deltackpt.options import DeltaOptions, ManagerOptions, WriteOptions

_GROUPS = {"deltas": DeltaOptions, "writes": WriteOptions}


def manager_options(**flat: Any) -> ManagerOptions:
    """``ManagerOptions`` of its own fields and of those of its groups."""
    groups = {
        group: kind(
            **{f.name: flat.pop(f.name) for f in dataclasses.fields(kind) if f.name in flat}
        )
        for group, kind in _GROUPS.items()
        if group not in flat
    }
    return ManagerOptions(**groups, **flat)
