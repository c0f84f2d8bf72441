# SPDX-License-Identifier: Apache-2.0
"""Keeps some rows of the newest committed state merged in memory. No Ray.

A save or record is read, verified and decoded before the memory changes, so a damaged save changes
nothing. A new base of the same tables is compared with the held rows, and only different rows are
changed. If a reader on the same machine keeps its mapping (``standby.shared_memory``), the next
change is made to a copy, once per such restore.

Source of the idea of a service that is fed by deltas: "Continuous checkpointing of deep learning
recommendation models" (thesis), where a loading process applies streamed rows to a copy in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltackpt import codecs
from deltackpt.errors import (
    DamagedWal,
    RestoreError,
    ServiceUnavailable,
    TooLittleMemory,
)
from deltackpt.format import row_blocks
from deltackpt.format.manifest import Layout, SaveId, SaveInfo
from deltackpt.format.row_blocks import RowBlock, Rows
from deltackpt.layers import merge, row_indices
from deltackpt.layers.targets import Target, Targets
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import chains, reader, stored_saves, wal_rows
from deltackpt.reading.dense_state import KnownStates
from deltackpt.reading.shard_arrays import Shard, with_loaded
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint, ReplayPlan
from deltackpt.reading.wal_rows import SeenRows
from deltackpt.resources.host_memory import available_bytes
from deltackpt.standby import cached_files, loaded_state
from deltackpt.standby.cached_files import CachedFiles
from deltackpt.standby.loaded_state import (
    FieldChoice,
    Goal,
    LoadedState,
    Region,
    StateFiles,
    StateHolder,
    committed_secs,
    everything,
)
from deltackpt.standby.shared_memory import Gate, MemoryAddress, SharedMemory
from deltackpt.standby.tailer import Tailer
from deltackpt.storage.store import StorePath

if TYPE_CHECKING:
    from deltackpt.options import KafkaWal

#: Maximum size of pending rows, as a fraction of the memory; more are applied in pieces.
_STAGING_SHARE, _LEAST_STAGING_BYTES = 1 / 8, 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicaTables:
    """Memory for the rows of a layout."""

    layout: Layout
    memory: SharedMemory
    regions: tuple[Region, ...]
    targets: Targets  # The regions as targets of a merge.

    @property
    def staging_bytes(self) -> int:
        """Maximum size of rows that are decoded but not applied."""
        return max(_LEAST_STAGING_BYTES, int(self.memory.nbytes * _STAGING_SHARE))


class RowReplica(StateHolder[LoadedState]):
    """Holds one shard's rows of a step, or of a recovery point above it.

    One thread calls ``load_state``; any thread may call the other methods.
    """

    def __init__(
        self,
        tailer: Tailer,
        *,
        item: str,
        shard: int = 0,
        shards: int = 1,
        choice: FieldChoice = everything,  # The fields to hold.
        with_files: bool = True,  # For restores; else holds which rows changed.
        reader_secs: float = 0.0,  # How long a change waits for ``ReadLock``s.
        memory_bytes: int | None = None,  # None: what the machine has.
    ):
        self._tailer = tailer
        self._item, self._shard, self._shards = item, shard, shards
        self._choice, self._with_files, self._reader_secs = choice, with_files, reader_secs
        self._memory_bytes = memory_bytes
        self._dense: KnownStates = {}
        self._gate = Gate()
        self.tables: ReplicaTables | None = None
        #: What is held after the change in progress.
        self._next: LoadedState | None = None
        #: Current activity or problem.
        self.health = "starting"

    @property
    def nbytes(self) -> int:
        """Bytes of memory used for rows."""
        tables = self.tables
        return 0 if tables is None else tables.memory.nbytes

    @property
    def address(self) -> MemoryAddress | None:
        """Address of the memory for processes on the same machine."""
        tables = self.tables
        return None if tables is None else tables.memory.address

    def pin(
        self, save_id: SaveId, timeout_secs: float, point: RecoveryPoint | None = None
    ) -> tuple[int, LoadedState]:
        """Keeps a state for ``PIN_SECS``, or until ``unpin``; else raises ``ServiceUnavailable``.

        Memory that a reader on this machine has mapped is not changed. For a point, an earlier
        state onto which all records up to it can be replayed may be kept; see
        ``LoadedState.point``.
        """
        pin = self._gate.pin(timeout_secs)
        state = self.loaded
        if pin is not None and state is not None and state.serves(save_id, point):
            assert self.tables is not None
            self.tables.memory.allow_mapping()
            return pin, state
        if pin is not None:
            self._gate.unpin(pin)
        wanted = f"save id {save_id}" if point is None else f"{point} above save id {save_id}"
        found = self.health
        if state is not None:
            above = "" if state.point is None else f"{state.point} above "
            found = f"{above}save id {state.save.save_id}"
        raise ServiceUnavailable(
            f"shard {self._shard} of {self._shards}: expected it to hold {wanted}, found {found}; "
            "restore from storage, or wait"
        )

    def renew(self, pin: int) -> bool:
        """Extends a pin; returns False if it has expired."""
        return self._gate.renew(pin)

    def unpin(self, pin: int) -> None:
        """Releases a pin."""
        self._gate.unpin(pin)

    def read(self, pin: int, start: int, stop: int, *, files: bool) -> np.ndarray:
        """Returns a copy of some bytes of the rows' memory, or of the files'.

        Raises ``ServiceUnavailable`` if the pin has expired.
        """
        tables, state = self.tables, self.loaded if self._gate.renew(pin) else None
        memory = None
        if files:
            memory = None if state is None or state.files is None else state.files.memory
        elif state is not None and tables is not None:
            memory = tables.memory
        if memory is not None and 0 <= start <= stop <= memory.nbytes:
            data = memory.array(start, (stop - start,), np.dtype(np.uint8)).copy()
            # This thread may have been suspended for longer than the pin lasts.
            if self._gate.renew(pin):
                return data
        raise ServiceUnavailable(
            f"shard {self._shard} of {self._shards}: expected a pinned state with bytes [{start}, "
            f"{stop}) of its {'files' if files else 'rows'}, found none; restore from storage"
        )

    def load_state(self, step_dir: StorePath, plan: ReplayPlan | None) -> bool:
        """See ``StateReplica``: if a step needs new memory, the call loads only that step."""
        newest = stored_saves.read_save(step_dir, self._item)
        if plan is not None and plan.step != newest.info.save_id:
            raise stored_saves.gone(step_dir)
        full = None if plan is None else self._tailer.full(plan)
        goal = Goal(save=newest, plan=plan, full=full)
        held = self.loaded
        if held is not None and held.is_at(goal.save_id, goal.point):
            return False
        newer = None
        if held is not None:
            newer = self._updates_since(goal, held.save.save_id, held.point, held.layout)
        if held is not None and newer is not None:
            try:
                if self._apply(newer[0], held.chain, newer[1], goal):
                    return True
            except DamagedWal:
                raise
            except RestoreError as error:
                chains.raise_if_removed(newer[0], error)
                base = chains.read_chain(step_dir, self._item)[0]
                if self.loaded is not None and base.info.save_id.step <= held.save.save_id.step:
                    raise
                # A base that replaces the damaged part was compacted concurrently, or nothing is
                # held.
        chain = chains.read_chain(step_dir, self._item)
        chains.read_whole(chain, lambda found: self._load(found, goal))
        return True

    def changed_between(
        self,
        step_dir: StorePath,
        save_id: SaveId,
        point: RecoveryPoint | None,
        before: SaveId,
        before_point: RecoveryPoint | None,
    ) -> dict[str, np.ndarray] | None:
        """Returns the held rows that may differ between two states, from row indices only.

        By table, int64 ascending; None if the newer state does not continue the older one, or is
        not available any more.
        """
        tables, newest = self.tables, stored_saves.read_save(step_dir, self._item)
        plan = None if point is None else self._tailer.plan_to(point, save_id)
        replaced = newest.info.save_id != save_id or (plan is None) != (point is None)
        if tables is None or newest.layout != tables.layout or replaced:
            return None
        goal = Goal(save=newest, plan=plan, full=None)
        found = self._updates_since(goal, before, before_point, tables.layout)
        if found is None:
            return None
        newer, rest = found
        if newer and (parent := newer[0].info.parent) is not None:
            held = stored_saves.read_save(step_dir.parent / parent.step_dir, self._item)
            if (held.info.save_id, held.layout) != (before, tables.layout):
                return None  # A table has grown, so this shard had other rows.
        records = [] if rest is None else wal_rows.layers_of(rest, tables.layout)
        if (
            newer
            and before_point is not None
            and not self._is_chain_lossless(newest, before_point.epoch, tables)
        ):
            # Rows of the older records may be in no later delta; the step has other bits for them.
            passed = self._tailer.plan_to(before_point, before)
            if passed is None:
                return None
            records += wal_rows.layers_of(passed, tables.layout)
        changed = ChangedRows()
        for of_save in (*reader.layers_of(newer, tables.targets), *records):
            for layer in of_save:
                for segment in layer.segments:
                    stored = row_indices.stored_rows(layer, segment, tables.targets)
                    if stored is not None:
                        changed.add(segment.group, stored.rows)
        return changed.by_table(tables.regions)

    def _is_chain_lossless(self, save: StoredSave, epoch: int, tables: ReplicaTables) -> bool:
        """Returns whether a step's chain and the remaining records of an epoch are lossless."""
        records = self._tailer.records(epoch)
        chain = chains.read_chain(save.step_dir, self._item)
        of_records = [[wal_rows.rows_of(one, tables.layout)] for one in records]
        of_saves = reader.layers_of(chain, tables.targets)
        # If no record remains, the codec of the removed records is unknown.
        return bool(records) and _are_lossless([*of_saves, *of_records])

    def _updates_since(
        self, goal: Goal, held: SaveId, point: RecoveryPoint | None, layout: Layout
    ) -> tuple[list[StoredSave], ReplayPlan | None] | None:
        """Returns the saves and records to apply to the held state; None if it must be reloaded."""
        newer = chains.since(goal.save, held, layout)
        if newer is None or point is None:
            return None if newer is None else (newer, goal.plan)
        rest = None if goal.plan is None else goal.plan.after(point)
        if rest is not None:
            # Above another step, all its records are applied: their rows may have other bits.
            return newer, goal.plan if newer else rest
        if newer and self._tailer.leads_to(goal.save_id, point):
            return newer, goal.plan
        return None

    def _load(self, chain: Sequence[StoredSave], goal: Goal) -> None:
        """Loads a complete chain, base first; the step alone if it needs other memory."""
        if self.tables is not None and self.tables.layout == chain[-1].layout == chain[0].layout:
            # Also after a change that failed: rows are compared with what the memory has.
            self._apply(chain, (), goal.plan, goal)
            return
        goal = Goal(save=goal.save, plan=None, full=None)
        self.health = f"loads step {goal.save_id.step}"
        with self._state_files(goal) as state_files:
            # The held state is kept until the new one is loaded, if there is room.
            tables = self._new_tables(goal.save.layout, previous=self.nbytes)
            try:
                reader.fill(chain, tables.targets)
                lossless = _are_lossless(reader.layers_of(chain, tables.targets))
            except BaseException:
                tables.memory.close()
                raise
            with self._changing(tables):
                infos = tuple(save.info for save in chain)
                self._publish(infos, goal, state_files.files, lossless=lossless)

    def _apply(
        self,
        newer: Sequence[StoredSave],
        before: tuple[SaveInfo, ...],
        plan: ReplayPlan | None,
        goal: Goal,
    ) -> bool:
        """Applies saves and then records to the held state; False if that would change bits."""
        # False changes nothing: rows of records would remain with other bits than in the saves.
        # The saves extend ``before``, a part of the held chain; it is empty if the first is a base.
        tables, held = self.tables, self.loaded
        assert tables is not None
        of_saves = with_loaded(reader.layers_of(newer, tables.targets), tables.targets)
        if not before:
            reader.check_covered(newer[0], of_saves[0], tables.targets)
        records = with_loaded(() if plan is None else wal_rows.layers_of(plan, tables.layout))
        seen, new_rows = SeenRows(tables.layout), SeenRows(tables.layout)
        lossless = _are_lossless([*of_saves, *records]) and (
            not before or (held is not None and held.lossless)
        )
        # The WAL may contain rows that were not touched, whose bits a lossy codec changes.
        to_go = None if lossless or not (before and newer) else held and held.replayed

        def rows(seen: SeenRows) -> Iterator[list[RowBlock]]:
            """Yields the new rows in the order to apply them; at the end, all are verified."""
            indices = wal_rows.all_rows(seen)
            with wal_rows.verified(records):
                for stage in merge.plan([*of_saves, *records], tables.targets, indices):
                    for piece in stage:
                        found = piece.load()
                        if not before and all(
                            one.field.layer in of_saves[0] for one in piece.sections
                        ):
                            # Raw rows beside the first block may replace rows that do not differ.
                            found[:1] = _different(found[0], piece.targets)
                        if to_go is not None and not piece.sections[0].field.spec.always:
                            for block in found:
                                new_rows.add(block.group, block.rows)
                        yield found

        staged: list[RowBlock] = []
        staged_bytes = 0
        changed = None if self._with_files else ChangedRows()
        with contextlib.ExitStack() as stack:
            state_files = stack.enter_context(self._state_files(goal, newer if before else ()))
            changing = None
            for number, found in enumerate(rows(seen)):
                if changed is not None:
                    for block in found:
                        changed.add(block.group, block.rows)
                staged += found
                staged_bytes += sum(one.nbytes for one in found)
                if staged_bytes <= tables.staging_bytes:
                    continue
                if changing is None:
                    # The rest does not fit next to the held rows: it is verified first, and read
                    # again.
                    for _ in itertools.islice(rows(SeenRows(tables.layout)), number + 1, None):
                        pass
                    if to_go is not None and not new_rows.covers(to_go, tables.targets):
                        return False
                    changing = stack.enter_context(self._changing(tables, state_files.files))
                _merge(staged, changing.targets)
                staged, staged_bytes = [], 0
            if changing is None and to_go is not None:
                if not new_rows.covers(to_go, tables.targets):
                    return False
            if held is not None and held.replayed is not None and plan is not goal.plan:
                seen.update(held.replayed)
            state_files.complete(seen, tables.layout)
            # If nothing is held, readers have rows of an earlier state.
            by_table = None
            if changed is not None and held is not None:
                by_table = changed.by_table(tables.regions)
            if changing is None:
                changing = stack.enter_context(self._changing(tables, state_files.files))
            _merge(staged, changing.targets)
            chain, files = (*before, *(save.info for save in newer)), state_files.files
            self._publish(chain, goal, files, seen, lossless=lossless, changed=by_table)
        return True

    @contextlib.contextmanager
    def _state_files(self, goal: Goal, newer: Sequence[StoredSave] = ()) -> Iterator[StateFiles]:
        """Reads files other than tables; keeps those held in the end, and releases the others."""
        held, most_bytes = self.loaded, self._file_budget(goal.save.layout)
        files = None
        if not self._with_files:
            goal = dataclasses.replace(goal, full=None)
        elif held is not None and held.shares_files_with(goal):
            files = held.files
        elif goal.full is None:
            before = None if held is None or held.files_of is not None else held.files
            files = cached_files.read(goal.save, most_bytes, before, newer)
        state_files = StateFiles(goal, files, most_bytes, self._dense)
        try:
            yield state_files
        finally:
            held = self.loaded
            if state_files.files is not None and (
                held is None or held.files is not state_files.files
            ):
                state_files.files.memory.close()

    def _file_budget(self, layout: Layout) -> int:
        """Memory available for everything except rows."""
        regions = loaded_state.regions(layout, self._shard, self._shards, self._choice)
        if self._memory_bytes is None:
            wanted = 0 if self.tables is not None else _needed(loaded_state.nbytes(regions))
            return available_bytes() - wanted
        return self._memory_bytes - _needed(loaded_state.nbytes(regions))

    @contextlib.contextmanager
    def _changing(
        self, tables: ReplicaTables, kept: CachedFiles | None = None
    ) -> Iterator[ReplicaTables]:
        """Lets memory with the held rows change in the context, which calls ``_publish`` last."""
        with self._gate.writing():
            if not tables.memory.start_write():
                # The old memory belongs to its reader now.
                copy = self._new_tables(tables.layout, previous=0)
                copy.memory.copy_from(tables.memory)
                tables = copy
            previous, self.tables = self.tables, tables
            self._end_loaded(kept)
            try:
                yield tables
            finally:
                if previous is not None and previous is not tables:
                    # Only now: rows may still be compared with it.
                    previous.memory.close()
            tables.memory.end_write()
            assert self._next is not None
            lag_secs, sequence = time.time() - self._next.unix_secs, tables.memory.sequence
            self.loaded = dataclasses.replace(
                self._next, sequence=sequence, lag_secs=max(0.0, lag_secs)
            )
            self._next = None

    def _publish(
        self,
        chain: tuple[SaveInfo, ...],
        goal: Goal,
        files: CachedFiles | None,
        replayed: SeenRows | None = None,
        *,
        lossless: bool,
        changed: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Describes the new contents of the memory; see ``LoadedState``."""
        self._next = LoadedState(
            save=chain[-1],
            layout=goal.save.layout,
            chain=chain,
            point=goal.point,
            files=files,
            files_of=goal.files_of,
            replayed=None if goal.plan is None else replayed,
            lossless=lossless,
            changed=changed,
            unix_secs=committed_secs(goal.save) if goal.point is None else goal.point.unix_secs,
        )

    def _end_loaded(self, kept: CachedFiles | None = None) -> None:
        held = None if self.loaded is None else self.loaded.files
        if held is not None and held is not kept:
            held.memory.close()
        self.loaded = None

    def _new_tables(self, layout: Layout, previous: int) -> ReplicaTables:
        """Allocates memory for other tables; releases the old one first if both do not fit."""
        regions = loaded_state.regions(layout, self._shard, self._shards, self._choice)
        wanted = loaded_state.nbytes(regions)
        # ``previous``: bytes of the old memory that this process owns.
        limit = available_bytes() if self._memory_bytes is None else self._memory_bytes - previous
        needed = _needed(wanted)
        if limit < needed <= limit + previous:
            self._release_memory()
            limit += previous
        if needed > limit:
            raise TooLittleMemory(
                f"shard {self._shard} of {self._shards}: expected {needed:,} bytes of memory for "
                f"its rows and pending data, found {max(0, limit):,}; start the "
                "service with more shards on more nodes, or with more memory"
            )
        memory = SharedMemory(wanted, reader_secs=self._reader_secs)
        targets = [
            Target(
                group=region.group,
                field=region.field,
                rows=region.rows,
                columns=region.columns,
                buffer=memory.array(
                    region.offset,
                    (region.rows[1] - region.rows[0], *region.trailing),
                    region.dtype,
                ),
            )
            for region in regions
        ]
        return ReplicaTables(layout, memory, regions, Targets(targets))

    def _release_memory(self) -> None:
        """Releases the memory; nothing is held afterwards."""
        with self._gate.writing():
            self._end_loaded()
            previous, self.tables = self.tables, None
            if previous is not None:
                previous.memory.free()


class Follower(RowReplica):
    """Holds one shard's rows of a directory's newest intact step or recovery point.

    One thread calls ``advance``; any thread may call the other methods.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        item: str,
        shard: int = 0,
        shards: int = 1,
        memory_bytes: int | None = None,
        endpoint: str | None = None,  # URL of the bucket's server; None for the provider's.
        wal: KafkaWal | None = None,  # Reads WAL records in Kafka.
        soft: bool = True,  # Also apply records without dense leaves, soon above a full point.
    ):
        self._root = open_steps(directory, item=item, endpoint=endpoint, wal=wal, follow=True)
        tailer = Tailer(self._root, item, soft=soft)
        super().__init__(tailer, item=item, shard=shard, shards=shards, memory_bytes=memory_bytes)

    def advance(self) -> bool:
        """Polls once and applies new saves and records; returns whether the state has changed."""
        is_changed = self._tailer.load_newest(self)
        problem = self._tailer.problem
        if is_changed is None:
            self.health = "waiting for a first step"
        else:
            self.health = "follows" if problem is None else f"follows; {problem}"
        return bool(is_changed)

    def newest_step(self) -> int | None:
        """Newest committed step on disk, or None."""
        return self._root.newest_step()


