# SPDX-License-Identifier: Apache-2.0
"""Sources of restores other than storage: merged tables, and files of a step in memory.

This module does not depend on any source. The built-in one is imported by name when a restore needs
it; pass another one to ``restore_latest(service=...)``.

Orbax's handlers read dense leaves and additional items from a folder. Files from a source are
checked against the step's digests, as in a restore from storage, and written to a memory file
system, one item at a time and only on request.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from deltackpt.errors import Damaged
from deltackpt.format import naming
from deltackpt.layers.targets import Wanted
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.storage import digests, ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import Value


class RowSource(Protocol):
    """Merged tables of committed steps, held in memory.

    Called once per restore and process, from any thread; again for key columns, without files, if
    several processes check that ids are unique.
    """

    def tables(
        self,
        save: StoredSave,
        wanted: Wanted | None,
        *,
        timeout_secs: float,
        point: RecoveryPoint | None = None,
        files: bool = True,
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        """Returns the wanted parts of exactly this save, bit-identical to storage.

        The caller owns the buffers and may write to them. If ``files`` are returned, they include
        all files covered by the step's own digests, and the digests; they are readable while they
        are referenced.

        Args:
          save: the step, from its manifest in storage.
          wanted: what to restore; by default every table and slot in full.
          timeout_secs: maximum wait in seconds for the source to hold the step, and for each
            answer.
          point: the recovery point above the step to restore, if any. The source returns the tables
            of the step, or with any of the WAL records up to the point; or it returns the complete
            point, indicated by ``RestoredTables.point``, with the ``files`` of
            ``reading.dense_state``.
          files: whether the caller uses ``files``; they may be left out otherwise.

        Raises:
          ServiceError: the source cannot provide it; storage still can.
        """
        ...


#: Sources of tables to try before storage; see ``CheckpointManager.restore_latest``.
Service = RowSource | Literal["auto"] | None


_MEMORY = Path("/dev/shm")


class DenseFiles:
    """Dense leaves of a WAL record, or of a delta with blocks, as Orbax's item of a step."""

    def __init__(self, found: DenseValues, *, fresh: bool = False):
        """Keeps the contents; writes nothing yet.

        They must not be modified; if ``fresh``, no other code reads them, and numpy leaves may be
        them.
        """
        self._found, self.fresh = found, fresh
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __contains__(self, item: str) -> bool:
        return item == naming.DENSE_ITEM

    @property
    def outline(self) -> DenseValues:
        """Same as ``StoredItem.outline``."""
        return self.read(lambda key: key.endswith(f"/{ocdbt.ZARRAY}"))

    def read(self, wanted: Callable[[str], bool]) -> DenseValues:
        """Same as ``StoredItem.read``."""
        found = {key: value for key, value in self._found.values.items() if wanted(key)}
        return DenseValues(found, self._found.files)

    def folder(self, item: str) -> Path:
        """Returns a folder with the files of the item, and no others."""
        if self._folder is None:
            found = self._found
            nbytes = sum(value.nbytes for value in found.values.values())
            self._folder = _temporary(2 * nbytes)
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
    """The items of a step other than its tables; closed when they are no longer read."""

    def __init__(
        self, files: Mapping[str, np.ndarray], shown: str, dense: DenseFiles | None = None
    ):
        """Checks the digests only: damaged if they are missing or altered.

        ``files`` has the contents by POSIX path below the step, ``dense`` leaves that are not
        files.
        """
        self._files = files
        self._shown = shown
        self._dense = dense
        self._digests = digests.parse_step_digests(
            lambda name: self._found(name).tobytes(), {}, shown
        )
        self._folders: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def __contains__(self, item: str) -> bool:
        if self._dense is not None and item in self._dense:
            return True
        return any(name.startswith(f"{item}/") for name in self._digests)

    def folder(self, item: str) -> Path:
        """Returns a folder with the verified files of an item, and no others."""
        if self._dense is not None and item in self._dense:
            return self._dense.folder(item)
        if item not in self._folders:
            names = [name for name in self._digests if name.startswith(f"{item}/")]
            for name in names:
                shown = f"{self._shown}/{name}"
                digests.check_bytes(self._found(name).data, self._digests[name], shown)
            self._folders[item] = _temporary(sum(self._files[name].nbytes for name in names))
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


#: Items of a step that are available without storage.
ItemFiles = DenseFiles | StepFiles


def _temporary(nbytes: int) -> tempfile.TemporaryDirectory[str]:
    """Creates a directory, in memory if its file system has room for twice as many bytes."""
    place = None
    with contextlib.suppress(OSError):
        found = os.statvfs(_MEMORY)
        place = _MEMORY if found.f_bavail * found.f_frsize > 2 * nbytes else None
    return tempfile.TemporaryDirectory(prefix="deltackpt-", dir=place)
