# SPDX-License-Identifier: Apache-2.0
"""Reads what one process needs of a step: its tables, its dense leaves and its additional items.

An in-memory source comes before storage; ``OrbaxItems`` reads dense leaves and items.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping

import numpy as np

from deltackpt import coordination
from deltackpt.errors import (
    Damaged,
    DamagedWal,
    ServiceError,
    ServiceUnavailable,
    TemplateMismatch,
    without_frames,
)
from deltackpt.format import naming
from deltackpt.format.manifest import SaveId
from deltackpt.format.naming import PyTree
from deltackpt.format.row_blocks import VALUES
from deltackpt.handlers.dense_leaves import DenseRead
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.handlers.items import Items
from deltackpt.layers.targets import Wanted, targets_of, wanted_rows
from deltackpt.lazy_import import LazyModule
from deltackpt.reading import bounds, chains, dense_state, reader, stored_saves, wal_rows
from deltackpt.reading.dense_state import RecordedState
from deltackpt.reading.reader import Progress, RestoredTables
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalReader
from deltackpt.reading.wal_records import damage_of
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.resources.runtime import Runtime
from deltackpt.restore import placing
from deltackpt.restore.sources import DenseFiles, ItemFiles, RowSource, Service, StepFiles
from deltackpt.restore.template_check import check_template
from deltackpt.session.run import Run
from deltackpt.state import paths, placement, touch_state
from deltackpt.state import tables as state_tables
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import TouchState
from deltackpt.tracking import stamps

_logger = logging.getLogger(__name__)
#: Imported for a restore that may read from a hot standby. An entry point would also work, but
#: takes 20 to 40 ms to list.
discovery = LazyModule("deltackpt.service.discovery")

#: Table name to a half-open range of rows, None for all of them.
RowRanges = Mapping[str, tuple[int, int] | None]


@dataclasses.dataclass(eq=False)
class StepReader:
    """Reads one step, or a recovery point above it: ``find``, then ``load``, then the results.

    All processes make the same calls in the same order.
    """

    run: Run
    others: OrbaxItems
    step: int
    template: PyTree | Split
    #: Restricts the read to rows of some tables, without dense leaves.
    rows: RowRanges | None = None
    service: Service = None
    point: RecoveryPoint | None = None
    wal: WalReader | None = None  # reads the WAL records of ``point``; by default all of them again

    # From ``find``.
    target: StoredSave = dataclasses.field(init=False)
    chain: tuple[StoredSave, ...] | None = None  # None if ``source`` is tried first
    source: RowSource | None = None
    problem: ServiceError | None = None  # why no source was used
    expected: Split | None = None
    wanted: Wanted | None = None  # None for all
    plan: ReplayPlan | None = None
    #: Reads dense leaves without the other processes, and verifies them if there are no others.
    straight: Callable[[], DenseRead] | None = None
    found_at: float = 0.0

    # From ``load``.
    tables: RestoredTables = dataclasses.field(init=False)
    dense: dict[str, PyTree] = dataclasses.field(default_factory=dict)
    chunks: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # see ``DenseRead``
    files: ItemFiles | None = None
    #: The state at ``point``; without its dense leaves if they were read from storage.
    recorded: RecordedState | None = None
    #: Closes ``files``.
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    read_at: float = 0.0

    def find(self) -> None:
        """Finds a step, its chain unless a source may provide it, and what is wanted of it.

        Checks this process's share of the step's files, unless a source may have them; dense leaves
        may be checked while they are read. A recovery point needs only the rows of the step.
        """
        run = self.run
        with run.coordinator.together(f"finding step {self.step}"):
            run.root.await_readable(self.step)
            paths.check_template(self.template)
            step_dir = run.root.at(self.step)
            with stored_saves.detect_removal(step_dir):
                self._find_source()
                if self.source is None:
                    self.chain = chains.read_chain(step_dir, run.item)
                    self.target = self.chain[-1]
                else:
                    self.target = stored_saves.read_save(step_dir, run.item)
                self._check_template()
                if self.rows is None and self.source is None and self.point is None:
                    self._check_files()
            if self.point is not None:
                self.plan = self._plan(self.point)
        self.found_at = time.perf_counter()

    def _find_source(self) -> None:
        """Finds the source that a restore tries first, or why the existing one is unusable."""
        if self.service != "auto":
            self.source = self.service
            return
        try:
            self.source = discovery.row_source(self.run.root.given, self.run.item)
        except Exception as error:
            self.problem = _service_error(error)

    def _check_template(self) -> None:
        template = self.template
        if self.rows is not None:
            self.wanted = wanted_rows(self.target.layout, self.rows)
        elif template is None:
            bounds.check_paths(self.target.layout, self.target.name)
        else:
            is_split = isinstance(template, Split)
            expected = template if is_split else state_tables.split(template, self.run.choice)
            check_template(expected.layout, expected.fields, self.target)
            self.expected, self.wanted = expected, placing.wanted_of(expected.fields)

    def _check_files(self) -> None:
        alone = self._share[1] == 1
        if self.target.layout.dense:
            abstract = None if self.expected is None else self.expected.dense
            self.straight = self.others.straight(self.step, abstract, verify=alone)
        # Several processes share the work.
        with_dense = self.straight is None or not alone
        self.run.root.check_step_files(self.target.step_dir, self._share, dense=with_dense)

    def _plan(self, point: RecoveryPoint) -> ReplayPlan:
        at = self.run.root.wal_location
        found = (self.wal or WalReader(at)).read().plan(point, self.target.info.save_id)
        if found is None:
            what = f"WAL records from step {self.step} to {point}"
            raise DamagedWal(str(at), what, "some missing", record=point.save_id)
        return found

    def load(self, progress: Progress | None) -> None:
        """Reads merged tables, and dense leaves; ``progress`` gets the bytes read and the total."""
        coordinator = self.run.coordinator
        own = dataclasses.astuple(self.target.info.save_id)
        agreed = SaveId(*coordinator.agree("choosing a save", own))
        straight = coordinator.gather("reading dense leaves", self.straight is not None)
        # Straight: without Orbax's handler, which needs all processes.
        if not all(straight):
            self.straight = None
        with coordinator.together(f"restoring step {self.step}"), self._detect_removal():
            self._load(progress)
            if {agreed, self.tables.chain[-1].save_id} != {self.target.info.save_id}:
                raise stored_saves.gone(self.target.step_dir)
            stored_saves.check_exists(self.target)
        self.read_at = time.perf_counter()

    def _load(self, progress: Progress | None) -> None:
        merged, files = self._from_memory()
        is_complete = self.recorded is not None
        is_storage_read = self.rows is None and self.point is None and self.source is not None
        if files is None and is_storage_read:
            # ``find`` left the checks to the source, but other processes may have read from
            # storage.
            self.run.root.check_step_files(self.target.step_dir)
        replay_from = None if is_complete else self.plan
        if self.recorded is not None and self.target.layout.dense:
            files = self.held.enter_context(contextlib.closing(DenseFiles(self.recorded.dense)))
        self.files = files
        # Orbax mostly waits for its own threads, and the merge for memory.
        with Runtime() as runtime:
            read_dense = self._read_dense if replay_from is None else self._read_dense_at_point
            leaves = runtime.submit(placement.carried(read_dense))
            seen, in_memory = SeenRows(self.target.layout), merged is not None
            if merged is None:
                merged = reader.restore_tables(
                    self._chain, wanted=self.wanted, progress=progress, plan=replay_from, seen=seen
                )
            else:
                if progress is not None:
                    progress(merged.bytes_read, merged.bytes_read)
                if replay_from is not None:
                    _replay(replay_from, merged, seen)
            checked = [merged, *self._key_columns(in_memory)]
            damage = contextlib.nullcontext()
            if self.plan is not None:
                damage = damage_of(self.plan.last_records[0])
            with damage:
                for one in checked:
                    reader.check_keys(one)
                self.dense, self.chunks = leaves.result()
            if replay_from is not None:
                items = replay_from.items()
                self.recorded = RecordedState(DenseValues({}, {}), items, seen.by_table())
        self.tables = merged

    def items(self, items: Items) -> dict[str, object]:
        """Reads additional items of the step, by name, with an argument for each item's handler.

        Raises ``StepGone`` if the step is another save now.
        """
        step_dir, files = self.target.step_dir, self.files
        with self._detect_removal():

            def has(name: str) -> bool:
                return name in files if files is not None else (step_dir / name).exists()

            if missing := [name for name in items if not has(name)]:
                raise TemplateMismatch(
                    f"{step_dir}: expected the items {', '.join(items)}, found no "
                    f"{', '.join(missing)}; restore without them"
                )
            restored = self.others.items(self.step, items, files)
        stored_saves.check_exists(self.target)
        return {name: restored[name] for name in items}

    def state(self, identity: int) -> tuple[PyTree, TouchState | None]:
        """Builds the whole state with a fresh TouchState; nested dicts without a template."""
        expected, merged = self.expected, self.tables
        if expected is None:
            return state_tables.join(None, merged.layout, merged.fields, self.dense, None), None
        placed = placing.place(merged, expected.fields)
        placing.report_grown(self.step, placing.grown(merged, expected.fields))
        states = [touch_state.fresh(each.state, identity, traced=False) for each in expected.marks]
        known = {table for one in states for table in touch_state.matched(one, expected.layout)}
        others = {name: fields[VALUES] for name, fields in placed.items() if name not in known}
        if others or not states:
            states.insert(0, stamps.init(others, identity=identity))
        fresh, *more = states
        for one in more:
            fresh = fresh._replace(stamps=fresh.stamps | one.stamps)
        return state_tables.join(self.template, expected.layout, placed, self.dense, fresh), fresh

    @property
    def _share(self) -> tuple[int, int]:
        """The index of this process, and the number of processes that read together."""
        return self.run.coordinator.index, self.run.coordinator.count

    @property
    def _chain(self) -> tuple[StoredSave, ...]:
        return self.chain or chains.read_chain(self.target.step_dir, self.run.item)

    def _key_columns(self, in_memory: bool) -> list[RestoredTables]:
        """Reads all ids of this process's share of the tables, unless it restores them anyway."""
        if self.rows is not None or self.wanted is None or self._share[1] == 1:
            return []
        wanted = reader.key_columns(self.target.layout, known=self.wanted, share=self._share)
        if not wanted:
            return []
        if in_memory:
            try:
                with self._tables_of_source(wanted, files=False) as columns:
                    pass
            except Exception as error:
                self._log_fallback(_service_error(error))
            else:
                if self.plan is not None and not columns.point:
                    _replay(self.plan, columns)
                return [columns]
        return [reader.restore_tables(self._chain, wanted=wanted, plan=self.plan)]

    def _detect_removal(self) -> contextlib.AbstractContextManager[None]:
        at, save_id = self.target.step_dir, self.target.info.save_id
        return stored_saves.detect_removal(
            at, exists=lambda: stored_saves.exists(at, save_id, self.run.item)
        )

    def _from_memory(self) -> tuple[RestoredTables | None, ItemFiles | None]:
        """Returns tables, and files, from the source; sets a complete recovery point."""
        merged, files = None, None
        if self.source is not None:
            try:
                with self._tables_of_source(self.wanted) as merged:
                    if self.plan is None:
                        files = self._files(merged)
                    elif merged.point and merged.files is not None:
                        self.recorded = dense_state.state_of(merged.files, merged.layout)
            except Exception as error:
                self.problem, self.recorded = _service_error(error), None
                merged, files = None, None
        if self.problem is not None:
            self._log_fallback(self.problem)
        return merged, files

    def _tables_of_source(
        self, wanted: Wanted | None, *, files: bool = True
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        assert self.source is not None
        secs = self.run.options.timeouts.service_secs
        ask = functools.partial(self.source.tables, self.target, wanted, timeout_secs=secs)
        if self.plan is not None:
            ask = functools.partial(ask, point=self.plan.point)
        return ask() if files else ask(files=False)

    def _files(self, merged: RestoredTables) -> StepFiles | None:
        """The source's files other than tables, with dense leaves verified and ready to restore."""
        if merged.files is None:
            return None
        shown, dense = self.target.step_dir.name, None
        if self.target.head.dense_blocks is not None:
            values = dense_state.dense_of(merged.files, dense_state.STEP)
            if not values.values:
                raise Damaged(shown, "its dense leaves in memory", "none")
            dense = DenseFiles(values)
        files = StepFiles(merged.files, shown, dense)
        self.held.callback(files.close)
        if self.target.layout.dense:
            files.folder(naming.DENSE_ITEM)
        return files

    def _read_dense_at_point(self) -> DenseRead:
        """Reads the dense leaves of a recovery point from its WAL records."""
        assert self.plan is not None
        with contextlib.closing(DenseFiles(dense_state.at_point(self.plan), fresh=True)) as files:
            return self._read_dense(files)

    def _read_dense(self, files: ItemFiles | None = None) -> DenseRead:
        if self.rows is not None or not self.target.layout.dense:
            return DenseRead({})
        if self.plan is None:
            stored_saves.check_dense(self.target)
        if self.straight is not None:
            return self.straight()
        abstract = None if self.expected is None else self.expected.dense
        return self.others.dense(self.step, abstract, files or self.files, self.chain)

    def _log_fallback(self, problem: ServiceError) -> None:
        process = coordination.process_index()
        _logger.warning(
            "process %d: reading step %d from storage: %s",
            process,
            self.step,
            problem,
            extra={"process_index": process},
        )


def _replay(plan: ReplayPlan, merged: RestoredTables, seen: SeenRows | None = None) -> None:
    """Replays WAL records onto tables from memory; ``seen`` receives their rows."""
    records = wal_rows.layers_of(plan, merged.layout)
    targets = targets_of(merged.buffers, merged.layout)
    reader.fill((), targets, records=records, seen=seen, over_parent=True)


def _service_error(error: Exception) -> ServiceError:
    """Converts any exception of a source: storage still has the step."""
    if isinstance(error, ServiceError):
        return without_frames(error)
    found = ServiceUnavailable(
        f"hot standby: expected the tables or a ServiceError, found {type(error).__name__}: "
        f"{error}; the step is read from storage"
    )
    found.__cause__ = without_frames(error)
    return found
