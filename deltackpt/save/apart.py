# SPDX-License-Identifier: Apache-2.0
"""Distributed save without a shared file system.

Each process writes to a directory on its own node. To verify and describe a save, process 0 needs
little from the others: their manifests and digests and, for dense leaves, the nodes of their
databases. The processes exchange these through JAX's coordination service. Once the step is
committed in process 0's directory, its manifest goes to the others in the same way, and they
publish their shard under the step's name. Rows and values stay where they were written, until they
are uploaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgpack

from deltackpt.errors import StorageError
from deltackpt.format.manifest import Manifest, Part
from deltackpt.save.rendezvous import Note, Rendezvous
from deltackpt.storage.posix import DurableDir

#: Size limit of a message.
_PIECE_BYTES = 64 << 10


class Messages(Protocol):
    """A key-value store for messages, shared by all processes of a job; see ``Coordinator``."""

    def put(self, key: str, data: bytes) -> None:
        """Stores a value of at most 64 KiB under an unused key.

        Raises:
          StorageError: the service does not answer, or the key is used.
        """
        ...

    def folder(self, key: str) -> dict[str, bytes]:
        """Returns all values below a key, by the rest of their keys.

        Raises:
          StorageError: the service does not answer.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes all values below a key; never raises."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart(Rendezvous):
    """One process's view of a save in flight if the others do not see its directory.

    Attributes:
      messages: connects the processes.
      fsync: whether data from others must survive a power cut.
    """

    messages: Messages
    fsync: bool
    apart: ClassVar[bool] = True
    _taken: set[int] = dataclasses.field(default_factory=set)

    @property
    def key(self) -> str:
        """Returns the prefix of this save's keys, which no other save of the job has."""
        return f"deltackpt/{self.temporary.name}"

    def fail(self, error: BaseException) -> None:
        """See ``Rendezvous``; a process that has reported success adds nothing."""
        with contextlib.suppress(StorageError):
            self._say({"failed": dataclasses.asdict(Note.of(error))})

    def tell(self, records: Mapping[str, bytes]) -> None:
        """See ``Rendezvous``."""
        packed: Any = msgpack.packb(dict(records))
        for start in range(0, len(packed), _PIECE_BYTES):
            # Pieces are listed in the order of their keys.
            key = f"{self.key}/data/{self.process}/{start:012}"
            self.messages.put(key, packed[start : start + _PIECE_BYTES])
        self._say({"bytes": len(packed)})

    def collect(self, item_dir: Path, own: Manifest) -> tuple[Part, ...]:
        """See ``Rendezvous``."""
        self._take_parts("write its shard")
        return super().collect(item_dir, own)

    def await_written(self) -> range:
        """See ``Rendezvous``."""
        self._take_parts("write its dense leaves")
        return super().await_written()

    def await_commit(self, committed: Callable[[], bool]) -> None:
        """See ``Rendezvous``; afterwards process 0's description of the step is stored here."""
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            said = self._said()
            if "bytes" in said.get(0, {}):
                self._take(0)
                return
        raise self._missing({0}, "commit the step")

    def _take_parts(self, what: str) -> None:
        """Waits for the descriptions of the other shards, and stores them."""
        wanted = {*range(1, self.count)}
        for _ in self._polls(self.timeout_secs):
            self._raise_failure()
            for process, said in self._said().items():
                if process in wanted - self._taken and "bytes" in said:
                    self._take(process)
            if wanted <= self._taken:
                return
        raise self._missing(wanted - self._taken, what)

    def _take(self, process: int) -> None:
        pieces = sorted(self.messages.folder(f"{self.key}/data/{process}/").items())
        packed = b"".join(piece for _, piece in pieces)
        for name, data in msgpack.unpackb(packed).items():
            path = self.temporary / name
            DurableDir(self.temporary.parent, fsync=self.fsync).write(path, data)
        self._taken.add(process)

    def _say(self, what: dict[str, Any]) -> None:
        self.messages.put(f"{self.key}/said/{self.process}", json.dumps(what).encode())

    def _said(self) -> dict[int, dict[str, Any]]:
        found = self.messages.folder(f"{self.key}/said/")
        return {int(process): json.loads(said) for process, said in found.items()}

    def _noted(self) -> dict[int, Note]:
        """See ``Rendezvous``."""
        return {
            process: Note(**said["failed"])
            for process, said in self._said().items()
            if "failed" in said and (process > 0 if self.process == 0 else process == 0)
        }


class Meetings:
    """Coordinates the processes of a job for one save at a time; used by one thread."""

    def __init__(self, messages: Messages, process: int, count: int, timeout_secs: float):
        """Creates no rendezvous yet.

        Args:
          messages: connects the processes.
          process: index of this process.
          count: number of processes.
          timeout_secs: as for ``Rendezvous``.
        """
        self._messages = messages
        self._process = process
        self._count = count
        self._timeout_secs = timeout_secs
        self._former: list[str] = []

    def of(self, temporary: Path, *, fsync: bool) -> Apart:
        """Returns the rendezvous of a save; deletes messages of saves before the last one."""
        found = Apart(
            temporary=temporary,
            process=self._process,
            count=self._count,
            timeout_secs=self._timeout_secs,
            messages=self._messages,
            fsync=fsync,
        )
        if self._process == 0:
            # A process with a part of the last save has finished the earlier ones.
            self._former.append(found.key)
            while len(self._former) > 3:
                self._messages.delete(self._former.pop(0))
        return found
