# SPDX-License-Identifier: Apache-2.0
"""Where a restore may take merged tables from, other than from storage.

Nothing here knows how a source works: the one that comes with deltackpt is imported by its name
when a restore asks for it, and another one is given to ``restore_latest(service=...)``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Protocol

from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint
from deltackpt.reading.targets import Wanted

#: Has ``row_source(directory, item)``. Entry points would do as well, and take 20 to 40 ms to list.
_FINDER = "deltackpt.service.discovery"


class RowSource(Protocol):
    """Merged tables of committed steps, held somewhere in memory.

    Asked once per restore and process, from any thread.
    """

    def tables(
        self,
        save: StoredSave,
        wanted: Wanted | None,
        *,
        timeout_secs: float,
        point: LogPoint | None = None,
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        """What is wanted of exactly this save, bit for bit as storage has it.

        The buffers are the caller's for good, to be written to as well. Where ``files`` are given,
        all that the step's own digests cover and these themselves are among them; they may be read
        while somebody refers to them.

        Args:
          save: the step, as its manifest in storage says.
          wanted: what to restore; by default every table and slot as a whole.
          timeout_secs: longest wait for the source to hold the step, and for each of its answers.
          point: of the log, above the step, where one is restored. The source gives the tables of
            the step, or with any of the marks up to the point; or it gives the point whole, and
            says so (``RestoredTables.point``), with the ``files`` of ``reading.point_files``.

        Raises:
          ServiceError: it cannot be had from here; storage still has it.
        """
        ...


def find(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """The source that this process can reach for a directory, None where there is none.

    Raises:
      ServiceError: there is one, and it cannot be used.
    """
    return importlib.import_module(_FINDER).row_source(directory, item)
