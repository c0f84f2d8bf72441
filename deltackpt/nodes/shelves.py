# SPDX-License-Identifier: Apache-2.0
"""What a server keeps bytes in: memory of bounded size.

A shelf says where the next bytes of an object belong, and the server receives them straight into
that: they pass no Python object. An object is there whole or not at all; until it is, its room is
taken, and nothing of it is seen.
"""

from __future__ import annotations

import mmap
import secrets
import socket
import threading
from typing import Protocol

import numpy as np

from deltackpt.errors import OutOfSpace
from deltackpt.resources import pages
from deltackpt.storage.store import Exists, Missing

#: Objects from this size on have a mapping of their own.
_MAPPED_BYTES = 1 << 16
#: Of an object beside its bytes, so that many empty ones fill a shelf as well.
_OVERHEAD_BYTES = 1024
#: Memory that was filled before is filled again by what leaves a quarter of it at most.
_LEAST_USED = 0.75


class Incoming(Protocol):
    """An object that is being received, by one thread; ``commit`` or ``discard`` ends it."""

    def window(self) -> memoryview:
        """Where the next bytes belong; empty once all of them came."""
        ...

    def filled(self, nbytes: int) -> None:
        """So many bytes came into the window.

        Raises:
          StorageError: they cannot be kept.
        """
        ...

    def commit(self, *, absent: bool) -> None:
        """Makes a whole object seen; what was under its key is replaced.

        Raises:
          Exists: something is, and ``absent`` was asked for.
          StorageError: it cannot be kept.
        """
        ...

    def discard(self) -> None:
        """Gives its room back."""
        ...


class Held(Protocol):
    """An object that is being read, by one thread; it stays as it is until ``close``.

    Attributes:
      nbytes: of all of it.
      version: what changes with what is under its key.
    """

    nbytes: int
    version: str

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """Sends a range that is in it, or the beginning of it; returns how many bytes."""
        ...

    def close(self) -> None:
        """It is not read any more."""
        ...


class Shelf(Protocol):
    """Objects under keys that ``wire`` takes; every method may be called from several threads."""

    def take(self, key: str, nbytes: int) -> Incoming:
        """Takes room for an object.

        Raises:
          OutOfSpace: there is too little; nothing was taken.
          StorageError: it cannot be kept under that key.
        """
        ...

    def find(self, key: str) -> Held:
        """Opens an object.

        Raises:
          Missing: there is none.
          StorageError: it cannot be read.
        """
        ...

    def keys(self, folder: str, *, after: str, most: int) -> list[str]:
        """The first keys below a folder that come after ``after``, ascending."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; nothing is wrong where there is none."""
        ...

    def close(self) -> None:
        """Ends it; what it holds in memory is gone."""
        ...


