# SPDX-License-Identifier: Apache-2.0
"""One restore from a service: keep a state on every member that is needed, take it, prove it whole.

What a member on this machine holds in one place is mapped, copy-on-write, and is the reader's for
good (``standby.memory``); the rest is copied. The others answer in parallel. A member that does not
answer, or that went on to another state, is replaced by another replica.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.exceptions

from deltackpt.errors import ServiceError, ServiceMismatch, ServiceUnavailable
from deltackpt.format.blocks import Box
from deltackpt.format.chain import SaveInfo
from deltackpt.reading.merge import Target
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint
from deltackpt.reading.targets import Targets, Wanted, empty_buffers
from deltackpt.resources import pages
from deltackpt.service import calls, protocol
from deltackpt.service.names import Member
from deltackpt.service.protocol import Pinned
from deltackpt.standby import gate, shards
from deltackpt.standby.files import HeldFile
from deltackpt.standby.memory import MemoryReader
from deltackpt.standby.shards import Region

#: Bytes of one copy, and of one answer of another machine.
_PIECE_BYTES = 16 << 20
#: Answers of one member on their way: they bound what Ray's object store has to hold.
_ANSWERS_IN_FLIGHT = 4
_MOST_COPIERS = 8
_SHARDS_AT_ONCE = 16
_ASK_AGAIN_SECS = 0.02


class _Copy(NamedTuple):
    """Rows of a member's region that a target wants: virtual rows ``[start, stop)``."""

    region: Region
    target: Target
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.region.row_bytes


@contextlib.contextmanager
def reading(
    save: StoredSave,
    replicas: Sequence[Sequence[Member]],
    wanted: Wanted | None,
    *,
    timeout_secs: float,
    point: LogPoint | None = None,
) -> Iterator[RestoredTables]:
    """What is wanted of a save, and the files beside its tables.

    Args:
      save: the step, as its manifest in storage says.
      replicas: of each shard the members that hold it, in the order in which to ask them.
      wanted: what to restore; by default every table and slot as a whole.
      timeout_secs: longest wait for a state to be held, and for each answer.
      point: of the log above the save, if one is restored; see ``RowSource``. Members may be at
        different marks below it.

    Raises:
      ServiceUnavailable: no replica of a shard that is needed holds the save in time.
      ServiceMismatch: a member is of another run or version.
    """
    started = time.perf_counter()
    buffers, targets = empty_buffers(save.layout, wanted)
    work = [_copies(save, shard, len(replicas), targets) for shard in range(len(replicas))]
    # Where nothing is wanted, one member still says what the save was merged from.
    needed = [shard for shard, copies in enumerate(work) if copies] or [0]
    copiers = min(_MOST_COPIERS, len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(copiers, "deltackpt-copy"))
        pins = stack.enter_context(_Pins())
        read = _Read(save, point, timeout_secs, pins, pool, buffers)
        askers = stack.enter_context(
            concurrent.futures.ThreadPoolExecutor(
                min(len(needed), _SHARDS_AT_ONCE), "deltackpt-ask"
            )
        )

        def take(shard: int) -> tuple[SaveInfo, ...]:
            return read.shard(replicas[shard], work[shard], with_files=shard == needed[0])

        taken = list(askers.map(take, needed))
        whole = point is not None and read.files is not None and read.at_point
        yield RestoredTables(
            buffers=buffers,
            layout=save.layout,
            chain=taken[0],
            bytes_read=sum(copy.nbytes for copies in work for copy in copies),
            seconds=time.perf_counter() - started,
            source="service",
            files=read.files if point is None or whole else None,
            point=whole,
        )


class _Pin(NamedTuple):
    """A state that a member keeps for us; ``memory`` is None where it is on another machine."""

    member: Member
    pinned: Pinned
    memory: MemoryReader | None

    def check(self) -> None:
        """Checks that the member's memory still holds the state.

        Raises:
          ServiceUnavailable: it went on.
        """
        if self.memory is not None and self.memory.sequence != self.pinned.sequence:
            raise ServiceUnavailable(
                f"{self.member}: expected its state to stay while it was copied, found that it "
                "went on; restore the newest step"
            )


