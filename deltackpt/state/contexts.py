# SPDX-License-Identifier: Apache-2.0
"""Runs internal programs and transfers outside the caller's JAX contexts.

The current mesh, transfer guards, NaN checks and similar settings change what JAX does in a thread,
or in all threads if they are set for the process. They are meant for the user's computations.
``jax_enable_x64`` and the default device stay as they are, since restored arrays depend on them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import Tracer

_config: Any = jax.config
_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Name in ``jax.config``, the values that change nothing, and what sets the first for a thread.
_NEUTRAL: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("jax_numpy_rank_promotion", ("allow",), jax.numpy_rank_promotion),
    ("jax_numpy_dtype_promotion", ("standard",), jax.numpy_dtype_promotion),
    ("jax_debug_nans", (False,), jax.debug_nans),
    ("jax_debug_infs", (False,), jax.debug_infs),
    ("jax_debug_key_reuse", (False,), jax.debug_key_reuse),
    ("jax_disable_jit", (False,), jax.disable_jit),
    ("jax_check_tracer_leaks", (False,), jax.check_tracer_leaks),
    ("jax_no_tracing", (False,), jax.no_tracing),
    ("jax_transfer_guard_host_to_device", ("allow", None), jax.transfer_guard_host_to_device),
    ("jax_transfer_guard_device_to_host", ("allow", None), jax.transfer_guard_device_to_host),
    ("jax_transfer_guard_device_to_device", ("allow", None), jax.transfer_guard_device_to_device),
)


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Leaves the contexts of the caller.

    Inside a trace the mesh stays, since it belongs to the traced program.
    """
    set_now = [
        (context, values[0])
        for name, values, context in _NEUTRAL
        if getattr(_config, name) not in values
    ]
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    if not (set_now or has_mesh):
        yield
        return
    with contextlib.ExitStack() as stack:
        for context, value in set_now:
            stack.enter_context(context(value))
        if has_mesh:
            with contextlib.suppress(ValueError):
                stack.enter_context(jax.set_mesh(None))
        yield


def carried(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps a call for another thread, with this thread's settings for new arrays."""
    x64, device = _config.jax_enable_x64, _config.jax_default_device

    @functools.wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with neutral(), jax.enable_x64(x64), jax.default_device(device):
            return call(*args, **kwargs)

    return run


def beside(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Runs programs on the device of an uncommitted array instead of the default device."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.committed:
        return contextlib.nullcontext()
    [device] = array.sharding.device_set
    return jax.default_device(device)
