# SPDX-License-Identifier: Apache-2.0
"""Recovery in memory: a standing service on Ray that holds the newest state of a directory.

The names are imported when they are first used; they need the extra ``ray``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltackpt.errors import MissingExtra

if TYPE_CHECKING:
    from deltackpt.service import jax_trainer
    from deltackpt.service.client import MemberStatus, RestoreService, ServiceStatus
    from deltackpt.service.lifecycle import connect, find, start, stop
    from deltackpt.service.options import ServiceOptions

_NAMES = {
    "MemberStatus": "client",
    "RestoreService": "client",
    "ServiceOptions": "options",
    "ServiceStatus": "client",
    "connect": "lifecycle",
    "find": "lifecycle",
    "start": "lifecycle",
    "stop": "lifecycle",
}

__all__ = [
    "MemberStatus",
    "RestoreService",
    "ServiceOptions",
    "ServiceStatus",
    "connect",
    "find",
    "jax_trainer",
    "start",
    "stop",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deltackpt.service' has no attribute {name!r}")
    try:
        importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            f"deltackpt.service.{name}: expected the package ray, found that it cannot be imported "
            f"({error}); install it: pip install 'deltackpt[ray]'. Saves, and restores from "
            "storage, do not need it"
        ) from error
    if name not in _NAMES:
        return importlib.import_module(f"deltackpt.service.{name}")
    return getattr(importlib.import_module(f"deltackpt.service.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
