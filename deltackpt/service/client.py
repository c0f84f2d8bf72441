# SPDX-License-Identifier: Apache-2.0
"""RestoreService: a directory's service, as a trainer, a notebook or a command line uses it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.exceptions

from deltackpt import layout, reader
from deltackpt.chain import SaveInfo
from deltackpt.errors import (
    ServiceError,
    ServiceMismatch,
    ServiceUnavailable,
    TooLittleMemory,
)
from deltackpt.merge import Target
from deltackpt.reader import RestoredTables, Targets, Wanted
from deltackpt.service import gate, names, protocol, shards
from deltackpt.service.memory import MemoryReader
from deltackpt.service.names import Member
from deltackpt.service.protocol import Description, Pinned
from deltackpt.service.shards import Region
from deltackpt.stored import StoredSave

#: Bytes of one copy, and of one answer of another machine.
_PIECE_BYTES = 16 << 20
#: Answers of one member on their way: they bound what Ray's object store has to hold.
_ANSWERS_IN_FLIGHT = 4
_COPIERS = 2
_SHARDS_AT_ONCE = 16
_ASK_AGAIN_SECS = 0.02
_DESCRIBE_SECS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """One member, as it described itself.

    Attributes:
      member: which part of the service it is.
      found: what it says; None where it does not answer.
      problem: why it does not.
    """

    member: Member
    found: Description | None
    problem: str = ""

    @property
    def step(self) -> int | None:
        """The step that it holds."""
        save_id = None if self.found is None else self.found.save_id
        return None if save_id is None else save_id.step


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """A service at one moment.

    Attributes:
      directory: root of the steps.
      members: in the order of their shards and replicas.
      compactor: what the actor that folds chains says; None where there is none.
    """

    directory: str
    members: tuple[MemberStatus, ...]
    compactor: str | None

    @property
    def step(self) -> int | None:
        """The oldest step that a shard's newest replica holds; None where one holds nothing."""
        newest: dict[int, int] = {}
        for one in self.members:
            newest[one.member.shard] = max(
                newest.get(one.member.shard, -1), -1 if one.step is None else one.step
            )
        step = min(newest.values(), default=-1)
        return None if step < 0 else step

    @property
    def newest_step(self) -> int | None:
        """The newest committed step that a member sees."""
        seen = [one.found.newest_step for one in self.members if one.found is not None]
        return max((step for step in seen if step is not None), default=None)


class _Copy(NamedTuple):
    """Rows to copy from a member's region to a target: virtual rows ``[start, stop)``."""

    region: Region
    target: Target
    start: int
    stop: int


