# SPDX-License-Identifier: Apache-2.0
"""Calls of a service's members: bounded, and what goes wrong is a ServiceError."""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from deltackpt.errors import ServiceUnavailable
from deltackpt.service import names
from deltackpt.service.names import Member


def actor(member: Member) -> Any:
    """The member's actor.

    Raises:
      ServiceUnavailable: it is gone.
    """
    try:
        return ray.get_actor(member.name, namespace=names.NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"{member}: expected its actor, found that it is gone; start the service again"
        ) from error


def answer(member: Member, call: Any, timeout_secs: float) -> Any:
    """The answer of a member.

    Raises:
      ServiceUnavailable: there was none in time; it died, its node did, or Ray's store is full.
    """
    try:
        return ray.get(call, timeout=timeout_secs)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceUnavailable(
            f"{member}: expected an answer within {timeout_secs:.1f} s, found none; look at its "
            "node"
        ) from error
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"{member}: expected an answer, found {shown(error)}; Ray restarts it by itself"
        ) from error


def shown(error: Exception) -> str:
    """The first line of an error of Ray's, which has many."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
