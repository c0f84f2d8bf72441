# SPDX-License-Identifier: Apache-2.0
"""The files of a step from memory, for readers that know nothing but folders.

Orbax's handlers read dense leaves and further items from a folder. What a source gave is checked
against the step's digests, as a restore from storage checks it, and written where files are memory,
one item at a time and only those that are asked for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import names
from deltackpt.reading.dense_values import DenseValues
from deltackpt.storage import digests, ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import Value

_MEMORY = Path("/dev/shm")


class ItemFiles(Protocol):
    """Items of a step that need not be read from storage."""

    def __contains__(self, item: str) -> bool:
        """Whether there is an item of that name."""
        ...

    def folder(self, item: str) -> Path:
        """A folder with the files of an item, and no others."""
        ...


class DenseFiles:
    """Dense leaves of a mark, or of a delta that has them as blocks, as Orbax's item of a step.

    Attributes:
      fresh: as of ``dense_values.DenseItem``: what is in the item is not ours to change.
    """

    fresh = False

    def __init__(self, found: DenseValues):
        """Writes nothing yet.

        Args:
          found: what is in the item.
        """
        self._found = found
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __contains__(self, item: str) -> bool:
        return item == names.DENSE_ITEM

    @property
    def outline(self) -> DenseValues:
        """As ``DenseItem.outline``."""
        return self.read(lambda key: key.endswith(f"/{ocdbt.ZARRAY}"))

    def read(self, wanted: Callable[[str], bool]) -> DenseValues:
        """As ``DenseItem.read``."""
        found = {key: value for key, value in self._found.values.items() if wanted(key)}
        return DenseValues(found, self._found.files)

    def folder(self, item: str) -> Path:
        """See ``ItemFiles``.

        Raises:
          StorageError: it cannot be written.
        """
        if self._folder is None:
            found = self._found
            nbytes = sum(value.nbytes for value in found.values.values())
            place = _place(2 * nbytes)
            self._folder = tempfile.TemporaryDirectory(prefix="deltackpt-", dir=place)
            folder = Path(self._folder.name, item)
            batch = FileBatch(Path(self._folder.name), fsync=False)
            batch.make(folder)
            plain = {key: np.frombuffer(data, np.uint8) for key, data in found.values.items()}
            ocdbt.write(folder, [Value(key, data) for key, data in plain.items()], batch)
            for name, data in found.files.items():
                path = folder / name
                batch.make(path.parent)
                batch.write(path, bytes(data))
            batch.force()
        return Path(self._folder.name, item)

    def close(self) -> None:
        """Removes the folder."""
        if self._folder is not None:
            self._folder.cleanup()


class StepFiles:
    """The items of a step that stand beside its tables; closed when nobody reads them any more."""

    def __init__(
        self, files: Mapping[str, np.ndarray], shown: str, dense: DenseFiles | None = None
    ):
        """Checks the digests alone.

        Args:
          files: the bytes of each by its posix path below the step.
          shown: how errors name the step.
          dense: its dense leaves, where they are no files of it.

        Raises:
          Damaged: the digests are missing or altered.
        """
        self._files = files
        self._shown = shown
        self._dense = dense
        self._digests = digests.of_step(lambda name: self._found(name).tobytes(), shown)
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def __contains__(self, item: str) -> bool:
        if self._dense is not None and item in self._dense:
            return True
        return any(name.startswith(f"{item}/") for name in self._digests)

    def folder(self, item: str) -> Path:
        """A folder with the files of an item, and no others.

        Raises:
          Damaged: a file is missing or altered.
        """
        if self._dense is not None and item in self._dense:
            return self._dense.folder(item)
        if item not in self._folders:
            names = [name for name in self._digests if name.startswith(f"{item}/")]
            for name in names:
                shown = f"{self._shown}/{name}"
                digests.check_bytes(self._found(name).data, self._digests[name], shown)
            place = _place(sum(self._files[name].nbytes for name in names))
            self._folders[item] = tempfile.TemporaryDirectory(prefix="deltackpt-", dir=place)
            for name in names:
                path = Path(self._folders[item].name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._files[name].data)
        return Path(self._folders[item].name, item)

    def close(self) -> None:
        """Removes the folders."""
        for folder in self._folders.values():
            folder.cleanup()
        if self._dense is not None:
            self._dense.close()

    def _found(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise Damaged(f"{self._shown}/{name}", "a file in memory", "none")
        return self._files[name]


def _place(nbytes: int) -> Path | None:
    """Where files are memory and there is room for twice as many bytes; else that of all such."""
    try:
        found = os.statvfs(_MEMORY)
    except OSError:
        return None
    return _MEMORY if found.f_bavail * found.f_frsize > 2 * nbytes else None
