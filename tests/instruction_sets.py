# SPDX-License-Identifier: Apache-2.0
"""Instruction sets of the compiled kernels: which there are, and how to force one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deltackpt import kernels

_BUILT = kernels._used


def supported() -> tuple[str, ...]:
    """The instruction sets that this CPU supports, the fastest first; none if not built."""
    return () if _BUILT is None else _BUILT.paths()


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Makes all threads use one of those ``supported``, or no compiled kernels if it is ""."""
    before, set_before = kernels._used, kernels.instruction_set()
    if name:
        assert _BUILT is not None
        _BUILT.use(name)
    kernels._used = _BUILT if name else None
    try:
        yield
    finally:
        kernels._used = before
        if before is not None:
            before.use(set_before)
