# SPDX-License-Identifier: Apache-2.0
"""An Azure Blob Storage container as a Store, through obstore: the extra ``deltackpt[azure]``.

obstore finds credentials in the variables of Azure's own tools. Errors contain only the codes of a
failure, because its message could expose the signature of a signed URL.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from deltackpt.errors import MissingExtra, StorageError
from deltackpt.storage.store import (
    DEADLINE_SECS,
    Exists,
    Missing,
    Refused,
    Store,
    Unanswered,
    fill,
    first_byte,
    refusal,
    unanswered,
    untrusted,
)

#: Timeout for connecting to the server.
_CONNECT_SECS = 10.0
_MOST_RETRIES = 4
#: HTTP statuses after which the same request may succeed.
_BUSY = {408, 429, *range(500, 600)}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
#: obstore's error for an untrusted server certificate.
_UNTRUSTED = "InvalidCertificate"


class AzureStore(Store):
    """Bytes under keys of a container."""

    def __init__(
        self,
        container: str,
        folder: str,
        url: str,
        *,
        endpoint: str | None = None,
        deadline_secs: float = DEADLINE_SECS,
        retries: int = _MOST_RETRIES,
    ):
        """Sends no request yet; ``folder`` is the prefix of all keys, ``url`` is used in errors."""
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise MissingExtra(
                f"{url}: expected the package obstore, found that it cannot be imported; install "
                "it: pip install 'deltackpt[azure]'"
            ) from error
        self._url = url
        self._deadline_secs = deadline_secs
        self._api: Any = obstore
        # No request is sent again in the second half of the time: at worst half of it is overrun.
        deadline = datetime.timedelta(seconds=deadline_secs)
        connect = min(deadline, datetime.timedelta(seconds=_CONNECT_SECS))
        try:
            self._store: Any = obstore.store.AzureStore(
                container,
                prefix=folder or None,
                client_options={
                    "timeout": deadline,
                    "connect_timeout": connect,
                    "allow_http": (endpoint or "").startswith("http://"),
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": deadline / 2,
                    "backoff": {
                        "init_backoff": datetime.timedelta(milliseconds=100),
                        "max_backoff": datetime.timedelta(seconds=2),
                        "base": 2,
                    },
                },
                config={} if endpoint is None else {"endpoint": endpoint},
            )
        except ValueError as error:
            raise Refused(
                f"{url}: expected a container and a path that Azure's client accepts, found: "
                f"{_message(error)}; leave empty parts, dots and control characters out of it"
            ) from OSError(_message(error))
        except obstore.exceptions.BaseError as error:
            raise Refused(
                f"{url}: expected an Azure account and its credentials in the environment, "
                f"found: {_message(error)}; set AZURE_STORAGE_ACCOUNT_NAME, and "
                "AZURE_STORAGE_ACCOUNT_KEY or another credential that obstore knows"
            ) from OSError(_message(error))

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._url

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        with self._refusals(f"read {key}", missing=key):
            return bytes(self._api.get(self._store, key).bytes())

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        wanted, shown = sum(buffer.nbytes for buffer in buffers), f"{self._url}/{key}"
        if whole or start < 0 or not wanted:
            # Suffix ranges and empty ranges are not sent to Azure.
            start = first_byte(shown, start, wanted, self.length(key), whole=whole)
        if not wanted:
            return
        try:
            with self._refusals(f"read {key}", missing=key):
                found = self._api.get_range(self._store, key, start=start, length=wanted)
                data = memoryview(found).cast("B")
        except StorageError:
            # A read from beyond the object's end is rejected.
            first_byte(shown, start, wanted, self.length(key))
            raise
        first_byte(shown, start, wanted, start + len(data), whole=True)
        fill(buffers, data)

    def length(self, key: str) -> int:
        """See ``Store``."""
        return int(self._head(key)["size"])

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._head(key)["e_tag"]

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``."""
        mode = "create" if absent else "overwrite"
        with self._refusals(f"write {key}"):
            # With several blocks, the condition would apply to the last one, and there would be
            # more requests.
            self._api.put(self._store, key, bytes(data), mode=mode, use_multipart=False)

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        with self._refusals(f"list {folder}/"):
            found = [
                str(each["path"])
                for page in self._api.list(self._store, prefix=folder or None)
                for each in page
            ]
        return sorted(key for key in found if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        with self._refusals(f"list {folder}/"):
            found = self._api.list_with_delimiter(self._store, prefix=folder or None)
        names = (str(name).rstrip("/") for name in found["common_prefixes"])
        return sorted(name.rpartition("/")[2] for name in names)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``."""
        for key in keys:
            with contextlib.suppress(Missing), self._refusals(f"delete {key}", missing=key):
                self._api.delete(self._store, key)

    def _head(self, key: str) -> Any:
        with self._refusals(f"read {key}", missing=key):
            return self._api.head(self._store, key)

    @contextlib.contextmanager
    def _refusals(self, action: str, *, missing: str | None = None) -> Iterator[None]:
        """Converts errors; a missing object is reported for this key."""
        try:
            yield
        except self._api.exceptions.AlreadyExistsError as error:
            key = action.partition(" ")[2]
            raise Exists(f"{self._url}/{key}") from OSError(_message(error))
        except (OSError, ValueError, self._api.exceptions.BaseError) as error:
            if isinstance(error, StorageError):
                raise
            kind, message = _kind(error), _message(error)
            failed = refusal(kind, self._url, action, message)
            if missing is not None and isinstance(error, FileNotFoundError):
                failed = Missing(f"{self._url}/{missing}")
            elif _UNTRUSTED in str(error):
                failed = untrusted(self._url, action)
            elif kind is Unanswered and not _STATUS.search(message):
                failed = unanswered(self._url, action, self._deadline_secs)
            raise failed from OSError(message)


def _kind(error: Exception) -> type[StorageError]:
    status = _STATUS.search(str(error))
    if status is not None:
        return Unanswered if int(status[1]) in _BUSY else Refused
    # obstore rejected its arguments, or found no credentials.
    return Unanswered if type(error).__name__ == "GenericError" else Refused


def _message(error: Exception) -> str:
    """The kind of a failure with the response's codes: the rest may contain secrets."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    found = "NotFoundError" if isinstance(error, FileNotFoundError) else type(error).__name__
    found += "" if status is None else f", status code: {status[1]}"
    return found + ("" if code is None else f" {code[1]}")
