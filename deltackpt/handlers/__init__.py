# SPDX-License-Identifier: Apache-2.0
"""Adapters of Orbax: handlers for embedding tables, dense leaves and additional items.

Only this package, ``session``, ``interchange``, ``integrations.t5x`` and ``coordination`` import
Orbax, and only if one of its handlers or policies is used; see ``LazyModule``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes

if TYPE_CHECKING:
    from deltackpt.handlers.v0 import DeltaHandler, DeltaRestore, DeltaSave
    from deltackpt.handlers.v1 import DeltaCheckpointableHandler
    from deltackpt.restore.placing import AbstractEmbeddings
    from deltackpt.save.pending_save import Embeddings
    from deltackpt.state.tables import split

__all__ = [
    "AbstractEmbeddings",
    "DeltaCheckpointableHandler",
    "DeltaHandler",
    "DeltaRestore",
    "DeltaSave",
    "Embeddings",
    "split",
]
# Imported lazily: these modules import one another.
__getattr__ = attributes(
    __name__,
    {
        "AbstractEmbeddings": "deltackpt.restore.placing",
        "DeltaCheckpointableHandler": ".v1",
        "DeltaHandler": ".v0",
        "DeltaRestore": ".v0",
        "DeltaSave": ".v0",
        "Embeddings": "deltackpt.save.pending_save",
        "split": "deltackpt.state.tables",
    },
)