class ChangedRows:
    """Rows of saves and records, by group."""

    def __init__(self) -> None:
        self._rows: dict[str, list[np.ndarray]] = {}

    def add(self, group: str, rows: Rows) -> None:
        """Adds some virtual rows of a group."""
        if len(rows):
            self._rows.setdefault(group, []).append(np.asarray(rows))

    def by_table(self, regions: Iterable[Region]) -> dict[str, np.ndarray]:
        """Returns the name of each table with regions to its rows in the set, int64, ascending."""
        rows = {group: row_blocks.union_of(chunks) for group, chunks in self._rows.items()}
        none = np.empty(0, np.int64)
        found: dict[str, np.ndarray] = {}
        for region in regions:
            of_group = rows.get(region.group, none)
            chunk = of_group[slice(*np.searchsorted(of_group, region.rows))]
            found[region.table.name] = chunk - region.table.offset
        return found


def _needed(wanted: int) -> int:
    """Bytes for rows and pending data."""
    return wanted + max(_LEAST_STAGING_BYTES, int(wanted * _STAGING_SHARE))


def _are_lossless(layers: Iterable[Sequence[Shard]]) -> bool:
    """Returns whether layers contain all their rows bit for bit."""
    return all(
        codecs.is_lossless(
            codecs.parse_codec(segment.spec(layer.groups[segment.group], field).codec)
        )
        for of_save in layers
        for layer in of_save
        for segment in layer.segments
        for field in segment.fields
    )


