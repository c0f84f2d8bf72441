# SPDX-License-Identifier: Apache-2.0
"""Orbax handlers for embedding tables, and the save and restore loops of the manager.

Only this package, ``interchange`` and ``integrations.t5x`` import Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltackpt.handlers.v0 import DeltaHandler, DeltaRestore, DeltaSave
    from deltackpt.handlers.v1 import DeltaCheckpointableHandler
    from deltackpt.save.flight import Embeddings, PipelineOptions
    from deltackpt.state.tables import split

__all__ = [
    "DeltaCheckpointableHandler",
    "DeltaHandler",
    "DeltaRestore",
    "DeltaSave",
    "Embeddings",
    "PipelineOptions",
    "split",
]
# Imported lazily: these modules import one another.
_NAMES = {
    "DeltaCheckpointableHandler": "deltackpt.handlers.v1",
    "DeltaHandler": "deltackpt.handlers.v0",
    "DeltaRestore": "deltackpt.handlers.v0",
    "DeltaSave": "deltackpt.handlers.v0",
    "Embeddings": "deltackpt.save.flight",
    "PipelineOptions": "deltackpt.save.flight",
    "split": "deltackpt.state.tables",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
