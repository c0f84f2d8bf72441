# SPDX-License-Identifier: Apache-2.0
"""JAX contexts that a program may be in when it calls deltackpt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType

MESHES = {
    kind.name: jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def others() -> Iterator[None]:
    with (
        jax.debug_infs(True),
        jax.debug_key_reuse(True),
        jax.checking_leaks(),
        jax.log_compiles(True),
    ):
        yield


#: Contexts that a program may set for a thread.
CONTEXTS: dict[str, Context] = {
    "set_mesh Auto": lambda: jax.set_mesh(MESHES["Auto"]),
    "set_mesh Explicit": lambda: jax.set_mesh(MESHES["Explicit"]),
    "numpy_rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "numpy_dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "enable_x64": lambda: jax.enable_x64(True),
    "disable_x64": lambda: jax.enable_x64(False),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": lambda: jax.disable_jit(),
    "others": others,
}


class InContext:
    """Calls an object's methods in a context."""

    def __init__(self, target: Any, context: Context):
        self._target, self._context = target, context

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return found(*args, **kwargs)

        return call
