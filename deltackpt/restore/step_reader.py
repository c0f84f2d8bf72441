# SPDX-License-Identifier: Apache-2.0
"""Reads what one process needs of a step: its tables, its dense leaves and its additional items.

An in-memory source comes before storage. An ``ItemReader`` (``handlers.item_reader`` has Orbax's)
reads dense leaves and items. The manager coordinates processes between these calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

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
from deltackpt.layers.targets import Wanted, targets_of, wanted_rows
from deltackpt.ledger.steps import Steps
from deltackpt.reading import (
    bounds,
    chains,
    dense_state,
    reader,
    stored_saves,
    wal_rows,
)
from deltackpt.reading.dense_state import RecordedState
from deltackpt.reading.reader import Progress, RestoredTables
from deltackpt.reading.stored_dense import DenseValues
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan, WalReader
from deltackpt.reading.wal_records import damage_of
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.resources.runtime import Runtime
from deltackpt.restore import placing, sources
from deltackpt.restore.sources import DenseFiles, ItemFiles, RowSource, StepFiles
from deltackpt.restore.template_check import check_template
from deltackpt.state import paths, placement, touch_state
from deltackpt.state import tables as state_tables
from deltackpt.state.tables import Split, Tables
from deltackpt.state.touch_state import TouchState
from deltackpt.tracking import stamps

_logger = logging.getLogger(__name__)

#: Table name to a half-open range of rows, None for all of them.
RowRanges = Mapping[str, tuple[int, int] | None]
#: Item name to the argument for its handler.
Items = Mapping[str, object]
#: Sources of tables to try before storage; see ``CheckpointManager.restore_latest``.
Service = RowSource | Literal["auto"] | None


class DenseRead(NamedTuple):
    """Dense leaves that were read, as nested dicts.

    ``chunks``: for leaves placed on devices, keys of Orbax's database to the (bytes,) uint8 buffers
    they were read into. The buffers must not be modified: on the CPU a leaf may alias one.
    """

    leaves: dict[str, PyTree]
    chunks: Mapping[str, np.ndarray] = types.MappingProxyType({})


class ItemReader(Protocol):
    """Reads items other than tables. All processes must make the same calls in the same order."""

    def dense(
        self,
        step: int,
        abstract: dict[str, PyTree] | None,
        files: ItemFiles | None = None,
        chain: Sequence[StoredSave] | None = None,
    ) -> DenseRead:
        """Reads the dense leaves of a committed step, with the shardings of ``abstract``.

        None reads everything as numpy arrays. All processes must call it; ``files`` replaces
        storage. ``chain`` is the step's if it is known.
        """
        ...

    def straight(
        self, step: int, abstract: dict[str, PyTree] | None, *, verify: bool = True
    ) -> Callable[[], DenseRead] | None:
        """Returns a reader of dense leaves that needs no other process.

        None if the caller must verify the files and call ``dense``. ``verify``: the reader verifies
        them.
        """
        ...

    def items(
        self, step: int, items: Items, files: ItemFiles | None = None
    ) -> Mapping[str, object]:
        """Reads additional items that a committed step holds, with all other processes."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What a restore will read.

    ``saves`` is None if ``source`` is tried first, ``problem`` why an existing source is unusable,
    ``wanted`` None for all. ``straight`` reads dense leaves without the other processes, and
    verifies them if there are no others; None if all must call ``ItemReader.dense``.
    """

    step: int
    target: StoredSave
    saves: tuple[StoredSave, ...] | None
    source: RowSource | None
    problem: ServiceError | None
    expected: Split | None
    wanted: Wanted | None
    dense: bool
    plan: ReplayPlan | None = None
    straight: Callable[[], DenseRead] | None = None

    def check_stays(self, *others: SaveId) -> None:
        """Raises ``StepGone`` if the step is another save now, or was one of ``others``."""
        if {*others} - {self.target.info.save_id}:
            raise stored_saves.gone(self.target.step_dir)
        stored_saves.check_exists(self.target)


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """The data that a restore has read; ``problem`` is why no source was used.

    ``point`` is without its dense leaves if they were read from storage.
    """

    tables: RestoredTables
    dense: dict[str, PyTree]
    chunks: Mapping[str, np.ndarray]
    problem: ServiceError | None
    files: ItemFiles | None
    point: RecordedState | None = None


class StepReader:
    """Reads the steps of a directory, on one process."""

    def __init__(
        self,
        root: Steps,
        item: str,
        choice: Tables,
        *,
        others: ItemReader,
        share: tuple[int, int],
        service_secs: float,
    ):
        """Reads nothing yet; ``share`` is this process's index and the number of readers."""
        self._root = root
        self._item = item
        self._choice = choice
        self._others = others
        self._share = share
        self._service_secs = service_secs

    def locate(
        self,
        step: int,
        template: PyTree,
        rows: RowRanges | None,
        service: Service,
        point: RecoveryPoint | None = None,
        wal: WalReader | None = None,
    ) -> Found:
        """Finds a step, its chain unless a source may provide it, and what is wanted of it.

        Checks this process's share of the step's files, unless a source may have them; dense leaves
        may be checked while they are read. ``rows`` restricts the read to these, without dense
        leaves. ``wal`` reads the WAL records of ``point``, by default all of them again.
        """
        paths.check_template(template)
        step_dir = self._root.at(step)
        with stored_saves.detect_removal(step_dir):
            source, problem = self._source(service)
            chain = None if source is not None else chains.read_chain(step_dir, self._item)
            target = stored_saves.read_save(step_dir, self._item) if chain is None else chain[-1]
            expected = template
            if template is not None and not isinstance(template, Split):
                expected = state_tables.split(template, self._choice)
            wanted = None
            if template is None and rows is None:
                bounds.check_paths(target.layout, target.name)
            if rows is not None:
                expected, wanted = None, wanted_rows(target.layout, rows)
            elif expected is not None:
                check_template(expected.layout, expected.fields, target)
                wanted = placing.wanted_of(expected.fields)
            straight = None
            if rows is None and source is None:
                alone = self._share == (0, 1)
                if point is None and target.layout.dense:
                    abstract = None if expected is None else expected.dense
                    straight = self._others.straight(step, abstract, verify=alone)
                # Several processes share the work.
                with_dense = straight is None or not alone
                self._root.check_step_files(step_dir, self._share, dense=with_dense)
        plan = None
        if point is not None:
            plan = self._plan(point, target.info.save_id, wal or WalReader(self._root.wal_location))
        dense = rows is None
        return Found(step, target, chain, source, problem, expected, wanted, dense, plan, straight)

    def _plan(self, point: RecoveryPoint, step: SaveId, wal: WalReader) -> ReplayPlan:
        found = wal.read().plan(point, step)
        if found is None:
            raise DamagedWal(
                str(self._root.wal_location),
                f"WAL records from step {step.step} to {point}",
                "some missing",
                record=point.save_id,
            )
        return found

    def load(
        self,
        found: Found,
        agreed: SaveId,
        progress: Progress | None,
        held: contextlib.ExitStack,
    ) -> Loaded:
        """Reads merged tables, and dense leaves; ``agreed`` is the save that all processes read.

        ``progress`` gets the bytes read and the total; ``held`` closes the sources of additional
        items.
        """
        with self._detect_removal(found):
            merged, files, point, problem = self._from_memory(found, held)
            if files is None and point is None and found.dense and found.source is not None:
                # ``find`` left the checks to the source, but other processes may have read from
                # storage.
                self._root.check_step_files(found.target.step_dir)
            replay_from = found.plan if point is None else None
            if point is not None and found.target.layout.dense:
                files = held.enter_context(contextlib.closing(DenseFiles(point.dense)))
            # Orbax mostly waits for its own threads, and the merge for memory.
            with Runtime() as runtime:
                read_dense = self._dense if replay_from is None else self._dense_at_point
                leaves = runtime.submit(placement.carried(read_dense), found, files)
                seen, in_memory = SeenRows(found.target.layout), merged is not None
                if merged is None:
                    chain = found.saves or chains.read_chain(found.target.step_dir, self._item)
                    merged = reader.restore_tables(
                        chain, wanted=found.wanted, progress=progress, plan=replay_from, seen=seen
                    )
                else:
                    if progress is not None:
                        progress(merged.bytes_read, merged.bytes_read)
                    if replay_from is not None:
                        _replay(replay_from, merged, seen)
                checked = [merged, *self._key_columns(found, in_memory)]
                if found.plan is None:
                    _check_keys(checked)
                    dense = leaves.result()
                else:
                    with damage_of(found.plan.last_records[0]):
                        _check_keys(checked)
                        dense = leaves.result()
                if replay_from is not None:
                    items = replay_from.items()
                    point = RecordedState(DenseValues({}, {}), items, seen.by_table())
            found.check_stays(agreed, merged.chain[-1].save_id)
        return Loaded(merged, dense.leaves, dense.chunks, problem, files, point)

    def _key_columns(self, found: Found, in_memory: bool) -> list[RestoredTables]:
        """Reads all ids of this process's share of the tables, unless it restores them anyway."""
        if not found.dense or found.wanted is None or self._share[1] == 1:
            return []
        wanted = reader.key_columns(found.target.layout, known=found.wanted, share=self._share)
        if not wanted:
            return []
        if in_memory and (columns := self._columns_in_memory(found, wanted)) is not None:
            if found.plan is not None and not columns.point:
                _replay(found.plan, columns)
            return [columns]
        chain = found.saves or chains.read_chain(found.target.step_dir, self._item)
        return [reader.restore_tables(chain, wanted=wanted, plan=found.plan)]

    def _columns_in_memory(self, found: Found, wanted: Wanted) -> RestoredTables | None:
        assert found.source is not None
        try:
            with self._tables_of(found, found.source, wanted, files=False) as columns:
                return columns
        except Exception as error:
            _log_fallback(found, _service_error(error))
            return None

    def items(self, found: Found, items: Items, files: ItemFiles | None) -> dict[str, object]:
        """Reads additional items of a step, by name, with an argument for each item's handler."""
        step_dir = found.target.step_dir
        with self._detect_removal(found):

            def has(name: str) -> bool:
                return name in files if files is not None else (step_dir / name).exists()

            missing = [name for name in items if not has(name)]
            if missing:
                raise TemplateMismatch(
                    f"{step_dir}: expected the items {', '.join(items)}, found no "
                    f"{', '.join(missing)}; restore without them"
                )
            restored = self._others.items(found.step, items, files)
            return {name: restored[name] for name in items}

    def _detect_removal(self, found: Found) -> contextlib.AbstractContextManager[None]:
        target = found.target
        save_id = target.info.save_id
        return stored_saves.detect_removal(
            target.step_dir,
            exists=lambda: stored_saves.exists(target.step_dir, save_id, self._item),
        )

    def _source(self, service: Service) -> tuple[RowSource | None, ServiceError | None]:
        """The source that a restore tries first, or why the existing one is unusable."""
        if service != "auto":
            return service, None
        try:
            return sources.find(self._root.given, self._item), None
        except Exception as error:
            return None, _service_error(error)

    def _from_memory(
        self, found: Found, held: contextlib.ExitStack
    ) -> tuple[RestoredTables | None, ItemFiles | None, RecordedState | None, ServiceError | None]:
        """Tables, and files or a complete recovery point, from the source, or why it has none."""
        problem, merged, files, point = found.problem, None, None, None
        if found.source is not None:
            try:
                with self._tables_of(found, found.source, found.wanted) as merged:
                    if found.plan is None:
                        files = self._files(found, merged, held)
                    elif merged.point and merged.files is not None:
                        point = dense_state.state_of(merged.files, merged.layout)
            except Exception as error:
                problem, merged, point = _service_error(error), None, None
        if problem is not None:
            _log_fallback(found, problem)
        return merged, files, point, problem

    def _tables_of(
        self, found: Found, source: RowSource, wanted: Wanted | None, *, files: bool = True
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        ask = functools.partial(
            source.tables, found.target, wanted, timeout_secs=self._service_secs
        )
        if found.plan is not None:
            ask = functools.partial(ask, point=found.plan.point)
        return ask() if files else ask(files=False)

    def _files(
        self, found: Found, merged: RestoredTables, held: contextlib.ExitStack
    ) -> StepFiles | None:
        """The source's files other than tables, with dense leaves verified and ready to restore."""
        if merged.files is None:
            return None
        shown, dense = found.target.step_dir.name, None
        if found.target.head.dense_blocks is not None:
            values = dense_state.dense_of(merged.files, dense_state.STEP)
            if not values.values:
                raise Damaged(shown, "its dense leaves in memory", "none")
            dense = DenseFiles(values)
        files = StepFiles(merged.files, shown, dense)
        held.callback(files.close)
        if found.target.layout.dense:
            files.folder(naming.DENSE_ITEM)
        return files

    def _dense_at_point(self, found: Found, files: ItemFiles | None) -> DenseRead:
        """Reads the dense leaves of a recovery point from its WAL records."""
        assert files is None and found.plan is not None
        values = dense_state.at_point(found.plan)
        with contextlib.closing(DenseFiles(values, fresh=True)) as files:
            return self._dense(found, files)

    def _dense(self, found: Found, files: ItemFiles | None) -> DenseRead:
        if not found.dense or not found.target.layout.dense:
            return DenseRead({})
        if found.plan is None:
            stored_saves.check_dense(found.target)
        if found.straight is not None:
            return found.straight()
        abstract = None if found.expected is None else found.expected.dense
        return self._others.dense(found.step, abstract, files, found.saves)


def _replay(plan: ReplayPlan, merged: RestoredTables, seen: SeenRows | None = None) -> None:
    """Replays WAL records onto tables from memory; ``seen`` receives their rows."""
    records = wal_rows.layers_of(plan, merged.layout)
    targets = targets_of(merged.buffers, merged.layout)
    reader.fill((), targets, records=records, seen=seen, over_parent=True)


def _check_keys(tables: Iterable[RestoredTables]) -> None:
    for one in tables:
        reader.check_keys(one)


def _log_fallback(found: Found, problem: ServiceError) -> None:
    process = coordination.process_index()
    _logger.warning(
        "process %d: reading step %d from storage: %s",
        process,
        found.step,
        problem,
        extra={"process_index": process},
    )


def joined(
    template: PyTree, found: Found, loaded: Loaded, identity: int
) -> tuple[PyTree, TouchState | None]:
    """Builds the whole state with a fresh TouchState; nested dicts and lists without a template."""
    expected, merged = found.expected, loaded.tables
    if expected is None:
        return state_tables.join(None, merged.layout, merged.fields, loaded.dense, None), None
    placed = placing.place(merged, expected.fields)
    placing.report_grown(found.step, placing.grown(merged, expected.fields))
    found_in = [touch_state.fresh(each.state, identity, traced=False) for each in expected.marks]
    known = {table for state in found_in for table in touch_state.matched(state, expected.layout)}
    others = {name: fields[VALUES] for name, fields in placed.items() if name not in known}
    if others or not found_in:
        found_in.insert(0, stamps.init(others, identity=identity))
    fresh, *more = found_in
    for state in more:
        fresh = state._replace(stamps=fresh.stamps | state.stamps)
    return state_tables.join(template, expected.layout, placed, loaded.dense, fresh), fresh


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
