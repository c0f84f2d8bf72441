# SPDX-License-Identifier: Apache-2.0
"""Hot standby: Ray actors that hold a directory's newest state in memory, for fast restores.

Names are imported on first use; they need the ``ray`` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from deltackpt.errors import MissingExtra

if TYPE_CHECKING:
    from deltackpt.service import jax_trainer
    from deltackpt.service.lifecycle import start, stop
    from deltackpt.service.protocol import ServiceOptions
    from deltackpt.service.restore_service import (
        ReplicaStatus,
        RestoreService,
        ServiceStatus,
        connect,
        find,
    )

_NAMES = {
    "ReplicaStatus": "restore_service",
    "RestoreService": "restore_service",
    "ServiceOptions": "protocol",
    "ServiceStatus": "restore_service",
    "connect": "restore_service",
    "find": "restore_service",
    "start": "lifecycle",
    "stop": "lifecycle",
}

__all__ = [
    "ReplicaStatus",
    "RestoreService",
    "ServiceOptions",
    "ServiceStatus",
    "connect",
    "find",
    "jax_trainer",
    "start",
    "stop",
]


def require_ray(what: str = "the restore service") -> None:
    """Raises ``MissingExtra``, which names the feature ``what``, if ray cannot be imported."""
    try:
        importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            f"{what}: expected the package ray, found that it cannot be imported ({error}); "
            "install it: pip install 'deltackpt[ray]' (saves and restores from storage do not "
            "need it)"
        ) from error


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'deltackpt.service' has no attribute {name!r}")
    require_ray(f"deltackpt.service.{name}")
    if name not in _NAMES:
        return importlib.import_module(f"deltackpt.service.{name}")
    return getattr(importlib.import_module(f"deltackpt.service.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
