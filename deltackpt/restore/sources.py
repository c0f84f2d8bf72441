# SPDX-License-Identifier: Apache-2.0
"""Sources of merged tables for restores, other than storage.

This module does not depend on any source. The built-in one is imported by name when a restore needs
it; pass another one to ``restore_latest(service=...)``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Protocol

from deltackpt.layers.targets import Wanted
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint

#: Defines ``row_source(directory, item)``. Entry points would also work, but take 20 to 40 ms to
#: list.
_FINDER = "deltackpt.service.discovery"


class RowSource(Protocol):
    """Merged tables of committed steps, held in memory.

    Called once per restore and process, from any thread.
    """

    def tables(
        self,
        save: StoredSave,
        wanted: Wanted | None,
        *,
        timeout_secs: float,
        point: RecoveryPoint | None = None,
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
            ``reading.point_files``.

        Raises:
          ServiceError: the source cannot provide it; storage still can.
        """
        ...


def find(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """Returns the source that this process can reach for a directory, or None.

    Raises:
      ServiceError: there is one, but it is unusable.
    """
    return importlib.import_module(_FINDER).row_source(directory, item)
