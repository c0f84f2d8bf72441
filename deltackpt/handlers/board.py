# SPDX-License-Identifier: Apache-2.0
"""Key-value exchange between the processes of a job, over JAX's coordination service."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import multihost

from deltackpt.errors import OptionError, StorageError

#: Timeout for a value that already exists.
_GET_MS = 10_000
#: Beginning of the error message of a timeout.
_LATE = "DEADLINE_EXCEEDED"


class JobBoard:
    """The key-value store of the job's coordination service; see ``save.apart.Board``."""

    def __init__(self) -> None:
        """Connects to the coordination service of ``jax.distributed``.

        Raises:
          OptionError: ``jax.distributed`` is not initialized.
        """
        if not multihost.is_jax_distributed_client_initialized():
            raise OptionError(
                "Tiers(shared=False): expected a job with jax.distributed.initialize(), whose "
                "coordination service connects the processes, found that it was not called; call "
                "it first, or use a staging directory that all processes see"
            )
        self._client: Any = multihost.get_jax_distributed_client()

    def put(self, key: str, data: bytes) -> None:
        """See ``Board``."""
        with _refusals(key):
            self._client.key_value_set_bytes(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Stores a value, replacing an existing one.

        Raises:
          StorageError: the service does not answer.
        """
        with _refusals(key):
            self._client.key_value_set_bytes(key, data, allow_overwrite=True)

    def put_first(self, key: str, data: bytes) -> bytes:
        """Stores a value unless one exists; returns the stored value.

        Raises:
          StorageError: the service does not answer.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(key, data)
        return self.get(key)

    def wait_for(self, key: str, timeout_secs: float) -> bytes | None:
        """Returns a value as soon as it exists; None if it does not appear in time.

        Raises:
          StorageError: the service does not answer.
        """
        with _refusals(key):
            try:
                limit = max(1, int(timeout_secs * 1000))
                return self._client.blocking_key_value_get_bytes(key, limit)
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith(_LATE):
                    raise
        return None

    def get(self, key: str) -> bytes:
        """See ``Board``."""
        with _refusals(key):
            return self._client.blocking_key_value_get_bytes(key, _GET_MS)

    def folder(self, key: str) -> dict[str, bytes]:
        """See ``Board``."""
        with _refusals(key):
            found = self._client.key_value_dir_get_bytes(key)
        return {name.removeprefix(key): value for name, value in found}

    def delete(self, key: str) -> None:
        """See ``Board``."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(key)


@contextlib.contextmanager
def _refusals(key: str) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise StorageError(
            f"{key}: expected an answer of JAX's coordination service, found "
            f"{str(error).splitlines()[0]}; check the log of process 0, then restart the job"
        ) from error
