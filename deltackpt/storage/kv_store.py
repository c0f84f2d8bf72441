# SPDX-License-Identifier: Apache-2.0
"""A TensorStore kvstore as a Store, mainly for S3 and Google Cloud Storage; and the reverse.

TensorStore has no deadlines, so every call here has one; an abandoned write may still take effect.
A rejected conditional write returns an empty generation. After a lost answer TensorStore retries by
itself, and finds its own write. It does not report lengths, so ``length`` reads the whole object.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deltackpt.errors import StorageError
from deltackpt.lazy_import import ts
from deltackpt.storage.store import (
    DEADLINE_SECS,
    Exists,
    Missing,
    Refused,
    Store,
    StorePath,
    Unanswered,
    fill,
    first_byte,
    refusal,
    unanswered,
    untrusted,
)

#: The generation of a missing object, for a write only if absent.
_ABSENT = b"\x02"
#: Generation of GCS answers that broke off in their head: TensorStore takes them for empty
#: objects, although it retries after any other broken answer.
_BROKEN_OFF = bytes(9)
_READ_TRIES = 4
#: Concurrent deletions; no supported service deletes several at once here.
_DELETIONS = 16
_CODE = re.compile(r"([A-Z_]+): ")
#: Error of a response that ended within its headers: the request may have been executed.
_CUT_HEADS = ("not found in response headers", "Malformed List response", "Failed to parse ")
#: libcurl's error for an untrusted server certificate.
_UNTRUSTED = "peer certificate"


class Reachable(NamedTuple):
    """A folder that TensorStore can open."""

    spec: dict[str, Any]  # Its path is empty, or ends in "/".
    context: Any


@functools.cache
def _context() -> Any:
    return ts.Context()


def reachable(at: StorePath, names: Iterable[str] | None = None) -> Reachable:
    """Returns a folder that TensorStore can read: in place, or a copy of ``names`` in memory."""
    spec = at.kvstore()
    if spec is not None:
        return Reachable(spec, _context())
    wanted = at.keys() if names is None else names
    return in_memory({name: at.store.get((at / name).key) for name in wanted})


def in_memory(files: Mapping[str, bytes | memoryview]) -> Reachable:
    """Returns a folder with a copy of some files."""
    found = Reachable({"driver": "memory", "path": ""}, ts.Context())
    store: Any = ts.KvStore.open(found.spec, context=found.context).result()
    for name, data in files.items():
        store.write(name, bytes(data)).result()
    return found


class _OutOfRange(StorageError):
    """The object ends before the requested range."""


#: By the beginning of an error message; any other error may be transient.
_KINDS: dict[str, type[StorageError]] = {
    "PERMISSION_DENIED": Refused,
    "UNAUTHENTICATED": Refused,
    "INVALID_ARGUMENT": Refused,
    "NOT_FOUND": Refused,
    "UNIMPLEMENTED": Refused,
    "OUT_OF_RANGE": _OutOfRange,
}


class KvStore(Store):
    """Bytes under keys of a kvstore."""

    #: The length of an object is known only after reading it.
    reads_to_measure = True

    def __init__(
        self, spec: str | Mapping[str, Any], url: str, *, deadline_secs: float = DEADLINE_SECS
    ):
        """Opens a kvstore; the path of a folder ends in "/", and ``url`` is used in errors."""
        self._url = url
        self._deadline_secs = deadline_secs
        with self._refusals("open it"):
            self._store: Any = ts.KvStore.open(spec).result(timeout=deadline_secs)
        self._is_gcs = self._store.spec().to_json()["driver"] == "gcs"

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._url

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return bytes(self._read(key).value)

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        wanted, shown = sum(buffer.nbytes for buffer in buffers), f"{self._url}/{key}"
        if whole or start < 0:
            data = memoryview(self.get(key))
            data = data[first_byte(shown, start, wanted, len(data), whole=whole) :]
        else:
            data = self._range(key, start, wanted)
            first_byte(shown, start, wanted, start + len(data), whole=True)
        fill(buffers, data)

    def length(self, key: str) -> int:
        """See ``Store``."""
        return len(self._read(key).value)

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._read(key, byte_range=slice(0, 0)).stamp.generation

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """See ``Store``."""
        condition = {"if_equal": _ABSENT} if absent else {}
        with self._refusals(f"write {key}"):
            stamp = self._done(self._store.write(key, bytes(data), **condition))
        if not stamp.generation:
            raise Exists(f"{self._url}/{key}")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        first = f"{folder}/" if folder else ""
        stop = f"{folder}0" if folder else ""  # "0" sorts right after "/".
        start = max(first, after)
        if stop and start >= stop:
            return []  # Such a range crashes TensorStore's process.
        with self._refusals(f"list {first}"):
            found = self._done(self._store.list(ts.KvStore.KeyRange(start, stop)))
        return sorted(key for key in (each.decode() for each in found) if key > after)

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``."""
        wanted = [*keys]
        for first in range(0, len(wanted), _DELETIONS):
            some = wanted[first : first + _DELETIONS]
            asked = [(key, self._store.write(key, None)) for key in some]
            for key, answer in asked:
                with self._refusals(f"delete {key}"):
                    self._done(answer)

    def kvstore(self, folder: str) -> dict[str, Any]:
        """See ``Store``."""
        spec = self._store.spec().to_json()
        return {**spec, "path": f"{spec.get('path', '')}{folder}/" if folder else spec["path"]}

    def _read(self, key: str, **how: object) -> Any:
        with self._refusals(f"read {key}"):
            for _ in range(_READ_TRIES):
                found = self._done(self._store.read(key, **how))
                if not self._is_gcs or found.stamp.generation != _BROKEN_OFF:
                    break
            else:
                raise OSError(f"ABORTED: {_READ_TRIES} responses ended within their headers")
        if found.state != "value":
            raise Missing(f"{self._url}/{key}", "no such file")
        return found

    def _done(self, answer: Any) -> Any:
        try:
            return answer.result(timeout=self._deadline_secs)
        except TimeoutError:
            answer.cancel()
            raise

    def _range(self, key: str, start: int, nbytes: int) -> bytes:
        try:
            return bytes(self._read(key, byte_range=slice(start, start + nbytes)).value)
        except _OutOfRange:
            return self.get(key)[start : start + nbytes]

    @contextlib.contextmanager
    def _refusals(self, action: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise unanswered(self._url, action, self._deadline_secs) from error
        except (ValueError, OSError, NotImplementedError, RuntimeError, LookupError) as error:
            if isinstance(error, StorageError):
                raise
            # The text in brackets is the service's answer, which may contain key names.
            found = str(error).partition(" [")[0].splitlines()
            code = _CODE.match(found[0]) if found else None
            kind = _KINDS.get(code[1], Unanswered) if code is not None else Refused
            message = found[0] if found else type(error).__name__
            if _UNTRUSTED in message:
                raise untrusted(self._url, action) from OSError(message)
            if any(cut in message for cut in _CUT_HEADS):
                kind = Unanswered
            raise refusal(kind, self._url, action, message) from OSError(message)