class _Pins:
    """The states that members keep for one restore, renewed while it lasts."""

    def __init__(self) -> None:
        self._pins: list[_Pin] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="deltackpt-renew", daemon=True)

    def __enter__(self) -> _Pins:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        for pin in [*self._pins]:
            self.end(pin)
        self._thread.join()

    def add(self, member: Member, pinned: Pinned) -> _Pin:
        """A state that is kept from now on."""
        assert pinned.place is not None
        memory = None
        with contextlib.suppress(OSError):  # It is on another machine.
            memory = MemoryReader(pinned.place)
        pin = _Pin(member, pinned, memory)
        self._pins.append(pin)
        return pin

    def end(self, pin: _Pin) -> None:
        """Lets a state go; nobody waits for the answer, a pin ends by itself too."""
        self._pins.remove(pin)
        with contextlib.suppress(ServiceError, ray.exceptions.RayError):
            calls.actor(pin.member).unpin.remote(pin.pinned.pin)

    def _renew(self) -> None:
        while not self._done.wait(gate.PIN_SECS / 3):
            for pin in [*self._pins]:
                with contextlib.suppress(ServiceError, ray.exceptions.RayError):
                    calls.actor(pin.member).renew.remote(pin.pinned.pin)


class _Read:
    """What all shards of one restore share."""

    def __init__(
        self,
        save: StoredSave,
        point: LogPoint | None,
        timeout_secs: float,
        pins: _Pins,
        pool: concurrent.futures.Executor,
        buffers: dict[str, dict[str, dict[Box, np.ndarray]]],
    ):
        self._save = save
        self._point = point
        #: Whether all that was taken is of the point, and none below it.
        self.at_point = True
        self._timeout_secs = timeout_secs
        self._end = time.monotonic() + timeout_secs
        self._pins = pins
        self._pool = pool
        self._buffers = buffers
        #: The bytes of the files beside the tables, where the member that was asked has them.
        self.files: dict[str, np.ndarray] | None = None

    def shard(
        self, members: Sequence[Member], copies: Sequence[_Copy], *, with_files: bool
    ) -> tuple[SaveInfo, ...]:
        """Takes the rows of one shard from the first replica that can give them."""
        refusal: ServiceError | None = None
        silence: ServiceError | None = None
        while True:
            soon = False
            for number, member in enumerate(members):
                try:
                    pinned = self._pin(member, others=len(members) - number - 1)
                    if pinned.pin:
                        self._take(self._pins.add(member, pinned), copies, with_files)
                        if not self._is_at_point(pinned):
                            self.at_point = False
                        return pinned.chain
                    soon = soon or pinned.soon
                    refusal = self._refusal(member, pinned)
                except ServiceError as error:
                    silence = error
            if not soon or time.monotonic() > self._end:
                # What a member has said tells more than that another does not answer.
                problem = refusal or silence
                assert problem is not None
                raise problem
            time.sleep(_ASK_AGAIN_SECS)

    def _pin(self, member: Member, *, others: int) -> Pinned:
        """Asks a member to keep the state, and leaves some of the time to the others."""
        wanted = self._save.info.save_id
        left = max(_ASK_AGAIN_SECS, (self._end - time.monotonic()) / (1 + others))
        call = calls.actor(member).pin.remote(
            wanted.run, wanted.step, wanted.attempt, left / 2, protocol.plain_point(self._point)
        )
        return protocol.unpacked(calls.answer(member, call, left), Pinned, str(member))

    def _is_at_point(self, pinned: Pinned) -> bool:
        wanted = self._point
        return wanted is not None and (pinned.stretch, pinned.point) == wanted[:2]

    def _refusal(self, member: Member, pinned: Pinned) -> ServiceError:
        wanted, held = self._save.info.save_id, pinned.held
        if held is not None and held.run != wanted.run:
            return ServiceMismatch(
                f"{member}: expected it to hold save id {wanted}, found {held} of another run "
                f"within {self._timeout_secs} s: its node may see another directory under the "
                "same path"
            )
        return ServiceUnavailable(pinned.refused)

    def _take(self, pin: _Pin, copies: Sequence[_Copy], with_files: bool) -> None:
        """Takes what is wanted of a state, and ends its pin."""
        try:
            files = self._files_of(pin) if with_files and pin.pinned.files else None
            if pin.memory is None:
                self._fetch(pin, copies)
            else:
                whole = [(copy, self._mappable(copy)) for copy in copies]
                self._copy(pin.memory, [copy for copy, place in whole if place is None])
                pin.check()
                # Last: another replica would not take back what came from this one.
                for copy, place in whole:
                    if place is not None:
                        fields, box = place
                        fields[box] = _rows(pin.memory, copy)
            self.files = self.files or files
        finally:
            self._pins.end(pin)

    def _files_of(self, pin: _Pin) -> dict[str, np.ndarray]:
        """The files of a state: mapped, or fetched from another machine."""
        pinned, memory = pin.pinned, None
        assert pinned.files_place is not None
        with contextlib.suppress(OSError):
            memory = MemoryReader(pinned.files_place)
        if memory is not None:
            return {
                file.name: memory.array(file.offset, (file.nbytes,), np.dtype(np.uint8))
                for file in pinned.files
            }
        return {file.name: self._file(pin, file) for file in pinned.files}

    def _file(self, pin: _Pin, file: HeldFile) -> np.ndarray:
        found = np.empty(file.nbytes, np.uint8)
        actor = calls.actor(pin.member)
        for start in range(0, file.nbytes, _PIECE_BYTES):
            stop = min(file.nbytes, start + _PIECE_BYTES)
            call = actor.read_file.remote(pin.pinned.pin, file.name, start, stop)
            data = calls.answer(pin.member, call, self._timeout_secs)
            if isinstance(data, str):
                raise ServiceUnavailable(data)
            found[start:stop] = data
        return found

    def _mappable(self, copy: _Copy) -> tuple[dict[Box, np.ndarray], Box] | None:
        """The buffer that may be a member's memory itself, which holds it all in one place."""
        if (copy.start, copy.stop) != copy.target.rows:
            return None
        if copy.target.columns != copy.region.columns:
            return None
        table = copy.region.table
        fields = self._buffers[table.name][copy.region.field]
        rows = (copy.start - table.offset, copy.stop - table.offset)
        for box in fields:
            # The box of a template that has grown is longer than the target.
            if box.rows == rows and copy.target.columns in (None, box.columns):
                return fields, box
        return None

    def _copy(self, memory: MemoryReader, copies: Sequence[_Copy]) -> None:
        pending = [
            self._pool.submit(lambda piece: _put(piece, _rows(memory, piece)), piece)
            for piece in _pieces(copies)
        ]
        for future in pending:
            future.result()

    def _fetch(self, pin: _Pin, copies: Sequence[_Copy]) -> None:
        """Asks for rows piece by piece."""
        actor = calls.actor(pin.member)
        waiting: list[tuple[_Copy, Any]] = []
        pieces = _pieces(copies)
        while True:
            for piece in pieces:
                region = piece.region
                call = actor.read.remote(
                    pin.pinned.pin, region.group, region.field, piece.start, piece.stop
                )
                waiting.append((piece, call))
                if len(waiting) == _ANSWERS_IN_FLIGHT:
                    break
            if not waiting:
                return
            piece, call = waiting.pop(0)
            found = calls.answer(pin.member, call, self._timeout_secs)
            if isinstance(found, str):
                raise ServiceUnavailable(found)
            rows = found.view(piece.region.dtype)
            _put(piece, rows.reshape(piece.stop - piece.start, *piece.region.trailing))


