# SPDX-License-Identifier: Apache-2.0
"""Where a restore may take merged tables from, other than from storage.

A package offers its source through the entry point group ``deltackpt.row_sources``: a function of
(directory, item) that returns a RowSource, or None where it has none for that directory. Nothing
here knows how it works.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Protocol

from deltackpt.reader import RestoredTables, Wanted
from deltackpt.stored import StoredSave

_GROUP = "deltackpt.row_sources"


class RowSource(Protocol):
    """Merged tables of committed steps, held somewhere in memory.

    Asked once per restore and process, from any thread.
    """

    def restore_tables(
        self, save: StoredSave, wanted: Wanted | None, timeout_secs: float
    ) -> RestoredTables:
        """What is wanted of exactly this save, bit for bit as storage has it.

        Args:
          save: the step, as its manifest in storage says.
          wanted: what to restore; by default every table and slot as a whole.
          timeout_secs: longest wait for the source to hold the step, and for each of its answers.

        Raises:
          ServiceError: it cannot be had from here; storage still has it.
        """
        ...


def find(directory: str | os.PathLike[str], item: str) -> RowSource | None:
    """The first source that an installed package has for a directory, None where there is none.

    Raises:
      ServiceError: there is one, and it cannot be used.
    """
    for entry in importlib.metadata.entry_points(group=_GROUP):
        source = entry.load()(directory, item)
        if source is not None:
            return source
    return None
