# SPDX-License-Identifier: Apache-2.0
"""A staging directory and its remote directory as one store; staged files are read locally."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from deltackpt.errors import StorageError
from deltackpt.format import names
from deltackpt.ledger.committed import Committed
from deltackpt.storage.store import FileStore, Missing, Stamp, Store, StorePath

_T = TypeVar("_T")


class Layers:
    """Committed contents of a staging directory and its remote directory; thread-safe."""

    def __init__(self, stage: FileStore, root: Committed, url: str, *, apart: bool = False):
        """Reads from both.

        Args:
          stage: the staging directory's checkpoint directory.
          root: committed contents of the remote directory.
          url: its name in errors.
          apart: whether staging directories hold only parts of steps; then steps are listed here,
            but read remotely.
        """
        self._apart = apart
        self._stage = stage
        self._root = root
        self._url = url

    @property
    def url(self) -> str:
        """See ``Store``."""
        return self._url

    def holder(self, key: str) -> Store:
        """Returns the store that holds a key or a folder; the local one if both do."""
        step = key.partition("/")[0]
        if self._apart:
            return self._root
        if names.step_number(step) is None:
            return self._root if step == names.COMPACTED else self._stage
        return self._stage if self._stage.stamp(step) is not None else self._root

    def at(self, key: str) -> StorePath:
        """Returns a path in the store that holds it."""
        return StorePath(self.holder(key), key)

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return self._ask(key, lambda store: store.get(key))

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        self._ask(key, lambda store: store.read_into(key, start, parts, whole=whole))

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._ask(key, lambda store: store.length(key))

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._ask(key, lambda store: store.version(key))

    def put(self, key: str, data: bytes | memoryview, *, absent: bool = False) -> None:
        """Not supported: saves are staged and uploaded."""
        raise StorageError(f"{self._url}/{key}: expected only reads, found a write")

    def delete(self, keys: Iterable[str]) -> None:
        """Not supported: see ``put``."""
        raise StorageError(f"{self._url}: expected only reads, found a deletion of {[*keys]}")

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``; without a folder, the keys of committed steps and bases."""
        if folder:
            return self._ask(folder, lambda store: store.keys(folder, after=after))
        steps = self.folders("")
        found = [key for step in steps for key in self.holder(step).keys(step)]
        return sorted(key for key in found if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        if folder:
            return self._ask(folder, lambda store: store.folders(folder))
        steps = {name for name in self._stage.folders("") if names.step_number(name) is not None}
        return sorted(steps | {*self._root.folders("")})

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``."""
        return self._ask(folder, lambda store: store.stamp(folder))

    def kvstore(self, folder: str) -> dict[str, Any] | None:
        """See ``Store``."""
        return self._ask(folder, lambda store: store.kvstore(folder))

    def _ask(self, key: str, ask: Callable[[Store], _T]) -> _T:
        holder = self.holder(key)
        try:
            return ask(holder)
        except Missing:
            if holder is self._stage and self.holder(key) is self._root:
                return ask(self._root)  # It was evicted from the staging directory concurrently.
            raise