class MemoryShelf:
    """Objects in memory of this process, which no other user can read.

    Memory of removed objects is kept for the next ones of about their size, as it is filled at
    several times the rate of fresh memory; it counts as taken only until others need it.
    """

    def __init__(self, nbytes: int):
        """Takes no memory yet.

        Args:
          nbytes: the most that objects, and what is received, take together.
        """
        self._most = nbytes
        self._taken = 0
        self._blocks: dict[str, _Block] = {}
        self._spare: list[_Block] = []
        #: No version of an earlier process is one of this.
        self._versions = secrets.token_hex(8)
        self._number = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """What is left for objects."""
        with self._lock:
            return self._most - self._taken + sum(each.cost for each in self._spare)

    def take(self, key: str, nbytes: int) -> Incoming:
        """See ``Shelf``."""
        block = self._spare_block(nbytes) or self._fresh_block(nbytes)
        return _InMemory(self, key, nbytes, block)

    def find(self, key: str) -> Held:
        """See ``Shelf``."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                raise Missing(key)
            block.readers += 1
            return _FromMemory(self, block)

    def keys(self, folder: str, *, after: str, most: int) -> list[str]:
        """See ``Shelf``."""
        inside = f"{folder}/" if folder else ""
        with self._lock:
            found = [key for key in self._blocks if key.startswith(inside) and key > after]
        return sorted(found)[:most]

    def delete(self, key: str) -> None:
        """See ``Shelf``."""
        with self._lock:
            self._drop(self._blocks.pop(key, None))

    def close(self) -> None:
        """See ``Shelf``."""
        with self._lock:
            self._blocks.clear()
            self._spare.clear()

    def _spare_block(self, nbytes: int) -> _Block | None:
        with self._lock:
            for i, spare in enumerate(self._spare):
                if _LEAST_USED * len(spare.memory) <= nbytes <= len(spare.memory):
                    return self._spare.pop(i)
        return None

    def _fresh_block(self, nbytes: int) -> _Block:
        cost = _cost(nbytes)
        with self._lock:
            while self._spare and self._taken + cost > self._most:
                self._taken -= self._spare.pop(0).cost
            if self._taken + cost > self._most:
                raise OutOfSpace(
                    f"memory: expected room for {nbytes:,} bytes, found "
                    f"{max(0, self._most - self._taken):,} of {self._most:,} left; give it more, "
                    "or remove objects"
                )
            self._taken += cost
        try:
            return _Block(_memory(nbytes), cost)  # It takes its time.
        except OutOfSpace:
            with self._lock:
                self._taken -= cost
            raise

    def commit(self, key: str, block: _Block, nbytes: int, *, absent: bool) -> None:
        """Puts a block under a key; see ``Incoming``."""
        with self._lock:
            if absent and key in self._blocks:
                raise Exists(f"{key}: expected nothing there, found an object")
            self._number += 1
            block.nbytes, block.version = nbytes, f"{self._versions}-{self._number}"
            replaced = self._blocks.get(key)
            self._blocks[key] = block
            self._drop(replaced)

    def give_back(self, block: _Block, *, reader: bool = False) -> None:
        """A block is not received into, or not read, any more."""
        with self._lock:
            block.readers -= reader
            if not reader or (block.dropped and not block.readers):
                self._free(block)

    def _drop(self, block: _Block | None) -> None:
        if block is not None:
            block.dropped = True
            if not block.readers:
                self._free(block)

    def _free(self, block: _Block) -> None:
        block.dropped = False
        if len(block.memory) >= _MAPPED_BYTES:
            self._spare.append(block)
        else:
            self._taken -= block.cost


class _Block:
    """Memory of one object.

    Attributes:
      memory: all of it.
      cost: what it counts for.
      nbytes: how much is the object.
      version: of the object.
      readers: how many read it.
      dropped: whether it is given back when nobody does.
    """

    def __init__(self, memory: mmap.mmap | bytearray, cost: int):
        self.memory = memory
        self.cost = cost
        self.nbytes = 0
        self.version = ""
        self.readers = 0
        self.dropped = False


def _cost(nbytes: int) -> int:
    padded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE if nbytes >= _MAPPED_BYTES else nbytes
    return padded + _OVERHEAD_BYTES


def _memory(nbytes: int) -> mmap.mmap | bytearray:
    """Memory that no other user can read, and that forked children do not see change."""
    if nbytes < _MAPPED_BYTES:
        return bytearray(nbytes)
    try:
        memory = pages.FreshMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfSpace(
            f"memory: expected {nbytes:,} bytes, found that they cannot be had ({error}); remove "
            "objects, or give the shelf less"
        ) from error
    pages.populate(np.frombuffer(memory, np.uint8))
    return memory


class _InMemory:
    def __init__(self, shelf: MemoryShelf, key: str, nbytes: int, block: _Block):
        self._shelf, self._key, self._nbytes, self._block = shelf, key, nbytes, block
        self._left = memoryview(block.memory)[:nbytes]

    def window(self) -> memoryview:
        """See ``Incoming``."""
        return self._left

    def filled(self, nbytes: int) -> None:
        """See ``Incoming``."""
        self._left = self._left[nbytes:]

    def commit(self, *, absent: bool) -> None:
        """See ``Incoming``."""
        self._shelf.commit(self._key, self._block, self._nbytes, absent=absent)

    def discard(self) -> None:
        """See ``Incoming``."""
        self._left = self._left[:0]
        self._shelf.give_back(self._block)


class _FromMemory:
    def __init__(self, shelf: MemoryShelf, block: _Block):
        self._shelf, self._block = shelf, block
        self.nbytes, self.version = block.nbytes, block.version
        self._memory = memoryview(block.memory)

    def send(self, connection: socket.socket, start: int, nbytes: int) -> int:
        """See ``Held``."""
        return connection.send(self._memory[start : start + nbytes])

    def close(self) -> None:
        """See ``Held``."""
        self._shelf.give_back(self._block, reader=True)
