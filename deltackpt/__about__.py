# SPDX-License-Identifier: Apache-2.0
"""The version, and the writer information that checkpoints record."""

from __future__ import annotations

import contextlib
import functools

__version__ = "0.1.0"


@functools.cache
def writer_versions() -> dict[str, str]:
    """Versions of deltackpt and of the libraries that write bytes, as far as they are installed."""
    import importlib.metadata  # Takes 10 ms, and not every command writes.

    found = {"deltackpt": __version__}
    for name in ("jax", "orbax-checkpoint", "tensorstore", "numpy"):
        # Compaction needs neither of the first two.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
