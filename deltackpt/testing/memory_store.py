# SPDX-License-Identifier: Apache-2.0
"""A store in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from deltackpt.storage.store import DirIdentity, Exists, Missing, fill, first_byte


class MemoryStore:
    """The reference implementation of ``Store``: objects in a dict, lost with the instance.

    Everything is written at once and in one order, so any other store may be compared with it.
    """

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._made: dict[str, int] = {}
        self._number = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The constant "memory:"."""
        return "memory:"

    def get(self, key: str) -> bytes:
        """Returns the bytes under a key."""
        if key not in self._held:
            raise Missing(f"{self.url}/{key}")
        return self._held[key]

    def read_into(
        self, key: str, start: int, buffers: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """Fills parts with the bytes from ``start`` on."""
        data = self.get(key)
        wanted = sum(buffer.nbytes for buffer in buffers)
        first = first_byte(f"{self.url}/{key}", start, wanted, len(data), whole=whole)
        fill(buffers, memoryview(data)[first:])

    def length(self, key: str) -> int:
        """Returns the length in bytes."""
        return len(self.get(key))

    def version(self, key: str) -> bytes:
        """Returns the contents, which change with the object."""
        return self.get(key)

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Writes an object."""
        with self._lock:
            if absent and key in self._held:
                raise Exists(f"{self.url}/{key}")
            self._held[key] = bytes(data)
            for folder in _folders_of(key):
                if folder not in self._made:
                    self._number += 1
                    self._made[folder] = self._number

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """Returns the keys below a folder."""
        inside = f"{folder}/" if folder else ""
        return sorted(key for key in self._held if key.startswith(inside) and key > after)

    def folders(self, folder: str) -> list[str]:
        """Returns the names of folders one level below."""
        inside = f"{folder}/" if folder else ""
        below = (key.removeprefix(inside) for key in self.keys(folder))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            self._made = {one: at for one, at in self._made.items() if self.keys(one)}

    def dir_identity(self, folder: str) -> DirIdentity | None:
        """Returns the identity of a folder; None if it does not exist."""
        made = self._made.get(folder)
        return None if made is None else DirIdentity(made, tuple(self.keys(folder)))

    def kvstore(self, folder: str) -> None:
        """Returns None: TensorStore cannot read it."""
        return None


def _folders_of(key: str) -> list[str]:
    components = key.split("/")[:-1]
    return ["/".join(components[: i + 1]) for i in range(len(components))]
