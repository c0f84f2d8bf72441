# SPDX-License-Identifier: Apache-2.0
"""RestoreService: a directory's service, as a trainer, a notebook or a command line uses it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time

import ray
import ray.exceptions

from deltackpt.errors import (
    ServiceError,
    ServiceMismatch,
    ServiceUnavailable,
    TooLittleMemory,
)
from deltackpt.format import names as file_names
from deltackpt.reading.reader import RestoredTables
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint
from deltackpt.reading.targets import Wanted
from deltackpt.service import calls, names, protocol
from deltackpt.service.names import Member
from deltackpt.service.protocol import Description
from deltackpt.service.reading import reading
from deltackpt.storage import buckets

_ASK_AGAIN_SECS = 0.05
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
        held: dict[int, list[int]] = {one.member.shard: [] for one in self.members}
        for one in self.members:
            if one.step is not None:
                held[one.member.shard].append(one.step)
        return min(map(max, held.values()), default=None) if all(held.values()) else None

    @property
    def newest_step(self) -> int | None:
        """The newest committed step that a member sees."""
        seen = [one.found.newest_step for one in self.members if one.found is not None]
        return max((step for step in seen if step is not None), default=None)


class RestoreService:
    """The service of one item of one directory; a ``RowSource``.

    It keeps no connection: every call finds the members anew, so that it survives their restarts.
    """

    def __init__(self, directory: str | os.PathLike[str], item: str = file_names.EMBEDDINGS_ITEM):
        """See ``service.connect``."""
        self.directory = names.root_name(directory)
        self.item = item
        self._key = names.key(directory, item)

    def __repr__(self) -> str:
        return f"RestoreService({self.directory!r}, {self.item!r})"

    # Restoring.

    def tables(
        self,
        save: StoredSave,
        wanted: Wanted | None = None,
        *,
        timeout_secs: float = 10.0,
        point: LogPoint | None = None,
    ) -> contextlib.AbstractContextManager[RestoredTables]:
        """What is wanted of a step, from the members' memory; see ``RowSource`` and ``reading``.

        Raises:
          ServiceUnavailable: no replica of a shard that is needed holds the save in time.
          ServiceMismatch: the service is of another directory, run or version.
        """
        place = _resolved(self.directory), self.item
        if place != (_resolved(str(save.step_dir.parent)), save.item):
            raise ServiceMismatch(
                f"{self}: expected the service of {save.step_dir.parent}, item {save.item!r}, "
                "found that of another directory; connect() to the directory of the manager"
            )
        replicas = self._replicas(min(_DESCRIBE_SECS, timeout_secs / 2))
        return reading(save, replicas, wanted, timeout_secs=timeout_secs, point=point)

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
                asked.append((member, calls.actor(member).describe.remote()))
            except (ServiceError, ray.exceptions.RayError) as error:
                asked.append((member, error))
        end = time.monotonic() + timeout_secs
        found = []
        for member, answer in asked:
            try:
                if isinstance(answer, Exception):
                    raise answer
                data = calls.answer(member, answer, max(0.0, end - time.monotonic()))
                described = protocol.unpacked(data, Description, str(member))
                found.append(MemberStatus(member=member, found=described))
            except (ServiceError, ray.exceptions.RayError) as error:
                found.append(MemberStatus(member=member, found=None, problem=calls.shown(error)))
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

    def _replicas(self, timeout_secs: float) -> list[list[Member]]:
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
            told = self.status(timeout_secs).members
            nodes = {one.member: one.found.node for one in told if one.found is not None}
            for found in replicas:
                # Those on this node first, those that do not answer last; else at random, so that
                # many readers spread.
                random.shuffle(found)
                found.sort(key=lambda member: (nodes.get(member) != here, member not in nodes))
        return replicas


def connect(
    directory: str | os.PathLike[str], item: str = file_names.EMBEDDINGS_ITEM
) -> RestoreService:
    """The running service of a directory.

    Args:
      directory: root of the steps, as it was given to ``start``.
      item: name of our item in a step.

    Raises:
      ServiceUnavailable: there is none, or this process is not connected to Ray.
    """
    service = RestoreService(directory, item)
    service.members()
    return service


def find(
    directory: str | os.PathLike[str], item: str = file_names.EMBEDDINGS_ITEM
) -> RestoreService | None:
    """As ``connect``; None where there is none."""
    if not ray.is_initialized() or not names.members(names.key(directory, item)):
        return None
    return RestoreService(directory, item)


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
        return calls.shown(error)


def _resolved(root: str) -> str:
    """A root as every path to it is resolved; a URL is what it is."""
    return root if buckets.is_url(root) else os.path.realpath(root)
