# SPDX-License-Identifier: Apache-2.0
"""Shared memory that other processes of the machine read while its owner changes it.

The memory has no name (``memfd``): it goes when its owner and its last reader do, whatever kills
them, and is not bounded by the size of ``/dev/shm``. A reader on the same machine opens it through
its owner's descriptor and maps it copy-on-write: the mapping is the reader's own, for as long as it
wants, and costs a copy only of the pages that the reader writes to. Nothing is mapped in before it
is touched: of 1.04 GB that took 0.16 s, against 0.09 s that the first reading then took longer.

A sequence number tells whole contents from half-written ones: it is odd while they change. A reader
that has mapped the memory and then finds the number even may keep what it sees: the owner makes the
number odd first and then asks the kernel whether anybody has the memory open, a mapping of a killed
process not among them; where somebody has, it leaves that memory alone and changes a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from deltackpt.resources import memory
from deltackpt.standby import leases

_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
_SEQUENCE_BYTES = 8


@dataclasses.dataclass(frozen=True)
class MemoryAddress:
    """Where a process of the same machine finds some shared memory.

    Attributes:
      machine: what two processes must have in common to open each other's descriptors.
      pid: the owner.
      descriptor: the owner's descriptor.
      token: what the memory begins with: a later process may have the same numbers.
    """

    machine: str
    pid: int
    descriptor: int
    token: str


class SharedMemory:
    """Shared memory of this process, zero at first."""

    def __init__(self, nbytes: int):
        """Makes it; the pages are taken when they are first written.

        Args:
          nbytes: size, without the header.
        """
        self.nbytes = nbytes
        self._handed = False
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create("deltackpt", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _HEADER_BYTES + nbytes)
        # Of its own: a lease is granted to who reads, and only while nobody else has it open.
        self._leased = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        mapping = mmap.mmap(self._descriptor, _HEADER_BYTES + nbytes)
        memory.advise_huge_pages(mapping)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._bytes[:_TOKEN_BYTES] = np.frombuffer(self._token, np.uint8)
        self._sequence = _sequence(self._bytes)
        self._sequence[0] = 1  # Nothing was written yet.

    @property
    def place(self) -> MemoryAddress:
        """Where others find it."""
        return MemoryAddress(machine(), os.getpid(), self._descriptor, self._token.hex())

    @property
    def sequence(self) -> int:
        """Odd while the contents change."""
        return int(self._sequence[0])

    def hand_over(self) -> None:
        """Says that readers may keep their mappings from now on."""
        self._handed = True

    def begin_write(self) -> bool:
        """Says that the contents change from now on; nothing where they do already.

        Returns:
          Whether they may: False where a reader keeps a mapping, and nothing has changed.
        """
        before = self._sequence[0]
        self._sequence[0] |= np.uint64(1)
        # Only now: who maps it later finds the odd number.
        if not self._handed or not leases.is_open_elsewhere(self._leased):
            return True
        self._sequence[0] = before
        return False

    def end_write(self) -> None:
        """Says that the contents are whole."""
        self._sequence[0] += np.uint64(1)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A part of the memory as an array."""
        return _part(self._bytes, offset, shape, dtype)

    def copy_from(self, other: SharedMemory) -> None:
        """Takes all bytes of another one of the same size, and goes on from its sequence."""
        self._bytes[_HEADER_BYTES:] = other._bytes[_HEADER_BYTES:]
        self._sequence[0] = other._sequence[0] | np.uint64(1)

    def close(self) -> None:
        """Gives the descriptors back; the memory goes with the last array of it."""
        os.close(self._leased)
        os.close(self._descriptor)


class MemoryReader:
    """The shared memory of another process, or of this one, mapped copy-on-write."""

    def __init__(self, place: MemoryAddress):
        """Opens it.

        Raises:
          OSError: the owner is on another machine, in another container, or gone.
        """
        if place.machine != machine():
            raise OSError(f"the memory of process {place.pid} is on another machine")
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY)
        try:
            if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != place.token:
                raise OSError(f"process {place.pid} has other memory there")
            header = mmap.mmap(descriptor, _HEADER_BYTES, prot=mmap.PROT_READ)
            mapping = mmap.mmap(
                descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._sequence = _sequence(np.frombuffer(header, np.uint8))

    @property
    def sequence(self) -> int:
        """As in ``SharedMemory``."""
        return int(self._sequence[0])

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A part of the memory as an array, which may be written to, unseen by the owner.

        It is the caller's for good where ``sequence`` is found unchanged afterwards, and the owner
        was told by ``hand_over`` before the memory was mapped.
        """
        return _part(self._bytes, offset, shape, dtype)


def _sequence(memory: np.ndarray) -> np.ndarray:
    return memory[_TOKEN_BYTES:][:_SEQUENCE_BYTES].view(np.uint64)


def _part(memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    start = _HEADER_BYTES + offset
    return memory[start : start + size].view(dtype).reshape(shape)


@functools.cache
def machine() -> str:
    """What two processes have in common that can open each other's descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
