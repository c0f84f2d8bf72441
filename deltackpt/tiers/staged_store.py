# SPDX-License-Identifier: Apache-2.0
"""A staging directory and its remote directory as one store; staged files are read locally."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from deltackpt.format import chain, naming
from deltackpt.format.manifest import ParentRef, SaveInfo
from deltackpt.ledger.committed import CommittedStore
from deltackpt.storage.store import FileStore, Missing, ReadOnlyStore, Stamp, Store, StorePath

_T = TypeVar("_T")


class StagedStore(ReadOnlyStore):
    """Committed contents of a staging directory and its remote directory; thread-safe."""

    def __init__(
        self, stage: FileStore, root: CommittedStore, url: str, *, no_shared_fs: bool = False
    ):
        """With ``no_shared_fs``, this directory has one part of a step, which is read remotely."""
        self._no_shared_fs = no_shared_fs
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
        if self._no_shared_fs:
            return self._root
        if naming.step_number(step) is None:
            return self._root if step == naming.COMPACTED else self._stage
        return self._stage if self._stage.stamp(step) is not None else self._root

    def at(self, key: str) -> StorePath:
        """Returns a path in the store that holds it."""
        return StorePath(self.holder(key), key)

    def get(self, key: str) -> bytes:
        """See ``Store``."""
        return self._call(key, lambda store: store.get(key))

    def read_into(
        self, key: str, start: int, parts: Sequence[memoryview], *, whole: bool = False
    ) -> None:
        """See ``Store``."""
        self._call(key, lambda store: store.read_into(key, start, parts, whole=whole))

    def length(self, key: str) -> int:
        """See ``Store``."""
        return self._call(key, lambda store: store.length(key))

    def version(self, key: str) -> Hashable:
        """See ``Store``."""
        return self._call(key, lambda store: store.version(key))

    def keys(self, folder: str, *, after: str = "") -> list[str]:
        """See ``Store``; without a folder, the keys of committed steps and bases."""
        if folder:
            return self._call(folder, lambda store: store.keys(folder, after=after))
        steps = self.folders("")
        found = [key for step in steps for key in self.holder(step).keys(step)]
        return sorted(key for key in found if key > after)

    def folders(self, folder: str) -> list[str]:
        """See ``Store``."""
        if folder:
            return self._call(folder, lambda store: store.folders(folder))
        steps = {name for name in self._stage.folders("") if naming.step_number(name) is not None}
        return sorted(steps | {*self._root.folders("")})

    def stamp(self, folder: str) -> Stamp | None:
        """See ``Store``."""
        return self._call(folder, lambda store: store.stamp(folder))

    def kvstore(self, folder: str) -> dict[str, object] | None:
        """See ``Store``."""
        return self._call(folder, lambda store: store.kvstore(folder))

    def _call(self, key: str, call: Callable[[Store], _T]) -> _T:
        holder = self.holder(key)
        try:
            return call(holder)
        except Missing:
            if holder is self._stage and self.holder(key) is self._root:
                return call(self._root)  # It was evicted from the staging directory concurrently.
            raise


def evictable(
    infos: Mapping[int, SaveInfo], keep: int, is_at_root: Callable[[SaveInfo], bool]
) -> list[int]:
    """Returns uploaded steps that are in none of the ``keep`` newest chains."""
    kept: set[int] = set()
    anchors: set[int] = set()
    for step in sorted(infos, reverse=True):
        steps = chain_steps(step, infos)
        if min(steps) not in anchors:
            if len(anchors) == keep:
                break
            anchors.add(min(steps))
        kept |= steps
    return [step for step, info in infos.items() if step not in kept and is_at_root(info)]


def chain_steps(step: int, infos: Mapping[int, SaveInfo]) -> set[int]:
    """Returns the steps of a chain, as far as they are known."""
    by_id = {info.save_id: number for number, info in infos.items()}
    found = {step}

    def find(parent: ParentRef) -> SaveInfo | None:
        number = by_id.get(parent.save_id)
        if number is None:
            return None
        found.add(number)
        return infos[number]

    if step in infos:
        for _ in chain.walk(infos[step], find):
            pass
    return found
