# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, as jax numbers them."""

from __future__ import annotations

from typing import Any

import jax


def index() -> int:
    """Number of this process."""
    return jax.process_index()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def of(device: Any) -> int:
    """Number of the process that a device belongs to."""
    return device.process_index
