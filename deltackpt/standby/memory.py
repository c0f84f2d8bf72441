# SPDX-License-Identifier: Apache-2.0
"""Shared memory that other processes of the machine read while its owner changes it.

The memory has no name (``memfd``): it goes when its owner and its last reader do, whatever kills
them, and is not bounded by the size of ``/dev/shm``. A reader on the same machine opens it through
its owner's descriptor and copies straight into its own buffers.

A sequence number tells whole contents from half-written ones: it is odd while they change, and a
reader that finds the same even number before and after its copy has copied one consistent state.
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
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._descriptor = os.memfd_create("deltackpt", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _HEADER_BYTES + nbytes)
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

    def begin_write(self) -> None:
        """Says that the contents change from now on; nothing where they do already."""
        self._sequence[0] |= np.uint64(1)

    def end_write(self) -> None:
        """Says that the contents are whole."""
        self._sequence[0] += np.uint64(1)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A part of the memory as an array."""
        return _part(self._bytes, offset, shape, dtype)

    def close(self) -> None:
        """Gives the descriptor back; the memory goes with the last array of it."""
        os.close(self._descriptor)


class MemoryReader:
    """The shared memory of another process, or of this one, to be copied from."""

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
            # Measured 4 GB/s into fresh memory by two threads, against 3 by pread.
            mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._sequence = _sequence(self._bytes)

    @property
    def sequence(self) -> int:
        """As in ``SharedMemory``."""
        return int(self._sequence[0])

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A part of the memory as an array, which its owner may change."""
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
