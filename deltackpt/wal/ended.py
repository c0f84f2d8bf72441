# SPDX-License-Identifier: Apache-2.0
"""Ends the WAL of earlier runs in a manager without a WAL.

If the directory has a WAL, such a run writes a header, which invalidates the records of abandoned
training. Only then does it import the other modules of the WAL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.session.run import Run, WalHooks

if TYPE_CHECKING:
    from deltackpt.format.manifest import SaveId
    from deltackpt.format.wal_format import Continues
    from deltackpt.state.tables import Split


class EndedWal(WalHooks):
    """The ``WalHooks`` of a manager that saves without a WAL: ends the WAL of earlier runs."""

    def __init__(self, run: Run):
        self._run = run
        self._location = run.root.wal_location

    def start_epoch(self, split: Split) -> None:
        """See ``WalHooks``: writes a header if the directory has a WAL."""
        lineage = self._run.lineage
        known, continues = lineage.newest_known, lineage.forked_from
        if known is None or known.continues != continues:
            continues = None
        self._end("starting a WAL epoch", None if known is None else known.info.save_id, continues)
        self.begun = lineage.run

    def deleted(self, step: SaveId, *, is_needed: bool) -> None:
        """See ``WalHooks``: a header without a parent point misses no trimmed record."""
        self._run.lineage.forget(step)
        if is_needed:
            self._end("ending the WAL", self._run.lineage.newest_committed, None)

    def _end(self, what: str, base: SaveId | None, continues: Continues | None) -> None:
        def write() -> None:
            if self._location.numbers():
                from deltackpt.reading.wal_index import WalReader
                from deltackpt.wal.epoch import write_head

                self._run.check_lease()
                write_head(self._run, WalReader(self._location), base, continues)

        self._run.coordinator.from_process_0(what, write, fatal=True)
