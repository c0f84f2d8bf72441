# SPDX-License-Identifier: Apache-2.0
"""Asynchronous checkpoints for JAX that write only the embedding rows that changed.

The public names are imported when they are first used, so that ``import deltackpt`` costs
nothing and reading a checkpoint needs neither jax nor Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltackpt.__about__ import __version__

if TYPE_CHECKING:
    from deltackpt import errors, fingerprint, policy, serving, touched
    from deltackpt.handlers.v0 import DeltaHandler, DeltaRestore, DeltaSave
    from deltackpt.handlers.v1 import DeltaCheckpointableHandler
    from deltackpt.manager import CheckpointManager
    from deltackpt.options import (
        Background,
        Copies,
        DeltaOptions,
        Dense,
        Erasure,
        Extents,
        LocalLog,
        LogOptions,
        ManagerOptions,
        Tiers,
        Timeouts,
        WriteOptions,
    )
    from deltackpt.outcomes import Logged, ReadRows, Restored, Saved
    from deltackpt.policy import (
        BitWidthPolicy,
        CodecChoice,
        Consecutive,
        Intermittent,
        OneShot,
        Rolling,
    )
    from deltackpt.reading.stretches import LogPoint
    from deltackpt.save.flight import Embeddings, PipelineOptions
    from deltackpt.state.choice import Tables
    from deltackpt.state.tables import split
    from deltackpt.touched import TouchState

_MODULES = ("errors", "fingerprint", "policy", "serving", "touched")
_NAMES = {
    "Background": "options",
    "BitWidthPolicy": "policy",
    "CheckpointManager": "manager",
    "CodecChoice": "policy",
    "Consecutive": "policy",
    "Copies": "options",
    "DeltaCheckpointableHandler": "handlers.v1",
    "DeltaHandler": "handlers.v0",
    "DeltaOptions": "options",
    "DeltaRestore": "handlers.v0",
    "DeltaSave": "handlers.v0",
    "Dense": "options",
    "Embeddings": "save.flight",
    "Erasure": "options",
    "Extents": "options",
    "Intermittent": "policy",
    "LocalLog": "options",
    "LogOptions": "options",
    "LogPoint": "reading.stretches",
    "Logged": "outcomes",
    "ManagerOptions": "options",
    "OneShot": "policy",
    "PipelineOptions": "save.flight",
    "ReadRows": "outcomes",
    "Restored": "outcomes",
    "Rolling": "policy",
    "Saved": "outcomes",
    "Tables": "state.choice",
    "Tiers": "options",
    "Timeouts": "options",
    "TouchState": "touched",
    "WriteOptions": "options",
    "split": "state.tables",
}

__all__ = [
    "Background",
    "BitWidthPolicy",
    "CheckpointManager",
    "CodecChoice",
    "Consecutive",
    "Copies",
    "DeltaCheckpointableHandler",
    "DeltaHandler",
    "DeltaOptions",
    "DeltaRestore",
    "DeltaSave",
    "Dense",
    "Embeddings",
    "Erasure",
    "Extents",
    "Intermittent",
    "LocalLog",
    "LogOptions",
    "LogPoint",
    "Logged",
    "ManagerOptions",
    "OneShot",
    "PipelineOptions",
    "ReadRows",
    "Restored",
    "Rolling",
    "Saved",
    "Tables",
    "Tiers",
    "Timeouts",
    "TouchState",
    "WriteOptions",
    "__version__",
    "errors",
    "fingerprint",
    "policy",
    "serving",
    "split",
    "touched",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"deltackpt.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"deltackpt.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'deltackpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
