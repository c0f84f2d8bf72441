# SPDX-License-Identifier: Apache-2.0
"""Lookup of Ray services: a directory's hot standby for restores, peer agents for staging.

``restore.sources`` and ``tiers.startup`` import this module by name.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from deltackpt import service

if TYPE_CHECKING:  # Each restore imports this module; the client of peers takes 70 ms.
    from deltackpt.options import Copies, Erasure
    from deltackpt.restore.sources import RowSource
    from deltackpt.tiers.staging import PeerGroup


def row_source(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """Returns the directory's service; None if there is none or Ray is not connected."""
    if sys.modules.get("ray") is None:
        return None
    from deltackpt.service import restore_service

    return restore_service.find(directory, item)


def require_nodes(root: str | os.PathLike[str], item: str, how: Copies | Erasure) -> None:
    """Checks that enough nodes have peer agents of a directory; ``OptionError`` if too few."""
    service.require_ray("Tiers.peers")
    from deltackpt.service import peer_agents

    peer_agents.require_nodes(root, item, how)


def peer_group(
    root: str | os.PathLike[str],
    item: str,
    how: Copies | Erasure,
    holder: str,
    *,
    earlier: PeerGroup | None = None,
) -> PeerGroup:
    """Returns the peers of a directory on all nodes; see ``service.peer_agents.peer_group``."""
    service.require_ray("Tiers.peers")
    from deltackpt.service import peer_agents

    return peer_agents.peer_group(root, item, how, holder, earlier=earlier)
