# SPDX-License-Identifier: Apache-2.0
"""The dense leaves of full records: whole, or changed since the previous full record.

Changes are blocks, encoded as ``ManagerOptions.dense`` sets, relative to the decoded previous full
record in the same file. Errors of lossy codecs do not add up: each record corrects the errors of
the previous one. The WAL has its own references, from the newest written batch. If a batch fails,
it is abandoned with everything else that is not durable, and the next record is whole, in a new
part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from deltackpt.format.manifest import SaveId
from deltackpt.save.dense import DenseKeeper, DenseLeaves
from deltackpt.save.dense_layer import WrittenDense
from deltackpt.storage.parts import Place

#: Consecutive full records that are relative to the previous one; the next one is whole.
_AGAINST = 15


class WrittenLeaves(NamedTuple):
    """Dense leaves that were written.

    Attributes:
      dense: their record and stored bytes.
      against: see ``RecordHead.against``.
    """

    dense: WrittenDense
    against: int | None


class DenseRecords:
    """Writes the dense leaves of the records of one epoch; used by one thread."""

    def __init__(self, keeper: DenseKeeper | None):
        """Makes the first record whole.

        Args:
          keeper: keeps the references; None if all records are whole.
        """
        self._keeper = keeper
        self._reference: SaveId | None = None
        self._count = 0

    def restart(self) -> None:
        """Makes the next full record whole, for a new file or after a batch was abandoned."""
        if self._keeper is not None and self._reference is not None:
            self._keeper.references.failed(self._reference)
        self._reference, self._count = None, 0

    def write(
        self,
        dense: DenseLeaves,
        save_id: SaveId,
        place_of: Callable[[str], Place],
    ) -> WrittenLeaves:
        """Writes the dense leaves of a record.

        Args:
          dense: what was captured.
          save_id: id of the record.
          place_of: returns the destination of a segment.

        Raises:
          StorageError: the store reported an error.
        """
        if self._keeper is None:
            return WrittenLeaves(dense.write_layer(place_of, save_id, None), None)
        if self._count > _AGAINST:
            self.restart()
        self._count += 1
        against, self._reference = self._reference, save_id
        written = dense.write_layer(place_of, save_id, against)
        return WrittenLeaves(written, None if against is None else against.attempt)

    def written(self, save_id: SaveId) -> None:
        """Releases the copies of earlier records: a record was written."""
        if self._keeper is not None and self._reference == save_id:
            self._keeper.references.committed(save_id, save_id)
