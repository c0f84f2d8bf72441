# SPDX-License-Identifier: Apache-2.0
"""How a restore finds the service of its directory; ``restore.sources`` imports it by its name."""

from __future__ import annotations

import os
import sys

from deltackpt.restore.sources import RowSource


def row_source(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """The directory's service, None where this process is not connected to Ray or there is none.

    A process that has not imported ray is not connected, and does not pay for the import.
    """
    if sys.modules.get("ray") is None:
        return None
    from deltackpt.service import client

    return client.find(directory, item)
