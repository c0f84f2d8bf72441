# SPDX-License-Identifier: Apache-2.0
"""How others find what runs on Ray: a restore the service of its directory, a stage its keepers.

``restore.sources`` and ``tiers.opening`` import it by its name.
"""

from __future__ import annotations

import os
import sys

from deltackpt import service
from deltackpt.options import Copies, Erasure
from deltackpt.restore.sources import RowSource
from deltackpt.tiers.keepers import Keepers


def row_source(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """The directory's service, None where this process is not connected to Ray or there is none.

    A process that has not imported ray is not connected, and does not pay for the import.
    """
    if sys.modules.get("ray") is None:
        return None
    from deltackpt.service import client

    return client.find(directory, item)


def keepers(
    root: str | os.PathLike[str],
    item: str,
    how: Copies | Erasure,
    holder: str,
    *,
    earlier: Keepers | None = None,
) -> Keepers:
    """Keepers of a root on all nodes of the cluster; see ``service.keepers.keepers``.

    Raises:
      MissingExtra: ray is not installed.
      ServiceUnavailable: this process is not connected to Ray, or the cluster has no node.
    """
    service.require_ray("Tiers.neighbours")
    from deltackpt.service import keepers as found

    return found.keepers(root, item, how, holder, earlier=earlier)
