# SPDX-License-Identifier: Apache-2.0
"""How several processes make one save where none sees what another one writes.

Each has a directory of its own node. What process 0 needs of the others to make sure of a save, and
to describe all of it, is small: their manifests and digests, and of dense leaves the nodes of their
databases. These go by a board of the job, and so does, once the step is committed in process 0's
directory, its manifest to the others, which then show their part of the step under its name. The
rows and values stay where they were written, until they are brought to the root.
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
from deltackpt.storage import files

#: A value of JAX's coordination service is one message of at most 4 MiB.
_PIECE_BYTES = 1 << 20


class Board(Protocol):
    """Small values that every process of a job may put and look up; thread-safe."""

    def put(self, key: str, data: bytes) -> None:
        """Puts a value under a key that has none.

        Raises:
          StorageError: the board does not answer, or there is a value.
        """
        ...

    def get(self, key: str) -> bytes:
        """A value that was put.

        Raises:
          StorageError: the board does not answer, or there is none.
        """
        ...

    def folder(self, key: str) -> dict[str, bytes]:
        """All values below a key, by the rest of theirs.

        Raises:
          StorageError: the board does not answer.
        """
        ...

    def delete(self, key: str) -> None:
        """Removes all values below a key; never raises."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart(Rendezvous):
    """One process's view of a save in flight, whose directory the others do not see.

    Attributes:
      board: of the job.
      fsync: whether what comes from others is to survive a power cut.
    """

    board: Board
    fsync: bool
    apart: ClassVar[bool] = True
    _taken: set[int] = dataclasses.field(default_factory=set)

    @property
    def key(self) -> str:
        """What the board has of this save; no other one of the job has the same."""
        return f"deltackpt/{self.temporary.name}"

    def fail(self, error: BaseException) -> None:
        """See ``Rendezvous``; who has told that it is done has nothing to add."""
        with contextlib.suppress(StorageError):
            self._say({"failed": dataclasses.asdict(Note.of(error))})

    def tell(self, records: Mapping[str, bytes]) -> None:
        """See ``Rendezvous``."""
        packed: Any = msgpack.packb(dict(records))
        count = -(-len(packed) // _PIECE_BYTES)
        for number in range(count):
            piece = packed[number * _PIECE_BYTES : (number + 1) * _PIECE_BYTES]
            self.board.put(f"{self.key}/data/{self.process}/{number}", piece)
        self._say({"pieces": count})

    def collect(self, item_dir: Path, own: Manifest) -> tuple[Part, ...]:
        """See ``Rendezvous``."""
        self._take_parts("write its part")
        return super().collect(item_dir, own)

    def await_written(self) -> range:
        """See ``Rendezvous``."""
        self._take_parts("write its dense leaves")
        return super().await_written()

    def await_commit(self, committed: Callable[[], bool]) -> None:
        """See ``Rendezvous``; what process 0 says of the step is here afterwards."""
        for _ in self._polls(2 * self.timeout_secs):
            self._raise_failure()
            said = self._said()
            if "pieces" in said.get(0, {}):
                self._take(0, said[0])
                return
        raise self._missing({0}, "commit the step")

    def _take_parts(self, what: str) -> None:
        """Waits for what the others have to say of their parts, and puts it where it belongs."""
        wanted = {*range(1, self.count)}
        for _ in self._polls(self.timeout_secs):
            self._raise_failure()
            for process, said in self._said().items():
                if process in wanted - self._taken and "pieces" in said:
                    self._take(process, said)
            if wanted <= self._taken:
                return
        raise self._missing(wanted - self._taken, what)

    def _take(self, process: int, said: dict[str, Any]) -> None:
        pieces = (
            self.board.get(f"{self.key}/data/{process}/{number}")
            for number in range(said["pieces"])
        )
        for name, data in msgpack.unpackb(b"".join(pieces)).items():
            path = self.temporary / name
            (files.make_durable if self.fsync else files.make_folder)(path.parent)
            files.write_atomic(path, data, fsync=self.fsync)
        self._taken.add(process)

    def _say(self, what: dict[str, Any]) -> None:
        self.board.put(f"{self.key}/said/{self.process}", json.dumps(what).encode())

    def _said(self) -> dict[int, dict[str, Any]]:
        found = self.board.folder(f"{self.key}/said/")
        return {int(process): json.loads(said) for process, said in found.items()}

    def _noted(self) -> dict[int, Note]:
        """See ``Rendezvous``."""
        return {
            process: Note(**said["failed"])
            for process, said in self._said().items()
            if "failed" in said and (process > 0 if self.process == 0 else process == 0)
        }


class Meetings:
    """Where the processes of a job meet for one save after the other; of one thread at a time."""

    def __init__(self, board: Board, process: int, count: int, timeout_secs: float):
        """Nobody meets yet.

        Args:
          board: of the job.
          process: index of this process.
          count: how many there are.
          timeout_secs: as for ``Rendezvous``.
        """
        self._board = board
        self._process = process
        self._count = count
        self._timeout_secs = timeout_secs
        self._former: list[str] = []

    def of(self, temporary: Path, *, fsync: bool) -> Apart:
        """That for a save; what was said of saves before the last one is removed."""
        found = Apart(
            temporary=temporary,
            process=self._process,
            count=self._count,
            timeout_secs=self._timeout_secs,
            board=self._board,
            fsync=fsync,
        )
        if self._process == 0:
            # Whoever has a part of the last one has done with those before.
            self._former.append(found.key)
            while len(self._former) > 3:
                self._board.delete(self._former.pop(0))
        return found
