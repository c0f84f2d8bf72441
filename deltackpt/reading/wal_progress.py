# SPDX-License-Identifier: Apache-2.0
"""Advisory file with the progress of a process's WAL; never used to choose a recovery point.

It is stored next to the segments and is not fsynced. A restore compares it with the segments, and
reports durable records that are missing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from deltackpt.errors import RestoreError, StorageError
from deltackpt.storage.store import StorePath

NAME = "progress"
_RECORD = struct.Struct("<QQ")
NBYTES = _RECORD.size


class Noted(NamedTuple):
    """The newest durable record: the number of its ``append()`` call, 0 for none, and its step."""

    number: int
    step: int

    def to_bytes(self) -> bytes:
        """Returns the contents of the file."""
        return _RECORD.pack(*self)


def newest_durable(folder: StorePath) -> Noted:
    """Returns the progress stored next to a process's segments; empty if it cannot be read."""
    try:
        return Noted(*_RECORD.unpack((folder / NAME).read(most_bytes=NBYTES)))
    except (RestoreError, StorageError, struct.error):
        return Noted(0, 0)