class RestoreService:
    """The service of one item of one directory; a ``RowSource``.

    It keeps no connection: every call finds the members anew, so that it survives their restarts.
    """

    def __init__(self, directory: str | os.PathLike[str], item: str = layout.EMBEDDINGS_ITEM):
        """See ``service.connect``."""
        self.directory = os.fspath(Path(directory).absolute())
        self.item = item
        self._key = names.key(directory, item)

    def __repr__(self) -> str:
        return f"RestoreService({self.directory!r}, {self.item!r})"

    # Restoring.

    def restore_tables(
        self, save: StoredSave, wanted: Wanted | None = None, timeout_secs: float = 10.0
    ) -> RestoredTables:
        """What is wanted of a step, from the members' memory; see ``RowSource``.

        Members on this machine are copied from directly, the others answer in parallel. A member
        that does not answer is replaced by another replica.

        Raises:
          ServiceUnavailable: no replica of a shard that is needed holds the save in time.
          ServiceMismatch: the service is of another directory, run or version.
        """
        started = time.perf_counter()
        if names.key(save.step_dir.parent, save.item) != self._key:
            raise ServiceMismatch(
                f"{self}: expected the service of {save.step_dir.parent}, item {save.item!r}, "
                "found that of another directory; connect() to the directory of the manager"
            )
        replicas = self._replicas()
        buffers, targets = reader.empty_buffers(save.layout, wanted)
        count = len(replicas)
        work = {shard: _copies(save, shard, count, targets) for shard in range(count)}
        needed = [shard for shard, copies in work.items() if copies] or [0]
        end = time.monotonic() + timeout_secs
        with (
            concurrent.futures.ThreadPoolExecutor(_COPIERS, "deltackpt-copy") as copiers,
            concurrent.futures.ThreadPoolExecutor(
                min(len(needed), _SHARDS_AT_ONCE), "deltackpt-shard"
            ) as pool,
        ):
            read = _Read(save, timeout_secs, end, copiers)
            chains = list(pool.map(lambda shard: read.shard(replicas[shard], work[shard]), needed))
        return RestoredTables(
            buffers=buffers,
            layout=save.layout,
            chain=chains[0],
            bytes_read=sum(
                (copy.stop - copy.start) * copy.region.row_bytes
                for copies in work.values()
                for copy in copies
            ),
            seconds=time.perf_counter() - started,
            source="service",
        )

    # Looking.

    def status(self, timeout_secs: float = _DESCRIBE_SECS) -> ServiceStatus:
        """What every member says, those that do not answer in time included.

        Raises:
          ServiceUnavailable: there is no service, or this process is not connected to Ray.
        """
        members = self.members()
        asked = []
        for member in members:
            try:
                asked.append((member, _handle(member).describe.remote()))
            except (ValueError, ray.exceptions.RayError) as error:
                asked.append((member, error))
        end = time.monotonic() + timeout_secs
        found = []
        for member, answer in asked:
            try:
                if isinstance(answer, Exception):
                    raise answer
                data = _answer(member, answer, max(0.0, end - time.monotonic()))
                described = protocol.unpacked(data, Description, str(member))
                found.append(MemberStatus(member=member, found=described))
            except (ServiceError, ValueError, ray.exceptions.RayError) as error:
                found.append(MemberStatus(member=member, found=None, problem=_shown(error)))
        return ServiceStatus(
            directory=self.directory,
            members=tuple(found),
            compactor=_compactor_says(self._key, max(0.1, end - time.monotonic())),
        )

    def wait_ready(self, step: int | None = None, timeout_secs: float = 60.0) -> ServiceStatus:
        """Waits until every member holds a step, or the newest one that is committed.

        Args:
          step: the step, or a later one; the newest that the members see by default.
          timeout_secs: longest wait.

        Raises:
          TooLittleMemory: a member cannot hold its rows.
          ServiceUnavailable: it took longer; the message says what each member does.
        """
        end = time.monotonic() + timeout_secs
        while True:
            found = self.status(max(_ASK_AGAIN_SECS, min(_DESCRIBE_SECS, end - time.monotonic())))
            wanted = found.newest_step if step is None else step
            held = [one.step for one in found.members]
            if wanted is not None and all(one is not None and one >= wanted for one in held):
                return found
            for one in found.members:
                if one.found is not None and one.found.code == TooLittleMemory.code:
                    raise TooLittleMemory(one.found.health)
            if time.monotonic() > end:
                raise ServiceUnavailable(
                    f"{self}: expected every member to hold step {wanted} within {timeout_secs} s, "
                    f"found {_told(found)}; look at the nodes, or give it more time"
                )
            time.sleep(_ASK_AGAIN_SECS)

    def members(self) -> list[Member]:
        """The members that Ray knows.

        Raises:
          ServiceUnavailable: there are none, or this process is not connected to Ray.
        """
        if not ray.is_initialized():
            raise ServiceUnavailable(
                f"{self}: expected a process that is connected to Ray, found that ray.init() was "
                "not called; connect to the cluster first"
            )
        found = names.members(self._key)
        if not found:
            raise ServiceUnavailable(
                f"{self}: expected a service in this Ray cluster, found none; start one with "
                "deltackpt.service.start(directory)"
            )
        return found

    def _replicas(self) -> list[list[Member]]:
        """The members of each shard, in the order in which to ask them."""
        members = self.members()
        count = members[0].shards
        replicas: list[list[Member]] = [[] for _ in range(count)]
        for member in members:
            if member.shards == count:
                replicas[member.shard].append(member)
        for shard, found in enumerate(replicas):
            if not found:
                raise ServiceUnavailable(
                    f"{self}: expected a member with shard {shard} of {count}, found none; start "
                    "the service again"
                )
        here = names.node_id()
        if any(len(found) > 1 for found in replicas):
            nodes = {
                one.member: one.found.node for one in self.status().members if one.found is not None
            }
            for found in replicas:
                # Those on this node first, those that do not answer last; else at random, so that
                # many readers spread.
                random.shuffle(found)
                found.sort(key=lambda member: (nodes.get(member) != here, member not in nodes))
        return replicas


