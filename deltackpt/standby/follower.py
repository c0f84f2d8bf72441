# SPDX-License-Identifier: Apache-2.0
"""Follower: the newest committed state of some rows, merged in memory; a warm standby. No ray.

It starts cold from a base and its deltas, and applies each further delta as it is committed. What a
save holds is read, verified and decoded first; only then does the memory change, for as long as
copying the rows takes, so that a damaged save changes nothing. A new base of the same tables is
compared with what is held, and changes only the rows that differ.

A reader on the same machine keeps what it has mapped (``standby.memory``). The next change then
goes to a copy, once after each such restore, and the old memory is the reader's. With the rows it
holds the step's other files (``standby.files``), so that the whole step can be had from memory.

Source of the standing service that is fed by deltas: "Continuous checkpointing of deep learning
recommendation models" (thesis), where a loading process applies streamed rows to a copy in memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

from deltackpt.errors import (
    RestoreError,
    ServiceUnavailable,
    StepGone,
    StorageError,
    TooLittleMemory,
    without_frames,
)
from deltackpt.format import names
from deltackpt.format.blocks import RowBlock
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import Layout, SaveId
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import merge, reader, saves
from deltackpt.reading.merge import Target
from deltackpt.reading.reader import Read
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.targets import Targets
from deltackpt.resources.memory import available_bytes
from deltackpt.standby import files, shards
from deltackpt.standby.difference import changed_rows
from deltackpt.standby.files import HeldFiles
from deltackpt.standby.gate import Gate
from deltackpt.standby.memory import MemoryAddress, SharedMemory
from deltackpt.storage.store import FileStore, Spot, Stamp

#: Rows of a save that wait for the memory to change, as a share of it; more change it in pieces.
_STAGING_SHARE, _LEAST_STAGING_BYTES = 1 / 8, 64 << 20
#: So long a step that is not intact is not read again: it may be in the middle of being copied.
_REFUSED_SECS = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """A state that is held.

    Attributes:
      chain: the saves that it was merged from, base first.
      layout: its tables.
      sequence: of the memory while it holds this state.
      lag_secs: how long after the commit of the newest save it was there.
      files: of the newest save, beside its tables; None where it has none that are covered by
        digests, or they do not fit.
    """

    chain: tuple[SaveInfo, ...]
    layout: Layout
    sequence: int
    lag_secs: float
    files: HeldFiles | None

    @property
    def save(self) -> SaveInfo:
        """The newest of its saves."""
        return self.chain[-1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Tables:
    """Memory for the rows of a layout."""

    layout: Layout
    memory: SharedMemory
    targets: Targets

    @property
    def staging_bytes(self) -> int:
        return max(_LEAST_STAGING_BYTES, int(self.memory.nbytes * _STAGING_SHARE))


#: What tells a step's directory from another one that has the same name later.
_Stamp = tuple[str, Stamp]


class Follower:
    """Holds one shard's rows of the newest intact step of a directory.

    One thread calls ``advance``; the others may be called by any.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        item: str,
        shard: int = 0,
        shards: int = 1,
        memory_bytes: int | None = None,
        endpoint: str | None = None,
    ):
        """Opens a directory, read-only; nothing is loaded yet.

        Args:
          directory: root of the steps: a path, or the URL of a bucket.
          item: name of our item in a step.
          shard: which part of the rows of each table to hold.
          shards: of how many.
          memory_bytes: most memory to take; what the machine has by default.
          endpoint: address of the server of a bucket, where it is not the service's own.

        Raises:
          StorageError, ForeignDirectory, UnsupportedRoot: the directory cannot be used.
        """
        self._root = open_steps(directory, item=item, endpoint=endpoint)
        self._item, self._shard, self._shards = item, shard, shards
        self._memory_bytes = memory_bytes
        self._gate = Gate()
        self._tables: _Tables | None = None
        self._holding: Holding | None = None
        self._seen: _Stamp | None = None
        #: What was wrong with steps, and when they are looked at again, on the monotonic clock.
        self._refused: dict[_Stamp, tuple[float, RestoreError]] = {}
        self._health = "starting"

    @property
    def holding(self) -> Holding | None:
        """What it holds; None before the first load, and while one is under way."""
        return self._holding

    @property
    def health(self) -> str:
        """What it does, or what is wrong, in words."""
        return self._health

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that holds the rows."""
        tables = self._tables
        return 0 if tables is None else tables.memory.nbytes

    @property
    def place(self) -> MemoryAddress | None:
        """Where processes of the same machine find the memory."""
        tables = self._tables
        return None if tables is None else tables.memory.place

    def advance(self) -> bool:
        """Looks at the directory once, and takes what is new.

        Returns:
          Whether another state is held than before.

        Raises:
          RestoreError: no step is intact.
          TooLittleMemory: the rows do not fit.
          StorageError: the directory cannot be read.
        """
        failure: RestoreError | None = None
        steps = sorted(self._root.steps(), reverse=True)
        self._refused = {
            stamp: found for stamp, found in self._refused.items() if int(stamp[0]) in steps
        }
        for step in steps:
            step_dir = self._root.at(step)
            found = step_dir.stamp()
            if found is None:
                continue
            stamp = str(step), found
            if stamp == self._seen and self._holding is not None:
                self._health = "follows" if failure is None else f"follows; {failure}"
                return False
            until, problem = self._refused.get(stamp, (0.0, None))
            if problem is not None and time.monotonic() < until:
                failure = failure or problem
                continue
            try:
                with saves.standing(step_dir):
                    taken = self._take(step_dir)
            except StepGone as error:
                failure = failure or without_frames(error)
                continue
            except RestoreError as error:
                self._refused[stamp] = time.monotonic() + _REFUSED_SECS, without_frames(error)
                failure = failure or error
                continue
            self._seen = stamp
            self._health = "follows" if failure is None else f"follows; {failure}"
            return taken
        if failure is not None:
            raise failure
        self._health = "waits for a first step"
        return False

    def newest_step(self) -> int | None:
        """Newest committed step on disk, None where there is none."""
        return self._root.newest_step()

    def pin(self, save_id: SaveId, timeout_secs: float) -> tuple[int, Holding]:
        """Keeps a state for ``gate.PIN_SECS``, or until ``unpin``.

        Memory that is mapped meanwhile by a reader on this machine is left to it.

        Raises:
          ServiceUnavailable: it is not held, and was not within the timeout; ``found`` in the
            message says what is.
        """
        pin = self._gate.pin(timeout_secs)
        holding = self._holding
        if pin is not None and holding is not None and holding.save.save_id == save_id:
            assert self._tables is not None
            self._tables.memory.hand_over()
            return pin, holding
        if pin is not None:
            self._gate.unpin(pin)
        found = self._health if holding is None else f"save id {holding.save.save_id}"
        raise ServiceUnavailable(
            f"shard {self._shard} of {self._shards}: expected it to hold save id {save_id}, found "
            f"{found}; restore from storage, or wait"
        )

    def renew(self, pin: int) -> bool:
        """Keeps a pinned state longer; False where it is kept no more."""
        return self._gate.renew(pin)

    def unpin(self, pin: int) -> None:
        """Lets a pinned state go."""
        self._gate.unpin(pin)

    def read(self, pin: int, group: str, field: str, start: int, stop: int) -> np.ndarray:
        """A copy of some virtual rows of a pinned state.

        Raises:
          ServiceUnavailable: the pin has ended, or the rows are another shard's.
        """
        if self._gate.renew(pin):
            assert self._tables is not None
            for target in self._tables.targets.all:
                first, last = target.rows
                if (target.group, target.field) == (group, field) and first <= start:
                    if stop <= last:
                        rows = target.buffer[start - first : stop - first].copy()
                        # This thread may have slept for longer than the pin lasts.
                        if self._gate.renew(pin):
                            return rows
        raise ServiceUnavailable(
            f"shard {self._shard} of {self._shards}: expected a pinned state with rows [{start}, "
            f"{stop}) of {group}.{field}, found none; restore from storage"
        )

    def read_file(self, pin: int, name: str, start: int, stop: int) -> np.ndarray:
        """A copy of some bytes of a file of a pinned state.

        Raises:
          ServiceUnavailable: the pin has ended, or there is no such file.
        """
        holding = self._holding if self._gate.renew(pin) else None
        if holding is not None and holding.files is not None:
            for file in holding.files.index:
                if file.name == name:
                    data = holding.files.array(file)[start:stop].copy()
                    if self._gate.renew(pin):
                        return data
        raise ServiceUnavailable(
            f"shard {self._shard} of {self._shards}: expected a pinned state with the file {name}, "
            "found none; restore from storage"
        )

    def _take(self, step_dir: Spot) -> bool:
        """Makes a step the state that is held; False where it is that already."""
        newest = saves.read_save(step_dir, self._item)
        held = self._holding
        if held is not None and held.save.save_id == newest.info.save_id:
            return False
        beside = files.read(newest, self._bytes_beside(newest.layout))
        try:
            self._take_save(newest, beside)
        except BaseException:
            if beside is not None:
                beside.close()
            raise
        return True

    def _bytes_beside(self, layout: Layout) -> int:
        """How much memory may be taken for what is no row."""
        regions = shards.regions(layout, self._shard, self._shards)
        if self._memory_bytes is None:
            wanted = 0 if self._tables is not None else _needed(shards.nbytes(regions))
            return available_bytes() - wanted
        return self._memory_bytes - _needed(shards.nbytes(regions))

    def _take_save(self, newest: StoredSave, beside: HeldFiles | None) -> None:
        held, step_dir = self._holding, newest.step_dir
        further = _since(newest, held) if held is not None else None
        if held is not None and further is not None:
            try:
                self._apply(further, held.chain, beside)
                return
            except RestoreError as error:
                saves.raise_if_removed(further, error)
                base = saves.read_chain(step_dir, self._item)[0]
                if self._holding is not None and base.info.save_id.step <= held.save.save_id.step:
                    raise
                # A base was compacted meanwhile that stands for what is damaged, or nothing is
                # held any more.
        chain = saves.read_chain(step_dir, self._item)
        saves.read_whole(chain, lambda found: self._take_chain(found, beside))

    def _take_chain(self, saves: Sequence[StoredSave], beside: HeldFiles | None) -> None:
        held = self._holding
        if held is not None and held.layout == saves[-1].layout == saves[0].layout:
            self._apply(saves, (), beside)
        else:
            self._load(saves, beside)

    def _load(self, saves: Sequence[StoredSave], beside: HeldFiles | None) -> None:
        """Reads a whole chain into memory; what is held stays meanwhile where there is room."""
        newest = saves[-1]
        self._health = f"loads step {newest.info.save_id.step}"
        chain = tuple(save.info for save in saves)
        tables = self._tables
        if tables is not None and tables.layout == newest.layout:
            with self._changing(tables) as publish:
                reader.fill(saves, publish.tables.targets)
                publish(chain, newest.step_dir, beside)
            return
        tables = self._new_tables(newest.layout, previous=self.nbytes)
        try:
            reader.fill(saves, tables.targets)
        except BaseException:
            tables.memory.close()
            raise
        with self._changing(tables) as publish:
            publish(chain, newest.step_dir, beside)

    def _apply(
        self,
        saves: Sequence[StoredSave],
        before: tuple[SaveInfo, ...],
        beside: HeldFiles | None,
    ) -> None:
        """Adds saves of the same tables to what is held, and makes the last the one that is.

        Args:
          saves: oldest first.
          before: what of the held chain they go on from; nothing where the first is a base.
          beside: the files of the last.
        """
        tables = self._tables
        assert tables is not None
        chain = (*before, *(save.info for save in saves))
        if not before:
            work = [reader.pieces(save, tables.targets) for save in saves]
            reader.check_covered(saves, tables.targets, work)
        staged: list[RowBlock] = []
        staged_bytes = 0
        with contextlib.ExitStack() as stack:
            publish = None
            for number, (save, piece) in enumerate(_work(saves, tables.targets)):
                found = _found(piece, compare=save.info.kind == "base")
                staged += found
                staged_bytes += sum(one.nbytes for one in found)
                if staged_bytes <= tables.staging_bytes:
                    continue
                if publish is None:
                    # The rest does not fit beside what is held: it is verified before that
                    # begins to change, and read again.
                    for _, later in itertools.islice(
                        _work(saves, tables.targets), number + 1, None
                    ):
                        collections.deque(later.load(), maxlen=0)
                    publish = stack.enter_context(self._changing(tables))
                _merge(staged, publish.tables.targets)
                staged, staged_bytes = [], 0
            publish = publish or stack.enter_context(self._changing(tables))
            _merge(staged, publish.tables.targets)
            publish(chain, saves[-1].step_dir, beside)

    @contextlib.contextmanager
    def _changing(self, tables: _Tables) -> Iterator[_Publish]:
        """Within, the memory may change; what is published at the end is held afterwards."""
        with self._gate.writing():
            if not tables.memory.begin_write():
                # The old memory is its reader's now.
                copy = self._new_tables(tables.layout, previous=0)
                copy.memory.copy_from(tables.memory)
                tables = copy
            previous, self._tables = self._tables, tables
            self._end_holding()
            publish = _Publish(tables)
            try:
                yield publish
            finally:
                if previous is not None and previous is not tables:
                    # Only now: rows may still be compared with it.
                    previous.memory.close()
            tables.memory.end_write()
            self._holding = Holding(
                chain=publish.chain,
                layout=tables.layout,
                sequence=tables.memory.sequence,
                lag_secs=max(0.0, time.time() - publish.committed_secs),
                files=publish.beside,
            )

    def _end_holding(self) -> None:
        if self._holding is not None and self._holding.files is not None:
            self._holding.files.close()
        self._holding = None

    def _new_tables(self, layout: Layout, previous: int) -> _Tables:
        """Memory for other tables; where it does not fit beside the old one, that goes first.

        Args:
          layout: the tables.
          previous: bytes of the old one that are ours.
        """
        regions = shards.regions(layout, self._shard, self._shards)
        wanted = shards.nbytes(regions)
        limit = available_bytes() if self._memory_bytes is None else self._memory_bytes - previous
        needed = _needed(wanted)
        if limit < needed <= limit + previous:
            self._let_go()
            limit += previous
        if needed > limit:
            raise TooLittleMemory(
                f"shard {self._shard} of {self._shards}: expected {needed:,} bytes of memory for "
                f"its rows and what is on the way to them, found {max(0, limit):,}; start the "
                "service with more shards on more nodes, or with more memory"
            )
        memory = SharedMemory(wanted)
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
        return _Tables(layout, memory, Targets(targets, layout))

    def _let_go(self) -> None:
        """Gives the memory back; nothing is held afterwards."""
        with self._gate.writing():
            self._end_holding()
            previous, self._tables = self._tables, None
            if previous is not None:
                previous.memory.close()


class _Publish:
    """Called once with what the memory of ``tables``, which may be a copy, holds now."""

    def __init__(self, tables: _Tables):
        self.tables = tables
        self.chain: tuple[SaveInfo, ...] = ()
        self.committed_secs = 0.0
        self.beside: HeldFiles | None = None

    def __call__(
        self, chain: tuple[SaveInfo, ...], step_dir: Spot, beside: HeldFiles | None
    ) -> None:
        self.chain, self.beside = chain, beside
        # It may have been removed meanwhile.
        with contextlib.suppress(OSError, RestoreError, ValueError):
            if isinstance(step_dir.store, FileStore):
                # The rename that committed the step.
                self.committed_secs = os.stat(step_dir).st_ctime
            else:
                # When it was made; it came to the bucket later.
                told = json.loads((step_dir / names.STEP_METADATA).read())
                self.committed_secs = told["commit_timestamp_nsecs"] / 1e9


def _needed(wanted: int) -> int:
    """Bytes for rows and for what is on the way to them."""
    return wanted + max(_LEAST_STAGING_BYTES, int(wanted * _STAGING_SHARE))


def _since(newest: StoredSave, held: Holding) -> list[StoredSave] | None:
    """The saves after the one that is held, oldest first; None where it is none of their parents.

    Only its children may be added to what is held. A delta against an earlier save has every row
    that was touched since, but for a training that went back in memory: rows that are held may
    then be of moments that were given up. Where parents do not fit together, reading the whole
    chain will say so.
    """
    found = [newest]
    while found[-1].layout == held.layout:
        save_id, parent = found[-1].info.save_id, found[-1].info.parent
        if parent is None or parent.save_id.step >= save_id.step:
            return None
        if parent.save_id == held.save.save_id:
            return found[::-1]
        try:
            save = saves.read_save(newest.step_dir.parent / parent.step_dir, newest.item)
        except (RestoreError, StorageError):
            return None
        if save.info.save_id != parent.save_id:
            return None
        found.append(save)
    return None


def _work(saves: Sequence[StoredSave], targets: Targets) -> Iterator[tuple[StoredSave, Read]]:
    """The pieces of saves in their order; the row numbers of one save are in memory at a time."""
    for save in saves:
        for piece in reader.pieces(save, targets):
            yield save, piece


def _found(piece: Read, *, compare: bool) -> list[RowBlock]:
    """The rows of a piece, or those that differ from what is held."""
    first, *beside = piece.load()
    # What is beside replaces rows of the first block, which may be among those that differ.
    return [*(changed_rows(first, piece.targets) if compare else [first]), *beside]


def _merge(staged: Sequence[RowBlock], targets: Targets) -> None:
    for block in staged:
        field = next(iter(block.fields))
        rows = block.rows
        if not len(rows):
            continue
        reach = reader.reach(rows)
        merge.apply(block, targets.over(block.group, field, reach, block.columns))
