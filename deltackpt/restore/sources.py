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
from deltackpt.reading.targets import Wanted

#: Has ``row_source(directory, item)``. Entry points would do as well, and take 20 to 40 ms to list.
_FINDER = "deltackpt.service.discovery"


class RowSource(Protocol):
    """Merged tables of committed steps, held somewhere in memory.

    Asked once per restore and process, from any thread.
    """

    def tables(
        self, save: StoredSave, wanted: Wanted | None, *, timeout_secs: float, lend: bool
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        """What is wanted of exactly this save, bit for bit as storage has it.

        Args:
          save: the step, as its manifest in storage says.
          wanted: what to restore; by default every table and slot as a whole.
          timeout_secs: longest wait for the source to hold the step, and for each of its answers.
          lend: whether buffers may be memory of the source, which holds the step while the
            context lasts; otherwise they are the caller's for good.

        Raises:
          ServiceError: it cannot be had from here; storage still has it. Where leaving the
            context raises it, lent memory changed, and what was made of it is void.
        """
        ...


def find(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """The source that this process can reach for a directory, None where there is none.

    Raises:
      ServiceError: there is one, and it cannot be used.
    """
    return importlib.import_module(_FINDER).row_source(directory, item)