class _Read:
    """One restore: what all its shards share."""

    def __init__(
        self,
        save: StoredSave,
        timeout_secs: float,
        end: float,
        copiers: concurrent.futures.Executor,
    ):
        self._save = save
        self._timeout_secs = timeout_secs
        self._end = end
        self._copiers = copiers

    def shard(self, replicas: Sequence[Member], copies: Sequence[_Copy]) -> tuple[SaveInfo, ...]:
        """Copies the rows of one shard from the first replica that can give them."""
        problems: list[ServiceError] = []
        while True:
            soon = False
            for member in replicas:
                try:
                    pinned = self._pin(member)
                    if pinned.pin:
                        with self._pinned(member, pinned):
                            self._copy(member, pinned, copies)
                        return pinned.chain
                except ServiceError as error:
                    problems.append(error)
                    continue
                soon = soon or pinned.soon
                problems.append(self._refusal(member, pinned))
            if not soon or time.monotonic() > self._end:
                raise problems[-1]
            time.sleep(_ASK_AGAIN_SECS)

    def _pin(self, member: Member) -> Pinned:
        wanted = self._save.info.save_id
        left = max(_ASK_AGAIN_SECS, self._end - time.monotonic())
        call = _handle(member).pin.remote(wanted.run, wanted.step, wanted.attempt, left / 2)
        return protocol.unpacked(_answer(member, call, left), Pinned, str(member))

    def _refusal(self, member: Member, pinned: Pinned) -> ServiceError:
        wanted, held = self._save.info.save_id, pinned.held
        if held is not None and held.run != wanted.run and time.monotonic() > self._end:
            return ServiceMismatch(
                f"{member}: expected it to hold save id {wanted}, found {held} of another run for "
                f"{self._timeout_secs} s: its node may see another directory under the same path"
            )
        return ServiceUnavailable(pinned.refused)

    @contextlib.contextmanager
    def _pinned(self, member: Member, pinned: Pinned) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                _handle(member).unpin.remote(pinned.pin)

    def _copy(self, member: Member, pinned: Pinned, copies: Sequence[_Copy]) -> None:
        assert pinned.place is not None
        try:
            memory = MemoryReader(pinned.place)
        except OSError:
            self._fetch(member, pinned, copies)
            return
        self._copy_from(memory, member, pinned, copies)

    def _copy_from(
        self, memory: MemoryReader, member: Member, pinned: Pinned, copies: Sequence[_Copy]
    ) -> None:
        """Copies from memory of this machine; the member renews the pin meanwhile."""
        renewed = time.monotonic()
        pending = [self._copiers.submit(_copy_piece, memory, piece) for piece in _pieces(copies)]
        try:
            for future in pending:
                future.result()
                if time.monotonic() - renewed > gate.PIN_SECS / 3:
                    _answer(member, _handle(member).renew.remote(pinned.pin), self._timeout_secs)
                    renewed = time.monotonic()
            changed = memory.sequence != pinned.sequence
        finally:
            for future in pending:
                future.cancel()
            concurrent.futures.wait(pending)
        if changed:
            raise ServiceUnavailable(
                f"{member}: expected its state to stay while it was copied, found that it went on; "
                "restore the newest step"
            )

    def _fetch(self, member: Member, pinned: Pinned, copies: Sequence[_Copy]) -> None:
        """Asks for the rows piece by piece; pins are renewed by each."""
        handle = _handle(member)
        waiting: list[tuple[_Copy, Any]] = []
        pieces = _pieces(copies)
        while True:
            for piece in pieces:
                region = piece.region
                call = handle.read.remote(
                    pinned.pin, region.group, region.field, piece.start, piece.stop
                )
                waiting.append((piece, call))
                if len(waiting) == _ANSWERS_IN_FLIGHT:
                    break
            if not waiting:
                return
            piece, call = waiting.pop(0)
            found = _answer(member, call, self._timeout_secs)
            if isinstance(found, str):
                raise ServiceUnavailable(found)
            rows = found.view(piece.region.dtype)
            _put(piece, rows.reshape(piece.stop - piece.start, *piece.region.trailing))


def _copies(save: StoredSave, shard: int, count: int, targets: Targets) -> list[_Copy]:
    """What of a shard's rows is wanted where."""
    found = []
    for region in shards.regions(save.layout, shard, count):
        columns = region.columns or (0, 1)
        for target in targets.over(region.group, region.field, region.rows, columns):
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


def _copy_piece(memory: MemoryReader, piece: _Copy) -> None:
    region = piece.region
    offset = region.offset + (piece.start - region.rows[0]) * region.row_bytes
    _put(piece, memory.array(offset, (piece.stop - piece.start, *region.trailing), region.dtype))


def _put(piece: _Copy, rows: np.ndarray) -> None:
    """Writes whole rows of a region to a target, of which it may want some columns."""
    target = piece.target
    out = target.buffer[piece.start - target.rows[0] : piece.stop - target.rows[0]]
    if target.columns is not None and target.columns != piece.region.columns:
        rows = rows[:, target.columns[0] : target.columns[1]]
    out[...] = rows


def _handle(member: Member) -> Any:
    """The member's actor.

    Raises:
      ServiceUnavailable: it is gone.
    """
    try:
        return ray.get_actor(member.name, namespace=names.NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"{member}: expected its actor, found that it is gone; start the service again"
        ) from error


def _answer(member: Member, call: Any, timeout_secs: float) -> Any:
    """The answer of a member.

    Raises:
      ServiceUnavailable: there was none in time; it died, its node did, or Ray's store is full.
    """
    try:
        return ray.get(call, timeout=timeout_secs)
    except ray.exceptions.GetTimeoutError as error:
        raise ServiceUnavailable(
            f"{member}: expected an answer within {timeout_secs:.1f} s, found none; look at its "
            "node"
        ) from error
    except ray.exceptions.RayError as error:
        raise ServiceUnavailable(
            f"{member}: expected an answer, found {_shown(error)}; Ray restarts it by itself"
        ) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _told(found: ServiceStatus) -> str:
    return "; ".join(
        f"{one.member}: {one.problem or (one.found.health if one.found else '')} (step {one.step})"
        for one in found.members
    )


def _compactor_says(key: str, timeout_secs: float) -> str | None:
    try:
        actor = ray.get_actor(names.compactor_name(key), namespace=names.NAMESPACE)
        return str(ray.get(actor.describe.remote(), timeout=timeout_secs))
    except ValueError:
        return None
    except ray.exceptions.RayError as error:
        return _shown(error)