def _different(block: RowBlock, targets: Iterable[Target]) -> list[RowBlock]:
    """Returns the rows of a block whose bits differ from the held ones."""
    found, [(field, values)] = [], block.fields.items()
    for target in targets:
        chosen, columns = row_blocks.row_slice(block.rows, *target.rows), block.columns
        if chosen.start == chosen.stop:
            continue
        rows, new = block.rows[chosen], values[chosen]
        first, stop = row_blocks.reach(rows)
        old = target.buffer[first - target.rows[0] : stop - target.rows[0]]
        if len(old) != len(rows):
            old = old[np.asarray(rows) - first]
        # Rows with one column may have no column axis.
        if target.columns is not None and target.columns != columns:
            low, high = columns = row_blocks.common(target.columns, block.columns)
            new = new[:, low - block.columns[0] : high - block.columns[0]]
            old = old[:, low - target.columns[0] : high - target.columns[0]]
        differ = np.flatnonzero((_bits(new) != _bits(old)).any(axis=1))
        if len(differ):
            rows = np.asarray(rows)[differ]
            found.append(RowBlock(block.group, rows, columns, {field: new[differ]}))
    return found


def _bits(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)


def _merge(staged: Sequence[RowBlock], targets: Targets) -> None:
    for block in staged:
        field = next(iter(block.fields))
        rows = block.rows
        if not len(rows):
            continue
        reach = row_blocks.reach(rows)
        merge.apply(block, targets.over(block.group, field, reach, block.columns))
