# SPDX-License-Identifier: Apache-2.0
"""Object-store copies with markers, as versions before the journal wrote them."""

from __future__ import annotations

from pathlib import Path

from deltackpt.format import names
from deltackpt.reading import inventory
from deltackpt.storage import digests
from deltackpt.storage.store import StorePath, store_path


def make(root: Path, at: StorePath, *units: str) -> None:
    """Copies entries of a directory: ``2`` or ``compacted/1/embeddings``."""
    for unit in units:
        base = unit.startswith(names.COMPACTED)
        found = inventory.every_digest(store_path(root / unit), names.EMBEDDINGS_ITEM, base=base)
        for name in found:
            to = at / unit / name
            to.store.put(to.key, (root / unit / name).read_bytes())
        marker = at / names.copied_name(unit)
        marker.store.put(marker.key, digests.digests_bytes(digests.Digests.of(found)))
