# SPDX-License-Identifier: Apache-2.0
"""One restore from a hot standby: pin a state on every needed replica, read it, verify it.

Contiguous memory of a replica on this machine is mapped copy-on-write (``standby.shared_memory``).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import ray.exceptions

from deltackpt.cached import cached_property
from deltackpt.errors import ServiceError, ServiceMismatch, ServiceUnavailable
from deltackpt.format import naming
from deltackpt.format.manifest import SaveInfo
from deltackpt.format.row_blocks import Box
from deltackpt.layers.targets import Target, Targets, Wanted, empty_buffers
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.resources import host_memory
from deltackpt.resources.runtime import Runtime
from deltackpt.service import protocol
from deltackpt.service.protocol import Pinned, Replica
from deltackpt.standby import loaded_state, shared_memory
from deltackpt.standby.cached_files import CachedFile
from deltackpt.standby.loaded_state import Region
from deltackpt.standby.shared_memory import MemoryReader

_BYTES = np.dtype(np.uint8)
#: Bytes per copy, and per answer from another machine.
_PIECE_BYTES = 16 << 20
#: Answers of one replica in flight; they bound the use of Ray's object store.
_ANSWERS_IN_FLIGHT = 4
_MOST_COPIERS = 8
_SHARDS_AT_ONCE = 16
_ASK_AGAIN_SECS = 0.02


class _Copy(NamedTuple):
    """Rows of a replica's region that a target wants: virtual rows ``[start, stop)``."""

    region: Region
    target: Target
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.region.row_bytes

    @property
    def offset(self) -> int:
        """In the replica's memory."""
        return self.region.offset + (self.start - self.region.rows[0]) * self.region.row_bytes

    def rows(self, data: np.ndarray) -> np.ndarray:
        """Returns the bytes as rows."""
        rows = data.view(self.region.dtype)
        return rows.reshape(self.stop - self.start, *self.region.trailing)


class _Piece(NamedTuple):
    """Some bytes of a replica's memory, and what writes them to where they belong."""

    start: int
    stop: int
    put: Callable[[np.ndarray], None]


