# SPDX-License-Identifier: Apache-2.0
"""``functools.cached_property`` for objects that threads share."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

_T = TypeVar("_T")
#: Reentrant: a collection may run a ``__del__`` that reads a cached property.
_lock = threading.RLock()

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property[_T]):
        """A ``functools.cached_property`` that creates an object's dict in one thread at a time.

        CPython 3.11 creates the dict on first use, and may collect garbage before it stores the
        dict. During the collection, for example in jax's callback in ``gc.callbacks``, another
        thread may use the dict. The object then gets two dicts that share memory. That memory is
        freed with the object, and a later collection that reads it crashes the process.
        """

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            if instance is not None:
                with _lock:
                    instance.__dict__  # noqa: B018
            return super().__get__(instance, owner)