def _copies(save: StoredSave, shard: int, count: int, targets: Targets) -> list[_Copy]:
    """What of a shard's rows is wanted where."""
    found = []
    for region in shards.regions(save.layout, shard, count):
        for target in targets.over(
            region.group, region.field, region.rows, region.columns or (0, 1)
        ):
            start = max(region.rows[0], target.rows[0])
            stop = min(region.rows[1], target.rows[1])
            if start < stop:
                found.append(_Copy(region, target, start, stop))
    return found


def _pieces(copies: Sequence[_Copy]) -> Iterator[_Copy]:
    for copy in copies:
        rows = max(1, _PIECE_BYTES // max(1, copy.region.row_bytes))
        for start in range(copy.start, copy.stop, rows):
            yield copy._replace(start=start, stop=min(copy.stop, start + rows))


def _rows(memory: MemoryReader, copy: _Copy) -> np.ndarray:
    """Whole rows in the memory of a member."""
    region = copy.region
    offset = region.offset + (copy.start - region.rows[0]) * region.row_bytes
    return memory.array(offset, (copy.stop - copy.start, *region.trailing), region.dtype)


def _put(piece: _Copy, rows: np.ndarray) -> None:
    """Writes whole rows of a region to a target, which may want some columns of them."""
    target = piece.target
    out = target.buffer[piece.start - target.rows[0] : piece.stop - target.rows[0]]
    if target.columns is not None and target.columns != piece.region.columns:
        rows = rows[:, target.columns[0] : target.columns[1]]
    pages.populate(out)
    out[...] = rows