@contextlib.contextmanager
def reading(
    save: StoredSave,
    replicas: Sequence[Sequence[Replica]],
    wanted: Wanted | None,
    *,
    timeout_secs: float,
    point: RecoveryPoint | None = None,
    with_files: bool = True,
) -> Iterator[RestoredTables]:
    """Reads the wanted parts of a save and, if requested, the files other than its tables.

    ``replicas`` holds the replicas of each shard in the order in which to try them. They may be at
    earlier WAL records than ``point``.
    """
    started = time.perf_counter()
    buffers, targets = empty_buffers(save.layout, wanted)
    work = [_copies(save, shard, len(replicas), targets) for shard in range(len(replicas))]
    # Even if nothing is wanted, one replica reports which saves the state was merged from.
    needed = [shard for shard, copies in enumerate(work) if copies] or [0]
    copiers = min(_MOST_COPIERS, len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(Runtime(copiers, size=copiers + _SHARDS_AT_ONCE))
        pins = stack.enter_context(_Pins())
        read = _Read(save, point, timeout_secs, pins, runtime, buffers)

        def take(shard: int) -> tuple[SaveInfo, ...]:
            return read.shard(
                replicas[shard], work[shard], with_files=with_files and shard == needed[0]
            )

        taken = runtime.map(take, needed, threads=_SHARDS_AT_ONCE)
        has_files = read.files is not None or not with_files
        whole = point is not None and has_files and read.at_point
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
    """A state that a replica keeps for us; ``memory`` is None if it is on another machine."""

    replica: Replica
    pinned: Pinned
    memory: MemoryReader | None

    def check(self) -> None:
        """Raises ``ServiceUnavailable`` if the replica's memory has advanced to another state."""
        if self.memory is not None and self.memory.sequence != self.pinned.sequence:
            raise ServiceUnavailable(
                f"{self.replica}: expected its state not to change while it was copied, found that "
                "it advanced; restore the newest step"
            )


class _Pins:
    """The pins of one restore, renewed while it runs."""

    def __init__(self) -> None:
        self._pins: list[_Pin] = []
        self._error: Exception | None = None
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
        if self._error is not None:
            raise ServiceUnavailable(
                "restore service: expected the pinned states to be kept, found "
                f"{type(self._error).__name__}: {self._error}; restore again"
            ) from self._error

    def add(self, replica: Replica, pinned: Pinned) -> _Pin:
        assert pinned.address is not None
        memory = None
        with contextlib.suppress(OSError):  # The memory is on another machine.
            memory = MemoryReader(pinned.address)
        pin = _Pin(replica, pinned, memory)
        self._pins.append(pin)
        return pin

    def end(self, pin: _Pin) -> None:
        """Releases a pin without waiting; pins also expire."""
        self._pins.remove(pin)
        with contextlib.suppress(ServiceError, ray.exceptions.RayError):
            protocol.call(pin.replica, "unpin", pin.pinned.pin)

    def _renew(self) -> None:
        try:
            while not self._done.wait(shared_memory.PIN_SECS / 3):
                for pin in [*self._pins]:
                    with contextlib.suppress(ServiceError, ray.exceptions.RayError):
                        protocol.call(pin.replica, "renew", pin.pinned.pin)
        except Exception as error:
            self._error = error


class _Read:
    def __init__(
        self,
        save: StoredSave,
        point: RecoveryPoint | None,
        timeout_secs: float,
        pins: _Pins,
        runtime: Runtime,
        buffers: dict[str, dict[str, dict[Box, np.ndarray]]],
    ):
        self._save = save
        self._point = point
        #: Whether everything read so far is at the recovery point itself, not before it.
        self.at_point = True
        self._timeout_secs = timeout_secs
        self._end = time.monotonic() + timeout_secs
        self._pins = pins
        self._runtime = runtime
        self._buffers = buffers
        #: Contents of the files other than the tables, if the asked replica has them.
        self.files: dict[str, np.ndarray] | None = None

    def shard(
        self, replicas: Sequence[Replica], copies: Sequence[_Copy], *, with_files: bool
    ) -> tuple[SaveInfo, ...]:
        """Reads the rows of one shard from the first replica that can provide them."""
        refusal: ServiceError | None = None
        silence: ServiceError | None = None
        while True:
            soon = False
            for number, replica in enumerate(replicas):
                try:
                    pinned = self._pin(replica, others=len(replicas) - number - 1)
                    if pinned.pin:
                        self._read_pinned(self._pins.add(replica, pinned), copies, with_files)
                        if not self._is_at_point(pinned):
                            self.at_point = False
                        return pinned.chain
                    soon = soon or pinned.soon
                    refusal = self._refusal(replica, pinned)
                except ServiceError as error:
                    silence = error
            if not soon or time.monotonic() > self._end or self._is_passed:
                # A replica's explanation is more useful than another's missing answer.
                problem = refusal or silence
                assert problem is not None
                raise problem
            time.sleep(_ASK_AGAIN_SECS)

    def _pin(self, replica: Replica, *, others: int) -> Pinned:
        """Asks a replica to pin the state; leaves some of the time to the others."""
        wanted = protocol.PinRequest(save_id=self._save.info.save_id, point=self._point)
        left = max(_ASK_AGAIN_SECS, (self._end - time.monotonic()) / (1 + others))
        call = protocol.call(replica, "pin", protocol.packed(wanted), left / 2)
        return protocol.unpacked(protocol.answer(replica, call, left), Pinned, str(replica))

    def _is_at_point(self, pinned: Pinned) -> bool:
        wanted = self._point
        return wanted is not None and loaded_state.same_point(pinned.point, wanted)

    @cached_property
    def _is_passed(self) -> bool:
        """Whether a later step exists: replicas follow that one, which may be of another run."""
        wanted = self._save.info.save_id if self._point is None else self._point
        steps = map(naming.step_number, self._save.step_dir.parent.folders())
        return any(step is not None and step > wanted.step for step in steps)

    def _refusal(self, replica: Replica, pinned: Pinned) -> ServiceError:
        wanted, held = self._save.info.save_id, pinned.loaded
        if held is not None and held.run != wanted.run and not self._is_passed:
            return ServiceMismatch(
                f"{replica}: expected save id {wanted} within {self._timeout_secs} s, found {held} "
                "of another run; check that its node sees the same directory under this path"
            )
        return ServiceUnavailable(pinned.refused)

    def _read_pinned(self, pin: _Pin, copies: Sequence[_Copy], with_files: bool) -> None:
        """Reads the wanted parts of a state, and releases its pin."""
        try:
            files = self._files_of(pin) if with_files and pin.pinned.files else None
            if pin.memory is None:
                self._fetch(pin, _row_pieces(copies))
            else:
                whole = [(copy, self._mappable(copy)) for copy in copies]
                self._copy(pin.memory, _row_pieces(copy for copy, place in whole if place is None))
                pin.check()
                # Last: another replica would not undo what this one wrote.
                for copy, place in whole:
                    if place is not None:
                        fields, box = place
                        data = pin.memory.array(copy.offset, (copy.nbytes,), _BYTES)
                        fields[box] = copy.rows(data)
            self.files = self.files or files
        finally:
            self._pins.end(pin)

    def _files_of(self, pin: _Pin) -> dict[str, np.ndarray]:
        """Returns the files of a state, mapped or fetched from another machine."""
        pinned = pin.pinned
        assert pinned.files_address is not None
        with contextlib.suppress(OSError):
            memory = MemoryReader(pinned.files_address)
            return {
                file.name: memory.array(file.offset, (file.nbytes,), _BYTES)
                for file in pinned.files
            }
        found = {file.name: np.empty(file.nbytes, np.uint8) for file in pinned.files}
        self._fetch(pin, _file_pieces(pinned.files, found), files=True)
        return found

    def _mappable(self, copy: _Copy) -> tuple[dict[Box, np.ndarray], Box] | None:
        """Returns the buffer to map from a replica's memory, if all of it is contiguous there."""
        if (copy.start, copy.stop) != copy.target.rows or copy.target.cycle is not None:
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

    def _copy(self, memory: MemoryReader, pieces: Iterable[_Piece]) -> None:
        def put(piece: _Piece) -> None:
            piece.put(memory.array(piece.start, (piece.stop - piece.start,), _BYTES))

        self._runtime.map(put, pieces)

    def _fetch(self, pin: _Pin, pieces: Iterable[_Piece], *, files: bool = False) -> None:
        """Reads pieces of a replica's memory on another machine, a few at a time."""
        actor = protocol.actor(pin.replica)
        calls = (
            (piece, actor.read.remote(pin.pinned.pin, piece.start, piece.stop, files))
            for piece in pieces
        )
        waiting = collections.deque(itertools.islice(calls, _ANSWERS_IN_FLIGHT))
        while waiting:
            piece, call = waiting.popleft()
            found = protocol.answer(pin.replica, call, self._timeout_secs)
            if isinstance(found, str):
                raise ServiceUnavailable(found)
            waiting.extend(itertools.islice(calls, 1))
            piece.put(found)


def _copies(save: StoredSave, shard: int, count: int, targets: Targets) -> list[_Copy]:
    found = []
    for region in loaded_state.regions(save.layout, shard, count):
        for target in targets.over(
            region.group, region.field, region.rows, region.columns or (0, 1)
        ):
            start = max(region.rows[0], target.rows[0])
            stop = min(region.rows[1], target.rows[1])
            if start < stop:
                found.append(_Copy(region, target, start, stop))
    return found


def _row_pieces(copies: Iterable[_Copy]) -> Iterator[_Piece]:
    for copy in copies:
        rows = max(1, _PIECE_BYTES // max(1, copy.region.row_bytes))
        for start in range(copy.start, copy.stop, rows):
            piece = copy._replace(start=start, stop=min(copy.stop, start + rows))
            yield _Piece(piece.offset, piece.offset + piece.nbytes, functools.partial(_put, piece))


def _file_pieces(files: Iterable[CachedFile], found: Mapping[str, np.ndarray]) -> Iterator[_Piece]:
    for file in files:
        for start in range(0, file.nbytes, _PIECE_BYTES):
            out = found[file.name][start : start + _PIECE_BYTES]
            at = file.offset + start
            yield _Piece(at, at + len(out), functools.partial(np.copyto, out))


def _put(piece: _Copy, data: np.ndarray) -> None:
    """Writes complete rows of a region to a target, which may want some of their columns."""
    target, rows = piece.target, piece.rows(data)
    if target.columns is not None and target.columns != piece.region.columns:
        rows = rows[:, target.columns[0] : target.columns[1]]
    if target.cycle is not None:
        target.put(range(piece.start, piece.stop), rows, target.buffer)
        return
    out = target.buffer[piece.start - target.rows[0] : piece.stop - target.rows[0]]
    host_memory.populate(out)
    out[...] = rows
