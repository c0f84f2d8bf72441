# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, as jax numbers them."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils


def index() -> int:
    """Number of this process."""
    return jax.process_index()


def count() -> int:
    """How many processes there are."""
    return jax.process_count()


def of(device: Any) -> int:
    """Number of the process that a device belongs to."""
    return device.process_index


def reached_preemption(step: int) -> bool:
    """Whether the platform has announced that this job will be preempted at ``step``."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # It does not: the job is one process, or has that switched off.
        return False
