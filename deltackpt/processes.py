# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, numbered as in jax."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils


def index() -> int:
    """Returns the index of this process."""
    return jax.process_index()


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def of(device: Any) -> int:
    """Returns the index of the process that a device belongs to."""
    return device.process_index


def reached_preemption(step: int) -> bool:
    """Returns whether the platform has announced that this job will be preempted at ``step``."""
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # The job is a single process, or preemption notices are switched off.
        return False
