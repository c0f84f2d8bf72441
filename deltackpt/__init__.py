# SPDX-License-Identifier: Apache-2.0
"""Asynchronous checkpoints for JAX that write only the embedding rows that changed.

The public names are imported when they are first used, so ``import deltackpt`` is fast and reading
a checkpoint needs neither jax nor Orbax. Policies are in ``deltackpt.policies``, Orbax handlers in
``deltackpt.handlers``, settings of replication in ``deltackpt.tiers`` and of the write-ahead log in
``deltackpt.wal``, vocabularies that change in ``deltackpt.vocab``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from deltackpt.__about__ import __version__
from deltackpt.lazy_import import attributes

if TYPE_CHECKING:
    from deltackpt import errors, fingerprint, serving, touched
    from deltackpt import handlers as handlers
    from deltackpt import policies as policies
    from deltackpt import tiers as tiers
    from deltackpt import vocab as vocab
    from deltackpt import wal as wal
    from deltackpt.manager import CheckpointManager
    from deltackpt.options import (
        Background,
        DeltaOptions,
        Dense,
        ManagerOptions,
        Tiers,
        Timeouts,
        WalOptions,
        WriteOptions,
    )
    from deltackpt.outcomes import Appended, Restored, Saved
    from deltackpt.reading.wal_index import RecoveryPoint
    from deltackpt.state.tables import Tables
    from deltackpt.touched import TouchState

_MODULES = (
    "errors",
    "fingerprint",
    "handlers",
    "policies",
    "serving",
    "tiers",
    "touched",
    "vocab",
    "wal",
)
_OPTIONS = (
    *("Background", "DeltaOptions", "Dense", "ManagerOptions", "Tiers", "Timeouts"),
    *("WalOptions", "WriteOptions"),
)
_attribute = attributes(
    __name__,
    {
        **dict.fromkeys(_OPTIONS, ".options"),
        **dict.fromkeys(("Appended", "Restored", "Saved"), ".outcomes"),
        "CheckpointManager": ".manager",
        "RecoveryPoint": ".reading.wal_index",
        "Tables": ".state.tables",
        "TouchState": ".state.touch_state",
    },
)

__all__ = [
    "Appended",
    "Background",
    "CheckpointManager",
    "DeltaOptions",
    "Dense",
    "ManagerOptions",
    "RecoveryPoint",
    "Restored",
    "Saved",
    "Tables",
    "Tiers",
    "Timeouts",
    "TouchState",
    "WalOptions",
    "WriteOptions",
    "__version__",
    "errors",
    "fingerprint",
    "serving",
    "touched",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"deltackpt.{name}")
    return _attribute(name)


def __dir__() -> list[str]:
    return sorted(__all__)
