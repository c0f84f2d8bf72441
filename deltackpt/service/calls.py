# SPDX-License-Identifier: Apache-2.0
"""Calls to a service's replicas, with timeouts; failures raise a ServiceError."""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from deltackpt.errors import ServiceUnavailable
from deltackpt.service import names
from deltackpt.service.names import Replica


def actor(replica: Replica) -> Any:
    """Returns the actor of a replica.

    Raises:
      ServiceUnavailable: the actor no longer exists.
    """
    try:
        return ray.get_actor(replica.name, namespace=names.NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"{replica}: expected a running actor, found none; start the service again"
        ) from error


def answer(replica: Replica, call: Any, timeout_secs: float) -> Any:
    """Returns a replica's answer to a call.

    Raises:
      ServiceUnavailable: no answer in time: the actor or its node died, or Ray's object store is
        full.
    """
    try:
        return ray.get(call, timeout=timeout_secs)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceUnavailable(
            f"{replica}: expected an answer within {timeout_secs:.1f} s, found none; check its node"
        ) from error
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"{replica}: expected an answer, found {shown(error)}; Ray restarts it automatically"
        ) from error


def shown(error: Exception) -> str:
    """Returns the first line of a Ray error's message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
