# SPDX-License-Identifier: Apache-2.0
"""How a manager finds touched rows: in a TouchState, by fingerprints, or not at all."""

from __future__ import annotations

import dataclasses
import logging

from deltackpt import events, units
from deltackpt.errors import OptionError
from deltackpt.format.manifest import Layout, TrackingName
from deltackpt.options import Tracking
from deltackpt.state.tables import Split
from deltackpt.touched import TouchState
from deltackpt.tracking.fingerprints import Fields, RowTracker

_logger = logging.getLogger(__name__)

#: Hashing stops after this many saves in a row of which each changed more than half of the rows.
_WIDE_SAVES = 3
#: So many changes between a TouchState and fingerprints are taken for a mistake.
_CHANGES = 3
_BYTES_A_ROW = 12


class RowTracking:
    """The tracking of one manager; used by one thread at a time.

    Attributes:
      tracker: hashes the rows; None if a TouchState names them, or nothing does.
      stopped: whether "auto" gave up hashing because most rows change.
      looked_before: whether rows were hashed before a restore: training may go back to its state
        in memory.
    """

    def __init__(self, mode: Tracking, *, dense_blocks: bool = False, may_stop: bool = True):
        """Hashes nothing yet.

        Args:
          mode: ``DeltaOptions.tracking``.
          dense_blocks: whether deltas contain blocks of dense leaves, and pay without any table.
          may_stop: whether "auto" stops hashing if most rows change: not if WAL records or the
            policy need the rows in any case.
        """
        self._mode, self._dense_blocks = mode, dense_blocks
        self._may_stop = may_stop and not dense_blocks
        self.tracker = RowTracker() if mode == "fingerprints" else None
        #: What a TouchState has replaced, until a save begins: one that is refused changes nothing.
        self._left: RowTracker | None = None
        #: Whether rows were hashed for a save or a record since the start or a restore.
        self._looked = False
        self.looked_before = False
        #: What the last save or record used, and how often that has changed.
        self._used: TrackingName | None = None
        self._changes = 0
        self._wide_saves = 0
        self.stopped = False

    def name(self, split: Split, touched: TouchState | None) -> TrackingName:
        """Returns what the manifest of a save records."""
        if self.tracker is not None:
            return "fingerprints"
        return "touched" if split.marks or touched is not None else ""

    def choose(self, split: Split, touched: TouchState | None) -> Split:
        """Chooses the tracking for a state, and returns what it needs of the state.

        Args:
          split: the state.
          touched: the TouchState passed by the caller.
        """
        tracker = self.chosen(split, touched)
        if tracker is None:
            self._left = self.tracker or self._left
        elif self.tracker is None:
            tracker, self._left = self._left or tracker, None
            self._tell_cost(split.layout)
        self.tracker = tracker
        if self._mode == "auto":
            self._count_change(self.name(split, touched))
        # Fingerprints see more than a TouchState in the state.
        return split if tracker is None else dataclasses.replace(split, marks=())

    def chosen(self, split: Split, touched: TouchState | None) -> RowTracker | None:
        """Returns what ``choose`` would hash with, None if nothing; changes nothing."""
        if self._mode != "auto":
            return self.tracker
        if split.marks or touched is not None or self.stopped:
            return None
        if self.tracker is None and self._pays(split.layout):
            return self._left or RowTracker()
        return self.tracker

    @property
    def has_left(self) -> bool:
        """Whether a TouchState has replaced fingerprints: it need not mark what changed before."""
        return self._looked and self._left is not None

    def saved(self) -> None:
        """Called once a save was begun."""
        if self.tracker is None:
            self._left, self._looked = None, False

    def restored(
        self,
        fields: Fields,
        layout: Layout,
        *,
        has_touch_state: bool,
        recorded: TrackingName,
        identity: int,
    ) -> None:
        """Continues from a restored state.

        Args:
          fields: its tables and slots.
          layout: their layout.
          has_touch_state: whether the state contains a TouchState.
          recorded: the tracking in the step's manifest.
          identity: for the fingerprints: another one than that of the TouchState that the restore
            returns, which does not see what these find.
        """
        if self._mode == "auto":
            if has_touch_state or recorded == "touched" or self.stopped:
                self.tracker = None
            elif self.tracker is None and self._pays(layout):
                self.tracker = RowTracker()
                self._tell_cost(layout)
        self.looked_before |= self._looked
        self._left, self._looked, self._used = None, False, None
        if self.tracker is not None:
            self.tracker.start(fields, layout, identity)

    def accepts_touch_state(self, recorded: TrackingName) -> bool:
        """Returns whether the next save may use the TouchState of the restored step.

        "auto" may continue with either if the step records neither.
        """
        return self.tracker is None or (self._mode == "auto" and recorded != "fingerprints")

    def look(self, split: Split, given: TouchState | None) -> TouchState | None:
        """Returns the TouchState of a save: the one passed, or what hashing finds now.

        Args:
          split: the state.
          given: passed to ``save`` or ``append``.

        Raises:
          OptionError: a TouchState is passed although ``tracking="fingerprints"``.
        """
        if self.tracker is None:
            return given
        if given is not None:
            raise OptionError(
                'touched: expected none with tracking="fingerprints", which finds the rows by '
                'itself, found a TouchState; leave it out, or use tracking="auto"'
            )
        found = self.tracker.look(split.fields, split.layout)
        self._looked = True
        if self._mode == "auto" and self._may_stop:
            self._stop_if_useless(self.tracker.changed_share())
        return found

    def _pays(self, layout: Layout) -> bool:
        return self._dense_blocks or bool(layout.tables)

    def _count_change(self, used: TrackingName) -> None:
        """Warns once if saves and records pass a TouchState and do not, by turns."""
        if self._used not in (None, used):
            self._changes += 1
            if self._changes == _CHANGES:
                events.warn(
                    "some calls of save() and append() were given a TouchState and others were "
                    "not, and each time the next save is a base: pass touched= to all of them, or "
                    "to none"
                )
        self._used = used

    def _tell_cost(self, layout: Layout) -> None:
        if not (rows := sum(table.rows for table in layout.tables)):
            return
        _logger.info(
            "found no TouchState: detecting changed rows by fingerprints, which need %s on the "
            "devices (%d bytes per row), and twice that while a save starts",
            units.size(rows * _BYTES_A_ROW),
            _BYTES_A_ROW,
        )

    def _stop_if_useless(self, changed_share: float | None) -> None:
        """Stops hashing from the next call on, if most rows changed in several saves in a row."""
        if changed_share is None:
            return
        self._wide_saves = self._wide_saves + 1 if changed_share > 0.5 else 0
        if self._wide_saves >= _WIDE_SAVES and not self.stopped:
            self.stopped = True
            events.warn(
                "more than half of the rows of all tables changed in each of the last "
                f"{_WIDE_SAVES} saves: fingerprints are no longer computed, and all further saves "
                "of this manager without a TouchState are bases; if your deltas are still smaller "
                'than bases, set DeltaOptions(tracking="fingerprints"), which never stops, or pass '
                "a TouchState; otherwise select only tables in which few rows change"
            )
