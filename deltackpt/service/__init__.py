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
    from deltackpt.service.client import (
        MemberStatus,
        RestoreService,
        ServiceStatus,
        connect,
        find,
    )
    from deltackpt.service.lifecycle import start, stop
    from deltackpt.service.options import ServiceOptions

_NAMES = {
    "MemberStatus": "client",
    "RestoreService": "client",
    "ServiceOptions": "options",
    "ServiceStatus": "client",
    "connect": "client",
    "find": "client",
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


def require_ray(what: str = "the restore service") -> None:
    """Checks that ray can be imported.

    Args:
      what: needs it.

    Raises:
      MissingExtra: it cannot.
    """
    try:
        importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(
            f"{what}: expected the package ray, found that it cannot be imported ({error}); "
            "install it: pip install 'deltackpt[ray]'. Saves, and restores from storage, do not "
            "need it"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deltackpt.service' has no attribute {name!r}")
    require_ray(f"deltackpt.service.{name}")
    if name not in _NAMES:
        return importlib.import_module(f"deltackpt.service.{name}")
    return getattr(importlib.import_module(f"deltackpt.service.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
