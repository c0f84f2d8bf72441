# SPDX-License-Identifier: Apache-2.0
"""Restores of a manager: what its processes agree on, and what the run goes on from afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

from deltackpt import events, processes
from deltackpt.errors import (
    BrokenChain,
    Damaged,
    ForeignDirectory,
    NoIntactStep,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
)
from deltackpt.format.manifest import SaveId
from deltackpt.format.stretches import Continues
from deltackpt.handlers import dense, partial
from deltackpt.handlers.choosing import Choice, Chooser, Tried
from deltackpt.handlers.items import restore_args
from deltackpt.handlers.reading import OrbaxItems
from deltackpt.handlers.run import Run
from deltackpt.outcomes import ReadRows, ReadState, Restored
from deltackpt.reading import chains, dense_values
from deltackpt.reading.reader import Progress, RestoredTables
from deltackpt.reading.stretches import LogPoint
from deltackpt.restore import steps
from deltackpt.restore.steps import Found, Items, Loaded, RowRanges, Service, StepReader
from deltackpt.save import proof, snapshot
from deltackpt.save.dense_blocks import DenseKeeper
from deltackpt.save.lineage import Clocks, Reading, new_run
from deltackpt.state import tables, touch_state
from deltackpt.state.touch_state import TouchState
from deltackpt.storage.ocdbt import ZARRAY

_T = TypeVar("_T")

#: How often steps that a trainer removes meanwhile are followed by others.
_LISTINGS = 10


class Restorer:
    """Reads steps, and makes them what the run goes on from; used by one thread at a time."""

    def __init__(self, run: Run, extra: dict[str, Any]):
        """Reads nothing yet.

        Args:
          run: the manager's run.
          extra: handlers of further items, by name.
        """
        self._run = run
        self._extra = extra
        self._chooser = Chooser(run)
        limits = run.options.timeouts
        self._steps = StepReader(
            run.root,
            run.item,
            run.choice,
            others=OrbaxItems(run.root, extra),
            share=(run.among.index, run.among.count),
            service_secs=limits.service_secs,
        )

    def newest(
        self,
        template: Any,
        items: Items | None,
        progress: Progress | None,
        service: Service,
        *,
        log: bool,
    ) -> Restored | None:
        """The newest intact step, or point; as ``CheckpointManager.restore_latest``."""
        run, started = self._run, time.perf_counter()
        tried = Tried()
        choice = self._chooser.newest(tried, log=log)
        while choice is not None:
            began, step = time.perf_counter(), choice.number
            try:
                result = self._from_any_copy(
                    choice.step,
                    lambda choice=choice: self._restore(choice, template, items, progress, service),
                )
            except Exception as error:
                if not isinstance(error, RestoreError) or not error.another_step_may_do:
                    run.tell_failure("restore", step, error, began)
                    raise
                # Listed anew: beside a trainer, what goes while it is read has a successor, which
                # may have its number. Of a point it is the marks that go, of a step its chain.
                again = self._chooser.newest(tried, log=log)
                succeeded = again is not None and again != choice and again.number >= step
                if (succeeded or _is_gone(error)) and len(tried.gone) < _LISTINGS:
                    tried.gone.append((step, error))
                    choice = again
                    continue
                run.tell_failure("skip", step, error, began)
                tried.skip(choice, error)
                if not isinstance(error, ForeignDirectory):
                    what = "step" if choice.point is None else "point"
                    events.warn(f"{what} {step} is skipped, it is not intact: {error}")
                choice = self._chooser.newest(tried, log=log)
                continue
            for foreign, error in tried.skipped:
                if isinstance(error, ForeignDirectory):
                    events.warn(f"step {foreign} is skipped: {error}")
            return dataclasses.replace(result, skipped=tuple(tried.skipped))
        gone, skipped = tried.gone, tried.skipped
        if gone and not skipped:
            run.tell_failure("restore", gone[0][0], gone[0][1], started)
            raise gone[0][1]
        if not skipped:
            return None
        if all(isinstance(error, ForeignDirectory) for _, error in skipped):
            # No copy of the directory helps: it is another one, or the item is.
            raise skipped[0][1]
        error = NoIntactStep(
            f"{run.root}: expected an intact step, found {len(skipped)} steps and "
            f"none intact, the newest because {skipped[0][1]}; copy the directory back "
            "from a backup, or start again in an empty one"
        )
        run.tell_failure("restore", None, error, started)
        raise error

    def one(
        self,
        asked: int | LogPoint,
        template: Any,
        items: Items | None,
        progress: Progress | None,
        service: Service,
    ) -> Restored:
        """One step, or point; as ``CheckpointManager.restore``."""
        started = time.perf_counter()
        step = asked if isinstance(asked, int) else asked.step
        try:
            return self._while_it_stands(
                asked, lambda choice: self._restore(choice, template, items, progress, service)
            )
        except Exception as error:
            self._run.tell_failure("restore", step, error, started)
            raise

    def _while_it_stands(
        self, asked: int | LogPoint, read: Callable[[Choice], Restored]
    ) -> Restored:
        """Reads what was asked for; anew where another way to it has taken the place of the first.

        A step under a point may be removed, and its marks trimmed, while a later step leads there.

        Raises:
          StepNotFound: there is no such step, or point.
          StepGone: it went while it was read.
        """
        choice = self._chooser.asked(asked)
        for _ in range(_LISTINGS):
            try:
                return self._from_any_copy(choice.step, lambda choice=choice: read(choice))
            except RestoreError as error:
                if not error.another_step_may_do:
                    raise
                again = self._chooser.found(asked)
                if again is None:
                    # Marks that went without a later step are lost, and not trimmed.
                    newest = self._run.root.newest_step()
                    if _is_gone(error) or (newest is not None and newest >= choice.number):
                        raise self._chooser.went(asked) from error
                if again is None or again == choice:
                    raise
                choice = again
        raise self._chooser.went(asked)

    def points(self) -> list[LogPoint]:
        """As ``CheckpointManager.points``."""
        return self._chooser.points()

    def rows(self, step: int, ranges: RowRanges, progress: Progress | None) -> ReadRows:
        """Rows of tables alone; as ``CheckpointManager.read``."""
        started = time.perf_counter()

        def read() -> tuple[Loaded, float, float]:
            found, found_at = self._find(step, None, ranges, None)
            with contextlib.ExitStack() as held:
                return *self._load(found, progress, held), found_at

        try:
            loaded, read_at, found_at = self._from_any_copy(step, read)
        except Exception as error:
            self._run.tell_failure("restore", step, error, started)
            raise
        merged = loaded.tables
        seconds = self._tell(step, merged, started, found_at, read_at)
        return ReadRows(
            step=step,
            tables=merged.fields,
            chain=tuple(info.save_id.step for info in merged.chain),
            bytes_read=merged.bytes_read,
            seconds=seconds,
        )

    def state(self, step: int, template: Any, progress: Progress | None) -> ReadState:
        """Leaves by their paths; as ``CheckpointManager.read_state``."""
        run, items = self._run, OrbaxItems(self._run.root, {})
        return partial.read_state(step, template, run.root, run.item, items, self.rows, progress)

    def _from_any_copy(self, step: int, read: Callable[[], _T]) -> _T:
        """Reads a step; where a copy that is near turns out damaged, again from another one."""
        try:
            return read()
        except (BrokenChain, Damaged):
            # Of several processes all would have to read again.
            if self._run.among.count > 1 or not self._run.root.found_damaged(step):
                raise
        return read()

    def _find(
        self,
        step: int,
        template: Any,
        rows: RowRanges | None,
        service: Service,
        point: LogPoint | None = None,
    ) -> tuple[Found, float]:
        with self._run.among.together(f"finding step {step}"):
            self._run.root.await_readable(step)
            found = self._steps.find(step, template, rows, service, point)
        return found, time.perf_counter()

    def _load(
        self, found: Found, progress: Progress | None, held: contextlib.ExitStack
    ) -> tuple[Loaded, float]:
        own = dataclasses.astuple(found.target.info.save_id)
        agreed = SaveId(*self._run.among.agree("choosing a save", own))
        with self._run.among.together(f"restoring step {found.step}"):
            loaded = self._steps.load(found, agreed, progress, held)
        return loaded, time.perf_counter()

    def _restore(
        self,
        choice: Choice,
        template: Any,
        items: Items | None,
        progress: Progress | None,
        service: Service,
    ) -> Restored:
        run, started = self._run, time.perf_counter()
        step, point = choice.number, choice.point
        # A point has its own items, whatever was asked of a step.
        items = None if point is not None else restore_args(items, self._extra, run.item)
        found, found_at = self._find(choice.step, template, None, service, point)
        with contextlib.ExitStack() as held:
            loaded, read_at = self._load(found, progress, held)
            merged = loaded.tables
            drawn = run.among.agree("a new run", new_run())
            identity = touch_state.identity_of(drawn)
            state, fresh = steps.joined(template, found, loaded, identity)
            extra: dict[str, Any] = {}
            if items:
                with run.among.together(f"restoring items of step {step}"):
                    extra = self._steps.items(found, items, loaded.files)
                    found.check_stays()
            if loaded.point is not None:
                extra = loaded.point.items_for(run.among.index, run.among.count)
        if not run.options.read_only:
            self._go_on_from(found, loaded, state, fresh, drawn)
        seconds = self._tell(step, merged, started, found_at, read_at)
        return Restored(
            step=step,
            state=state,
            touched=fresh,
            items=extra,
            chain=tuple(info.save_id.step for info in merged.chain),
            skipped=(),
            source=self._sources(merged, point),
            service_error=loaded.problem,
            bytes_read=merged.bytes_read,
            seconds=seconds,
            point=point,
        )

    def _sources(self, merged: RestoredTables, point: LogPoint | None) -> tuple[str, ...]:
        """Where each save of a chain was read, and the marks above it."""
        log = () if point is None or merged.point else ("log",)
        if merged.source != "storage":
            return (merged.source,) * len(merged.chain) + log
        return *(self._run.root.source_of(info.save_id) for info in merged.chain), *log

    def _tell(
        self, step: int, merged: RestoredTables, started: float, found_at: float, read_at: float
    ) -> float:
        """Emits a restore that ends now, and says how long it took, in seconds.

        Moments are of ``time.perf_counter()``.
        """
        now = time.perf_counter()
        event = events.RestoreEvent(
            step=step,
            process=processes.index(),
            chain=tuple(info.save_id.step for info in merged.chain),
            source=merged.source,
            bytes_read=merged.bytes_read,
            find_secs=found_at - started,
            read_secs=read_at - found_at,
            place_secs=now - read_at,
            total_secs=now - started,
        )
        events.emit(event, self._run.sinks)
        return event.total_secs

    def _go_on_from(
        self,
        found: Found,
        loaded: Loaded,
        state: Any,
        fresh: TouchState | None,
        drawn: str,
    ) -> None:
        """Makes a restored step the parent of the next save, of the new run ``drawn``."""
        run, merged = self._run, loaded.tables
        continues = None
        if found.way is not None:
            point = found.way.point
            continues = Continues(stretch=point.stretch, save_id=point.save_id)
        # Each process may have read another chain to the step; all decide from one.
        sizes = run.among.agree("what was read", [info.nbytes for info in merged.chain])
        layout = merged.layout
        if found.expected is not None and layout.has_rows_of(found.expected.layout):
            # The state goes on in the template's containers, which need not be the saved ones.
            layout = found.expected.layout
        identity = touch_state.identity_of(drawn)
        clocks = Clocks(readings=(Reading("", identity, 0),))
        witness = None
        if run.tracker is not None:
            kept = merged if found.expected is None else tables.split(state, run.choice)
            run.tracker.start(kept.fields, kept.layout, identity)
        elif fresh is not None:
            split = tables.split(state, run.choice)
            clocks = dataclasses.replace(clocks, windows=snapshot.clocks_of(split, ()).windows)
            if run.options.deltas.sampled_proof:
                witness = proof.of_restored(split, fresh, run.staging)
        run.lineage.adopt(
            merged.chain[-1],
            run.held.step_dir(found.step),
            layout,
            sizes=sizes,
            clocks=clocks,
            restores=found.target.head.restores,
            run=drawn,
            witness=witness,
            parents=tuple(info.step_dir for info in merged.chain[-2::-1]),
            replayed=None if loaded.point is None else loaded.point.rows,
            continues=continues,
        )
        run.restored = found.step
        if run.dense is not None and loaded.point is None and found.expected is not None:
            self._keep_references(run.dense, found, loaded, state)

    def _keep_references(
        self, keeper: DenseKeeper, found: Found, loaded: Loaded, state: Any
    ) -> None:
        """Makes the dense leaves of a restored step the references of the next delta."""
        run = self._run
        split = tables.split(state, run.choice)
        # Orbax's item of a delta goes with its step, once that is compacted: what follows is whole.
        if not split.layout.dense or not found.target.has_dense:
            return
        try:
            chain = chains.read_chain(found.target.step_dir, run.item)
            # Read once more to be compared: what is wrong there is not taken for equal.
            described = dense_values.of_step(chain, lambda key: key.endswith(f"/{ZARRAY}")).values
        except (RestoreError, StorageError):
            # Damaged or removed since it was restored: the next delta holds whole leaves.
            return
        keeper.adopt(
            found.target.info.save_id,
            dense.storable(split.dense),
            split.layout.dense,
            run.among.index,
            {key: bytes(data) for key, data in described.items()},
            loaded.chunks,
        )


def _is_gone(error: RestoreError) -> bool:
    return isinstance(error, (StepGone, StepNotFound))
