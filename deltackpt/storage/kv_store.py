# SPDX-License-Identifier: Apache-2.0
"""A key-value store of TensorStore as a Store: S3, Google Cloud Storage and others.

TensorStore does not raise on a refused conditional write: it returns an empty generation. Nor does
it say how long an object is: ``length`` reads it whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorstore as ts

from deltackpt.errors import Damaged, StorageError
from deltackpt.storage.store import Exists, Missing, Stamp

#: The generation of what is not there, to be written only then.
_ABSENT = b"\x02"


class KvStore:
    """Bytes under keys of a kvstore."""

    def __init__(self, spec: str | Mapping[str, Any], url: str):
        """Opens one.

        Args:
          spec: of TensorStore; its path ends in "/" where it is a folder.
          url: how errors name it.

        Raises:
          StorageError: it cannot be opened.
        """
        self._url = url
        with self._refusals("open it"):
            self._store: Any = ts.KvStore.open(spec).result()

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._url

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return bytes(self._read(key).value)

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        wanted = sum(part.nbytes for part in parts)
        if whole or start < 0:
            data = self.get(key)
            first = start + len(data) if start < 0 else start
            if first < 0 or (whole and first + wanted != len(data)):
                expected = wanted if whole else -start
                raise Damaged(f"{self._url}/{key}", f"{expected} bytes", f"{len(data)} bytes")
            data = data[first : first + wanted]
        else:
            data = self._range(key, start, wanted)
        if len(data) != wanted:
            stop = start + wanted
            raise Damaged(f"{self._url}/{key}", f"{stop} bytes", f"{start + len(data)} bytes")
        left = memoryview(data)
        for part in parts:
            part.cast("B")[:] = left[: part.nbytes]
            left = left[part.nbytes :]

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
            stamp = self._store.write(key, bytes(data), **condition).result()
        if not stamp.generation:
            raise Exists(
                f"{self._url}/{key}: expected nothing there, found an object; read who put it there"
            )

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``."""
        first = f"{folder}/" if folder else ""
        stop = f"{folder}0" if folder else ""  # "0" comes after "/".
        start = max(first, after)
        if stop and start >= stop:
            return []  # TensorStore's process dies of such a range.
        with self._refusals(f"list {first}"):
            found = self._store.list(ts.KvStore.KeyRange(start, stop)).result()
        return sorted(key for key in (each.decode() for each in found) if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        first = f"{folder}/" if folder else ""
        below = (key.removeprefix(first).partition("/") for key in self.keys(folder))
        return sorted({name for name, slash, _ in below if slash})

    def delete(self, keys: Iterable[str]) -> None:
        """See ``Store``."""
        for key in keys:
            with self._refusals(f"delete {key}"):
                self._store.write(key, None).result()

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``; a folder is what its objects are."""
        found = self.keys(folder)
        if not found:
            return None
        with contextlib.suppress(Missing):
            return Stamp(self.version(found[0]), tuple(found))
        return None

    def kvstore(self, folder: str) -> dict[str, Any]:
        """See ``Store``."""
        spec = self._store.spec().to_json()
        return {**spec, "path": f"{spec.get('path', '')}{folder}/" if folder else spec["path"]}

    def _read(self, key: str, **how: Any) -> Any:
        with self._refusals(f"read {key}"):
            found = self._store.read(key, **how).result()
        if found.state != "value":
            raise Missing(f"{self._url}/{key}", "no such file")
        return found

    def _range(self, key: str, start: int, nbytes: int) -> bytes:
        try:
            return bytes(self._read(key, byte_range=slice(start, start + nbytes)).value)
        except StorageError as error:
            # A range beyond the end is refused, and by every driver in words of its own.
            if isinstance(error, Missing) or not isinstance(error.__cause__, ValueError):
                raise
            return self.get(key)[start : start + nbytes]

    @contextlib.contextmanager
    def _refusals(self, action: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"{self._url}: expected to {action}, found: {str(error).splitlines()[0]}; check "
                "the URL, the endpoint and the credentials, then try again"
            ) from error
