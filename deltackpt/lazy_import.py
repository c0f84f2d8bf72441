# SPDX-License-Identifier: Apache-2.0
"""Lazy imports of modules that are slow to import and that not every program needs.

Type checkers need the module itself, imported under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any


class LazyModule(types.ModuleType):
    """Stands in for a package, and imports it when one of its attributes is first used."""

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # ``inspect`` looks for it in every object, which is not a use.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Returns a ``__getattr__`` for a package that imports public names when they are first used.

    ``modules`` maps each name to its module, which may be relative to the package.
    """

    def __getattr__(name: str) -> object:
        if name in modules:
            return getattr(importlib.import_module(modules[name], package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    import tensorstore as ts
else:
    ocp = LazyModule("orbax.checkpoint")
    ts = LazyModule("tensorstore")
