# SPDX-License-Identifier: Apache-2.0
"""Rows and dense leaves of the same step or recovery point."""

from __future__ import annotations

from collections.abc import Sequence

from deltackpt.errors import OptionError, RestoreError, StorageError
from deltackpt.format import naming
from deltackpt.format.manifest import Layout, TableEntry
from deltackpt.format.row_blocks import VALUES
from deltackpt.ledger.steps import Steps
from deltackpt.reading import stored_saves
from deltackpt.reading.wal_index import ReplayPlan
from deltackpt.serving.leaves import LeafReplica
from deltackpt.serving.row_changes import ChangedTables, ChangeLog
from deltackpt.serving.rows import Rows, choose, is_meant, served_tables
from deltackpt.serving.version import Position, PublishedState
from deltackpt.standby.follower import ReplicaTables, RowReplica
from deltackpt.standby.tailer import Tailer
from deltackpt.storage.store import StorePath


class VersionReplica:
    """The rows and dense leaves of the next version; see ``standby.tailer.StateReplica``.

    Rows change in place, so readers open no version from the moment when they change until the
    dense leaves of the same state are held, too. ``shown`` is the newest complete state.
    """

    def __init__(
        self,
        root: Steps,
        tailer: Tailer,
        leaves: LeafReplica | None,
        rows: RowReplica | None,
        choice: TableChoice,
    ):
        self.shown: PublishedState | None = None
        self.changes = ChangeLog()
        self._root, self._tailer = root, tailer
        self._leaves, self._rows, self._choice = leaves, rows, choice
        self._known: tuple[ReplicaTables, Rows] | None = None

    @property
    def has_tables(self) -> bool:
        """Whether tables are followed."""
        return self._rows is not None

    def is_at(self, plan: ReplayPlan | None) -> bool:
        """See ``StateReplica``; also whether readers can open the held state."""
        return self._holds(plan) and self.shown is not None and self._is_held(self.shown)

    def load_state(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """See ``StateReplica``."""
        changed = False
        if self._leaves is not None:
            # Before the rows: the leaves of the version before stay valid.
            full = None if plan is None else self._tailer.full(plan)
            changed = self._leaves.load_state(step_dir, full)
        if self._rows is not None and self._rows.load_state(step_dir, plan):
            loaded = self._rows.loaded
            self.changes.add(None if loaded is None else loaded.changed)
            changed = True
        if self._holds(plan) and (self.shown is None or not self._is_held(self.shown)):
            self.shown = self._complete()
        return changed

    def changed_between(self, before: Position, after: PublishedState) -> ChangedTables:
        """Returns rows that may differ between two states, from row indices in storage.

        None if the newer state does not continue the older one, or what is in between is gone. Any
        thread may call it.
        """
        assert self._rows is not None
        found = self._root.at(after.save_id.step)
        try:
            with stored_saves.detect_removal(found):
                return self._rows.changed_between(
                    found, after.save_id, after.point, before.save_id, before.point
                )
        except (RestoreError, StorageError):
            return None

    def _holds(self, plan: ReplayPlan | None) -> bool:
        full = None if plan is None else self._tailer.full(plan)
        return (self._leaves is None or self._leaves.is_at(full)) and (
            self._rows is None or self._rows.is_at(plan)
        )

    def _is_held(self, shown: PublishedState) -> bool:
        """Returns whether a state is the one in memory."""
        if self._leaves is not None and shown.dense is not self._leaves.loaded:
            return False
        tables = None if self._rows is None else self._rows.tables
        if tables is None:
            return self._rows is None
        return shown.rows is not None and shown.rows.memory is tables.memory and shown.is_current()

    def _complete(self) -> PublishedState:
        """Returns the held state for readers."""
        dense = None if self._leaves is None else self._leaves.loaded
        loaded, rows, sequence = dense, None, 0
        if self._rows is not None:
            loaded, tables = self._rows.loaded, self._rows.tables
            assert loaded is not None and tables is not None
            if self._known is None or self._known[0] is not tables:
                found = served_tables(tables, self._choice)
                self._choice.check(tables.layout)
                self._known = tables, Rows(tables.memory, found)
            rows, sequence = self._known[1], loaded.sequence
        assert loaded is not None
        save_id, point = loaded.save.save_id, loaded.point
        number = self.changes.complete(Position.from_save(save_id, point))
        return PublishedState(save_id, point, loaded.unix_secs, number, dense, rows, sequence)


class TableChoice:
    """Chooses tables and slots by globs over names; see ``loaded_state.FieldChoice``."""

    def __init__(self, tables: Sequence[str], slots: Sequence[str]):
        self._tables, self._slots = tables, slots

    def __call__(self, table: TableEntry, field: str) -> bool:
        """Returns whether to hold a field."""
        kind, _, slot = field.partition(".")
        wanted = kind == VALUES or any(naming.matches(one, slot) for one in self._slots)
        return wanted and any(is_meant(one, table.name) for one in self._tables)

    def check(self, layout: Layout) -> None:
        """Raises ``OptionError`` if a glob matches no table, or no slot of the chosen tables."""
        names = choose(self._tables, {table.name: table for table in layout.tables})
        groups = layout.group_by_name
        slots = {
            spec.name.partition(".")[2]
            for table in layout.tables
            for spec in groups[table.group].fields
            if table.name in names and spec.name != VALUES
        }
        for one in self._slots:
            if not any(naming.matches(one, slot) for slot in slots):
                raise OptionError(
                    f"slots: expected {one!r} to match a slot of {names}, found only "
                    f"{sorted(slots)}"
                )
