# SPDX-License-Identifier: Apache-2.0
"""Restores of a manager: agreement between its processes, and the state of the run afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from deltackpt import coordination, events, units
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    DamagedWal,
    DeltackptError,
    ForeignDirectory,
    NoIntactStep,
    RestoreError,
    SaveFailed,
    StorageError,
    TableSelectionError,
)
from deltackpt.format.naming import PyTree
from deltackpt.format.wal_format import Continues
from deltackpt.handlers.item_reader import OrbaxItems
from deltackpt.handlers.items import Items, restore_args
from deltackpt.outcomes import ReadRows, ReadState, Restored
from deltackpt.reading import chains, stored_dense
from deltackpt.reading.reader import Progress, RestoredTables
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.restore.placing import same_tables
from deltackpt.restore.sources import Service
from deltackpt.save import dense_layout, pending_save, tracking_audit
from deltackpt.save.branch import Clocks, Known, Reading, settled
from deltackpt.save.dense_save import DenseKeeper
from deltackpt.save.lineage import new_run
from deltackpt.session import partial
from deltackpt.session.restore_choice import FailedChoices, RestoreChoice, RestoreChooser
from deltackpt.session.restored import RestoredState, same_leaves, to_compare
from deltackpt.session.run import Run
from deltackpt.session.step_reader import RowRanges, StepReader
from deltackpt.state import tables, touch_state
from deltackpt.state.tables import Split
from deltackpt.state.touch_state import TouchState
from deltackpt.storage.ocdbt import ZARRAY

_T = TypeVar("_T")

#: How often to look again if a running trainer removes the chosen step.
_LISTINGS = 10


class RestoreArguments(NamedTuple):
    """The arguments of a restore other than what to restore."""

    template: PyTree
    items: Items | None
    progress: Progress | None
    service: Service


class Restorer:
    """Reads steps and makes them the parents of the next saves; used by one thread at a time."""

    def __init__(self, run: Run):
        """Reads nothing yet."""
        self._run = run
        self._others = OrbaxItems(run.root, run.extra)
        #: Objects of a bucket's journal that were already reported as damaged.
        self._reported: set[str] = set()
        self.chooser = RestoreChooser(run)

    def newest(self, arguments: RestoreArguments, *, wal: bool) -> Restored | None:
        """Restores the newest intact step or recovery point; see ``restore_latest``."""
        started, tried = time.perf_counter(), FailedChoices()
        choice = self.chooser.newest(tried, wal=wal)
        while choice is not None:
            began = time.perf_counter()
            self._report_lost(tried, choice.number, began)
            try:
                result = self._from_any_copy(
                    choice.step, functools.partial(self._restore, choice, arguments)
                )
            except Exception as error:
                if not isinstance(error, RestoreError) or not error.another_step_may_do:
                    self._run.emit_failure("restore", choice.number, error, began)
                    raise
                choice = self._next_choice(tried, choice, error, began, wal=wal)
            else:
                skipped = self._report_skipped(tried, result.step, began, started)
                return dataclasses.replace(result, skipped=skipped)
        self._report_lost(tried, -1, started)
        self._raise_if_none_intact(tried, started)
        return None

    def _next_choice(
        self,
        tried: FailedChoices,
        choice: RestoreChoice,
        error: RestoreError,
        began: float,
        *,
        wal: bool,
    ) -> RestoreChoice | None:
        """Returns what to try after a choice could not be read: it was removed, or is skipped."""
        step = choice.number
        # List again: if a running trainer removed the step's chain or the point's WAL records,
        # there is a successor, possibly with the same step.
        again = self.chooser.newest(tried, wal=wal)
        is_gone = again is not None and again != choice and again.number >= step
        is_removed = self.chooser.is_gone(error)
        is_gone = is_gone or is_removed or self.chooser.is_rolled_back(choice)
        # No limit if there is another choice: a trainer may remove steps faster.
        is_replaced = is_removed and again not in (None, choice)
        if is_gone and (is_replaced or len(tried.gone) < _LISTINGS):
            tried.gone.append((step, error))
            return again
        error = self.chooser.wal_damage(choice, error)
        lost = self.chooser.lost_with(tried, choice, error)
        error = _with_lost(error, lost)
        for one in lost:
            if one != choice.step:
                tried.steps.add(one)
                tried.lost_with.setdefault(one, error)
        self._run.emit_failure("skip", step, error, began)
        tried.skip(choice, error)
        if not isinstance(error, ForeignDirectory):
            what = "step" if choice.point is None else "recovery point"
            events.warn(f"{what} {step} is skipped, it is not intact: {error}")
        return self.chooser.newest(tried, wal=wal)

    def _report_skipped(
        self, tried: FailedChoices, restored: int, began: float, started: float
    ) -> tuple[tuple[int, RestoreError], ...]:
        """Reports what is newer than the restored step but not intact; returns it."""
        run = self._run
        for foreign, error in tried.skipped:
            if isinstance(error, ForeignDirectory):
                events.warn(f"step {foreign} is skipped: {error}")
        for lost, error in tried.lost:
            run.emit_failure("skip", lost, error, started)
            what = "the WAL" if lost is None else f"recovery point {lost} is skipped, the WAL"
            events.warn(f"{what} is not intact: {error}")
        unusable = {} if run.replication is None else run.replication.replicas.unusable
        newer = sorted((one for one in unusable.items() if one[0] > restored), reverse=True)
        for number, error in newer:
            run.emit_failure("skip", number, error, began, log_message=True)
        return (*newer, *tried.skipped, *tried.lost_points, *self._lost(restored))

    def _raise_if_none_intact(self, tried: FailedChoices, started: float) -> None:
        """Raises why no step was restored, unless none was ever committed."""
        run, gone = self._run, tried.gone
        skipped = [*tried.skipped, *tried.lost_points, *self._lost(-1)]
        if gone and not skipped:
            run.emit_failure("restore", gone[0][0], gone[0][1], started)
            raise gone[0][1]
        if not skipped:
            return
        if all(isinstance(error, ForeignDirectory) for _, error in skipped):
            # A backup does not help: the directory or the item is the wrong one.
            raise skipped[0][1]
        newest = skipped[0][1]
        why = str(newest)
        if isinstance(newest, Damaged):  # Its advice is to restore an older step.
            why = why.removesuffix(f"; {newest.action}")
        count = sum(not isinstance(error, DamagedWal) for _, error in skipped)
        found = f"none among {units.count(count, 'step')}" if count else "no step"
        if count < len(skipped):
            found = f"{found} and a damaged WAL"
        error = NoIntactStep(
            f"{run.root}: expected an intact step, found {found}: {why}; copy the directory back "
            "from a backup, or start again in an empty one"
        )
        run.emit_failure("restore", None, error, started)
        raise error

    def _report_lost(self, tried: FailedChoices, above: int, started: float) -> None:
        """Skips the steps above a number that a damaged save of another step has lost."""
        for step in sorted((step for step in tried.lost_with if step > above), reverse=True):
            tried.skipped.append((step, tried.lost_with.pop(step)))
            self._run.emit_failure("skip", *tried.skipped[-1], started)

    def _lost(self, above: int) -> list[tuple[int, RestoreError]]:
        """Returns steps above one that a damaged journal lost; reports all its problems."""
        run, started = self._run, time.perf_counter()

        def look() -> list[tuple[int | None, tuple[str, ...]]]:
            lost = run.root.lost_steps()
            steps = sorted((step for step in lost if step > above), reverse=True)
            reported = {id(lost[step]) for step in steps}
            others = [problem for problem in run.root.problems() if id(problem) not in reported]
            return [
                *((step, lost[step].__reduce__()[1]) for step in steps),
                *((None, problem.__reduce__()[1]) for problem in others),
            ]

        found: list[tuple[int, RestoreError]] = []
        for step, fields in run.coordinator.from_process_0("looking for what was lost", look):
            error = Damaged(*fields)
            if step is not None:
                found.append((step, error))
                events.warn(f"step {step} is skipped, since it may not be committed: {error}")
            elif error.object_name not in self._reported:
                events.warn(str(error))
            else:
                continue
            self._reported.add(error.object_name)
            run.emit_failure("skip", step, error, started)
        return found

    def restore_one(self, requested: int | RecoveryPoint, arguments: RestoreArguments) -> Restored:
        """Restores one step or recovery point; see ``CheckpointManager.restore``."""
        started = time.perf_counter()
        try:
            return self._retry_if_replaced(requested, arguments)
        except Exception as error:
            step = requested if isinstance(requested, int) else requested.step
            self._run.emit_failure("restore", step, error, started)
            raise

    def _retry_if_replaced(
        self, requested: int | RecoveryPoint, arguments: RestoreArguments
    ) -> Restored:
        """Reads what was requested; retries if another step replaced the one it replays onto.

        A recovery point then replays onto older steps if that one is damaged.
        """
        choice = self.chooser.find_requested(requested)
        damaged = set[int]()
        # A step below a recovery point may be removed, and its WAL records trimmed, while a later
        # step makes the point restorable.
        for _ in range(_LISTINGS):
            began = time.perf_counter()
            try:
                return self._from_any_copy(
                    choice.step, functools.partial(self._restore, choice, arguments)
                )
            except RestoreError as error:
                if not error.another_step_may_do:
                    raise
                again = self.chooser.find_existing(requested, damaged)
                if again is None:
                    # WAL records that are gone without a later step are lost, not trimmed.
                    newest = self._run.root.newest_step()
                    is_trimmed = newest is not None and newest >= choice.number
                    is_gone = self.chooser.is_gone(error, is_trimmed=is_trimmed)
                    if is_gone or self.chooser.is_rolled_back(choice):
                        raise self.chooser.gone_error(requested) from error
                elif again == choice and choice.point and not self.chooser.is_of_wal(error):
                    damaged.add(choice.step)
                    again = self.chooser.find_existing(requested, damaged)
                    if again is not None and len(damaged) < _LISTINGS:
                        self._run.emit_failure("skip", choice.step, error, began)
                        events.warn(f"step {choice.step} is skipped, it is not intact: {error}")
                if again is None or again == choice or len(damaged) == _LISTINGS:
                    raise
                choice = again
        raise self.chooser.gone_error(requested)

    def rows(self, step: int, ranges: RowRanges, progress: Progress | None) -> ReadRows:
        """Reads rows of tables only; see ``CheckpointManager.read``."""
        started = time.perf_counter()

        def read() -> StepReader:
            with self._read(step, None, progress, rows=ranges) as found:
                return found

        try:
            found = self._from_any_copy(step, read)
        except Exception as error:
            self._run.emit_failure("restore", step, error, started)
            raise
        merged = found.tables
        return ReadRows(
            step=step,
            tables=merged.fields,
            chain=tuple(info.save_id.step for info in merged.chain),
            bytes_read=merged.bytes_read,
            seconds=self._emit_event(step, found, started),
        )

    def state(self, step: int, template: PyTree, progress: Progress | None) -> ReadState:
        """Reads leaves by their paths; see ``CheckpointManager.read_state``."""
        return partial.read_state(self._run, step, template, self._others, self.rows, progress)

    def _from_any_copy(self, step: int, read: Callable[[], _T]) -> _T:
        """Reads a step; retries from another copy if a local copy is damaged."""
        try:
            return read()
        except (BrokenChain, Damaged):
            tiers = self._run.replication
            # With several processes, all would have to read again.
            if tiers is None or self._run.coordinator.count > 1:
                raise
            if not tiers.steps.found_damaged(step):
                raise
        return read()

    @contextlib.contextmanager
    def _read(
        self,
        step: int,
        template: PyTree | Split,
        progress: Progress | None,
        *,
        rows: RowRanges | None = None,
        service: Service = None,
        point: RecoveryPoint | None = None,
    ) -> Iterator[StepReader]:
        """Reads a step, or rows of it; its additional items can be read inside."""
        wal, others = self.chooser.pop_wal(), self._others
        found = StepReader(self._run, others, step, template, rows, service, point, wal)
        with found.held:
            found.find()
            found.load(progress)
            yield found

    def _restore(self, choice: RestoreChoice, arguments: RestoreArguments) -> Restored:
        run, started = self._run, time.perf_counter()
        step, point = choice.number, choice.point
        # A recovery point has its own items; the given arguments are for a step.
        template, items, progress, service = arguments
        items = None if point is not None else restore_args(items, run.extra, run.item)
        with self._read(choice.step, template, progress, service=service, point=point) as found:
            drawn = run.coordinator.agree("a new run", new_run())
            state, fresh = found.state(touch_state.identity_of(drawn))
            extra: dict[str, object] = {}
            if items:
                with run.coordinator.together(f"restoring items of step {step}"):
                    extra = found.items(items)
            if found.recorded is not None:
                extra = found.recorded.items_for(run.coordinator.index, run.coordinator.count)
        if not run.options.read_only:
            fresh = self._start_run_from(choice, found, state, fresh, drawn)
        merged = found.tables
        return Restored(
            step=step,
            state=state,
            touched=fresh,
            items=extra,
            chain=tuple(info.save_id.step for info in merged.chain),
            skipped=(),
            source=self._sources(merged, point),
            service_error=found.problem,
            bytes_read=merged.bytes_read,
            seconds=self._emit_event(step, found, started),
            point=point,
        )

    def _sources(self, merged: RestoredTables, point: RecoveryPoint | None) -> tuple[str, ...]:
        """Returns where each save of a chain was read, and the WAL records above it."""
        log = () if point is None or merged.point else ("wal",)
        if merged.source != "storage":
            return (merged.source,) * len(merged.chain) + log
        if (tiers := self._run.replication) is None:
            return ("directory",) * len(merged.chain) + log
        return *(tiers.steps.source_of(info.save_id) for info in merged.chain), *log

    def _emit_event(self, step: int, found: StepReader, started: float) -> float:
        """Emits the event of a restore that ends now; returns its duration in seconds."""
        now, merged = time.perf_counter(), found.tables
        event = events.RestoreEvent(
            step=step,
            process=coordination.process_index(),
            chain=tuple(info.save_id.step for info in merged.chain),
            source=merged.source,
            bytes_read=merged.bytes_read,
            find_secs=found.found_at - started,
            read_secs=found.read_at - found.found_at,
            place_secs=now - found.read_at,
            total_secs=now - started,
        )
        self._run.emit(event)
        return event.total_secs

    def _equals(self, choice: RestoreChoice, split: Split) -> bool:
        """Returns whether a state equals a step or recovery point, which is read again."""
        what = f"comparing the state with step {choice.step}"
        try:
            with self._read(choice.step, to_compare(split), None, point=choice.point) as found:
                with self._run.coordinator.together(what):
                    same = same_leaves(found.dense, split.dense)
                    same = same and same_tables(found.tables, split.fields)
        except (RestoreError, TableSelectionError):
            return False  # It was removed or damaged, or has other leaves.
        except DeltackptError:
            raise
        except Exception as error:
            raise SaveFailed(
                f"{what}: expected to read the step again, since it is already saved, found "
                f"{error!r}; nothing was saved or lost: save a later step"
            ) from error
        return all(self._run.coordinator.gather(what, same))

    def _start_run_from(
        self,
        choice: RestoreChoice,
        found: StepReader,
        state: PyTree,
        fresh: TouchState | None,
        drawn: str,
    ) -> TouchState | None:
        """Makes a restored step the parent of the next save, of the new run ``drawn``."""
        run, merged = self._run, found.tables
        continues = None
        if found.plan is not None:
            point = found.plan.point
            continues = Continues(epoch=point.epoch, save_id=point.save_id)
        # Each process may have read another chain to the step; all decide from one.
        sizes = run.coordinator.agree("what was read", [info.nbytes for info in merged.chain])
        layout = merged.layout
        if found.expected is not None and layout.has_rows_of(found.expected.layout):
            # Training continues in the template's containers, which may differ.
            layout = found.expected.layout
        identity, recorded = touch_state.identity_of(drawn), found.target.head.tracking
        hashed = touch_state.next_identity(identity)
        readings = (Reading("", identity, 0),)
        sample, split = None, tables.split(state, run.choice)
        kept = merged if found.expected is None else split
        run.tracking.restored(
            kept,
            has_touch_state=bool(split.marks),
            recorded=recorded,
            identity=hashed,
        )
        if run.tracking.tracker is not None:
            readings = (*readings, Reading("", hashed, 0))
        clocks = Clocks(readings=readings)
        if not run.tracking.accepts_touch_state(recorded):
            fresh = None
        if fresh is not None:
            clocks = dataclasses.replace(clocks, windows=pending_save.clocks_of(split, ()).windows)
            if run.options.deltas.tracking_audit:
                sample = tracking_audit.sample_restored(split, fresh, run.runtime)
        known = Known(
            info=merged.chain[-1],
            path=run.local.step_dir(found.step),
            clocks=clocks,
            layout=layout,
            settled=settled(clocks, None),
            total_bytes=sum(sizes),
            chain_length=len(sizes) - 1,
            sample=sample,
            parents=tuple(info.step_dir for info in merged.chain[-2::-1]),
            replayed={} if found.recorded is None else found.recorded.rows,
            continues=continues,
        )
        restores = found.target.head.restores
        run.lineage.adopt(known, base_bytes=sizes[0], restores=restores, run=drawn)
        run.restored, run.deleted = found.step, None
        state_at = RestoredState(split, functools.partial(self._equals, choice))
        run.restored_state = run.position, state_at
        if run.dense is not None and found.recorded is None and found.expected is not None:
            self._keep_references(run.dense, found, split)
        return fresh

    def _keep_references(self, keeper: DenseKeeper, found: StepReader, split: Split) -> None:
        """Makes the dense leaves of a restored step the references of the next delta."""
        run = self._run
        # Dense leaves of a delta in Orbax's item may go with a compaction: the next are whole.
        if not split.layout.dense or not found.target.has_dense:
            return
        try:
            chain = found.chain or chains.read_chain(found.target.step_dir, run.item)
            # Read once more to be compared: what is wrong there is not taken for equal.
            described = stored_dense.open_values(
                chain, lambda key: key.endswith(f"/{ZARRAY}")
            ).values
        except (RestoreError, StorageError):
            # Damaged or removed since it was restored: the next delta holds whole leaves.
            return
        keeper.adopt(
            found.target.info.save_id,
            dense_layout.storable(split.dense),
            split.layout.dense,
            run.coordinator.index,
            {key: bytes(data) for key, data in described.items()},
            found.chunks,
        )


def _with_lost(error: RestoreError, lost: Sequence[int]) -> RestoreError:
    """Returns an error that also lists the steps that cannot be restored because of it."""
    if len(lost) < 2:
        return error
    which = f"steps {', '.join(map(str, lost))} need it"
    if isinstance(error, Damaged):
        return Damaged(error.object_name, error.expected, error.found, f"{which}; {error.action}")
    return type(error)(f"{error}; {which}")
